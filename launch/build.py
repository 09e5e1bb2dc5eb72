"""The Python interface: `from launch import build`.

`build.experiment(algo="fedavg", rounds=5).run()` runs one algorithm,
`build.compare(["fedavg", "cdkt"])` several on the same clients, and
`build.load("runs/mine")` opens the folder of a run.
"""

from launch.compare import Comparison, compare
from launch.experiment import Experiment, experiment, load

__all__ = ["Comparison", "Experiment", "compare", "experiment", "load"]
