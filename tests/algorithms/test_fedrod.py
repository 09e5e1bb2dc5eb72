"""FedRoD against numpy: a balanced loss for what travels, a head behind it."""

import types

import chex
import jax
import numpy as np
import pytest

from algorithms import fedrod
from models import stages
from tests.algorithms import plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5}


def state_of(start):
    """Clients with personal heads."""
    state = start()
    return state.replace(clients=state.clients.params[-1])


def head(state, number):
    part = plain.at(state.clients, number)["trunk"]
    return [np.float64(part["kernel"]), np.float64(part["bias"])]


def reference(state, cohort, table, values):
    """Algorithm 1; personal heads by client too. Some client lacks a class."""
    trained, heads, lacking = {}, {}, 0
    for one in plain.clients(state, cohort, table):
        params, own = one.server, head(state, one.number)
        tx, mine = one.sgd(values), one.sgd(values)
        counts = np.bincount(table.label[table.owned(one.number)], minlength=4)
        lacking += (counts == 0).any()
        with np.errstate(divide="ignore"):
            prior = values["balance"] * np.log(counts) if values["balance"] else 0.0
        for _, rows, _ in one.steps():
            acts = plain.activations(params, table.images(rows))
            of_logits = plain.cross_entropy(table.label[rows])
            slope = of_logits(acts[-1] + plain.activations([own], acts[-2])[-1])
            grads = plain.backward(params, acts, {3: of_logits(acts[-1] + prior)})
            (own,) = mine.step([own], [[acts[-2].T @ slope, slope.sum(0)]])
            params = tx.step(params, grads)
        trained[one.number], heads[one.number] = params, own
    return plain.averaged(trained, table), None, heads, lacking


def test_rounds_equal_a_numpy_reference(compiled, start, problem):
    """Personal heads too; those of absent clients stay, and no head travels.

    Clients with even ids have no example of class 3.
    """
    label = np.array(problem.data.label)
    for number in (0, 2, 4):
        owned = problem.table.owned(number)
        label[owned] = np.where(label[owned] == 3, 1, label[owned])
    data, cohort = problem.data.replace(label=label), problem.cohort
    task = problem.task_of()
    problem = types.SimpleNamespace(table=plain.Table(data), cohort=cohort)
    compiled_run, state = compiled("fedrod", floats=FLOATS), state_of(start)

    def run(state, cohort):
        return compiled_run(state, cohort, data)

    values = FLOATS | {"balance": 1}
    changes = dict.fromkeys(FLOATS, 0.3) | {"balance": 0}
    steps = plain.follow(run, reference, state, problem, values, changes=changes)
    for step in steps:
        heads, _ = step.more
        for number in range(5):
            before, found = head(step.before, number), head(step.after, number)
            if number in heads:
                chex.assert_trees_all_close(found, heads[number], rtol=1e-5, atol=1e-5)
                assert plain.differs(found, before, 1e-3)
            else:
                chex.assert_trees_all_equal(found, before)
    assert any(step.more[1] for step in steps)
    made = fedrod.make(fedrod.HParams(), task)
    size = sum(map(np.size, jax.tree.leaves(state.server.params)))
    plain.assert_both_ways(made, steps[0].sent, 4 * size)


def test_the_sum_of_both_heads_serves(start, problem):
    """Of every client, also of one that was never drawn, whose head is zero."""
    made, state = fedrod.make(fedrod.HParams(), problem.task_of()), state_of(start)
    first = jax.jit(made.init)(problem.data, jax.random.key(0))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(first.clients))
    x = problem.table.images(problem.table.tested(0))
    for number, one in enumerate(plain.served(made, state)):
        acts = plain.activations(plain.server_layers(state), x)
        expected = acts[-1] + plain.logits([head(state, number)], acts[-2])
        found = plain.logits(plain.layers(one.params), x)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_adapting_trains_the_head_alone(start, problem):
    """--fine_tune_epochs: the extractor stays."""
    task, state = problem.task_of(), state_of(start)
    made = fedrod.make(fedrod.HParams(batch_size=5), task)
    cohort = plain.cut(problem.cohort(1), 1)
    run = plain.adapter(made.adapt, task)
    *body, head = run(state, cohort, problem.data, state.server)
    *old, first = state.server.params
    for number in range(3):
        chex.assert_trees_all_equal(plain.at(body, number), old)
        assert plain.differs(plain.at(head, number), first)


def test_other_last_stages_are_refused(problem):
    """Two layers in the last stage, or only one stage."""
    two = stages.Sequential([stages.Dense(5), stages.Dense(4, False)])
    several = stages.chain("several", [("a", stages.Dense(6)), ("two", two)])
    one = stages.chain("one", [("all", stages.Dense(4, False))])
    for model, line in (
        (several, "ends in two"),
        (one, "one layer, which no boundary"),
    ):
        with pytest.raises(ValueError, match=line):
            fedrod.make(fedrod.HParams(), problem.task_of(model))
