"""Runs a study: `python -m launch.study scaling [--part=population,cohort] [--report]`.

A study is a table of cells as data, `launch/studies/<study>.json`, with a sheet for
each axis. Each missing cell runs in a process of its own, and its result is kept as a
small file in --folder. After Ctrl-C the same command goes on. Where libtpu is installed
the compiler of a TPU adds its estimates.
"""

import dataclasses
import pathlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from fedjax_pfl.options import option
from launch import ending
from launch.config import flags
from launch.machine import target
from launch.show import sheets as show
from launch.studies import tables
from launch.study import child
from launch.study import study as study_lib


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of this command."""

    folder: str = option("", "folder of the cells; default runs/study/<study>")
    part: str = option("", "sheets, with commas; default all")
    target: str = option(
        study_lib.TARGET,
        "chip whose compiler is asked for estimates where libtpu is installed; empty = "
        "none",
        choices=("", *target.CHIPS),
    )
    report: bool = option(
        False, f"also write {study_lib.REPORT}, tables.md and a picture of each sheet"
    )
    dry_run: bool = option(False, "list the cells and their minutes, run nothing")


def _list(study: study_lib.Study) -> None:
    """Prints every cell and whether it is finished."""
    left, computed = study.left(), study.computed()
    for cell in study.wanted():
        if cell in left:
            state = "to run" if cell in computed else "as another cell"
        elif study.folder.get(cell) is not None:
            state = "finished"
        else:
            state = study.lacks[cell.how]
        print(f"{str(cell):<70} {cell.seconds:6.0f} s  {state}")


def _made(study: study_lib.Study, cell: tables.Cell) -> dict[str, Any]:
    """Runs a cell in a process of its own.

    Raises:
        child.Failed: one line.
        KeyboardInterrupt: after the process has ended.
    """
    told = dict(cell.settings)
    if cell.how == "run":
        told["folder"] = str((study.folder.path / "runs" / cell.name).resolve())
    begin = time.perf_counter()
    # A compiler needs no chip, and one that is here is left alone.
    given = {"JAX_PLATFORMS": "cpu"} if cell.how == "estimate" else None
    one = child.start("launch.study.cell", told, given, is_leader=True)
    try:
        done = child.ended(one)
    except KeyboardInterrupt:
        child.stop(one)
        raise
    return done | {"cell_seconds": round(time.perf_counter() - begin, 1)}


def _run(study: study_lib.Study, left: Sequence[tables.Cell]) -> int:
    """Runs the missing cells; returns how many failed."""
    failed = 0
    study.folder.begin()
    for index, cell in enumerate(left):
        found = study.alike(cell)
        try:
            done = study.folder.put(cell, found or _made(study, cell))
        except child.Failed as error:
            failed += 1
            print(f"note: {cell} failed: {error}", file=sys.stderr, flush=True)
            continue
        how = f"{done['cell_seconds']:.0f} s" if found is None else "as another cell"
        print(f"{index + 1} of {len(left)}  {cell}  {how}", flush=True)
    return failed


@ending.command
def command(argv: list[str]) -> None:
    """Runs the missing cells of a study."""
    with ending.refused():
        asked, words, _ = flags.asked(argv, Options, __doc__)
        if len(words) != 1:
            known = ", ".join(tables.studies())
            raise ValueError(f"give one study: {known}")
        folder = pathlib.Path(asked.folder) if asked.folder else None
        study = study_lib.Study(words[0], folder, asked.part, asked.target)
        left = study.left()
    if asked.dry_run:
        _list(study)
    minutes = sum(cell.seconds for cell in study.computed()) / 60
    print(
        f"{study.name}: {len(left)} of {len(study.wanted())} cells are to run, "
        f"about {minutes:,.0f} minutes on two quiet cores -> {study.folder.path}",
        flush=True,
    )
    for how, reason in study.lacks.items():
        count = sum(cell.how == how for cell in study.wanted())
        print(f"note: {count} cells ({how}) are left out: {reason}", flush=True)
    if asked.dry_run:
        return
    # A process that was started would outlive this one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = _run(study, left)
    except KeyboardInterrupt:
        flags.fail(
            "interrupted; finished cells are kept, the same command goes on", 130
        )
    for name in study.results():
        print(show.markdown(study.shown(name)), flush=True)
    if asked.report:
        study.write()
    if failed:
        flags.fail(f"{failed} cells failed; the same command tries them again", 1)


if __name__ == "__main__":
    command()
