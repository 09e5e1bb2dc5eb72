"""Numbers the labels and the owners of a user's rows, whatever their type."""

import functools
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_CLASSES = 100_000
SHOWN = 8
# pandas's names for lists of Python objects of one kind
_OF_ONE_KIND = {"string", "bytes", "boolean", "integer", "floating"}
_OF_ONE_KIND |= {"mixed-integer-float"}


class Numbered(NamedTuple):
    """Values as numbers 0, 1, ... in the order of `np.unique`.

    Attributes:
        number: int32[N].
        names: The value behind each number, None if the values were these numbers.
        count: The number of different values.
    """

    number: np.ndarray
    names: tuple[str, ...] | None
    count: int


def classes(values: Any, num_rows: int, what: str, least: int = 2) -> Numbered:
    """Numbers the labels of rows.

    Args:
        values: Text, bools, integers or whole floats [N], as an array or a list.
        num_rows: N.
        what: The name of the values in errors.
        least: The least number of different labels.

    Raises:
        ValueError: one line: another shape or type, missing values, too few or too many
            different labels, or numbers that look like those of a regression.
    """
    array = _plain(values, num_rows, what, "labels")
    found, reason = _numbered(array), ""
    # Integers with gaps may be the numbers of persons with few rows each.
    share = {"f": 10, "i": 4, "u": 4}.get(array.dtype.kind, 0)
    if found.names and share and found.count > max(20, len(array) / share):
        different = f"it holds {found.count} different numbers in {len(array)} rows"
        reason = _regression(different)
    elif found.count > MAX_CLASSES:
        # Every class costs a row of the model's last layer.
        reason = f"holds {found.count} different labels, at most {MAX_CLASSES} are "
        reason += "possible"
    elif found.count < least:
        only = limited((found.names or ("0",))[0])
        reason = f"holds one label only, {only}; at least {least} classes are needed"
    if reason:
        raise ValueError(f"{what} {reason}")
    return found


def owners(values: Any, num_rows: int, what: str) -> Numbered:
    """Numbers the owners of rows, without the limits of `classes` on their number.

    Raises ValueError for another shape or type, or missing values.
    """
    return _numbered(_plain(values, num_rows, what, "owners"))


def found_in(values: Any, names: Sequence[str], num_rows: int, what: str) -> np.ndarray:
    """Returns each value's place in `names`, int64[N]; ValueError if it has none."""
    given = _numbered(_plain(values, num_rows, what, "labels"))
    mine = given.names or tuple(map(str, range(given.count)))
    place = {name: number for number, name in enumerate(names)}
    odd = [name for name in mine if name not in place]
    if odd:
        raise ValueError(
            f"{what} has the labels {listed(odd)}, the model's are {listed(names)}"
        )
    return np.array([place[name] for name in mine])[given.number]


def alike(names: Sequence[str] | None, what: str) -> str:
    """Describes names that differ in a way that is easily overlooked, or "".

    They differ only in case, white space or the form of a letter, or are two ways to
    write one number. `what` is such as `labels`.
    """
    groups: dict[Any, list[str]] = {}
    for name in names or ():
        groups.setdefault(_plainest(name), []).append(name)
    found = [name for group in groups.values() if len(group) > 1 for name in group]
    if not found:
        return ""
    # A letter and accent that are two characters are shown as two.
    is_usual = functools.partial(unicodedata.is_normalized, "NFC")
    shown = listed([name if is_usual(name) else ascii(name)[1:-1] for name in found])
    return f"{what} that look alike are different ones: {shown}; rename them if not"


def _plainest(name: str) -> Any:
    """Reduces a name to its number, or to its text without case and extra spaces."""
    text = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    for number in (int, float):  # float merges whole numbers above 2**53
        try:
            return number(text)
        except ValueError:
            pass
    return text


def listed(names: Sequence[str], most: int = SHOWN) -> str:
    """Joins the first names, with the number of further ones."""
    return joined([limited(name) for name in names[:most]], len(names))


def sized(sizes: Mapping[str, int]) -> str:
    """Joins the first names with their sizes, with the number of further ones."""
    texts = [f"{limited(name)} has {count}" for name, count in sizes.items()]
    return joined(texts[:SHOWN], len(texts))


def joined(texts: Sequence[str], count: int) -> str:
    """Joins the first of `count` texts, with the number of further ones."""
    more = count - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def limited(name: str) -> str:
    """Shortens a name to 30 characters, and quotes it if it is not a plain word."""
    text = name if len(name) <= 30 else f"{name[:27]}..."
    is_plain = text.isprintable() and text == text.strip() and "," not in text
    return text if is_plain and text else repr(text)


def _regression(reason: str) -> str:
    return (
        f"looks like the target of a regression ({reason}), and only classification is "
        "possible; give classes as text or as integers 0, 1, 2, ..., such as "
        "np.digitize(y, edges)"
    )


def _numbered(array: np.ndarray) -> Numbered:
    """Numbers an array from `_plain`."""
    values, number = np.unique(array, return_inverse=True)
    number = number.reshape(-1).astype(np.int32)
    kind, count = values.dtype.kind, len(values)
    if kind == "f":
        values = values.astype(np.int64)
    if kind in "iuf" and values[0] == 0 and int(values[-1]) == count - 1:
        return Numbered(number, None, count)
    return Numbered(number, tuple(map(str, values.tolist())), count)


