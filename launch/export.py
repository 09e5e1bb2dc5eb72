"""Writes a trained model: `python -m launch.export WORKDIR --output=model.msgpack`.

`--client=3` writes the personalized model of client 3 instead of the server's, and
`--best` that after the best round instead of the last. The file can be read without
this package (see docs/python.md), and `--init_from=FILE` starts a run from it, unless
it is a program, `.stablehlo`. The folder is not changed.
"""

import dataclasses
import pathlib
import re
import warnings
from collections.abc import Mapping, Sequence

from fedjax_pfl.options import option
from launch import build, ending
from launch.config import flags
from launch.models_out import client_model
from launch.run import summaries


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of this command."""

    output: str = option(
        "model.msgpack", "file to write, " + ", ".join(client_model.SUFFIXES)
    )
    client: int = option(-1, "the client to export, -1 = the server")
    owner: str = option("", "the client to export, by its owner's name")
    seed: int = option(-1, "one of the run's seeds, -1 = its first")
    point: str = option("", "the point of a sweep, such as client_lr=0.1")
    best: bool = option(
        False, "the model of the seed's best round, of a run with --keep_best"
    )
    algo: str = option("", "file of the run's algorithm if it is your own, mine.py")
    data_dir: str = option("", "folder of the data set, if it moved")
    dataset: str = option(
        "",
        "npz:PATH, csv:PATH, parquet:PATH, images:PATH, leaf:PATH or pfllib:PATH of "
        "the data, if they moved",
    )


@ending.command
def command(argv: list[str]) -> None:
    """Writes a run's model to a file."""
    with ending.refused():
        asked, folders, _ = flags.asked(argv, Options, __doc__)
        if len(folders) != 1:
            raise ValueError("give the folder of one run")
        moved = {name: getattr(asked, name) for name in ("algo", "data_dir", "dataset")}
        moved = {name: value for name, value in moved.items() if value}
        experiment = build.load(pathlib.Path(folders[0]), **moved)
        if not experiment.round:
            raise ValueError(f"{folders[0]} has no checkpoint yet")
        client = asked.owner or (None if asked.client == -1 else asked.client)
        if asked.owner and asked.client != -1:
            raise ValueError("--client and --owner name a client twice; omit one")
        seed = None if asked.seed == -1 else asked.seed
        point = _point(asked.point, experiment.points)
        if asked.best:
            experiment.folder.reopen(_best_round(experiment, seed, point))
        with warnings.catch_warnings(record=True) as notes:
            try:
                path = experiment.save_model(asked.output, client, seed, point)
            except ValueError as error:
                raise ValueError(_by_flags(str(error), asked)) from error
        for note in notes:
            print(note.message)
        if experiment.owners and isinstance(client, int):
            print(f"client {client} is the owner {experiment.owners[client]}")
        print(path)


def _by_flags(line: str, asked: Options) -> str:
    """A line about arguments of Python, with the options of this command."""
    name = "--owner=" if asked.owner else "--client="
    line = line.replace("client_id=", name).replace("give a client_id", "give --client")
    line = (
        re.sub(r"expected [\d.]+, or an", "expected an", line)
        if asked.owner
        else line.replace(", or an owner's name,", ", or with --owner")
    )
    return f"--{line}" if line.startswith("seed=") else line


def _best_round(
    experiment: build.Experiment, seed: int | None, point: Mapping[str, float]
) -> int:
    """The best round of a seed at a point, or a ValueError."""
    rule = experiment.config.summary
    if rule not in summaries.CHOSEN_BY:
        raise ValueError(
            f"--best: the run's --summary={rule} chooses no round; omit it"
        )
    return experiment.best_round(experiment.variant(seed, point))


def _point(line: str, known: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The point of a run that a line names; ValueError if it is none of `known`."""
    labels = {",".join(f"{k}={v}" for k, v in one.items()): one for one in known}
    if line and "" in labels:
        raise ValueError(f"--point={line}: the run is not a sweep; omit it")
    if line not in labels:
        raise ValueError(f"--point={line}: expected one of {', '.join(labels)}")
    return labels[line]


if __name__ == "__main__":
    command()
