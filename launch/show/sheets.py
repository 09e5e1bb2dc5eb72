"""Tables as texts, and as Markdown."""

from typing import NamedTuple


class Grid(NamedTuple):
    """Texts in rows of (name, a text for every head).

    `scenario` is empty for a grid of all scenarios, and if `title` names it.
    """

    scenario: str
    title: str
    heads: list[str]
    rows: list[tuple[str, list[str]]]


class Sheet(NamedTuple):
    """A table's title, notes and grids."""

    title: str
    notes: list[str]
    grids: list[Grid]


def markdown(sheet: Sheet) -> str:
    """A sheet as Markdown."""
    lines = [f"### {sheet.title}", "", *sheet.notes]
    for grid in sheet.grids:
        subject = f"**{grid.scenario}**, " if grid.scenario else ""
        lines += ["", f"{subject}{grid.title}", ""]
        lines.append("| | " + " | ".join(grid.heads) + " |")
        lines.append("|---|" + "---|" * len(grid.heads))
        lines += [f"| {name} | " + " | ".join(row) + " |" for name, row in grid.rows]
    return "\n".join(lines) + "\n"