def _plain(values: Any, num_rows: int, what: str, of: str) -> np.ndarray:
    """Converts values to bools, integers, floats or text [N]; refuses missing ones."""
    array = as_array(values, what)
    if array.shape != (num_rows,) or not num_rows:
        hint = f"; of a column give {what}.ravel(), of one-hot rows {what}.argmax(1)"
        if array.ndim != 2 or len(array) != num_rows:
            hint = ""
        raise ValueError(
            f"{what} must be {of} [{num_rows or 'N'}], got {array.dtype} "
            f"{list(array.shape)}{hint}"
        )
    if array.dtype.kind in "OT":
        array = array.astype(object)
        _check_missing(array, what, of)
        array = _of_objects(array, what)
    if array.dtype.kind == "S":
        # Bytes that are not UTF-8 become invalid text, which is refused below.
        array = np.char.decode(array, "utf-8", "surrogateescape")
    _check_missing(array, what, of)
    if (kind := array.dtype.kind) not in "biufUmM":
        names = sorted({type(value).__name__ for value in array})
        got = " and ".join(names[:4]) if kind == "O" else str(array.dtype)
        raise ValueError(
            f"{what} must be {of} of one type, text, bools or whole numbers, got {got}"
        )
    if kind == "f":
        # Above 2^53, floats do not hold every whole number.
        odd = array[(array != np.floor(array)) | (np.abs(array) > 2.0**53)]
        if len(odd):
            line = f"holds {odd[0]:.6g}; owners are text, bools or whole numbers"
            if of == "labels":
                line = _regression(f"it holds {odd[0]:.6g}")
            raise ValueError(f"{what} {line}")
    elif kind == "U":
        _check_text(np.unique(array).tolist(), what)
    elif kind == "M":
        return np.datetime_as_string(array, "auto")
    return array.astype(str) if kind == "m" else array


def several(values: Any, y: Any) -> str:
    """A phrase about arrays that are parts of the examples of `y`, "" for all else."""
    count = len(y) if hasattr(y, "__len__") else -1
    if not isinstance(values, (tuple, list)) or len(values) in (0, 1, count):
        return ""
    if not all(hasattr(one, "shape") for one in values):
        return ""
    shapes = [list(one.shape) for one in values]
    if min(map(len, shapes)) < 2 or {shape[0] for shape in shapes} != {count}:
        return ""
    return (
        f"{len(shapes)} arrays of {' and '.join(map(str, shapes))}, and an example is "
        "one array; join them, as by np.concatenate"
    )


def unmasked(values: Any, what: str) -> np.ndarray:
    """Converts values to an array; refuses (ValueError) masked or ragged ones."""
    if np.ma.isMaskedArray(values):
        count = int(np.ma.getmaskarray(values).sum())
        if count:
            raise ValueError(
                f"{what} is a masked array with {count} masked values; fill them, or "
                "drop their rows"
            )
        values = np.ma.getdata(values)
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(
            f"{what} must be one array, got ragged ones; give test rows from Python as "
            "test=(x, y), or join them with the train rows"
        ) from error


def as_array(values: Any, what: str) -> np.ndarray:
    """Converts values like `unmasked` (ValueError), but keeps a list's mixed types."""
    array = unmasked(values, what)
    if isinstance(values, (list, tuple)) and array.dtype.kind in "USiuf":
        # numpy converts a number beside a text to text, and True beside a number to 1.
        if array.dtype.kind in "US" or set(map(type, values)) > {bool}:
            return np.asarray(values, object)
    return array


def _of_objects(array: np.ndarray, what: str) -> np.ndarray:
    """Converts Python objects of one kind to bools, numbers or text, and no others."""
    from pandas.api import types  # takes long to import

    kind = types.infer_dtype(array, skipna=False)
    if kind in ("date", "datetime"):
        return np.array([value.isoformat() for value in array])
    if kind == "string":
        _check_text(set(array.tolist()), what)
    return np.array(array.tolist()) if kind in _OF_ONE_KIND else array


def _check_text(names: Iterable[str], what: str) -> None:
    """Refuses text that is not Unicode, or that numpy would shorten."""
    for name in names:
        if name.encode(errors="ignore").decode() != name or name.endswith("\0"):
            raise ValueError(
                f"{what} holds {ascii(name)[:40]}, which is not valid text; rename it"
            )


def _check_missing(array: np.ndarray, what: str, of: str) -> None:
    """Refuses values of which some are missing, infinite or empty."""
    kind = array.dtype.kind
    is_missing = np.zeros(len(array), bool)
    if kind == "O":
        import pandas  # takes long to import

        is_missing = pandas.isna(array)
    elif kind in "mM":
        is_missing = np.isnat(array)
    elif kind == "f":
        is_missing = ~np.isfinite(array)
    elif kind == "U":
        is_missing = np.char.strip(array) == ""
    if count := int(is_missing.sum()):
        raise ValueError(
            f"{what} has {count} missing {of} (nan, None, infinite or empty) in "
            f"{len(array)} rows; fill them, or drop these rows"
        )
