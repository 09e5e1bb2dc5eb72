"""pFedSD: clients distil from their own last model while they train the server's.

Jin, Bai, Yao, Dai, Gu, Yu, Sun: "Personalized Edge Intelligence via Federated
Self-Knowledge Distillation", IEEE TPDS 2023, https://doi.org/10.1109/TPDS.2022.3225185;
released code CGCL-codes/pFedSD.

* The server sends its model. The client trains it on cross-entropy plus [lambda] times
  the KL distance to the model that it trained at its last participation.
* The server takes the mean of the models. Each client keeps a copy of its own.

| code | here |
|---|---|
| lambda, tau | `--self_distill_weight`, `--temperature` |
| local model, teacher | `state.clients["own"]`, once `"has_own"` |

Differs from the paper, which was not at hand: this follows the released code. Its
defaults are lambda = 1 and tau = 1; ours are .5 and 3, from a later reimplementation.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from fedjax_pfl import (
    averaging,
    distances,
    each_client,
    local_training,
    losses,
    options,
    types,
)

option = options.option


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    self_distill_weight: float = option(
        0.5, "weight of distillation from the own last model [lambda]", minimum=0
    )
    temperature: float = option(3.0, "temperature of kl [tau]", above=0)
    aggregation: str = option(
        "uniform", "weights of the server's mean", choices=("examples", "uniform")
    )
    eval_model: str = option(
        "own",
        "model that serves a client: its own as last trained, or the server's",
        choices=("own", "server"),
    )


def self_distillation(
    model: types.Model, teacher: types.Variables, weight: Any, temperature: Any
) -> local_training.LossFn:
    """Cross-entropy plus `weight` times KL(teacher || student) at `temperature`."""

    def loss_fn(params, stats, batch):
        logits, stats = model.forward(params, stats, batch.image, **batch.mode)
        target, _ = model.forward(*teacher, batch.image)
        gap = distances.distance(
            "kl", logits, target, batch.mask, temperature=temperature
        )
        supervised = losses.cross_entropy(logits, batch.label, batch.mask)
        return supervised + weight * gap, stats

    return loss_fn


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """pFedSD as pure functions."""
    model = task.model

    def first(start: types.Variables) -> dict:
        return {"own": start, "has_own": jnp.zeros((), bool)}

    def client_update(client: each_client.Client, server: types.Variables):
        """Trains the server's model, taught by the client's last one if it exists."""
        weight = jnp.where(client.own["has_own"], hparams.self_distill_weight, 0.0)
        loss_fn = self_distillation(
            model, client.own["own"], weight, hparams.temperature
        )
        trained = local_training.train(hparams, loss_fn, server, client)
        return trained, {"own": trained.variables, "has_own": jnp.ones((), bool)}

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        has_own = state.clients["has_own"] & (hparams.eval_model == "own")
        return (
            types.Serving.one(model, state.server, ~has_own),
            types.Serving.each(model, state.clients["own"], mask=has_own),
        )

    return averaging.make(hparams, task, client_update, own=first, serving=serving)
