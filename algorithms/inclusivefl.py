"""InclusiveFL: clients hold the first stages of a model and train the deepest exit.

Liu, Wu, Wu, Wang, Lyu, Chen, Xie: "No One Left Behind: Inclusive Federated Learning
over Heterogeneous Devices", KDD 2022, https://arxiv.org/abs/2202.08036, as DepthFL's
authors compare with it (Table 3 and Appendix A.3 of
https://openreview.net/forum?id=pf8RIZTMU58).

* The server sends each client of the round the first stages of its model.
* A client trains them on the cross-entropy of the deepest exit that it holds. Of the
  exits before it only the running statistics move.
* The server takes, stage by stage, the mean over the clients that hold it.
* Momentum distillation: the movement of the next level's last two stages in its
  clients' last round also moves the last stage of a level's clients.

    loss_k = CE(z_d, y)
    w_(d,k) <- w_d + (1 - beta) (w_(d,k) - w_d) + beta m_(d+1)
    w_i <- mean_(k in S_i) w_(i,k)

| paper | here |
|---|---|
| M_i: model of type i | the first i stages, `cohort.level` |
| its classifier | the exit of stage i |
| d, z_d | a client's level, logits of its deepest exit |
| w_i, w_(i,k) | stage i of the server's model, and of a client's after its training |
| S_i | the clients that hold stage i |
| beta, m_(d+1) | `--momentum_distill_weight`, the next level's movement, exits apart |

Differs from the paper: stages are shared by all levels, also where one is a client's
last (there it is the level's own), as in DepthFL's code. Its default for the exits is
kept too: exit i is a mean over all clients that hold it, most of which return it
untouched (`--head_count=trainers`: over those that train it). The gradients of momentum
distillation are what a round of a level moved, with a server's learning rate of 1;
until the next level has first taken part m is 0, and a last stage moves less by beta.
Momentum distillation needs stages of equal shapes, as a Transformer has. The last exit
answers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import aggregate, boundary, levels, losses, options, shapes, stacked


@dataclasses.dataclass(frozen=True)
class HParams(levels.Levels, fp.LocalTraining):
    taught_by = "momentum_distill_weight"
    head_count: str = fp.option(
        "holders",
        "an exit is a mean over all clients that hold it, or that train it",
        choices=("holders", "trainers"),
    )
    momentum_distill_weight: float = fp.option(
        0.0,
        "weight of the next level's movement in that of a level's last stage [beta]",
        minimum=0,
        maximum=1,
        zero_is_off=True,
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """InclusiveFL as pure functions.

    Raises:
        ValueError: the model lacks an exit at every stage or has other levels, or
            momentum distillation is between stages of different shapes.
    """
    _check(hparams, task)
    model = levels.truncated(hparams, task.model)._replace(answer="last")
    num_stages, beta = len(model.stage_names), hparams.momentum_distill_weight
    whole = shapes.variables(model, task.example_shape)
    distils = not options.is_off(beta)

    def client_update(client: fp.Client, server: fp.Variables, level: int):
        """Trains the stages up to the client's level, with the last of their exits."""
        held = levels.held(client.level, model)[:level]
        is_last = jnp.arange(1, level + 1) == client.level

        def loss_fn(params, stats, batch):
            exits, stats = model.forward(
                params, stats, batch.image, held=held, **batch.mode
            )
            exits = jnp.stack(exits)
            own = jnp.where(stacked.column(is_last, exits), exits, 0).sum(0)
            loss = losses.cross_entropy(own, batch.label, batch.mask, batch.chosen)
            return loss, stats

        parts = _parts(server.params, held, is_last)
        objective = fp.Objective(loss_fn, parts, held)
        own = client.replace(model=client.model and model)  # its last exit answers
        return fp.train(hparams, (objective,), server, own)

    def is_last(cohort: fp.Cohort) -> jax.Array:
        """bool[C, L]: the stage in which a client trains the exit."""
        own = cohort.level[:, None] == jnp.arange(1, num_stages + 1)
        return levels.holders(cohort, model) & own

    def held(cohort: fp.Cohort, _: Any) -> fp.Variables:
        """Stages that clients hold, with the exits that count for the mean."""
        stages = levels.holders(cohort, model)
        heads = stages if hparams.head_count == "holders" else is_last(cohort)
        parts = _parts(whole.params, stages, heads)
        return fp.Variables(parts, boundary.by_stage(stages))

    def nothing_moved(start: fp.Variables) -> dict[str, tuple]:
        trunks = [stage["trunk"] for stage in start.params[:-1]] if distils else ()
        return {"moved": tuple(jax.tree.map(jnp.zeros_like, one) for one in trunks)}

    def server_update(server: Any, trained: Any, own: Any, cohort: Any, mean: Any, _):
        """Momentum distillation with the last movement, then the mean."""
        given = trained.params, server["model"].params, server["moved"], is_last(cohort)
        variables = trained.variables._replace(params=distilled(*given))
        return {"model": mean(variables), "moved": movement(*given)}, None

    def distilled(new: Any, old: Any, moved: tuple, last: jax.Array) -> fp.types.Params:
        """(1 - beta) of a client's movement of its last stage, beta of the next's."""

        def mixed(new: jax.Array, old: jax.Array, drift: jax.Array) -> jax.Array:
            return (1 - beta) * new + beta * (old + drift)

        stages = list(new)
        for n, drift in enumerate(moved):
            trunk = new[n]["trunk"]
            mix = jax.tree.map(mixed, trunk, old[n]["trunk"], drift)
            stages[n] = new[n] | {"trunk": stacked.where(last[:, n], mix, trunk)}
        return tuple(stages)

    def movement(new: Any, old: Any, moved: tuple, last: jax.Array) -> tuple:
        """The mean movement of level n + 1 in its last two stages, if it took part."""

        def drift(stage: int, rows: jax.Array) -> Any:
            share, _ = aggregate.masked_weights(jnp.ones(len(rows)), rows)
            pair = new[stage]["trunk"], old[stage]["trunk"]
            return aggregate.weighted_mean(jax.tree.map(jnp.subtract, *pair), share)

        def mean(n: int, before: Any) -> Any:
            rows = last[:, n + 1]
            pair = drift(n, rows), drift(n + 1, rows)
            new = jax.tree.map(lambda a, b: (a + b) / 2, *pair)
            return boundary.select(rows.any(), new, before)

        return tuple(mean(n, before) for n, before in enumerate(moved))

    given = {"beside": nothing_moved, "server_update": server_update}
    part = levels.first_stages(task, model)._replace(held=held)
    made = levels.make(hparams, task, model, part, client_update, **given)
    if len(levels.possible(hparams, task.num_clients)) > 1:
        return made
    reason = "where all clients that may train have one level"
    return made._replace(unused={"head_count": reason})


