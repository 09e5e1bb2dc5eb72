"""Clients with equal random parts."""

import numpy as np

from data.partitions import contiguous, parts


def split(num_rows: int, num_clients: int, gen: np.random.Generator) -> parts.Parts:
    """Splits 0..N-1 into K random parts; the first clients get the remainder."""
    runs = contiguous.split(num_rows, num_clients)
    return runs._replace(row=gen.permutation(num_rows))
