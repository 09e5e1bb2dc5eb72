"""Sizes of models without computing anything."""

import jax
import numpy as np
import pytest

import models
from fedjax_pfl import shapes, types
from models import stages

DENSE = stages.chain(
    "dense",
    [
        ("conv", stages.Conv(5, 3)),
        ("hidden", stages.Dense(6)),
        ("last", stages.Dense(4, False)),
    ],
    exits={"hidden": stages.Dense(4, False)},
)
SHAPE = (6, 6, 2)


def test_tree_bytes():
    """Elements times their size, of arrays and of shapes."""
    tree = {"a": np.zeros((3, 4), np.float32), "b": [np.zeros(5, np.uint8)], "c": ()}
    assert shapes.tree_bytes(tree) == 53
    assert shapes.tree_bytes(jax.ShapeDtypeStruct((2, 3), np.float16)) == 12


def test_variables_are_those_of_init():
    """Structure, shapes and types."""
    found = shapes.variables(DENSE, SHAPE)
    made = types.Variables(*DENSE.init(jax.random.key(0), np.zeros((1, *SHAPE))))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), made)
    assert found == like


def test_bytes_of_models_and_stages():
    """By hand: kernels and biases of f32; a stage has its exit too."""
    conv, hidden, last = 3 * 3 * 2 * 5 + 5, 45 * 6 + 6 + 6 * 4 + 4, 6 * 4 + 4
    sizes = shapes.stage_bytes(DENSE, SHAPE)
    assert sizes == (4 * conv, 4 * hidden, 4 * last)
    assert shapes.model_bytes(DENSE, SHAPE) == sum(sizes)


def test_bytes_of_statistics_travel_too():
    """A message holds both."""
    model = types.Model(
        "counting", ("a",), lambda key, x: (({"w": x},), ({"n": x[0, :2]},)), None
    )
    assert shapes.stage_bytes(model, (7,)) == (4 * 7 + 4 * 2,)
    assert shapes.model_bytes(model, (7,)) == 36


def test_bytes_of_outputs():
    """Each stage's output for one example: half the side after the pool."""
    model = models.MODELS["fedavg_cnn"](10)
    sizes = shapes.output_bytes(model, (28, 28, 1))
    assert sizes == tuple(4 * n for n in (12 * 12 * 32, 4 * 4 * 64, 512, 10))


@pytest.mark.parametrize(
    ("name", "shape", "width"),
    [
        ("cdkt_mnist", (28, 28, 1), 512),
        ("cdkt_mnist_small", (28, 28, 1), 512),
        ("cdkt_cifar", (32, 32, 3), 64),
        ("cdkt_cifar_small", (32, 32, 3), 64),
    ],
)
def test_embedding_width(name, shape, width):
    """Section 2: d is 512 or 64, the same for both architectures of a data set."""
    assert shapes.embedding_width(models.MODELS[name](10), shape) == width


def test_nothing_is_computed():
    """A layer of four terabytes has a size like any other."""
    model = stages.chain("huge", [("only", stages.Dense(10**6, False))])
    assert shapes.model_bytes(model, (10**6,)) == 4 * (10**12 + 10**6)
