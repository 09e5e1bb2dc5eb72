"""Mixed precision: a model whose layers compute in bfloat16, with float32 around them.

Parameters, their gradients and statistics are float32, and so is what goes in and comes
out, also between two stages that run in separate calls. The layers of `stages` follow
the type of their input: they multiply in it, and add biases and take means and
variances in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import types


@functools.lru_cache(maxsize=64)
def in_bfloat16(model: types.Model, *, rounds: bool = False) -> types.Model:
    """The same model with activations and products in bfloat16.

    It is the same object each time, so that programs can be shared.

    Args:
        model: A model of float32.
        rounds: Whether parameters are rounded to bfloat16 on their way into the model.
            Most custom modules compute in the widest type among their input and
            parameters, and tokens have no type that layers could follow.

    Returns:
        A Model with parameters of the same shapes and types, whose `forward` takes and
        gives float32.
    """

    def forward(
        params: types.Params, stats: types.Stats, h: jax.Array, **mode: Any
    ) -> tuple[Any, types.Stats]:
        params = _cast(params, jnp.bfloat16) if rounds else params
        out, stats = model.forward(params, stats, _cast(h, jnp.bfloat16), **mode)
        return _cast(out, jnp.float32), stats

    def at_width(rate: float, scaler: Any = 1.0) -> types.Model:
        return in_bfloat16(model.at_width(rate, scaler), rounds=rounds)

    narrower = None if model.at_width is None else at_width
    return model._replace(forward=forward, at_width=narrower)


def _cast(tree: Any, dtype: Any) -> Any:
    """The floats of a pytree as `dtype`."""
    return jax.tree.map(
        lambda leaf: (
            leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        ),
        tree,
    )
