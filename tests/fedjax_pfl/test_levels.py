"""Levels of clients: mixes, blocks, draws, who stays out, and training of the first."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data import plan
from fedjax_pfl import (
    boundary,
    levels,
    local_training,
    losses,
    options,
    rng,
    types,
)
from tests.fedjax_pfl import small


def of(**given):
    return levels.Levels(**given)


@pytest.mark.parametrize(
    "mix, num_clients, expected",
    [
        ("1:1:1:1", 8, [2, 2, 2, 2]),
        ("1:1:1:1", 100, [25, 25, 25, 25]),
        ("7:1:1:1", 10, [7, 1, 1, 1]),
        ("7:1:1:1", 100, [70, 10, 10, 10]),
        ("4:3:2:1", 20, [8, 6, 4, 2]),
        ("0:0:0:1", 5, [0, 0, 0, 5]),
        ("1:0:0:0", 5, [5, 0, 0, 0]),
        ("0:2:0:1", 9, [0, 6, 0, 3]),
        ("1", 3, [3]),
        # Not divisible: ends of blocks are rounded up.
        ("1:1:1:1", 10, [3, 2, 3, 2]),
        ("1:1:1:1", 3, [1, 1, 1, 0]),
        ("7:1:1:1", 5, [4, 0, 1, 0]),
        ("1:1:1", 5, [2, 2, 1]),
        ("999999:1", 3, [3, 0]),
    ],
)
def test_blocks_of_clients(mix, num_clients, expected):
    """The first clients have the smallest level, as many as the mix says."""
    found = levels.capability(of(level_mix=mix), num_clients)
    np.testing.assert_array_equal(
        np.bincount(found, minlength=len(expected) + 1)[1:], expected
    )
    assert (np.diff(found) >= 0).all() and found.min() >= 1


@pytest.mark.parametrize("num_clients", [4, 10, 50, 100, 101, 203])
def test_blocks_of_the_paper(num_clients):
    """d_k = floor(k / (m / 4)) + 1."""
    found = levels.capability(of(), num_clients)
    expected = [int(k // (num_clients / 4)) + 1 for k in range(num_clients)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("mix", ["7:1:1:1", "1:2:3:4", "3:0:1", "1:1:1"])
def test_blocks_by_hand(mix):
    """Any number of clients: level 1 + #{l: (m_1 + .. + m_l) / m <= k / K}."""
    parts = [int(part) for part in mix.split(":")]
    ends = list(itertools.accumulate(parts))
    for num_clients in (1, 7, 30, 31):
        expected = [
            1 + sum(end * num_clients <= k * sum(parts) for end in ends)
            for k in range(num_clients)
        ]
        found = levels.capability(of(level_mix=mix), num_clients)
        np.testing.assert_array_equal(found, expected)


def test_maximum():
    """Everybody holds all, whatever the mix; or what the global model has."""
    both = {"levels": "maximum", "level_mix": "5:1:0"}
    found, eligible = levels.assigned(of(**both), 6)
    assert found.tolist() == [3] * 6 and eligible is None
    found, _ = levels.assigned(of(**both, max_level=2), 6)
    assert found.tolist() == [2] * 6
    assert levels.num_capable(of(**both), 6).tolist() == [6, 6, 6]


def test_a_smaller_global_model():
    """Who could hold more trains that; with `exclusive`, who cannot hold it stays out.

    100 clients: 100, 75, 50 and 25 are eligible.
    """
    whole, _ = levels.assigned(of(), 100)
    for top, count in zip((1, 2, 3, 4), (100, 75, 50, 25), strict=True):
        found, eligible = levels.assigned(of(max_level=top), 100)
        np.testing.assert_array_equal(found, np.minimum(whole, top))
        assert eligible is None and levels.top(of(max_level=top)) == top
        found, eligible = levels.assigned(of(max_level=top, exclusive=True), 100)
        assert eligible.sum() == count and (found[eligible] == top).all()
        np.testing.assert_array_equal(eligible, whole >= top)
    _, eligible = levels.assigned(of(exclusive=True), 100)
    assert eligible.sum() == 25 and levels.top(of()) == 4


