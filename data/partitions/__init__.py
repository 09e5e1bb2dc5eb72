"""Partitions: from labels to the rows of each client.

Every function takes the labels of a pool and returns one array of pool positions per
client; a partition is a function of its seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data import dataset
from data.partitions import cdkt, client_dirichlet
from fedjax_pfl import rng, types

PARTITIONS = {
    "iid": "equal random parts",
    "dirichlet": "per class, shares over clients ~ Dir(alpha), sizes capped",
    "client_dirichlet": "per client, class mix ~ Dir(alpha), equal sizes",
    "pathological": "classes_per_client classes for each client, in equal shards",
    "cdkt": "the generator of the released CDKT code (50 users, first num_clients)",
    "cdkt_paper": "the same sizes, but random classes as the CDKT paper says",
    "natural": "the client ids of an npz data set",
}
DRAWS = client_dirichlet.DRAWS
TEST_SPLITS = ("pool", "pool_stratified", "client_share", "official")
MAX_TRIES = 200


class PartitionSpec(NamedTuple):
    """How to split; the names are the flags'.

    `proxy_fraction` of every class is set aside first; `examples_per_client` 0 = all.
    `kind` of the CDKT generator is in `cdkt`.
    """

    partition: str
    num_clients: int
    partition_alpha: float = 0.5
    partition_draw: str = "ipf"
    classes_per_client: int = 2
    min_examples: int = 2
    examples_per_client: int = 0
    test_split: str = "client_share"
    proxy_fraction: float = 0.0
    cdkt: cdkt.Protocol | None = None


class Split(NamedTuple):
    """Rows of the table for one seed: per client, and those of nobody."""

    train: list[np.ndarray]
    test: list[np.ndarray]
    official_test: np.ndarray
    proxy: np.ndarray


def iid(labels: np.ndarray, spec: PartitionSpec, gen: np.random.Generator) -> list:
    """Random equal parts; the first clients get the remainder."""
    return np.array_split(gen.permutation(len(labels)), spec.num_clients)


def dirichlet(
    labels: np.ndarray, spec: PartitionSpec, gen: np.random.Generator
) -> list:
    """Per class, Dir(alpha) shares over clients; full clients (N / K) get none.

    Redrawn until every client has `min_examples`, at most `MAX_TRIES` times.
    """
    num_clients, cap = spec.num_clients, len(labels) / spec.num_clients
    classes = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    for _ in range(MAX_TRIES):
        parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
        size = np.zeros(num_clients, int)
        for members in classes:
            share = gen.dirichlet(np.full(num_clients, spec.partition_alpha))
            share = np.where(size < cap, share, 0)
            if not np.isfinite(share).all() or share.sum() <= 0:
                share = (size < cap).astype(float)
            # Divided by its own last entry: exactly 1 after the last open client.
            total = np.cumsum(share)
            cuts = np.floor(total[:-1] / total[-1] * len(members))
            pieces = np.split(gen.permutation(members), cuts.astype(int))
            for client, piece in enumerate(pieces):
                parts[client].append(piece)
                size[client] += len(piece)
        if size.min() >= spec.min_examples:
            break
    return [gen.permutation(np.concatenate(part)) for part in parts]


def _client_dirichlet(
    labels: np.ndarray, spec: PartitionSpec, gen: np.random.Generator
) -> list:
    return client_dirichlet.split(
        labels,
        num_clients=spec.num_clients,
        alpha=spec.partition_alpha,
        draw=spec.partition_draw,
        gen=gen,
    )


def pathological(
    labels: np.ndarray, spec: PartitionSpec, gen: np.random.Generator
) -> list:
    """Exactly k different classes for each client, in shards of one class each."""
    num_clients, per_client = spec.num_clients, spec.classes_per_client
    classes, supply = np.unique(labels, return_counts=True)
    if per_client > len(classes):
        raise ValueError(
            f"--classes_per_client={per_client}: the data have {len(classes)} classes"
        )
    num_shards = num_clients * per_client
    # Shards per class by largest remainder, at most one per client.
    want = supply * (num_shards / supply.sum())
    count = np.minimum(np.floor(want).astype(int), num_clients)
    while count.sum() < num_shards:
        room = np.where(count < num_clients, want - count, -np.inf)
        count[int(room.argmax())] += 1
    owner_of_class: list[list[int]] = []
    need = np.full(num_clients, per_client)
    # Most shards first, to the clients that need most: never stuck (Gale-Ryser).
    order = np.argsort(-count, kind="stable")
    for c in order:
        chosen = np.lexsort((gen.random(num_clients), -need))[: count[c]]
        need[chosen] -= 1
        owner_of_class.append(chosen.tolist())
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for c, owners in zip(order, owner_of_class, strict=True):
        if not owners:
            continue
        members = gen.permutation(np.flatnonzero(labels == classes[c]))
        for owner, piece in zip(
            owners, np.array_split(members, len(owners)), strict=True
        ):
            parts[owner].append(piece)
    return [gen.permutation(np.concatenate(part)) for part in parts]


def _cdkt(labels: np.ndarray, spec: PartitionSpec, gen: np.random.Generator) -> list:
    return cdkt.users(labels, spec.cdkt, spec.num_clients)


_FUNCTIONS = {
    "iid": iid,
    "dirichlet": dirichlet,
    "client_dirichlet": _client_dirichlet,
    "pathological": pathological,
    "cdkt": _cdkt,
    "cdkt_paper": _cdkt,
}


def proxy_rows(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Positions of the last `fraction` of each class: n_c - floor((1 - fraction) n_c).

    Eq.: the CDKT code keeps f = 1 - fraction of each class for the users.
    """
    out = []
    for c in np.unique(labels):
        members = np.flatnonzero(labels == c)
        # Rounded first: (1 - .005) * 200 must be 199, not 198.99999.
        kept = int(np.floor(round((1 - fraction) * len(members), 6)))
        out.append(members[kept:])
    return np.concatenate(out)


