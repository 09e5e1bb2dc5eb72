"""Loaders: files as they should be, files as they should not be, normalization."""

import gzip
import io
import os
import pickle
import struct
import sys
import types
import zipfile

import numpy as np
import pytest

from data import dataset, loaders, memory


def write_idx(path, array, magic=None):
    """Writes uint8 `array` as an IDX file; gzipped if the name says so."""
    header = magic or b"\x00\x00\x08" + bytes([array.ndim])
    raw = header + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    if path.suffix == ".gz":
        raw = gzip.compress(raw)
    path.write_bytes(raw)


def write_mnist(folder, suffix="", num_train=12, num_test=5):
    """Writes the four files of a tiny MNIST; returns images and labels."""
    gen = np.random.default_rng(1)
    out = []
    for (image_name, label_name), count in zip(
        loaders.IDX_FILES, (num_train, num_test), strict=True
    ):
        image = gen.integers(0, 256, (count, 6, 7), np.uint8)
        label = gen.integers(0, 10, count).astype(np.uint8)
        write_idx(folder / (image_name + suffix), image)
        write_idx(folder / (label_name + suffix), label)
        out.append((image, label))
    return out


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_round_trip(tmp_path, name, suffix):
    """Four files, plain or gzipped: the same pixels, official test rows last."""
    written = write_mnist(tmp_path, suffix)
    got = loaders.load(name, str(tmp_path))
    assert got.image.dtype == np.uint8 and got.label.dtype == np.int32
    np.testing.assert_array_equal(
        got.image, np.concatenate([image for image, _ in written])[..., None]
    )
    np.testing.assert_array_equal(
        got.label, np.concatenate([label for _, label in written])
    )
    assert (got.num_train, got.num_classes, got.client) == (12, 10, None)


def test_fewer_rows_than_the_official_files_are_named(tmp_path, monkeypatch):
    """Those of an archive that was cut between two rows."""
    write_mnist(tmp_path, "")
    (line,) = loaders.load("mnist", str(tmp_path)).notes
    assert line.startswith("mnist has 12 train and 5 test rows here, and 60,000 train")
    monkeypatch.setitem(loaders.ROWS, "mnist", (12, 5))
    assert loaders.load("mnist", str(tmp_path)).notes == ()


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_images_of_the_data_set_with_the_same_files(tmp_path, monkeypatch, name):
    """MNIST's files have the names of Fashion-MNIST's; a run says whose they are."""
    monkeypatch.setitem(loaders.ROWS, name, (4, 4))
    for mean, is_other in ((33, name != "mnist"), (73, name == "mnist")):
        for image_name, label_name in loaders.IDX_FILES:
            write_idx(tmp_path / image_name, np.full((4, 28, 28), mean, np.uint8))
            write_idx(tmp_path / label_name, np.arange(4, dtype=np.uint8))
        said = loaders.load(name, str(tmp_path)).notes
        assert len(said) == is_other
        assert all(f"mean pixel of {'fashion_' * (mean == 73)}mnist" in n for n in said)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("mnist", "mnist"), ("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST/raw")],
)
def test_idx_in_a_folder_of_the_data_set(tmp_path, name, folder):
    """--data_dir may also be the parent folder, and that of torchvision."""
    (tmp_path / folder).mkdir(parents=True)
    write_mnist(tmp_path / folder, ".gz")
    assert len(loaders.load(name, str(tmp_path)).label) == 17


def test_a_data_dir_without_its_files_is_named(tmp_path, monkeypatch):
    """Where Debian's files are read in their place."""
    (tmp_path / "debian").mkdir()
    write_mnist(tmp_path / "debian", ".gz")
    monkeypatch.setattr(loaders, "DEBIAN_FASHION", tmp_path / "debian")
    monkeypatch.setitem(loaders.ROWS, "fashion_mnist", (12, 5))
    (line,) = loaders.load("fashion_mnist", str(tmp_path / "none")).notes
    assert line.endswith(f"as --data_dir={tmp_path}/none has no IDX files of it")
    for folder in ("", str(tmp_path / "debian")):
        assert loaders.load("fashion_mnist", folder).notes == ()


