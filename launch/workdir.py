"""What a run leaves behind, and how it goes on after an interruption."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_pfl import checkpoint
from launch import config as config_lib
from launch import flags
from launch.experiment import Experiment

UNTOLD = ("workdir", "resume")


def default_name(config: Any) -> str:
    """runs/<algo>-<dataset>-seed<seed>[-<last seed>]."""
    dataset = config.dataset
    if dataset.startswith("npz:"):
        dataset = pathlib.Path(dataset.removeprefix("npz:")).stem
    dataset = dataset.replace("/", "_")
    last = f"-{config.seed + config.num_seeds - 1}" if config.num_seeds > 1 else ""
    return f"runs/{config.algo}-{dataset}-seed{config.seed}{last}"


def stored_summary(folder: pathlib.Path) -> dict[str, Any] | None:
    """The summary that a run's folder holds; None if absent or cut off."""
    try:
        return json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return None


class Workdir:
    """The folder of one run: run.flags, metrics.jsonl, summary.json, clients.npz."""

    def __init__(self, experiment: Experiment):
        self.experiment = experiment
        config = experiment.config
        self.path = pathlib.Path(config.workdir or default_name(config))
        self.checkpoints = self.path / "checkpoints"

    def prepare(self) -> dict[str, Any] | None:
        """Takes the folder, restores a checkpoint if one is wanted.

        Returns:
            The summary of an identical run that is already finished, else None.

        Raises:
            ValueError: the folder belongs to another configuration, an unfinished run
                is not asked to resume, or a checkpoint is damaged.
        """
        experiment = self.experiment
        lines = flags.lines(experiment.config, experiment.hparams, skip=UNTOLD)
        # A comment to absl, but part of the identity: other data are another run.
        lines.append(f"#--data_sha256={experiment.data_sha256}")
        told = self.path / "run.flags"
        if not told.exists():
            if self.path.exists() and any(self.path.iterdir()):
                raise ValueError(
                    f"--workdir={self.path} holds files but no run; choose another"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            _write(told, "\n".join(lines) + "\n")
            return None
        before = told.read_text().split("\n")
        odd = _different(before, lines)
        if odd:
            raise ValueError(
                f"--workdir={self.path} holds a run with {'; '.join(odd[:4])}; "
                "choose another --workdir"
            )
        wanted = experiment.config.rounds
        done = stored_summary(self.path)
        if done is not None and done["rounds"] == wanted:
            return done
        if done is not None and done["rounds"] > wanted:
            raise ValueError(
                f"--workdir={self.path} already has {done['rounds']} rounds, "
                f"--rounds={wanted} would be fewer; choose another --workdir"
            )
        if not experiment.config.resume:
            found = checkpoint.saved(self.checkpoints)
            state = (
                f"stopped after {int(found[-1].name[6:])}" if found else "unfinished"
            )
            raise ValueError(
                f"--workdir={self.path} holds this run, {state} of {wanted} rounds; "
                "add --resume, or choose another --workdir"
            )
        restored = checkpoint.restore(self.checkpoints, experiment.saved_template())
        _write(told, "\n".join(lines) + "\n")
        if restored is None:
            _write(self.path / "metrics.jsonl", "")
            return None
        round, arrays, host = restored
        if round > wanted:
            raise ValueError(
                f"--workdir={self.path} already has {round} rounds, --rounds={wanted} "
                "would be fewer; choose another --workdir"
            )
        experiment.load(round, arrays, host, self._cut_metrics(round))
        return None

    def _cut_metrics(self, round: int) -> list[dict[str, Any]]:
        """Keeps the complete lines up to `round`, in the file and as records."""
        path = self.path / "metrics.jsonl"
        kept = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["round"] <= round:
                kept.append(record)
        _write(path, "".join(json.dumps(record) + "\n" for record in kept))
        return kept

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds lines to metrics.jsonl; they are on disk when this returns."""
        with open(self.path / "metrics.jsonl", "a") as file:
            for record in records:
                file.write(json.dumps(finite(record)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def save(self) -> None:
        """Writes a checkpoint of the experiment as it is now."""
        arrays, host = self.experiment.saved()
        checkpoint.save(self.checkpoints, self.experiment.round, arrays, host)

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Writes clients.npz and then summary.json, which marks the run as done."""
        experiment = self.experiment
        part = experiment.data.partition
        label = np.asarray(experiment.data.label)
        num_classes = experiment.task.num_classes
        row, start, count = (
            np.asarray(a) for a in (part.train.row, part.train.start, part.train.count)
        )
        class_counts = np.stack(
            [
                [
                    np.bincount(label[row[s, b : b + n]], minlength=num_classes)
                    for b, n in zip(start[s], count[s], strict=True)
                ]
                for s in range(len(experiment.seeds))
            ]
        )
        temporary = self.path / "clients.partial.npz"
        np.savez_compressed(
            temporary,
            accuracy=experiment.client_accuracies[:, : len(experiment.window)],
            rounds=np.asarray(experiment.window),
            seeds=np.asarray(experiment.seeds),
            test_size=np.asarray(part.test.count),
            class_counts=class_counts,
        )
        temporary.rename(self.path / "clients.npz")
        summary = summary | {"git_commit": git_commit()}
        _write(self.path / "summary.json", json.dumps(finite(summary), indent=2) + "\n")
        return summary


def finite(value: Any) -> Any:
    """The same structure with None for nan and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def git_commit() -> str | None:
    """The commit of the code's checkout, or None outside one."""
    folder = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _write(path: pathlib.Path, text: str) -> None:
    """Replaces a file at once: a kill leaves the old one or the new one."""
    temporary = path.with_suffix(path.suffix + ".partial")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _different(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """The flags of a run's identity that differ, as readable pairs."""

    def table(lines: Sequence[str]) -> dict[str, str]:
        bare = (line.removeprefix("#") for line in lines)
        pairs = (line[2:].partition("=") for line in bare if line.startswith("--"))
        return {
            name: value
            for name, _, value in pairs
            if name not in config_lib.EXECUTION_FIELDS
        }

    old, new = table(before), table(now)
    return [
        f"--{name}={old.get(name, 'unset')}, not {new.get(name, 'unset')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
