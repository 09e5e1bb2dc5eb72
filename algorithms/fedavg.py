"""FedAvg: local training from the server's model, then a weighted mean.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629
(Algorithm 1).

* The server sends its model to the clients of the round.
* Each trains it for E epochs of minibatches on its own examples.
* The server takes the mean of their models, weighted by examples.

| paper | here |
|---|---|
| w_t | `state.server["params"]` |
| C * K | `--clients_per_round` |
| E, B, eta | `--local_epochs`, `--batch_size`, `--client_lr` |
| n_k / n | `aggregate.weights("examples", ...)` |

Differs from the paper: the mean is over the clients of the round (n is their
examples), as in every released implementation. `--eval_model=stale` serves each client
what it has in hand before the next broadcast (the CDKT code): its own trained copy if
it took part in the last round, else the global model that round began with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import aggregate, local, options, rows, traffic, types


@dataclasses.dataclass(frozen=True)
class HParams(options.LocalTraining):
    """FedAvg's options."""

    aggregation: str = options.option(
        "examples", "weights of the server's mean", choices=("examples", "uniform")
    )
    eval_model: str = options.option(
        "server",
        "model that serves a client: the server's, or its last copy (stale)",
        choices=("server", "stale"),
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """FedAvg as pure functions."""
    model = task.model
    loss_fn = local.cross_entropy_loss(model)
    model_bytes = traffic.model_bytes(model, task.example_shape)
    stale = hparams.eval_model == "stale"

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        params, stats = task.initial(model, key)
        server: dict[str, Any] = {"params": params, "stats": stats}
        clients: Any = ()
        if stale:
            server["received"] = jax.tree.map(jnp.copy, (params, stats))
            clients = {
                "copy": rows.repeat((params, stats), task.num_clients),
                "trained": jnp.zeros(task.num_clients, bool),
            }
        return types.RoundState(server, clients, key, jnp.zeros((), jnp.int32))

    def client_update(row: Any, shared: Any, bound: jax.Array) -> local.Trained:
        client_id, plan = row
        data, server, key, round = shared
        return local.train(
            hparams,
            (local.Objective(loss_fn),),
            server["params"],
            server["stats"],
            data=data,
            client_id=client_id,
            plan=plan,
            bound=bound,
            key=key,
            round=round,
        )

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        plan = cohort.plans["local"]
        trained = rows.over_clients(client_update, task.execution)(
            (cohort.client_id, plan),
            (data, state.server, state.key, state.round),
            plan.num_steps,
        )
        num_examples = rows.take(data.partition.train.count, cohort.client_id)
        weight = aggregate.weights(hparams.aggregation, num_examples, cohort.row_mask)
        copies = (trained.params, trained.stats)
        params, stats = aggregate.weighted_mean(copies, weight)
        server = {"params": params, "stats": stats}
        clients: Any = ()
        if stale:
            server["received"] = (state.server["params"], state.server["stats"])
            idle = jnp.zeros(task.num_clients, bool)
            clients = {
                "copy": rows.put(state.clients["copy"], cohort.row, copies),
                "trained": idle.at[cohort.row].set(True, mode="drop"),
            }
        state = types.RoundState(server, clients, state.key, state.round + 1)
        metrics = {"train_loss": local.pooled_loss(trained.loss, cohort.row_mask)}
        return state, metrics, jnp.ones((cohort.row.shape[0], 2), jnp.int32)

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        if stale:
            received, copies = state.server["received"], state.clients["copy"]
            trained = state.clients["trained"]
            return (
                task.serve(model, *received, mask=~trained, shared=True),
                task.serve(model, *copies, mask=trained),
            )
        params, stats = state.server["params"], state.server["stats"]
        return (task.serve(model, params, stats, shared=True),)

    return types.Algorithm(
        plans=(types.PlanSpec("local", hparams.local_epochs, hparams.batch_size),),
        messages=(
            types.MessageKind("model down", "down", model_bytes),
            types.MessageKind("model up", "up", model_bytes),
        ),
        init=init,
        round=round,
        serving=serving,
        server_params=lambda s: (model, s.server["params"], s.server["stats"]),
    )
