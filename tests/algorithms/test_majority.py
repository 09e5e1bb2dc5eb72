"""The majority control, and the mean over all clients and the last ten rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import majority, pfedsd
from fedjax_pfl import evaluate, types
from launch.run import summaries
from tests import counted
from tests.algorithms import conftest, plain
from tests.fedjax_pfl import small

# Labels of the train and of the test rows of three clients.
TRAIN = [[0, 0, 0, 1, 2], [2, 2, 1], [1, 1, 0, 0, 1, 3]]
TEST = [[0, 0, 1], [2, 2, 2, 0], [1, 3]]
BYTES = {"bytes_up": 0, "bytes_down": 0}
SCORING = evaluate.Scoring(batch_size=4, own_batch_size=3)


@pytest.fixture(scope="module")
def data():
    """Images that say nothing, labels as above."""
    label, sizes = np.concatenate([*TRAIN, *TEST]), list(map(len, TRAIN))
    row = np.arange(len(label))
    train = small.client_rows(row, sizes)
    test = small.client_rows(row[sum(sizes) :], list(map(len, TEST)))
    return types.Data(
        image=jnp.zeros((len(label), 8, 8, 1), jnp.uint8),
        label=jnp.int32(label),
        mean=jnp.zeros(1),
        scale=jnp.ones(1),
        partition=types.Partition(train, test, jnp.zeros(0, jnp.int32)),
    )


@pytest.fixture(scope="module")
def task(problem):
    return problem.task_of(num_clients=3)


def right_answers(made, state, data):
    """Correct answers of each model, as a run counts them."""

    return counted.both(made, state, None, data, SCORING, types.Execution(3))


def test_answers_the_biggest_class(data, task):
    """Number 25: a client's accuracy is the test share of its biggest train class.

    Here this is the biggest test class too. The server answers the biggest of all,
    class 0 with 5 rows of 14 (class 1 has 5 as well: the first one).
    """
    made, key = majority.make(majority.HParams(), task), jax.random.key(0)
    state = made.init(data, key)
    expected = [[3, 1, 1, 0], [0, 1, 2, 0], [2, 3, 0, 1]]
    np.testing.assert_array_equal(state.clients, expected)
    np.testing.assert_array_equal(state.server, [5, 5, 3, 1])
    counts = right_answers(made, state, data)
    np.testing.assert_array_equal(counts["own"]["right"], [2, 3, 1])
    values, of_clients = SCORING.score.metrics(counts, np.array([3, 4, 2]), 9)
    largest = [max(np.bincount(test)) / len(test) for test in TEST]
    np.testing.assert_allclose(of_clients["accuracy"], largest)
    np.testing.assert_allclose(values["client_accuracy"], np.mean([2 / 3, 0.75, 0.5]))
    np.testing.assert_allclose(values["global_accuracy"], 3 / 9)


def test_probabilities_are_the_shares_of_labels(data, task):
    """Of a client's train rows and one more row of each class."""
    made = majority.make(majority.HParams(), task)
    model, variables = made.server(made.init(data, jax.random.key(0)), data)["global"]
    logits, _ = model.forward(*variables, np.zeros((2, 1)))
    shares = np.tile([6 / 18, 6 / 18, 4 / 18, 2 / 18], (2, 1))
    np.testing.assert_allclose(jax.nn.softmax(logits), shares, rtol=1e-6)


def test_a_client_without_train_rows_answers_as_the_server(data, task):
    """As newcomers do, of which no table has the train rows."""
    train = data.partition.train
    none = train.replace(count=train.count.at[1].set(0))
    data = data.replace(partition=data.partition.replace(train=none))
    state = majority.make(majority.HParams(), task).init(data, jax.random.key(0))
    np.testing.assert_array_equal(state.clients[1], state.server)
    np.testing.assert_array_equal(state.server, [5, 4, 1, 1])


