"""Assembles a run from its settings: models, data, task, execution, program."""

import dataclasses
import functools
import hashlib
import pathlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from data import dataset, participation, plan
from fedjax_pfl import evaluate, execution, local_training, scores, shapes, types
from fedjax_pfl import program as program_lib
from launch.assemble import (
    clients_step,
    computed,
    data_step,
    execution_step,
    fit,
    models_step,
    notes,
    task_step,
)
from launch.assemble.given import Settings, sha256
from launch.config import resolve, schema, sweep
from launch.machine import devices, memory, processes, residence

# The examples on devices, by what they hold and where, as long as a run has them
_EXAMPLES: weakref.WeakValueDictionary[Any, jax.Array] = weakref.WeakValueDictionary()


class Computation(NamedTuple):
    """The computation of a run: its task, its program and the planner of its rounds.

    Attributes:
        rows_in: Where clients' private rows are, see `residence.place`.
        with_rows: Builds the program for more private rows, see `simulate.Simulation`.
        parts_with: Builds task, program and planner for another execution, None = the
            chunk is fixed.
    """

    task: types.Task
    program: program_lib.Program
    planner: plan.Planner
    rows_in: str | None
    with_rows: Callable[[int, types.Execution], program_lib.Program]
    parts_with: Callable[[types.Execution], tuple] | None


class Parts(NamedTuple):
    """The parts of a run, with `settings` that include the notes of assembling.

    Attributes:
        data: The data with one partition for each of `seeds`.
        hashes: The hashes of data, partitions and teacher.
        computed_sha256: The hash of what custom code computes.
        points: The points of a sweep, [{}] without one.
        target: The chip for which the run is only compiled, "" = it runs here.
        trained_before: The rows on which each model from a file was trained, None =
            unknown.
    """

    settings: Settings
    made: Computation
    data: types.Data
    seeds: list[int]
    hashes: tuple[str, str, str]
    computed_sha256: str
    points: Sequence[sweep.Point]
    target: str
    trained_before: Sequence[Any]


