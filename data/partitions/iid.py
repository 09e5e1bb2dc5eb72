"""Clients with equal random parts."""

import numpy as np

from data.partitions import contiguous, parts


def split(num_rows: int, num_clients: int, gen: np.random.Generator) -> parts.Parts:
    """Random parts of 0..N-1; the first clients get the remainder.

    Args:
        num_rows: N.
        num_clients: K.
        gen: The partition's generator.
    """
    runs = contiguous.split(num_rows, num_clients)
    return runs._replace(row=gen.permutation(num_rows))
