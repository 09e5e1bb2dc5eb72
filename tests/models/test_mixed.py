"""bfloat16 inside of layers, float32 around them."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import models
from fedjax_pfl import losses, shapes
from launch import build
from launch.models_out import client_model
from models import mixed, own, stages

BF16, F32 = jnp.bfloat16, jnp.float32


def dtypes_of(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree)}


class Own(nn.Module):
    """Custom layers that leave types to flax."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(3)(nn.relu(x).reshape(len(x), -1))


MODELS = {
    "cdkt_mnist": (models.make("cdkt_mnist", 3, 0.1), False),
    "vgg11": (models.make("vgg11", 3, 0.05), False),
    "depth_convnet": (models.make("depth_convnet", 3, 0.05), False),
    "own": (own.chain(Own()), True),
}


@pytest.mark.parametrize("name", MODELS)
def test_types(name):
    """Activations are bf16; parameters, gradients, statistics and outputs are f32."""
    model, is_own = MODELS[name]
    lowered = mixed.in_bfloat16(model, rounds=is_own)
    assert mixed.in_bfloat16(model, rounds=is_own) is lowered
    shape = (16, 16, 1)
    params, stats = shapes.variables(lowered, shape)
    inside = {}

    def watch(call, args, kwargs, context):
        out = call(*args, **kwargs)
        if context.method_name == "__call__":
            inside.setdefault(type(context.module), set()).update(dtypes_of(out))
        return out

    def loss_fn(params, stats, image):
        with nn.intercept_methods(watch):
            out, stats = lowered.forward(
                params, stats, image, train=True, key=jax.random.key(0)
            )
        out = out[-1] if model.has_exits else out
        assert out.dtype == F32
        label, mask = jnp.zeros(len(out), jnp.int32), jnp.ones(len(out), bool)
        return losses.cross_entropy(out, label, mask), stats

    image = jax.ShapeDtypeStruct((4, *shape), F32)
    grad = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, new), grads = jax.eval_shape(grad, params, stats, image)
    assert dtypes_of((params, loss, new, grads)) == {np.dtype(F32)}
    assert set().union(*inside.values()) == {np.dtype(BF16)}, inside


def test_statistics_are_those_of_float32():
    """Sums over a batch are not rounded on their way."""
    h = jnp.asarray(np.random.default_rng(0).normal(3, 1, (8, 4, 4, 2)), BF16)
    variables = stages.Norm().init(jax.random.key(0), h)

    def moved(h):
        return stages.Norm().apply(variables, h, train=True, mutable=["stats"])

    out, new = moved(h)
    wanted, expected = moved(h.astype(F32))
    assert out.dtype == BF16
    chex.assert_trees_all_equal(new, expected)
    chex.assert_trees_all_equal(out, wanted.astype(BF16))


def test_narrower_forms_have_it_too():
    model = mixed.in_bfloat16(models.make("mlp", 3)).at_width(0.5)
    params, stats = shapes.variables(model, (4,))
    text = jax.jit(model.forward).lower(params, stats, jnp.ones((2, 4))).as_text()
    assert "bf16" in text and dtypes_of(params) == {np.dtype(F32)}


def test_gradients_of_a_bias_are_sums_in_float32():
    """Of 4,096 equal terms, of which bf16 would lose most."""
    model = mixed.in_bfloat16(stages.chain("one", [("d", stages.Dense(1, False))]))
    params, stats = model.init(jax.random.key(0), jnp.ones((1, 2)))
    grads = jax.grad(lambda p: model.forward(p, stats, jnp.ones((4097, 2)))[0].sum())(
        params
    )
    assert grads[0]["trunk"]["bias"] == 4097


def test_programs_have_the_precision_of_their_run(blobs):
    """Whichever run was built last, as a comparison builds all of its rows first."""
    options = {"algo": "fedavg", "dataset": blobs, "preset": "none", "model": "mlp"}
    options |= {"num_clients": 4, "rounds": 1, "devices": 1}
    names = {"f32": "HIGHEST", "bf16_matmul": "DEFAULT"}
    made = {n: build.experiment(**options, precision=n) for n in names}
    for name, run in made.items():
        args = run.simulation._first_args("of_shared")
        text = run.program.of_shared.lower(*args).as_text()
        found = set(re.findall(r"precision = \[(\w+), \w+\]", text))
        assert found == {names[name]}


def test_what_a_method_serves_has_the_precision_of_its_run(blobs, monkeypatch):
    """As Per-FedAvg's adapted models, whichever run was built last."""
    options = {"algo": "perfedavg", "dataset": blobs, "model": "mlp", "rounds": 1}
    options |= {"num_clients": 4, "devices": 1}
    names = {"f32": "highest", "bf16_matmul": "bfloat16"}
    made = {n: build.experiment(**options, precision=n) for n in names}
    found, adapted = [], client_model._found

    def noted(*given):
        found.append(jax.config.jax_default_matmul_precision)
        return adapted(*given)

    monkeypatch.setattr(client_model, "_found", noted)
    for run in made.values():
        run.predict(0, run.data.image[:1])
    assert found == list(names.values())


@pytest.mark.parametrize("precision", ["bf16", "bf16_matmul"])
def test_a_run_learns_as_in_float32(precision, blobs):
    """The state is f32, and accuracies are close."""
    options = {"algo": "fedavg", "dataset": blobs, "model": "mlp", "rounds": 4}
    options |= {"num_clients": 4, "partition": "iid", "eval_every": 4}
    options["devices"] = 1
    found = {}
    for name in ("f32", precision):
        made = build.experiment(**options, precision=name)
        made.run(progress=False)
        kinds = dtypes_of(made.state.server)
        assert np.dtype(BF16) not in kinds
        found[name] = made.metrics[-1]
    accuracy = [one["global_accuracy"] for one in found.values()]
    assert accuracy[0] > 0.5 and abs(accuracy[0] - accuracy[1]) < 0.1
    assert found["f32"] != found["bf16"] if precision == "bf16" else True


def test_a_net_in_eval_mode_runs():
    """Of pooled features, whose layout makes a product that XLA's CPU lacks."""
    net = mixed.in_bfloat16(models.MODELS["convnet"](10, 0.0625))
    images = jnp.ones((10, 16, 16, 1))
    variables = net.init(jax.random.key(0), images)
    logits, _ = jax.jit(net.forward)(*variables, images)
    assert np.isfinite(logits).all() and logits.dtype == jnp.float32
