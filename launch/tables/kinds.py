"""Runs one cell in a process of its own: `python -m launch.tables.kinds`.

It reads the cell's settings as a line of JSON from stdin, and ends when stdin closes.
The last line of its output is a JSON object: figures, versions and machine.
"""

import json
import math
import os
import pathlib
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from data import files
from launch import ending
from launch import experiment as experiment_lib
from launch.folder import finished
from launch.machine import devices, processes
from launch.tables import cells, child, examples, here, loops

Settings = Mapping[str, Any]
COLLECTIVES = {"all_gathers": "all-gather", "all_reduces": "all-reduce"}
# A collective in an optimised program, with the shapes of its results
_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|ragged-all-to-all|reduce-scatter"
    r"|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"([a-z]+)(\d*)\[([\d,]*)\]")
FAKE = "--xla_force_host_platform_device_count"
FIRST = 1  # the round before it warms up


def drawn(settings: Settings, rounds: int, **more: Any) -> experiment_lib.Experiment:
    """The run of a cell's options, on generated examples."""
    options = cells.known(settings["options"])
    data = examples.draw(options["num_clients"], **settings["data"])
    # Nothing is evaluated.
    return experiment_lib.experiment(
        **options | more, dataset=data, rounds=rounds, eval_every=rounds
    )


