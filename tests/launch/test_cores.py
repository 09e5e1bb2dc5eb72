"""The cores of a CPU are devices where nobody decided how many it has."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import numpy as np
from launch import build
given = json.loads(sys.argv[1])
gen = np.random.default_rng(0)
x, y = gen.normal(size=(96, 6)).astype("f4"), np.arange(96) % 3
made = build.experiment(
    algo="fedper", preset="none", model="mlp", dataset=(x, y), partition="iid",
    num_clients=8, clients_per_round=4, rounds=2, **given,
)
made.run(progress=False)
import jax
norms = [float(np.linalg.norm(one)) for one in jax.tree.leaves(made.state.server)]
print(json.dumps([made.summary()["num_devices"], norms]))
"""


def ran(flags="", **given):
    """(the number of devices, norms of parameters) of a run in a process of its own."""
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


@pytest.mark.slow
def test_cores_are_devices():
    """By default one device has all cores, and with --devices=2 two have one each."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("needs two cores")
    one, two = ran(), ran(devices=2)
    assert (one[0], two[0]) == (1, 2)
    assert one[1] == pytest.approx(two[1], rel=1e-5)
    with pytest.raises(AssertionError, match=f"--devices=99: {cores} present"):
        ran(devices=99)


@pytest.mark.slow
def test_flags_of_xla_decide():
    """All devices that they make take part, as on an accelerator."""
    assert ran("--xla_force_host_platform_device_count=3")[0] == 3
