"""Data sets of other libraries, by small objects with their methods."""

from types import SimpleNamespace

import numpy as np
import pandas
import pytest
from PIL import Image as pillow

from data import arrays, doors, frames

X = np.random.default_rng(0).integers(0, 256, (12, 5, 6, 3), np.uint8)
Y = np.arange(12) % 3
TABLE = pandas.DataFrame({"a": X[:, 0, 0, 0] / 7, "b": X[:, 1, 0, 0], "label": Y})
FEATURES = TABLE[["a", "b"]]


class Tensor:
    """A tensor of torch."""

    def __init__(self, value, dtype="torch.float32"):
        self.value, self.dtype = value, dtype

    def detach(self):
        return self

    def cpu(self):
        return self

    def float(self):
        return Tensor(np.asarray(self.value, np.float32))

    def numpy(self):
        if "bfloat16" in self.dtype:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.value


class Rows:
    """A data set of torch: one example after another."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Torn(Rows):
    """One with a file that cannot be read."""

    def __getitem__(self, index):
        raise RuntimeError("torn")


class Loader:
    """A DataLoader of torch."""

    def __init__(self, dataset, sampler):
        self.dataset, self.sampler = dataset, sampler


class Stream:
    """Rows of which no number is known."""

    def __iter__(self):
        return iter([(X[0], 0)])


def Image(value):  # noqa: N802
    """An image of pillow."""
    return pillow.fromarray(np.asarray(value, np.uint8))


class HuggingFace:
    """A data set of Hugging Face, whose numpy format rounds floats and widens bytes."""

    def __init__(self, columns, is_numpy=False):
        self.columns, self.is_numpy = columns, is_numpy

    def __len__(self):
        return 12

    @property
    def features(self):
        dtypes = {name: np.asarray(one[0]).dtype for name, one in self.columns.items()}
        return {name: SimpleNamespace(dtype=str(one)) for name, one in dtypes.items()}

    def with_format(self, kind):
        return HuggingFace(self.columns, kind == "numpy")

    def __getitem__(self, key):
        if not isinstance(key, str):
            return {name: column[key] for name, column in self.columns.items()}
        column = self.columns[key]
        if not self.is_numpy:
            return column
        column = [np.asarray(one) for one in column]
        if len({one.shape for one in column}) > 1:
            return np.array([*column, None], object)[:-1]
        found = np.stack(column)
        return found.astype({"f": "f4", "u": "i8", "i": "i8"}.get(found.dtype.kind))


def test_pixels_of_images_that_have_a_palette():
    """In a column of Hugging Face, and in a list: colours, and no transparency."""
    palette = Image(np.arange(16).reshape(4, 4) % 3).convert("P")
    palette.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
    wanted = np.asarray(palette.convert("RGB"))
    clear = Image(np.zeros((4, 4, 4)))
    for pictures, words in (([palette] * 12, ""), ([palette] * 11 + [clear], "transp")):
        for given in (HuggingFace({"image": pictures, "y": Y}), (pictures, Y)):
            if words:
                with pytest.raises(ValueError, match=words):
                    doors.opened(given)
                continue
            x = doors.opened(given)[0].arrays[0]
            assert x.shape == (12, 4, 4, 3) and (x == wanted).all()


def test_gray_images_beside_colours():
    """They become RGB, as in a folder; arrays of other channels are refused."""
    pictures = [Image(np.full((4, 4), n)) for n in range(11)] + [Image(X[0, :4, :4])]
    for given in (HuggingFace({"image": pictures, "y": Y}), (pictures, Y)):
        x = doors.opened(given)[0].arrays[0]
        assert x.shape == (12, 4, 4, 3)
        assert (x[:11] == np.arange(11)[:, None, None, None]).all()
    with pytest.raises(ValueError, match="ragged"):
        rows = doors.opened(([np.zeros((4, 4, 1)), *[np.zeros((4, 4, 3))] * 11], Y))
        doors.joined(*rows)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"Train": (X, Y), "Test": (X, Y)}, "Train, Test look like splits and not "),
        ({1: (X, Y), "1": (X, Y)}, "owners of one type, .* got int and str"),
        ({"a": (X, Y), "b": (X / 255, Y)}, "differ in the type of x, uint8 of a and"),
        ({"a": (X, Y > 0), "b": (X, Y)}, "labels of one type, .* got bool and int"),
        ({"a": (X, Y), "b": (X, Y.astype(str))}, "labels of one type.* int and str"),
    ],
)
def test_clients_of_several_kinds(given, words):
    """They are not made alike, as numpy would."""
    with pytest.raises(ValueError, match=words) as error:
        doors.joined(*doors.opened(given))
    assert "\n" not in str(error.value)


def test_clients_whose_numbers_are_alike():
    """Whole numbers beside fractions, images of f32, and a client without rows."""
    none = np.zeros((0, 2)), np.zeros(0)
    clients = {"a": (np.ones((6, 2), int), Y[:6]), "b": (np.full((6, 2), 0.5), Y[:6])}
    found = doors.joined(*doors.opened(clients | {"c": none}))
    assert found.image.dtype == np.float32 and set(found.image.flat) == {1, 0.5}
    pixels = {"a": (X[:6], Y[:6]), "b": (np.zeros((0, 5, 6, 3)), np.zeros(0))}
    assert doors.joined(*doors.opened(pixels)).image.dtype == np.uint8
    deep = pillow.fromarray(np.full((4, 4), 0.25, np.float32))
    x, _ = doors.opened(([deep] * 12, Y))[0].arrays
    assert x.dtype == np.float32 and (x == 0.25).all()


class Series:
    """A column of polars."""

    def __init__(self, name, values):
        self.name, self.values = name, values

    def to_numpy(self):
        return self.values


class Polars:
    """A DataFrame of polars."""

    def __init__(self, columns):
        self.columns = columns

    def get_columns(self):
        return [Series(name, values) for name, values in self.columns.items()]

    def to_dict(self, as_series=True):
        raise NotImplementedError


class Lazy:
    """A LazyFrame of polars."""

    def collect_schema(self):
        raise NotImplementedError

    def collect(self):
        return Polars(dict(TABLE.items()) | {"label": TABLE["label"].to_numpy()})


class Arrow:
    """A table of pyarrow."""

    column_names = tuple(TABLE.columns)

    def to_pandas(self):
        return TABLE


def pairs(rows=range(12)):
    """Items (example, label) of torch."""
    return Rows([(Tensor(X[row]), Y[row].item()) for row in rows])


def images(**more):
    """Columns of Hugging Face."""
    return {"image": [Image(one) for one in X], "label": Y.tolist()} | more


@pytest.mark.parametrize(
    "given, words",
    [
        ((X, Y), ""),
        ([Tensor(X), Tensor(Y)], ""),
        ({"x": X, "y": Y}, "label: y; owners: none; x: x"),
        ({"images": (X / 1).tolist(), "y": Y.tolist()}, "x: images"),
        (pairs(), ""),
        ([(X[row], Y[row]) for row in range(12)], ""),
        (Loader(pairs(), range(12)), "the rows of its .dataset are taken once"),
        (type("TensorDataset", (Rows,), {"tensors": (Tensor(X), Tensor(Y))})([]), ""),
        (Rows([{"img": X[k], "Label": Y[k]} for k in range(12)]), "label: Label"),
        (HuggingFace(images(name=["a"] * 12)), "x: image; not used: name"),
        (Polars({"x": np.array([*X, None], object)[:12], "y": Y}), "x: x"),
        (pandas.DataFrame({"pixels": list(X), "target": Y}), "x: pixels"),
    ],
)
def test_examples_that_are_arrays(given, words):
    """All of them are the same arrays, with a line where columns were chosen."""
    rows, test, _ = doors.opened(given)
    assert test is None and rows.frame is None
    assert words in " ".join(rows.notes) and len(rows.notes) == bool(words)
    found = arrays.from_arrays(*rows.arrays, layout="nhwc")
    np.testing.assert_array_equal(found.image, X.astype(found.image.dtype))
    np.testing.assert_array_equal(found.label, Y)


@pytest.mark.parametrize(
    "given",
    [
        TABLE,
        Arrow(),
        Lazy(),
        dict(TABLE.items()),
        TABLE.to_dict("list"),
        Rows(TABLE.to_dict("records")),
        HuggingFace(TABLE.to_dict("list")),
        Polars({name: TABLE[name].to_numpy() for name in TABLE}),
    ],
)
def test_tables(given):
    """All of them are the same table, to the last bit of a float64."""
    rows, *_ = doors.opened(given)
    assert rows.arrays is None and rows.has_columns
    pandas.testing.assert_frame_equal(rows.frame, TABLE, check_dtype=False)
    assert frames.from_frame(rows.frame).columns == ("a", "b")


@pytest.mark.parametrize(
    "of", [lambda table: table, lambda table: Polars(dict(table.items()))]
)
def test_a_table_beside_its_labels(of):
    """As scikit-learn takes them: columns keep their names, rows their places."""
    other = pandas.Series(Y, index=np.arange(12)[::-1] + 7)
    for others in ((Y,), (other,), (Y.tolist(), np.repeat(["p", "q"], 6))):
        rows, *_ = doors.opened((of(TABLE[["a", "b"]]), *others))
        found = frames.from_frame(rows.frame)
        assert found.columns == ("a", "b")
        assert found.owners == (("p", "q") if len(others) > 1 else None)
        np.testing.assert_array_equal(found.label, Y)
        np.testing.assert_array_equal(found.image[:, 1], TABLE["b"])
    with pytest.raises(ValueError, match="several columns are named y"):
        rows, *_ = doors.opened((of(TABLE[["a"]].assign(y=Y)), Y))
        frames.from_frame(rows.frame)


def test_tables_beside_labels_that_are_arrays():
    """Bytes of images stay bytes, and what does not fit is refused as arrays are."""
    pixels = pandas.DataFrame(X.reshape(12, -1))
    assert arrays.from_arrays(*doors.opened((pixels, Y))[0].arrays).image.dtype == "u1"
    for labels in (Y[:5], Y[:, None]):
        rows, *_ = doors.opened((TABLE[["a"]], labels))
        with pytest.raises(ValueError, match=r"y must be labels \[12\], got"):
            arrays.from_arrays(*rows.arrays)


def test_parts():
    """Train, official test and validation rows, of a dict or beside it."""
    few = X[:2], Y[:2]
    _, tests, vals = doors.opened({"train": (X, Y), "validation": few})
    assert tests is None and len(vals.arrays[0]) == 2
    _, tests, vals = doors.opened({"train": (X, Y), "dev": (X, Y), "test": few})
    assert [len(one.arrays[0]) for one in (tests, vals)] == [2, 12]
    rows, _, vals = doors.opened((X, Y), val=few)
    found = arrays.from_arrays(*rows.arrays, layout="nhwc", val=vals.arrays)
    assert (found.num_train, found.num_test, found.num_val) == (12, 0, 2)
    with pytest.raises(ValueError, match="dataset: val and dev: give one of them"):
        doors.opened({"train": (X, Y), "dev": few, "val": few})


def test_parts_of_clients():
    """They are as the clients of parts, and a client may lack some."""
    one, few = (X, Y), (X[:2], Y[:2])
    by_client = {"a": {"train": one, "test": few, "dev": few}, "b": {"train": few}}
    by_part = {"train": {"a": one, "b": few}, "test": {"a": few}, "dev": {"a": few}}
    for rows, others in zip(*map(doors.opened, (by_client, by_part)), strict=True):
        for pair in zip(rows.arrays, others.arrays, strict=True):
            np.testing.assert_array_equal(*pair)
    with pytest.raises(ValueError, match="dataset: val and dev: give one of them"):
        doors.opened(by_client | {"b": {"train": few, "val": few}})
    with pytest.raises(ValueError, match="dataset: b: other clients are dicts of par"):
        doors.opened(by_client | {"b": few})
    _, tests, _ = doors.opened(by_client | {"b": {"train": few, "test": None}})
    assert len(tests.arrays[0]) == 2
    _, tests, _ = doors.opened(by_client | {"b": {"test": few}})
    assert tests.arrays[2].tolist() == ["a", "a", "b", "b"]
    rows, tests, _ = doors.opened({"train": {"train": one, "test": few}})
    assert rows.arrays[2].tolist() == 12 * ["train"] + 2 * ["test"] and tests is None


def test_a_column_of_the_split_beside_arrays():
    """It divides the rows, with their owners, and no part of it trains by mistake."""
    split = ["test", "train", "Validation", "train"] * 3
    columns = {"x": X, "y": Y, "client": np.arange(12) % 2, "split": split}
    table = pandas.DataFrame({n: list(one) for n, one in columns.items()})
    for given in (columns, table):
        rows = doors.opened(given)
        for part, place in zip(
            rows, (slice(1, 12, 2), [0, 4, 8], [2, 6, 10]), strict=True
        ):
            for one, name in zip(part.arrays, [*columns][:3], strict=True):
                np.testing.assert_array_equal(one, columns[name][place])
        assert "; split: split" in rows[0].notes[0]
    train, test, val = doors.opened({**columns, "split": ["train"] * 12})
    assert len(train.arrays[0]) == 12 and test is None and val is None
    with pytest.raises(ValueError, match="dataset: the column split holds dev; expec"):
        doors.opened({**columns, "split": ["train"] * 11 + ["dev"]})
    with pytest.raises(ValueError, match="which rows test; omit the validation rows"):
        doors.opened(columns, val=(X, Y))
    with pytest.raises(ValueError, match="dataset: there is no row to train on"):
        doors.opened({**columns, "split": ["test"] * 12})


def test_lengths_of_parts():
    """Labels too many in one part do not make up for too few in another."""
    few = {"test": (X[:2], Y), "val": (X, Y[:2])}
    for name, part in few.items():
        with pytest.raises(ValueError, match=f"^dataset: {name}: x has the shape"):
            arrays.from_arrays(X, Y, layout="nhwc", **{name: part})
    with pytest.raises(ValueError, match="^dataset: the train rows: x has .* y .2.; g"):
        arrays.from_arrays(X, Y[:2], layout="nhwc", test=few["test"])


def test_labels_of_test_rows_alone():
    """No model learns them."""
    found = arrays.from_arrays(X, 0 * Y, test=(X, Y), layout="nhwc")
    assert found.notes == ("labels that only test rows have: 1, 2",)


def test_owners_and_names_of_columns():
    """A usual column, or the one that is named."""
    owner, columns = np.repeat(["p", "q"], 6), {"x": X, "kind": Y, "y": 0 * Y}
    for given in ({"label": "kind"}, {"label": "kind", "owner": "site"}):
        name = given.get("owner", "Client")
        rows, *_ = doors.opened(columns | {name: owner}, **given)
        assert [len(one) for one in rows.arrays] == [12] * 3
        np.testing.assert_array_equal(rows.arrays[1], Y)
        np.testing.assert_array_equal(rows.arrays[2], owner)


@pytest.mark.parametrize(
    "given, test",
    [
        ((X[:8], Y[:8]), (X[8:], Y[8:])),
        (((X[:8], Y[:8]), (X[8:], Y[8:])), None),
        ({"train": pairs(range(8)), "test": pairs(range(8, 12))}, None),
    ],
)
def test_official_test_rows(given, test):
    """Behind the train rows, with labels numbered together."""
    rows, tests, _ = doors.opened(given, test)
    found = arrays.from_arrays(*rows.arrays, layout="nhwc", test=tests.arrays)
    assert found.num_train == 8 and len(found.label) == 12
    np.testing.assert_array_equal(found.image, X.astype(found.image.dtype))
    np.testing.assert_array_equal(found.label, Y)


def test_official_test_rows_of_a_table():
    """Columns by name; rows are their owners', or nobody's without that column."""
    table = TABLE.assign(client=np.arange(12) // 4 % 2, label=list("uvw") * 4)
    for more, client in ((table[8:], 0), (table[8:][["label", "b", "a"]], -1)):
        found = frames.from_frame(table[:8], test=more)
        assert found.num_train == 8 and found.classes == ("u", "v", "w")
        assert found.client.tolist() == [0] * 4 + [1] * 4 + [client] * 4
        np.testing.assert_array_equal(found.image[:, 1], TABLE["b"])
    with pytest.raises(ValueError, match="table lacks the columns b, label, which"):
        frames.from_frame(table[:8], test=table[["a"]])


@pytest.mark.parametrize(
    "given, test, words",
    [
        (5, None, "got a int"),
        (X, None, "got a ndarray"),
        (TABLE["a"], None, "got a Series"),
        ("mnist_5k", (X, Y), "the name .mnist_5k.; test= and val= are for data"),
        (Stream(), None, "got a Stream without __len__ .* join its batches to arrays"),
        (Loader(pairs(), range(5)), None, "draws some of its rows; give its .dataset"),
        (Loader(Stream(), Stream()), None, "draws some of its rows; give its .dataset"),
        (Rows([1, 2, 3, 4]), None, "items are neither .x, y. nor dicts"),
        (TABLE.groupby("label"), None, "DataFrameGroupBy whose rows raise a KeyError"),
        (
            HuggingFace(images(image=[Image(X[0]), *[Image(X[0, 1:])] * 11])),
            None,
            r"examples differ in shape, such as \[5, 6, 3\] and \[4, 6, 3\]; give all",
        ),
        ({"a": X, "b": X, "y": Y}, None, "columns a, b hold an array .* name it x"),
        (({"a": X, "b": Y}, Y), None, "a of the examples are not one number a row, .*"),
        ({"x": X, "kind": Y}, None, "no column is known to hold the labels; give --la"),
        ({"a": Y, "y": Y[:5]}, None, "number of rows: a has 12, y has 5; give one"),
        ({"a": 1, "y": Y}, None, "number of rows: a has 1, y has 12; give one"),
        ((X, Y), TABLE, "dataset is arrays and test is a table; give one form"),
        (
            {"train": (X, Y), "testing": (X, Y)},
            None,
            "testing beside train: parts are called train, test, .*, or a client cal",
        ),
    ],
)
def test_what_is_not_taken(given, test, words):
    """One line that says what to give instead."""
    with pytest.raises(ValueError, match=words) as error:
        rows, *_ = doors.opened(given, test)
    assert "\n" not in str(error.value) and str(error.value).startswith("dataset")


@pytest.mark.parametrize(
    "test, words",
    [
        (
            (X[:, :4], Y),
            r"whose x is uint8 \[12, 5, 6, 3\]; got 2 arrays with uint8 \[",
        ),
        ((X / 255, Y), "whose x is uint8 .* got 2 arrays with float64"),
        ((X, Y, Y), "got 3 arrays"),
        ((X[:0], Y[:0]), r"got 2 arrays with uint8 \[0, 5, 6, 3\]"),
        ((X, Y[:, None]), r"whose y is int64 \[12\]; got 2 arrays with int64 \[12, 1"),
        ((X, np.array(list("uvw"))[Y]), "of one type, .* got int and str"),
    ],
)
def test_official_test_rows_that_differ(test, words):
    """Examples and labels are of the same kind as the train rows."""
    with pytest.raises(ValueError, match=words):
        arrays.from_arrays(X, Y, test=test)


def test_rows_that_are_dicts_have_the_columns_of_all():
    """Also one that the first row lacks, which was left out."""
    every = [{"a": 1.0, "y": k % 2} | ({"b": 2.0} if k == 3 else {}) for k in range(4)]
    with pytest.raises(ValueError, match="values are missing, of which b has 3; repl"):
        doors.joined(*doors.opened(every))


def test_bfloat16():
    """numpy has no such numbers."""
    given = Tensor(Y.astype("f4")[:, None], "torch.bfloat16"), Y
    np.testing.assert_array_equal(doors.opened(given)[0].arrays[0][:, 0], Y)


def test_real_libraries():
    """Those that are installed."""
    polars = pytest.importorskip("polars")
    rows, *_ = doors.opened(polars.DataFrame(TABLE.to_dict("list")))
    pandas.testing.assert_frame_equal(rows.frame, TABLE, check_dtype=False)


def test_real_data_sets_of_torch():
    """Where torch is installed."""
    torch = pytest.importorskip("torch")
    made = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    for given in (made, torch.utils.data.DataLoader(made, 5, shuffle=True)):
        x, y = doors.opened(given)[0].arrays
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(y, Y)
    part = torch.utils.data.Subset(made, [3, 1])
    np.testing.assert_array_equal(doors.opened(part)[0].arrays[0], X[[3, 1]])


def test_real_data_sets_of_hugging_face():
    """Where datasets is installed."""
    datasets = pytest.importorskip("datasets")
    rows, *_ = doors.opened(datasets.Dataset.from_dict(TABLE.to_dict("list")))
    pandas.testing.assert_frame_equal(rows.frame, TABLE, check_dtype=False)
    kinds = {"x": datasets.Array3D((5, 6, 3), "uint8"), "y": datasets.Value("int64")}
    columns = {"x": list(X), "y": Y.tolist()}
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    x, y = doors.opened(made)[0].arrays
    np.testing.assert_array_equal(x, X, strict=True)
    np.testing.assert_array_equal(y, Y)
    parts = {name: made.select(range(name, 12, 2)) for name in (0, 1)}
    for given in (parts, datasets.DatasetDict({str(n): v for n, v in parts.items()})):
        x, y, client = doors.opened(given)[0].arrays
        wanted = np.concatenate([X[::2], X[1::2]])
        np.testing.assert_array_equal(x, wanted, strict=True)
        np.testing.assert_array_equal(y, np.concatenate([Y[::2], Y[1::2]]))
        assert list(map(int, client)) == [0] * 6 + [1] * 6
    with pytest.raises(ValueError, match="look like splits and not like clients"):
        doors.opened(datasets.DatasetDict({"test": parts[0], "validation": parts[1]}))


def test_images_of_a_palette_are_in_colour():
    """Their numbers are places in a table of colours, and not brightness."""
    gen = np.random.default_rng(0)
    colours = [gen.integers(0, 255, (8, 8, 3)).astype("u1") for _ in range(8)]
    palette = [pillow.fromarray(one).convert("P") for one in colours]
    found, *_ = doors.opened([(one, k % 2) for k, one in enumerate(palette)])
    wanted = [np.asarray(one.convert("RGB")) for one in palette]
    np.testing.assert_array_equal(found.arrays[0], np.stack(wanted))


def test_labels_in_another_order_than_their_table():
    """pandas would join them by index, and numpy by place."""
    label = pandas.Series(Y)
    given = TABLE[["a", "b"]], label.sample(frac=1, random_state=0)
    with pytest.raises(ValueError, match=r"y has the index of the table in another"):
        doors.opened(given)
    pixels = pandas.DataFrame(X.reshape(12, -1))
    for table in (pixels, dict(TABLE[["a", "b"]].items())):
        with pytest.raises(ValueError, match="y has the index of .* in another"):
            doors.opened((table, label.sample(frac=1, random_state=0)))
    doors.opened((TABLE[["a", "b"]], pandas.Series(Y, index=[1, "a"] * 6)))
    rows, *_ = doors.opened((TABLE[["a", "b"]][::-1], label[::-1]))
    assert rows.frame["y"].tolist() == Y[::-1].tolist()
    owner = pandas.Series(list("pq") * 6)
    doors.opened((X, label[::-1], owner[::-1]))
    elsewhere = TABLE[["a", "b"]].set_axis(range(20, 32), axis=0)
    for x in (X, elsewhere):
        with pytest.raises(ValueError, match="client has the index of y in another"):
            doors.opened((x, label[::-1], owner))


@pytest.mark.parametrize("index", [range(12), [*"abcdefghijkl"], [0, 1] * 6])
def test_columns_that_are_series(index):
    """Their positions count, as in a frame, also of parts and beside labels."""
    table = TABLE.assign(label=list("xyz") * 4).set_axis(index, axis=0)
    table = table.sample(frac=1, random_state=0)
    columns = dict(table.items())
    beside = {name: columns[name] for name in "ab"}, columns["label"]
    for given in (columns, beside):
        found = doors.joined(*doors.opened(given))
        np.testing.assert_array_equal(found.image, table[["a", "b"]].astype("f4"))
        assert [found.classes[one] for one in found.label] == table["label"].tolist()
    split = ["train", "test", "train"] * 4
    wide = {"x": X.reshape(12, -1), "label": columns["label"], "split": split}
    rows = doors.opened(wide | {"client": columns["b"]})
    places = np.flatnonzero(np.array(split) == "test")
    assert list(rows[1].arrays[1]) == table["label"].iloc[places].tolist()
    np.testing.assert_array_equal(rows[1].arrays[2], table["b"].iloc[places])


def test_columns_in_another_order_than_others():
    """Two orders of one index, or other numbers of rows, are refused."""
    column = TABLE["a"].sample(frac=1, random_state=0)
    for given in (
        {"a": column, "label": TABLE["label"]},
        ({"a": column}, TABLE["label"]),
    ):
        with pytest.raises(ValueError, match="has the index of a in another order"):
            doors.opened(given)
    other = {"a": TABLE["a"].set_axis(range(20, 32)), "b": column}
    other["label"] = TABLE["label"]
    with pytest.raises(ValueError, match="label has the index of b in another order"):
        doors.opened(other)
    for given in ({"a": TABLE["a"][:5], "label": Y}, ({"a": TABLE["a"][:5]}, Y)):
        with pytest.raises(ValueError, match="number of rows: .*; give one"):
            doors.opened(given)


@pytest.mark.parametrize(
    "names", [["red", "blue"], ["red"], ["pixel0", "pixel1"], [0, 1], [0]]
)
def test_bytes_beside_labels(names):
    """Pixels where the names differ in a number alone, and else a table's columns."""
    table = pandas.DataFrame(X.reshape(12, -1)[:, : len(names)], columns=names)
    found = doors.joined(*doors.opened((table, Y), (table[names[::-1]], Y)))
    if names[0] == "red":
        assert found.columns == tuple(names) and found.image.dtype == np.float32
        np.testing.assert_array_equal(found.image[12:], table)
    else:
        assert found.columns is None and found.image.dtype == np.uint8


