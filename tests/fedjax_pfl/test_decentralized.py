"""Rounds without a server, with a client update that needs no training."""

import dataclasses
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data import topology
from fedjax_pfl import (
    decentralized,
    each_client,
    evaluate,
    execution,
    local_training,
    losses,
    program,
    shapes,
    stacked,
    types,
)
from launch import build
from tests import counted, synthetic
from tests.algorithms import plain
from tests.fedjax_pfl import small
from tests.toys import gossip

MIX = jax.jit(decentralized.mix, static_argnums=2)
SIZES = [4, 1, 3, 2]
MODEL = small.linear()
WIDE = small.linear(num_exits=3)
# Client 1 has no peer; the padding row stands in the middle.
IDS = [2, 4, 0, 1]
PEERS = [[0, 3], [0, 0], [1, 0], [2, 3]]
MASK = [[True, True], [False, False], [True, False], [False, False]]


def task(model=MODEL, chunk=1):
    """Four clients of one model."""
    how = execution.Execution(chunk)
    return types.Task(model, (model,), np.zeros(4), 4, 4, 0, 4, 4, (3,), how)


@pytest.fixture(scope="module")
def tables():
    """Examples of four clients, and a cohort of three of them with a padding row."""
    data = small.tables(SIZES)
    plan = jax.tree.map(lambda x: x[jnp.array([2, 0, 0, 1])], small.plan(SIZES))
    cohort = small.cohort(IDS, 4, {"local": plan}).replace(
        peers=jnp.asarray(PEERS, jnp.int32), peer_mask=jnp.asarray(MASK)
    )
    return data, cohort


def everybody(model, seed=0):
    """Four different models, leaves [4, ...]."""
    gen = np.random.default_rng(seed)
    shape = shapes.variables(model, (3,))
    return jax.tree.map(
        lambda leaf: jnp.asarray(gen.normal(size=(4, *leaf.shape)), jnp.float32), shape
    )


def mixed(state, cohort, data):
    """By examples; client 0 copies its first peer, and is told of its age."""
    models, age = state.clients["own"], state.clients["private"]
    weight = decentralized.weights("examples", cohort, data)
    mean = decentralized.mix(models, cohort, 1, weight, weight)
    copies = cohort.client_id == 0
    copied = stacked.take(models, cohort.peers[:, 0])
    return decentralized.Mixed(
        stacked.where(copies, copied, mean),
        sent={"model": cohort.peer_mask.sum(1), "age": 1},
        given=stacked.take(age, cohort.peers[:, 0]),
        metrics={"copies": losses.masked_sum(copies, cohort.row_mask)},
    )


@dataclasses.dataclass(frozen=True)
class HParams(decentralized.Peers, local_training.LocalTraining):
    """What the frame wants."""


PERSISTENT = HParams(client_momentum=0.9, optimizer_state="persist")


def client_update(client, start):
    """The model moves by the client's id, its private row is what it was given + 1."""
    by = client.id.astype(jnp.float32)
    moved = jax.tree.map(lambda leaf: leaf + by, start)
    kept = jax.tree.map(lambda leaf: leaf + 10 * by, client.opt_state)
    pair = (by, jnp.int32(1))
    trained = each_client.Trained(*moved, kept, pair, persists=True)
    return trained, client.own + 1


@pytest.fixture(scope="module", params=[1, 4])
def method(request):
    """All hooks used; client by client and all at once."""
    kinds = (types.MessageKind("model", "down", 48), types.MessageKind("age", "up", 4))
    return decentralized.make(
        PERSISTENT,
        task(chunk=request.param),
        mixed,
        client_update,
        messages=kinds,
        peers=types.PeerSpec(2),
        private=lambda start: jnp.zeros(()),
    )


@pytest.fixture(scope="module")
def pulled(method, tables):
    """A state in round 5 with different models and ages, and its next round."""
    data, cohort = tables
    given = method, PERSISTENT, task(), data
    state = program.first_state(*given, jax.random.key(0))
    clients = {"own": everybody(MODEL), "private": jnp.array([10.0, 20, 30, 40])}
    state = state.replace(clients=clients, round=jnp.int32(5))
    return state, jax.jit(method.round)(state, cohort, data)


