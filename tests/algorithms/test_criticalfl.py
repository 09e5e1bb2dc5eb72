"""CriticalFL against numpy: from how many peers a client pulls, what, and its bytes."""

import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from algorithms import criticalfl
from fedjax_pfl import rng
from launch import build
from launch.config import resolve
from tests.algorithms import plain
from tests.toys import model as toy

STRUCTURE = {"num_peers": 1, "client_momentum": 0.5}
FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.9}
NEVER, ALWAYS = 1e9, -1.0


class Expected:
    """A client's period: a growing list behind twelve zeros, and counters."""

    def __init__(self, least, most):
        self.least, self.most, self.num_peers = least, most, least
        self.norms, self.rounds, self.checks = [0.0] * 12, 0, 0
        self.was_full = self.critical = False

    def add(self, norm, threshold):
        self.rounds += 1
        if self.rounds % 2:
            return
        self.norms.append(norm)
        self.checks += 1
        old, new = np.mean(self.norms[-11:-1]), np.mean(self.norms[-10:])
        rise = (new - old) / max(old, 1e-7)
        self.critical = self.checks <= 5 or rise > threshold
        self.was_full |= self.num_peers == self.most
        if not self.critical:
            less = self.num_peers - max(self.num_peers // 2, 1)
            self.num_peers = max(self.least, less)
        elif not self.was_full:
            self.num_peers = min(2 * self.num_peers, self.most)


class Measured(plain.Sgd):
    """Sums the squared norms of the gradients of its steps."""

    total = 0.0

    def step(self, params, grads, trained=None):
        self.total += sum((g**2).sum() for layer in grads for g in layer)
        return super().step(params, grads, trained)


def make(task, **given):
    hparams = criticalfl.HParams(batch_size=5, **given)
    return criticalfl.make(hparams, task)


@pytest.fixture(scope="module")
def cohorts(problem):
    """Makes `round -> Cohort` of some of five clients with their three peers."""
    made = make(problem.task_of(), **STRUCTURE)

    def of(clients_per_round):
        cohort = plain.planner(problem.data, made.plans, clients_per_round)
        return plain.with_peers(cohort, made.peers)

    return of


@pytest.fixture(scope="module")
def given(start, problem):
    """Makes states before round 0 whose models are all different."""

    def make_state(**structure):
        state, made = start(round=0), make(problem.task_of(), **structure)
        empty = jax.eval_shape(made.init, problem.data, state.key).clients["private"]
        private = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), empty)
        least = np.full(5, structure["num_peers"], np.int32)
        private["period"] = private["period"]._replace(num_peers=least)
        clients = {"own": state.clients, "private": private}
        return state.replace(server=(), clients=clients)

    return make_state


def sparse_mean(own, changed, sources, sizes):
    """The first source counts in full, the others where their entries changed most."""
    out = []
    for layer in range(len(own[0])):
        out.append([])
        for part in range(2):
            share = [
                sizes[k] * (1 if at == 0 else changed[k][layer][part])
                for at, k in enumerate(sources)
            ]
            value = [own[k][layer][part] for k in sources]
            total = sum(s * v for s, v in zip(share, value, strict=True))
            out[-1].append(total / sum(share))
    return out


