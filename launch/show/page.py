"""One page about runs: a self-contained HTML file; it loads nothing from anywhere."""

from __future__ import annotations

import io
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import algorithms
from data import loaders
from launch.config import flagfile, schema, sweep
from launch.folder import finished, record
from launch.run import summaries
from launch.show import figures, sheets, words

TEMPLATES = pathlib.Path(__file__).parent / "templates"
COLORS = (
    "#3b82f6", "#ef4444", "#10b981", "#f59e0b", "#8b5cf6",
    "#ec4899", "#14b8a6", "#84cc16", "#f97316", "#64748b",
)  # fmt: skip
INK = "#010203"  # stands for the page's own colour, light or dark
MAX_POINTS, MAX_BUBBLES = 1500, 60


class Entry(NamedTuple):
    """A finished run as the page has it."""

    name: str
    color: str
    run: record.Record

    @property
    def summary(self) -> Mapping[str, Any]:
        """As the run left it."""
        return self.run.summary


class Cell(NamedTuple):
    """One number of the table: its text, whether it is the best, `up` or `down`."""

    text: str
    is_best: bool = False
    kind: str = ""


def read(folders: Sequence[pathlib.Path], names: Sequence[str] = ()) -> list[Entry]:
    """The runs of some folders.

    Args:
        folders: Of finished runs.
        names: What they are called; empty = by algorithm and what differs.

    Raises:
        ValueError: one holds no finished run, or a damaged one.
    """
    found = [record.by_point(record.read(folder)) for folder in folders]
    # A name of a folder is that of all of its points.
    names = [
        sweep.label(run.point, name)
        for name, points in zip(names, found, strict=bool(names))
        for run in points
    ]
    runs = [run for points in found for run in points]
    for run in runs:
        if run.summary is None:
            raise ValueError(f"{run.path} holds no finished run")
    return [
        Entry(name, COLORS[number % len(COLORS)], run)
        for number, (name, run) in enumerate(
            zip(names or record.labels(runs), runs, strict=True)
        )
    ]


def page(
    entries: Sequence[Entry],
    control: str = "",
    tables: Sequence[sheets.Sheet] = (),
    title: str = "",
) -> str:
    """The page as HTML.

    Args:
        entries: The runs.
        control: Algorithm (or name of a run) that the others are compared with; empty =
            the first run.
        tables: Of papers.
        title: Empty = made of the runs.

    Raises:
        ValueError: there is no such run, or the runs have no metric in common.
    """
    (metric,) = figures.metrics_of([entry.run for entry in entries], "")
    base = _control(entries, control)
    metrics = _metrics(entries)
    has_last = _has_last(entries, metric)
    rows = _rows(entries, metrics, metric, base, has_last)
    heads = [words.title(name) for name in metrics] + ["MB in all"]
    if has_last:
        heads.insert(metrics.index(metric) + 1, "in the last round")
    if len(entries) > 1:
        heads.insert(metrics.index(metric) + 1, f"against {base.name}")
    names = dict.fromkeys(n for entry in entries for n in entry.run.flags)
    told = [entry.run.flags for entry in entries]
    same = [n for n in names if len({flag.get(n) for flag in told}) == 1]
    silent = schema.names(schema.EXECUTION)
    seeds = max(len(entry.run.clients["seeds"]) for entry in entries)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report.html").render(
        title=title or _title(entries),
        setting=_setting(entries),
        answer=" ".join([_answer(entries, metric, base), *_diverged(entries)]),
        heads=heads,
        runs=[
            {
                "name": figures.named(entry.run, entry.name),
                "color": entry.color,
                "cells": cells,
                "speed": _speed(entry.summary),
            }
            for entry, cells in zip(entries, rows, strict=True)
        ],
        legend=(
            f"Percent{f', mean ± standard deviation of {seeds} seeds' * (seeds > 1)}"
            f"{_rules(entries)}; the best of a column in bold. Of all clients' bytes "
            "both ways, on average over seeds."
        ),
        tables=tables,
        sections=_sections(entries, metric),
        differing=[
            (name, [flag.get(name, "unset") for flag in told])
            for name in sorted(names)
            if name not in same and name not in silent
        ],
        same=[f"--{n}={told[0][n]}" for n in sorted(same) if n not in silent],
        commands=list(dict.fromkeys(_command_of(entry.run) for entry in entries)),
    )


