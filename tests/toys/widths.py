"""Toy: clients train the first half or all of the hidden units, sliced by level."""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_pfl import aggregate, each_client, levels, local_training, types
from tests.toys import model as toy_model


@dataclasses.dataclass(frozen=True)
class HParams(levels.Levels, local_training.LocalTraining):
    """The common options and levels."""


def make(hparams, task):
    """Level 1 slices, trains the narrow model and pads back; level 2 has all."""
    nets = [toy_model.narrow(task.num_classes, width) for width in (0.5, 1.0)]
    model = nets[-1]

    def shapes_at(level):
        return jax.eval_shape(lambda: task.init(nets[level - 1], jax.random.key(0)))

    def narrowed(variables, level):
        return jax.tree.map(
            lambda leaf, s: leaf[tuple(slice(n) for n in s.shape)],
            variables,
            shapes_at(level),
        )

    def widened(variables, like):
        def pad(leaf, full):
            sizes = zip(leaf.shape, full.shape, strict=True)
            return jnp.pad(leaf, [(0, n - m) for m, n in sizes])

        return jax.tree.map(pad, variables, like)

    def covered(level):
        """bool[...] of each entry: whether a level has it."""
        ones = jax.tree.map(lambda s: jnp.ones(s.shape, bool), shapes_at(level))
        return widened(ones, shapes_at(2))

    def init(data, key):
        return types.RoundState.first(task.init(model, key), (), key)

    def of_client(depth):
        """The mask of what a client of `depth` int32[] has."""
        return jax.tree.map(
            lambda low, high: jnp.where(depth > 1, high, low), covered(1), covered(2)
        )

    def client_update(client, server, level):
        # In a chunk of a larger level the other entries are 0 and stay 0.
        mask = of_client(client.level)
        start = jax.tree.map(lambda m, leaf: jnp.where(m, leaf, 0), mask, server)
        loss_fn = local_training.cross_entropy_loss(nets[level - 1])
        objective = local_training.Objective(loss_fn, narrowed(mask, level).params)
        start = narrowed(start, level)
        trained = local_training.train(hparams, (objective,), start, client)
        wide = widened(trained.variables, server)
        return trained.replace(params=wide.params, stats=wide.stats)

    def round(state, cohort, data):
        trained, state = each_client.update(
            client_update, task, state, cohort, data, shared=state.server, levels=2
        )
        mask = jax.vmap(of_client)(cohort.level)
        weight = aggregate.cohort_weights("uniform", cohort, data)
        server = aggregate.masked_mean(trained.variables, weight, mask, state.server)
        return state.after(server=server), trained.metrics(cohort), {}

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        init=init,
        round=round,
        server=lambda state, data: {
            "global": (model, state.server),
            "half": (nets[0], narrowed(state.server, 1)),
        },
    )
