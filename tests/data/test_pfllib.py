"""The clients of PFLlib's tables, row by row."""

import json
import pathlib

import numpy as np
import pytest

from data import loaders, partitions
from tests.data import tables

FOLDER = loaders.DEBIAN_FASHION
# [client][class], published with github.com/TsingZ0/DBE: dataset/fmnist-0.1/config.json
COUNTS = pathlib.Path(__file__).with_name("pfllib_counts.json")


def spec(kind, num_clients=20, **rest):
    given = {"partition_alpha": 0.1, "test_split": "pool"} | rest
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