def test_idx_beside_folders_of_their_names(tmp_path):
    """As some programs unpack each file into a folder."""
    write_mnist(tmp_path, ".gz")
    for name in sum(loaders.IDX_FILES, ()):
        (tmp_path / name).mkdir()
    assert len(loaders.load("mnist", str(tmp_path)).label) == 17


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_three_of_four_idx_files(tmp_path, monkeypatch, name):
    """The missing one is named, also where Debian's copy is taken."""
    monkeypatch.setattr(loaders, "DEBIAN_FASHION", tmp_path / "debian")
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    words = f"{tmp_path} has no t10k-labels-idx1-ubyte"
    with pytest.raises(ValueError, match=f"--dataset={name}: {words}; fetch it"):
        loaders.load(name, str(tmp_path))
    (tmp_path / "debian").mkdir()
    write_mnist(tmp_path / "debian")
    monkeypatch.setitem(loaders.ROWS, "fashion_mnist", (12, 5))
    if name == "fashion_mnist":
        (line,) = loaders.load(name, str(tmp_path)).notes
        assert line.endswith(f"debian, as {words}")


def test_idx_with_the_names_of_kaggle(tmp_path):
    """`train-images.idx3-ubyte`, with a dot."""
    write_mnist(tmp_path)
    for name in sum(loaders.IDX_FILES, ()):
        (tmp_path / name).rename(tmp_path / name.replace("-idx", ".idx"))
    assert len(loaders.load("mnist", str(tmp_path)).label) == 17


def test_data_dir_of_a_user(tmp_path, monkeypatch):
    """A shell leaves the ~ of --data_dir=~ as it is. A file is no folder."""
    write_mnist(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(loaders.load("mnist", "~").label) == 17
    path = tmp_path / loaders.IDX_FILES[0][0]
    with pytest.raises(ValueError, match=f"--data_dir={path} is a file; give its"):
        loaders.load("mnist", str(path))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("keep", [3, 10, 16, 100, -1])
def test_truncated_idx_is_named(tmp_path, suffix, keep):
    """Cut anywhere: one line with the file's name, and what is missing."""
    write_mnist(tmp_path, suffix)
    path = tmp_path / ("train-images-idx3-ubyte" + suffix)
    path.write_bytes(path.read_bytes()[:keep])
    is_whole = keep == -1 and not suffix
    words = "cannot reshape array of size 503" if is_whole else "train-images-idx3"
    with pytest.raises(ValueError, match=words) as error:
        loaders.load("mnist", str(tmp_path))
    assert "\n" not in str(error.value)


def test_damaged_gzip_is_named(tmp_path):
    """A gz file whose compressed stream is garbage."""
    write_mnist(tmp_path, ".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    raw = bytearray(path.read_bytes())
    raw[10:60] = b"\xff" * 50
    path.write_bytes(bytes(raw))
    with pytest.raises(ValueError, match="train-images-idx3-ubyte.gz"):
        loaders.load("mnist", str(tmp_path))


TRAIN, TEST = "train-images-idx3-ubyte", "t10k-images-idx3-ubyte"
LABELS = "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    "name, array, magic, words",
    [
        # Another element type, or no IDX file at all.
        *(
            (
                TRAIN,
                np.zeros((12, 6, 7)),
                magic,
                f"{TRAIN} cannot be read: it is not an IDX file",
            )
            for magic in (b"\0\0\x0d\3", b"\1\0\x08\3", b"\x1f\x8b\x08\0", b"junk")
        ),
        # MNIST has ten classes.
        (LABELS, np.full(12, 77), None, LABELS),
        # Two data sets mixed in one folder.
        (TEST, np.zeros((5, 9, 9)), None, TEST),
        (
            LABELS,
            np.zeros(11),
            None,
            f"{TRAIN} and {LABELS} .* .12, 6, 7, 1. .* uint8 .11.",
        ),
        (TRAIN, np.zeros((12, 6, 0)), None, f"{TRAIN} and .*, got uint8 .12, 6, 0, 1."),
    ],
)
def test_idx_of_something_else(tmp_path, name, array, magic, words):
    """One line that names the file."""
    write_mnist(tmp_path)
    write_idx(tmp_path / name, array.astype(np.uint8), magic)
    with pytest.raises(ValueError, match=words):
        loaders.load("mnist", str(tmp_path))


def test_labels_in_the_place_of_images_are_refused(tmp_path):
    """An IDX file of one dimension is no file of images."""
    write_mnist(tmp_path)
    for name, count in ((TRAIN, 12), (TEST, 5)):
        write_idx(tmp_path / name, np.zeros(count, np.uint8))
    with pytest.raises(ValueError, match=TRAIN):
        loaders.load("mnist", str(tmp_path))


def save(tmp_path, **arrays):
    """Writes an npz file and returns its `--dataset`."""
    np.savez(tmp_path / "own.npz", **arrays)
    return f"npz:{tmp_path / 'own.npz'}"


X = np.arange(6 * 4, dtype=np.uint8).reshape(6, 4)
Y = np.array([0, 2, 1, 0, 2, 2])


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 2, 1)])
def test_npz(tmp_path, dtype, shape):
    """Images or vectors, bytes or floats; owners are numbered 0, 1, ..."""
    x = X.astype(dtype).reshape(shape)
    name = save(tmp_path, x=x, y=Y, client=np.array([70, 5, 5, 9, 70, 9]))
    got = loaders.load(name, "")
    np.testing.assert_array_equal(got.image, x)
    assert got.image.dtype == (np.uint8 if dtype == np.uint8 else np.float32)
    np.testing.assert_array_equal(got.label, Y)
    np.testing.assert_array_equal(got.client, [2, 0, 0, 1, 2, 1])
    assert (got.num_train, got.num_classes) == (6, 3)


