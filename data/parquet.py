"""Reads parquet files, of tables or with images, as those of Hugging Face's hub.

A file of the hub belongs to the split that its name begins with, such as
`train-00000-of-00001.parquet`, or that its folder is called.
"""

from __future__ import annotations

import io
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from data import files, frames, images, labels, memory
from data.files import SPLITS

# Columns of the images of data sets on the hub
IMAGES = ("image", "img")
_NAME = re.compile(rf"({'|'.join(SPLITS)})([-_.]?\d.*)?", re.IGNORECASE)
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)\.parquet")
# What pandas calls a saved index that has no name
_INDEX = re.compile(r"__index_level_\d+__|Unnamed: .*")


class Found(NamedTuple):
    """The parquet files of a folder.

    Attributes:
        parts: The files of each split, or of "" if there is none to train on.
        unread: Names of files beside these.
        joined: Names of files in "" that belong to a split, which is not train.
    """

    parts: dict[str, list[pathlib.Path]]
    unread: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()


class Columns(NamedTuple):
    """The columns of a user's files by name, or those of each split in `SPLITS`.

    `are_images` says that the examples are decoded images, [H, W, C], and `x` the name
    of their column, "" of a table. `notes` are lines about what was read.
    """

    values: dict[str, Any]
    x: str
    are_images: bool
    notes: tuple[str, ...]


def find(folder: pathlib.Path) -> Found:
    """Finds the parquet files of a folder, without any if it has none.

    Raises ValueError, whose message is a phrase, if files of a split are missing, or
    are there twice.
    """
    there = sorted(folder.glob("*.parquet")) + sorted(folder.glob("*/*.parquet"))
    there = [path for path in there if not path.name.startswith(".")]
    splits = {path: split_of(path, folder) for path in there}
    names = {path: str(path.relative_to(folder)) for path in there}
    if "train" not in splits.values():
        mine = [path for path in there if path.parent == folder or splits[path]]
        check_shards(mine)
        stems = [path.stem for path in mine]
        if any("train" in one.lower() for one in stems) and files.are_splits(stems):
            raise ValueError(
                f"its files look like splits ({labels.listed(stems)}); call them "
                "train.parquet and test.parquet, or give one of them"
            )
        unread = tuple(names[path] for path in there if path not in mine)
        joined = tuple(names[path] for path in mine if splits[path])
        return Found({"": mine}, unread, joined)
    parts = {
        split: [path for path in there if splits[path] == split]
        for split in SPLITS
        if split in splits.values()
    }
    for split, paths in parts.items():
        check_shards(paths)
        if len({path.parent for path in paths}) > 1:
            raise ValueError(
                f"{paths[0].name} and the folder {paths[-1].parent.name} are both of "
                f"{split}; keep one of them"
            )
    return Found(parts, tuple(names[path] for path in there if not splits[path]))


def split_of(path: pathlib.Path, folder: pathlib.Path) -> str:
    """The split of a file in a folder or in one below it, "" if its name tells none."""
    if path.parent != folder:
        name = path.parent.name.lower()
        return name if name in SPLITS else ""
    match = _NAME.fullmatch(path.stem)
    return match[1].lower() if match else ""


def check_shards(paths: Sequence[pathlib.Path]) -> None:
    """Refuses (ValueError) files `...-00000-of-00003` of which some are missing."""
    held: dict[str, dict[int, set[int]]] = {}
    for path in paths:
        if match := _SHARD.fullmatch(path.name):
            counts = held.setdefault(f"{path.parent.name}/{match[1]}", {})
            counts.setdefault(int(match[3]), set()).add(int(match[2]))
    for name, counts in held.items():
        if len(counts) > 1:
            several = " and ".join(f"{count} files" for count in sorted(counts))
            raise ValueError(f"{name}-... is there in {several}; keep those of one")
        ((count, numbers),) = counts.items()
        if missing := sorted({*range(count)} - numbers):
            raise ValueError(
                f"{name}-{missing[0]:05d}-of-{count:05d} is missing; put it there"
            )


