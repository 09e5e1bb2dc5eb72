"""From names and values to an experiment: configuration, presets, validation.

Everything a user types passes through here once; nothing later asks again.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from typing import Any

import jax
import numpy as np

import algorithms
import models
from data import cdkt_partition, loaders, partition, plan, table
from fedjax_pfl import evaluate, options, rows, traffic, types
from fedjax_pfl import program as program_lib
from launch import config as config_lib
from launch import devices
from launch.experiment import Experiment


def field_types(dataclass: Any) -> dict[str, type]:
    """Field name -> int, float, str or bool, whatever optionality is written."""
    out = {}
    for field in dataclasses.fields(dataclass):
        names = str(field.type).replace(" ", "").split("|")
        out[field.name] = {"int": int, "float": float, "str": str, "bool": bool}[
            next(name for name in names if name != "None")
        ]
    return out


def fields_of(algo: str) -> dict[str, dataclasses.Field]:
    """Every option of an algorithm's run: the common ones and its own."""
    if algo not in algorithms.ALGORITHMS:
        raise ValueError(
            f"--algo={algo}: expected one of {', '.join(algorithms.ALGORITHMS)}"
        )
    hparams = algorithms.ALGORITHMS[algo].HParams
    return {
        f.name: f
        for f in (*dataclasses.fields(config_lib.Config), *dataclasses.fields(hparams))
    }


def option_types(algo: str) -> dict[str, type]:
    """Type of every option of an algorithm's run."""
    hparams = algorithms.ALGORITHMS[algo].HParams
    return field_types(config_lib.Config) | field_types(hparams)


def unknown_option(name: str, algo: str) -> str:
    """The line that explains an option that `algo` does not have."""
    owners = [
        other
        for other, module in algorithms.ALGORITHMS.items()
        if name in {f.name for f in dataclasses.fields(module.HParams)}
    ]
    if owners:
        return (
            f"--{name} belongs to {', '.join(owners)}; --algo={algo} has no such flag"
        )
    close = difflib.get_close_matches(name, fields_of(algo), n=1)
    hint = f"; did you mean --{close[0]}?" if close else ""
    return f"--{name} is not a flag of --algo={algo}{hint}"


def _checked(name: str, value: Any, kind: type) -> Any:
    if value is None:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        raise ValueError(f"--{name}={value!r}: expected {kind.__name__}")
    return value


def configure(given: dict[str, Any]) -> tuple[config_lib.Config, Any]:
    """Config and hyperparameters from what was given, presets and defaults.

    Options that depend on the data stay None until `experiment`.

    Raises:
        ValueError: one line: what came, what was expected, which flag to change.
    """
    algo = given.get("algo", "cdkt")
    known = fields_of(algo)
    for name in given:
        if name not in known:
            raise ValueError(unknown_option(name, algo))
    module = algorithms.ALGORITHMS[algo]
    preset = given.get("preset") or config_lib.DEFAULT_PRESETS.get(algo, "none")
    if preset not in config_lib.PRESETS:
        raise ValueError(
            f"--preset={preset}: expected one of {', '.join(config_lib.PRESETS)}"
        )
    rules = config_lib.PRESETS[preset]
    rules = rules | config_lib.PRESET_EXCEPTIONS.get((preset, algo), {})
    values = {k: v for k, v in rules.items() if k in known}
    values |= {k: v for k, v in given.items() if v is not None}
    values |= {"algo": algo, "preset": preset}

    def build(dataclass: Any) -> Any:
        kinds = field_types(dataclass)
        chosen = {
            name: _checked(name, values[name], kind)
            for name, kind in kinds.items()
            if name in values
        }
        made = dataclass(**chosen)
        options.validate(made)
        return made

    return build(config_lib.Config), build(module.HParams)


