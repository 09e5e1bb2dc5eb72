"""Masks of single entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import sparse

LARGEST = jax.jit(sparse.largest)


def scores(kind):
    """40 numbers that are not negative, in three tensors."""
    gen = np.random.default_rng(0)
    flat = {
        "normal": np.abs(gen.normal(size=40)),
        "ties": gen.integers(3, size=40),
        "zeros": np.zeros(40),
        "wide": 10.0 ** gen.integers(-40, 38, size=40),
    }[kind].astype(np.float32)
    return {"a": flat[:6].reshape(2, 3), "b": flat[6], "c": flat[7:]}


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def expected(score, count, among):
    """The first of the largest, by a stable sort."""
    score = np.where(among, score.astype(np.float64), -1)
    mask = np.zeros(len(score), bool)
    mask[np.argsort(-score, kind="stable")[:count]] = True
    return mask


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "wide"])
def test_largest_of_a_pytree(kind):
    """Exactly so many, whatever ties; the first of equal ones; tiny numbers count."""
    score = scores(kind)
    among = jax.tree.map(
        lambda leaf: np.arange(leaf.size).reshape(leaf.shape) % 3 > 0, score
    )
    among["b"] = np.array(True)
    for chosen in (jax.tree.map(np.ones_like, among), among):
        most = int(flat(chosen).sum())
        for count in (0, 1, 7, most - 1, most):
            found = LARGEST(score, jnp.int32(count), chosen)
            assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, score)
            want = expected(flat(score), count, flat(chosen))
            np.testing.assert_array_equal(flat(found), want)


def test_all_may_be_chosen_and_rows_are_apart():
    """Without `among`, a Python count, one array; and vmapped with a count of each."""
    score = flat(scores("ties"))
    np.testing.assert_array_equal(
        sparse.largest(score, 9), expected(score, 9, np.ones(40, bool))
    )
    rows, counts = np.stack([score, score[::-1]]), np.array([3, 30])
    found = jax.vmap(sparse.largest)(rows, counts)
    for row, one, count in zip(found, rows, counts, strict=True):
        np.testing.assert_array_equal(row, expected(one, count, np.ones(40, bool)))


def test_only():
    """0 elsewhere, also in place of nan."""
    mask = {"a": np.array([True, False]), "b": np.array(False)}
    tree = {"a": np.array([2.0, np.nan], np.float32), "b": np.float32(3)}
    found = sparse.only(mask, tree)
    np.testing.assert_array_equal(found["a"], [2, 0])
    assert float(found["b"]) == 0


@pytest.mark.parametrize(
    "entries, size", [(0, 0), (1, 1), (8, 1), (9, 2), (404_074, 50_510)]
)
def test_a_bitmap_has_a_bit_for_each_entry(entries, size):
    assert sparse.bitmap_bytes(entries) == size
