"""Toy: all that decentralised rounds offer, on a drawn graph in which one is alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from fedjax_pfl import decentralized, local_training, losses, rng, stacked, types


@dataclasses.dataclass(frozen=True)
class HParams(decentralized.Peers, local_training.LocalTraining):
    """The options of every algorithm among peers; its graph is its own."""


def graph(seed, round, client, num_clients, num_peers):
    """Up to two peers, drawn with repetition; client 3 never has any."""
    words = rng.hashed(seed, "engine.peers", round, client[:, None], np.arange(2))
    steps = 1 + (words % np.uint64(num_clients - 1)).astype(int)
    peers = (client[:, None] + steps) % num_clients
    mask = (words >> np.uint64(60)) > 3
    return peers, mask & (client != 3)[:, None]


def make(hparams, task):
    """All stages but the last are averaged; some copy a peer; answers are drawn near.

    A client's answer to ones is its private row; the mean of its peers' is its anchor.
    """
    model = task.client_model
    unit = jnp.ones((1, *task.example_shape))

    def answer(variables):
        return model.forward(*variables, unit)[0][0]

    def mixed(state, cohort, data):
        models, answers = state.clients["own"], state.clients["private"]
        weight = decentralized.weights("examples", cohort, data)
        cut = len(model.stage_names) - 1
        mean = decentralized.mix(models, cohort, cut, weight, weight[:, :1])
        first, known = cohort.peers[:, 0], cohort.peer_mask
        copies = known[:, 0] & ((cohort.client_id + state.round) % 2 == 0)
        theirs = stacked.take(answers, cohort.peers)
        count = jnp.maximum(known.sum(1), 1)[:, None]
        anchor = jnp.where(known[..., None], theirs, 0).sum(1) / count
        gap = jnp.abs(anchor - stacked.take(answers, cohort.row)).mean(1)
        return decentralized.Mixed(
            stacked.where(copies, stacked.take(models, first), mean),
            sent={"model": jnp.where(copies, 1, known.sum(1))},
            given=anchor,
            metrics={
                "copies": losses.masked_sum(copies, cohort.row_mask),
                "gap": losses.masked_sum(gap, cohort.row_mask),
            },
        )

    def client_update(client, start):
        anchor = client.own

        def loss_fn(params, stats, batch):
            logits, stats = model.forward(params, stats, batch.image, **batch.mode)
            hard = losses.cross_entropy(logits, batch.label, batch.mask)
            return hard + 0.01 * ((answer((params, stats)) - anchor) ** 2).mean(), stats

        trained = local_training.train(hparams, loss_fn, start, client)
        return trained, answer(trained.variables)

    return decentralized.make(
        hparams,
        task,
        mixed,
        client_update,
        messages=(types.MessageKind("model", "down", 4),),
        peers=types.PeerSpec(2, draw=graph),
        private=answer,
    )._replace(shares=("copies",))
