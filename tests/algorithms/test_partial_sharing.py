"""FedPer, FedRep, FedPer+ and FedRep+ against numpy; numbers are the spec's section 5.

The network has three layers, `dense1`, `dense2` and `last`.
"""

import chex
import jax
import numpy as np
import pytest

import algorithms
import models
from fedjax_pfl import boundary, traffic, types
from tests.algorithms import plain

MOVING = {"drop_every": 2, "min_layer": 1}
FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5}
# drop_every=2 and three layers: boundaries of Z = 1, 2, ... participations.
SCHEDULE = [3, 3, 2, 2, 1, 1, 1, 1]
STRUCTURES = {
    "fedper": {"personal_from": "dense2", "client_momentum": 0.5},
    "fedper_plus": MOVING | {"client_momentum": 0.5},
    "fedper_plus_global": MOVING
    | {"drop_init": "global", "aggregation": "uniform", "weight_decay": 0.1},
    "fedrep": {
        "personal_from": "dense2",
        "local_epochs": 2,
        "head_epochs": 1,
        "client_optimizer": "adam",
    },
    "fedrep_plus": MOVING
    | {
        "local_epochs": 2,
        "head_epochs": 1,
        "client_momentum": 0.5,
        "clip_norm": 0.3,
    },
}


def algorithm_of(name):
    return name.removesuffix("_global")


@pytest.fixture(scope="session")
def partial(compiled):
    """The compiled round of an entry of `STRUCTURES`."""
    return lambda name: compiled(algorithm_of(name), **STRUCTURES[name])


@pytest.fixture(scope="session")
def given(start):
    """Makes states with `lowest` stages of the server; Z of the clients as told."""

    def make(participations, lowest=1, seed=0, round=1):
        state = start(seed=seed, round=round)
        own = tuple(tree[lowest:] for tree in state.clients)
        return state.replace(
            server=(state.server["params"], state.server["stats"]),
            clients={
                "own": own,
                "participations": np.asarray(participations, np.int32),
            },
        )

    return make


@pytest.fixture(scope="session")
def counts(problem):
    """Participations before round 1: those of the cohort become 2, 3 and 5."""
    found = np.array([6, 6, 6, 6, 6])
    found[problem.cohort(1).client_id] = [1, 2, 4]
    return found


def reference(state, cohort, table, name):
    """Server's layers, clients' layers by id, and by id (boundary, layers received)."""
    hparams, algo = STRUCTURES[name], algorithm_of(name)
    server = plain.layers(state.server[0])
    rate = 0.1 * 0.5 ** int(state.round)
    boundaries, own = {}, {}
    for row, number in enumerate(cohort.client_id):
        before = int(state.clients["participations"][number])
        layer = SCHEDULE[before] if algo.endswith("plus") else 1
        begin = layer
        if hparams.get("drop_init") == "global":
            begin = SCHEDULE[max(before - 1, 0)]
        mine = plain.layers(plain.at(state.clients["own"][0], number))
        params = [server[i] if i < begin else mine[i - 1] for i in range(3)]
        trained = None
        if algo.startswith("fedrep"):
            body = [i < layer for i in range(3)]
            head = [not one for one in body] if layer < 3 else body
            trained = [head, body].__getitem__
        tx = plain.Sgd(
            rate,
            momentum=hparams.get("client_momentum", 0.0),
            clip=hparams.get("clip_norm", np.inf),
            decay=hparams.get("weight_decay", 0.0),
        )
        if hparams.get("client_optimizer") == "adam":
            tx = plain.Adam(rate)
        one = plain.at(cohort.plans["local"], row)
        own[number] = plain.train(table, params, one, number, tx, trained=trained)
        boundaries[number] = (layer, begin)
    size = table.train.count
    uniform = hparams.get("aggregation") == "uniform"
    new = []
    for i in range(3):
        who = [number for number in own if i < boundaries[number][0]]
        weight = [1 if uniform else size[number] for number in who]
        trees = [[own[number][i]] for number in who]
        new += plain.mean(trees, weight) if who else [server[i]]
    return new, own, boundaries


