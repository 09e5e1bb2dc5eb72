"""Private rows on their way from the devices that have them to those that train them.

Where rows are shared out (`rows.slots`), each client trains where the planner has dealt
it, so that the devices end together. Its row comes from the device that has it, and the
trained one goes back. Only rows of the cohort travel. GPUs and TPUs send each row to
the one device that wants it (`ragged_all_to_all`). The devices of a CPU, which has no
such operation, send as many places to each other as a device trains clients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fedjax_pfl import execution, stacked
from fedjax_pfl.rows import tiled

# A device has room for this many bytes of rows that travel at once.
TRAVELLING_BYTES = 64 << 20
# Kinds of devices whose compilers know `ragged_all_to_all`
RAGGED = ("gpu", "tpu")
_AXIS = "clients"
_MINE, _ALL = PartitionSpec(_AXIS), PartitionSpec()


def take(tree: Any, row: jax.Array) -> Any:
    """Private rows at slots int32[C] of leaves [R, ...]; padding reads any row.

    Where rows are shared out, each device has C / D of the result, leaves [C, ...].
    """
    if not _is_shared(tree):
        return tiled.take(tree, row)

    def on_device(tree: Any, row: jax.Array) -> Any:
        out = jax.tree.map(
            lambda leaf: jnp.zeros((row.shape[1], *leaf.shape[1:]), leaf.dtype), tree
        )

        def with_part(out: Any, part: jax.Array, first: Any) -> Any:
            found = _Table.of(tree, part).to_trainers(tree)
            return jax.tree.map(
                lambda whole, new: jax.lax.dynamic_update_slice_in_dim(
                    whole, new, first, 0
                ),
                out,
                found,
            )

        return _in_parts(with_part, out, tree, row)

    return _mapped(on_device, (_MINE, _ALL))(tree, row)


def put(tree: Any, row: jax.Array, values: Any) -> Any:
    """Writes `values` [C, ...] into slots int32[C] of leaves [R, ...], as `take`.

    Padding (from R on) is dropped.
    """
    if not _is_shared(tree):
        return stacked.put(tree, row, values)

    def on_device(tree: Any, row: jax.Array, values: Any) -> Any:
        def with_part(tree: Any, part: jax.Array, first: Any) -> Any:
            size = part.shape[1]
            mine = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, size), values
            )
            return _Table.of(tree, part).to_owners(tree, mine)

        return _in_parts(with_part, tree, tree, row)

    return _mapped(on_device, (_MINE, _ALL, _MINE))(tree, row, values)


def are_finite(tree: Any, row: jax.Array) -> jax.Array:
    """bool[]: whether the rows at slots int32[C] have finite numbers. None travels."""

    def of(rows: Any) -> jax.Array:
        flags = [
            jnp.isfinite(leaf).all()
            for leaf in jax.tree.leaves(rows)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        return jnp.stack(flags).all() if flags else jnp.ones((), bool)

    if not _is_shared(tree):
        return of(tiled.take(tree, row))

    def on_device(tree: Any, row: jax.Array) -> jax.Array:
        return of(tiled.take(tree, _Table.of(tree, row).own))[None]

    return _mapped(on_device, (_MINE, _ALL))(tree, row).all()


def _is_shared(tree: Any) -> bool:
    return execution.setting().owners is not None and bool(jax.tree.leaves(tree))


def _mapped(on_device: Callable[..., Any], specs: tuple) -> Callable[..., Any]:
    """Maps `(tree, row, ...)` over the devices.

    The slots int32[C] become int32[D, C / D], those that each device trains.
    """
    mesh = execution.setting().owners

    def one(tree: Any, row: jax.Array, *others: Any) -> Any:
        return on_device(tree, row.reshape(mesh.size, -1), *others)

    given = {"in_specs": specs, "out_specs": _MINE, "check_vma": False}
    return jax.shard_map(one, mesh=mesh, **given)


def _in_parts(
    with_part: Callable[[Any, jax.Array, Any], Any],
    start: Any,
    tree: Any,
    row: jax.Array,
) -> Any:
    """The carry after `with_part(carry, slots int32[D, n], first)`, part after part.

    `row` int32[D, C / D] is cut so that the rows of a part fit. The last part may begin
    with places of the one before, since a row may travel twice.
    """
    devices, size = row.shape
    leaves = jax.tree.leaves(tree)
    num_bytes = sum(x.size * x.dtype.itemsize for x in leaves) // leaves[0].shape[0]
    length = min(size, max(TRAVELLING_BYTES // max(devices * num_bytes, 1), 1))
    if length == size:
        return with_part(start, row, 0)

    def step(index: jax.Array, carry: Any) -> Any:
        first = jnp.minimum(index * length, size - length)
        part = jax.lax.dynamic_slice_in_dim(row, first, length, axis=1)
        return with_part(carry, part, first)

    return jax.lax.fori_loop(0, -(-size // length), step, start)


class _Table(NamedTuple):
    """Who has and who trains each row, as one of D devices sees it.

    `owner` int32[D, n] is the device that has what device d trains at place i, `place`
    int32[D, n] the row there, or one past the end for padding, which does not travel.
    `device` int32[] is this one, and `size` the rows that it has.
    """

    owner: jax.Array
    place: jax.Array
    device: jax.Array
    size: int

    @classmethod
    def of(cls, tree: Any, row: jax.Array) -> "_Table":
        """The table of slots int32[D, n] on a device with leaves [R / D, ...]."""
        size, devices = jax.tree.leaves(tree)[0].shape[0], row.shape[0]
        is_real = row < devices * size
        owner = jnp.where(is_real, row // size, jnp.arange(devices)[:, None])
        place = jnp.where(is_real, row % size, size)
        return cls(owner, place, jax.lax.axis_index(_AXIS), size)

    @property
    def own(self) -> jax.Array:
        """int32[D n]: the rows of this device, and one past its end for the others'."""
        is_own = self.owner == self.device
        return jnp.where(is_own, self.place, self.size).reshape(-1)

    @property
    def counts(self) -> jax.Array:
        """int32[D, D]: how many rows a device trains, by the device that has them."""
        devices = jnp.arange(self.owner.shape[0])
        return (self.owner[..., None] == devices).sum(1, dtype=jnp.int32)

    @property
    def leaving(self) -> jax.Array:
        """int32[D n]: this device's rows by who trains them, then one past its end."""
        is_other = (self.owner != self.device).reshape(-1)
        return self.own[jnp.argsort(is_other, stable=True)]

    @property
    def arriving(self) -> jax.Array:
        """int32[n]: the places of what this device trains, by who has it."""
        return jnp.argsort(self.owner[self.device], stable=True)

    def to_trainers(self, tree: Any) -> Any:
        """The rows [n, ...] that this device trains, of leaves [R / D, ...]."""
        mine = self.owner[self.device]
        if execution.setting().platform in RAGGED:
            sent, order = tiled.take(tree, self.leaving), jnp.argsort(self.arriving)
            counts = self.counts
            found = _sent(sent, len(mine), counts, self.device)
            return stacked.take(found, order)
        sent = tiled.take(tree, self.own)

        def one(leaf: jax.Array) -> jax.Array:
            by_trainer = leaf.reshape(*self.owner.shape, *leaf.shape[1:])
            by_owner = jax.lax.all_to_all(by_trainer, _AXIS, 0, 0)
            return by_owner[mine, jnp.arange(len(mine))]

        return jax.tree.map(one, sent)

    def to_owners(self, tree: Any, values: Any) -> Any:
        """The rows [R / D, ...] after all devices have trained `values` [n, ...]."""
        if execution.setting().platform in RAGGED:
            sent, counts = stacked.take(values, self.arriving), self.counts.T
            found = _sent(sent, self.owner.size, counts, self.device)
            return stacked.put(tree, self.leaving, found)
        found = jax.lax.all_gather(values, _AXIS, tiled=True)
        return stacked.put(tree, self.own, found)


def _sent(rows: Any, room: int, counts: jax.Array, device: jax.Array) -> Any:
    """What this device gets, leaves [room, ...], by the devices that it is from.

    `rows` are in the order of the devices that get them, and `counts` int32[D, D] says
    how many device i gets from j.
    """
    to, of = counts[:, device], counts[device]
    begin = jnp.cumsum(to) - to, (jnp.cumsum(counts, 1) - counts)[:, device]

    def one(leaf: jax.Array) -> jax.Array:
        out = jnp.zeros((room, *leaf.shape[1:]), leaf.dtype)
        given = begin[0], to, begin[1], of
        return jax.lax.ragged_all_to_all(leaf, out, *given, axis_name=_AXIS)

    return jax.tree.map(one, rows)