def test_npz_without_owners(tmp_path):
    """`client` is optional."""
    assert loaders.load(save(tmp_path, x=X, y=Y), "").client is None


def test_npz_with_other_arrays(tmp_path):
    """A line names what is not used."""
    np.savez(tmp_path / "own.npz", x=X, y=Y, owner=Y, x_dev=X)
    found = loaders.load(f"npz:{tmp_path}/own.npz", "")
    assert found.notes[-1] == (
        "arrays of the file that are not used: owner, x_dev; owners of rows are in an "
        "array called client"
    )
    np.savez(tmp_path / "own.npz", x=X, y=Y, client=Y)
    assert "not used" not in "".join(loaders.load(f"npz:{tmp_path}/own.npz", "").notes)


def test_npz_with_a_split(tmp_path):
    """Official test rows of nobody, and validation rows of owners."""
    held = {"x": X, "y": Y, "client": Y, "x_test": X[:2], "y_test": Y[:2]}
    held |= {"x_val": X[3:], "y_val": Y[3:], "client_val": Y[3:]}
    found = loaders.load(save(tmp_path, **held), "")
    assert (found.num_train, found.num_test, found.num_val) == (6, 2, 3)
    np.testing.assert_array_equal(found.image[-3:], X[3:])
    np.testing.assert_array_equal(found.client, [*Y, -1, -1, *Y[3:]])


MEDMNIST = {f"{part}_images": X for part in ("train", "val", "test")}
MEDMNIST |= {f"{part}_labels": Y[:, None] for part in ("train", "val", "test")}


@pytest.mark.parametrize(
    "held, num_val",
    [
        ({"x_train": X, "y_train": Y, "x_test": X, "y_test": Y}, 0),  # Keras
        (MEDMNIST, 6),
        ({"x": X, "y": Y[:, None], "x_test": X, "y_test": Y}, 0),
    ],
)
def test_npz_with_the_names_of_others(tmp_path, held, num_val):
    """The arrays of files that Keras and MedMNIST leave; labels may be a column."""
    found = loaders.load(save(tmp_path, **held), "")
    assert (found.num_train, found.num_test, found.num_val) == (6, 6, num_val)
    np.testing.assert_array_equal(found.image[-6:], X)
    np.testing.assert_array_equal(found.label[-6:], Y)
    assert "not used" not in "".join(found.notes)


def test_npz_with_names_of_its_own_beside_those_of_others(tmp_path):
    """`x` and `y` win, and a line names the others."""
    found = loaders.load(save(tmp_path, x=X, y=Y, x_train=X[1:], y_train=Y[1:]), "")
    assert found.num_train == 6
    assert found.notes[-1] == "arrays of the file that are not used: x_train, y_train"


