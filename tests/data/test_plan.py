"""Plans: a cohort is a pure function of (seed, round)."""

import jax
import numpy as np
import pytest

from data import plan
from fedjax_pfl import types

SIZES = np.array([[7, 12, 30, 5, 19, 8, 23], [11, 3, 9, 40, 6, 14, 21]])


def make(
    clients_per_round=4,
    specs=(types.PlanSpec("local", 2, 5),),
    depth=None,
    num_peers=0,
    execution=types.Execution(),
    seeds=(3, 4),
    sizes=SIZES,
):
    """A planner over seven clients of unequal sizes and two seeds."""
    num_clients = sizes.shape[1]
    return plan.planner(
        seeds=list(seeds),
        num_rows=sizes,
        client_group=np.zeros(num_clients, int),
        client_depth=np.full(num_clients, 3) if depth is None else np.asarray(depth),
        clients_per_round=clients_per_round,
        specs=specs,
        num_peers=num_peers,
        execution=execution,
    )


def equal(first, second):
    """Asserts that two cohorts are the same bit for bit."""
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def four_devices():
    """A mesh over the four fake devices."""
    return jax.make_mesh((4,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))


def test_cohort_is_a_pure_function_of_seed_and_round():
    """Any order of calls, any planner: the same tables."""
    one, two = make(num_peers=2), make(num_peers=2)
    forward = [one(0, r) for r in range(5)]
    for r in reversed(range(5)):
        two(1, r)
        equal(two(0, r), forward[r])


def test_seeds_and_rounds_differ():
    """Neither clients nor batches repeat between rounds and seeds."""
    cohorts = make()
    chosen = {tuple(cohorts(0, r).client_id.tolist()) for r in range(10)}
    assert len(chosen) > 3
    full = make(clients_per_round=7, sizes=np.stack([SIZES[0]] * 2))
    base = full(0, 0).plans["local"].position
    assert not np.array_equal(base, full(0, 1).plans["local"].position)
    assert not np.array_equal(base, full(1, 0).plans["local"].position)


def test_seed_counts_not_its_index():
    """Seed 4 as the second of two equals seed 4 alone."""
    alone = make(seeds=(4,), sizes=SIZES[1:])
    steps = alone(0, 2).plans["local"].position.shape[1]
    both = make()(1, 2)
    np.testing.assert_array_equal(alone(0, 2).client_id, both.client_id)
    np.testing.assert_array_equal(
        alone(0, 2).plans["local"].position,
        both.plans["local"].position[:, :steps],
    )


def test_clients_are_drawn_without_replacement_and_fairly():
    """Four different clients a round; over many rounds everyone is drawn."""
    cohorts = make()
    seen = np.zeros(7, int)
    for r in range(300):
        chosen = cohorts(0, r).client_id
        assert len(set(chosen.tolist())) == 4
        seen[chosen] += 1
    # Binomial with p = 4/7: 171 and a standard deviation of 8.6.
    assert np.abs(seen - 300 * 4 / 7).max() < 45


