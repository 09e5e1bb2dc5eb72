"""Opens a user's object: train, test and validation rows as arrays or tables.

Accepts arrays, pandas and polars frames, tables with `to_pandas`, dicts of columns or
of clients, and data sets of Hugging Face and of torch with `__len__` and `__getitem__`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from data import arrays, by_client, dataset, files, foreign, frames, labels
from data.files import SPLITS
from data.foreign import Rows
from fedjax_pfl import options

FORMS = (
    "a name, arrays (x, y[, client]), a DataFrame, a dict, torch's or Hugging Face's"
)


def opened(
    given: Any, test: Any = None, val: Any = None, label: str = "", owner: str = ""
) -> tuple[Rows, Rows | None, Rows | None]:
    """Returns the rows of `dataset=`, and official test and validation rows, or None.

    `test` and `val` are the values of `test=` and `val=`, which replace parts of
    `given`. `label` and `owner` name columns as in `frames.from_frame`. Raises a
    one-line ValueError: what came, and what to give instead.
    """
    held: dict[str, Any] = {}
    if isinstance(given, Mapping):
        given, held = _parts(given)
    elif test is None and _is_pair_of_pairs(given):
        given, held["test"] = given
    beside = {"test": test, "val": val}
    parts = {n: held.get(n) if one is None else one for n, one in beside.items()}
    out = [_rows(given, "dataset", label, owner)]
    if out[0].split is not None:
        with files.named("dataset"):
            frames.check_alone(out[0].split[0], **parts)
            return _divided(out[0])
    if out[0].frame is not None:
        # Names of clients in the other parts are of the owner's column, too.
        with contextlib.suppress(ValueError):
            names = list(map(str, out[0].frame.columns))
            owner = frames.chosen(names, label, owner)[1]
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


def unlabelled(
    given: Any, label: str = "", owner: str = "", layout: str = "auto"
) -> dataset.Dataset:
    """The data set of `public_set=`, of whose rows nobody reads labels and owners.

    It is an array x of examples, also with others behind it, or one of the objects that
    `opened` takes as train rows. Other arguments and errors are those of `joined`.
    """
    if isinstance(given, Mapping) and {*given} == {"train"}:
        given = given["train"]
    is_tuple = isinstance(given, (tuple, list)) and len(given) in (1, 2, 3)
    x = foreign.plain(given[0] if is_tuple else given)
    if getattr(x, "shape", ()) and foreign.as_columns(x) is None:
        if not len(x):
            raise ValueError("public_set: there is no example")
        given = x, np.zeros(len(x), int)
    rows = _rows(given, "public_set", label, owner)
    how = {"where": "public_set", "layout": layout, "least_classes": 1}
    return joined(rows, None, None, label, owner, **how)


def _parts(given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the train rows of a dict, and its other parts if it has any.

    A dict of columns, or of clients, is the train rows itself, and one of clients with
    parts is as one of parts with clients. Raises ValueError if parts and clients cannot
    be told apart.
    """
    are_clients = not {*given} & {*SPLITS}
    if are_clients and any("train" in _parts_of(one) for one in given.values()):
        given = _by_part(given)
    has_columns = any(map(foreign.is_column, given.values()))
    names = list(map(str, given))
    if "train" not in given:
        if not has_columns and files.are_splits(names):
            raise ValueError(
                f"dataset: {labels.listed(names)} look like splits and not like "
                f"clients; parts are called {', '.join(SPLITS)}, and clients otherwise"
            )
        return given, {}
    if odd := sorted({*names} - {*SPLITS}):
        if not has_columns:
            raise ValueError(
                f"dataset: {labels.listed(odd)} beside train: parts are called "
                f"{', '.join(SPLITS)}; omit or rename them, or a client called train"
            )
        return given, {}
    several = [name for name in SPLITS[2:] if name in given]
    if len(several) > 1:
        raise ValueError(f"dataset: {' and '.join(several)}: give one of them")
    val = given.get((*several, "val")[0])
    return given["train"], {"test": given.get("test"), "val": val}


def _parts_of(one: Any) -> Mapping[str, Any]:
    """The parts of a client by name, {} if it has other things than parts."""
    if not isinstance(one, Mapping) or not {*one} <= {*SPLITS}:
        return {}
    return {} if any(map(foreign.is_column, one.values())) else one


