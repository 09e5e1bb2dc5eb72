"""Data sets from a user's tables: pandas DataFrames and CSV files."""

from __future__ import annotations

import collections
import functools
import pathlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from data import arrays, dataset, files, labels
from fedjax_pfl import options

if TYPE_CHECKING:
    import pandas

# Columns, in any case, that hold the labels if there is exactly one of them
LABELS = ("label", "y", "target", "class")
# Columns, in any case, that hold the owners if there is exactly one of them
OWNERS = ("client", "client_id", "owner", "owner_id")
# Columns that name rows or their owners, like those with `id` as last word
_PERSONS = ("client", "owner", "user", "subject", "patient", "person", "participant")
_PERSONS += ("author", "customer", "speaker", "writer")
_NAMES = {f"{one}{end}" for one in _PERSONS for end in ("", "id", "_no")}
_NAMES |= {"index", "row", "uid", "uuid"}
# Columns of two values that mark test rows
_SPLITS = {"test", "train", "split", "is_test", "is_train", "is_training", "is_val"}
# The column, in any case, of the parts of a table, and the names of these parts
SPLIT = ("split",)
PARTS = {"train": "train", "test": "test", "val": "val", "validation": "val"}
# The columns of a CSV file, and the bytes of its first line
MAX_COLUMNS, MAX_HEADER_BYTES = 32768, 1 << 24
# Texts that mean a missing number, in columns other than label and owner
_MISSING = ["", *"NA N/A n/a <NA> #N/A NaN nan null NULL None".split()]


def from_csv(
    path: str, label: str = "", owner: str = "", least_classes: int = 2
) -> dataset.Dataset:
    """Makes a data set from a CSV file, plain or compressed; see `from_frame`.

    Raises ValueError, whose message is a phrase, if it cannot be read or a column does
    not fit.
    """
    import pandas  # takes long to import

    place = files.given(path, "a CSV file")
    try:
        files.check(place, "a CSV file")
        _check_header(place)
        with warnings.catch_warnings():
            # Lines longer than the header would be cut off.
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            read = functools.partial(pandas.read_csv, place)
            names = read(nrows=0, index_col=False).columns
            # pandas would rename the second of two columns `a` to `a.1`.
            header = read(nrows=1, header=None, dtype=str, keep_default_na=False)
            given = {_named(names, label)} if label else _called(names, LABELS)
            given |= {_named(names, owner)} if owner else _called(names, OWNERS)
            # As text "NA" is a name, and "01" is not "1".
            as_text = {name: str for name in names if name in given}
            missing = {name: _MISSING for name in names if name not in given}
            how = {"low_memory": False, "index_col": False, "keep_default_na": False}
            frame = read(dtype=as_text, na_values=missing, **how)
    except (ValueError, OSError, EOFError, pandas.errors.ParserWarning) as error:
        raise ValueError(f"cannot be read as CSV: {files.reason(error)}") from error
    # pandas calls a column without a name `Unnamed: 0`, and so does what it has saved.
    check_names([re.sub(r"^Unnamed: .*", "", name) for name in header.iloc[0]])
    texts = {name: sorted({*frame[name]} & {*_MISSING} - {""}) for name in as_text}
    for name in as_text:
        frame[name] = _plain_numbers(frame[name])
    given = {"least_classes": least_classes, "where": ""}
    made = from_frame(frame, label, owner, **given)
    doubts = [
        f"{labels.limited(name)} holds the text {labels.listed(found)}, which is taken "
        "as a name; leave the cell empty if it is missing"
        for name, found in texts.items()
        if found
    ]
    return made._replace(notes=(*made.notes, *doubts))


def _check_header(place: pathlib.Path) -> None:
    """Refuses (ValueError) separators but commas, and columns that take hours."""
    from pandas.io import common

    with common.get_handle(place, "rb", compression="infer", is_text=False) as opened:
        header = opened.handle.readline(MAX_HEADER_BYTES)
    header = re.sub(rb'"[^"]*"', b"", header)  # names may hold any of them
    for separator, shown in ((b";", "semicolons"), (b"\t", "tabs")):
        if header.count(separator) > header.count(b","):
            raise ValueError(
                f"its columns are separated by {shown}; write it with commas and "
                "decimal points, as pandas' to_csv does"
            )
    if (count := header.count(b",") + 1) > MAX_COLUMNS:
        raise ValueError(
            f"its first line has {count:,} columns, at most {MAX_COLUMNS:,} are read; "
            "give the data as npz:PATH"
        )


