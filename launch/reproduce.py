"""Reproduces a paper's table: `python -m launch.reproduce cdkt.table1 --dataset=...`.

Runs the missing cells, keeps finished ones, and prints paper / ours / difference as
Markdown. A cell is one run of `launch.main` with all its seeds, which resumes after an
interrupt. Options of `launch.main` apply to every cell, and rows and columns for other
values of such an option are omitted. Tables are data: `launch/papers/<paper>.json`.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from data import files, loaders, texts
from fedjax_pfl import json_text, levels
from fedjax_pfl.options import option
from launch import cells, ending
from launch.config import flagfile, flags, presets, registry, resolve, schema
from launch.folder import finished
from launch.machine import devices, processes
from launch.papers import tables
from launch.show import curves, sheets


def _check(cell: sheets.Cell, common: Mapping[str, Any]) -> None:
    """Refuses a cell that could not run, before any cell runs.

    `common` are the options given for every cell, which may not make a row another
    method.
    """
    given = cells.known(cell.options)
    try:
        config, hparams = resolve.configure(given)
        if isinstance(hparams, levels.Levels):
            facts = {"algo": config.algo, "dataset": config.dataset}
            ruled = presets.values(config.preset, facts)["num_clients"]
            levels.assigned(hparams, config.num_clients or ruled)
        other = registry.departure(config.algo, vars(hparams))
        if other is not None and other.options.keys() & common.keys():
            rows = "choose the other rows with --row"
            raise ValueError(f"{other.flags} is the method {other.name}; {rows}")
    except ValueError as error:
        raise ValueError(f"{cell.scenario}, {cell.row}: {error}") from error


def available(dataset: str, data_dir: str) -> str:
    """`dataset`, or with a note `mnist_5k` where the files of `mnist` are missing.

    Raises:
        ValueError: there is no such data set.
    """
    dataset = "emnist/byclass" if dataset == "femnist" else dataset
    known = [*loaders.DATASETS, *texts.TEXTS]
    if dataset not in known and not loaders.is_own(dataset):
        raise ValueError(
            f"--dataset={dataset}: expected one of "
            f"{', '.join([*known, *loaders.FILES])}"
        )
    if dataset == "mnist":
        try:
            loaders.load(dataset, data_dir)
        except ValueError as error:
            processes.say(f"{error}\nusing the embedded mnist_5k instead", flush=True)
            return "mnist_5k"
    return dataset


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of this command beside those of the cells' runs."""

    scenario: str = option("", "scenarios (columns), with commas; default all")
    row: str = option("", "rows, with commas; default all")
    workdir: str = option("runs/reproduce", "folder of the runs")
    output: str = option("", "also write the Markdown table to this file")
    report: str = option("", "also write an HTML page about the runs to this file")
    cells: str = option("", "JSON file of finished cells, which do not run again")
    drop_checkpoints: bool = option(
        False,
        "delete the checkpoints of each cell that this command finishes, which may be "
        "gigabytes and which only more --rounds would need",
    )
    dry_run: bool = option(False, "print the finished cells, run nothing")


def _parse(argv: Sequence[str]) -> tuple[str, Options, dict[str, Any]]:
    """The table's name, this command's options, and those given for every cell."""
    names = [a for a in argv[1:] if not a.startswith("-")]
    if flags.HELP & set(argv[1:]):
        flags.asked(argv, Options, __doc__)
    if len(names) != 1:
        raise ValueError(
            "give one table, for instance cdkt.table1, and options as --name=value; "
            f"tables: {', '.join(tables.tables())}"
        )
    table = tables.load_table(names[0])
    own = {field.name: field for field in dataclasses.fields(Options)}
    known, kinds = {}, {}
    for algo in dict.fromkeys(row["algo"] for row in table["rows"].values()):
        known = registry.fields_of(algo) | known
        kinds = registry.option_types(algo) | kinds
    for name in ("algo", "resume", "sweep"):
        del known[name]
    known, kinds = known | own, kinds | registry.field_types(Options)
    values = flags.defined(known, kinds)
    rest = values([a for a in flagfile.expand(argv) if a not in names])
    if len(rest) > 1:
        raise ValueError(f"{rest[1]} is not a flag; options are written --name=value")
    given = {name: values[name].value for name in known if values[name].present}
    mine = {name: given.pop(name) for name in own if name in given}
    return names[0], Options(**mine), given


# The form of a finished cell
_CELL = {"options?": dict, "records?": [finished.CURVE], **finished.PART}


