"""How client rows are computed: chunks, devices, and the placement of arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import layout, multihost_utils
from jax.sharding import PartitionSpec

from fedjax_pfl.rows import views

# Smaller arrays are copied for each device.
ALIGNED_BYTES = 1 << 16


class Execution(NamedTuple):
    """How client rows are computed, which never changes the results.

    Attributes:
        chunk: Rows that are vmapped together on one device; 1 = one by one.
        mesh: A mesh with the axis `clients`, or None for a single device.
        is_bucketed: Whether a chunk of clients with submodels computes only the largest
            of these. Otherwise it computes the whole model, masked.
        vmaps_runs: Whether seeds are one more vmapped axis, as suits accelerators.
            Otherwise each is a separate call.
        device: The single device where there is no mesh, None = the first.
        shares_rows: Whether a device of the mesh has the private rows of its own
            clients alone (see `rows.slots`), which may train on another one, to which
            their rows travel (see `rows.exchange`). Otherwise every device has all.
        one_core: Whether the single device has one core of a CPU alone.
    """

    chunk: int = 1
    mesh: jax.sharding.Mesh | None = None
    is_bucketed: bool = True
    vmaps_runs: bool = False
    device: jax.Device | None = None
    shares_rows: bool = False
    one_core: bool = False

    @property
    def num_devices(self) -> int:
        """The devices that share the clients of a round."""
        return self.mesh.size if self.mesh else 1

    @property
    def platform(self) -> str:
        """The kind of the devices: `cpu`, `gpu` or `tpu`."""
        one = self.mesh.devices.flat[0] if self.mesh else self.device
        return one.platform if one else jax.default_backend()


class Setting(NamedTuple):
    """The facts about the traced program that a layer may use.

    They may change how layers compute, never the results.

    Attributes:
        platform: The kind of the devices that will run the program, of a `target` too.
        models: Models of equal shapes that are computed side by side, in one vmapped
            axis or several: clients of a chunk, seeds, points of a sweep.
        form: The form of all convolutions, "" = by their shapes. With one, nothing that
            is traced depends on how many models there are, or on the platform of an
            `Execution`.
        one_core: Whether a device has one core of a CPU alone, as each of several has.
        owners: The devices that share out the private rows, None = each has all.
    """

    platform: str = "cpu"
    models: int = 1
    form: str = ""
    one_core: bool = False
    owners: jax.sharding.Mesh | None = None


# It is part of the keys of jax's caches, so that no trace is reused in another setting.
_SETTING = jax.make_user_context(None)


def setting() -> Setting:
    """The present setting: that of a program, or else one model on jax's platform."""
    return _SETTING.value or Setting(jax.default_backend())


def traced_in(inner: Setting) -> contextlib.AbstractContextManager:
    """A context in which `setting` returns `inner`."""
    return _SETTING(inner)


def side_by_side(how: Execution, count: int) -> contextlib.AbstractContextManager:
    """A context for tracing code that is vmapped `count` times on the devices of `how`.

    Inside another one the counts multiply. On a CPU it does nothing.
    """
    outer = setting()
    if how.platform == "cpu" or outer.form:
        return contextlib.nullcontext()
    return traced_in(outer._replace(platform=how.platform, models=count * outer.models))


def over_devices(how: Execution) -> contextlib.AbstractContextManager:
    """A context for tracing a program on the devices of `how`.

    Its state has private rows as `how` places them.
    """
    one_core = how.one_core or how.mesh is not None
    owners = how.mesh if how.shares_rows else None
    return traced_in(setting()._replace(one_core=one_core, owners=owners))


