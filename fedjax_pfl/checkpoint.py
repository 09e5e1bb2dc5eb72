"""Saves and restores a whole RoundState with orbax, and detects damage.

`manifest.json` beside orbax's files has the SHA-256 of each, the shape and dtype of
every array, and the host's counters. Orbax restores flipped bits silently, so files are
checked before it reads them. It copies what it writes, so a state is passed in pieces.
"""

import collections
import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import json_text, options
from fedjax_pfl.rows import views

KEEP = 2
MANIFEST = "manifest.json"
FORMAT = 3
# In format 2 every array is a single piece, and all are in one group.
READABLE = (2, FORMAT)


def _shapes(state: Any) -> dict[str, list[Any]]:
    """[dtype, shape] of every leaf by path, in the form written: keys as key data."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    out = {}
    for path, leaf in flat:
        shape = tuple(leaf.shape)
        if views.is_key(leaf):
            one = jax.eval_shape(
                lambda like=leaf: jax.random.key_data(jnp.zeros((), like.dtype))
            )
            leaf, shape = one, shape + one.shape
        out[jax.tree_util.keystr(path)] = [str(leaf.dtype), list(shape)]
    return out


def digest(state: Any) -> str:
    """One SHA-256 over the names, shapes, dtypes and bits of all leaves of a pytree."""

    def of_bits(leaf: Any) -> str:
        bits = hashlib.sha256()
        for piece in views.pieces_of(leaf):
            bits.update(piece.view(np.uint8))
        return bits.hexdigest()

    total = hashlib.sha256()
    # Hashing releases Python's lock, and many clients are gigabytes. Few threads, since
    # each holds a piece. Several processes go through all pieces in the same order.
    threads = 1 if jax.process_count() > 1 else min(4, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        found = pool.map(of_bits, jax.tree.leaves(state))
        for (name, (dtype, shape)), bits in zip(
            _shapes(state).items(), found, strict=True
        ):
            total.update(f"{name} {tuple(shape)} {dtype} {bits}\n".encode())
    return total.hexdigest()


def _groups(state: Any) -> Iterator[list[np.ndarray]]:
    """The pieces of all leaves in order, grouped up to `views.PIECE_BYTES`."""
    group: list[np.ndarray] = []
    for leaf in jax.tree.leaves(state):
        for piece in views.pieces_of(leaf):
            if group and sum(one.nbytes for one in (*group, piece)) > views.PIECE_BYTES:
                yield group
                group = []
            group.append(piece)
    if group:
        yield group


def _file_digests(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 of every file below `folder` except the manifest, by relative path."""
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


def round_of(path: pathlib.Path) -> int:
    """The finished rounds of a checkpoint, by its name."""
    return int(path.name[6:])


@contextlib.contextmanager
def _one_error(path: pathlib.Path) -> Iterator[None]:
    """Turns everything that orbax does about a failed write into one OSError.

    A full disk arrives as a ValueError. Meanwhile two of orbax's threads print
    tracebacks through absl's log, and tensorstore's threads print theirs through
    `sys.unraisablehook` when writes end that are no longer awaited.
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
        reason = os.strerror(number) if code else options.reason(error)
        raise OSError(number, reason, str(path)) from error
    else:
        # After a failure it stays, because the late threads have not ended yet.
        sys.unraisablehook = hook
    finally:
        log.disabled = before


def prepare() -> None:
    """Imports what `save` needs, so that this cannot fail after hours of training.

    Raises OSError if it cannot be imported, for instance for lack of memory.
    """
    try:
        _checkpointer()
    except (ImportError, MemoryError) as error:
        raise OSError(
            f"orbax-checkpoint cannot be imported: {options.reason(error)}"
        ) from error


def last_host(folder: pathlib.Path) -> dict | None:
    """The newest checkpoint's host counters or None; ValueError if it is damaged."""
    found = saved(folder.absolute())
    return _manifest(found[-1])["host"] if found else None


