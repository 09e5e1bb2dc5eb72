"""A study with its folder: runs cells, and shows what is finished and what is left."""

import contextlib
import importlib.util
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from launch.folder import finished
from launch.show import sheets
from launch.tables import cells, child, results, store
from launch.tables.cells import Cell
from launch.tables.results import Result

# What a cell does -> the package that it needs, and the text of a table without it
NEEDS = {
    "torch": ("torch", "torch is not installed"),
    "estimate": ("libtpu", "pip install 'fedjax_pfl[tpu]'"),
}
TARGET = "tpu:v5e"
ESTIMATE_SECONDS = 15
REPORT = "report.html"


class Study:
    """A study with its folder; `wanted` are its requested cells and their estimates."""

    def __init__(
        self, name: str, folder: Any = "", part: str = "", target: str = TARGET
    ):
        """Reads the study and its finished cells; ValueError if one is wrong.

        `name` is the study, empty = that in `folder`; an empty `folder` is that of the
        name; `part` has sheets separated by commas, empty = all; `target` is the chip
        of the estimates, empty = none.
        """
        studies = cells.studies()
        if name:
            cells.named("study", name, studies)
        path = pathlib.Path(folder or f"runs/study/{name}")
        self.folder = store.Folder(path, name)
        self.name, self.target = self.folder.name, target
        self.table = cells.named("study", self.name, studies)
        every = {n: cells.cells(one) for n, one in self.table["sheets"].items()}
        self.sheets = cells.chosen("part", part, every)
        self.cells = [cell for n in self.sheets for cell in every[n]]
        self._every = self._with_estimates([c for one in every.values() for c in one])
        self.wanted = self._with_estimates(self.cells)
        hows = {cell.how for cell in self.wanted}
        self.absent = {
            how: reason
            for how, (package, reason) in NEEDS.items()
            if how in hows and importlib.util.find_spec(package) is None
        }
        self.results()  # names a damaged file before anything runs

    def _with_estimates(self, found: Sequence[Cell]) -> list[Cell]:
        return [one for cell in found for one in (cell, self._estimate(cell)) if one]

    def _estimate(self, cell: Cell) -> Cell | None:
        """The estimate that belongs to a cell, None if the sheet has none."""
        has_one = cell.is_estimated and self.target
        return cell.estimate(self.target, ESTIMATE_SECONDS) if has_one else None

    def left(self) -> list[Cell]:
        """The cells that have not run, but could."""
        return [
            cell
            for cell in self.wanted
            if cell.how not in self.absent and self.folder.get(cell) is None
        ]

    def equal(self, cell: Cell) -> dict[str, Any] | None:
        """The result of another finished cell of the study with the same settings.

        Skips damaged files; an error names them when their own cell is requested.
        """
        for one in self._every:
            if one.settings == cell.settings and one.name != cell.name:
                with contextlib.suppress(ValueError):
                    if done := self.folder.get(one):
                        return done
        return None

    def computed(self, left: Sequence[Cell]) -> list[Cell]:
        """The cells of `left` that equal no finished cell and no earlier one."""
        out: list[Cell] = []
        for cell in left:
            is_new = all(one.settings != cell.settings for one in out)
            if is_new and self.equal(cell) is None:
                out.append(cell)
        return out

    def lines(self, left: Sequence[Cell], computed: Sequence[Cell]) -> Iterator[str]:
        """A line for each cell: whether it is finished."""
        for cell in self.wanted:
            if cell in left:
                state = "to run" if cell in computed else "as another cell"
            else:
                is_finished = self.folder.get(cell) is not None
                state = "finished" if is_finished else self.absent[cell.how]
            yield f"{str(cell):<70} {cell.seconds:6.0f} s  {state}"

    def run(self, left: Sequence[Cell]) -> int:
        """Runs the cells that are left, each in its own process, and counts failures.

        Raises an OSError if a result cannot be written, and passes on a
        KeyboardInterrupt after the present process has ended.
        """
        failed = 0
        self.folder.begin()
        for index, cell in enumerate(left):
            found = self.equal(cell)
            try:
                done = found or self.made(cell)
            except child.Failed as error:
                failed += 1
                print(f"note: {cell} failed: {error}", file=sys.stderr, flush=True)
                continue
            self.folder.put(cell, done)
            how = "as another cell" if found else f"{done['cell_seconds']:.0f} s"
            print(f"{index + 1} of {len(left)}  {cell}  {how}", flush=True)
        return failed

    def made(self, cell: Cell) -> dict[str, Any]:
        """Runs a cell in its own process (`child.Failed`, KeyboardInterrupt)."""
        settings = cell.settings | {"how": cell.how}
        if cell.how == "run":
            path = self.folder.path / "runs" / cell.name
            settings["folder"] = str(path.resolve())
        begin = time.perf_counter()
        # The compiler needs no chip, so a local chip stays free.
        given = {"JAX_PLATFORMS": "cpu"} if cell.how == "estimate" else None
        one = child.start("launch.tables.kinds", settings, given, is_leader=True)
        try:
            done = child.ended(one)
        except KeyboardInterrupt:
            child.stop(one)
            raise
        return done | {"cell_seconds": round(time.perf_counter() - begin, 1)}

    def results(self) -> dict[str, list[Result]]:
        """The results by sheet."""
        return {
            name: [self._result(cell) for cell in self.cells if cell.sheet == name]
            for name in self.sheets
        }

    def _result(self, cell: Cell) -> Result:
        estimate, reason, asked = None, results.NOTHING, self._estimate(cell)
        if asked:
            estimate = self.folder.get(asked)
            reason = "" if estimate else self.absent.get("estimate", "missing")
        missing = self.absent.get(cell.how, "")
        return Result(cell, self.folder.get(cell), estimate, missing, reason)

    def tables(self) -> list[str]:
        """The table of each sheet as Markdown."""
        return [
            sheets.markdown(results.sheet(self.table["sheets"][n], found, self.target))
            for n, found in self.results().items()
        ]

    def page(self, title: str = "") -> str:
        """The page as HTML."""
        from launch.tables import pictures  # slow imports, jinja2 and matplotlib

        command = f"fedjax-pfl study {self.name}"
        if len(self.sheets) < len(self.table["sheets"]):
            command += f" --part={','.join(self.sheets)}"
        found = self.results()
        return pictures.page(self.table, found, self.target, [command], title)

    def write(self) -> None:
        """Writes the page, the tables and the pictures, or raises an OSError."""
        from launch.show import svg  # slow imports, jinja2 and matplotlib
        from launch.tables import pictures

        path = self.folder.path
        finished.write_text(path / "tables.md", "\n".join(self.tables()))
        for name, found in self.results().items():
            drawn = pictures.picture(self.table, name, found, self.target)
            if drawn is not None:
                drawn.savefig(path / f"{name}.png", dpi=110)
                print(path / f"{name}.png")
        svg.write(path / REPORT, self.page())
        print(path / REPORT)
