"""Pictures of runs: `python -m launch.plot WORKDIR... [--output=FOLDER]`.

Draws from what runs leave behind: `curves.png` (metrics over rounds, mean and standard
deviation over seeds; of unfinished runs, too), `fairness.png` (how many clients reach
which accuracy) and `bubbles.png` (train examples of each client and class).
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from absl import flags as absl_flags

from launch import ending
from launch.config import flags
from launch.folder import record
from launch.show import figures
from launch.show.figures import Figure

__all__ = ["Figure", "command"]


def command(argv: Sequence[str] | None = None) -> None:
    """The command."""
    with ending.reported():
        _command(list(sys.argv if argv is None else argv))


def _command(argv: Sequence[str]) -> None:
    values = absl_flags.FlagValues()
    for name, default, text in (
        ("output", "plots", "folder of the pictures"),
        (
            "metric",
            "",
            "metrics of the curves, separated by commas; default "
            f"{' or '.join(figures.PREFERRED)}",
        ),
        (
            "kind",
            "",
            "pictures to draw, separated by commas; default "
            f"{','.join(figures.KINDS)}, of "
            "runs that are not finished curves; of a sweep of two names also heatmap",
        ),
        ("format", "png", "png, pdf or svg"),
    ):
        absl_flags.DEFINE_string(name, default, text, flag_values=values)
    try:
        folders = flags.beside(argv, values, __doc__)
        if not folders:
            raise ValueError("give the folders of one or more runs")
        formats = figures.FORMATS
        if values.format not in formats:
            raise ValueError(
                f"--format={values.format}: expected one of {', '.join(formats)}"
            )
        found = [record.read(pathlib.Path(name)) for name in folders]
        runs = [run for one in found for run in record.by_point(one)]
        all_kinds = ["curves"]
        if all(run.clients for run in runs):
            all_kinds += ["fairness"] * all(map(record.has_clients, runs)) + ["bubbles"]
        all_kinds += ["heatmap"] * figures.has_two_names(runs)
        kinds = values.kind.split(",") if values.kind else all_kinds
        drawn = {kind: figures.picture(kind, runs, values.metric) for kind in kinds}
    except (ValueError, absl_flags.Error) as error:
        flags.fail(error)
    except OSError as error:
        flags.fail(error, 1)
    folder = pathlib.Path(values.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for kind, figure in drawn.items():
            path = folder / f"{kind}.{values.format}"
            figure.savefig(path, dpi=130)
            print(path)
    except OSError as error:
        flags.fail(f"--output={folder}: {error}", 1)


if __name__ == "__main__":
    command()
