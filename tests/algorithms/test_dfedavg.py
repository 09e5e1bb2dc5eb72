"""Decentralised FedAvg, FedPer and DFedAvgM against numpy, and what is counted."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algorithms
from algorithms import dfedavg
from fedjax_pfl import local_training, optimizer, shapes, types
from launch import build
from launch.config import resolve
from tests.algorithms import conftest, plain
from tests.fedjax_pfl import small

GRAPH = types.PeerSpec(5, "erdos_renyi", edge_probability=0.4)
ALONE = 2
STRUCTURES = {
    "dfedavg": {"client_momentum": 0.5, "optimizer_state": "persist"},
    "dfedper": {"client_momentum": 0.5, "optimizer_state": "persist"},
    "dfedavgm": {"client_momentum": 0.5},
}
FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.8}
NUM_STAGES = 3


def hparams_of(name, **given):
    return algorithms.ALGORITHMS[name].HParams(batch_size=5, **given)


def make(name, task, **given):
    return algorithms.ALGORITHMS[name].make(hparams_of(name, **given), task)


@pytest.fixture(scope="module")
def cohort_at(problem):
    """`round -> Cohort` of three of five clients with peers by chance, one without."""
    return plain.with_peers(problem.cohort, GRAPH, ALONE)


@pytest.fixture(scope="module")
def given(start):
    """Makes states before round 0 whose models are all different."""

    def make(name="dfedavg"):
        state = start(round=0)
        hparams = hparams_of(name, **STRUCTURES.get(name, {}))
        kept = small.opt_states(hparams, state.server.params, 5)
        clients = {"own": state.clients, "private": ()}
        return state.replace(server=(), clients=clients, opt_state=kept)

    return make


def mixed(one, name):
    """A client's layers after mixing: those shared, then its own."""
    sources = [one.number, *one.peers]
    own = {k: plain.own_layers(one.state, k) for k in sources}
    mean = plain.averaged(own, one.table, is_uniform=name == "dfedavgm")
    cut = NUM_STAGES - (name == "dfedper")
    return mean[:cut] + own[one.number][cut:]


def reference(name, txs, state, cohort, table, values):
    """Pull the last round's end, mix, train."""
    return None, {
        one.number: one.train(mixed(one, name), txs.of(one.number, one.rate(values)))
        for one in plain.clients(state, cohort, table)
    }


@pytest.mark.parametrize("name", STRUCTURES)
def test_rounds_equal_a_numpy_reference(name, compiled, given, problem, cohort_at):
    """Momentum is kept, or begins again (test 18)."""
    keep = STRUCTURES[name].get("optimizer_state") == "persist"
    txs = plain.Optimizers(lambda rate: plain.Sgd(rate, 0.5), keep)
    run, state = compiled(name, floats=FLOATS, **STRUCTURES[name]), given(name)
    expected, more = functools.partial(reference, name, txs), {"cohort_at": cohort_at}
    steps = plain.follow(run, expected, state, problem, FLOATS, num_rounds=4, **more)
    made, degrees = make(name, problem.task_of(), **STRUCTURES[name]), []
    sizes = [
        4 * sum(leaf.size for leaf in layer) for layer in steps[0].own.popitem()[1]
    ]
    shared = sum(sizes[: NUM_STAGES - (name == "dfedper")])
    for step in steps:
        mine = step.cohort.peer_mask.sum(1).tolist()
        assert plain.sent_bytes(made, step.sent, 3) == [
            {"bytes_up": 0, "bytes_down": shared * degree} for degree in mine
        ]
        degrees += mine
    assert 0 in degrees and max(degrees) > 1


def test_the_reference_tells_the_names_apart(given, problem, cohort_at):
    """Guards the test above: weights and the private layer matter."""
    one = max(
        plain.clients(given(), cohort_at(1), problem.table), key=lambda c: len(c.peers)
    )
    found = [mixed(one, name) for name in STRUCTURES]
    assert plain.differs(found[0], found[1], 1e-2)
    assert plain.differs(found[0], found[2], 1e-2)


def test_nobody_sees_a_present_round(compiled, given, cohort_at):
    """Test 15: what one client trains changes nobody else before the next round."""
    run, state = compiled("dfedavg", **STRUCTURES["dfedavg"]), given()
    rounds = [cohort_at(round) for round in range(8)]
    # A round in which the client of the first row is somebody's peer.
    pairs = ((one, one.client_id[0]) for one in rounds)
    cohort, number = next(
        (one, k) for one, k in pairs if (one.peers == k)[one.peer_mask].any()
    )
    steps = np.where(np.arange(3) == 0, 0, cohort.plans["local"].num_steps)
    resting = plain.cut(cohort, steps)
    (first, *_), (second, *_) = (run(state, one, **FLOATS) for one in (cohort, resting))
    for other in range(5):
        pair = [plain.own(one, other) for one in (first, second)]
        if other == number:
            assert plain.differs(*pair)
        else:
            chex.assert_trees_all_equal(*pair)
    (first, *_), (second, *_) = (run(one, cohort, **FLOATS) for one in (first, second))
    assert any(
        plain.differs(plain.own(first, other), plain.own(second, other))
        for other in set(range(5)) - {number}
    )


