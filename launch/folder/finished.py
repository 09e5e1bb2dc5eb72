"""Writes a finished run's files, and checks that they have not changed since.

`summary.json` is written last. It holds the SHA-256 of the files beside it and, as
`sha256`, its own, and `read` compares all of them.
"""

import contextlib
import datetime
import hashlib
import json
import math
import os
import pathlib
import socket
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from data import files
from fedjax_pfl import json_text, metric_kinds
from launch.config import flagfile
from launch.machine import devices
from launch.run.run import Run

RUN_FLAGS, METRICS, CLIENTS = flagfile.RUN_FLAGS, "metrics.jsonl", "clients.npz"
SUMMARY, PARTIAL = "summary.json", ".partial"
CHECKPOINTS = "checkpoints"
BEST = "best"  # in it, the checkpoints of best rounds
# Arrays of `CLIENTS`: one of the first two, and the third except for a text
ACCURACY, PERPLEXITY = metric_kinds.ACCURACY, metric_kinds.PERPLEXITY
CLASS_COUNTS = "class_counts"
FINE_TUNED = metric_kinds.FINE_TUNED  # before the first two
# Arrays of names, if classes or owners are not numbers
CLASS_NAMES, OWNER_NAMES = "class_names", "owner_names"
BEST_ROUND, UNSEEN = "best_round", "unseen"
# Forms for `json_text.check`: a record in a cell, a record, and one run's metrics
_NUMBER = json_text.NUMBER
CURVE = {
    "round": int,
    "seed": int,
    "bytes_up": _NUMBER,
    "bytes_down": _NUMBER,
    "diverged?": int,
    "clock?": _NUMBER,
    str: json_text.NUMBER_OR_NULL,
}
RECORD = CURVE | {"seconds": _NUMBER}
_ENTRY = {
    "mean": _NUMBER,
    "std": _NUMBER,
    "per_seed": [_NUMBER],
    "rounds?": [int],
    "of_rounds?": int,
    "seeds?": [int],
    "of_seeds?": int,
    "clients?": int,
}
PART = {
    "metrics": {"bytes_up": _ENTRY, "bytes_down": _ENTRY, str: _ENTRY},
    "diverged?": int | None,
    "last_round?": {str: _ENTRY},
    "numbers?": [str],
    "undefined?": [str],
    "traffic?": {str: {"direction": str, "messages": _ENTRY, "bytes": _ENTRY}},
}
_FILES = (RUN_FLAGS, METRICS, CLIENTS)
_SEALS = {"sha256": str, "files_sha256": dict}
_KINDS = {
    # A folder's summary names no file outside of it.
    "files_sha256": {**dict.fromkeys(_FILES, str), str: json_text.NOTHING},
    "rounds": int,
    "summary": str,
    "summary_of?": str,
    "sweep?": [{"point": {str: _NUMBER}}],
    "client_updates_per_second": _NUMBER,
    "samples_per_second": _NUMBER,
    "compile_seconds": _NUMBER,
    "padding_efficiency": _NUMBER,
    "step_efficiency?": _NUMBER,
    "device_balance?": _NUMBER,
    "setup_bytes_down?": _NUMBER,
    "num_devices?": int,
    "versions?": {str: str},
    "git_commit?": str,
    "finished?": str,
    "version?": str,
    "cpu?": str,
    "cores?": int,
    "device": str,
}


def clients(run: Run) -> dict[str, np.ndarray]:
    """Returns accuracies [seed, round, client], test sizes and class counts of clients.

    In a sweep they are [seed, point, round, client], with the points' numbers by name.
    With `fine_tune_epochs` there is `fine_tuned_accuracy` too, and those of
    `eval_metrics` that single clients have, by name. A text has perplexities
    instead, as `perplexity`, and no class counts. Names of classes and of the clients'
    owners are included if they are not numbers. If --summary chooses a round, there is
    one, -1, which stands for `best_round` [seed] ([seed, point] in a sweep). With
    `client_metrics=every` there are also `every_round` and, of all evaluations,
    `every_accuracy` and so on.
    """
    points = run.points
    of_clients = _by_seed(run, run.summary_of_clients)
    if run.kept.every is not None:
        done, every = run.kept_of_clients()
        found = _by_seed(run, np.moveaxis(every, 0, 1))
        of_clients |= {f"every_{name}": one for name, one in found.items()}
        of_clients["every_round"] = done[:, 0]
    swept = {name: np.array([one[name] for one in points]) for name in points[0]}
    is_text = bool(run.data.num_words)
    names = {CLASS_NAMES: run.classes, OWNER_NAMES: run.owners}
    rounds, best = np.asarray(run.window), {}
    if run.chooses_round:
        every = [run.best_rounds(point).values() for point in points]
        of_each = np.array([list(one) for one in every])[..., 0].T
        rounds = np.array([-1])
        best = {BEST_ROUND: of_each if run.config.sweep else of_each[:, 0]}
    partition = run.data.partition
    return {
        **({UNSEEN: partition.is_unseen} if partition.has_unseen else {}),
        **swept,
        **{kind: np.array(found) for kind, found in names.items() if found},
        **best,
        **of_clients,
        "rounds": rounds,
        "seeds": np.asarray(run.seeds),
        "test_size": np.asarray(partition.test.count),
        **({} if is_text else {CLASS_COUNTS: class_counts(run)}),
    }


def _by_seed(run: Run, found: np.ndarray) -> dict[str, np.ndarray]:
    """Values [variants, rounds, ..., K] by name, with axes of seeds and points."""
    if run.config.sweep:
        found = found.reshape(len(run.seeds), len(run.points), *found.shape[1:])
    return run.kept.by_name(found)


