"""DepthFL and FedDyn against plain loops in numpy, and the specification's properties.

Numbers of properties are those of its section 5. Rounds run in 64-bit floats, where
sums in another order differ in the last digits alone; the weights of the server's mean
have 32 bits, and what is compared with numpy agrees to those.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from algorithms import depthfl
from data import plan
from fedjax_pfl import options, shapes, types
from launch import build
from launch.config import registry
from tests import padded
from tests.algorithms import conftest, exits, plain
from tests.fedjax_pfl import small
from tests.toys import model as toy_model

NET = exits.network()
SHARED = {"batch_size": 5, "level_mix": "1:1:1", "ramp_rounds": 2}
FLOATS = {
    "client_lr": 0.1,
    "client_lr_decay": 0.9,
    "weight_decay": 0.05,
    "feddyn_alpha": 0.3,
    "self_distill_weight": 2.0,
}
# Zeros are static: these terms are left out.
STRUCTURES = {
    "depthfl": {"client_momentum": 0.5, "optimizer_state": "persist"},
    "fedavg": {"feddyn_alpha": 0.0, "self_distill_weight": 0.0},
}
# Of clients 0 to 4 with the mix 1:1:1.
FIXED = np.array([1, 1, 2, 2, 3])
# Chunks of two by their larger level, padding among them; the whole net, masked.
BUCKETED, MASKED = (2, True), (1, False)


@pytest.fixture(autouse=True)
def _wide():
    """64-bit floats."""
    with jax.enable_x64(True):
        yield


def hparams_of(name):
    return depthfl.HParams(**SHARED | FLOATS | STRUCTURES[name])


@pytest.fixture(scope="module")
def run_of(problem):
    """Jitted rounds by structure and execution."""

    @functools.cache
    def get(name, chunk, is_bucketed):
        task = task_of(problem, NET, chunk, is_bucketed)
        run = conftest.jitted(depthfl, hparams_of(name), task)

        def one_round(state, cohort, **changed):
            out = run(state, cohort, problem.data, **changed)
            return plain_state(out[0]), *plain.host(out[1:])

        return one_round

    return get


def plain_state(state):
    """The state as numpy arrays, but for its key."""
    return plain.host(state.replace(key=())).replace(key=state.key)


def task_of(problem, model, chunk=1, is_bucketed=True):
    """Five clients of unequal sizes who share a model."""
    how = types.Execution(chunk, is_bucketed=is_bucketed)
    return problem.task_of(model, execution=how)


@pytest.fixture(scope="module")
def cohort_at(problem):
    """`(round, level of each client) -> Cohort` of three of the five clients."""
    count = np.asarray(problem.data.partition.train.count)

    def cohort(round, level, chunk):
        planner = plan.Planner(
            seeds=[0],
            num_rows=count[None],
            client_group=np.zeros(5, int),
            level_of=np.asarray(level),
            clients_per_round=3,
            specs=[types.PlanSpec("local", 2, 5)],
            execution=types.Execution(chunk),
        )
        return padded.cohort(planner, 0, round)

    return cohort


@pytest.fixture(scope="module")
def of_levels(cohort_at):
    """`(round, three levels) -> Cohort`: the clients drawn have these, in any order."""

    def cohort(round, three, chunk=2):
        drawn = cohort_at(round, FIXED, 1).client_id
        level = np.ones(5, int)
        level[np.sort(drawn)] = three
        return cohort_at(round, level, chunk)

    return cohort


def given(name="depthfl", round=0, seed=0):
    """A state whose every number is its own; h is the mean of all clients' drifts.

    A client has drifted in what FIXED gives it.
    """
    gen = np.random.default_rng(seed)

    def normal(shapes, size):
        return jax.tree.map(lambda s: size * gen.normal(size=s.shape), shapes)

    like = shapes.variables(NET, (8, 8, 1))
    stats = jax.tree.map(lambda s: gen.uniform(0.5, 1.5, s.shape), like.stats)
    server = {"model": types.Variables(normal(like.params, 0.4), stats)}
    clients, kept = (), ()
    if name != "fedavg":
        zeros = jax.tree.map(lambda s: np.zeros((5, *s.shape)), like.params)
        clients = tuple(
            jax.tree.map(lambda g, held=FIXED > i: g * column(held, g), one)
            for i, one in enumerate(normal(zeros, 0.02))
        )
        server["h"] = ledger_of(clients, [5, 5, 5])
        params = jax.tree.map(jnp.asarray, server["model"].params)
        kept = normal(small.opt_states(hparams_of(name), params, 5), 0.1)
    return types.RoundState(server, clients, jax.random.key(3), np.int32(round), kept)


def column(values, leaf):
    return np.reshape(values, (-1, *[1] * (leaf.ndim - 1)))


def ledger_of(drifts, sharers):
    """Property 10: h is sum_k g_k / M of every stage."""
    return tuple(
        jax.tree.map(lambda g, m=m: np.asarray(g).sum(0) / m, stage)
        for stage, m in zip(drifts, sharers, strict=True)
    )


def stages_of(state, first, last=3):
    """Everything that a state knows of the stages first..last-1."""
    model, cut = state.server["model"], slice(first, last)
    parts = (model.params, model.stats, state.server.get("h", ()))
    parts += (state.clients, state.opt_state)
    return [part[cut] for part in parts]


# The specification's 1.1 as a plain loop, one client after another.


def objective(logits, label, weight):
    """Eq. 1 and its gradient to every exit's logits."""
    p, depth = [plain.softmax(z) for z in logits], len(logits)
    rows = np.arange(len(label))
    loss, slopes = 0.0, []
    for i in range(depth):
        loss -= np.log(p[i][rows, label]).mean()
        slope = p[i].copy()
        slope[rows, label] -= 1
        for j in range(depth):
            if j != i:
                gap = (p[j] * np.log(p[j] / p[i])).sum(1).mean()
                loss += weight / (depth - 1) * gap
                slope += weight / (depth - 1) * (p[i] - p[j])
        slopes.append(slope / len(label))
    return loss, slopes


