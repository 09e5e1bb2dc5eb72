"""The clients' optimizer, masked: untrained parts keep their parameters and moments.

`hparams` are options of `local_training.LocalTraining`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl import boundary, options, shapes, stacked, types


def make(
    hparams: Any, learning_rate: float | jax.Array
) -> optax.GradientTransformation:
    """The clients' optimizer. Weight decay is L2 on the gradient, as in PyTorch."""
    steps = []
    if not options.is_off(hparams.weight_decay):
        steps.append(optax.add_decayed_weights(hparams.weight_decay))
    if hparams.client_optimizer == "adam":
        steps.append(optax.scale_by_adam())
    elif not options.is_off(hparams.client_momentum):
        steps.append(optax.trace(decay=hparams.client_momentum))
    return optax.chain(*steps, optax.scale_by_learning_rate(learning_rate))


def learning_rate(hparams: Any, round: jax.Array) -> jax.Array:
    """client_lr * client_lr_decay ** round, f32[]; zero-based, constant in a round."""
    return hparams.client_lr * hparams.client_lr_decay ** round.astype(jnp.float32)


def init(tx: optax.GradientTransformation, params: types.Params) -> tuple:
    """One independent optimizer state per stage, so that masks can freeze a stage."""
    return tuple(tx.init(stage) for stage in params)


def fresh(hparams: Any, params: types.Params) -> tuple:
    """The optimizer state of one client before its first step."""
    return init(make(hparams, hparams.client_lr), params)


def persistent(hparams: Any, task: types.Task, algorithm: types.Algorithm) -> Any:
    """All clients' optimizer states before the first round, () if none persists.

    Args:
        hparams: The algorithm's options. Without `optimizer_state` none persists.
        task: The clients and their models.
        algorithm: Says what a client trains.

    Returns:
        Leaves [K, ...]. With `Algorithm.by_architecture` a tuple of such.
    """
    if getattr(hparams, "optimizer_state", "reset") == "reset":
        return ()

    def begin(params: types.Params) -> tuple:
        # The first state of these optimizers depends on shapes alone.
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        return fresh(hparams, zeros)

    def of(model: types.Model) -> tuple:
        return begin(shapes.variables(model, task.example_shape).params)

    if algorithm.by_architecture:
        groups = enumerate(task.client_models)
        return tuple(
            stacked.repeat(of(one), len(task.members(number))) for number, one in groups
        )
    own = algorithm.opt_state
    one = of(task.client_model) if own is None else own(begin)
    return stacked.repeat(one, task.num_rows)


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: types.Params,
    opt_state: tuple,
    params: types.Params,
    mask: Any,
) -> tuple[types.Params, tuple]:
    """One optimizer step where `mask` is True. Elsewhere the old values stay bitwise.

    Moments and counts are selected with the parameters, because with momentum a zero
    gradient would still move a weight.

    Args:
        tx: The optimizer.
        grads: Gradients.
        opt_state: One state per stage, so that a frozen stage's count stays too.
        params: Parameters.
        mask: Prefix pytree of `params` with one entry per stage.
    """
    new_params, new_state = [], []
    for grad, state, stage, part in zip(grads, opt_state, params, mask, strict=True):
        update, moved = tx.update(grad, state, stage)
        moved_stage = optax.apply_updates(stage, update)
        new_params.append(boundary.select(part, moved_stage, stage))
        state_mask = _of_state(tx, part, stage, state)
        new_state.append(boundary.select(state_mask, moved, state))
    return tuple(new_params), tuple(new_state)


def _of_state(tx: Any, mask: Any, stage: Any, state: Any) -> Any:
    """The mask of a stage's optimizer state: moments follow parameters, counts any."""
    if isinstance(mask, jax.Array) and not mask.ndim:
        return mask

    def spread(mask: jax.Array, part: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(mask, leaf.shape), part)

    entries = jax.tree.map(spread, mask, stage)
    moves = any_of(mask)
    return optax.tree_utils.tree_map_params(
        tx,
        lambda _, entry: entry,
        state,
        entries,
        transform_non_params=lambda _: moves,
    )


def any_of(mask: Any) -> jax.Array:
    """bool[]: whether any entry of a mask is True."""
    parts = (m.any() if m.ndim else m for m in jax.tree.leaves(mask))
    return functools.reduce(jnp.logical_or, parts, jnp.zeros((), bool))


def clip(grads: types.Params, norm: float | jax.Array, mask: Any) -> types.Params:
    """Scales gradients to global norm `norm` where they exceed it; 0 (static) = never.

    The norm is that of the entries in `mask`.
    """
    if options.is_off(norm):
        return grads
    grads = boundary.select(mask, grads, jax.tree.map(jnp.zeros_like, grads))
    size = jnp.maximum(optax.global_norm(grads), 1e-12)
    return jax.tree.map(lambda leaf: leaf * jnp.minimum(1, norm / size), grads)
