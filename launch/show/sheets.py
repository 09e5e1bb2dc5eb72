"""Tables as texts, and as Markdown."""

from collections.abc import Iterable, Sequence
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


def side_by_side(sheet: Sheet) -> Sheet:
    """A sheet of a grid for each scenario, as one of a grid for each of their heads.

    There scenarios are rows and the names of the rows before are heads. A head without
    a number is a note instead.
    """
    names = list(dict.fromkeys(name for grid in sheet.grids for name, _ in grid.rows))
    notes, grids = list(sheet.notes), []
    for head in dict.fromkeys(head for grid in sheet.grids for head in grid.heads):
        rows = []
        for grid in sheet.grids:
            if head in grid.heads:
                place = grid.heads.index(head)
                cells = {name: texts[place] for name, texts in grid.rows}
                rows.append((grid.scenario, [cells.get(name, "–") for name in names]))
        every = [text for _, texts in rows for text in texts]
        if any(sign.isdigit() for text in every for sign in text):
            grids.append(Grid("", f"{head}, by {sheet.grids[0].title}", names, rows))
        else:
            reasons = dict.fromkeys(text for text in every if text != "–")
            notes.append(f"{head}: {', '.join(reasons) or 'not known'}.")
    return Sheet(sheet.title, notes, grids)


def lines(heads: Sequence[str], rows: Iterable[tuple[str, list[str]]]) -> list[str]:
    """The lines of a grid in Markdown."""

    def cells(texts: Sequence[str]) -> str:
        escaped = (" ".join(one.split("\n")) for one in texts)
        escaped = (one.replace("|", r"\|").replace("<", "&lt;") for one in escaped)
        return "".join(f" {one} |" for one in escaped)

    body = [f"|{cells([name, *texts])}" for name, texts in rows]
    return [f"| |{cells(heads)}", "|---|" + "---|" * len(heads), *body]


def markdown(sheet: Sheet) -> str:
    """A sheet as Markdown."""
    out = [f"### {sheet.title}", "", *sheet.notes]
    for grid in sheet.grids:
        subject = f"**{grid.scenario}**, " if grid.scenario else ""
        out += ["", f"{subject}{grid.title}", "", *lines(grid.heads, grid.rows)]
    return "\n".join(out) + "\n"
