"""What a run leaves behind, and how it goes on after an interruption."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from fedjax_pfl import checkpoint
from launch import config as config_lib
from launch import finished, flags, lock, processes, settings, tracking

if TYPE_CHECKING:
    from launch.experiment import Experiment

UNTOLD = ("workdir", "resume", "export_partition", "distributed", "emulate")
RUN_FLAGS, METRICS = finished.RUN_FLAGS, finished.METRICS


def default_name(config: Any) -> str:
    """runs/<algo>-<dataset>-seed<seed>[-<last seed>]."""
    dataset = config.dataset
    if dataset.startswith("npz:"):
        dataset = pathlib.Path(dataset.removeprefix("npz:")).stem
    dataset = dataset.replace("/", "_")
    last = f"-{config.seed + config.num_seeds - 1}" if config.num_seeds > 1 else ""
    return f"runs/{config.algo}-{dataset}-seed{config.seed}{last}"


def with_stored_rounds(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a command; `--resume` without `--rounds` means the run's own.

    Args:
        given: Names and values as the user gave them.

    Raises:
        ValueError: the stored number is none.
    """
    given = dict(given)
    if not given.get("resume") or given.get("rounds") is not None:
        return given
    config, _ = settings.configure(given)
    told = pathlib.Path(config.workdir or default_name(config)) / RUN_FLAGS

    def stored() -> str | None:
        return flags.read(told).get("rounds", "") if told.is_file() else None

    rounds = processes.on_first(stored)
    if rounds is None:
        return given
    if not rounds.isdecimal():
        raise ValueError(f"{told} has no number of rounds; give --rounds")
    return given | {"rounds": int(rounds)}


