"""FedD2S: data-free distillation whose layer moves from deep to shallow.

Atapour, Seyedmohammadi, Abouei, Mohammadi, Plataniotis: "FedD2S: Personalized Data-Free
Federated Knowledge Distillation", https://arxiv.org/abs/2402.10846 (Alg. 1).

* A client of the round uploads the outputs of its first layer and of its distillation
  layer l, and the labels of its examples. l starts at the last layer (`--first_layer`)
  and drops towards `--min_layer`, one layer every Z0 participations.
* For each client the server trains a copy of its model on the first layer's outputs: a
  distillation step towards the client's knowledge, then a supervised one.
* The copies are averaged. The mean's soft targets are sent with its layers after l.
* The client trains: a distillation step on layers 1..l through the server's head, then
  a supervised one on all layers.

| paper | here |
|---|---|
| theta^n, theta^g, phi^n | `state.clients["own"]`, `state.server`, its copies |
| l_n, Z, Z0 | the boundary of `kept`, `participations`, `--drop_every` |
| H_1, H_l | outputs of the stages below a boundary, never stored |
| p, t | tables of logits, aligned by sample |
| J, Q (C2S, S2C; Eqs. 9, 10, 12, 13) | `distil` and `supervised` objectives |
| E | `--local_epochs` and `--server_epochs` |
| MSE on feature maps (Table 3) | `--transfer=mse` |
| FedD2S* (Fig. 5) | `--first_layer=3 --min_layer=3` |

Differs from the paper: theta_{+l} is [theta_{l+1}..theta_L], since layer l's output
cannot enter layer l. The schedule of Eq. 6 stops at `--min_layer`. The mean is over the
round's clients (Algorithm 1), not over all (Eq. 11). The server's head is sent in place
of v, as Eq. 12 needs it. The KL target is the teacher. J is off at l = 1, where both
sides are equal at the start of a round and Adam would step on rounding noise. The
server's first layer is never used. Left out as useless: literal Eq. 9 with a gradient
through its target, means over clients that left, independent initialisations, KL on the
last layer of the MSE variant, and sets of `removed` layers (`--min_layer` does it).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    aggregate,
    boundary,
    distances,
    each_client,
    local_training,
    losses,
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

    server_epochs: int = option(2, "epochs of each server's copy [E]", minimum=1)
    transfer: str = option(
        "head",
        "distil outputs through the other side's head, or features by squared error",
        choices=("head", "mse"),
    )
    temperature: float = option(
        1.0, "temperature of kl [tau]", above=0, needs={"transfer": ("head",)}
    )


def feature_gap(
    stages: Sequence[int],
    student: Mapping[int, jax.Array],
    target: Mapping[int, jax.Array],
    kept: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """J of `--transfer=mse`: mean squared error of the outputs of stage l.

    `stages` are the values that l can have, counted from 0. `student` and `target` have
    outputs f32[B, ...] by stage. `kept` bool[L] are the stages 1..l, and `mask` is
    bool[B].
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
        ValueError: the model does not have the requested boundary.
    """
    model, schedule = task.model, _schedule(hparams, task)
    deep = jnp.arange(len(model.stage_names)) > 0
    has_heads = hparams.transfer == "head"
    may_serve = range(max(schedule.last - 1, 1), schedule.first)

    def uploaded(client: each_client.Client, image: jax.Array) -> jax.Array:
        """H_1, as the client uploads it."""
        return model.forward(*client.own["own"], image, stop=1)[0]

    def by_head(client: each_client.Client, teacher: types.Variables, epochs: int):
        """J towards a table of the teacher's logits on the client's examples: p, t."""

        def logits(image: jax.Array) -> jax.Array:
            return model.forward(*teacher, uploaded(client, image), start=1)[0]

        table = proxy.own_outputs(logits, client, task, hparams.batch_size, epochs)

        def gap(side: types.Variables, h: jax.Array, start: int, batch: Any):
            z, stats = model.forward(*side, h, start=start, **batch.mode)
            target, tau = table[batch.position], hparams.temperature
            kl = distances.distance("kl", z, target, batch.mask, temperature=tau)
            return kl, stats

        return gap

    def by_features(client: each_client.Client, teacher: types.Variables, _: int):
        """J towards the outputs of the teacher's layer l, batch by batch."""

        def gap(side: types.Variables, h: jax.Array, start: int, batch: Any):
            student, stats = features(model, side, h, start, **batch.mode)
            target, _ = features(model, teacher, uploaded(client, batch.image), 1)
            pair = student, target
            return feature_gap(may_serve, *pair, client.own["kept"], batch.mask), stats

        return gap

    distance = by_head if has_heads else by_features

    def with_head(own: types.Variables, server: types.Variables, kept: jax.Array):
        """A client's layers 1..l, followed by the server's where it sends them."""
        return boundary.splice(own, server, kept) if has_heads else own

    def client_to_server(client: each_client.Client, server: types.Variables):
        """phi^n: a copy of the server's model learns from one client (Eqs. 8 to 10)."""
        own, kept = client.own["own"], client.own["kept"]
        gap = distance(client, with_head(own, server, kept), hparams.server_epochs)

        def distil(params, stats, batch):
            side = types.Variables(params, stats)
            return gap(side, uploaded(client, batch.image), 1, batch)

        def supervised(params, stats, batch):
            h = uploaded(client, batch.image)
            z, stats = model.forward(params, stats, h, start=1, **batch.mode)
            return losses.cross_entropy(z, batch.label, batch.mask), stats

        objectives = (
            # l = 1: no J.
            local_training.Objective(distil, deep & kept[1] & (has_heads | kept)),
            local_training.Objective(supervised, deep),
        )
        return local_training.train(
            hparams, objectives, server, client.fresh(), tag=rng.Tag.SERVER
        ).split()

    def server_to_client(client: each_client.Client, server: types.Variables):
        """theta^n learns from the averaged server (Eqs. 12 and 13)."""
        own, kept = client.own["own"], client.own["kept"]
        gap = distance(client, server, hparams.local_epochs)

        def distil(params, stats, batch):
            through = with_head(types.Variables(params, stats), server, kept)
            return gap(through, batch.image, 0, batch)

        objectives = (
            local_training.Objective(distil, kept & kept[1]),  # l = 1: no J
            local_training.Objective(local_training.cross_entropy_loss(model)),
        )
        return local_training.train(hparams, objectives, own, client)

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        server = task.init(model, key)
        row = {"own": server, "participations": jnp.int32(0)}
        clients = stacked.repeat(row, task.num_rows)
        return types.RoundState.first(server, clients, key)

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        own = state.rows(cohort)
        participations = own.pop("participations") + 1
        own["kept"] = kept = schedule.kept(participations)
        weight = aggregate.cohort_weights("uniform", cohort, data)
        used = jnp.broadcast_to(deep, kept.shape)
        share, is_held = aggregate.stage_weights(weight, used)
        here, update = (cohort, data), each_client.update
        given = {"own": own, "shared": state.server, "plan": "server", "reduce": share}
        _, mean, state = update(client_to_server, task, state, *here, **given)
        server = boundary.select(is_held, mean, state.server)
        given = {"own": own, "shared": server}
        trained, state = update(server_to_client, task, state, *here, **given)

        new = {"own": trained.variables, "participations": participations}
        layer = losses.masked_sum(kept.sum(1), cohort.row_mask)
        metrics = trained.metrics(cohort) | {"mean_layer": layer}
        num_examples = stacked.take(data.partition.train.count, cohort.client_id)
        state = state.after(cohort, new, server=server)
        return state, metrics, sent(kept, num_examples)

    def sent(kept: jax.Array, num_examples: jax.Array) -> dict[str, jax.Array]:
        """Each client's messages. Features and targets count once per example."""
        layer = kept.sum(1)
        out = {"labels": num_examples, "soft targets": num_examples}
        for number, name in enumerate(model.stage_names, start=1):
            is_here = layer == number
            out[f"features {name}"] = num_examples * (is_here | (number == 1))
            out[f"targets {name}"] = num_examples * is_here
            out[f"head {name}"] = layer < number
        return out

    plan = local_training.plan
    return types.Algorithm(
        plans=(plan(hparams, "server", hparams.server_epochs), plan(hparams)),
        messages=_messages(task, has_heads),
        init=init,
        round=round,
        serving=lambda state, *_: (types.Serving.each(model, state.clients["own"]),),
        # No `server`: its first layer is never trained, so it has no model of its own.
    )


def _messages(task: types.Task, has_heads: bool) -> tuple[types.MessageKind, ...]:
    """Features and labels up; head and soft targets, or targets, down."""
    names, shape, kind = task.model.stage_names, task.example_shape, types.MessageKind
    outputs = list(zip(names, shapes.output_bytes(task.model, shape), strict=True))
    up = [kind(f"features {name}", "up", size) for name, size in outputs]
    down = [kind(f"targets {name}", "down", size) for name, size in outputs]
    if has_heads:
        heads = zip(names, shapes.stage_bytes(task.model, shape), strict=True)
        down = [kind(f"head {name}", "down", size) for name, size in heads]
        logit_bytes = task.num_classes * traffic.FLOAT_BYTES
        down.append(kind("soft targets", "down", logit_bytes))
    return (*up, kind("labels", "up", 1), *down)


def _schedule(hparams: HParams, task: types.Task) -> boundary.Schedule:
    """The layers at which a client distils, by participation."""
    if len(task.model.stage_names) < 2:
        raise ValueError(
            f"--model={task.model.name} has one layer; take {boundary.SEVERAL_STAGES}"
        )
    return boundary.schedule(hparams, task.model, task.example_shape)
