"""FedD2S: data-free distillation whose layer moves from deep to shallow.

Atapour, Seyedmohammadi, Abouei, Mohammadi, Plataniotis: "FedD2S: Personalized
Data-Free Federated Knowledge Distillation", https://arxiv.org/abs/2402.10846
(Algorithm 1).

* A client of the round uploads the outputs of its first layer, of its distillation
  layer l, and the labels of its examples. l starts at the last layer (`--first_layer`)
  and is dropped towards `--min_layer`, one layer every Z0 participations.
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
| p, t | tables of logits, aligned by sample |
| J, Q (C2S, S2C; Eqs. 9, 10, 12, 13) | `distil` and `supervised` objectives |
| E | `--local_epochs` and `--server_epochs` |
| MSE on feature maps (Table 3) | `--transfer=mse` |
| FedD2S* (Fig. 5) | `--first_layer=3 --min_layer=3` |

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
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import (
    aggregate,
    boundary,
    distances,
    each_client,
    local_training,
    losses,
    optimizer,
    options,
    proxy,
    rng,
    shapes,
    stacked,
    traffic,
    types,
)

option = options.option


@dataclasses.dataclass(frozen=True)
class HParams(boundary.LayerDropping, local_training.LocalTraining):
    """FedD2S's options."""

    server_epochs: int = option(
        2, "epochs of the server's copies over a client's examples [E]", minimum=1
    )
    transfer: str = option(
        "head",
        "distil outputs through the other side's head, or features by squared error",
        choices=("head", "mse"),
    )
    temperature: float = option(1.0, "temperature of kl [tau]", above=0)


def output_gap(
    student: jax.Array, target: jax.Array, mask: jax.Array, temperature: Any
) -> jax.Array:
    """J of `--transfer=head`: KL between logits f32[B, Y]; the target is fixed."""
    log_target = jax.nn.log_softmax(jax.lax.stop_gradient(target) / temperature)
    gap = distances.kl(log_target, jax.nn.log_softmax(student / temperature))
    return temperature**2 * losses.masked_mean(gap, mask)