def images(table, rows):
    """Flat images with the 32 bits that they are normalised in."""
    image = (np.float32(table.image[rows]) - table.mean) * table.scale
    return np.float64(image).reshape(len(rows), -1)


def of_exits(one, step, position, rows, params, stats, weight):
    """(loss, gradients, statistics) of a step by hand."""
    logits, stats, kept = exits.forward(params, stats, images(one.table, rows))
    loss, slopes = objective(logits, one.table.label[rows], weight)
    return loss, exits.backward(params, kept, slopes), stats


def of_client(one, drift, values, slopes):
    """1.1, client: (parameters, statistics, drift, sum of losses) of its stages."""
    level, round = int(one.cohort.level[one.row]), int(one.state.round)
    model, ramp = plain.host(one.state.server["model"]), values["ramp_rounds"]
    weight = np.exp(-5 * (1 - min(round, ramp) / ramp) ** 2)
    weight *= values["self_distill_weight"]
    alpha, decay, rate = (
        values["feddyn_alpha"],
        values["weight_decay"],
        one.rate(values),
    )
    old, g = model.params[:level], drift[:level]
    params, stats, total = old, model.stats[:level], 0.0
    for step, (position, rows, _) in enumerate(one.steps()):
        loss, grads, stats = slopes(one, step, position, rows, params, stats, weight)
        total += len(rows) * loss
        params = jax.tree.map(
            lambda w, d, was, s: w - rate * (d + alpha * (w - was) - s + decay * w),
            *(params, grads, old, g),
        )
    g = jax.tree.map(lambda s, w, was: s - alpha * (w - was), g, params, old)
    return params, stats, g + drift[level:], total


def of_server(model, h, trained, alpha):
    """1.1, server; `trained` has (parameters, statistics) of each client's stages."""
    params, stats, h = list(model.params), list(model.stats), list(h)
    for i, old in enumerate(model.params):
        copies = [(one[0][i], one[1][i]) for one in trained if len(one[0]) > i]
        if not copies:
            continue
        mean, stats[i] = jax.tree.map(lambda *x: sum(x) / len(x), *copies)
        params[i] = mean
        if alpha:
            factor = alpha / 5 * len(copies)
            h[i] = jax.tree.map(
                lambda a, m, was, f=factor: a - f * (m - was), h[i], mean, old
            )
            params[i] = jax.tree.map(lambda m, a: m - a / alpha, mean, h[i])
    return types.Variables(tuple(params), tuple(stats)), tuple(h)


