"""FedAvg against numpy, stale evaluation, and the metrics of constant predictors."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import cdkt, fedavg
from fedjax_pfl import aggregate, evaluate, traffic
from launch import build, experiment

SCORING = evaluate.Scoring(batch_size=8, own_batch_size=4, num_scored=3)


def host(tree):
    """A pytree as numpy arrays."""
    return jax.tree.map(np.asarray, tree)


@pytest.fixture(scope="module")
def stale(start):
    """Makes a state before round 0 whose server and copies are all different."""

    def make(seed=0):
        state = start(round=0, seed=seed)
        server = state.server | {
            "received": (state.server["params"], state.server["stats"])
        }
        clients = {"copy": state.clients, "trained": np.zeros(5, bool)}
        return state.replace(server=server, clients=clients)

    return make


def images(data, rows):
    """Normalised flat images f64[N, H * W]."""
    image = (np.float64(host(data.image)[rows]) - host(data.mean)) * host(data.scale)
    return image.reshape(len(rows), -1)


def logits(params, x):
    """Forward pass of a chain of dense layers, with the hidden layers."""
    acts = [x]
    for number, stage in enumerate(params):
        x = acts[-1] @ stage["trunk"]["kernel"] + stage["trunk"]["bias"]
        acts.append(x if number == len(params) - 1 else np.maximum(x, 0))
    return acts


def sgd(params, x, label, rate):
    """One step of plain SGD on the mean cross-entropy, in float64."""
    params = jax.tree.map(np.float64, host(params))
    acts = logits(params, x)
    e = np.exp(acts[-1] - acts[-1].max(1, keepdims=True))
    back = (e / e.sum(1, keepdims=True) - np.eye(e.shape[1])[label]) / len(label)
    out = []
    for stage, below in reversed(list(zip(params, acts[:-1], strict=True))):
        layer = stage["trunk"]
        new = {
            "kernel": layer["kernel"] - rate * below.T @ back,
            "bias": layer["bias"] - rate * back.sum(0),
        }
        out.append({"trunk": new})
        back = (back @ layer["kernel"].T) * (below > 0)
    return tuple(out[::-1])


@pytest.mark.parametrize("jit", [False, True])
def test_weights_sum_to_one(jit):
    """Test 29: n_k / n over the real rows, or uniform; padding has weight 0."""
    run = aggregate.weights
    run = jax.jit(run, static_argnums=0) if jit else run
    num_examples = jnp.array([99, 10, 30, 0, 60])
    mask = jnp.array([False, True, True, True, True])
    np.testing.assert_allclose(
        run("examples", num_examples, mask), [0, 0.1, 0.3, 0, 0.6], rtol=1e-6
    )
    np.testing.assert_allclose(
        run("uniform", num_examples, mask), [0, 0.25, 0.25, 0.25, 0.25], rtol=1e-6
    )


def test_one_client_is_centralised_sgd(compiled, stale, problem):
    """Test 29: one client, one epoch equals SGD over its minibatches by hand."""
    whole = problem.cohort(1)
    single = jax.tree.map(lambda leaf: leaf[2:], whole)
    plan, owned = single.plans["local"], problem.data.partition.train
    first = int((plan.epoch[0, : plan.num_steps[0]] == 0).sum())
    plan = plan.replace(num_steps=np.array([first], np.int32))
    single = single.replace(plans={"local": plan})
    state, number = stale(), int(single.client_id[0])
    after, metrics, _ = compiled("fedavg", eval_model="stale")(
        state, single, client_lr=0.1
    )

    params = state.server["params"]
    start = int(owned.start[number])
    seen, total = [], 0.0
    for position in plan.position[0, :first]:
        rows = host(owned.row)[start + position[position >= 0]]
        x, label = images(problem.data, rows), host(problem.data.label)[rows]
        out = logits(params, x)[-1]
        loss = np.log(np.exp(out).sum(1)) - out[np.arange(len(rows)), label]
        params, total = sgd(params, x, label, 0.1), total + loss.sum()
        seen += rows.tolist()
    assert sorted(seen) == sorted(
        host(owned.row)[start : start + int(owned.count[number])].tolist()
    )
    chex.assert_trees_all_close(
        host(after.server["params"]), params, rtol=1e-4, atol=1e-5
    )
    loss_sum, count = metrics["train_loss"]
    np.testing.assert_allclose(loss_sum, total, rtol=1e-4)
    assert int(count) == len(seen)


def test_server_is_the_mean_weighted_by_examples(compiled, stale, problem):
    """Test 29: w_g = sum n_k w_k / n over the round's clients; all start from w_g."""
    state, cohort = stale(), problem.cohort(0)
    after, _, counts = compiled("fedavg", eval_model="stale")(state, client_lr=0.1)
    size = host(problem.data.partition.train.count)[cohort.client_id]
    assert len(set(size)) > 1
    copies = host(after.clients["copy"])
    expected = jax.tree.map(
        lambda leaf: np.tensordot(size / size.sum(), leaf[cohort.client_id], 1), copies
    )
    got = (after.server["params"], after.server["stats"])
    chex.assert_trees_all_close(host(got), expected, rtol=1e-4, atol=1e-5)

    frozen, _, _ = compiled("fedavg", eval_model="stale")(state, client_lr=0.0)
    chex.assert_trees_all_close(
        host(frozen.server["params"]), host(state.server["params"]), atol=1e-6
    )
    made = fedavg.make(fedavg.HParams(), problem.task_of())
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.server["params"]))
    for row in host(counts):
        total = traffic.cumulative(row, made.messages)
        assert total == {"bytes_up": size, "bytes_down": size}


