"""Lists what there is, a line each: `python -m launch.list`."""

from __future__ import annotations

import algorithms
import models
from data import loaders, partitions


def main() -> None:
    """Prints algorithms, data sets, models and partitions."""
    sections = {
        "algorithms (--algo)": {
            name: algorithms.describe(name) for name in algorithms.ALGORITHMS
        },
        "data sets (--dataset)": {
            name: entry.help for name, entry in loaders.DATASETS.items()
        }
        | {"npz:PATH": "your own arrays x, y and optionally client"},
        "models (--model, --client_model)": {
            name: models.describe(name) for name in models.MODELS
        },
        "partitions (--partition)": partitions.PARTITIONS,
    }
    for section, entries in sections.items():
        print(section)
        for name, text in entries.items():
            print(f"  {name:<18} {text}")


if __name__ == "__main__":
    main()
