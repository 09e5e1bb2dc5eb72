"""Reproduces a paper's table: `python -m launch.reproduce cdkt.table1 --dataset=...`.

Runs the cells that are missing, keeps what is done, and prints paper | ours |
difference as Markdown. A cell is one run of `launch.main` with all its seeds; an
interrupted one resumes. The tables are data: `launch/papers/<paper>.json`.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags as absl_flags

from data import loaders
from launch import build, flags, main, report, workdir

PAPERS = pathlib.Path(__file__).parent / "papers"


def load_table(name: str) -> dict[str, Any]:
    """The table `<paper>.<table>`.

    Raises:
        ValueError: there is no such table; lists those there are.
    """
    paper, _, table = name.partition(".")
    tables = {
        f"{path.stem}.{key}": value
        for path in sorted(PAPERS.glob("*.json"))
        for key, value in json.loads(path.read_text()).items()
    }
    if f"{paper}.{table}" not in tables:
        raise ValueError(f"no table {name}: expected one of {', '.join(tables)}")
    return tables[name]


def cells(
    table: Mapping[str, Any], dataset: str, scenarios: Sequence[str]
) -> list[tuple[str, str, dict[str, Any], list[float]]]:
    """(scenario, row, options, the paper's numbers) of every cell asked for.

    `mnist_5k` takes the numbers and settings of `mnist`.
    """
    known = "mnist" if dataset == "mnist_5k" else dataset
    if known not in table["datasets"]:
        raise ValueError(
            f"--dataset={dataset}: this table has {', '.join(table['datasets'])}"
        )
    out = []
    for scenario in scenarios:
        if scenario not in table["scenarios"]:
            raise ValueError(
                f"--scenario={scenario}: expected one of "
                f"{', '.join(table['scenarios'])}"
            )
        for row, entry in table["datasets"][known][scenario].items():
            options = (
                table["common"]
                | table["scenarios"][scenario]
                | table["rows"][row]
                | entry["flags"]
                | {"dataset": dataset}
            )
            out.append((scenario, row, options, entry["paper"]))
    return out


def difference(ours: float, paper: float) -> str:
    """Signed difference in points, for instance `+1.3`."""
    return f"{ours - paper:+.1f}"


def markdown(
    table: Mapping[str, Any],
    dataset: str,
    results: Sequence[tuple[str, str, Mapping[str, Any] | None, list[float]]],
) -> str:
    """One Markdown table per scenario: paper | ours mean +- std | difference."""
    metrics = table["metrics"]
    lines = [f"### {table['title']}", "", f"Data set: `{dataset}`."]
    if dataset in table["notes"]:
        lines.append(table["notes"][dataset])
    for scenario in dict.fromkeys(scenario for scenario, *_ in results):
        mine = [entry for entry in results if entry[0] == scenario]
        seeds = max(
            (
                len(done["metrics"][metrics[0]]["per_seed"])
                for _, _, done, _ in mine
                if done
            ),
            default=0,
        )
        lines += ["", f"**{scenario}**, {seeds} seed(s): paper / ours / difference", ""]
        lines.append("| | " + " | ".join(report.title(m) for m in metrics) + " |")
        lines.append("|---|" + "---|" * len(metrics))
        for _, row, done, paper in mine:
            texts = []
            for metric, number in zip(metrics, paper, strict=True):
                if done is None or metric not in done["metrics"]:
                    texts.append(f"{number:.2f} / missing")
                    continue
                entry = done["metrics"][metric]
                mean, std = 100 * entry["mean"], 100 * entry["std"]
                spread = f" ± {std:.1f}" if len(entry["per_seed"]) > 1 else ""
                texts.append(
                    f"{number:.2f} / {mean:.1f}{spread} / {difference(mean, number)}"
                )
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def available(dataset: str, data_dir: str) -> str:
    """`mnist` where its files are, else the embedded `mnist_5k`, saying so."""
    if dataset == "mnist":
        try:
            loaders.load(dataset, data_dir)
        except ValueError as error:
            print(f"{error}\nusing the embedded mnist_5k instead", flush=True)
            return "mnist_5k"
    return dataset


def slug(text: str) -> str:
    """A row's name as part of a path."""
    return text.lower().replace(" ", "_")


def command(argv: Sequence[str] | None = None) -> None:
    """The command."""
    main.quiet()
    argv = list(sys.argv if argv is None else argv)
    names = [a for a in argv[1:] if not a.startswith("-")]
    values = absl_flags.FlagValues()
    for name, default, text in (
        ("dataset", "fashion_mnist", "data set of the table"),
        ("data_dir", "", "folder of the data"),
        ("scenario", "fixed,subset", "scenarios, separated by commas"),
        ("workdir", "runs/reproduce", "folder of the runs"),
        ("output", "", "also write the Markdown table to this file"),
    ):
        absl_flags.DEFINE_string(name, default, text, flag_values=values)
    for name, default, text in (
        ("seed", 0, "first seed"),
        ("num_seeds", 1, "seeds, run in one program"),
        ("rounds", 0, "rounds instead of the table's"),
    ):
        absl_flags.DEFINE_integer(name, default, text, flag_values=values)
    absl_flags.DEFINE_boolean(
        "dry_run", False, "print what is there, run nothing", flag_values=values
    )
    if {"--help", "-help", "-h"} & set(argv[1:]):
        print(f"{__doc__}\n{values.get_help()}")
        return
    try:
        if len(names) != 1:
            raise ValueError("give one table, for instance cdkt.table1")
        values([a for a in argv if a not in names])
        table = load_table(names[0])
        dataset = available(values.dataset, values.data_dir)
        wanted = cells(table, dataset, values.scenario.split(","))
        if values.output and not pathlib.Path(values.output).parent.is_dir():
            raise ValueError(f"--output={values.output}: there is no such folder")
    except (ValueError, absl_flags.Error) as error:
        flags.fail(error)

    root = pathlib.Path(values.workdir) / names[0] / dataset
    last = values.seed + values.num_seeds - 1
    results = []

    def show() -> None:
        pending = [(s, r, None, p) for s, r, _, p in wanted[len(results) :]]
        text = markdown(table, dataset, [*results, *pending])
        if values.output:
            pathlib.Path(values.output).write_text(text)
        print(text, flush=True)

    for scenario, row, options, paper in wanted:
        folder = root / f"{scenario}-{slug(row)}-seed{values.seed}-{last}"
        summary = workdir.stored_summary(folder)
        if not values.dry_run:
            print(f"{scenario}, {row} -> {folder}", flush=True)
            given = options | {
                "rounds": values.rounds or options["rounds"],
                "seed": values.seed,
                "num_seeds": values.num_seeds,
                "workdir": str(folder),
                "resume": (folder / "run.flags").exists(),
            }
            if values.data_dir:
                given["data_dir"] = values.data_dir
            known = build.fields_of(given["algo"])
            # A finished cell returns at once; one of other settings is refused.
            summary = main.execute({k: v for k, v in given.items() if k in known})
        results.append((scenario, row, summary, paper))
        if not values.dry_run:
            show()
    if values.dry_run:
        show()


if __name__ == "__main__":
    command()
