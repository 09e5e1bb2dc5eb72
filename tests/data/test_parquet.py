"""Parquet files: the hub's images, tables, and what does not fit, in one line."""

import io
import json

import numpy as np
import pandas
import pytest
from PIL import Image

from data import loaders, memory

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

GEN = np.random.default_rng(0)


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path, row_group_size=7)


def hub(pixels):
    """A column of images as the hub has it."""
    return [{"bytes": png(one), "path": None} for one in pixels]


def images(count, *shape):
    return GEN.integers(0, 256, (count, *shape), np.uint8)


def test_cifar100_of_the_hub(tmp_path):
    """Files of a split are joined in their order; coarse labels are another column."""
    parts = [images(9, 32, 32, 3), images(5, 32, 32, 3), images(4, 32, 32, 3)]
    fine = [np.arange(9) * 11, np.arange(5) + 50, np.arange(4) * 3]
    names = "train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"
    for name, pixels, label in zip(names, parts, fine, strict=True):
        path = tmp_path / "cifar100" / f"{name}.parquet"
        write(path, img=hub(pixels), fine_label=label, coarse_label=label % 20)
    found = loaders.load("cifar100", str(tmp_path))
    np.testing.assert_array_equal(found.image, np.concatenate(parts))
    np.testing.assert_array_equal(found.label, np.concatenate(fine))
    assert found.num_train == 14 and found.num_classes == 100
    assert "14 train and 4 test rows here" in found.notes[-1]
    coarse = loaders.load("cifar100", str(tmp_path), labels="coarse")
    np.testing.assert_array_equal(coarse.label, np.concatenate(fine) % 20)


@pytest.mark.parametrize(
    "name, inner, column, shape",
    [
        ("mnist", "mnist/{}-00000-of-00001", "image", (28, 28)),
        ("fashion_mnist", "fashion_mnist/{}-00000-of-00001", "image", (28, 28)),
        ("cifar10", "cifar10/plain_text/{}/0000", "img", (32, 32, 3)),
        ("svhn_cropped", "cropped_digits/{}-00000-of-00001", "image", (32, 32, 3)),
    ],
)
def test_folders_of_the_hub(tmp_path, name, inner, column, shape):
    """As they are downloaded, with a split in the name of the file or of its folder."""
    pixels, label = images(20, *shape), np.arange(20) % 10
    for part, rows in (("train", slice(0, 15)), ("test", slice(15, 20))):
        path = tmp_path / f"{inner.format(part)}.parquet"
        write(path, **{column: hub(pixels[rows]), "label": label[rows]})
    for folder in (tmp_path, path.parents[0 if part in path.name else 1]):
        found = loaders.load(name, str(folder))
        np.testing.assert_array_equal(found.image, pixels.reshape(20, *shape[:2], -1))
        np.testing.assert_array_equal(found.label, label)
        assert found.num_train == 15 and found.num_classes == 10


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"img": hub(images(4, 30, 32, 3))}, r"uint8 \[N, 32, 32, 3\] and N labels"),
        ({"label": [0, 1, 2, 10]}, "labels 0 to 9, got .*, 0 to 10$"),
        (
            {"img": [b"hello"] * 4},
            "train.parquet cannot be read: an img: it is not an",
        ),
        (
            {"img": [b"hello", None] * 2},
            "train.parquet cannot be read: an img: it has no by",
        ),
        (
            {"img": [{"bytes": None}] * 4},
            "train.parquet cannot be read: an img: it has no",
        ),
        ({"label": None}, "the columns img, other, and none is called label; give"),
    ],
)
def test_another_data_set(tmp_path, change, reason):
    """One line with the file."""
    good = {"img": hub(images(4, 32, 32, 3)), "label": [0, 1, 2, 3]}
    odd = {k: v for k, v in (good | change | {"other": [1] * 4}).items() if v}
    write(tmp_path / "train.parquet", **odd)
    write(tmp_path / "test.parquet", **good)
    with pytest.raises(ValueError, match=reason) as error:
        loaders.load("cifar10", str(tmp_path))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_own_images_of_splits(tmp_path):
    """Train, test and validation rows, gray images beside colours, owners by name."""
    owner = ["ann", "bob"] * 8
    pixels = [*images(8, 6, 5), *images(8, 6, 5, 3)]
    label = ["cat", "dog", "dog", "cat"] * 4
    for name, rows in (
        ("train", slice(0, 12)),
        ("val", slice(12, 14)),
        ("test", slice(14, 16)),
    ):
        columns = {"photo": hub(pixels[rows]), "kind": label[rows], "who": owner[rows]}
        write(
            tmp_path / "data" / f"{name}-0.parquet",
            **columns,
            number=[1] * len(owner[rows]),
        )
    write(tmp_path / "data" / "extra-0.parquet", photo=hub(pixels[:1]))
    name = f"parquet:{tmp_path}"
    found = loaders.load(name, "", label="kind", owner="who")
    wide = [
        one if one.ndim == 3 else np.repeat(one[..., None], 3, -1) for one in pixels
    ]
    order = [*range(12), 14, 15, 12, 13]
    np.testing.assert_array_equal(found.image, np.stack(wide)[order])
    assert [found.classes[one] for one in found.label] == [label[one] for one in order]
    assert [found.owners[one] for one in found.client] == [owner[one] for one in order]
    assert (found.num_train, found.num_test, found.num_val) == (12, 2, 2)
    lines = "\n".join(found.notes)
    assert "not read: extra-0.parquet" in lines and "not used: number" in lines
    assert "label: kind; owners: who; x: photo" in lines


