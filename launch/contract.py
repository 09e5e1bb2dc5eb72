"""Checks an algorithm by the rules of all: `python -m launch.contract --algo=mine.py`.

It takes the options of `launch.main` but those that write files and those of chunks,
which it chooses itself, and prints the rules that hold or the first that does not. In
Python it is `contract.check(algo)`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_pfl import local_training
from fedjax_pfl.rows import views
from launch import ending
from launch import experiment as experiment_lib
from launch.assemble import models_step
from launch.config import algorithm_file, flags, presets, registry
from launch.experiment import Experiment

# Up to so much numbers differ by rounding, at the usual rate; less at a lower one
TOLERANCE, MILD_LR = 1e-3, 0.01


# Options of a run that a check has not
_WITHOUT = {"workdir", "resume", "csv", "tensorboard", "wandb", "export_partition"}
_WITHOUT |= {"keep_best", "client_chunk", "min_chunk", "target"}


class BrokenError(ValueError):
    """One line about a rule that an algorithm breaks."""


def check(algo: Any, *, rounds: int = 4, **options: Any) -> list[str]:
    """Runs an algorithm a few times and compares the results.

    Returns the rules that hold, one sentence each, without those that could not be
    tested. Raises BrokenError for a rule that does not hold; its message says what to
    look for.

    Args:
        algo: A name, or a custom algorithm.
        rounds: Rounds of each run, at least 2.
        **options: As in `build.experiment`; small data are enough. By default half of
            the clients, but at least three, are drawn in each round, and they train
            with SGD at a low rate. With fewer than three no row is ever padding.
            Without a `dataset`, and with an algorithm whose preset is `none`, they
            train an `mlp` for an epoch.
    """
    if rounds < 2:
        raise ValueError(f"rounds={rounds}: expected at least 2")
    for option in sorted(_WITHOUT & options.keys()):
        raise ValueError(
            f"--{option}={options[option]}: a check writes no file and chooses how "
            "clients are computed; omit it"
        )
    entry, name = registry.algorithm(algo), registry.algorithm_name(algo)
    undeclared, plans = set(), set()

    def make(hparams: Any, task: Any, entry: Any = entry) -> Any:
        made = entry.make(hparams, task)
        known = {kind.name for kind in made.messages}
        plans.update(made.plans)

        def round(state: Any, cohort: Any, data: Any) -> Any:
            out = made.round(state, cohort, data)
            undeclared.update(out[2].keys() - known)
            return out

        return made._replace(round=round)

    def make_filled(hparams: Any, task: Any) -> Any:
        made = make(hparams, task)

        def round(*given: Any) -> Any:
            with local_training.filled_from(1):
                return made.round(*given)

        return made._replace(round=round)

    options = {"rounds": rounds, "eval_every": rounds, "devices": 1} | options
    options["algo"] = dataclasses.replace(entry, make=make, name=name)
    filled = dataclasses.replace(entry, make=make_filled, name=name)
    if "client_optimizer" in registry.fields_of(options["algo"]):
        # Adam turns rounding errors into steps, for instance of a bias before a norm.
        options.setdefault("client_optimizer", "sgd")
    known, tolerance = registry.fields_of(options["algo"]), TOLERANCE
    if "client_lr" in known:
        # Many steps at a high rate make large differences of them.
        options.setdefault("client_lr", MILD_LR)
        usual = known["client_lr"].default
        tolerance *= min(options["client_lr"] / usual, 1) if usual else 1
    if "dataset" not in options and entry.preset == presets.BASE:
        mild = {"model": "mlp", "local_epochs": 1}
        options = {name: mild[name] for name in mild if name in known} | options

    def fresh(**more: Any) -> Experiment:
        return experiment_lib.experiment(**options | more)

    def run_again() -> Any:
        """The algorithm, of a file that has run once more."""
        if not algorithm_file.is_one(algo):
            return options["algo"]
        algorithm_file.forget()
        other = functools.partial(make, entry=registry.algorithm(algo))
        return dataclasses.replace(entry, make=other, name=name)

    if "clients_per_round" not in options:
        num_clients = fresh(client_chunk=1).config.num_clients
        options["clients_per_round"] = min(num_clients, max(3, num_clients // 2))
    first = fresh(client_chunk=1)
    first.start()
    begun = _numbers(first.state.server)
    _ran(first)

    # So many at a time that the last ones are beside padding rows
    count = first.config.clients_per_round
    uneven = next((n for n in (3, *range(2, count)) if n < count and count % n), 0)
    most = uneven or count
    if first.program.algorithm.is_among_zeros:
        try:
            fresh(client_chunk=most)
        except models_step.AmongZerosError:  # each client is computed alone
            most, uneven = 1, 0

    def elsewhere() -> str:
        """Runs that compute clients otherwise end within rounding."""
        ways = {f"{most} clients at a time": (most, 1), "all devices": (1, 0)}
        for way, (chunk, devices) in ways.items():
            other = _ran(fresh(client_chunk=chunk, devices=devices))
            if (by := _difference(first, other)) > tolerance:
                return (
                    f"With {way} a number ends {by:.1e} away, more than {tolerance:g}: "
                    "a client's function may read its own row only, and means must "
                    "take cohort.row_mask into account. If a smaller client_lr makes "
                    "it vanish, it was rounding"
                )
        return ""

    def padded() -> str:
        """Runs with other and more masked rows in their batches end the same."""
        size = int(first.data.partition.train.count.max()) // 2 + 1
        one, other = (
            _ran(fresh(client_chunk=1, batch_size=size, algo=algo))
            for algo in (options["algo"], filled)
        )
        if (by := _difference(one, other)) <= tolerance:
            return ""
        return (
            f"With other and twice as many rows a number ends {by:.1e} away: a loss is "
            "a mean over the rows in batch.mask, as losses.cross_entropy and "
            "losses.masked_mean are"
        )

    def stuck() -> str:
        """The server's state changes in some round."""
        pairs = zip(begun, _numbers(first.state.server), strict=True)
        if not all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
            return ""
        return f"after {rounds} rounds it is what it was; return here.after(server=new)"

    def equal(other: Experiment, cure: str) -> str:
        return cure if _difference(first, other) else ""

    gossip = f"add a MessageKind for {', '.join(sorted(undeclared))}"
    random = "draw random numbers from client.stream(tag) or rng.stream alone"
    state = "keep everything that a later round needs in the state"
    # Each check returns what to do, "" if the rule holds.
    rules: list[tuple[str, Callable[[], str]]] = [
        ("Every message has a declared kind.", lambda: gossip if undeclared else ""),
        (
            "The same seed gives the same bits.",
            lambda: equal(_ran(fresh(client_chunk=1, algo=run_again())), random),
        ),
        (
            "A run that was stopped and resumed gives the same bits.",
            lambda: equal(_resumed(lambda: fresh(client_chunk=1), rounds), state),
        ),
        (
            "How many clients are computed together, and where, does not matter."
            if uneven
            else "Where clients are computed does not matter (padding is not tested).",
            elsewhere,
        ),
    ]
    if plans and begun:
        rules.insert(1, ("The server's state changes in rounds.", stuck))
    if plans and "batch_size" in known:
        rules.append(("What fills a batch, and how far, does not matter.", padded))
    are_some_absent = first.config.clients_per_round < first.config.num_clients
    # With several architectures each has its own table, whose slots are not ids.
    if are_some_absent and len(first.task.client_models) == 1:
        rule = "Absent clients keep their private rows."
        cure = "read and write state.clients at cohort.row only"
        absent = (rule, lambda: "" if _absent_stay(fresh(client_chunk=1)) else cure)
        rules.insert(1, absent)  # before the longer checks
    for rule, broken in rules:
        if found := broken():
            raise BrokenError(f"{name} breaks: {rule} {found}")
    return [rule for rule, _ in rules]


