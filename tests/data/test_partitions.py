"""Partitions: who gets which rows, for every partitioner and test split."""

import numpy as np
import pytest

from data import dataset, partitions
from data.partitions import classes, dirichlet, held_out, parts

MNIST_COUNTS = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)


def make_table(counts, num_train=None, client=None):
    """A table of one-pixel images with `counts` rows per class, classes mixed."""
    label = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    label = np.random.default_rng(7).permutation(label)
    image = np.zeros((len(label), 1), np.uint8)
    if num_train is None:
        num_train = len(label)
    return dataset.Dataset(image, label, num_train, len(counts), client)


def spec(kind, num_clients=10, **rest):
    """A `PartitionSpec` with everything in one test split."""
    return partitions.PartitionSpec(partition=kind, num_clients=num_clients, **rest)


def by_client(split):
    """(train, test) rows of each client."""
    return list(zip(split.train.by_client(), split.test.by_client(), strict=True))


def owned(split):
    """All rows of each client, train and test together."""
    return [np.concatenate(both) for both in by_client(split)]


def histogram(split, source):
    """int[K, Y]: rows of each class on each client."""
    return np.stack(
        [
            np.bincount(source.label[rows], minlength=source.num_classes)
            for rows in owned(split)
        ]
    )


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "client_dirichlet"])
def test_every_row_belongs_to_exactly_one_client(kind):
    """1,000 rows over 10 clients: none lost, none shared."""
    split = partitions.split(make_table([100] * 10), spec(kind), 3)
    np.testing.assert_array_equal(
        np.sort(np.concatenate(owned(split))), np.arange(1000)
    )


def test_iid_sizes_and_histogram():
    """Sizes differ by one row at most; every client has a fair share of each class."""
    source = make_table([1000] * 4)
    split = partitions.split(source, spec("iid", 7), 0)
    sizes = np.array([len(rows) for rows in owned(split)])
    assert sizes.max() - sizes.min() == 1
    assert sizes.sum() == 4000
    share = histogram(split, source) / sizes[:, None]
    # Binomial: 0.25 with a standard deviation of 0.018 for 571 rows.
    assert np.abs(share - 0.25).max() < 0.08


def test_iid_is_not_the_identity():
    """The rows are shuffled before they are cut."""
    split = partitions.split(make_table([500, 500]), spec("iid", 2), 0)
    assert 100 < (owned(split)[0] < 500).sum() < 400


def test_dirichlet_minimum_size_holds():
    """Redrawn until everyone has min_examples, spec test 32."""
    source = make_table([300] * 10)
    for seed in range(5):
        split = partitions.split(
            source, spec("dirichlet", 30, partition_alpha=0.5, min_examples=15), seed
        )
        assert min(len(rows) for rows in owned(split)) >= 15
        np.testing.assert_array_equal(
            np.sort(np.concatenate(owned(split))), np.arange(3000)
        )


def test_dirichlet_small_alpha_is_unequal():
    """alpha=0.1: the largest class share of a client is mostly above a half."""
    source = make_table([600] * 10)
    small = partitions.split(source, spec("dirichlet", partition_alpha=0.1), 0)
    large = partitions.split(source, spec("dirichlet", partition_alpha=100.0), 0)

    def top(split):
        counts = histogram(split, source)
        return (counts.max(1) / counts.sum(1)).mean()

    assert top(small) > 0.4
    assert top(large) < 0.2


def test_dirichlet_cap_stops_full_clients():
    """A client at N / K or above gets nothing of the later classes."""
    labels = np.repeat(np.arange(10), 500)
    cap = len(labels) / 5
    capped = 0
    for seed in range(10):
        drawn = dirichlet.split(
            labels,
            num_clients=5,
            alpha=0.3,
            min_examples=2,
            gen=np.random.default_rng(seed),
        )
        counts = np.stack(
            [np.bincount(labels[p], minlength=10) for p in drawn.by_client()]
        )
        before = np.cumsum(counts, axis=1) - counts
        assert (counts[before >= cap] == 0).all()
        capped += (before >= cap).sum()
    assert capped > 0


