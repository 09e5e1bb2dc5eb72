"""Save and restore a whole RoundState with orbax, and notice damage.

Beside orbax's files stands `manifest.json`: the SHA-256 of every one of them, the shape
and dtype of every array, and what the host must remember. Orbax restores flipped bits
without a word, so files are checked before orbax is asked.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

KEEP = 2
MANIFEST = "manifest.json"
FORMAT = 2


def _plain(state: Any) -> dict[str, np.ndarray]:
    """Leaves by path as numpy; typed keys become their key data."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    out = {}
    for path, leaf in flat:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        out[jax.tree_util.keystr(path)] = np.asarray(jax.device_get(leaf))
    return out


def _shapes(state: Any) -> dict[str, list[Any]]:
    """[dtype, shape] of every leaf by path, as `_plain` would hold it."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    out = {}
    for path, leaf in flat:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        out[jax.tree_util.keystr(path)] = [str(leaf.dtype), list(leaf.shape)]
    return out


def digest(state: Any) -> str:
    """One SHA-256 over the names, shapes, dtypes and bits of all leaves of a pytree."""

    def of_bits(array: np.ndarray) -> str:
        return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()

    arrays = _plain(state)
    total = hashlib.sha256()
    # Threads: hashing leaves Python's lock, and a large population is gigabytes.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        bits = pool.map(of_bits, arrays.values())
    for (name, array), one in zip(arrays.items(), bits, strict=True):
        total.update(f"{name} {array.shape} {array.dtype} {one}\n".encode())
    return total.hexdigest()


def _file_digests(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 of every file below `folder` but the manifest, by relative path."""
    out = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with open(path, "rb") as file:
                name = path.relative_to(folder).as_posix()
                out[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return out


def saved(folder: pathlib.Path) -> list[pathlib.Path]:
    """Complete checkpoints in `folder`, oldest first."""
    found = folder.glob("round_*") if folder.is_dir() else []
    return sorted(path for path in found if path.name[6:].isdecimal())


@contextlib.contextmanager
def _one_error(path: pathlib.Path) -> Iterator[None]:
    """Turns whatever orbax does about a failed write into one OSError.

    A full disk reaches us as a ValueError. On the way two of orbax's threads print
    their tracebacks through absl's log, and tensorstore's threads, when writes end
    that nobody awaits any more, through `sys.unraisablehook`.
    """
    log, hook = logging.getLogger("absl"), sys.unraisablehook

    def unless_late(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    log.disabled, before = True, log.disabled
    sys.unraisablehook = unless_late
    try:
        yield
    except (ValueError, RuntimeError) as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(code[1]) if code else errno.EIO
        reason = os.strerror(number) if code else str(error).split("\n")[0]
        raise OSError(number, reason, str(path)) from error
    else:
        # After a failure it stays: the late threads have not ended yet.
        sys.unraisablehook = hook
    finally:
        log.disabled = before


def save(folder: pathlib.Path, round: int, state: Any, host: dict) -> None:
    """Writes `folder/round_<round>` atomically and keeps the newest two.

    Args:
        folder: The run's `checkpoints` folder.
        round: Rounds done.
        state: A RoundState (or a stack of them).
        host: JSON-able things that the host must remember, such as messages so far.

    Raises:
        OSError: it cannot be written; those before it stay.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("partial_*"):
        shutil.rmtree(left)
    partial = folder / f"partial_{round:08d}"
    final = folder / f"round_{round:08d}"
    try:
        _write(partial, round, state, host)
    except OSError:
        # What fitted of it would fill the disk for good.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    for old in saved(folder)[:-KEEP]:
        shutil.rmtree(old)


def _write(folder: pathlib.Path, round: int, state: Any, host: dict) -> None:
    """Writes one checkpoint, the manifest last."""
    import orbax.checkpoint as ocp  # takes a second to import: only runs pay it

    # Orbax refuses arrays without elements; their shape stands in the manifest.
    arrays = [array for array in _plain(state).values() if array.size]
    with _one_error(folder), ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", arrays)
    body = {
        "format": FORMAT,
        "round": round,
        "host": host,
        "arrays": _shapes(state),
        "files": _file_digests(folder),
    }
    text = json.dumps(body)
    seal = hashlib.sha256(text.encode()).hexdigest()
    with open(folder / MANIFEST, "w") as file:
        file.write(json.dumps({"sha256": seal, "body": text}))
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(path: pathlib.Path) -> dict:
    """The manifest of a checkpoint all of whose files are as they were written."""
    try:
        wrapped = json.loads((path / MANIFEST).read_text())
        text = wrapped["body"]
        intact = hashlib.sha256(text.encode()).hexdigest() == wrapped["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise ValueError(f"{path / MANIFEST} is missing or damaged")
    manifest = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is of another version of this program")
    present = _file_digests(path)
    for name, expected in manifest["files"].items():
        if name not in present:
            raise ValueError(f"{path / name} is missing")
        if present[name] != expected:
            raise ValueError(f"{path / name} is damaged (its SHA-256 differs)")
    return manifest


def _restore_one(path: pathlib.Path, template: Any) -> tuple[int, Any, dict]:
    """(rounds done, state, host) of one checkpoint."""
    import orbax.checkpoint as ocp

    manifest = _read_manifest(path)
    wanted, found = _shapes(template), manifest["arrays"]
    if list(wanted) != list(found):
        odd = sorted(set(wanted) ^ set(found))
        raise ValueError(f"{path} holds another state: {', '.join(odd[:3])} differ")
    for name, (dtype, shape) in wanted.items():
        if found[name] != [dtype, shape]:
            before = f"{found[name][0]}{found[name][1]}"
            raise ValueError(
                f"{path}: {name} is {before}, this configuration has {dtype}{shape}"
            )
    arrays = [np.zeros(shape, dtype) for dtype, shape in found.values()]
    with ocp.PyTreeCheckpointer() as checkpointer:
        stored = iter(
            checkpointer.restore(
                path / "state", item=[array for array in arrays if array.size]
            )
        )
    leaves, treedef = jax.tree_util.tree_flatten(template)

    def restored(array: np.ndarray, leaf: Any) -> Any:
        array = np.asarray(next(stored)) if array.size else array
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(array)
        return array

    state = treedef.unflatten(map(restored, arrays, leaves))
    return manifest["round"], state, manifest["host"]


def restore(folder: pathlib.Path, template: Any) -> tuple[int, Any, dict] | None:
    """Restores the newest checkpoint of `folder`; None where there is none.

    Args:
        folder: The run's `checkpoints` folder.
        template: The state's shapes (`jax.eval_shape` of init).

    Returns:
        (rounds done, state, what the host must remember).

    Raises:
        ValueError: the newest one is damaged or of another shape; names the file, and
            the older checkpoint to fall back to.
    """
    found = saved(folder.absolute())
    if not found:
        return None
    try:
        return _restore_one(found[-1], template)
    except ValueError as error:
        older = (
            f"; to go on from {found[-2].name} remove {found[-1]}"
            if len(found) > 1
            else "; there is no older checkpoint"
        )
        raise ValueError(f"{error}{older}") from error
