"""FedProx against numpy and FedAvg."""

import functools

import chex
import numpy as np
import pytest

from tests.algorithms import plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5, "proximal_weight": 0.7}


def reference(state, cohort, table, momentum, values):
    """The server's layers after a round of Algorithm 2."""
    start = plain.server_layers(state)
    rate = values["client_lr"] * values["client_lr_decay"] ** int(state.round)

    def pull(params, position, rows):
        gap = plain.total(params, plain.scaled(-1.0, start))
        return plain.scaled(values["proximal_weight"], gap)

    found = {
        number: plain.train(
            table,
            start,
            plain.at(cohort.plans["local"], row),
            number,
            plain.Sgd(rate, momentum),
            extra=pull,
        )
        for number, row in plain.members(cohort).items()
    }
    return plain.mean(list(found.values()), table.train.count[list(found)])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rounds_equal_a_numpy_reference(momentum, compiled, start, problem):
    """h_k(w) = F_k(w) + mu / 2 ||w - w^t||^2; the mean is weighted by examples."""
    table, state = plain.Table(problem.data), start().replace(clients=())
    run = compiled("fedprox", client_momentum=momentum)
    for round in (1, 2):
        cohort = problem.cohort(round)
        after, metrics, _ = run(state, cohort, **FLOATS)
        expected = functools.partial(reference, state, cohort, table, momentum)
        found = plain.server_layers(after)
        chex.assert_trees_all_close(found, expected(FLOATS), rtol=1e-3, atol=1e-5)
        state = after
    plain.assert_matters(expected, FLOATS, dict.fromkeys(FLOATS, 0.3))
    # The pull is no part of the loss that is shown.
    assert np.isfinite(metrics["train_loss"][0])


def test_without_a_pull_it_is_fedavg(compiled, start, problem):
    """mu = 0 is FedAvg."""
    state = start().replace(clients=())
    values = {"client_lr": 0.1, "client_lr_decay": 1.0}
    prox, *_ = compiled("fedprox")(state, **values, proximal_weight=0.0)
    plain_average, *_ = compiled("fedavg")(state, **values)
    chex.assert_trees_all_close(prox.server, plain_average.server, atol=1e-6)
