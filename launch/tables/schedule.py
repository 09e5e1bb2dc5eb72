"""The trials of a study of methods: which there are, and which are finished."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedjax_pfl import json_text
from launch.config import sweep
from launch.folder import finished
from launch.tables import store, trials, tuning
from launch.tables.asked import FINE_TUNED, Asked, Prepared, slug


class Schedule:
    """The trials of a study, by what its folder has of them.

    Those of a method are `tuning`, and once these are finished `finals`.
    """

    def __init__(
        self, asked: Asked, prepared: Prepared, folder: Callable[[], pathlib.Path]
    ):
        """`folder` gives the folder of the study, which may be relative to another."""
        self._asked, self.prepared, self._folder = asked, prepared, folder
        self._choices: dict[tuple[str, str], tuning.Choice] = {}

    def trial(
        self,
        setting: str,
        base: str,
        label: str,
        options: Mapping[str, Any],
        split: str = "split",
    ) -> trials.Trial:
        """A run with more options; `label` ends its name, `split` names its hash."""
        names = [slug(one) for one in (setting, base) if one]
        given = {**self.prepared.options[setting][base], **options}
        every = self.prepared.hashes[setting][base]
        # Earlier versions had no hashes of the clients' rows, nor of other files.
        kept = {one: every[one] for one in ("data", "own", "split") if one in every}
        hashes = kept | ({"split": every[split]} if split in every else {})
        hashes |= {"files": every["files"]} if every.get("files") else {}
        if every.get("computed"):  # nor of what own code computes, lately
            hashes, kept = hashes | {"computed": every["computed"]}, hashes
        keys = (trials.as_json(given | {"hashes": one}) for one in (hashes, kept))
        return trials.Trial("/".join(names) + label, given, *keys, base)

    def tuned(self, setting: str, base: str) -> dict[str, list[str]]:
        """The options in which a method is tuned, as in `tuning.ways`."""
        return self.prepared.tuned[setting][base]

    def tuning(self, setting: str, base: str) -> list[trials.Trial]:
        """The trials that tune a method, [] if there is nothing to tune."""
        asked, ways = self._asked, self.tuned(setting, base)
        swept, single = ways["sweep"], ways["runs"]
        if not swept and not single:
            return []
        line = sweep.text({name: asked.tune[name] for name in swept}) if swept else ""
        out = []
        for values in itertools.product(*(asked.tune[name] for name in single)):
            one = dict(zip(single, values, strict=True))
            label = "".join(f",{n}={v}" for n, v in one.items()).replace("/", "-")
            more = {"num_seeds": asked.tune_seeds, "sweep": line, **one}
            out.append(self.trial(setting, base, f".tune{label}", more, "tuned"))
        return out

    def choice(self, setting: str, row: str) -> tuning.Choice | None:
        """What validation rows chose for a row, None before its trials are finished.

        A row is tuned by the metric that it shows: a method by `val_client_accuracy`
        (or the first of `summaries.choosing` that it has), its fine-tuned clients by
        the better of `val_fine_tuned_accuracy` and that. The seeds' mean counts, after
        each seed's best round, and a point that diverged wins only if all did.
        """
        if (setting, row) in self._choices:
            return self._choices[setting, row]
        base, points, choose_by = row.removesuffix(FINE_TUNED), [], ""
        every, single = self.tuning(setting, base), self.tuned(setting, base)["runs"]
        for trial in every:
            if not self.is_finished(trial):
                return None
            done = self.summary(trial)
            choose_by = done.get("choose_by", "")
            fixed = {name: trial.options[name] for name in single}
            for part in done.get("sweep", [done]):
                points.append((fixed | part.get("point", {}), part))
        found = tuning.Choice({}, is_fine_tuned=row != base)
        if every:
            found = tuning.best(points, self._asked.tune, row != base, choose_by)
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
        return self.trial(setting, base, label, chosen.options)

    def finals(self, setting: str, base: str) -> list[trials.Trial | None]:
        """The last trials of a method and of its fine-tuned row, each once."""
        rows = [r for r in (base, base + FINE_TUNED) if r in self._asked.rows] or [base]
        found = [self.final(setting, row) for row in rows]
        return list({one.name if one else "": one for one in found}.values())

    def path(self, trial: trials.Trial) -> pathlib.Path:
        """The folder of a trial's run."""
        return self._folder() / "runs" / self._place(trial)

    def is_finished(self, trial: trials.Trial) -> bool:
        """Whether a trial is finished, with these options, and its run is there.

        A run that another one has replaced is not, and `run()` says what is there.
        """
        held, now = self._own(trial), self._fingerprint(trial)
        if "seconds" not in held or now is None:
            return False
        return all(held.get(name, value) == value for name, value in now.items())

    def summary(self, trial: trials.Trial) -> dict[str, Any]:
        """That of a finished trial; ValueError if a file of its run is damaged."""
        path = self.path(trial)
        try:
            return finished.read(path)
        except ValueError as error:
            line = f"{error}; remove {path}, and run() computes it again"
            raise ValueError(line) from error

    def _fingerprint(self, trial: trials.Trial) -> dict[str, Any] | None:
        """What tells a trial's finished run from others, None if there is none.

        Of a damaged summary it is {}, since reading the run reports the damage.
        """
        path = self.path(trial) / finished.SUMMARY
        if not path.is_file():
            return None
        try:
            done = json_text.read(path.read_bytes(), {})
        except ValueError:
            return {}
        return {n: done[n] for n in ("rounds", "parameters_sha256") if n in done}

    def has_begun(self, trial: trials.Trial) -> bool:
        """Whether the folder has a run of a trial, with these options."""
        return bool(self._own(trial))

    def _own(self, trial: trials.Trial) -> dict[str, Any]:
        """What the folder has of a trial with these options, {} if nothing."""
        held = self._held(self._place(trial), trial)
        return held if held is not None and held["key"] == trial.key else {}

    def write(self, trial: trials.Trial, **more: float) -> None:
        """Writes that a trial has begun, or with `seconds` that it is finished."""
        path = self._folder() / "cells" / f"{self._place(trial)}.json"
        about = (more and self._fingerprint(trial)) or {}
        store.write(path, {"key": trial.key, **more, **about})

    def _place(self, trial: trials.Trial) -> str:
        """A trial's name, with a hash if the folder has it for one of other options.

        So a study may grow, for example by values to tune, and keeps what is done. A
        run that goes on to more rounds stays where it is.
        """
        keys, others = [trials.identity(trial.key)], []
        # Earlier versions also hashed where data are, and how runs are computed, or
        # not what else they write.
        before = trial.key, trial.before, trials.identity(trial.key, but=())
        keys += [one for one in before if one not in keys]
        for key in keys:
            other = store.beside(trial.name, key)
            if self._held(other, trial) is not None:
                return other
            others.append(other)
        held = self._held(trial.name, trial)
        own = trial.key, trial.before
        is_free = held is None or any(trials.goes_on(held["key"], key) for key in own)
        return trial.name if is_free else others[0]

    def _held(self, place: str, trial: trials.Trial) -> dict[str, Any] | None:
        """What the folder has of a place's trial, in the form of this version."""
        path, kind = self._folder() / "cells" / f"{place}.json", {"key": dict}
        held = store.read(path, kind, "run is read again")
        known = [trials.identity(one) for one in (trial.key, trial.before)]
        is_own = held is not None and trials.identity(held["key"]) in known
        return {**held, "key": trial.key} if is_own else held

    def every(
        self, units: Sequence[tuple[str, str]] | None = None
    ) -> Iterator[tuple[str, trials.Trial | None]]:
        """The name and trial of every run, None before its tuning is finished.

        They are those of (setting, method) pairs, None = all.
        """
        for unit in self._asked.units if units is None else units:
            tuning, finals = self.tuning(*unit), [None]
            with contextlib.suppress(ValueError):  # a damaged trial, see `choice`
                finals = self.finals(*unit)
            for one in [*tuning, *finals]:
                yield one.name if one else "/".join(filter(None, unit)), one
