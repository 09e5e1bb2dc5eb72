"""A paper's table beside our numbers, as texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data import texts
from launch.run import summaries
from launch.show import curves, sheets, words
from launch.show.sheets import Grid
from launch.tables.cells import Cell, Number, Sheet

Done = Mapping[str, Any] | None  # a run's summary, None = it has not run yet
Results = Sequence[tuple[Cell, Done]]
# (head, value, metric) of each column of a grid
Columns = Sequence[tuple[str, str, str]]


def of_dataset(sheet: Sheet, dataset: str, masked_loss: str | None = None) -> Sheet:
    """The sheet with the metrics of a data set: perplexities if it is a text.

    With `masked_loss="chosen"` they are perplexities at the chosen positions.
    """
    if dataset not in texts.TEXTS:
        return sheet
    names = [name.replace("accuracy", "perplexity") for name in sheet["metrics"]]
    if masked_loss == "chosen":
        names = [name.replace("masked_", "") for name in names]
        names = [name.replace("perplexity", "masked_perplexity") for name in names]
        # The names of the server's model and of pooled clients are shorter.
        names = [name.removeprefix("global_").removesuffix("_pooled") for name in names]
        names = list(dict.fromkeys(names))
    columns = sheet.get("columns", "percent").replace("percent", "perplexity")
    kept = {"columns": columns} if "columns" in sheet or len(names) == 1 else {}
    return {**sheet, "metrics": names, **kept}


def sheet(
    table: Sheet, dataset: str, results: Results, given: Mapping[str, Any] = {}
) -> sheets.Sheet:
    """Formats the cells of a paper's table: paper / ours mean +- std / difference.

    A table with `columns` has one part per metric, with the scenarios as columns. Any
    other has one part per scenario, with the metrics as columns. Each part is followed
    by the differences of the other rows to each row of `controls`. Further grids count
    the clients that a row serves better or worse than a control (`by_client`), the
    bytes of each kind of message by scenario (`traffic`), and the bytes until a
    fraction of a row's last accuracy (`until`).

    A row of `ablated` without an effect gets a warning. A single number of the paper is
    shown beside every metric if the paper does not say when it was measured. Percent
    have `digits` decimals in cells, by default one.
    """
    metrics = table["metrics"]
    results = [(c, done and curves.with_later(done, metrics)) for c, done in results]
    measured = [done["metrics"].values() for _, done in results if done]
    seeds = max((len(next(iter(one))["per_seed"]) for one in measured), default=0)
    legend = f"{seeds} seed(s)"
    if any(cell.paper for cell, _ in results):
        legend += ": paper / ours / difference"
    values = list(dict.fromkeys(cell.value for cell, _ in results))
    rows = list(dict.fromkeys(cell.row for cell, _ in results))
    digits = table.get("digits")
    shown: dict[tuple[str, str], dict[str, str]] = {}
    for cell, done in results:
        numbers = cell.paper or [None]
        numbers = numbers * (len(metrics) if len(numbers) == 1 else 1)
        pairs = zip(metrics, numbers, strict=True)
        shown[cell.place] = {m: _text(done, m, n, digits) for m, n in pairs}
    if "columns" in table or len(metrics) == 1:
        legend = f"{table.get('columns', 'percent')}, {legend}"
        parts = [
            ("", f"{words.title(m)}, {legend}", [(v, v, m) for v in values])
            for m in metrics
        ]
    else:
        parts = [(v, legend, [(words.title(m), v, m) for m in metrics]) for v in values]
    grids = []
    for value, title, columns in parts:
        body = [
            (row, [shown.get((row, v), {}).get(m, "-") for _, v, m in columns])
            for row in rows
            if not value or (row, value) in shown
        ]
        grids.append(Grid(value, title, [head for head, *_ in columns], body))
        for control in table.get("controls", ()):
            grids += _against(control, results, columns)
    of_value = {
        v: {cell.row: done for cell, done in results if cell.value == v} for v in values
    }
    for control in table.get("by_client", ()):
        grids += [_by_client(control, value, of_value[value]) for value in values]
    if table.get("traffic"):
        grids += [_traffic(value, of_value[value]) for value in values]
    if "until" in table:
        grids += [_until(table["until"], value, of_value[value]) for value in values]
    notes = [f"Data set: `{dataset}`."]
    if given:
        options = " ".join(f"--{name}={value}" for name, value in given.items())
        notes.append(f"With `{options}`.")
    if dataset in table["notes"]:
        notes.append(table["notes"][dataset])
    notes += _equal(of_value) + _without_effect(table.get("ablated", {}), results)
    return sheets.Sheet(table["title"], notes, grids)


def _equal(of_value: Mapping[str, Mapping[str, Done | None]]) -> list[str]:
    """Lines about rows of a scenario that ended with the same parameters."""
    lines = []
    for value, runs in of_value.items():
        hashes = {row: (runs[row] or {}).get("parameters_sha256") for row in runs}
        lines += [f"note: {value}: {one}." for one in words.equal_parameters(hashes)]
    return lines


def _text(done: Done, metric: str, number: Number, digits: int | None) -> str:
    """`paper / ours / difference`, or ours alone if the paper has no number.

    `digits` are the decimals of percentages, None = the usual ones.
    """
    pair = number if isinstance(number, list) else [number]
    paper = " ± ".join(f"{one:.2f}" for one in pair if one is not None)
    before = f"{paper} / " if paper else ""
    if done is None:
        return f"{before}missing"
    if metric not in done["metrics"]:
        return f"{before}-"
    entry = done["metrics"][metric]
    how = words.metric(metric, summaries.kinds(done))
    if digits is not None and how.unit:
        how = how._replace(digits=digits)
    ours = how.text(entry)
    if done.get("diverged"):
        ours += f" ({words.diverged(done['diverged'])})"
    gap = f" / {how.scale * entry['mean'] - pair[0]:+.{how.digits}f}" if paper else ""
    return f"{before}{ours}{gap}"


def _without_effect(ablated: Mapping[str, str], results: Results) -> list[str]:
    """Warnings about rows without the effect that an ablation removes."""
    return [
        f"warning: {cell.value}, {cell.row}: {words.title(metric)} is 0, so that a row "
        f"without --{option} shows no effect."
        for option, metric in ablated.items()
        for cell, done in results
        if done and cell.options.get(option, True)
        if metric in done["metrics"] and not done["metrics"][metric]["mean"]
    ]


def _against(control: str, results: Results, columns: Columns) -> list[Grid]:
    """Each row's differences to `control`, paired by seed; [] without that row."""
    done = {cell.place: one for cell, one in results}
    values = {value for _, value, _ in columns}
    rows = list(dict.fromkeys(row for row, value in done if value in values))
    others = [row for row in rows if row != control]
    if control not in rows or not others:
        return []

    def gap(row: str, value: str, metric: str) -> str:
        """Mean ± std of the seeds' differences, for instance `+1.3 ± 0.4` points."""
        places = (row, value), (control, value)
        if not done.keys() >= {*places}:
            return "-"
        pair = [done[place] for place in places]
        if any(one is None or metric not in one["metrics"] for one in pair):
            return "missing"
        sides = summaries.paired(*(one["metrics"][metric] for one in pair))
        if not len(sides[0]):
            return "-"
        how = words.metric(metric, summaries.kinds(pair[0]))
        return words.paired(how.scale * (sides[0] - sides[1]), how.digits)

    body = [(row, [gap(row, v, m) for _, v, m in columns]) for row in others]
    kinds = [summaries.kinds(one) for one in done.values() if one]
    shown = [words.metric(m, one) for one in kinds for *_, m in columns if m in one]
    unit = " points," if all(one.unit for one in shown) else ""
    heads = [head for head, *_ in columns]
    return [Grid("", f"Minus {control},{unit} paired by seed", heads, body)]


