"""A page about runs: a self-contained HTML file that loads nothing."""

import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import algorithms
from data import labels, loaders
from fedjax_pfl.metric_kinds import Kind
from launch.config import schema
from launch.folder import finished, record
from launch.run import summaries
from launch.show import (
    curves,
    figures,
    looks,
    sheets,
    significance,
    svg,
    table,
    words,
)

_TESTED = f" Coloured differences are shown by the clients ({significance.TEST})."
MAX_BUBBLES, MAX_CLASSES = 60, 200
CAPTIONS = {
    "rounds": "Over rounds.",
    "bytes": "Over megabytes of messages.",
    "seconds": "Over seconds of training on this machine, without compilation.",
    "clock": "Over simulated seconds.",
}


class Entry(NamedTuple):
    """A finished run with its name and look on the page."""

    name: str
    look: looks.Look
    run: record.Record

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.run.summary


class Cell(NamedTuple):
    """A cell of the table: its text, whether it is the best, and `up` or `down`."""

    text: str
    is_best: bool = False
    kind: str = ""


def read(folders: Sequence[pathlib.Path], names: Sequence[str] = ()) -> list[Entry]:
    """Reads finished runs, by default named by algorithm and differing options.

    Raises a ValueError if a folder holds no finished run, or a damaged one.
    """
    found = [record.by_point(record.read(folder)) for folder in folders]
    runs = [run for points in found for run in points]
    for run in runs:
        if run.summary is None:
            raise ValueError(f"{run.path} holds no finished run")
    names = record.names_by_point(found, names) or record.labels(runs)
    names = looks.titles(names)
    own = looks.looks(names)
    return [Entry(n, own[n], run) for n, run in zip(names, runs, strict=True)]


def page(
    entries: Sequence[Entry],
    control: str = "",
    tables: Sequence[sheets.Sheet] = (),
    title: str = "",
) -> str:
    """The page about runs as HTML.

    `control` is the algorithm or name of the run to compare with, empty = the first
    run, and `tables` are those of papers. An empty `title` is made from the runs.
    Raises a ValueError if there is no such run, or if the runs have no metric in
    common.
    """
    runs = [entry.run for entry in entries]
    metric = figures.metric_of(figures.metrics_of(runs, "")[0], runs)
    base = _control(entries, control)
    columns = _columns(entries, metric, base)
    flags = [entry.run.flags for entry in entries]
    names = sorted(set().union(*flags) - schema.names(schema.EXECUTION))
    values = {name: [one.get(name, "unset") for one in flags] for name in names}
    seeds = max(len(entry.run.clients["seeds"]) for entry in entries)
    return svg.render(
        "report.html",
        title=title or _title(entries),
        setting=_setting(entries),
        answer=" ".join(
            [_answer(entries, metric, base), *_diverged(entries), *_equal(entries)]
        ),
        heads=[head for head, _ in columns],
        runs=[
            {
                "name": figures.named(entry.run, entry.name),
                "line": svg.line(entry.look),
                "cells": [cells[number] for _, cells in columns],
                "speed": _speed(entry.summary),
            }
            for number, entry in enumerate(entries)
        ],
        legend=(
            f"{'Percent' if metric.unit else 'Numbers'}"
            f"{f', mean ± standard deviation of {seeds} seeds' * (seeds > 1)}"
            f"{_rules(entries)}. {_best(entries)}{_TESTED * (len(entries) > 1)} MB are "
            "those of all clients in both "
            "directions, mean over seeds."
        ),
        tables=tables,
        sections=_sections(entries, metric),
        differing=[(n, every) for n, every in values.items() if len(set(every)) > 1],
        same=[f"--{n}={v[0]}" for n, v in values.items() if len(set(v)) == 1],
        commands=list(dict.fromkeys(_command_of(entry.run) for entry in entries)),
    )


def _control(entries: Sequence[Entry], wanted: str) -> Entry:
    for entry in entries:
        known = entry.name, entry.run.flags["algo"]
        if not wanted or wanted in known or looks.title(wanted) == entry.name:
            return entry
    names = ", ".join(entry.name for entry in entries)
    raise ValueError(f"--control={wanted}: expected one of {names}")


