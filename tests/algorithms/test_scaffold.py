"""SCAFFOLD against numpy and FedAvg."""

import chex
import jax
import numpy as np
import pytest

from algorithms import scaffold
from fedjax_pfl import shapes
from tests.algorithms import conftest, plain

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
    """Algorithm 1, option II; c and c_i by client too.

    Steps along g(y) - c_i + c; c_i - c + (x - y) / (K eta_l); |S| / N.
    """
    x, c = plain.server_layers(state), plain.layers(state.server["control"])
    models, changes, own = [], [], {}
    for one in plain.clients(state, cohort, table):
        mine = plain.layers(plain.at(state.clients, one.number))
        tx, correction = one.sgd(values), plain.minus(c, mine)
        y = one.train(x, tx, extra=lambda *_, g=correction: g)
        num_steps = int(one.plan().num_steps)
        walked = plain.scaled(1 / (tx.rate * num_steps), plain.minus(x, y))
        own[one.number] = plain.total(plain.minus(mine, c), walked)
        models.append(y)
        changes.append(plain.minus(own[one.number], mine))
    by_rows = values["aggregation"] == "examples"
    weight = table.train.count[list(own)] if by_rows else [1] * len(own)
    step = plain.minus(plain.mean(models, weight), x)
    x = plain.total(x, plain.scaled(values["server_lr"], step))
    share = len(models) / values["num_eligible"]
    c = plain.total(c, plain.scaled(share, plain.mean(changes, weight)))
    return x, None, c, own


@pytest.mark.parametrize(
    "structure",
    [
        {"aggregation": "uniform", "num_eligible": 5},
        {"aggregation": "examples", "num_eligible": 4},
    ],
)
def test_rounds_equal_a_numpy_reference(structure, compiled, given, problem):
    """Both models and both control variates; every option matters."""
    run, state = compiled("scaffold", floats=FLOATS, **structure), given()
    close, values = {"rtol": 1e-5, "atol": 1e-5}, FLOATS | structure
    changes = dict.fromkeys(FLOATS, 0.3) | {"num_eligible": 3}
    more = close | {"changes": changes}
    for step in plain.follow(run, reference, state, problem, values, **more):
        c, own = step.more
        found = plain.layers(step.after.server["control"])
        chex.assert_trees_all_close(found, c, **close)
        for number in range(5):
            got = plain.at(step.after.clients, number)
            if number in own:
                chex.assert_trees_all_close(plain.layers(got), own[number], **close)
            else:
                old = plain.at(step.before.clients, number)
                chex.assert_trees_all_equal(got, old)


def test_the_first_round_is_fedavgs(compiled, given, start, problem):
    """All control variates 0, eta_g = 1: the uniform mean of plain local training."""
    values = {"client_lr": 0.1, "client_lr_decay": 1.0}
    after, *_ = compiled("scaffold")(given(controls=False), **values, server_lr=1.0)
    run = compiled("fedavg", aggregation="uniform")
    average, *_ = run(start().replace(clients=()), **values)
    chex.assert_trees_all_close(after.server["model"], average.server, atol=1e-6)


def test_a_client_without_a_step_keeps_its_control(compiled, given, problem):
    """As with --drop_last: K = 0 has no mean of gradients, and c moves without it."""
    run, cohort = compiled("scaffold"), problem.cohort(1)
    lazy = int(np.flatnonzero(cohort.row_mask)[0])
    plan = cohort.plans["local"]
    steps = plan.num_steps.copy()
    steps[lazy] = 0
    plans = {"local": plan.replace(num_steps=steps)}
    before = given()
    after, *_ = run(before, cohort.replace(plans=plans), **FLOATS)
    row = cohort.client_id[lazy]
    chex.assert_trees_all_equal(
        plain.at(after.clients, row), plain.at(before.clients, row)
    )


def test_running_statistics_are_the_clients(problem, start):
    """Only parameters move by eta_g."""
    state = start("with_norm")
    rows = jax.tree.map(np.zeros_like, state.clients.params)
    control = jax.tree.map(np.zeros_like, state.server.params)
    server = {"model": state.server, "control": control}
    hparams = scaffold.HParams(batch_size=5)
    run = conftest.jitted(scaffold, hparams, problem.task_of("with_norm"))
    state = state.replace(server=server, clients=rows)
    one, other = (
        run(state, problem.cohort(1), problem.data, server_lr=rate)[0].server["model"]
        for rate in (1.0, 0.5)
    )
    chex.assert_trees_all_close(one.stats, other.stats, rtol=1e-6)
    assert plain.differs(one.stats, server["model"].stats)
    assert plain.differs(one.params, other.params)


def test_twice_the_model_travels(problem, start):
    """A model and a control variate each way."""
    made = scaffold.make(scaffold.HParams(), problem.task_of())
    size = shapes.tree_bytes(start().server)
    sent = {kind.name: 1 for kind in made.messages}
    plain.assert_both_ways(made, sent, 2 * size)


def test_other_optimizers_are_refused(problem):
    """With momentum or Adam option II is no mean of gradients."""
    for options in ({"client_optimizer": "adam"}, {"client_momentum": 0.9}):
        hparams = scaffold.HParams(**options)
        with pytest.raises(ValueError, match=f"--{next(iter(options))}="):
            scaffold.make(hparams, problem.task_of())
