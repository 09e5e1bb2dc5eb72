"""Rows: take, put, chunks, and no communication in the clients' computation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import local, options, rows, types
from launch import build


def mesh_of(count):
    """A mesh over the first `count` fake devices."""
    return jax.make_mesh(
        (count,),
        ("clients",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:count],
    )


def test_take_and_put_ignore_padding_rows():
    """Padding rows (K) read something and write nothing."""
    table = {"a": jnp.arange(12.0).reshape(4, 3)}
    row = jnp.array([2, 4, 0])
    taken = rows.take(table, row)
    np.testing.assert_array_equal(taken["a"][0], table["a"][2])
    after = rows.put(table, row, {"a": jnp.full((3, 3), -1.0)})["a"]
    np.testing.assert_array_equal(after[jnp.array([1, 3])], table["a"][1:4:2])
    assert (after[jnp.array([0, 2])] == -1).all()


@pytest.mark.parametrize(
    ("num_rows", "chunk", "devices", "size"),
    [(10, 4, 1, 12), (10, 5, 1, 10), (10, 16, 1, 10), (10, 1, 4, 12), (9, 2, 4, 16)],
)
def test_padded_size(num_rows, chunk, devices, size):
    """A cohort fills whole chunks on every device."""
    mesh = mesh_of(devices) if devices > 1 else None
    assert rows.padded_size(num_rows, types.Execution(chunk, mesh)) == size


@pytest.mark.parametrize("execution", ["one", "two", "all", "sharded"])
def test_over_clients_bound_is_the_longest_of_the_chunk(execution):
    """Every row sees its chunk's bound and its own data."""
    steps = jnp.array([1, 2, 3, 4, 5, 6, 7, 8], jnp.int32)
    chosen = {
        "one": types.Execution(1),
        "two": types.Execution(2),
        "all": types.Execution(8),
        "sharded": types.Execution(2, mesh_of(2)),
    }[execution]

    def fn(row, shared, bound):
        return {"sum": row + shared, "bound": bound}

    out = jax.jit(rows.over_clients(fn, chosen))(jnp.arange(8), jnp.array(10), steps)
    np.testing.assert_array_equal(out["sum"], np.arange(8) + 10)
    expected = np.asarray(steps).reshape(-1, chosen.chunk).max(1).repeat(chosen.chunk)
    np.testing.assert_array_equal(out["bound"], expected)


def test_rows_that_do_not_fill_chunks_are_refused():
    """The planner pads; a caller that forgot gets told."""
    with pytest.raises(ValueError, match="padded_size"):
        rows.over_clients(lambda row, shared, bound: row, types.Execution(4))(
            jnp.arange(6), (), jnp.ones(6, jnp.int32)
        )


def test_no_collective_in_the_sharded_client_update(unequal):
    """The compiled client update of four devices communicates nothing."""
    experiment = build.experiment(
        algo="fedavg", dataset=unequal, model="mlp", devices=4, clients_per_round=4
    )
    execution = experiment.task.execution
    assert execution.mesh.size == 4
    model = experiment.task.server_model
    hparams = options.LocalTraining()
    cohort = jax.tree.map(jnp.asarray, experiment.cohorts(0, 0))
    data = experiment.data.replace(
        partition=jax.tree.map(lambda leaf: leaf[0], experiment.data.partition)
    )
    params, stats = model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))

    def update(row, shared, bound):
        client_id, plan = row
        data, params = shared
        return local.train(
            hparams,
            (local.Objective(local.cross_entropy_loss(model)),),
            params,
            stats,
            data=data,
            client_id=client_id,
            plan=plan,
            bound=bound,
            key=jax.random.key(0),
            round=jnp.zeros((), jnp.int32),
        ).params

    sharded = jax.NamedSharding(execution.mesh, jax.P("clients"))
    everywhere = rows.replicated(execution)
    plan = cohort.plans["local"]
    compiled = jax.jit(
        rows.over_clients(update, execution),
        in_shardings=(sharded, everywhere, sharded),
        out_shardings=sharded,
    ).lower((cohort.client_id, plan), (data, params), plan.num_steps)
    text = compiled.compile().as_text()
    for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert word not in text


def test_repeat_has_rows_of_its_own():
    """repeat stacks equal rows."""
    stacked = rows.repeat({"a": jnp.arange(3.0)}, 2)
    chex.assert_trees_all_equal(stacked, {"a": jnp.array([[0.0, 1, 2]] * 2)})
