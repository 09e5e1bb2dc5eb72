"""A study of methods: tuned on validation rows, then run with several seeds.

A method's trials are runs in `FOLDER/runs`: a sweep of the tuned options, with one more
for each value of an option that no sweep can take, and then the seeds at the best
point. All of them measure test rows, but only validation rows choose.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import pathlib
import shutil
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from data import files
from fedjax_pfl import json_text, metric_kinds
from launch import compare
from launch.config import algorithm_file, registry, schema, sweep
from launch.experiment import Experiment, experiment
from launch.folder import finished, lock, record, tracking
from launch.folder.record import Record
from launch.machine import processes
from launch.run import summaries
from launch.show import derived, looks
from launch.tables import cells, estimates, store, trials, tuning

if TYPE_CHECKING:
    from launch.show import table

FINE_TUNED = registry.FINE_TUNED
STUDY, PACKED = store.STUDY, "study of methods"
_EPOCHS = "fine_tune_epochs"
_NONE = ("", ".", "..")  # names of no folder
# A study as a file, see `read`
_OPTIONS = {"options?": dict, str: json_text.NOTHING}
FILE = {
    "study?": str,
    "rows": {str: _OPTIONS},
    "values?": {str: _OPTIONS},
    "common?": _OPTIONS,
    "tune?": {str: list},
    "seeds?": int,
    "tune_seeds?": int,
    "control?": str,
    "metrics?": [str],
    str: json_text.NOTHING,
}


class _Setting(NamedTuple):
    """A setting of a study as it is made ready.

    Attributes:
        options: Those of all its runs.
        tuned: The values to try by method and option.
        hashes: Those of data and code by method.
        runs: Each run's configuration, and whether it has validation rows.
        notes: Lines about it.
    """

    options: dict[str, Any]
    tuned: dict[str, Any]
    hashes: dict[str, dict[str, str]]
    runs: list[tuple[schema.Config, bool]]
    notes: list[str]


class Study:
    """Methods in one or more settings, see `study`; everything is in `folder`.

    `rows` are the names of the methods, `settings` those of the settings. `failed` has
    the trials of the last `run()` that could not run.
    """

    def __init__(self, given: Mapping[str, Any], folder: Any, is_opened: bool = False):
        """Prepares a study in the form of `FILE`, with objects where Python gave them.

        With `is_opened` it is what the folder holds. Raises a ValueError of one line if
        an option is wrong or the folder holds something else.
        """
        self._given = trials.as_json(given)
        with files.named("study"):
            json_text.check(self._given, FILE)
        self.rows = list(given["rows"])
        self.settings = {
            name: one.get("options", {})
            for name, one in (given.get("values") or {"": {}}).items()
        }
        self.seeds, self.tune_seeds = given.get("seeds", 1), given.get("tune_seeds", 1)
        tune = given.get("tune", {})
        self.tune = {name: list(map(trials.plain, v)) for name, v in tune.items()}
        self.control = given.get("control", "")
        self.metrics = list(given.get("metrics", ()))
        self.options = dict(given.get("common", {}).get("options", {}))
        self._bases = _bases(given["rows"])
        algos = [own["algo"] for own in self._bases.values()]
        self._has_code = not all(map(registry.is_ours, algos))
        self._files: dict[str, str] = {}  # hashes of files by method
        for base, own in self._bases.items():
            # A file is read once, so that all of a study's runs have the same code.
            if algorithm_file.is_one(own["algo"]) and not is_opened:
                path, own["algo"] = own["algo"], registry.algorithm(own["algo"])
                self._files[base] = algorithm_file.digest(path)
        # (setting, method) pairs, each of which one process runs
        self._units = list(itertools.product(self.settings, self._bases))
        self._check()
        self._is_opened, self._temporary = is_opened, None
        if not folder:
            self._temporary = tempfile.TemporaryDirectory()
            folder = self._temporary.name
        self.folder, self.failed = pathlib.Path(folder), []
        self._body: dict[str, Any] = {}
        self._options, self._tuned, self._hashes, self._asked = self._prepared()
        self._told: dict[str, None] = {}  # lines of the last run, in order
        self._records: dict[str, Record] = {}
        self._choices: dict[tuple[str, str], tuning.Choice] = {}

    def _check(self) -> None:
        if odd := [one for one in (self.seeds, self.tune_seeds) if one < 1]:
            raise ValueError(f"study: seeds={odd[0]}: expected 1 or more")
        self._check_row("control", self.control)
        for names in (self.settings, self._bases):
            slugs = {_slug(name): name for name in names}
            if odd := [name for one, name in slugs.items() if name and one in _NONE]:
                raise ValueError(f"study: {odd[0]} cannot be the name of a folder")
            if odd := [one for one in names if one not in slugs.values()]:
                other = slugs[_slug(odd[0])]
                raise ValueError(
                    f"study: {odd[0]} and {other} are one name of a folder; change one"
                )
        tuning.check(self.tune)
        for name, values in self.tune.items():
            if not values or len(set(map(str, values))) < len(values):
                raise ValueError(f"study: tune: {name}: expected different values")
        fine_tuned = [row for row in self.rows if row.endswith(FINE_TUNED)]
        for setting, own in self.settings.items():
            options = self.options | own
            if fine_tuned and not (options.get(_EPOCHS) or _EPOCHS in self.tune):
                where = f" in {setting}" * bool(setting)
                raise ValueError(f"study: {fine_tuned[0]}{where} needs {_EPOCHS}")
            for name in ("num_seeds", "sweep", "workdir", "resume", "target"):
                if name in options:
                    raise ValueError(f"study: {name} is decided by the study; omit it")

    def _check_metrics(self, every: Sequence[tuple[schema.Config, bool]]) -> list[str]:
        """Refuses metrics that no run can have, and names those that look misspelt.

        `every` has each run's configuration, and whether it has validation rows.
        """
        validates, is_tuned = metric_kinds.VALIDATION, _EPOCHS in self.tune
        has_val = any(has for _, has in every)
        has_unseen = any(one.unseen_clients for one, _ in every)
        is_adapted = is_tuned or any(one.fine_tune_epochs for one, _ in every)
        for name in self.metrics:
            plain = name.removeprefix(validates)
            of_unseen = plain.startswith("unseen_")
            is_later = plain.removeprefix("unseen_").startswith("fine_tuned_")
            needs = {
                "val_split": name != plain and not has_val,
                "unseen_clients": of_unseen and not has_unseen,
                _EPOCHS: is_later and not is_adapted,
            }
            if lacking := [option for option in needs if needs[option]]:
                raise ValueError(f"study: metrics: {name} needs {lacking[0]}")
        odd = list(filter(None, map(derived.unusual, self.metrics)))
        if odd and not self._has_code and not any(one.eval_metrics for one, _ in every):
            raise ValueError(f"study: metrics: {odd[0]}")
        return odd

    def _check_row(self, what: str, name: str) -> None:
        """Refuses a name that is no row's; "" is none."""
        if name and name not in self.rows:
            every = ", ".join(self.rows)
            raise ValueError(f"study: {what}={name}: expected one of {every}")

    def _prepared(self) -> Sequence[Any]:
        """Options, those to tune, and hashes by setting and method; and notes.

        Sets `_body`, what the folder's file says.
        """
        path = self.folder / STUDY
        if path.is_file():
            held = _held(path)
            may_differ = self._has_code or trials.is_of_python(self._given)
            is_same = held["given"] == self._given and not may_differ
            if self._is_opened or is_same:
                self._body = held
                return held["prepared"]
        elif store.is_taken(self.folder):
            raise ValueError(
                f"folder={self.folder} holds something else than a study; give another"
            )
        of_settings = {
            setting: self._of_setting(self.options | own | {"num_seeds": self.seeds})
            for setting, own in self.settings.items()
        }
        known = [registry.fields_of(own["algo"]) for own in self._bases.values()]
        for name in self.tune:
            if not any(name in fields for fields in known):
                raise ValueError(f"study: tune: no method has the option {name}")
        notes = [note for one in of_settings.values() for note in one.notes]
        notes += self._check_metrics(
            [run for one in of_settings.values() for run in one.runs]
        )
        options, tuned, hashes = (
            {setting: getattr(one, name) for setting, one in of_settings.items()}
            for name in ("options", "tuned", "hashes")
        )
        prepared = options, tuned, hashes, list(dict.fromkeys(notes))
        self._body = {"study": PACKED, "given": self._given}
        self._body["prepared"] = trials.as_json(prepared)
        return prepared

    def _of_setting(self, options: dict[str, Any]) -> _Setting:
        """Prepares the methods with the options of a setting; ValueError if odd."""
        notes = [
            f"{name}={options[name]} is of no row, as it is tuned"
            for name in self.tune
            if name in options
        ]
        chosen = {"summary": summaries.BEST} | options
        given = chosen if options.get("val_split") else options
        compared = compare.compare(self._bases, run=False, **given)
        val = next(iter(compared.values())).data.partition.val
        has_val = not isinstance(val, tuple)
        runs = [(made.config, has_val) for made in compared.values()]
        if self.tune and options.get("summary") == "best":
            raise ValueError(
                "study: summary=best chooses rounds by test rows, which tune must "
                "not; omit it, or take best_validation"
            )
        if self.tune and not has_val:
            raise ValueError(
                "study: tune chooses by validation rows; give val_split, or your "
                "own (docs/data.md#your-own-split)"
            )
        cannot = [base for base, made in compared.items() if not made.can_choose]
        if has_val and given is not chosen and "summary" not in options:
            # Only the data say that they have validation rows of their own.
            if not cannot:
                compared = compare.compare(self._bases, run=False, **chosen)
            else:
                notes.append(
                    f"validation rows choose no round, as {', '.join(cannot)} "
                    "cannot be measured on them; the summary is that of the options"
                )
        notes += compared.notes
        tuned = {}
        for base, made in compared.items():
            own = self._bases[base]
            free = {n: v for n, v in self.tune.items() if n not in own}
            tuned[base] = tuning.ways(free, made, own["algo"])
            odd = [n for n in self.tune if n in own]
            notes += [f"{base} has its own {n} and is not tuned in it" for n in odd]
        is_owned = has_val and bool(val.count.any())
        for row in self.rows:
            base = row.removesuffix(FINE_TUNED)
            is_odd = base in cannot or (row != base and not is_owned)
            if is_odd and any(tuned[base].values()):
                raise ValueError(
                    f"study: tune: {row} cannot be measured on validation rows "
                    "that belong to no client; give rows of clients with "
                    f"partition=natural, or val_split in their place, or omit {row}"
                )
        hashes = {
            base: {
                "data": one.examples_sha256,
                "own": self._files.get(base, one.own_sha256),
                "split": one.split_sha256,
                "tuned": trials.split_sha256(one),
                "files": trials.files_sha256(one),
            }
            for base, one in compared.items()
        }
        return _Setting(dict(compared.options), tuned, hashes, runs, notes)

    def _begin(self) -> None:
        """Writes what the study is, unless the folder says so already."""
        path = self.folder / STUDY
        if not path.is_file() or _held(path) != self._body:
            self.folder.mkdir(parents=True, exist_ok=True)
            finished.write_text(path, json.dumps(self._body, indent=1) + "\n")

    def _trial(
        self,
        setting: str,
        base: str,
        label: str,
        options: Mapping[str, Any],
        split: str = "split",
    ) -> trials.Trial:
        """A run with more options; `label` ends its name, `split` names its hash."""
        names = [_slug(one) for one in (setting, base) if one]
        given = {**self._options[setting][base], **options}
        every = self._hashes[setting][base]
        # Earlier versions had no hashes of the clients' rows, nor of other files.
        kept = {one: every[one] for one in ("data", "own", "split") if one in every}
        hashes = kept | ({"split": every[split]} if split in every else {})
        hashes |= {"files": every["files"]} if every.get("files") else {}
        keys = (trials.as_json(given | {"hashes": one}) for one in (hashes, kept))
        return trials.Trial("/".join(names) + label, given, *keys)

    def tuning(self, setting: str, base: str) -> list[trials.Trial]:
        """The trials that tune a method, [] if there is nothing to tune."""
        swept, single = (self._tuned[setting][base][kind] for kind in ("sweep", "runs"))
        if not swept and not single:
            return []
        line = sweep.text({name: self.tune[name] for name in swept}) if swept else ""
        out = []
        for values in itertools.product(*(self.tune[name] for name in single)):
            one = dict(zip(single, values, strict=True))
            label = "".join(f",{n}={v}" for n, v in one.items()).replace("/", "-")
            more = {"num_seeds": self.tune_seeds, "sweep": line, **one}
            out.append(self._trial(setting, base, f".tune{label}", more, "tuned"))
        return out

    def choice(self, setting: str, row: str) -> tuning.Choice | None:
        """What validation rows chose for a row, None before its trials are finished.

        A row is tuned by the metric that it shows: a method by `val_client_accuracy`
        (or the first of `summaries.CHOOSING` that it has), its fine-tuned clients by
        the better of `val_fine_tuned_accuracy` and that. The seeds' mean counts, after
        each seed's best round, and a point that diverged wins only if all did.
        """
        if (setting, row) in self._choices:
            return self._choices[setting, row]
        base, points = row.removesuffix(FINE_TUNED), []
        every = self.tuning(setting, base)
        for trial in every:
            if not self.is_finished(trial):
                return None
            done = finished.read(self._path(trial))
            fixed = {n: trial.options[n] for n in self._tuned[setting][base]["runs"]}
            for part in done.get("sweep", [done]):
                points.append((fixed | part.get("point", {}), part))
        found = tuning.Choice({}, is_fine_tuned=row != base)
        if every:
            found = tuning.best(points, self.tune, row != base)
        return self._choices.setdefault((setting, row), found)

    def final(self, setting: str, row: str) -> trials.Trial | None:
        """The trial with all seeds at the best point, None before that is known."""
        base, chosen = row.removesuffix(FINE_TUNED), self.choice(setting, row)
        if chosen is None:
            return None
        label = ""
        if row != base:
            plain = self.choice(setting, base)
            label = "" if plain.options == chosen.options else ".ft"
        return self._trial(setting, base, label, chosen.options)

    def _finals(self, setting: str, base: str) -> list[trials.Trial | None]:
        """The last trials of a method and of its fine-tuned row, each once."""
        rows = [r for r in (base, base + FINE_TUNED) if r in self.rows] or [base]
        found = [self.final(setting, row) for row in rows]
        return list({one.name if one else "": one for one in found}.values())

    def _path(self, trial: trials.Trial) -> pathlib.Path:
        return self.folder / "runs" / self._place(trial)

    def _cell(self, trial: trials.Trial) -> pathlib.Path:
        return self.folder / "cells" / f"{self._place(trial)}.json"

    def _place(self, trial: trials.Trial) -> str:
        """A trial's name, with a hash if the folder has it for one of other options.

        So a study may grow, for example by values to tune, and keeps what is done. A
        run that goes on to more rounds stays where it is.
        """
        keys = [trial.key] + [trial.before] * (trial.before != trial.key)
        others = []
        for key in keys:
            text = json.dumps(key, sort_keys=True)
            other = f"{trial.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
            if self._held_cell(other, trial) is not None:
                return other
            others.append(other)
        held = self._held_cell(trial.name, trial)
        is_free = held is None or any(trials.goes_on(held["key"], key) for key in keys)
        return trial.name if is_free else others[0]

    def _held_cell(self, place: str, trial: trials.Trial) -> dict[str, Any] | None:
        path, kind = self.folder / "cells" / f"{place}.json", {"key": dict}
        held = store.read(path, kind, "run is read again")
        is_before = held is not None and held["key"] == trial.before
        return {**held, "key": trial.key} if is_before else held

    def is_finished(self, trial: trials.Trial) -> bool:
        """Whether a trial is finished, with these options."""
        done = self._held_cell(self._place(trial), trial)
        return done is not None and "seconds" in done and done["key"] == trial.key

    def _trials(self) -> Iterator[tuple[str, trials.Trial | None]]:
        """The name and trial of every run, None before its tuning is finished."""
        for unit in self._units:
            for one in [*self.tuning(*unit), *self._finals(*unit)]:
                yield one.name if one else "/".join(filter(None, unit)), one

    def lines(self) -> list[str]:
        """A line for each known trial: finished or to run."""
        out = []
        for name, trial in self._trials():
            state = "after its tuning"
            if trial is not None:
                state = "finished" if self.is_finished(trial) else "to run"
            out.append(f"{name:<60} {state}")
        return out

    def estimate(self) -> estimates.Estimate:
        """Minutes, memory and trials of each method, from some rounds that are timed.

        Runs nothing else and changes nothing. A sweep and several seeds count as that
        many runs, as on a CPU, and `early_stop` is not foreseen.
        """
        found = []
        for setting, base in self._units:
            first = self.tuning(setting, base)
            swept = self._tuned[setting][base]["sweep"]
            points = math.prod(len(self.tune[name]) for name in swept)
            finals = self._finals(setting, base)
            variants = [points * self.tune_seeds] * len(first)
            variants += [self.seeds] * len(finals)
            known = filter(None, [*first, *finals])
            done = [one for one in known if self.is_finished(one)]
            options = self._trial(setting, base, "", {"num_seeds": 1}).options
            name = ", ".join(filter(None, [base, setting]))
            self._need_python(name, options)
            found.append(estimates.of(experiment(**options), name, variants, len(done)))
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
            ValueError: the shard is none.
            KeyboardInterrupt: after Ctrl-C, once the call in progress is saved.
        """
        index, count = shard
        if not 1 <= index <= count:
            raise ValueError(
                f"shard={index}/{count}: expected 1/{count} to {count}/{count}"
            )
        self._begin()
        self.failed, self._shows, self._told = [], progress, {}
        for note in self._asked:
            self._say(f"note: {note}", is_warning=True)
        for setting, base in self._units[index - 1 :: count]:
            first = self.tuning(setting, base)
            if not all([self._run(one, progress, cell_timeout) for one in first]):
                continue
            for final in self._finals(setting, base):
                self._run(final, progress, cell_timeout)
        for row, setting, chosen in self.choices():
            for name in chosen.edges:
                where = f" in {setting}" * bool(setting)
                best, values = chosen.options[name], self.tune[name]
                self._say(
                    f"note: {row}{where}: the best {name}, {best}, is at the end of "
                    f"its values {values}; others may be better",
                    is_warning=True,
                )
        return self

    @property
    def notes(self) -> list[str]:
        """Lines about how options were taken, and what the last `run()` found."""
        return [*dict.fromkeys([*self._asked, *self._told])]

    def _say(self, line: str, is_warning: bool = False) -> None:
        """Shows a line with the progress, or only as a Python warning."""
        if line.startswith("note: "):
            self._told[line.removeprefix("note: ")] = None
        if self._shows:
            processes.say(line, flush=True)
        elif is_warning:
            warnings.warn(line, stacklevel=4)

    def choices(self) -> list[tuple[str, str, tuning.Choice]]:
        """(row, setting, choice) of all rows that are tuned so far."""
        every = [(r, s, self.choice(s, r)) for s in self.settings for r in self.rows]
        return [one for one in every if one[2] and one[2].metric]

    def _run(self, trial: trials.Trial, progress: bool, cell_timeout: float) -> bool:
        """Runs a trial unless it is finished; returns whether it is finished now."""
        if self.is_finished(trial):
            return True
        equal = (one for _, one in self._trials() if one and one.key == trial.key)
        others = (one for one in equal if one.name != trial.name)
        same = next(filter(self.is_finished, others), None)
        begin = time.perf_counter()
        try:
            if same is not None:
                self._copy(same, trial)
            else:
                self._say(f"{trial.name} -> {self._path(trial)}")
                if not self._trained(trial, progress, cell_timeout):
                    return False
        except lock.Held as error:
            self._say(f"{trial.name} is left to another process: {error}")
            return False
        except (ValueError, MemoryError) as error:
            self._say(f"note: {trial.name} failed: {error}", is_warning=True)
            self.failed.append(trial.name)
            return False
        seconds = round(time.perf_counter() - begin, 1)
        store.write(self._cell(trial), {"key": trial.key, "seconds": seconds})
        return True

    def _copy(self, done: trials.Trial, trial: trials.Trial) -> None:
        """Copies a finished run, unless another process computes it (`lock.Held`)."""
        held = lock.Lock(self._path(trial))
        held.acquire()
        try:
            given = {"dirs_exist_ok": True, "ignore": shutil.ignore_patterns(lock.NAME)}
            shutil.copytree(self._path(done), self._path(trial), **given)
        finally:
            held.release()

    def _trained(self, trial: trials.Trial, progress: bool, minutes: float) -> bool:
        """Runs or continues a trial's run; False if its time was over."""
        made = self._experiment(trial)
        for note in made.notes:
            if note not in self._told:
                self._say(f"note: {note}")
        held, begin = self._held_cell(self._place(trial), trial), None
        if held is None or held["key"] != trial.key:
            cell, key = self._cell(trial), {"key": trial.key}
            begin = functools.partial(store.write, cell, key)
        if not trials.train(made, progress, minutes, begin):
            self._say(f"{trial.name}: its time is over after round {made.round}")
            return False
        if made.config.sweep:
            # Only the choice is read.
            path = self._path(trial) / finished.CHECKPOINTS
            shutil.rmtree(path, ignore_errors=True)
        return True

    def runs(self, setting: str = "") -> dict[str, Record | None]:
        """The records of each row in a setting, None where it is not finished.

        Those of a fine-tuned row are `derived.fine_tuned`, unless validation rows say
        that no fine-tuning is better.
        """
        setting, out = self._setting(setting), {}
        for row in self.rows:
            final = self.final(setting, row)
            if final is None or not self.is_finished(final):
                out[row] = None
                continue
            if final.name not in self._records:
                self._records[final.name] = record.read(self._path(final))
            found = self._records[final.name]
            is_fine_tuned = self.choice(setting, row).is_fine_tuned
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
        self._check_row("row", row)
        final = self.final(setting, row)
        if final is None or not self.is_finished(final):
            raise ValueError(f"study: {row} is not finished; run() first")
        made = self._experiment(final)
        made.folder.reopen(round)
        return made

    def _need_python(self, name: str, options: Mapping[str, Any]) -> None:
        """Refuses an opened study whose data or methods Python gave."""
        is_file = algorithm_file.is_one(options["algo"])
        if self._is_opened and (is_file or trials.is_of_python(options)):
            where = "the study's own folder, not a packed one"
            if self._temporary is None:
                where = f"folder={str(self.folder)!r}"
            raise ValueError(
                f"{name} needs what Python gave; call build.study(...) again with "
                f"{where}"
            )

    def _experiment(self, trial: trials.Trial) -> Experiment:
        """A trial's run with its folder."""
        self._need_python(trial.name, trial.options)
        given = trial.options | {"workdir": str(self._path(trial)), "resume": True}
        made = experiment(**given)
        known, changed = trial.key["hashes"], ""
        # Trials that tune are known by the clients of their first seed, and in earlier
        # versions by those of all seeds of the study.
        splits = made.split_sha256, trials.split_sha256(made)
        is_comparable = "split" in known and made.config.num_seeds == self.seeds
        is_comparable |= trial.key != trial.before
        if made.examples_sha256 != known["data"]:
            changed = "the data"
        elif "files" in known and known["files"] != trials.files_sha256(made):
            changed = "the first model, the teacher or the graph"
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
        until: float = 0.95,
    ) -> table.Table:
        """The results as a table, see `table.made`.

        `metrics` and `control` are by default those of the study, and then the usual
        metrics.
        """
        from launch.show import table  # imports scipy.stats, which is slow

        control = self.control if control is None else control
        self._check_row("control", control)
        runs = {setting: self.runs(setting) for setting in self.settings}
        made = table.made(runs, metrics or self.metrics, control, test, until)
        lines = [
            f"{row}{f', {setting}' * bool(setting)}: no fine-tuning is better by "
            "validation rows."
            for setting in self.settings
            for row, run in runs[setting].items()
            if run and row.endswith(FINE_TUNED)
            if not self.choice(setting, row).is_fine_tuned
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
            finished.write_text(out[-1], text)
        for setting in self.settings:
            if not any(self.runs(setting).values()):
                continue
            end = f"-{_slug(setting)}" * bool(setting)
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
        every = [one for one in sorted(self.folder.rglob("*")) if one != target]
        tables = self._tables()
        skipped = {finished.CHECKPOINTS, lock.NAME, tracking.FOLDER, *tables}
        target.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
            for file in every:
                name = file.relative_to(self.folder)
                if file.is_file() and not skipped & set(name.parts):
                    out.write(file, name)
            for name, text in tables.items():
                out.writestr(name, text)
        return target

    def __repr__(self) -> str:
        every = [one for s in self.settings for one in self.runs(s).values()]
        done = sum(one is not None for one in every)
        return (
            f"study of {', '.join(self.rows)} in {self.folder}: {done} of {len(every)} "
            "results"
        )


def _slug(name: str) -> str:
    """A name as that of a file or folder."""
    return cells.slug(name).replace("/", "-")


def _bases(rows: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods behind rows, with the options of each."""
    out: dict[str, dict[str, Any]] = {}
    for row, one in rows.items():
        base = row.removesuffix(FINE_TUNED)
        own = dict(one.get("options", {}))
        if row != base and own:
            raise ValueError(
                f"study: {row} is the fine-tuned clients of {base}; give the options "
                f"to the row {base}"
            )
        if row == base or base not in rows:
            out[base] = {"algo": base} | own
    return out


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
        folder: Where the study is kept and continues; "" = a temporary folder, which is
            gone with the study.
        **options: As in `build.experiment`, for all methods. With validation rows, of
            `val_split` or of the data, the `summary` is `best_validation` unless it is
            given, or a method cannot be measured on them.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    for what, value in (("settings", settings), ("tune", tune)):
        if not isinstance(value or {}, Mapping):
            raise ValueError(f"study: {what}={value!r}: expected an object by names")
    if isinstance(methods, Mapping):
        rows = {name: {"options": own} for name, own in methods.items()}
    else:
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
    given = {"rows": rows, "seeds": seeds, "tune_seeds": tune_seeds, "control": control}
    given |= {"common": {"options": options}, "metrics": metrics}
    given["tune"] = {
        name: list(v) if isinstance(v, Iterable) and not isinstance(v, str) else v
        for name, v in (tune or {}).items()
    }
    if settings:
        given["values"] = {name: {"options": v} for name, v in settings.items()}
    return Study(given, folder)


def read(path: pathlib.Path, folder: Any = "", data_dir: str = "") -> Study:
    """A study from a JSON file, with its data in `data_dir` if that is given.

    It has the form of a sheet in `launch/studies`: `rows` (methods), `values`
    (settings) and `common`, each with `options`, and the arguments `tune`, `seeds`,
    `tune_seeds`, `control` and `metrics` of `study`.
    """
    with files.named(f"--table={path} is no study", OSError):
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
        with files.named(f"{path} is no packed study", *kinds):
            with zipfile.ZipFile(path) as file:
                file.extractall(temporary.name)
        path = pathlib.Path(temporary.name)
    held = _held(path / STUDY)
    found = Study(held["given"], path, is_opened=True)
    found._temporary = temporary
    return found
