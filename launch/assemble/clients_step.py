"""Step 6 of assembling: who takes part in rounds, and how long clients take."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from data import participation
from fedjax_pfl import levels, options, shapes, types
from fedjax_pfl import program as program_lib
from launch.assemble.given import Settings
from launch.assemble.task_step import Planned
from models import counts


def made(
    settings: Settings,
    planned: Planned,
    data: types.Data,
    algorithm: types.Algorithm,
    hparams: Any,
) -> participation.Participation | None:
    """Who takes part by the options; None = all clients, for all their steps.

    Raises:
        ValueError: one line: an option is of no form, or not for methods with peers.
    """
    config, num_clients = settings.config, planned.task.num_clients
    is_timed = bool(config.client_speed or config.round_seconds)
    if not (config.availability or config.interrupted or is_timed):
        return None
    for flag in "availability", "round_seconds":
        if getattr(config, flag) and algorithm.peers is not None:
            raise ValueError(
                f"--{flag}={options.text(getattr(config, flag))}: clients of "
                f"--algo={config.algo} pull from peers, which are always there; omit it"
            )
    chances = participation.availability(config.availability, num_clients)
    clock = _clock(settings, planned, data, algorithm, hparams) if is_timed else None
    return participation.Participation(chances, config.interrupted, clock)


def _clock(
    settings: Settings,
    planned: Planned,
    data: types.Data,
    algorithm: types.Algorithm,
    hparams: Any,
) -> participation.Clock:
    """The costs of each client at each level."""
    config, task, shape = settings.config, planned.task, planned.task.example_shape
    whole = np.array([counts.macs(one, shape) for one in task.client_models], float)
    has_levels = isinstance(hparams, levels.Levels)
    num_levels = task.num_levels
    if not has_levels:
        num_levels = max(len(model.stage_names) for model in task.client_models)
    macs = np.tile(whole[np.asarray(task.group_of_client)][:, None], num_levels)
    seeds = [config.seed + number for number in range(config.num_seeds)]
    fixed = config.partition_seed
    sent = np.zeros((2, len(seeds), task.num_clients, num_levels))
    by_bytes = num_levels > 1 and has_levels and not task.client_model.has_exits
    if config.round_seconds or by_bytes:
        make = settings.entry.make
        sent = _first_messages(make, hparams, planned, data, num_levels)
    if by_bytes:
        params = shapes.variables(task.client_model, shape).params
        macs *= sent[0, 0] / shapes.tree_bytes(params)
    elif has_levels and num_levels > 1:
        found = counts.levels(task.client_model, shape)[:num_levels]
        macs[:] = [max(one.macs, one.parameters) for one in found]
    return participation.Clock(
        speed=participation.speeds(
            *(config.client_speed, task.num_clients),
            [seed if fixed < 0 else fixed for seed in seeds],
        ),
        macs=macs,
        round_seconds=config.round_seconds or np.inf,
        num_bytes=sent.sum(0),
    )


def _first_messages(
    make: Callable[[Any, types.Task], types.Algorithm],
    hparams: Any,
    planned: Planned,
    data: types.Data,
    num_levels: int,
) -> np.ndarray:
    """f64[2, seeds, K, levels]: bytes down and up of a client in its first round.

    Only what a round's counts of messages depend on is computed, on zeros in the place
    of models and examples.
    """
    task = planned.task._replace(execution=types.Execution(), num_residents=0)
    method = make(hparams, task)
    planner = planned.planner(method, task.execution)
    ids, few = np.arange(task.num_clients), np.ones(task.num_clients, int)
    cohorts = [planner.members(0, 0, ids, few, spec) for spec in method.plans]
    cohort = cohorts[0] if cohorts else planner.drawn(0, 0)
    cohort = cohort.replace(
        plans={n: p for one in cohorts for n, p in one.plans.items()}
    )

    def zeros(leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return jnp.zeros(leaf.shape, leaf.dtype)

    def first(tables: types.Data, key: jax.Array) -> types.RoundState:
        return program_lib.first_state(method, hparams, task, tables, key)

    @jax.jit
    def sizes(level: jax.Array, partition: types.Partition) -> list[jax.Array]:
        empty = jax.tree.map(
            lambda x: zeros(jnp.asarray(x)), data.replace(partition=())
        )
        tables = empty.replace(partition=partition)
        state = jax.eval_shape(first, tables, jax.random.key(0))
        here = cohort.replace(level=level)
        sent = method.round(jax.tree.map(zeros, state), here, tables)[2]
        total = {"down": jnp.zeros(level.shape), "up": jnp.zeros(level.shape)}
        for kind in method.messages:
            count = jnp.asarray(sent[kind.name], jnp.float32)
            total[kind.direction] += count * kind.num_bytes
        return [total["down"], total["up"]]

    out = [
        [
            sizes(np.full(len(cohort.level), level, np.int32), partition)
            for level in range(1, num_levels + 1)
        ]
        for partition in _of_seeds(data.partition)
    ]
    return np.asarray(out, float).transpose(2, 0, 3, 1)


def _of_seeds(partition: types.Partition) -> Sequence[types.Partition]:
    count = len(jax.tree.leaves(partition)[0])
    return [jax.tree.map(lambda x, n=n: x[n], partition) for n in range(count)]