def test_how_many_are_capable():
    """Of each level up to the global model's; of those who take part."""
    assert levels.num_capable(of(), 100).tolist() == [100, 75, 50, 25]
    assert levels.num_capable(of(level_mix="7:1:1:1"), 10).tolist() == [10, 3, 2, 1]
    trains = np.arange(100) % 10 > 0
    assert levels.num_capable(of(), 100, trains).tolist() == [90, 68, 45, 23]
    assert levels.num_capable(of(levels="dynamic"), 100, trains).tolist() == [90] * 4
    assert levels.num_capable(of(max_level=2), 100).tolist() == [100, 75]
    assert levels.num_capable(of(levels="dynamic"), 7).tolist() == [7] * 4
    assert levels.num_capable(of(levels="dynamic", max_level=3), 7).tolist() == [7] * 3
    exclusive = of(max_level=3, exclusive=True)
    assert levels.num_capable(exclusive, 100).tolist() == [50, 50, 50]


def test_rows_of_those_who_take_part():
    """The train rows of clients 6 and 7, the only ones of level 4; -1 behind them."""
    train = small.client_rows(np.arange(20)[::-1], [3, 1, 2, 4, 1, 2, 3, 4], padding=2)
    rows, size = levels.eligible_rows(of(exclusive=True), train)
    assert int(size) == 7 and rows.tolist() == [*range(6, -1, -1), *[-1] * 15]
    rows, size = levels.eligible_rows(of(), train)
    assert int(size) == 20 and rows.tolist() == train.row.tolist()


def drawn(clients, round=0, seed=0, **given):
    draw, eligible = levels.assigned(of(levels="dynamic", **given), 1000)
    assert eligible is None
    return draw(seed, round, np.asarray(clients))


def test_draws_are_named_by_seed_round_and_client():
    """Any cohort and order: the same; another seed, round or client: another."""
    everybody = np.arange(1000)
    whole = drawn(everybody)
    np.testing.assert_array_equal(drawn(everybody), whole)
    some = np.random.default_rng(0).permutation(1000)[:50]
    np.testing.assert_array_equal(drawn(some), whole[some])
    np.testing.assert_array_equal([drawn([k])[0] for k in some], whole[some])
    others = [drawn(everybody, round=1), drawn(everybody, seed=1), np.roll(whole, 1)]
    for other in others:
        # Unrelated draws of four equal levels agree in a quarter of all cases.
        assert abs((other == whole).mean() - 0.25) < 0.06
    # What they are is part of a run's identity.
    assert drawn(range(12), round=3, seed=5).tolist() == [
        3,
        2,
        2,
        2,
        2,
        2,
        3,
        4,
        1,
        3,
        4,
        1,
    ]
    words = rng.hashed(5, "levels.level", 3, everybody)
    quarter = 1 + (words >> np.uint64(62)).astype(int)
    np.testing.assert_array_equal(drawn(everybody, round=3, seed=5), quarter)


@pytest.mark.parametrize(
    "mix, share",
    [
        ("1:1:1:1", [0.25] * 4),
        ("7:1:1:1", [0.7, 0.1, 0.1, 0.1]),
        ("0:1:0:3", [0, 0.25, 0, 0.75]),
        ("0:0:0:1", [0, 0, 0, 1]),
    ],
)
def test_draws_are_in_proportion(mix, share):
    """Over clients, and over the rounds of one; what has no share never comes."""
    many = drawn(np.arange(1000), level_mix=mix)
    one = np.concatenate([drawn([3], round=r, level_mix=mix) for r in range(1000)])
    for found in (many, one):
        counts = np.bincount(found, minlength=5)[1:] / 1000
        np.testing.assert_allclose(counts, share, rtol=0, atol=0.05)
        assert (counts[np.array(share) == 0] == 0).all()


