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
        None, "a paper's rules for options not given; none, cdkt, cdkt_code, fedd2s"
    )
    dataset: str = option("mnist_5k", "a data set's name, or npz:PATH for your arrays")
    data_dir: str = option("", "folder of IDX files or of prepared tfds data")
    model: str | None = option(None, "the server's model, and the clients' by default")
    client_model: str | None = option(
        None,
        "the clients' model if it differs; several names, separated by commas, go "
        "round over the clients (fedmd)",
    )
    normalization: str | None = option(
        None,
        "how images are normalised; constants are those of all images",
        choices=data.table.NORMALIZATIONS,
    )
    partition: str | None = option(
        None,
        "how examples are split over clients",
        choices=tuple(data.partition.PARTITIONS),
    )
    partition_alpha: float = option(
        0.5, "concentration of the Dirichlet partitions [alpha]", above=0
    )
    partition_draw: str = option(
        "ipf",
        "how client_dirichlet meets the supply of each class",
        choices=tuple(data.partition.DRAWS),
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
    public_set: str | None = option(
        None,
        "data set whose train images all clients share without labels (fedmd), or none",
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
    compile_cache: str | None = option(
        None,
        "folder that keeps compiled programs for later runs, or off; by itself the "
        "user's cache folder",
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
    "compile_cache",
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
_FEDD2S = {
    "partition": "client_dirichlet",
    "partition_alpha": 0.1,
    "test_split": "client_share",
    "summary": "mean_last10",
    "local_epochs": 4,
    "server_epochs": 4,
    "batch_size": 128,
    "client_optimizer": "adam",
    "client_lr": 0.01,
    "aggregation": "uniform",
}
PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "cdkt": _CDKT,
    "fedd2s": _FEDD2S,
    "cdkt_code": _CDKT
    | {
        "ensemble": "code_last",
        "teacher_mode": "train",
        "proxy_pairing": "truncate",
        "js_form": "reversed",
    },
}
# Options that a preset sets otherwise for one algorithm.
PRESET_EXCEPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("fedd2s", "fedmd"): {"local_epochs": 2},
    ("fedd2s", "fedict"): {"local_epochs": 2, "server_epochs": 2},
    # Their papers weight by examples; with clients of one size it is the same.
    ("fedd2s", "fedper"): {"aggregation": "examples"},
    ("fedd2s", "fedper_plus"): {"aggregation": "examples"},
}
DEFAULT_PRESETS = {"cdkt": "cdkt"} | dict.fromkeys(
    (
        "fedd2s",
        "fedper",
        "fedrep",
        "fedper_plus",
        "fedrep_plus",
        "fedmd",
        "fedict",
        "pfedsd",
        "majority",
    ),
    "fedd2s",
)
FEDD2S_MODELS = {"cifar100": "m2", "emnist/byclass": "m2", "femnist": "m2"}
# Public images of FedMD, of the same shape; CINIC-10 holds CIFAR-10's images.
PUBLIC_SETS = {
    "cifar10": "cifar100",
    "cinic10": "cifar100",
    "cifar100": "cifar10",
    "emnist/byclass": "mnist_5k",
    "femnist": "mnist_5k",
    "fashion_mnist": "mnist_5k",
}
CDKT_DATA = {
    # data set: (model, normalization, test split, proxy fraction)
    "mnist": ("cdkt_mnist", "pixel", "pool_stratified", 0.005),
    "mnist_5k": ("cdkt_mnist", "pixel", "pool_stratified", 0.07),
    "fashion_mnist": ("cdkt_mnist", "global", "pool", 0.005),
    "cifar10": ("cdkt_cifar", "half", "pool_stratified", 0.07),
    "cifar100": ("cdkt_cifar", "half", "pool_stratified", 0.07),
}
DEFAULT_ROUNDS = {"cdkt": 30, "fedd2s": 40}