def test_split_without_train(tmp_path):
    """One table, which a line says."""
    write(tmp_path / "test-0.parquet", a=[1.0, 2.0], y=[0, 1])
    write(tmp_path / "more.parquet", a=[3.0, 4.0], y=[0, 1])
    found = loaders.load(f"parquet:{tmp_path}", "")
    assert found.image[:, 0].tolist() == [3, 4, 1, 2] and not found.num_test
    assert found.notes[0].endswith("all are one table, also test-0.parquet")


def test_own_table(tmp_path):
    """As the same table in CSV."""
    columns = {
        "a": GEN.normal(size=20),
        "b": np.arange(20) % 7,
        "site": ["x", "y"] * 10,
    }
    columns["label"] = ["p", "p", "q", "q"] * 5
    write(tmp_path / "own.parquet", **columns)
    pyarrow.table(columns).to_pandas().to_csv(tmp_path / "own.csv", index=False)
    one, other = (
        loaders.load(f"{kind}:{tmp_path}/own.{kind}", "", owner="site")
        for kind in ("parquet", "csv")
    )
    for first, second in zip(one, other, strict=True):
        np.testing.assert_array_equal(first, second)
    assert one.owners == ("x", "y") and one.columns == ("a", "b")


def test_bools_of_which_one_is_missing(tmp_path):
    """The batch that has it is of objects, and the others are of bools."""
    values = [True, False] * 600
    write(tmp_path / "d.parquet", b=[*values[:-1], None], label=[0, 1] * 600)
    with pytest.raises(ValueError, match="values are missing, of which b has 1"):
        loaders.load(f"parquet:{tmp_path}/d.parquet", "")


