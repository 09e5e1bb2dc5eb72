"""Correct answers of served and of the server's models, against loops in numpy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import evaluate, evaluations, execution, measures, scores, types
from tests import counted
from tests.fedjax_pfl import small

K = 7
TEST = [3, 0, 5, 2, 7, 1, 4]
MODEL = small.linear()
HOW = {
    "one": execution.Execution(1),
    "three": execution.Execution(3),
    "all": execution.Execution(K),
    "sharded": execution.Execution(2, small.mesh_of(4)),
}
every_way = pytest.mark.parametrize("name", HOW)
# Chunks do not depend on what a group serves: for other groups two ways are enough.
two_ways = pytest.mark.parametrize("name", ["three", "sharded"])


@pytest.fixture(scope="module")
def data():
    """Seven clients of unequal test rows, one without any; two rows of padding."""
    return small.tables([1] * K, test=TEST)


def random_variables(*leading, seed=0, num_stages=1):
    """Variables of `small.linear`, stacked."""
    gen = np.random.default_rng(seed)
    shape = (*leading, small.WIDTH, small.NUM_CLASSES)
    params = [{"w": gen.normal(size=shape)} for _ in range(num_stages)]
    params = jax.tree.map(jnp.float32, tuple(params))
    return types.Variables(params, ({},) * num_stages)


def of(variables, index):
    """One row of stacked variables."""
    return jax.tree.map(lambda leaf: leaf[index], variables)


def answers(data, variables):
    """bool[U]: right answers on the union of all test rows, stages averaged."""
    rows = np.asarray(data.partition.test.row)[: sum(TEST)]
    image = np.asarray(data.image, np.float64)[rows]
    logits = sum(image @ np.asarray(stage["w"]) for stage in variables.params)
    return logits.argmax(1) == np.asarray(data.label)[rows]


def cross_entropies(data, variables):
    """f64[U]: the cross-entropy of a model with one stage on the union."""
    rows = np.asarray(data.partition.test.row)[: sum(TEST)]
    logits = np.asarray(data.image, np.float64)[rows] @ variables.params[0]["w"]
    right = logits[np.arange(len(rows)), np.asarray(data.label)[rows]]
    return np.log(np.exp(logits).sum(1)) - right


def own_rows(client):
    """The slice of the union that belongs to a client."""
    start = sum(TEST[:client])
    return slice(start, start + TEST[client])


def algorithm(serving, server=None):
    """What evaluation looks at."""
    return types.Algorithm(
        (), None, None, server=server, serving=lambda *_: tuple(serving)
    )


def count(data, method, *, seed=0, round=0, cohort=None, how="one", jit=True, **given):
    """The counts of both programs of an evaluation."""
    scoring = evaluate.Scoring(**({"batch_size": 4, "own_batch_size": 2} | given))
    state = types.RoundState.first((), (), jax.random.key(seed))
    state = state.replace(round=jnp.int32(round))

    return counted.both(method, state, cohort, data, scoring, HOW[how], jit)


def metrics(counts, test_count=TEST, union=sum(TEST)):
    """The metrics of a classifier."""
    return scores.Classes().metrics(counts, np.array(test_count), union)


@pytest.mark.parametrize("jit", [False, True])
def test_one_model_for_all(data, jit):
    """The server's model serves everybody: own rows of each, and the union."""
    shared = random_variables()
    mask = jnp.ones(K, bool)
    method = algorithm(
        [types.Serving.one(MODEL, shared, mask)],
        lambda state, data: {"global": (MODEL, shared)},
    )
    counts = count(data, method, jit=jit)
    right = answers(data, shared)
    expected = [right[own_rows(k)].sum() for k in range(K)]
    np.testing.assert_array_equal(counts["own"]["right"], expected)
    assert counts["known"].all()
    np.testing.assert_array_equal(counts["server"]["global"], [right.sum()])
    assert 0 < right.sum() < sum(TEST)
    losses = cross_entropies(data, shared)
    expected = [losses[own_rows(k)].sum() for k in range(K)]
    np.testing.assert_allclose(counts["own"]["loss"], expected, rtol=1e-5)
    total = counts["server_loss"]["global"]
    np.testing.assert_allclose(total, losses.sum(), rtol=1e-5)


