"""pFedSD: clients distil from their own last model while they train the server's.

Jin, Bai, Yao, Dai, Gu, Yu, Sun: "Personalized Edge Intelligence via Federated
Self-Knowledge Distillation", IEEE TPDS 2023,
https://doi.org/10.1109/TPDS.2022.3225185; released code CGCL-codes/pFedSD.

* The server sends its model; the client trains it on cross-entropy plus [lambda] times
  the KL distance to the model it trained at its last participation.
* The server takes the mean of the models; each client keeps a copy of its own.

| code | here |
|---|---|
| lambda, tau | `--self_distill_weight`, `--temperature` |
| local model, teacher | `state.clients["own"]`, once `"has_own"` |

Differs from the paper: it was not at hand, this follows the released code, which
defaults to lambda = 1 and tau = 1; ours are .5 and 3, those of a later
reimplementation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    aggregate,
    distill,
    local,
    losses,
    options,
    rows,
    traffic,
    types,
)


@dataclasses.dataclass(frozen=True)
class HParams(options.LocalTraining):
    """pFedSD's options."""

    self_distill_weight: float = options.option(
        0.5, "weight of the distance to the own last model [lambda]", minimum=0
    )
    temperature: float = options.option(3.0, "temperature of kl [tau]", above=0)
    aggregation: str = options.option(
        "uniform", "weights of the server's mean", choices=("examples", "uniform")
    )
    eval_model: str = options.option(
        "own",
        "model that serves a client: its own as last trained, or the server's",
        choices=("own", "server"),
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """pFedSD as pure functions."""
    model = task.model
    model_bytes = traffic.model_bytes(model, task.example_shape)

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        server = task.initial(model, key)
        clients = {
            "own": rows.repeat(server, task.num_clients),
            "has_own": jnp.zeros(task.num_clients, bool),
        }
        return types.RoundState(server, clients, key, jnp.zeros((), jnp.int32))

    def client_update(row: Any, shared: Any, bound: jax.Array) -> local.Trained:
        client_id, plan, teacher, has_own = row
        data, server, key, round = shared

        def loss_fn(params, stats, batch):
            logits, stats = model.forward(
                params, stats, batch.image, **batch.train_mode()
            )
            target, _ = model.forward(*teacher, batch.image)
            gap = distill.distance(
                "kl", logits, target, batch.mask, temperature=hparams.temperature
            )
            weight = jnp.where(has_own, hparams.self_distill_weight, 0.0)
            supervised = losses.cross_entropy(logits, batch.label, batch.mask)
            return supervised + weight * gap, stats

        return local.train(
            hparams,
            (local.Objective(loss_fn),),
            *server,
            data=data,
            client_id=client_id,
            plan=plan,
            bound=bound,
            key=key,
            round=round,
        )

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        plan = cohort.plans["local"]
        private = rows.take(state.clients, cohort.row)
        trained = rows.over_clients(client_update, task.execution)(
            (cohort.client_id, plan, private["own"], private["has_own"]),
            (data, state.server, state.key, state.round),
            plan.num_steps,
        )
        num_examples = rows.take(data.partition.train.count, cohort.client_id)
        weight = aggregate.weights(hparams.aggregation, num_examples, cohort.row_mask)
        copies = (trained.params, trained.stats)
        server = aggregate.weighted_mean(copies, weight)
        private = {"own": copies, "has_own": jnp.ones_like(private["has_own"])}
        clients = rows.put(state.clients, cohort.row, private)
        metrics = {"train_loss": local.pooled_loss(trained.loss, cohort.row_mask)}
        state = types.RoundState(server, clients, state.key, state.round + 1)
        return state, metrics, jnp.ones((cohort.row.shape[0], 2), jnp.int32)

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        own = state.clients["has_own"]
        if hparams.eval_model == "server":
            own = jnp.zeros_like(own)
        return (
            task.serve(model, *state.server, mask=~own, shared=True),
            task.serve(model, *state.clients["own"], mask=own),
        )

    return types.Algorithm(
        plans=(types.PlanSpec("local", hparams.local_epochs, hparams.batch_size),),
        messages=(
            types.MessageKind("model down", "down", model_bytes),
            types.MessageKind("model up", "up", model_bytes),
        ),
        init=init,
        round=round,
        serving=serving,
        server_params=lambda state: (model, *state.server),
    )
