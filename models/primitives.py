"""Primitives of functions that are linear in each of their arrays."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import batching, mlir


def linear(
    name: str,
    fn: Callable[..., jax.Array],
    num_axes: tuple[int, ...],
    shape_of: Callable[..., tuple[int, ...]],
) -> core.Primitive:
    """A primitive of a function that is linear in each of its arrays.

    Whoever makes it gives it its derivatives, in both directions, by jax's
    `ad.deflinear2` or `ad.defbilinear`. `fn` takes arrays of `num_axes` axes each, and
    any number of leading axes is mapped; all have one type. `shape_of` is `(*shapes,
    **params) -> shape` of the result without leading axes.
    """
    made = core.Primitive(name)

    def computed(*given: jax.Array, **params: Any) -> jax.Array:
        one = functools.partial(fn, **params)
        for _ in range(given[0].ndim - num_axes[0]):
            one = jax.vmap(one)
        return one(*given)

    def shaped(*given: Any, **params: Any) -> Any:
        leading = given[0].shape[: len(given[0].shape) - num_axes[0]]
        shape = shape_of(*(one.shape[len(leading) :] for one in given), **params)
        return jax.core.ShapedArray((*leading, *shape), given[0].dtype)

    def batched(given: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
        pairs = [*zip(given, axes, strict=True)]
        (size,) = {x.shape[axis] for x, axis in pairs if axis is not None}
        given = [
            jnp.broadcast_to(x, (size, *x.shape))
            if axis is None
            else jnp.moveaxis(x, axis, 0)
            for x, axis in pairs
        ]
        return made.bind(*given, **params), 0

    @functools.lru_cache(maxsize=64)
    def jitted(**params: Any) -> Any:
        return jax.jit(functools.partial(computed, **params))

    made.def_impl(lambda *given, **params: jitted(**params)(*given))
    made.def_abstract_eval(shaped)
    batching.primitive_batchers[made] = batched
    mlir.register_lowering(made, mlir.lower_fun(computed, multiple_results=False))
    return made