def expected_models(state):
    """Client 2 takes the mean of 2, 0, 3; 0 copies 1; 1 has no peer, 3 is absent."""
    w = np.float64(state.clients["own"].params[0]["w"])
    mean = (3 * w[2] + 4 * w[0] + 2 * w[3]) / 9
    return np.stack([w[1], w[1], mean, w[3]])


def test_a_round(method, pulled):
    """Pulled from the end of the last round, trained, and put back where it was."""
    state, (after, metrics, sent) = pulled
    expected = expected_models(state) + np.array([0, 1, 2, 0])[:, None, None]
    found = after.clients["own"].params[0]["w"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    # Clients 2, 0 and 1 were given the ages of their first peers 0, 1 and 2.
    np.testing.assert_array_equal(after.clients["private"], [21, 31, 11, 40])
    (momentum,) = jax.tree.leaves(after.opt_state)
    np.testing.assert_array_equal(momentum[:, 0, 0], [0, 10, 20, 0])
    assert int(after.round) == 6
    assert tuple(map(float, metrics["train_loss"])) == (3, 3)
    assert tuple(map(float, metrics["copies"])) == (1, 3)
    np.testing.assert_array_equal(sent["model"], [2, 0, 1, 0])
    assert int(sent["age"]) == 1
    assert [kind.name for kind in method.messages] == ["model", "age"]
    assert method.peers == types.PeerSpec(2) and method.server is None


def test_a_replaced_model_is_a_copy(pulled, tables):
    """Test 3: bit for bit, and so is what the isolated and the absent client keep."""
    data, cohort = tables
    state, (after, *_) = pulled
    model = jax.jit(mixed)(state, cohort, data).model
    own = state.clients["own"]
    chex.assert_trees_all_equal(
        jax.tree.map(lambda leaf: leaf[jnp.array([2, 3])], model),
        jax.tree.map(lambda leaf: leaf[jnp.array([1, 1])], own),
    )
    chex.assert_trees_all_equal(
        jax.tree.map(lambda leaf: leaf[3], after.clients["own"]),
        jax.tree.map(lambda leaf: leaf[3], own),
    )


def test_served_after_mixing_and_before_training(method, pulled, tables):
    """Those of the next round are served what they have pulled, the others their own.

    Everybody is served once, whoever takes part.
    """
    data, cohort = tables
    state, _ = pulled
    groups = method.serving(state, cohort, data)
    expected = expected_models(state)
    served = []
    for group in groups:
        for entry in np.flatnonzero(group.mask):
            number = int(group.client_id[entry])
            served.append(number)
            found = group.own.params[0]["w"][entry]
            np.testing.assert_allclose(found, expected[number], rtol=1e-5, atol=1e-6)
    assert sorted(served) == [0, 1, 2, 3]


def peers_of_three(name, arrays, **options):
    """A decentralised method of three peers, with rows in the order of clients."""
    return build.experiment(
        algo=name,
        client_state="replicated",
        preset="none",
        dataset=arrays,
        model="mlp",
        test_split="client_share",
        num_peers=3,
        **options,
    )


@pytest.mark.parametrize(
    "name", ["dfedavg", pytest.param("dispfl", marks=pytest.mark.slow)]
)
def test_nothing_copies_the_population(name):
    """The same counts as from one population with the mixed rows put into it.

    That would be a copy of it: here what a round and an evaluation need beside the
    state is a fraction of the state.
    """
    source = synthetic.blobs(2400, (6, 6, 1), 4)
    experiment = peers_of_three(
        name,
        (source.image, source.label),
        partition="iid",
        num_clients=300,
        clients_per_round=6,
        rounds=2,
        local_epochs=1,
        c_gen=True,
        eval_clients="all",
    )
    simulation, task = experiment.simulation, experiment.task
    simulation.advance_to(2)
    found = simulation.evaluate()
    size = shapes.tree_bytes(experiment.state.clients["own"])
    for compiled in (experiment.program.rounds, experiment.program.of_clients):
        (executable,) = compiled.executables
        # A copy of masks alone would be a quarter.
        assert executable.memory_analysis().temp_size_in_bytes < size / 5

    algorithm = experiment.program.algorithm

    def put(state, cohort, data):
        rest, mixed = algorithm.serving(state, cohort, data)
        own = stacked.put(rest.own, cohort.row, mixed.own)
        return (types.Serving.each(task.client_model, own),)

    one = algorithm._replace(serving=put)
    state, data = plain.at(experiment.state.replace(key=()), 0), experiment.data
    state = state.replace(key=experiment.state.key[0])
    scoring = evaluate.Scoring(64, 8, num_scored=300, scored="all")
    cohort = experiment.planner.drawn(0, 2)
    data = data.replace(partition=plain.at(data.partition, 0))
    counts = counted.both(one, state, cohort, data, scoring, task.execution)
    test = plain.host(data.partition.test)
    union = int((test.row >= 0).sum())
    expected, of_clients = scoring.score.metrics(counts, test.count, union)
    ((metrics, own),) = found
    assert {"client_accuracy", "c_gen"} <= expected.keys()
    loss = expected.pop("client_loss")
    assert metrics.items() >= expected.items()
    np.testing.assert_allclose(metrics["client_loss"], loss, rtol=1e-6)
    np.testing.assert_array_equal(own["accuracy"], of_clients["accuracy"])


def test_clients_start_alike_and_may_keep_nothing_else(tables):
    """Without `private` the update returns what was trained alone."""
    data, cohort = tables

    def alone(state, cohort, data):
        models = stacked.take(state.clients["own"], cohort.row)
        return decentralized.Mixed(models, sent={})

    def update(client, start):
        assert client.own == ()
        return client_update(client.replace(own=0), start)[0]

    method = decentralized.make(
        HParams(),
        task(),
        alone,
        update,
        messages=(),
        peers=types.PeerSpec(2),
    )
    state = method.init(data, jax.random.key(0))
    w = state.clients["own"].params[0]["w"]
    assert (w == w[:1]).all() and state.opt_state == state.server == ()
    after, metrics, sent = jax.jit(method.round)(state, cohort, data)
    assert after.clients["private"] == () and sent == {}
    moved = after.clients["own"].params[0]["w"] - w
    np.testing.assert_allclose(moved[:, 0, 0], [0, 1, 2, 0], atol=1e-6)
    assert set(metrics) == {"train_loss"}


def test_weights(tables):
    """Train examples of each client and of its peers, or all the same."""
    data, cohort = tables
    found = decentralized.weights("examples", cohort, data)
    expected = [[3, 4, 2], [4, 1, 4], [1, 3, 2]]
    np.testing.assert_array_equal(found[jnp.array([0, 2, 3])], expected)
    np.testing.assert_array_equal(
        decentralized.weights("uniform", cohort, data), np.ones((4, 3))
    )


@pytest.mark.parametrize("cut", range(4))
def test_stages_of_a_cut(cut, tables):
    """Test 9: below the cut one set of weights, above it another; no stage in both."""
    _, cohort = tables
    models = everybody(WIDE)
    below, above = jnp.ones((4, 3)), jnp.ones((4, 1))
    found = MIX(models, cohort, cut, below, above)
    for number, stage in enumerate(found.params):
        w = np.float64(models.params[number]["w"])
        mean = np.stack([(w[2] + w[0] + w[3]) / 3, (w[0] + w[1]) / 2, w[1]])
        expected = mean if number < cut else w[np.array([2, 0, 1])]
        got = stage["w"][jnp.array([0, 2, 3])]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert len(found.params) == len(found.stats) == 3


def drawn(kind, round, num_clients, num_peers=4, **more):
    """A cohort of everybody with the peers of a drawn graph."""
    graph = topology.make(types.PeerSpec(num_peers, kind, **more), num_clients)
    peers, mask = graph.draw(0, round, np.arange(num_clients))
    return small.cohort(range(num_clients), num_clients).replace(
        peers=jnp.asarray(peers, jnp.int32), peer_mask=jnp.asarray(mask)
    )


def matrix(weight, cohort):
    """The rows of the mixing matrix: what becomes of unit vectors."""
    unit = types.Variables(({"w": jnp.eye(len(cohort.row))},), ({},))
    return np.asarray(MIX(unit, cohort, 1, weight, weight).params[0]["w"])


def test_rows_of_the_mixing_matrix_are_weights():
    """Test 1: they sum to 1, none is negative, and only peers and oneself have any."""
    gen = np.random.default_rng(0)
    for round in range(200):
        cohort = drawn("erdos_renyi", round, 9, edge_probability=0.3)
        size = gen.uniform(1, 100, (9,)).astype(np.float32)
        weight = np.concatenate([size[:, None], size[np.asarray(cohort.peers)]], 1)
        found = matrix(jnp.asarray(weight), cohort)
        np.testing.assert_allclose(found.sum(1), np.ones(9), atol=1e-6)
        expected = np.eye(9)
        for client in range(9):
            for place in np.flatnonzero(cohort.peer_mask[client]):
                expected[client, cohort.peers[client, place]] = 1
        np.testing.assert_array_equal(found > 0, expected > 0)
        assert (found >= 0).all()


def test_equal_weights_on_a_regular_graph_keep_the_mean():
    """Test 12: columns sum to 1 too; equal models stay what they are on any graph."""
    cohort = drawn("regular", 0, 10)
    weight = jnp.ones((10, 5))
    np.testing.assert_allclose(matrix(weight, cohort).sum(0), np.ones(10), atol=1e-6)
    equal = types.Variables(({"w": jnp.full((10, 3), 0.7)},), ({},))
    for kind in ("regular", "random", "ring"):
        cohort = drawn(kind, 1, 10)
        found = MIX(equal, cohort, 1, weight, weight)
        np.testing.assert_allclose(found.params[0]["w"], 0.7, rtol=1e-6)


def test_renamed_clients_have_renamed_models():
    """Test 11: nothing depends on a client's number."""
    gen = np.random.default_rng(0)
    models, cohort = gen.normal(size=(10, 3)).astype(np.float32), drawn("random", 0, 10)
    size = gen.uniform(1, 9, 10).astype(np.float32)
    name = gen.permutation(10)  # the new name of each

    def mixed(models, size, peers):
        renamed = cohort.replace(peers=jnp.asarray(peers, jnp.int32))
        weight = jnp.asarray(np.concatenate([size[:, None], size[peers]], 1))
        one = types.Variables(({"w": jnp.asarray(models)},), ({},))
        mean = MIX(one, renamed, 1, weight, weight)
        return np.asarray(mean.params[0]["w"])

    peers, order = np.asarray(cohort.peers), np.argsort(name)
    before = mixed(models, size, peers)
    after = mixed(models[order], size[order], name[peers][order])
    np.testing.assert_allclose(after[name], before, rtol=1e-6, atol=1e-6)


def test_statistics_follow_the_extractor(tables):
    """Also those of stages behind the cut, whose parameters stay; bytes as well."""
    _, cohort = tables
    gen = np.random.default_rng(0)
    stage = {"w": np.float32(gen.normal(size=(4, 3)))}
    stat = {"mean": np.float32(gen.normal(size=(4, 2)))}
    models = types.Variables((stage, stage), (stat, stat))
    count = cohort.peers.shape[1]
    everyone = jnp.ones((len(cohort.row), 1 + count))
    found = decentralized.mix(models, cohort, 1, everyone, everyone[:, :1])
    chex.assert_trees_all_close(found.stats[0], found.stats[1])
    own = np.asarray(stage["w"])[np.minimum(cohort.row, 3)]
    np.testing.assert_array_equal(found.params[1]["w"], own)
    has_peers = np.asarray(cohort.row_mask & cohort.peer_mask.any(1))
    assert has_peers.any()
    for leaf, table in (
        (found.params[0]["w"], stage["w"]),
        (found.stats[1]["mean"], stat["mean"]),
    ):
        apart = (
            np.abs(np.asarray(leaf) - table[np.minimum(cohort.row, 3)]).max(1) > 1e-3
        )
        np.testing.assert_array_equal(
            apart[np.asarray(cohort.row_mask)], has_peers[np.asarray(cohort.row_mask)]
        )


def test_a_client_is_measured_at_two_moments(blobs):
    """Mixed and not yet trained (Client, UA), and as its last training left it."""
    experiment = peers_of_three(
        "dfedavg",
        blobs,
        partition="pathological",
        partition_seed=1,
        num_clients=8,
        clients_per_round=4,
        rounds=3,
        local_epochs=2,
        client_lr=0.1,
    )
    experiment.run(progress=False)
    state, data = experiment.state, experiment.data
    test = plain.at(data.partition.test, 0)
    model = experiment.task.client_model

    def accuracy(models):
        """Mean over clients of that of their rows in `models`, on their own tests."""
        found = []
        for number in range(8):
            rows = test.row[test.start[number] :][: test.count[number]]
            image, label = data.gather(rows)
            logits, _ = model.forward(*plain.at(models, number), image)
            found.append(float((logits.argmax(-1) == label).mean()))
        return np.mean(found)

    own = jax.tree.map(lambda leaf: leaf[0], state.clients["own"])
    cohort = experiment.planner.drawn(0, 3)
    one = plain.at(state.replace(key=()), 0).replace(key=state.key[0])
    tables = data.replace(partition=plain.at(data.partition, 0))
    mixed = experiment.program.algorithm.serving(one, cohort, tables)[1].own
    record = experiment.metrics[-1]
    np.testing.assert_allclose(record["trained_accuracy"], accuracy(own), atol=1e-6)
    served = stacked.put(own, cohort.row, mixed)
    np.testing.assert_allclose(record["client_accuracy"], accuracy(served), atol=1e-6)
    assert abs(record["trained_accuracy"] - record["client_accuracy"]) > 0.01
    assert experiment.summary()["metrics"]["trained_accuracy"]["per_seed"] == [
        record["trained_accuracy"]
    ]


def test_options_of_a_graph_beside_ones_own():
    """A line says that they have no effect."""
    given = {"algo": gossip, "preset": "none", "model": "mlp", "num_clients": 5}
    made = build.experiment(**given, rounds=1, topology="ring", num_peers=2)
    lines = [one for one in made.notes if "a graph of its own" in one]
    assert [one.partition("=")[0] for one in lines] == ["--num_peers", "--topology"]


def test_graphs_and_options_that_are_incomplete():
    """One line says what came, of options, weights and draws."""
    task = SimpleNamespace(client_model=None)
    with pytest.raises(ValueError, match="SimpleNamespace, which lack num_peers; let"):
        decentralized.make(SimpleNamespace(), task, None, None, messages=())
    cohort = drawn("ring", 0, 5)
    with pytest.raises(ValueError, match="--aggregation=unifrom: .*mean uniform"):
        decentralized.weights("unifrom", cohort, None)

    def flat(seed, round, client, num_clients, num_peers):
        return (client + 1) % num_clients, np.ones(len(client), bool)

    class Flat:
        HParams = gossip.HParams

        def make(hparams, task):
            made = gossip.make(hparams, task)
            return made._replace(peers=types.PeerSpec(2, draw=flat))

    given = {"algo": Flat, "preset": "none", "model": "mlp", "num_clients": 5}
    with pytest.raises(
        ValueError, match=r"gave peers \[5\] and a mask \[5\]; expected"
    ):
        build.experiment(**given, rounds=1)