def test_client_dirichlet_equal_sizes_and_disjoint():
    """Everyone has floor(N / K) rows, no row twice, whatever alpha."""
    source = make_table([250, 90, 333, 120, 207])
    for alpha in (0.01, 0.5, 100.0):
        one = spec("client_dirichlet", 7, partition_alpha=alpha)
        parts = owned(partitions.split(source, one, 2))
        assert {len(rows) for rows in parts} == {1000 // 7}
        rows = np.concatenate(parts)
        assert len(np.unique(rows)) == len(rows)


def test_client_dirichlet_small_alpha_concentrates():
    """Small alpha: mostly one class; large alpha: the supply's own mix."""
    source = make_table([200] * 10)

    def counts(alpha):
        one = spec("client_dirichlet", 20, partition_alpha=alpha)
        return histogram(partitions.split(source, one, 0), source)

    few = counts(0.01)
    assert np.median(few.max(1) / few.sum(1)) > 0.7
    assert np.abs(counts(1e6) - 10).max() <= 2


@pytest.mark.parametrize("per_client", [1, 2, 5, 10])
def test_pathological_exactly_k_classes(per_client):
    """Every client has exactly k classes, every row is used once."""
    source = make_table([120, 80, 100, 100, 100, 60, 140, 100, 100, 100])
    for seed in range(3):
        split = partitions.split(
            source, spec("pathological", 20, classes_per_client=per_client), seed
        )
        counts = histogram(split, source)
        np.testing.assert_array_equal((counts > 0).sum(1), per_client)
        rows = np.concatenate(owned(split))
        assert len(np.unique(rows)) == len(rows)
        # One class each on 20 clients: every class finds an owner.
        assert len(rows) == 1000


def test_pathological_shards_are_equal_for_equal_classes():
    """10 classes of 100 rows, 20 clients, 2 classes each: shards of 25 rows."""
    source = make_table([100] * 10)
    split = partitions.split(source, spec("pathological", 20, classes_per_client=2), 0)
    counts = histogram(split, source)
    assert set(np.unique(counts)) == {0, 25}


def test_pathological_overlap_draws_with_replacement():
    """Two of nine classes each, floor(floor(N / K) / 2) images of both."""
    source = make_table([30, 60, 45, 50, 40, 55, 25, 65, 41])
    one = spec("pathological", 12, classes_per_client=2, partition_draw="overlap")
    split = partitions.split(source, one, 3)
    counts = histogram(split, source)
    # 411 rows: 34 for each of 12 clients, 17 of each class.
    np.testing.assert_array_equal(np.sort(counts, axis=1)[:, -3:], [[0, 17, 17]] * 12)
    mine = owned(split)
    # Of 30 to 65 images 17 draws with replacement hit one twice, but for one in ten.
    assert np.mean([len(np.unique(rows)) < 34 for rows in mine]) > 0.8
    rows = np.concatenate(mine)
    assert len(np.unique(rows)) < len(rows) - 12
    shared = [
        set(train.tolist()) & set(test.tolist()) for train, test in by_client(split)
    ]
    assert any(shared)


def test_pathological_overlap_draws_classes_and_images_evenly():
    """Every pair of classes and every image is as likely: five deviations."""
    source = make_table([10] * 5)
    chosen, drawn = np.zeros((5, 5)), np.zeros(50)
    for seed in range(60):
        one = spec("pathological", 5, classes_per_client=2, partition_draw="overlap")
        split = partitions.split(source, one, seed)
        has = (histogram(split, source) > 0).astype(int)
        chosen += has.T @ has
        drawn += np.bincount(np.concatenate(owned(split)), minlength=50)
    # 300 clients, 10 pairs; 3,000 draws of 50 images, five of a class at a time.
    pairs = chosen[np.triu_indices(5, 1)]
    assert pairs.sum() == 300 and np.abs(pairs - 30).max() < 5 * 27**0.5
    assert drawn.sum() == 3000 and np.abs(drawn - 60).max() < 5 * 72**0.5


def test_classes_as_named():
    """Each class in equal parts to its owners, the first gets what is left over."""
    source = make_table([41, 41, 60, 35, 90])
    named = ((0, 1), (1, 0), (2, 3), (3,))
    one = spec("classes", 4, client_classes=named)
    split = partitions.split(source, one, 5)
    np.testing.assert_array_equal(
        histogram(split, source),
        [[21, 21, 0, 0, 0], [20, 20, 0, 0, 0], [0, 0, 60, 18, 0], [0, 0, 0, 17, 0]],
    )
    rows = np.concatenate(owned(split))
    assert len(np.unique(rows)) == len(rows)
    other = partitions.split(source, one, 6)
    assert set(owned(split)[0].tolist()) != set(owned(other)[0].tolist())


def test_classes_count_only_rows_that_have_an_owner():
    """Ten examples a client on average, of the named classes alone."""
    source = make_table([100] * 10)
    named = classes.parse("0,1/0,1/2,3")
    one = spec("classes", 3, client_classes=named, examples_per_client=10)
    counts = histogram(partitions.split(source, one, 0), source)
    assert counts.sum() == 30 and not counts[:, 4:].any()
    # Of 30 rows drawn from four classes.
    assert np.abs(counts.sum(1) - [7.5, 7.5, 15]).max() < 7


def test_classes_of_text():
    """Commas between classes, slashes between clients."""
    assert classes.parse("0,1/0,1/2,3") == ((0, 1), (0, 1), (2, 3))
    assert classes.parse("7") == ((7,),)
    assert classes.parse(" 10, 2 / 3") == ((10, 2), (3,))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "client 0 has ''; expected class numbers"),
        ("0,1//2", "client 1 has ''"),
        ("0,a/1", "client 0 has '0,a'"),
        ("0/-1", "client 1 has '-1'"),
        ("\u0661", "expected class numbers"),
        ("0/" + "9" * 50, "expected class numbers"),
        ("0/1,2,1", "client 1 has 1,2,1, a class twice"),
    ],
)
def test_classes_that_are_none(text, reason):
    """One line: the client, what came, what was expected."""
    with pytest.raises(ValueError, match=f"^--client_classes=.*{reason}") as error:
        classes.parse(text)
    assert "\n" not in str(error.value)


