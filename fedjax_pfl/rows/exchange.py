"""Private rows on their way from the devices that have them to those that train them.

Where rows are shared out (`rows.slots`), each client trains where the planner has dealt
it, so that the devices end together. Its row comes from the device that has it, and the
trained one goes back. Only rows of the cohort and its peers travel. GPUs and TPUs send
each to the one device that wants it (`ragged_all_to_all`). CPUs have no such operation.
Their devices send each other equally many places, as often as it takes, and what is at
home already is not sent.

On a CPU these trips must not run beside another communication, since both may keep as
many threads as there are. XLA waits where one depends on the other's result, and starts
what follows a loop in the program before the loop has ended. So trips that bring rows
back depend on what was computed before, by way of the number of the round (`behind`),
and sums over the clients' numbers are taken without communication (`everywhere`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fedjax_pfl import execution, over_devices, stacked
from fedjax_pfl.rows import tiled, views

# A device has room for this many bytes of rows that travel at once.
TRAVELLING_BYTES = 64 << 20
# Kinds of devices whose compilers know `ragged_all_to_all`
RAGGED = ("gpu", "tpu")
_AXIS = "clients"
_MINE, _ALL = PartitionSpec(_AXIS), PartitionSpec()


def take(tree: Any, row: jax.Array, known: Any = ()) -> Any:
    """Private rows at slots int32[C] of leaves [R, ...]; padding reads any row.

    Where rows are shared out, each device has C / D of the result, leaves [C, ...], and
    the numbers [C] in it. Trips start behind `known`, leaves [C, ...]. With slots
    int32[C, n], such as those of peers, the result has leaves [C, n, ...].
    """
    if not _is_shared(tree):
        return tiled.take(tree, row)
    if row.ndim > 1:
        found = take(tree, row.reshape(-1), known)
        return jax.tree.map(lambda x: x.reshape(*row.shape, *x.shape[1:]), found)

    def by_trips(tree: Any, row: jax.Array, known: Any) -> Any:
        return _Trips.of(tree, behind(row, known)).take(tree)

    def on_device(tree: Any, row: jax.Array) -> Any:
        def with_part(out: Any, part: jax.Array, first: Any) -> Any:
            found = _Table.of(tree, part).take(tree)
            set_at = jax.lax.dynamic_update_slice_in_dim
            return jax.tree.map(lambda x, new: set_at(x, new, first, 0), out, found)

        out = stacked.blank(tree, row.shape[1])
        return _in_parts(with_part, out, tree, row)

    if not _makes_trips():
        return _mapped(on_device, (_MINE, _ALL))(tree, row)
    return everywhere(_mapped(by_trips, (_MINE, _ALL, _MINE))(tree, row, known))


def put(
    tree: Any, row: jax.Array, values: Any, round: jax.Array
) -> tuple[Any, jax.Array]:
    """Writes `values` [C, ...] into slots int32[C] of leaves [R, ...], as `take`.

    Padding (from R on) is dropped. `round` int32[] is the number of the round, behind
    which trips start. Returns the rows, and `round` behind them.
    """
    if not _is_shared(tree):
        return stacked.put(tree, row, values), round

    def by_trips(tree: Any, row: jax.Array, values: Any) -> Any:
        return _Trips.of(tree, row).put(tree, values)

    def on_device(tree: Any, row: jax.Array, values: Any) -> Any:
        def with_part(tree: Any, part: jax.Array, first: Any) -> Any:
            cut = jax.lax.dynamic_slice_in_dim
            mine = jax.tree.map(lambda x: cut(x, first, part.shape[1]), values)
            return _Table.of(tree, part).put(tree, mine)

        return _in_parts(with_part, tree, tree, row)

    specs = _MINE, _ALL, _MINE
    if not _makes_trips():
        return _mapped(on_device, specs)(tree, row, values), round
    row, values = row + _zero(round), everywhere(values)
    rows, trips = _mapped(by_trips, specs, (_MINE, _ALL))(tree, row, values)
    return rows, round + _zero(trips)


def behind(tree: Any, known: Any) -> Any:
    """Makes the integers and bools of a tree depend on `known`, for XLA's scheduler.

    Their values stay the same. `known` is any tree of arrays. Leaves of `tree` with
    more than two axes, and floats, are returned as they are.
    """
    if not _makes_trips():
        return tree
    zero = _zero_of(known)

    def one(leaf: jax.Array) -> jax.Array:
        is_exact = leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.integer)
        return leaf ^ zero.astype(leaf.dtype) if is_exact and leaf.ndim <= 2 else leaf

    return jax.tree.map(one, tree)


def _zero_of(known: Any) -> jax.Array:
    """A 0, int32[], that XLA takes for a result of the first number of each leaf."""
    zero = jnp.int32(0)
    for leaf in map(jnp.asarray, jax.tree.leaves(known)):
        if leaf.size and not views.is_key(leaf):
            first = leaf[(0,) * leaf.ndim].astype(jnp.float32)
            bits = jax.lax.bitcast_convert_type(first, jnp.int32)
            zero += _zero(jax.lax.shift_right_logical(bits, jnp.int32(1)))
    return zero


def _zero(number: jax.Array) -> jax.Array:
    """A 0 that XLA takes for a result of `number`, int32[], which is never below 0."""
    return jnp.minimum(number, 0)


def is_number(leaf: jax.Array) -> bool:
    """Whether a leaf [C, ...] has clients' numbers: [C], or integers, bools [C, n]."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return leaf.ndim == 1 or (leaf.ndim == 2 and not is_float)


