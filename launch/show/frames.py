"""Tables and pictures of runs for notebooks. pandas is imported when needed."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from launch.config import flagfile, sweep
from launch.folder import finished, record
from launch.run import summaries as summaries_lib
from launch.run.run import Run
from launch.show import derived

if TYPE_CHECKING:
    import pandas

    from launch.show.table import Table


def of(records: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    """Records as a table, in which `round` and `seed` come first."""
    import pandas

    frame = pandas.DataFrame.from_records(list(records))
    first = [name for name in ("algo", "round", "seed") if name in frame]
    return frame[first + [name for name in frame if name not in first]]


def client_metrics(run: Run) -> pandas.DataFrame:
    """A line for each client in each evaluation that is kept.

    Columns are `round`, `seed`, the numbers of a sweep, `client`, `owner` if clients
    have names, `unseen` if some never train, and the metrics, nan if not evaluated:
    accuracy or perplexity, also after fine-tuning, and those of `eval_metrics`.
    """
    import pandas

    rounds, found = run.kept_of_clients()
    variants, unseen = run.simulation.variants, run.data.partition.is_unseen
    shape = *rounds.shape, run.config.num_clients
    # Indices of each line of the frame
    evaluation, variant, client = np.indices(shape).reshape(3, -1)
    seed = np.array([variants.seed(index) for index in range(variants.count)])[variant]
    point = [run.points[variants.point(index)] for index in range(variants.count)]
    columns = {"round": rounds[evaluation, variant], "seed": np.array(run.seeds)[seed]}
    for name in run.points[0]:
        columns[name] = np.array([one[name] for one in point])[variant]
    columns["client"] = client
    if run.owners:
        columns["owner"] = np.array(run.owners)[client]
    if unseen.any():
        columns["unseen"] = unseen[seed, client]
    every = run.kept.by_name(found).items()
    columns |= {name: one.reshape(-1) for name, one in every}
    return pandas.DataFrame(columns)


def partition_counts(run: Run, seed: int | None) -> pandas.DataFrame:
    """Train examples by client and class; a text has one column, `no classes`."""
    import pandas

    index = run.seed_index(seed)
    if run.data.num_words:
        count = np.asarray(run.data.partition.adapting.count)[index]
        frame = pandas.DataFrame({"no classes": count})
    else:
        frame = pandas.DataFrame(finished.class_counts(run)[index], columns=run.classes)
    return frame.rename_axis(index="client", columns="class")


def plot(
    experiments: Sequence[Run], kind: str, names: Sequence[str] = (), **how: str
) -> Any:
    """Draws a picture of `launch.plot` for runs in memory, or raises a ValueError."""
    from launch.show import figures  # imports matplotlib, which is slow

    begun = [one for one in experiments if one.metrics] or experiments
    if names:
        names = [n for n, one in zip(names, experiments, strict=True) if one in begun]
    every = [_runs(experiment) for experiment in begun]
    runs = [run for one in every for run in one]
    names = record.names_by_point(every, names)
    return figures.picture(kind, runs, names=names, **how)


def _runs(run: Run) -> list[record.Record]:
    """The records of a run in memory, as if read from a folder."""
    if not run.metrics:
        raise ValueError("nothing is measured yet; run() first")
    # A path tells runs apart, as the points of a sweep have the same one.
    path = pathlib.Path(run.config.workdir or f"in-memory-{id(run):x}")
    options = flagfile.RunFlags.of(run.config, run.hparams).options
    summary = run.results() if run.is_over else None
    parts = options, run.metrics, finished.clients(run), summary
    found = record.Record(path, *parts, kinds=run.kinds, hashes=run.hashes)
    return record.by_point(found)


def summaries(experiments: Mapping[str, Run]) -> pandas.DataFrame:
    """One line for each experiment or point of a sweep: metrics, mean over the seeds.

    The column `summary` has the rule in words, such as `mean of rounds 91 to 100`.
    Several seeds add standard deviations, and a rule other than `last` the last round.
    """
    import pandas

    lines: dict[str, dict[str, Any]] = {}
    for name, experiment in experiments.items():
        done = experiment.summary() if experiment.metrics else {}
        rule = done.get("summary", experiment.config.summary)
        for part in done.get("sweep", [done]):
            label = sweep.label(part.get("point", {}), name)
            in_words = done.get("summary_of", rule)
            lines[label] = line = {"rounds": experiment.round, "summary": in_words}
            if part.get("diverged"):
                line["diverged"] = part["diverged"]
            for metric in part.get("metrics", {}):
                line |= _cells(metric, part, len(experiment.seeds), rule)
    return pandas.DataFrame.from_dict(lines, orient="index").rename_axis("algo")


def _cells(
    metric: str, part: Mapping[str, Any], num_seeds: int, rule: str
) -> dict[str, Any]:
    """The columns of one metric: its mean, std, and value in the last round.

    `part` is a summary, or that of a point of a sweep.
    """
    entry, out = part["metrics"][metric], {}
    out[metric] = entry["mean"]
    if fewer := summaries_lib.fewer(entry):
        out[f"{metric} of"] = fewer
    if num_seeds > 1:
        has_std = len(entry["per_seed"]) > 1
        out[f"{metric} std"] = entry["std"] if has_std else np.nan
    if rule != "last" and metric in part.get("last_round", {}):
        last = part["last_round"][metric]
        out[f"{metric} last round"] = last["mean"]
        if fewer := summaries_lib.fewer(last):
            out[f"{metric} last round of"] = fewer
    return out


def table(
    experiments: Mapping[str, Run],
    metrics: Sequence[str],
    control: str,
    test: str,
    until: float | None,
    target: float | None,
) -> Table:
    """The table of `table.made` for runs in memory, each point of a sweep as a row.

    Raises a ValueError, too, if there is no such control.
    """
    from launch.show import table as table_lib  # imports scipy.stats, which is slow

    control = control or ""
    runs: dict[str, record.Record | None] = {}
    for name, one in experiments.items():
        if not one.is_over:
            runs[name] = None
            continue
        found = _runs(one)
        runs |= zip(record.names_by_point([found], [name]), found, strict=True)
    _check_control(control, runs)
    return table_lib.made({"": runs}, metrics, control, test, until, target)


def _check_control(control: str, known: Mapping[str, Any]) -> None:
    if control and control not in known:
        raise ValueError(f"control={control}: expected one of {', '.join(known)}")


def beside(
    frame: pandas.DataFrame,
    experiments: Mapping[str, Run],
    control: str,
    goal: derived.Goal,
) -> pandas.DataFrame:
    """The frame of `summaries` with columns of `derived`.

    With a control these are all, and without one, if the goal is a value, `until_...`.
    Runs that diverged or are not over have no values there, and it has no such columns
    if the control is one. Raises a ValueError if there is no such run, or one is a
    sweep.
    """
    if not control and goal.value is None:
        return frame
    _check_control(control, experiments)
    runs = {}
    for name, one in experiments.items():
        if one.config.sweep:
            what = f"control={control}" if control else f"target={goal.value}"
            raise ValueError(f"{what}: {name} is a sweep; omit it")
        if one.is_over and record.diverged(run := _runs(one)[0]) is None:
            runs[name] = run
    if control and control not in runs:
        return frame
    base = runs.get(control)
    for name in derived.TITLES if control else derived.PLACES:
        found = {n: derived.of(name, run, base, goal) for n, run in runs.items()}
        entries = {n: entry for n, entry in found.items() if entry}
        means = {n: one["mean"] for n, one in entries.items()}
        # {} has no value, and is known.
        if any(entry is not None for entry in found.values()):
            frame[name] = frame.index.map(means).astype(float)
        covered = {n: summaries_lib.fewer(one) for n, one in entries.items()}
        if covered := {n: text for n, text in covered.items() if text}:
            frame[f"{name} of"] = frame.index.map(covered)
    return frame
