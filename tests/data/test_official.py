"""CIFAR and SVHN: each official form gives the same arrays, and damage is one line."""

import gzip
import io
import os
import pickle
import shutil
import tarfile
import tracemalloc

import numpy as np
import pytest
from scipy import io as scipy_io

from data import loaders, memory, official

# A pickle of Python 2 as CIFAR's files are, by hand: a dict of an array and a list
PYTHON_2 = (
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\n"
    b"ndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06"
    b"U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    b"\x89T\x00\x0c\x00\x00" + bytes(range(256)) * 12 + b"tbU\x06labels]q\x08K\x07au."
)


def rows(name):
    """{file without suffix: (data uint8 [N, 3072], labels by name)}."""
    gen, out = np.random.default_rng(0), {}
    form = official.FORMS[name][1]
    for one in form.files:
        count = 3 + len(out)
        data = gen.integers(0, 256, (count, 3072), np.uint8)
        tops = {"labels": 10, "coarse_labels": 20, "fine_labels": 100}
        numbers = {k: gen.integers(0, tops[k], count) for k in official.LABELS[name]}
        out[one] = data, numbers
    return out


def content(kind, data, numbers):
    """The bytes of a file in the binary form, that of Python, or that of Matlab."""
    if kind == 0:
        of_labels = [one[:, None].astype(np.uint8) for one in numbers.values()]
        return np.concatenate([*of_labels, data], 1).tobytes()
    if kind == 1:
        lists = {name: one.tolist() for name, one in numbers.items()}
        about = {b"batch_label": b"one", b"filenames": [b"a.png"] * len(data)}
        return pickle.dumps({"data": data} | lists | about, protocol=2)
    buffer = io.BytesIO()
    columns = {name: one[:, None].astype(np.uint8) for name, one in numbers.items()}
    scipy_io.savemat(buffer, {"data": data} | columns)
    return buffer.getvalue()


def written(root, name, kind, is_packed=False, change=None):
    """Writes a form below `root`; `change` maps (file, bytes) to other bytes."""
    form = official.FORMS[name][kind]
    (root / form.folder).mkdir()
    names = form.files
    for place, one in zip(names, rows(name).values(), strict=True):
        raw = content(kind, *one)
        (root / form.folder / place).write_bytes(change(place, raw) if change else raw)
    if is_packed:
        with tarfile.open(root / form.archive, "w:gz") as archive:
            archive.add(root / form.folder, form.folder)
        for one in (root / form.folder).iterdir():
            one.unlink()
        (root / form.folder).rmdir()
    return form


def check(found, name, label):
    """The arrays are those of `rows`, as images with channels last."""
    files = list(rows(name).values())
    image = np.concatenate([data for data, _ in files])
    image = image.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(found.image, image)
    number = np.concatenate([numbers[label] for _, numbers in files])
    np.testing.assert_array_equal(found.label, number)
    assert found.image.dtype == np.uint8 and found.label.dtype == np.int32
    assert found.num_train == len(number) - len(files[-1][0])


