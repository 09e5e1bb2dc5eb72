"""The options of every run. Those with the default None take it from `rules/`.

Each option describes itself completely, see `option`. The options that an algorithm
adds are in its `HParams`.
"""

import dataclasses
import functools
from typing import Any

from data import arrays, images, official, partitions, texts
from data import dataset as dataset_lib
from fedjax_pfl import augment, measures, options
from launch.config import presets

# Rules that choose a round, and all of them
CHOOSE = "best_validation", "best"
SUMMARIES = "median_last10", "mean_last10", "last", *CHOOSE
# jax's names for the precisions of matrix products of float32
PRECISIONS = {
    "f32": "highest",
    "tf32": "tensorfloat32",
    "bf16_matmul": "bfloat16",
    "bf16": "highest",
}
# Kinds of data for `only`
DATA = {
    "texts": f"a text: {', '.join(texts.TEXTS)}",
    "owned texts": "a text with owners",
    "images": "other data than a text",
    "tables": "a CSV file, parquet or DataFrame",
    "arrays": "arrays (npz:PATH, leaf:PATH, pfllib:PATH or parquet:PATH)",
    "coarse labels": "--dataset=cifar100",
}
IDENTITY, EXECUTION, NOWHERE = "identity", "execution", "nowhere"


def option(
    default: Any,
    help: str,
    *,
    role: str = IDENTITY,
    label: str = "",
    only: str = "",
    **bounds: Any,
) -> Any:
    """An option of every run, with `options.option`'s `bounds`.

    Args:
        default: None = a rule or the data decide.
        help: One sentence.
        role: `IDENTITY`: a run with another value is another run. `EXECUTION`: how,
            where and for how long it is computed. `NOWHERE`: the same, but neither
            recorded in `run.flags` nor taken from it, which may be a stranger's,
            because it writes files, opens connections or loads programs.
        label: Whether a run's name in a picture has the option: `always` if runs differ
            in it, `never`, or "" if runs of one algorithm differ in it.
        only: A key of `DATA`: with data of another kind the option is refused.
    """
    field = options.option(default, help, **bounds)
    metadata = {**field.metadata, "role": role, "label": label, "only": only}
    return dataclasses.field(default=default, metadata=metadata)


# An option for other data than texts
_image_option = functools.partial(option, only="images")


# Removed option -> (value without effect, reason). Folders of runs may still name them.
REMOVED = {
    "lanes": (
        "0",
        "lanes were removed, as they gained little over chunks; --client_chunk and "
        "--min_chunk say how many clients train together",
    )
}


@dataclasses.dataclass(frozen=True)
class Run:
    """The method, the number of rounds, and the place of results."""

    algo: str = option(
        "cdkt",
        "the algorithm, a name that `python -m launch.list` shows, or your own mine.py",
        label="never",
    )
    preset: str | None = option(
        None, f"a paper's rules for options not given: {', '.join(presets.PRESETS)}"
    )
    rounds: int | None = option(None, "rounds of the run", minimum=1, role=EXECUTION)
    seed: int = option(
        0, "root of all random draws", minimum=0, maximum=2**32 - 1, label="never"
    )
    num_seeds: int = option(
        1, "run seeds seed, seed + 1, ... in one program", minimum=1, label="never"
    )
    sweep: str = option(
        "",
        "train every combination of values of the algorithm's options that are "
        "fractions in one program, such as "
        "'client_lr=0.01,0.1;proximal_weight=0.1,1' for four pairs",
    )
    workdir: str = option(
        "", "folder for results; default runs/<algo>-<dataset>-...", role=NOWHERE
    )
    resume: bool = option(False, "continue the run in --workdir", role=NOWHERE)
    checkpoint_every: int = option(
        0, "rounds between checkpoints, 0 = every minute", minimum=0, role=EXECUTION
    )
    keep_best: bool = option(
        False,
        "also keep the models of each seed's best round, by a --summary that chooses",
        role=EXECUTION,
        needs={"summary": CHOOSE},
    )
    tensorboard: bool = option(False, "also write TensorBoard's files", role=EXECUTION)
    wandb: str = option(
        "", "also log to this project of Weights & Biases", role=NOWHERE
    )
    csv: bool = option(False, "also write metrics.csv into --workdir", role=EXECUTION)


