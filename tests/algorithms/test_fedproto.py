"""FedProto against numpy with two architectures, its model that serves, and its bytes.

Clients 0, 2 and 4 have the network `tiny`, 1 and 3 `deeper`; embeddings are 6 wide.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import fedproto
from fedjax_pfl import prototypes, types
from launch import build
from tests.algorithms import conftest, plain

GROUPS = ("tiny", "deeper")
GROUP = np.arange(5) % 2
MEMBERS = ([0, 2, 4], [1, 3])
STRUCTURES = {
    "examples": {"client_momentum": 0.5},
    "means": {"prototype_loss": "means", "aggregation": "uniform"},
}
FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5, "prototype_weight": 3.0}


@pytest.fixture(scope="module")
def task(problem):
    """Two architectures over five clients."""
    return problem.task_of(
        client_models=tuple(conftest.NETWORKS[name] for name in GROUPS),
        group_of_client=GROUP.astype(np.int32),
    )


@pytest.fixture(scope="module")
def cohort_at(problem, task):
    made = fedproto.make(fedproto.HParams(batch_size=5), task)
    return plain.planner(problem.data, made.plans, group=GROUP)


@pytest.fixture(scope="module")
def run(problem, task):
    """`(name, state, cohort, **floats) -> round's result`, compiled by name."""

    @functools.cache
    def get(name):
        hparams = fedproto.HParams(batch_size=5, **STRUCTURES[name])
        return conftest.jitted(fedproto, hparams, task)

    def one_round(name, state, cohort, data=problem.data):
        return get(name)(state, cohort, data, **FLOATS)

    return one_round


def state_of(is_known=(1, 0, 1, 1), round=1):
    """All clients differ; a class may have no prototype yet."""
    gen, known = np.random.default_rng(0), np.array(is_known, bool)
    clients = [
        plain.stack([conftest.random_params(conftest.NETWORKS[name], k) for k in ids])
        for name, ids in zip(GROUPS, MEMBERS, strict=True)
    ]
    mean = np.float32(np.where(known[:, None], gen.normal(size=(4, 6)), 0))
    server = prototypes.Prototypes(mean, known)
    return types.RoundState(
        server, tuple(clients), jax.random.key(3), np.int32(round), ()
    )


def private(state, number):
    """A client's Variables."""
    group = GROUP[number]
    return plain.at(state.clients[group], MEMBERS[group].index(number))


def classes(label):
    """(class, rows that have it) of those that are there."""
    return [(int(j), label == j) for j in np.unique(label)]


def slope_of(kind, h, label, mean, known):
    """The gradient of L_R to representations."""
    slope = np.zeros_like(h)
    for j, rows in classes(label):
        if not known[j]:
            continue
        if kind == "examples":
            slope[rows] = 2 * (h[rows] - mean[j]) / h.size
        else:
            gap = h[rows].mean(0) - mean[j]
            slope[rows] = gap / np.linalg.norm(gap) / rows.sum()
    return slope


def reference(state, cohort, table, values):
    """(layers by client, {client: {class: (C, rows)}}, C of the server)."""
    kind, own, sent = values.get("prototype_loss", "examples"), {}, {}
    mean, known = map(np.array, state.server)
    mean = np.float64(mean)
    for one in plain.clients(state, cohort, table):

        def extra(params, position, rows):
            acts = plain.activations(params, table.images(rows))
            slope = slope_of(kind, acts[-2], table.label[rows], mean, known)
            slope = values["prototype_weight"] * slope
            return plain.backward(params, acts, {len(params) - 1: slope})

        start = plain.layers(private(state, one.number).params)
        params = one.train(start, one.sgd(values), extra=extra)
        rows = table.owned(one.number)
        h = plain.activations(params, table.images(rows))[-2]
        found = classes(table.label[rows])
        own[one.number] = params
        sent[one.number] = {j: (h[mine].mean(0), mine.sum()) for j, mine in found}
    after, is_uniform = mean.copy(), values.get("aggregation") == "uniform"
    for j in {j for one in sent.values() for j in one}:
        pairs = [one[j] for one in sent.values() if j in one]
        weight = [1 if is_uniform else rows for _, rows in pairs]
        after[j] = np.average([c for c, _ in pairs], axis=0, weights=weight)
    return own, sent, after


def test_a_client_without_a_step_sends_its_prototypes(run, problem, task, cohort_at):
    """Eq. 3 needs no step, as with `--drop_last` and few rows."""
    state, cohort = state_of(), cohort_at(1)
    plan = cohort.plans["local"]
    first = int(jnp.argmax(cohort.row_mask))
    steps = jnp.asarray(plan.num_steps).at[first].set(0)
    idle = cohort.replace(plans={"local": plan.replace(num_steps=steps)})
    _, _, every = run("examples", state, cohort)
    after, _, messages = run("examples", state, idle)
    np.testing.assert_array_equal(messages["prototypes up"], every["prototypes up"])
    number = int(cohort.client_id[first])
    own = [private(one, number) for one in (state, after)]
    chex.assert_trees_all_equal(*own)


