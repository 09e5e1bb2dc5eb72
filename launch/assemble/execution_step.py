"""Step 4 of assembling: the devices of a round, and the clients that train together.

Everything here is chosen from shapes.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from data import plan
from fedjax_pfl import rng, shapes, types
from fedjax_pfl.rows import slots
from launch.assemble import fit
from launch.assemble.given import Settings
from launch.assemble.task_step import Planned
from launch.config import schema
from launch.machine import devices, residence
from models import counts


class Work(NamedTuple):
    """What decides how the clients of a round are computed.

    Attributes:
        config: The common options.
        num_rows: int[K], train examples of a round of each client.
        batch_size: Examples of a client's step.
        model_bytes: Bytes of the largest client model.
        macs: Multiply-accumulates of one example, where `devices.chooses` is true.
        num_levels: Levels at which clients compute; a chunk should be of one level.
        target: See `assemble`.
    """

    config: schema.Config
    num_rows: np.ndarray
    batch_size: int
    model_bytes: int
    macs: int
    num_levels: int
    target: str

    def steps(self, num_owners: int = 1) -> np.ndarray:
        """int[T, C]: steps of an epoch of the clients in a few cohorts.

        With several owners, int[T x owners, P] of the clients of each, padded with
        zeros.
        """
        gen = rng.generator(self.config.seed, "engine.cohort")
        steps = -(-self.num_rows // self.batch_size)
        size = self.config.clients_per_round
        drawn = [gen.choice(len(steps), size, replace=False) for _ in range(16)]
        if num_owners == 1:
            return steps[np.stack(drawn)]
        layout = slots.Layout(len(steps), num_owners)
        every = range(num_owners)
        rows = [steps[one[layout.device_of(one) == d]] for one in drawn for d in every]
        out = np.zeros((len(rows), max(map(len, rows))), steps.dtype)
        for line, row in zip(out, rows, strict=True):
            line[: len(row)] = row
        return out


def chosen(
    settings: Settings,
    planned: Planned,
    data: types.Data,
    hparams: Any,
    num_points: int,
    target: str,
) -> types.Task:
    """The task with the execution of its rounds.

    Args:
        settings: The settings.
        planned: The task without an execution.
        data: The data with the partitions of all seeds.
        hparams: The algorithm's options.
        num_points: Points of the sweep, 1 without one.
        target: See `assemble`.

    Raises:
        ValueError: one line: there are fewer devices, or the algorithm's rounds cannot
            run in lanes.
    """
    config, entry, task = settings.config, settings.entry, planned.task
    work = _work(settings, planned, target)
    how = _execution(work, _lanes(config))
    if how.lanes:
        in_lanes = task._replace(execution=how)
        made = entry.make(hparams, in_lanes)
        about = in_lanes, planned.planner(made, how), data
        reason = fit.unfit_for_lanes(made, hparams, *about)
        if reason and config.lanes != "auto":
            raise ValueError(
                f"--lanes={config.lanes}: lanes take the steps of one training apart, "
                f"and with --algo={config.algo} {reason}; omit it"
            )
        how = _execution(work, "0") if reason else how
    task = task._replace(execution=how)
    if config.client_state == "replicated" or not how.mesh or not entry.shares_rows:
        return task
    make = functools.partial(entry.make, hparams)
    row_bytes = residence.bytes_to_share(make, hparams, task, data, config)
    copies = config.num_seeds * num_points * how.num_devices
    if row_bytes * copies <= devices.copied_row_bytes(config.emulate, target):
        return task
    lanes, num_owners = config.lanes if how.lanes else "0", how.num_devices
    how = _execution(work, lanes, num_owners)._replace(shares_rows=True)
    layout = slots.Layout(config.num_clients, num_owners)
    return task._replace(execution=how, num_residents=layout.num_rows)


def _work(settings: Settings, planned: Planned, target: str) -> Work:
    """The work of the rounds of the first seed."""
    config, hparams, task = settings.config, settings.hparams, planned.task
    most = getattr(hparams, "examples_per_round", 0)
    largest, shape = int(planned.num_rows.max()), task.example_shape
    macs = 1
    if devices.chooses(config.emulate, target):
        macs = max(counts.macs(model, shape) for model in task.client_models)
    return Work(
        config=config,
        num_rows=np.minimum(planned.num_rows[0], most or largest),
        batch_size=shapes.capped(getattr(hparams, "batch_size", 1), largest),
        model_bytes=max(shapes.model_bytes(one, shape) for one in task.client_models),
        macs=macs,
        num_levels=task.num_levels,
        target=target,
    )


def _lanes(config: schema.Config) -> str:
    """`--lanes`, of which `auto` is none for several seeds.

    Only chunks can vmap seeds, which saves more than lanes do.
    """
    has_seeds = config.num_seeds > 1 and not config.sweep
    return "0" if config.lanes == "auto" and has_seeds else config.lanes


def _execution(work: Work, lanes: str, num_owners: int = 1) -> types.Execution:
    """Chooses the mesh and how many clients train together, in chunks or in lanes.

    A given chunk is taken. Otherwise it is on a CPU one client, or for tiny models as
    many as make about 80 examples a step, and on an accelerator the cheapest
    (`plan.choose_chunk`).

    Args:
        work: The work of a round.
        lanes: Lanes of each device, `0` = none, `auto` = on an accelerator the cheapest
            number if it costs less than chunks (`plan.choose_lanes`).
        num_owners: Devices that have the private rows of their own clients, 1 = every
            device has all rows.

    Raises:
        ValueError: there are fewer devices.
    """
    config, target = work.config, work.target
    steps = work.steps(num_owners)
    num_clients = steps.shape[-1] * num_owners
    is_small = work.model_bytes < devices.SMALL_MODEL_BYTES
    used = devices.chosen(
        num_owners if num_owners > 1 else config.devices,
        max(1, num_clients // (devices.SMALL_CLIENTS if is_small else 1)),
        config.emulate,
        target,
    )
    vmaps_runs = devices.chooses(config.emulate, target)
    per_device = -(-num_clients // len(used))
    dealt = {
        "step_macs": work.batch_size * work.macs,
        "devices": 1 if num_owners > 1 else len(used),
    }
    chunk = config.client_chunk
    if not chunk and vmaps_runs:
        chunk, _ = plan.choose_chunk(steps, min_chunk=config.min_chunk, **dealt)
        chunk = min(chunk, -(-per_device // work.num_levels))
    if not chunk:
        chunk = _small_chunk(work.batch_size, per_device) if is_small else 1
    width = 0 if lanes == "auto" else int(lanes)
    if lanes == "auto" and vmaps_runs and work.num_levels == 1:
        width = plan.choose_lanes(steps, **dealt)
    return types.Execution(
        chunk=1 if width else min(chunk, per_device),
        mesh=devices.mesh(used, target),
        is_bucketed=config.bucketed,
        vmaps_runs=vmaps_runs,
        lanes=min(width, per_device),
        device=used[0] if target and len(used) == 1 else None,
    )


def _small_chunk(batch_size: int, per_device: int) -> int:
    """The chunk of a tiny model on a CPU, about 80 examples a step.

    It divides the clients of a device, so that there are no padding rows.
    """
    wanted = max(1, round(80 / batch_size))
    divisors = [d for d in range(1, 2 * wanted + 1) if per_device % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
