"""FedPer, FedRep, FedPer+ and FedRep+ against numpy; numbers are the spec's section 5.

The network has three layers, `dense1`, `dense2` and `last`.
"""

import types as namespace

import chex
import jax
import numpy as np
import pytest
from flax import linen as nn

import algorithms
import models
from algorithms import fedper
from fedjax_pfl import types
from models import own as own_lib
from tests.algorithms import plain

MOVING = {"drop_every": 2, "min_layer": 1}
FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5}
# drop_every=2 and three layers: boundaries of Z = 1, 2, ... participations.
SCHEDULE = [3, 3, 2, 2, 1, 1, 1, 1]
STRUCTURES = {
    "fedper": {
        "personal_from": "dense2",
        "aggregation": "uniform",
        "weight_decay": 0.1,
    },
    "fedper_plus": MOVING | {"client_momentum": 0.5},
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


# Would make another result, as the reference shows.
MATTERS = {
    "fedper": {"aggregation": "examples", "weight_decay": 0.0},
    "fedper_plus": {"client_momentum": 0.0},
    "fedrep": {"client_optimizer": "sgd"},
    "fedrep_plus": {"clip_norm": np.inf, "client_momentum": 0.0},
}


@pytest.fixture(scope="session")
def partial(compiled):
    """The compiled round of an entry of `STRUCTURES`."""
    return lambda name: compiled(name, floats=FLOATS, **STRUCTURES[name])


@pytest.fixture(scope="session")
def given(start):
    """Makes states with `lowest` stages of the server; Z of the clients as told."""

    def make(participations, lowest=1, seed=0, round=1):
        state = start(seed=seed, round=round)
        own = types.Variables(*(tree[lowest:] for tree in state.clients))
        clients = {
            "own": own,
            "participations": np.asarray(participations, np.int32),
        }
        return state.replace(clients=clients)

    return make


@pytest.fixture(scope="session")
def counts(problem):
    """Participations before round 1: those of the cohort become 2, 3 and 5."""
    found = np.array([6, 6, 6, 6, 6])
    found[problem.cohort(1).client_id] = [1, 2, 4]
    return found


def reference(state, cohort, table, values):
    """Also whole layers and boundaries by client."""
    whole, boundaries = {}, {}
    for one in plain.clients(state, cohort, table):
        before = int(state.clients["participations"][one.number])
        layer = SCHEDULE[before] if "drop_every" in values else 1
        trained = None
        if "head_epochs" in values:
            body = [i < layer for i in range(3)]
            head = [not one for one in body] if layer < 3 else body
            trained = [head, body].__getitem__
        clip, decay = values.get("clip_norm", np.inf), values.get("weight_decay", 0.0)
        tx = one.sgd(values, clip=clip, decay=decay)
        if values.get("client_optimizer") == "adam":
            tx = plain.Adam(one.rate(values))
        params = one.server[:layer] + one.own[layer - 1 :]
        whole[one.number] = one.train(params, tx, trained=trained)
        boundaries[one.number] = layer
    server, is_uniform = plain.server_layers(state), values.get("aggregation")
    for i in range(3):
        held = {k: whole[k][i : i + 1] for k in whole if i < boundaries[k]}
        if held:
            (server[i],) = plain.averaged(held, table, is_uniform == "uniform")
    own = {number: layers[1:] for number, layers in whole.items()}
    return server, own, whole, boundaries


@pytest.mark.parametrize("name", STRUCTURES)
def test_rounds_equal_a_numpy_reference(name, partial, given, counts, problem):
    """Numbers 12 and 13: start, phases, boundaries and means, all options of theirs.

    Also 18 and 23: absent rows stay, Z counts, bytes are those of the shared layers.
    """
    made, taken = make(name, problem, **STRUCTURES[name]), counts.copy()
    run, state, values = partial(name), given(counts), STRUCTURES[name] | FLOATS
    more = {"changes": MATTERS[name], "by": 1e-3, "rtol": 1e-4}
    steps = plain.follow(run, reference, state, problem, values, **more)
    for step in steps:
        whole, boundaries = step.more
        size = problem.table.train.count[step.cohort.client_id]
        assert len(set(size)) > 1
        if name.endswith("plus"):
            layers = sorted(boundaries.values())
            assert step is steps[1] or layers == [1, 2, 3]
            total, count = step.metrics["mean_layer"]
            np.testing.assert_allclose(total / count, np.mean(layers))
        new, old = (plain.server_layers(one) for one in (step.after, step.before))
        for i in range(3):
            held = any(i < layer for layer in boundaries.values())
            assert plain.differs(new[i], old[i], 1e-3) == held
        taken += np.isin(np.arange(5), step.cohort.client_id)
        np.testing.assert_array_equal(step.after.clients["participations"], taken)
        assert int(step.metrics["train_loss"][1]) == 2 * size.sum()
        found = plain.sent_bytes(made, step.sent, 3)
        for number, total in zip(step.cohort.client_id, found, strict=True):
            size = [4 * sum(leaf.size for leaf in layer) for layer in whole[number]]
            shared = sum(size[: boundaries[number]])
            assert total == {"bytes_up": shared, "bytes_down": shared}


@pytest.mark.parametrize(
    ("head_epochs", "epoch", "layer", "expected"),
    [
        (0, 0, 1, [1, 1, 1]),
        (1, 0, 1, [0, 1, 1]),
        (1, 1, 1, [1, 0, 0]),
        (2, 1, 2, [0, 0, 1]),
        (2, 2, 2, [1, 1, 0]),
        # Number 13: nothing is personal, the base trains in all epochs.
        (2, 0, 3, [1, 1, 1]),
        (2, 2, 3, [1, 1, 1]),
    ],
)
def test_trained_stages(head_epochs, epoch, layer, expected):
    """FedPer trains all; FedRep the personal stages first, then the shared ones."""
    batch = namespace.SimpleNamespace(epoch=np.array(epoch))
    is_shared = np.arange(3) < layer
    found = fedper.trained_stages(batch, is_shared, head_epochs)
    np.testing.assert_array_equal(found, np.array(expected, bool))


def test_all_shared_is_fedavg(compiled, given, counts):
    """Numbers 11 and 12: an empty personal part is FedAvg."""
    run, fedavg = compiled("fedper", personal_from="none"), compiled("fedavg")
    state = given(counts, 3)
    after, _, _ = run(state, client_lr=0.1)
    other, _, _ = fedavg(state.replace(clients=()), client_lr=0.1)
    chex.assert_trees_all_equal(plain.server(after), plain.server(other))


def make(algo, problem, task=None, **options):
    module = algorithms.ALGORITHMS[algo]
    return module.make(module.HParams(**options), task or problem.task_of())


def served_boundaries(made, state, data):
    """How many leading layers of each client's served model are the server's."""
    lowest, out = 3 - len(plain.own(state).params), []
    for number, one in enumerate(plain.served(made, state, None, data)):
        own = plain.own(state, number).params
        found = [
            not plain.differs(stage, theirs, 0)
            for stage, theirs in zip(one.params, state.server.params, strict=True)
        ]
        layer = sum(found)
        assert found == [i < layer for i in range(3)]
        chex.assert_trees_all_equal(one.params[layer:], own[layer - lowest :])
        out.append(layer)
    return out


@pytest.mark.parametrize(
    ("options", "participations", "expected"),
    [
        # Z = 0 has never taken part and is served as Z = 1: the server's model.
        (MOVING, [0, 2, 3, 4, 5], [3, 3, 2, 2, 1]),
        ({"drop_every": 1, "min_layer": 2}, [0, 1, 2, 3, 9], [3, 3, 2, 2, 2]),
        ({"drop_every": 0}, [0, 1, 9, 99, 999], [3] * 5),
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
    for algo in ("fedper", "fedrep")[: 1 + (lowest > 0)]:
        made = make(algo, problem, personal_from=name)
        state = given([0, 1, 2, 3, 4], lowest)
        assert served_boundaries(made, state, problem.data) == [lowest] * 5
        shapes = jax.eval_shape(made.init, problem.data, jax.random.key(0))
        assert len(plain.own(shapes).params) == 3 - lowest
        if lowest == 3:
            model, server = made.server(state, problem.data)["global"]
            assert model.name == "tiny" and server is state.server
        else:
            assert made.server is None
        limit = {0: "local", 3: "fedavg"}.get(lowest, "")
        assert made.same_as.partition(",")[0] == limit


@pytest.mark.parametrize(
    ("algo", "options", "lowest"),
    [
        ("fedper", {}, 3),
        ("fedrep", {}, 3),
        ("fedper", {"personal_from": "F3"}, 5),
        ("fedper_plus", {}, 3),
        ("fedper_plus", {"min_layer": 4}, 4),
        ("fedper_plus", {"min_layer": 5}, 5),
        ("fedrep_plus", {"first_layer": 2}, 2),
        ("fedper_plus", {"drop_every": 0}, 6),
        ("fedper_plus", {"min_layer": 2}, 2),
    ],
)
def test_cuts_of_the_papers_model(algo, options, lowest, problem):
    """Sections 1.7 and 1.8, Table 3: F1 to F3 of M1 are personal by default."""
    model, shape = models.MODELS["m1"](10), (32, 32, 3)
    task = problem.task_of(model, num_classes=10, example_shape=shape)
    made = make(algo, problem, task, **options)
    data = problem.data.replace(image=np.zeros((1, *shape), np.uint8))
    shapes = jax.eval_shape(made.init, data, jax.random.key(0))
    assert len(plain.own(shapes).params) == 6 - lowest
    assert bool(made.same_as) == (lowest == 6)
    size = np.array([224, 1168, 4640, 16416, 528, 170]) * 4
    assert [kind.num_bytes for kind in made.messages] == [*size, *size]
    assert [kind.direction for kind in made.messages] == ["down"] * 6 + ["up"] * 6


@pytest.mark.parametrize("algo", ["fedper", "fedrep", "fedper_plus"])
def test_nothing_would_be_personal(algo, problem):
    """A model of one stage: one line, not FedAvg under another name."""
    net = own_lib.chain(nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(3)]))
    with pytest.raises(ValueError, match="--model=own_Sequential has "):
        make(algo, problem, problem.task_of(net))


@pytest.mark.parametrize(
    ("algo", "options", "line"),
    [
        ("fedper", {"personal_from": "F9"}, "--personal_from=F9.*dense1, dense2, last"),
        (
            "fedrep",
            {"personal_from": "dense1", "head_epochs": 1},
            "=dense1: nothing would be shared; take a later one, or --algo=local",
        ),
        ("fedper_plus", {"min_layer": 4}, "--min_layer=4: expected at most 3"),
        (
            "fedper_plus",
            {"first_layer": 1, "min_layer": 2},
            "--min_layer=2: .* at most 1",
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


def test_a_first_layer_without_parameters(problem):
    """FedRep+ has nothing to train after its heads; what FedPer+ shares is nothing."""

    flat = nn.Sequential([lambda x: x.reshape(len(x), -1)])
    net = own_lib.chain([flat, nn.Dense(5), nn.Dense(3)])
    given = {"first_layer": 1, "drop_every": 0}
    line = "the boundary reaches layer 1, up to which --model=.* has no parameters, and"
    with pytest.raises(ValueError, match=line):
        make("fedrep_plus", problem, problem.task_of(net), **given, head_epochs=1)
    made = make("fedper_plus", problem, problem.task_of(net), **given)
    assert made.same_as.startswith("local, ")


def test_statistics_may_be_all_that_is_personal(problem):
    """Then it is not FedAvg."""
    norm = nn.BatchNorm(use_running_average=False, use_bias=False, use_scale=False)
    flat = nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(3)])
    net = own_lib.chain([flat, norm])
    assert make("fedper", problem, problem.task_of(net)).same_as == ""


@pytest.mark.parametrize(("algo", "lowest"), [("fedrep", 2), ("fedrep_plus", 1)])
def test_adapting_has_the_phases_of_a_round(algo, lowest, given, problem):
    """The first epoch trains the personal layers alone, the last by the boundary."""
    options = {"fedrep": {"personal_from": "last"}, "fedrep_plus": MOVING}[algo]
    more = {"batch_size": 5, "local_epochs": 2, "head_epochs": 1}
    task, data = problem.task_of(), problem.data
    made = make(algo, problem, task, **options, **more)
    # The third participation is the first with a personal layer.
    run, state = plain.adapter(made.adapt, task), given([2] * 5, lowest)
    cohort = plain.planner(data, made.plans)(1)
    one_epoch = cohort.plans["local"].num_steps // 2
    *old, first = state.server.params
    for steps, moves in ((one_epoch, False), (2 * one_epoch, True)):
        found = run(state, plain.cut(cohort, steps), data, state.server)
        *body, head = plain.at(found, 0)
        assert plain.differs(body, old, 0) == moves
        assert plain.differs(head, first)


def test_other_architectures_of_clients_are_refused(problem):
    """The base is shared: one model for server and clients."""
    with pytest.raises(ValueError, match="--client_model=deeper"):
        make("fedper", problem, problem.task_of(clients="deeper"))
