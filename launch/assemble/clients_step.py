"""Who takes part in a run's rounds by its options, and what its clock needs to know."""

import numpy as np

from data import participation
from fedjax_pfl import levels, options, shapes, types
from launch.assemble.given import Settings
from launch.assemble.task_step import Planned
from models import counts


def make(
    settings: Settings, planned: Planned, algorithm: types.Algorithm
) -> participation.Participation | None:
    """Who takes part; None = all clients, for all their steps and without a clock.

    Raises:
        ValueError: one line: an option has no such form, or there are peers.
    """
    config, num_clients = settings.config, planned.task.num_clients
    for flag in "availability", "round_seconds":
        if (value := getattr(config, flag)) and algorithm.peers is not None:
            raise ValueError(
                f"--{flag}={options.text(value)}: clients of --algo={config.algo} pull "
                "from peers, which are always there; omit it"
            )
    is_timed = config.client_speed or config.round_seconds
    if not (config.availability or config.interrupted or is_timed):
        return None
    chance = participation.chances(config.availability, num_clients)
    who = participation.Participation(chance, config.interrupted)
    if not is_timed:
        return who
    macs, num_bytes = _costs(settings, planned.task, algorithm)
    seeds, fixed = config.seed + np.arange(config.num_seeds), config.partition_seed
    drawn_by = np.where(fixed < 0, seeds, fixed).tolist()
    return who._replace(
        speed=participation.speeds(config.client_speed, num_clients, drawn_by),
        macs=macs,
        round_seconds=config.round_seconds or np.inf,
        num_bytes=num_bytes,
    )


def _costs(
    settings: Settings, task: types.Task, algorithm: types.Algorithm
) -> tuple[np.ndarray, np.ndarray]:
    """(MACs f64[K, levels] of a forward pass, bytes f64[levels] of messages).

    They are one message of each kind, or both ways what a client of the level holds.
    """
    shape, messages = task.example_shape, algorithm.messages
    whole = np.array([counts.macs(one, shape) for one in task.client_models], float)
    macs = whole[np.asarray(task.group_of_client)][:, None]
    hparams = settings.hparams
    if not isinstance(hparams, levels.Levels) or len(levels.mix(hparams)) == 1:
        # The level of a client is the number of its stages.
        most = max(len(model.stage_names) for model in task.client_models)
        total = sum(one.num_bytes for one in messages)
        return np.tile(macs, most), np.full(most, total)
    model, top = task.client_model, task.num_levels
    down = np.array([one.num_bytes for one in messages if one.direction == "down"])
    if model.has_exits:
        found = counts.levels(model, shape)[:top]
        by_level = [float(max(one.macs, one.parameters)) for one in found]
        return np.tile(by_level, (len(macs), 1)), 2 * np.cumsum(down)[:top]
    # A kind for each width, or as many of one kind as the level
    size = down if len(down) == top else down[0] * np.arange(1, top + 1)
    params = shapes.variables(model, shape).params
    return macs * size / shapes.tree_bytes(params), 2 * size
