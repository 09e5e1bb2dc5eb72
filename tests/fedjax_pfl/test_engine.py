"""Masks, means, local steps, keys and options: small truths of the engine."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl import aggregate, local, losses, masks, options, rng, traffic, types


def stages(value, count=3):
    """Parameters of `count` stages, each one array of two `value`s."""
    return tuple({"w": jnp.full(2, float(value))} for _ in range(count))


@pytest.mark.parametrize("jit", [False, True])
def test_weighted_mean_ignores_dead_rows(jit):
    """Rows of weight 0 may hold nan; the rest is numpy's weighted mean."""
    leaf = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    leaf[2] = np.nan
    weight = jnp.array([0.5, 0.25, 0, 0.25])
    fn = jax.jit(aggregate.weighted_mean) if jit else aggregate.weighted_mean
    expected = 0.5 * leaf[0] + 0.25 * leaf[1] + 0.25 * leaf[3]
    np.testing.assert_allclose(fn({"a": leaf}, weight)["a"], expected, rtol=1e-6)


def test_weights_sum_to_one():
    """Both kinds sum to 1 over the real rows and are 0 on padding."""
    count, mask = jnp.array([10, 30, 7]), jnp.array([True, True, False])
    by_examples = aggregate.weights("examples", count, mask)
    np.testing.assert_allclose(by_examples, [0.25, 0.75, 0])
    np.testing.assert_allclose(aggregate.weights("uniform", count, mask), [0.5, 0.5, 0])


def test_stagewise_mean_falls_back_where_nobody_holds():
    """A stage is averaged over its holders; without any it stays."""
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), stages(1), stages(3))
    held = jnp.array([[True, True, False], [True, False, False]])
    mean = aggregate.stagewise_mean(stacked, jnp.ones(2), held, stages(-5))
    assert [float(stage["w"][0]) for stage in mean] == [2, 1, -5]


def test_mix_is_a_matrix_product():
    """A permutation matrix permutes the rows exactly."""
    leaf = jax.random.normal(jax.random.key(0), (3, 4))
    mixed = aggregate.mix({"a": leaf}, jnp.eye(3)[jnp.array([2, 0, 1])])
    np.testing.assert_array_equal(mixed["a"], leaf[jnp.array([2, 0, 1])])


def test_splice_masks_gradients():
    """The spliced value is exact and the server's side gets no gradient."""
    keep = jnp.array([True, False, True])

    def total(client, server):
        spliced = masks.splice(client, server, keep)
        return sum((stage["w"] ** 2).sum() for stage in spliced)

    grads = jax.grad(total, (0, 1))(stages(2), stages(5))
    assert [float(stage["w"][0]) for stage in grads[0]] == [4, 0, 4]
    assert all((stage["w"] == 0).all() for stage in grads[1])


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_frozen_stages_keep_weights_moments_and_counts(kind):
    """A frozen stage moves by nothing, even with momentum and weight decay."""
    hparams = options.LocalTraining(
        client_optimizer=kind, client_momentum=0.9, weight_decay=0.1
    )
    tx = local.optimizer(hparams, 0.1)
    params = stages(1)
    state = local.init_optimizer(tx, params)
    everything = jnp.ones(3, bool)
    params, state = local.apply_gradients(tx, stages(1), state, params, everything)
    only_first = jnp.array([True, False, False])
    after, after_state = local.apply_gradients(tx, stages(0), state, params, only_first)
    chex.assert_trees_all_equal(after[1:], params[1:])
    chex.assert_trees_all_equal(after_state[1:], state[1:])
    assert (after[0]["w"] != params[0]["w"]).all()


def test_sgd_with_momentum_and_decay_is_pytorchs():
    """v <- m v + (g + wd w); w <- w - lr v."""
    hparams = options.LocalTraining(client_momentum=0.5, weight_decay=0.1)
    tx = local.optimizer(hparams, 0.2)
    params, state, mask = stages(1), None, jnp.ones(3, bool)
    state = local.init_optimizer(tx, params)
    weight, velocity = 1.0, 0.0
    for grad in (1.0, -2.0, 0.5):
        params, state = local.apply_gradients(tx, stages(grad), state, params, mask)
        velocity = 0.5 * velocity + grad + 0.1 * weight
        weight -= 0.2 * velocity
    np.testing.assert_allclose(params[0]["w"], weight, rtol=1e-6)


