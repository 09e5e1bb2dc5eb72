"""A study of methods: tuned on validation rows, then run with several seeds.

A method's trials are runs in `FOLDER/runs`: a sweep of the tuned options, with one more
for each value of an option that no sweep can take, and then the seeds at the best
point. All of them measure test rows, but only validation rows choose.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import numbers
import pathlib
import shutil
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from data import files
from fedjax_pfl import checkpoint, json_text
from launch.assemble import given as given_lib
from launch.config import algorithm_file, limits, registry
from launch.experiment import Experiment, experiment
from launch.folder import finished, lock, record, tracking
from launch.folder.record import Record
from launch.machine import processes
from launch.show import derived, looks
from launch.tables import asked, estimates, schedule, store, trials, tuning

if TYPE_CHECKING:
    from launch.show import table

FILE, FINE_TUNED = asked.FILE, asked.FINE_TUNED
STUDY, PACKED = store.STUDY, "study of methods"


class Study:
    """Methods in one or more settings, see `study`; everything is in `folder`.

    `rows` are the names of the methods, `settings` those of the settings, `asked` is
    all that was asked for, and `schedule` has the trials. `failed` has those of the
    last `run()` that could not run.
    """

    def __init__(self, given: Mapping[str, Any], folder: Any, is_opened: bool = False):
        """Prepares a study in the form of `FILE`, with objects where Python gave them.

        With `is_opened` it is what the folder holds. Raises a ValueError of one line if
        an option is wrong or the folder holds something else.
        """
        self.asked = asked.Asked(given, reads_files=not is_opened)
        self.rows, self.control = self.asked.rows, self.asked.control
        self.settings = self.asked.settings
        self._is_opened, self._temporary = is_opened, None
        if not folder:
            self._temporary = tempfile.TemporaryDirectory()
            folder = self._temporary.name
        self._folder, self._home = files.given(folder, "study: folder"), files.here()
        self.failed: list[str] = []
        self._read = given_lib.Read()
        with self._read.used():
            self._body, prepared = self._prepared()
        self.schedule = schedule.Schedule(self.asked, prepared, lambda: self.folder)
        self._noted: list[str] = prepared.notes
        self._told: dict[str, None] = {}  # lines of the last run, in order
        self._records: dict[pathlib.Path, Record] = {}

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the study, as it was given unless the process has moved."""
        return files.since(self._home, self._folder)

    def _prepared(self) -> tuple[dict[str, Any], asked.Prepared]:
        """What the folder's file says, or is to say, and the study made ready."""
        path, asks = self.folder / STUDY, self.asked
        if path.is_file():
            held = _held(path)
            may_differ = asks.has_code or trials.is_of_python(asks.given)
            is_same = held["given"] == asks.given and not may_differ
            if self._is_opened or is_same:
                with files.named(f"{path} is of another study, or damaged"):
                    return held, asks.prepared_before(held["prepared"])
        elif store.is_taken(self.folder):
            raise ValueError(
                f"folder={self.folder} holds something else than a study; give another"
            )
        prepared = asks.prepared()
        body = {"study": PACKED, "given": asks.given}
        return body | {"prepared": trials.as_json(prepared)}, prepared

    def _begin(self) -> None:
        """Writes what the study is, unless the folder says so already."""
        path = self.folder / STUDY
        if not path.is_file() or _held(path) != self._body:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self._body, indent=1) + "\n"
            finished.write_text(path, text, is_shared=True)

    def lines(self, shard: tuple[int, int] = (1, 1)) -> list[str]:
        """A line for each known trial of a shard, see `run`: finished or to run."""
        out = []
        for name, trial in self.schedule.every(self._units(shard)):
            state = "after its tuning"
            if trial is not None:
                state = "finished" if self.schedule.is_finished(trial) else "to run"
            out.append(f"{name:<60} {state}")
        return out

    def _units(self, shard: Any) -> list[tuple[str, str]]:
        """(setting, method) pairs of a shard; ValueError if it is none."""
        index, count = _shard(shard)
        return self.asked.units[index - 1 :: count]

    def estimate(self, shard: tuple[int, int] = (1, 1)) -> estimates.Estimate:
        """Minutes, memory and trials of each method, from some rounds that are timed.

        Runs nothing else and changes nothing. A sweep and several seeds count as that
        many runs, as on a CPU, and `early_stop` is not foreseen. `shard` is as in
        `run`.
        """
        found = []
        for setting, base in self._units(shard):
            first = self.schedule.tuning(setting, base)
            swept = self.schedule.tuned(setting, base)["sweep"]
            points = math.prod(len(self.asked.tune[name]) for name in swept)
            finals = self.schedule.finals(setting, base)
            variants = [points * self.asked.tune_seeds] * len(first)
            variants += [self.asked.seeds] * len(finals)
            known = filter(None, [*first, *finals])
            done = [one for one in known if self.schedule.is_finished(one)]
            one = self.schedule.trial(setting, base, "", {"num_seeds": 1})
            name, options = ", ".join(filter(None, [base, setting])), one.options
            self._need_python(one)
            made = self._built(options)
            found.append(estimates.of(made, name, variants, len(done)))
        return estimates.Estimate(found)

    def run(
        self,
        *,
        progress: bool = True,
        shard: tuple[int, int] = (1, 1),
        cell_timeout: float = 0.0,
    ) -> Study:
        """Runs all trials that are not finished, and returns itself.

        Other processes may run the same study in the same folder at once: a trial that
        one of them holds is left to it. A trial that fails is said and left out; the
        next `run()` tries it again.

        Args:
            progress: Whether to show the progress of each trial.
            shard: (i, n): only each n-th method from the i-th on, counted from 1 over
                all settings, so that n machines can share a study. Their folders are
                merged by copying one into the other.
            cell_timeout: Minutes after which a trial is saved and left, 0 = never. The
                next `run()` continues it.

        Raises:
            ValueError: `shard` or `cell_timeout` is not valid.
            KeyboardInterrupt: after Ctrl-C, once the call in progress is saved.
        """
        units = self._units(shard)
        if not isinstance(cell_timeout, numbers.Real) or not cell_timeout >= 0:
            came = limits.shown(cell_timeout)
            raise ValueError(f"cell_timeout={came}: expected minutes, 0 = never")
        self._begin()
        self.failed, self._shows, self._told = [], progress, {}
        for note in self._noted:
            self._say(f"note: {note}", is_warning=True)
        for setting, base in units:
            first = self.schedule.tuning(setting, base)
            if not all([self._run(one, progress, cell_timeout) for one in first]):
                continue
            try:
                finals = self.schedule.finals(setting, base)
            except ValueError as error:  # such as values that all diverged
                self._say(f"note: {base} failed: {error}", is_warning=True)
                self.failed.append(base)
                continue
            for final in finals:
                self._run(final, progress, cell_timeout)
        for row, setting, chosen in self.choices():
            where = f" in {setting}" * bool(setting)
            if chosen.num_equal > 1:
                self._say(
                    f"note: {row}{where}: {chosen.num_equal} points have the best "
                    f"{chosen.metric}, {chosen.value:.6g}; the first of them was taken",
                    is_warning=True,
                )
            for name in chosen.edges:
                best, values = chosen.options[name], self.asked.tune[name]
                self._say(
                    f"note: {row}{where}: the best {name}, {best}, is at the end of "
                    f"its values {values}; others may be better",
                    is_warning=True,
                )
        return self

    @property
    def notes(self) -> list[str]:
        """Lines about how options were taken, and what the last `run()` found."""
        return [*dict.fromkeys([*self._noted, *self._told])]

    def _say(self, line: str, is_warning: bool = False) -> None:
        """Shows a line with the progress, or only as a Python warning."""
        if line.startswith("note: "):
            self._told[line.removeprefix("note: ")] = None
        if self._shows:
            processes.say(line, flush=True)
        elif is_warning:
            warnings.warn(line, stacklevel=4)

    def choices(self) -> list[tuple[str, str, tuning.Choice]]:
        """(row, setting, choice) of all rows that are tuned so far.

        Those whose tuning is damaged are left out, as `run()` mends or names it.
        """
        out = []
        for setting, row in itertools.product(self.settings, self.rows):
            with contextlib.suppress(ValueError):
                out.append((row, setting, self.schedule.choice(setting, row)))
        return [one for one in out if one[2] and one[2].metric]

    def _run(self, trial: trials.Trial, progress: bool, cell_timeout: float) -> bool:
        """Runs a trial unless it is finished; returns whether it is finished now."""
        begin = time.perf_counter()
        try:
            if self.schedule.is_finished(trial) and not self._must_mend(trial):
                return True
            every = (one for _, one in self.schedule.every() if one is not None)
            equal = (one for one in every if one.key == trial.key)
            others = (one for one in equal if one.name != trial.name)
            same = next(filter(self._is_whole, others), None)
            if same is not None:
                self._copy(same, trial)
            else:
                self._say(f"{trial.name} -> {self.schedule.path(trial)}")
                if not self._trained(trial, progress, cell_timeout):
                    return False
        except lock.Held as error:
            line = f"note: {trial.name} is left to another process: {error}"
            self._say(line, is_warning=True)
            return False
        except (ValueError, MemoryError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                if "RESOURCE_EXH" not in str(error):
                    raise
                error = "out of memory of the device"
            self._say(f"note: {trial.name} failed: {error}", is_warning=True)
            self.failed.append(trial.name)
            return False
        seconds = round(time.perf_counter() - begin, 1)
        self.schedule.write(trial, seconds=seconds)
        return True

    def _is_whole(self, trial: trials.Trial) -> bool:
        """Whether a trial is finished and its run is not damaged."""
        with contextlib.suppress(ValueError):
            return self.schedule.is_finished(trial) and not self._must_mend(trial)
        return False

    def _must_mend(self, trial: trials.Trial) -> bool:
        """Whether a finished run is damaged, and a checkpoint has what it lacks.

        Raises a ValueError if there is none.
        """
        try:
            self.schedule.summary(trial)
        except ValueError:
            folder = self.schedule.path(trial) / finished.CHECKPOINTS
            if not checkpoint.saved(folder):
                raise
            return True
        return False

    def _copy(self, done: trials.Trial, trial: trials.Trial) -> None:
        """Copies a finished run, unless another process computes it (`lock.Held`)."""
        held = lock.Lock(self.schedule.path(trial))
        held.acquire()
        try:
            given = {"dirs_exist_ok": True, "ignore": shutil.ignore_patterns(lock.NAME)}
            shutil.copytree(
                self.schedule.path(done), self.schedule.path(trial), **given
            )
        finally:
            held.release()

    def _trained(self, trial: trials.Trial, progress: bool, minutes: float) -> bool:
        """Runs or continues a trial's run; False if its time was over."""
        made = self._experiment(trial)
        for note in made.notes:
            if note not in self._told:
                self._say(f"note: {note}")
        begin = None
        if not self.schedule.has_begun(trial):
            begin = functools.partial(self.schedule.write, trial)
        if not trials.train(made, progress, minutes, begin):
            line = f"note: {trial.name}: its time is over after round {made.round}"
            self._say(line, is_warning=True)
            return False
        if made.config.sweep:
            # Only the choice is read.
            path = self.schedule.path(trial) / finished.CHECKPOINTS
            shutil.rmtree(path, ignore_errors=True)
        return True

    def runs(self, setting: str = "") -> dict[str, Record | None]:
        """The records of each row in a setting, None where it is not finished.

        Those of a fine-tuned row are `derived.fine_tuned`, unless validation rows say
        that no fine-tuning is better.
        """
        setting, out = self._setting(setting), {}
        for row in self.rows:
            final = self.schedule.final(setting, row)
            if final is None or not self.schedule.is_finished(final):
                out[row] = None
                continue
            path = self.schedule.path(final)
            if path not in self._records:
                try:
                    self._records[path] = record.read(path)
                except ValueError as error:
                    line = f"{error}; run() mends it, or says how"
                    raise ValueError(line) from error
            found = self._records[path]
            is_fine_tuned = self.schedule.choice(setting, row).is_fine_tuned
            out[row] = derived.fine_tuned(found) if is_fine_tuned else found
        return out

    def _done(self, setting: str) -> dict[str, Record]:
        """The finished rows of a setting; ValueError if there are none."""
        runs = {row: run for row, run in self.runs(setting).items() if run}
        if not runs:
            raise ValueError("nothing is finished yet; run() first")
        return runs

    def _setting(self, setting: str) -> str:
        """A setting by name, "" = the first."""
        known = self.settings
        if not setting:
            return next(iter(known))
        if setting not in known:
            if list(known) == [""]:
                raise ValueError(f"setting={setting}: the study has none; omit it")
            raise ValueError(f"setting={setting}: expected one of {', '.join(known)}")
        return setting

    def load(
        self, row: str, setting: str = "", *, round: int | None = None
    ) -> Experiment:
        """A row's run with its models, to look into clients, or a ValueError.

        Of a fine-tuned row these are the models before fine-tuning. `round` is that of
        `build.load`.
        """
        setting = self._setting(setting)
        self.asked.check_row("row", row)
        final = self.schedule.final(setting, row)
        if final is None or not self.schedule.is_finished(final):
            raise ValueError(f"study: {row} is not finished; run() first")
        made = self._experiment(final)
        made.folder.reopen(round)
        return made

    def _need_python(self, trial: trials.Trial) -> None:
        """Refuses an opened study whose data or methods Python or a file gave."""
        if not self._is_opened:
            return
        algo = self.asked.methods[trial.base]["algo"]
        others = {n: value for n, value in trial.options.items() if n != "algo"}
        is_file, needs = algorithm_file.is_one(algo), trials.is_of_python(others)
        if not (is_file or trials.is_of_python(trial.options)):
            return
        if is_file:
            more, rest = " and what Python gave" * needs, ", ..." * needs
            alone = f"{str(self.schedule.path(trial))!r}, algo={algo!r}{rest}"
            raise ValueError(
                f"{trial.name} needs the code in {algo}{more}, which an opened study "
                "does not read; run the study again with its file or call, or open "
                f"this run alone: build.load({alone})"
            )
        where = "the study's own folder, not a packed one"
        if self._temporary is None:
            where = f"folder={str(self.folder)!r}"
        raise ValueError(
            f"{trial.name} needs what Python gave; call build.study(...) again with "
            f"{where}"
        )

    def _built(self, options: Mapping[str, Any]) -> Experiment:
        """A run on the study's data, which are read once."""
        with self._read.used():
            return experiment(**options)

    def _experiment(self, trial: trials.Trial) -> Experiment:
        """A trial's run with its folder."""
        self._need_python(trial)
        given = trial.options | {
            "workdir": str(self.schedule.path(trial)),
            "resume": True,
        }
        made = self._built(given)
        known, changed = trial.key["hashes"], ""
        # Trials that tune are known by the clients of their first seed, and in earlier
        # versions by those of all seeds of the study.
        splits = made.split_sha256, trials.split_sha256(made)
        is_comparable = "split" in known and made.config.num_seeds == self.asked.seeds
        is_comparable |= trial.key != trial.before
        if made.examples_sha256 != known["data"]:
            changed = "the data"
        elif "files" in known and known["files"] != trials.files_sha256(made):
            changed = "the public set, the first model, the teacher or the graph"
        elif is_comparable and known["split"] not in splits:
            changed = "the rows of the clients"
        if changed:
            raise ValueError(
                f"{trial.name}: {changed} have changed since the study in "
                f"{self.folder} began; give another folder"
            )
        return made

    def table(
        self,
        metrics: Sequence[str] = (),
        *,
        test: str = "wilcoxon",
        control: str | None = None,
        until: float | None = None,
        target: float | None = None,
    ) -> table.Table:
        """The results as a table, see `table.made`.

        `metrics`, `control` and `target` are by default those of the study, and then
        the usual metrics. A share `until` stands in place of the study's target.
        """
        from launch.show import table  # imports scipy.stats, which is slow

        control = self.control if control is None else control
        self.asked.check_row("control", control)
        runs = {setting: self.runs(setting) for setting in self.settings}
        metrics = metrics or self.asked.metrics
        if until is None and target is None:
            target = self.asked.target
        made = table.made(runs, metrics, control, test, until, target)
        lines = [
            f"{row}{f', {setting}' * bool(setting)}: no fine-tuning is better by "
            "validation rows."
            for setting in self.settings
            for row, run in runs[setting].items()
            if run and row.endswith(FINE_TUNED)
            if not self.schedule.choice(setting, row).is_fine_tuned
        ]
        return made._replace(notes=made.notes + lines)

    def plot(
        self, kind: str = "curves", metric: str = "", setting: str = "", **how: Any
    ) -> Any:
        """A picture of `launch.plot` with all finished rows of a setting.

        A row has the same look in all pictures. `how` is as in `Experiment.plot`.
        """
        from launch.show import figures  # imports matplotlib, which is slow

        runs = self._done(setting)
        given = list(runs.values()), metric, list(runs)
        return figures.picture(kind, *given, among=self.rows, **how)

    def page(self, setting: str = "", title: str = "") -> str:
        """A page as HTML: all results as a table, and the runs of a setting.

        Curves of several settings are side by side.
        """
        from launch.show import page  # slow imports, matplotlib and jinja2

        setting = self._setting(setting)
        own = looks.looks(self.rows)
        names = dict(zip(self.rows, looks.titles(self.rows), strict=True))
        every = {
            one: [page.Entry(names[r], own[r], run) for r, run in runs.items() if run]
            for one, runs in ((one, self.runs(one)) for one in self.settings)
            if one == setting or any(runs.values())
        }
        first = next(iter(self._done(setting).values()))
        subject = f"{len(self.rows)} methods on {page.data_name(first)}"
        title = title or ", ".join(filter(None, [subject, setting]))
        control = names[self.control] if self.control in self._done(setting) else ""
        sheet = self.table().to_sheet("Methods")
        return page.page(every[setting], control, [sheet], title, every)

    def _tables(self) -> dict[str, str]:
        """The results as a table, by the name of its file."""
        shown = self.table()
        return {"tables.md": shown.to_markdown(), "tables.tex": shown.to_latex()}

    def write(self) -> list[pathlib.Path]:
        """Writes the tables and for each setting a page and pictures; their paths."""
        from launch.show import svg  # slow imports

        out = []
        for name, text in self._tables().items():
            out.append(self.folder / name)
            finished.write_text(out[-1], text, is_shared=True)
        for setting in self.settings:
            if not any(self.runs(setting).values()):
                continue
            end = f"-{asked.slug(setting)}" * bool(setting)
            for kind in ("curves", "ecdf"):
                out.append(self.folder / f"{kind}{end}.pdf")
                self.plot(kind, setting=setting).savefig(out[-1])
            out.append(self.folder / f"report{end}.html")
            svg.write(out[-1], self.page(setting))
        return out

    def pack(self, path: Any) -> pathlib.Path:
        """Writes a zip file of the study that `build.load` opens, without checkpoints.

        It holds flags, records, summaries, clients' accuracies, counts of each client's
        classes, versions and the tables.
        """
        target = files.given(path, "pack")
        if target.suffix != ".zip":
            raise ValueError(f"pack({str(path)!r}): expected a name that ends in .zip")
        self._begin()
        partial = target.with_name(f"{target.name}{finished.PARTIAL}")
        ours = {one.resolve() for one in (target, partial)}
        files_there = sorted(self.folder.rglob("*"))
        every = [one for one in files_there if one.resolve() not in ours]
        tables = self._tables()
        skipped = {finished.CHECKPOINTS, lock.NAME, tracking.FOLDER, *tables}
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as out:
                for file in every:
                    name = file.relative_to(self.folder)
                    is_partial = file.suffix == finished.PARTIAL
                    is_ours = not skipped & set(name.parts) and not is_partial
                    if file.is_file() and is_ours:
                        out.write(file, name)
                for name, text in tables.items():
                    out.writestr(name, text)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
        return target

    def __repr__(self) -> str:
        every = [one for s in self.settings for one in self.runs(s).values()]
        done = sum(one is not None for one in every)
        return (
            f"study of {', '.join(self.rows)} in {self.folder}: {done} of {len(every)} "
            "results"
        )


def _shard(given: Any) -> tuple[int, int]:
    """The shard i of n; ValueError if it is none."""
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2
    if not is_pair or not all(map(limits.is_whole, given)):
        raise ValueError(f"shard={given!r}: expected (i, n), such as (1, 2)")
    index, count = given
    if not 1 <= index <= count:
        raise ValueError(
            f"shard={index}/{count}: expected 1/{count} to {count}/{count}"
        )
    return index, count


def _held(path: pathlib.Path) -> dict[str, Any]:
    """What the folder of a study holds; ValueError if it is another kind or damaged."""
    kinds = {"study": str, "given": FILE, "prepared": list}
    try:
        return json_text.read(path.read_bytes(), kinds)
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        line = f"{path} is of another study, or damaged: {reason}"
        raise ValueError(line) from error


def study(
    methods: Sequence[Any] | Mapping[str, Mapping[str, Any]],
    *,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    seeds: int = 1,
    tune_seeds: int = 1,
    control: str = "",
    metrics: Sequence[str] = (),
    target: float | None = None,
    folder: Any = "",
    **options: Any,
) -> Study:
    """A study of methods on the same clients: tuned, then run with several seeds.

    Examples:
        >>> made = study(
        ...     ["local", "fedavg", "fedavg+ft"], control="local", seeds=2,
        ...     tune={"client_lr": [0.01, 0.1]}, val_split=0.3, fine_tune_epochs=1,
        ...     model="mlp", num_clients=4, examples_per_client=30, rounds=2)
        >>> print(made.run(progress=False).table(["client_accuracy", "hurt"]).rows)
        ['local', 'fedavg', 'fedavg+ft']

    Args:
        methods: Names or custom algorithms, or each row's options by its name, as in
            `build.compare`. `fedavg+ft` is FedAvg's fine-tuned clients as a row, for
            any method.
        settings: More options by the name of a setting, such as
            `{"alpha 0.1": {"partition_alpha": 0.1}, ...}`: columns of the table.
        tune: Values of options. Each method is run at every combination of those that
            it has, and keeps the best by validation rows.
        seeds, tune_seeds: Seeds of the results and of tuning, each from `seed` on.
        control: The method that others are compared with.
        metrics: Those of its table, () = the usual ones.
        target: What `until_rounds` and its like wait for, such as an accuracy of 0.8,
            None = a share of the control's result.
        folder: Where the study is kept and continues; "" = a temporary folder, which is
            gone with the study.
        **options: As in `build.experiment`, for all methods. With validation rows, of
            `val_split` or of the data, the `summary` is `best_validation` unless it is
            given, or a method cannot be measured on them.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    if odd := {"run", "progress", "on_record"} & options.keys():
        raise ValueError(
            f"study: {min(odd)}= belongs to build.compare; omit it, as a study begins "
            "with its .run()"
        )
    for what, value in (("settings", settings), ("tune", tune)):
        if not isinstance(value or {}, Mapping):
            raise ValueError(f"study: {what}={value!r}: expected an object by names")
    for what, names in (("methods", methods), ("settings", settings)):
        known = names if isinstance(names, Mapping) else ()
        if odd := [name for name in known if not isinstance(name, str)]:
            raise ValueError(f"study: {what}: the name {odd[0]!r} is not a text")
    given: dict[str, Any] = {"rows": _rows(methods), "control": control}
    given |= {"seeds": seeds, "tune_seeds": tune_seeds}
    given |= {"common": {"options": options}, "metrics": metrics}
    if target is not None:
        given["target"] = target
    given["tune"] = {
        name: list(v) if isinstance(v, Iterable) and not isinstance(v, str) else v
        for name, v in (tune or {}).items()
    }
    if settings:
        given["values"] = {name: {"options": v} for name, v in settings.items()}
    return Study(given, folder)


def _rows(
    methods: Sequence[Any] | Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """The rows of `study`, as its file has them; ValueError for two of one name."""
    if isinstance(methods, Mapping):
        return {name: {"options": own} for name, own in methods.items()}
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        raise ValueError(f"study: expected a list of methods, got {methods!r}")
    rows = {}
    for one in methods:
        is_tuned = isinstance(one, str) and one.endswith(FINE_TUNED)
        algo = one.removesuffix(FINE_TUNED) if is_tuned else one
        name = registry.algorithm_name(algo)
        own = {} if name == algo or is_tuned else {"options": {"algo": algo}}
        name += FINE_TUNED * is_tuned
        if name in rows:
            raise ValueError(f"study: two methods have the name {name}; name them")
        rows[name] = own
    return rows


def read(path: pathlib.Path, folder: Any = "", data_dir: str = "") -> Study:
    """A study from a JSON file, with its data in `data_dir` if that is given.

    It has the form of a sheet in `launch/studies`: `rows` (methods), `values`
    (settings) and `common`, each with `options`, and the arguments `tune`, `seeds`,
    `tune_seeds`, `control`, `metrics` and `target` of `study`.
    """
    with files.named(f"--table={path} is not a study", OSError):
        files.check(path, "a study's file")
        given = json_text.read(path.read_bytes(), FILE)
    if data_dir:
        common = given.get("common", {})
        options = common.get("options", {}) | {"data_dir": data_dir}
        given |= {"common": common | {"options": options}}
    return Study(given, folder)


def is_of_methods(path: pathlib.Path) -> bool:
    """Whether a path is the folder of a study of methods, or a zip file of `pack`."""
    if path.is_file() and path.suffix == ".zip":
        return True
    with contextlib.suppress(ValueError, OSError):
        return json_text.read((path / STUDY).read_bytes())["study"] == PACKED
    return False


def opened(path: pathlib.Path) -> Study:
    """The study in a folder, or in a zip file of `pack` (in a temporary folder)."""
    temporary = None
    if path.is_file():
        temporary = tempfile.TemporaryDirectory()
        kinds = zipfile.BadZipFile, OSError
        with files.named(f"{path} is not a packed study", *kinds):
            with zipfile.ZipFile(path) as file:
                file.extractall(temporary.name)
        path = pathlib.Path(temporary.name)
    held = _held(path / STUDY)
    found = Study(held["given"], path, is_opened=True)
    found._temporary = temporary
    return found