def _metrics(entries: Sequence[Entry], classes: Sequence[str]) -> list[words.Metric]:
    """The evaluated metrics that any run has, in the order of `words.TITLES`.

    A metric that rounds measure is included if it is a fraction.
    """
    known = record.kinds([entry.run for entry in entries])
    shown = {
        name
        for name, kind in known.items()
        if kind in (Kind.FRACTION, Kind.PERPLEXITY)
        or name.startswith(("global_", "client_"))
    } - {"client_accuracy_pooled", "client_perplexity_pooled"}
    order = dict.fromkeys([*words.TITLES, *known])
    return [words.metric(name, known, classes) for name in order if name in shown]


def _columns(
    entries: Sequence[Entry], metric: words.Metric, base: Entry
) -> list[tuple[str, list[Cell]]]:
    """The table: each column's head and its cells, one for each run."""
    out = []
    for one in _metrics(entries, record.class_names(base.run)):
        out.append((one.title, _cells(entries, one)))
        if one.name != metric.name:
            continue
        if len(entries) > 1:
            cells = _against(entries, base, metric)
            out.append((f"against {base.name}", cells))
        # The rule `last` gives the same value.
        last = [e.summary.get("last_round", {}).get(metric.name) for e in entries]
        rules = [entry.summary["summary"] for entry in entries]
        if any(end and rule != "last" for end, rule in zip(last, rules, strict=True)):
            cells = [Cell(metric.text(end) if end else "–") for end in last]
            out.append(("in the last round", cells))
    bytes_of = [
        [entry.summary["metrics"].get(f"bytes_{way}") for way in ("up", "down")]
        for entry in entries
    ]
    sent = [sum(one["mean"] for one in both if one) for both in bytes_of]
    return [*out, ("MB total", [Cell(f"{one / 1e6:,.1f}") for one in sent])]


def _cells(entries: Sequence[Entry], metric: words.Metric) -> list[Cell]:
    """A metric of each run; the best is marked among those that did not diverge."""
    name, best = metric.name, None
    found = [entry.summary["metrics"].get(name) for entry in entries]
    sound = [one for one in _sound(entries) if name in one.summary["metrics"]]
    # A single run, points of one sweep, or runs of different questions have no best.
    is_one = len(entries) > 1 and not _is_sweep(entries) and not _unlike(entries)
    if sound and metric.better and is_one:
        means = [one.summary["metrics"][name]["mean"] for one in sound]
        best = (min if metric.better == "lower" else max)(means)
    return [
        Cell(
            metric.text(one) if one else "–",
            bool(one) and one["mean"] == best and any(entry is s for s in sound),
        )
        for entry, one in zip(entries, found, strict=True)
    ]


def _gap(entry: Entry, base: Entry, metric: words.Metric) -> np.ndarray | None:
    """Points (or numbers) over the control by seed, or of means if the seeds differ.

    None if one lacks the metric, or if their data sets differ.
    """
    pair = [one.summary["metrics"].get(metric.name) for one in (entry, base)]
    if None in pair or _data(entry.run) != _data(base.run):
        return None
    seeds = [one.run.clients["seeds"] for one in (entry, base)]
    if np.array_equal(*seeds):
        sides = summaries.paired(*pair)
    else:
        sides = [np.array([one["mean"]]) for one in pair]
    return metric.scale * (sides[0] - sides[1]) if len(sides[0]) else None


def _data(run: record.Record) -> str:
    """The hash of a run's examples, which does not depend on a file's name."""
    return run.hashes.get("data_sha256", run.flags["dataset"])


def _unlike(entries: Sequence[Entry]) -> dict[str, list[list[str]]]:
    """Groups of runs that agree, for each property in which not all runs agree.

    Properties are data, seeds, clients' rows, rounds and summary rule. Clients always
    differ with the seeds, and rules with the rounds, so they are then omitted.
    """
    found = {
        "data": [_data(entry.run) for entry in entries],
        "seeds": [tuple(entry.run.clients["seeds"].tolist()) for entry in entries],
        "clients": [entry.run.hashes.get("split_sha256") for entry in entries],
        "rounds": [entry.run.flags.get("rounds") for entry in entries],
        "summary": [words.summary_rule(entry.summary) for entry in entries],
    }
    out: dict[str, list[list[str]]] = {}
    for what, values in found.items():
        if what == "clients" and ("seeds" in out or None in values):
            continue
        if what == "summary" and "rounds" in out:
            continue
        groups: dict[Any, list[str]] = {}
        for entry, value in zip(entries, values, strict=True):
            groups.setdefault(value, []).append(entry.name)
        if len(groups) > 1:
            out[what] = list(groups.values())
    return out


