"""Distances between outputs, against the formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import distances

CASES = [
    ("kl", {"temperature": 3.0}),
    ("norm", {}),
    ("js", {}),
    ("js", {"js_form": "reversed"}),
]
every_distance = pytest.mark.parametrize(
    ("kind", "form"), CASES, ids=["kl", "norm", "js", "js_reversed"]
)
with_and_without_jit = pytest.mark.parametrize("jit", [False, True])
ALL = np.ones(6, bool)


def random_pair(scale=1.0):
    """Two different batches of outputs f32[6, 4]."""
    gen = np.random.default_rng(0)
    return (gen.normal(size=(2, 6, 4)) * scale).astype(np.float32)


def log_softmax(x):
    """In float64."""
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def reference(kind, student, target, temperature=1.0, js_form="true"):
    """The spec's formulas in float64."""
    student, target = np.float64(student), np.float64(target)
    if kind == "norm":
        return np.sqrt(((student - target) ** 2).sum())

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
        return distances.distance(kind, student, target, ALL, **form)

    run = jax.jit(run) if jit else run
    for scale in (0.1, 1.0, 5.0):
        student, target = random_pair(scale)
        expected = reference(kind, student, target, **form)
        assert expected > 0
        np.testing.assert_allclose(run(student, target), expected, rtol=2e-4, atol=1e-6)


@every_distance
def test_distance_is_zero_with_a_finite_gradient_at_equality(kind, form):
    """Test 21: d(u, u) = 0 and no nan in its gradient."""
    student, _ = random_pair()

    def run(student, target):
        return distances.distance(kind, student, target, ALL, **form)

    value, gradient = jax.jit(jax.value_and_grad(run))(student, student)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    np.testing.assert_allclose(gradient, np.zeros_like(student), atol=1e-6)


@every_distance
def test_no_gradient_flows_to_the_target(kind, form):
    """Section 1A: the target is stop_gradient, the student is not."""
    student, target = random_pair()

    def run(student, target):
        return distances.distance(kind, student, target, ALL, **form)

    to_student, to_target = jax.jit(jax.grad(run, argnums=(0, 1)))(student, target)
    assert np.abs(to_student).max() > 1e-3
    assert not np.asarray(to_target).any()


@every_distance
def test_padding_rows_are_ignored_even_if_nan(kind, form):
    """Style and section 2: masked rows change neither value nor gradient."""
    student, target = random_pair()
    mask = np.array([True, True, False, True, False, True])

    def run(student, target, mask):
        return distances.distance(kind, student, target, mask, **form)

    real = run(student[mask], target[mask], np.ones(4, bool))
    student[~mask], target[~mask] = np.nan, np.inf
    value, gradient = jax.jit(jax.value_and_grad(run))(student, target, mask)
    np.testing.assert_allclose(value, real, rtol=1e-5)
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[~mask].any()
    assert np.abs(np.asarray(gradient)[mask]).max() > 1e-3


def test_distances_stay_bounded_for_extreme_logits():
    """Test 21 and section 1A: 0 <= JS <= ln 2, and log(0) gives no nan."""
    sharp = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0, 1]] * 1000
    other = np.roll(sharp, 1, axis=1)

    def run(student, kind, js_form):
        return distances.distance(kind, student, other, ALL, js_form=js_form)

    value, gradient = jax.value_and_grad(run)(sharp, "js", "true")
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
    assert np.isfinite(gradient).all()
    for kind, js_form in (("kl", "true"), ("js", "reversed")):
        value, gradient = jax.value_and_grad(run)(sharp, kind, js_form)
        assert np.isfinite(value) and value > 100
        assert np.isfinite(gradient).all()
    for scale in (0.01, 1.0, 20.0):
        student, target = random_pair(scale)
        value = float(distances.distance("js", student, target, ALL))
        assert 0 <= value <= np.log(2)


@with_and_without_jit
def test_js_of_single_rows(jit):
    """Over the last axis, whatever stands before it; rows broadcast."""
    student, target = random_pair(2.0)
    fn = jax.jit(distances.js) if jit else distances.js
    expected = [
        reference("js", a[None], b[None]) for a, b in zip(student, target, strict=True)
    ]
    np.testing.assert_allclose(fn(student, target), expected, rtol=2e-4)
    pairs = fn(student[:, None], target[None])
    assert pairs.shape == (6, 6)
    np.testing.assert_allclose(np.diag(pairs), expected, rtol=2e-4)


def test_kl_takes_zero_times_log_zero_as_zero():
    """-inf where the target has no mass gives no nan; elsewhere it counts."""
    with np.errstate(divide="ignore"):
        target = np.log(np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], np.float32))
        student = np.log(np.array([[0.25, 0.75, 0.0], [0.5, 0.5, 0.0]], np.float32))
    expected = [0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75), np.log(2)]
    np.testing.assert_allclose(distances.kl(target, student), expected, rtol=1e-6)


def test_safe_sqrt():
    """The square root, with gradient 0 at 0."""
    square = jnp.array([0.0, 4.0, 9.0])
    root, pull = jax.vjp(distances.safe_sqrt, square)
    np.testing.assert_array_equal(root, [0, 2, 3])
    np.testing.assert_allclose(pull(jnp.ones(3))[0], [0, 1 / 4, 1 / 6], rtol=1e-6)


def test_kinds_that_are_none():
    """One that is nearly a kind is not taken for another."""
    given = jnp.ones((2, 3)), jnp.zeros((2, 3)), jnp.ones(2, bool)
    for kind, more in (("KL", {}), ("mse", {}), ("js", {"js_form": "True"})):
        with pytest.raises(ValueError, match="expected one of"):
            distances.distance(kind, *given, **more)
