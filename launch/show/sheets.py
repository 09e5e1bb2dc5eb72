"""Papers' tables beside our numbers: cells, grids of texts, and Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from launch.run import summaries
from launch.show import curves, words

Number = float | list[float]


class Cell(NamedTuple):
    """One run of a table: its options, and the paper's number for each metric.

    A number is a mean, or a mean and a standard deviation, None = not in the paper.
    `teacher` is the cell, as (scenario, row), whose model the run needs as a file.
    """

    scenario: str
    row: str
    options: dict[str, Any]
    paper: list[Number] | None
    teacher: tuple[str, str] | None = None

    @property
    def name(self) -> tuple[str, str]:
        """(scenario, row)."""
        return self.scenario, self.row


# Every cell with its summary, None = it has not run yet
Results = Sequence[tuple[Cell, Mapping[str, Any] | None]]


class Grid(NamedTuple):
    """Texts in rows and columns.

    Attributes:
        scenario: Its scenario, empty = all, or named in `title`.
        title: Its title.
        heads: Heads of the columns.
        rows: (name, a text for every column).
    """

    scenario: str
    title: str
    heads: list[str]
    rows: list[tuple[str, list[str]]]


class Sheet(NamedTuple):
    """A paper's table beside our numbers, as texts."""

    title: str
    notes: list[str]
    grids: list[Grid]


def _text(done: Mapping[str, Any] | None, metric: str, number: Number | None) -> str:
    """`paper / ours / difference`, or ours alone if the paper has no number."""
    pair = number if isinstance(number, list) else [number]
    paper = " ± ".join(f"{one:.2f}" for one in pair if one is not None)
    if done is None:
        return f"{paper} / missing" if paper else "missing"
    if metric not in done["metrics"]:
        return f"{paper} / -" if paper else "-"
    entry = done["metrics"][metric]
    scale, digits = words.unit(metric, not summaries.is_number(done, metric))
    mean = scale * entry["mean"]
    ours = words.mean_and_std(entry, scale, digits)
    if fewer := summaries.fewer(entry):
        ours += f" ({fewer})"
    if done.get("diverged"):
        ours += f" ({words.diverged(done['diverged'])})"
    return f"{paper} / {ours} / {mean - pair[0]:+.{digits}f}" if paper else ours


def _texts(
    cell: Cell, done: Mapping[str, Any] | None, metrics: Sequence[str]
) -> dict[str, str]:
    """The texts of a cell by metric; a single number of the paper is used for all."""
    paper = cell.paper or [None]
    numbers = paper if len(paper) == len(metrics) else paper * len(metrics)
    pairs = zip(metrics, numbers, strict=True)
    return {metric: _text(done, metric, number) for metric, number in pairs}


def markdown(sheet: Sheet) -> str:
    """A sheet as Markdown."""
    lines = [f"### {sheet.title}", "", *sheet.notes]
    for grid in sheet.grids:
        subject = f"**{grid.scenario}**, " if grid.scenario else ""
        lines += ["", f"{subject}{grid.title}", ""]
        lines.append("| | " + " | ".join(grid.heads) + " |")
        lines.append("|---|" + "---|" * len(grid.heads))
        lines += [f"| {name} | " + " | ".join(row) + " |" for name, row in grid.rows]
    return "\n".join(lines) + "\n"


