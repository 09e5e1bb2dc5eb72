"""Checks the paths that a user gives before they are opened."""

import pathlib
import stat


def check(path: pathlib.Path, expected: str) -> None:
    """Refuses a path that is not a regular file; `expected` is such as `an npz file`.

    Raises:
        ValueError: a phrase without the path: it is a folder, a pipe or a device.
        OSError: there is no such file, or it cannot be accessed.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise ValueError(f"is a folder, {expected} is expected")
    if not stat.S_ISREG(mode):
        # Opening a pipe waits for a writer, perhaps forever.
        raise ValueError(f"is a pipe or a device, {expected} is expected")
