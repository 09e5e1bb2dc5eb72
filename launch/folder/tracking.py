"""Copies of the records: TensorBoard's event files, W&B, and a CSV table."""

import csv
import hashlib
import importlib.util
import io
import math
import pathlib
import shutil
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from launch.config import sweep
from launch.folder import finished
from launch.machine import processes
from launch.run import loop
from launch.run.run import Run

FOLDER, CSV = "tensorboard", "metrics.csv"


def check(**packages: Any) -> None:
    """Refuses an option that is on if its package is missing (ValueError).

    `packages` are an option's name and (its value, its package).
    """
    for option, (value, package) in packages.items():
        if value and importlib.util.find_spec(package) is None:
            cure = "pip install 'fedjax_pfl[tracking]'"
            raise ValueError(f"--{option} needs the package {package}; {cure}")


class Wandb(loop.Listener):
    """Logs records to a project of Weights & Biases, see its environment variables.

    Metrics have their names, of several seeds or points after `seed0/` and the like,
    and the round is the step. A resumed run goes on with that of its folder, whose
    name is in `wandb.id` there.
    """

    def __init__(self, project: str, folder: str):
        self._project, self._folder = project, folder

    def on_start(self, run: Run) -> None:
        if not processes.is_first():
            return
        import wandb  # an optional package

        path = pathlib.Path(self._folder).resolve()
        known = path / "wandb.id"
        if is_new := not (known.is_file() and known.read_text()):
            place = f"{socket.gethostname()}:{path}"
            # Earlier versions had an id for each path.
            earlier = hashlib.sha256(place.encode()).hexdigest()[:16]
            known.write_text(earlier if run.metrics else uuid.uuid4().hex[:16])
        self._run = wandb.init(
            project=self._project,
            name=path.name,
            id=known.read_text(),
            resume="allow",
            config=vars(run.config) | vars(run.hparams),
        )
        if is_new:  # also where the run has begun without it
            self.on_call(run, run.metrics)

    def on_call(self, run: Run, records: loop.Records) -> None:
        is_one = len(run.seeds) * len(run.points) == 1
        for record in records if processes.is_first() else ():
            point = {name: record[name] for name in run.points[0]}
            prefix = "" if is_one else sweep.label(point, f"seed{record['seed']}") + "/"
            values = {
                prefix + name: value
                for name, value in record.items()
                if name not in ("round", "seed", *point)
            }
            self._run.log(values, step=record["round"])

    def on_end(self, run: Run) -> None:
        if processes.is_first():
            self._run.finish()


class TensorBoard(loop.Listener):
    """Writes scalars by metric, one run for each seed and point of a sweep."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._writers = folder / FOLDER, {}

    def on_start(self, run: Run) -> None:
        """Starts new files with the records so far."""
        if processes.is_first():
            shutil.rmtree(self._folder, ignore_errors=True)
        self.on_call(run, run.metrics)

    def on_call(self, run: Run, records: loop.Records) -> None:
        """Writes records; they are on disk when this returns."""
        for record in records if processes.is_first() else ():
            point = {name: record[name] for name in run.points[0]}
            writer = self._writer(sweep.label(point, f"seed{record['seed']}"))
            for name, value in record.items():
                known = isinstance(value, (int, float)) and math.isfinite(value)
                if known and name not in ("round", "seed", *point):
                    # The name becomes the tag, which would change hyphens and blanks.
                    writer.add_scalar(name, value, record["round"])
        for writer in self._writers.values():
            writer.flush()

    def on_end(self, run: Run) -> None:
        """Closes the files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, name: str) -> Any:
        import tensorboardX  # an optional package

        if name not in self._writers:
            self._writers[name] = tensorboardX.SummaryWriter(
                str(self._folder / name), write_to_disk=True, max_queue=1
            )
        return self._writers[name]


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Formats the records as a table with empty fields for missing metrics."""
    names = list(dict.fromkeys(name for record in records for name in record))
    file = io.StringIO()
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    writer.writerows(map(finished.finite, records))
    return file.getvalue()
