"""From a configuration to an experiment: data, models and algorithm put together."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import algorithms
import models
from data import dataset, loaders, partitions, plan
from data.partitions import cdkt
from fedjax_pfl import evaluate, execution, lanes, levels, rng, shapes, types
from fedjax_pfl import program as program_lib
from launch import compare as compare_lib
from launch import config as config_lib
from launch import (
    devices,
    flags,
    limits,
    model_files,
    processes,
    settings,
    summaries,
    sweep,
    workdir,
)
from launch.experiment import Experiment
from models import own, stages


def check_fit(flag: str, model: types.Model, shape: tuple[int, ...]) -> None:
    """Refuses a model of the registry that cannot take the examples.

    Args:
        flag: What names it, for the error.
        model: Of any number of classes.
        shape: Of one example.

    Raises:
        ValueError: it does not fit.
    """
    try:
        shapes.variables(model, shape)
    except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        # Of others only jax and flax understand the words.
        cause, cure = "", "take another model, for instance mlp"
        if isinstance(error, stages.UnfitError):
            cause = f" ({str(error).splitlines()[0]})"
            if len(shape) == 3:
                cure = "change --image_size, or take another model"
        raise ValueError(
            f"--{flag}={model.name} does not fit examples of shape {list(shape)}"
            f"{cause}; {cure}"
        ) from error


def _check_own(
    flag: str,
    model: types.Model,
    num_classes: int,
    width: float,
    examples: np.ndarray,
) -> None:
    """Refuses a model of a user's own modules that gives no logits of all classes.

    `examples` are a few of the data set's, normalised.

    Raises:
        ValueError: one line: it does not take the examples, or gives something else.
    """
    shape = examples.shape[1:]
    if width != 1:
        raise ValueError(
            f"--model_width={width:g} has no effect on a model of your own; leave it "
            "away"
        )
    try:
        variables = shapes.variables(model, shape)
        example = jax.ShapeDtypeStruct((2, *shape), np.float32)
        logits, _ = jax.eval_shape(model.forward, *variables, example)
        found = tuple(logits.shape), logits.dtype
        train = functools.partial(model.forward, train=True)
        key = jax.eval_shape(lambda: jax.random.key(0))
        _, moved = jax.eval_shape(train, *variables, example, key=key)
        if jax.tree.structure(moved) != jax.tree.structure(variables.stats):
            raise ValueError("its collections grow in train mode; sow nothing")
    except Exception as error:  # whatever a module of a user's raises
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{flag}: {model.name} cannot take examples f32[2, "
            f"{', '.join(map(str, shape))}] ({reason[0][:200]}); change its modules"
        ) from error
    if found != ((2, num_classes), np.float32):
        raise ValueError(
            f"{flag}: {model.name} gives {found[1]}{list(found[0])} for 2 examples, "
            f"expected logits float32[2, {num_classes}], one for each class; change "
            "its last module"
        )
    reason = own.depends_on_neighbours(model, examples)
    if reason:
        raise ValueError(
            f"{flag}: {model.name} {reason}; a module that stays in train mode does "
            "that: name `train`, `deterministic` or `use_running_average` in its "
            "__call__, or take linen modules"
        )


def _partition_spec(config: config_lib.Config, seed: int) -> partitions.PartitionSpec:
    protocol = cdkt.PROTOCOLS.get(config.dataset, cdkt.Protocol())
    return partitions.PartitionSpec(
        partition=config.partition,
        num_clients=config.num_clients,
        partition_alpha=config.partition_alpha,
        partition_draw=config.partition_draw,
        classes_per_client=config.classes_per_client,
        client_classes=settings.client_classes(config),
        min_examples=config.min_examples,
        examples_per_client=config.examples_per_client,
        test_split=config.test_split,
        proxy_fraction=config.proxy_fraction,
        cdkt=protocol._replace(
            seed=seed,
            labels_per_user=config.classes_per_client,
            random_labels=config.partition == "cdkt_paper",
        ),
    )


def experiment(**given: Any) -> Experiment:
    """Builds an experiment from option names and values, as the command line does.

    `experiment(algo="fedavg", rounds=5).run()`. Names are those of the flags; None
    means the default. Four of them may be more than names:

    * `algo`: an algorithm of your own, a module or any object with a dataclass
      `HParams` and a function `make`;
    * `dataset`: arrays `(x, y)` or `(x, y, client)`, as `loaders.from_arrays` takes
      them;
    * `model`, `client_model`: a linen module (one stage), or a list of modules (its
      stages, for methods that treat layers differently);
    * `sweep`: `{"client_lr": [0.01, 0.1]}`, values of the algorithm's numbers: a run
      for every point, all in one program. Nothing here chooses the best of them: that
      takes rows of validation, which there are not yet.

    Returns:
        An `Experiment`: `run()`, `to_frame()`, `plot()`, `predict(client_id, images)`.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    given = {name: value for name, value in given.items() if value is not None}
    devices.begin(given.get("distributed", ""))
    own_sha256 = _own_sha256(given)
    given, source, own_models = _named(given)
    check_alike(given | {"own_sha256": own_sha256})
    config, hparams = settings.configure(given)
    if source is None:
        source = loaders.load(config.dataset, config.data_dir)
    if config.rotate_classes > 1:
        source = dataset.rotated(source, config.rotate_classes)
    examples = hashlib.sha256(np.ascontiguousarray(source.image).data)
    examples.update(np.ascontiguousarray(source.label).data)
    config = settings.resolve(config, source, given)
    settings.check(config, own_models)
    limits.check_images(vars(config), source.image)
    source = dataset.fitted(source, config.image_size, config.image_channels)
    if config.rotate_classes > 1 and config.partition in ("cdkt", "cdkt_paper"):
        raise ValueError(
            f"--rotate_classes={config.rotate_classes}: --partition={config.partition} "
            "gives users of the data's own classes; take another partition"
        )
    public = None
    if config.public_set != "none":
        public = _public_images(config, source)
    return assemble(
        config,
        hparams,
        source,
        public=public,
        algo=given.get("algo"),
        own_models=own_models,
        own_sha256=own_sha256,
        examples_sha256=examples.hexdigest(),
    )


