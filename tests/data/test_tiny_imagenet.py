"""Tiny ImageNet from a small archive and from its folder, through our tfds builder."""

import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from data import loaders
from data.builders import tiny_imagenet
from launch import build
from launch.config import resolve

# Not in the order of their numbers, which is that of classes
IDS = ("n03", "n01", "n02")


def jpeg(red, gray=False):
    """An image of one colour."""
    color = red if gray else (red, 0, 0)
    image = Image.new("L" if gray else "RGB", (64, 64), color)
    image.save(buffer := io.BytesIO(), "jpeg", quality=95)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """An archive of two train images and one validation image of three classes.

    Class c has red 80 c, a second image is gray, and test images have no label.
    """
    folder = tmp_path_factory.mktemp("official")
    with zipfile.ZipFile(folder / tiny_imagenet.ARCHIVE, "w") as file:

        def put(name, content):
            file.writestr(f"{tiny_imagenet.FOLDER}/{name}", content)

        put("wnids.txt", "\n".join(IDS) + "\n")
        put("words.txt", "n01\tone\n")
        lines = []
        for number, one in enumerate(IDS):
            red = 80 * (int(one[1:]) - 1)
            put(f"train/{one}/{one}_boxes.txt", f"{one}_0.JPEG\t0\t0\t63\t63\n")
            for copy in range(2):
                content = jpeg(red, gray=copy == 1)
                put(f"train/{one}/images/{one}_{copy}.JPEG", content)
            put(f"val/images/val_{number}.JPEG", jpeg(red))
            lines.append(f"val_{number}.JPEG\t{one}\t0\t0\t63\t63\n")
            put(f"test/images/test_{number}.JPEG", jpeg(7))
        put("val/val_annotations.txt", "".join(lines))
    return folder


def check(source):
    """Labels, splits and pixels are those of the archive."""
    assert source.image.shape == (9, 64, 64, 3) and source.image.dtype == np.uint8
    assert source.num_train == 6 and source.num_classes == 200
    assert np.abs(source.image[:, 0, 0, 0] - 80 * source.label).max() <= 3
    np.testing.assert_array_equal(np.bincount(source.label[:6]), [2, 2, 2])
    np.testing.assert_array_equal(np.sort(source.label[6:]), [0, 1, 2])
    blue = source.image[:6, 9, 9, 2].astype(int)
    is_gray = np.abs(blue - 80 * source.label[:6]) <= 3
    assert is_gray[source.label[:6] > 0].sum() == 2


def test_reads_the_official_archive(archive):
    """Packed; a second call finds the prepared data without the archive."""
    first = loaders.load("tiny_imagenet", str(archive))
    check(first)
    (archive / tiny_imagenet.ARCHIVE).rename(archive / "away.zip")
    second = loaders.load("tiny_imagenet", str(archive))
    (archive / "away.zip").rename(archive / tiny_imagenet.ARCHIVE)
    np.testing.assert_array_equal(first.image, second.image)


def test_reads_the_unpacked_folder(archive, tmp_path):
    """The same images from the folder."""
    with zipfile.ZipFile(archive / tiny_imagenet.ARCHIVE) as file:
        file.extractall(tmp_path)
    check(loaders.load("tiny_imagenet", str(tmp_path)))


def test_missing_or_truncated_is_one_line(archive, tmp_path):
    """No archive, half of one, or one without a file: a line that says what to do."""
    with pytest.raises(ValueError, match="tiny-imagenet-200.zip.*--data_dir") as caught:
        loaders.load("tiny_imagenet", str(tmp_path))
    assert "\n" not in str(caught.value)
    whole = (archive / tiny_imagenet.ARCHIVE).read_bytes()
    path = tmp_path / tiny_imagenet.ARCHIVE
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="fetch it again"):
        loaders.load("tiny_imagenet", str(tmp_path))
    with (
        zipfile.ZipFile(path, "w") as file,
        zipfile.ZipFile(archive / tiny_imagenet.ARCHIVE) as official,
    ):
        for name in official.namelist():
            if "annotations" not in name:
                file.writestr(name, official.read(name))
    with pytest.raises(ValueError, match="cannot be read.*--data_dir"):
        loaders.load("tiny_imagenet", str(tmp_path))


def test_depthfl_on_it(archive):
    """Its preset crops and flips 64x64 images, whose model is the ResNet-34."""
    given = {"dataset": "tiny_imagenet", "data_dir": str(archive)}
    options = {
        "algo": "depthfl",
        "num_clients": 1,
        "levels": "maximum",
        "min_examples": 2,
        **given,
    }
    made = build.experiment(**options, model_width=0.05, devices=1)
    assert (made.config.model, made.config.augment) == ("depth_resnet34", "crop_flip")
    assert made.config.test_split == "official"
    assert made.task.example_shape == (64, 64, 3)
    source = loaders.load("tiny_imagenet", str(archive))
    other = given | {"algo": "heterofl"}
    config, _ = resolve.configure(other)
    assert resolve.resolve(config, source, other).model == "resnet34"
