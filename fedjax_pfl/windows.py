"""Windows: the plans of the next rounds as tables on the devices."""

from collections.abc import Sequence
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
    """The clients and plans of each round, as pure functions of seed and round.

    `has_clock` says whether its cohorts have the seconds of simulated devices.
    """

    has_clock: bool

    def drawn(self, seed_index: int, round: int) -> types.Cohort:
        """The cohort of a round, without plans."""

    def examples(self, seed_index: int, round: int) -> np.ndarray:
        """int[D]: train rows of all clients of a round, by device."""

    def capacity(self, num_rounds: int) -> int:
        """Plan entries that a device needs for `num_rounds` rounds, of any seed."""

    def window(
        self,
        seed_index: int,
        first_round: int,
        num_rounds: int,
        length: int,
        capacity: int,
    ) -> types.Cohort:
        """Cohorts of `num_rounds` rounds, leaves [length, ...], padded with zeros.

        Their plans have room for `capacity` examples of a device.
        """

    def num_steps(self, seed_index: int, client: np.ndarray) -> dict[str, np.ndarray]:
        """Steps int[...] of clients int[...] in each plan, by its name."""

    def owned(self, seed_index: int, client: np.ndarray) -> np.ndarray:
        """int[...]: train rows of clients int[...], 0 on padding rows."""

    @property
    def round_examples(self) -> float:
        """Train rows of all clients of a round, on average."""


class Window(NamedTuple):
    """Plans of the rounds `first..end - 1`, by call: leaves [seeds, T, ...].

    `rows` is the second result of `Rows.window`.
    """

    first: int
    end: int
    cohorts: list[types.Cohort]
    work: list[Work]
    rows: Any


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
        cohort, examples = planner.drawn(0, 0), planner.round_examples
        self.length = window_rounds(cohort, specs, examples)
        # Slightly less than the longest window needs, so that windows are full
        self.capacity = planner.capacity(self.length - self.length // 8)

    def compute(self, planner: Planner, execution: types.Execution) -> None:
        """Continues with clients in other chunks."""
        self.planner, self._execution = planner, execution

    def make(self, first: int, end: int) -> Window:
        """The window that begins with round `first`, before `end`, on the devices.

        It has as many rounds as there is room for. A round that needs more room gets
        it, so that the rows of a state may be more afterwards.
        """
        count, needed = self._fitting(first, end - first)
        if not count:
            count = 1
            self.capacity = max(self.capacity, shapes.rounded_up_finely(needed))
            self._rows.grow(self.planner.drawn(seed, first) for seed in self._seeds)
        planned = [self._planned(seed, first, count) for seed in self._seeds]
        costs = [
            work_of(self.planner, seed, one, self._execution)
            for seed, one in enumerate(planned)
        ]
        planned, rows = self._rows.window(first, planned, count)
        cohorts = [
            self._placed(stacked.on_host([planned[seed] for seed in call.seeds]))
            for call in self._calls
        ]
        work = [
            Work(*map(sum, zip(*(costs[seed] for _, seed in call.pairs), strict=True)))
            for call in self._calls
        ]
        return Window(first, first + count, cohorts, work, rows)

    def _planned(self, seed: int, first: int, count: int) -> types.Cohort:
        return self.planner.window(seed, first, count, self.length, self.capacity)

    def _fitting(self, first: int, most: int) -> tuple[int, int]:
        """(rounds from `first` on for which there is room, examples with one more)."""
        needed, fits = np.zeros(1, np.int64), self._rows.room()
        for count in range(min(self.length, most)):
            round = first + count
            found = [self.planner.examples(seed, round) for seed in self._seeds]
            needed = needed + np.stack(found)
            drawn = (self.planner.drawn(seed, round) for seed in self._seeds)
            if needed.max() > self.capacity or not fits(drawn):
                return count, int(needed.max())
        return min(self.length, most), 0

    def plan_bytes(self) -> float:
        """Bytes of plans per round for one seed, in a window as full as possible."""
        count = max(self._fitting(0, self.length)[0], 1)
        window = self._planned(0, 0, count)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(window.plans)) / count

    def _placed(self, cohorts: types.Cohort) -> types.Cohort:
        """A window on the devices, which get only the plans of their own rows."""
        by_device = execution_lib.by_device(self._execution)
        positions = {
            name: execution_lib.place(plan.position, by_device)
            for name, plan in cohorts.plans.items()
        }
        rest = {name: plan.replace(position=()) for name, plan in cohorts.plans.items()}
        everywhere = execution_lib.replicated(self._execution)
        placed = execution_lib.place(cohorts.replace(plans=rest), everywhere)
        plans = placed.plans.items()
        whole = {name: plan.replace(position=positions[name]) for name, plan in plans}
        return placed.replace(plans=whole)
