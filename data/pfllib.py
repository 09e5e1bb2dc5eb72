"""Data sets as PFLlib's generators leave them: a file for each client.

https://github.com/TsingZ0/PFLlib: `train/0.npz`, `test/0.npz`, `train/1.npz`, ..., each
with a pickled dict of the rows `x` and the labels `y` of a client.
"""

import pathlib
import zipfile
from typing import Any

import numpy as np

from data import arrays, dataset, files, memory, pickles

PARTS = "train", "test"


def load(path: str, layout: str = "auto", least_classes: int = 2) -> dataset.Dataset:
    """Makes a data set of a folder of PFLlib, whose owners are its clients.

    The rows of `train` and those of `test`, the official test rows, are as PFLlib
    divided them. Rows [N, C, H, W] are images of C channels.

    Raises:
        ValueError: a phrase: there is no such file, one cannot be read, or `x` is text.
    """
    root = files.given(path, "a folder")
    parts = [_part(root / name) for name in PARTS]
    if parts[0] is None:
        raise ValueError(f"there is no {root / 'train' / '0.npz'}; {_WANTED}")
    x, y, client = parts[0]
    if layout == "auto" and x.ndim == 4:
        layout = "nchw"
    return arrays.from_arrays(
        *(x, y, client),
        layout=layout,
        least_classes=least_classes,
        test=parts[1],
        where="",
    )


_WANTED = "give the folder that holds PFLlib's train and test, such as dataset/MNIST"


def _part(folder: pathlib.Path) -> tuple[np.ndarray, ...] | None:
    """The rows x, y and client of a folder's files, None if there are no rows."""
    found = {int(one.stem): one for one in folder.glob("*.npz") if one.stem.isdecimal()}
    rows = [(client, *_rows(found[client])) for client in sorted(found)]
    rows = [one for one in rows if len(one[2])]
    if not rows:
        return None
    first, *others = rows
    for client, x, _ in others:
        if x.shape[1:] != first[1].shape[1:]:
            raise ValueError(
                f"rows of {found[first[0]]} are {list(first[1].shape[1:])} and of "
                f"{found[client]} {list(x.shape[1:])}; give all one shape"
            )
    clients, x, y = zip(*rows, strict=True)
    return np.concatenate(x), np.concatenate(y), np.repeat(clients, list(map(len, y)))


def _rows(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """A client's x and y; ValueErrors name its file."""
    try:
        files.check(path, "an npz file")
        with zipfile.ZipFile(path) as archive, archive.open("data.npy") as member:
            # The bytes, the arrays in them, and these joined to those of others
            memory.check(3 * archive.getinfo("data.npy").file_size, "its arrays")
            np.lib.format.read_magic(member)
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            if not dtype.hasobject:
                given = f"data is {dtype} {list(shape)}"
                raise ValueError(f"{given}, a dict of x and y is expected")
            found = pickles.read(member.read())
        return _checked(found.get("x"), found.get("y"))
    except Exception as error:  # damaged bytes raise various errors
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}") from error


def _checked(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns a client's arrays, which must have a label for each row."""
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        raise ValueError("arrays x and y of numbers are expected; texts are not read")
    if y.ndim != 1 or x.shape[:1] != y.shape:
        raise ValueError(
            f"x has the shape {list(x.shape)} and y {list(y.shape)}; one label for "
            "each row is expected"
        )
    return x, y
