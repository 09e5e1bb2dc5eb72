"""Reproduces a paper's table: `python -m launch.reproduce cdkt.table1 --dataset=...`.

Runs the cells that are missing, keeps what is done, and prints paper | ours |
difference as Markdown. A cell is one run of `launch.main` with all its seeds; an
interrupted one resumes. Options of `launch.main` may be given too and hold in every
cell; rows and columns that stand for another value of such an option are left out. The
tables are data: `launch/papers/<paper>.json`.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags as absl_flags

from data import loaders
from launch import console, flags, main, settings, workdir

PAPERS = pathlib.Path(__file__).parent / "papers"
Number = float | list[float]


class Cell(NamedTuple):
    """One run of a table: its options, and the paper's number of each metric.

    A number is a mean, or a mean and a standard deviation; None = not in the paper.
    """

    scenario: str
    row: str
    options: dict[str, Any]
    paper: list[Number] | None


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
        ValueError: there is no such table; lists those there are.
    """
    known = tables()
    if name not in known:
        raise ValueError(f"no table {name}: expected one of {', '.join(known)}")
    return known[name]


def _chosen(flag: str, wanted: str, known: Sequence[str]) -> list[str]:
    """The names of a comma-separated flag, all if it is empty."""
    names = wanted.split(",") if wanted else list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"--{flag}={name}: expected one of {', '.join(known)}")
    return names


def _of_value(
    parts: Mapping[str, Mapping[str, Any]], names: list[str], flag: str, value: Any
) -> list[str]:
    """The rows or columns that stand for `value` of a flag, or for no value of it.

    Raises:
        ValueError: none is left; lists the values there are.
    """
    left = [n for n in names if parts[n].get(flag) in (None, value)]
    if not left:
        known = ", ".join(str(parts[n][flag]) for n in names)
        raise ValueError(f"--{flag}={value}: this table has {known}")
    return left


