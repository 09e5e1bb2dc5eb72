"""Prototypes: the mean representation of each class, and models that answer by them.

The representation of an example is the input of a model's last stage.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl import boundary, each_client, local_training, proxy, types


class Prototypes(NamedTuple):
    """One representation `mean` f32[Y, D] for each class that `is_known` bool[Y]."""

    mean: jax.Array
    is_known: jax.Array

    @classmethod
    def none(cls, num_classes: int, width: int) -> Prototypes:
        """No class is known."""
        return cls(jnp.zeros((num_classes, width)), jnp.zeros(num_classes, bool))

    def after(self, total: jax.Array, weight: jax.Array) -> Prototypes:
        """Those of weighted sums f32[Y, D] and weights f32[Y]; 0 = keeps the old."""
        is_new = weight > 0
        mean = total / jnp.where(is_new, weight, 1)[:, None]
        mean = jnp.where(is_new[:, None], mean, self.mean)
        return Prototypes(mean, self.is_known | is_new)


def means(
    h: jax.Array, label: jax.Array, mask: jax.Array, num_classes: int
) -> tuple[jax.Array, jax.Array]:
    """(means f32[Y, D] of representations f32[B, D] by class, rows f32[Y] of each).

    `label` is int32[B], and `mask` bool[B] has the real rows. A class without rows has
    0.

    Examples:
        >>> h, label = jnp.array([[1.0], [3.0], [9.0]]), jnp.array([1, 1, 0])
        >>> mean, rows = means(h, label, jnp.array([True, True, False]), 2)
        >>> mean.tolist(), rows.tolist()
        ([[0.0], [2.0]], [0.0, 2.0])
    """
    total, rows = _sums(h, label, mask, num_classes)
    return total / jnp.maximum(rows, 1)[:, None], rows


def of_client(
    client: each_client.Client,
    variables: types.Variables,
    num_classes: int,
    batch_size: int,
) -> tuple[jax.Array, jax.Array]:
    """`means` of a model on all train rows of a client, in eval mode.

    They need no step. A client without rows has none, and a chunk of padding none
    either, so that it costs nothing.
    """

    def sums(batch: local_training.Batch) -> tuple[jax.Array, jax.Array]:
        own = client.model, variables
        _, h, _ = proxy.logits_and_embedding(*own, batch.image)
        return _sums(h, batch.label, batch.mask, num_classes)

    nobody = client.data.partition.train.count.shape[0]
    asked = jnp.where(client.is_here, client.id, nobody)
    given = client.data, asked, batch_size, client.stream("prototypes")
    total, rows = local_training.sum_over_rows(sums, *given)
    return total / jnp.maximum(rows, 1)[:, None], rows


def nearest(model: types.Model) -> types.Model:
    """The model with `Prototypes` as the parameters of its last stage.

    Its logits are minus the squared L2 distances. A class that is not known is farther
    than all others. Raises ValueError for a model of one stage.
    """
    boundary.check_several(model)
    last = len(model.stage_names) - 1

    def forward(params, stats, h, *, start=0, stop=None, **mode):
        stop = last + 1 if stop is None else stop
        if start < last:
            ends = {"start": start, "stop": min(stop, last)}
            h, stats = model.forward(params, stats, h, **ends, **mode)
        if stop <= last:
            return h, stats
        mean, is_known = params[last]
        gaps = ((h.reshape(len(h), 1, -1) - mean) ** 2).sum(-1)
        farthest = jnp.where(is_known, gaps, 0).max(1, keepdims=True)
        return -jnp.where(is_known, gaps, farthest + 1), stats

    return model._replace(name=f"{model.name} with prototypes", forward=forward)


def _sums(
    h: jax.Array, label: jax.Array, mask: jax.Array, num_classes: int
) -> tuple[jax.Array, jax.Array]:
    owner = jax.nn.one_hot(label, num_classes) * mask[:, None]
    total = jnp.matmul(
        owner.T, jnp.where(mask[:, None], h, 0), precision=jax.lax.Precision.HIGHEST
    )
    return total, owner.sum(0)
