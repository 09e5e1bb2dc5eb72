"""Private rows shared out over devices: where they are, and in which order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import execution
from fedjax_pfl.rows import slots, tiled, views
from tests.fedjax_pfl import small


@pytest.mark.parametrize("num_clients, devices", [(8, 4), (10, 4), (3, 4), (7, 1)])
def test_layout(num_clients, devices):
    """Client k is on device k mod D; there are as many rows for each device."""
    layout = slots.Layout(num_clients, devices)
    device, place = np.divmod(layout.slots, layout.rows_per_device)
    np.testing.assert_array_equal(device, np.arange(num_clients) % devices)
    np.testing.assert_array_equal(place, np.arange(num_clients) // devices)
    assert layout.num_rows % devices == 0
    np.testing.assert_array_equal(layout.clients[layout.slots], np.arange(num_clients))
    assert (layout.clients == num_clients).sum() == layout.num_rows - num_clients


@pytest.fixture
def on_devices():
    """Ten clients on four devices: the layout, and two variants' rows by client."""
    layout = slots.Layout(10, 4)
    how = execution.Execution(mesh=small.mesh_of(4), shares_rows=True)
    rows = {
        "a": np.arange(60.0, dtype=np.float32).reshape(2, 10, 3),
        "b": np.arange(20).reshape(2, 10),
    }
    return layout, how, rows


@pytest.mark.parametrize("piece", [8, 1 << 20])
def test_there_and_back(on_devices, piece, monkeypatch):
    """Rows in slots and in the order of clients again, in pieces of any size."""
    monkeypatch.setattr(views, "PIECE_BYTES", piece)
    layout, how, rows = on_devices
    placed = tiled.place(layout.in_slots(rows), how)
    assert placed["a"].addressable_shards[0].data.shape == (2, 3, 3)
    joined = jax.tree.map(lambda leaf: views.Joined([leaf, leaf[:1]]), placed)
    back = jax.tree.map(views.materialised, layout.by_client(joined))
    for name, leaf in rows.items():
        np.testing.assert_array_equal(back[name], np.concatenate([leaf, leaf[:1]]))


def test_take_and_put(on_devices):
    """Each device reads and writes its own rows, and sends nothing."""
    layout, how, rows = on_devices
    placed = tiled.place(layout.in_slots(rows), how)
    # Two rows for each device: clients 0 and 8, 5, 6, and none of the last.
    chosen = np.array([0, 8, 10, 5, 6, 10, 10, 10])
    is_real = chosen < 10
    row = np.append(layout.slots, layout.num_rows)[chosen]
    where = jax.NamedSharding(how.mesh, jax.P("clients"))
    row = jax.device_put(row.astype(np.int32), where)

    def both(tree, row):
        with execution.over_devices(how):
            taken = slots.take(tree, row)
            more = jax.tree.map(lambda leaf: leaf + 100, taken)
            return taken, slots.put(tree, row, more)

    mapped = jax.jit(jax.vmap(both, (0, None)))
    compiled = mapped.lower(placed, row).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and "all-reduce" not in text
    taken, put = compiled(placed, row)
    held = layout.slots
    for name, leaf in rows.items():
        found = np.asarray(taken[name])[:, is_real]
        np.testing.assert_array_equal(found, leaf[:, chosen[is_real]])
        expected = leaf.copy()
        expected[:, chosen[is_real]] += 100
        np.testing.assert_array_equal(np.asarray(put[name])[:, held], expected)


def test_rows_of_their_own_are_refused():
    rows = {"a": jnp.ones((1, 4, 2)), "b": jnp.full((1, 4), jnp.nan)}
    slots.check_equal(rows)
    rows["a"] = rows["a"].at[0, 3].set(2)
    with pytest.raises(ValueError, match="take --client_state=replicated"):
        slots.check_equal(rows)
