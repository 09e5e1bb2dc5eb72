"""Clients that know few classes."""

from __future__ import annotations

import numpy as np

from data.partitions import parts


def split(
    labels: np.ndarray,
    *,
    num_clients: int,
    classes_per_client: int,
    gen: np.random.Generator,
) -> parts.Parts:
    """Exactly k different classes for each client, in shards of one class each.

    Args:
        labels: int[N].
        num_clients: K.
        classes_per_client: k.
        gen: The partition's generator.

    Returns:
        Positions 0..N-1; those of a class without an owner are nobody's.

    Raises:
        ValueError: there are fewer than k classes.
    """
    classes, supply = np.unique(labels, return_counts=True)
    if classes_per_client > len(classes):
        raise ValueError(
            f"--classes_per_client={classes_per_client}: the data have "
            f"{len(classes)} classes"
        )
    num_shards = num_clients * classes_per_client
    # Shards per class by largest remainder, at most one per client.
    want = supply * (num_shards / supply.sum())
    count = np.minimum(np.floor(want).astype(int), num_clients)
    while count.sum() < num_shards:
        room = np.where(count < num_clients, want - count, -np.inf)
        count[int(room.argmax())] += 1
    owners = []
    need = np.full(num_clients, classes_per_client)
    # Most shards first, to the clients that need most: never stuck (Gale-Ryser).
    order = np.argsort(-count, kind="stable")
    for c in order:
        chosen = np.lexsort((gen.random(num_clients), -need))[: count[c]]
        need[chosen] -= 1
        owners.append(chosen)
    position, owner = [], []
    for c, chosen in zip(order, owners, strict=True):
        if not len(chosen):
            continue
        members = gen.permutation(np.flatnonzero(labels == classes[c]))
        each, more = divmod(len(members), len(chosen))
        position.append(members)
        owner.append(np.repeat(chosen, each + (np.arange(len(chosen)) < more)))
    drawn = parts.collect(np.concatenate(position), np.concatenate(owner), num_clients)
    return parts.shuffled(drawn, gen)