def save(
    folder: pathlib.Path,
    round: int,
    state: Any,
    host: dict,
    keep: Collection[int] | None = None,
) -> None:
    """Writes `folder/round_<round>` atomically and keeps the newest two.

    `folder` is the run's `checkpoints` folder, `round` the rounds done, `state` a
    RoundState (or a stack of them), `host` the host's counters as JSON-able values,
    such as messages so far, and `keep` the rounds to keep instead of the newest two. If
    it cannot be written, an OSError is raised and older checkpoints stay. Of several
    processes one calls it, and the others `send`.
    """
    folder, groups = folder.absolute(), _groups(state)
    partial = folder / f"partial_{round:08d}"
    final = folder / f"round_{round:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_partial(folder)
        _write(partial, round, state, groups, host)
    except OSError:
        # A partial checkpoint would keep the disk full.
        shutil.rmtree(partial, ignore_errors=True)
        if jax.process_count() > 1:
            collections.deque(groups, maxlen=0)  # the others send what is left
        raise
    if final.exists():
        _remove(final)
    partial.rename(final)
    found = saved(folder)
    kept = [one for one in found if round_of(one) in keep] if keep else found[-KEEP:]
    for old in set(found).difference(kept):
        _remove(old)
    with contextlib.suppress(OSError):  # a late thread of orbax may have made it anew
        _remove_partial(folder)


def _remove_partial(folder: pathlib.Path) -> None:
    for left in folder.glob("partial_*"):
        _delete(left)


def _remove(path: pathlib.Path) -> None:
    """Removes a checkpoint, of which a kill leaves all or one that is partial."""
    partial = path.with_name(f"partial_{path.name}")
    with contextlib.suppress(OSError):  # it is not there, or is being written
        _delete(partial)
    path.rename(partial)
    _delete(partial)


