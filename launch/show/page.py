"""A page about runs: a self-contained HTML file that loads nothing."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl.metric_kinds import Kind
from launch.config import sweep
from launch.folder import record
from launch.run import summaries
from launch.show import alike, drawn, figures, looks, origin, sheets, svg, table, words

Entry, Entries = drawn.Entry, drawn.Entries
# Metrics beside the headlines that have columns; the others are in a table below
_COLUMNS = tuple(
    f"{kind}_{what}"
    for what in ("accuracy", "perplexity")
    for kind in ("fine_tuned", "unseen", "unseen_fine_tuned")
)
# Means over rows instead of clients, as in others' tables
_POOLED = {
    f"{kind}_{what}_pooled"
    for what in ("accuracy", "perplexity")
    for kind in ("client", "fine_tuned")
}
_BYTES = ("bytes_up", "bytes_down")
_KINDS = {"": "", "better": "up", "worse": "down"}  # of the table's marks


class Cell(NamedTuple):
    """A cell of the table: its text, whether it is the best, and `up` or `down`."""

    text: str
    is_best: bool = False
    kind: str = ""


Columns = list[tuple[str, list[Cell]]]  # (head, a cell for each run)


def read(folders: Sequence[pathlib.Path], names: Sequence[str] = ()) -> list[Entry]:
    """Reads finished runs, by default named by algorithm and differing options.

    A folder that is given twice is one run, unless its `names` differ. Raises a
    ValueError if a folder holds no finished run, or a damaged one.
    """
    if not names:
        folders = list({one.resolve(): one for one in folders}.values())
    found = [record.by_point(record.read(folder)) for folder in folders]
    runs = [run for points in found for run in points]
    for run in runs:
        if run.summary is None:
            raise ValueError(f"{run.path} holds no finished run")
    if len(found) == 1 and runs[0].point:
        names = names or [""]  # The title names the algorithm.
    names = record.names_by_point(found, names) or record.labels(runs)
    names = looks.titles(names)
    own = looks.looks(names)
    return [Entry(n, own[n], run) for n, run in zip(names, runs, strict=True)]


def page(
    entries: Entries,
    control: str = "",
    tables: Sequence[Any] = (),
    title: str = "",
    settings: Mapping[str, Entries] = {},
) -> str:
    """The page about runs as HTML.

    `control` is the algorithm or name of the run to compare with, empty = the first
    run, and `tables` are the sheets of papers. An empty `title` is made from the runs.
    `settings` has the runs of a study by setting, `entries` among them.
    Raises a ValueError if there is no such run, or if the runs have no metric in
    common.
    """
    runs, names = [entry.run for entry in entries], [entry.name for entry in entries]
    (metric, base, columns, same), several = _table(entries, control), len(entries) > 1
    others = itertools.filterfalse(_is_column, _metrics(entries))
    first, *sections = drawn.sections(entries, metric, settings)
    return svg.render(
        "report.html",
        title=title or _title(entries),
        setting=_setting(entries),
        origin=_origin(runs),
        answer=" ".join(
            [*_scope(entries, settings), _answer(entries, metric, base)]
            + _notes(entries)
        ),
        first=first,
        heads=[head for head, _ in columns],
        runs=[
            {
                "name": figures.named(entry.run, entry.name),
                "line": svg.line(entry.look) if several else "",
                "cells": [cells[number] for _, cells in columns],
            }
            for number, entry in enumerate(entries)
        ],
        more=[(m.title, _cells(entries, m)) for m in others],
        legend_of_table=_legend(entries, metric, same),
        tables=tables,
        sections=sections,
        settings=origin.settings(runs, names),
        commands=list(dict.fromkeys(map(origin.command, runs))),
        speeds=_speeds(entries),
        machines=_machines(entries),
    )


def markdown(entries: Entries, control: str = "") -> str:
    """The table of `page` as Markdown, with the best in bold and its sentences."""
    metric, base, columns, same = _table(entries, control)

    def text(cell: Cell) -> str:
        return f"**{cell.text}**" if cell.is_best else cell.text

    rows = [
        (
            figures.named(entry.run, entry.name),
            [text(cells[number]) for _, cells in columns],
        )
        for number, entry in enumerate(entries)
    ]
    lines = sheets.lines([head for head, _ in columns], rows)
    said = [_answer(entries, metric, base), *_notes(entries)]
    said = [_setting(entries), " ".join(said), _legend(entries, metric, same, False)]
    return "\n".join([*lines, "", "\n\n".join(said), ""])


class _Table(NamedTuple):
    """The parts of a page's table.

    Attributes:
        metric: The one by which runs are compared.
        base: The run to compare with.
        columns: Those that differ between runs.
        same: Sentences about those that do not.
    """

    metric: words.Metric
    base: Entry
    columns: Columns
    same: list[str]


def _table(entries: Entries, control: str) -> _Table:
    """The table of some runs; ValueError if `control` is not one of them."""
    runs = [entry.run for entry in entries]
    metric = figures.metric_of(figures.metrics_of(runs, "")[0], runs)
    base = _control(entries, control)
    columns, same = _distinct(_columns(entries, metric, base), f"{metric.title}")
    return _Table(metric, base, columns, same)


def _origin(runs: Sequence[record.Record]) -> str:
    """When and where runs ended, as far as it is one place."""
    places = {origin.machine(run.summary) for run in runs}
    where = places.pop() if len(places) == 1 else f"{len(places)} machines or versions"
    time = origin.when(runs)
    return f"Finished {time} on {where}." if time else f"Ran on {where}."


def _machines(entries: Entries) -> list[str]:
    """A line for each machine or version, [] if `_origin` has the only one."""
    found: dict[str, dict[str, None]] = {}
    for entry in entries:
        names = found.setdefault(origin.machine(entry.summary), {})
        names[_name_of_run(entry)] = None
    lines = [f"{', '.join(names)}: {text}." for text, names in found.items()]
    return lines if len(lines) > 1 else []


def _name_of_run(entry: Entry) -> str:
    """The name of a run whose points are those of a sweep, or its own."""
    name = entry.name.removesuffix(sweep.label(entry.run.point)).strip()
    return name or looks.title(entry.run.flags["algo"])


def _control(entries: Entries, wanted: str) -> Entry:
    for entry in entries:
        known = entry.name, entry.run.flags["algo"]
        if not wanted or wanted in known or looks.title(wanted) == entry.name:
            return entry
    names = ", ".join(entry.name for entry in entries)
    raise ValueError(f"--control={wanted}: expected one of {names}")


def _metrics(entries: Entries) -> list[words.Metric]:
    """The evaluated metrics that any run has, in the order of `words.TITLES`.

    A metric that rounds measure is included if it is a fraction.
    """
    known = record.kinds([entry.run for entry in entries])
    shown = {
        name
        for name, kind in known.items()
        if kind in (Kind.FRACTION, Kind.PERPLEXITY)
        or name.startswith(("global_", "client_"))
    } - _POOLED
    order = dict.fromkeys([*words.TITLES, *known])
    classes = record.shared_class_names(one.run for one in entries)
    return [words.metric(name, known, classes) for name in order if name in shown]


def _columns(entries: Entries, metric: words.Metric, base: Entry) -> Columns:
    """The table."""
    out = []
    for one in filter(_is_column, _metrics(entries)):
        out.append((one.title, _cells(entries, one)))
        if one.name != metric.name:
            continue
        against = _against(entries, base, metric) if len(entries) > 1 else []
        if any(cell.text != "–" for cell in against):
            out.append((f"against {base.name}", against))
        if last := _last(entries, metric):
            out.append(("in the last round", last))
    means = [[e.summary["metrics"][n]["mean"] for n in _BYTES] for e in entries]
    shown = [words.megabytes(sum(one)) for one in means]
    return [*out, ("MB total", [Cell(one) for one in shown])]


def _is_column(metric: words.Metric) -> bool:
    return metric.name in (*words.HEADLINES, *_COLUMNS)


def _distinct(columns: Columns, kept: str) -> tuple[Columns, list[str]]:
    """The columns without those of one value in all of several runs, and these."""
    out, same = [], []
    for head, cells in columns:
        texts = {cell.text for cell in cells}
        if len(cells) > 1 and len(texts) == 1 and head != kept:
            same.append(f"{head} {texts.pop()}")
        else:
            out.append((head, cells))
    return out, same


def _last(entries: Entries, metric: words.Metric) -> list[Cell]:
    """The values of the last round, [] if they are those of the summaries."""
    # The rule `last` gives the same value.
    last = [e.summary.get("last_round", {}).get(metric.name) for e in entries]
    rules = [entry.summary["summary"] for entry in entries]
    if not any(end and rule != "last" for end, rule in zip(last, rules, strict=True)):
        return []
    return [Cell(metric.text(end) if end else "–") for end in last]


def _cells(entries: Entries, metric: words.Metric) -> list[Cell]:
    """A metric of each run; the best is marked among those that did not diverge."""
    name, best = metric.name, None
    found = [entry.summary["metrics"].get(name) for entry in entries]
    sound = [one for one in _whole(entries) if _is_of_all(one, name)]
    is_apart = name in alike.OF_COHORTS and alike.cohorts(_named(entries))
    if len(sound) > 1 and metric.better and _has_best(entries) and not is_apart:
        means = [one.summary["metrics"][name]["mean"] for one in sound]
        best = (min if metric.better == "lower" else max)(means)
    return [
        Cell(
            metric.text(one) if one else "–",
            bool(one) and one["mean"] == best and any(entry is s for s in sound),
        )
        for entry, one in zip(entries, found, strict=True)
    ]


def _is_of_all(entry: Entry, name: str) -> bool:
    """Whether a run has the metric of all its seeds."""
    metrics = entry.summary["metrics"]
    return name in metrics and summaries.is_of_all(metrics[name])


def _has_best(entries: Entries) -> bool:
    """Neither one run, nor points of a sweep among them, nor different questions."""
    is_apart = _unlike(entries) or alike.points(_named(entries))
    return len(entries) > 1 and not is_apart


def _gap(entry: Entry, base: Entry, metric: words.Metric) -> np.ndarray | None:
    """Points (or numbers) over the control by seed, or of means if the seeds differ.

    None if one lacks the metric, or if their data sets differ.
    """
    pair = [one.summary["metrics"].get(metric.name) for one in (entry, base)]
    if None in pair or "data" in _unlike([entry, base]):
        return None
    seeds = [one.run.clients["seeds"] for one in (entry, base)]
    if np.array_equal(*seeds):
        sides = summaries.paired(*pair)
    else:
        sides = [np.array([one["mean"]]) for one in pair]
    return metric.scale * (sides[0] - sides[1]) if len(sides[0]) else None


def _named(entries: Entries) -> alike.Named:
    return [(entry.name, entry.run) for entry in entries]


def _unlike(entries: Entries) -> dict[str, list[list[str]]]:
    return alike.unlike(_named(entries))


def _best(entries: Entries) -> str:
    """A sentence about the marked values, or why none is marked."""
    if unlike := _unlike(entries):
        return f" No value is marked as the best, as {alike.in_words(unlike)}."
    if (points := alike.points(_named(entries))) and not _is_sweep(entries):
        return f" No value is marked as the best, as {alike.of_points(points)}."
    has_best = _has_best(entries) and len(_whole(entries)) > 1
    return " The best value of a metric is bold." * has_best


def _legend(
    entries: Entries,
    metric: words.Metric,
    same: Sequence[str],
    has_colours: bool = True,
) -> str:
    """What the numbers of the table are; `same` are those of all runs."""
    counts = [(entry.name, len(entry.run.clients["seeds"])) for entry in entries]
    seeds = max(count for _, count in counts)
    known = dict.fromkeys(words.summary_rule(entry.summary) for entry in entries)
    rules = ["last round" if rule == "last" else rule for rule in known]
    text = "Percent" if metric.unit else "Numbers"
    text += f", mean ± standard deviation of {seeds} seeds" * (seeds > 1)
    text += f", {' or '.join(rules)}."
    if fewer := [f"{name} {count}" for name, count in counts if count < seeds]:
        text += f" Fewer seeds: {', '.join(fewer)}; differences to these are of means."
    if "best" in (entry.summary["summary"] for entry in entries):
        text += f" {words.TOO_GOOD}"
    text += _best(entries)
    if len(entries) > 1 and has_colours:
        text += f" Coloured differences are shown by the clients ({table.TEST})."
    if same:
        text += f" In all runs: {', '.join(same)}."
    is_last = all(entry.summary["summary"] == "last" for entry in entries)
    whole = "" if is_last else ", and of all rounds"
    text += f" MB are those of all clients in both directions, mean over seeds{whole}."
    sizes = {e.name: words.setup_megabytes(e.summary) for e in entries}
    if first := [f"{name} {size}" for name, size in sizes.items() if size]:
        sets = " and ".join(first)
        text += f" They lack the proxy set that every client gets once, of {sets} MB."
    return text


def _against(entries: Entries, base: Entry, metric: words.Metric) -> list[Cell]:
    """Gains over the control; coloured are those that clients show, see `table`."""
    arrays = {
        entry.name: record.client_values(entry.run, metric.name)
        for entry in entries
        if drawn.is_same(entry, base) and record.diverged(entry.run) is None
    }
    found, cells = table.tested(arrays, base.name), []
    for entry in entries:
        gap = None if entry is base else _gap(entry, base, metric)
        if gap is None:
            cells.append(Cell("–"))
            continue
        kind = _KINDS[table.mark(metric, gap.mean(), *found.get(entry.name, ()))]
        cells.append(Cell(words.paired(gap, metric.digits), kind=kind))
    return cells


def _is_sweep(entries: Entries) -> bool:
    """Whether the runs are the points of one sweep, none of which is then the best."""
    return bool(entries[0].run.point) and len({e.run.path for e in entries}) == 1


def _title(entries: Entries) -> str:
    known = [looks.title(entry.run.flags["algo"]) for entry in entries]
    algos = list(dict.fromkeys(known))
    names = ", ".join(algos[:4]) + " and others" * (len(algos) > 4)
    data = ", ".join(dict.fromkeys(data_name(entry.run) for entry in entries))
    if len(entries) == 1:
        return f"{names} on {data}"
    if _is_sweep(entries):
        return f"{names} on {data}: a sweep of {' and '.join(entries[0].run.point)}"
    return f"Which of {len(entries)} runs is best on {data}? ({names})"


def data_name(run: record.Record) -> str:
    """The data set's name, of a file without its folder."""
    kind, colon, path = run.flags["dataset"].partition(":")
    return f"{kind}{colon}{pathlib.PurePath(path).name}"


