"""Assembles a run from its settings: data, models and algorithm."""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import models
from data import dataset, partitions, plan
from data.partitions import cdkt, file
from fedjax_pfl import evaluate, execution, levels, rng, shapes, types
from fedjax_pfl import program as program_lib
from fedjax_pfl import teacher as teacher_lib
from fedjax_pfl.rows import slots
from launch.assemble import computed, fit, model_files
from launch.assemble.given import Settings, sha256
from launch.config import resolve, schema, sweep
from launch.machine import devices, memory, processes, residence
from models import counts, mixed

PartsWith = Callable[
    [types.Execution], tuple[types.Task, program_lib.Program, plan.Planner]
]


class Parts(NamedTuple):
    """What a run consists of.

    Attributes:
        settings: The settings, with the notes that assembling added.
        task, program, data, planner: What is computed.
        seeds: One seed for each variant of the data.
        hashes: The hashes of data, partitions and teacher.
        computed_sha256: The hash of what custom code computes.
        points: The points of a sweep, [{}] without one.
        target: The chip for which it is compiled without running, "" = it runs here.
        rows_in: Where the clients' rows are, see `residence.place`.
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
    parts_with: PartsWith | None
    trained_before: Sequence[Any]


def assemble(
    settings: Settings,
    *,
    level_of: Any = None,
    target: str = "",
) -> Parts:
    """Assembles the parts of a run from its resolved settings.

    Args:
        settings: The resolved settings.
        level_of: int[K], the largest level that each client holds, or a function as in
            `plan.Planner`, None = all stages.

        target: A chip for which the run is compiled and does not start, "" = none.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    entry, config, hparams, source, public, own_models, *_ = settings
    # jax cannot read programs for another machine back from its cache.
    devices.keep_compiled("off" if target else config.compile_cache)
    jax.config.update(
        "jax_default_matmul_precision", schema.PRECISIONS[config.precision]
    )
    shape, num_classes = source.image.shape[1:], source.num_classes
    if source.is_text and not entry.text:
        fit.refuse_need(config, "text", f"--dataset={config.dataset} is a text")

    def model_of(name: str) -> types.Model:
        own = own_models.get(name)
        if own is None:
            return models.make(name, num_classes, config.model_width)
        takes = source.takes
        kind = jax.numpy.float32 if takes == "numbers" else jax.numpy.int32
        example = jax.ShapeDtypeStruct((2, *shape), kind)
        return own(example)._replace(name=name, takes=takes)

    names = config.model, *config.client_model.split(",")
    by_name = {name: model_of(name) for name in dict.fromkeys(names)}
    mean, scale = normal = dataset.normalization(source.image, config.normalization)
    with_exits = [name for name, model in by_name.items() if model.has_exits]
    if with_exits and not entry.exits:
        line = f"--model={with_exits[0]} has an exit at every stage"
        fit.refuse_need(config, "exits", line)
    own_hashes: dict[str, str] = {}
    for name, model in by_name.items():
        flag = "model" if name == config.model else "client_model"
        if name in own_models:
            few = source.image[:4].copy()
            if source.is_text:
                few[:, 0] = num_classes  # a hidden word
            elif source.takes == "numbers":
                few = np.asarray((few.astype(np.float32) - mean) * scale, np.float32)
            own_hashes[name] = fit.check_own(
                flag, model, num_classes, config.model_width, few
            )
            by_name[name] = computed.distinct(model, own_hashes[name])
        else:
            fit.check_model(flag, model, shape, takes=source.takes)
    server_model, *client_models = (by_name[name] for name in names)
    client_models = tuple(client_models)
    known: list[model_files.Known] = []
    if config.init_from:
        if list(by_name) != [config.model]:
            raise ValueError(
                f"--init_from={config.init_from} holds one model: --model="
                f"{config.model} and --client_model={config.client_model} are several; "
                "name one"
            )
        of_classes = None
        if config.model not in own_models:
            of_classes = functools.partial(
                models.make, config.model, width=config.model_width
            )
        server_model, found = model_files.starting(
            *(config.init_from, server_model, shape, normal, source),
            of_classes,
        )
        client_models, known = (server_model,), [found]
    teacher, taught = None, ()
    is_taught = isinstance(hparams, teacher_lib.Taught) and bool(hparams.teacher)
    if is_taught:
        teacher, taught, found = model_files.teacher(
            hparams, num_classes, shape, normal, source
        )
        known.append(found)
    if config.precision == "bf16":
        server_model, *client_models = (
            mixed.in_bfloat16(model, rounds=source.is_text or model.name in own_models)
            for model in (server_model, *client_models)
        )
        client_models = tuple(client_models)
        teacher = teacher and mixed.in_bfloat16(teacher)
    chosen = vars(config) | vars(hparams)
    model_bytes = max(shapes.model_bytes(model, shape) for model in client_models)
    needed = memory.needs(chosen, num_rows=len(source.label), model_bytes=model_bytes)
    memory.refuse(needed, chosen, target)

    seeds = [config.seed + i for i in range(config.num_seeds)]
    identity = settings.identity
    data = _data(config, source, identity, seeds, public, normal)
    data, tests = data.replace(teacher=taught), data.partition.test.row
    if config.export_partition and settings.dropped_owners:
        line = f"--export_partition={config.export_partition}: a run on this file has "
        line += "all rows of the data, so that owners that are left out here count in "
        line += "the constants of its --normalization"
        source = source._replace(notes=(*source.notes, line))
    if line := partitions.note(config.partition, identity):
        source = source._replace(notes=(*source.notes, line))
    for one in known:
        lines = *one.notes, model_files.seen(one, source.image, tests)
        source = source._replace(notes=(*source.notes, *filter(None, lines)))
    num_rows = np.asarray(data.partition.train.count)
    group = np.arange(config.num_clients, dtype=np.int32) % len(client_models)
    num_levels, eligible = 1, None
    if isinstance(hparams, levels.Levels):
        num_levels = levels.top(hparams)
        if level_of is None:
            level_of, eligible = levels.assigned(hparams, config.num_clients)
    if level_of is None:
        num_stages = [len(model.stage_names) for model in client_models]
        level_of = np.array(num_stages, np.int32)[group]
    batch_size = shapes.capped(getattr(hparams, "batch_size", 1), int(num_rows.max()))

    most = getattr(hparams, "examples_per_round", 0)
    macs = 1
    if devices.chooses(config.emulate, target):
        macs = max(counts.macs(model, shape) for model in client_models)

    def execution_with(lanes: str, num_owners: int = 1) -> types.Execution:
        if lanes == "auto" and config.num_seeds > 1 and not config.sweep:
            # Only chunks can vmap seeds, which saves more than lanes do.
            lanes = "0"
        used = np.minimum(num_rows[0], most or num_rows.max())
        steps = _typical_steps(config, used, batch_size, num_owners)
        return devices.execution(
            config.client_chunk,
            num_owners if num_owners > 1 else config.devices,
            steps.shape[-1] * num_owners,
            model_bytes,
            batch_size,
            config.min_chunk,
            steps,
            num_levels,
            config.emulate,
            lanes,
            target,
            macs,
            num_owners > 1,
        )._replace(is_bucketed=config.bucketed)

    def planner_of(algorithm: types.Algorithm, how: types.Execution) -> plan.Planner:
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
        )

    task = types.Task(
        server_model=server_model,
        client_models=client_models,
        group_of_client=group,
        num_clients=config.num_clients,
        num_classes=num_classes,
        num_proxy=data.partition.proxy.shape[1],
        num_eligible=config.num_clients if eligible is None else int(eligible.sum()),
        num_examples=shapes.rounded_up(int(num_rows.max())),
        example_shape=shape,
        execution=execution_with(config.lanes),
        num_levels=num_levels,
        teacher=teacher,
    )
    points = sweep.of(config.sweep, hparams, tuple(vars(config)))
    fit.check_points(config.sweep, entry, hparams, points, task)
    # The compiled program takes the points' numbers as arguments.
    first = dataclasses.replace(hparams, **points[0])
    if task.execution.lanes:
        made = entry.make(first, task)
        planner = planner_of(made, task.execution)
        reason = fit.unfit_for_lanes(made, first, task, planner, data)
        if reason and config.lanes != "auto":
            raise ValueError(
                f"--lanes={config.lanes}: lanes take the steps of one training apart, "
                f"and with --algo={config.algo} {reason}; omit it"
            )
        if reason:
            task = task._replace(execution=execution_with("0"))
    how = task.execution
    if config.client_state == "device" and how.mesh and entry.shares_rows:
        make = functools.partial(entry.make, first)
        row_bytes = residence.bytes_to_share(make, first, task, data)
        copies = config.num_seeds * len(points) * how.num_devices
        if row_bytes * copies > devices.copied_row_bytes(config.emulate, target):
            how = execution_with(config.lanes if how.lanes else "0", how.num_devices)
            how = how._replace(shares_rows=True)
            layout = slots.Layout(config.num_clients, how.num_devices)
            task = task._replace(execution=how, num_residents=layout.num_rows)
    scoring = _scoring(config, data, how)
    if settings.measures:
        most = int(data.partition.test.count.max())
        scoring = scoring._replace(measures=settings.measures, own_rows=most)

    def built(task: types.Task) -> program_lib.Program:
        return program_lib.build(entry.make, first, task, scoring)

    program = built(task)
    fit.check_swept(config.sweep, entry, hparams, points, task, data, planner_of)
    own_hashes |= computed.of_others(settings, first, task, data, planner_of)
    if public is not None and program.algorithm.ships_proxy != "unlabelled":
        line = f"--public_set={config.public_set} has images without labels"
        fit.refuse_need(config, "public_images", line)
    planner = planner_of(program.algorithm, how)
    rows_in = residence.place(config)
    if rows_in is not None:
        task, program = residence.of_few(config, task, built, planner, data)
    digest = settings.source_hash.copy()
    if public is not None:
        digest = sha256(data.image, data.label)
    if config.init_from:
        digest.update(pathlib.Path(config.init_from).expanduser().read_bytes())
    if planner.graph is not None and planner.graph.table is not None:
        digest.update(planner.graph.table.data)
    split = sha256(*jax.tree.leaves(data.partition))
    of_teacher = ""
    if is_taught:
        path = pathlib.Path(hparams.teacher).expanduser()
        of_teacher = hashlib.sha256(path.read_bytes()).hexdigest()
    hashes = digest.hexdigest(), split.hexdigest(), of_teacher
    processes.check_equal(
        dict(zip(("dataset", "partition", "teacher"), hashes, strict=True)),
        "by the SHA-256 of its contents; give all processes the same data",
    )
    placed = execution.place_tables(data.replace(partition=None), how)

    def parts_with(
        how: types.Execution,
    ) -> tuple[types.Task, program_lib.Program, plan.Planner]:
        other = task._replace(execution=how)
        return other, built(other), planner_of(program.algorithm, how)

    is_given = config.lanes != "auto" if how.lanes else config.client_chunk
    return Parts(
        settings=settings._replace(source=source),
        task=task,
        program=program,
        data=placed.replace(partition=data.partition),
        planner=planner,
        seeds=seeds,
        hashes=hashes,
        computed_sha256=computed.sha256(own_hashes),
        points=points,
        target=target,
        rows_in=rows_in,
        parts_with=None if is_given or not how.vmaps_runs else parts_with,
        trained_before=[one.rows for one in known if one.rows is not None],
    )


