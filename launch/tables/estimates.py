"""How long the trials of a study will take, from some rounds that are timed."""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from launch.experiment import Experiment
from launch.machine import memory

SECONDS, ROUNDS = 1.0, 5  # of timing a method at most, after the first round


class Method(NamedTuple):
    """A method's trials, those that are finished, their minutes and megabytes.

    These are of the program that needs most, also for fine-tuning.
    """

    name: str
    trials: int
    finished: int
    minutes: float
    megabytes: float


class Estimate(NamedTuple):
    """The methods of a study; `minutes` is of what is left of all."""

    methods: list[Method]

    @property
    def minutes(self) -> float:
        """Minutes on this machine, if nothing else runs, of unfinished trials."""
        return sum(one.minutes for one in self.methods)

    def __str__(self) -> str:
        width = max(len("method"), *(len(one.name) for one in self.methods))
        lines = [f"{'method':<{width}}  trials  finished  minutes     MB"]
        for one in self.methods:
            lines.append(
                f"{one.name:<{width}}  {one.trials:6}  {one.finished:8}  "
                f"{one.minutes:7.1f}  {one.megabytes:5.0f}"
            )
        minutes = math.ceil(self.minutes)
        together = f"together about {minutes:,} minute{'s' * (minutes != 1)}"
        return "\n".join([*lines, together])

    __repr__ = __str__


def of(made: Experiment, name: str, variants: Sequence[int], finished: int) -> Method:
    """Times a method of one seed, which is not run on.

    `variants` are the runs side by side (seeds times points) of each trial, the
    finished ones first. Compiling counts once for each trial, although later ones may
    find programs in the cache.
    """
    simulation, rounds = made.simulation, made.config.rounds
    simulation.advance_to(1)
    begin = made.totals.seconds
    for until in range(2, min(ROUNDS, rounds) + 1):
        simulation.advance_to(until)
        if made.totals.seconds - begin > SECONDS:
            break
    done = max(simulation.round - 1, 1)
    of_round = (made.totals.seconds - begin) / done if rounds > 1 else begin
    simulation.evaluate()
    compiled = made.compile_seconds
    begin = time.perf_counter()
    simulation.evaluate()
    of_evaluation = time.perf_counter() - begin
    one = rounds * of_round + made.evaluations_after(-1) * of_evaluation
    left = variants[finished:]
    minutes = (sum(left) * one + len(left) * compiled) / 60
    programs = [simulation.ahead(name) for name in simulation.program.names]
    size = max(map(memory.planned_bytes, programs)) / 1e6
    return Method(name, len(variants), finished, minutes, size)
