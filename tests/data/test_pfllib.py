"""The clients of PFLlib's tables, row by row."""

import json
import pathlib
import zlib

import numpy as np
import pytest

from data import loaders, partitions
from data.partitions import pfllib
from tests.data import tables

FOLDER = loaders.DEBIAN_FASHION
# [client][class], published with github.com/TsingZ0/DBE: dataset/fmnist-0.1/config.json
COUNTS = pathlib.Path(__file__).with_name("pfllib_counts.json")


def spec(kind, num_clients=20, **rest):
    given = {"partition_alpha": 0.1, "test_split": "merged"} | rest
    return partitions.PartitionSpec(kind, num_clients, **given)


@pytest.fixture(scope="module")
def fashion():
    """Fashion-MNIST, where its IDX files are."""
    if not FOLDER.is_dir():
        pytest.skip(f"{FOLDER} is missing (Debian's dataset-fashion-mnist)")
    return loaders.load("fashion_mnist", "")


def test_published_class_counts(fashion):
    """Of all 20 clients, as the authors have published them."""
    split = partitions.split(fashion, spec("pfllib_dirichlet"), 1)
    found = tables.histogram(split, fashion)
    np.testing.assert_array_equal(found, json.loads(COUNTS.read_text()))


@pytest.mark.parametrize(
    "kind, train, test",
    [("dirichlet", 1668199578, 273352722), ("pathological", 2829283501, 1522721157)],
)
def test_rows(fashion, kind, train, test):
    """Those of PFLlib's script with seed 1, by the CRCs of rows and counts."""
    split = partitions.split(fashion, spec(f"pfllib_{kind}"), 1)
    found = [np.concatenate(one).astype("<i8").tobytes() for one in split[:2]]
    assert list(map(zlib.crc32, found)) == [train, test]


@pytest.mark.parametrize("per_client", [1, 2, 3])
def test_pathological(per_client):
    """Runs of rows of at most k classes for everyone, of unequal sizes."""
    source = tables.table([300] * 6)
    one = spec("pfllib_pathological", 9, classes_per_client=per_client)
    split = partitions.split(source, one, 3)
    counts = tables.histogram(split, source)
    assert set((counts > 0).sum(1)) <= {*range(1, per_client + 1)}
    assert counts.sum(0).tolist() == [300] * 5 + [0 if per_client == 1 else 300]
    sharing = int(np.ceil(9 / 6 * per_client))
    assert ((counts > 0).sum(0) <= sharing).all()
    assert len(np.unique(counts[counts > 0])) > 1


@pytest.mark.parametrize(
    "kind, clients, given, line",
    [
        ("dirichlet", 40, {"partition_alpha": 0.001}, "fewer than 22 examples in 200"),
        ("dirichlet", 40, {"partition_alpha": 1e-300}, "--partition_alpha=1e-300"),
        ("dirichlet", 4, {"min_examples": 440}, "fewer than 440 examples"),
        (
            "pathological",
            900,
            {"classes_per_client": 3},
            "450 clients share the 300 rows",
        ),
        ("pathological", 9, {"classes_per_client": 7}, "--classes_per_client=7"),
    ],
)
def test_refusals(kind, clients, given, line):
    """One line each."""
    source = tables.table([300] * 6)
    with pytest.raises(ValueError, match=line):
        partitions.split(source, spec(f"pfllib_{kind}", clients, **given), 0)


@pytest.mark.filterwarnings("error")
def test_draws_that_float64_does_not_hold():
    """They are drawn again, as all classes went to one client: 3 seeds have such."""
    for seed in range(60):
        gen, given = np.random.RandomState(seed), {"alpha": 1e-3, "min_examples": 2}
        label = np.repeat(np.arange(10), 100)
        owned = pfllib.dirichlet(label, num_clients=2, gen=gen, **given)
        assert owned.count.min() >= 40 and owned.count.sum() == 1000


@pytest.mark.parametrize("kind", ["iid", "pfllib_pathological"])
def test_merged(kind):
    """Three quarters of each client's rows train, official test rows among them."""
    source = tables.table([300] * 6, num_train=1500)
    split = partitions.split(source, spec(kind, 7), 0)
    sizes = np.array([list(map(len, pair)) for pair in tables.by_client(split)])
    np.testing.assert_array_equal(sizes[:, 0], 3 * sizes.sum(1) // 4)
    np.testing.assert_array_equal(tables.all_owned(split), np.arange(1800))


def test_sizes_of_a_shared_class():
    """From 40 over the number of classes on, if that is more than a tenth."""
    for seed in range(40):
        gen, labels = np.random.RandomState(seed), np.arange(400) // 200
        given = {"num_clients": 4, "classes_per_client": 1, "gen": gen}
        count = pfllib.pathological(labels, **given).count
        assert count[[0, 2]].min() >= 20 and count.sum() == 400
