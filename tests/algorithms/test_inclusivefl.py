"""InclusiveFL against numpy: who trains which exit, and momentum distillation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import inclusivefl
from fedjax_pfl import types
from models import stages
from tests.algorithms import plain
from tests.toys import model as toy_model

MIX = {"level_mix": "1:1:1"}
FLOATS = {"client_lr": 0.1, "weight_decay": 0.02}


def make(problem, model=None, **given):
    hparams = inclusivefl.HParams(batch_size=5, **MIX | given)
    return inclusivefl.make(hparams, problem.task_of(model or "with_exits"))


def alone(problem, level):
    """One client of round 0, of this level: a mean of equals would round."""
    cohort = plain.without(plain.without(problem.cohort(0), 1, 5), 2, 5)
    return plain.at_levels(cohort, [level] * 3)


def parts(params):
    """(trunks, exits) as lists of [kernel, bias]."""
    return tuple(
        [[np.float64(stage[part][n]) for n in ("kernel", "bias")] for stage in params]
        for part in ("trunk", "exit")
    )


def trained(one, params, level):
    """Trunks 1..level and exit `level` after the client's plan."""
    trunks, exits = parts(params)
    # The chain that ends with the deepest exit is a plain network.
    layers = one.train([*trunks[:level], exits[level - 1]], plain.Sgd(0.1, decay=0.02))
    return layers[:-1], layers[-1]


@pytest.fixture(scope="module")
def first_state(problem):
    """Parameters that are all different, so that nothing agrees by chance."""
    state = make(problem).init(problem.data, jax.random.key(0))
    moved = plain.perturbed(state.server["model"].params, size=0.2)
    model = state.server["model"]._replace(params=moved)
    return state.replace(server=state.server | {"model": model})


@pytest.mark.parametrize("head_count", ["holders", "trainers"])
def test_rounds_equal_a_numpy_reference(head_count, compiled, problem, first_state):
    """Trunks: means over holders; exits: over holders or over those who train them."""
    structure = MIX | {"head_count": head_count}
    run = compiled("inclusivefl", "with_exits", **structure)
    state = first_state
    for round, depth in enumerate(([1, 2, 3], [3, 1, 1], [2, 1, 2])):
        cohort = plain.at_levels(problem.cohort(round), depth)
        before = state.server["model"].params
        held = {"trunk": {0: [], 1: [], 2: []}, "exit": {0: [], 1: [], 2: []}}
        for one in plain.clients(state, cohort, problem.table):
            level = depth[one.row]
            trunks, head = trained(one, before, level)
            for stage in range(level):
                held["trunk"][stage].append(trunks[stage])
                if stage == level - 1:
                    held["exit"][stage].append(head)
                elif head_count == "holders":
                    held["exit"][stage].append(parts(before)[1][stage])
        state, _, _ = run(state, cohort, **FLOATS)
        found = parts(state.server["model"].params)
        found = {"trunk": found[0], "exit": found[1]}
        for part, by_stage in held.items():
            for stage, copies in by_stage.items():
                new = found[part][stage]
                if not copies:
                    old = before[stage][part]
                    chex.assert_trees_all_equal(new, [old["kernel"], old["bias"]])
                    continue
                expected = [np.mean(a, 0) for a in zip(*copies, strict=True)]
                chex.assert_trees_all_close(new, expected, rtol=1e-5, atol=1e-5)


def test_exits_that_are_not_trained_keep_all_but_their_statistics(problem):
    """Test 17: with weight decay, and although their statistics move."""
    trunks = [(f"s{i}", toy_model.RunningNorm(6)) for i in range(3)]
    heads = {
        f"s{i}": stages.Sequential([toy_model.RunningNorm(5), stages.Dense(4, False)])
        for i in range(3)
    }
    net = stages.chain("normed", trunks, heads)
    made = make(problem, net, weight_decay=0.1, client_lr=0.1)
    state = made.init(problem.data, jax.random.key(0))
    after, _, _ = jax.jit(made.round)(state, alone(problem, 2), problem.data)
    old, new = state.server["model"], after.server["model"]
    chex.assert_trees_all_equal(new.params[0]["exit"], old.params[0]["exit"])
    assert plain.differs(new.stats[0]["exit"], old.stats[0]["exit"], 1e-3)
    assert plain.differs(new.params[1]["exit"], old.params[1]["exit"], 1e-3)
    for part in ("params", "stats"):
        chex.assert_trees_all_equal(getattr(new, part)[2], getattr(old, part)[2])


