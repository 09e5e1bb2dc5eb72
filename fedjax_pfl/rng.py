"""Random keys, named by purpose and ids, never by position in a batch."""

import enum
import zlib

import jax
import numpy as np


class Tag(enum.IntEnum):
    """Purposes of this project's streams. An algorithm may use any name instead.

    The values are part of a run's identity.
    """

    INIT = 0
    COHORT = 1
    BATCHES = 2
    PARTITION = 3
    SPLIT = 4
    PROXY = 5
    PEERS = 6
    LOCAL = 7
    LOCAL_PROXY = 8
    SERVER = 9
    TEACHER = 10
    PUBLIC = 11
    ORDER = 12
    EVALUATION = 13
    PERSONAL = 14
    REPLACED = 15
    MASK = 16
    REGROWN = 17
    OWN_INIT = 18
    LEVEL = 19
    QUEUE = 20
    BASES = 21


def _number(tag: Tag | str) -> int:
    """A tag as 32 bits. A name gives its CRC, far above the integers of `Tag`."""
    return zlib.crc32(tag.encode()) | 1 << 31 if isinstance(tag, str) else int(tag)


def stream(key: jax.Array, tag: Tag | str, *ids: int | jax.Array) -> jax.Array:
    """A key derived from `key` by folding in `tag` and then each id.

    Args:
        key: The run's root key.
        tag: The purpose of the draw: a name of the algorithm's own, such as
            `mine.noise`, or one of `Tag`.
        *ids: Non-negative integers.

    Example:
        >>> root = jax.random.key(0)
        >>> noise = stream(root, "mine.noise", 3, 7)  # round 3, client 7
        >>> bool(noise == stream(root, "mine.noise", 3, 7))
        True
        >>> bool(noise == stream(root, "mine.noise", 3, 8))
        False
    """
    key = jax.random.fold_in(key, _number(tag))
    for number in ids:
        key = jax.random.fold_in(key, number)
    return key


def generator(seed: int, tag: Tag | str, *ids: int) -> np.random.Generator:
    """The host's counterpart of `stream`: a Philox generator from (seed, tag, ids)."""
    sequence = np.random.SeedSequence([seed, _number(tag), *ids])
    return np.random.Generator(np.random.Philox(sequence))


def _mixed(words: np.ndarray) -> np.ndarray:
    """A bijection of uint64: every bit depends on all (splitmix64's finalizer)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def hashed(seed: int, tag: Tag | str, *ids: int | np.ndarray) -> np.ndarray:
    """Random uint64 words, one for each tuple of ids: many named draws in one call.

    Args:
        seed, tag: As in `generator`.
        ids: Non-negative integers or integer arrays that broadcast together, such as
            (round, client[:, None], position[None]).

    A word depends only on its own ids, never on the others of the call. Sorting
    positions by their words shuffles them.
    """
    odd = np.uint64(0x9E3779B97F4A7C15)
    words = np.atleast_1d(np.asarray(seed, np.uint64))
    with np.errstate(over="ignore"):
        for number in (_number(tag), *ids):
            step = np.asarray(number).astype(np.uint64) + np.uint64(1)
            words = _mixed(words * odd + step)
    return words
