"""Pictures of runs: `python -m launch.plot WORKDIR... [--output=FOLDER]`.

Draws from what runs leave behind: `curves.png` (metrics over rounds, mean and standard
deviation over seeds; of unfinished runs, too), `fairness.png` (how many clients reach
which accuracy) and `bubbles.png` (train examples of each client and class).
"""

from __future__ import annotations

import collections
import io
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from absl import flags as absl_flags
from matplotlib import figure as figure_lib
from matplotlib import ticker

from launch import config as config_lib
from launch import ending, finished, flags, sweep
from launch.show import words

KINDS = ("curves", "fairness", "bubbles")
FORMATS = ("png", "pdf", "svg")
SILENT = (*config_lib.EXECUTION_FIELDS, "algo", "seed", "num_seeds", "eval_every")
SETTING = ("dataset", "partition", "partition_alpha", "num_clients")
PREFERRED = ("client_accuracy", "c_per", "global_accuracy")


class Figure(figure_lib.Figure):
    """A figure that notebooks show by itself."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=110)
        return file.getvalue()


class Run(NamedTuple):
    """One run: its flags, records, per-client arrays and summary.

    `clients` is empty where the run is not finished, `summary` None where there is none
    in a folder. Of a sweep each point is a run, whose numbers are in `point` and in its
    flags. `fractions`: whether each metric is a fraction, as far as the run says so.
    """

    path: pathlib.Path
    flags: dict[str, str]
    records: list[dict[str, Any]]
    clients: dict[str, np.ndarray]
    summary: dict[str, Any] | None = None
    point: Mapping[str, float] = {}
    fractions: Mapping[str, bool] = {}


def by_point(run: Run) -> list[Run]:
    """The points of a sweep as runs; just the run, where there is none."""
    points = sweep.points(run.flags.get("sweep", ""))
    if not points[0]:
        return [run]
    told = run.flags | {"sweep": ""}
    out = []
    for index, point in enumerate(points):
        clients, summary, known = dict(run.clients), run.summary, run.fractions
        if clients:
            clients["accuracy"] = clients["accuracy"][:, index]
        if summary is not None:
            summary = summary | summary["sweep"][index]
            known = words.fractions(summary)
        records = sweep.of_point(run.records, point)
        flags_of = told | {name: str(value) for name, value in point.items()}
        out.append(Run(run.path, flags_of, records, clients, summary, point, known))
    return out


def diverged(run: Run) -> int | None:
    """The first round, of any seed, after which a run's numbers are none."""
    rounds = [record["diverged"] for record in run.records if "diverged" in record]
    return min(rounds, default=None)


def named(run: Run, name: str) -> str:
    """A run's name, and whether its numbers are none from some round on."""
    since = diverged(run)
    return name if since is None else f"{name} ({words.diverged(since)})"


def read(path: pathlib.Path) -> Run:
    """Reads a run's folder, finished or not.

    Raises:
        ValueError: there is no run in it that measured anything, or a damaged one.
    """
    # Only files that are what the run wrote go on from here.
    summary = finished.read(path)
    metrics = path / finished.METRICS
    if summary is None and not (metrics.is_file() and metrics.stat().st_size):
        raise ValueError(f"{path} holds no run that has measured anything")
    told = flags.read(path / finished.RUN_FLAGS)
    clients, known = {}, {}
    if summary is not None:
        with np.load(path / finished.CLIENTS) as file:
            clients = {name: file[name] for name in file.files}
        known = words.fractions(summary)
    records = finished.records(path)
    return Run(path, told, records, clients, summary, fractions=known)


