"""Homes of private rows: their interface, and the two where devices have all rows.

`Replicated`: every device has the rows of all clients. `Sharded`: each device has those
of its own clients. The third kind is `hosted.Hosted`. A simulation uses its `Rows`
without distinguishing the kinds.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl import checkpoint, execution, stacked, types
from fedjax_pfl.call import Call
from fedjax_pfl.rows import slots, store, tiled, views


class Block(NamedTuple):
    """Clients that are evaluated together, for all variants of a call.

    `state` is the call's, with their rows. `cohort` has the next round's clients of
    each seed, leaves [S, C, ...], and those without a row in the state are padding.
    `ids` int32[S, R] are the client of each row, K = none, or [1, R] for all seeds.
    """

    state: types.RoundState
    cohort: types.Cohort
    ids: np.ndarray


class Rows:
    """The interface of private rows, implemented for rows on every device.

    Rows own `call.state.private` of every call from `begin` on, and the slot of each
    client. For a call of the program, `window` comes first, for all calls together,
    then `before`, and `during` while the devices compute. `after` follows before
    anything else reads rows. All of these may be called again, as after an interrupt.

    Attributes:
        layout: Where rows are on the devices. A state has `layout.num_rows` of them.
        needs_start: Whether `begin` must come before `loaded`.
    """

    needs_start = False

    def __init__(self, num_clients: int, how: execution.Execution):
        """The rows of K clients on the devices of `how`."""
        devices = how.num_devices if how.shares_rows else 1
        self.layout, self._how = slots.Layout(num_clients, devices), how
        # The process of each of these devices, and which of them are this one's
        own, every = jax.process_index(), how.mesh.devices.flat if devices > 1 else ()
        self._homes = tuple(device.process_index for device in every) or (own,)
        self._own_devices = [i for i, home in enumerate(self._homes) if home == own]

    @property
    def num_clients(self) -> int:
        return self.layout.num_clients

    def begin(self, call: Call, state: types.RoundState) -> types.RoundState:
        """The state of a call before the first round, whose row k is that of client k.

        Returns it with all rows in their slots. Raises ValueError if this kind needs
        equal rows and some differ.
        """
        return state

    def room(self) -> Callable[[Iterable[types.Cohort]], bool]:
        """A function that says whether a window has room for one more round.

        It takes each round in turn, as cohorts of all seeds, which it need not draw.
        """
        return lambda cohorts: True

    def grow(self, cohorts: Iterable[types.Cohort]) -> None:
        """Makes room for a round of these cohorts. Made windows keep their layout."""

    def window(
        self, first: int, cohorts: list[types.Cohort], num_rounds: int
    ) -> tuple[list[types.Cohort], Any]:
        """Windows of cohorts for each seed with slots, and the argument of `before`.

        `first` is the first of its `num_rounds` rounds, and the planner's cohorts have
        leaves [T, ...], of which only these rounds are used.
        """
        return cohorts, None

    def before(self, call: Call, window: Any) -> None:
        """Puts the rows of a window's clients into the call's state, if absent.

        Rows that the call's clients trained in an earlier window are stored first.
        """

    def during(self, call: Call, ahead: Any | None) -> None:
        """Stores rows and prepares `before` of a window ahead, while devices compute.

        It must not wait for `call.state`. Without a window ahead (None) the next call
        stays in the present one.
        """

    def after(self, call: Call) -> None:
        """Stores the rows that the clients of a settled call have trained."""

    def goes_by_block(self, algorithm: types.Algorithm) -> bool:
        """Whether an evaluation needs rows that the devices do not have."""
        return False

    def blocks(
        self,
        call: Call,
        algorithm: types.Algorithm,
        drawn: Sequence[types.Cohort],
        sampled: Callable[[int], np.ndarray | None],
    ) -> Iterator[Block]:
        """All clients with models to evaluate, in blocks.

        Args:
            call: The call, or its shapes for the first block alone.
            algorithm: The models to evaluate.
            drawn: The next round's cohort of each seed.
            sampled: From the place of a seed in the call to bool[K], None = all.
        """
        every = self.layout._replace(most=0).clients
        yield Block(call.state, stacked.on_host(drawn), every[None])

    def whole(self, state: types.RoundState) -> types.RoundState:
        """The stacked state of all variants with all rows, in the order of clients.

        `state` is that of the devices, with leaves as in `views`.
        """
        return state

    def saved(self, state: types.RoundState) -> types.RoundState | store.Kept:
        """Like `whole`, in the form of a checkpoint."""
        return self.whole(state)

    def digest(self, state: types.RoundState) -> str:
        """SHA-256 of the parameters of the server and of all clients, in order."""
        whole = self.whole(state)
        return checkpoint.digest((whole.server, whole.clients))

    def templates(self, state: types.RoundState) -> list[Any]:
        """The shapes of `saved` and its other form, from those of the devices."""
        whole = store.whole_template(state, self.num_clients)
        return [whole, store.kept_template(state)]

    def loaded(
        self, found: types.RoundState | store.Kept, calls: Sequence[Call]
    ) -> list[types.RoundState]:
        """The devices' state of each call from either form, with leaves as in `views`.

        Its arrays are the host's, or on their devices already. Earlier rows are
        dropped, and earlier windows are not used again.
        """
        state, saved = store.opened(found, self.num_clients)
        leaves = range(len(saved.rows))
        rows = [saved.whole(index, self.num_clients) for index in leaves]
        state = state.with_private(saved.structure.unflatten(rows))
        return [stacked.at(state, call.rows) for call in calls]

    def around(
        self,
        variant: int,
        state: types.RoundState,
        cohort: types.Cohort,
        client: int | None,
    ) -> tuple[types.RoundState, types.Cohort, int | None]:
        """State, cohort and slot with which a client's model is built on the device.

        `state` is the call's of this variant, with a leading axis of 1, and `cohort`
        has the next round's clients. Without a `client` it is the server. Returns (the
        state with the client's row, the cohort with its slots, the client's slot).
        """
        return state, cohort, client


class Replicated(Rows):
    """Every device has all rows, in groups where architectures differ."""

    def templates(self, state: types.RoundState) -> list[Any]:
        return [state, store.kept_template(state)]


class Sharded(Rows):
    """Each device has the rows of its own clients: client k those of device k mod D."""

    def begin(self, call: Call, state: types.RoundState) -> types.RoundState:
        if slots.are_equal(state.private):
            return state
        where = tiled.of_rows(state.private, self._how)
        return state.with_private(self.layout.dealt(state.private, where))

    def whole(self, state: types.RoundState) -> types.RoundState:
        return state.with_private(self.layout.by_client(state.private))

    def loaded(
        self, found: types.RoundState | store.Kept, calls: Sequence[Call]
    ) -> list[types.RoundState]:
        """Like `Rows.loaded`; each process has the rows of its own devices alone."""
        state, saved = store.opened(found, self.num_clients)
        rows = [[] for _ in calls]
        for index in range(len(saved.rows)):
            every = self._of_devices(index, saved)
            for call, mine in zip(calls, rows, strict=True):
                mine.append(self._placed(every, call.rows))
        return [
            stacked.at(state, call.rows).with_private(saved.structure.unflatten(mine))
            for call, mine in zip(calls, rows, strict=True)
        ]

    def _of_devices(self, index: int, saved: store.Found) -> dict[int, np.ndarray]:
        """Saved leaf `index` in its slots, [variants, rows, ...] of each own device."""
        layout, dtype = self.layout, np.dtype(saved.rows[index].dtype)
        size = len(saved.ids), layout.rows_per_device, *saved.shape(index)
        out = {device: np.zeros(size, dtype) for device in self._own_devices}
        if saved.common is not None:
            for mine in out.values():
                mine[:] = saved.common[index][:, None]
        slots_of = layout.slots % layout.rows_per_device
        for variant, ids, rows in saved.blocks(index):
            device = layout.device_of(ids)
            for one, mine in out.items():
                here = device == one
                mine[variant, slots_of[ids[here]]] = rows[here]
        return out

    def _placed(self, of_devices: dict[int, np.ndarray], variants: slice) -> jax.Array:
        """Some variants of `_of_devices` as one array on all devices."""
        parts = {device: leaf[variants] for device, leaf in of_devices.items()}
        one = next(iter(parts.values()))
        shape = one.shape[0], self.layout.num_rows, *one.shape[2:]
        where = tiled.of_rows(jax.ShapeDtypeStruct(shape, one.dtype), self._how)

        def of_device(at: tuple[slice, ...]) -> np.ndarray:
            return parts[(at[1].start or 0) // self.layout.rows_per_device]

        return jax.make_array_from_callback(shape, where, of_device)

    def around(
        self,
        variant: int,
        state: types.RoundState,
        cohort: types.Cohort,
        client: int | None,
    ) -> tuple[types.RoundState, types.Cohort, int | None]:
        if jax.process_count() > 1:
            # Other processes have some of the rows.
            rows = self.layout.by_client(views.joined([state.private]))
            state = state.with_private(jax.tree.map(views.materialised, rows))
            row = np.where(cohort.row_mask, cohort.client_id, self.layout.num_rows)
            cohort = cohort.replace(row=row, peers=cohort.peer_clients)
            return state, cohort, client
        return state, cohort, None if client is None else int(self.layout.slots[client])
