"""Sheets as data, `launch/papers/*.json` and `launch/studies/*.json`, and their cells.

A sheet has rows, such as methods, and values: those of an axis, or a paper's scenarios.
A row at a value is a cell. What a cell does is put together from parts: `common` of the
file and of the sheet, the value's part, the row's, and that of the cell alone, which
`cells` names as "ROW at VALUE". A later part wins; `options` and `data` are merged. A
paper's sheet has parts of single cells for each of its `datasets` too.

A row has the values in `only`, by default all, and those that `cells` names. Its option
`teacher` may name the row whose model is its teacher: that of the same value, or of the
first value that the other row has. `seconds` are those expected of a cell on two quiet
cores, and `times` is a factor on them. `paper` are the paper's numbers, one for each
metric: a mean, or a mean and a standard deviation.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import algorithms
from fedjax_pfl import levels
from fedjax_pfl import options as options_lib
from launch.config import limits, presets, registry, resolve

PAPERS = pathlib.Path(__file__).parents[1] / "papers"
STUDIES = PAPERS.with_name("studies")

# What a cell does:
# rounds: it times rounds of a run on drawn examples;
# loop, torch: it times the same with one client after another, in JAX or PyTorch;
# devices: it runs on fake devices and compares with one device;
# run: it trains and evaluates, as `launch.main` does;
# estimate: it asks a chip's compiler about the rounds.
HOWS = ("run", "rounds", "loop", "torch", "devices", "estimate")

# The parts of a cell that decide its result, and the others
_SETTINGS = ("how", "options", "data", "rounds", "repeats", "processes")
_PARTS = (*_SETTINGS, "seconds", "times", "only", "estimated", "paper")

Sheet = Mapping[str, Any]


class Cell(NamedTuple):
    """A cell of a sheet.

    Attributes:
        sheet, row, value: Its place.
        settings: What decides its result: `options`, and of a cell that does not run
            here `how`, `data`, `rounds`, `repeats`, `processes` and `target`.
        seconds: Expected, on two quiet cores.
        is_estimated: Whether a chip's compiler is asked about it too.
        paper: The paper's number for each metric, None = it has none.
        teacher: (row, value) of the cell whose model it needs as a file.
    """

    sheet: str
    row: str
    value: str
    settings: dict[str, Any]
    seconds: float = 0.0
    is_estimated: bool = False
    paper: list[float | list[float] | None] | None = None
    teacher: tuple[str, str] | None = None

    @property
    def place(self) -> tuple[str, str]:
        """(row, value)."""
        return self.row, self.value

    @property
    def options(self) -> dict[str, Any]:
        """Its options, among which may be some of other rows only."""
        return self.settings["options"]

    @property
    def how(self) -> str:
        """What it does, one of `HOWS`."""
        return self.settings.get("how", "run")

    @property
    def name(self) -> str:
        """Its place as a path."""
        names = [slug(one).replace("/", "-") for one in self.place]
        target = self.settings.get("target", "").replace(":", "-")
        return "/".join((self.sheet, ".".join([*names, target] if target else names)))

    def __str__(self) -> str:
        target = self.settings.get("target", "")
        what = f", estimate for {target}" if target else ""
        return f"{self.sheet}: {self.row} at {self.value}{what}"

    def estimate(self, target: str, seconds: float) -> "Cell":
        """The cell that asks the compiler of a chip about the same rounds."""
        kept = {name: self.settings[name] for name in ("options", "data")}
        settings = {"how": "estimate", "target": target} | kept
        return self._replace(settings=settings, seconds=seconds, is_estimated=False)


def slug(text: str) -> str:
    """A row's name as part of a path."""
    return "".join(c for c in text.lower().replace(" ", "_") if c not in "=,:*()%")


def read(path: pathlib.Path) -> dict[str, Any]:
    """A file of sheets, each with its name and all that its cells have in common."""
    file = json.loads(path.read_text())
    for name, sheet in file["sheets"].items():
        sheet["common"] = merged(name, file.get("common", {}), sheet.get("common", {}))
        sheet["name"] = name
    return file


def papers() -> dict[str, Sheet]:
    """Every paper's table by the name `<paper>.<table>`."""
    return {
        f"{path.stem}.{name}": sheet
        for path in sorted(PAPERS.glob("*.json"))
        for name, sheet in read(path)["sheets"].items()
    }


def studies() -> dict[str, dict[str, Any]]:
    """Every study by its name."""
    return {path.stem: read(path) for path in sorted(STUDIES.glob("*.json"))}