def class_counts(run: Run) -> np.ndarray:
    """Counts the train examples of each client and class, int32[seeds, K, Y]."""
    own, label = run.data.partition.adapting, np.asarray(run.data.label)
    each = zip(*map(np.asarray, (own.row, own.start, own.count)), strict=True)
    return np.stack([count_classes(label, *one, run.task.num_classes) for one in each])


def count_classes(
    label: np.ndarray,
    row: np.ndarray,
    start: np.ndarray,
    count: np.ndarray,
    num_classes: int,
) -> np.ndarray:
    """Counts the examples of each client and class, int32[K, Y].

    `label` int[N] has the labels of all examples. `row` int[M] has rows of examples, of
    which client k has `count[k]` from `start[k]` on.
    """
    num_clients = len(start)
    client = np.repeat(np.arange(num_clients), count)
    first = np.cumsum(count) - count  # where each client begins without gaps
    place = np.arange(len(client)) + np.repeat(start - first, count)
    cell = client * num_classes + label[row[place]]
    counts = np.bincount(cell, minlength=num_clients * num_classes)
    return counts.reshape(num_clients, num_classes).astype(np.int32)


def records(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the records of a run, finished or not, in order of rounds.

    A last line that a kill has cut is left out; `read` finds one of a finished run.
    Raises a one-line ValueError if a line is not a record or the path is not a file.
    """
    path = folder / METRICS
    with files.named(str(path), joint=" "):
        files.check(path, "a run's records")
    out = []
    *whole, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(whole, start=1):
        if not line:
            continue
        with files.named(f"{path} is damaged: line {number} is not a record"):
            out.append(json_text.read(line, RECORD))
    return out


def lines(records: Sequence[Mapping[str, Any]]) -> str:
    """Formats records as the lines of metrics.jsonl."""
    return "".join(json.dumps(finite(record)) + "\n" for record in records)


def write_text(path: pathlib.Path, text: str, is_shared: bool = False) -> None:
    """Replaces a file atomically, so that a kill leaves the old one or the new one.

    Several processes may write one that `is_shared` at once.
    """
    own = f".{socket.gethostname()}.{os.getpid()}" * is_shared
    temporary = path.with_name(f"{path.name}{own}{PARTIAL}")
    try:
        with files.created(temporary) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # it would keep the disk full
        raise


def is_partial(path: pathlib.Path, name: str) -> bool:
    """Whether a kill may have left a file of `write_text` for the file `name`."""
    return path.name.startswith(f"{name}.") and path.name.endswith(PARTIAL)


def seal(folder: pathlib.Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Adds the hashes of the folder's files, and its own hash, to a summary."""
    files = {name: _file_digest(folder / name) for name in _FILES}
    sealed = summary | {"files_sha256": files}
    return sealed | {"sha256": _own_digest(sealed)}


def read(folder: pathlib.Path) -> dict[str, Any] | None:
    """Reads the summary of a run's folder, None if there is none.

    Raises a one-line ValueError that names a file that is not as the run wrote it.
    """
    path = folder / SUMMARY
    try:
        with files.named(str(path), joint=" "):
            files.check(path, "a run's summary")
    except (FileNotFoundError, NotADirectoryError):
        return None
    with files.named(f"{path} is damaged"):
        summary = json_text.read(path.read_bytes(), {})
        is_sealed = bool(_SEALS.keys() & summary.keys())
        if is_sealed or "parameters_sha256" not in summary:
            json_text.check(summary, _SEALS)
            body = {name: one for name, one in summary.items() if name != "sha256"}
            if _own_digest(body) != summary["sha256"]:
                raise ValueError("its sha256 differs")
            json_text.check(summary, _KINDS)
            for part in summary.get("sweep", [summary]):
                json_text.check(part, PART)
    if not is_sealed:
        raise ValueError(
            f"{path} is of an earlier version without checksums; run it again: "
            f"--flagfile={folder / RUN_FLAGS} with another --workdir"
        )
    for name, expected in summary["files_sha256"].items():
        beside = folder / name
        if not beside.is_file():
            raise ValueError(f"{beside} is missing")
        if _file_digest(beside) != expected:
            raise ValueError(f"{beside} is damaged: {SUMMARY} has another SHA-256")
    return summary


def _own_digest(summary: dict[str, Any]) -> str:
    """Returns the SHA-256 of the values, whatever their layout in the file."""
    return hashlib.sha256(json.dumps(summary, sort_keys=True).encode()).hexdigest()


def _file_digest(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def finite(value: Any) -> Any:
    """Replaces nan and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def origin() -> dict[str, Any]:
    """When and where a run ends, as parts of its summary.

    `finished` is the time in UTC, such as 2026-11-26T00:52Z, `cpu` and `cores` are
    those of the machine. `version` is that of the installed package and `git_commit`
    that of the checkout, each only if there is one.
    """
    now = datetime.datetime.now(datetime.UTC)
    out = {"finished": f"{now:%Y-%m-%dT%H:%MZ}", **devices.processor()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        out["version"] = metadata.version("fedjax_pfl")
    return out | git_commit()


def git_commit() -> dict[str, str]:
    """Returns {"git_commit": ...} of the checkout that contains this file, or {}."""
    root = pathlib.Path(__file__).resolve().parents[2]
    # The variables that git sets inside hooks would point to another repository.
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, env=clean
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    answer = done.stdout.splitlines()
    # An installed package may be in a virtual environment inside a user's repository.
    if done.returncode or pathlib.Path(answer[0]).resolve() != root:
        return {}
    return {"git_commit": answer[1]}
