"""Data sets by owner: LEAF's JSON (https://leaf.cmu.edu), and FEMNIST in parquet files.

A JSON file of LEAF has `users`, `num_samples` and `user_data`, an object with the rows
`x` and the labels `y` of each user.
"""

import collections
import itertools
import json
import math
import pathlib
import string
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from data import arrays, dataset, files, labels, memory, parquet
from fedjax_pfl import json_text, options

CHARACTERS = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
WANTED = "all_data_*.json, train/*.json and test/*.json, or *.parquet"
_SIDE = 28  # of FEMNIST's images
_PIXELS = 64  # numbers of a row that may be those of an image
_COLUMNS = "image", "character", "writer_id"
_FORM = {"users?": [str], "num_samples?": [int], "user_data": {str: dict}}


class Rows(NamedTuple):
    """Some rows of one owner: x [N, ...] and labels y [N], and their file."""

    owner: str
    x: np.ndarray
    y: np.ndarray
    path: pathlib.Path


def find(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns LEAF's JSON files, or else parquet files, of a folder; [] if none."""
    forms = (
        ("train/*.json", "test/*.json"),
        ("all_data*.json",),
        ("all_data/*.json",),
        ("*.parquet",),
        ("train/*.parquet", "test/*.parquet"),
    )
    for folder in (root, root / "data"):
        for form in forms:
            if found := _seen(folder, *form):
                return found
    return []


def _seen(folder: pathlib.Path, *patterns: str) -> list[pathlib.Path]:
    """The files of these patterns in order, without those that a system hides."""
    found = (path for one in patterns for path in folder.glob(one))
    return sorted(path for path in found if not path.name.startswith("."))


def load(path: str, layout: str = "auto", least_classes: int = 2) -> dataset.Dataset:
    """Makes a data set of LEAF's JSON, a file or a folder of files.

    Flat rows are vectors, and with a layout of images they are square images, gray
    (nhw) or of three channels (nhwc, nchw). Nested rows are images; whole numbers from
    0 to 255 are their bytes.

    Raises:
        ValueError: a phrase: there is no such file, one cannot be read, or `x` is text.
    """
    root = files.given(path, "a file or folder")
    found = [one for one in find(root) if one.suffix == ".json"]
    if not found:
        found = _seen(root, "*.json") if root.is_dir() else [root]
    if not found or not found[0].exists():
        raise ValueError(f"there is no JSON of LEAF ({WANTED.rpartition(',')[0]})")
    every = [one for file in found for one in _of_json(file)]
    rows = [one for one in every if len(one.y)]
    if not rows:
        raise ValueError(f"{found[0]} and the others have no rows")
    shapes = {one.x.shape[1:]: labels.limited(one.owner) for one in rows}
    if len(shapes) > 1:
        (first, one), (second, other) = list(shapes.items())[:2]
        raise ValueError(
            f"rows of {one} are {list(first)} and of {other} {list(second)}; give all "
            "one shape"
        )
    x = np.concatenate([one.x for one in rows])
    y = np.concatenate(arrays.alike(*(one.y for one in rows)))
    client = _owners(rows)
    notes, side = (), math.isqrt(x.shape[1])
    if x.ndim == 2 and layout in ("nhw", "nhwc", "nchw"):
        x = arrays.squares(x, layout)
    elif x.ndim == 2 and side > 3 and side**2 == x.shape[1]:
        line = f"x {list(x.shape)} is taken as vectors; --layout=nhw if these are gray "
        notes = (f"{line}images of {side}x{side} pixels",)
    if x.ndim > 2 and x.dtype.kind in "iu" and x.min() >= 0 and x.max() < 256:
        x = x.astype(np.uint8)
    elif x.dtype.kind in "iu":
        x = x.astype(np.float64)
    given = {"layout": layout, "least_classes": least_classes, "where": ""}
    made = arrays.from_arrays(x, y, client, **given)
    more = _notes(root, found, every)
    return made._replace(notes=(*notes, *made.notes, *more))


def femnist(root: pathlib.Path, found: list[pathlib.Path]) -> dataset.Dataset:
    """Makes FEMNIST, uint8 [N, 28, 28, 1] and 62 classes, of what was found in `root`.

    Images are as in the files: dark ink on white. Owners are the writers. Raises
    ValueError with the file that is damaged or another one.
    """
    every: list[Rows] = []
    with files.named(f"{found[0].parent}"):
        parquet.check_shards(found)
    for path in found:
        is_json = path.suffix == ".json"
        for one in (_of_json if is_json else _of_parquet)(path):
            with files.named(f"{path}: {labels.limited(one.owner)}"):
                if len(one.y):
                    one = one._replace(x=_pixels(one.x), y=_characters(one.y))
            every.append(one)
    rows = [one for one in every if len(one.y)]
    if not rows:
        raise ValueError(f"{found[0]} and the others have no rows")
    client = _owners(rows)
    owned = labels.owners(client, len(client), _COLUMNS[-1])
    x = np.concatenate([one.x for one in rows])
    y = np.concatenate([one.y for one in rows])
    return dataset.Dataset(
        image=x,
        label=y,
        num_train=len(y),
        num_classes=len(CHARACTERS),
        client=owned.number,
        classes=CHARACTERS,
        owners=owned.names,
        notes=_notes(root, found, every),
    )


def _owners(rows: list[Rows]) -> np.ndarray:
    """The owner of each row."""
    # As objects, since numpy's texts lose a NUL at their end
    owner = np.array([one.owner for one in rows], object)
    return np.repeat(owner, [len(one.y) for one in rows])


def _notes(
    root: pathlib.Path, found: list[pathlib.Path], rows: list[Rows]
) -> tuple[str, ...]:
    """Lines about the files of `root` that were found, or not read, and their rows."""
    is_json = found[0].suffix == ".json"  # the hub has others beside parquet files
    out = _of_splits(root, found)
    beside = _seen(root, "*.json", "data/*.json") if is_json and root.is_dir() else []
    if unread := [str(one.relative_to(root)) for one in beside if one not in found]:
        out.append(f"files that are not read: {labels.listed(unread)}")
    return (*out, *(_of_owners(rows) if is_json else ()))


def _of_splits(root: pathlib.Path, found: list[pathlib.Path]) -> list[str]:
    """Lines about the files of train and test, and one of them without the other."""
    folders, out = {one.parent.resolve().name for one in found}, []
    splits = {parquet.split_of(one, one.parent) for one in found}
    both = {"train", "test"}
    if both <= folders or both <= splits:
        where = "folders" if both <= folders else "files"
        out.append(
            f"the rows in the {where} train and test are one table, which --test_split "
            "divides for each owner"
        )
    for name in ("train", "test"):
        # A user's folder may have such a name, but LEAF's files have it too.
        is_inside = found[0].parent not in (root, root.parent)
        is_named = is_inside or all(name in one.name for one in found)
        if folders == {name} and is_named:
            (other,) = {"train", "test"} - {name}
            more = f"there is no file of LEAF in a folder {other} beside it"
            if not is_inside:
                more = "give the folder that holds train and test to have the others "
                more += "too"
            out.append(f"all rows are of a folder {name}; {more}")
    return out


def _of_owners(rows: list[Rows]) -> list[str]:
    """Lines about owners without rows, and in several files where LEAF has one."""
    held = collections.defaultdict(set)
    for one in rows:
        if len(one.y):
            held[one.owner, one.path.parent].add(one.path.name)
    several = {key[0]: names for key, names in held.items() if len(names) > 1}
    having = {owner for owner, _ in held}
    empty = list(dict.fromkeys(one.owner for one in rows if one.owner not in having))
    out = []
    if empty:
        some = f"{len(empty)} of {len(empty) + len(having)} users have no rows and are "
        out = [f"{some}left out: {labels.listed(empty)}"]
    if not (count := len(several)):
        return out
    owner, names = next(iter(several.items()))
    return [
        *out,
        f"rows of {count} owner{'s' * (count > 1)} are in several files, such as those "
        f"of {labels.limited(owner)} in {labels.listed(sorted(names))}; are they the "
        "same?",
    ]


class _UnfitError(ValueError):
    """Of a user's rows, in a file that is not damaged."""


def _of_json(path: pathlib.Path) -> Iterator[Rows]:
    """Yields the rows of each user of a file; ValueErrors name it."""
    try:
        files.check(path, "a file of JSON")
        # The text itself, and again as Python's
        memory.check(2 * path.stat().st_size, "the texts")
        found = json.loads(path.read_bytes(), object_pairs_hook=_compact)
        json_text.check(found, _FORM)
        users, held = found.get("users", ()), found["user_data"]
        counts = (users and found.get("num_samples")) or [None] * len(users)
        if len(counts) != len(users) or len(set(users)) != len(users):
            raise ValueError(
                f"users names {len(users)}, {len(set(users))} of them different, and "
                f"num_samples has {len(counts)}; they must agree"
            )
        if users and (more := sorted(held.keys() - set(users))):
            raise ValueError(f"user_data has {labels.listed(more)}, not among users")
        sizes = dict(zip(users, counts, strict=True))
        gone = [one for one in users if one not in held and sizes.get(one, 1)]
        if gone:
            raise ValueError(
                f"user_data has nothing of {labels.listed(gone)}, who are among users"
            )
        for owner, own in held.items():
            try:
                yield Rows(owner, *_rows(own, sizes.get(owner)), path)
            except ValueError as error:
                raise _UnfitError(
                    f"{path}: {labels.limited(owner)}: {error}"
                ) from error
    except _UnfitError:
        raise
    except RecursionError as error:
        raise ValueError(f"{path} cannot be read: it is not JSON") from error
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or options.reason(error)
        raise ValueError(f"{path} cannot be read: {reason}; fetch it again") from error


def _compact(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes arrays of a user's rows at once, as numbers in lists take much memory."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{labels.limited(twice)} is there twice in one object")
    if not (isinstance(found.get("x"), list) and isinstance(found.get("y"), list)):
        return found
    try:
        x, y = np.asarray(found["x"]), labels.as_array(found["y"], "y")
    except ValueError as error:
        raise ValueError("rows differ in their shape") from error
    # Pixels; features may differ in digits that float32 does not have, which is said.
    is_wide = x.dtype.kind == "f" and x.ndim > 1 and x[:1].size >= _PIXELS
    if is_wide and x.min() >= 0 and x.max() <= 1:
        x = x.astype(np.float32)
    return {**found, "x": x, "y": y}


def _rows(held: Any, size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns a user's x and y, whose number must be `size` if that is known."""
    x, y = held.get("x"), held.get("y")
    if isinstance(x, np.ndarray) and y.ndim != 1:
        line = f"y has the shape {list(y.shape)}, expected [N]"
        raise ValueError(f"{line}; of one-hot labels give the numbers (argmax)")
    if not isinstance(x, np.ndarray) or len(x) != len(y):
        raise ValueError("lists x and y of one length are expected")
    if len(x) and x.dtype.kind not in "iuf":
        what = {"b": "bools", "O": "nulls or other objects"}.get(x.dtype.kind, "texts")
        raise ValueError(f"x must be numbers, and has {what}")
    if len(x) and x.ndim < 2:
        raise ValueError("x must have a list for each row")
    if size is not None and size != len(y):
        raise ValueError(f"num_samples says {size}, there are {len(y)} rows")
    return x, y


def _of_parquet(path: pathlib.Path) -> Iterator[Rows]:
    """Yields runs of rows of one writer; ValueErrors name the file."""
    names = parquet.class_names(path, _COLUMNS[1])
    if names and names not in ([*CHARACTERS], list(map(str, range(len(CHARACTERS))))):
        pairs = enumerate(itertools.zip_longest(names, CHARACTERS, fillvalue="nothing"))
        place, (name, wanted) = next(one for one in pairs if one[1][0] != one[1][1])
        raise ValueError(
            f"{path}: class {place} of {_COLUMNS[1]} is called {labels.limited(name)}, "
            f"{wanted} is expected (0 to 9, A to Z, a to z)"
        )
    for batch in parquet.batches(path, _COLUMNS):
        image, label, writer = (batch[one] for one in _COLUMNS)
        if not len(writer):
            continue
        with files.named(f"{path}"):
            if any(one is None or one != one for one in writer):
                raise ValueError("a row has no writer_id")
            if image.shape[1:] != (_SIDE, _SIDE, 1):
                raise ValueError(f"gray images of {_SIDE}x{_SIDE} pixels are expected")
        owner = np.array(list(map(str, writer)))
        begin = np.flatnonzero(owner[1:] != owner[:-1]) + 1
        parts = (np.split(one, begin) for one in (image, np.array([*label])))
        for name, x, y in zip(owner[np.r_[0, begin]], *parts, strict=True):
            yield Rows(str(name), x, y, path)


def _pixels(x: np.ndarray) -> np.ndarray:
    """Returns uint8 [N, 28, 28, 1] of bytes, or of f32 [N, 784] from 0 to 1."""
    if x[0].size != _SIDE**2:
        raise ValueError(f"rows of {_SIDE**2} pixels are expected, got {x[0].size}")
    if x.dtype != np.uint8:
        if not (x.min() >= 0 and x.max() <= 1):
            raise ValueError("pixels from 0 to 1 are expected")
        x = np.rint(255 * x).astype(np.uint8)
    return x.reshape(-1, _SIDE, _SIDE, 1)


def _characters(y: np.ndarray) -> np.ndarray:
    """Returns classes int32[N] of numbers 0 to 61, or of the characters themselves."""
    if all(isinstance(one, str) for one in y.tolist()):
        if odd := sorted({*y.tolist()}.difference(CHARACTERS)):
            raise ValueError(f"no characters: {labels.listed(odd)}")
        return np.array([CHARACTERS.index(one) for one in y.tolist()], np.int32)
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= len(CHARACTERS):
        raise ValueError("labels 0 to 61 are expected")
    return y.astype(np.int32)
