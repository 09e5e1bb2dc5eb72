"""What a value may be, how it is shown, and which name was meant."""

from __future__ import annotations

import difflib
import os
import unicodedata
from collections.abc import Iterable
from typing import Any

import numpy as np

INT_LIMIT = 2**31 - 1
SEED_LIMIT = 2**32 - 1
FLOAT_LIMIT = float(np.finfo(np.float32).max)
TEXT_LIMIT = 4096
# Control characters, line and paragraph separators, halves of surrogate pairs.
_UNWRITABLE = ("Cc", "Zl", "Zp", "Cs")


def checked(name: str, value: Any, kind: type) -> Any:
    """The value as a plain `kind`, within what 32 bits and a line of a file can hold.

    Args:
        name: The flag.
        value: None passes; an int will do for a float.
        kind: int, float, str or bool.

    Raises:
        ValueError: one short line, whatever the value is.
    """
    if value is None:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    fits = isinstance(value, kind) and (kind is not int or is_int)
    if not fits and not (kind is float and is_int):
        raise ValueError(f"--{name}={told(value)}: expected {kind.__name__}")
    if kind is str:
        check_text(name, value)
    if kind in (int, float):
        limit = FLOAT_LIMIT if kind is float else INT_LIMIT
        if name.endswith("seed"):
            limit = SEED_LIMIT
        # nan and infinity pass: `options.validate` has words for them.
        if limit < abs(value) < float("inf"):
            sign = "at least -" if value < 0 else "at most "
            raise ValueError(f"--{name}={told(value)}: expected {sign}{limit:.10g}")
    return kind(value)


def check_text(name: str, value: str) -> None:
    """Refuses text that would not come back from a line of a flagfile.

    Raises:
        ValueError: a line break, another control character, text that is not UTF-8,
            spaces around it, or more than `TEXT_LIMIT` characters.
    """
    if len(value) > TEXT_LIMIT:
        raise ValueError(
            f"--{name}={told(value)} has {len(value)} characters, at most {TEXT_LIMIT} "
            "are possible"
        )
    odd = [c for c in value if unicodedata.category(c) in _UNWRITABLE]
    if odd:
        raise ValueError(
            f"--{name}={told(value)} holds the character {odd[0]!r}, which a flagfile "
            "cannot; write it without"
        )
    if value != value.strip():
        raise ValueError(
            f"--{name}={told(value)} begins or ends with a space; write it without"
        )


def told(value: Any) -> str:
    """A value in a few characters; of an array or an object its type and shape."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"{'-' * (value < 0)}10**{int(value.bit_length() * np.log10(2))}"
    if value is None or isinstance(value, (int, float, str, bytes)):
        text = repr(value[:61] if isinstance(value, (str, bytes)) else value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    shape = getattr(value, "shape", None)
    kind = type(value).__name__[:40]
    return f"<{kind} {list(shape)}>" if isinstance(shape, tuple) else f"<{kind}>"


def nearest(name: str, known: Iterable[str], before: str = "") -> str:
    """`; did you mean X?`, `before` standing before the name; "" where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {before}{close[0]}?" if close else ""
