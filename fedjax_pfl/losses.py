"""Masked losses as (sum, count) pairs, and their means."""

import jax
import jax.numpy as jnp
import optax

Pair = tuple[jax.Array, jax.Array]


def masked_sum(values: jax.Array, mask: jax.Array) -> Pair:
    """Sum of `values` f32[B] where `mask` bool[B], and the number of True."""
    return jnp.where(mask, values, 0).sum(), mask.sum()


def mean(pair: Pair) -> jax.Array:
    """sum / max(count, 1)."""
    total, count = pair
    return total / jnp.maximum(count, 1)


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of `values` f32[B] over the True entries; 0 where there are none."""
    return mean(masked_sum(values, mask))


def cross_entropy(logits: jax.Array, label: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean cross-entropy f32[] of `logits` f32[B, Y], `label` int32[B]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return masked_mean(losses, mask)
