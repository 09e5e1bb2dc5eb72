"""Folders of images as data sets."""

import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from data import images, loaders, memory

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


def deep(path):
    """Writes an image of 2x2 pixels with 16 bits a channel, which pillow cuts to 8."""
    if path.suffix == ".ppm":
        path.write_bytes(b"P6 2 2 65535\n" + bytes(24))
        return

    def chunk(kind, data):
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(12)) * 2)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", rows), chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def test_pixels_of_16_bits(tmp_path):
    """5 of red, 6 of green and 5 of blue, of which none is lost."""
    head = struct.pack("<IiiHHIIiiII", 40, 2, 1, 1, 16, 3, 4, 0, 0, 0, 0)
    head += struct.pack("<III", 0xF800, 0x07E0, 0x001F)
    pixels = struct.pack("<HH", 0xF800, 0x001F)
    start = struct.pack("<2sIHHI", b"BM", 14 + len(head) + 4, 0, 0, 14 + len(head))
    (tmp_path / "one.bmp").write_bytes(start + head + pixels)
    found = images.read(tmp_path / "one.bmp", images.pixels_of)
    assert found.tolist() == [[[255, 0, 0], [0, 0, 255]]]


@pytest.mark.parametrize("suffix", ["png", "ppm"])
def test_colours_of_16_bits(tmp_path, suffix):
    for kind in "ab":
        (tmp_path / kind).mkdir()
        deep(tmp_path / kind / f"1.{suffix}")
    with pytest.raises(ValueError, match="it has 16 bits a channel; save it with 8"):
        loaders.load(f"images:{tmp_path}", "")


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


@pytest.mark.parametrize("owners", [("",), ("bern", "genf")])
def test_folders_of_a_split(tmp_path, owners):
    """Over classes, or over owners: train, official test and validation rows."""
    for shade, (owner, split) in enumerate(
        (owner, split) for owner in owners for split in ("train", "Test", "validation")
    ):
        for name in ("cat", "dog"):
            folder = tmp_path / split / owner / name
            folder.mkdir(parents=True)
            Image.fromarray(np.full((4, 4), shade, np.uint8)).save(folder / "one.png")
    found, each = loaders.load(f"images:{tmp_path}", ""), 2 * len(owners)
    assert (found.num_train, found.num_test, found.num_val) == (each, each, each)
    assert found.classes == ("cat", "dog")
    kind = found.image[:, 0, 0, 0] % 3
    np.testing.assert_array_equal(kind, np.repeat([0, 1, 2], each))
    assert found.owners == (owners if len(owners) > 1 else None)
    if found.owners:
        np.testing.assert_array_equal(found.client, np.tile([0, 0, 1, 1], 3))


def tops(root, *names, depth=3):
    """A folder whose first folders have these names."""
    for name in names:
        for kind in ("cat", "dog") if depth == 3 else ("",):
            folder = root / name / kind
            folder.mkdir(parents=True)
            Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / "one.png")
    return f"images:{root}"


@pytest.mark.parametrize(
    "names",
    [("test_01", "test_02"), ("ann_train", "bob"), ("train", "extra"), ("images", "x")],
)
def test_owners_whose_names_are_like_splits(tmp_path, names):
    """Neither all of them nor different splits."""
    found = loaders.load(tops(tmp_path, *names), "")
    assert found.owners == tuple(sorted(names))


@pytest.mark.parametrize(
    "depth, names, words",
    [
        (3, ("Train", "dev"), "look like splits and not like owners .Train, dev"),
        (3, ("seg_train", "seg_test"), "look like splits and not like owners"),
        (3, ("x_train", "y_train", "x_test"), "look like splits and not like owners"),
        (
            3,
            ("images", "masks"),
            "look like images and their masks and not like owners",
        ),
        (2, ("train", "test"), "look like splits and not like classes .test, train"),
        (2, ("seg_train", "seg_test"), "look like splits and not like classes"),
        (2, ("train2017", "val2017"), "look like splits and not like classes"),
    ],
)
def test_folders_of_downloads_are_refused(tmp_path, depth, names, words):
    """They would be clients or classes."""
    with pytest.raises(ValueError, match=words):
        loaders.load(tops(tmp_path, *names, depth=depth), "")


def test_classes_whose_names_are_like_splits(tmp_path):
    """A train is also a vehicle."""
    found = loaders.load(tops(tmp_path, "train", "test_tube", depth=2), "")
    assert found.classes == ("test_tube", "train")


def test_left_overs_of_archives_are_not_read(tmp_path):
    """What lies beside them is then no owner, which a note says."""
    found = loaders.load(tops(tmp_path, "mine", "__MACOSX"), "")
    assert found.client is None and found.classes == ("cat", "dog")
    assert found.notes[1:] == ("the one folder mine over the classes is not an owner",)


def test_links_to_images(tmp_path):
    """Twice in a class is said, in two classes it is refused, also by a hard link."""
    name = write(tmp_path, a__1_png=picture(), b__1_png=picture())
    (tmp_path / "b" / "2.png").symlink_to("1.png")
    found = loaders.load(name, "")
    assert found.notes[1:] == ("images that are links to others: b/2.png is b/1.png",)
    os.link(tmp_path / "a" / "1.png", tmp_path / "b" / "3.png")
    with pytest.raises(ValueError, match="a/1.png and b/3.png are one file .* two lab"):
        loaders.load(name, "")


def test_folders_that_are_links(tmp_path):
    """They are read, and their other files are counted and not named."""
    name = write(tmp_path / "mine", a__1_png=picture(), b__1_png=picture())
    write(tmp_path / "theirs", c__1_png=picture())
    (tmp_path / "theirs" / "c" / "secret.txt").write_text("hello")
    (tmp_path / "mine" / "b" / "notes.txt").write_text("hello")
    (tmp_path / "mine" / "c").symlink_to(tmp_path / "theirs" / "c")
    found = loaders.load(name, "")
    assert found.classes == ("a", "b", "c")
    left_out = "files that are not images are left out: b/notes.txt and 1 in folders"
    assert found.notes[1:] == (f"{left_out} that are links",)


def test_sizes_are_asked_before_pixels(tmp_path, monkeypatch):
    """Of all images, and no pixel is decoded."""
    monkeypatch.setattr(images, "pixels_of", None)
    pair = {"a__1_png": picture(width=5000), "b__1_png": picture(width=5000)}
    name = write(tmp_path, **pair)
    with pytest.raises(
        ValueError, match="2 images of 5000x3 pixels, at most 4096x4096"
    ):
        loaders.load(name, "")
    name = write(tmp_path, a__1_png=picture(), b__1_png=picture())
    monkeypatch.setattr(memory, "available_bytes", lambda: 40)
    with pytest.raises(
        ValueError, match="2 images of 4x3 pixels need 0.0 GiB of memor"
    ):
        loaders.load(name, "")


def test_formats_are_named(tmp_path):
    """What another decoder of pillow would open, by whatever suffix."""
    name = write(tmp_path, a__1_png=picture(), b__1_png=picture())
    picture("L").save(tmp_path / "b" / "1.png", "PCX")
    with pytest.raises(ValueError, match="b/1.png cannot be read: it is not an image"):
        loaders.load(name, "")
