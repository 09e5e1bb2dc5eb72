"""FEMNIST by writer and other JSON of LEAF, good files and bad ones."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from data import leaf, loaders, memory
from launch.assemble import given

WRITERS = {"f0002_1": 5, "f0001_7": 4, "f0003_9": 6}


def characters(dtype=np.uint8):
    """{writer: (x [N, 28, 28], y [N])} of a small FEMNIST."""
    gen = np.random.default_rng(0)
    return {
        name: (
            gen.integers(0, 256, (count, 28, 28)).astype(dtype),
            gen.integers(0, 62, count),
        )
        for name, count in WRITERS.items()
    }


def in_leaf(users, **changed):
    """The JSON of users' rows as LEAF writes it, with bytes as numbers from 0 to 1."""
    held = {
        name: {"x": (x.reshape(len(x), -1) / 255).tolist(), "y": y.tolist()}
        for name, (x, y) in users.items()
    }
    sizes = [len(y) for _, y in users.values()]
    out = {"users": list(users), "num_samples": sizes, "user_data": held}
    return json.dumps(out | changed)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def check(found, users=None):
    """The data set has the rows of `characters`, those of a writer in their order."""
    users = users or characters()
    assert found.image.dtype == np.uint8 and found.label.dtype == np.int32
    assert found.owners == tuple(sorted(users)) and found.num_classes == 62
    assert found.classes[:11] == (*"0123456789A",) and found.classes[-1] == "z"
    for number, name in enumerate(found.owners):
        mine = found.client == number
        np.testing.assert_array_equal(found.image[mine][..., 0], users[name][0])
        np.testing.assert_array_equal(found.label[mine], users[name][1])
    assert found.num_train == len(found.label) == sum(WRITERS.values())


@pytest.mark.parametrize("folder", ["", "all_data", "data/all_data", "femnist", "data"])
def test_femnist_of_all_data(tmp_path, folder):
    """Several files, wherever LEAF's scripts or a user put them."""
    users = list(characters().items())
    for number, part in enumerate((users[:2], users[2:])):
        path = tmp_path / folder / f"all_data_{number}.json"
        write(path, in_leaf(dict(part)))
    found = loaders.load("femnist", str(tmp_path))
    check(found)
    assert found.notes == ()


def test_femnist_of_train_and_test(tmp_path):
    """The rows of a writer in both folders are those of one owner, with a line."""
    parts = {"train": slice(0, 3), "test": slice(3, None)}
    for name, part in parts.items():
        users = {who: (x[part], y[part]) for who, (x, y) in characters().items()}
        write(tmp_path / name / f"all_data_niid_0_{name}_8.json", in_leaf(users))
    write(tmp_path / "all_data" / "all_data_0.json", "not read")
    found = loaders.load("femnist", str(tmp_path))
    # Files are read in the order of their names.
    order = {who: np.r_[3 : len(y), 0:3] for who, (_, y) in characters().items()}
    check(found, {w: (x[order[w]], y[order[w]]) for w, (x, y) in characters().items()})
    assert "--test_split divides" in found.notes[0]


def test_users_without_rows_are_named(tmp_path):
    """They are no clients."""
    some = json.loads(in_leaf(characters()))
    some["users"].append("nobody")
    some["num_samples"].append(0)
    some["user_data"]["nobody"] = {"x": [], "y": []}
    write(tmp_path / "femnist" / "all_data_0.json", json.dumps(some))
    folder = str(tmp_path / "femnist")
    for found in (loaders.load("femnist", str(tmp_path)), leaf.load(folder)):
        assert len(found.owners) == len(WRITERS)
        line = f"1 of {len(WRITERS) + 1} users have no rows and are left out: nobody"
        assert line in found.notes


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ({"x": [[0.5, 1.0]] * 2, "y": [[0, 1], [1, 0]]}, r"y has the shape \[2, 2\]"),
        ({"x": [[True, False]] * 2, "y": [0, 1]}, "numbers, and has bools"),
        ({"x": [[0.5, None]] * 2, "y": [0, 1]}, "numbers, and has nulls"),
        ({"x": ["some", "text"], "y": [0, 1]}, "numbers, and has texts"),
    ],
)
def test_rows_that_are_not_read(rows, line, tmp_path):
    """The line names the file once, and the user; the file need not come again."""
    held = {"users": ["u"], "num_samples": [2], "user_data": {"u": rows}}
    write(tmp_path / "mine.json", json.dumps(held))
    with pytest.raises(ValueError, match=f"mine.json: u: .*{line}") as error:
        leaf.load(str(tmp_path / "mine.json"))
    assert "again" not in str(error.value)


