"""The CDKT code's users, from class counts alone (spec test 31)."""

import numpy as np
import pytest

from data import dataset, partitions
from data.partitions import cdkt

MNIST_COUNTS = np.array((6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958))
# Images per class once the proxy share is set aside: floor(f * n_c).
SIZES = {
    "mnist": np.floor(0.995 * MNIST_COUNTS).astype(int),
    "fashion_mnist": np.full(10, 6467),  # the code's 65,000 images, nearly uniform
    "cifar10": np.full(10, 5580),
    "cifar100": np.full(100, 558),
}


def in_order(name, **changes):
    """Slices of every user in the order of the released files."""
    protocol = cdkt.PROTOCOLS[name]._replace(**changes)
    cuts = cdkt.slices(SIZES[name], protocol)
    return [cuts[user] for user in cdkt.order(protocol)]


def user_sizes(name):
    """Images of every user in the order of the released files."""
    return np.array(
        [sum(end - begin for _, begin, end in cuts) for cuts in in_order(name)]
    )


def test_mnist_sizes_without_the_proxy():
    """The constant for the embedded set is the 70,000 images less .5 %."""
    np.testing.assert_array_equal(cdkt.MNIST_SIZES, SIZES["mnist"])
    assert (MNIST_COUNTS - SIZES["mnist"]).sum() == 355


@pytest.mark.parametrize(
    "name, num_users, median, within",
    [
        ("mnist", 50, 63.0, 0),
        ("cifar10", 50, 966.5, 0),
        ("cifar100", 10, 1163.5, 0),
        # Near-uniform counts of 65,000 images, spec 4.
        ("fashion_mnist", 10, 71.5, 1),
        ("fashion_mnist", 50, 75.5, 1),
    ],
)
def test_median_sizes(name, num_users, median, within):
    """Of the first users; numbers of tests are those of the whole split below."""
    sizes = user_sizes(name)
    assert len(sizes) == 50 and (name != "mnist" or sizes.sum() == 3774)
    assert abs(np.median(sizes[:num_users]) - median) <= within


def test_mnist_fixed_has_no_class_nine():
    """The first ten users by their names as text have the labels 0..8 only."""
    labels = {label for cuts in in_order("mnist")[:10] for label, _, _ in cuts}
    assert labels == set(range(9))


def test_mnist_users_are_ordered_as_text():
    """0, 1, 10, 11, ...; CIFAR's users by number."""
    order = cdkt.order(cdkt.PROTOCOLS["mnist"])
    assert order[:5] == [0, 1, 10, 11, 12]
    assert sorted(order) == list(range(50))
    assert cdkt.order(cdkt.PROTOCOLS["cifar10"]) == list(range(50))


@pytest.mark.parametrize(
    "name, stride, labels_per_user, num_classes",
    [
        ("mnist", 1, 2, 10),
        ("mnist_5k", 1, 2, 10),
        ("fashion_mnist", 1, 2, 10),
        ("cifar10", 1, 3, 10),
        ("cifar100", 10, 30, 100),
    ],
)
def test_labels_of_each_user(name, stride, labels_per_user, num_classes):
    """Consecutive labels, (stride * u + j) mod Y."""
    labels = cdkt.user_labels(cdkt.PROTOCOLS[name], num_classes)
    assert labels.shape == (50, labels_per_user)
    for user in (0, 1, 9, 27, 49):
        expected = [(stride * user + j) % num_classes for j in range(labels_per_user)]
        assert labels[user].tolist() == expected


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_slices_have_the_users_labels_and_stay_inside_the_class(name):
    """A user's slices are of its labels only, ten images each at least."""
    protocol = cdkt.PROTOCOLS[name]
    labels = cdkt.user_labels(protocol, len(SIZES[name]))
    cuts = cdkt.slices(SIZES[name], protocol)
    for user in range(50):
        assert {label for label, _, _ in cuts[user]} == set(labels[user].tolist())
        for label, begin, end in cuts[user]:
            assert 0 <= begin < end <= SIZES[name][label]
        first = cuts[user][: protocol.labels_per_user]
        assert {end - begin for _, begin, end in first} == {10 + protocol.overlap}


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_slices_are_disjoint(name):
    """No image belongs to two users."""
    rows = [
        (label, image)
        for cuts in in_order(name)
        for label, begin, end in cuts
        for image in range(begin, end)
    ]
    assert len(set(rows)) == len(rows)


