"""Split-Mix: which bases a client trains, and its rounds against FedAvg's (test 20)."""

import itertools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import splitmix
from fedjax_pfl import shapes, types
from tests.algorithms import conftest, plain


def make(problem, model="sliced", **given):
    hparams = splitmix.HParams(batch_size=5, **given)
    return splitmix.make(hparams, problem.task_of(model))


def test_the_queue_visits_every_base_equally_often():
    """k times in k N picks, another order each time."""
    first = splitmix.first_bases(jax.random.key(0), jnp.arange(4 * 25), 4)
    turns = np.asarray(first).reshape(25, 4)
    assert (np.sort(turns) == np.arange(4)).all()
    assert len({tuple(turn) for turn in turns.tolist()}) > 10


@pytest.fixture(scope="module")
def first(problem):
    """The state before the first round."""
    return make(problem).init(problem.data, jax.random.key(3))


@pytest.fixture(scope="module")
def rounds(compiled, problem, first):
    """Rounds of clients of levels 1, 2 and 4, from bases that are all different."""
    made, state = make(problem), first
    run, seen = compiled("splitmix", "sliced"), []
    for round in range(4):
        cohort = plain.at_levels(problem.cohort(round), [1, 2, 4])
        after, metrics, sent = run(state, cohort, client_lr=0.1)
        seen.append((state, cohort, after, metrics, sent))
        state = after
    return made, seen


def test_bases_start_apart(first):
    """Each from its own key: equal ones would answer as one."""
    bases = [plain.layers(plain.at(first.server["model"].params, n)) for n in range(4)]
    for one, other in itertools.combinations(bases, 2):
        assert plain.differs(one[0], other[0], 1e-3)


def picks(state, cohort, popped):
    """The bases of each client, recomputed in the order of the clients' ids."""
    ids = sorted(plain.members(cohort))
    key = jax.random.fold_in(state.key, 20)
    out = {}
    for rank, number in enumerate(ids):
        place = popped + rank
        own = jax.random.fold_in(jax.random.fold_in(key, 20), place // 4)
        first = int(jax.random.permutation(own, 4)[place % 4])
        words = jax.random.fold_in(state.key, 21)
        for one in (int(state.round), number):
            words = jax.random.fold_in(words, one)
        rank_of = np.array(jax.random.permutation(words, 4))
        rank_of[first] = -1
        out[number] = np.argsort(rank_of)
    return out


def test_rounds_equal_a_numpy_reference(rounds, problem):
    """Each base is the mean over those who trained it, from its own start."""
    made, seen = rounds
    trained_bases, popped = [], 0
    for state, cohort, after, metrics, sent in seen:
        start = [
            plain.layers(plain.at(state.server["model"].params, n)) for n in range(4)
        ]
        copies, losses = {n: [] for n in range(4)}, []
        chosen = picks(state, cohort, popped)
        popped += len(chosen)
        for one in plain.clients(state, cohort, problem.table):
            for base in chosen[one.number][: cohort.level[one.row]]:
                copies[base].append(one.train(start[base], plain.Sgd(0.1)))
                losses.append(sum(len(rows) for _, rows, _ in one.steps()))
        for base, found in copies.items():
            new = plain.at(after.server["model"].params, base)
            if not found:
                old = plain.at(state.server["model"].params, base)
                chex.assert_trees_all_equal(new, old)
                continue
            expected = plain.mean(found, np.ones(len(found)))
            chex.assert_trees_all_close(
                plain.layers(new), expected, rtol=1e-5, atol=1e-5
            )
        trained_bases.append(sorted(base for base in copies if copies[base]))
        assert int(metrics["train_loss"][1]) == sum(losses)
        size = shapes.model_bytes(conftest.sliced(0.5), (8, 8, 1))
        assert plain.sent_bytes(made, sent, 3) == [
            {"bytes_up": n * size, "bytes_down": n * size} for n in (1, 2, 4)
        ]
    assert trained_bases == [[0, 1, 2, 3]] * 4


def test_the_queue_goes_on_behind_rounds_of_any_size(compiled, problem, first):
    """Where clients are not available, no place is skipped or popped twice."""
    run, state, places = compiled("splitmix", "sliced"), first, [0]
    for round, missing in enumerate([(), (0,), ()]):
        cohort = plain.at_levels(problem.cohort(round), [1, 2, 4])
        for row in missing:
            cohort = plain.without(cohort, row, 5)
        state, _, _ = run(state, cohort, client_lr=0.1)
        places.append(int(state.server["queued"]))
    assert places == [0, 3, 5, 8]


def test_a_base_that_nobody_trains_stays(compiled, problem, first):
    """Bit for bit; three clients of one base each."""
    cohort = plain.at_levels(problem.cohort(0), [1, 1, 1])
    run = compiled("splitmix", "sliced")
    after, _, _ = run(first, cohort, client_lr=0.1)
    moved = [
        plain.differs(*(plain.at(one.server["model"], n) for one in (after, first)), 0)
        for n in range(4)
    ]
    assert sum(moved) == 3


def test_budgets(rounds, problem):
    """Budget 1 answers as base 1, budget n with the mean of n bases' logits."""
    made, seen = rounds
    state = seen[-1][2]
    served = made.server(state, problem.data)
    x = np.float32(np.random.default_rng(0).normal(size=(7, 8, 8, 1)))
    each = [
        plain.logits(
            plain.layers(plain.at(state.server["model"].params, n)),
            np.float64(x).reshape(7, -1),
        )
        for n in range(4)
    ]
    for budget in range(1, 5):
        model, variables = served[f"exit{budget}"]
        out, _ = model.forward(*variables, x)
        np.testing.assert_allclose(out, np.mean(each[:budget], 0), rtol=1e-4, atol=1e-5)
    assert served["global"] is served["exit4"] and len(served) == 5


def test_budgets_are_fine_tuned_as_bases_train(problem):
    """A budget hands its mode to its bases, and keeps their new statistics."""

    def forward(params, stats, h, train=False):
        return h * params, stats + params * train

    base = conftest.NETWORKS["sliced"]._replace(forward=forward)
    made = make(problem, base._replace(at_width=lambda *_: base))
    every = types.Variables(jnp.arange(4.0), jnp.zeros(4))
    state = SimpleNamespace(server={"model": every})
    model, variables = made.server(state, problem.data)["exit3"]
    for train, wanted in ((False, [0, 0, 0]), (True, [0, 1, 2])):
        out, stats = model.forward(*variables, jnp.ones(2), train=train)
        assert out.tolist() == [1, 1] and stats.tolist() == wanted


def test_neither_order_nor_padding_counts(compiled, problem, first):
    """Draws are named by round and client, places in the queue are those of ids."""
    run = compiled("splitmix", "sliced")
    cohort = plain.at_levels(problem.cohort(1), [1, 2, 2])
    others = plain.permuted(cohort, [2, 0, 1]), plain.without(cohort, 0, 5)
    one, same, fewer = (
        run(first, each, client_lr=0.1)[0].server for each in (cohort, *others)
    )
    chex.assert_trees_all_close(one, same, atol=1e-6)
    assert plain.differs(one, fewer)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"level_mix": "1:1"}, "--level_mix=1:1 has 2 levels, --num_bases=4"),
        ({"num_bases": 3}, "--level_mix=1:1:1:1 has 4 levels, --num_bases=3"),
        ({"model": "tiny"}, "--model=tiny .*no narrower form"),
    ],
)
def test_refused(given, words, problem):
    """One line with the flag and what to change."""
    with pytest.raises(ValueError, match=words):
        make(problem, **given)