def test_test_labels_do_not_matter(data, task):
    """The control knows the train rows only."""
    made = majority.make(majority.HParams(), task)
    state = made.init(data, jax.random.key(0))
    first_test = sum(len(group) for group in TRAIN)
    other = data.replace(label=data.label.at[first_test:].set(3))
    np.testing.assert_array_equal(
        made.init(other, jax.random.key(1)).clients, state.clients
    )


def test_a_round_changes_nothing(data, task, problem):
    """No messages, no plans; only the round is counted."""
    made = majority.make(majority.HParams(), task)
    state = made.init(data, jax.random.key(0))
    after, metrics, sent = made.round(state, problem.cohort(0), data)
    assert int(after.round) == int(state.round) + 1
    np.testing.assert_array_equal(after.clients, state.clients)
    np.testing.assert_array_equal(after.server, state.server)
    assert (metrics, sent, made.messages, made.plans) == ({}, {}, (), ())


def test_user_accuracy_of_the_last_ten_rounds():
    """Number 25: all five clients count alike, rounds 31 to 40 of 40.

    Clients have test parts of different sizes: UA is a mean of clients, not of rows.
    """
    gen = np.random.default_rng(0)
    size = np.array([4, 5, 10, 20, 40])
    right = gen.integers(0, size + 1, (40, 5))
    window = summaries.window("mean_last10", 40)
    assert window == tuple(range(31, 41))
    records = []
    for round, own in enumerate(right, start=1):
        counts = {"known": np.ones(5, bool)}
        counts |= {"own": {"right": own, "loss": np.zeros(5)}}
        values, _ = SCORING.score.metrics(counts, size, int(size.sum()))
        np.testing.assert_allclose(values["client_accuracy"], (own / size).mean())
        records.append({"round": round, "seed": 0, **values, **BYTES})
    found = summaries.summarize(records, [0], window, "mean_last10", 40)
    expected = (right[30:] / size).mean()
    np.testing.assert_allclose(found["client_accuracy"]["mean"], expected)
    assert abs(expected - (right / size).mean()) > 1e-3
    assert abs(expected - right[30:].sum() / (10 * size.sum())) > 1e-3


def test_spread_over_seeds():
    """Section 3.4: mean and standard deviation (ddof = 1) of the seeds' means."""
    records = [
        {"round": round, "seed": seed, "client_accuracy": seed / 10 + round / 100}
        | BYTES
        for seed in (0, 1, 5)
        for round in range(1, 41)
    ]
    window = summaries.window("mean_last10", 40)
    found = summaries.summarize(records, [0, 1, 5], window, "mean_last10", 40)
    found = found["client_accuracy"]
    np.testing.assert_allclose(found["per_seed"], [0.355, 0.455, 0.855])
    np.testing.assert_allclose(found["mean"], 0.555)
    np.testing.assert_allclose(found["std"], np.sqrt((0.04 + 0.01 + 0.09) / 2))


def answering(label):
    """A tiny network that answers `label` on every input."""
    made = conftest.random_params(conftest.NETWORKS["tiny"], 0)
    made = jax.tree.map(np.zeros_like, made)
    made.params[-1]["trunk"]["bias"][label] = 1
    return made


def test_clients_never_selected_count(data, task):
    """Number 25: who never took part is scored with the initial model.

    Of pFedSD's three clients only client 1 has a model of its own.
    """
    made = pfedsd.make(pfedsd.HParams(), task)
    state = types.RoundState(
        server=answering(1),
        clients={
            "own": plain.stack([answering(3), answering(2), answering(3)]),
            "has_own": np.array([False, True, False]),
        },
        key=jax.random.key(0),
        round=np.int32(3),
    )
    counts = right_answers(made, state, data)
    np.testing.assert_array_equal(counts["own"]["right"], [1, 3, 1])
    values, _ = SCORING.score.metrics(counts, np.array([3, 4, 2]), 9)
    expected = np.mean([1 / 3, 3 / 4, 1 / 2])
    np.testing.assert_allclose(values["client_accuracy"], expected)
