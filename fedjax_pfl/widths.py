"""Submodels by width: a client of level n holds the first n/L of all hidden channels.

A narrower model's leaves are leading slices of the wide model's, and so are its
optimizer states. L is the number of parts of `--level_mix`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    boundary,
    each_client,
    levels,
    local_training,
    optimizer,
    shapes,
    traffic,
    types,
)

# The end of messages about a model without a narrower form
WITH_WIDTHS = (
    "convnet, resnet18 or resnet34 (your own: a function of width, such as model="
    "lambda width: [Body(ceil(64 * width)), Head()])"
)


def narrower(model: types.Model, rate: float, scaler: Any = 1.0) -> types.Model:
    """`model.at_width(rate, scaler)`, a ValueError without a narrower form."""
    if model.at_width is None:
        raise ValueError(
            f"--model={model.name} has no narrower form that is a slice of it, as it "
            f"flattens maps or has one width; take {WITH_WIDTHS}"
        )
    return model.at_width(rate, scaler)


def models(hparams: levels.Levels, model: types.Model) -> list[types.Model]:
    """The model of each level 1..`--max_level`.

    Raises ValueError if the model has no narrower form, or if there is no such level.
    """
    count = len(levels.mix(hparams))
    return [narrower(model, n / count) for n in range(1, levels.top(hparams) + 1)]


def narrowed(tree: Any, like: Any) -> Any:
    """The leading slices of leaves, in the shapes of `like`."""
    return jax.tree.map(
        lambda leaf, s: leaf[tuple(slice(n) for n in s.shape)], tree, like
    )


def widened(tree: Any, full: Any) -> Any:
    """`full` with the leading slices of its leaves replaced by those of `tree`."""

    def one(leaf: jax.Array, full: jax.Array) -> jax.Array:
        # Places of a whole leaf would be an array without elements, with which the
        # compiler of jaxlib 0.11 crashes inside of `shard_map`.
        if leaf.shape == full.shape:
            return leaf
        return full.at[tuple(slice(n) for n in leaf.shape)].set(leaf)

    return jax.tree.map(one, tree, full)


def covered(params: list[Any], level: jax.Array) -> Any:
    """The entries of the widest parameters that a client of a level holds, bool.

    `params` are shape structs of every level's parameters, the widest last. `level` is
    int32[], 1..L.
    """

    def inside(*by_level: jax.ShapeDtypeStruct) -> jax.Array:
        sides = jnp.array([one.shape for one in by_level])[level - 1]
        full = by_level[-1].shape
        places = (
            jax.lax.broadcasted_iota(jnp.int32, full, i) for i in range(len(full))
        )
        pairs = zip(places, sides, strict=True)
        return functools.reduce(jnp.logical_and, (p < side for p, side in pairs))

    return jax.tree.map(inside, *params)


def own_entries(params: list[Any], client: each_client.Client, level: int) -> Any:
    """The entries of a level's parameters that the client holds, bool leaves.

    A chunk of clients runs the slice of its largest level, at least the client's own.
    """
    return narrowed(covered(params, client.level), params[level - 1])


def submodel(
    hparams: local_training.LocalTraining, shape_at: list[types.Variables]
) -> levels.Submodel:
    """The slice of a client's level, as `levels.make` needs it.

    Statistics are not averaged, because norms use those of their batch alone. `hparams`
    includes `levels.Levels`; `shape_at` has the shapes of all `models`.
    """
    params_at = [one.params for one in shape_at]

    def part_at(level: int) -> tuple:
        """Shapes of a level's parameters, statistics and persistent optimizer state."""
        params, stats = shape_at[level - 1]
        if hparams.optimizer_state == "reset":
            return params, stats, ()
        return params, stats, jax.eval_shape(lambda: optimizer.fresh(hparams, params))

    def cut(whole: tuple, client: each_client.Client, level: int) -> tuple:
        """The slice of the chunk's level, 0 beyond the client's own."""
        params, *rest = narrowed(whole, part_at(level))
        zeros = jax.tree.map(jnp.zeros_like, params)
        own = own_entries(params_at, client, level)
        return boundary.select(own, params, zeros), *rest

    def paste(part: tuple, whole: tuple, client: each_client.Client, level: int):
        return widened(part, whole)

    def held(cohort: types.Cohort, _: Any) -> types.Variables:
        mask = jax.vmap(functools.partial(covered, params_at))(cohort.level)
        none = jnp.zeros_like(cohort.row_mask)
        return types.Variables(mask, (none,) * len(mask))

    count = len(levels.mix(hparams))
    pairs = [
        traffic.both_ways(f"width {number}/{count}", shapes.tree_bytes(params))
        for number, params in enumerate(params_at, start=1)
    ]

    def sent(cohort: types.Cohort) -> dict[str, jax.Array]:
        levels_of = enumerate(pairs, start=1)
        return {kind.name: cohort.level == n for n, pair in levels_of for kind in pair}

    kinds = tuple(kind for pair in pairs for kind in pair)
    return levels.Submodel(cut, paste, held, kinds, sent, len(shape_at), True)
