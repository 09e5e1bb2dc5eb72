"""Partitions: who gets which rows, for every partitioner and test split."""

import hashlib

import numpy as np
import pytest

from data import dataset, partitions
from data.partitions import (
    cdkt,
    classes,
    client_dirichlet,
    dirichlet,
    file,
    held_out,
    parts,
    pathological,
)
from tests.data import tables

MNIST_COUNTS = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)


def spec(kind, num_clients=10, **rest):
    """A `PartitionSpec` with everything in one test split."""
    return partitions.PartitionSpec(partition=kind, num_clients=num_clients, **rest)


NAMED = ((0, 1), (1, 0), (2, 3), (3, 4), (5, 4), (2,))
PROTOCOL = cdkt.PROTOCOLS["fashion_mnist"]
KINDS = {
    "iid": {},
    "contiguous": {},
    "dirichlet": {},
    **{
        f"client_dirichlet {draw}": {"partition_draw": draw}
        for draw in client_dirichlet.DRAWS
    },
    "pathological": {},
    "pathological overlap": {"partition_draw": "overlap"},
    "classes": {"client_classes": NAMED},
    "cdkt": {"cdkt": PROTOCOL},
    "cdkt overlap": {"cdkt": PROTOCOL._replace(overlap=True)},
    "cdkt_code": {"cdkt": PROTOCOL},
    "cdkt_paper": {"cdkt": PROTOCOL._replace(random_labels=True)},
    "pfllib_dirichlet": {},
    "pfllib_pathological": {},
    "natural": {},
}
# Those whose clients have all rows of the pool, and whose rows no seed changes but that
# of CDKT's generator.
WHOLE = {"iid", "contiguous", "dirichlet", "natural"}
WHOLE |= {"pfllib_dirichlet", "pfllib_pathological"}
IN_ORDER = {"contiguous", "cdkt_code"}
SEEDLESS = IN_ORDER | {"natural"}
# Of the splits of a small table: what earlier versions drew. NumPy 2.0 to 2.4 give the
# same.
DIGESTS = {
    "iid": "17372b9d37013c62",
    "contiguous": "2aeb40bcf62a4228",
    "dirichlet": "ae70f428f3a80bde",
    "client_dirichlet ipf": "ded9bc136ae6ecd1",
    "client_dirichlet interleaved": "697dd87ec2f1f488",
    "client_dirichlet sequential": "c3b8b88fa15e9012",
    "client_dirichlet overlap": "d0b60556d370275c",
    "pathological": "be9dab0c04cf2020",
    "pathological overlap": "706b0ebc27bd615c",
    "classes": "c3d22bc182dd437a",
    "cdkt": "40f68408ac0b1edf",
    "cdkt overlap": "6897a78055b72425",
    "cdkt_code": "fc59cc5fd6cdce95",
    "cdkt_paper": "60daa705364c258b",
    "pfllib_dirichlet": "00eb05842dbbf7e5",
    "pfllib_pathological": "7c14f0de627a20a6",
    "natural": "379e96713653c683",
}


def test_laws_are_of_every_partition():
    """One that is new keeps them too."""
    assert {kind.split()[0] for kind in KINDS} | {"file:PATH"} == {
        *partitions.PARTITIONS
    }


