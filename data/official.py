"""CIFAR-10, CIFAR-100 and SVHN from their official files, packed or unpacked.

https://www.cs.toronto.edu/~kriz/cifar.html and http://ufldl.stanford.edu/housenumbers.
"""

import io
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from data import files, memory, pickles

KINDS = "fine", "coarse"  # of the labels of CIFAR-100
# The labels of an image, in the order of their bytes in the binary form
LABELS = {"cifar10": ("labels",), "cifar100": ("coarse_labels", "fine_labels")}
SVHN = "train_32x32.mat", "test_32x32.mat"
# Of an archive: as it is offered, with a shorter name, and as a browser may unpack it
ENDINGS = ".tar.gz", ".tgz", ".tar"
_PIXELS = 3 * 32 * 32


class Form(NamedTuple):
    """An official form: its archive, the folder in it, and its files, the test's last.

    `read` maps the bytes of a file and the names of its labels to arrays by name: the
    labels, and `data` [N, 3072], whose rows hold a red, a green and a blue plane.
    """

    archive: str
    folder: str
    files: tuple[str, ...]
    read: Callable[[bytes, Sequence[str]], Mapping[Any, Any]]


def _of_binary(raw: bytes, names: Sequence[str]) -> dict[str, np.ndarray]:
    width = len(names) + _PIXELS
    if not raw or len(raw) % width:
        raise ValueError(f"it has {len(raw)} bytes, a multiple of {width} is expected")
    table = np.frombuffer(raw, np.uint8).reshape(-1, width)
    of_labels = {name: table[:, place] for place, name in enumerate(names)}
    return of_labels | {"data": table[:, len(names) :]}


def _of_pickle(raw: bytes, names: Sequence[str]) -> dict[str, Any]:
    return pickles.read(raw)


def _of_mat(raw: bytes, names: Sequence[str]) -> Mapping[str, Any]:
    from scipy import io as scipy_io  # takes a moment to import

    return scipy_io.loadmat(io.BytesIO(raw), variable_names=[*names, "data"])


# The forms of a data set: in the archive's name, the files' suffix, and what reads them
_KINDS = (
    ("binary", ".bin", _of_binary),
    ("python", "", _of_pickle),
    ("matlab", ".mat", _of_mat),
)


def _forms(name: str, folders: Sequence[str], *files: str) -> tuple[Form, ...]:
    """A data set's forms, with the end of each one's folder; files have no suffix."""
    return tuple(
        Form(
            f"{name}-{kind}{ENDINGS[0]}",
            f"{name}-{folder}",
            tuple(one + suffix for one in files),
            read,
        )
        for folder, (kind, suffix, read) in zip(folders, _KINDS, strict=True)
    )


_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
_OF_CIFAR10 = ("batches-bin", "batches-py", "batches-mat")
FORMS = {
    "cifar10": _forms("cifar-10", _OF_CIFAR10, *_BATCHES, "test_batch"),
    "cifar100": _forms("cifar-100", ("binary", "python", "matlab"), "train", "test"),
}


def wanted(name: str) -> str:
    """Lists the files of which one form is read: a phrase for errors."""
    if name not in FORMS:
        return " and ".join(SVHN)
    return "one of " + ", ".join(
        f"{one.archive} or {one.folder}/" for one in FORMS[name]
    )


def find(name: str, data_dir: str) -> dict[str, np.ndarray] | None:
    """Reads a data set from `data_dir`, or from the folder of its name there.

    Args:
        name: `svhn_cropped`, or `cifar10`, `cifar100` or `cifar100/coarse`, whose
            classes are the 20 coarse ones.
        data_dir: A folder with an archive or what was unpacked of it, or that itself.

    Returns:
        (Images uint8 [N, 32, 32, 3] and integers [N], of the train and of the test
        split, by names for errors), or None if none of the files is there.

    Raises:
        ValueError: one line with the file: it is damaged, or another one, and no other
            form is whole.
    """
    name, _, kind = name.partition("/")
    refused = None
    for folder in (pathlib.Path(data_dir) / name, pathlib.Path(data_dir)):
        if name not in FORMS:
            if any((folder / one).exists() for one in SVHN):
                return _svhn(folder)
            continue
        label = LABELS[name][0 if kind else -1]
        for place, form in _places(folder, name):
            read = _packed if place.is_file() else _unpacked
            try:
                return _joined(place, form, read(place, form), name, label)
            except ValueError as error:
                refused = refused or error
    if refused:
        raise refused
    return None


