"""CINIC-10 as a tfds builder: tfds has none, and the images are 270,000 small PNGs.

Darlow, Crowley, Antoniou, Storkey: "CINIC-10 is not ImageNet or CIFAR-10",
https://arxiv.org/abs/1810.03505. The official archive `CINIC-10.tar.gz` holds
`train/<class>/*.png`, `valid/...` and `test/...`, 90,000 images each. It is put into
`--data_dir` by hand, packed or unpacked; the builder reads it once and tfds keeps it.
"""

from __future__ import annotations

import io
import pathlib
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

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
SPLITS = {"train": "train", "validation": "valid", "test": "test"}
ARCHIVE = "CINIC-10.tar.gz"
NAME = "cinic10"


def find(data_dir: str) -> pathlib.Path | None:
    """The official archive or folder in `data_dir`, or None."""
    root = pathlib.Path(data_dir or ".")
    for folder in (root, root / "CINIC-10", root / "cinic-10", root / "cinic10"):
        if (folder / "train" / CLASSES[0]).is_dir():
            return folder
    return root / ARCHIVE if (root / ARCHIVE).is_file() else None


def images(source: pathlib.Path) -> Iterator[tuple[str, str, str, bytes]]:
    """(folder, class, file name, PNG bytes) of every image, in the source's order.

    Raises:
        ValueError: the archive is cut off.
    """
    if source.is_dir():
        for path in sorted(source.glob("*/*/*.png")):
            yield path.parts[-3], path.parts[-2], path.name, path.read_bytes()
        return
    try:
        with tarfile.open(source, "r|*") as archive:
            for member in archive:
                parts = pathlib.PurePosixPath(member.name).parts
                if member.isfile() and len(parts) > 2 and parts[-1].endswith(".png"):
                    file = archive.extractfile(member)
                    yield parts[-3], parts[-2], parts[-1], file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{source} cannot be read: {error}; fetch it again") from error


def builder(data_dir: str, source: pathlib.Path | None) -> Any:
    """The tfds builder: prepared data lie in `data_dir`, made from `source` once."""
    import tensorflow_datasets as tfds  # seconds to import: only its users pay

    # Registered builders must be unique; this one is made anew for each source.
    with tfds.core.registered.skip_registration():

        class Cinic10(tfds.core.GeneratorBasedBuilder):
            """CINIC-10: CIFAR-10's classes, images of CIFAR-10 and ImageNet."""

            VERSION = tfds.core.Version("1.0.0")
            name = NAME

            def _info(self):
                return tfds.core.DatasetInfo(
                    builder=self,
                    description=__doc__,
                    features=tfds.features.FeaturesDict(
                        {
                            "image": tfds.features.Tensor(
                                shape=(32, 32, 3), dtype=np.uint8
                            ),
                            "label": tfds.features.ClassLabel(names=CLASSES),
                        }
                    ),
                    supervised_keys=("image", "label"),
                )

            def _split_generators(self, dl_manager):
                return {split: self._generate_examples(split) for split in SPLITS}

            def _generate_examples(self, split):
                for folder, label, name, png in images(source):
                    if folder == SPLITS[split] and label in CLASSES:
                        yield f"{label}/{name}", {"image": _decode(png), "label": label}

    return Cinic10(data_dir=data_dir or None, file_format="array_record")


def _decode(png: bytes) -> np.ndarray:
    """A PNG as uint8 [32, 32, 3]; some of the ImageNet images are gray."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
