"""Faults of interpretation: losses and results that are not what they are called.

`python -m tests.faults` runs them all.
"""

import json
from types import SimpleNamespace

from algorithms import fedavg
from launch import build, contract
from launch.tables import cells, paper, store
from tests.faults import given


def e3_label_weight_of_fedavg(folder) -> str:
    """Gives the weight of the labels to a method without distillation."""
    return _error(lambda: build.experiment(**_images(), label_weight=0.5))


def e4_positions_of_images(folder) -> str:
    """Takes the loss at the chosen positions of images, which have none."""
    return _error(lambda: build.experiment(**_images(), masked_loss="chosen"))


def e4_unknown_positions(folder) -> str:
    """Names positions that do not exist."""
    return _error(lambda: build.experiment(**_text(), masked_loss="masked"))


def e4_a_custom_loss(folder) -> str:
    """Trains a custom algorithm, whose loss is its own, at the chosen positions."""
    mine = SimpleNamespace(HParams=fedavg.HParams, make=fedavg.make, text=True)
    made = build.experiment(**_text() | {"algo": mine}, masked_loss="chosen")
    return "\n".join(made.notes)


def e5_books_above_fedavg(folder) -> str:
    """Asks the cells of a table in how many clients a row is above another."""
    table = {
        "title": "T",
        "metrics": ["client_accuracy"],
        "by_client": ["A"],
        "notes": {},
    }
    runs = {"A": [[0.5, 0.5]], "B": [[0.6, 0.4]]}
    results = [
        (
            cells.Cell("", row, "all", {"options": {}}),
            {
                "metrics": {
                    "client_accuracy": {"mean": 0.5, "std": 0, "per_seed": [1]}
                },
                "clients": {"accuracy": values, "test_size": [[5, 5]]},
            },
        )
        for row, values in runs.items()
    ]
    grid = paper.sheet(table, "blobs", results).grids[-1]
    return f"{grid.title}: {grid.rows}"


def e5_a_cell_has_its_clients(folder) -> str:
    """Keeps a finished cell of a table in a file, and looks for its clients."""
    file = folder / "cells.json"
    done = {"metrics": {}, "clients": {"perplexity": [[2.0]], "test_size": [[1]]}}
    store.File(str(file)).put("cell", {}, done)
    found = json.loads(file.read_text())["cell"]
    return f"clients: {found['clients']['perplexity']}"


def e6_contract_of_a_text(folder) -> str:
    """Checks an algorithm that takes texts on a text."""

    def make(hparams, task):
        raise ValueError(f"make was called for a text of {task.num_classes} words")

    mine = SimpleNamespace(HParams=fedavg.HParams, make=make, text=True)
    return _error(lambda: contract.check(**_text() | {"algo": mine, "rounds": 2}))


def _images() -> dict:
    return given.base | {"dataset": (given.X, given.y)}


def _text() -> dict:
    return {
        "algo": "fedavg",
        "dataset": "python_topics",
        "preset": "none",
        "model": "masked_lm",
        "model_width": 1 / 64,
        "text_length": 8,
        "num_clients": 4,
        "clients_per_round": 2,
        "examples_per_client": 8,
        "rounds": 1,
    }


def _error(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""
