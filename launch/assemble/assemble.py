"""Assembles the parts of a run from its settings, in five steps.

settings -> models -> data -> task -> execution -> program
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from data import dataset, plan
from fedjax_pfl import execution, shapes, types
from fedjax_pfl import program as program_lib
from launch.assemble import (
    computed,
    data_step,
    execution_step,
    fit,
    models_step,
    program_step,
    task_step,
)
from launch.assemble.given import Settings
from launch.config import schema, sweep
from launch.machine import devices, memory


class Parts(NamedTuple):
    """What a run consists of.

    Attributes:
        settings: The settings, with the notes that assembling added.
        task, program, data, planner: What is computed.
        seeds: One for each partition of the data.
        hashes: The hashes of data, partitions and teacher.
        computed_sha256: The hash of what custom code computes.
        points: The points of a sweep, [{}] without one.
        target: The chip for which it is compiled without running, "" = it runs here.
        rows_in: Where the clients' rows are, see `residence.place`.
        with_rows: The program for more private rows, see `simulate.Simulation`.
        parts_with: Other chunks or lanes, see `Run`.
        trained_before: The rows that models of files were trained on.
    """

    settings: Settings
    task: types.Task
    program: program_lib.Program
    data: types.Data
    planner: plan.Planner
    seeds: list[int]
    hashes: tuple[str, str, str]
    computed_sha256: str
    points: Sequence[sweep.Point]
    target: str
    rows_in: str | None
    with_rows: program_step.WithRows
    parts_with: program_step.PartsWith | None
    trained_before: Sequence[Any]


def assemble(
    settings: Settings,
    *,
    level_of: task_step.LevelOf | None = None,
    target: str = "",
) -> Parts:
    """Assembles the parts of a run from its resolved settings.

    Args:
        settings: The resolved settings.
        level_of: int[K], the largest level that each client holds, or a function as in
            `plan.Planner`, None = as the options say.
        target: A chip for which the run is compiled and does not start, "" = none.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    entry, config, source = settings.entry, settings.config, settings.source
    # jax cannot read programs for another machine back from its cache.
    devices.keep_compiled("off" if target else config.compile_cache)
    precision = schema.PRECISIONS[config.precision]
    jax.config.update("jax_default_matmul_precision", precision)
    seeds = [config.seed + i for i in range(config.num_seeds)]
    normal = dataset.normalization(source.image, config.normalization)
    found = models_step.made(settings, normal)
    _refuse_large(settings, found.clients, target)
    data, notes = data_step.made(settings, seeds, normal, found)
    planned = task_step.made(settings, seeds, found, data, level_of)
    points = sweep.of(config.sweep, settings.hparams, tuple(vars(config)))
    fit.check_points(config.sweep, entry, settings.hparams, points, planned.task)
    # The compiled program takes the points' numbers as arguments.
    first = dataclasses.replace(settings.hparams, **points[0])
    about = settings, planned, data, first
    task = execution_step.chosen(*about, len(points), target)
    made = program_step.built(settings, planned, task, data, first, points)
    hashes = program_step.hashes(settings, data, made.planner)
    placed = execution.place_tables(data.replace(partition=None), task.execution)
    source = source._replace(notes=(*source.notes, *notes))
    return Parts(
        settings=settings._replace(source=source),
        task=made.task,
        program=made.program,
        data=placed.replace(partition=data.partition),
        planner=made.planner,
        seeds=seeds,
        hashes=hashes,
        computed_sha256=computed.sha256(found.hashes | made.computed),
        points=points,
        target=target,
        rows_in=made.rows_in,
        with_rows=made.with_rows,
        parts_with=made.other,
        trained_before=[one.rows for one in found.known if one.rows is not None],
    )


def _refuse_large(
    settings: Settings, clients: Sequence[types.Model], target: str
) -> None:
    """Refuses a run that needs more memory than there is, before data are made."""
    source, shape = settings.source, settings.source.image.shape[1:]
    options = vars(settings.config) | vars(settings.hparams)
    model_bytes = max(shapes.model_bytes(model, shape) for model in clients)
    sizes = {"num_rows": len(source.label), "model_bytes": model_bytes}
    memory.refuse(memory.needs(options, **sizes), options, target)
