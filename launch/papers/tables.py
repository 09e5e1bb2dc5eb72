"""The papers' tables, `launch/papers/<paper>.json`, and their cells.

A row has the scenarios in `only`, by default all. Its `teacher` may name the row whose
model is its teacher: that of the same scenario, or where the other row lacks it, of the
first one that it has.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data import texts
from launch.config import limits, registry
from launch.show.sheets import Cell

PAPERS = pathlib.Path(__file__).parent


def tables() -> dict[str, dict[str, Any]]:
    """Every table by the name `<paper>.<table>`."""
    return {
        f"{path.stem}.{key}": value
        for path in sorted(PAPERS.glob("*.json"))
        for key, value in json.loads(path.read_text()).items()
    }


def load_table(name: str) -> dict[str, Any]:
    """The table `<paper>.<table>`.

    Raises:
        ValueError: there is no such table. The message lists all tables.
    """
    known = tables()
    if name not in known:
        raise ValueError(f"no table {name}: expected one of {', '.join(known)}")
    return known[name]


def of_dataset(
    table: Mapping[str, Any], dataset: str, masked_loss: str | None = None
) -> dict[str, Any]:
    """The table with the metrics of a data set: a text has no accuracies.

    With `masked_loss="chosen"` they are perplexities at the chosen positions.
    """
    if dataset not in texts.TEXTS:
        return dict(table)
    names = [name.replace("accuracy", "perplexity") for name in table["metrics"]]
    if masked_loss == "chosen":
        names = [name.replace("masked_", "") for name in names]
        names = [name.replace("perplexity", "masked_perplexity") for name in names]
        # The names of the server's model and of pooled clients are shorter.
        names = [name.removeprefix("global_").removesuffix("_pooled") for name in names]
        names = list(dict.fromkeys(names))
    return {**table, "metrics": names}


def chosen(flag: str, wanted: str, known: Sequence[str]) -> list[str]:
    """The names of a comma-separated flag, all if it is empty."""
    names = wanted.split(",") if wanted else list(known)
    for name in names:
        limits.check_one_of(flag, name, known)
    return names


def _of_value(
    parts: Mapping[str, Mapping[str, Any]], names: list[str], flag: str, value: Any
) -> list[str]:
    """The rows or columns for `value` of a flag, or for any value of it."""
    left = [n for n in names if parts[n].get(flag) in (None, value)]
    if not left:
        known = ", ".join(dict.fromkeys(str(parts[n][flag]) for n in names))
        raise ValueError(f"--{flag}={value}: this table has {known} for it; omit it")
    return left


def cells(
    table: Mapping[str, Any],
    dataset: str,
    scenario: str = "",
    row: str = "",
    given: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Every cell asked for, and those of the teachers of these.

    Args:
        table: From `load_table`.
        dataset: `mnist_5k` takes the numbers and settings of `mnist`.
        scenario, row: Names separated by commas, empty = all.
        given: Options of every cell.
    """
    given = dict(given or {})
    known = "mnist" if dataset == "mnist_5k" else dataset
    if known not in table["datasets"] and not table.get("any_dataset"):
        raise ValueError(
            f"--dataset={dataset}: this table has {', '.join(table['datasets'])}"
        )
    scenarios, every = table["scenarios"], table["rows"]
    names = chosen("scenario", scenario, scenarios)
    rows = chosen("row", row, every)
    for flag, value in given.items():
        names = _of_value(scenarios, names, flag, value)
        rows = _of_value(every, rows, flag, value)
        if not any(flag in registry.fields_of(every[r]["algo"]) for r in rows):
            raise ValueError(f"--{flag}={value}: no row has this option")

    def cell(name: str, one: str) -> Cell:
        entry = table["datasets"].get(known, {}).get(name, {}).get(one, {})
        own = {k: v for k, v in every[one].items() if k != "only"}
        # A teacher that was not asked for may have other values than those given.
        own = scenarios[name] | own
        options = table["common"] | own | entry.get("flags", {})
        options |= {k: v for k, v in given.items() if k not in own}
        teacher, row = None, options.get("teacher")
        if row in every:
            has = every[row].get("only", scenarios)
            teacher = (name if name in has else next(iter(has))), row
        options["dataset"] = dataset
        return Cell(name, one, options, entry.get("paper"), teacher)

    has = {one: every[one].get("only", names) for one in rows}
    asked = [cell(name, one) for name in names for one in rows if name in has[one]]
    if not asked:
        left = dict.fromkeys(name for one in has.values() for name in one)
        raise ValueError(
            f"--row={row} has the scenarios {', '.join(left)} only, and not "
            f"{', '.join(names)}"
        )
    found = teachers_first(asked, cell)
    columns, lines = dict.fromkeys([*names, *scenarios]), dict.fromkeys([*rows, *every])
    order = [(name, one) for name in columns for one in lines]
    return sorted(found, key=lambda one: order.index(one.name))


def teachers_first(
    asked: Sequence[Cell], cell: Callable[[str, str], Cell]
) -> list[Cell]:
    """Cells, each after that of its teacher and once; `cell` makes one by its name."""
    found: dict[tuple[str, str], Cell] = {}

    def add(one: Cell) -> None:
        if one.teacher is not None and one.teacher not in found:
            add(cell(*one.teacher))
        found.setdefault(one.name, one)

    for one in asked:
        add(one)
    return list(found.values())


def slug(text: str) -> str:
    """A row's name as part of a path."""
    return "".join(c for c in text.lower().replace(" ", "_") if c not in "=,:*()%")
