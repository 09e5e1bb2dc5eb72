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
stratified. Public sets by data set are in `launch/config.py`; mnist_5k has 4,000 images
to give, and a run on mnist_5k itself sets a tenth of its images aside, so that its
clients are not those of other methods.
`--order=paper` is the FedD2S paper's description: private training first, then soft
labels (`--public_loss=kl`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import (
    aggregate,
    distill,
    local,
    losses,
    options,
    rng,
    rows,
    traffic,
    types,
)

LOSSES = ("mae", "mse", "kl")


@dataclasses.dataclass(frozen=True)
class HParams(options.LocalTraining):
    """FedMD's options."""

    public_examples: int = options.option(
        5000, "public images used in a round, drawn anew each time", minimum=1
    )
    digest_epochs: int = options.option(
        1, "epochs over the public images per round", minimum=1
    )
    public_loss: str = options.option(
        "mae",
        "distance to the consensus: of logits (mae, mse), or kl of mean probabilities",
        choices=LOSSES,
    )
    order: str = options.option(
        "original",
        "digest then revisit, or private training first (paper: FedD2S's description)",
        choices=("original", "paper"),
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """FedMD as pure functions; one stacked group for each architecture.

    Raises:
        ValueError: no public images.
    """
    if not task.num_proxy:
        raise ValueError(
            "fedmd has no public images; name a data set of the same image shape "
            f"{list(task.example_shape)} (--public_set) or set a share of this one "
            "aside (--proxy_fraction=0.1)"
        )
    num_public = min(hparams.public_examples, task.num_proxy)
    group_of_client = np.asarray(task.group_of_client)
    members = [
        np.flatnonzero(group_of_client == group)
        for group in range(len(task.client_models))
    ]
    slot_of_client = np.zeros(task.num_clients, np.int32)
    for ids in members:
        slot_of_client[ids] = np.arange(len(ids))
    revisit_first = hparams.order == "paper"

    def public_rows(data: types.Data, key: jax.Array) -> jax.Array:
        """The round's public images in batches, int32[n, B], -1 = padding."""
        chosen = jax.random.permutation(key, data.partition.proxy)[:num_public]
        return rows.in_batches(chosen, hparams.batch_size)

    def revisit(model: types.Model, own: Any, row: Any, shared: Any, bound: Any):
        data, key, round, _ = shared
        return local.train(
            hparams,
            (local.Objective(local.cross_entropy_loss(model)),),
            *own,
            data=data,
            client_id=row["client_id"],
            plan=row["plan"],
            bound=bound,
            key=key,
            round=round,
        )

    def answer(model: types.Model, own: Any, shared: Any, bound: jax.Array):
        """Logits on the public images, f32[>= A, Y]; probabilities for kl."""
        data, _, _, public = shared
        flat = public.reshape(-1)

        def forward(image: jax.Array) -> jax.Array:
            logits, _ = model.forward(*own, image)
            return jax.nn.softmax(logits) if hparams.public_loss == "kl" else logits

        return distill.outputs_by_sample(
            forward,
            data,
            lambda position: flat[position],
            size=flat.shape[0],
            width=task.num_classes,
            batch_size=hparams.batch_size,
            num_batches=jnp.where(bound > 0, public.shape[0], 0),
        )

    def digest(model: types.Model, own: Any, row: Any, shared: Any, bound: Any):
        (data, key, round, public), consensus = shared
        tx = local.optimizer(hparams, local.learning_rate(hparams, round))

        def loss_fn(params, stats, batch):
            logits, stats = model.forward(
                params, stats, batch.image, **batch.train_mode()
            )
            target = consensus[batch.position]
            if hparams.public_loss == "kl":
                log_target = jnp.log(jnp.maximum(target, 1e-30))
                gap = distill.kl(log_target, jax.nn.log_softmax(logits))
            elif hparams.public_loss == "mse":
                gap = ((logits - target) ** 2).mean(-1)
            else:
                gap = jnp.abs(logits - target).mean(-1)
            return losses.masked_mean(gap, batch.mask), stats

        return distill.fit(
            loss_fn,
            tx,
            *own,
            data=data,
            batches=public,
            epochs=hparams.digest_epochs,
            key=rng.stream(key, rng.Tag.LOCAL_PROXY, round, row["client_id"]),
            active=bound > 0,
        )

    def before_consensus(model: types.Model):
        def update(row: Any, shared: Any, bound: jax.Array):
            own, loss = row["own"], (jnp.zeros(()), jnp.zeros((), jnp.int32))
            if revisit_first:
                trained = revisit(model, own, row, shared, bound)
                own, loss = (trained.params, trained.stats), trained.loss
            return own, loss, answer(model, own, shared, bound)

        return update

    def after_consensus(model: types.Model):
        def update(row: Any, shared: Any, bound: jax.Array):
            own, loss = digest(model, row["own"], row, shared, bound), row["loss"]
            if not revisit_first:
                trained = revisit(model, own, row, shared[0], bound)
                own, loss = (trained.params, trained.stats), trained.loss
            return own, loss

        return update

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        clients = {
            "own": tuple(
                rows.repeat(task.initial(model, key), len(ids))
                for model, ids in zip(task.client_models, members, strict=True)
            ),
            "participations": jnp.zeros(task.num_clients, jnp.int32),
        }
        return types.RoundState((), clients, key, jnp.zeros((), jnp.int32))

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        public = public_rows(data, rng.stream(state.key, rng.Tag.PUBLIC, state.round))
        shared = (data, state.key, state.round, public)
        plan, client = cohort.plans["local"], cohort.client_id
        participations = rows.take(state.clients["participations"], cohort.row) + 1
        group = rows.take(jnp.asarray(group_of_client), client)
        slot = rows.take(jnp.asarray(slot_of_client), client)
        row = {"client_id": client, "plan": plan}
        # In a group's pass the rows of other groups have no steps: a chunk without a
        # member costs nothing (on a CPU, where a chunk is one client).
        passes = []
        for number, model in enumerate(task.client_models):
            mine = cohort.row_mask & (group == number)
            at = jnp.where(mine, slot, len(members[number]))
            own = rows.take(state.clients["own"][number], at)
            num_steps = jnp.where(mine, plan.num_steps, 0)
            passes.append((number, model, mine, at, num_steps, row | {"own": own}))

        heard = cohort.row_mask
        if not revisit_first:
            experienced = heard & (participations > 1)
            heard = jnp.where(experienced.any(), experienced, heard)
        weight = heard / jnp.maximum(heard.sum(), 1)
        consensus = jnp.zeros(())
        for _, model, mine, _, num_steps, one in passes:
            one["own"], one["loss"], answers = rows.over_clients(
                before_consensus(model), task.execution
            )(one, shared, num_steps)
            consensus += aggregate.weighted_mean(answers, jnp.where(mine, weight, 0))

        own_of_group = list(state.clients["own"])
        total, count = jnp.zeros(()), jnp.zeros((), jnp.int32)
        for number, model, mine, at, num_steps, one in passes:
            own, loss = rows.over_clients(after_consensus(model), task.execution)(
                one, (shared, consensus), num_steps
            )
            own_of_group[number] = rows.put(own_of_group[number], at, own)
            part = local.pooled_loss(loss, mine)
            total, count = total + part[0], count + part[1]
        clients = {
            "own": tuple(own_of_group),
            "participations": rows.put(
                state.clients["participations"], cohort.row, participations
            ),
        }
        state = types.RoundState((), clients, state.key, state.round + 1)
        sent = jnp.ones((cohort.row.shape[0], 2), jnp.int32)
        return state, {"train_loss": (total, count)}, sent

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        return tuple(
            types.Served(
                *own, jnp.asarray(ids, jnp.int32), jnp.ones(len(ids), bool), model
            )
            for own, ids, model in zip(
                state.clients["own"], members, task.client_models, strict=True
            )
        )

    answer_bytes = num_public * task.num_classes * traffic.FLOAT_BYTES
    return types.Algorithm(
        plans=(types.PlanSpec("local", hparams.local_epochs, hparams.batch_size),),
        messages=(
            types.MessageKind("answers", "up", answer_bytes),
            types.MessageKind("consensus", "down", answer_bytes),
        ),
        init=init,
        round=round,
        serving=serving,
        server_params=lambda state: None,
        ships_proxy="unlabelled",
    )
