"""Decides where clients' private rows are, and how many of them a device holds."""

import functools
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from data import plan
from fedjax_pfl import program as program_lib
from fedjax_pfl import shapes, types
from fedjax_pfl.rows import hosted
from launch.config import schema
from launch.machine import processes


def place(config: schema.Config) -> str | None:
    """The folder of clients' private rows, "" = the host's memory, None = the device.

    Raises:
        ValueError: there is no such folder.
    """
    name = config.client_state
    if name in ("device", "replicated"):
        return None
    reason = ""
    if name != "host":
        try:  # whether a file can be made there
            with tempfile.TemporaryFile(dir=pathlib.Path(name).expanduser()):
                pass
        except OSError as error:
            reason = error.strerror or str(error)
    if reason := next(filter(None, processes.gathered(reason)), ""):
        raise ValueError(
            f"--client_state={name}: expected device, replicated, host or a folder to "
            f"which rows can be written ({reason})"
        )
    # Absolute, since the process may move before a file is made there.
    return "" if name == "host" else str(pathlib.Path(name).expanduser().absolute())


class NeededOnDeviceError(ValueError):
    """One line about rows of clients that cannot be on the host."""


def recorded(name: str) -> str:
    """The `--client_state` of a run that is opened again; a folder may be gone."""
    is_kind = name in ("device", "replicated", "host")
    return name if is_kind or pathlib.Path(name).expanduser().is_dir() else "host"


def with_resident_rows(
    config: schema.Config,
    shares_rows: bool,
    task: types.Task,
    build: Callable[[types.Task], program_lib.Program],
    planner: plan.Planner,
    data: types.Data,
) -> tuple[types.Task, program_lib.Program]:
    """Makes task and program for devices that hold only some clients' rows, not all.

    `data` has a partition of all seeds, and the algorithm declares `shares_rows`.

    Raises:
        NeededOnDeviceError: the algorithm keeps nothing for its clients, or not in
            equal rows.
        ValueError: it does not read them as it has to.
    """
    given = f"--client_state={config.client_state}"
    tables, seeds = data.replace(partition=None), np.zeros(1, np.uint32)
    one = jax.tree.map(lambda leaf: leaf[:1], data.partition)

    def built(task: types.Task) -> tuple[program_lib.Program, types.RoundState]:
        """The program, and the shapes of its first state, of one seed."""
        program = build(task)
        given = program.floats, tables, one, seeds
        return program, program.init.shapes(*given)

    program, state = built(task)
    kept, who = jax.tree.leaves(state.private), f"--algo={config.algo}"
    why = ""
    if not kept:
        why = f"clients of {who} keep nothing between rounds"
    elif not shares_rows:
        why = f"{who} needs the rows of all clients on the device, as it does not "
        why += "declare shares_rows"
    elif _has_keys(kept):
        why = f"clients of {who} keep random keys, which must be on the device"
    if why:
        raise NeededOnDeviceError(f"{given}: {why}; omit it")
    cohort, is_grouped = planner.drawn(0, 0), len(task.client_models) > 1
    if not is_grouped:
        how, devices = task.execution, 1
        most = cohort.client_id.size + cohort.peers.size
        if how.shares_rows:
            devices, most = how.num_devices, planner.most_owned
        count = hosted.num_residents(state, config.num_clients, most, devices) * devices
        task = task._replace(num_residents=count)
        # With as many rows as clients, a leaf of K entries need not be by client.
        tried = count + devices * (count == config.num_clients)
        program, state = build(task), built(task._replace(num_residents=tried))[1]
        rows = jax.tree.leaves(state.private)
        is_grouped = any(leaf.shape[1] != tried for leaf in rows)
    if is_grouped:
        what = "what depends on each client from the first round on"
        if len(task.client_models) > 1:
            what = "the rows of each architecture apart"
        raise NeededOnDeviceError(
            f"{given}: --algo={config.algo} keeps {what}, which must be on the device; "
            "omit it"
        )
    check_serving(lambda task: build(task).algorithm, config.algo, task, data, cohort)
    return task, program


def check_serving(
    make: Callable[[types.Task], types.Algorithm],
    name: str,
    task: types.Task,
    data: types.Data,
    cohort: types.Cohort,
) -> None:
    """Refuses an algorithm that serves row k of a table by client, where rows move.

    `data` has a partition of all seeds. Raises ValueError if the models of a group by
    row (`Serving.each`) are not as many as the private rows.
    """
    # With more rows than clients, no table by client has as many entries.
    num_rows = task.num_clients + 1
    method = make(task._replace(num_residents=num_rows, execution=types.Execution()))
    if method.serving is None:
        return
    data = data.of_seed(0)
    state = jax.eval_shape(method.init, data, jax.eval_shape(jax.random.key, 0))
    for group in jax.eval_shape(method.serving, state, cohort, data):
        count = jax.tree.leaves(group.own)[0].shape[0] if group.is_by_row else num_rows
        if count != num_rows:
            raise ValueError(
                f"algo: {name} declares shares_rows, and its serving takes the "
                f"models of clients from a table of {count} and not from "
                "state.clients, whose rows move; keep them there, or do not declare it"
            )


def bytes_to_share(
    make: Callable[[types.Task], types.Algorithm],
    hparams: Any,
    task: types.Task,
    data: types.Data,
    config: schema.Config,
) -> int:
    """Counts the bytes of one seed's rows that devices may hold for their own clients.

    They are 0 if clients keep nothing, differ in architecture, or keep what depends on
    their number. Rows on the host count only as far as devices hold them. In `task`
    every device has all rows, and `data` has a partition of all seeds.
    """
    if len(task.client_models) > 1:
        return 0
    # With more rows than clients, no other array has as many entries as there are rows.
    task = task._replace(num_residents=task.num_clients + 1)
    first = functools.partial(program_lib.first_state, make(task), hparams, task)
    state = jax.eval_shape(first, data.of_seed(0), jax.eval_shape(jax.random.key, 0))
    kept = jax.tree.leaves(state.private)
    is_by_row = all(leaf.shape[:1] == (task.num_rows,) for leaf in kept)
    if _has_keys(kept) or not is_by_row:
        return 0
    every = shapes.tree_bytes(kept)
    if config.client_state == "device":
        return every
    of_round = every * config.clients_per_round // config.num_clients
    return min(every, max(hosted.resident_bytes(), of_round))


def _has_keys(leaves: Sequence[Any]) -> bool:
    return any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves)