@pytest.mark.parametrize(
    "arrays, reason",
    [
        ({"x_train": X, "y": Y}, "x_train and y_train are needed"),
        ({"train_images": X, "train_labels": np.eye(3)[Y]}, "train_labels .*one-hot"),
        ({"x": X, "y": Y, "x_val": X}, "has x_val without y_val; add it, or omit both"),
        ({"x": X}, "x and y are needed"),
        ({"y": Y}, "x and y are needed"),
        ({"images": X, "labels": Y}, "images.*labels"),
        ({"x": X, "y": Y[:5]}, "y must be labels .6., got"),
        ({"x": X, "y": Y + 0.5}, "y looks like the target of a regression .*0.5"),
        ({"x": X, "y": np.eye(3, dtype=int)[Y]}, "one-hot rows y.argmax.1."),
        ({"x": X, "y": 0 * Y}, "y holds one label only, 0; at least 2 classes"),
        ({"x": X[:0], "y": Y[:0]}, "y must be labels .N., got int64 .0."),
        ({"x": X.astype(np.int32) - 300, "y": Y}, "x must be uint8 or float"),
        ({"x": X.astype(complex), "y": Y}, "x must be uint8 or float"),
        ({"x": X.reshape(6, 2, 1, 2, 1), "y": Y}, "x must be uint8 or float of sha"),
        ({"x": np.float32(3), "y": Y}, "x must be"),
        ({"x": np.where(X == 7, np.nan, X), "y": Y}, "nan or infinity"),
        ({"x": np.where(X == 7, np.inf, X), "y": Y}, "nan or infinity"),
        ({"x": X, "y": Y, "client": Y[:5]}, "client must be owners .6."),
        ({"x": X, "y": Y, "client": Y + 0.5}, "client holds 0.5"),
        ({"x": np.array([{}] * 6, object), "y": Y}, "x holds pickled Python objects"),
        ({"x": X, "y": Y, "client": np.array([{}] * 6, object)}, "client holds pickl"),
        ({"x": np.where(X == 7, 1e39, X), "y": Y}, "1e.39.*beyond the range of float"),
        ({"x": np.where(X == 7, -1e300, X), "y": Y}, "beyond the range of float32"),
        ({"x": np.where(X == 7, 3e38, X).astype("f4"), "y": Y}, "beyond the range"),
        ({"x": np.zeros((6, 0), np.uint8), "y": Y}, "no axis of 0, got uint8 .6, 0."),
        (
            {"x": np.zeros((6, 8, 0, 1), "f4"), "y": Y},
            "no axis of 0, got float32 .6, 8, 0, 1.",
        ),
        ({"x": X.astype(str), "y": Y}, "x must be uint8 or float"),
        (
            {"x": X, "y": Y * 1j},
            "y must be labels of one type, text, bools or whole numbers",
        ),
        ({"x": X.view([("a", "u1")]), "y": Y}, "x must be uint8 or float"),
    ],
)
def test_npz_that_does_not_fit(tmp_path, arrays, reason):
    """One line that starts with the flag and says what came."""
    name = save(tmp_path, **arrays)
    with pytest.raises(ValueError, match=reason) as error:
        loaders.load(name, "")
    assert str(error.value).startswith(f"--dataset={name}")
    assert "\n" not in str(error.value)