@pytest.mark.parametrize("is_packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("kind", range(3), ids=["binary", "python", "matlab"])
@pytest.mark.parametrize("name", official.FORMS)
def test_every_form_gives_the_same(tmp_path, name, kind, is_packed):
    """Train rows in the order of the files, then test rows; fine and coarse labels."""
    form = written(tmp_path, name, kind, is_packed)
    found = loaders.load(name, str(tmp_path))
    check(found, name, official.LABELS[name][-1])
    assert found.num_classes == (100 if name == "cifar100" else 10)
    if name == "cifar100":
        coarse = loaders.load(name, str(tmp_path), labels="coarse")
        check(coarse, name, "coarse_labels")
        assert coarse.num_classes == 20
    if not is_packed:
        found = loaders.load(name, str(tmp_path / form.folder))
        check(found, name, official.LABELS[name][-1])


def test_in_a_folder_of_the_data_sets_name(tmp_path):
    """--data_dir may hold several data sets."""
    (tmp_path / "cifar10").mkdir()
    written(tmp_path / "cifar10", "cifar10", 0, True)
    check(loaders.load("cifar10", str(tmp_path)), "cifar10", "labels")


@pytest.mark.parametrize("ending, mode", [(".tgz", "w:gz"), (".tar", "w")])
def test_archives_by_other_names(tmp_path, ending, mode):
    """A browser may have unpacked the outer layer."""
    form = written(tmp_path, "cifar10", 1)
    stem = form.archive.removesuffix(".tar.gz")
    with tarfile.open(tmp_path / f"{stem}{ending}", mode) as archive:
        archive.add(tmp_path / form.folder, form.folder)
    shutil.rmtree(tmp_path / form.folder)
    check(loaders.load("cifar10", str(tmp_path)), "cifar10", "labels")


@pytest.mark.parametrize("protocol", range(5))
def test_pickles_of_every_protocol(tmp_path, protocol):
    """The first of them makes a dict of the stack."""

    def change(name, raw):
        return pickle.dumps(pickle.loads(raw), protocol=protocol)

    written(tmp_path, "cifar10", 1, change=change)
    check(loaders.load("cifar10", str(tmp_path)), "cifar10", "labels")


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_that_share_parts(tmp_path, kind):
    """Refused before they fill the memory: 60 lists are 2^60 numbers."""
    doubled = [0]
    for _ in range(60):
        doubled = kind([doubled, doubled])
    raw = pickle.dumps({"data": np.zeros((2, 3072), "u1"), "labels": doubled}, 2)
    written(tmp_path, "cifar10", 1, change=lambda *_: raw)
    with pytest.raises(ValueError, match="a list of more than whole numbers"):
        loaders.load("cifar10", str(tmp_path))


def test_coarse_labels_of_another_data_set(tmp_path):
    """Only CIFAR-100 has some."""
    written(tmp_path, "cifar10", 0)
    for name in ("cifar10", "mnist_5k"):
        with pytest.raises(ValueError, match=f"is of cifar100, and not of {name}"):
            loaders.load(name, str(tmp_path), labels="coarse")


def test_a_whole_form_beside_a_damaged_one(tmp_path):
    """It is taken, wherever it is; without one the damaged file is named."""
    form = written(tmp_path, "cifar10", 0)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / form.files[0]).write_bytes(b"cut")
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"cut")
    check(loaders.load("cifar10", str(tmp_path)), "cifar10", "labels")
    for one in (tmp_path / form.folder).iterdir():
        one.rename(tmp_path / one.name)
    check(loaders.load("cifar10", str(tmp_path)), "cifar10", "labels")
    (tmp_path / form.files[0]).write_bytes(b"cut")
    with pytest.raises(ValueError, match=f"cifar10/{form.files[0]} cannot be read"):
        loaders.load("cifar10", str(tmp_path))


def test_an_archive_with_a_file_twice(tmp_path):
    """Refused, since it is not told which of them was meant."""
    form = written(tmp_path, "cifar10", 0)
    with tarfile.open(tmp_path / form.archive, "w:gz") as archive:
        archive.add(tmp_path / form.folder, form.folder)
        archive.add(tmp_path / form.folder / form.files[0], f"old/{form.files[0]}")
    shutil.rmtree(tmp_path / form.folder)
    with pytest.raises(ValueError, match="data_batch_1.bin is there twice; fetch it"):
        loaders.load("cifar10", str(tmp_path))


@pytest.mark.parametrize("kind, is_packed", [(1, False), (1, True), (0, True)])
def test_other_files_of_these_names(tmp_path, kind, is_packed):
    """A file `train` beside a folder or an archive is not of CIFAR-100."""
    written(tmp_path, "cifar100", kind, is_packed)
    for name in ("train", "test", "train.bin"):
        (tmp_path / name).write_text("mine")
    check(loaders.load("cifar100", str(tmp_path)), "cifar100", "fine_labels")