def _control(entries: Sequence[Entry], wanted: str) -> Entry:
    for entry in entries:
        if not wanted or wanted in (entry.name, entry.run.flags["algo"]):
            return entry
    raise ValueError(
        f"--control={wanted}: expected one of "
        f"{', '.join(entry.name for entry in entries)}"
    )


def _metrics(entries: Sequence[Entry]) -> list[str]:
    """The shares that any run has, in the vocabulary's order."""
    found = dict.fromkeys(
        name
        for entry in entries
        for name in entry.summary["metrics"]
        if not name.startswith("bytes")
        and not summaries.is_number(entry.summary, name)
        and name != "client_accuracy_pooled"
    )
    order = list(words.METRICS)
    return sorted(
        found, key=lambda name: order.index(name) if name in order else len(order)
    )


def _rows(
    entries: Sequence[Entry],
    metrics: Sequence[str],
    metric: str,
    base: Entry,
    has_last: bool,
) -> list[list[Cell]]:
    """The table's cells, by run; with `has_last` the metric's last round too."""
    sound, best = _sound(entries), {}
    # Of a sweep's points none is the best, and of one run neither.
    are_ranked = len(entries) > 1 and not _is_sweep(entries)
    for name in metrics:
        means = [
            entry.summary["metrics"][name]["mean"]
            for entry in sound
            if name in entry.summary["metrics"]
        ]
        better = words.metric(name).better
        if means and better:
            best[name] = (min if better == "lower" else max)(means)
    out = []
    for entry in entries:
        cells = []
        for name in metrics:
            one = entry.summary["metrics"].get(name)
            if one is None:
                cells.append(Cell("–"))
            else:
                is_best = are_ranked and one["mean"] == best.get(name)
                is_sound = any(entry is other for other in sound)
                cells.append(Cell(words.mean_and_std(one), is_best and is_sound))
            if name == metric and len(entries) > 1:
                cells.append(_against(entry, base, metric))
            if name == metric and has_last:
                last = entry.summary.get("last_round", {}).get(metric)
                cells.append(Cell(words.mean_and_std(last) if last else "–"))
        sent = sum(
            entry.summary["metrics"].get(f"bytes_{way}", {"mean": 0})["mean"]
            for way in ("up", "down")
        )
        out.append([*cells, Cell(f"{sent / 1e6:,.1f}")])
    return out


def _has_last(entries: Sequence[Entry], metric: str) -> bool:
    """Whether a metric's last round is another number than its summary."""
    return any(
        entry.summary["summary"] != "last"
        and metric in entry.summary.get("last_round", {})
        for entry in entries
    )


def _gap(entry: Entry, base: Entry, metric: str) -> np.ndarray | None:
    """Points over the control by seed; of the means where the seeds differ.

    None where one has no such metric, or where their data sets differ.
    """
    pair = [one.summary["metrics"].get(metric) for one in (entry, base)]
    if None in pair or _data(entry.run) != _data(base.run):
        return None
    sides = [np.asarray(one["per_seed"]) for one in pair]
    seeds = [one.run.clients["seeds"] for one in (entry, base)]
    if not np.array_equal(*seeds):
        sides = [side.mean(keepdims=True) for side in sides]
    return 100 * (sides[0] - sides[1])


def _data(run: record.Record) -> str:
    """What names the examples of a run, whatever their file was called."""
    told = flagfile.RunFlags.read(run.path / finished.RUN_FLAGS)
    return told.hashes.get("data_sha256", told.options["dataset"])