@pytest.mark.parametrize("name, is_owner", [("site", 1), ("Client", 1), ("who", 0)])
def test_owners_of_test_tables_by_another_name(name, is_owner):
    """A usual one, or the same in another case, that training has not."""
    train = TABLE.assign(Site=list("pq") * 6)
    test = TABLE[:3].assign(**{name: list("qpq")})
    if name == "site":  # its own name wins
        test = test.assign(client_id=list("ppp"))
    rows = doors.opened(train, test, owner="Site")
    found = doors.joined(*rows, owner="Site")
    assert found.owners == ("p", "q")
    if is_owner:
        assert found.client[12:].tolist() == [1, 0, 1]
    else:
        assert list(found.client[12:]) != [1, 0, 1]


@pytest.mark.parametrize(
    "form",
    [
        lambda image, y: HuggingFace({"image": image, "y": y}),
        lambda image, y: {"image": image, "y": y},
        lambda image, y: {"image": np.stack(image), "y": np.array(y)},
    ],
)
def test_columns_by_client(form):
    """As the partitions of flwr_datasets; columns of other names are left out."""
    pictures, given = list(X), {}
    for name, part in {"q": slice(0, 12), "p": slice(0, 12)}.items():
        given[name] = form(pictures[part], Y[part].tolist())
    rows, *_ = doors.opened(given)
    np.testing.assert_array_equal(rows.arrays[0], np.concatenate([X, X]), strict=True)
    assert list(rows.arrays[2]) == ["q"] * 12 + ["p"] * 12
    assert rows.notes[-1] == "label: y; owners: client; x: image"
    numbers = {name: {"a": [1.5, 2.5], "y": [0, 1], "b": [3, 4]} for name in "qp"}
    found = doors.joined(*doors.opened(numbers, {"p": {"b": [3], "y": [1], "a": [0]}}))
    assert found.columns == ("a", "b") and found.owners == ("p", "q")
    assert found.client.tolist() == [1, 1, 0, 0, 0]
    np.testing.assert_array_equal(found.image[-1], [0, 3])


