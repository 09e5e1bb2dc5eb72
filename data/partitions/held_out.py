"""Rows that a client does not train on: its test rows, and what `train_share` drops."""

import numpy as np

from data import shuffle
from data.partitions import parts
from fedjax_pfl import rng

# Those whose clients also have official test rows
POOLED = ("pool", "pool_stratified", "merged")
TEST_SPLITS = (*POOLED, "client_share", "official")


def split(
    owned: parts.Parts, labels: np.ndarray, kind: str, seed: int
) -> tuple[parts.Parts, parts.Parts]:
    """Splits the rows of each client into (train, test).

    A client's rows are shuffled by words derived from (seed, client, position). Those
    of a text stay in order, and `client_share` tests on what is left after floor(.9 n).

    Args:
        owned: Rows of the data set.
        labels: int[rows of the data set], or of a text int[rows, T].
        kind: One of `TEST_SPLITS`: `client_share` tests on floor(.2 n) rows, `pool`
            trains on floor(.8 n), `pool_stratified` does so with the same class mix,
            `merged` trains on floor(.75 n), and `official` on all. PFLlib's partitions
            have their own draw of `merged`, see `pfllib.divided`.
    """
    if kind == "official":
        return owned, parts.Parts(owned.row[:0], np.zeros_like(owned.count))
    is_text = labels.ndim > 1
    if is_text and kind != "client_share":
        raise ValueError(
            f"--test_split={kind} shuffles the rows of a text; take client_share"
        )
    if not is_text:
        owned = owned._replace(row=owned.row[_shuffled(owned, seed, "data.split")])
    share = 0.9 if is_text else 0.75 if kind == "merged" else 0.8
    num_train = np.floor(share * owned.count + 1e-9).astype(int)
    is_train = owned.place < np.repeat(num_train, owned.count)
    if kind == "pool_stratified":
        is_train = _stratified(owned, labels[owned.row], num_train)
    elif kind == "client_share" and not is_text:
        num_test = np.floor(0.2 * owned.count + 1e-9).astype(int)
        is_train = owned.place >= np.repeat(num_test, owned.count)
    return owned.divided(is_train)


def validation(
    owned: parts.Parts, labels: np.ndarray, share: float, seed: int
) -> tuple[parts.Parts, parts.Parts]:
    """Splits the train rows of each client into (train, validation).

    Of n rows floor(share * n) validate, with the class mix of the n rows, and each row
    with the same chance. They are drawn by (seed, client, position) under names of
    their own, so that test rows and shuffles of batches do not change. Of a text they
    are the last rows in order. The train rows keep their order.

    Args:
        owned: The train rows.
        labels: int[rows of the data set], or of a text int[rows, T].
        share: In [0, 1).
        seed: The partition's seed.
    """
    held = np.floor(share * owned.count + 1e-9).astype(int)
    if labels.ndim > 1:
        is_train = owned.place < np.repeat(owned.count - held, owned.count)
    else:
        is_train = ~_systematic(owned, labels[owned.row], held, seed)
    return owned.divided(is_train)


def first_share(owned: parts.Parts, labels: np.ndarray, share: float) -> parts.Parts:
    """Keeps the first rows of each class of each client, in their order.

    Of n rows it keeps share * n, rounded up, for a share in (0, 1]. A smaller share is
    thus part of a larger one, and no class is lost. `labels` cover the whole data set.
    """
    if share == 1:
        return owned
    label, owner = labels[owned.row], owned.owner
    order, begin, size = _groups(owner, label)
    # Rounded first, because .07 * 100 must be 7, not 7.0000000000000009.
    num_used = np.maximum(np.ceil(np.round(share * size, 6)), 1)
    return owned.divided(_first(order, begin, size, num_used))[0]


def _groups(
    owner: np.ndarray, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups the rows of each client and class, for an owner int[N] and a label int[N].

    Returns (the rows int[N] group by group, each in the rows' order; where each group
    begins, int[G]; its size, int[G]).
    """
    order = np.lexsort((label, owner))
    is_first = np.ones(len(order), bool)
    is_first[1:] = (np.diff(owner[order]) != 0) | (np.diff(label[order]) != 0)
    begin = np.flatnonzero(is_first)
    return order, begin, np.diff(begin, append=len(order))


def _shuffled(owned: parts.Parts, seed: int, name: str) -> np.ndarray:
    """int64[N]: the places of all rows, those of each client in random order."""
    out, start = np.empty(len(owned.row), np.int64), owned.start[:, None]
    for clients in shuffle.alike(owned.count):
        place = np.arange(owned.count[clients].max())
        words = rng.hashed(seed, name, clients[:, None], place)
        order = shuffle.positions(words, owned.count[clients])
        real = order >= 0
        out[(start[clients] + place)[real]] = (start[clients] + order)[real]
    return out


def _first(
    order: np.ndarray, begin: np.ndarray, size: np.ndarray, take: np.ndarray
) -> np.ndarray:
    """Marks the first `take` [G] rows of each of the groups of `_groups`, bool[N]."""
    is_first = np.empty(len(order), bool)
    place = np.arange(len(order)) - np.repeat(begin, size)
    is_first[order] = place < np.repeat(take, size)
    return is_first


def _systematic(
    owned: parts.Parts, label: np.ndarray, held: np.ndarray, seed: int
) -> np.ndarray:
    """Marks held int[K] rows, as evenly over classes as possible; bool[N].

    Row i of a client's n, class by class, is marked if (i v + r) // n grows at the next
    one, for v marked rows and r < n at random. So a class has its share of them up to
    one, and no row depends on how many others its class has. By largest remainder a
    class of one row would hardly ever be marked.
    """
    name, owner = "data.validation", owned.owner
    # Classes in random order, and the rows of each too
    by_class = rng.hashed(seed, f"{name}.class", owner, label)
    mixed = _shuffled(owned, seed, name)
    order = mixed[np.lexsort((by_class[mixed], owner))]
    chance = rng.uniform(seed, f"{name}.first", np.arange(len(held)))
    size, step = owned.count[owner], held[owner]
    reached = owned.place * step + (chance * owned.count).astype(int)[owner]
    out = np.empty(len(owner), bool)
    out[order] = (reached + step) // size > reached // size
    return out


def _stratified(
    owned: parts.Parts, label: np.ndarray, num_train: np.ndarray
) -> np.ndarray:
    """Marks num_train int[K] train rows, per class by largest remainder; bool[N]."""
    owner = owned.owner
    order, begin, size = _groups(owner, label)
    client = owner[order[begin]]
    share = size * (num_train / np.maximum(owned.count, 1))[client]
    take = np.floor(share).astype(int)
    missing = num_train - np.bincount(client, take, len(num_train)).astype(int)
    # The rank of a group among those of its client, largest remainder first
    by_rest = np.lexsort((take - share, client))
    groups = np.bincount(client, minlength=len(num_train))
    rank = np.arange(len(by_rest)) - np.repeat(np.cumsum(groups) - groups, groups)
    take[by_rest] += rank < missing[client]
    return _first(order, begin, size, take)
