"""Means of a server and among peers, each against numpy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import aggregate, boundary, types
from tests.fedjax_pfl import small

with_and_without_jit = pytest.mark.parametrize("jit", [False, True])


def normal(*shape, seed=0):
    """Random numbers f32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@with_and_without_jit
def test_weighted_mean_ignores_dead_rows(jit):
    """Rows of weight 0 may hold nan; the rest is numpy's weighted mean."""
    leaf = normal(4, 3)
    leaf[2] = np.nan
    rows = {"a": leaf, "b": {"c": leaf[:, 0]}}
    weight = jnp.array([0.5, 0.25, 0, 0.25])
    fn = jax.jit(aggregate.weighted_mean) if jit else aggregate.weighted_mean
    expected = 0.5 * leaf[0] + 0.25 * leaf[1] + 0.25 * leaf[3]
    mean = fn(rows, weight)
    np.testing.assert_allclose(mean["a"], expected, rtol=1e-6)
    # A prefix pytree: each part its own weights.
    mean = fn(rows, {"a": jnp.array([0.0, 1, 0, 0]), "b": weight})
    np.testing.assert_array_equal(mean["a"], leaf[1])
    np.testing.assert_allclose(mean["b"]["c"], expected[0], rtol=1e-6)


def test_weights_of_either_sign():
    """A sum of signed parts; only rows of weight 0 are left out."""
    leaf, weight = jnp.array([[1.0], [2.0], [jnp.nan], [4.0]]), [0.5, -0.5, 0.0, 1.0]
    for given in (jnp.array(weight), jnp.array(weight)[:, None]):
        assert aggregate.weighted_mean(leaf, given).tolist() == [3.5]


def test_weighted_mean_keeps_the_type():
    """Statistics that count stay counters."""
    mean = aggregate.weighted_mean(jnp.array([2, 4], jnp.int32), jnp.full(2, 0.5))
    assert mean.dtype == jnp.int32 and int(mean) == 3


def test_weights_sum_to_one():
    """Both kinds sum to 1 over the real rows and are 0 on padding."""
    count, mask = jnp.array([10, 30, 7]), jnp.array([True, True, False])
    by_examples = aggregate.weights("examples", count, mask)
    np.testing.assert_allclose(by_examples, [0.25, 0.75, 0])
    np.testing.assert_allclose(aggregate.weights("uniform", count, mask), [0.5, 0.5, 0])
    nobody = aggregate.weights("examples", count, jnp.zeros(3, bool))
    np.testing.assert_array_equal(nobody, np.zeros(3))


def test_weights_of_no_kind():
    """A misspelt kind was uniform without a word."""
    with pytest.raises(ValueError, match="weights: got 'exmples', expected 'examples'"):
        aggregate.weights("exmples", jnp.arange(3), jnp.ones(3, bool))


def test_cohort_weights_count_train_examples():
    """Of the row's own client, wherever it stands; padding rows weigh nothing."""
    data, cohort = small.tables([4, 1, 3], test=[9, 9, 9]), small.cohort([2, 3, 0], 3)
    by_examples = aggregate.cohort_weights("examples", cohort, data)
    np.testing.assert_allclose(by_examples, [3 / 7, 0, 4 / 7], rtol=1e-6)
    uniform = aggregate.cohort_weights("uniform", cohort, data)
    np.testing.assert_allclose(uniform, [0.5, 0, 0.5])


WEIGHT = np.array([1, 2, 0, 4, 3], np.float32)


def mean_by_hand(leaf, mask, fallback):
    """The mean of each entry over the rows that hold it, with a loop."""
    mask = np.broadcast_to(
        np.reshape(mask, mask.shape + (1,) * (leaf.ndim - mask.ndim)), leaf.shape
    )
    out = np.array(fallback, np.float64)
    for index in np.ndindex(out.shape):
        rows = [r for r in range(len(leaf)) if mask[(r, *index)] and WEIGHT[r]]
        if rows:
            values = [leaf[(r, *index)] for r in rows]
            out[index] = np.average(values, weights=WEIGHT[rows])
    return out