def test_columns_by_client_beside_labels():
    """Labels of the same rows in any order, and none in another."""
    table = TABLE.sample(frac=1, random_state=0)
    for other, is_same in ((table["label"], True), (table["label"][::-1], False)):
        given = {"p": ({"a": table["a"]}, other), "q": ({"a": [1.5]}, [2])}
        if is_same:
            found = doors.joined(*doors.opened(given))
            assert found.label.tolist() == [*table["label"], 2]
        else:
            with pytest.raises(ValueError, match="p: y has the index of the table in"):
                doors.opened(given)


def test_columns_by_client_that_lack_values():
    """As one table that lacks them, with one row too."""
    given = {"a": pandas.Series([None, 1], dtype="Int64"), "label": [0, 1]}
    one = {"a": np.float32(2), "label": np.int64(1)}
    with pytest.raises(ValueError, match="missing, of which a has 1"):
        doors.joined(*doors.opened({"p": given, "q": one}))


class HuggingFaceStream(Stream):
    """A data set of Hugging Face whose rows are not counted."""

    def with_format(self, kind):
        return self


def test_streams_of_hugging_face_are_refused():
    """In one line, by client too."""
    given = HuggingFaceStream()
    for one in (given, {"train": given}, {"p": given, "q": given}):
        with pytest.raises(ValueError, match="dataset"):
            doors.joined(*doors.opened(one))


