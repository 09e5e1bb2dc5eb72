"""Objects of other libraries as arrays, columns by name and tables, by their methods.

Only pandas is imported, and only for tables.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data import images, labels

if TYPE_CHECKING:
    import pandas


class Rows(NamedTuple):
    """Rows of a user's object: `arrays` (x, y) or (x, y, client), or else a `frame`.

    `has_columns` says whether label and owner are columns that have names. `notes` are
    lines about how the object was taken. `split` is the name of a column beside the
    arrays and the part of each row in it, if there is one, and `is_of_whole` says that
    the rows are a part of `dataset=`.
    """

    arrays: tuple[Any, ...] | None
    frame: pandas.DataFrame | None = None
    has_columns: bool = False
    notes: tuple[str, ...] = ()
    split: tuple[str, np.ndarray] | None = None
    is_of_whole: bool = False


def as_columns(given: Any) -> Any:
    """Returns a pandas frame or columns by name, None if an object has none."""
    if hasattr(given, "collect_schema") and hasattr(given, "collect"):
        given = given.collect()  # a lazy frame of polars
    if is_hugging_face(given):
        # Hugging Face; its numpy format rounds floats, makes int64 of bytes, and pixels
        # of images without a palette.
        as_is, fast = given.with_format(None), given.with_format("numpy")
        kinds, out = getattr(given, "features", None) or {}, {}
        for name, value in (as_is[0] if len(as_is) else {}).items():
            is_array = np.ndim(plain(value)) and not is_image(value)
            out[name] = (fast if is_array else as_is)[name][:]
            # Rows that differ in shape are objects, which are refused later.
            is_whole = is_array and out[name].dtype.kind == "i"
            if is_whole and _type_of(kinds.get(name)) == "uint8":
                out[name] = out[name].astype(np.uint8)
        return out
    if hasattr(given, "get_columns") and hasattr(given, "to_dict"):  # polars
        return {one.name: one.to_numpy() for one in given.get_columns()}
    if hasattr(given, "to_pandas") and hasattr(given, "column_names"):
        return given.to_pandas()  # a table of pyarrow
    return given if isinstance(given, Mapping) or is_frame(given) else None


def _type_of(feature: Any) -> str:
    """The type of the numbers in a column of Hugging Face, "" if it is not known."""
    while isinstance(feature, list) or hasattr(feature, "feature"):
        feature = feature[0] if isinstance(feature, list) else feature.feature
    return getattr(feature, "dtype", "")


def with_labels(
    given: Any, others: Sequence[Any], where: str
) -> pandas.DataFrame | None:
    """Joins columns with labels and owners, as `y` and `client`, into a table.

    Returns None if these do not fit, or if the columns are the bytes of images. Raises
    ValueError if they have the index of the table in another order.
    """
    others = [plain(one) for one in others]
    if given is None or any(np.ndim(one) != 1 for one in others):
        return None
    if isinstance(given, Mapping):
        wide = [str(name) for name, one in given.items() if np.ndim(plain(one)) != 1]
        if wide:
            raise ValueError(
                f"{where}: {labels.listed(wide)} of the examples are not one number a "
                "row, and an example is one array; join them, as by np.concatenate"
            )
    import pandas  # takes long to import

    named = dict(zip(("y", "client"), others, strict=False))
    if isinstance(given, Mapping):
        check_columns({**given, **named}, where)
    frame = given if is_frame(given) else table(given)
    for name, one in named.items():
        check_order(frame, one, name, where)
    if len(others) > 1:
        check_order(*others, "client", where, "y")
    are_bytes = is_frame(given) and _are_pixels(frame)
    if are_bytes or any(len(one) != len(frame) for one in others):
        return None
    beside = {name: pandas.Series(list(one)) for name, one in named.items()}
    names = [str(name) for name in frame.index.names if name is not None]
    parts = [frame.reset_index(drop=True), pandas.DataFrame(beside)]
    # The name of an index is noted, as for a table with its labels.
    return pandas.concat(parts, axis=1).rename_axis(", ".join(names) or None)


def _are_pixels(frame: pandas.DataFrame) -> bool:
    """Whether it holds bytes, in columns whose names differ in a number alone."""
    names = list(map(str, frame.columns))
    stems = {re.sub(r"\d+", "", name) for name in names}
    are_numbered = len(stems) == 1 and all(re.search(r"\d", name) for name in names)
    return are_numbered and all(kind == np.uint8 for kind in frame.dtypes)


def check_order(
    table: Any, column: Any, name: str, where: str, of: str = "table"
) -> None:
    """Refuses (ValueError) a Series that has the rows of `table` in another order.

    pandas would join both by index, but here the positions of rows count. `of` is how
    the table, which may be another Series, is called.
    """
    first, second = (getattr(one, "index", None) for one in (table, column))
    if not hasattr(first, "equals") or not hasattr(second, "equals"):
        return
    if not first.equals(second) and Counter(first) == Counter(second):
        the = "the " * (of == "table")
        raise ValueError(
            f"{where}: {name} has the index of {the}{of} in another order; give "
            f"{name}.loc[{of}.index], or {name}.to_numpy() if its order is that of "
            "the rows"
        )


def check_columns(columns: Mapping[Any, Any], where: str) -> None:
    """Refuses (ValueError) columns of other lengths, or Series in another order."""
    sizes = {str(name): _num_rows(one) for name, one in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{where}: the columns differ in their number of rows: "
            f"{labels.sized(sizes)}; give one"
        )
    before: dict[str, Any] = {}  # a Series of each index
    for name, one in columns.items():
        if hasattr(one, "reset_index"):
            for first, other in before.items():
                check_order(other, one, str(name), where, first)
            if not any(one.index.equals(other.index) for other in before.values()):
                before[str(name)] = one


def _num_rows(column: Any) -> int:
    shape = getattr(column, "shape", None)
    if shape is None:  # examples in a list may differ in shape
        is_text = isinstance(column, (str, bytes))
        return len(column) if hasattr(column, "__len__") and not is_text else 1
    return shape[0] if len(shape) else 1


def table(columns: Mapping[Any, Any]) -> pandas.DataFrame:
    """A table of columns by position, with the index of the first Series.

    pandas would join Series by their index.
    """
    import pandas  # takes long to import

    every = {
        name: pandas.Series(list(one) if getattr(one, "ndim", 1) > 1 else one)
        for name, one in columns.items()
    }
    frame = pandas.DataFrame(
        {name: one.reset_index(drop=True) for name, one in every.items()}
    )
    first = next((one for one in columns.values() if hasattr(one, "reset_index")), None)
    return frame if first is None else frame.set_axis(first.index, axis=0)


def as_frame(given: Any) -> pandas.DataFrame | None:
    """A table of pandas, polars or pyarrow as one of pandas, None for other objects."""
    kinds = "get_columns", "collect", "to_pandas"  # polars, lazy polars, pyarrow
    is_table = any(hasattr(given, name) for name in kinds) or is_frame(given)
    # Data sets of Hugging Face have items, of which some are images.
    if not is_table or isinstance(given, Mapping) or hasattr(given, "with_format"):
        return None
    columns = as_columns(given)
    return columns if columns is None or is_frame(columns) else table(columns)


def is_hugging_face(given: Any) -> bool:
    """Whether it is a data set of Hugging Face with a known number of rows."""
    has_rows = hasattr(given, "with_format") and hasattr(given, "__len__")
    return has_rows and not isinstance(given, Mapping)


def is_column(given: Any) -> bool:
    """Whether it may be a column of a table: an array, or numbers or texts in a row."""
    are_scalars = isinstance(given, tuple) and all(map(np.isscalar, given))
    return hasattr(given, "dtype") or isinstance(given, (list, range)) or are_scalars


def is_frame(given: Any) -> bool:
    """Whether `given` is a pandas DataFrame, without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(given, pandas.DataFrame)


