"""Distances, soft targets, teachers, proxy batches and the server-side fit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import models
from fedjax_pfl import distill, traffic, types
from models import stages

CASES = [
    ("kl", {"temperature": 3.0}),
    ("norm", {}),
    ("norm", {"norm_form": "sample"}),
    ("js", {}),
    ("js", {"js_form": "reversed"}),
]
NAMES = ["kl", "norm_batch", "norm_sample", "js", "js_reversed"]
every_distance = pytest.mark.parametrize(("kind", "form"), CASES, ids=NAMES)
with_and_without_jit = pytest.mark.parametrize("jit", [False, True])
ALL = jnp.ones(6, bool)


def random_pair(scale=1.0):
    """Two different batches of outputs f32[6, 4]."""
    gen = np.random.default_rng(0)
    return (gen.normal(size=(2, 6, 4)) * scale).astype(np.float32)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def reference(
    kind, student, target, temperature=1.0, norm_form="batch", js_form="true"
):
    """The spec's formulas in float64."""
    student, target = np.float64(student), np.float64(target)
    if kind == "norm":
        rows = ((student - target) ** 2).sum(-1)
        return np.sqrt(rows.sum()) if norm_form == "batch" else np.sqrt(rows).sum()

    def divergence(log_p, log_q):
        return (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()

    if kind == "kl":
        gap = divergence(
            log_softmax(target / temperature), log_softmax(student / temperature)
        )
        return temperature**2 * gap
    log_p, log_q = log_softmax(student), log_softmax(target)
    log_m = np.log((np.exp(log_p) + np.exp(log_q)) / 2)
    if js_form == "true":
        return (divergence(log_p, log_m) + divergence(log_q, log_m)) / 2
    return (divergence(log_m, log_p) + divergence(log_m, log_q)) / 2


@with_and_without_jit
@every_distance
def test_distance_equals_a_float64_reference(kind, form, jit):
    """Test 21: the formulas of section 1A, KL with its factor tau^2."""

    def run(student, target):
        return distill.distance(kind, student, target, ALL, **form)

    for scale in (0.1, 1.0, 5.0):
        student, target = random_pair(scale)
        value = (jax.jit(run) if jit else run)(student, target)
        expected = reference(kind, student, target, **form)
        assert expected > 0
        np.testing.assert_allclose(value, expected, rtol=2e-4, atol=1e-6)


@every_distance
def test_distance_is_zero_with_a_finite_gradient_at_equality(kind, form):
    """Test 21: d(u, u) = 0 and no nan in its gradient."""
    student, _ = random_pair()

    def run(student, target):
        return distill.distance(kind, student, target, ALL, **form)

    value, gradient = jax.jit(jax.value_and_grad(run))(student, student)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    np.testing.assert_allclose(gradient, np.zeros_like(student), atol=1e-6)


@every_distance
def test_no_gradient_flows_to_the_target(kind, form):
    """Section 1A: the target is stop_gradient, the student is not."""
    student, target = random_pair()

    def run(student, target):
        return distill.distance(kind, student, target, ALL, **form)

    to_student, to_target = jax.jit(jax.grad(run, argnums=(0, 1)))(student, target)
    assert np.abs(to_student).max() > 1e-3
    assert not np.asarray(to_target).any()


@every_distance
def test_padding_rows_are_ignored_even_if_nan(kind, form):
    """Style and section 2: masked rows change neither value nor gradient."""
    student, target = random_pair()
    mask = np.array([True, True, False, True, False, True])

    def run(student, target, mask):
        return distill.distance(kind, student, target, mask, **form)

    real = run(student[mask], target[mask], np.ones(4, bool))
    student[~mask], target[~mask] = np.nan, np.inf
    value, gradient = jax.jit(jax.value_and_grad(run))(student, target, mask)
    np.testing.assert_allclose(value, real, rtol=1e-5)
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[~mask].any()
    assert np.abs(np.asarray(gradient)[mask]).max() > 1e-3


@pytest.mark.parametrize("kind", distill.DISTANCES)
def test_which_distances_are_symmetric(kind):
    """Test 21: KL is asymmetric, JS and N are symmetric."""
    student, target = random_pair(2.0)
    there = float(distill.distance(kind, student, target, ALL))
    back = float(distill.distance(kind, target, student, ALL))
    if kind == "kl":
        assert abs(there - back) > 1e-2
    else:
        np.testing.assert_allclose(there, back, rtol=1e-5)


@every_distance
def test_which_distances_ignore_a_shift_of_the_logits(kind, form):
    """Test 21: KL and JS are shift-invariant, N is not."""
    student, target = random_pair()
    shift = np.arange(6, dtype=np.float32)[:, None]
    plain = float(distill.distance(kind, student, target, ALL, **form))
    moved = float(distill.distance(kind, student + shift, target, ALL, **form))
    if kind == "norm":
        assert abs(moved - plain) > 1
    else:
        np.testing.assert_allclose(moved, plain, rtol=1e-4)


@pytest.mark.parametrize("form", distill.NORM_FORMS)
def test_norm_is_homogeneous(form):
    """Test 21: N(c a, c b) = c N(a, b); the two forms differ."""
    student, target = random_pair()
    one = distill.distance("norm", student, target, ALL, norm_form=form)
    three = distill.distance("norm", 3 * student, 3 * target, ALL, norm_form=form)
    np.testing.assert_allclose(three, 3 * one, rtol=1e-5)


def test_distances_stay_bounded_for_extreme_logits():
    """Test 21 and section 1A: 0 <= JS <= ln 2, and log(0) gives no nan."""
    sharp = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0, 1]] * 1000
    other = np.roll(sharp, 1, axis=1)

    def run(student, kind, js_form):
        return distill.distance(kind, student, other, ALL, js_form=js_form)

    value, gradient = jax.value_and_grad(run)(sharp, "js", "true")
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
    assert np.isfinite(gradient).all()
    for kind, js_form in (("kl", "true"), ("js", "reversed")):
        value, gradient = jax.value_and_grad(run)(sharp, kind, js_form)
        assert np.isfinite(value) and value > 100
        assert np.isfinite(gradient).all()
    for scale in (0.01, 1.0, 20.0):
        student, target = random_pair(scale)
        value = float(distill.distance("js", student, target, ALL))
        assert 0 <= value <= np.log(2)


