"""Server means and peer mixing over the leading axis of stacked pytrees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import types


def weights(kind: str, num_examples: jax.Array, row_mask: jax.Array) -> jax.Array:
    """Aggregation weights f32[C] that sum to 1; 0 on padding rows.

    Args:
        kind: `examples` (proportional to `num_examples` int32[C]) or `uniform`.
        num_examples: Train examples of each row.
        row_mask: bool[C], True on real rows.
    """
    raw = num_examples if kind == "examples" else jnp.ones_like(num_examples)
    raw = jnp.where(row_mask, raw.astype(jnp.float32), 0)
    return raw / jnp.maximum(raw.sum(), 1)


def weighted_mean(stacked: Any, weight: jax.Array) -> Any:
    """sum_c weight[c] * leaf[c] for leaves [C, ...]; rows of weight 0 are ignored.

    `weight` f32[C] must sum to 1.
    """

    def average(leaf: jax.Array) -> jax.Array:
        column = weight.reshape(-1, *(1,) * (leaf.ndim - 1))
        # A dead row may hold nan: select before multiplying. A product with the
        # weights, not a sum over the leading axis: 50 times faster on a CPU.
        safe = jnp.where(column > 0, leaf, 0)
        highest = jax.lax.Precision.HIGHEST
        return jnp.tensordot(weight, safe, 1, precision=highest).astype(leaf.dtype)

    return jax.tree.map(average, stacked)


def stagewise_mean(
    stacked: types.Params, weight: jax.Array, held: jax.Array, fallback: types.Params
) -> types.Params:
    """Per stage, the weighted mean over the rows that hold it.

    Args:
        stacked: Parameters or statistics with leaves [C, ...].
        weight: f32[C], non-negative, 0 on padding rows.
        held: bool[C, L].
        fallback: Taken for a stage that no row holds; leaves [...].
    """
    means = []
    for stage, values in enumerate(stacked):
        raw = jnp.where(held[:, stage], weight, 0)
        total = raw.sum()
        mean = weighted_mean(values, raw / jnp.where(total > 0, total, 1))
        means.append(
            jax.tree.map(
                lambda m, f, total=total: jnp.where(total > 0, m, f),
                mean,
                fallback[stage],
            )
        )
    return tuple(means)


def stagewise_means(
    copies: tuple[types.Params, types.Stats],
    weight: jax.Array,
    held: jax.Array,
    fallback: tuple[types.Params, types.Stats],
) -> tuple[types.Params, types.Stats]:
    """`stagewise_mean` of parameters and of statistics, under the same mask."""
    return tuple(
        stagewise_mean(new, weight, held, old)
        for new, old in zip(copies, fallback, strict=True)
    )


def mix(stacked: Any, matrix: jax.Array) -> Any:
    """new[i] = sum_j matrix[i, j] * leaf[j] for leaves [J, ...], matrix f32[I, J]."""
    return jax.tree.map(
        lambda leaf: jnp.einsum(
            "ij,j...->i...", matrix, leaf, precision=jax.lax.Precision.HIGHEST
        ),
        stacked,
    )
