"""Rows on the host: stores, slots, transfers, and the two forms of a saved state."""

import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import call as call_lib
from fedjax_pfl import checkpoint, execution, types
from fedjax_pfl.rows import hosted, kinds, slots, tiled, transfer, views
from fedjax_pfl.rows import store as store_lib
from tests.fedjax_pfl import small

NUM_CLIENTS = 9


def rows_of(num, seed=0):
    """Leaves [num, ...] of several types, one of them without elements."""
    gen = np.random.default_rng(seed)
    return {
        "weight": gen.normal(size=(num, 3, 2)).astype(np.float32),
        "half": np.asarray(jnp.asarray(gen.normal(size=(num, 3)), jnp.bfloat16)),
        "mask": gen.random((num, 5)) < 0.5,
        "count": gen.integers(0, 9, num).astype(np.int32),
        "none": np.zeros((num, 0), np.float32),
    }


def stacked(rows):
    return jax.tree.map(lambda leaf: leaf[None], rows)


def taken(rows, ids):
    return jax.tree.map(lambda leaf: leaf[ids], rows)


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert jax.tree.map(lambda a: a.dtype, one) == jax.tree.map(
        lambda a: a.dtype, other
    )


@pytest.mark.parametrize("in_file", [False, True])
def test_a_store_keeps_bits_and_types(in_file, tmp_path):
    rows, ids = rows_of(4), np.array([7, 0, 8, 3])
    common = taken(rows_of(1, seed=1), 0)
    folder = str(tmp_path) if in_file else ""
    store = store_lib.Store(common, NUM_CLIENTS, folder)
    assert store_lib.num_bytes(rows, 1) == 24 + 6 + 5 + 4
    store.write(ids, rows)
    assert_equal(store.read(ids), rows)
    np.testing.assert_array_equal(store.in_order(np.array([3, 7, 8])), [7, 8, 3])
    memory = store_lib.empty(rows, 1, 2, 4)
    assert {leaf.ctypes.data % store_lib.ALIGNMENT for leaf in memory} == {0}
    store.read(np.array([7, 0, 1, NUM_CLIENTS]), [leaf[1] for leaf in memory])
    found = dict(zip(sorted(rows), (leaf[1] for leaf in memory), strict=True))
    assert_equal(taken(found, slice(2)), taken(rows, slice(2)))
    for place in (2, 3):
        assert_equal(taken(found, place), common)
    assert store_lib.differ(found, common).tolist() == [True, True, False, False]


@pytest.mark.parametrize("in_file", [False, True])
def test_a_store_has_rows_of_those_that_trained(in_file, monkeypatch, tmp_path):
    """Parts of two rows, so that rows lie in several; a row may be written again."""
    monkeypatch.setattr(store_lib, "PART_BYTES", 2 * 4 + 1)
    folder = str(tmp_path) if in_file else ""
    common = np.arange(4, dtype=np.uint8)
    store = store_lib.Store(common, NUM_CLIENTS, folder)
    rows = np.random.default_rng(0).integers(9, 99, (NUM_CLIENTS, 4), np.uint8)
    for ids in ([7, 2, 5], [0], [5, 8]):
        store.write(np.array(ids), rows[ids])
    rows[5] = 100
    store.write(np.array([5]), rows[[5]])
    assert store.ids.tolist() == [0, 2, 5, 7, 8]
    asked = np.array([8, 1, 0, NUM_CLIENTS, 5, 7, 2])
    expected = [rows[8], common, rows[0], common, rows[5], rows[7], rows[2]]
    np.testing.assert_array_equal(store.read(asked), expected)
    parts = list(store.parts(asked[asked < NUM_CLIENTS], 0))
    assert max(map(len, parts)) == 2
    known = [row for row, id in zip(expected, asked, strict=True) if id < NUM_CLIENTS]
    np.testing.assert_array_equal(np.concatenate(parts), known)
    assert store.trained(np.array([1, 8, 3])).tolist() == [False, True, False]
    # A file has no name, so that nothing stays where a process was killed.
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = store_lib.Store(np.zeros(4, np.uint8), NUM_CLIENTS, str(tmp_path))
    with pytest.raises(OSError, match="--client_state=.*No space left"):
        store.write(np.array([1]), np.ones((1, 4), np.uint8))


