"""Random numbers of a forward pass in train mode, such as those of dropout."""

import jax
import pytest

import algorithms
from tests.algorithms import conftest, plain


@pytest.mark.parametrize("name", ["ditto", "perfedavg", "fedmd", "local"])
def test_every_forward_has_its_own_noise(name, problem):
    """Of both models of Ditto, both halves of a batch, each digest, and each round."""
    model, seen = conftest.watched()
    module = algorithms.ALGORITHMS[name]
    task = problem.task_of(model, chunk=1)
    made = module.make(module.HParams(batch_size=5), task)
    cohort_at, wanted, batches = plain.planner(problem.data, made.plans), 0, 3
    state, run = made.init(problem.data, jax.random.key(3)), jax.jit(made.round)
    for round in range(2):
        cohort = cohort_at(round)
        state = jax.device_put(state, jax.devices()[0])
        state, *_ = run(state, cohort, problem.data)
        wanted += int(cohort.plans["local"].num_steps.sum()) * (
            2 if name in ("ditto", "perfedavg") else 1
        )
        wanted += {"fedmd": 3 * batches, "local": 2 * batches}.get(name, 0)
    jax.block_until_ready(state)
    jax.effects_barrier()
    assert len(set(seen)) == wanted
