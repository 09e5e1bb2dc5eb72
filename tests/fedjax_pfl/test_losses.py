"""Masked sums and means."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl import losses

THEIRS = optax.softmax_cross_entropy_with_integer_labels


@pytest.mark.parametrize("jit", [False, True])
def test_masked_cross_entropy_ignores_padding(jit):
    """Anything in a padding row changes neither value nor gradient; nan no value."""
    logits = jnp.array([[2.0, 0.0], [-1e30, 1e30], [1.0, 1.0]])
    label, mask = jnp.array([0, 1, 1]), jnp.array([True, False, True])
    fn = jax.value_and_grad(losses.cross_entropy)
    value, gradient = (jax.jit(fn) if jit else fn)(logits, label, mask)
    expected = (np.log1p(np.exp(-2)) + np.log(2)) / 2
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    share = 1 / (1 + np.exp(2))
    by_hand = [[-share / 2, share / 2], [0, 0], [0.25, -0.25]]
    np.testing.assert_allclose(gradient, by_hand, rtol=1e-5)
    sick = logits.at[1].set(jnp.nan)
    np.testing.assert_array_equal(losses.cross_entropy(sick, label, mask), value)


@pytest.mark.parametrize("shape", [(5, 3), (2, 4, 1), (3, 700)])
def test_cross_entropies_are_optax_s(shape):
    """Values and gradients; for few classes without a gather or scatter."""
    gen = np.random.default_rng(0)
    logits = jnp.array(gen.normal(size=shape, scale=9), jnp.float32)
    label = jnp.array(gen.integers(shape[-1], size=shape[:-1]))
    weights = jnp.array(gen.normal(size=shape[:-1]), jnp.float32)

    def of(function):
        return jax.grad(lambda x: (weights * function(x, label)).sum())

    values = losses.cross_entropies(logits, label)
    np.testing.assert_allclose(values, THEIRS(logits, label), rtol=2e-6, atol=1e-6)
    mine, theirs = of(losses.cross_entropies), of(THEIRS)
    np.testing.assert_allclose(mine(logits), theirs(logits), rtol=2e-6, atol=1e-6)
    assert "gather" in str(jax.make_jaxpr(theirs)(logits))
    text = str(jax.make_jaxpr(mine)(logits))
    gathers = shape[-1] > losses.FEW_CLASSES
    assert ("gather" in text, "scatter" in text) == (gathers, gathers)


def test_sums_and_means():
    """A pair of sum and count; the mean of nothing is 0."""
    values, mask = jnp.array([1.0, jnp.inf, 4.0]), jnp.array([True, False, True])
    total, count = losses.masked_sum(values, mask)
    assert (float(total), int(count)) == (5, 2)
    assert losses.mean((total, count)) == losses.masked_mean(values, mask) == 2.5
    assert losses.masked_mean(values, jnp.zeros(3, bool)) == 0


def test_cross_entropy_by_position():
    """As many positions as rows: the mean of each example, then of the real rows."""
    gen = np.random.default_rng(0)
    logits, label = gen.normal(size=(4, 4, 3)), gen.integers(3, size=(4, 4))
    mask = np.array([True, False, True, False])
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = (
        -np.take_along_axis(log_p, label[..., None], -1).mean((1, 2))[mask].mean()
    )
    found = losses.cross_entropy(jnp.array(logits), jnp.array(label), jnp.array(mask))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
