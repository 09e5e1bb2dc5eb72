"""Pictures of runs: curves, fairness, class bubbles, heat maps of sweeps."""

import io
import itertools
import textwrap
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
from launch.show import looks, words

Runs = Sequence[Record]
Looks = Sequence[looks.Look]
Curve = tuple[Sequence[float], np.ndarray, np.ndarray]  # place, mean, deviation
KINDS = ("curves", "ecdf", "fairness", "bubbles")
FORMATS = ("png", "pdf", "svg")
WIDTHS = {"": 0.0, "column": 3.4, "page": 7.0}
DOT = 5.0  # the smallest bubble, points squared
MAX_POINTS = 1500  # of clients; more are thinned out
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
    width: str = "",
    among: Sequence[str] = (),
) -> Figure:
    """Draws a picture of the runs: one of `KINDS`, or `heatmap`.

    `metric` has metrics of curves separated by commas, empty = those of `metrics_of`,
    and `x` is one of `curves_lib.PLACES`. `names` are those of the runs, empty = what
    distinguishes them, and each has its look `among` these names, empty = `names`. A
    `width` of `WIDTHS` has fonts for a paper. Raises a ValueError for an unknown name,
    or a picture that needs finished runs.
    """
    options.check_one_of("width", width, WIDTHS)
    if kind not in (*KINDS, "heatmap"):
        raise ValueError(f"--kind={kind}: expected one of {', '.join(KINDS)}, heatmap")
    names = list(names or record.labels(runs))
    own = looks.looks(among or names)
    styles = [own[name] for name in names]
    pairs = zip(runs, looks.titles(names), strict=True)
    names = [_unformatted(named(*pair)) for pair in pairs]
    more = ()
    if kind in ("curves", "heatmap"):
        metrics = metrics_of(runs, metric)
        more = (metrics, x) if kind == "curves" else (metrics[0],)
    else:
        _check_clients(runs, kind)
    if kind == "heatmap" and not has_two_names(runs):
        raise ValueError(
            "--kind=heatmap: expected one sweep of two names; give --kind=curves"
        )
    draw = {"curves": curves, "ecdf": ecdf, "fairness": fairness, "bubbles": bubbles}
    how = {"styles": styles} if kind in ("curves", "ecdf") else {}
    fonts = {"font.size": 8 if width else 10, "figure.labelsize": "medium"}
    with matplotlib.rc_context(fonts):
        figure = draw.get(kind, heatmap)(
            runs, names, *more, inches=WIDTHS[width], **how
        )
        if width:
            figure.suptitle("")  # a paper's picture has a caption
        # Otherwise what is drawn later has other fonts.
        figure.draw_without_rendering()
    return figure


def _check_clients(runs: Runs, kind: str) -> None:
    """Raises a ValueError if runs lack what a picture of clients needs."""
    for run in runs:
        if not run.clients or run.summary is None and kind != "bubbles":
            line = f"--kind={kind}: {run.path} is not finished"
            raise ValueError(f"{line}; omit it, or give --kind=curves")
    if kind != "bubbles" and not all(map(record.has_clients, runs)):
        raise ValueError(
            f"--kind={kind}: a run has no accuracies of single clients, as with "
            "--eval_moments=after; omit it, or give --kind=curves,bubbles"
        )
    if kind != "bubbles" and len(set(map(record.is_text, runs))) > 1:
        raise ValueError(
            f"--kind={kind}: some runs are of texts, which have perplexities, and "
            "others of images; give one kind"
        )


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
    if len({metric_of(name, runs).scale for name in names}) > 1:
        raise ValueError(
            f"--metric={wanted}: percent, megabytes and numbers need a picture each"
        )
    if names and shared.issuperset(names):
        return names
    raise ValueError(
        f"--metric={wanted or '|'.join(PREFERRED)}: the runs share "
        f"{', '.join(sorted(filter(_is_metric, shared)))}"
    )


def _is_metric(name: str) -> bool:
    """Whether a number of a record is more than a place or a number of clients."""
    is_count = name.startswith(metric_kinds.CLIENTS_IN) or name.endswith(
        metric_kinds.EVALUATED
    )
    return name not in ("round", "seed") and not is_count


def metric_of(name: str, runs: Runs) -> words.Metric:
    """How a metric of runs is shown."""
    return words.metric(name, record.kinds(runs))