def test_an_image_that_cannot_be_taken():
    """The line names the data."""
    image = pillow.new("I;16", (5, 6))
    with pytest.raises(ValueError, match="dataset: an image cannot be taken: its pix"):
        doors.opened(Rows([(image, 0), (image, 1)]))


CLIENTS = {"b": (X[:3], Y[:3]), "a": (X[3:5], Y[3:5]), "c": (X[5:5], Y[5:5])}


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: (x, y),
        lambda x, y: {"x": x, "y": y},
        lambda x, y: (Tensor(x), Tensor(y)),
    ],
)
def test_rows_by_client(form):
    """As of FedJAX and Flower, with a split or without; an owner is each row's."""
    given = {name: form(*pair) for name, pair in CLIENTS.items()}
    for whole in (given, {"train": given}):
        (x, y, client), *_ = doors.opened(whole)[0]
        np.testing.assert_array_equal(x, X[:5])
        np.testing.assert_array_equal(y, Y[:5])
        assert client.tolist() == ["b", "b", "b", "a", "a"]
    _, test, _ = doors.opened({"train": given, "test": {"a": form(X[5:7], Y[5:7])}})
    assert test.arrays[2].tolist() == ["a", "a"] and test.is_of_whole
    some = given | {name: form(X[:0], Y[:0]) for name in "defg"}
    sets = {name: Rows(list(zip(*pair, strict=True))) for name, pair in CLIENTS.items()}
    (found, *_) = doors.opened(sets)
    np.testing.assert_array_equal(found.arrays[0], X[:5])
    assert found.arrays[2].tolist() == client.tolist()
    assert found.notes[0].startswith("1 of 3 clients of dataset= have no rows")
    with pytest.raises(ValueError, match="dataset of z: .* raise a RuntimeError .torn"):
        doors.opened(sets | {"z": Torn([1])})
    (rows, *_), (whole, *_) = doors.opened(some), doors.opened(given)
    said = "{} clients of dataset= have no rows and are left out: c{}"
    assert rows.notes == (said.format("5 of 7", ", d, e, ..."),)
    assert whole.notes == (said.format("1 of 3", ""),)
    assert rows.arrays[2].tolist() == whole.arrays[2].tolist()


