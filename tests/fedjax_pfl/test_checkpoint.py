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
import pytest

from fedjax_pfl import checkpoint


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
    """Keys as numbers, so that trees can be compared."""
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


def test_digest():
    """Of names, shapes, dtypes and bits, as it has been since the first runs."""
    tree = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.zeros((), "f4")}
    total = hashlib.sha256()
    for name, array in (("['a']", tree["a"]), ("['b']", tree["b"])):
        bits = hashlib.sha256(array.tobytes()).hexdigest()
        total.update(f"{name} {array.shape} {array.dtype} {bits}\n".encode())
    assert checkpoint.digest(tree) == total.hexdigest()
    assert checkpoint.digest({"a": tree["a"].T, "b": tree["b"]}) != total.hexdigest()
