"""Rounds on rows of tokens against a plain loop, and what no draw may depend on.

A client of the plain loop trains a model of as many layers as it holds, on batches
without padding, and pairs of exits are compared one by one.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algorithms
from algorithms import depthfl, moon
from data import plan
from fedjax_pfl import local_training, losses, proxy, rng, shapes, types
from models import text
from tests import padded
from tests.algorithms import conftest, plain, test_depthfl

# As many rows in a batch as words in a row, so that a swapped axis is not noticed by
# its size.
V, T, BATCH, ROWS = 11, 4, 4, (6, 10, 6, 10, 6)
LEVEL = np.array([1, 1, 2, 2, 3])
CHOSEN = {
    "client_lr": 0.1,
    "client_lr_decay": 0.9,
    "weight_decay": 0.05,
    "feddyn_alpha": 0.3,
    "self_distill_weight": 2.0,
    "ramp_rounds": 2,
}
NET = text.with_exits(V, 8, 3)


@pytest.fixture(autouse=True)
def _wide():
    """64-bit floats."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def data():
    gen = np.random.default_rng(0)
    words = gen.integers(0, V, (sum(ROWS), T)).astype(np.int32)
    order = gen.permutation(len(words)).astype(np.int32)
    count = np.array(ROWS, np.int32)
    owned = types.ClientRows(order, np.cumsum(count) - count, count)
    parts = types.Partition(owned, owned, np.zeros(0, np.int32))
    whole = types.Data(words, words, 0.0, 1.0, parts, num_words=V)
    return jax.tree.map(jnp.asarray, whole)


@pytest.fixture(scope="module")
def state():
    """Numbers of which none is zero; a client has drifted in what it holds."""
    gen = np.random.default_rng(1)

    def normal(tree, size):
        return jax.tree.map(lambda s: size * gen.normal(size=s.shape), tree)

    like = shapes.variables(NET, (T,)).params
    drifts = [
        normal(like[:level], 0.02)
        + jax.tree.map(lambda s: np.zeros(s.shape), like[level:])
        for level in LEVEL
    ]
    h = jax.tree.map(lambda *g: sum(g) / len(g), *drifts)
    model = types.Variables(normal(like, 0.4), ({}, {}, {}))
    server = {"model": model, "h": h}
    return types.RoundState(server, plain.stack(drifts), jax.random.key(3), np.int32(1))


@functools.cache
def task(chunk, is_bucketed):
    return types.Task(
        server_model=NET,
        client_models=(NET,),
        group_of_client=np.zeros(5, np.int32),
        num_clients=5,
        num_classes=V,
        num_proxy=0,
        num_eligible=5,
        num_examples=16,
        example_shape=(T,),
        execution=types.Execution(chunk, is_bucketed=is_bucketed),
        num_levels=3,
    )


def cohort_of(level, chunk, round=1):
    """Four of the five clients; some chunks have padding."""
    planner = plan.Planner(
        seeds=[0],
        num_rows=np.array([ROWS]),
        client_group=np.zeros(5, int),
        level_of=np.asarray(level),
        clients_per_round=4,
        specs=[types.PlanSpec("local", 2, BATCH)],
        execution=types.Execution(chunk),
    )
    return padded.cohort(planner, 0, round)


@functools.cache
def run_of(chunk, is_bucketed):
    hparams = depthfl.HParams(batch_size=BATCH, level_mix="1:1:1", **CHOSEN)
    return conftest.jitted(depthfl, hparams, task(chunk, is_bucketed))


@functools.partial(jax.jit, static_argnums=1)
@jax.value_and_grad
def loss_of(params, level, image, label, key, weight):
    """Eq. 1 of the first `level` layers on real rows alone, each pair by itself."""
    cut = types.truncated(NET, level)
    out, _ = cut.forward(params, ({},) * level, image, train=True, key=key)
    log_p = [jax.nn.log_softmax(z) for z in out]
    hits = [jnp.take_along_axis(one, label[..., None], -1)[..., 0] for one in log_p]
    loss = sum(-one.mean(1).mean() for one in hits)
    for i, mine in enumerate(log_p):
        for j, other in enumerate(log_p):
            if i != j:
                fixed = jax.lax.stop_gradient(other)
                gap = (jnp.exp(fixed) * (fixed - mine)).sum(-1).mean(1).mean()
                loss += weight / (level - 1) * gap
    return loss


