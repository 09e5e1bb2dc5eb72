"""Shapes and sizes of models, inferred without computing anything."""

import functools
import math
from typing import Any

import jax

from fedjax_pfl import types

BATCH_ROWS = 8


def rounded_up(number: int) -> int:
    """The next power of two, so that tables of similar lengths have one shape.

    A program compiled for one partition then serves those of other seeds too.
    """
    return 1 << max(number - 1, 0).bit_length()


def rounded_up_finely(number: int) -> int:
    """The next of 16 sizes between two powers of two: at most a sixteenth more."""
    step = max(rounded_up(number) // 32, 1)
    return -(-number // step) * step


def capped(batch_size: int, max_rows: int) -> int:
    """A batch size no larger than the largest client's rows, to avoid pure padding.

    A batch that no client fills is padded to a multiple of `BATCH_ROWS`.
    """
    return min(batch_size, -(-max(max_rows, 1) // BATCH_ROWS) * BATCH_ROWS)


def tree_bytes(tree: Any) -> int:
    """Bytes of all leaves of a pytree of arrays or shape structs."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )


def variables(model: types.Model, example_shape: tuple[int, ...]) -> types.Variables:
    """A model's parameters and statistics as shape structs."""
    example = model.example(1, *example_shape)
    key = jax.eval_shape(jax.random.key, 0)
    return types.Variables(*jax.eval_shape(model.init, key, example))


def model_bytes(model: types.Model, example_shape: tuple[int, ...]) -> int:
    """Bytes of one message that holds a model's parameters and statistics."""
    return tree_bytes(variables(model, example_shape))


def stage_bytes(model: types.Model, example_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of each stage's parameters and statistics, length L."""
    pairs = zip(*variables(model, example_shape), strict=True)
    return tuple(tree_bytes(pair) for pair in pairs)


def _outputs(model: types.Model, example_shape: tuple[int, ...], stops: Any) -> list:
    """The outputs of the stages below each of `stops` for one example."""
    given = *variables(model, example_shape), model.example(1, *example_shape)
    return [
        jax.eval_shape(functools.partial(model.forward, stop=stop), *given)[0]
        for stop in stops
    ]


def output_bytes(model: types.Model, example_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of each stage's output for one example, length L."""
    stops = range(1, len(model.stage_names) + 1)
    return tuple(tree_bytes(out) for out in _outputs(model, example_shape, stops))


def embedding_width(model: types.Model, example_shape: tuple[int, ...]) -> int:
    """D, the width of the last stage's input."""
    (out,) = _outputs(model, example_shape, [len(model.stage_names) - 1])
    return math.prod(out.shape[1:])


def common_width(task: types.Task) -> int:
    """D of the server's and the clients' model, a ValueError where they differ."""
    server, client = task.server_model, task.client_model
    width, other = (
        embedding_width(model, task.example_shape) for model in (server, client)
    )
    if width != other:
        raise ValueError(
            f"--client_model={client.name} has embeddings of width {other}, "
            f"--model={server.name} of {width}; they are compared here, take models "
            "of the same width"
        )
    return width


def one_width(task: types.Task) -> int:
    """D of all clients' models, a ValueError where they differ."""
    shape, models = task.example_shape, task.client_models
    found = {model.name: embedding_width(model, shape) for model in models}
    if len({*found.values()}) > 1:
        raise ValueError(
            f"--client_model={','.join(found)} have embeddings of widths "
            f"{', '.join(map(str, found.values()))}; they are compared here, take "
            "models of one width"
        )
    return next(iter(found.values()))