def test_draws_are_capped():
    """A global model of level 2: who draws more trains that."""
    whole = drawn(np.arange(1000))
    capped = drawn(np.arange(1000), max_level=2)
    np.testing.assert_array_equal(capped, np.minimum(whole, 2))


def planner(level_of, eligible=None, clients_per_round=3):
    return plan.Planner(
        seeds=[0, 1],
        num_rows=np.full((2, 8), 6),
        client_group=np.zeros(8, int),
        level_of=level_of,
        clients_per_round=clients_per_round,
        specs=[types.PlanSpec("local", 1, 2)],
        execution=types.Execution(2),
        eligible=eligible,
    )


def test_draws_of_a_cohort():
    """Each client has its draw of the round; the same clients come as without levels.

    Draws forced to a fixed table are that table, bit for bit (property 19).
    """
    draw, _ = levels.assigned(of(levels="dynamic"), 8)
    fixed, _ = levels.assigned(of(), 8)
    for seed, round in itertools.product((0, 1), range(4)):
        one, other = (planner(x).cohort(seed, round) for x in (draw, fixed))
        real = one.row_mask
        expected = draw(seed, round, one.client_id[real])
        np.testing.assert_array_equal(one.level[real], expected)
        chosen = {*one.client_id[real].tolist()}
        assert chosen == {*other.client_id[other.row_mask].tolist()}
        forced = planner(lambda seed, round, client: fixed[client])
        chex.assert_trees_all_equal(forced.cohort(seed, round), other)


def test_who_cannot_hold_it_is_not_drawn():
    """Clients 6 and 7 alone hold level 4; three cannot be drawn."""
    given = levels.assigned(of(exclusive=True), 8)
    one = planner(*given, clients_per_round=2).cohort(0, 0)
    assert sorted(one.client_id.tolist()) == [6, 7] and one.level.tolist() == [4, 4]
    with pytest.raises(ValueError, match="--clients_per_round=3: 2 of 8 clients"):
        planner(*given, clients_per_round=3)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"level_mix": mix}, f"--level_mix={mix}: expected whole numbers")
        for mix in (
            "",
            "1:",
            ":1",
            "1::1",
            "1,1",
            "a:b",
            "1:-1",
            "1:1.5",
            "1: 1",
            "1e3",
        )
    ]
    + [
        ({"level_mix": "1:9999999"}, "--level_mix=1:9999999: expected whole numbers"),
        ({"level_mix": "0:0:0"}, "--level_mix=0:0:0 gives no client a level"),
        ({"max_level": 5}, "--max_level=5: expected at most 4, .*=1:1:1:1; lower"),
        ({"max_level": 2, "level_mix": "1"}, "--max_level=2: expected at most 1"),
        (
            {"exclusive": True, "level_mix": "1:1:0"},
            "--level_mix=1:1:0 gives none of --num_clients=8 level 3; .*--max_level=2",
        ),
        ({"level_mix": "99:1:1"}, "gives none of --num_clients=8 level 3"),
        ({"level_mix": "1:0", "levels": "dynamic"}, "gives none of .* level 2"),
        ({"level_mix": "٣:1"}, "expected whole numbers"),
        ({"levels": "random"}, "--levels=random: expected one of fixed, dynamic, max"),
        ({"max_level": -1}, "--max_level=-1: expected at least 0"),
    ],
)
def test_refused(given, words):
    """One line with the flag, what came and what to change."""
    with pytest.raises(ValueError, match=words) as error:
        options.validate(of(**given))
        levels.assigned(of(**given), 8)
    assert "\n" not in str(error.value)


