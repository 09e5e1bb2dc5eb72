"""A paper's table: its cells run `launch.main` one after another in this process."""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data import files, labels, loaders, own_files, texts
from fedjax_pfl import checkpoint
from fedjax_pfl import options as options_lib
from fedjax_pfl.options import option
from launch import ending, main
from launch import experiment as experiment_lib
from launch.config import flagfile, flags, registry, resolve, schema
from launch.folder import finished, record
from launch.machine import processes
from launch.run import progress
from launch.show import curves, sheets
from launch.tables import cells, paper, store

MODEL = "model.msgpack"
# Options of execution, of which the rounds decide a run's numbers
_HOW = schema.names(schema.EXECUTION) - {"rounds"}


def stored(folder: pathlib.Path, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary and records of a finished run with these options, or None."""
    path, algo = folder / finished.RUN_FLAGS, options["algo"]
    if not path.is_file():
        return None
    try:
        given = cells.known(options)
        # The algorithm's options count even if the preset decides them.
        _, hparams = resolve.configure(given)
        recorded = flagfile.RunFlags.read(path).completed(hparams)
        typed, wanted = recorded.typed(algo), vars(hparams) | given
        is_same = all(typed.get(name) == value for name, value in wanted.items())
        if not (is_same and recorded.options.keys() <= registry.fields_of(algo).keys()):
            return None
        done = finished.read(folder)
        return done and done | {"records": finished.records(folder)}
    except ValueError as error:
        print(f"note: {error}", file=sys.stderr, flush=True)
        return None


def run(folder: pathlib.Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Starts or resumes a run, and returns its summary and records.

    Where it trains, its `MODEL` of before is removed, which is of fewer rounds.
    """
    before = processes.on_first(lambda: _parameters(folder))
    resumes = processes.on_first((folder / finished.RUN_FLAGS).exists)
    given = cells.known(options) | {"workdir": str(folder), "resume": resumes}
    done = main.execute(given)
    if done["parameters_sha256"] != before:
        processes.on_first(lambda: (folder / MODEL).unlink(missing_ok=True))
    return processes.on_first(lambda: done | {"records": finished.records(folder)})


def _parameters(folder: pathlib.Path) -> str | None:
    """The hash of a finished run's parameters, None if there is none."""
    with contextlib.suppress(ValueError):
        return (finished.read(folder) or {}).get("parameters_sha256")
    return None


def clients(folder: pathlib.Path) -> dict[str, Any]:
    """Each client's accuracy or perplexity in a finished run, {} if it has none.

    These means over the rounds of the summary are `accuracy` or `perplexity`
    [seed][client] with None = undefined, and `test_size` has the same shape.
    """
    run = record.read(folder)
    if not record.has_clients(run):
        return {}
    means = record.client_values(run, f"client_{record.measured(run)}").tolist()
    values = [[float(f"{one:.6g}") for one in line] for line in means]
    sizes = run.clients["test_size"].tolist()
    return finished.finite({record.measured(run): values, "test_size": sizes})


def _drop_last(folder: pathlib.Path) -> None:
    """Deletes a run's checkpoints but those of its best rounds, as far as it can."""
    for path in checkpoint.saved(folder):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # it has others
        folder.rmdir()


def available(dataset: str, data_dir: str) -> str:
    """`dataset`, or `mnist_5k` with a note if the files of `mnist` are missing.

    Raises a ValueError if there is no such data set.
    """
    if not own_files.is_one(dataset):
        known = [*loaders.DATASETS, *texts.TEXTS]
        options_lib.check_one_of("dataset", dataset, [*known, *own_files.FILES])
    if dataset == "mnist":
        try:
            loaders.load(dataset, data_dir)
        except ValueError as error:
            processes.say(f"{error}\nusing the embedded mnist_5k instead", flush=True)
            return "mnist_5k"
    return dataset


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `launch.reproduce` in addition to those of its cells' runs."""

    scenario: str = option("", "scenarios (columns), with commas; default all")
    row: str = option("", "rows, with commas; default all")
    workdir: str = option("runs/reproduce", "folder of the runs")
    output: str = option("", "also write the Markdown table to this file")
    report: str = option("", "also write an HTML page about the runs to this file")
    cells: str = option("", "JSON file of finished cells, which do not run again")
    drop_checkpoints: bool = option(
        False,
        "delete the checkpoints of each cell that this command finishes, which may be "
        "gigabytes and which only more --rounds would need; a teacher's stay",
    )
    dry_run: bool = option(False, "print the finished cells, run nothing")


def options(sheet: cells.Sheet) -> tuple[dict[str, dataclasses.Field], dict[str, type]]:
    """The options that may be given for all cells of a sheet, and their types."""
    known: dict[str, dataclasses.Field] = {}
    kinds: dict[str, type] = {}
    for algo in cells.algorithms_of(sheet):
        known = registry.fields_of(algo) | known
        kinds = registry.option_types(algo) | kinds
    for name in ("algo", "resume", "sweep"):
        del known[name]
    return known, kinds


class Table:
    """A paper's table: the requested cells, their folders and the finished results."""

    def __init__(self, name: str, given: Mapping[str, Any], asked: Options):
        """Reads the table `<paper>.<table>` and the file of finished cells.

        `given` are options of every cell's run. Raises a ValueError if a name, an
        option, a cell or the file is wrong.
        """
        sheet, given = cells.named("table", name, cells.papers()), dict(given)
        dataset = given.pop("dataset", None) or sheet.get("dataset", "fashion_mnist")
        self.dataset = available(dataset, given.get("data_dir", ""))
        self.sheet = paper.of_dataset(sheet, self.dataset, given.get("masked_loss"))
        # Options of execution are not shown above the table.
        self.execution = {key: given.pop(key) for key in _HOW & given.keys()}
        # A sheet may say how many seeds its table has.
        own = {"seed": 0, "num_seeds": 1} | self.sheet["common"]["options"]
        self.seeds = {key: given.pop(key, own[key]) for key in ("seed", "num_seeds")}
        self.given = given
        self.cells = cells.cells(
            self.sheet, self.dataset, asked.scenario, asked.row, given
        )
        for flag, path in (("output", asked.output), ("cells", asked.cells)):
            if path and not pathlib.Path(path).parent.is_dir():
                raise ValueError(f"--{flag}={path}: there is no such folder")
        self.asked, self.kept = asked, store.File(asked.cells)
        root = files.given(asked.workdir, "--workdir")
        self.root = root / name / self.dataset
        self.results: dict[tuple[str, str], Any] = {}

    def folder(self, cell: cells.Cell) -> pathlib.Path:
        """The folder of a cell's run."""
        label = f"{cells.slug(cell.value)}-{cells.slug(cell.row)}"
        first, last = self.seeds["seed"], sum(self.seeds.values()) - 1
        return self.root / f"{label}-seed{first}-{last}"

    def shown(self) -> sheets.Sheet:
        """The table with the results so far."""
        found = [(cell, self.results.get(cell.place)) for cell in self.cells]
        return paper.sheet(self.sheet, self.dataset, found, self.given)

    def fill(self) -> Iterator[None]:
        """Runs missing cells after their teachers; yields after each and at the end."""
        by_place = {cell.place: cell for cell in self.cells}
        in_turn = cells.teachers_first(self.cells, lambda *place: by_place[place])
        taken: list[float] = []
        read: list[str] = []  # the commits of the cells that are read, "" = unknown
        for number, cell in enumerate(in_turn, start=1):
            folder, teacher = self.folder(cell), by_place.get(cell.teacher)
            options = cell.options | self.seeds
            if teacher is not None:
                options |= {"teacher": str(self.folder(teacher) / MODEL)}
            whole = self._whole(cell, by_place), self._rules(cell, by_place)
            found = self.kept.get(folder.name, *whole)
            if found and not curves.has_wanted(found, self.sheet):
                found = None  # of a table that needed other curves
            if found:
                read.append(found.get("git_commit", "")[:8])
            if found is None and self.asked.dry_run:
                found = stored(folder, options)
                found = found and found | {"clients": clients(folder)}
            is_new = found is None and not self.asked.dry_run
            if is_new:
                place = progress.of_several(number, len(in_turn), taken)
                begin = time.perf_counter()
                processes.say(
                    f"{cell.value}, {cell.row} ({place}) -> {folder}", flush=True
                )
                if teacher is not None:
                    self._write_model(teacher)
                found = run(folder, options | self.execution)
                taken.append(time.perf_counter() - begin)
                found["clients"] = processes.on_first(lambda at=folder: clients(at))
                if processes.is_first():
                    self._keep(cell, whole, found)
            self.results[cell.place] = found
            if cell is in_turn[-1] and read and processes.is_first():
                self._say_read(read)
            if is_new or cell is in_turn[-1]:
                yield

    def _keep(
        self, cell: cells.Cell, whole: tuple[Any, Any], found: dict[str, Any]
    ) -> None:
        """Stores a finished cell, and drops its checkpoint if nothing needs it."""
        every = [*self.sheet["rows"].values(), *self.sheet.get("cells", {}).values()]
        teachers = {one.get("options", {}).get("teacher") for one in every}
        folder, records = self.folder(cell), curves.kept(found["records"], self.sheet)
        with ending.writing("cells", self.asked.cells):
            self.kept.put(folder.name, *whole, found | {"records": records})
        if self.asked.drop_checkpoints and cell.row not in teachers:
            _drop_last(folder / finished.CHECKPOINTS)

    def _say_read(self, commits: Sequence[str]) -> None:
        """A line about the cells of earlier runs, by their commits, "" = unknown."""
        known = sorted({*commits} - {""}) + ["an unknown one"] * ("" in commits)
        print(
            f"note: {len(commits)} of {len(self.cells)} cells are of runs before, read "
            f"from --cells={self.asked.cells}, at commits {labels.listed(known)}",
            file=sys.stderr,
            flush=True,
        )

    def _whole(self, cell: cells.Cell, by_place: Mapping[Any, Any]) -> dict[str, Any]:
        """The options of a cell's run, with those of its teacher's as `taught_by`."""
        options, teacher = cell.options | self.seeds, by_place.get(cell.teacher)
        if teacher is None:
            return options
        return options | {"taught_by": self._whole(teacher, by_place)}

    def _rules(self, cell: cells.Cell, by_place: Mapping[Any, Any]) -> dict[str, Any]:
        """The options of a cell's run as JSON, also those that a preset decides.

        Those of its teacher's are among them, and those of execution are not.
        """
        config, hparams = resolve.configure(cells.known(cell.options | self.seeds))
        every = {name: one for name, one in vars(config).items() if name not in _HOW}
        rules = json.loads(json.dumps(every | vars(hparams), default=str))
        teacher = by_place.get(cell.teacher)
        if teacher is None:
            return rules
        return rules | {"taught_by": self._rules(teacher, by_place)}

    def _write_model(self, teacher: cells.Cell) -> None:
        """Writes the first seed's server model of a teacher to `MODEL` in its folder.

        Runs the teacher unless it is finished. Keeps a file newer than that run.
        """
        folder, options = self.folder(teacher), teacher.options | self.seeds
        path, summary = folder / MODEL, folder / finished.SUMMARY

        def is_there() -> bool:
            is_current = path.is_file() and stored(folder, options) is not None
            return is_current and path.stat().st_mtime >= summary.stat().st_mtime

        if processes.on_first(is_there):
            return
        run(folder, options | self.execution)
        names = self.execution.keys() & {"distributed", "data_dir"}
        where = {name: self.execution[name] for name in names}
        experiment_lib.load(folder, **where).save_model(path)

    def write_page(self) -> None:
        """Writes a page about the finished cells, with the paper's numbers."""
        from launch.show import page, svg  # slow imports, jinja2 and matplotlib

        path = self.asked.report
        names = {
            self.folder(cell): f"{cell.row}, {cell.value}"
            for cell in self.cells
            if self.results[cell.place] is not None
            and (self.folder(cell) / finished.SUMMARY).is_file()
        }
        if not names:
            line = "no cell is finished, or none has a folder here"
            flags.fail(f"--report={path}: {line}")
        entries = page.read(list(names), list(names.values()))
        shown = self.shown()
        with ending.writing("report", path):
            svg.write(path, page.page(entries, tables=[shown], title=shown.title))
        print(path)
