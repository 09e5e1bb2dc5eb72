"""Compiles an algorithm's init, rounds and evaluation as jitted functions.

No other module of the engine jits. The rounds between two stops are one jitted loop
with donated state, in which the start and the length are traced numbers. Programs of
equal structure are the same objects, so that a second experiment compiles nothing.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import (
    evaluate,
    execution,
    local_training,
    optimizer,
    options,
    stacked,
    traffic,
    types,
)
from fedjax_pfl.rows import exchange

KEPT_PROGRAMS = 24  # On a CPU one of fedavg_cnn takes 35 MB, of resnet18 130 MB.


class Compiled:
    """A function that is compiled ahead, once for all arguments of one shape.

    `where` says from the shapes of its result where that is, as shardings or formats of
    all parts. `options` are those of `jax.jit`. It is traced with the precision of
    matrix products that jax has when it is made, whatever that is later.
    """

    def __init__(self, fn: Callable, where: Callable[[Any], Any], **options: Any):
        self._jit = functools.partial(jax.jit, fn, **options)
        precision = jax.config.jax_default_matmul_precision
        self._traced = functools.partial(jax.default_matmul_precision, precision)
        self._where = where
        self._by_shape: dict[Any, tuple[Callable, float]] = {}

    @property
    def executables(self) -> list[Callable]:
        return [executable for executable, _ in self._by_shape.values()]

    def seconds_of(self, executable: Callable) -> float:
        """The seconds that compiling one of `executables` took."""
        return next(s for one, s in self._by_shape.values() if one is executable)

    def shapes(self, *args: Any) -> Any:
        """The shapes of its result for such arguments."""
        with self._traced():
            return jax.eval_shape(self._jit(), *args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The function for such arguments, ready to be compiled."""
        where = self._where(self.shapes(*args))
        with self._traced():
            return self._jit(out_shardings=where).lower(*args)

    def ahead(
        self, *args: Any, while_compiling: Callable[[], Any] = contextlib.nullcontext
    ) -> tuple[Callable, float]:
        """(executable for such arguments, seconds that compiling took in this call).

        `while_compiling` returns a context that is entered while it is compiled. Then
        it waits until all processes have compiled it.
        """
        leaves, structure = jax.tree.flatten(args)
        key = structure, tuple(jax.typeof(leaf) for leaf in leaves)
        if key in self._by_shape:
            return self._by_shape[key][0], 0.0
        begin = time.perf_counter()
        with while_compiling():
            executable = self.lower(*args).compile()
        self._by_shape[key] = executable, time.perf_counter() - begin
        # Each process compiles separately. A program's first collective waits half a
        # minute for the others, this waits as long as it takes.
        execution.wait_for_all("compiled")
        return self._by_shape[key]