def _partition_spec(config: schema.Config, seed: int) -> partitions.PartitionSpec:
    """The spec of the options; `seed` is for the generator of CDKT's users."""
    named = vars(config).keys() & set(partitions.PartitionSpec._fields)
    given = {name: getattr(config, name) for name in named}
    protocol = cdkt.PROTOCOLS.get(config.dataset, cdkt.Protocol())
    given["client_classes"] = resolve.client_classes(config)
    given["cdkt"] = protocol._replace(
        seed=seed,
        labels_per_user=config.classes_per_client,
        random_labels=config.partition == "cdkt_paper",
    )
    return partitions.PartitionSpec(**given)


def _data(
    config: schema.Config,
    source: dataset.Dataset,
    identity: file.Identity,
    seeds: Sequence[int],
    public: np.ndarray | None,
    normal: tuple[np.ndarray, np.ndarray],
) -> types.Data:
    """The data as numpy arrays, with a leading axis of seeds in the partition."""
    fixed = config.partition_seed
    own_seeds = [fixed if fixed >= 0 else seed for seed in seeds]
    splits = [
        partitions.split(source, _partition_spec(config, seed), seed)
        for seed in own_seeds
    ]
    if config.export_partition:
        flag = f"--export_partition={config.export_partition}"
        if len({one.train.row.tobytes() for one in splits}) > 1:
            raise ValueError(
                f"{flag}: --num_seeds={config.num_seeds} has as many partitions, a "
                "file holds one; give --num_seeds=1 or a --partition_seed"
            )
        try:
            processes.on_first(
                lambda: partitions.export(
                    splits[0], config.export_partition, identity, source.row
                )
            )
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"{flag} cannot be written: {reason}") from error
    image, label = source.image, source.label
    if public is not None:
        # Public rows follow those of the data set, and their labels are never read.
        row = np.arange(len(label), len(label) + len(public))
        splits = [split._replace(proxy=row) for split in splits]
        image = np.concatenate([image, public])
        label = np.concatenate([label, np.zeros(len(public), label.dtype)])
    stacked = partitions.stack(splits)
    if not (stacked.test.row >= 0).any(1).all():
        raise ValueError(
            f"--test_split={config.test_split} leaves no test row, as clients are too "
            "small; lower --num_clients or take pool"
        )
    if config.augment != "none" and image.ndim != 4:
        raise ValueError(
            f"--augment={config.augment} changes images, these examples have the shape "
            f"{list(image.shape[1:])}; omit it"
        )
    num_words = source.num_classes if source.is_text else 0
    return types.Data(
        *(image, label, *normal, stacked),
        augment=config.augment,
        num_words=num_words,
        masked_loss=config.masked_loss,
    )


