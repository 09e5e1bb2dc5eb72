"""The memory that a run needs for models, partitions and one cohort's round.

A lower bound from numbers alone, known before anything is built: what it refuses would
not have run, what it lets through may still be too much (`ending` has a line for that).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from data import memory

# Of a client in a partition's tables.
_CLIENT_BYTES = 250


class Need(NamedTuple):
    """Memory that a run takes.

    Attributes:
        what: Words.
        bytes: At least so many.
        factors: Flag -> how many times it multiplies the bytes.
        on_device: On the accelerator, where there is one.
    """

    what: str
    bytes: int
    factors: dict[str, float]
    on_device: bool = False


def needs(options: dict[str, Any], *, num_rows: int, model_bytes: int) -> list[Need]:
    """What a run needs at least, by numbers alone; `options` are all, resolved."""
    seeds, clients = options["num_seeds"], options["num_clients"]
    cohort, batch = options["clients_per_round"], options.get("batch_size", 1)
    if options["examples_per_client"]:
        num_rows = min(num_rows, options["examples_per_client"] * clients)
    # Half of the mean: some rows test, and a cohort's largest client has no less.
    owned = int((1 - options["proxy_fraction"]) * num_rows / clients / 2) or 1
    padded = -(-owned // batch) * batch
    # Most of a model's weights lie between two hidden layers.
    size = {"model": 1, "model_width": options["model_width"] ** 2}
    flag = "client_chunk" if options["lanes"] in ("0", "auto") else "lanes"
    chunk = min(int(options[flag]) or 1, cohort)
    out = [
        Need(
            "the models of all seeds",
            seeds * model_bytes,
            size | {"num_seeds": seeds},
            True,
        ),
        Need(
            "the models of the clients that train together",
            3 * chunk * model_bytes,
            size | {flag: chunk},
            True,
        ),
        Need(
            "the partitions of all seeds",
            seeds * (12 * num_rows + _CLIENT_BYTES * clients),
            {"num_seeds": seeds, "num_clients": clients},
        ),
    ]
    for name in (name for name in options if name.endswith("_epochs")):
        # Every client of the cohort trains locally; of other plans one row is sure.
        times = cohort if name == "local_epochs" else 1
        factors = {name: options[name], "batch_size": padded / owned}
        factors |= {"clients_per_round": times}
        numbers = times * options[name] * padded
        out.append(Need("the batches of a round", 4 * numbers, factors))
    return out


def kept(options: dict[str, Any], shapes: Any) -> Need:
    """What a state of these shapes and dtypes takes: models that clients keep."""
    leaves = jax.tree.leaves(shapes)
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    factors = {name: options[name] for name in ("num_seeds", "num_clients")}
    return Need("what clients keep", total, factors, True)


def refuse(needed: Sequence[Need], options: dict[str, Any]) -> None:
    """Refuses a run that needs more than is free.

    Raises:
        ValueError: one line with the flag to change and the limit.
    """
    on_device, on_host = free_bytes()
    for place, limit in ((False, on_host), (True, on_device)):
        # A CPU's devices use the host's memory.
        here = [n for n in needed if n.on_device == place or on_device is None]
        total = sum(one.bytes for one in here)
        if limit is None or total <= limit:
            continue
        worst = max(here, key=lambda one: one.bytes)
        flag = max(worst.factors, key=worst.factors.__getitem__)
        raise ValueError(
            f"--{flag}={options[flag]} needs {_size(total)} of memory at least, most "
            f"of it for {worst.what}; {_size(limit)} are free; "
            f"{'take a smaller one' if flag == 'model' else 'lower it'}"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"


def free_bytes() -> tuple[int | None, int | None]:
    """Free bytes of the devices, None where they use the host's, and of the host."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    on_device = None
    if all("bytes_limit" in one for one in stats):
        on_device = sum(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats)
    return on_device, memory.available_bytes()