def curves(
    runs: Runs,
    names: Sequence[str],
    metrics: Sequence[str],
    x: str = "rounds",
    inches: float = 0.0,
    styles: Looks = (),
) -> Figure:
    """Metrics of one unit over `x`: mean and standard deviation over seeds.

    The legend has the numbers of the table where all runs are finished and have one
    summary rule, else those of the last round. Raises a ValueError if the records of a
    run do not have `x`.
    """
    options.check_one_of("x", x, curves_lib.PLACES)
    xlabel, place = curves_lib.PLACES[x]
    styles, several = styles or list(looks.looks(names).values()), len(metrics) > 1
    series = []
    for run, name, own in zip(runs, names, styles, strict=True):
        for metric, dashes in zip(metrics, itertools.cycle(looks.DASHES)):
            label = f"{name} {words.title(metric)}" if several else name
            # Of several metrics, each has dashes of its own.
            look = own._replace(dashes=dashes) if several else own
            series.append((run, metric, label, look))
    figure, axes = _one([label for _, _, label, _ in series], inches)
    drawn, first = [], metric_of(metrics[0], runs)
    rule = _rule(runs, metrics)
    for run, metric, label, look in series:
        try:
            curve = record.over_seeds(run, metric, first.scale, place)
        except KeyError as error:
            line = f"--x={x}: the records of {label} have no {error.args[0]}"
            cure = "run it with --client_speed" if x == "clock" else "give --x=rounds"
            raise ValueError(f"{line}; {cure}") from error
        if curve[0]:
            line = draw_curve(axes, curve, look, label=label)
            having = [row for row in run.records if row.get(metric) is not None]
            last = max(row["round"] for row in having)
            value = curve[1][-1], sum(row["round"] == last for row in having)
            if rule:
                entry = run.summary["metrics"][metric]
                value = first.scale * entry["mean"], len(entry["per_seed"])
            drawn.append((value[0], line, value[1]))
    seeds = max(len({row["seed"] for row in run.records}) for run in runs)
    is_all = {count for *_, count in drawn} == {seeds}
    drawn = [(*one, f", n={count}" * (not is_all)) for *one, count in drawn]
    _legend(figure, drawn, first, rule or "last round")
    band = f", mean ± std of {seeds} seeds" if seeds > 1 else ""
    # The names of several metrics are in the legend.
    ylabel = first.unit if several else words.axis(first)
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, None))
    axes.grid(alpha=0.3)
    _title(figure, f"{_data(runs)}{band}")
    if x == "rounds":
        steps = (1, 2, 5, 10)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, steps=steps))
    return figure


def _rule(runs: Runs, metrics: Sequence[str]) -> str:
    """The rule in words by which all runs have these metrics; "" = the last round's."""
    every = [run.summary or {"metrics": (), "summary": ""} for run in runs]
    rules = {
        words.summary_rule(one) if set(metrics) <= set(one["metrics"]) else ""
        for one in every
    }
    return "" if len(rules) > 1 or rules == {"last"} else rules.pop()


def draw_curve(axes: Any, curve: Curve, look: looks.Look, **style: Any) -> Any:
    """Draws a mean as a line, with a band of its deviation; returns the line."""
    where, mean, spread = curve
    # The library cannot space the markers of a line without points.
    style |= look.style() | ({} if np.isfinite(mean).any() else {"markevery": 1})
    (line,) = axes.plot(where, mean, **style)
    if spread.any():
        band = mean - spread, mean + spread
        axes.fill_between(where, *band, color=look.color, alpha=0.15, lw=0)
    return line


def ecdf(
    runs: Runs, names: Sequence[str], inches: float = 0.0, styles: Looks = ()
) -> Figure:
    """How many clients have at least which accuracy, or at most which perplexity."""
    figure, axes = _one(names, inches)
    drawn, styles = [], styles or list(looks.looks(names).values())
    for run, name, own in zip(runs, names, styles, strict=True):
        line = draw_ecdf(axes, run, own, label=name)
        drawn.append((np.nanmean(record.of_clients(run)), line, ""))
    how = words.metric(f"client_{record.measured(runs[0])}")
    _legend(figure, drawn, how, "mean")
    _title(figure, f"{_data(runs)}, summary rounds")
    axes.grid(alpha=0.3)
    return figure


