"""Ditto against numpy, FedAvg and local training."""

from tests.algorithms import plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5, "proximal_weight": 0.7}


def reference(state, cohort, table, values):
    """Algorithm 1: w is FedAvg's; v_k steps on F_k + lambda / 2 ||v - w^t||^2."""
    shared, personal = {}, {}
    for one in plain.clients(state, cohort, table):
        shared[one.number] = one.train(one.server, one.sgd(values))
        pull = plain.pull(values["proximal_weight"], one.server)
        personal[one.number] = one.train(one.own, one.sgd(values), extra=pull)
    return plain.averaged(shared, table), personal


def test_rounds_equal_a_numpy_reference(compiled, start, problem):
    """Every option matters."""
    changes = dict.fromkeys(FLOATS, 0.3)
    run = compiled("ditto", floats=FLOATS)
    plain.follow(run, reference, start(), problem, FLOATS, changes=changes)
