"""Devices: the mesh over clients, precision, and what XLA should know of the CPU."""

from __future__ import annotations

import os
import pathlib
import resource
import sys

import jax

from fedjax_pfl import types

PRECISIONS = {"f32": "highest", "tf32": "tensorfloat32", "bf16": "bfloat16"}
SMALL_MODEL_BYTES = 400_000


def prefer_wide_vectors() -> None:
    """Lets XLA use 512-bit vectors on CPUs that have them; a user's choice stands.

    Must run before the first computation.
    """
    flag = "xla_cpu_prefer_vector_width"
    given = os.environ.get("XLA_FLAGS", "")
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if flag in given or not cpuinfo.is_file() or "avx512f" not in cpuinfo.read_text():
        return
    os.environ["XLA_FLAGS"] = f"{given} --{flag}=512".strip()


def execution(
    client_chunk: int,
    num_devices: int,
    clients_per_round: int,
    model_bytes: int,
    batch_size: int,
) -> types.Execution:
    """The mesh and the number of clients that are vmapped together.

    Args:
        client_chunk: A user's choice, 0 = by backend: on a CPU one client at a time, or
            for tiny models as many as make about 80 examples a step; elsewhere the
            whole cohort.
        num_devices: 0 = all.
        clients_per_round: Clients of a cohort.
        model_bytes: Size of one client's parameters.
        batch_size: Examples of one client's step.

    Raises:
        ValueError: more devices than there are.
    """
    present = len(jax.devices())
    if num_devices > present:
        raise ValueError(
            f"--devices={num_devices}: {present} present ({jax.default_backend()})"
        )
    count = num_devices or present
    per_device = -(-clients_per_round // count)
    chunk = client_chunk
    if not chunk and jax.default_backend() != "cpu":
        chunk = per_device
    if not chunk:
        chunk = 1
        if model_bytes < SMALL_MODEL_BYTES:
            wanted = max(1, round(80 / batch_size))
            # A divisor near to it: no padding rows.
            divisors = [d for d in range(1, 2 * wanted + 1) if per_device % d == 0]
            chunk = min(divisors, key=lambda d: (abs(d - wanted), d))
    mesh = None
    if count > 1:
        mesh = jax.make_mesh(
            (count,),
            ("clients",),
            axis_types=(jax.sharding.AxisType.Auto,),
            devices=jax.devices()[:count],
        )
    return types.Execution(chunk=min(chunk, per_device), mesh=mesh)


def peak_memory_bytes() -> int:
    """Peak bytes of the first device, or of the process on a CPU."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


def name() -> str:
    """The first device's kind, such as `NVIDIA H200` or `cpu`."""
    return jax.devices()[0].device_kind
