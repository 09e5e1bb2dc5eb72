"""Data sets from a folder of images, with a folder for each class."""

import os
import pathlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from data import arrays, dataset, files, labels, memory
from fedjax_pfl import options

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".bmp", ".gif"),
    *(".tif", ".tiff", ".webp", ".ppm", ".pgm"),
)
# Pillow's names of accepted formats; some of its others start other programs.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
# Larger images are not for training, and a small file may hold many pixels.
MAX_SIDE = 4096
# Folders over the others for train, official test and validation images, in this order
PARTS = {"train": 0, "test": 1, "val": 2, "validation": 2}
_KINDS = {"image", "images", "img", "imgs", "mask", "masks", "label", "labels"}
_KINDS |= {"annotation", "annotations", "original", "originals", "segmented"}
# A folder that archives of a Mac contain
_LEFT_OVER = "__MACOSX"
_TRANSPARENT = ("LA", "La", "PA", "RGBA", "RGBa")
_COLOURS = ("RGB", "P", "CMYK", "YCbCr", "HSV", "LAB")


def from_folder(path: str, least_classes: int = 2) -> dataset.Dataset:
    """Makes a data set of the images in class/file or owner/class/file.

    Both may be in folders for parts of the data, `train` and others of `PARTS`.
    Rows are in the order of the paths. Names that begin with a dot, and folders
    `__MACOSX`, are skipped. All sizes are checked before any pixels are read. Fewer
    different labels than `least_classes` are refused.

    Returns:
        Images uint8 [N, H, W, 1], or [N, H, W, 3] if any of them has colours.

    Raises:
        ValueError: a phrase: the folders have another form, a file cannot be read, or
            images differ in size.
    """
    root = files.given(path, "a folder")
    if not root.is_dir():
        what = "a file" if root.exists() else "not there"
        raise ValueError(f"it is {what}; give a folder of folders of images")
    found, others = _listed(root)
    part = _parts(found)
    found = sorted(found, key=lambda one: (part.get(one, 0), one))
    above = bool(part)  # folders over owners and classes
    depths = {len(one.parts) - above: one for one in found[::-1]}
    if not depths.keys() <= {2, 3} or len(depths) != 1:
        shown = " and ".join(str(one) for one in list(depths.values())[:2])
        reason = "images must be in class/file or owner/class/file, all of them alike; "
        reason += f"there is {shown}"
        if not found:
            reason = f"there are no images ({', '.join(SUFFIXES)}) in folders of it"
        raise ValueError(reason)
    depth = len(found[0].parts) - above
    _check_names(sorted({one.parts[above] for one in found}), depth)
    notes = _notes_of_links(root, found)
    sizes = {_read(root, one, lambda image: image.size): one for one in found}
    if len(sizes) > 1:
        (first, one), (second, other) = list(sizes.items())[:2]
        raise ValueError(
            f"{one} has {first[0]}x{first[1]} pixels and {other} "
            f"{second[0]}x{second[1]}; resize all of them to one size"
        )
    ((width, height),) = sizes
    check_size(len(found), width, height)
    pixels = [_read(root, one, pixels_of) for one in found]
    num_gray = sum(image.shape[2] == 1 for image in pixels)
    if 0 < num_gray < len(pixels):
        pixels = coloured(pixels)
        notes += (f"{num_gray} gray images among those in colour became RGB",)
    if others:
        notes += (f"files that are not images are left out: {others}",)
    owners = [one.parts[above] for one in found] if depth == 3 else None
    if owners and len(set(owners)) == 1:
        notes += (f"the one folder {owners[0]} over the classes is not an owner",)
        owners = None
    made = arrays.from_arrays(
        np.stack(pixels),
        [one.parts[-2] for one in found],
        owners,
        layout="nhwc",
        least_classes=least_classes,
        names=("the class folder", "the owner folder"),
        where="",
    )
    made = made._replace(notes=made.notes + notes)
    count = [sum(one == kind for one in part.values()) for kind in range(3)]
    if not part:
        return made
    return arrays.divided(made, count[0], count[2], np.ones(len(found), bool))


