"""Checks an algorithm by the rules of all: `python -m launch.contract --algo=mine.py`.

It takes the options of `launch.main` but those that write files and those of chunks,
which it chooses itself, and prints the rules that hold or the first that does not. In
Python it is `contract.check(algo)`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from fedjax_pfl import each_client, local_training
from fedjax_pfl.rows import hosted, views
from launch import ending
from launch import experiment as experiment_lib
from launch.assemble import models_step
from launch.config import algorithm_file, flags, presets, registry
from launch.experiment import Experiment
from launch.machine import residence

# Up to so much numbers differ by rounding, at the usual rate; less at a lower one
TOLERANCE, MILD_LR = 1e-3, 0.01
# Rows of an epoch by the rules of a paper
_ROWS = 40
# Numbers to add to padding rows, of which the first leaves them those of clients
_PADDING = 1e-30, 0.25


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
            train an `mlp` for an epoch, and by other presets on 40 rows an epoch.
    """
    if rounds < 2:
        raise ValueError(f"rounds={rounds}: expected at least 2")
    for option in sorted(_WITHOUT & options.keys()):
        raise ValueError(
            f"--{option}={options[option]}: a check writes no file and chooses how "
            "clients are computed; omit it"
        )
    runs = _Runs(algo, {"rounds": rounds, "eval_every": rounds, "devices": 1} | options)
    rules = runs.rules()
    for rule, broken in rules:
        if found := broken():
            raise BrokenError(f"{runs.name} breaks: {rule} {found}")
    return [rule for rule, _ in rules]


class _Watched:
    """An algorithm whose rounds note what they send.

    Attributes:
        name: That of the algorithm.
        undeclared: The names of sent messages without a declared kind.
        has_plans: Whether clients train.
    """

    def __init__(self, algo: Any):
        self.undeclared: set[str] = set()
        self.has_plans = False
        self._algo = registry.algorithm(algo)
        self.name = registry.algorithm_name(algo)

    def entry(self, algo: Any = None, inside: Callable = contextlib.nullcontext) -> Any:
        """The entry of the algorithm, or of `algo`, with rounds traced inside."""
        made = self._algo if algo is None else registry.algorithm(algo)
        make = functools.partial(self._made, made.make, inside)
        return dataclasses.replace(made, make=make, name=self.name)

    def _made(self, make: Callable, inside: Callable, hparams: Any, task: Any) -> Any:
        made = make(hparams, task)
        known = {kind.name for kind in made.messages}
        self.has_plans |= bool(made.plans)

        def round(*given: Any) -> Any:
            with inside():
                out = made.round(*given)
            self.undeclared.update(out[2].keys() - known)
            return out

        return made._replace(round=round)