def reference(state, cohort, table, values, slopes=of_exits):
    """One round: (model, h, drift of each client, sum of losses)."""
    model, alpha = plain.host(state.server["model"]), values["feddyn_alpha"]
    zeros = jax.tree.map(np.zeros_like, model.params)
    drifts = [plain.at(state.clients, k) if alpha else zeros for k in range(5)]
    trained, total = [], 0.0
    for one in plain.clients(state, cohort, table):
        *mine, drifts[one.number], loss = of_client(
            one, drifts[one.number], values, slopes
        )
        trained.append(plain.host(mine))
        total += float(loss)
    h = plain.host(state.server["h"]) if alpha else ()
    return *of_server(model, h, trained, alpha), plain.host(drifts), total


# Would make another result, as the reference shows.
MATTERS = {
    "feddyn_alpha": 0.2,
    "self_distill_weight": 1.9,
    "weight_decay": 0.04,
    "ramp_rounds": 3,
    "client_lr_decay": 0.8,
}
CASES = {
    # Every level; nobody holds the last; none of level 2.
    "depthfl": (BUCKETED, [(1, 2, 3), (2, 1, 1), (3, 1, 3)]),
    # Property 1: full depth is FedAvg of the deeply supervised net.
    "fedavg": (MASKED, [(3, 3, 3), (3, 3, 3), (1, 2, 3)]),
}


@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_a_plain_loop(name, run_of, of_levels, problem):
    """Clients and server of 1.1, h and every g; and property 10, the ledger."""
    way, drawn = CASES[name]
    run, state, table = run_of(name, *way), given(name), problem.table
    if name == "depthfl":
        run = functools.partial(run, client_momentum=0.0)
    options_of, seen = SHARED | FLOATS | STRUCTURES[name], set()
    for round in range(3):
        cohort = of_levels(round, drawn[round], way[0])
        if round == 2:
            cohort = plain.without(cohort, len(cohort.row) - 2, 5)
        if name == "fedavg":
            cohort = plain.cut(cohort, 2)
        expected = functools.partial(reference, state, cohort, table)
        model, h, drifts, total = expected(options_of)
        held = {int(level) for level in cohort.level[cohort.row_mask]}
        seen |= held
        before = state
        state, metrics, _ = run(state, cohort)
        # Property 2: what nobody holds stays, bit for bit.
        pair = (stages_of(one, max(held)) for one in (state, before))
        chex.assert_trees_all_equal(*pair)
        chex.assert_trees_all_close(state.server["model"], model, rtol=0, atol=1e-6)
        assert plain.differs(state.server["model"].params[0], before.server["model"][0])
        np.testing.assert_allclose(metrics["train_loss"][0], total, rtol=1e-6)
        if name == "fedavg":
            assert state.server.keys() == {"model"} and state.clients == ()
            continue
        chex.assert_trees_all_close(state.server["h"], h, rtol=0, atol=1e-7)
        chex.assert_trees_all_close(state.clients, plain.stack(drifts), atol=1e-7)
        ledger = ledger_of(state.clients, [5, 5, 5])
        chex.assert_trees_all_close(state.server["h"], ledger, rtol=0, atol=1e-6)
        assert plain.differs(state.server["h"][0], before.server["h"][0], 1e-4)
    assert seen >= {1, 3}
    if name == "depthfl":
        plain.assert_matters(lambda o: expected(o)[:3], options_of, MATTERS, 1e-5)


