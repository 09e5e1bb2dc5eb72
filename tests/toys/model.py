"""A three-stage model with exits and running statistics, and a narrow one."""

import functools

import jax.numpy as jnp
from flax import linen as nn

from models import stages


class RunningNorm(nn.Module):
    """Dense layer whose input is centred by a running mean over real samples."""

    features: int

    @nn.compact
    def __call__(self, h, *, sample_mask=None, train=False):
        h = h.reshape(h.shape[0], -1)
        mean = self.variable("stats", "mean", jnp.zeros, h.shape[-1])
        if train:
            column = sample_mask[:, None]
            count = jnp.maximum(sample_mask.sum(), 1)
            batch = jnp.where(column, h, 0).sum(0) / count
            # Fewer than two samples say nothing: the old statistics stay.
            mixed = 0.9 * mean.value + 0.1 * batch
            mean.value = jnp.where(sample_mask.sum() >= 2, mixed, mean.value)
        return nn.relu(nn.Dense(self.features)(h - mean.value))


def with_exits(num_classes, width=1.0, count=3):
    """Stages of running norm and dense, an exit after each."""
    hidden = stages.scaling(width)(12)
    trunks = [(f"s{i}", RunningNorm(hidden)) for i in range(count)]
    exits = {f"s{i}": stages.Dense(num_classes, relu=False) for i in range(count)}
    return stages.chain("with_exits", trunks, exits)


def narrow(num_classes, width=1.0, rate=1.0, scaler=1.0):
    """Another architecture for the same examples, 10 wide; it has widths as `mlp`."""
    hidden = ("hidden", stages.Dense(stages.scaling(width, rate)(10)))
    last = ("last", stages.Dense(num_classes, relu=False))
    at_width = stages.widths(functools.partial(narrow, num_classes, width), rate)
    return stages.chain("narrow", [hidden, last], at_width=at_width)


def normed(num_classes, width=1.0):
    """A layer with batch norm, and one without."""
    hidden = stages.Dense(stages.scaling(width)(10), relu=False)
    layers = stages.Sequential([hidden, stages.Norm()])
    last = stages.Dense(num_classes, False)
    return stages.chain("normed", [("hidden", layers), ("last", last)])
