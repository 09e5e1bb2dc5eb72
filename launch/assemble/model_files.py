"""Writes models to files, and reads them as starting points and as teachers.

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

import functools
import hashlib
import importlib
import io
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import serialization, traverse_util

import models
from data import dataset, files, labels
from fedjax_pfl import checkpoint, options, shapes, types, widths
from fedjax_pfl import teacher as teacher_lib
from launch.assemble import fit

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


class Known(NamedTuple):
    """The facts that a file records beside its parameters.

    Attributes:
        line: The flag that names the file, for notes.
        notes: Lines about how its classes were taken.
        rows: The rows on which its model was trained, None = it does not record them.
    """

    line: str
    notes: tuple[str, ...]
    rows: Rows | None


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


def seen(known: Known, image: np.ndarray, test_row: np.ndarray) -> str:
    """A line about test rows that a file's model may have been trained on, or "".

    `image` are the examples of the run [N, ...], and `test_row` int[S, ...] the test
    rows of each seed, -1 = padding.
    """
    line, _, rows = known
    if rows is None:
        return (
            f"{line} does not say on which rows its model was trained; they may be "
            "test rows of this run"
        )
    before = " and began with or learned from another one" * int(rows.others)
    if not rows.are_of(image):
        return (
            f"{line}: its model was trained on other examples than this run's{before}, "
            "so that its train rows cannot be compared with this run's test rows"
        )
    is_trained = rows.is_trained()
    tests = [np.unique(row[row >= 0]) for row in test_row]
    counts = [(int(is_trained[row].sum()), len(row)) for row in tests]
    most, total = max(counts)
    if not most:
        unknown = (
            f"{line}: its model began with or learned from another one, whose train "
            "rows the file does not have; they may be test rows of this run"
        )
        return unknown if rows.others else ""
    return (
        f"{line}: {most} of this run's {total} test rows are train rows of its model, "
        "so that accuracies may be too high; give the --seed, --partition and "
        "--test_split that it was trained with"
    )


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
    tree = {"stages": _stages(model, variables), "input": dict(normal)}
    if rows is not None:
        tree["rows"] = rows._asdict()
    tree = _arrays(tree)
    tree["sha256"] = checkpoint.digest(tree)
    if width is not None:
        facts = Facts(model.name, float(width), len(model.stage_names))
        tree["model"] = facts._asdict()
    for key, names in (("classes", classes), ("columns", columns)):
        if names is not None:
            tree[key] = list(_written(names))
    if path.suffix == ".npz":
        flat = traverse_util.flatten_dict(tree, sep="/")
        whole = io.BytesIO()
        np.savez(whole, **{name: np.asarray(leaf) for name, leaf in flat.items()})
        return placed(path, whole.getvalue())
    if path.suffix == ".safetensors":
        return placed(path, _tensors(tree))
    # A copy, as without `in_place`, would sort the stages by name.
    return placed(path, serialization.msgpack_serialize(tree, in_place=True))


def checked(path: Any, suffixes: Sequence[str]) -> pathlib.Path:
    """The path of a file to write, or a ValueError."""
    path = files.given(path, "a model's file")
    if path.suffix not in suffixes:
        raise ValueError(f"{path}: a model's file ends in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    return path


def placed(path: pathlib.Path, content: bytes) -> pathlib.Path:
    """Writes a file atomically, and makes its folder; OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.partial{path.suffix}")
    with files.created(temporary) as file:
        file.write(content)
    return temporary.rename(path)


def needed(package: str, suffix: str) -> Any:
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
    return needed("safetensors.numpy", ".safetensors").save(flat, about)


def _of_tensors(content: bytes) -> dict[str, Any]:
    """The nested dictionary in the content of a `.safetensors` file."""
    flat = needed("safetensors.numpy", ".safetensors").load(content)
    tree = traverse_util.unflatten_dict(flat, sep="/")
    # Eight bytes for the length of the header, a JSON with the metadata in it
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = header.get("__metadata__", {})
    text = {key: json.loads(about[key]) for key in about.keys() - {"sha256"}}
    held = tree.get("stages", {})
    tree["stages"] = {name: held.get(name, {}) for name in text.pop("stages", held)}
    return tree | text | {key: about[key] for key in about.keys() & {"sha256"}}


def _written(names: Sequence[str]) -> tuple[str, ...]:
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


def starting(
    path: str,
    model: types.Model,
    normal: tuple[np.ndarray, np.ndarray],
    source: dataset.Dataset,
    of_classes: Callable[[int], types.Model] | None,
) -> tuple[types.Model, Known]:
    """Makes a model and its narrower forms start from the variables in a file.

    Narrower forms start from leading slices.

    Args:
        model: The model for the classes of the run.
        normal: Mean and scale of the run's images.
        of_classes: Makes the model for another number of classes, None = of a custom
            model, in which the outputs of classes cannot be found.

    Raises:
        ValueError: one line: it is not a model's file, holds another model, another
            normalisation, other classes, or values that are not finite.
    """
    line, tree = f"--init_from={path}", read(path)
    about = _check_input(line, tree, normal, source.columns)
    shape = source.image.shape[1:]
    saved = _variables(line, tree, model, shape, f"--model={model.name}")
    saved, notes = _by_name(line, tree, saved, source, of_classes)
    return _from(saved, model), Known(line, about + notes, tree.get("rows"))


