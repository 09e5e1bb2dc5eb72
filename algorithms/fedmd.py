"""FedMD: clients of any architecture agree on their outputs on public images.

Li, Wang: "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019
workshop, https://arxiv.org/abs/1910.03581 (Algorithm 1).

* Each client of the round sends its logits on a fresh subset of the public images.
* The server sends back their mean, the consensus.
* Digest: the client trains on the public images towards the consensus.
* Revisit: it trains on its own examples.

| paper | here |
|---|---|
| f_k(x_i^0), f~(x_i^0) | `answers`, `consensus` |
| D_0 | `--public_set` or `--proxy_fraction`; the subset has `--public_examples` |
| digest, revisit | `--digest_epochs`, `--local_epochs` |

Clients may differ in architecture: `--client_model=m1,m2,...` gives client k the
k-th name, going round; each architecture is one stacked group.

Differs from the paper: a sample of the clients takes part in a round; there is no
transfer phase on public labels before the first round (public sets here have other
classes), instead clients in their first round are left out of the consensus unless all
are new; optimizers start fresh in each digest and revisit, and the subset is not
stratified. Public sets by data set are in `launch/config/rules/none.toml`; mnist_5k has
4,000 images to give, and a run on mnist_5k itself sets a tenth of its images aside, so
that its clients are not those of other methods. With `--optimizer_state=persist` a
client's revisits share an optimizer state, its digests do not. The order of
the FedD2S paper's description (private training first) is left out.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    distances,
    each_client,
    local_training,
    losses,
    optimizer,
    options,
    proxy,
    rng,
    stacked,
    traffic,
    types,
)

option = options.option
NOWHERE = 2**31 - 1  # past the end of any group's private rows


@dataclasses.dataclass(frozen=True)
class HParams(local_training.LocalTraining):
    """FedMD's options."""

    public_examples: int = option(
        5000, "public images used in a round, drawn anew each time", minimum=1
    )
    digest_epochs: int = option(1, "epochs over the public images per round", minimum=1)
    public_loss: str = option(
        "mae",
        "distance to the consensus: of logits (mae), or kl of mean probabilities",
        choices=("mae", "kl"),
    )


def consensus_gap(
    kind: str, logits: jax.Array, consensus: jax.Array, mask: jax.Array
) -> jax.Array:
    """f32[]: how far logits f32[B, Y] are from the consensus f32[B, Y].

    For `kl` the consensus are probabilities, for `mae` logits.
    """
    if kind == "kl":
        log_target = jnp.log(jnp.maximum(consensus, 1e-30))
        gap = distances.kl(log_target, jax.nn.log_softmax(logits))
    else:
        gap = jnp.abs(logits - consensus).mean(-1)
    return losses.masked_mean(gap, mask)


def speaking(cohort: types.Cohort, participations: jax.Array) -> jax.Array:
    """Weights f32[C] of the consensus: newcomers are left out unless all are new."""
    experienced = cohort.row_mask & (participations > 1)
    heard = jnp.where(experienced.any(), experienced, cohort.row_mask)
    return heard / jnp.maximum(heard.sum(), 1)