def test_cifar100_overlaps_by_one_image_only():
    """First-stage slices share one image with their successor, nothing else does."""
    owners = {}
    for user, cuts in enumerate(in_order("cifar100")):
        for label, begin, end in cuts:
            for image in range(begin, end):
                owners.setdefault((label, image), []).append((user, begin, end))
    shared = {row: who for row, who in owners.items() if len(who) > 1}
    assert shared
    for (_, image), who in shared.items():
        assert len(who) == 2
        (_, begin, end), (_, next_begin, _) = sorted(who, key=lambda one: one[1])
        assert end - begin == 11
        assert image == end - 1 == next_begin


def test_another_seed_gives_other_users():
    """The draws follow the seed; the default is the released one."""
    assert cdkt.PROTOCOLS["mnist"].seed == 1
    assert in_order("mnist", seed=1) == in_order("mnist")
    assert in_order("mnist", seed=2) != in_order("mnist")


def test_paper_protocol_has_random_classes():
    """cdkt_paper: as many different classes per user, but not consecutive ones."""
    for name, per_user in (("cifar10", 2), ("cifar100", 20), ("mnist", 2)):
        protocol = cdkt.PROTOCOLS[name]._replace(
            random_labels=True, labels_per_user=per_user
        )
        num_classes = len(SIZES[name])
        labels = cdkt.user_labels(protocol, num_classes)
        assert all(len(set(row)) == per_user for row in labels.tolist())
        steps = np.diff(labels, axis=1) % num_classes
        assert (steps != 1).mean() > 0.5
        again = cdkt.user_labels(protocol, num_classes)
        np.testing.assert_array_equal(labels, again)


def counted_table(counts):
    """A table of one-pixel images with these class counts."""
    label = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return dataset.Dataset(
        np.zeros((len(label), 1), np.uint8), label, len(label) - 10_000, len(counts)
    )


def split_of(name, counts, num_clients, fraction, kind="cdkt", **changes):
    """The whole path: proxy first, then users, then their tests, partition seed 1."""
    return partitions.split(
        counted_table(counts),
        partitions.PartitionSpec(
            partition=kind,
            num_clients=num_clients,
            test_split="pool_stratified",
            proxy_fraction=fraction,
            cdkt=cdkt.PROTOCOLS[name]._replace(**changes),
        ),
        1,
    )


@pytest.mark.parametrize(
    "name, counts, num_clients, fraction, proxy, tests",
    [
        ("mnist", MNIST_COUNTS, 10, 0.005, 355, 167),
        ("mnist", MNIST_COUNTS, 50, 0.005, 355, 777),
        ("cifar10", [6000] * 10, 10, 0.07, 4200, 2755),
        ("cifar10", [6000] * 10, 50, 0.07, 4200, 10684),
        ("cifar100", [600] * 100, 10, 0.07, 4200, 2366),
        ("cifar100", [600] * 100, 50, 0.07, 4200, 10949),
    ],
)
def test_whole_split(name, counts, num_clients, fraction, proxy, tests):
    """Proxy and test totals through `partitions.split`; proxy disjoint from users."""
    split = split_of(name, counts, num_clients, fraction)
    assert len(split.proxy) == proxy
    assert len(split.test.row) == split.test.count.sum() == tests
    users = np.concatenate([split.train.row, split.test.row])
    assert not set(users.tolist()) & set(split.proxy.tolist())
    if name != "cifar100":
        assert len(np.unique(users)) == len(users)


