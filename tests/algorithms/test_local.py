"""Local training: CDKT without transfer, against numpy."""

import chex
import jax
import pytest

from algorithms import local
from fedjax_pfl import evaluate
from tests.algorithms import plain

RATES = {"client_lr": 0.05, "server_lr": 0.04}


def test_rounds_equal_a_numpy_reference(compiled, start, problem):
    """No Transfer: own models on own examples, the server's on the proxy set."""
    state, table = start(round=0), plain.Table(problem.data)
    server = plain.server_layers(state)
    for round in range(3):
        cohort, tx, own = problem.cohort(round), plain.Sgd(0.04), {}
        for number, row in plain.members(cohort).items():
            params = plain.own_layers(state, number)
            one = plain.at(cohort.plans["local"], row)
            own[number] = plain.train(table, params, one, number, plain.Sgd(0.05))
        for rows in 2 * table.batches(5):
            of_logits = plain.cross_entropy(table.label[rows])
            grads = plain.gradients(server, table.images(rows), of_logits)
            server = tx.step(server, grads)
        before, (state, _, _) = state, compiled("local")(state, cohort, **RATES)
        found = plain.server_layers(state)
        chex.assert_trees_all_close(found, server, rtol=1e-3, atol=1e-5)
        plain.assert_models(state, before, own)


@pytest.mark.parametrize("num_proxy", [12, 0])
def test_no_server_model_without_a_proxy_set(num_proxy, problem):
    """Section 1A, No Transfer: w_g exists only if it can learn from D_r."""
    data, cohort = problem.data, problem.cohort(0)
    made = local.make(
        local.HParams(batch_size=5), problem.task_of()._replace(num_proxy=num_proxy)
    )
    state = jax.eval_shape(made.init, data, jax.random.key(0))
    after, _, sent = jax.eval_shape(made.round, state, cohort, data)
    chex.assert_trees_all_equal_shapes(after, state)
    scores = jax.eval_shape(
        lambda state, cohort, data: evaluate.count_correct(
            made, state, cohort, data, evaluate.Scoring(8, 8), problem.execution
        ),
        state,
        cohort,
        data,
    )
    assert made.messages == () and sent == {}
    assert scores["own"].shape == (5,)
    assert ("server" in scores) == bool(num_proxy)
    assert (made.server is None) == (not num_proxy)
    assert (state.server == ()) == (not num_proxy)