def npy(array, **header):
    """An npy file of `array`, its header changed."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, np.lib.format.header_data_from_array_1_0(array) | header
    )
    return out.getvalue() + array.tobytes()


@pytest.mark.parametrize(
    "member, reason",
    [
        (b"hello", "x: .*magic string"),
        (pickle.dumps([1, 2]), "x: .*magic string"),
        (b"", "x: EOF"),
        (b"\x93NUMPY\x01\x00\x40\x00" + b"{" * 64, "cannot be read"),
        (npy(X, shape=(10**15, 4)), "cannot be read"),
        (npy(X, shape=(-6, -4)), "cannot be read"),
        (npy(X, descr="<f8"), "x is shorter than its header says"),
        (npy(X) + b"more", "x is longer than its header says"),
    ],
)
def test_npz_whose_member_is_no_plain_array(tmp_path, member, reason):
    """Whatever a member holds, nothing is run and nothing is left out."""
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        archive.writestr("x.npy", member)
        archive.writestr("y.npy", npy(Y))
    with pytest.raises(ValueError, match=reason) as error:
        loaders.load(f"npz:{tmp_path / 'own.npz'}", "")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", range(4))
def test_npz_damaged_at_random(tmp_path, seed):
    """Cut off or with flipped bits: the arrays as they were, or one line."""
    gen = np.random.default_rng(seed)
    name = save(tmp_path, x=X, y=Y)
    path = tmp_path / "own.npz"
    whole = path.read_bytes()
    for _ in range(50):
        raw = bytearray(
            whole[: gen.integers(len(whole))] if gen.random() < 0.3 else whole
        )
        for place in gen.integers(max(len(raw), 1), size=min(3, len(raw))):
            raw[place] ^= 1 << gen.integers(8)
        path.write_bytes(raw)
        try:
            got = loaders.load(name, "")
        except ValueError as error:
            assert str(error).startswith(f"--dataset={name}") and "\n" not in str(error)
        else:
            np.testing.assert_array_equal(got.image, X)
            np.testing.assert_array_equal(got.label, Y)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_npz_with_members_of_no_interest(tmp_path, method):
    """Other members are not looked at, whatever they are; any usual method is read."""
    with zipfile.ZipFile(tmp_path / "own.npz", "w", method) as archive:
        for name, raw in (("x.npy", npy(X)), ("y.npy", npy(Y)), ("readme", b"hello")):
            archive.writestr(name, raw)
    got = loaders.load(f"npz:{tmp_path / 'own.npz'}", "")
    np.testing.assert_array_equal(got.image, X)


def test_npz_that_unpacks_to_more_than_the_memory(tmp_path, monkeypatch):
    """Refused by the sizes in its headers; no number is read."""
    np.savez_compressed(tmp_path / "own.npz", x=np.zeros((6, 1 << 20), "u1"), y=Y)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(np.lib.format, "read_array", None)
    with pytest.raises(ValueError, match="need 0.0 GiB of memory at least"):
        loaders.load(f"npz:{tmp_path / 'own.npz'}", "")


def test_npz_that_is_no_file(tmp_path):
    """A folder, a pipe that nobody writes to, a single array, nothing at all."""
    os.mkfifo(tmp_path / "pipe")
    np.save(tmp_path / "one.npy", X)
    for path, words in (
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is a pipe"),
        (tmp_path / "one.npy", "one.npy"),
        (tmp_path / "nowhere.npz", "nowhere.npz: there is no such file"),
        (5000 * "x", "cannot be read: File name too long"),
    ):
        with pytest.raises(ValueError, match=words):
            loaders.load(f"npz:{path}", "")


def truncated(raw):
    """The first two thirds of a file."""
    return raw[: len(raw) * 2 // 3]


def flipped(raw):
    """A file with one bit of the data of x flipped."""
    raw = bytearray(raw)
    raw[raw.index(X.tobytes()) + 3] ^= 1
    return bytes(raw)


@pytest.mark.parametrize(
    "change",
    [truncated, flipped, lambda raw: b"", lambda raw: b"hello " * 50],
    ids=["truncated", "flipped", "empty", "text"],
)
def test_npz_that_is_damaged(tmp_path, change):
    """A file that cannot be read gives a line with its name."""
    name = save(tmp_path, x=X, y=Y)
    path = tmp_path / "own.npz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match="own.npz"):
        loaders.load(name, "")


def test_unknown_name():
    """Lists the names there are."""
    with pytest.raises(
        ValueError, match="--dataset=imagenet.*mnist_5k.*npz:PATH, csv:PATH"
    ):
        loaders.load("imagenet", "")


@pytest.mark.parametrize(
    "name, meant",
    [
        ("cifar", "cifar10"),
        ("CIFAR-100", "cifar100"),
        ("fashionmnist", "fashion_mnist"),
        ("FashionMNIST", "fashion_mnist"),
        ("svhn", "svhn_cropped"),
        ("EMNIST", "emnist/byclass"),
        ("own", ""),
        ("wikitext", "wikitext2"),
    ],
)
def test_a_name_that_is_nearly_one(name, meant):
    """The closest is suggested at the end."""
    with pytest.raises(ValueError) as error:
        loaders.load(name, "")
    assert str(error.value).endswith(f"; did you mean {meant}?" if meant else "PATH")


def test_a_path_without_its_kind(tmp_path):
    """The kind is suggested by what is there."""
    (tmp_path / "a.npz").touch()
    for path, kind in ((tmp_path, "images"), (tmp_path / "a.npz", "npz")):
        with pytest.raises(ValueError, match=f"none of ours; give {kind}:{path}$"):
            loaders.load(str(path), "")
    with pytest.raises(ValueError, match="expected one of"):
        loaders.load(str(tmp_path / "b.npz"), "")


def test_mnist_5k():
    """5,000 images: 400 train rows and 100 test rows of every class."""
    got = loaders.load("mnist_5k", "")
    assert got.image.shape == (5000, 28, 28, 1) and got.image.dtype == np.uint8
    assert (got.num_train, got.num_classes) == (4000, 10)
    assert got.label.dtype == np.int32
    np.testing.assert_array_equal(np.bincount(got.label[:4000]), [400] * 10)
    np.testing.assert_array_equal(np.bincount(got.label[4000:]), [100] * 10)
    # MNIST's mean and standard deviation are .1307 and .3081.
    assert abs(got.image.mean() / 255 - 0.1307) < 0.005
    assert abs(got.image.std() / 255 - 0.3081) < 0.005


def tissues(**changed):
    """The arrays of a small PathMNIST: 20 train, 6 validation and 9 test images."""
    gen, out = np.random.default_rng(0), {}
    for part, count in (("train", 20), ("val", 6), ("test", 9)):
        out[f"{part}_images"] = gen.integers(0, 256, (count, 28, 28, 3), np.uint8)
        out[f"{part}_labels"] = (np.arange(count) % 9).astype(np.uint8)[:, None]
    return {name: changed.get(name, array) for name, array in out.items()}


@pytest.mark.parametrize("folder", ["", "pathmnist"])
def test_pathmnist(tmp_path, folder):
    """Train rows, then official test rows; nobody gets the validation images."""
    (tmp_path / folder).mkdir(exist_ok=True)
    arrays = tissues()
    np.savez_compressed(tmp_path / folder / "pathmnist.npz", **arrays)
    got = loaders.load("pathmnist", str(tmp_path))
    for name, values in (("images", got.image), ("labels", got.label[:, None])):
        both = np.concatenate([arrays[f"train_{name}"], arrays[f"test_{name}"]])
        np.testing.assert_array_equal(values, both)
    assert got.image.dtype == np.uint8 and got.label.dtype == np.int32
    assert (got.num_train, got.num_classes, got.client) == (20, 9, None)


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"train_images": np.zeros((20, 64, 64, 3), "u1")}, "got uint8 .20, 64, 64, 3"),
        (
            {"test_images": np.zeros((9, 28, 28), "u1")},
            "test_images and .* got uint8 .9, 28, 28.",
        ),
        (
            {"train_images": np.zeros((20, 28, 28, 3), "f4")},
            "must be images uint8.*float32",
        ),
        ({"test_images": np.zeros((0, 28, 28, 3), "u1")}, "got uint8 .0, 28, 28, 3"),
        (
            {"train_labels": np.zeros((19, 1), "u1")},
            "train_labels must .* uint8 .19, 1.",
        ),
        ({"train_labels": np.zeros((20, 9), "u1")}, "and uint8 .20, 9."),
        ({"test_labels": np.zeros((9, 1), "f4")}, "test_labels must be .*float"),
        (
            {"test_labels": np.full((9, 1), 9, "u1")},
            "test_labels must .* 0 to 8, .* 9 to 9",
        ),
        (
            {"train_labels": np.full((20, 1), -1, "i1")},
            "train_labels must .*, -1 to -1",
        ),
    ],
)
def test_pathmnist_of_something_else(tmp_path, changed, reason):
    """One line with the file and the array."""
    np.savez(tmp_path / "pathmnist.npz", **tissues(**changed))
    with pytest.raises(ValueError, match=f"pathmnist.npz: .*{reason}") as error:
        loaders.load("pathmnist", str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["train_images", "train_labels", "test_labels"])
def test_pathmnist_without_an_array(tmp_path, missing):
    """The arrays that are there, and those that are needed."""
    arrays = {name: array for name, array in tissues().items() if name != missing}
    np.savez(tmp_path / "pathmnist.npz", **arrays)
    reason = f"pathmnist.npz: has the arrays .*val_.*{missing}.*are needed"
    with pytest.raises(ValueError, match=reason):
        loaders.load("pathmnist", str(tmp_path))


@pytest.mark.parametrize("share", [0, 0.01, 0.6, 0.999])
def test_pathmnist_that_was_cut_off(tmp_path, share):
    """Anywhere: one line with the file's name."""
    path = tmp_path / "pathmnist.npz"
    np.savez(path, **tissues())
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(ValueError, match="pathmnist.npz: .*fetch it again") as error:
        loaders.load("pathmnist", str(tmp_path))
    assert "\n" not in str(error.value)


