"""Masks of stages: personalization boundaries and the schedule of layer dropping.

A mask is a prefix pytree of parameters (or of statistics) with bool leaves that
broadcast: one for a stage, for a part of it, or for every entry. A boundary l counts
layers from 1: stages 1..l are on one side of the cut and l+1..L on the other, which is
empty for l = L.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl import losses, options, shapes, types


@dataclasses.dataclass(frozen=True)
class LayerDropping:
    """Options of a boundary that moves from deep to shallow layers (FedD2S)."""

    drop_every: int = options.option(
        3,
        "participations between two drops [Z0], 0 = never drop",
        minimum=0,
        needs={"layer_dropping": (True,)},
        is_noted=True,
    )
    first_layer: int = options.option(
        0,
        "boundary of the first participation, counted from 1; 0 = the last layer",
        minimum=0,
        needs={"layer_dropping": (True,)},
    )
    min_layer: int = options.option(
        0,
        "shallowest boundary, counted from 1; 0 = the last convolution, or the last "
        "hidden layer of a model without any",
        minimum=0,
        needs={"layer_dropping": (True,), "drop_every": options.ON},
    )


class Schedule(NamedTuple):
    """The boundary of a client: l = max(last, first - floor((Z - 1) / every)).

    This is Eq. 6 of FedD2S with the floor that the paper omits. `first` and `last` are
    the deepest and the shallowest boundary, 0..L, `every` is Z0 >= 1, `num_stages` L.
    """

    first: int
    last: int
    every: int
    num_stages: int

    def layer(self, participations: jax.Array) -> jax.Array:
        """l int32[...] at participation Z int32[...] from 1; Z = 0 gives `first`."""
        steps = jnp.maximum(participations - 1, 0) // self.every
        return jnp.maximum(self.last, self.first - steps)

    def kept(self, participations: jax.Array) -> jax.Array:
        """bool[..., L]: the stages 1..l."""
        return held(self.layer(participations), self.num_stages)


def fixed(layer: int, model: types.Model) -> Schedule:
    """A boundary after stage `layer` of 0..L that never moves."""
    return Schedule(layer, layer, 1, len(model.stage_names))


def held(layer: jax.Array, num_stages: int) -> jax.Array:
    """bool[..., L]: the stages 1..l below a boundary l int32[...]."""
    return jnp.arange(num_stages) < layer[..., None]


def by_stage(mask: jax.Array) -> tuple[jax.Array, ...]:
    """A mask bool[..., L] as a prefix pytree: one bool[...] for each stage."""
    return tuple(mask[..., stage] for stage in range(mask.shape[-1]))


def select(mask: Any, new: Any, old: Any) -> Any:
    """`where(mask, new, old)`, in which `mask` is a prefix pytree and leaves broadcast.

    Examples:
        >>> mask = by_stage(jnp.array([True, False]))
        >>> new, old = (jnp.ones(2), jnp.ones(1)), (jnp.zeros(2), jnp.zeros(1))
        >>> [stage.tolist() for stage in select(mask, new, old)]
        [[1.0, 1.0], [0.0]]
    """
    return jax.tree.map(jnp.where, jax.tree.broadcast(mask, new), new, old)


class Division(NamedTuple):
    """A model in two parts, leaf by leaf: what travels, and what stays.

    `like` are the variables as shape structs, and `is_sent` says for each of their
    leaves, in the order of `jax.tree.leaves`, whether it travels.
    """

    like: types.Variables
    is_sent: tuple[bool, ...]

    def sent(self, variables: types.Variables) -> tuple[jax.Array, ...]:
        """The leaves that travel."""
        pairs = zip(jax.tree.leaves(variables), self.is_sent, strict=True)
        return tuple(leaf for leaf, is_sent in pairs if is_sent)

    def kept(self, variables: types.Variables) -> tuple[jax.Array, ...]:
        """The leaves that stay."""
        pairs = zip(jax.tree.leaves(variables), self.is_sent, strict=True)
        return tuple(leaf for leaf, is_sent in pairs if not is_sent)

    def joined(self, sent: Sequence[Any], kept: Sequence[Any]) -> types.Variables:
        """The model of both parts; ValueError for other numbers of leaves."""
        counts = self.is_sent.count(True), self.is_sent.count(False)
        if (found := (len(sent), len(kept))) != counts:
            raise ValueError(
                f"joined: got {found[0]} leaves that travel and {found[1]} that stay, "
                f"expected {counts[0]} and {counts[1]}"
            )
        parts = iter(kept), iter(sent)
        leaves = [next(parts[is_sent]) for is_sent in self.is_sent]
        return jax.tree.unflatten(jax.tree.structure(self.like), leaves)


def divided(
    is_sent: Any, model: types.Model, example_shape: tuple[int, ...]
) -> Division:
    """The division of a model by bools: one for each stage, or a prefix of Variables.

    Raises ValueError if a list has another length than the model has stages.

    Examples:
        >>> from models import MODELS
        >>> mlp = MODELS["mlp"](10)
        >>> head = divided([False, False, True], mlp, (28, 28, 1))
        >>> [leaf.shape for leaf in head.sent(head.like)]
        [(10,), (64, 10)]
    """
    like = shapes.variables(model, example_shape)
    if not isinstance(is_sent, types.Variables):
        if len(is_sent) != len(model.stage_names):
            raise ValueError(
                f"divided: {len(is_sent)} bools, {model.name} has "
                f"{len(model.stage_names)} stages; give one for each"
            )
        is_sent = types.Variables(tuple(is_sent), tuple(is_sent))
    every = jax.tree.leaves(jax.tree.broadcast(is_sent, like))
    return Division(like, tuple(map(bool, every)))


def splice(
    client: types.Variables, server: types.Variables, keep: jax.Array
) -> types.Variables:
    """`where(keep[i], client[i], stop_gradient(server[i]))`; keep is bool[L].

    One ordinary forward pass through the result runs the client's stages where `keep`
    is True and the frozen server's elsewhere. Gradients of the frozen stages are zero
    without a further mask.

    Examples:
        >>> client = types.Variables((jnp.ones(1), jnp.ones(1)), ({}, {}))
        >>> server = types.Variables((jnp.zeros(1), jnp.zeros(1)), ({}, {}))
        >>> mixed = splice(client, server, jnp.array([True, False]))
        >>> [stage.tolist() for stage in mixed.params]
        [[1.0], [0.0]]
    """
    mask = by_stage(keep)
    return select(
        types.Variables(mask, mask),
        types.Variables(*client),
        jax.lax.stop_gradient(types.Variables(*server)),
    )


# The end of messages about a model of one stage, which cannot be divided
SEVERAL_STAGES = (
    "a model of several stages (your own: a list model=[Body(), Head()], an "
    "nn.Sequential, or one module and split=('head',))"
)


def outputs(
    model: types.Model, side: types.Variables, h: jax.Array, start: int, **mode: Any
) -> tuple[dict[int, jax.Array], types.Stats]:
    """Outputs of stages from `start` on, by stage, and new statistics.

    `h` is the output of stage `start - 1`, and `mode` are arguments of a forward pass.
    """
    params, stats = side
    out = {}
    for stage in range(start, len(params)):
        h, stats = model.forward(params, stats, h, start=stage, stop=stage + 1, **mode)
        out[stage] = h
    return out, stats


def gap(
    student: Mapping[int, jax.Array],
    target: Mapping[int, jax.Array],
    stages: Sequence[int],
    kept: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """The mean squared error f32[] of the outputs of stage l, the last stage kept.

    `student` and `target` have outputs f32[B, ...] by stage, and no gradient flows to
    the target. `stages` are the possible values of l, counted from 0. `kept` bool[L]
    has the stages 1..l, and `mask` is bool[B].
    """
    total = jnp.zeros(())
    for stage in stages:
        off = student[stage] - jax.lax.stop_gradient(target[stage])
        error = losses.masked_mean((off.reshape(len(off), -1) ** 2).mean(1), mask)
        total += jnp.where(kept.sum() == stage + 1, error, 0)
    return total


def check_several(model: types.Model) -> None:
    """Refuses a model of one stage, which no boundary divides, with a ValueError."""
    if len(model.stage_names) == 1:
        raise ValueError(
            f"--model={model.name} has one layer, which no boundary divides; take "
            f"{SEVERAL_STAGES}"
        )


def ends_in_one_layer(params: types.Params, num_classes: int) -> bool:
    """Whether the last stage is a kernel [D, Y] alone, or with a bias [Y]."""
    found = sorted((leaf.ndim, leaf.shape[-1]) for leaf in jax.tree.leaves(params[-1]))
    return found in ([(2, num_classes)], [(n, num_classes) for n in (1, 2)])


def last_convolution(model: types.Model, example_shape: tuple[int, ...]) -> int:
    """The last stage with a four-dimensional kernel, else L - 1, but at least 1."""
    params, _ = shapes.variables(model, example_shape)
    found = [
        number
        for number, stage in enumerate(params, start=1)
        if any(leaf.ndim == 4 for leaf in jax.tree.leaves(stage))
    ]
    return max(found, default=max(len(params) - 1, 1))


def first_personal(
    name: str,
    model: types.Model,
    example_shape: tuple[int, ...],
    flag: str = "personal_from",
) -> int:
    """Index of the first personal stage, 0..L (L = none is personal).

    `name` is `--personal_from`, or another `flag`: a stage's name, `last`, `none`, or
    empty for the first stage after the last convolution (the last stage of a model
    without any). Raises ValueError for a stage that the model does not have.
    """
    names = model.stage_names
    if not name:
        return last_convolution(model, example_shape)
    if name == "none":
        return len(names)
    if name == "last":
        return len(names) - 1
    if name not in names:
        raise ValueError(
            f"--{flag}={name}: --model={model.name} has the stages "
            f"{', '.join(names)}; take one of them, last or none"
        )
    return names.index(name)


def some_shared(name: str, model: types.Model, example_shape: tuple[int, ...]) -> int:
    """Like `first_personal`, with parameters below, else a ValueError."""
    cut = first_personal(name, model, example_shape)
    params, _ = shapes.variables(model, example_shape)
    if jax.tree.leaves(params[:cut]):
        return cut
    cure = "a later one, or --algo=local"
    if len(model.stage_names) == 1:
        cure = SEVERAL_STAGES
    where = f"before --personal_from={name}" if name else "below its personal stages"
    raise ValueError(
        f"--model={model.name} has no parameters {where}: nothing would be shared; "
        f"take {cure}"
    )


def middle(
    name: str,
    model: types.Model,
    example_shape: tuple[int, ...],
    flag: str = "personal_from",
) -> int:
    """Like `first_personal`, with parameters on both sides, else a ValueError."""
    cut, names = first_personal(name, model, example_shape, flag), model.stage_names
    params, _ = shapes.variables(model, example_shape)
    fit = [
        at
        for at in range(len(names))
        if all(map(jax.tree.leaves, (params[:at], params[at:])))
    ]
    if cut not in fit:
        later = ", ".join(names[at] for at in fit)
        has_lower = bool(jax.tree.leaves(params[:cut]))
        raise ValueError(
            f"--{flag}={name} leaves --model={model.name} without "
            f"{'a classifier' if has_lower else 'an extractor'}; take "
            f"{f'one of {later}' if later else SEVERAL_STAGES}"
        )
    return cut


def schedule(
    dropping: LayerDropping, model: types.Model, example_shape: tuple[int, ...]
) -> Schedule:
    """The schedule of a run's options.

    Raises ValueError if the model has one stage or no such layer, or if `--min_layer`
    is deeper than the first.
    """
    check_several(model)
    names = model.stage_names
    for flag in ("first_layer", "min_layer"):
        layer = getattr(dropping, flag)
        why = f"the layers of --model={model.name} ({', '.join(names)})"
        options.check_at_most(flag, layer, len(names), why)
    first = dropping.first_layer or len(names)
    if not dropping.drop_every:
        return fixed(first, model)
    why = "where the boundary begins (--first_layer)"
    options.check_at_most("min_layer", dropping.min_layer, first, why)
    last = dropping.min_layer or min(first, last_convolution(model, example_shape))
    return Schedule(first, last, dropping.drop_every, len(names))
