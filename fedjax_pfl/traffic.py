"""Bytes from shapes. Counts travel as small integers; the host multiplies in int64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_pfl import types

FLOAT_BYTES = 4


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves of a pytree of arrays or shape structs."""
    return sum(
        int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )


def model_bytes(model: types.Model, example_shape: tuple[int, ...]) -> int:
    """Bytes of one message that holds a model's parameters and statistics."""
    return tree_bytes(shapes(model, example_shape))


def shapes(model: types.Model, example_shape: tuple[int, ...]) -> Any:
    """(params, stats) of a model as shape structs, without computing anything."""
    example = jax.ShapeDtypeStruct((1, *example_shape), np.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(model.init, key, example)


def stage_bytes(model: types.Model, example_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of each stage's parameters and statistics, length L."""
    params, stats = shapes(model, example_shape)
    return tuple(tree_bytes(pair) for pair in zip(params, stats, strict=True))


def output_bytes(model: types.Model, example_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of each stage's output for one example, length L."""
    params, stats = shapes(model, example_shape)
    h = jax.ShapeDtypeStruct((1, *example_shape), np.float32)
    sizes = []
    for stage in range(len(model.stage_names)):
        h, _ = jax.eval_shape(
            lambda p, s, x, i=stage: model.forward(p, s, x, start=i, stop=i + 1),
            params,
            stats,
            h,
        )
        sizes.append(tree_bytes(h))
    return tuple(sizes)


def cumulative(counts: np.ndarray, kinds: Sequence[types.MessageKind]) -> dict:
    """{"bytes_up", "bytes_down"} of `counts` int[kinds] messages, as Python ints."""
    total = {"bytes_up": 0, "bytes_down": 0}
    for count, kind in zip(np.asarray(counts, np.int64), kinds, strict=True):
        total[f"bytes_{kind.direction}"] += int(count) * kind.num_bytes
    return total
