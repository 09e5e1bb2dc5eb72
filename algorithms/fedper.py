"""FedPer: a shared base and personal last layers, trained jointly or in turn.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization
Layers", https://arxiv.org/abs/1912.00818 (Algorithms 1 and 2).

* The server sends the base layers to the clients of the round.
* Each trains base and its own personal layers together for E epochs.
* The base layers are sent back, and the server takes their weighted mean.

    W_B^j, W_P^j <- (W_B^j, W_P^j) - eta grad F_j(W_B^j, W_P^j)
    W_B <- sum_(j in S) gamma_j W_B^j

FedRep takes these steps in the place of the first line:

    W_P^j <- W_P^j - eta grad_P F_j(W_B^j, W_P^j)  (the first tau epochs)
    W_B^j <- W_B^j - eta grad_B F_j(W_B^j, W_P^j)  (the others)

| paper | here |
|---|---|
| W_B | the server's stages, up to the boundary |
| W_P^j | stages of `state.clients`, from `--personal_from` on |
| gamma_j, tau | `--aggregation=examples`, `--head_epochs` |
| F_j, eta | the loss on a client's examples, `--client_lr` |

`fedrep` is FedRep (Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared
Representations for Personalized Federated Learning", ICML 2021,
https://arxiv.org/abs/2102.07078, Algorithm 1): the first `--head_epochs` [tau] train
the personal layers [h_i] alone, the others the base [phi] alone. While no layer is
personal, all train the base. `fedper_plus` and `fedrep_plus` are FedPer+ and FedRep+ of
the FedD2S paper (https://arxiv.org/abs/2402.10846): `--layer_dropping` moves the
boundary from `--first_layer`, the last one by default, to `--min_layer`, one layer
every `--drop_every` participations. Each layer is averaged over the clients that share
it.

Differs from the paper: a sample of the clients takes part in a round, not all. A client
is served the mean base with its own last layers, never its copy from before the mean.
FedD2S gives FedPer+ two sentences, and the definition is ours: a client that never took
part is served the server's layers up to the first boundary, and a freshly dropped layer
starts from the client's own values. In FedRep freezing is exact (in the released code
the head still moves by stale momentum and weight decay in the second phase), and no
last round tunes the heads alone. Parameters are averaged, as by Collins et al., where
FedD2S describes FedRep as averaging outputs of representations.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import aggregate, boundary, losses, options, shapes, stacked, traffic


@dataclasses.dataclass(frozen=True)
class HParams(boundary.LayerDropping, fp.LocalTraining):
    personal_from: str = fp.option(
        "",
        "first personal stage, by name; last = the last one, none = all are shared, "
        "empty = the first after the last convolution (without any, the last stage)",
        excludes={"layer_dropping": options.ON},
    )
    layer_dropping: bool = fp.option(
        False, "move the boundary from deep to shallow, as FedD2S does"
    )
    head_epochs: int = fp.option(
        0, "first local epochs, which train the personal layers alone [tau]", minimum=0
    )
    aggregation: str = fp.option(
        "examples", "weights of the server's mean", choices=("examples", "uniform")
    )


def trained_stages(batch: Any, is_shared: jax.Array, head_epochs: int) -> jax.Array:
    """bool[L]: all; with `head_epochs` the personal ones first, then the shared."""
    if not head_epochs:
        return jnp.ones_like(is_shared)
    is_body = batch.epoch >= head_epochs
    return (is_shared == is_body) | is_shared.all()


def personal(server: fp.Variables, own: fp.Variables, is_shared: jax.Array):
    """The server's stages where shared, else the client's own, which come last."""
    lowest = len(server.params) - len(own.params)
    mask = boundary.by_stage(is_shared)
    pairs = zip(server, own, strict=True)
    sides = (boundary.select(mask, a, (*a[:lowest], *mine)) for a, mine in pairs)
    return fp.Variables(*sides)


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """FedPer and FedRep as pure functions.

    Raises:
        ValueError: there is no such boundary, or nothing is personal, or no epoch or
            stage is left for the epochs after the heads'.
    """
    model, schedule = task.model, _schedule(hparams, task)
    num_stages, lowest = len(model.stage_names), schedule.last
    loss_fn = fp.cross_entropy_loss(model)

    def last_stages(variables: fp.Variables) -> fp.Variables:
        return fp.Variables(*(side[lowest:] for side in variables))

    def init(data: fp.Data, key: jax.Array) -> fp.RoundState:
        server = task.init(model, key)
        row = {"own": last_stages(server), "participations": jnp.int32(0)}
        return fp.RoundState.first(server, stacked.repeat(row, task.num_rows), key)

    def objective(is_shared: jax.Array) -> fp.Objective:
        return fp.Objective(
            loss_fn, lambda batch: trained_stages(batch, is_shared, hparams.head_epochs)
        )

    def client_update(client: fp.Client, server: fp.Variables):
        own, is_shared = client.own
        start = personal(server, own, is_shared)
        trained = fp.train(hparams, (objective(is_shared),), start, client)
        rest, variables = trained.split()
        return (rest, last_stages(variables)), variables

    def adapt(client: fp.Client, start: fp.Variables, shared: Any):
        """The epochs of a round, from the model that serves the client."""
        is_shared = schedule.kept(client.own["participations"] + 1)
        return fp.train(hparams, (objective(is_shared),), start, client)

    def round(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        here = fp.Round(task, state, cohort, data)
        private = here.rows
        participations = private["participations"] + 1
        is_shared = schedule.kept(participations)
        weight = here.weights(hparams.aggregation)
        share, is_held = aggregate.stage_weights(weight, is_shared)
        given = {"own": (private["own"], is_shared), "shared": state.server}
        (trained, own), mean, here = here.update(client_update, reduce=share, **given)
        server = boundary.select(is_held, mean, state.server)
        rows = {"own": own, "participations": participations}
        state = here.after(rows, server=server)
        metrics = trained.metrics(cohort)
        if hparams.layer_dropping:
            metrics["mean_layer"] = losses.masked_sum(is_shared.sum(1), cohort.row_mask)
        return state, metrics, traffic.stages_sent(model, is_shared, is_shared)

    def build(server: fp.Variables, own: Any) -> fp.Variables:
        return personal(server, own["own"], schedule.kept(own["participations"]))

    def serving(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        rows, server = state.clients, state.server
        return (fp.Serving.each(model, rows, shared=server, build=build),)

    is_whole = lowest == num_stages  # else the server has no whole model
    whole, limit = shapes.variables(model, task.example_shape), ""
    if not jax.tree.leaves(last_stages(whole)):
        limit = "fedavg, as nothing of a model is personal"
    elif not jax.tree.leaves([side[: schedule.first] for side in whole]):
        limit = "local, as nothing of a model is shared"
    return fp.Algorithm(
        plans=(fp.plan(hparams),),
        messages=traffic.stages_both_ways(task, model),
        init=init,
        round=round,
        server=(lambda s, _: {"global": (model, s.server)}) if is_whole else None,
        serving=None if is_whole else serving,
        adapt=None if is_whole else adapt,
        same_as=limit,
    )


def _schedule(hparams: HParams, task: fp.Task) -> boundary.Schedule:
    """The stages that a client shares. The server has all up to the last boundary."""
    if hparams.head_epochs >= hparams.local_epochs:
        raise ValueError(
            f"--head_epochs={hparams.head_epochs} leaves none of "
            f"--local_epochs={hparams.local_epochs} for the representation; lower it"
        )
    model, shape = task.model, task.example_shape
    if not hparams.layer_dropping:
        cuts = boundary.some_shared if hparams.head_epochs else boundary.first_personal
        cut = cuts(hparams.personal_from, model, shape)
        own = [side[cut:] for side in shapes.variables(model, shape)]
        if hparams.personal_from != "none" and not jax.tree.leaves(own):
            where, names = "after its last convolution", ", ".join(model.stage_names)
            if hparams.personal_from:
                where = f"from --personal_from={hparams.personal_from} on"
            cure = "a model that has some, or an earlier stage as --personal_from"
            if len(model.stage_names) == 1:
                cure = boundary.SEVERAL_STAGES
            raise ValueError(
                f"--model={model.name} has no parameters {where} ({names}), so nothing "
                f"would be personal; take {cure}"
            )
        return boundary.fixed(cut, model)
    found = boundary.schedule(hparams, model, shape)
    shared = shapes.variables(model, shape).params[: found.last]
    if hparams.head_epochs and not jax.tree.leaves(shared):
        raise ValueError(
            f"--head_epochs={hparams.head_epochs}: the boundary reaches layer "
            f"{found.last}, up to which --model={model.name} has no parameters, and "
            "the other epochs train nothing; raise --min_layer or --first_layer"
        )
    return found
