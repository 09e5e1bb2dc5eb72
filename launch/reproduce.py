"""Reproduces a paper's table: `python -m launch.reproduce cdkt.table1 --dataset=...`.

Runs the missing cells, keeps finished ones, and prints paper / ours / difference as
Markdown. A cell is one run of `launch.main` with all its seeds, which resumes after an
interrupt. Options of `launch.main` apply to every cell, and rows and columns for other
values of such an option are omitted. Tables are data: `launch/papers/<paper>.json`.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from launch import ending
from launch.config import flagfile, flags, registry
from launch.machine import devices, processes
from launch.show import sheets
from launch.tables import cells, here


def _parse(argv: Sequence[str]) -> tuple[str, here.Options, dict[str, Any]]:
    """The table's name, this command's options, and those given for every cell."""
    if flags.HELP & {*argv[1:]}:
        flags.asked(argv, here.Options, __doc__)
    names, tables = [a for a in argv[1:] if not a.startswith("-")], cells.papers()
    if len(names) != 1:
        raise ValueError(
            "give one table, for instance cdkt.table1, and options as --name=value; "
            f"tables: {', '.join(tables)}"
        )
    own = {field.name: field for field in dataclasses.fields(here.Options)}
    known, kinds = here.options(cells.named("table", names[0], tables))
    known |= own
    values = flags.defined(known, kinds | registry.field_types(here.Options))
    rest = values([a for a in flagfile.expand(argv) if a not in names])
    if len(rest) > 1:
        raise ValueError(f"{rest[1]} is not a flag; options are written --name=value")
    given = {name: values[name].value for name in known if values[name].present}
    mine = {name: given.pop(name) for name in own if name in given}
    return names[0], here.Options(**mine), given


def _show(table: here.Table, output: str) -> None:
    """Prints the table as Markdown, and writes it to the file `output` unless ""."""
    text = sheets.markdown(table.shown())
    if output and processes.is_first():
        with ending.writing("output", output):
            pathlib.Path(output).write_text(text)
    processes.say(text, flush=True)


@ending.command
def command(argv: list[str]) -> None:
    """Runs the missing cells of a table and prints the table."""
    with ending.refused():
        name, asked, given = _parse(argv)
        devices.begin(given.get("distributed") or "")
        table = here.Table(name, given, asked)
    try:
        with ending.refused():
            for _ in table.fill():
                _show(table, asked.output)
            if asked.report and processes.is_first():
                table.write_page()
    except KeyboardInterrupt:
        flags.fail("interrupted; the same command continues", 130)


if __name__ == "__main__":
    command()
