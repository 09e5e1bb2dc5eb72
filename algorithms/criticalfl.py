"""CriticalFL: a client pulls from more peers in periods that its gradients decide.

Yan, Wang, Yuan, Li: "CriticalFL: A Critical Learning Periods Augmented Client Selection
Framework for Efficient Federated Learning", KDD 2023,
https://openreview.net/forum?id=PWpShkD87Y; the CriticalFL row of UA-PDFL,
https://arxiv.org/abs/2412.11674, in rounds without a server.

* A client of the round pulls the models of its first k_i peers and the norms of their
  last round. It averages these models and its own, weighted by examples.
* In every second round it adds the mean of these norms and its own to its history. The
  period is critical while the mean of the last 10 rises by more than a threshold.
* In a critical period k_i doubles, until it has once been three quarters of the other
  clients. Otherwise it is halved, down to `--num_peers`.
* It trains for E epochs. The norm of its round is the learning rate times the mean over
  epochs of the sum of squared gradient norms.

    w_i <- mean_(j in i, Q_i) w_j
    n_i = eta / E sum_s ||grad F_i(w_i^s)||^2
    k_i <- min(2 k_i, 3 / 4 (K - 1))  (critical)
    k_i <- max(k_i / 2, N_com)  (else)

| paper | here |
|---|---|
| Q_i | the first k_i of the peers that are drawn for a client |
| w_i^s, n_i | the model in local step s of E epochs, `norm` |
| F_i, eta, K | the loss on a step's batch, `--client_lr`, `--num_clients` |
| federated gradient norm | mean `norm` of client and peers; `Period.history` |
| the threshold | `--critical_threshold` |
| clients of a round | `Period.num_peers` [k_i]; N_com is `--num_peers` |
| sparse updates in critical periods | `--sparsify` |

With `--sparsify` a client in a critical period pulls from each peer only the fifth of
all parameters that changed most in the peer's last training: values (`sparse model`)
and a bitmap of one bit per parameter (`mask`). It averages each entry over its own
model, which counts in full, and the peers that sent it. Norms are messages of 4 bytes.

Differs from the paper: there a server chooses how many clients take part in a round.
Here each client chooses by its own history how many peers it pulls from in its next
round, and counts its own rounds. Window, interval, the first five checks (always
critical) and the fifth are those of the released code, and norms of checks that are not
there yet count as 0, too: about the first ten checks are critical also where norms
fall. The norm is taken before gradients are clipped. The norm of a client without a
step in its last round, or without any round yet, does not count, and with `--sparsify`
it sends no entries. Until the first check, models are sent whole. An entry that no peer
sends does not change (the code sets it to 0).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fedjax_pfl as fp
from fedjax_pfl import (
    aggregate,
    decentralized,
    losses,
    optimizer,
    shapes,
    sparse,
    stacked,
    traffic,
    types,
)
from fedjax_pfl.rows import exchange

INTERVAL = 2  # rounds from one check to the next
WINDOW = 10  # checks behind a mean
ALWAYS_CRITICAL = 5  # first checks
MOST_PEERS = 0.75  # of the other clients
SENT_SHARE = 0.2  # of the parameters, with --sparsify


@dataclasses.dataclass(frozen=True)
class HParams(decentralized.Peers, fp.LocalTraining):
    num_peers: int = fp.option(
        5, "peers of each client at first and at least [N_com]", minimum=1
    )
    critical_threshold: float = fp.option(
        0.01, "relative rise of the norm that is critical, -1 = always", minimum=-1
    )
    sparsify: bool = fp.option(
        False, "pull only the most changed fifth of a model in critical periods"
    )


class Period(NamedTuple):
    """One client's training history, a private row.

    Attributes:
        history: f32[WINDOW + 1], the last federated gradient norms.
        rounds, num_peers: int32[], its rounds so far, and peers it pulls from [k_i].
        was_full: bool[], whether `num_peers` has ever reached its maximum.
        critical: bool[], the result of the last check.
    """

    history: jax.Array
    rounds: jax.Array
    num_peers: jax.Array
    was_full: jax.Array
    critical: jax.Array


def first_period(num_peers: int) -> Period:
    """The history of a client before round 0."""
    return Period(
        history=jnp.zeros(WINDOW + 1),
        rounds=jnp.zeros((), jnp.int32),
        num_peers=jnp.full((), num_peers, jnp.int32),
        was_full=jnp.zeros((), bool),
        critical=jnp.zeros((), bool),
    )


def next_period(period: Period, norm: jax.Array, hparams: HParams, most: int) -> Period:
    """The period after one more round of the client, checked if a check is due.

    `norm` f32[] is the federated gradient norm, and `most` the largest number of peers.
    """
    history = jnp.append(period.history[1:], norm)
    before, now = history[:-1].mean(), history[1:].mean()
    rise = (now - before) / jnp.maximum(before, 1e-7)
    is_early = period.rounds // INTERVAL < ALWAYS_CRITICAL
    critical = is_early | (rise > hparams.critical_threshold)
    number = period.num_peers
    was_full = period.was_full | (number == most)
    more = jnp.where(was_full, number, jnp.minimum(2 * number, most))
    less = jnp.maximum(hparams.num_peers, number - jnp.maximum(number // 2, 1))
    rounds = period.rounds + 1
    after = Period(history, rounds, jnp.where(critical, more, less), was_full, critical)
    is_due = rounds % INTERVAL == 0
    unchecked = period._replace(rounds=rounds)
    return jax.tree.map(lambda a, b: jnp.where(is_due, a, b), after, unchecked)


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Makes CriticalFL; raises ValueError unless peers are random and few enough."""
    model, peers = task.client_model, _peers(hparams, task)
    most = peers.num_peers
    shape = shapes.variables(model, task.example_shape)
    size = sum(leaf.size for leaf in jax.tree.leaves(shape.params))
    num_sent = math.ceil(SENT_SHARE * size)
    loss_fn = fp.cross_entropy_loss(model)

    def private(start: fp.Variables) -> dict[str, Any]:
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, bool), start.params)
        return {
            "period": first_period(hparams.num_peers),
            "norm": jnp.zeros(()),
            "changed": nothing if hparams.sparsify else (),
        }

    def mixed(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        """The means of models and norms over the first k_i peers."""
        models, known = state.clients["own"], state.clients["private"]
        period, cohort = decentralized.fetch_rows(known["period"], cohort.row, cohort)
        place = jnp.arange(cohort.peers.shape[1])
        is_pulled = place < period.num_peers[:, None]
        cohort = cohort.replace(peer_mask=cohort.peer_mask & is_pulled)
        source, _ = aggregate.sources(cohort)
        norms, cohort = decentralized.fetch_rows(known["norm"], source, cohort)
        has_trained = norms > 0
        weight = decentralized.weights("examples", cohort, data)
        # Clients that have not trained send nothing, not even statistics.
        came = jnp.where(has_trained.at[:, 0].set(True), weight, 0)
        came = jnp.where(period.critical[:, None] & hparams.sparsify, came, weight)
        weights = models._replace(params=weight, stats=came)
        mean = aggregate.mix_peers(models, cohort, weights)
        is_sparse = exchange.on_all(period.critical & hparams.sparsify)
        if hparams.sparsify:
            params = sparse_mean(models.params, known["changed"], cohort, weight, mean)
            params = stacked.where(is_sparse, params, mean.params)
            mean = mean._replace(params=params)
        alike = has_trained.astype(weight.dtype)
        norm = aggregate.mix_peers(known["norm"], cohort, alike, known=mean)
        number = cohort.peer_mask.sum(1)
        sent = {"norm": number, "whole model": jnp.where(is_sparse, 0, number)}
        if hparams.sparsify:
            few = (cohort.peer_mask & has_trained[:, 1:]).sum(1)
            few = jnp.where(is_sparse, few, 0)
            sent |= {"sparse model": few, "mask": few}
        return decentralized.Mixed(
            mean,
            sent=sent,
            given=(period, norm),
            metrics={
                "peers": losses.masked_sum(number, cohort.row_mask),
                "critical": losses.masked_sum(period.critical, cohort.row_mask),
            },
        )

    def sparse_mean(
        params: types.Params,
        changed: types.Params,
        cohort: fp.Cohort,
        weight: jax.Array,
        known: fp.Variables,
    ) -> types.Params:
        """The mean of each entry over the client and the peers that sent it.

        `changed` has bools, the entries that a client sends, and `weight` f32[C, 1 + P]
        is of a client and its peers. Rows travel behind `known`.
        """
        of_peers, of_own = weight.at[:, 0].set(0), exchange.on_all(weight[:, 0])
        total, sent = aggregate.sum_held(params, changed, cohort, of_peers, known=known)
        own = exchange.take(params, cohort.row, sent)

        def mean(total: jax.Array, sent: jax.Array, own: jax.Array) -> jax.Array:
            column = stacked.column(of_own, own)
            return (total + column * own) / (sent + column)

        return jax.tree.map(mean, total, sent, own)

    def client_update(client: fp.Client, start: fp.Variables):
        """The check by its peers' norms, then E epochs that measure its own."""
        after = next_period(*client.own, hparams, most)
        objective = fp.Objective(
            loss_fn, measure=lambda grads: optax.global_norm(grads) ** 2
        )
        trained = fp.train(hparams, (objective,), start, client)
        rate = optimizer.learning_rate(hparams, client.round)
        norm = rate * trained.measured[0] / hparams.local_epochs
        changed = ()
        if hparams.sparsify:
            change = jax.tree.map(jnp.subtract, trained.params, start.params)
            changed = sparse.largest(jax.tree.map(jnp.abs, change), num_sent)
            has_step = client.plan.num_steps > 0
            changed = jax.tree.map(lambda leaf: leaf & has_step, changed)
        return trained, {"period": after, "norm": norm, "changed": changed}

    values = traffic.FLOAT_BYTES * num_sent + shapes.tree_bytes(shape.stats)
    messages = (
        fp.MessageKind("norm", "down", traffic.FLOAT_BYTES),
        fp.MessageKind("whole model", "down", shapes.tree_bytes(shape)),
        fp.MessageKind("sparse model", "down", values),
        fp.MessageKind("mask", "down", sparse.bitmap_bytes(size)),
    )
    kinds = messages if hparams.sparsify else messages[:2]
    return decentralized.make(
        hparams,
        task,
        mixed,
        client_update,
        messages=kinds,
        peers=peers,
        private=private,
        shares=("critical",),
    )


def _peers(hparams: HParams, task: fp.Task) -> types.PeerSpec:
    """As many random peers as a client ever pulls from; ValueError as in `make`."""
    if hparams.topology != "random":
        raise ValueError(
            f"--topology={hparams.topology}: criticalfl changes how many peers a "
            "client pulls from, which only random peers allow; omit it"
        )
    most = int(MOST_PEERS * (task.num_clients - 1))
    if hparams.num_peers > most:
        raise ValueError(
            f"--num_peers={hparams.num_peers}: criticalfl starts there and rises to "
            f"three quarters of the other clients, which is {most} of --num_clients="
            f"{task.num_clients}; {'lower it' if most else 'take more clients'}"
        )
    return decentralized.peer_spec(hparams)._replace(num_peers=most)
