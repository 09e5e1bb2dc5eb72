"""Rows that are given by client: arrays, tables or data sets, each with its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from data import arrays, files, foreign, frames, labels
from data.foreign import Rows

if TYPE_CHECKING:
    import pandas


def joined(
    given: Any, where: str, label: str, owner: str, rows_of: Callable[..., Rows]
) -> Rows | None:
    """Joins {client: (x, y)} or {client: {"x": x, "y": y}} to arrays (x, y, client).

    A client may also have a data set of torch or the like, with items (x, y), and where
    x are tables the whole is one, see `_of_tables`. A line names clients without rows
    in `dataset=`, which are left out. Returns None for other objects. Raises ValueError
    for a list of such pairs, if clients differ in the shape of their examples, and if a
    label is missing. `label` and `owner` name columns of tables, and `rows_of` is how
    `doors` takes a table, or a data set with items.
    """
    held = dict(enumerate(given)) if isinstance(given, list) else given
    if not isinstance(held, Mapping) or foreign.is_frame(held) or not len(held):
        return None
    if held is given and (tables := _tables(held, where)):
        if (found := _of_tables(tables, where, label, owner)) is not None:
            table, notes = found
            rows = rows_of(table, where, label, owner)
            return rows._replace(notes=(*notes, *rows.notes))
        held = given = tables
    parts: dict[Any, Any] = {}
    for name, one in held.items():
        if _is_listed(one):
            one = _items(one, f"{where} of {name}", rows_of)
        is_empty = isinstance(one, tuple) and not one
        pair = one if is_empty else _pair(one)
        if pair is None:
            if held is given and all(map(_is_of_client, held.values())):
                raise ValueError(f"{where}: {labels.limited(str(name))}: {_odd(one)}")
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
    _check_alike(parts, where)
    x = np.concatenate([x for x, _ in parts.values() if len(x)] or [none[0]])
    y = np.concatenate(
        arrays.alike(*(y for _, y in parts.values() if len(y))) or [none[1]]
    )
    client, notes = _named_rows({n: len(one[1]) for n, one in parts.items()}, where)
    return Rows((x, y, client), notes=notes)


def _odd(one: Any) -> str:
    """What came for a client in the place of arrays, and what is expected."""
    got = f"a {type(one).__name__}"
    parts = list(one.values() if isinstance(one, Mapping) else one)
    for y in (one for one in parts if getattr(one, "ndim", 0) == 1):
        if odd := next(filter(None, (labels.several(x, y) for x in parts)), ""):
            return f"got {odd}"
    if isinstance(one, (tuple, list)):
        got += f" of {' and '.join(f'{list(np.shape(x))}' for x in one)}"
    return (
        f'got {got}; expected the arrays (x, y) or {{"x": x, "y": y}}, x [N, ...] and '
        "y [N] (of one-hot ones y.argmax(1))"
    )


def _check_alike(
    parts: Mapping[Any, tuple[np.ndarray, np.ndarray]], where: str
) -> None:
    """Raises ValueError if clients differ in the shape or in the type of examples."""
    first = next((x.shape[1:] for x, _ in parts.values() if len(x)), ())
    kinds: dict[str, str] = {}
    for name, (x, y) in parts.items():
        if len(x) != len(y) or (len(x) and x.shape[1:] != first):
            raise ValueError(
                f"{where}: {labels.limited(str(name))}: x has the shape "
                f"{list(x.shape)} and y {list(y.shape)}; expected x [N, "
                f"{str([*first])[1:]} and y [N]"
            )
        if len(x):
            # Bytes are pixels, which other numbers beside them would hide.
            is_number = x.dtype != np.uint8 and x.dtype.kind in "iuf"
            kinds["number" if is_number else x.dtype.kind] = f"{x.dtype} of {name}"
    if len(kinds) > 1:
        raise ValueError(
            f"{where}: clients differ in the type of x, "
            f"{' and '.join(kinds.values())}; give all one"
        )


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
    """(table,) or (table, y) of each client, {} if these are no tables of clients.

    Columns are in the order of the first client's. Raises ValueError if clients differ
    in their columns or in the form, or if labels have a table's index in another order.
    """
    out: dict[Any, tuple[Any, ...]] = {}
    for name, one in held.items():
        if isinstance(one, Mapping) and {*one} == {"x", "y"}:
            one = one["x"], one["y"]
        parts = one if isinstance(one, tuple) and len(one) == 2 else (one,)
        if (frame := _table(parts[0], f"{where} of {name}")) is not None:
            out[name] = (frame.set_axis(list(map(str, frame.columns)), axis=1),)
            out[name] += parts[1:]
    others = [one for name, one in held.items() if name not in out]
    if not out or not all(map(_is_of_client, others)):
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
            foreign.check_order(frame, y, "y", f"{where}: {labels.limited(str(name))}")
        out[name] = (frame[columns], *others)
    return out


def _table(given: Any, where: str) -> pandas.DataFrame | None:
    """A table of a client, of a dict of columns or Hugging Face too, None of others."""
    are_columns = isinstance(given, Mapping) and all(
        map(foreign.is_column, given.values())
    )
    if not are_columns and not foreign.is_hugging_face(given):
        return foreign.as_frame(given)
    columns = foreign.as_columns(given)
    foreign.check_columns(columns, where)
    return foreign.table(columns)


def _of_tables(
    tables: Mapping[Any, tuple[Any, ...]], where: str, label: str, owner: str
) -> tuple[pandas.DataFrame, tuple[str, ...]] | None:
    """(the tables of clients as one, with a column of their names; lines about it).

    It is called `owner`, or else `client`, and replaces columns that have the name of
    each row's client, but labels. None if no client has rows, if labels beside tables
    do not fit, or if these are bytes, which are pixels. Raises ValueError if a column
    of that name has others.
    """
    every = []
    for frame, *y in tables.values():
        if len(frame):
            index = [str(name) for name in frame.index.names if name is not None]
            plain = frame.reset_index(drop=True).rename_axis(", ".join(index) or None)
            every.append(foreign.with_labels(frame, y, where) if y else plain)
    if not every or any(one is None for one in every):
        return None
    client, notes = _named_rows({n: len(one) for n, (one, *_) in tables.items()}, where)
    usual = [n for n in every[0] if n.strip().lower() in frames.LABELS]
    of_labels = [label] if label in every[0] else usual
    whole = frames.concatenated(every, of_labels)
    whole = whole.rename_axis(every[0].index.name)
    keys = np.empty(len(tables), object)
    keys[:] = list(tables)
    named = np.repeat(keys, [len(one) for one, *_ in tables.values()])
    first = whole.iloc[0]
    same = [
        name
        for name in whole
        if name not in of_labels and np.ndim(first[name]) == 0
        if not whole[name].isna().any()
        and (whole[name].astype(object).to_numpy() == named).all()
    ]
    column = owner or "client"
    if column in {*whole} - {*same}:
        raise ValueError(
            f"{where}: the column {column} has other names than the clients; drop or "
            "rename it"
        )
    return whole.drop(columns=same).assign(**{column: client}), notes


def _is_of_client(value: Any) -> bool:
    """Whether it is meant as the rows of a client: two arrays, or a dict of them."""
    if isinstance(value, Mapping):
        return bool({*value} & {"x", "y", "train", "test"})
    if isinstance(value, (tuple, list)):
        are_arrays = all(hasattr(one, "shape") for one in value)
        return len(value) == 2 and (are_arrays or isinstance(value, tuple))
    return False


def _is_listed(value: Any) -> bool:
    """Whether it is an object with items, such as a data set of torch."""
    has_items = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    is_known = isinstance(value, (Mapping, tuple, list, str, bytes))
    is_known |= foreign.is_frame(value)
    return has_items and not is_known and not hasattr(value, "dtype")


def _items(
    given: Any, where: str, rows_of: Callable[..., Rows]
) -> tuple[Any, ...] | None:
    """The arrays (x, y) of a data set with items (x, y), () of none, None of others."""
    if not len(given):
        return ()
    try:
        is_pair = isinstance(given[0], tuple) and len(given[0]) == 2
    except Exception:  # whatever the user's object raises, which is then said
        is_pair = True
    return rows_of(given, where, "", "").arrays if is_pair else None


def _pair(value: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """The arrays (x, y) of some rows, None if it is no pair of these."""
    if isinstance(value, Mapping) and {*value} == {"x", "y"}:
        value = value["x"], value["y"]
    if not isinstance(value, tuple) or len(value) != 2:
        return None
    x, y = map(foreign.plain, value)
    is_of_rows = np.ndim(y) == 1 and len(getattr(x, "shape", ())) > 1
    return (np.asarray(x), np.asarray(y)) if is_of_rows else None
