"""Masks, and where a model is cut: schedule, names, and the errors."""

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


def layers(participations, first, last, every, jit=True):
    """`Schedule.layer`, whose numbers are static, as in the algorithms."""
    schedule = boundary.Schedule(first, last, every, 6)
    z = jnp.asarray(participations, jnp.int32)
    return np.asarray((jax.jit(schedule.layer) if jit else schedule.layer)(z))


@with_and_without_jit
@pytest.mark.parametrize(
    ("first", "last", "every", "expected"),
    [
        (6, 3, 3, [6, 6, 6, 5, 5, 5, 4, 4, 4, 3, 3, 3, 3, 3, 3]),
        (6, 3, 5, [6] * 5 + [5] * 5 + [4] * 5),
        (6, 3, 7, [6] * 7 + [5] * 7 + [4]),
        (6, 1, 1, [6, 5, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (6, 5, 2, [6, 6] + [5] * 13),
        (6, 6, 1, [6] * 15),
        (4, 2, 3, [4, 4, 4, 3, 3, 3] + [2] * 9),
        (3, 3, 3, [3] * 15),
        (0, 0, 1, [0] * 15),
    ],
)
def test_schedule_table(first, last, every, expected, jit):
    """Property 1: explicit integers, Z = 1 to 15, L = 6; Z = 0 is like 1."""
    found = layers(range(1, 16), first, last, every, jit)
    np.testing.assert_array_equal(found, expected)
    assert layers(0, first, last, every, jit) == first
    assert layers(10**6, first, last, every, jit) == last


@pytest.mark.parametrize("every", [1, 3, 5])
@pytest.mark.parametrize("last", [1, 3])
def test_schedule_of_random_cohorts(every, last):
    """Property 1: l never rises, rests in rounds without the client, has a floor."""
    gen = np.random.default_rng(every)
    taken, before = np.zeros(50, int), np.full(50, 6)
    for _ in range(100):
        chosen = gen.choice(50, 10, replace=False)
        taken[chosen] += 1
        now = layers(taken, 6, last, every, jit=False)
        assert now.min() >= last
        assert (now <= before).all()
        absent = np.setdiff1d(np.arange(50), chosen)
        np.testing.assert_array_equal(now[absent], before[absent])
        for number in chosen:
            assert now[number] == max(last, 6 - (taken[number] - 1) // every)
        before = now
    assert taken.sum() == 100 * 10 and (before < 6).all()


def test_stages_below_the_boundary():
    """The stages 1..l, of a boundary that moves and of one that does not."""
    taken = jnp.array([0, 1, 2, 3, 5, 99])
    moving = boundary.Schedule(4, 2, 2, 4).kept(taken)
    np.testing.assert_array_equal(moving.sum(-1), [4, 4, 4, 3, 2, 2])
    assert (moving[:, :-1] >= moving[:, 1:]).all()
    resting = boundary.fixed(2, DENSE).kept(taken)
    np.testing.assert_array_equal(resting, [[True, True, False, False]] * 6)


@pytest.mark.parametrize(
    ("given", "model", "first", "last"),
    [
        ({}, M1, 6, 3),
        ({"min_layer": 1}, M1, 6, 1),
        ({"min_layer": 6}, M1, 6, 6),
        ({"first_layer": 5}, M1, 5, 3),
        ({"first_layer": 3, "min_layer": 3}, M1, 3, 3),
        # The last convolution is not above where the boundary begins.
        ({"first_layer": 2}, M1, 2, 2),
        ({"drop_every": 0}, M1, 6, 6),
        ({"drop_every": 0, "first_layer": 4}, M1, 4, 4),
        ({}, DENSE, 4, 3),
        ({"min_layer": 4}, DENSE, 4, 4),
        # The default needs no stage of a paper's name.
        ({}, models.MODELS["fedavg_cnn"](10), 4, 2),
    ],
)
def test_schedule_of_the_options(given, model, first, last):
    """From the last layer to FedPer's cut, if nothing is said."""
    shape = (9,) if model is DENSE else IMAGE
    dropping = boundary.LayerDropping(**given)
    found = boundary.schedule(dropping, model, shape)
    assert (found.first, found.last) == (first, last)
    assert found.every == (dropping.drop_every or 1)
    assert found.num_stages == len(model.stage_names)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"min_layer": 9},
            "--min_layer=9: expected at most 4, .*dense1,.*lower",
        ),
        ({"min_layer": 5}, "--min_layer=5: expected at most 4"),
        ({"first_layer": 5}, "--first_layer=5: expected at most 4"),
        (
            {"first_layer": 1, "min_layer": 2},
            "--min_layer=2: .*--first_layer",
        ),
    ],
)
def test_bad_schedules_are_refused(given, message):
    """One line with the flag, what came and what to change."""
    with pytest.raises(ValueError, match=message):
        boundary.schedule(boundary.LayerDropping(**given), DENSE, (9,))


@pytest.mark.parametrize(
    ("name", "model", "first"),
    [
        ("", M1, 3),
        ("none", M1, 6),
        ("last", M1, 5),
        ("F2", M1, 4),
        ("C1", M1, 0),
        ("", DENSE, 3),
    ],
)
def test_first_personal(name, model, first):
    """`--personal_from` counts from 0: the number of shared stages."""
    shape = (9,) if model is DENSE else IMAGE
    assert boundary.first_personal(name, model, shape) == first


def test_unknown_stage_is_refused():
    """The message lists the stages."""
    with pytest.raises(ValueError, match="--personal_from=C9: --model=m1 .*C1, C2, C3"):
        boundary.first_personal("C9", M1, IMAGE)


@pytest.mark.parametrize(
    ("name", "lacks"),
    [("pool", "an extractor"), ("one", "an extractor"), ("drop", "a classifier")],
)
def test_both_sides_have_parameters(name, lacks):
    """A stage that has none is no side of its own."""
    layers = {"pool": stages.GlobalAverage(), "one": stages.Dense(3)}
    layers |= {"two": stages.Dense(3), "drop": stages.Dropout(0.5)}
    model = stages.chain("model", list(layers.items()))
    assert boundary.middle("two", model, IMAGE) == 2
    with pytest.raises(ValueError, match=f"={name} .* without {lacks}; .* one of two$"):
        boundary.middle(name, model, IMAGE)


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


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_division_has_a_bool_for_each_stage(count):
    """One line says how many there are."""
    model = models.MODELS["mlp"](10)
    with pytest.raises(ValueError, match=f"^divided: {count} bools, mlp has 3 stages;"):
        boundary.divided([True] * count, model, (28, 28, 1))


@pytest.mark.parametrize("kind", [np.array, jnp.array, list])
def test_a_division_by_arrays_of_bools(kind):
    """As by a list of them; parts of other numbers of leaves are refused."""
    model = models.MODELS["mlp"](10)
    made = boundary.divided(kind([True, True, False]), model, (28, 28, 1))
    sent, kept = made.sent(made.like), made.kept(made.like)
    assert (len(sent), len(kept)) == (4, 2)
    assert made.joined(sent, kept) == made.like
    with pytest.raises(ValueError, match="got 3 leaves that travel and 2 that stay"):
        made.joined(sent[1:], kept)