def named(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """The table or the study of a name.

    Raises:
        ValueError: there is none. The message lists all names.
    """
    if name not in known:
        hint = limits.nearest(name, known)
        raise ValueError(f"no {kind} {name}: expected one of {', '.join(known)}{hint}")
    return known[name]


def merged(sheet: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a cell as one: a later one wins, and inner objects are merged.

    Raises:
        ValueError: one line: a name that no part has.
    """
    out: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key not in _PARTS:
                expected = f"expected one of {', '.join(_PARTS)}"
                raise ValueError(f"sheet {sheet}: unknown part {key!r}; {expected}")
            out[key] = out.get(key, {}) | value if isinstance(value, dict) else value
    return out


def algorithms_of(sheet: Sheet) -> list[str]:
    """The algorithms of a sheet's cells, those of its rows first."""
    single = sheet.get("cells", {})
    named = *sheet["rows"].values(), *sheet["values"].values(), *single.values()
    parts = [part.get("options", {}) for part in (*named, sheet["common"])]
    return list(dict.fromkeys(part["algo"] for part in parts if "algo" in part))


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a cell's algorithm has, as its sheet may name others."""
    has = registry.fields_of(options["algo"])
    return {name: value for name, value in options.items() if name in has}


def chosen(flag: str, wanted: str, names: Sequence[str]) -> list[str]:
    """The names of a comma-separated flag, all if it is empty."""
    found = wanted.split(",") if wanted else list(names)
    for name in found:
        options_lib.check_one_of(flag, name, names)
    return found


def _of_value(
    parts: Mapping[str, Mapping[str, Any]], names: list[str], flag: str, value: Any
) -> list[str]:
    """The rows or values for `value` of a flag, or for any value of it."""
    has = {name: parts[name].get("options", {}).get(flag) for name in names}
    left = [name for name in names if has[name] in (None, value)]
    if not left:
        every = ", ".join(dict.fromkeys(map(str, has.values())))
        raise ValueError(f"--{flag}={value}: this table has {every} for it; omit it")
    return left


def cells(
    sheet: Sheet,
    dataset: str = "",
    value: str = "",
    row: str = "",
    given: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Every cell asked for, and those of the teachers of these, by value and row.

    Args:
        sheet: Of a file, see `read`.
        dataset: The data set of a paper's table; `mnist_5k` takes the numbers and
            settings of `mnist`.
        value, row: Names separated by commas, empty = all.
        given: Options of every cell.

    Raises:
        ValueError: one line: a name or an option that no cell has, or a cell that could
            not run.
    """
    given = given or {}
    known = "mnist" if dataset == "mnist_5k" else dataset
    if known not in sheet.get("datasets", {"": {}}) and not sheet.get("any_dataset"):
        every = ", ".join(sheet["datasets"])
        raise ValueError(f"--dataset={dataset}: this table has {every}")
    values, rows = sheet["values"], sheet["rows"]
    names, lines = chosen("scenario", value, values), chosen("row", row, rows)
    for flag, one in given.items():
        names = _of_value(values, names, flag, one)
        lines = _of_value(rows, lines, flag, one)
        algos = [rows[line]["options"]["algo"] for line in lines]
        if not any(flag in registry.fields_of(algo) for algo in algos):
            raise ValueError(f"--{flag}={one}: no row has this option")
    single = sheet.get("cells", {})
    alone = single | sheet.get("datasets", {}).get(known, {})

    def has(line: str, name: str) -> bool:
        return name in rows[line].get("only", values) or f"{line} at {name}" in single

    def cell(line: str, name: str) -> Cell:
        parts = values[name], rows[line], alone.get(f"{line} at {name}", {})
        part = merged(sheet["name"], sheet["common"], *parts)
        # A teacher that was not asked for may have other values than those given.
        own = merged(sheet["name"], *parts[:2]).get("options", {})
        options = part["options"] | {k: v for k, v in given.items() if k not in own}
        settings = {key: part[key] for key in _SETTINGS if key in part}
        settings["options"] = options | ({"dataset": dataset} if dataset else {})
        teacher, other = None, options.get("teacher")
        if other in rows:
            teacher = other, next(n for n in (name, *values) if has(other, n))
        seconds = part.get("seconds", 0) * part.get("times", 1)
        is_estimated = part.get("estimated", False) and part.get("how") == "rounds"
        place = sheet["name"], line, name
        return Cell(*place, settings, seconds, is_estimated, part.get("paper"), teacher)

    asked = [cell(line, name) for name in names for line in lines if has(line, name)]
    if not asked:
        left = dict.fromkeys(n for n in values for line in lines if has(line, n))
        raise ValueError(
            f"--row={row} has the scenarios {', '.join(left)} only, and not "
            f"{', '.join(names)}"
        )
    order = [*dict.fromkeys([*names, *values])], [*dict.fromkeys([*lines, *rows])]
    found = teachers_first(asked, cell)
    found.sort(key=lambda one: (order[0].index(one.value), order[1].index(one.row)))
    has_any = set().union(*map(registry.fields_of, algorithms_of(sheet)))
    for one in found:
        _check(one, has_any, given)
    return found


def teachers_first(
    asked: Sequence[Cell], cell: Callable[[str, str], Cell]
) -> list[Cell]:
    """Cells, each after that of its teacher and once; `cell` makes one by its place."""
    found: dict[tuple[str, str], Cell] = {}

    def add(one: Cell) -> None:
        if one.teacher is not None and one.teacher not in found:
            add(cell(*one.teacher))
        found.setdefault(one.place, one)

    for one in asked:
        add(one)
    return list(found.values())


def _check(cell: Cell, has_any: Set[str], given: Mapping[str, Any]) -> None:
    """Refuses a cell that could not run, before any cell runs.

    `has_any` are the options that any algorithm of the sheet has, and `given` those
    given for every cell. Neither these nor the sheet may make a row another method than
    its name says.
    """
    options, algo = cell.options, cell.options["algo"]
    try:
        options_lib.check_one_of("how", cell.how, HOWS)
        for name in options:
            if name not in has_any:
                raise ValueError(registry.unknown_option(name, algo))
        config, hparams = resolve.configure(known(options))
        if isinstance(hparams, levels.Levels):
            facts = {"algo": algo, "dataset": config.dataset}
            ruled = presets.values(config.preset, facts)["num_clients"]
            levels.assigned(hparams, config.num_clients or ruled)
        other, row = registry.departure(algo, vars(hparams)), slug(cell.row)
        if other is None:
            return
        is_other = row in algorithms.ALGORITHMS and row != other.name
        if is_other or other.options.keys() & given.keys():
            rows = "choose the other rows with --row" if given else "rename the row"
            raise ValueError(f"{other.flags} is the method {other.name}; {rows}")
    except ValueError as error:
        raise ValueError(f"{cell}: {error}") from error