def test_every_row_once_per_epoch_and_the_last_short_batch_kept():
    """Each epoch is a permutation of the client's rows in batches of five."""
    cohort = make(clients_per_round=7)(0, 0)
    steps = cohort.plans["local"]
    for index, client in enumerate(cohort.client_id):
        rows = int(SIZES[0, client])
        per_epoch = -(-rows // 5)
        assert steps.num_steps[index] == 2 * per_epoch
        orders = []
        for epoch in range(2):
            part = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
            position = steps.position[index, part]
            assert (steps.epoch[index, part] == epoch).all()
            real = position[position >= 0]
            np.testing.assert_array_equal(np.sort(real), np.arange(rows))
            # Only the last batch of the epoch is short.
            assert (position[:-1] >= 0).all()
            assert (position[-1] >= 0).sum() == rows - 5 * (per_epoch - 1)
            orders.append(real.tolist())
        assert orders[0] != orders[1]
        assert (steps.position[index, 2 * per_epoch :] == -1).all()


def test_shapes_do_not_depend_on_the_round():
    """Padded to the largest client of all seeds: one compilation."""
    cohorts = make()
    shapes = {
        tuple(leaf.shape for leaf in jax.tree.leaves(cohorts(seed, r)))
        for seed in (0, 1)
        for r in range(6)
    }
    assert len(shapes) == 1
    assert cohorts(0, 0).plans["local"].position.shape == (4, 2 * 8, 5)


@pytest.mark.parametrize("batch_size, steps", [(5, 16), (40, 2), (64, 2), (1, 80)])
def test_max_steps(batch_size, steps):
    """Epochs times the batches of the largest client, 40 rows."""
    assert plan.max_steps(SIZES, types.PlanSpec("local", 2, batch_size)) == steps


def test_batches_of_a_short_client():
    """Three rows, batches of two, one epoch, padded to four steps."""
    position, epoch, num_steps = plan.batches(np.random.default_rng(0), 3, 1, 2, 4)
    assert num_steps == 2
    assert position.shape == (4, 2)
    assert sorted(position[:2].ravel().tolist()) == [-1, 0, 1, 2]
    assert position[1, 1] == -1
    assert (position[2:] == -1).all()
    assert (epoch == 0).all()


def test_rows_are_sorted_by_depth_then_size():
    """Ascending depth, then train examples: chunks of equal length."""
    depth = np.array([1, 2, 1, 2, 1, 2, 3])
    cohort = make(clients_per_round=7, depth=depth)(0, 1)
    keys = [(depth[c], SIZES[0, c]) for c in cohort.client_id]
    assert keys == sorted(keys)
    np.testing.assert_array_equal(cohort.depth, depth[cohort.client_id])


def test_padding_rows_stand_first_and_are_masked():
    """Five rows in chunks of four: three padding rows with client id K."""
    cohort = make(clients_per_round=5, num_peers=2, execution=types.Execution(4))(0, 0)
    np.testing.assert_array_equal(cohort.row_mask, [False] * 3 + [True] * 5)
    np.testing.assert_array_equal(cohort.client_id[:3], [7] * 3)
    np.testing.assert_array_equal(cohort.row, cohort.client_id)
    steps = cohort.plans["local"]
    assert (steps.position[:3] == -1).all()
    assert (steps.num_steps[:3] == 0).all()
    assert (steps.num_steps[3:] > 0).all()
    assert cohort.depth.min() >= 1


def test_rows_are_dealt_over_devices():
    """Device d gets every fourth row of the sorted cohort, from d on."""
    execution = types.Execution(1, four_devices())
    cohort = make(clients_per_round=7, execution=execution)(0, 2)
    assert len(cohort.client_id) == 8
    order = np.argsort(SIZES[0], kind="stable")
    by_size = [7, *order.tolist()]
    per_device = cohort.client_id.reshape(4, 2)
    for device in range(4):
        assert per_device[device].tolist() == by_size[device::4]


@pytest.mark.parametrize("chunk, use_mesh", [(1, True), (2, True), (3, False)])
def test_draws_do_not_depend_on_the_execution(chunk, use_mesh):
    """The same clients with the same batches and peers on any devices."""
    execution = types.Execution(chunk, four_devices() if use_mesh else None)
    plain, other = (
        make(num_peers=3, clients_per_round=5, execution=e)(0, 4)
        for e in (types.Execution(), execution)
    )
    assert other.row_mask.sum() == 5
    for index in np.flatnonzero(other.row_mask):
        (same,) = np.flatnonzero(plain.client_id == other.client_id[index])
        np.testing.assert_array_equal(plain.peers[same], other.peers[index])
        equal(
            jax.tree.map(lambda leaf, i=same: leaf[i], plain.plans),
            jax.tree.map(lambda leaf, i=index: leaf[i], other.plans),
        )


def test_batches_do_not_depend_on_the_cohort():
    """A client shuffles alike in a cohort of seven and in one of three."""
    large, small = make(clients_per_round=7)(0, 5), make(clients_per_round=3)(0, 5)
    for index, client in enumerate(small.client_id):
        (same,) = np.flatnonzero(large.client_id == client)
        np.testing.assert_array_equal(
            large.plans["local"].position[same], small.plans["local"].position[index]
        )


def test_the_method_does_not_change_the_clients():
    """Other plans and peers, the same cohort; a plan keeps its draws beside others."""
    local, server = types.PlanSpec("local", 2, 5), types.PlanSpec("server", 1, 4)
    alone, beside = make(specs=(local,))(0, 3), make(specs=(server, local))(0, 3)
    many = make(specs=(local,), num_peers=4)(0, 3)
    np.testing.assert_array_equal(alone.client_id, beside.client_id)
    np.testing.assert_array_equal(alone.client_id, many.client_id)
    equal(alone.plans["local"], beside.plans["local"])
    equal(alone.plans["local"], many.plans["local"])


def test_plans_of_different_names_shuffle_differently():
    """Two plans of equal shape are two streams."""
    specs = (types.PlanSpec("local", 1, 5), types.PlanSpec("again", 1, 5))
    plans = make(clients_per_round=7, specs=specs)(0, 0).plans
    assert not np.array_equal(plans["local"].position, plans["again"].position)


def test_peers_exclude_self_and_repeat_nobody():
    """k different others for each row; over many rounds everyone, equally often."""
    cohorts = make(clients_per_round=7, num_peers=3)
    met = np.zeros((7, 7), int)
    for r in range(200):
        cohort = cohorts(0, r)
        for client, peers in zip(cohort.client_id, cohort.peers, strict=True):
            assert client not in peers
            assert len(set(peers.tolist())) == 3
            assert peers.min() >= 0 and peers.max() < 7
            met[client, peers] += 1
    others = met[~np.eye(7, dtype=bool)]
    # Binomial with p = 1/2 over 200 rounds: 100 and a standard deviation of 7.
    assert np.abs(others - 100).max() < 36


def test_all_others_as_peers():
    """k = K - 1 peers are all the others."""
    cohort = make(clients_per_round=7, num_peers=6)(0, 0)
    for client, peers in zip(cohort.client_id, cohort.peers, strict=True):
        assert sorted([client, *peers.tolist()]) == list(range(7))
