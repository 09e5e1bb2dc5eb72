"""The page of a study: a picture and a table for each sheet."""

from collections.abc import Mapping, Sequence
from typing import Any

from launch.show import svg
from launch.studies import pictures, sheets
from launch.studies.sheets import Result

# Results of each sheet by its name
Results = Mapping[str, Sequence[Result]]


def page(
    study: Mapping[str, Any],
    results: Results,
    target: str,
    commands: Sequence[str],
    title: str = "",
) -> str:
    """The page as HTML.

    Args:
        study: From `tables.load`.
        results: The cells of the sheets to show.
        target: The chip whose compiler was asked, "" = none.
        commands: Commands that make the cells.
        title: Another title.
    """
    every = [one for found in results.values() for one in found]
    done = sum(one.done is not None for one in every)
    sections = [
        _section(study["sheets"][name], found, target)
        for name, found in results.items()
    ]
    return svg.render(
        "study.html",
        title=title or study["title"],
        setting=f"{done} of {len(every)} cells are finished.",
        notes=study["notes"],
        sections=sections,
        machines=sheets.measured_on(every),
        commands=commands,
    )


def _section(
    sheet: Mapping[str, Any], results: Sequence[Result], target: str
) -> dict[str, Any]:
    """A sheet's part of the page."""
    figures = []
    for name in pictures.panels(sheet, results):
        figure, axes = svg.figure(sheet["axis"], pictures.label(name, target))
        pictures.draw(axes, sheet, results, name)
        figures.append(svg.shown(figure, pictures.label(name, target)))
    colored = pictures.colors(results)
    return {
        "table": sheets.sheet(sheet, results, target),
        "figures": figures,
        "rows": [{"name": row, "color": color} for row, color in colored.items()],
    }
