"""SCAFFOLD against numpy and FedAvg."""

import functools

import chex
import jax
import numpy as np
import pytest

from algorithms import scaffold
from fedjax_pfl import shapes
from tests.algorithms import plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5, "server_lr": 0.8}


@pytest.fixture(scope="session")
def given(start):
    """Makes states whose models and control variates are all different."""

    def make(controls=True, round=1):
        state = start(round=round)
        control, own = plain.perturbed(state.server.params, 7), state.clients.params
        if not controls:
            control, own = jax.tree.map(np.zeros_like, (control, own))
        server = {"model": state.server, "control": control}
        return state.replace(server=server, clients=own)

    return make


def reference(state, cohort, table, values):
    """(x, c, c_i by client) after a round of Algorithm 1, option II."""
    x, c = (
        plain.layers(part)
        for part in (state.server["model"].params, state.server["control"])
    )
    rate = values["client_lr"] * values["client_lr_decay"] ** int(state.round)
    models, changes, own = [], [], {}
    for number, row in plain.members(cohort).items():
        mine = plain.layers(plain.at(state.clients, number))
        one = plain.at(cohort.plans["local"], row)
        correction = plain.total(c, plain.scaled(-1.0, mine))
        y = plain.train(
            table, x, one, number, plain.Sgd(rate), extra=lambda *_, g=correction: g
        )
        walked = plain.scaled(
            1 / (rate * int(one.num_steps)), plain.total(x, plain.scaled(-1.0, y))
        )
        own[number] = plain.total(mine, plain.scaled(-1.0, c), walked)
        models.append(y)
        changes.append(plain.total(own[number], plain.scaled(-1.0, mine)))
    equal = [1] * len(models)
    step = plain.total(plain.mean(models, equal), plain.scaled(-1.0, x))
    x = plain.total(x, plain.scaled(values["server_lr"], step))
    share = len(models) / 5
    return x, plain.total(c, plain.scaled(share, plain.mean(changes, equal))), own


def test_rounds_equal_a_numpy_reference(compiled, given, problem):
    """Steps along g(y) - c_i + c; c_i - c + (x - y) / (K eta_l); |S| / N."""
    table, state = plain.Table(problem.data), given()
    for round in (1, 2):
        cohort = problem.cohort(round)
        expected = functools.partial(reference, state, cohort, table)
        after, *_ = compiled("scaffold")(state, cohort, **FLOATS)
        x, c, own = expected(FLOATS)
        found = [
            plain.layers(part)
            for part in (after.server["model"].params, after.server["control"])
        ]
        chex.assert_trees_all_close(found, [x, c], rtol=1e-3, atol=1e-4)
        for number in range(5):
            got = plain.at(after.clients, number)
            if number in own:
                got = plain.layers(got)
                chex.assert_trees_all_close(got, own[number], rtol=1e-3, atol=1e-4)
            else:
                chex.assert_trees_all_equal(got, plain.at(state.clients, number))
        state = after
    plain.assert_matters(expected, FLOATS, dict.fromkeys(FLOATS, 0.3))


def test_the_first_round_is_fedavgs(compiled, given, start, problem):
    """All control variates 0, eta_g = 1: the uniform mean of plain local training."""
    values = {"client_lr": 0.1, "client_lr_decay": 1.0}
    after, *_ = compiled("scaffold")(given(controls=False), **values, server_lr=1.0)
    run = compiled("fedavg", aggregation="uniform")
    average, *_ = run(start().replace(clients=()), **values)
    chex.assert_trees_all_close(after.server["model"], average.server, atol=1e-6)


def test_twice_the_model_travels(problem, start):
    """A model and a control variate each way."""
    made = scaffold.make(scaffold.HParams(), problem.task_of())
    size = shapes.tree_bytes(start().server)
    sent = {kind.name: 1 for kind in made.messages}
    expected = {"bytes_up": 2 * size, "bytes_down": 2 * size}
    assert plain.sent_bytes(made, sent, 1) == [expected]


def test_other_optimizers_are_refused(problem):
    """With momentum or Adam option II is no mean of gradients."""
    for options in ({"client_optimizer": "adam"}, {"client_momentum": 0.9}):
        hparams = scaffold.HParams(**options)
        with pytest.raises(ValueError, match=f"--{next(iter(options))}="):
            scaffold.make(hparams, problem.task_of())