@dataclasses.dataclass(frozen=True)
class Data:
    """The examples, and how they are split over clients."""

    dataset: str = option(
        "mnist_5k",
        "a data set's name, or your own: npz:PATH, csv:PATH, parquet:PATH, "
        "images:PATH, leaf:PATH, pfllib:PATH",
        label="always",
    )
    layout: str = option(
        "auto",
        "the axes of your own x: images nhwc, nchw or nhw (gray), or a series ntc for "
        "a custom model; auto = by the shape",
        choices=arrays.LAYOUTS,
        only="arrays",
    )
    label: str = option(
        "",
        "column of the labels of a CSV file, parquet or DataFrame; default label, y, "
        "target or class",
        only="tables",
    )
    labels: str = option(
        "fine",
        "the labels of CIFAR-100: 100 fine ones, or 20 coarse ones",
        choices=official.KINDS,
        only="coarse labels",
    )
    owner: str = option(
        "",
        "column of the owners of rows of a CSV file, parquet or DataFrame; default "
        "client, client_id, owner or owner_id",
        only="tables",
    )
    min_owner_examples: int = _image_option(
        0,
        "leave owners with fewer rows out (natural; train rows of your own split), "
        "0 = keep all",
        minimum=0,
        needs={"partition": ("natural",)},
    )
    data_dir: str = option(
        "", "folder of the data set's files or prepared tfds data", role=EXECUTION
    )
    text_length: int = option(
        0,
        "tokens in a row of a text, 0 = as --dataset says",
        minimum=0,
        maximum=65536,
        only="texts",
    )
    owners: str = option(
        "book",
        "the owners of the rows of --dataset=kjv",
        choices=texts.OWNERS,
        only="owned texts",
    )
    masked_loss: str = option(
        "all",
        "the positions of a text behind losses and compared perplexities: all, or the "
        "chosen 15 % that a model must guess",
        choices=augment.POSITIONS,
        only="texts",
    )
    rotate_classes: int = _image_option(
        1,
        "right angles of images, each another class; 1 = as is",
        minimum=1,
        maximum=4,
        excludes={"layout": ("ntc",), "partition": partitions.cdkt.KINDS},
    )
    image_size: int = _image_option(
        0,
        "pad images with black to this side; 0 = as is",
        minimum=0,
        maximum=images.MAX_SIDE,
    )
    image_channels: int = _image_option(
        0, "repeat gray images to so many channels; 0 = as is", minimum=0, maximum=64
    )
    normalization: str | None = _image_option(
        None,
        "how examples (images, vectors) are normalised",
        choices=dataset_lib.NORMALIZATIONS,
        off="none",
    )
    augment: str | None = _image_option(
        None,
        "how images of train batches are changed: crop_flip = a random crop within a "
        "black margin of an eighth, and a mirror image half of the time",
        choices=augment.KINDS,
        off="none",
    )
    partition: str | None = option(
        None,
        "how examples are split over clients",
        choices=tuple(partitions.PARTITIONS),
        label="always",
    )
    partition_alpha: float = option(
        0.5,
        "concentration of Dirichlet partitions [alpha]",
        above=0,
        label="always",
        needs={"partition": ("client_dirichlet", "dirichlet", "pfllib_dirichlet")},
        is_noted=True,
    )
    partition_draw: str = option(
        "ipf",
        "how client_dirichlet meets the supply of each class; with overlap "
        "pathological draws with replacement",
        choices=tuple(partitions.DRAWS),
        needs={"partition": ("client_dirichlet", "pathological")},
        is_noted=True,
    )
    partition_seed: int = option(
        -1, "seed of the partition, -1 = the run's seed", minimum=-1
    )
    classes_per_client: int | None = option(
        None,
        "classes of each client (pathological, pfllib_pathological, cdkt)",
        minimum=1,
        needs={
            "partition": ("pathological", "pfllib_pathological", *partitions.cdkt.KINDS)
        },
        is_noted=True,
    )
    client_classes: str = option(
        "",
        "clients' classes for --partition=classes, such as 0,1/0,1/2,3 for three; "
        "classes with names have the numbers of their order",
        needs={"partition": ("classes",)},
        is_needed=True,
    )
    min_examples: int = option(
        2,
        "examples, test rows among them unless these are of your own split, that every "
        "client must get; of a text by owner, owners with fewer are left out",
        minimum=2,
    )
    examples_per_client: int = option(
        0,
        "use only this many examples per client on average, 0 = all",
        minimum=0,
        excludes={"partition": ("natural", "file:PATH", *partitions.SIZED)},
    )
    train_share: float = _image_option(
        1.0,
        "train on this fraction of each client's train rows, of each class the first",
        above=0,
        maximum=1,
    )
    export_partition: str = option(
        "", "file to write each client's rows to, for file:PATH", role=NOWHERE
    )
    proxy_fraction: float | None = _image_option(
        None,
        "fraction of every class set aside as proxy set, on which no client trains by "
        "itself; methods with a proxy or public set learn from it",
        minimum=0,
        below=1,
    )
    public_set: str | None = _image_option(
        None,
        "data set whose train images, without labels, all clients share (or, by the "
        "algorithm, the server alone has), or none; in Python also an array of them",
        excludes={"proxy_fraction": options.ON},
        off="none",
    )
    val_split: float = option(
        0.0,
        "set aside this fraction of each client's train rows as validation rows, "
        "0 = none or the data's own; all val_ metrics are on these",
        minimum=0,
        below=1,
    )
    unseen_clients: float = option(
        0.0,
        "clients that never train and are measured alone (unseen_accuracy), a number "
        "or a fraction below 1; drawn by the partition's seed",
        minimum=0,
        excludes={"eval_sample": options.ON},
    )
    unseen_names: str = option(
        "",
        "clients that never train, in place of --unseen_clients: owners' names, or "
        "numbers of clients without owners, separated by commas, or a JSON list",
        excludes={"unseen_clients": options.ON, "eval_sample": options.ON},
    )
    test_split: str | None = option(
        None, "where test rows come from", choices=partitions.TEST_SPLITS
    )
    num_clients: int | None = option(None, "clients [K]", minimum=1, label="always")


