"""One run of a study of methods: what it is, and how it is trained for some minutes."""

import hashlib
import json
import pathlib
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from data import participation
from launch.config import schema
from launch.experiment import Experiment
from launch.run import loop, stop

_IN_PYTHON = "given in Python"


class Trial(NamedTuple):
    """A run of a study: its folder below `runs`, its options, and these as JSON.

    `before` is the `key` that earlier versions gave it, and `base` its method's row.
    """

    name: str
    options: dict[str, Any]
    key: dict[str, Any]
    before: dict[str, Any]
    base: str


class _Limit(loop.Listener):
    """Asks a run to stop after some seconds."""

    def __init__(self, asked: stop.Stop, seconds: float):
        self.asked, self.end = asked, time.monotonic() + seconds

    def on_call(self, run: Any, records: loop.Records) -> None:
        if time.monotonic() > self.end:
            self.asked.ask(signal.SIGALRM)


def split_sha256(run: Experiment) -> str:
    """Hashes the clients' rows of the first seed, whatever seeds are beside it."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(run.data.partition):
        one = np.asarray(leaf)[0]
        digest.update(np.ascontiguousarray(one[one >= 0]).data)  # without padding
    for given in run.config.availability, run.config.client_speed:
        digest.update(participation.file_bytes(given))
    return digest.hexdigest()


def files_sha256(run: Experiment) -> str:
    """Hashes the public images, first model, teacher and graph, "" without any."""
    graph = run.planner.graph
    has_table = graph is not None and graph.table is not None
    has_public = (run.config.public_set or "none") != "none"
    has_other = run.config.init_from or run.teacher_sha256 or has_table
    if not (has_other or has_public):
        return ""
    both = run.data_sha256 + run.teacher_sha256  # that of data has the other three
    return hashlib.sha256(both.encode()).hexdigest()


_WRITES = {"csv", "keep_best", "tensorboard", "wandb"}  # more files


def identity(key: Mapping[str, Any], but: Collection[str] = _WRITES) -> dict[str, Any]:
    """A trial's key without where its data are and how it is computed, `but` these."""
    how = schema.names(schema.EXECUTION) - {"rounds", *but}
    return {name: value for name, value in key.items() if name not in how}


def goes_on(held: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    """Whether the run of a trial's key is that of `held`, or it with more rounds.

    Of a finished sweep no checkpoint is kept, so that it cannot go on.
    """
    held, key = identity(held), identity(key)
    rounds = [one.get("rounds") for one in (held, key)]
    is_longer = None not in rounds and rounds[0] <= rounds[1] and not key.get("sweep")
    return held == key or (is_longer and {**held, "rounds": rounds[1]} == key)


def train(
    made: Experiment,
    progress: bool,
    minutes: float,
    on_open: Callable[[], None] | None = None,
) -> bool:
    """Trains or continues an experiment in its folder; False if its time was over.

    `minutes` are 0 for no limit, and `on_open` is called once the folder is the run's.
    Raises KeyboardInterrupt after a signal, once the call in progress is saved, a
    `lock.Held` if another process has the folder, and a ValueError if the folder holds
    another run.
    """
    asked = stop.Stop(twice_interrupts=False)
    with made.folder as folder:
        is_finished = folder.open() is not None
        if on_open is not None:
            on_open()
        if not is_finished:
            others = [_Limit(asked, 60 * minutes)] if minutes else []
            made.train(asked, folder, progress=progress, others=others)
    if asked and asked.signal != signal.SIGALRM:
        raise KeyboardInterrupt(f"stopped in {folder.path}; run() continues")
    return made.is_over or not asked


def plain(value: Any) -> Any:
    """A number of NumPy as one of Python; any other value as it is."""
    return value.item() if isinstance(value, np.generic) else value


def as_json(value: Any) -> Any:
    """A value as JSON, with a word in place of objects that only Python can give."""
    if isinstance(value, Mapping):
        return {str(name): as_json(one) for name, one in value.items()}
    value, is_list = plain(value), isinstance(value, (list, tuple))
    if is_list and not any(hasattr(one, "dtype") for one in map(plain, value)):
        return [as_json(one) for one in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, pathlib.Path):
        return str(value)
    name = getattr(value, "__name__", "")
    return f"{_IN_PYTHON}{f': {name}' * bool(name)}"


def is_of_python(shown: Any) -> bool:
    """Whether `as_json` left an object out."""
    return _IN_PYTHON in json.dumps(shown)
