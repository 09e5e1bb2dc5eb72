"""Data sets as PFLlib's generators leave them: a file for each client.

https://github.com/TsingZ0/PFLlib: `train/0.npz`, `test/0.npz`, `train/1.npz`, ..., each
with a pickled dict of the rows `x` and the labels `y` of a client, and `config.json`.
"""

import pathlib
import zipfile
from typing import Any

import numpy as np

from data import arrays, dataset, files, labels, memory, pickles
from fedjax_pfl import json_text

PARTS = "train", "test"
CONFIG = "config.json"
_WANTED = "give the folder that holds PFLlib's train and test, such as dataset/MNIST"


def load(path: str, layout: str = "auto", least_classes: int = 2) -> dataset.Dataset:
    """Makes a data set of a folder of PFLlib, whose owners are its clients.

    The rows of `train` and those of `test`, the official test rows, are as PFLlib
    divided them. Rows of four axes are [N, C, H, W] unless `layout` says otherwise.

    Raises:
        ValueError: a phrase: a file is missing, cannot be read or differs from the
            others in its form, or `x` is text.
    """
    root = files.given(path, "a folder")
    num_clients = _num_clients(root)
    parts = [_part(root / name, num_clients) for name in PARTS]
    x, y, client = parts[0]
    if not len(parts[1][1]):
        raise ValueError("no client has a test row; PFLlib leaves some for each")
    note, found = (), ""
    if layout == "auto" and x.ndim == 4:
        layout = found = "nchw"
        note = (arrays.taken_as(found, x.shape),)
    made = arrays.from_arrays(
        *(x, y, client),
        layout=layout,
        least_classes=least_classes,
        test=parts[1],
        where="",
    )
    return made._replace(notes=(*note, *made.notes), layout=found)


def _num_clients(root: pathlib.Path) -> int:
    """The number of clients; ValueError if a file of one is missing, or is more."""
    of_parts = [{one.name for one in (root / n).glob("[!.]*.npz")} for n in PARTS]
    count, config = len(of_parts[0]), root / CONFIG
    if not count:
        raise ValueError(f"there is no {root / 'train' / '0.npz'}; {_WANTED}")
    wanted = [f"{client}.npz" for client in range(count)]
    for name, there in zip(PARTS, of_parts, strict=True):
        if missing := [one for one in wanted if one not in there]:
            raise ValueError(
                f"{root / name} holds {labels.listed(sorted(there)) or 'no file'} and "
                f"no {missing[0]}; files of the clients 0 to {count - 1} are expected "
                "in train and test"
            )
        if others := sorted(there.difference(wanted)):
            raise ValueError(f"{root / name / others[0]} is of no client in train")
    if config.is_file():
        with files.named(f"{config} cannot be read", OSError):
            held = json_text.read(config.read_bytes(), {"num_clients?": int})
        if held.get("num_clients", count) != count:
            raise ValueError(
                f"{config} says {held['num_clients']} clients, train holds {count}"
            )
    return count


def _part(folder: pathlib.Path, num_clients: int) -> tuple[np.ndarray, ...]:
    """The rows x, y and client of a folder's files, one after another."""
    held = [_rows(folder / f"{client}.npz") for client in range(num_clients)]
    sizes = [len(y) for _, y in held]
    if folder.name == PARTS[0] and 0 in sizes:
        raise ValueError(
            f"{folder / str(sizes.index(0))}.npz has no row; each client needs some"
        )
    # An empty array may have another form.
    rows = [one for one in held if len(one[1])] or held[:1]
    forms = {f"{x.dtype} {list(x.shape[1:])}": None for x, _ in rows}
    if len(forms) > 1:
        some = " and ".join(list(forms)[:2])
        raise ValueError(f"rows in {folder} are {some}; give all one type and shape")
    x, y = (np.concatenate(every) for every in zip(*rows, strict=True))
    return x, y, np.repeat(np.arange(num_clients), sizes)


def _rows(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """A client's x and y; ValueErrors name its file."""
    try:
        files.check(path, "an npz file")
        with zipfile.ZipFile(path) as archive:
            if "data.npy" not in archive.namelist():
                raise ValueError(
                    f"it holds {labels.listed(archive.namelist())}; save a dict of x "
                    "and y as data="
                )
            with archive.open("data.npy") as member:
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
        raise ValueError(f"{path} cannot be read: {files.reason(error)}") from error


def _checked(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns a client's arrays, which must have a label for each row."""
    for name, one in (("x", x), ("y", y)):
        if not isinstance(one, np.ndarray):
            kind = "missing" if one is None else f"a {type(one).__name__} of objects"
            raise ValueError(f"{name} is {kind}, an array of numbers is expected")
    if y.ndim != 1 or x.shape[:1] != y.shape:
        raise ValueError(
            f"x has the shape {list(x.shape)} and y {list(y.shape)}; one label for "
            "each row is expected"
        )
    return x, y