def test_levels_of_a_model():
    """As many as exits, or one; a smaller global model is the first of them."""
    deep, plain = small.linear("deep", 3), small.linear("plain")
    mix = {"level_mix": "2:1:1"}
    assert levels.truncated(of(**mix), deep) is deep
    short = levels.truncated(of(**mix, max_level=2), deep)
    assert short.stage_names == ("s1", "s2")
    key, x = jax.random.key(0), jnp.zeros((1, small.WIDTH))
    whole, part = deep.init(key, x), short.init(key, x)
    chex.assert_trees_all_equal(part, (whole[0][:2], whole[1][:2]))
    assert levels.truncated(of(level_mix="1"), plain) is plain
    with pytest.raises(ValueError, match="--model=plain has one exit, --level_mix=1:1"):
        levels.truncated(of(level_mix="1:1"), plain)
    for model, wrong, count in ((deep, "1:1", 3), (deep, "1", 3)):
        words = f"--level_mix={wrong} has .*--model={model.name} has {count};"
        with pytest.raises(ValueError, match=words):
            levels.truncated(of(level_mix=wrong), model)
    for given, flag in (
        ({"exclusive": True}, "--exclusive"),
        ({"levels": "dynamic"}, "--levels=dynamic"),
    ):
        with pytest.raises(ValueError, match=f"{flag}: --model=plain has one level,"):
            levels.truncated(of(level_mix="1", **given), plain)


@pytest.mark.parametrize("jit", [False, True])
def test_held(jit):
    """The first stages, also of many clients; all where there is one exit."""
    deep, plain = small.linear("deep", 3), small.linear("plain")
    depth = jnp.array([[1, 3], [2, 4]])

    def both(depth):
        return levels.held(depth, deep), levels.held(depth, plain)

    found, all_of_it = jax.jit(both)(depth) if jit else both(depth)
    expected = [[[1, 0, 0], [1, 1, 1]], [[1, 1, 0], [1, 1, 1]]]
    np.testing.assert_array_equal(found, np.array(expected, bool))
    assert all_of_it.shape == (2, 2, 1) and all_of_it.all()


SIZES = [5, 3]


@pytest.mark.parametrize("level, depth", [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)])
def test_training_of_the_first_stages(level, depth):
    """What is not held, or not run, comes back bit for bit; the rest moves.

    With weight decay, momentum and a pull on everything, also on what the loss skips.
    """
    data, model = small.tables(SIZES), small.linear("deep", 3)
    hparams = local_training.LocalTraining(
        weight_decay=0.1, client_momentum=0.5, optimizer_state="persist"
    )
    params = model.init(jax.random.key(0), jnp.zeros((1, small.WIDTH)))[0]
    stats = tuple({"seen": jnp.float32(i)} for i in range(3))
    state = small.opt_states(hparams, params, 1)
    state = jax.tree.map(lambda leaf: leaf[0] + 0.25, state)
    client = small.client(data, small.plan(SIZES), opt_state=state)
    client = client.replace(level=jnp.int32(depth))
    held = levels.held(client.level, model)[:level]

    def loss_fn(params, stats, batch):
        assert len(params) == len(stats) == level
        out, _ = model.forward(params, stats, batch.image)
        hard = [losses.cross_entropy(z, batch.label, batch.mask) for z in out]
        moved = tuple({"seen": one["seen"] + 1} for one in stats)
        return sum(hard), moved

    def pulled(params, grads):
        return jax.tree.map(lambda g: g + 0.3, grads)

    objective = local_training.Objective(loss_fn, held, adjust=pulled)
    task = types.Task(model, (model,), np.zeros(2), 2, 4, 0, 2, 5, (small.WIDTH,))
    part, whole = levels.first_stages(task, model), (params, stats, state)
    *cut, opt_state = part.cut(whole, client, level)
    own = client.replace(opt_state=opt_state)
    trained = local_training.train(hparams, (objective,), types.Variables(*cut), own)
    new = (trained.params, trained.stats, trained.opt_state)
    pairs = list(zip(part.paste(new, whole, client, level), whole, strict=True))
    for i in range(3):
        for new, old in pairs:
            if i >= depth:
                chex.assert_trees_all_equal(new[i], old[i])
            else:
                gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), new[i], old[i])
                assert min(jax.tree.leaves(gaps)) > 1e-3
    assert boundary.held(client.level, level).sum() == depth
