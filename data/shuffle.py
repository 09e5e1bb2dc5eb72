"""Shuffles many clients at once by sorting positions by words derived from ids."""

from collections.abc import Iterator

import numpy as np

# The upper half of a key is random and the lower half is the position, because sorting
# plain numbers is two to three times faster than an argsort.
POSITION = np.uint64(2**32 - 1)
BLOCK_WORDS = 1 << 17


def alike(count: np.ndarray, words_each: int = 1) -> Iterator[np.ndarray]:
    """Groups clients of similar size, so that none is padded to twice its size.

    `count` int[M] has the positions to shuffle of each client, 0 = skipped, and
    `words_each` is the number of shuffles of each. Yields int64[m] indices into `count`
    in blocks whose words fit into a processor's cache.
    """
    order = np.argsort(count, kind="stable")
    order = order[np.searchsorted(count[order], 0, "right") :]
    length = np.frexp(np.maximum(count - 1, 0))[1]  # bits: 2 ** length >= count
    ends = np.flatnonzero(np.diff(length[order])) + 1
    for part in np.split(order, ends):
        if len(part):
            width = words_each << int(length[part[0]])
            step = max(1, BLOCK_WORDS // width)
            yield from (part[at : at + step] for at in range(0, len(part), step))


def positions(words: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Sorts the numbers 0..count-1 by their words.

    `words` uint64[..., W] has the word of each position (`rng.hashed`). `count`
    int[...] is at most W, and is broadcast against the leading axes. Returns
    int32[..., W]: the sorted numbers, then -1 in the remaining entries.
    """
    place = np.arange(words.shape[-1], dtype=np.uint64)
    count = np.asarray(count).astype(np.uint64)[..., None]
    keys = words & ~POSITION
    keys |= np.where(place < count, place, ~np.uint64(0))
    keys.sort(axis=-1)
    # The lower half: a position, or the -1 of the last keys.
    return keys.astype(np.uint32).view(np.int32)