def right_answers(params, data, rows):
    """Correct answers of one model on rows of the table."""
    out = logits(host(params), images(data, rows))[-1]
    return int((out.argmax(1) == host(data.label)[rows]).sum())


def test_stale_evaluation(compiled, stale, problem, quick_jit):
    """Test 29: users not selected last round score exactly as the previous global.

    Those selected are scored with their own trained copies, and both on the union too.
    """
    made = fedavg.make(fedavg.HParams(eval_model="stale"), problem.task_of())
    scored = quick_jit(
        lambda state, cohort, data: evaluate.count_correct(
            made, state, cohort, data, SCORING, problem.execution
        )
    )
    test = host(problem.data.partition.test)
    own_rows = np.split(test.row, test.start[1:])
    state = stale()
    for round in range(3):
        assert int(state.round) == round
        previous, chosen = state.server["params"], problem.cohort(round).client_id
        state, _, _ = compiled("fedavg", eval_model="stale")(state, client_lr=0.05)
        upcoming = problem.cohort(round + 1)
        counts = host(scored(state, upcoming, problem.data))
        in_hand = []
        for number in range(5):
            copy = jax.tree.map(lambda leaf, k=number: leaf[k], state.clients["copy"])
            in_hand.append(copy[0] if number in chosen else previous)
            expected = right_answers(in_hand[-1], problem.data, own_rows[number])
            assert counts["own"][number] == expected
        np.testing.assert_array_equal(counts["scored"], upcoming.client_id)
        for number, cross in zip(counts["scored"], counts["cross"], strict=True):
            assert cross == right_answers(in_hand[number], problem.data, test.row)
        both = [state.server["params"], previous]
        new, old = (right_answers(one, problem.data, test.row) for one in both)
        assert len(chosen) == 3 and new != old
        assert counts["global"].tolist() == [new]


def test_nobody_is_stale_before_the_first_round(problem, quick_jit):
    """Section 1A, FedAvg: at round 0 all hold the initial broadcast."""
    made = fedavg.make(fedavg.HParams(eval_model="stale"), problem.task_of())
    state = quick_jit(made.init)(problem.data, jax.random.key(0))
    received, copies = made.serving(state, problem.cohort(0), problem.data)
    assert received.shared and np.asarray(received.mask).all()
    assert not np.asarray(copies.mask).any()
    chex.assert_trees_all_equal(received.params, state.server["params"])


def constant(params, label):
    """A model that answers `label` on every input."""
    out = jax.tree.map(np.zeros_like, host(params))
    out[-1]["trunk"]["bias"][label] = 1
    return out


def test_metrics_of_constant_predictors(problem, start, quick_jit):
    """Test 30: C-Gen is a share of the union, C-Spec weighs users by test size."""
    state, cohort, data = start(), problem.cohort(1), problem.data
    answer = [3, 1, 2, 0, 1]
    params, stats = state.clients
    rows = [jax.tree.map(lambda leaf, k=k: leaf[k], params) for k in range(5)]
    rows = [constant(one, label) for one, label in zip(rows, answer, strict=True)]
    clients = (jax.tree.map(lambda *leaves: np.stack(leaves), *rows), stats)
    server = state.server | {"params": constant(state.server["params"], 2)}
    state = state.replace(clients=clients, server=server)
    made = cdkt.make(cdkt.HParams(), problem.task_of())
    counts = quick_jit(
        lambda state, cohort, data: evaluate.count_correct(
            made, state, cohort, data, SCORING, problem.execution
        )
    )(state, cohort, data)

    test = host(data.partition.test)
    values, accuracies = evaluate.metrics(host(counts), test.count, len(test.row))
    union = host(data.label)[test.row]
    own = np.split(union, test.start[1:])
    share = [(union == label).mean() for label in range(4)]
    each = [(labels == label).mean() for labels, label in zip(own, answer, strict=True)]
    chosen = cohort.client_id
    right = sum((own[k] == answer[k]).sum() for k in chosen)
    spec = right / sum(len(own[k]) for k in chosen)
    gen = np.mean([share[answer[k]] for k in chosen])
    assert len(set(share)) > 1 and len({len(own[k]) for k in chosen}) > 1
    assert abs(spec - np.mean([each[k] for k in chosen])) > 1e-3
    np.testing.assert_allclose(accuracies, each)
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
    window = build.summary_window("median_last10", 100)
    assert window == tuple(range(90, 100))
    gen = np.random.default_rng(0)
    curves = gen.uniform(size=(2, 2, 101))
    records = [
        {"round": round, "seed": seed, "c_spec": spec, "c_gen": one, "c_per": 0.0}
        | {"bytes_up": 7 * round, "bytes_down": 8 * round, "seconds": 1.0}
        for seed, (first, second) in zip((4, 5), curves, strict=True)
        for round, (spec, one) in enumerate(zip(first, second, strict=True))
    ]
    found = experiment.summarize(records, [4, 5], window, "median_last10", 100)
    medians = np.median(curves[:, :, 90:100], axis=-1)
    np.testing.assert_allclose(found["c_spec"]["per_seed"], medians[:, 0])
    np.testing.assert_allclose(found["c_gen"]["per_seed"], medians[:, 1])
    np.testing.assert_allclose(found["c_per"]["per_seed"], medians.mean(1))
    np.testing.assert_allclose(found["c_per"]["mean"], medians.mean())
    assert found["bytes_up"]["per_seed"] == [700, 700]
