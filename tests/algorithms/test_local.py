"""Local training: CDKT without transfer."""

import chex
import jax
import numpy as np

from algorithms import local
from fedjax_pfl import evaluate


def test_local_is_cdkt_without_transfer(compiled, start):
    """Test 19: alpha = beta = 0 equals No Transfer over two rounds (1e-6)."""
    rates = {"client_lr": 0.05, "server_lr": 0.04}
    weights = {"client_distill_weight": 0.0, "server_distill_weight": 0.0}
    alone, silent = start(), start()
    for _ in range(2):
        alone, alone_metrics, counts = compiled("local")(alone, **rates)
        silent, metrics, _ = compiled(
            "cdkt", transfer="rep", server_distance="kl", client_distance="norm"
        )(silent, **rates, **weights)
        assert counts.shape == (3, 0)
        chex.assert_trees_all_close(alone.clients, silent.clients, atol=1e-6)
        chex.assert_trees_all_close(alone.server, silent.server, atol=1e-6)
        chex.assert_trees_all_close(alone_metrics, metrics, rtol=1e-5)
    before = start()
    for moved, still in (
        (alone.clients, before.clients),
        (alone.server, before.server),
    ):
        gaps = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), moved, still)
        assert max(jax.tree.leaves(gaps)) > 1e-3


def test_no_server_model_without_a_proxy_set(problem, start):
    """Section 1A, No Transfer: w_g exists only if it can learn from D_r."""
    data, cohort = problem.data, problem.cohort(0)
    for num_proxy in (12, 0):
        made = local.make(
            local.HParams(batch_size=5), problem.task_of()._replace(num_proxy=num_proxy)
        )
        state = jax.eval_shape(made.init, data, jax.random.key(0))
        after, _, counts = jax.eval_shape(made.round, state, cohort, data)
        chex.assert_trees_all_equal_shapes(after, state)
        scores = jax.eval_shape(
            lambda state, cohort, data, made=made: evaluate.count_correct(
                made, state, cohort, data, evaluate.Scoring(8, 8), problem.execution
            ),
            state,
            cohort,
            data,
        )
        assert made.messages == () and counts.shape == (3, 0)
        assert scores["own"].shape == (5,)
        assert ("global" in scores) == bool(num_proxy)
        assert (made.server_params(state) is None) == (not num_proxy)
        assert (state.server == ()) == (not num_proxy)
