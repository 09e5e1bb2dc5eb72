"""Work that the devices of a mesh share out equals that of one device."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import execution, over_devices
from tests.fedjax_pfl import small


def how(count):
    return execution.Execution(mesh=small.mesh_of(count) if count > 1 else None)


@pytest.mark.parametrize("count", [None, 0, 2, 7])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_batches_in_turn(devices, count):
    """Those after the count are 0."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(7, 2)), jnp.float32)

    @jax.jit
    def found(count):
        def one(index):
            return table[index], 2 * index

        return over_devices.batches(one, len(table), how(devices), count)

    rows, numbers = found(None if count is None else jnp.int32(count))
    kept = np.arange(7) < (7 if count is None else count)
    np.testing.assert_array_equal(rows, np.where(kept[:, None], table, 0))
    np.testing.assert_array_equal(numbers, np.where(kept, 2 * np.arange(7), 0))


def test_batches_of_one_device_have_a_gradient():
    def total(x):
        return over_devices.batches(lambda i: x * i, 4, how(1)).sum()

    assert jax.grad(total)(1.0) == 6


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_once_returns_what_the_function_does(devices):
    """Floats, integers, bools and keys, each of its own type."""
    start = {
        "float": jnp.array([1.5, -0.25]),
        "int": jnp.int32(-3),
        "bool": jnp.array([True, False]),
        "key": jax.random.key(3),
    }

    def fn(given):
        return {
            "float": given["float"] * 2,
            "int": given["int"] + 1,
            "bool": ~given["bool"],
            "key": jax.random.fold_in(given["key"], 1),
        }

    found = jax.jit(lambda x: over_devices.once(fn, how(devices), x))(start)
    expected = fn(start)
    key, other = found.pop("key"), expected.pop("key")
    assert jax.random.key_data(key).tolist() == jax.random.key_data(other).tolist()
    chex.assert_trees_all_equal(found, expected)
    chex.assert_trees_all_equal_dtypes(found, expected)


def test_rows_with_an_array_without_elements():
    """It comes to a loop of the clients, and not as an argument of it to XLA."""

    def on_device(mine, shared, local):
        def step(_, carry):
            return jax.jit(lambda x, none: x + len(none) + 1)(carry, shared["none"])

        return jax.lax.fori_loop(0, mine.sum(), step, mine)

    over = over_devices.rows(on_device, how(2), is_summed=False)

    @jax.jit
    def found(none):
        return over(jnp.arange(1, 5), {"none": none}, jnp.zeros(2))

    np.testing.assert_array_equal(found(jnp.zeros(0, int)), [4, 5, 10, 11])