def draw_ecdf(axes: Any, run: Record, look: looks.Look, **style: Any) -> Any:
    """Draws the share of clients (of all seeds) by their value; returns the line."""
    kind, is_text = record.measured(run), record.is_text(run)
    values = np.sort(record.of_clients(run).ravel())
    values = values[np.isfinite(values)]
    if len(values) > MAX_POINTS:
        values = np.quantile(values, np.linspace(0, 1, MAX_POINTS))
    share = 100 * np.arange(1, len(values) + 1) / len(values)
    steps, xlim = ("steps-post", None) if is_text else ("steps-pre", (0, 101))
    share = share if is_text else share[::-1]
    style |= look.style() | {"drawstyle": steps}
    (line,) = axes.plot(values, share, **style)
    which = "at most" if is_text else "at least"
    axes.set(xlabel=f"{kind} of a client" + " (%)" * (not is_text), xlim=xlim)
    axes.set(ylabel=f"clients with {which} this (%)", ylim=(0, 103))
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
    size = np.maximum(scale * counts[client, label], DOT)
    axes.scatter(client, label, s=size, alpha=0.7, linewidths=0, **style)
    for axis, most in (axes.xaxis, "auto"), (axes.yaxis, 10):
        axis.set_major_locator(ticker.MaxNLocator(most, integer=True))
    if names:
        texts = [_unformatted(labels.limited(name)) for name in names]
        if len(texts) <= MAX_NAMES:
            axes.yaxis.set_major_locator(ticker.FixedLocator(range(len(texts))))

        def name_at(place: float, _: int) -> str:
            is_class = place == round(place) and 0 <= place < len(texts)
            return texts[round(place)] if is_class else ""

        axes.yaxis.set_major_formatter(name_at)


def fairness(runs: Runs, names: Sequence[str], inches: float = 0.0) -> Figure:
    """Clients by accuracy in bins of ten points, or by perplexity, a panel per run.

    A client's value is its mean over the summary rounds. Counts are means over seeds.
    """
    is_text = record.is_text(runs[0])
    # Rounding keeps the mean of ten times 0.6 from falling below the edge at 60.
    found = [np.round(record.of_clients(run), 6).ravel() for run in runs]
    found = [values[np.isfinite(values)] for values in found]
    edges, ticks = np.arange(0, 101, 10), np.arange(0, 101, 20)
    if is_text:
        every = np.concatenate(found)
        limits = every.min(), every.max()
        edges = ticker.MaxNLocator(10).tick_values(*limits)
        ticks = ticker.MaxNLocator(4).tick_values(*limits)
    figure, panels = _panels(len(runs), 2.9, 2.2, inches)
    for axes, run, name, values in zip(panels, runs, names, found, strict=True):
        seeds = len(run.clients["seeds"])
        # The last bin is closed, and contains a client with 100 %.
        counts = np.histogram(values, edges)[0] / seeds
        style = {"align": "edge", "color": "tab:blue"}
        axes.bar(edges[:-1], counts, width=0.9 * np.diff(edges), **style)
        axes.axvline(values.mean(), color="tab:red", lw=1.2)
        good = f"\n{(values >= 80).sum() / seeds:.1f} clients reach 80 %"
        axes.set_title(name if is_text else name + good, fontsize="small")
        axes.set_xticks(ticks)
        axes.tick_params(labelbottom=True)
    kind = "perplexity of a client (" if is_text else "accuracy of a client (%, "
    figure.supxlabel(f"{kind}red line: mean)")
    figure.supylabel("clients")
    _title(figure, f"{_data(runs)}, summary rounds, mean over seeds")
    return figure


def bubbles(runs: Runs, names: Sequence[str], inches: float = 0.0) -> Figure:
    """Train examples per client and class of the first seed, a panel per partition."""
    shown = [(runs[n[0]], names[n[0]], counts) for n, counts in partitions(runs)]
    if not shown:
        raise ValueError("--kind=bubbles: texts have no classes; give --kind=curves")
    longest = max(len(counts) for *_, counts in shown)
    figure, panels = _panels(len(shown), max(3.6, 0.14 * longest), 3.2, inches)
    largest = max(int(counts.max()) for *_, counts in shown)
    across = panels[0].get_position().width * figure.get_figwidth()
    scale = 160 / largest * min(1, across / 2.8)
    # Panels share their axes.
    classes = record.shared_class_names(run for run, *_ in shown)
    for axes, (run, name, counts) in zip(panels, shown, strict=True):
        draw_bubbles(axes, counts, scale, classes)
        alphas = {other.flags.get("partition_alpha") for other, *_ in shown}
        if len(alphas) > 1:
            name = f"alpha {run.flags.get('partition_alpha')}"
        if len(shown) > 1:
            axes.set_title(name, fontsize="small")
        axes.margins(0.04)
    nice = [step * 10**power for power in range(7) for step in (1, 2, 5)]
    steps = [step for step in nice if step <= largest][-1:-7:-3][::-1]
    style = {"color": "tab:blue", "alpha": 0.7, "linewidths": 0}
    sizes = [max(scale * step, DOT) for step in steps]
    handles = [panels[0].scatter([], [], s=size, **style) for size in sizes]
    place = {"loc": "outside right center", "title": "examples", "frameon": False}
    figure.legend(handles, list(map(str, steps)), **place)
    figure.supxlabel("client")
    figure.supylabel("class")
    seeds = sorted({int(run.clients["seeds"][0]) for run, *_ in shown})
    seeds_of = ", ".join(map(str, seeds))
    _title(figure, f"{_data(runs)}: train examples, seed {seeds_of}")
    return figure