def _best(entries: Sequence[Entry]) -> str:
    """A sentence about the marked values, or why none is marked."""
    unlike = _unlike(entries)
    if not unlike:
        return "The best value of a column is bold."
    parts = [
        f"{what} ({'; '.join(', '.join(names) for names in groups)})"
        for what, groups in unlike.items()
    ]
    return f"No value is marked as the best, as the runs differ in {', '.join(parts)}."


def _rules(entries: Sequence[Entry]) -> str:
    """The summary rules, and the runs that have fewer seeds than others."""
    rules = dict.fromkeys(words.summary_rule(entry.summary) for entry in entries)
    counts = [(entry.name, len(entry.run.clients["seeds"])) for entry in entries]
    most = max(count for _, count in counts)
    fewer = [f"{name} {count}" for name, count in counts if count < most]
    text = f", {' or '.join(rules)}"
    if fewer:
        text += f". Fewer seeds: {', '.join(fewer)}; differences to these are of means"
    return text


def _against(entries: Sequence[Entry], base: Entry, metric: words.Metric) -> list[Cell]:
    """Gains over the control; coloured are those that clients show, see `table`."""
    gaps = [None if e is base else _gap(e, base, metric) for e in entries]
    arrays = {
        entry.name: record.client_values(entry.run, metric.name)
        for entry in entries
        if _is_same(entry, base)
    }
    found, cells = table.tested(arrays, base.name), []
    for entry, gap in zip(entries, gaps, strict=True):
        if gap is None:
            cells.append(Cell("–"))
            continue
        p, side = found.get(entry.name, (1.0, 0))
        sign = -1 if metric.better == "lower" else 1
        is_shown = p < significance.LEVEL and gap.mean() * side > 0
        kind = ("up" if sign * side > 0 else "down") if is_shown else ""
        cells.append(Cell(words.paired(gap, metric.digits), kind=kind))
    return cells


def _is_sweep(entries: Sequence[Entry]) -> bool:
    """Whether the runs are the points of one sweep, none of which is then the best."""
    return bool(entries[0].run.point) and len({e.run.path for e in entries}) == 1


def _title(entries: Sequence[Entry]) -> str:
    algos = list(dict.fromkeys(entry.run.flags["algo"] for entry in entries))
    names = ", ".join(algos[:4]) + " and others" * (len(algos) > 4)
    data = ", ".join(dict.fromkeys(e.run.flags["dataset"] for e in entries))
    if len(entries) == 1:
        return f"{names} on {data}"
    if _is_sweep(entries):
        return f"{names} on {data}: a sweep of {' and '.join(entries[0].run.point)}"
    return f"Which of {len(entries)} runs is best on {data}? ({names})"


def _setting(entries: Sequence[Entry]) -> str:
    def values(name: str) -> str:
        every = [entry.run.flags.get(name, "unset") for entry in entries]
        return " or ".join(dict.fromkeys(every))

    text = f"{values('num_clients')} clients, {values('clients_per_round')} a round, "
    text += f"{values('rounds')} rounds, partition {values('partition')}"
    if "dirichlet" in values("partition"):
        text += f" (alpha {values('partition_alpha')})"
    text += f", model {values('model')}."
    if " or " in values("summary"):
        text += f" The runs' summaries differ: {values('summary')} (--summary)."
    return text