def test_pathmnist_that_is_not_there(tmp_path):
    """The file and the flag."""
    with pytest.raises(ValueError, match="--dataset=pathmnist: .*pathmnist.npz.*_dir"):
        loaders.load("pathmnist", "")
    with pytest.raises(ValueError, match=f"no pathmnist.npz in --data_dir={tmp_path}"):
        loaders.load("pathmnist", str(tmp_path))
    with pytest.raises(ValueError, match="--public_set=pathmnist: there is no"):
        loaders.load("pathmnist", str(tmp_path), flag="public_set")
    (tmp_path / "pathmnist.npz").mkdir()
    with pytest.raises(ValueError, match="pathmnist.npz: is a folder"):
        loaders.load("pathmnist", str(tmp_path))


@pytest.mark.parametrize(
    "name, shape, num_classes",
    [
        ("cifar10", (32, 32, 3), 10),
        ("cifar100", (32, 32, 3), 100),
        ("svhn_cropped", (32, 32, 3), 10),
        ("emnist/byclass", (28, 28, 1), 62),
        ("mnist", (28, 28, 1), 10),
    ],
)
def test_tfds(tmp_path, monkeypatch, name, shape, num_classes):
    """Mocked tfds data, no TensorFlow: train rows first, then test rows."""
    import tensorflow_datasets as tfds

    monkeypatch.setattr(loaders.socket, "getaddrinfo", lambda *_: [])

    policy = tfds.testing.MockPolicy.USE_CODE
    with tfds.testing.mock_data(num_examples=6, policy=policy, data_dir=str(tmp_path)):
        got = loaders.load(name, str(tmp_path))
    assert got.image.shape == (12, *shape) and got.image.dtype == np.uint8
    assert got.label.shape == (12,) and got.label.dtype == np.int32
    assert (got.num_train, got.num_classes) == (6, num_classes)
    if name == "cifar100":
        with tfds.testing.mock_data(num_examples=6, policy=policy):
            coarse = loaders.load(name, str(tmp_path), labels="coarse")
        assert coarse.num_classes == 20 and coarse.label.max() < 20
    assert 0 <= got.label.min() and got.label.max() < num_classes


