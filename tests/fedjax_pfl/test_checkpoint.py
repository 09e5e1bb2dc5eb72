"""Checkpoints: what is saved comes back, what is damaged does not."""

import hashlib
import json
import resource
import shutil
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from fedjax_pfl import checkpoint
from fedjax_pfl.rows import views


def state(seed=0):
    """A tree with the kinds of leaves that states have."""
    draws = np.random.default_rng(seed)
    return {
        "params": ({"w": jnp.asarray(draws.normal(size=(30, 40)), jnp.float32)}, ()),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(seed),
        "round": jnp.asarray(seed, jnp.int32),
        "wide": draws.normal(size=(2, 5)),
    }


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of rounds 1 and 2."""
    for round in (1, 2):
        checkpoint.save(tmp_path / "checkpoints", round, state(round), {"n": [round]})
    return tmp_path / "checkpoints"


def template():
    """Shapes alone; the host's own arrays as they are, which are of 64 bits."""
    return jax.eval_shape(state) | {"wide": state()["wide"]}


def plain(tree):
    """Keys as numbers and streamed leaves as arrays, so that trees can be compared."""
    tree = jax.tree.map(views.materialised, tree)
    return tree | {"key": jax.random.key_data(tree["key"])}


def test_newest_comes_back(folder):
    """Bits, dtypes, structure and what the host remembers."""
    round, found, host = checkpoint.restore(folder, template())
    assert (round, host) == (2, {"n": [2]})
    chex.assert_trees_all_equal_structs(found, state())
    chex.assert_trees_all_equal_dtypes(plain(found), plain(state()))
    chex.assert_trees_all_equal(plain(found), plain(state(2)))


def test_none_where_there_is_none(tmp_path):
    """No folder and an empty folder."""
    assert checkpoint.restore(tmp_path / "nowhere", template()) is None
    assert checkpoint.restore(tmp_path, template()) is None


def test_two_are_kept_and_left_overs_go(folder):
    """A third pushes out the first; a partial one is removed."""
    (folder / "partial_00000009").mkdir()
    (folder / "partial_00000007").write_text("a file where a folder is expected")
    checkpoint.save(folder, 3, state(3), {})
    names = [path.name for path in sorted(folder.iterdir())]
    assert names == ["round_00000002", "round_00000003"]


def test_host_keeps_what_is_no_number(folder):
    """A diverged run's records hold nan and infinity."""
    checkpoint.save(folder, 3, state(3), {"loss": [float("nan"), float("inf")]})
    loss = checkpoint.restore(folder, template())[2]["loss"]
    assert np.isnan(loss[0]) and loss[1] == float("inf")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_every_file_is_checked(folder, damage):
    """Whatever file of the newest is damaged, it is named, and the older offered."""
    newest = folder / "round_00000002"
    kept = folder.parent / "kept"
    shutil.copytree(newest, kept)
    for file in [path for path in sorted(newest.rglob("*")) if path.is_file()]:
        raw = file.read_bytes()
        half = len(raw) // 2
        if damage == "remove":
            file.unlink()
        elif not raw:
            continue
        elif damage == "cut":
            file.write_bytes(raw[:half])
        else:
            file.write_bytes(raw[:half] + bytes([raw[half] ^ 1]) + raw[half + 1 :])
        with pytest.raises(ValueError) as caught:
            checkpoint.restore(folder, template())
        text = str(caught.value)
        assert str(file) in text and f"remove {newest}" in text and "\n" not in text
        file.write_bytes(raw)
    assert checkpoint.restore(folder, template())[0] == 2


def test_other_shapes_and_versions_are_named(folder):
    """A leaf of another shape or dtype, another tree, another format."""
    wide = template() | {"wide": jax.ShapeDtypeStruct((2, 6), np.float64)}
    with pytest.raises(ValueError, match=r"wide.*float64\[2, 5\].*float64\[2, 6\]"):
        checkpoint.restore(folder, wide)
    with pytest.raises(ValueError, match="another state.*more"):
        checkpoint.restore(folder, template() | {"more": wide["wide"]})
    path = folder / "round_00000002" / "manifest.json"
    text = json.dumps({"round": 2})
    seal = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps({"sha256": seal, "body": text}))
    with pytest.raises(ValueError, match="another version"):
        checkpoint.restore(folder, template())


