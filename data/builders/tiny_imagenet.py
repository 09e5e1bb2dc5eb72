"""Tiny ImageNet as a tfds builder, because tfds has none.

The data of Stanford's course CS231N (http://cs231n.stanford.edu/tiny-imagenet-200.zip):
200 classes of ImageNet in images of 64x64, 500 train images and 50 validation images of
each. The labels of its own test images are not public, so the validation images are the
test rows. Put the official zip into `--data_dir`, packed or unpacked. The builder reads
each of these images once, and tfds keeps them.
"""

import contextlib
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterator

NAME, SIDE, CLASSES = "tiny_imagenet", 64, 200
FOLDER = "tiny-imagenet-200"
ARCHIVE = f"{FOLDER}.zip"
# The folders that it may be unpacked to, and what is in them
FOLDERS, CONTENT = (FOLDER,), "wnids.txt"
_DAMAGED = zipfile.BadZipFile, zlib.error, EOFError, LookupError, ValueError, OSError


@contextlib.contextmanager
def _opened(source: pathlib.Path) -> Iterator[tuple[list[str], Callable]]:
    """Opens a folder or a zip: (names of train files, a function that reads a file)."""
    if source.is_dir():
        names = sorted(source.glob("train/*/images/*.JPEG"))
        found = [path.relative_to(source).as_posix() for path in names]
        yield found, lambda name: (source / name).read_bytes()
        return
    with zipfile.ZipFile(source) as archive:
        within = f"{FOLDER}/"
        names = [n for n in archive.namelist() if n.startswith(f"{within}train/")]
        found = [n.removeprefix(within) for n in names if n.endswith(".JPEG")]
        yield found, lambda name: archive.read(within + name)


def images(source: pathlib.Path, split: str) -> Iterator[tuple[str, int, bytes]]:
    """Yields (file name, class, JPEG bytes) of a split's images, in the source's order.

    Classes are in the order of their WordNet ids. Those of test images are in the
    annotations of the validation images. Raises ValueError if the source is truncated
    or a file is missing.
    """
    try:
        with _opened(source) as (train, read):
            ids = sorted(read("wnids.txt").decode().split())
            label = {one: number for number, one in enumerate(ids)}
            missing = set(ids).difference(name.split("/")[1] for name in train)
            if missing:
                raise KeyError(f"there are no train images of {min(missing)}")
            if split == "train":
                for name in train:
                    _, one, *_, file = name.split("/")
                    yield file, label[one], read(name)
                return
            for line in read("val/val_annotations.txt").decode().splitlines():
                file, one, *_ = line.split("\t")
                yield file, label[one], read(f"val/images/{file}")
    except _DAMAGED as error:
        raise ValueError(f"{source} cannot be read: {error}; fetch it again") from error