@pytest.mark.parametrize("name", STRUCTURES)
def test_round_equals_a_numpy_reference(name, partial, given, counts, problem):
    """Numbers 12 and 13: start, phases, boundaries and means, all options of theirs.

    Also 18 and 23: absent rows stay, Z counts, bytes are those of the shared layers.
    """
    algo, cohort = algorithm_of(name), problem.cohort(1)
    state, table = given(counts), plain.Table(problem.data)
    assert len(set(table.train.count[cohort.client_id])) > 1
    after, metrics, sent = partial(name)(state, **FLOATS)
    server, own, boundaries = reference(state, cohort, table, name)
    if algo.endswith("plus"):
        assert sorted(layer for layer, _ in boundaries.values()) == [1, 2, 3]
        total, count = metrics["mean_layer"]
        assert total / count == 2
    found = plain.layers(after.server[0])
    chex.assert_trees_all_close(found, server, rtol=1e-4, atol=1e-5)
    for i in range(3):
        held = any(i < layer for layer, _ in boundaries.values())
        old = plain.layers(state.server[0])[i]
        assert plain.differs(found[i], old, 1e-3) == held
    for number in range(5):
        found = plain.at(after.clients["own"], number)
        if number in own:
            expected = own[number][1:]
            chex.assert_trees_all_close(
                plain.layers(found[0]), expected, rtol=1e-4, atol=1e-5
            )
        else:
            chex.assert_trees_all_equal(found, plain.at(state.clients["own"], number))
    selected = np.isin(np.arange(5), cohort.client_id)
    np.testing.assert_array_equal(after.clients["participations"], counts + selected)
    assert int(after.round) == 2
    assert int(metrics["train_loss"][1]) == 2 * table.train.count[selected].sum()

    module = algorithms.ALGORITHMS[algo]
    made = module.make(module.HParams(**STRUCTURES[name]), problem.task_of())
    for number, row in zip(cohort.client_id, np.asarray(sent), strict=True):
        size = [4 * sum(leaf.size for leaf in layer) for layer in own[number]]
        up, down = (sum(size[:layer]) for layer in boundaries[number])
        total = traffic.cumulative(row, made.messages)
        # A layer that starts from the server's value has come from there.
        assert total == {"bytes_up": up, "bytes_down": down}
        assert (up == down) != (name.endswith("global") and counts[number] > 1)


def as_fedavg(state):
    """The same server for `fedavg`."""
    params, stats = state.server
    return state.replace(server={"params": params, "stats": stats}, clients=())


@pytest.mark.parametrize(
    ("algo", "options", "lowest"),
    [
        ("fedper", {"personal_from": "none"}, 3),
        ("fedper_plus", {"drop_every": 0, "min_layer": 1}, 1),
        ("fedrep", {"personal_from": "none", "local_epochs": 2, "head_epochs": 1}, 3),
    ],
)
def test_all_shared_is_fedavg(algo, options, lowest, compiled, given, counts):
    """Numbers 11 and 12: an empty personal part, or Z0 = 0 (never), is FedAvg."""
    run, fedavg = compiled(algo, **options), compiled("fedavg")
    state = given(counts, lowest)
    after, _, _ = run(state, client_lr=0.1)
    other, _, _ = fedavg(as_fedavg(state), client_lr=0.1)
    chex.assert_trees_all_equal(after.server[0], other.server["params"])
    # All epochs train all layers, the head's share of them too (13).
    for new, old in zip(after.server[0], state.server[0], strict=True):
        assert plain.differs(new, old, 1e-3)


def test_nothing_shared_is_local(compiled, given, counts):
    """Number 11: cut 0 is local training, and the server's model never moves."""
    run, local = compiled("fedper", personal_from="dense1"), compiled("local")
    state = given(counts, 0)
    after, _, sent = run(state, client_lr=0.1)
    params, stats = state.server
    alone = state.replace(
        server={"params": params, "stats": stats}, clients=state.clients["own"]
    )
    alone, _, _ = local(alone, client_lr=0.1)
    chex.assert_trees_all_equal(after.clients["own"], alone.clients)
    chex.assert_trees_all_equal(plain.host(after.server), state.server)
    assert plain.differs(after.clients["own"], state.clients["own"], 1e-2)
    assert not np.asarray(sent).any()


