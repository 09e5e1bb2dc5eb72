"""FedAvg against numpy, stale evaluation, and the metrics of constant predictors."""

import chex
import jax
import numpy as np
import pytest

from algorithms import cdkt, fedavg
from fedjax_pfl import evaluate, shapes
from launch.run import summaries
from tests import counted
from tests.algorithms import plain

SCORING = evaluate.Scoring(batch_size=8, own_batch_size=4, num_scored=3)
STRUCTURES = {
    "stale": {"eval_model": "stale"},
    "uniform": {"aggregation": "uniform", "client_momentum": 0.5},
}
FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.8}


@pytest.fixture(scope="module")
def given(start):
    """Makes states before round 0 whose server and copies are all different."""

    def make(name="stale", seed=0):
        state = start(round=0, seed=seed)
        if name != "stale":
            return state.replace(clients=())
        server = {"model": state.server, "before": state.server}
        clients = {"copy": state.clients, "round": np.full(5, -2)}
        return state.replace(server=server, clients=clients)

    return make


def reference(state, cohort, table, values):
    """All start from w_g, which becomes sum n_k w_k / n; copies are as trained."""
    trained = {
        one.number: one.train(one.server, one.sgd(values))
        for one in plain.clients(state, cohort, table)
    }
    server = plain.averaged(trained, table, values.get("aggregation") == "uniform")
    return server, trained if "eval_model" in values else None


@pytest.mark.parametrize("name", STRUCTURES)
def test_rounds_equal_a_numpy_reference(name, compiled, given, problem):
    """Test 29: both means, the copies, momentum; and bytes of a model each way."""
    structure, more = STRUCTURES[name], {"num_rounds": 3, "by": 1e-3}
    if name == "uniform":
        more["changes"] = {"aggregation": "examples", "client_momentum": 0.0}
    run, state = compiled("fedavg", floats=FLOATS, **structure), given(name)
    steps = plain.follow(run, reference, state, problem, structure | FLOATS, **more)
    for step in steps:
        size = problem.table.train.count[step.cohort.client_id]
        assert len(set(size)) > 1
        assert int(step.metrics["train_loss"][1]) == 2 * size.sum()
    made = fedavg.make(fedavg.HParams(), problem.task_of())
    size = shapes.tree_bytes(plain.server(steps[-1].after))
    plain.assert_both_ways(made, steps[-1].sent, size)


def right_answers(variables, table, rows):
    """Correct answers of one model on rows of the table."""
    answers = plain.logits(plain.layers(variables.params), table.images(rows))
    return int((answers.argmax(1) == table.label[rows]).sum())


@pytest.fixture(scope="module")
def scored(problem):
    """Makes `(state, cohort) -> counts of correct answers` of an algorithm."""

    def program(made):
        given = problem.data, SCORING, problem.execution
        return lambda state, cohort: counted.both(made, state, cohort, *given)

    return program


def test_stale_evaluation(compiled, given, scored, problem):
    """Test 29: users not selected last round score exactly as the previous global.

    Those selected are scored with their own trained copies, and both on the union too.
    """
    made = fedavg.make(fedavg.HParams(eval_model="stale"), problem.task_of())
    state, table = given(), problem.table
    counts_of = scored(made)
    for round in range(3):
        assert int(state.round) == round
        previous, chosen = plain.server(state), problem.cohort(round).client_id
        state, _, _ = compiled("fedavg", eval_model="stale")(state, client_lr=0.05)
        upcoming = problem.cohort(round + 1)
        counts = counts_of(state, upcoming)
        in_hand = [
            plain.own(state, number) if number in chosen else previous
            for number in range(5)
        ]
        for number, one in enumerate(in_hand):
            expected = right_answers(one, table, table.tested(number))
            assert counts["own"]["right"][number] == expected
        np.testing.assert_array_equal(counts["scored"], upcoming.client_id)
        for number, cross in zip(counts["scored"], counts["cross"], strict=True):
            assert cross == right_answers(in_hand[number], table, table.test.row)
        both = [plain.server(state), previous]
        new, old = (right_answers(one, table, table.test.row) for one in both)
        assert len(chosen) == 3 and new != old
        assert counts["server"]["global"].tolist() == [new]


