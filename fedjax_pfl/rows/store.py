"""Private rows on the host or in a file, for more clients than a device can hold.

A client that has never trained has the row with which all begin, so that only those
that have trained take memory. The device holds the rows of the clients and peers of a
window of rounds. An evaluation goes through all clients in blocks of as many.

A row is a client's part of `RoundState.clients` and `RoundState.opt_state`.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl import execution, shapes, types
from fedjax_pfl.rows import views

# The device holds the rows of one round, and more while they take fewer bytes.
RESIDENT_BYTES = 256 << 20
# A store grows by so many bytes.
PART_BYTES = 64 << 20


class Layout:
    """How one row lies in memory: the bytes of its leaves, one after another.

    Attributes:
        num_bytes: Bytes of a row.
    """

    def __init__(self, rows: Any):
        """Reads the layout off a pytree of rows, leaves [..., N, *shape].

        Args:
            rows: Pairs of leaves and of axes before each row's own shape are those of
                `types.RoundState`: variants and clients.
        """
        leaves, self._structure = jax.tree.flatten(rows)
        ends = np.cumsum([0] + [_row_bytes(leaf) for leaf in leaves]).tolist()
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

        Args:
            lead: The leading axes.
            records: Returns all rows in order, as parts uint8[n, bytes].
        """

        def of(index: int) -> views.Streamed:
            shape, dtype, _ = self._leaves[index]

            def pieces() -> Iterator[np.ndarray]:
                for part in records():
                    yield self.leaf(index, part).reshape(-1)

            return views.Streamed((*lead, *shape), dtype, pieces)

        return self._structure.unflatten(map(of, range(len(self._leaves))))


def _row_bytes(leaf: Any) -> int:
    return int(np.prod(leaf.shape[2:], dtype=np.int64)) * np.dtype(leaf.dtype).itemsize


class Store:
    """The rows of one variant's clients: the common one, and those that have trained.

    Attributes:
        common: uint8[bytes], the row of a client that has never trained.
    """

    def __init__(self, common: np.ndarray, num_clients: int, folder: str = ""):
        """Makes a store in which no client has trained.

        Args:
            common: uint8[bytes].
            num_clients: K.
            folder: Where to keep the rows in a file without a name, which is gone with
                the process; "" = in memory.
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
        """Keeps `records` uint8[n, bytes] as the rows of clients int[n], all distinct.

        Raises:
            OSError: the file cannot grow.
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
            # A write into a file that is only truncated ends the process where the
            # disk is full.
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


class Residents(NamedTuple):
    """The clients of one seed's window whose rows are on the device.

    Attributes:
        ids: int64[n], in order, at most as many as there are rows. A client's slot is
            its place among them.
        drawn: The clients of each round, which train.
    """

    ids: np.ndarray
    drawn: list[np.ndarray]

    def trained(self, num_rounds: int) -> np.ndarray:
        """int64[n]: the clients that trained in the first rounds."""
        return np.unique(np.concatenate([*self.drawn[:num_rounds], self.ids[:0]]))


class Kept(NamedTuple):
    """A whole run's state, as checkpoints have it.

    Attributes:
        state: The RoundState, whose rows are leaves [n, ...] of all trained clients,
            variant after variant.
        common: The rows of a client that has never trained, leaves [variants, ...].
        ids: int64[n], the clients.
        count: int64[variants], the trained clients of each variant.
    """

    state: types.RoundState
    common: Any
    ids: np.ndarray
    count: np.ndarray

    def part(self, variant: int) -> slice:
        """The places of a variant's clients among `ids` and the rows."""
        end = int(self.count[: variant + 1].sum())
        return slice(end - int(self.count[variant]), end)


def needed(cohort: types.Cohort) -> np.ndarray:
    """int64[n]: the clients of a cohort and their peers, in order, each once."""
    peers = cohort.peers[cohort.peer_mask & cohort.row_mask[..., None]]
    return np.unique(np.concatenate([cohort.client_id[cohort.row_mask], peers]))


def mapped(cohort: types.Cohort, ids: np.ndarray, num_clients: int) -> types.Cohort:
    """A cohort (or a window) whose slots are places among `ids`.

    Clients and peers that are not among them are padding.
    """
    table = np.full(num_clients + 1, num_clients, np.int32)
    table[ids] = np.arange(len(ids))
    row = table[np.where(cohort.row_mask, cohort.client_id, num_clients)]
    peers = np.where(cohort.peer_mask, cohort.peers, num_clients)
    is_here = table[peers] < num_clients
    return cohort.replace(
        row=row,
        row_mask=cohort.row_mask & (row < num_clients),
        peers=np.where(is_here, table[peers], 0).astype(np.int32),
        peer_mask=cohort.peer_mask & is_here,
        peer_id=cohort.peers,
    )


