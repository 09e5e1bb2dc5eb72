"""Compiles for chips that are not present: `target="tpu:v5e"`, `target="gpu:h100"`.

The compiler of a TPU comes with the package libtpu and needs no TPU. It plans the
memory of a program and estimates the cycles of each of its parts. That of a GPU comes
with jax's plugin for CUDA, from jax 0.11 on without an assembler, which NVIDIA's
package nvidia-cuda-nvcc has. It needs no GPU, driver or other CUDA library. It plans
the memory and the kernels, whose times nothing estimates.
"""

import os
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies

from fedjax_pfl import options
from launch.config import limits


class Chip(NamedTuple):
    """A kind of chip with `memory` in bytes.

    The compiler calls a few of them `topology`. libtpu calls them `accelerator`; a
    GPU's compiler wants the figures `gpu` instead.
    """

    topology: str
    accelerator: str
    memory: int
    gpu: str = ""

    @property
    def platform(self) -> str:
        """As jax calls it."""
        return "cuda" if self.gpu else "tpu"


_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory} cuda_compute_capability {{ major: {capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


def _gpu(memory: int, **figures: Any) -> Chip:
    """Four GPUs of a host."""
    return Chip("1x4x1", "", memory, _GPU.format(memory=memory, **figures))


CHIPS = {
    # A device is one of the two cores of a v4.
    "tpu:v4": Chip("v4:2x2x1", "v4-8", 16 << 30),
    "tpu:v5e": Chip("v5e:2x2", "v5litepod-4", 16 << 30),
    "tpu:v6e": Chip("v6e:2x2", "v6e-4", 32 << 30),
    "gpu:a100": _gpu(
        85_000_000_000,
        name="NVIDIA A100-SXM4-80GB",
        capability=8,
        cores=108,
        units=64,
        shared=167_936,
        optin=166_912,
        bandwidth=2_039_000_000_000,
        cache=41_943_040,
        clock=1.41,
    ),
    "gpu:h100": _gpu(
        84_929_347_584,
        name="NVIDIA H100 80GB HBM3",
        capability=9,
        cores=132,
        units=128,
        shared=233_472,
        optin=232_448,
        bandwidth=3_352_320_000_000,
        cache=52_428_800,
        clock=1.98,
    ),
}

TPUS = {name: one for name, one in CHIPS.items() if one.platform == "tpu"}


def chip(name: str) -> Chip:
    """The chip of a name; ValueError if there is none."""
    options.check_one_of(
        "target", name if isinstance(name, str) else limits.shown(name), CHIPS
    )
    return CHIPS[name]


def _compile_for(device: jax.Device) -> None:
    """Compiles next to nothing: a part of the compiler may be missing."""
    where = jax.sharding.SingleDeviceSharding(device)
    one = jax.ShapeDtypeStruct((1,), np.float32, sharding=where)
    jax.jit(lambda x: x + 1).lower(one).compile()


def devices(name: str) -> list[jax.Device]:
    """Devices of a chip, for which programs can be compiled and nothing can run.

    Raises:
        ValueError: one line: there is no such chip, or no compiler for it.
    """
    found = chip(name)
    if found.gpu:
        # Without a GPU nothing can be timed to choose the fastest kernels.
        flags = os.environ.get("XLA_FLAGS", "")
        if "xla_gpu_autotune_level" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()
        # Or jax looks for CUDA's libraries, which only a program that runs needs.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        more = {"target_config": found.gpu, "topology": found.topology}
        wanted = "a GPU's compiler"
        cure = f"jax-cuda13-plugin=={jax.__version__} nvidia-cuda-nvcc"
    else:
        given = {
            # Or libtpu asks a cloud's metadata server, or stays alone on a machine.
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": found.accelerator,
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
        for variable, value in given.items():
            os.environ.setdefault(variable, value)
        more = {"topology_name": found.topology}
        wanted, cure = "the TPU's compiler", "'fedjax_pfl[tpu]'"
    try:
        made = topologies.get_topology_desc(platform=found.platform, **more)
        if found.gpu:
            _compile_for(made.devices[0])
        return list(made.devices)
    except Exception as error:  # of several kinds, by what is missing
        needs = f"{wanted} ({options.reason(error)})"
        raise ValueError(
            f"--target={name} needs {needs}; pip install {cure}"
        ) from error
