"""Pictures of runs: curves, fairness, class bubbles, heat maps of sweeps."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import figure as figure_lib
from matplotlib import ticker

from data import labels
from fedjax_pfl import metric_kinds, options
from fedjax_pfl.metric_kinds import Kind
from launch.folder import finished, record
from launch.folder.record import Record
from launch.show import curves as curves_lib
from launch.show import words

Runs = Sequence[Record]
KINDS = ("curves", "fairness", "bubbles")
FORMATS = ("png", "pdf", "svg")
MAX_NAMES = 25  # of classes beside an axis; longer lists are thinned out
PREFERRED = (
    "client_accuracy",
    "c_per",
    "global_accuracy",
    "client_perplexity",
    "global_perplexity",
    "client_masked_perplexity",
    "masked_perplexity",
)


class Figure(figure_lib.Figure):
    """A figure that notebooks show automatically."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=110)
        return file.getvalue()


def named(run: Record, name: str) -> str:
    """A run's name, and if it diverged, in which round."""
    since = record.diverged(run)
    return name if since is None else f"{name} ({words.diverged(since)})"


def _unformatted(text: str) -> str:
    """Escapes dollars, which would begin a formula in matplotlib."""
    return text.replace("$", r"\$")


def picture(
    kind: str,
    runs: Runs,
    metric: str = "",
    names: Sequence[str] = (),
    x: str = "rounds",
) -> Figure:
    """Draws a picture of the runs: one of `KINDS`, or `heatmap`.

    `metric` has metrics of curves separated by commas, empty = those of `metrics_of`,
    and `names` those of the runs, empty = what distinguishes them. `x` is the axis of
    curves, one of `curves.AXES`. Raises a ValueError for an unknown picture, metric or
    axis, or a picture that needs finished runs.
    """
    if kind not in (*KINDS, "heatmap"):
        raise ValueError(f"--kind={kind}: expected one of {', '.join(KINDS)}, heatmap")
    pairs = zip(runs, names or record.labels(runs), strict=True)
    names = [_unformatted(named(*pair)) for pair in pairs]
    if kind == "curves":
        options.check_one_of("x", x, curves_lib.AXES)
        return curves(runs, names, metrics_of(runs, metric), x)
    if kind == "heatmap":
        if not has_two_names(runs):
            raise ValueError(
                "--kind=heatmap: expected one sweep of two names; give --kind=curves"
            )
        return heatmap(runs, metrics_of(runs, metric)[0])
    for run in runs:
        if not run.clients:
            line = f"--kind={kind}: {run.path} is not finished"
            raise ValueError(f"{line}; omit it, or give --kind=curves")
    if kind == "fairness":
        return fairness(runs, names)
    return bubbles(runs, names)


def metrics_of(runs: Runs, wanted: str | Sequence[str]) -> list[str]:
    """The metrics to draw: `wanted`, or the first of `PREFERRED` that all runs have.

    `wanted` are names, or one text of them separated by commas. Raises a ValueError if
    a run lacks one, or if percent and numbers are mixed.
    """
    # The record before the first round lacks the metrics that rounds measure.
    shared = set.intersection(*(set().union(*run.records) for run in runs))
    if not isinstance(wanted, str):
        try:
            wanted = ",".join(wanted)
        except TypeError as error:
            raise ValueError(f"metric={wanted!r}: expected names") from error
    names = wanted.split(",") if wanted else [n for n in PREFERRED if n in shared][:1]
    of_text = {Kind.PERPLEXITY in map(metric_kinds.of, r.records[-1]) for r in runs}
    if not names and len(of_text) > 1:
        raise ValueError(
            "some runs are of texts, which have perplexities, and others of images; "
            "give one kind, or for curves --metric=train_loss"
        )
    if len({metric_of(name, runs).unit for name in names}) > 1:
        raise ValueError(f"--metric={wanted}: percent and numbers need a picture each")
    if names and shared.issuperset(names):
        return names
    raise ValueError(
        f"--metric={wanted or '|'.join(PREFERRED)}: the runs share "
        f"{', '.join(sorted(shared - {'round', 'seed'}))}"
    )


def metric_of(name: str, runs: Runs) -> words.Metric:
    """How a metric of runs is shown."""
    return words.metric(name, record.kinds(runs))