def padded_size(num_rows: int, execution: Execution) -> int:
    """The rows of a cohort once it fills whole chunks on every device."""
    devices = execution.num_devices
    per_device = -(-num_rows // devices)
    chunk = min(execution.chunk, per_device)
    return devices * chunk * -(-per_device // chunk)


def executed_steps(num_steps: np.ndarray, execution: Execution) -> np.ndarray:
    """Local steps int64[...] that cohorts compute: a chunk runs to its longest client.

    `num_steps` int[..., C] are those of rows in their order in the cohort.
    """
    num_steps = np.asarray(num_steps).astype(np.int64)
    chunk = min(execution.chunk, num_steps.shape[-1] // execution.num_devices)
    bounds = num_steps.reshape(*num_steps.shape[:-1], -1, chunk).max(-1)
    return bounds.sum(-1) * chunk


# Cycles of a local step by the number of clients side by side, for steps of three sizes
# in multiply-accumulates of a client's forward pass. A TPU v5e's compiler estimates
# them, for `mlp` on 16 numbers, `m1` and `fedavg_cnn` with batches of 20, in
# `python -m launch.bench.forms --form=rule`; docs/measured.md has the commands.
STEP_CYCLES = {
    225_480: {
        **{1: 26_422, 2: 30_875, 4: 32_397, 8: 35_306, 16: 41_399, 32: 55_995},
        **{64: 69_733, 100: 91_439, 128: 107_098, 256: 254_058, 512: 325_511},
    },
    11_019_080: {
        **{1: 324_849, 2: 497_331, 4: 845_306, 8: 1_519_964},
        **{32: 4_474_353, 100: 9_672_345, 128: 12_200_224},
    },
    86_712_520: {
        **{1: 464_458, 2: 844_692, 4: 1_584_490},
        **{8: 2_926_976, 32: 16_406_962},
    },
}


# A GPU launches a step's kernels one after another, as many for one client as for many,
# and then comes the arithmetic. On an H200 a step of C clients took about 100 + 35 C
# microseconds in the work w1 and 169 + 8.4 C in w3 (docs/measured.md). By these seconds
# and multiply-accumulates a second the ratios of the two are 2.4 and 19, and not 2.9
# and 20.
GPU_LAUNCHES, GPU_MACS = 125e-6, 5e12
GPU_WIDTHS = range(1, 513)


def step_costs(step_macs: float, is_gpu: bool = False) -> dict[int, float]:
    """The cost of a client's local step, by how many are computed at once.

    It holds for an accelerator, in units of which only ratios matter. A step of few
    multiply-accumulates costs hardly more for many clients than for one, and a large
    one fills the chip alone. Between two sizes of the table costs are interpolated, for
    the widths that both have, and beyond the sizes they are constant. Between widths
    they are not, since some widths in between cost several times as much.

    The table is a TPU's. On a GPU a step takes the time of its launches and of its
    arithmetic, which is thrice that of the forward pass.

    `step_macs` are the multiply-accumulates of a client's forward pass in this step.
    Returns clients side by side -> cost of each client.
    """
    if is_gpu:
        step = 3 * step_macs / GPU_MACS
        return {width: GPU_LAUNCHES / width + step for width in GPU_WIDTHS}
    size = min(max(step_macs, min(STEP_CYCLES)), max(STEP_CYCLES))
    below = max(known for known in STEP_CYCLES if known <= size)
    above = min(known for known in STEP_CYCLES if known >= size)

    def between(width: int) -> float:
        cycles = [STEP_CYCLES[known][width] / width for known in (below, above)]
        at = np.interp(np.log(size), np.log([below, above]), np.log(cycles))
        return float(np.exp(at))

    shared = [width for width in STEP_CYCLES[below] if width in STEP_CYCLES[above]]
    return {width: between(width) for width in shared}


def is_priced(width: int, step_macs: float, known: Collection[int]) -> bool:
    """Whether a chunk of `width` clients costs about as much as the next known one.

    `known` are the widths of `step_costs`. A TPU's compiler has odd widths: a step of
    25 clients of `m1` costs 2.5 times one of 32. It has none close below a known one,
    and a tiny dense net is taken to have none.
    """
    wider = min((w for w in known if w >= width), default=0)
    is_tiny = step_macs <= min(STEP_CYCLES)
    return bool(wider) and (is_tiny or width >= 0.95 * wider)


def read_soon(tree: Any) -> None:
    """Starts to copy arrays to the host as soon as they are computed."""
    for leaf in jax.tree.leaves(tree):
        leaf.copy_to_host_async()


def place(tree: Any, where: jax.sharding.Sharding | layout.Format) -> Any:
    """Arrays of the host, equal in all processes, as arrays on their devices.

    For devices that only a compiler has, which hold no arrays, it returns shapes.
    """
    sharding = where.sharding if isinstance(where, layout.Format) else where
    devices = sharding.device_set
    if not devices <= set(jax.devices()):
        return placed_shapes(tree, where)
    if jax.process_count() == 1:
        return jax.device_put(tree, where)

    # Not device_put, which would first compare every byte between the processes.
    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == devices:
            return leaf
        is_key = views.is_key(leaf)
        host = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        out = jax.make_array_from_callback(host.shape, where, lambda at: host[at])
        return jax.random.wrap_key_data(out) if is_key else out

    return jax.tree.map(one, tree)


def place_tables(tree: Any, how: Execution) -> Any:
    """Arrays of the host that programs only read, on all devices.

    The devices of a CPU read one array in the host's memory, and others have copies.
    """
    if how.num_devices > 1 and how.platform == "cpu" and jax.process_count() == 1:
        tree = jax.tree.map(_aligned, tree)
    return place(tree, replicated(how))


def _aligned(leaf: Any) -> Any:
    """An array where XLA reads it without a copy: at a multiple of 64 bytes."""
    if not isinstance(leaf, np.ndarray) or leaf.nbytes < ALIGNED_BYTES:
        return leaf
    room = np.empty(leaf.nbytes + 64, np.uint8)
    begin = -room.ctypes.data % 64
    out = room[begin : begin + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    out[...] = leaf
    return out


def placed_shapes(tree: Any, where: jax.sharding.Sharding | layout.Format) -> Any:
    """The shapes of arrays as they are on their devices, to compile for them."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree
    )


def wait_for_all(what: str) -> None:
    """Waits until all processes are here, however long that takes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def agreed(seconds: float) -> float:
    """The first process's `seconds`, in all processes."""
    if jax.process_count() == 1:
        return seconds
    return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))


def replicated(execution: Execution) -> jax.sharding.Sharding:
    """The sharding of tables and states: on every device of the mesh, or the one."""
    if execution.mesh is None:
        device = execution.device or jax.devices()[0]
        return jax.sharding.SingleDeviceSharding(device)
    return jax.sharding.NamedSharding(execution.mesh, PartitionSpec())


def by_device(execution: Execution) -> jax.sharding.Sharding:
    """The sharding of leaves [seeds, devices, ...]: each device has its own part."""
    if execution.mesh is None:
        return replicated(execution)
    return jax.sharding.NamedSharding(execution.mesh, PartitionSpec(None, "clients"))
