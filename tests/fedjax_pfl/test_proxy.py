"""The proxy set: its batches, outputs on it and on own examples, and the fit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl import proxy, shapes, types
from models import stages
from tests.fedjax_pfl import small

ROWS = [4, 2, 9, 7, 5, 1, 3]


@pytest.fixture(scope="module")
def data():
    """Twelve examples of two clients; the proxy set is `ROWS` of them."""
    return small.tables([5, 7], proxy=ROWS)


def of(data, size):
    """Batches of `size`."""
    return proxy.batches(data, size)


def test_a_batch(data):
    """Examples, mask and positions in the proxy set; a step is a batch's index."""
    key = jax.random.key(0)
    batch = proxy.batch_at(data, of(data, 3), jnp.array(2), key)
    np.testing.assert_array_equal(batch.mask, [True, False, False])
    np.testing.assert_array_equal(batch.position, [6, 7, 8])
    assert int(batch.label[0]) == int(data.label[3]) and int(batch.step) == 2
    np.testing.assert_array_equal(batch.image[0], data.image[3])
    assert batch.key is key


def test_a_batch_is_no_larger_than_its_rows(data):
    """`--batch_size` may stand for whole batches, and padding would fill memory."""
    (batch,) = of(data, 10**6)
    assert len(batch) <= len(ROWS) + shapes.BATCH_ROWS
    np.testing.assert_array_equal(batch[: len(ROWS)], ROWS)
    assert (batch[len(ROWS) :] == -1).all()


def fit(data, loss_fn, start, size, epochs, tx=None, key=0, **given):
    """`proxy.fit`, with steps of 1 unless told."""

    def run():
        return proxy.fit(
            loss_fn,
            tx or optax.sgd(1.0),
            types.Variables(*start),
            data=data,
            batches=of(data, size),
            epochs=epochs,
            key=jax.random.key(key),
            **given,
        )

    return jax.jit(run)()


def digits(params, stats, batch):
    """With learning rate 1 a step is w <- 10 w + step: the digits are the order."""
    (stage,) = params
    return -(4.5 * stage["w"] ** 2 + batch.step * stage["w"]), stats


def test_fit_visits_the_batches_in_order_in_every_epoch(data):
    """Section 1A.6: R epochs over the proxy set in a fixed order, one step a batch."""
    (stage,), _ = fit(data, digits, (({"w": jnp.zeros(())},), ({},)), 3, 2)
    assert float(stage["w"]) == 12012


@pytest.mark.parametrize(("is_active", "expected"), [(True, 12), (False, 0)])
def test_fit_rests_where_it_is_not_active(data, is_active, expected):
    """Not a step."""
    start = (({"w": jnp.zeros(())},), ({},))
    (stage,), _ = fit(data, digits, start, 3, 1, is_active=jnp.array(is_active))
    assert float(stage["w"]) == expected


def test_fit_clips_at_the_global_norm(data):
    """A step of rate 1 from zero is as long as the clipped gradient."""
    found, _ = fit(data, small.regression, small.at_zero(), 7, 1, clip_norm=0.01)
    x, gap = np.asarray(data.image)[ROWS], -np.asarray(data.label)[ROWS]
    slope = np.array([*x.T @ gap / 7, gap.mean()])
    size = np.linalg.norm(slope)
    assert size > 0.1
    found = [*found[0]["w"], found[1]["b"]]
    np.testing.assert_allclose(found, -0.01 * slope / size, rtol=1e-5)


def test_an_optimizer_s_noise_is_that_of_the_key(data):
    """Not the one that its own key gives, which all clients and rounds share."""

    def loss_fn(params, stats, batch):
        return 0.0 * params[0], stats

    tx = optax.chain(optax.add_noise(1.0, 0.0, 0), optax.sgd(1.0))
    start = ((jnp.zeros(()),), ({},))
    found = [fit(data, loss_fn, start, 7, 1, tx, key)[0][0] for key in (1, 2, 1)]
    assert found[0] == found[2] != found[1]


def test_fit_gives_every_step_its_own_key_and_keeps_statistics(data):
    """Section 2: keys by step, also where an epoch revisits a batch."""

    def loss_fn(params, stats, batch):
        index = stats["count"]
        words = stats["words"].at[index].set(jax.random.bits(batch.key))
        return params[0] * 0.0, {"count": index + 1, "words": words}

    log = {"count": jnp.zeros((), jnp.int32), "words": jnp.zeros(9, jnp.uint32)}
    _, stats = fit(data, loss_fn, ((jnp.zeros(()),), log), 3, 3)
    assert int(stats["count"]) == 9
    assert len(np.unique(np.asarray(stats["words"]))) == 9