def has_two_names(runs: Runs) -> bool:
    """Whether the runs are all points of one sweep of two names."""
    swept = {tuple(run.point) for run in runs}
    sides = [{run.point.get(n) for run in runs} for n in next(iter(swept))]
    is_one = len(swept) == 1 and len({run.path for run in runs}) == 1
    return is_one and len(sides) == 2 and len(sides[0]) * len(sides[1]) == len(runs)


def heatmap(runs: Runs, _: Sequence[str], metric: str, inches: float = 0.0) -> Figure:
    """A metric's summary, mean over seeds, at each point of a sweep of two names."""
    figure, axes = _one([""], inches)
    draw_heatmap(axes, runs, metric)
    _title(figure, f"{_data(runs)}, {words.title(metric)}")
    return figure


def draw_heatmap(axes: Any, runs: Runs, metric: str) -> None:
    """Draws `heatmap` into axes, with a cell and a value for each pair."""
    across, down = runs[0].point
    columns, rows = (sorted({run.point[n] for run in runs}) for n in (across, down))
    how = metric_of(metric, runs)
    values, bad = np.full((len(rows), len(columns)), np.nan), set()
    for run in runs:
        place = rows.index(run.point[down]), columns.index(run.point[across])
        known = (run.summary or {}).get("metrics", {}).get(metric)
        if record.diverged(run) is not None:
            bad.add(place)
        elif known is not None:
            values[place] = how.scale * known["mean"]
        else:
            _, mean, _ = record.over_seeds(run, metric, how.scale)
            values[place] = mean[-1] if len(mean) else np.nan
    image = axes.imshow(values, cmap="viridis", origin="lower", aspect="auto")
    sound = values[np.isfinite(values)]
    middle = np.mean([sound.min(), sound.max()]) if sound.size else np.nan
    for (row, column), value in np.ndenumerate(values):
        text = "" if np.isnan(value) else f"{value:{how.form}}"
        text = "diverged" if (row, column) in bad else text
        color = "white" if value < middle else "black"
        axes.text(column, row, text, ha="center", va="center", color=color)
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


def _title(figure: Figure, text: str) -> None:
    """Writes a title in as many lines as it needs."""
    lines = textwrap.fill(text, int(13 * figure.get_figwidth()))
    figure.suptitle(lines, fontsize="medium")


def _one(names: Sequence[str], inches: float) -> tuple[Figure, Any]:
    """A figure of one panel, `inches` wide; 0 = with room for a legend of `names`."""
    width = inches or 7 + 0.075 * max(map(len, names))
    figure = Figure((width, min(4.8, 0.7 * width)), layout="constrained")
    return figure, figure.subplots()


def _legend(
    figure: Figure, drawn: Sequence[tuple[Any, ...]], how: words.Metric, what: str
) -> None:
    """Names (value, line, note), the best first; below the panel if it is narrow."""
    drawn = sorted(drawn, key=lambda one: one[0], reverse=how.better != "lower")
    texts = [f"{line.get_label()}  {one:{how.form}}{note}" for one, line, note in drawn]
    style = {"title": ", ".join(filter(None, [what, how.unit])), "frameon": False}
    width, place = figure.get_figwidth(), "outside right center"
    if width < 5:
        columns = max(1, int(14 * width / (7 + max(map(len, texts), default=0))))
        style["ncols"], place = columns, "outside lower center"
        rows = 2 + len(texts) // columns
        figure.set_figheight(figure.get_figheight() + 0.15 * rows)
    lines = [line for _, line, _ in drawn]
    figure.legend(lines, texts, loc=place, handlelength=3, **style)


def _panels(
    count: int, width: float, height: float, inches: float
) -> tuple[Figure, list[Any]]:
    """A figure of `count` panels with shared axes, at most four in a row."""
    columns = min(4, count)
    if inches:
        columns = min(columns, max(1, int(inches / 1.6)))
        width, height = (inches - 0.6) / columns, height * inches / columns / width
        height = max(1.4, min(height, 2.4))
    rows = -(-count // columns)
    size = inches or width * columns + 1, height * rows + 0.6
    figure = Figure(size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    return figure, list(grid.flat[:count])
