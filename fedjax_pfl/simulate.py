"""The host's side of a run: one object that is advanced and evaluated.

Rounds run in calls of about ten seconds. A call reads its plans from a window, a table
of the next rounds' plans on the device; while it computes, the host prepares the next
window.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import evaluate, shapes, traffic, types
from fedjax_pfl import execution as execution_lib
from fedjax_pfl import program as program_lib

CALL_SECONDS = 10.0
WINDOW_BYTES = 16 << 20
MAX_WINDOW_ROUNDS = 64


class Planner(Protocol):
    """Who is drawn in which round, and with which plans; pure functions of both."""

    def drawn(self, seed_index: int, round: int) -> types.Cohort:
        """The cohort of a round, without plans."""

    def window(
        self,
        seed_index: int,
        first_round: int,
        num_rounds: int,
        length: int,
        min_steps: Mapping[str, int],
    ) -> types.Cohort:
        """Cohorts of `num_rounds` rounds, leaves [length, ...], zeros behind them.

        The steps of a plan are as many as these rounds need, a power of two and at
        least `min_steps[name]`.
        """


@dataclasses.dataclass
class Totals:
    """The host's counters; survive a resume through the checkpoint.

    `messages` int64[seeds, kinds]; `seconds` of training so far; `samples` those of the
    plans, `executed` with padding.
    """

    messages: np.ndarray
    seconds: float = 0.0
    client_updates: int = 0
    samples: int = 0
    executed: int = 0


class Work(NamedTuple):
    """What rounds cost, int64[rounds] each."""

    client_updates: np.ndarray
    samples: np.ndarray
    executed: np.ndarray


class Window(NamedTuple):
    """Plans of the rounds `first..end - 1`, by lane: leaves [seeds, T, ...]."""

    first: int
    end: int
    cohorts: list[types.Cohort]
    work: list[Work]


@dataclasses.dataclass
class Lane:
    """The seeds that one call of the program runs.

    Attributes:
        seeds: Indices into the run's seeds, in order.
        partition: Of these seeds, as leading axis.
        state: Stacked RoundState, None before the start.
        round: Rounds done.
        pending: (metrics, messages, work) of a call not yet accounted for.
        metrics: (sums, counts) of the last round by name, a float for each seed.
    """

    seeds: range
    partition: types.Partition
    state: types.RoundState | None = None
    round: int = 0
    pending: tuple[Any, jax.Array, Work] | None = None
    metrics: dict[str, tuple[list[float], list[float]]] = dataclasses.field(
        default_factory=dict
    )

    def of(self, stacked: Any) -> Any:
        """The part of leaves [all seeds, ...] that belongs to this lane."""
        own = slice(self.seeds.start, self.seeds.stop)
        return jax.tree.map(lambda leaf: leaf[own], stacked)


def window_rounds(
    cohort: types.Cohort, specs: Sequence[types.PlanSpec], max_rows: int
) -> int:
    """Length T of every window: a power of two, bounded by its bytes for one seed.

    From the plans' largest shapes alone, never from the rounds of a run, so that runs
    of any length are one program.

    Args:
        cohort: Any round's; its plans are not looked at.
        specs: The algorithm's plans.
        max_rows: Train rows of the largest client.
    """
    leaves = jax.tree.leaves(cohort.replace(plans={}))
    size = sum(np.asarray(leaf).nbytes for leaf in leaves)
    for spec in specs:
        steps = shapes.rounded_up(spec.epochs * -(-max_rows // spec.batch_size))
        rows = shapes.capped(spec.batch_size, max_rows)
        size += 4 * len(cohort.row) * (steps * (rows + 1) + 1)
    fits = int(np.clip(WINDOW_BYTES // max(size, 1), 1, MAX_WINDOW_ROUNDS))
    return 1 << (fits.bit_length() - 1)


def work_of(cohorts: types.Cohort, execution: types.Execution) -> Work:
    """What each round of a window costs; leaves [seeds, T, ...], summed over seeds."""
    updates = cohorts.row_mask.sum((0, 2))
    samples, executed = np.zeros_like(updates), np.zeros_like(updates)
    for plan in cohorts.plans.values():
        samples += (plan.position >= 0).sum((0, 2, 3, 4))
        steps = execution_lib.executed_steps(plan.num_steps, execution)
        executed += steps.sum(0) * plan.position.shape[-1]
    return Work(updates, samples, executed)


class Simulation:
    """A run that is advanced and evaluated: its state, round and counters.

    Attributes:
        rounds: In all; a caller may raise it.
        totals: The counters so far.
        compile_seconds: Spent on compiling, and on the initial state.
        while_compiling: Gives what is entered while something is compiled, so that a
            caller can say so.
        lanes: The seeds, by call of the program: all of them in one on accelerators,
            one by one on a CPU, where a loop over seeds inside the program would copy
            the state in every round.
    """

    def __init__(
        self,
        program: program_lib.Program,
        data: types.Data,
        planner: Planner,
        seeds: Sequence[int],
        execution: types.Execution,
        rounds: int,
    ):
        """Prepares a run; computes nothing yet.

        Args:
            program: From `program.build`.
            data: Tables whose `partition` has a leading axis of seeds.
            planner: Cohorts and plans.
            seeds: The seeds.
            execution: For the account of padding, and where arrays live.
            rounds: Rounds in all; nothing is planned for later ones.
        """
        self.program, self.planner, self.execution = program, planner, execution
        self.seeds, self.rounds = list(seeds), rounds
        self.data = data.replace(partition=None)
        self.compile_seconds = 0.0
        self.while_compiling: Callable[[], Any] = contextlib.nullcontext
        kinds = len(program.algorithm.messages)
        self.totals = Totals(np.zeros((len(self.seeds), kinds), np.int64))
        per_lane = 1 if program.one_seed else len(self.seeds)
        self.lanes = []
        for first in range(0, len(self.seeds), per_lane):
            lane = Lane(range(first, first + per_lane), None)
            lane.partition = self._place(lane.of(data.partition))
            self.lanes.append(lane)
        self._length = window_rounds(
            planner.drawn(0, 0),
            program.algorithm.plans,
            int(np.max(data.partition.train.count)),
        )
        self._window: Window | None = None
        # Only grows: plans with another number of steps are another program.
        self._steps: dict[str, int] = {}
        self._rounds_per_call = 1

    @property
    def round(self) -> int:
        """Rounds done."""
        return min(lane.round for lane in self.lanes)

    @property
    def state(self) -> types.RoundState | None:
        """The stacked RoundState (leading axis: seeds); None before `start`.

        The next call takes its buffers: copy what is to be kept.
        """
        for lane in self.lanes:
            self._settle(lane)
        states = [lane.state for lane in self.lanes]
        if len(states) == 1 or states[0] is None:
            return states[0]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)

    @property
    def metrics(self) -> dict[str, tuple[list[float], list[float]]]:
        """(sums, counts) of the last round by name, lists over all seeds."""
        names = self.lanes[0].metrics
        return {
            name: tuple(
                [value for lane in self.lanes for value in lane.metrics[name][part]]
                for part in (0, 1)
            )
            for name in names
        }

    def template(self) -> types.RoundState:
        """Shapes of `state`, without computing anything."""
        init = self.program.init.jitted
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((len(self.seeds), *s.shape[1:]), s.dtype),
            jax.eval_shape(init, *self._init_args(self.lanes[0])),
        )

    def start(self) -> None:
        """Makes the state before the first round, once."""
        begin = time.perf_counter()
        for lane in self.lanes:
            if lane.state is None:
                args = self._init_args(lane)
                executable, _ = self._compiled(self.program.init, args)
                lane.state = jax.block_until_ready(executable(*args))
                self.compile_seconds += time.perf_counter() - begin
                begin = time.perf_counter()

    def load(
        self,
        round: int,
        state: types.RoundState,
        totals: Totals,
        compile_seconds: float,
        metrics: Mapping[str, tuple[list[float], list[float]]],
    ) -> None:
        """Continues after `round` rounds from a stacked state and the counters.

        Args:
            round: Rounds done.
            state: As `state` was.
            totals: As `totals` was.
            compile_seconds: As it was.
            metrics: As `metrics` was.
        """
        self.totals, self.compile_seconds = totals, compile_seconds
        for lane in self.lanes:
            own = slice(lane.seeds.start, lane.seeds.stop)
            lane.state, lane.round = self._place(lane.of(state)), round
            lane.metrics = {
                name: (sums[own], counts[own])
                for name, (sums, counts) in metrics.items()
            }
            lane.pending = None

    def advance_to(self, stop: int) -> None:
        """Runs until `stop` rounds are done; does nothing if they are already."""
        while self.round < stop:
            self.advance(stop)

    def advance(self, stop: int) -> None:
        """Runs one call of about `CALL_SECONDS`, of no round behind `stop`.

        The state is whole when it returns: between two calls a caller may save, or stop
        and go on later. Plans of the next window are made while the device computes.
        """
        self.start()
        for lane in self.lanes:
            self._settle(lane)
        begin = self.round
        if begin >= stop:
            return
        window, ahead, seconds = self._current_window(begin, stop), None, 0.0
        until = min(begin + self._rounds_per_call, stop, window.end)
        for index, lane in enumerate(self.lanes):
            # A lane is ahead where an exception came between two of them.
            if lane.round >= until:
                continue
            first, count = lane.round - window.first, until - lane.round
            args = (
                self.program.floats,
                lane.state,
                window.cohorts[index],
                np.int32(first),
                np.int32(count),
                self.data,
                lane.partition,
            )
            executable, compiling = self._compiled(self.program.rounds, args)
            self.compile_seconds += compiling
            work = Work(*(one[first : first + count] for one in window.work[index]))
            started = time.perf_counter()
            # The call takes the old state's buffers: no function may be called before
            # the new state is stored, or an interrupt could lose both.
            state, metrics, sent = executable(*args)
            lane.state, lane.round, lane.pending = state, until, (metrics, sent, work)
            try:
                if ahead is None and until == window.end < max(self.rounds, stop):
                    ahead = self._plan(until, stop)
            finally:
                self._settle(lane)
            seconds += time.perf_counter() - started
        self.totals.seconds += seconds
        self._window = ahead or window
        per_round = max(seconds, 1e-3) / (until - begin)
        self._rounds_per_call = max(1, int(CALL_SECONDS / per_round))

    def _current_window(self, round: int, stop: int) -> Window:
        """The window that holds the plans of `round`, made now if need be."""
        if self._window is None or not self._window.first <= round < self._window.end:
            self._window = self._plan(round, stop)
        return self._window

    def evaluate(self) -> list[tuple[dict[str, float], np.ndarray | None]]:
        """Metrics of the state as it is, one (metrics, accuracies) pair per seed.

        Returns:
            Fractions 0..1 by name with the last round's own metrics and the bytes so
            far, and the clients' accuracies f64[K] (None without own test rows).
        """
        self.start()
        out = []
        for lane in self.lanes:
            self._settle(lane)
            drawn = [self.planner.drawn(index, lane.round) for index in lane.seeds]
            args = (
                self.program.floats,
                lane.state,
                _stack(drawn),
                self.data,
                lane.partition,
            )
            executable, seconds = self._compiled(self.program.evaluate, args)
            self.compile_seconds += seconds
            counts = jax.tree.map(np.asarray, jax.device_get(executable(*args)))
            test = jax.tree.map(np.asarray, lane.partition.test)
            for slot, index in enumerate(lane.seeds):
                values, accuracies = evaluate.metrics(
                    jax.tree.map(lambda leaf, s=slot: leaf[s], counts),
                    test.count[slot],
                    (test.row[slot] >= 0).sum(),
                )
                for name, (total, count) in lane.metrics.items():
                    values[name] = total[slot] / max(count[slot], 1.0)
                values |= traffic.cumulative(
                    self.totals.messages[index], self.program.algorithm.messages
                )
                out.append((values, accuracies))
        return out

    def _compiled(
        self, function: program_lib.Compiled, args: tuple
    ) -> tuple[Callable, float]:
        """`function.ahead`, and the caller knows where it takes time."""
        return function.ahead(*args, while_compiling=self.while_compiling)

    def _settle(self, lane: Lane) -> None:
        """Waits for a lane's last call and counts it, once."""
        if lane.pending is None:
            return
        jax.block_until_ready(lane.state)
        metrics, sent, work = lane.pending
        sent = np.asarray(sent, np.int64).sum(1)
        lane.metrics = {
            name: tuple(np.asarray(part, np.float64).tolist() for part in pair)
            for name, pair in metrics.items()
        }
        self.totals.messages[lane.seeds.start : lane.seeds.stop] += sent
        self.totals.client_updates += int(work.client_updates.sum())
        self.totals.samples += int(work.samples.sum())
        self.totals.executed += int(work.executed.sum())
        lane.pending = None

    def _plan(self, first: int, stop: int) -> Window:
        """The window that begins with round `first`, on the device."""
        end = min(first + self._length, max(self.rounds, stop))

        def plan(seed_index: int) -> types.Cohort:
            cohort = self.planner.window(
                seed_index, first, end - first, self._length, self._steps
            )
            for name, one in cohort.plans.items():
                steps = one.position.shape[2]
                self._steps[name] = max(steps, self._steps.get(name, 0))
            return cohort

        def fits(cohort: types.Cohort) -> bool:
            return all(
                one.position.shape[2] == self._steps[name]
                for name, one in cohort.plans.items()
            )

        planned = [plan(index) for index in range(len(self.seeds))]
        # A later seed may have needed more steps; the draws stay what they are.
        planned = [
            one if fits(one) else plan(index) for index, one in enumerate(planned)
        ]
        cohorts = [_stack([planned[s] for s in lane.seeds]) for lane in self.lanes]
        work = [work_of(one, self.execution) for one in cohorts]
        return Window(first, end, [self._place(one) for one in cohorts], work)

    def _place(self, tree: Any) -> Any:
        """Where tables and states live; every call sees the same types then."""
        return jax.device_put(tree, execution_lib.replicated(self.execution))

    def _init_args(self, lane: Lane) -> tuple[Any, ...]:
        seeds = np.asarray([self.seeds[index] for index in lane.seeds], np.uint32)
        return self.program.floats, self.data, lane.partition, seeds


def _stack(cohorts: Sequence[types.Cohort]) -> types.Cohort:
    """Cohorts of several seeds, leaves [...] -> [seeds, ...]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *cohorts)
