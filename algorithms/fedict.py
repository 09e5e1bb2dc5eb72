"""FedICT: clients and a server behind their first layer distil into each other.

Wu, Sun, Wang, Liu, Xu, Wang, et al.: "FedICT: Federated Multi-task Distillation for
Multi-access Edge Computing", IEEE TPDS 2023, https://arxiv.org/abs/2301.00389;
released code wuzhiyuan2000/FedICT.

* Each client of the round trains on cross-entropy and uploads its features, logits
  and labels, and once its label frequencies.
* The server trains its deeper layers on the features, one client after another:
  cross-entropy towards labels plus distillation towards the client's logits.
* Its logits go back; the client trains on cross-entropy plus distillation towards
  them, weighted by its own label frequencies.

| code | here |
|---|---|
| alpha, T | `--distill_weight`, `--temperature` |
| d^n, d^g | label frequencies of a client, of all |
| FPKD, T of it | `client_gap`, `--prior_temperature` |
| LKA, U | `server_gap`, `--label_adjustment`, `--balance_temperature` |

D(w) below is mean_b T^2 sum_c w_c q_c log(q_c / p_c), q the teacher, p the student.

Differs from the paper: it was not at hand; this follows the released code in the
order that the FedD2S paper describes (local training, upload, server, distillation
back). In the code teacher and student see different samples, since both passes shuffle
and the teacher is looked up by batch number, and its KL applies softmax twice; here
tables are aligned by sample, with one softmax. Its order with the previous round's
logits is left out. The server knows the label frequencies of all clients from the
start, and a client's optimizer starts fresh in each of its two phases.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    aggregate,
    distill,
    local,
    losses,
    masks,
    options,
    rng,
    rows,
    traffic,
    types,
)


@dataclasses.dataclass(frozen=True)
class HParams(options.LocalTraining):
    """FedICT's options."""

    distill_epochs: int = options.option(
        2, "epochs of the clients' distillation per round", minimum=1
    )
    server_epochs: int = options.option(
        2, "epochs of the server over a client's features per round", minimum=1
    )
    distill_weight: float = options.option(
        1.5,
        "weight of distillation at clients, of cross-entropy at the server [alpha]",
        minimum=0,
    )
    temperature: float = options.option(3.0, "temperature of distillation [T]", above=0)
    prior_temperature: float = options.option(
        3.0, "divides a client's label frequencies in its distance", above=0
    )
    label_adjustment: str = options.option(
        "sim",
        "how label frequencies enter the server's distance [LKA]",
        choices=("sim", "balance"),
    )
    balance_temperature: float = options.option(
        7.0, "divides the difference of frequencies in `balance` [U]", above=0
    )
    upload_layer: int = options.option(
        1, "layer whose outputs are uploaded, counted from 1", minimum=1
    )
    server_pass: str = options.option(
        "sequential",
        "one server model, client after client, or the mean of a copy for each",
        choices=("sequential", "averaged"),
    )
    distill_scope: str = options.option(
        "all",
        "stages of a client that its distillation trains",
        choices=("all", "classifier"),
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """FedICT as pure functions.

    Raises:
        ValueError: no layer is left for the server.
    """
    model, cut = task.model, hparams.upload_layer
    num_stages = len(model.stage_names)
    if cut >= num_stages:
        raise ValueError(
            f"--upload_layer={cut} leaves no layer of --model={model.name} "
            f"({num_stages} layers) to the server; lower it"
        )
    deep = jnp.arange(num_stages) >= cut
    supervised = local.cross_entropy_loss(model)

    def weighted_gap(student: Any, teacher: Any, mask: Any, weight: Any) -> jax.Array:
        """D(w) f32[]; logits f32[B, Y], weight f32[Y] or f32[]."""
        tau = hparams.temperature
        log_q, log_p = (jax.nn.log_softmax(z / tau) for z in (teacher, student))
        rows_gap = (weight * jnp.exp(log_q) * (log_q - log_p)).sum(-1)
        return tau**2 * losses.masked_mean(rows_gap, mask)

    def client_gap(student: Any, teacher: Any, mask: Any, own: Any) -> jax.Array:
        """FPKD: KL plus D(d^n / T)."""
        return weighted_gap(student, teacher, mask, 1 + own / hparams.prior_temperature)

    def server_gap(student: Any, teacher: Any, mask: Any, own: Any, all_: Any):
        """LKA: D(cos(d^g, d^n)), or KL plus D((d^g - d^n) / U)."""
        if hparams.label_adjustment == "sim":
            size = jnp.linalg.norm(own) * jnp.linalg.norm(all_)
            weight = (own @ all_) / jnp.maximum(size, 1e-12)
        else:
            weight = 1 + (all_ - own) / hparams.balance_temperature
        return weighted_gap(student, teacher, mask, weight)

    def answers(forward: Any, row: Any, data: types.Data, num_batches: Any):
        """Logits f32[>= K, Y] on a client's train rows, aligned by sample."""
        return distill.own_outputs(
            forward,
            data,
            row["client_id"],
            task,
            batch_size=hparams.batch_size,
            num_batches=num_batches,
        )

    def extract(own: Any, image: jax.Array) -> jax.Array:
        """The uploaded features."""
        return model.forward(*own, image, stop=cut)[0]

    def train(objective: Any, start: Any, row: Any, shared: Any, bound: Any, **more):
        data, key, round = shared["data"], shared["key"], shared["round"]
        return local.train(
            hparams,
            (objective,),
            *start,
            data=data,
            client_id=row["client_id"],
            plan=row["plan"],
            bound=bound,
            key=key,
            round=round,
            **more,
        )

    def local_update(row: Any, shared: Any, bound: jax.Array):
        """(i) and (ii): train on cross-entropy, then answer on all own examples."""
        trained = train(local.Objective(supervised), row["own"], row, shared, bound)
        source = (trained.params, trained.stats)
        logits = answers(
            lambda image: model.forward(*source, image)[0],
            row,
            shared["data"],
            bound // hparams.local_epochs,
        )
        return trained, logits

    def server_update(server: Any, row: Any, shared: Any, bound: Any, **more: Any):
        """(iii): the server's layers learn from one client's features and logits."""

        def loss_fn(params, stats, batch):
            logits, stats = model.forward(
                params,
                stats,
                extract(row["own"], batch.image),
                start=cut,
                **batch.train_mode(),
            )
            gap = server_gap(
                logits,
                row["logits"][batch.position],
                batch.mask,
                row["frequency"],
                shared["frequency"],
            )
            hard = losses.cross_entropy(logits, batch.label, batch.mask)
            return gap + hparams.distill_weight * hard, stats

        objective = local.Objective(loss_fn, deep)
        return train(objective, server, row, shared, bound, tag=rng.Tag.SERVER, **more)

    def sequential(server: Any, cohort_rows: Any, shared: Any, cohort: types.Cohort):
        """One server model, client after client in an order drawn by client."""
        key = rng.stream(shared["key"], rng.Tag.ORDER, shared["round"])
        draws = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(key, k)))
        order = jnp.argsort(jnp.where(cohort.row_mask, draws(cohort.client_id), 2.0))
        tx = local.optimizer(hparams, local.learning_rate(hparams, shared["round"]))

        def step(index: jax.Array, carry: Any) -> Any:
            server, opt_state = carry
            row = rows.take(cohort_rows, order[index])
            num_steps = jnp.where(
                cohort.row_mask[order[index]], row["plan"].num_steps, 0
            )
            trained = server_update(server, row, shared, num_steps, opt_state=opt_state)
            return (trained.params, trained.stats), trained.opt_state

        start = (server, local.init_optimizer(tx, server[0]))
        return jax.lax.fori_loop(0, order.shape[0], step, start)[0]

    def averaged(server: Any, cohort_rows: Any, shared: Any, cohort: types.Cohort):
        """A copy of the server for each client, then their mean."""
        copies = rows.over_clients(
            lambda row, shared, bound: server_update(
                shared["server"], row, shared, bound
            ),
            task.execution,
        )(cohort_rows, shared | {"server": server}, cohort_rows["plan"].num_steps)
        weight = aggregate.weights("uniform", cohort.row, cohort.row_mask)
        held = jnp.broadcast_to(deep, (cohort.row.shape[0], num_stages))
        return aggregate.stagewise_means(
            (copies.params, copies.stats), weight, held, server
        )

    def distil_update(row: Any, shared: Any, bound: jax.Array) -> local.Trained:
        """(iv) and (v): the server's logits come back, the client distils them."""
        own, server = row["own"], shared["server"]
        teacher = answers(
            lambda image: model.forward(*server, extract(own, image), start=cut)[0],
            row,
            shared["data"],
            bound // hparams.distill_epochs,
        )

        def loss_fn(params, stats, batch):
            mode = batch.train_mode()
            hard_logits, stats = model.forward(params, stats, batch.image, **mode)
            logits = hard_logits
            if hparams.distill_scope == "classifier":
                fixed = masks.splice(params, params, deep)
                logits, _ = model.forward(fixed, stats, batch.image, **mode)
            gap = client_gap(
                logits, teacher[batch.position], batch.mask, row["frequency"]
            )
            hard = losses.cross_entropy(hard_logits, batch.label, batch.mask)
            return hard + hparams.distill_weight * gap, stats

        return train(
            local.Objective(loss_fn), own, row, shared, bound, tag=rng.Tag.TEACHER
        )

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        model_state = task.initial(model, key)
        counts = data.label_counts(task.num_classes)
        clients = {
            "own": rows.repeat(model_state, task.num_clients),
            "frequency": counts / jnp.maximum(counts.sum(1, keepdims=True), 1),
            "has_joined": jnp.zeros(task.num_clients, bool),
        }
        server = {
            "model": model_state,
            "frequency": counts.sum(0) / jnp.maximum(counts.sum(), 1),
        }
        return types.RoundState(server, clients, key, jnp.zeros((), jnp.int32))

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        private = rows.take(state.clients, cohort.row)
        shared = {
            "data": data,
            "key": state.key,
            "round": state.round,
            "frequency": state.server["frequency"],
        }
        row = {"client_id": cohort.client_id, "frequency": private["frequency"]}

        plan = cohort.plans["local"]
        trained, logits = rows.over_clients(local_update, task.execution)(
            row | {"own": private["own"], "plan": plan}, shared, plan.num_steps
        )
        row["own"] = (trained.params, trained.stats)

        server_pass = sequential if hparams.server_pass == "sequential" else averaged
        server_rows = row | {"logits": logits, "plan": cohort.plans["server"]}
        server = server_pass(state.server["model"], server_rows, shared, cohort)

        plan = cohort.plans["distill"]
        trained = rows.over_clients(distil_update, task.execution)(
            row | {"plan": plan}, shared | {"server": server}, plan.num_steps
        )
        clients = rows.put(
            state.clients,
            cohort.row,
            {
                "own": (trained.params, trained.stats),
                "frequency": private["frequency"],
                "has_joined": jnp.ones_like(private["has_joined"]),
            },
        )
        metrics = {"train_loss": local.pooled_loss(trained.loss, cohort.row_mask)}
        num_examples = rows.take(data.partition.train.count, cohort.client_id)
        first_time = ~private["has_joined"]
        sent = jnp.stack([num_examples, first_time, num_examples], axis=1)
        state = types.RoundState(
            state.server | {"model": server}, clients, state.key, state.round + 1
        )
        return state, metrics, sent.astype(jnp.int32)

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        return (task.serve(model, *state.clients["own"]),)

    logit_bytes = task.num_classes * traffic.FLOAT_BYTES
    feature_bytes = traffic.output_bytes(model, task.example_shape)[cut - 1]
    return types.Algorithm(
        plans=(
            types.PlanSpec("local", hparams.local_epochs, hparams.batch_size),
            types.PlanSpec("server", hparams.server_epochs, hparams.batch_size),
            types.PlanSpec("distill", hparams.distill_epochs, hparams.batch_size),
        ),
        messages=(
            types.MessageKind(
                "features, logits and label", "up", feature_bytes + logit_bytes + 1
            ),
            types.MessageKind("label frequencies", "up", logit_bytes),
            types.MessageKind("server logits", "down", logit_bytes),
        ),
        init=init,
        round=round,
        serving=serving,
        # Its first layers are the clients': the server has no model of its own.
        server_params=lambda state: None,
    )