def stacked_groups(own, shared):
    """Clients 4, 0, 6 and, unserved, 2 in that order; 1 and 5 share; 3 has nobody."""
    ids, mask = jnp.array([4, 0, 6, 2]), jnp.array([True, True, True, False])
    return [
        types.Serving.each(MODEL, own, client_id=ids, mask=mask),
        types.Serving.one(MODEL, shared, jnp.isin(jnp.arange(K), jnp.array([1, 5]))),
    ]


@every_way
def test_a_model_for_each(data, name):
    """Rows in any order, beside a shared model; chunks and devices do not matter.

    Rows of padding add nothing, nor does the client that no model serves.
    """
    own, shared = random_variables(4, seed=1), random_variables(seed=2)
    counts = count(data, algorithm(stacked_groups(own, shared)), how=name)
    served = {4: of(own, 0), 0: of(own, 1), 6: of(own, 2), 1: shared, 5: shared}
    losses = [
        cross_entropies(data, served[k])[own_rows(k)].sum() if k in served else 0
        for k in range(K)
    ]
    np.testing.assert_allclose(counts["own"]["loss"], losses, rtol=1e-5)
    expected = np.zeros(K, int)
    for row, client in enumerate([4, 0, 6]):
        expected[client] = answers(data, of(own, row))[own_rows(client)].sum()
    for client in (1, 5):
        expected[client] = answers(data, shared)[own_rows(client)].sum()
    np.testing.assert_array_equal(counts["own"]["right"], expected)
    served = [True, True, False, False, True, True, True]
    np.testing.assert_array_equal(counts["known"], served)
    assert "server" not in counts
    values, of_clients = metrics(counts)
    accuracies = of_clients["accuracy"]
    # Client 1 has no test row, 2 and 3 no model.
    np.testing.assert_array_equal(np.isnan(accuracies), [0, 1, 1, 1, 0, 0, 0])
    assert values["client_accuracy"] == pytest.approx(np.nanmean(accuracies))


def built_group(own, shared):
    """Everybody's model is the shared one plus what is their own."""

    def build(shared, row):
        return jax.tree.map(jnp.add, shared, row)

    return types.Serving.each(MODEL, own, shared=shared, build=build)


@two_ways
def test_models_made_where_they_are_needed(data, name):
    """The same as if all of them had been made before."""
    own, shared = random_variables(K, seed=3), random_variables(seed=4)
    counts = count(data, algorithm([built_group(own, shared)]), how=name)
    whole = jax.tree.map(lambda one, many: one + many, shared, own)
    expected = [answers(data, of(whole, k))[own_rows(k)].sum() for k in range(K)]
    np.testing.assert_array_equal(counts["own"]["right"], expected)


def test_never_all_models_at_once(data):
    """With a chunk of 1 no array is as large as two of the built models."""
    wide = 10_000

    def build(shared, row):
        params = ({"w": jnp.full((small.WIDTH, wide), row)},)
        return types.Variables(params, ({},))

    group = types.Serving.each(MODEL, jnp.arange(7.0), build=build)
    state = types.RoundState.first((), (), jax.random.key(0))
    scoring = evaluate.Scoring(4, 2, num_scored=K, scored="all")
    run = functools.partial(
        evaluate.of_clients,
        algorithm([group]),
        scoring=scoring,
        how=execution.Execution(1),
        ids=jnp.arange(K),
    )
    jaxpr = jax.make_jaxpr(run)(state, None, data)
    sizes = [v.aval.size for e in small.equations(jaxpr) for v in e.outvars]
    assert small.WIDTH * wide <= max(sizes) < 2 * small.WIDTH * wide


def answered(method, data, score=scores.Classes()):
    """How often a model is run in the graphs: products of matrices."""
    scoring = evaluate.Scoring(4, 2, score=score)
    state = types.RoundState.first(
        random_variables(), random_variables(seed=1), jax.random.key(0)
    )

    def run(state):
        given = method, state, None, data, scoring, HOW["one"]
        return evaluate.of_shared(*given), evaluate.of_clients(*given, jnp.arange(K))

    found = small.equations(jax.make_jaxpr(run)(state))
    return sum(equation.primitive.name == "dot_general" for equation in found)