def _parts(params: fp.types.Params, trunks: jax.Array, exits: jax.Array) -> tuple:
    """Masks bool[..., L] of exits and of all else as a prefix pytree of `params`."""
    masks = zip(
        params, boundary.by_stage(trunks), boundary.by_stage(exits), strict=True
    )
    return tuple(
        {part: head if part == "exit" else trunk for part in stage}
        for stage, trunk, head in masks
    )


def _check(hparams: HParams, task: fp.Task) -> None:
    """Refuses one exit, and momentum distillation between stages of other shapes."""
    model = task.model
    if not model.has_exits:
        raise ValueError(
            f"--model={model.name} has one exit, this algorithm trains one for each "
            f"level; take {levels.WITH_EXITS}"
        )
    if options.is_off(hparams.momentum_distill_weight):
        return
    possible = levels.possible(hparams, task.num_clients)
    if len(possible) == 1:
        reason = "where all clients that may train have one level"
        options.refuse(hparams, ("momentum_distill_weight",), reason)
    if missing := levels.between(possible):
        raise ValueError(
            f"--momentum_distill_weight={hparams.momentum_distill_weight}: level "
            f"{missing} has no client, of which the level below would learn; change "
            f"--level_mix={hparams.level_mix}, or omit it"
        )
    params, _ = shapes.variables(model, task.example_shape)
    trunks = [jax.tree.map(lambda x: x.shape, stage["trunk"]) for stage in params]
    if any(trunk != trunks[0] for trunk in trunks):
        raise ValueError(
            f"--momentum_distill_weight={hparams.momentum_distill_weight}: the stages "
            f"of --model={model.name} differ in shape; omit it"
        )
