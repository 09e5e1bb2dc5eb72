"""Writes a page about runs: `python -m launch.report WORKDIR... --output=report.html`.

The folder of a study (`launch.study`) gives the page of its finished cells.

The self-contained HTML file shows which method is best and by how much, curves over
rounds, messages and seconds, the gain of each client, the settings that differ, and the
commands.
"""

import dataclasses
import pathlib

from fedjax_pfl.options import option
from launch import ending
from launch.config import flags
from launch.show import page, svg
from launch.tables import protocol, store, study


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
        paths = [pathlib.Path(folder) for folder in folders]
        if len(paths) == 1 and protocol.is_study(paths[0]):
            text = protocol.opened(paths[0]).page(title=asked.title)
        elif len(paths) == 1 and store.is_study(paths[0]):
            text = study.Study("", paths[0]).page(asked.title)
        else:
            text = page.page(page.read(paths), asked.control, title=asked.title)
    with ending.writing("output", asked.output):
        svg.write(asked.output, text)
    print(asked.output)


if __name__ == "__main__":
    command()
