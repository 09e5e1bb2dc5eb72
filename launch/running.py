"""The loop of a run: advance, measure, record, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launch import console, processes

if TYPE_CHECKING:
    from launch.console import Silent
    from launch.experiment import Experiment
    from launch.stop import Stop
    from launch.workdir import Workdir

SAVE_SECONDS = 60.0


def run(
    experiment: Experiment,
    stop: Stop,
    progress: Silent,
    folder: Workdir | None = None,
    until: int | None = None,
    on_record: Callable[[dict[str, Any]], None] | None = None,
) -> bool:
    """Runs until a round, or a signal; whether it came there.

    Args:
        experiment: What is run.
        stop: Asked after every call of about ten seconds.
        progress: Told after every call.
        folder: Gets records and checkpoints; None = they stay in memory.
        until: Rounds done in the end; None = all.
        on_record: Called with every record, in the first of several processes.
    """
    config, saved_time = experiment.config, time.monotonic()
    has_warned = False
    until = config.rounds if until is None else until
    every = config.checkpoint_every if folder is not None else 0
    while not stop and (
        experiment.round < until or experiment.is_due(experiment.round)
    ):
        # One call of about ten seconds, ended early by an evaluation or a checkpoint.
        experiment.simulation.advance(min(experiment.next_stop(every), until))
        stop.agree()
        if experiment.diverged() is not None and not has_warned:
            has_warned = True
            console.warn_diverged(experiment)
        records = experiment.measure()
        if folder is not None:
            folder.append(records)
        progress.update(records)
        tells = on_record is not None and processes.is_first()
        for record in records if tells else ():
            on_record(dict(record))
        if folder is None:
            continue
        done = experiment.round
        due = processes.of_first(time.monotonic() - saved_time > SAVE_SECONDS)
        if every:
            due = done > 0 and done % every == 0
        if due or stop or done >= until:
            folder.save()
            saved_time = time.monotonic()
    stop.agree()
    return experiment.round >= until
