"""The host's side of a run: one object that is advanced and evaluated.

Rounds run in calls of about ten seconds. A call reads its plans from a window, a table
of the next rounds' plans on the device. While it computes, the host prepares the next
window.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import checkpoint, shapes, types
from fedjax_pfl import execution as execution_lib
from fedjax_pfl import program as program_lib
from fedjax_pfl.call import Call, Totals, Work

CALL_SECONDS = 10.0
WINDOW_BYTES = 64 << 20
MAX_WINDOW_ROUNDS = 64


class Planner(Protocol):
    """The clients and plans of each round, as pure functions of seed and round."""

    def drawn(self, seed_index: int, round: int) -> types.Cohort:
        """The cohort of a round, without plans."""

    def examples(self, seed_index: int, round: int) -> np.ndarray:
        """int[D]: train rows of all clients of a round, by device."""

    def capacity(self, num_rounds: int) -> int:
        """Room for the examples of a device in so many rounds, for any seed."""

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
    """Plans of the rounds `first..end - 1`, by call: leaves [seeds, T, ...]."""

    first: int
    end: int
    cohorts: list[types.Cohort]
    work: list[Work]


def window_rounds(
    cohort: types.Cohort, specs: Sequence[types.PlanSpec], num_examples: float
) -> int:
    """The length T of every window, bounded by its bytes for one seed.

    It follows from the average round and never from the number of rounds of a run, so
    that runs of any length are one program. It moves in steps of a sixteenth, so that
    similar clients share the program too. Where rounds are so large that few fit, more
    than a sixth of the room stays empty.

    Args:
        cohort: Any round's cohort. Its plans are not used.
        specs: The algorithm's plans.
        num_examples: Train examples of a round's clients, on average.
    """
    leaves = jax.tree.leaves(cohort.replace(plans={}))
    size = sum(np.asarray(leaf).nbytes for leaf in leaves)
    for spec in specs:
        size += 4 * (len(cohort.row) + spec.epochs * num_examples)
    fits = int(np.clip(WINDOW_BYTES // max(size, 1), 1, MAX_WINDOW_ROUNDS))
    return fits - fits % max(shapes.rounded_up(fits) // 32, 1)


def work_of(
    planner: Planner,
    seed_index: int,
    cohorts: types.Cohort,
    execution: types.Execution,
) -> Work:
    """The cost of each round of a window; leaves [T, ...], for one seed."""
    updates = cohorts.row_mask.sum(1)
    samples, executed, steps, executed_steps = np.zeros((4, len(updates)), np.int64)
    owned = planner.owned(seed_index, cohorts.client_id)
    num_steps = planner.num_steps(seed_index, cohorts.client_id)
    for name, plan in cohorts.plans.items():
        taken = np.where(cohorts.row_mask, num_steps[name], 0)
        run = execution_lib.executed_steps(taken, execution)
        samples += plan.epochs * np.where(cohorts.row_mask, owned, 0).sum(1)
        executed += run * plan.batch_size
        steps += taken.sum(1)
        executed_steps += run
    return Work(updates, samples, executed, steps, executed_steps)


class Simulation:
    """A run that is advanced and evaluated: its state, round and counters.

    Attributes:
        rounds: The total, which a caller may raise.
        totals: The counters so far.
        compile_seconds: Time spent on compiling and on the initial state.
        while_compiling: Returns a context that is entered while something is compiled,
            so that a caller can show it.
        calls: The variants, by call of the program. On accelerators all seeds are in
            one call, or of a sweep all points of a seed, which share its plans. On a
            CPU each variant is a call, because a loop over them inside the program
            would copy the state in every round.
    """

    def __init__(
        self,
        program: program_lib.Program,
        data: types.Data,
        planner: Planner,
        seeds: Sequence[int],
        execution: types.Execution,
        rounds: int,
        points: Sequence[Mapping[str, float]] = ({},),
    ):
        """Prepares a run without computing anything yet.

        Args:
            program: From `program.build`.
            data: Tables, with a `partition` on the host that has a leading axis of
                seeds.
            planner: Cohorts and plans.
            seeds: The seeds.
            execution: For the account of padding, and the placement of arrays.
            rounds: Total number of rounds. Nothing is planned for later ones.
            points: Of a sweep, the numbers that each has instead of the program's own.
        """
        self.program, self.planner, self.execution = program, planner, execution
        self.seeds, self.rounds = list(seeds), rounds
        self.data = data.replace(partition=None)
        self.compile_seconds = 0.0
        self.while_compiling: Callable[[], Any] = contextlib.nullcontext
        kinds = len(program.algorithm.messages)
        num_variants = len(self.seeds) * len(points)
        self.totals = Totals(
            np.zeros((num_variants, kinds), np.int64), np.zeros(num_variants, np.int64)
        )
        together = 1
        if len(points) > 1 and program.vmaps_points:
            together = len(points)
        elif len(points) == 1 and program.vmaps_seeds:
            together = len(self.seeds)
        self.calls, placed = [], {}
        for first in range(0, num_variants, together):
            own = range(first, first + together)
            seeds_of = tuple(dict.fromkeys(index // len(points) for index in own))
            if seeds_of not in placed:
                part = jax.tree.map(
                    lambda leaf, s=seeds_of: leaf[np.array(s)], data.partition
                )
                placed[seeds_of] = self._place(part)
            values = [program.floats | dict(points[i % len(points)]) for i in own]
            floats = values[0]  # also of seeds that are vmapped
            if len(own) > 1 and len(points) > 1:
                floats = {
                    name: np.array([one[name] for one in values]) for name in floats
                }
            chosen = np.asarray([self.seeds[index] for index in seeds_of], np.uint32)
            call = Call(own, seeds_of, chosen, floats, placed[seeds_of])
            self.calls.append(call)
        self._length = window_rounds(
            planner.drawn(0, 0), program.algorithm.plans, planner.round_examples
        )
        self._window: Window | None = None
        # Room for a few rounds less than the longest window, so that it is full before
        # these are reached. It only grows, since another size is another program.
        self._capacity = planner.capacity(self._length - self._length // 8)
        self._rounds_per_call = 1

    @property
    def round(self) -> int:
        """Rounds done."""
        return min(call.round for call in self.calls)

    @property
    def state(self) -> types.RoundState | None:
        """The stacked RoundState (leading axis: variants); None before `start`.

        The next call reuses its buffers, so copy what is to be kept.
        """
        for call in self.calls:
            call.settle(self.totals)
        states = [call.state for call in self.calls]
        if len(states) == 1 or states[0] is None:
            return states[0]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)

    @property
    def joined(self) -> Any:
        """`state` as it is saved and hashed: seeds are joined without a copy."""
        for call in self.calls:
            call.settle(self.totals)
        states = [call.state for call in self.calls]
        return jax.tree.map(lambda *leaves: checkpoint.Joined(leaves), *states)

    @property
    def metrics(self) -> dict[str, tuple[list[float], list[float]]]:
        """(sums, counts) of the last round by name, lists over all seeds."""
        names = self.calls[0].metrics
        return {
            name: tuple(
                [value for call in self.calls for value in call.metrics[name][part]]
                for part in (0, 1)
            )
            for name in names
        }

    def template(self) -> types.RoundState:
        """Shapes of `state`, without computing anything."""
        init = self.program.init.jitted
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(
                (len(self.totals.messages), *s.shape[1:]), s.dtype
            ),
            jax.eval_shape(init, *self.calls[0].init_args(self.data)),
        )

    def start(self) -> None:
        """Makes the state before the first round, once."""
        for call in self.calls:
            if call.state is None:
                begin = time.perf_counter()
                args = call.init_args(self.data)
                call.start(self._compiled(self.program.init, args)[0], args)
                self.compile_seconds += time.perf_counter() - begin

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
            state: The earlier `state`.
            totals: The earlier `totals`.
            compile_seconds: The earlier `compile_seconds`.
            metrics: The earlier `metrics`.
        """
        self.totals, self.compile_seconds = totals, compile_seconds
        for call in self.calls:
            own = jax.tree.map(lambda leaf, c=call: leaf[c.rows], state)
            call.load(round, self._place(own), metrics)

    def advance_to(self, stop: int) -> None:
        """Runs until `stop` rounds are done. Does nothing if they already are."""
        while self.round < stop:
            self.advance(stop)

    def advance(self, stop: int) -> None:
        """Runs one call of about `CALL_SECONDS`, not beyond round `stop`.

        The state is whole when it returns: between two calls a caller may save, or stop
        and continue later. Plans of the next window are made while the device computes.
        """
        self.start()
        for call in self.calls:
            call.settle(self.totals)
        begin = self.round
        if begin >= stop:
            return
        window, ahead, seconds = self._current_window(begin, stop), None, 0.0
        until = min(begin + self._rounds_per_call, stop, window.end)
        for index, call in enumerate(self.calls):
            # A call is ahead if an exception came between two of them.
            if call.round >= until:
                continue
            first, count = call.round - window.first, until - call.round
            args = self._round_args(call, window.cohorts[index], first, count)
            executable, compiling = self._compiled(self.program.rounds, args)
            self.compile_seconds += compiling
            work = Work(*(one[first : first + count] for one in window.work[index]))
            started = time.perf_counter()
            call.advance(executable, args, until, work)
            try:
                if ahead is None and until == window.end < max(self.rounds, stop):
                    ahead = self._plan(until, stop)
            finally:
                call.settle(self.totals)
            seconds += time.perf_counter() - started
        # All processes must run calls of the same length.
        seconds = execution_lib.agreed(seconds)
        self.totals.seconds += seconds
        self._window = ahead or window
        per_round = max(seconds, 1e-3) / (until - begin)
        self._rounds_per_call = max(1, int(CALL_SECONDS / per_round))

    def _current_window(self, round: int, stop: int) -> Window:
        """The window that holds the plans of `round`, made now if necessary."""
        if self._window is None or not self._window.first <= round < self._window.end:
            self._window = self._plan(round, stop)
        return self._window

    def evaluate(self) -> list[tuple[dict[str, float], np.ndarray | None]]:
        """The metrics of the present state, one (metrics, accuracies) pair per variant.

        Returns:
            Fractions 0..1 by name with the last round's own metrics and the bytes so
            far, and the clients' accuracies f64[K] (None without own test rows).
        """
        self.start()
        out = []
        for call in self.calls:
            call.settle(self.totals)
            args = self._evaluate_args(call)
            executable, seconds = self._compiled(self.program.evaluate, args)
            self.compile_seconds += seconds
            counts = jax.tree.map(np.asarray, jax.device_get(executable(*args)))
            kinds = self.program.algorithm.messages
            out += call.measured(counts, self.totals, kinds)
        return out

    def lowered(self) -> dict[str, jax.stages.Lowered]:
        """`init`, `rounds` and `evaluate` of the first call, ready to be compiled."""
        init_args = self.calls[0].init_args(self.data)
        state = self._place(jax.eval_shape(self.program.init.jitted, *init_args))
        call = dataclasses.replace(self.calls[0], state=state)
        window = self._current_window(call.round, self.rounds)
        of = {
            "init": init_args,
            "rounds": self._round_args(call, window.cohorts[0], 0, 1),
            "evaluate": self._evaluate_args(call),
        }
        return {
            name: getattr(self.program, name).jitted.lower(*args)
            for name, args in of.items()
        }

    def _round_args(
        self, call: Call, cohorts: types.Cohort, first: int, count: int
    ) -> tuple[Any, ...]:
        """Arguments of `Program.rounds`."""
        rounds = np.int32(first), np.int32(count)
        return call.floats, call.state, cohorts, *rounds, self.data, call.partition

    def _evaluate_args(self, call: Call) -> tuple[Any, ...]:
        """Arguments of `Program.evaluate`."""
        drawn = _stack([self.planner.drawn(index, call.round) for index in call.seeds])
        return call.floats, call.state, drawn, self.data, call.partition

    def _compiled(
        self, function: program_lib.Compiled, args: tuple
    ) -> tuple[Callable, float]:
        """`function.ahead`, then a wait for all processes if it compiled."""
        found = function.ahead(*args, while_compiling=self.while_compiling)
        if found[1]:
            # Each process compiles separately. A program's first collective waits half
            # a minute for the others, this waits as long as it takes.
            execution_lib.wait_for_all("compiled")
        return found

    def _plan(self, first: int, stop: int) -> Window:
        """The window that begins with round `first`, on the device.

        It has as many rounds as there is room for. A round that needs more room gets
        it.
        """
        every = range(len(self.seeds))
        count, needed = self._fitting(first, max(self.rounds, stop) - first)
        if not count:
            count, self._capacity = 1, shapes.rounded_up_finely(needed)
        planned = [
            self.planner.window(index, first, count, self._length, self._capacity)
            for index in every
        ]
        costs = [
            work_of(self.planner, index, one, self.execution)
            for index, one in enumerate(planned)
        ]
        cohorts = [_stack([planned[s] for s in call.seeds]) for call in self.calls]
        work = [
            Work(*map(sum, zip(*(costs[s] for s in self._seeds_of(call)), strict=True)))
            for call in self.calls
        ]
        placed = [self._place_window(one) for one in cohorts]
        return Window(first, first + count, placed, work)

    def _seeds_of(self, call: Call) -> list[int]:
        """The seed of each of a call's variants, as an index."""
        points = len(self.totals.messages) // len(self.seeds)
        return [variant // points for variant in call.variants]

    def _fitting(self, first: int, most: int) -> tuple[int, int]:
        """(rounds from `first` on for which there is room, examples with one more)."""
        needed = np.zeros(1, np.int64)
        for count in range(min(self._length, most)):
            needed = needed + np.stack(
                [
                    self.planner.examples(index, first + count)
                    for index in range(len(self.seeds))
                ]
            )
            if needed.max() > self._capacity:
                return count, int(needed.max())
        return min(self._length, most), 0

    def plan_bytes(self) -> float:
        """Bytes of plans per round for one seed, in a window as full as possible."""
        count, _ = self._fitting(0, self._length)
        count = max(count, 1)
        window = self.planner.window(0, 0, count, self._length, self._capacity)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(window.plans)) / count

    def _place_window(self, cohorts: types.Cohort) -> types.Cohort:
        """Like `_place`, but each device gets only the plans of its own rows."""
        by_device = execution_lib.by_device(self.execution)
        positions = {
            name: execution_lib.place(plan.position, by_device)
            for name, plan in cohorts.plans.items()
        }
        plans = {
            name: plan.replace(position=()) for name, plan in cohorts.plans.items()
        }
        placed = self._place(cohorts.replace(plans=plans))
        plans = {
            name: plan.replace(position=positions[name])
            for name, plan in placed.plans.items()
        }
        return placed.replace(plans=plans)

    def _place(self, tree: Any) -> Any:
        """Puts tables and states where they live, so that all calls see equal types."""
        return execution_lib.place(tree, execution_lib.replicated(self.execution))


def _stack(cohorts: Sequence[types.Cohort]) -> types.Cohort:
    """Cohorts of several seeds, leaves [...] -> [seeds, ...]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *cohorts)
