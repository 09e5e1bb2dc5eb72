"""Where clients' private rows are kept, and how many of them the device holds."""

import pathlib
import tempfile
from collections.abc import Callable

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
    if name != "host":
        _try(name)
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


def recorded(name: str) -> str:
    """Where the rows of a run are when it is opened again: a folder may be gone."""
    if name in ("device", "host") or pathlib.Path(name).expanduser().is_dir():
        return name
    return "host"


def _try(name: str) -> None:
    """Refuses a folder in which no file can be made."""
    try:
        with tempfile.TemporaryFile(dir=pathlib.Path(name).expanduser()):
            pass
    except OSError as error:
        raise ValueError(
            f"--client_state={name}: expected device, host or a folder to which rows "
            f"can be written ({error.strerror})"
        ) from error


def of_few(
    config: schema.Config,
    task: types.Task,
    build: Callable[[types.Task], program_lib.Program],
    planner: plan.Planner,
    data: types.Data,
) -> tuple[types.Task, program_lib.Program]:
    """The task and the program in which the device holds the rows of some clients.

    Args:
        config: The options.
        task: The task in which it holds all.
        build: The program of a task.
        planner: The cohorts.
        data: With a partition of all seeds.

    Raises:
        ValueError: the algorithm keeps nothing for its clients, or not in equal rows.
    """
    given, one = f"--client_state={config.client_state}", data.partition
    one = jax.tree.map(lambda leaf: leaf[:1], one)
    data, seeds = data.replace(partition=None), np.zeros(1, np.uint32)

    def shapes(task: types.Task) -> tuple[program_lib.Program, types.RoundState]:
        program = build(task)
        state = jax.eval_shape(program.init.jitted, program.floats, data, one, seeds)
        return program, state

    program, state = shapes(task)
    kept = jax.tree.leaves((state.clients, state.opt_state))
    if any(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in kept):
        raise ValueError(
            f"{given}: clients of --algo={config.algo} keep random keys, which must be "
            "on the device; omit it"
        )
    if not kept:
        raise ValueError(
            f"{given}: clients of --algo={config.algo} keep nothing between rounds; "
            "omit it"
        )
    cohort, is_grouped = planner.drawn(0, 0), program.algorithm.by_architecture
    if not is_grouped:
        most = cohort.client_id.size + cohort.peers.size
        count = population.num_residents(state, config.num_clients, most)
        task = task._replace(num_residents=count)
        program, state = shapes(task)
        rows = jax.tree.leaves((state.clients, state.opt_state))
        is_grouped = any(leaf.shape[1] != count for leaf in rows)
    if is_grouped:
        raise ValueError(
            f"{given}: --algo={config.algo} keeps what depends on each client from the "
            "first round on, which must be on the device; omit it"
        )
    return task, program
