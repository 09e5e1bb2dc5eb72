"""Save and restore a whole RoundState with orbax, and notice damage.

Beside the arrays stands `manifest.json`: the SHA-256 of every file, the shape, dtype
and SHA-256 of every array, and the host's counters. Orbax restores flipped bits
without a word, so files are checked before orbax is asked and arrays after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import numpy as np

KEEP = 2
MANIFEST = "manifest.json"


def _plain(state: Any) -> dict[str, np.ndarray]:
    """Leaves by path as numpy; typed keys become their key data."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    out = {}
    for path, leaf in flat:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        out[jax.tree_util.keystr(path)] = np.asarray(jax.device_get(leaf))
    return out


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def digest(state: Any) -> str:
    """One SHA-256 over the names, shapes, dtypes and bits of all leaves of a pytree."""
    total = hashlib.sha256()
    for name, array in _plain(state).items():
        total.update(f"{name} {array.shape} {array.dtype} {_digest(array)}\n".encode())
    return total.hexdigest()


def _file_digests(folder: pathlib.Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def saved(folder: pathlib.Path) -> list[pathlib.Path]:
    """Complete checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("round_*")) if folder.is_dir() else []


def save(folder: pathlib.Path, round: int, state: Any, host: dict) -> None:
    """Writes `folder/round_<round>` atomically and keeps the newest two.

    Args:
        folder: The run's `checkpoints` folder.
        round: Rounds done.
        state: A RoundState (or a stack of them).
        host: JSON-able counters of the host, such as messages so far.
    """
    import orbax.checkpoint as ocp  # takes a second to import: only runs pay it

    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("partial_*"):
        shutil.rmtree(left)
    partial = folder / f"partial_{round:08d}"
    arrays = _plain(state)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(partial / "state", list(arrays.values()))
    body = {
        "round": round,
        "host": host,
        "arrays": {
            name: {
                "shape": list(array.shape),
                "dtype": str(array.dtype),
                "sha256": _digest(array),
            }
            for name, array in arrays.items()
        },
        "files": _file_digests(partial),
    }
    text = json.dumps(body)
    seal = hashlib.sha256(text.encode()).hexdigest()
    with open(partial / MANIFEST, "w") as file:
        file.write(json.dumps({"sha256": seal, "body": text}))
        file.flush()
        os.fsync(file.fileno())
    final = folder / f"round_{round:08d}"
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    for old in saved(folder)[:-KEEP]:
        shutil.rmtree(old)


def _read_manifest(path: pathlib.Path) -> dict:
    try:
        wrapped = json.loads((path / MANIFEST).read_text())
        text = wrapped["body"]
        intact = hashlib.sha256(text.encode()).hexdigest() == wrapped["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise ValueError(f"{path / MANIFEST} is missing or damaged")
    return json.loads(text)


def _restore_one(path: pathlib.Path, template: Any) -> tuple[int, Any, dict]:
    import orbax.checkpoint as ocp

    manifest = _read_manifest(path)
    present = _file_digests(path)
    for name, expected in manifest["files"].items():
        if name not in present:
            raise ValueError(f"{path / name} is missing")
        if present[name] != expected:
            raise ValueError(f"{path / name} is damaged (its SHA-256 differs)")
    flat, treedef = jax.tree_util.tree_flatten_with_path(template)
    names = [jax.tree_util.keystr(name) for name, _ in flat]
    if names != list(manifest["arrays"]):
        odd = sorted(set(names) ^ set(manifest["arrays"]))
        raise ValueError(f"{path} holds another state: {', '.join(odd[:3])} differ")
    for name, leaf in flat:
        name = jax.tree_util.keystr(name)
        shape = tuple(manifest["arrays"][name]["shape"])
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        if shape != leaf.shape or manifest["arrays"][name]["dtype"] != str(leaf.dtype):
            raise ValueError(
                f"{path}: {name} is {manifest['arrays'][name]['dtype']}{list(shape)}, "
                f"this configuration has {leaf.dtype}{list(leaf.shape)}"
            )
    target = [
        np.zeros(entry["shape"], entry["dtype"])
        for entry in manifest["arrays"].values()
    ]
    with ocp.PyTreeCheckpointer() as checkpointer:
        arrays = checkpointer.restore(path / "state", item=target)
    leaves = []
    for array, (name, entry), (_, leaf) in zip(
        arrays, manifest["arrays"].items(), flat, strict=True
    ):
        array = np.asarray(array)
        if _digest(array) != entry["sha256"]:
            raise ValueError(f"{path}: the array {name} is damaged")
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            array = jax.random.wrap_key_data(array)
        leaves.append(array)
    return (
        manifest["round"],
        jax.tree_util.tree_unflatten(treedef, leaves),
        manifest["host"],
    )


def restore(folder: pathlib.Path, template: Any) -> tuple[int, Any, dict] | None:
    """Restores the newest checkpoint of `folder`; None where there is none.

    Args:
        folder: The run's `checkpoints` folder.
        template: The state's shapes (`jax.eval_shape` of init).

    Returns:
        (rounds done, state, the host's counters).

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
