"""Every client of a round: chunks, levels, sums, devices, and what a client sees."""

import functools
import re
import types as python_types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import (
    aggregate,
    each_client,
    execution,
    local_training,
    rng,
    types,
)
from tests.fedjax_pfl import small

HOW = {
    "one": execution.Execution(1),
    "two": execution.Execution(2),
    "all": execution.Execution(8),
    "sharded": execution.Execution(2, small.mesh_of(2)),
    "sharded_whole": execution.Execution(8, small.mesh_of(4)),
}
every_way = pytest.mark.parametrize("name", HOW)
STEPS = jnp.array([1, 2, 3, 4, 5, 6, 7, 8], jnp.int32)
LEVEL = jnp.array([1, 1, 1, 2, 3, 2, 3, 3], jnp.int32)


def in_chunk(values, how):
    """The largest of each row's chunk, int[8]."""
    devices = how.mesh.size if how.mesh else 1
    chunk = min(how.chunk, 8 // devices)
    return np.asarray(values).reshape(-1, chunk).max(1).repeat(chunk)


@every_way
def test_bound_is_the_longest_of_the_chunk(name):
    """Every row sees its chunk's bound and its own data."""

    def fn(row, shared, bound, _):
        return {"sum": row + shared, "bound": bound}

    out = jax.jit(each_client.over_clients([fn], HOW[name]))(
        jnp.arange(8), jnp.array(10), STEPS
    )
    np.testing.assert_array_equal(out["sum"], np.arange(8) + 10)
    np.testing.assert_array_equal(out["bound"], in_chunk(STEPS, HOW[name]))


def test_the_bound_is_one_number_for_a_chunk():
    """It is not batched: a loop up to it is a loop over one number."""

    def fn(row, shared, bound, _):
        return jax.lax.fori_loop(0, bound, lambda _, x: x + row, jnp.zeros(()))

    run = each_client.over_clients([fn], HOW["all"])
    jaxpr = jax.make_jaxpr(run)(jnp.arange(8.0), (), STEPS)
    loops = [e for e in small.equations(jaxpr) if e.primitive.name == "while"]
    (loop,) = loops
    # A batched bound would be compared row by row.
    assert loop.params["cond_jaxpr"].out_avals[0].shape == ()
    assert [e.invars[0].aval.shape for e in loop.params["cond_jaxpr"].eqns] == [()]


@every_way
def test_counts_and_bools_have_means(name):
    """Whatever the chunk; a model's whole numbers keep their type."""

    def fn(row, shared, bound, _):
        model = types.Variables({"w": row * 0.5}, {"count": row})
        return (), {"count": row, "is_odd": row % 2 == 1, "model": model}

    run = jax.jit(each_client.over_clients([fn], HOW[name]))
    _, mean = run(jnp.arange(8), (), STEPS, None, jnp.full(8, 1 / 8))
    assert float(mean["count"]) == 3.5 and float(mean["is_odd"]) == 0.5
    assert mean["model"].stats["count"].dtype == jnp.int32


@pytest.mark.parametrize("name", ["two", "sharded"])
def test_rows_that_do_not_fill_chunks_are_refused(name):
    """The planner pads; a caller that forgot gets told."""
    run = each_client.over_clients([lambda row, shared, bound, _: row], HOW[name])
    with pytest.raises(ValueError, match="3 rows do not fill chunks of 2.*padded_size"):
        run(jnp.arange(3), (), jnp.ones(3, jnp.int32))


def of_levels(row, shared, bound, _, level):
    """What tells the level, the bound and the row that a branch was run with."""
    return {"level": jnp.int32(level), "bound": bound, "row": row * shared}


LEVELS = [functools.partial(of_levels, level=n) for n in (1, 2, 3)]


@every_way
def test_a_chunk_runs_its_largest_level(name):
    """Rows of a chunk share the level; each keeps its own data."""
    run = jax.jit(each_client.over_clients(LEVELS, HOW[name]))
    out = run(jnp.arange(8), jnp.array(10), STEPS, LEVEL)
    np.testing.assert_array_equal(out["level"], in_chunk(LEVEL, HOW[name]))
    np.testing.assert_array_equal(out["bound"], in_chunk(STEPS, HOW[name]))
    np.testing.assert_array_equal(out["row"], np.arange(8) * 10)


@every_way
def test_levels_are_one_branch_each(name):
    """One `cond` of as many branches as levels, chosen by one number for a chunk."""
    run = each_client.over_clients(LEVELS, HOW[name])
    jaxpr = jax.make_jaxpr(run)(jnp.arange(8), jnp.array(10), STEPS, LEVEL)
    found = [e for e in small.equations(jaxpr) if e.primitive.name == "cond"]
    assert [len(e.params["branches"]) for e in found] == [3]
    assert found[0].invars[0].aval.shape == ()


@pytest.fixture(scope="module")
def given():
    """Rows of two parts to sum, nan in the rows 2 and 7."""
    gen = np.random.default_rng(0)
    rows = {
        "a": gen.normal(size=(8, 3, 5)).astype(np.float32),
        "b": gen.normal(size=8).astype(np.float32),
    }
    for leaf in rows.values():
        leaf[[2, 7]] = np.nan
    return rows


def shares(seed):
    """Weights f32[8] that sum to 1, 0 in the rows 2 and 7."""
    weight = np.random.default_rng(seed).uniform(size=8).astype(np.float32)
    weight[[2, 7]] = 0
    return jnp.asarray(weight / weight.sum())


@every_way
@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("weight", ["common", "prefix"])
def test_sums_while_chunks_run_equal_the_stacked_mean(name, levels, weight, given):
    """To 1e-6, with weights of each part, nan where the weight is 0, and levels."""
    weight = shares(1) if weight == "common" else {"a": shares(1), "b": shares(2)}

    def fn(row, shared, bound, _, level=1):
        return {"kept": row["b"] * shared}, row

    fns = [functools.partial(fn, level=n) for n in (1, 2, 3)] if levels else [fn]
    kept, total = jax.jit(each_client.over_clients(fns, HOW[name]))(
        given, jnp.float32(2), STEPS, LEVEL if levels else None, weight
    )
    np.testing.assert_array_equal(kept["kept"], given["b"] * 2)
    chex.assert_trees_all_close(
        total, aggregate.weighted_mean(given, weight), rtol=0, atol=1e-6
    )
    # And that is what numpy says.
    per_row = np.asarray(jax.tree.leaves(weight)[0], np.float64)
    real = per_row > 0
    expected = np.tensordot(per_row[real], given["a"][real].astype(np.float64), 1)
    np.testing.assert_allclose(total["a"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [6000, 5987])  # the second is prime
def test_a_sum_of_many_chunks_keeps_its_digits(count):
    """The mean of equal rows is the row; in sequence 2e-5 of it would be lost."""

    def fn(row, shared, bound, _):
        return row, jnp.full(3, 0.7)

    row = jnp.arange(count)
    run = jax.jit(each_client.over_clients([fn], types.Execution(1)))
    kept, total = run(row, (), row * 0, None, jnp.full(count, 1 / count, jnp.float32))
    np.testing.assert_array_equal(kept, row)
    np.testing.assert_allclose(total, 0.7, rtol=3e-6)
    terms = np.full(count, np.float32(0.7 / count))
    assert abs(np.cumsum(terms)[-1] / 0.7 - 1) > 1e-5


def test_a_sum_keeps_no_row():
    """No array of all rows' models: memory is that of a chunk."""

    def fn(row, shared, bound, _):
        return row, shared * row

    weight = jnp.full(8, 1 / 8)
    run = each_client.over_clients([fn], HOW["two"])
    jaxpr = jax.make_jaxpr(run)(jnp.arange(8.0), jnp.ones(77), STEPS, None, weight)
    sizes = [v.aval.size for e in small.equations(jaxpr) for v in e.outvars]
    assert max(sizes) == 2 * 77


SIZES = [3, 5, 1, 4, 2, 6, 5, 3]


@pytest.fixture(scope="module")
def problem():
    """(task, state with kept optimizer states, cohort in another order, tables)."""
    data = small.tables(SIZES)
    model = small.linear()
    state = types.RoundState.first((), (), jax.random.key(3))
    state = state.replace(opt_state=jnp.arange(8.0) * 100)
    ids = jnp.array([5, 0, 8, 3, 7, 1, 2, 6])
    plans = {"local": small.plan(SIZES), "other": small.plan(SIZES, epochs=1)}
    rows = jnp.minimum(ids, 7)
    plans = jax.tree.map(lambda leaf: leaf[rows], plans)
    cohort = small.cohort(ids, 8, plans, level=[1, 1, 1, 2, 2, 2, 3, 3])
    task = types.Task(model, (model,), np.zeros(8), 8, 4, 0, 8, 6, (3,))
    state = state.replace(round=jnp.int32(4))
    return task, state, cohort, data


@pytest.mark.parametrize("name", ["one", "two", "sharded"])
def test_a_client_sees_its_own(name, problem):
    """Id, level, plan, what it brings, its optimizer state and its key; not others'."""
    task, state, cohort, data = problem

    def fn(client, shared):
        return {
            "id": client.id,
            "level": client.level,
            "own": client.own + shared,
            "opt_state": client.opt_state,
            "position": client.plan.position,
            "bound": client.bound,
            "round": client.round,
            "key": jax.random.key_data(client.stream("engine.local")),
            "rows": client.data.partition.train.of(client.id)(jnp.arange(1)),
        }

    def update(plan):
        return each_client.update(
            fn,
            task._replace(execution=HOW[name]),
            state,
            cohort,
            data,
            own=jnp.arange(8) * 10,
            shared=7,
            plan=plan,
        )

    out, after = jax.jit(functools.partial(update, "local"))()
    np.testing.assert_array_equal(after.opt_state, state.opt_state)
    real = np.flatnonzero(cohort.row_mask)
    np.testing.assert_array_equal(out["id"], cohort.client_id)
    np.testing.assert_array_equal(out["level"], cohort.level)
    np.testing.assert_array_equal(out["own"], np.arange(8) * 10 + 7)
    np.testing.assert_array_equal(
        out["opt_state"][real], cohort.client_id[real] * 100.0
    )
    np.testing.assert_array_equal(out["position"], cohort.plans["local"].position)
    np.testing.assert_array_equal(
        out["bound"], in_chunk(cohort.plans["local"].num_steps, HOW[name])
    )
    assert (out["round"] == 4).all()
    for row in real:
        key = rng.stream(state.key, "engine.local", 4, int(cohort.client_id[row]))
        np.testing.assert_array_equal(out["key"][row], jax.random.key_data(key))
        first = data.partition.train.row[np.cumsum([0, *SIZES])[cohort.client_id[row]]]
        assert out["rows"][row, 0] == first
    other, _ = jax.jit(functools.partial(update, "other"))()
    np.testing.assert_array_equal(other["position"], cohort.plans["other"].position)


@pytest.mark.parametrize("name", ["one", "two", "sharded"])
@pytest.mark.parametrize("reduce", [False, True])
def test_optimizer_states_are_kept(reduce, name, problem):
    """What a client's training ended with, beside whatever else its update returns.

    Rows of absent clients stay; a training with a state of its own writes nothing.
    """
    task, state, cohort, data = problem
    how, weight = task._replace(execution=HOW[name]), jnp.full(8, 1 / 8)

    def trained(client, opt_state):
        nothing = jnp.zeros(()), jnp.zeros((), jnp.int32)
        own, persists = client.own, opt_state is not None
        return each_client.Trained(own, (), opt_state, nothing, persists=persists)

    def fn(client, shared):
        first = trained(client, client.opt_state + client.id)
        out = {"second": trained(client, None), "first": first}
        return (out, client.own) if reduce else out

    given = {"own": jnp.arange(8.0), "reduce": weight if reduce else None}
    out, *total, after = jax.jit(
        lambda: each_client.update(fn, how, state, cohort, data, **given)
    )()
    ids = np.asarray(cohort.client_id[cohort.row_mask])
    expected = np.arange(8) * 100
    expected[ids] += ids
    np.testing.assert_array_equal(after.opt_state, expected)
    assert int(after.round) == 4 and out["second"].opt_state is None
    np.testing.assert_allclose(total, [3.5] if reduce else [])


def test_two_trainings_cannot_both_keep_a_state(problem):
    """One line says which of them to change, and how."""
    task, state, cohort, data = problem

    def fn(client, shared):
        nothing = jnp.zeros(()), jnp.zeros((), jnp.int32)
        one = each_client.Trained((), (), client.opt_state, nothing, persists=True)
        return one, one

    how = task._replace(execution=HOW["one"])
    with pytest.raises(ValueError, match=r"two trainings .* client.fresh\(\)"):
        each_client.update(fn, how, state, cohort, data)


def test_private_rows_are_what_a_client_brings(problem):
    """Unless an update is given other rows."""
    task, state, cohort, data = problem
    how = task._replace(execution=HOW["two"])
    state = state.replace(clients=jnp.arange(8) * 3)
    out, _ = each_client.update(lambda c, _: c.own, how, state, cohort, data)
    real = np.asarray(cohort.row_mask)
    np.testing.assert_array_equal(out[real], cohort.client_id[real] * 3)


def test_one_after_another_in_an_order_by_client(problem):
    """A client's place is its own draw's, not its row's; padding rows take no step."""
    task, state, cohort, data = problem

    def order(cohort):
        def fn(client, carry):
            index, found = carry
            row = jnp.stack([client.id, client.own, client.bound])
            return index + 1, found.at[index].set(row)

        start = (0, jnp.zeros((8, 3), jnp.int32))
        own = cohort.client_id * 10
        given = (fn, task, state, cohort, data)
        count, found = each_client.in_turn(*given, start=start, own=own)
        return np.asarray(found)

    found = order(cohort)
    real = int(cohort.row_mask.sum())
    ids = np.asarray(cohort.client_id[cohort.row_mask])
    key = rng.stream(state.key, "engine.order", 4)
    draws = [jax.random.uniform(jax.random.fold_in(key, int(n))) for n in ids]
    np.testing.assert_array_equal(found[:real, 0], ids[np.argsort(draws)])
    np.testing.assert_array_equal(found[:real, 1], found[:real, 0] * 10)
    num_steps = np.asarray(cohort.plans["local"].num_steps[cohort.row_mask])
    steps = dict(zip(ids, num_steps, strict=True))
    assert [steps[n] for n in found[:real, 0]] == list(found[:real, 2])
    assert (found[real:, 2] == 0).all()


def test_levels_are_python_numbers(problem):
    """`fn` is traced with 1, 2, 3, which may decide shapes; a level says which runs."""
    task, state, cohort, data = problem

    def fn(client, shared, level):
        return jnp.ones(level).sum()

    how = task._replace(execution=HOW["two"])
    out, _ = each_client.update(fn, how, state, cohort, data, levels=3)
    np.testing.assert_array_equal(out, [1, 1, 2, 2, 2, 2, 3, 3])


@pytest.mark.parametrize("fixed", [(), (("local", 6),)])
def test_each_architecture_runs_its_own_clients(fixed, problem):
    """`fn` is traced with each model; sums are of all, rows and states by group.

    Clients of another architecture take no step, whatever they take in theirs.
    """
    task, state, cohort, data = problem
    models = small.linear("first"), small.linear("second")
    group = np.arange(8) % 2
    how = task._replace(client_models=models, group_of_client=group)
    how = how._replace(execution=HOW["two"], fixed_steps=fixed)
    state = state.replace(opt_state=(jnp.arange(4.0), jnp.arange(4.0) * 10))
    slot = jnp.where(cohort.row_mask, cohort.client_id // 2, 8)
    cohort = cohort.replace(row=slot)
    nothing = jnp.zeros(()), jnp.zeros((), jnp.int32)
    seen = []

    def fn(client, shared):
        seen.append(client.model.name)
        state = client.opt_state + 1
        one = each_client.Trained((), (), state, nothing, persists=True)
        return (one, client.own), jnp.stack([client.own, client.bound > 0]) * 1.0

    own = jnp.arange(8) + 1, jnp.arange(8) + 101
    given = {"own": own, "reduce": cohort.row_mask * 1.0}
    here = each_client.Round(how, state, cohort, data, by_architecture=True)
    out, total, here = here.update(fn, **given)
    assert set(seen) == {"first", "second"}
    members = np.asarray(cohort.row_mask) & (group[cohort.client_id % 8] == 1)
    others = np.asarray(cohort.row_mask) & ~members
    expected = own[0][others].sum() + own[1][members].sum()
    np.testing.assert_allclose(total, [expected, members.sum() + others.sum()])
    for number, (mine, scale) in enumerate(((others, 1), (members, 10))):
        np.testing.assert_array_equal(out[number][1][mine], own[number][mine])
        found = np.arange(4.0) * scale
        found[np.asarray(slot)[mine]] += 1
        np.testing.assert_array_equal(here.state.opt_state[number], found)


def test_fixed_steps_are_no_bound_to_ask_for(problem):
    """The number of turns is in the program, and steps behind a client's own add 0."""
    task, state, cohort, data = problem

    def fn(client, shared):
        def step(index, total):
            return total + jnp.where(index < client.plan.num_steps, 1.5 + index, 0)

        return client.at_most(9).run(step, jnp.float32(0))

    def total(task):
        given = {"data": data, "shared": ()}
        return each_client.update(fn, task, state, cohort, **given)[0]

    fixed = task._replace(fixed_steps=(("local", 6),))
    np.testing.assert_array_equal(total(fixed), total(task))
    texts = [str(jax.make_jaxpr(lambda one=one: total(one))()) for one in (task, fixed)]
    assert "while[" in texts[0] and "while[" not in texts[1]


def test_at_most_and_fresh(problem):
    """Fewer steps for a client and its chunk's loop, no kept state; nothing else."""
    data = problem[-1]
    client = small.client(data, small.plan(SIZES), 5, bound=9, opt_state=jnp.ones(2))
    assert int(client.plan.num_steps) == 6
    short = client.at_most(4)
    assert (int(short.plan.num_steps), int(short.bound)) == (4, 4)
    unchanged = client.at_most(7)
    assert (int(unchanged.plan.num_steps), int(unchanged.bound)) == (6, 7)
    assert client.fresh().opt_state == ()
    chex.assert_trees_all_equal(client.fresh().plan, client.plan)


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
def test_devices_communicate_at_the_end_alone(reduce, stays, problem):
    """The compiled client update of four devices: results come together, no step does.

    Where rows are shared out, only sums come together.
    """
    task, state, cohort, data = problem
    how = execution.Execution(2, small.mesh_of(4), shares_rows=stays)
    everywhere = execution.replicated(how)
    hparams = local_training.LocalTraining(client_momentum=0.9)
    start = small.at_zero()

    def fn(client, server):
        trained = local_training.train(
            hparams, small.regression, server, client.fresh()
        )
        return trained.split() if reduce else trained

    def update(cohort, data, start, weight):
        return each_client.update(
            fn,
            task._replace(execution=how),
            state.replace(opt_state=()),
            cohort,
            data,
            shared=start,
            reduce=weight if reduce else None,
        )

    text = (
        jax.jit(
            update,
            in_shardings=everywhere,
            out_shardings=None if stays else everywhere,
        )
        .lower(cohort, data, start, jnp.full(8, 1 / 8))
        .compile()
        .as_text()
    )
    words = ["all-to-all", "collective-permute", "reduce-scatter"]
    words += ["all-gather"] * stays + ["all-reduce"] * (not reduce)
    for word in words:
        assert word not in text
    # Once for all, in the main computation: not in a loop over chunks or steps.
    main = text[text.index("ENTRY") :]
    a_call = r" all-(?:gather|reduce)(?:-start)?\("
    calls = re.findall(a_call, text)
    assert len(calls) == len(re.findall(a_call, main))
    # The sum's leaves, the loss and its count; all else that a client keeps is its own.
    leaves = len(jax.tree.leaves(start))
    assert (reduce or not stays) <= len(calls) <= leaves + 4


@pytest.mark.parametrize("count", [4, 1])
def test_clients_know_how_many_they_are(count, problem):
    """Those of a chunk, or one after another."""
    task, state, cohort, data = problem
    device = python_types.SimpleNamespace(platform="tpu")
    found = []

    def fn(client, shared):
        first = jnp.zeros(())

        def step(index, carry):
            found.append(execution.setting())
            return carry

        return client.run(step, first)

    task = task._replace(execution=execution.Execution(count, device=device))
    each_client.update(fn, task, state, cohort, data)
    assert set(found) == {execution.Setting("tpu", count)}
