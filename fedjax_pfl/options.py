"""A dataclass field that carries its own help text, choices and range."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    zero_is_off: bool = False,
    is_static: bool = False,
    is_in_rounds: bool = False,
) -> Any:
    """A field with `--help` text.

    Args:
        default: The default value.
        help: One sentence; the paper's symbol in brackets.
        choices: The allowed strings; `file:PATH` stands for any `file:...`.
        minimum: Smallest allowed number.
        maximum: Largest allowed number.
        above: The number must be greater than this.
        zero_is_off: A float whose 0 removes code instead of multiplying by 0; it
            stays a Python 0.0 (static) then.
        is_static: A float that decides sizes: never traced, compiled for anew.
        is_in_rounds: A number of rounds that a run should come to the end of.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "zero_is_off": zero_is_off,
        "is_static": is_static,
        "is_in_rounds": is_in_rounds,
    }
    return dataclasses.field(default=default, metadata=metadata)


_UNBOUNDED = {"choices": (), "minimum": None, "maximum": None, "above": None}


def validate(values: Any) -> None:
    """Checks every field of a dataclass instance against its option.

    A field that is no `option` (a notebook's `scale: float = 1.0`) has no bounds.

    Raises:
        ValueError: one line with the flag, what came and what is allowed.
    """
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        meta = _UNBOUNDED | field.metadata
        if value is None:
            continue
        flag = f"--{field.name}={value}"
        if meta["choices"] and not _is_choice(value, meta["choices"]):
            known = ", ".join(choice for choice in meta["choices"] if choice)
            raise ValueError(f"{flag}: expected one of {known}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{flag}: expected a finite number")
        if meta["minimum"] is not None and value < meta["minimum"]:
            raise ValueError(f"{flag}: expected at least {meta['minimum']:g}")
        if meta["maximum"] is not None and value > meta["maximum"]:
            raise ValueError(f"{flag}: expected at most {meta['maximum']:g}")
        if meta["above"] is not None and value <= meta["above"]:
            raise ValueError(f"{flag}: expected more than {meta['above']:g}")


def _is_choice(value: str, choices: tuple[str, ...]) -> bool:
    """Whether a text is one of them, or begins as one that ends in a path."""
    paths = [choice for choice in choices if choice.endswith(":PATH")]
    return value in choices or any(value.startswith(one[:-4]) for one in paths)


def refuse(values: Any, names: tuple[str, ...], reason: str) -> None:
    """Raises ValueError for an option that has no effect and is not at its default.

    Traced numbers pass: they were checked before the trace.
    """
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        static = isinstance(value, (int, float, str))
        if field.name in names and static and value != field.default:
            raise ValueError(
                f"--{field.name}={value} has no effect {reason}; leave it away"
            )


def is_off(value: Any) -> bool:
    """True for a static zero; a traced value is always on."""
    return isinstance(value, (int, float)) and value == 0


def split_floats(values: Any) -> tuple[Any, dict[str, float]]:
    """Separates the numbers that may be traced from the structure.

    Returns:
        The instance with every traceable float replaced by 0.0 (hashable, equal for
        all settings of one structure), and those floats by name.
    """
    floats = {
        field.name: getattr(values, field.name)
        for field in dataclasses.fields(values)
        if isinstance(getattr(values, field.name), float)
        and not field.metadata.get("is_static")
        and not (field.metadata.get("zero_is_off") and getattr(values, field.name) == 0)
    }
    return dataclasses.replace(values, **dict.fromkeys(floats, 0.0)), floats
