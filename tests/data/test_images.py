"""Folders of images as data sets."""

import os
import sys

import numpy as np
import pytest
from PIL import Image

from data import loaders

GEN = np.random.default_rng(0)


def picture(mode="RGB", width=4, height=3):
    """A small picture of a mode."""
    pixels = GEN.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def write(root, **pictures):
    """Writes pictures by path, with two underscores for a slash and one for a dot."""
    for name, one in pictures.items():
        path = root / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        one.save(path)
    return f"images:{root}"


def test_folders_of_classes(tmp_path):
    """Rows in the order of the paths; other files are named, hidden ones are not."""
    made = {
        f"{kind}__{n}_png": picture() for kind in ("pear", "apple") for n in range(2)
    }
    name = write(tmp_path, **made)
    (tmp_path / "pear" / "notes.txt").write_text("hello")
    (tmp_path / ".DS_Store").write_text("hello")
    found = loaders.load(name, "")
    wanted = [made[n] for n in sorted(made)]
    np.testing.assert_array_equal(found.image, np.stack([np.array(o) for o in wanted]))
    assert found.image.dtype == np.uint8 and found.image.shape == (4, 3, 4, 3)
    assert found.classes == ("apple", "pear") and found.client is None
    np.testing.assert_array_equal(found.label, [0, 0, 1, 1])
    assert found.notes[1:] == (
        "files that are not images are left out: pear/notes.txt",
    )


def test_folders_of_owners(tmp_path):
    """A class may be missing where an owner has none of it."""
    paths = ("ann__a__1_png", "ann__b__1_png", "bob__b__1_png", "cy__a__1_png")
    found = loaders.load(write(tmp_path, **{path: picture() for path in paths}), "")
    assert found.owners == ("ann", "bob", "cy") and found.classes == ("a", "b")
    np.testing.assert_array_equal(found.client, [0, 0, 1, 2])
    np.testing.assert_array_equal(found.label, [0, 1, 1, 0])


@pytest.mark.parametrize(
    "mode, suffix, channels",
    [
        ("1", "png", 1),
        ("L", "png", 1),
        ("L", "pgm", 1),
        ("LA", "png", 1),
        ("P", "gif", 3),
        ("RGBA", "png", 3),
        ("RGB", "bmp", 3),
        ("RGB", "webp", 3),
        ("CMYK", "jpg", 3),
    ],
)
def test_modes(tmp_path, mode, suffix, channels):
    """Gray or RGB; an opaque channel of transparency is left out."""
    pair = {f"{kind}__1_{suffix}": picture(mode) for kind in "ab"}
    found = loaders.load(write(tmp_path, **pair), "")
    assert found.image.shape == (2, 3, 4, channels)
    if suffix != "webp" and mode in ("L", "RGB"):
        wanted = np.array(pair[f"a__1_{suffix}"]).reshape(3, 4, channels)
        np.testing.assert_array_equal(found.image[0], wanted)


def test_gray_beside_colour(tmp_path):
    """Gray images become RGB, and a line says so."""
    gray = picture("L")
    name = write(tmp_path, a__1_png=gray, a__2_png=picture(), b__1_png=picture("P"))
    found = loaders.load(name, "")
    np.testing.assert_array_equal(found.image[0], np.stack([np.array(gray)] * 3, -1))
    assert found.notes[1] == "1 gray images among those in colour became RGB"


def clear(alpha):
    """A picture of one transparency."""
    out = picture("RGBA")
    out.putalpha(alpha)
    return out


@pytest.mark.parametrize(
    "pictures, words",
    [
        ({}, "there are no images .*.png"),
        ({"a__1_png": picture()}, "the class folder holds one label only, a"),
        ({"1_png": picture()}, "must be in class/file or owner/class/file, .* 1.png"),
        (
            {"a__1_png": picture(), "b__c__1_png": picture()},
            "all of them alike; there is b/c/1.png and a/1.png",
        ),
        ({"a__b__c__1_png": picture()}, "alike; there is a/b/c/1.png"),
        (
            {"a__1_png": picture(), "b__1_png": picture(width=5)},
            "a/1.png has 4x3 pixels and b/1.png 5x3; resize",
        ),
        (
            {"a__1_png": picture(), "b__1_png": clear(254)},
            "b/1.png cannot be read: it has transparent pixels",
        ),
        (
            {"a__1_png": Image.fromarray(np.zeros((3, 4), np.uint16))},
            "a/1.png cannot be read: its pixels are of the mode I;16",
        ),
    ],
)
def test_folders_that_do_not_fit(tmp_path, pictures, words):
    """One line that begins with the flag and names the file."""
    name = write(tmp_path, **pictures)
    with pytest.raises(ValueError, match=words) as error:
        loaders.load(name, "")
    assert str(error.value).startswith(f"--dataset={name}: ")
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    """Damaged, cut off, animated, a pipe."""
    large = picture(width=90, height=90)
    name = write(tmp_path, a__1_png=large, b__1_png=large)
    path = tmp_path / "b" / "1.png"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ValueError, match="b/1.png cannot be read: .*truncated"):
        loaders.load(name, "")
    path.write_bytes(b"hello")
    with pytest.raises(ValueError, match="b/1.png cannot be read: it is not an image"):
        loaders.load(name, "")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="b/1.png cannot be read: is a pipe"):
        loaders.load(name, "")
    path.unlink()
    frames = [Image.fromarray(np.full((90, 90), 90 * n, np.uint8)) for n in range(3)]
    moving = tmp_path / "b" / "1.gif"
    frames[0].save(moving, save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match="b/1.gif cannot be read: it has 3 frames"):
        loaders.load(name, "")


def test_no_such_folder(tmp_path):
    """Nothing there, or a file."""
    (tmp_path / "file").write_text("hello")
    for name, words in (("none", "it is not there"), ("file", "it is a file")):
        with pytest.raises(ValueError, match=words):
            loaders.load(f"images:{tmp_path}/{name}", "")


def test_without_pillow(tmp_path, monkeypatch):
    """One line says what to install."""
    name = write(tmp_path, a__1_png=picture(), b__1_png=picture())
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match="needs the package pillow: pip install"):
        loaders.load(name, "")


def test_splits_are_no_owners(tmp_path):
    """The usual folders of a download are not two clients."""
    for split in ("train", "Test"):
        for name in ("cat", "dog"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / "one.png")
    with pytest.raises(ValueError, match="look like splits and not like owners .Test"):
        loaders.load(f"images:{tmp_path}", "")