def labels(runs: Sequence[Run]) -> list[str]:
    """The algorithm of each run, and the flags that tell it from others.

    Those are the data and the partition wherever runs differ in them, and any option
    in which two runs of one algorithm differ; the seeds only if nothing else does.
    """

    def differing(others: Sequence[Run], names: Sequence[str]) -> list[str]:
        return [n for n in names if len({other.flags.get(n) for other in others}) > 1]

    out = []
    for run in runs:
        same = [other for other in runs if other.flags["algo"] == run.flags["algo"]]
        every = sorted({n for other in same for n in other.flags if n not in SILENT})
        names = differing(same, every)
        told = [tuple(other.flags.get(n) for n in names) for other in same]
        if len(set(told)) < len(same):
            names += differing(same, ("seed", "num_seeds"))
        names += [n for n in differing(runs, SETTING) if n not in names]
        values = [f"{n}={run.flags.get(n, 'unset')}" for n in names]
        done = run.records[-1]["round"] if run.records else 0
        note = [] if run.clients else [f"(round {done} of {run.flags['rounds']})"]
        out.append(" ".join([run.flags["algo"], *values, *note]))
    return out


def _unformatted(text: str) -> str:
    """The text as matplotlib shows it as it is: a dollar would begin a formula."""
    return text.replace("$", r"\$")


def has_clients(run: Run) -> bool:
    """Whether the accuracy of any client by itself is known."""
    return bool(np.isfinite(run.clients["accuracy"]).any())


def accuracies(run: Run) -> np.ndarray:
    """Each client's accuracy, mean over the summary's rounds; f64[seeds, K]."""
    accuracy = run.clients["accuracy"]
    known = np.isfinite(accuracy)
    total, count = np.where(known, accuracy, 0).sum(1), known.sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def over_seeds(
    run: Run,
    metric: str,
    scale: float,
    place: Callable[[Mapping[str, Any]], float] = lambda row: row["round"],
) -> tuple[list[float], np.ndarray, np.ndarray]:
    """A metric by evaluated round: (where, mean, standard deviation) over seeds.

    Args:
        run: Records without the metric do not count.
        metric: Its name.
        scale: Factor.
        place: Where a record stands; the seeds' mean counts.
    """
    rows = [row for row in run.records if row.get(metric) is not None]
    rounds = sorted({row["round"] for row in rows})
    groups = [[row for row in rows if row["round"] == one] for one in rounds]
    where = [float(np.mean([place(row) for row in group])) for group in groups]
    values = [[scale * row[metric] for row in group] for group in groups]
    mean = np.array([np.mean(one) for one in values])
    spread = np.array([np.std(one, ddof=len(one) > 1) for one in values])
    return where, mean, spread


def picture(
    kind: str, runs: Sequence[Run], metric: str = "", names: Sequence[str] = ()
) -> Figure:
    """One of the pictures.

    Args:
        kind: One of `KINDS`, or `heatmap`.
        runs: What to draw.
        metric: Of the curves, separated by commas; empty = `metrics_of` chooses.
        names: Of the runs; empty = by what tells them apart.

    Raises:
        ValueError: no such picture or metric, or one that needs finished runs.
    """
    if kind not in (*KINDS, "heatmap"):
        raise ValueError(f"--kind={kind}: expected one of {', '.join(KINDS)}, heatmap")
    pairs = zip(runs, names or labels(runs), strict=True)
    names = [_unformatted(named(*pair)) for pair in pairs]
    for run in runs if kind in ("fairness", "bubbles") else ():
        if not run.clients:
            raise ValueError(
                f"--kind={kind}: {run.path} is not finished; leave it away, or give "
                "--kind=curves"
            )
    if kind == "fairness" and not all(map(has_clients, runs)):
        raise ValueError(
            "--kind=fairness: a run measured no client by itself; leave it away, or "
            "give --kind=curves,bubbles"
        )
    if kind == "curves":
        return curves(runs, names, metrics_of(runs, metric))
    if kind == "heatmap":
        if not has_two_names(runs):
            raise ValueError(
                "--kind=heatmap: expected one sweep of two names; give --kind=curves"
            )
        return heatmap(runs, metrics_of(runs, metric)[0])
    return (fairness if kind == "fairness" else bubbles)(runs, names)


