"""Writes models to files, reads them, and starts runs from them.

A file holds a nested dictionary of arrays, which can be read without this package:

* `stages`: by name in the order of the chain, each with `params` and, if it has any,
  `stats` (running statistics); a stage with an exit has these under `trunk` and `exit`;
* `input`: `mean` and `scale`; the first stage gets `(image - mean) * scale`;
* `sha256`: the hexadecimal hash of all these arrays (`checkpoint.digest`).

`.msgpack` is flax.serialization's format; the keys of an `.npz` are paths such as
`stages/conv1/params/kernel`.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import serialization, traverse_util

from data import files
from fedjax_pfl import checkpoint, shapes, types

SUFFIXES = (".msgpack", ".npz")


def write(
    path: Any, model: types.Model, variables: types.Variables, normal: Mapping[str, Any]
) -> pathlib.Path:
    """Writes a model to a file atomically; `normal` has its `mean` and `scale`.

    Raises:
        ValueError: the path has another suffix, or is a folder.
        OSError: it cannot be written.
    """
    path = files.given(path, "a model's file")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: a model's file ends in {' or '.join(SUFFIXES)}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    tree = _arrays({"stages": _stages(model, variables), "input": dict(normal)})
    digest = checkpoint.digest(tree)
    tree["sha256"] = np.asarray(digest) if path.suffix == ".npz" else digest
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.partial{path.suffix}")
    with files.created(temporary) as file:
        if path.suffix == ".npz":
            np.savez(file, **traverse_util.flatten_dict(tree, sep="/"))
        else:
            # A copy, as without `in_place`, would sort the stages by name.
            file.write(serialization.msgpack_serialize(tree, in_place=True))
    return temporary.rename(path)


def read(path: Any) -> dict[str, Any]:
    """The nested dictionary in a file.

    Raises:
        ValueError: one line: there is no file, or it is not a model's.
    """
    path = pathlib.Path(path).expanduser()
    try:
        files.check(path, "a model's file")
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                flat = {name: file[name] for name in file.files}
            tree = traverse_util.unflatten_dict(flat, sep="/")
        else:
            tree = serialization.msgpack_restore(path.read_bytes())
        if not isinstance(tree, dict) or not isinstance(tree.get("stages"), dict):
            raise ValueError("it has no stages")
        recorded = tree.pop("sha256", None)
        if recorded is not None and str(recorded) != checkpoint.digest(tree):
            raise ValueError("its arrays do not match its checksum")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # msgpack, zipfile and numpy have various errors
        reason = (str(error) or type(error).__name__).splitlines()[0][:160]
        raise ValueError(f"{path} is not a model's file ({reason})") from error
    return tree


def starting(
    path: str,
    model: types.Model,
    shape: tuple[int, ...],
    normal: tuple[np.ndarray, np.ndarray],
) -> types.Model:
    """The same model with the initial variables of a file.

    Its narrower forms start from leading slices of them. `shape` is that of an example,
    and `normal` are mean and scale of the run's images.

    Raises:
        ValueError: one line: it is not a model's file, holds another model, another
            normalisation, or values that are not finite.
    """
    tree = read(path)
    stages = tree["stages"]
    _check_input(path, tree.get("input", {}), normal)
    wanted = _stages(model, shapes.variables(model, shape))
    odd = _difference(wanted, stages)
    if odd:
        raise ValueError(
            f"--init_from={path} holds another model than --model={model.name}: {odd}"
        )
    kinds = traverse_util.flatten_dict(wanted, sep="/")
    for name, leaf in traverse_util.flatten_dict(stages, sep="/").items():
        leaf, kind = np.asarray(leaf), kinds[name].dtype
        is_float = jax.numpy.issubdtype(kind, np.floating)
        if not (jax.numpy.issubdtype(leaf.dtype, np.floating) or leaf.dtype == kind):
            raise ValueError(
                f"--init_from={path}: stages/{name} is {leaf.dtype}, expected {kind}"
            )
        if is_float and not np.isfinite(leaf.astype(np.float32)).all():
            raise ValueError(
                f"--init_from={path}: stages/{name} holds nan or infinity; take a file "
                "of a run that did not diverge"
            )
    # npz files have no empty dictionaries, so a stage without parameters is missing.
    held = [stages.get(name, {}) for name in model.stage_names]
    parts = [stage if "exit" in stage else {"trunk": stage} for stage in held]
    params = [{n: own.get("params", {}) for n, own in one.items()} for one in parts]
    stats = [
        {n: own["stats"] for n, own in one.items() if "stats" in own} for one in parts
    ]
    return _from(types.Variables(tuple(params), tuple(stats)), model)


def _check_input(
    path: str, found: Mapping[str, Any], normal: tuple[np.ndarray, np.ndarray]
) -> None:
    """Refuses a model that was trained with another normalisation.

    Constants may differ by .3 standard deviations, in the root mean square over all
    numbers with a mean of their own. Other rows of the same data differ by less.
    """
    if not {"mean", "scale"} <= found.keys():
        return
    mean, scale = (np.asarray(one, np.float64) for one in normal)
    try:
        before = np.asarray(found["mean"], np.float64), np.asarray(found["scale"])
        gaps = (mean - before[0]) * scale, before[1] / scale - 1
        is_like = all(np.sqrt(np.mean(gap**2)) <= 0.3 for gap in gaps)
    except (ValueError, TypeError):
        is_like = False
    if not is_like:
        raise ValueError(
            f"--init_from={path}: its model was trained with another normalisation; "
            "give its --normalization, --image_size and --dataset"
        )


def _from(saved: types.Variables, model: types.Model) -> types.Model:
    """A model whose initial variables are leading slices of saved ones."""

    def init(key: jax.Array, x: jax.Array) -> tuple[types.Params, types.Stats]:
        like = types.Variables(*jax.eval_shape(model.init, key, x))
        return jax.tree.map(
            lambda s, leaf: jax.numpy.asarray(leaf)[tuple(map(slice, s.shape))],
            tuple(like),
            tuple(saved),
        )

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
        out[name] = parts if "exit" in parts else parts["trunk"]
    return out


def _arrays(tree: Any) -> Any:
    """The same nested dictionary in its order, with numpy arrays."""
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
