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

from fedjax_pfl import checkpoint, evaluate, shapes, types
from fedjax_pfl import execution as execution_lib
from fedjax_pfl import program as program_lib
from fedjax_pfl.call import Call, Totals, Work
from fedjax_pfl.rows import slots, views
from fedjax_pfl.rows import store as population_lib

CALL_SECONDS = 10.0
WINDOW_BYTES = 64 << 20
MAX_WINDOW_ROUNDS = 64
# Of a population, rows of more bytes are not hashed for clients that never trained.
HASHED_BYTES = 8 << 30
# What an evaluation counts for each client.
BY_CLIENT = {"own", "own_loss", "known", "trained"}


class Planner(Protocol):
    """The clients and plans of each round, as pure functions of seed and round."""

    def drawn(self, seed_index: int, round: int) -> types.Cohort:
        """The cohort of a round, without plans."""

    def examples(self, seed_index: int, round: int) -> np.ndarray:
        """int[D]: train rows of all clients of a round, by device."""

    def rows_per_device(self, round: int) -> int:
        """The rows of each device in the cohort of a round."""

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
    """Plans of the rounds `first..end - 1`, by call: leaves [seeds, T, ...].

    With a population, `residents` has the clients of each seed on the device, and
    `records` the rows of calls that were read ahead.
    """

    first: int
    end: int
    cohorts: list[types.Cohort]
    work: list[Work]
    residents: list[population_lib.Residents]
    records: dict[int, np.ndarray]


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
        used = np.where(cohorts.row_mask, plan.spec.rows(owned), 0)
        samples += plan.spec.epochs * used.sum(1)
        executed += run * plan.spec.batch_size
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
        rows_in: str | None = None,
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
            rows_in: Where the private rows are that are not on the device: a folder, ""
                for the host's memory, None = there are none.
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
                placed[seeds_of] = execution_lib.place_tables(part, execution)
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
        self._owners: slots.Layout | None = None
        if execution.shares_rows:
            self._owners = slots.Layout(self._num_clients, execution.num_devices)
        self.population: population_lib.Population | None = None
        if rows_in is not None:
            self.population = population_lib.Population(
                self.template(), data.partition.train.start.shape[1], execution, rows_in
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

        The next call reuses its buffers, so copy what is to be kept. Where no device
        has the rows of all clients, they are put together on the host.
        """
        self._settle()
        states = [call.state for call in self.calls]
        if states[0] is None:
            return None
        if self.population is not None or self._owners is not None:
            return jax.tree.map(views.materialised, self.whole)
        if len(states) == 1:
            return states[0]
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)

    @property
    def whole(self) -> types.RoundState:
        """`state` as it is hashed: seeds are joined without a copy."""
        self._settle()
        states = [call.state for call in self.calls]
        joined = _joined(states)
        if self._owners is not None:
            return joined.with_private(self._owners.by_client(joined.private))
        if self.population is None:
            return joined
        return self.population.whole(range(len(self.totals.messages)), joined)

    @property
    def kept(self) -> types.RoundState | population_lib.Kept:
        """`state` as it is saved: of a population the rows that have trained."""
        if self.population is None:
            return self.whole
        variants = range(len(self.totals.messages))
        return self.population.kept(variants, self.whole)

    def digest(self) -> str:
        """SHA-256 of the server's and the clients' parameters, of all variants.

        It is of all rows in the order of clients, wherever they are kept, unless these
        are too many to hash: then it is that of the rows that have trained.
        """
        population = self.population
        if population is None or population.num_bytes <= HASHED_BYTES:
            return checkpoint.digest((self.whole.server, self.whole.clients))
        kept = self.kept
        rows = kept.state.clients, kept.common[0], kept.ids, kept.count
        return checkpoint.digest((kept.state.server, *rows))

    def around(
        self, client: int | None, variant: int, cohort: types.Cohort
    ) -> tuple[types.RoundState, types.Cohort, int | None]:
        """What defines the model that serves a client, where the device has it.

        Args:
            client: The client, None = the server.
            variant: The index of the variant.
            cohort: The next round's clients.

        Returns:
            (the state of this variant with a leading axis of 1, the cohort with slots
            in it, the client's slot).
        """
        self._settle()
        call = next(call for call in self.calls if variant in call.variants)
        own = variant - call.variants.start
        state = jax.tree.map(lambda leaf: leaf[own : own + 1], call.state)
        if self._owners is not None and jax.process_count() > 1:
            # Other processes have some of the rows.
            state = state.with_private(self._owners.by_client(_joined([state]).private))
            slots = np.where(cohort.row_mask, cohort.client_id, self._owners.num_rows)
            return state, cohort.replace(row=slots), client
        if self.population is None:
            if self._owners is None or client is None:
                return state, cohort, client
            return state, cohort, int(self._owners.slots[client])
        ids = self.population.residents(cohort)
        if client is not None and client not in ids:
            ids = np.array([client])
        state = self.population.block([variant], state, [ids])
        self.population.forget_block()
        cohort = population_lib.mapped(cohort, ids, self.population.num_clients)
        return state, cohort, None if client is None else int(ids.searchsorted(client))

    def _settle(self) -> None:
        """Waits for all calls, and keeps the rows that they have changed."""
        for call in self.calls:
            call.settle(self.totals)
            self._write_back(call)

    def _write_back(self, call: Call) -> None:
        """Keeps what a call's clients have trained since its rows were read."""
        if self.population is None or call.round == call.written:
            return
        residents = self._residents(call, call.window)
        done = call.round - call.window.first
        self.population.write(call.variants, call.state, residents, done)
        call.written = call.round

    def _residents(self, call: Call, window: Window) -> list[population_lib.Residents]:
        """The residents of each variant of a call."""
        return [window.residents[seed] for seed in self._seeds_of(call)]

    def _read_rows(self, index: int, window: Window) -> None:
        """Puts the rows of a window's clients on the device, unless they are there."""
        call = self.calls[index]
        if self.population is None or call.window is window:
            return
        self._write_back(call)
        if index not in window.records:
            self._read_ahead(index, window)
        elif call.window is not None:
            # They were read before the last clients of the present window had trained.
            self.population.refresh(
                window.records[index],
                call.variants,
                [one.ids for one in self._residents(call, window)],
                [one.ids for one in self._residents(call, call.window)],
            )
        records = window.records.pop(index)
        state = self.population.on_device(call.state, records)
        call.state, call.window = state, window

    def _read_ahead(self, index: int, window: Window) -> None:
        """Reads the rows of a window's clients for one of the calls."""
        call = self.calls[index]
        ids = [one.ids for one in self._residents(call, window)]
        window.records[index] = self.population.read(call.variants, ids)

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

    def kept_templates(self) -> list[Any]:
        """Shapes of `kept`, and of the other form in which a state may be saved."""
        own = self.template()
        other = population_lib.kept_template(own)
        if self.population is not None or self._owners is not None:
            own = population_lib.whole_template(own, self._num_clients)
        if self.population is not None:
            return [other, own]
        # Several processes load what the first one has read, in this form alone.
        return [own] if jax.process_count() > 1 else [own, other]

    def template(self) -> types.RoundState:
        """Shapes of the state on the device, without computing anything."""
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
                executable, _ = self._compiled(self.program.init, args)
                state = call.first(executable, args)
                if self.population is not None:
                    self.population.begin(call.variants, state)
                if self._owners is not None:
                    slots.check_equal(state.private)
                call.state = state
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
            state: The earlier `kept`, in either form.
            totals: The earlier `totals`.
            compile_seconds: The earlier `compile_seconds`.
            metrics: The earlier `metrics`.
        """
        self.totals, self.compile_seconds = totals, compile_seconds
        # It may have rows that were read before.
        self._window = None
        if self.population is not None:
            self.start()
            self.population.load(range(len(totals.messages)), state)
            state = self.population.resident(state)
        elif isinstance(state, population_lib.Kept):
            state = population_lib.expanded(state, self._num_clients)
        for call in self.calls:
            own = jax.tree.map(lambda leaf, c=call: leaf[c.rows], state)
            if self._owners is not None:
                own = own.with_private(self._owners.in_slots(own.private))
            call.load(round, self._place_state(own), metrics)

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
            self._read_rows(index, window)
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
                if ahead is not None and self.population is not None:
                    self._read_ahead(index, ahead)
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
            algorithm = self.program.algorithm
            if self.goes_by_block:
                self._write_back(call)
                counts = self._counts_by_block(call)
            else:
                args = self._evaluate_args(call)
                counts = self._computed(self.program.evaluate, args)
            if self._owners is not None:
                counts |= {
                    name: counts[name][:, self._owners.slots]
                    for name in BY_CLIENT & counts.keys()
                }
                if "measured" in counts:
                    slots, own = self._owners.slots, counts["measured"]["own"]
                    counts["measured"]["own"] = jax.tree.map(
                        lambda leaf, at=slots: leaf[:, at], own
                    )
            what = algorithm.messages, self.program.scoring
            out += call.measured(counts, self.totals, *what)
        return out

    @property
    def goes_by_block(self) -> bool:
        """Whether an evaluation needs rows that the device does not have."""
        algorithm = self.program.algorithm
        reads_rows = algorithm.serving or algorithm.trained
        return self.population is not None and bool(reads_rows)

    def _computed(self, function: program_lib.Compiled, args: tuple) -> Any:
        """What a function returns, as numpy arrays."""
        executable, seconds = self._compiled(function, args)
        self.compile_seconds += seconds
        return jax.tree.map(np.asarray, jax.device_get(executable(*args)))

    def _block_args(
        self,
        call: Call,
        state: types.RoundState,
        drawn: Sequence[types.Cohort],
        blocks: Sequence[np.ndarray],
    ) -> tuple[Any, ...]:
        """Arguments of `Program.evaluate` for the rows of some clients of each seed."""
        population, num_clients = self.population, self.population.num_clients
        pairs = list(zip(drawn, blocks, strict=True))
        cohort = _stack([population_lib.mapped(*pair, num_clients) for pair in pairs])
        ids = np.full((len(blocks), population.num_rows), num_clients, np.int32)
        for line, block in zip(ids, blocks, strict=True):
            line[: len(block)] = block
        placed = self._place(cohort), self._place(ids)
        return call.floats, state, *placed, self.data, call.partition

    def _counts_by_block(self, call: Call) -> dict[str, Any]:
        """The counts of all clients, of which the device holds a block at a time."""
        population, scoring = self.population, self.program.scoring
        num_clients, points = population.num_clients, self._num_points
        drawn = [self.planner.drawn(index, call.round) for index in call.seeds]
        by_seed = []
        for place, cohort in enumerate(drawn):
            wanted = None
            if scoring.num_sampled:
                key = call.state.key[place * points]
                given = key, num_clients, scoring.num_sampled
                wanted = np.asarray(evaluate.sampled_clients(*given))
            mine = [v for v in call.variants if v // points == call.seeds[place]]
            first = population.residents(cohort)
            by_seed.append(population.blocks(mine, first, wanted))

        def run(function: program_lib.Compiled, blocks: list[np.ndarray]) -> Any:
            of_variant = [blocks[call.seeds.index(v // points)] for v in call.variants]
            state = population.block(call.variants, call.state, of_variant)
            args = self._block_args(call, state, drawn, blocks)
            return self._computed(function, args)

        counts = found = run(self.program.evaluate, [blocks[0] for blocks in by_seed])
        shared = counts["shared"]
        names = sorted(BY_CLIENT & counts.keys())
        shape = len(call.variants), num_clients
        whole = {
            name: np.zeros((*shape, *counts[name].shape[2:]), counts[name].dtype)
            for name in names
        }
        for number in range(max(map(len, by_seed))):
            none = np.zeros(0, np.int64)
            blocks = [one[number] if number < len(one) else none for one in by_seed]
            if number:
                found = run(self.program.evaluate_rest, blocks)
            for slot, variant in enumerate(call.variants):
                block = blocks[call.seeds.index(variant // points)]
                for name in names:
                    whole[name][slot, block] = found[name][slot, : len(block)]
                if not number:
                    continue
                for name in {"own", "own_loss", "trained"}.intersection(names):
                    # Without a key the models that training left are those that serve.
                    key = name if name in shared else "own"
                    group = key.removesuffix("_loss")
                    pairs = zip(found["by_shared"][group], shared[key], strict=True)
                    for serves, right in pairs:
                        mine = serves[slot, : len(block)]
                        served = block[mine]
                        whole[name][slot, served] += right[slot, served]
        population.forget_block()
        return counts | whole

    def compute(
        self,
        program: program_lib.Program,
        planner: Planner,
        execution: types.Execution,
    ) -> None:
        """Goes on with clients in other chunks, on which nothing but speed depends."""
        self.program, self.planner, self.execution = program, planner, execution
        self._window = None

    def ahead(self, name: str) -> jax.stages.Compiled:
        """The executable of `init`, `rounds` or `evaluate` of the first call.

        It is compiled now if need be, and a run finds it again.
        """
        args = self._first_args(name)
        executable, seconds = self._compiled(getattr(self.program, name), args)
        self.compile_seconds += seconds
        return executable

    def _shaped(self, call: Call) -> Call:
        """A call with the shapes of its state, if it has none yet."""
        if call.state is not None:
            return call
        state = jax.eval_shape(self.program.init.jitted, *call.init_args(self.data))
        state = self._place_state(state, execution_lib.placed_shapes)
        return dataclasses.replace(call, state=state)

    def lowered(self) -> dict[str, jax.stages.Lowered]:
        """`init`, `rounds` and `evaluate` of the first call, ready to be compiled."""
        return {
            name: getattr(self.program, name).jitted.lower(*self._first_args(name))
            for name in ("init", "rounds", "evaluate")
        }

    def _first_args(self, name: str) -> tuple[Any, ...]:
        """Arguments of `init`, `rounds` or `evaluate` of the first call, or shapes."""
        if name == "init":
            return self.calls[0].init_args(self.data)
        call = self._shaped(self.calls[0])
        if name == "rounds":
            window = self._current_window(call.round, self.rounds)
            return self._round_args(call, window.cohorts[0], 0, 1)
        if not self.goes_by_block:
            return self._evaluate_args(call)
        drawn = [self.planner.drawn(index, call.round) for index in call.seeds]
        blocks = [self.population.residents(one) for one in drawn]
        state = call.state.replace(opt_state=())
        return self._block_args(call, state, drawn, blocks)

    def _round_args(
        self, call: Call, cohorts: types.Cohort, first: int, count: int
    ) -> tuple[Any, ...]:
        """Arguments of `Program.rounds`."""
        rounds = np.int32(first), np.int32(count)
        return call.floats, call.state, cohorts, *rounds, self.data, call.partition

    def _evaluate_args(self, call: Call) -> tuple[Any, ...]:
        """Arguments of `Program.evaluate`."""
        drawn = _stack([self.planner.drawn(index, call.round) for index in call.seeds])
        ids = () if self._owners is None else self._place(self._owners.clients[None])
        return call.floats, call.state, drawn, ids, self.data, call.partition

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
            count = 1
            self._capacity = max(self._capacity, shapes.rounded_up_finely(needed))
        planned = [
            self.planner.window(index, first, count, self._length, self._capacity)
            for index in every
        ]
        costs = [
            work_of(self.planner, index, one, self.execution)
            for index, one in enumerate(planned)
        ]
        residents = []
        if self.population is not None:
            clients = self.population.num_clients
            for index, one in enumerate(planned):
                drawn = [one.client_id[t][one.row_mask[t]] for t in range(count)]
                found = population_lib.Residents(self.population.residents(one), drawn)
                residents.append(found)
                planned[index] = population_lib.mapped(one, found.ids, clients)
        cohorts = [_stack([planned[s] for s in call.seeds]) for call in self.calls]
        work = [
            Work(*map(sum, zip(*(costs[s] for s in self._seeds_of(call)), strict=True)))
            for call in self.calls
        ]
        placed = [self._place_window(one) for one in cohorts]
        return Window(first, first + count, placed, work, residents, {})

    def _seeds_of(self, call: Call) -> list[int]:
        """The seed of each of a call's variants, as an index."""
        return [variant // self._num_points for variant in call.variants]

    @property
    def _num_points(self) -> int:
        """The points of a sweep, 1 without one."""
        return len(self.totals.messages) // len(self.seeds)

    @property
    def _num_clients(self) -> int:
        return self.calls[0].partition.train.start.shape[1]

    def _fitting(self, first: int, most: int) -> tuple[int, int]:
        """(rounds from `first` on for which there is room, examples with one more)."""
        needed, every = np.zeros(1, np.int64), range(len(self.seeds))
        ids = [np.zeros(0, np.int64) for _ in every]
        rows_per_device = self.planner.rows_per_device(first)
        for count in range(min(self._length, most)):
            round = first + count
            if self.planner.rows_per_device(round) != rows_per_device:
                return count, int(needed.max())
            found = [self.planner.examples(index, round) for index in every]
            needed = needed + np.stack(found)
            if needed.max() > self._capacity:
                return count, int(needed.max())
            if self.population is None:
                continue
            for index in every:
                more = population_lib.needed(self.planner.drawn(index, round))
                ids[index] = np.union1d(ids[index], more)
            if max(map(len, ids)) > self.population.num_rows:
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

    def _place_state(
        self, state: types.RoundState, place: Callable = execution_lib.place
    ) -> types.RoundState:
        """Like `_place`, but each device gets only the private rows that it owns."""
        everywhere = execution_lib.replicated(self.execution)
        rest = place(state.with_private(((), ())), everywhere)
        rows = place(state.private, execution_lib.of_rows(self.execution))
        return rest.with_private(rows)


def _joined(states: Sequence[types.RoundState]) -> types.RoundState:
    """The states of several calls as one, without a copy."""
    return jax.tree.map(lambda *leaves: views.Joined(leaves), *states)


def _stack(cohorts: Sequence[types.Cohort]) -> types.Cohort:
    """Cohorts of several seeds, leaves [...] -> [seeds, ...]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *cohorts)
