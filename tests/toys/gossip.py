"""Toy: peers mix their models, differently for two groups of stages; no server."""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_pfl import aggregate, local, options, rng, rows, types


@dataclasses.dataclass(frozen=True)
class HParams(options.LocalTraining):
    """Only the common options."""


def make(hparams, task):
    """All stages but the last are averaged with the peers', the last stays."""
    model = task.client_model
    loss_fn = local.cross_entropy_loss(model)

    def init(data, key):
        example = jnp.zeros((1, *task.example_shape))
        start = model.init(rng.stream(key, rng.Tag.INIT), example)
        clients = rows.repeat(start, task.num_clients)
        return types.RoundState((), clients, key, jnp.zeros((), jnp.int32))

    def client_update(row, shared, bound):
        client_id, plan, (params, stats) = row
        data, key, round = shared
        return local.train(
            hparams, (local.Objective(loss_fn),), params, stats, data=data,
            client_id=client_id, plan=plan, bound=bound, key=key, round=round,
        )  # fmt: skip

    def round(state, cohort, data):
        params, stats = state.clients
        own = jax.nn.one_hot(cohort.row, task.num_clients)
        peers = jax.nn.one_hot(cohort.peers, task.num_clients).sum(1)
        average = (own + peers) / (1 + cohort.peers.shape[1])
        shared = aggregate.mix(params[:-1], average)
        mixed = (*shared, *aggregate.mix(params[-1:], own))
        plan = cohort.plans["local"]
        trained = rows.over_clients(client_update, task.execution)(
            (cohort.client_id, plan, (mixed, rows.take(stats, cohort.row))),
            (data, state.key, state.round),
            plan.num_steps,
        )
        clients = rows.put(state.clients, cohort.row, (trained.params, trained.stats))
        metrics = {"train_loss": local.pooled_loss(trained.loss, cohort.row_mask)}
        state = types.RoundState((), clients, state.key, state.round + 1)
        sent = jnp.full((cohort.row.shape[0], 1), cohort.peers.shape[1], jnp.int32)
        return state, metrics, sent

    def serving(state, cohort, data):
        everyone, mask = jnp.arange(task.num_clients), jnp.ones(task.num_clients, bool)
        return (types.Served(*state.clients, everyone, mask, model),)

    return types.Algorithm(
        plans=(types.PlanSpec("local", hparams.local_epochs, hparams.batch_size),),
        messages=(types.MessageKind("model from a peer", "down", 4),),
        init=init, round=round, serving=serving,
        server_params=lambda state: None, num_peers=2,
    )  # fmt: skip