@pytest.mark.parametrize("data_dir", ["", "test"])
def test_femnist_of_one_of_two_folders(tmp_path, data_dir):
    """A line says that rows may be missing."""
    write(tmp_path / "test" / "all_data_0_test_8.json", in_leaf(characters()))
    found = loaders.load("femnist", str(tmp_path / data_dir))
    check(found)
    more = "give the folder that" if data_dir else "there is no file of LEAF in a "
    assert f"all rows are of a folder test; {more}" in found.notes[0]
    (tmp_path / "test" / "all_data_0_test_8.json").rename(
        tmp_path / "test" / "all_data_0.json"
    )
    # The folder that was given may have any name.
    notes = loaders.load("femnist", str(tmp_path / data_dir)).notes
    assert len(notes) == (data_dir == "")


def test_femnist_in_two_places(tmp_path):
    """Rows are taken once."""
    for folder in (tmp_path, tmp_path / "all_data"):
        write(folder / "all_data_0.json", in_leaf(characters()))
    check(loaders.load("femnist", str(tmp_path)))


@pytest.mark.parametrize(
    "text, reason",
    [
        ('"users": ["a", "a"], "num_samples": [2, 1]', "users names 2, 1 of them"),
        ('"users": ["a"], "num_samples": [2, 1]', "num_samples has 2; they must agree"),
        ('"users": ["b"]', "user_data has a, not among users"),
        ('"user_data": {}', "user_data is there twice in one object"),
    ],
)
def test_files_that_contradict_themselves(tmp_path, text, reason):
    """No row is lost without a word, as Python's reader keeps the last of two keys."""
    rows = '{"x": [[0.5, 1], [0.25, 1]], "y": [0, 1]}'
    write(tmp_path / "a.json", f'{{{text}, "user_data": {{"a": {rows}}}}}')
    with pytest.raises(ValueError, match=f"a.json cannot be read: .*{reason}"):
        loaders.load(f"leaf:{tmp_path}", "")


def test_labels_of_several_types_in_a_user(tmp_path):
    """They are not made alike, of images neither."""
    held = {"a": {"x": [[0.5] * 784] * 3, "y": [1, "1", True]}}
    write(tmp_path / "all_data_0.json", in_leaf({}, user_data=held))
    with pytest.raises(ValueError, match="of one type, .* got bool and int and str"):
        loaders.load(f"leaf:{tmp_path}", "")
    with pytest.raises(ValueError, match="a: labels 0 to 61 are expected"):
        loaders.load("femnist", str(tmp_path))


def test_digits_that_float32_does_not_have(tmp_path):
    """A line names the column, for whole numbers too."""
    for first, step in ((1600000001.0, 1), (1600000001, 1), (0.5, 1e-9)):
        held = {"a": {"x": [[first], [first + step]], "y": [0, 1]}}
        write(tmp_path / "a.json", in_leaf({}, user_data=held))
        (line,) = loaders.load(f"leaf:{tmp_path}", "").notes
        assert "different numbers equal in 'x[:, 0]'" in line


def test_names_that_end_in_nul(tmp_path):
    """Refused, since two owners would become one."""
    rows = {"x": [[0.5], [0.25]], "y": [0, 1]}
    held = {"a": rows, "a\0": rows}
    write(tmp_path / "a.json", in_leaf({}, user_data=held))
    with pytest.raises(ValueError, match="which is not valid text; rename it"):
        loaders.load(f"leaf:{tmp_path}", "")


def test_files_beside_those_that_are_read(tmp_path):
    """A line names them, and owners that are in several of them."""
    users = dict(list(characters().items())[:2])
    write(tmp_path / "all_data_0.json", in_leaf(users))
    write(tmp_path / "mine.json", in_leaf(users))
    write(tmp_path / "._mine.json", "of a system")
    for name in (f"leaf:{tmp_path}", "femnist"):
        notes = loaders.load(name, str(tmp_path) if name == "femnist" else "").notes
        assert "files that are not read: mine.json" in notes
    (tmp_path / "mine.json").rename(tmp_path / "all_data_1.json")
    (line,) = loaders.load("femnist", str(tmp_path)).notes
    assert line.startswith("rows of 2 owners are in several files, such as those of ")
    (tmp_path / "data").mkdir()
    (tmp_path / "all_data_1.json").rename(tmp_path / "data" / "all_data_0.json")
    (line,) = loaders.load("femnist", str(tmp_path)).notes
    assert line == "files that are not read: data/all_data_0.json"


