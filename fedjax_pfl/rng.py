"""Keys named by what they are for and by ids, never by position in a batch."""

import enum

import jax
import numpy as np


class Tag(enum.IntEnum):
    """Purpose of a stream. Values are part of a run's identity: append only."""

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


def stream(key: jax.Array, tag: Tag, *ids: int | jax.Array) -> jax.Array:
    """Folds `tag` and then each id into `key`; ids are non-negative integers."""
    key = jax.random.fold_in(key, int(tag))
    for number in ids:
        key = jax.random.fold_in(key, number)
    return key


def generator(seed: int, tag: Tag, *ids: int) -> np.random.Generator:
    """The host's twin of `stream`: a Philox generator named by (seed, tag, ids)."""
    sequence = np.random.SeedSequence([seed, int(tag), *ids])
    return np.random.Generator(np.random.Philox(sequence))
