"""Writes a model as a program that needs only jax: a `.stablehlo` file.

It is `jax.export`'s serialization of a function from raw images [B, ...], of the type
of the data set and the shape that the run trained on (after `--layout`, `--image_size`
and `--image_channels`), to logits f32[B, Y] (of a text f32[B, T, V]), for any B and for
each of `PLATFORMS`. Normalisation and parameters are inside the program. The function's
name, `fun_name`, is a JSON with

* `model`: the name of the model;
* `classes`: the names of its classes in the order of the logits, null = 0..Y-1;
* `columns`: the names of a table's columns, null = the data are not a table.
"""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export

from launch.assemble import model_files

SUFFIX = ".stablehlo"
PLATFORMS = ("cpu", "tpu", "cuda")


def write(
    path: pathlib.Path,
    logits: Callable[[jax.Array], jax.Array],
    shape: tuple[int, ...],
    dtype: Any,
    name: str,
    classes: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> pathlib.Path:
    """Writes the function `logits` of images [B, *shape] of a dtype to a file.

    Raises:
        ValueError: the package flatbuffers is missing.
        OSError: it cannot be written.
    """
    model_files.import_package("flatbuffers", SUFFIX)
    images = jax.ShapeDtypeStruct((*export.symbolic_shape("B"), *shape), dtype)
    about = {"model": name, "classes": classes, "columns": columns}
    logits.__name__ = json.dumps(about)
    program = export.export(jax.jit(logits), platforms=PLATFORMS)(images)
    return model_files.write_bytes(path, bytes(program.serialize()))
