"""Clients are rows of stacked pytrees: take, put, and compute over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fedjax_pfl import types


def take(tree: Any, row: jax.Array) -> Any:
    """Rows `row` int32[C] of leaves [K, ...]; padding rows (K) read the last."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, row, axis=0, mode="clip"), tree)


def put(tree: Any, row: jax.Array, values: Any) -> Any:
    """Writes `values` [C, ...] into rows `row`; padding rows (K) are dropped."""
    return jax.tree.map(
        lambda leaf, value: leaf.at[row].set(value, mode="drop"), tree, values
    )


def repeat(tree: Any, count: int) -> Any:
    """`count` equal rows: leaves [...] become [count, ...], in buffers of their own."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], count, axis=0), tree)


def in_batches(row: jax.Array, batch_size: int) -> jax.Array:
    """Rows int32[N] in order as int32[ceil(N / B), B], -1 = padding."""
    short = -row.shape[0] % batch_size
    return jnp.pad(row, (0, short), constant_values=-1).reshape(-1, batch_size)


def padded_size(num_rows: int, execution: types.Execution) -> int:
    """Rows of a cohort once it fills whole chunks on every device."""
    devices = execution.mesh.size if execution.mesh else 1
    per_device = -(-num_rows // devices)
    chunk = min(execution.chunk, per_device)
    return devices * chunk * -(-per_device // chunk)


def replicated(execution: types.Execution) -> jax.sharding.Sharding:
    """Where tables and states live: on every device of the mesh, or on the one."""
    if execution.mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.sharding.NamedSharding(execution.mesh, PartitionSpec())


def over_clients(
    fn: Callable[[Any, Any, jax.Array], Any], execution: types.Execution
) -> Callable[[Any, Any, jax.Array], Any]:
    """Maps a function of one client over all rows of a cohort.

    Rows are cut into chunks; a chunk is vmapped, chunks run one after another, and
    devices share the rows by `shard_map`, so that the clients' computation needs no
    communication.

    Args:
        fn: `(row, shared, bound) -> out`. `row` is one row of `rows`; `bound` int32[]
            is the largest number of steps in the row's chunk and stays unbatched, so
            that a `fori_loop` up to it stops early.
        execution: Chunk size and mesh. The number of rows must be a multiple of
            chunk x devices (`padded_size`).

    Returns:
        `(rows, shared, num_steps) -> out` with `rows` leaves [C, ...], `num_steps`
        int32[C], and `out` leaves [C, ...].
    """

    def on_device(rows: Any, shared: Any, num_steps: jax.Array) -> Any:
        num_rows = num_steps.shape[0]
        chunk = min(execution.chunk, num_rows)

        def on_chunk(chunk_args: tuple[Any, jax.Array]) -> Any:
            chunk_rows, chunk_steps = chunk_args
            bound = chunk_steps.max()
            if chunk == 1:
                one = jax.tree.map(lambda leaf: leaf[0], chunk_rows)
                return jax.tree.map(lambda leaf: leaf[None], fn(one, shared, bound))
            return jax.vmap(lambda row: fn(row, shared, bound))(chunk_rows)

        if chunk == num_rows:
            return on_chunk((rows, num_steps))
        split = jax.tree.map(
            lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), (rows, num_steps)
        )
        out = jax.lax.map(on_chunk, split)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out)

    def run(rows: Any, shared: Any, num_steps: jax.Array) -> Any:
        chex.assert_equal_shape_prefix([num_steps, *jax.tree.leaves(rows)], 1)
        if num_steps.shape[0] != padded_size(num_steps.shape[0], execution):
            raise ValueError(
                f"{num_steps.shape[0]} rows do not fill chunks of {execution.chunk}; "
                "pad the cohort to rows.padded_size"
            )
        if execution.mesh is None:
            return on_device(rows, shared, num_steps)
        sharded = PartitionSpec("clients")
        return jax.shard_map(
            on_device,
            mesh=execution.mesh,
            in_specs=(sharded, PartitionSpec(), sharded),
            out_specs=sharded,
            check_vma=False,
        )(rows, shared, num_steps)

    return run