@pytest.mark.parametrize(
    "form",
    [
        lambda table, y, name: (table, y),
        lambda table, y, name: {"x": table, "y": y},
        lambda table, y, name: (Polars({n: table[n].to_numpy() for n in table}), y),
        lambda table, y, name: table.assign(y=y),
        lambda table, y, name: table.assign(client=name, y=y),
    ],
)
def test_tables_by_client(form):
    """Columns go by name, also of test rows, and a name is the owner of its rows."""
    parts = {"p": slice(0, 8), "q": slice(8, 12), "none": slice(0)}
    given = {}
    for name, part in parts.items():
        table = FEATURES[part]
        given[name] = form(table[["b", "a"]] if name == "q" else table, Y[part], name)
    test = {"q": form(FEATURES[:4][["b", "a"]], Y[:4], "q")}
    found = doors.joined(*doors.opened({"train": given, "test": test}))
    wanted = np.concatenate([FEATURES, FEATURES[:4]])
    np.testing.assert_array_equal(found.image, wanted.astype(np.float32))
    np.testing.assert_array_equal(found.label, np.concatenate([Y, Y[:4]]))
    assert found.client.tolist() == [0] * 8 + [1] * 8 and found.owners == ("p", "q")
    assert found.columns == ("a", "b")
    assert found.notes[0].startswith("1 of 3 clients of dataset= have no rows")