def _holds(folder: pathlib.Path, options: Mapping[str, Any]) -> bool:
    """Whether a run's folder was made with these options."""
    try:
        lines = (folder / "run.flags").read_text().splitlines()
    except OSError:
        return False
    told = dict(line[2:].split("=", 1) for line in lines if line.startswith("--"))

    def equal(text: str | None, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return text == (str(value).lower() if isinstance(value, bool) else value)
        return text is not None and float(text) == value

    known = settings.fields_of(options["algo"])
    return all(equal(told.get(k), v) for k, v in options.items() if k in known)


def cells(
    table: Mapping[str, Any],
    dataset: str,
    scenario: str = "",
    row: str = "",
    given: Mapping[str, Any] | None = None,
) -> list[Cell]:
    """Every cell asked for.

    Args:
        table: From `load_table`.
        dataset: `mnist_5k` takes the numbers and settings of `mnist`.
        scenario, row: Names separated by commas, empty = all.
        given: Options that hold in every cell.
    """
    given = dict(given or {})
    known = "mnist" if dataset == "mnist_5k" else dataset
    if known not in table["datasets"] and not table.get("any_dataset"):
        raise ValueError(
            f"--dataset={dataset}: this table has {', '.join(table['datasets'])}"
        )
    names = _chosen("scenario", scenario, table["scenarios"])
    rows = _chosen("row", row, table["rows"])
    for flag, value in given.items():
        names = _of_value(table["scenarios"], names, flag, value)
        rows = _of_value(table["rows"], rows, flag, value)
        if not any(flag in settings.fields_of(table["rows"][r]["algo"]) for r in rows):
            raise ValueError(f"--{flag}={value}: no row has this option")
    out = []
    for name in names:
        entries = table["datasets"].get(known, {}).get(name, {})
        for one in rows:
            entry = entries.get(one, {})
            options = (
                table["common"]
                | table["scenarios"][name]
                | table["rows"][one]
                | entry.get("flags", {})
            )
            # A row says null to an option that it must not have.
            banned = {flag for flag, value in options.items() if value is None}
            options |= given | {"dataset": dataset}
            options = {k: v for k, v in options.items() if k not in banned}
            out.append(Cell(name, one, options, entry.get("paper")))
    return out


def difference(ours: float, paper: float) -> str:
    """Signed difference in points, for instance `+1.3`."""
    return f"{ours - paper:+.1f}"


def _text(done: Mapping[str, Any] | None, metric: str, number: Number | None) -> str:
    """`paper / ours / difference`, or ours alone where the paper has no number."""
    pair = number if isinstance(number, list) else [number]
    paper = " ± ".join(f"{one:.2f}" for one in pair if one is not None)
    if done is None or metric not in done["metrics"]:
        return f"{paper} / missing" if paper else "missing"
    entry = done["metrics"][metric]
    mean, std = 100 * entry["mean"], 100 * entry["std"]
    ours = f"{mean:.1f}"
    if len(entry["per_seed"]) > 1:
        ours += f" ± {std:.1f}"
    return f"{paper} / {ours} / {difference(mean, pair[0])}" if paper else ours


def _grid(head: Sequence[str], body: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    lines = ["| | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
    return lines + [f"| {row} | " + " | ".join(texts) + " |" for row, texts in body]


def markdown(
    table: Mapping[str, Any],
    dataset: str,
    results: Sequence[tuple[Cell, Mapping[str, Any] | None]],
    given: Mapping[str, Any] | None = None,
) -> str:
    """Markdown: paper | ours mean +- std | difference.

    A table of several metrics has one part per scenario, with the metrics as columns; a
    table of one metric has the scenarios as columns.
    """
    metrics = table["metrics"]
    lines = [f"### {table['title']}", "", f"Data set: `{dataset}`."]
    if given:
        options = " ".join(f"--{name}={value}" for name, value in given.items())
        lines.append(f"With `{options}`.")
    if dataset in table["notes"]:
        lines.append(table["notes"][dataset])
    seeds = max(
        (
            len(next(iter(done["metrics"].values()))["per_seed"])
            for _, done in results
            if done
        ),
        default=0,
    )
    has_paper = any(cell.paper for cell, _ in results)
    legend = f"{seeds} seed(s)" + (": paper / ours / difference" if has_paper else "")
    scenarios = list(dict.fromkeys(cell.scenario for cell, _ in results))
    texts = {
        (cell.scenario, cell.row): [
            _text(done, metric, cell.paper[index] if cell.paper else None)
            for index, metric in enumerate(metrics)
        ]
        for cell, done in results
    }
    rows = list(dict.fromkeys(cell.row for cell, _ in results))
    if len(metrics) == 1:
        body = [
            (row, [*(texts.get((s, row), ["-"])[0] for s in scenarios)]) for row in rows
        ]
        title = f"{console.title(metrics[0])}, {table.get('columns', 'percent')}"
        lines += ["", f"{title}, {legend}", "", *_grid(scenarios, body)]
        return "\n".join(lines) + "\n"
    for scenario in scenarios:
        body = [(r, texts[scenario, r]) for r in rows if (scenario, r) in texts]
        lines += ["", f"**{scenario}**, {legend}", ""]
        lines += _grid([console.title(metric) for metric in metrics], body)
    return "\n".join(lines) + "\n"


def available(dataset: str, data_dir: str) -> str:
    """`mnist` where its files are, else the embedded `mnist_5k`, saying so.

    Raises:
        ValueError: there is no such data set.
    """
    dataset = "emnist/byclass" if dataset == "femnist" else dataset
    if dataset not in loaders.DATASETS and not dataset.startswith("npz:"):
        raise ValueError(
            f"--dataset={dataset}: expected one of {', '.join(loaders.DATASETS)} or "
            "npz:PATH"
        )
    if dataset == "mnist":
        try:
            loaders.load(dataset, data_dir)
        except ValueError as error:
            print(f"{error}\nusing the embedded mnist_5k instead", flush=True)
            return "mnist_5k"
    return dataset


def slug(text: str) -> str:
    """A row's name as part of a path."""
    return "".join(c for c in text.lower().replace(" ", "_") if c not in "=,*()")


OWN_FLAGS = ("scenario", "row", "workdir", "output", "dry_run")


def _parse(argv: Sequence[str]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Table name, this command's own flags, and the options given for every cell."""
    names = [a for a in argv[1:] if not a.startswith("-")]
    wants_help = bool({"--help", "-help", "-h"} & set(argv[1:]))
    if len(names) != 1 and not wants_help:
        raise ValueError(
            "give one table, for instance cdkt.table1, and options as --name=value; "
            f"tables: {', '.join(tables())}"
        )
    values = absl_flags.FlagValues()
    for name, default, text in (
        ("scenario", "", "scenarios (columns), separated by commas; default all"),
        ("row", "", "rows, separated by commas; default all"),
        ("workdir", "runs/reproduce", "folder of the runs"),
        ("output", "", "also write the Markdown table to this file"),
    ):
        absl_flags.DEFINE_string(name, default, text, flag_values=values)
    absl_flags.DEFINE_boolean(
        "dry_run", False, "print what is there, run nothing", flag_values=values
    )
    if wants_help:
        print(f"{__doc__}\n{values.get_help()}")
        raise SystemExit(0)
    table = load_table(names[0])
    options: dict[str, Any] = {}
    for algo in dict.fromkeys(row["algo"] for row in table["rows"].values()):
        kinds = settings.option_types(algo)
        for name, field in settings.fields_of(algo).items():
            if name not in (*options, *OWN_FLAGS, "algo", "resume"):
                options[name] = field
                flags.define(values, name, field, kinds[name])
    rest = values([a for a in argv if a not in names])
    if len(rest) > 1:
        raise ValueError(f"{rest[1]} is not a flag; options are written --name=value")
    given = {name: values[name].value for name in options if values[name].present}
    return names[0], {name: values[name].value for name in OWN_FLAGS}, given


def command(argv: Sequence[str] | None = None) -> None:
    """The command."""
    main.quiet()
    try:
        name, own, given = _parse(list(sys.argv if argv is None else argv))
        table = load_table(name)
        dataset = given.pop("dataset", None) or table.get("dataset", "fashion_mnist")
        dataset = available(dataset, given.get("data_dir", ""))
        # Where and what, not how: not worth a word above the table.
        execution = {
            key: given.pop(key)
            for key in ("data_dir", "client_chunk", "devices")
            if key in given
        }
        seeds = {"seed": given.pop("seed", 0), "num_seeds": given.pop("num_seeds", 1)}
        wanted = cells(table, dataset, own["scenario"], own["row"], given)
        if own["output"] and not pathlib.Path(own["output"]).parent.is_dir():
            raise ValueError(f"--output={own['output']}: there is no such folder")
    except (ValueError, absl_flags.Error) as error:
        flags.fail(error)

    root = pathlib.Path(own["workdir"]) / name / dataset
    last = seeds["seed"] + seeds["num_seeds"] - 1
    results: list[tuple[Cell, Mapping[str, Any] | None]] = []

    def show() -> None:
        pending = [(cell, None) for cell in wanted[len(results) :]]
        text = markdown(table, dataset, [*results, *pending], given)
        if own["output"]:
            pathlib.Path(own["output"]).write_text(text)
        print(text, flush=True)

    for cell in wanted:
        label = f"{slug(cell.scenario)}-{slug(cell.row)}"
        folder = root / f"{label}-seed{seeds['seed']}-{last}"
        summary = workdir.stored_summary(folder)
        if not own["dry_run"]:
            print(f"{cell.scenario}, {cell.row} -> {folder}", flush=True)
            known = settings.fields_of(cell.options["algo"])
            options = cell.options | seeds | execution
            options |= {
                "workdir": str(folder),
                "resume": (folder / "run.flags").exists(),
            }
            # A finished cell returns at once; one of other settings is refused.
            summary = main.execute({k: v for k, v in options.items() if k in known})
        elif not _holds(folder, cell.options | seeds):
            summary = None
        results.append((cell, summary))
        if not own["dry_run"]:
            show()
    if own["dry_run"]:
        show()


if __name__ == "__main__":
    command()
