"""Private rows on their way between the host and the devices, a few megabytes at once.

Only rows that change travel. They leave a state and enter it slot by slot, so that all
others stay where they are, and the memory through which they pass is used again: fresh
memory costs more than the copy.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fedjax_pfl import execution, over_devices, stacked
from fedjax_pfl.rows import slots, tiled

# The rows that travel together have at most this many bytes, or each device has one.
CHUNK_BYTES = 16 << 20
# Bytes that may wait on the devices until the host has stored them. A CPU's are fresh
# memory, and nothing is won by waiting.
WAITING_BYTES = {"cpu": 2 * CHUNK_BYTES}
WAITING_BYTES_ELSEWHERE = 256 << 20


class Part(NamedTuple):
    """The clients int[n] of a chunk of one variant and device, n > 0.

    `place` is where they are among the chunk's D * m places.
    """

    variant: int
    device: int
    ids: np.ndarray
    place: slice


class Chunk(NamedTuple):
    """Clients whose rows travel together, at most m for each variant and device.

    `ids` are lists of int[n] by variant and device. `slot` int32[variants, D * m] has
    their slots on their own device, and distinct ones that do not exist for padding.
    """

    ids: list[list[np.ndarray]]
    slot: np.ndarray

    def parts(self) -> Iterator[Part]:
        """Its clients, for each variant and device that has some."""
        size = self.slot.shape[1] // len(self.ids[0])
        for variant, of_devices in enumerate(self.ids):
            for device, ids in enumerate(of_devices):
                if len(ids):
                    begin = device * size
                    place = slice(begin, begin + len(ids))
                    yield Part(variant, device, ids, place)


def chunks(
    ids: Sequence[np.ndarray],
    where: Sequence[np.ndarray],
    layout: slots.Layout,
    row_bytes: int,
) -> Iterator[Chunk]:
    """Clients int[n] of each variant in chunks, in this order on each device.

    `where` int[n] are their slots in the layout, and `row_bytes` those of a row.
    """
    most = layout.rows_per_device
    every = len(ids) * layout.devices * max(row_bytes, 1)
    size = min(max(CHUNK_BYTES // every, 1), most)
    of_all = [
        [(one[at], slot[at] % most) for at in layout.places(one)]
        for one, slot in zip(ids, where, strict=True)
    ]
    longest = max(len(mine) for of_devices in of_all for mine, _ in of_devices)
    for first in range(0, longest, size):
        cut = slice(first, first + size)
        place = np.tile(most + np.arange(size), (len(ids), layout.devices, 1))
        for variant, of_devices in enumerate(of_all):
            for device, (mine, slot) in enumerate(of_devices):
                place[variant, device, : len(mine[cut])] = slot[cut]
        some = [[mine[cut] for mine, _ in of_devices] for of_devices in of_all]
        yield Chunk(some, place.reshape(len(ids), -1).astype(np.int32))


def most_waiting(how: execution.Execution) -> int:
    """Bytes of rows that may wait on the devices until the host has stored them."""
    return WAITING_BYTES.get(how.platform, WAITING_BYTES_ELSEWHERE)


def taken(rows: Any, chunk: Chunk, how: execution.Execution) -> Any:
    """The rows of a chunk, leaves [variants, D * m, ...], soon on the host too.

    `rows` has leaves [variants, R, ...]. This does not wait.
    """
    found = _program(_take, how, *_key(rows))(rows, chunk.slot)
    execution.read_soon(found)
    return found


def of_devices(leaf: jax.Array, chunk: Chunk) -> dict[int, np.ndarray]:
    """A leaf of `taken` as the parts of this process's devices, [variants, m, ...]."""
    if leaf.is_fully_replicated:
        return {0: np.asarray(leaf)}
    size = chunk.slot.shape[1] // len(chunk.ids[0])
    parts = {(x.index[1].start or 0) // size: x.data for x in leaf.addressable_shards}
    return {device: np.asarray(part) for device, part in parts.items()}


def put(rows: Any, chunk: Chunk, values: Any, how: execution.Execution) -> Any:
    """Rows [variants, R, ...], whose memory is used, with those of a chunk.

    `values` has leaves [variants, D * m, ...].
    """
    return _program(_put, how, *_key(rows))(rows, chunk.slot, values)


def _take(rows: Any, slot: jax.Array) -> Any:
    row, shape = _flat_index(rows, slot), slot.shape
    found = stacked.take(stacked.flat(rows), row)
    return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), found)


def _put(rows: Any, slot: jax.Array, values: Any) -> Any:
    row = _flat_index(rows, slot)

    def one(leaf: jax.Array, new: jax.Array) -> jax.Array:
        return leaf.at[row].set(new, mode="drop", unique_indices=True)

    found = jax.tree.map(one, *map(stacked.flat, (rows, values)))
    return jax.tree.map(lambda new, leaf: new.reshape(leaf.shape), found, rows)


def _flat_index(rows: Any, slot: jax.Array) -> jax.Array:
    """int32[variants * n]: slots int32[variants, n] in `stacked.flat` rows."""
    variants, most = jax.tree.leaves(rows)[0].shape[:2]
    first = jnp.arange(variants, dtype=np.int32)[:, None] * most
    padding = variants * most + jnp.arange(slot.size, dtype=np.int32)
    return jnp.where(slot < most, slot + first, padding.reshape(slot.shape)).reshape(-1)


def _key(rows: Any) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    leaves, structure = jax.tree.flatten(rows)
    return structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)


@functools.lru_cache(maxsize=16)
def _program(
    fn: Callable[..., Any],
    how: execution.Execution,
    structure: Any,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
) -> Callable[..., Any]:
    """`_take` or `_put`, compiled for rows of such shapes, where `how` has them."""
    if how.shares_rows:
        # Each device takes and puts the rows of its own clients.
        own = PartitionSpec(None, "clients")
        specs = (own,) * (3 if fn is _put else 2)
        fn_of_all = over_devices.mapped(fn, how.mesh, specs, own)
    else:
        fn_of_all = fn
    where = tiled.of_rows(structure.unflatten(leaves), how)
    donated = (0,) if fn is _put else ()
    return jax.jit(fn_of_all, out_shardings=where, donate_argnums=donated)
