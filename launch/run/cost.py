"""Estimates a run's cycles and memory by a chip's compiler, without running it.

A compiler estimates the cycles of most instructions. Gathers, sorts, copies and the
conditions of loops have no estimate and count nothing. The body of a loop counts once,
as a compiler does not know how often it repeats. Estimates are not times, but their
ratios compare programs that do the same work.

The compiler of a GPU estimates no cycles. Its programs are compared by their kernels,
each of which takes some microseconds to launch, and by the loops whose number of turns
it does not know, since there the host reads a condition back in every turn unless a
command buffer holds the loop.
"""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pfl import options, shapes
from launch.assemble.assemble import assemble
from launch.machine import memory, target
from launch.run import narrow
from launch.run.run import Run

# Lines of an optimised program: the head of a computation, and its references
_HEAD = re.compile(r"^(ENTRY )?%(\S+) .*\{$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BODY = re.compile(r"\bbody=%([\w.-]+)")
_BRANCHES = re.compile(
    r"\b(?:branch_computations=\{([^}]*)\}|\w+_computation=%(\S+?),)"
)
_CALLED = re.compile(r"\b(?:calls|to_apply)=%([\w.-]+)")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# What a GPU launches; a library's call (custom-call) counts once
_KERNEL = re.compile(
    r"= (?:\(.*?\)|\S+) "
    r"(?:fusion|custom-call|copy|sort|scatter|convolution|dot)\("
)


class Part(NamedTuple):
    """A computation: its cycles, without those of the loops in it, and these loops.

    Attributes:
        has_gradient: It has operations of a backward pass outside of its loops.
        kernels: Kernels that a GPU launches for it, without those of its loops.
        turns: How often a loop's body runs, 0 = the compiler does not know.
    """

    cycles: int
    loops: tuple["Part", ...] = ()
    has_gradient: bool = False
    kernels: int = 0
    turns: int = 0

    @property
    def total(self) -> int:
        """Cycles including all loops, each of which counts once."""
        return self.cycles + sum(loop.total for loop in self.loops)

    @property
    def all_kernels(self) -> int:
        """Kernels including those of all loops, each of which counts once."""
        return self.kernels + sum(loop.all_kernels for loop in self.loops)

    @property
    def num_loops(self) -> int:
        """Counts the loops in it, and those in them."""
        return sum(1 + loop.num_loops for loop in self.loops)

    def unknown(self) -> int:
        """Counts the loops in it whose turns the compiler does not know."""
        return sum((not loop.turns) + loop.unknown() for loop in self.loops)

    def steps(self) -> Iterator["Part"]:
        """The loops over training steps: the outermost ones with a gradient."""
        for loop in self.loops:
            if loop.has_gradient:
                yield loop
            else:
                yield from loop.steps()


def computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The main computation's name, and each one's lines, of what XLA printed."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith(" "):
            lines.append(line)
    return entry, bodies


def parsed(text: str) -> Part:
    """Parses a program that XLA printed; of several branches the costliest counts."""
    entry, bodies = computations(text)

    @functools.cache
    def part(name: str) -> Part:
        cycles, loops, has_gradient, kernels = 0, [], False, 0
        for line in bodies.get(name, ()):
            inner = Part(0)
            if body := _BODY.search(line):
                turns = _TURNS.search(line)
                loop = part(body[1])._replace(turns=int(turns[1]) if turns else 0)
                inner = Part(0, (loop,))
            elif found := _CYCLES.search(line):
                # Also of a fusion, whose computation has none of its own.
                inner = Part(int(found[1]))
            elif branches := _BRANCHES.findall(line):
                names = re.findall(r"[\w.-]+", " ".join(map("".join, branches)))
                inner = max(map(part, names), key=lambda o: (o.total, o.all_kernels))
            elif called := _CALLED.search(line):
                inner = part(called[1])
            cycles, loops = cycles + inner.cycles, [*loops, *inner.loops]
            has_gradient |= inner.has_gradient or "transpose(jvp(" in line
            kernels += 1 if _KERNEL.search(line) else inner.kernels
        return Part(cycles, tuple(loops), has_gradient, kernels)

    return part(entry)


class Plan(NamedTuple):
    """A compiled program as its compiler plans it; bytes are those of one device.

    `parts` has the cycles of its loops. `needed_bytes` is for the program, its
    arguments, and results that do not replace an argument. `seconds` is the time of
    compiling.
    """

    parts: Part
    temporary_bytes: int
    argument_bytes: int
    needed_bytes: int
    seconds: float

    @property
    def step_cycles(self) -> int:
        """Cycles of the training step that costs most, 0 if nothing is trained."""
        return max((loop.total for loop in self.parts.steps()), default=0)

    @property
    def step_kernels(self) -> int:
        """Kernels of the training step that has most, 0 if nothing is trained."""
        return max((loop.all_kernels for loop in self.parts.steps()), default=0)

    def round_on_tpu(self, examples: int) -> dict[str, float]:
        """What `estimate` says of the program of the rounds for a TPU."""
        return {
            "cycles_per_step": self.step_cycles,
            "cycles_per_example": self.step_cycles / examples,
            "cycles_outside_steps": self.parts.total - self.step_cycles,
        }

    def round_on_gpu(self) -> dict[str, int]:
        """What `estimate` says of the program of the rounds for a GPU."""
        return {
            "kernels_per_step": self.step_kernels,
            "kernels_outside_steps": self.parts.all_kernels - self.step_kernels,
            "loops": self.parts.num_loops,
            "loops_of_unknown_turns": self.parts.unknown(),
        }

    def figures(self, is_gpu: bool = False) -> dict[str, Any]:
        """The fields by name, with `cycles` or `kernels` instead of `parts`."""
        numbers = self._asdict()
        parts = numbers.pop("parts")
        if is_gpu:
            return {"kernels": parts.all_kernels} | numbers
        return {"cycles": parts.total} | numbers


def planned(lowered: jax.stages.Lowered) -> Plan:
    """Compiles a program and reads its plan; ValueError if none fits the memory."""
    begin = time.perf_counter()
    made = _fitting(lowered.compile)
    return read(made, time.perf_counter() - begin)


def _ahead(run: Run, name: str) -> Plan:
    """`planned` of one of a run's programs, compiled once."""
    made = _fitting(lambda: run.simulation.ahead(name))
    return read(made, getattr(run.simulation.program, name).seconds_of(made))


def _fitting(compile: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
    """Returns `compile()`; raises a short ValueError if no plan fits the memory."""
    try:
        return compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"a program does not fit into the chip's memory ({options.reason(error)}); "
            "lower --client_chunk"
        ) from error


def read(made: jax.stages.Compiled, seconds: float) -> Plan:
    """The plan of a program whose compilation took some seconds."""
    bytes = made.memory_analysis()
    temporary, arguments = bytes.temp_size_in_bytes, bytes.argument_size_in_bytes
    needed = memory.planned_bytes(made)
    return Plan(parsed(made.as_text()), temporary, arguments, needed, seconds)


def estimate(run: Run) -> dict[str, Any]:
    """Compiles the programs of a run for its chip and returns the compiler's figures.

    `run` is from `assemble` with a `target`. Raises ValueError if neither an automatic
    chunk nor a part of it fits, or if the compiler finds no plan for a given chunk.

    Returns:
        `temporary_bytes`, `argument_bytes`: of the program that needs most;
        `fits`: whether every program fits into the memory of the chip;
        `compile_seconds`: of all programs;
        `programs`: cycles or kernels, bytes and seconds of each of `Program.names`;
        `note`: what `narrow.fit` changed, "" = nothing.

        Of a TPU:

        `cycles_per_step`: of the training step that costs most, usually a local step of
            all clients that train side by side on a device; 0 if nothing is trained;
        `cycles_per_example`: the same for one example of these clients' batches;
        `cycles_outside_steps`: everything else in a call of one round, each loop once,
            with other training steps such as a server's;
        `over_one_by_one`: the cycles of such a step for one client after another,
            divided by `cycles_per_step`.

        Of a GPU:

        `kernels_per_step`: of the training step that has most, usually a local step;
        `kernels_outside_steps`: of everything else in a call of one round, each loop
            once;
        `loops`: of the program of the rounds;
        `loops_of_unknown_turns`: those of them whose number of turns the compiler does
            not know.
    """
    note = narrow.fit(run)
    plans = {name: _ahead(run, name) for name in run.program.names}
    clients = run.task.execution.chunk * len(run.simulation.calls[0].variants)
    batch_size = _largest_batch(run)
    worst = max(plans.values(), key=lambda plan: plan.needed_bytes)
    where = run.simulation, run.task.execution
    needed = (
        plan.needed_bytes + memory.waiting_bytes(*where, name)
        for name, plan in plans.items()
    )
    chip, rounds = target.chip(run.target), plans["rounds"]
    if chip.gpu:
        figures = rounds.round_on_gpu()
    else:
        figures = rounds.round_on_tpu(clients * batch_size)
        step = rounds.step_cycles
        is_wide = step and clients > 1
        figures["over_one_by_one"] = clients * _alone(run) / step if is_wide else 1.0
    return {
        "target": run.target,
        "clients_side_by_side": clients,
        "batch_size": batch_size,
        **figures,
        "temporary_bytes": worst.temporary_bytes,
        "argument_bytes": worst.argument_bytes,
        "fits": max(needed) <= chip.memory,
        "compile_seconds": sum(plan.seconds for plan in plans.values()),
        "programs": {n: plan.figures(bool(chip.gpu)) for n, plan in plans.items()},
        "note": note,
    }


def _largest_batch(run: Run) -> int:
    """Examples in the largest batch of a client's training, 1 if none trains."""
    most = int(np.max(run.data.partition.train.count))
    specs = run.program.algorithm.plans
    return max((shapes.capped(spec.batch_size, most) for spec in specs), default=1)


def in_words(found: dict[str, Any]) -> str:
    """The result of `estimate` as a sentence; `found` has the name `algo` too."""
    work = (
        "{algo} for {target}: {kernels_per_step:,} kernels for a local step of "
        "{clients_side_by_side} clients side by side, {batch_size} examples each, "
        "{kernels_outside_steps:,} outside of steps, each loop once; the number of "
        "turns of {loops_of_unknown_turns} of {loops} loops is not known before; "
        if "kernels_per_step" in found
        else "{algo} for {target}: {cycles_per_step:,} cycles for a local step of "
        "{clients_side_by_side} clients side by side, {batch_size} examples each "
        "({cycles_per_example:,.0f} an example, {over_one_by_one:.2f}x fewer than one "
        "client after another), {cycles_outside_steps:,} outside of steps; "
    )
    line = work + (
        "{temporary_mb:,.1f} MB temporary and {argument_mb:,.1f} MB of arguments "
        "{fit} the chip; compiled in {compile_seconds:.0f} s"
    )
    line += "\n{note}" * bool(found["note"])
    return line.format(
        **found,
        temporary_mb=found["temporary_bytes"] / 1e6,
        argument_mb=found["argument_bytes"] / 1e6,
        fit="fit" if found["fits"] else "DO NOT FIT",
    )


def _alone(run: Run) -> int:
    """Cycles of a local step of a single client."""
    one = {"num_seeds": 1, "sweep": "", "client_chunk": 1, "min_chunk": 0}
    config = dataclasses.replace(run.settings.config, **one)
    alone = assemble(run.settings._replace(config=config), target=run.target)
    return _ahead(Run(alone), "rounds").step_cycles