@pytest.mark.parametrize("kind", ["list", "fixed"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_lists_of_numbers(tmp_path, kind, dtype):
    """Lists of lists are images, of the type of their numbers."""
    x = GEN.integers(0, 256, (9, 5, 4)).astype(dtype)
    of_one = pyarrow.list_(
        pyarrow.from_numpy_dtype(dtype), 4 if kind == "fixed" else -1
    )
    of_all = pyarrow.list_(of_one, 5 if kind == "fixed" else -1)
    write(
        tmp_path / "own.parquet", x=pyarrow.array(x.tolist(), of_all), y=[0, 1, 2] * 3
    )
    found = loaders.load(f"parquet:{tmp_path}/own.parquet", "")
    np.testing.assert_array_equal(found.image, x[..., None])
    assert found.image.dtype == dtype and "gray images" in found.notes[1]
    series = loaders.load(f"parquet:{tmp_path}/own.parquet", "", layout="ntc")
    np.testing.assert_array_equal(series.image, x)


@pytest.mark.parametrize(
    "columns, reason",
    [
        ({"x": [[1, 2], [3]], "y": [0, 1]}, "the lists of x differ in length"),
        ({"x": [["a"], ["b"]], "y": [0, 1]}, "x has lists of string, numbers are"),
        ({"x": [[1.0, None]] * 2, "y": [0, 1]}, "x has lists in which values are"),
        ({"x": [[1.0, 2.0]] * 2}, "no column is known to hold the labels"),
        ({"image": [png(images(1, 4, 4)[0]), png(images(1, 5, 4)[0])]}, "image differ"),
        ({"i": [png(images(1, 4, 4)[0]), png(images(1, 5, 4, 3)[0])]}, "of i differ"),
        ({"a": pyarrow.array([], "f8"), "y": pyarrow.array([], "i8")}, "has no rows"),
    ],
)
def test_columns_that_do_not_fit(tmp_path, columns, reason):
    """One line with the path."""
    path = tmp_path / "own.parquet"
    write(path, **columns)
    with pytest.raises(ValueError, match=reason) as error:
        loaders.load(f"parquet:{path}", "")
    line = str(error.value)
    assert line.startswith(f"--dataset=parquet:{path}: ") and "\n" not in line


@pytest.mark.parametrize(
    "names, train, test, line",
    [
        # Names of other splits, as train_val is one of the hub's
        ("train-0 train_val-0 val-0", "train-0", "", "not read: train_val-0.parquet"),
        ("train-0 train-clean-1 test", "train-0", "test", "read: train-clean-1.par"),
        # A folder's name comes first.
        ("train/a test/train-sites", "train/a", "test/train-sites", ""),
        ("train/0 test/0 extra/0", "train/0", "test/0", "not read: extra/0.parquet"),
        (
            "part-0 test/part-0",
            "part-0 test/part-0",
            "",
            "one table, also test/part-0.p",
        ),
        (
            "test/0 val/0",
            "test/0 val/0",
            "",
            "one table, also test/0.parquet, val/0.pa",
        ),
        ("a b extra/0", "a b", "", "in other folders that are not read: extra/0.pa"),
        ("data/train-0 data/test-0", "data/train-0", "data/test-0", ""),
    ],
)
def test_which_files_train(tmp_path, names, train, test, line):
    """By the names of files and folders; a line names the others."""
    root = tmp_path / "test_2024"  # the name of the whole folder says nothing
    values = {name: float(number) for number, name in enumerate(names.split())}
    for name, value in values.items():
        write(root / f"{name}.parquet", a=[value, value + 0.5], y=[0, 1])
    found = loaders.load(f"parquet:{root}", "")
    first = found.image[:, 0].tolist()
    assert {int(one) for one in first[: found.num_train]} == {
        values[name] for name in train.split()
    }
    place = slice(found.num_train, found.num_train + found.num_test)
    assert {int(one) for one in first[place]} == {values[name] for name in test.split()}
    assert line in found.notes[0] if line else found.notes[0].startswith("label: y")


@pytest.mark.parametrize(
    "names, reason",
    [
        (["train-00000-of-00002"], "train-00001-of-00002 is missing; put it there"),
        (
            ["train-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"],
            "train-... is there in 1 files and 2 files; keep those of one",
        ),
        (["a_train", "a_test"], "its files look like splits .a_test, a_train.; call "),
        (["train", "train/0"], "train.parquet and the folder train are both of train"),
        (["data/en/0000"], "it holds no parquet files; give their folder"),
        (["default/partial-train/0000"], "it holds no parquet files; give their fold"),
    ],
)
def test_files_that_are_missing_or_twice(tmp_path, names, reason):
    """One line, before anything is read."""
    for name in names:
        write(tmp_path / f"{name}.parquet", a=[1.0, 2.0], y=[0, 1])
    with pytest.raises(ValueError, match=reason) as error:
        loaders.load(f"parquet:{tmp_path}", "")
    assert "\n" not in str(error.value)


def test_a_saved_index_is_no_feature(tmp_path):
    """That of pandas, with a name or without, and what is left of one."""
    frame = pandas.DataFrame({"a": GEN.normal(size=6), "y": [0, 1, 2] * 2})
    frame.sample(frac=1, random_state=0).to_parquet(tmp_path / "plain.parquet")
    frame.rename_axis("row").sample(frac=1).to_parquet(tmp_path / "named.parquet")
    for name in ("plain", "named"):
        found = loaders.load(f"parquet:{tmp_path}/{name}.parquet", "")
        assert found.columns == ("a",)
        assert ("the index row of the table is not" in found.notes[0]) == (
            name != "plain"
        )
    frame.rename(columns={"a": "Unnamed: 0"}).to_parquet(tmp_path / "left.parquet")
    with pytest.raises(ValueError, match="left.parquet: a column has no name, as of a"):
        loaders.load(f"parquet:{tmp_path}/left.parquet", "")


def test_two_columns_of_one_name(tmp_path):
    """Either could be the label."""
    table = pyarrow.Table.from_arrays(
        [pyarrow.array([1.0, 2.0]), pyarrow.array([0, 1]), pyarrow.array([1, 0])],
        names=["a", "y", "y"],
    )
    parquet.write_table(table, tmp_path / "own.parquet")
    with pytest.raises(ValueError, match="own.parquet: several columns are named y"):
        loaders.load(f"parquet:{tmp_path}/own.parquet", "")


def test_another_data_set_of_the_hub(tmp_path):
    """By the column of the labels, and by the names that the hub gives classes."""
    pixels, label = hub(images(10, 32, 32, 3)), np.arange(10)
    for part in ("train", "test"):
        write(tmp_path / f"{part}.parquet", img=pixels, label=label)
    assert loaders.load("cifar10", str(tmp_path)).num_train == 10
    with pytest.raises(ValueError, match="img, label, and none is called fine_label"):
        loaders.load("cifar100", str(tmp_path))
    names = {"label": {"names": ["T-shirt", "Trouser"], "_type": "ClassLabel"}}
    about = {b"huggingface": json.dumps({"info": {"features": names}})}
    table = pyarrow.table({"image": hub(images(10, 28, 28)), "label": label})
    for part in ("train", "test"):
        path = tmp_path / "fashion" / f"{part}.parquet"
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(table.replace_schema_metadata(about), path)
    assert loaders.load("fashion_mnist", str(path.parent)).num_train == 10
    with pytest.raises(
        ValueError, match="another data set, .* called T-shirt, Trouser"
    ):
        loaders.load("mnist", str(path.parent))


def test_own_data_set_comes_first_in_a_folder_of_several(tmp_path):
    """The folder of its name, whatever lies beside it."""
    for place, value in (("", 1), ("cifar10/", 2)):
        for part in ("train", "test"):
            pixels = hub(np.full((10, 32, 32, 3), value, np.uint8))
            path = tmp_path / f"{place}{part}.parquet"
            write(path, img=pixels, label=np.arange(10))
    assert loaders.load("cifar10", str(tmp_path)).image.max() == 2


def test_images_have_their_layout(tmp_path):
    """They are decoded with channels last, also where 3 rows look like channels."""
    pixels = images(4, 3, 8, 3)
    write(tmp_path / "own.parquet", image=hub(pixels), label=[0, 1, 0, 1])
    found = loaders.load(f"parquet:{tmp_path}/own.parquet", "")
    np.testing.assert_array_equal(found.image, pixels)
    assert "NHWC" not in "".join(found.notes)
    with pytest.raises(
        ValueError, match="layout=nchw is of arrays, and these are files"
    ):
        loaders.load(f"parquet:{tmp_path}/own.parquet", "", layout="nchw")


def test_gray_and_colours_in_different_splits(tmp_path):
    """Gray ones become RGB."""
    gray, colours = images(4, 5, 6), images(4, 5, 6, 3)
    write(tmp_path / "train.parquet", image=hub(colours), label=[0, 1, 0, 1])
    write(tmp_path / "test.parquet", image=hub(gray), label=[0, 1, 0, 1])
    found = loaders.load(f"parquet:{tmp_path}", "")
    np.testing.assert_array_equal(found.image[4:], np.repeat(gray[..., None], 3, -1))


def test_large_images(tmp_path, monkeypatch):
    """By their headers, before any pixels are read."""
    path = tmp_path / "own.parquet"
    write(path, image=hub([np.zeros((2, 5000), np.uint8)]), label=[0])
    with pytest.raises(
        ValueError, match="1 images of 5000x2 pixels, at most 4096x4096"
    ):
        loaders.load(f"parquet:{path}", "")
    write(path, image=hub(images(8, 900, 1000)), label=[0, 1] * 4)
    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000_000)
    with pytest.raises(ValueError, match="8 images of 1000x900 pixels need 0.0 GiB of"):
        loaders.load(f"parquet:{path}", "")


@pytest.mark.parametrize(
    "kind", ["binary", "large_binary", "binary_view", "dictionary"]
)
def test_types_of_images(tmp_path, kind):
    """Bytes alone, in each type; further columns of lists and bytes are not read."""
    pixels, label = images(4, 5, 6, 3), [0, 1, 1, 0]
    column = pyarrow.array([png(one) for one in pixels], "binary")
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    table = {"image": column, "label": label, "client": [b"ann", b"bob"] * 2}
    more = {"captions": [["a"], ["b", "c"], [], ["d"]], "md5": [b"1", b"2", b"3", b"4"]}
    write(tmp_path / "own.parquet", **table, **more)
    found = loaders.load(f"parquet:{tmp_path}/own.parquet", "")
    np.testing.assert_array_equal(found.image, pixels)
    assert found.owners == ("ann", "bob")
    assert "lists or bytes that are not used: captions, md5" in found.notes[0]


def test_tensors_have_a_shape(tmp_path):
    """Those of Arrow."""
    x = GEN.normal(size=(6, 5, 4)).astype(np.float32)
    column = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(x)
    write(tmp_path / "own.parquet", x=column, y=[0, 1, 2] * 2)
    found = loaders.load(f"parquet:{tmp_path}/own.parquet", "")
    np.testing.assert_array_equal(found.image, x[..., None])


def test_public_images_need_no_labels(tmp_path):
    """Nobody reads them."""
    pixels = images(4, 5, 6, 3)
    write(tmp_path / "own.parquet", image=hub(pixels), kind=list("abcd"))
    found = loaders.load(f"parquet:{tmp_path}/own.parquet", "", "public_set")
    np.testing.assert_array_equal(found.image, pixels)


def test_files_that_do_not_fit(tmp_path):
    """No file, another folder, two kinds, and a damaged one."""
    with pytest.raises(
        ValueError, match="none.parquet cannot be read: there is no such"
    ):
        loaders.load(f"parquet:{tmp_path}/none.parquet", "")
    with pytest.raises(ValueError, match="holds no parquet files; give their folder"):
        loaders.load(f"parquet:{tmp_path}", "")
    write(tmp_path / "one/train.parquet", a=[1.0, 2.0], y=[0, 1])
    write(tmp_path / "two/train.parquet", b=[1.0, 2.0], y=[0, 1])
    with pytest.raises(ValueError, match="in its folders one, two, of which give one"):
        loaders.load(f"parquet:{tmp_path}", "")
    write(tmp_path / "one/train-2.parquet", a=[1, 2], y=["0", "1"])
    with pytest.raises(ValueError, match="y is of int64 and object; give files of one"):
        loaders.load(f"parquet:{tmp_path}/one", "")
    write(tmp_path / "one/train-2.parquet", b=[1.0, 2.0], y=[0, 1])
    with pytest.raises(ValueError, match="columns a, y and .* b, y; give files of one"):
        loaders.load(f"parquet:{tmp_path}/one", "")
    path = tmp_path / "two/train.parquet"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="cannot be read: .*; fetch it again") as error:
        loaders.load(f"parquet:{path}", "")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=f"none of ours; give parquet:{path}"):
        loaders.load(str(path), "")
    with pytest.raises(ValueError, match=f"none of ours; give parquet:{path.parent}"):
        loaders.load(str(path.parent), "")
