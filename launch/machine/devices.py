"""Devices: the mesh over clients, settings of XLA, and the compilation cache."""

import functools
import hashlib
import os
import pathlib
import platform
import resource
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from launch.machine import processes
from launch.machine import target as targets

# On a CPU, clients whose models have fewer bytes train several at a time, and a core
# costs more than it gains for fewer clients than these.
SMALL_MODEL_BYTES = 50_000
SMALL_CLIENTS = 32
# Seconds for which a CPU's device waits for another one. XLA ends the process after 40,
# and the clients of one device may take a minute longer than those of another.
PATIENCE = {
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 10**6,
    "xla_cpu_collective_call_terminate_timeout_seconds": 10**6,
}
# Private rows of which all copies take more bytes are shared out over the cores of a
# CPU, where each device has a copy of smaller ones and may train any client.
COPIED_ROW_BYTES = 1 << 30
CACHE_BYTES = 4 << 30
CACHE_MIN_SECONDS = 0.2


def begin(distributed: str) -> None:
    """Sets up XLA and joins the processes, before the first computation.

    Unless XLA_FLAGS decides otherwise, XLA may use 512-bit vectors on CPUs that have
    them, each core is a device, and a device may wait long for another one. An invalid
    `distributed` raises ValueError.
    """
    flags = dict(PATIENCE)
    if "avx512f" in _cpuinfo():
        flags["xla_cpu_prefer_vector_width"] = 512
    given = os.environ.get("XLA_FLAGS", "")
    new = [f"--{name}={value}" for name, value in flags.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *new]).strip()
    if not distributed and not jax.distributed.is_initialized():
        cores_are_devices()
    processes.start(distributed)


@functools.cache
def cores_are_devices() -> bool:
    """Makes each core that this process may use a device, once.

    The result is False, and nothing is done, if XLA_FLAGS or jax's settings fix the
    number of a CPU's devices, or if jax has begun to compute.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    is_decided = "xla_force_host_platform_device_count" in flags
    if is_decided or jax.config.jax_num_cpu_devices > 0:
        return False
    try:
        jax.config.update("jax_num_cpu_devices", usable_cores())
    except RuntimeError:
        return False
    return True


def usable_cores() -> int:
    """Counts the cores that this process may use, by affinity and cgroup quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
    group = pathlib.Path("/sys/fs/cgroup")
    for names in ("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"):
        try:
            texts = [(group / name).read_text() for name in names]
            quota, period = " ".join(texts).split()
            allowed = int(quota) // int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue  # no such file, or "max"
        if allowed >= 0:  # -1: no quota
            cores = min(cores, max(allowed, 1))
    return cores


def _cpuinfo() -> str:
    """Linux's description of the processor, "" on other systems."""
    path = pathlib.Path("/proc/cpuinfo")
    return path.read_text() if path.is_file() else ""


def processor() -> dict[str, Any]:
    """The processor's name and its number of cores, as `cpu` and `cores`."""
    lines = [line.partition(":") for line in _cpuinfo().splitlines()]
    named = [name for key, _, name in lines if key.strip() == "model name"]
    named += [platform.processor() or platform.machine()]
    return {"cpu": " ".join(named[0].split()), "cores": os.cpu_count() or 1}


def versions() -> dict[str, str]:
    """The versions of what computes."""
    found = {"jax": jax.__version__, "numpy": np.__version__}
    return {"python": platform.python_version()} | found


def user_cache() -> pathlib.Path:
    """The user's folder for compiled programs, one per kind of processor.

    XLA's programs run on no other kind, and machines may share a home folder.
    """
    found = _cpuinfo() or platform.processor()
    flags = [line for line in found.splitlines() if line.startswith("flags")][:1]
    kind = hashlib.sha256((flags or [found])[0].encode()).hexdigest()[:8]
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / usual
    return pathlib.Path(base, "fedjax_pfl", f"{platform.machine()}-{kind}")