def compare(
    algos: Sequence[Any] | Mapping[str, Mapping[str, Any]],
    *,
    seeds: int | None = None,
    run: bool = True,
    progress: bool = True,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> compare_lib.Comparison:
    """Runs several algorithms on the same clients: `compare(["fedavg", "cdkt"])`.

    An option that only some of them have reaches those. Without a `preset` all take
    that of the first algorithm that has a paper's. An interrupt ends it with what is
    done; `run()` of what it returned goes on.

    Args:
        algos: Names, or algorithms of your own; or each run's options by a name:
            `{"weak": {"algo": "fedprox", "proximal_weight": 0.01}, "strong": ...}`.
        seeds: `--num_seeds`, 1 by default; give one of the two names.
        run: Whether to run them now.
        progress: Whether to show how far it is.
        on_record: Called with every record, which has the name under `algo`.
        **options: As `experiment` takes them; a `workdir` gets a folder for each.

    Returns:
        Experiments by name, with `to_frame()`, `summary()`, `plot()` and `run()`.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    if seeds is not None and "num_seeds" in options:
        raise ValueError(
            f"compare: seeds={seeds} and num_seeds={options['num_seeds']} are two "
            "names of one option; give one of them"
        )
    if seeds is not None:
        options["num_seeds"] = seeds
    made = compare_lib.build(experiment, algos, options)
    if run:
        try:
            made.run(progress=progress, on_record=on_record)
        except KeyboardInterrupt as stopped:
            processes.say(f"{stopped}; of a comparison too", flush=True)
    return made


def load(path: Any, **given: Any) -> Experiment:
    """Opens the folder of a run, finished or stopped, as it stands there.

    `load("runs/mine", rounds=200).run()` goes on from its last checkpoint.

    Args:
        path: The folder, as `--workdir` named it.
        **given: Options that replace the run's own, such as a larger `rounds`; and what
            a folder does not hold: `dataset`, `model` or `algo` of your own.

    Raises:
        ValueError: one line: there is no run, or it is of other data or options.
    """
    devices.begin(given.get("distributed") or "")
    processes.meet("load")
    told_by = pathlib.Path(path) / workdir.RUN_FLAGS
    told = processes.on_first(lambda: _told(told_by))
    algo = given.get("algo", told["algo"])
    if isinstance(algo, str) and algo not in algorithms.ALGORITHMS:
        raise ValueError(
            f"{path}: --algo={algo} was an algorithm of your own; give it: algo=..."
        )
    options = {}
    for name, kind in settings.option_types(algo).items():
        try:
            if name in told:
                text = told[name]
                options[name] = text == "true" if kind is bool else kind(text)
        except ValueError as error:
            raise ValueError(
                f"{told_by}: --{name}={text} is no {kind.__name__}; the file is damaged"
            ) from error
    if options.get("client_model") == options.get("model"):
        # The default, also of another model that is given.
        options.pop("client_model", None)
    for name in ("model", "client_model"):
        if options.get(name, "").startswith("own_") and name not in given:
            raise ValueError(
                f"{path}: --{name}={options[name]} was a module of your own; give it: "
                f"{name}=..."
            )
    # Of ways to train clients together the one that is given.
    ways = {"lanes"}, {"client_chunk", "min_chunk"}
    for mine, others in (ways, ways[::-1]):
        if mine & given.keys():
            options = {k: v for k, v in options.items() if k not in others}
    given = given | {"algo": algo, "workdir": str(path), "resume": True}
    made = experiment(**options | given)
    workdir.Workdir(made).reopen()
    return made


def _told(path: pathlib.Path) -> dict[str, str]:
    """The flags in a run's folder.

    Raises:
        ValueError: there is no run, or its file is damaged.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} holds no run: there is no {path.name} in it")
    return flags.read(path)