def _answer(entries: Sequence[Entry], metric: words.Metric, base: Entry) -> str:
    """The result in a sentence."""
    name, percent = metric.name, " %" if metric.unit else ""
    ranked = sorted(
        (entry for entry in _sound(entries) if name in entry.summary["metrics"]),
        key=lambda entry: entry.summary["metrics"][name]["mean"],
        reverse=metric.better != "lower",
    )
    if not ranked:
        return f"No summary has a value of {metric.title}."
    means = [metric.text(one.summary["metrics"][name]) for one in ranked]
    if _is_sweep(entries):
        return (
            f"Its {len(entries)} points reach {means[-1]} to {means[0]}{percent} "
            f"({metric.title}). {words.NOT_TO_CHOOSE_BY}."
        )
    best = ranked[0]
    text = f"{best.name} reaches {means[0]}{percent} ({metric.title})"
    if len(ranked) == 1:
        return f"{text}."
    other = base if base in ranked and best is not base else ranked[1]
    gap = _gap(best, other, metric)
    if gap is None:
        return f"{text}; {other.name} has another data set."
    points = " points" if percent else ""
    text += f", {words.paired(gap, metric.digits)}{points} against {other.name}"
    if len(gap) > 1:
        ahead = gap < 0 if metric.better == "lower" else gap > 0
        text += f", ahead in {ahead.sum()} of {len(gap)} seeds"
    unlike = _unlike([best, other])
    return f"{text}; the two differ in {', '.join(unlike)}." if unlike else f"{text}."


def _sound(entries: Sequence[Entry]) -> list[Entry]:
    """The runs that did not diverge, or all if every one did."""
    return [e for e in entries if record.diverged(e.run) is None] or list(entries)


def _diverged(entries: Sequence[Entry]) -> list[str]:
    bad = [entry for entry in entries if record.diverged(entry.run) is not None]
    names = ", ".join(figures.named(entry.run, entry.name) for entry in bad)
    reason = "losses or parameters are not finite, so its results are meaningless"
    return [f"{names}: {reason}."] if bad else []


def _equal(entries: Sequence[Entry]) -> list[str]:
    """Sentences about runs with equal parameters; points of a sweep share a hash."""
    alone = [entry for entry in entries if not entry.run.point]
    hashes = {one.name: one.summary.get("parameters_sha256") for one in alone}
    return [f"{line}." for line in words.equal_parameters(hashes)]


def _command_of(run: record.Record) -> str:
    """The command that repeats a run."""
    given = {
        "algo": run.flags["algo"] not in algorithms.ALGORITHMS,
        "dataset": run.flags["dataset"] == loaders.ARRAYS,
        "model": run.flags.get("model", "").startswith("own_"),
        "client_model": run.flags.get("client_model", "").startswith("own_"),
    }
    if any(given.values()):
        more = ", ".join(f"{name}=..." for name, is_own in given.items() if is_own)
        return f"build.load({str(run.path)!r}, {more}).run()  # in Python"
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


def _section(
    title: str, figures: Sequence[Any], note: str = "", has_legend: bool = True
) -> dict[str, Any]:
    return {"title": title, "note": note, "figures": figures, "has_legend": has_legend}


def _sections(entries: Sequence[Entry], metric: words.Metric) -> list[dict[str, Any]]:
    title, runs = metric.title, [entry.run for entry in entries]
    is_sent = any(row.get("bytes_up") for run in runs for row in run.records)
    has_clock = all("clock" in run.records[-1] for run in runs)
    known = {"bytes": is_sent, "clock": has_clock}
    places = [x for x in CAPTIONS if known.get(x, True)]
    shown = [_curves(entries, metric, x, CAPTIONS[x]) for x in places]
    sections = [_section(title, shown), _clients(entries)]
    if figures.has_two_names(runs):
        figure, axes = svg.figure("", "")
        figures.draw_heatmap(axes, runs, metric.name)
        shown = svg.shown(figure, f"{title}, %, by the summary rule.")
        sections.insert(0, _section("Sweep", [shown], has_legend=False))
    if moving := _moving(entries):
        sections.append(_section("Other metrics over rounds", moving))
    shown = _bubbles(entries)
    note = "Train examples of each client and class, first seed."
    if not shown:
        note = "A text has no classes."
    if len(shown) > 1:
        note += " The runs have different partitions."
    for names in dict.fromkeys(filter(None, map(record.class_names, runs))):
        note += f" The classes are, in order: {labels.listed(names, MAX_CLASSES)}."
    return [*sections, _section("Partition", shown, note, has_legend=False)]