def _places(folder: pathlib.Path, name: str) -> Iterator[tuple[pathlib.Path, Form]]:
    """Yields where forms of a data set are: a folder with files of it, or an archive.

    Files in `folder` itself come last, as CIFAR-100's may be called train and test.
    """
    for form in FORMS[name]:
        archives = [form.archive.replace(ENDINGS[0], ending) for ending in ENDINGS]
        if any((folder / form.folder / one).is_file() for one in form.files):
            yield folder / form.folder, form
        found = (folder / one for one in archives)
        yield from ((one, form) for one in found if one.is_file())
    for form in FORMS[name]:
        if any((folder / one).is_file() for one in form.files):
            yield folder, form


def _unpacked(folder: pathlib.Path, form: Form) -> Iterator[tuple[str, bytes]]:
    for name in form.files:
        if (folder / name).is_file():
            yield name, (folder / name).read_bytes()


def _packed(archive: pathlib.Path, form: Form) -> Iterator[tuple[str, bytes]]:
    """Yields (name, bytes) of the files, and compares the archive's checksum.

    Raises ValueError if two files of a name are in the archive.
    """
    seen = set()
    with files.tar_stream(archive, archive.suffix != ".tar") as members:
        for one in members:
            name = pathlib.PurePosixPath(one.name).name
            if one.isfile() and name in form.files:
                if name in seen:
                    raise ValueError(f"{name} is there twice")
                seen.add(name)
                memory.check(one.size, f"the {one.size} bytes of {name}")
                yield name, members.extractfile(one).read()


def _joined(
    place: pathlib.Path,
    form: Form,
    contents: Iterator[tuple[str, bytes]],
    name: str,
    label: str,
) -> dict[str, np.ndarray]:
    """Joins the files of a form; `label` is the name of the labels that are taken."""
    parts, at = {}, place
    try:
        for at, raw in contents:
            parts[at] = _part(form.read(raw, LABELS[name]), label)
            at = place
        if missing := [one for one in form.files if one not in parts]:
            raise ValueError(f"it has no {missing[0]}")
    except Exception as error:  # damaged bytes raise various errors
        where = place if at is place else place / at
        raise ValueError(
            f"{where} cannot be read: {files.reason(error)}; fetch it again"
        ) from error
    *train, test = form.files
    image, number = zip(*(parts[one] for one in train), strict=True)
    return {
        f"{place}: {train[0]}": np.concatenate(image),
        f"its {label}": np.concatenate(number),
        f"{place}: {test}": parts[test][0],
        f"{label} of it": parts[test][1],
    }


def _part(found: Mapping[Any, Any], label: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images and labels of a file."""
    if missing := [one for one in ("data", label) if one not in found]:
        raise ValueError(f"it has no {missing[0]}")
    data, number = (_numbers(found[one], one) for one in ("data", label))
    if data.dtype != np.uint8 or data.shape[1:] != (_PIXELS,):
        raise ValueError(
            f"its data are {data.dtype} {list(data.shape)}, uint8 [N, {_PIXELS}] are "
            "expected"
        )
    if number.dtype.kind not in "iu" or number.size != len(data):
        raise ValueError(
            f"its {label} are {number.dtype} {list(number.shape)}, {len(data)} "
            "integers are expected"
        )
    image = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(image), number.reshape(-1)


def _numbers(value: Any, name: str) -> np.ndarray:
    """An array, or one of a list of numbers, whose lists might fill the memory."""
    is_list = isinstance(value, (list, tuple))
    if is_list and not all(type(one) is int for one in value):
        raise ValueError(f"its {name} are a list of more than whole numbers")
    return np.asarray(value)


def _svhn(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads SVHN's cropped digits: X uint8 [32, 32, 3, N] and y 1 to 10, 10 for a 0."""
    from scipy import io as scipy_io  # takes a moment to import

    out = {}
    for name in SVHN:
        try:
            files.check(folder / name, "a file of images")
            found = scipy_io.loadmat(str(folder / name), variable_names=["X", "y"])
            if missing := [one for one in ("X", "y") if one not in found]:
                raise ValueError(f"it has no {missing[0]}")
            image, digit = found["X"], found["y"]
            if image.ndim != 4 or digit.size != image.shape[-1]:
                raise ValueError("X [32, 32, 3, N] and y [N, 1] are expected")
            if not np.isin(digit, np.arange(1, 11)).all():
                raise ValueError("y must be 1 to 10")
        except Exception as error:  # damaged bytes raise various errors
            where = folder / name
            raise ValueError(
                f"{where} cannot be read: {files.reason(error)}; fetch it again"
            ) from error
        out[f"{folder / name}: X"] = np.ascontiguousarray(image.transpose(3, 0, 1, 2))
        out[f"{folder / name}: y"] = digit.reshape(-1).astype(np.int64) % 10
    return out
