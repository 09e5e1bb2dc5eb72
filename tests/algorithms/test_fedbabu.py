"""FedBABU against numpy: the head never moves and never travels."""

import chex
import pytest

from algorithms import fedbabu
from tests.algorithms import plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5}


def reference(state, cohort, table, values):
    """Algorithm 1 with a body of two layers, or of one."""
    body = [True, values["cut"] == 2, False]
    trained = {
        one.number: one.train(one.server, one.sgd(values), trained=lambda _: body)
        for one in plain.clients(state, cohort, table)
    }
    return plain.averaged(trained, table), None


@pytest.mark.parametrize(("stage", "cut"), [("last", 2), ("dense2", 1)])
def test_rounds_equal_a_numpy_reference(stage, cut, compiled, start, problem):
    """The head is that of the beginning, to the bit, and is not in the messages."""
    run = compiled("fedbabu", floats=FLOATS, personal_from=stage)
    state = start().replace(clients=())
    values = FLOATS | {"cut": cut}
    changes = dict.fromkeys(FLOATS, 0.3) | {"cut": 3 - cut}
    made = fedbabu.make(fedbabu.HParams(personal_from=stage), problem.task_of())
    steps = plain.follow(run, reference, state, problem, values, changes=changes)
    for step in steps:
        before, after = (plain.host(one.server.params) for one in step[:2])
        chex.assert_trees_all_equal(before[cut:], after[cut:])
        body = sum(
            leaf.size
            for layer in step.before.server.params[:cut]
            for leaf in layer["trunk"].values()
        )
        plain.assert_both_ways(made, step.sent, 4 * body)
    for one in plain.served(made, state):
        chex.assert_trees_all_equal(one, plain.host(state.server))


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("none", "--personal_from=none leaves --model=tiny without a classifier"),
        ("dense1", "--personal_from=dense1 leaves --model=tiny without an extractor"),
        ("dense9", "--personal_from=dense9: --model=tiny has the stages"),
    ],
)
def test_refused(stage, line, problem):
    with pytest.raises(ValueError, match=line):
        fedbabu.make(fedbabu.HParams(personal_from=stage), problem.task_of())
