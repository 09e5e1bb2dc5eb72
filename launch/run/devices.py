"""Devices: the mesh over clients, precision, what XLA should know of the CPU, and where
compiled programs are kept."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import resource
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from data import plan
from fedjax_pfl import types
from launch.run import processes

SMALL_MODEL_BYTES = 400_000
CACHE_BYTES = 4 << 30
CACHE_MIN_SECONDS = 0.2


def begin(distributed: str) -> None:
    """What must happen before the first computation, in every command.

    XLA may use 512-bit vectors on CPUs that have them; a user's choice stands.

    Raises:
        ValueError: one line about that.
    """
    flag, given = "xla_cpu_prefer_vector_width", os.environ.get("XLA_FLAGS", "")
    if flag not in given and "avx512f" in _cpuinfo():
        os.environ["XLA_FLAGS"] = f"{given} --{flag}=512".strip()
    processes.start(distributed)


def _cpuinfo() -> str:
    """What Linux says of the processor; "" elsewhere."""
    path = pathlib.Path("/proc/cpuinfo")
    return path.read_text() if path.is_file() else ""


def user_cache() -> pathlib.Path:
    """The user's folder for compiled programs, one per kind of processor.

    XLA's programs are for the very processor they were compiled on, and a home folder
    may be shared by several.
    """
    told = _cpuinfo() or platform.processor()
    flags = [line for line in told.splitlines() if line.startswith("flags")][:1]
    kind = hashlib.sha256((flags or [told])[0].encode()).hexdigest()[:8]
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / usual
    return pathlib.Path(base, "fedjax_pfl", f"{platform.machine()}-{kind}")


def keep_compiled(choice: str) -> None:
    """Keeps compiled programs on disk, so that a next process need not compile them.

    Never fails a run: a folder that cannot be written is not used.

    Args:
        choice: `--compile_cache`: a folder, `off`, or empty for what jax is told
            (JAX_COMPILATION_CACHE_DIR) or else the user's cache folder.
    """
    before = jax.config.jax_compilation_cache_dir
    if not choice and before:
        return
    wanted = None
    if choice != "off":
        try:
            folder = pathlib.Path(choice) if choice else user_cache()
            folder = folder.expanduser().absolute()
            # Whoever may write here may have this user run any code.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _shrink(folder)
            wanted = str(folder) if os.access(folder, os.W_OK | os.X_OK) else None
        except (OSError, RuntimeError):  # RuntimeError: nobody knows the home folder
            pass
        if choice and wanted is None:
            line = f"--compile_cache={choice} cannot be written; going on without"
            print(line, file=sys.stderr)
    if wanted != before:
        jax.config.update("jax_compilation_cache_dir", wanted)
        least = "jax_persistent_cache_min_compile_time_secs"
        jax.config.update(least, CACHE_MIN_SECONDS)
        # jax looks at the folder's name only once.
        compilation_cache.reset_cache()


def _shrink(folder: pathlib.Path) -> None:
    """Removes the oldest programs beyond `CACHE_BYTES`."""
    files = [path for path in folder.glob("*-cache") if path.is_file()]
    ages = sorted(((path.stat(), path) for path in files), key=lambda p: -p[0].st_mtime)
    total = 0
    for stat, path in ages:
        total += stat.st_size
        if total > CACHE_BYTES:
            path.unlink(missing_ok=True)


def execution(
    client_chunk: int,
    num_devices: int,
    clients_per_round: int,
    model_bytes: int,
    batch_size: int,
    min_chunk: int,
    num_steps: np.ndarray,
    num_levels: int = 1,
    emulate: str = "",
    lanes: str = "0",
) -> types.Execution:
    """The mesh, and how many clients train together, in chunks or in lanes.

    Args:
        client_chunk: A user's choice, 0 = by backend: on a CPU one client at a time, or
            for tiny models as many as make about 80 examples a step; elsewhere what
            costs least (`plan.choose_chunk`).
        num_devices: 0 = all.
        clients_per_round: Clients of a cohort.
        model_bytes: Size of one client's parameters.
        batch_size: Examples of one client's step.
        min_chunk: The least chunk elsewhere than on a CPU.
        num_steps: int[T, C], steps of the clients of a few typical cohorts.
        num_levels: Levels at which clients compute: a chunk should be of one of them.
        emulate: `accelerator` = choose as on one, whatever the backend.
        lanes: Clients in lanes on each device, `0` = none; `auto` = elsewhere than on a
            CPU as many as cost less than any chunk (`plan.choose_lanes`).

    Raises:
        ValueError: more devices than there are.
    """
    present = len(jax.devices())
    if num_devices > present:
        raise ValueError(
            f"--devices={num_devices}: {present} present ({jax.default_backend()})"
        )
    count = num_devices or present
    if count < present and jax.process_count() > 1:
        raise ValueError(
            f"--devices={num_devices}: all {present} devices of {jax.process_count()} "
            "processes take part; leave it away"
        )
    per_device = -(-clients_per_round // count)
    is_accelerator = jax.default_backend() != "cpu" or emulate == "accelerator"
    chunk = client_chunk
    if not chunk and is_accelerator:
        chunk, _ = plan.choose_chunk(
            num_steps, batch_size=batch_size, min_chunk=min_chunk, devices=count
        )
        chunk = min(chunk, -(-per_device // num_levels))
    if not chunk:
        chunk = 1
        if model_bytes < SMALL_MODEL_BYTES:
            wanted = max(1, round(80 / batch_size))
            # A divisor near to it: no padding rows.
            divisors = [d for d in range(1, 2 * wanted + 1) if per_device % d == 0]
            chunk = min(divisors, key=lambda d: (abs(d - wanted), d))
    mesh, axis_types = None, (jax.sharding.AxisType.Auto,)
    if count > 1:
        chosen = jax.devices()[:count]
        mesh = jax.make_mesh((count,), ("clients",), axis_types, devices=chosen)
    width = 0 if lanes == "auto" else int(lanes)
    if lanes == "auto" and is_accelerator and num_levels == 1:
        width = plan.choose_lanes(num_steps, batch_size=batch_size, devices=count)
    return types.Execution(
        chunk=1 if width else min(chunk, per_device),
        mesh=mesh,
        vmaps_runs=is_accelerator,
        lanes=min(width, per_device),
    )


def advice(experiment: Any) -> str:
    """A line for a run most of whose steps were padding, where an option cures that.

    Empty elsewhere: on an accelerator the chunk that is chosen where none is given
    costs least, also where it pads.
    """
    config, totals = experiment.config, experiment.totals
    how, found = experiment.task.execution, totals.step_efficiency
    given = "client_chunk" if config.client_chunk else "min_chunk"
    is_alone = how.chunk == 1 and not how.lanes
    if not totals.steps or found >= 0.5 or is_alone:
        return ""
    if how.lanes:
        return (
            f"note: {found:.0%} of the executed local steps were real, since the "
            f"longest client trains on while others of the {how.lanes} lanes are idle; "
            "with fewer --lanes more would be"
        )
    if not how.vmaps_runs:
        cure = "with --client_chunk=1 all would be"
    elif getattr(config, given):
        flag = f"--{given}={getattr(config, given)}"
        cure = f"without {flag} the chunk is chosen that costs least"
    else:
        return ""
    return (
        f"note: {found:.0%} of the executed local steps were real, since a chunk of "
        f"{how.chunk} runs as long as its longest client; {cure}"
    )


def evaluation_rows() -> int:
    """Examples of one forward pass that measures: on a CPU what its caches hold."""
    return 64 if jax.default_backend() == "cpu" else 256


def peak_memory_bytes() -> int:
    """Peak bytes of the first device, or of the process on a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


def name() -> str:
    """The first device's kind, such as `NVIDIA H200` or `cpu`."""
    return jax.devices()[0].device_kind