def test_feddyn_equals_plain_feddyn(problem, start):
    """One exit: Acar et al., Algorithm 1, with weight decay and M = all clients."""
    entry = registry.algorithm("feddyn")
    given = FLOATS | {"batch_size": 5, "self_distill_weight": 0.0}
    hparams, alpha = entry.HParams(**given), FLOATS["feddyn_alpha"]
    assert hparams.level_mix == "1" and entry.HParams().self_distill_weight == 0
    made = entry.make(hparams, problem.task_of(chunk=1))
    state = start(round=0)
    drifts = state.clients.params
    h = jax.tree.map(lambda g: g.sum(0) / 5, drifts)
    state = state.replace(server={"model": state.server, "h": h}, clients=drifts)
    run, ledger = jax.jit(made.round), plain.layers(h)
    server = plain.server_layers(state)
    own = [plain.layers(plain.at(drifts, k)) for k in range(5)]

    def plus(first, factor, second):
        return plain.total(first, plain.scaled(factor, second))

    for round in range(2):
        cohort, trained = problem.cohort(round), []
        for one in plain.clients(state, cohort, problem.table):
            g = own[one.number]

            def pull(params, position, rows, g=g, old=server):
                back = plain.scaled(alpha, plain.minus(params, old))
                return plain.minus(plus(back, 0.05, params), g)

            trained.append(one.train(server, one.sgd(FLOATS), extra=pull))
            own[one.number] = plus(g, -alpha, plain.minus(trained[-1], server))
        mean = plain.mean(trained, [1, 1, 1])
        ledger = plus(ledger, -alpha * 3 / 5, plain.minus(mean, server))
        server = plus(mean, -1 / alpha, ledger)
        with jax.enable_x64(False):
            state = jax.device_put(state, jax.devices()[0])
            state, _, sent = run(state, cohort, problem.data)
        found = plain.server_layers(state), plain.layers(state.server["h"])
        found += ([plain.layers(plain.at(state.clients, k)) for k in range(5)],)
        chex.assert_trees_all_close(found, (server, ledger, own), rtol=0, atol=1e-5)
    size = shapes.tree_bytes(start().server)
    plain.assert_both_ways(made, sent, size)


# What stays.


def test_what_a_client_does_not_hold_stays(run_of, of_levels):
    """Properties 3 and 19: its drift and, kept, its optimizer state, bit for bit.

    In spite of weight decay, momentum, a pull and drifts from rounds at other levels.
    """
    state = given()
    state = state.replace(clients=jax.tree.map(lambda g: g + 0.01, state.clients))
    cohort = of_levels(0, (1, 2, 3))
    after, _, _ = run_of("depthfl", *BUCKETED)(state, cohort)
    level_of = dict.fromkeys(range(5), 0)
    level_of |= {k: int(cohort.level[row]) for k, row in plain.members(cohort).items()}
    assert sorted(level_of.values()) == [0, 0, 1, 2, 3]
    for number, level in level_of.items():
        for i in range(3):
            for part in ("clients", "opt_state"):
                old, new = (
                    plain.at(getattr(one, part)[i], number) for one in (state, after)
                )
                if i >= level:
                    chex.assert_trees_all_equal(new, old)
                else:
                    assert plain.differs(new, old, 1e-6)


def poisoned(state, stage=2):
    """The server's stage holds nan alone."""

    def of(part):
        bad = jax.tree.map(lambda x: np.full_like(x, np.nan), part[stage])
        return (*part[:stage], bad, *part[stage + 1 :])

    model = types.Variables(*map(of, state.server["model"]))
    return state.replace(server=state.server | {"model": model})


def test_what_is_not_held_may_hold_anything(run_of, of_levels):
    """nan in the last stage: who does not hold it trains as ever, bit for bit."""
    run, state = run_of("depthfl", *BUCKETED), given()
    bad = poisoned(state)
    cohort = of_levels(0, (2, 1, 2))
    good, found = (run(one, cohort)[0] for one in (state, bad))
    chex.assert_trees_all_equal(stages_of(found, 0, 2), stages_of(good, 0, 2))
    # h and drifts of that stage too: nobody has seen it.
    chex.assert_trees_all_equal(stages_of(found, 2)[2:4], stages_of(state, 2)[2:4])
    # Beside a client that does hold it, also in one chunk.
    cohort = of_levels(0, (2, 1, 3))
    good, found = (run(one, cohort)[0] for one in (state, bad))
    for number, row in plain.members(cohort).items():
        pair = [plain.at(one.clients[:2], number) for one in (found, good)]
        if cohort.level[row] < 3:
            chex.assert_trees_all_equal(*pair)
        else:
            assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(pair[0]))