@pytest.mark.parametrize(
    ("sparsify", "clients_per_round", "num_rounds"), [(True, 5, 14), (False, 3, 24)]
)
def test_rounds_equal_a_numpy_reference(
    sparsify, clients_per_round, num_rounds, compiled, given, problem, cohorts
):
    """k_i grows and falls by a client's own history; in critical periods a fifth."""
    structure = STRUCTURE | {"sparsify": sparsify}
    run = compiled("criticalfl", chunk=clients_per_round, **structure)
    made, state = make(problem.task_of(), **structure), given(**structure)
    cohort_at, sizes = cohorts(clients_per_round), problem.table.train.count
    expected, seen = [Expected(1, 3) for _ in range(5)], set()
    for round in range(num_rounds):
        cohort = cohort_at(round)
        own = [plain.own_layers(state, number) for number in range(5)]
        known = plain.host(state.clients["private"])
        changed = sparsify and [
            plain.layers(plain.at(known["changed"], number)) for number in range(5)
        ]
        after, metrics, sent = run(state, cohort, critical_threshold=NEVER, **FLOATS)
        found, bytes_down = plain.host(after.clients["private"]), []
        for one in plain.clients(state, cohort, problem.table):
            period = expected[one.number]
            sources = [one.number, *one.peers[: period.num_peers]]
            is_sparse = sparsify and period.critical
            if is_sparse:
                mixed = sparse_mean(own, changed, sources, sizes)
            else:
                mixed = plain.mean([own[k] for k in sources], sizes[sources])
            bytes_down.append(period.num_peers * (4 + bytes_of(own[0], is_sparse)))
            seen.add((period.num_peers, period.critical))
            # Not of those that have not trained yet
            norms = [norm for norm in known["norm"][sources] if norm > 0]
            period.add(np.mean(norms) if norms else 0.0, NEVER)
            tx = Measured(one.rate(FLOATS), 0.5)
            trained = one.train(mixed, tx)
            got = plain.own_layers(after, one.number)
            chex.assert_trees_all_close(got, trained, rtol=1e-4, atol=1e-5)
            # Two epochs.
            np.testing.assert_allclose(
                found["norm"][one.number], tx.rate * tx.total / 2, rtol=1e-4
            )
            if sparsify:
                mask = plain.layers(plain.at(found["changed"], one.number))
                moved = jax.tree.map(np.abs, plain.minus(trained, mixed))
                plain.assert_largest(mask, moved, math.ceil(0.2 * size_of(own[0])))
        periods = found["period"]
        for name in ("num_peers", "was_full", "critical", "rounds"):
            values = [getattr(one, name) for one in expected]
            np.testing.assert_array_equal(getattr(periods, name), values)
        norms = [one.norms[-11:] for one in expected]
        np.testing.assert_allclose(periods.history, norms, rtol=1e-4)
        received = plain.sent_bytes(made, sent, clients_per_round)
        assert [one["bytes_down"] for one in received] == bytes_down
        assert metrics["peers"][1] == metrics["critical"][1] == clients_per_round
        state = after
    assert seen >= {(1, False), (2, True), (3, True), (2, False)}


def size_of(layers):
    return sum(part.size for layer in layers for part in layer)


def bytes_of(layers, is_sparse):
    """A model, or a fifth of its values and a bit for each."""
    size = size_of(layers)
    if is_sparse:
        return 4 * math.ceil(0.2 * size) + math.ceil(size / 8)
    return 4 * size


def checks(norms, threshold, least=5, most=21):
    """`criticalfl.next_period` round by round: (k_i, the reference's) after each."""
    hparams = criticalfl.HParams(num_peers=least, critical_threshold=threshold)
    run = jax.jit(
        lambda period, norm: criticalfl.next_period(period, norm, hparams, most)
    )
    period, expected = criticalfl.first_period(least), Expected(least, most)
    out = []
    for norm in norms:
        period = run(period, jnp.float32(norm))
        expected.add(norm, threshold)
        assert bool(period.critical) == expected.critical
        out.append((int(period.num_peers), expected.num_peers))
    found, wanted = zip(*out, strict=True)
    assert found == wanted
    return list(found)


def test_peers_double_up_to_three_quarters():
    """Test 16: 5, 10, 20, 21 of 29 others, then the same for ever."""
    norms = np.random.default_rng(0).uniform(0.1, 1, 30)
    assert checks(norms, ALWAYS) == [5] + [10] * 2 + [20] * 2 + [21] * 25


def test_peers_halve_down_to_the_first_number():
    """Test 16: the first five checks are critical in any case; 21, 11, 6, 5."""
    norms = np.random.default_rng(0).uniform(0.1, 1, 20)
    falling = [11] * 2 + [6] * 2 + [5] * 5
    assert checks(norms, NEVER) == [5] + [10] * 2 + [20] * 2 + [21] * 6 + falling


@pytest.mark.parametrize("seed", range(3))
def test_peers_never_double_again(seed):
    """The paper's threshold on norms that wander: within bounds, once up, then down."""
    gen = np.random.default_rng(seed)
    found = checks(np.exp(np.cumsum(gen.normal(0, 0.3, 120))), 0.01)
    assert min(found) == 5 and max(found) == 21
    after = np.diff(found[found.index(21) :])
    assert (after <= 0).all() and (after < 0).any()


