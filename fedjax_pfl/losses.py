"""Masked losses as (sum, count) pairs, and their means."""

import jax
import jax.numpy as jnp
import optax

# The logits of more classes are not read once more for the label's.
FEW_CLASSES = 64
Pair = tuple[jax.Array, jax.Array]


def masked_sum(values: jax.Array, mask: jax.Array) -> Pair:
    """The sum of `values` f32[B] where `mask` bool[B], and the count of True."""
    return jnp.where(mask, values, 0).sum(), mask.sum()


def mean(pair: Pair) -> jax.Array:
    """The mean of a pair: sum / max(count, 1)."""
    total, count = pair
    return total / jnp.maximum(count, 1)


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of `values` f32[B] over the True entries, or 0 where there are none."""
    return mean(masked_sum(values, mask))


def batch_mean(
    values: jax.Array, mask: jax.Array, chosen: jax.Array | None = None
) -> jax.Array:
    """The mean f32[] over the examples of a batch, or over its chosen positions.

    `values` are f32[B] of examples or f32[B, T] of positions, and `mask` bool[B] has
    the real examples. `chosen` bool[B, T] has the positions that count equally. None =
    all positions, and the mean is first taken over those of each example.
    """
    if chosen is not None:
        return masked_mean(values, chosen & mask[:, None])
    if values.ndim > 1:
        values = values.reshape(len(values), -1).mean(1)
    return masked_mean(values, mask)


def batch_count(mask: jax.Array, chosen: jax.Array | None = None) -> jax.Array:
    """How many values `batch_mean` is the mean of, int32[]."""
    return (mask if chosen is None else chosen & mask[:, None]).sum()


def cross_entropy(
    logits: jax.Array,
    label: jax.Array,
    mask: jax.Array,
    chosen: jax.Array | None = None,
) -> jax.Array:
    """The mean cross-entropy f32[] over examples, or over chosen positions.

    `logits` are f32[B, ..., Y], and `label` int32[B, ...] is one label for an example
    or one for each position. `mask` and `chosen` are those of `batch_mean`.

    Examples:
        >>> logits, label = jnp.zeros((2, 3, 4)), jnp.zeros((2, 3), int)
        >>> round(float(cross_entropy(logits, label, jnp.array([True, False]))), 4)
        1.3863
    """
    return batch_mean(cross_entropies(logits, label), mask, chosen)


def cross_entropies(logits: jax.Array, label: jax.Array) -> jax.Array:
    """The cross-entropy f32[B, ...] of each label: log sum exp(logits) - the label's.

    `logits` are f32[B, ..., Y], and `label` int32[B, ...] are 0..Y-1. For few classes
    it has no gather, whose gradient is a scatter: they take longer than all the rest.
    """
    if logits.shape[-1] > FEW_CLASSES:
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)
    logits = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    is_label = jnp.arange(logits.shape[-1]) == label[..., None]
    on_label = jnp.where(is_label, logits, 0).sum(-1)
    return jnp.log(jnp.exp(logits).sum(-1)) - on_label
