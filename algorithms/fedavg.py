"""FedAvg: local training from the server's model, then a weighted mean.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629
(Algorithm 1).

* The server sends its model to the clients of the round.
* Each trains it for E epochs of minibatches on its own examples.
* The server takes the mean of their models, weighted by examples.

| paper | here |
|---|---|
| w_t | `state.server` (`["model"]` with `--eval_model=stale`) |
| C * K | `--clients_per_round` |
| E, B, eta | `--local_epochs`, `--batch_size`, `--client_lr` |
| n_k / n | `aggregate.cohort_weights("examples", ...)` |

Differs from the paper: the mean is over the clients of the round (n is their examples),
as in every released implementation. `--eval_model=stale` serves each client the model
that it has before the next broadcast, as the CDKT code does: its own trained copy if it
took part in the last round, else the global model with which this round began.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    averaging,
    each_client,
    local_training,
    options,
    server_optimizer,
    types,
)


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    eval_model: str = options.option(
        "server",
        "model that serves a client: the server's, or the one that it last had (stale)",
        choices=("server", "stale"),
        excludes={"server_optimizer": server_optimizer.KINDS},
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """FedAvg as pure functions."""
    loss_fn = local_training.cross_entropy_loss(task.model)

    def client_update(client: each_client.Client, server: types.Variables):
        """ClientUpdate(k, w): E epochs of minibatches, from the server's model."""
        return local_training.train(hparams, loss_fn, server, client)

    if hparams.eval_model == "server":
        return averaging.make(hparams, task, client_update)
    return _served_stale(hparams, task, client_update)


def _served_stale(
    hparams: HParams, task: types.Task, client_update: Callable
) -> types.Algorithm:
    """The same rounds, in which clients keep their copy and the server two models."""
    model = task.model

    def and_keep(client: each_client.Client, server: types.Variables):
        trained = client_update(client, server)
        return trained, {"copy": trained.variables, "round": client.round}

    def first(start: types.Variables) -> dict:
        # Not -1, which would mean that it took part in the round before the first.
        return {"copy": start, "round": jnp.full((), -2)}

    plain = averaging.make(hparams, task, and_keep, own=first)

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        state = plain.init(data, key)
        before = jax.tree.map(jnp.copy, state.server)
        return state.replace(server={"model": state.server, "before": before})

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        before = state.server["model"]
        state, metrics, sent = plain.round(state.replace(server=before), cohort, data)
        server = {"model": state.server, "before": before}
        return state.replace(server=server), metrics, sent

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        has_copy = state.clients["round"] == state.round - 1
        return (
            types.Serving.one(model, state.server["before"], ~has_copy),
            types.Serving.each(model, state.clients["copy"], mask=has_copy),
        )

    return plain._replace(
        init=init,
        round=round,
        server=lambda state, data: {"global": (model, state.server["model"])},
        serving=serving,
    )
