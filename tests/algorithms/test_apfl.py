"""APFL against numpy, and at the ends of its share: FedAvg and a model of one's own."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import apfl
from tests.algorithms import conftest, plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5}
WEIGHTS = np.float32([0.1, 0.3, 0.5, 0.7, 0.9])


def state_of(start, weights=WEIGHTS):
    """Clients with models and shares of their own."""
    state = start()
    rows = {"own": state.clients, "own_weight": jnp.asarray(weights)}
    return state.replace(clients=rows)


def inner(first, second):
    """The sum of products of all numbers of two lists of layers."""
    products = jax.tree.map(lambda a, b: (a * b).sum(), first, second)
    return sum(jax.tree.leaves(products))


def mixture(alpha, own, server):
    return plain.total(plain.scaled(alpha, own), plain.scaled(1 - alpha, server))


def reference(state, cohort, table, values):
    """Algorithm 1; alpha by client too.

    v and alpha step along f(vbar) at w before its own step; alpha once a round.
    """
    shared, personal, shares = {}, {}, {}
    for one in plain.clients(state, cohort, table):
        w, v, tx = one.server, one.own, one.sgd(values)
        alpha = float(state.clients["own_weight"][one.number])
        for step, (_, rows, _) in enumerate(one.steps()):
            x, of_logits = table.images(rows), plain.cross_entropy(table.label[rows])
            slope = plain.gradients(mixture(alpha, v, w), x, of_logits)
            gap = plain.minus(v, w)
            v = plain.total(v, plain.scaled(-tx.rate * alpha, slope))
            w = tx.step(w, plain.gradients(w, x, of_logits))
            if values["learn_weight"] and step == 0:
                alpha = np.clip(alpha - tx.rate * inner(gap, slope), 0, 1)
        shared[one.number], personal[one.number], shares[one.number] = w, v, alpha
    return plain.averaged(shared, table), personal, shares


@pytest.mark.parametrize("learns", [True, False])
def test_rounds_equal_a_numpy_reference(learns, compiled, start, problem):
    """Both models and the share, which is fixed without `learn_weight`."""
    run, state = compiled("apfl", floats=FLOATS, learn_weight=learns), state_of(start)
    values, changes = {"learn_weight": learns} | FLOATS, dict.fromkeys(FLOATS, 0.3)
    steps = plain.follow(run, reference, state, problem, values, changes=changes)
    for step in steps:
        for number, share in step.more[0].items():
            found = step.after.clients["own_weight"][number]
            np.testing.assert_allclose(found, share, atol=1e-5)
    moved = steps[-1].after.clients["own_weight"]
    assert plain.differs(moved, WEIGHTS) == learns


def test_with_a_share_of_none_the_own_model_does_not_move(compiled, start):
    """Nor does the share where it is fixed: bit for bit."""
    state = state_of(start, np.zeros(5, np.float32))
    after, *_ = compiled("apfl", learn_weight=False)(state, **FLOATS)
    chex.assert_trees_all_equal(plain.host(after.clients), plain.host(state.clients))


def test_the_mixture_serves(start, problem):
    """With the server's model as it is now; every client, also one never drawn."""
    made = apfl.make(apfl.HParams(), problem.task_of())
    state = state_of(start)
    for number, one in enumerate(plain.served(made, state)):
        alpha = WEIGHTS[number]
        expected = jax.tree.map(
            lambda v, w, a=alpha: a * v + (1 - a) * w,
            plain.own(state, number).params,
            state.server.params,
        )
        chex.assert_trees_all_close(one.params, expected, atol=1e-6)


def test_statistics_of_the_mixture_are_the_clients_own(problem, start):
    """In training and where it serves, whatever the server's are."""
    hparams, task = apfl.HParams(batch_size=5), problem.task_of("with_norm")
    run, state = conftest.jitted(apfl, hparams, task), start("with_norm")
    rows = {"own": state.clients, "own_weight": np.full(5, 0.4, np.float32)}
    state, moved = state.replace(clients=rows), plain.perturbed(state.server.stats)
    other = plain.with_server(state, state.server._replace(stats=moved))
    after, again = (
        run(one, problem.cohort(1), problem.data)[0].clients["own"]
        for one in (state, other)
    )
    chex.assert_trees_all_close(after.stats, again.stats, rtol=1e-5)
    assert plain.differs(after.stats, rows["own"].stats)
    made = apfl.make(hparams, task)
    for number, one in enumerate(plain.served(made, state)):
        own = plain.at(rows["own"], number)
        chex.assert_trees_all_equal(plain.host(one.stats), own.stats)


def test_shares_stay_between_zero_and_one(compiled, start):
    """However large the step."""
    after, *_ = compiled("apfl")(state_of(start), client_lr=50.0, client_lr_decay=1.0)
    shares = np.asarray(after.clients["own_weight"])
    assert ((shares >= 0) & (shares <= 1)).all() and set(shares) & {0.0, 1.0}