def reference(state, cohort, data):
    """One round: (model, h, drift of each client, sum of losses)."""

    def slopes(one, step, position, rows, params, stats, weight):
        key = rng.stream(state.key, "engine.local", int(state.round), one.number)
        own, place = jax.random.fold_in(key, step), jnp.asarray(position)
        image, label, _ = data.train_batch(jnp.asarray(rows), place, own)
        given = len(params), image, label, own, weight
        return *loss_of(params, *given), stats

    table = plain.Table(data)
    return test_depthfl.reference(state, cohort, table, CHOSEN, slopes)


@pytest.mark.slow
def test_a_round_equals_a_plain_loop(data, state):
    """FedDyn and self-distillation by position, with a short last batch, B = T."""
    cohort = cohort_of(LEVEL, 2)
    assert BATCH == T and any(count % BATCH for count in ROWS)
    assert len(set(cohort.level[cohort.row_mask].tolist())) > 1
    model, h, drifts, total = reference(state, cohort, data)
    new, metrics, _ = run_of(2, True)(state, cohort, data)
    new = plain.host(new.replace(key=()))
    chex.assert_trees_all_close(new.server["model"].params, model.params, atol=1e-6)
    chex.assert_trees_all_close(new.server["h"], h, atol=1e-6)
    chex.assert_trees_all_close(new.clients, plain.stack(drifts), atol=1e-6)
    np.testing.assert_allclose(metrics["train_loss"][0], total, rtol=1e-6)
    assert plain.differs(new.server["h"], state.server["h"])


@pytest.mark.slow
def test_masked_is_bucketed(data, state):
    """The whole net with masks gives what the held layers alone give."""
    made = [
        plain.host(run_of(chunk, cut)(state, cohort_of(LEVEL, chunk), data)[0].server)
        for chunk, cut in ((2, True), (1, False))
    ]
    chex.assert_trees_all_close(*made, rtol=0, atol=1e-9)


def test_no_draw_depends_on_others(data, state):
    """A client's drift stays when another holds more layers, in another chunk."""
    level = LEVEL.copy()
    cohort = cohort_of(level, 2)
    ids = cohort.client_id[cohort.row_mask].tolist()
    mine, other = ids[0], ids[1]
    level[other] = 3 if LEVEL[other] < 3 else 1
    run = run_of(2, True)
    before, after = (
        plain.host(run(state, one, data)[0].clients)
        for one in (cohort, cohort_of(level, 2))
    )
    chex.assert_trees_all_close(
        plain.at(before, mine), plain.at(after, mine), atol=1e-9
    )
    assert plain.differs(plain.at(before, other), plain.at(after, other))


def test_losses_are_means_of_positions(data):
    """The supervised loss of all other methods: means of rows, of means of words."""
    net = text.masked_lm(V, 1 / 64)
    params, stats = conftest.random_params(net, 0, (T,))
    image, label = data.image[:3], data.label[:3]
    mask, key = jnp.array([True, True, False]), jax.random.key(1)
    batch = local_training.Batch(image, label, mask, (), (), (), key)
    loss, _ = local_training.cross_entropy_loss(net)(params, stats, batch)
    out, _ = net.forward(params, stats, image, train=True, key=key)
    log_p = np.asarray(jax.nn.log_softmax(out))
    by_row = [np.mean([log_p[b, t, label[b, t]] for t in range(T)]) for b in range(2)]
    np.testing.assert_allclose(loss, -np.mean(by_row), rtol=1e-6)


