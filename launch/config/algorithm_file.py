"""An algorithm in a Python file of the user's: `--algo=mine.py` or `mine.py:name`."""

import ast
import hashlib
import importlib
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

from data import files
from fedjax_pfl import options

_FORM = re.compile(r"(.+\.py)(?::(\w+))?", re.DOTALL)  # its path, and a name in it
_EXPECTED = "expected a dataclass HParams and a function make(hparams, task)"
# Modules that a file has in common with the rest of the process
_SHARED = {"fedjax_pfl", "algorithms", "models", "data", "launch", "__main__"}
_SHARED |= sys.stdlib_module_names


class _Kept(NamedTuple):
    """A file as a module, which has run, and hashes of it and of modules beside it."""

    module: types.ModuleType
    digests: dict[pathlib.Path, str]


_KEPT: dict[pathlib.Path, _Kept] = {}


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
    path, name = _parts(algo)
    files.check(path, "a Python file")
    module = _module(path.resolve())
    if name is not None:
        if not hasattr(module, name):
            raise ValueError(f"there is no {name} in {path}")
        return getattr(module, name), name
    own = [one for one in vars(module).values() if _is_own(one, module)]
    found = [one.__name__ for one in own if isinstance(one, type) and _is_one(one)]
    if _is_one(module) and (_is_own(module.make, module) or not found):
        return module, re.sub(r"[^\w+-]", "_", path.stem).strip("_") or "custom"
    if len(found) != 1:
        line = f", and there are {', '.join(found)}; take one of them, {algo}:{{}}"
        raise ValueError(_EXPECTED + (line.format(found[0]) if found else ""))
    return getattr(module, found[0]), found[0]


def digest(algo: str | os.PathLike) -> str:
    """A hash of an opened file and of the modules beside it that it imported.

    Of several algorithms in a file each has its own.
    """
    path, name = _parts(algo)
    every = _KEPT[path := path.resolve()].digests.items()
    parts = sorted((os.path.relpath(one, path.parent), of) for one, of in every)
    of_file = parts if name is None else [name, *parts]
    return hashlib.sha256(repr(of_file).encode()).hexdigest()


def _parts(algo: str | os.PathLike) -> tuple[pathlib.Path, str | None]:
    """The file of `--algo`, and the name in it, None = none is given."""
    file, name = _FORM.fullmatch(os.fspath(algo)).groups()
    return files.given(file, "algo"), name


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
    """Runs a file, and modules beside it that it imports, for it alone.

    Those of a process that have such names are as before afterwards.
    """
    folder = path.parent
    # Two files may have one name, and annotations are read by that of the module.
    name = f"algo_{hashlib.sha256(bytes(path)).hexdigest()[:8]}.mine"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    digests, before = {path: _digest(path)}, (sys.path[:], sys.dont_write_bytecode)
    own = [one for one in _tops(sys.modules) if _is_there(one, folder)]
    own += [one for one in _tops(sys.modules) if _is_beside(one, folder)]
    others = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in own}
    for one in others:
        del sys.modules[one]
    loaded = set(sys.modules)
    try:
        source = path.read_bytes()
        _check_imports(ast.parse(source), folder)
        sys.modules[name] = module
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode = True  # which would hide an edit in the same second
        importlib.invalidate_caches()
        exec(compile(source, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise ValueError(_reason(error, path)) from error
    finally:
        sys.path[:], sys.dont_write_bytecode = before
        new = sys.modules.keys() - loaded
        own = [one for one in _tops(new) if _is_beside(one, folder)]
        mine = [one for one in new if one.partition(".")[0] in own]
        found = [getattr(sys.modules[one], "__file__", None) for one in mine]
        digests |= {
            pathlib.Path(one): _digest(pathlib.Path(one)) for one in found if one
        }
        for one in mine:
            del sys.modules[one]
        sys.modules.update(others)
    return _Kept(module, digests)


def _tops(names: Iterable[str]) -> set[str]:
    """The packages and modules of these names that the process does not need."""
    return {name.partition(".")[0] for name in names} - _SHARED


def _is_there(top: str, folder: pathlib.Path) -> bool:
    """Whether a folder has a module or package of a name."""
    return (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file()


def _is_beside(top: str, folder: pathlib.Path) -> bool:
    """Whether what is loaded by a name is of a folder and not installed below it."""
    module = sys.modules.get(top)
    file, paths = getattr(module, "__file__", None), getattr(module, "__path__", ())
    every = [pathlib.Path(one) for one in ([file] if file else paths)]
    own = [one for one in every if "site-packages" not in one.parts]
    return any(one.is_relative_to(folder) for one in own)


def _check_imports(tree: ast.Module, folder: pathlib.Path) -> None:
    """Refuses imports that would be others than of what lies beside the file."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError(
                f"line {node.lineno}: the file is not part of a package; write the "
                "import without its dots"
            )
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    for top in {name.partition(".")[0] for name in names}:
        is_other = _is_there(top, folder) and not _is_beside(top, folder)
        if top in _SHARED and is_other:
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
        return options.reason(error)
    return f"line {lines[-1]}: {type(error).__name__}: {options.reason(error)}"