def resolve(
    config: config_lib.Config, source: table.Table, given: dict[str, Any]
) -> config_lib.Config:
    """Fills every None from the data and the preset."""
    name = config.dataset
    own = name.startswith("npz:")
    chosen: dict[str, Any] = {}
    is_cdkt = config.preset.startswith("cdkt")
    flat = source.image.ndim == 2
    small = flat or min(source.image.shape[1:3]) < 16
    model = "mlp" if small else "fedavg_cnn"
    normalization, test_split, proxy = "channel", "client_share", 0.0
    if name in loaders.DATASETS:
        model = loaders.DATASETS[name].default_model
    if is_cdkt:
        test_split, proxy = "pool_stratified", 0.07
    if is_cdkt and name in config_lib.CDKT_DATA:
        model, normalization, test_split, proxy = config_lib.CDKT_DATA[name]
    is_fedd2s = config.preset == "fedd2s"
    if is_fedd2s and not small:
        model = config_lib.FEDD2S_MODELS.get(name, "m1")
    chosen["public_set"] = "none"
    if (config.public_set or "none") != "none":
        proxy = 0.0
    elif config.algo == "fedmd" and not (config.proxy_fraction or proxy):
        chosen["public_set"] = config_lib.PUBLIC_SETS.get(name, "none")
        if name == "mnist_5k" and config.public_set is None:
            proxy = 0.1
    chosen["model"] = model
    chosen["client_model"] = config.model or model
    chosen["normalization"] = normalization
    chosen["test_split"] = test_split
    chosen["proxy_fraction"] = proxy
    chosen["partition"] = "client_dirichlet"
    if own and "partition" not in given:
        # The paper's users exist for the paper's data; a user's arrays have owners.
        has_owners = source.client is not None
        config = dataclasses.replace(
            config, partition="natural" if has_owners else "client_dirichlet"
        )
    if config.partition == "natural" and source.client is None:
        raise ValueError(
            f"--partition=natural: --dataset={name} has no client ids; give an npz "
            "file with an array `client`, or take another partition"
        )
    chosen["num_clients"] = 50 if is_fedd2s and len(source.label) > 5000 else 20
    if config.partition == "natural":
        owners = int(source.client.max()) + 1
        if "num_clients" not in given:
            config = dataclasses.replace(config, num_clients=owners)
        if config.num_clients > owners:
            raise ValueError(
                f"--num_clients={config.num_clients}: the data have {owners} clients"
            )
    num_clients = config.num_clients or chosen["num_clients"]
    chosen["clients_per_round"] = min(10, num_clients)
    protocol = cdkt_partition.PROTOCOLS.get(name)
    chosen["classes_per_client"] = protocol.labels_per_user if protocol else 2
    if config.partition == "cdkt_paper":
        chosen["classes_per_client"] = cdkt_partition.PAPER_LABELS.get(name, 2)
    rounds = config_lib.DEFAULT_ROUNDS.get(config.algo, 20)
    rounds = config.rounds or config_lib.DEFAULT_ROUNDS.get(config.preset, rounds)
    chosen["rounds"] = rounds
    chosen["eval_every"] = 5
    chosen["eval_clients"] = "all"
    chosen["c_gen"] = False
    chosen["summary"] = "last"
    blank = {k: v for k, v in chosen.items() if getattr(config, k) is None}
    return dataclasses.replace(config, **blank)


def _check(config: config_lib.Config, source: table.Table) -> None:
    """Relations between options and data."""
    last_seed = config.seed + config.num_seeds - 1
    if last_seed >= 2**32:
        raise ValueError(
            f"--seed={config.seed} --num_seeds={config.num_seeds}: the last seed would "
            f"be {last_seed}, at most {2**32 - 1} is possible; lower --seed"
        )
    if config.clients_per_round > config.num_clients:
        raise ValueError(
            f"--clients_per_round={config.clients_per_round} is more than "
            f"--num_clients={config.num_clients}; lower it"
        )
    for flag in ("model", "client_model"):
        given = getattr(config, flag)
        names = given.split(",") if flag == "client_model" else [given]
        for name in names:
            if name not in models.MODELS:
                raise ValueError(
                    f"--{flag}={given}: expected one of {', '.join(models.MODELS)}"
                )
        if len(set(names)) < len(names):
            raise ValueError(
                f"--client_model={given} names a model twice; once will do"
            )
        if len(names) > config.num_clients:
            raise ValueError(
                f"--client_model={given}: {len(names)} models for "
                f"--num_clients={config.num_clients}; name fewer"
            )
    if config.proxy_fraction >= 1:
        raise ValueError("--proxy_fraction=1 leaves nothing for the clients; lower it")


def _model(flag: str, name: str, num_classes: int, shape: tuple) -> types.Model:
    model = models.make(name, num_classes)
    try:
        traffic.shapes(model, shape)
    except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"--{flag}={name} does not fit examples of shape {list(shape)}; "
            "take another model, for instance mlp"
        ) from error
    return model


