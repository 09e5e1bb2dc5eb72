"""Toy: clients mix with peers of a drawn graph, in which one may be alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from fedjax_pfl import aggregate, each_client, local_training, rng, stacked, types


@dataclasses.dataclass(frozen=True)
class HParams(local_training.LocalTraining):
    """Only the common options."""


def graph(seed, round, client, num_clients, num_peers):
    """Up to two peers, drawn with repetition; client 3 never has any."""
    words = rng.hashed(seed, rng.Tag.PEERS, round, client[:, None], np.arange(2))
    steps = 1 + (words % np.uint64(num_clients - 1)).astype(int)
    peers = (client[:, None] + steps) % num_clients
    mask = (words >> np.uint64(60)) > 3
    return peers, mask & (client != 3)[:, None]


def make(hparams, task):
    """All stages but the last are averaged with the peers', the last stays."""
    model = task.client_model
    loss_fn = local_training.cross_entropy_loss(model)

    def init(data, key):
        start = task.init(model, key)
        clients = stacked.repeat(start, task.num_clients)
        kept = local_training.kept_optimizer(hparams, start.params, task.num_clients)
        return types.RoundState.first((), clients, key, kept)

    def mixed(state, cohort):
        everyone = jnp.ones((len(cohort.row), 1 + cohort.peers.shape[1]))
        alone = everyone.at[:, 1:].set(0)
        by_stage = (*[everyone] * (len(model.stage_names) - 1), alone)
        weight = types.Variables(by_stage, by_stage)
        return aggregate.mix_peers(state.clients, cohort, weight)

    def client_update(client, _):
        return local_training.train(hparams, loss_fn, client.own, client)

    def round(state, cohort, data):
        own = mixed(state, cohort)
        trained = each_client.update(client_update, task, state, cohort, data, own=own)
        clients = stacked.put(state.clients, cohort.row, trained.variables)
        kept = trained.kept(state, cohort)
        state = state.after(clients=clients, opt_state=kept)
        sent = {"model from a peer": cohort.peer_mask.sum(1)}
        return state, trained.metrics(cohort), sent

    def serving(state, cohort, data):
        """After mixing: those of the next round alone."""
        mask, ids = cohort.row_mask, cohort.client_id
        own = mixed(state, cohort)
        return (types.Served.each(model, own, client_id=ids, mask=mask),)

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        messages=(types.MessageKind("model from a peer", "down", 4),),
        init=init,
        round=round,
        serving=serving,
        peers=types.PeerSpec(2, graph),
    )
