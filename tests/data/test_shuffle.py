"""Shuffles of many clients at once."""

import numpy as np
import pytest

from data import shuffle


@pytest.mark.parametrize("words_each", [1, 5])
def test_alike_has_everybody_once_beside_clients_of_like_size(words_each, monkeypatch):
    """Who has nothing is left out; a block has few words or a single client."""
    monkeypatch.setattr(shuffle, "BLOCK_WORDS", 600)
    count = np.random.default_rng(0).lognormal(2, 1.5, 400).astype(int)
    assert (count == 0).any() and count.max() > 600
    blocks = list(shuffle.alike(count, words_each))
    np.testing.assert_array_equal(
        np.sort(np.concatenate(blocks)), np.flatnonzero(count)
    )
    for block in blocks:
        largest = count[block].max()
        assert largest < 2 * count[block].min()
        assert len(block) == 1 or len(block) * largest * words_each <= 600
    assert len(list(shuffle.alike(np.zeros(3, int)))) == 0


def test_positions_stand_in_the_order_of_their_words():
    """As an argsort of each row's first words; the rest of a row is -1."""
    words = np.random.default_rng(0).integers(0, 2**64, (50, 3, 40), np.uint64)
    count = np.random.default_rng(1).integers(0, 41, (50, 1))
    found = shuffle.positions(words, count)
    assert found.dtype == np.int32 and found.shape == words.shape
    for row, size in enumerate(count[:, 0]):
        np.testing.assert_array_equal(
            found[row, :, :size], np.argsort(words[row, :, :size], axis=1)
        )
        assert (found[row, :, size:] == -1).all()


def test_equal_words_keep_their_order():
    """Words that differ in their lower half alone are ties: first come, first."""
    words = np.arange(6, dtype=np.uint64)[::-1] + (np.uint64(7) << np.uint64(32))
    assert shuffle.positions(words, np.array(5)).tolist() == [0, 1, 2, 3, 4, -1]