@pytest.mark.parametrize("algo", ["fedper", "fedrep"])
def test_end_of_the_schedule_is_the_fixed_cut(algo, compiled, partial, given):
    """Number 12: with the boundary at its lowest, FedPer+ is FedPer, bit for bit."""
    moving, both = partial(f"{algo}_plus"), STRUCTURES[f"{algo}_plus"]
    more = {name: value for name, value in both.items() if name not in MOVING}
    fixed = compiled(algo, personal_from="dense2", **more)
    state = given([50] * 5)
    first, _, first_sent = fixed(state, **FLOATS)
    second, _, second_sent = moving(state, **FLOATS)
    chex.assert_trees_all_equal(first.server, second.server)
    chex.assert_trees_all_equal(first.clients, second.clients)
    np.testing.assert_array_equal(first_sent, second_sent)
    early, _, _ = moving(given([0] * 5), **FLOATS)
    assert plain.differs(early.server[0], first.server[0], 1e-3)


def test_unshared_layer_keeps_the_servers_value(partial, given):
    """Number 12: nobody shares layers 2 and 3: bitwise the server's old ones."""
    state = given([50] * 5)
    after, _, _ = partial("fedper_plus")(state, **FLOATS)
    chex.assert_trees_all_equal(
        plain.host(after.server[0][1:]), plain.host(state.server[0][1:])
    )
    assert plain.differs(after.server[0][0], state.server[0][0], 1e-3)


@pytest.mark.parametrize("name", ["fedper_plus", "fedper_plus_global"])
def test_mean_is_over_those_who_share(name, partial, given, counts, problem):
    """Number 12: hand numbers; with a learning rate of 0 the start is what is averaged.

    All own and server layers are constant; of 3 clients 3 share layer 1, 2 layer 2
    and 1 layer 3, so that every mean is over equal copies of the server's layer.
    """
    state = given(counts)
    server = jax.tree.map(lambda leaf: np.full_like(leaf, 2.0), state.server)
    own = jax.tree.map(
        lambda leaf: (
            leaf * 0
            + np.float32(10)
            + np.arange(5, dtype=np.float32).reshape(-1, *(1,) * (leaf.ndim - 1))
        ),
        state.clients["own"],
    )
    state = state.replace(server=server, clients=state.clients | {"own": own})
    after, _, _ = partial(name)(state, client_lr=0.0)
    chex.assert_trees_all_close(plain.host(after.server), server, rtol=1e-6)
    # Own rows hold what training started from: 2 where shared or taken afresh.
    for row, number in enumerate(problem.cohort(1).client_id):
        is_global = name.endswith("global")
        begin = ([3, 3, 2] if is_global else [3, 2, 1])[row]
        assert counts[number] == [1, 2, 4][row]
        for i, stage in enumerate(plain.at(after.clients["own"][0], number), start=1):
            expected = 2.0 if i < begin else 10.0 + number
            for leaf in jax.tree.leaves(stage):
                np.testing.assert_allclose(leaf, expected)


def first_epoch(cohort):
    """The cohort without the later epochs."""
    one = cohort.plans["local"]
    steps = (one.epoch == 0) & (one.position >= 0).any(-1)
    cut = one.replace(num_steps=steps.sum(1).astype(np.int32))
    return cohort.replace(plans={"local": cut})


@pytest.mark.parametrize("name", ["fedrep", "fedrep_plus"])
def test_head_then_representation(name, partial, given, problem):
    """Number 13: the head phase leaves the base alone, the base phase the head.

    Bit for bit with a single client (a mean over one); Adam and momentum would move
    a frozen layer if it were not frozen.
    """
    cohort = problem.cohort(1)
    for row in (0, 1):
        cohort = plain.without(cohort, row, 5)
    number = int(cohort.client_id[2])
    state = given([50] * 5)
    head, _, _ = partial(name)(state, first_epoch(cohort), **FLOATS)
    both, _, _ = partial(name)(state, cohort, **FLOATS)
    chex.assert_trees_all_equal(plain.host(head.server), state.server)
    for i in (0, 1):
        old = plain.at(state.clients["own"][0], number)[i]
        tuned = plain.at(head.clients["own"][0], number)[i]
        done = plain.at(both.clients["own"][0], number)[i]
        assert plain.differs(tuned, old, 1e-3)
        chex.assert_trees_all_equal(tuned, done)
    assert plain.differs(both.server[0][0], state.server[0][0], 1e-3)
    chex.assert_trees_all_equal(plain.host(both.server[0][1:]), state.server[0][1:])


