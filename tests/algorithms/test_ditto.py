"""Ditto against numpy, FedAvg and local training."""

import functools

import chex

from algorithms import ditto
from tests.algorithms import plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5, "proximal_weight": 0.7}


def reference(state, cohort, table, values):
    """(the server's layers, personal layers by client) of a round of Algorithm 1."""
    server = plain.server_layers(state)
    rate = values["client_lr"] * values["client_lr_decay"] ** int(state.round)

    def pull(params, position, rows):
        gap = plain.total(params, plain.scaled(-1.0, server))
        return plain.scaled(values["proximal_weight"], gap)

    shared, personal = {}, {}
    for number, row in plain.members(cohort).items():
        one = plain.at(cohort.plans["local"], row)
        tx = plain.Sgd(rate)
        shared[number] = plain.train(table, server, one, number, tx)
        own = plain.own_layers(state, number)
        personal[number] = plain.train(table, own, one, number, tx, extra=pull)
    return plain.mean(list(shared.values()), table.train.count[list(shared)]), personal


def test_rounds_equal_a_numpy_reference(compiled, start, problem):
    """w is FedAvg's; v_k takes its steps on F_k + lambda / 2 ||v - w^t||^2."""
    table, state = plain.Table(problem.data), start()
    for round in (1, 2):
        cohort = problem.cohort(round)
        expected = functools.partial(reference, state, cohort, table)
        after, *_ = compiled("ditto")(state, cohort, **FLOATS)
        server, personal = expected(FLOATS)
        found = plain.server_layers(after)
        chex.assert_trees_all_close(found, server, rtol=1e-3, atol=1e-5)
        plain.assert_models(after, state, personal)
        state = after
    plain.assert_matters(expected, FLOATS, dict.fromkeys(FLOATS, 0.3))


def test_personal_models_serve_their_clients(start, problem):
    """Every client is served its own v_k, also one that never took part."""
    made = ditto.make(ditto.HParams(), problem.task_of())
    plain.assert_own_serve(made, start())
