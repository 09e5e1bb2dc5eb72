"""The host's loop over a compiled program: the only training loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import evaluate, traffic, types
from fedjax_pfl import program as program_lib

CHUNK_SECONDS = 10.0
PLAN_BYTES = 64 << 20
MAX_CHUNK_ROUNDS = 64


@dataclasses.dataclass
class Totals:
    """The host's counters; survive a resume through the checkpoint.

    `messages` int64[seeds, kinds]; `seconds` of training so far.
    """

    messages: np.ndarray
    seconds: float = 0.0
    client_updates: int = 0
    samples: int = 0
    executed: int = 0


class Event(NamedTuple):
    """After each chunk of rounds.

    `round` rounds are done. `evaluated` has one (metrics, per-client accuracies) pair
    per seed, or is None where no evaluation was due. `compile_seconds` so far.
    """

    round: int
    state: Any
    totals: Totals
    evaluated: list[tuple[dict[str, float], np.ndarray | None]] | None
    compile_seconds: float
    call_seconds: float
    call_rounds: int


def chunk_rounds(cohort: types.Cohort, num_seeds: int, rounds: int) -> int:
    """Fixed length of a chunk of plans: bounded by its bytes, 1..MAX_CHUNK_ROUNDS."""
    size = num_seeds * sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(cohort))
    return int(np.clip(PLAN_BYTES // max(size, 1), 1, min(MAX_CHUNK_ROUNDS, rounds)))


def executed_samples(plan: types.Plan, execution: types.Execution) -> int:
    """Samples computed for one cohort, padding included, as `over_clients` runs it."""
    num_steps = np.asarray(plan.num_steps)
    devices = execution.mesh.size if execution.mesh else 1
    chunk = min(execution.chunk, len(num_steps) // devices)
    bounds = num_steps.reshape(-1, chunk).max(1)
    return int(bounds.sum()) * chunk * plan.position.shape[-1]


class _Compiled:
    """A jitted function compiled ahead at its first call, with the time that took."""

    def __init__(self, jitted: Callable):
        self.jitted, self.compiled, self.seconds = jitted, None, 0.0

    def __call__(self, *args: Any) -> Any:
        if self.compiled is None:
            start = time.perf_counter()
            self.compiled = self.jitted.lower(*args).compile()
            self.seconds = time.perf_counter() - start
        return self.compiled(*args)


def initial_state(
    program: program_lib.Program, data: types.Data, seeds: Sequence[int]
) -> types.RoundState:
    """The stacked state before the first round."""
    return program.init(
        program.floats, data, data.partition, jnp.asarray(seeds, jnp.uint32)
    )


def train(
    program: program_lib.Program,
    data: types.Data,
    state: types.RoundState,
    cohorts: Callable[[int, int], types.Cohort],
    *,
    num_seeds: int,
    start: int,
    evaluate_start: bool,
    rounds: int,
    evaluate_at: frozenset[int],
    stop_at: Callable[[int], int],
    totals: Totals,
    execution: types.Execution,
    rounds_per_call: int | None = None,
) -> Iterator[Event]:
    """Runs rounds `start..rounds-1` and yields after every chunk.

    Args:
        program: From `program`.
        data: Tables whose `partition` has a leading axis of seeds.
        state: The stacked state after `start` rounds; donated.
        cohorts: `(seed index, round) -> Cohort` of numpy arrays, a pure function.
        num_seeds: Length of the leading axis.
        start: Rounds already done.
        evaluate_start: Whether to evaluate before the first round.
        rounds: Rounds in all.
        evaluate_at: Rounds after which to evaluate.
        stop_at: `round -> next round` at which a chunk must end at the latest (for
            checkpoints).
        totals: Counters so far.
        execution: For the account of padding.
        rounds_per_call: Fixed length of a chunk; None = about `CHUNK_SECONDS` of work.
    """
    run_rounds, run_evaluate = _Compiled(program.rounds), _Compiled(program.evaluate)
    first = cohorts(0, start)
    # From `rounds` alone: a resumed run compiles the very same program.
    length = chunk_rounds(first, num_seeds, rounds)
    per_call = rounds_per_call or 1
    shared = data.replace(partition=None)
    test_count = np.asarray(data.partition.test.count)
    union = (np.asarray(data.partition.test.row) >= 0).sum(1)
    metrics: dict[str, Any] = {}
    # Placed now, so that the first call has the types of all later ones.
    state = jax.device_put(state, execution_lib.replicated(execution))

    def stack(first_round: int, count: int) -> types.Cohort:
        table = [
            [cohorts(seed, first_round + i) for i in range(count)]
            for seed in range(num_seeds)
        ]
        account(table)

        def join(*leaves: np.ndarray) -> np.ndarray:
            out = np.zeros((num_seeds, length, *leaves[0].shape), leaves[0].dtype)
            for index, leaf in enumerate(leaves):
                out[index // count, index % count] = leaf
            return out

        return jax.tree.map(join, *[one for seed in table for one in seed])

    def account(table: list[list[types.Cohort]]) -> None:
        for one in (one for seed in table for one in seed):
            totals.client_updates += int(one.row_mask.sum())
            for plan in one.plans.values():
                totals.samples += int((plan.position >= 0).sum())
                totals.executed += executed_samples(plan, execution)

    def measure(round: int) -> list[tuple[dict[str, float], np.ndarray | None]]:
        nexts = [cohorts(seed, round) for seed in range(num_seeds)]
        cohort = jax.tree.map(lambda *leaves: np.stack(leaves), *nexts)
        counts = run_evaluate(program.floats, state, cohort, shared, data.partition)
        counts = jax.tree.map(np.asarray, jax.device_get(counts))
        out = []
        for seed in range(num_seeds):
            one = jax.tree.map(lambda leaf, s=seed: leaf[s], counts)
            values, accuracies = evaluate.metrics(one, test_count[seed], union[seed])
            for name, pair in metrics.items():
                total, count = (float(np.asarray(part)[seed]) for part in pair)
                values[name] = total / max(count, 1.0)
            values |= traffic.cumulative(
                totals.messages[seed], program.algorithm.messages
            )
            out.append((values, accuracies))
        return out

    def event(round: int, evaluated: Any, seconds: float, count: int) -> Event:
        compiling = run_rounds.seconds + run_evaluate.seconds
        return Event(round, state, totals, evaluated, compiling, seconds, count)

    if evaluate_start:
        yield event(start, measure(start), 0.0, 0)
    round = start
    while round < rounds:
        due = min((r for r in evaluate_at if r > round), default=rounds)
        count = min(per_call, length, due - round, stop_at(round) - round)
        plans = stack(round, count)
        begin, compiled_before = time.perf_counter(), run_rounds.seconds
        state, metrics, sent = run_rounds(
            program.floats,
            state,
            plans,
            jnp.asarray(count, jnp.int32),
            shared,
            data.partition,
        )
        totals.messages += np.asarray(sent, np.int64).sum(1)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - begin
        seconds -= run_rounds.seconds - compiled_before
        totals.seconds += seconds
        round += count
        if rounds_per_call is None:
            per_call = max(1, int(CHUNK_SECONDS * count / max(seconds, 1e-3)))
        evaluated = measure(round) if round in evaluate_at else None
        yield event(round, evaluated, seconds, count)
