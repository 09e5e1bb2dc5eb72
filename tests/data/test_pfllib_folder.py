"""Data sets as PFLlib's generators leave them, good files and bad ones."""

import io
import json
import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest

from data import loaders, memory
from launch import build

SIZES = {"train": (5, 4, 12), "test": (2, 3, 1)}  # of the clients 0, 1 and 2


def clients_of(part, shape=(1, 6, 5), seed=0):
    """{client: {x f32 [N, *shape], y int64[N]}} of a small folder."""
    gen = np.random.default_rng([seed, len(part)])
    return {
        client: {
            "x": gen.uniform(-1, 1, (size, *shape)).astype(np.float32),
            "y": np.append(gen.integers(0, 3, size - 1), 2 * (part == "train")),
        }
        for client, size in enumerate(SIZES[part])
    }


def write(path, data):
    """Writes a client's file as PFLlib's `save_file` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        np.savez_compressed(file, data=data)


@pytest.fixture
def folder(tmp_path):
    for part in SIZES:
        for client, held in clients_of(part).items():
            write(tmp_path / "Digits" / part / f"{client}.npz", held)
    (tmp_path / "Digits" / "config.json").write_text(json.dumps({"num_clients": 3}))
    return tmp_path / "Digits"


def load(folder, **given):
    return loaders.load(f"pfllib:{folder}", "", **given)


def test_rows_are_those_of_the_files(folder):
    found = load(folder)
    assert (found.num_train, found.num_test, found.num_classes) == (21, 6, 3)
    assert found.owners is None
    parts = [held for part in SIZES for held in clients_of(part).values()]
    x, y = (np.concatenate([held[name] for held in parts]) for name in "xy")
    np.testing.assert_array_equal(found.image, x.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(found.label, y)
    owner = np.concatenate([np.repeat(range(3), SIZES[part]) for part in SIZES])
    np.testing.assert_array_equal(found.client, owner)


def test_a_run_has_pfllibs_clients(folder):
    made = build.experiment(
        dataset=f"pfllib:{folder}", algo="fedavg", preset="pfllib", model="mlp"
    )
    config = made.config
    assert (config.partition, config.test_split) == ("natural", "official")
    assert (config.num_clients, config.normalization) == (3, "none")
    assert float(made.data.scale.min()) == float(made.data.scale.max()) == 1.0
    for part, first in (("train", 0), ("test", 21)):
        rows = getattr(made.data.partition, part)
        ends = first + np.cumsum(SIZES[part])
        for client, (end, size) in enumerate(zip(ends, SIZES[part], strict=True)):
            start, count = rows.start[0, client], rows.count[0, client]
            held = np.asarray(rows.row[0, start : start + count])
            assert sorted(held) == list(range(end - size, end))


def test_images_to_predict_are_laid_out_as_the_files(tmp_path):
    """Also where the axes do not tell: 4 channels of 4x4."""
    for part in SIZES:
        for client, held in clients_of(part, shape=(4, 4, 4)).items():
            write(tmp_path / part / f"{client}.npz", held)
    given = {"algo": "fedavg", "preset": "none", "model": "mlp"}
    made = build.experiment(dataset=f"pfllib:{tmp_path}", **given)
    x = clients_of("train", shape=(4, 4, 4))[0]["x"]
    np.testing.assert_allclose(made.data.image[: len(x)], x.transpose(0, 2, 3, 1))
    same = build.experiment(
        dataset=(np.asarray(made.data.image), np.asarray(made.data.label)),
        **given | {"layout": "nhwc", "num_clients": 3, "normalization": "none"},
    )
    wanted = same.predict(None, x.transpose(0, 2, 3, 1))
    np.testing.assert_allclose(made.predict(None, x), wanted, rtol=1e-6)


def test_images_to_predict_may_have_the_shape_of_the_models(folder):
    """Where the files' layout does not fit: channels last, and gray ones."""
    given = {"algo": "fedavg", "preset": "none", "model": "mlp"}
    made = build.experiment(dataset=f"pfllib:{folder}", **given)
    x = clients_of("train")[0]["x"]
    wanted = made.predict(None, x)
    for other in (x.transpose(0, 2, 3, 1), x[:, 0]):
        np.testing.assert_array_equal(made.predict(None, other), wanted)


def test_many_clients_are_in_the_order_of_their_numbers(tmp_path):
    for part in SIZES:
        for client in range(12):
            held = {"x": np.full((2, 3), client, np.float32), "y": np.arange(2)}
            write(tmp_path / part / f"{client}.npz", held)
    found = load(tmp_path)
    np.testing.assert_array_equal(found.image[:, 0], found.client)


def test_other_forms_of_rows(tmp_path):
    for part in SIZES:
        for client, held in clients_of(part, shape=(6, 5, 3)).items():
            write(tmp_path / part / f"{client}.npz", held)
    assert load(tmp_path, layout="nhwc").image.shape == (27, 6, 5, 3)
    found = load(tmp_path)
    assert found.image.shape == (27, 5, 3, 6)
    assert found.notes[0].endswith("H 5, W 3, C 6; --layout=nhwc if not")


def test_clients_without_train_rows(folder):
    write(folder / "train" / "1.npz", {"x": np.zeros((0, 1, 6, 5)), "y": np.zeros(0)})
    with pytest.raises(ValueError, match=r"train/1\.npz has no row; each client needs"):
        load(folder)


def test_hidden_files_are_no_clients(folder):
    """As macOS leaves them."""
    (folder / "train" / "._0.npz").write_bytes(b"")
    assert load(folder).num_train == 21