# Equation 1.


def logits_of(num_exits, seed=0, rows=6, num_classes=5):
    return 2 * np.random.default_rng(seed).normal(size=(num_exits, rows, num_classes))


MASK = np.array([True, True, False, True, True, False])
gap_and_slope = jax.jit(jax.value_and_grad(depthfl.mutual_gap))


def test_mutual_gap():
    """Eq. 1 by loops: KL(p_j || p_i) of the exits held, over d - 1, real rows alone."""
    gap, logits = jax.jit(depthfl.mutual_gap), logits_of(4)
    for reached in ([1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]):
        p, total = plain.softmax(logits), 0.0
        held = np.flatnonzero(reached)
        for i in held:
            for j in held:
                if i != j:
                    total += (p[j] * np.log(p[j] / p[i])).sum(-1)[MASK].mean()
        found = gap(logits, np.array(reached, bool), MASK)
        np.testing.assert_allclose(found, total / max(len(held) - 1, 1), rtol=1e-12)


def test_mutual_gap_by_position():
    """As many positions as rows: each example counts once, with all its positions."""
    logits, reached = logits_of(3, rows=36), np.ones(3, bool)
    by_row = [
        depthfl.mutual_gap(one, reached, np.ones(6, bool))
        for one in logits.reshape(3, 6, 6, 5).swapaxes(0, 1)
    ]
    found = depthfl.mutual_gap(logits.reshape(3, 6, 6, 5), reached, MASK)
    np.testing.assert_allclose(found, np.mean(np.array(by_row)[MASK]), rtol=1e-6)


def test_gradient_of_mutual_gap():
    """Property 8: p_i - p_j to exit i alone; the teacher is detached; classes sum to 0.

    By finite differences too, with the other exit's answer frozen.
    """
    logits = logits_of(4)
    _, found = gap_and_slope(logits, np.arange(4) < 2, MASK)
    assert not found[2:].any()
    logits, found = logits[:2], np.asarray(found[:2])
    p = plain.softmax(logits)
    slope = np.where(MASK[:, None], p[0] - p[1], 0) / MASK.sum()
    np.testing.assert_allclose(found, [slope, -slope], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.sum(-1), 0, atol=1e-12)

    def kl(target, student):
        return (target * np.log(target / plain.softmax(student))).sum(-1)[MASK].mean()

    tiny, at = 1e-6, (0, 3, 2)
    moved = [logits[0].copy() for _ in range(2)]
    moved[0][at[1:]] += tiny
    moved[1][at[1:]] -= tiny
    difference = (kl(p[1], moved[0]) - kl(p[1], moved[1])) / (2 * tiny)
    np.testing.assert_allclose(found[at], difference, rtol=1e-6)
    # The other direction, KL(p_i || p_j), has another slope.
    log_ratio = np.log(p[0] / p[1])
    mean = (p[0] * log_ratio).sum(-1, keepdims=True)
    swapped = np.where(MASK[:, None], p[0] * (log_ratio - mean), 0) / MASK.sum()
    assert np.abs(swapped - found[0]).max() > 1e-2


def test_nothing_to_learn_from_oneself():
    """Property 7: no gap and no gradient with one exit, or between equal ones."""
    value, slope = gap_and_slope(logits_of(4), np.arange(4) < 1, MASK)
    assert value == 0 and not slope.any()
    equal = np.stack([logits_of(1)[0]] * 4)
    value, slope = gap_and_slope(equal, np.ones(4, bool), MASK)
    assert abs(value) < 1e-12 and np.abs(slope).max() < 1e-12


def test_one_exit_learns_from_labels_alone(run_of, of_levels):
    """Property 7: at level 1 the distillation's weight changes no bit; at 2 it does."""
    run, state = run_of("depthfl", *BUCKETED), given(round=3)
    for three, matters in (((1, 1, 1), False), ((1, 2, 1), True)):
        cohort = of_levels(3, three)
        pair = [run(state, cohort, self_distill_weight=w)[0] for w in (0.0, 2.0)]
        pair = [(one.server, one.clients) for one in pair]
        if matters:
            assert plain.differs(*pair, 1e-4)
        else:
            chex.assert_trees_all_equal(*pair)


