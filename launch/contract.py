"""Checks a custom algorithm against the rules that every algorithm here follows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_pfl.rows import views
from launch import experiment as experiment_lib
from launch.config import registry
from launch.experiment import Experiment


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
            the clients are drawn in each round, and they train with SGD.
    """
    if rounds < 2:
        raise ValueError(f"rounds={rounds}: expected at least 2")
    entry, name = registry.algorithm(algo), registry.algorithm_name(algo)
    undeclared = set()

    def make(hparams: Any, task: Any) -> Any:
        made = entry.make(hparams, task)
        known = {kind.name for kind in made.messages}

        def round(state: Any, cohort: Any, data: Any) -> Any:
            out = made.round(state, cohort, data)
            undeclared.update(out[2].keys() - known)
            return out

        return made._replace(round=round)

    options = {"rounds": rounds, "eval_every": rounds, "devices": 1} | options
    options["algo"] = dataclasses.replace(entry, make=make, name=name)
    for varied in ("client_chunk", "min_chunk"):
        options.pop(varied, None)
    if "client_optimizer" in registry.fields_of(options["algo"]):
        # Adam turns rounding errors into steps, for instance of a bias before a norm.
        options.setdefault("client_optimizer", "sgd")

    def fresh(**more: Any) -> Experiment:
        return experiment_lib.experiment(**options | more)

    if "clients_per_round" not in options:
        options["clients_per_round"] = max(1, fresh().config.num_clients // 2)
    first = _ran(fresh(client_chunk=1))

    rules: list[tuple[str, Callable[[], bool], str]] = [
        (
            "Every message has a declared kind.",
            lambda: not undeclared,
            f"add a MessageKind for {', '.join(sorted(undeclared))}",
        ),
        (
            "The same seed gives the same bits.",
            lambda: _equal(first, _ran(fresh(client_chunk=1))),
            "draw random numbers from client.stream(tag) or rng.stream alone",
        ),
        (
            "A run that was stopped and resumed gives the same bits.",
            lambda: _equal(first, _resumed(lambda: fresh(client_chunk=1), rounds)),
            "keep everything that a later round needs in the state",
        ),
        (
            "How many clients are computed together, and where, does not matter.",
            lambda: all(
                _equal(first, _ran(fresh(client_chunk=chunk, devices=devices)), 1e-3)
                for chunk, devices in ((3, 1), (1, 0))
            ),
            "a client's function may read its own row only, and means must take "
            "cohort.row_mask into account",
        ),
    ]
    are_some_absent = first.config.clients_per_round < first.config.num_clients
    # With several architectures each has its own table, whose slots are not ids.
    if are_some_absent and len(first.task.client_models) == 1:
        rule = "Absent clients keep their private rows."
        cure = "read and write state.clients at cohort.row only"
        absent = (rule, lambda: _absent_stay(fresh(client_chunk=1)), cure)
        rules.insert(1, absent)  # before the longer checks
    for rule, holds, cure in rules:
        if not holds():
            raise BrokenError(f"{name} breaks: {rule} {cure}")
    return [rule for rule, *_ in rules]


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


def _equal(one: Experiment, other: Experiment, tolerance: float = 0.0) -> bool:
    """Whether two states are equal up to a tolerance, and serve the same clients."""
    pairs = [jax.tree.leaves((e.state.server, e.state.clients)) for e in (one, other)]
    served = [np.isfinite(e.client_accuracies) for e in (one, other)]
    return np.array_equal(*served) and all(
        np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        for a, b in zip(*pairs, strict=True)
    )


def _absent_stay(experiment: Experiment) -> bool:
    """Whether a round leaves the private rows of absent clients, bit for bit."""
    experiment.start()
    before = [np.array(leaf) for leaf in jax.tree.leaves(experiment.state.clients)]
    drawn = experiment.planner.drawn(0, 0)
    present = np.asarray(drawn.client_id)[np.asarray(drawn.row_mask)]
    experiment.run(1, progress=False)
    absent = np.setdiff1d(np.arange(experiment.config.num_clients), present)
    after = map(np.asarray, jax.tree.leaves(experiment.state.clients))
    pairs = zip(before, after, strict=True)
    return all(np.array_equal(a[:, absent], b[:, absent]) for a, b in pairs)