@pytest.mark.parametrize("devices,expected", [(1, [2, 0, 1, 3]), (2, [1, 5, 6, 0])])
def test_slots_are_places_among_the_residents(devices, expected):
    """Of clients 1, 3, 6 and 8, which one device has in order, or two by parity."""
    clients = np.array([6, NUM_CLIENTS, 1], np.int32)
    peers = np.array([[3, 8], [0, 0], [6, 0]], np.int32)
    peer_mask = np.array([[True, True], [False, False], [True, False]])
    mask = clients < NUM_CLIENTS
    cohort = types.Cohort(clients, clients, mask, clients, peers, peer_mask, {})
    ids = cohort.needed
    assert ids.tolist() == [1, 3, 6, 8]
    layout = slots.Layout(NUM_CLIENTS, devices, 5)
    found = hosted.in_slots(cohort, ids, layout)
    of = dict(zip([6, 1, 3, 8], expected, strict=True))
    if devices == 2:
        of = {6: 0, 8: 1, 1: 5, 3: 6}
    none = max(5 * devices, NUM_CLIENTS)
    assert found.row.tolist() == [of[6], none, of[1]]
    assert found.peers.tolist() == [[of[3], of[8]], [none, none], [of[6], none]]
    assert found.client_id is clients and found.peer_id is peers
    np.testing.assert_array_equal(found.row_mask, mask)
    np.testing.assert_array_equal(found.peer_mask, peer_mask)
    line = layout.clients_of(ids)
    assert {client: line.tolist().index(client) for client in of} == of
    assert (line == NUM_CLIENTS).sum() == 5 * devices - 4
    # In a block without the cohort all is padding.
    other = hosted.in_slots(cohort, np.array([0, 2]), layout)
    assert not other.row_mask.any() and not other.peer_mask.any()


def test_blocks_have_each_client_once():
    made, _ = _hosted(num_variants=1)
    trained = np.array([2, 4, 8])
    made._stores[0].write(trained, rows_of(3))
    blocks = made._split([0], np.array([3, 4]), None)
    assert [block.tolist() for block in blocks] == [[2, 3, 4, 8], [0, 1, 5, 6], [7]]
    wanted = np.zeros(NUM_CLIENTS, bool)
    wanted[[4, 7]] = True
    blocks = made._split([0], np.array([3, 5]), wanted)
    assert [block.tolist() for block in blocks] == [[3, 4, 5, 7]]
    # Two devices with two rows each: even clients on one, odd ones on the other.
    made.layout = slots.Layout(NUM_CLIENTS, 2, 2)
    blocks = made._split([0], np.array([3, 4]), None)
    expected = [[1, 2, 3, 4], [0, 5, 7, 8], [6]]
    assert [block.tolist() for block in blocks] == expected


def test_a_window_has_room_for_the_seed_that_needs_most():
    made, _ = _hosted(num_variants=2)
    few, many = small.cohort([8], NUM_CLIENTS), small.cohort([1, 5, 6], NUM_CLIENTS)
    for drawn in ([few, many], [many, few]):
        fits = made.room()
        assert fits(drawn) and fits(drawn)
        other = small.cohort([0, 5, 7], NUM_CLIENTS)
        assert not fits([other if one is many else one for one in drawn])
    most = small.cohort(range(6), NUM_CLIENTS)
    for drawn in ([few, most], [most, few]):
        made.layout = made.layout._replace(most=4)
        made.grow(drawn)
        assert made.layout.rows_per_device >= 6


def _state(rows, num_variants):
    key = jax.random.split(jax.random.key(0), num_variants)
    server = jnp.arange(2.0 * num_variants).reshape(num_variants, 2)
    return types.RoundState(server, rows, key, jnp.zeros(num_variants, jnp.int32))


def _how(devices):
    mesh = small.mesh_of(devices) if devices > 1 else None
    return execution.Execution(mesh=mesh, shares_rows=devices > 1)


def _call(num_variants):
    pairs = tuple((variant, variant) for variant in range(num_variants))
    seeds = tuple(range(num_variants))
    return call_lib.Call(range(num_variants), seeds, pairs, np.zeros(0), {}, None)


