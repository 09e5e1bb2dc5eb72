"""FedAvg: local training from the server's model, then a weighted mean.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629
(Algorithm 1).

* The server sends its model to the clients of the round.
* Each trains it for E epochs of minibatches on its own examples.
* The server takes the mean of their models, weighted by examples.

| paper | here |
|---|---|
| w_t | `state.server["model"]` |
| C * K | `--clients_per_round` |
| E, B, eta | `--local_epochs`, `--batch_size`, `--client_lr` |
| n_k / n | `aggregate.cohort_weights("examples", ...)` |

Differs from the paper: the mean is over the clients of the round (n is their
examples), as in every released implementation. `--eval_model=stale` serves each client
what it has in hand before the next broadcast (the CDKT code): its own trained copy if
it took part in the last round, else the global model that round began with.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    aggregate,
    each_client,
    local_training,
    options,
    stacked,
    traffic,
    types,
)

option = options.option


@dataclasses.dataclass(frozen=True)
class HParams(local_training.LocalTraining):
    """FedAvg's options."""

    aggregation: str = option(
        "examples", "weights of the server's mean", choices=("examples", "uniform")
    )
    eval_model: str = option(
        "server",
        "model that serves a client: the server's, or what it has in hand (stale)",
        choices=("server", "stale"),
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """FedAvg as pure functions."""
    model = task.model
    loss_fn = local_training.cross_entropy_loss(model)
    is_stale = hparams.eval_model == "stale"

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        start, clients = task.init(model, key), ()
        server = {"model": start}
        if is_stale:
            server["before"] = jax.tree.map(jnp.copy, start)
            never = jnp.full(task.num_clients, -1)
            clients = {"copy": stacked.repeat(start, task.num_clients), "round": never}
        kept = local_training.kept_optimizer(hparams, start.params, task.num_clients)
        return types.RoundState.first(server, clients, key, kept)

    def client_update(client: each_client.Client, server: types.Variables):
        """ClientUpdate(k, w): E epochs of minibatches, from the server's model."""
        trained = local_training.train(hparams, loss_fn, server, client)
        return (trained, trained.variables) if is_stale else trained.split()

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        before, clients = state.server["model"], state.clients
        weight = aggregate.cohort_weights(hparams.aggregation, cohort, data)
        trained, mean = each_client.update(
            client_update, task, state, cohort, data, shared=before, reduce=weight
        )
        server = {"model": mean}
        if is_stale:
            server["before"] = before
            when = jnp.full_like(cohort.row, state.round)
            new = {"copy": trained.variables, "round": when}
            clients = stacked.put(clients, cohort.row, new)
        kept = trained.kept(state, cohort)
        state = state.after(server=server, clients=clients, opt_state=kept)
        return state, trained.metrics(cohort), {"model down": 1, "model up": 1}

    def in_hand(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        """The copy a client just trained, or what the last round began with."""
        has_copy = state.clients["round"] == state.round - 1
        return (
            types.Served.one(model, state.server["before"], ~has_copy),
            types.Served.each(model, state.clients["copy"], mask=has_copy),
        )

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        messages=traffic.model_both_ways(task, model),
        init=init,
        round=round,
        server=lambda state, data: {"global": (model, state.server["model"])},
        serving=in_hand if is_stale else None,
    )
