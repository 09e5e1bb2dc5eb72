"""An algorithm in a Python file of the user's: `--algo=mine.py` or `mine.py:name`."""

import ast
import hashlib
import os
import pathlib
import re
import sys
import traceback
import types
from typing import Any, NamedTuple

from data import files

_FORM = re.compile(r"(.+\.py)(?::(\w+))?", re.DOTALL)  # its path, and a name in it
_EXPECTED = "expected a dataclass HParams and a function make(hparams, task)"
_OURS = {"fedjax_pfl", "algorithms", "models", "data", "launch"}


class _Kept(NamedTuple):
    """A file as a module, which has run, and hashes of it and of modules beside it."""

    module: types.ModuleType
    digests: dict[pathlib.Path, str]


_KEPT: dict[pathlib.Path, _Kept] = {}
_BESIDE: set[str] = set()  # names of modules that files imported from beside them


def is_one(algo: Any) -> bool:
    """Whether `algo` names such a file and not an algorithm of this package."""
    is_text = isinstance(algo, (str, os.PathLike))
    return is_text and _FORM.fullmatch(os.fspath(algo)) is not None


def forget() -> None:
    """Lets every file run again."""
    _KEPT.clear()


def opened(algo: str | os.PathLike) -> tuple[Any, str]:
    """The algorithm in a file and its name.

    It is the object that is named, the module, or the only class in it that has
    `HParams` and `make`. The file runs once, and again after it or a module beside it
    that it imports was edited. Raises ValueError or OSError: it cannot be read, does
    not run or has no such thing.
    """
    file, name = _FORM.fullmatch(os.fspath(algo)).groups()
    path = files.given(file, "algo")
    files.check(path, "a Python file")
    module = _module(path.resolve())
    if name is not None:
        if not hasattr(module, name):
            raise ValueError(f"there is no {name} in {file}")
        return getattr(module, name), name
    own = [one for one in vars(module).values() if _is_own(one, module)]
    found = [one.__name__ for one in own if isinstance(one, type) and _is_one(one)]
    if _is_one(module) and (_is_own(module.make, module) or not found):
        return module, re.sub(r"[^\w+-]", "_", path.stem).strip("_") or "custom"
    if len(found) != 1:
        line = f", and there are {', '.join(found)}; take one of them, {file}:{{}}"
        raise ValueError(_EXPECTED + (line.format(found[0]) if found else ""))
    return getattr(module, found[0]), found[0]


def _is_one(thing: Any) -> bool:
    return hasattr(thing, "HParams") and hasattr(thing, "make")


def _is_own(thing: Any, module: types.ModuleType) -> bool:
    return getattr(thing, "__module__", None) == module.__name__


def _module(path: pathlib.Path) -> types.ModuleType:
    """The file as it is now."""
    kept = _KEPT.get(path)
    if kept is None or any(_digest(one) != of for one, of in kept.digests.items()):
        _KEPT[path] = kept = _run(path)
    return kept.module


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _run(path: pathlib.Path) -> _Kept:
    """Runs a file, whose folder comes first where its imports are looked for."""
    # Two files may have one name, and annotations are read by that of the module.
    name = f"algo_{hashlib.sha256(bytes(path)).hexdigest()[:8]}.mine"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    digests, before = {path: _digest(path)}, sys.path[:]
    _drop(path.parent)
    loaded = set(sys.modules)
    sys.modules[name] = module
    try:
        source = path.read_bytes()
        _refuse_others(ast.parse(source), path.parent)
        sys.path.insert(0, str(path.parent))
        exec(compile(source, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(_reason(error, path)) from error
    finally:
        sys.path[:] = before
    for one in sys.modules.keys() - loaded:
        if (top := one.partition(".")[0]) and _beside(top, path.parent):
            _BESIDE.add(top)
            digests |= {
                found: _digest(found)
                for found in [pathlib.Path(sys.modules[one].__file__ or "")]
            }
    return _Kept(module, digests)


def _beside(top: str, folder: pathlib.Path) -> bool:
    """Whether a loaded package or module is one of a folder."""
    file = getattr(sys.modules.get(top), "__file__", None)
    there = folder / f"{top}.py", folder / top / "__init__.py"
    return file is not None and pathlib.Path(file) in there


def _drop(folder: pathlib.Path) -> None:
    """Lets modules beside files be imported again: by other files, and once edited."""
    tops = {name.partition(".")[0] for name in sys.modules} - _OURS - {"__main__"}
    tops = {top for top in tops if top in _BESIDE or _beside(top, folder)}
    for name in [one for one in sys.modules if one.partition(".")[0] in tops]:
        del sys.modules[name]


def _refuse_others(tree: ast.Module, folder: pathlib.Path) -> None:
    """Refuses an import of a name beside the file that would be another module."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module)
    for top in {name.partition(".")[0] for name in names}:
        there = folder / f"{top}.py", folder / top / "__init__.py"
        if top in sys.modules and any(map(pathlib.Path.is_file, there)):
            if not _beside(top, folder):
                raise ValueError(
                    f"import {top} is another module than the one beside the file; "
                    "give that another name"
                )


def _reason(error: BaseException, path: pathlib.Path) -> str:
    """Why a file did not run, with the last of its lines that took part."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [one.lineno for one in frames if one.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename in (str(path), "<unknown>"):
        lines, error = [error.lineno], SyntaxError(error.msg)
    if not lines:
        return files.reason(error)
    return f"line {lines[-1]}: {type(error).__name__}: {files.reason(error)}"
