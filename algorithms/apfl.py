"""APFL: each client mixes the server's model with one of its own, and learns how much.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning",
https://arxiv.org/abs/2003.13461 (Algorithm 1).

* The server's model is FedAvg's.
* In each step a client also takes one along the loss of the mixture of its own model
  with its copy of the server's. Only its own model and its weight move.
* The mixture with the server's model serves the client.

    vbar_i = alpha_i v_i + (1 - alpha_i) w_i
    v_i <- v_i - eta_t alpha_i grad f_i(vbar_i)
    alpha_i <- alpha_i - eta_t <v_i - w_i, grad f_i(vbar_i)>  (once in a round)
    w_i <- w_i - eta_t grad f_i(w_i)
    w <- mean_(i in S_t) w_i

| paper | here |
|---|---|
| w, w_i | `state.server`, a client's copy during its training |
| v_i, vbar_i | the rows `own` of `state.clients`, `mixed` |
| alpha_i | `own_weight`; in round 0 `--own_weight`, 0..1 |
| eta_t | `--client_lr`, `--client_lr_decay` |
| f_i, S_t | the loss on a client's examples, the clients of the round |

Differs from the paper: the mean is weighted by examples by default. Momentum, weight
decay and clipping, if any, also act on alpha_i. We chose that alpha_i takes one
gradient step a round, on its first batch (`--nolearn_weight`: none), and stays within
0..1. A client is measured with the server's present model. Running statistics of the
mixture are v_i's own. PFLlib's APFL is another method, which is not here: v_i steps
along f_i(v_i), alpha_i moves in each step, with .02 alpha_i added to its gradient, and
after a round the mixture with the client's trained w_i becomes v_i and is measured.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import averaging, local_training, shapes, types


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    own_weight: float = fp.option(
        0.5,
        "weight of a client's own model [alpha], the first if it is learned",
        minimum=0,
        maximum=1,
    )
    learn_weight: bool = fp.option(
        True, "let each client learn its weight, one step in each round"
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """APFL as pure functions."""
    model = task.model
    supervised = fp.cross_entropy_loss(model)
    # What a client trains: the stages of w, those of v, and alpha.
    size = len(model.stage_names)
    stage = jnp.arange(2 * size + 1)

    def mixed(alpha: jax.Array, own: types.Params, server: types.Params):
        return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, own, server)

    def joined(server: fp.Variables, row: Any) -> fp.Variables:
        own, alpha = row["own"], {"trunk": {"alpha": row["own_weight"]}}
        return fp.Variables(
            (*server.params, *own.params, alpha), (*server.stats, *own.stats, {})
        )

    def parted(params: tuple, stats: tuple) -> tuple[fp.Variables, Any]:
        server = fp.Variables(params[:size], stats[:size])
        own = fp.Variables(params[size:-1], stats[size:-1])
        return server, {"own": own, "own_weight": params[-1]["trunk"]["alpha"]}

    def mixture_loss(params, stats, batch):
        """f_i(vbar_i)."""
        server, row = parted(params, stats)
        mix = mixed(row["own_weight"], row["own"].params, server.params)
        loss, moved = supervised(mix, row["own"].stats, batch)
        return loss, (*server.stats, *moved, {})

    def server_loss(params, stats, batch):
        """f_i(w)."""
        loss, moved = supervised(params[:size], stats[:size], batch)
        return loss, (*moved, *stats[size:])

    def personal(batch: local_training.Batch) -> jax.Array:
        """v in each step, alpha in the first."""
        learns = hparams.learn_weight & (batch.step == 0)
        return (stage >= size) & ((stage < 2 * size) | learns)

    def within(params: tuple) -> tuple:
        *rest, last = params
        return (*rest, jax.tree.map(lambda alpha: jnp.clip(alpha, 0, 1), last))

    def client_update(client: fp.Client, server: fp.Variables):
        """v and alpha along f_i(vbar), at w before its step; then w along f_i(w)."""
        objective = fp.Objective
        steps = (
            objective(mixture_loss, personal, held=stage >= size, project=within),
            objective(server_loss, stage < size),
        )
        start = joined(server, client.own)
        trained = fp.train(hparams, steps, start, client)
        server, row = parted(trained.params, trained.stats)
        return trained.replace(params=server.params, stats=server.stats), row

    def first(start: fp.Variables) -> Any:
        return {"own": start, "own_weight": jnp.float32(hparams.own_weight)}

    def build(server: fp.Variables, row: Any) -> fp.Variables:
        mix = mixed(row["own_weight"], row["own"].params, server.params)
        return fp.Variables(mix, row["own"].stats)

    start = shapes.variables(model, task.example_shape)
    return averaging.make(
        hparams,
        task,
        client_update,
        own=first,
        build=build,
        opt_state=lambda fresh: fresh(joined(start, first(start)).params),
    )
