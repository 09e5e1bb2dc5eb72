"""One cell of a study, in a process of its own: `python -m launch.study.cell`.

It reads the settings of the cell as a line of JSON from its input, and ends when its
input does. The last line of its output is a JSON object with the figures, the versions
and the machine.
"""

import json
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from launch import cells, ending
from launch.machine import devices
from launch.study import child, loops, member

Settings = Mapping[str, Any]
FIRST = 1  # the round before it warms up


def _seconds(settings: Settings, run: Callable[[int, int], float]) -> dict[str, float]:
    """Seconds of a round over the repeats; `run` returns those of some rounds."""
    rounds, taken = settings["rounds"], []
    for repeat in range(settings["repeats"]):
        first = FIRST + repeat * rounds
        taken.append(run(first, first + rounds) / rounds)
    return {
        "seconds_per_round": float(np.median(taken)),
        "fastest": min(taken),
        "slowest": max(taken),
    }


def _total(settings: Settings) -> int:
    """Rounds of a cell, with the one that warms up."""
    return FIRST + settings["rounds"] * settings["repeats"]


def rounds(settings: Settings) -> dict[str, Any]:
    """Times the rounds of a run."""
    experiment = member.experiment(settings, _total(settings))
    simulation = experiment.simulation
    simulation.advance_to(FIRST)
    before = experiment.totals.client_updates

    def run(first: int, end: int) -> float:
        compiled, begin = experiment.compile_seconds, time.perf_counter()
        simulation.advance_to(end)
        seconds = time.perf_counter() - begin
        return seconds - (experiment.compile_seconds - compiled)

    found = _seconds(settings, run)
    totals, how = experiment.totals, experiment.task.execution
    timed = settings["rounds"] * settings["repeats"]
    updates = (totals.client_updates - before) / timed
    return found | {
        "client_updates_per_second": updates / found["seconds_per_round"],
        "padding_efficiency": totals.padding_efficiency,
        "step_efficiency": totals.step_efficiency,
        "compile_seconds": experiment.compile_seconds,
        "peak_memory_bytes": devices.peak_memory_bytes(),
        "client_chunk": how.chunk,
        "lanes": how.lanes,
        **member.planned_bytes(experiment),
    }


def loop(settings: Settings) -> dict[str, Any]:
    """Times the same rounds with one client after another."""
    # On one device, so that no other computes the same
    options = settings["options"] | {"client_chunk": 1, "lanes": "0", "devices": 1}
    experiment = member.experiment(settings | {"options": options}, _total(settings))
    made = loops.LOOPS[settings["how"]](experiment)
    made.prepare(0, _total(settings))
    made.run(0, FIRST)

    def run(first: int, end: int) -> float:
        begin = time.perf_counter()
        made.run(first, end)
        return time.perf_counter() - begin

    found = _seconds(settings, run)
    params = made.params()
    updates = experiment.config.clients_per_round * len(params)
    return found | {
        "client_updates_per_second": updates / found["seconds_per_round"],
        "state_bytes_per_device": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "peak_memory_bytes": devices.peak_memory_bytes(),
    }


def estimate(settings: Settings) -> dict[str, Any]:
    """Asks the compiler of a chip about the rounds."""
    experiment = member.experiment(settings, 2, target=settings["target"])
    found = experiment.cost_analysis()
    del found["programs"]
    return found


def several(settings: Settings) -> dict[str, Any]:
    """Runs on several fake devices or processes, and compares with one device.

    Fake devices share the machine's cores, so nothing is timed.
    """
    count = settings["processes"]
    on_each = settings["options"]["devices"] // count
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        found = member.start(settings, path / "several.npz", count, on_each)
        alone = settings | {"options": settings["options"] | {"devices": 1}}
        member.start(alone, path / "alone.npz", 1, 1)
        with np.load(path / "several.npz") as a, np.load(path / "alone.npz") as b:
            pairs = [(a[name], b[name]) for name in a if a[name].size]
            gaps = [np.abs(one.astype(float) - other).max() for one, other in pairs]
    return found | {"difference": float(max(gaps))}


def run(settings: Settings) -> dict[str, Any]:
    """Trains and evaluates, or goes on with a run that was interrupted."""
    begin = time.perf_counter()
    folder, options = pathlib.Path(settings["folder"]), settings["options"]
    done = cells.stored(folder, options) or cells.run(folder, options)
    return done["metrics"] | {
        "rounds": done["rounds"],
        "client_updates_per_second": done["client_updates_per_second"],
        "peak_memory_bytes": done["peak_memory_bytes"],
        "diverged": done["diverged"],
        "parameters_sha256": done["parameters_sha256"],
        "minutes": (time.perf_counter() - begin) / 60,
    }


KINDS = {
    "rounds": rounds,
    "loop": loop,
    "torch": loop,
    "estimate": estimate,
    "devices": several,
    "run": run,
}


def _machine() -> dict[str, Any]:
    """The machine in words."""
    info = pathlib.Path("/proc/cpuinfo")  # on Linux only
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return {
        "cpu": " ".join(
            (named or [platform.processor() or platform.machine()])[0].split()
        ),
        "cores": os.cpu_count(),
        "device": devices.name(),
        "devices": jax.device_count(),
    }


def _versions(how: str) -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
    }
    if how == "torch":
        found["torch"] = sys.modules["torch"].__version__
    return found


@ending.command
def command(argv: list[str]) -> None:
    """Makes the cell whose settings are on the input."""
    settings = child.settings()
    with ending.refused():
        try:
            figures = KINDS[settings["how"]](settings)
        except child.Failed as error:
            raise ValueError(error) from error
    out = {
        "figures": figures,
        "versions": _versions(settings["how"]),
        "machine": _machine(),
    }
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    command()
