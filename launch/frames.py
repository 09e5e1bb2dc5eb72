"""Runs as tables and pictures: what notebooks show. pandas only where it is used."""

from __future__ import annotations

import html as html_lib
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launch import sweep

if TYPE_CHECKING:
    import pandas

    from launch.experiment import Experiment


def of(records: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    """Records as a table; `round` and `seed` come first."""
    import pandas

    frame = pandas.DataFrame.from_records(list(records))
    first = [name for name in ("algo", "round", "seed") if name in frame]
    return frame[first + [name for name in frame if name not in first]]


def partition_counts(experiment: Experiment, seed: int | None) -> pandas.DataFrame:
    """Train examples of each client (lines) and class (columns)."""
    import pandas

    from launch import finished

    counts = finished.class_counts(experiment)[experiment.seed_index(seed)]
    frame = pandas.DataFrame(counts)
    return frame.rename_axis(index="client", columns="class")


def plot(
    experiments: Sequence[Experiment],
    kind: str,
    metric: str,
    names: Sequence[str] = (),
) -> Any:
    """A picture of `launch.plot` of experiments in memory, with names if they have any.

    Raises:
        ValueError: no such picture or metric, or nothing is measured yet.
    """
    from launch import plot as plot_lib

    every = [_runs(experiment) for experiment in experiments]
    runs = [run for one in every for run in one]
    names = [
        sweep.label(run.point, name)
        for name, one in zip(names, every, strict=bool(names))
        for run in one
    ]
    return plot_lib.picture(kind, runs, metric, names)


def _runs(experiment: Experiment) -> list[Any]:
    """An experiment in memory as `launch.plot` reads finished ones."""
    from launch import finished, flags
    from launch import plot as plot_lib

    if not experiment.metrics:
        raise ValueError("nothing is measured yet; run() first")
    lines = flags.lines(experiment.config, experiment.hparams)
    told = dict(line.removeprefix("--").split("=", 1) for line in lines)
    return plot_lib.by_point(
        plot_lib.Run(
            pathlib.Path(experiment.config.workdir),
            told,
            experiment.metrics,
            finished.clients(experiment),
            fractions=experiment.fractions,
        )
    )


def summaries(experiments: dict[str, Experiment]) -> pandas.DataFrame:
    """One line for each experiment: its metrics, mean over the seeds (and std).

    Of a sweep one for each point.

    By the rule that stands in the column `summary`, such as `mean of rounds 91 to 100`;
    the last round beside it, where that is another number.
    """
    import pandas

    lines: dict[str, dict[str, Any]] = {}
    for name, experiment in experiments.items():
        done = experiment.summary() if experiment.metrics else {}
        rule = done.get("summary", experiment.config.summary)
        for part in done.get("sweep", [done]):
            label = sweep.label(part.get("point", {}), name)
            told = done.get("summary_of", rule)
            lines[label] = line = {"rounds": experiment.round, "summary": told}
            if part.get("diverged"):
                line["diverged"] = part["diverged"]
            for metric, entry in part.get("metrics", {}).items():
                line[metric] = entry["mean"]
                if len(experiment.seeds) > 1:
                    line[f"{metric} std"] = entry["std"]
                if rule != "last" and metric in part.get("last_round", {}):
                    line[f"{metric} last round"] = part["last_round"][metric]["mean"]
    return pandas.DataFrame.from_dict(lines, orient="index").rename_axis("algo")


def html(experiment: Experiment) -> str:
    """What a notebook shows of an experiment: a line, and its numbers if there are."""
    head, *rest = repr(experiment).split("\n")
    body = f"<pre>{html_lib.escape(chr(10).join(rest))}</pre>" if rest else ""
    return f"<b>{html_lib.escape(head)}</b>{body}"
