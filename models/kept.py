"""Values that a CPU keeps instead of computing them again for each reader.

There XLA fuses a chain of cheap operations into whatever reads its end, and computes
it again in each reader. The chain of a residual block has two norms, a relu and a sum,
begins with that of the block before, and is read by a convolution, the sums of the next
norm, their gradients and the next block. So chains as long as a stage were computed in
each of these places. XLA does not look into loops, and keeps the result of one.
"""

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from fedjax_pfl import execution
from models import forms, primitives

# What is smaller stays in the caches, where computing it again costs no more.
BYTES = 1 << 18


def kept(h: jax.Array) -> jax.Array:
    """float[C, ...] as it is, kept on a CPU if it is large; so is its gradient."""
    is_cpu = execution.setting().platform == "cpu" and forms.has_slices(h.shape)
    if not is_cpu or h.nbytes < BYTES:
        return h
    return _kept.bind(h.reshape(len(h), -1)).reshape(h.shape)


def _copied(h: jax.Array) -> jax.Array:
    """float[C, N], one channel after another."""

    def copy(index: jax.Array, out: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_slice_in_dim(h, index, 1)
        return jax.lax.dynamic_update_slice_in_dim(out, one, index, 0)

    return jax.lax.fori_loop(0, len(h), copy, jnp.zeros_like(h))


_kept = primitives.linear("kept", _copied, (2,), lambda shape: shape)
ad.deflinear2(_kept, lambda g, _: [_kept.bind(g)])
