"""Random keys, named by purpose and ids, never by position in a batch."""

import enum
import zlib

import jax
import numpy as np

# This project's older streams are named by small integers, which are part of a run's
# identity. All others are named by their text.
_NUMBERS = {
    "engine.init": 0,
    "engine.cohort": 1,
    "engine.batches": 2,
    "data.partition": 3,
    "data.split": 4,
    "data.proxy": 5,
    "engine.peers": 6,
    "engine.local": 7,
    "proxy.local_proxy": 8,
    "engine.server": 9,
    "proxy.teacher": 10,
    "proxy.public": 11,
    "engine.order": 12,
    "engine.evaluation": 13,
    "engine.personal": 14,
    "decentralized.replaced": 15,
    "sparse.mask": 16,
    "sparse.regrown": 17,
    "decentralized.own_init": 18,
    "levels.level": 19,
    "levels.queue": 20,
    "levels.bases": 21,
}
# The same integers for code in the older form, `rng.Tag.LOCAL`
Tag = enum.IntEnum(
    "Tag", {name.split(".")[1].upper(): n for name, n in _NUMBERS.items()}
)


def _number(name: str | int) -> int:
    """A name as 32 bits. A new one gives its CRC, far above the integers of others."""
    if isinstance(name, str):
        return _NUMBERS.get(name, zlib.crc32(name.encode()) | 1 << 31)
    return int(name)


def stream(key: jax.Array, tag: str | int, *ids: int | jax.Array) -> jax.Array:
    """A key from the run's root key, by folding in `tag` and then each id.

    `tag` names the purpose of the draw, such as `mine.noise`. Ids are non-negative.

    Examples:
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


def generator(seed: int, tag: str | int, *ids: int) -> np.random.Generator:
    """The host's counterpart of `stream`: a Philox generator from (seed, tag, ids)."""
    sequence = np.random.SeedSequence([seed, _number(tag), *ids])
    return np.random.Generator(np.random.Philox(sequence))


def _mixed(words: np.ndarray) -> np.ndarray:
    """A bijection of uint64: every bit depends on all (splitmix64's finalizer).

    It is computed in place, since new arrays cost more than the arithmetic.
    """
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(words, np.uint64(27), out=shifted)
    words ^= shifted
    words *= np.uint64(0x94D049BB133111EB)
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted
    return words


def hashed(seed: int, tag: str | int, *ids: int | np.ndarray) -> np.ndarray:
    """Random uint64 words, one for each tuple of ids: many named draws in one call.

    `ids` are non-negative integers or integer arrays that broadcast together, such as
    (round, client[:, None], position[None]). A word depends only on its own ids, never
    on the others of the call. Sorting positions by their words shuffles them.
    """
    odd = np.uint64(0x9E3779B97F4A7C15)
    words = np.atleast_1d(np.asarray(seed, np.uint64))
    with np.errstate(over="ignore"):
        for number in (_number(tag), *ids):
            step = np.asarray(number).astype(np.uint64) + np.uint64(1)
            words = _mixed(words * odd + step)
    return words


def uniform(seed: int, tag: str | int, *ids: int | np.ndarray) -> np.ndarray:
    """f64[...] in [0, 1), one for each tuple of ids of `hashed`, by 53 of its bits."""
    return (hashed(seed, tag, *ids) >> np.uint64(11)) * 2.0**-53
