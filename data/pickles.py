"""Reads pickles of numpy arrays, lists, dicts, texts and bytes, and runs no code."""

import io
import pickle
from typing import Any

import numpy as np


class _Array:
    """Stands in for numpy's `_reconstruct`, and then for the array that it makes."""

    def __new__(cls, *_: Any) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, raw = state
        if dtype.kind.hasobject:
            self.array = raw
            return
        array = np.frombuffer(raw, dtype.kind)
        self.array = array.reshape(shape, order="F" if is_fortran else "C")


class _Dtype:
    """Stands in for `numpy.dtype`, of numbers and of objects alone."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.kind = np.dtype(name.decode() if isinstance(name, bytes) else name)
        if self.kind.kind not in "biufO":
            raise ValueError(f"an array is of {self.kind}, numbers are expected")

    def __setstate__(self, state: Any) -> None:
        if state[1] not in (b"<", b"|", "<", "|"):
            raise ValueError("an array has another order of bytes")


class _Encoded:
    """Stands in for `_codecs.encode`, as which Python 3 writes bytes for Python 2."""

    def __new__(cls, text: str, _: str) -> Any:
        return text.encode("latin1")

    def __setstate__(self, state: Any) -> None:
        raise ValueError("bytes have no state")


class _Unpickler(pickle._Unpickler):
    """Calls nothing but the classes of this module.

    A pickle may name any function of any package and have it called. Here each name
    that such pickles contain is a class of this module, and other names are refused.

    It is the unpickler in Python, since that in C fills gigabytes where one damaged
    byte makes the number of an object large.
    """

    _NAMES = {
        "numpy.core.multiarray._reconstruct": _Array,
        "numpy._core.multiarray._reconstruct": _Array,
        "numpy.ndarray": _Array,
        "numpy.dtype": _Dtype,
        "_codecs.encode": _Encoded,
    }

    def find_class(self, module: str, name: str) -> Any:
        if found := self._NAMES.get(f"{module}.{name}"):
            return found
        raise ValueError(
            f"it names {module}.{name}, but only numpy arrays, lists, dicts and bytes "
            "are read"
        )


def read(raw: bytes) -> dict[str, Any]:
    """Reads the dict that is pickled in `raw`, alone or in an array of one object.

    Its values are arrays of numbers, or what else was pickled; an array of objects is
    a list of them. Texts of Python 2 are bytes.

    Raises:
        ValueError: a phrase: it is no dict, it names other objects, or is damaged,
            which may raise other errors too.
    """
    try:
        found = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    except (LookupError, EOFError) as error:
        raise ValueError("it is not a pickle, or is damaged") from error
    if isinstance(found, _Array):
        found = found.array[0] if len(found.array) == 1 else found.array
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, a dict is expected")
    return {
        k.decode() if isinstance(k, bytes) else k: _plain(v) for k, v in found.items()
    }


def _plain(value: Any) -> Any:
    return value.array if isinstance(value, _Array) else value
