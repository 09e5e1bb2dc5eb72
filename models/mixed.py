"""Mixed precision: a model whose layers compute in bfloat16, with float32 around them.

Parameters, gradients, statistics, inputs and outputs are float32, also between two
stages that run in separate calls. The layers of `stages` multiply in the type of their
input, and add biases and take means and variances in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import types


@functools.lru_cache(maxsize=64)
def in_bfloat16(model: types.Model, *, rounds: bool = False) -> types.Model:
    """The same model with activations and products in bfloat16.

    Equal arguments give the same object, so that programs can be shared. Parameters
    keep their shapes and types, and `forward` takes and gives float32. `rounds` rounds
    parameters to bfloat16 on their way in: most custom modules compute in the widest
    type of input and parameters, and tokens have no type that layers could follow.
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
