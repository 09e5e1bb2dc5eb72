"""Reads JSON that may be damaged or untrusted, and checks its form by kinds."""

import json
import sys
import types
import typing
from typing import Any

NUMBER = int | float
# Nan and infinity are written as null.
NUMBER_OR_NULL = int | float | None

# The kind of `str` where only the listed names are expected
NOTHING = types.NoneType

_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    types.NoneType: "null",
}


def read(text: bytes | str, kind: Any = object) -> Any:
    """The value of a JSON text, after `check` of its form.

    Raises:
        ValueError: a phrase without the file, such as `it is not JSON`.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # a RecursionError: deep brackets
        raise ValueError("it is not JSON") from error
    check(value, kind)
    return value


def check(value: Any, kind: Any) -> None:
    """Refuses a value of JSON that is not of the expected form.

    `kind` is a type or a union of types; `[kind]`, a list of these; or names and their
    kinds, an object. A name that ends in "?" may be missing, and the key `str` is the
    kind of all names that are not listed. Without it these may have any value.

    Raises:
        ValueError: a phrase without the file, such as `its metrics.c_gen.mean is a
            text, a number is expected`.
    """
    if odd := _odd(value, kind, ""):
        raise ValueError(odd)


def _odd(value: Any, kind: Any, place: str) -> str:
    """The part of a value that is not of its kind, as a phrase; "" if there is none."""
    its = f"its {_shown(place)}" if place else "it"
    if isinstance(kind, list):
        if not isinstance(value, list):
            return f"{its} is {_NAMES[type(value)]}, a list is expected"
        found = (_odd(one, kind[0], f"{place}[{n}]") for n, one in enumerate(value))
        return next(filter(None, found), "")
    if not isinstance(kind, dict):
        kinds = typing.get_args(kind) or (kind,)
        # A bool is an int to Python.
        if type(value) is int and float in kinds and abs(value) > sys.float_info.max:
            return f"{its} is a number that no float can hold"
        if object in kinds or type(value) in kinds:
            return ""
        # "a number" includes "an integer".
        wanted = [one for one in kinds if one is not int or float not in kinds]
        wanted = " or ".join(_NAMES[one] for one in wanted)
        return f"{its} is {_NAMES[type(value)]}, {wanted} is expected"
    if not isinstance(value, dict):
        return f"{its} is {_NAMES[type(value)]}, an object is expected"
    named = {name.rstrip("?"): one for name, one in kind.items() if name is not str}
    needed = [name for name in kind if name is not str and not name.endswith("?")]
    inside = f"{place}." if place else ""
    if missing := [name for name in needed if name not in value]:
        return f"it has no {_shown(inside)}{missing[0]}"
    others = [name for name in value if name not in named]
    if others and kind.get(str) is NOTHING:
        return f"{its} has {_shown(others[0])}, which is not expected"
    found = (
        _odd(one, named.get(name, kind.get(str, object)), f"{inside}{name}")
        for name, one in value.items()
    )
    return next(filter(None, found), "")


def _shown(name: str) -> str:
    """A name in at most 80 characters that a line can hold."""
    return "".join(c if c.isprintable() else "?" for c in name[:80])
