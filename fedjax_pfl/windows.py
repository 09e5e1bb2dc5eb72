"""Windows: the plans of the next rounds as tables on the devices."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedjax_pfl import execution as execution_lib
from fedjax_pfl import shapes, stacked, types
from fedjax_pfl.call import Call, Work
from fedjax_pfl.rows.kinds import Rows

WINDOW_BYTES = 64 << 20
MAX_WINDOW_ROUNDS = 64


class Planner(Protocol):
    """What a simulation asks of a `data.plan.Planner`, where all of it is described."""

    has_clock: bool
    round_examples: float
    drawn: Callable[[int, int], types.Cohort]
    capacity: Callable[[int], int]
    window: Callable[..., types.Cohort]
    positions: Callable[[int, int, Sequence[types.Cohort]], Any]
    num_steps: Callable[[int, np.ndarray], dict[str, np.ndarray]]
    owned: Callable[[int, np.ndarray], np.ndarray]
    members: Callable[..., types.Cohort]


class Window(NamedTuple):
    """Plans of the rounds `first..end - 1`, by call: leaves [seeds, T, ...].

    `rows` is the second result of `Rows.window`.
    """

    first: int
    end: int
    cohorts: list[types.Cohort]
    work: list[Work]
    rows: Any


class Upcoming(NamedTuple):
    """The first rounds of the window that begins with round `first`.

    `drawn` has the cohorts of each seed, by round. `parts` has the positions of each
    seed, in parts of some rounds. `fits` is that of `Rows.room`. `needed` are the
    examples of each seed and device, with those of the first round that found no room.
    """

    first: int
    fits: Any
    drawn: tuple[list[types.Cohort], ...] = ()
    parts: tuple[list[Any], ...] = ()
    needed: Any = 0
    is_full: bool = False


def window_rounds(
    cohort: types.Cohort, specs: Sequence[types.PlanSpec], num_examples: float
) -> int:
    """The length T of every window, bounded by its bytes for one seed.

    It follows from the average round and never from the number of rounds of a run, so
    that runs of any length are one program. It moves in steps of a sixteenth, so that
    similar clients share the program too. Where rounds are so large that few fit, more
    than a sixth of the room stays empty.

    `cohort` is that of any round, and its plans are not used. `num_examples` are the
    train examples of a round's clients, on average.
    """
    leaves = jax.tree.leaves(cohort.replace(plans={}))
    size = sum(np.asarray(leaf).nbytes for leaf in leaves)
    for spec in specs:
        size += 4 * (len(cohort.row) + spec.epochs * num_examples)
    fits = int(np.clip(WINDOW_BYTES // max(size, 1), 1, MAX_WINDOW_ROUNDS))
    return fits - fits % max(shapes.rounded_up(fits) // 32, 1)


def work_of(
    planner: Planner, seed_index: int, cohorts: types.Cohort, execution: types.Execution
) -> Work:
    """The cost of each round of a window; leaves [T, ...], for one seed."""
    updates = cohorts.row_mask.sum(1)
    samples, executed, steps, executed_steps = np.zeros((4, len(updates)), np.int64)
    owned = planner.owned(seed_index, cohorts.client_id)
    num_steps = planner.num_steps(seed_index, cohorts.client_id)
    for name, plan in cohorts.plans.items():
        is_cut = not isinstance(plan.num_steps, tuple)
        steps_of = plan.num_steps if is_cut else num_steps[name]
        taken = np.where(cohorts.row_mask, steps_of, 0)
        run = execution_lib.executed_steps(taken, execution)
        samples += plan.spec.examples(owned, taken).sum(1)
        executed += run * plan.spec.batch_size
        steps += taken.sum(1)
        executed_steps += run
    return Work(updates, samples, executed, steps, executed_steps)


class Windows:
    """Makes windows for the calls of a run, as long as there is room.

    `length` is T, the rounds of every window's tables. `capacity` is the room for the
    examples of a device in a window. It only grows, since another size is another
    program.
    """

    def __init__(
        self,
        planner: Planner,
        num_seeds: int,
        calls: Sequence[Call],
        specs: Sequence[types.PlanSpec],
        execution: types.Execution,
        rows: Rows,
    ):
        """Prepares the windows of a run; `specs` are the algorithm's plans."""
        self.planner, self._seeds = planner, range(num_seeds)
        self._calls, self._execution, self._rows = calls, execution, rows
        self._upcoming: Upcoming | None = None
        cohort, examples = planner.drawn(0, 0), planner.round_examples
        self.length = window_rounds(cohort, specs, examples)
        # Slightly less than the longest window needs, so that windows are full
        self.capacity = planner.capacity(self.length - self.length // 8)

    def compute(self, planner: Planner, execution: types.Execution) -> None:
        """Continues with clients in other chunks."""
        self.planner, self._execution = planner, execution
        self._upcoming = None

    def prepare(self, first: int, end: int, num_rounds: int) -> None:
        """Plans some more rounds, before `end`, of the window that begins at `first`.

        `make` takes what is there and plans the rest.
        """
        known = self._begun(first)
        most = min(num_rounds, end - first - len(known.drawn))
        self._upcoming = self._extended(known, most)

    def make(self, first: int, end: int) -> Window:
        """The window that begins with round `first`, before `end`, on the devices.

        It has as many rounds as there is room for. A round that needs more room gets
        it, so that the rows of a state may be more afterwards.
        """
        known = self._begun(first)
        known = self._extended(known, end - first - len(known.drawn))
        if not known.drawn:
            known = known._replace(drawn=(self.drawn(first),))
            needed = shapes.rounded_up_finely(int(np.max(known.needed)))
            self.capacity = max(self.capacity, needed)
            self._rows.grow(known.drawn[0])
        count = len(known.drawn)
        planned = [self._planned(seed, known) for seed in self._seeds]
        self._upcoming = known = None  # their memory is free before they are placed
        costs = [
            work_of(self.planner, seed, one, self._execution)
            for seed, one in enumerate(planned)
        ]
        planned, rows = self._rows.window(first, planned, count)
        cohorts = [
            placed(
                stacked.on_host([planned[seed] for seed in call.seeds]), self._execution
            )
            for call in self._calls
        ]
        work = [
            Work(*map(sum, zip(*(costs[seed] for _, seed in call.pairs), strict=True)))
            for call in self._calls
        ]
        return Window(first, first + count, cohorts, work, rows)

    def _planned(self, seed: int, known: Upcoming) -> types.Cohort:
        drawn = [of_round[seed] for of_round in known.drawn]
        size = len(drawn), self.length, self.capacity
        parts = [part[seed] for part in known.parts]
        return self.planner.window(seed, known.first, *size, drawn, parts)

    def drawn(self, round: int) -> list[types.Cohort]:
        """A round's cohort of each seed, without plans."""
        return [self.planner.drawn(seed, round) for seed in self._seeds]

    def _begun(self, first: int) -> Upcoming:
        """What is planned of the window that begins at `first`."""
        known = self._upcoming
        is_it = known is not None and known.first == first
        return known if is_it else Upcoming(first, self._rows.room())

    def _extended(self, known: Upcoming, most: int) -> Upcoming:
        """Plans at most so many more rounds, as long as there is room."""
        begin, needed, is_full = known.first + len(known.drawn), known.needed, False
        found: list[list[types.Cohort]] = []
        if known.is_full:
            return known
        for round in range(begin, min(begin + most, known.first + self.length)):
            drawn = self.drawn(round)
            rows = [self.planner.owned(i, one.client_id) for i, one in enumerate(drawn)]
            rows = np.reshape(rows, (len(rows), self._execution.num_devices, -1))
            needed = needed + rows.sum(2)
            is_full = needed.max() > self.capacity or not known.fits(drawn)
            if is_full:
                break
            found.append(drawn)
        parts = known.parts
        if found:
            part = [
                self.planner.positions(seed, begin, [one[seed] for one in found])
                for seed in self._seeds
            ]
            parts = *parts, part
        new = (*known.drawn, *found), parts, needed, is_full
        return Upcoming(known.first, known.fits, *new)

    def plan_bytes(self) -> float:
        """Bytes of plans per round for one seed, in a window as full as possible."""
        known = self._extended(Upcoming(0, self._rows.room()), self.length)
        if not known.drawn:
            known = known._replace(drawn=(self.drawn(0),))
        leaves = jax.tree.leaves(self._planned(0, known).plans)
        return sum(leaf.nbytes for leaf in leaves) / len(known.drawn)


def placed(cohorts: types.Cohort, how: types.Execution) -> types.Cohort:
    """Cohorts [S, ...] on the devices, which get only the plans of their own rows."""
    by_device = execution_lib.by_device(how)
    positions = {
        name: execution_lib.place(plan.position, by_device)
        for name, plan in cohorts.plans.items()
    }
    rest = {name: plan.replace(position=()) for name, plan in cohorts.plans.items()}
    everywhere = execution_lib.replicated(how)
    out = execution_lib.place(cohorts.replace(plans=rest), everywhere)
    plans = out.plans.items()
    return out.replace(
        plans={name: plan.replace(position=positions[name]) for name, plan in plans}
    )