def _setting(entries: Entries) -> str:
    def values(name: str) -> str:
        every = [entry.run.flags.get(name, "unset") for entry in entries]
        return " or ".join(dict.fromkeys(every))

    text = f"{values('num_clients')} clients, {values('clients_per_round')} a round, "
    text += f"{_rounds(entries)}, partition {values('partition')}"
    if "dirichlet" in values("partition"):
        text += f" (alpha {values('partition_alpha')})"
    text += f", model {values('model')}."
    if " or " in values("summary"):
        text += f" The runs' summaries differ: {values('summary')} (--summary)."
    return text


def _rounds(entries: Entries) -> str:
    """The rounds of runs, of which some may have stopped early."""
    planned = [entry.run.flags.get("rounds", "unset") for entry in entries]
    done = [entry.summary.get("rounds") for entry in entries]
    early = [bool(entry.summary.get("stopped_early")) for entry in entries]
    texts = [
        f"{count} of {most}" if is_early else most
        for count, most, is_early in zip(done, planned, early, strict=True)
    ]
    stopped = " (stopped early)" * any(early)
    return f"{' or '.join(dict.fromkeys(texts))} rounds{stopped}"


def _answer(entries: Entries, metric: words.Metric, base: Entry) -> str:
    """The result in a sentence."""
    if len(entries) > 1 and not _whole(entries):
        return "All runs diverged."
    name, percent = metric.name, " %" if metric.unit else ""
    known = [one for one in _sound(entries) if name in one.summary["metrics"]]
    ranked = sorted(
        [one for one in known if _is_of_all(one, name)] or known,
        key=lambda entry: entry.summary["metrics"][name]["mean"],
        reverse=metric.better != "lower",
    )
    if not ranked:
        return f"No summary has a value of {metric.title}."
    means = [metric.text(one.summary["metrics"][name]) for one in ranked]
    if _is_sweep(entries):
        parts = [{**one.summary, "point": one.run.point} for one in entries]
        choose_by = entries[0].run.summary.get("choose_by", "")
        chosen = words.chosen(parts, choose_by) or words.NOT_TO_CHOOSE_BY
        sound = " that did not diverge" * (len(ranked) < len(entries))
        which, reach = f"{len(ranked)} points{sound} reach", f"{means[-1]} to "
        if len(ranked) == 1:
            which, reach = f"only point{sound} reaches", ""
        return (
            f"Its {which} {reach}{means[0]}{percent} ({metric.title}). "
            f"{chosen[0].upper()}{chosen[1:]}."
        )
    best = ranked[0]
    text = f"{best.name} reaches {means[0]}{percent} ({metric.title})"
    if len(ranked) == 1:
        return f"{text}."
    other = base if base in ranked and best is not base else ranked[1]
    gap = _gap(best, other, metric)
    if gap is None:
        is_other = "data" in _unlike([best, other])
        why = "has another data set" if is_other else "has no value of the same seed"
        return f"{text}; {other.name} {why}."
    points = " points" if percent else ""
    text += f", {words.paired(gap, metric.digits)}{points} against {other.name}"
    if len(gap) > 1:
        ahead = gap < 0 if metric.better == "lower" else gap > 0
        text += f", ahead in {ahead.sum()} of {len(gap)} seeds"
    unlike = _unlike([best, other])
    return f"{text}; the two differ in {', '.join(unlike)}." if unlike else f"{text}."


