"""What is compiled: an algorithm's init, rounds and evaluation as jitted functions.

With evaluate the only place that jits. The rounds between two stops are one jitted loop
with donated state; its length is a traced number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl import evaluate, execution, options, traffic, types


class Program(NamedTuple):
    """Three jitted functions over stacked seeds (leading axis of state, partition).

    `init(floats, data, partition, seeds) -> state`;
    `rounds(floats, state, cohorts, num_rounds, data, partition)
        -> (state, metrics of the last round, counts int32[seeds, T, kinds])`;
    `evaluate(floats, state, cohort, data, partition) -> counts`.
    """

    init: Callable
    rounds: Callable
    evaluate: Callable
    floats: dict[str, float]
    algorithm: types.Algorithm


def _over_seeds(fn: Callable, backend: str) -> Callable:
    """One more leading axis: mapped on CPU (bitwise as alone), vmapped elsewhere."""
    if backend == "cpu":
        return lambda *args: jax.lax.map(lambda one: fn(*one), args)
    return jax.vmap(fn)


def build(
    make: Callable[[Any, types.Task], types.Algorithm],
    hparams: Any,
    task: types.Task,
    scoring: evaluate.Scoring,
) -> Program:
    """Builds the jitted functions of one algorithm.

    Args:
        make: `(hparams, task) -> Algorithm`; called again inside each trace, with the
            float hyperparameters as tracers.
        hparams: The algorithm's dataclass.
        task: What the algorithm may know.
        scoring: What to evaluate.
    """
    structure, floats = options.split_floats(hparams)
    backend = jax.default_backend()

    def algorithm(values: dict[str, Any]) -> types.Algorithm:
        return make(dataclasses.replace(structure, **values), task)

    def init(values, data, partition, seeds):
        def one(partition, seed):
            return algorithm(values).init(
                data.replace(partition=partition), jax.random.key(seed)
            )

        return _over_seeds(one, backend)(partition, seeds)

    def rounds(values, state, cohorts, num_rounds, data, partition):
        method = algorithm(values)

        def one(state, cohorts, partition):
            tables = data.replace(partition=partition)
            chunk = jax.tree.leaves(cohorts)[0].shape[0]

            def step(index, carry):
                state, _, counts = carry
                cohort = jax.tree.map(lambda leaf: leaf[index], cohorts)
                state, metrics, sent = method.round(state, cohort, tables)
                sent = traffic.counted(sent, method.messages, cohort.row_mask)
                return state, metrics, counts.at[index].set(sent)

            first = jax.tree.map(lambda leaf: leaf[0], cohorts)
            shapes = jax.eval_shape(method.round, state, first, tables)[1]
            metrics = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            counts = jnp.zeros((chunk, len(method.messages)), jnp.int32)
            return jax.lax.fori_loop(0, num_rounds, step, (state, metrics, counts))

        return _over_seeds(one, backend)(state, cohorts, partition)

    def count(values, state, cohort, data, partition):
        method = algorithm(values)

        def one(state, cohort, partition):
            return evaluate.count_correct(
                method,
                state,
                cohort,
                data.replace(partition=partition),
                scoring,
                task.execution,
            )

        return _over_seeds(one, backend)(state, cohort, partition)

    everywhere = execution.replicated(task.execution)
    return Program(
        init=jax.jit(init, out_shardings=everywhere),
        rounds=jax.jit(rounds, donate_argnums=1, out_shardings=everywhere),
        evaluate=jax.jit(count),
        floats=floats,
        algorithm=make(hparams, task),
    )
