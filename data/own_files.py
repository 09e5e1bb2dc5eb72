"""A user's own data by name: files of arrays, tables, and folders of images."""

import os
import pathlib
from collections.abc import Mapping

import numpy as np

from data import (
    arrays,
    dataset,
    doors,
    files,
    frames,
    images,
    labels,
    leaf,
    npz,
    parquet,
    pfllib,
)

ARRAYS = "arrays"  # the name of a data set that was given in memory
FILES = {
    "npz:PATH": "your own arrays x, y and optionally client",
    "csv:PATH": "your own table, with columns --label and optionally --owner",
    "parquet:PATH": "a file or folder of parquet: a table, or images as on the hub",
    "images:PATH": "your own folder of images, class/file or owner/class/file",
    "leaf:PATH": "LEAF's JSON of images or features by owner, a file or a folder",
    "pfllib:PATH": "PFLlib's folder of a data set, with train/0.npz, test/0.npz, ...",
}
WITH_LAYOUT = "npz:", "leaf:", "pfllib:", "parquet:"  # those that take `--layout`
WITH_COLUMNS = "csv:", "parquet:"  # those that take `--label` and `--owner`
NORMALIZED = "pfllib:"  # its files hold floats as they are trained on
# Arrays of a user's npz file, with `_test` and `_val` those of official rows
_OWN = ("x", "y", "client")
# What some of them are called in files of Keras and of MedMNIST
_KERAS = {"x": "x_train", "y": "y_train"}
_MEDMNIST = {"x": "train_images", "y": "train_labels"}
_MEDMNIST |= {f"x_{part}": f"{part}_images" for part in ("test", "val")}
_MEDMNIST |= {f"y_{part}": f"{part}_labels" for part in ("test", "val")}


def in_memory(options: Mapping[str, str]) -> list[str]:
    """The recorded options whose data were given in Python."""
    return [n for n in ("dataset", "public_set") if options.get(n) == ARRAYS]


def load_npz(
    path: str, layout: str = "auto", least_classes: int = 2
) -> dataset.Dataset:
    """Loads a user's npz file with `x`, `y` and optionally `client`; see `arrays`.

    Official test and validation rows are in `x_test`, `y_test`, `client_test` and
    `x_val`, ... The names of Keras (`x_train`) and MedMNIST (`train_images`) are taken
    where there is no `x`, and labels [N, 1] as [N]. Raises ValueError, whose message is
    a phrase, if it cannot be read or its arrays do not fit.
    """
    place = files.given(path, "an npz file")
    there = npz.names(place)
    forms = [
        one for one in (_KERAS, _MEDMNIST) if one["x"] in there and "x" not in there
    ]
    form = forms[0] if forms else {}
    train, test, val = (
        [form.get(name + part, name + part) for name in _OWN]
        for part in ("", "_test", "_val")
    )
    known = (*train, *test, *val)
    needed = 2 if least_classes > 1 else 1  # nobody reads labels of a public set
    found = npz.read(place, train[:needed], known[needed:])
    if train[1] not in found:
        found[train[1]] = np.zeros(found[train[0]].shape[:1], int)
    for name in (train[1], test[1], val[1]):
        if name in found and found[name].ndim == 2 and found[name].shape[1] == 1:
            found[name] = found[name][:, 0]
    more = []
    for names in (test, val):
        held = [name for name in names if name in found]
        if held and held[:2] != names[:2]:
            lacking = next(name for name in names if name not in held)
            raise ValueError(f"has {held[0]} without {lacking}; add it, or omit both")
        more.append(tuple(found[name] for name in held) or None)
    made = arrays.from_arrays(
        *(found[train[0]], found[train[1]], found.get(train[2])),
        names=(train[1], train[2]),
        layout=layout,
        least_classes=least_classes,
        test=more[0],
        val=more[1],
        where="",
    )
    if others := sorted(there.difference(known)):
        line = f"arrays of the file that are not used: {labels.listed(others)}"
        like = {*others} & {*frames.OWNERS}
        if like and train[2] not in found:
            line += f"; owners of rows are in an array called {train[2]}"
        made = made._replace(notes=(*made.notes, line))
    return made


def load_parquet(
    path: str, label: str, owner: str, layout: str, least_classes: int = 2
) -> dataset.Dataset:
    """Loads a table, or images, of a user's parquet files; see `parquet` and `doors`.

    Files of splits are train, official test and validation rows. Images without classes
    (`least_classes` 1) need no labels. Raises ValueError, whose message is a phrase, if
    one cannot be read or its columns do not fit.
    """
    found = parquet.opened(path, label, owner)
    columns = found.values
    if found.are_images and layout not in ("auto", "nhwc"):
        raise ValueError(
            f"--layout={layout} is of arrays, and these are files of images; omit it"
        )
    if found.x and least_classes < 2:
        x = columns.get("train", columns)[found.x]
        columns = {"x": x, "label": np.zeros(len(x), np.int32)}
        label = "label"
    rows = doors.opened(columns, label=label, owner=owner)
    given = {"layout": "nhwc" if found.are_images else layout}
    given["least_classes"] = least_classes
    made = doors.joined(*rows, label, owner, "", **given)
    return made._replace(notes=(*found.notes, *made.notes))


def is_one(name: str) -> bool:
    """Whether a data set is a user's own: one of `FILES`, or arrays in memory."""
    kinds = [one.partition(":")[0] for one in FILES]
    return name == ARRAYS or (":" in name and name.partition(":")[0] in kinds)


def kind_of(path: str) -> str:
    """The kind of a path that is there by its name, as of `FILES`; "" if it is none."""
    if os.path.isdir(path) and os.sep in path:
        of_files = {"train/[0-9]*.npz": "pfllib", "*.json": "leaf"}
        of_files |= dict.fromkeys(("*.parquet", "*/*.parquet"), "parquet")
        folder = pathlib.Path(path)
        return next((of_files[n] for n in of_files if any(folder.glob(n))), "images")
    kinds = {".npz": "npz", ".csv": "csv", ".json": "leaf", ".parquet": "parquet"}
    return kinds.get(os.path.splitext(path)[1], "") if os.path.isfile(path) else ""


def load(
    name: str, layout: str, label: str, owner: str, least_classes: int
) -> dataset.Dataset | None:
    """Loads one of `FILES` with a path in place of PATH, None for any other name.

    `layout` is that of images in `WITH_LAYOUT`, one of `arrays.LAYOUTS`; `label` and
    `owner` are the columns of `WITH_COLUMNS`, see `frames.from_frame`. Raises
    ValueError, whose message is a phrase.
    """
    kind, has_path, path = name.partition(":")
    own = {
        "npz": lambda: load_npz(path, layout, least_classes),
        "csv": lambda: frames.from_csv(path, label, owner, least_classes),
        "parquet": lambda: load_parquet(path, label, owner, layout, least_classes),
        "images": lambda: images.from_folder(path, least_classes),
        "leaf": lambda: leaf.load(path, layout, least_classes),
        "pfllib": lambda: pfllib.load(path, layout, least_classes),
    }
    return own[kind]() if has_path and kind in own else None
