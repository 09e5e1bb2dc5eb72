"""What runs on a GPU compiles for one: its compiler says so without a GPU.

These tests need jax's plugin for CUDA (`pip install jax-cuda13-plugin` of jax's own
version, from 0.11 on with `nvidia-cuda-nvcc`; no other CUDA library and no driver) and
are skipped without the plugin.
"""

import functools

import jax
import numpy as np
import pytest
from jax import export

import models
from fedjax_pfl import execution, shapes
from launch import build
from launch.machine import target
from launch.run import cost
from tests import targeted

pytest.importorskip("jax_cuda13_plugin")

compiled_for = functools.partial(targeted.experiment, "gpu:h100")


@pytest.mark.parametrize("name", ["cdkt", "dispfl", "fedd2s", "pfedsd", "uapdfl"])
def test_it_compiles(name, unequal):
    """No callback to a host, no float64, and a local step of some kernels."""
    made = compiled_for(name, unequal)
    text = made.simulation.lowered()["rounds"].as_text()
    assert "callback" not in text and "f64" not in text
    found = made.cost_analysis()
    assert found["fits"] and 5 < found["kernels_per_step"] < 200
    assert 0 < found["loops_of_unknown_turns"] <= found["loops"]
    line = cost.in_words({"algo": name} | found)
    assert line.startswith(f"{name} for gpu:h100: {found['kernels_per_step']} kernels")


@pytest.mark.parametrize("clients", [1, 5])
def test_strides_do_not_end_the_process(clients):
    """Products of every second value of a map are not fused with what chooses them."""
    where = jax.sharding.SingleDeviceSharding(target.devices("gpu:h100")[0])
    net, shape = models.make("resnet18", 10, 0.125), (28, 28, 1)

    def loss(variables, image):
        out, _ = net.forward(variables.params, variables.stats, image, train=True)
        return (out**2).sum()

    def step(*given):
        with execution.traced_in(execution.Setting("gpu", clients)):
            return jax.vmap(jax.grad(loss))(*given)

    def of_clients(leaf):
        return jax.ShapeDtypeStruct((clients, *leaf.shape), "float32", sharding=where)

    given = shapes.variables(net, shape), jax.ShapeDtypeStruct((4, *shape), "float32")
    made = jax.jit(step, out_shardings=where).lower(*jax.tree.map(of_clients, given))
    assert "fusion" in made.compile().as_text()


def test_a_program_of_a_file_does_not_end_the_process(tmp_path):
    """Traced on a CPU for all platforms at once."""
    x = np.zeros((40, 28, 28, 1), np.uint8)
    given = {"algo": "fedavg", "preset": "none", "dataset": (x, np.arange(40) % 4)}
    given |= {"num_clients": 2, "partition": "iid", "rounds": 1, "devices": 1}
    made = build.experiment(**given, model="resnet18", model_width=0.125)
    path = made.save_model(tmp_path / "one.stablehlo")
    program = export.deserialize(bytearray(path.read_bytes()))
    where = jax.sharding.SingleDeviceSharding(target.devices("gpu:h100")[0])
    image = jax.ShapeDtypeStruct((4, 28, 28, 1), "uint8", sharding=where)
    assert jax.jit(program.call, out_shardings=where).lower(image).compile()


def test_clients_side_by_side_are_one_launch(unequal):
    """A step of five clients has about as many kernels as that of one."""
    one, five = (
        compiled_for("fedavg", unequal, client_chunk=n).cost_analysis() for n in (1, 5)
    )
    assert five["kernels_per_step"] < 1.2 * one["kernels_per_step"]


def test_seeds_side_by_side_are_one_launch(unequal):
    """A step of two seeds, too: their round and its learning rate are one number."""
    one, two = (
        compiled_for("fedavg", unequal, num_seeds=n).cost_analysis() for n in (1, 2)
    )
    # jax 0.12's compiler adds biases in kernels of their own, behind two batch axes.
    most = 1.1 if jax.__version_info__ < (0, 12) else 1.5
    assert two["kernels_per_step"] < most * one["kernels_per_step"]


def test_as_many_as_there_are(unequal):
    """Launches dominate, so that clients of equal work train together."""
    made = compiled_for("fedavg", unequal, client_chunk=0, partition="iid")
    assert made.task.execution.chunk == made.config.clients_per_round
    assert made.config.clients_per_round > 1


def test_equal_clients_have_no_last_step_to_ask_for(blobs, unequal):
    """Local steps are a loop of known turns, and that over rounds is the only other."""
    equal = compiled_for("fedavg", blobs, partition="iid", local_epochs=2)
    assert equal.task.fixed_steps == (("local", 2),)
    others = compiled_for("fedavg", unequal, local_epochs=2)
    assert others.task.fixed_steps == ()
    found = [one.cost_analysis() for one in (equal, others)]
    assert [one["loops_of_unknown_turns"] for one in found] == [1, 2]


def test_several_gpus(unequal):
    """The clients are shared out, and means are taken over the GPUs."""
    made = compiled_for("fedavg", unequal, devices=2, client_chunk=3)
    text = made.simulation.lowered()["rounds"].compile().as_text()
    assert "all-reduce" in text


def test_an_older_gpu(unequal):
    assert compiled_for("local", unequal, target="gpu:a100").cost_analysis()["fits"]
