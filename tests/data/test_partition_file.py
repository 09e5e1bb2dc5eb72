"""Partitions as files: written, read back, refused."""

import numpy as np
import pytest

from data import partitions
from data.partitions import file
from tests import synthetic


def spec(name, **more):
    return partitions.PartitionSpec(name, 4, **more)


@pytest.fixture
def source():
    return synthetic.blobs(120, (2, 2, 1), 3)._replace(num_train=100)


def test_read_without_this_package(source, tmp_path):
    """As the module says: two lines of numpy."""
    split = partitions.split(source, spec("iid"), seed=0)
    partitions.export(split, str(tmp_path / "rows.npz"))
    rows = np.load(tmp_path / "rows.npz")
    clients = np.split(rows["train_row"], np.cumsum(rows["train_count"])[:-1])
    assert len(clients) > 1
    for mine, theirs in zip(split.train.by_client(), clients, strict=True):
        np.testing.assert_array_equal(mine, theirs)


GOOD = {
    "train_row": np.arange(8),
    "train_count": np.full(4, 2),
    "test_row": np.arange(8, 12),
    "test_count": np.ones(4, int),
}


@pytest.mark.parametrize(
    "change, part",
    [
        ({"train_row": np.array([0, 1, 2, 3, 4, 5, 6, 120])}, "row 120, .* 0 to 119"),
        ({"train_row": np.array([0, 1, 2, 3, 4, 5, 6, -1])}, "row -1"),
        ({"train_row": np.array([0, 1, 2, 3, 4, 5, 6, 6])}, "row 6 twice"),
        ({"test_row": np.array([8, 9, 10, 0])}, "row 0 twice"),
        ({"proxy_row": np.array([11])}, "row 11 twice"),
        ({"train_count": np.full(4, 3)}, "adds up to 12, train_row has 8"),
        ({"train_count": np.array([9, -1, 0, 0])}, "train_count adds up to 8"),
        ({"test_count": np.array([4])}, "train_count has 4 clients, test_count 1"),
        ({"train_row": np.arange(8.0)}, "train_row must be integers .* float64"),
        ({"test_row": np.arange(0), "test_count": np.zeros(4, int)}, "no test row"),
        ({"train_count": np.array([0, 4, 2, 2])}, "gives client 0 0 examples, or none"),
        (
            {"proxy_rows": np.array([13])},
            "'proxy_rows'., which is not used; .* proxy",
        ),
    ],
)
def test_files_that_are_no_partition(source, tmp_path, change, part):
    """One line that names the file and the row."""
    path = tmp_path / "rows.npz"
    np.savez(path, **GOOD)
    partitions.split(source, spec(f"file:{path}"), seed=0)
    np.savez(path, **GOOD | change)
    with pytest.raises(ValueError, match=part) as error:
        partitions.split(source, spec(f"file:{path}"), seed=0)
    assert f"--partition=file:{path}" in str(error.value)
    assert "\n" not in str(error.value)


def test_where_it_cannot_be_written(source, tmp_path):
    """Nothing is left behind."""
    split = partitions.split(source, spec("iid"), seed=0)
    with pytest.raises(OSError, match="it is a folder"):
        partitions.export(split, str(tmp_path))
    assert list(tmp_path.parent.glob("*.partial*")) == []


def test_rows_that_may_repeat(source, tmp_path):
    """If the file says so."""
    path = tmp_path / "rows.npz"
    np.savez(path, **GOOD | {"test_row": np.arange(4), "may_repeat": 1})
    split = partitions.split(source, spec(f"file:{path}"), seed=0)
    np.testing.assert_array_equal(split.test.row, np.arange(4))


def test_no_name(source):
    """A line of its own."""
    with pytest.raises(ValueError, match="--partition=file: names no file"):
        partitions.split(source, spec("file:"), seed=0)


OF = file.Identity(120, "a" * 64, "b" * 64)


@pytest.mark.parametrize(
    "change, line",
    [
        ({}, ""),
        ({"data_sha256": "c" * 64}, "for other examples, whose labels are the same"),
        (
            {"num_rows": 240, "data_sha256": "c"},
            "other data, 120 rows, and these are 240",
        ),
        (
            {"label_sha256": "c", "data_sha256": "c"},
            "rows in another order, or with oth",
        ),
    ],
)
def test_other_data(source, tmp_path, change, line):
    """Rows of another number or with other labels are refused, others are said."""
    path = tmp_path / "rows.npz"
    partitions.export(partitions.split(source, spec("iid"), 0), str(path), OF)
    asked = f"file:{path}", OF._replace(**change)
    if change.keys() <= {"data_sha256"}:
        assert line in (found := partitions.note(*asked)) and bool(found) == bool(line)
    else:
        with pytest.raises(ValueError, match=f"^--partition=file:{path} .*{line}"):
            partitions.note(*asked)
    assert partitions.note("iid", asked[1]) == ""


def test_a_file_of_another_program(source, tmp_path):
    """It is read, and a line says what is not known."""
    path = tmp_path / "rows.npz"
    np.savez(path, **GOOD)
    assert partitions.note(f"file:{path}", OF).endswith("for which data it was made")
    np.savez(path, **GOOD, num_rows=120)
    assert partitions.note(f"file:{path}", OF) == ""
    for odd in ({"num_rows": [120]}, {"data_sha256": 5}, {"label_sha256": ["a", "b"]}):
        np.savez(path, **GOOD, **odd)
        (name,) = odd
        with pytest.raises(ValueError, match=f"{name} must be one (number|text), got"):
            partitions.note(f"file:{path}", OF)


@pytest.mark.parametrize("name", ["nix.npz", ".", "text.npz"])
def test_what_is_no_file(source, tmp_path, name):
    """One line too."""
    (tmp_path / "text.npz").write_text("rows")
    with pytest.raises(ValueError, match="--partition=file:"):
        partitions.split(source, spec(f"file:{tmp_path / name}"), seed=0)