def _rules(entries: Sequence[Entry]) -> str:
    """What the numbers are of, and which runs have fewer seeds than others."""
    rules = dict.fromkeys(
        entry.summary.get("summary_of", entry.summary["summary"]) for entry in entries
    )
    counts = [len(entry.run.clients["seeds"]) for entry in entries]
    fewer = [
        f"{entry.name} {count}"
        for entry, count in zip(entries, counts, strict=True)
        if count < max(counts)
    ]
    text = f", {' or '.join(rules)}"
    if fewer:
        text += (
            f"; of fewer seeds: {', '.join(fewer)}, so that a difference to these is "
            "one of means of other seeds"
        )
    return text


def _against(entry: Entry, base: Entry, metric: str) -> Cell:
    gap = None if entry is base else _gap(entry, base, metric)
    if gap is None:
        return Cell("–")
    kind = "up" if gap.mean() > 0 else "down" if gap.mean() < 0 else ""
    return Cell(words.paired(gap), kind=kind)


def _is_sweep(entries: Sequence[Entry]) -> bool:
    """Whether the runs are the points of one sweep: none of them is then the best.

    Their accuracies are of test rows, by which no point may be chosen.
    """
    return bool(entries[0].run.point) and len({e.run.path for e in entries}) == 1


def _title(entries: Sequence[Entry]) -> str:
    algos = list(dict.fromkeys(entry.run.flags["algo"] for entry in entries))
    told = ", ".join(algos[:4]) + (" and others" if len(algos) > 4 else "")
    data = ", ".join(dict.fromkeys(e.run.flags["dataset"] for e in entries))
    if len(entries) == 1:
        return f"{told} on {data}"
    if _is_sweep(entries):
        return f"{told} on {data}: a sweep of {' and '.join(entries[0].run.point)}"
    return f"Which of {len(entries)} runs answers best on {data}? ({told})"


def _setting(entries: Sequence[Entry]) -> str:
    """The data and the clients in words."""

    def told(name: str) -> str:
        values = dict.fromkeys(e.run.flags.get(name, "unset") for e in entries)
        return " or ".join(values)

    text = f"{told('num_clients')} clients, {told('clients_per_round')} a round, "
    text += f"{told('rounds')} rounds, partition {told('partition')}"
    if "dirichlet" in told("partition"):
        text += f" (alpha {told('partition_alpha')})"
    text = f"{text}, model {told('model')}."
    if " or " in told("summary"):
        text += f" The runs' summaries differ: {told('summary')} (--summary)."
    return text


def _answer(entries: Sequence[Entry], metric: str, base: Entry) -> str:
    """The result in a sentence."""
    ranked = sorted(
        (entry for entry in _sound(entries) if metric in entry.summary["metrics"]),
        key=lambda entry: -entry.summary["metrics"][metric]["mean"],
    )
    if _is_sweep(entries):
        means = [
            words.mean_and_std(e.summary["metrics"][metric])
            for e in (ranked[-1], ranked[0])
        ]
        return (
            f"Its {len(entries)} points have {means[0]} to {means[1]} % "
            f"({words.title(metric)}) on test rows. To choose a point by these would "
            "be to train on them; rows of validation come later."
        )
    best = ranked[0]
    text = (
        f"{best.name} reaches {words.mean_and_std(best.summary['metrics'][metric])} % "
        f"({words.title(metric)})"
    )
    if len(ranked) == 1:
        return f"{text}."
    other = base if base in ranked and best is not base else ranked[1]
    gap = _gap(best, other, metric)
    if gap is None:
        return f"{text}; {other.name} is of another data set."
    text += f", {words.paired(gap)} points against {other.name}"
    if len(gap) > 1:
        text += f", ahead in {(gap > 0).sum()} of {len(gap)} seeds"
    return f"{text}."


def _sound(entries: Sequence[Entry]) -> list[Entry]:
    """The runs that did not diverge; all, if every one did."""
    return [e for e in entries if record.diverged(e.run) is None] or list(entries)


def _diverged(entries: Sequence[Entry]) -> list[str]:
    """A sentence about the runs whose numbers are none."""
    names = [
        figures.named(entry.run, entry.name)
        for entry in entries
        if record.diverged(entry.run) is not None
    ]
    told = f"{', '.join(names)}: losses or parameters are no finite numbers from there "
    return [f"{told}on, and the accuracies say nothing."] if names else []