def test_a_class_that_only_some_clients_have(run, problem, cohort_at):
    """Its prototype is a mean over those that have it, also with equal weights."""
    state, cohort, label = state_of(), cohort_at(1), np.array(problem.data.label)
    *others, alone = plain.members(cohort)
    for number in others:
        owned = problem.table.owned(number)
        label[owned] = np.where(label[owned] == 3, 0, label[owned])
    data = problem.data.replace(label=label)
    after, *_ = run("means", state, cohort, data)
    values = STRUCTURES["means"] | FLOATS
    _, sent, mean = reference(state, cohort, plain.Table(data), values)
    assert [number for number, one in sent.items() if 3 in one] == [alone]
    assert np.abs(mean[3]).max() > 0.1
    chex.assert_trees_all_close(after.server.mean, mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", STRUCTURES)
def test_rounds_equal_a_numpy_reference(name, run, problem, task, cohort_at):
    """Models, prototypes and bytes of two rounds; every option matters."""
    state, values = state_of(), STRUCTURES[name] | FLOATS
    made = fedproto.make(fedproto.HParams(**STRUCTURES[name]), task)
    for _ in range(2):
        cohort = cohort_at(int(state.round))
        given = state, cohort, problem.table
        own, sent, mean = reference(*given, values)
        after, metrics, messages = run(name, state, cohort)
        for number in range(5):
            found, old = (private(one, number) for one in (after, state))
            if number not in own:
                chex.assert_trees_all_equal(found, old)
                continue
            found = plain.layers(found.params)
            chex.assert_trees_all_close(found, own[number], rtol=0, atol=1e-5)
            assert plain.differs(found, plain.layers(old.params), 1e-3)
        is_sent = np.isin(np.arange(4), [j for one in sent.values() for j in one])
        chex.assert_trees_all_close(after.server.mean, mean, rtol=0, atol=1e-5)
        known = np.asarray(state.server.is_known)
        np.testing.assert_array_equal(after.server.is_known, known | is_sent)
        # A prototype is six floats and a class; its rows go up where they count.
        up = 4 * 6 + 1 + 4 * (name == "examples")
        expected = [
            {"bytes_up": up * len(sent[k]), "bytes_down": 25 * int(known.sum())}
            for k in plain.members(cohort)
        ]
        assert plain.sent_bytes(made, messages, 3) == expected
        assert np.isfinite(metrics["train_loss"][0])
        state = after
    other = {"examples": "means", "means": "examples"}[name]
    aggregation = {"examples": "uniform", "means": "examples"}[name]
    changes = dict.fromkeys(FLOATS, 0.3) | {"prototype_loss": other}
    changes |= {"aggregation": aggregation}
    for option, value in changes.items():
        found = reference(*given, values | {option: value})
        assert plain.differs((found[0], found[2]), (own, mean), 1e-4), option


def test_a_class_without_a_prototype_pulls_nothing(problem, task, cohort_at):
    """Without any, a client trains on cross-entropy alone."""
    state, cohort = state_of(is_known=(0, 0, 0, 0)), cohort_at(1)
    hparams = fedproto.HParams(batch_size=5)
    run = conftest.jitted(fedproto, hparams, task)
    values = FLOATS | {"prototype_weight": 0.0}
    first, second = (
        run(state, cohort, problem.data, **one)[0] for one in (FLOATS, values)
    )
    chex.assert_trees_all_equal(first.clients, second.clients)


def test_adapting_is_pulled_to_the_prototypes(problem, start):
    """--fine_tune_epochs: cross-entropy and the distance, as in a round."""
    task = problem.task_of()
    made = fedproto.make(fedproto.HParams(batch_size=5), task)
    own = start().clients
    served = state_of().replace(clients=(own,))
    (group,) = made.serving(served, None, problem.data)

    def adapt(client, row, server):
        client = client.replace(model=group.model)
        return made.adapt(client, group.variables(row), server)

    run, cohort = plain.adapter(adapt, task), plain.cut(problem.cohort(1), 1)
    begun = [state_of(known).replace(clients=own) for known in ([1] * 4, [0] * 4)]
    found = [run(state, cohort, problem.data)[:-1] for state in begun]
    assert plain.differs(*found)


def test_the_nearest_prototype_serves(problem, task):
    """Of those that are known; the body may be run alone, and in two parts."""
    made, state = fedproto.make(fedproto.HParams(), task), state_of()
    mean, known = state.server
    x, _ = problem.data.gather(jnp.arange(7))
    seen = set()
    for group in made.serving(state, None, problem.data):
        for slot, number in enumerate(np.asarray(group.client_id)):
            seen.add(int(number))
            variables = group.variables(plain.at(group.own, slot))
            own = plain.layers(private(state, number).params)
            h = plain.activations(own, problem.table.images(np.arange(7)))[-2]
            gaps = ((h[:, None] - np.float64(mean)) ** 2).sum(2)
            out, _ = group.model.forward(*variables, x)
            np.testing.assert_allclose(-out[:, known], gaps[:, known], rtol=1e-4)
            farther = gaps[:, known].max(1, keepdims=True) + 1
            np.testing.assert_allclose(-out[:, ~known], farther, rtol=1e-4)
            nearest = np.where(known, gaps, np.inf).argmin(1)
            np.testing.assert_array_equal(out.argmax(1), nearest)
            last = len(group.model.stage_names) - 1
            body, _ = group.model.forward(*variables, x, stop=last)
            np.testing.assert_allclose(body, h, atol=1e-5)
            two, _ = group.model.forward(*variables, body, start=last)
            np.testing.assert_allclose(two, out, rtol=1e-4, atol=1e-5)
            first, _ = group.model.forward(*variables, x, stop=1)
            two, _ = group.model.forward(*variables, first, start=1)
            np.testing.assert_allclose(two, out, rtol=1e-4, atol=1e-5)
    assert seen == set(range(5)) and made.server is None


def test_what_prototypes_become():
    """Means of the sums, also by weights below one; those of nobody stay."""
    old = prototypes.Prototypes(np.float32([[1], [2], [3], [4]]), np.arange(4) < 2)
    total, weight = np.float32([[0], [3], [6], [0]]), np.float32([0, 0.5, 2, 0])
    new = old.after(total, weight)
    assert new.mean.tolist() == [[1], [6], [3], [4]]
    assert new.is_known.tolist() == [True, True, True, False]
    h, label = jnp.array([[1.0], [3], [jnp.nan]]), jnp.array([1, 1, 0])
    mean, rows = prototypes.means(h, label, jnp.array([True, True, False]), 2)
    assert (mean.tolist(), rows.tolist()) == ([[0], [2]], [0, 2])
    none = prototypes.Prototypes.none(3, 2)
    assert none.mean.shape == (3, 2) and not none.is_known.any()


def test_maps_are_representations_too():
    """The last stage may flatten its input; logits are of each example alone."""

    def forward(params, stats, h, *, start=0, stop=None, **mode):
        return h, stats

    model = conftest.NETWORKS["tiny"]._replace(forward=forward)
    last = len(model.stage_names) - 1
    h = np.random.default_rng(0).normal(size=(3, 2, 3)).astype(np.float32)
    h[2] *= 9
    mean = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
    known = np.array([False, True, True, False])
    params = (*({} for _ in range(last)), prototypes.Prototypes(mean, known))
    out, _ = prototypes.nearest(model).forward(params, (), jnp.asarray(h))
    gaps = ((h.reshape(3, 1, 6) - mean) ** 2).sum(2)
    gaps[:, ~known] = gaps[:, known].max(1, keepdims=True) + 1
    np.testing.assert_allclose(out, -gaps, rtol=1e-5)


def test_models_of_other_widths_are_refused(problem):
    """Their representations cannot be compared; nor are there any of one stage."""
    pair = tuple(conftest.NETWORKS[name] for name in ("tiny", "wide"))
    with pytest.raises(ValueError, match="tiny,wide have embeddings of widths 6, 5"):
        fedproto.make(fedproto.HParams(), problem.task_of(client_models=pair))
    one = problem.task_of(conftest.network("one", ()))
    with pytest.raises(ValueError, match="one has one layer"):
        fedproto.make(fedproto.HParams(), one)


def test_a_run_with_newcomers_that_adapt(unequal):
    """Fine-tuning trains a client's own model, which prototypes answer for."""
    given = {"num_clients": 7, "unseen_clients": 2, "fine_tune_epochs": 2}
    given["devices"] = 1
    experiment = build.experiment(
        algo="fedproto", dataset=unequal, model="mlp", rounds=3, preset="none", **given
    )
    metrics = experiment.run(progress=False)["metrics"]
    assert metrics["fine_tuned_accuracy"]["mean"] > 0.5
    assert metrics["unseen_fine_tuned_accuracy"]["mean"] > 0.5
    images = np.zeros((2, 8, 8, 1), np.uint8)
    np.testing.assert_allclose(experiment.predict(0, images).sum(1), 1, rtol=1e-5)


def test_trained_models_alone_are_not_measured(problem):
    """The last stage of a client's model serves nobody."""
    with pytest.raises(ValueError, match="--eval_moments: .* prototypes"):
        fedproto.make(fedproto.HParams(), problem.task_of(tests_trained=True))
