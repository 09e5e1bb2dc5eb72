"""Numbers the labels and the owners of a user's rows, whatever their type."""

import datetime
import functools
import numbers
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_CLASSES = 100_000
SHOWN = 8
# Floats beyond are not all whole numbers.
_WHOLE = 2.0**53


class Numbered(NamedTuple):
    """Values as numbers 0, 1, ... in the order of `np.unique`.

    Attributes:
        number: int32[N].
        names: What each number stands for, None if the values were these numbers.
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
        least: The number of different labels that are needed.

    Raises:
        ValueError: one line: they are of another shape or type, some are missing, there
            are too few or too many different ones, or they look like the numbers of a
            regression.
    """
    array = _plain(values, num_rows, what, "labels")
    if len(odd := _not_whole(array)):
        raise ValueError(_regression(what, f"it holds {odd[0]:.6g}"))
    found = _numbered(array)
    # Integers with gaps may be the numbers of persons with few rows each.
    share = {"f": 10, "i": 4, "u": 4}.get(array.dtype.kind, 0)
    if found.names and share and found.count > max(20, len(array) / share):
        different = f"it holds {found.count} different numbers in {len(array)} rows"
        raise ValueError(_regression(what, different))
    if found.count > MAX_CLASSES:
        # Every class costs a row of the model's last layer.
        raise ValueError(
            f"{what} holds {found.count} different labels, at most {MAX_CLASSES} are "
            "possible"
        )
    if found.count < least:
        only = (found.names or ("0",))[0]
        raise ValueError(
            f"{what} holds one label only, {limited(only)}; at least {least} classes "
            "are needed"
        )
    return found


def owners(values: Any, num_rows: int, what: str) -> Numbered:
    """Numbers the owners of rows, see `classes`.

    Raises:
        ValueError: one line: they are of another shape or type, or some are missing.
    """
    array = _plain(values, num_rows, what, "owners")
    if len(odd := _not_whole(array)):
        raise ValueError(
            f"{what} holds {odd[0]:.6g}; owners are text, bools or whole numbers"
        )
    return _numbered(array)


def found_in(values: Any, names: Sequence[str], num_rows: int, what: str) -> np.ndarray:
    """int64[N]: the place among `names` of each of the values, which are as before.

    Raises:
        ValueError: one line: they are of another shape, or one is not among the names.
    """
    array = _plain(values, num_rows, what, "labels")
    if len(odd := _not_whole(array)):
        raise ValueError(f"{what} holds {odd[0]:.6g}, which is not a class")
    given = _numbered(array)
    mine = given.names or tuple(map(str, range(given.count)))
    place = {name: number for number, name in enumerate(names)}
    odd = [name for name in mine if name not in place]
    if odd:
        raise ValueError(
            f"{what} has the labels {listed(odd)}, the model's are {listed(names)}"
        )
    return np.array([place[name] for name in mine])[given.number]


def alike(names: Sequence[str] | None, what: str) -> str:
    """A line about names that differ in a way that is easily overlooked, or "".

    These differ in case, white space or the form of a letter only, or are two ways to
    write one number. `what` is such as `labels`.
    """
    groups: dict[Any, list[str]] = {}
    for name in names or ():
        groups.setdefault(_plainest(name), []).append(name)
    found = [name for group in groups.values() if len(group) > 1 for name in group]
    if not found:
        return ""
    # A letter and its accent that are two characters are shown as such.
    is_usual = functools.partial(unicodedata.is_normalized, "NFC")
    shown = listed([name if is_usual(name) else ascii(name)[1:-1] for name in found])
    return f"{what} that look alike are different ones: {shown}; rename them if not"


def _plainest(name: str) -> Any:
    """What a reader may take a name for: a number, or text without case and spaces."""
    text = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    try:
        return float(text)
    except ValueError:
        return text


def listed(names: Sequence[str], most: int = SHOWN) -> str:
    """The first names in a line, and how many more there are."""
    texts = [limited(name) for name in names[:most]]
    more = len(names) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def sized(sizes: Mapping[str, int]) -> str:
    """The first names in a line with what each has, and how many more there are."""
    texts = [f"{limited(name)} has {count}" for name, count in sizes.items()]
    more = len(texts) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def limited(name: str) -> str:
    """A name in at most 30 characters, quoted where it is not a plain word."""
    text = name if len(name) <= 30 else f"{name[:27]}..."
    is_plain = text.isprintable() and text == text.strip() and "," not in text
    return text if is_plain and text else repr(text)


def _not_whole(array: np.ndarray) -> np.ndarray:
    """The floats of an array that are not whole numbers."""
    if array.dtype.kind != "f":
        return array[:0]
    return array[(array != np.floor(array)) | (np.abs(array) > _WHOLE)]


