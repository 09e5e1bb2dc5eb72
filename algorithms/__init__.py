"""Algorithms: one file each, one line here each."""

from algorithms import cdkt, fedavg, local

ALGORITHMS = {
    "local": local,
    "fedavg": fedavg,
    "cdkt": cdkt,
}


def describe(name: str) -> str:
    """The first line of an algorithm's module docstring."""
    return ALGORITHMS[name].__doc__.splitlines()[0]
