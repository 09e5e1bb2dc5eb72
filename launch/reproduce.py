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
from typing import Any

from absl import flags as absl_flags

from data import loaders
from fedjax_pfl import levels
from launch import ending, main
from launch.config import flagfile, flags, presets, registry, resolve, schema
from launch.folder import finished
from launch.papers import tables
from launch.run import devices, processes
from launch.show import curves, sheets


def _holds(folder: pathlib.Path, options: Mapping[str, Any]) -> bool:
    """Whether a run's folder was made with these options.

    Raises:
        ValueError: its flags are damaged.
    """
    path = folder / finished.RUN_FLAGS
    if not path.is_file():
        return False
    known = registry.fields_of(options["algo"])
    given = {k: v for k, v in options.items() if k in known}
    # The algorithm's own options also where the cell leaves them to the preset.
    _, hparams = resolve.configure(given)
    stored = flagfile.RunFlags.read(path).completed(hparams)
    typed = stored.typed(options["algo"])
    return stored.options.keys() <= known.keys() and all(
        typed.get(k) == v for k, v in (vars(hparams) | given).items()
    )


def _with_records(folder: pathlib.Path, done: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's summary and its records."""
    return {**done, "records": finished.records(folder)}


def _stored(
    folder: pathlib.Path, options: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """A finished cell that was made with these options."""
    try:
        if not _holds(folder, options):
            return None
        done = finished.read(folder)
        return done and _with_records(folder, done)
    except ValueError as error:
        print(f"note: {error}", file=sys.stderr, flush=True)
        return None


def _run(folder: pathlib.Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a cell, or goes on with it; a finished one returns at once."""
    options = {
        **options,
        "workdir": str(folder),
        "resume": processes.on_first((folder / finished.RUN_FLAGS).exists),
    }
    known = registry.fields_of(options["algo"])
    done = main.execute({k: v for k, v in options.items() if k in known})
    return processes.on_first(lambda: _with_records(folder, done))


def _check(cell: sheets.Cell) -> None:
    """Refuses a cell that could not run, before the first one does.

    Raises:
        ValueError: one line that names it.
    """
    known = registry.fields_of(cell.options["algo"])
    given = {name: value for name, value in cell.options.items() if name in known}
    try:
        config, hparams = resolve.configure(given)
        if isinstance(hparams, levels.Levels):
            facts = {"algo": config.algo, "dataset": config.dataset}
            ruled = presets.values(config.preset, facts)["num_clients"]
            levels.assigned(hparams, config.num_clients or ruled)
    except ValueError as error:
        raise ValueError(f"{cell.scenario}, {cell.row}: {error}") from error


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
            processes.say(f"{error}\nusing the embedded mnist_5k instead", flush=True)
            return "mnist_5k"
    return dataset


OWN_FLAGS = ("scenario", "row", "workdir", "output", "report", "cells", "dry_run")


def _parse(argv: Sequence[str]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Table name, this command's own flags, and the options given for every cell."""
    names = [a for a in argv[1:] if not a.startswith("-")]
    wants_help = bool(flags.HELP & set(argv[1:]))
    if len(names) != 1 and not wants_help:
        raise ValueError(
            "give one table, for instance cdkt.table1, and options as --name=value; "
            f"tables: {', '.join(tables.tables())}"
        )
    values = absl_flags.FlagValues()
    for name, default, text in (
        ("scenario", "", "scenarios (columns), separated by commas; default all"),
        ("row", "", "rows, separated by commas; default all"),
        ("workdir", "runs/reproduce", "folder of the runs"),
        ("output", "", "also write the Markdown table to this file"),
        ("report", "", "also write an HTML page about the runs to this file"),
        ("cells", "", "JSON file of finished cells: those in it do not run again"),
    ):
        absl_flags.DEFINE_string(name, default, text, flag_values=values)
    absl_flags.DEFINE_boolean(
        "dry_run", False, "print what is there, run nothing", flag_values=values
    )
    if wants_help:
        print(f"{__doc__}\n{values.get_help()}")
        raise SystemExit(0)
    table = tables.load_table(names[0])
    options: dict[str, Any] = {}
    for algo in dict.fromkeys(row["algo"] for row in table["rows"].values()):
        kinds = registry.option_types(algo)
        for name, field in registry.fields_of(algo).items():
            if name not in (*options, *OWN_FLAGS, "algo", "resume", "sweep"):
                options[name] = field
                flags.define(values, name, field, kinds[name])
    rest = values([a for a in flagfile.expand(argv) if a not in names])
    if len(rest) > 1:
        raise ValueError(f"{rest[1]} is not a flag; options are written --name=value")
    given = {name: values[name].value for name in options if values[name].present}
    return names[0], {name: values[name].value for name in OWN_FLAGS}, given


class Cells:
    """A file of finished cells, by which a table outlives the folders of its runs."""

    def __init__(self, path: str, table: Mapping[str, Any]):
        """Reads it, if there is one.

        Raises:
            ValueError: it is no such file.
        """
        self._path, self._table = pathlib.Path(path) if path else None, table
        self._done = self._read()

    def _read(self) -> dict[str, Any]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            return dict(json.loads(self._path.read_text()))
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(
                f"--cells={self._path} is no file of cells: {error}"
            ) from error

    def get(self, name: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """A cell that was made with these options, with all that its table takes."""
        found = self._done.get(name)
        if found is None or found.get("options") != dict(options):
            return None
        is_short = curves.wanted(self._table) and not found.get("records")
        return None if is_short else found

    def put(
        self, name: str, options: Mapping[str, Any], done: Mapping[str, Any]
    ) -> None:
        """Keeps a cell; without the parts of a curve that its table does not take."""
        if self._path is None or not processes.is_first():
            return
        records = curves.kept(done.get("records", ()), self._table)
        # Another command may have written meanwhile.
        self._done = self._read()
        self._done[name] = {**done, "options": dict(options), "records": records}
        lines = [
            f"{json.dumps(name)}: {json.dumps(self._done[name], sort_keys=True)}"
            for name in sorted(self._done)
        ]
        try:
            # A line for each cell.
            finished.write_text(self._path, "{\n" + ",\n".join(lines) + "\n}\n")
        except OSError as error:
            flags.fail(f"--cells={self._path}: {error}", 1)


def _report(
    path: str,
    sheet: sheets.Sheet,
    results: Sequence[tuple[sheets.Cell, Mapping[str, Any] | None]],
    folders: Sequence[pathlib.Path],
) -> None:
    """Writes a page about the cells that are done, with the paper's numbers."""
    from launch import report

    done = [
        (folder, f"{cell.row}, {cell.scenario}")
        for (cell, one), folder in zip(results, folders, strict=True)
        if one is not None and (folder / finished.SUMMARY).is_file()
    ]
    if not done:
        flags.fail(f"--report={path}: no cell is done yet, or none has a folder here")
    entries = report.read(*zip(*done, strict=True))
    try:
        report.write(path, report.page(entries, tables=[sheet], title=sheet.title))
    except OSError as error:
        flags.fail(f"--report={path}: {error}", 1)
    print(path)


def command(argv: Sequence[str] | None = None) -> None:
    """The command."""
    main.quiet()
    with ending.reported():
        _command(list(sys.argv if argv is None else argv))


def _command(argv: Sequence[str]) -> None:
    try:
        name, own, given = _parse(argv)
        table = tables.load_table(name)
        devices.begin(given.get("distributed") or "")
        dataset = given.pop("dataset", None) or table.get("dataset", "fashion_mnist")
        dataset = available(dataset, given.get("data_dir", ""))
        # Where and what, not how: not worth a word above the table.
        how = schema.names(schema.EXECUTION) - {"rounds"}
        execution = {key: given.pop(key) for key in how & given.keys()}
        seeds = {"seed": given.pop("seed", 0), "num_seeds": given.pop("num_seeds", 1)}
        wanted = tables.cells(table, dataset, own["scenario"], own["row"], given)
        for cell in wanted:
            _check(cell)
        for flag in ("output", "cells"):
            if own[flag] and not pathlib.Path(own[flag]).parent.is_dir():
                raise ValueError(f"--{flag}={own[flag]}: there is no such folder")
        kept = Cells(own["cells"], table)
    except (ValueError, absl_flags.Error) as error:
        flags.fail(error)

    root = pathlib.Path(own["workdir"]) / name / dataset
    last = seeds["seed"] + seeds["num_seeds"] - 1
    results: list[tuple[sheets.Cell, Mapping[str, Any] | None]] = []
    folders: list[pathlib.Path] = []

    def sheet() -> sheets.Sheet:
        pending = [(cell, None) for cell in wanted[len(results) :]]
        return sheets.sheet(table, dataset, [*results, *pending], given)

    def show() -> None:
        text = sheets.markdown(sheet())
        if own["output"] and processes.is_first():
            try:
                pathlib.Path(own["output"]).write_text(text)
            except OSError as error:
                flags.fail(f"--output={own['output']}: {error}", 1)
        processes.say(text, flush=True)

    is_shown = False
    try:
        for cell in wanted:
            label = f"{tables.slug(cell.scenario)}-{tables.slug(cell.row)}"
            folder = root / f"{label}-seed{seeds['seed']}-{last}"
            folders.append(folder)
            options = cell.options | seeds
            found = kept.get(folder.name, options)
            if found is None and own["dry_run"]:
                found = _stored(folder, options)
            if found is not None or own["dry_run"]:
                results.append((cell, found))
                is_shown = False
                continue
            processes.say(f"{cell.scenario}, {cell.row} -> {folder}", flush=True)
            found = _run(folder, options | execution)
            kept.put(folder.name, options, found)
            results.append((cell, found))
            show()
            is_shown = True
        if not is_shown:
            show()
        if own["report"] and processes.is_first():
            _report(own["report"], sheet(), results, folders)
    except KeyboardInterrupt:
        flags.fail("interrupted; the same command goes on", 130)


if __name__ == "__main__":
    command()
