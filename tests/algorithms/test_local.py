"""Local training: CDKT without transfer, against numpy."""

import functools

import chex
import jax
import pytest

from algorithms import local
from fedjax_pfl import evaluate
from tests.algorithms import plain

RATES = {"client_lr": 0.05, "server_lr": 0.04}


def reference(state, cohort, table, values):
    """No Transfer: own models on own examples, the server's on the proxy set."""
    own = {
        one.number: one.train(one.own, plain.Sgd(values["client_lr"]))
        for one in plain.clients(state, cohort, table)
    }
    server, tx = plain.server_layers(state), plain.Sgd(values["server_lr"])
    for rows in 2 * table.batches(5):
        of_logits = plain.cross_entropy(table.label[rows])
        grads = plain.gradients(server, table.images(rows), of_logits)
        server = tx.step(server, grads)
    return server, own


def test_rounds_equal_a_numpy_reference(compiled, start, problem):
    """Three rounds."""
    run, state = compiled("local", floats=RATES), start(round=0)
    plain.follow(run, reference, state, problem, RATES, num_rounds=3)


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
    given = state, cohort, data
    scored = functools.partial(
        evaluate.of_shared, made, scoring=evaluate.Scoring(8, 8), how=problem.execution
    )
    scores = jax.eval_shape(scored, *given)
    assert made.messages == () and sent == {}
    assert ("server" in scores) == bool(num_proxy)
    assert (made.server is None) == (not num_proxy)
    assert (state.server == ()) == (not num_proxy)