def opened(path: str, label: str = "", owner: str = "") -> Columns:
    """Reads a user's file, or the files of a folder.

    `label` and `owner` are names of columns, "" = the usual ones. Of several columns of
    lists or images, that of the examples is read alone where it is known.

    Raises:
        ValueError: a phrase: there is no such file, one cannot be read, or two differ
            in their columns.
    """
    if not path:
        raise ValueError("give the path of a file or a folder")
    root = files.given(path, "a parquet file or a folder of some")
    found = find(root) if root.is_dir() else Found({"": [root]})
    if not any(found.parts.values()):
        found = _below(root)
    notes = []
    if found.unread:
        where = "in other folders" if "" in found.parts else "beside train"
        notes.append(f"files {where} that are not read: {labels.listed(found.unread)}")
    if found.joined:
        notes.append(
            "there is no file of train, so that all are one table, also "
            + labels.listed(found.joined)
        )
    first = next(iter(found.parts.values()))[0]
    chosen = _chosen(first, {label, owner, *frames.LABELS, *frames.OWNERS})
    parts = {
        name: _columns(paths, chosen.names, chosen.texts)
        for name, paths in found.parts.items()
    }
    if (
        len({one[chosen.x].shape[-1] for one in parts.values() if chosen.are_images})
        > 1
    ):
        for one in parts.values():
            wide = one[chosen.x]
            one[chosen.x] = np.broadcast_to(wide, (*wide.shape[:-1], 3))
    given = parts.get("", parts)
    return Columns(given, chosen.x, chosen.are_images, (*notes, *chosen.notes))


def _below(root: pathlib.Path) -> Found:
    """The files of the one folder in `root` that has some, as a repository's `data`."""
    inside = sorted(one for one in root.iterdir() if one.is_dir())
    below = [one for one in inside if any(find(one).parts.values())]
    if len(below) != 1:
        names = labels.listed([one.name for one in below])
        reason = f"these are in its folders {names}, of which give one"
        raise ValueError(
            f"it holds no parquet files; {reason if below else 'give their folder'}"
        )
    return find(below[0])


class _Chosen(NamedTuple):
    """The columns that are read: their names, and those whose bytes are texts."""

    names: list[str]
    texts: frozenset[str]
    x: str
    are_images: bool
    notes: tuple[str, ...]


def _chosen(path: pathlib.Path, named: Collection[str]) -> _Chosen:
    """Chooses the columns of a user's files by the types in the first one.

    `named` are labels and owners. A saved index is left out.
    """
    schema = _schema(path)
    index = [
        name
        for name in (schema.pandas_metadata or {}).get("index_columns", ())
        if isinstance(name, str) and name in schema.names
    ]
    kept = [name for name in schema.names if name not in index]
    with files.named(f"{path}"):
        frames.check_names([_INDEX.sub("", name) for name in kept])
    kinds = {name: _kind(schema.field(name).type) for name in kept}
    texts = {name for name in named & kinds.keys() if kinds[name] == "bytes"}
    wide = [name for name, kind in kinds.items() if kind and name not in texts]
    likely = (
        [name for name in wide if name == "x"],
        [name for name in wide if kinds[name] == "image"],
        [name for name in wide if name in IMAGES],
        wide,
    )
    known = next((names[0] for names in likely if len(names) == 1), "")
    left = [name for name in wide if known and name != known]
    lines = []
    if shown := [name for name in index if not _INDEX.fullmatch(name)]:
        lines.append(f"the index {labels.listed(shown)} of the table is not used")
    if left:
        lines.append(
            f"columns of lists or bytes that are not used: {labels.listed(left)}"
        )
    are_images = kinds.get(known) in ("image", "bytes")
    names = [name for name in kept if name not in left]
    return _Chosen(names, frozenset(texts), known, are_images, tuple(lines))