@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_tfds_that_cannot_be_prepared(tmp_path, monkeypatch, name):
    """One line: the data set, the reason, the ways to get it."""

    class Builder:
        """A builder without a network."""

        data_path = tmp_path / "nothing"

        def download_and_prepare(self):
            """Fails as tfds does, with a message of several lines."""
            raise ConnectionError("no route to host\nsecond line")

    fake = types.SimpleNamespace(builder=lambda *_, **__: Builder())
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", fake)
    monkeypatch.setattr(loaders.socket, "getaddrinfo", lambda *_: [])
    with pytest.raises(ValueError) as error:
        loaders.load(name, str(tmp_path))
    line = str(error.value)
    assert line.startswith(f"--dataset={name}") and "\n" not in line
    assert "no route to host" in line and "--data_dir" in line
    files = f"{', '.join(sum(loaders.IDX_FILES, ()))}, plain or .gz, or "
    files += f"{loaders.OF_HUB} there (looked for"
    assert (f"IDX files {files} in {tmp_path}" in line) == (name == "mnist")


def test_without_tfds(tmp_path, monkeypatch):
    """The package is named when it is missing."""
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ValueError, match="--dataset=cifar10.*tensorflow-datasets"):
        loaders.load("cifar10", str(tmp_path))


@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("kind", dataset.NORMALIZATIONS)
def test_normalization(kind, is_float):
    """(image - mean) * scale against numpy, bytes count as 0..1."""
    channels = 3 if kind == "cifar100" else 2
    image = np.random.default_rng(0).integers(0, 256, (9000, 3, 2, channels), np.uint8)
    image[..., 1] //= 4
    means, stds = map(np.array, dataset.CIFAR100)
    unit = image.astype(np.float64) / 255
    if is_float:
        image = unit.astype(np.float32)
    mean, scale = dataset.normalization(image, kind)
    assert mean.dtype == np.float32 and scale.dtype == np.float32
    expected = {
        "none": unit,
        "cifar100": (unit - means[:channels]) / stds[:channels],
        "half": (unit - 0.5) / 0.5,
        "channel": (unit - unit.mean((0, 1, 2))) / unit.std((0, 1, 2)),
        "global": (unit - unit.mean()) / (unit.std() + 0.001),
        "pixel": (unit - unit.mean(0)) / (unit.std(0) + 0.001),
    }[kind]
    np.testing.assert_allclose((image - mean) * scale, expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["channel", "global", "pixel"])