def test_a_model_that_is_both_answers_once(data):
    """The server's model and a served one that is the very same."""
    mask = jnp.ones(K, bool)

    def method(pick):
        return types.Algorithm(
            (),
            None,
            None,
            server=lambda state, data: {"global": (MODEL, state.server)},
            serving=lambda state, *_: (types.Serving.one(MODEL, pick(state), mask),),
        )

    measured = scores.Classes(measures.chosen("macro_f1,auc,ece,per_class"), max(TEST))
    for score in (scores.Classes(), measured):
        assert answered(method(lambda state: state.server), data, score) == 1
        assert answered(method(lambda state: state.clients), data, score) == 2


def test_measures_of_a_shared_model_are_of_each_clients_own_rows(data):
    """As where each has the same model, batch by batch; missing rows add nothing."""
    score = scores.Classes(measures.chosen("macro_f1,auc,ece"), max(TEST))
    shared = random_variables()
    own = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], K, 0), shared)
    found = [
        count(data, algorithm([group]), score=score)["own"]["measured"]
        for group in (
            types.Serving.one(MODEL, shared, jnp.ones(K, bool)),
            types.Serving.each(MODEL, own),
        )
    ]
    chex.assert_trees_all_close(*found, rtol=1e-5)
    assert found[0][0]["rows"].sum(1).tolist() == TEST
    with pytest.raises(ValueError, match="nothing is personal"):
        types.Serving.each(MODEL, {"params": {}})


def test_a_sample_is_the_same_in_every_evaluation():
    """Drawn by the seed alone."""
    draws = [
        np.asarray(evaluate.sampled_clients(jax.random.key(seed), 50, 9))
        for seed in (0, 0, 1)
    ]
    assert [draw.sum() for draw in draws] == [9, 9, 9]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any()
    # Nobody twice, also where nearly all are drawn.
    assert evaluate.sampled_clients(jax.random.key(0), 50, 49).sum() == 49


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_sampled_clients_have_the_accuracies_of_a_whole_evaluation(data, kind):
    """The others have none; the metrics say how many there were."""
    own, shared = random_variables(K, seed=3), random_variables(seed=4)
    group = built_group(own, shared)
    if kind == "shared":
        group = types.Serving.one(MODEL, shared, jnp.ones(K, bool))
    method = algorithm([group], lambda state, data: {"global": (MODEL, shared)})
    whole = count(data, method, how="three")
    everybody = whole["own"]["right"]
    sample = count(data, method, how="three", num_sampled=4)
    later = count(data, method, how="three", num_sampled=4, round=9)
    known = sample["known"]
    expected = evaluate.sampled_clients(jax.random.key(0), K, 4)
    np.testing.assert_array_equal(known, expected)
    np.testing.assert_array_equal(sample["own"]["right"], np.where(known, everybody, 0))
    np.testing.assert_array_equal(later["own"]["right"], sample["own"]["right"])
    np.testing.assert_array_equal(later["known"], known)
    (values, some), (full, every) = metrics(sample), metrics(whole)
    accuracies, everyone = some["accuracy"], every["accuracy"]
    np.testing.assert_array_equal(accuracies, np.where(known, everyone, np.nan))
    assert values["clients_evaluated"] == np.isfinite(accuracies).sum()
    assert full["clients_evaluated"] == np.isfinite(everyone).sum() < K
    assert values["global_accuracy"] == full["global_accuracy"]


def test_a_sample_counts_only_those_a_group_serves(data):
    """Fewer rows than the sample, and sampled clients that nobody serves."""
    own, shared = random_variables(4, seed=1), random_variables(seed=2)
    method = algorithm(stacked_groups(own, shared))
    whole = count(data, method)
    everybody = whole["own"]["right"]
    sample = count(data, method, num_sampled=5)
    chosen = np.asarray(evaluate.sampled_clients(jax.random.key(0), K, 5))
    np.testing.assert_array_equal(sample["known"], whole["known"] & chosen)
    np.testing.assert_array_equal(
        sample["own"]["right"], np.where(chosen, everybody, 0)
    )


