"""The cores of a CPU are devices, unless XLA_FLAGS says how many there are."""

import json
import os
import subprocess
import sys

import pytest

from launch import build
from launch.machine import devices

SCRIPT = """
import json, sys
import numpy as np
from launch import build
given = json.loads(sys.argv[1])
gen = np.random.default_rng(0)
x, y = gen.normal(size=(96, 300)).astype("f4"), np.arange(96) % 3
made = build.experiment(
    algo="fedper", preset="none", dataset=(x, y), partition="iid",
    num_clients=8, rounds=2, **({"clients_per_round": 4, "model": "mlp"} | given),
)
made.run(progress=False)
import jax
norms = [float(np.linalg.norm(one)) for one in jax.tree.leaves(made.state.server)]
how, leaf = made.task.execution, made.data.image
copies = {one.data.unsafe_buffer_pointer() for one in leaf.addressable_shards}
print(json.dumps([how.num_devices, norms, how.shares_rows, len(copies)]))
"""


def ran(flags="", **given):
    """What a run in a process of its own prints.

    The number of devices, norms of parameters, whether private rows are shared out, and
    the number of copies of the images.
    """
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(given)]
    done = subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("cores", "one"), [(1, True), (2, False)])
def test_a_device_knows_whether_it_has_one_core(blobs, monkeypatch, cores, one):
    monkeypatch.setattr(devices, "usable_cores", lambda: cores)
    made = build.experiment(
        algo="local", preset="none", dataset=blobs, num_clients=2, devices=1
    )
    assert made.task.execution.one_core == one


@pytest.mark.slow
def test_cores_are_devices():
    """By default all take part, at most as many as a round has clients."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("needs two cores")
    one, every = ran(devices=1), ran()
    assert (one[0], every[0]) == (1, min(cores, 4))
    assert one[1] == pytest.approx(every[1], rel=1e-5)
    # Any core may train any client, and all read the same images.
    assert every[2:] == [False, 1]
    assert ran(clients_per_round=1)[0] == ran(emulate="accelerator")[0] == 1
    # A tiny model
    assert ran(model="mlp", model_width=0.01)[0] == 1
    with pytest.raises(AssertionError, match=f"--devices=99: {cores} present"):
        ran(devices=99)


@pytest.mark.slow
def test_flags_of_xla_decide():
    """All devices that they make take part, as on an accelerator."""
    found = ran("--xla_force_host_platform_device_count=3")
    assert (found[0], found[2]) == (3, True)
