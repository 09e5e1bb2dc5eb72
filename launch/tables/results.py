"""The results of a study's cells: figures as numbers, as texts and as tables."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.show import sheets, words
from launch.tables.cells import Cell, Sheet


class Figure(NamedTuple):
    """How a figure of a cell is shown.

    Attributes:
        title: Its name with its unit.
        scale, form: The factor to that unit, and the format of a number.
        is_estimate: Whether it is estimated by a chip's compiler and not measured.
    """

    title: str
    scale: float = 1.0
    form: str = ",.3g"
    is_estimate: bool = False


FIGURES = {
    "seconds_per_round": Figure("ms a round", 1e3, ",.1f"),
    "client_updates_per_second": Figure("client updates/s", 1, ",.0f"),
    "state_bytes_per_device": Figure("MB of state a device", 1e-6, ",.3f"),
    "argument_bytes": Figure("MB of arguments a device", 1e-6, ",.1f"),
    "temporary_bytes": Figure("MB temporary", 1e-6, ",.2f"),
    "peak_memory_bytes": Figure("MB peak", 1e-6, ",.0f"),
    "compile_seconds": Figure("s compiling", 1, ",.1f"),
    "step_efficiency": Figure("real steps", 100, ".0f"),
    "padding_efficiency": Figure("real samples", 100, ".0f"),
    "client_chunk": Figure("chunk", 1, "d"),
    "all_gathers": Figure("all-gathers", 1, "d"),
    "all_reduces": Figure("all-reduces", 1, "d"),
    "collective_bytes": Figure("MB by collectives", 1e-6, ",.3f"),
    "difference": Figure("largest difference to one device", 1, ".1e"),
    "client_accuracy": Figure("Client (UA)", 100, ".1f"),
    "global_accuracy": Figure("Global", 100, ".1f"),
    "rounds": Figure("rounds", 1, ",d"),
    "minutes": Figure("minutes", 1, ",.1f"),
    "estimate.clients_side_by_side": Figure("clients side by side", 1, "d", True),
    "estimate.cycles_per_example": Figure("cycles an example", 1, ",.0f", True),
    "estimate.over_one_by_one": Figure("x over one by one", 1, ".2f", True),
    "estimate.temporary_bytes": Figure("MB temporary", 1e-6, ",.2f", True),
}
ESTIMATE = "estimate."
NOTHING = "–"


class Result(NamedTuple):
    """A cell with its results.

    Attributes:
        cell: The cell.
        done, estimate: The stored result of the cell and of a chip's compiler, None =
            missing.
        missing, no_estimate: Why each is missing, "" if nothing prevents it.
    """

    cell: Cell
    done: Mapping[str, Any] | None
    estimate: Mapping[str, Any] | None = None
    missing: str = ""
    no_estimate: str = ""

    def figure(self, name: str) -> Any:
        """A figure by its name in `FIGURES`, None if it is not known."""
        is_estimate = name.startswith(ESTIMATE)
        source = self.estimate if is_estimate else self.done
        return source and source["figures"].get(name.removeprefix(ESTIMATE))

    def number(self, name: str) -> float | None:
        """A figure in its unit, averaged over seeds; no metric of a diverged run."""
        value = self.figure(name)
        if isinstance(value, Mapping):
            value = None if self.figure("diverged") else value["mean"]
        return None if value is None else FIGURES[name].scale * value

    def text(self, name: str) -> str:
        """A figure as text, or why it is missing."""
        value, how = self.figure(name), FIGURES[name]
        if isinstance(value, Mapping):
            shown = words.mean_and_std(value, how.scale, digits=1)
            return words.diverged(self.figure("diverged")) or shown
        if value is not None:
            return format(value if how.scale == 1 else how.scale * value, how.form)
        if name.startswith(ESTIMATE):
            return self.no_estimate or (NOTHING if self.estimate else "missing")
        return NOTHING if self.done else self.missing or "missing"


def by_row(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of a sheet by row."""
    rows = dict.fromkeys(one.cell.row for one in results)
    return {row: [one for one in results if one.cell.row == row] for row in rows}


def sheet(sheet: Sheet, results: Sequence[Result], target: str) -> sheets.Sheet:
    """The table of a sheet: a grid for each row, with a line for each value.

    A column is shown if a value of the row has it. Estimates are those of the compiler
    of `target`; "" omits them.
    """
    hows = {name: FIGURES[name] for name in sheet["columns"]}
    heads = {
        name: how.title + f" ({target}, estimate)" * how.is_estimate
        for name, how in hows.items()
        if target or not how.is_estimate
    }
    grids = []
    for row, found in by_row(results).items():
        shown = [n for n in heads if any(one.text(n) != NOTHING for one in found)]
        body = [(one.cell.value, [one.text(n) for n in shown]) for one in found]
        grids.append(sheets.Grid(row, sheet["axis"], [heads[n] for n in shown], body))
    notes = [sheet["about"]]
    for value in dict.fromkeys(one.cell.value for one in results):
        hashes = {
            one.cell.row: one.figure("parameters_sha256")
            for one in results
            if one.cell.value == value and one.cell.how == "run"
        }
        equal = words.equal_parameters(hashes)
        notes += [f"note: at {value}, {line}." for line in equal]
    return sheets.Sheet(sheet["title"], notes, grids)


def measured_on(results: Sequence[Result]) -> list[str]:
    """The machines and versions that produced the cells, in words."""
    found: dict[str, int] = {}
    for one in results:
        for done in filter(None, (one.done, one.estimate)):
            machine, versions = done["machine"], done["versions"]
            text = f"{machine['cpu']}, {machine['cores']} cores"
            if machine["device"] != "cpu":
                text += f", {machine['devices']} x {machine['device']}"
            text += "; " + ", ".join(f"{k} {v}" for k, v in sorted(versions.items()))
            found[text] = found.get(text, 0) + 1
    return [f"{text} ({count} cells)" for text, count in found.items()]
