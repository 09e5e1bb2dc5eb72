"""tfds builders for data sets that tfds does not have."""

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from data import images


def of_images(
    name: str,
    description: str,
    side: int,
    classes: int | Sequence[str],
    examples: Callable[[str], Iterator[tuple[str, Any, bytes]]],
    data_dir: str,
) -> Any:
    """Makes a tfds builder of colour images, which prepares its data once and keeps it.

    Args:
        classes: The names of the classes, or their number.
        examples: `split -> (key, label, compressed image)`, for `train` and `test`.
        data_dir: The folder of prepared data, "" = tfds's own.
    """
    import tensorflow_datasets as tfds  # takes seconds to import

    named = {"num_classes": classes} if isinstance(classes, int) else {"names": classes}
    # Registered builders must be unique, but this class is defined for each source.
    with tfds.core.registered.skip_registration():

        class Images(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version("1.0.0")

            def _info(self):
                image = tfds.features.Tensor(shape=(side, side, 3), dtype=np.uint8)
                label = tfds.features.ClassLabel(**named)
                return tfds.core.DatasetInfo(
                    builder=self,
                    description=description,
                    features=tfds.features.FeaturesDict(
                        {"image": image, "label": label}
                    ),
                    supervised_keys=("image", "label"),
                )

            def _split_generators(self, dl_manager):
                return {
                    split: self._generate_examples(split) for split in ("train", "test")
                }

            def _generate_examples(self, split):
                for key, label, content in examples(split):
                    yield key, {"image": _decoded(content), "label": label}

    Images.name = name
    return Images(data_dir=data_dir or None, file_format="array_record")


def _decoded(content: bytes) -> np.ndarray:
    """Decodes an image as uint8 [H, W, 3]; some images of ImageNet are gray."""
    from PIL import Image  # takes long to import

    opened = Image.open(io.BytesIO(content), formats=images.FORMATS)
    return np.asarray(opened.convert("RGB"))
