"""Toy: trunks are trained below frozen exits, whose statistics move all the same."""

import dataclasses

from fedjax_pfl import (
    aggregate,
    each_client,
    local_training,
    losses,
    types,
)

exits = True


@dataclasses.dataclass(frozen=True)
class HParams(local_training.LocalTraining):
    """Only the common options."""


def make(hparams, task):
    """One mask for each part of a stage: trunk yes, exit no (but the last)."""
    model = task.server_model
    num_stages = len(model.stage_names)
    trainable = tuple(
        {"trunk": True, "exit": stage == num_stages - 1} for stage in range(num_stages)
    )

    def loss_fn(params, stats, batch):
        exits, stats = model.forward(params, stats, batch.image, **batch.mode)
        return losses.cross_entropy(exits[-1], batch.label, batch.mask), stats

    def init(data, key):
        return types.RoundState.first(task.init(model, key), (), key)

    def client_update(client, server):
        objective = local_training.Objective(
            loss_fn, trainable, held=(True,) * num_stages
        )
        return local_training.train(hparams, (objective,), server, client).split()

    def round(state, cohort, data):
        weight = aggregate.cohort_weights("examples", cohort, data)
        trained, server, state = each_client.update(
            client_update, task, state, cohort, data, shared=state.server, reduce=weight
        )
        return state.after(server=server), trained.metrics(cohort), {}

    return types.Algorithm(
        plans=(local_training.plan(hparams),),
        init=init,
        round=round,
        server=lambda state, data: {"global": (model, state.server)},
    )
