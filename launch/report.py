"""Writes a page about runs: `python -m launch.report WORKDIR... --output=report.html`.

The folder of a study (`launch.study`) gives the page of its finished cells. A name that
ends in `.md` gives its table and first sentences, as Markdown.

The self-contained HTML file shows which method is best and by how much, curves over
rounds, messages and seconds, the gain of each client, the settings that differ, and the
commands.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from fedjax_pfl.options import option, without_effect
from launch import ending
from launch.config import flags
from launch.show import page, svg
from launch.tables import protocol, store, study


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of this command."""

    output: str = option("report.html", "file of the page, or .md for its table")
    control: str = option(
        "", "run or algorithm to compare with; default the first, of a study its own"
    )
    title: str = option("", "the page's title")
    setting: str = option(
        "", "setting of a study whose runs the page describes; default its first"
    )


@ending.command
def command(argv: list[str]) -> None:
    """Writes a page about runs."""
    with ending.refused():
        asked, folders, _ = flags.asked(argv, Options, __doc__)
        if not folders:
            raise ValueError("give the folders of one or more finished runs")
        text = _text([pathlib.Path(folder) for folder in folders], asked)
    with ending.writing("output", asked.output):
        svg.write(asked.output, text)
    print(asked.output)


def _text(paths: Sequence[pathlib.Path], asked: Options) -> str:
    """The page about runs or a study, or its table as Markdown."""
    is_table = asked.output.endswith(".md")
    if not asked.output.endswith((".md", ".html", ".htm")):
        raise ValueError(
            f"--output={asked.output}: expected a name that ends in .html, or in .md"
        )
    if is_table and asked.title:
        raise ValueError(_unused("title", asked, "a name that ends in .html"))
    if len(paths) == 1 and protocol.is_of_methods(paths[0]):
        methods = protocol.opened(paths[0])
        if is_table and asked.setting:
            raise ValueError(_unused("setting", asked, "a name that ends in .html"))
        if is_table:
            return methods.table(control=asked.control or None).to_markdown()
        if asked.control:
            raise ValueError(_unused("control", asked, "a name that ends in .md"))
        return methods.page(asked.setting, asked.title)
    if asked.setting:
        raise ValueError(
            f"--setting={asked.setting} is of a study (launch.study --table); omit it"
        )
    if len(paths) == 1 and store.is_study(paths[0]):
        if asked.control:
            raise ValueError(
                f"--control={asked.control}: a study's tables name what they compare "
                "with; omit it"
            )
        cells = study.Study("", paths[0])
        return "\n".join(cells.tables()) if is_table else cells.page(asked.title)
    entries = page.read(paths)
    if is_table:
        return page.markdown(entries, asked.control)
    return page.page(entries, asked.control, title=asked.title)


def _unused(name: str, asked: Options, wanted: str) -> str:
    """The line about an option without effect on such an output."""
    return without_effect(name, getattr(asked, name), "output", asked.output, wanted)


if __name__ == "__main__":
    command()