def _command_of(run: record.Record) -> str:
    """What runs it again."""
    given = {
        "algo": run.flags["algo"] not in algorithms.ALGORITHMS,
        "dataset": run.flags["dataset"] == loaders.ARRAYS,
        "model": run.flags.get("model", "").startswith("own_"),
        "client_model": run.flags.get("client_model", "").startswith("own_"),
    }
    if any(given.values()):
        told = ", ".join(f"{name}=..." for name, is_own in given.items() if is_own)
        return f"build.load({str(run.path)!r}, {told}).run()  # in Python"
    path = shlex.quote(str(run.path / finished.RUN_FLAGS))
    return f"python -m launch.main --flagfile={path}"


def _speed(summary: Mapping[str, Any]) -> list[str]:
    versions = " ".join(f"{k} {v}" for k, v in summary.get("versions", {}).items())
    commit = summary.get("git_commit", "")[:10]
    return [
        f"{summary['client_updates_per_second']:,.1f}",
        f"{summary['samples_per_second']:,.0f}",
        f"{summary['compile_seconds']:.0f}",
        f"{summary['padding_efficiency']:.2f}",
        str(summary["device"]),
        f"{versions} {commit}".strip(),
    ]


def _sections(entries: Sequence[Entry], metric: str) -> list[dict[str, Any]]:
    """The page's pictures."""
    title = words.title(metric)
    by_x = (
        ("round", lambda row: row["round"], "rounds done", "Over rounds."),
        (
            "bytes",
            lambda row: (row["bytes_up"] + row["bytes_down"]) / 1e6,
            "MB sent, both ways",
            "Over messages: what accuracy costs in bytes.",
        ),
        (
            "seconds",
            lambda row: row["seconds"],
            "seconds of training",
            "Over seconds of training on this machine, without compilation.",
        ),
    )
    rows = [row for entry in entries for row in entry.run.records]
    curves = []
    for key, place, label, caption in by_x:
        if key == "bytes" and not any(row.get("bytes_up") for row in rows):
            continue
        figure, axes = _figure(label, f"{title}, %")
        for entry in entries:
            _curve(axes, entry, metric, place, scale=100)
        curves.append({"svg": _svg(figure), "caption": caption})
    sections = [{"title": title, "figures": curves, "note": "", "has_legend": True}]
    runs = [entry.run for entry in entries]
    if figures.has_two_names(runs):
        figure, axes = _figure("", "")
        axes.grid(False)
        figures.draw_heatmap(axes, runs, metric)
        shown = [{"svg": _svg(figure), "caption": f"{title}, %, by the summary rule."}]
        sections.insert(
            0, {"title": "Sweep", "figures": shown, "note": "", "has_legend": False}
        )
    sections.append(_clients(entries))
    moving = _moving(entries)
    if moving:
        sections.append(
            {
                "title": "What moves over rounds",
                "figures": moving,
                "note": "",
                "has_legend": True,
            }
        )
    shown = _bubbles(entries)
    note = "Train examples of each client and class, first seed."
    if len(shown) > 1:
        note += " The runs have different partitions."
    sections.append(
        {"title": "Partition", "figures": shown, "note": note, "has_legend": False}
    )
    return sections