def assemble(settings: Settings, *, target: str = "") -> Parts:
    """Assembles the parts of a run from its resolved settings.

    `target` is a chip for which the run is only compiled, "" = none.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    if jax.config.jax_enable_x64:
        raise ValueError(
            "jax_enable_x64 is on: rounds do not compute in float64, and with it "
            "random numbers differ and some methods fail; turn it off, by "
            "JAX_ENABLE_X64=0 or jax.config.update('jax_enable_x64', False)"
        )
    config, hparams, source = settings.config, settings.hparams, settings.source
    # jax cannot read programs for another machine back from its cache.
    devices.keep_compiled("off" if target else config.compile_cache)
    precision = schema.PRECISIONS[config.precision]
    jax.config.update("jax_default_matmul_precision", precision)
    seeds = [config.seed + i for i in range(config.num_seeds)]
    # Own validation rows change nothing but what is measured on them.
    others = source.image[: source.num_dealt]
    normal = dataset.normalization(others, config.normalization)
    found = models_step.make(settings, normal)
    _refuse_large(settings, found.clients, target)
    data, of_data = data_step.make(settings, seeds, normal, found)
    planned = task_step.make(settings, seeds, found, data)
    points = sweep.of(config.sweep, hparams, tuple(vars(config)))
    fit.check_points(config.sweep, settings.entry, hparams, points, planned.task)
    # The compiled program takes the points' numbers as arguments.
    first = dataclasses.replace(hparams, **points[0])
    task = execution_step.choose(settings, planned, data, first, len(points), target)
    made, of_others = _program(settings, planned, task, data, first, points)
    if made.program.algorithm.is_among_zeros:
        models_step.check_slices(settings, normal, found.server, task.execution)
    _check_choosing(config, made.program.algorithm, data.partition)
    hashes = _hashes(settings, data, made.planner)
    placed = _placed(data.replace(partition=None), task.execution, hashes[0])
    lines = notes.of_constants(config, others, normal)
    lines += notes.of_whole_numbers(config, others, settings.asked)
    algorithm = made.program.algorithm
    may_train = ~data.partition.is_unseen[0]
    given = (one[may_train] for one in (made.planner.chance, made.planner.in_time))
    lines += notes.of_absent(config, algorithm, *given)
    lines += notes.of_plans(config, algorithm.plans, planned.num_rows)
    counts = data.partition.adapting.count, data.partition.test.count > 0
    adapts = made.program.scoring.adapts
    lines += notes.of_adaptation(adapts, *map(np.asarray, counts))
    lines += notes.of_rows_of_nobody(config, made.program.algorithm, data.partition)
    lines += notes.of_unmeasured_clients(config, data.partition)
    every = (*source.notes, *found.notes, *of_data, *lines)
    source = source._replace(notes=every)
    return Parts(
        settings=settings._replace(source=source),
        made=made,
        data=placed.replace(partition=data.partition),
        seeds=seeds,
        hashes=hashes,
        computed_sha256=computed.sha256(found.hashes | of_others),
        points=points,
        target=target,
        trained_before=[one.rows for one in found.known],
    )


def can_choose(algorithm: types.Algorithm, partition: types.Partition) -> bool:
    """Whether validation rows measure a method, so that they can choose.

    Rows of no owner are measured with the server's models alone.
    """
    if not partition.has_val:
        return False
    val = partition.val
    has_rows = algorithm.server is not None and (val.row >= 0).any()
    return bool(has_rows or val.count.any())


def _check_choosing(
    config: schema.Config, algorithm: types.Algorithm, partition: types.Partition
) -> None:
    """Refuses (ValueError) to choose by validation rows that measure nothing."""
    flag = resolve.chooser(config)
    if not flag or can_choose(algorithm, partition):
        return
    if not partition.has_val or not (partition.val.row >= 0).any():
        raise ValueError(
            f"{flag}: no validation row is left, as all are of owners that are not "
            f"among the --num_clients={config.num_clients} clients; give rows of "
            "these, or --val_split=0.2 in their place"
        )
    raise ValueError(
        f"{flag}: --algo={config.algo} has no server's model to measure on validation "
        "rows without owners; give their owners with --partition=natural, or "
        "--val_split=0.2 in their place"
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


def _program(
    settings: Settings,
    planned: task_step.Planned,
    task: types.Task,
    data: types.Data,
    hparams: Any,
    points: Sequence[sweep.Point],
) -> tuple[Computation, dict[str, str]]:
    """Builds the computation of a run, and hashes of custom code other than models."""
    config, entry, how = settings.config, settings.entry, task.execution
    scoring = _scoring(settings, data, how)

    about = {"task": task, "data": data, "planner_of": planned.planner}
    about["adapts"] = scoring.adapts
    hashed = functools.partial(computed.of_algorithm, entry.make, **about)
    fit.check_optimizers(sweep.settings(config.sweep, hparams), task)
    of_others = computed.of_others(settings, hparams, task, hashed)
    parts = dict(of_others)
    if "algo" in parts:
        try:
            parts["algo"] = hashed(hparams, is_for_all_floats=True)
        except (
            jax.errors.ConcretizationTypeError,
            jax.errors.TracerArrayConversionError,
        ) as error:
            raise ValueError(
                f"--algo={config.algo} needs the value of a float option to build its "
                "round, which gets it as an argument: take options.is_off(...) or "
                "jnp.where in the place of `if`, or declare it by fedjax_pfl.option("
                "..., is_static=True)"
            ) from error
        except Exception:
            pass  # It fails again where its rounds are compiled.
    code = computed.sha256(parts)

    def build(task: types.Task) -> program_lib.Program:
        # Programs may be built again when jax has the precision of another run.
        with jax.default_matmul_precision(schema.PRECISIONS[config.precision]):
            return program_lib.build(entry.make, hparams, task, scoring, code)

    program = build(task)
    fit.check_swept(config.sweep, hparams, points, hashed, of_others.get("algo"))
    _check_options(settings, program.algorithm)
    if config.eval_moments != "before":
        hashed(hparams)  # a trace of the round refuses what cannot be measured alone
    who = clients_step.make(settings, planned, program.algorithm)
    planner = planned.planner(program.algorithm, how, who)
    if how.platform == "gpu" and who is None:
        fixed = _fixed_steps(program.algorithm.plans, planned.num_rows)
        task = task._replace(fixed_steps=fixed)
        program = build(task)
    rows_in = residence.place(config)
    if rows_in is not None:
        given = config, entry.shares_rows, task, build, planner, data
        task, program = residence.with_resident_rows(*given)

    def parts_with(
        how: types.Execution,
    ) -> tuple[types.Task, program_lib.Program, plan.Planner]:
        changed = task._replace(execution=how)
        return changed, build(changed), planned.planner(program.algorithm, how, who)

    def with_rows(num_rows: int, how: types.Execution) -> program_lib.Program:
        return build(task._replace(num_residents=num_rows, execution=how))

    changes = None if config.client_chunk or not how.vmaps_runs else parts_with
    made = Computation(task, program, planner, rows_in, with_rows, changes)
    return made, of_others


def _check_options(settings: Settings, algorithm: types.Algorithm) -> None:
    """Refuses (ValueError) what an algorithm cannot measure, or has no data for."""
    config = settings.config
    learns = settings.entry.public_images or algorithm.ships_proxy == "unlabelled"
    if settings.public is not None and not learns:
        line = f"--public_set={config.public_set} has images without labels"
        fit.refuse_need(config, "public_images", line)
    measured = {"", "loss", *(one.name for one in settings.measures)}
    if config.choose_by not in measured:
        wanted = ",".join(filter(None, [config.eval_metrics, config.choose_by]))
        raise ValueError(
            f"--choose_by={config.choose_by} is not measured; give "
            f"--eval_metrics={wanted}, or omit it"
        )
    if config.eval_moments != "before" and (algorithm.trained or not algorithm.plans):
        why = "measures both already" if algorithm.trained else "trains nothing"
        raise ValueError(
            f"--eval_moments={config.eval_moments}: --algo={config.algo} {why}; omit it"
        )
    if config.eval_moments == "after" and config.summary == "best":
        raise ValueError(
            "--summary=best chooses a round by the clients' models before their "
            "training, which --eval_moments=after leaves out; take both, or "
            "--summary=last"
        )
    if resolve.num_unseen(config) and algorithm.peers is not None:
        raise ValueError(
            f"{resolve.unseen(config)}: --algo={config.algo} has no server that gives "
            "a newcomer a model; omit it"
        )


def _fixed_steps(
    specs: Sequence[types.PlanSpec], num_rows: np.ndarray
) -> tuple[tuple[str, int], ...]:
    """(plan, steps) for each plan in which all clients take as many."""
    steps = {spec.name: spec.steps(num_rows) for spec in specs}
    return tuple((name, int(s.flat[0])) for name, s in steps.items() if not np.ptp(s))


def _scoring(
    settings: Settings, data: types.Data, how: types.Execution
) -> evaluate.Scoring:
    """Chooses what an evaluation computes, and its batch sizes."""
    config, num_clients = settings.config, settings.config.num_clients
    is_all = config.eval_clients == "all"
    num_scored = num_clients if is_all else config.clients_per_round
    measured = [one.test for one in data.partition.measured().values()]
    rows = 64 if how.platform == "cpu" else 256  # on a CPU as many as fit its caches
    largest = int(max(one.count.max() for one in measured))
    score: scores.Score = scores.Classes()
    if data.num_words:
        # The logits of an exit for a batch are 64 MiB.
        rows = min(rows, max(1, 2**24 // (data.num_words * data.image.shape[1])))
        score = scores.Words(config.masked_loss)
    elif settings.measures:
        score = scores.Classes(settings.measures, max(largest, 1))
    return evaluate.Scoring(
        batch_size=int(min(rows, measured[0].row.shape[1])),
        own_batch_size=min(rows, shapes.rounded_up(largest)),
        num_scored=num_scored if config.c_gen else 0,
        scored=config.eval_clients,
        num_sampled=config.eval_sample if config.eval_sample < num_clients else 0,
        has_train=config.eval_train,
        score=score,
        adapts=_adaptation(settings),
    )


def _adaptation(settings: Settings) -> types.PlanSpec | None:
    """The plan of `--fine_tune_epochs`: all rows, in local training's whole batches.

    Epochs of local training may have fewer (`--examples_per_round`), and may end in a
    short batch, as here without `--drop_last`.
    """
    epochs, hparams = settings.config.fine_tune_epochs, settings.hparams
    if not epochs:
        return None
    if not isinstance(hparams, local_training.LocalTraining):
        raise ValueError(
            f"--fine_tune_epochs={epochs}: the clients of "
            f"--algo={settings.config.algo} do not train; omit it"
        )
    drop_last = hparams.drop_last
    return types.PlanSpec("adapt", epochs, hparams.batch_size, drop_last=drop_last)


def _placed(data: types.Data, how: types.Execution, data_sha256: str) -> types.Data:
    """Tables of the host on their devices.

    The experiments of one process that have the same examples share theirs.
    """
    where, parts = execution.replicated(how), {}
    for name in ("image", "label"):
        table = getattr(data, name)
        key = name, data_sha256, table.shape, str(table.dtype), where
        parts[name] = _EXAMPLES.get(key)
        if parts[name] is None:
            parts[name] = execution.place_tables(table, how)
            if isinstance(parts[name], jax.Array) and jax.process_count() == 1:
                _EXAMPLES[key] = parts[name]
    rest = data.replace(image=None, label=None)
    return execution.place_tables(rest, how).replace(**parts)


def _hashes(
    settings: Settings, data: types.Data, planner: plan.Planner
) -> tuple[str, str, str]:
    """Hashes data and graph, partitions, and teacher's file, equal in all processes."""
    digest = settings.source_hash.copy()
    if settings.public is not None:
        digest = sha256(data.image, data.label)
    if init_from := settings.config.init_from:
        digest.update(pathlib.Path(init_from).expanduser().read_bytes())
    if planner.graph is not None and planner.graph.table is not None:
        digest.update(planner.graph.table.data)
    split, of_teacher = sha256(*jax.tree.leaves(data.partition)), ""
    for given in settings.config.availability, settings.config.client_speed:
        split.update(participation.file_bytes(given))
    if models_step.is_taught(settings):
        path = pathlib.Path(settings.hparams.teacher).expanduser()
        of_teacher = hashlib.sha256(path.read_bytes()).hexdigest()
    found = digest.hexdigest(), split.hexdigest(), of_teacher
    processes.check_equal(
        dict(zip(("dataset", "partition", "teacher"), found, strict=True)),
        "by the SHA-256 of its contents; give all processes the same data",
    )
    return found