def test_outputs_are_logits_and_the_last_stages_input(data):
    """Section 1A: e is the input of the last layer; eval mode unless a key is given."""
    hidden = ("hidden", stages.Dense(6, dropout=0.5))
    model = stages.chain("noisy", [hidden, ("last", stages.Dense(4, relu=False))])
    gen = np.random.default_rng(3)
    variables = jax.tree.map(
        lambda leaf: gen.normal(size=leaf.shape).astype(leaf.dtype),
        shapes.variables(model, (3,)),
    )
    batches = of(data, 3)[:2]
    logits, embedding = proxy.outputs(model, variables, data, batches)
    assert logits.shape == (2, 3, 4) and embedding.shape == (2, 3, 6)
    hidden, last = (stage["trunk"] for stage in variables.params)
    image = np.asarray(data.image)[[4, 2, 9]]
    expected = np.maximum(image @ hidden["kernel"] + hidden["bias"], 0)
    np.testing.assert_allclose(embedding[0], expected, rtol=1e-4, atol=1e-5)
    expected = expected @ last["kernel"] + last["bias"]
    np.testing.assert_allclose(logits[0], expected, rtol=1e-4, atol=1e-5)

    @jax.jit
    def noise(seed):
        key = jax.random.key(seed)
        return proxy.outputs(model, variables, data, batches, key=key)

    first, again, other = noise(1), noise(1), noise(2)
    chex.assert_trees_all_equal(first, again)
    assert np.abs(first[0] - logits).max() > 1e-2
    assert np.abs(first[0] - other[0]).max() > 1e-2
    # The same batch twice: other noise.
    twice, key = batches[jnp.array([0, 0])], jax.random.key(1)
    one, two = proxy.outputs(model, variables, data, twice, key=key)[0]
    assert np.abs(one - two).max() > 1e-2


def forward(image):
    """f32[B, 3] to f32[B, 4], never 0."""
    return jnp.exp(jnp.concatenate([image, image[:, :1]], 1))


@pytest.mark.parametrize(("num_batches", "filled"), [(0, 0), (2, 6), (3, 9)])
def test_outputs_by_sample(data, num_batches, filled):
    """Aligned by position; what lies past the asked batches stays 0."""
    row_at = data.partition.train.of(jnp.int32(1))

    @jax.jit
    def run(num_batches):
        return proxy.outputs_by_sample(
            forward,
            data,
            row_at,
            size=7,
            width=4,
            batch_size=3,
            num_batches=num_batches,
        )

    table = np.asarray(run(num_batches))
    assert table.shape == (9, 4)
    rows = np.asarray(data.partition.train.row)[5:12]
    expected = forward(data.image[rows])
    real = min(filled, 7)
    np.testing.assert_allclose(table[:real], expected[:real], rtol=1e-6)
    assert not table[filled:].any()


@pytest.mark.parametrize("epochs", [1, 2])
def test_own_outputs_cover_the_chunks_longest_client(data, epochs):
    """An epoch's batches of the chunk's bound, also for a shorter client."""
    model = small.linear()
    task = types.Task(model, (model,), np.zeros(2), 2, 4, 0, 2, 7, (3,))
    plan = small.plan([5, 7], epochs=epochs, batch_size=3)
    spec = types.PlanSpec("local", epochs, 3)
    for number, size, bound in ((0, 5, None), (1, 7, None), (0, 5, 3 * epochs)):
        client = small.client(data, plan, number, bound=bound)
        table = np.asarray(proxy.own_outputs(forward, client, task, spec))
        start = 5 * number
        rows = np.asarray(data.partition.train.row)[start : start + size]
        np.testing.assert_allclose(table[:size], forward(data.image[rows]), rtol=1e-6)
        assert table.shape == (9, 4)
        filled = 3 * (int(client.bound) // epochs)
        assert (table[:filled] != 0).all() and not table[filled:].any()
        # Where some rows may be in no batch, those of the longest client of all
        short, stops = spec._replace(max_rows=3), task._replace(may_stop=True)
        whole = spec._replace(drop_last=True)
        for given in ((task, short), (task, whole), (stops, spec)):
            table = np.asarray(proxy.own_outputs(forward, client, *given))
            assert table.shape == (9, 4) and (table != 0).all()
    away = client.replace(is_here=jnp.bool_(False))
    assert not np.asarray(proxy.own_outputs(forward, away, task, short)).any()
