"""Data sets as numpy arrays, changes of their images, and normalisation."""

from typing import NamedTuple

import numpy as np

from data import labels


class Dataset(NamedTuple):
    """All examples of a data set: train rows, official test rows, validation rows.

    Attributes:
        image: uint8 or float [N, ...], or tokens int32[N, T].
        label: int32[N]; for a text, the tokens again.
        num_train: Rows of the official train split, the first.
        num_classes: Y, or the number of words V.
        client: int32[N], the natural owner of each row, -1 = test and validation rows
            without one, or None.
        classes, owners: Their names, None if they are numbers 0, 1, ...
        notes: Lines about how the data were taken, such as the numbering of labels.
        columns: The column names of a table, in the order of the vectors.
        row: int64[N], each row's number before owners were dropped, None if none were.
        num_val: Rows of the official validation split, the last.
        layout: That of a user's images where `--layout=auto` takes another, "" = none.
    """

    image: np.ndarray
    label: np.ndarray
    num_train: int
    num_classes: int
    client: np.ndarray | None = None
    classes: tuple[str, ...] | None = None
    owners: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    row: np.ndarray | None = None
    num_val: int = 0
    layout: str = ""

    @property
    def num_dealt(self) -> int:
        """Rows of the official train and test split, the first."""
        return len(self.label) - self.num_val

    @property
    def num_test(self) -> int:
        """Rows of the official test split, between the two others."""
        return self.num_dealt - self.num_train

    @property
    def is_text(self) -> bool:
        """Whether examples are rows of tokens, with a label at each position."""
        return self.label.ndim == 2

    @property
    def takes(self) -> str:
        """The kind of examples for a model, see `types.Model`."""
        if self.is_text:
            return "tokens"
        return "labelled tokens" if self.image.dtype == np.int32 else "numbers"


def repeats(source: Dataset, has_test: bool) -> tuple[str, ...]:
    """Lines about official rows that are the train rows again.

    Test rows count if `has_test`, as they are else divided or not used.
    """
    ends = np.cumsum([source.num_train, source.num_test])
    train, test, val = np.split(source.image, ends)
    return tuple(
        f"the {name} rows are the train rows, so that they measure how these are fitted"
        for name, rows in (("test", test), ("validation", val))
        if name != "test" or has_test
        if len(rows) == len(train) and np.array_equal(rows, train)
    )


def num_shared(rows: np.ndarray, others: np.ndarray) -> int:
    """How many of the examples `rows` [N, ...] are one of `others`, in all bits."""
    held = {one.tobytes() for one in rows}
    seen = held.intersection(one.tobytes() for one in others)
    return sum(one.tobytes() in seen for one in rows)


def owner_names(source: Dataset) -> tuple[str, ...]:
    """Returns the name of each owner, which is its number if it has no other."""
    return source.owners or tuple(map(str, range(int(source.client.max()) + 1)))


def with_large_owners(source: Dataset, least: int) -> tuple[Dataset, dict[str, int]]:
    """Drops the rows of owners that have fewer than `least` train rows.

    Returns:
        (the remaining data with owners numbered 0, 1, ... again; the number of rows of
        each dropped owner by name).
    """
    names = owner_names(source)
    size = np.bincount(source.client[: source.num_train], minlength=len(names))
    is_large = size >= least
    dropped = {names[k]: int(size[k]) for k in np.flatnonzero(~is_large)}
    if not dropped:
        return source, dropped
    kept = is_large[source.client] | (source.client < 0)
    number = np.append(np.cumsum(is_large) - 1, -1)
    return source._replace(
        image=source.image[kept],
        label=source.label[kept],
        num_train=int(kept[: source.num_train].sum()),
        client=number[source.client[kept]].astype(np.int32),
        owners=tuple(names[k] for k in np.flatnonzero(is_large)),
        row=np.flatnonzero(kept),
        num_val=int(kept[source.num_dealt :].sum()),
    ), dropped


def with_note_of_empty_classes(source: Dataset) -> Dataset:
    """Adds a note if a class has no row, for example after owners were dropped."""
    names = source.classes or tuple(map(str, range(source.num_classes)))
    count = np.bincount(source.label, minlength=source.num_classes)
    empty = [name for name, rows in zip(names, count, strict=True) if not rows]
    if not empty:
        return source
    line = f"no row is of the class {labels.listed(empty)}, which the models still have"
    return source._replace(notes=(*source.notes, line))


def rotated(source: Dataset, angles: int) -> Dataset:
    """Turns square images [N, H, H, ...] by right angles, which makes new classes.

    The class is angle * Y + label. The angles are the first `angles` (1 to 4) of 0, 90,
    180 and 270 degrees, drawn with a fixed seed so that they are the same in every run.
    Raises ValueError if images are not square.
    """
    image = source.image
    if image.ndim < 3 or image.shape[1] != image.shape[2]:
        raise ValueError(
            f"--rotate_classes={angles} turns square images, these have the shape "
            f"{list(image.shape[1:])}; omit it"
        )
    angle = np.random.default_rng(0).integers(angles, size=len(image))
    turned = np.empty_like(image)
    for number in range(angles):
        turned[angle == number] = np.rot90(image[angle == number], number, (1, 2))
    label = (angle * source.num_classes + source.label).astype(np.int32)
    names = source.classes and tuple(
        f"{name}, {90 * number} degrees"
        for number in range(angles)
        for name in source.classes
    )
    return source._replace(
        image=turned,
        label=label,
        num_classes=angles * source.num_classes,
        classes=names,
    )