def test_clip_scales_to_the_global_norm():
    """Large gradients get the norm, small ones stay bitwise, 0 means never."""
    large, every = stages(10), jnp.ones(3, bool)
    assert local.clip(large, 0.0, every) is large
    clipped = local.clip(large, 1.0, every)
    np.testing.assert_allclose(optax.global_norm(clipped), 1, rtol=1e-6)
    small = local.clip(stages(0.01), jnp.float32(1), every)
    chex.assert_trees_all_equal(small, stages(0.01))


def test_clip_leaves_frozen_stages_out_of_the_norm():
    """The selected stages alone get the whole norm; a frozen one may hold anything."""
    mask = jnp.array([True, True, False])
    large = (*stages(10)[:2], jax.tree.map(lambda x: x * jnp.inf, stages(10)[2]))
    clipped = local.clip(large, 1.0, mask)
    np.testing.assert_allclose(optax.global_norm(clipped[:2]), 1, rtol=1e-6)


def test_learning_rate_decays_per_round_zero_based():
    """lr * decay ** round: .05 * .95^149 = 2.398e-5."""
    hparams = options.LocalTraining(client_lr=0.05, client_lr_decay=0.95)
    np.testing.assert_allclose(local.learning_rate(hparams, jnp.array(0)), 0.05)
    rate = local.learning_rate(hparams, jnp.array(149))
    np.testing.assert_allclose(rate, 2.398e-5, rtol=1e-3)


def test_masked_losses_ignore_padding():
    """nan in a padding row changes neither value nor gradient."""
    logits = jnp.array([[2.0, 0.0], [jnp.nan, jnp.nan]])
    label, mask = jnp.array([0, 1]), jnp.array([True, False])
    value = losses.cross_entropy(logits, label, mask)
    np.testing.assert_allclose(value, np.log1p(np.exp(-2)), rtol=1e-6)
    assert losses.masked_mean(jnp.ones(2), jnp.zeros(2, bool)) == 0


def test_streams_are_named_by_tag_and_ids():
    """Different names, different keys; the host's twin likewise."""
    key = jax.random.key(0)
    names = [(rng.Tag.LOCAL, 1, 2), (rng.Tag.LOCAL, 2, 1), (rng.Tag.SERVER, 1, 2)]
    keys = {tuple(jax.random.key_data(rng.stream(key, *n)).tolist()) for n in names}
    assert len(keys) == 3
    draws = [rng.generator(0, rng.Tag.COHORT, 5).random() for _ in range(2)]
    assert draws[0] == draws[1] != rng.generator(1, rng.Tag.COHORT, 5).random()


def test_traffic_is_counted_in_int64():
    """More bytes than int32 holds."""
    kinds = (types.MessageKind("a", "up", 10**9), types.MessageKind("b", "down", 7))
    counts = np.array([5000, 3], np.int32)
    assert traffic.cumulative(counts, kinds) == {
        "bytes_up": 5 * 10**12,
        "bytes_down": 21,
    }


def test_floats_are_split_from_structure():
    """Traceable floats leave; a zero that switches code off stays."""
    hparams = options.LocalTraining(client_lr=0.3, weight_decay=0.0, clip_norm=2.0)
    structure, floats = options.split_floats(hparams)
    assert floats == {"client_lr": 0.3, "client_lr_decay": 1.0, "clip_norm": 2.0}
    assert dataclasses.replace(structure, **floats) == hparams


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"client_lr": -1.0}, "--client_lr=-1.0: expected at least 0"),
        ({"client_lr": float("nan")}, "finite"),
        ({"client_optimizer": "rmsprop"}, "one of sgd, adam"),
        ({"client_lr_decay": 0.0}, "more than 0"),
        ({"client_momentum": 1.5}, "at most 1"),
    ],
)
def test_options_are_validated(values, words):
    """One line with the flag, what came and what is allowed."""
    with pytest.raises(ValueError, match=words):
        options.validate(options.LocalTraining(**values))
