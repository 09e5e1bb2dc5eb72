"""What somebody may have meant who wrote a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], before: str = "") -> str:
    """`; did you mean X?` of the nearest known name, "" where none is near.

    Args:
        name: What was written.
        known: What might have been.
        before: Stands before the name, such as `--`.
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {before}{close[0]}?" if close else ""
