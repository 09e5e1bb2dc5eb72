"""Parquet files: the hub's images, tables, and what does not fit, in one line."""

import io

import numpy as np
import pytest
from PIL import Image

from data import loaders

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
            "train.parquet cannot be read: an img is damaged, or",
        ),
        ({"img": [b"hello", None] * 2}, "train.parquet cannot be read: an img is dam"),
        ({"img": [{"bytes": None}] * 4}, "train.parquet cannot be read: an img has no"),
        ({"label": None}, "columns img, other, and none is called label or fine_label"),
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
        ({"x": [[1.0, None]] * 2, "y": [0, 1]}, "x has lists of double, numbers are"),
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
