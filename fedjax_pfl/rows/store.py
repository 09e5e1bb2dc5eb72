"""Private rows as bytes, in the host's memory or in a file.

A client that has never trained has the row with which all begin, so that only trained
rows take memory, here and in a checkpoint. A row is a client's part of
`RoundState.clients` and `RoundState.opt_state`.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl import stacked, types
from fedjax_pfl.rows import views

# A store grows by this many bytes.
PART_BYTES = 64 << 20


class Record:
    """The bytes of one row: its leaves one after another, `num_bytes` in total."""

    def __init__(self, rows: Any):
        """Reads the layout from a pytree of rows, leaves [variants, N, *shape]."""
        leaves, self._structure = jax.tree.flatten(rows)
        sizes = [math.prod(x.shape[2:]) * np.dtype(x.dtype).itemsize for x in leaves]
        ends = np.cumsum([0, *sizes]).tolist()
        self.num_bytes = ends[-1]
        self._leaves = [
            (leaf.shape[2:], np.dtype(leaf.dtype), slice(*ends[i : i + 2]))
            for i, leaf in enumerate(leaves)
        ]

    def pack(self, rows: Any) -> np.ndarray:
        """uint8[N, bytes] of a pytree with leaves [N, ...]."""
        leaves = jax.tree.leaves(rows)
        out = np.empty((len(leaves[0]), self.num_bytes), np.uint8)
        for leaf, (_, dtype, place) in zip(leaves, self._leaves, strict=True):
            flat = np.ascontiguousarray(leaf, dtype).reshape(len(out), -1)
            if flat.size:
                out[:, place] = flat.view(np.uint8)
        return out

    def unpack(self, records: np.ndarray) -> Any:
        """The pytree with leaves [..., N, *shape] of uint8[..., N, bytes]."""
        leaves = [self.leaf(index, records) for index in range(len(self._leaves))]
        return self._structure.unflatten(leaves)

    def leaf(self, index: int, records: np.ndarray) -> np.ndarray:
        """One leaf [..., N, *shape] of uint8[..., N, bytes]."""
        shape, dtype, place = self._leaves[index]
        if place.start == place.stop:
            return np.zeros((*records.shape[:-1], *shape), dtype)
        flat = np.ascontiguousarray(records[..., place]).view(dtype)
        return flat.reshape(*records.shape[:-1], *shape)

    def streamed(
        self, lead: tuple[int, ...], records: Callable[[], Iterator[np.ndarray]]
    ) -> Any:
        """The pytree with leaves [*lead, *shape], for `checkpoint`, never whole.

        `records` returns all rows in order, as parts uint8[n, bytes].
        """

        def of(index: int) -> views.Streamed:
            shape, dtype, _ = self._leaves[index]

            def pieces() -> Iterator[np.ndarray]:
                for part in records():
                    yield self.leaf(index, part).reshape(-1)

            return views.Streamed((*lead, *shape), dtype, pieces)

        return self._structure.unflatten(map(of, range(len(self._leaves))))


class Store:
    """The rows of one variant's clients: the common one, and those that have trained.

    `common` uint8[bytes] is the row of a client that has never trained.
    """

    def __init__(self, common: np.ndarray, num_clients: int, folder: str = ""):
        """A store without trained clients.

        `common` is uint8[bytes], and `num_clients` K. Rows are in a file without a name
        in `folder`, which disappears with the process, or in memory for "".
        """
        self.common = common
        self._slot = np.full(num_clients, -1, np.int32)
        self._used, self._parts = 0, []
        self._part_rows = max(1, PART_BYTES // max(len(common), 1))
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder) if folder else None

    @property
    def ids(self) -> np.ndarray:
        """int64[n]: the clients that have trained, in order."""
        return np.flatnonzero(self._slot >= 0)

    def have_trained(self, ids: np.ndarray) -> bool:
        """Whether any of these clients has trained."""
        return bool((self._slot[ids] >= 0).any())

    def read(self, ids: np.ndarray) -> np.ndarray:
        """uint8[n, bytes], the rows of clients int[n]; K gives the common row."""
        out = np.empty((len(ids), len(self.common)), np.uint8)
        is_client = ids < len(self._slot)
        slot = np.where(is_client, self._slot[np.where(is_client, ids, 0)], -1)
        out[slot < 0] = self.common
        for number, part in enumerate(self._parts):
            here = np.flatnonzero(slot // self._part_rows == number)
            if here.size:
                out[here] = part[slot[here] % self._part_rows]
        return out

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Stores `records` uint8[n, bytes] as the rows of clients int[n], all distinct.

        Raises OSError if the file cannot grow.
        """
        new = ids[self._slot[ids] < 0]
        while self._used + len(new) > len(self._parts) * self._part_rows:
            self._parts.append(self._grown())
        # In this order, so that an interrupt gives no slot to two clients.
        begin, self._used = self._used, self._used + len(new)
        self._slot[new] = begin + np.arange(len(new))
        slot = self._slot[ids]
        for number in np.unique(slot // self._part_rows):
            here = slot // self._part_rows == number
            self._parts[number][slot[here] % self._part_rows] = records[here]

    def _grown(self) -> np.ndarray:
        """One more part, uint8[rows, bytes]."""
        shape = self._part_rows, len(self.common)
        if self._file is None:
            return np.empty(shape, np.uint8)
        size = shape[0] * shape[1]
        begin = len(self._parts) * size
        try:
            # With truncation alone, a write on a full disk would end the process.
            os.posix_fallocate(self._file.fileno(), begin, size)
        except OSError as error:
            raise OSError(
                f"--client_state={self._folder}: rows of clients cannot be written "
                f"there: {error.strerror}"
            ) from error
        return np.memmap(self._file, np.uint8, "r+", begin, shape)

    def parts(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """The rows of clients int[n] in order, in parts of bounded size."""
        for first in range(0, len(ids), self._part_rows):
            yield self.read(ids[first : first + self._part_rows])


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


def compressed(state: types.RoundState, common: Sequence[np.ndarray]) -> Kept:
    """A state of all clients as `Kept`.

    `state` has leaves [variants, K, ...], and `common` is uint8[bytes] for each
    variant. A client with this row counts as one that has not trained.
    """
    rows = jax.tree.map(np.asarray, state.private)
    layout = Record(rows)
    ids = []
    for variant, record in enumerate(common):
        mine = layout.pack(stacked.at(rows, variant))
        ids.append(np.flatnonzero((mine != record).any(1)))
    count = np.array([len(one) for one in ids])
    chosen = jax.tree.map(
        lambda leaf: np.concatenate([leaf[v][one] for v, one in enumerate(ids)]), rows
    )
    state = state.with_private(chosen)
    found = layout.unpack(np.stack(common))
    return Kept(state, found, np.concatenate(ids), count)


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