def of_group(cohort: types.Cohort, is_member: jax.Array) -> types.Cohort:
    """The cohort with the other groups' rows idle: a chunk of them costs nothing."""
    plan = cohort.plans["local"]
    steps = plan.replace(num_steps=jnp.where(is_member, plan.num_steps, 0))
    return cohort.replace(
        row=jnp.where(is_member, cohort.row, NOWHERE),
        row_mask=is_member,
        plans={"local": steps},
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """FedMD as pure functions; one stacked group for each architecture.

    Raises:
        ValueError: no public images.
    """
    if not task.num_proxy:
        raise ValueError(
            "fedmd has no public images; name a data set of the same image shape "
            f"{list(task.example_shape)} (--public_set), set a share of this one "
            "aside (--proxy_fraction=0.1), or add proxy_row to a partition's file"
        )
    num_public = min(hparams.public_examples, task.num_proxy)
    members = [task.members(group) for group in range(len(task.client_models))]

    def public_batches(data: types.Data, key: jax.Array) -> jax.Array:
        """The round's public images in batches, int32[n, B], -1 = padding."""
        chosen = jax.random.permutation(key, data.partition.proxy)[:num_public]
        return stacked.in_batches(chosen, hparams.batch_size)

    def answer(model: types.Model, client: each_client.Client, public: jax.Array):
        """Logits on the public images, f32[>= A, Y]; probabilities for kl."""
        flat = public.reshape(-1)

        def forward(image: jax.Array) -> jax.Array:
            logits, _ = model.forward(*client.own, image)
            return jax.nn.softmax(logits) if hparams.public_loss == "kl" else logits

        answers = proxy.outputs_by_sample(
            forward,
            client.data,
            lambda position: flat[position],
            size=flat.shape[0],
            width=task.num_classes,
            batch_size=hparams.batch_size,
            num_batches=jnp.where(client.bound > 0, public.shape[0], 0),
        )
        return (), answers

    def update(model: types.Model, client: each_client.Client, shared: Any):
        """Digest: the public images towards the consensus. Revisit: the own ones."""
        public, consensus = shared

        def loss_fn(params, stats, batch):
            logits, stats = model.forward(params, stats, batch.image, **batch.mode)
            target = consensus[batch.position]
            gap = consensus_gap(hparams.public_loss, logits, target, batch.mask)
            return gap, stats

        rate = optimizer.learning_rate(hparams, client.round)
        digested = proxy.fit(
            loss_fn,
            optimizer.make(hparams, rate),
            client.own,
            data=client.data,
            batches=public,
            epochs=hparams.digest_epochs,
            key=client.stream(rng.Tag.LOCAL_PROXY),
            is_active=client.bound > 0,
        )
        supervised = local_training.cross_entropy_loss(model)
        return local_training.train(hparams, supervised, digested, client)

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        clients, kept = [], []
        for model, ids in zip(task.client_models, members, strict=True):
            start, count = task.init(model, key), len(ids)
            never = jnp.zeros(count, jnp.int32)
            own = stacked.repeat(start, count)
            clients.append({"own": own, "participations": never})
            kept.append(optimizer.kept(hparams, start.params, count))
        return types.RoundState.first((), tuple(clients), key, tuple(kept))

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        key = rng.stream(state.key, rng.Tag.PUBLIC, state.round)
        public = public_batches(data, key)
        group = stacked.take(jnp.asarray(task.group_of_client), cohort.client_id)
        participations = jnp.zeros_like(cohort.row)
        passes = []
        for number, model in enumerate(task.client_models):
            mine = of_group(cohort, cohort.row_mask & (group == number))
            private = stacked.take(state.clients[number], mine.row)
            own, count = private["own"], private["participations"] + 1
            participations = jnp.where(mine.row_mask, count, participations)
            passes.append((number, model, mine, own))

        weight = speaking(cohort, participations)
        consensus = jnp.zeros(())
        for _, model, mine, own in passes:
            _, part = each_client.update(
                functools.partial(answer, model),
                *(task, state, mine, data),
                own=own,
                shared=public,
                opt_state=(),
                reduce=jnp.where(mine.row_mask, weight, 0),
            )
            consensus += part

        clients, kept = list(state.clients), list(state.opt_state)
        total, count = jnp.zeros(()), jnp.zeros((), jnp.int32)
        for number, model, mine, own in passes:
            trained = each_client.update(
                functools.partial(update, model),
                *(task, state, mine, data),
                own=own,
                shared=(public, consensus),
                opt_state=stacked.take(kept[number], mine.row),
            )
            new = {"own": trained.variables, "participations": participations}
            clients[number] = stacked.put(clients[number], mine.row, new)
            kept[number] = stacked.put(kept[number], mine.row, trained.opt_state)
            part = trained.metrics(mine)["train_loss"]
            total, count = total + part[0], count + part[1]
        state = state.after(clients=tuple(clients), opt_state=tuple(kept))
        return state, {"train_loss": (total, count)}, {"answers": 1, "consensus": 1}

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        groups = zip(state.clients, members, task.client_models, strict=True)
        return tuple(
            types.Served.each(model, rows["own"], client_id=ids)
            for rows, ids, model in groups
        )

    size = num_public * task.num_classes * traffic.FLOAT_BYTES
    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        messages=(
            types.MessageKind("answers", "up", size),
            types.MessageKind("consensus", "down", size),
        ),
        init=init,
        round=round,
        serving=serving,
        ships_proxy="unlabelled",
    )
