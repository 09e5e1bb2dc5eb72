"""The folder of a run, and how a run continues from it."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import numpy as np

from data import files, own_files
from fedjax_pfl import checkpoint
from fedjax_pfl.rows import hosted
from launch.config import flagfile, limits, resolve
from launch.folder import finished, lock, tracking
from launch.machine import processes
from launch.run import loop, summaries
from launch.run.run import Run

SAVE_SECONDS = 60.0
RUN_FLAGS, METRICS = finished.RUN_FLAGS, finished.METRICS


def default_name(config: Any) -> str:
    """Returns runs/<algo>-<dataset>-seed<seed>[-<last seed>]."""
    dataset = config.dataset
    if own_files.is_one(dataset) and ":" in dataset:
        dataset = pathlib.Path(dataset.partition(":")[2]).stem
    dataset = dataset.replace("/", "_")
    last = f"-{config.seed + config.num_seeds - 1}" if config.num_seeds > 1 else ""
    return f"runs/{config.algo}-{dataset}-seed{config.seed}{last}"


def with_stored_rounds(given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the recorded number of rounds to `--resume` without `--rounds`.

    Raises ValueError if the recorded value is not a number.
    """

    def stored() -> int | None:
        if not given.get("resume") or given.get("rounds") is not None:
            return None
        config, _ = resolve.configure(given)
        path = _path(config) / RUN_FLAGS
        if not path.is_file():
            return None
        rounds = flagfile.RunFlags.read(path).options.get("rounds", "")
        if not rounds.isdecimal():
            raise ValueError(f"{path} has no number of rounds; give --rounds")
        return int(rounds)

    # All processes call it, even with different options, which are refused later.
    recorded = processes.on_first(stored)
    is_given = recorded is None or given.get("rounds") is not None
    return dict(given) if is_given else {**given, "rounds": recorded}