def _typical_steps(
    config: schema.Config, num_rows: np.ndarray, batch_size: int, num_owners: int
) -> np.ndarray:
    """int[T, C]: steps of an epoch of the clients in a few cohorts.

    With several owners, int[T x owners, P] of the clients of each, padded with zeros.
    """
    gen = rng.generator(config.seed, "engine.cohort")
    steps = -(-num_rows // batch_size)
    size = config.clients_per_round
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


def _scoring(
    config: schema.Config, data: types.Data, how: types.Execution
) -> evaluate.Scoring:
    is_all = config.eval_clients == "all"
    num_scored = config.num_clients if is_all else config.clients_per_round
    sampled = config.eval_sample if config.eval_sample < config.num_clients else 0
    test, rows = data.partition.test, devices.evaluation_rows(how.platform)
    if data.num_words:
        # The logits of an exit for a batch are 64 MiB.
        rows = min(rows, max(1, 2**24 // (data.num_words * data.image.shape[1])))
    return evaluate.Scoring(
        batch_size=int(min(rows, test.row.shape[1])),
        own_batch_size=min(rows, shapes.rounded_up(int(test.count.max()))),
        num_scored=num_scored if config.c_gen else 0,
        scored=config.eval_clients,
        num_sampled=sampled,
        has_train=config.eval_train,
        positions=config.masked_loss,
    )
