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

from fedjax_pfl import stacked, types
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
    """bool[N]: whose rows, leaves [N, ...], differ from one, leaves [...], in bytes."""

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
    """

    def __init__(self, common: Any, num_clients: int, folder: str = ""):
        """A store without trained clients.

        `num_clients` is K. Rows are in a file without a name in `folder`, which
        disappears with the process, or in memory for "".
        """
        self.common = common
        leaves, self._structure = jax.tree.flatten(common)
        self._common = [np.asarray(leaf) for leaf in leaves]
        self._leaves = [(leaf.shape, leaf.dtype) for leaf in self._common]
        self._slot = np.full(num_clients, -1, np.int32)
        # The parts of the store, each with all leaves [part_rows, ...]
        self._used, self._parts = 0, []
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
        """Clients int[n] in the order in which they are read fastest."""
        return ids[np.argsort(self._slot[ids], kind="stable")]

    def read(self, ids: np.ndarray, out: Sequence[np.ndarray] | None = None) -> Any:
        """The rows of clients int[n], leaves [n, ...]; K gives the common row.

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
        """Stores rows, leaves [n, ...], as those of clients int[n], all distinct.

        Raises OSError if the file cannot grow.
        """
        new = ids[self._slot[ids] < 0]
        while self._used + len(new) > len(self._parts) * self._part_rows:
            self._parts.append(self._grown())
        # In this order, so that an interrupt gives no slot to two clients.
        begin, self._used = self._used, self._used + len(new)
        self._slot[new] = begin + np.arange(len(new))
        slot, leaves = self._slot[ids], jax.tree.leaves(rows)
        for number, here in _by_part(slot // self._part_rows):
            place = slot[here] % self._part_rows
            for mine, leaf in zip(self._parts[number], leaves, strict=True):
                mine[place] = leaf[here]

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
        """The rows of clients int[n] in leaf `index`, in parts of bounded size."""
        shape, dtype = self._leaves[index]
        for first in range(0, len(ids), self._part_rows):
            some = ids[first : first + self._part_rows]
            out = np.empty((len(some), *shape), dtype)
            self._read(index, some, out)
            yield out


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

    def part(self, variant: int) -> slice:
        """The places of a variant's clients among `ids` and the rows."""
        end = int(self.count[: variant + 1].sum())
        return slice(end - int(self.count[variant]), end)


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


def compressed(state: types.RoundState, common: Sequence[Any]) -> Kept:
    """A state of all clients as `Kept`.

    `state` has leaves [variants, K, ...], and `common` a row for each variant, leaves
    [...]. A client with this row counts as one that has not trained.
    """
    rows = jax.tree.map(np.asarray, state.private)
    ids = [
        np.flatnonzero(differ(stacked.at(rows, variant), row))
        for variant, row in enumerate(common)
    ]
    count = np.array([len(one) for one in ids])
    chosen = jax.tree.map(
        lambda leaf: np.concatenate([leaf[v][one] for v, one in enumerate(ids)]), rows
    )
    state = state.with_private(chosen)
    return Kept(state, stacked.on_host(common), np.concatenate(ids), count)


def expanded(found: Kept, num_clients: int) -> types.RoundState:
    """The state of all clients, leaves [variants, K, ...], from the rows kept."""

    def whole(rows: np.ndarray, common: np.ndarray) -> np.ndarray:
        out = np.repeat(np.asarray(common)[:, None], num_clients, 1)
        for variant in range(len(found.count)):
            part = found.part(variant)
            out[variant, found.ids[part]] = rows[part]
        return out

    state = found.state
    rows = jax.tree.map(whole, state.private, found.common)
    return state.with_private(rows)
