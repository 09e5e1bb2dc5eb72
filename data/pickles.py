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


def _refused(self: Any) -> None:
    raise ValueError("it holds more than numpy arrays, lists, dicts, texts and bytes")


class _Unpickler(pickle._Unpickler):
    """Calls nothing but the classes of this module.

    A pickle may name any function of any package and have it called. Here each name
    that such pickles contain is a class or a method of this module, and other names are
    refused. So are instructions that such pickles do not need, some of which fill
    memory by a number alone, and keys of dicts that take long to compare.

    It is the unpickler in Python, since that in C fills gigabytes where one damaged
    byte makes the number of an object large.
    """

    _NAMES = {
        "numpy.core.multiarray._reconstruct": _Array,
        "numpy._core.multiarray._reconstruct": _Array,
        "numpy.ndarray": _Array,
        "numpy.dtype": _Dtype,
    }
    # Those of sets, other classes, buffers, and of what lies outside
    _NOT_NEEDED = (
        *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),
        *(pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX),
        *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
        *(pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
    )
    dispatch = pickle._Unpickler.dispatch | {code[0]: _refused for code in _NOT_NEEDED}

    def __init__(self, raw: bytes):
        super().__init__(io.BytesIO(raw), encoding="bytes")
        self._left = len(raw)

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" == "_codecs.encode":
            return self._encoded
        if found := self._NAMES.get(f"{module}.{name}"):
            return found
        raise ValueError(
            f"it names {module}.{name}, but only numpy arrays, lists, dicts and bytes "
            "are read"
        )

    def _encoded(self, text: str, _: str) -> bytes:
        """Stands in for `_codecs.encode`, as which Python 3 writes bytes for Python 2.

        All such bytes together are no more than those of the pickle, as each is in it.
        """
        self._left -= len(text)
        if self._left < 0:
            raise ValueError("it makes more bytes than it holds")
        return text.encode("latin1")

    def load_build(self) -> None:
        """Sets the state of arrays and of their types alone."""
        if not isinstance(self.stack[-2], (_Array, _Dtype)):
            raise ValueError("a state is of no array")
        super().load_build()

    def load_dict(self) -> None:
        """Makes a dict of what lies on the stack, as the oldest pickles do."""
        items = self.pop_mark()
        self._check_keys(items[::2])
        self.append(dict(zip(items[::2], items[1::2], strict=True)))

    def load_setitem(self) -> None:
        self._check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_setitems()

    def _check_keys(self, keys: list[Any]) -> None:
        if not all(isinstance(key, (str, bytes)) for key in keys):
            raise ValueError("a key of a dict is neither text nor bytes")

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


def read(raw: bytes) -> dict[str, Any]:
    """Reads the dict that is pickled in `raw`, alone or in an array of one object.

    Its values are arrays of numbers, or what else was pickled; an array of objects is
    a list of them. Texts of Python 2 are bytes.

    Raises:
        ValueError: a phrase: it is no dict, it names other objects, or is damaged,
            which may raise other errors too.
    """
    try:
        found = _Unpickler(raw).load()
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