@pytest.mark.parametrize("dtype, unit", [(np.uint8, 255), (np.float32, 1)])
def test_constants_are_not_scaled(kind, dtype, unit):
    """What never changes becomes 0, and a new value differs by as much as it does."""
    image = np.full((50, 4, 4, 2), 0.1 * unit, dtype)
    if kind != "global":
        image[:, 1:, :, 1] = np.random.default_rng(0).normal(size=(50, 3, 4)) * unit / 9
    mean, scale = dataset.normalization(image, kind)
    assert mean.dtype == scale.dtype == np.float32
    out = (image - mean) * scale
    np.testing.assert_array_equal(out[..., 0], 0)
    new = image.astype(np.float32)
    new[..., 0] += unit / 16
    moved = ((new - mean) * scale)[..., 0]
    np.testing.assert_allclose(moved, 1 / 16, rtol=1e-5)


@pytest.mark.parametrize("angles", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [(), (3,)])
def test_rotated_classes(angles, channels):
    """Angle and class are one new class; each image is turned by its own angle."""
    gen = np.random.default_rng(3)
    image = gen.integers(0, 256, (200, 4, 4, *channels), np.uint8)
    label = gen.integers(0, 5, 200).astype(np.int32)
    source = dataset.Dataset(image, label, 150, 5)
    found = dataset.rotated(source, angles)
    assert found.num_classes == 5 * angles and found.num_train == 150
    assert found.image.dtype == np.uint8 and found.label.dtype == np.int32
    angle = found.label // 5
    np.testing.assert_array_equal(found.label % 5, label)
    # Drawn once for all: about as many images at each, the same ones every time.
    assert np.bincount(angle, minlength=angles).min() > 200 / angles / 2
    again = dataset.rotated(source, angles)
    np.testing.assert_array_equal(again.label, found.label)
    for turned, number, one in zip(found.image, angle, image, strict=True):
        back = turned
        for _ in range(number):  # a quarter turn clockwise
            back = back[::-1].swapaxes(0, 1)
        np.testing.assert_array_equal(back, one)


@pytest.mark.parametrize("shape", [(4, 5, 1), (16,)])
def test_only_squares_are_rotated(shape):
    """One line with the flag and the shape."""
    source = dataset.Dataset(np.zeros((3, *shape), np.uint8), np.zeros(3), 2, 2)
    with pytest.raises(ValueError, match=r"--rotate_classes=4 .*square.*\[.*\]"):
        dataset.rotated(source, 4)
