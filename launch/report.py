"""One page about runs: `python -m launch.report WORKDIR... [--output=report.html]`.

A self-contained HTML file, to show or to send: which method answers best and by how
much, curves over rounds, messages and seconds, what each client gains, the settings
that differ, and the commands. It loads nothing from anywhere.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from absl import flags as absl_flags

from launch import ending
from launch.config import flags
from launch.show import page


def command(argv: Sequence[str] | None = None) -> None:
    """The command."""
    with ending.reported():
        _command(list(sys.argv if argv is None else argv))


def _command(argv: Sequence[str]) -> None:
    values = absl_flags.FlagValues()
    for name, default, text in (
        ("output", "report.html", "file of the page"),
        ("control", "", "run or algorithm that others are compared with; the first"),
        ("title", "", "the page's title"),
    ):
        absl_flags.DEFINE_string(name, default, text, flag_values=values)
    try:
        folders = flags.beside(argv, values, __doc__)
        if not folders:
            raise ValueError("give the folders of one or more finished runs")
        entries = page.read([pathlib.Path(folder) for folder in folders])
        text = page.page(entries, values.control, title=values.title)
    except (ValueError, absl_flags.Error) as error:
        flags.fail(error)
    try:
        page.write(values.output, text)
    except OSError as error:
        flags.fail(f"--output={values.output}: {error}", 1)
    print(values.output)


if __name__ == "__main__":
    command()
