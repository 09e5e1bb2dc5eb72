"""The options of every run; `launch/rules/` has the defaults of those that are None."""

from __future__ import annotations

import dataclasses

import data.dataset
import data.partitions
import launch.devices
import launch.presets
from fedjax_pfl import options

option = options.option
SUMMARIES = ("median_last10", "mean_last10", "last")


@dataclasses.dataclass(frozen=True)
class Config:
    """What every run has, whatever the algorithm; None = see `settings.resolve`."""

    algo: str = option("cdkt", "the algorithm; `python -m launch.list` shows them")
    preset: str | None = option(
        None,
        f"a paper's rules for options not given: {', '.join(launch.presets.PRESETS)}",
    )
    dataset: str = option("mnist_5k", "a data set's name, or npz:PATH for your arrays")
    data_dir: str = option(
        "", "folder of IDX files, of pathmnist.npz or of prepared tfds data"
    )
    rotate_classes: int = option(
        1,
        "turn every image by one of this many right angles, each angle of a class a "
        "class of its own; 1 = leave them as they are",
        minimum=1,
        maximum=4,
    )
    image_size: int = option(
        0,
        "side of all images, made of smaller ones by a black margin; 0 = as they are",
        minimum=0,
        maximum=4096,
    )
    image_channels: int = option(
        0,
        "channels of all images, made of gray ones by repetition; 0 = as they are",
        minimum=0,
        maximum=64,
    )
    model: str | None = option(None, "the server's model, and the clients' by default")
    client_model: str | None = option(
        None,
        "the clients' model if it differs; several names, separated by commas, go "
        "round over the clients, where an algorithm can do with several",
    )
    model_width: float = option(
        1.0,
        "factor on the hidden channels and widths of every model, at least one each",
        above=0,
        maximum=1000,
    )
    init_from: str = option(
        "",
        "file of a model (launch.export) that server and clients start from",
    )
    normalization: str | None = option(
        None,
        "how images are normalised; constants are those of all images",
        choices=data.dataset.NORMALIZATIONS,
    )
    partition: str | None = option(
        None,
        "how examples are split over clients",
        choices=tuple(data.partitions.PARTITIONS),
    )
    export_partition: str = option(
        "", "also write the rows of each client to this file, for --partition=file:PATH"
    )
    partition_alpha: float = option(
        0.5, "concentration of the Dirichlet partitions [alpha]", above=0
    )
    partition_draw: str = option(
        "ipf",
        "how client_dirichlet meets the supply of each class; with overlap "
        "pathological draws with replacement",
        choices=tuple(data.partitions.DRAWS),
    )
    partition_seed: int = option(
        -1, "seed of the partition, -1 = the run's seed", minimum=-1
    )
    classes_per_client: int | None = option(
        None, "classes of each client (pathological, cdkt)", minimum=1
    )
    client_classes: str = option(
        "",
        "classes of each client for --partition=classes, such as 0,1/0,1/2,3 for three",
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
        "data set whose train images all clients share without labels, or none",
    )
    test_split: str | None = option(
        None, "where test rows come from", choices=data.partitions.TEST_SPLITS
    )
    num_clients: int | None = option(None, "clients [K]", minimum=1)
    clients_per_round: int | None = option(
        None, "clients drawn in each round, 0 = all", minimum=0
    )
    rounds: int | None = option(None, "rounds in all", minimum=1)
    seed: int = option(0, "root of all random draws", minimum=0, maximum=2**32 - 1)
    num_seeds: int = option(
        1, "run seeds seed, seed + 1, ... in one program", minimum=1
    )
    sweep: str = option(
        "",
        "one run for all values of numbers of the algorithm, such as "
        "'client_lr=0.01,0.1;proximal_weight=0.1,1' for all four pairs; which is best "
        "is for rows of validation to say, which there are not yet",
    )
    eval_every: int | None = option(None, "rounds between evaluations", minimum=1)
    eval_clients: str | None = option(
        None, "clients behind c_spec, c_gen, c_per", choices=("selected", "all")
    )
    eval_sample: int = option(
        0,
        "evaluate the models of this many clients only, drawn once by seed, 0 = all",
        minimum=0,
    )
    eval_train: bool = option(
        False, "also measure the server's model on the clients' train rows"
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
    tensorboard: bool = option(False, "also write TensorBoard's files into --workdir")
    csv: bool = option(False, "also write metrics.csv into --workdir")
    client_chunk: int = option(
        0, "clients vmapped together, 0 = chosen by backend", minimum=0
    )
    min_chunk: int = option(
        0,
        "fewest clients vmapped together on an accelerator, 0 = what costs least",
        minimum=0,
    )
    lanes: str = option(
        "0",
        "clients that train side by side on each device, in each lane one after "
        "another: for clients of unequal sizes; auto = as many as cost least, 0 = "
        "clients train in chunks",
    )
    bucketed: bool = option(
        True,
        "clients that hold a part of a model compute that part, or all of it, masked",
    )
    devices: int = option(0, "devices that share the clients, 0 = all", minimum=0)
    distributed: str = option(
        "",
        "several processes as one run: auto where a cluster tells (TPU pods, SLURM), "
        "or HOST:PORT,COUNT,INDEX, the address being that of process 0",
    )
    emulate: str = option(
        "",
        "choose chunks, and what is vmapped, as on an accelerator; for tests on a CPU",
        choices=("", "accelerator"),
    )
    precision: str = option(
        "f32", "precision of matrix products", choices=tuple(launch.devices.PRECISIONS)
    )
    compile_cache: str = option(
        "",
        "folder that keeps compiled programs for later runs, or off; by itself the "
        "user's cache folder",
    )


# Not part of a run's identity: where and how it is executed, and for how long.
EXECUTION_FIELDS = (
    "rounds",
    "workdir",
    "resume",
    "client_chunk",
    "min_chunk",
    "lanes",
    "bucketed",
    "devices",
    "distributed",
    "emulate",
    "data_dir",
    "checkpoint_every",
    "compile_cache",
    "export_partition",
    "tensorboard",
    "csv",
)

# Options by what they are about, for --help; the others are the algorithm's.
GROUPS = {
    "run": (
        "algo", "preset", "rounds", "seed", "num_seeds", "sweep", "workdir", "resume",
        "checkpoint_every", "tensorboard", "csv",
    ),
    "data": (
        "dataset", "data_dir", "rotate_classes", "image_size", "image_channels",
        "normalization", "partition", "partition_alpha", "partition_draw",
        "partition_seed", "classes_per_client", "client_classes", "min_examples",
        "examples_per_client", "export_partition", "proxy_fraction", "public_set",
        "test_split", "num_clients",
    ),
    "model": ("model", "client_model", "model_width", "init_from"),
    "training": ("clients_per_round",),
    "evaluation": (
        "eval_every", "eval_clients", "eval_sample", "eval_train", "c_gen", "summary",
    ),
    "machine": (
        "client_chunk", "min_chunk", "lanes", "bucketed", "devices", "distributed",
        "emulate", "precision", "compile_cache",
    ),
}  # fmt: skip