def test_classes_that_the_data_do_not_have():
    """An unknown class, and one of which no row is left."""
    source = make_table([40, 40, 0, 40])
    one = spec("classes", 2, client_classes=((0, 1), (1, 7)))
    with pytest.raises(
        ValueError, match="--client_classes: client 1 has class 7.*0 to 3"
    ):
        partitions.split(source, one, 0)
    one = spec("classes", 2, client_classes=((0, 1), (2,)))
    with pytest.raises(
        ValueError, match="--client_classes leaves client 1 with 0 exam"
    ):
        partitions.split(source, one, 0)


def test_natural_keeps_the_owners():
    """Client k owns exactly the rows with its id."""
    client = np.random.default_rng(0).integers(0, 6, 300).astype(np.int32)
    source = make_table([150, 150], client=client)
    split = partitions.split(source, spec("natural", 6), 0)
    for k, rows in enumerate(owned(split)):
        np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(client == k))


def test_natural_gives_all_that_an_owner_has():
    """Half of it would be another data set: one line."""
    client = np.repeat(np.arange(5), 20).astype(np.int32)
    one = spec("natural", 5, examples_per_client=10)
    with pytest.raises(ValueError, match="--examples_per_client=10 has no effect with"):
        partitions.split(make_table([50, 50], client=client), one, 0)


def test_natural_takes_the_first_clients():
    """Fewer clients than owners: the first ones, unchanged."""
    client = np.repeat(np.arange(5), 20).astype(np.int32)
    split = partitions.split(make_table([50, 50], client=client), spec("natural", 2), 0)
    rows = np.sort(np.concatenate(owned(split)))
    np.testing.assert_array_equal(rows, np.arange(40))