def everywhere(tree: Any) -> Any:
    """A tree in which every device has the numbers of all clients, if trips are made.

    Sums over them then need no communication, for which trips would have to wait.
    """
    return jax.tree.map(lambda x: on_all(x) if is_number(x) else x, tree)


def on_all(tree: Any) -> Any:
    """A small tree of which every device has all, if trips are made."""
    if not _makes_trips():
        return tree
    where = jax.sharding.NamedSharding(execution.setting().owners, _ALL)
    return jax.lax.with_sharding_constraint(tree, where)


def gathered(tree: Any) -> Any:
    """Leaves [C, ...], of which each device has a part, on all devices.

    None of them is sent before all have arrived.
    """
    return on_all(tied(tree))


def tied(tree: Any) -> Any:
    """The same leaves [C, ...], each of which XLA computes from all of them."""
    if not _makes_trips():
        return tree

    def on_device(tree: Any) -> Any:
        zero = _zero_of(tree)

        def one(leaf: jax.Array) -> jax.Array:
            if leaf.dtype == bool:
                return leaf ^ zero.astype(bool)
            bits = jnp.dtype(f"int{8 * leaf.dtype.itemsize}")
            same = jax.lax.bitcast_convert_type(leaf, bits) ^ zero.astype(bits)
            return jax.lax.bitcast_convert_type(same, leaf.dtype)

        return jax.tree.map(one, tree)

    mesh = execution.setting().owners
    return over_devices.mapped(on_device, mesh, (_MINE,), _MINE)(tree)


def are_finite(tree: Any, row: jax.Array) -> jax.Array:
    """bool[]: whether the rows at slots int32[C] have finite numbers. None travels.

    The last row of a device counts, too, where padding or rows of others are read.
    """

    if not _is_shared(tree):
        return stacked.is_finite(tiled.take(tree, row))

    def on_device(tree: Any, row: jax.Array) -> jax.Array:
        own = tiled.take(tree, _Table.of(tree, row).own)
        return stacked.is_finite(own)[None]

    return _mapped(on_device, (_MINE, _ALL))(tree, row).all()


def _makes_trips() -> bool:
    """Whether rows are shared out, by devices that cannot send each on its own."""
    setting = execution.setting()
    return setting.owners is not None and setting.platform not in RAGGED


def _is_shared(tree: Any) -> bool:
    return execution.setting().owners is not None and bool(jax.tree.leaves(tree))


def _mapped(
    on_device: Callable[..., Any], specs: tuple, out_specs: Any = _MINE
) -> Callable[..., Any]:
    """Maps `(tree, row, ...)` over the devices.

    The slots int32[C] become int32[D, C / D], those that each device trains.
    """
    mesh = execution.setting().owners

    def one(tree: Any, row: jax.Array, *others: Any) -> Any:
        return on_device(tree, row.reshape(mesh.size, -1), *others)

    return over_devices.mapped(one, mesh, specs, out_specs)