def test_pickle_of_python_2(tmp_path):
    """As the official files are."""
    written(tmp_path, "cifar10", 1, change=lambda *_: PYTHON_2)
    found = loaders.load("cifar10", str(tmp_path))
    assert found.image.shape == (6, 32, 32, 3) and set(found.label) == {7}
    np.testing.assert_array_equal(found.image[0, 0, :, 0], np.arange(32))


class Runs:
    """An object whose unpickling would make a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    "foreign, reason",
    [
        (lambda path: Runs(path), "names posix.mkdir, but only numpy arrays"),
        (lambda path: {"data": [Runs(path)]}, "names posix.mkdir"),
        (lambda path: np.array([Runs(path)]), "names posix.mkdir"),
        (lambda path: np.zeros(3, [("a", "O")]), "numbers are expected"),
        (lambda path: {"data": print}, "names (builtins|__builtin__).print"),
        (lambda path: {"data": 3 + 4j}, "names (builtins|__builtin__).complex"),
        (lambda path: [1, 2], "it is a list, a dict is expected"),
        (lambda path: {"labels": [1]}, "it has no data"),
        (lambda path: {"data": b"123", "labels": [1]}, "its data are .S3 ..,"),
        (
            lambda path: {"data": np.zeros((2, 9), "u1"), "labels": [1, 2]},
            "uint8 .2, 9",
        ),
        (
            lambda path: {"data": np.zeros((2, 3072), "u1"), "labels": [1]},
            "its labels are int64 .1., 2 integers are expected",
        ),
        (
            lambda path: {"data": np.zeros((1, 3072), "u1"), "labels": ["a"]},
            "its labels are a list of more than whole numbers",
        ),
        (
            lambda path: {"data": np.zeros((1, 3072), "u1"), "labels": {}},
            "its labels are",
        ),
    ],
)
def test_foreign_pickles_run_nothing(tmp_path, foreign, reason, is_packed):
    """One line with the file and what it names."""
    path = tmp_path / "made"
    raw = pickle.dumps(foreign(str(path)), protocol=2)
    written(
        *(tmp_path, "cifar10", 1, is_packed),
        lambda name, whole: raw if name == "data_batch_3" else whole,
    )
    with pytest.raises(
        ValueError, match=f"data_batch_3 cannot be read: .*{reason}"
    ) as e:
        loaders.load("cifar10", str(tmp_path))
    assert "\n" not in str(e.value) and not path.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"cposix\nmkdir\n(V%s\ntR.",  # by the oldest opcodes
        b"(iposix\nmkdir\n(V%s\n.",
        b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93\x8c\x01%s\x85R.",
        # A state for a class of the loader, and for what it makes
        b"cnumpy\nndarray\n}b.",
        b"c_codecs\nencode\n}(Vx\nI1\nub.",
        b"cnumpy\ndtype\n}(Vx\nI1\nub.",
        b"cnumpy\nndarray\n)R(I1\n(I1\nt}I0\nVx\ntb.",
        b"cnumpy\ndtype\n(Vu1\ntR(I3\nV>\nNNI-1\nI-1\nI0\ntb.",
        b"c_codecs\nencode.__setstate__\n.",
        b"Pa\n.",  # an id of something outside
        b"\x80\x05}X\x01\0\0\0a\x96" + (2**28).to_bytes(8, "little") + b"s.",
        b"\x80\x02})" + b"2\x86" * 40 + b"K\x01s.",  # a key that takes 2^40 steps
        b"\x80\x02(c_codecs\nencode\nq\0(X\xc8\0\0\0"
        + b"a" * 200
        + b"Vx\ntq\1R"
        + b"h\0h\1R" * 99
        + b"l.",  # one text as many bytes
        b"c\x1b[31mposix\nmkdir\n(V%s\ntR.",  # that would colour a terminal
        b"",
    ],
)
def test_pickles_by_hand_run_nothing(tmp_path, raw):
    """Whatever the opcodes are."""
    path = tmp_path / "made"
    written(
        *(tmp_path, "cifar100", 1),
        change=lambda *_: raw.replace(b"%s", str(path).encode()),
    )
    with pytest.raises(ValueError, match="cifar-100-python/train cannot be") as error:
        loaders.load("cifar100", str(tmp_path))
    assert str(error.value).isprintable() and not path.exists()


@pytest.mark.parametrize("raw", [b"", b"<html>", b".", b"\x80\x02}q\x01"])
def test_no_pickle(tmp_path, raw):
    """Such as the page of a server that has no such file."""
    written(tmp_path, "cifar100", 1, change=lambda *_: raw)
    with pytest.raises(ValueError, match="train cannot be read: it is not a pickle"):
        loaders.load("cifar100", str(tmp_path))


def test_a_pickle_with_a_large_number_of_an_object(tmp_path):
    """As of a damaged byte; it takes no memory."""
    written(tmp_path, "cifar10", 1, change=lambda *_: b"\x80\x02K\x01r\0\0\x40\0.")
    tracemalloc.start()
    with pytest.raises(
        ValueError, match="data_batch_1 cannot be .* a dict is expected"
    ):
        loaders.load("cifar10", str(tmp_path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


@pytest.mark.parametrize("share", [0, 0.01, 0.45, 0.999])
@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("is_packed", [False, True])
def test_cut_off(tmp_path, kind, share, is_packed):
    """Anywhere, in an archive or in one of its files."""

    def cut(name, raw):
        is_cut = name.startswith("test_batch") and not is_packed
        return raw[: int(share * len(raw))] if is_cut else raw

    form = written(tmp_path, "cifar10", kind, is_packed, cut)
    if is_packed:
        whole = (tmp_path / form.archive).read_bytes()
        (tmp_path / form.archive).write_bytes(whole[: int(share * len(whole))])
    line = "(tar.gz|test_batch(.bin|.mat)?) cannot be read: .*; fetch it again"
    with pytest.raises(ValueError, match=line) as error:
        loaders.load("cifar10", str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_of_an_archive(tmp_path, seed):
    """An archive has a checksum."""
    form = written(tmp_path, "cifar100", seed, True)
    raw = bytearray((tmp_path / form.archive).read_bytes())
    gen = np.random.default_rng(seed)
    for place in gen.integers(100, len(raw) - 8, 3):
        changed = bytearray(raw)
        changed[place] ^= 1 << gen.integers(8)
        (tmp_path / form.archive).write_bytes(changed)
        with pytest.raises(ValueError, match="tar.gz.* cannot be read") as error:
            loaders.load("cifar100", str(tmp_path))
        assert "\n" not in str(error.value)


def test_an_archive_of_something_else(tmp_path, monkeypatch):
    """No archive, one without a file, one of other labels, one that is too large."""
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(gzip.compress(b"hello" * 999))
    with pytest.raises(ValueError, match="binary.tar.gz cannot be read"):
        loaders.load("cifar10", str(tmp_path))
    form = written(tmp_path, "cifar10", 0)
    (tmp_path / form.folder / "data_batch_4.bin").unlink()
    with pytest.raises(
        ValueError, match="batches-bin cannot be .* no data_batch_4.bin"
    ):
        loaders.load("cifar10", str(tmp_path))
    (tmp_path / form.folder / "data_batch_4.bin").write_bytes(b"\x0a" * 3073)
    with pytest.raises(
        ValueError, match="data_batch_1.bin and its labels must .*to 10"
    ):
        loaders.load("cifar10", str(tmp_path))
    written(tmp_path, "cifar100", 0, True)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(ValueError, match="bytes of .*.bin need 0.0 GiB of memory"):
        loaders.load("cifar100", str(tmp_path))


def digits(folder, **changed):
    """Writes SVHN's two files; returns images [N, 32, 32, 3] and digits."""
    gen = np.random.default_rng(0)
    image = gen.integers(0, 256, (12, 32, 32, 3), np.uint8)
    digit = (np.arange(12) % 10).astype(np.uint8)
    for name, part in zip(official.SVHN, (slice(7), slice(7, 12)), strict=True):
        x, y = image[part].transpose(1, 2, 3, 0), digit[part, None]
        arrays = {"X": x, "y": np.where(y == 0, 10, y)}
        scipy_io.savemat(folder / name, arrays | changed)
    return image, digit