def _by_client(control: str, value: str, runs: Mapping[str, Done]) -> Grid:
    """Counts clients that a row serves better or worse than `control` in all seeds."""
    known = {row: (done or {}).get("clients") or {} for row, done in runs.items()}

    def counts(row: str) -> list[str]:
        names = known[row].keys() & known.get(control, {}).keys()
        name = next(iter(names - {"test_size"}), "")
        if not name:
            return ["missing"] * 3
        sides = [np.array(known[one][name], float) for one in (row, control)]
        gap = sides[0] - sides[1] if name == "accuracy" else sides[1] - sides[0]
        found = gap > 1e-9, gap < -1e-9, np.isfinite(gap)
        return [f"{one.all(0).sum()}" for one in found]

    body = [(row, counts(row)) for row in runs if row != control]
    title = f"clients that a row serves better or worse than {control} in all seeds"
    return Grid(value, title, ["better", "worse", "clients"], body)


def _traffic(value: str, runs: Mapping[str, Done]) -> Grid:
    """The megabytes that each row sent, by kind of message."""
    sent = {row: (done or {}).get("traffic") for row, done in runs.items()}
    kinds = list(dict.fromkeys(kind for one in sent.values() for kind in one or ()))

    def sizes(one: Mapping[str, Any] | None) -> list[str]:
        if one is None:
            return ["missing"] * (1 + len(kinds))
        size = {kind: message["bytes"]["mean"] / 1e6 for kind, message in one.items()}
        shown = [f"{size[kind]:,.3f}" if kind in size else "-" for kind in kinds]
        return [f"{sum(size.values()):,.3f}", *shown]

    body = [(row, sizes(one)) for row, one in sent.items()]
    title = "MB by kind of message, all clients and rounds, mean over seeds"
    return Grid(value, title, ["total", *kinds], body)


def _until(rule: Mapping[str, Any], value: str, runs: Mapping[str, Done]) -> Grid:
    """Megabytes of each row until a fraction of one row's last accuracy, by metric."""
    control = runs.get(rule["row"])

    def text(done: Done, metric: str) -> str:
        if not (done and control and "records" in done and "records" in control):
            return "missing"
        lasts = [curve[-1] for curve in curves.of_seeds(control["records"])]
        if not all(metric in one for one in [*lasts, done["records"][-1]]):
            return "-"
        ends = [one[metric] for one in lasts]
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
    return Grid(value, title, [words.title(name) for name in names], body)