@with_and_without_jit
def test_masked_mean_equals_a_loop(jit):
    """Masks of a stage, of a part and of entries; what nobody holds stays."""
    gen = np.random.default_rng(1)
    rows = (
        {"trunk": normal(5, 2, 3, seed=1), "exit": normal(5, 2, seed=2)},
        {"trunk": normal(5, 2, 3, seed=3), "exit": normal(5, seed=4)},
        {"w": normal(5, 3, seed=5)},
    )
    fallback = jax.tree.map(lambda leaf: leaf[0] * 0 - 5, rows)
    entries = gen.uniform(size=(5, 2, 3)) < 0.4
    entries[:, 0, 1] = False
    entries[[0, 1, 3, 4], 1, 1] = False
    entries[2, 1, 1] = True  # held by a row of weight 0 alone
    mask = (
        {"trunk": entries, "exit": np.array([True, False, True, True, False])},
        np.array([True, True, True, False, True]),
        np.zeros(5, bool),
    )
    # Rows that do not hold an entry, or have no weight, may hold nan there.
    rows[0]["trunk"][~entries] = np.nan
    rows[0]["exit"][1] = rows[1]["trunk"][2:4] = np.nan
    fn = jax.jit(aggregate.masked_mean) if jit else aggregate.masked_mean
    mean = fn(rows, WEIGHT, mask, fallback)
    masks = ({**mask[0]}, {"trunk": mask[1], "exit": mask[1]}, {"w": mask[2]})
    expected = jax.tree.map(mean_by_hand, rows, masks, fallback)
    chex.assert_trees_all_close(mean, expected, rtol=1e-5, atol=1e-6)
    assert (mean[0]["trunk"][:, 1] == -5).all() and (mean[2]["w"] == -5).all()


def test_masked_weights():
    """Sum to 1 over those that hold the part, or to 0; and which are held."""
    mask = {"a": jnp.array([True, False, True]), "b": jnp.zeros(3, bool)}
    mask["c"] = jnp.array([[True, False], [True, False], [True, True]])
    share, held = aggregate.masked_weights(jnp.array([1.0, 2, 3]), mask)
    np.testing.assert_allclose(share["a"], [0.25, 0, 0.75])
    np.testing.assert_array_equal(share["b"], np.zeros(3))
    expected = [[1 / 6, 0], [2 / 6, 0], [3 / 6, 1]]
    np.testing.assert_allclose(share["c"], expected, rtol=1e-6)
    assert bool(held["a"]) and not held["b"] and held["c"].all()


def stages(value, count=3):
    """Variables of `count` stages: two entries each, and one statistic."""
    params = tuple({"w": jnp.full(2, float(value))} for _ in range(count))
    return types.Variables(params, tuple({"n": jnp.float32(value)} for _ in params))


def test_stage_means_fall_back_where_nobody_holds():
    """A stage, with its statistics, is averaged over its holders or stays."""
    copies = jax.tree.map(lambda *rows: jnp.stack(rows), stages(1), stages(3))
    held = jnp.array([[True, True, False], [True, False, False]])
    weight = jnp.array([0.75, 0.25])
    mask = boundary.by_stage(held)
    masks = types.Variables(mask, mask)
    mean = aggregate.masked_mean(copies, weight, masks, stages(-5))
    assert [stage["w"].tolist() for stage in mean.params] == [
        [1.5] * 2,
        [1] * 2,
        [-5] * 2,
    ]
    assert [float(stage["n"]) for stage in mean.stats] == [1.5, 1, -5]
    # The same from weights known before training, for a sum over chunks.
    share, is_held = aggregate.stage_weights(weight, held)
    total = aggregate.weighted_mean(copies, share)
    assert [bool(stage) for stage in is_held.params] == [True, True, False]
    for known, one, other in zip(
        is_held.params, total.params, mean.params, strict=True
    ):
        np.testing.assert_array_equal(one["w"], other["w"] if known else np.zeros(2))
    assert [float(stage["n"]) for stage in total.stats] == [1.5, 1, 0]