def _clients(entries: Sequence[Entry]) -> dict[str, Any]:
    """How accuracies spread over clients, and what each gains over its own model."""
    figure, axes = _figure("accuracy, %", "clients with at least that, %")
    known = [entry for entry in entries if record.has_clients(entry.run)]
    for entry in known:
        values = np.sort(100 * record.accuracies(entry.run).ravel())
        values = values[np.isfinite(values)]
        if len(values) > MAX_POINTS:
            values = np.quantile(values, np.linspace(0, 1, MAX_POINTS))
        share = 100 * (1 - np.arange(len(values)) / len(values))
        axes.plot(values, share, color=entry.color, lw=1.6, drawstyle="steps-pre")
    axes.set(xlim=(0, 100), ylim=(0, 103))
    figures = [
        {
            "svg": _svg(figure),
            "caption": "Fairness: how many clients reach which accuracy.",
        }
    ]
    local = [entry for entry in known if entry.run.flags["algo"] == "local"]
    others = [entry for entry in known if entry not in local]
    note = ""
    pairs = [(e, local[0]) for e in others if local and _is_same(e, local[0])]
    if pairs:
        figure, axes = _figure("alone (local), %", "with the method, %")
        axes.plot([0, 100], [0, 100], color=INK, lw=0.8, alpha=0.5)
        for entry, alone in pairs:
            sides = [100 * record.accuracies(one.run).ravel() for one in (alone, entry)]
            step = -(-len(sides[0]) // MAX_POINTS)
            axes.scatter(
                sides[0][::step],
                sides[1][::step],
                s=14,
                color=entry.color,
                alpha=0.6,
                linewidths=0,
            )
        axes.set(xlim=(0, 103), ylim=(0, 103))
        figures.append(
            {
                "svg": _svg(figure),
                "caption": "What each client gains over its own local model: one dot a "
                "client and seed, above the line it gains.",
            }
        )
    else:
        note = (
            "A run of --algo=local with the same preset and seeds beside these would "
            "show what each client gains."
        )
    return {"title": "Clients", "figures": figures, "note": note, "has_legend": True}


def _is_same(one: Entry, other: Entry) -> bool:
    """Whether both have the same clients."""
    names = ("seeds", "test_size", "class_counts")
    return all(np.array_equal(one.run.clients[n], other.run.clients[n]) for n in names)


def _moving(entries: Sequence[Entry]) -> list[dict[str, str]]:
    """Numbers that rounds measure: a boundary, a level, a loss."""
    names = dict.fromkeys(
        name
        for entry in entries
        for name in (*entry.summary.get("numbers", ()), "train_loss")
    )
    out = []
    for name in names:
        having = [e for e in entries if any(name in row for row in e.run.records)]
        if not having:
            continue
        figure, axes = _figure("rounds done", words.title(name))
        for entry in having:
            _curve(axes, entry, name, lambda row: row["round"], scale=1)
        out.append({"svg": _svg(figure), "caption": f"{_capital(name)}."})
    return out


def _capital(metric: str) -> str:
    """A metric's name at the beginning of a sentence."""
    name = words.title(metric)
    return name[:1].upper() + name[1:]


def _bubbles(entries: Sequence[Entry]) -> list[dict[str, str]]:
    """A picture of each partition."""
    kinds = figures.partitions([entry.run for entry in entries])
    out = []
    for numbers, counts in kinds[:6]:
        shown = counts[:MAX_BUBBLES]
        figure, axes = _figure("client", "class")
        figures.draw_bubbles(axes, shown, 90 / shown.max(), color=COLORS[0])
        names = [entries[number].name for number in numbers]
        more = len(counts) - len(shown)
        caption = f"{', '.join(names)}. " if len(kinds) > 1 else ""
        caption += f"The largest bubble is {shown.max()} examples."
        caption += f" {more} more clients are not shown." if more else ""
        out.append({"svg": _svg(figure), "caption": caption})
    return out


def _curve(
    axes: Axes,
    entry: Entry,
    metric: str,
    place: Callable[[Mapping[str, Any]], float],
    scale: float,
) -> None:
    """A metric's mean over seeds, with its standard deviation as a band."""
    curve = record.over_seeds(entry.run, metric, scale, place)
    figures.draw_curve(axes, curve, 0.18, color=entry.color)


def _figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """A small figure in the page's own colours."""
    with matplotlib.rc_context(
        {
            "text.color": INK,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "grid.color": INK,
            "font.size": 10,
        }
    ):
        figure = Figure(figsize=(4.6, 3.1), layout="constrained")
        axes = figure.subplots()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(alpha=0.15, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    return figure, axes


def _svg(figure: Figure) -> str:
    """The figure as an element of the page."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # Words in the page's own font.
    return text.replace("'DejaVu Sans'", "system-ui").replace(
        "DejaVu Sans", "system-ui"
    )


def write(path: str, text: str) -> None:
    """Writes the page.

    Raises:
        OSError: it cannot be written.
    """
    target = pathlib.Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