def _scope(entries: Entries, settings: Mapping[str, Entries]) -> list[str]:
    """A sentence about a page of one setting of a study that has several."""
    mine = [name for name, some in settings.items() if some is entries]
    if len(settings) < 2 or not mine:
        return []
    others = ", ".join(name for name in settings if name != mine[0])
    return [
        f"These are the runs of {mine[0]}; of {others} the page has the table of all "
        "methods and the curves."
    ]


def _whole(entries: Entries) -> list[Entry]:
    """The runs that did not diverge."""
    return [entry for entry in entries if record.diverged(entry.run) is None]


def _sound(entries: Entries) -> list[Entry]:
    """The runs that did not diverge, or all if every one did."""
    return _whole(entries) or list(entries)


def _notes(entries: Entries) -> list[str]:
    """Sentences about runs that diverged, and about those with equal parameters."""
    bad: dict[str, list[str]] = {}
    for entry in entries:
        if record.diverged(entry.run) is not None:
            reason = words.meaningless(entry.summary)
            bad.setdefault(reason, []).append(figures.named(entry.run, entry.name))
    # The points of a sweep share a hash.
    alone = [entry for entry in entries if not entry.run.point]
    hashes = {one.name: one.summary.get("parameters_sha256") for one in alone}
    equal = [f"{line}." for line in words.equal_parameters(hashes)]
    return [f"{', '.join(names)}: {why}." for why, names in bad.items()] + equal


def _speeds(entries: Entries) -> list[tuple[str, Mapping[str, Any]]]:
    """A name and a summary for each folder: the points of a sweep ran together."""
    out: dict[pathlib.Path, tuple[str, Mapping[str, Any]]] = {}
    for entry in entries:
        out.setdefault(entry.run.path, (_name_of_run(entry), entry.summary))
    return list(out.values())