def test_users_and_labels_that_differ(tmp_path):
    """A user without rows in the file, and labels of two types, are one line each."""
    one, other = ({name: pair} for name, pair in list(characters().items())[:2])
    whole = json.loads(in_leaf(one)) | {"users": [*one, "gone"]}
    write(tmp_path / "own.json", json.dumps(whole | {"num_samples": [5, 7]}))
    with pytest.raises(ValueError, match="user_data has nothing of gone"):
        loaders.load(f"leaf:{tmp_path}/own.json", "")
    write(tmp_path / "own.json", json.dumps(whole | {"num_samples": [5, 0]}))
    assert len(loaders.load(f"leaf:{tmp_path}/own.json", "").label) == 5
    ((name, (x, y)),) = other.items()
    write(tmp_path / "two.json", in_leaf({name: (x, y.astype(str))}))
    with pytest.raises(ValueError, match="labels of one type, .* got int and str"):
        loaders.load(f"leaf:{tmp_path}", "")


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def table(**changed):
    """The columns of `characters`, as on Hugging Face's hub."""
    rows = [
        (w, *one) for w, pair in characters().items() for one in zip(*pair, strict=True)
    ]
    writer, image, label = zip(*rows, strict=True)
    return {
        "image": [{"bytes": png(one), "path": "a.png"} for one in image],
        "writer_id": list(writer),
        "hsf_id": [0] * len(rows),
        "character": [int(one) for one in label],
    } | changed


def write_parquet(folder, columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), folder / "train-00000-of-00001.parquet")


@pytest.mark.parametrize("folder", ["", "data", "femnist"])
@pytest.mark.parametrize("change", ["", "bytes", "characters"])
def test_femnist_of_parquet(tmp_path, folder, change):
    """Images with their path or as bytes alone, and characters as numbers or texts."""
    columns = table()
    if change == "bytes":
        columns["image"] = [one["bytes"] for one in columns["image"]]
    if change == "characters":
        columns["character"] = [leaf.CHARACTERS[one] for one in columns["character"]]
    write_parquet(tmp_path / folder, columns)
    check(loaders.load("femnist", str(tmp_path)))


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"image": [None] * 15}, "gray images of 28x28 pixels"),
        ({"image": [b"hello"] * 15}, "an image: it is not an image .PNG"),
        ({"image": [png(np.zeros((9, 28), np.uint8))] * 15}, "gray images of 28x28"),
        ({"character": [62] * 15}, "f0002_1: labels 0 to 61 are expected"),
        ({"character": ["?"] * 15}, r"f0002_1: no characters: \?"),
        ({"character": [None] * 15}, "labels 0 to 61 are expected"),
        ({"writer_id": [*"ab", None] * 5}, "a row has no writer_id"),
    ],
)
def test_parquet_of_something_else(tmp_path, changed, reason):
    """One line with the file."""
    write_parquet(tmp_path, table(**changed))
    with pytest.raises(ValueError, match=f"00001.parquet.*: .*{reason}") as error:
        loaders.load("femnist", str(tmp_path))
    assert "\n" not in str(error.value)


def test_parquet_of_train_and_test(tmp_path):
    """In files or in folders, with the line that JSON has."""
    write_parquet(tmp_path / "files", table())
    one = tmp_path / "files" / "train-00000-of-00001.parquet"
    (tmp_path / "files" / "test-00000-of-00001.parquet").write_bytes(one.read_bytes())
    for name in ("train", "test"):
        write_parquet(tmp_path / "folders" / name, table())
    for name in ("files", "folders"):
        found = loaders.load("femnist", str(tmp_path / name))
        assert sum("one table" in one for one in found.notes) == 1
        assert len(found.label) == 2 * len(table()["character"])
        assert f"the rows in the {name} train and test are one" in found.notes[0]


