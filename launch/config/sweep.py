"""Sweeps: `--sweep='client_lr=0.01,0.03;proximal_weight=0.1,1'`, one run of all points.

A point is a value for each name, and a sweep is the product of its names' values.
Without validation rows no point is named the best: accuracies are those of test rows,
and choosing a point by them would be training on the test set. A bad sweep raises a
ValueError of one line.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_pfl import options
from launch.config import registry

Point = dict[str, float]


def text(given: Any) -> str:
    """A sweep, line or mapping (ValueError), as one line that equal points share."""
    if isinstance(given, str):
        found = points(given)
        return _line({name: dict.fromkeys(p[name] for p in found) for name in found[0]})
    if not isinstance(given, Mapping):
        example = '{"client_lr": [0.01, 0.1]}'
        raise ValueError(
            f"sweep={given!r}: expected names and values, such as {example}"
        )
    try:
        return text(_line(given))
    except TypeError as error:
        line = f"sweep={given!r}: expected a list of values for each name"
        raise ValueError(line) from error


def _line(values: Mapping[str, Any]) -> str:
    if any(isinstance(one, str) for one in values.values()):
        raise TypeError("a text is not a list")
    return ";".join(f"{name}={','.join(map(str, v))}" for name, v in values.items())


def joined(lines: Sequence[str]) -> str:
    """Sweeps as one, with all values of a name that several of them have."""
    values: dict[str, dict[float | str, str]] = {}
    for part in filter(str.strip, ";".join(lines).split(";")):
        name, _, listed = part.strip().removeprefix("--").partition("=")
        of_name = values.setdefault(name.strip(), {})
        for value in map(str.strip, listed.split(",")):
            number = _number(value)
            of_name.setdefault(value if number is None else number, value)
    return _line({name: one.values() for name, one in values.items()})


def _number(text: str) -> float | None:
    """The number in a text, None if it holds none."""
    try:
        return float(text)
    except ValueError:
        return None


def points(line: str) -> list[Point]:
    """Points of a sweep (ValueError), the last name varying fastest; [{}] if none."""
    if not line:
        return [{}]
    values: dict[str, list[float]] = {}
    for part in line.split(";"):
        name, equals, listed = part.strip().partition("=")
        name = name.removeprefix("--")
        numbers = [_number(value) for value in listed.split(",")]
        wrong = ""
        if not (equals and name.isidentifier()):
            wrong = "expected NAME=VALUE,VALUE;NAME=VALUE,..."
        elif name in values:
            wrong = f"{name} is named twice"
        elif None in numbers:
            wrong = f"{name} has a value that is not a number"
        elif len(set(numbers)) < len(numbers):
            wrong = f"{name} has a value twice"
        if wrong:
            raise ValueError(f"--sweep={line}: {wrong}")
        values[name] = numbers
    product = itertools.product(*values.values())
    return [dict(zip(values, point, strict=True)) for point in product]


def of(line: str, hparams: Any, other_names: Sequence[str] = ()) -> list[Point]:
    """The points of a sweep of one algorithm's numbers; [{}] without a sweep.

    `hparams` are the algorithm's options without the sweep, and `other_names` are
    options that are not its own. Raises ValueError if an option cannot be swept, or if
    its values need several programs.
    """
    found = points(line)
    known = {field.name: field for field in dataclasses.fields(hparams)}
    for name in found[0]:
        why = _why_not(name, known, hparams, other_names)
        if why:
            is_unknown = name not in other_names and name not in known
            hint = registry.meant(name, known, "") if is_unknown else ""
            cure = "; from Python build.compare({...}) runs any settings side by side"
            raise ValueError(f"--sweep={line}: {name} {why}{hint or cure}")
    every = settings(line, hparams)
    options.validate(*every)
    for name, value in found[0].items():
        unmet = [options.unmet(known[name], vars(one)) for one in every]
        if all(unmet):
            other, now = unmet[0][0]
            wanted = options.metadata(known[name])["needs"][other]
            raise ValueError(options.without_effect(name, value, other, now, wanted))
    for point, here in zip(found, every, strict=True):
        _, floats = options.split_floats(here)
        off = sorted(point.keys() - floats.keys())
        if off:
            raise ValueError(
                f"--sweep={line}: 0 takes {off[0]} out of the program; omit it and run "
                f"--{off[0]}=0 separately"
            )
    return found


def settings(line: str, hparams: Any) -> list[Any]:
    """An algorithm's options at each point of a sweep, as far as these are its floats.

    Raises ValueError as `points` does.
    """
    known = {field.name for field in dataclasses.fields(hparams) if _is_float(field)}
    return [
        dataclasses.replace(hparams, **{n: v for n, v in point.items() if n in known})
        for point in points(line)
    ]


def _is_float(field: dataclasses.Field) -> bool:
    return field.type is float or str(field.type).startswith("float")


def _why_not(
    name: str, known: Mapping[str, Any], hparams: Any, other_names: Sequence[str]
) -> str:
    """The reason why an option cannot be swept, empty if it can."""
    if name in other_names:
        return "shapes the data, the models or the run"
    if name not in known:
        return "is not an option of this algorithm"
    value = getattr(hparams, name)
    if _is_float(known[name]):
        if known[name].metadata.get("is_static"):
            return "is part of the program, so that each value is another"
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return "is an integer, each of which is another program"
    return "is a choice, each of which is another program"


def label(point: Mapping[str, float], name: str = "") -> str:
    """A point in words after a name: `mine client_lr=0.1 proximal_weight=1.0`."""
    words = [f"{option}={value}" for option, value in point.items()]
    return " ".join(filter(None, [name, *words]))


def matches(record: Mapping[str, Any], point: Mapping[str, float]) -> bool:
    """Whether a record belongs to a point, as every record does without a sweep."""
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
