"""How methods with a model for each client begin, and which client each serves."""

import chex
import jax
import numpy as np
import pytest

import algorithms
from fedjax_pfl import types
from tests.algorithms import plain

# The options that set the epochs of each plan
PLANS = {name: {"local": "local_epochs"} for name in algorithms.ALGORITHMS}
PLANS["fedict"] |= {"server": "server_epochs", "distill": "distill_epochs"}
PLANS["fedd2s"] = {"server": "server_epochs", "local": "local_epochs"}
# Those whose clients have a whole model, which serves its client from the beginning
OWN = ("local", "ditto", "cdkt", "fedict", "fedd2s")
WITHOUT_SERVER = ("fedict", "fedd2s")
COUNTERS = {"has_own", "has_joined", "participations"}


@pytest.mark.parametrize("algo", [*OWN, "pfedsd", "apfl", "fedper", "fedrep_plus"])
def test_all_start_from_one_model(algo, problem):
    """Section 1.0 of the specifications; nobody has taken part, and each own serves.

    Every plan has the epochs asked for, and a name, so that no batch order is used
    twice.
    """
    module = algorithms.ALGORITHMS[algo]
    epochs = {plan: 4 + n for n, plan in enumerate(PLANS[algo])}
    asked = {option: epochs[plan] for plan, option in PLANS[algo].items()}
    made = module.make(module.HParams(batch_size=7, **asked), problem.task_of())
    assert {*made.plans} == {
        types.PlanSpec(*one, 7, at_server=one[0] == "server") for one in epochs.items()
    }
    state = jax.jit(made.init)(problem.data, jax.random.key(0))
    assert int(state.round) == 0
    whole = plain.host(plain.server(state))
    for number in range(5):
        own = plain.own(state, number)
        last = types.Variables(*(side[-len(own.params) :] for side in whole))
        chex.assert_trees_all_equal(own, last)
    rows = state.clients if isinstance(state.clients, dict) else {}
    for name in rows.keys() & COUNTERS:
        assert not np.asarray(rows[name]).any()

    if algo in OWN:
        state = plain.with_own(state, plain.perturbed(plain.own(state)))
        plain.assert_own_serve(made, state)
        assert (made.server is None) == (algo in WITHOUT_SERVER)
    if algo in OWN and made.server is not None:
        ((name, (model, variables)),) = made.server(state, problem.data).items()
        assert (name, model.name) == ("global", "tiny")
        chex.assert_trees_all_equal(variables, plain.server(state))