def _clients(entries: Sequence[Entry]) -> dict[str, Any]:
    """The spread of accuracies over clients, and their gains over local training."""
    is_text = record.is_text(entries[0].run)
    kind, unit = ("perplexity", "") if is_text else ("accuracy", " (%)")
    figure, axes = svg.figure("", "")
    known = [entry for entry in entries if record.has_clients(entry.run)]
    for entry in known:
        figures.draw_ecdf(axes, entry.run, entry.look)
    shown = [svg.shown(figure, f"Fairness: how many clients have which {kind}.")]
    local = [entry for entry in known if entry.run.flags["algo"] == "local"]
    others = [entry for entry in known if entry.run.flags["algo"] != "local"]
    pairs = [(e, local[0]) for e in others if local and _is_same(e, local[0])]
    if not pairs:
        note = (
            "Add a run of --algo=local with the same preset and seeds to see the gain "
            "of each client."
        )
        return _section("Clients", shown, note)
    figure, axes = svg.figure(f"alone (local){unit}", f"with the method{unit}")
    limit = max(np.nanmax(record.of_clients(e.run)) for e in known) if is_text else 100
    axes.plot([0, limit], [0, limit], color=svg.INK, lw=0.8, alpha=0.5)
    for entry, alone in pairs:
        x, y = (record.of_clients(one.run).ravel() for one in (alone, entry))
        step = -(-len(x) // figures.MAX_POINTS)
        style = {"color": entry.look.color, "marker": entry.look.marker}
        style |= {"s": 14, "alpha": 0.6, "linewidths": 0}
        axes.scatter(x[::step], y[::step], **style)
    axes.set(xlim=(0, 1.03 * limit), ylim=(0, 1.03 * limit))
    caption = (
        "Gain of each client over its local model: one dot for each client and seed, "
        f"{'below' if is_text else 'above'} the line if it gains."
    )
    return _section("Clients", [*shown, svg.shown(figure, caption)])


def _is_same(one: Entry, other: Entry) -> bool:
    """Whether both have the same clients."""
    names = ("seeds", "test_size", finished.CLASS_COUNTS)
    return all(
        np.array_equal(one.run.clients.get(n), other.run.clients.get(n)) for n in names
    )


def _moving(entries: Sequence[Entry]) -> list[dict[str, str]]:
    """Curves of numbers and losses: a boundary, a level, the training loss."""
    names = dict.fromkeys(
        name for entry in entries for name in (*sorted(entry.run.kinds), "train_loss")
    )
    out = []
    for name in names:
        metric = figures.metric_of(name, [entry.run for entry in entries])
        having = [e for e in entries if any(name in row for row in e.run.records)]
        if having and metric.kind in (Kind.NUMBER, Kind.LOSS):
            caption = f"{metric.title[:1].upper()}{metric.title[1:]}."
            out.append(_curves(having, metric, "rounds", caption))
    return out


def _bubbles(entries: Sequence[Entry]) -> list[dict[str, str]]:
    kinds = figures.partitions([entry.run for entry in entries])
    out = []
    for numbers, counts in kinds[:6]:
        drawn = counts[:MAX_BUBBLES]
        figure, axes = svg.figure("client", "class")
        classes = record.class_names(entries[numbers[0]].run)
        style = {"names": classes, "color": looks.COLORS[0]}
        figures.draw_bubbles(axes, drawn, 90 / drawn.max(), **style)
        names = [entries[number].name for number in numbers]
        more = len(counts) - len(drawn)
        caption = f"{', '.join(names)}. " if len(kinds) > 1 else ""
        caption += f"The largest bubble is {drawn.max()} examples."
        caption += f" {more} more clients are not shown." if more else ""
        out.append(svg.shown(figure, caption))
    return out


def _curves(
    entries: Sequence[Entry],
    metric: words.Metric,
    x: str,
    caption: str,
) -> dict[str, str]:
    """Draws a metric's means over seeds, with their standard deviations."""
    label, place = curves.PLACES[x]
    figure, axes = svg.figure(label, words.axis(metric))
    for entry in entries:
        curve = record.over_seeds(entry.run, metric.name, metric.scale, place)
        figures.draw_curve(axes, curve, entry.look)
    return svg.shown(figure, caption)
