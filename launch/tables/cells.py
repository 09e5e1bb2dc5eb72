"""Sheets as data, `launch/papers/*.json` and `launch/studies/*.json`, and their cells.

A sheet has rows, such as methods, and values: those of an axis, or a paper's scenarios.
A row at a value is a cell, put together from parts: `common` of the file and of the
sheet, the value's part, the row's, and that of the single cell, named "ROW at VALUE" in
`cells` (in a paper's sheet also in each of its `datasets`). A later part wins;
`options` and `data` are merged.

A row has the values in `only`, by default all, and those that `cells` names. Its option
`teacher` may name another row: the cell's teacher is the model of that row at the same
value, or at the first value that the other row has. `seconds` are expected on two quiet
cores, and `times` is a factor on them. `paper` has one number of the paper for each
metric: a mean, or a mean and a standard deviation.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import algorithms
from data import files
from fedjax_pfl import levels
from fedjax_pfl import options as options_lib
from launch.config import presets, registry, resolve

PAPERS = pathlib.Path(__file__).parents[1] / "papers"
STUDIES = PAPERS.with_name("studies")

# What a cell does: train and evaluate as `launch.main` (run), time rounds on generated
# examples (rounds) or the same with one client after another in JAX or PyTorch (loop,
# torch), compare fake devices with one (devices), ask a chip's compiler (estimate)
HOWS = ("run", "rounds", "loop", "torch", "devices", "estimate")

# Data sets that stand for the one of a paper -> its name in the tables
ALIKE = {"mnist_5k": "mnist", "emnist/byclass": "femnist"}

# The parts of a cell that decide its result, and all parts
_SETTINGS = ("how", "options", "data", "rounds", "repeats", "processes")
_PARTS = (*_SETTINGS, "seconds", "times", "only", "estimated", "paper")

Sheet = Mapping[str, Any]
Number = float | list[float] | None  # of a paper


class Cell(NamedTuple):
    """A cell of a sheet.

    Attributes:
        sheet, row, value: Its place.
        settings: What decides its result: `options`, and for a cell that runs in a
            child process `how`, `data`, `rounds`, `repeats`, `processes` and `target`.
        seconds: Expected on two quiet cores.
        is_estimated: Whether a chip's compiler also estimates it.
        paper: The paper's number for each metric, None = it has none.
        teacher: (row, value) of the cell whose model file it needs.
    """

    sheet: str
    row: str
    value: str
    settings: dict[str, Any]
    seconds: float = 0.0
    is_estimated: bool = False
    paper: list[Number] | None = None
    teacher: tuple[str, str] | None = None

    @property
    def place(self) -> tuple[str, str]:
        return self.row, self.value

    @property
    def options(self) -> dict[str, Any]:
        """Its options; some may belong only to the algorithms of other rows."""
        return self.settings["options"]

    @property
    def how(self) -> str:
        """One of `HOWS`."""
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
        """A cell in which the compiler of chip `target` estimates the same rounds."""
        kept = {name: self.settings[name] for name in ("options", "data")}
        settings = {"how": "estimate", "target": target} | kept
        return self._replace(settings=settings, seconds=seconds, is_estimated=False)


def slug(text: str) -> str:
    """A row's name as part of a path."""
    return "".join(c for c in text.lower().replace(" ", "_") if c not in "=,:*()%")


def read(path: pathlib.Path) -> dict[str, Any]:
    """A file of sheets, each with its name and what its cells have in common."""
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
    """The table or study `name`; the ValueError for an unknown one lists all names."""
    if name not in known:
        hint = options_lib.nearest(name, known)
        raise ValueError(f"no {kind} {name}: expected one of {', '.join(known)}{hint}")
    return known[name]


def merged(sheet: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the parts of a cell and the objects in them; later ones win."""
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
    """The options that the cell's algorithm has, without those of other rows."""
    has = registry.fields_of(options["algo"])
    return {name: value for name, value in options.items() if name in has}


def chosen(flag: str, wanted: str, names: Sequence[str]) -> list[str]:
    """The names in a comma-separated flag, all if it is empty."""
    found = wanted.split(",") if wanted else list(names)
    for name in found:
        options_lib.check_one_of(flag, name, names)
    return found


def _of_value(
    parts: Mapping[str, Mapping[str, Any]], names: list[str], flag: str, value: Any
) -> list[str]:
    """The rows or values with `value` for a flag, or without the flag."""
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
    given: Mapping[str, Any] = {},
) -> list[Cell]:
    """All requested cells and their teachers, ordered by value and row.

    Args:
        sheet: One sheet of `read`.
        dataset: The data set of a paper's table; `mnist_5k` has the numbers and
            settings of `mnist`.
        value, row: Names separated by commas, empty = all.
        given: Options of every cell.

    Raises:
        ValueError: a name or an option belongs to no cell, or a cell could not run.
    """
    known = ALIKE.get(dataset, dataset)
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
        # An additional teacher may have other values than the given ones.
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
    found = teachers_first(asked, cell)
    names, lines = [*names, *values], [*lines, *rows]
    found.sort(key=lambda one: (names.index(one.value), lines.index(one.row)))
    has_any = set().union(*map(registry.fields_of, algorithms_of(sheet)))
    for one in found:
        _check(one, has_any, given)
    return found


def teachers_first(
    asked: Sequence[Cell], cell: Callable[[str, str], Cell]
) -> list[Cell]:
    """The cells, each once and after its teacher's; `cell` makes one by its place."""
    found: dict[tuple[str, str], Cell] = {}

    def add(one: Cell) -> None:
        if one.teacher is not None and one.teacher not in found:
            add(cell(*one.teacher))
        found.setdefault(one.place, one)

    for one in asked:
        add(one)
    return list(found.values())


def _check(cell: Cell, has_any: Set[str], given: Mapping[str, Any]) -> None:
    """Refuses what the options of a cell rule out, before any cell runs.

    `has_any` are the options of all algorithms in the sheet, and `given` those of every
    cell. Neither these nor the sheet may make a row a method other than its name says.
    """
    options, algo = cell.options, cell.options["algo"]
    with files.named(str(cell)):
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