def test_nobody_is_stale_before_the_first_round(problem):
    """Section 1A, FedAvg: at round 0 all hold the initial broadcast."""
    made = fedavg.make(fedavg.HParams(eval_model="stale"), problem.task_of())
    state = jax.jit(made.init)(problem.data, jax.random.key(0))
    for one in plain.served(made, state, problem.cohort(0), problem.data):
        chex.assert_trees_all_equal(one, plain.host(plain.server(state)))
    broadcast, copies = made.serving(state, problem.cohort(0), problem.data)
    assert np.asarray(broadcast.mask).all() and not np.asarray(copies.mask).any()


def constant(variables, label):
    """A model that answers `label` on every input."""
    out = jax.tree.map(np.zeros_like, plain.host(variables))
    out.params[-1]["trunk"]["bias"][label] = 1
    return out


def test_metrics_of_constant_predictors(problem, start, scored):
    """Test 30: C-Gen is a share of the union, C-Spec weighs users by test size."""
    state, cohort, table = start(), problem.cohort(1), problem.table
    answer = [3, 1, 2, 3, 0]
    rows = [constant(plain.own(state, k), label) for k, label in enumerate(answer)]
    state = plain.with_own(state, plain.stack(rows))
    state = plain.with_server(state, constant(plain.server(state), 2))
    made = cdkt.make(cdkt.HParams(), problem.task_of())
    counts = scored(made)(state, cohort)

    tested = table.test.row[table.test.row >= 0]
    values, of_clients = SCORING.score.metrics(counts, table.test.count, len(tested))
    union = table.label[tested]
    own = [table.label[table.tested(number)] for number in range(5)]
    share = [(union == label).mean() for label in range(4)]
    each = [(labels == label).mean() for labels, label in zip(own, answer, strict=True)]
    chosen = cohort.client_id
    right = sum((own[k] == answer[k]).sum() for k in chosen)
    spec = right / sum(len(own[k]) for k in chosen)
    gen = np.mean([share[answer[k]] for k in chosen])
    assert len(set(share)) > 1 and len({len(own[k]) for k in chosen}) > 1
    assert abs(spec - np.mean([each[k] for k in chosen])) > 1e-3
    np.testing.assert_allclose(of_clients["accuracy"], each)
    expected = {
        "global_accuracy": share[2],
        "c_spec": spec,
        "c_gen": gen,
        "c_per": (spec + gen) / 2,
        "client_accuracy": np.mean(each),
        "worst_decile_accuracy": np.min(each),
    }
    for name, number in expected.items():
        np.testing.assert_allclose(values[name], number, err_msg=name)


def test_median_is_over_the_states_that_the_last_ten_rounds_begin_with():
    """Test 30: indices 90..99 of 100, and C-Per is the mean of the two medians."""
    window = summaries.window("median_last10", 100)
    assert window == tuple(range(90, 100))
    gen = np.random.default_rng(0)
    curves = gen.uniform(size=(2, 2, 101))
    records = [
        {"round": round, "seed": seed, "c_spec": spec, "c_gen": one, "c_per": 0.0}
        | {"bytes_up": 7 * round, "bytes_down": 8 * round, "seconds": 1.0}
        for seed, (first, second) in zip((4, 5), curves, strict=True)
        for round, (spec, one) in enumerate(zip(first, second, strict=True))
    ]
    found = summaries.summarize(records, [4, 5], window, "median_last10", 100)
    medians = np.median(curves[:, :, 90:100], axis=-1)
    np.testing.assert_allclose(found["c_spec"]["per_seed"], medians[:, 0])
    np.testing.assert_allclose(found["c_gen"]["per_seed"], medians[:, 1])
    np.testing.assert_allclose(found["c_per"]["per_seed"], medians.mean(1))
    np.testing.assert_allclose(found["c_per"]["mean"], medians.mean())
    assert found["bytes_up"]["per_seed"] == [700, 700]


def test_c_per_covers_what_c_spec_covers():
    """A seed whose drawn clients have no test rows has C-Gen alone."""
    records = [
        {"round": 1, "seed": 0, "c_gen": 0.2},
        {"round": 1, "seed": 1, "c_gen": 0.4, "c_spec": 0.8, "c_per": 0.6},
    ]
    found = summaries.summarize(records, [0, 1], (1,), "last", 1)
    assert found["c_per"]["per_seed"] == [pytest.approx(0.6)]
    assert summaries.fewer(found["c_per"]) == "1 of 2 seeds"
