"""FedProx against numpy and FedAvg."""

import chex
import numpy as np
import pytest

from tests.algorithms import plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5, "proximal_weight": 0.7}


def reference(state, cohort, table, values):
    """Algorithm 2: h_k(w) = F_k(w) + mu / 2 ||w - w^t||^2, a mean by examples."""
    found = {}
    for one in plain.clients(state, cohort, table):
        pull = plain.pull(values["proximal_weight"], one.server)
        found[one.number] = one.train(one.server, one.sgd(values), extra=pull)
    return plain.averaged(found, table), None


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_rounds_equal_a_numpy_reference(momentum, compiled, start, problem):
    """Every option matters."""
    run = compiled("fedprox", floats=FLOATS, client_momentum=momentum)
    values, changes = {"client_momentum": momentum}, dict.fromkeys(FLOATS, 0.3)
    state, values = start().replace(clients=()), values | FLOATS
    steps = plain.follow(run, reference, state, problem, values, changes=changes)
    # The pull is not part of the loss that is shown.
    assert np.isfinite(steps[-1].metrics["train_loss"][0])


def test_without_a_pull_it_is_fedavg(compiled, start):
    """mu = 0 is FedAvg."""
    state = start().replace(clients=())
    values = {"client_lr": 0.1, "client_lr_decay": 1.0}
    prox, *_ = compiled("fedprox")(state, **values, proximal_weight=0.0)
    plain_average, *_ = compiled("fedavg")(state, **values)
    chex.assert_trees_all_close(prox.server, plain_average.server, atol=1e-6)