# Of one process: where it is, and what it has on its own disk.
_OF_ONE_PROCESS = ("distributed", "data_dir", "compile_cache", "workdir")


def check_alike(given: Mapping[str, Any]) -> None:
    """Refuses processes of one run that were given different options.

    Raises:
        ValueError: one line.
    """
    # The processes that there are, without which of them this one is.
    together = (given.get("distributed") or "").rpartition(",")[0]
    has_folder = "given" if given.get("workdir") else "unset"
    named = {"distributed": together, "workdir": has_folder} | {
        name: value if isinstance(value, (str, int, float)) else type(value).__name__
        for name, value in given.items()
        if name not in _OF_ONE_PROCESS
    }
    processes.check_equal(named, "give all processes the same options")


def _own_sha256(given: Mapping[str, Any]) -> str:
    """Of the source of modules and of an algorithm; "" if there are none."""
    texts = {
        name: own.fingerprint(given[name])
        for name in ("model", "client_model")
        if not isinstance(given.get(name, ""), str)
    }
    if not isinstance(given.get("algo", ""), str):
        texts["algo"] = own.source(getattr(given["algo"], "make", given["algo"]))
    return hashlib.sha256(repr(texts).encode()).hexdigest() if texts else ""


def _named(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], dataset.Dataset | None, dict[str, types.Model]]:
    """Options with a name for each data set and model, and what these names mean."""
    given, source, own_models = dict(given), None, {}
    if "sweep" in given:
        given["sweep"] = sweep.text(given["sweep"])
    if "lanes" in given:
        given["lanes"] = str(given["lanes"])
    arrays = given.get("dataset", "")
    if not isinstance(arrays, str):
        if not isinstance(arrays, (tuple, list)) or len(arrays) not in (2, 3):
            raise ValueError(
                "dataset: expected a name, or arrays (x, y) or (x, y, client), got a "
                f"{type(arrays).__name__}"
            )
        source = loaders.from_arrays(*arrays)
        given["dataset"] = loaders.ARRAYS
    for flag in ("model", "client_model"):
        modules = given.get(flag, "")
        if not isinstance(modules, str):
            made = own.chain(modules)
            if own_models.get(made.name, made) is not made:
                made = made._replace(name=f"{made.name}_2")
            own_models[made.name] = made
            given[flag] = made.name
    return given, source, own_models


