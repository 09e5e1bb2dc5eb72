"""The host's side of a run: one object that is advanced and evaluated.

Rounds run in calls of about ten seconds. A call reads its plans from a window, a table
of the next rounds' plans on the device. Meanwhile the host prepares the next.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_pfl import call as call_lib
from fedjax_pfl import execution as execution_lib
from fedjax_pfl import program as program_lib
from fedjax_pfl import stacked, types, windows
from fedjax_pfl.call import Totals, Work
from fedjax_pfl.evaluations import Evaluations
from fedjax_pfl.rows import choose, views
from fedjax_pfl.variants import Variants
from fedjax_pfl.windows import Planner, Window

CALL_SECONDS = 10.0
# Shorter calls are launched before the evaluation in front of them is read.
LAUNCHED_SECONDS = 1.0


class Simulation:
    """A run that is advanced and evaluated: its state, round and counters.

    Attributes:
        rounds: The total, which a caller may raise.
        totals: The counters so far.
        compile_seconds: Time spent on compiling and on the initial state.
        while_compiling: Returns a context that is entered while something is compiled.
        variants: The seeds and points of a sweep.
        rows, windows: Where the private rows live, and the plans of the next rounds.
        evaluations: The evaluations with the present program.
        calls: The variants, by call of the program, see `Variants.calls`.
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
        rows_in: str | None = None,
        with_rows: Callable[..., program_lib.Program] | None = None,
    ):
        """Prepares a run without computing anything yet.

        Args:
            program, planner: From `program.build`, and the cohorts and plans.
            data: Tables, and on the host a `partition` with a leading axis of seeds.
            execution: For counting padding, and for the placement of arrays.
            rounds: Total number of rounds. Nothing is planned for later ones.
            points: Float options of each point of a sweep, which replace the program's.
            rows_in: Where the private rows are that are not on the device: a folder, ""
                for the host's memory, None = there are none.
            with_rows: `(num_rows, execution) -> Program` for a state of so many private
                rows, where these are on the host and a later round may need more.
        """
        self.program, self.rounds, self._with_rows = program, rounds, with_rows
        self.data = data.replace(partition=None)
        self.compile_seconds = 0.0
        self.while_compiling: Callable[[], Any] = contextlib.nullcontext
        self.variants = Variants(len(seeds), len(points))
        sent = np.zeros((self.variants.count, len(program.algorithm.messages)), int)
        clock = np.zeros(self.variants.count) if planner.has_clock else None
        self.totals = Totals(sent, np.zeros(self.variants.count, int), clock)
        values = [program.floats | dict(point) for point in points]
        self.calls = call_lib.make_calls(
            self.variants, program.vmaps, data.partition, seeds, values, execution
        )
        num_clients = data.partition.train.start.shape[1]
        self.rows = choose.make_rows(num_clients, execution, self.template, rows_in)
        self.windows = windows.Windows(
            planner,
            len(seeds),
            self.calls,
            program.algorithm.plans,
            execution,
            self.rows,
        )
        self._window: Window | None = None
        self._digest: tuple[list[int], str] | None = None
        self._use(program, execution)
        # Seconds of a round of the last call; the first call is to have one round
        self._round_seconds = CALL_SECONDS

    @property
    def round(self) -> int:
        """Rounds done."""
        return min(call.round for call in self.calls)

    @property
    def state(self) -> types.RoundState | None:
        """The stacked RoundState (leading axis: variants); None before `start`.

        The next call reuses its buffers, so copy what you keep. Where no device has the
        rows of all clients, they are put together on the host.
        """
        if self.calls[0].state is None:
            return None
        return jax.tree.map(views.materialised, self.rows.whole(self._joined()))

    @property
    def saved(self) -> Any:
        """`state` in the form of a checkpoint, if possible without a copy."""
        return self.rows.saved(self._joined())

    def digest(self) -> str:
        """SHA-256 of all variants' parameters, wherever they are: see `Rows.digest`."""
        rounds = [call.round for call in self.calls]
        if self._digest is None or self._digest[0] != rounds:
            self._digest = rounds, self.rows.digest(self._joined())
        return self._digest[1]

    def _joined(self) -> types.RoundState:
        """The devices' states of all calls as one, without a copy."""
        self._settle()
        return views.joined([call.state for call in self.calls])

    def around(
        self, client: int | None, variant: int, cohort: types.Cohort
    ) -> tuple[types.RoundState, types.Cohort, int | None]:
        """`Rows.around` of a client (None = the server) in one variant.

        `cohort` has the next round's clients.
        """
        self._settle()
        self._make_room([cohort])
        call = next(call for call in self.calls if variant in call.variants)
        mine = variant - call.variants.start
        state = stacked.at(call.state, slice(mine, mine + 1))
        return self.rows.around(variant, state, cohort, client)

    def _settle(self) -> None:
        """Waits for all calls, and stores the rows that they changed."""
        for call in self.calls:
            call.settle(self.totals)
            self.rows.after(call)

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
        """Shapes of the state on the device, without computing anything."""
        init, count = self.program.init, self.variants.count
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((count, *s.shape[1:]), s.dtype),
            init.shapes(*self.calls[0].init_args(self.data)),
        )

    def start(self) -> None:
        """Makes the state before the first round, once."""
        for call in self.calls:
            if call.state is None:
                begin, compiled = time.perf_counter(), self.compile_seconds
                args = call.init_args(self.data)
                executable = self._executable(self.program.init, args)
                state = jax.block_until_ready(executable(*args))
                call.state = self.rows.begin(call, state)
                self.compile_seconds = compiled + time.perf_counter() - begin

    def load(
        self,
        round: int,
        state: Any,
        totals: Totals,
        compile_seconds: float,
        metrics: Mapping[str, tuple[list[float], list[float]]],
    ) -> None:
        """Continues after `round` rounds from a stacked state and the counters.

        `state` is an earlier `saved`, in either form, the others earlier attributes.
        """
        self.totals, self.compile_seconds = totals, compile_seconds
        if self.rows.needs_start:
            self.start()
        # They may have rows or a hash that were taken before.
        self._window = self._digest = None
        of_calls = self.rows.loaded(state, self.calls)
        for call, mine in zip(self.calls, of_calls, strict=True):
            call.load(round, self._placed(mine), metrics)

    def advance_to(self, stop: int) -> None:
        """Runs until `stop` rounds are done. Does nothing if they already are."""
        while self.round < stop:
            self.advance(stop)

    def advance(
        self, stop: int, is_due: Callable[[int], bool] = lambda round: False
    ) -> None:
        """Runs one call of about `CALL_SECONDS`, not beyond round `stop`.

        The state is whole when it returns: between two calls a caller may save, or stop
        and continue later. As many rounds of the next window are planned while the
        device computes. If an evaluation `is_due` after the last round, it follows on
        the device without waiting for the host, and `evaluate` reads it.
        """
        self.start()
        for call in self.calls:
            call.settle(self.totals)
        begin = self.round
        if begin >= stop:
            return
        window, ahead, seconds = self._current_window(begin, stop), None, 0.0
        end, is_planned, has_ended = max(self.rounds, stop), False, False
        launched = [one.launched[1] for one in self.calls if one.launched is not None]
        until = launched[0] if launched else self._until(begin, stop, window)
        for index, call in enumerate(self.calls):
            # A call is ahead if an exception came between two of them.
            if call.round >= until:
                continue
            has_ended = call.has_ended
            if call.launched is None:
                self.rows.before(call, window.rows)
                # What another call evaluates is no training.
                jax.block_until_ready([one.evaluated for one in self.calls])
                self._launch(index, window, until)
            started = call.free_since
            if has_ended:
                # They ended while the host did other work, and count like earlier ones.
                expected = (until - begin) * self._round_seconds
                started = max(started, time.perf_counter() - expected)
            call.land()
            try:
                if is_due(until) and self.evaluations.goes_ahead:
                    call.evaluated = self.evaluations.dispatch(call, self._executable)
                if not is_planned and until == window.end < end:
                    ahead = self.windows.make(until, end)
                elif not is_planned and window.end < end:
                    self.windows.prepare(window.end, end, until - begin)
                is_planned = True
                self.rows.during(call, ahead and ahead.rows)
            finally:
                call.settle(self.totals)
            seconds += time.perf_counter() - started
        # All processes must run calls of the same length.
        seconds = execution_lib.agreed(seconds)
        self.totals.seconds += seconds
        self._window = ahead or window
        if not has_ended:
            self._round_seconds = seconds / (until - begin)

    def _until(self, begin: int, stop: int, window: Window) -> int:
        """The end of a call from round `begin` on, as long as `CALL_SECONDS`."""
        count = max(1, int(CALL_SECONDS / max(self._round_seconds, 1e-6)))
        return min(begin + count, stop, window.end)

    def launch(self, stop: int) -> None:
        """Dispatches the next call of `advance`, not beyond round `stop`.

        The devices continue while the host reads and records the present evaluation.
        The present state is gone, and `round` is its round until `advance` has been
        called. Nothing is launched where that is not possible or gains little: where no
        evaluation is dispatched ahead (`Evaluations.goes_ahead`), as on several devices
        of a CPU, which in two programs at once may wait for one another for ever, and
        with several processes, which may not agree when to.
        """
        (call, *others), window = self.calls, self._window
        is_alone = not others and jax.process_count() == 1
        waits = call.evaluated is not None and not self.rows.needs_start
        if is_alone and waits and window.first <= self.round < window.end:
            until = self._until(self.round, stop, window)
            if (until - self.round) * self._round_seconds <= LAUNCHED_SECONDS:
                self._launch(0, window, until)

    @property
    def is_launched(self) -> bool:
        """Whether `launch` has taken the state, and `advance` has to be called."""
        return any(call.launched is not None for call in self.calls)

    def _launch(self, index: int, window: Window, until: int) -> None:
        """Dispatches the rounds of a call up to `until`."""
        call = self.calls[index]
        first, count = call.round - window.first, until - call.round
        args = call.round_args(self.data, window.cohorts[index], first, count)
        executable = self._executable(self.program.rounds, args)
        work = Work(*(one[first : first + count] for one in window.work[index]))
        call.launch(executable, args, until, work)

    def _current_window(self, round: int, stop: int) -> Window:
        """The window that holds the plans of `round`, made now if necessary."""
        if self._window is None or not self._window.first <= round < self._window.end:
            self._window = self.windows.make(round, max(self.rounds, stop))
        self._fit_program()
        return self._window

    def _use(self, program: program_lib.Program, execution: types.Execution) -> None:
        """Continues with a program, whose evaluations have to be compiled first."""
        self.program, self.execution = program, execution
        self.evaluations = Evaluations(
            program, execution, self.data, self.rows, self.windows
        )

    def _fit_program(self) -> None:
        """Takes the program for as many rows as there are; a window may need more."""
        num_rows = self.rows.layout.num_rows
        if self.program.num_rows != num_rows:
            self._use(self._with_rows(num_rows, self.execution), self.execution)

    def _make_room(self, cohorts: Iterable[types.Cohort]) -> None:
        """Makes room for the next round's clients, who may be in no window.

        After the last round they are in none, and a model may be mixed from all peers.
        """
        layout = self.rows.layout
        self.rows.grow(cohorts)
        if self.rows.layout != layout:
            self._window = None
        self._fit_program()

    def evaluate(self) -> list[tuple[dict[str, float], dict[str, np.ndarray]]]:
        """The metrics of the present state, and values of clients, for each variant.

        Metrics are fractions 0..1 by name with the last round's metrics and the bytes
        so far. Values of clients are f64[K] by name: `accuracy` or, of texts,
        `perplexity`, these as `fine_tuned_...`, and measures; {} without own test rows.
        """
        self.start()
        self._fit_program()
        if self.rows.goes_by_block(self.program.algorithm):
            self._make_room(self.windows.drawn(self.round))
        out = []
        for call in self.calls:
            call.settle(self.totals)
            self.rows.after(call)
            found = call.evaluated or self.evaluations.dispatch(call, self._executable)
            found = jax.device_get(found)
            if call.launched is not None:
                # They begin now, and have taken the state, so that there is no other.
                call.free_since = time.perf_counter()
            else:
                call.evaluated = None
            out += self.evaluations.read(call, found, self.totals)
        self.evaluations.has_evaluated = True
        return out

    def compute(
        self, program: program_lib.Program, planner: Planner, execution: types.Execution
    ) -> None:
        """Continues with clients in other chunks, which only changes the speed."""
        self.windows.compute(planner, execution)
        self._window = None
        self._use(program, execution)

    def ahead(self, name: str) -> jax.stages.Compiled:
        """The executable of one of `Program.names` for the first call.

        It is compiled now if necessary, and the run uses it.
        """
        args = self._first_args(name)
        return self._executable(getattr(self.program, name), args)

    def lowered(self) -> dict[str, jax.stages.Lowered]:
        """The functions of `Program.names` for the first call, ready to be compiled."""
        return {
            name: getattr(self.program, name).lower(*self._first_args(name))
            for name in self.program.names
        }

    def _first_args(self, name: str) -> tuple[Any, ...]:
        """Arguments of a program for the first call, in which the state has shapes."""
        call = self.calls[0]
        if name == "init":
            return call.init_args(self.data)
        state = self.program.init.shapes(*call.init_args(self.data))
        placed = self._placed(state, execution_lib.placed_shapes)
        call = dataclasses.replace(call, state=placed)
        if name == "rounds":
            window = self._current_window(call.round, self.rounds)
            return call.round_args(self.data, window.cohorts[0], 0, 1)
        return self.evaluations.first_args(name, call)

    def _executable(self, function: program_lib.Compiled, args: tuple) -> Any:
        """The function for such arguments, compiled now if it is not yet."""
        executable, seconds = function.ahead(
            *args, while_compiling=self.while_compiling
        )
        self.compile_seconds += seconds
        return executable

    def _placed(
        self, state: types.RoundState, place: Callable = execution_lib.place
    ) -> types.RoundState:
        """A state where it lives, so that all calls see equal types."""
        return jax.tree.map(place, state, state.where(self.execution))
