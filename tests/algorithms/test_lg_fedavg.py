"""LG-FedAvg against numpy: lower layers are the client's, upper ones the server's."""

import chex
import jax
import numpy as np
import pytest

from algorithms import lg_fedavg
from tests.algorithms import plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5}


def state_of(start, cut):
    """Clients with lower layers of their own."""
    state = start()
    own = tuple(jax.tree.leaves(state.clients.params[:cut]))
    return state.replace(clients=own)


def lower(state, number, cut):
    """A client's own layers [kernel, bias]; leaves come as bias, kernel."""
    leaves = [np.float64(leaf[number]) for leaf in state.clients]
    return [leaves[2 * i : 2 * i + 2][::-1] for i in range(cut)]


def reference(state, cohort, table, values):
    """Algorithm 1: own lower and global upper layers train together."""
    cut = values["cut"]
    trained = {}
    for one in plain.clients(state, cohort, table):
        first = lower(state, one.number, cut) + one.server[cut:]
        trained[one.number] = one.train(first, one.sgd(values))
    server = plain.server_layers(state)[:cut] + plain.averaged(trained, table)[cut:]
    return server, None, {number: one[:cut] for number, one in trained.items()}


@pytest.mark.parametrize(("stage", "cut"), [("last", 2), ("dense2", 1)])
def test_rounds_equal_a_numpy_reference(stage, cut, compiled, start, problem):
    """The own layers too; those of absent clients stay, bit for bit."""
    run = compiled("lg_fedavg", floats=FLOATS, shared_from=stage)
    state, values = state_of(start, cut), FLOATS | {"cut": cut}
    changes = dict.fromkeys(FLOATS, 0.3)
    made = lg_fedavg.make(lg_fedavg.HParams(shared_from=stage), problem.task_of())
    for step in plain.follow(run, reference, state, problem, values, changes=changes):
        (own,) = step.more
        for number in range(5):
            found = lower(step.after, number, cut)
            if number in own:
                chex.assert_trees_all_close(found, own[number], rtol=1e-5, atol=1e-5)
                assert plain.differs(found, lower(step.before, number, cut), 1e-3)
            else:
                chex.assert_trees_all_equal(found, lower(step.before, number, cut))
        upper = sum(map(np.size, jax.tree.leaves(step.before.server.params[cut:])))
        plain.assert_both_ways(made, step.sent, 4 * upper)
    assert made.server is None
    for number, one in enumerate(plain.served(made, state)):
        found = plain.layers(one.params)
        expected = lower(state, number, cut) + plain.server_layers(state)[cut:]
        chex.assert_trees_all_equal(found, expected)


def test_nothing_shared_is_refused(problem):
    """That would be `local`."""
    with pytest.raises(ValueError, match="--shared_from=none leaves --model=tiny"):
        lg_fedavg.make(lg_fedavg.HParams(shared_from="none"), problem.task_of())