@pytest.mark.parametrize(
    "names", ["pq", (3, 5), (pandas.Timestamp(0), pandas.Timestamp(1))]
)
@pytest.mark.parametrize("owner", ["", "site"])
def test_tables_of_a_groupby(names, owner):
    """The grouped column is no feature, and test tables may lack it."""
    given = {}
    for number, name in enumerate(names):
        given[name] = TABLE[number::2].assign(site=[name] * 6)
    test = {names[1]: TABLE[:3].assign(label=0)}
    rows = doors.opened(given, test, owner=owner)
    found = doors.joined(*rows, owner=owner)
    assert found.columns == ("a", "b") and len(found.owners) == 2
    assert sorted(found.client[:12]) == [0] * 6 + [1] * 6
    assert found.client[12:].tolist() == [found.client[6]] * 3


def test_owners_of_a_table_and_of_test_tables_by_client():
    """The names of clients are of the owner's column, whatever that is called."""
    whole = TABLE.assign(client_id=list("pq") * 6)
    for given in (whole, dict(list(whole.groupby("client_id")))):
        rows = doors.opened(given, {"q": TABLE[:3]}, {"p": TABLE[3:5]})
        found = doors.joined(*rows)
        assert found.columns == ("a", "b") and found.owners == ("p", "q")
        assert found.client[12:].tolist() == [1] * 3 + [0] * 2


