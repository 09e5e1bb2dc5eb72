"""Ditto against numpy, FedAvg and local training."""

import chex
import jax
import numpy as np

from algorithms import ditto
from fedjax_pfl import optimizer
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


def test_the_personal_model_begins_with_a_fresh_state(problem, start):
    """--optimizer_state=persist: the momentum that lives on is that of w alone."""
    task, given = problem.task_of(), {"batch_size": 5, "client_momentum": 0.5}
    hparams = ditto.HParams(optimizer_state="persist", **given)
    run, state = jax.jit(ditto.make(hparams, task).round), start()
    one, found = optimizer.fresh(hparams, plain.at(state.clients.params, 0)), []
    for size in (0.0, 1.0):
        kept = jax.tree.map(lambda x, s=size: np.full((5, *x.shape), s, "f4"), one)
        after, *_ = run(state.replace(opt_state=kept), problem.cohort(1), problem.data)
        found.append(plain.host(after.replace(key=())))
    chex.assert_trees_all_equal(found[0].clients, found[1].clients)
    assert plain.differs(found[0].server, found[1].server, 1e-3)
