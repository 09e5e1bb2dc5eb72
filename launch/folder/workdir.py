"""What a run leaves behind, and how it goes on after an interruption."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from fedjax_pfl import checkpoint
from launch.config import flagfile, resolve
from launch.folder import finished, lock, tracking
from launch.run import loop, processes
from launch.run.run import Run

SAVE_SECONDS = 60.0
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

    Raises:
        ValueError: the stored number is none.
    """
    given = dict(given)
    if not given.get("resume") or given.get("rounds") is not None:
        return given
    config, _ = resolve.configure(given)
    told = pathlib.Path(config.workdir or default_name(config)) / RUN_FLAGS

    def stored() -> int | None:
        if not told.is_file():
            return None
        rounds = flagfile.RunFlags.read(told).options.get("rounds", "")
        if not rounds.isdecimal():
            raise ValueError(f"{told} has no number of rounds; give --rounds")
        return int(rounds)

    return given | {"rounds": processes.on_first(stored)}


class Workdir(loop.Listener):
    """The folder of one run: run.flags, metrics.jsonl, summary.json, clients.npz.

    `with Workdir(run) as folder:` keeps other processes out from `open` to the end of
    the block, and names the folder where something cannot be written. It listens: what
    is measured is on disk before anybody else is told; `Checkpoints` come last.

    Of several processes of one run only the first touches it; what it finds there, and
    what it refuses, is everybody's.
    """

    def __init__(self, run: Run):
        self.run = run
        self.path = pathlib.Path(run.config.workdir or default_name(run.config))
        self.checkpoints = self.path / "checkpoints"
        self.records: list[dict[str, Any]] = []
        self._lock = lock.Lock(self.path)
        self._has_begun = False
        self._done: dict[str, Any] | None = None  # the summary of a finished run
        self._events: tracking.TensorBoard | None = None
        self._restored: tuple[int, Any, dict] | None = None

    @property
    def _flags(self) -> flagfile.RunFlags:
        """What run.flags would hold if it were written now."""
        run = self.run
        hashes = {"data_sha256": run.data_sha256, "split_sha256": run.split_sha256}
        # Modules and an algorithm of the user's own: edited ones are another run too.
        hashes |= {"own_sha256": run.own_sha256} if run.own_sha256 else {}
        return flagfile.RunFlags.of(run.config, run.hparams, hashes=hashes)

    def __enter__(self) -> Workdir:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._lock.release()
        # A reader that went away is none of the folder's business.
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            raise OSError(
                f"results cannot be written to {self.path}: {error}"
            ) from error

    def open(self, restores: bool = False) -> dict[str, Any] | None:
        """Takes the folder; goes on with the run in it, or with what it left there.

        Args:
            restores: Whether to bring the run to its end where the folder has it.

        Returns:
            The summary, where the run is finished in the folder: nothing is taken then,
            so that it may be read-only. Else None.

        Raises:
            ValueError: the folder belongs to another configuration or process, an
                unfinished run is not asked to resume, or what is there is damaged, or
                has changed since this run left it.
        """
        if not self._has_begun:
            done = self._shared(self._prepare)
            if done is not None and restores:
                self.reopen()
            self._done, self._has_begun = done, True
            return done
        if self.run.round < self.run.config.rounds:
            self._done = None  # it was made longer
        processes.meet("going on with a run's folder")
        processes.on_first(self._take_again)
        return self._done

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
                self._restored and self._restored[1], self.run.saved_template()
            )
            self._restored, self.records = None, list(host["records"])
            self.run.load(round, arrays, host["experiment"], list(self.records))
        return found

    def _prepare(self) -> dict[str, Any] | None:
        tracking.check(self.run.config.tensorboard)
        done = self._finished()
        if done is not None:
            # Nothing is written, so that a folder may be read-only by now.
            return done
        self._acquire()
        # Its former owner may have finished the run a moment ago.
        return self._finished() or self._take()

    def _take_again(self) -> None:
        """Takes the folder as this process left it."""
        self._acquire()
        found = self.path / METRICS
        if not found.exists() or found.read_text() != _text(self.records):
            raise ValueError(
                f"{found} was changed since this run left it; open the run anew: "
                f"build.load({str(self.path)!r})"
            )
        if self._done is None:
            self._begin()

    def _acquire(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()

    def _begin(self) -> None:
        """Removes what a shorter run left behind, and says which run is here now.

        An old summary goes first, so that it never stands beside files of a longer run.
        """
        for name in (finished.SUMMARY, finished.CLIENTS):
            (self.path / name).unlink(missing_ok=True)
        self._write(RUN_FLAGS, "\n".join(self._flags.lines()) + "\n")

    def reopen(self) -> None:
        """Brings the run to where the folder stands; changes nothing there.

        Raises:
            ValueError: the folder holds another run, or a damaged one.
        """
        self._shared(self._reopen)

    def _reopen(self) -> None:
        done = self._finished()
        self._restore()
        is_begun = done is not None or (self.path / METRICS).exists()
        if self._restored is None and is_begun:
            raise ValueError(f"{self.path} has no checkpoint, the state is not there")

    def _finished(self) -> dict[str, Any] | None:
        """The summary, if all rounds are done and all files are as they were left."""
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
        stored = flagfile.RunFlags.read(told)
        stored = stored.completed(self.run.config, self.run.hparams)
        odd = stored.differences(self._flags)
        if odd:
            raise ValueError(
                f"--workdir={self.path} holds a run with {'; '.join(odd[:4])}; "
                "choose another --workdir"
            )
        try:
            done = finished.read(self.path)
        except ValueError:
            return None
        complete = done is not None and done["rounds"] == self.run.config.rounds
        return done if complete else None

    def _take(self) -> None:
        """Begins a run in an empty folder, or goes on with the one that is there."""
        run = self.run
        if not (self.path / RUN_FLAGS).exists():
            self._begin()
            return
        done, damage = None, ""
        try:
            done = finished.read(self.path)
        except ValueError as error:
            damage = str(error)
        if done is not None and done["rounds"] > run.config.rounds:
            self._refuse_fewer(done["rounds"])
        if not run.config.resume:
            self._refuse_unasked(damage)
        self._restore()
        if self._restored is None and (done is not None or damage):
            raise ValueError(
                f"{damage or self.path}: there is no checkpoint to go on from; "
                "choose another --workdir"
            )
        round, _, host = self._restored or (0, None, {"records": []})
        # All that could be refused has been: from here on the folder changes.
        self._begin()
        if damage and str(self.path / METRICS) not in damage:
            _note(f"{damage}; it is written again from round {round}")
        self.records = host["records"]
        self._restore_metrics(round)

    def _restore(self) -> None:
        """Reads the last checkpoint, if there is one, and refuses rounds it lacks."""
        self._restored = checkpoint.restore(self.checkpoints, self.run.saved_template())
        if self._restored is not None:
            round, _, host = self._restored
            self._refuse_passed(round, host["rounds"], host["window"])

    def _refuse_fewer(self, round: int) -> NoReturn:
        raise ValueError(
            f"--workdir={self.path} already has {round} rounds, "
            f"--rounds={self.run.config.rounds} would be fewer; choose another "
            "--workdir"
        )

    def _refuse_unasked(self, damage: str) -> NoReturn:
        """The line for a run that is there when --resume is not."""
        if damage:
            raise ValueError(f"{damage}; --resume writes it again from a checkpoint")
        found = checkpoint.saved(self.checkpoints)
        done = int(found[-1].name[6:]) if found else 0
        if done > self.run.config.rounds:
            self._refuse_fewer(done)
        state = f"stopped after {done}" if found else "unfinished"
        raise ValueError(
            f"--workdir={self.path} holds this run, {state} of "
            f"{self.run.config.rounds} rounds; add --resume, or choose another "
            "--workdir"
        )

    def _refuse_passed(self, round: int, rounds: int, window: Sequence[int]) -> None:
        """Refuses rounds whose summary needs evaluations that were never made.

        After `round` of `rounds` rounds the accuracies of all clients were kept of
        those in `window` alone.
        """
        wanted = self.run.config.rounds
        if round > wanted:
            self._refuse_fewer(round)
        passed = {r for r in self.run.window if r <= round} - set(window)
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

    def on_call(self, run: Run, records: loop.Records) -> None:
        """Adds lines to metrics.jsonl; they are on disk when this returns."""
        self.records += map(dict, records)
        if not processes.is_first():
            return
        with open(self.path / METRICS, "a") as file:
            file.write(_text(records))
            file.flush()
            os.fsync(file.fileno())
        if self._events is not None:
            self._events.add(records)
        elif run.config.tensorboard:
            self._events = self._tensorboard()

    def on_end(self, run: Run) -> None:
        """Closes TensorBoard's files."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def _tensorboard(self) -> tracking.TensorBoard:
        return tracking.TensorBoard(self.path, self.records, self.run.points[0])

    def save(self) -> None:
        """Writes a checkpoint of the run as it is now."""
        if not processes.is_first():
            return
        arrays, host = self.run.saved()
        # The records too, so that metrics.jsonl can be checked and written again.
        kept = {
            "experiment": host,
            "records": self.records,
            "rounds": self.run.config.rounds,
            "window": list(self.run.window),
        }
        checkpoint.save(self.checkpoints, self.run.round, arrays, kept)
        self._write_csv()

    def _write_csv(self) -> None:
        if self.run.config.csv and processes.is_first():
            self._write(tracking.CSV, tracking.csv_text(self.records))

    def finish(self, summary: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Ends the run, unless the folder has it already.

        Writes clients.npz and then summary.json, which marks the run as done; of a run
        that was done, the files that are asked for now.

        Returns:
            The summary as it is in the folder.
        """
        if self._done is None:
            numbers = summary()
            self._done = processes.on_first(lambda: self._finish(numbers))
        else:
            self._write_csv()
            if self.run.config.tensorboard and processes.is_first():
                self._tensorboard().close()
        return self._done

    def _finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        finished.write_clients(self.path, self.run)
        # What is sealed is what was measured, whatever became of the file meanwhile.
        self._write(METRICS, _text(self.records))
        self._write_csv()
        commit = finished.git_commit()
        summary = finished.seal(self.path, finished.finite(summary | commit))
        self._write(finished.SUMMARY, json.dumps(summary, indent=2) + "\n")
        return summary

    def _write(self, name: str, text: str) -> None:
        finished.write_text(self.path / name, text)


class Checkpoints(loop.Listener):
    """Saves a folder's run now and then, and in the end."""

    def __init__(self, folder: Workdir):
        self._folder, self._time, self._is_saved = folder, time.monotonic(), True
        self.every = folder.run.config.checkpoint_every

    def on_call(self, run: Run, records: loop.Records) -> None:
        self._is_saved = False
        every = self.every
        is_due = processes.of_first(time.monotonic() - self._time > SAVE_SECONDS)
        if (run.round > 0 and run.round % every == 0) if every else is_due:
            self._save()

    def on_done(self, run: Run) -> None:
        if not self._is_saved:
            self._save()

    def _save(self) -> None:
        self._folder.save()
        self._time, self._is_saved = time.monotonic(), True


def _note(text: str) -> None:
    """One line for the user about something that was mended."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def _text(records: Sequence[Mapping[str, Any]]) -> str:
    """The lines of metrics.jsonl."""
    return "".join(json.dumps(finished.finite(record)) + "\n" for record in records)
