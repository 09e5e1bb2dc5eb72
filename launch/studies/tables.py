"""Studies as data, `launch/studies/<study>.json`, and their cells.

A study has sheets, one for each axis. A sheet has values of its axis and rows, and each
row at each value is a cell. What a cell does is put together from parts: that of the
study (`common`), of the sheet, of the value, of the row, and of the cell alone (`cells`
of a sheet, by "ROW at VALUE"). A later part wins; `options` and `data` are merged.

`seconds` are those expected of a cell on two quiet cores, and `times` is a factor on
them. A row has the values in `only`, by default all, and those that `cells` names.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import algorithms
from launch.config import limits, registry, resolve
from launch.papers import tables as papers

STUDIES = pathlib.Path(__file__).parent

# What a cell does:
# rounds: it times rounds of a run on drawn examples;
# loop, torch: it times the same with one client after another, in JAX or PyTorch;
# devices: it runs on fake devices and compares with one device;
# run: it trains and evaluates, as `launch.main` does;
# estimate: it asks a chip's compiler about the rounds.
HOWS = ("rounds", "loop", "torch", "devices", "run", "estimate")

# The parts of a cell, and whether they decide its result
_PARTS = {
    "how": True,
    "options": True,
    "data": True,
    "rounds": True,
    "repeats": True,
    "processes": True,
    "seconds": False,
    "times": False,
    "only": False,
    "estimated": False,
}


class Cell(NamedTuple):
    """A cell of a study.

    Attributes:
        sheet, row, value: Its place.
        settings: What decides its result: `how`, `options`, `data`, `rounds`,
            `repeats`, `processes`, and of an estimate `target`.
        seconds: Expected, on two quiet cores.
        is_estimated: Whether a chip's compiler is asked about it too.
    """

    sheet: str
    row: str
    value: str
    settings: dict[str, Any]
    seconds: float
    is_estimated: bool = False

    @property
    def how(self) -> str:
        """What it does, one of `HOWS`."""
        return self.settings["how"]

    @property
    def name(self) -> str:
        """Its place as a path."""
        names = [papers.slug(one).replace("/", "-") for one in (self.row, self.value)]
        target = self.settings.get("target", "").replace(":", "-")
        return "/".join((self.sheet, ".".join([*names, target] if target else names)))

    def __str__(self) -> str:
        target = self.settings.get("target", "")
        what = f", estimate for {target}" if target else ""
        return f"{self.sheet}: {self.row} at {self.value}{what}"

    def estimate(self, target: str) -> "Cell":
        """The cell that asks the compiler of a chip about the same rounds."""
        kept = {name: self.settings[name] for name in ("options", "data")}
        settings = {"how": "estimate", "target": target} | kept
        return self._replace(settings=settings, is_estimated=False)


def studies() -> dict[str, dict[str, Any]]:
    """Every study by name."""
    paths = sorted(STUDIES.glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def load(name: str) -> dict[str, Any]:
    """The study of a name.

    Raises:
        ValueError: there is no such study. The message lists all studies.
    """
    known = studies()
    if name not in known:
        hint = limits.nearest(name, known)
        raise ValueError(f"no study {name}: expected one of {', '.join(known)}{hint}")
    return known[name]


def cells(study: Mapping[str, Any], sheet: str = "") -> list[Cell]:
    """The cells of a study.

    Args:
        study: From `load`.
        sheet: Names of sheets separated by commas, empty = all.

    Raises:
        ValueError: there is no such sheet, or a cell is no configuration.
    """
    found = []
    for name in papers.chosen("part", sheet, study["sheets"]):
        found += _of_sheet(study, name)
    for cell in found:
        _check(cell)
    return found


def _of_sheet(study: Mapping[str, Any], name: str) -> Iterator[Cell]:
    """The cells of a sheet, one value after another."""
    sheet = study["sheets"][name]
    alone = sheet.get("cells", {})
    for value, of_value in sheet["values"].items():
        for row, of_row in sheet["rows"].items():
            own = alone.get(f"{row} at {value}")
            if own is None and value not in of_row.get("only", sheet["values"]):
                continue
            common = study["common"], sheet.get("common", {})
            part = _merged(name, *common, of_value, of_row, own or {})
            settings = {key: part[key] for key, decides in _PARTS.items() if decides}
            yield Cell(
                name,
                row,
                value,
                {key: one for key, one in settings.items() if one is not None},
                (part["seconds"] or 0) * (part["times"] or 1),
                bool(part["estimated"]) and part["how"] == "rounds",
            )


def _merged(sheet: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = dict.fromkeys(_PARTS)
    for part in parts:
        for key, value in part.items():
            if key not in _PARTS:
                raise ValueError(
                    f"sheet {sheet}: {key!r} is no part of a cell; expected one of "
                    f"{', '.join(_PARTS)}"
                )
            out[key] = (out[key] or {}) | value if isinstance(value, dict) else value
    return out


def _check(cell: Cell) -> None:
    """Refuses a cell that could not run, before any cell runs."""
    options = cell.settings["options"]
    try:
        limits.check_one_of("how", cell.how, HOWS)
        known = registry.fields_of(options["algo"])
        for name in options:
            if name not in known:
                raise ValueError(registry.unknown_option(name, options["algo"]))
        _, hparams = resolve.configure(options)
        other = registry.departure(options["algo"], vars(hparams))
        is_named = papers.slug(cell.row) in algorithms.ALGORITHMS
        if other is not None and is_named and papers.slug(cell.row) != other.name:
            raise ValueError(
                f"{other.flags} is the method {other.name}; rename the row"
            )
    except ValueError as error:
        raise ValueError(f"{cell}: {error}") from error
