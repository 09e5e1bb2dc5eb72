"""What memory a run may need: known before anything is built.

The estimate of memory is a lower bound from numbers alone: what it refuses would not
have run, what it lets through may still be too much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from data import memory

_CURES = {
    "dataset": "take fewer examples",
    "model": "take a smaller one",
    "rounds": "lower it or raise --eval_every",
}
_RECORD_BYTES = 1000
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


def needs(
    options: dict[str, Any],
    *,
    num_rows: int,
    row_numbers: int,
    model_bytes: int,
) -> list[Need]:
    """What a run needs at least, by numbers alone.

    Args:
        options: Every option by name, resolved.
        num_rows: Examples of the data set.
        row_numbers: Numbers of an example.
        model_bytes: Of the largest model's parameters.
    """
    seeds, clients = options["num_seeds"], options["num_clients"]
    cohort, batch = options["clients_per_round"], options.get("batch_size", 1)
    if options["examples_per_client"]:
        num_rows = min(num_rows, options["examples_per_client"] * clients)
    # Half of the mean: some rows test, and a cohort's largest client has no less.
    owned = int((1 - options["proxy_fraction"]) * num_rows / clients / 2) or 1
    padded = -(-owned // batch) * batch
    evaluations = options["rounds"] // options["eval_every"] + 1
    # Most of a model's weights lie between two hidden layers.
    size = {"model": 1, "model_width": options["model_width"] ** 2}
    flag = "client_chunk"
    if options["lanes"] not in ("0", "auto"):
        flag = "lanes"
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
            "the examples of one step",
            2 * 4 * batch * row_numbers,
            {"batch_size": batch},
            True,
        ),
        Need(
            "the partitions of all seeds",
            seeds * (12 * num_rows + _CLIENT_BYTES * clients),
            {"num_seeds": seeds, "num_clients": clients},
        ),
        Need(
            "the accuracies of all clients",
            8 * 10 * seeds * clients,
            {"num_seeds": seeds, "num_clients": clients},
        ),
        Need(
            "the records of all evaluations",
            _RECORD_BYTES * seeds * evaluations,
            {"rounds": evaluations, "num_seeds": seeds},
        ),
    ]
    for name, epochs in options.items():
        if not name.endswith("_epochs"):
            continue
        # Every client of the cohort trains locally; of other plans one row is sure.
        times = cohort if name == "local_epochs" else 1
        factors = {name: epochs, "batch_size": padded / owned}
        if times > 1:
            factors["clients_per_round"] = times
        out.append(Need("the batches of a round", 4 * times * epochs * padded, factors))
    return out


def refuse(
    needed: Sequence[Need], options: dict[str, Any], free: dict[bool, int | None]
) -> None:
    """Refuses a run that needs more than there is.

    Args:
        needed: From `needs`.
        options: Every option by name.
        free: Bytes on the device (True) and on the host (False). None = unknown, on the
            device: the same memory as the host's.

    Raises:
        ValueError: one line with the flag to change and the limit.
    """
    shared = free[True] is None
    for place in (False, True):
        here = [one for one in needed if one.on_device == place or shared]
        total = sum(one.bytes for one in here)
        limit = free[place]
        if limit is None or total <= limit:
            continue
        worst = max(here, key=lambda one: one.bytes)
        flag = max(worst.factors, key=worst.factors.__getitem__)
        raise ValueError(
            f"--{flag}={options[flag]} needs {_size(total)} of memory at least, most "
            f"of it for {worst.what}; {_size(limit)} are free; "
            f"{_CURES.get(flag, 'lower it')}"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"


def free_bytes() -> dict[bool, int | None]:
    """Free bytes on the devices (True; None where they use the host's) and the host."""
    return {True: _device_bytes(jax.local_devices()), False: memory.available_bytes()}


def _device_bytes(devices: Iterable[Any]) -> int | None:
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in one for one in stats):
        return None
    return sum(one["bytes_limit"] - one.get("bytes_in_use", 0) for one in stats)


def check(options: dict[str, Any], image: np.ndarray, model_bytes: int) -> None:
    """Refuses a run whose numbers alone need more memory than there is.

    Args:
        options: Every option by name, resolved.
        image: [N, ...], the data set's.
        model_bytes: Of the largest model's parameters.

    Raises:
        ValueError: one line with the flag to change and the limit.
    """
    free = free_bytes()
    needed = needs(
        options,
        num_rows=len(image),
        row_numbers=image[0].size,
        model_bytes=model_bytes,
    )
    if free[True] is not None:
        # A CPU may use the examples where they are.
        needed.append(Need("examples", image.nbytes, {"dataset": len(image)}, True))
    refuse(needed, options, free)


def check_images(options: dict[str, Any], image: np.ndarray) -> None:
    """Refuses `--image_size` and `--image_channels` that no memory can hold.

    Args:
        options: Every option by name, resolved.
        image: [N, ...], before they are made larger.

    Raises:
        ValueError: one line with the flag to change and the limit.
    """
    side, channels = options["image_size"], options["image_channels"]
    if image.ndim != 4 or not (side or channels):
        return
    height, width, had = image.shape[1:]
    size = len(image) * (side or height) * (side or width) * (channels or had)
    factors = {"image_size": side**2, "image_channels": channels}
    need = Need("the images", size * image.itemsize, factors)
    refuse([need], options, free_bytes())


def check_state(options: dict[str, Any], shapes: Any) -> None:
    """Refuses a state that does not fit: models that clients keep, of all seeds.

    Args:
        options: Every option by name, resolved.
        shapes: A pytree of shapes and dtypes.

    Raises:
        ValueError: one line with the flag to change and the limit.
    """
    leaves = jax.tree.leaves(shapes)
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    names = ("num_seeds", "num_clients")
    factors = {name: options[name] for name in names}
    refuse([Need("what clients keep", total, factors, True)], options, free_bytes())