def test_reversed_js_is_another_distance():
    """Test 21: reversed JS != JS on random input."""
    student, target = random_pair(2.0)
    true = distill.distance("js", student, target, ALL)
    swapped = distill.distance("js", student, target, ALL, js_form="reversed")
    assert abs(float(true - swapped)) > 1e-2


def test_mixing_all_labels_forgets_the_teacher():
    """Test 22: lambda = 1 gives one-hot labels exactly, lambda = 0 the teacher."""
    first, second = random_pair()
    label = np.array([0, 1, 2, 3, 1, 1])
    one_hot = np.eye(4, dtype=np.float32)[label]
    for outputs in (first, second):
        mixed = distill.mix_labels(outputs, label, 1.0)
        chex.assert_trees_all_equal(mixed, one_hot)
        kept = distill.mix_labels(outputs, label, 0.0)
        chex.assert_trees_all_equal(kept, outputs)
        half = distill.mix_labels(outputs, label, 0.5)
        np.testing.assert_allclose(half, (one_hot + outputs) / 2, rtol=1e-6)


def answers(num_rows=5):
    """Proxy outputs of a cohort, f32[C, 2, 3, 4]."""
    return np.random.default_rng(1).normal(size=(num_rows, 2, 3, 4)).astype(np.float32)


def ensemble(stacked, client_id, row_mask, kind="mean_selected", num_clients=9):
    return distill.teacher(
        jnp.asarray(stacked),
        jnp.asarray(client_id),
        jnp.asarray(row_mask),
        ensemble=kind,
        num_clients=num_clients,
    )


