"""The options of every run; `rules/` has the defaults of those that are None.

An option says of itself all that others need to know of it: see `option`. What an
algorithm adds is in its `HParams`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from data import dataset as dataset_lib
from data import partitions
from fedjax_pfl import options
from launch.config import presets

SUMMARIES = ("median_last10", "mean_last10", "last")
# What jax calls the precisions of matrix products.
PRECISIONS = {"f32": "highest", "tf32": "tensorfloat32", "bf16": "bfloat16"}
IDENTITY, EXECUTION, NOWHERE = "identity", "execution", "nowhere"


def option(
    default: Any, help: str, *, role: str = IDENTITY, label: str = "", **bounds: Any
) -> Any:
    """An option of every run.

    Args:
        default: None = a rule, or the data, decide.
        help: One sentence.
        role: `IDENTITY`: a run with another value is another run. `EXECUTION`: how,
            where and for how long it is computed. `NOWHERE`: that, and it is not even
            recorded in `run.flags`.
        label: Whether it tells runs apart in the names of a picture: `always` where
            they differ, `never`, or by itself between runs of one algorithm.
        **bounds: Of `options.option`.
    """
    field = options.option(default, help, **bounds)
    metadata = {**field.metadata, "role": role, "label": label}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Run:
    """Which method, how long, and where results go."""

    algo: str = option(
        "cdkt", "the algorithm; `python -m launch.list` shows them", label="never"
    )
    preset: str | None = option(
        None, f"a paper's rules for options not given: {', '.join(presets.PRESETS)}"
    )
    rounds: int | None = option(None, "rounds in all", minimum=1, role=EXECUTION)
    seed: int = option(
        0, "root of all random draws", minimum=0, maximum=2**32 - 1, label="never"
    )
    num_seeds: int = option(
        1, "run seeds seed, seed + 1, ... in one program", minimum=1, label="never"
    )
    sweep: str = option(
        "",
        "one run for all values of numbers of the algorithm, such as "
        "'client_lr=0.01,0.1;proximal_weight=0.1,1' for all four pairs; which is best "
        "is for rows of validation to say, which there are not yet",
    )
    workdir: str = option(
        "", "folder for results; default runs/<algo>-<dataset>-...", role=NOWHERE
    )
    resume: bool = option(False, "continue the run in --workdir", role=NOWHERE)
    checkpoint_every: int = option(
        0,
        "rounds between checkpoints, 0 = about every minute",
        minimum=0,
        role=EXECUTION,
    )
    tensorboard: bool = option(
        False, "also write TensorBoard's files into --workdir", role=EXECUTION
    )
    csv: bool = option(False, "also write metrics.csv into --workdir", role=EXECUTION)


@dataclasses.dataclass(frozen=True)
class Data:
    """Which examples there are, and how clients share them."""

    dataset: str = option(
        "mnist_5k", "a data set's name, or npz:PATH for your arrays", label="always"
    )
    data_dir: str = option(
        "",
        "folder of IDX files, of pathmnist.npz or of prepared tfds data",
        role=EXECUTION,
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
    normalization: str | None = option(
        None,
        "how images are normalised; constants are those of all images",
        choices=dataset_lib.NORMALIZATIONS,
    )
    partition: str | None = option(
        None,
        "how examples are split over clients",
        choices=tuple(partitions.PARTITIONS),
        label="always",
    )
    partition_alpha: float = option(
        0.5,
        "concentration of the Dirichlet partitions [alpha]",
        above=0,
        label="always",
    )
    partition_draw: str = option(
        "ipf",
        "how client_dirichlet meets the supply of each class; with overlap "
        "pathological draws with replacement",
        choices=tuple(partitions.DRAWS),
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
    export_partition: str = option(
        "",
        "also write the rows of each client to this file, for --partition=file:PATH",
        role=NOWHERE,
    )
    proxy_fraction: float | None = option(
        None,
        "share of every class that is set aside as proxy set",
        minimum=0,
        maximum=1,
    )
    public_set: str | None = option(
        None, "data set whose train images all clients share without labels, or none"
    )
    test_split: str | None = option(
        None, "where test rows come from", choices=partitions.TEST_SPLITS
    )
    num_clients: int | None = option(None, "clients [K]", minimum=1, label="always")


@dataclasses.dataclass(frozen=True)
class Model:
    """Which models, and what they start from."""

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
        "", "file of a model (launch.export) that server and clients start from"
    )


@dataclasses.dataclass(frozen=True)
class Training:
    """Which clients train; how they train is the algorithm's."""

    clients_per_round: int | None = option(
        None, "clients drawn in each round, 0 = all", minimum=0
    )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """When models are measured, and on what."""

    eval_every: int | None = option(
        None, "rounds between evaluations", minimum=1, label="never"
    )
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


@dataclasses.dataclass(frozen=True)
class Machine:
    """On what, and how, it is computed."""

    client_chunk: int = option(
        0, "clients vmapped together, 0 = chosen by backend", minimum=0, role=EXECUTION
    )
    min_chunk: int = option(
        0,
        "fewest clients vmapped together on an accelerator, 0 = what costs least",
        minimum=0,
        role=EXECUTION,
    )
    lanes: str = option(
        "0",
        "clients that train side by side on each device, in each lane one after "
        "another: for clients of unequal sizes; auto = as many as cost least, 0 = "
        "clients train in chunks",
        role=EXECUTION,
    )
    bucketed: bool = option(
        True,
        "clients that hold a part of a model compute that part, or all of it, masked",
        role=EXECUTION,
    )
    devices: int = option(
        0, "devices that share the clients, 0 = all", minimum=0, role=EXECUTION
    )
    distributed: str = option(
        "",
        "several processes as one run: auto where a cluster tells (TPU pods, SLURM), "
        "or HOST:PORT,COUNT,INDEX, the address being that of process 0",
        role=NOWHERE,
    )
    emulate: str = option(
        "",
        "choose chunks, and what is vmapped, as on an accelerator; for tests on a CPU",
        choices=("", "accelerator"),
        role=NOWHERE,
    )
    precision: str = option(
        "f32", "precision of matrix products", choices=tuple(PRECISIONS)
    )
    compile_cache: str = option(
        "",
        "folder that keeps compiled programs for later runs, or off; by itself the "
        "user's cache folder",
        role=EXECUTION,
    )


SECTIONS = (Run, Data, Model, Training, Evaluation, Machine)


# From the last base to the first is the order of the fields.
@dataclasses.dataclass(frozen=True)
class Config(Machine, Evaluation, Training, Model, Data, Run):
    """What every run has, whatever the algorithm; None = see `resolve.resolve`."""


def groups() -> dict[str, list[str]]:
    """The names of the options by section, for `--help`."""
    return {
        section.__name__.lower(): [field.name for field in dataclasses.fields(section)]
        for section in SECTIONS
    }


def names(role: str) -> frozenset[str]:
    """The options of a role; what is recorded nowhere is execution, too."""
    wanted = {role, NOWHERE} if role == EXECUTION else {role}
    return frozenset(
        field.name
        for field in dataclasses.fields(Config)
        if field.metadata["role"] in wanted
    )


def labelled(how: str) -> list[str]:
    """The options with this `label`."""
    fields = dataclasses.fields(Config)
    return [field.name for field in fields if field.metadata["label"] == how]
