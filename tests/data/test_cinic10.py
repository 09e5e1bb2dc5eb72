"""CINIC-10 from a small archive and from its folder, through our tfds builder."""

import bz2
import gzip
import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from data import loaders
from data.builders import cinic10


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """An archive of two images a class and split; one gray; colours say what it is."""
    folder = tmp_path_factory.mktemp("official")
    with tarfile.open(folder / cinic10.ARCHIVE, "w:gz") as file:
        for number, split in enumerate(("train", "valid", "test")):
            for label, name in enumerate(cinic10.CLASSES):
                for copy in range(2):
                    gray = label == 3 and copy == 1
                    color = 10 * label if gray else (10 * label, number, copy)
                    image = Image.new("L" if gray else "RGB", (32, 32), color)
                    buffer = io.BytesIO()
                    image.save(buffer, "png")
                    member = tarfile.TarInfo(f"CINIC-10/{split}/{name}/{copy}.png")
                    member.size = len(buffer.getvalue())
                    file.addfile(member, io.BytesIO(buffer.getvalue()))
    return folder


def check(source):
    """Labels, splits and pixels are those of the archive."""
    assert source.image.shape == (40, 32, 32, 3) and source.image.dtype == np.uint8
    assert source.num_train == 20 and source.num_classes == 10
    np.testing.assert_array_equal(source.image[:, 0, 0, 0], 10 * source.label)
    assert set(source.image[:20, 5, 5, 1]) == {0, 30}  # train, and the gray one
    assert set(source.image[20:, 5, 5, 1]) == {2, 30}  # test; valid is left out
    np.testing.assert_array_equal(np.bincount(source.label), np.full(10, 4))


def test_reads_the_official_archive(archive):
    """Packed; a second call finds the prepared data without the archive."""
    first = loaders.load("cinic10", str(archive))
    check(first)
    assert (
        "and 90,000 train and 90,000 in the official files; put the others"
        in first.notes[0]
    )
    (archive / cinic10.ARCHIVE).rename(archive / "away.tar.gz")
    second = loaders.load("cinic10", str(archive))
    (archive / "away.tar.gz").rename(archive / cinic10.ARCHIVE)
    np.testing.assert_array_equal(first.image, second.image)


def test_reads_the_unpacked_folder(archive, tmp_path):
    """The same images from the folder."""
    with tarfile.open(archive / cinic10.ARCHIVE) as file:
        file.extractall(tmp_path, filter="data")
    check(loaders.load("cinic10", str(tmp_path)))


def test_an_archive_that_was_packed_otherwise(archive, tmp_path):
    """By bzip2, or not at all, under the same name."""
    whole = gzip.decompress((archive / cinic10.ARCHIVE).read_bytes())
    for name, content in (("bz", bz2.compress(whole)), ("tar", whole)):
        (tmp_path / name).mkdir()
        (tmp_path / name / cinic10.ARCHIVE).write_bytes(content)
        check(loaders.load("cinic10", str(tmp_path / name)))


def test_missing_or_truncated_is_one_line(archive, tmp_path):
    """No archive, or half of one: a line that says what to do."""
    with pytest.raises(ValueError, match="CINIC-10.tar.gz.*--data_dir") as caught:
        loaders.load("cinic10", str(tmp_path))
    assert "\n" not in str(caught.value)
    whole = (archive / cinic10.ARCHIVE).read_bytes()
    for cut in (whole[: len(whole) // 2], whole[:-8], whole[:-8] + bytes(8)):
        (tmp_path / cinic10.ARCHIVE).write_bytes(cut)
        with pytest.raises(ValueError, match="fetch it again"):
            loaders.load("cinic10", str(tmp_path))


@pytest.mark.parametrize(
    "content, reason",
    [(b"text", "it is not an image, or"), ((31, 32), "it has 31x32 pixels, 32x32 are")],
)
def test_an_image_of_something_else(archive, tmp_path, content, reason):
    """It is named, in one line."""
    with tarfile.open(archive / cinic10.ARCHIVE) as file:
        file.extractall(tmp_path, filter="data")
    path = tmp_path / "CINIC-10" / "test" / "cat" / "1.png"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        Image.new("RGB", content).save(path)
    with pytest.raises(ValueError, match=f"CINIC-10: cat/1.png: {reason}") as caught:
        loaders.load("cinic10", str(tmp_path))
    assert "\n" not in str(caught.value)
