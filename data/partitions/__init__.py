"""Partitions: the rows of each client, from labels and a seed.

Short kinds are in `_draw`, longer ones have a file. Proxy rows are set aside before a
partition is drawn and test rows after it, in the same way for all kinds but `file`,
which names both.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from data import dataset, labels
from data.partitions import (
    cdkt,
    classes,
    client_dirichlet,
    dirichlet,
    file,
    held_out,
    parts,
    pathological,
    pfllib,
)
from fedjax_pfl import options, rng, shapes, types

PARTITIONS = {
    "iid": "equal random parts",
    "contiguous": "equal runs of rows, in their order",
    "dirichlet": "per class, fractions ~ Dir(alpha) over clients below an equal share",
    "client_dirichlet": "per client, class mix ~ Dir(alpha), equal sizes",
    "pathological": "classes_per_client classes for each client, shared equally",
    "classes": "client_classes for each client, a class in equal parts",
    "cdkt": "the generator of the released CDKT code (50 users, first num_clients)",
    "cdkt_code": "as cdkt, with images in the order of their files, as that code has",
    "cdkt_paper": "sizes drawn in this way, but random classes as in the CDKT paper",
    "pfllib_dirichlet": "as dirichlet, with the rows of PFLlib's clients",
    "pfllib_pathological": "classes_per_client classes, with the rows of PFLlib's",
    "natural": "the owners of the rows, where the data name them",
    "file:PATH": "the rows of each client in an npz file (--export_partition)",
}
# Those whose clients have sizes of their own
SIZED = cdkt.KINDS
DRAWS = client_dirichlet.DRAWS
TEST_SPLITS, Split, note = held_out.TEST_SPLITS, parts.Split, file.note


class PartitionSpec(NamedTuple):
    """Options of a partition, with the names of the flags.

    `proxy_fraction` of every class is set aside first, its last rows after a shuffle,
    or of `contiguous` and `cdkt_code` its last ones in the data. `train_share` of each
    client's train rows are used. `examples_per_client` 0 = all. `cdkt` are the CDKT
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


def _draw(
    source: dataset.Dataset,
    pool: np.ndarray,
    spec: PartitionSpec,
    gen: np.random.Generator | np.random.RandomState,
) -> parts.Parts:
    """Draws positions in `pool` for each client, by the kind of `spec`."""
    labels, count = source.label[pool], spec.num_clients
    alpha, draw = spec.partition_alpha, spec.partition_draw
    common = {"num_clients": count, "gen": gen}
    match spec.partition:
        case "iid" | "contiguous":
            # The first clients get the remainder.
            each, more = divmod(len(pool), count)
            is_random = spec.partition == "iid"
            row = gen.permutation(len(pool)) if is_random else np.arange(len(pool))
            return parts.Parts(row, each + (np.arange(count) < more))
        case "dirichlet":
            common["min_examples"] = spec.min_examples
            return dirichlet.split(labels, alpha=alpha, **common)
        case "client_dirichlet":
            return client_dirichlet.split(labels, alpha=alpha, draw=draw, **common)
        case "pathological":
            common["classes_per_client"] = spec.classes_per_client
            return pathological.split(labels, draw=draw, **common)
        case "classes":
            return classes.split(labels, client_classes=spec.client_classes, gen=gen)
        case "cdkt" | "cdkt_code" | "cdkt_paper":
            return cdkt.split(labels, spec.cdkt, count)
        case "pfllib_dirichlet":
            common["min_examples"] = spec.min_examples
            return pfllib.dirichlet(labels, alpha=alpha, **common)
        case "pfllib_pathological":
            common["classes_per_client"] = spec.classes_per_client
            return pfllib.pathological(labels, **common)
        case "natural":
            # Rows of owners beyond these are unowned.
            owner = source.client[pool]
            position = np.flatnonzero(owner < count)
            return parts.collect(position, owner[position], count)
        case _:
            raise KeyError(spec.partition)