def test_ramp():
    """Property 9: exp(-5) at first, exp(-1.25) half way, 1 from R on, never less."""
    found = [float(depthfl.ramp(jnp.int32(t), 300)) for t in range(0, 400, 10)]
    assert found[0] == pytest.approx(np.exp(-5)) == pytest.approx(0.0067, abs=1e-4)
    assert found[15] == pytest.approx(np.exp(-1.25)) == pytest.approx(0.287, abs=1e-3)
    assert found[30:] == [1.0] * 10 and found == sorted(found)
    assert depthfl.ramp(jnp.int32(0), 1) == pytest.approx(np.exp(-5))
    assert depthfl.ramp(jnp.int32(1), 1) == 1


# Where FedDyn leads.

SIZES, HOLDS = [9, 12, 7, 10], np.array([1, 2, 3, 3])
CONVEX = {
    "weight_decay": 0.3,
    "client_lr": 0.7,
    "feddyn_alpha": 0.4,
    "self_distill_weight": 0.0,
}


@pytest.fixture(scope="module")
def convex():
    """A problem with one best answer: three exits, each a linear map of the input."""
    data = small.tables(SIZES)
    table = plain.Table(data)
    rows = [table.owned(k) for k in range(4)]
    owned = [(np.float64(table.image[r]), table.label[r]) for r in rows]
    cohort = small.cohort(
        range(4), 4, {"local": small.plan(SIZES, epochs=60, batch_size=16)}, HOLDS
    )

    def slope(client, w):
        """Gradient of a client's loss with its weight decay."""
        x, label = owned[client]
        return x.T @ plain.cross_entropy(label)(x @ w) + CONVEX["weight_decay"] * w

    best = []
    for level in (1, 2, 3):
        holders = np.flatnonzero(HOLDS >= level)
        w = np.zeros((small.WIDTH, small.NUM_CLASSES))
        for _ in range(300):
            w = w - np.mean([slope(k, w) for k in holders], 0)
        assert np.abs(sum(slope(k, w) for k in holders)).max() < 1e-12
        best.append(w)
    return data, cohort, slope, best


def of_convex(**changed):
    """(DepthFL, the task) of that problem."""
    model = small.linear("convex", 3)
    task = types.Task(model, (model,), np.zeros(4), 4, 4, 0, 4, 16, (small.WIDTH,))
    how = types.Execution(1, is_bucketed=False)
    task = task._replace(execution=how, num_levels=3)
    given = {"batch_size": 16, "level_mix": "1:1:2"} | CONVEX | changed
    return depthfl.make(depthfl.HParams(**given), task), task


def settled(convex, rounds=60, **changed):
    """The states after DepthFL's rounds in which everybody takes part."""
    data, cohort, _, _ = convex
    made, _ = of_convex(**changed)
    state = made.init(data, jax.random.key(0))
    run, states = jax.jit(made.round), [plain_state(state)]
    for _ in range(rounds):
        # Not where a round leaves it: that would be compiled for once more.
        state = jax.device_put(state, jax.devices()[0])
        state, _, _ = run(state, cohort, data)
        states.append(plain_state(state))
    return states


@pytest.mark.parametrize("denominator", ["all", "capable"])
def test_feddyn_finds_the_minimum_of_the_holders(denominator, convex):
    """Properties 11, 12: of every stage; g_k is the loss's gradient where k ended."""
    _, _, slope, best = convex
    states = settled(convex, h_denominator=denominator)
    found = [stage["w"] for stage in states[-1].server["model"].params]
    np.testing.assert_allclose(found, best, rtol=0, atol=1e-6)
    # Property 10, of both denominators.
    sharers = {"all": [4, 4, 4], "capable": [4, 3, 2]}[denominator]
    for state in states[1:4]:
        ledger = ledger_of(state.clients, sharers)
        chex.assert_trees_all_close(state.server["h"], ledger, rtol=0, atol=1e-6)
    for before, after in zip(states[:3], states[1:4], strict=True):
        for client in range(4):
            for i in range(HOLDS[client]):
                old, new = (s.clients[i]["w"][client] for s in (before, after))
                start = before.server["model"].params[i]["w"]
                end = start + (old - new) / CONVEX["feddyn_alpha"]
                np.testing.assert_allclose(new, slope(client, end), rtol=0, atol=1e-9)
                assert np.abs(new).max() > 1e-3
            for stage in after.clients[HOLDS[client] :]:
                assert not stage["w"][client].any()


