"""Converts data sets of other libraries to arrays or tables, by their methods.

Accepts arrays, pandas and polars frames, tables with `to_pandas`, dicts of columns, and
data sets of Hugging Face and of torch with `__len__` and `__getitem__`. Only pandas is
imported, and only for tables.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data import arrays, dataset, files, frames, images, labels
from fedjax_pfl import options

if TYPE_CHECKING:
    import pandas

FORMS = (
    "a name, arrays (x, y[, client]), a DataFrame, a dict, torch's or Hugging Face's"
)
# Parts of a dict of data sets; any of the last validates
SPLITS = ("train", "test", "validation", "valid", "val", "dev")


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


def opened(
    given: Any, test: Any = None, val: Any = None, label: str = "", owner: str = ""
) -> tuple[Rows, Rows | None, Rows | None]:
    """Returns the rows of `dataset=`, and official test and validation rows, or None.

    `test` and `val` are the values of `test=` and `val=`, which replace parts of
    `given`. `label` and `owner` name columns as in `frames.from_frame`. Raises a
    one-line ValueError: what came, and what to give instead.
    """
    held: dict[str, Any] = {}
    if isinstance(given, Mapping) and "train" in given:
        odd = sorted(map(str, {*given} - {*SPLITS}))
        if odd and not any(map(_is_column, given.values())):
            raise ValueError(
                f"dataset: {labels.listed(odd)} beside train: parts are called "
                f"{', '.join(SPLITS)}; omit or rename them, or a client called train"
            )
    elif isinstance(given, Mapping) and not any(map(_is_column, given.values())):
        if files.are_splits(names := [str(name) for name in given]):
            raise ValueError(
                f"dataset: {labels.listed(names)} look like splits and not like "
                f"clients; parts are called {', '.join(SPLITS)}, and clients otherwise"
            )
    if isinstance(given, Mapping) and {"train"} <= {*given} <= {*SPLITS}:
        several = [name for name in SPLITS[2:] if name in given]
        if len(several) > 1:
            raise ValueError(f"dataset: {' and '.join(several)}: give one of them")
        held = {"test": given.get("test"), "val": given.get((*several, "val")[0])}
        given = given["train"]
    elif test is None and _is_pair_of_pairs(given):
        given, held["test"] = given
    beside = {"test": test, "val": val}
    parts = {n: held.get(n) if one is None else one for n, one in beside.items()}
    out = [_rows(given, "dataset", label, owner)]
    if out[0].split is not None:
        with files.named("dataset"):
            frames.check_alone(out[0].split[0], **parts)
            return _divided(out[0])
    for name, more in parts.items():
        rows = None if more is None else _rows(more, name, label, owner)
        out.append(rows and rows._replace(is_of_whole=beside[name] is None))
        if more is None or (out[-1].frame is None) == (out[0].frame is None):
            continue
        both = out[0], out[-1]
        forms = ["arrays" if one.frame is None else "a table" for one in both]
        raise ValueError(
            f"dataset is {forms[0]} and {name} is {forms[1]}; give one form"
        )
    return tuple(out)


def joined(
    train: Rows,
    test: Rows | None,
    val: Rows | None,
    label: str = "",
    owner: str = "",
    where: str = "dataset",
    layout: str = "auto",
    least_classes: int = 2,
) -> dataset.Dataset:
    """Makes a data set of the rows of `opened`, with its lines.

    `label` and `owner` are those that were given to it, `where` the name in errors, and
    `layout` and `least_classes` are those of `arrays.from_arrays`. Raises ValueError as
    that does.
    """
    form = "arrays" if train.frame is None else "frame"
    given = {"test": test and getattr(test, form), "val": val and getattr(val, form)}
    given |= {"least_classes": least_classes, "where": where}
    if train.frame is None:
        made = arrays.from_arrays(*train.arrays, **given, layout=layout)
    else:
        made = frames.from_frame(train.frame, label, owner, **given)
    return made._replace(notes=(*train.notes, *made.notes))


def _divided(rows: Rows) -> tuple[Rows, Rows | None, Rows | None]:
    """Train, test and validation rows of arrays whose parts a column names."""
    out = []
    for name in ("train", "test", "val"):
        place = np.flatnonzero(rows.split[1] == name)
        chosen = tuple(
            [one[row] for row in place] if isinstance(one, list) else one[place]
            for one in rows.arrays
        )
        is_first = name == "train"
        if is_first and not len(place):
            raise ValueError("there is no row to train on")
        part = rows._replace(arrays=chosen, split=None, is_of_whole=not is_first)
        out.append(part if len(place) else None)
    return tuple(out)


def _is_column(given: Any) -> bool:
    """Whether it may be a column of a table: an array, or numbers or texts in a row."""
    are_scalars = isinstance(given, tuple) and all(map(np.isscalar, given))
    return hasattr(given, "dtype") or isinstance(given, (list, range)) or are_scalars


def _is_pair_of_pairs(given: Any) -> bool:
    """Whether it is ((x, y), (x_test, y_test)), as keras loads data."""

    def are_two(one: Any) -> bool:
        return isinstance(one, tuple) and len(one) == 2

    return are_two(given) and all(
        are_two(one) and all(hasattr(array, "shape") for array in one) for one in given
    )


def _rows(given: Any, where: str, label: str, owner: str) -> Rows:
    """Returns the rows of an object; see `opened`."""
    if (found := _of_clients(given, where, owner)) is not None:
        return found
    columns = as_columns(given)
    if columns is not None:
        return _of_columns(columns, where, label, owner)
    has_rows = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if isinstance(given, (tuple, list)) and len(given) in (2, 3):
        frame = _with_labels(as_columns(given[0]), given[1:], where)
        if frame is not None:
            return Rows(None, frame, True)
        columns = [
            _stacked(one, where) if _are_images(one) else _plain(one) for one in given
        ]
        return Rows(tuple(columns))
    reason, sampler = f"got a {type(given).__name__}", getattr(given, "sampler", None)
    if isinstance(given, str):
        reason = f"got the name {given!r}; test= and val= are for data that are given "
        reason += "in Python"
    elif sampler is not None and hasattr(given, "dataset"):
        # A loader draws its order again each time, but its data set has a fixed one.
        rows = getattr(given.dataset, "__len__", int)()
        if rows and rows == getattr(sampler, "__len__", int)():
            line = f"{where}: the rows of its .dataset are taken once, in their order"
            found = _rows(given.dataset, where, label, owner)
            return found._replace(notes=(line, *found.notes))
        reason += " that draws some of its rows; give its .dataset"
    elif isinstance(getattr(given, "tensors", None), tuple):
        return _rows(given.tensors, where, label, owner)
    elif has_rows and not hasattr(given, "dtype") and not isinstance(given, bytes):
        try:
            items = [given[row] for row in range(len(given))]
        except Exception as error:  # whatever the user's object raises
            why, kind = options.reason(error), type(error).__name__
            reason += f" whose rows raise a {kind} ({why})"
            raise ValueError(f"{where}: expected {FORMS}, {reason}") from error
        kinds = {len(one) if isinstance(one, (tuple, list)) else 0 for one in items}
        if kinds in ({2}, {3}):
            parts = zip(*items, strict=True)
            return Rows(tuple(_stacked(list(part), where) for part in parts))
        if items and all(isinstance(one, Mapping) for one in items):
            names = dict.fromkeys(name for one in items for name in one)
            columns = {name: [one.get(name) for one in items] for name in names}
            return _of_columns(columns, where, label, owner)
        reason += " whose items are neither (x, y) nor dicts"
    elif hasattr(given, "__iter__") and not hasattr(given, "dtype"):
        reason += " without __len__ and __getitem__; join its batches to arrays"
    raise ValueError(f"{where}: expected {FORMS}, {reason}")


def _of_clients(given: Any, where: str, owner: str) -> Rows | None:
    """Joins {client: (x, y)} or {client: {"x": x, "y": y}} to arrays (x, y, client).

    A client may also have a data set of torch or the like, with items (x, y), and where
    x are tables the whole is one, see `_of_tables`. A line names clients without rows
    in `dataset=`, which are left out. Returns None for other objects. Raises ValueError
    for a list of such pairs, if clients differ in the shape of their examples, and if a
    label is missing.
    """
    held = dict(enumerate(given)) if isinstance(given, list) else given
    if not isinstance(held, Mapping) or is_frame(held) or not len(held):
        return None
    if held is given and (tables := _tables(held, where)):
        if (found := _of_tables(tables, where, owner)) is not None:
            return found
        held = given = tables
    parts: dict[Any, Any] = {}
    for name, one in held.items():
        if _is_listed(one):
            one = _items(one, f"{where} of {name}")
        is_empty = isinstance(one, tuple) and not one
        pair = one if is_empty else _pair(one)
        if pair is None:
            if held is given and all(map(_is_of_client, held.values())):
                got = f"a {type(one).__name__}"
                if isinstance(one, (tuple, list)):
                    got += f" of {' and '.join(f'{list(np.shape(x))}' for x in one)}"
                raise ValueError(
                    f"{where}: {labels.limited(str(name))}: got {got}; expected the "
                    'arrays (x, y) or {"x": x, "y": y}, x [N, ...] and y [N] (of '
                    "one-hot ones y.argmax(1))"
                )
            return None
        parts[name] = pair
    some = [pair for pair in parts.values() if pair]
    if not some:
        return None
    none = some[0][0][:0], some[0][1][:0]
    parts = {name: pair or none for name, pair in parts.items()}
    if held is not given:
        raise ValueError(
            f"{where}: got a list of {len(parts)} pairs (x, y), as of clients; give "
            "{name: (x, y), ...}, or one (x, y, client)"
        )
    first = next((x.shape[1:] for x, _ in parts.values() if len(x)), ())
    for name, (x, y) in parts.items():
        if len(x) != len(y) or (len(x) and x.shape[1:] != first):
            raise ValueError(
                f"{where}: {labels.limited(str(name))}: x has the shape "
                f"{list(x.shape)} and y {list(y.shape)}; expected x [N, "
                f"{str([*first])[1:]} and y [N]"
            )
    kinds: dict[str, str] = {}
    for name, (x, _) in parts.items():
        if len(x):
            # Bytes are pixels, which other numbers beside them would hide.
            is_number = x.dtype != np.uint8 and x.dtype.kind in "iuf"
            kinds["number" if is_number else x.dtype.kind] = f"{x.dtype} of {name}"
    if len(kinds) > 1:
        raise ValueError(
            f"{where}: clients differ in the type of x, "
            f"{' and '.join(kinds.values())}; give all one"
        )
    x = np.concatenate([x for x, _ in parts.values() if len(x)] or [none[0]])
    y = np.concatenate(
        arrays.alike(*(y for _, y in parts.values() if len(y))) or [none[1]]
    )
    client, notes = _named_rows({n: len(one[1]) for n, one in parts.items()}, where)
    return Rows((x, y, client), notes=notes)


def _named_rows(
    sizes: Mapping[Any, int], where: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The name of each row's client, of clients with some rows, and a line of others.

    Raises ValueError for a name that is no text or number.
    """
    empty, notes = [str(name) for name, size in sizes.items() if not size], ()
    if empty and where == "dataset":
        shown = labels.listed(empty[:3]) + ", ..." * (len(empty) > 3)
        line = f"{len(empty)} of {len(sizes)} clients of dataset= have no rows and are "
        notes = (f"{line}left out: {shown}",)
    if odd := [one for one in sizes if isinstance(one, tuple)]:
        raise ValueError(
            f"{where}: clients are called by texts or whole numbers, got {odd[0]!r}"
        )
    # As a list, numpy would make texts of numbers beside some.
    names = labels.as_array(list(sizes), where)
    return np.repeat(names, list(sizes.values())), notes


