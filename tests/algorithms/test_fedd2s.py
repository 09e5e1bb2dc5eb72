"""FedD2S against numpy, and the properties of its specification.

The network is a ladder of six dense layers with the names of FedD2S's models. With
`--drop_every=1 --min_layer=1` the boundary is 6 less the rounds a client took part in
before, so that a state chooses every client's boundary.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from algorithms import fedd2s
from data import plan
from fedjax_pfl import boundary, shapes, types
from models import stages
from tests import padded
from tests.algorithms import conftest, plain
from tests.fedjax_pfl import small

SIZES = (17, 12, 9, 6, 3)
NUM_CLIENTS = len(SIZES)
NUM_CLASSES = 4
SHAPE = (3, 3)
BATCH = 5
NAMES = ("C1", "C2", "C3", "F1", "F2", "F3")
WIDTHS = (10, 8, 7, 6, 5, NUM_CLASSES)
L = len(NAMES)
EPOCHS = {"server": 1, "local": 2}

LADDER = stages.chain(
    "ladder",
    [
        (name, stages.Dense(width, relu=name != "F3"))
        for name, width in zip(NAMES, WIDTHS, strict=True)
    ],
)
# Together every option has every value.
COMMON = {
    "batch_size": BATCH,
    "client_optimizer": "adam",
    "client_lr": 0.01,
    "client_lr_decay": 0.8,
    "temperature": 2.0,
    "server_epochs": EPOCHS["server"],
    "local_epochs": EPOCHS["local"],
}
SCHEDULE = {"drop_every": 1, "min_layer": 1}
STRUCTURES = {
    "default": SCHEDULE,
    "persist": SCHEDULE | {"drop_every": 2, "optimizer_state": "persist"},
    "mse": {"drop_every": 1, "min_layer": 3, "transfer": "mse", "temperature": 1.0},
}
# Would make another result, as the reference shows.
MATTERS = {
    "default": {
        "transfer": "mse",
        "drop_every": 2,
        "min_layer": 5,
        "first_layer": 4,
        "temperature": 1.0,
        "client_optimizer": "sgd",
        "client_lr_decay": 1.0,
    },
    "persist": {"optimizer_state": "reset"},
}


def hparams_of(structure, **changed):
    return fedd2s.HParams(**COMMON | STRUCTURES[structure] | changed)


def random_params(model, shape, seed):
    """Variables of numpy numbers, large enough that every layer matters."""
    gen = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: gen.normal(
            scale=1.2 * np.prod(leaf.shape[:-1]) ** -0.5 if leaf.ndim > 1 else 0.2,
            size=leaf.shape,
        ).astype(leaf.dtype),
        shapes.variables(model, shape),
    )


def task_of(model=LADDER, shape=SHAPE, num_classes=NUM_CLASSES):
    given, count = (model, (model,), np.zeros(NUM_CLIENTS, np.int32)), NUM_CLIENTS
    sizes = count, num_classes, 0, count, max(SIZES)
    return types.Task(*given, *sizes, shape, types.Execution(2))


def tables():
    """Ragged clients with shuffled rows; rows that nobody owns are far away."""
    gen = np.random.default_rng(0)
    label = gen.integers(NUM_CLASSES, size=60)
    centre = gen.normal(size=(NUM_CLASSES, *SHAPE))
    image = centre[label] + gen.normal(size=(60, *SHAPE))
    row = gen.permutation(60)[: sum(SIZES)]
    image[np.setdiff1d(np.arange(60), row)] += 1000
    train, test = (small.client_rows(row, x) for x in (SIZES, [0] * NUM_CLIENTS))
    return types.Data(
        image=jnp.float32(image),
        label=jnp.int32(label),
        mean=jnp.float32(0.2),
        scale=jnp.float32(1.1),
        partition=types.Partition(train, test, jnp.zeros(0, jnp.int32)),
    )


DATA = tables()
TABLE = plain.Table(DATA)


def cohort_of(*ids, seed=0):
    """Clients by row, None = padding; there is room for a step more than needed."""
    ids = np.array([NUM_CLIENTS if number is None else number for number in ids])
    plans = {}
    for name, epochs in EPOCHS.items():
        spec = types.PlanSpec(name, epochs, BATCH)
        size = np.array([*SIZES, 0], np.int32)[ids]
        order = plan.orders(seed, 0, ids, size, spec)
        first = np.cumsum(epochs * size) - epochs * size
        window = types.WindowPlan(order[None], first[None], spec)
        steps = 1 + epochs * -(-max(SIZES) // BATCH)
        plans[name] = padded.table(window.of_round(0, size), steps)
    return plain.host(small.cohort(ids, NUM_CLIENTS, plans))


# Ragged clients (4, 3 and 2 batches) and a padding row, in chunks of two.
COHORT = (0, None, 2, 1)


def start(layers=(6,) * NUM_CLIENTS, structure="default", seed=0, round=2):
    """A state in which everyone is different; `layers` are the next boundaries."""
    hparams = hparams_of(structure)
    own = [random_params(LADDER, SHAPE, seed + 1 + k) for k in range(NUM_CLIENTS)]
    server = random_params(LADDER, SHAPE, seed)
    taken = [(L - layer) * hparams.drop_every for layer in layers]
    kept = small.opt_states(hparams, server.params, NUM_CLIENTS)
    return types.RoundState(
        server,
        {"own": plain.stack(own), "participations": np.array(taken, np.int32)},
        jax.random.key(3),
        np.int32(round),
        plain.host(kept),
    )


@pytest.fixture(scope="module")
def rounds():
    """Jitted rounds by structure."""

    @functools.cache
    def get(structure="default"):
        one_round = conftest.jitted(fedd2s, hparams_of(structure), task_of())

        def run(state, cohort=cohort_of(*COHORT), **changed):
            return one_round(state, cohort, DATA, **changed)

        return run

    return get


# The reference.


def boundary_of(hparams, taken):
    """l after Z = `taken` participations."""
    first = hparams.first_layer or L
    return max(hparams.min_layer, first - (taken - 1) // hparams.drop_every)


def optimizers(hparams):
    """The clients' optimizers over several rounds."""

    def make(rate):
        if hparams.client_optimizer == "adam":
            return plain.Adam(rate)
        return plain.Sgd(rate, hparams.client_momentum)

    return plain.Optimizers(make, hparams.optimizer_state == "persist")


