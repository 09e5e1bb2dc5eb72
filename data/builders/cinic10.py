"""CINIC-10 as a tfds builder, because tfds has none.

Darlow, Crowley, Antoniou, Storkey: "CINIC-10 is not ImageNet or CIFAR-10",
https://arxiv.org/abs/1810.03505. The official archive `CINIC-10.tar.gz` holds
`train/<class>/*.png`, `valid/...` and `test/...`, 90,000 images each. Put it into
`--data_dir`, packed or unpacked. The builder reads each train and test image once, and
tfds keeps them.
"""

import pathlib
import tarfile
from collections.abc import Iterator
from typing import Any

from data import builders

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
SIDE = 32
ARCHIVE = "CINIC-10.tar.gz"
NAME = "cinic10"


def find(data_dir: str) -> pathlib.Path | None:
    """The official archive or folder in `data_dir`, or None."""
    root = pathlib.Path(data_dir or ".")
    for folder in (root, root / "CINIC-10", root / "cinic-10", root / "cinic10"):
        if (folder / "train" / CLASSES[0]).is_dir():
            return folder
    return root / ARCHIVE if (root / ARCHIVE).is_file() else None


def images(source: pathlib.Path, split: str) -> Iterator[tuple[str, str, bytes]]:
    """Yields (class, file name, PNG bytes) of a split's images, in the source's order.

    Raises ValueError if the archive is truncated.
    """
    if source.is_dir():
        for path in sorted(source.glob(f"{split}/*/*.png")):
            yield path.parts[-2], path.name, path.read_bytes()
        return
    try:
        with tarfile.open(source, "r|*") as archive:
            for member in archive:
                parts = pathlib.PurePosixPath(member.name).parts
                is_image = member.isfile() and member.name.endswith(".png")
                if is_image and len(parts) > 2 and parts[-3] == split:
                    yield parts[-2], parts[-1], archive.extractfile(member).read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{source} cannot be read: {error}; fetch it again") from error


def builder(data_dir: str, source: pathlib.Path | None) -> Any:
    """Makes the tfds builder, which prepares data from `source` once and keeps it."""

    def examples(split: str) -> Iterator[tuple[str, str, bytes]]:
        for label, name, png in images(source, split):
            if label in CLASSES:
                yield f"{label}/{name}", label, png

    return builders.of_images(NAME, __doc__, SIDE, CLASSES, examples, data_dir)