def _tables(held: Mapping[Any, Any], where: str) -> dict[Any, tuple[Any, ...]]:
    """(table,) or (table, y) of each client, {} if no client has a table.

    Columns are in the order of the first client's. Raises ValueError if clients differ
    in their columns or in the form, or if labels have a table's index in another order.
    """
    out: dict[Any, tuple[Any, ...]] = {}
    for name, one in held.items():
        if isinstance(one, Mapping) and {*one} == {"x", "y"}:
            one = one["x"], one["y"]
        parts = one if isinstance(one, tuple) and len(one) == 2 else (one,)
        if (frame := _as_frame(parts[0])) is not None:
            out[name] = (frame.set_axis(list(map(str, frame.columns)), axis=1),)
            out[name] += parts[1:]
    if not out:
        return {}
    forms = {len(one) for one in out.values()}
    if len(out) < len(held) or len(forms) > 1:
        raise ValueError(
            f"{where}: some clients have a table and others arrays, or labels beside "
            "it; give all one form"
        )
    has_rows = [name for name, (frame, *_) in out.items() if len(frame)]
    first = (has_rows or [*out])[0]
    columns = list(out[first][0].columns)
    for name in has_rows:
        frame, *others = out[name]
        with files.named(f"{where}: {labels.limited(str(name))}"):
            frames.check_names(list(frame.columns))
        if odd := {*frame.columns} ^ {*columns}:
            raise ValueError(
                f"{where}: {labels.limited(str(first))} and "
                f"{labels.limited(str(name))} do not both have the columns "
                f"{labels.listed(sorted(odd))}; give all clients the same"
            )
        for y in others:
            check_order(frame, y, "y", f"{where}: {labels.limited(str(name))}")
        out[name] = (frame[columns], *others)
    return out


