"""What a study of methods is asked for, and how it is made ready."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from data import files
from fedjax_pfl import json_text, metric_kinds
from launch import compare
from launch.assemble import custom
from launch.config import algorithm_file, registry, resolve, schema
from launch.experiment import Experiment
from launch.run import summaries
from launch.show import derived
from launch.tables import cells, trials, tuning

FINE_TUNED = registry.FINE_TUNED
_EPOCHS = "fine_tune_epochs"
_NONE = ("", ".", "..")  # names of no folder
# A study as a file, see `protocol.read`
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
    "target?": json_text.NUMBER,
    str: json_text.NOTHING,
}


class Prepared(NamedTuple):
    """A study as it is made ready, by setting and method.

    Attributes:
        options: Those of each run.
        tuned: The options to tune, as in `tuning.ways`.
        hashes: Those of data and code.
        notes: Lines about it.
    """

    options: dict[str, dict[str, Any]]
    tuned: dict[str, dict[str, dict[str, list[str]]]]
    hashes: dict[str, dict[str, dict[str, str]]]
    notes: list[str]


# The form of one as a study's folder has it
_PREPARED = {
    "options": {str: {str: dict}},
    "tuned": {str: {str: {"sweep": [str], "runs": [str]}}},
    "hashes": {str: {str: {str: str}}},
    "notes": [str],
}


class _Setting(NamedTuple):
    """A setting of a study as it is made ready, by method.

    Attributes:
        options, tuned, hashes, notes: As in `Prepared`.
        runs: Each run's configuration, and whether it has validation rows.
    """

    options: dict[str, Any]
    tuned: dict[str, Any]
    hashes: dict[str, dict[str, str]]
    notes: list[str]
    runs: list[tuple[schema.Config, bool]]


class Asked:
    """The methods, settings and values of a study.

    Attributes:
        given: All of it as JSON, with a word for what only Python can give.
        rows: The names of the rows.
        methods: The options of each method behind the rows.
        settings: Those of each setting by name, and `common` those of all runs.
        tune: The values to try by option.
        seeds, tune_seeds: Numbers of seeds.
        control, metrics, target: Those of its table.
        has_code: Whether there is a method that is none of ours.
        units: (setting, method) pairs, each of which one process runs.
    """

    def __init__(self, given: Mapping[str, Any], reads_files: bool):
        """Takes it in the form of `FILE`, with objects where Python gave them.

        `reads_files` is whether methods that are files are read. Raises a ValueError of
        one line if something is wrong by itself.
        """
        self.given = trials.as_json(given)
        with files.named("study"):
            json_text.check(self.given, FILE)
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
        self.target = given.get("target")
        self.common = dict(given.get("common", {}).get("options", {}))
        self.methods = _methods(given["rows"])
        algos = [own["algo"] for own in self.methods.values()]
        self.has_code = not all(map(registry.is_ours, algos))
        self._files: dict[str, str] = {}  # hashes of files by method
        for base, own in self.methods.items():
            # A file is read once, so that all of a study's runs have the same code.
            if algorithm_file.is_one(own["algo"]) and reads_files:
                path, own["algo"] = own["algo"], registry.algorithm(own["algo"])
                self._files[base] = algorithm_file.digest(path)
        self.units = list(itertools.product(self.settings, self.methods))
        self._check()

    def _check(self) -> None:
        if odd := [one for one in (self.seeds, self.tune_seeds) if one < 1]:
            raise ValueError(f"study: seeds={odd[0]}: expected 1 or more")
        self.check_row("control", self.control)
        derived.goal(None, self.target)
        for names in (self.settings, self.methods):
            slugs = {slug(name): name for name in names}
            if odd := [name for one, name in slugs.items() if name and one in _NONE]:
                raise ValueError(f"study: {odd[0]} cannot be the name of a folder")
            if odd := [one for one in names if one not in slugs.values()]:
                other = slugs[slug(odd[0])]
                raise ValueError(
                    f"study: {odd[0]} and {other} are one name of a folder; change one"
                )
        tuning.check(self.tune)
        for name, values in self.tune.items():
            if trials.is_of_python(trials.as_json(values)):
                raise ValueError(
                    f"study: tune: {name}: expected numbers, texts or bools; give each "
                    f'object of Python a row of its own, as {{"mine": {{"{name}": ...}}'
                    "}"
                )
            if not values or len(set(map(str, values))) < len(values):
                raise ValueError(f"study: tune: {name}: expected different values")
        fine_tuned = [row for row in self.rows if row.endswith(FINE_TUNED)]
        for setting, own in self.settings.items():
            options = self.common | own
            if fine_tuned and not (options.get(_EPOCHS) or _EPOCHS in self.tune):
                where = f" in {setting}" * bool(setting)
                raise ValueError(f"study: {fine_tuned[0]}{where} needs {_EPOCHS}")
            _check_decided(options)
        for row, own in self.methods.items():
            _check_decided(own, f"row {row}: ")

    def check_row(self, what: str, name: str) -> None:
        """Refuses a name that is no row's; "" is none."""
        if name and name not in self.rows:
            every = ", ".join(self.rows)
            raise ValueError(f"study: {what}={name}: expected one of {every}")

    def _check_metrics(self, every: Sequence[tuple[schema.Config, bool]]) -> list[str]:
        """Refuses metrics that no run can have, and names those that look misspelt.

        `every` has each run's configuration, and whether it has validation rows.
        """
        validates, is_tuned = metric_kinds.VALIDATION, _EPOCHS in self.tune
        has_val = any(has for _, has in every)
        has_unseen = any(resolve.num_unseen(one) for one, _ in every)
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
        if odd and not self.has_code and not any(one.eval_metrics for one, _ in every):
            raise ValueError(f"study: metrics: {odd[0]}")
        return odd

    def prepared(self) -> Prepared:
        """Makes it ready, which builds each run; ValueError if an option is wrong."""
        of_settings = {
            setting: self._of_setting(self.common | own | {"num_seeds": self.seeds})
            for setting, own in self.settings.items()
        }
        known = [registry.fields_of(own["algo"]) for own in self.methods.values()]
        for name in self.tune:
            if not any(name in fields for fields in known):
                hint = registry.meant(name, set().union(*known), "")
                raise ValueError(f"study: tune: no method has the option {name}{hint}")
        notes = [note for one in of_settings.values() for note in one.notes]
        notes += self._check_metrics(
            [run for one in of_settings.values() for run in one.runs]
        )
        options, tuned, hashes = (
            {setting: getattr(one, name) for setting, one in of_settings.items()}
            for name in ("options", "tuned", "hashes")
        )
        return Prepared(options, tuned, hashes, list(dict.fromkeys(notes)))

    def prepared_before(self, parts: Sequence[Any]) -> Prepared:
        """What a study's folder has of it; ValueError, a phrase, if that is damaged."""
        named = dict(zip(_PREPARED, parts, strict=False))
        json_text.check(named, _PREPARED)
        for setting, base in self.units:
            for name in ("options", "tuned", "hashes"):
                if base not in named[name].get(setting, {}):
                    raise ValueError(f"its {name} are not those of {base}")
        return Prepared(**named)

    def _of_setting(self, options: dict[str, Any]) -> _Setting:
        """Prepares the methods with the options of a setting; ValueError if odd."""
        notes = [
            f"{name}={options[name]} has no effect, as it is tuned"
            for name in self.tune
            if name in options
        ]
        compared, more = self._compared(options)
        data = next(iter(compared.values())).data
        if not data.num_words:  # a text has perplexities
            derived.check_fraction(self.target)
        partition = data.partition
        tuned, others = self._tuned(compared)
        notes += [*more, *compared.notes, *others]
        is_owned = partition.has_val and bool(partition.val.count.any())
        for row in self.rows:
            base = row.removesuffix(FINE_TUNED)
            is_odd = not compared[base].can_choose or (row != base and not is_owned)
            if is_odd and any(tuned[base].values()):
                raise ValueError(
                    f"study: tune: {row} cannot be measured on validation rows "
                    "that belong to no client; give rows of clients with "
                    f"partition=natural, or val_split in their place, or omit {row}"
                )
            choose_by = compared[base].config.choose_by
            if self.tune and row != base and choose_by not in ("", "loss"):
                raise ValueError(
                    f"study: tune: choose_by={choose_by} is not measured of "
                    f"fine-tuned clients; take loss, or omit {row}"
                )
        hashes = {
            base: self._hashes(base, made, compared.options[base])
            for base, made in compared.items()
        }
        runs = [(made.config, partition.has_val) for made in compared.values()]
        return _Setting(dict(compared.options), tuned, hashes, notes, runs)

    def _compared(
        self, options: dict[str, Any]
    ) -> tuple[compare.Comparison, list[str]]:
        """The runs of a setting with the summary that they get, and lines about it."""
        chosen = {"summary": summaries.BEST} | options
        given = chosen if options.get("val_split") else options
        compared = compare.compare(self.methods, run=False, **given)
        has_val = next(iter(compared.values())).data.partition.has_val
        by_test = [n for n, made in compared.items() if made.config.summary == "best"]
        if self.tune and by_test:
            raise ValueError(
                f"study: summary=best chooses rounds by test rows, which tune must not "
                f"({', '.join(by_test)}); omit it, or take best_validation"
            )
        if self.tune and not has_val:
            raise ValueError(
                "study: tune chooses by validation rows; give val_split, or your "
                "own (docs/data.md#your-own-split)"
            )
        if not has_val or given is chosen or "summary" in options:
            return compared, []
        # Only the data say that they have validation rows of their own.
        if cannot := [base for base, made in compared.items() if not made.can_choose]:
            line = (
                f"validation rows choose no round, as {', '.join(cannot)} "
                "cannot be measured on them; the summary is that of the options"
            )
            return compared, [line]
        return compare.compare(self.methods, run=False, **chosen), []

    def _tuned(
        self, compared: Mapping[str, Experiment]
    ) -> tuple[dict[str, dict[str, list[str]]], list[str]]:
        """How each method is tuned, as in `tuning.ways`, and in what it is not."""
        tuned, notes = {}, []
        for base, made in compared.items():
            own, replaced = self.methods[base], custom.replaced(made.hparams)
            names = [n for n in self.tune if n not in own and n not in replaced]
            free = {name: self.tune[name] for name in names}
            tuned[base] = tuning.ways(free, made, own["algo"])
            for name in self.tune:
                if name in own:
                    notes.append(f"{base} has its own {name} and is not tuned in it")
                elif name in replaced:
                    which = f"the optimizer {replaced[name]}"
                    notes.append(f"{base} has {which} and is not tuned in {name}")
        return tuned, notes

    def _hashes(
        self, base: str, made: Experiment, options: Mapping[str, Any]
    ) -> dict[str, str]:
        """The hashes of a run's data, code and files, by what they are of."""
        return {
            "data": made.examples_sha256,
            "own": self._files.get(base, made.own_sha256),
            "split": made.split_sha256,
            "tuned": trials.split_sha256(made),
            "files": trials.files_sha256(made),
            "computed": self._computed(base, made, options),
        }

    def _computed(self, base: str, run: Experiment, options: Mapping[str, Any]) -> str:
        """The hash of what code given in Python computes, "" where there is none.

        Two functions of the same text may hold other values. Data and an algorithm's
        file have hashes of their own.
        """
        but = {"dataset", "public_set", "test", "val"}
        but |= {"algo"} if base in self._files else set()
        others = {name: one for name, one in options.items() if name not in but}
        return run.computed_sha256 * trials.is_of_python(trials.as_json(others))


def slug(name: str) -> str:
    """A name as that of a file or folder."""
    return cells.slug(name).replace("/", "-")


def _check_decided(options: Mapping[str, Any], where: str = "") -> None:
    """Refuses options that are not those of a single run."""
    for name in ("num_seeds", "sweep", "workdir", "resume", "target"):
        if name in options:
            raise ValueError(f"study: {where}{name} is decided by the study; omit it")


def _methods(rows: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
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
