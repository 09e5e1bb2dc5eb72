"""Reads parquet files, of tables or with images, as those of Hugging Face's hub.

A file of the hub belongs to the split that its name begins with, such as
`train-00000-of-00001.parquet`, or that its folder is called.
"""

from __future__ import annotations

import io
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from data import files, images, labels, memory

# The splits in the names of files or of their folders
SPLITS = ("train", "test", "validation", "valid", "val", "dev")
# Columns of the images and labels of data sets on the hub, by the kind of the labels
IMAGES = ("image", "img")
LABELS = {"": ("label", "fine_label"), "coarse": ("coarse_label",)}


class Found(NamedTuple):
    """The parquet files of a folder.

    Attributes:
        parts: The files of each split, or of "" if their names tell none.
        others: Names of files beside those of splits, which are not read.
    """

    parts: dict[str, list[pathlib.Path]]
    others: tuple[str, ...] = ()


def find(folder: pathlib.Path) -> Found:
    """Finds the parquet files of a folder, without any if it has none."""
    there = [*folder.glob("*.parquet"), *folder.glob("*/*.parquet")]
    there = [p for p in there if p.parent == folder or _split_of(p.parent.name)]
    splits = {p: _split_of(p.name) or _split_of(p.parent.name) for p in there}
    if "train" not in splits.values():
        return Found({"": sorted(p for p in there if p.parent == folder)})
    parts = {
        one: sorted(p for p, name in splits.items() if name == one)
        for one in SPLITS
        if one in splits.values()
    }
    return Found(parts, tuple(sorted(p.name for p, one in splits.items() if not one)))


def _split_of(name: str) -> str:
    """The split that the name of a file or folder begins with, "" if none."""
    word = re.split(r"[-_.]", name.lower())[0]
    return word if word in SPLITS else ""


