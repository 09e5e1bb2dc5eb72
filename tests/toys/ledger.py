"""Toy: levels of depth, running statistics, exits, and a ledger per client."""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    aggregate,
    boundary,
    each_client,
    levels,
    local_training,
    losses,
    stacked,
    traffic,
    types,
)

exits = True


@dataclasses.dataclass(frozen=True)
class HParams(levels.Levels, local_training.LocalTraining):
    """The common options and levels."""


def make(hparams, task):
    """Client k trains the exits up to its level; the ledger sums its drifts."""
    model = task.server_model
    num_stages = len(model.stage_names)

    def init(data, key):
        server = task.init(model, key)
        zeros = jax.tree.map(jnp.zeros_like, server.params)
        ledger = stacked.repeat(zeros, task.num_clients)
        return types.RoundState.first(server, ledger, key)

    def client_update(client, server, level):
        reached = boundary.held(client.level, level)

        def loss_fn(params, stats, batch):
            exits, stats = model.forward(
                params, stats, batch.image, stop=level, **batch.mode
            )
            gaps = [losses.cross_entropy(z, batch.label, batch.mask) for z in exits]
            return jnp.where(reached, jnp.stack(gaps), 0).sum(), stats

        held = boundary.held(client.level, num_stages)
        objective = local_training.Objective(loss_fn, held)
        return local_training.train(hparams, (objective,), server, client)

    def round(state, cohort, data):
        given = {"shared": state.server, "levels": num_stages}
        trained, state = each_client.update(
            client_update, task, state, cohort, data, **given
        )
        weight = aggregate.cohort_weights("uniform", cohort, data)
        held = boundary.held(cohort.level, num_stages)
        share, is_held = aggregate.stage_weights(weight, held)
        mean = aggregate.weighted_mean(trained.variables, share)
        server = boundary.select(is_held, mean, state.server)
        old = stacked.take(state.clients, cohort.row)
        new = jax.tree.map(
            lambda o, t, s: o + t - s, old, trained.params, state.server.params
        )
        ledger = stacked.put(state.clients, cohort.row, new)
        state = state.after(server=server, clients=ledger)
        sent = traffic.stages_sent(model, held, held)
        return state, trained.metrics(cohort), sent

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        messages=traffic.stages_both_ways(task, model),
        init=init,
        round=round,
        server=lambda state, data: {"global": (model, state.server)},
    )