@pytest.mark.parametrize(
    "kind, num_test",
    [
        ("client_share", lambda n: int(np.floor(0.2 * n))),
        ("pool", lambda n: n - int(np.floor(0.8 * n))),
        ("pool_stratified", lambda n: n - int(np.floor(0.8 * n))),
    ],
)
def test_split_sizes(kind, num_test):
    """floor(.2 n) test rows, or floor(.8 n) train rows, for clients of all sizes."""
    sizes = [5, 6, 7, 8, 9, 10, 13, 15, 20, 24, 25, 60]
    client = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    label = np.arange(len(client)) % 3
    source = dataset.Dataset(
        np.zeros((len(client), 1), np.uint8), label, len(client), 3, client
    )
    split = partitions.split(source, spec("natural", len(sizes), test_split=kind), 0)
    for size, (train, test) in zip(sizes, by_client(split), strict=True):
        assert len(test) == num_test(size)
        assert len(train) + len(test) == size
        assert not set(train.tolist()) & set(test.tolist())


def test_pool_split_merges_the_official_parts():
    """`pool` shares out official test rows too; `client_share` does not."""
    source = make_table([100, 100], num_train=150)
    merged = partitions.split(source, spec("iid", 4, test_split="pool"), 0)
    apart = partitions.split(source, spec("iid", 4, test_split="client_share"), 0)
    np.testing.assert_array_equal(
        np.sort(np.concatenate(owned(merged))), np.arange(200)
    )
    np.testing.assert_array_equal(np.sort(np.concatenate(owned(apart))), np.arange(150))


def test_stratified_split_of_many_clients_is_that_of_each_one():
    """Largest remainders, client by client: floor, then the largest fractions."""
    gen = np.random.default_rng(0)
    client = gen.integers(0, 80, 2000).astype(np.int32)
    client[:160] = np.repeat(np.arange(80), 2)
    label = gen.choice(7, 2000, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05])
    source = dataset.Dataset(np.zeros((2000, 1), np.uint8), label, 2000, 7, client)
    split = partitions.split(
        source, spec("natural", 80, test_split="pool_stratified"), 0
    )
    for k, (train, _) in enumerate(by_client(split)):
        have = np.bincount(label[client == k], minlength=7)
        want = have * (int(0.8 * have.sum() + 1e-9) / have.sum())
        take = np.floor(want).astype(int)
        missing = int(0.8 * have.sum() + 1e-9) - take.sum()
        take[np.argsort(take - want, kind="stable")[:missing]] += 1
        np.testing.assert_array_equal(np.bincount(label[train], minlength=7), take)


@pytest.mark.parametrize("kind", ["pool", "pool_stratified", "client_share"])
def test_test_rows_are_named_by_seed_and_client(kind):
    """The same beside other clients of any size; others for another seed."""
    gen = np.random.default_rng(0)
    label, few = np.zeros(600, int), parts.Parts(np.arange(60), np.array([25, 35]))
    many = parts.Parts(
        np.concatenate([few.row, gen.permutation(np.arange(60, 600))]),
        np.array([25, 35, 500, 3, 37]),
    )
    alone = held_out.split(few, label, kind, 5)
    beside = held_out.split(many, label, kind, 5)
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(one.row, other.row[: len(one.row)])
        np.testing.assert_array_equal(one.count, other.count[:2])
    again = held_out.split(few, label, kind, 6)
    assert not np.array_equal(np.sort(alone[1].row), np.sort(again[1].row))


@pytest.mark.parametrize("kind", ["pool", "pool_stratified", "client_share"])
def test_every_row_is_a_test_row_equally_often(kind):
    """Ten rows, two of them tests: a fifth of 1,000 clients, five deviations."""
    owned = parts.Parts(np.arange(10_000), np.full(1000, 10))
    _, test = held_out.split(owned, np.zeros(10_000, int), kind, 1)
    assert (test.count == 2).all()
    count = np.bincount(test.row % 10)
    assert np.abs(count - 200).max() < 5 * np.sqrt(1000 * 0.2 * 0.8)


def test_official_split():
    """Clients train on all their rows; the official test rows are everybody's."""
    source = make_table([60, 60], num_train=100)
    split = partitions.split(source, spec("iid", 5, test_split="official"), 0)
    np.testing.assert_array_equal(np.sort(split.train.row), np.arange(100))
    assert split.test.count.tolist() == [0] * 5
    np.testing.assert_array_equal(split.official_test, np.arange(100, 120))


