"""One process of a run on fake devices: `python -m launch.study.member`.

It runs the rounds of a cell, and process 0 keeps the final state and prints bytes and
collectives as JSON.
"""

import json
import math
import os
import pathlib
import re
import socket
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from launch import build, ending
from launch.machine import processes
from launch.study import child, examples

COLLECTIVES = {"all_gathers": "all-gather", "all_reduces": "all-reduce"}
# A collective in an optimised program, with the shapes of what it returns
_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce)(?:-start)?\(")
_SHAPE = re.compile(r"([a-z]+)(\d*)\[([\d,]*)\]")
FAKE = "--xla_force_host_platform_device_count"


def experiment(
    settings: Mapping[str, Any], rounds: int, **more: Any
) -> build.Experiment:
    """The run of a cell's options, on drawn examples."""
    options = settings["options"]
    data = examples.draw(options["num_clients"], **settings["data"])
    # Nothing is evaluated.
    return build.experiment(
        **options | more, dataset=data, rounds=rounds, eval_every=rounds
    )


def planned_bytes(experiment: build.Experiment) -> dict[str, int]:
    """Bytes of the state on a device, and of the program of rounds by its plan."""
    # What the device has, also where other rows are on the host.
    leaves = jax.tree.leaves([call.state for call in experiment.simulation.calls])
    memory = experiment.program.rounds.executables[-1].memory_analysis()
    return {
        "state_bytes_per_device": sum(
            leaf.addressable_shards[0].data.nbytes for leaf in leaves
        ),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def collectives(text: str) -> dict[str, int]:
    """The collectives of an optimised program, each counted once, also in a loop.

    Returns:
        Their numbers by kind, and `collective_bytes`, the bytes of their results.
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


def start(
    settings: Mapping[str, Any], path: pathlib.Path, count: int, on_each: int
) -> dict[str, Any]:
    """Runs a cell in processes of its own.

    Args:
        settings: Of the cell.
        path: The file for the final state.
        count: Processes.
        on_each: Fake devices of a process.

    Returns:
        What process 0 printed.

    Raises:
        child.Failed: one line: a process failed.
    """
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    flags = re.sub(rf"{FAKE}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    given = {"XLA_FLAGS": f"{flags} {FAKE}={on_each}".strip(), "JAX_PLATFORMS": "cpu"}
    started = []
    try:
        for index in range(count):
            address = f"localhost:{port},{count},{index}" if count > 1 else ""
            told = {**settings, "path": str(path), "distributed": address}
            started.append(child.start("launch.study.member", told, given))
        found = [child.ended(one) for one in started]
    finally:
        for one in started:
            one.kill()
    return found[0]


def _kept(state: Any) -> dict[str, np.ndarray]:
    """The arrays of a state by name."""
    leaves = jax.tree.leaves((state.server, state.clients))
    return {f"leaf{index}": np.asarray(leaf) for index, leaf in enumerate(leaves)}


@ending.command
def command(argv: list[str]) -> None:
    """Runs the rounds whose settings are on the input."""
    settings = child.settings()
    with ending.refused():
        total = settings["rounds"]
        made = experiment(settings, total, distributed=settings["distributed"])
        made.simulation.advance_to(total)
        text = made.program.rounds.executables[-1].as_text()
    found = planned_bytes(made) | collectives(text)
    kept = _kept(made.state)  # of which each process has a part
    if processes.is_first():
        np.savez(settings["path"], **kept)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    command()