def sheet(
    table: Mapping[str, Any],
    dataset: str,
    results: Results,
    given: Mapping[str, Any] | None = None,
) -> Sheet:
    """Makes a sheet of cells: paper / ours mean +- std / difference.

    A table with `columns` has one part per metric, with the scenarios as columns. Any
    other has one part per scenario, with the metrics as columns. After each part come,
    for each of the table's `controls`, the differences of the other rows to that one.
    With `by_client` the numbers of clients follow that a row serves better or worse
    than a control, with `traffic` the bytes of every kind of message, by scenario, and
    with `until` the bytes to a fraction of a row's last accuracy. A row of `ablated`
    without an effect gets a warning. A single number of the paper is beside every
    metric if the paper does not specify when it was measured.
    """
    metrics = table["metrics"]
    results = [
        (cell, done and curves.with_later(done, metrics)) for cell, done in results
    ]
    notes, grids = [f"Data set: `{dataset}`."], []
    if given:
        options = " ".join(f"--{name}={value}" for name, value in given.items())
        notes.append(f"With `{options}`.")
    if dataset in table["notes"]:
        notes.append(table["notes"][dataset])
    metrics_of = [done["metrics"] for _, done in results if done]
    counts = [len(next(iter(one.values()))["per_seed"]) for one in metrics_of]
    legend = f"{max(counts, default=0)} seed(s)"
    if any(cell.paper for cell, _ in results):
        legend += ": paper / ours / difference"
    scenarios = list(dict.fromkeys(cell.scenario for cell, _ in results))
    texts = {
        (cell.scenario, cell.row): _texts(cell, done, metrics) for cell, done in results
    }
    rows = list(dict.fromkeys(cell.row for cell, _ in results))
    if "columns" in table or len(metrics) == 1:
        unit = table.get("columns", "percent")
        parts = [
            ("", f"{words.title(m)}, {unit}, {legend}", [(s, s, m) for s in scenarios])
            for m in metrics
        ]
    else:
        heads = [(words.title(metric), metric) for metric in metrics]
        parts = [(s, legend, [(head, s, m) for head, m in heads]) for s in scenarios]
    for scenario, title, columns in parts:
        body = [
            (row, [texts.get((s, row), {}).get(m, "-") for _, s, m in columns])
            for row in rows
            if not scenario or (scenario, row) in texts
        ]
        grids.append(Grid(scenario, title, [head for head, *_ in columns], body))
        for control in table.get("controls", ()):
            grids += _against(control, results, columns)
    for control in table.get("by_client", ()):
        grids += [_by_client(control, scenario, results) for scenario in scenarios]
    if table.get("traffic"):
        grids += [_traffic(scenario, results) for scenario in scenarios]
    if "until" in table:
        grids += [_until(table["until"], s, results) for s in scenarios]
    for scenario in scenarios:
        hashes = {
            cell.row: done.get("parameters_sha256")
            for cell, done in results
            if done and cell.scenario == scenario
        }
        equal = words.equal_parameters(hashes)
        notes += [f"note: {scenario}: {line}." for line in equal]
    notes += _shown_by_nothing(table.get("ablated", {}), results)
    return Sheet(table["title"], notes, grids)


def _shown_by_nothing(ablated: Mapping[str, str], results: Results) -> list[str]:
    """Warnings about rows without the effect that an ablation removes."""
    out = []
    for option, metric in ablated.items():
        for cell, done in results:
            entry = (done or {}).get("metrics", {}).get(metric)
            if entry and cell.options.get(option, True) and not entry["mean"]:
                out.append(
                    f"warning: {cell.scenario}, {cell.row}: {words.title(metric)} is "
                    f"0, so that a row without --{option} shows no effect."
                )
    return out


def _until(rule: Mapping[str, Any], scenario: str, results: Results) -> Grid:
    """Megabytes of each row until a fraction of one row's last accuracy, by metric."""
    runs = {cell.row: done for cell, done in results if cell.scenario == scenario}
    control = runs.get(rule["row"])

    def text(done: Mapping[str, Any] | None, metric: str) -> str:
        if not (done and control and "records" in done and "records" in control):
            return "missing"
        ends = [curve[-1][metric] for curve in curves.of_seeds(control["records"])]
        goals = [rule["share"] * end for end in ends]
        found = np.array(curves.until(done["records"], metric, goals))
        there = found[~np.isnan(found)]
        if not len(there):
            return "never"
        std = f" ± {there.std(ddof=1):,.0f}" if len(there) > 1 else ""
        some = f" ({len(there)} of {len(found)} seeds)" * (len(there) < len(found))
        return f"{there.mean():,.0f}{std}{some}"

    names = rule["metrics"]
    body = [(row, [text(done, name) for name in names]) for row, done in runs.items()]
    title = (
        f"MB until {100 * rule['share']:.0f} % of {rule['row']}'s last accuracy, mean "
        "over seeds"
    )
    return Grid(scenario, title, [words.title(name) for name in names], body)


