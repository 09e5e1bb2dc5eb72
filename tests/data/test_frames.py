"""Tables as data sets: DataFrames and CSV files."""

import fractions
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


SPLIT = ["Train", "validation", "train", "test", "val", "train"]


def test_a_column_of_the_split(tmp_path):
    """Train, test and validation rows in this order, with their owners."""
    table = pandas.concat([FRAME, FRAME[:2]]).assign(split=SPLIT)
    table.to_csv(tmp_path / "own.csv", index=False)
    given = {"label": "species", "owner": "site"}
    for found in (
        frames.from_frame(table, **given),
        loaders.load(f"csv:{tmp_path}/own.csv", "", **given),
    ):
        assert (found.num_train, found.num_test, found.num_val) == (3, 1, 2)
        np.testing.assert_array_equal(found.image[:, 2], [1, 3, 2, 4, 2, 1])
        np.testing.assert_array_equal(found.client, [1, 1, 0, 1, 0, 1])
        assert "split" not in found.columns and "; split: split" in found.notes[0]
        assert "labels that only test or validation rows have: ash" in found.notes
    with pytest.raises(ValueError, match="column split holds dev; expected train, tes"):
        frames.from_frame(table.replace({"split": {"test": "dev"}}), **given)
    with pytest.raises(
        ValueError, match="column split says which rows test; omit the va"
    ):
        frames.from_frame(table, **given, val=FRAME)


def test_validation_rows_of_a_table():
    """Of their owners, or of nobody without that column."""
    given = {"label": "species", "owner": "site", "test": FRAME[:1]}
    found = frames.from_frame(FRAME, **given, val=FRAME[1:])
    np.testing.assert_array_equal(found.client[4:], [1, 0, 1, 1])
    found = frames.from_frame(FRAME, **given, val=FRAME.drop(columns="site"))
    np.testing.assert_array_equal(found.client[4:], [1] + [-1] * 4)
    assert (found.num_train, found.num_test, found.num_val) == (4, 1, 4)


@pytest.mark.parametrize("opened, suffix", [(open, ".csv"), (gzip.open, ".csv.gz")])
def test_csv(tmp_path, opened, suffix):
    """The same table from a file, plain or compressed, with a mark of its encoding."""
    path = tmp_path / f"trees{suffix}"
    with opened(path, "wb") as file:
        file.write(FRAME.to_csv(index=False).encode("utf-8-sig"))
    check(loaders.load(f"csv:{path}", "", label="species", owner="site"))


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_other_separators_are_named(tmp_path, separator, name):
    """As spreadsheets write where numbers have decimal commas."""
    path = tmp_path / "trees.csv"
    FRAME.to_csv(path, index=False, sep=separator, decimal=",")
    line = f"its columns are separated by {name}; write it with commas and decimal poi"
    with pytest.raises(ValueError, match=line):
        loaders.load(f"csv:{path}", "")
    path.write_text(f'"a{separator} cm{separator} inner",y\n1,0\n2,1\n3,1\n4,0\n')
    assert len(loaders.load(f"csv:{path}", "").columns) == 1


@pytest.mark.parametrize("label", ["species", " species"])
def test_columns_behind_a_space(label, tmp_path):
    """Of a file with `, ` between columns, named with the space or without."""
    path = tmp_path / "trees.csv"
    text = FRAME.to_csv(index=False)
    first, rest = text.split("\n", 1)
    path.write_text("\n".join([first.replace(",", ", "), rest]))
    check(loaders.load(f"csv:{path}", "", label=label, owner="site"))


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
        ({}, "species", "sit", "no column --owner=sit; .*; did you mean site\\?"),
        ({}, "species", "species", "--owner=species are the same column"),
        ({}, "species", "", "columns are not numbers: site; drop them, encode"),
        ({"when": pandas.Timestamp("2020")}, "species", "site", "not numbers: when"),
        ({"z": 1j}, "species", "site", "not numbers: z"),
        (
            {"is_old": [None, True, True, False]},
            "species",
            "site",
            "values are missing, of which is_old has 1; replace",
        ),
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
    with pytest.raises(ValueError, match="there is no row"):
        frames.from_frame(FRAME[:0], "species", "site")
    with pytest.raises(ValueError, match="no column beside the label"):
        frames.from_frame(FRAME[["species", "site"]], "species", "site")
    twice = pandas.concat([FRAME, FRAME[["count"]]], axis=1)
    with pytest.raises(ValueError, match="several columns are named count; rename"):
        frames.from_frame(twice, "species", "site")


