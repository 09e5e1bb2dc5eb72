"""Limits: values of every kind, and estimates of memory against numbers by hand."""

import types

import jax
import numpy as np
import pytest

from fedjax_pfl.types import Execution, RoundState
from launch import build
from launch.config import limits
from launch.machine import memory

GIB = 2**30


@pytest.mark.parametrize(
    "value, kind, expected",
    [
        (3, int, 3),
        (np.int64(3), int, 3),
        (2**31 - 1, int, 2**31 - 1),
        (-1, int, -1),
        (3, float, 3.0),
        (np.float32(0.5), float, 0.5),
        (True, bool, True),
        ("naïve, 中文 и ещё", str, "naïve, 中文 и ещё"),
        (3, str, "3"),
        (np.float64(0.1), str, "0.1"),
        (None, int, None),
    ],
)
def test_values_that_fit(value, kind, expected):
    """Plain values of the flag's type; an int will do for a float."""
    got = limits.checked("rounds", value, kind)
    assert got == expected and type(got) in (kind, type(None))


def test_seeds_are_unsigned():
    """The last seed is 2**32 - 1; counts end at 2**31 - 1."""
    assert limits.checked("seed", 2**32 - 1, int) == 2**32 - 1
    with pytest.raises(ValueError, match="at most 4294967295"):
        limits.checked("partition_seed", 2**32, int)


@pytest.mark.parametrize(
    "value, kind, reason",
    [
        (10**20, int, "--x=100000000000000000000: expected at most 2147483647"),
        (2**31, int, "--x=2147483648: expected at most 2147483647"),
        (-(10**20), int, "expected at least -2147483647"),
        (10**5000, int, "--x=10..5000: expected at most"),
        (10**5000, float, "--x=10..5000: expected at most 3.402823466e.38"),
        (1e39, float, "--x=1e.39: expected at most 3.402823466e.38"),
        (2.0, int, "--x=2.0: expected int"),
        (True, int, "--x=True: expected int"),
        (1, bool, "--x=1: expected bool"),
        ("3", int, "--x='3': expected int"),
        (10**5000, str, "--x=10..5000: expected str"),
        (True, str, "--x=True: expected str"),
        (np.zeros((5000, 28, 28)), str, "--x=<ndarray .5000, 28, 28.>: expected str"),
        (np.zeros(3), float, "--x=<ndarray .3.>: expected float"),
        (list(range(10**5)), int, "--x=<list>: expected int"),
        (b"x" * 10**6, str, "--x=b'x.*: expected str"),
        ("x" * 10**6, int, "--x='x.*: expected int"),
        ("x" * 10**6, str, "has 1000000 characters, at most 4096"),
        ("a\nb", str, r"--x='a\\nb' holds '\\n'"),
        ("a\r--seed=7", str, r"holds '\\r'"),
        ("a\0b", str, r"holds '\\x00'"),
        ("a\x85b", str, r"holds '\\x85'"),
        ("a\u2028b", str, r"holds '\\u2028'"),
        ("caf\udce9", str, r"holds '\\udce9'"),
        (" a", str, "begins or ends with a space"),
    ],
    # Ten to the 5000 has no text that Python would write.
    ids=lambda value: type(value).__name__,
)
def test_values_that_do_not_fit(value, kind, reason):
    """One line of at most 150 characters, whatever came."""
    with pytest.raises(ValueError, match=reason) as error:
        limits.checked("x", value, kind)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 150


@pytest.mark.parametrize(
    "name, value, kind, place",
    [
        (
            "partition",
            [[0, 1], [2]],
            str,
            r"dataset={client: \(x\[rows\], y\[rows\]\)}$",
        ),
        (
            "client_lr",
            lambda step: 0.1 / step,
            float,
            "client_optimizer=, several rates in sweep=",
        ),
        ("init_from", {"dense1": np.zeros(3)}, str, "docs/howto.md writes such a file"),
    ],
)
def test_objects_have_another_place(name, value, kind, place):
    """Where rows, schedules and parameters are taken is said; a typo has no place."""
    with pytest.raises(ValueError, match=f"expected {kind.__name__}; .*{place}"):
        limits.checked(name, value, kind)
    with pytest.raises(ValueError, match=f"expected {kind.__name__}$"):
        limits.checked(name, "a" if kind is float else b"a", kind)


@pytest.mark.parametrize(
    "option",
    [
        {"dataset": np.zeros((300, 300))},
        {"rounds": 10**20},
        {"workdir": "a\n--seed=1"},
    ],
)
def test_experiment_names_a_wrong_value_shortly(option):
    """The Python entry checks as the command line does."""
    (name,) = option
    with pytest.raises(ValueError) as error:
        build.experiment(algo="fedavg", **option)
    line = str(error.value)
    assert line.startswith((f"--{name}=", f"{name}: expected "))
    assert "\n" not in line and len(line) < 120


NUMBERS = {
    "num_seeds": 1,
    "num_clients": 100,
    "clients_per_round": 10,
    "rounds": 20,
    "eval_every": 5,
    "client_chunk": 0,
    "model_width": 1.0,
    "examples_per_client": 0,
    "proxy_fraction": 0.0,
    "batch_size": 20,
    "local_epochs": 2,
    "server_epochs": 3,
}


def needs(**changed):
    """Words -> bytes, for 60,000 examples and a model of 8,000 bytes."""
    found = memory.needs(NUMBERS | changed, num_rows=60_000, model_bytes=8_000)
    return {one.what: one.bytes for one in found[:-2]} | {
        "local batches": found[-2].bytes,
        "server batches": found[-1].bytes,
    }


