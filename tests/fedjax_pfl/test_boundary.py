"""Masks, and where a model is cut: schedule, dropping sets, names, and the errors."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from fedjax_pfl import boundary, types
from models import stages

with_and_without_jit = pytest.mark.parametrize("jit", [False, True])
M1, IMAGE = models.MODELS["m1"](10), (32, 32, 3)
DENSE = stages.chain("dense", [(f"dense{i}", stages.Dense(3)) for i in range(1, 5)])


def test_held_is_a_prefix_of_the_stages():
    """Depth d holds stages 1..d; any leading axes."""
    held = boundary.held(jnp.array([[0, 1], [3, 9]]), 3)
    expected = [[[0, 0, 0], [1, 0, 0]], [[1, 1, 1], [1, 1, 1]]]
    np.testing.assert_array_equal(held, np.array(expected, bool))
    by_stage = boundary.by_stage(held)
    assert len(by_stage) == 3
    np.testing.assert_array_equal(by_stage[0], [[False, True], [True, True]])
    assert boundary.held(jnp.array(2), 3).tolist() == [True, True, False]


@with_and_without_jit
def test_select_by_stage_part_and_entry(jit):
    """A prefix pytree broadcasts; the side that is not chosen may be nan."""

    def tree(value):
        stage = {"trunk": {"w": np.full((2, 3), value)}, "exit": np.full(3, value)}
        return (stage, stage, [np.full(2, value)])

    entries = np.array([[True, False, True], [False, False, True]])
    mask = ({"trunk": {"w": entries}, "exit": np.array(False)}, True, False)
    fn = jax.jit(boundary.select) if jit else boundary.select
    one = fn(mask, tree(1.0), tree(2.0))
    np.testing.assert_array_equal(one[0]["trunk"]["w"], np.where(entries, 1, 2))
    chosen = (one[0]["exit"], one[1]["trunk"]["w"], one[1]["exit"], one[2][0])
    assert [np.unique(leaf).tolist() for leaf in chosen] == [[2], [1], [1], [2]]
    flipped = fn(jax.tree.map(np.logical_not, mask), tree(np.nan), tree(1.0))
    np.testing.assert_array_equal(np.isnan(flipped[0]["trunk"]["w"]), ~entries)


def variables(value, count=3):
    """Stages of one array and one statistic each."""
    params = tuple({"w": jnp.full(2, float(value))} for _ in range(count))
    return types.Variables(params, tuple({"n": jnp.float32(value)} for _ in params))


def test_splice_masks_gradients():
    """The spliced value is exact and the server's side gets no gradient."""
    keep = jnp.array([True, False, True])
    spliced = boundary.splice(variables(2), variables(5), keep)
    assert [float(stage["w"][1]) for stage in spliced.params] == [2, 5, 2]
    assert [float(stage["n"]) for stage in spliced.stats] == [2, 5, 2]

    def total(client, server):
        spliced = boundary.splice(client, server, keep)
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(spliced))

    client, server = jax.grad(total, (0, 1))(variables(2), variables(5))
    assert [float(stage["w"][0]) for stage in client.params] == [4, 0, 4]
    chex.assert_trees_all_equal(server, variables(0))


def schedule(participations, every, num_stages, minimum, jit=True):
    """`boundary.dropped` with static options, as the algorithms call it."""

    def call(z):
        return boundary.dropped(z, every, num_stages, minimum)

    z = jnp.asarray(participations, jnp.int32)
    return np.asarray((jax.jit(call) if jit else call)(z))