def _partition_spec(config: config_lib.Config, seed: int) -> partition.PartitionSpec:
    protocol = cdkt_partition.PROTOCOLS.get(config.dataset, cdkt_partition.Protocol())
    return partition.PartitionSpec(
        partition=config.partition,
        num_clients=config.num_clients,
        partition_alpha=config.partition_alpha,
        partition_draw=config.partition_draw,
        classes_per_client=config.classes_per_client,
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


def summary_window(summary: str, rounds: int) -> tuple[int, ...]:
    """Evaluation indices (rounds done) behind the summary."""
    if summary == "last":
        return (rounds,)
    if summary == "mean_last10":
        return tuple(range(max(1, rounds - 9), rounds + 1))
    # Indices 90..99 of 100: the states that rounds begin with.
    return tuple(range(max(1, rounds - 10), rounds)) or (rounds,)


def experiment(**given: Any) -> Experiment:
    """Builds an experiment from option names and values, as the command line does.

    `experiment(algo="fedavg", rounds=5).run()`. Names are those of the flags; None
    means the default.

    Returns:
        An `Experiment` with `run()`, `state`, `metrics` and `params(client_id)`.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    given = {name: value for name, value in given.items() if value is not None}
    config, hparams = configure(given)
    source = loaders.load(config.dataset, config.data_dir)
    config = resolve(config, source, given)
    _check(config, source)
    public = None
    if config.public_set != "none":
        public = _public_images(config, source)
    return assemble(config, hparams, source, public=public)


def _public_images(config: config_lib.Config, source: table.Table) -> np.ndarray:
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
    source: table.Table,
    client_depth: np.ndarray | None = None,
    public: np.ndarray | None = None,
) -> Experiment:
    """Puts data, models and algorithm of a resolved configuration together.

    Args:
        config: Every field set.
        hparams: The algorithm's options.
        source: The data set.
        client_depth: int32[K], stages that each client holds; None = all of them.
        public: Images that all clients share without labels, or None.
    """
    devices.prefer_wide_vectors()
    devices.keep_compiled(config.compile_cache)
    jax.config.update(
        "jax_default_matmul_precision", devices.PRECISIONS[config.precision]
    )
    seeds = [config.seed + i for i in range(config.num_seeds)]
    splits = []
    for seed in seeds:
        own_seed = config.partition_seed if config.partition_seed >= 0 else seed
        splits.append(
            partition.split(source, _partition_spec(config, own_seed), own_seed)
        )
    mean, scale = table.normalization(source.image, config.normalization)
    image, label = source.image, source.label
    if public is not None:
        # Rows behind the table's own; nobody reads their labels.
        row = np.arange(len(label), len(label) + len(public))
        splits = [split._replace(proxy=row) for split in splits]
        image = np.concatenate([image, public])
        label = np.concatenate([label, np.zeros(len(public), label.dtype)])
    stacked = partition.stack(splits)

    shape = image.shape[1:]
    server_model = _model("model", config.model, source.num_classes, shape)
    client_models = tuple(
        _model("client_model", name, source.num_classes, shape)
        for name in config.client_model.split(",")
    )
    execution = devices.execution(
        config.client_chunk,
        config.devices,
        config.clients_per_round,
        max(traffic.model_bytes(model, shape) for model in client_models),
        getattr(hparams, "batch_size", 1),
    )
    client_group = np.arange(config.num_clients, dtype=np.int32) % len(client_models)
    if client_depth is None:
        num_stages = [len(model.stage_names) for model in client_models]
        client_depth = np.array(num_stages, np.int32)[client_group]
    task = types.Task(
        server_model=server_model,
        client_models=client_models,
        group_of_client=client_group,
        client_depth=client_depth,
        num_clients=config.num_clients,
        num_classes=source.num_classes,
        num_proxy=stacked.proxy.shape[1],
        num_examples=int(stacked.train.count.max()),
        example_shape=shape,
        execution=execution,
    )
    num_scored = 0
    if config.c_gen:
        num_scored = config.num_clients
        if config.eval_clients == "selected":
            num_scored = config.clients_per_round
    test_rows = stacked.test.row.shape[1]
    if not (stacked.test.row >= 0).any(1).all():
        raise ValueError(
            f"--test_split={config.test_split} leaves no test row, clients are too "
            "small; lower --num_clients or take pool"
        )
    scoring = evaluate.Scoring(
        batch_size=int(min(256, test_rows)),
        own_batch_size=int(np.clip(stacked.test.count.max(), 1, 256)),
        num_scored=num_scored,
        scored=config.eval_clients,
    )
    module = algorithms.ALGORITHMS[config.algo]
    program = program_lib.build(module.make, hparams, task, scoring)
    if public is not None and program.algorithm.ships_proxy != "unlabelled":
        raise ValueError(
            f"--public_set={config.public_set}: --algo={config.algo} has no use for "
            "images without labels; leave it away (fedmd learns from them)"
        )
    data = types.Data(
        image=image,
        label=label,
        mean=mean,
        scale=scale,
        partition=stacked,
    )
    cohorts = plan.planner(
        seeds=seeds,
        num_rows=np.asarray(stacked.train.count),
        client_depth=client_depth,
        client_group=client_group,
        clients_per_round=config.clients_per_round,
        specs=program.algorithm.plans,
        num_peers=program.algorithm.num_peers,
        execution=execution,
    )
    digest = hashlib.sha256(np.ascontiguousarray(image).data)
    digest.update(np.ascontiguousarray(label).data)
    return Experiment(
        data_sha256=digest.hexdigest(),
        config=config,
        hparams=hparams,
        task=task,
        program=program,
        data=jax.device_put(data, rows.replicated(execution)),
        cohorts=cohorts,
        seeds=seeds,
        window=summary_window(config.summary, config.rounds),
    )