def test_a_level_that_no_client_can_hold(convex):
    """Nothing is divided by their number, 0: all stays finite."""
    data, cohort, *rest = convex
    cohort = cohort.replace(level=jnp.minimum(cohort.level, 2))
    mix = {"level_mix": "1:3:0", "h_denominator": "capable"}
    before, after = settled((data, cohort, *rest), 1, **mix)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.server))
    chex.assert_trees_all_equal(stages_of(after, 2), stages_of(before, 2))
    assert plain.differs(stages_of(after, 0, 2), stages_of(before, 0, 2))


def test_h_is_a_mean_over_clients_that_may_train(convex):
    """The denominator `capable` counts nobody else."""
    data, cohort, *_ = convex
    made, _ = of_convex(h_denominator="capable")
    state, run = made.init(data, jax.random.key(0)), jax.jit(made.round)
    found = []
    for count in (0, 7):
        unseen = types.ClientRows(*map(small.ints, ([0], [0] * 4, [0, 0, 0, count])))
        part = data.partition.replace(unseen=unseen)
        after, *_ = run(state, cohort, data.replace(partition=part))
        found.append(after.server["h"])
    for every, fewer, sharers in zip(*found, (4, 3, 2), strict=True):
        expected = jax.tree.map(lambda h, n=sharers: n / (n - 1) * h, every)
        chex.assert_trees_all_close(fewer, expected, rtol=1e-6)
        assert plain.differs(every, fewer)


def test_adapting_distils(convex):
    """--fine_tune_epochs: exits learn from one another, as much as in that round."""
    data, cohort, *_ = convex
    made, task = of_convex(self_distill_weight=2.0, ramp_rounds=2)
    state, run = made.init(data, jax.random.key(0)), plain.adapter(made.adapt, task)
    given, start = (plain.cut(cohort, 1), data), state.server["model"]
    later = state.replace(round=state.round + 2)
    assert plain.differs(*(run(one, *given, start) for one in (state, later)))


# Smaller global models, and who stays out.


def test_a_truncated_model_is_the_first_stages(problem):
    """Property 5: the same start, outputs and statistics as the whole one's."""
    made, whole = (
        depthfl.make(
            depthfl.HParams(level_mix="1:1:1", max_level=top), task_of(problem, NET)
        )
        for top in (2, 0)
    )
    kinds = {kind.name for kind in made.messages}
    assert kinds == {"s1 down", "s2 down", "s1 up", "s2 up"}
    assert not made.unused
    one = depthfl.HParams(level_mix="1:1:1", max_level=1)
    one = depthfl.make(one, task_of(problem, NET))
    assert {"self_distill_weight", "ramp_rounds"} < set(one.unused)
    assert len(made.opt_state(lambda params: params)) == 2
    x = np.random.default_rng(0).normal(size=(6, 64))
    modes = ({"train": True, "sample_mask": MASK}, {})

    @jax.jit
    def both(data):
        found = []
        for one in (made, whole):
            state = one.init(data, jax.random.key(0))
            model, variables = one.server(state, data)["global"]
            out = [model.forward(*variables, x, **mode) for mode in modes]
            found.append((state.replace(key=()), out))
        return found

    (state, out), (full, whole_out) = plain.host(both(problem.data))
    chex.assert_trees_all_equal(stages_of(state, 0), stages_of(full, 0, 2))
    assert len(state.server["model"].params) == 2 == len(state.server["h"])
    for (exits_of, stats), (all_exits, all_stats) in zip(out, whole_out, strict=True):
        chex.assert_trees_all_equal((exits_of, stats), (all_exits[:2], all_stats[:2]))
    for tree in (full.server["h"], full.clients):
        assert not any(leaf.any() for leaf in jax.tree.leaves(tree))