def keep_compiled(choice: str) -> None:
    """Keeps compiled programs on disk for later processes.

    `choice` is `--compile_cache`: a folder, `off`, or empty for the setting of jax
    (JAX_COMPILATION_CACHE_DIR) or else the user's cache folder. A folder that cannot be
    written is not used, and is not an error.
    """
    before = jax.config.jax_compilation_cache_dir
    if not choice and before:
        return
    wanted = None
    if choice != "off":
        try:
            folder = pathlib.Path(choice or user_cache()).expanduser().absolute()
            # Programs in this folder are executed, so others must not write to it.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if str(folder) != before:
                _shrink(folder)
            wanted = str(folder) if os.access(folder, os.W_OK | os.X_OK) else None
        except (OSError, RuntimeError):  # RuntimeError: there is no home folder
            pass
        if choice and wanted is None:
            line = f"--compile_cache={choice} cannot be written; no cache is used"
            print(line, file=sys.stderr)
    if wanted != before:
        jax.config.update("jax_compilation_cache_dir", wanted)
        least = "jax_persistent_cache_min_compile_time_secs"
        jax.config.update(least, CACHE_MIN_SECONDS)
        # jax reads the folder's name only once.
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


def chooses(emulate: str, target: str) -> bool:
    """Whether clients train as on an accelerator, in chunks that cost least."""
    emulates = bool(target) or emulate == "accelerator"
    return emulates or jax.default_backend() != "cpu"


def _are_cores() -> bool:
    """Whether the devices are the cores that the only process may use."""
    is_alone = jax.default_backend() == "cpu" and jax.process_count() == 1
    return is_alone and cores_are_devices()


def _decided(target: str) -> str:
    """The reason why a CPU's cores are not its devices, "" if they are."""
    if target or jax.default_backend() != "cpu" or cores_are_devices():
        return ""
    return "; XLA_FLAGS, jax_num_cpu_devices or an earlier computation decided it"


def copied_row_bytes(emulate: str, target: str) -> int:
    """The largest total bytes of copies of private rows on devices, 0 = no copies."""
    is_copied = not chooses(emulate, target) and _are_cores()
    return COPIED_ROW_BYTES if is_copied else 0


def chosen(num_devices: int, most: int, emulate: str, target: str) -> list[jax.Device]:
    """Chooses the devices that share the clients of a round.

    Args:
        num_devices: `--devices`, 0 = all, or `most` of a CPU's cores.
        most: The number of cores that are of use, at least 1.
        emulate: `accelerator` = choose as on an accelerator.
        target: One of `target.CHIPS`, of which one is taken by default, "" = the
            devices that are present.

    Raises:
        ValueError: there are fewer devices, or not all processes would take part.
    """
    known = targets.devices(target) if target else jax.devices()
    present = len(known)
    if num_devices > present:
        raise ValueError(
            f"--devices={num_devices}: {present} present "
            f"({target or jax.default_backend()}){_decided(target)}"
        )
    count = num_devices or present
    if not num_devices and (target or _are_cores()):
        count = 1 if chooses(emulate, target) else min(present, most)
    if not target and count < present and jax.process_count() > 1:
        raise ValueError(
            f"--devices={num_devices}: all {present} devices of {jax.process_count()} "
            "processes take part; omit it"
        )
    return list(known[:count])


def mesh(used: Sequence[jax.Device], target: str) -> jax.sharding.Mesh | None:
    """Makes a mesh of several devices with the axis `clients`, None of a single one."""
    if len(used) == 1:
        return None
    names, kinds = ("clients",), (jax.sharding.AxisType.Auto,)
    if target:  # of whose devices make_mesh wants all
        return jax.sharding.Mesh(np.array(used), names, kinds)
    return jax.make_mesh((len(used),), names, kinds, devices=used)


def advice(experiment: Any) -> str:
    """Names an option that avoids padding if most local steps were padding, or "".

    The default chunk of an accelerator costs least even with padding.
    """
    config, totals = experiment.config, experiment.totals
    how, found = experiment.task.execution, totals.step_efficiency
    given = "client_chunk" if config.client_chunk else "min_chunk"
    if not totals.steps or found >= 0.5 or how.chunk == 1:
        return ""
    if not how.vmaps_runs:
        cure = "with --client_chunk=1 all would be"
    elif getattr(config, given):
        flag = f"--{given}={getattr(config, given)}"
        cure = f"without {flag} the cheapest chunk is chosen"
    else:
        return ""
    return (
        f"note: {found:.0%} of the executed local steps were real, since a chunk of "
        f"{how.chunk} runs as long as its longest client; {cure}"
    )


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
