"""Fits the chunk of an accelerator to its memory, as the compiler plans a round.

What `memory` predicts from numbers leaves activations out. A compiler knows them.
"""

import jax

from fedjax_pfl import types
from launch.run import memory, processes
from launch.run.run import Run


def fit(run: Run) -> str:
    """Halves a chunk that was chosen automatically until a round fits the memory.

    It compiles the round, and the program that fits is the one that runs. A chunk that
    the user gave stays.

    Returns:
        A line that says what was changed, "" if nothing was.

    Raises:
        ValueError: one line: not even the least chunk fits.
    """
    # All processes must come to the same chunk.
    limits = processes.gathered(memory.device_bytes(run.target))
    if run.parts_with is None or None in limits:
        return ""
    limit = min(limits)
    first = run.task.execution
    least = max(run.config.min_chunk, 1)
    asked = needed = _planned_bytes(run)
    while needed is None or needed > limit:
        how = run.task.execution
        if _width(how) <= least:
            raise ValueError(
                f"--num_clients={run.config.num_clients}: a round needs "
                f"{_amount(needed)} of a device's memory, as the compiler plans it for "
                f"{_width(how)} side by side, and {memory.size(limit)} are there; "
                "lower it or --batch_size, or take a smaller --model"
            )
        run.compute(_halved(how, least))
        needed = _planned_bytes(run)
    how = run.task.execution
    if how == first:
        return ""
    return (
        f"note: the compiler plans {_amount(asked)} for a round with {_width(first)} "
        f"clients side by side, and {memory.size(limit)} are there; with "
        f"{_width(how)} it plans {memory.size(needed)}, so --{_flag(how)}={_width(how)}"
    )


def _planned_bytes(run: Run) -> int | None:
    """Bytes of a round's program and of the states of calls that wait meanwhile.

    None where a compiler finds no plan that fits, in any of the processes.
    """
    simulation = run.simulation
    calls = len(simulation.calls)
    every = memory.state_bytes(simulation.template(), run.task.execution)
    waiting = every * (calls - 1) // calls
    try:
        needed = memory.planned_bytes(simulation.rounds_ahead()) + waiting
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = None
    found = processes.gathered(needed)
    return None if None in found else max(found)


def _amount(count: int | None) -> str:
    return "too much" if count is None else memory.size(count)


def _flag(how: types.Execution) -> str:
    return "lanes" if how.lanes else "client_chunk"


def _width(how: types.Execution) -> int:
    return how.lanes or how.chunk


def _halved(how: types.Execution, least: int) -> types.Execution:
    """Half as many side by side. Two lanes become a chunk of one client."""
    width = max(_width(how) // 2, least)
    if how.lanes and width > 1:
        return how._replace(lanes=width)
    return how._replace(lanes=0, chunk=width)
