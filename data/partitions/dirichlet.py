"""Clients of unequal size: every class is distributed by its own Dir(alpha)."""

import numpy as np

from data.partitions import parts

MAX_TRIES = 200
# If so many clients get too few examples in each of the first draws, more are hopeless,
# because the chance of success falls exponentially in this number.
FIRST_TRIES = 5
HOPELESS = 50


def split(
    labels: np.ndarray,
    *,
    num_clients: int,
    alpha: float,
    min_examples: int,
    gen: np.random.Generator,
) -> parts.Parts:
    """Splits each class by Dir(alpha) fractions over clients with less than N / K.

    The split is drawn again until every client has `min_examples`, at most `MAX_TRIES`
    times, and fewer times if that is hopeless. Returns positions 0..N-1 of labels
    int[N]. Raises ValueError if some client has too few examples in every draw.
    """
    cap = len(labels) / num_clients
    classes = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    fewest = num_clients
    for tries in range(1, MAX_TRIES + 1):
        members, counts = [], []
        size = np.zeros(num_clients, int)
        for positions in classes:
            share = gen.dirichlet(np.full(num_clients, alpha))
            share = np.where(size < cap, share, 0)
            if not np.isfinite(share).all() or share.sum() <= 0:
                share = (size < cap).astype(float)
            # Divided by its last entry, it is exactly 1 after the last open client.
            total = np.cumsum(share)
            cuts = np.floor(total / total[-1] * len(positions)).astype(int)
            counts.append(np.diff(cuts, prepend=0))
            members.append(gen.permutation(positions))
            size += counts[-1]
        short = int((size < min_examples).sum())
        if not short:
            clients = np.tile(np.arange(num_clients), len(classes))
            owner = np.repeat(clients, np.concatenate(counts))
            drawn = parts.collect(np.concatenate(members), owner, num_clients)
            return parts.shuffled(drawn, gen)
        fewest = min(fewest, short)
        if tries >= FIRST_TRIES and fewest > HOPELESS:
            break
    raise ValueError(
        f"--partition_alpha={alpha:g} leaves clients with fewer than {min_examples} "
        f"examples (--min_examples), {fewest} of {num_clients} in the best of {tries} "
        "draws; raise it, lower --num_clients, or take --partition=client_dirichlet "
        "with clients of equal size"
    )
