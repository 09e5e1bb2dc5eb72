"""Whole chunks on every device."""

import types as python_types

import jax
import jax.numpy as jnp
import pytest

from fedjax_pfl import execution
from tests.fedjax_pfl import small


@pytest.mark.parametrize(
    ("num_rows", "chunk", "devices", "size"),
    [
        (10, 4, 1, 12),
        (10, 5, 1, 10),
        (10, 16, 1, 10),
        (10, 1, 4, 12),
        (9, 2, 4, 16),
        (1, 4, 4, 4),
    ],
)
def test_padded_size(num_rows, chunk, devices, size):
    """A cohort fills whole chunks on every device; a chunk is no larger than needed."""
    mesh = small.mesh_of(devices) if devices > 1 else None
    how = execution.Execution(chunk, mesh)
    assert execution.padded_size(num_rows, how) == size
    assert execution.padded_size(size, how) == size


@pytest.mark.parametrize("devices", [1, 2])
def test_replicated(devices):
    """Tables and states live whole on every device of the mesh."""
    mesh = small.mesh_of(devices) if devices > 1 else None
    where = execution.replicated(execution.Execution(1, mesh))
    placed = jax.device_put(jnp.arange(4), where)
    assert len(placed.addressable_shards) == devices
    assert all(shard.data.shape == (4,) for shard in placed.addressable_shards)


def on(platform, **more):
    """An execution on a device of a platform, which may be none of this machine's."""
    device = python_types.SimpleNamespace(platform=platform)
    return execution.Execution(device=device, **more)


def test_the_setting_of_a_program():
    """Counts of nested axes multiply, and nothing of a setting stays."""
    assert execution.setting() == execution.Setting("cpu", 1)
    with execution.side_by_side(on("tpu"), 2):
        with execution.side_by_side(on("tpu"), 3):
            assert execution.setting() == execution.Setting("tpu", 6)
        assert execution.setting() == execution.Setting("tpu", 2)
    with execution.side_by_side(on("cpu"), 4):
        assert execution.setting() == execution.Setting("cpu", 1)


@pytest.mark.parametrize(
    ("devices", "given", "found"),
    [(1, False, False), (1, True, True), (2, False, True)],
)
def test_devices_that_have_one_core(devices, given, found):
    """Each of several has a core of its own."""
    mesh = small.mesh_of(devices) if devices > 1 else None
    with execution.over_devices(execution.Execution(mesh=mesh, one_core=given)):
        assert execution.setting() == execution.Setting("cpu", one_core=found)


def test_what_is_traced_in_a_setting_serves_there_alone():
    """It belongs to the keys of jax's caches."""
    traced = jax.jit(lambda: jnp.int32(execution.setting().models))
    assert traced() == 1
    with execution.side_by_side(on("tpu"), 5):
        assert traced() == 5
    assert traced() == 1
