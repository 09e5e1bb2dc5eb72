"""Copies of the records: TensorBoard's event files, and a CSV table."""

import csv
import importlib.util
import io
import math
import pathlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launch.config import sweep

FOLDER, CSV = "tensorboard", "metrics.csv"


def check(wanted: bool) -> None:
    """Refuses `--tensorboard` if its package is missing (ValueError)."""
    if wanted and importlib.util.find_spec("tensorboardX") is None:
        cure = "pip install 'fedjax_pfl[tracking]'"
        raise ValueError(f"--tensorboard needs the package tensorboardX; {cure}")


class TensorBoard:
    """Writes scalars by metric, one run for each seed and point of a sweep."""

    def __init__(
        self,
        folder: pathlib.Path,
        records: Sequence[Mapping[str, Any]],
        swept: Iterable[str] = (),
    ):
        """Starts new files with the records so far."""
        self._swept = tuple(swept)
        self._folder = folder / FOLDER
        self._writers: dict[str, Any] = {}
        shutil.rmtree(self._folder, ignore_errors=True)
        self.add(records)

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Writes records; they are on disk when this returns."""
        for record in records:
            point = {name: record[name] for name in self._swept}
            writer = self._writer(sweep.label(point, f"seed{record['seed']}"))
            for name, value in record.items():
                known = isinstance(value, (int, float)) and math.isfinite(value)
                if known and name not in ("round", "seed", *self._swept):
                    # The name becomes the tag, which would change hyphens and blanks.
                    writer.add_scalar(name, value, record["round"])
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
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
    writer.writerows(records)
    return file.getvalue()
