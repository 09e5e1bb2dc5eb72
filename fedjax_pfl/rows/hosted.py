"""Private rows on the host, in memory or in a file.

The devices have those that a window of rounds needs, placed as one of the other kinds
(`kinds`) places them.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl import checkpoint, context, execution, shapes, stacked, types
from fedjax_pfl.call import Call
from fedjax_pfl.rows import slots, store, tiled, transfer
from fedjax_pfl.rows.kinds import Block, Rows

# The devices hold the rows of one round, and more up to this many bytes.
RESIDENT_BYTES = 256 << 20
_BYTES = contextvars.ContextVar[int | None]("resident bytes", default=None)
# Rows of more bytes are not hashed for clients that never trained.
HASHED_BYTES = 8 << 30


def resident_bytes() -> int:
    """Up to how many bytes of rows the devices hold beyond those of one round."""
    found = _BYTES.get()
    return RESIDENT_BYTES if found is None else found


def with_few_residents() -> contextlib.AbstractContextManager[None]:
    """The devices of runs that are made inside have hardly more rows than a round's.

    Nothing may depend on it, which `launch.contract` checks.
    """
    return context.having(_BYTES, 0)


class UnequalRowsError(ValueError):
    """One line about clients that begin with rows of their own, which all must stay."""


class Residents(NamedTuple):
    """The clients of one seed's window with rows on the devices.

    `ids` int64[n] are in order, with `slots` int32[n]. `drawn` has the clients of each
    round, which train.
    """

    ids: np.ndarray
    slots: np.ndarray
    drawn: list[np.ndarray]

    def trained(self, first: int, end: int) -> np.ndarray:
        """int64[n]: the clients that trained in rounds `first..end - 1` of these."""
        return np.unique(np.concatenate([*self.drawn[first:end], self.ids[:0]]))

    def slots_of(self, ids: np.ndarray) -> np.ndarray:
        """int32[n]: the slots of some of them."""
        return self.slots[np.searchsorted(self.ids, ids)]


class _Window(NamedTuple):
    """The residents of each seed from round `first` on, and where they are.

    `ahead` has what was read before the window began, by the call's first variant: the
    window before it, and the rows that are new.
    """

    first: int
    layout: slots.Layout
    residents: list[Residents]
    ahead: dict[int, tuple["_Window", list["_Coming"]]]


class _Coming(NamedTuple):
    """A chunk with its rows on the devices, and the host's memory that these need."""

    chunk: transfer.Chunk
    values: Any
    memory: list[np.ndarray] | None