def official(
    folder: pathlib.Path, label: str, is_of_digits: bool
) -> dict[str, np.ndarray] | None:
    """Reads a data set that the hub has with train and test files of images.

    Args:
        folder: The folder of the files.
        label: The column of the labels.
        is_of_digits: Whether its classes are called 0 to 9, if the files name them.

    Returns:
        (Images uint8 [N, H, W, C] and integers [N], of the train and of the test split,
        by names for errors), or None if these files are not there.

    Raises:
        ValueError: one line with the file: it is damaged, or another one.
    """
    with files.named(f"{folder}"):
        parts = find(folder).parts
    if not {"train", "test"} <= parts.keys():
        return None
    out = {}
    for paths in (parts["train"], parts["test"]):
        first, schema = paths[0], _schema(paths[0])
        image = next((name for name in IMAGES if name in schema.names), IMAGES[0])
        if missing := [one for one in (image, label) if one not in schema.names]:
            raise ValueError(
                f"{first} has the columns {labels.listed(schema.names)}, and none is "
                f"called {missing[0]}; give the folder of other files, or "
                f"parquet:{first.parent} with --label"
            )
        classes = _class_names(schema, label)
        if classes and all(map(str.isdigit, classes)) != is_of_digits:
            raise ValueError(
                f"{first} is of another data set, whose classes are called "
                f"{labels.listed(classes)}; give the folder of other files"
            )
        columns = _columns(paths, [image, label])
        out[f"{first}: {image}"] = columns[image]
        out[f"{first}: {label}"] = columns[label]
    return out


def class_names(path: pathlib.Path, label: str) -> list[str]:
    """The names of a label's classes, as the hub writes them, [] if there are none."""
    return _class_names(_schema(path), label)


def _class_names(schema: Any, label: str) -> list[str]:
    try:
        about = json.loads((schema.metadata or {})[b"huggingface"])
        return list(map(str, about["info"]["features"][label]["names"]))
    except (KeyError, TypeError, ValueError):
        return []


def _schema(path: pathlib.Path) -> Any:
    return list(_read(path, lambda opened: iter([opened.schema_arrow])))[0]


