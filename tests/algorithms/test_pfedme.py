"""pFedMe against numpy, and its two models: the clients' and the server's."""

import chex
import numpy as np
import pytest

from algorithms import pfedme
from fedjax_pfl import averaging, server_optimizer, shapes, stacked
from tests.algorithms import plain

FLOATS = {
    "client_lr": 0.1,
    "client_lr_decay": 0.5,
    "proximal_weight": 2.0,
    "personal_lr": 0.2,
}


@pytest.fixture
def given(start):
    """Makes states in which some clients took part before."""

    def make(has_own=(1, 0, 1, 0, 1), **more):
        state = start(**more)
        clients = {"own": state.clients, "has_own": np.array(has_own, bool)}
        return state.replace(clients=clients)

    return make


def reference(state, cohort, table, values):
    """Algorithm 1: K steps of theta on a batch, then w moves lambda eta of the gap."""
    weight, local, personal = values["proximal_weight"], {}, {}
    for one in plain.clients(state, cohort, table):
        w, theta, tx = one.server, one.server, one.sgd(values)
        for _, rows, _ in one.steps():
            x, of_logits = table.images(rows), plain.cross_entropy(table.label[rows])
            for _ in range(values["personal_steps"]):
                slope = plain.gradients(theta, x, of_logits)
                slope = plain.total(slope, plain.pull(weight, w)(theta))
                move = plain.scaled(-values["personal_lr"], slope)
                theta = plain.total(theta, move)
            w = tx.step(w, plain.scaled(weight, plain.minus(w, theta)))
        local[one.number], personal[one.number] = w, theta
    is_local = values.get("eval_model") == "local"
    return plain.averaged(local, table), local if is_local else personal


@pytest.mark.parametrize("more", [{}, {"client_momentum": 0.5, "eval_model": "local"}])
def test_rounds_equal_a_numpy_reference(more, compiled, given, problem):
    """Every option matters; what is sent is a model, each way."""
    structure = {"personal_steps": 3} | more
    run = compiled("pfedme", floats=FLOATS, **structure)
    changes = dict.fromkeys(FLOATS, 0.3) | {"personal_steps": 2}
    options = given(), problem, structure | FLOATS
    close = {"rtol": 0, "atol": 1e-5}
    _, last = plain.follow(run, reference, *options, changes=changes, **close)
    assert np.asarray(last.after.clients["has_own"])[list(last.own)].all()
    made = pfedme.make(pfedme.HParams(), problem.task_of())
    size = shapes.tree_bytes(plain.server(last.after))
    plain.assert_both_ways(made, last.sent, size)


def test_own_models_serve_once_there_are_any(given, problem):
    """Who never took part is served the server's model, which is measured too."""
    made = pfedme.make(pfedme.HParams(), problem.task_of())
    state = given()
    for number, one in enumerate(plain.served(made, state)):
        has_own = state.clients["has_own"][number]
        expected = plain.own(state, number) if has_own else plain.server(state)
        chex.assert_trees_all_equal(one, expected)
    ((name, (_, variables)),) = made.server(state, problem.data).items()
    assert name == "global"
    chex.assert_trees_all_equal(variables, state.server)


def test_running_statistics_are_those_of_theta(compiled, given, problem):
    """The server has their mean."""
    state = given([0] * 5, server="with_norm")
    after, *_ = compiled("pfedme", "with_norm")(state)
    ids = np.flatnonzero(after.clients["has_own"])
    rows = [plain.at(after.clients["own"].stats, number) for number in ids]
    share = problem.table.train.count[ids] / problem.table.train.count[ids].sum()
    expected = plain.total(*map(plain.scaled, share, rows))
    chex.assert_trees_all_close(after.server.stats, expected, rtol=1e-4, atol=1e-5)
    assert plain.differs(after.server.stats, state.server.stats)


def test_server_moves_by_beta(compiled, given):
    """With `--server_optimizer=sgd` w^{t+1} = (1 - beta) w^t + beta mean."""
    state = given()
    whole, *_ = compiled("pfedme")(state, **FLOATS)
    tx = server_optimizer.make(pfedme.HParams(server_optimizer="sgd"))
    moments = tx.init(state.server.params)
    first = state.replace(server={"model": state.server, "moments": moments})
    mixed = compiled("pfedme", server_optimizer="sgd")
    after, *_ = mixed(first, server_lr=0.5, **FLOATS)
    expected = plain.mean([plain.server_layers(one) for one in (whole, state)], [1, 1])
    chex.assert_trees_all_close(plain.server_layers(after), expected, atol=1e-6)


def test_the_loss_is_the_envelope_s(compiled, start, problem):
    """Of pFedMe: f_i(theta) + lambda / 2 ||theta - w||^2, not the pull alone."""
    state = start()
    rows = stacked.repeat(averaging.without_own(state.server), 5)
    state = state.replace(clients=rows)
    given = {"client_lr": 0.0, "personal_lr": 0.0, "client_lr_decay": 1.0}
    _, metrics, _ = compiled("pfedme")(state, **given)
    state = state.replace(clients=())
    rates = {"client_lr": 0.0, "client_lr_decay": 1.0}
    _, expected, _ = compiled("fedavg")(state, **rates)
    np.testing.assert_allclose(
        metrics["train_loss"][0], expected["train_loss"][0], rtol=1e-5
    )