@two_ways
def test_scored_clients_of_the_next_cohort(data, name):
    """Their models on the union; a padding row and who has no model score nothing."""
    own, shared = random_variables(4, seed=1), random_variables(seed=2)
    method = algorithm(stacked_groups(own, shared))
    cohort = small.cohort([6, K, 5, 4], K)
    counts = count(data, method, cohort=cohort, num_scored=4, how=name)
    np.testing.assert_array_equal(counts["scored"], [6, K, 5, 4])
    right = [
        answers(data, of(own, 2)),
        answers(data, shared),
        answers(data, of(own, 0)),
    ]
    union = [one.sum() for one in right]
    np.testing.assert_array_equal(counts["cross"], [union[0], 0, union[1], union[2]])
    values, _ = metrics(counts)
    mine = [
        one[own_rows(client)].sum()
        for one, client in zip(right, (6, 5, 4), strict=True)
    ]
    assert values["c_spec"] == pytest.approx(sum(mine) / (TEST[6] + TEST[5] + TEST[4]))
    assert values["c_gen"] == pytest.approx(sum(union) / (3 * sum(TEST)))
    assert values["c_per"] == (values["c_spec"] + values["c_gen"]) / 2


def test_all_clients_scored(data):
    """In order of their ids; with a sample, only those in it."""
    own, shared = random_variables(K, seed=3), random_variables(seed=4)
    method = algorithm([built_group(own, shared)])
    given = {"num_scored": K, "scored": "all"}
    counts = count(data, method, **given)
    np.testing.assert_array_equal(counts["scored"], np.arange(K))
    whole = jax.tree.map(lambda one, many: one + many, shared, own)
    expected = np.array([answers(data, of(whole, k)).sum() for k in range(K)])
    np.testing.assert_array_equal(counts["cross"], expected)
    sample = count(data, method, num_sampled=3, **given)
    chosen = np.asarray(evaluate.sampled_clients(jax.random.key(0), K, 3))
    np.testing.assert_array_equal(sample["scored"], np.where(chosen, np.arange(K), K))
    np.testing.assert_array_equal(sample["cross"], np.where(chosen, expected, 0))


def test_several_server_models_by_name(data):
    """Each gives its own accuracy; the first one serves."""
    models = {name: random_variables(seed=seed) for seed, name in enumerate("abc")}

    def server(state, data):
        return {name: (MODEL, one) for name, one in models.items()}

    counts = count(data, algorithm((), server)._replace(serving=None))
    values, _ = metrics(counts)
    for name, one in models.items():
        expected = answers(data, one).mean()
        assert values[f"{name}_accuracy"] == pytest.approx(expected)
    right = answers(data, models["a"])
    expected = [right[own_rows(k)].sum() for k in range(K)]
    np.testing.assert_array_equal(counts["own"]["right"], expected)


@pytest.mark.parametrize("jit", [False, True])
def test_two_models_of_the_same_variables_answer_apart(data, jit):
    """The memory of answers knows the model, and keeps what it is named by alive."""
    variables = random_variables()

    def forward(params, stats, h, **mode):
        out, stats = MODEL.forward(params, stats, h, **mode)
        return -out, stats

    def server(state, data):
        # Derived: the leaves die with the list unless somebody keeps them.
        doubled = [
            jax.tree.map(lambda leaf, n=n: leaf * n, variables) for n in (1, 2, 3)
        ]
        models = {"global": (MODEL, variables), "wrong": (opposite, variables)}
        return models | {f"of{n}": (MODEL, one) for n, one in enumerate(doubled)}

    opposite = MODEL._replace(name="opposite", forward=forward)
    values, _ = metrics(count(data, algorithm((), server), jit=jit))
    right = answers(data, variables).mean()
    flipped = variables._replace(params=jax.tree.map(jnp.negative, variables.params))
    assert values["global_accuracy"] == pytest.approx(right)
    assert values["wrong_accuracy"] == pytest.approx(answers(data, flipped).mean())
    assert right != answers(data, flipped).mean()
    for number in range(3):
        assert values[f"of{number}_accuracy"] == pytest.approx(right)