def _by_part(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Makes {part: {client: rows}} of {client: {part: rows}}; None is no part.

    Raises ValueError for a client with other things than parts.
    """
    if odd := [str(name) for name, one in given.items() if not _parts_of(one)]:
        raise ValueError(
            f"dataset: {labels.listed(odd)}: other clients are dicts of parts "
            f"({', '.join(SPLITS)}); give all of them such dicts"
        )
    out: dict[str, dict[str, Any]] = {}
    for part in SPLITS:
        rows = {name: one.get(part) for name, one in given.items()}
        if rows := {name: one for name, one in rows.items() if one is not None}:
            out[part] = rows
    return out


def _divided(rows: Rows) -> tuple[Rows, Rows | None, Rows | None]:
    """Train, test and validation rows of arrays whose parts a column names."""
    out = []
    for name in ("train", "test", "val"):
        place = np.flatnonzero(rows.split[1] == name)
        chosen = tuple(
            [one[row] for row in place]
            if isinstance(one, list)
            else np.asarray(one)[place]  # of a Series by position
            for one in rows.arrays
        )
        is_first = name == "train"
        if is_first and not len(place):
            raise ValueError("there is no row to train on")
        part = rows._replace(arrays=chosen, split=None, is_of_whole=not is_first)
        out.append(part if len(place) else None)
    return tuple(out)


def _is_pair_of_pairs(given: Any) -> bool:
    """Whether it is ((x, y), (x_test, y_test)), as keras loads data."""

    def are_two(one: Any) -> bool:
        return isinstance(one, tuple) and len(one) == 2

    return are_two(given) and all(
        are_two(one) and all(hasattr(array, "shape") for array in one) for one in given
    )


def _rows(given: Any, where: str, label: str, owner: str) -> Rows:
    """Returns the rows of an object; see `opened`."""
    if (found := by_client.joined(given, where, label, owner, _rows)) is not None:
        return found
    columns = foreign.as_columns(given)
    if columns is not None:
        return _of_columns(columns, where, label, owner)
    has_rows = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if isinstance(given, (tuple, list)) and len(given) in (2, 3):
        frame = foreign.with_labels(foreign.as_columns(given[0]), given[1:], where)
        if frame is not None:
            return Rows(None, frame, True)
        if len(given) == 3:
            foreign.check_order(given[1], given[2], "client", where, "y")
        columns = [
            foreign.stacked(one, where)
            if foreign.are_images(one)
            else foreign.plain(one)
            for one in given
        ]
        return Rows(tuple(columns))
    if getattr(given, "sampler", None) is not None and hasattr(given, "dataset"):
        return _of_loader(given, where, label, owner)
    if isinstance(getattr(given, "tensors", None), tuple):
        return _rows(given.tensors, where, label, owner)
    is_array = hasattr(given, "dtype")
    if has_rows and not is_array and not isinstance(given, (str, bytes)):
        return _of_items(given, where, label, owner)
    reason = f"got a {type(given).__name__}"
    if isinstance(given, str):
        reason = f"got the name {given!r}; test= and val= are for data that are given "
        reason += "in Python"
    elif hasattr(given, "__iter__") and not is_array and not has_rows:
        reason += " without __len__ and __getitem__; join its batches to arrays"
    raise _unexpected(where, reason)


def _unexpected(where: str, reason: str) -> ValueError:
    return ValueError(f"{where}: expected {FORMS}, {reason}")


def _of_loader(given: Any, where: str, label: str, owner: str) -> Rows:
    """The rows of torch's DataLoader.

    It draws their order again each time, but its data set has a fixed one.
    """
    rows = getattr(given.dataset, "__len__", int)()
    if not rows or rows != getattr(given.sampler, "__len__", int)():
        kind = type(given).__name__
        reason = f"got a {kind} that draws some of its rows; give its .dataset"
        raise _unexpected(where, reason)
    line = f"{where}: the rows of its .dataset are taken once, in their order"
    found = _rows(given.dataset, where, label, owner)
    return found._replace(notes=(line, *found.notes))


def _of_items(given: Any, where: str, label: str, owner: str) -> Rows:
    """The rows of a data set that gives one item, (x, y) or a dict, at a time."""
    reason = f"got a {type(given).__name__}"
    try:
        items = [given[row] for row in range(len(given))]
    except Exception as error:  # whatever the user's object raises
        why, kind = options.reason(error), type(error).__name__
        reason += f" whose rows raise a {kind} ({why})"
        raise _unexpected(where, reason) from error
    kinds = {len(one) if isinstance(one, (tuple, list)) else 0 for one in items}
    if kinds in ({2}, {3}):
        parts = zip(*items, strict=True)
        return Rows(tuple(foreign.stacked(list(part), where) for part in parts))
    if items and all(isinstance(one, Mapping) for one in items):
        names = dict.fromkeys(name for one in items for name in one)
        columns = {name: [one.get(name) for one in items] for name in names}
        return _of_columns(columns, where, label, owner)
    raise _unexpected(where, f"{reason} whose items are neither (x, y) nor dicts")


def _of_columns(given: Any, where: str, label: str, owner: str) -> Rows:
    """Returns rows from columns by name, one of which may hold an array for each."""
    if foreign.is_frame(given):
        first = [one for _, column in given.iloc[:1].items() for one in column]
        if not any(np.ndim(foreign.plain(one)) for one in first):
            return Rows(None, given, True)
        given = {name: given[name].to_numpy() for name in given.columns}
    foreign.check_columns(given, where)
    columns = {str(name): foreign.stacked(one, where) for name, one in given.items()}
    wide = [name for name, one in columns.items() if np.ndim(one) > 1]
    x = "x" if "x" in wide or not wide else wide[0]
    if len(wide) > 1 and x != "x":
        raise ValueError(
            f"{where}: the columns {labels.listed(wide)} hold an array for each row; "
            "keep the one of the examples, or name it x; an example is one array, so "
            "join several, as by np.concatenate"
        )
    if not wide:
        return Rows(None, foreign.table(columns), True)
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