def reference(state, cohort, hparams, txs=None):
    """Section 1.1's and 1.3's round.

    Returns:
        The layers of clients by id, the server's, (sum of Q over examples, examples).
    """
    table, txs = TABLE, txs or optimizers(hparams)
    by_head, tau = hparams.transfer == "head", hparams.temperature
    rate = hparams.client_lr * hparams.client_lr_decay ** int(state.round)
    server = plain.server_layers(state)

    def slopes(acts, start, layer, target, b):
        """J's, at the logits or at the output of layer l."""
        if by_head:
            return {L: plain.of_divergence(acts[-1], target[L][b], tau)}
        gap = acts[layer - start] - target[layer][b]
        return {layer: 2 * gap / gap.size}

    def outputs(params, x, start=0):
        """Outputs by number of layers passed."""
        found = plain.activations(params, x, start)
        return dict(enumerate(found, start=start))

    def supervised(params, x, y, start):
        return plain.gradients(params, x, plain.cross_entropy(y), start)

    members, phis, new, loss, count = {}, [], {}, 0.0, 0
    for one in plain.clients(state, cohort, table):
        taken = int(state.clients["participations"][one.number]) + 1
        x = table.images(table.owned(one.number))
        members[one.number] = one, one.own, boundary_of(hparams, taken), x

    for one, own, layer, x in members.values():
        phi, tx, h = server, optimizers(hparams).make(rate), outputs(own, x)[1]
        target = outputs(own[:layer] + server[layer:] if by_head else own, x)
        deepest = L if by_head else layer
        distilled = [layer > 1 and 0 < i < deepest for i in range(L)]
        for b, rows, _ in one.steps("server"):
            if layer > 1:
                acts = plain.activations(phi, h[b], 1)
                found = slopes(acts, 1, layer, target, b)
                phi = tx.step(phi, plain.backward(phi, acts, found, 1), distilled)
            grads = supervised(phi, h[b], table.label[rows], 1)
            phi = tx.step(phi, grads, [i > 0 for i in range(L)])
        phis.append(phi)
    averaged = plain.mean(phis, [1] * len(phis))
    averaged[0] = server[0]

    for number, (one, own, layer, x) in members.items():
        params, tx = own, txs.of(number, rate)
        target = outputs(averaged, outputs(own, x)[1], 1)
        distilled = [layer > 1 and i < layer for i in range(L)]
        for b, rows, _ in one.steps():
            if layer > 1:
                through = params[:layer] + averaged[layer:] if by_head else params
                acts = plain.activations(through, x[b])
                found = slopes(acts, 0, layer, target, b)
                grads = plain.backward(through, acts, found)
                params = tx.step(params, grads, distilled)
            y = table.label[rows]
            p = plain.softmax(plain.logits(params, x[b]))
            loss, count = loss - np.log(p[np.arange(len(b)), y]).sum(), count + len(b)
            params = tx.step(params, supervised(params, x[b], y, 0))
        new[number] = params
    return new, averaged, (loss, count)


