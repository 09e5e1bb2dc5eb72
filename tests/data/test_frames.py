"""Tables as data sets: DataFrames and CSV files."""

import gzip

import numpy as np
import pandas
import pytest

from data import frames, loaders

FRAME = pandas.DataFrame(
    {
        "height": [1.5, 2.5, 0.5, 3.0],
        "site": ["b", "a", "b", "b"],
        "is_new": [True, False, False, True],
        "count": [1, 2, 3, 4],
        "species": ["oak", "elm", "oak", "ash"],
    }
)


def check(found):
    """`FRAME` with the label `species` and the owner `site`."""
    numbers = [[1.5, 1, 1], [2.5, 0, 2], [0.5, 0, 3], [3, 1, 4]]
    np.testing.assert_array_equal(found.image, np.array(numbers, np.float32))
    assert found.image.dtype == np.float32
    np.testing.assert_array_equal(found.label, [2, 1, 2, 0])
    np.testing.assert_array_equal(found.client, [1, 0, 1, 1])
    assert found.classes == ("ash", "elm", "oak") and found.owners == ("a", "b")


def test_frame():
    """Numbers and bools are the features, in the order of the columns."""
    check(frames.from_frame(FRAME, "species", "site"))
    check(frames.from_frame(FRAME.set_index(FRAME["site"]), "species", "site"))
    nullable = FRAME.convert_dtypes().astype({"species": "category"})
    check(frames.from_frame(nullable, "species", "site"))


@pytest.mark.parametrize("opened, suffix", [(open, ".csv"), (gzip.open, ".csv.gz")])
def test_csv(tmp_path, opened, suffix):
    """The same table from a file, plain or compressed, with a mark of its encoding."""
    path = tmp_path / f"trees{suffix}"
    with opened(path, "wb") as file:
        file.write(FRAME.to_csv(index=False).encode("utf-8-sig"))
    check(loaders.load(f"csv:{path}", "", label="species", owner="site"))


@pytest.mark.parametrize("name", frames.LABELS)
def test_usual_names_of_labels(name):
    """One of them is the label unless another column is named."""
    frame = FRAME.drop(columns="site").rename(columns={"species": name})
    assert frames.from_frame(frame).classes == ("ash", "elm", "oak")
    assert frames.from_frame(frame.drop(columns=name), "is_new").num_classes == 2


@pytest.mark.parametrize(
    "change, label, owner, words",
    [
        ({}, "", "", "no column is known to hold the labels; give --label, .* height"),
        ({"y": 1, "label": 1}, "", "", "y, label could hold the labels; give --label"),
        ({}, "kind", "", "no column --label=kind; the columns are height, site"),
        ({}, "species", "who", "no column --owner=who; the columns are height"),
        ({}, "species", "species", "--owner=species are the same column"),
        ({}, "species", "", "columns are not numbers: site; drop them, encode"),
        ({"when": pandas.Timestamp("2020")}, "species", "site", "not numbers: when"),
        ({"z": 1j}, "species", "site", "not numbers: z"),
        (
            {"count": [1, None, None, 4]},
            "species",
            "site",
            "values are missing, of which count has 2; replace",
        ),
        ({"z": [1, 2, np.inf, 4]}, "species", "site", "infinite, of which z has 1"),
        ({"z": 1e300}, "species", "site", "beyond the range of float32"),
        (
            {"species": ["oak", None, "oak", "ash"]},
            "species",
            "site",
            "the column species has 1 missing labels",
        ),
        (
            {"site": ["b", None, "b", "b"]},
            "species",
            "site",
            "the column site has 1 missing owners",
        ),
        (
            {"species": 1},
            "height",
            "site",
            "the column height looks like .* regression",
        ),
        ({"species": "oak"}, "species", "site", "the column species holds one label"),
    ],
)
def test_columns_that_do_not_fit(change, label, owner, words):
    """One line that names the column."""
    with pytest.raises(ValueError, match=words) as error:
        frames.from_frame(FRAME.assign(**change), label, owner)
    assert str(error.value).startswith("dataset: ") and "\n" not in str(error.value)


def test_tables_that_do_not_fit():
    """No rows, no features, two columns of one name."""
    with pytest.raises(ValueError, match="there are no rows"):
        frames.from_frame(FRAME[:0], "species", "site")
    with pytest.raises(ValueError, match="no column beside the label"):
        frames.from_frame(FRAME[["species", "site"]], "species", "site")
    twice = pandas.concat([FRAME, FRAME[["count"]]], axis=1)
    with pytest.raises(ValueError, match="several columns are named count; rename"):
        frames.from_frame(twice, "species", "site")


@pytest.mark.parametrize(
    "raw, words",
    [
        (b"", "cannot be read as CSV: No columns"),
        (b"a,y\n1,p\n1,2,3,4\n", "cannot be read as CSV: .*line 3"),
        (b"a,y\n1,p,9\n2,q,9\n", "cannot be read as CSV: Length of header"),
        (b"a,y\n1,\xe9\n2,q\n", "cannot be read as CSV: 'utf-8' codec"),
        (b"\x1f\x8b\x00", "cannot be read as CSV|no column"),
        (b",a,y\n0,1,p\n1,2,q\n", "a column has no name, as of a saved index"),
        (b"a;y\n1;2\n", "give --label, one of the columns a;y"),
        (b"a,y\n1,\n2,q\n", "the column y has 1 missing labels"),
    ],
)
def test_files_that_do_not_fit(tmp_path, raw, words):
    """One line that begins with the flag."""
    (tmp_path / "own.csv").write_bytes(raw)
    with pytest.raises(ValueError, match=words) as error:
        loaders.load(f"csv:{tmp_path}/own.csv", "")
    assert str(error.value).startswith(f"--dataset=csv:{tmp_path}/own.csv: ")
    assert "\n" not in str(error.value)


def test_csv_that_is_no_file(tmp_path):
    """Nothing there, or a folder."""
    with pytest.raises(ValueError, match="there is no such file"):
        loaders.load(f"csv:{tmp_path}/none.csv", "")
    with pytest.raises(ValueError, match="is a folder, a CSV file is expected"):
        loaders.load(f"csv:{tmp_path}", "")