def _of_tables(
    tables: Mapping[Any, tuple[Any, ...]], where: str, owner: str
) -> Rows | None:
    """Joins the tables of clients to one, with a column of their names.

    It is called `owner` if the tables have a column of that name, else `client`. None
    if there are labels beside them that do not fit, or bytes, which are pixels. Raises
    ValueError if that column has other names.
    """
    import pandas  # takes long to import

    every = []
    for frame, *y in tables.values():
        index = [str(name) for name in frame.index.names if name is not None]
        plain = frame.reset_index(drop=True).rename_axis(", ".join(index) or None)
        every.append(_with_labels(frame, y, where) if y else plain)
    if any(one is None for one in every):
        return None
    sizes = {name: len(one) for name, one in zip(tables, every, strict=True)}
    client, notes = _named_rows(sizes, where)
    some = [one for one in every if len(one)] or every[:1]
    joined = pandas.concat(some, ignore_index=True).rename_axis(some[0].index.name)
    column = owner if owner in joined else "client"
    if column in joined and (joined[column].astype(str) != client.astype(str)).any():
        raise ValueError(
            f"{where}: the column {column} has other names than the clients; drop or "
            "rename it"
        )
    joined[column] = client
    return Rows(None, joined, True, notes)


def _is_of_client(value: Any) -> bool:
    """Whether it is meant as the rows of a client: two arrays, a table or a dict."""
    if isinstance(value, Mapping):
        return bool({*value} & {"x", "y", "train", "test"})
    if isinstance(value, (tuple, list)):
        are_arrays = all(hasattr(one, "shape") for one in value)
        return len(value) == 2 and (are_arrays or isinstance(value, tuple))
    return is_frame(value)