def _against(
    control: str, results: Results, columns: Sequence[tuple[str, str, str]]
) -> list[Grid]:
    """A grid of every row's difference to one row by seed, if that row is there."""
    done = {(cell.scenario, cell.row): one for cell, one in results}
    wanted = {scenario for _, scenario, _ in columns}
    rows = list(dict.fromkeys(row for scenario, row in done if scenario in wanted))

    def gap(row: str, scenario: str, metric: str) -> str:
        """Mean ± std of the seeds' differences, for instance `+1.3 ± 0.4` points."""
        names = [(scenario, one) for one in (row, control)]
        if not done.keys() >= {*names}:
            return "-"
        pair = [done[name] for name in names]
        if any(one is None or metric not in one["metrics"] for one in pair):
            return "missing"
        sides = summaries.paired(*(one["metrics"][metric] for one in pair))
        if not len(sides[0]):
            return "-"
        scale, digits = words.unit(metric, not summaries.is_number(pair[0], metric))
        return words.paired(scale * (sides[0] - sides[1]), digits)

    others = [row for row in rows if row != control]
    if control not in rows or not others:
        return []
    body = [(row, [gap(row, s, m) for _, s, m in columns]) for row in others]
    metrics, cells = {m for *_, m in columns}, [one for one in done.values() if one]
    is_number = any(summaries.is_number(one, m) for one in cells for m in metrics)
    unit = "" if is_number else " points,"
    heads = [title for title, _, _ in columns]
    return [Grid("", f"Minus {control},{unit} paired by seed", heads, body)]


def _by_client(control: str, scenario: str, results: Results) -> Grid:
    """Clients that each row serves better or worse than one row does in all seeds."""
    runs = {cell.row: done for cell, done in results if cell.scenario == scenario}
    known = {row: (done or {}).get("clients") or {} for row, done in runs.items()}

    def texts(row: str) -> list[str]:
        names = known[row].keys() & known.get(control, {}).keys()
        name = next(iter(names - {"test_size"}), "")
        if not name:
            return ["missing"] * 3
        sides = [np.array(known[one][name], float) for one in (row, control)]
        gap = sides[0] - sides[1] if name == "accuracy" else sides[1] - sides[0]
        better, worse = (gap > 0).all(0).sum(), (gap < 0).all(0).sum()
        return [f"{better}", f"{worse}", f"{np.isfinite(gap).all(0).sum()}"]

    body = [(row, texts(row)) for row in runs if row != control]
    title = f"clients that a row serves better or worse than {control} in all seeds"
    return Grid(scenario, title, ["better", "worse", "clients"], body)


def _traffic(scenario: str, results: Results) -> Grid:
    """The megabytes that each row of a scenario sent, by kind of message."""
    runs = {cell.row: done for cell, done in results if cell.scenario == scenario}
    sent = {row: (done or {}).get("traffic") for row, done in runs.items()}
    kinds = list(dict.fromkeys(kind for one in sent.values() for kind in one or ()))

    def texts(one: Mapping[str, Any] | None) -> list[str]:
        if one is None:
            return ["missing"] * (1 + len(kinds))
        size = {kind: message["bytes"]["mean"] / 1e6 for kind, message in one.items()}
        shown = [f"{size[kind]:,.3f}" if kind in size else "-" for kind in kinds]
        return [f"{sum(size.values()):,.3f}", *shown]

    body = [(row, texts(one)) for row, one in sent.items()]
    title = "MB by kind of message, all clients and rounds, mean over seeds"
    return Grid(scenario, title, ["total", *kinds], body)
