"""The options of every run, and the presets of the papers."""

from __future__ import annotations

import dataclasses
from typing import Any

import data.partition
import data.table
import launch.devices
from fedjax_pfl import options

option = options.option
SUMMARIES = ("median_last10", "mean_last10", "last")


@dataclasses.dataclass(frozen=True)
class Config:
    """What every run has, whatever the algorithm. None = chosen by data and preset."""

    algo: str = option("cdkt", "the algorithm; `python -m launch.list` shows them")
    preset: str | None = option(
        None, "a paper's rules for options that are not given; none, cdkt, cdkt_code"
    )
    dataset: str = option("mnist_5k", "a data set's name, or npz:PATH for your arrays")
    data_dir: str = option("", "folder of IDX files or of prepared tfds data")
    model: str | None = option(None, "the server's model, and the clients' by default")
    client_model: str | None = option(None, "the clients' model if it differs")
    normalization: str | None = option(
        None, "how images are normalised", choices=data.table.NORMALIZATIONS
    )
    partition: str | None = option(
        None,
        "how examples are split over clients",
        choices=tuple(data.partition.PARTITIONS),
    )
    partition_alpha: float = option(
        0.5, "concentration of the Dirichlet partitions [alpha]", above=0
    )
    partition_seed: int = option(
        -1, "seed of the partition, -1 = the run's seed", minimum=-1
    )
    classes_per_client: int | None = option(
        None, "classes of each client (pathological, cdkt)", minimum=1
    )
    min_examples: int = option(2, "examples that every client must get", minimum=2)
    examples_per_client: int = option(
        0, "use only this many examples per client on average, 0 = all", minimum=0
    )
    proxy_fraction: float | None = option(
        None,
        "share of every class that is set aside as proxy set",
        minimum=0,
        maximum=1,
    )
    test_split: str | None = option(
        None, "where test rows come from", choices=data.partition.TEST_SPLITS
    )
    num_clients: int | None = option(None, "clients [K]", minimum=1)
    clients_per_round: int | None = option(
        None, "clients drawn in each round", minimum=1
    )
    rounds: int | None = option(None, "rounds in all", minimum=1)
    seed: int = option(0, "root of all random draws", minimum=0, maximum=2**32 - 1)
    num_seeds: int = option(
        1, "run seeds seed, seed + 1, ... in one program", minimum=1
    )
    eval_every: int | None = option(None, "rounds between evaluations", minimum=1)
    eval_clients: str | None = option(
        None, "clients behind c_spec, c_gen, c_per", choices=("selected", "all")
    )
    c_gen: bool | None = option(
        None, "also measure clients' models on all clients' test rows"
    )
    summary: str | None = option(
        None, "how a curve becomes a number", choices=SUMMARIES
    )
    checkpoint_every: int = option(
        0, "rounds between checkpoints, 0 = about every minute", minimum=0
    )
    workdir: str = option("", "folder for results; default runs/<algo>-<dataset>-...")
    resume: bool = option(False, "continue the run in --workdir")
    client_chunk: int = option(
        0, "clients vmapped together, 0 = chosen by backend", minimum=0
    )
    devices: int = option(0, "devices that share the clients, 0 = all", minimum=0)
    precision: str = option(
        "f32", "precision of matrix products", choices=tuple(launch.devices.PRECISIONS)
    )


# Not part of a run's identity: where and how it is executed, and for how long.
EXECUTION_FIELDS = (
    "rounds",
    "workdir",
    "resume",
    "client_chunk",
    "devices",
    "data_dir",
    "checkpoint_every",
)

_CDKT = {
    "partition": "cdkt",
    "num_clients": 10,
    "c_gen": True,
    "eval_clients": "selected",
    "summary": "median_last10",
    "local_epochs": 2,
    "batch_size": 20,
    "client_lr": 0.03,
    "aggregation": "examples",
    "eval_model": "stale",
}
PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "cdkt": _CDKT,
    "cdkt_code": _CDKT
    | {
        "ensemble": "code_last",
        "teacher_mode": "train",
        "proxy_pairing": "truncate",
        "js_form": "reversed",
    },
}
CDKT_DATA = {
    # data set: (model, normalization, test split, proxy fraction)
    "mnist": ("cdkt_mnist", "pixel", "pool_stratified", 0.005),
    "mnist_5k": ("cdkt_mnist", "pixel", "pool_stratified", 0.07),
    "fashion_mnist": ("cdkt_mnist", "global", "pool", 0.005),
    "cifar10": ("cdkt_cifar", "half", "pool_stratified", 0.07),
    "cifar100": ("cdkt_cifar", "half", "pool_stratified", 0.07),
}
DEFAULT_ROUNDS = {"cdkt": 30}
