"""Clients in lanes: the same numbers as in chunks, and as few steps as lanes can do."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import each_client, execution, lanes, local_training, types
from tests.fedjax_pfl import small

# In the order of a planner: by steps; client 3 has no example, id 8 is a padding row.
SIZES = [3, 5, 1, 0, 2, 6, 5, 3]
ORDER = [8, 3, 2, 4, 0, 7, 1, 5]
HOW = {
    "two": execution.Execution(lanes=2),
    "three": execution.Execution(lanes=3),
    "more than rows": execution.Execution(lanes=20),
    "sharded": execution.Execution(mesh=small.mesh_of(2), lanes=2),
}
HPARAMS = local_training.LocalTraining(client_momentum=0.9, optimizer_state="persist")


@pytest.fixture(scope="module")
def problem():
    """(task, state with kept optimizer states, cohort, tables)."""
    data, model = small.tables(SIZES), small.linear()
    kept = small.opt_states(HPARAMS, small.at_zero().params, 8)
    state = types.RoundState.first((), (), jax.random.key(3)).replace(opt_state=kept)
    ids = jnp.array(ORDER)
    plans = {"local": small.plan([*SIZES, 0])}
    cohort = small.cohort(ids, 8, jax.tree.map(lambda leaf: leaf[ids], plans))
    task = types.Task(model, (model,), np.zeros(8), 8, 4, 0, 8, 6, (3,))
    return task, state, cohort, data


def train(client, server):
    """One training from the server's model, moved by what the client brings."""
    start = jax.tree.map(lambda leaf: leaf + client.own.astype(leaf.dtype), server)
    return local_training.train(HPARAMS, small.regression, start, client)


def updated(problem, how, fn=train, *, is_summed=False, **given):
    """What `each_client.update` gives, jitted; with a sum, by unequal weights."""
    task, state, cohort, data = problem
    weight = jnp.where(cohort.row_mask, jnp.arange(1.0, 9.0), 0)

    def round(state, cohort, data):
        return each_client.update(
            lambda *args: fn(*args).split() if is_summed else fn(*args),
            task._replace(execution=how),
            state,
            cohort,
            data,
            own=jnp.arange(8.0),
            shared=small.at_zero(),
            reduce=weight / weight.sum() if is_summed else None,
            **given,
        )

    *out, after = jax.jit(round)(state, cohort, data)
    return *out, after.opt_state


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("is_summed", [False, True])
def test_lanes_give_what_clients_alone_give(name, is_summed, problem):
    """Models, losses, kept optimizer states and sums; who has no step stays put."""
    expected = updated(problem, execution.Execution(1), is_summed=is_summed)
    found = updated(problem, HOW[name], is_summed=is_summed)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)
    trained = found[0]
    real = np.flatnonzero(problem[2].row_mask)
    sizes = np.array([*SIZES, 0])[np.array(ORDER)]
    np.testing.assert_array_equal(trained.loss[1][real], 2 * sizes[real])
    if not is_summed:
        idle = ORDER.index(3)
        assert float(trained.params[1]["b"][idle]) == idle


@pytest.mark.parametrize("name", ["two", "three", "sharded"])
def test_lanes_take_the_steps_that_the_host_counts(name, problem):
    """Each moment is one step in every lane; the longest client is dealt first."""
    moments = []

    def counted(client, server):
        def step(index, carry):
            jax.debug.callback(lambda _: moments.append(1), index)
            return carry + 1

        return client.run(step, jnp.zeros((), jnp.int32))

    found = updated(problem, HOW[name], counted)
    jax.effects_barrier()
    plan = problem[2].plans["local"]
    np.testing.assert_array_equal(found[0], np.maximum(plan.num_steps, 1))
    assert len(moments) == execution.executed_steps(plan.num_steps, HOW[name])


def test_steps_of_lanes():
    """The last row first, each to the lane that is free first; idle lanes count."""

    def executed(steps, width, mesh=None):
        how = execution.Execution(lanes=width, mesh=mesh)
        return execution.executed_steps(np.array(steps), how)

    assert executed([1, 2, 3, 10], 2) == 20
    assert executed([3, 3, 4, 5], 2) == 16  # 5 + 3 and 4 + 3
    assert executed([0, 0, 4, 5], 2) == 12  # rows without steps take one: 5 + 1, 4 + 1
    assert executed([1, 5], 8) == 10  # no more lanes than rows
    np.testing.assert_array_equal(executed([[1, 1, 1, 3], [2, 2, 2, 2]], 2), [6, 8])
    assert executed([1, 7, 1, 2], 2, small.mesh_of(2)) == 14 + 4


def twice(client, server):
    """Two trainings, as Ditto's."""
    first = train(client, server)
    return local_training.train(HPARAMS, small.regression, first.variables, client)


def never(client, server):
    """No training."""
    return client.own


def with_a_loop(client, server):
    """A loop over the client's examples before it trains, as FedMD's."""
    total = jax.lax.fori_loop(0, client.bound, lambda _, x: x + 1, jnp.zeros(()))
    return train(client.replace(own=client.own + total), server)


@pytest.mark.parametrize(
    ("fn", "given", "words"),
    [
        (twice, {}, "has 2 trainings, not one"),
        (never, {}, "has 0 trainings, not one"),
        (with_a_loop, {}, "has a loop besides its training"),
        (train, {"levels": 2}, "clients hold parts of a model"),
    ],
)
def test_what_is_not_one_training_is_refused(fn, given, words, problem):
    """While it is traced, by what is wrong."""
    with pytest.raises(lanes.UnfitError, match=words):
        updated(problem, HOW["two"], fn, **given)


def test_fewer_steps_fit(problem):
    """`at_most` shortens a client in a lane, too."""

    def short(client, server):
        return train(client.at_most(3), server)

    expected = updated(problem, execution.Execution(1), short)
    found = updated(problem, HOW["two"], short)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)
    seen = problem[2].plans["local"].num_steps.clip(max=3)
    np.testing.assert_array_equal(found[0].stats[1]["steps"] - np.arange(8), seen)