def test_the_codes_order():
    """`cdkt_code`: proxies are the last of each class in the data, users the first."""
    split = split_of("mnist", MNIST_COUNTS, 50, 0.005, "cdkt_code")
    label = counted_table(MNIST_COUNTS).label
    ends = np.cumsum(MNIST_COUNTS)
    proxy = np.sort(split.proxy)
    for c, kept in enumerate(SIZES["mnist"]):
        mine = proxy[label[proxy] == c]
        np.testing.assert_array_equal(mine, np.arange(ends[c] - len(mine), ends[c]))
        assert len(mine) == MNIST_COUNTS[c] - kept
    users = np.concatenate([split.train.row, split.test.row])
    for c in range(10):
        mine = np.sort(users[label[users] == c])
        first = ends[c] - MNIST_COUNTS[c]
        np.testing.assert_array_equal(mine, np.arange(first, first + len(mine)))
    assert not np.array_equal(split.proxy, proxy)
    shuffled = split_of("mnist", MNIST_COUNTS, 50, 0.005)
    assert len(shuffled.proxy) == len(proxy)
    assert not np.array_equal(np.sort(shuffled.proxy), proxy)


def test_paper_split_has_the_asked_number_of_classes():
    """`cdkt_paper` through `partitions.split`: two classes each, all kinds of pairs."""
    counts = [6000] * 10
    split = split_of(
        "cifar10", counts, 50, 0.07, "cdkt_paper", labels_per_user=2, random_labels=True
    )
    label = counted_table(counts).label
    pairs = [frozenset(label[rows].tolist()) for rows in split.train.by_client()]
    assert {len(pair) for pair in pairs} == {2}
    assert len(set(pairs)) > 10


def test_more_users_than_fifty():
    """The generator has 50 users."""
    with pytest.raises(ValueError, match="--num_clients=51.* 50, the users"):
        split_of("mnist", MNIST_COUNTS, 51, 0.005)


@pytest.mark.parametrize(
    "sizes, line",
    [
        ([200] * 3 + [40] + [200] * 6, "101 images of class 3, which has 40"),
        # Fifteen users have class 1, and thirteen class 4.
        ([151] + [150] + [200] * 5, "151 images of class 1, which has 150"),
        # The generator divides what is above a reserve of 100.
        ([99] + [200] * 49, "100 images of class 0, which has 99"),
    ],
)
def test_too_few_images_for_the_generator(sizes, line):
    """A class with fewer images than its users take first is named."""
    with pytest.raises(ValueError, match=f"--partition=cdkt needs {line}"):
        cdkt.split(np.repeat(np.arange(len(sizes)), sizes), cdkt.PROTOCOLS["mnist"], 10)


def test_too_few_images_for_random_labels():
    """Thirteen users may have a class of which ten would have it by turns."""
    label, protocol = np.repeat(np.arange(10), 105), cdkt.PROTOCOLS["mnist"]
    with pytest.raises(ValueError, match="--partition=cdkt_paper needs 1.1 images of"):
        cdkt.split(label, protocol._replace(random_labels=True), 50)


@pytest.mark.parametrize(
    "sizes", [[151, 151] + [141] * 5, [101] * 50, [101] * 51 + [9]]
)
def test_just_enough_images_for_the_generator(sizes):
    """Each user has ten images of each class of its own."""
    label = np.repeat(np.arange(len(sizes)), sizes)
    owned = cdkt.split(label, cdkt.PROTOCOLS["mnist"], 50)
    counts = [np.bincount(label[rows]) for rows in owned.by_client()]
    assert min(count[count > 0].min() for count in counts) >= 10
    assert all((count > 0).sum() == 2 for count in counts)


def test_five_thousand_images_have_the_amounts_of_all():
    """Where they fit: `mnist_5k` draws by the sizes of MNIST's classes."""
    few = cdkt.slices(np.full(10, 497), cdkt.PROTOCOLS["mnist_5k"])
    whole = cdkt.slices(np.array(cdkt.MNIST_SIZES), cdkt.PROTOCOLS["mnist"])
    for mine, every in zip(few, whole, strict=True):
        known = {(c, end - begin) for c, begin, end in every}
        assert {(c, end - begin) for c, begin, end in mine} <= known
    assert sum(map(len, few)) > 100  # the first stage has 100
