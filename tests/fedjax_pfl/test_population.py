"""Rows on the host: layouts, stores, slots, and the two forms of a saved state."""

import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pfl import checkpoint, execution, types
from fedjax_pfl.rows import store as population
from fedjax_pfl.rows import views

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


def test_a_layout_keeps_bits_and_types():
    rows = rows_of(4)
    layout = population.Layout(stacked(rows))
    records = layout.pack(rows)
    assert records.shape == (4, layout.num_bytes) == (4, 24 + 6 + 5 + 4)
    assert_equal(layout.unpack(records), rows)
    twice = layout.unpack(np.stack([records, records]))
    assert_equal(twice, jax.tree.map(lambda leaf: np.stack([leaf, leaf]), rows))


@pytest.mark.parametrize("in_file", [False, True])
def test_a_store_has_rows_of_those_that_trained(in_file, monkeypatch, tmp_path):
    """Parts of two rows, so that rows lie in several; a row may be written again."""
    monkeypatch.setattr(population, "PART_BYTES", 2 * 4 + 1)
    folder = str(tmp_path) if in_file else ""
    common = np.arange(4, dtype=np.uint8)
    store = population.Store(common, NUM_CLIENTS, folder)
    rows = np.random.default_rng(0).integers(9, 99, (NUM_CLIENTS, 4), np.uint8)
    for ids in ([7, 2, 5], [0], [5, 8]):
        store.write(np.array(ids), rows[ids])
    rows[5] = 100
    store.write(np.array([5]), rows[[5]])
    assert store.ids.tolist() == [0, 2, 5, 7, 8]
    asked = np.array([8, 1, 0, NUM_CLIENTS, 5, 7, 2])
    expected = [rows[8], common, rows[0], common, rows[5], rows[7], rows[2]]
    np.testing.assert_array_equal(store.read(asked), expected)
    parts = list(store.parts(asked))
    assert max(map(len, parts)) == 2
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    assert store.have_trained(np.array([1, 8]))
    assert not store.have_trained(np.array([1, 3]))
    # A file has no name, so that nothing stays where a process was killed.
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    store = population.Store(np.zeros(4, np.uint8), NUM_CLIENTS, str(tmp_path))
    with pytest.raises(OSError, match="--client_state=.*No space left"):
        store.write(np.array([1]), np.ones((1, 4), np.uint8))


def test_slots_are_places_among_the_residents():
    clients = np.array([6, NUM_CLIENTS, 1], np.int32)
    peers = np.array([[3, 8], [0, 0], [6, 0]], np.int32)
    peer_mask = np.array([[True, True], [False, False], [True, False]])
    mask = clients < NUM_CLIENTS
    cohort = types.Cohort(clients, clients, mask, clients, peers, peer_mask, {})
    ids = population.needed(cohort)
    assert ids.tolist() == [1, 3, 6, 8]
    found = population.mapped(cohort, ids, NUM_CLIENTS)
    assert found.row.tolist() == [2, NUM_CLIENTS, 0]
    assert found.peers.tolist() == [[1, 3], [0, 0], [2, 0]]
    assert found.client_id is clients and found.peer_id is peers
    np.testing.assert_array_equal(found.row_mask, mask)
    np.testing.assert_array_equal(found.peer_mask, peer_mask)
    # In a block without the cohort all is padding.
    other = population.mapped(cohort, np.array([0, 2]), NUM_CLIENTS)
    assert not other.row_mask.any() and not other.peer_mask.any()


def test_blocks_have_each_client_once():
    made = _population(num_variants=1)[0]
    trained = np.array([2, 4, 8])
    made._stores[0].write(trained, np.zeros((3, made.layout.num_bytes), np.uint8))
    blocks = made.blocks([0], np.array([3, 4]), None)
    assert [block.tolist() for block in blocks] == [[2, 3, 4, 8], [0, 1, 5, 6], [7]]
    wanted = np.zeros(NUM_CLIENTS, bool)
    wanted[[4, 7]] = True
    blocks = made.blocks([0], np.array([3, 5]), wanted)
    assert [block.tolist() for block in blocks] == [[3, 4, 5, 7]]


def _state(rows, num_variants):
    key = jax.random.split(jax.random.key(0), num_variants)
    server = jnp.arange(2.0 * num_variants).reshape(num_variants, 2)
    return types.RoundState(server, rows, key, jnp.zeros(num_variants, jnp.int32))


def _population(num_variants):
    """A population with four rows on the device, and the state of all clients."""
    first = jax.tree.map(
        lambda leaf: np.repeat(leaf[:, None], 4, 1), rows_of(num_variants, seed=1)
    )
    state = _state(first, num_variants)
    how = execution.Execution()
    made = population.Population(state, NUM_CLIENTS, how)
    made.begin(range(num_variants), state)
    whole = jax.tree.map(lambda leaf: np.repeat(leaf[:, :1], NUM_CLIENTS, 1), first)
    return made, _state(whole, num_variants)


def test_a_state_is_saved_in_two_forms(tmp_path):
    """Rows of trained clients and all rows: either is made of the other, in files."""
    made, whole = _population(num_variants=2)
    template = jax.eval_shape(lambda: made.resident(whole))
    trained = [np.array([1, 5, 6]), np.array([0])]
    new = rows_of(NUM_CLIENTS, seed=2)
    for variant, ids in enumerate(trained):
        store, rows = made._stores[variant], taken(new, ids)
        store.write(ids, made.layout.pack(rows))
        for name, leaf in whole.clients.items():
            leaf[variant, ids] = rows[name]
    assert_equal(
        jax.tree.map(views.materialised, made.whole(range(2), whole)).clients,
        whole.clients,
    )
    assert checkpoint.digest(made.whole(range(2), whole)) == checkpoint.digest(whole)

    checkpoint.save(tmp_path, 3, made.kept(range(2), whole), {})
    forms = [
        population.whole_template(template, NUM_CLIENTS),
        population.kept_template(template),
    ]
    round, kept, _ = checkpoint.restore(tmp_path, *forms)
    assert round == 3 and kept.ids.tolist() == [1, 5, 6, 0]
    assert kept.count.tolist() == [3, 1]
    assert_equal(population.expanded(kept, NUM_CLIENTS).clients, whole.clients)

    for form in (kept, whole):
        other, _ = _population(num_variants=2)
        other.load(range(2), form)
        assert [other.ids(0).tolist(), other.ids(1).tolist()] == [[1, 5, 6], [0]]
        again = jax.tree.map(views.materialised, other.whole(range(2), whole))
        assert_equal(again.clients, whole.clients)


def test_clients_that_begin_apart_are_refused():
    made, whole = _population(num_variants=1)
    rows = jax.tree.map(lambda leaf: leaf[:, :4].copy(), whole.clients)
    made.begin([0], whole.replace(clients=rows))
    rows["count"][0, 2] += 1
    with pytest.raises(ValueError, match="row of its own.*omit it"):
        made.begin([0], whole.replace(clients=rows))