@pytest.fixture(scope="module")
def everybody(problem):
    """The cohort of all five clients, each with all others as peers."""
    plans = (local_training.plan(hparams_of("dfedavg")),)
    cohort = plain.planner(problem.data, plans, clients_per_round=5)
    return plain.with_peers(cohort, types.PeerSpec(5, "full"))(0)


@pytest.mark.parametrize("name", STRUCTURES)
def test_all_peers_make_all_alike(name, given, problem, everybody):
    """Test 6: after mixing, sum n_j w_j / sum n_j; but each has its own last layer."""
    made, state = make(name, problem.task_of()), given()
    jitted = made._replace(serving=jax.jit(made.serving))
    served = plain.served(jitted, state, everybody, problem.data)
    own = {number: plain.own_layers(state, number) for number in range(5)}
    expected = plain.averaged(own, problem.table, is_uniform=name == "dfedavgm")
    cut = NUM_STAGES - (name == "dfedper")
    for number in range(5):
        found = plain.layers(served[number].params)
        chex.assert_trees_all_close(found[:cut], expected[:cut], atol=1e-6)
        chex.assert_trees_all_equal(found[cut:], own[number][cut:])


def test_schedule_of_the_paper():
    """Test 13: .05 x .95^r with the preset's numbers."""
    for name in STRUCTURES:
        _, hparams = resolve.configure({"algo": name})
        for round in (0, 1, 149):
            found = optimizer.learning_rate(hparams, jnp.int32(round))
            np.testing.assert_allclose(found, 0.05 * 0.95**round, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "kept", "weights", "epochs", "cut"),
    [
        ("dfedavg", "persist", "examples", 5, "none"),
        ("dfedper", "persist", "examples", 5, "last"),
        ("dfedavgm", "reset", "uniform", 10, "none"),
    ],
)
def test_names_and_their_preset(name, kept, weights, epochs, cut):
    """All clients in each round, five peers; DFedAvgM has twice the epochs."""
    config, hparams = resolve.configure({"algo": name, "num_clients": 7})
    assert (hparams.num_peers, hparams.batch_size) == (5, 50)
    assert (hparams.client_momentum, hparams.local_epochs) == (0.5, epochs)
    assert (hparams.optimizer_state, hparams.aggregation) == (kept, weights)
    assert hparams.personal_from == cut and config.preset == "uapdfl"


@pytest.mark.parametrize(
    ("name", "personal_from", "shared"),
    [
        ("dfedavg", "none", 3),
        ("dfedper", "last", 2),
        ("dfedavg", "dense2", 1),
        ("dfedavg", "", 2),
    ],
)
def test_what_a_message_holds(name, personal_from, shared, problem):
    """The whole model, or the stages below the cut; received, never sent."""
    made = make(name, problem.task_of(), personal_from=personal_from)
    sizes = shapes.stage_bytes(conftest.NETWORKS["tiny"], (8, 8, 1))
    kind = "whole model" if shared == 3 else "extractor"
    expected = types.MessageKind(kind, "down", sum(sizes[:shared]))
    assert made.messages == (expected,)


def test_traffic_of_a_run(blobs):
    """Test 14: clients x rounds x peers x the shared parameters, of each seed."""
    num_bytes = 4 * (64 * 128 + 128 + 128 * 64 + 64)
    experiment = build.experiment(
        algo="dfedper",
        dataset=blobs,
        model="mlp",
        num_clients=6,
        num_peers=2,
        rounds=3,
        local_epochs=1,
        num_seeds=2,
        devices=1,
    )
    assert experiment.config.clients_per_round == 6
    summary = experiment.run()
    messages = 6 * 3 * 2
    found = summary["traffic"].pop("extractor")
    assert found["direction"] == "down" and not summary["traffic"]
    assert found["messages"]["per_seed"] == [messages] * 2
    assert found["bytes"]["per_seed"] == [messages * num_bytes] * 2
    assert summary["metrics"]["bytes_down"]["mean"] == messages * num_bytes
    assert summary["metrics"]["bytes_up"]["mean"] == 0


def test_a_file_s_graph_is_part_of_the_data(blobs, tmp_path):
    """A run does not go on with another graph of the same name."""
    path, found = tmp_path / "graph.npz", []
    ring = np.roll(np.eye(4, dtype=int), 1, axis=1)
    for table in (ring, np.asfortranarray(ring.T), ring):
        np.savez(path, adjacency=table)
        made = build.experiment(
            algo="dfedavg",
            dataset=blobs,
            model="mlp",
            num_clients=4,
            topology="file",
            adjacency=str(path),
            devices=1,
        )
        cohort = made.planner.drawn(0, 3)
        np.testing.assert_array_equal(
            np.eye(4)[cohort.peers[:, 0]], table[cohort.client_id]
        )
        found.append(made.data_sha256)
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"personal_from": "dense1"}, "no parameters before --personal_from=dense1"),
        ({"personal_from": "F9"}, "--personal_from=F9: .*dense1, dense2, last"),
    ],
)
def test_refused(given, words, problem):
    """One line with the flag, what came and what to change."""
    with pytest.raises(ValueError, match=words):
        make("dfedavg", problem.task_of(), **given)
    assert dfedavg.HParams().personal_from == "none"