def test_clients_without_test_rows(folder):
    """PFLlib has such clients; without any, test rows are taken of the train rows."""
    none = {"x": np.zeros((0,), np.float32), "y": np.zeros(0, int)}
    write(folder / "test" / "1.npz", none)
    assert load(folder).num_test == 3
    write(folder / "test" / "0.npz", none)
    write(folder / "test" / "2.npz", none)
    with pytest.raises(ValueError, match="no client has a test row"):
        load(folder)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_older_pickles(folder, protocol):
    held = clients_of("train")[0]
    whole = np.array(held, dtype=object)
    buffer = io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": ()}
    np.lib.format.write_array_header_1_0(buffer, header)
    pickle.dump(whole, buffer, protocol=protocol)
    with zipfile.ZipFile(folder / "train" / "0.npz", "w") as archive:
        archive.writestr("data.npy", buffer.getvalue())
    image = load(folder).image[:5]
    np.testing.assert_array_equal(image, held["x"].transpose(0, 2, 3, 1))


class Foreign:
    """Would make a folder when it is unpickled by another unpickler."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


BAD = {
    "texts": (
        {"x": np.array([([1, 2], 2), ([3], 1)], dtype=object), "y": np.array([0, 1])},
        "x is a list of objects, an array of numbers is",
    ),
    "one label": (
        {"x": np.zeros((3, 1, 4, 4), np.float32), "y": np.array([0, 1])},
        "x has the shape [3, 1, 4, 4] and y [2]",
    ),
    "no labels": ({"x": np.zeros((3, 4), np.float32)}, "y is missing, an array"),
    "lists": ({"x": [[1.0]], "y": [0]}, "x is a list of objects"),
    "no dict": ([1, 2], "data is int64 [2], a dict of x and y is expected"),
    "another object": ({1}, "it holds more than numpy arrays"),
    "complex": ({"x": np.zeros((2, 4), complex), "y": np.zeros(2)}, "complex128"),
    "another order": ({"x": np.zeros((2, 4), ">f4"), "y": np.zeros(2)}, "order of"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_of_something_else(folder, kind):
    data, reason = BAD[kind]
    write(folder / "train" / "2.npz", data)
    with pytest.raises(ValueError) as refused:
        load(folder)
    said = str(refused.value)
    assert f"{folder}/train/2.npz cannot be read: " in said and reason in said
    assert "\n" not in said and len(said) < 400


def test_foreign_pickles_run_nothing(folder, tmp_path):
    made = tmp_path / "made"
    write(folder / "train" / "2.npz", {"x": Foreign(made), "y": np.zeros(2)})
    with pytest.raises(ValueError, match=r"it names \w+\.mkdir, but only"):
        load(folder)
    assert not made.exists()


def test_damaged_files(folder):
    path = folder / "test" / "0.npz"
    whole, seen = path.read_bytes(), 0
    gen = np.random.default_rng(3)
    for _ in range(60):
        raw = bytearray(whole)
        raw[gen.integers(len(raw))] ^= 1 << gen.integers(8)
        path.write_bytes(raw[: gen.integers(len(raw))] if gen.random() < 0.5 else raw)
        try:
            load(folder)
        except ValueError as error:
            seen += 1
            assert "\n" not in str(error) and str(folder) in str(error)
    path.write_bytes(whole)
    assert seen > 30
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a pipe or a device"):
        load(folder)


def test_forms_that_differ(folder):
    write(folder / "train" / "2.npz", clients_of("train", shape=(1, 5, 5))[2])
    with pytest.raises(
        ValueError, match=r"float32 \[1, 6, 5\] and float32 \[1, 5, 5\]"
    ):
        load(folder)
    held = clients_of("train")[2]
    write(folder / "train" / "2.npz", held | {"x": held["x"].astype(np.uint8)})
    with pytest.raises(ValueError, match=r"are float32 .* and uint8 .*; give all one"):
        load(folder)


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            lambda at: (at / "train/1.npz").unlink(),
            "and no 1.npz; files of the clients",
        ),
        (lambda at: (at / "test/1.npz").unlink(), "test holds 0.npz, 2.npz and no 1"),
        (lambda at: (at / "train/2.npz").unlink(), "test/2.npz is of no client in"),
        (lambda at: (at / "train/1.npz").rename(at / "train/01.npz"), "and no 1.npz"),
        (lambda at: shutil.rmtree(at / "test"), "test holds no file and no 0.npz"),
        (
            lambda at: (at / "config.json").write_text('{"num_clients": 9}'),
            "config.json says 9 clients, train holds 3",
        ),
        (
            lambda at: (at / "config.json").write_text("{"),
            "config.json cannot be read: it is not JSON",
        ),
        (
            lambda at: np.savez(at / "train/1.npz", x=np.zeros(3), y=np.zeros(3)),
            "holds x.npy, y.npy; save a dict of x and y as data=",
        ),
    ],
)
def test_folders_that_are_not_whole(folder, change, reason):
    change(folder)
    with pytest.raises(ValueError) as refused:
        load(folder)
    assert reason in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("inner", ["", "train", "nothing"])
def test_another_folder(folder, inner):
    for part in SIZES if not inner else ():
        (folder / part).rename(folder.parent / part)
    with pytest.raises(ValueError, match="give the folder that holds PFLlib's train"):
        load(folder / inner)


def test_a_path_without_its_kind(folder):
    with pytest.raises(ValueError, match="none of ours; give pfllib:/"):
        loaders.load(str(folder), "")


def test_rows_larger_than_the_memory(folder, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 100)
    with pytest.raises(ValueError, match=r"train/0\.npz cannot be read: its arrays"):
        load(folder)