def test_teacher_is_the_mean_over_the_selected():
    """Test 25: padding rows do not count, even if nan; one client is copied."""
    stacked = answers()
    ids, mask = [9, 9, 1, 4, 6], np.array([False, False, True, True, True])
    expected = stacked[2:].mean(0)
    stacked[:2] = np.nan
    np.testing.assert_allclose(ensemble(stacked, ids, mask), expected, rtol=1e-5)
    only = np.array([False, False, False, True, False])
    chex.assert_trees_all_equal(ensemble(stacked, ids, only), jnp.asarray(stacked[3]))


@pytest.mark.parametrize("kind", ["mean_selected", "code_last"])
def test_teacher_ignores_the_order_of_clients(kind):
    """Test 25: a permutation of the rows changes nothing."""
    stacked, ids = answers(), np.array([3, 7, 0, 8, 5])
    order = np.array([4, 2, 0, 1, 3])
    mask = np.array([True, True, True, True, False])
    plain = ensemble(stacked, ids, mask, kind)
    moved = ensemble(stacked[order], ids[order], mask[order], kind)
    np.testing.assert_allclose(plain, moved, rtol=1e-5, atol=1e-6)


def test_code_last_is_the_scaled_last_client():
    """Test 25: (n / N) z_last; the mean only if all agree and n = N."""
    stacked, ids = answers(), np.array([3, 7, 0, 8, 5])
    mask = np.array([True, True, True, False, True])
    last = ensemble(stacked, ids, mask, "code_last", num_clients=9)
    np.testing.assert_allclose(last, stacked[1] * 4 / 9, rtol=1e-6)
    everyone = np.ones(5, bool)
    equal = np.repeat(stacked[:1], 5, axis=0)
    full = ensemble(equal, np.arange(5), everyone, "code_last", num_clients=5)
    mean = ensemble(equal, np.arange(5), everyone, num_clients=5)
    np.testing.assert_allclose(full, mean, rtol=1e-5)
    apart = ensemble(stacked, np.arange(5), everyone, "code_last", num_clients=5)
    assert np.abs(apart - ensemble(stacked, np.arange(5), everyone)).max() > 0.1
    fewer = ensemble(equal, np.arange(5), everyone, "code_last", num_clients=10)
    np.testing.assert_allclose(fewer, mean / 2, rtol=1e-5)


def tables(proxy, num_rows=12):
    """Random images and labels whose proxy rows are `proxy`."""
    gen = np.random.default_rng(2)
    none = types.ClientRows(*(np.zeros(1, np.int32),) * 3)
    return types.Data(
        image=jnp.asarray(gen.normal(size=(num_rows, 5)), jnp.float32),
        label=jnp.asarray(np.arange(num_rows) % 4, jnp.int32),
        mean=jnp.zeros(()),
        scale=jnp.ones(()),
        partition=types.Partition(none, none, jnp.asarray(proxy, jnp.int32)),
    )


def test_proxy_batches_keep_their_order():
    """Section 1A.6: a fixed batch order, the last one padded with -1."""
    data = tables([4, 2, 9, 7, 5, 1, 3])
    expected = [[4, 2, 9], [7, 5, 1], [3, -1, -1]]
    np.testing.assert_array_equal(distill.proxy_batches(data, 3), expected)
    np.testing.assert_array_equal(
        distill.proxy_batches(data, 7), [[4, 2, 9, 7, 5, 1, 3]]
    )
    batch = distill.proxy_batch(
        data, distill.proxy_batches(data, 3), jnp.array(2), jax.random.key(0)
    )
    np.testing.assert_array_equal(batch.mask, [True, False, False])
    np.testing.assert_array_equal(batch.position, [6, 7, 8])
    assert int(batch.label[0]) == 3 and int(batch.step) == 2
    np.testing.assert_array_equal(batch.image[0], data.image[3])


