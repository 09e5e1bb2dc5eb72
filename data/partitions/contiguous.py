"""Clients with equal runs of rows, in the order of the data set."""

import numpy as np

from data.partitions import parts


def split(num_rows: int, num_clients: int) -> parts.Parts:
    """Splits 0..N-1 into K runs; the first clients get the remainder."""
    each, more = divmod(num_rows, num_clients)
    count = each + (np.arange(num_clients) < more)
    return parts.Parts(np.arange(num_rows), count)
