"""Pytrees stacked along a leading axis: take, put, repeat and select their rows."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def at(tree: Any, index: Any) -> Any:
    """`leaf[index]` of all leaves, for a row, a slice or rows of the host."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def take(tree: Any, row: jax.Array) -> Any:
    """Rows `row` int32[C] of leaves [K, ...]. Padding (from K on) reads the last."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, row, axis=0, mode="clip"), tree)


def put(tree: Any, row: jax.Array, values: Any) -> Any:
    """Writes `values` [C, ...] into rows `row`. Padding (from K on) is dropped."""
    return jax.tree.map(
        lambda leaf, value: leaf.at[row].set(value, mode="drop"), tree, values
    )


def checked_new(rows: Any, values: Any, count: int) -> Any:
    """`values` [C, ...], `count` private rows like those of leaves [K, ...], as arrays.

    Raises ValueError unless they have the structure, shapes and dtypes, as `put` would
    broadcast and convert silently.
    """
    rows, values = (jax.tree.map(jnp.asarray, tree) for tree in (rows, values))
    if jax.tree.structure(rows) != jax.tree.structure(values):
        raise ValueError(
            "a client's new private row is built in another way than `client.own`; "
            "return a row like it"
        )
    for held, new in zip(*map(jax.tree.leaves, (rows, values)), strict=True):
        if (held.dtype, (count, *held.shape[1:])) != (new.dtype, new.shape):
            held, new = (f"{x.dtype}{list(x.shape)}" for x in (held, new))
            raise ValueError(
                f"private rows of the clients are {held}, and {count} updates return "
                f"{new} for them; return a row like `client.own` for each client"
            )
    return values


def repeat(tree: Any, count: int) -> Any:
    """`count` equal rows: leaves [...] become [count, ...], in separate buffers."""

    def one(leaf: Any) -> jax.Array:
        return jnp.repeat(jnp.asarray(leaf)[None], count, axis=0)

    return jax.tree.map(one, tree)


def zeros(like: Any, *lead: int) -> Any:
    """Zeros in the shapes and dtypes of leaves [...], as [*lead, ...]."""
    return jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), like)


def blank(rows: Any, *lead: int) -> Any:
    """Zeros for other rows than those of leaves [n, ...], as [*lead, ...]."""
    return jax.tree.map(lambda x: jnp.zeros((*lead, *x.shape[1:]), x.dtype), rows)


def where(mask: jax.Array, new: Any, old: Any) -> Any:
    """Row-wise choice: `new` where `mask` bool[C], else `old`, for leaves [C, ...]."""
    return jax.tree.map(lambda n, o: jnp.where(column(mask, n), n, o), new, old)


def column(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """`values` [C] reshaped to [C, 1, ...], to broadcast against `leaf` [C, ...]."""
    return values.reshape(-1, *(1,) * (leaf.ndim - 1))


def is_finite(tree: Any) -> jax.Array:
    """bool[]: whether all floating-point numbers of the leaves are finite."""
    flags = [
        jnp.isfinite(leaf).all()
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return jnp.stack(flags).all() if flags else jnp.ones((), bool)


def flat(tree: Any) -> Any:
    """Leaves [m, n, ...] as [m * n, ...]."""
    return jax.tree.map(
        lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), tree
    )


def in_batches(row: jax.Array, batch_size: int) -> jax.Array:
    """Rows int32[N] in order as int32[ceil(N / B), B], -1 = padding."""
    short = -row.shape[0] % batch_size
    return jnp.pad(row, (0, short), constant_values=-1).reshape(-1, batch_size)


def on_host(trees: Sequence[Any]) -> Any:
    """Stacks pytrees of numpy arrays, leaves [...], to one with leaves [n, ...]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
