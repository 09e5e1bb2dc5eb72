"""A teacher for algorithms that need one: an mlp of random numbers in a file."""

import pathlib

import jax
import numpy as np

import models
from fedjax_pfl import shapes, types
from launch.assemble import model_files
from launch.config import registry


def options(name, dataset):
    """The teacher of an algorithm on `unequal` images or blobs, {} if it needs none."""
    if "teacher" not in registry.fields_of(name):
        return {}
    path = pathlib.Path(dataset.removeprefix("npz:")).with_suffix(".msgpack")
    if not path.exists():
        write(path)
    return {"teacher": str(path)}


def write(path, name="mlp", shape=(8, 8, 1), num_classes=4, width=1.0, level=0):
    """Writes a model of random numbers; returns it and its variables."""
    model, gen = models.make(name, num_classes, width, level), np.random.default_rng(0)
    params, stats = jax.tree.map(
        lambda leaf: gen.normal(size=leaf.shape).astype(leaf.dtype) / 4,
        shapes.variables(model, shape),
    )
    variables = types.Variables(params, jax.tree.map(abs, stats))
    model_files.write(path, model, variables, {}, width)
    return model, variables