def curves(
    runs: Runs, names: Sequence[str], metrics: Sequence[str], x: str = "rounds"
) -> Figure:
    """Metrics of one unit over `x`: mean and standard deviation over seeds."""
    xlabel, place = curves_lib.AXES[x]
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
    first = metric_of(metrics[0], runs)
    for number, (run, metric, label) in enumerate(series):
        where, mean, spread = record.over_seeds(run, metric, first.scale, place)
        if not where and x == "clock":
            raise ValueError(f"--x=clock: {run.path} has no clock (--client_speed)")
        if not where:
            continue
        style = {"color": colors[number % 10], "ls": ("-", "--", ":")[number // 10 % 3]}
        line = draw_curve(axes, (where, mean, spread), 0.15, label=label, **style)
        having = [row for row in run.records if row.get(metric) is not None]
        drawn.append((mean[-1], line, len({row["seed"] for row in having})))
    drawn.sort(key=lambda one: one[0], reverse=first.better != "lower")
    is_same = len({count for *_, count in drawn}) == 1
    texts = [
        f"{line.get_label()}  {last:{first.form}}" + f", n={count}" * (not is_same)
        for last, line, count in drawn
    ]
    title = ", ".join(filter(None, ["last round", first.unit]))
    place = {"loc": "outside right upper", "frameon": False, "fontsize": 9}
    figure.legend([line for _, line, _ in drawn], texts, title=title, **place)
    seeds = max(len({row["seed"] for row in run.records}) for run in runs)
    band = f", mean ± std of {seeds} seeds" if seeds > 1 else ""
    # The names of several metrics are in the legend.
    titles = [first.title] if len(metrics) == 1 else []
    titles += ["perplexity"] if titles and first.kind is Kind.PERPLEXITY else []
    ylabel = ", ".join(filter(None, [*titles, first.unit]))
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, None))
    axes.set_title(f"{_data(runs)}{band}", fontsize=10)
    axes.grid(alpha=0.3)
    if x == "rounds":
        steps = ticker.MaxNLocator(integer=True, steps=(1, 2, 5, 10))
        axes.xaxis.set_major_locator(steps)
    return figure


def draw_curve(
    axes: Any,
    curve: tuple[Sequence[float], np.ndarray, np.ndarray],
    alpha: float,
    **style: Any,
) -> Any:
    """Draws (x, mean, standard deviation) as a line with a band; returns the line."""
    where, mean, spread = curve
    (line,) = axes.plot(where, mean, lw=1.6, **style)
    if spread.any():
        color = line.get_color()
        band = mean - spread, mean + spread
        axes.fill_between(where, *band, color=color, alpha=alpha, lw=0)
    return line


def partitions(runs: Runs) -> list[tuple[list[int], np.ndarray]]:
    """Each distinct partition with its runs and its counts [client, class].

    Partitions with different class names are distinct. Those of texts, which have no
    classes, are omitted.
    """
    found: dict[Any, tuple[list[int], np.ndarray]] = {}
    for number, run in enumerate(runs):
        if finished.CLASS_COUNTS not in run.clients:
            continue
        counts = run.clients[finished.CLASS_COUNTS][0]
        key = counts.shape, counts.tobytes(), record.class_names(run)
        found.setdefault(key, ([], counts))[0].append(number)
    return list(found.values())


def draw_bubbles(
    axes: Any, counts: np.ndarray, scale: float, names: Sequence[str] = (), **style: Any
) -> None:
    """Draws counts [client, class] of examples as areas; `names` are the classes'."""
    client, label = np.nonzero(counts)
    size = scale * counts[client, label]
    axes.scatter(client, label, s=size, alpha=0.7, linewidths=0, **style)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(integer=True))
    if names:
        texts = [_unformatted(labels.limited(name)) for name in names]
        if len(texts) <= MAX_NAMES:
            axes.yaxis.set_major_locator(ticker.FixedLocator(range(len(texts))))

        def name_at(place: float, _: int) -> str:
            is_class = place == round(place) and 0 <= place < len(texts)
            return texts[round(place)] if is_class else ""

        axes.yaxis.set_major_formatter(name_at)


def fairness(runs: Runs, names: Sequence[str]) -> Figure:
    """Clients by accuracy in bins of ten points, or by perplexity, a panel per run.

    A client's value is its mean over the summary rounds. Counts are means over seeds.
    """
    if not all(map(record.has_clients, runs)):
        raise ValueError(
            "--kind=fairness: a run has no accuracies of single clients; omit it, or "
            "give --kind=curves,bubbles"
        )
    is_text = record.is_text(runs[0])
    if any(record.is_text(run) != is_text for run in runs):
        raise ValueError(
            "--kind=fairness: some runs are of texts, which have perplexities, and "
            "others of images; give one kind"
        )
    # Rounding keeps the mean of ten times 0.6 from falling below the edge at 60.
    found = [np.round(record.of_clients(run), 6).ravel() for run in runs]
    found = [values[np.isfinite(values)] for values in found]
    edges, ticks = np.arange(0, 101, 10), np.arange(0, 101, 20)
    if is_text:
        every = np.concatenate(found)
        limits = every.min(), every.max()
        edges = ticker.MaxNLocator(10).tick_values(*limits)
        ticks = ticker.MaxNLocator(4).tick_values(*limits)
    figure, panels = _panels(len(runs), width=2.9, height=2.2)
    for axes, run, name, values in zip(panels, runs, names, found, strict=True):
        seeds = len(run.clients["seeds"])
        # The last bin is closed, and contains a client with 100 %.
        counts = np.histogram(values, edges)[0] / seeds
        style = {"align": "edge", "color": "tab:blue"}
        axes.bar(edges[:-1], counts, width=0.9 * np.diff(edges), **style)
        axes.axvline(values.mean(), color="tab:red", lw=1.2)
        good = f"\n{(values >= 80).sum() / seeds:.1f} clients reach 80 %"
        axes.set_title(name if is_text else name + good, fontsize=9)
        axes.set_xticks(ticks)
        axes.tick_params(labelbottom=True)
    kind = "perplexity of a client (" if is_text else "accuracy of a client, % ("
    figure.supxlabel(f"{kind}red line: mean)")
    figure.supylabel("clients")
    figure.suptitle(f"{_data(runs)}, summary rounds, mean over seeds", fontsize=10)
    return figure


