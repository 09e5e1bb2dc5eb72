"""Local training without any exchange: the control row of every table.

"No Transfer" of Nguyen et al., "CDKT-FL", https://arxiv.org/abs/2204.01542 (Tables 1
to 3), and the Local row of personalized federated learning.

* Each client of the round trains its own model on its own examples.
* If there is a proxy set, the server trains a model of its own on it, as the CDKT
  paper's row does; nobody learns from it.

| paper | here |
|---|---|
| w_n | rows of `state.clients` |
| w_s | `state.server`, only with a proxy set |
| K, R | `--local_epochs`, `--server_epochs` |

Differs from the paper: it does not say what the server of this row is; as in the
released code it is trained on the proxy set.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl import distill, local, options, rng, rows, types


@dataclasses.dataclass(frozen=True)
class HParams(options.LocalTraining):
    """Options of local training."""

    server_lr: float = options.option(
        0.05, "learning rate of the server's model on the proxy set", minimum=0
    )
    server_epochs: int = options.option(
        2, "epochs of the server over the proxy set per round", minimum=1
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """Local training as pure functions."""
    server_model, client_model = task.server_model, task.client_model
    loss_fn = local.cross_entropy_loss(client_model)

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        server: Any = ()
        if task.num_proxy:
            params, stats = task.initial(server_model, key)
            server = {"params": params, "stats": stats}
        clients = rows.repeat(task.initial(client_model, key), task.num_clients)
        return types.RoundState(server, clients, key, jnp.zeros((), jnp.int32))

    def client_update(row: Any, shared: Any, bound: jax.Array) -> local.Trained:
        client_id, plan, (params, stats) = row
        data, key, round = shared
        return local.train(
            hparams,
            (local.Objective(loss_fn),),
            params,
            stats,
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
            (cohort.client_id, plan, rows.take(state.clients, cohort.row)),
            (data, state.key, state.round),
            plan.num_steps,
        )
        clients = rows.put(state.clients, cohort.row, (trained.params, trained.stats))
        server = state.server
        if task.num_proxy:
            params, stats = distill.fit(
                local.cross_entropy_loss(server_model),
                optax.sgd(hparams.server_lr),
                server["params"],
                server["stats"],
                data=data,
                batches=distill.proxy_batches(data, hparams.batch_size),
                epochs=hparams.server_epochs,
                key=rng.stream(state.key, rng.Tag.SERVER, state.round),
            )
            server = {"params": params, "stats": stats}
        metrics = {"train_loss": local.pooled_loss(trained.loss, cohort.row_mask)}
        state = types.RoundState(server, clients, state.key, state.round + 1)
        return state, metrics, jnp.zeros((cohort.row.shape[0], 0), jnp.int32)

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        return (task.serve(client_model, *state.clients),)

    def server_params(state: types.RoundState):
        if not task.num_proxy:
            return None
        return server_model, state.server["params"], state.server["stats"]

    return types.Algorithm(
        plans=(types.PlanSpec("local", hparams.local_epochs, hparams.batch_size),),
        messages=(),
        init=init,
        round=round,
        serving=serving,
        server_params=server_params,
    )
