"""From a configuration to an experiment: data, models and algorithm put together."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

import algorithms
import models
from data import dataset, loaders, partitions, plan
from data.partitions import cdkt
from fedjax_pfl import evaluate, rows, traffic, types
from fedjax_pfl import program as program_lib
from launch import config as config_lib
from launch import devices, settings
from launch.experiment import Experiment


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


def _partition_spec(config: config_lib.Config, seed: int) -> partitions.PartitionSpec:
    protocol = cdkt.PROTOCOLS.get(config.dataset, cdkt.Protocol())
    return partitions.PartitionSpec(
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
    means the default. `algo` may be an algorithm of your own, a module or any object
    with a dataclass `HParams` and a function `make`.

    Returns:
        An `Experiment` with `run()`, `state`, `metrics` and `params(client_id)`.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    config, hparams = settings.configure(given)
    source = loaders.load(config.dataset, config.data_dir)
    config = settings.resolve(config, source, given)
    settings.check(config)
    public = None
    if config.public_set != "none":
        public = _public_images(config, source)
    return assemble(config, hparams, source, public=public, algo=given.get("algo"))


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
    client_depth: np.ndarray | None = None,
    public: np.ndarray | None = None,
    algo: Any = None,
) -> Experiment:
    """Puts data, models and algorithm of a resolved configuration together.

    Args:
        config: Every field set.
        hparams: The algorithm's options.
        source: The data set.
        client_depth: int32[K], stages that each client holds; None = all of them.
        public: Images that all clients share without labels, or None.
        algo: An algorithm that is not in the registry; None or a name = `config.algo`.
    """
    devices.prefer_wide_vectors()
    jax.config.update(
        "jax_default_matmul_precision", devices.PRECISIONS[config.precision]
    )
    seeds = [config.seed + i for i in range(config.num_seeds)]
    splits = []
    for seed in seeds:
        own_seed = config.partition_seed if config.partition_seed >= 0 else seed
        splits.append(
            partitions.split(source, _partition_spec(config, own_seed), own_seed)
        )
    mean, scale = dataset.normalization(source.image, config.normalization)
    image, label = source.image, source.label
    if public is not None:
        # Rows behind the table's own; nobody reads their labels.
        row = np.arange(len(label), len(label) + len(public))
        splits = [split._replace(proxy=row) for split in splits]
        image = np.concatenate([image, public])
        label = np.concatenate([label, np.zeros(len(public), label.dtype)])
    stacked = partitions.stack(splits)

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
    entry = settings.algorithm(config.algo if algo is None else algo)
    program = program_lib.build(entry.make, hparams, task, scoring)
    if public is not None and program.algorithm.ships_proxy != "unlabelled":
        users = [
            name
            for name, one in algorithms.ALGORITHMS.items()
            if getattr(one, "public_images", False)
        ]
        raise ValueError(
            f"--public_set={config.public_set}: --algo={config.algo} has no use for "
            f"images without labels; leave it away, or take {' or '.join(users)}"
        )
    data = types.Data(
        image=image,
        label=label,
        mean=mean,
        scale=scale,
        partition=stacked,
    )
    num_peers = program.algorithm.num_peers
    cohorts = plan.Planner(
        seeds=seeds,
        num_rows=np.asarray(stacked.train.count),
        level_of=client_depth,
        client_group=client_group,
        clients_per_round=config.clients_per_round,
        specs=program.algorithm.plans,
        peers=types.PeerSpec(num_peers) if num_peers else None,
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