def test_no_c_gen_where_the_sample_has_no_scored_client():
    """The sample of the clients and the next cohort may be apart: no nan, no metric."""
    counts = {
        "own": {"right": np.array([1, 0]), "loss": np.zeros(2)},
        "known": np.array([True, False]),
        "scored": np.array([2, 2]),
        "cross": np.array([0, 0]),
    }
    values, _ = metrics(counts, [2, 2], 4)
    assert values["client_accuracy"] == 0.5
    assert not {"c_gen", "c_spec", "c_per"} & values.keys()


def test_exits_and_their_ensemble(data):
    """Of each server model; clients are served the ensemble, or the last exit."""
    model = small.linear("exits", num_exits=3)
    last = model._replace(answer="last")
    first, second = (random_variables(seed=s, num_stages=3) for s in (0, 1))
    # The first two exits of one of them agree.
    params = second.params
    second = second._replace(params=(params[0], params[0], params[2]))

    def server(state, data):
        return {"global": (model, first), "other": (last, second)}

    served = types.Serving.each(last, jax.tree.map(lambda leaf: leaf[None], second))
    counts = count(data, algorithm([served], server))
    values, _ = metrics(counts)
    for prefix, one in (("", first), ("other_", second)):
        for number in range(3):
            alone = types.Variables(one.params[number : number + 1], ())
            name = f"{prefix}exit{number + 1}_accuracy"
            assert values[name] == pytest.approx(answers(data, alone).mean())
        ensemble = pytest.approx(answers(data, one).mean())
        assert values[f"{prefix}ensemble_accuracy"] == ensemble
    assert values["global_accuracy"] == values["ensemble_accuracy"]
    assert values["other_accuracy"] == values["other_exit3_accuracy"]
    alone = types.Variables(second.params[2:], ())
    assert counts["own"]["right"][0] == answers(data, alone)[own_rows(0)].sum()
    rows = np.asarray(data.partition.test.row)[: sum(TEST)]
    for prefix, one in (("", first), ("other_", second)):
        labels = [
            (np.asarray(data.image)[rows] @ np.asarray(stage["w"])).argmax(1)
            for stage in one.params
        ]
        share = (np.ptp(labels, axis=0) > 0).mean()
        assert values[f"{prefix}exits_disagree"] == pytest.approx(share)
    assert 0 < values["other_exits_disagree"] < values["exits_disagree"]


def test_train_rows(data):
    """Asked for, the first server model also on all train rows."""
    shared = random_variables()
    other = random_variables(seed=1)
    method = algorithm(
        [types.Serving.one(MODEL, shared, jnp.ones(K, bool))],
        lambda state, data: {"global": (MODEL, shared), "other": (MODEL, other)},
    )
    values, _ = metrics(count(data, method, has_train=True))
    rows = np.asarray(data.partition.train.row)
    logits = np.asarray(data.image)[rows] @ np.asarray(shared.params[0]["w"])
    expected = (logits.argmax(1) == np.asarray(data.label)[rows]).mean()
    assert values["train_accuracy"] == pytest.approx(expected)
    assert "train_accuracy" not in metrics(count(data, method))[0]


def test_the_ensemble_is_of_logits():
    """Test 21 of DepthFL: where the mean of probabilities gives another class."""
    logits = jnp.array([[0.0, 9.0, -20.0], [0.0, -9.0, 1.0], [0.0, -9.0, 1.0]])
    probabilities = jax.nn.softmax(logits).mean(0)
    model = small.linear("exits", num_exits=3)
    own = types.Variables(tuple({"w": row[None]} for row in logits), ({}, {}, {}))
    assert logits.mean(0).argmax() == 0 != probabilities.argmax()
    for answer, served in (("ensemble", 0), ("last", 2)):
        one = model._replace(answer=answer)
        out, _ = one.forward(*own, jnp.ones((1, 1)))
        found = [int(z.argmax()) for z in evaluate._outputs(one, out)]
        assert found == [1, 2, 2, 0, served]