def _plain_numbers(column: pandas.Series) -> pandas.Series:
    """Converts a text column to numbers if each text is the usual form of its number.

    `01`, `1e3`, and `7` beside `7.0` are names. Fractions become numbers, which are
    refused as labels and owners.
    """
    import pandas

    numbers = pandas.to_numeric(column, errors="coerce")
    if numbers.isna().any() or column.str.match(r"\s*[+-]?0\d").any():
        return column
    if not (np.isfinite(numbers) & (numbers == np.floor(numbers))).all():
        return numbers
    forms = (r"\s*-?\d+\s*", r"\s*-?\d+\.0+\s*")
    is_usual = any(column.str.fullmatch(form).all() for form in forms)
    return numbers if is_usual and numbers.nunique() == column.nunique() else column


@files.naming
def from_frame(
    frame: pandas.DataFrame,
    label: str = "",
    owner: str = "",
    test: pandas.DataFrame | None = None,
    val: pandas.DataFrame | None = None,
    least_classes: int = 2,
) -> dataset.Dataset:
    """Makes a data set of f32 vectors from the numeric columns of a table.

    Args:
        frame: The table. Bools are 0 and 1. Its index is not used, with a note if it
            has a name. A column `split` of text divides it into `PARTS`.
        label: The column of the labels, "" = the one named as in `LABELS`.
        owner: The column of the owners, "" = the one named as in `OWNERS`, if any.
        test, val: Official test and validation rows, tables with the same columns. In
            one without the owner's column the rows belong to no owner.
        least_classes: The least number of different labels.
        where: The name of the table in errors, by default `dataset`, "" = none.

    Raises:
        ValueError: one line: a column is missing, has missing values, is neither a
            number nor the label or owner, or has a name, such as `id`, that marks it as
            not a feature.
    """
    names = [str(name) for name in frame.columns]
    check_names(names)
    frame = frame.set_axis(names, axis=1)
    if least_classes < 2:  # of a public set, in which nobody reads labels and owners
        frame, label, owner = _unlabelled(frame, label, owner)
        names = list(frame.columns)
    label, owner = chosen(names, label, owner)
    others = [name for name in names if name not in (label, owner)]
    unused, column = frame.index.names, split_column(frame, others)
    parts = {"test": test, "val": val}
    if column:
        check_alone(column, test, val)
        part, rest = parts_of(column, frame[column]), frame.drop(columns=column)
        frame, parts = rest[part == "train"], {n: rest[part == n] for n in parts}
        names = list(frame.columns)
    features = [name for name in names if name not in (label, owner)]
    count = len(frame)
    if not count or not features:
        lacking = "column beside the label and the owner" if count else "row"
        raise ValueError(f"there is no {lacking}{' to train on' * bool(column)}")
    frame, has_owner = _joined(frame, parts, label, owner)
    num_val = 0 if parts["val"] is None else len(parts["val"])

    values = _numbers(frame, features)
    _check_features(frame[features], owner)
    made = arrays.from_arrays(
        values,
        frame[label],
        frame[owner] if owner else None,
        names=(f"the column {label}", f"the column {owner}"),
        columns={name: frame[name].to_numpy() for name in features},
        least_classes=least_classes,
        where="",
    )
    line = (
        f"label: {labels.limited(label)}; owners: "
        f"{labels.limited(owner) if owner else 'none'}; features ({len(features)}): "
        f"{labels.listed(features)}"
    )
    if index := [str(name) for name in unused if name is not None]:
        line += f"; the index {labels.listed(index)} is not used, .reset_index() makes "
        line += "it a column"
    if column:
        line += f"; split: {column}"
    doubts = _doubts(values, features, made.label)
    made = made._replace(notes=(line, *made.notes, *doubts))
    return arrays.divided(made, count, num_val, has_owner)


def _unlabelled(
    frame: pandas.DataFrame, label: str, owner: str
) -> tuple[pandas.DataFrame, str, str]:
    """Returns a table whose labels are all 0, and its columns of labels and owners."""
    names = list(frame.columns)
    owner = _named(names, owner) if _named(names, owner) in names else ""
    found = {_named(names, label)} & {*names} if label else _called(names, LABELS)
    label = min(found, default=label or LABELS[0])
    return frame.assign(**{label: 0}), label, owner


def _numbers(frame: pandas.DataFrame, features: Sequence[str]) -> np.ndarray:
    """Returns columns as f64[N, D]; ValueError for text, missing or infinite values."""
    _check_numbers(frame, features)
    kind, counts = "missing", frame[features].isna().sum().to_numpy()
    if not counts.any():
        values = frame[features].to_numpy(np.float64)
        kind, counts = "infinite", np.isinf(values).sum(0)
    if counts.any():
        raise _is_odd(kind, dict(zip(features, counts.tolist(), strict=True)))
    return values