class Workdir:
    """The folder of one run: run.flags, metrics.jsonl, summary.json, clients.npz.

    `with Workdir(experiment) as folder:` keeps other processes out from `prepare` to
    the end of the block, and names the folder where something cannot be written.

    Of several processes of one run only the first touches it; what it finds there, and
    what it refuses, is everybody's.
    """

    def __new__(cls, experiment: Experiment) -> Workdir:
        """The folder; in other processes than the first one that writes nothing."""
        return object.__new__(cls if processes.is_first() else _Follower)

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        config = experiment.config
        self.path = pathlib.Path(config.workdir or default_name(config))
        self.checkpoints = self.path / "checkpoints"
        self.records: list[dict[str, Any]] = []
        self._lock = lock.Lock(self.path)
        self._has_begun = self._is_done = False
        self._events: tracking.TensorBoard | None = None
        self._restored: tuple[int, Any, dict] | None = None

    @property
    def _flags(self) -> list[str]:
        """The lines of run.flags as it would be written now."""
        experiment = self.experiment
        lines = flags.lines(experiment.config, experiment.hparams, skip=UNTOLD)
        # A comment to absl, but part of the identity: other data are another run.
        noted = {
            "data_sha256": experiment.data_sha256,
            "split_sha256": experiment.split_sha256,
        }
        # Modules and an algorithm of the user's own: edited ones are another run too.
        noted |= {"own_sha256": experiment.own_sha256} if experiment.own_sha256 else {}
        return [*lines, *(f"#--{name}={value}" for name, value in noted.items())]

    def __enter__(self) -> Workdir:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None
        self._lock.release()
        # A reader that went away is none of the folder's business.
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            raise OSError(
                f"results cannot be written to {self.path}: {error}"
            ) from error

    def prepare(self) -> dict[str, Any] | None:
        """Takes the folder, restores a checkpoint if one is wanted.

        Returns:
            The summary of an identical run that is already finished, else None.

        Raises:
            ValueError: the folder belongs to another configuration or process, an
                unfinished run is not asked to resume, or what is there is damaged.
        """
        return self._shared(self._prepare)

    def _shared(self, find: Callable[[], Any]) -> Any:
        """What the first process finds in the folder; all load what it restored."""

        def told() -> list[Any]:
            found = find()
            return [found, self._restored and self._restored[::2]]

        processes.meet("what reads a run's folder")
        found, restored = processes.on_first(told)
        if restored:
            round, host = restored
            arrays = processes.arrays_of_first(
                self._restored and self._restored[1], self.experiment.saved_template()
            )
            self._restored, self.records = None, list(host["records"])
            self.experiment.load(round, arrays, host["experiment"], list(self.records))
        return found

    def _prepare(self) -> dict[str, Any] | None:
        tracking.check(self.experiment.config.tensorboard)
        done = self._finished()
        if done is not None:
            # Nothing is written, so that a folder may be read-only by now.
            return done
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        # Its former owner may have finished the run a moment ago.
        return self._finished() or self._take()

    def go_on(self) -> bool:
        """`prepare`, the first time; later it takes the folder again as it was left.

        Returns:
            Whether the run is finished in the folder; the experiment is then brought
            to its end.

        Raises:
            ValueError: as `prepare`, or the folder was changed in the meantime.
        """
        if not self._has_begun:
            self._is_done = self.prepare() is not None
            if self._is_done:
                self.reopen()
            self._has_begun = True
            return self._is_done
        self._is_done &= self.experiment.round == self.experiment.config.rounds
        processes.meet("going on with a run's folder")
        processes.on_first(self._take_again)
        return self._is_done

    def _take_again(self) -> None:
        """Takes the folder as this process left it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        found = self.path / METRICS
        if not found.exists() or found.read_text() != _text(self.records):
            raise ValueError(
                f"{found} was changed since this run left it; open the run anew: "
                f"build.load({str(self.path)!r})"
            )
        if not self._is_done:
            for name in (finished.SUMMARY, finished.CLIENTS):
                (self.path / name).unlink(missing_ok=True)
            self._write(RUN_FLAGS, "\n".join(self._flags) + "\n")

    def finish_once(self, summary: Callable[[], dict[str, Any]]) -> None:
        """`finish`, unless the folder has it already; files that were asked for."""
        if not self._is_done:
            self.finish(summary())
            self._is_done = True
            return
        self._write_csv()
        wanted = self.experiment.config.tensorboard and processes.is_first()
        if wanted and self._events is None:
            self._events = self._tensorboard()

    def reopen(self) -> None:
        """Brings the experiment to where the folder stands; changes nothing there.

        Raises:
            ValueError: the folder holds another run, or a damaged one.
        """
        self._shared(self._reopen)

    def _reopen(self) -> None:
        done = self._finished()
        restored = checkpoint.restore(
            self.checkpoints, self.experiment.saved_template()
        )
        if restored is None and (done is not None or (self.path / METRICS).exists()):
            raise ValueError(f"{self.path} has no checkpoint, the state is not there")
        if restored is not None:
            round, _, host = restored
            self._refuse_passed(round, host["rounds"], host["window"])
            self._restored = restored

    def _finished(self) -> dict[str, Any] | None:
        """The summary, if all rounds are done and all files are as they were written.

        Raises:
            ValueError: the folder holds something else.
        """
        told = self.path / RUN_FLAGS
        if not told.exists():
            # A kill may leave these two; anything else is not ours.
            ours = {lock.NAME, RUN_FLAGS + finished.PARTIAL}
            found = self.path.iterdir() if self.path.is_dir() else ()
            if {path.name for path in found} - ours:
                raise ValueError(
                    f"--workdir={self.path} holds files but no run; choose another"
                )
            return None
        own = (self.experiment.config, self.experiment.hparams)
        # A flag that was not there yet had its default.
        defaults = {
            field.name: flags.text(field.default)
            for values in own
            for field in dataclasses.fields(values)
            if field.default is not None
        }
        odd = _different(defaults | flags.read(told, noted=True), self._flags)
        if odd:
            raise ValueError(
                f"--workdir={self.path} holds a run with {'; '.join(odd[:4])}; "
                "choose another --workdir"
            )
        try:
            done = finished.read(self.path)
        except ValueError:
            return None
        complete = done is not None and done["rounds"] == self.experiment.config.rounds
        return done if complete else None

    def _take(self) -> None:
        """Begins a run in an empty folder, or goes on with the one that is there."""
        experiment = self.experiment
        if not (self.path / RUN_FLAGS).exists():
            self._write(RUN_FLAGS, "\n".join(self._flags) + "\n")
            return
        done, damage = None, ""
        try:
            done = finished.read(self.path)
        except ValueError as error:
            damage = str(error)
        if done is not None and done["rounds"] > experiment.config.rounds:
            self._refuse_fewer(done["rounds"])
        if not experiment.config.resume:
            self._refuse_unasked(damage)
        restored = checkpoint.restore(self.checkpoints, experiment.saved_template())
        if restored is None:
            if done is not None or damage:
                raise ValueError(
                    f"{damage or self.path}: there is no checkpoint to go on from; "
                    "choose another --workdir"
                )
            round, host = 0, {"records": []}
        else:
            round, _, host = restored
            self._refuse_passed(round, host["rounds"], host["window"])
        # All that could be refused has been: from here on the folder changes. An old
        # summary goes first, so that it never stands beside files of a longer run.
        for name in (finished.SUMMARY, finished.CLIENTS):
            (self.path / name).unlink(missing_ok=True)
        self._write(RUN_FLAGS, "\n".join(self._flags) + "\n")
        if damage and str(self.path / METRICS) not in damage:
            _note(f"{damage}; it is written again from round {round}")
        self.records = host["records"]
        self._restore_metrics(round)
        self._restored = restored

    def _refuse_fewer(self, round: int) -> NoReturn:
        raise ValueError(
            f"--workdir={self.path} already has {round} rounds, "
            f"--rounds={self.experiment.config.rounds} would be fewer; choose another "
            "--workdir"
        )

    def _refuse_unasked(self, damage: str) -> NoReturn:
        """The line for a run that is there when --resume is not."""
        if damage:
            raise ValueError(f"{damage}; --resume writes it again from a checkpoint")
        found = checkpoint.saved(self.checkpoints)
        done = int(found[-1].name[6:]) if found else 0
        if done > self.experiment.config.rounds:
            self._refuse_fewer(done)
        state = f"stopped after {done}" if found else "unfinished"
        raise ValueError(
            f"--workdir={self.path} holds this run, {state} of "
            f"{self.experiment.config.rounds} rounds; add --resume, or choose another "
            "--workdir"
        )

    def _refuse_passed(self, round: int, rounds: int, window: Sequence[int]) -> None:
        """Refuses rounds whose summary needs evaluations that were never made.

        Args:
            round: Rounds done.
            rounds: Rounds that were wanted when these were done.
            window: Rounds behind the summary then: of these, and of no others, the
                accuracies of all clients are kept.
        """
        wanted = self.experiment.config.rounds
        if round > wanted:
            self._refuse_fewer(round)
        passed = {r for r in self.experiment.window if r <= round} - set(window)
        if passed:
            raise ValueError(
                f"--rounds={wanted} takes its summary from round {min(passed)} on, but "
                f"this run stands at {round} and kept none before {min(window)} for "
                f"it; give --rounds={rounds} or more, or choose another --workdir"
            )

    def _restore_metrics(self, round: int) -> None:
        """Makes metrics.jsonl what it was after `round` rounds; says if it was not."""
        path = self.path / METRICS
        expected = _text(self.records).encode()
        found = path.read_bytes() if path.exists() else b""
        if not found.startswith(expected):
            same = os.path.commonprefix((expected, found)).count(b"\n")
            _note(
                f"{path} is damaged from line {same + 1} on; it is written again from "
                f"the checkpoint of round {round}"
            )
        self._write(METRICS, expected.decode())

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines to metrics.jsonl; they are on disk when this returns."""
        self.records += map(dict, records)
        with open(self.path / METRICS, "a") as file:
            file.write(_text(records))
            file.flush()
            os.fsync(file.fileno())
        if not self.experiment.config.tensorboard:
            return
        if self._events is None:
            self._events = self._tensorboard()
        else:
            self._events.add(records)

    def _tensorboard(self) -> tracking.TensorBoard:
        swept = tuple(self.experiment.points[0])
        return tracking.TensorBoard(self.path, self.records, swept)

    def save(self) -> None:
        """Writes a checkpoint of the experiment as it is now."""
        arrays, host = self.experiment.saved()
        # The records too, so that metrics.jsonl can be checked and written again.
        kept = {
            "experiment": host,
            "records": self.records,
            "rounds": self.experiment.config.rounds,
            "window": list(self.experiment.window),
        }
        checkpoint.save(self.checkpoints, self.experiment.round, arrays, kept)
        self._write_csv()

    def _write_csv(self) -> None:
        if self.experiment.config.csv:
            self._write(tracking.CSV, tracking.csv_text(self.records))

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Writes clients.npz and then summary.json, which marks the run as done."""
        return processes.on_first(lambda: self._finish(summary))

    def _finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        finished.write_clients(self.path, self.experiment)
        # What is sealed is what was measured, whatever became of the file meanwhile.
        self._write(METRICS, _text(self.records))
        self._write_csv()
        commit = finished.git_commit()
        summary = finished.seal(self.path, finished.finite(summary | commit))
        self._write(finished.SUMMARY, json.dumps(summary, indent=2) + "\n")
        return summary

    def _write(self, name: str, text: str) -> None:
        finished.write_text(self.path / name, text)


class _Follower(Workdir):
    """The folder for other processes than the first: it is not touched."""

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.records += map(dict, records)

    def save(self) -> None:
        pass

    def _write_csv(self) -> None:
        pass


def _note(text: str) -> None:
    """One line for the user about something that was mended."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def _text(records: Sequence[Mapping[str, Any]]) -> str:
    """The lines of metrics.jsonl."""
    return "".join(json.dumps(finished.finite(record)) + "\n" for record in records)


def _different(before: Mapping[str, str], lines: Sequence[str]) -> list[str]:
    """The flags of a run's identity that differ, as readable pairs.

    Args:
        before: Names and values of the run in the folder.
        lines: run.flags as it would be written now.
    """
    now = dict(line.removeprefix("#")[2:].split("=", 1) for line in lines)
    names = before.keys() | now.keys()
    digests = ("data_sha256", "split_sha256")
    if "split_sha256" not in before:  # of an earlier version
        names -= {"split_sha256"}
    elif all(before.get(name) == now.get(name) for name in digests):
        # The same clients under another name: a file that moved, or its arrays.
        names -= {"dataset"}
    return [
        f"--{name}={before.get(name, 'unset')}, not {now.get(name, 'unset')}"
        for name in sorted(names - set(config_lib.EXECUTION_FIELDS))
        if before.get(name) != now.get(name)
    ]