def _room(tree: Any, devices: int) -> int:
    """How many rows for each device fit where rows travel."""
    leaves = jax.tree.leaves(tree)
    num_bytes = sum(x.size * x.dtype.itemsize for x in leaves) // leaves[0].shape[0]
    return max(TRAVELLING_BYTES // max(devices * num_bytes, 1), 1)


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
    size = row.shape[1]
    length = min(size, _room(tree, len(row)))
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
    int32[D, n] the row there. Padding is at home, at a place one past the end. `device`
    int32[] is this one, and `size` the rows that it has.
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
    def is_from(self) -> jax.Array:
        """bool[D, n, D]: whether a device has what another trains at a place."""
        return self.owner[..., None] == jnp.arange(len(self.owner))

    @property
    def leaving(self) -> jax.Array:
        """int32[D n]: this device's rows by who trains them, then one past its end."""
        is_other = (self.owner != self.device).reshape(-1)
        return self.own[jnp.argsort(is_other, stable=True)]

    @property
    def arriving(self) -> jax.Array:
        """int32[n]: the places of what this device trains, by who has it."""
        return jnp.argsort(self.owner[self.device], stable=True)

    def take(self, tree: Any) -> Any:
        """The rows [n, ...] that this device trains, of leaves [R / D, ...]."""
        counts = self.is_from.sum(1, dtype=jnp.int32)
        sent = tiled.take(tree, self.leaving)
        found = self._sent(sent, self.owner.shape[1], counts)
        return stacked.take(found, jnp.argsort(self.arriving))

    def put(self, tree: Any, values: Any) -> Any:
        """The rows [R / D, ...] after all devices have trained `values` [n, ...]."""
        counts = self.is_from.sum(1, dtype=jnp.int32).T
        sent = stacked.take(values, self.arriving)
        found = self._sent(sent, self.owner.size, counts)
        return stacked.put(tree, self.leaving, found)

    def _sent(self, rows: Any, room: int, counts: jax.Array) -> Any:
        """What this device gets, leaves [room, ...], by the devices that it is from.

        `rows` are in the order of the devices that get them, and `counts` int32[D, D]
        says how many device i gets from j.
        """
        to, of = counts[:, self.device], counts[self.device]
        begin = jnp.cumsum(to) - to
        place = (jnp.cumsum(counts, 1) - counts)[:, self.device]

        def one(leaf: jax.Array) -> jax.Array:
            out = jnp.zeros((room, *leaf.shape[1:]), leaf.dtype)
            given = begin, to, place, of
            return jax.lax.ragged_all_to_all(leaf, out, *given, axis_name=_AXIS)

        return jax.tree.map(one, rows)


class _Trips(NamedTuple):
    """The trips of rows, in each of which every device sends every other `width` rows.

    `number` int32[D, n] counts what a device trains among what it gets from the same
    one, and is -1 at home. There are `count` int32[] trips, 0 where all train at home.
    """

    table: _Table
    number: jax.Array
    width: int

    @classmethod
    def of(cls, tree: Any, row: jax.Array) -> "_Trips":
        """The trips for slots int32[D, n] on a device with leaves [R / D, ...]."""
        table, devices = _Table.of(tree, row), row.shape[0]
        before = jnp.cumsum(table.is_from, 1) - 1
        number = jnp.take_along_axis(before, table.owner[..., None], 2)[..., 0]
        number = jnp.where(table.owner == jnp.arange(devices)[:, None], -1, number)
        width = min(-(-row.shape[1] // devices), _room(tree, devices))
        return cls(table, number, width)

    @property
    def count(self) -> jax.Array:
        return self.number.max() // self.width + 1

    @property
    def home(self) -> jax.Array:
        """int32[n]: this device's rows that it trains itself, or one past its end."""
        table, is_home = self.table, self.number[self.table.device] < 0
        return jnp.where(is_home, table.place[table.device], table.size)

    def of_trip(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What travels: (this device's rows int32[D, width] by who trains them, places
        int32[D, width] of what it trains itself by who has it), else one past the end.
        """
        table, (devices, num_places) = self.table, self.number.shape
        column = self.number - index * self.width
        column = jnp.where(column < 0, self.width, column)
        none = jnp.zeros((devices, self.width), jnp.int32)
        mine = jnp.where(table.owner == table.device, column, self.width)
        line = jnp.arange(devices)[:, None]
        given = (none + table.size).at[line, mine].set(table.place, mode="drop")
        at = table.owner[table.device], column[table.device]
        got = (none + num_places).at[at].set(jnp.arange(num_places), mode="drop")
        return given, got

    def take(self, tree: Any) -> Any:
        """As `_Table.take`."""

        def trip(index: jax.Array, out: Any) -> Any:
            given, got = self.of_trip(index)
            found = self._sent(tiled.take(tree, given.reshape(-1)))
            return stacked.put(out, got.reshape(-1), found)

        return jax.lax.fori_loop(0, self.count, trip, tiled.take(tree, self.home))

    def put(self, tree: Any, values: Any) -> tuple[Any, jax.Array]:
        """As `_Table.put`, and the trips made, int32[]."""

        def trip(index: jax.Array, carry: Any) -> Any:
            (given, got), (tree, made) = self.of_trip(index), carry
            found = self._sent(stacked.take(values, got.reshape(-1)))
            return stacked.put(tree, given.reshape(-1), found), made + 1

        start = stacked.put(tree, self.home, values), jnp.int32(0)
        return jax.lax.fori_loop(0, self.count, trip, start)

    def _sent(self, rows: Any) -> Any:
        """What this device gets, leaves [D width, ...] by device, of what it sends."""
        return jax.lax.all_to_all(rows, _AXIS, 0, 0, tiled=True)