def equal_stages():
    """Three stages of the same shape: 64 wide, as the flat examples are."""
    trunks = [(f"s{i}", stages.Dense(64)) for i in (1, 2, 3)]
    exits = {f"s{i}": stages.Dense(4, False) for i in (1, 2, 3)}
    return stages.chain("equal", trunks, exits)


def test_momentum_distillation(problem):
    """A level's last stage moves by (1 - beta) of its own and beta of the next's."""
    runs, states = {}, {}
    for beta in (0.0, 0.3):
        given = {"client_lr": 0.1, "momentum_distill_weight": beta}
        made = make(problem, equal_stages(), **given)
        runs[beta] = jax.jit(made.round)
        states[beta] = made.init(problem.data, jax.random.key(0))

    def trunk(state, stage):
        return np.asarray(state.server["model"].params[stage]["trunk"]["kernel"])

    # One client alone shows what its level moved.
    shallow, deep = alone(problem, 1), alone(problem, 2)
    first = {b: runs[b](states[b], deep, problem.data)[0] for b in runs}
    # Nothing was known of level 3: a share of nothing moves the last stage less.
    for stage, share in ((0, 1.0), (1, 0.7)):
        steps = {b: trunk(first[b], stage) - trunk(states[b], stage) for b in runs}
        np.testing.assert_allclose(steps[0.3], share * steps[0.0], rtol=1e-5, atol=3e-6)
    moved = np.asarray(first[0.3].server["moved"][0]["kernel"])
    whole = [trunk(first[0.0], s) - trunk(states[0.0], s) for s in (0, 1)]
    np.testing.assert_allclose(moved, np.mean(whole, 0), rtol=1e-5, atol=3e-6)
    assert not np.asarray(first[0.3].server["moved"][1]["kernel"]).any()

    state = first[0.3]
    without = state.replace(server={"model": state.server["model"], "moved": ()})
    second = runs[0.3](state, shallow, problem.data)[0]
    own = trunk(runs[0.0](without, shallow, problem.data)[0], 0) - trunk(state, 0)
    step = trunk(second, 0) - trunk(state, 0)
    np.testing.assert_allclose(step, 0.7 * own + 0.3 * moved, rtol=1e-5, atol=3e-6)
    # Level 2 was not there: what is known of it stays.
    chex.assert_trees_all_equal(second.server["moved"], state.server["moved"])


def test_one_level_has_no_other_heads(problem):
    """Who counts for the mean of an exit is the same, and a run says so."""
    assert set(make(problem, levels="maximum").unused) == {"head_count"}
    assert not make(problem).unused


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (None, {"momentum_distill_weight": 0.2}, "distill_weight=0.2: .*with_"),
        (
            None,
            {"momentum_distill_weight": 0.2, "level_mix": "1:1:1", "levels": "maximum"},
            "distill_weight=0.2 has no effect where all clients that may train have",
        ),
        (
            None,
            {"momentum_distill_weight": 0.2, "level_mix": "1:0:1"},
            "weight=0.2: level 2 has no client, of which the level below would learn",
        ),
        ("tiny", {"level_mix": "1"}, "--model=tiny has one exit"),
        (None, {"level_mix": "1:1"}, "=1:1 has 2 levels, --model=with_exits has 3"),
    ],
)
def test_refused(model, given, words, problem):
    """One line with the flag and what to change."""
    with pytest.raises(ValueError, match=words):
        make(problem, model, **given)


def test_the_last_exit_serves(problem):
    """Also of a truncated model; the ensemble is only logged."""
    for top in (2, 3):
        made = make(problem, max_level=top)
        state = made.init(problem.data, jax.random.key(0))
        model, variables = made.server(state, problem.data)["global"]
        assert model.answer == "last" and len(model.stage_names) == top
        assert isinstance(variables, types.Variables) and len(variables.params) == top
        assert jnp.isfinite(jax.tree.leaves(variables)[0]).all()
