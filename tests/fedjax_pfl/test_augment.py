"""Augmented train batches: what is drawn, and that draws are named by example."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import augment, types


@pytest.fixture(scope="module")
def crops():
    """10,000 crops of an image of 16 x 24 whose values are distinct, none of them 0."""
    image = 1 + np.arange(16 * 24 * 1).reshape(16, 24, 1)
    keys = jax.random.split(jax.random.key(0), 10_000)
    return image, np.asarray(jax.vmap(augment.crop_flip, (None, 0))(image, keys))


def test_offsets_and_flips(crops):
    """All offsets of 0 to 4 rows and 0 to 6 columns alike, half of them mirrored."""
    image, found = crops
    padded = np.pad(image, ((2, 2), (3, 3), (0, 0)))
    counts = np.zeros((5, 7, 2))
    for row in range(5):
        for column in range(7):
            crop = padded[row : row + 16, column : column + 24]
            for flip, one in enumerate((crop, crop[:, ::-1])):
                counts[row, column, flip] = (found == one).all((1, 2, 3)).sum()
    assert counts.sum() == len(found)
    expected = len(found) / counts.size
    # Ten thousand draws of 70 cells: chi square of 69 is below 120.
    assert ((counts - expected) ** 2 / expected).sum() < 120
    assert abs(counts[..., 1].sum() / len(found) - 0.5) < 0.02


def test_draws_are_named_by_example():
    """By the step's key and the position: neither padding nor the place matters."""
    gen = np.random.default_rng(0)
    image = gen.integers(1, 256, (9, 16, 16, 3)).astype(np.uint8)
    given = jnp.array(image), jnp.arange(9), jnp.zeros(3), jnp.full(3, 1 / 255), ()
    plain, data = types.Data(*given), types.Data(*given, augment="crop_flip")
    rows, key = jnp.array([3, 5, 7, -1]), jax.random.key(1)
    position = jnp.array([0, 1, 2, 0])
    found, label, _ = data.train_batch(rows, position, key)
    order = np.array([2, 0, 1])
    other, *_ = data.train_batch(rows[order], position[order], key)
    np.testing.assert_array_equal(found[order], other)
    assert label[:3].tolist() == [3, 5, 7]
    again, *_ = data.train_batch(rows, position, jax.random.key(2))
    assert not np.array_equal(found, again)
    # What serves and tests are gathered as they are.
    np.testing.assert_array_equal(data.gather(rows)[0], plain.gather(rows)[0])
    batch = plain.train_batch(rows, position, key)[0]
    np.testing.assert_array_equal(batch, plain.gather(rows)[0])
