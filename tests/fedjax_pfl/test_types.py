"""Shared types: what a task tells, whose row is whose, states and served models."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import rng, types
from tests.fedjax_pfl import small


def task(*names, server="a"):
    """A task of architectures by name; client k has the (k mod n)th."""
    models = tuple(small.linear(name) for name in names)
    group = np.arange(5) % len(models)
    return types.Task(small.linear(server), models, group, 5, 4, 0, 5, 3, (3,))


def test_the_one_architecture():
    """Of clients, and of all; another is refused with what to change."""
    assert task("b").client_model.name == "b"
    assert task("a").model.name == "a"
    with pytest.raises(ValueError, match="--client_model=a,b: .*one architecture;"):
        _ = task("a", "b").client_model
    with pytest.raises(ValueError, match="--client_model=b: .* --model=a; omit"):
        _ = task("b").model


def test_members_of_a_group():
    """In the order of their private rows."""
    np.testing.assert_array_equal(task("a", "b").members(1), [1, 3])
    np.testing.assert_array_equal(task("a").members(0), np.arange(5))


def test_the_common_initialisation():
    """Whoever has a model starts from this: named by the root key alone."""
    one = task("a")
    key = jax.random.key(3)
    start = one.init(one.model, key)
    expected = one.model.init(rng.stream(key, "engine.init"), jnp.zeros((1, 3)))
    chex.assert_trees_all_equal(start, types.Variables(*expected))
    other = one.init(one.model, jax.random.key(4))
    assert (start.params[0]["w"] != other.params[0]["w"]).any()


def test_rows_and_their_owners():
    """Also of clients without rows, and of rows behind the last client's."""
    rows = small.client_rows(np.array([8, 5, 9, 2, 7, 1]), [2, 0, 3], padding=2)
    np.testing.assert_array_equal(rows.owner(), [0, 0, 2, 2, 2, 3, 3])
    np.testing.assert_array_equal(rows.of(jnp.int32(2))(jnp.array([2, 0])), [7, 9])
    # The official split: test rows that nobody owns.
    nobody = types.ClientRows(jnp.arange(4), *(jnp.zeros(3, jnp.int32),) * 2)
    np.testing.assert_array_equal(nobody.owner(), np.full(4, 3))


def test_owners_of_the_rows_that_adapt():
    """Those of clients that never train come last, in the order of these clients."""
    train = small.client_rows(np.array([8, 5, 9]), [2, 0, 1, 0])
    unseen = small.client_rows(np.array([2, 7, 1]), [0, 2, 0, 1])
    part = types.Partition(train, train, jnp.zeros(0, jnp.int32), unseen=unseen)
    np.testing.assert_array_equal(part.adapting.owner(), [0, 0, 2, 1, 1, 3])
    few = types.ClientRows(jnp.arange(5), jnp.array([0, 3, 3]), jnp.array([3, 2, 0]))
    np.testing.assert_array_equal(few.owner(), [0, 0, 0, 1, 1])


def test_images_are_normalised_when_gathered():
    """Bytes stay bytes on the device; padding reads row 0."""
    data = small.tables([4]).replace(
        image=jnp.arange(8, dtype=jnp.uint8).reshape(4, 2),
        mean=jnp.array([1.0, 2.0]),
        scale=jnp.array([0.5, 2.0]),
    )
    image, label = data.gather(jnp.array([[3, -1], [1, 0]]))
    expected = (np.array([[[6, 7], [0, 1]], [[2, 3], [0, 1]]]) - [1, 2]) * [0.5, 2]
    np.testing.assert_allclose(image, expected)
    assert image.dtype == jnp.float32
    np.testing.assert_array_equal(label, np.asarray(data.label)[[[3, 0], [1, 0]]])


def test_label_counts():
    """Train rows alone, of each client and class."""
    data = small.tables([4, 0, 3], test=[5, 5, 5])
    start, rows = (0, 4, 4, 7), np.asarray(data.partition.train.row)
    expected = [
        np.bincount(np.asarray(data.label)[rows[start[k] : start[k + 1]]], minlength=4)
        for k in range(3)
    ]
    np.testing.assert_array_equal(data.label_counts(4), expected)


def test_states_follow_one_another():
    """A round later; what did not change is what it was."""
    state = types.RoundState.first(1, 2, jax.random.key(0)).replace(opt_state=3)
    assert int(state.round) == 0 and state.opt_state == 3
    later = state.after(server=9).after(clients=8)
    assert int(later.round) == 2 and int(state.round) == 0
    assert (later.server, later.clients, later.opt_state) == (9, 8, 3)
    assert later.key is state.key
    cohort = small.cohort([2, 5, 0], 5)
    written = state.replace(clients=jnp.zeros(5)).after(cohort, jnp.arange(1.0, 4.0))
    np.testing.assert_array_equal(written.clients, [3, 0, 1, 0, 0])
    assert int(written.round) == 1
    with pytest.raises(TypeError):
        state.after(sever=9)


def test_served_models():
    """One for all, a row for each, or made where it is needed."""
    model, mask = small.linear(), jnp.array([True, False, True])
    one = types.Serving.one(model, "model", mask)
    assert one.variables(None) == "model"
    np.testing.assert_array_equal(one.client_id, [0, 1, 2])
    each = types.Serving.each(model, {"w": jnp.ones((3, 2))}, mask=mask)
    np.testing.assert_array_equal(each.client_id, [0, 1, 2])
    assert each.mask is mask and each.variables("row") == "row"
    built = types.Serving.each(
        model,
        {"w": jnp.ones((2, 2))},
        client_id=[4, 1],
        shared=10,
        build=lambda shared, row: shared + row,
    )
    np.testing.assert_array_equal(built.client_id, [4, 1])
    assert built.mask.all() and built.variables(5) == 15


def test_who_serves_by_default():
    """The server's first model, everybody."""
    model = small.linear()

    def server(state, data):
        return {"global": (model, state.server), "other": (model, None)}

    algorithm = types.Algorithm((), None, None, server=server)
    state = types.RoundState.first("model", (), jax.random.key(0))
    (group,) = algorithm.serving_groups(state, None, None, 3)
    assert group.own is None and group.shared == "model" and group.model is model
    assert group.mask.tolist() == [True] * 3
    other = algorithm._replace(serving=lambda state, cohort, data: ("mine",))
    assert other.serving_groups(state, None, None, 3) == ("mine",)
