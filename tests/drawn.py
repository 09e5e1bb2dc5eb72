"""First parameters in one draw.

A draw for each layer is most of what `init` compiles, for each of some hundred runs.
How layers really begin is tested in tests/models, where models are as they are.
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import models
from models import own_stage, stages

CHAIN = stages.chain


def at_once(init):
    """The same shapes from one row of numbers, which kernels share."""

    def drawn(key, x):
        like = jax.eval_shape(init, key, x)
        leaves, structure = jax.tree_util.tree_flatten_with_path(like)
        sizes = [leaf.size if leaf.ndim > 1 else 0 for _, leaf in leaves]
        row = jax.random.uniform(key, (sum(sizes),), minval=-1.7, maxval=1.7)
        parts = jnp.split(row, np.cumsum(sizes)[:-1])
        made = [_leaf(*one, part) for one, part in zip(leaves, parts, strict=True)]
        return jax.tree.unflatten(structure, made)

    return drawn


def _leaf(path, like, numbers):
    """A kernel with the variance of LeCun's; scales and variances are 1, others 0."""
    if like.ndim > 1:
        kernel = numbers / math.sqrt(math.prod(like.shape[:-1]))
        return kernel.reshape(like.shape).astype(like.dtype)
    return jnp.full(like.shape, path[-1].key in ("scale", "var"), like.dtype)


@functools.wraps(CHAIN)
def _chain(name, trunks, *args, **options):
    """`stages.chain`, whose models begin with one draw unless they are a user's."""
    made = CHAIN(name, trunks, *args, **options)
    if any(isinstance(module, own_stage.Stage) for _, module in trunks):
        return made
    return made._replace(init=at_once(made.init))


def use():
    """From now on models that tests make begin so."""
    stages.chain = _chain
    models._made.cache_clear()


@contextlib.contextmanager
def layer_by_layer():
    """Models begin as they do in a run."""
    stages.chain = CHAIN
    models._made.cache_clear()
    yield
    use()