def _mild(options: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Options with which rounding stays small, and up to what numbers then differ."""
    entry, tolerance = options["algo"], TOLERANCE
    known = registry.fields_of(entry)
    out = dict(options)
    # Adam turns rounding errors into steps, for instance of a bias before a norm.
    adaptive = {name for name, field in known.items() if field.default == "adam"}
    for name in {"client_optimizer", *adaptive} & known.keys() - entry.fixed.keys():
        out.setdefault(name, "sgd")
    tx = out.get("client_optimizer")
    if "client_lr" in known and not isinstance(tx, optax.GradientTransformation):
        # Many steps at a high rate make large differences of them.
        out.setdefault("client_lr", MILD_LR)
        usual = known["client_lr"].default
        # Lower rates do not round less: a server's Adam makes whole steps of it.
        rate = max(out["client_lr"], MILD_LR)
        tolerance *= min(rate / usual, 1) if usual else 1
    if "dataset" not in options:
        # A paper's epochs over all rows would be many steps.
        mild = {"examples_per_round": _ROWS}
        if entry.preset == presets.BASE:
            mild = {"model": "mlp", "local_epochs": 1}
        out = {name: mild[name] for name in mild if name in known} | out
    return out, tolerance


class _Runs:
    """The runs of a check, whose rules return what to do, "" where they hold."""

    def __init__(self, algo: Any, options: dict[str, Any]):
        self._algo, self._watched = algo, _Watched(algo)
        self.name = self._watched.name
        options = options | {"algo": self._watched.entry()}
        self._options, self._tolerance = _mild(options)
        if "clients_per_round" not in options:
            num_clients = self._fresh(client_chunk=1).config.num_clients
            few = min(num_clients, max(3, num_clients // 2))
            self._options["clients_per_round"] = few
        self._first = self._fresh(client_chunk=1)
        self._first.start()
        self._begun = _numbers(self._first.state.server)
        _ran(self._first)
        # So many at a time that the last ones are beside padding rows
        count = self._first.config.clients_per_round
        uneven = [n for n in (3, *range(2, count)) if n < count and count % n]
        self._most, self._has_padding = [*uneven, count][0], bool(uneven)
        if self._first.program.algorithm.is_among_zeros:
            try:
                self._fresh(client_chunk=self._most)
            except models_step.AmongZerosError:  # each client is computed alone
                self._most, self._has_padding = 1, False

    def rules(self) -> list[tuple[str, Callable[[], str]]]:
        """The rules that can be tested, the quick ones first."""
        config, clients = self._first.config, self._first.task.client_models
        # With several architectures each has its own table, whose slots are not ids.
        has_absent = config.clients_per_round < config.num_clients and len(clients) == 1
        has_plans = self._watched.has_plans
        has_batches = "batch_size" in registry.fields_of(self._options["algo"])
        elsewhere = self._hosted() if has_absent else None
        where = "Where clients are computed does not matter (padding is not tested)."
        if self._has_padding:
            where = (
                "How many clients are computed together, and where, does not matter."
            )
        every = (
            (True, "Every message has a declared kind.", self._undeclared),
            (has_absent, "Absent clients keep their private rows.", self._absent),
            (
                has_plans and bool(self._begun),
                "The server's state changes in rounds.",
                self._stuck,
            ),
            (True, "The same seed gives the same bits.", self._random),
            (
                True,
                "A run that was stopped and resumed gives the same bits.",
                self._forgotten,
            ),
            (True, where, self._elsewhere),
            (
                elsewhere is not None,
                "Which private rows a device holds, and in which order, does not "
                "matter.",
                lambda: self._kept_elsewhere(elsewhere),
            ),
            (
                self._has_padding,
                "What is in padding rows does not matter.",
                self._beside_padding,
            ),
            (
                has_plans and has_batches,
                "What fills a batch, and how far, does not matter.",
                self._padded,
            ),
        )
        return [(rule, broken) for is_testable, rule, broken in every if is_testable]

    def _fresh(self, **more: Any) -> Experiment:
        return experiment_lib.experiment(**self._options | more)

    def _undeclared(self) -> str:
        names = ", ".join(sorted(self._watched.undeclared))
        return f"add a MessageKind for {names}" if names else ""

    def _absent(self) -> str:
        if _absent_stay(self._fresh(client_chunk=1)):
            return ""
        return "read and write state.clients at cohort.row only"

    def _stuck(self) -> str:
        pairs = zip(self._begun, _numbers(self._first.state.server), strict=True)
        if not all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
            return ""
        return (
            f"after {self._first.config.rounds} rounds it is what it was; return "
            "here.after(server=new)"
        )

    def _random(self) -> str:
        again = self._options["algo"]
        if algorithm_file.is_one(self._algo):  # a file runs once more
            algorithm_file.forget()
            again = self._watched.entry(self._algo)
        if not _difference(self._first, _ran(self._fresh(client_chunk=1, algo=again))):
            return ""
        return "draw random numbers from client.stream(tag) or rng.stream alone"

    def _forgotten(self) -> str:
        other = _resumed(lambda: self._fresh(client_chunk=1))
        if not _difference(self._first, other):
            return ""
        return "keep everything that a later round needs in the state"

    def _elsewhere(self) -> str:
        """Runs that compute clients otherwise end within rounding."""
        ways = (
            (f"{self._most} clients at a time", lambda: self._together),
            ("all devices", lambda: _ran(self._fresh(client_chunk=1, devices=0))),
        )
        for way, other in ways:
            if (by := _difference(self._first, other())) > self._tolerance:
                return (
                    f"With {way} a number ends {by:.1e} away, more than "
                    f"{self._tolerance:g}: a client's function may read its own row "
                    "only, and means must take cohort.row_mask into account. If a "
                    "smaller client_lr makes it vanish, it was rounding, which a "
                    "server's adaptive optimizer (Adam) makes larger: check it with SGD"
                )
        return ""

    def _hosted(self) -> Experiment | None:
        """A new run with its private rows on the host, None where that is refused."""
        options = self._options
        if not options["algo"].shares_rows or "client_state" in options:
            return None
        try:
            with hosted.with_few_residents():
                made = self._fresh(client_chunk=1, client_state="host")
            made.start()
        except (residence.NeededOnDeviceError, hosted.UnequalRowsError):
            return None
        return made

    def _kept_elsewhere(self, other: Experiment) -> str:
        """A run whose device holds the rows of a round's clients ends the same."""
        if (by := _difference(self._first, _ran(other))) <= self._tolerance:
            return ""
        return (
            f"With --client_state=host a number ends {by:.1e} away: read rows by "
            "here.rows or state.rows(cohort), those of peers at cohort.peers, and none "
            "at cohort.client_id, or do not declare shares_rows"
        )

    @functools.cached_property
    def _together(self) -> Experiment:
        """Several clients at a time, beside padding rows that are copies of clients."""
        return self._beside(_PADDING[0])

    def _beside(self, number: float) -> Experiment:
        """Several clients at a time, beside padding rows with so much more in them."""
        inside = functools.partial(each_client.padded_with, number)
        algo = self._watched.entry(inside=inside)
        return _ran(self._fresh(client_chunk=self._most, algo=algo))

    def _beside_padding(self) -> str:
        """Rows of no client may have any numbers, which are as if nobody had them."""
        by = _difference(self._together, self._beside(_PADDING[1]))
        if not by:
            return ""
        return (
            f"With other numbers there one ends {by:.1e} away: what here.rows and "
            "here.update return has rows of no client, which cohort.row_mask has to "
            "leave out of sums, maxima and comparisons of clients"
        )

    def _padded(self) -> str:
        """Runs with other and more masked rows in their batches end the same."""
        size = int(self._first.data.partition.train.count.max()) // 2 + 1
        fill = functools.partial(local_training.filled_from, 1)
        one, other = (
            _ran(self._fresh(client_chunk=1, batch_size=size, algo=algo))
            for algo in (self._options["algo"], self._watched.entry(inside=fill))
        )
        if (by := _difference(one, other)) <= self._tolerance:
            return ""
        return (
            f"With other and twice as many rows a number ends {by:.1e} away: a loss is "
            "a mean over the rows in batch.mask, as losses.cross_entropy and "
            "losses.masked_mean are"
        )


def _ran(experiment: Experiment) -> Experiment:
    experiment.run(progress=False)
    return experiment


def _resumed(fresh: Callable[[], Experiment]) -> Experiment:
    """Splits a run between two experiments, as a checkpoint does."""
    before, after = fresh(), fresh()
    before.run(before.config.rounds // 2, progress=False)
    arrays, host = before.saved()
    arrays = jax.tree.map(lambda leaf: views.materialised(leaf).copy(), arrays)
    after.load(before.round, arrays, host, before.metrics)
    return _ran(after)


def _difference(one: Experiment, other: Experiment) -> float:
    """The largest difference of two states, of numbers above 1 as a share of them.

    It is infinite if they do not serve the same clients, or not with finite numbers.
    """
    pairs = [_numbers((e.state.server, e.state.clients)) for e in (one, other)]
    served = [np.isfinite(e.kept.arrays) for e in (one, other)]
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