def test_losses_at_chosen_positions(data):
    """Means of the chosen words of real rows, all alike; others change nothing."""
    net = text.masked_lm(V, 1 / 64)
    params, stats = conftest.random_params(net, 0, (T,))
    image, label = data.image[:3], data.label[:3]
    chosen = jnp.array([[1, 0, 0, 1], [0, 0, 1, 0], [1, 1, 1, 1]], bool)
    mask, key = jnp.array([True, True, False]), jax.random.key(1)
    batch = local_training.Batch(image, label, mask, (), (), (), key, chosen)
    loss_fn = local_training.cross_entropy_loss(net)
    loss, _ = loss_fn(params, stats, batch)
    out, _ = net.forward(params, stats, image, train=True, key=key)
    log_p = np.asarray(jax.nn.log_softmax(out))
    found = [log_p[b, t, label[b, t]] for b, t in ((0, 0), (0, 3), (1, 2))]
    np.testing.assert_allclose(loss, -np.mean(found), rtol=1e-6)
    other = batch.replace(label=jnp.where(chosen, label, 0))
    assert loss_fn(params, stats, other)[0] == loss
    nothing = batch.replace(chosen=jnp.zeros_like(chosen))
    assert loss_fn(params, stats, nothing)[0] == 0

    exits = jnp.stack([out, 2 * out + 1, out[..., ::-1]])
    reached = jnp.array([True, True, False])
    gap = depthfl.mutual_gap(exits, reached, mask, chosen)
    p, q = (np.asarray(jax.nn.softmax(z)) for z in exits[:2])
    pairs = p * np.log(p / q) + q * np.log(q / p)
    found = [pairs[b, t].sum() for b, t in ((0, 0), (0, 3), (1, 2))]
    np.testing.assert_allclose(gap, np.mean(found), rtol=1e-6)


def first_batches(data, state, cohort):
    """(rows, chosen positions) of each client's first step."""
    for one in plain.clients(state, cohort, plain.Table(data)):
        position, rows, _ = next(one.steps())
        key = rng.stream(state.key, "engine.local", int(state.round), one.number)
        own, rows = jax.random.fold_in(key, 0), jnp.asarray(rows)
        image, label, chosen = data.train_batch(rows, jnp.asarray(position), own)
        yield one, rows, own, image, label, np.asarray(chosen)


@pytest.mark.parametrize("name", ["depthfl", "inclusivefl"])
def test_exits_learn_at_chosen_positions_alone(name, data):
    """--masked_loss=chosen: other words' labels change nothing in a round."""
    data = data.replace(masked_loss="chosen")
    cohort = plain.cut(cohort_of(LEVEL, 2), 1)
    module = algorithms.ALGORITHMS[name]
    hparams = module.HParams(batch_size=BATCH, level_mix="1:1:1", client_lr=0.1)
    made = module.make(hparams, task(2, True))
    state = made.init(data, jax.random.key(3)).replace(round=jnp.int32(1))
    label = np.array(data.label)
    for _, rows, _, _, right, chosen in first_batches(data, state, cohort):
        assert chosen.any() and not chosen.all()
        label[rows] = np.where(chosen, right, (right + 1) % V)
    run = jax.jit(made.round)
    both = [
        run(state, cohort, one)[0].server["model"]
        for one in (data, data.replace(label=jnp.asarray(label)))
    ]
    chex.assert_trees_all_equal(*map(plain.host, both))


def test_moon_contrasts_chosen_positions(data):
    """Its second loss, too, is a mean over the positions that count."""
    data, net = data.replace(masked_loss="chosen"), text.with_one_exit(V, 8, 1)
    how = task(2, True)._replace(server_model=net, client_models=(net,), num_levels=0)
    hparams = moon.HParams(batch_size=BATCH, client_lr=0.0, contrastive_weight=2.0)
    made, cohort = moon.make(hparams, how), plain.cut(cohort_of([1] * 5, 2), 1)
    server = conftest.random_params(net, 0, (T,))
    own = plain.stack([conftest.random_params(net, 1 + n, (T,)) for n in range(5)])
    state = types.RoundState(server, own, jax.random.key(3), jnp.int32(1))
    total = count = 0
    for one, rows, key, image, label, chosen in first_batches(data, state, cohort):
        mode = {"sample_mask": jnp.ones(len(rows), bool), "train": True, "key": key}
        z, near, far = (
            proxy.logits_and_embedding(net, x, image, **how)[:2]
            for x, how in (
                (server, mode),
                (server, {}),
                (plain.at(own, one.number), {}),
            )
        )
        logits, *every = z[0], z[1], near[1], far[1]
        z, near, far = (x.reshape(*label.shape, -1) for x in every)
        gap = (moon.similarity(z, far) - moon.similarity(z, near)) / hparams.temperature
        hard = losses.cross_entropies(logits, label)
        loss = np.asarray(hard + 2.0 * jax.nn.softplus(gap))[chosen].mean()
        total, count = total + chosen.sum() * loss, count + chosen.sum()
    _, metrics, _ = jax.jit(made.round)(state, cohort, data)
    found = metrics["train_loss"]
    np.testing.assert_allclose(found[0], total, rtol=1e-6)
    assert int(found[1]) == count
