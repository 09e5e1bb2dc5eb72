"""MOON: clients keep their representation near the server's, away from their last one.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021,
https://arxiv.org/abs/2103.16257 (Algorithm 1).

* The server sends w^t. A client trains it on cross-entropy plus mu times a contrastive
  loss, where sim is the cosine similarity.
* z, z_glob and z_prev are the representations of an example by the model in training,
  by w^t, and by the model that the client sent last.
* The server takes the mean. It serves all clients.

    L = CE(w; x, y) + mu l_con  (Eq. 4)
    l_con = -log(near / (near + far))  (Eq. 3)
    near = exp(sim(z, z_glob) / tau),  far = exp(sim(z, z_prev) / tau)

| paper | here |
|---|---|
| w^t, w_i^{t-1} | `state.server`, rows of `state.clients` |
| R_w(x) | the input of the last stage |
| mu, tau | `--contrastive_weight`, `--temperature` |

Differs from the paper: there the representation is the output of a two-layer projection
head, which it adds to the model; here, as in PFLlib, the model stays that of the other
methods, and the representation is what its last stage takes. In a client's first round
w_i^{t-1} is the initial model, as in PFLlib; in round 0 l_con is then log 2 without a
gradient. z_glob and z_prev have no dropout. tau is the paper's, where PFLlib has 1
(`--preset=pfllib`). Of a text each position has a representation, and l_con is a mean
as the other loss is.
"""

import dataclasses

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import averaging, boundary, distances, losses, options, proxy


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    contrastive_weight: float = fp.option(
        1.0, "weight of the contrastive loss [mu]", minimum=0, zero_is="fedavg"
    )
    temperature: float = fp.option(
        0.5,
        "temperature of similarities [tau]",
        above=0,
        needs={"contrastive_weight": options.ON},
        is_noted=True,
    )


def similarity(first: jax.Array, second: jax.Array) -> jax.Array:
    """Cosines f32[...] of vectors f32[..., D], 0 where one of two is 0."""
    size, other = (distances.safe_sqrt((x**2).sum(-1)) for x in (first, second))
    return (first * second).sum(-1) / jnp.maximum(size * other, 1e-8)


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Makes MOON; raises ValueError if the model has no stage before the last."""
    model = task.model
    boundary.check_several(model)

    def client_update(client: fp.Client, server: fp.Variables):
        """Party i: l_sup + mu l_con from w^t; the trained model is its next z_prev."""

        def loss_fn(params, stats, batch):
            logits, z, stats = proxy.of_batch(model, params, stats, batch)
            fixed = (server, client.own)
            others = (proxy.logits_and_embedding(model, x, batch.image) for x in fixed)
            every = (z, *(embedding for _, embedding, _ in others))
            # One for each label: of an example, or of a position.
            z, near, far = (x.reshape(*batch.label.shape, -1) for x in every)
            gap = similarity(z, far) - similarity(z, near)
            contrast = jax.nn.softplus(gap / hparams.temperature)
            rows = batch.mask, batch.chosen
            supervised = losses.cross_entropy(logits, batch.label, *rows)
            contrast = losses.batch_mean(contrast, *rows)
            return supervised + hparams.contrastive_weight * contrast, stats

        trained = fp.train(hparams, loss_fn, server, client)
        return trained, trained.variables

    return averaging.make(hparams, task, client_update, own=lambda start: start)