class Hosted(Rows):
    """The host has all rows, and the devices those that a window of rounds needs.

    A client that has never trained has the row with which all begin, so that only
    trained rows take memory. An evaluation goes through all clients in blocks of as
    many as the devices have rows. `row_bytes` are those of a row, and `share` is the
    part of all clients whose rows this process stores.

    A client that two windows share stays in its slot. The others of the next window
    are read while the devices compute the present one, and its own are stored while
    they compute the next.
    """

    needs_start = True

    def __init__(
        self,
        layout: slots.Layout,
        how: execution.Execution,
        template: types.RoundState,
        folder: str = "",
    ):
        """The rows of a run that has not started.

        With one device `layout` has the rows that every device has, with several those
        of each device's own clients. `template` has the shapes of the devices' state,
        leaves [variants, rows, ...]. Rows are in a file in `folder`, or in memory for
        "".
        """
        super().__init__(layout.num_clients, how)
        self.layout = layout
        # Leaves [variants, rows, ...], of which the shapes of rows matter
        self._template = template.private
        self.row_bytes = store.num_bytes(template.private, 2)
        self.share = len(self._own_devices) / len(self._homes)
        self._folder, self._stores = folder, {}
        # By a call's first variant: the window of its state's rows, and the number of
        # rounds whose trained rows have left for the host.
        self._held: dict[int, tuple[_Window, int]] = {}
        # Also by it: rows that have left the state and are not stored yet.
        self._leaving: dict[int, list[tuple[transfer.Chunk, Any]]] = {}
        # Also by it: a chunk of common rows on the devices
        self._untrained: dict[int, Any] = {}
        # The last window, whose clients keep their slots in the next
        self._last: _Window | None = None
        # Memory of the host for chunks, by its number of variants and rows
        self._free: dict[tuple[int, ...], list[list[np.ndarray]]] = {}
        # The variants and the rows of a block without trained clients.
        self._common: tuple[tuple[int, ...], Any] | None = None

    @property
    def _has_all(self) -> bool:
        """Whether the devices have room for all clients."""
        return self.layout.num_rows >= self.num_clients

    def _residents(self, cohort: types.Cohort) -> np.ndarray:
        """int64[n]: the clients with rows that a cohort (or a window) needs, in order.

        If there is room for all, they are all clients in the slots of a full layout.
        """
        return np.arange(self.num_clients) if self._has_all else cohort.needed

    def _made(self, common: Any) -> store.Store:
        return store.Store(common, self.num_clients, self._folder, self._homes)

    def begin(self, call: Call, state: types.RoundState) -> types.RoundState:
        """Like `Rows.begin`, where clients must begin with equal rows."""
        if not slots.are_equal(state.private):
            raise UnequalRowsError(
                "--client_state: with these options each client begins with a row of "
                "its own, and all must be on the device; omit it"
            )
        first = jax.tree.map(
            lambda leaf: np.array(leaf.addressable_data(0)[:, 0]), state.private
        )
        for slot, variant in enumerate(call.variants):
            common = jax.tree.map(np.copy, stacked.at(first, slot))
            self._stores[variant] = self._made(common)
        return state

    def room(self) -> Callable[[Iterable[types.Cohort]], bool]:
        layout = self.layout
        # By seed: bool[K], and the slots that these clients need on each device
        known: dict[int, tuple[np.ndarray, np.ndarray]] = {}

        def fits(cohorts: Iterable[types.Cohort]) -> bool:
            most = 0
            for seed, cohort in enumerate(() if self._has_all else cohorts):
                if seed not in known:
                    none = np.zeros(self.num_clients, bool)
                    known[seed] = none, np.zeros(layout.devices, int)
                is_in, counts = known[seed]
                new = cohort.needed
                new = new[~is_in[new]]
                is_in[new] = True
                counts += layout.counts(new)
                most = max(most, counts.max())
            return most <= self.layout.rows_per_device

        return fits

    def grow(self, cohorts: Iterable[types.Cohort]) -> None:
        """Like `Rows.grow`. With several devices one may need more than ever before."""
        most = max(self.layout.fullest(cohort.needed) for cohort in cohorts)
        if self._has_all or most <= self.layout.rows_per_device:
            return
        whole = self.layout._replace(most=0).rows_per_device
        most = min(shapes.rounded_up_finely(most), whole)
        self.layout = self.layout._replace(most=most)

    def window(
        self, first: int, cohorts: list[types.Cohort], num_rounds: int
    ) -> tuple[list[types.Cohort], Any]:
        residents = []
        for seed, one in enumerate(cohorts):
            drawn = [one.client_id[t][one.row_mask[t]] for t in range(num_rounds)]
            ids = self._residents(one)
            residents.append(Residents(ids, self._slots(seed, ids), drawn))
        mapped = [
            in_slots(one, found.ids, self.layout, found.slots)
            for one, found in zip(cohorts, residents, strict=True)
        ]
        self._last = _Window(first, self.layout, residents, {})
        return mapped, self._last

    def _slots(self, seed: int, ids: np.ndarray) -> np.ndarray:
        """int32[n]: slots of clients, who keep those of the last window."""
        last, layout = self._last, self.layout
        if last is None or last.layout != layout or self._has_all:
            return layout.slots_of(ids)
        old, out = last.residents[seed], np.full(len(ids), -1, np.int32)
        stays = np.isin(ids, old.ids, assume_unique=True)
        out[stays] = old.slots_of(ids[stays])
        is_free = np.ones(layout.num_rows, bool)
        is_free[out[stays]] = False
        free = is_free.reshape(layout.devices, -1)
        for device, places in enumerate(layout.places(ids)):
            new = places[out[places] < 0]
            first = device * layout.rows_per_device
            out[new] = first + np.flatnonzero(free[device])[: len(new)]
        return out

    def before(self, call: Call, window: _Window) -> None:
        name = call.variants.start
        held, _ = self._held.get(name, (None, 0))
        if held is window:
            return
        self._leave(call)
        beside, coming = window.ahead.pop(name, (None, None))
        if coming is None or beside is not held:
            self._store(call)
            coming = self._read_chunks(call, window, self._new(call, window, held))
        # After an interrupt all rows come again.
        self._held.pop(name, None)
        rows, num_rows = call.state.private, window.layout.num_rows
        leaves = jax.tree.leaves(rows)
        if any(leaf.is_deleted() or leaf.shape[1] != num_rows for leaf in leaves):
            none = [np.zeros(0, np.int64)] * len(call.variants)
            rows = self._read(call.variants, none, window.layout)
            rows = tiled.place(rows, self._how)
        for chunk, values, _ in coming:
            rows = transfer.put(rows, chunk, values, self._how)
        call.state = call.state.with_private(rows)
        self._held[name] = window, call.round
        # Until then the chunks' memory is not free.
        jax.block_until_ready(rows)
        for chunk, _, memory in coming:
            if memory is not None:
                self._free.setdefault(chunk.slot.shape, []).append(memory)

    def during(self, call: Call, ahead: _Window | None) -> None:
        self._store(call)
        held, _ = self._held[call.variants.start]
        if ahead is None:
            return
        new = self._new(call, ahead, held)
        for ids, (_, seed) in zip(new, call.pairs, strict=True):
            if np.isin(ids, held.residents[seed].ids).any():
                return  # they may be training in another slot
        coming = self._read_chunks(call, ahead, new)
        ahead.ahead[call.variants.start] = held, coming

    def after(self, call: Call) -> None:
        self._leave(call)
        self._store(call)

    def _new(
        self, call: Call, window: _Window, held: _Window | None
    ) -> list[np.ndarray]:
        """int64[n] for each variant: the clients of a window with rows to come.

        Those of the window `held` (None = none) that keep their slots have theirs.
        """
        out = []
        for _, seed in call.pairs:
            mine = window.residents[seed]
            comes = np.ones(len(mine.ids), bool)
            if held is not None and held.layout == window.layout:
                old = held.residents[seed]
                both = np.isin(mine.ids, old.ids, assume_unique=True)
                comes[both] = old.slots_of(mine.ids[both]) != mine.slots[both]
            out.append(mine.ids[comes])
        return out

    def _read_chunks(
        self, call: Call, window: _Window, ids: Sequence[np.ndarray]
    ) -> list[_Coming]:
        """The rows of clients of each variant on their way to a window's slots."""
        out, stores = [], [self._stores[variant] for variant in call.variants]
        for have_trained in (True, False):
            some = [
                one.in_order(mine[one.trained(mine) == have_trained])
                for one, mine in zip(stores, ids, strict=True)
            ]
            for chunk in self._chunks(call, window, some):
                read = self._chunk if have_trained else self._untrained_chunk
                out.append(read(call, chunk))
        return out

    def _chunks(
        self, call: Call, window: _Window, ids: Sequence[np.ndarray]
    ) -> Iterator[transfer.Chunk]:
        """Clients int[n] of each variant in chunks, with their slots in a window."""
        pairs = zip(ids, call.pairs, strict=True)
        where = [window.residents[seed].slots_of(one) for one, (_, seed) in pairs]
        return transfer.chunks(ids, where, window.layout, self.row_bytes)

    def _chunk(self, call: Call, chunk: transfer.Chunk) -> _Coming:
        """A chunk of rows that have trained."""
        free, shape = self._free.get(chunk.slot.shape), chunk.slot.shape
        memory = free.pop() if free else store.empty(self._template, 2, *shape)
        for slot, device, ids, place in chunk.parts():
            if device in self._own_devices:
                mine = [leaf[slot, place] for leaf in memory]
                self._stores[call.variants[slot]].read(ids, mine)
        values = jax.tree.structure(self._template).unflatten(memory)
        return _Coming(chunk, tiled.place(values, self._how), memory)

    def _untrained_chunk(self, call: Call, chunk: transfer.Chunk) -> _Coming:
        """A chunk of common rows, which are on the devices already."""
        shape, name = chunk.slot.shape, call.variants.start
        known = self._untrained.get(name)
        if known is None or jax.tree.leaves(known)[0].shape[:2] != shape:
            common = [self._stores[variant].common for variant in call.variants]
            rows = jax.tree.map(
                lambda leaf: np.repeat(leaf[:, None], shape[1], 1),
                stacked.on_host(common),
            )
            self._untrained[name] = tiled.place(rows, self._how)
        return _Coming(chunk, self._untrained[name], None)

    def _leave(self, call: Call) -> None:
        """Takes the rows that a call's clients have trained out of its state."""
        name = call.variants.start
        window, done = self._held.get(name, (None, call.round))
        if call.round == done:
            return
        rounds = done - window.first, call.round - window.first
        residents = [window.residents[seed] for _, seed in call.pairs]
        ids = [
            self._stores[variant].in_order(one.trained(*rounds))
            for variant, one in zip(call.variants, residents, strict=True)
        ]
        leaving = self._leaving.setdefault(name, [])
        for chunk in self._chunks(call, window, ids):
            rows = transfer.taken(call.state.private, chunk, self._how)
            leaving.append((chunk, rows))
            self._store(call, transfer.most_waiting(self._how))
        self._held[name] = window, call.round

    def _store(self, call: Call, most: int = 0) -> None:
        """Stores rows that have left a call's state, but for `most` bytes of them."""
        leaving = self._leaving.get(call.variants.start, [])
        while sum(one.slot.size for one, _ in leaving) * self.row_bytes > most:
            chunk, rows = leaving[0]
            rows = [transfer.of_devices(leaf, chunk) for leaf in jax.tree.leaves(rows)]
            for slot, device, ids, _ in chunk.parts():
                one = self._stores[call.variants[slot]]
                if device in self._own_devices:
                    one.write(ids, [leaf[device][slot, : len(ids)] for leaf in rows])
                else:
                    one.claim(ids)
            del leaving[0]

    def _read(
        self, variants: Sequence[int], ids: Sequence[np.ndarray], layout: slots.Layout
    ) -> Any:
        """Rows of clients of each variant in their slots; empty ones are common.

        They have leaves [variants, rows, ...]. Slots of other processes have anything.
        """
        out = store.empty(self._template, 2, len(variants), layout.num_rows)
        for slot, (variant, one) in enumerate(zip(variants, ids, strict=True)):
            clients = layout.clients_of(one)
            for device in self._own_devices:
                cut = layout.slots_of_device(device)
                mine = [leaf[slot, cut] for leaf in out]
                self._stores[variant].read(clients[cut], mine)
        return jax.tree.structure(self._template).unflatten(out)

    def goes_by_block(self, algorithm: types.Algorithm) -> bool:
        return bool(algorithm.serving or algorithm.trained)

    def blocks(
        self,
        call: Call,
        algorithm: types.Algorithm,
        drawn: Sequence[types.Cohort],
        sampled: Callable[[int], np.ndarray | None],
    ) -> Iterator[Block]:
        """Like `Rows.blocks`: the cohort, then trained clients, then others."""
        if not self.goes_by_block(algorithm):
            yield from super().blocks(call, algorithm, drawn, sampled)
            return
        by_seed = []
        for place, cohort in enumerate(drawn):
            mine = [v for v, seed in call.pairs if seed == call.seeds[place]]
            wanted = sampled(place)
            first = self._residents(cohort) if wanted is None else cohort.needed
            by_seed.append(self._split(mine, first, wanted))
        try:
            for number in range(max(map(len, by_seed))):
                none = np.zeros(0, np.int64)
                ids = [one[number] if number < len(one) else none for one in by_seed]
                pairs = zip(drawn, ids, strict=True)
                cohorts = [in_slots(one, mine, self.layout) for one, mine in pairs]
                of_call = [ids[call.seeds.index(seed)] for _, seed in call.pairs]
                lines = np.stack([self.layout.clients_of(one) for one in ids])
                rows = call.variants, call.state, of_call
                # Unnamed, so that there are never two blocks in memory.
                yield Block(self._with(*rows), stacked.on_host(cohorts), lines)
        finally:
            self._common = None

    def _split(
        self, variants: Sequence[int], first: np.ndarray, wanted: np.ndarray | None
    ) -> list[np.ndarray]:
        """All clients in blocks of the devices' size.

        `first` comes first, then those trained in one of `variants`, then the rest,
        both limited to `wanted` bool[K] (None = all).
        """
        others = np.ones(self.num_clients, bool) if wanted is None else wanted.copy()
        others[first] = False
        trained = np.zeros(self.num_clients, bool)
        for variant in variants:
            # There are no stores yet for a state's shapes.
            if variant in self._stores:
                trained[self._stores[variant].ids] = True
        order = np.concatenate(
            [first, np.flatnonzero(others & trained), np.flatnonzero(others & ~trained)]
        )
        most = self.layout.rows_per_device
        by_device = [order[at] for at in self.layout.places(order)]
        count = -(-max(map(len, by_device)) // most)
        parts = [
            [one[number * most : (number + 1) * most] for one in by_device]
            for number in range(max(count, 1))
        ]
        return [np.sort(np.concatenate(one)) for one in parts]

    def _with(
        self,
        variants: Sequence[int],
        state: types.RoundState,
        ids: Sequence[np.ndarray],
    ) -> types.RoundState:
        """The state with the rows of some clients of each variant, to be evaluated."""
        if isinstance(state.round, jax.ShapeDtypeStruct):
            return state.replace(opt_state=())
        pairs = zip(variants, ids, strict=True)
        is_common = not any(self._stores[v].trained(one).any() for v, one in pairs)
        # Most clients of a large population have never trained.
        known, self._common = self._common, None
        if not is_common or known is None or known[0] != tuple(variants):
            known = None  # its memory is free before there are other rows
            rows, _ = self._read(variants, ids, self.layout)
            rows = tiled.place(rows, self._how)
            known = tuple(variants), rows
        self._common = known if is_common else None
        return state.replace(clients=known[1], opt_state=())

    def whole(self, state: types.RoundState) -> types.RoundState:
        """Like `Rows.whole`; rows are streamed, never in memory together."""
        every = list(self._stores.values())
        ids = [np.arange(self.num_clients)] * len(every)
        lead = len(every), self.num_clients
        return state.with_private(store.streamed(every, ids, lead))

    def saved(self, state: types.RoundState) -> store.Kept:
        """Like `Rows.saved`; the rows that have trained."""
        every = list(self._stores.values())
        ids = [one.ids for one in every]
        count = np.array([len(one) for one in ids])
        rows = store.streamed(every, ids, (int(count.sum()),))
        common = stacked.on_host([one.common for one in every])
        state = state.with_private(rows)
        return store.Kept(state, common, np.concatenate(ids), count)

    def digest(self, state: types.RoundState) -> str:
        """Like `Rows.digest`, but of trained rows alone if all are too many to hash."""
        num_bytes = len(self._stores) * self.num_clients * self.row_bytes
        if num_bytes <= HASHED_BYTES:
            return super().digest(state)
        kept = self.saved(state)
        rows = kept.state.clients, kept.common[0], kept.ids, kept.count
        return checkpoint.digest((kept.state.server, *rows))

    def templates(self, state: types.RoundState) -> list[Any]:
        return super().templates(state)[::-1]

    def loaded(
        self, found: types.RoundState | store.Kept, calls: Sequence[Call]
    ) -> list[types.RoundState]:
        """Like `Rows.loaded`; stores take the rows, and devices get common ones."""
        state, saved = store.opened(found, self.num_clients)
        commons, trained = saved.common, saved.ids
        if commons is None:
            commons = stacked.on_host([one.common for one in self._stores.values()])
            trained = saved.other_than(jax.tree.leaves(commons), self.num_clients)
        else:
            commons = saved.structure.unflatten(commons)
        for variant in self._stores:
            self._stores[variant] = self._made(stacked.at(commons, variant))
            self._stores[variant].claim(trained[variant])
        for index in range(len(saved.rows)):
            for variant, ids, rows in saved.blocks(index):
                known = self._stores[variant].trained(ids)
                self._stores[variant].fill(index, ids[known], rows[known])
        for one in (self._held, self._leaving, self._untrained):
            one.clear()
        self._last = None
        none = [np.zeros(0, np.int64) for _ in self._stores]
        rows = self._read(list(self._stores), none, self.layout)
        state = state.with_private(rows)
        return [stacked.at(state, call.rows) for call in calls]

    def around(
        self,
        variant: int,
        state: types.RoundState,
        cohort: types.Cohort,
        client: int | None,
    ) -> tuple[types.RoundState, types.Cohort, int | None]:
        ids = self._residents(cohort)
        if client is not None:
            # It comes first, as there may be no room for all of the cohort.
            others = ids[ids != client] if client in ids else ids[:0]
            ids = np.append(client, others)
        ids = self._split([], ids, np.zeros(self.num_clients, bool))[0]
        state = state.replace(clients=self._everywhere(variant, ids), opt_state=())
        cohort = in_slots(cohort, ids, self.layout)
        if client is None:
            return state, cohort, None
        return state, cohort, int(self.layout.slots_of(ids)[ids.searchsorted(client)])

    def _everywhere(self, variant: int, ids: np.ndarray) -> Any:
        """Rows of clients in their slots, leaves [1, rows, ...], in all processes."""
        rows, _ = self._read([variant], [ids], self.layout)
        if len(self._homes) == 1:
            return rows
        home = np.repeat(self._homes, self.layout.rows_per_device)
        for leaf in jax.tree.leaves(rows):
            store.share(leaf[0], home)
        return rows


def in_slots(
    cohort: types.Cohort,
    ids: np.ndarray,
    layout: slots.Layout,
    where: np.ndarray | None = None,
) -> types.Cohort:
    """A cohort (or window) with the slots of clients int[n]; all others are padding.

    `where` int32[n] are these slots, None = those of `layout`.
    """
    padding = max(layout.num_rows, layout.num_clients)
    table = np.full(layout.num_clients + 1, padding, np.int32)
    table[ids] = layout.slots_of(ids) if where is None else where
    row = table[np.where(cohort.row_mask, cohort.client_id, layout.num_clients)]
    peers = np.where(cohort.peer_mask, cohort.peer_clients, layout.num_clients)
    is_here = table[peers] < padding
    return cohort.replace(
        row=row,
        row_mask=cohort.row_mask & (row < padding),
        peers=table[peers],
        peer_mask=cohort.peer_mask & is_here,
        peer_id=cohort.peer_clients,
    )


def num_residents(
    state: types.RoundState, num_clients: int, most_needed: int, devices: int = 1
) -> int:
    """The rows that each device holds of a hosted run, at most those of its clients.

    `state` has shapes of leaves [variants, rows, ...]. `most_needed` are the clients
    and peers of one round on one device, at most. `devices` share out the rows, and
    each has its own clients'.
    """
    row = store.num_bytes(state.private, 2)
    fits = shapes.rounded_up(max(resident_bytes() // row, 1) + 1) // 2 // devices
    # Two rows show whether all clients begin with equal ones.
    most = max(shapes.rounded_up(most_needed), fits, 2)
    return min(-(-num_clients // devices), most)
