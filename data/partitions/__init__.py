"""Partitions: the rows of each client, from labels and a seed.

Each kind has a file. All kinds set aside proxy rows before and test rows after it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from data import dataset, labels
from data.partitions import (
    cdkt,
    classes,
    client_dirichlet,
    contiguous,
    dirichlet,
    file,
    held_out,
    iid,
    natural,
    parts,
    pathological,
)
from fedjax_pfl import options, rng, shapes, types

PARTITIONS = {
    "iid": "equal random parts",
    "contiguous": "equal runs of rows, in their order",
    "dirichlet": "per class, fractions over clients ~ Dir(alpha), sizes capped",
    "client_dirichlet": "per client, class mix ~ Dir(alpha), equal sizes",
    "pathological": "classes_per_client classes for each client, in equal shards",
    "classes": "client_classes for each client, a class in equal parts",
    "cdkt": "the generator of the released CDKT code (50 users, first num_clients)",
    "cdkt_paper": "the same sizes, but random classes as in the CDKT paper",
    "natural": "the client ids of an npz data set, or the owners of a text",
    "file:PATH": "the rows of each client in an npz file (--export_partition)",
}
DRAWS = client_dirichlet.DRAWS
TEST_SPLITS = held_out.TEST_SPLITS


class PartitionSpec(NamedTuple):
    """Options of a partition, with the names of the flags.

    `proxy_fraction` of every class is set aside first, and `train_share` of each
    client's train rows are used. `examples_per_client` 0 = all. `cdkt` are the
    generator's options.
    """

    partition: str
    num_clients: int
    partition_alpha: float = 0.5
    partition_draw: str = "ipf"
    classes_per_client: int = 2
    client_classes: tuple[tuple[int, ...], ...] = ()
    min_examples: int = 2
    examples_per_client: int = 0
    test_split: str = "client_share"
    proxy_fraction: float = 0.0
    train_share: float = 1.0
    cdkt: cdkt.Protocol | None = None


class Split(NamedTuple):
    """Rows of one seed by client, and unowned int64 `official_test` and `proxy`."""

    train: parts.Parts
    test: parts.Parts
    official_test: np.ndarray
    proxy: np.ndarray


def _draw(
    source: dataset.Dataset,
    pool: np.ndarray,
    spec: PartitionSpec,
    gen: np.random.Generator,
) -> parts.Parts:
    """Draws positions in `pool` for each client, by the kind of `spec`."""
    labels, num_clients = source.label[pool], spec.num_clients
    kinds: dict[str, Callable[[], parts.Parts]] = {
        "iid": lambda: iid.split(len(pool), num_clients, gen),
        "contiguous": lambda: contiguous.split(len(pool), num_clients),
        "dirichlet": lambda: dirichlet.split(
            labels,
            num_clients=num_clients,
            alpha=spec.partition_alpha,
            min_examples=spec.min_examples,
            gen=gen,
        ),
        "client_dirichlet": lambda: client_dirichlet.split(
            labels,
            num_clients=num_clients,
            alpha=spec.partition_alpha,
            draw=spec.partition_draw,
            gen=gen,
        ),
        "pathological": lambda: pathological.split(
            labels,
            num_clients=num_clients,
            classes_per_client=spec.classes_per_client,
            draw=spec.partition_draw,
            gen=gen,
        ),
        "classes": lambda: classes.split(
            labels, client_classes=spec.client_classes, gen=gen
        ),
        "cdkt": lambda: cdkt.split(labels, spec.cdkt, num_clients),
        "cdkt_paper": lambda: cdkt.split(labels, spec.cdkt, num_clients),
        "natural": lambda: natural.split(source.client[pool], num_clients),
    }
    return kinds[spec.partition]()


def proxy_rows(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Returns the last n_c - floor((1 - fraction) n_c) positions of each class.

    The CDKT code keeps f = 1 - fraction of each class for the users.
    """
    out = []
    for c in np.unique(labels):
        members = np.flatnonzero(labels == c)
        # Rounded first, because (1 - .005) * 200 must be 199, not 198.99999.
        kept = int(np.floor(round((1 - fraction) * len(members), 6)))
        out.append(members[kept:])
    return np.concatenate(out)


