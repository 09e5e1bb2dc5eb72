"""Partial sharing: stages up to a boundary are the server's, the others a client's own.

The frame of FedPer and FedRep, with a boundary that is fixed or moves with a client's
participations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    aggregate,
    boundary,
    local,
    losses,
    masks,
    options,
    rows,
    traffic,
    types,
)

Phase = Callable[[local.Batch, jax.Array], jax.Array]


def _lowest(hparams: Any, task: types.Task) -> int:
    """Stages that no client ever owns: the cut, or the end of the schedule."""
    if not hparams.layer_dropping:
        options.refuse(
            hparams, ("drop_set", "min_layer", "drop_init"), "without --layer_dropping"
        )
        return boundary.first_personal(
            hparams.personal_from, task.model, task.example_shape
        )
    if hparams.personal_from:
        raise ValueError(
            f"--personal_from={hparams.personal_from} fixes the boundary, "
            "--layer_dropping moves it; leave one away (--min_layer ends the move)"
        )
    return boundary.shallowest(hparams, task.model, task.example_shape)


def make(hparams: Any, task: types.Task, phase: Phase) -> types.Algorithm:
    """A partially shared model as pure functions.

    Args:
        hparams: `options.PartialSharing` and `options.LocalTraining`.
        task: What the algorithm may know.
        phase: `(batch, shared bool[L]) -> bool[L]`, the stages that a step trains.
    """
    model, lowest = task.model, _lowest(hparams, task)
    num_stages = len(model.stage_names)
    loss_fn = local.cross_entropy_loss(model)

    def shared_stages(participations: jax.Array) -> jax.Array:
        """bool[..., L]: stages up to the boundary of Z int32[...] participations."""
        return boundary.stages_below(
            participations,
            moves=hparams.layer_dropping,
            every=hparams.drop_every,
            num_stages=num_stages,
            lowest=lowest,
        )

    def personal(server: Any, own: Any, shared: jax.Array) -> Any:
        """(params, stats): the server's stages where shared, else the client's own."""
        return tuple(
            masks.select(shared, whole, (*whole[:lowest], *mine))
            for whole, mine in zip(server, own, strict=True)
        )

    def init(data: types.Data, key: jax.Array) -> types.RoundState:
        params, stats = task.initial(model, key)
        own = rows.repeat((params[lowest:], stats[lowest:]), task.num_clients)
        clients = {
            "own": own,
            "participations": jnp.zeros(task.num_clients, jnp.int32),
        }
        return types.RoundState((params, stats), clients, key, jnp.zeros((), jnp.int32))

    def client_update(row: Any, shared: Any, bound: jax.Array) -> local.Trained:
        client_id, plan, own, at_start, is_shared = row
        data, server, key, round = shared
        params, stats = personal(server, own, at_start)
        objective = local.Objective(loss_fn, lambda batch: phase(batch, is_shared))
        return local.train(
            hparams,
            (objective,),
            params,
            stats,
            data=data,
            client_id=client_id,
            plan=plan,
            bound=bound,
            key=key,
            round=round,
        )

    def round(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        plan, server = cohort.plans["local"], state.server
        private = rows.take(state.clients, cohort.row)
        participations = private["participations"] + 1
        is_shared = at_start = shared_stages(participations)
        if hparams.drop_init == "global":
            at_start = shared_stages(participations - 1)
        trained = rows.over_clients(client_update, task.execution)(
            (cohort.client_id, plan, private["own"], at_start, is_shared),
            (data, server, state.key, state.round),
            plan.num_steps,
        )
        num_examples = rows.take(data.partition.train.count, cohort.client_id)
        weight = aggregate.weights(hparams.aggregation, num_examples, cohort.row_mask)
        copies = (trained.params, trained.stats)
        server = aggregate.stagewise_means(copies, weight, is_shared, server)
        private = {
            "own": tuple(tree[lowest:] for tree in copies),
            "participations": participations,
        }
        clients = rows.put(state.clients, cohort.row, private)
        metrics = {"train_loss": local.pooled_loss(trained.loss, cohort.row_mask)}
        if hparams.layer_dropping:
            metrics["mean_layer"] = losses.masked_sum(is_shared.sum(1), cohort.row_mask)
        state = types.RoundState(server, clients, state.key, state.round + 1)
        sent = jnp.concatenate([at_start, is_shared], axis=1).astype(jnp.int32)
        return state, metrics, sent

    def serving(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        if lowest == num_stages:
            return (task.serve(model, *state.server, shared=True),)
        params, stats = jax.vmap(personal, (None, 0, 0))(
            state.server,
            state.clients["own"],
            shared_stages(state.clients["participations"]),
        )
        return (task.serve(model, params, stats),)

    def server_params(state: types.RoundState):
        # With a personal part the server has no whole model.
        return (model, *state.server) if lowest == num_stages else None

    sizes = tuple(
        zip(
            model.stage_names,
            traffic.stage_bytes(model, task.example_shape),
            strict=True,
        )
    )
    return types.Algorithm(
        plans=(types.PlanSpec("local", hparams.local_epochs, hparams.batch_size),),
        messages=tuple(
            types.MessageKind(f"{name} {direction}", direction, size)
            for direction in ("down", "up")
            for name, size in sizes
        ),
        init=init,
        round=round,
        serving=serving,
        server_params=server_params,
    )