def test_parquet_whose_classes_have_other_names(tmp_path):
    """As the hub writes them: small letters before capitals would be other labels."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = [*leaf.CHARACTERS[:10], *leaf.CHARACTERS[36:], *leaf.CHARACTERS[10:36]]
    for order in (map(str, range(62)), leaf.CHARACTERS, names):
        order = list(order)
        features = {"character": {"names": list(order), "_type": "ClassLabel"}}
        about = {"huggingface": json.dumps({"info": {"features": features}})}
        rows = pyarrow.table(table()).replace_schema_metadata(about)
        parquet.write_table(rows, tmp_path / "a.parquet")
        if order != names:
            check(loaders.load("femnist", str(tmp_path)))
    with pytest.raises(ValueError, match="class 10 of character is called a, A is"):
        loaders.load("femnist", str(tmp_path))


def test_parquet_that_is_damaged(tmp_path, monkeypatch):
    """Cut off, without a column, and without the package."""
    columns = table()
    del columns["writer_id"]
    write_parquet(tmp_path, columns)
    with pytest.raises(ValueError, match="has the columns .*, no writer_id"):
        loaders.load("femnist", str(tmp_path))
    (path,) = tmp_path.glob("*.parquet")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="parquet cannot be read: .*again") as error:
        loaders.load("femnist", str(tmp_path))
    assert "\n" not in str(error.value)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ValueError, match="needs the package pyarrow: pip install"):
        loaders.load("femnist", str(tmp_path))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "it is not JSON|Expecting value"),
        (in_leaf(characters())[:999], "cannot be read"),
        ("[" * 99999, "it is not JSON"),
        (b"\xff\xfe\x00".decode("latin1"), "cannot be read"),
        ("[1]", "it is a list, an object is expected"),
        ("{}", "it has no user_data"),
        (in_leaf({}, user_data={"a": [1]}), "its user_data.a is a list, an object is"),
        (in_leaf({}, user_data={"a": {"x": [[1]]}}), "a: lists x and y of one length"),
        (in_leaf({}, user_data={"a": {"x": [[0.5]], "y": [1, 2]}}), "a: lists x and y"),
        (in_leaf({}, user_data={"a": {"x": [[1], [1, 2]], "y": [1, 2]}}), "differ in"),
        (in_leaf({}, user_data={"a": {"x": ["b.jpg"], "y": [1]}}), "a: x must be numb"),
        (in_leaf({}, user_data={"a": {"x": [1], "y": [1]}}), "a list for each row"),
        (in_leaf({}, user_data={"a": {"x": [[0.5]], "y": [1]}}), "rows of 784 pixels"),
        (
            in_leaf({}, user_data={"a": {"x": [[2.5] * 784], "y": [1]}}),
            "pixels from 0 to 1 are expected",
        ),
        (
            in_leaf({}, user_data={"a": {"x": [[float("nan")] * 784], "y": [1]}}),
            "pixels from 0 to 1 are expected",
        ),
        (
            in_leaf({}, user_data={"a": {"x": [[0.5] * 784], "y": [62]}}),
            "a: labels 0 to 61 are expected",
        ),
        (
            in_leaf({"a": (np.zeros((2, 784)), np.zeros(2, int))}, num_samples=[3]),
            "a: num_samples says 3, there are 2 rows",
        ),
        (in_leaf({}), "have no rows"),
    ],
)
def test_json_of_something_else(tmp_path, text, reason):
    """One line with the file and the owner."""
    write(tmp_path / "all_data_0.json", text)
    with pytest.raises(ValueError, match=f"all_data_0.json.*({reason})") as error:
        loaders.load("femnist", str(tmp_path))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_json_larger_than_the_memory(tmp_path, monkeypatch):
    """Refused by its size."""
    write(tmp_path / "all_data_0.json", in_leaf(characters()))
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(ValueError, match="the texts need 0.0 GiB of memory"):
        loaders.load("femnist", str(tmp_path))


def test_femnist_that_is_not_there(tmp_path):
    """What had this name is named, and where files were looked for."""
    both = "LEAF's FEMNIST by writer there, or take --dataset=emnist/byclass"
    with pytest.raises(ValueError, match=f"json.*parquet without --data_dir.*{both}"):
        loaders.load("femnist", "")
    place = f"in {tmp_path}, {tmp_path}/data or {tmp_path}/femnist; .*{both}"
    with pytest.raises(ValueError, match=place) as error:
        loaders.load("femnist", str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("is_file", [False, True])
def test_features(tmp_path, is_file):
    """Vectors with labels of any names; a file or a folder."""
    gen = np.random.default_rng(0)
    users = {k: (gen.normal(size=(3, 60)), np.array(["b", "a", "b"])) for k in "yx"}
    write(tmp_path / "mytest.json", in_leaf(users))
    found = loaders.load(f"leaf:{tmp_path}{'/mytest.json' * is_file}", "")
    assert found.image.shape == (6, 60) and found.image.dtype == np.float32
    assert (found.classes, found.owners) == (("a", "b"), ("x", "y"))
    np.testing.assert_array_equal(found.client, [1, 1, 1, 0, 0, 0])
    np.testing.assert_allclose(found.image[:3], users["y"][0] / 255, rtol=1e-6)


@pytest.mark.parametrize(
    "layout, shape",
    [
        ("auto", (9, 48)),
        ("nhwc", (9, 4, 4, 3)),
        ("nchw", (9, 4, 4, 3)),
        ("nhw", "--layout=nhw: rows of 48 numbers are not square images of 1 channel;"),
    ],
)
def test_flat_images(tmp_path, layout, shape):
    """They are vectors unless --layout says what they are."""
    x = np.arange(9 * 48).reshape(9, 48) % 255
    write(tmp_path / "a.json", in_leaf({"a": (x, np.arange(9) % 3)}))
    if isinstance(shape, str):
        with pytest.raises(ValueError, match=shape):
            loaders.load(f"leaf:{tmp_path}", "", layout=layout)
        return
    found = loaders.load(f"leaf:{tmp_path}", "", layout=layout)
    assert found.image.shape == shape
    wanted = x.reshape(9, 3, 4, 4).transpose(0, 2, 3, 1) if layout == "nchw" else x
    np.testing.assert_allclose(found.image, wanted.reshape(shape) / 255, rtol=1e-6)


def test_flat_squares_and_nested_images(tmp_path):
    """A line says how a square is taken; whole numbers 0 to 255 are bytes."""
    x = np.arange(8 * 25).reshape(8, 25) % 255
    write(tmp_path / "a.json", in_leaf({"a": (x, np.arange(8) % 2)}))
    found = loaders.load(f"leaf:{tmp_path}", "")
    assert "--layout=nhw if these are gray images of 5x5" in found.notes[0]
    found = loaders.load(f"leaf:{tmp_path}", "", layout="nhw")
    assert found.image.shape == (8, 5, 5, 1)
    held = {"a": {"x": x.reshape(8, 5, 5).tolist(), "y": [0, 1] * 4}}
    write(tmp_path / "a.json", in_leaf({}, user_data=held))
    found = loaders.load(f"leaf:{tmp_path}", "")
    assert found.image.dtype == np.uint8 and found.image.shape == (8, 5, 5, 1)
    np.testing.assert_array_equal(found.image.ravel(), x.ravel())


def test_leaf_that_is_not_there(tmp_path):
    """No file, and users whose rows differ."""
    for path in (tmp_path, tmp_path / "a.json", tmp_path / "b.txt"):
        with pytest.raises(ValueError, match="leaf:.*: there is no JSON of LEAF"):
            loaders.load(f"leaf:{path}", "")
    held = {k: {"x": [[0.5] * (n + 2)], "y": [n]} for n, k in enumerate("ab")}
    write(tmp_path / "a.json", in_leaf({}, user_data=held))
    with pytest.raises(ValueError, match=r"rows of a are \[2\] and of b \[3\]"):
        loaders.load(f"leaf:{tmp_path}", "")


@pytest.mark.parametrize(
    "options, partition",
    [
        ({"algo": "fedavg"}, "natural"),
        ({"algo": "fedavg", "partition": "iid", "num_clients": 3}, "iid"),
        ({"algo": "fedper", "preset": "pfllib"}, "natural"),
        # This paper has FEMNIST, with clients of its own.
        ({"algo": "fedper", "num_clients": 3}, "client_dirichlet"),
    ],
)
def test_writers_are_clients(tmp_path, options, partition):
    """By default, unless a preset's paper has other clients of these data."""
    write(tmp_path / "all_data_0.json", in_leaf(characters()))
    made = given.settled(**options, dataset="femnist", data_dir=str(tmp_path)).config
    assert (made.partition, made.num_clients) == (partition, 3)


def test_pixels_are_rounded():
    """Also where a file has few decimals: 255 x 0.0039 is a 1."""
    wanted = np.resize(np.arange(256), (1, 784))
    found = leaf._pixels(np.round(wanted / 255, 4))
    assert (found.reshape(1, 784) == wanted).all()
