"""Clients that the data set defines."""

import numpy as np

from data.partitions import parts


def split(owner: np.ndarray, num_clients: int) -> parts.Parts:
    """Returns positions of the first K clients' examples, in the pool's order.

    `owner` is int[N], 0, 1, ...; rows of owners beyond K are unowned.
    """
    position = np.flatnonzero(owner < num_clients)
    return parts.collect(position, owner[position], num_clients)