def test_labels_of_two_types():
    """True of train rows and 1 of test rows are not one class."""
    bools = FRAME.assign(species=[True, False] * (len(FRAME) // 2))
    numbers = bools.assign(species=bools["species"].astype(int))
    frames.from_frame(bools, "species", "site", test=bools)
    with pytest.raises(ValueError, match="labels of one type, .* got bool and int"):
        frames.from_frame(bools, "species", "site", test=numbers)


@pytest.mark.parametrize(
    "raw, words",
    [
        (b"", "cannot be read as CSV: No columns"),
        (b"a,y\n1,p\n1,2,3,4\n", "cannot be read as CSV: .*line 3"),
        (b"a,y\n1,p,9\n2,q,9\n", "cannot be read as CSV: Length of header"),
        (b"a,y\n1,\xe9\n2,q\n", "cannot be read as CSV: 'utf-8' codec"),
        (b"\x1f\x8b\x00", "cannot be read as CSV|no column"),
        (b",a,y\n0,1,p\n1,2,q\n", "a column has no name, as of a saved index"),
        (b"a,y\n1,\n2,q\n", "the column y has 1 missing labels"),
        (b"," * 40_000 + b"\n", "has 40,001 columns, at most 32,768 are read"),
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


NUMBERS = np.random.default_rng(0).normal(size=(60, 3))
TABLE = pandas.DataFrame(NUMBERS, columns=["a", "b", "c"])
KINDS = np.arange(60) % 3


def notes(**columns):
    """The lines about `TABLE` with more columns."""
    return frames.from_frame(TABLE.assign(**columns)).notes


@pytest.mark.parametrize("name", ["client", "Client", "client_id", "owner", "OWNER"])
@pytest.mark.parametrize("is_file", [False, True])
def test_usual_names_of_owners(tmp_path, name, is_file):
    """As in an npz file; never a feature."""
    table = TABLE.assign(y=KINDS, **{name: np.arange(60) // 20 + 3})
    if is_file:
        table.to_csv(tmp_path / "own.csv", index=False)
        found = loaders.load(f"csv:{tmp_path}/own.csv", "")
    else:
        found = frames.from_frame(table)
    assert found.owners == ("3", "4", "5") and found.columns == ("a", "b", "c")
    assert found.notes[0] == f"label: y; owners: {name}; features (3): a, b, c"
    other = frames.from_frame(table.rename(columns={name: "x"}).assign(who=1), "y", "x")
    assert other.columns == ("a", "b", "c", "who")


@pytest.mark.parametrize(
    "name, values, words",
    [
        ("user_id", KINDS, "user_id names rows or their owners; .* --owner=user_id"),
        ("PassengerId", np.arange(60) * 7, "PassengerId names rows"),
        ("client_idx", KINDS, "client_idx names rows"),
        ("SubjectNo", KINDS, "SubjectNo names rows"),
        ("User ID", KINDS, "User ID names rows"),
        ("subject", KINDS * 1.0, "subject names rows"),
        ("index", np.arange(60), "index names rows"),
        (
            "is_test",
            KINDS == 0,
            "is_test says which rows test; give the test rows as te",
        ),
        ("Train", KINDS > 0, "Train says which rows test"),
        ("split", (KINDS > 1) * 1, "split says which rows test"),
    ],
)
def test_columns_that_are_no_features(name, values, words):
    """Refused by name, with the cure; with another name they are features."""
    with pytest.raises(ValueError, match=f"not features by their names: {words}"):
        notes(y=KINDS, **{name: values})
    assert "features (4): a, b, c, renamed" in notes(y=KINDS, renamed=values)[0]


def test_two_owners():
    """Only one of them can be the owner."""
    with pytest.raises(ValueError, match="client names rows .*, owner names rows"):
        notes(y=KINDS, client=KINDS, owner=KINDS)
    table = pandas.DataFrame({"a": KINDS * 0.5, "y": KINDS, "client": KINDS})
    with pytest.raises(ValueError, match="client names rows or their owners; drop"):
        frames.from_frame(table.assign(site=KINDS), owner="site")


@pytest.mark.parametrize(
    "name, values",
    [
        ("user", NUMBERS[:, 0]),
        ("test", np.arange(60) % 7),
        ("body mass index", np.arange(60) % 7),
        ("humid", KINDS),
        ("paid", KINDS),
        ("users", KINDS * 2 % 5),
    ],
)
def test_columns_that_are_features(name, values):
    """Fractions, many values, and other words."""
    line = notes(label=KINDS[::-1], **{name: values})[0]
    assert line == f"label: label; owners: none; features (4): a, b, c, {name}"


def test_two_labels_in_any_case():
    """Which one it is cannot be known."""
    assert notes(Target=KINDS)[0].startswith("label: Target; ")
    with pytest.raises(
        ValueError, match="Label, y could hold the labels; give --label"
    ):
        notes(Label=KINDS, y=KINDS)


@pytest.mark.parametrize(
    "label, columns, line",
    [
        (KINDS, {"n": np.arange(60) + 1}, "features that number the rows: n; drop"),
        (KINDS, {"n": np.arange(60)[::-1]}, "features that number the rows: n; drop"),
        (KINDS, {"n": np.arange(60) // 2}, ""),
        (KINDS, {"n": np.arange(60) + 0.5}, ""),
        (KINDS, {"n": 7 - KINDS, "m": KINDS * 0.1}, "so give it away: n, m; drop"),
        (
            np.array(["u", "v", "w"])[KINDS],
            {"n": 2 * KINDS},
            "so give it away: n; drop",
        ),
        (KINDS, {"n": KINDS > 0}, ""),
        (KINDS, {"n": np.where(np.arange(60) == 59, 0, KINDS)}, ""),
        (KINDS, {"t": 1.7e9 + 2 * np.arange(60)}, r"in t .60 become \d.; subtract"),
        (KINDS, {"t": 2**24 + np.arange(60) * 3 // 2}, r"in t .60 become \d+."),
        (KINDS, {"t": 10**18 + np.arange(60) * 50}, "in t .60 become 1."),
        (KINDS, {"t": 0.1 + 1e-10 * np.arange(60)}, r"in t .60 become \d."),
        (KINDS, {"t": 2**24 + np.arange(60) * 4}, ""),
        (KINDS, {"t": 1 + NUMBERS[:, 0] * 1e-3}, ""),
    ],
)
def test_lines_about_features(label, columns, line):
    """Row numbers, copies of the label, and numbers that float32 merges."""
    if "t" in columns:
        columns = {"t": np.random.default_rng(0).permutation(columns["t"])}
    more = [n for n in notes(y=label, **columns)[1:] if "numbered" not in n]
    assert len(more) == bool(line)
    assert not line or pandas.Series(more).str.contains(line).all()


@pytest.mark.parametrize(
    "texts, names",
    [
        (["0", "1", "2"], None),
        ([" 0", " 1", " 2"], None),
        (["1.0", "2.0", "3.0"], ("1", "2", "3")),
        (["-1", "0", "1"], ("-1", "0", "1")),
        (["10", "9", "8"], ("8", "9", "10")),
        (["01", "1", "2"], ("01", "1", "2")),
        (["1e3", "10e2", "2"], ("10e2", "1e3", "2")),
        (["7", "7.0", "8"], ("7", "7.0", "8")),
        (["1e5", "2e5", "3e5"], ("1e5", "2e5", "3e5")),
        ([f"{2**60 + k}" for k in range(3)], tuple(f"{2**60 + k}" for k in range(3))),
    ],
)
def test_text_of_a_file_stays_text(tmp_path, texts, names):
    """Numbers are numbers only if all are written in the usual way."""
    lines = [f"{row % 5},{texts[row % 3]},{texts[row % 3]}" for row in range(30)]
    (tmp_path / "own.csv").write_text("\n".join(["a,y,who", *lines]))
    found = loaders.load(f"csv:{tmp_path}/own.csv", "", owner="who")
    assert found.num_classes == 3 and found.classes == found.owners == names
    is_alike = len({fractions.Fraction(text) for text in texts}) < 3
    assert [" look alike " in n for n in found.notes].count(True) == 2 * is_alike


@pytest.mark.parametrize(
    "texts, words",
    [
        (["0.5", "1e-05", "2"], "target of a regression .it holds 0.5."),
        (["inf", "1", "2"], "has 10 missing labels .*infinite.* in 30 rows"),
    ],
)
def test_numbers_of_a_file_that_are_no_labels(tmp_path, texts, words):
    """They are not taken as text."""
    lines = [f"{row % 5},{texts[row % 3]}" for row in range(30)]
    (tmp_path / "own.csv").write_text("\n".join(["a,y", *lines]))
    with pytest.raises(ValueError, match=words):
        loaders.load(f"csv:{tmp_path}/own.csv", "")


def test_columns_of_one_name_in_a_file(tmp_path):
    """pandas would call the second one a.1."""
    path = tmp_path / "own.csv"
    path.write_text("a,b,a,y\n" + "1,2,3,u\n3,1,2,v\n" * 5)
    with pytest.raises(
        ValueError, match=f"csv:{path}: several columns are named a; ren"
    ):
        loaders.load(f"csv:{path}", "")
    path.write_text("a,a.1,y\n" + "1,2,u\n3,1,v\n" * 5)
    assert loaders.load(f"csv:{path}", "").columns == ("a", "a.1")


def test_columns_of_a_table_are_in_the_order_of_training():
    frame = pandas.DataFrame({"b": [1.0], "more": [3.0], "a": [2.0]})
    assert frames.ordered(frame, ("a", "b")).tolist() == [[2.0, 1.0]]
