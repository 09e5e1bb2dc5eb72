"""UA-PDFL: peers with different answers to a unit tensor share less of their models.

Zhu, Fan, Xie: "UA-PDFL: A Personalized Approach for Decentralized Federated Learning",
https://arxiv.org/abs/2412.11674 (Algorithms 1 and 2); released code Kuludu/UA-PDFL.

* Every client applies its model to the same tensor of ones: the logits are its unit
  representation, the extractor's output its auxiliary one.
* A client of the round pulls both from its peers and measures how far apart they are.
* Client-wise dropout: where all peers are alike it takes the whole model of one.
* Layer-wise personalization: otherwise it averages extractors with all its peers and
  classifiers with those that are alike.
* It trains on cross-entropy with its extractor pulled to the peers' auxiliary
  representations, and then computes its own representations again.

    I_i = h_i(g_i(X_unit)),  I_i^Aux = g_i(X_unit)
    w_i <- w_j  (of a random peer, if all are alike)
    g_i <- mean_(j in i, Q_i) g_j,  h_i <- mean_(j in i, alike_i) h_j  (otherwise)
    A_i = mean_(j in Q_i) I_j^Aux
    loss_i = CE(h_i(g_i(x)), y) + mu mean((g_i(x) - A_i)^2)

| paper | here |
|---|---|
| I, I^Aux | `representation`, private rows |
| X_unit | ones in normalised space, times `--unit_value` |
| Div, th_I | `divergence` (`--divergence`), `--divergence_threshold` |
| g, h: extractor and classifier | stages before and from `--personal_from` on |
| w_i, abs(D_j), Q_i | `state.clients["own"]`, train examples, the round's peers |
| alike_i, A_i | peers with Div(I_i, I_j) < th_I, `anchor` |
| mean_j | weighted by abs(D_j) |
| mu | `--proximal_weight`, `--proximal`, `--anchor` |
| CD, LP (Figure 13) | `--client_dropout`, `--layer_personalization` |

Differs from the paper: Div is the Jensen-Shannon divergence that the text names, not
the symmetric KL of Eqs. 6 and 7 (`--divergence=symkl`). The proximal term follows the
released code: mean squares between the extractor's output on the batch and the peers'
mean, weighted by examples. `--proximal=unit --anchor=with_own` is Eq. 12, whose
auxiliary representation on the left is recomputed in every step, since the stored one
has no gradient. mu then weighs a sum over all features and should be smaller by their
number. A peer is alike below the threshold in both branches. sigma, which the paper
does not define, is softmax. The extractor is all but the last layer, as in the released
code. The paper's text has its convolutions (`--personal_from=`), the two layers that it
counts in its CNN. The threshold, mu and the local epochs are not in the paper. Without
layer-wise personalization all layers are averaged with all peers and mu counts as 0.
Both representations count as sent, also where a run needs neither. Rounds are
synchronous, all clients start from one model (`--noshared_init`: each from its own),
and statistics of batch norm follow the extractor. A client without peers keeps its
model and is its own anchor. A client that copies a peer's model keeps its own momentum,
as in the released code. The paper does not say at which moment it measures clients
(`decentralized`): `trained_accuracy` follows a round's training, which Algorithm 2
returns, and `client_accuracy` the next mixing, which the code tests.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import (
    aggregate,
    boundary,
    decentralized,
    distances,
    losses,
    options,
    rng,
    shapes,
    stacked,
    traffic,
)
from fedjax_pfl.rows import exchange

DIVERGENCES = {"js": distances.js, "symkl": distances.symkl}
# Where the extractor is pulled to an anchor
IS_PULLED = {"proximal_weight": options.ON, "layer_personalization": (True,)}


@dataclasses.dataclass(frozen=True)
class HParams(decentralized.Peers, fp.LocalTraining):
    divergence: str = fp.option(
        "js",
        "distance of two unit representations: Jensen-Shannon, or mean of both KLs",
        choices=tuple(DIVERGENCES),
    )
    divergence_threshold: float = fp.option(
        0.1, "peers below this divergence are alike [th_I]", minimum=0
    )
    proximal_weight: float = fp.option(
        0.1,
        "pull of the extractor to the anchor [mu]",
        minimum=0,
        needs={"layer_personalization": (True,)},
        zero_is_off=True,
    )
    proximal: str = fp.option(
        "batch",
        "what is pulled: the extractor's outputs on the batch (mean squares), or its "
        "output on the unit tensor (sum of squares)",
        choices=("batch", "unit"),
        needs=IS_PULLED,
        is_noted=True,
    )
    anchor: str = fp.option(
        "peers",
        "mean of the peers' auxiliary representations by examples, or the plain mean "
        "of these and the own one",
        choices=("peers", "with_own"),
        needs=IS_PULLED,
        is_noted=True,
    )
    unit_value: float = fp.option(1.0, "value of the unit tensor, in normalised space")
    client_dropout: bool = fp.option(
        True, "take a peer's whole model where all peers are alike [CD]"
    )
    layer_personalization: bool = fp.option(
        True, "average classifiers only with peers that are alike [LP]"
    )
    personal_from: str = fp.option(
        "last",
        "first stage of the classifier, by name; last = the last one, empty = the "
        "first after the last convolution",
    )
    track_pairs: int = fp.option(
        0, "also report the divergence of each pair of the first n clients", minimum=0
    )


def drawn(key: jax.Array, cohort: fp.Cohort) -> jax.Array:
    """Slot int32[C] of one peer of each client, each with the same chance."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, cohort.client_id)
    chance = jax.vmap(lambda k: jax.random.uniform(k, cohort.peers.shape[1:]))(keys)
    pick = jnp.where(cohort.peer_mask, chance, 2.0).argmin(1)
    return jnp.take_along_axis(cohort.peers, pick[:, None], 1)[:, 0]


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """UA-PDFL as pure functions.

    Raises:
        ValueError: there is no such stage or graph, an option has no effect, or
            `--track_pairs` exceeds the clients.
    """
    _check(hparams, task)
    model, name = task.client_model, hparams.personal_from
    cut = boundary.middle(name, model, task.example_shape)
    unit = jnp.full((1, *task.example_shape), hparams.unit_value)
    divergence = DIVERGENCES[hparams.divergence]
    by_layer, weight = hparams.layer_personalization, hparams.proximal_weight
    is_pulled = by_layer and not options.is_off(weight)

    def represent(own: fp.Variables) -> dict[str, jax.Array]:
        """I f32[Y] and I^Aux f32[D]: outputs on the unit tensor, in eval mode."""
        h, _ = model.forward(*own, unit, stop=cut)
        logits, _ = model.forward(*own, h, start=cut)
        return {"answer": logits[0], "features": h.reshape(-1)}

    def mixed(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        """Algorithm 1, with what peers had at the end of the last round."""
        known, rows = state.clients["private"], state.clients["own"]
        source, _ = aggregate.sources(cohort)
        answers, cohort = decentralized.fetch_rows(known["answer"], source, cohort)
        gap = divergence(answers[:, :1], answers[:, 1:])
        alike = (gap < hparams.divergence_threshold) & cohort.peer_mask
        drop = (alike == cohort.peer_mask).all(1) & cohort.peer_mask.any(1)
        drop = exchange.on_all(drop & hparams.client_dropout)

        size = decentralized.weights("examples", cohort, data)
        shared = jnp.pad(alike, ((0, 0), (1, 0)), constant_values=True)
        head = size * shared if by_layer else size
        own = decentralized.mix(rows, cohort, cut, size, head)
        key = rng.stream(state.key, "decentralized.replaced", state.round)
        replaced = exchange.take(rows, drawn(key, cohort), own)
        return decentralized.Mixed(
            stacked.where(drop, replaced, own),
            sent=sent(drop, alike, cohort),
            given=anchor(known, size, cohort, replaced),
            metrics=metrics(known["answer"], gap, drop, cohort),
        )

    def anchor(
        known: dict[str, jax.Array],
        size: jax.Array,
        cohort: fp.Cohort,
        behind: fp.Variables,
    ) -> jax.Array:
        """A_i f32[C, D], to which the extractor is pulled. Without peers, its own.

        `size` f32[C, 1 + P] are train examples. Rows travel behind `behind`.
        """
        with_own = hparams.anchor == "with_own"
        weight = jnp.ones_like(size) if with_own else size.at[:, 0].set(0)
        features = known["features"]
        return aggregate.mix_peers(features, cohort, weight, known=behind)

    def metrics(
        answer: jax.Array, gap: jax.Array, drop: jax.Array, cohort: fp.Cohort
    ) -> dict[str, losses.Pair]:
        """Clients that dropped, and divergences over peer pairs and tracked pairs.

        `answer` f32[K, Y], `gap` f32[C, P] and `drop` bool[C].
        """
        known = jnp.where(cohort.peer_mask & cohort.row_mask[:, None], gap, jnp.nan)
        found = {"dropped": losses.masked_sum(drop, cohort.row_mask)}
        for name, share in (("median", 0.5), ("p95", 0.95)):
            value = jnp.nanquantile(known, share)
            is_known = jnp.isfinite(value).astype(value.dtype)
            found[f"divergence_{name}"] = (jnp.nan_to_num(value), is_known)
        for i, j in itertools.combinations(range(hparams.track_pairs), 2):
            found[f"divergence_{i}_{j}"] = (divergence(answer[i], answer[j]), 1)
        return found

    def sent(
        drop: jax.Array, alike: jax.Array, cohort: fp.Cohort
    ) -> dict[str, jax.Array]:
        """Messages received, by kind: int32[C]."""
        every, mixes = cohort.peer_mask.sum(1), ~drop
        heads = alike.sum(1) if by_layer else every
        pulled = {"extractor": mixes * every, "classifier": mixes * heads}
        asked = {"representation": every, "auxiliary": every}
        return asked | pulled | {"whole model": drop}

    def client_update(client: fp.Client, start: fp.Variables):
        """Algorithm 2: cross-entropy, and the extractor pulled to the anchor."""

        def loss_fn(params, stats, batch):
            h, stats = model.forward(params, stats, batch.image, stop=cut, **batch.mode)
            logits, stats = model.forward(params, stats, h, start=cut, **batch.mode)
            loss = losses.cross_entropy(logits, batch.label, batch.mask)
            if is_pulled:
                loss += weight * pull(params, stats, h, client.own, batch.mask)
            return loss, stats

        trained = fp.train(hparams, loss_fn, start, client)
        return trained, represent(trained.variables)

    def pull(params, stats, h, anchor, mask):
        """The proximal term: the code's on the batch, Eq. 12's on the unit tensor."""
        if hparams.proximal == "batch":
            gap = (h.reshape(len(h), -1) - anchor) ** 2
            return losses.masked_mean(gap.mean(1), mask)
        stats = jax.lax.stop_gradient(stats)
        features, _ = model.forward(params, stats, unit, stop=cut)
        return ((features.reshape(-1) - anchor) ** 2).sum()

    made = decentralized.make(
        hparams,
        task,
        mixed,
        client_update,
        messages=_messages(task, cut),
        private=represent,
        shares=("dropped",),
    )
    unused = {}
    if not (hparams.client_dropout or by_layer):
        reason = "with --noclient_dropout and --nolayer_personalization"
        unused["divergence_threshold"] = reason
    if options.is_off(hparams.divergence_threshold):
        unused["client_dropout"] = "as no divergence is below --divergence_threshold=0"
    return made._replace(unused=unused)


def _messages(task: fp.Task, cut: int) -> tuple[fp.MessageKind, ...]:
    """What one peer sends: both representations, and parts of its model."""
    model, shape = task.client_model, task.example_shape
    extractor, classifier = decentralized.part_bytes(task, cut)
    kind = functools.partial(fp.MessageKind, direction="down")
    return (
        kind("representation", num_bytes=task.num_classes * traffic.FLOAT_BYTES),
        kind("auxiliary", num_bytes=shapes.output_bytes(model, shape)[cut - 1]),
        kind("whole model", num_bytes=extractor + classifier),
        kind("extractor", num_bytes=extractor),
        kind("classifier", num_bytes=classifier),
    )


def _check(hparams: HParams, task: fp.Task) -> None:
    """Refuses other numbers of tracked clients, and rows that no one device has."""
    pairs, most = hparams.track_pairs, task.num_clients
    if pairs == 1 or pairs > most:
        raise ValueError(f"--track_pairs={pairs}: expected 0, or 2 to {most} clients")
    where = ""
    if task.num_rows < most:
        where = "--client_state leaves on the host; omit one of them"
    elif task.execution.shares_rows:
        where = "are on several devices; take --client_state=replicated or --devices=1"
    if pairs and where:
        raise ValueError(
            f"--track_pairs={pairs} reads the same clients in every round, which "
            f"{where}"
        )