def proxy_rows(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Returns the last n_c - floor((1 - fraction) n_c) positions of each class.

    The CDKT code keeps f = 1 - fraction of each class for the users.
    """
    out = []
    for c in np.unique(labels):
        members = np.flatnonzero(labels == c)
        # Rounded first, because .93 * 500 must be 465, not 464.99999999999994.
        kept = int(np.floor(round((1 - fraction) * len(members), 6)))
        out.append(members[kept:])
    return np.concatenate(out)


def split(source: dataset.Dataset, spec: PartitionSpec, seed: int) -> Split:
    """Partitions a data set for one seed: proxy rows first, then clients, then tests.

    Raises ValueError if a client would have too few examples.
    """
    if spec.partition.startswith(file.PREFIX):
        return _of_file(source, spec)
    gen = rng.generator(seed, "data.partition")
    official = spec.test_split == "official"
    if official and not source.num_test:
        raise ValueError(
            "--test_split=official: this data set has no official test rows; take "
            "client_share, or give your own (docs/data.md#your-own-split)"
        )
    pool, proxy = _pool(source, spec, gen)
    # `_check_owners` names owners that are too small.
    if spec.partition not in (*cdkt.KINDS, "natural"):
        why = f"for --min_examples={spec.min_examples} of {len(pool)}"
        most = len(pool) // spec.min_examples
        options.check_at_most("num_clients", spec.num_clients, most, why)
    if spec.partition in pfllib.KINDS:
        pool, gen = np.sort(pool), np.random.RandomState(seed)
    drawn = _draw(source, pool, spec, gen)
    if spec.partition == "natural":
        _check_owners(drawn.count, source, spec)
    _check_sizes(drawn.count, spec)
    owned = parts.Parts(pool[drawn.row], drawn.count)
    if spec.partition in pfllib.KINDS and spec.test_split == "merged":
        train, test = pfllib.divided(owned, gen)
    else:
        train, test = held_out.split(owned, source.label, spec.test_split, seed)
    train = held_out.first_share(train, source.label, spec.train_share)
    given = parts.Given(test, proxy[:0])
    if official:
        given = _given(source, np.arange(source.num_train, source.num_dealt), spec)
    return Split(train, *given, proxy)


def _of_file(source: dataset.Dataset, spec: PartitionSpec) -> Split:
    """The split of `--partition=file:PATH`, of which clients train a share."""
    found = file.read(spec.partition, source.num_dealt)
    # As where it was drawn, clients that train are judged with their test rows.
    train = found.train.count
    _check_sizes(np.where(train > 0, train + found.test.count, 0), spec)
    train = held_out.first_share(found.train, source.label, spec.train_share)
    return found._replace(train=train)


def _pool(
    source: dataset.Dataset, spec: PartitionSpec, gen: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The rows that clients share, in the order in which they are dealt, and the proxy.

    Raises ValueError if they have too few for `--examples_per_client`.
    """
    is_pooled = spec.test_split in held_out.POOLED
    size = source.num_dealt if is_pooled else source.num_train
    # The rows of a text have neighbours, which stay together.
    in_order = spec.partition in ("contiguous", "cdkt_code") or (
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
        most, why = len(pool) // spec.num_clients, "a part of the data for each client"
        options.check_at_most(
            "examples_per_client", spec.examples_per_client, most, why
        )
        pool = pool[: spec.examples_per_client * spec.num_clients]
    return pool, proxy


def own_validation(source: dataset.Dataset, spec: PartitionSpec) -> parts.Given:
    """The data's own validation rows, whose clients are found as for its test rows."""
    return _given(source, np.arange(source.num_dealt, len(source.label)), spec)


def _given(
    source: dataset.Dataset, row: np.ndarray, spec: PartitionSpec
) -> parts.Given:
    """Divides official rows int64[...] into those of clients and those of nobody.

    Natural clients have the rows that name them as owners. Others have none.
    """
    nobody = np.full(len(row), -1)
    owner = source.client[row] if spec.partition == "natural" else nobody
    # Rows of owners beyond the clients are in no part.
    is_owned = (owner >= 0) & (owner < spec.num_clients)
    owned = parts.collect(row[is_owned], owner[is_owned], spec.num_clients)
    return parts.Given(owned, row[owner < 0])


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
    file.write(pathlib.Path(path).expanduser(), split, of)


def _check_owners(
    sizes: np.ndarray, source: dataset.Dataset, spec: PartitionSpec
) -> None:
    """Refuses owners that are too small, all of them in one line."""
    small = np.flatnonzero(sizes < spec.min_examples)
    if not len(small):
        return
    names, cure = dataset.owner_names(source), ""
    if not source.is_text:
        cure = f"drop them with --min_owner_examples={spec.min_examples} or more, or "
    raise ValueError(
        f"--partition=natural leaves {len(small)} of {spec.num_clients} owners with "
        f"fewer than {spec.min_examples} examples (--min_examples): "
        f"{labels.sized({names[k]: int(sizes[k]) for k in small})}; {cure}lower "
        "--num_clients"
    )


def _check_sizes(sizes: np.ndarray, spec: PartitionSpec) -> None:
    worst = int(sizes.argmin())
    if sizes[worst] >= spec.min_examples:
        return
    kind = spec.partition
    if kind.startswith(file.PREFIX):
        raise ValueError(
            f"--partition={kind} gives client {worst} {sizes[worst]} examples, or none "
            f"to train on; {spec.min_examples} are needed (--min_examples); change it"
        )
    cause, cure = {
        "client_dirichlet": (f"--num_clients={spec.num_clients}", ""),
        "pathological": (f"--num_clients={spec.num_clients}", ""),
        "classes": ("--client_classes", "give it another class or "),
    }.get(spec.partition, (f"--partition={spec.partition}", "take another one or "))
    raise ValueError(
        f"{cause} leaves client {worst} with {sizes[worst]} examples, "
        f"{spec.min_examples} are needed (--min_examples); {cure}lower --num_clients"
    )


def _padded(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Stacks rows to int32[seeds, length], with -1 behind them."""
    out = np.full((len(rows), length), -1, np.int32)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out


def _client_rows(
    seeds: Sequence[parts.Parts], rows: Sequence[np.ndarray]
) -> types.ClientRows:
    """Stacks the seeds' parts, with `rows` padded to a power of two."""
    return types.ClientRows(
        row=_padded(rows, shapes.rounded_up(max(1, *map(len, rows)))),
        start=np.stack([one.start for one in seeds]).astype(np.int32),
        count=np.stack([one.count for one in seeds]).astype(np.int32),
    )


def with_validation(
    split: Split, source: dataset.Dataset, share: float, seed: int
) -> tuple[Split, parts.Given]:
    """Returns (the split without them, validation rows), see `held_out.validation`."""
    train, val = held_out.validation(split.train, source.label, share, seed)
    return split._replace(train=train), parts.Given(val, val.row[:0])


def without_unseen(split: Split, unseen: np.ndarray) -> tuple[Split, parts.Parts]:
    """Returns (the split without train rows of clients `unseen` bool[K], these)."""
    others, train = split.train.divided(unseen[split.train.owner])
    return split._replace(train=train), others


def stack(
    splits: Sequence[Split],
    vals: Sequence[parts.Given] = (),
    unseen: Sequence[parts.Parts] = (),
) -> types.Partition:
    """Stacks splits to a `types.Partition` of numpy arrays with seeds as first axis.

    `vals` are the validation rows of each seed, and `unseen` the train rows of clients
    that never train, if there are any.
    """

    def stacked(some: Sequence[parts.Parts]) -> Any:
        return _client_rows(some, [one.row for one in some]) if some else ()

    def measured(some: Sequence[parts.Given]) -> Any:
        rows = [np.concatenate([one.owned.row, one.others]) for one in some]
        return _client_rows([one.owned for one in some], rows) if some else ()

    train, test, official, proxy = zip(*splits, strict=True)
    return types.Partition(
        train=stacked(train),
        test=measured(list(map(parts.Given, test, official))),
        proxy=_padded(proxy, max(map(len, proxy))),
        val=measured(vals),
        unseen=stacked(unseen),
    )