@dataclasses.dataclass(frozen=True)
class Model:
    """The models and their initial parameters."""

    model: str | None = option(None, "the server's model, and the clients' by default")
    client_model: str | None = option(
        None,
        "the clients' model; several names with commas are assigned in turn, for "
        "algorithms that allow several architectures",
    )
    model_width: float = option(
        1.0, "factor on hidden channels and widths", above=0, maximum=1000
    )
    init_from: str = option(
        "", "file of a model (launch.export) that server and clients start from"
    )


@dataclasses.dataclass(frozen=True)
class Training:
    """The clients of a round; how they train is decided by the algorithm."""

    clients_per_round: int | None = option(
        None, "clients drawn in each round, 0 = all", minimum=0
    )
    availability: str = option(
        "",
        "chance that a client is available in a round, or a JSON list (or file:PATH "
        "of it) with each client's chance, or its list of chances by round, which "
        "repeats; a round draws among available clients, at least one",
    )
    interrupted: float = option(
        0.0,
        "chance that a client stops early in a round, after 1 to n - 1 of its n local "
        "steps; what it has then counts as usual",
        minimum=0,
        maximum=1,
    )
    client_speed: str = option(
        "",
        "speeds of simulated devices, 1 = 10^9 multiply-accumulates a second: "
        "lognormal:S (median 1, drawn by the partition's seed) or a JSON list (or "
        "file:PATH of it), default all 1; with it or --round_seconds records have a "
        "clock",
    )
    round_seconds: float = option(
        0.0,
        "deadline of a round by the clock of simulated devices: clients take the steps "
        "that they manage, and those that manage none are not drawn; 0 = none",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """When models are evaluated, and on which rows."""

    eval_every: int | None = option(
        None, "rounds between evaluations", minimum=1, label="never"
    )
    eval_clients: str | None = option(
        None,
        "clients behind c_spec, c_gen, c_per; selected = those of the next round",
        choices=("selected", "all"),
        needs={"c_gen": (True,)},
        is_noted=True,
    )
    eval_sample: int = option(
        0, "evaluate only this many clients, drawn once by seed, 0 = all", minimum=0
    )
    eval_train: bool = option(False, "also evaluate the server's model on train rows")
    eval_metrics: str = _image_option(
        "", f"also measure these, separated by commas: {', '.join(measures.NAMES)}"
    )
    fine_tune_epochs: int = option(
        0,
        "also measure clients' models after so many epochs on their own train rows, "
        "0 = not; the run is unchanged",
        minimum=0,
    )
    eval_moments: str = _image_option(
        "before",
        "when clients' models are measured: before a round's local training (what "
        "serves them), after it (trained_accuracy, of the clients of the last round) "
        "or both; local and methods with peers always measure both",
        choices=("before", "after", "both"),
    )
    c_gen: bool | None = _image_option(
        None, "also evaluate clients' models on all clients' test rows"
    )
    summary: str | None = option(
        None,
        "how a curve becomes one number; last10 = of fewer than 40 rounds a quarter, "
        "for the median without the last one; best_validation = each seed's metrics "
        "after the round with the best val_client_accuracy (of a text perplexity, and "
        "without clients' validation rows val_global_...); best = after that with the "
        "best accuracy on all clients' test rows, as others' tables do",
        choices=SUMMARIES,
    )
    choose_by: str = _image_option(
        "",
        "what of validation rows chooses a round (--summary=best_validation, "
        "--early_stop), a point of a sweep, and what a study tunes: loss, or one of "
        "--eval_metrics, of clients or else of the server's model; empty = accuracy",
        choices=("", "loss", "macro_f1", "balanced_accuracy", "auc"),
    )
    client_metrics: str = option(
        "summary",
        "evaluations of which each client's accuracy and --eval_metrics are kept "
        "(clients.npz): those of --summary, or every one",
        choices=("summary", "every"),
        label="never",
    )
    early_stop: int = option(
        0,
        "end the run when no seed's validation, as in --summary=best_validation, has "
        "become better for this many rounds, 0 = never",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices, processes, and how clients are computed together."""

    client_chunk: int = option(
        0, "clients vmapped together, 0 = chosen by backend", minimum=0, role=EXECUTION
    )
    min_chunk: int = option(
        0, "least chunk on an accelerator, 0 = the cheapest", minimum=0, role=EXECUTION
    )
    bucketed: bool = option(
        True, "compute submodels alone, not whole models with masks", role=EXECUTION
    )
    devices: int = option(
        0,
        "devices that share the clients, 0 = all; the cores of a CPU are devices, at "
        "most as many as a round has clients, or one for 32 of tiny models",
        minimum=0,
        role=EXECUTION,
    )
    distributed: str = option(
        "",
        "several processes as one run: auto on a cluster (TPU pods, SLURM, Open MPI), "
        "or HOST:PORT,COUNT,INDEX with the address of process 0",
        role=NOWHERE,
    )
    emulate: str = option(
        "",
        "choose chunks and vmapped axes as on an accelerator, for tests on a CPU",
        choices=("", "accelerator"),
        role=NOWHERE,
    )
    client_state: str = option(
        "device",
        "where the models and optimizer states of clients are kept: device (of several "
        "each has a part, or on a CPU a copy of at most 1 GiB in all), replicated (all "
        "on every device), host (its memory), or a folder (a file there); the device "
        "then has those that train",
        role=EXECUTION,
    )
    precision: str = option(
        "f32",
        "of layers: bf16 = activations and products in bfloat16, all else in float32; "
        "tf32 or bf16_matmul = float32 with matrix products of lower precision, which "
        "a CPU ignores",
        choices=tuple(PRECISIONS),
    )
    compile_cache: str = option(
        "",
        "folder of compiled programs, or off; default that of jax's settings or else "
        "the user's",
        role=NOWHERE,
    )


SECTIONS = (Run, Data, Model, Training, Evaluation, Machine)


# The fields are ordered from the last base to the first.
@dataclasses.dataclass(frozen=True)
class Config(Machine, Evaluation, Training, Model, Data, Run):
    """The options of a run of any algorithm; None = see `resolve.resolve`."""


def groups() -> dict[str, list[str]]:
    """The names of the options by section, for `--help`."""
    return {
        section.__name__.lower(): [field.name for field in dataclasses.fields(section)]
        for section in SECTIONS
    }


def names(role: str) -> frozenset[str]:
    """The options of a role; `EXECUTION` includes those of `NOWHERE`."""
    wanted = {role, NOWHERE} if role == EXECUTION else {role}
    fields = dataclasses.fields(Config)
    return frozenset(f.name for f in fields if f.metadata["role"] in wanted)


def labelled(how: str) -> list[str]:
    """The options with this `label`."""
    fields = dataclasses.fields(Config)
    return [field.name for field in fields if field.metadata["label"] == how]
