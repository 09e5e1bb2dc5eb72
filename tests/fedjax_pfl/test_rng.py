"""Draws by name, on the device and on the host."""

import jax
import numpy as np
import pytest

from fedjax_pfl import rng


def test_streams_are_named_by_tag_and_ids():
    """Different names, different keys; the order of ids counts."""
    key = jax.random.key(0)
    names = [
        (rng.Tag.LOCAL, 1, 2),
        (rng.Tag.LOCAL, 2, 1),
        (rng.Tag.SERVER, 1, 2),
        (rng.Tag.LOCAL, 1),
        ("mine.noise", 1, 2),
        ("mine.noise", 2, 1),
        ("others.noise", 1, 2),
    ]
    keys = {tuple(jax.random.key_data(rng.stream(key, *n)).tolist()) for n in names}
    assert len(keys) == len(names)
    traced = jax.jit(lambda client: rng.stream(key, rng.Tag.LOCAL, 1, client))(2)
    assert tuple(jax.random.key_data(traced).tolist()) in keys


def test_generators_are_named_by_seed_tag_and_ids():
    """The host's twin."""
    draws = [rng.generator(0, rng.Tag.COHORT, 5).random() for _ in range(2)]
    assert draws[0] == draws[1]
    others = [(1, rng.Tag.COHORT, 5), (0, rng.Tag.PEERS, 5), (0, rng.Tag.COHORT, 6)]
    assert len({draws[0], *(rng.generator(*name).random() for name in others)}) == 4


def test_tags_are_append_only():
    """Their numbers are part of every stored run's identity."""
    known = (
        "INIT COHORT BATCHES PARTITION SPLIT PROXY PEERS LOCAL LOCAL_PROXY SERVER "
        "TEACHER PUBLIC ORDER EVALUATION PERSONAL"
    ).split()
    assert [tag.name for tag in rng.Tag][: len(known)] == known
    assert [int(tag) for tag in rng.Tag] == list(range(len(rng.Tag)))


def test_hashed_words_depend_on_their_own_ids_alone():
    """A word of one call is that of another with more ids; all differ."""
    client = np.array([7, 3, 11, 900_000])
    words = rng.hashed(5, rng.Tag.BATCHES, 2, client[:, None], np.arange(50))
    assert words.shape == (4, 50) and words.dtype == np.uint64
    one = rng.hashed(5, rng.Tag.BATCHES, 2, 11, np.arange(9))
    np.testing.assert_array_equal(one, words[2, :9])
    others = [
        rng.hashed(6, rng.Tag.BATCHES, 2, client[:, None], np.arange(50)),
        rng.hashed(5, rng.Tag.PEERS, 2, client[:, None], np.arange(50)),
        rng.hashed(5, rng.Tag.BATCHES, 3, client[:, None], np.arange(50)),
    ]
    assert len(np.unique(np.stack([words, *others]))) == 800
    assert rng.hashed(5, rng.Tag.BATCHES, 2, 3, 7) == words[1, 7]
    assert rng.hashed(5, rng.Tag.BATCHES, 2, 7, 3) == words[0, 3] != words[1, 7]


@pytest.mark.parametrize("bit", [0, 31, 63])
def test_hashed_words_have_even_bits(bit):
    """Neighbours in an id: 4,000 draws, four standard deviations."""
    words = rng.hashed(0, rng.Tag.COHORT, 1, np.arange(4000))
    share = ((words >> np.uint64(bit)) & np.uint64(1)).mean()
    assert abs(share - 0.5) < 4 * 0.5 / 4000**0.5
