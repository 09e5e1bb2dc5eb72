"""tfds builders for data sets that tfds does not have."""

import io
import pathlib
import types
from typing import Any

import numpy as np

from data import files, images


def find(ours: types.ModuleType, data_dir: str) -> pathlib.Path | None:
    """Returns the official archive or folder of `ours` in `data_dir`, or None."""
    root = pathlib.Path(data_dir or ".")
    for folder in (root, *(root / name for name in ours.FOLDERS)):
        content = folder / ours.CONTENT
        if content.is_file() if content.suffix else content.is_dir():
            return folder
    return root / ours.ARCHIVE if (root / ours.ARCHIVE).is_file() else None


def of_images(
    ours: types.ModuleType, source: pathlib.Path | None, data_dir: str
) -> Any:
    """Makes a tfds builder of colour images, which prepares its data once and keeps it.

    Args:
        ours: A module with NAME, SIDE, CLASSES (names or a number), ARCHIVE, FOLDERS,
            CONTENT (a file, or a folder without suffix), a docstring as description,
            and `images(source, split)`, which yields (key, label, compressed image).
        source: The archive or folder that it reads, None = only already prepared data.
        data_dir: The folder of prepared data, "" = tfds's own.
    """
    import tensorflow_datasets as tfds  # takes seconds to import

    kind = "num_classes" if isinstance(ours.CLASSES, int) else "names"
    # Registered builders must be unique, but this class is defined for each source.
    with tfds.core.registered.skip_registration():

        class Images(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                shape = ours.SIDE, ours.SIDE, 3
                features = {
                    "image": tfds.features.Tensor(shape=shape, dtype=np.uint8),
                    "label": tfds.features.ClassLabel(**{kind: ours.CLASSES}),
                }
                return tfds.core.DatasetInfo(
                    builder=self,
                    description=ours.__doc__,
                    features=tfds.features.FeaturesDict(features),
                    supervised_keys=("image", "label"),
                )

            def _split_generators(self, dl_manager):
                return {
                    split: self._generate_examples(split) for split in ("train", "test")
                }

            def _generate_examples(self, split):
                for key, label, content in ours.images(source, split):
                    with files.named(f"{source}: {key}"):
                        image = _decoded(content, ours.SIDE)
                    yield key, {"image": image, "label": label}

    Images.name = ours.NAME
    return Images(data_dir=data_dir or None, file_format="array_record")


def _decoded(content: bytes, side: int) -> np.ndarray:
    """Decodes an image as uint8 [side, side, 3]; some images of ImageNet are gray.

    Raises ValueError, whose message is a phrase, if it is damaged or of another size.
    """
    from PIL import Image  # takes long to import

    try:
        opened = Image.open(io.BytesIO(content), formats=images.FORMATS)
        image = np.asarray(opened.convert("RGB"))
    except (OSError, SyntaxError) as error:  # of damaged PNG files too
        raise ValueError("it is not an image, or it is damaged") from error
    if image.shape != (side, side, 3):
        wide, high = opened.size
        raise ValueError(f"it has {wide}x{high} pixels, {side}x{side} are expected")
    return image
