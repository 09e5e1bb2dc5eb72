"""Compiles for chips that are not present: `target="tpu:v5e"`.

The compiler of a TPU comes with the package libtpu and needs no TPU. It plans the
memory of a program and estimates the cycles of each of its parts.
"""

import os
from typing import NamedTuple

import jax
from jax.experimental import topologies

from fedjax_pfl import options
from launch.config import limits


class Chip(NamedTuple):
    """A kind of chip with `memory` in bytes.

    The compiler calls a few of them `topology`, and libtpu calls them `accelerator`.
    """

    topology: str
    accelerator: str
    memory: int


CHIPS = {
    # A device is one of the two cores of a v4.
    "tpu:v4": Chip("v4:2x2x1", "v4-8", 16 << 30),
    "tpu:v5e": Chip("v5e:2x2", "v5litepod-4", 16 << 30),
    "tpu:v6e": Chip("v6e:2x2", "v6e-4", 32 << 30),
}


def chip(name: str) -> Chip:
    """The chip of a name; ValueError if there is none."""
    options.check_one_of(
        "target", name if isinstance(name, str) else limits.shown(name), CHIPS
    )
    return CHIPS[name]


def devices(name: str) -> list[jax.Device]:
    """Devices of a chip, for which programs can be compiled and nothing can run.

    Raises:
        ValueError: one line: there is no such chip, or no compiler for it.
    """
    found = chip(name)
    given = {
        # Otherwise libtpu asks a cloud's metadata server, or stays alone on a machine.
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": found.accelerator,
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    for variable, value in given.items():
        os.environ.setdefault(variable, value)
    try:
        return list(topologies.get_topology_desc(found.topology, "tpu").devices)
    except Exception as error:  # of several kinds, by what is missing
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise ValueError(
            f"--target={name} needs the TPU's compiler ({reason}); "
            "pip install 'fedjax_pfl[tpu]'"
        ) from error
