"""Fits the chunk of an accelerator to its memory, as the compiler plans programs."""

import sys

from data import memory as data_memory
from launch.machine import memory, processes
from launch.run import loop
from launch.run.run import Run

# Program -> what it computes, and how it needs less memory
PROGRAMS = {
    "rounds": ("a round", "lower it or --batch_size, or take a smaller --model"),
    "of_shared": ("an evaluation", "lower it, or take a smaller --model"),
    "of_clients": ("an evaluation", "lower it, or take a smaller --model"),
    "of_adapted": (
        "fine-tuning",
        "lower it or --batch_size, or omit --fine_tune_epochs",
    ),
}


def fit(run: Run) -> str:
    """Halves an automatic chunk until a round and an evaluation fit the memory.

    The compiled programs that fit are those that run. A chunk that the user gave stays.
    Returns a line for each program that changed the chunk, "" if none did. Raises
    ValueError if not even the least chunk fits.
    """
    # All processes must come to the same chunk.
    limits = processes.gathered(memory.device_bytes(run.target))
    if run.parts_with is None or None in limits:
        return ""
    lines: list[str] = []
    while True:
        before = run.task.execution
        names = [name for name in PROGRAMS if name in run.program.names]
        lines += [_fit(run, name, min(limits)) for name in names]
        # A smaller chunk for an evaluation also changes the round's program.
        if run.task.execution == before:
            return "\n".join(line for line in lines if line)


class Narrow(loop.Listener):
    """Fits the chunk before the first call, if there are rounds to compute."""

    def __init__(self, until: int):
        self._until = until

    def on_start(self, run: Run) -> None:
        is_left = run.round < self._until and not run.is_over
        if is_left and (note := fit(run)):
            processes.say(note, file=sys.stderr)


def _fit(run: Run, name: str, limit: int) -> str:
    """`fit` of one program to a number of bytes."""
    first, (what, cure) = run.task.execution, PROGRAMS[name]
    least = max(run.config.min_chunk, 1)
    asked = needed = _planned(run, name)
    before = None
    while needed is None or needed > limit:
        how = run.task.execution
        is_in_vain = before is not None and needed == before
        if how.chunk <= least or is_in_vain:
            raise ValueError(
                f"--num_clients={run.config.num_clients}: {what} needs "
                f"{_amount(needed)} of a device's memory, as the compiler plans it for "
                f"{how.chunk} side by side, and {_amount(limit)} are there; {cure}"
            )
        run.compute(how._replace(chunk=max(how.chunk // 2, least)))
        before, needed = needed, _planned(run, name)
    how = run.task.execution
    if how == first:
        return ""
    return (
        f"note: the compiler plans {_amount(asked)} for {what} with {first.chunk} "
        f"clients side by side, and {_amount(limit)} are there; with "
        f"{how.chunk} it plans {_amount(needed)}, so --client_chunk={how.chunk}"
    )


def _planned(run: Run, name: str) -> int | None:
    return memory.planned(run.simulation, run.task.execution, name)


def _amount(count: int | None) -> str:
    return "too much" if count is None else data_memory.in_words(count)
