"""Writes a page about runs: `python -m launch.report WORKDIR... --output=report.html`.

The self-contained HTML file shows which method is best and by how much, curves over
rounds, messages and seconds, the gain of each client, the settings that differ, and the
commands.
"""

import dataclasses
import pathlib

from fedjax_pfl.options import option
from launch import ending
from launch.config import flags
from launch.show import page


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of this command."""

    output: str = option("report.html", "file of the page")
    control: str = option("", "run or algorithm to compare with; default the first")
    title: str = option("", "the page's title")


@ending.command
def command(argv: list[str]) -> None:
    """Writes a page about runs."""
    with ending.refused():
        asked, folders, _ = flags.asked(argv, Options, __doc__)
        if not folders:
            raise ValueError("give the folders of one or more finished runs")
        entries = page.read([pathlib.Path(folder) for folder in folders])
        text = page.page(entries, asked.control, title=asked.title)
    with ending.writing("output", asked.output):
        page.write(asked.output, text)
    print(asked.output)


if __name__ == "__main__":
    command()