def test_a_full_disk_is_one_error(folder, monkeypatch, capfd):
    """OSError with the system's reason, no thread's traceback, older ones intact."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            checkpoint.save(folder, 3, state(3), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "partial_00000003" in str(caught.value)
    assert capfd.readouterr().err == ""
    # One of orbax's late threads may still write into the partial folder; it is removed
    # before the next checkpoint.
    names = [path.name for path in checkpoint.saved(folder)]
    assert names == ["round_00000001", "round_00000002"]
    assert checkpoint.restore(folder, template())[0] == 2
    checkpoint.save(folder, 4, state(4), {})
    names = [path.name for path in sorted(folder.iterdir())]
    assert names == ["round_00000002", "round_00000004"]


def test_a_checkpoint_that_its_run_removes_meanwhile(folder, monkeypatch):
    """Who reads beside a run gets the newest that is there now."""
    read = checkpoint._restore_one

    def late(path, templates):
        if path.name == "round_00000002":
            checkpoint.save(folder, 3, state(3), {})
            checkpoint.save(folder, 4, state(4), {})
        return read(path, templates)

    monkeypatch.setattr(checkpoint, "_restore_one", late)
    assert checkpoint.restore(folder, template())[0] == 4


def test_digest():
    """Of names, shapes, dtypes and bits, as it has been since the first runs."""
    tree = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.zeros((), "f4")}
    total = hashlib.sha256()
    for name, array in (("['a']", tree["a"]), ("['b']", tree["b"])):
        bits = hashlib.sha256(array.tobytes()).hexdigest()
        total.update(f"{name} {array.shape} {array.dtype} {bits}\n".encode())
    assert checkpoint.digest(tree) == total.hexdigest()
    assert checkpoint.digest({"a": tree["a"].T, "b": tree["b"]}) != total.hexdigest()


@pytest.mark.parametrize("limit", [600, 120, 10_000])
def test_in_pieces(tmp_path, monkeypatch, limit):
    """Whatever is copied at once: the same bits, the same hash, no more than that."""
    wanted, whole = checkpoint.digest(state(3)), state(3)
    monkeypatch.setattr(views, "PIECE_BYTES", limit)
    assert checkpoint.digest(whole) == wanted
    for leaf in jax.tree.leaves(whole):
        sizes = [piece.nbytes for piece in views.pieces_of(leaf)]
        assert max(sizes, default=0) <= limit
    checkpoint.save(tmp_path, 3, whole, {})
    groups = list((tmp_path / "round_00000003" / "state").iterdir())
    assert -(-4900 // limit) <= len(groups) <= {600: 11, 120: 62, 10_000: 1}[limit]
    _, found, _ = checkpoint.restore(tmp_path, template())
    chex.assert_trees_all_equal_dtypes(plain(found), plain(whole))
    chex.assert_trees_all_equal(plain(found), plain(whole))


def test_joined_leaves_are_their_concatenation(tmp_path, monkeypatch):
    """Of arrays and of keys; the whole is never made."""
    parts = [state(seed) for seed in range(3)]
    parts = [jax.tree.map(lambda x: jnp.asarray(x)[None], one) for one in parts]
    whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    joined = jax.tree.map(lambda *leaves: views.Joined(leaves), *parts)
    assert checkpoint.digest(joined) == checkpoint.digest(whole)
    chex.assert_trees_all_equal(plain(joined), plain(whole))
    monkeypatch.setattr(views, "PIECE_BYTES", 1000)
    assert checkpoint.digest(joined) == checkpoint.digest(whole)
    checkpoint.save(tmp_path, 3, joined, {})
    _, found, _ = checkpoint.restore(tmp_path, jax.eval_shape(lambda: whole))
    chex.assert_trees_all_equal(plain(found), plain(whole))


@pytest.mark.parametrize(
    "shape", [(7,), (2, 3), (7, 3), (2, 7, 3), (3, 2, 7), (0, 3), ()]
)
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
def test_pieces_of_any_shape(shape, of, monkeypatch):
    """In order, whether or not they divide it, and as whole rows of another shape."""
    monkeypatch.setattr(views, "PIECE_BYTES", 12)
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    pieces = list(views.pieces_of(of(array)))
    assert all(0 < piece.nbytes <= 12 for piece in pieces)
    np.testing.assert_array_equal(np.concatenate([[], *pieces]), array.reshape(-1))
    size = array.size - array.size % 7
    some = views.pieces_of(of(array.reshape(-1)[:size]))
    rows = [row for part in views.in_rows(some, (7,)) for row in part]
    np.testing.assert_array_equal(
        np.reshape(rows, (-1, 7)), np.arange(size).reshape(-1, 7)
    )


@pytest.mark.parametrize("change", ["less", "more", "none", "negative"])
def test_pieces_that_are_no_arrays(folder, change):
    """A manifest that is sealed, and describes other pieces than its arrays have."""
    path = folder / "round_00000002" / "manifest.json"
    body = json.loads(json.loads(path.read_text())["body"])
    pieces = body["groups"][0]
    if change == "none":
        body["groups"] = []
    else:
        pieces[-1][1] += {"less": -1, "more": 1, "negative": -2 * pieces[-1][1]}[change]
    text = json.dumps(body)
    seal = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps({"sha256": seal, "body": text}))
    with pytest.raises(ValueError, match="pieces are not its arrays.*round_00000001"):
        checkpoint.restore(folder, template())


def test_a_checkpoint_of_an_earlier_version(folder):
    """Format 2: whole arrays in one piece."""
    path = folder / "round_00000002"
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(plain(state(2)))]
    shutil.rmtree(path / "state")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path / "state", [array for array in arrays if array.size])
    body = json.loads(json.loads((path / "manifest.json").read_text())["body"])
    del body["groups"]
    body |= {"format": 2, "files": checkpoint._file_digests(path)}
    text = json.dumps(body)
    seal = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"sha256": seal, "body": text}))
    _, found, _ = checkpoint.restore(folder, template())
    chex.assert_trees_all_equal(plain(found), plain(state(2)))
