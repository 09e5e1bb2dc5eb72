"""The host's milliseconds beside the devices: of calls, evaluations, plans and rows."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from data import plan
from fedjax_pfl import execution, types, windows
from fedjax_pfl.rows import kinds
from launch import build
from launch.tables import examples

REPEATS = 60
EVERY = 5  # rounds from one evaluation to the next
COHORTS = 10, 100, 1000, 10_000
# The clients whose rows are on the host, of which a hundred train in a round
CLIENTS_WITH_ROWS = 10_000
# With these a client keeps as many numbers as the model has, with any algorithm.
KEPT = {"optimizer_state": "persist", "client_momentum": 0.9}
# One client a round, which takes one step on four rows: hardly anything to compute
TINY = {
    "partition": "natural",
    "test_split": "pool",
    "preset": "none",
    "model": "mlp",
    "clients_per_round": 1,
    "batch_size": 4,
    "local_epochs": 1,
    "eval_every": EVERY,
}


def measure(given: Mapping[str, Any]) -> dict[str, Any]:
    """Median milliseconds of a run whose rounds are nearly empty; `given` options win.

    A call is one of a round without an evaluation. With an evaluation every `EVERY`
    rounds, `advance` runs the rounds and dispatches it, `launch` dispatches the next
    rounds behind it, and `read` waits for it and makes the record. `plan` is that of a
    round, by the clients in it (60 rows each, two epochs), in windows as full as those
    of a run. `rows` are processor milliseconds of a round in which clients keep their
    momentum, on the device and on the host, without an evaluation; these have numbers
    of clients of their own. Raises ValueError for a target.
    """
    if given.get("target"):
        raise ValueError(f"--target={given['target']}: --call runs on this machine")
    data = {"dataset": examples.draw(100, 4)}
    experiment = build.experiment(**TINY | data | given | {"rounds": 10**6})
    simulation = experiment.simulation
    names = "call", "advance", "launch", "read"
    taken: dict[str, list[float]] = {name: [] for name in names}

    def timed(name: str, act: Any, *args: Any) -> None:
        begin = time.perf_counter()
        act(*args)
        taken[name].append(1e3 * (time.perf_counter() - begin))

    for _ in range(REPEATS):
        timed("call", simulation.advance, experiment.round + 1)
        # A window may end before.
        while not experiment.is_due(experiment.round):
            at = simulation.advance, experiment.next_stop(), experiment.is_due
            timed("advance", *at)
        timed("launch", experiment.launch, 0, experiment.config.rounds)
        timed("read", experiment.measure)
        while experiment.is_launched or not experiment.is_due(experiment.round):
            simulation.advance(experiment.next_stop(), experiment.is_due)
        experiment.measure()
    out: dict[str, Any] = {"algo": experiment.config.algo}
    out |= {f"{name}_ms": float(np.median(ms[3:])) for name, ms in taken.items()}
    out["plan_ms"] = {str(size): _planning(size) for size in COHORTS}
    return out | {"rows_ms": _with_rows(given)}


def _with_rows(given: Mapping[str, Any]) -> dict[str, float]:
    """Processor milliseconds of a round by the home of private rows, in turn."""
    count = CLIENTS_WITH_ROWS
    of_run = {"dataset": examples.draw(count, 4), "rounds": 10**6}
    of_run |= {"clients_per_round": min(100, count), "eval_every": 10**6}
    ours = ("num_clients", "clients_per_round")
    mine = {name: value for name, value in given.items() if name not in ours}
    options = TINY | KEPT | mine | of_run
    homes = {
        home: build.experiment(**options | {"client_state": home}).simulation
        for home in ("device", "host")
    }
    taken: dict[str, list[float]] = {home: [] for home in homes}
    for _ in range(4):
        for home, simulation in homes.items():
            first, begin = simulation.round, time.process_time()
            simulation.advance_to(first + REPEATS)
            spent = time.process_time() - begin
            taken[home].append(1e3 * spent / (simulation.round - first))
    # The first of each compiles.
    return {home: round(float(np.median(ms[1:])), 2) for home, ms in taken.items()}


def _planning(size: int) -> float:
    """Milliseconds of the plan of a round of so many clients, of ten times as many."""
    count, spec = 10 * size, types.PlanSpec("local", 2, 20)
    how = execution.Execution()
    planner = plan.Planner(
        seeds=[0],
        num_rows=np.full((1, count), 60),
        client_group=np.zeros(count, int),
        level_of=np.ones(count, int),
        clients_per_round=size,
        specs=[spec],
        execution=how,
    )
    rows = kinds.Replicated(count, how)
    made, first, taken = windows.Windows(planner, 1, [], [spec], how, rows), 0, []
    for _ in range(5):
        begin = time.perf_counter()
        end = made.make(first, 10**6).end
        taken.append(1e3 * (time.perf_counter() - begin) / (end - first))
        first = end
    return round(min(taken), 3)