def _regression(what: str, reason: str) -> str:
    return (
        f"{what} looks like the target of a regression ({reason}), and only "
        "classification is possible; give classes as text or as integers 0, 1, 2, ..., "
        "such as np.digitize(y, edges)"
    )


def _numbered(array: np.ndarray) -> Numbered:
    """Numbers an array that `_plain` has returned."""
    values, number = np.unique(array, return_inverse=True)
    number = number.reshape(-1).astype(np.int32)
    kind, count = values.dtype.kind, len(values)
    if kind == "f":
        values = values.astype(np.int64)
    if kind in "iuf" and values[0] == 0 and int(values[-1]) == count - 1:
        return Numbered(number, None, count)
    return Numbered(number, tuple(map(str, values.tolist())), count)


def _plain(values: Any, num_rows: int, what: str, of: str) -> np.ndarray:
    """Values as bools, integers, floats or text [N] without missing ones.

    Raises:
        ValueError: one line.
    """
    array = as_array(values, what)
    if array.shape != (num_rows,):
        hint = ""
        if array.ndim == 2 and len(array) == num_rows:
            hint = (
                f"; of a column give {what}.ravel(), of one-hot rows {what}.argmax(1)"
            )
        raise ValueError(
            f"{what} must be {of} [{num_rows}], got {array.dtype} {list(array.shape)}"
            f"{hint}"
        )
    if not num_rows:
        raise ValueError(f"{what} holds no {of}")
    if array.dtype.kind in "OT":
        array = _of_objects(array.astype(object), what, of)
    kind = array.dtype.kind
    if kind == "S":
        try:
            array = np.char.decode(array, "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} holds bytes that are not UTF-8") from error
    if kind in "mM":
        _refuse(np.isnat(array), what, of)
        array = (
            np.datetime_as_string(array, "auto") if kind == "M" else array.astype(str)
        )
    elif kind == "f":
        _refuse(np.isnan(array), what, of)
        _refuse(np.isinf(array), what, of, "infinite", "replace them")
    elif kind in "US":
        _refuse(np.char.strip(array) == "", what, of)
        _check_text(np.unique(array).tolist(), what)
    elif kind not in "biu":
        raise ValueError(
            f"{what} must be {of} as text, bools or whole numbers, got {array.dtype}"
        )
    return array


def unmasked(values: Any, what: str) -> np.ndarray:
    """The values as an array.

    Raises:
        ValueError: one line: some of them are masked, or they are ragged.
    """
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
    """The values as an array, in which objects of a list stay what they are.

    Raises:
        ValueError: one line: some of them are masked, or they are ragged.
    """
    array = unmasked(values, what)
    if isinstance(values, (list, tuple)) and array.dtype.kind in "USiuf":
        kinds = set(map(type, values))
        # numpy makes one text of a text and a number side by side, and 1 of True.
        if array.dtype.kind in "US" or kinds > {bool}:
            array = np.asarray(values, object)
    return array


def _of_objects(array: np.ndarray, what: str, of: str) -> np.ndarray:
    """An array of Python objects of one kind as bools, numbers or text."""
    import pandas  # takes long to import

    _refuse(pandas.isna(array), what, of)
    kinds = {type(value) for value in array}

    def are(*wanted: type) -> bool:
        return all(issubclass(kind, wanted) for kind in kinds)

    if are(str):
        _check_text(set(array.tolist()), what)
        return array.astype(str)
    if are(bytes):
        return array.astype(bytes)
    if are(bool, np.bool_):
        return array.astype(bool)
    if are(datetime.date):  # and datetimes, among them those of pandas
        return np.array([value.isoformat() for value in array])
    if are(numbers.Real) and not any(issubclass(kind, bool) for kind in kinds):
        plain = np.array(array.tolist())
        if plain.dtype.kind in "iuf":
            return plain
    names = " and ".join(sorted(kind.__name__ for kind in kinds)[:4])
    raise ValueError(
        f"{what} must be {of} of one type, text, bools or whole numbers, got {names}"
    )


def _check_text(names: Iterable[str], what: str) -> None:
    """Refuses text that is not Unicode, or that numpy would shorten."""
    for name in names:
        if name.encode(errors="ignore").decode() != name or name.endswith("\0"):
            raise ValueError(
                f"{what} holds {ascii(name)[:40]}, which is not valid text; rename it"
            )


def _refuse(
    is_odd: np.ndarray,
    what: str,
    of: str,
    kind: str = "missing",
    cure: str = "fill them",
) -> None:
    """Refuses values some of which are missing, or are of another `kind`."""
    count = int(is_odd.sum())
    if count:
        reason = " (nan, None or empty)" if kind == "missing" else ""
        raise ValueError(
            f"{what} has {count} {kind} {of}{reason} in {len(is_odd)} rows; {cure}, or "
            "drop these rows"
        )