def teacher(
    given: teacher_lib.Taught,
    normal: tuple[np.ndarray, np.ndarray],
    source: dataset.Dataset,
) -> tuple[types.Model, types.Variables, Known]:
    """Loads the model in a file, with its variables as numpy arrays f32.

    Args:
        given: The options of the teacher, which complete what the file records.
        normal: Mean and scale of the run's images.

    Raises:
        ValueError: one line, as in `starting`, or the options name another model.
    """
    line = f"--teacher={given.teacher}"
    try:
        tree = read(given.teacher)
    except ValueError as error:
        raise ValueError(f"--teacher={error}; give a file of launch.export") from error
    name, width, level = _facts(line, tree.get("model"), given)
    if name not in models.MODELS:
        raise ValueError(
            f"{line} holds the model {name}, expected one of "
            f"{', '.join(models.MODELS)}; take another teacher or --teacher_model"
        )
    num_classes, shape = source.num_classes, source.image.shape[1:]
    whole = models.make(name, num_classes, width)
    count = len(whole.stage_names)
    if level not in (range(count + 2) if whole.has_exits else (0, count)):
        expected = f"{count}, as it has no exits"
        if whole.has_exits:
            expected = f"1 to {count}, or {count + 1} where the last exit serves alone"
        raise ValueError(
            f"--teacher_level={level}: {name} has {count} stages, expected {expected}"
        )
    of_classes = functools.partial(models.make, name, width=width, level=level)
    model = of_classes(num_classes)
    fit.check_model("teacher_model", model, shape)
    than = f"{name} of width {width:g} with {len(model.stage_names)} stages"
    than += f" for {num_classes} classes and examples of {'x'.join(map(str, shape))}"
    about = _check_input(line, tree, normal, source.columns)
    saved = _variables(line, tree, model, shape, than)
    saved, notes = _by_name(line, tree, saved, source, of_classes)
    saved = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), saved)
    return model, saved, Known(line, about + notes, tree.get("rows"))


def _by_name(
    line: str,
    tree: Mapping[str, Any],
    saved: types.Variables,
    source: dataset.Dataset,
    of_classes: Callable[[int], types.Model] | None,
) -> tuple[types.Variables, tuple[str, ...]]:
    """Puts a model's outputs into the order of the run's classes, and returns notes."""
    found, mine = tree.get("classes"), source.classes and _written(source.classes)
    numbers = tuple(map(str, range(len(found or mine or ()))))
    if set(found or mine or ()) == set(numbers):
        # Classes without names are the numbers 0, 1, ..., which text has in its order.
        found, mine = found or numbers, mine or numbers
    if found == mine:
        return saved, ()
    if found is None or mine is None:
        whose = "this run" if found is None else "its model"
        return saved, (
            f"{line}: only {whose} names the classes ({labels.listed(found or mine)}), "
            "which are taken to be in this order on both sides",
        )
    if set(found) != set(mine) or of_classes is None:
        raise ValueError(
            f"{line}: its model has the classes {labels.listed(found)}, this run's are "
            f"{labels.listed(mine)}; take a model of these, or give labels as the "
            "numbers 0, 1, ... of the model's classes"
        )
    order = np.array([found.index(name) for name in mine])
    shape = source.image.shape[1:]
    kinds = [shapes.variables(of_classes(len(mine) + more), shape) for more in (0, 1)]
    # The outputs are where one more class is one more entry, along the last axis.
    saved = jax.tree.map(
        lambda leaf, one, more: leaf if one.shape == more.shape else leaf[..., order],
        saved,
        *kinds,
    )
    return saved, (
        f"{line}: its model has the classes in another order ({labels.listed(found)}); "
        "its outputs were put into that of this run",
    )


def _facts(line: str, found: Facts | None, given: teacher_lib.Taught) -> Facts:
    """The facts that a file records about its model, or else the options."""
    asked = Facts(given.teacher_model, given.teacher_width, given.teacher_level)
    if found is None:
        if not asked.name:
            raise ValueError(
                f"{line} does not say which model it holds; give --teacher_model, and "
                "--teacher_width and --teacher_level if they are not 1 and all stages"
            )
        return asked._replace(width=asked.width or 1.0)
    for part, value, known in zip(Facts._fields, asked, found, strict=True):
        if value and value != known:
            flag = f"--teacher_{part.replace('name', 'model')}"
            raise ValueError(f"{flag}={value}: {line} says {known}; omit it")
    return found