def planned_bytes(experiment: experiment_lib.Experiment) -> dict[str, int]:
    """Bytes of a device's state, and of the rounds' program by the compiler's plan."""
    # With rows on the host, this counts only those on the device.
    leaves = jax.tree.leaves([call.state for call in experiment.simulation.calls])
    memory = experiment.program.rounds.executables[-1].memory_analysis()
    shards = [leaf.addressable_shards[0].data for leaf in leaves]
    return {
        "state_bytes_per_device": sum(shard.nbytes for shard in shards),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def _total(settings: Settings) -> int:
    """Rounds of a cell, including those that warm up."""
    return FIRST + settings["rounds"] * settings["repeats"]


def _timed(
    settings: Settings,
    run: Callable[[int, int], None],
    compiled: Callable[[], float] = lambda: 0.0,
) -> dict[str, float]:
    """Seconds per round over the repeats: median, fastest and slowest.

    `run(first, end)` runs the rounds `first` to `end - 1`. `compiled()` returns the
    seconds of compiling so far, which do not count.
    """
    count, taken = settings["rounds"], []
    for first in range(FIRST, _total(settings), count):
        before, begin = compiled(), time.perf_counter()
        run(first, first + count)
        seconds = time.perf_counter() - begin
        taken.append((seconds - (compiled() - before)) / count)
    return {
        "seconds_per_round": float(np.median(taken)),
        "fastest": min(taken),
        "slowest": max(taken),
    }


def rounds(settings: Settings) -> dict[str, Any]:
    """Times the rounds of a run."""
    made = drawn(settings, _total(settings))
    made.simulation.advance_to(FIRST)
    before = made.totals.client_updates
    found = _timed(
        settings,
        lambda _, end: made.simulation.advance_to(end),
        lambda: made.compile_seconds,
    )
    totals, how = made.totals, made.task.execution
    updates = (totals.client_updates - before) / (_total(settings) - FIRST)
    return found | {
        "client_updates_per_second": updates / found["seconds_per_round"],
        "padding_efficiency": totals.padding_efficiency,
        "step_efficiency": totals.step_efficiency,
        "compile_seconds": made.compile_seconds,
        "peak_memory_bytes": devices.peak_memory_bytes(),
        "client_chunk": how.chunk,
        **planned_bytes(made),
    }


def loop(settings: Settings) -> dict[str, Any]:
    """Times the same rounds with one client after another."""
    # Other devices would only repeat the same computation.
    made = drawn(settings, _total(settings), client_chunk=1, devices=1)
    plain = loops.LOOPS[settings["how"]](made)
    plain.prepare(0, _total(settings))
    plain.run(0, FIRST)
    found, params = _timed(settings, plain.run), plain.params()
    updates = made.config.clients_per_round * len(params)
    return found | {
        "client_updates_per_second": updates / found["seconds_per_round"],
        "state_bytes_per_device": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        "peak_memory_bytes": devices.peak_memory_bytes(),
    }


def estimate(settings: Settings) -> dict[str, Any]:
    """Returns the estimates of a chip's compiler for the rounds."""
    found = drawn(settings, 2, target=settings["target"]).cost_analysis()
    del found["programs"]
    return found


def collectives(text: str) -> dict[str, int]:
    """Counts the collectives of an optimised program by kind, one in a loop only once.

    `collective_bytes` are the bytes of all their results, also of further kinds.
    """
    found = _COLLECTIVE.findall(text)
    kinds = [kind for _, kind in found]
    out = {name: kinds.count(kind) for name, kind in COLLECTIVES.items()}
    shapes = [shape for result, _ in found for shape in _SHAPE.findall(result)]
    sizes = [
        math.prod(int(side) for side in sides.split(",") if side)
        * (int(bits) // 8 if bits else 1)
        for _, bits, sides in shapes
    ]
    return out | {"collective_bytes": sum(sizes)}


def several(settings: Settings) -> dict[str, Any]:
    """Runs on several fake devices or processes, and compares with one device.

    Fake devices share the machine's cores, so nothing is timed.
    """
    count = settings["processes"]
    on_each = settings["options"]["devices"] // count
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        found = _members(settings, path / "several.npz", count, on_each)
        alone = settings | {"options": settings["options"] | {"devices": 1}}
        _members(alone, path / "alone.npz", 1, 1)
        with np.load(path / "several.npz") as a, np.load(path / "alone.npz") as b:
            pairs = [(a[name], b[name]) for name in a if a[name].size]
            gaps = [np.abs(one.astype(float) - other).max() for one, other in pairs]
    return found | {"difference": float(max(gaps))}


def _members(
    settings: Settings, path: pathlib.Path, count: int, on_each: int
) -> dict[str, Any]:
    """Runs a cell in `count` processes with `on_each` fake devices each.

    Process 0 writes the final state to `path`, and its figures are returned. A process
    that fails raises `child.Failed`.
    """
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    flags = re.sub(rf"{FAKE}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    given = {"XLA_FLAGS": f"{flags} {FAKE}={on_each}".strip(), "JAX_PLATFORMS": "cpu"}
    started = []
    try:
        for index in range(count):
            address = f"localhost:{port},{count},{index}" if count > 1 else ""
            more = {"how": "member", "path": str(path), "distributed": address}
            started.append(child.start("launch.tables.kinds", settings | more, given))
        found = [child.ended(one) for one in started]
    finally:
        for one in started:
            one.kill()
    return found[0]["figures"]


def member(settings: Settings) -> dict[str, Any]:
    """Runs rounds as one of several processes; process 0 writes the final state."""
    total = settings["rounds"]
    made = drawn(settings, total, distributed=settings["distributed"])
    made.simulation.advance_to(total)
    text = made.program.rounds.executables[-1].as_text()
    # Each process has a part of the state.
    leaves = jax.tree.leaves((made.state.server, made.state.clients))
    kept = {f"leaf{index}": np.asarray(leaf) for index, leaf in enumerate(leaves)}
    if processes.is_first():
        np.savez(settings["path"], **kept)
    return planned_bytes(made) | collectives(text)


def run(settings: Settings) -> dict[str, Any]:
    """Trains and evaluates, or resumes an interrupted run."""
    begin = time.perf_counter()
    folder, options = pathlib.Path(settings["folder"]), settings["options"]
    is_new = not (folder / finished.RUN_FLAGS).exists()
    done = here.stored(folder, options) or here.run(folder, options)
    return done["metrics"] | {
        "rounds": done["rounds"],
        "client_updates_per_second": done["client_updates_per_second"],
        "peak_memory_bytes": done["peak_memory_bytes"],
        "diverged": done["diverged"],
        "parameters_sha256": done["parameters_sha256"],
        # The time of a run that was interrupted is not known.
        "minutes": (time.perf_counter() - begin) / 60 if is_new else None,
    }


KINDS = {
    "rounds": rounds,
    "loop": loop,
    "torch": loop,
    "estimate": estimate,
    "devices": several,
    "member": member,
    "run": run,
}


@ending.command
def command(argv: list[str]) -> None:
    """Runs the cell whose settings are on stdin."""
    settings = child.settings()
    with ending.refused():
        with files.named("", child.Failed):
            figures = KINDS[settings["how"]](settings)
    versions, machine = devices.versions(), devices.processor()
    machine |= {"device": devices.name(), "devices": jax.device_count()}
    if settings["how"] == "torch":
        versions["torch"] = sys.modules["torch"].__version__
    out = {"figures": figures, "versions": versions, "machine": machine}
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    command()