def fitted(source: Dataset, size: int, channels: int) -> Dataset:
    """Pads images [N, H, W, C] with black, and repeats gray ones to several channels.

    `size` is the new side and `channels` the new number of channels, 0 = unchanged. The
    larger half of an odd margin is at the end. Raises ValueError if images are larger
    or not gray, or if examples are not images.
    """
    image = source.image
    if not size and not channels:
        return source
    shape = list(image.shape[1:])
    if image.ndim != 4:
        given = [f"--image_size={size}"] * (size > 0)
        given += [f"--image_channels={channels}"] * (channels > 0)
        raise ValueError(
            f"{' '.join(given)}: the examples are not images, but of shape {shape}; "
            "omit it"
        )
    if size and max(shape[:2]) > size:
        raise ValueError(
            f"--image_size={size} is smaller than the images, which are of shape "
            f"{shape}; give at least {max(shape[:2])}, or 0"
        )
    if channels and shape[2] not in (1, channels):
        raise ValueError(
            f"--image_channels={channels}: the images have {shape[2]}, only gray ones "
            "can be repeated; omit it"
        )
    if size:
        missing = [size - side for side in shape[:2]]
        pads = [(rows // 2, rows - rows // 2) for rows in missing]
        image = np.pad(image, ((0, 0), *pads, (0, 0)))
    if channels and channels != shape[2]:
        image = np.repeat(image, channels, axis=-1)
    return source._replace(image=image)


NORMALIZATIONS = ("none", "channel", "global", "pixel", "half", "cifar100")
# Mean and standard deviation of CIFAR-100's train images, as in DepthFL's code
CIFAR100 = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


# What is added to a standard deviation, of bytes 255 times as much
MARGINS = {"channel": 1e-7, "global": 0.001, "pixel": 0.001}


def normalization(image: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns f32 (mean, scale), broadcastable to an example: `(image - mean) * scale`.

    Args:
        image: [N, ...]. uint8 is divided by 255 first.
        kind: `none` does nothing else. `channel` standardises the last axis, `global`
            all values together and `pixel` every position. The last two add .001 to the
            standard deviation, as the CDKT code does. What is equal in all examples
            becomes 0 and has the scale of `none`. `half` is (x - .5) / .5. `cifar100`
            uses the constants of DepthFL's code.

    Raises:
        ValueError: the constants are for other channels, or examples are tokens.
    """
    unit = 255.0 if image.dtype == np.uint8 else 1.0
    if kind == "none":
        return np.zeros((), np.float32), np.float32(1 / unit)
    if kind == "half":
        return np.float32(unit / 2), np.float32(2 / unit)
    is_odd = kind == "cifar100" and (image.shape[-1] != 3 or image.ndim != 4)
    if is_odd or image.dtype == np.int32:
        of, cure = "numbers", "none"
        if is_odd:
            of, cure = "images of three channels", "channel"
        raise ValueError(
            f"--normalization={kind} is for {of}, these examples are {image.dtype} of "
            f"shape {list(image.shape[1:])}; take {cure}"
        )
    if kind == "cifar100":
        mean, std = (np.array(one, np.float32) * np.float32(unit) for one in CIFAR100)
        return mean, 1 / std
    axes = {
        "channel": tuple(range(image.ndim - 1)),
        "global": tuple(range(image.ndim)),
        "pixel": (0,),
    }[kind]
    # Slices are summed in float64, without a float copy of the whole table.
    total = np.zeros(np.mean(image[:1], axis=axes, dtype=np.float64).shape)
    square, low, high = np.zeros_like(total), np.inf, -np.inf
    slices = [image[begin : begin + 4096] for begin in range(0, len(image), 4096)]
    for raw in slices:
        part = raw.astype(np.float64)
        total += part.sum(axis=axes)
        square += (part**2).sum(axis=axes)
        low = np.minimum(low, raw.min(axis=axes))
        high = np.maximum(high, raw.max(axis=axes))
    count = image.size / max(total.size, 1)
    mean = total / count
    std = np.sqrt(np.maximum(square / count - mean**2, 0))
    is_rough = (std < 1e-5 * np.abs(mean)) & (low < high)
    if is_rough.any():
        # The squares have hardly a digit of it.
        square = np.zeros_like(total)
        for raw in slices:
            square += ((raw.astype(np.float64) - mean) ** 2).sum(axis=axes)
        std = np.where(is_rough, np.sqrt(square / count), std)
    margin = unit * MARGINS[kind]
    # New rows may differ here, and values of 1e7 standard deviations mean nothing.
    is_constant = low == high
    mean, scale = np.where(is_constant, low, mean), 1 / (std + margin)
    scale = np.where(is_constant, 1 / unit, scale)
    return mean.astype(np.float32), scale.astype(np.float32)


# Those whose constants are of values from 0 to 1, whatever the examples are
CONSTANTS = "half", "cifar100"


def num_hidden(image: np.ndarray, kind: str, scale: np.ndarray) -> int:
    """How many numbers of an example vary by less than what is added to a deviation.

    They are nearly 0 after `normalization`, whose `scale` is given. Bytes do not count.
    """
    if kind not in MARGINS or image.dtype == np.uint8:
        return 0
    scale = np.broadcast_to(scale, image.shape[1:])
    return int(((scale != 1) & (1 / scale < 2 * MARGINS[kind])).sum())


def is_of_constant(scale: np.ndarray) -> np.ndarray:
    """Whether each scale is that of a constant; earlier versions used 1 / margin."""
    scale = np.asarray(scale)
    margins = np.array([1e-7, 255e-7, 0.001, 0.255])
    is_old = np.isclose(scale[..., None] * margins, 1, rtol=0.01).any(-1)
    # A single scale of 1 is that of `none`.
    return is_old | (np.isin(scale, np.float32([1, 1 / 255])) & (scale.ndim > 0))
