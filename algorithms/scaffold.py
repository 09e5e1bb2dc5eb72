"""SCAFFOLD: control variates take the clients' drift out of their gradients.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning", ICML 2020, https://arxiv.org/abs/1910.06378
(Algorithm 1, option II).

* The server sends its model x and its control variate c.
* A client takes K steps from x, corrected by both control variates. Its new one is the
  mean of the gradients that it took.
* The server moves x along the mean of y_i - x, and c by the share of clients in S times
  the mean change of c_i.

    y_i <- y_i - eta_l (grad f_i(y_i) - c_i + c)
    c_i^+ = c_i - c + (x - y_i) / (K eta_l)
    x <- x + eta_g mean_(i in S) (y_i - x)
    c <- c + abs(S) / N mean_(i in S) (c_i^+ - c_i)

| paper | here |
|---|---|
| x, c | `state.server["model"]`, `state.server["control"]` |
| c_i | rows of `state.clients` |
| f_i, y_i | the loss on a client's examples, its model in training |
| K, eta_l, eta_g | a client's steps, `--client_lr` with its decay, `--server_lr` |
| abs(S) / N | clients of the round over those that may be drawn |

Differs from the paper: clients may have different numbers of steps K_i. A client that
takes none (`--drop_last`) keeps its control variate. Only plain SGD is allowed, because
with momentum or Adam option II is not a mean of gradients.
"""

import dataclasses

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import averaging, optimizer, options, shapes, stacked, traffic, types


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    client_lr: float = fp.option(0.05, "learning rate of the clients [eta_l]", above=0)
    server_lr: float = fp.option(1.0, "step of the server's model [eta_g]", minimum=0)
    aggregation: str = fp.option(
        "uniform", "weights of the server's mean", choices=("examples", "uniform")
    )


def new_control(
    own: types.Params,
    control: types.Params,
    before: types.Params,
    after: types.Params,
    distance: jax.Array,
) -> types.Params:
    """Option II: c_i - c + (x - y) / distance, distance f32[] = K eta_l; c_i at 0."""

    def new(own, control, before, after):
        moved = own - control + (before - after) / jnp.maximum(distance, 1e-30)
        return jnp.where(distance > 0, moved, own)

    return jax.tree.map(new, own, control, before, after)


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Makes SCAFFOLD.

    Raises ValueError for an optimizer other than plain SGD, or any at the server.
    """
    others = (
        *("client_optimizer", "client_momentum", "client_optimizer_options"),
        *("weight_decay", "clip_norm", "optimizer_state"),
    )
    options.refuse(hparams, others, "with scaffold, whose local steps are plain SGD")
    options.refuse(
        hparams,
        ("server_optimizer", "server_momentum"),
        "with scaffold, whose server has a step of its own",
    )
    model = task.model
    loss_fn = fp.cross_entropy_loss(model)

    def init(data: fp.Data, key: jax.Array) -> fp.RoundState:
        start = task.init(model, key)
        zeros = jax.tree.map(jnp.zeros_like, start.params)
        server = {"model": start, "control": zeros}
        return fp.RoundState.first(server, stacked.repeat(zeros, task.num_rows), key)

    def client_update(client: fp.Client, server: dict):
        start, control, own = server["model"], server["control"], client.own

        def corrected(params: types.Params, grads: types.Params) -> types.Params:
            return jax.tree.map(lambda g, o, c: g - o + c, grads, own, control)

        objective = fp.Objective(loss_fn, adjust=corrected)
        trained = fp.train(hparams, (objective,), start, client)
        rate = optimizer.learning_rate(hparams, client.round)
        distance = client.plan.num_steps * rate
        new = new_control(own, control, start.params, trained.params, distance)
        rest, variables = trained.split()
        change = jax.tree.map(jnp.subtract, new, own)
        return (rest, new), {"model": variables, "control": change}

    def round(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        here, server = fp.Round(task, state, cohort, data), state.server
        weight = here.weights(hparams.aggregation)
        (trained, own), mean, here = here.update(
            client_update, shared=server, reduce=weight
        )
        share = cohort.row_mask.sum() / task.num_eligible
        params = jax.tree.map(
            lambda x, y: x + hparams.server_lr * (y - x),
            server["model"].params,
            mean["model"].params,
        )
        control = jax.tree.map(
            lambda c, change: c + share * change, server["control"], mean["control"]
        )
        new = {"model": fp.Variables(params, mean["model"].stats), "control": control}
        sent = {kind.name: 1 for kind in messages}
        return here.after(own, server=new), trained.metrics(cohort), sent

    parameters = shapes.tree_bytes(shapes.variables(model, task.example_shape).params)
    control = traffic.both_ways("control", parameters)
    messages = (*traffic.model_both_ways(task, model), *control)
    return fp.Algorithm(
        plans=(fp.plan(hparams),),
        messages=messages,
        init=init,
        round=round,
        server=lambda state, data: {"global": (model, state.server["model"])},
    )
