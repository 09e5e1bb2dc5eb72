"""Draws pictures of runs: `python -m launch.plot WORKDIR... [--output=FOLDER]`.

They are `curves.png` (metrics over rounds, bytes or the clock, mean and standard
deviation over seeds, also of unfinished runs), `fairness.png` (how many clients reach
which accuracy) and `bubbles.png` (train examples of each client and class).
"""

import dataclasses
import pathlib

from fedjax_pfl import options
from fedjax_pfl.options import option
from launch import ending
from launch.config import flags
from launch.folder import record
from launch.show import curves, figures
from launch.show.figures import Figure

__all__ = ["Figure", "command"]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of this command."""

    output: str = option("plots", "folder of the pictures")
    metric: str = option(
        "",
        f"metrics of the curves, with commas; default {' or '.join(figures.PREFERRED)}",
    )
    kind: str = option(
        "",
        f"pictures, with commas; default {','.join(figures.KINDS)}, for unfinished "
        "runs curves alone, for a sweep of two names also heatmap",
    )
    x: str = option("rounds", f"x axis of the curves: {', '.join(curves.AXES)}")
    format: str = option("png", "png, pdf or svg")


@ending.command
def command(argv: list[str]) -> None:
    """Draws runs."""
    with ending.refused():
        asked, folders, _ = flags.asked(argv, Options, __doc__)
        if not folders:
            raise ValueError("give the folders of one or more runs")
        options.check_one_of("format", asked.format, figures.FORMATS)
        found = [record.read(pathlib.Path(name)) for name in folders]
        runs = [run for one in found for run in record.by_point(one)]
        all_kinds = ["curves"]
        if all(run.clients for run in runs):
            all_kinds += ["fairness"] * all(map(record.has_clients, runs))
            all_kinds += ["bubbles"] * bool(figures.partitions(runs))
        all_kinds += ["heatmap"] * figures.has_two_names(runs)
        kinds = asked.kind.split(",") if asked.kind else all_kinds
        drawn = {
            kind: figures.picture(kind, runs, asked.metric, x=asked.x) for kind in kinds
        }
    folder = pathlib.Path(asked.output)
    with ending.writing("output", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for kind, figure in drawn.items():
            path = folder / f"{kind}.{asked.format}"
            figure.savefig(path, dpi=130)
            print(path)


if __name__ == "__main__":
    command()