@pytest.mark.parametrize("folder", ["", "svhn_cropped"])
def test_svhn(tmp_path, folder):
    """The digit 0 is written as 10."""
    (tmp_path / folder).mkdir(exist_ok=True)
    image, digit = digits(tmp_path / folder)
    found = loaders.load("svhn_cropped", str(tmp_path))
    np.testing.assert_array_equal(found.image, image)
    np.testing.assert_array_equal(found.label, digit)
    assert (found.num_train, found.num_classes) == (7, 10)


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"X": np.zeros((32, 32, 3, 4), "u1")}, "train_32x32.mat cannot .*N, 1. are"),
        ({"X": np.zeros((32, 7), "u1")}, "train_32x32.mat cannot .* are expected"),
        (
            {"X": np.zeros((9, 9, 3, 7), "u1"), "y": np.ones((7, 1))},
            "got uint8 .7, 9, 9",
        ),
        (
            {"y": np.zeros((7, 1), "u1")},
            "train_32x32.mat cannot be .*y must be 1 to 10",
        ),
        ({"y": np.full((7, 1), 1.5)}, "y must be 1 to 10"),
    ],
)
def test_svhn_of_something_else(tmp_path, changed, reason):
    """One line."""
    digits(tmp_path, **changed)
    for name in official.SVHN[1:] * ("9, 9" in reason):
        digits(tmp_path, **changed)
        raw = {"X": np.zeros((9, 9, 3, 5), "u1"), "y": np.ones((5, 1))}
        scipy_io.savemat(tmp_path / name, raw)
    with pytest.raises(ValueError, match=reason) as error:
        loaders.load("svhn_cropped", str(tmp_path))
    assert "\n" not in str(error.value)


