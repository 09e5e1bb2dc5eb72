"""Step 5 of assembling: what is compiled, and the hashes that identify the run."""

import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from data import plan
from fedjax_pfl import evaluate, scores, shapes, types
from fedjax_pfl import program as program_lib
from launch.assemble import computed, fit, models_step
from launch.assemble.given import Settings, sha256
from launch.assemble.task_step import Planned
from launch.config import sweep
from launch.machine import devices, processes, residence

PartsWith = Callable[
    [types.Execution], tuple[types.Task, program_lib.Program, plan.Planner]
]
WithRows = Callable[[int, types.Execution], program_lib.Program]


class Built(NamedTuple):
    """The program of a run.

    Attributes:
        task, program, planner: What is computed.
        rows_in: Where the clients' rows are, see `residence.place`.
        computed: Hashes of what custom code beside models computes, by the option.
        other: Builds the same for another execution, None = it is not to be changed.
        with_rows: The program for so many private rows, see `simulate.Simulation`.
    """

    task: types.Task
    program: program_lib.Program
    planner: plan.Planner
    rows_in: str | None
    computed: dict[str, str]
    other: PartsWith | None
    with_rows: WithRows


def built(
    settings: Settings,
    planned: Planned,
    task: types.Task,
    data: types.Data,
    hparams: Any,
    points: Sequence[sweep.Point],
) -> Built:
    """Builds the program of the task.

    Args:
        settings: The settings.
        planned: What plans the rounds.
        task: The task with the execution of its rounds.
        data: The data with the partitions of all seeds.
        hparams: The algorithm's options at the first point of a sweep.
        points: The points of a sweep.

    Raises:
        ValueError: one line: an option has no effect on the program, or clients' rows
            cannot be where `--client_state` puts them.
    """
    config, entry, how = settings.config, settings.entry, task.execution
    scoring = _scoring(settings, data, how)

    def build(task: types.Task) -> program_lib.Program:
        return program_lib.build(entry.make, hparams, task, scoring)

    program = build(task)
    about = hparams, points, task, data, planned.planner
    fit.check_swept(config.sweep, entry, *about)
    of_others = computed.of_others(settings, hparams, task, data, planned.planner)
    ships = program.algorithm.ships_proxy
    if settings.public is not None and ships != "unlabelled":
        line = f"--public_set={config.public_set} has images without labels"
        fit.refuse_need(config, "public_images", line)
    planner = planned.planner(program.algorithm, how)
    rows_in = residence.place(config)
    if rows_in is not None:
        about = task, build, planner, data
        task, program = residence.with_resident_rows(config, *about)

    def other(
        how: types.Execution,
    ) -> tuple[types.Task, program_lib.Program, plan.Planner]:
        changed = task._replace(execution=how)
        planner = planned.planner(program.algorithm, how)
        return changed, build(changed), planner

    def with_rows(num_rows: int, how: types.Execution) -> program_lib.Program:
        return build(task._replace(num_residents=num_rows, execution=how))

    is_given = config.lanes != "auto" if how.lanes else config.client_chunk
    changes = None if is_given or not how.vmaps_runs else other
    return Built(task, program, planner, rows_in, of_others, changes, with_rows)


def hashes(
    settings: Settings, data: types.Data, planner: plan.Planner
) -> tuple[str, str, str]:
    """The SHA-256 of the data and graph, of the partitions, and of the teacher.

    Raises:
        ValueError: one line: they differ between the processes of a run.
    """
    digest = settings.source_hash.copy()
    if settings.public is not None:
        digest = sha256(data.image, data.label)
    if init_from := settings.config.init_from:
        digest.update(pathlib.Path(init_from).expanduser().read_bytes())
    if planner.graph is not None and planner.graph.table is not None:
        digest.update(planner.graph.table.data)
    split, of_teacher = sha256(*jax.tree.leaves(data.partition)), ""
    if models_step.is_taught(settings):
        path = pathlib.Path(settings.hparams.teacher).expanduser()
        of_teacher = hashlib.sha256(path.read_bytes()).hexdigest()
    found = digest.hexdigest(), split.hexdigest(), of_teacher
    processes.check_equal(
        dict(zip(("dataset", "partition", "teacher"), found, strict=True)),
        "by the SHA-256 of its contents; give all processes the same data",
    )
    return found


def _scoring(
    settings: Settings, data: types.Data, how: types.Execution
) -> evaluate.Scoring:
    """What an evaluation computes, and in batches of how many rows."""
    config = settings.config
    is_all = config.eval_clients == "all"
    num_scored = config.num_clients if is_all else config.clients_per_round
    sampled = config.eval_sample if config.eval_sample < config.num_clients else 0
    test, rows = data.partition.test, devices.evaluation_rows(how.platform)
    largest = int(test.count.max())
    if data.num_words:
        # The logits of an exit for a batch are 64 MiB.
        rows = min(rows, max(1, 2**24 // (data.num_words * data.image.shape[1])))
    score: scores.Score = scores.Classes()
    if data.num_words:
        score = scores.Words(config.masked_loss)
    elif settings.measures:
        score = scores.Classes(settings.measures, largest)
    return evaluate.Scoring(
        batch_size=int(min(rows, test.row.shape[1])),
        own_batch_size=min(rows, shapes.rounded_up(largest)),
        num_scored=num_scored if config.c_gen else 0,
        scored=config.eval_clients,
        num_sampled=sampled,
        has_train=config.eval_train,
        score=score,
    )
