"""Runs a study: `python -m launch.study scaling [--part=population,cohort] [--report]`.

A study is a table of cells as data, `launch/studies/<study>.json`, with a sheet for
each axis. Each missing cell runs in a process of its own, and its result is kept as a
small file in --folder. After Ctrl-C the same command goes on. Where libtpu is installed
the compiler of a TPU adds its estimates.
"""

import dataclasses
import pathlib
import signal

from fedjax_pfl.options import option
from launch import ending
from launch.config import flags
from launch.machine import target
from launch.tables import cells, study


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of this command."""

    folder: str = option("", "folder of the cells; default runs/study/<study>")
    part: str = option("", "sheets, with commas; default all")
    target: str = option(
        study.TARGET,
        "chip whose compiler is asked for estimates where libtpu is installed; empty = "
        "none",
        choices=("", *target.CHIPS),
    )
    report: bool = option(
        False, f"also write {study.REPORT}, tables.md and a picture of each sheet"
    )
    dry_run: bool = option(False, "list the cells and their minutes, run nothing")


@ending.command
def command(argv: list[str]) -> None:
    """Runs the missing cells of a study."""
    with ending.refused():
        asked, words, _ = flags.asked(argv, Options, __doc__)
        if len(words) != 1:
            raise ValueError(f"give one study: {', '.join(cells.studies())}")
        folder = pathlib.Path(asked.folder) if asked.folder else None
        found = study.Study(words[0], folder, asked.part, asked.target)
    left, every = found.left(), found.wanted()
    computed = found.computed(left)
    if asked.dry_run:
        print("\n".join(found.lines(left, computed)))
    minutes = sum(cell.seconds for cell in computed) / 60
    print(
        f"{found.name}: {len(left)} of {len(every)} cells are to run, "
        f"about {minutes:,.0f} minutes on two quiet cores -> {found.folder.path}",
        flush=True,
    )
    for how, reason in found.absent.items():
        count = sum(cell.how == how for cell in every)
        print(f"note: {count} cells ({how}) are left out: {reason}", flush=True)
    if asked.dry_run:
        return
    # A process that was started would outlive this one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = found.run(left)
    except KeyboardInterrupt:
        line = "interrupted; finished cells are kept, the same command continues"
        flags.fail(line, 130)
    for table in found.tables():
        print(table, flush=True)
    if asked.report:
        found.write()
    if failed:
        flags.fail(f"{failed} cells failed; the same command tries them again", 1)


if __name__ == "__main__":
    command()
