"""Data sets of a folder of images, in a folder for each class."""

import os
import pathlib
from typing import Any

import numpy as np

from data import arrays, dataset, files, labels

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif"),
    *(".tif", ".tiff", ".webp", ".ppm", ".pgm"),
)
# Folders of downloads that are no owners
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation"}
_TRANSPARENT = ("LA", "La", "PA", "RGBA", "RGBa")
_COLOURS = ("RGB", "P", "CMYK", "YCbCr", "HSV", "LAB")


def from_folder(path: str, flag: str = "dataset") -> dataset.Dataset:
    """A data set of the images in class/file or owner/class/file.

    Rows are in the order of the paths. Names that begin with a dot are not read.

    Args:
        path: The folder.
        flag: The flag that names it, for errors.

    Returns:
        Images uint8 [N, H, W, 1], or [N, H, W, 3] if any of them has colours.

    Raises:
        ValueError: one line: the folders are of another form, a file cannot be read, or
            images differ in size.
    """
    where = f"--{flag}=images:{path}"
    root = files.given(path, where)
    if not root.is_dir():
        what = "a file" if root.exists() else "not there"
        raise ValueError(f"{where}: it is {what}; give a folder of folders of images")
    found, others = _listed(root, where)
    if not found:
        raise ValueError(
            f"{where}: there are no images ({', '.join(SUFFIXES)}) in folders of it"
        )
    depths = {len(one.parts): one for one in found[::-1]}
    if not depths.keys() <= {2, 3} or len(depths) > 1:
        shown = " and ".join(str(one) for one in list(depths.values())[:2])
        raise ValueError(
            f"{where}: images must be in class/file or owner/class/file, all of them "
            f"alike; there is {shown}"
        )
    pixels = [_read(root, one, where) for one in found]
    sizes = {image.shape[:2]: one for one, image in zip(found, pixels, strict=True)}
    if len(sizes) > 1:
        (first, one), (second, other) = list(sizes.items())[:2]
        raise ValueError(
            f"{where}: {one} has {first[1]}x{first[0]} pixels and {other} "
            f"{second[1]}x{second[0]}; resize all of them to one size"
        )
    num_gray = sum(image.shape[2] == 1 for image in pixels)
    notes = ()
    if 0 < num_gray < len(pixels):
        pixels = [np.broadcast_to(one, (*one.shape[:2], 3)) for one in pixels]
        notes += (f"{num_gray} gray images among those in colour became RGB",)
    if others:
        names = labels.listed([str(one) for one in others])
        notes += (f"files that are not images are left out: {names}",)
    has_owners = len(found[0].parts) == 3
    if has_owners and {one.parts[0].lower() for one in found} <= _SPLITS:
        raise ValueError(
            f"{where}: its folders look like splits and not like owners "
            f"({labels.listed(sorted({one.parts[0] for one in found}))}); put their "
            "classes into one folder, which --test_split divides"
        )
    made = arrays.from_arrays(
        np.stack(pixels),
        [one.parts[-2] for one in found],
        [one.parts[0] for one in found] if has_owners else None,
        where,
        layout="nhwc",
        least_classes=2 if flag == "dataset" else 1,
        names=("the class folder", "the owner folder"),
    )
    return made._replace(notes=made.notes + notes)


def _listed(
    root: pathlib.Path, where: str
) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """(images, other files) below a folder, relative to it, in order."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"{where}: {error.filename}: {error.strerror}") from error

    images, others = [], []
    for folder, inside, names in os.walk(root, onerror=refuse, followlinks=True):
        place = pathlib.Path(folder).relative_to(root)
        inside[:] = [name for name in inside if not name.startswith(".")]
        if len(place.parts) > 3:
            inside[:] = []  # refused by its depth, also where links make a circle
        for name in names:
            if not name.startswith("."):
                is_image = name.lower().endswith(SUFFIXES)
                (images if is_image else others).append(place / name)
    return sorted(images), sorted(others)


def _read(root: pathlib.Path, name: pathlib.Path, where: str) -> np.ndarray:
    """An image as uint8 [H, W, 1 or 3].

    Raises:
        ValueError: one line that names the file.
    """
    try:
        from PIL import Image  # takes a moment to import
    except ImportError as error:
        raise ValueError(
            f"{where} needs the package pillow: pip install pillow"
        ) from error
    try:
        files.check(root / name, "an image")
        with Image.open(root / name) as image:
            return _pixels(image)
    except Exception as error:  # damaged bytes raise various errors
        if isinstance(error, MemoryError):
            raise
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        if "cannot identify" in reason:
            reason = "it is not an image, or damaged"
        raise ValueError(f"{where}: {name} cannot be read: {reason}") from error


def _pixels(image: Any) -> np.ndarray:
    """The pixels of a pillow image, uint8 [H, W, 1 or 3]."""
    if getattr(image, "n_frames", 1) > 1:
        raise ValueError(f"it has {image.n_frames} frames, one is expected")
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        least = image.convert("RGBA").getextrema()[3][0]
        if least < 255:
            raise ValueError("it has transparent pixels; save it without transparency")
    if image.mode in ("1", "L", "LA", "La"):
        return np.asarray(image.convert("L"))[..., None]
    if image.mode in (*_COLOURS, *_TRANSPARENT):
        return np.asarray(image.convert("RGB"))
    raise ValueError(
        f"its pixels are of the mode {image.mode}; save it with 8 bits a channel, gray "
        "or RGB"
    )
