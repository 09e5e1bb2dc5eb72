"""Partitions as files, with which other frameworks can use the same clients.

A file is an npz file of integers, which are rows of the data set. Official test rows
come after train rows.

* `train_row` [N] and `train_count` [K]: the rows of each client are
  `np.split(train_row, np.cumsum(train_count)[:-1])`;
* `test_row` and `test_count`: the same for the clients' own test rows;
* `official_test_row` and `proxy_row`, optional: test rows and proxy rows that no client
  owns;
* `may_repeat`, optional: 1 = a row may occur several times;
* `num_rows`, `data_sha256` and `label_sha256`, optional: the data set that it was made
  for, see `Identity`.
"""

import pathlib
from typing import NamedTuple

import numpy as np

from data import files, npz
from data.partitions import parts

PREFIX = "file:"
REQUIRED = ("train_row", "train_count", "test_row", "test_count")
OPTIONAL = ("official_test_row", "proxy_row", "may_repeat", "num_rows")
HASHES = ("data_sha256", "label_sha256")


class Identity(NamedTuple):
    """The data set of a file: the number of its rows, and hexadecimal hashes.

    `data_sha256` covers examples and labels, `label_sha256` the labels as int32.
    """

    num_rows: int
    data_sha256: str
    label_sha256: str


def write(path: pathlib.Path, rows: parts.Split, of: Identity | None = None) -> None:
    """Writes a file atomically, or raises OSError; `of` is the data set of the rows."""
    if path.is_dir():
        raise IsADirectoryError("it is a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    every = np.concatenate([rows.train.row, rows.test.row, *rows[2:]])
    temporary = path.with_name(f"{path.stem}.partial.npz")
    np.savez_compressed(
        temporary,
        train_row=rows.train.row,
        train_count=rows.train.count,
        test_row=rows.test.row,
        test_count=rows.test.count,
        official_test_row=rows.official_test,
        proxy_row=rows.proxy,
        may_repeat=np.int64(len(np.unique(every)) < len(every)),
        **({} if of is None else of._asdict()),
    )
    temporary.rename(path)


class Facts(NamedTuple):
    """What a file says: K, and whether it has test rows of clients, and proxy rows."""

    num_clients: int
    has_own_tests: bool
    has_proxy: bool


def facts(name: str) -> Facts:
    """Returns what `file:PATH` decides.

    Raises a one-line ValueError if the file is missing or is not a partition.
    """
    arrays = _arrays(name)
    has_own_tests = bool(arrays["test_count"].any())
    return Facts(
        len(arrays["train_count"]), has_own_tests, len(arrays.get("proxy_row", ())) > 0
    )


def read(name: str, num_rows: int) -> parts.Split:
    """Reads the rows of every client from `file:PATH` for a data set of `num_rows`.

    Raises a one-line ValueError if the file is missing, is not a partition, or is for
    other data.
    """
    arrays, where = _arrays(name), f"--partition={name}"
    none = np.zeros(0, np.int64)
    official = arrays.get("official_test_row", none)
    proxy = arrays.get("proxy_row", none)
    every = np.concatenate([arrays["train_row"], arrays["test_row"], official, proxy])
    outside = every[(every < 0) | (every >= num_rows)]
    if outside.size:
        raise ValueError(
            f"{where} names row {outside[0]}, the data set has rows 0 to "
            f"{num_rows - 1}; was it made for another --dataset?"
        )
    ordered = np.sort(every)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size and not arrays.get("may_repeat", none).any():
        raise ValueError(
            f"{where} names row {twice[0]} twice; give each row once, or add "
            "may_repeat=1 to the file"
        )
    if not len(arrays["test_row"]) + len(official):
        raise ValueError(
            f"{where} names no test row; add some as test_row or official_test_row"
        )
    train = parts.Parts(arrays["train_row"], arrays["train_count"])
    test = parts.Parts(arrays["test_row"], arrays["test_count"])
    return parts.Split(train, test, official, proxy)


def note(name: str, of: Identity) -> str:
    """Describes a partition file that may be for other data than `of`, or "".

    Raises a one-line ValueError if its data had other rows or labels.
    """
    if not name.startswith(PREFIX):
        return ""
    arrays = _arrays(name)
    where = f"--partition={name}"
    found = {key: arrays[key].item() for key in Identity._fields if key in arrays}
    if not found:
        return f"{where} does not say for which data it was made"
    odd = [k for k, value in of._asdict().items() if found.get(k, value) != value]
    if odd == ["data_sha256"]:
        return f"{where} was made for other examples, whose labels are the same"
    if odd:
        how = "rows in another order, or with other labels"
        if "num_rows" in odd:
            how = f"{found['num_rows']} rows, and these are {of.num_rows}"
        raise ValueError(
            f"{where} was made for other data, {how}; make it again with "
            "--export_partition"
        )
    return ""


def _arrays(name: str) -> dict[str, np.ndarray]:
    """Reads the arrays of a file as int64, checked without the data set."""
    where = f"--partition={name}"
    if name == PREFIX:
        raise ValueError(f"{where} names no file; write --partition={PREFIX}PATH")
    path = pathlib.Path(name.removeprefix(PREFIX)).expanduser()
    with files.named(where):
        arrays = npz.read(path, REQUIRED, (*OPTIONAL, *HASHES), others=False)
    for key, array in arrays.items():
        kind, most, wanted = np.integer, 1, "integers of one dimension"
        if key == "num_rows":
            most, wanted = 0, "one number"
        elif key in HASHES:
            kind, most, wanted = np.str_, 0, "one text"
        if not np.issubdtype(array.dtype, kind) or array.ndim > most:
            raise ValueError(
                f"{where}: {key} must be {wanted}, got {array.dtype} "
                f"{list(array.shape)}"
            )
        arrays[key] = np.atleast_1d(array).astype(np.int64) if most else array
    for kind in ("train", "test"):
        row, count = arrays[f"{kind}_row"], arrays[f"{kind}_count"]
        if (count < 0).any() or count.sum() != len(row):
            raise ValueError(
                f"{where}: {kind}_count adds up to {count.sum()}, {kind}_row has "
                f"{len(row)} rows; they must agree"
            )
    clients = [len(arrays[f"{kind}_count"]) for kind in ("train", "test")]
    if clients[0] != clients[1] or not clients[0]:
        raise ValueError(
            f"{where}: train_count has {clients[0]} clients, test_count {clients[1]}; "
            "they must agree"
        )
    return arrays
