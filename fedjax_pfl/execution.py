"""How client rows are computed: chunks, devices, and where arrays live."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec


class Execution(NamedTuple):
    """How client rows are computed; never changes what is computed.

    Attributes:
        chunk: Rows that are vmapped together on one device; 1 = one by one.
        mesh: A mesh with the axis `clients`, or None for a single device.
        is_bucketed: Whether a chunk whose clients hold parts of a model computes the
            largest of them only; else the whole model, masked.
    """

    chunk: int = 1
    mesh: jax.sharding.Mesh | None = None
    is_bucketed: bool = True


def padded_size(num_rows: int, execution: Execution) -> int:
    """Rows of a cohort once it fills whole chunks on every device."""
    devices = execution.mesh.size if execution.mesh else 1
    per_device = -(-num_rows // devices)
    chunk = min(execution.chunk, per_device)
    return devices * chunk * -(-per_device // chunk)


def executed_steps(num_steps: np.ndarray, execution: Execution) -> np.ndarray:
    """Local steps computed for cohorts, padding included: a chunk runs to its longest.

    Args:
        num_steps: int[..., C], of rows in their order in the cohort.
        execution: Chunks and devices.

    Returns:
        int64[...], of each cohort.
    """
    num_steps = np.asarray(num_steps).astype(np.int64)
    devices = execution.mesh.size if execution.mesh else 1
    chunk = min(execution.chunk, num_steps.shape[-1] // devices)
    bounds = num_steps.reshape(*num_steps.shape[:-1], -1, chunk).max(-1)
    return bounds.sum(-1) * chunk


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