def metrics_of(runs: Sequence[Run], wanted: str | Sequence[str]) -> list[str]:
    """The metrics to draw: those asked for, or the first one that all runs have.

    Args:
        runs: Whose.
        wanted: Names, or one text of them separated by commas; empty = choose.

    Raises:
        ValueError: a run does not have one, or percent would stand beside numbers.
    """
    # What rounds measure is not in the record before the first of them.
    shared = set.intersection(*(set().union(*run.records) for run in runs))
    wanted = wanted if isinstance(wanted, str) else ",".join(wanted)
    names = wanted.split(",") if wanted else [n for n in PREFERRED if n in shared][:1]
    if len({_is_fraction(name, runs) for name in names}) > 1:
        raise ValueError(f"--metric={wanted}: percent and numbers need a picture each")
    if names and shared.issuperset(names):
        return names
    raise ValueError(
        f"--metric={wanted or '|'.join(PREFERRED)}: the runs share "
        f"{', '.join(sorted(shared - {'round', 'seed'}))}"
    )


def _is_fraction(metric: str, runs: Sequence[Run]) -> bool:
    """Whether a metric's curve is drawn in percent."""
    return words.is_fraction(metric, collections.ChainMap(*(r.fractions for r in runs)))


def curves(runs: Sequence[Run], names: Sequence[str], metrics: Sequence[str]) -> Figure:
    """Metrics of one unit over rounds: mean and standard deviation over seeds."""
    series = [
        (run, metric, f"{name} {words.title(metric)}" if len(metrics) > 1 else name)
        for run, name in zip(runs, names, strict=True)
        for metric in metrics
    ]
    width = 7 + 0.075 * max(len(label) for *_, label in series)
    figure = Figure(figsize=(width, 4.8), layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.color_sequences["tab10"]
    drawn = []
    is_share = _is_fraction(metrics[0], runs)
    scale, form = (100, ".1f") if is_share else (1, ".3g")
    for number, (run, metric, label) in enumerate(series):
        rounds, mean, spread = over_seeds(run, metric, scale)
        if not rounds:
            continue
        style = {"color": colors[number % 10], "ls": ("-", "--", ":")[number // 10 % 3]}
        (line,) = axes.plot(rounds, mean, label=label, lw=1.6, **style)
        axes.fill_between(
            rounds, mean - spread, mean + spread, color=style["color"], alpha=0.15, lw=0
        )
        having = [row for row in run.records if row.get(metric) is not None]
        drawn.append((mean[-1], line, len({row["seed"] for row in having})))
    drawn.sort(key=lambda one: -one[0])
    is_same = len({count for *_, count in drawn}) == 1
    figure.legend(
        [line for _, line, _ in drawn],
        [
            f"{line.get_label()}  {last:{form}}{'' if is_same else f', n={count}'}"
            for last, line, count in drawn
        ],
        loc="outside right upper",
        title="last round, %" if is_share else "last round",
        frameon=False,
        fontsize=9,
    )
    seeds = max(len({row["seed"] for row in run.records}) for run in runs)
    band = f", mean ± std of {seeds} seeds" if seeds > 1 else ""
    # Several metrics have their names in the legend.
    told = [words.title(metric) for metric in metrics if len(metrics) == 1]
    axes.set(
        xlabel="rounds done",
        ylabel=", ".join([*told, *(["%"] if is_share else [])]),
        xlim=(0, None),
    )
    axes.set_title(f"{_data(runs)}{band}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    return figure


def fairness(runs: Sequence[Run], names: Sequence[str]) -> Figure:
    """Clients by accuracy in bins of ten points: one panel for each run.

    A client's accuracy is its mean over the summary window; counts are means over
    seeds.
    """
    figure, panels = _panels(len(runs), width=2.9, height=2.2)
    edges = np.arange(0, 101, 10)
    for axes, run, name in zip(panels, runs, names, strict=True):
        # Rounded: the mean of ten times 0.6 must not fall below the edge at 60.
        accuracy = np.round(100 * accuracies(run), 6)
        accuracy = accuracy[np.isfinite(accuracy)]
        seeds = len(run.clients["seeds"])
        # The last bin is closed: a client with 100 % belongs to it.
        counts = np.histogram(accuracy, edges)[0] / seeds
        axes.bar(edges[:-1], counts, width=9, align="edge", color="tab:blue")
        axes.axvline(accuracy.mean(), color="tab:red", lw=1.2)
        good = (accuracy >= 80).sum() / seeds
        axes.set_title(f"{name}\n{good:.1f} clients reach 80 %", fontsize=9)
        axes.set_xticks(edges[::2])
        axes.tick_params(labelbottom=True)
    figure.supxlabel("accuracy of a client, % (red line: mean)")
    figure.supylabel("clients")
    figure.suptitle(f"{_data(runs)}, summary rounds, mean over seeds", fontsize=10)
    return figure


def bubbles(runs: Sequence[Run], names: Sequence[str]) -> Figure:
    """Train examples per client and class, first seed: one panel for each partition."""
    shown: list[tuple[Run, str, np.ndarray]] = []
    for run, name in zip(runs, names, strict=True):
        counts = run.clients["class_counts"][0]
        if not any(np.array_equal(counts, other) for *_, other in shown):
            shown.append((run, name, counts))
    longest = max(len(counts) for *_, counts in shown)
    figure, panels = _panels(len(shown), width=max(3.6, 0.14 * longest), height=3.2)
    largest = max(int(counts.max()) for *_, counts in shown)
    scale = 160 / largest

    for axes, (run, name, counts) in zip(panels, shown, strict=True):
        client, label = np.nonzero(counts)
        axes.scatter(
            client, label, s=scale * counts[client, label], alpha=0.7, linewidths=0
        )
        alphas = {other.flags.get("partition_alpha") for other, *_ in shown}
        if len(alphas) > 1:
            name = f"alpha {run.flags.get('partition_alpha')}"
        if len(shown) > 1:
            axes.set_title(name, fontsize=9)
        axes.margins(0.04)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(ticker.MaxNLocator(integer=True))
    nice = [step * 10**power for power in range(7) for step in (1, 2, 5)]
    steps = [step for step in nice if step <= largest][-1:-7:-3][::-1]
    handles = [
        panels[0].scatter(
            [], [], s=scale * step, color="tab:blue", alpha=0.7, linewidths=0
        )
        for step in steps
    ]
    figure.legend(
        handles,
        [f"{step}" for step in steps],
        title="examples",
        loc="outside right upper",
        frameon=False,
    )
    figure.supxlabel("client")
    figure.supylabel("class")
    seeds = sorted({int(run.clients["seeds"][0]) for run, *_ in shown})
    figure.suptitle(
        f"{_data(runs)}: train examples, seed {', '.join(map(str, seeds))}", fontsize=10
    )
    return figure


def has_two_names(runs: Sequence[Run]) -> bool:
    """Whether the runs are the points of one sweep of two names, as a grid."""
    swept = {tuple(run.point) for run in runs}
    sides = [{run.point.get(n) for run in runs} for n in next(iter(swept))]
    is_one = len(swept) == 1 and len({run.path for run in runs}) == 1
    return is_one and len(sides) == 2 and len(sides[0]) * len(sides[1]) == len(runs)


def heatmap(runs: Sequence[Run], metric: str) -> Figure:
    """A metric's summary, mean over seeds, at each point of a sweep of two names."""
    figure = Figure(layout="constrained")
    draw_heatmap(figure.subplots(), runs, metric)
    figure.suptitle(f"{_data(runs)}, {words.title(metric)}", fontsize=10)
    return figure


def draw_heatmap(axes: Any, runs: Sequence[Run], metric: str) -> None:
    """Draws `heatmap` into axes: a cell for each pair, with its value."""
    across, down = runs[0].point
    columns, rows = (
        sorted({run.point[name] for run in runs}) for name in (across, down)
    )
    is_fraction = _is_fraction(metric, runs)
    scale, form = (100, ".1f") if is_fraction else (1, ".3g")
    values = np.full((len(rows), len(columns)), np.nan)
    for run in runs:
        place = rows.index(run.point[down]), columns.index(run.point[across])
        known = (run.summary or {}).get("metrics", {}).get(metric)
        if known is not None:
            values[place] = scale * known["mean"]
        else:
            _, mean, _ = over_seeds(run, metric, scale)
            values[place] = mean[-1] if len(mean) else np.nan
    image = axes.imshow(values, cmap="viridis", origin="lower", aspect="auto")
    middle = np.nanmean([np.nanmin(values), np.nanmax(values)])
    for (row, column), value in np.ndenumerate(values):
        text = "" if np.isnan(value) else f"{value:{form}}"
        color = "white" if value < middle else "black"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(columns)), [str(one) for one in columns])
    axes.set_yticks(range(len(rows)), [str(one) for one in rows])
    axes.set(xlabel=across, ylabel=down)
    axes.figure.colorbar(image, ax=axes, label="%" if is_fraction else "")


def _data(runs: Sequence[Run]) -> str:
    """The data set, and the partition where all runs share it."""
    parts = []
    for name in ("dataset", "partition", "partition_alpha"):
        values = {run.flags.get(name) for run in runs}
        if len(values) == 1:
            value = values.pop()
            if name != "partition_alpha":
                parts.append(str(value))
            elif all("dirichlet" in run.flags["partition"] for run in runs):
                parts.append(f"alpha {value}")
    return _unformatted(", ".join(parts))


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """A figure of `count` panels with shared axes, at most four in a row."""
    columns = min(4, count)
    rows = -(-count // columns)
    figure = Figure(
        figsize=(width * columns + 1, height * rows + 0.6), layout="constrained"
    )
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    return figure, list(grid.flat[:count])


def command(argv: Sequence[str] | None = None) -> None:
    """The command."""
    with ending.reported():
        _command(list(sys.argv if argv is None else argv))


def _command(argv: Sequence[str]) -> None:
    values = absl_flags.FlagValues()
    for name, default, text in (
        ("output", "plots", "folder of the pictures"),
        (
            "metric",
            "",
            "metrics of the curves, separated by commas; default "
            f"{' or '.join(PREFERRED)}",
        ),
        (
            "kind",
            "",
            f"pictures to draw, separated by commas; default {','.join(KINDS)}, of "
            "runs that are not finished curves; of a sweep of two names also heatmap",
        ),
        ("format", "png", "png, pdf or svg"),
    ):
        absl_flags.DEFINE_string(name, default, text, flag_values=values)
    try:
        folders = flags.beside(argv, values, __doc__)
        if not folders:
            raise ValueError("give the folders of one or more runs")
        if values.format not in FORMATS:
            raise ValueError(
                f"--format={values.format}: expected one of {', '.join(FORMATS)}"
            )
        runs = [run for name in folders for run in by_point(read(pathlib.Path(name)))]
        all_kinds = ["curves"]
        if all(run.clients for run in runs):
            all_kinds += ["fairness"] * all(map(has_clients, runs)) + ["bubbles"]
        all_kinds += ["heatmap"] * has_two_names(runs)
        kinds = values.kind.split(",") if values.kind else all_kinds
        figures = {kind: picture(kind, runs, values.metric) for kind in kinds}
    except (ValueError, absl_flags.Error) as error:
        flags.fail(error)
    except OSError as error:
        flags.fail(error, 1)
    folder = pathlib.Path(values.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for kind, figure in figures.items():
            path = folder / f"{kind}.{values.format}"
            figure.savefig(path, dpi=130)
            print(path)
    except OSError as error:
        flags.fail(f"--output={folder}: {error}", 1)


if __name__ == "__main__":
    command()
