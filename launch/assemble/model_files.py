"""Writes models to files, and reads them.

A file holds a nested dictionary of arrays, which can be read without this package:

* `stages`: by name in the order of the chain, each with `params` and, if it has any,
  `stats` (running statistics); a stage with an exit or a stem has these under `trunk`
  and `exit` or `stem`;
* `input`: `mean` and `scale`; the first stage gets `(image - mean) * scale`;
* `rows`: the rows of the data set on which it was trained, see `Rows`;
* `sha256`: the hexadecimal hash of all these arrays (`checkpoint.digest`);
* `model`: its `name`, `width` (`--model_width`) and `level`, the number of its stages,
  which the last of several exits that serves alone is one of;
* `classes`: the names of its classes in the order of the logits, if they have names;
* `columns`: the names of a table's columns in the order of the vectors.

`.msgpack` is flax.serialization's format; the keys of an `.npz` are paths such as
`stages/conv1/params/kernel`. A `.safetensors` has the arrays under these paths, too.
What is text is in its metadata: `sha256` as it is, and as JSON `model`, `classes`,
`columns` and `stages`, the stages' names in order.
"""

import hashlib
import importlib
import io
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import serialization, traverse_util

from data import files
from fedjax_pfl import checkpoint, options, types

SUFFIXES = (".msgpack", ".npz", ".safetensors")


class Facts(NamedTuple):
    """The model that a file records: the options that make it, and how many stages."""

    name: str
    width: float
    level: int


class Rows(NamedTuple):
    """The rows of a data set on which a model was trained.

    Attributes:
        images_sha256: uint8[32], the SHA-256 of the bytes of all examples [N, ...].
        count: N.
        trained: uint8[ceil(N / 8)], one bit for each row (`np.packbits`).
        others: int64[], 1 if it began with or learned from a model that was trained on
            other examples, or on rows that are not known, else 0.
    """

    images_sha256: np.ndarray
    count: np.ndarray
    trained: np.ndarray
    others: np.ndarray = np.int64(0)

    def is_trained(self) -> np.ndarray:
        """Whether the model was trained on each row, bool[N]."""
        bits = np.unpackbits(self.trained)[: int(self.count)]
        return bits.reshape(int(self.count)).astype(bool)

    def are_of(self, image: np.ndarray) -> bool:
        """Whether they are rows of these examples."""
        if len(image) != int(self.count):
            return False
        return np.array_equal(self.images_sha256, _sha256(image))


def rows_of(
    image: np.ndarray, trained: np.ndarray, before: Sequence[Rows | None] = ()
) -> Rows:
    """Records that a model was trained on the rows `trained` of the examples.

    `before` are the rows of the models that it started or learned from, None = unknown.
    Negative rows are left out, and so are public images, which follow the examples.
    """
    is_trained = np.zeros(len(image), bool)
    is_trained[trained[(trained >= 0) & (trained < len(image))]] = True
    made = Rows(_sha256(image), np.int64(len(image)), np.packbits(is_trained))
    for one in before:
        is_like = one and np.array_equal(one.images_sha256, made.images_sha256)
        if is_like:
            made = made._replace(trained=made.trained | one.trained)
        if not is_like or one.others:
            made = made._replace(others=np.int64(1))
    return made


def _sha256(image: np.ndarray) -> np.ndarray:
    """Hashes the bytes of examples, whatever their layout: uint8[32]."""
    digest = hashlib.sha256(np.ascontiguousarray(image).data).digest()
    return np.frombuffer(digest, np.uint8)


def write(
    path: Any,
    model: types.Model,
    variables: types.Variables,
    normal: Mapping[str, Any],
    width: float | None,
    classes: Sequence[str] | None = None,
    rows: Rows | None = None,
    columns: Sequence[str] | None = None,
) -> pathlib.Path:
    """Writes a model to a file atomically.

    Args:
        path: Ends in one of `SUFFIXES`.
        normal: Has the `mean` and the `scale` of its images.
        width: Its `--model_width`, None = no value of it makes this model.
        classes: The names of its classes, None = they are numbers.
        rows: The rows on which it was trained, None = unknown.
        columns: The names of a table's columns, None = the data are not a table.

    Raises:
        ValueError: the path has another suffix, or is a folder, or the package
            safetensors is missing.
        OSError: it cannot be written.
    """
    path = checked(path, SUFFIXES)
    tree = {"stages": stages(model, variables), "input": dict(normal)}
    if rows is not None:
        tree["rows"] = rows._asdict()
    tree = _arrays(tree)
    tree["sha256"] = checkpoint.digest(tree)
    if width is not None:
        facts = Facts(model.name, float(width), len(model.stage_names))
        tree["model"] = facts._asdict()
    for key, names in (("classes", classes), ("columns", columns)):
        if names is not None:
            tree[key] = list(escaped(names))
    if path.suffix == ".npz":
        flat = traverse_util.flatten_dict(tree, sep="/")
        whole = io.BytesIO()
        np.savez(whole, **{name: np.asarray(leaf) for name, leaf in flat.items()})
        return write_bytes(path, whole.getvalue())
    if path.suffix == ".safetensors":
        return write_bytes(path, _tensors(tree))
    # A copy, as without `in_place`, would sort the stages by name.
    return write_bytes(path, serialization.msgpack_serialize(tree, in_place=True))


