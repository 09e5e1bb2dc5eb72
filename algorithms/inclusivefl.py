"""InclusiveFL: clients hold the first levels of a model and train the deepest exit.

Liu, Wu, Chen, Wang, Xie: "No One Left Behind: Inclusive Federated Learning over
Heterogeneous Devices", KDD 2022, https://arxiv.org/abs/2202.08036, as DepthFL's authors
compare with it (Table 3 and Appendix A.3 of https://openreview.net/forum?id=pf8RIZTMU58).

* The server sends each client of the round the first stages of its model.
* A client trains them on the cross-entropy of the deepest exit that it holds; the
  exits before it take part in nothing but their running statistics.
* The server takes, stage by stage, the mean over those who hold it.
* Momentum distillation: what the next level's clients did with their last two stages
  in their last round moves the last stage of a level's clients too.

| paper | here |
|---|---|
| M_i: model of type i | the first i stages, `cohort.depth` |
| its classifier | the exit of stage i |
| beta | `--momentum_distill_weight` |

Differs from the paper: stages are shared by all levels, also where one is a client's
last (there it is the level's own), as in DepthFL's code, whose default for the exits
stands too: exit i is a mean over all who hold it, most of whom return it untouched
(`--head_count=trainers`: over those who train it). The gradients of momentum
distillation are what a round of a level moved, with a server's learning rate of 1, and
it needs stages of equal shapes, as a Transformer has them. The model answers with its
last exit.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    aggregate,
    boundary,
    each_client,
    levels,
    local_training,
    losses,
    optimizer,
    options,
    shapes,
    stacked,
    traffic,
    types,
)

option = options.option


@dataclasses.dataclass(frozen=True)
class HParams(levels.Levels, local_training.LocalTraining):
    """InclusiveFL's options."""

    head_count: str = option(
        "holders",
        "an exit is a mean over all who hold it, or over those who train it",
        choices=("holders", "trainers"),
    )
    momentum_distill_weight: float = option(
        0.0,
        "share of the next level's movement in that of a level's last stage [beta]",
        minimum=0,
        maximum=1,
        zero_is_off=True,
    )


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """InclusiveFL as pure functions.

    Raises:
        ValueError: a model without an exit at every stage, other levels than it has, or
            momentum distillation between stages of other shapes.
    """
    _check(hparams, task)
    model = levels.truncated(hparams, task.model)._replace(answer="last")
    num_stages, beta = len(model.stage_names), hparams.momentum_distill_weight
    distils = not options.is_off(beta)

    def client_update(client: each_client.Client, server: types.Variables, level: int):
        """The stages up to the client's own; of their exits the last is trained."""
        held = levels.held(client.depth, model)[:level]
        is_last = jnp.arange(1, level + 1) == client.depth

        def loss_fn(params, stats, batch):
            exits, stats = model.forward(
                params, stats, batch.image, held=held, **batch.mode
            )
            own = jnp.where(is_last[:, None, None], jnp.stack(exits), 0).sum(0)
            return losses.cross_entropy(own, batch.label, batch.mask), stats

        objective = local_training.Objective(
            loss_fn, trainable=_parts(held, is_last), held=held
        )
        return levels.train(hparams, objective, server, client, level)

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        server = levels.first(task.init(task.model, key), num_stages)
        kept = optimizer.kept(hparams, server.params, task.num_clients)
        moved = ()
        if distils:
            trunks = [stage["trunk"] for stage in server.params[:-1]]
            moved = tuple(jax.tree.map(jnp.zeros_like, trunk) for trunk in trunks)
        return types.RoundState.first({"model": server, "moved": moved}, (), key, kept)

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        old = state.server["model"]
        trained = each_client.update(
            client_update, task, state, cohort, data, shared=old, levels=num_stages
        )
        held = levels.held(cohort.depth, model) & cohort.row_mask[:, None]
        is_last = held & (cohort.depth[:, None] == jnp.arange(1, num_stages + 1))
        params, moved = trained.params, state.server["moved"]
        if distils:
            params = distilled(params, old.params, moved, is_last)
            moved = movement(trained.params, old.params, moved, is_last)
        heads = held if hparams.head_count == "holders" else is_last
        weight = aggregate.cohort_weights("uniform", cohort, data)
        mask = types.Variables(_parts(held, heads), boundary.by_stage(held))
        copies = types.Variables(params, trained.stats)
        mean = aggregate.masked_mean(copies, weight, mask, old)
        state = state.after(
            server={"model": mean, "moved": moved},
            opt_state=trained.kept(state, cohort),
        )
        sent = traffic.stages_sent(model, held, held)
        return state, trained.metrics(cohort), sent

    def distilled(params, old, moved, is_last):
        """(1 - beta) of a client's movement of its last stage, beta of the next's."""

        def mixed(new, before, given, rows):
            own = (1 - beta) * new + beta * (before + given)
            return jnp.where(stacked.column(rows, new), own, new)

        below = [
            stage | {"trunk": jax.tree.map(
                lambda n, o, m, s=number: mixed(n, o, m, is_last[:, s]),
                stage["trunk"], old[number]["trunk"], moved[number],
            )}
            for number, stage in enumerate(params[:-1])
        ]  # fmt: skip
        return (*below, params[-1])

    def movement(params, old, moved, is_last):
        """What level i + 1 did with its last two stages on average, if it was there."""

        def mean_of(stage, rows):
            share, _ = aggregate.masked_weights(jnp.ones(len(rows)), rows)
            drift = jax.tree.map(
                lambda n, o: n - o, params[stage]["trunk"], old[stage]["trunk"]
            )
            return aggregate.weighted_mean(drift, share)

        found = []
        for number, before in enumerate(moved):
            rows = is_last[:, number + 1]
            pair = mean_of(number, rows), mean_of(number + 1, rows)
            new = jax.tree.map(lambda a, b: (a + b) / 2, *pair)
            found.append(boundary.select(rows.any(), new, before))
        return tuple(found)

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        messages=traffic.stages_both_ways(task, model),
        init=init,
        round=round,
        server=lambda state, data: {"global": (model, state.server["model"])},
    )


def _parts(trunks: jax.Array, exits: jax.Array) -> tuple:
    """Masks bool[..., L] of trunks and of exits as a prefix pytree of parameters."""
    pairs = zip(boundary.by_stage(trunks), boundary.by_stage(exits), strict=True)
    return tuple({"trunk": trunk, "exit": head} for trunk, head in pairs)


def _check(hparams: HParams, task: types.Task) -> None:
    """Refuses one exit, and momentum distillation between stages of other shapes."""
    model = task.model
    if not model.has_exits:
        raise ValueError(
            f"--model={model.name} has one exit, this algorithm trains one for each "
            "level; take a model with an exit at every stage, such as depth_convnet"
        )
    if options.is_off(hparams.momentum_distill_weight):
        return
    if levels.top(hparams) == 1:
        options.refuse(hparams, ("momentum_distill_weight",), "with one level")
    params, _ = shapes.variables(model, task.example_shape)
    first, *others = (
        jax.tree.map(lambda leaf: leaf.shape, stage["trunk"]) for stage in params
    )
    if any(other != first for other in others):
        raise ValueError(
            f"--momentum_distill_weight={hparams.momentum_distill_weight}: the stages "
            f"of --model={model.name} have other shapes; leave it away"
        )
