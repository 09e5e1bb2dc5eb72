"""Predicts the memory that a run needs, at three times.

    needs              before anything is built, from the numbers of the options
    kept, on_host      before the first round, from the shapes of the state
    planned            before a program runs, as its compiler plans it

`needs` and `kept` are lower bounds, so that a run that they refuse would not have
worked, and `on_host` is what draws of clients are expected to need. A run that passes
may still need too much, since only the compiler knows the activations.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from data import memory
from fedjax_pfl import shapes, types
from fedjax_pfl.rows import hosted
from launch.machine import processes
from launch.machine import target as targets


class Need(NamedTuple):
    """A lower bound in bytes of the memory that `what`, in words, needs.

    Attributes:
        factors: Flag -> the factor by which it multiplies the bytes.
        on_device: Whether it is on the accelerator, if there is one.
        is_expected: Whether it is the mean over random draws, and no bound.
    """

    what: str
    bytes: int
    factors: dict[str, float]
    on_device: bool = False
    is_expected: bool = False


def needs(options: dict[str, Any], *, num_rows: int, model_bytes: int) -> list[Need]:
    """Computes lower bounds for a run from its sizes and all its resolved options."""
    seeds, clients = options["num_seeds"], options["num_clients"]
    cohort = options["clients_per_round"]
    if options["examples_per_client"]:
        num_rows = min(num_rows, options["examples_per_client"] * clients)
    # Some rows are test rows, and a cohort's largest client has at least half the mean.
    owned = int((1 - options["proxy_fraction"]) * num_rows / clients / 2) or 1
    visited = min(owned, options.get("examples_per_round") or owned)
    # Most of a model's weights are between two hidden layers.
    size = {"model": 1, "model_width": options["model_width"] ** 2}
    chunk = min(options["client_chunk"] or 1, cohort)
    by_seed, by_chunk = size | {"num_seeds": seeds}, size | {"client_chunk": chunk}
    together = "the models of the clients that train together"
    # A client takes about 250 bytes of a partition's tables.
    rows = seeds * (12 * num_rows + 250 * clients)
    by_client = {"num_seeds": seeds, "num_clients": clients}
    out = [
        Need("the models of all seeds", seeds * model_bytes, by_seed, True),
        Need(together, 3 * chunk * model_bytes, by_chunk, True),
        Need("the partitions of all seeds", rows, by_client),
    ]
    planned = [name for name in options if name.endswith("_epochs")]
    for name in (name for name in planned if name != "fine_tune_epochs"):
        # All clients of the cohort train locally, and other plans have at least a row.
        is_local = name == "local_epochs"
        factors = {name: options[name], "clients_per_round": cohort if is_local else 1}
        numbers = options[name] * (cohort * visited if is_local else 1)
        out.append(Need("the batches of a round", 4 * numbers, factors))
    return out


def kept(
    options: dict[str, Any], state: types.RoundState, how: types.Execution
) -> Need:
    """Computes a device's memory for a state, which is mostly clients' models."""
    factors = {name: options[name] for name in ("num_seeds", "num_clients")}
    return Need("the models that clients keep", state_bytes(state, how), factors, True)


def state_bytes(state: types.RoundState, how: types.Execution) -> int:
    """Counts a state's bytes in the memory of one device, for a CPU in the host's."""
    copies = how.num_devices if how.platform == "cpu" else 1
    of_clients = shapes.tree_bytes(state.private) * copies
    of_clients //= how.num_devices if how.shares_rows else 1
    return of_clients + copies * shapes.tree_bytes(state.with_private(((), ())))


def on_host(
    options: dict[str, Any], rows: hosted.Hosted, variants: int, chance: np.ndarray
) -> Need:
    """Computes the memory of clients' rows on this host once all rounds are done.

    They are those of the clients that are expected to have trained, whose chances to be
    in a round are f64[K].
    """
    trained = int((1 - (1 - chance) ** options["rounds"]).sum() + 1e-9)
    factors = {"num_seeds": options["num_seeds"], "num_clients": trained}
    total = int(variants * trained * rows.row_bytes * rows.share)
    what = "the rows of clients on the host"
    return Need(what, total, factors, is_expected=True)


def refuse(needed: Sequence[Need], options: dict[str, Any], target: str = "") -> None:
    """Refuses a run that needs more than is free, or than a chip has (ValueError)."""
    on_device, on_host = free_bytes()
    on_device = targets.chip(target).memory if target else on_device
    for place, limit in ((False, on_host), (True, on_device)):
        # Devices of a CPU use the host's memory.
        here = [n for n in needed if n.on_device == place or on_device is None]
        total = sum(one.bytes for one in here)
        if limit is None or total <= limit:
            continue
        worst = max(here, key=lambda one: one.bytes)
        flag = max(worst.factors, key=worst.factors.__getitem__)
        size = f"{memory.in_words(total)} of memory at least"
        if worst.is_expected:
            size = f"about {memory.in_words(total)} of memory"
        raise ValueError(
            f"--{flag}={options[flag]} needs {size}, most of it for {worst.what}, and "
            f"{memory.in_words(limit)} are free; "
            f"{'take a smaller one' if flag == 'model' else 'lower it'}"
        )


def planned(simulation: Any, how: types.Execution, name: str) -> int | None:
    """The bytes of one of `Program.names`, and of the states of waiting calls.

    They are None if the compiler of any process finds no plan that fits.
    """
    try:
        needed = planned_bytes(simulation.ahead(name))
        needed += waiting_bytes(simulation, how, name)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = None
    found = processes.gathered(needed)
    return None if None in found else max(found)


def waiting_bytes(simulation: Any, how: types.Execution, name: str) -> int:
    """The bytes of the states of other calls, while one of `Program.names` runs."""
    calls = len(simulation.calls)
    every = state_bytes(simulation.template(), how)
    # Where an evaluation goes by blocks of rows, those of a round are there too.
    goes_by_block = simulation.rows.goes_by_block(simulation.program.algorithm)
    is_by_block = name != "rounds" and goes_by_block
    return every * (calls - (not is_by_block)) // calls


def planned_bytes(compiled: jax.stages.Compiled) -> int:
    """The bytes of a program on one device as its compiler plans them, 0 = unknown.

    They include code, arguments, temporaries, and results that replace no argument.
    """
    plan = compiled.memory_analysis()
    if plan is None:
        return 0
    new = plan.output_size_in_bytes - plan.alias_size_in_bytes
    arguments, temporary = plan.argument_size_in_bytes, plan.temp_size_in_bytes
    return temporary + arguments + new + plan.generated_code_size_in_bytes


def device_bytes(target: str = "") -> int | None:
    """The memory of a chip or of the smallest device, None if it is the host's."""
    if target:
        return targets.chip(target).memory
    return min((limit for limit, _ in _devices()), default=None)


def free_bytes() -> tuple[int | None, int | None]:
    """Free bytes of the devices, None if they use the host's, and of the host."""
    found = _devices()
    on_device = sum(limit - used for limit, used in found) if found else None
    return on_device, memory.available_bytes()


def _devices() -> list[tuple[int, int]]:
    """(limit, bytes in use) of each device, [] if one uses the host's memory."""
    every = [device.memory_stats() or {} for device in jax.local_devices()]
    if not all("bytes_limit" in one for one in every):
        return []
    return [(one["bytes_limit"], one.get("bytes_in_use", 0)) for one in every]