def _delete(path: pathlib.Path) -> None:
    """Removes a folder with what is in it, or a file or link in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def send(state: Any) -> None:
    """Takes part in `save` of the same state, which another process calls.

    This process has some of the rows.
    """
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, views.Streamed):
            collections.deque(views.pieces_of(leaf), maxlen=0)


def _write(
    folder: pathlib.Path,
    round: int,
    state: Any,
    pieces: Iterator[list[np.ndarray]],
    host: dict,
) -> None:
    """Writes one checkpoint, of these groups of pieces, the manifest last."""
    groups = []
    with _one_error(folder), _checkpointer() as checkpointer:
        for number, group in enumerate(pieces):
            checkpointer.save(folder / "state" / f"{number:05d}", group)
            groups.append([[str(piece.dtype), piece.size] for piece in group])
    body = {
        "format": FORMAT,
        "round": round,
        "host": host,
        "arrays": _shapes(state),
        "groups": groups,
        "files": _file_digests(folder),
    }
    text = json.dumps(body)
    seal = hashlib.sha256(text.encode()).hexdigest()
    with open(folder / MANIFEST, "w") as file:
        file.write(json.dumps({"sha256": seal, "body": text}))
        file.flush()
        os.fsync(file.fileno())


def _checkpointer() -> Any:
    """An orbax checkpointer of this process alone, which waits for no other."""
    import orbax.checkpoint as ocp  # takes a second to import, which only runs need

    if jax.process_count() == 1:
        return ocp.PyTreeCheckpointer()
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=own,
        active_processes={own},
        barrier_sync_key_prefix=f"process{own}",
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
        multiprocessing_options=alone,
    )


# The form of a manifest, and of its body
_SEALED = {"sha256": str, "body": str}
_PARTS = {"round?": int, "host?": dict, "arrays?": dict, "files?": {str: str}}


def _manifest(path: pathlib.Path) -> dict:
    """The manifest of a checkpoint. Its other files are not read."""
    try:
        if not (path / MANIFEST).is_file():  # a pipe would wait
            raise FileNotFoundError
        wrapped = json_text.read((path / MANIFEST).read_bytes(), _SEALED)
        text = wrapped["body"]
        # A half of a surrogate pair has no bytes.
        intact = hashlib.sha256(text.encode()).hexdigest() == wrapped["sha256"]
        manifest = json_text.read(text, _PARTS)
    except (OSError, ValueError):
        intact = False
    if not intact:
        raise ValueError(f"{path / MANIFEST} is missing or damaged")
    if manifest.get("format") not in READABLE:
        raise ValueError(f"{path} was written by another version of this program")
    if not {name.removesuffix("?") for name in _PARTS} <= manifest.keys():
        raise ValueError(f"{path / MANIFEST} is damaged: it is not a manifest")
    return manifest


def _restore_one(path: pathlib.Path, templates: Sequence[Any]) -> tuple[int, Any, dict]:
    """(rounds done, state, host) of one checkpoint, all of whose files are intact."""
    manifest, present = _manifest(path), _file_digests(path)
    for name, expected in manifest["files"].items():
        if present.get(name) != expected:
            odd = "damaged (its SHA-256 differs)" if name in present else "missing"
            raise ValueError(f"{path / name} is {odd}")
    found = manifest["arrays"]
    fits = (one for one in templates if list(_shapes(one)) == list(found))
    template = next(fits, templates[0])
    wanted = _shapes(template)
    if list(wanted) != list(found):
        odd = sorted(set(wanted) ^ set(found))
        raise ValueError(f"{path} holds another state: {', '.join(odd[:3])} differ")
    for name, (dtype, shape) in wanted.items():
        kind, sizes = found[name]
        if len(sizes) == len(shape):  # an axis of -1 is free
            pairs = zip(shape, sizes, strict=True)
            sizes = [n if n < 0 else size for n, size in pairs]
        if [kind, sizes] != [dtype, shape]:
            before = f"{kind}{found[name][1]}"
            raise ValueError(
                f"{path}: {name} is {before}, this configuration has {dtype}{shape}"
            )
    leaves, treedef = jax.tree_util.tree_flatten(template)
    stored = _stored(path, manifest)

    def restored(leaf: Any, streamed: views.Streamed) -> Any:
        if not views.is_key(leaf):
            return streamed
        return jax.random.wrap_key_data(views.materialised(streamed))

    state = treedef.unflatten(map(restored, leaves, stored))
    return manifest["round"], state, manifest["host"]


def _stored(path: pathlib.Path, manifest: dict) -> list[views.Streamed]:
    """The arrays of a checkpoint in order, whose pieces are read when it is asked.

    The last group that was read stays in memory.
    """
    arrays = [(dtype, tuple(shape)) for dtype, shape in manifest["arrays"].values()]
    if manifest["format"] == FORMAT:
        groups = [
            (path / "state" / f"{number:05d}", [(dtype, (n,)) for dtype, n in group])
            for number, group in enumerate(manifest["groups"])
        ]
    else:
        # Orbax refuses arrays without elements.
        groups = [(path / "state", [one for one in arrays if math.prod(one[1])])]

    @functools.lru_cache(maxsize=1)
    def read(number: int) -> list[np.ndarray]:
        folder, like = groups[number]
        like = [np.zeros(shape, dtype) for dtype, shape in like]
        with _checkpointer() as checkpointer:
            found = checkpointer.restore(folder, item=like)
        return [np.asarray(piece).reshape(-1) for piece in found]

    places = collections.deque(
        (number, index, math.prod(shape))
        for number, (_, pieces) in enumerate(groups)
        for index, (_, shape) in enumerate(pieces)
    )

    def streamed(dtype: str, shape: tuple[int, ...]) -> views.Streamed:
        mine, left = [], math.prod(shape)
        while left and places:
            number, index, size = places.popleft()
            mine.append((number, index))
            left -= size
        if left:
            raise ValueError(
                f"{path / MANIFEST} is damaged: its pieces are not its arrays"
            )

        def pieces() -> Iterator[np.ndarray]:
            return (read(number)[index] for number, index in mine)

        return views.Streamed(shape, np.dtype(dtype), pieces)

    return [streamed(*one) for one in arrays]


def restore(
    folder: pathlib.Path, *templates: Any, round: int | None = None
) -> tuple[int, Any, dict] | None:
    """Restores (rounds done, state, the host's counters) from a checkpoint.

    It is the newest one, or that of `round`, and None if `folder`, the run's
    `checkpoints` folder, has none. `templates` are the state's shapes (`jax.eval_shape`
    of init) in each form that it may have. An axis of -1 may have any length. All
    leaves but keys are `views.Streamed`, read when they are needed. Raises ValueError
    if it is damaged or of another shape, with the file and the older checkpoint to fall
    back to.
    """
    every = saved(folder.absolute())
    found = [one for one in every if round in (None, round_of(one))]
    if not found:
        return None
    try:
        return _restore_one(found[-1], templates)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if not found[-1].exists():  # its run goes on, and has a newer one by now
            return restore(folder, *templates, round=round)
        older = "; there is no older checkpoint"
        if len(found) > 1:
            older = f"; to continue from {found[-2].name} remove {found[-1]}"
        elif round is not None:
            older = f"; a new run until round {round} has its state again"
        if not isinstance(error, ValueError):
            error = f"{found[-1] / MANIFEST} is damaged ({type(error).__name__})"
        raise ValueError(f"{error}{older}") from None
