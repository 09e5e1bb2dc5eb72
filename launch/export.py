"""A trained model as a file: `python -m launch.export WORKDIR --output=model.msgpack`.

`--client=3` writes the model that serves client 3 instead of the server's. The file
needs none of this package to be read (see README), and `--init_from=FILE` starts a run
from it. The folder is left as it is.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from absl import flags as absl_flags

from launch import build, ending, main
from launch.config import flags


def command(argv: Sequence[str] | None = None) -> None:
    """The command."""
    main.quiet()
    with ending.reported():
        _command(list(sys.argv if argv is None else argv))


def _command(argv: Sequence[str]) -> None:
    values = absl_flags.FlagValues()
    absl_flags.DEFINE_string(
        "output", "model.msgpack", "file to write, .msgpack or .npz", flag_values=values
    )
    absl_flags.DEFINE_integer(
        "client", -1, "whose model, -1 = the server's", flag_values=values
    )
    absl_flags.DEFINE_integer(
        "seed", -1, "one of the run's seeds, -1 = its first", flag_values=values
    )
    absl_flags.DEFINE_string(
        "data_dir", "", "folder of the data set, if it moved", flag_values=values
    )
    absl_flags.DEFINE_string(
        "dataset", "", "npz:PATH of the data, if the file moved", flag_values=values
    )
    try:
        folders = flags.beside(argv, values, __doc__)
        if len(folders) != 1:
            raise ValueError("give the folder of one run")
        told = {"data_dir": values.data_dir, "dataset": values.dataset}
        moved = {name: value for name, value in told.items() if value}
        experiment = build.load(pathlib.Path(folders[0]), **moved)
        if not experiment.round:
            raise ValueError(f"{folders[0]} has no checkpoint yet")
        if experiment.config.sweep:
            raise ValueError(
                f"{folders[0]} holds a sweep; from Python: build.load(...).save_model("
                "path, client_id, point={...})"
            )
        client = None if values.client == -1 else values.client
        seed = None if values.seed == -1 else values.seed
        print(experiment.save_model(values.output, client, seed))
    except (ValueError, absl_flags.Error) as error:
        flags.fail(error)


if __name__ == "__main__":
    command()