@with_and_without_jit
@pytest.mark.parametrize(
    ("every", "minimum", "layers"),
    [
        (3, 3, [6, 6, 6, 5, 5, 5, 4, 4, 4, 3, 3, 3, 3, 3, 3]),
        (5, 3, [6] * 5 + [5] * 5 + [4] * 5),
        (7, 3, [6] * 7 + [5] * 7 + [4]),
        (1, 1, [6, 5, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (2, 5, [6, 6] + [5] * 13),
        (1, 6, [6] * 15),
        (0, 1, [6] * 15),
    ],
)
def test_schedule_table(every, minimum, layers, jit):
    """Property 1: explicit integers, Z = 1 to 15, L = 6; Z = 0 is like 1."""
    np.testing.assert_array_equal(
        schedule(range(1, 16), every, 6, minimum, jit), layers
    )
    assert schedule(0, every, 6, minimum, jit) == 6
    assert schedule(10**6, every, 6, minimum, jit) == (minimum if every else 6)


@pytest.mark.parametrize("every", [1, 3, 5])
@pytest.mark.parametrize("minimum", [1, 3])
def test_schedule_of_random_cohorts(every, minimum):
    """Property 1: l never rises, rests in rounds without the client, has a floor."""
    gen = np.random.default_rng(every)
    taken, last = np.zeros(50, int), np.full(50, 6)
    for _ in range(100):
        chosen = gen.choice(50, 10, replace=False)
        taken[chosen] += 1
        layers = schedule(taken, every, 6, minimum, jit=False)
        assert layers.min() >= minimum
        assert (layers <= last).all()
        absent = np.setdiff1d(np.arange(50), chosen)
        np.testing.assert_array_equal(layers[absent], last[absent])
        for number in chosen:
            drops = (taken[number] - 1) // every
            assert layers[number] == max(minimum, 6 - drops)
        last = layers
    assert taken.sum() == 100 * 10 and (last < 6).all()


def test_stages_below_the_boundary():
    """One that moves follows the schedule, the other stays where it is."""
    dropping = boundary.LayerDropping(drop_every=2)
    taken = jnp.array([0, 1, 2, 3, 5, 99])
    moving = boundary.stages_below(dropping, 2, 4, True, taken)
    np.testing.assert_array_equal(moving.sum(-1), [4, 4, 4, 3, 2, 2])
    resting = boundary.stages_below(dropping, 2, 4, False, taken)
    np.testing.assert_array_equal(resting, [[True, True, False, False]] * 6)


@pytest.mark.parametrize(
    ("given", "model", "layer"),
    [
        ({}, M1, 3),
        ({"drop_set": "L1"}, M1, 4),
        ({"drop_set": "L2"}, M1, 5),
        ({"drop_set": "L3"}, M1, 3),
        ({"drop_set": "L4"}, M1, 2),
        ({"min_layer": 1}, M1, 1),
        ({"min_layer": 6}, M1, 6),
        ({}, DENSE, 3),
        ({"min_layer": 4}, DENSE, 4),
        # The default needs no stage of a paper's name.
        ({}, models.MODELS["fedavg_cnn"](10), 2),
    ],
)
def test_shallowest(given, model, layer):
    """Table 3's sets are layers that may serve; the default is FedPer's cut."""
    shape = (9,) if model is DENSE else IMAGE
    dropping = boundary.LayerDropping(**given)
    assert boundary.shallowest(dropping, model, shape) == layer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_layer": 9}, "--min_layer=9: --model=dense has 4 layers .dense1,.*lower"),
        ({"min_layer": 5}, "--min_layer=5: --model=dense has 4 layers"),
        ({"drop_set": "L4"}, "--drop_set=L4 .* the stage C2, --model=dense .*m1 or m2"),
        ({"drop_set": "L2", "min_layer": 2}, "--drop_set=L2 and --min_layer=2 .* one"),
    ],
)
def test_bad_floors_are_refused(given, message):
    """One line with the flag, what came and what to change."""
    with pytest.raises(ValueError, match=message):
        boundary.shallowest(boundary.LayerDropping(**given), DENSE, (9,))


@pytest.mark.parametrize(
    ("name", "model", "first"),
    [("", M1, 3), ("none", M1, 6), ("F2", M1, 4), ("C1", M1, 0), ("", DENSE, 3)],
)
def test_first_personal(name, model, first):
    """`--personal_from` counts from 0: the number of shared stages."""
    shape = (9,) if model is DENSE else IMAGE
    assert boundary.first_personal(name, model, shape) == first


def test_unknown_stage_is_refused():
    """The message lists the stages."""
    with pytest.raises(ValueError, match="--personal_from=C9: --model=m1 .*C1, C2, C3"):
        boundary.first_personal("C9", M1, IMAGE)


def test_last_convolution():
    """The last kernel of four dimensions, counted from 1; without any, L - 1."""
    assert boundary.last_convolution(M1, IMAGE) == 3
    assert boundary.last_convolution(DENSE, (9,)) == 3
    mixed = stages.chain(
        "mixed", [("a", stages.Dense(3)), ("b", stages.Dense(3, relu=False))]
    )
    assert boundary.last_convolution(mixed, (9,)) == 1
    single = stages.chain("single", [("only", stages.Dense(3, relu=False))])
    assert boundary.last_convolution(single, (9,)) == 1
    boundary.check_layer("fixed_layer", 2, mixed)
    with pytest.raises(ValueError, match="--fixed_layer=3: --model=mixed has 2 layers"):
        boundary.check_layer("fixed_layer", 3, mixed)
