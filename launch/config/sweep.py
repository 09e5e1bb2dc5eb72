"""Sweeps: `--sweep='client_lr=0.01,0.03;proximal_weight=0.1,1'`, one run of all points.

A point is a value for each name; a sweep is the product of its names' values. Which of
them is best is not said anywhere: the rows that are left for it are test rows, and
choosing by these would be training on them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_pfl import options

Point = dict[str, float]


def text(given: Any) -> str:
    """A sweep as one line, written alike for equal points; empty for an empty one.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(given, str):
        found = points(given)
        every = {name: dict.fromkeys(p[name] for p in found) for name in found[0]}
        return _line(every)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"sweep={given!r}: expected names and values, such as "
            '{"client_lr": [0.01, 0.1]}'
        )
    try:
        return text(_line(given))
    except TypeError as error:
        raise ValueError(
            f"sweep={given!r}: expected a list of values for each name"
        ) from error


def _line(values: Mapping[str, Any]) -> str:
    return ";".join(f"{name}={','.join(map(str, v))}" for name, v in values.items())


def points(line: str) -> list[Point]:
    """The points of a sweep, the last name's values in turn; [{}] without one.

    Raises:
        ValueError: one line.
    """
    if not line:
        return [{}]
    values: dict[str, list[float]] = {}
    for part in line.split(";"):
        name, equals, listed = part.strip().partition("=")
        name = name.removeprefix("--")
        if not (equals and name.isidentifier()):
            raise ValueError(
                f"--sweep={line}: expected NAME=VALUE,VALUE,... with a semicolon "
                "between names"
            )
        if name in values:
            raise ValueError(f"--sweep={line} names {name} twice")
        try:
            values[name] = [float(value) for value in listed.split(",")]
        except ValueError as error:
            raise ValueError(
                f"--sweep={line}: {name} has a value that is not a number"
            ) from error
        if len(set(values[name])) < len(values[name]):
            raise ValueError(f"--sweep={line}: {name} has a value twice")
    product = itertools.product(*values.values())
    return [dict(zip(values, point, strict=True)) for point in product]


def of(line: str, hparams: Any, other_names: Sequence[str] = ()) -> list[Point]:
    """The points of a sweep of one algorithm's numbers; [{}] without one.

    Args:
        line: `--sweep`.
        hparams: The algorithm's options as they are without it.
        other_names: Options that are not the algorithm's own.

    Raises:
        ValueError: one line: a name that no program takes as a number, or values that
            belong to several programs.
    """
    found = points(line)
    known = {field.name: field for field in dataclasses.fields(hparams)}
    for name in found[0]:
        why = _why_not(name, known, hparams, other_names)
        if why:
            raise ValueError(
                f"--sweep={line}: {name} {why}; from Python build.compare({{...}}) "
                "runs any settings side by side"
            )
    structures = []
    for point in found:
        here = dataclasses.replace(hparams, **point)
        options.validate(here)
        structure, floats = options.split_floats(here)
        off = sorted(point.keys() - floats.keys())
        if off:
            raise ValueError(
                f"--sweep={line}: 0 takes {off[0]} out of the program; leave it out of "
                f"the sweep and run --{off[0]}=0 by itself"
            )
        structures.append(structure)
    if any(one != structures[0] for one in structures):
        raise ValueError(f"--sweep={line}: its points are several programs")
    return found


def _why_not(
    name: str, known: Mapping[str, Any], hparams: Any, other_names: Sequence[str]
) -> str:
    """Why an option cannot be swept; empty if it can."""
    if name in other_names:
        return "shapes the data, the models or the run"
    if name not in known:
        return "is not an option of this algorithm"
    value, kind = getattr(hparams, name), str(known[name].type)
    if kind.startswith("float") or known[name].type is float:
        is_static = known[name].metadata.get("is_static")
        return "decides sizes, each a program of its own" if is_static else ""
    if isinstance(value, (bool, str)):
        return "is a choice, each a program of its own"
    if isinstance(value, int):
        return "is an integer, each a program of its own"
    return "is not a number"


def label(point: Mapping[str, float], name: str = "") -> str:
    """A point in words, behind a name: `mine client_lr=0.1 proximal_weight=1.0`."""
    words = [f"{option}={value}" for option, value in point.items()]
    return " ".join(filter(None, [name, *words]))


def matches(record: Mapping[str, Any], point: Mapping[str, float]) -> bool:
    """Whether a record is of a point; every record is, where there is no sweep."""
    return all(
        math.isclose(record.get(name, math.nan), value, rel_tol=1e-12)
        for name, value in point.items()
    )


def of_point(
    records: Sequence[Mapping[str, Any]], point: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The records of a point, without its names."""
    return [
        {name: value for name, value in record.items() if name not in point}
        for record in records
        if matches(record, point)
    ]
