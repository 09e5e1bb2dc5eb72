"""FedAvg: local training from the server's model, then a weighted mean.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629
(Algorithm 1).

* The server sends its model to the clients of the round.
* Each trains it for E epochs of minibatches on its own examples.
* The server takes the mean of their models, weighted by examples.

    w_(t+1) = sum_(k in S_t) n_k / n w_k

`fedavgm`, `fedadam`, `fedyogi` and `fedadagrad` have a `--server_optimizer`. Their
server takes a step along the mean change d instead (Hsu et al.,
https://arxiv.org/abs/1909.06335; Reddi et al., https://arxiv.org/abs/2003.00295,
Algorithm 2):

    d = sum_(k in S_t) n_k / n (w_k - w_t)
    v <- beta v + d,  w_(t+1) = w_t + eta_s v  (sgd)
    m <- beta m + (1 - beta) d,  w_(t+1) = w_t + eta_s m / (sqrt(v) + tau)  (the others)
    v <- v + d^2  (adagrad)
    v <- beta_2 v + (1 - beta_2) d^2  (adam)
    v <- v - (1 - beta_2) d^2 sign(v - d^2)  (yogi)

| paper | here |
|---|---|
| w_t | `state.server` (`["model"]` with `--eval_model=stale` or a server optimizer) |
| w_k, S_t | `trained`, from w_t; the clients of the round |
| C * K | `--clients_per_round` |
| E, B, eta | `--local_epochs`, `--batch_size`, `--client_lr` |
| n_k / n | `aggregate.cohort_weights("examples", ...)` |
| eta_s, beta (beta_1 of Reddi et al.) | `--server_lr`, `--server_momentum` |
| m, v; beta_2, tau | 0 and tau^2 (sgd: 0) at first, v moves before w; .99, .001 |

Differs from the paper: the mean is over the clients of the round (n is their examples),
as in every released implementation. `--eval_model=stale` serves each client the model
that it has before the next broadcast, as the CDKT code does: its own trained copy if it
took part in the last round, else the global model with which this round began.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import averaging, server_optimizer


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    eval_model: str = fp.option(
        "server",
        "model that serves a client: the server's, or the one that it last had (stale)",
        choices=("server", "stale"),
        excludes={"server_optimizer": server_optimizer.KINDS},
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """FedAvg as pure functions."""
    loss_fn = fp.cross_entropy_loss(task.model)

    def client_update(client: fp.Client, server: fp.Variables):
        """ClientUpdate(k, w): E epochs of minibatches, from the server's model."""
        return fp.train(hparams, loss_fn, server, client)

    if hparams.eval_model == "server":
        return averaging.make(hparams, task, client_update)
    return _served_stale(hparams, task, client_update)


def _served_stale(
    hparams: HParams, task: fp.Task, client_update: Callable
) -> fp.Algorithm:
    """The same rounds, in which clients keep their copy and the server two models."""
    model = task.model

    def and_keep(client: fp.Client, server: fp.Variables):
        trained = client_update(client, server)
        return trained, {"copy": trained.variables, "round": client.round}

    def first(start: fp.Variables) -> dict:
        # Not -1, which would mean that it took part in the round before the first.
        return {"copy": start, "round": jnp.full((), -2)}

    plain = averaging.make(hparams, task, and_keep, own=first)

    def init(data: fp.Data, key: jax.Array) -> fp.RoundState:
        state = plain.init(data, key)
        before = jax.tree.map(jnp.copy, state.server)
        return state.replace(server={"model": state.server, "before": before})

    def round(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        before = state.server["model"]
        state, metrics, sent = plain.round(state.replace(server=before), cohort, data)
        server = {"model": state.server, "before": before}
        return state.replace(server=server), metrics, sent

    def serving(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        has_copy = state.clients["round"] == state.round - 1
        return (
            fp.Serving.one(model, state.server["before"], ~has_copy),
            fp.Serving.each(model, state.clients["copy"], mask=has_copy),
        )

    return plain._replace(
        init=init,
        round=round,
        server=lambda state, data: {"global": (model, state.server["model"])},
        serving=serving,
    )
