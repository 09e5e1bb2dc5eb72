"""Clients' class mixes: number 24 and the table of section 3.2 of fedd2s.md."""

import jax
import numpy as np
import pytest

from data import partitions
from data.partitions import client_dirichlet
from launch import build
from tests.data import tables

NUM_CLIENTS = 50
every_draw = pytest.mark.parametrize("draw", client_dirichlet.DRAWS)


def split(source, draw, alpha, num_clients=NUM_CLIENTS, seed=0, **more):
    spec = partitions.PartitionSpec(
        partition="client_dirichlet",
        num_clients=num_clients,
        partition_alpha=alpha,
        partition_draw=draw,
        **more,
    )
    return partitions.split(source, spec, seed)


def shares(source, one):
    """f64[K, Y]: the label mix of each client."""
    counts = tables.histogram(one, source)
    return counts / counts.sum(1, keepdims=True)


def realised(draw, alpha, seed, num_classes=10, size=1000):
    """(wanted mixes, realised shares) f64[50, Y] of `client_dirichlet.split` itself.

    The mixes are the generator's first draw, repeated here.
    """
    labels = np.repeat(np.arange(num_classes), size * NUM_CLIENTS // num_classes)
    wanted = np.random.default_rng(seed).dirichlet(
        np.full(num_classes, alpha), NUM_CLIENTS
    )
    parts = client_dirichlet.split(
        labels,
        num_clients=NUM_CLIENTS,
        alpha=alpha,
        draw=draw,
        gen=np.random.default_rng(seed),
    )
    counts = np.stack(
        [np.bincount(labels[p], minlength=num_classes) for p in parts.by_client()]
    )
    assert (counts.sum(1) == size).all()
    return wanted, counts / size


def distance(pair):
    """Total variation of each client's realised mix to the wanted one."""
    wanted, found = pair
    return 0.5 * np.abs(wanted - found).sum(1)


@every_draw
@pytest.mark.parametrize("counts", [[400] * 10, [250, 90, 333, 120, 207]])
@pytest.mark.parametrize("alpha", [0.01, 0.5, 100.0])
def test_sizes_and_ownership(draw, counts, alpha):
    """Number 24: exactly K rows each, disjoint, within supply; a fifth is for tests.

    Clients are disjoint except with `overlap`; each has no row twice in any case.
    """
    source, num_clients = tables.table(counts), 7
    one = split(source, draw, alpha, num_clients)
    size = sum(counts) // num_clients
    for train, test in tables.by_client(one):
        assert len(train) + len(test) == size and len(test) == size // 5
        assert len(np.unique(np.concatenate([train, test]))) == size
    rows = np.concatenate(tables.owned(one))
    assert rows.min() >= 0 and rows.max() < sum(counts)
    if draw == "overlap":
        assert len(np.unique(rows)) < len(rows)
    else:
        assert len(np.unique(rows)) == len(rows)
        held = np.bincount(source.label[rows], minlength=len(counts))
        assert (held <= counts).all()


def test_all_methods_see_the_same_rows(blobs):
    """Number 24: the partition does not depend on the algorithm or its options."""
    made = [
        build.experiment(
            dataset=blobs,
            algo=algo,
            preset="none",
            partition="client_dirichlet",
            partition_draw="ipf",
            num_clients=6,
            clients_per_round=3,
            seed=5,
            devices=1,
            **more,
        )
        for algo, more in (
            ("fedavg", {}),
            ("fedper_plus", {"local_epochs": 3, "min_layer": 1}),
            ("fedict", {"batch_size": 7}),
            ("pfedsd", {"client_optimizer": "adam"}),
            ("majority", {}),
        )
    ]
    first, *others = (jax.tree.leaves(one.data.partition) for one in made)
    for leaves in others:
        for a, b in zip(first, leaves, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_flag_reaches_the_partition(blobs):
    """--partition_draw: every draw gives other rows."""
    common = {"dataset": blobs, "algo": "fedavg", "num_clients": 6, "devices": 1}
    rows = [
        np.asarray(
            build.experiment(
                partition="client_dirichlet", partition_draw=draw, **common
            ).data.partition.train.row
        ).tobytes()
        for draw in client_dirichlet.DRAWS
    ]
    assert len(set(rows)) == len(client_dirichlet.DRAWS)


@every_draw
def test_small_alpha_concentrates(draw):
    """Number 24: alpha = .01 gives a mean top share above .8 (N = 50, C = 10).

    `interleaved` draws until classes are empty and reaches about .76 only.
    """
    source = tables.table([2000] * 10)
    top = np.mean(
        [
            shares(source, split(source, draw, 0.01, seed=seed)).max(1).mean()
            for seed in range(3)
        ]
    )
    assert top > (0.7 if draw == "interleaved" else 0.8)


def test_large_alpha_is_uniform():
    """Number 24: alpha = 1e4 gives every label mix within 3 points of uniform."""
    source = tables.table([800] * 10)
    for seed in range(3):
        found = shares(source, split(source, "ipf", 1e4, seed=seed))
        assert np.abs(found - 0.1).max() < 0.03


@pytest.mark.parametrize("draw", ["interleaved", "sequential", "overlap"])
def test_large_alpha_is_uniform_up_to_sampling(draw):
    """Number 24: the other draws sample: 4.5 standard deviations of a multinomial.

    Of `sequential` only the first half of the clients: the last get what is left.
    """
    size = 200
    _, found = realised(draw, 1e4, 0, size=size)
    bound = 4.5 * np.sqrt(0.1 * 0.9 / size)
    found = found[: NUM_CLIENTS // 2] if draw == "sequential" else found
    assert np.abs(found - 0.1).max() < bound


# Draw, alpha: mean distance to the wanted mix and mean top share, CIFAR-10's numbers.
TABLE = [
    ("ipf", 0.1, 0.172, 0.639),
    ("ipf", 0.5, 0.081, 0.381),
    ("ipf", 1.0, 0.049, 0.292),
    ("sequential", 0.1, 0.190, 0.664),
    ("sequential", 0.5, 0.122, 0.418),
    ("sequential", 1.0, 0.092, 0.312),
    ("overlap", 0.1, 0.017, 0.657),
    ("overlap", 0.5, 0.030, 0.390),
    ("overlap", 1.0, 0.033, 0.294),
    ("interleaved", 0.5, 0.087, 0.367),
    ("interleaved", 1.0, 0.059, 0.284),
]


@pytest.mark.parametrize(("draw", "alpha", "variation", "top"), TABLE)
def test_table_of_the_specification(draw, alpha, variation, top):
    """Section 3.2: N = 50, 10 classes of 5,000, means over clients and seeds.

    One seed scatters by .04 at alpha = .1 and .02 at .5: the table is met within .03.
    """
    seeds = range(1) if draw == "interleaved" else range(12)
    pairs = [realised(draw, alpha, seed) for seed in seeds]
    within = 0.03 if alpha < 1 else 0.02
    found = np.mean([distance(pair).mean() for pair in pairs])
    np.testing.assert_allclose(found, variation, atol=within)
    found = np.mean([pair[1].max(1).mean() for pair in pairs])
    np.testing.assert_allclose(found, top, atol=within)


@pytest.mark.parametrize(
    ("alpha", "variation", "top", "held"),
    [(0.1, 0.179, 0.176, 40), (0.5, 0.082, 0.073, 82), (1.0, 0.059, 0.050, 96)],
)
def test_ipf_with_a_hundred_classes(alpha, variation, top, held):
    """Section 3.2: the same quantities on CIFAR-100, and the classes a client holds."""
    pairs = [realised("ipf", alpha, seed, num_classes=100) for seed in range(4)]
    found = np.mean([distance(pair).mean() for pair in pairs])
    np.testing.assert_allclose(found, variation, atol=0.02)
    shares = np.stack([pair[1] for pair in pairs])
    np.testing.assert_allclose(shares.max(2).mean(), top, atol=0.01)
    np.testing.assert_allclose((shares > 0).sum(2).mean(), held, atol=2)


def test_only_sequential_depends_on_the_order():
    """Section 3.2: `sequential` leaves the last clients what nobody wanted."""

    def late_minus_early(draw):
        gaps = [distance(realised(draw, 0.1, seed, size=200)) for seed in range(8)]
        gaps = np.mean(gaps, axis=0)
        return gaps[-15:].mean() - gaps[:15].mean()

    assert late_minus_early("sequential") > 0.3
    assert abs(late_minus_early("ipf")) < 0.1
    assert abs(late_minus_early("overlap")) < 0.1


def test_ipf_meets_sizes_and_supply():
    """Section 3.2: row sums K and, with all rows in use, column sums = supply."""
    gen = np.random.default_rng(0)
    for counts in ([500] * 10, [100, 900, 450, 50, 1000]):
        supply = np.array(counts)
        size = supply.sum() // 10
        for alpha in (0.001, 0.05, 1.0, 100.0):
            mixes = gen.dirichlet(np.full(len(supply), alpha), 10)
            amount = client_dirichlet.ipf(mixes, size, supply, gen)
            assert (amount >= 0).all()
            np.testing.assert_array_equal(amount.sum(1), size)
            np.testing.assert_array_equal(amount.sum(0), supply)


def one_by_one(mixes, size, supply, gen):
    """`interleaved` by its words: each turn sees what all turns before it left."""
    amount, left = np.zeros(mixes.shape, int), supply.copy()
    turns = gen.permutation(np.repeat(np.arange(len(mixes)), size))
    for client, draw in zip(turns, gen.random(len(turns)), strict=True):
        share = np.where(left > 0, mixes[client], 0)
        share = share if share.sum() > 0 else left.astype(float)
        total = np.cumsum(share)
        chosen = np.flatnonzero(total > draw * total[-1])[0]
        amount[client, chosen] += 1
        left[chosen] -= 1
    return amount


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("supply", [[60] * 10, [7, 300, 40, 13, 240]])
def test_interleaved_is_one_turn_after_another(alpha, supply):
    """Many turns at once take what one after another would, wherever a class ends."""
    supply = np.array(supply)
    mixes = np.random.default_rng(1).dirichlet(np.full(len(supply), alpha), 30)
    mixes[4] = 0
    size = supply.sum() // 30
    found, expected = (
        rule(mixes, size, supply, np.random.default_rng(2))
        for rule in (client_dirichlet.interleaved, one_by_one)
    )
    np.testing.assert_array_equal(found, expected)


def test_ipf_gives_the_rest_by_largest_fraction():
    """One example of ten for each client, whoever comes first; then what is left."""
    wanted = np.array([[5.6, 2.3, 2.1], [2.3, 5.4, 2.3], [2.1, 2.3, 5.6]])
    supply = np.array([10, 10, 10])
    for seed in range(6):
        gen = np.random.default_rng(seed)
        found = client_dirichlet.ipf(wanted / 10, 10, supply, gen)
        np.testing.assert_array_equal(found, 2 + 4 * np.eye(3))
        # Both want the first class more, and one example of it is left.
        both = client_dirichlet.ipf(np.full((2, 2), 0.5), 5, supply[:2] // 2, gen)
        same = np.random.default_rng(seed)
        same.permutation(3)
        turn = same.permutation(2)
        np.testing.assert_array_equal(both[turn], [[3, 2], [2, 3]])


def test_ipf_keeps_what_can_be_kept():
    """Mixes that fit the supply come out as they are, whoever comes first.

    Doubled wishes for class 0 are cut by ratio: 2 : 1 of the odds stays.
    """
    gen = np.random.default_rng(0)
    mixes = np.array([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7]])
    found = client_dirichlet.ipf(mixes, 100, np.array([100] * 3), gen)
    np.testing.assert_array_equal(found, np.rint(mixes * 100))
    mixes = np.array([[0.8, 0.2], [2 / 3, 1 / 3]])
    found = client_dirichlet.ipf(mixes, 30000, np.array([30000] * 2), gen)
    odds = found[:, 0] / found[:, 1]
    # Scaling rows and columns keeps the ratio of odds, 4 : 2.
    np.testing.assert_allclose(odds[0] / odds[1], 2.0, rtol=1e-3)
    np.testing.assert_array_equal(found.sum(0), 30000)


@every_draw
def test_hopeless_mixes_end(draw):
    """All clients want one class only (or nothing at all): no endless loop."""
    source = tables.table([30, 30, 30])
    one = split(source, draw, 1e-9, 3)
    assert [len(rows) for rows in tables.owned(one)] == [30] * 3
    one = split(tables.table([5, 40]), draw, 1e-9, 3)
    assert [len(rows) for rows in tables.owned(one)] == [15] * 3
