"""Files that a user names: refused before they are opened if they are none."""

from __future__ import annotations

import pathlib
import stat


def check(path: pathlib.Path, expected: str) -> None:
    """Refuses what opens like a file and is none; `expected` is `an npz file`.

    Raises:
        ValueError: a phrase without the path: a folder, a pipe, a device.
        OSError: nothing is there, or it cannot be seen.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise ValueError(f"is a folder, {expected} is expected")
    if not stat.S_ISREG(mode):
        # Opening a pipe waits until somebody writes, perhaps for ever.
        raise ValueError(f"is a pipe or a device, {expected} is expected")