def _joined(
    frame: pandas.DataFrame,
    parts: Mapping[str, pandas.DataFrame | None],
    label: str,
    owner: str,
) -> tuple[pandas.DataFrame, np.ndarray]:
    """Appends tables with the same columns, and tells which rows have an owner.

    Returns (the rows of all, bool[N]). Those of a table without the column `owner` have
    none; there that column has any value.
    """
    has_owner = np.ones(len(frame), bool)
    for part in parts.values():
        if part is None:
            continue
        part = part.set_axis(list(map(str, part.columns)), axis=1)
        check_names(list(part.columns))
        if owner and owner not in part:
            like = _called(part.columns, (owner.strip().lower(),))
            like = (like or _called(part.columns, OWNERS)) - {*frame.columns}
            if len(like) == 1:
                part = part.rename(columns={like.pop(): owner})
        is_owned = bool(owner) and owner in part
        if owner and not is_owned:
            part = part.assign(**{owner: frame[owner].iloc[0]})
        both = [frame, _with_columns(part, frame.columns)]
        frame = concatenated(both, [name for name in (label, owner) if name in frame])
        has_owner = np.append(has_owner, np.full(len(part), is_owned))
    return frame, has_owner


def concatenated(
    tables: Sequence[pandas.DataFrame], named: Sequence[str]
) -> pandas.DataFrame:
    """Joins tables with the same columns, of which `named` hold labels or owners.

    There pandas would make 1 of True beside numbers, which are of another kind.
    """
    import pandas
    from pandas.api.types import is_bool_dtype as is_bool

    mixed = [n for n in named if len({is_bool(one[n]) for one in tables}) > 1]
    every = [one.astype(dict.fromkeys(mixed, object)) for one in tables]
    return pandas.concat(every, ignore_index=True)


def split_column(columns: Mapping[str, Any], names: Sequence[str]) -> str:
    """The one of `names` with a text for the part of each row, "" if there is none."""
    found = _called(names, SPLIT)
    texts = [n for n in found if any(isinstance(one, str) for one in columns[n])]
    return texts[0] if len(texts) == 1 else ""


def check_alone(column: str, test: Any, val: Any) -> None:
    """Refuses (ValueError) test or validation rows beside a column of the split."""
    given = {"test": test, "validation": val}
    if beside := [name for name, one in given.items() if one is not None]:
        raise ValueError(
            f"the column {column} says which rows test; omit the "
            f"{' and '.join(beside)} rows beside it, or drop the column"
        )


def parts_of(column: str, values: Iterable[Any]) -> np.ndarray:
    """The part of each row, train, test or val; ValueError for other values."""
    names = [str(one) for one in values]
    part = [PARTS.get(one.strip().lower()) for one in names]
    if odd := sorted({n for n, one in zip(names, part, strict=True) if one is None}):
        raise ValueError(
            f"the column {column} holds {labels.listed(odd)}; expected "
            f"{', '.join(PARTS)}, or drop it, or rename it if it is a feature"
        )
    return np.array(part)


def chosen(names: Sequence[str], label: str, owner: str) -> tuple[str, str]:
    """Returns the columns of the labels and of the owners; "" = there are no owners.

    Raises ValueError, whose message is a phrase, if there is no such column, or no
    usual one.
    """
    usual = sorted(_called(names, LABELS), key=list(names).index)
    label, owner = _named(names, label), _named(names, owner)
    label = label or (usual[0] if len(usual) == 1 else "")
    owned = _called(names, OWNERS) - {label}
    owner = owner or (owned.pop() if len(owned) == 1 else "")
    if not label:
        found = f"{labels.listed(usual)} could" if usual else "no column is known to"
        raise ValueError(
            f"{found} hold the labels; give --label, one of the columns "
            f"{labels.listed(names)}"
        )
    if label == owner:
        raise ValueError(f"--label={label} and --owner={owner} are the same column")
    for flag, name in (("label", label), ("owner", owner)):
        if name and name not in names:
            raise ValueError(
                f"there is no column --{flag}={name}; the columns are "
                f"{labels.listed(names)}{options.nearest(name, names)}"
            )
    return label, owner


def check_names(names: Sequence[str]) -> None:
    """Refuses columns with equal names, or without a name as of a saved index."""
    counts = collections.Counter(names)
    twice = sorted(name for name, count in counts.items() if count > 1)
    reason = f"several columns are named {labels.listed(twice)}" if twice else ""
    if "" in names:
        reason = "a column has no name, as of a saved index"
    if reason:
        raise ValueError(f"{reason}; rename it, or write files with index=False")


def _named(names: Sequence[str], wanted: str) -> str:
    """The wanted column; of a file written with `, ` its name begins with a space."""
    found = [name for name in names if wanted and name.strip() == wanted.strip()]
    return found[0] if wanted not in names and len(found) == 1 else wanted


