"""A study with its folder: what is finished, what is left, and what is shown."""

import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

from launch.folder import finished
from launch.show import sheets as show
from launch.studies import kept, sheets, tables

# What a cell does -> the package that it needs, and what a table says without it
NEEDS = {
    "torch": ("torch", "torch is not installed"),
    "estimate": ("libtpu", "pip install 'fedjax_pfl[tpu]'"),
}
TARGET = "tpu:v5e"
ESTIMATE_SECONDS = 15
REPORT = "report.html"


class Study:
    """A study with its folder and the cells asked for."""

    def __init__(
        self,
        name: str,
        folder: pathlib.Path | None = None,
        part: str = "",
        target: str = TARGET,
    ):
        """Reads the study and its finished cells.

        Args:
            name: The study, empty = that of the folder.
            folder: Its folder, None = by its name.
            part: Sheets, separated by commas, empty = all.
            target: The chip whose compiler is asked, empty = none.

        Raises:
            ValueError: one line about a name, the folder or a file in it.
        """
        if name:
            tables.load(name)
        self.folder = kept.Folder(folder or pathlib.Path("runs/study") / name, name)
        self.name, self.target = self.folder.name, target
        self.table = tables.load(self.name)
        self.cells = tables.cells(self.table, part)
        self._every = self._with_estimates(tables.cells(self.table, ""))
        hows = {cell.how for cell in self.wanted()}
        self.lacks = {
            how: reason
            for how, (package, reason) in NEEDS.items()
            if how in hows and importlib.util.find_spec(package) is None
        }
        self.results()  # so that a damaged file is named before anything runs

    def wanted(self) -> list[tables.Cell]:
        """The cells asked for, each with its estimate behind it."""
        return self._with_estimates(self.cells)

    def _with_estimates(self, cells: Sequence[tables.Cell]) -> list[tables.Cell]:
        out = []
        for cell in cells:
            out.append(cell)
            if cell.is_estimated and self.target:
                out.append(
                    cell.estimate(self.target)._replace(seconds=ESTIMATE_SECONDS)
                )
        return out

    def left(self) -> list[tables.Cell]:
        """The cells that have not run, but could."""
        return [
            cell
            for cell in self.wanted()
            if cell.how not in self.lacks and self.folder.get(cell) is None
        ]

    def alike(self, cell: tables.Cell) -> dict[str, Any] | None:
        """The result of a finished cell of the whole study with the same settings."""
        return self.folder.like(cell, self._every)

    def computed(self) -> list[tables.Cell]:
        """The cells of `left` whose result is not that of an equal cell."""
        out: list[tables.Cell] = []
        for cell in self.left():
            is_new = all(one.settings != cell.settings for one in out)
            if is_new and self.alike(cell) is None:
                out.append(cell)
        return out

    def result(self, cell: tables.Cell) -> sheets.Result:
        """What is known of a cell."""
        estimate, reason = None, sheets.NOTHING
        if cell.is_estimated and self.target:
            estimate = self.folder.get(cell.estimate(self.target))
            reason = "" if estimate else self.lacks.get("estimate", "missing")
        done, missing = self.folder.get(cell), self.lacks.get(cell.how, "")
        return sheets.Result(cell, done, estimate, missing, reason)

    def results(self) -> dict[str, list[sheets.Result]]:
        """What is known, by sheet."""
        names = dict.fromkeys(cell.sheet for cell in self.cells)
        return {
            name: [self.result(cell) for cell in self.cells if cell.sheet == name]
            for name in names
        }

    def shown(self, name: str) -> show.Sheet:
        """The table of a sheet."""
        return sheets.sheet(
            self.table["sheets"][name], self.results()[name], self.target
        )

    def page(self, title: str = "") -> str:
        """The page as HTML."""
        from launch.studies import page  # slow imports, jinja2 and matplotlib

        command = f"python -m launch.study {self.name} --folder={self.folder.path}"
        return page.page(self.table, self.results(), self.target, [command], title)

    def write(self) -> None:
        """Writes the page, the tables and the pictures into the folder.

        Raises:
            OSError: one cannot be written.
        """
        from launch.show import svg  # slow imports, jinja2 and matplotlib
        from launch.studies import pictures

        path, results = self.folder.path, self.results()
        texts = [show.markdown(self.shown(name)) for name in results]
        finished.write_text(path / "tables.md", "\n".join(texts))
        for name, found in results.items():
            drawn = pictures.picture(self.table["sheets"][name], found, self.target)
            if drawn is not None:
                drawn.savefig(path / f"{name}.png", dpi=110)
                print(path / f"{name}.png")
        svg.write(path / REPORT, self.page())
        print(path / REPORT)