@pytest.fixture(scope="module")
def graph():
    """30 clients, a cohort of all in another order with 2 padding rows, 5 peers.

    Some peers are masked and client 4 has none; the masked ones hold nan.
    """
    gen = np.random.default_rng(0)
    ids = np.insert(gen.permutation(30), [3, 17], 30)
    others = [np.setdiff1d(np.arange(30), [k]) for k in ids]
    peers = np.stack([gen.choice(each, 5, replace=False) for each in others])
    mask = gen.uniform(size=peers.shape) < 0.7
    mask[ids == 4] = False
    cohort = small.cohort(ids, 30).replace(
        peers=jnp.asarray(peers, jnp.int32), peer_mask=jnp.asarray(mask)
    )
    return cohort, gen.uniform(0.1, 2, size=(32, 6)).astype(np.float32)


def matrix_of(cohort, weight):
    """The dense matrix f64[30, 30] of `mix_peers`, with loops."""
    matrix = np.zeros((30, 30))
    for index, client in enumerate(np.asarray(cohort.client_id)):
        if client == 30:
            continue
        matrix[client, client] = weight[index, 0]
        for place, peer in enumerate(np.asarray(cohort.peers[index])):
            if cohort.peer_mask[index, place]:
                matrix[client, peer] += weight[index, 1 + place]
    return matrix / matrix.sum(1, keepdims=True)


@with_and_without_jit
def test_mix_peers_equals_a_dense_matrix(graph, jit):
    """Weights of any scale; an isolated client keeps its own bit for bit."""
    cohort, weight = graph
    weight = weight * np.linspace(1, 50, 32, dtype=np.float32)[:, None]
    rows = {"a": normal(30, 4, 2), "b": normal(30, seed=1)}
    fn = jax.jit(aggregate.mix_peers) if jit else aggregate.mix_peers
    mixed = fn(rows, cohort, jnp.asarray(weight))
    matrix, real = matrix_of(cohort, weight), np.asarray(cohort.row_mask)
    order = np.asarray(cohort.client_id)[real]
    for name, leaf in rows.items():
        expected = np.tensordot(matrix, leaf.astype(np.float64), 1)[order]
        np.testing.assert_allclose(mixed[name][real], expected, rtol=1e-5, atol=1e-6)
        alone = np.flatnonzero(np.asarray(cohort.client_id) == 4)[0]
        np.testing.assert_array_equal(mixed[name][alone], leaf[4])


