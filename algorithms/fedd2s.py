"""FedD2S: data-free distillation whose layer moves from deep to shallow.

Atapour, Seyedmohammadi, Abouei, Mohammadi, Plataniotis: "FedD2S: Personalized
Data-Free Federated Knowledge Distillation", https://arxiv.org/abs/2402.10846
(Algorithm 1).

* A client of the round uploads the outputs of its first layer, of its distillation
  layer l, and the labels of its examples. l starts at the last layer and is dropped
  towards `--min_layer`, one layer every Z0 participations.
* For each client the server trains a copy of its model on the first layer's outputs:
  a distillation step towards the client's knowledge, then a supervised one.
* The copies are averaged; the mean's soft targets go back with its layers after l.
* The client trains: a distillation step on layers 1..l through the server's head, then
  a supervised one on all layers.

| paper | here |
|---|---|
| theta^n, theta^g, phi^n | `state.clients["own"]`, `state.server`, its copies |
| l_n, Z, Z0 | the boundary of `kept`, `participations`, `--drop_every` |
| H_1, H_l | what the stages below a boundary put out; never stored |
| p, t | `teacher`, tables of logits aligned by sample |
| J, Q (C2S, S2C; Eqs. 9, 10, 12, 13) | `distil` and `supervised` objectives |
| E | `--local_epochs` and `--server_epochs` |
| MSE on feature maps (Table 3) | `--transfer=mse` |
| FedD2S* (Fig. 5) | `--fixed_layer=3` |

Differs from the paper: theta_{+l} is [theta_{l+1}..theta_L], since layer l's output
cannot enter layer l; the schedule of Eq. 6 stops at `--min_layer`; the mean is over
the round's clients (Algorithm 1), not over all (Eq. 11); the server's head is sent, as
Eq. 12 needs it, in place of v; the KL target is the teacher. J is off at l = 1: at the
start of a round both sides are equal there, and Adam would step on rounding noise. The
server's first layer is never used. Left out, as serving nobody: literal Eq. 9 with a
gradient through its target, means over clients that left, independent initialisations,
KL on the last layer of the MSE variant, and sets of `removed` layers (`--min_layer`
says the same).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import (
    aggregate,
    boundary,
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
class HParams(options.LayerDropping, options.LocalTraining):
    """FedD2S's options."""

    server_epochs: int = options.option(
        2, "epochs of the server's copies over a client's examples [E]", minimum=1
    )
    transfer: str = options.option(
        "head",
        "distil outputs through the other side's head, or features by squared error",
        choices=("head", "mse"),
    )
    fixed_layer: int = options.option(
        0,
        "boundary of all clients in all rounds, counted from 1; 0 = scheduled",
        minimum=0,
    )
    temperature: float = options.option(1.0, "temperature of kl [tau]", above=0)
    kl: str = options.option(
        "forward",
        "KL(teacher || student), or reversed as printed in Eqs. 9 and 12",
        choices=("forward", "reverse"),
    )
    teacher_head: str = options.option(
        "frozen",
        "head behind the clients' features: the server's before the round, or the copy "
        "as it is being trained",
        choices=("frozen", "live"),
    )
    s2c_head: str = options.option(
        "global",
        "head behind the clients' layers while they distil: the server's, or their own "
        "as it was before the round",
        choices=("global", "own"),
    )
    updates: str = options.option(
        "sequential",
        "a distillation step and then a supervised one, or one step on their sum",
        choices=("sequential", "joint"),
    )
    optimizer_state: str = options.option(
        "reset",
        "the clients' optimizer state between their rounds",
        choices=("reset", "persist"),
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """FedD2S as pure functions.

    Raises:
        ValueError: the model does not have the boundary asked for.
    """
    model = task.model
    num_stages = len(model.stage_names)
    if num_stages < 2:
        raise ValueError(
            f"--model={model.name} has one layer; fedd2s shares features of the first "
            "with the layers behind it, take a deeper model"
        )
    lowest = _lowest(hparams, task)
    if hparams.transfer == "mse":
        of_head = ("kl", "temperature", "teacher_head", "s2c_head")
        options.refuse(hparams, of_head, "with --transfer=mse")
    by_head = hparams.transfer == "head"
    persist = hparams.optimizer_state == "persist"
    deep = np.arange(num_stages) > 0

    def kept_stages(participations: jax.Array) -> jax.Array:
        """Eq. 6: bool[..., L], the stages 1..l of Z int32[...] participations."""
        return boundary.stages_below(
            participations,
            moves=not hparams.fixed_layer,
            every=hparams.drop_every,
            num_stages=num_stages,
            lowest=lowest,
        )

    def output_gap(student: jax.Array, target: jax.Array, mask: jax.Array):
        """J of `--transfer=head`: KL between logits f32[B, Y]; the target is fixed."""
        tau = hparams.temperature
        log_target = jax.nn.log_softmax(jax.lax.stop_gradient(target) / tau)
        log_student = jax.nn.log_softmax(student / tau)
        pair = (log_target, log_student)
        pair = pair if hparams.kl == "forward" else pair[::-1]
        return tau**2 * losses.masked_mean(distill.kl(*pair), mask)

    def feature_gap(student: Any, target: Any, kept: jax.Array, mask: jax.Array):
        """J of `--transfer=mse`: squared error of the outputs of stage l."""
        total = jnp.zeros(())
        for stage in range(max(lowest - 1, 1), num_stages):
            gap = student[stage] - jax.lax.stop_gradient(target[stage])
            error = losses.masked_mean((gap.reshape(len(gap), -1) ** 2).mean(1), mask)
            total += jnp.where(kept.sum() == stage + 1, error, 0)
        return total

    def features(side: Any, h: jax.Array, start: int, **mode: Any):
        """Outputs of the stages from `start` on, by stage, and the new statistics."""
        params, stats = side
        out = {}
        for stage in range(start, num_stages):
            h, stats = model.forward(
                params, stats, h, start=stage, stop=stage + 1, **mode
            )
            out[stage] = h
        return out, stats

    def first_layer(own: Any, image: jax.Array) -> jax.Array:
        """H_1, as the client uploads it."""
        return model.forward(*own, image, stop=1)[0]

    def behind_first(side: Any, h: jax.Array) -> jax.Array:
        """Logits of the layers behind the first, in eval mode."""
        return model.forward(*side, h, start=1)[0]

    def spliced(own: Any, head: Any, kept: jax.Array) -> Any:
        """(params, stats) of the layers 1..l of `own` and those after l of `head`."""
        return tuple(masks.splice(o, h, kept) for o, h in zip(own, head, strict=True))

    def knowledge(forward: Any, row: Any, data: types.Data, bound: Any, epochs: int):
        """p or t: logits f32[>= K, Y] on a client's examples, aligned by sample."""
        return distill.own_outputs(
            forward,
            data,
            row["client_id"],
            task,
            batch_size=hparams.batch_size,
            num_batches=bound // epochs,
        )

    def steps(distil: Any, supervised: Any, distilled: jax.Array, trained: Any):
        """J on the stages `distilled`, Q on the stages `trained`."""
        if hparams.updates == "sequential":
            return (
                local.Objective(distil, distilled),
                local.Objective(supervised, trained),
            )

        def joint(params, stats, batch):
            gap, _ = distil(params, stats, batch)
            loss, stats = supervised(params, stats, batch)
            return loss + jnp.where(distilled.any(), gap, 0), stats

        return (local.Objective(joint, trained),)

    def client_to_server(row: Any, shared: Any, bound: jax.Array) -> local.Trained:
        """phi^n: a copy of the server's model learns from one client (Eqs. 8 to 10)."""
        data, server, key, round = shared
        own, kept = row["own"], row["kept"]
        is_live = hparams.teacher_head == "live"
        if by_head and not is_live:
            source = spliced(own, server, kept)
            teacher = knowledge(
                lambda image: model.forward(*source, image)[0],
                row,
                data,
                bound,
                hparams.server_epochs,
            )

        def distil(params, stats, batch):
            h, mode = first_layer(own, batch.image), batch.train_mode()
            if not by_head:
                student, stats = features((params, stats), h, 1, **mode)
                target, _ = features(own, h, 1)
                return feature_gap(student, target, kept, batch.mask), stats
            if is_live:
                source = spliced(own, (params, stats), kept)
                target, _ = model.forward(*source, batch.image)
            else:
                target = teacher[batch.position]
            logits, stats = model.forward(params, stats, h, start=1, **mode)
            return output_gap(logits, target, batch.mask), stats

        def supervised(params, stats, batch):
            h, mode = first_layer(own, batch.image), batch.train_mode()
            logits, stats = model.forward(params, stats, h, start=1, **mode)
            return losses.cross_entropy(logits, batch.label, batch.mask), stats

        distilled = deep & kept[1]  # l = 1: no J
        if not by_head:
            distilled = distilled & kept
        return local.train(
            hparams,
            steps(distil, supervised, distilled, deep),
            *server,
            data=data,
            client_id=row["client_id"],
            plan=row["plan"],
            bound=bound,
            key=key,
            round=round,
            tag=rng.Tag.SERVER,
        )

    def server_to_client(row: Any, shared: Any, bound: jax.Array) -> local.Trained:
        """theta^n learns from the averaged server (Eqs. 12 and 13)."""
        data, server, key, round = shared
        own, kept = row["own"], row["kept"]
        head = server if hparams.s2c_head == "global" else own
        if by_head:
            teacher = knowledge(
                lambda image: behind_first(server, first_layer(own, image)),
                row,
                data,
                bound,
                hparams.local_epochs,
            )

        def distil(params, stats, batch):
            mode = batch.train_mode()
            if not by_head:
                student, stats = features((params, stats), batch.image, 0, **mode)
                target, _ = features(server, first_layer(own, batch.image), 1)
                return feature_gap(student, target, kept, batch.mask), stats
            through = spliced((params, stats), head, kept)
            logits, stats = model.forward(*through, batch.image, **mode)
            return output_gap(logits, teacher[batch.position], batch.mask), stats

        return local.train(
            hparams,
            steps(
                distil,
                local.cross_entropy_loss(model),
                kept & kept[1],
                jnp.ones_like(kept),
            ),
            *own,
            data=data,
            client_id=row["client_id"],
            plan=row["plan"],
            bound=bound,
            key=key,
            round=round,
            opt_state=row.get("opt_state"),
        )

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        server = task.initial(model, key)
        clients = {
            "own": rows.repeat(server, task.num_clients),
            "participations": jnp.zeros(task.num_clients, jnp.int32),
        }
        if persist:
            tx = local.optimizer(hparams, hparams.client_lr)
            opt_state = local.init_optimizer(tx, server[0])
            clients["opt_state"] = rows.repeat(opt_state, task.num_clients)
        return types.RoundState(server, clients, key, jnp.zeros((), jnp.int32))

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        private = rows.take(state.clients, cohort.row)
        participations = private.pop("participations") + 1
        kept = kept_stages(participations)
        row = private | {"client_id": cohort.client_id, "kept": kept}

        plan = cohort.plans["server"]
        copies = rows.over_clients(client_to_server, task.execution)(
            row | {"plan": plan},
            (data, state.server, state.key, state.round),
            plan.num_steps,
        )
        weight = aggregate.weights("uniform", cohort.row, cohort.row_mask)
        used = jnp.broadcast_to(deep, kept.shape)
        server = aggregate.stagewise_means(
            (copies.params, copies.stats), weight, used, state.server
        )

        plan = cohort.plans["local"]
        trained = rows.over_clients(server_to_client, task.execution)(
            row | {"plan": plan},
            (data, server, state.key, state.round),
            plan.num_steps,
        )
        private = {
            "own": (trained.params, trained.stats),
            "participations": participations,
        }
        if persist:
            private["opt_state"] = trained.opt_state
        clients = rows.put(state.clients, cohort.row, private)
        num_examples = rows.take(data.partition.train.count, cohort.client_id)
        metrics = {
            "train_loss": local.pooled_loss(trained.loss, cohort.row_mask),
            "mean_layer": losses.masked_sum(kept.sum(1), cohort.row_mask),
        }
        state = types.RoundState(server, clients, state.key, state.round + 1)
        return state, metrics, sent(kept, num_examples)

    def sent(kept: jax.Array, num_examples: jax.Array) -> jax.Array:
        """Messages int32[C, kinds]; features and targets count one an example."""
        at_boundary = kept & ~jnp.roll(kept, -1, 1).at[:, -1].set(False)
        up = at_boundary | ~deep
        labels = jnp.ones_like(kept[:, :1])
        if by_head:
            per_example = jnp.concatenate([up, labels, labels], axis=1)
            once = ~kept & (hparams.s2c_head == "global")
        else:
            per_example = jnp.concatenate([up, labels, at_boundary], axis=1)
            once = kept[:, :0]
        counts = [per_example * num_examples[:, None], once]
        return jnp.concatenate(counts, axis=1).astype(jnp.int32)

    def messages() -> tuple[types.MessageKind, ...]:
        outputs = traffic.output_bytes(model, task.example_shape)
        stages = traffic.stage_bytes(model, task.example_shape)
        named = list(zip(model.stage_names, outputs, stages, strict=True))
        kind = types.MessageKind
        up = [kind(f"features {name}", "up", size) for name, size, _ in named]
        up.append(kind("labels", "up", 1))
        if by_head:
            logit_bytes = task.num_classes * traffic.FLOAT_BYTES
            down = [kind("soft targets", "down", logit_bytes)]
            down += [kind(f"head {name}", "down", size) for name, _, size in named]
        else:
            down = [kind(f"targets {name}", "down", size) for name, size, _ in named]
        return (*up, *down)

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        return (task.serve(model, *state.clients["own"]),)

    return types.Algorithm(
        plans=(
            types.PlanSpec("server", hparams.server_epochs, hparams.batch_size),
            types.PlanSpec("local", hparams.local_epochs, hparams.batch_size),
        ),
        messages=messages(),
        init=init,
        round=round,
        serving=serving,
        # Its first layer is never trained: the server has no model of its own.
        server_params=lambda state: None,
    )


def _lowest(hparams: HParams, task: types.Task) -> int:
    """The shallowest boundary of the run, 1..L."""
    if not hparams.fixed_layer:
        return boundary.shallowest(hparams, task.model, task.example_shape)
    boundary.check_layer("fixed_layer", hparams.fixed_layer, task.model)
    scheduled = ("drop_set", "min_layer", "drop_every")
    options.refuse(hparams, scheduled, f"with --fixed_layer={hparams.fixed_layer}")
    return hparams.fixed_layer
