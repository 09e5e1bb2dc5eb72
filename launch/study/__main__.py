"""Runs a study: `python -m launch.study scaling [--part=population,cohort] [--report]`,
or one of your methods, `python -m launch.study --table=mine.json [--shard=1/2]`.

A study is a table of cells as data, `launch/studies/<study>.json`, with a sheet for
each axis. Each missing cell runs in a process of its own, and its result is kept as a
small file in --folder. Where libtpu is installed the compiler of a TPU adds its
estimates. A table of methods is tuned on validation rows and then run with several
seeds, see `build.study`. After Ctrl-C the same command goes on.
"""

import dataclasses
import pathlib
import signal

from fedjax_pfl import options as option_lib
from fedjax_pfl.options import option
from launch import ending
from launch.config import flags
from launch.machine import target
from launch.tables import cells, protocol, study


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of this command."""

    folder: str = option("", "folder of the cells; default runs/study/<study>")
    table: str = option("", "JSON file of a study of methods")
    shard: str = option(
        "1/1",
        "I/N: run each N-th method of --table from the I-th on; several processes may "
        "share a folder",
        needs={"table": option_lib.ON},
    )
    cell_timeout: float = option(
        0.0,
        "minutes after which a run of --table is saved and left, 0 = never",
        minimum=0,
        needs={"table": option_lib.ON},
    )
    data_dir: str = option(
        "",
        "folder of the data of --table's runs; default is its own",
        needs={"table": option_lib.ON},
    )
    part: str = option(
        "", "sheets, with commas; default all", excludes={"table": option_lib.ON}
    )
    target: str = option(
        study.TARGET,
        "chip whose compiler is asked for estimates where libtpu is installed; empty = "
        "none",
        choices=("", *target.TPUS),
        excludes={"table": option_lib.ON},
    )
    report: bool = option(
        False,
        f"also write {study.REPORT}, tables.md and a picture of each sheet; of --table "
        "tables.md, tables.tex, and two pictures and a page of each setting, "
        "report-SETTING.html if there are several",
    )
    dry_run: bool = option(
        False,
        "list the cells and their minutes, run nothing; of --table some rounds of each "
        "method run",
    )


def _methods(asked: Options) -> None:
    """Runs a study of methods."""
    index, slash, count = asked.shard.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise ValueError(f"--shard={asked.shard}: expected I/N, such as 1/2")
    shard = int(index), int(count)
    path = pathlib.Path(asked.table)
    folder = asked.folder or pathlib.Path("runs/study") / path.stem
    found = protocol.read(path, folder, asked.data_dir)
    if asked.dry_run:
        for note in found.notes:
            print(f"note: {note}")
        print("\n".join(found.lines(shard)), f"\n{found.estimate(shard)}", sep="")
        return
    try:
        found.run(shard=shard, cell_timeout=asked.cell_timeout)
    except KeyboardInterrupt as error:
        flags.fail(f"{str(error) or 'interrupted'}; the same command continues", 130)
    print(found.table(), flush=True)
    if asked.report:
        for written in found.write():
            print(written)
    if found.failed:
        line = f"{len(found.failed)} runs failed; the same command tries them again"
        flags.fail(line, 1)


@ending.command
def command(argv: list[str]) -> None:
    """Runs the missing cells of a study."""
    with ending.refused():
        asked, words, _ = flags.asked(argv, Options, __doc__)
        if asked.table:
            if words:
                raise ValueError(f"--table={asked.table}: omit the study {words[0]}")
            return _methods(asked)
        if len(words) != 1:
            raise ValueError(
                f"give one study, {', '.join(cells.studies())}, or --table=FILE with "
                "methods of yours (docs/studies.md)"
            )
        found = study.Study(words[0], asked.folder, asked.part, asked.target)
    left, every = found.left(), found.wanted
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