def test_mix_peers_weighs_stages_apart(graph):
    """A prefix pytree of weights; the weight 0 on oneself is allowed with peers."""
    cohort, weight = graph
    ahead = np.concatenate([np.ones((32, 1)), np.zeros((32, 5))], 1)
    rows = (normal(30, 3), normal(30, 2, seed=1))
    mixed = aggregate.mix_peers(rows, cohort, (jnp.asarray(weight), jnp.asarray(ahead)))
    real = np.asarray(cohort.row_mask)
    order = np.asarray(cohort.client_id)[real]
    expected = np.tensordot(matrix_of(cohort, weight), rows[0].astype(np.float64), 1)
    np.testing.assert_allclose(mixed[0][real], expected[order], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(mixed[1][real], rows[1][order])


def test_an_isolated_client_keeps_its_own_whatever_the_weights(graph):
    """Also where all weight is on peers, and weights are tiny."""
    cohort, weight = graph
    rows = normal(30, 3)
    of_peers = np.where(np.arange(6) == 0, 0, weight * np.float32(1e-32))
    mixed = aggregate.mix_peers(rows, cohort, jnp.asarray(of_peers))
    is_alone = ~np.asarray(cohort.peer_mask).any(1) & np.asarray(cohort.row_mask)
    np.testing.assert_array_equal(
        mixed[is_alone], rows[np.asarray(cohort.client_id)[is_alone]]
    )
    has_peers = ~is_alone & np.asarray(cohort.row_mask)
    order = np.asarray(cohort.client_id)[has_peers]
    with np.errstate(invalid="ignore"):
        matrix = matrix_of(cohort, of_peers)[order]
    expected = matrix @ rows.astype(np.float64)
    np.testing.assert_allclose(mixed[has_peers], expected, rtol=1e-5, atol=1e-6)


def test_mix_peers_never_reads_what_is_masked(graph):
    """nan at a masked peer, or at one of weight 0, reaches nobody."""
    cohort, weight = graph
    rows, sick = normal(30, 3), 9
    rows[sick] = np.nan
    is_sick = np.asarray(cohort.peers) == sick
    weight = np.where(np.pad(is_sick, ((0, 0), (1, 0))), 0, weight)
    masked = cohort.replace(peer_mask=cohort.peer_mask & ~jnp.asarray(is_sick))
    healthy = np.asarray(cohort.row_mask) & (np.asarray(cohort.client_id) != sick)
    first = aggregate.mix_peers(rows, cohort, jnp.asarray(weight))
    second = aggregate.mix_peers(rows, masked, jnp.asarray(weight))
    assert np.isfinite(np.asarray(first)[healthy]).all()
    chex.assert_trees_all_equal(first[healthy], second[healthy])


def test_mix_peers_holds_one_peer_at_a_time(graph):
    """Never an array of all peers' models."""
    cohort, weight = graph
    jaxpr = jax.make_jaxpr(aggregate.mix_peers)(normal(30, 77), cohort, weight)
    sizes = [v.aval.size for e in small.equations(jaxpr) for v in e.outvars]
    assert max(sizes) == 32 * 77


@with_and_without_jit
def test_sum_held_equals_loops(graph, jit):
    """Over those who hold an entry; nan of who does not, or is masked, stays out."""
    cohort, weight = graph
    gen = np.random.default_rng(1)
    rows = {"a": normal(30, 4, 2), "b": normal(30, seed=1)}
    held = {name: gen.uniform(size=leaf.shape) < 0.3 for name, leaf in rows.items()}
    sick = {name: np.where(held[name], leaf, np.nan) for name, leaf in rows.items()}
    fn = jax.jit(aggregate.sum_held) if jit else aggregate.sum_held
    total, size = fn(sick, held, cohort, jnp.asarray(weight))
    for index in np.flatnonzero(cohort.row_mask):
        sources = [cohort.client_id[index], *cohort.peers[index]]
        share = weight[index] * np.append(True, cohort.peer_mask[index])
        for name, leaf in rows.items():
            factor = [s * held[name][k] for s, k in zip(share, sources, strict=True)]
            values = [f * leaf[k] for f, k in zip(factor, sources, strict=True)]
            np.testing.assert_allclose(size[name][index], sum(factor), rtol=1e-5)
            np.testing.assert_allclose(
                total[name][index], sum(values), rtol=1e-5, atol=1e-6
            )
    assert (np.asarray(size["a"]) == 0).any()


def test_sum_held_copies_what_one_holds(graph):
    """Bit for bit where all weights are 1; one model at a time."""
    cohort, _ = graph
    rows, held = normal(30, 77), np.zeros((30, 77), bool)
    held[np.arange(77) % 30, np.arange(77)] = True
    jaxpr = jax.make_jaxpr(aggregate.sum_held)(rows, held, cohort, np.ones((32, 6)))
    sizes = [v.aval.size for e in small.equations(jaxpr) for v in e.outvars]
    assert max(sizes) == 32 * 77
    total, size = aggregate.sum_held(rows, held, cohort, jnp.ones((32, 6)))
    index, entry = np.nonzero(np.asarray(size)[np.asarray(cohort.row_mask)] == 1)
    found = np.asarray(total)[np.asarray(cohort.row_mask)][index, entry]
    assert len(entry) > 100
    np.testing.assert_array_equal(found, rows[entry % 30, entry])