def _hosted(num_variants, devices=1):
    """Rows of which the devices have four, and the state of all clients."""
    first = jax.tree.map(
        lambda leaf: np.repeat(leaf[:, None], 4, 1), rows_of(num_variants, seed=1)
    )
    state = _state(first, num_variants)
    layout = slots.Layout(NUM_CLIENTS, devices, 4 // devices)
    made = hosted.Hosted(layout, _how(devices), state)
    made.begin(_call(num_variants), jax.tree.map(jnp.asarray, state))
    whole = jax.tree.map(lambda leaf: np.repeat(leaf[:, :1], NUM_CLIENTS, 1), first)
    return made, _state(whole, num_variants)


def test_a_state_is_saved_in_two_forms(tmp_path):
    """Rows of trained clients and all rows: either is made of the other, in files."""
    made, whole = _hosted(num_variants=2)
    trained = [np.array([1, 5, 6]), np.array([0])]
    new = rows_of(NUM_CLIENTS, seed=2)
    for variant, ids in enumerate(trained):
        store, rows = made._stores[variant], taken(new, ids)
        store.write(ids, rows)
        for name, leaf in whole.clients.items():
            leaf[variant, ids] = rows[name]
    found = jax.tree.map(views.materialised, made.whole(whole))
    assert_equal(found.clients, whole.clients)
    parameters = whole.server, whole.clients
    assert made.digest(whole) == checkpoint.digest(parameters)

    checkpoint.save(tmp_path, 3, made.saved(whole), {})
    round, kept, _ = checkpoint.restore(tmp_path, *made.templates(whole))
    assert round == 3
    assert views.materialised(kept.ids).tolist() == [1, 5, 6, 0]
    assert views.materialised(kept.count).tolist() == [3, 1]
    every_device = kinds.Replicated(NUM_CLIENTS, _how(1))
    (state,) = every_device.loaded(kept, [_call(2)])
    assert_equal(state.clients, whole.clients)

    for form in (kept, whole):
        other, _ = _hosted(num_variants=2)
        other.loaded(form, [_call(2)])
        ids = [other._stores[variant].ids.tolist() for variant in range(2)]
        assert ids == [[1, 5, 6], [0]]
        again = jax.tree.map(views.materialised, other.whole(whole))
        assert_equal(again.clients, whole.clients)


def test_a_store_of_one_of_two_processes(monkeypatch):
    """All know who has trained, in the same places; rows of others take no memory."""
    rows, stores = rows_of(NUM_CLIENTS), []
    common = taken(rows_of(1, seed=1), 0)
    for own in range(2):
        monkeypatch.setattr(jax, "process_index", lambda own=own: own)
        stores.append(store_lib.Store(common, NUM_CLIENTS, "", (0, 0, 1)))
    for ids in (np.array([2, 0, 5]), np.array([5, 8, 4])):
        for own, store in enumerate(stores):
            store.claim(ids)
            for index, name in enumerate(sorted(rows)):
                store.fill(index, ids, rows[name][ids])
            mine = ids[(ids % 3 == 2) == bool(own)]
            assert_equal(store.read(mine), taken(rows, mine))
    assert [store.ids.tolist() for store in stores] == [[0, 2, 4, 5, 8]] * 2
    own_order, other_order = [s.in_order(np.array([8, 5, 2])) for s in stores]
    assert own_order.tolist() == other_order.tolist() == [2, 5, 8]
    assert [store._used.tolist() for store in stores] == [[2, 3]] * 2


def test_rows_travel_between_processes(monkeypatch):
    """Each process has its own bits afterwards, and those that all had stay."""
    rows = rows_of(5)["half"].copy()
    home, wanted = np.array([1, 0, -1, 1, 0]), rows.copy()
    others = np.zeros((2, 6), np.uint8)
    others[:] = rows[home == 1].view(np.uint8)

    def gathered(mine):
        assert mine.tolist() == wanted[home == 0].view(np.uint8).tolist()
        return np.stack([mine, others])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(store_lib.multihost_utils, "process_allgather", gathered)
    rows[home == 1] = 0
    store_lib.share(rows, home)
    np.testing.assert_array_equal(rows, wanted)


def _window(made, first, clients):
    """(slots by client, the window) of one round of one seed, with a padding row."""
    drawn = small.cohort([*clients, NUM_CLIENTS], NUM_CLIENTS)
    drawn = jax.tree.map(lambda leaf: np.asarray(leaf)[None], drawn)
    (cohort,), window = made.window(first, [drawn], 1)
    return dict(zip(clients, cohort.row[0, :-1], strict=True)), window


def _train(call, how, seed):
    """One round after which the devices have other rows, leaves [R, ...]."""
    rows = rows_of(jax.tree.leaves(call.state.clients)[0].shape[1], seed)
    values = tiled.place(stacked(rows), how)
    call.state, call.round = call.state.replace(clients=values), call.round + 1
    return rows


def _begun(made, whole):
    """The call of a run before its first round."""
    call, size = _call(1), made.layout.num_rows
    rows = jax.tree.map(lambda leaf: leaf[:, :size], whole.clients)
    call.state = whole.replace(clients=tiled.place(rows, made._how))
    return call


@pytest.mark.parametrize("devices", [1, 2])
def test_clients_have_their_rows_where_more_are_needed(devices):
    """Those that trained, on their devices, wherever they were before."""
    made, whole = _hosted(1, devices)
    call, (common, _) = _begun(made, whole), made._stores[0].common
    before, window = _window(made, 0, [0, 1, 2, 3])
    made.before(call, window)
    trained = _train(call, made._how, seed=3)
    many = [0, 1, 3, 4, 5, 6, 8]
    made.grow([small.cohort(many, NUM_CLIENTS)])
    assert made.layout.rows_per_device > 4 // devices
    after, ahead = _window(made, 1, many)
    made.during(call, ahead)
    made.before(call, ahead)
    found = jax.device_get(call.state.clients)
    for client, slot in after.items():
        assert slot // made.layout.rows_per_device == client % devices
        row = taken(trained, before[client]) if client in before else common
        assert_equal(taken(found, (0, slot)), row)
    made.after(call)
    kept, _ = made._stores[0].read(np.array([2]))
    assert_equal(kept, taken(trained, [before[2]]))


def test_blocks_have_the_rows_of_every_variant():
    """Also where one variant alone has trained, or needs more blocks than another."""
    made, whole = _hosted(num_variants=2)
    made._stores[1].write(np.array([4, 8]), rows_of(2, seed=2))
    call = _call(2)
    call.state = whole
    algorithm = types.Algorithm((), None, None, serving=lambda *_: ())
    drawn = [small.cohort(ids, NUM_CLIENTS) for ids in ([3, 4], [3, 5])]
    some = np.arange(NUM_CLIENTS) < 2
    samples = some, None
    for which, wanted in ((samples, (4, 9)), (samples[::-1], (9, 4))):
        seen = [], []
        for block in made.blocks(call, algorithm, drawn, which.__getitem__):
            rows = jax.device_get(block.state.clients)
            for variant, ids in enumerate(block.ids):
                expected, _ = made._stores[variant].read(ids)
                assert_equal(taken(rows, variant), expected)
                seen[variant].extend(ids[ids < NUM_CLIENTS])
        assert [len(set(one)) for one in seen] == [len(one) for one in seen]
        assert tuple(map(len, seen)) == wanted


def test_nothing_from_before_a_load_is_left():
    """Neither rows on the devices, nor those that have left them, nor common ones."""
    made, whole = _hosted(num_variants=1)
    call, new = _begun(made, whole), rows_of(NUM_CLIENTS, seed=2)
    _, first = _window(made, 0, [1, 5])
    _, second = _window(made, 1, [5, 6])
    made.before(call, first)
    _train(call, made._how, seed=3)
    made.during(call, second)
    made.before(call, second)
    assert made._leaving[0]

    common = taken(rows_of(1, seed=4), 0)
    store = store_lib.Store(common, NUM_CLIENTS)
    store.write(np.array([6, 8]), taken(new, [6, 8]))
    rows = store_lib.streamed([store], [store.ids], (2,))
    kept = whole.replace(clients=rows), (stacked(common), ())
    (state,) = made.loaded(store_lib.Kept(*kept, store.ids, np.array([2])), [call])
    rows = tiled.place(state.clients, made._how)
    call.state, call.round = state.replace(clients=rows), 0
    where, window = _window(made, 0, [6, 7])
    made.before(call, window)
    found = jax.device_get(call.state.clients)
    for client, row in ((6, taken(new, 6)), (7, common)):
        assert_equal(taken(found, (0, where[client])), row)
    made.after(call)
    every = np.arange(NUM_CLIENTS)
    assert_equal(made._stores[0].read(every)[0], store.read(every))


def test_clients_that_begin_apart_are_refused():
    made, whole = _hosted(num_variants=1)
    rows = jax.tree.map(lambda leaf: leaf[:, :4].copy(), whole.clients)
    made.begin(_call(1), whole.replace(clients=jax.tree.map(jnp.asarray, rows)))
    rows["count"][0, 2] += 1
    with pytest.raises(ValueError, match="row of its own.*omit it"):
        made.begin(_call(1), whole.replace(clients=jax.tree.map(jnp.asarray, rows)))


@pytest.mark.parametrize("devices", [1, 2])
def test_chunks_of_rows_leave_a_state_and_enter_it(devices, monkeypatch):
    """Two variants with clients of their own, two rows a chunk and device."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 2 * 2 * devices * 39)
    how, layout = _how(devices), slots.Layout(NUM_CLIENTS, devices, 4)
    table = rows_of(2 * layout.num_rows)
    state = jax.tree.map(lambda x: x.reshape(2, layout.num_rows, *x.shape[1:]), table)
    rows = tiled.place(state, how)
    ids = [np.array([8, 2, 5, 3, 0]), np.array([7])]
    where = [layout.slots_of(one) for one in ids]
    if devices == 1:
        ids, where = [one[:4] for one in ids], [layout.slots_of(o[:4]) for o in ids]
    cut = list(transfer.chunks(ids, where, layout, 39))
    assert len(cut) == 2
    expected, new = jax.tree.map(np.copy, state), rows_of(NUM_CLIENTS, seed=1)
    for chunk in cut:
        found = transfer.taken(rows, chunk, how)
        values = jax.tree.map(np.zeros_like, jax.device_get(found))
        parts = jax.tree.map(lambda leaf, c=chunk: transfer.of_devices(leaf, c), found)
        for variant, device, mine, place in chunk.parts():
            slot = where[variant][[ids[variant].tolist().index(i) for i in mine]]
            assert set(slot // layout.rows_per_device) == {device}
            of_device = {name: leaf[device] for name, leaf in parts.items()}
            there = taken(of_device, (variant, slice(len(mine))))
            assert_equal(there, taken(state, (variant, slot)))
            for name, leaf in values.items():
                leaf[variant, place] = new[name][mine]
                expected[name][variant, slot] = new[name][mine]
        rows = transfer.put(rows, chunk, tiled.place(values, how), how)
    assert_equal(jax.device_get(rows), expected)


@pytest.mark.parametrize("row_bytes, size", [(39, 2), (1000, 1), (0, 4)])
@pytest.mark.parametrize("longer", [0, 1])
def test_chunks_have_all_clients(row_bytes, size, longer, monkeypatch):
    """One row or more, as many as fit, of the variant that has most of them too."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 2 * 2 * 2 * 39)
    layout = slots.Layout(NUM_CLIENTS, 2, 4)
    ids = [np.array([7]), np.array([7])]
    ids[longer] = np.array([8, 2, 5, 3, 0])
    where = [layout.slots_of(one) for one in ids]
    cut = list(transfer.chunks(ids, where, layout, row_bytes))
    assert len(cut) == -(-3 // size)  # clients 8, 2 and 0 have the same device
    assert {chunk.slot.shape for chunk in cut} == {(2, 2 * size)}
    travelled = [[], []]
    for chunk in cut:
        for variant, device, mine, place in chunk.parts():
            assert (mine % 2 == device).all()
            slot = chunk.slot[variant, place] + device * layout.rows_per_device
            travelled[variant] += zip(mine.tolist(), slot.tolist(), strict=True)
    for variant in range(2):
        pairs = zip(ids[variant].tolist(), where[variant].tolist(), strict=True)
        assert sorted(travelled[variant]) == sorted(pairs)


def test_a_client_has_trained_if_any_leaf_differs():
    """Not only the last one."""
    rows = [np.zeros((1, 4, 2), np.float32), np.zeros((1, 4), np.float32)]
    rows[0][0, 1], rows[1][0, 2] = 1, 1
    found = store_lib.Found(None, rows, 2, [np.arange(4)], None)
    common = [np.zeros((1, 2), np.float32), np.zeros(1, np.float32)]
    assert [one.tolist() for one in found.other_than(common, 4)] == [[1, 2]]
