"""Step 4 of assembling: chooses a round's devices and chunk from shapes."""

import functools
from typing import Any

import numpy as np

from data import deal
from fedjax_pfl import rng, shapes, types
from fedjax_pfl.rows import slots
from launch.assemble.given import Settings
from launch.assemble.task_step import Planned
from launch.config import schema
from launch.machine import devices, residence
from models import counts


def choose(
    settings: Settings,
    planned: Planned,
    data: types.Data,
    hparams: Any,
    num_points: int,
    target: str,
) -> types.Task:
    """Chooses the execution of the task's rounds, for `num_points` of a sweep.

    Raises ValueError if there are fewer devices than asked for.
    """
    config, entry, task = settings.config, settings.entry, planned.task
    how = _execution(config, hparams, planned, target)
    task = task._replace(execution=how)
    if config.client_state == "replicated" or not how.mesh or not entry.shares_rows:
        return task
    make = functools.partial(entry.make, hparams)
    row_bytes = residence.bytes_to_share(make, hparams, task, data, config)
    copies = config.num_seeds * num_points * how.num_devices
    if row_bytes * copies <= devices.copied_row_bytes(config.emulate, target):
        return task
    cohort = planned.planner(make(task), how).drawn(0, 0)
    residence.check_serving(make, config.algo, task, data, cohort)
    layout = slots.Layout(config.num_clients, how.num_devices)
    how = how._replace(shares_rows=True)
    return task._replace(execution=how, num_residents=layout.num_rows)


def _execution(
    config: schema.Config,
    hparams: Any,
    planned: Planned,
    target: str,
) -> types.Execution:
    """Chooses the mesh and the chunk, which is how many clients train together.

    A given chunk is taken. Otherwise it is one client on a CPU, or as many clients of a
    tiny model as make about 80 examples a step, and on an accelerator the cheapest
    chunk (`deal.choose_chunk`).
    """
    task, largest = planned.task, int(planned.num_rows.max())
    batch_size = shapes.capped(getattr(hparams, "batch_size", 1), largest)
    most = getattr(hparams, "examples_per_round", 0) or largest
    steps = -(-np.minimum(planned.num_rows[0], most) // batch_size)
    steps = _of_cohorts(config, steps)
    num_clients = steps.shape[-1]
    models, shape = task.client_models, task.example_shape
    model_bytes = max(shapes.model_bytes(one, shape) for one in models)
    is_small = model_bytes < devices.SMALL_MODEL_BYTES
    used = devices.chosen(
        config.devices,
        max(1, num_clients // (devices.SMALL_CLIENTS if is_small else 1)),
        config.emulate,
        target,
    )
    per_device, chunk = -(-num_clients // len(used)), config.client_chunk
    vmaps_runs = devices.chooses(config.emulate, target)
    if vmaps_runs and not chunk:
        macs = batch_size * max(counts.macs(one, shape) for one in models)
        chunk, _ = deal.choose_chunk(
            steps,
            step_macs=macs,
            min_chunk=config.min_chunk,
            devices=len(used),
            is_gpu=used[0].platform == "gpu",
        )
        chunk = min(chunk, -(-per_device // task.num_levels))
        chunk = max(chunk, config.min_chunk)
    if not chunk:
        chunk = _small_chunk(batch_size, per_device) if is_small else 1
    return types.Execution(
        chunk=min(chunk, per_device),
        mesh=devices.mesh(used, target),
        is_bucketed=config.bucketed,
        vmaps_runs=vmaps_runs,
        device=used[0] if target and len(used) == 1 else None,
        one_core=devices.usable_cores() == 1,
    )


def _small_chunk(batch_size: int, per_device: int) -> int:
    """The chunk of a tiny model on a CPU: about 80 examples a step, no padding rows."""
    wanted = max(1, round(80 / batch_size))
    divisors = [d for d in range(1, 2 * wanted + 1) if per_device % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def _of_cohorts(config: schema.Config, steps: np.ndarray) -> np.ndarray:
    """Takes the clients of a few cohorts out of int[K] steps: int[T, C]."""
    gen = rng.generator(config.seed, "engine.cohort")
    size = config.clients_per_round
    drawn = [gen.choice(len(steps), size, replace=False) for _ in range(16)]
    return steps[np.stack(drawn)]
