"""Where clients' private rows are kept, and how many of them the device holds."""

import pathlib

import jax
import numpy as np

from data import plan
from fedjax_pfl import population, types
from fedjax_pfl import program as program_lib
from launch.config import schema


def place(config: schema.Config) -> str | None:
    """A folder, "" for the host's memory, None for the device.

    Raises:
        ValueError: there is no such folder, or another option needs all rows.
    """
    name = config.client_state
    if name == "device":
        return None
    if name != "host" and not pathlib.Path(name).expanduser().is_dir():
        raise ValueError(
            f"--client_state={name}: expected device, host or a folder that exists"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"--client_state={name}: several processes keep all rows on their devices; "
            "omit it, or start one process"
        )
    if config.c_gen and config.eval_clients == "all":
        raise ValueError(
            f"--client_state={name}: c_gen of all clients needs all their models at "
            "once; take --eval_clients=selected, or --noc_gen"
        )
    return "" if name == "host" else str(pathlib.Path(name).expanduser())


def count(
    config: schema.Config,
    program: program_lib.Program,
    planner: plan.Planner,
    data: types.Data,
) -> int:
    """The clients whose rows the device holds, at most K.

    Args:
        config: The options.
        program: The program for all rows.
        planner: The cohorts.
        data: With a partition of all seeds.

    Raises:
        ValueError: the algorithm keeps nothing for its clients, or not in rows.
    """
    algorithm, given = program.algorithm, f"--client_state={config.client_state}"
    one = jax.tree.map(lambda leaf: leaf[:1], data.partition)
    seeds = np.zeros(1, np.uint32)
    init = program.init.jitted
    state = jax.eval_shape(
        init, program.floats, data.replace(partition=None), one, seeds
    )
    rows = jax.tree.leaves((state.clients, state.opt_state))
    if not rows:
        raise ValueError(
            f"{given}: clients of --algo={config.algo} keep nothing between rounds; "
            "omit it"
        )
    if algorithm.by_architecture or any(
        leaf.shape[1] != config.num_clients for leaf in rows
    ):
        raise ValueError(
            f"{given}: clients of --algo={config.algo} have no rows of one shape; "
            "omit it"
        )
    cohort = planner.drawn(0, 0)
    most = cohort.client_id.size + cohort.peers.size
    return population.num_residents(state, config.num_clients, most)
