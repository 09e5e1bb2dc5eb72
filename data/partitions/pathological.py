"""Clients that have few classes."""

import numpy as np

from data.partitions import parts
from fedjax_pfl import options

# Values of `--partition_draw`: disjoint shards, or independent draws with replacement
DRAWS = ("ipf", "overlap")


def split(
    labels: np.ndarray,
    *,
    num_clients: int,
    classes_per_client: int,
    draw: str,
    gen: np.random.Generator,
) -> parts.Parts:
    """Gives each client shards of exactly k = `classes_per_client` different classes.

    A shard has one class, and `draw` is one of `DRAWS`. Any classes may meet in a
    client. Returns positions 0..N-1 of labels int[N]. Examples of a class without an
    owner are unowned. Raises ValueError if there are fewer than k classes.
    """
    classes, supply = np.unique(labels, return_counts=True)
    why = "the classes of the data"
    options.check_at_most("classes_per_client", classes_per_client, len(classes), why)
    if draw == "overlap":
        pools = [np.flatnonzero(labels == c) for c in classes]
        return _independent(pools, num_clients, classes_per_client, gen)
    num_shards = num_clients * classes_per_client
    # Shards are assigned to classes by largest remainder, at most one per client, and
    # of equal classes to random ones.
    want = supply * (num_shards / supply.sum())
    count = np.minimum(np.floor(want).astype(int), num_clients)
    tie = gen.random(len(classes))
    while count.sum() < num_shards:
        room = np.where(count < num_clients, want - count, -np.inf)
        count[np.lexsort((tie, -room))[0]] += 1
    owned = np.empty((num_clients, classes_per_client), int)
    has = np.zeros(num_clients, int)
    # Classes with most shards come first, and go to clients that have least. By the
    # Gale-Ryser theorem this never gets stuck.
    for c in np.lexsort((tie, -count)):
        chosen = np.lexsort((gen.random(num_clients), has))[: count[c]]
        owned[chosen, has[chosen]] = c
        has[chosen] += 1
    _exchange(owned, gen)
    owners = [np.flatnonzero((owned == c).any(1)) for c in range(len(classes))]
    pairs = zip(classes, map(gen.permutation, owners), strict=True)
    return parts.by_class(labels, pairs, num_clients, gen)


def _exchange(owned: np.ndarray, gen: np.random.Generator) -> None:
    """Lets pairs of clients exchange one class each, in place in int[K, k].

    A class that a client has already it does not take. Each client does it 30 k times,
    after which any classes may have met, however they were dealt.
    """
    num_clients, k = owned.shape
    for _ in range(30 * k):
        one, other = gen.permutation(num_clients)[: num_clients // 2 * 2].reshape(2, -1)
        i, j = gen.integers(k, size=(2, len(one)))
        given, taken = owned[one, i], owned[other, j]
        has_any = (owned[one] == taken[:, None]) | (owned[other] == given[:, None])
        is_free = ~has_any.any(1)
        owned[one[is_free], i[is_free]] = taken[is_free]
        owned[other[is_free], j[is_free]] = given[is_free]


def _independent(
    pools: list[np.ndarray],
    num_clients: int,
    classes_per_client: int,
    gen: np.random.Generator,
) -> parts.Parts:
    """Lets every client draw k classes and floor(floor(N / K) / k) examples of each.

    Draws are with replacement, as in UA-PDFL's released code: an example may belong to
    several clients, and to both the train and the test rows of one. That code uses only
    a tenth of PathMNIST's last class, but here all examples are drawn from.
    """
    size = sum(map(len, pools)) // num_clients // classes_per_client
    row = [
        gen.choice(pools[c], size)
        for _ in range(num_clients)
        for c in gen.permutation(len(pools))[:classes_per_client]
    ]
    count = np.full(num_clients, size * classes_per_client)
    return parts.shuffled(parts.Parts(np.concatenate(row), count), gen)
