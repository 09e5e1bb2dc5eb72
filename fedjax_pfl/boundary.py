"""Which stages are whose: masks, personalization boundaries, the dropping schedule.

A mask is a prefix pytree of parameters (or of statistics) whose leaves are bool and
broadcast: one for a stage, for a part of it, or for every entry. A boundary l counts
layers from 1: stages 1..l are on one side of the cut, l+1..L on the other; l = L leaves
the other side empty.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import options, shapes, types

DROP_SETS = {"L1": "F1", "L2": "F2", "L3": "C3", "L4": "C2"}


@dataclasses.dataclass(frozen=True)
class LayerDropping:
    """Options of a boundary that moves from deep to shallow layers (FedD2S)."""

    drop_every: int = options.option(
        3, "participations between two drops [Z0], 0 = never drop", minimum=0
    )
    drop_set: str = options.option(
        "", "FedD2S's sets of layers that may be the boundary", choices=("", *DROP_SETS)
    )
    min_layer: int = options.option(
        0,
        "shallowest boundary, counted from 1; 0 = the last convolution, or the last "
        "hidden layer of a model without any",
        minimum=0,
    )


def held(depth: jax.Array, num_stages: int) -> jax.Array:
    """bool[..., L]: the stages that a client of `depth` int32[...] holds."""
    return jnp.arange(num_stages) < depth[..., None]


def by_stage(mask: jax.Array) -> tuple[jax.Array, ...]:
    """A mask bool[..., L] as a prefix pytree: one bool[...] for each stage."""
    return tuple(mask[..., stage] for stage in range(mask.shape[-1]))


def select(mask: Any, new: Any, old: Any) -> Any:
    """`where(mask, new, old)`; `mask` is a prefix pytree, leaves broadcast."""
    return jax.tree.map(
        lambda m, n, o: jax.tree.map(lambda a, b: jnp.where(m, a, b), n, o),
        mask,
        new,
        old,
    )


def splice(
    client: types.Variables, server: types.Variables, keep: jax.Array
) -> types.Variables:
    """`where(keep[i], client[i], stop_gradient(server[i]))`; keep is bool[L].

    One ordinary forward pass through the result runs the client's stages where
    `keep` is True and the frozen server's elsewhere; gradients are masked for free.
    """
    mask = by_stage(keep)
    return select(
        types.Variables(mask, mask),
        types.Variables(*client),
        jax.lax.stop_gradient(types.Variables(*server)),
    )


def last_convolution(model: types.Model, example_shape: tuple[int, ...]) -> int:
    """The last stage with a four-dimensional kernel; L - 1 for a model without any.

    At least 1, also for a model of one stage.
    """
    params, _ = shapes.variables(model, example_shape)
    found = [
        number
        for number, stage in enumerate(params, start=1)
        if any(leaf.ndim == 4 for leaf in jax.tree.leaves(stage))
    ]
    return max(found, default=max(len(params) - 1, 1))


def first_personal(
    name: str, model: types.Model, example_shape: tuple[int, ...]
) -> int:
    """Index of the first personal stage, 0..L (L = none is personal).

    Args:
        name: `--personal_from`: a stage's name, `none`, or empty for the first stage
            after the last convolution (the last stage without any).
        model: The model.
        example_shape: Shape of one example.

    Raises:
        ValueError: the model has no such stage.
    """
    names = model.stage_names
    if not name:
        return last_convolution(model, example_shape)
    if name == "none":
        return len(names)
    if name not in names:
        raise ValueError(
            f"--personal_from={name}: --model={model.name} has the stages "
            f"{', '.join(names)}; take one of them or none"
        )
    return names.index(name)


def shallowest(
    dropping: LayerDropping, model: types.Model, example_shape: tuple[int, ...]
) -> int:
    """The last boundary of the schedule, 1..L.

    Raises:
        ValueError: the model does not have that layer or dropping set.
    """
    names = model.stage_names
    if dropping.drop_set:
        if dropping.min_layer:
            raise ValueError(
                f"--drop_set={dropping.drop_set} and --min_layer={dropping.min_layer} "
                "both name the shallowest boundary; give one of them"
            )
        stage = DROP_SETS[dropping.drop_set]
        if stage not in names:
            raise ValueError(
                f"--drop_set={dropping.drop_set} goes down to the stage {stage}, "
                f"--model={model.name} has {', '.join(names)}; take --model=m1 or m2, "
                "or give --min_layer"
            )
        return names.index(stage) + 1
    check_layer("min_layer", dropping.min_layer, model)
    return dropping.min_layer or last_convolution(model, example_shape)


def check_layer(flag: str, layer: int, model: types.Model) -> None:
    """Raises ValueError if a model has no layer of that number."""
    if layer > len(model.stage_names):
        raise ValueError(
            f"--{flag}={layer}: --model={model.name} has "
            f"{len(model.stage_names)} layers ({', '.join(model.stage_names)}); "
            "lower it"
        )


def dropped(
    participations: jax.Array, every: int, num_stages: int, minimum: int
) -> jax.Array:
    """l = max(minimum, L - floor((Z - 1) / Z0)), int32[...].

    Args:
        participations: Z int32[...], the present one counted; 0 counts as 1.
        every: Z0; 0 = never drop.
        num_stages: L.
        minimum: The shallowest boundary.

    Source: FedD2S, Eq. 6, with the floor that it lacks.
    """
    if not every:
        return jnp.full_like(participations, num_stages)
    steps = jnp.maximum(participations - 1, 0) // every
    return jnp.maximum(minimum, num_stages - steps)


def stages_below(
    hparams: LayerDropping,
    lowest: int,
    num_stages: int,
    moves: bool,
    participations: jax.Array,
) -> jax.Array:
    """bool[..., L]: the stages 1..l of clients that took part Z int32[...] times.

    l is `lowest` for ever, or, if the boundary `moves`, where `dropped` has it.
    """
    layer = jnp.full_like(participations, lowest)
    if moves:
        layer = dropped(participations, hparams.drop_every, num_stages, lowest)
    return held(layer, num_stages)
