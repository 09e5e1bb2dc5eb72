"""Layer masks: depth, dropping and boundaries as vectors over stages."""

import jax
import jax.numpy as jnp

from fedjax_pfl import types


def held(depth: jax.Array, num_stages: int) -> jax.Array:
    """bool[..., L]: the stages that a client of `depth` int32[...] holds."""
    return jnp.arange(num_stages) < depth[..., None]


def select(mask: jax.Array, new: types.Params, old: types.Params) -> types.Params:
    """Stage-wise `where(mask[i], new[i], old[i])`; mask is bool[L].

    Works for parameters, statistics and per-stage optimizer states alike.
    """
    return tuple(
        jax.tree.map(lambda n, o, i=i: jnp.where(mask[i], n, o), new[i], old[i])
        for i in range(len(new))
    )


def splice(client: types.Params, server: types.Params, keep: jax.Array) -> types.Params:
    """`where(keep[i], client[i], stop_gradient(server[i]))`; keep is bool[L].

    One ordinary forward pass through the result runs the client's stages where
    `keep` is True and the frozen server's elsewhere; gradients are masked for free.
    """
    return select(keep, client, jax.lax.stop_gradient(server))
