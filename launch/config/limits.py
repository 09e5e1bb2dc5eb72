"""Checks of single values, and how errors show a value."""

import contextlib
import json
import numbers
import os
import unicodedata
from typing import Any

import numpy as np

from fedjax_pfl import optimizer

INT_LIMIT = 2**31 - 1
SEED_LIMIT = 2**32 - 1
FLOAT_LIMIT = float(np.finfo(np.float32).max)
TEXT_LIMIT = 4096
# Control characters, line and paragraph separators, halves of surrogate pairs
_UNWRITABLE = ("Cc", "Zl", "Zp", "Cs")
# Options that are lists in Python and JSON as text, the first two also in files
_LISTS = ("availability", "client_speed", "unseen_names")
# Where in Python the objects belong that are given to these options
_PLACES = {
    "partition": "; rows of clients are given by dataset={client: (x[rows], y[rows])}",
    "client_lr": "; schedules belong in client_optimizer=, several rates in sweep=",
    "server_lr": "; schedules belong in server_optimizer=, several rates in sweep=",
    "init_from": "; docs/howto.md writes such a file of a torch model's weights",
}


def checked(name: str, value: Any, kind: type) -> Any:
    """The value as a plain `kind` that 32 bits and a line of a file can hold.

    None and own optimizers pass, an int passes as a float, and a number as the text of
    one, such as availability=0.5. A list or array passes as JSON where the option has
    such a form. Anything else raises a short ValueError.
    """
    if value is None or isinstance(value, optimizer.Custom):
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    is_list = isinstance(value, (list, tuple, range)) or hasattr(value, "tolist")
    if name in _LISTS and is_list:
        with contextlib.suppress(TypeError):  # other things in a list
            value = json.dumps(_plain(value), default=_plain)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_int or isinstance(value, float)
    if kind is str and is_number and abs(value) < FLOAT_LIMIT:
        value = f"{value:.10g}"
    fits = isinstance(value, kind) and (kind is not int or is_int)
    if not fits and not (kind is float and is_int):
        is_plain = isinstance(value, (str, bytes, int, float))
        place = "" if is_plain else _PLACES.get(name, "")
        raise ValueError(f"--{name}={shown(value)}: expected {kind.__name__}{place}")
    if kind is str:
        check_text(name, value)
    if kind in (int, float):
        limit = FLOAT_LIMIT if kind is float else INT_LIMIT
        if name.endswith("seed"):
            limit = SEED_LIMIT
        # nan and infinity pass here, and `options.validate` refuses them.
        if limit < abs(value) < float("inf"):
            sign = "at least -" if value < 0 else "at most "
            raise ValueError(f"--{name}={shown(value)}: expected {sign}{limit:.10g}")
    return kind(value)


def _plain(value: Any) -> Any:
    """An array, a series or a number of NumPy or JAX as lists and numbers of Python."""
    value = list(value) if isinstance(value, range) else value
    found = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(found, (list, tuple, int, float, str)):
        raise TypeError(f"got a {type(found).__name__}")
    return found


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, of NumPy too, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_text(name: str, value: str) -> None:
    """Raises ValueError if a line of a flagfile cannot hold the text.

    Line breaks, other control characters, text that is not UTF-8, spaces around the
    text, and more than `TEXT_LIMIT` characters are refused.
    """
    odd = [c for c in value if unicodedata.category(c) in _UNWRITABLE]
    wrong = ""
    if len(value) > TEXT_LIMIT:
        wrong = f"has {len(value)} characters, at most {TEXT_LIMIT} fit"
        wrong += "; give file:PATH of such a list" if name in _LISTS[:2] else ""
    elif odd:
        wrong = f"holds {odd[0]!r}, which a flagfile cannot hold; omit it"
    elif value != value.strip():
        wrong = "begins or ends with a space; omit it"
    if wrong:
        raise ValueError(f"--{name}={shown(value)} {wrong}")


def shown(value: Any) -> str:
    """A value in at most 60 characters; an array or an object as its type and shape."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"{'-' * (value < 0)}10**{int(value.bit_length() * np.log10(2))}"
    if value is None or isinstance(value, (int, float, str, bytes)):
        text = repr(value[:61] if isinstance(value, (str, bytes)) else value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    shape = getattr(value, "shape", None)
    kind = type(value).__name__[:40]
    return f"<{kind} {list(shape)}>" if isinstance(shape, tuple) else f"<{kind}>"
