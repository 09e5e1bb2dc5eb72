"""How client rows are computed: chunks, devices, and where arrays live."""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec


class Execution(NamedTuple):
    """How client rows are computed; never changes what is computed.

    Attributes:
        chunk: Rows that are vmapped together on one device; 1 = one by one.
        mesh: A mesh with the axis `clients`, or None for a single device.
        is_bucketed: Whether a chunk whose clients hold parts of a model computes the
            largest of them only; else the whole model, masked.
        vmaps_runs: Whether seeds are one more vmapped axis, as accelerators like it;
            else each is a call of its own.
        lanes: Clients that train side by side on one device, in each lane one after
            another; 0 = rounds are computed in chunks.
    """

    chunk: int = 1
    mesh: jax.sharding.Mesh | None = None
    is_bucketed: bool = True
    vmaps_runs: bool = False
    lanes: int = 0

    @property
    def without_lanes(self) -> Execution:
        """Chunks of as many, for what is no training."""
        return self._replace(chunk=self.lanes or self.chunk, lanes=0)


def padded_size(num_rows: int, execution: Execution) -> int:
    """Rows of a cohort once it fills whole chunks on every device."""
    devices = execution.mesh.size if execution.mesh else 1
    per_device = -(-num_rows // devices)
    chunk = min(execution.chunk, per_device)
    return devices * chunk * -(-per_device // chunk)


def executed_steps(num_steps: np.ndarray, execution: Execution) -> np.ndarray:
    """Local steps computed for cohorts, padding and idle lanes included.

    A chunk runs to its longest client, lanes until the last of them is done.

    Args:
        num_steps: int[..., C], of rows in their order in the cohort.
        execution: Chunks and devices.

    Returns:
        int64[...], of each cohort.
    """
    num_steps = np.asarray(num_steps).astype(np.int64)
    devices = execution.mesh.size if execution.mesh else 1
    if execution.lanes:
        by_device = num_steps.reshape(-1, num_steps.shape[-1] // devices)
        run = np.array([_dealt(rows, execution.lanes) for rows in by_device])
        return run.reshape(*num_steps.shape[:-1], devices).sum(-1)
    chunk = min(execution.chunk, num_steps.shape[-1] // devices)
    bounds = num_steps.reshape(*num_steps.shape[:-1], -1, chunk).max(-1)
    return bounds.sum(-1) * chunk


def _dealt(num_steps: np.ndarray, width: int) -> int:
    """Steps that the lanes of a device compute for its rows, the last one first.

    As `lanes.one_after_another` deals them: to the lane that is free first.
    """
    busy = [0] * min(width, len(num_steps))
    for steps in num_steps[::-1].tolist():
        # A row without steps takes one that changes nothing.
        heapq.heapreplace(busy, busy[0] + max(steps, 1))
    return max(busy) * len(busy)


# Cost of one client's local step on an accelerator, by the examples that a step of its
# chunk has. Millions of cycles that a TPU v5e's compiler estimates for one step of the
# model m1 at batch size 20, of 1, 8, 32 and 100 clients side by side, each over their
# number. Between them interpolated, beyond them the last.
STEP_COSTS = {20: 0.51, 160: 0.60, 640: 0.28, 2000: 0.14}


def step_cost(width: int, batch_size: int) -> float:
    """What a client's local step costs where `width` of them are computed at once.

    Of an accelerator; in units of which only ratios matter.
    """
    known = np.log(list(STEP_COSTS)), np.log(list(STEP_COSTS.values()))
    return float(np.exp(np.interp(np.log(width * batch_size), *known)))


def place(tree: Any, where: jax.sharding.Sharding) -> Any:
    """Arrays of the host, equal in all processes, as arrays on their devices."""
    if jax.process_count() == 1:
        return jax.device_put(tree, where)

    # device_put would first compare every byte between the processes.
    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == where.device_set:
            return leaf
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        host = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        out = jax.make_array_from_callback(host.shape, where, lambda at: host[at])
        return jax.random.wrap_key_data(out) if is_key else out

    return jax.tree.map(one, tree)


def wait_for_all(what: str) -> None:
    """Waits until all processes are here, however long that takes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def agreed(seconds: float) -> float:
    """The clock of the first process, in all of them."""
    if jax.process_count() == 1:
        return seconds
    told = multihost_utils.broadcast_one_to_all(np.float32(seconds))
    return float(told)


def replicated(execution: Execution) -> jax.sharding.Sharding:
    """Where tables and states live: on every device of the mesh, or on the one."""
    if execution.mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.sharding.NamedSharding(execution.mesh, PartitionSpec())


def by_device(execution: Execution) -> jax.sharding.Sharding:
    """Where leaves [seeds, devices, ...] live: on each device its own part."""
    if execution.mesh is None:
        return replicated(execution)
    return jax.sharding.NamedSharding(execution.mesh, PartitionSpec(None, "clients"))