def test_empty_head_trains_the_base_in_all_epochs(partial, given, problem):
    """Number 13: FedRep+ with l = L moves every layer in its first epoch."""
    state = given([0] * 5)
    after, _, _ = partial("fedrep_plus")(
        state, first_epoch(problem.cohort(1)), **FLOATS
    )
    for new, old in zip(after.server[0], state.server[0], strict=True):
        assert plain.differs(new, old, 1e-3)


def make(algo, problem, task=None, **options):
    module = algorithms.ALGORITHMS[algo]
    return module.make(module.HParams(**options), task or problem.task_of())


def served_boundaries(made, state, data):
    """How many leading layers of each client's served model are the server's."""
    (group,) = made.serving(state, None, data)
    assert np.asarray(group.mask).all() and group.model.name == "tiny"
    np.testing.assert_array_equal(group.client_id, range(5))
    if group.shared:
        chex.assert_trees_all_equal(group.params, state.server[0])
        return [3] * 5
    lowest = 3 - len(state.clients["own"][0])
    out = []
    for number in range(5):
        params = plain.at(group.params, number)
        own = plain.at(state.clients["own"][0], number)
        found = [
            not plain.differs(stage, theirs, 0)
            for stage, theirs in zip(params, state.server[0], strict=True)
        ]
        layer = sum(found)
        assert found == [i < layer for i in range(3)]
        chex.assert_trees_all_equal(params[layer:], own[layer - lowest :])
        out.append(layer)
    return out


@pytest.mark.parametrize(
    ("options", "participations", "expected"),
    [
        # Z = 0 has never taken part and is served as Z = 1: the server's model.
        (MOVING, [0, 2, 3, 4, 5], [3, 3, 2, 2, 1]),
        ({"drop_every": 1, "min_layer": 2}, [0, 1, 2, 3, 9], [3, 3, 2, 2, 2]),
        ({"drop_every": 3, "min_layer": 1}, [1, 3, 4, 6, 7], [3, 3, 2, 2, 1]),
        ({"drop_every": 0, "min_layer": 1}, [0, 1, 9, 99, 999], [3] * 5),
        ({"drop_every": 1, "min_layer": 3}, [0, 1, 9, 99, 999], [3] * 5),
        ({"drop_every": 1}, [0, 1, 2, 3, 4], [3, 3, 2, 2, 2]),
    ],
)
def test_served_model_follows_the_boundary(
    options, participations, expected, problem, given
):
    """Section 1.11: [server up to l; own above], l of the last participation."""
    made = make("fedper_plus", problem, **options)
    state = given(participations, options.get("min_layer", 2))
    assert served_boundaries(made, state, problem.data) == expected


@pytest.mark.parametrize(
    ("name", "lowest"),
    [("", 2), ("dense1", 0), ("dense2", 1), ("last", 2), ("none", 3)],
)
def test_personal_from(name, lowest, problem, given):
    """The first personal stage, or none; empty is the last of a chain of dense layers.

    Served is the server's base with the own head; only with `none` is there a server
    model.
    """
    for algo in ("fedper", "fedrep"):
        made = make(algo, problem, personal_from=name)
        state = given([0, 1, 2, 3, 4], lowest)
        assert served_boundaries(made, state, problem.data) == [lowest] * 5
        shapes = jax.eval_shape(made.init, problem.data, jax.random.key(0))
        assert len(shapes.clients["own"][0]) == 3 - lowest
        if lowest == 3:
            model, params, _ = made.server_params(state)
            assert model.name == "tiny" and params is state.server[0]
        else:
            assert made.server_params(state) is None