class Program(NamedTuple):
    """The jitted functions over stacked variants: seeds, or points of a sweep.

    * `init(floats, data, partition, seeds) -> state`.
    * `rounds(floats, state, cohorts, first, num_rounds, data, partition) -> (state,
      metrics of the last round, counts int32[variants, T, kinds], diverged
      int32[variants], seconds f32[variants, T])` runs `cohorts[first : first +
      num_rounds]` of a window of T rounds. `diverged` is the first of them, counted
      from 1, after which a metric or a parameter is not finite, 0 = none. `seconds` are
      those of `traffic.lasting`, () without a clock.
    * `of_shared(floats, state, cohort, data, partition)` and `of_clients(floats, state,
      cohort, data, partition, ids, sample)` are those of `evaluate`; `ids` are the
      clients of the state's rows.
    * `of_adapted(floats, state, cohort, data, partition, members, sample)`, also of
      `evaluate`.

    `algorithm` is that of the first of several points, and `algorithm_of(floats)` that
    of any. All arguments but `first`, `num_rounds` and `data` have a leading axis of
    variants, or of 1 where they share it. Floats that they share are scalars. Several
    seeds may be one vmapped call, and so may the points of one seed, as `vmaps` says
    for `Variants.calls`. Otherwise each is a separate call.
    """

    init: Compiled
    rounds: Compiled
    of_shared: Compiled
    of_clients: Compiled
    of_adapted: Compiled
    scoring: evaluate.Scoring
    vmaps: dict[str, bool]
    floats: dict[str, float]
    algorithm: types.Algorithm
    algorithm_of: Callable[[dict[str, float]], types.Algorithm]
    num_rows: int

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions that a run of it needs."""
        names = "init", "rounds", "of_shared", "of_clients"
        return names if self.scoring.adapts is None else (*names, "of_adapted")


def _over_variants(fn: Callable, how: types.Execution, *args: Any) -> Any:
    """Maps `fn` over one more leading axis. Arguments with an axis of 1 are shared.

    Scalars are shared too. So points of a sweep share their seed's plans, and bounds
    and branches that depend on these stay unbatched. Where all axes are 1 there is no
    loop, and updates stay in place.
    """

    def is_shared(arg: Any) -> bool:
        return all(leaf.shape[:1] in ((), (1,)) for leaf in jax.tree.leaves(arg))

    def one(leaf: jax.Array) -> jax.Array:
        return leaf[0] if leaf.ndim else leaf

    shared = [is_shared(arg) for arg in args]
    pairs = list(zip(args, shared, strict=True))
    own = jax.tree.leaves([arg for arg, alone in pairs if not alone])
    args = [jax.tree.map(one, arg) if alone else arg for arg, alone in pairs]
    count = len(own[0]) if own else 1
    with execution.over_devices(how), execution.side_by_side(how, count):
        if all(shared):
            return jax.tree.map(lambda leaf: leaf[None], fn(*args))
        return jax.vmap(fn, tuple(None if alone else 0 for alone in shared))(*args)


def _is_finite(
    state: types.RoundState, metrics: Any, cohort: types.Cohort
) -> jax.Array:
    """bool[]: whether everything that a round measured or wrote is finite."""
    shared = stacked.is_finite((metrics, state.server))
    return shared & exchange.are_finite(state.clients, cohort.row)


def _fingerprint(value: Any) -> Any:
    """A hashable stand-in that is equal for equal structure; arrays by their bits."""
    if isinstance(value, (np.ndarray, jax.Array)):
        array = np.ascontiguousarray(value)
        digest = hashlib.sha256(array.data).hexdigest()
        return array.shape, str(array.dtype), digest
    return value


@dataclasses.dataclass(frozen=True)
class _Structure:
    """Everything that decides what is compiled. Equal structures share a program.

    Only `name` is compared. `make`, `structure`, `task` and `scoring` hold no example,
    since data are arguments of the jitted functions.
    """

    name: Any
    make: Callable = dataclasses.field(compare=False)
    structure: Any = dataclasses.field(compare=False)
    task: types.Task = dataclasses.field(compare=False)
    scoring: evaluate.Scoring = dataclasses.field(compare=False)


def first_state(
    algorithm: types.Algorithm,
    hparams: Any,
    task: types.Task,
    data: types.Data,
    key: jax.Array,
) -> types.RoundState:
    """The state before round 0, with the clients' persistent optimizer states.

    Raises ValueError if the algorithm's `init` made optimizer states.
    """
    state = algorithm.init(data, key)
    if state.opt_state != ():
        raise ValueError(
            "the algorithm's init makes optimizer states; leave these to the engine, "
            "and name other parameters in types.Algorithm(opt_state=)"
        )
    kept = optimizer.persistent(hparams, task, algorithm)
    return state.replace(opt_state=kept)


def checked_round(algorithm: types.Algorithm, *given: Any) -> tuple:
    """`algorithm.round`; ValueError if it drops all persistent optimizer states."""
    before, (state, metrics, sent) = given[0].opt_state, algorithm.round(*given)
    pairs = zip(*map(jax.tree.leaves, (before, state.opt_state)), strict=True)
    if jax.tree.leaves(before) and all(new is old for new, old in pairs):
        raise ValueError(
            "--optimizer_state=persist: the round keeps no optimizer state; let the "
            "function of Round.update return what local_training.train gave it, not in "
            "the summed part, and use the Round that `update` returns"
        )
    return state, metrics, sent


def make_algorithm(
    make: Callable[[Any, types.Task], types.Algorithm], hparams: Any, task: types.Task
) -> types.Algorithm:
    """Calls `make`; ValueErrors as in `build`."""
    algorithm = make(hparams, task)
    if not isinstance(algorithm, types.Algorithm):
        raise ValueError(
            f"algo: its make returned a {type(algorithm).__name__}, expected a "
            "fedjax_pfl.types.Algorithm"
        )
    traffic.check(algorithm.messages)
    if not algorithm.by_architecture:
        _ = task.client_model  # refuses several
    return algorithm


def build(
    make: Callable[[Any, types.Task], types.Algorithm],
    hparams: Any,
    task: types.Task,
    scoring: evaluate.Scoring,
    code: str = "",
) -> Program:
    """Builds the jitted functions of one algorithm, or finds those of an equal one.

    Args:
        make: `(hparams, task) -> Algorithm`. It is called again inside each trace, with
            the float hyperparameters as tracers.
        hparams, task: The arguments of `make`.
        scoring: What to evaluate.
        code: A hash of what custom code computes, since a function that is the same
            object may refer to others that have changed.

    Raises:
        ValueError: one line: `make` returned something else, or clients have several
            architectures and the algorithm takes one.
    """
    algorithm = make_algorithm(make, hparams, task)
    structure, floats = options.split_floats(hparams)
    fields = dataclasses.fields(structure)
    # A method or a closure may hold incomparable values, so it is built again.
    is_plain = isinstance(make, FunctionType) and not make.__closure__
    name = (
        make if is_plain else object(),
        code,
        type(structure),
        tuple(getattr(structure, field.name) for field in fields),
        tuple(_fingerprint(value) for value in task),
        scoring,
        # Settings for which jax would retrace.
        jax.config.jax_default_matmul_precision,
        jax.config.jax_enable_x64,
    )
    program = _jitted(_Structure(name, make, structure, task, scoring))
    return program._replace(floats=floats, algorithm=algorithm)


def _one_after_another(how: types.Execution) -> dict[str, Any]:
    """Compiler options where private rows travel between the devices of a CPU.

    By default XLA starts operations as soon as they can start. Two collectives at once
    may wait in more threads than there are, each for the other's, and never end. The
    trips of rows wait for what an algorithm's `Round` does (`rows.exchange`), but not
    for what a user's computes beside it. With XLA's other schedule no run hung.
    """
    chosen = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return chosen if how.platform == "cpu" and how.shares_rows else {}


def _soon_compiled(platform: str) -> dict[str, Any]:
    """Compiler options for init and evaluation, which run rarely.

    On a CPU less optimisation saves seconds of compiling at the same run time. A level
    that the user sets in `XLA_FLAGS` has precedence.
    """
    name = "xla_backend_optimization_level"
    is_chosen = name in os.environ.get("XLA_FLAGS", "")
    return {} if is_chosen or platform != "cpu" else {name: 1}


def forget() -> None:
    """Drops the programs kept for later experiments."""
    _jitted.cache_clear()


def _all_rounds(
    algorithm: types.Algorithm,
    state: types.RoundState,
    cohorts: types.Cohort,
    first: jax.Array,
    num_rounds: jax.Array,
    data: types.Data,
) -> tuple[types.RoundState, dict[str, Any], jax.Array, jax.Array, Any]:
    """`num_rounds` rounds of one variant, from place `first` of a window of W cohorts.

    Returns the state, the last round's metrics, the messages int32[W, kinds], the first
    round after which something was not finite, 0 = none, and the simulated seconds
    f32[W], () without a clock.
    """
    num_examples = data.partition.train.count
    # Jitted so that it is traced once, for its shapes and in the loop. The new function
    # makes jax trace again what a user's object keeps.
    round = jax.jit(lambda *given: checked_round(algorithm, *given), inline=True)

    def step(index: jax.Array, carry: tuple) -> tuple:
        state, _, counts, diverged, seconds = carry
        cohort = cohorts.of_round(index, num_examples)
        state, metrics, sent = round(state, cohort, data)
        number = traffic.counted(sent, algorithm.messages, cohort.row_mask)
        lasted = traffic.lasting(sent, algorithm.messages, cohort)
        if not isinstance(lasted, tuple):
            seconds = seconds.at[index].set(lasted)
        is_new = (diverged == 0) & ~_is_finite(state, metrics, cohort)
        diverged = jnp.where(is_new, state.round, diverged)
        return state, metrics, counts.at[index].set(number), diverged, seconds

    # The loop's carry needs the metrics' shapes before the first round.
    cohort = cohorts.of_round(0, num_examples)
    metrics = stacked.zeros(jax.eval_shape(round, state, cohort, data)[1])
    window = len(cohorts.client_id)
    counts = jnp.zeros((window, len(algorithm.messages)), jnp.int32)
    seconds = jax.tree.map(jnp.zeros_like, cohorts.deadline)
    carry = (state, metrics, counts, jnp.zeros((), jnp.int32), seconds)
    return jax.lax.fori_loop(first, first + num_rounds, step, carry)


@functools.lru_cache(maxsize=KEPT_PROGRAMS)
def _jitted(of: _Structure) -> Program:
    """The jitted functions, in which `build` fills in floats and algorithm."""
    task, scoring = of.task, of.scoring
    # On a CPU lax.map over seeds copies the state in every round. vmap runs all clients
    # as long as the slowest seed's, and computes all sides of a branch by level.
    how = task.execution
    has_branches = task.num_levels > 1 and how.is_bucketed

    def options_of(values: dict[str, Any]) -> Any:
        return dataclasses.replace(of.structure, **values)

    def algorithm(values: dict[str, Any]) -> types.Algorithm:
        made = of.make(options_of(values), task)
        adapt = made.adapt or local_training.adapted(options_of(values))
        return made._replace(adapt=adapt)

    def init(values, data, partition, seeds):
        def one(values, partition, seed):
            tables, key = data.replace(partition=partition), jax.random.key(seed)
            given = options_of(values)
            return first_state(of.make(given, task), given, task, tables, key)

        return _over_variants(one, how, values, partition, seeds)

    def rounds(values, state, cohorts, first, num_rounds, data, partition):
        def one(values, state, cohorts, partition, number):
            state = state.replace(round=number)
            tables = data.replace(partition=partition)
            given = state, cohorts, first, num_rounds, tables
            return _all_rounds(algorithm(values), *given)

        # One number, as otherwise each seed had a learning rate of its own, which a GPU
        # would spread to the shape of all weights in every local step.
        number = state.round[0]
        return _over_variants(one, how, values, state, cohorts, partition, number)

    def evaluation(fn: Callable) -> Callable:
        """A function of `evaluate` over variants, under its own name."""

        def over(values, state, cohort, data, *given):
            def one(values, state, cohort, partition, *which):
                tables = data.replace(partition=partition)
                given = state, cohort, tables, scoring, how
                return fn(algorithm(values), *given, *which)

            return _over_variants(one, how, values, state, cohort, *given)

        over.__name__ = fn.__name__
        return over

    everywhere, in_order = execution.replicated(how), _one_after_another(how)
    rarely = _soon_compiled(how.platform) | in_order

    def of_state(state: types.RoundState) -> types.RoundState:
        return state.where(how)

    def after_rounds(found: tuple[Any, ...]) -> tuple[Any, ...]:
        return of_state(found[0]), *[everywhere] * (len(found) - 1)

    def rare(fn: Callable, where: Callable = lambda _: everywhere) -> Compiled:
        return Compiled(fn, where, compiler_options=rarely)

    def often(fn: Callable, where: Callable = lambda _: everywhere, **more) -> Compiled:
        return Compiled(fn, where, compiler_options=in_order, **more)

    return Program(
        init=rare(init, of_state),
        rounds=often(rounds, after_rounds, donate_argnums=1),
        of_shared=rare(evaluation(evaluate.of_shared)),
        of_clients=rare(evaluation(evaluate.of_clients)),
        of_adapted=often(evaluation(evaluate.of_adapted)),
        scoring=scoring,
        vmaps={
            "vmaps_seeds": how.vmaps_runs and not has_branches,
            "vmaps_points": how.vmaps_runs,
        },
        floats={},
        algorithm=None,
        algorithm_of=algorithm,
        num_rows=task.num_rows,
    )
