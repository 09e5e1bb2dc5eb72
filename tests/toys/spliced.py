"""Toy: a boundary that differs per client and round, as spliced parameters."""

import dataclasses

import jax.numpy as jnp

from fedjax_pfl import (
    aggregate,
    boundary,
    each_client,
    local_training,
    stacked,
    types,
)


@dataclasses.dataclass(frozen=True)
class HParams(local_training.LocalTraining):
    """Only the common options."""


def make(hparams, task):
    """Stages below the boundary are the client's own, those above the server's."""
    model = task.server_model
    num_stages = len(model.stage_names)
    plain_loss = local_training.cross_entropy_loss(model)

    def keep_mask(client_id, round):
        return boundary.held(1 + (client_id + round) % num_stages, num_stages)

    def init(data, key):
        server = task.init(model, key)
        clients = stacked.repeat(server, task.num_clients)
        return types.RoundState.first(server, clients, key)

    def client_update(client, server):
        keep = keep_mask(client.id, client.round)

        def loss_fn(params, stats, batch):
            side = types.Variables(params, stats)
            return plain_loss(*boundary.splice(side, server, keep), batch)

        objective = local_training.Objective(loss_fn, keep)
        return local_training.train(hparams, (objective,), client.own, client)

    def round(state, cohort, data):
        trained, state = each_client.update(
            client_update, task, state, cohort, data, shared=state.server
        )
        weight = aggregate.cohort_weights("uniform", cohort, data)
        held = keep_mask(cohort.client_id, state.round)
        share, is_held = aggregate.stage_weights(weight, held)
        mean = aggregate.weighted_mean(trained.variables, share)
        server = boundary.select(is_held, mean, state.server)
        state = state.after(cohort, trained.variables, server=server)
        return state, trained.metrics(cohort), {"stages up": 1}

    def serving(state, cohort, data):
        rows = {"own": state.clients, "id": jnp.arange(task.num_clients)}

        def build(shared, row):
            server, round = shared
            return boundary.splice(row["own"], server, keep_mask(row["id"], round))

        shared = (state.server, state.round)
        return (types.Serving.each(model, rows, shared=shared, build=build),)

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        messages=(types.MessageKind("stages up", "up", 4),),
        init=init,
        round=round,
        server=lambda state, data: {"global": (model, state.server)},
        serving=serving,
    )