def num_residents(state: types.RoundState, num_clients: int, most_needed: int) -> int:
    """The rows that the device holds, at most K.

    Args:
        state: The shapes of a state of all clients; leaves [variants, K, ...].
        num_clients: K.
        most_needed: The clients and peers of one round, at most.
    """
    row = Layout(state.private).num_bytes
    fits = shapes.rounded_up(max(RESIDENT_BYTES // row, 1) + 1) // 2
    # Two rows show whether all clients begin with equal ones.
    return min(num_clients, max(shapes.rounded_up(most_needed), fits, 2))


class Population:
    """All private rows of a run, of which the device holds some.

    Attributes:
        num_rows: Rows on the device.
        num_clients: K.
        layout: The layout of a row.
    """

    def __init__(
        self,
        template: types.RoundState,
        num_clients: int,
        how: execution.Execution,
        folder: str = "",
    ):
        """Makes the population of a run that has not started.

        Args:
            template: The shapes of the device's state; leaves [variants, rows, ...].
            num_clients: K.
            how: The devices.
            folder: Where the rows are kept in a file, "" = in memory.
        """
        rows = template.clients, template.opt_state
        self.num_rows = jax.tree.leaves(rows)[0].shape[1]
        self.num_clients, self.layout = num_clients, Layout(rows)
        self._how, self._folder, self._stores = how, folder, {}
        # The variants and the rows of a block in which no client has trained.
        self._common: tuple[Sequence[int], Any] | None = None

    def residents(self, cohort: types.Cohort) -> np.ndarray:
        """int64[n]: the clients whose rows a cohort (or a window) needs, in order.

        They are all clients where there is room for all, whose slots are then as on a
        device that has all rows.
        """
        if self.num_rows == self.num_clients:
            return np.arange(self.num_clients)
        return needed(cohort)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of all clients and variants."""
        return len(self._stores) * self.num_clients * self.layout.num_bytes

    def begin(self, variants: Sequence[int], state: types.RoundState) -> None:
        """Makes the stores of some variants, from the state before the first round.

        Raises:
            ValueError: clients do not begin with equal rows.
        """
        rows = jax.device_get(state.private)
        for slot, variant in enumerate(variants):
            mine = jax.tree.map(lambda leaf, s=slot: np.asarray(leaf)[s], rows)
            records = self.layout.pack(mine)
            if (records != records[0]).any():
                raise ValueError(
                    "--client_state: with these options each client begins with a row "
                    "of its own, and all must be on the device; omit it"
                )
            self._stores[variant] = self._new(records[0].copy())

    def _new(self, common: np.ndarray) -> Store:
        return Store(common, self.num_clients, self._folder)

    def ids(self, variant: int) -> np.ndarray:
        """int64[n]: the clients of a variant that have trained."""
        return self._stores[variant].ids

    def read(self, variants: Sequence[int], ids: Sequence[np.ndarray]) -> np.ndarray:
        """uint8[variants, rows, bytes]: rows of clients of each; others are common."""
        out = np.empty((len(variants), self.num_rows, self.layout.num_bytes), np.uint8)
        for slot, variant in enumerate(variants):
            store = self._stores[variant]
            out[slot, : len(ids[slot])] = store.read(ids[slot])
            out[slot, len(ids[slot]) :] = store.common
        return out

    def on_device(
        self, state: types.RoundState, records: np.ndarray
    ) -> types.RoundState:
        """The state with these rows uint8[variants, rows, bytes]."""
        where = execution.replicated(self._how)
        rows = execution.place(self.layout.unpack(records), where)
        return state.with_private(rows)

    def block(
        self,
        variants: Sequence[int],
        state: types.RoundState,
        ids: Sequence[np.ndarray],
    ) -> types.RoundState:
        """The state with the rows of some clients of each variant, to be evaluated."""
        pairs = zip(variants, ids, strict=True)
        is_common = not any(self._stores[v].have_trained(one) for v, one in pairs)
        # Most clients of a large population have never trained.
        if is_common and self._common is not None and self._common[0] == variants:
            return state.replace(clients=self._common[1], opt_state=())
        self.forget_block()
        rows, _ = self.layout.unpack(self.read(variants, ids))
        rows = execution.place(rows, execution.replicated(self._how))
        self._common = (variants, rows) if is_common else None
        return state.replace(clients=rows, opt_state=())

    def forget_block(self) -> None:
        """Frees the device's memory of the last block."""
        self._common = None

    def resident(self, found: Kept | types.RoundState) -> types.RoundState:
        """What `load` took, with the common rows in place of all others."""
        state = found.state if isinstance(found, Kept) else found
        variants = range(len(self._stores))
        none = [np.zeros(0, np.int64) for _ in variants]
        rows = self.layout.unpack(self.read(variants, none))
        return state.with_private(rows)

    def write(
        self,
        variants: Sequence[int],
        state: types.RoundState,
        residents: Sequence[Residents],
        num_rounds: int,
    ) -> None:
        """Keeps what the clients of the first rounds of a window have trained."""
        trained = [one.trained(num_rounds) for one in residents]
        rows = jax.device_get(state.private)
        for slot, variant in enumerate(variants):
            place = np.searchsorted(residents[slot].ids, trained[slot])
            mine = jax.tree.map(lambda leaf, s=slot, p=place: leaf[s][p], rows)
            if len(place):
                self._stores[variant].write(trained[slot], self.layout.pack(mine))

    def refresh(
        self,
        records: np.ndarray,
        variants: Sequence[int],
        ids: Sequence[np.ndarray],
        changed: Sequence[np.ndarray],
    ) -> None:
        """Reads rows again that were read before `changed` clients were written."""
        for slot, variant in enumerate(variants):
            both = np.intersect1d(ids[slot], changed[slot])
            place = np.searchsorted(ids[slot], both)
            records[slot, place] = self._stores[variant].read(both)

    def blocks(
        self, variants: Sequence[int], first: np.ndarray, wanted: np.ndarray | None
    ) -> list[np.ndarray]:
        """All clients in blocks of at most `num_rows`, those that have trained first.

        Args:
            variants: Those for which they have trained.
            first: Clients of the first block.
            wanted: bool[K], the other clients; None = all.
        """
        others = np.ones(self.num_clients, bool) if wanted is None else wanted.copy()
        others[first] = False
        has_trained = np.zeros(self.num_clients, bool)
        for variant in variants:
            has_trained[self.ids(variant)] = True
        rest = np.concatenate(
            [
                np.flatnonzero(others & has_trained),
                np.flatnonzero(others & ~has_trained),
            ]
        )
        room = self.num_rows - len(first)
        out = [np.sort(np.concatenate([first, rest[:room]]))]
        for begin in range(room, len(rest), self.num_rows):
            out.append(np.sort(rest[begin : begin + self.num_rows]))
        return out

    def kept(self, variants: Sequence[int], state: types.RoundState) -> Kept:
        """The whole state as checkpoints have it, without a copy of the rows.

        Args:
            variants: All variants.
            state: The stacked state, or its shapes, whose rows do not matter.
        """
        ids = [self.ids(variant) for variant in variants]
        common = np.stack([self._stores[variant].common for variant in variants])

        def records() -> Iterator[np.ndarray]:
            for variant, mine in zip(variants, ids, strict=True):
                yield from self._stores[variant].parts(mine)

        count = np.array([len(one) for one in ids])
        rows = self.layout.streamed((int(count.sum()),), records)
        state = state.with_private(rows)
        return Kept(state, self.layout.unpack(common), np.concatenate(ids), count)

    def whole(self, variants: Sequence[int], state: types.RoundState) -> Any:
        """The state of all clients, leaves [variants, K, ...], never in memory."""
        every = np.arange(self.num_clients)

        def records() -> Iterator[np.ndarray]:
            for variant in variants:
                yield from self._stores[variant].parts(every)

        lead = len(variants), self.num_clients
        rows = self.layout.streamed(lead, records)
        return state.with_private(rows)

    def load(self, variants: Sequence[int], found: Kept | types.RoundState) -> None:
        """Takes the rows of a checkpoint in place of those that there were.

        Args:
            variants: All variants.
            found: What `kept` gave, or a state of all clients.
        """
        if isinstance(found, types.RoundState):
            common = [self._stores[variant].common for variant in variants]
            found = compressed(found, common)
        common = self.layout.pack(found.common)
        rows = found.state.clients, found.state.opt_state
        rows = jax.tree.map(views.materialised, rows)
        for variant in variants:
            part = found.part(variant)
            self._stores[variant] = store = self._new(common[variant])
            mine = jax.tree.map(lambda leaf, p=part: np.asarray(leaf)[p], rows)
            if part.start < part.stop:
                store.write(found.ids[part], self.layout.pack(mine))


def _shaped(state: types.RoundState, *lead: int) -> types.RoundState:
    """The shapes of a state whose rows have other leading axes."""
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
    """A state of all clients as a population keeps it.

    Args:
        state: Leaves [variants, K, ...].
        common: uint8[bytes] for each variant. A client with this row counts as one that
            has not trained.
    """
    rows = jax.tree.map(np.asarray, state.private)
    layout = Layout(rows)
    ids = []
    for variant, record in enumerate(common):
        mine = layout.pack(jax.tree.map(lambda leaf, v=variant: leaf[v], rows))
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
