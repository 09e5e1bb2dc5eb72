"""The Python interface: `from launch import build`.

`build.experiment(algo="fedavg", rounds=5).run()` runs one algorithm,
`build.compare(["fedavg", "cdkt"])` several on the same clients, and `build.study(...)`
tunes them on validation rows and runs several seeds. `build.load("runs/mine")` opens
the folder of a run or a study.
"""

import pathlib
from typing import Any

from data import files
from launch import experiment as experiment_lib
from launch.compare import Comparison, compare
from launch.experiment import Experiment, experiment
from launch.tables import protocol
from launch.tables.protocol import Study, study

__all__ = [
    "Comparison",
    "Experiment",
    "Study",
    "compare",
    "experiment",
    "load",
    "study",
]


def load(path: Any, **given: Any) -> Any:
    """Opens the folder of a run (`experiment.load`), or of a study of methods.

    A study may also be a zip file of `Study.pack`. `given` are the arguments of
    `experiment.load`, such as `round=`, and a study has none. Raises ValueError if it
    is neither.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> made = experiment(algo="fedavg", model="mlp", rounds=1, workdir=folder.name)
        >>> _ = made.run(progress=False)
        >>> load(folder.name).round
        1
        >>> load(folder.name, rounds=2).run(progress=False)["rounds"]
        2
        >>> folder.cleanup()
    """
    found: pathlib.Path = files.given(path, "load")
    if protocol.is_of_methods(found):
        if given:
            raise ValueError(
                f"{path} is a study, which takes no {', '.join(given)} here; open it "
                "with build.load(folder), and a row's run with its load(row, round=...)"
            )
        return protocol.opened(found)
    return experiment_lib.load(path, **given)