@pytest.mark.parametrize("fraction", [0.0, 0.1])
@pytest.mark.parametrize("test_split", partitions.TEST_SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_laws(kind, test_split, fraction, tmp_path):
    """No row is in two parts, all are where they may be, a seed decides; and a file.

    Rows of `overlap` may be of several clients.
    """
    client = np.arange(2400) % 6
    if test_split == "official":
        client[1920:] = -1
    source = tables.table([400] * 6, num_train=1920, client=client)
    name = kind.split()[0]
    one = spec(name, 6, test_split=test_split, proxy_fraction=fraction, **KINDS[kind])
    made = [partitions.split(source, one, seed) for seed in (8, 8, 9)]
    split, again, other = made
    for a, b in zip(flat(split), flat(again), strict=True):
        np.testing.assert_array_equal(a, b)
    if name not in SEEDLESS:
        owned = [[{*rows.tolist()} for rows in tables.owned(each)] for each in made[1:]]
        assert all(a != b for a, b in zip(*owned, strict=True))
    assert len(tables.owned(split)) == 6

    rows = np.concatenate([split.train.row, split.test.row])
    if kind != "pathological overlap":
        assert all(len({*one}) == len(one) for one in tables.owned(split))
    assert (len(np.unique(rows)) == len(rows)) == ("overlap" not in kind)
    is_merged = test_split in ("pool", "pool_stratified", "merged")
    pool = np.setdiff1d(np.arange(2400 if is_merged else 1920), split.proxy)
    assert np.isin(rows, pool).all()
    if name in WHOLE:
        np.testing.assert_array_equal(np.sort(rows), pool)
    tail = np.arange(1920, 2400) if test_split == "official" else []
    np.testing.assert_array_equal(split.official_test, tail)
    assert split.test.count.any() == (test_split != "official")

    assert len(np.unique(split.proxy)) == len(split.proxy)
    counts = np.bincount(source.label[split.proxy], minlength=6)
    assert (counts > 0).all() == counts.any() == (fraction > 0)
    assert ({*split.proxy.tolist()} != {*other.proxy.tolist()}) == (
        fraction > 0 and name not in IN_ORDER
    )

    path = tmp_path / "deep" / "rows.npz"
    partitions.export(split, str(path))
    again = partitions.split(source, spec(f"file:{path}", 6), seed=8)
    for a, b in zip(flat(split), flat(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert file.facts(f"file:{path}") == (6, test_split != "official", fraction > 0)
    assert [p.name for p in path.parent.iterdir()] == ["rows.npz"]


@pytest.mark.parametrize("kind", KINDS)
def test_draws_are_those_of_earlier_versions(kind):
    """A seed's clients are the same in every version of this program."""
    source = tables.table([400] * 6, num_train=1920, client=np.arange(2400) % 6)
    given = KINDS[kind] | {"test_split": "client_share", "proxy_fraction": 0.1}
    split = partitions.split(source, spec(kind.split()[0], 6, **given), 8)
    found = hashlib.sha256()
    for array in flat(split):
        found.update(np.ascontiguousarray(array, np.int64).data)
    assert found.hexdigest()[:16] == DIGESTS[kind]


def flat(split):
    """Its arrays."""
    return (*split.train, *split.test, split.official_test, split.proxy)


def test_iid_sizes_and_histogram():
    """Sizes differ by one row at most; every client has a fair share of each class."""
    source = tables.table([1000] * 4)
    split = partitions.split(source, spec("iid", 7), 0)
    sizes = np.array([len(rows) for rows in tables.owned(split)])
    assert sizes.max() - sizes.min() == 1
    assert sizes.sum() == 4000
    share = tables.histogram(split, source) / sizes[:, None]
    # Binomial: 0.25 with a standard deviation of 0.018 for 571 rows.
    assert np.abs(share - 0.25).max() < 0.08


def test_dirichlet_minimum_size_holds():
    """Redrawn until everyone has min_examples, spec test 32."""
    source = tables.table([300] * 10)
    for seed in range(5):
        split = partitions.split(
            source, spec("dirichlet", 30, partition_alpha=0.5, min_examples=15), seed
        )
        assert min(len(rows) for rows in tables.owned(split)) >= 15
        np.testing.assert_array_equal(tables.all_owned(split), np.arange(3000))


def test_dirichlet_small_alpha_is_unequal():
    """alpha=0.1: the largest class share of a client is mostly above a half."""
    source = tables.table([600] * 10)
    small = partitions.split(source, spec("dirichlet", partition_alpha=0.1), 0)
    large = partitions.split(source, spec("dirichlet", partition_alpha=100.0), 0)

    def top(split):
        counts = tables.histogram(split, source)
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


@pytest.mark.parametrize("per_client", [1, 2, 5, 10])
def test_pathological_exactly_k_classes(per_client):
    """Every client has exactly k classes, every row is used once."""
    source = tables.table([120, 80, 100, 100, 100, 60, 140, 100, 100, 100])
    for seed in range(3):
        split = partitions.split(
            source, spec("pathological", 20, classes_per_client=per_client), seed
        )
        counts = tables.histogram(split, source)
        np.testing.assert_array_equal((counts > 0).sum(1), per_client)
        rows = np.concatenate(tables.owned(split))
        assert len(np.unique(rows)) == len(rows)
        # One class each on 20 clients: every class finds an owner.
        assert len(rows) == 1000


def test_pathological_shards_are_equal_for_equal_classes():
    """10 classes of 100 rows, 20 clients, 2 classes each: shards of 25 rows."""
    source = tables.table([100] * 10)
    split = partitions.split(source, spec("pathological", 20, classes_per_client=2), 0)
    counts = tables.histogram(split, source)
    assert set(np.unique(counts)) == {0, 25}


def test_pathological_lets_any_classes_meet():
    """Every pair of classes is as likely, and so is every class of more than needed."""
    met, labels, spare = np.zeros((10, 10)), np.repeat(np.arange(10), 8), np.zeros(40)
    for seed in range(100):
        gen = np.random.default_rng(seed)
        given = {"classes_per_client": 2, "draw": "ipf", "gen": gen}
        for own in pathological.split(labels, num_clients=20, **given).by_client():
            one, other = np.unique(labels[own])
            met[one, other] += 1
        many = pathological.split(np.arange(40), num_clients=5, **given)
        spare[many.row] += 1
    pairs, mean = met[np.triu_indices(10, 1)], 100 * 20 / 45
    assert pairs.sum() == 2000 and np.abs(pairs - mean).max() < 5 * np.sqrt(mean)
    assert spare.sum() == 1000 and np.abs(spare - 25).max() < 5 * np.sqrt(25 * 0.75)


def test_pathological_overlap_draws_with_replacement():
    """Two of nine classes each, floor(floor(N / K) / 2) images of both."""
    source = tables.table([30, 60, 45, 50, 40, 55, 25, 65, 41])
    one = spec("pathological", 12, classes_per_client=2, partition_draw="overlap")
    split = partitions.split(source, one, 3)
    counts = tables.histogram(split, source)
    # 411 rows: 34 for each of 12 clients, 17 of each class.
    np.testing.assert_array_equal(np.sort(counts, axis=1)[:, -3:], [[0, 17, 17]] * 12)
    mine = tables.owned(split)
    # Of 30 to 65 images 17 draws with replacement hit one twice, but for one in ten.
    assert np.mean([len(np.unique(rows)) < 34 for rows in mine]) > 0.8
    rows = np.concatenate(mine)
    assert len(np.unique(rows)) < len(rows) - 12
    shared = [
        set(train.tolist()) & set(test.tolist())
        for train, test in tables.by_client(split)
    ]
    assert any(shared)


def test_pathological_overlap_draws_classes_and_images_evenly():
    """Every pair of classes and every image is as likely: five deviations."""
    source = tables.table([10] * 5)
    chosen, drawn = np.zeros((5, 5)), np.zeros(50)
    for seed in range(60):
        one = spec("pathological", 5, classes_per_client=2, partition_draw="overlap")
        split = partitions.split(source, one, seed)
        has = (tables.histogram(split, source) > 0).astype(int)
        chosen += has.T @ has
        drawn += np.bincount(np.concatenate(tables.owned(split)), minlength=50)
    # 300 clients, 10 pairs; 3,000 draws of 50 images, five of a class at a time.
    pairs = chosen[np.triu_indices(5, 1)]
    assert pairs.sum() == 300 and np.abs(pairs - 30).max() < 5 * 27**0.5
    assert drawn.sum() == 3000 and np.abs(drawn - 60).max() < 5 * 72**0.5


def test_classes_as_named():
    """Each class in equal parts to its owners, the first gets what is left over."""
    source = tables.table([41, 41, 60, 35, 90])
    named = ((0, 1), (1, 0), (2, 3), (3,))
    one = spec("classes", 4, client_classes=named)
    split = partitions.split(source, one, 5)
    np.testing.assert_array_equal(
        tables.histogram(split, source),
        [[21, 21, 0, 0, 0], [20, 20, 0, 0, 0], [0, 0, 60, 18, 0], [0, 0, 0, 17, 0]],
    )
    rows = np.concatenate(tables.owned(split))
    assert len(np.unique(rows)) == len(rows)
    other = partitions.split(source, one, 6)
    assert set(tables.owned(split)[0].tolist()) != set(tables.owned(other)[0].tolist())


def test_classes_count_only_rows_that_have_an_owner():
    """Ten examples a client on average, of the named classes alone."""
    source = tables.table([100] * 10)
    named = classes.parse("0,1/0,1/2,3")
    one = spec("classes", 3, client_classes=named, examples_per_client=10)
    counts = tables.histogram(partitions.split(source, one, 0), source)
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
    source = tables.table([40, 40, 0, 40])
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
    source = tables.table([150, 150], client=client)
    split = partitions.split(source, spec("natural", 6), 0)
    for k, rows in enumerate(tables.owned(split)):
        np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(client == k))


def test_natural_takes_the_first_clients():
    """Fewer clients than owners: the first ones, unchanged."""
    client = np.repeat(np.arange(5), 20).astype(np.int32)
    split = partitions.split(
        tables.table([50, 50], client=client), spec("natural", 2), 0
    )
    np.testing.assert_array_equal(tables.all_owned(split), np.arange(40))


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
    for size, (train, test) in zip(sizes, tables.by_client(split), strict=True):
        assert len(test) == num_test(size)
        assert len(train) + len(test) == size
        assert not set(train.tolist()) & set(test.tolist())


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
    for k, (train, _) in enumerate(tables.by_client(split)):
        have = np.bincount(label[client == k], minlength=7)
        want = have * (int(0.8 * have.sum() + 1e-9) / have.sum())
        take = np.floor(want).astype(int)
        missing = int(0.8 * have.sum() + 1e-9) - take.sum()
        take[np.argsort(take - want, kind="stable")[:missing]] += 1
        np.testing.assert_array_equal(np.bincount(label[train], minlength=7), take)


def test_each_row_validates_equally_often_whatever_its_class():
    """A class of one row too, and each class has its share up to one row."""
    gen, share = np.random.default_rng(0), 0.2
    owned = parts.Parts(np.arange(40 * 3000), np.full(3000, 40))
    label = gen.choice(
        9, 40 * 3000, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.04, 0.03, 0.02, 0.01]
    )
    train, held = held_out.validation(owned, label, share, 7)
    assert (held.count == 8).all()
    np.testing.assert_array_equal(
        np.sort(np.concatenate([train.row, held.row])), owned.row
    )
    validates = np.isin(owned.row, held.row)
    have, taken = np.zeros((2, 3000, 9))
    np.add.at(have, (owned.owner, label), 1)
    np.add.at(taken, (owned.owner, label), validates)
    assert np.abs(taken - share * have).max() < 1
    alike = have[owned.owner, label]  # how many rows of its class its client has
    for count in (1, 2, 3, 4, 5, 6, 8, 12):
        rows = validates[alike == count]
        assert abs(rows.mean() - share) < 5 * np.sqrt(share * (1 - share) / len(rows))
    for one in range(9):
        rows = validates[label == one]
        assert abs(rows.mean() - share) < 5 * np.sqrt(share * (1 - share) / len(rows))


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


@pytest.mark.parametrize(
    "counts, fraction, expected",
    [
        (MNIST_COUNTS, 0.005, 355),
        ([7000] * 10, 0.005, 350),
        ([6000] * 10, 0.07, 4200),
        ([600] * 100, 0.07, 4200),
        ([500], 0.07, 35),
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


def test_examples_per_client_limits_the_pool():
    """`examples_per_client` bounds the rows in use, on average."""
    source = tables.table([500] * 2)
    split = partitions.split(source, spec("iid", 4, examples_per_client=30), 0)
    assert [len(rows) for rows in tables.owned(split)] == [30] * 4


@pytest.mark.parametrize(
    "counts, kind, num_clients, more, words",
    [
        (
            *([100] * 4, "dirichlet", 20),
            {"partition_alpha": 0.001, "min_examples": 10},
            "--partition_alpha=0.001 leaves clients with fewer than 10 .*raise it",
        ),
        # Few clients: all 200 draws; hundreds that come off badly: the first five.
        ([20] * 10, "dirichlet", 20, {"partition_alpha": 0.01}, "best of 200 draws"),
        ([500] * 10, "dirichlet", 500, {"partition_alpha": 0.01}, "best of 5 draws"),
        (
            [10, 10],
            "natural",
            3,
            {},
            "leaves 1 of 3 owners with fewer than 2 .*: 1 has 1; drop",
        ),
        ([50, 50], "iid", 10, {"test_split": "official"}, "--test_split=official"),
        (
            *([40] * 5, "pathological", 4, {"classes_per_client": 7}),
            "--classes_per_client=7.* at most 5, the classes",
        ),
        *(
            ([20, 20], kind, 50, {}, "--num_clients=50.*lower it")
            for kind in ("iid", "dirichlet", "client_dirichlet", "pathological")
        ),
    ],
)
def test_refused(counts, kind, num_clients, more, words):
    """One line with the flag or the client, what came and what to change."""
    owners = np.repeat(np.arange(3), [10, 1, 9]) if kind == "natural" else None
    with pytest.raises(ValueError, match=words):
        source = tables.table(counts, client=owners)
        partitions.split(source, spec(kind, num_clients, **more), 0)


def test_a_small_class_still_gives_k_classes():
    """A class with fewer rows than clients does not break `exactly k`."""
    source = tables.table([3, 97, 100, 100])
    split = partitions.split(source, spec("pathological", 10, classes_per_client=3), 0)
    np.testing.assert_array_equal((tables.histogram(split, source) > 0).sum(1), 3)


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


def test_official_rows_of_owners_and_of_nobody():
    """Natural clients have theirs, other clients none, and all are in the union."""
    client = np.r_[np.arange(60) % 3, [0, 2, 2, -1], [1, 1, -1, 0]]
    source = tables.table([34, 34], num_train=60, client=client)._replace(num_val=4)
    for kind, tests, vals in [
        ("natural", [[60], [], [61, 62]], [[67], [64, 65], []]),
        ("iid", [[], [], []], [[], [], []]),
    ]:
        one = spec(kind, 3, test_split="official")
        split, val = (
            partitions.split(source, one, 0),
            partitions.own_validation(source, one),
        )
        assert [rows.tolist() for rows in split.test.by_client()] == tests
        assert [rows.tolist() for rows in val.owned.by_client()] == vals
        stacked = partitions.stack([split], [val])
        for table, first, last in ((stacked.test, 60, 64), (stacked.val, 64, 68)):
            rows = np.sort(table.row[table.row >= 0])
            np.testing.assert_array_equal(rows, np.arange(first, last))
        assert split.train.row.max() < 60
    whole = spec("iid", 3, test_split="pool")
    assert max(tables.all_owned(partitions.split(source, whole, 0))) == 63


def test_validation_rows_are_rounded_down_in_each_client():
    owned = parts.Parts(np.arange(16), np.array([5, 3, 8]))
    for labels in (np.zeros(16, int), np.zeros((16, 2), int)):
        train, val = held_out.validation(owned, labels, 0.25, 0)
        assert train.count.tolist() == [4, 3, 6]
        assert val.count.tolist() == [1, 0, 2]


def test_validation_rows_are_drawn_by_the_seed():
    """But those of a text are its last."""
    owned, few = parts.Parts(np.arange(16), np.array([5, 3, 8])), []
    for labels in (np.zeros(16, int), np.zeros((16, 2), int)):
        vals = [held_out.validation(owned, labels, 0.25, n)[1] for n in (0, 0, 1, 2)]
        few.append([tuple(val.row.tolist()) for val in vals])
    assert few[0][0] == few[0][1] and len({*few[0]}) > 1
    assert {*few[1]} == {(4, 14, 15)}


def test_stack_of_official_splits():
    """Nobody owns the official test rows, and they are the union."""
    source = tables.table([60, 60], num_train=100)
    one = spec("iid", 5, test_split="official")
    stacked = partitions.stack([partitions.split(source, one, s) for s in (0, 1)])
    np.testing.assert_array_equal(stacked.test.count, np.zeros((2, 5)))
    expected = np.append(np.arange(100, 120), np.full(12, -1))
    np.testing.assert_array_equal(stacked.test.row, [expected] * 2)
    assert stacked.proxy.shape == (2, 0)


@pytest.mark.parametrize("kind", ["client_share", "official"])
def test_a_share_of_the_train_rows(kind):
    """Of each class the first rows, rounded up; smaller shares are in larger ones."""
    source = tables.table([70, 50, 9], num_train=120)
    given = spec("iid", 3, test_split=kind)
    whole = partitions.split(source, given, 0)
    before = whole.train
    for share in (0.5, 0.25, 0.01):
        split = partitions.split(source, given._replace(train_share=share), 0)
        np.testing.assert_array_equal(split.test.row, whole.test.row)
        np.testing.assert_array_equal(split.official_test, whole.official_test)
        clients = zip(
            *(one.by_client() for one in (whole.train, before, split.train)),
            strict=True,
        )
        for everything, more, used in clients:
            assert set(used.tolist()) < set(more.tolist())
            first = np.flatnonzero(np.isin(everything, used))
            np.testing.assert_array_equal(everything[first], used)
            for c in range(3):
                rows = everything[source.label[everything] == c]
                count = int(np.ceil(share * len(rows)))
                mine = used[source.label[used] == c]
                np.testing.assert_array_equal(mine, rows[:count])
        before = split.train


def test_a_share_is_rounded_before_it_is_rounded_up():
    """7 % of 100 rows are 7, though .07 * 100 is 7.000000000000001."""
    owned = parts.Parts(np.arange(100), np.array([100]))
    kept = held_out.first_share(owned, np.zeros(100, int), 0.07)
    assert kept.row.tolist() == list(range(7))


def test_a_share_of_a_partition_file(tmp_path):
    """Also where a file names the rows."""
    source = tables.table([30, 30])
    path = tmp_path / "rows.npz"
    partitions.export(partitions.split(source, spec("iid", 2), 0), str(path))
    given = spec(f"file:{path}", 2)
    whole = partitions.split(source, given, 0).train
    half = partitions.split(source, given._replace(train_share=0.5), 0).train
    for rows, used in zip(whole.by_client(), half.by_client(), strict=True):
        assert len(rows) / 2 <= len(used) <= len(rows) / 2 + 1
        assert set(used.tolist()) < set(rows.tolist())
    one = partitions.split(source, given._replace(train_share=1e-8), 0).train
    assert (one.count == 2).all()  # of each class the first


def test_official_rows_of_owners_beyond_the_clients():
    """They are in no part; those without an owner are nobody's."""
    client = np.r_[np.arange(60) % 3, [0, 2, 2, -1]]
    source = tables.table([32, 32], num_train=60, client=client)
    split = partitions.split(source, spec("natural", 2, test_split="official"), 0)
    assert split.test.row.tolist() == [60]
    assert split.official_test.tolist() == [63]


def test_a_share_that_validates_is_rounded_before_it_is_rounded_down():
    """29 % of 100 rows are 29, though .29 * 100 is 28.999999999999996."""
    owned = parts.Parts(np.arange(100), np.array([100]))
    for labels in (np.zeros(100, int), np.zeros((100, 2), int)):
        assert held_out.validation(owned, labels, 0.29, 0)[1].count.tolist() == [29]


def test_exported_rows_of_nobody_have_the_numbers_of_the_whole(tmp_path):
    """Official test rows and proxy rows too, where owners were left out."""
    one, two = parts.Parts(np.arange(2), np.array([2])), np.arange(2, 4)
    split = partitions.Split(one, one, two, two)
    partitions.export(split, str(tmp_path / "rows.npz"), row=np.arange(10, 14))
    with np.load(tmp_path / "rows.npz") as file:
        assert file["train_row"].tolist() == file["test_row"].tolist() == [10, 11]
        assert file["official_test_row"].tolist() == [12, 13]
        assert file["proxy_row"].tolist() == [12, 13]


def test_a_client_with_an_equal_share_is_full():
    """Exactly N / K examples are enough: nothing of the later classes."""
    for seed in range(10):
        gen = np.random.default_rng(seed)
        given = {"num_clients": 2, "alpha": 1e-3, "min_examples": 0, "gen": gen}
        assert dirichlet.split(np.arange(20) // 10, **given).count.tolist() == [10, 10]


def test_who_has_which_classes_is_drawn():
    """Other seeds, other classes."""
    source = tables.table([100] * 10)
    has = [
        tables.histogram(partitions.split(source, spec("pathological"), seed), source)
        for seed in (0, 1)
    ]
    assert ((has[0] > 0) != (has[1] > 0)).any()


def test_shards_go_to_classes_by_largest_remainder():
    """5.2, 3.3 and 1.5 of ten shards."""
    source = tables.table([52, 33, 15])
    one = spec("pathological", 10, classes_per_client=1)
    has = tables.histogram(partitions.split(source, one, 0), source) > 0
    assert has.sum(0).tolist() == [5, 3, 2]