def bubbles(runs: Runs, names: Sequence[str]) -> Figure:
    """Train examples per client and class of the first seed, a panel per partition."""
    shown = [(runs[n[0]], names[n[0]], counts) for n, counts in partitions(runs)]
    if not shown:
        raise ValueError("--kind=bubbles: texts have no classes; give --kind=curves")
    longest = max(len(counts) for *_, counts in shown)
    figure, panels = _panels(len(shown), width=max(3.6, 0.14 * longest), height=3.2)
    largest = max(int(counts.max()) for *_, counts in shown)
    scale = 160 / largest
    every = {record.class_names(run) for run, *_ in shown}
    # Panels share their axes.
    classes = next(iter(every)) if len(every) == 1 else ()
    for axes, (run, name, counts) in zip(panels, shown, strict=True):
        draw_bubbles(axes, counts, scale, classes)
        alphas = {other.flags.get("partition_alpha") for other, *_ in shown}
        if len(alphas) > 1:
            name = f"alpha {run.flags.get('partition_alpha')}"
        if len(shown) > 1:
            axes.set_title(name, fontsize=9)
        axes.margins(0.04)
    nice = [step * 10**power for power in range(7) for step in (1, 2, 5)]
    steps = [step for step in nice if step <= largest][-1:-7:-3][::-1]
    style = {"color": "tab:blue", "alpha": 0.7, "linewidths": 0}
    handles = [panels[0].scatter([], [], s=scale * step, **style) for step in steps]
    place = {"loc": "outside right upper", "title": "examples", "frameon": False}
    figure.legend(handles, list(map(str, steps)), **place)
    figure.supxlabel("client")
    figure.supylabel("class")
    seeds = sorted({int(run.clients["seeds"][0]) for run, *_ in shown})
    figure.suptitle(
        f"{_data(runs)}: train examples, seed {', '.join(map(str, seeds))}", fontsize=10
    )
    return figure


def has_two_names(runs: Runs) -> bool:
    """Whether the runs are all points of one sweep of two names."""
    swept = {tuple(run.point) for run in runs}
    sides = [{run.point.get(n) for run in runs} for n in next(iter(swept))]
    is_one = len(swept) == 1 and len({run.path for run in runs}) == 1
    return is_one and len(sides) == 2 and len(sides[0]) * len(sides[1]) == len(runs)


def heatmap(runs: Runs, metric: str) -> Figure:
    """A metric's summary, mean over seeds, at each point of a sweep of two names."""
    figure = Figure(layout="constrained")
    draw_heatmap(figure.subplots(), runs, metric)
    figure.suptitle(f"{_data(runs)}, {words.title(metric)}", fontsize=10)
    return figure


def draw_heatmap(axes: Any, runs: Runs, metric: str) -> None:
    """Draws `heatmap` into axes, with a cell and a value for each pair."""
    across, down = runs[0].point
    columns, rows = (sorted({run.point[n] for run in runs}) for n in (across, down))
    how = metric_of(metric, runs)
    values = np.full((len(rows), len(columns)), np.nan)
    for run in runs:
        place = rows.index(run.point[down]), columns.index(run.point[across])
        known = (run.summary or {}).get("metrics", {}).get(metric)
        if known is not None:
            values[place] = how.scale * known["mean"]
        else:
            _, mean, _ = record.over_seeds(run, metric, how.scale)
            values[place] = mean[-1] if len(mean) else np.nan
    image = axes.imshow(values, cmap="viridis", origin="lower", aspect="auto")
    middle = np.nanmean([np.nanmin(values), np.nanmax(values)])
    for (row, column), value in np.ndenumerate(values):
        text = "" if np.isnan(value) else f"{value:{how.form}}"
        color = "white" if value < middle else "black"
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(columns)), [str(one) for one in columns])
    axes.set_yticks(range(len(rows)), [str(one) for one in rows])
    axes.set(xlabel=across, ylabel=down)
    axes.figure.colorbar(image, ax=axes, label=how.unit)


def _data(runs: Runs) -> str:
    """The data set, and the partition if all runs share it."""
    names = ["dataset", "partition"]
    if all("dirichlet" in run.flags["partition"] for run in runs):
        names.append("partition_alpha")
    parts = []
    for name in names:
        values = {run.flags.get(name) for run in runs}
        word = "alpha " * (name == "partition_alpha")
        parts += [f"{word}{value}" for value in values if len(values) == 1]
    return _unformatted(", ".join(parts))


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """A figure of `count` panels with shared axes, at most four in a row."""
    columns = min(4, count)
    rows = -(-count // columns)
    size = width * columns + 1, height * rows + 0.6
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    return figure, list(grid.flat[:count])
