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

    A shard has one class, and `draw` is one of `DRAWS`. Returns positions 0..N-1 of
    labels int[N]. Examples of a class without an owner are unowned. Raises ValueError
    if there are fewer than k classes.
    """
    classes, supply = np.unique(labels, return_counts=True)
    why = "the classes of the data"
    options.check_at_most("classes_per_client", classes_per_client, len(classes), why)
    if draw == "overlap":
        pools = [np.flatnonzero(labels == c) for c in classes]
        return _independent(pools, num_clients, classes_per_client, gen)
    num_shards = num_clients * classes_per_client
    # Shards are assigned to classes by largest remainder, at most one per client.
    want = supply * (num_shards / supply.sum())
    count = np.minimum(np.floor(want).astype(int), num_clients)
    while count.sum() < num_shards:
        room = np.where(count < num_clients, want - count, -np.inf)
        count[int(room.argmax())] += 1
    owners = []
    need = np.full(num_clients, classes_per_client)
    # Classes with most shards come first, and go to clients that need most. By the
    # Gale-Ryser theorem this never gets stuck.
    for c in np.argsort(-count, kind="stable"):
        chosen = np.lexsort((gen.random(num_clients), -need))[: count[c]]
        need[chosen] -= 1
        owners.append((classes[c], chosen))
    return parts.by_class(labels, owners, num_clients, gen)


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
