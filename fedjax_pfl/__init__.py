"""The engine: a round is a pure function, a client is a row, and differences are masks.

These are the names that a custom algorithm needs most, see docs/adding.md.
"""

from fedjax_pfl.each_client import Client, Round, Trained
from fedjax_pfl.local_training import (
    LocalTraining,
    Objective,
    cross_entropy_loss,
    plan,
    proximal,
    train,
)
from fedjax_pfl.options import option
from fedjax_pfl.types import (
    Algorithm,
    Cohort,
    Data,
    MessageKind,
    RoundState,
    Serving,
    Task,
    Variables,
)

__version__ = "0.1.0"
__all__ = [
    "Algorithm",
    "Client",
    "Cohort",
    "Data",
    "LocalTraining",
    "MessageKind",
    "Objective",
    "Round",
    "RoundState",
    "Serving",
    "Task",
    "Trained",
    "Variables",
    "cross_entropy_loss",
    "option",
    "plan",
    "proximal",
    "train",
]