def test_official_split_needs_official_rows():
    """A user's arrays have no official test part: one clear line."""
    with pytest.raises(ValueError, match="--test_split=official"):
        partitions.split(make_table([50, 50]), spec("iid", test_split="official"), 0)


@pytest.mark.parametrize(
    "counts, fraction, expected",
    [
        (MNIST_COUNTS, 0.005, 355),
        ([7000] * 10, 0.005, 350),
        ([6000] * 10, 0.07, 4200),
        ([600] * 100, 0.07, 4200),
        ([200] * 5, 0.005, 5),
    ],
)
def test_proxy_rows(counts, fraction, expected):
    """n_c - floor((1 - fraction) n_c) rows of every class, the last ones."""
    labels = np.repeat(np.arange(len(counts)), counts)
    rows = partitions.proxy_rows(labels, fraction)
    assert len(rows) == expected
    starts = np.cumsum(counts) - counts
    for c, (start, count) in enumerate(zip(starts, counts, strict=True)):
        mine = rows[labels[rows] == c]
        np.testing.assert_array_equal(
            mine, np.arange(start + count - len(mine), start + count)
        )


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "client_dirichlet"])
@pytest.mark.parametrize("test_split", ["pool", "client_share", "official"])
def test_proxy_train_and_test_are_disjoint(kind, test_split):
    """No row is in two of proxy, train and test."""
    source = make_table([100] * 6, num_train=480)
    one = spec(kind, 6, test_split=test_split, proxy_fraction=0.1)
    split = partitions.split(source, one, 4)
    rows = np.concatenate(
        [split.proxy, split.train.row, split.test.row, split.official_test]
    )
    assert len(np.unique(rows)) == len(rows)
    assert len(split.proxy) >= 48
    counts = np.bincount(source.label[split.proxy], minlength=6)
    assert (counts > 0).all()


def test_proxy_depends_on_the_seed():
    """Other seeds, other proxy rows; the count per class stays."""
    source = make_table([100] * 4)
    one = spec("iid", 4, proxy_fraction=0.1)
    first, second = (partitions.split(source, one, seed).proxy for seed in (0, 1))
    assert set(first.tolist()) != set(second.tolist())
    np.testing.assert_array_equal(
        np.bincount(source.label[first]), np.bincount(source.label[second])
    )