@pytest.mark.parametrize(
    ("algo", "options", "lowest"),
    [
        ("fedper", {}, 3),
        ("fedrep", {}, 3),
        ("fedper", {"personal_from": "F3"}, 5),
        ("fedper_plus", {}, 3),
        ("fedper_plus", {"drop_set": "L1"}, 4),
        ("fedper_plus", {"drop_set": "L2"}, 5),
        ("fedrep_plus", {"drop_set": "L3"}, 3),
        ("fedper_plus", {"drop_set": "L4"}, 2),
    ],
)
def test_cuts_of_the_papers_model(algo, options, lowest, problem):
    """Sections 1.7 and 1.8, Table 3: F1 to F3 of M1 are personal by default."""
    model = models.MODELS["m1"](10)
    shape = (32, 32, 3)
    task = problem.task_of()._replace(
        server_model=model, client_models=(model,), num_classes=10, example_shape=shape
    )
    made = make(algo, problem, task, **options)
    data = problem.data.replace(image=np.zeros((1, *shape), np.uint8))
    shapes = jax.eval_shape(made.init, data, jax.random.key(0))
    assert len(shapes.clients["own"][0]) == 6 - lowest
    size = np.array([224, 1168, 4640, 16416, 528, 170]) * 4
    assert [kind.num_bytes for kind in made.messages] == [*size, *size]
    assert [kind.direction for kind in made.messages] == ["down"] * 6 + ["up"] * 6


def test_everyone_starts_from_one_model(problem, quick_jit):
    """Section 1.0: a common initialisation, Z = 0."""
    made = make("fedper_plus", problem, **MOVING)
    state = quick_jit(made.init)(problem.data, jax.random.key(0))
    for number in range(5):
        chex.assert_trees_all_equal(
            plain.at(state.clients["own"], number),
            plain.host(tuple(tree[1:] for tree in state.server)),
        )
    assert not np.asarray(state.clients["participations"]).any()


@pytest.mark.parametrize("dropping", [False, True])
def test_schedule_of_the_paper(dropping):
    """Section 1.1: Z0 = 3, L = 6, l_min = 3 gives 6,6,6,5,5,5,4,4,4,3,3,..."""
    expected = [6, 6, 6, 6, 5, 5, 5, 4, 4, 4, 3, 3, 3]
    found = boundary.dropped(np.arange(13, dtype=np.int32), 3 * dropping, 6, 3)
    np.testing.assert_array_equal(found, expected if dropping else [6] * 13)


@pytest.mark.parametrize(
    ("algo", "options", "line"),
    [
        ("fedper", {"personal_from": "F9"}, "--personal_from=F9.*dense1, dense2, last"),
        ("fedper", {"min_layer": 2}, "--min_layer=2.*--layer_dropping"),
        ("fedrep", {"drop_set": "L1"}, "--drop_set=L1.*--layer_dropping"),
        ("fedper", {"drop_init": "global"}, "--drop_init=global.*--layer_dropping"),
        ("fedper_plus", {"personal_from": "last"}, "--personal_from=last.*leave one"),
        ("fedrep_plus", {"personal_from": "none"}, "--personal_from=none.*leave one"),
        ("fedper_plus", {"min_layer": 4}, "--min_layer=4.*3 layers"),
        ("fedper_plus", {"drop_set": "L3"}, "--drop_set=L3.*C3.*dense1"),
        (
            "fedper_plus",
            {"drop_set": "L3", "min_layer": 1},
            "--drop_set=L3 and --min_layer=1",
        ),
        (
            "fedrep",
            {"head_epochs": 2, "local_epochs": 2},
            "--head_epochs=2.*--local_epochs=2",
        ),
        (
            "fedrep_plus",
            {"head_epochs": 3, "local_epochs": 2},
            "--head_epochs=3.*--local_epochs=2",
        ),
    ],
)
def test_refused(algo, options, line, problem):
    """One line with the flag, what came and what to change."""
    with pytest.raises(ValueError, match=line):
        make(algo, problem, **options)


def test_other_architectures_of_clients_are_refused(problem):
    """The base is shared: one model for server and clients."""
    with pytest.raises(ValueError, match="--client_model=deeper"):
        make("fedper", problem, problem.task_of(clients="deeper"))


def test_plans_have_the_epochs_asked_for(problem):
    """`local_epochs` epochs in all, the head's included."""
    for algo in ("fedper", "fedrep", "fedper_plus", "fedrep_plus"):
        made = make(algo, problem, local_epochs=4, batch_size=7)
        assert made.plans == (types.PlanSpec("local", 4, 7),)