def coloured(pixels: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Images [H, W, 1 or 3] with as many channels each, 3 if any has colours."""
    if len({image.shape[2] for image in pixels}) < 2:
        return list(pixels)
    return [np.broadcast_to(one, (*one.shape[:2], 3)) for one in pixels]


def _parts(found: list[pathlib.Path]) -> dict[pathlib.Path, int]:
    """The place in `PARTS` of each image's first folder, {} if not all are such."""
    tops = {one.parts[0]: one.parts[0].lower() for one in found}
    is_deep = all(len(one.parts) > 2 for one in found)
    names = [*tops.values()]
    if not is_deep or not {"train"} < {*names} <= PARTS.keys():
        return {}
    return {one: PARTS[tops[one.parts[0]]] for one in found}


def _listed(root: pathlib.Path) -> tuple[list[pathlib.Path], str]:
    """Returns the images below a folder, relative and in order, and its other files.

    Other files are listed by name, but only counted behind links.
    """

    def refuse(error: OSError) -> None:
        raise ValueError(f"{error.filename}: {error.strerror}") from error

    images, others, num_behind, behind = [], [], 0, set()
    for folder, inside, names in os.walk(root, onerror=refuse, followlinks=True):
        place = pathlib.Path(folder).relative_to(root)
        inside[:] = [name for name in inside if name[0] != "." and name != _LEFT_OVER]
        if len(place.parts) > 4:
            inside[:] = []  # refused by its depth, also where links make a circle
        below = (os.path.join(folder, name) for name in inside)
        behind.update(one for one in below if folder in behind or os.path.islink(one))
        for name in names:
            if name.startswith("."):
                continue
            if name.lower().endswith(SUFFIXES):
                images.append(place / name)
            elif folder in behind:
                num_behind += 1
            else:
                others.append(str(place / name))
    shown = [labels.listed(sorted(others))] if others else []
    shown += [f"{num_behind} in folders that are links"] if num_behind else []
    return sorted(images), " and ".join(shown)


def _check_names(top: list[str], depth: int) -> None:
    """Refuses (ValueError) folders that are parts of a download, not owners or classes.

    `top` are the first folders, which are owners at `depth` 3 and classes at 2.
    """
    role = "owners" if depth == 3 else "classes"
    is_split = files.are_splits(top, strictly=role == "classes")
    is_split |= all(files.is_split(name) for name in top)
    is_kind = len(top) > 1 and all(name.lower() in _KINDS for name in top)
    if is_split or is_kind:
        kind = "splits" if is_split else "images and their masks"
        cure = "put their classes into one folder, which --test_split divides"
        if is_kind:
            cure = "give a folder of the images alone"
        raise ValueError(
            f"its folders look like {kind} and not like {role} "
            f"({labels.listed(top)}); {cure}"
        )


def _notes_of_links(root: pathlib.Path, found: list[pathlib.Path]) -> tuple[str, ...]:
    """Describes files that are links to one another, which makes a row occur twice.

    Raises ValueError if such files are in the folders of different classes.
    """
    first: dict[tuple[int, int], pathlib.Path] = {}
    twice = []
    for one in found:
        try:
            status = os.stat(root / one)
        except OSError:
            continue  # `_read` will report that it cannot be read
        other = first.setdefault((status.st_dev, status.st_ino), one)
        if other is not one:
            twice.append(f"{one} is {other}")
        if other.parts[-2] != one.parts[-2]:
            raise ValueError(
                f"{other} and {one} are one file by a link, with two labels; remove "
                "one of them"
            )
    if not twice:
        return ()
    return (f"images that are links to others: {labels.listed(twice)}",)


def check_size(count: int, width: int, height: int) -> None:
    """Refuses (ValueError) images that are too large for training or for the memory."""
    what = f"{count} images of {width}x{height} pixels"
    if max(width, height) > MAX_SIDE:
        raise ValueError(f"{what}, at most {MAX_SIDE}x{MAX_SIDE} are read; resize them")
    # Memory holds each image, and then all of them as one array.
    memory.check(2 * count * width * height, what)


def _read(root: pathlib.Path, name: pathlib.Path, take: Callable[[Any], Any]) -> Any:
    """Applies `take` to an opened pillow image; ValueErrors name the file."""
    with files.named(f"{name} cannot be read", OSError):
        files.check(root / name, "an image")
        return read(root / name, take)


def read(source: Any, take: Callable[[Any], Any]) -> Any:
    """Applies `take` to the pillow image in a file; ValueErrors are phrases."""
    from PIL import Image  # takes a moment to import

    try:
        with warnings.catch_warnings():
            # Pillow warns about many pixels, which are refused here.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(source, formats=FORMATS)
        with image:
            return take(image)
    except Exception as error:  # damaged bytes raise various errors
        if isinstance(error, MemoryError):
            raise
        reason = options.reason(error)
        if "cannot identify" in reason:
            reason = f"it is not an image ({', '.join(FORMATS)}), or damaged"
        raise ValueError(reason) from error


# In pillow's names of how a file has its channels
_DEEP = re.compile(";16[BLN]")


def _is_cut(image: Any) -> bool:
    """Whether pillow takes 8 of more bits of an opened file, before it has done so."""
    if image.mode.startswith("I;"):
        return False  # all bits are there
    for codec, _, _, args in getattr(image, "tile", ()):
        every = args if isinstance(args, tuple) else (args,)
        # Not `BGR;16`, which is 16 bits of a pixel
        if any(isinstance(one, str) and _DEEP.search(one) for one in every):
            return True
        # The largest value of a PPM file
        if codec.startswith("ppm") and any(type(x) is int and x > 255 for x in every):
            return True
    return False


def pixels_of(image: Any) -> np.ndarray:
    """Returns the pixels of a pillow image, uint8 [H, W, 1 or 3].

    Raises ValueError, whose message is a phrase, for several frames, transparent
    pixels, or more bits.
    """
    is_clear = image.mode in _TRANSPARENT or "transparency" in image.info
    if _is_cut(image):
        reason = "it has 16 bits a channel; save it with 8 bits"
    elif getattr(image, "n_frames", 1) > 1:
        reason = f"it has {image.n_frames} frames, one is expected"
    elif is_clear and image.convert("RGBA").getextrema()[3][0] < 255:
        reason = "it has transparent pixels; save it without transparency"
    elif image.mode in ("1", "L", "LA", "La"):
        return np.asarray(image.convert("L"))[..., None]
    elif image.mode in (*_COLOURS, *_TRANSPARENT):
        return np.asarray(image.convert("RGB"))
    else:
        reason = f"its pixels are of the mode {image.mode}; save it with 8 bits a "
        reason += "channel, gray or RGB"
    raise ValueError(reason)
