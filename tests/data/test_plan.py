"""Plans: a cohort is a pure function of (seed, round)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data import deal, participation, plan
from fedjax_pfl import execution as execution_lib
from fedjax_pfl import shapes, types, windows
from tests import padded

SIZES = np.array([[7, 12, 30, 5, 19, 8, 23], [11, 3, 9, 40, 6, 14, 21]])


LOCAL = types.PlanSpec("local", 2, 5)


def make(
    clients_per_round=4,
    specs=(LOCAL,),
    level=None,
    peers=None,
    execution=types.Execution(),
    seeds=(3, 4),
    sizes=SIZES,
    **more,
):
    """A planner over seven clients of unequal sizes and two seeds."""
    num_clients = sizes.shape[1]
    if level is None:
        level = np.full(num_clients, 3)
    return plan.Planner(
        seeds=list(seeds),
        num_rows=sizes,
        client_group=np.zeros(num_clients, int),
        level_of=level if callable(level) else np.asarray(level),
        clients_per_round=clients_per_round,
        specs=specs,
        peers=types.PeerSpec(peers) if isinstance(peers, int) else peers,
        execution=execution,
        **more,
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
    one, two = make(peers=2), make(peers=2)
    forward = [one.cohort(0, r) for r in range(5)]
    for r in reversed(range(5)):
        two.cohort(1, r)
        equal(two.cohort(0, r), forward[r])


def test_seeds_and_rounds_differ():
    """Neither clients nor batches repeat between rounds and seeds."""
    cohorts = make()
    chosen = {tuple(cohorts.cohort(0, r).client_id.tolist()) for r in range(10)}
    assert len(chosen) > 3
    full = make(clients_per_round=7, sizes=np.stack([SIZES[0]] * 2))
    base = full.cohort(0, 0).plans["local"].position
    for other in full.cohort(0, 1), full.cohort(1, 0):
        assert not np.array_equal(base, other.plans["local"].position)


def test_seed_counts_not_its_index():
    """Seed 4 as the second of two equals seed 4 alone."""
    alone = make(seeds=(4,), sizes=SIZES[1:], peers=2)
    equal(alone.cohort(0, 2), make(peers=2).cohort(1, 2))


def test_clients_are_drawn_without_replacement_and_fairly():
    """Four different clients a round; over many rounds everyone is drawn."""
    cohorts = make()
    seen = np.zeros(7, int)
    for r in range(300):
        chosen = cohorts.cohort(0, r).client_id
        assert len(set(chosen.tolist())) == 4
        seen[chosen] += 1
    # Binomial with p = 4/7: 171 and a standard deviation of 8.6.
    assert np.abs(seen - 300 * 4 / 7).max() < 45


def test_every_row_once_per_epoch_and_the_last_short_batch_kept():
    """Each epoch is a permutation of the client's rows in batches of five."""
    cohort = padded.cohort(make(clients_per_round=7), 0, 0)
    steps = cohort.plans["local"]
    assert len(cohort.client_id) == 7
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


def test_a_batch_is_no_larger_than_the_largest_client():
    """Whole-batch training: 40 rows at most here, a multiple of 8; the same batches."""
    huge = make(specs=(types.PlanSpec("local", 2, 10**6),))
    fits = make(specs=(types.PlanSpec("local", 2, 40),))
    equal(huge.cohort(1, 0), fits.cohort(1, 0))
    assert huge.cohort(0, 3).plans["local"].batch_size == 40