def split(source: dataset.Dataset, spec: PartitionSpec, seed: int) -> Split:
    """Partitions a data set for one seed: proxy rows first, then clients, then tests.

    Raises ValueError if a client would have too few examples.
    """
    if spec.partition.startswith(file.PREFIX):
        return _from_file(source, spec)
    gen = rng.generator(seed, "data.partition")
    official = spec.test_split == "official"
    if official and source.num_train == len(source.label):
        raise ValueError(
            "--test_split=official: this data set has no official test rows; take "
            "client_share, or give test=(x, y) from Python"
        )
    merged = spec.test_split in ("pool", "pool_stratified")
    size = len(source.label) if merged else source.num_train
    # The rows of a text have neighbours, which stay together.
    in_order = spec.partition == "contiguous" or (
        source.is_text and spec.partition == "natural"
    )
    pool = np.arange(size) if in_order else gen.permutation(size)
    proxy = pool[:0]
    if spec.proxy_fraction:
        # Shuffled, because batches of proxy rows would otherwise have one class each.
        chosen = proxy_rows(source.label[pool], spec.proxy_fraction)
        proxy = pool[gen.permutation(chosen)]
        pool = np.setdiff1d(pool, proxy, assume_unique=True)
        pool = np.sort(pool) if in_order else gen.permutation(pool)
    if spec.partition == "classes":
        classes.check(spec.client_classes, source.num_classes)
        # Other classes are unowned, so `examples_per_client` must not count them.
        pool = pool[classes.named(source.label[pool], spec.client_classes)]
    if spec.examples_per_client:
        wanted = spec.examples_per_client * spec.num_clients
        options.check_at_most(
            *("examples_per_client", spec.examples_per_client),
            *(len(pool) // spec.num_clients, "a part of the data for each client"),
        )
        pool = pool[:wanted]
    # `_check_owners` names owners that are too small.
    if spec.partition not in ("cdkt", "cdkt_paper", "natural"):
        options.check_at_most(
            *("num_clients", spec.num_clients, len(pool) // spec.min_examples),
            f"for --min_examples={spec.min_examples} of {len(pool)}",
        )
    drawn = _draw(source, pool, spec, gen)
    if spec.partition == "natural":
        _check_owners(drawn.count, source, spec)
    _check_sizes(drawn.count, spec)
    owned = parts.Parts(pool[drawn.row], drawn.count)
    train, test = held_out.split(owned, source.label, spec.test_split, seed)
    train = held_out.first_share(train, source.label, spec.train_share)
    tail = np.arange(source.num_train, len(source.label))
    return Split(train, test, tail if official else tail[:0], proxy)


def _from_file(source: dataset.Dataset, spec: PartitionSpec) -> Split:
    """Reads the split in a file, the same for all seeds."""
    rows = file.read(spec.partition, len(source.label))
    _check_sizes(rows.train.count, spec)
    split = Split(*rows)
    train = held_out.first_share(split.train, source.label, spec.train_share)
    return split._replace(train=train)


def export(
    split: Split,
    path: str,
    of: file.Identity | None = None,
    row: np.ndarray | None = None,
) -> None:
    """Writes a split of the data set `of` to a file for `--partition=file:PATH`.

    Without `of`, the file does not name its data. `row` int64[N] has the number in `of`
    of each row that `split` names, None = the same. Raises OSError if it cannot be
    written.
    """
    if row is not None:
        train, test = (one._replace(row=row[one.row]) for one in split[:2])
        split = Split(train, test, *(row[one] for one in split[2:]))
    file.write(pathlib.Path(path).expanduser(), file.Rows(*split), of)


def note(partition: str, of: file.Identity) -> str:
    """Describes a partition file that may be for other data, or "".

    Raises a one-line ValueError if it is for other data.
    """
    return file.note(partition, of) if partition.startswith(file.PREFIX) else ""


def _check_owners(
    sizes: np.ndarray, source: dataset.Dataset, spec: PartitionSpec
) -> None:
    """Refuses owners that are too small, all of them in one line."""
    small = np.flatnonzero(sizes < spec.min_examples)
    names = dataset.owner_names(source)
    if not len(small):
        return
    cure = "lower --num_clients"
    if not source.is_text:
        cure = f"drop them with --min_owner_examples={spec.min_examples} or more, or "
        cure += "lower --num_clients"
    raise ValueError(
        f"--partition=natural leaves {len(small)} of {spec.num_clients} owners with "
        f"fewer than {spec.min_examples} examples (--min_examples): "
        f"{labels.sized({names[k]: int(sizes[k]) for k in small})}; {cure}"
    )


def _check_sizes(sizes: np.ndarray, spec: PartitionSpec) -> None:
    worst = int(sizes.argmin())
    if sizes[worst] >= spec.min_examples:
        return
    kind = spec.partition
    if kind.startswith(file.PREFIX):
        raise ValueError(
            f"--partition={kind} gives client {worst} {sizes[worst]} train examples, "
            f"{spec.min_examples} are needed (--min_examples); change the file"
        )
    cause, cure = {
        "client_dirichlet": (f"--num_clients={spec.num_clients}", "lower it"),
        "pathological": (f"--num_clients={spec.num_clients}", "lower it"),
        "classes": ("--client_classes", "give it another class"),
    }.get(spec.partition, (f"--partition={spec.partition}", "take another one"))
    raise ValueError(
        f"{cause} leaves client {worst} with {sizes[worst]} examples, "
        f"{spec.min_examples} are needed (--min_examples); {cure} or lower "
        "--num_clients"
    )


def _client_rows(
    seeds: Sequence[parts.Parts], tails: Sequence[np.ndarray]
) -> types.ClientRows:
    """Stacks the seeds' rows, padded to a power of two, with unowned tails."""
    flats = [
        np.concatenate([one.row, tail]) for one, tail in zip(seeds, tails, strict=True)
    ]
    length = shapes.rounded_up(max(1, *map(len, flats)))
    row = np.full((len(flats), length), -1, np.int32)
    for seed, flat in enumerate(flats):
        row[seed, : len(flat)] = flat
    return types.ClientRows(
        row=row,
        start=np.stack([one.start for one in seeds]).astype(np.int32),
        count=np.stack([one.count for one in seeds]).astype(np.int32),
    )


def stack(splits: Sequence[Split]) -> types.Partition:
    """Stacks splits to a `types.Partition` of numpy arrays with seeds as first axis."""
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