def feature_gap(
    stages: Sequence[int],
    student: Mapping[int, jax.Array],
    target: Mapping[int, jax.Array],
    kept: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """J of `--transfer=mse`: mean squared error of the outputs of stage l.

    Args:
        stages: Those that l may be, counted from 0.
        student, target: Outputs f32[B, ...] by stage.
        kept: bool[L], the stages 1..l.
        mask: bool[B].
    """
    total = jnp.zeros(())
    for stage in stages:
        gap = student[stage] - jax.lax.stop_gradient(target[stage])
        error = losses.masked_mean((gap.reshape(len(gap), -1) ** 2).mean(1), mask)
        total += jnp.where(kept.sum() == stage + 1, error, 0)
    return total


def features(
    model: types.Model, side: types.Variables, h: jax.Array, start: int, **mode: Any
) -> tuple[dict[int, jax.Array], types.Stats]:
    """Outputs of the stages from `start` on, by stage, and the new statistics."""
    params, stats = side
    out = {}
    for stage in range(start, len(params)):
        h, stats = model.forward(params, stats, h, start=stage, stop=stage + 1, **mode)
        out[stage] = h
    return out, stats


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """FedD2S as pure functions.

    Raises:
        ValueError: the model does not have the boundary asked for.
    """
    model, schedule = task.model, _schedule(hparams, task)
    num_stages = len(model.stage_names)
    by_head = hparams.transfer == "head"
    deep = np.arange(num_stages) > 0
    may_serve = range(max(schedule.last - 1, 1), schedule.first)
    gap_at = functools.partial(feature_gap, may_serve)

    def uploaded(own: types.Variables, image: jax.Array) -> jax.Array:
        """H_1, as the client uploads it."""
        return model.forward(*own, image, stop=1)[0]

    def table(forward: Any, client: each_client.Client, epochs: int) -> jax.Array:
        """p or t: logits on a client's examples, aligned by sample."""
        return proxy.own_outputs(forward, client, task, hparams.batch_size, epochs)

    def client_to_server(client: each_client.Client, server: types.Variables):
        """phi^n: a copy of the server's model learns from one client (Eqs. 8 to 10)."""
        own, kept = client.own["own"], client.own["kept"]
        if by_head:
            source = boundary.splice(own, server, kept)
            p = table(
                lambda x: model.forward(*source, x)[0], client, hparams.server_epochs
            )

        def distil(params, stats, batch):
            h = uploaded(own, batch.image)
            if not by_head:
                side = types.Variables(params, stats)
                student, stats = features(model, side, h, 1, **batch.mode)
                target, _ = features(model, own, h, 1)
                return gap_at(student, target, kept, batch.mask), stats
            z, stats = model.forward(params, stats, h, start=1, **batch.mode)
            target = p[batch.position]
            return output_gap(z, target, batch.mask, hparams.temperature), stats

        def supervised(params, stats, batch):
            h = uploaded(own, batch.image)
            z, stats = model.forward(params, stats, h, start=1, **batch.mode)
            return losses.cross_entropy(z, batch.label, batch.mask), stats

        by_distance = deep & kept[1]  # l = 1: no J
        if not by_head:
            by_distance &= kept
        objectives = (
            local_training.Objective(distil, by_distance),
            local_training.Objective(supervised, deep),
        )
        trained = local_training.train(
            hparams, objectives, server, client.fresh(), tag=rng.Tag.SERVER
        )
        return trained.split()

    def server_to_client(client: each_client.Client, server: types.Variables):
        """theta^n learns from the averaged server (Eqs. 12 and 13)."""
        own, kept = client.own["own"], client.own["kept"]
        if by_head:
            t = table(
                lambda x: model.forward(*server, uploaded(own, x), start=1)[0],
                client,
                hparams.local_epochs,
            )

        def distil(params, stats, batch):
            side = types.Variables(params, stats)
            if not by_head:
                student, stats = features(model, side, batch.image, 0, **batch.mode)
                target, _ = features(model, server, uploaded(own, batch.image), 1)
                return gap_at(student, target, kept, batch.mask), stats
            through = boundary.splice(side, server, kept)
            z, stats = model.forward(*through, batch.image, **batch.mode)
            target = t[batch.position]
            return output_gap(z, target, batch.mask, hparams.temperature), stats

        objectives = (
            local_training.Objective(distil, kept & kept[1]),  # l = 1: no J
            local_training.Objective(local_training.cross_entropy_loss(model)),
        )
        return local_training.train(hparams, objectives, own, client)

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        server = task.init(model, key)
        clients = {
            "own": stacked.repeat(server, task.num_clients),
            "participations": jnp.zeros(task.num_clients, jnp.int32),
        }
        kept = optimizer.kept(hparams, server.params, task.num_clients)
        return types.RoundState.first(server, clients, key, kept)

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        own = stacked.take(state.clients, cohort.row)
        participations = own.pop("participations") + 1
        own["kept"] = kept = schedule.kept(participations)
        here = (task, state, cohort, data)

        weight = aggregate.cohort_weights("uniform", cohort, data)
        used = jnp.broadcast_to(deep, kept.shape)
        share, is_held = aggregate.stage_weights(weight, used)
        given = {"own": own, "shared": state.server, "plan": "server"}
        _, mean = each_client.update(client_to_server, *here, **given, reduce=share)
        server = boundary.select(is_held, mean, state.server)

        trained = each_client.update(server_to_client, *here, own=own, shared=server)
        new = {"own": trained.variables, "participations": participations}
        state = state.after(
            server=server,
            clients=stacked.put(state.clients, cohort.row, new),
            opt_state=trained.kept(state, cohort),
        )
        layer = losses.masked_sum(kept.sum(1), cohort.row_mask)
        num_examples = stacked.take(data.partition.train.count, cohort.client_id)
        metrics = trained.metrics(cohort) | {"mean_layer": layer}
        return state, metrics, sent(kept, num_examples)

    def sent(kept: jax.Array, num_examples: jax.Array) -> dict[str, jax.Array]:
        """Messages of each client; features and targets count one an example."""
        # The last stage kept is the boundary: kept, and the next one is not.
        at_boundary = kept & ~jnp.roll(kept, -1, 1).at[:, -1].set(False)
        out = {"labels": num_examples, "soft targets": num_examples}
        for stage, name in enumerate(model.stage_names):
            is_here = at_boundary[:, stage]
            out[f"features {name}"] = num_examples * (is_here | (stage == 0))
            out[f"targets {name}"] = num_examples * is_here
            out[f"head {name}"] = ~kept[:, stage]
        return out

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        return (types.Served.each(model, state.clients["own"]),)

    return types.Algorithm(
        plans=(
            local_training.plan(hparams, "server", hparams.server_epochs),
            local_training.plan(hparams),
        ),
        messages=_messages(task, by_head),
        init=init,
        round=round,
        serving=serving,
        # Its first layer is never trained: the server has no model of its own.
    )


def _messages(task: types.Task, by_head: bool) -> tuple[types.MessageKind, ...]:
    """Features and labels up; head and soft targets, or targets, down."""
    model, kind = task.model, types.MessageKind
    outputs = shapes.output_bytes(model, task.example_shape)
    features = dict(zip(model.stage_names, outputs, strict=True))
    up = [kind(f"features {name}", "up", size) for name, size in features.items()]
    down = [kind(f"targets {name}", "down", size) for name, size in features.items()]
    if by_head:
        stages = shapes.stage_bytes(model, task.example_shape)
        heads = zip(model.stage_names, stages, strict=True)
        down = [kind(f"head {name}", "down", size) for name, size in heads]
        logit_bytes = task.num_classes * traffic.FLOAT_BYTES
        down.append(kind("soft targets", "down", logit_bytes))
    return (*up, kind("labels", "up", 1), *down)


def _schedule(hparams: HParams, task: types.Task) -> boundary.Schedule:
    """Which layers may serve for distillation, and when."""
    if len(task.model.stage_names) < 2:
        raise ValueError(
            f"--model={task.model.name} has one layer; fedd2s shares features of the "
            "first with the layers behind it, take a deeper model"
        )
    if hparams.transfer == "mse":
        options.refuse(hparams, ("temperature",), "with --transfer=mse")
    return boundary.schedule(hparams, task.model, task.example_shape)
