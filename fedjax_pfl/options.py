"""Dataclass fields that carry their own help text, choices and range."""

import dataclasses
import math
from typing import Any

import jax


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
    """A field of an option dataclass, with its `--help` text and its range.

    Args:
        default: The default value.
        help: One sentence; the paper's symbol in brackets.
        choices: The allowed strings. `file:PATH` allows any `file:...`.
        minimum: Smallest allowed number.
        maximum: Largest allowed number.
        above: The number must be greater than this.
        zero_is_off: Marks a float whose 0 removes code instead of multiplying by 0. It
            then stays a Python 0.0 (static).
        is_static: Marks a float that is part of the program, such as one that decides
            sizes. It is never traced, and each value is compiled separately.
        is_in_rounds: Marks a number of rounds after which something is complete, which
            a run should reach.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class HParams:
        ...     rate: float = option(0.1, "learning rate [eta]", minimum=0)
        >>> HParams().rate
        0.1
        >>> validate(HParams(rate=-1.0))
        Traceback (most recent call last):
        ValueError: --rate=-1.0: expected at least 0
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

    A field that is not an `option` (a notebook's `scale: float = 1.0`) has no bounds.

    Raises:
        ValueError: one line with the flag, the value and what is allowed.
    """
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        meta = _UNBOUNDED | field.metadata
        if value is None:
            continue
        flag = f"--{field.name}={value}"
        is_text = isinstance(value, str)  # an object was checked where it was given
        if meta["choices"] and is_text and not _is_choice(value, meta["choices"]):
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
    """Whether a text is one of the choices, or begins like one that ends in a path."""
    paths = [choice for choice in choices if choice.endswith(":PATH")]
    return value in choices or any(value.startswith(one[:-4]) for one in paths)


def refuse(values: Any, names: tuple[str, ...], reason: str) -> None:
    """Raises ValueError for options that have no effect but are not at their defaults.

    Traced numbers pass, because they were checked before the trace.
    """
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        is_traced = isinstance(value, jax.Array)
        if field.name in names and not is_traced and value != field.default:
            raise ValueError(f"--{field.name}={value} has no effect {reason}; omit it")


def is_off(value: Any) -> bool:
    """True for a static zero; a traced value is always on."""
    return isinstance(value, (int, float)) and value == 0


def split_floats(values: Any) -> tuple[Any, dict[str, float]]:
    """Separates the numbers that may be traced from the structure.

    Returns:
        The instance with every traceable float replaced by 0.0 (hashable, equal for all
        settings of one structure), and those floats by name.
    """
    floats = {
        field.name: getattr(values, field.name)
        for field in dataclasses.fields(values)
        if isinstance(getattr(values, field.name), float)
        and not field.metadata.get("is_static")
        and not (field.metadata.get("zero_is_off") and getattr(values, field.name) == 0)
    }
    return dataclasses.replace(values, **dict.fromkeys(floats, 0.0)), floats