def test_labels_of_tables_by_client():
    """True is not 1, a client may have one class, and one without rows no columns."""
    one, other = FEATURES[:6], FEATURES[6:]
    for pair in (
        ((one, [True, False] * 3), (other, [1, 2] * 3)),
        (one.assign(label=[True, False] * 3), other.assign(label=[1, 2] * 3)),
    ):
        with pytest.raises(ValueError, match="one type"):
            doors.joined(*doors.opened(dict(zip("pq", pair, strict=True))))
    given = {0: TABLE[:6].assign(label=0), 1: TABLE[6:].assign(label=1)}
    found = doors.joined(*doors.opened(given | {2: pandas.DataFrame()}))
    assert found.label.tolist() == [0] * 6 + [1] * 6 and found.columns == ("a", "b")
    empty = pandas.DataFrame(), []
    rows = doors.opened({"p": (one, Y[:6]), "q": (other, Y[6:]), "r": empty})
    assert doors.joined(*rows).columns == ("a", "b")


def test_a_table_of_examples_beside_its_labels_in_a_dict():
    """They are the columns x and y, and no clients."""
    found = doors.joined(*doors.opened({"x": FEATURES, "y": Y}))
    np.testing.assert_array_equal(found.label, Y)
    assert found.client is None and found.image.shape == (12, 2)


