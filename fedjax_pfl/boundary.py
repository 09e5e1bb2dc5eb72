"""Where a model is cut: personalization boundaries and the layer-dropping schedule.

A boundary l counts layers from 1: stages 1..l are on one side of the cut, l+1..L on
the other; l = L leaves the other side empty.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_pfl import masks, options, traffic, types


def last_convolution(model: types.Model, example_shape: tuple[int, ...]) -> int:
    """The last stage with a four-dimensional kernel; L - 1 for a model without any.

    At least 1, also for a model of one stage.
    """
    params, _ = traffic.shapes(model, example_shape)
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
    dropping: options.LayerDropping, model: types.Model, example_shape: tuple[int, ...]
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
        stage = options.DROP_SETS[dropping.drop_set]
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
    participations: jax.Array,
    *,
    moves: bool,
    every: int,
    num_stages: int,
    lowest: int,
) -> jax.Array:
    """bool[..., L]: the stages 1..l of clients that took part Z int32[...] times.

    l is `lowest` for ever, or, if the boundary `moves`, where `dropped` has it.
    """
    layer = jnp.full_like(participations, lowest)
    if moves:
        layer = dropped(participations, every, num_stages, lowest)
    return masks.held(layer, num_stages)
