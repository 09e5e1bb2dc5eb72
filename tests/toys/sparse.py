"""Toy: every client has its own mask of single weights, projected after each step."""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    aggregate,
    each_client,
    local_training,
    rng,
    stacked,
    types,
)


@dataclasses.dataclass(frozen=True)
class HParams(local_training.LocalTraining):
    """Only the common options."""


def make(hparams, task):
    """The server's mean of a weight is over the clients that hold it."""
    model = task.server_model
    loss_fn = local_training.cross_entropy_loss(model)

    def init(data, key):
        server = task.init(model, key)
        leaves, treedef = jax.tree.flatten(server.params)
        key = jax.random.split(rng.stream(key, "sparse.mask"), len(leaves))
        masks = [
            jax.random.bernoulli(k, 0.7, (task.num_clients, *leaf.shape))
            for k, leaf in zip(key, leaves, strict=True)
        ]
        masks = jax.tree.unflatten(treedef, masks)
        return types.RoundState.first(server, masks, key[0])

    def only(mask, params):
        return jax.tree.map(lambda m, leaf: jnp.where(m, leaf, 0), mask, params)

    def client_update(client, server):
        mask = client.own
        objective = local_training.Objective(
            loss_fn,
            mask,
            held=(True,) * len(server.params),
            project=lambda params: only(mask, params),
            measure=lambda grads: {"steps": jnp.ones((), jnp.int32)},
        )
        start = server._replace(params=only(mask, server.params))
        return local_training.train(hparams, (objective,), start, client)

    def round(state, cohort, data):
        mask = stacked.take(state.clients, cohort.row)
        trained, state = each_client.update(
            client_update, task, state, cohort, data, own=mask, shared=state.server
        )
        weight = aggregate.cohort_weights("uniform", cohort, data)
        old = state.server
        params = aggregate.masked_mean(trained.params, weight, mask, old.params)
        stats = aggregate.weighted_mean(trained.stats, weight)
        clients = stacked.put(state.clients, cohort.row, mask)
        steps = jnp.where(cohort.row_mask, trained.measured[0]["steps"], 0).sum()
        metrics = trained.metrics(cohort) | {"steps": (steps, jnp.ones(()))}
        server = types.Variables(params, stats)
        return state.after(server=server, clients=clients), metrics, {}

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        init=init,
        round=round,
        server=lambda state, data: {"global": (model, state.server)},
    )