class Cells:
    """A file of finished cells, with which a table outlives its runs' folders."""

    def __init__(self, path: str, table: Mapping[str, Any]):
        """Reads the file if there is one, and refuses any other file (ValueError)."""
        self._path, self._table = pathlib.Path(path) if path else None, table
        self._done = self._read()

    def _read(self) -> dict[str, Any]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            files.check(self._path, "a file of cells")
            return json_text.read(self._path.read_bytes(), {str: _CELL})
        except (ValueError, OSError) as error:
            line = f"--cells={self._path} is not a file of cells: {error}"
            raise ValueError(line) from error

    def get(self, name: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """A cell with these options, if it has every curve that its table needs."""
        found = self._done.get(name)
        if found is None or found.get("options") != dict(options):
            return None
        is_short = curves.wanted(self._table) and not found.get("records")
        return None if is_short else found

    def put(self, name: str, options: Mapping[str, Any], done: Mapping[str, Any]):
        """Stores a cell with the parts of its curves that its table needs."""
        if self._path is None or not processes.is_first():
            return
        records = curves.kept(done.get("records", ()), self._table)
        # Another command may have written to the file meanwhile.
        self._done = self._read()
        self._done[name] = {**done, "options": dict(options), "records": records}
        lines = [
            f"{json.dumps(key)}: {json.dumps(one, sort_keys=True)}"
            for key, one in sorted(self._done.items())
        ]
        with ending.writing("cells", self._path):
            finished.write_text(self._path, "{\n" + ",\n".join(lines) + "\n}\n")


def _report(
    path: str,
    sheet: sheets.Sheet,
    results: sheets.Results,
    folders: Sequence[pathlib.Path],
) -> None:
    """Writes a page about the finished cells, with the paper's numbers."""
    from launch.show import page, svg  # slow imports, jinja2 and matplotlib

    done = [
        (folder, f"{cell.row}, {cell.scenario}")
        for (cell, one), folder in zip(results, folders, strict=True)
        if one is not None and (folder / finished.SUMMARY).is_file()
    ]
    if not done:
        flags.fail(f"--report={path}: no cell is finished, or none has a folder here")
    entries = page.read(*zip(*done, strict=True))
    with ending.writing("report", path):
        svg.write(path, page.page(entries, tables=[sheet], title=sheet.title))
    print(path)


@ending.command
def command(argv: list[str]) -> None:
    """Runs the missing cells of a table and prints the table."""
    with ending.refused():
        name, own, given = _parse(argv)
        table = tables.load_table(name)
        devices.begin(given.get("distributed") or "")
        dataset = given.pop("dataset", None) or table.get("dataset", "fashion_mnist")
        dataset = available(dataset, given.get("data_dir", ""))
        table = tables.of_dataset(table, dataset, given.get("masked_loss"))
        # Options of execution are not shown above the table.
        how = schema.names(schema.EXECUTION) - {"rounds"}
        execution = {key: given.pop(key) for key in how & given.keys()}
        seeds = {"seed": given.pop("seed", 0), "num_seeds": given.pop("num_seeds", 1)}
        wanted = tables.cells(table, dataset, own.scenario, own.row, given)
        for cell in wanted:
            _check(cell, given)
        for flag, path in (("output", own.output), ("cells", own.cells)):
            if path and not pathlib.Path(path).parent.is_dir():
                raise ValueError(f"--{flag}={path}: there is no such folder")
        kept = Cells(own.cells, table)

    root = pathlib.Path(own.workdir) / name / dataset
    last = seeds["seed"] + seeds["num_seeds"] - 1
    by_name = {cell.name: cell for cell in wanted}
    finished_cells: dict[tuple[str, str], Any] = {}

    def folder_of(cell: sheets.Cell) -> pathlib.Path:
        label = f"{tables.slug(cell.scenario)}-{tables.slug(cell.row)}"
        return root / f"{label}-seed{seeds['seed']}-{last}"

    def results() -> sheets.Results:
        return [(cell, finished_cells.get(cell.name)) for cell in wanted]

    def sheet() -> sheets.Sheet:
        return sheets.sheet(table, dataset, results(), given)

    def show() -> None:
        text = sheets.markdown(sheet())
        if own.output and processes.is_first():
            with ending.writing("output", own.output):
                pathlib.Path(own.output).write_text(text)
        processes.say(text, flush=True)

    try:
        in_turn = tables.teachers_first(wanted, lambda *one: by_name[one])
        for cell in in_turn:
            folder, options = folder_of(cell), cell.options | seeds
            taught, teacher = {}, by_name.get(cell.teacher)
            if teacher is not None:
                taught = {"teacher": str(folder_of(teacher) / cells.MODEL)}
            found = kept.get(folder.name, options)
            if found is None and own.dry_run:
                found = cells.stored(folder, options | taught)
                found = found and found | {"clients": cells.clients(folder)}
            is_new = found is None and not own.dry_run
            if is_new:
                processes.say(f"{cell.scenario}, {cell.row} -> {folder}", flush=True)
                if teacher is not None:
                    of_teacher = teacher.options | seeds
                    cells.write_model(folder_of(teacher), of_teacher, execution)
                found = cells.run(folder, options | taught | execution)
                found["clients"] = processes.on_first(
                    lambda at=folder: cells.clients(at)
                )
                kept.put(folder.name, options, found)
                is_teacher = cell.name in {one.teacher for one in wanted}
                if own.drop_checkpoints and not is_teacher and processes.is_first():
                    shutil.rmtree(folder / finished.CHECKPOINTS, ignore_errors=True)
            finished_cells[cell.name] = found
            if is_new or cell is in_turn[-1]:
                show()
        if own.report and processes.is_first():
            _report(own.report, sheet(), results(), list(map(folder_of, wanted)))
    except KeyboardInterrupt:
        flags.fail("interrupted; the same command continues", 130)


if __name__ == "__main__":
    command()
