"""Data sets of a user's tables: pandas DataFrames and CSV files."""

from __future__ import annotations

import pathlib
import warnings
from typing import TYPE_CHECKING

import numpy as np

from data import arrays, dataset, files, labels

if TYPE_CHECKING:
    import pandas

# Columns that hold the labels if there is exactly one of them
LABELS = ("label", "y", "target", "class")
# The columns of a CSV file. These take pandas half a minute, and ten times as many an
# hour.
MAX_COLUMNS, MAX_HEADER_BYTES = 32768, 1 << 24
# What means in other columns that there is no number
_MISSING = [
    "",
    "NA",
    "N/A",
    "n/a",
    "<NA>",
    "#N/A",
    "NaN",
    "nan",
    "null",
    "NULL",
    "None",
]


def from_csv(
    path: str, label: str = "", owner: str = "", flag: str = "dataset"
) -> dataset.Dataset:
    """A data set of a CSV file, plain or compressed; see `from_frame`.

    Raises:
        ValueError: one line: it cannot be read, or a column does not fit.
    """
    where = f"--{flag}=csv:{path}"
    import pandas  # takes long to import

    place = files.given(path, where)
    try:
        files.check(place, "a CSV file")
        _check_width(place)
        with warnings.catch_warnings():
            # Lines that are longer than the header would be cut off.
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            names = pandas.read_csv(place, nrows=0, index_col=False).columns
            given = {label, owner} if label else {owner, *LABELS}
            # As text "NA" is a name, and "01" is not "1".
            as_text = {name: str for name in names if name in given}
            missing = {name: _MISSING for name in names if name not in given}
            frame = pandas.read_csv(
                place,
                low_memory=False,
                index_col=False,
                dtype=as_text,
                keep_default_na=False,
                na_values=missing,
            )
    except FileNotFoundError as error:
        raise ValueError(f"{where}: there is no such file") from error
    except (ValueError, OSError, EOFError, pandas.errors.ParserWarning) as error:
        reason = str(error).strip() or type(error).__name__
        raise ValueError(
            f"{where}: cannot be read as CSV: {' '.join(reason.split())[:200]}"
        ) from error
    unnamed = [str(name) for name in frame.columns if str(name).startswith("Unnamed: ")]
    if unnamed:
        raise ValueError(
            f"{where}: a column has no name, as of a saved index; write the file with "
            "index=False, or name the column"
        )
    for name in as_text:
        frame[name] = _plain_numbers(frame[name])
    return from_frame(frame, label, owner, where)


def _check_width(place: pathlib.Path) -> None:
    """Refuses a file of very many columns, for which pandas takes hours.

    Raises:
        ValueError: a phrase.
    """
    from pandas.io import common

    with common.get_handle(place, "rb", compression="infer", is_text=False) as opened:
        header = opened.handle.readline(MAX_HEADER_BYTES)
    if (count := header.count(b",") + 1) > MAX_COLUMNS:
        raise ValueError(
            f"its first line has {count:,} columns, at most {MAX_COLUMNS:,} are read; "
            "give the data as npz:PATH"
        )


def _plain_numbers(column: pandas.Series) -> pandas.Series:
    """A column of text as numbers, if all of it are numbers without leading zeros."""
    import pandas

    numbers = pandas.to_numeric(column, errors="coerce")
    has_zeros = column.str.match(r"\s*[+-]?0\d").any()
    return column if has_zeros or numbers.isna().any() else numbers


def from_frame(
    frame: pandas.DataFrame, label: str = "", owner: str = "", where: str = "dataset"
) -> dataset.Dataset:
    """A data set of vectors: the numeric columns of a table, as float32.

    Args:
        frame: The table. Bools are 0 and 1, and its index is not used.
        label: The column of the labels, "" = the one named as in `LABELS`.
        owner: The column of the rows' owners, "" = there is none.
        where: The name of the table in errors.

    Raises:
        ValueError: one line: a column is missing, has missing values, or is neither a
            number nor the label or the owner.
    """
    import pandas

    names = [str(name) for name in frame.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{where}: several columns are named {labels.listed(twice)}; rename them"
        )
    frame = frame.set_axis(names, axis=1)
    label = label or _usual_label(names, where)
    for flag, name in (("label", label), ("owner", owner)):
        if name and name not in names:
            raise ValueError(
                f"{where}: there is no column --{flag}={name}; the columns are "
                f"{labels.listed(names)}"
            )
    if label == owner:
        raise ValueError(
            f"{where}: --label={label} and --owner={owner} are the same column"
        )
    if not len(frame):
        raise ValueError(f"{where}: there are no rows")
    features = [name for name in names if name not in (label, owner)]
    if not features:
        raise ValueError(f"{where}: there is no column beside the label and the owner")
    missing = frame[features].isna().sum()
    missing = {name: int(count) for name, count in missing.items() if count}
    if missing:
        raise ValueError(
            f"{where}: values are missing, of which {labels.sized(missing)}; fill "
            "them, or drop these rows or columns"
        )

    def is_number(dtype: object) -> bool:
        kinds = pandas.api.types
        return kinds.is_numeric_dtype(dtype) and not kinds.is_complex_dtype(dtype)

    odd = [name for name in features if not is_number(frame[name].dtype)]
    if odd:
        raise ValueError(
            f"{where}: columns are not numbers: {labels.listed(odd)}; drop them, "
            "encode them as numbers, or name one with --label or --owner"
        )
    values = frame[features].to_numpy(np.float64)
    if not np.isfinite(values).all():
        endless = np.isinf(values).sum(0).tolist()
        counts = {n: k for n, k in zip(features, endless, strict=True) if k}
        raise ValueError(
            f"{where}: values are infinite, of which {labels.sized(counts)}; replace "
            "them, or drop these rows or columns"
        )
    made = arrays.from_arrays(
        values,
        frame[label],
        frame[owner] if owner else None,
        where,
        names=(f"the column {label}", f"the column {owner}"),
    )
    return made._replace(columns=tuple(features))


def ordered(frame: pandas.DataFrame, columns: tuple[str, ...]) -> np.ndarray:
    """The columns of a table in the order of training, without others; f64[N, D].

    Raises:
        ValueError: one line: one of them is missing.
    """
    frame = frame.set_axis(list(map(str, frame.columns)), axis=1)
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise ValueError(
            f"the table lacks the columns {labels.listed(missing)}, with which the "
            "model was trained"
        )
    return frame[list(columns)].to_numpy(np.float64)


def _usual_label(names: list[str], where: str) -> str:
    found = [name for name in names if name in LABELS]
    if len(found) == 1:
        return found[0]
    reason = f"{labels.listed(found)} could" if found else "no column is known to"
    raise ValueError(
        f"{where}: {reason} hold the labels; give --label, one of the columns "
        f"{labels.listed(names)}"
    )
