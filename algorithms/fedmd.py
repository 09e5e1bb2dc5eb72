"""FedMD: clients of any architecture agree on their outputs on public images.

Li, Wang: "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019
workshop, https://arxiv.org/abs/1910.03581 (Algorithm 1).

* Each client of the round sends its logits on a fresh subset of the public images.
* The server sends back their mean, the consensus.
* Digest: the client trains on the public images towards the consensus.
* Revisit: it trains on its own examples.

    ftilde(x) = mean_(k in S) f_k(x),  x in D_0
    digest_k = mean_(x in D_0) abs(f_k(x) - ftilde(x))
    revisit_k = CE(f_k(x), y),  x in D_k

| paper | here |
|---|---|
| f_k(x), ftilde(x) on D_0 | `answers`, `consensus` (of logits, or `--public_loss=kl`) |
| D_0 | `--public_set` or `--proxy_fraction`; the subset has `--public_examples` |
| digest_k, revisit_k | the losses of `--digest_epochs`, of `--local_epochs` |

Clients may differ in architecture: `--client_model=m1,m2,...` gives client k the k-th
name, cyclically. Each architecture is one stacked group.

Differs from the paper: a sample of the clients takes part in a round. There is no
transfer phase on public labels before the first round, because most public sets here
have other classes. Instead clients in their first round are left out of the consensus
unless all are new. Optimizers start fresh in each digest and revisit, unless
`--optimizer_state=persist` continues one over a client's revisits. The subset is not
stratified. Logits within 1e-5 of the consensus count as equal: as all clients of an
architecture begin with one model, their first differences are of rounding, of which the
absolute error would make steps of full size. `launch/config/rules/none.toml` has the
public sets by data set. mnist_5k gives 4,000 images, and a run on mnist_5k sets a tenth
of its own aside, so its clients are not those of other methods. The order of the FedD2S
paper's description (private training first) is left out.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import (
    distances,
    losses,
    optimizer,
    proxy,
    rng,
    shapes,
    stacked,
    traffic,
    types,
)

ROUNDING = 1e-5  # logits that differ by less are equal


@dataclasses.dataclass(frozen=True)
class HParams(fp.LocalTraining):
    public_examples: int = fp.option(
        5000, "public images of a round, drawn again in each round", minimum=1
    )
    digest_epochs: int = fp.option(
        1, "epochs over the public images per round", minimum=1
    )
    public_loss: str = fp.option(
        "mae",
        "distance to the consensus: of logits (mae), or kl of mean probabilities",
        choices=("mae", "kl"),
    )


def consensus_gap(
    kind: str, logits: jax.Array, consensus: jax.Array, mask: jax.Array
) -> jax.Array:
    """f32[]: how far logits f32[B, Y] are from the consensus f32[B, Y].

    The consensus has probabilities for `kl` and logits for `mae`.
    """
    if kind == "kl":
        log_target = jnp.log(jnp.maximum(consensus, 1e-30))
        gap = distances.kl(log_target, jax.nn.log_softmax(logits))
    else:
        gap = logits - consensus
        gap = jnp.abs(jnp.where(jnp.abs(gap) > ROUNDING, gap, 0)).mean(-1)
    return losses.masked_mean(gap, mask)


def consensus_weights(cohort: fp.Cohort, participations: jax.Array) -> jax.Array:
    """Weights f32[C] of the consensus: newcomers are left out unless all are new."""
    experienced = cohort.row_mask & (participations > 1)
    heard = jnp.where(experienced.any(), experienced, cohort.row_mask)
    return heard / jnp.maximum(heard.sum(), 1)


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Makes FedMD, a group per architecture; raises ValueError if nothing is public."""
    proxy.check_public("fedmd", task)
    num_public = min(hparams.public_examples, task.num_proxy)
    members = [task.members(group) for group in range(len(task.client_models))]

    def answer(client: fp.Client, public: jax.Array):
        """Logits on the public images, f32[>= A, Y]; probabilities for kl."""

        def forward(image: jax.Array) -> jax.Array:
            logits, _ = client.model.forward(*client.own["own"], image)
            return jax.nn.softmax(logits) if hparams.public_loss == "kl" else logits

        return (), proxy.shared_outputs(forward, client, public, task.num_classes)

    def client_update(client: fp.Client, shared: tuple[jax.Array, jax.Array]):
        """Digest: public images towards the consensus. Revisit: its own examples."""
        model, (public, consensus) = client.model, shared

        def loss_fn(params, stats, batch):
            logits, stats = model.forward(params, stats, batch.image, **batch.mode)
            target = consensus[batch.position]
            gap = consensus_gap(hparams.public_loss, logits, target, batch.mask)
            return gap, stats

        digested = proxy.fit(
            loss_fn,
            optimizer.make(hparams, optimizer.learning_rate(hparams, client.round)),
            client.own["own"],
            data=client.data,
            batches=public,
            epochs=hparams.digest_epochs,
            key=client.stream("proxy.local_proxy"),
            clip_norm=hparams.clip_norm,
            is_active=client.is_here,
        )
        supervised = fp.cross_entropy_loss(model)
        return fp.train(hparams, supervised, digested, client)

    def init(data: fp.Data, key: jax.Array) -> fp.RoundState:
        def first(model: types.Model, count: int) -> dict[str, Any]:
            own = stacked.repeat(task.init(model, key), count)
            return {"own": own, "participations": jnp.zeros(count, jnp.int32)}

        clients = tuple(map(first, task.client_models, map(len, members)))
        return fp.RoundState.first((), clients, key)

    def round(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        """Algorithm 1: answers, their mean, digest and revisit."""
        here = fp.Round(task, state, cohort, data, by_architecture=True)
        key = rng.stream(state.key, "proxy.public", state.round)
        chosen = jax.random.permutation(key, data.partition.proxy)[:num_public]
        size = shapes.capped(hparams.batch_size, len(chosen))
        public = stacked.in_batches(chosen, size)
        own = here.rows
        participations = sum(
            jnp.where(mine.cohort.row_mask, rows["participations"] + 1, 0)
            for mine, rows in zip(here.groups, own, strict=True)
        )
        weight = consensus_weights(cohort, participations)
        _, consensus, here = here.update(answer, own=own, shared=public, reduce=weight)
        taught = public, consensus
        trained, here = here.update(client_update, own=own, shared=taught)
        rows = [
            {"own": one.variables, "participations": participations} for one in trained
        ]
        return here.after(rows), here.metrics(trained), {"answers": 1, "consensus": 1}

    def serving(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        return fp.Serving.by_architecture(task, [rows["own"] for rows in state.clients])

    size = num_public * task.num_classes * traffic.FLOAT_BYTES
    is_larger = hparams.public_examples > task.num_proxy
    reason = f"as all {task.num_proxy} public images are used in each round"
    return fp.Algorithm(
        plans=(fp.plan(hparams),),
        messages=(
            fp.MessageKind("answers", "up", size),
            fp.MessageKind("consensus", "down", size),
        ),
        init=init,
        round=round,
        serving=serving,
        ships_proxy="unlabelled",
        by_architecture=True,
        unused={"public_examples": reason} if is_larger else {},
    )