def _public_images(config: config_lib.Config, source: dataset.Dataset) -> np.ndarray:
    """Train images of `--public_set`, of the shape and type of the data set's."""
    if config.proxy_fraction:
        raise ValueError(
            f"--public_set={config.public_set} and --proxy_fraction="
            f"{config.proxy_fraction:g} both name shared images; give one of them"
        )
    if config.public_set.removesuffix("_5k") == config.dataset.removesuffix("_5k"):
        raise ValueError(
            f"--public_set={config.public_set} holds images of the clients' own "
            f"--dataset={config.dataset}; take another, or set a share aside with "
            "--proxy_fraction"
        )
    public = loaders.load(config.public_set, config.data_dir, flag="public_set")
    public = dataset.fitted(public, config.image_size, config.image_channels)
    image = public.image[: public.num_train]
    if image.shape[1:] != source.image.shape[1:] or image.dtype != source.image.dtype:
        raise ValueError(
            f"--public_set={config.public_set} has {image.dtype} images of shape "
            f"{list(image.shape[1:])}, --dataset={config.dataset} "
            f"{source.image.dtype} of {list(source.image.shape[1:])}; they must agree"
        )
    return image


def assemble(
    config: config_lib.Config,
    hparams: Any,
    source: dataset.Dataset,
    *,
    level_of: Any = None,
    eligible: np.ndarray | None = None,
    public: np.ndarray | None = None,
    algo: Any = None,
    own_models: Mapping[str, types.Model] | None = None,
    own_sha256: str = "",
    examples_sha256: str = "",
) -> Experiment:
    """Puts data, models and algorithm of a resolved configuration together.

    Args:
        config: Every field set.
        hparams: The algorithm's options.
        source: The data set.
        level_of: int[K], the largest level that each client holds, or a function as
            `plan.Planner` takes it; None = all stages.
        eligible: bool[K], clients that may be drawn; None = everybody.
        public: Images that all clients share without labels, or None.
        algo: An algorithm that is not in the registry; None or a name = `config.algo`.
        own_models: Models that are not in the registry, by name.
        own_sha256: Of what a user wrote: an edited model is another run.
        examples_sha256: Of the data set before its images were fitted.
    """
    devices.keep_compiled(config.compile_cache)
    jax.config.update(
        "jax_default_matmul_precision", devices.PRECISIONS[config.precision]
    )
    entry = settings.algorithm(config.algo if algo is None else algo)
    shape, num_classes = source.image.shape[1:], source.num_classes
    own_models = own_models or {}

    def model_of(name: str) -> types.Model:
        width = config.model_width
        return own_models.get(name) or models.make(name, num_classes, width)

    server_model = model_of(config.model)
    client_models = tuple(map(model_of, config.client_model.split(",")))
    flagged = [
        ("model", server_model),
        *(("client_model", model) for model in client_models),
    ]
    normal = dataset.normalization(source.image, config.normalization)
    with_exits = [model.name for _, model in flagged if model.has_exits]
    if with_exits and not getattr(entry, "exits", False):
        raise ValueError(
            f"--model={with_exits[0]} has an exit at every stage: --algo="
            f"{config.algo} has no use for them; take another model, or {_who('exits')}"
        )
    checked: set[str] = set()
    for flag, model in flagged:
        if model.name in checked:
            continue
        checked.add(model.name)
        if model.name in own_models:
            mean, scale = normal
            few = source.image[:4].astype(np.float32)
            few = np.asarray((few - mean) * scale, np.float32)
            _check_own(flag, model, num_classes, config.model_width, few)
        else:
            check_fit(flag, model, shape)
    if config.init_from:
        server_model, client_models = _started(
            config, server_model, client_models, shape, normal
        )
    chosen = vars(config) | vars(hparams)
    model_bytes = max(shapes.model_bytes(model, shape) for model in client_models)
    limits.check(chosen, source.image, model_bytes)

    seeds = [config.seed + i for i in range(config.num_seeds)]
    data = _data(config, source, seeds, public, normal)
    num_rows = np.asarray(data.partition.train.count)
    group = np.arange(config.num_clients, dtype=np.int32) % len(client_models)
    num_levels = 1
    if isinstance(hparams, levels.Levels):
        num_levels = levels.top(hparams)
        if level_of is None:
            level_of, eligible = levels.assigned(hparams, config.num_clients)
    if level_of is None:
        num_stages = [len(model.stage_names) for model in client_models]
        level_of = np.array(num_stages, np.int32)[group]
    batch_size = shapes.capped(getattr(hparams, "batch_size", 1), int(num_rows.max()))

    def execution_with(lanes: str) -> types.Execution:
        if lanes == "auto" and config.num_seeds > 1 and not config.sweep:
            # Seeds are vmapped in chunks alone, which is worth more.
            lanes = "0"
        return devices.execution(
            config.client_chunk,
            config.devices,
            config.clients_per_round,
            model_bytes,
            batch_size,
            config.min_chunk,
            _typical_steps(config, num_rows[0], batch_size),
            num_levels,
            config.emulate,
            lanes,
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
    )
    if len(client_models) > 1 and not getattr(entry, "several_models", False):
        raise ValueError(
            f"--client_model={config.client_model}: --algo={config.algo} gives all "
            f"clients one architecture; name one, or take {_who('several_models')}"
        )
    points = sweep.of(config.sweep, hparams, tuple(vars(config)))
    _check_points(config.sweep, entry, hparams, points, task)
    # What is compiled has the points' numbers as arguments.
    first = dataclasses.replace(hparams, **points[0])
    if task.execution.lanes:
        made = entry.make(first, task)
        reason = _unfit_for_lanes(made, planner_of(made, task.execution), data)
        if reason and config.lanes != "auto":
            raise ValueError(
                f"--lanes={config.lanes}: lanes take the steps of one training apart, "
                f"and with --algo={config.algo} {reason}; leave it away"
            )
        if reason:
            task = task._replace(execution=execution_with("0"))
    how = task.execution
    program = program_lib.build(entry.make, first, task, _scoring(config, data))
    if public is not None and program.algorithm.ships_proxy != "unlabelled":
        raise ValueError(
            f"--public_set={config.public_set}: --algo={config.algo} has no use for "
            f"images without labels; leave it away, or take {_who('public_images')}"
        )
    planner = planner_of(program.algorithm, how)
    digest = hashlib.sha256(np.ascontiguousarray(data.image).data)
    digest.update(np.ascontiguousarray(data.label).data)
    if config.init_from:
        digest.update(pathlib.Path(config.init_from).expanduser().read_bytes())
    if planner.graph is not None and planner.graph.table is not None:
        digest.update(planner.graph.table.data)
    split = hashlib.sha256()
    for leaf in jax.tree.leaves(data.partition):
        split.update(np.ascontiguousarray(leaf).data)
    processes.check_equal(
        {"dataset": digest.hexdigest(), "partition": split.hexdigest()},
        "by the SHA-256 of what it holds; give all processes the same data",
    )
    made = Experiment(
        data_sha256=digest.hexdigest(),
        split_sha256=split.hexdigest(),
        own_sha256=own_sha256,
        examples_sha256=examples_sha256,
        config=config,
        hparams=hparams,
        task=task,
        program=program,
        data=execution.place(data, execution.replicated(how)),
        planner=planner,
        seeds=seeds,
        window=summaries.window(config.summary, config.rounds),
        points=points,
    )
    limits.check_state(chosen, made.saved_template())
    return made