def plain(value: Any) -> Any:
    """Converts a tensor or an image to an array; returns anything else as it is."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # numpy has no bfloat16.
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    if not is_image(value):
        return value
    if value.mode == "F":
        return np.asarray(value)[..., None]
    try:
        return images.pixels_of(value)
    except ValueError as error:
        raise ValueError(f"dataset: an image cannot be taken: {error}") from error


def is_image(value: Any) -> bool:
    """Whether it is an image of pillow, without importing it."""
    return hasattr(value, "getbands")


def are_images(values: Any) -> bool:
    """Whether it is a list of pillow's images, by its first element."""
    return isinstance(values, (list, tuple)) and any(map(is_image, values[:1]))


def stacked(values: Any, where: str) -> Any:
    """Returns a column as an array or a list.

    Raises a ValueError that begins with `where` if examples differ in shape.
    """
    values = plain(values)
    is_of_objects = getattr(getattr(values, "dtype", None), "kind", "") == "O"
    if not (isinstance(values, Sequence) or is_of_objects) or isinstance(values, str):
        return values
    rows = [plain(one) for one in values]
    if all(map(is_image, values)) and len({one.dtype for one in rows}) == 1:
        rows = images.coloured(rows)
    shapes = {np.shape(one): None for one in rows if not isinstance(one, (str, bytes))}
    if len(shapes) > 1 and () not in shapes:
        some = " and ".join(str(list(shape)) for shape in list(shapes)[:2])
        raise ValueError(
            f"{where}: examples differ in shape, such as {some}; give all one shape"
        )
    if shapes and () not in shapes:
        return np.stack([np.asarray(one) for one in rows])
    return [one.item() if isinstance(one, np.ndarray) else one for one in rows]