def test_estimates_by_hand():
    """Each term, computed in one's head."""
    assert needs(num_seeds=3, client_chunk=99) == {
        "the models of all seeds": 3 * 8_000,
        "the models of the clients that train together": 3 * 10 * 8_000,
        "the partitions of all seeds": 3 * (12 * 60_000 + 250 * 100),
        # Half of 600 examples a client, in batches of any size
        "local batches": 10 * 2 * 300 * 4,
        "server batches": 3 * 4,
    }
    # 40 examples a client, half of which are 20, none of them in the proxy set.
    few = needs(examples_per_client=40, batch_size=10**9)
    assert few["local batches"] == 10 * 2 * 20 * 4
    assert needs(examples_per_round=7)["local batches"] == 10 * 2 * 7 * 4
    assert few["the partitions of all seeds"] == 12 * 4000 + 250 * 100
    assert needs(proxy_fraction=0.5)["local batches"] == 10 * 2 * 150 * 4


@pytest.fixture
def free(monkeypatch):
    """A function that says how many bytes are free, on the devices and the host."""

    def given(on_device, on_host):
        monkeypatch.setattr(memory, "free_bytes", lambda: (on_device, on_host))

    return given


@pytest.mark.parametrize(
    "changed, flag",
    [
        ({"local_epochs": 10**9}, "local_epochs"),
        ({"server_epochs": 10**11}, "server_epochs"),
        ({"num_seeds": 10**6}, "num_seeds"),
        ({"num_clients": 10**9, "clients_per_round": 10}, "num_clients"),
        ({"num_clients": 10**9, "clients_per_round": 10**9}, "num_clients"),
    ],
)
def test_the_flag_that_dominates_is_named(free, changed, flag):
    """On a machine of 16 GiB; without the change the same run is let through."""
    for on_device in (None, 16 * GIB):
        free(on_device, 16 * GIB)
        sizes = {"num_rows": 60_000, "model_bytes": 80_000}
        memory.refuse(memory.needs(NUMBERS, **sizes), NUMBERS)
        options = NUMBERS | changed
        with pytest.raises(ValueError, match=f"^--{flag}={options[flag]} .*16.0 GiB"):
            memory.refuse(memory.needs(options, **sizes), options)


@pytest.mark.parametrize("width, flag", [(1.0, "model=m"), (100.0, "model_width=100")])
def test_a_model_that_is_too_large(free, width, flag):
    """The model is named, or its width where that made it large."""
    free(None, 16 * GIB)
    options = NUMBERS | {"model": "m", "model_width": width}
    needed = memory.needs(options, num_rows=600, model_bytes=8 * GIB)
    with pytest.raises(ValueError, match=f"^--{flag}.* needs 32.0 GiB .*16.0 GiB"):
        memory.refuse(needed, options)


def test_memory_of_a_device_and_of_the_host_are_apart(free):
    """What lies on the host may be larger than a device, and the other way round."""
    on_device = memory.Need("models", 5 * GIB, {"num_seeds": 2}, True)
    on_host = memory.Need("partitions", 5 * GIB, {"num_clients": 7})
    options = {"num_seeds": 2, "num_clients": 7}
    both = [on_device, on_host]
    for fits in ((6 * GIB, 6 * GIB), (None, None)):
        free(*fits)
        memory.refuse(both, options)
    for given, line in (
        ((None, 6 * GIB), "--num_seeds=2 needs 10.0 GiB"),
        ((4 * GIB, 6 * GIB), "--num_seeds=2 needs 5.0 GiB.*4.0 GiB"),
        ((6 * GIB, 4 * GIB), "--num_clients=7.*partitions.*lower it"),
    ):
        free(*given)
        with pytest.raises(ValueError, match=line):
            memory.refuse(both, options)


def test_large_populations_of_small_models_are_let_through(free):
    """A million clients of 16 floats, of which FedAvg keeps nothing: under 4 GB."""
    free(None, 4 * 10**9)
    options = NUMBERS | {"num_clients": 10**6, "clients_per_round": 100}
    needed = memory.needs(options, num_rows=10**7, model_bytes=4 * 11_000)
    memory.refuse(needed, options)


@pytest.mark.parametrize("platform, parts", [("cpu", 1), ("tpu", 4)])
def test_state_that_clients_keep(platform, parts, monkeypatch):
    """Shapes alone: 10,000 clients of 10 MB each, and a key.

    Devices that share them out have a part, but those of a CPU share its memory.
    """
    options = {"num_seeds": 1, "num_clients": 10_000}
    rows = jax.ShapeDtypeStruct((1, 10_000, 2_500_000), np.float32)
    key, count = jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((), np.int32)
    state = RoundState((), rows, key, count)
    monkeypatch.setattr(Execution, "platform", platform)
    monkeypatch.setattr(Execution, "num_devices", 4)
    found = memory.kept(options, state, Execution(shares_rows=True))
    assert 0 <= found.bytes - 10_000 * 10**7 // parts < 100
    assert found.factors == options and found.on_device


def test_free_memory_of_devices(monkeypatch):
    """The sum of what devices report; a CPU reports nothing and shares the host's."""

    def devices(*stats):
        made = [types.SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]
        monkeypatch.setattr(jax, "local_devices", lambda: made)
        return memory.free_bytes()[0]

    card = {"bytes_limit": 10 * GIB, "bytes_in_use": GIB}
    assert devices(card, {"bytes_limit": 5 * GIB}) == 14 * GIB
    assert devices(None) is None