def _unfit_for_lanes(
    algorithm: types.Algorithm, planner: plan.Planner, data: types.Data
) -> str:
    """Why an algorithm's rounds cannot run in lanes, "" if they can."""
    if not algorithm.plans:
        return "nobody trains"
    tables = data.replace(partition=jax.tree.map(lambda x: x[0], data.partition))
    try:
        state = jax.eval_shape(algorithm.init, tables, jax.random.key(0))
        jax.eval_shape(algorithm.round, state, planner.cohort(0, 0), tables)
    except lanes.UnfitError as error:
        return str(error)
    except jax.errors.UnexpectedTracerError:
        return "a client's training is inside jax.jit, a loop or a branch"
    return ""


def _check_points(
    line: str, entry: Any, hparams: Any, points: list[sweep.Point], task: types.Task
) -> None:
    """Refuses a sweep whose points differ in more than numbers of one program.

    Raises:
        ValueError: one line, also what the algorithm refuses of a point.
    """
    facts = []
    for point in points if line else ():
        made = entry.make(dataclasses.replace(hparams, **point), task)
        facts.append((made.plans, made.peers, made.messages))
    if any(one != facts[0] for one in facts):
        raise ValueError(
            f"--sweep={line}: its points have other plans, peers or messages; from "
            "Python build.compare({...}) runs any settings side by side"
        )


