"""The costs of a model: parameters, buffers and multiply-accumulates of one example.

The forward pass of one example is traced, and each called module adds its `macs(given,
out)`, a function of the shapes of its input and output. A module without `macs` costs
nothing. The convention is that of ptflops
(https://github.com/sovrasov/flops-counter.pytorch). A convolution costs kernel^2 *
inputs / groups per output value, and one more with a bias. A norm costs 2 per value, a
relu 1, a pool 1 per input value, and an upsampling 1 per output value. An affine map
costs inputs * outputs + outputs. Sigmoid, sum and product are free, but
for the positions that an embedding adds.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from fedjax_pfl import shapes, types


class Count(NamedTuple):
    """Numbers of parameters, of running statistics, and of multiply-accumulates."""

    parameters: int
    buffers: int
    macs: int


class Stage(NamedTuple):
    """A stage by name: its output shape, and the count of the stage and its exit."""

    name: str
    output: tuple[int, ...]
    count: Count


def total(counts: Iterable[Count]) -> Count:
    """The sum of counts."""
    return Count(*map(sum, zip(*counts, strict=True)))


def _numbers(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _parts(
    model: types.Model, variables: types.Variables, example_shape: tuple[int, ...]
) -> list[tuple[tuple[int, ...], int]]:
    """(output shape, MACs) of each trunk and exit, in the order of calls."""
    calls: list[tuple[bool, tuple[int, ...], int]] = []

    def note(call, args, kwargs, context):
        out, module = call(*args, **kwargs), context.module
        if context.method_name == "__call__":
            # A user's module may call something else `macs`, and return anything.
            is_ours = type(module).__module__.partition(".")[0] == __package__
            macs = 0
            if is_ours and hasattr(module, "macs"):
                macs = module.macs(args[0], out)
            # A trunk or an exit has no parent, and is recorded after its parts.
            shape = getattr(out, "shape", ())[1:]
            calls.append((module.path == (), shape, macs))
        return out

    example = model.example(1, *example_shape)
    with nn.intercept_methods(note):
        # A new function, because jax does not call one that it has traced before.
        jax.eval_shape(lambda *given: model.forward(*given), *variables, example)
    parts, macs = [], 0
    for is_part, shape, more in calls:
        macs += more
        if is_part:
            parts.append((shape, macs))
            macs = 0
    return parts


def stages(model: types.Model, example_shape: tuple[int, ...]) -> tuple[Stage, ...]:
    """The stages of a model for examples of a shape, such as (32, 32, 3).

    Where flax does not see each stage's call, none has a known output, nor costs.
    """
    variables = shapes.variables(model, example_shape)
    every, count = _parts(model, variables, example_shape), sum(map(len, variables[0]))
    parts, out = iter(every if len(every) == count else [((), 0)] * count), []
    for name, params, stats in zip(model.stage_names, *variables, strict=True):
        found, macs = zip(*(next(parts) for _ in params), strict=True)
        # An exit follows the trunk, and a stem comes before it.
        shape = found[-2 if "exit" in params else -1]
        out.append(
            Stage(name, shape, Count(_numbers(params), _numbers(stats), sum(macs)))
        )
    return tuple(out)


def whole(model: types.Model, example_shape: tuple[int, ...]) -> Count:
    """The count of a whole model."""
    return total(stage.count for stage in stages(model, example_shape))


def macs(model: types.Model, example_shape: tuple[int, ...]) -> int:
    """MACs of one example, at least one per parameter.

    Custom modules have no counts, and an affine map has one for each parameter.
    """
    variables = shapes.variables(model, example_shape)
    counted = sum(macs for _, macs in _parts(model, variables, example_shape))
    return max(counted, _numbers(variables.params))


def levels(model: types.Model, example_shape: tuple[int, ...]) -> tuple[Count, ...]:
    """The count of the submodel of every level; a model with one exit has one level."""
    counts = [stage.count for stage in stages(model, example_shape)]
    first = 1 if model.has_exits else len(counts)
    return tuple(total(counts[:level]) for level in range(first, len(counts) + 1))