def test_tables_by_client_whose_cells_are_arrays():
    """As of a whole table: they are the examples."""
    every = pandas.DataFrame({"image": list(X), "label": Y})
    rows, *_ = doors.opened({"p": every[:8], "q": every[8:]})
    np.testing.assert_array_equal(rows.arrays[0], X)
    assert list(rows.arrays[2]) == ["p"] * 8 + ["q"] * 4


def test_tables_of_pixels_by_client():
    """Bytes stay bytes."""
    pixels = pandas.DataFrame(np.arange(24, dtype=np.uint8).reshape(12, 2))
    given = {"p": (pixels[:8], Y[:8]), "q": (pixels[8:][[1, 0]], Y[8:])}
    rows, *_ = doors.opened(given)
    np.testing.assert_array_equal(rows.arrays[0], pixels)
    assert rows.arrays[0].dtype == np.uint8


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([(X[:3], Y[:3])] * 4, "got a list of 4 pairs .x, y., as of clients; give"),
        ([(X[:3], Y[:3])] * 2, "got a list of 2 pairs .x, y., as of clients; give"),
        ({"a": (X[:3], Y[:2])}, r"a: x has the shape \[3, 5, 6, 3\] and y \[2\]; exp"),
        ({**CLIENTS, 5: (X[:3, 0], Y[:3])}, r"5: x .*expected x \[N, 5, 6, 3\] and y"),
        ({"a": [X[:3], Y[:3]]}, r"a: got a list of \[3, 5, 6, 3\] and \[3\]; exp"),
        ({"a": (X[:3], np.eye(4)[:3])}, r"a: got a tuple .* \[3, 4\]; .* y.argmax\(1"),
        ({"a": (FEATURES, Y), "b": TABLE}, "some clients have a table and others arr"),
        ({"a": (FEATURES, Y), "b": (X, Y)}, "some clients have a table and others arr"),
        (
            {"a": (FEATURES, Y), "b": (TABLE[["a"]], Y)},
            "a and b do not both have the columns b; give",
        ),
        (
            {5: (FEATURES, Y), "b": (FEATURES, pandas.Series(Y).sample(frac=1))},
            "b: y has the index of the table in another order; give",
        ),
        ({"a": TABLE.assign(client="b")}, "the column client has other names than the"),
        ({"a": (FEATURES, Y[:3])}, r"a: x has the shape .12, 2. and y .3.; expected x"),
        ({"a": {"train": (X, Y), "x": X}}, "a: got a dict; expected the arrays"),
        ({("h", 1): (X[:3], Y[:3]), ("h", 2): (X[3:], Y[3:])}, "clients are called by"),
        ({"a": (X[:3], Y[:3]), ("h", 2): (X[3:], Y[3:])}, "clients .* got ..h., 2."),
    ],
)
def test_rows_by_client_that_do_not_fit(given, reason):
    """One line, with the client and what was expected."""
    with pytest.raises(ValueError, match=f"^dataset: {reason}") as refused:
        doors.opened(given)
    assert "\n" not in str(refused.value)
