"""Labels and owners of any type, and what is not taken for one."""

import datetime

import numpy as np
import pandas
import pytest

from data import labels

N = 6
PLACE = np.array([0, 2, 1, 0, 2, 2])


def of(*values):
    """The values by `PLACE`, as a list."""
    return [values[place] for place in PLACE]


@pytest.mark.parametrize(
    "values, names",
    [
        (PLACE, None),
        (PLACE.astype(np.uint8), None),
        (PLACE.astype(float), None),
        (PLACE.tolist(), None),
        (PLACE + 1, ("1", "2", "3")),
        (PLACE * 5 - 5, ("-5", "0", "5")),
        (PLACE - 1.0, ("-1", "0", "1")),
        (PLACE.astype(np.uint64) + np.uint64(2**63), None),
        (of("ant", "bee", "cat"), ("ant", "bee", "cat")),
        (np.array(of("ant", "bee", "cat"), object), ("ant", "bee", "cat")),
        (np.array(of(b"a", b"b", b"\xc3\xa9")), ("a", "b", "é")),
        (of(b"a", b"b", b"c"), ("a", "b", "c")),
        (np.ma.array(PLACE + 1), ("1", "2", "3")),
        (pandas.Series(of("a", "b", "c"), dtype="category"), ("a", "b", "c")),
        (pandas.Series(of(1, 2, 3), dtype="Int64"), ("1", "2", "3")),
        (pandas.Series(of("a", "b", "c")), ("a", "b", "c")),
        (
            np.array(of("2020-01-01", "2020-01-02", "2020-01-03"), "M8[us]"),
            ("2020-01-01", "2020-01-02", "2020-01-03"),
        ),
        (
            [datetime.date(2020, 1, day) for day in of(1, 2, 3)],
            ("2020-01-01", "2020-01-02", "2020-01-03"),
        ),
    ],
)
def test_values_are_numbered_in_their_order(values, names):
    """As `np.unique` does it; only 0..Y-1 have no names."""
    for number in (labels.classes, labels.owners):
        found = number(values, N, "y")
        assert found.number.dtype == np.int32 and found.count == 3
        np.testing.assert_array_equal(found.number, PLACE)
        if names is None and np.max(values) > 2:
            names = tuple(str(2**63 + place) for place in range(3))
        assert found.names == names
    if names is not None:
        again = labels.found_in(values, names, N, "y")
        np.testing.assert_array_equal(again, PLACE)


@pytest.mark.parametrize("values", [PLACE > 0, (PLACE > 0).tolist()])
def test_bools(values):
    """False comes first."""
    found = labels.classes(values, N, "y")
    np.testing.assert_array_equal(found.number, PLACE > 0)
    assert found.names == ("False", "True")


@pytest.mark.parametrize(
    "values, words",
    [
        (of(np.nan, 1.0, 2.0), "2 missing .* in 6 rows"),
        (of("a", None, "c"), "1 missing"),
        (of("a", "b", " "), "3 missing"),
        (of(1.0, np.inf, 2.0), "1 missing .*infinite.* in 6 rows; fill them, or drop"),
        (of("a", "a\0", "c"), "not valid text; rename it"),
        (of(True, 2, 3), "got bool and int"),
        (pandas.Series(of("a", pandas.NA, "c"), dtype=object), "1 missing"),
        (np.array(of("NaT", "2020-01-01", "NaT"), "M8[D]"), "5 missing"),
        (np.ma.masked_equal(PLACE, 2), "masked array with 3 masked values"),
        (of("a", 1, 2), "of one type, .* got int and str"),
        (of(True, 1.5, "c"), "got bool and float and str"),
        (of({}, {}, {}), "got dict"),
        (np.array(of(b"\xff", b"a", b"b")), "holds '.udcff', which is not valid text"),
        (PLACE + 1j, "got complex128"),
        (PLACE[:5], r"must be \w+ \[6\], got int64 \[5\]"),
        (PLACE[:, None], r"of a column give y.ravel\(\)"),
        ([[1], [2, 3]] * 3, "ragged"),
    ],
)
def test_what_is_not_taken(values, words):
    """One line that begins with the name of the values."""
    for number in (labels.classes, labels.owners):
        with pytest.raises(ValueError, match=words) as error:
            number(values, N, "y")
        assert str(error.value).startswith("y ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        PLACE + 0.5,
        np.arange(500.0) % 200 + 1,
        (np.arange(500) % 200) * 7,
        np.array([1e300] * 6 + [1.0]),
    ],
)
def test_regression_is_refused_by_name(values):
    """Floats that are not whole, or numbers of which nearly every row has another."""
    with pytest.raises(ValueError, match="target of a regression.* np.digitize"):
        labels.classes(values, len(values), "y")


