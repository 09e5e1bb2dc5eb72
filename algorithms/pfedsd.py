"""pFedSD: clients distil from their own last model while they train the server's.

Jin, Bai, Yao, Dai, Gu, Yu, Sun: "Personalized Edge Intelligence via Federated
Self-Knowledge Distillation", IEEE TPDS 2023, https://doi.org/10.1109/TPDS.2022.3225185;
released code CGCL-codes/pFedSD.

* The server sends its model. The client trains it on cross-entropy plus [lambda] times
  the KL distance to the model that it trained at its last participation.
* The server takes the mean of the models. Each client keeps a copy of its own.

    L_k = CE(z, y) + lambda tau^2 KL(v || p)
    w <- mean_(k in S) w_k

| code | here |
|---|---|
| lambda, tau | `--self_distill_weight`, `--temperature` |
| w, w_k | `state.server`, from it trained on L_k |
| local model, teacher | `state.clients["own"]` (w_k of last time), once `"has_own"` |
| z, p, v | logits; softmax(z / tau), and that of the teacher |

Differs from the paper, which was not at hand: this follows the released code. Its
defaults are lambda = 1 and tau = 1; ours are .5 and 3, from a later reimplementation.
The teacher is in eval mode, where the code never sets it, and running statistics are
averaged too, where the code averages parameters alone.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import averaging, distances, local_training, losses, options, types


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    self_distill_weight: float = fp.option(
        0.5, "weight of distillation from the own last model [lambda]", minimum=0
    )
    temperature: float = fp.option(
        3.0,
        "temperature of kl [tau]",
        above=0,
        needs={"self_distill_weight": options.ON},
        is_noted=True,
    )
    aggregation: str = fp.option(
        "uniform", "weights of the server's mean", choices=("examples", "uniform")
    )
    eval_model: str = fp.option(
        "own",
        "model that serves a client: its own as last trained, or the server's",
        choices=("own", "server"),
    )


def self_distillation(
    model: types.Model, teacher: fp.Variables, weight: Any, temperature: Any
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


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """pFedSD as pure functions."""
    model = task.model

    def client_update(client: fp.Client, server: fp.Variables):
        """Trains the server's model, taught by the client's last one if it exists."""
        weight = jnp.where(client.own["has_own"], hparams.self_distill_weight, 0.0)
        loss_fn = self_distillation(
            model, client.own["own"], weight, hparams.temperature
        )
        trained = fp.train(hparams, loss_fn, server, client)
        return trained, {"own": trained.variables, "has_own": jnp.ones((), bool)}

    def serving(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        has_own = state.clients["has_own"] & (hparams.eval_model == "own")
        return averaging.own_or_server(model, state, has_own)

    given = {"own": averaging.without_own, "serving": serving}
    return averaging.make(hparams, task, client_update, **given)
