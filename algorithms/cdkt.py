"""CDKT-FL: clients and server teach each other on a small labelled proxy set.

Nguyen, Tran, Nguyen, Hong: "CDKT-FL: Cross-device knowledge transfer using proxy
dataset in federated learning", https://arxiv.org/abs/2204.01542 (Algorithm 1).

* The server computes its outputs on the proxy set and sends them.
* Each client of the round trains its own model: cross-entropy on its examples plus
  [alpha] times the distance to the server's outputs on the proxy set (Eq. 8).
* Clients send their outputs on the proxy set; the server averages them.
* The server trains its own model on the proxy set: cross-entropy plus [beta] times
  the distance to the averaged outputs (Eq. 9 to 11).

| paper | here |
|---|---|
| w_n, w_s | rows of `state.clients`, `state.server` |
| z, e | logits, embedding (the input of the last stage) |
| alpha, beta | `--client_distill_weight`, `--server_distill_weight` |
| lambda, tau | `--label_mix`, `--temperature` |
| Rep, Full, RepFull | `--transfer`: what the server learns from the clients |
| d | `--server_distance`, `--client_distance` (KL-N is kl, norm) |
| K, R, eta, gamma | `--local_epochs`, `--server_epochs`, `--client_lr`, `--server_lr` |

Differs from the paper, as its released code does: labels are mixed into the targets in
logit space (Eq. 8 means probabilities), norms are one Frobenius norm per batch
(`--norm_form=sample` is section 5.2), and in the first round clients train alone
(`--warm_rounds`). Differs from the code, as the paper says: the teacher is the mean
over the round's clients in eval mode, and proxy batches go round instead of cutting a
client's epoch short. `--preset=cdkt_code` switches these back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl import distill, local, losses, options, rng, rows, traffic, types


@dataclasses.dataclass(frozen=True)
class HParams(options.LocalTraining):
    """CDKT's options."""

    client_lr: float = options.option(
        0.03, "learning rate of the clients [eta]", minimum=0
    )
    transfer: str = options.option(
        "rep",
        "what the server learns from the clients: embeddings, logits or both",
        choices=("rep", "full", "repfull"),
    )
    server_distance: str = options.option(
        "kl", "distance of the server's fit [d]", choices=distill.DISTANCES
    )
    client_distance: str = options.option(
        "norm", "distance of the clients' distillation [d]", choices=distill.DISTANCES
    )
    client_distill_weight: float = options.option(
        0.06, "weight of the clients' distillation [alpha]", minimum=0
    )
    server_distill_weight: float = options.option(
        0.6, "weight of the server's distillation [beta]", minimum=0
    )
    label_mix: float = options.option(
        0.5, "share of the proxy labels in the targets [lambda]", minimum=0, maximum=1
    )
    temperature: float = options.option(3.0, "temperature of kl [tau]", above=0)
    server_lr: float = options.option(
        0.05, "learning rate of the server [gamma]", minimum=0
    )
    server_epochs: int = options.option(
        2, "epochs of the server over the proxy set per round [R]", minimum=1
    )
    warm_rounds: int = options.option(
        1, "first rounds in which clients do not distil", minimum=0
    )
    ensemble: str = options.option(
        "mean_selected",
        "teacher of the server; code_last is the released code's (n / K) * last",
        choices=("mean_selected", "code_last"),
    )
    teacher_mode: str = options.option(
        "eval",
        "mode of the clients' forward on the proxy set",
        choices=("eval", "train"),
    )
    proxy_pairing: str = options.option(
        "mod",
        "proxy batch of local step s: s mod their number, or stop where either ends",
        choices=("mod", "truncate"),
    )
    norm_form: str = options.option(
        "batch", "norm of a batch, or sum of samples' norms", choices=distill.NORM_FORMS
    )
    js_form: str = options.option(
        "true", "Jensen-Shannon, or with both terms reversed", choices=distill.JS_FORMS
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """CDKT as pure functions.

    Raises:
        ValueError: no proxy set, or models whose outputs differ in width.
    """
    server_model, client_model = task.server_model, task.client_model
    if not task.num_proxy:
        raise ValueError(
            "--proxy_fraction=0 leaves no proxy set, cdkt learns through one; "
            "raise it, for instance to 0.07"
        )
    width = distill.embedding_width(server_model, task.example_shape)
    client_width = distill.embedding_width(client_model, task.example_shape)
    if width != client_width:
        raise ValueError(
            f"--client_model={client_model.name} has embeddings of width "
            f"{client_width}, --model={server_model.name} of {width}; cdkt needs the "
            "same width"
        )
    logit_bytes = task.num_proxy * task.num_classes * traffic.FLOAT_BYTES
    embedding_bytes = task.num_proxy * width * traffic.FLOAT_BYTES
    use_rep = hparams.transfer in ("rep", "repfull")
    use_full = hparams.transfer in ("full", "repfull")

    def distance(kind: str, student: jax.Array, target: jax.Array, mask: jax.Array):
        return distill.distance(
            kind,
            student,
            target,
            mask,
            temperature=hparams.temperature,
            norm_form=hparams.norm_form,
            js_form=hparams.js_form,
        )

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        params, stats = task.initial(server_model, key)
        client = task.initial(client_model, key)
        return types.RoundState(
            server={"params": params, "stats": stats},
            clients=rows.repeat(client, task.num_clients),
            key=key,
            round=jnp.zeros((), jnp.int32),
        )

    def client_update(row: Any, shared: Any, bound: jax.Array):
        """Lines 3 to 7: train the client's own model, then answer on the proxy set."""
        client_id, plan, (params, stats) = row
        data, proxy, (server_logits, server_embedding), key, round = shared
        num_batches = proxy.shape[0]
        if hparams.proxy_pairing == "truncate":
            plan = plan.replace(num_steps=jnp.minimum(plan.num_steps, num_batches))
            bound = jnp.minimum(bound, num_batches)
        alpha = jnp.where(
            round < hparams.warm_rounds, 0.0, hparams.client_distill_weight
        )
        proxy_key = rng.stream(key, rng.Tag.LOCAL_PROXY, round, client_id)

        def loss_fn(params, stats, batch):
            logits, _, stats = distill.logits_and_embedding(
                client_model, params, stats, batch
            )
            private = losses.cross_entropy(logits, batch.label, batch.mask)
            paired = distill.proxy_batch(
                data,
                proxy,
                batch.step % num_batches,
                jax.random.fold_in(proxy_key, batch.step),
            )
            logits, embedding, _ = distill.logits_and_embedding(
                client_model, params, stats, paired
            )
            target = distill.mix_labels(
                server_logits[paired.step], paired.label, hparams.label_mix
            )
            gap = distance(hparams.client_distance, logits, target, paired.mask)
            if use_rep:
                target = server_embedding[paired.step]
                gap += distance(hparams.client_distance, embedding, target, paired.mask)
            return private + alpha * gap, stats

        trained = local.train(
            hparams,
            (local.Objective(loss_fn),),
            params,
            stats,
            data=data,
            client_id=client_id,
            plan=plan,
            bound=bound,
            key=key,
            round=round,
        )
        noise = None
        if hparams.teacher_mode == "train":
            noise = rng.stream(key, rng.Tag.TEACHER, round, client_id)
        answers = distill.outputs(
            client_model, trained.params, trained.stats, data, proxy, key=noise
        )
        return trained, answers

    def server_update(server: Any, teachers: Any, data: types.Data, proxy, key):
        """Lines 9 to 12: fit the server's model to labels and teachers."""
        teacher_logits, teacher_embedding = teachers

        def loss_fn(params, stats, batch):
            logits, embedding, stats = distill.logits_and_embedding(
                server_model, params, stats, batch
            )
            gap = jnp.zeros(())
            if use_rep:
                target = teacher_embedding[batch.step]
                gap += distance(hparams.server_distance, embedding, target, batch.mask)
            if use_full:
                target = distill.mix_labels(
                    teacher_logits[batch.step], batch.label, hparams.label_mix
                )
                gap += distance(hparams.server_distance, logits, target, batch.mask)
            supervised = losses.cross_entropy(logits, batch.label, batch.mask)
            return supervised + hparams.server_distill_weight * gap, stats

        params, stats = distill.fit(
            loss_fn,
            optax.sgd(hparams.server_lr),
            server["params"],
            server["stats"],
            data=data,
            batches=proxy,
            epochs=hparams.server_epochs,
            key=key,
        )
        return {"params": params, "stats": stats}

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        proxy = distill.proxy_batches(data, hparams.batch_size)
        knowledge = distill.outputs(
            server_model, state.server["params"], state.server["stats"], data, proxy
        )
        plan = cohort.plans["local"]
        trained, answers = rows.over_clients(client_update, task.execution)(
            (cohort.client_id, plan, rows.take(state.clients, cohort.row)),
            (data, proxy, knowledge, state.key, state.round),
            plan.num_steps,
        )
        teachers = tuple(
            distill.teacher(
                answer,
                cohort.client_id,
                cohort.row_mask,
                ensemble=hparams.ensemble,
                num_clients=task.num_clients,
            )
            for answer in answers
        )
        key = rng.stream(state.key, rng.Tag.SERVER, state.round)
        server = server_update(state.server, teachers, data, proxy, key)
        clients = rows.put(state.clients, cohort.row, (trained.params, trained.stats))
        metrics = {"train_loss": local.pooled_loss(trained.loss, cohort.row_mask)}
        state = types.RoundState(server, clients, state.key, state.round + 1)
        sent = jnp.array([True, use_rep, use_full, use_rep], jnp.int32)
        return state, metrics, jnp.tile(sent, (cohort.row.shape[0], 1))

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        return (task.serve(client_model, *state.clients),)

    return types.Algorithm(
        plans=(types.PlanSpec("local", hparams.local_epochs, hparams.batch_size),),
        messages=(
            types.MessageKind("server logits", "down", logit_bytes),
            types.MessageKind("server embeddings", "down", embedding_bytes),
            types.MessageKind("client logits", "up", logit_bytes),
            types.MessageKind("client embeddings", "up", embedding_bytes),
        ),
        init=init,
        round=round,
        serving=serving,
        server_params=lambda s: (server_model, s.server["params"], s.server["stats"]),
        ships_proxy="labelled",
    )