def _ran(experiment: Experiment) -> Experiment:
    experiment.run(progress=False)
    return experiment


def _resumed(fresh: Callable[[], Experiment], rounds: int) -> Experiment:
    """Splits a run between two experiments, as a checkpoint does."""
    before, after = fresh(), fresh()
    before.run(rounds // 2, progress=False)
    arrays, host = before.saved()
    arrays = jax.tree.map(lambda leaf: views.materialised(leaf).copy(), arrays)
    after.load(before.round, arrays, host, before.metrics)
    return _ran(after)


def _difference(one: Experiment, other: Experiment) -> float:
    """The largest difference of two states, of numbers above 1 as a share of them.

    It is infinite if they do not serve the same clients, or not with finite numbers.
    """
    pairs = [_numbers((e.state.server, e.state.clients)) for e in (one, other)]
    served = [np.isfinite(e.client_accuracies) for e in (one, other)]
    if not np.array_equal(*served):
        return np.inf
    return max((_apart(a, b) for a, b in zip(*pairs, strict=True)), default=0.0)


def _numbers(tree: Any) -> list[np.ndarray]:
    """Copies of a state's arrays, in which random keys are their numbers."""
    leaves = map(views.materialised, jax.tree.leaves(tree))
    return [np.array(views.numbers(leaf)) for leaf in leaves]


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    if np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    is_other = (a != b) & ~(np.isnan(a) & np.isnan(b))
    a, b = a[is_other], b[is_other]
    far = np.abs(a - b) / np.maximum(np.abs(b), 1)
    return float(np.nan_to_num(far, nan=np.inf).max(initial=0.0))


def _absent_stay(experiment: Experiment) -> bool:
    """Whether a round leaves the private rows of absent clients, bit for bit."""
    experiment.start()
    before = _numbers(experiment.state.clients)
    planner, variants = experiment.planner, experiment.simulation.variants
    cohorts = [planner.drawn(variants.seed(one), 0) for one in range(variants.count)]
    experiment.run(1, progress=False)
    after = _numbers(experiment.state.clients)
    for one, drawn in enumerate(cohorts):
        present = np.asarray(drawn.client_id)[np.asarray(drawn.row_mask)]
        absent = np.setdiff1d(np.arange(experiment.config.num_clients), present)
        pairs = zip(before, after, strict=True)
        if not all(np.array_equal(a[one, absent], b[one, absent]) for a, b in pairs):
            return False
    return True


@ending.command
def command(argv: list[str]) -> None:
    """Checks the algorithm of `--algo`; the exit code is 1 if it breaks a rule."""
    given = flags.parse(argv)
    with ending.refused():
        name = registry.algorithm_name(given["algo"])
        try:
            rules = check(**given)
        except BrokenError as error:
            flags.fail(error, 1)
    print("\n".join(f"{name} holds: {rule}" for rule in rules))


if __name__ == "__main__":
    command()