COMMON = {
    "algo": "depthfl",
    "preset": "none",
    "model": "with_exits",
    "level_mix": "1:1:1",
    "num_clients": 6,
    "partition": "iid",
    "batch_size": 10,
    "local_epochs": 1,
    "client_chunk": 1,
    "devices": 1,
}


@pytest.fixture
def toy(monkeypatch, blobs):
    """Builds experiments of the toy with exits."""
    monkeypatch.setitem(models.MODELS, "with_exits", toy_model.with_exits)

    def made(**given):
        return build.experiment(**COMMON | {"dataset": blobs} | given)

    with jax.enable_x64(False):
        yield made


def test_exclusive_learning(toy):
    """Only who holds level 2 takes part; M is their number; two exits are scored."""
    experiment = toy(
        max_level=2,
        exclusive=True,
        clients_per_round=3,
        rounds=4,
        bucketed=False,
        eval_every=4,
    )
    assert experiment.task.num_eligible == 4
    drawn = {k for r in range(4) for k in experiment.planner.drawn(0, r).client_id}
    assert drawn == {2, 3, 4, 5}
    summary = experiment.run()
    state = plain_state(conftest.first_seed(experiment.state))
    assert len(state.server["h"]) == 2
    for k in (0, 1):
        assert not any(g[k].any() for g in jax.tree.leaves(state.clients))
    ledger = jax.tree.map(lambda g: g.sum(0) / 4, state.clients)
    chex.assert_trees_all_close(state.server["h"], ledger, rtol=0, atol=1e-6)
    assert plain.differs(ledger, jax.tree.map(np.zeros_like, ledger), 1e-3)
    scores = {name for name in summary["metrics"] if name.startswith("exit")}
    assert scores == {"exit1_accuracy", "exit2_accuracy", "exits_disagree"}
    sizes = [4 * (64 * 12 + 12 + 12 * 4 + 4 + 64), 4 * (12 * 12 + 12 + 12 * 4 + 4 + 12)]
    kinds = [f"s{i} {way}" for i in (0, 1) for way in ("down", "up")]
    assert set(summary["traffic"]) == set(kinds)
    for name in kinds:
        kind, size = summary["traffic"][name], sizes[int(name[1])]
        assert kind["messages"]["per_seed"] == [12]
        assert kind["bytes"]["per_seed"] == [12 * size]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"level_mix": "1:1"}, "--level_mix=1:1 has 2 levels, --model=stacked has 3;"),
        ({"h_denominator": "holders"}, "--h_denominator=holders: .*all, capable"),
        ({"feddyn_alpha": -0.1}, "--feddyn_alpha=-0.1: expected at least 0"),
        ({"ramp_rounds": 0}, "--ramp_rounds=0: expected at least 1"),
        (
            {"level_mix": "1:1:1", "feddyn_alpha": 0.0, "h_denominator": "capable"},
            "--h_denominator=capable has no effect with --feddyn_alpha=0",
        ),
    ],
)
def test_refused(given, words, problem):
    """One line with the flag, what came and what to change."""
    with pytest.raises(ValueError, match=words):
        hparams = depthfl.HParams(**given)
        options.validate(hparams)
        depthfl.make(hparams, task_of(problem, NET))
    tiny = problem.task_of()._replace(server_model=conftest.NETWORKS["tiny"])
    with pytest.raises(ValueError, match="--model=tiny has one exit, --level_mix"):
        depthfl.make(depthfl.HParams(), tiny)


def test_adapting_is_without_feddyn(convex):
    """--fine_tune_epochs: FedDyn's terms are of a client's own rounds."""
    data, cohort, *_ = convex
    found = []
    for alpha in (0.0, 0.5):
        made, task = of_convex(feddyn_alpha=alpha, local_epochs=3)
        state = made.init(data, jax.random.key(0))
        run = plain.adapter(made.adapt, task)
        found.append(run(state, cohort, data, state.server["model"]))
    chex.assert_trees_all_equal(*found)
