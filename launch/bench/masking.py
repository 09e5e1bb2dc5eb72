"""The same rounds with every client computing the whole model, masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launch import build
from launch.experiment import Experiment


def rounds(
    experiment: Experiment, given: dict[str, Any]
) -> Callable[[int], float] | None:
    """From a round to its seconds, of a second experiment that is not bucketed.

    Args:
        experiment: The first.
        given: Option -> value, which made it.

    Returns:
        None where clients hold no levels of a model, or the first is not bucketed.
    """
    if experiment.task.num_levels == 1 or not experiment.task.execution.is_bucketed:
        return None
    masked = build.experiment(**given, bucketed=False)

    def seconds(round: int) -> float:
        before = masked.totals.seconds
        masked.simulation.advance_to(round + 1)
        return masked.totals.seconds - before

    return seconds