def test_fit_visits_the_batches_in_order_in_every_epoch():
    """Section 1A.6: R epochs over the proxy set in a fixed order, one step a batch."""
    data = tables([4, 2, 9, 7, 5, 1, 3])

    def loss_fn(params, stats, batch):
        # With learning rate 1 a step is w <- 10 w + step: the digits are the order.
        (stage,) = params
        return -(4.5 * stage["w"] ** 2 + batch.step * stage["w"]), stats

    (stage,), _ = distill.fit(
        loss_fn,
        optax.sgd(1.0),
        ({"w": jnp.zeros(())},),
        ({},),
        data=data,
        batches=distill.proxy_batches(data, 3),
        epochs=2,
        key=jax.random.key(0),
    )
    assert float(stage["w"]) == 12012


def test_fit_gives_every_step_its_own_key_and_keeps_statistics():
    """Section 2: keys by step, also where an epoch revisits a batch."""
    data = tables([4, 2, 9, 7])

    def loss_fn(params, stats, batch):
        index = stats["count"]
        words = stats["words"].at[index].set(jax.random.bits(batch.key))
        return params[0] * 0.0, {"count": index + 1, "words": words}

    _, stats = distill.fit(
        loss_fn,
        optax.sgd(1.0),
        (jnp.zeros(()),),
        {"count": jnp.zeros((), jnp.int32), "words": jnp.zeros(6, jnp.uint32)},
        data=data,
        batches=distill.proxy_batches(data, 2),
        epochs=3,
        key=jax.random.key(0),
    )
    assert int(stats["count"]) == 6
    assert len(np.unique(np.asarray(stats["words"]))) == 6


def test_outputs_are_logits_and_the_last_stages_input():
    """Section 1A: e is the input of the last layer; eval mode unless a key is given."""
    model = stages.chain(
        "noisy",
        [
            ("hidden", stages.Dense(6, dropout=0.5)),
            ("last", stages.Dense(4, relu=False)),
        ],
    )
    data = tables([4, 2, 9, 7])
    batches = distill.proxy_batches(data, 3)
    gen = np.random.default_rng(3)
    params, stats = jax.tree.map(
        lambda leaf: gen.normal(size=leaf.shape).astype(leaf.dtype),
        traffic.shapes(model, (5,)),
    )
    logits, embedding = distill.outputs(model, params, stats, data, batches)
    assert logits.shape == (2, 3, 4) and embedding.shape == (2, 3, 6)
    hidden, last = (stage["trunk"] for stage in params)
    image = np.asarray(data.image)[[4, 2, 9]]
    expected = np.maximum(image @ hidden["kernel"] + hidden["bias"], 0)
    np.testing.assert_allclose(embedding[0], expected, rtol=1e-4, atol=1e-5)
    expected = expected @ last["kernel"] + last["bias"]
    np.testing.assert_allclose(logits[0], expected, rtol=1e-4, atol=1e-5)
    noisy = [
        distill.outputs(model, params, stats, data, batches, key=jax.random.key(seed))
        for seed in (1, 1, 2)
    ]
    chex.assert_trees_all_equal(noisy[0], noisy[1])
    assert np.abs(noisy[0][0] - logits).max() > 1e-2
    assert np.abs(noisy[0][0] - noisy[2][0]).max() > 1e-2


@pytest.mark.parametrize(
    ("name", "shape", "width"),
    [
        ("cdkt_mnist", (28, 28, 1), 512),
        ("cdkt_mnist_small", (28, 28, 1), 512),
        ("cdkt_cifar", (32, 32, 3), 64),
        ("cdkt_cifar_small", (32, 32, 3), 64),
    ],
)
def test_embedding_width(name, shape, width):
    """Section 2: d is 512 or 64, the same for both architectures of a data set."""
    assert distill.embedding_width(models.MODELS[name](10), shape) == width