def checked(path: Any, suffixes: Sequence[str]) -> pathlib.Path:
    """The path of a file to write, or a ValueError."""
    path = files.given(path, "a model's file")
    if path.suffix not in suffixes:
        raise ValueError(f"{path}: a model's file ends in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    return path


def write_bytes(path: pathlib.Path, content: bytes) -> pathlib.Path:
    """Writes a file atomically, and makes its folder; OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.partial{path.suffix}")
    with files.created(temporary) as file:
        file.write(content)
    return temporary.rename(path)


def import_package(package: str, suffix: str) -> Any:
    """Imports the package that files of a suffix need, or raises a ValueError."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        reason = f"a {suffix} file needs the package {error.name}"
        raise ValueError(f"{reason}; pip install 'fedjax_pfl[export]'") from error


def _tensors(tree: Mapping[str, Any]) -> bytes:
    """A file's nested dictionary in the format of safetensors."""
    arrays = {key: tree[key] for key in ("stages", "input", "rows") if key in tree}
    flat = traverse_util.flatten_dict(arrays, sep="/")
    # Strides are not kept by the format.
    flat = {name: np.array(leaf, order="C") for name, leaf in flat.items()}
    text = {key: tree[key] for key in ("model", "classes", "columns") if key in tree}
    text["stages"] = list(tree["stages"])
    about = {key: json.dumps(value) for key, value in text.items()}
    about["sha256"] = tree["sha256"]
    return import_package("safetensors.numpy", ".safetensors").save(flat, about)


def _of_tensors(content: bytes) -> dict[str, Any]:
    """The nested dictionary in the content of a `.safetensors` file."""
    flat = import_package("safetensors.numpy", ".safetensors").load(content)
    tree = traverse_util.unflatten_dict(flat, sep="/")
    # Eight bytes for the length of the header, a JSON with the metadata in it
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = header.get("__metadata__", {})
    text = {key: json.loads(about[key]) for key in about.keys() - {"sha256"}}
    held = tree.get("stages", {})
    tree["stages"] = {name: held.get(name, {}) for name in text.pop("stages", held)}
    return tree | text | {key: about[key] for key in about.keys() & {"sha256"}}


def escaped(names: Sequence[str]) -> tuple[str, ...]:
    """Escapes names for a file, as names of folders may be bytes that are not UTF-8."""
    return tuple(name.encode("utf-8", "backslashreplace").decode() for name in names)


def read(path: Any) -> dict[str, Any]:
    """Reads the nested dictionary in a file, or raises a ValueError of one line.

    If present, `model` is a `Facts`, `rows` a `Rows`, `classes` and `columns` are
    tuples.
    """
    try:
        path = files.given(path, "a model's file")
        files.check(path, "a model's file")
        if path.suffix == ".stablehlo":
            raise ValueError("a program without its arrays; give a .safetensors")
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                flat = {name: file[name] for name in file.files}
            tree = traverse_util.unflatten_dict(flat, sep="/")
        elif path.suffix == ".safetensors":
            tree = _of_tensors(path.read_bytes())
        else:
            tree = serialization.msgpack_restore(path.read_bytes())
        if not isinstance(tree, dict) or not isinstance(tree.get("stages"), dict):
            raise ValueError("it has no stages")
        facts, recorded = tree.pop("model", None), tree.pop("sha256", None)
        names = {key: tree.pop(key, None) for key in ("classes", "columns")}
        if recorded is not None and str(recorded) != checkpoint.digest(tree):
            raise ValueError("its arrays do not match its checksum")
        if facts is not None:
            name, width, level = (facts[one] for one in Facts._fields)
            found = Facts(str(name), float(width), int(level))
            if not (0 < found.width < math.inf and found.level > 0):
                raise ValueError(f"it records a model of {found}")
            tree["model"] = found
        for key, found in names.items():
            if found is not None:
                tree[key] = tuple(map(str, found))
        if "rows" in tree:
            # Files of earlier versions do not have all.
            kept = Rows._field_defaults | tree["rows"]
            rows = Rows(*(np.asarray(kept[name]) for name in Rows._fields))
            tree["rows"] = rows if rows.is_trained().shape == (rows.count,) else None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # msgpack, zipfile and numpy have various errors
        raise ValueError(
            f"{path} is not a model's file ({options.reason(error)})"
        ) from error
    return tree


def stages(model: types.Model, variables: types.Variables) -> dict[str, Any]:
    """The stages of a model as in its file."""
    out = {}
    for name, params, stats in zip(model.stage_names, *variables, strict=True):
        parts = {
            part: {"params": own} | ({"stats": stats[part]} if part in stats else {})
            for part, own in params.items()
        }
        out[name] = parts if len(parts) > 1 else parts["trunk"]
    return out


def _arrays(tree: Any) -> Any:
    """Converts the leaves of a nested dictionary to numpy arrays, in the same order."""
    if isinstance(tree, Mapping):
        return {name: _arrays(value) for name, value in tree.items()}
    return np.asarray(tree)
