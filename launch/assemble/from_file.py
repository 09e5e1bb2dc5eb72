"""Starting points and teachers of a run: models in files, fitted to its data."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util

import models
from data import dataset, labels
from fedjax_pfl import shapes, types, widths
from fedjax_pfl import teacher as teacher_lib
from launch.assemble import fit, model_files
from launch.assemble.model_files import Facts, Rows


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
    line, tree = f"--init_from={path}", model_files.read(path)
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
        tree = model_files.read(given.teacher)
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
    found, mine = tree.get("classes"), source.classes
    mine = mine and model_files.escaped(mine)
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
    wanted = model_files.stages(model, shapes.variables(model, shape))
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
    before, mine = tree.get("columns"), columns and model_files.escaped(columns)
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


def note_of_overlap(
    known: Known, image: np.ndarray, measured: Mapping[str, np.ndarray]
) -> str:
    """A line about rows that a file's model may have been trained on, or "".

    `image` are the examples of the run [N, ...], and `measured` int[S, ...] its `test`
    and `validation` rows of each seed, -1 = padding.
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
    found = []
    for kind, every in measured.items():
        tests = [np.unique(row[row >= 0]) for row in every]
        most, total = max((int(is_trained[row].sum()), len(row)) for row in tests)
        found += [f"{most} of this run's {total} {kind} rows"] * (most > 0)
    if not found:
        unknown = (
            f"{line}: its model began with or learned from another one, whose train "
            "rows the file does not have; they may be test rows of this run"
        )
        return unknown if rows.others else ""
    return (
        f"{line}: {' and '.join(found)} are train rows of its model, "
        "so that accuracies may be too high; give the --seed, --partition, "
        "--test_split and --val_split that it was trained with"
    )


def _difference(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The first difference between two nested dictionaries of arrays, or ""."""
    flat = [traverse_util.flatten_dict(tree, sep="/") for tree in (wanted, found)]
    wanted, found = ({k: list(np.shape(v)) for k, v in one.items()} for one in flat)
    for path in [*wanted, *found]:
        if wanted.get(path) != found.get(path):
            expected = wanted.get(path, "nothing of that name")
            return f"{path} is {found.get(path, 'missing')}, expected {expected}"
    return ""