def test_many_classes():
    """Names and numbers 0..Y-1 may be as many as there are rows."""
    for values in (np.arange(500), np.arange(500).astype(str)):
        assert labels.classes(values, 500, "y").count == 500
    with pytest.raises(ValueError, match="100001 different labels, at most 100000"):
        labels.classes(np.arange(100_001), 100_001, "y")


@pytest.mark.parametrize("value", [0, 7, "a", True, 1.0])
def test_one_class(value):
    """It is refused, except where labels are not read."""
    with pytest.raises(ValueError, match="one label only, .*at least 2 classes"):
        labels.classes([value] * 6, 6, "y")
    assert labels.classes([value] * 6, 6, "y", least=1).count == 1


def test_owners_that_are_not_whole():
    """They are not owners, and not a regression."""
    with pytest.raises(ValueError, match="client holds 0.5; owners are text"):
        labels.owners(PLACE + 0.5, N, "client")


def test_labels_of_another_data_set():
    """Those that are not among the names are listed; types need not be equal."""
    names = ("1", "2", "7")
    found = labels.found_in(np.array([7.0, 1.0]), names, 2, "y")
    np.testing.assert_array_equal(found, [2, 0])
    np.testing.assert_array_equal(labels.found_in(["2", "1"], names, 2, "y"), [1, 0])
    with pytest.raises(ValueError, match="y has the labels 3, the model's are 1, 2, 7"):
        labels.found_in([3, 1], names, 2, "y")
    with pytest.raises(ValueError, match="y looks like .* regression .it holds 1.5"):
        labels.found_in([1.5, 1], names, 2, "y")


def test_names_in_a_line():
    """Few, short, and quoted if they are not plain words."""
    names = ["a", "b, c", "d\n", "e" * 40, *map(str, range(9))]
    assert labels.listed(names) == (
        f"a, 'b, c', 'd\\n', {'e' * 27}..., 0, 1, 2, 3 and 5 more"
    )
    assert labels.sized({"a": 1, "b": 2}) == "a has 1, b has 2"


def test_text_that_is_not_unicode():
    """Half of a surrogate pair cannot be written anywhere."""
    with pytest.raises(ValueError, match=r"y holds '\\udc80', which is not valid text"):
        labels.classes(["a", "\udc80"], 2, "y")


@pytest.mark.parametrize(
    "names, shown",
    [
        (("cat", "Cat", "dog"), "cat, Cat"),
        (("cat", "cat ", "dog"), "cat, 'cat '"),
        (("a  b", "a b"), "a  b, a b"),
        (("\xe9", "e\u0301"), r"é, e\u0301"),
        (("7", "7.0", "07", "8"), "7, 7.0, 07"),
        (("1e3", "1000"), "1e3, 1000"),
        (("\uff21", "a"), "\uff21, a"),
        (("cat", "cats", "7", "77"), ""),
        (("\xe9", "e"), ""),
        (None, ""),
    ],
)
def test_names_that_look_alike(names, shown):
    """One line with all of them."""
    line = f"labels that look alike are different ones: {shown}; rename them if not"
    assert labels.alike(names, "labels") == (line if shown else "")


def test_text_of_numpy_cannot_end_in_a_nul():
    """Python's can, and would be merged with the text before it."""
    for values in (["a\0", "a"], np.array(["a\0", "a"], object)):
        with pytest.raises(ValueError, match="which is not valid text; rename it"):
            labels.owners(values, 2, "client")
    assert labels.classes(["a\0b", "a"], 2, "y").names == ("a", "a\0b")
