"""Private rows shared out over devices: where they are, and how they travel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import execution, stacked
from fedjax_pfl.rows import exchange, slots, tiled, views
from tests.fedjax_pfl import small

K = 18


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
    most = np.bincount(device).max()
    assert layout.fullest(np.arange(num_clients)) == most
    assert layout.fullest(np.arange(1, num_clients)) == -(-(num_clients - 1) // devices)


@pytest.fixture
def on_devices():
    """Eighteen clients on four devices, and two variants' rows by client."""
    layout = slots.Layout(K, 4)
    how = execution.Execution(mesh=small.mesh_of(4), shares_rows=True)
    rows = {
        "a": np.arange(6.0 * K, dtype=np.float32).reshape(2, K, 3),
        "b": np.arange(2 * K).reshape(2, K),
    }
    return layout, how, rows


def in_slots(layout, rows):
    """Leaves [variants, K, ...] in the order of clients as those of the devices."""
    client = np.minimum(layout.clients, layout.num_clients - 1)
    return jax.tree.map(lambda leaf: leaf[:, client], rows)


@pytest.mark.parametrize("piece", [8, 1 << 20])
def test_there_and_back(on_devices, piece, monkeypatch):
    """Rows in slots and in the order of clients again, in pieces of any size."""
    monkeypatch.setattr(views, "PIECE_BYTES", piece)
    layout, how, rows = on_devices
    placed = tiled.place(in_slots(layout, rows), how)
    assert placed["a"].addressable_shards[0].data.shape == (2, 5, 3)
    joined = jax.tree.map(lambda leaf: views.Joined([leaf, leaf[:1]]), placed)
    back = jax.tree.map(views.materialised, layout.by_client(joined))
    for name, leaf in rows.items():
        np.testing.assert_array_equal(back[name], np.concatenate([leaf, leaf[:1]]))


def test_rows_of_several_processes(on_devices, monkeypatch):
    """Where a process has not all rows, every device gets some of each device's."""

    def gathered(leaf, variant, first, end):
        get = slots._gathered(leaf.sharding.mesh, end - first)
        return np.asarray(get(leaf, variant, first).addressable_data(0))

    monkeypatch.setattr(slots, "_of_each_device", gathered)
    monkeypatch.setattr(views, "PIECE_BYTES", 100)  # two rows of each
    layout, how, rows = on_devices
    placed = tiled.place(in_slots(layout, {"a": rows["a"]}), how)
    back = layout.by_client(views.joined([placed]))
    np.testing.assert_array_equal(views.materialised(back["a"]), rows["a"])


def test_behind(on_devices):
    """Integers stay as they are, whatever they wait for, Python's numbers too."""
    _, how, _ = on_devices
    known = 2, 0.5, True, np.uint32(2**32 - 1), jnp.array([jnp.nan, 1]), -jnp.inf
    known += jax.random.key(0), jnp.zeros((0, 3))
    with execution.over_devices(how):
        assert exchange.behind(jnp.arange(4), known).tolist() == [0, 1, 2, 3]