def _columns(
    paths: Sequence[pathlib.Path],
    names: Sequence[str],
    texts: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Joins columns of files, which must have the same ones, but for what is left."""
    first = _schema(paths[0]).names
    columns: dict[str, list[np.ndarray]] = {}
    for path in paths:
        if sorted(_schema(path).names) != sorted(first):
            raise ValueError(
                f"{path} has the columns {labels.listed(_schema(path).names)} and "
                f"{paths[0]} {labels.listed(first)}; give files of one kind"
            )
        for batch in batches(path, names, texts):
            for name, values in batch.items():
                columns.setdefault(name, []).append(values)
    if not columns:
        raise ValueError(f"{paths[0]} has no rows")
    with files.named(f"{paths[0]} and the others" if paths[1:] else f"{paths[0]}"):
        return {name: _joined(name, every) for name, every in columns.items()}


def _joined(name: str, every: list[np.ndarray]) -> np.ndarray:
    """Joins the batches of a column, of which gray images become RGB beside others."""
    every = [one for one in every if len(one)] or every[:1]
    # One that is missing makes floats of a column of integers, and objects of bools.
    kinds = {one.dtype.kind for one in every}
    may_lack = all(one.ndim == 1 for one in every) and (
        kinds <= {*"iuf"} or kinds == {*"bO"}
    )
    if len({one.dtype for one in every}) > 1 and not may_lack:
        some = " and ".join(sorted({str(one.dtype) for one in every}))
        raise ValueError(f"{name} is of {some}; give files of one kind")
    shapes = {one.shape[1:] for one in every}
    channels = {shape[2:] for shape in shapes}
    if channels == {(1,), (3,)} and len({shape[:2] for shape in shapes}) == 1:
        every = [np.broadcast_to(one, (*one.shape[:3], 3)) for one in every]
    elif len(shapes) > 1:
        some = " and ".join(str(list(one)) for one in sorted(shapes)[:2])
        raise ValueError(f"rows of {name} differ in shape, such as {some}; resize them")
    return np.concatenate(every)


def batches(
    path: pathlib.Path, names: Sequence[str], texts: Collection[str] = ()
) -> Iterator[dict[str, np.ndarray]]:
    """Yields columns of a file, some rows at a time.

    Args:
        path: The file.
        names: Columns that it must have, and the only ones that are read.
        texts: Those of them whose bytes are texts and no images.

    Returns:
        Arrays by name: images uint8 [n, H, W, 1 or 3], lists of equal lengths
        [n, ...] of their numbers' type, and other values [n] as pandas has them.

    Raises:
        ValueError: one line with the file: it cannot be read, lacks a column, or the
            package pyarrow is missing.
    """

    def read(opened: Any) -> Iterator[dict[str, np.ndarray]]:
        held, meta = opened.schema_arrow.names, opened.metadata
        if missing := [one for one in names if one not in held]:
            raise ValueError(f"it has the columns {held}, no {missing[0]}")
        sizes = [meta.row_group(j).total_byte_size for j in range(meta.num_row_groups)]
        memory.check(sum(sizes), "its columns")
        for batch in opened.iter_batches(batch_size=1024, columns=[*names]):
            yield {
                name: _values(name, column, meta.num_rows, name in texts)
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }

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
        if isinstance(error, pyarrow.ArrowException):
            reason += "; fetch it again"
        raise ValueError(f"{path} cannot be read: {reason}") from error


def _kind(kind: Any) -> str:
    """What a type of pyarrow holds: `image`, `bytes`, `list`, or "" = one value."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    kind = getattr(kind, "storage_type", kind)
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return "image"
    of_bytes = ("is_binary", "is_large_binary", "is_binary_view")
    if any(getattr(types, name, bool)(kind) for name in of_bytes):
        return "bytes"
    return "list" if _is_list(kind) or types.is_struct(kind) else ""


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    of_lists = types.is_list, types.is_large_list, types.is_fixed_size_list
    return any(is_kind(kind) for is_kind in of_lists)


def _values(name: str, column: Any, num_rows: int, is_text: bool) -> np.ndarray:
    """The values of a column of a file with `num_rows`; ValueErrors name it."""
    from pyarrow import compute, types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = _kind(column.type)
    if kind == "bytes" and is_text:
        return np.array([one and one.decode() for one in column.to_pylist()], object)
    if kind in ("image", "bytes"):
        return _images(name, column.to_pylist(), num_rows)
    if not kind:
        return column.to_pandas().to_numpy()
    if hasattr(column, "to_numpy_ndarray"):  # tensors, which have a shape
        return column.to_numpy_ndarray()
    column, shape = getattr(column, "storage", column), [len(column)]
    while _is_list(column.type):
        lengths = compute.list_value_length(column).unique().to_pylist()
        if len(lengths) > 1 or None in lengths:
            raise ValueError(f"the lists of {name} differ in length, or are missing")
        shape, column = [*shape, *lengths], column.flatten()
    is_number = types.is_integer(column.type) or types.is_floating(column.type)
    if column.null_count:
        raise ValueError(f"{name} has lists in which values are missing")
    if not is_number:
        raise ValueError(f"{name} has lists of {column.type}, numbers are expected")
    return column.to_numpy(zero_copy_only=False).reshape(shape)


def _images(
    name: str, values: Sequence[bytes | Mapping[str, Any] | None], num_rows: int
) -> np.ndarray:
    """Decodes images, bytes or objects with `bytes`: uint8 [n, H, W, 1 or 3].

    Their sizes are checked before any pixels are read, for all rows of the file.
    """
    raws = [one.get("bytes") if isinstance(one, Mapping) else one for one in values]
    with files.named(f"an {name}"):
        if not all(isinstance(raw, bytes) for raw in raws):
            raise ValueError("it has no bytes")
        sizes = {images.read(io.BytesIO(raw), lambda image: image.size) for raw in raws}
        for width, height in sizes:
            images.check_size(num_rows, width, height)
        decoded = [images.read(io.BytesIO(raw), images.pixels_of)[None] for raw in raws]
    if not decoded:
        return np.zeros((0, 1, 1, 1), np.uint8)
    # One array for a run of equal shapes, which are compared with the others
    runs = itertools.groupby(decoded, lambda one: one.shape)
    return _joined(name, [np.concatenate(list(run)) for _, run in runs])
