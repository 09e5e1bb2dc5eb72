"""Reads users' npz files without unpickling objects."""

import contextlib
import math
import pathlib
import warnings
import zipfile
from collections.abc import Iterator, Sequence

import numpy as np

from data import files, memory
from fedjax_pfl import options


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[zipfile.ZipFile]:
    """A context with a user's archive, whose errors become phrases about the file."""
    try:
        files.check(path, "an npz file")
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    try:
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
            # numpy warns about headers of Python 2, which it can read.
            warnings.simplefilter("ignore")
            yield archive
    except Exception as error:  # damaged bytes raise various errors
        raise ValueError(f"cannot be read: {options.reason(error)}") from error


def names(path: pathlib.Path) -> set[str]:
    """The names of the arrays of an npz file; a ValueError is a phrase about it."""
    with _opened(path) as archive:
        return {name.removesuffix(".npy") for name in archive.namelist()}


def read(
    path: pathlib.Path,
    required: Sequence[str],
    optional: Sequence[str] = (),
    *,
    others: bool = True,
) -> dict[str, np.ndarray]:
    """Reads arrays of an npz file by name; other members are not read.

    Args:
        required, optional: Names of arrays that must exist, or may.
        others: Whether further arrays may exist.

    Raises:
        ValueError: a phrase about the file, without its path; also if its arrays are
            larger than the free memory.
    """
    wanted = (*required, *optional)
    with _opened(path) as archive:
        held = {name.removesuffix(".npy") for name in archive.namelist()}
        there = [name for name in wanted if name in held]
        # A small file may hold very many zeros, so sizes are summed before reading.
        memory.check(sum(_num_bytes(archive, name) for name in there), "its arrays")
        arrays = {name: _array(archive, name) for name in there}
    if any(name not in arrays for name in required):
        raise ValueError(
            f"has the arrays {_listed(held)}; {' and '.join(required)} are needed"
        )
    if not others and held.difference(wanted):
        raise ValueError(
            f"holds {_listed(held.difference(wanted))}, which is not used; omit it, or "
            f"name it one of {', '.join(wanted)}"
        )
    return arrays


def _num_bytes(archive: zipfile.ZipFile, name: str) -> int:
    """Returns the bytes of an array, for which header and member must agree."""
    with archive.open(f"{name}.npy") as member:
        try:
            version = np.lib.format.read_magic(member)
            is_first = version == (1, 0)
            read = np.lib.format.read_array_header_2_0
            read = np.lib.format.read_array_header_1_0 if is_first else read
            shape, _, dtype = read(member)
        except ValueError:
            return 0  # `_array` will say why it cannot be read
        held = archive.getinfo(f"{name}.npy").file_size - member.tell()
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes != held and not dtype.hasobject:
        than = "longer" if held > num_bytes else "shorter"
        raise ValueError(f"{name} is {than} than its header says")
    return held


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Reads a whole member, so that the archive's checksum is compared."""
    with archive.open(f"{name}.npy") as member:
        try:
            array = np.lib.format.read_array(member, allow_pickle=False)
        except ValueError as error:
            reason = f": {error}"
            if "Object arrays" in str(error):
                reason = " holds pickled Python objects; give numbers or astype(str)"
            raise ValueError(f"{name}{reason}") from error
        member.read(1)  # compares the checksum at the end of a member
    return array


def _listed(names: set[str]) -> str:
    """Lists at most eight names, shortened."""
    shown = [name[:40] for name in sorted(names)[:8]]
    return f"{shown}" + (" and others" if len(names) > 8 else "")
