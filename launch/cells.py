"""Cells that are runs of `launch.main`: known options, finished runs, the missing ones.

The tables of papers and the studies share them.
"""

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from launch import build, main
from launch.config import flagfile, registry, resolve
from launch.folder import finished, record
from launch.machine import processes

MODEL = "model.msgpack"


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a cell's algorithm has, as its table may name others."""
    has = registry.fields_of(options["algo"])
    return {name: value for name, value in options.items() if name in has}


def stored(folder: pathlib.Path, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary and the records of a finished cell with these options."""
    try:
        if not _holds(folder, options):
            return None
        done = finished.read(folder)
        return done and done | {"records": finished.records(folder)}
    except ValueError as error:
        print(f"note: {error}", file=sys.stderr, flush=True)
        return None


def run(folder: pathlib.Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Runs or continues a cell, and returns its summary and its records."""
    resumes = processes.on_first((folder / finished.RUN_FLAGS).exists)
    done = main.execute(known(options) | {"workdir": str(folder), "resume": resumes})
    return processes.on_first(lambda: done | {"records": finished.records(folder)})


def clients(folder: pathlib.Path) -> dict[str, Any]:
    """The accuracy of each client of a finished cell, or its perplexity.

    Returns:
        The means over the rounds of the summary as `accuracy` or `perplexity`, and
        `test_size`, a list of all clients for each seed. None is a client of which
        nothing is known, and {} a run without any other.
    """
    run = record.read(folder)
    if not record.has_clients(run):
        return {}
    means = record.client_means(run).tolist()
    values = [[float(f"{one:.6g}") for one in line] for line in means]
    sizes = run.clients["test_size"].tolist()
    return finished.finite({record.measured(run): values, "test_size": sizes})


def write_model(
    folder: pathlib.Path, options: Mapping[str, Any], execution: Mapping[str, Any]
) -> None:
    """Writes the server's model of a cell, of its first seed, to `MODEL` in its folder.

    The cell runs if it is not finished. A file that is newer than the run stays.

    Args:
        folder: The cell's folder.
        options: The cell's options.
        execution: Those of execution, which may differ from the finished run's.
    """
    path, summary = folder / MODEL, folder / finished.SUMMARY

    def is_there() -> bool:
        if not path.is_file() or stored(folder, options) is None:
            return False
        return path.stat().st_mtime >= summary.stat().st_mtime

    if processes.on_first(is_there):
        return
    run(folder, options | execution)
    where = {n: execution[n] for n in ("distributed", "data_dir") if n in execution}
    build.load(folder, **where).save_model(path)


def _holds(folder: pathlib.Path, options: Mapping[str, Any]) -> bool:
    """Whether a run's folder holds a run with these options."""
    path = folder / finished.RUN_FLAGS
    if not path.is_file():
        return False
    given, has = known(options), registry.fields_of(options["algo"])
    # The algorithm's own options count even if the preset decides them.
    _, hparams = resolve.configure(given)
    recorded = flagfile.RunFlags.read(path).completed(hparams)
    typed = recorded.typed(options["algo"])
    return recorded.options.keys() <= has.keys() and all(
        typed.get(k) == v for k, v in (vars(hparams) | given).items()
    )