def _split_client(
    rows: np.ndarray, labels: np.ndarray, kind: str, gen: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(train, test) rows of one client; disjoint, together all of `rows`."""
    if kind == "official":
        return rows, rows[:0]
    rows = gen.permutation(rows)
    if kind == "client_share":
        num_test = int(0.2 * len(rows) + 1e-9)
        return rows[num_test:], rows[:num_test]
    num_train = int(0.8 * len(rows) + 1e-9)
    if kind == "pool":
        return rows[:num_train], rows[num_train:]
    # Stratified: train rows per class by largest remainder, num_train in all.
    classes, inverse = np.unique(labels[rows], return_inverse=True)
    share = np.bincount(inverse) * (num_train / len(rows))
    take = np.floor(share).astype(int)
    for c in np.argsort(take - share, kind="stable")[: num_train - take.sum()]:
        take[c] += 1
    is_train = np.zeros(len(rows), bool)
    for c in range(len(classes)):
        is_train[np.flatnonzero(inverse == c)[: take[c]]] = True
    return rows[is_train], rows[~is_train]


def split(source: dataset.Dataset, spec: PartitionSpec, seed: int) -> Split:
    """Partitions a table for one seed: proxy rows first, then clients, then tests.

    Args:
        source: The data set.
        spec: What to do.
        seed: The partition's seed.

    Raises:
        ValueError: a client would be left with too few examples.
    """
    gen = rng.generator(seed, rng.Tag.PARTITION)
    official = spec.test_split == "official"
    if official and source.num_train == len(source.label):
        raise ValueError(
            "--test_split=official: this data set has no official test rows; "
            "take client_share or pool"
        )
    merged = spec.test_split in ("pool", "pool_stratified")
    size = len(source.label) if merged else source.num_train
    pool = gen.permutation(size)
    proxy = pool[:0]
    if spec.proxy_fraction:
        # Shuffled: proxy batches have a fixed order, and one class each otherwise.
        chosen = proxy_rows(source.label[pool], spec.proxy_fraction)
        proxy = pool[gen.permutation(chosen)]
        pool = np.setdiff1d(pool, proxy, assume_unique=True)
        pool = gen.permutation(pool)
    if spec.examples_per_client and spec.partition != "natural":
        wanted = spec.examples_per_client * spec.num_clients
        if wanted > len(pool):
            raise ValueError(
                f"--examples_per_client={spec.examples_per_client} for "
                f"--num_clients={spec.num_clients} needs {wanted} examples, there are "
                f"{len(pool)}; lower one of them"
            )
        pool = pool[:wanted]
    labels = source.label[pool]
    too_few = len(pool) < spec.min_examples * spec.num_clients
    if too_few and not spec.partition.startswith("cdkt"):
        raise ValueError(
            f"--num_clients={spec.num_clients}: {len(pool)} examples are too few, "
            f"{spec.min_examples} for each client are needed; lower it"
        )
    if spec.partition == "natural":
        owner = source.client[pool]
        parts = [np.flatnonzero(owner == k) for k in range(spec.num_clients)]
    else:
        parts = _FUNCTIONS[spec.partition](labels, spec, gen)
    _check_sizes([len(part) for part in parts], spec)
    train, test = [], []
    for client, part in enumerate(parts):
        split_gen = rng.generator(seed, rng.Tag.SPLIT, client)
        one = _split_client(pool[part], source.label, spec.test_split, split_gen)
        train.append(one[0])
        test.append(one[1])
    tail = np.arange(source.num_train, len(source.label))
    return Split(train, test, tail if official else tail[:0], proxy)


def _check_sizes(sizes: Sequence[int], spec: PartitionSpec) -> None:
    worst = int(np.argmin(sizes))
    if sizes[worst] >= spec.min_examples:
        return
    cause, cure = {
        "dirichlet": (f"--partition_alpha={spec.partition_alpha:g}", "raise it"),
        "client_dirichlet": (f"--num_clients={spec.num_clients}", "lower it"),
        "pathological": (f"--num_clients={spec.num_clients}", "lower it"),
        "natural": ("--partition=natural", "drop that client"),
    }.get(spec.partition, (f"--partition={spec.partition}", "take another one"))
    raise ValueError(
        f"{cause} leaves client {worst} with {sizes[worst]} examples, "
        f"{spec.min_examples} are needed (--min_examples); {cure} or lower "
        "--num_clients"
    )


def _client_rows(
    parts: Sequence[Sequence[np.ndarray]], tails: Sequence[np.ndarray]
) -> types.ClientRows:
    """Stacks the seeds' rows, flat in client order, padded to the longest."""
    flats = [
        np.concatenate([*seed, tail]) for seed, tail in zip(parts, tails, strict=True)
    ]
    longest = max(1, max(len(flat) for flat in flats))
    count = np.array([[len(rows) for rows in seed] for seed in parts], np.int32)
    row = np.full((len(flats), longest), -1, np.int32)
    for seed, flat in enumerate(flats):
        row[seed, : len(flat)] = flat
    start = np.cumsum(count, axis=1, dtype=np.int32) - count
    return types.ClientRows(row=row, start=start.astype(np.int32), count=count)


def stack(splits: Sequence[Split]) -> types.Partition:
    """One `types.Partition` of numpy arrays with a leading axis of seeds."""
    empty = [split.proxy[:0] for split in splits]
    longest = max(len(split.proxy) for split in splits)
    proxy = np.full((len(splits), longest), -1, np.int32)
    for seed, one in enumerate(splits):
        proxy[seed, : len(one.proxy)] = one.proxy
    return types.Partition(
        train=_client_rows([split.train for split in splits], empty),
        test=_client_rows(
            [split.test for split in splits],
            [split.official_test for split in splits],
        ),
        proxy=proxy,
    )