def _ragged(rows, out, begin, size, place, received, *, axis_name):
    """`jax.lax.ragged_all_to_all` for a CPU, which has none; nan if sizes differ."""
    sent = jax.lax.all_gather((rows, begin, size, place), axis_name)
    rows, *table = sent
    begin, size, place = (one[:, jax.lax.axis_index(axis_name)] for one in table)
    index = jnp.arange(len(out))
    for d in range(len(rows)):
        found = jnp.take(rows[d], begin[d] + index - place[d], axis=0, mode="clip")
        is_here = (index >= place[d]) & (index < place[d] + size[d])
        out = jnp.where(stacked.column(is_here, out), found, out)
    return jnp.where((size == received).all(), out, -99).astype(out.dtype)


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("room", [1, 130, 1 << 20])
def test_take_and_put(on_devices, room, is_ragged, monkeypatch):
    """Rows go to whatever device trains them and back, all at once or in parts.

    A row has 16 bytes for each of four devices: a part is one row, two, or all five.
    """
    monkeypatch.setattr(exchange, "TRAVELLING_BYTES", room)
    if is_ragged:
        monkeypatch.setattr(exchange, "RAGGED", ("cpu",))
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", _ragged)
    layout, how, rows = on_devices
    placed = tiled.place(in_slots(layout, rows), how)
    # Five places for each device, all of the first from the second one
    places = [1, 5, 13, 17, 9], [0, 8, 6, K, K], [K, 4, K, 2, 7], [K] * 5
    chosen = np.concatenate(places)
    is_real = chosen < K
    row = np.append(layout.slots, layout.num_rows)[chosen].astype(np.int32)

    def both(tree, row):
        with execution.over_devices(how):
            taken = exchange.take(tree, row)
            more = jax.tree.map(lambda leaf: leaf + 100, taken)
            return taken, *exchange.put(tree, row, more, jnp.int32(7))

    mapped = jax.jit(jax.vmap(both, (0, None)))
    compiled = mapped.lower(placed, row).compile()
    if not is_ragged:
        assert "all-to-all" in compiled.as_text()
        gathered = set(re.findall(r"= (\S+?)\{.* all-gather", compiled.as_text()))
        assert gathered <= {"s32[2,20]", "s32[20,2]"}  # the number of each client
    taken, put, number = compiled(placed, row)
    assert (number == 7).all()
    assert taken["a"].addressable_shards[0].data.shape == (2, 5, 3)
    held = layout.slots
    for name, leaf in rows.items():
        found = np.asarray(taken[name])[:, is_real]
        np.testing.assert_array_equal(found, leaf[:, chosen[is_real]])
        expected = leaf.copy()
        expected[:, chosen[is_real]] += 100
        np.testing.assert_array_equal(np.asarray(put[name])[:, held], expected)


def test_rows_of_several_peers(on_devices):
    """Slots [C, n] give leaves [C, n, ...], wherever the rows are."""
    layout, how, rows = on_devices
    placed = tiled.place(in_slots(layout, rows), how)
    peers = np.array([[3, 17, 0], [4, 4, 8], [16, 2, 5], [7, 1, 13]])

    def peers_rows(tree):
        with execution.over_devices(how):
            return exchange.take(tree, jnp.asarray(layout.slots[peers]))

    found = jax.jit(jax.vmap(peers_rows))(placed)
    for name, leaf in rows.items():
        np.testing.assert_array_equal(found[name], leaf[:, peers])


def test_finite_rows_stay_where_they_are(on_devices):
    """Those of the cohort count alone, whichever device has them."""
    layout, how, rows = on_devices
    rows["a"][1, 6, 2] = np.nan
    placed = tiled.place(in_slots(layout, rows), how)
    row = np.append(layout.slots, layout.num_rows).astype(np.int32)

    def finite(tree, row):
        with execution.over_devices(how):
            return exchange.are_finite(tree, row)

    mapped = jax.jit(jax.vmap(finite, (0, None)))
    assert mapped(placed, row[np.array([6, 1, K, 3])]).tolist() == [True, False]
    assert mapped(placed, row[np.array([0, 1, K, 3])]).tolist() == [True, True]


def test_rows_of_their_own_are_dealt(on_devices):
    """Row k before the first round is that of client k."""
    rows = {"a": jnp.ones((1, 4, 2)), "b": jnp.full((1, 4), jnp.nan)}
    assert slots.are_equal(rows)
    rows["a"] = rows["a"].at[0, 3].set(2)
    assert not slots.are_equal(rows)
    layout, how, rows = on_devices
    # There are more rows than clients.
    first = jax.tree.map(lambda x: np.concatenate([x, x[:, :2]], 1), rows)
    first = tiled.place(first, how)
    dealt = layout.dealt(first, tiled.of_rows(first, how))
    assert dealt["a"].addressable_shards[0].data.shape == (2, 5, 3)
    expected = in_slots(layout, rows)
    assert all((np.asarray(dealt[n]) == expected[n]).all() for n in rows)


def test_parts_of_all_devices_stay_the_same(on_devices):
    """Zeros below zero and no numbers included."""
    _, how, _ = on_devices
    tree = {
        "a": jnp.array([[-0.0, jnp.nan], [1, -jnp.inf], [2, 3], [0, 4]]),
        "b": jnp.array([True, False, True, True]),
        "c": jnp.arange(4, dtype=jnp.uint8),
    }
    with execution.over_devices(how):
        found = jax.jit(exchange.gathered)(tree)
    for name, leaf in tree.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes()
