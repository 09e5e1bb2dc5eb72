"""Step 3 of assembling: the task, and the planner of its rounds."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from data import participation, plan
from fedjax_pfl import levels, options, shapes, types
from launch.assemble.given import Settings
from launch.assemble.models_step import Models
from launch.config import resolve


class Planned(NamedTuple):
    """A task before its execution is chosen, and what plans its rounds.

    Attributes:
        task: The task, computed one client at a time on one device.
        num_rows: int[S, K], train examples of each client.
        planner: Makes the planner of an algorithm's rounds in an execution, with `who`
            as in `plan.Planner`.
    """

    task: types.Task
    num_rows: np.ndarray
    planner: Callable[..., plan.Planner]


def make(
    settings: Settings,
    seeds: Sequence[int],
    found: Models,
    data: types.Data,
) -> Planned:
    """Makes the task of models and data."""
    config, hparams = settings.config, settings.hparams
    num_rows = np.asarray(data.partition.train.count)
    group = np.arange(config.num_clients, dtype=np.int32) % len(found.clients)
    num_stages = [len(model.stage_names) for model in found.clients]
    level_of, num_levels = np.array(num_stages, np.int32)[group], 1
    eligible = ~data.partition.is_unseen
    if isinstance(hparams, levels.Levels):
        num_levels = levels.top(hparams)
        level_of, able = levels.assigned(hparams, config.num_clients)
        eligible &= True if able is None else able
        if resolve.num_unseen(config) and hparams.is_nested and not callable(level_of):
            _check_levels(settings, num_levels, level_of, seeds, eligible)
    task = types.Task(
        server_model=found.server,
        client_models=found.clients,
        group_of_client=group,
        num_clients=config.num_clients,
        num_classes=settings.source.num_classes,
        num_proxy=data.partition.proxy.shape[1],
        num_eligible=int(eligible[0].sum()),
        num_examples=shapes.rounded_up(int(data.partition.adapting.count.max())),
        example_shape=settings.source.image.shape[1:],
        num_levels=num_levels,
        teacher=found.teacher,
        tests_trained=config.eval_moments != "before",
        may_stop=bool(config.interrupted or config.round_seconds),
    )

    def planner(
        algorithm: types.Algorithm,
        how: types.Execution,
        who: participation.Participation | None = None,
    ) -> plan.Planner:
        return plan.Planner(
            seeds=seeds,
            num_rows=num_rows,
            level_of=level_of,
            client_group=group,
            clients_per_round=config.clients_per_round,
            specs=algorithm.plans,
            execution=how,
            eligible=eligible,
            peers=algorithm.peers,
            who=who,
            most_rows=int(data.partition.adapting.count.max()),
        )

    return Planned(task, num_rows, planner)


def _check_levels(
    settings: Settings,
    top: int,
    level: np.ndarray,
    seeds: Sequence[int],
    eligible: np.ndarray,
) -> None:
    """Refuses (ValueError) a seed in which all that a level needs are unseen.

    `level` int[K] is that of each client, and `eligible` bool[seeds, K] who may train.
    """
    option = settings.hparams.taught_by
    teaches = option and not options.is_off(getattr(settings.hparams, option))
    for seed, may_train in zip(seeds, eligible, strict=True):
        has, reason = np.unique(level[may_train]), ""
        given = f"{resolve.unseen(settings.config)}: with seed {seed}"
        if has[-1] < top:
            reason = (
                f"level {top} are unseen, and no client trains its part; give fewer, "
                f"another --partition_seed, or --max_level={has[-1]}"
            )
        elif (missing := levels.between(has)) and teaches:
            reason = f"level {missing} are unseen, of which the level below would "
            reason += "learn; give fewer, or another --partition_seed, or omit "
            reason += f"--{option}"
        if reason:
            raise ValueError(f"{given} all clients of {reason}")