def _started(
    config: config_lib.Config,
    server_model: types.Model,
    client_models: tuple[types.Model, ...],
    shape: tuple[int, ...],
    normal: tuple[np.ndarray, np.ndarray],
) -> tuple[types.Model, tuple[types.Model, ...]]:
    """The models as they are when they start from `--init_from`.

    `normal` are the mean and the scale of this run's images.

    Raises:
        ValueError: one line: there are several models, or the file is of another.
    """
    if {model.name for model in client_models} != {server_model.name}:
        raise ValueError(
            f"--init_from={config.init_from} holds one model: --model={config.model} "
            f"and --client_model={config.client_model} are several; name one"
        )
    path = config.init_from
    started = model_files.starting(path, server_model, shape, normal)
    return started, (started,)


def _who(need: str) -> str:
    """The algorithms whose registry entry has a need."""
    entries = algorithms.ALGORITHMS.items()
    return " or ".join(name for name, one in entries if getattr(one, need, False))


def _data(
    config: config_lib.Config,
    source: dataset.Dataset,
    seeds: Sequence[int],
    public: np.ndarray | None,
    normal: tuple[np.ndarray, np.ndarray],
) -> types.Data:
    """The tables as numpy arrays; the partition has a leading axis of seeds."""
    splits = []
    for seed in seeds:
        own_seed = config.partition_seed if config.partition_seed >= 0 else seed
        splits.append(
            partitions.split(source, _partition_spec(config, own_seed), own_seed)
        )
    if config.export_partition:
        if len({one.train.row.tobytes() for one in splits}) > 1:
            raise ValueError(
                f"--export_partition={config.export_partition}: --num_seeds="
                f"{config.num_seeds} has as many partitions, a file holds one; give "
                "--num_seeds=1 or a --partition_seed"
            )
        try:
            processes.on_first(
                lambda: partitions.export(splits[0], config.export_partition)
            )
        except OSError as error:
            raise OSError(
                f"--export_partition={config.export_partition} cannot be written: "
                f"{error.strerror or error}"
            ) from error
    mean, scale = normal
    image, label = source.image, source.label
    if public is not None:
        # Rows behind the table's own; nobody reads their labels.
        row = np.arange(len(label), len(label) + len(public))
        splits = [split._replace(proxy=row) for split in splits]
        image = np.concatenate([image, public])
        label = np.concatenate([label, np.zeros(len(public), label.dtype)])
    stacked = partitions.stack(splits)
    if not (stacked.test.row >= 0).any(1).all():
        raise ValueError(
            f"--test_split={config.test_split} leaves no test row, clients are too "
            "small; lower --num_clients or take pool"
        )
    return types.Data(
        image=image, label=label, mean=mean, scale=scale, partition=stacked
    )


def _typical_steps(
    config: config_lib.Config, num_rows: np.ndarray, batch_size: int
) -> np.ndarray:
    """int[T, C]: steps of an epoch of the clients of a few cohorts."""
    gen = rng.generator(config.seed, rng.Tag.COHORT)
    steps = -(-num_rows // batch_size)
    size = config.clients_per_round
    drawn = [gen.choice(len(steps), size, replace=False) for _ in range(16)]
    return steps[np.stack(drawn)]


def _scoring(config: config_lib.Config, data: types.Data) -> evaluate.Scoring:
    num_scored = 0
    if config.c_gen:
        is_all = config.eval_clients == "all"
        num_scored = config.num_clients if is_all else config.clients_per_round
    sampled = config.eval_sample if config.eval_sample < config.num_clients else 0
    test, rows = data.partition.test, devices.evaluation_rows()
    return evaluate.Scoring(
        batch_size=int(min(rows, test.row.shape[1])),
        own_batch_size=min(rows, shapes.rounded_up(int(test.count.max()))),
        num_scored=num_scored,
        scored=config.eval_clients,
        num_sampled=sampled,
        has_train=config.eval_train,
    )
