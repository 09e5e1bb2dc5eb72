"""Lists what there is, a line each: `python -m launch.list`."""

from __future__ import annotations

import algorithms
import models
from data import loaders, partitions
from launch import ending, papers, presets, settings


def main() -> None:
    """Prints algorithms, presets, data sets, models, partitions and papers' tables."""
    sections = {
        "algorithms (--algo), with the preset that holds where none is given": {
            name: f"{settings.default_preset(name):<7} {algorithms.describe(name)}"
            for name in algorithms.ALGORITHMS
        },
        "presets (--preset), the options that they set where none is given": {
            name: presets.describe(name) for name in presets.PRESETS
        },
        "data sets (--dataset)": {
            name: entry.help for name, entry in loaders.DATASETS.items()
        }
        | {"npz:PATH": "your own arrays x, y and optionally client"},
        "models (--model, --client_model), hidden channels x --model_width": {
            name: models.describe(name) for name in models.MODELS
        },
        "partitions (--partition)": partitions.PARTITIONS,
        "tables of the papers (python -m launch.reproduce NAME)": {
            name: table["title"] for name, table in papers.tables().items()
        },
    }
    for section, entries in sections.items():
        print(section)
        for name, text in entries.items():
            print(f"  {name:<18} {text}")


if __name__ == "__main__":
    with ending.reported():
        main()