def opened(path: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Reads a user's file, or the files of a folder.

    Returns:
        (The columns by name, or those of each split in `SPLITS`, as `doors.opened`
        takes them; lines about what was read).

    Raises:
        ValueError: a phrase: there is no such file, one cannot be read, or two differ
            in their columns.
    """
    root = files.given(path, "a parquet file or a folder of some")
    found = find(root) if root.is_dir() else Found({"": [root]})
    if not any(found.parts.values()):
        below = {one.parent for one in root.glob("*/*.parquet")}
        below |= {one.parent.parent for one in root.glob("*/*/*.parquet")} - {root}
        if len(below) != 1:
            names = labels.listed(sorted(one.name for one in below))
            reason = f"these are in its folders {names}, of which give one"
            raise ValueError(
                f"it holds no parquet files; {reason if below else 'give their folder'}"
            )
        found = find(below.pop())
    notes = []
    if found.others:
        notes = [f"files beside train that are not read: {labels.listed(found.others)}"]
    alone = [path.name for path in found.parts.get("", ()) if root.is_dir()]
    if splits := [name for name in alone if _split_of(name)]:
        line = "there is no file of train, so that all are one table, also "
        notes = [line + labels.listed(splits)]
    parts = {name: _columns(paths) for name, paths in found.parts.items()}
    return parts.get("", parts), tuple(notes)


def official(folder: pathlib.Path, kind: str = "") -> dict[str, np.ndarray] | None:
    """Reads a data set that the hub has with train and test files of images.

    Args:
        folder: The folder of the files.
        kind: The kind of the labels, one of `LABELS`.

    Returns:
        (Images uint8 [N, H, W, C] and integers [N], of the train and of the test split,
        by names for errors), or None if these files are not there.

    Raises:
        ValueError: one line with the file: it is damaged, or another one.
    """
    parts = find(folder).parts
    out = {}
    for name in ("train", "test"):
        if name not in parts:
            return None
        held, first = _names(parts[name][0]), parts[name][0]
        wanted = [
            next((one for one in usual if one in held), None)
            for usual in (IMAGES, LABELS[kind])
        ]
        if None in wanted:
            lacking = (IMAGES, LABELS[kind])[wanted.index(None)]
            raise ValueError(
                f"{first} has the columns {labels.listed(held)}, and none is called "
                f"{' or '.join(lacking)}; give the folder of other files, or "
                f"parquet:{first.parent} with --label"
            )
        columns = _columns(parts[name], wanted)
        image, label = (np.asarray(columns[one]) for one in wanted)
        out |= {f"{first}: {wanted[0]}": image, f"{first}: {wanted[1]}": label}
    return out


def _names(path: pathlib.Path) -> list[str]:
    return list(_read(path, lambda opened: iter([opened.schema_arrow.names])))[0]


def _columns(
    paths: Sequence[pathlib.Path], names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Joins the columns of files, which must be the same in all of them."""
    columns: dict[str, list[np.ndarray]] = {}
    for path in paths:
        for batch in batches(path, names):
            if columns and batch.keys() != columns.keys():
                raise ValueError(
                    f"{path} has the columns {labels.listed([*batch])} and {paths[0]} "
                    f"{labels.listed([*columns])}; give files of one kind"
                )
            for name, values in batch.items():
                columns.setdefault(name, []).append(values)
    if not columns:
        raise ValueError(f"{paths[0]} has no rows")
    with files.named(f"{paths[0]} and the others" if paths[1:] else f"{paths[0]}"):
        return {name: _joined(name, every) for name, every in columns.items()}


def _joined(name: str, every: list[np.ndarray]) -> np.ndarray:
    """Joins the batches of a column, of which gray images become RGB beside others."""
    every = [one for one in every if len(one)] or every[:1]
    shapes = {one.shape[1:] for one in every}
    channels = {shape[2:] for shape in shapes}
    if channels == {(1,), (3,)} and len({shape[:2] for shape in shapes}) == 1:
        every = [np.broadcast_to(one, (*one.shape[:3], 3)) for one in every]
    elif len(shapes) > 1:
        some = " and ".join(str(list(one)) for one in sorted(shapes)[:2])
        raise ValueError(f"rows of {name} differ in shape, such as {some}; resize them")
    return np.concatenate(every)


def batches(
    path: pathlib.Path, names: Sequence[str] | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the columns of a file, some rows at a time.

    Args:
        path: The file.
        names: Columns that it must have, and the only ones that are read; None = all.

    Returns:
        Arrays by name: images uint8 [n, H, W, 1 or 3], lists of equal lengths
        [n, ...] of their numbers' type, and other values [n] as pandas has them.

    Raises:
        ValueError: one line with the file: it cannot be read, lacks a column, or the
            package pyarrow is missing.
    """

    def read(opened: Any) -> Iterator[dict[str, np.ndarray]]:
        held = opened.schema_arrow.names
        if missing := [one for one in names or () if one not in held]:
            raise ValueError(f"it has the columns {held}, no {missing[0]}")
        meta = opened.metadata
        num_bytes = [
            meta.row_group(j).total_byte_size for j in range(meta.num_row_groups)
        ]
        memory.check(sum(num_bytes), "its columns")
        is_new = True
        for batch in opened.iter_batches(batch_size=4096, columns=names):
            columns = {
                name: _values(name, column)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }
            if is_new and batch.num_rows:
                of_batch = sum(one.nbytes for one in columns.values())
                # Rows are in memory as batches, and then as one array.
                memory.check(2 * of_batch * meta.num_rows // batch.num_rows, "its rows")
                is_new = False
            yield columns

    yield from _read(path, read)


def _read(path: pathlib.Path, read: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """Yields what `read` does of an opened file; ValueErrors name the file."""
    try:
        import pyarrow  # an optional package
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package pyarrow: pip install -e '.[parquet]'"
        ) from error
    try:
        files.check(path, "a parquet file")
        with parquet.ParquetFile(path) as opened:
            yield from read(opened)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = files.reason(error)
        if isinstance(error, FileNotFoundError):
            reason = "there is no such file"
        if isinstance(error, pyarrow.ArrowException):
            reason += "; fetch it again"
        raise ValueError(f"{path} cannot be read: {reason}") from error


def _values(name: str, column: Any) -> np.ndarray:
    """The values of a column of pyarrow; ValueErrors name it."""
    from pyarrow import compute, types

    kind = column.type
    has_bytes = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    if has_bytes or types.is_binary(kind) or types.is_large_binary(kind):
        return _images(name, column.to_pylist())
    column, shape = getattr(column, "storage", column), [len(column)]
    of_lists = types.is_list, types.is_large_list, types.is_fixed_size_list
    while any(is_kind(column.type) for is_kind in of_lists):
        lengths = compute.list_value_length(column).unique().to_pylist()
        if len(lengths) > 1 or None in lengths:
            raise ValueError(f"the lists of {name} differ in length, or are missing")
        shape, column = [*shape, *lengths], column.flatten()
    kind = column.type
    if not shape[1:]:
        return column.to_pandas().to_numpy()
    if not (types.is_integer(kind) or types.is_floating(kind)) or column.null_count:
        raise ValueError(f"{name} has lists of {kind}, numbers are expected")
    return column.to_numpy(zero_copy_only=False).reshape(shape)


def _images(name: str, values: Sequence[bytes | Mapping[str, Any] | None]) -> Any:
    """Decodes images, bytes or objects with `bytes`: uint8 [n, H, W, 1 or 3]."""
    from PIL import Image  # takes a moment to import

    decoded = []
    for one in values:
        raw = one.get("bytes") if isinstance(one, Mapping) else one
        if not isinstance(raw, bytes):
            raise ValueError(f"an {name} has no bytes")
        try:
            opened = Image.open(io.BytesIO(raw), formats=images.FORMATS)
        except OSError as error:
            known = ", ".join(images.FORMATS)
            raise ValueError(f"an {name} is damaged, or none of {known}") from error
        with opened:
            decoded.append(images.pixels_of(opened)[None])
    runs = itertools.groupby(decoded, lambda one: one.shape)
    # One array for a run of equal shapes, which `_joined` compares with the others
    return _joined(name, [np.concatenate(list(run)) for _, run in runs] or [_NONE])


_NONE = np.zeros((0, 1, 1, 1), np.uint8)