def test_svhn_that_is_damaged(tmp_path):
    """Cut off, another file, or one of two."""
    digits(tmp_path)
    path = tmp_path / "test_32x32.mat"
    whole = path.read_bytes()
    for raw in (whole[: len(whole) // 2], b"", b"hello" * 99):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match="test_32x32.mat cannot .* again") as error:
            loaders.load("svhn_cropped", str(tmp_path))
        assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(ValueError, match="test_32x32.mat cannot .* no such file"):
        loaders.load("svhn_cropped", str(tmp_path))


@pytest.mark.parametrize(
    "name, files",
    [
        ("cifar10", "cifar-10-binary.tar.gz or cifar-10-batches-bin/, .*-batches-py/"),
        ("cifar100", "cifar-100-binary.tar.gz or .*, cifar-100-python.tar.gz or"),
        ("svhn_cropped", "train_32x32.mat and test_32x32.mat"),
    ],
)
def test_nothing_is_there(tmp_path, monkeypatch, name, files):
    """The files that were looked for, and where."""

    def fail(*_):
        raise OSError("no network")

    monkeypatch.setattr(loaders.socket, "getaddrinfo", fail)
    line = (
        f"--dataset={name} is missing .*no network.*{files}.*looked for in {tmp_path}"
    )
    for held in ("where nothing is", "which holds a, cifar-10-binary.zip"):
        with pytest.raises(ValueError, match=f"{line}.*{tmp_path}, {held}") as error:
            loaders.load(name, str(tmp_path))
        assert "\n" not in str(error.value)
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "cifar-10-binary.zip").touch()
        (tmp_path / ".hidden").touch()
