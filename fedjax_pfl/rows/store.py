"""Private rows in the host's memory or in a file, leaf by leaf.

A client that has never trained has the row with which all begin, so that only trained
rows take memory, here and in a checkpoint. A row is a client's part of
`RoundState.clients` and `RoundState.opt_state`.
"""

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_pfl import shapes, types
from fedjax_pfl.rows import views

# A store grows by this many bytes.
PART_BYTES = 64 << 20
# The leaves of a part begin at multiples of this many bytes.
ALIGNMENT = 64


def num_bytes(rows: Any, lead: int) -> int:
    """The bytes of one row, from leaves with `lead` axes before those of a row."""
    return sum(
        math.prod(leaf.shape[lead:]) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(rows)
    )


def empty(rows: Any, lead: int, *shape: int) -> list[np.ndarray]:
    """Memory for leaves [*shape, ...], which a CPU's programs read without a copy.

    `rows` has leaves with `lead` axes before those of a row.
    """
    leaves = [(leaf.shape[lead:], leaf.dtype) for leaf in jax.tree.leaves(rows)]
    size = sum(-(-math.prod((*shape, *s)) * t.itemsize // ALIGNMENT) for s, t in leaves)
    memory = np.empty((size + 1) * ALIGNMENT, np.uint8)
    return _cut(memory[-memory.ctypes.data % ALIGNMENT :], shape, leaves)


def _cut(
    memory: np.ndarray,
    lead: tuple[int, ...],
    leaves: Sequence[tuple[tuple[int, ...], np.dtype]],
) -> list[np.ndarray]:
    """Leaves [*lead, *shape] in memory uint8[n], by their (shape, dtype)."""
    out, begin = [], 0
    for shape, dtype in leaves:
        end = begin + math.prod((*lead, *shape)) * dtype.itemsize
        out.append(memory[begin:end].view(dtype).reshape(*lead, *shape))
        begin = -(-end // ALIGNMENT) * ALIGNMENT
    return out


def differ(rows: Any, common: Any) -> np.ndarray:
    """bool[N]: which rows, leaves [N, ...], differ in bytes from `common`, [...]."""

    def in_bytes(leaf: np.ndarray, count: int) -> np.ndarray:
        return np.ascontiguousarray(leaf).reshape(count, -1).view(np.uint8)

    pairs = zip(jax.tree.leaves(rows), jax.tree.leaves(common), strict=True)
    found = [
        (in_bytes(mine, len(mine)) != in_bytes(one, 1)).any(1) for mine, one in pairs
    ]
    return np.any(found, axis=0)


class Store:
    """The rows of one variant's clients: the common one, and those that have trained.

    `common` is the row of a client that has never trained, a pytree of leaves [...].

    Of several processes each stores the rows of its own devices' clients, and knows
    who has trained elsewhere. All make the same calls, but for `read` and for the rows
    that they write.
    """

    def __init__(
        self,
        common: Any,
        num_clients: int,
        folder: str = "",
        homes: Sequence[int] = (0,),
    ):
        """A store without trained clients.

        `num_clients` is K. Rows are in a file without a name in `folder`, which
        disappears with the process, or in memory for "". `homes` int[D] is the process
        of each device, and the rows of client k are stored in that of device k mod D.
        """
        self.common = common
        leaves, self._structure = jax.tree.flatten(common)
        self._common = [np.asarray(leaf) for leaf in leaves]
        self._leaves = [(leaf.shape, leaf.dtype) for leaf in self._common]
        # Places in the store of the client's process
        self._slot = np.full(num_clients, -1, np.int32)
        self._homes, self._own = np.asarray(homes), jax.process_index()
        self._used = np.zeros(max(homes) + 1, int)
        # The parts of this process's store, each with all leaves [part_rows, ...]
        self._parts = []
        self._part_rows = max(1, PART_BYTES // max(num_bytes(common, 0), 1))
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder) if folder else None

    @property
    def ids(self) -> np.ndarray:
        """int64[n]: the clients that have trained, in order."""
        return np.flatnonzero(self._slot >= 0)

    def trained(self, ids: np.ndarray) -> np.ndarray:
        """bool[n]: which of clients int[n] have trained."""
        return self._slot[ids] >= 0

    def in_order(self, ids: np.ndarray) -> np.ndarray:
        """Clients int[n] of one device in the order in which they are read fastest."""
        return ids[np.argsort(self._slot[ids], kind="stable")]

    def read(self, ids: np.ndarray, out: Sequence[np.ndarray] | None = None) -> Any:
        """The rows of own clients int[n], leaves [n, ...]; K gives the common row.

        They are in `out`, if given: leaves [n, ...] in a list.
        """
        if out is None:
            out = [np.empty((len(ids), *shape), dtype) for shape, dtype in self._leaves]
        for index, leaf in enumerate(out):
            self._read(index, ids, leaf)
        return self._structure.unflatten(out)

    def _read(self, index: int, ids: np.ndarray, out: np.ndarray) -> None:
        """The rows of clients int[n] in one leaf, into `out` [n, ...]."""
        is_client = ids < len(self._slot)
        slot = np.where(is_client, self._slot[np.where(is_client, ids, 0)], -1)
        if (slot < 0).any():
            out[slot < 0] = self._common[index]
        for number, here in _by_part(slot // self._part_rows):
            leaf, place = self._parts[number][index], slot[here] % self._part_rows
            if isinstance(here, slice):
                # Not with mode="raise", which copies once more
                np.take(leaf, place, axis=0, out=out[here], mode="clip")
            else:
                out[here] = leaf[place]

    def write(self, ids: np.ndarray, rows: Any) -> None:
        """Stores rows, leaves [n, ...], as those of own clients int[n], all distinct.

        Raises OSError if the file cannot grow.
        """
        self.claim(ids)
        self._put(ids, list(enumerate(jax.tree.leaves(rows))))

    def claim(self, ids: np.ndarray) -> None:
        """Counts clients int[n], all distinct, as trained; their rows are yet to come.

        Their own processes get these by `write` or `fill`. Raises OSError as `write`.
        """
        new = ids[self._slot[ids] < 0]
        homes = self._home(new)
        for home in np.unique(homes):
            mine = new[homes == home]
            begin, end = self._used[home], self._used[home] + len(mine)
            while home == self._own and end > len(self._parts) * self._part_rows:
                self._parts.append(self._grown())
            # In this order, so that an interrupt gives no slot to two clients.
            self._used[home] = end
            self._slot[mine] = np.arange(begin, end)

    def fill(self, index: int, ids: np.ndarray, leaf: np.ndarray) -> None:
        """Stores leaf `index` [n, ...] of claimed clients int[n], of its own ones."""
        mine = np.flatnonzero(self._home(ids) == self._own)
        if len(mine) < len(ids):
            ids, leaf = ids[mine], leaf[mine]
        self._put(ids, [(index, leaf)])

    def _put(self, ids: np.ndarray, leaves: Sequence[tuple[int, np.ndarray]]) -> None:
        """Stores leaves [n, ...] with these indices of own clients int[n]."""
        slot = self._slot[ids]
        for number, here in _by_part(slot // self._part_rows):
            place = slot[here] % self._part_rows
            for index, leaf in leaves:
                self._parts[number][index][place] = leaf[here]

    def _home(self, ids: np.ndarray) -> np.ndarray:
        """int[n]: the processes that store the rows of clients int[n]."""
        return self._homes[ids % len(self._homes)]

    def _grown(self) -> list[np.ndarray]:
        """One more part, leaves [rows, ...]."""
        if self._file is None:
            return empty(self._common, 0, self._part_rows)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._leaves]
        lines = sum(-(-self._part_rows * size // ALIGNMENT) for size in sizes)
        size = max(lines, 1) * ALIGNMENT
        begin = len(self._parts) * size
        try:
            # With truncation alone, a write on a full disk would end the process.
            os.posix_fallocate(self._file.fileno(), begin, size)
        except OSError as error:
            raise OSError(
                f"--client_state={self._folder}: rows of clients cannot be written "
                f"there: {error.strerror}"
            ) from error
        memory = np.memmap(self._file, np.uint8, "r+", begin, (size,))
        return _cut(memory, (self._part_rows,), self._leaves)

    def parts(self, ids: np.ndarray, index: int) -> Iterator[np.ndarray]:
        """The rows of clients int[n] in leaf `index`, in parts of bounded size.

        All processes go through them together.
        """
        shape, dtype = self._leaves[index]
        for first in range(0, len(ids), self._part_rows):
            some = ids[first : first + self._part_rows]
            out = np.empty((len(some), *shape), dtype)
            # All have the common row, and with one home for all clients every row.
            is_apart = self.trained(some) & (len(self._homes) > 1)
            home = np.where(is_apart, self._home(some), -1)
            is_here = (home < 0) | (home == self._own)
            self._read(index, np.where(is_here, some, len(self._slot)), out)
            share(out, home)
            yield out


def share(rows: np.ndarray, home: np.ndarray) -> None:
    """Gives all processes rows [n, ...], of which row i is that of process `home[i]`.

    Rows whose `home` is -1 are everywhere already. All processes call it together.
    """
    count = np.bincount(home[home >= 0], minlength=jax.process_count())
    if jax.process_count() == 1 or not rows.size or not count.max():
        return
    flat, own = rows.reshape(len(rows), -1).view(np.uint8), jax.process_index()
    # Few sizes, since each is a program
    most = shapes.rounded_up(int(count.max()))
    mine = np.zeros((most, flat.shape[1]), np.uint8)
    mine[: count[own]] = flat[home == own]
    every = multihost_utils.process_allgather(mine)
    for process in range(len(count)):
        flat[home == process] = every[process][: count[process]]


def _by_part(part: np.ndarray) -> Iterator[tuple[int, slice | np.ndarray]]:
    """Each part in int[n], but for -1, and where it is: a slice if that is possible."""
    for number in np.unique(part[part >= 0]).tolist():
        here = np.flatnonzero(part == number)
        first, end = int(here[0]), int(here[-1]) + 1
        yield number, slice(first, end) if end - first == len(here) else here


def streamed(
    stores: Sequence[Store], ids: Sequence[np.ndarray], lead: tuple[int, ...]
) -> Any:
    """Rows of clients int[n] of each store, for `checkpoint`, never in memory together.

    They have leaves [*lead, ...], in the order of stores and clients.
    """
    leaves, structure = jax.tree.flatten(stores[0].common)

    def of(index: int) -> views.Streamed:
        def pieces() -> Iterator[np.ndarray]:
            for one, mine in zip(stores, ids, strict=True):
                yield from (part.reshape(-1) for part in one.parts(mine, index))

        shape = (*lead, *np.shape(leaves[index]))
        return views.Streamed(shape, np.dtype(leaves[index].dtype), pieces)

    return structure.unflatten(map(of, range(len(leaves))))


class Kept(NamedTuple):
    """The state of a run in the form of a checkpoint.

    `state` is the RoundState, with rows as leaves [n, ...] of all trained clients,
    variant after variant. `common` are the rows of a client that has never trained,
    leaves [variants, ...]. `ids` int64[n] are the trained clients, and `count`
    int64[variants] is the number of each variant.
    """

    state: types.RoundState
    common: Any
    ids: np.ndarray
    count: np.ndarray


def _shaped(state: types.RoundState, *lead: int) -> types.RoundState:
    """The shapes of a state with other leading axes of its rows."""
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape[2:]), leaf.dtype),
        state.private,
    )
    return state.with_private(rows)


def kept_template(state: types.RoundState) -> Kept:
    """The shapes of `Kept`, from those of a state; axes of -1 may have any length."""
    variants, number = state.round.shape[0], np.dtype(np.int64)
    common = _shaped(state, variants)
    return Kept(
        _shaped(state, -1),
        (common.clients, common.opt_state),
        jax.ShapeDtypeStruct((-1,), number),
        jax.ShapeDtypeStruct((variants,), number),
    )


def whole_template(state: types.RoundState, num_clients: int) -> types.RoundState:
    """The shapes of the state of all clients, from those of the device's."""
    return _shaped(state, state.round.shape[0], num_clients)


class Found(NamedTuple):
    """Rows that were saved, in either form, which are read leaf by leaf.

    `rows` are the leaves with all rows, `lead` axes before those of a row, and `ids`
    int64[n] the clients of each variant in their order. `common` are leaves [variants,
    ...] with the row of all other clients, None = there are none. `structure` is that
    of leaves in a state.
    """

    structure: Any
    rows: list[Any]
    lead: int
    ids: list[np.ndarray]
    common: list[np.ndarray] | None

    def shape(self, index: int) -> tuple[int, ...]:
        """The shape of a row in leaf `index`."""
        return tuple(self.rows[index].shape[self.lead :])

    def blocks(self, index: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(variant, clients int[n], their rows [n, ...] in leaf `index`), in order.

        The leaf is never in memory as a whole.
        """
        client = np.concatenate(self.ids)
        variant = np.repeat(np.arange(len(self.ids)), [len(one) for one in self.ids])
        pieces, done = views.pieces_of(self.rows[index]), 0
        for rows in views.in_rows(pieces, self.shape(index)):
            here = slice(done, done + len(rows))
            for one, cut in _by_part(variant[here]):
                yield one, client[here][cut], rows[cut]
            done += len(rows)

    def other_than(self, common: Sequence[Any], num_clients: int) -> list[np.ndarray]:
        """int64[n] for each variant: the clients whose rows differ in bytes from one.

        `common` are leaves [variants, ...] of it. All leaves are read once.
        """
        found = np.zeros((len(self.ids), num_clients), bool)
        for index, leaf in enumerate(common):
            for variant, ids, rows in self.blocks(index):
                found[variant, ids] |= differ(rows, leaf[variant])
        return [np.flatnonzero(one) for one in found]

    def whole(self, index: int, num_clients: int) -> np.ndarray:
        """Leaf `index` of all K clients, [variants, K, ...]."""
        if self.common is None:
            return views.materialised(self.rows[index])
        out = np.repeat(self.common[index][:, None], num_clients, 1)
        for variant, ids, rows in self.blocks(index):
            out[variant, ids] = rows
        return out


def opened(
    found: types.RoundState | Kept, num_clients: int
) -> tuple[types.RoundState, Found]:
    """A state that was saved without its rows, which are still to be read, and these.

    `found` has leaves as in `views`, and all processes read them in the same order.
    """
    state, lead, common = found, 2, None
    if isinstance(found, Kept):
        state, lead = found.state, 1
        common, ids, count = jax.tree.map(views.materialised, found[1:])
        common = [np.asarray(leaf) for leaf in jax.tree.leaves(common)]
        ids = np.split(ids, np.cumsum(count)[:-1])
    alone = jax.tree.map(views.materialised, state.with_private(((), ())))
    if lead == 2:
        ids = [np.arange(num_clients)] * len(alone.round)
    rows, structure = jax.tree.flatten(state.private)
    return alone, Found(structure, rows, lead, ids, common)
