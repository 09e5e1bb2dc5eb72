"""`--optimizer_state=persist`: each client's momentum lives on, never anybody else's.

Distillation is switched off, so that every algorithm's client update is minibatch
descent on cross-entropy and one numpy reference serves all of them.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algorithms
from fedjax_pfl import program, shapes, types
from tests.algorithms import conftest, plain

FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5}


class Case(NamedTuple):
    """How an algorithm is made to train on cross-entropy alone.

    Attributes:
        options: What switches everything else off.
        shared: How many of the three stages are the server's, the mean of the round's
            clients; the others are a client's own.
        plans: The plans that train clients, in order.
    """

    options: dict
    shared: int
    plans: tuple = ("local",)


SILENT = {"client_distill_weight": 0.0, "server_distill_weight": 0.0}
HEAD_FIRST = {"personal_from": "dense2", "local_epochs": 2, "head_epochs": 1}
# A name of each frame: averaged models, one beside a personal model that always starts
# with a fresh state, parts of a model, peers, a proxy set, clients in turn. The engine
# keeps the states of them all; levels and architectures have tests of their own.
CASES = {
    "fedavg": Case({}, 3),
    "ditto": Case({}, 3),
    "fedrep": Case(HEAD_FIRST, 1),
    # Nobody has a peer here.
    "dfedavg": Case({}, 0),
    "cdkt": Case(SILENT, 0),
    # One state for both of its phases.
    "fedict": Case({"distill_weight": 0.0}, 0, ("local", "distill")),
}


def hparams_of(name, **more):
    common = {"batch_size": 5, "client_momentum": 0.5}
    return algorithms.ALGORITHMS[name].HParams(**common | more)


def first_shapes(made, hparams, task, data):
    """Shapes of the state before the first round."""
    first = functools.partial(program.first_state, made, hparams, task)
    return jax.eval_shape(first, data, jax.random.key(0))


def state_of(state):
    """A state whose models are all the same random one, masks True, the rest 0."""
    # Masks may be two bits.
    true = {np.dtype(bool): True, np.dtype(np.uint8): 3}
    state = jax.tree.map(
        lambda leaf: jnp.full(leaf.shape, true.get(leaf.dtype, 0), leaf.dtype),
        state.replace(key=()),
    ).replace(key=jax.random.key(0))
    start = conftest.random_params(conftest.NETWORKS["tiny"], 0)
    if state.server != ():
        state = plain.with_server(state, start)
    if state.clients != ():
        lowest = 3 - len(plain.own(state).params)
        own = types.Variables(*(side[lowest:] for side in start))
        state = plain.with_own(state, plain.stack([own] * 5))
    return jax.tree.map(jnp.asarray, state), plain.layers(start.params)


def reference(start, cohorts, table, hparams, case, keep):
    """(the server's layers, own layers by client) after rounds with kept momentum."""
    txs = plain.Optimizers(lambda rate: plain.Sgd(rate, 0.5), keep)
    server, own, shared = start, dict.fromkeys(range(5), start), case.shared
    body = [i < shared for i in range(3)]
    stages = [[not one for one in body], body].__getitem__
    stages = stages if getattr(hparams, "head_epochs", 0) else None
    is_uniform = getattr(hparams, "aggregation", "uniform") == "uniform"
    for round, cohort in enumerate(cohorts):
        trained = {}
        for one in plain.clients(None, cohort, table):
            tx = txs.of(one.number, 0.1 * 0.5**round)
            params = server[:shared] + own[one.number][shared:]
            for name in case.plans:
                params = one.train(params, tx, name, trained=stages)
            trained[one.number] = params
        own |= trained
        mean = plain.averaged(trained, table, is_uniform)
        server = mean[:shared] + server[shared:]
    return server, own


@pytest.mark.parametrize("name", CASES)
def test_kept_momentum_equals_a_numpy_reference(name, problem):
    """Three rounds with a momentum that each client keeps; a reset one is another."""
    case, persist = CASES[name], {"optimizer_state": "persist"}
    hparams = hparams_of(name, **case.options, **FLOATS, **persist)
    task = problem.task_of()
    made = algorithms.ALGORITHMS[name].make(hparams, task)
    cohort_at = plain.planner(problem.data, made.plans)
    cohorts = [cohort_at(round) for round in range(3)]
    ids = [number for cohort in cohorts for number in plain.members(cohort)]
    often = {number for number in ids if ids.count(number) > 1}
    assert len(often) > 1

    state, start = state_of(first_shapes(made, hparams, task, problem.data))
    run = jax.jit(made.round)
    for cohort in cohorts:
        state = jax.device_put(state, jax.devices()[0])  # not where a round leaves it
        before, (state, _, _) = state, run(state, cohort, problem.data)
        for absent in set(range(5)) - set(plain.members(cohort)):
            pair = (plain.at(one.opt_state, absent) for one in (before, state))
            chex.assert_trees_all_equal(*pair)

    given = start, cohorts, problem.table, hparams, case
    kept, reset = (reference(*given, keep) for keep in (True, False))
    for number in range(5) if case.shared < 3 else ():
        found = plain.own_layers(state, number)
        expected = kept[1][number][3 - len(found) :]
        chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
        if number in often:
            other = reset[1][number][3 - len(found) :]
            assert plain.differs(expected, other, 1e-3)
    if case.shared:
        found = plain.server_layers(state)
        chex.assert_trees_all_close(found, kept[0], rtol=1e-5, atol=1e-5)
        assert plain.differs(kept[0], reset[0], 1e-3)


# Those whose states are other than a model for each client.
SHAPED = {
    "apfl": ("tiny", {}),
    "depthfl": ("with_exits", {"level_mix": "1:1:1"}),
    "heterofl": ("sliced", {}),
    "splitmix": ("sliced", {}),
    "dispfl": ("tiny", {"num_peers": 2}),
}


@pytest.mark.parametrize("name", SHAPED)
def test_states_are_kept_for_every_client(name, problem):
    """A momentum for each client and parameter, none where it is reset.

    A round gives back what it was given.
    """
    found, (network, own) = {}, SHAPED[name]
    for kept in ("reset", "persist"):
        hparams = hparams_of(name, optimizer_state=kept, **own)
        task = problem.task_of(network, network)
        made = algorithms.ALGORITHMS[name].make(hparams, task)
        state = first_shapes(made, hparams, task, problem.data)
        found[kept] = {leaf.shape for leaf in jax.tree.leaves(state.opt_state)}
    model, clients = conftest.NETWORKS[network], (5,)
    if name == "splitmix":
        # Four bases of half the width.
        model, clients = model.at_width(0.5), (5, 4)
    params, _ = shapes.variables(model, (8, 8, 1))
    expected = {(*clients, *leaf.shape) for leaf in jax.tree.leaves(params)}
    if name == "apfl":
        # The share of a client's own model is trained too.
        expected.add((5,))
    assert found == {"reset": set(), "persist": expected}
    cohort = plain.planner(problem.data, made.plans)(0)
    if made.peers:
        peers = np.zeros((3, made.peers.num_peers), np.int32)
        cohort = cohort.replace(peers=peers, peer_mask=peers == 0)
    after, _, _ = jax.eval_shape(made.round, state, cohort, problem.data)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
