"""What a model costs: parameters, buffers and multiply-accumulates of one example.

Counted on the modules as they run: one example's forward pass is traced, and each
module that is called adds what its `macs(given, out)` says of the shapes that came and
went; a module without `macs` costs nothing itself. The convention is that of ptflops
(https://github.com/sovrasov/flops-counter.pytorch): a convolution costs kernel^2 *
inputs / groups for each number it gives, one more with a bias; a norm 2 and a relu 1
for each number; a pool 1 for each that it reads, an upsampling 1 for each that it
gives; an affine map inputs * outputs + outputs; sigmoid, sum and product nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from fedjax_pfl import shapes, types


class Count(NamedTuple):
    """Numbers in parameters and in running statistics, and multiply-accumulates."""

    parameters: int
    buffers: int
    macs: int


class Stage(NamedTuple):
    """A stage by name: the shape of what it gives the next one, and its count.

    The count is that of the stage and its exit.
    """

    name: str
    output: tuple[int, ...]
    count: Count


def total(counts: Iterable[Count]) -> Count:
    """Of all of them together."""
    return Count(*map(sum, zip(*counts, strict=True)))


def _numbers(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _parts(
    model: types.Model, variables: types.Variables, example_shape: tuple[int, ...]
) -> list[tuple[tuple[int, ...], int]]:
    """(output shape, MACs) of each trunk and exit, as they are called."""
    calls: list[tuple[bool, tuple[int, ...], int]] = []

    def note(call, args, kwargs, context):
        out, module = call(*args, **kwargs), context.module
        if context.method_name == "__call__":
            macs = module.macs(args[0], out) if hasattr(module, "macs") else 0
            # A trunk or an exit is called by nobody else, and is noted after its parts.
            calls.append((module.path == (), out.shape[1:], macs))
        return out

    example = jax.ShapeDtypeStruct((1, *example_shape), np.float32)
    with nn.intercept_methods(note):
        # A function of its own: what jax has traced before, it does not call again.
        jax.eval_shape(lambda *given: model.forward(*given), *variables, example)
    parts, macs = [], 0
    for is_part, shape, more in calls:
        macs += more
        if is_part:
            parts.append((shape, macs))
            macs = 0
    return parts


def stages(model: types.Model, example_shape: tuple[int, ...]) -> tuple[Stage, ...]:
    """Every stage of a model for examples of a shape, such as (32, 32, 3)."""
    variables = shapes.variables(model, example_shape)
    parts = iter(_parts(model, variables, example_shape))
    out = []
    for name, params, stats in zip(model.stage_names, *variables, strict=True):
        (shape, *_), macs = zip(*(next(parts) for _ in params), strict=True)
        out.append(
            Stage(name, shape, Count(_numbers(params), _numbers(stats), sum(macs)))
        )
    return tuple(out)


def whole(model: types.Model, example_shape: tuple[int, ...]) -> Count:
    """A whole model."""
    return total(stage.count for stage in stages(model, example_shape))


def levels(model: types.Model, example_shape: tuple[int, ...]) -> tuple[Count, ...]:
    """`types.truncated` at every level; a model with one exit has one, all of it."""
    counts = [stage.count for stage in stages(model, example_shape)]
    first = 1 if model.has_exits else len(counts)
    return tuple(total(counts[:level]) for level in range(first, len(counts) + 1))