def _called(names: Sequence[str], usual: Sequence[str]) -> set[str]:
    """Returns the columns that have one of the usual names, in any case."""
    return {name for name in names if name.strip().lower() in usual}


def _check_features(frame: pandas.DataFrame, owner: str) -> None:
    """Refuses columns that are named unlike features, unless they hold fractions.

    `owner` is the column of the owners, if there is one.
    """
    reasons = {}
    for name in frame.columns:
        words = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
        words = "_".join(filter(None, re.split(r"[\W_]+", words)))
        is_name = words in _NAMES or re.fullmatch(r"(.*_)?(ids?|idx)", words)
        if not is_name and words not in _SPLITS:
            continue
        numbers = frame[name].to_numpy(np.float64)
        if is_name and (numbers == np.floor(numbers)).all():
            reasons[name] = "names rows or their owners"
        elif not is_name and len(np.unique(numbers)) <= 2:
            reasons[name] = "says which rows test"
    if reasons:
        found = [f"{labels.limited(name)} {why}" for name, why in reasons.items()]
        cure = f"name the owner with --owner={next(iter(reasons)).strip()}, "
        if "says which rows test" in reasons.values():
            cure = "give the test rows as test=frame from Python, "
        elif owner:
            cure = ""
        raise ValueError(
            f"columns are not features by their names: {', '.join(found)}; {cure}"
            "drop such columns, or rename those that are features"
        )


def _doubts(values: np.ndarray, names: Sequence[str], label: np.ndarray) -> list[str]:
    """Notes features f64[N, D] that number the rows, or that give the label away."""
    size, low = len(values), values.min(0)
    is_count = (values.max(0) - low == size - 1) & (low == np.floor(low))
    counts = [
        names[j]
        for j in np.flatnonzero(is_count)
        if (np.sort(values[:, j]) == low[j] + np.arange(size)).all()
    ]
    one = values[np.unique(label, return_index=True)[1]]
    # The first rows already exclude copies in nearly all columns.
    is_copy = (values[:500] == one[label[:500]]).all(0) & (2 * len(one) <= size)
    copies = [
        names[j]
        for j in np.flatnonzero(is_copy)
        if len(np.unique(one[:, j])) == len(one)
        and (values[:, j] == one[label, j]).all()
    ]
    out = []
    if counts:
        out.append(
            f"features that number the rows: {labels.listed(counts)}; drop them if "
            "they say nothing else"
        )
    if copies:
        out.append(
            "features that have one value for each label, and so give it away: "
            f"{labels.listed(copies)}; drop them if new rows do not have them"
        )
    return out


def ordered(frame: pandas.DataFrame, columns: tuple[str, ...]) -> np.ndarray:
    """Returns f64[N, D] of a table, with its columns in the order of training.

    Raises a one-line ValueError if one of them is missing or not numeric.
    """
    frame = frame.set_axis(list(map(str, frame.columns)), axis=1)
    frame = _with_columns(frame, columns)
    with files.named("the table"):
        _check_numbers(frame, columns)
    return frame.to_numpy(np.float64)


def _check_numbers(frame: pandas.DataFrame, names: Sequence[str]) -> None:
    """Refuses columns that are not numeric."""
    from pandas.api import types

    def is_number(dtype: object) -> bool:
        return types.is_numeric_dtype(dtype) and not types.is_complex_dtype(dtype)

    odd = [name for name in names if not is_number(frame[name].dtype)]
    gaps = {
        name: int(frame[name].isna().sum())
        for name in odd
        if is_number(frame[name].dropna().infer_objects().dtype)
    }
    if any(gaps.values()):  # such as True, False and None
        raise _is_odd("missing", gaps)
    if odd:
        raise ValueError(
            f"columns are not numbers: {labels.listed(odd)}; drop them, encode them as "
            "numbers, or name one with --label or --owner; texts can be given as "
            "numbers of tokens [N, T] to a custom model"
        )


def _is_odd(kind: str, counts: Mapping[str, int]) -> ValueError:
    """The error for columns in which so many values are `missing` or `infinite`."""
    odd = {name: count for name, count in counts.items() if count}
    return ValueError(
        f"values are {kind}, of which {labels.sized(odd)}; replace them, or drop "
        "these rows or columns"
    )


def _with_columns(frame: pandas.DataFrame, names: Sequence[str]) -> pandas.DataFrame:
    """Returns the columns `names` of a table, in this order."""
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise ValueError(
            f"the table lacks the columns {labels.listed(missing)}, which the train "
            "rows have; add them"
        )
    return frame[list(names)]
