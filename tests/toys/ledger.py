"""Toy: depth masks, running statistics, exits, and a ledger per client."""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_pfl import aggregate, local, losses, masks, options, rng, rows, types


@dataclasses.dataclass(frozen=True)
class HParams(options.LocalTraining):
    """Only the common options."""


def make(hparams, task):
    """Client k trains the exits below its depth; the ledger sums its drifts."""
    model = task.server_model
    num_stages = len(model.stage_names)

    def init(data, key):
        example = jnp.zeros((1, *task.example_shape))
        params, stats = model.init(rng.stream(key, rng.Tag.INIT), example)
        ledger = jax.tree.map(jnp.zeros_like, rows.repeat(params, task.num_clients))
        server = {"params": params, "stats": stats, "ledger": ledger}
        return types.RoundState(server, (), key, jnp.zeros((), jnp.int32))

    def client_update(row, shared, bound):
        client_id, depth, plan = row
        data, server, key, round = shared

        def loss_fn(params, stats, batch):
            exits, stats = model.forward(
                params, stats, batch.image, sample_mask=batch.mask, train=True,
                key=batch.key,
            )  # fmt: skip
            gaps = [losses.cross_entropy(z, batch.label, batch.mask) for z in exits]
            reached = masks.held(depth, num_stages)
            return jnp.where(reached, jnp.stack(gaps), 0).sum(), stats

        objectives = (local.Objective(loss_fn, masks.held(depth, num_stages)),)
        return local.train(
            hparams, objectives, server["params"], server["stats"], data=data,
            client_id=client_id, plan=plan, bound=bound, key=key, round=round,
        )  # fmt: skip

    def round(state, cohort, data):
        plan, server = cohort.plans["local"], state.server
        trained = rows.over_clients(client_update, task.execution)(
            (cohort.client_id, cohort.depth, plan),
            (data, server, state.key, state.round),
            plan.num_steps,
        )
        weight = aggregate.weights("uniform", cohort.row, cohort.row_mask)
        held = masks.held(cohort.depth, num_stages)
        means = [
            aggregate.stagewise_mean(new, weight, held, server[name])
            for name, new in (("params", trained.params), ("stats", trained.stats))
        ]
        drift = jax.tree.map(lambda a, b: a - b, trained.params, server["params"])
        old = rows.take(server["ledger"], cohort.client_id)
        ledger = rows.put(
            server["ledger"], cohort.client_id, jax.tree.map(jnp.add, old, drift)
        )
        server = {"params": means[0], "stats": means[1], "ledger": ledger}
        metrics = {"train_loss": local.pooled_loss(trained.loss, cohort.row_mask)}
        state = types.RoundState(server, (), state.key, state.round + 1)
        return state, metrics, held.astype(jnp.int32)

    def serving(state, cohort, data):
        everyone, mask = jnp.arange(task.num_clients), jnp.ones(task.num_clients, bool)
        params, stats = state.server["params"], state.server["stats"]
        return (types.Served(params, stats, everyone, mask, model, shared=True),)

    return types.Algorithm(
        plans=(types.PlanSpec("local", hparams.local_epochs, hparams.batch_size),),
        messages=tuple(
            types.MessageKind(name, "up", 8) for name in model.stage_names
        ),
        init=init, round=round, serving=serving,
        server_params=lambda s: (model, s.server["params"], s.server["stats"]),
    )  # fmt: skip
