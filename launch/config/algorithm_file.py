"""An algorithm in a Python file of the user's: `--algo=mine.py` or `mine.py:name`."""

import functools
import hashlib
import linecache
import pathlib
import re
import sys
import traceback
import types
from typing import Any

from data import files

_FORM = re.compile(r"(.+\.py)(?::(\w+))?")  # its path, and a name in it
_EXPECTED = "expected a dataclass HParams and a function make(hparams, task)"


def is_one(algo: Any) -> bool:
    """Whether `algo` names such a file and not an algorithm of this package."""
    return isinstance(algo, str) and _FORM.fullmatch(algo) is not None


def opened(text: str) -> Any:
    """The module, the only class in it with `HParams` and `make`, or what is named.

    The file runs once, and again after it was edited. It may import modules beside it.
    Raises ValueError or OSError: it cannot be read, does not run or has no such thing.
    """
    file, name = _FORM.fullmatch(text).groups()
    path = files.given(file, "algo")
    files.check(path, "a Python file")
    status = path.stat()
    module = _module(path.resolve(), status.st_mtime_ns, status.st_size)
    if name is not None:
        if not hasattr(module, name):
            raise ValueError(f"there is no {name} in {file}")
        return getattr(module, name)
    if _is_algorithm(module):
        return module
    own = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == module.__name__
    ]
    found = [one.__name__ for one in filter(_is_algorithm, own)]
    if len(found) != 1:
        line = f", and there are {', '.join(found)}; take one of them, {file}:{{}}"
        raise ValueError(_EXPECTED + (line.format(found[0]) if found else ""))
    return getattr(module, found[0])


@functools.lru_cache
def _module(path: pathlib.Path, *_: int) -> types.ModuleType:
    """One version of a file as a module, which has run."""
    # Two files may have one name, and annotations are read by that of the module.
    folder = hashlib.sha256(bytes(path.parent)).hexdigest()[:8]
    module = types.ModuleType(f"algo_{folder}.{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    linecache.checkcache(str(path))
    sys.path.append(str(path.parent))
    try:
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except Exception as error:
        del sys.modules[module.__name__]
        raise ValueError(_reason(error, path)) from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _is_algorithm(thing: Any) -> bool:
    return hasattr(thing, "HParams") and hasattr(thing, "make")


def _reason(error: Exception, path: pathlib.Path) -> str:
    """Why a file did not run, with the last of its lines that took part."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [one.lineno for one in frames if one.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines, error = [error.lineno], SyntaxError(error.msg)
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {files.reason(error)}"