def _writes(act: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a folder whose OSErrors name it."""

    @functools.wraps(act)
    def named(folder: Workdir, *args: Any) -> Any:
        try:
            return act(folder, *args)
        except BrokenPipeError:
            raise  # of a note, and not of the folder
        except OSError as error:
            line = f"results cannot be written to {folder.path}: {error}"
            raise OSError(line) from error

    return named


def _path(config: Any) -> pathlib.Path:
    """The folder of a run, `~` in front of it being the user's."""
    return files.given(config.workdir or default_name(config), "--workdir")


class Workdir(loop.Listener):
    """The folder of one run: run.flags, metrics.jsonl, summary.json, clients.npz.

    `with Workdir(run) as folder:` locks the folder from `open` to the end of the block.
    As the first listener it writes records to disk before any other listener gets them,
    and `Checkpoints` come last.

    Of several processes of one run only the first accesses the folder. The others get
    what it finds, and its refusals.

    `path` is the folder of `run`, `checkpoints` that of its checkpoints, `records` the
    lines of metrics.jsonl, and `summary` the contents of summary.json, None until the
    run is finished.
    """

    def __init__(self, run: Run):
        self.run = run
        self._set(_path(run.config))
        self.records: list[dict[str, Any]] = []
        self._has_begun = self._has_noted_text = False
        self.summary: dict[str, Any] | None = None
        self._restored: tuple[int, Any, dict] | None = None
        # The round of an earlier run that is continued, and what is damaged of it
        self._earlier: tuple[int, str] | None = None

    def _set(self, path: pathlib.Path) -> None:
        """Sets the folder's path, and those inside."""
        self.path, self.checkpoints = path, path / finished.CHECKPOINTS
        self._best = self.checkpoints / finished.BEST
        self._lock = lock.Lock(path)

    def _settle(self) -> None:
        """Finds the folder where the run was built, if the process has moved since."""
        path = files.since(self.run.home, self.path)
        if path != self.path:
            self._set(path)

    @property
    def _flags(self) -> flagfile.RunFlags:
        """The present flags of the run, in the form of run.flags."""
        run = self.run
        return flagfile.RunFlags.of(run.config, run.hparams, hashes=run.hashes)

    def __enter__(self) -> Workdir:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def open(self, restores: bool = False) -> dict[str, Any] | None:
        """Locks the folder and continues the run in it.

        `restores` also loads the state of a finished run.

        Returns:
            The summary of a finished run. Its folder is not locked, because it may be
            read-only. None for any other run.

        Raises:
            ValueError: the folder belongs to another configuration or process, holds an
                unfinished run without `--resume`, is damaged, or has changed since this
                run left it.
        """
        self._settle()
        if not self._has_begun:
            must_start = self.run.simulation.rows.needs_start
            if must_start and not processes.on_first(self._is_of_a_run):
                self.run.start()  # refuses clients that begin with unequal rows
            done = self._shared(self._prepare)
            if done is None:
                processes.on_first(self._take_over)
            elif restores:
                self.reopen()
            self.summary, self._has_begun = done, True
            return done
        if not self.run.is_over:
            self.summary = None  # the run was extended
        processes.meet("continuing with a run's folder")
        processes.on_first(self._take_again)
        return self.summary

    def _shared(self, find: Callable[[], Any]) -> Any:
        """Calls `find` in the first process; loads in all what it restored."""

        def sent() -> list[Any]:
            found = find()
            return [found, self._restored and self._restored[::2]]

        processes.meet("reading a run's folder")
        found, restored = processes.on_first(sent)
        if restored:
            round, host = restored
            arrays = processes.arrays_of_first(
                self._restored and self._restored[1], self.run.saved_templates()
            )
            self._restored, self.records = None, list(host["records"])
            try:
                self.run.load(round, arrays, host["experiment"], list(self.records))
            except hosted.UnequalRowsError:
                raise  # the options are wrong, and the checkpoint is not
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(
                    f"{self.checkpoints} cannot be loaded ({error}); choose another "
                    "--workdir"
                ) from error
        return found

    def _is_of_a_run(self) -> bool:
        return (self.path / RUN_FLAGS).exists()

    def _prepare(self) -> dict[str, Any] | None:
        config = self.run.config
        packages = {"tensorboard": (config.tensorboard, "tensorboardX")}
        tracking.check(**packages, wandb=(config.wandb, "wandb"))
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise ValueError(
                f"{self.checkpoints} is a file where a folder is expected; remove it"
            )
        done = self._finished()
        if done is not None:
            return done
        self._acquire()
        # The previous owner may have finished the run meanwhile.
        return self._finished() or self._take()

    @_writes
    def _acquire(self) -> None:
        self._lock.acquire()

    @_writes
    def _take_again(self) -> None:
        """Locks the folder again if it is as this process left it."""
        self._lock.acquire()
        found = self.path / METRICS
        # An error may have come before the first record.
        text = found.read_text() if found.is_file() else ""
        if text != finished.lines(self.records):
            raise ValueError(
                f"{found} was changed since this run left it; open the run again: "
                f"build.load({str(self.path)!r})"
            )
        if self.summary is None:
            self._begin()

    def _begin(self) -> None:
        """Removes results of a shorter run, the summary first, and writes run.flags."""
        checkpoint.prepare()
        for name in (finished.SUMMARY, finished.CLIENTS):
            (self.path / name).unlink(missing_ok=True)
        self._write(RUN_FLAGS, "\n".join(self._flags.lines()) + "\n")

    def reopen(self, round: int | None = None) -> None:
        """Loads the state that the folder holds, without changing the folder.

        It is the newest one, or that after `round` rounds. Raises ValueError if the
        folder holds another run, a damaged one, or no such state.
        """
        self._settle()
        self._shared(lambda: self._reopen(round))

    def _reopen(self, round: int | None) -> None:
        done = self._finished()
        self._restore(self._folder_of(round), round)
        is_begun = done is not None or (self.path / METRICS).exists()
        if self._restored is None and is_begun:
            cure = "; the command that began it begins again with --resume"
            raise ValueError(
                f"{self.path} has no checkpoint, so there is no state"
                f"{cure * (done is None)}"
            )
        if done is not None and round is None and self._restored[0] < done["rounds"]:
            raise ValueError(
                f"{self.path} is finished after {done['rounds']} rounds, and its last "
                f"checkpoint is of round {self._restored[0]}; remove "
                f"{self.path / finished.SUMMARY}, and --resume trains the rounds "
                f"between again, or load that round"
            )

    def _folder_of(self, round: int | None) -> pathlib.Path:
        """The folder with a round's checkpoint, None = the newest; or ValueError."""
        if round is None:
            return self.checkpoints
        if not limits.is_whole(round):
            raise ValueError(
                f"round={limits.shown(round)}: expected a number of rounds"
            )
        folders = self._best, self.checkpoints
        found = {
            checkpoint.round_of(path): folder
            for folder in folders
            for path in checkpoint.saved(folder)
        }
        if round not in found:
            kept = ", ".join(map(str, sorted(found))) or "none"
            raise ValueError(
                f"{self.path} has no state after round {round} (rounds that it has: "
                f"{kept}); run(until={round}) of a new experiment ends with it, and a "
                "run with --keep_best keeps that of the best round"
            )
        return found[round]

    def _finished(self) -> dict[str, Any] | None:
        """Returns the summary if all rounds are done and all files are unchanged."""
        path = self.path / RUN_FLAGS
        if not path.exists():
            # A kill may leave these two. Any other file belongs to something else.
            ours = {lock.NAME, RUN_FLAGS + finished.PARTIAL}
            found = self.path.iterdir() if self.path.is_dir() else ()
            if {path.name for path in found} - ours:
                raise ValueError(
                    f"--workdir={self.path} holds files but no run; choose another"
                )
            return None
        stored = flagfile.RunFlags.read(path)
        stored = stored.completed(self.run.config, self.run.hparams)
        now = self._flags
        if odd := stored.differences(now):
            names = (f"{self.path}-{number}" for number in itertools.count(2))
            free = next(name for name in names if not os.path.lexists(name))
            cure = f"choose another, as --workdir={free}"
            if self.run.config.resume and stored.is_of_command(now):
                same = [f"--flagfile={path}", f"--workdir={self.path}", "--resume"]
                cure += f", or continue that run with {shlex.join(same)}"
            raise ValueError(
                f"--workdir={self.path} holds a run with {'; '.join(odd[:4])}; {cure}"
            )
        if stored.is_by_text(now) and not self._has_noted_text:
            self._has_noted_text = True
            _note(
                f"{path} is of other versions, so that custom code was compared by its "
                "text: an edited closure, constant or helper would not be noticed"
            )
        try:
            done = finished.read(self.path)
        except ValueError:
            return None
        if done is None or done["rounds"] > self.run.config.rounds:
            return None
        is_whole = done["rounds"] == self.run.config.rounds
        return done if is_whole or done.get("stopped_early") else None

    def _take(self) -> None:
        """Reads the run in the folder that is to be continued, if there is one."""
        run = self.run
        if not (self.path / RUN_FLAGS).exists():
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
        self._restore(self.checkpoints)
        if self._restored is None and (done is not None or damage):
            raise ValueError(
                f"{damage or self.path}: there is no checkpoint to continue from; "
                "choose another --workdir"
            )
        metrics = self.path / METRICS
        if self._restored is None and metrics.exists() and metrics.stat().st_size:
            _note(f"{self.path} holds no checkpoint, so the run starts over")
        round, _, host = self._restored or (0, None, {"records": []})
        self.records, self._earlier = host["records"], (round, damage)

    @_writes
    def _take_over(self) -> None:
        """Changes the folder, from which all has been read that is needed."""
        self._begin()
        if self._earlier is None:
            return
        round, damage = self._earlier
        if damage and str(self.path / METRICS) not in damage:
            _note(f"{damage}; it is written again from round {round}")
        self._restore_metrics(round)

    def _restore(self, folder: pathlib.Path, round: int | None = None) -> None:
        """Reads a checkpoint, None = the last, if it is there and fits the rounds."""
        templates = self.run.saved_templates()
        self._restored = checkpoint.restore(folder, *templates, round=round)
        if self._restored is None:
            return
        (round, _, host), wanted = self._restored, self.run.config.rounds
        forms = {"experiment": dict, "records": list, "rounds": int, "window": list}
        for name, kind in forms.items():
            if not isinstance(host.get(name), kind):
                raise ValueError(
                    f"{self.checkpoints} is damaged: {name} is not a {kind.__name__}"
                )
        self._check_flags(host.get("flags"))
        if round > wanted:
            self._refuse_fewer(round)
        # The checkpoint has the accuracies of all clients for its own window only.
        window, rule = host["window"], self.run.config.summary
        if passed := summaries.passed(self.run.window, round, window):
            enough = summaries.enough_rounds(rule, wanted, round, window)
            raise ValueError(
                f"--rounds={wanted} needs accuracies of clients after round "
                f"{min(passed)}, which this run, at {round}, did not keep; give "
                f"--rounds={enough} or more, or another --workdir"
            )

    def _check_flags(self, saved: Any) -> None:
        """Refuses a checkpoint of another run, as where folders were copied together.

        `saved` are the lines of run.flags of then, None in those of earlier versions.
        """
        if saved is None:
            return
        run = self.run
        try:
            flags = flagfile.RunFlags.of_text("\n".join(saved))
            odd = flags.completed(run.config, run.hparams).differences(self._flags)
        except (TypeError, ValueError) as error:
            line = f"{self.checkpoints} is damaged: its flags cannot be read"
            raise ValueError(line) from error
        if odd:
            raise ValueError(
                f"{self.checkpoints} is of another run than {self.path / RUN_FLAGS}, "
                f"with {'; '.join(odd[:4])}, as where two folders were copied into "
                "one; choose another --workdir"
            )

    def _refuse_fewer(self, round: int) -> NoReturn:
        raise ValueError(
            f"--workdir={self.path} already has {round} rounds, --rounds="
            f"{self.run.config.rounds} would be fewer; choose another --workdir"
        )

    def _refuse_unasked(self, damage: str) -> NoReturn:
        """Refuses a folder that holds an unfinished run without --resume."""
        if damage:
            raise ValueError(f"{damage}; --resume writes it again from a checkpoint")
        found = checkpoint.saved(self.checkpoints)
        done = checkpoint.round_of(found[-1]) if found else 0
        if done > self.run.config.rounds:
            self._refuse_fewer(done)
        state = f"stopped after {done}" if found else "unfinished"
        state += f" of {self.run.config.rounds} rounds"
        raise ValueError(
            f"--workdir={self.path} holds this run, {state}; add --resume, or choose "
            "another --workdir"
        )

    def _restore_metrics(self, round: int) -> None:
        """Restores metrics.jsonl of `round` rounds, with a note if it was damaged."""
        path = self.path / METRICS
        expected = finished.lines(self.records).encode()
        found = path.read_bytes() if path.is_file() else b""
        if not found.startswith(expected):
            same = os.path.commonprefix((expected, found)).count(b"\n")
            _note(
                f"{path} is damaged from line {same + 1} on; it is written again from "
                f"the checkpoint of round {round}"
            )
        self._write(METRICS, expected.decode())

    def on_start(self, run: Run) -> None:
        """Writes the records whose lines an error has prevented."""
        if self.summary is None and len(run.metrics) > len(self.records):
            self.on_call(run, [])

    @_writes
    def on_call(self, run: Run, records: loop.Records) -> None:
        """Adds lines to metrics.jsonl, which are on disk when this returns."""
        # Those of before too, whose lines an error has prevented
        records = run.metrics[len(self.records) :]
        if processes.is_first():
            self._lock.check()
            self._append(finished.lines(records).encode())
        self.records += map(dict, records)

    def _append(self, lines: bytes) -> None:
        """Adds lines to metrics.jsonl, all or none of them."""
        with files.appended(self.path / METRICS) as file:
            number, left = file.fileno(), memoryview(lines)
            size = os.fstat(number).st_size
            try:
                while left:
                    left = left[os.write(number, left) :]
                os.fsync(number)
            except OSError:
                os.ftruncate(number, size)
                raise

    @_writes
    def save(self) -> None:
        """Writes a checkpoint."""
        self._save(self.checkpoints)
        self._write_csv()

    @property
    def is_saved(self) -> bool:
        """Whether the folder has a checkpoint of the run's round, or needs none."""
        found = checkpoint.saved(self.checkpoints)
        return self.run.round in (0, *map(checkpoint.round_of, found[-1:]))

    @property
    def best(self) -> set[int]:
        """The rounds whose states the folder keeps as the best."""
        return set(map(checkpoint.round_of, checkpoint.saved(self._best)))

    @_writes
    def save_best(self, rounds: Collection[int]) -> None:
        """Writes one of the best rounds' checkpoints; those of `rounds` stay."""
        self._save(self._best, rounds)

    def _save(self, folder: pathlib.Path, keep: Collection[int] | None = None) -> None:
        arrays, host = self.run.saved()
        if not processes.is_first():
            checkpoint.send(arrays)
            return
        self._lock.check()
        # With the records, metrics.jsonl can be checked and written again.
        kept = {
            "experiment": host,
            "records": self.records,
            "rounds": self.run.config.rounds,
            "window": list(self.run.window),
            "flags": self._flags.lines(),
        }
        checkpoint.save(folder, self.run.round, arrays, kept, keep)

    def _write_csv(self) -> None:
        # A table that a run has begun goes on with it.
        is_asked = self.run.config.csv or (self.path / tracking.CSV).exists()
        if is_asked and processes.is_first():
            self._write(tracking.CSV, tracking.csv_text(self.records))

    @_writes
    def finish(self) -> None:
        """Writes clients.npz and then summary.json, which marks the run as finished.

        For a run that is already finished, it writes only the optional table.
        """
        if self.summary is None:
            numbers = self.run.summary()
            self.summary = processes.on_first(lambda: self._finish(numbers))
        elif self.run.config.csv and processes.is_first():
            # Without the state of a finished run its records are not read either.
            text = tracking.csv_text(self.records or finished.records(self.path))
            path = self.path / tracking.CSV
            # A folder that has it may be read-only.
            if not path.is_file() or path.read_text() != text:
                self._write(tracking.CSV, text)

    def _finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        self._lock.check()
        temporary = self.path / "clients.partial.npz"
        with files.created(temporary) as file:
            np.savez_compressed(file, **finished.clients(self.run))
        temporary.rename(self.path / finished.CLIENTS)
        # The hash is that of the records, even if the file has changed meanwhile.
        self._write(METRICS, finished.lines(self.records))
        self._write_csv()
        summary |= finished.origin()
        summary = finished.seal(self.path, finished.finite(summary))
        self._write(finished.SUMMARY, json.dumps(summary, indent=2) + "\n")
        return summary

    def _write(self, name: str, text: str) -> None:
        finished.write_text(self.path / name, text)


class Best(loop.Listener):
    """Keeps the states of the best rounds so far, by `--summary`, of all variants.

    Where the last round is no regular one, those without it stay as well, since a run
    may go on to more rounds.
    """

    def __init__(self, folder: Workdir):
        self._folder = folder

    def on_start(self, run: Run) -> None:
        """Saves what an error has prevented, and says what is not there."""
        if not run.metrics or self._folder.summary is not None:
            return
        missing = processes.on_first(
            lambda: sorted(self._rounds(run) - self._folder.best)
        )
        if run.round in missing and run.metrics[-1]["round"] == run.round:
            self._save(run)
            missing.remove(run.round)
        if missing and processes.is_first():
            _note(
                "--keep_best: the folder does not have the best round so far "
                f"({', '.join(map(str, missing))}), but keeps what becomes better"
            )

    def reads_state(self, run: Run) -> bool:
        return run.is_due(run.round)  # it is measured next, and may be the best

    def on_call(self, run: Run, records: loop.Records) -> None:
        if records and run.round in self._rounds(run):
            self._save(run)

    def _save(self, run: Run) -> None:
        self._folder.save_best(self._rounds(run))

    def _rounds(self, run: Run) -> set[int]:
        every = range(run.simulation.variants.count)
        return {
            run.best_round(one, is_regular=is_regular)
            for one in every
            for is_regular in (False, True)
        }


class Checkpoints(loop.Listener):
    """Saves a folder's run at intervals and at the end, and writes its summary."""

    def __init__(self, folder: Workdir):
        self._folder, self._time = folder, time.monotonic()
        self._is_saved = processes.on_first(lambda: folder.is_saved)
        self.every, self._is_due = folder.run.config.checkpoint_every, False

    def reads_state(self, run: Run) -> bool:
        late = processes.of_first(time.monotonic() - self._time > SAVE_SECONDS)
        every = self.every
        self._is_due = (run.round > 0 and run.round % every == 0) if every else late
        return self._is_due

    def on_call(self, run: Run, records: loop.Records) -> None:
        self._is_saved = False
        if self._is_due:
            self._save()

    def on_done(self, run: Run) -> None:
        if not self._is_saved:
            self._save()
        if run.is_over:
            self._folder.finish()

    def _save(self) -> None:
        self._folder.save()
        self._time, self._is_saved = time.monotonic(), True


def _note(text: str) -> None:
    """Prints one line about a repaired file."""
    print(f"note: {text}", file=sys.stderr, flush=True)
