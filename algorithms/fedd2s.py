"""FedD2S: data-free distillation whose layer moves from deep to shallow.

Atapour, Seyedmohammadi, Abouei, Mohammadi, Plataniotis: "FedD2S: Personalized Data-Free
Federated Knowledge Distillation", https://arxiv.org/abs/2402.10846 (Alg. 1).

* A client of the round uploads the outputs of its first layer and of its distillation
  layer l, and its labels. l starts at the last layer (`--first_layer`) and drops
  towards `--min_layer`, one layer every Z0 participations.
* For each client the server trains a copy of its model on the first layer's outputs: a
  distillation step towards the client's knowledge, then a supervised one.
* The copies are averaged. The mean's soft targets are sent with its layers after l.
* The client trains: a distillation step on layers 1..l through the server's head, then
  a supervised one on all layers.

    l_n = max(l_last, l_first - floor((Z - 1) / Z0))  (Eq. 6)
    p = theta^g_(+l)(H_l)
    J_C2S = KL(p || phi^n_(+1)(H_1)),  Q_C2S = CE(phi^n_(+1)(H_1), y)  (Eqs. 9, 10)
    theta^g <- sum_(n in S) phi^n / abs(S)  (Eq. 11)
    t = theta^g_(+1)(H_1)
    J_S2C = KL(t || theta^g_(+l)(H_l)),  Q_S2C = CE(theta^n(x), y)  (Eqs. 12, 13)

| paper | here |
|---|---|
| theta^n, theta^g, phi^n | `state.clients["own"]`, `state.server`, its copies |
| l_n, Z, Z0 | the boundary of `kept`, `participations`, `--drop_every` |
| l_first, l_last | `--first_layer`, `--min_layer`; the paper omits the floor |
| H_1, H_l | outputs of the stages below a boundary, never stored |
| theta_(+l) | the layers after l |
| p, t | tables of logits, aligned by sample; fixed, as is the head in J_S2C |
| KL | of softmaxes at `--temperature`, times its square |
| J, Q (C2S, S2C; Eqs. 9, 10, 12, 13) | `distil` and `supervised` objectives |
| E | `--local_epochs` and `--server_epochs` |
| MSE on feature maps (Table 3) | `--transfer=mse` |
| FedD2S* (Fig. 5) | `--first_layer=3 --min_layer=3` |

Differs from the paper: theta_{+l} is [theta_{l+1}..theta_L], since layer l's output
cannot enter layer l. The schedule of Eq. 6 stops at `--min_layer`. The mean is over the
round's clients (Algorithm 1), not over all (Eq. 11). The server's head is sent in place
of v, as Eq. 12 needs it. The KL target is the teacher. J is off at l = 1, where both
sides are equal at the start of a round and Adam would step on rounding noise. The
server's first layer is never used. Features are uploaded once, of unaugmented images,
also with `--augment`. With `--transfer=mse` the targets of J_S2C come from augmented
images, whose features are not counted. Left out as useless: literal Eq. 9 with a
gradient through its target, means over clients that left, independent initialisations,
KL on the last layer of the MSE variant, and sets of `removed` layers (`--min_layer`
does it).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import (
    aggregate,
    boundary,
    distances,
    losses,
    proxy,
    shapes,
    stacked,
    traffic,
    types,
)


@dataclasses.dataclass(frozen=True)
class HParams(boundary.LayerDropping, fp.LocalTraining):
    server_epochs: int = fp.option(2, "epochs of each server's copy [E]", minimum=1)
    transfer: str = fp.option(
        "head",
        "distil outputs through the other side's head, or features by squared error",
        choices=("head", "mse"),
    )
    temperature: float = fp.option(
        1.0, "temperature of kl [tau]", above=0, needs={"transfer": ("head",)}
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Makes FedD2S; raises ValueError if the model lacks the requested boundary."""
    model, has_heads = task.model, hparams.transfer == "head"
    schedule = boundary.schedule(hparams, model, task.example_shape)
    deep = jnp.arange(len(model.stage_names)) > 0
    may_serve = range(max(schedule.last - 1, 1), schedule.first)
    at_server = fp.plan(hparams, "server", hparams.server_epochs)
    at_server = at_server._replace(at_server=True)
    local = fp.plan(hparams)

    def uploaded(client: fp.Client, image: jax.Array) -> jax.Array:
        """H_1, as the client uploads it."""
        return model.forward(*client.own["own"], image, stop=1)[0]

    def distance(client: fp.Client, teacher: fp.Variables, plan: types.PlanSpec):
        """J(side, h, start, batch): a side's stages from `start` on, applied to h.

        Its target is a table of the teacher's logits (p, t), or the outputs of layer l.
        """

        def logits(image: jax.Array) -> jax.Array:
            return model.forward(*teacher, uploaded(client, image), start=1)[0]

        def towards_logits(side: fp.Variables, h: jax.Array, start: int, batch: Any):
            z, stats = model.forward(*side, h, start=start, **batch.mode)
            target, tau = table[batch.position], hparams.temperature
            kl = distances.distance("kl", z, target, batch.mask, temperature=tau)
            return kl, stats

        def towards_layer(side: fp.Variables, h: jax.Array, start: int, batch: Any):
            student, stats = boundary.outputs(model, side, h, start, **batch.mode)
            h = uploaded(client, batch.image)
            target, _ = boundary.outputs(model, teacher, h, 1)
            at = may_serve, client.own["kept"]
            return boundary.gap(student, target, *at, batch.mask), stats

        if not has_heads:
            return towards_layer
        table = proxy.own_outputs(logits, client, task, plan)
        return towards_logits

    def with_head(own: fp.Variables, server: fp.Variables, kept: jax.Array):
        """A client's layers 1..l, followed by the server's where it sends them."""
        return boundary.splice(own, server, kept) if has_heads else own

    def client_to_server(client: fp.Client, server: fp.Variables):
        """phi^n: a copy of the server's model learns from one client (Eqs. 8 to 10)."""
        own, kept = client.own["own"], client.own["kept"]
        gap = distance(client, with_head(own, server, kept), at_server)

        def distil(params, stats, batch):
            h = uploaded(client, batch.image)
            return gap(fp.Variables(params, stats), h, 1, batch)

        def supervised(params, stats, batch):
            h = uploaded(client, batch.image)
            z, stats = model.forward(params, stats, h, start=1, **batch.mode)
            return losses.cross_entropy(z, batch.label, batch.mask), stats

        movable = deep & kept[1] & (has_heads | kept)  # l = 1: no J
        both = fp.Objective(distil, movable), fp.Objective(supervised, deep)
        client = client.fresh().as_uploaded()
        return fp.train(hparams, both, server, client, tag="engine.server").split()

    def server_to_client(client: fp.Client, server: fp.Variables):
        """theta^n learns from the averaged server (Eqs. 12 and 13)."""
        own, kept = client.own["own"], client.own["kept"]
        gap = distance(client, server, local)

        def distil(params, stats, batch):
            through = with_head(fp.Variables(params, stats), server, kept)
            return gap(through, batch.image, 0, batch)

        supervised = fp.cross_entropy_loss(model)
        movable = kept & kept[1]  # l = 1: no J
        both = fp.Objective(distil, movable), fp.Objective(supervised)
        return fp.train(hparams, both, own, client)

    def init(data: fp.Data, key: jax.Array) -> fp.RoundState:
        server = task.init(model, key)
        row = {"own": server, "participations": jnp.int32(0)}
        return fp.RoundState.first(server, stacked.repeat(row, task.num_rows), key)

    def round(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        here = fp.Round(task, state, cohort, data)
        participations = here.rows["participations"] + 1
        kept = schedule.kept(participations)
        own = {"own": here.rows["own"], "kept": kept}
        used = jnp.broadcast_to(deep, kept.shape)
        share, is_held = aggregate.stage_weights(here.weights("uniform"), used)
        _, mean, here = here.update(
            client_to_server, own=own, shared=state.server, plan="server", reduce=share
        )
        server = boundary.select(is_held, mean, state.server)
        trained, here = here.update(server_to_client, own=own, shared=server)

        new = {"own": trained.variables, "participations": participations}
        layer = losses.masked_sum(kept.sum(1), cohort.row_mask)
        metrics = trained.metrics(cohort) | {"mean_layer": layer}
        return here.after(new, server=server), metrics, sent(kept, here.num_examples)

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

    inert = "as the boundary begins at layer 1, where nothing is distilled"
    return fp.Algorithm(
        plans=(at_server, local),
        messages=_messages(task, has_heads),
        init=init,
        round=round,
        serving=lambda state, *_: (fp.Serving.each(model, state.clients["own"]),),
        unused={"temperature": inert} if schedule.first == 1 else {},
        # No `server`: its first layer is never trained, so it has no model of its own.
    )


def _messages(task: fp.Task, has_heads: bool) -> tuple[fp.MessageKind, ...]:
    """Features and labels up; head and soft targets, or targets, down."""
    model, shape, kind = task.model, task.example_shape, fp.MessageKind
    outputs = shapes.output_bytes(model, shape)
    label = kind("labels", "up", traffic.label_bytes(task.num_classes))
    up = (*traffic.of_stages("features", "up", model, outputs), label)
    if not has_heads:
        return up + traffic.of_stages("targets", "down", model, outputs)
    heads = traffic.of_stages("head", "down", model, shapes.stage_bytes(model, shape))
    logit_bytes = task.num_classes * traffic.FLOAT_BYTES
    return (*up, *heads, kind("soft targets", "down", logit_bytes))
