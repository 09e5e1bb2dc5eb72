"""A data set as numpy arrays, and its way onto the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Dataset(NamedTuple):
    """All examples of a data set; the official test rows come last.

    Attributes:
        image: uint8 or float [N, ...].
        label: int32[N].
        num_train: Rows of the official train split; the rest is the test split.
        num_classes: Y.
        client: int32[N], the natural owner of each row, or None.
    """

    image: np.ndarray
    label: np.ndarray
    num_train: int
    num_classes: int
    client: np.ndarray | None = None


def rotated(source: Dataset, angles: int) -> Dataset:
    """Every image at one of `angles` right angles; angle and class are a new class.

    The class is angle * Y + label. Which image has which angle is drawn once and for
    all, so that it is the same in every run.

    Args:
        source: Its images are square, [N, H, H, ...].
        angles: 1 to 4, of 0, 90, 180 and 270 degrees.

    Raises:
        ValueError: the images are not square.
    """
    image = source.image
    if image.ndim < 3 or image.shape[1] != image.shape[2]:
        raise ValueError(
            f"--rotate_classes={angles} turns square images, these have the shape "
            f"{list(image.shape[1:])}; leave it away"
        )
    angle = np.random.default_rng(0).integers(angles, size=len(image))
    turned = np.empty_like(image)
    for number in range(angles):
        turned[angle == number] = np.rot90(image[angle == number], number, (1, 2))
    label = (angle * source.num_classes + source.label).astype(np.int32)
    return source._replace(
        image=turned, label=label, num_classes=angles * source.num_classes
    )


def fitted(source: Dataset, size: int, channels: int) -> Dataset:
    """Images with a black margin around them, and gray ones in several channels.

    Args:
        source: Its images are [N, H, W, C].
        size: Side of the new ones, 0 = as they are. Of an odd number of missing rows
            the larger half comes behind.
        channels: Channels of the new ones, 0 = as they are.

    Raises:
        ValueError: images are larger, are not gray, or are none.
    """
    image = source.image
    if not size and not channels:
        return source
    shape = list(image.shape[1:])
    if image.ndim != 4:
        given = [f"--image_size={size}"] * (size > 0)
        given += [f"--image_channels={channels}"] * (channels > 0)
        raise ValueError(
            f"{' '.join(given)}: the examples are no images, but of shape {shape}; "
            "leave it away"
        )
    if size and max(shape[:2]) > size:
        raise ValueError(
            f"--image_size={size} is smaller than the images, which are of shape "
            f"{shape}; give at least {max(shape[:2])}, or 0"
        )
    if channels and shape[2] not in (1, channels):
        raise ValueError(
            f"--image_channels={channels}: the images have {shape[2]}, only gray ones "
            "can be repeated; leave it away"
        )
    if size:
        missing = [size - side for side in shape[:2]]
        pads = [(rows // 2, rows - rows // 2) for rows in missing]
        image = np.pad(image, ((0, 0), *pads, (0, 0)))
    if channels and channels != shape[2]:
        image = np.repeat(image, channels, axis=-1)
    return source._replace(image=image)


NORMALIZATIONS = ("none", "channel", "global", "pixel", "half")


def normalization(image: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(mean, scale) f32, broadcastable to an example, for `(image - mean) * scale`.

    Args:
        image: [N, ...]; integer images count as 0..255, floats as they are.
        kind: `none` divides integers by 255 only; `channel` standardises the last
            axis, `global` all values together and `pixel` every position, with .001
            added to the standard deviation of the latter two (the CDKT code);
            `half` is (x - .5) / .5.
    """
    unit = 255.0 if np.issubdtype(image.dtype, np.integer) else 1.0
    if kind == "none":
        return np.zeros((), np.float32), np.float32(1 / unit)
    if kind == "half":
        return np.float32(unit / 2), np.float32(2 / unit)
    axes = {
        "channel": tuple(range(image.ndim - 1)),
        "global": tuple(range(image.ndim)),
        "pixel": (0,),
    }[kind]
    # Sums of slices in float64: no float copy of the whole table.
    total = np.zeros(np.mean(image[:1], axis=axes, dtype=np.float64).shape)
    square = np.zeros_like(total)
    for begin in range(0, len(image), 4096):
        part = image[begin : begin + 4096].astype(np.float64)
        total += part.sum(axis=axes)
        square += (part**2).sum(axis=axes)
    count = image.size / max(total.size, 1)
    mean = total / count
    std = np.sqrt(np.maximum(square / count - mean**2, 0))
    margin = unit * (0.001 if kind in ("global", "pixel") else 1e-7)
    return mean.astype(np.float32), (1 / (std + margin)).astype(np.float32)
