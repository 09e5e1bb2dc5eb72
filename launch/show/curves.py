"""Values of whole curves for tables: after round 0, or until an accuracy."""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from launch.run import summaries

Records = Sequence[Mapping[str, Any]]
LATER = "_later"


def of_seeds(records: Records) -> list[list[Mapping[str, Any]]]:
    """The records of each seed, in order of rounds."""
    ordered = sorted(records, key=operator.itemgetter("seed", "round"))
    groups = itertools.groupby(ordered, operator.itemgetter("seed"))
    return [list(group) for _, group in groups]


def megabytes(record: Mapping[str, Any]) -> float:
    """Megabytes of all messages so far, in both directions."""
    return (record["bytes_up"] + record["bytes_down"]) / 1e6


# What a curve may be drawn over: its label, and where a record is on that axis.
PLACES: dict[str, tuple[str, Callable[[Mapping[str, Any]], float]]] = {
    "rounds": ("finished rounds", lambda record: record["round"]),
    "bytes": ("MB sent in both directions", megabytes),
    "seconds": ("seconds of training", lambda record: record["seconds"]),
    "clock": ("simulated seconds", lambda record: record["clock"]),
}


def later(records: Records, name: str) -> list[float] | None:
    """A metric's mean after round 0 by seed, or for `mb` the megabytes sent since.

    Round 0 is skipped, as clients of decentralized methods start from one model. None
    if a round was not evaluated or lacks the metric.
    """
    out = []
    for curve in of_seeds(records):
        done = [record for record in curve if record["round"] > 0]
        is_whole = [record["round"] for record in done] == [*range(1, len(done) + 1)]
        if not is_whole or len(done) < 2:
            return None
        if name == "mb":
            out.append(megabytes(done[-1]) - megabytes(done[0]))
        elif all(name in record for record in done[1:]):
            out.append(float(np.mean([record[name] for record in done[1:]])))
        else:
            return None
    return out or None


def wanted(table: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of records that a table's curves need, () if it has none."""
    later = {n.removesuffix(LATER) for n in table["metrics"] if n.endswith(LATER)}
    names = later | {*table.get("until", {}).get("metrics", ())}
    if not names:
        return ()
    return ("seed", "round", "bytes_up", "bytes_down", *sorted(names - {"mb"}))


def has_wanted(done: Mapping[str, Any], table: Mapping[str, Any]) -> bool:
    """Whether a finished cell has the records that its table's curves need.

    These are of metrics that the run has, which not all rows of a table have.
    """
    names = wanted(table)
    kept = {name for record in done.get("records", ()) for name in record}
    lacking = set(names) - kept
    of_run = done.get("last_round", done["metrics"]).keys()
    return not names or (bool(kept) and not lacking & of_run)


def kept(records: Records, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The part of a cell's records that its table needs, [] if it needs no curve."""
    names = wanted(table)

    def short(value: Any) -> Any:
        return round(value, 6) if isinstance(value, float) else value

    found = [{n: short(record[n]) for n in names if n in record} for record in records]
    return found if names else []


def with_later(done: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A cell's summary, with the `<name>_later` metrics that its records determine."""
    metrics, numbers = dict(done["metrics"]), list(done.get("numbers", ()))
    for name in names:
        base = name.removesuffix(LATER)
        found = later(done.get("records", ()), base) if name != base else None
        if found is None:
            continue
        metrics[name] = summaries.spread(found)
        if base == "mb" or base in numbers:
            numbers.append(name)
    return {**done, "metrics": metrics, "numbers": numbers}


def until(
    records: Records,
    metric: str,
    goals: Sequence[float],
    place: Callable[[Mapping[str, Any]], float] = megabytes,
    sign: int = 1,
) -> list[float]:
    """The place, by default megabytes sent, where a metric first reaches its goal.

    By seed; nan = never. With `sign` -1 smaller values are better.
    """
    out = []
    for curve, goal in zip(of_seeds(records), goals, strict=True):
        rows = [r for r in curve if metric in r and sign * (r[metric] - goal) >= 0]
        out.append(place(rows[0]) if rows else float("nan"))
    return out
