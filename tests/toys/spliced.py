"""Toy: a boundary that differs per client and round, as spliced parameters."""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_pfl import aggregate, local, masks, options, rng, rows, types


@dataclasses.dataclass(frozen=True)
class HParams(options.LocalTraining):
    """Only the common options."""


def make(hparams, task):
    """Stages below the boundary are the client's own, those above the server's."""
    model = task.server_model
    num_stages = len(model.stage_names)
    plain_loss = local.cross_entropy_loss(model)

    def keep_mask(client_id, round):
        return masks.held(1 + (client_id + round) % num_stages, num_stages)

    def init(data, key):
        example = jnp.zeros((1, *task.example_shape))
        params, stats = model.init(rng.stream(key, rng.Tag.INIT), example)
        clients = rows.repeat(params, task.num_clients)
        return types.RoundState((params, stats), clients, key, jnp.zeros((), jnp.int32))

    def client_update(row, shared, bound):
        client_id, plan, own = row
        data, (server, stats), key, round = shared
        keep = keep_mask(client_id, round)

        def loss_fn(params, stats, batch):
            return plain_loss(masks.splice(params, server, keep), stats, batch)

        return local.train(
            hparams, (local.Objective(loss_fn, keep),), own, stats, data=data,
            client_id=client_id, plan=plan, bound=bound, key=key, round=round,
        )  # fmt: skip

    def round(state, cohort, data):
        plan = cohort.plans["local"]
        trained = rows.over_clients(client_update, task.execution)(
            (cohort.client_id, plan, rows.take(state.clients, cohort.row)),
            (data, state.server, state.key, state.round),
            plan.num_steps,
        )
        weight = aggregate.weights("uniform", cohort.row, cohort.row_mask)
        held = keep_mask(cohort.client_id, state.round)
        params, stats = state.server
        params = aggregate.stagewise_mean(trained.params, weight, held, params)
        clients = rows.put(state.clients, cohort.row, trained.params)
        metrics = {"train_loss": local.pooled_loss(trained.loss, cohort.row_mask)}
        state = types.RoundState((params, stats), clients, state.key, state.round + 1)
        return state, metrics, jnp.ones((cohort.row.shape[0], 1), jnp.int32)

    def serving(state, cohort, data):
        everyone = jnp.arange(task.num_clients)
        keep = keep_mask(everyone, state.round)
        params, stats = state.server
        params = jax.vmap(masks.splice, (0, None, 0))(state.clients, params, keep)
        stats = rows.repeat(stats, task.num_clients)
        mask = jnp.ones(task.num_clients, bool)
        return (types.Served(params, stats, everyone, mask, model),)

    return types.Algorithm(
        plans=(types.PlanSpec("local", hparams.local_epochs, hparams.batch_size),),
        messages=(types.MessageKind("stages up", "up", 4),),
        init=init, round=round, serving=serving,
        server_params=lambda state: (model, *state.server),
    )  # fmt: skip
