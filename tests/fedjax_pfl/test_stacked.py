"""Rows of stacked pytrees: taken, put, repeated, chosen and cut into batches."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import stacked


def test_take_and_put_ignore_padding_rows():
    """Padding rows (K) read something and write nothing."""
    tree = {"a": jnp.arange(12.0).reshape(4, 3)}
    row = jnp.array([2, 4, 0])
    taken = stacked.take(tree, row)["a"]
    chex.assert_trees_all_equal(taken[::2], tree["a"][jnp.array([2, 0])])
    assert jnp.isfinite(taken).all()
    after = stacked.put(tree, row, {"a": jnp.full((3, 3), -1.0)})["a"]
    np.testing.assert_array_equal(after[1::2], tree["a"][1::2])
    assert (after[::2] == -1).all()


@pytest.mark.parametrize("count", [1, 3])
def test_repeat_has_buffers_of_its_own(count):
    """Equal rows; the tree may be donated afterwards, the rows stay."""
    tree = {"a": jnp.arange(3.0), "b": jnp.int32(7)}
    rows = stacked.repeat(tree, count)
    expected = {"a": np.array([[0.0, 1, 2]] * count), "b": np.full(count, 7)}
    for leaf in jax.tree.leaves(tree):
        leaf.delete()
    chex.assert_trees_all_equal(rows, expected)


def test_where_chooses_rows():
    """One bool a row, whatever the leaf's rank; the other side may be nan."""
    new = {"a": jnp.ones((3, 2, 2)), "b": jnp.array([1.0, jnp.nan, 3])}
    old = {"a": jnp.full((3, 2, 2), jnp.nan), "b": jnp.array([-1.0, -2, jnp.nan])}
    mask = jnp.array([True, False, True])
    out = stacked.where(mask, new, old)
    assert (out["a"][::2] == 1).all() and jnp.isnan(out["a"][1]).all()
    np.testing.assert_array_equal(out["b"], [1, -2, 3])


def test_column_broadcasts_along_rows():
    """[C] against [C, ...]: each row times its own number."""
    leaf = jnp.ones((2, 3, 4))
    out = stacked.column(jnp.array([2.0, 5.0]), leaf) * leaf
    assert (out[0] == 2).all() and (out[1] == 5).all()
    assert stacked.column(jnp.ones(2), jnp.ones(2)).shape == (2,)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (3, [[4, 2, 9], [7, 5, 1], [3, -1, -1]]),
        (7, [[4, 2, 9, 7, 5, 1, 3]]),
        (9, [[4, 2, 9, 7, 5, 1, 3, -1, -1]]),
    ],
)
def test_batches_keep_the_order(size, expected):
    """In order, the last one padded with -1."""
    row = jnp.array([4, 2, 9, 7, 5, 1, 3])
    np.testing.assert_array_equal(stacked.in_batches(row, size), expected)