@pytest.mark.parametrize(
    "kind", ["iid", "dirichlet", "client_dirichlet", "pathological"]
)
def test_a_partition_is_a_function_of_its_seed(kind):
    """Equal for equal seeds, different for different ones."""
    source = make_table([100] * 5)
    one = spec(kind, 5, proxy_fraction=0.05)
    first, again, other = (partitions.split(source, one, s) for s in (8, 8, 9))
    for a, b in zip(
        [*first.train, *first.test, first.proxy],
        [*again.train, *again.test, again.proxy],
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert any(
        set(a.tolist()) != set(b.tolist())
        for a, b in zip(owned(first), owned(other), strict=True)
    )


def test_examples_per_client_limits_the_pool():
    """`examples_per_client` bounds the rows in use, on average."""
    source = make_table([500] * 2)
    split = partitions.split(source, spec("iid", 4, examples_per_client=30), 0)
    assert [len(rows) for rows in owned(split)] == [30] * 4


def test_dirichlet_that_leaves_a_client_empty():
    """Names the flag, how many came off badly, what is needed and the ways out."""
    one = spec("dirichlet", 20, partition_alpha=0.001, min_examples=10)
    with pytest.raises(
        ValueError,
        match="--partition_alpha=0.001 leaves clients with fewer than 10 .*raise it",
    ):
        partitions.split(make_table([100] * 4), one, 0)


@pytest.mark.parametrize("num_clients, tries", [(20, 200), (500, 5)])
def test_dirichlet_gives_up_when_there_is_no_hope(num_clients, tries):
    """Few clients: all 200 draws; hundreds that come off badly: the first five."""
    one = spec("dirichlet", num_clients, partition_alpha=0.01)
    source = make_table([num_clients] * 10)
    with pytest.raises(ValueError, match=f"in the best of {tries} draws"):
        partitions.split(source, one, 0)


def test_natural_client_left_empty():
    """A client with a single row is refused by number."""
    client = np.array([0] * 10 + [1] * 1 + [2] * 9, np.int32)
    with pytest.raises(ValueError, match="leaves client 1 with 1 examples"):
        partitions.split(make_table([10, 10], client=client), spec("natural", 3), 0)


@pytest.mark.parametrize(
    "kind", ["iid", "dirichlet", "client_dirichlet", "pathological"]
)
def test_more_clients_than_rows(kind):
    """Too many clients for the rows: names --num_clients."""
    with pytest.raises(ValueError, match="--num_clients=50.*lower it"):
        partitions.split(make_table([20, 20]), spec(kind, 50), 0)


def test_too_many_classes_per_client():
    """More classes per client than classes: names the flag."""
    one = spec("pathological", 4, classes_per_client=7)
    with pytest.raises(ValueError, match="--classes_per_client=7.*5 classes"):
        partitions.split(make_table([40] * 5), one, 0)


def test_a_small_class_still_gives_k_classes():
    """A class with fewer rows than clients does not break `exactly k`."""
    source = make_table([3, 97, 100, 100])
    split = partitions.split(source, spec("pathological", 10, classes_per_client=3), 0)
    np.testing.assert_array_equal((histogram(split, source) > 0).sum(1), 3)


def test_stack_pads_the_shorter_seeds():
    """Seeds of different sizes: flat rows, starts, counts, -1 up to a power of two."""
    splits = [
        partitions.Split(
            train=parts.Parts(np.array([4, 5, 6, 7]), np.array([3, 1])),
            test=parts.Parts(np.array([0, 1, 2]), np.array([1, 2])),
            official_test=np.array([], int),
            proxy=np.array([8, 9]),
        ),
        partitions.Split(
            train=parts.Parts(np.array([1, 2, 3]), np.array([1, 2])),
            test=parts.Parts(np.array([0]), np.array([0, 1])),
            official_test=np.array([], int),
            proxy=np.array([5]),
        ),
    ]
    stacked = partitions.stack(splits)
    np.testing.assert_array_equal(stacked.train.row, [[4, 5, 6, 7], [1, 2, 3, -1]])
    np.testing.assert_array_equal(stacked.train.start, [[0, 3], [0, 1]])
    np.testing.assert_array_equal(stacked.train.count, [[3, 1], [1, 2]])
    np.testing.assert_array_equal(stacked.test.row, [[0, 1, 2, -1], [0, -1, -1, -1]])
    np.testing.assert_array_equal(stacked.test.start, [[0, 1], [0, 0]])
    np.testing.assert_array_equal(stacked.test.count, [[1, 2], [0, 1]])
    np.testing.assert_array_equal(stacked.proxy, [[8, 9], [5, -1]])
    for leaf in (stacked.train.row, stacked.test.start, stacked.proxy):
        assert leaf.dtype == np.int32


def test_stack_of_official_splits():
    """Nobody owns the official test rows, and they are the union."""
    source = make_table([60, 60], num_train=100)
    one = spec("iid", 5, test_split="official")
    stacked = partitions.stack([partitions.split(source, one, s) for s in (0, 1)])
    np.testing.assert_array_equal(stacked.test.count, np.zeros((2, 5)))
    expected = np.append(np.arange(100, 120), np.full(12, -1))
    np.testing.assert_array_equal(stacked.test.row, [expected] * 2)
    assert stacked.proxy.shape == (2, 0)


def test_words_of_clients_differ():
    """Two clients with equal rows do not get the same test positions."""
    client = np.repeat([0, 1], 100).astype(np.int32)
    split = partitions.split(
        make_table([100, 100], client=client), spec("natural", 2), 0
    )
    first, second = (np.sort(rows) % 100 for rows in split.test.by_client())
    assert not np.array_equal(first, second)