def test_metrics_by_hand():
    """Pooled and per client, the worst tenth rounded down, the spread."""
    test_count = np.array([10] * 28 + [40])
    own = np.array([1, 2, *[5] * 26, 36])
    losses = np.array([0.25] * 28 + [0.75])
    server = {"global": np.array([160])}
    sums = {"right": own, "loss": losses * test_count}
    counts = {"own": sums, "known": np.ones(29, bool), "server": server}
    counts |= {"server_loss": {"global": 32.0}}
    values, of_clients = metrics(counts, test_count, 320)
    fractions = np.array([0.1, 0.2, *[0.5] * 26, 0.9])
    np.testing.assert_allclose(of_clients["accuracy"], fractions)
    expected = {
        "global_accuracy": 0.5,
        "client_accuracy": fractions.mean(),
        "client_accuracy_pooled": (3 + 130 + 36) / 320,
        "worst_decile_accuracy": 0.15,
        "client_accuracy_std": fractions.std(),
        "global_loss": 0.1,
        "client_loss": losses.mean(),
    }
    assert values == pytest.approx(expected)
    # Of a sample: by its own test rows.
    known = np.arange(29) < 2
    counts |= {"known": known, "own": sums | {"right": np.where(known, own, 0)}}
    values, _ = metrics(counts, test_count, 320)
    assert values["client_accuracy_pooled"] == pytest.approx(3 / 20)
    assert values["worst_decile_accuracy"] == pytest.approx(0.1)


def test_clients_that_never_train_are_not_scored():
    counts = {
        "own": {"right": np.array([2, 3, 4]), "loss": np.ones(3)},
        "known": np.ones(3, bool),
        "scored": np.array([2, 0, 1]),
        "cross": np.array([9, 5, 6]),
    }
    unseen, count = np.arange(3) == 2, np.full(3, 4)
    given = scores.Classes(), counts, count, 12, unseen
    values, of_clients = evaluations._split_metrics(*given)
    assert values["c_gen"] == 11 / 24 and values["c_spec"] == 5 / 8
    assert values["client_accuracy"] == 5 / 8 and values["unseen_accuracy"] == 1
    np.testing.assert_array_equal(of_clients["accuracy"], [0.5, 0.75, 1])


def test_fine_tuning_that_diverges_has_no_accuracy():
    """Answers of nan would count as those of one class; how many had some is told."""
    counts = {
        "own": {"right": np.array([2, 3, 0]), "loss": np.array([1.0, np.nan, 1.0])},
        "known": np.array([True, True, False]),
    }
    given = scores.Classes(), counts, np.array([4, 8, 4]), 0, np.zeros(3, bool)
    found, _ = evaluations._split_metrics(*given)
    assert found["client_accuracy"] == 7 / 16 and not evaluations._fine_tuned(found)
    assert evaluations._have_diverged(counts).tolist() == [False, True, False]
    counts["own"]["loss"][1] = 1.0
    found, _ = evaluations._split_metrics(*given)
    tuned = evaluations._fine_tuned(found)
    assert tuned["fine_tuned_accuracy"] == 7 / 16
    assert tuned["fine_tuned_accuracy_pooled"] == 5 / 12
    assert not evaluations._have_diverged(counts).any()


def test_official_split_has_no_client_accuracy():
    """Nobody owns a test row; what clients know of all rows can still be scored."""
    counts = {
        "own": {"right": np.zeros(3, int), "loss": np.zeros(3)},
        "known": np.ones(3, bool),
        "server": {"global": np.array([7])},
        "server_loss": {"global": 5.0},
        "scored": np.array([2, 3]),
        "cross": np.array([5, 0]),
    }
    values, of_clients = metrics(counts, [0, 0, 0], 10)
    assert of_clients == {}
    assert values == {"global_accuracy": 0.7, "global_loss": 0.5, "c_gen": 0.5}


def test_no_rows_no_metrics():
    """No test rows at all, no model of the server."""
    counts = {"known": np.zeros(2, bool)}
    assert metrics(counts, [0, 0], 0) == ({}, {})
