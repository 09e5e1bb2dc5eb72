"""Reads a user's npz file with suspicion: headers first, the arrays only if they fit.

`np.load` believes what a header says and allocates it, unpickles when asked to, and
returns raw bytes for a member that is no array.
"""

from __future__ import annotations

import lzma
import math
import pathlib
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from typing import IO

import numpy as np

from data import files, memory

_METHODS = (
    zipfile.ZIP_STORED,
    zipfile.ZIP_DEFLATED,
    zipfile.ZIP_BZIP2,
    zipfile.ZIP_LZMA,
)
_ENCRYPTED = 1
# Format 3.0 differs in the field names of structured arrays, which nobody wants here.
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

# What numpy lets through when it parses the header as Python.
_HEADER_ERRORS = (
    ValueError,
    TypeError,
    SyntaxError,
    LookupError,
    OverflowError,
    MemoryError,
    RecursionError,
    tokenize.TokenError,
)


def read(
    path: pathlib.Path,
    required: Sequence[str],
    optional: Sequence[str] = (),
    *,
    others: bool = True,
) -> dict[str, np.ndarray]:
    """The arrays of an npz file by name; other members are not looked at.

    Args:
        path: The file.
        required: Arrays that must be there.
        optional: Arrays that may be there.
        others: Whether there may be others.

    Raises:
        ValueError: one phrase without the path: what is wrong with the file.
    """
    _check_file(path)
    try:
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
            # numpy remarks on headers of Python 2; they are read all the same.
            warnings.simplefilter("ignore")
            members = _members(archive, (*required, *optional))
            missing = [name for name in required if name not in members]
            if missing:
                raise ValueError(
                    f"has the arrays {_listed(_names(archive))}; "
                    f"{' and '.join(required)} are needed"
                )
            unknown = _names(archive, besides=(*required, *optional))
            if not others and unknown:
                raise ValueError(
                    f"holds {_listed(unknown)}, which nobody reads; leave it away, or "
                    f"name it one of {', '.join((*required, *optional))}"
                )
            promised = sum(
                _promised(archive, info, name) for name, info in members.items()
            )
            _check_room(promised)
            return {name: _array(archive, info) for name, info in members.items()}
    except (
        OSError,
        EOFError,
        MemoryError,
        RuntimeError,
        OverflowError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
    ) as error:
        raise ValueError(f"cannot be read: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _check_file(path: pathlib.Path) -> None:
    try:
        files.check(path, "an npz file")
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error


def _names(archive: zipfile.ZipFile, besides: Sequence[str] = ()) -> list[str]:
    """The members' names, sorted; without those of `besides`."""
    names = {name.removesuffix(".npy") for name in archive.namelist()}
    return sorted(names - set(besides))


def _listed(names: Sequence[str]) -> str:
    """Some names in few characters."""
    shown = [name[:40] for name in names[:8]]
    return f"{shown}" + (" and others" if len(names) > 8 else "")


def _members(
    archive: zipfile.ZipFile, names: Sequence[str]
) -> dict[str, zipfile.ZipInfo]:
    """The wanted members that are there, each of them readable and there once."""
    out: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name not in names:
            continue
        if name in out:
            raise ValueError(f"holds {name} twice; which one is meant?")
        if info.flag_bits & _ENCRYPTED:
            raise ValueError(f"cannot be read: {name} is encrypted; save it without")
        if info.compress_type not in _METHODS:
            raise ValueError(
                f"cannot be read: {name} is compressed by method "
                f"{info.compress_type}; save it with np.savez_compressed"
            )
        out[name] = info
    return out


def _header(member: IO[bytes], name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array that a member holds."""
    try:
        version = np.lib.format.read_magic(member)
    except ValueError as error:
        raise ValueError(
            f"cannot be read: {name} holds no array; save it with np.savez"
        ) from error
    if version not in _HEADERS:
        raise ValueError(
            f"cannot be read: {name} is of npy format {version[0]}.{version[1]}; plain "
            "numbers are of 1.0 or 2.0"
        )
    try:
        shape, _, dtype = _HEADERS[version](member)
    except _HEADER_ERRORS as error:
        raise ValueError(
            f"cannot be read: the header of {name} is damaged ({_line(error)})"
        ) from error
    return shape, dtype


def _promised(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> int:
    """Bytes of an array, if its header and the member's size agree."""
    with archive.open(info) as member:
        shape, dtype = _header(member, name)
        held = info.file_size - member.tell()
    if dtype.hasobject:
        raise ValueError(
            f"cannot be read: {name} holds pickled Python objects; numbers are needed"
        )
    wanted = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or wanted != held:
        raise ValueError(
            f"cannot be read: the header of {name} promises {dtype} "
            f"{_short(shape)}, {wanted:.3g} bytes; {held} are there"
        )
    return wanted


def _short(shape: tuple[int, ...]) -> str:
    """A shape in few characters, however many dimensions a header claims."""
    text = str(list(shape))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_room(wanted: int) -> None:
    free = memory.available_bytes()
    if free is not None and wanted > free:
        raise ValueError(
            f"holds {wanted / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB of memory are "
            "free; save fewer examples or a smaller dtype"
        )


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Reads a whole member; the archive's checksum is compared on the way."""
    with archive.open(info) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        member.read()
    return array