def test_a_constant_number_of_peers_is_dfedavg(compiled, given, cohorts):
    """Test 16: k_i frozen, two rounds equal decentralised FedAvg's."""
    structure = STRUCTURE | {"sparsify": False}
    run = compiled("criticalfl", chunk=3, **structure)
    other = compiled("dfedavg", chunk=3, num_peers=3, client_momentum=0.5)
    state, cohort_at = given(**structure), cohorts(3)
    private = state.clients["private"]
    full = private["period"]._replace(
        num_peers=np.full(5, 3, np.int32), was_full=np.ones(5, bool)
    )
    mine = state.replace(
        clients=state.clients | {"private": private | {"period": full}}
    )
    theirs = state.replace(clients=state.clients | {"private": ()})
    for round in range(2):
        cohort = cohort_at(round)
        mine, _, _ = run(mine, cohort, **FLOATS)
        theirs, _, _ = other(theirs, cohort, **FLOATS)
        chex.assert_trees_all_close(plain.own(mine), plain.own(theirs), atol=1e-6)
    np.testing.assert_array_equal(mine.clients["private"]["period"].num_peers, 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"topology": "ring"}, "--topology=ring: criticalfl .* omit it"),
        ({"num_peers": 4}, "--num_peers=4: .* 3 of --num_clients=5; lower it"),
    ],
)
def test_refused(given, words, problem):
    """One line with the flag, what came and what to change."""
    with pytest.raises(ValueError, match=words):
        make(problem.task_of(), **STRUCTURE | given)


def test_the_plan_draws_three_quarters_of_the_others(problem):
    """21 of 29, of a graph that may be drawn once; five of them under the preset."""
    _, hparams = resolve.configure({"algo": "criticalfl"})
    assert (hparams.num_peers, hparams.critical_threshold) == (5, 0.01)
    assert not hparams.sparsify and hparams.optimizer_state == "persist"
    task = problem.task_of()._replace(num_clients=30)
    peers = make(task, fixed_graph=True).peers
    assert (peers.num_peers, peers.topology, peers.is_fixed) == (21, "random", True)


def test_statistics_come_from_who_has_trained(monkeypatch):
    """In a critical period the peer that has nothing to send changes none either.

    On equal rows the running mean nears theirs by one factor in each round. It would be
    half of it if the peer's first statistics, which are 0, were half of the mean.
    """
    monkeypatch.setitem(models.MODELS, "normed", toy.normed)

    def is_alone(seed):
        gens = (rng.generator(seed, "engine.cohort", round) for round in range(6))
        return len({int(gen.choice(3, 1, replace=False)[0]) for gen in gens}) == 1

    seed = next(filter(is_alone, itertools.count()))
    rows = np.array([[1.0, -2, 3], [3, 1, 2], [-1, -1, 2]], np.float32)
    owner = np.repeat([0, 1, 2], 24)
    given = {"dataset": (rows[owner], np.arange(72) % 2, owner), "rounds": 6}
    given |= {"model": "normed", "preset": "none", "devices": 1, "seed": seed}
    given |= {"num_peers": 1, "clients_per_round": 1, "sparsify": True}
    given |= {"client_lr": 1e-7, "batch_size": 5, "local_epochs": 1}
    given |= {"normalization": "none", "critical_threshold": ALWAYS}
    made = build.experiment(algo="criticalfl", **given)
    ((client,),) = {tuple(made.planner.drawn(0, n).client_id) for n in range(6)}
    means = []
    for round in range(1, 7):
        made.run(until=round, progress=False)
        stats = made.client_model(int(client)).variables.stats
        means.append(np.concatenate([one.ravel() for one in jax.tree.leaves(stats)]))
    steps = int(made.planner.cohort(0, 0).plans["local"].num_steps[0])
    fourth, fifth, last = means[3:]
    moves = np.abs(fifth - fourth) > 1e-3
    found = (last - fifth)[moves] / (fifth - fourth)[moves]
    np.testing.assert_allclose(found, 0.9**steps, rtol=1e-2)
    assert moves.any()


def test_critical_counts_the_clients_in_a_critical_period(compiled, problem, start):
    """By their last check, of those that are here."""
    made = criticalfl.make(criticalfl.HParams(num_peers=1), problem.task_of())
    cohort = plain.with_peers(plain.planner(problem.data, made.plans, 3), made.peers)(0)
    state = start(round=0)
    empty = jax.eval_shape(made.init, problem.data, state.key).clients["private"]
    private = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), empty)
    critical = np.isin(np.arange(5), cohort.client_id[:1])
    period = private["period"]._replace(
        num_peers=np.ones(5, np.int32), critical=critical
    )
    clients = {"own": state.clients, "private": private | {"period": period}}
    state = state.replace(server=(), clients=clients)
    run = compiled("criticalfl", num_peers=1)
    _, metrics, _ = run(state, plain.cut(cohort, 0))
    assert [int(part) for part in metrics["critical"]] == [1, 3]
    assert [int(part) for part in metrics["peers"]] == [3, 3]