def test_a_step_of_the_engine_is_a_step_of_the_table():
    """Positions and epochs of every client and step, computed on the device."""
    execution = types.Execution(2, four_devices())
    cohort = make(clients_per_round=7, execution=execution).cohort(0, 1)
    flat = cohort.plans["local"]
    assert flat.position.shape[0] == 4
    table = padded.table(flat, 20)
    real = np.arange(20) < table.num_steps[:, None]
    run = jax.jit(jax.vmap(lambda one, step: one.step(step), (None, 0)))
    for row in range(len(cohort.row)):
        position, epoch = run(flat.of_row(row), np.arange(20))
        np.testing.assert_array_equal(position, table.position[row])
        np.testing.assert_array_equal(
            np.where(real[row], epoch, 0), np.where(real[row], table.epoch[row], 0)
        )
        # As a device sees it: rows of its own, its own positions.
        rows, positions = flat.split()
        own = jax.tree.map(lambda leaf, r=row: leaf[r], rows).joined(
            positions[row // 2]
        )
        np.testing.assert_array_equal(run(own, np.arange(20))[0], position)
    # Fewer steps than epochs have: those behind are empty.
    short = flat.replace(num_steps=np.minimum(flat.num_steps, 3))
    position, _ = run(short.of_row(len(cohort.row) - 1), np.arange(20))
    assert (np.asarray(position[:3]) >= 0).any(1).all()
    assert (np.asarray(position[3:]) == -1).all()


def test_every_order_is_equally_likely():
    """The 24 orders of four rows over 2,400 rounds: 100 each, five deviations."""
    spec, rounds = types.PlanSpec("local", 1, 4), np.arange(2400)
    client, size = np.full(2400, 6), np.full(2400, 4)
    made = plan.orders(1, rounds, client, size, spec).reshape(2400, 4)
    _, count = np.unique(made, axis=0, return_counts=True)
    assert len(count) == 24
    assert np.abs(count - 100).max() < 5 * np.sqrt(100 * 23 / 24)


@pytest.mark.parametrize("epochs", [1, 3])
def test_draws_are_named_by_seed_round_and_client(epochs):
    """Alone, beside others, in any order and size of call: the same orders."""
    gen = np.random.default_rng(0)
    client = gen.permutation(300)[:40]
    round, size = gen.integers(0, 50, 40), gen.integers(0, 90, 40)
    spec = types.PlanSpec("local", epochs, 7)
    together = np.split(
        plan.orders(9, round, client, size, spec), np.cumsum(epochs * size)[:-1]
    )
    for index, order in enumerate(together):
        alone = plan.orders(9, int(round[index]), client[[index]], size[[index]], spec)
        np.testing.assert_array_equal(order, alone)
        for one in order.reshape(epochs, size[index]):
            np.testing.assert_array_equal(np.sort(one), np.arange(size[index]))


def test_orders_are_those_of_earlier_versions():
    """Draws are part of a run's identity."""
    spec = types.PlanSpec("local", 2, 4)
    found = plan.orders(3, 5, np.array([2, 7]), np.array([5, 3]), spec)
    assert found.tolist() == [0, 4, 3, 1, 2, 2, 0, 1, 3, 4, 2, 1, 0, 1, 2, 0]


def test_at_most_so_many_rows_of_a_client():
    """Each epoch has the first ones of its own order; small clients have all."""
    every, some = types.PlanSpec("local", 2, 5), types.PlanSpec("local", 2, 5, 8)
    whole, short = (make(7, specs=(spec,)).cohort(0, 1) for spec in (every, some))
    np.testing.assert_array_equal(whole.client_id, short.client_id)
    owned = SIZES[0, short.client_id]
    cut = short.plans["local"]
    np.testing.assert_array_equal(cut.num_rows, np.minimum(owned, 8))
    np.testing.assert_array_equal(cut.num_steps, 2 * -(-np.minimum(owned, 8) // 5))
    for index, size in enumerate(owned):
        one, other = (
            np.asarray(plan.position[0])[plan.first[index] :][: 2 * count]
            for plan, count in ((whole.plans["local"], size), (cut, min(size, 8)))
        )
        heads = [epoch[:8].tolist() for epoch in one.reshape(2, size)]
        assert other.reshape(2, -1).tolist() == heads
    planner = make(7, specs=(some,))
    assert planner.num_steps(0, np.arange(7))["local"].max() == 4
    work = windows.work_of(planner, 0, planner.window(0, 0, 3, 4, 0), types.Execution())
    assert work.samples.tolist() == [2 * int(np.minimum(SIZES[0], 8).sum())] * 3 + [0]


@pytest.mark.parametrize("max_rows", [0, 13])
def test_a_short_last_batch_is_dropped(max_rows):
    """Each epoch has the first whole batches of its own order; a small client none."""
    every = types.PlanSpec("local", 2, 7, max_rows)
    whole, short = (
        make(7, specs=(spec,)).cohort(0, 1)
        for spec in (every, every._replace(drop_last=True))
    )
    np.testing.assert_array_equal(whole.client_id, short.client_id)
    owned = np.minimum(SIZES[0, short.client_id], max_rows or 99)
    cut, used = short.plans["local"], owned // 7 * 7
    np.testing.assert_array_equal(cut.num_rows, used)
    np.testing.assert_array_equal(cut.num_steps, 2 * (owned // 7))
    assert (used == 0).any() and (used < owned).any()
    for index, size in enumerate(owned):
        one, other = (
            np.asarray(plan.position[0])[plan.first[index] :][: 2 * count]
            for plan, count in ((whole.plans["local"], size), (cut, used[index]))
        )
        heads = one.reshape(2, size)[:, : used[index]]
        np.testing.assert_array_equal(other.reshape(heads.shape), heads)
        of_row = jax.tree.map(jnp.asarray, cut).of_row(index)
        steps = [of_row.step(step)[0] for step in range(2 * (size // 7))]
        assert all((np.asarray(one) >= 0).all() for one in steps)


def test_a_batch_that_no_client_fills_is_not_dropped_in_silence():
    """It would leave no step, so it is refused; elsewhere it is only padding."""
    with pytest.raises(ValueError, match="--drop_last: .* at most 40 train rows"):
        make(specs=(LOCAL._replace(batch_size=31, drop_last=True),))


def test_rows_are_sorted_by_level_then_size():
    """Ascending level, then train examples: chunks of equal length."""
    level = np.array([1, 2, 1, 2, 1, 2, 3])
    cohort = make(clients_per_round=7, level=level).cohort(0, 1)
    keys = [(level[c], SIZES[0, c]) for c in cohort.client_id]
    assert keys == sorted(keys)
    np.testing.assert_array_equal(cohort.level, level[cohort.client_id])


def test_levels_that_change_from_round_to_round():
    """A function names them by seed, round and client; it sees the drawn ones only."""
    asked = []

    def level(seed, round, client):
        asked.append(client)
        return 1 + (seed + round + client) % 4

    cohorts = make(level=level)
    for seed, number in ((0, 3), (1, 4)):
        for round in (0, 7):
            cohort = cohorts.cohort(seed, round)
            np.testing.assert_array_equal(
                cohort.level, 1 + (number + round + cohort.client_id) % 4
            )
            assert (np.diff(cohort.level) >= 0).all()
    assert {len(client) for client in asked} == {4}


@pytest.mark.parametrize("chunk, use_mesh", [(4, False), (2, True), (1, True)])
def test_padding_rows_do_not_raise_the_level_of_their_chunk(chunk, use_mesh):
    """Levels 1,1,2,2,3,3,4,4, five drawn, chunks of four: padding copies the smallest.

    The largest level of a chunk decides which branch runs. A chunk without a real row
    takes the cohort's smallest level.
    """
    level = np.repeat([1, 2, 3, 4], 2)
    execution = types.Execution(chunk, four_devices() if use_mesh else None)
    cohorts = make(5, level=level, execution=execution, sizes=np.full((2, 8), 9))
    had_padding_alone = False
    for round in range(30):
        cohort = cohorts.drawn(0, round)
        real = cohort.row_mask
        np.testing.assert_array_equal(cohort.level[real], level[cohort.client_id[real]])
        for part in np.split(np.arange(8), 8 // chunk):
            own = cohort.level[part][real[part]]
            had_padding_alone |= len(own) == 0
            smallest = own.min() if len(own) else cohort.level[real].min()
            assert (cohort.level[part][~real[part]] == smallest).all()
    assert had_padding_alone == (chunk == 1)


def test_only_eligible_clients_are_drawn():
    """Never the others; everybody eligible draws as if nothing was said."""
    eligible = np.array([1, 0, 1, 1, 0, 1, 1], bool)
    cohorts, seen = make(3, eligible=eligible), set()
    for round in range(40):
        chosen = cohorts.drawn(0, round).client_id.tolist()
        assert len(set(chosen)) == 3
        seen.update(chosen)
    assert seen == set(np.flatnonzero(eligible).tolist())
    everybody = make(3, eligible=np.ones(7, bool))
    equal(everybody.cohort(0, 2), make(3).cohort(0, 2))
    with pytest.raises(ValueError, match="--clients_per_round=6: 5 of 7.*lower it"):
        make(6, eligible=eligible)


def test_drawn_is_the_cohort_without_plans():
    """Evaluation needs no batches."""
    cohorts = make(peers=2)
    assert cohorts.drawn(1, 3).plans == {}
    equal(cohorts.drawn(1, 3), cohorts.cohort(1, 3).replace(plans={}))


@pytest.mark.parametrize("use_mesh", [False, True])
def test_a_window_holds_the_cohorts_of_its_rounds(use_mesh):
    """Round by round what `cohort` gives; then zeros."""
    server = types.PlanSpec("server", 1, 4)
    execution = types.Execution(3, four_devices() if use_mesh else None)
    cohorts = make(5, specs=(LOCAL, server), peers=2, execution=execution, seeds=(8, 9))
    window = cohorts.window(1, 4, 3, 5, 0)
    devices = 4 if use_mesh else 1
    for index in range(3):
        one = cohorts.cohort(1, 4 + index)
        ours = window.of_round(index, SIZES[1])
        equal(one.replace(plans={}), ours.replace(plans={}))
        for name in ("local", "server"):
            whole, part = one.plans[name], ours.plans[name]
            assert whole.position.shape[0] == part.position.shape[0] == devices
            equal(padded.table(whole), padded.table(part))
    rows = window.replace(
        plans={name: one.replace(position=()) for name, one in window.plans.items()}
    )
    for leaf in jax.tree.leaves(rows):
        assert len(leaf) == 5 and not leaf[3:].any()


def test_a_window_has_nothing_between_its_clients():
    """All positions of all rounds, and zeros to the room that is wanted."""
    cohorts = make()
    owned = sum(int(cohorts.examples(0, round).sum()) for round in range(3))
    tight, wide = cohorts.window(0, 0, 3, 3, 0), cohorts.window(0, 0, 3, 3, owned + 9)
    assert tight.plans["local"].position.shape == (1, 2 * owned)
    assert wide.plans["local"].position.shape == (1, 2 * (owned + 9))
    equal(wide.plans["local"].position[:, : 2 * owned], tight.plans["local"].position)
    assert not wide.plans["local"].position[:, 2 * owned :].any()
    first = tight.plans["local"].first.ravel()
    sizes = cohorts.owned(0, tight.client_id).ravel()
    np.testing.assert_array_equal(np.diff([*first, 2 * owned]), 2 * sizes)


@pytest.mark.parametrize("use_mesh", [False, True])
def test_room_is_what_rounds_have_on_average(use_mesh):
    """Of any seed; at least a sixteenth finer than a power of two."""
    execution = types.Execution(1, four_devices() if use_mesh else None)
    cohorts = make(execution=execution)
    expected = 4 * SIZES.mean(1).max()
    assert cohorts.round_examples == expected
    by_device = np.array(
        [[cohorts.examples(seed, round) for round in range(16)] for seed in range(2)]
    )
    assert by_device.shape == (2, 16, 4 if use_mesh else 1)
    for index in range(2):
        one = cohorts.cohort(index, 5)
        assert by_device[index, 5].sum() == SIZES[index, one.client_id].sum()
    share = by_device.sum((0, 1)).max() / by_device.sum()
    for rounds in (20, 50):
        wanted = expected * rounds * share
        assert wanted <= cohorts.capacity(rounds) <= wanted * 17 / 16 + 1
    assert cohorts.capacity(1) == shapes.rounded_up_finely(int(by_device.max()))
    few = make(2, eligible=np.arange(7) < 2)
    assert few.round_examples == 2 * 9.5


def test_padding_rows_stand_first_and_are_masked():
    """Five rows in chunks of four: three padding rows with client id K."""
    cohort = make(clients_per_round=5, peers=2, execution=types.Execution(4)).cohort(
        0, 0
    )
    np.testing.assert_array_equal(cohort.row_mask, [False] * 3 + [True] * 5)
    np.testing.assert_array_equal(cohort.client_id[:3], [7] * 3)
    np.testing.assert_array_equal(cohort.row, cohort.client_id)
    steps = cohort.plans["local"]
    assert (steps.num_rows[:3] == 0).all()
    assert (steps.num_steps[:3] == 0).all()
    assert (steps.num_steps[3:] > 0).all()
    assert cohort.level.min() >= 1


def test_one_device_waits_for_none():
    """Chunks that run to their longest client are another loss."""
    sizes = np.array([[3, 50, 7, 11, 40, 5]])
    for specs in ((types.PlanSpec("local", 1, 5),), ()):
        given = {"execution": types.Execution(chunk=3), "specs": specs}
        assert make(sizes=sizes, clients_per_round=6, **given).balance == 1.0


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_get_as_much_work(devices):
    """As many rows each, in their order; much nearer to even than in turn."""
    gen = np.random.default_rng(devices)
    shares = []
    for _ in range(50):
        work = np.sort(np.ceil(gen.lognormal(3, 1, 96)).astype(int))
        index = np.r_[np.full(4, -1), gen.permutation(96)]
        index = index[-(len(index) // devices * devices) :]
        of_client = np.zeros(96, int)
        of_client[index[index >= 0]] = work[-(index >= 0).sum() :]
        found = deal.by_work(index, of_client[index], devices)
        assert sorted(found) == sorted(index)
        loads = np.where(found < 0, 0, of_client[found]).reshape(devices, -1)
        assert (np.diff(loads) >= 0).all()
        in_turn = np.where(index < 0, 0, of_client[index]).reshape(-1, devices)
        shares.append([loads.sum(1).max(), in_turn.sum(0).max(), of_client.sum()])
    slowest, before, total = np.mean(shares, axis=0)
    assert total / devices / slowest > max(0.9, total / devices / before + 0.03)


def test_padding_has_no_work():
    """A device with padding gets the largest client."""
    found = deal.by_work(np.array([-1, 0, 1, 2]), np.array([99, 5, 6, 11]), 2)
    np.testing.assert_array_equal(found.reshape(2, 2), [[-1, 2], [0, 1]])


def test_chunks_are_dealt_in_turn():
    """Device d gets every fourth row of the sorted cohort, from d on."""
    execution = types.Execution(2, four_devices())
    cohort = make(clients_per_round=7, execution=execution).cohort(0, 2)
    assert len(cohort.client_id) == 8
    order = np.argsort(SIZES[0], kind="stable")
    by_size = [7, *order.tolist()]
    per_device = cohort.client_id.reshape(4, 2)
    for device in range(4):
        assert per_device[device].tolist() == by_size[device::4]


@pytest.mark.parametrize("kinds", [1, 3, 24])
def test_most_train_at_home(kinds):
    """Every place keeps its kind of client, and no exchange of two would be better."""
    gen = np.random.default_rng(kinds)
    for _ in range(20):
        home, kind = gen.integers(0, 4, 24), gen.integers(0, kinds, 24)
        index = gen.permutation(np.r_[np.full(4, -1), np.arange(24)])
        found = deal.at_home(index, home, kind[None], 4)
        np.testing.assert_array_equal(found < 0, index < 0)
        real, device = index >= 0, np.arange(28) // 7
        np.testing.assert_array_equal(kind[found[real]], kind[index[real]])
        assert sorted(found[real]) == list(range(24))
        stay = (home[found] == device) & real
        of = np.stack([kind[found], device, home[found]])[:, real]
        most = sum(
            min(((of[0] == k) & (of[i] == d)).sum() for i in (1, 2))
            for k in range(kinds)
            for d in range(4)
        )
        assert stay.sum() == most


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("chosen, least", [(64, 0.9), (100, 0.9), (1000, 0.97)])
@pytest.mark.parametrize("sigma", [0, 0.7])
def test_devices_that_share_rows_work_evenly(devices, chosen, least, sigma):
    """Equal clients and unequal ones, whose rows lie anywhere."""
    sizes = np.exp(np.random.default_rng(0).normal(3.5, sigma, (2, 5000)))
    mesh = jax.sharding.AbstractMesh((devices,), ("clients",))
    how = types.Execution(1, mesh, shares_rows=True)
    spec = types.PlanSpec("local", 1, 5)
    given = {"execution": how, "specs": (spec,), "sizes": sizes.astype(int)}
    planner = make(clients_per_round=chosen, **given)
    assert planner.balance >= least
    cohort = planner.drawn(0, 0)
    assert len(cohort.row) == devices * -(-chosen // devices)
    assert cohort.row_mask.sum() == chosen
    per_device = -(-5000 // devices)
    found = np.divmod(cohort.row[cohort.row_mask], per_device)
    owner = np.divmod(cohort.client_id[cohort.row_mask], devices)[::-1]
    np.testing.assert_array_equal(found, owner)
    steps = np.where(
        cohort.row_mask, planner.num_steps(0, cohort.client_id)["local"], 0
    )
    work = steps.reshape(devices, -1).sum(1)
    assert work.sum() / devices / work.max() >= least - 0.02
    if not sigma:
        home = cohort.row // per_device == np.repeat(
            np.arange(devices), len(cohort.row) // devices
        )
        assert home[cohort.row_mask].mean() > 0.7


@pytest.mark.parametrize("chunk, use_mesh", [(1, True), (2, True), (3, False)])
def test_draws_do_not_depend_on_the_execution(chunk, use_mesh):
    """The same clients with the same batches and peers on any devices."""
    execution = types.Execution(chunk, four_devices() if use_mesh else None)
    plain, other = (
        padded.cohort(make(peers=3, clients_per_round=5, execution=e), 0, 4)
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


def test_the_method_does_not_change_the_clients():
    """Other plans and peers, the same cohort; a plan keeps its draws beside others."""
    local, server = types.PlanSpec("local", 2, 5), types.PlanSpec("server", 1, 4)
    alone, beside = (
        make(specs=(local,)).cohort(0, 3),
        make(specs=(server, local)).cohort(0, 3),
    )
    many = make(specs=(local,), peers=4).cohort(0, 3)
    np.testing.assert_array_equal(alone.client_id, beside.client_id)
    np.testing.assert_array_equal(alone.client_id, many.client_id)
    equal(alone.plans["local"], beside.plans["local"])
    equal(alone.plans["local"], many.plans["local"])


def test_plans_of_different_names_shuffle_differently():
    """Two plans of equal shape are two streams."""
    specs = (types.PlanSpec("local", 1, 5), types.PlanSpec("again", 1, 5))
    plans = make(clients_per_round=7, specs=specs).cohort(0, 0).plans
    assert not np.array_equal(plans["local"].position, plans["again"].position)


def test_peers_are_named_by_seed_round_and_client():
    """The same in a cohort of seven and in one of three; others in another round."""
    large, small = make(7, peers=3).cohort(0, 5), make(3, peers=3).cohort(0, 5)
    for index, client in enumerate(small.client_id):
        (same,) = np.flatnonzero(large.client_id == client)
        np.testing.assert_array_equal(large.peers[same], small.peers[index])
    assert not np.array_equal(large.peers, make(7, peers=3).cohort(0, 6).peers)


def test_a_graph_of_ones_own():
    """A ring whose client 3 is alone; padding rows have no peers either."""

    def ring(seed, round, client, num_clients, num_peers):
        peers = (client[:, None] + np.array([1, -1])) % num_clients
        return peers, np.repeat(client[:, None] != 3, num_peers, axis=1)

    spec = types.PeerSpec(2, draw=ring)
    cohort = make(7, peers=spec, execution=types.Execution(4)).drawn(0, 0)
    assert cohort.peers.shape == (8, 2)
    for client, peers, mask in zip(
        cohort.client_id, cohort.peers, cohort.peer_mask, strict=True
    ):
        if client in (3, 7):
            assert not mask.any() and not peers.any()
        else:
            assert mask.all()
            assert peers.tolist() == [(client + 1) % 7, (client - 1) % 7]
    outside = spec._replace(draw=lambda *args: (ring(*args)[0] + 1, ring(*args)[1]))
    with pytest.raises(ValueError, match="peers 0..7; expected clients 0..6"):
        make(7, peers=outside).drawn(0, 0)


def test_executed_steps_by_hand():
    """Chunks of two run to their longest: 2 x (3 + 7); one by one nothing is lost."""
    steps = np.array([0, 3, 5, 7])
    assert execution_lib.executed_steps(steps, types.Execution(2)) == 20
    assert execution_lib.executed_steps(steps, types.Execution(1)) == 15
    assert execution_lib.executed_steps(steps, types.Execution(9)) == 28
    assert (
        execution_lib.executed_steps(np.stack([steps, steps]), types.Execution(2)).sum()
        == 40
    )


# Of a step of the model m1 with 20 examples
M1 = 11_019_080


@pytest.mark.parametrize(
    "steps, min_chunk, devices, expected",
    [
        # Two large clients: a chunk of their own. 2 x (1 + 1 + 9) of 22.
        ([1, 1, 1, 1, 9, 9], 2, 1, (2, 1.0)),
        # Of chunks that cost the same the largest.
        ([2, 2, 2, 2], 0, 1, (4, 1.0)),
        # Chunks of three need 3 x (1 + 9); six need 54.
        ([1, 1, 1, 1, 9, 9], 3, 1, (3, 22 / 30)),
        # A least chunk beyond the cohort is the cohort.
        ([1, 1, 1, 1, 9, 9], 99, 1, (6, 22 / 54)),
        # Two devices get 1, 1, 9 each: one by one, or all three at once.
        ([1, 1, 1, 1, 9, 9], 0, 2, (1, 1.0)),
        ([1, 1, 1, 1, 9, 9], 2, 2, (2, 22 / 40)),
    ],
)
def test_choose_chunk(steps, min_chunk, devices, expected, monkeypatch):
    """Where all steps cost the same, the chunk of the fewest executed ones, by hand."""
    equal = {width: width for width in (1, 2, 3, 4, 6)}
    monkeypatch.setattr(execution_lib, "STEP_CYCLES", {1: equal})
    found = deal.choose_chunk(
        np.array([steps, steps]), step_macs=100, min_chunk=min_chunk, devices=devices
    )
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1], expected[1])


def test_a_chunk_is_as_wide_as_it_pays():
    """Equal clients: the width at which a step costs least; unequal ones: narrower."""
    equal = np.full((2, 100), 7)
    assert deal.choose_chunk(equal, step_macs=M1) == (100, 1.0)
    # Large steps fill a chip: the compiler has fewer cycles for 8 than for 32 of them.
    assert deal.choose_chunk(equal, step_macs=9e7)[0] == 8
    # A TPU needs more cycles for 25 clients of `m1` than for 32.
    for macs in (0.95 * M1, M1, 1.05 * M1):
        assert deal.choose_chunk(equal, step_macs=macs, devices=4)[0] < 25
    halves = np.array([[1] * 64 + [90] * 32])
    assert deal.choose_chunk(halves, step_macs=M1) == (32, 1.0)
    sizes = np.random.default_rng(0).lognormal(2.5, 1.5, (8, 100))
    steps = -(-np.clip(sizes, 5, 10_000).astype(int) // 20)
    chunk, efficiency = deal.choose_chunk(steps, step_macs=M1)
    assert chunk < 50 and efficiency > 0.2
    # Steps of a tiny net cost little more for many clients than for one.
    assert chunk < deal.choose_chunk(steps, step_macs=225_480)[0]
    # No number beyond 512 costs less for each.
    many = np.full((1, 10_000), 7)
    assert deal.choose_chunk(many, step_macs=225_480)[0] == 512


def test_a_gpu_waits_for_launches():
    """Wide chunks pay on a GPU, for unequal clients too, the less the larger a step."""
    equal = np.full((2, 100), 7)
    assert deal.choose_chunk(equal, step_macs=9e7, is_gpu=True) == (100, 1.0)
    sizes = np.random.default_rng(0).lognormal(2.5, 1.5, (8, 100))
    steps = -(-np.clip(sizes, 5, 10_000).astype(int) // 20)
    chunks = [
        deal.choose_chunk(steps, step_macs=macs, is_gpu=True)[0]
        for macs in (2e5, 1e8, 1e10)
    ]
    assert 100 >= chunks[0] > chunks[1] > chunks[2] >= 1
    assert chunks[1] > deal.choose_chunk(steps, step_macs=1e8)[0]


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("sigma", [0, 1])
@pytest.mark.parametrize("least", [0, 7])
def test_the_predicted_fraction_is_the_planners_balance(devices, sigma, least):
    """By the slowest device, for the rounds that both see."""
    sizes = np.exp(np.random.default_rng(1).normal(3.5, sigma, (1, 400))).astype(int)
    mesh = jax.sharding.AbstractMesh((devices,), ("clients",))
    given = {"clients_per_round": 90, "sizes": sizes}
    given["specs"] = (types.PlanSpec("local", 1, 5),)
    planner = make(execution=types.Execution(1, mesh), **given)
    rounds = [planner.drawn(0, r).client_id for r in range(plan.SEEN_ROUNDS)]
    steps = np.stack([planner.num_steps(0, one[one < 400])["local"] for one in rounds])
    costs = {"step_macs": 1e10, "devices": devices, "min_chunk": least}
    chunk, fraction = deal.choose_chunk(steps, **costs)
    planner = make(execution=types.Execution(chunk, mesh), **given)
    assert planner.balance == pytest.approx(fraction, rel=0.04 if chunk == 1 else 1e-6)


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("chosen, least", [(64, 0.9), (100, 0.9), (1000, 0.97)])
def test_chunks_leave_no_device_idle(chosen, least, devices, is_gpu):
    """A device's rows fill its chunks, if clients are equal; few of a tiny net."""
    mesh = jax.sharding.AbstractMesh((devices,), ("clients",))
    steps = np.full((1, chosen), 7)
    for macs in [225_480] if chosen < 1000 else execution_lib.STEP_CYCLES:
        costs = {"step_macs": macs, "devices": devices, "is_gpu": is_gpu}
        chunk, fraction = deal.choose_chunk(steps, **costs)
        given = {"execution": types.Execution(chunk, mesh, shares_rows=True)}
        given["sizes"] = np.full((1, 5000), 10)
        balance = make(clients_per_round=chosen, **given).balance
        assert chunk > 1 and balance == pytest.approx(fraction) and balance >= least


@pytest.mark.parametrize("macs", [1, 225_480, 1e6, M1, 3e7, 86_712_520, 1e10])
def test_only_known_widths_are_taken(macs):
    """Others are all rows of a device, or the least chunk that was given."""
    gen, known = np.random.default_rng(5), execution_lib.step_costs(macs)
    for num_rows in (1, 5, 20, 23, 100, 1000):
        for devices in (1, 3):
            sizes = gen.lognormal(2.5, gen.uniform(0, 2), (4, num_rows))
            steps, all_rows = np.ceil(sizes).astype(int), -(-num_rows // devices)
            given = {"step_macs": macs, "devices": devices}
            assert deal.choose_chunk(steps, **given)[0] in {*known, all_rows}
            least = deal.choose_chunk(steps, min_chunk=11, **given)[0]
            assert least in {*known, all_rows, 11} and least >= min(11, all_rows)


def test_all_rows_cost_no_less_than_known_widths(monkeypatch):
    """Five at once as eight: 16 > 5 x 3, but 16 < 5 x 4. As four and more: 5 x 3.5."""
    steps = np.full((1, 5), 7)
    for cycles, expected in (
        ({1: 3, 8: 16}, 1),
        ({1: 4, 8: 16}, 5),
        ({1: 3, 4: 14, 8: 14}, 1),
        ({1: 4, 4: 14, 8: 14}, 5),
    ):
        monkeypatch.setattr(execution_lib, "STEP_CYCLES", {1: cycles})
        assert deal.choose_chunk(steps, step_macs=1) == (expected, 1.0)


def test_step_costs():
    """The table's own entries, between sizes for what both have, constant beyond."""
    for size, cycles in execution_lib.STEP_CYCLES.items():
        expected = {width: one / width for width, one in cycles.items()}
        assert execution_lib.step_costs(size) == pytest.approx(expected)
    small, large = (execution_lib.step_costs(size)[8] for size in (3e5, 9e6))
    assert small < large < execution_lib.step_costs(M1)[8]
    assert execution_lib.step_costs(1) == execution_lib.step_costs(225_480)
    assert 100 in execution_lib.step_costs(1e6)
    assert 100 not in execution_lib.step_costs(2e7)


def test_rounds_are_drawn_apart():
    """Four of seven clients are those of the round before in one of 35 rounds."""
    drawn = [sorted(make().drawn(0, r).client_id.tolist()) for r in range(200)]
    same = sum(one == other for one, other in zip(drawn, drawn[1:], strict=False))
    assert same < 20  # 5.7 with a standard deviation of 2.3


def test_one_client_takes_part_where_none_is_available():
    who = participation.Participation(np.zeros((7, 1)))
    for round in range(5):
        assert make(4, who=who).drawn(0, round).row_mask.sum() == 1


def test_each_seed_has_its_own_candidates():
    eligible = np.array([[1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]], bool)
    for index, expected in enumerate(([0, 1, 2, 3], [3, 4, 5, 6])):
        found = make(4, eligible=eligible).drawn(index, 0).client_id
        assert sorted(found.tolist()) == expected


def test_interruptions_are_named_by_the_seed():
    """Seed 4 as the second of two is seed 4 alone, and no other seed."""
    who = participation.Participation(np.ones((7, 1)), interrupted=0.5)
    alone = make(7, seeds=(4,), sizes=SIZES[1:], who=who)
    equal(alone.cohort(0, 2), make(7, who=who).cohort(1, 2))
    pairs = make(7, sizes=np.stack([SIZES[0]] * 2), who=who)
    steps = [pairs.cohort(index, 2).plans["local"].num_steps for index in (0, 1)]
    assert (steps[0] != steps[1]).any()


def test_interruptions_leave_the_server_s_steps():
    """It trains on what a client has sent, however early that one stopped."""
    who = participation.Participation(np.ones((7, 1)), interrupted=1.0)
    server = types.PlanSpec("server", 3, 4, at_server=True)
    cohort = make(7, (LOCAL, server), who=who).cohort(0, 2)
    rows = SIZES[0][cohort.client_id]
    found = {name: plan.num_steps for name, plan in cohort.plans.items()}
    np.testing.assert_array_equal(found["server"], server.steps(rows))
    whole = LOCAL.steps(rows)
    assert (found["local"] < whole)[whole > 1].all()


def test_the_clock_counts_the_examples_of_all_plans():
    given = {"speed": np.ones((1, 7)), "macs": np.full((7, 3), 1e6)}
    who = participation.Participation(np.ones((7, 1)), **given)
    specs = LOCAL, types.PlanSpec("again", 3, 4)
    cohort = make(7, specs, seeds=(3,), sizes=SIZES[:1], who=who).window(0, 0, 1, 1, 0)
    wanted = 5 * SIZES[0][cohort.client_id[0]] * 3e6 / 1e9  # 2 and 3 epochs
    np.testing.assert_allclose(cohort.seconds[0], wanted, rtol=1e-6)


def test_chances_of_rounds_repeat():
    who = participation.Participation(np.eye(7)[:, :3])
    for round in range(7):
        found = make(4, who=who).drawn(0, round)
        assert found.client_id[found.row_mask].tolist() == [round % 3]


def test_members_have_the_levels_of_their_seed_and_round():
    made = make(level=lambda seed, round, client: (seed + round + client) % 3)
    found = made.members(1, 6, np.array([2, 7, 5]), SIZES[1], LOCAL)
    assert found.row_mask.tolist() == [True, False, True]
    assert found.level[found.row_mask].tolist() == [(4 + 6 + 2) % 3, (4 + 6 + 5) % 3]


def test_batches_of_members_are_as_large_as_their_rows():
    """Of all seeds, where those of clients that train may be smaller."""
    most = 9 * int(SIZES.max())
    rows, spec = np.array([*SIZES[1][:-1], most]), LOCAL._replace(batch_size=10**4)
    made_one = make(most_rows=most)
    for seed, num_rows in ((0, SIZES[0]), (1, rows)):
        found = made_one.members(seed, 0, np.arange(len(rows)), num_rows, spec)
        plan_of_it = found.plans[spec.name]
        assert plan_of_it.num_steps.tolist() == [spec.epochs] * len(rows)
        assert plan_of_it.batch_size == shapes.capped(10**4, most)
