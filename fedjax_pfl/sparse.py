"""Masks of single entries: the largest entries of a model, and their size in bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BITS = 32


def largest(score: Any, count: int | jax.Array, among: Any = None) -> Any:
    """A mask of the `count` largest of all entries of a pytree, leaves f32[...] >= 0.

    The bit pattern of the smallest of them is found bit by bit: 32 counts, no sort.
    `count` is int or int32[]. `among` has the entries that may be chosen, bool leaves
    of the same shapes with at least `count` True; None = all. Returns bool leaves
    [...], exactly `count` of them True, and of equal entries the first.
    """
    leaves, structure = jax.tree.flatten(score)
    # Floats that are not negative have the same order as their bits.
    order = jax.lax.bitcast_convert_type(_flat(leaves), jnp.uint32)
    if among is not None:
        order = jnp.where(_flat(jax.tree.leaves(among)), order + 1, 0)

    def narrowed(step: jax.Array, smallest: jax.Array) -> jax.Array:
        higher = smallest | jnp.uint32(1) << (BITS - 1 - step).astype(jnp.uint32)
        return jnp.where((order >= higher).sum() >= count, higher, smallest)

    smallest = jax.lax.fori_loop(0, BITS, narrowed, jnp.uint32(0))
    above, equal = order > smallest, order == smallest
    chosen = above | equal & (jnp.cumsum(equal) <= count - above.sum())
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = zip(jnp.split(chosen, ends), leaves, strict=True)
    return jax.tree.unflatten(structure, [p.reshape(leaf.shape) for p, leaf in parts])


def _flat(leaves: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([leaf.reshape(-1) for leaf in leaves])


def only(mask: Any, tree: Any) -> Any:
    """The entries of `mask`, and 0 elsewhere; bool leaves of the same shapes."""
    return jax.tree.map(lambda m, leaf: jnp.where(m, leaf, 0), mask, tree)


def bitmap_bytes(num_entries: int) -> int:
    """Bytes of a mask of that many entries, with one bit for each."""
    return -(-num_entries // 8)