def _variables(
    line: str,
    tree: Mapping[str, Any],
    model: types.Model,
    shape: tuple[int, ...],
    than: str,
) -> types.Variables:
    """Takes the variables of `model`, described by `than`, from a file's tree."""
    wanted = _stages(model, shapes.variables(model, shape))
    stages = _regrouped(tree["stages"], wanted)
    odd = _difference(wanted, stages)
    if odd:
        raise ValueError(f"{line} holds another model than {than}: {odd}")
    kinds = traverse_util.flatten_dict(wanted, sep="/")
    for name, leaf in traverse_util.flatten_dict(stages, sep="/").items():
        leaf, kind = np.asarray(leaf), kinds[name].dtype
        is_float = jax.numpy.issubdtype(kind, np.floating)
        if not (jax.numpy.issubdtype(leaf.dtype, np.floating) or leaf.dtype == kind):
            raise ValueError(f"{line}: stages/{name} is {leaf.dtype}, expected {kind}")
        if is_float and not np.isfinite(leaf.astype(np.float32)).all():
            raise ValueError(
                f"{line}: stages/{name} holds nan or infinity; take a file of a run "
                "that did not diverge"
            )
    # npz files have no empty dictionaries, so a stage without parameters is missing.
    held = [stages.get(name, {}) for name in model.stage_names]
    alone = {"params", "stats"}
    parts = [{"trunk": stage} if stage.keys() <= alone else stage for stage in held]
    params = [{n: own.get("params", {}) for n, own in one.items()} for one in parts]
    stats = [
        {n: own["stats"] for n, own in one.items() if "stats" in own} for one in parts
    ]
    return types.Variables(tuple(params), tuple(stats))


def _regrouped(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Splits a file's only stage if it has exactly the arrays of all those `wanted`."""
    if len(found) != 1 or len(wanted) < 2:
        return dict(found)
    (only,) = found.values()
    whole = traverse_util.flatten_dict(only if isinstance(only, Mapping) else {})
    parts = {name: traverse_util.flatten_dict(one) for name, one in wanted.items()}
    if sorted(path for one in parts.values() for path in one) != sorted(whole):
        return dict(found)
    return {
        name: traverse_util.unflatten_dict({path: whole[path] for path in one})
        for name, one in parts.items()
    }


def _check_input(
    line: str,
    tree: Mapping[str, Any],
    normal: tuple[np.ndarray, np.ndarray],
    columns: Sequence[str] | None,
) -> tuple[str, ...]:
    """Refuses a model that was trained on other columns or with other constants.

    A note says if only one side names columns. Constants may differ by .3 standard
    deviations, in the root mean square over all numbers with a mean of their own. Other
    rows of the same data differ by less.
    """
    found, reason = tree.get("input", {}), ""
    before, mine = tree.get("columns"), columns and _written(columns)
    if {"mean", "scale"} <= found.keys() and not _is_like(found, normal):
        reason = "with another normalisation; "
        reason += "give its --normalization, --image_size and --dataset"
    if before and mine and before != mine:
        reason = f"on {len(before)} columns, and this table has {len(mine)}"
        for number, (one, other) in enumerate(zip(before, mine, strict=False), 1):
            if one != other:
                reason += f"; number {number} was {labels.limited(one)}, and here it "
                reason += f"is {labels.limited(other)}"
                break
        reason += "; give the same columns in the same order"
    if reason:
        raise ValueError(f"{line}: its model was trained {reason}")
    if bool(before) == bool(mine):
        return ()
    whose = "its model" if before else "this run"
    return (
        f"{line}: only {whose} names the columns ({labels.listed(before or mine)}), "
        "which are taken to be in this order on both sides",
    )


def _is_like(found: Mapping[str, Any], normal: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether a file's `mean` and `scale` are nearly those of the run."""
    mean, scale = (np.asarray(one, np.float64) for one in normal)
    try:
        before = np.asarray(found["mean"], np.float64), np.asarray(found["scale"])
        # The scale of a constant says nothing about the numbers of other rows.
        is_free = [dataset.is_of_constant(one) for one in (before[1], scale)]
        ratio = np.where(np.logical_or(*is_free), 1, before[1] / scale)
        gaps = (mean - before[0]) * scale, ratio - 1
        return all(np.sqrt(np.mean(gap**2)) <= 0.3 for gap in gaps)
    except (ValueError, TypeError):
        return False


def _from(saved: types.Variables, model: types.Model) -> types.Model:
    """Makes a model start from leading slices of saved variables."""

    def init(key: jax.Array, x: jax.Array) -> tuple[types.Params, types.Stats]:
        arrays = jax.tree.map(jax.numpy.asarray, tuple(saved))
        return widths.narrowed(arrays, jax.eval_shape(model.init, key, x))

    at_width = None
    if model.at_width is not None:

        def at_width(rate: float, scaler: Any = 1.0) -> types.Model:
            return _from(saved, model.at_width(rate, scaler))

    return model._replace(init=init, at_width=at_width)


def _stages(model: types.Model, variables: types.Variables) -> dict[str, Any]:
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


def _difference(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The first difference between two nested dictionaries of arrays, or ""."""
    flat = [traverse_util.flatten_dict(tree, sep="/") for tree in (wanted, found)]
    wanted, found = ({k: list(np.shape(v)) for k, v in one.items()} for one in flat)
    for path in [*wanted, *found]:
        if wanted.get(path) != found.get(path):
            expected = wanted.get(path, "nothing of that name")
            return f"{path} is {found.get(path, 'missing')}, expected {expected}"
    return ""