def bytes_of(hparams, layer, size):
    """Property 23: up K (s_1 + s_l) and labels; down t and the head, or targets."""
    up = size * (4 * (WIDTHS[0] + WIDTHS[layer - 1] * (layer > 1)) + 1)
    if hparams.transfer == "mse":
        return {"bytes_up": up, "bytes_down": size * 4 * WIDTHS[layer - 1]}
    inputs = (9, *WIDTHS[:-1])
    parameters = [(i + 1) * o for i, o in zip(inputs, WIDTHS, strict=True)]
    head = 4 * sum(parameters[layer:])
    return {"bytes_up": up, "bytes_down": size * 4 * NUM_CLASSES + head}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_rounds_equal_a_numpy_reference(structure, rounds):
    """Sections 1.1 and 1.3: all options, ragged clients, padding, short batches.

    Also properties 1, 17, 18, 21 and 23: Z, rows of p and t by sample, untouched rows,
    bytes.
    """
    hparams = hparams_of(structure)
    made, txs = fedd2s.make(hparams, task_of()), optimizers(hparams)
    state = start((6, 1, 2, 4, 3), structure)

    def twice(values, part=0):
        hparams = hparams_of(structure, **values)
        begun, txs = start((6, 5, 2, 4, 3)), optimizers(hparams)
        given = begun, cohort_of(*COHORT), hparams, txs
        return [reference(*given)[part] for _ in range(2)]

    changes = MATTERS.get(structure, {})
    plain.assert_matters(twice, {}, changes, 1e-3)
    if structure == "default":
        plain.assert_matters(functools.partial(twice, part=1), {}, changes, 1e-3)
    taken = state.clients["participations"].copy()
    for ids in (COHORT, (1, 0, 4, None), (None, 2, 3, 0)):
        cohort = cohort_of(*ids, seed=int(state.round))
        own, server, (loss, count) = reference(state, cohort, hparams, txs)
        after, metrics, sent = rounds(structure)(state, cohort)
        taken[list(own)] += 1
        np.testing.assert_array_equal(after.clients["participations"], taken)
        plain.assert_models(after, state, own, rtol=1e-4)
        got = plain.server_layers(after)
        chex.assert_trees_all_close(got, server, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(metrics["train_loss"][0], loss, rtol=1e-4)
        assert int(metrics["train_loss"][1]) == count
        boundaries = {k: boundary_of(hparams, taken[k]) for k in own}
        assert float(metrics["mean_layer"][0]) == sum(boundaries.values())
        assert int(metrics["mean_layer"][1]) == 3
        found = plain.sent_bytes(made, sent, 4)
        for number, row in plain.members(cohort).items():
            expected = bytes_of(hparams, boundaries[number], SIZES[number])
            assert found[row] == expected
        state = after
    assert int(state.round) == 5


# The mathematics, function by function.


@pytest.mark.parametrize(
    ("hparams", "layers"),
    [
        ({}, (6, 6, 5, 5, 5, 5)),
        ({"drop_every": 2, "min_layer": 4}, (6, 5, 5, 4, 4, 4)),
        ({"drop_every": 1, "min_layer": 2}, (6, 4, 3, 2, 2, 2)),
        ({"drop_every": 0}, (6, 6, 6, 6, 6, 6)),
        ({"min_layer": 6}, (6, 6, 6, 6, 6, 6)),
        ({"first_layer": 3, "min_layer": 3}, (3, 3, 3, 3, 3, 3)),
        ({"first_layer": 4, "drop_every": 2, "min_layer": 1}, (4, 3, 3, 2, 1, 1)),
        ({"first_layer": 4, "drop_every": 0}, (4, 4, 4, 4, 4, 4)),
    ],
    ids=str,
)
def test_schedule_options(hparams, layers):
    """Properties 1, 2 and section 1.4: the stages kept at Z = 1, 3, 4, 5, 8, 99.

    Without options the floor of a model without convolutions is its last hidden layer.
    """
    taken = np.array([1, 3, 4, 5, 8, 99], np.int32)
    schedule = boundary.schedule(fedd2s.HParams(**hparams), LADDER, SHAPE)
    found = schedule.kept(taken)
    np.testing.assert_array_equal(found, np.arange(L) < np.array(layers)[:, None])


@pytest.mark.parametrize("layer", range(1, 5))
def test_feature_gap(layer):
    """Property 21: the mean square over all elements of layer l's output alone.

    Other layers have no slope, and twice the difference is four times the gap. Layer 1
    is none of those that l may be.
    """
    gen = np.random.default_rng(0)
    sizes = {0: (5, 7), 1: (5, 2, 3), 2: (5, 4), 3: (5, 6)}
    student, target = (
        {stage: jnp.float32(gen.normal(size=size)) for stage, size in sizes.items()}
        for _ in range(2)
    )
    student = jax.tree.map(lambda leaf: leaf.at[4].set(jnp.nan), student)
    kept, mask = np.arange(4) < layer, np.arange(5) < 4

    def gap(student, target):
        return boundary.gap(student, target, range(1, 4), kept, mask)

    value, (slope, to_target) = jax.value_and_grad(gap, (0, 1))(student, target)
    for stage in sizes:
        difference = np.asarray(student[stage] - target[stage])[:4]
        if stage + 1 == layer > 1:
            np.testing.assert_allclose(value, (difference**2).mean(), rtol=1e-5)
            expected = 2 * difference / difference.size
            np.testing.assert_allclose(slope[stage][:4], expected, rtol=1e-5)
            double = {**student, stage: 2 * student[stage] - target[stage]}
            np.testing.assert_allclose(gap(double, target), 4 * value, rtol=1e-5)
        else:
            assert not np.asarray(slope[stage][:4]).any()
        assert not np.asarray(to_target[stage][:4]).any()
    if layer == 1:
        assert value == 0


# Properties of a round.


def counts_of(opt_state):
    """{Adam's counts} of one stage."""
    leaves = jax.tree.leaves(opt_state)
    return {int(leaf) for leaf in leaves if leaf.dtype == np.int32}


def test_distillation_stays_below_the_boundary(rounds):
    """Properties 4 to 6: J steps once a batch in the layers up to l, at l = 1 in none.

    The kept optimizer counts the steps: Q's in all layers, J's below the boundary;
    where a count stands still, moments and parameters do.
    """
    layers = (6, 3, 1, 5, 2)
    state = start(layers, "persist")
    for ids in ((0, 1, 2, None), (3, 4, None, None)):
        after, _, _ = rounds("persist")(state, cohort_of(*ids))
        for number in (n for n in ids if n is not None):
            batches = 2 * -(-SIZES[number] // BATCH)
            reached = layers[number] if layers[number] > 1 else 0
            kept = plain.at(after.opt_state, number)
            for i in range(L):
                assert counts_of(kept[i]) == {batches * (1 + (i < reached))}


def test_at_layer_one_clients_train_alone(rounds):
    """Properties 6, 9 and 10, the neutral setting: only Q remains.

    Clients are local training, whatever the server is; the server of equal, frozen
    first layers is FedAvg.
    """
    state, cohort = start((1,) * 5), cohort_of(*COHORT)
    first = jax.tree.map(
        lambda leaf: np.repeat(leaf[None], NUM_CLIENTS, 0), state.server.params[0]
    )
    own = plain.own(state)
    state = plain.with_own(state, own._replace(params=(first, *own.params[1:])))
    after, metrics, _ = rounds()(state, cohort)
    assert metrics["mean_layer"][0] == 3
    trained, deep = [], [i > 0 for i in range(L)]
    for one in plain.clients(state, cohort, TABLE):
        tx = [plain.Adam(one.rate(COMMON)) for _ in range(2)]
        expected, got = one.train(one.own, tx[0]), plain.own_layers(after, one.number)
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
        phi = one.train(one.server, tx[1], "server", trained=lambda epoch: deep)
        trained.append(phi)
    mean = plain.mean(trained, [1, 1, 1])
    got = plain.server_layers(after)
    chex.assert_trees_all_close(got, mean, rtol=1e-4, atol=1e-5)
    assert plain.differs(mean, plain.server_layers(state), 1e-3)

    # Nothing depends on J or, at the clients, on the server: bit for bit.
    warm, _, _ = rounds()(state, cohort, temperature=7.0)
    chex.assert_trees_all_equal(warm.server, after.server)
    chex.assert_trees_all_equal(warm.clients, after.clients)
    other = plain.with_server(state, plain.perturbed(state.server))
    again, _, _ = rounds()(other, cohort)
    chex.assert_trees_all_equal(again.clients, after.clients)


@pytest.mark.parametrize("structure", ["default", "mse"])
def test_servers_first_layer_is_inert(structure, rounds):
    """Property 8: it never moves and nothing depends on it."""
    state = start((6, 4, 3, 5, 2))
    after, _, _ = rounds(structure)(state)
    first, *rest = state.server.params
    chex.assert_trees_all_equal(plain.host(after.server.params[0]), first)
    moved = (plain.perturbed(first, size=10), *rest)
    other = plain.with_server(state, state.server._replace(params=moved))
    again, _, _ = rounds(structure)(other)
    chex.assert_trees_all_equal(plain.host(again.server.params[0]), moved[0])
    chex.assert_trees_all_equal(again.server.params[1:], after.server.params[1:])
    chex.assert_trees_all_equal(again.clients, after.clients)


def test_what_is_uploaded(problem, start):
    """Features are in eval mode, of images as they are, also with --augment.

    The only client does not train; what is left to chance is an augmentation.
    """
    task = problem.task_of("with_norm")
    made = fedd2s.make(fedd2s.HParams(batch_size=5), task)
    cohort = plain.cut(plain.planner(problem.data, made.plans, 1)(1), 0)
    data, run = problem.data.replace(augment="crop_flip"), jax.jit(made.round)
    state, taken = start("with_norm"), np.zeros(5, np.int32)

    def after(size, key=3):
        own = plain.sound(state.clients, size)
        clients = {"own": own, "participations": taken}
        begin = state.replace(clients=clients, key=jax.random.key(key))
        return run(begin, cohort, data)[0].server.params

    found = after(1.0)
    assert plain.differs(found, state.server.params)
    assert plain.differs(found, after(0.25), 1e-5)
    chex.assert_trees_all_close(found, after(1.0, key=4), rtol=1e-6)


# Section 1.1's table: MB up of l = 6..1 by 800 examples, and of the head down.
MEGABYTES = {
    "m1": (6.586, 6.606, 6.657, 8.193, 9.831, 6.554),
    "m2": (13.428, 13.210, 13.518, 19.662, 26.215, 13.108),
    "m2 of femnist": (10.234, 10.138, 10.446, 13.722, 20.071, 10.036),
}
HEADS = {
    "m1": (0, 0.0007, 0.0028, 0.0685, 0.0870),
    "m2": (0, 0.0132, 0.0297, 1.0788, 1.3742),
    "m2 of femnist": (0, 0.0082, 0.0247, 0.6150, 0.9105),
}
INPUTS = {
    "m1": ((32, 32, 3), 10),
    "m2": ((32, 32, 3), 100),
    "m2 of femnist": ((28, 28, 1), 62),
}


@pytest.mark.parametrize("name", MEGABYTES)
def test_bytes_of_the_papers_models(name):
    """Property 23: sizes of the kinds of messages that a boundary l sends."""
    shape, num_classes = INPUTS[name]
    model = models.MODELS[name.split()[0]](num_classes)
    made = fedd2s.make(fedd2s.HParams(), task_of(model, shape, num_classes))
    size = {kind.name: kind.num_bytes for kind in made.messages}
    assert size["soft targets"] == num_classes * 4
    for number, layer in enumerate(range(6, 0, -1)):
        uploaded = {f"features {model.stage_names[i]}" for i in (0, layer - 1)}
        up = sum(size[kind] for kind in uploaded) + size["labels"]
        np.testing.assert_allclose(800e-6 * up, MEGABYTES[name][number], atol=5.1e-4)
        head = sum(size[f"head {stage}"] for stage in model.stage_names[layer:])
        if layer > 1:
            np.testing.assert_allclose(1e-6 * head, HEADS[name][number], atol=5.1e-5)
    directions = {kind.name.split()[0]: kind.direction for kind in made.messages}
    assert directions == {
        "features": "up",
        "labels": "up",
        "soft": "down",
        "head": "down",
    }


def test_refused():
    """Features need layers behind the first."""
    flat = stages.chain("flat", [("F3", stages.Dense(NUM_CLASSES, relu=False))])
    with pytest.raises(ValueError, match="--model=flat has one layer"):
        fedd2s.make(fedd2s.HParams(), task_of(flat))