def _is_listed(value: Any) -> bool:
    """Whether it is an object with items, such as a data set of torch."""
    has_items = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    is_known = isinstance(value, (Mapping, tuple, list, str, bytes)) or is_frame(value)
    return has_items and not is_known and not hasattr(value, "dtype")


def _items(given: Any, where: str) -> tuple[Any, ...] | None:
    """The arrays (x, y) of a data set with items (x, y), () of none, None of others."""
    if not len(given):
        return ()
    try:
        is_pair = isinstance(given[0], tuple) and len(given[0]) == 2
    except Exception:  # whatever the user's object raises, which is then said
        is_pair = True
    return _rows(given, where, "", "").arrays if is_pair else None


def _pair(value: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """The arrays (x, y) of some rows, None if it is no pair of these."""
    if isinstance(value, Mapping) and {*value} == {"x", "y"}:
        value = value["x"], value["y"]
    if not isinstance(value, tuple) or len(value) != 2:
        return None
    x, y = map(_plain, value)
    is_of_rows = np.ndim(y) == 1 and len(getattr(x, "shape", ())) > 1
    return (np.asarray(x), np.asarray(y)) if is_of_rows else None


def as_columns(given: Any) -> Any:
    """Returns a pandas frame or columns by name, None if an object has none."""
    if hasattr(given, "collect_schema") and hasattr(given, "collect"):
        given = given.collect()  # a lazy frame of polars
    if hasattr(given, "with_format") and hasattr(given, "__len__"):
        # Hugging Face; its numpy format rounds floats, and makes pixels of images
        # without a palette.
        plain, fast = given.with_format(None), given.with_format("numpy")
        out = {}
        for name, value in (plain[0] if len(plain) else {}).items():
            is_array = np.ndim(_plain(value)) and not _is_image(value)
            out[name] = (fast if is_array else plain)[name][:]
        return out
    if hasattr(given, "get_columns") and hasattr(given, "to_dict"):  # polars
        return {one.name: one.to_numpy() for one in given.get_columns()}
    if hasattr(given, "to_pandas") and hasattr(given, "column_names"):
        return given.to_pandas()  # a table of pyarrow
    return given if isinstance(given, Mapping) or is_frame(given) else None


def _with_labels(
    given: Any, others: Sequence[Any], where: str
) -> pandas.DataFrame | None:
    """Joins columns with labels and owners, as `y` and `client`, into a table.

    Returns None if these do not fit, or if the columns are the bytes of images. Raises
    ValueError if they have the index of the table in another order.
    """
    others = [_plain(one) for one in others]
    if given is None or any(np.ndim(one) != 1 for one in others):
        return None
    if isinstance(given, Mapping):
        wide = [str(name) for name, one in given.items() if np.ndim(_plain(one)) != 1]
        if wide:
            raise ValueError(
                f"{where}: {labels.listed(wide)} of the examples are not one number a "
                "row, and an example is one array; join them, as by np.concatenate"
            )
    import pandas  # takes long to import

    frame = given if is_frame(given) else pandas.DataFrame(given)
    named = dict(zip(("y", "client"), others, strict=False))
    for name, one in named.items():
        check_order(frame, one, name, where)
    are_bytes = all(kind == np.uint8 for kind in frame.dtypes)
    if are_bytes or any(len(one) != len(frame) for one in others):
        return None
    beside = {name: pandas.Series(list(one)) for name, one in named.items()}
    names = [str(name) for name in frame.index.names if name is not None]
    parts = [frame.reset_index(drop=True), pandas.DataFrame(beside)]
    # The name of an index is noted, as for a table with its labels.
    return pandas.concat(parts, axis=1).rename_axis(", ".join(names) or None)


def check_order(table: Any, column: Any, name: str, where: str) -> None:
    """Refuses (ValueError) a Series that has the rows of a table in another order.

    pandas would join both by index, but here the positions of rows count.
    """
    first, second = (getattr(one, "index", None) for one in (table, column))
    if not hasattr(first, "equals") or not hasattr(second, "equals"):
        return
    if not first.equals(second) and Counter(first) == Counter(second):
        raise ValueError(
            f"{where}: {name} has the index of the table in another order; give "
            f"{name}.loc[table.index], or {name}.to_numpy() if its order is that of "
            "the rows"
        )


def _as_frame(given: Any) -> pandas.DataFrame | None:
    """A table of pandas, polars or pyarrow as one of pandas, None for other objects."""
    is_table = hasattr(given, "get_columns") or hasattr(given, "to_pandas")
    if isinstance(given, Mapping) or not (is_table or is_frame(given)):
        return None
    columns = as_columns(given)
    if columns is None or is_frame(columns):
        return columns
    import pandas  # takes long to import

    return pandas.DataFrame(columns)


def is_frame(given: Any) -> bool:
    """Whether `given` is a pandas DataFrame, without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(given, pandas.DataFrame)


def _of_columns(given: Any, where: str, label: str, owner: str) -> Rows:
    """Returns rows from columns by name, one of which may hold an array for each."""
    if is_frame(given):
        first = [one for _, column in given.iloc[:1].items() for one in column]
        if not any(np.ndim(_plain(one)) for one in first):
            return Rows(None, given, True)
        given = {name: given[name].to_numpy() for name in given.columns}
    columns = {str(name): _stacked(one, where) for name, one in given.items()}
    sizes = {name: len(one) if np.ndim(one) else 1 for name, one in columns.items()}
    wide = [name for name, one in columns.items() if np.ndim(one) > 1]
    x = "x" if "x" in wide or not wide else wide[0]
    reason = ""
    if len(set(sizes.values())) > 1:
        reason = f"differ in their number of rows: {labels.sized(sizes)}; give one"
    elif len(wide) > 1 and x != "x":
        reason = f"{labels.listed(wide)} hold an array for each row; keep the one of "
        reason += "the examples, or name it x"
    if reason:
        raise ValueError(f"{where}: the columns {reason}")
    if not wide:
        import pandas  # takes long to import

        columns = {name: pandas.Series(one) for name, one in columns.items()}
        return Rows(None, pandas.DataFrame(columns), True)
    with files.named(where):
        label, owner = frames.chosen([n for n in columns if n != x], label, owner)
        named = [x, label, *filter(None, [owner])]
        others = [name for name in columns if name not in named]
        column, split = frames.split_column(columns, others), None
        if column and where == "dataset":
            split = column, frames.parts_of(column, columns[column])
            others.remove(column)
    line = f"label: {label}; owners: {owner or 'none'}; x: {x}"
    line += f"; split: {column}" if split else ""
    line += f"; not used: {labels.listed(others)}" if others else ""
    return Rows(tuple(columns[name] for name in named), None, True, (line,), split)


def _plain(value: Any) -> Any:
    """Converts a tensor or an image to an array; returns anything else as it is."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # numpy has no bfloat16.
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    if not _is_image(value):
        return value
    if value.mode == "F":
        return np.asarray(value)[..., None]
    try:
        return images.pixels_of(value)
    except ValueError as error:
        raise ValueError(f"dataset: an image cannot be taken: {error}") from error


def _is_image(value: Any) -> bool:
    """Whether it is an image of pillow, without importing it."""
    return hasattr(value, "getbands")


def _are_images(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and any(map(_is_image, values[:1]))


def _stacked(values: Any, where: str) -> Any:
    """Returns a column as an array or a list; its examples must agree in shape."""
    values = _plain(values)
    is_of_objects = getattr(getattr(values, "dtype", None), "kind", "") == "O"
    if not (isinstance(values, Sequence) or is_of_objects) or isinstance(values, str):
        return values
    rows = [_plain(one) for one in values]
    if all(map(_is_image, values)) and len({one.dtype for one in rows}) == 1:
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
