"""The local training loop: steps of one client, masked on the new parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pfl import losses, masks, options, rng, types


@struct.dataclass
class Batch:
    """One local step's examples.

    `image` f32[B, ...], `label` int32[B], `mask` bool[B], `position` int32[B] (index
    among the client's rows, for tables aligned by sample), `step` and `epoch` int32[],
    and a `key` of the step's own.
    """

    image: jax.Array
    label: jax.Array
    mask: jax.Array
    position: jax.Array
    step: jax.Array
    epoch: jax.Array
    key: jax.Array

    def train_mode(self) -> dict[str, Any]:
        """Arguments of a model's forward pass in this step."""
        return {"sample_mask": self.mask, "train": True, "key": self.key}


@struct.dataclass
class Trained:
    """Result of local training; `loss` is a (sum over examples, examples) pair."""

    params: types.Params
    stats: types.Stats
    opt_state: Any
    loss: losses.Pair


LossFn = Callable[[types.Params, types.Stats, Batch], tuple[jax.Array, types.Stats]]


class Objective(NamedTuple):
    """One optimizer step of a local step.

    Attributes:
        loss_fn: `(params, stats, batch) -> (loss f32[], stats)`, a mean over the real
            examples of the batch.
        trainable: bool[L], stages that may change, or a function of the batch that
            returns it (phases by `batch.epoch`); None = all.
    """

    loss_fn: LossFn
    trainable: jax.Array | Callable[[Batch], jax.Array] | None = None


def cross_entropy_loss(model: types.Model) -> LossFn:
    """The plain supervised loss: mean cross-entropy of a batch, in train mode."""

    def loss_fn(params, stats, batch):
        logits, stats = model.forward(params, stats, batch.image, **batch.train_mode())
        return losses.cross_entropy(logits, batch.label, batch.mask), stats

    return loss_fn


def optimizer(
    hparams: options.LocalTraining, learning_rate: float | jax.Array
) -> optax.GradientTransformation:
    """The clients' optimizer; weight decay is L2 on the gradient, as in PyTorch."""
    steps = []
    if not options.is_off(hparams.weight_decay):
        steps.append(optax.add_decayed_weights(hparams.weight_decay))
    if hparams.client_optimizer == "adam":
        steps.append(optax.scale_by_adam())
    elif not options.is_off(hparams.client_momentum):
        steps.append(optax.trace(decay=hparams.client_momentum))
    return optax.chain(*steps, optax.scale_by_learning_rate(learning_rate))


def learning_rate(hparams: options.LocalTraining, round: jax.Array) -> jax.Array:
    """client_lr * client_lr_decay ** round, f32[]; zero-based, constant in a round."""
    return hparams.client_lr * hparams.client_lr_decay ** round.astype(jnp.float32)


def init_optimizer(tx: optax.GradientTransformation, params: types.Params) -> tuple:
    """One independent optimizer state per stage, so that masks can freeze a stage."""
    return tuple(tx.init(stage) for stage in params)


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: types.Params,
    opt_state: tuple,
    params: types.Params,
    select: jax.Array,
) -> tuple[types.Params, tuple]:
    """One optimizer step per stage where `select` bool[L]; elsewhere bitwise the old.

    Moments and counts are selected with the parameters: with momentum a zero
    gradient would still move a weight.
    """
    new_params, new_state = [], []
    for grad, state, stage in zip(grads, opt_state, params, strict=True):
        update, state = tx.update(grad, state, stage)
        new_params.append(optax.apply_updates(stage, update))
        new_state.append(state)
    return (
        masks.select(select, tuple(new_params), params),
        masks.select(select, tuple(new_state), opt_state),
    )


def clip(
    grads: types.Params, norm: float | jax.Array, select: jax.Array
) -> types.Params:
    """Scales gradients to global norm `norm` where they exceed it; 0 (static) = no.

    The norm is that of the stages in `select` bool[L].
    """
    if options.is_off(norm):
        return grads
    grads = masks.select(select, grads, jax.tree.map(jnp.zeros_like, grads))
    size = jnp.maximum(optax.global_norm(grads), 1e-12)
    return jax.tree.map(lambda leaf: leaf * jnp.minimum(1, norm / size), grads)


def train(
    hparams: options.LocalTraining,
    objectives: Sequence[Objective],
    params: types.Params,
    stats: types.Stats,
    *,
    data: types.Data,
    client_id: jax.Array,
    plan: types.Plan,
    bound: jax.Array,
    key: jax.Array,
    round: jax.Array,
    opt_state: tuple | None = None,
    tag: rng.Tag = rng.Tag.LOCAL,
) -> Trained:
    """Trains one client, or a model of its own on its examples, for a plan's steps.

    Args:
        hparams: Optimizer, learning rate and its decay, clipping.
        objectives: Steps taken one after another on every batch; they share the
            optimizer state.
        params, stats: Where training starts.
        data: The tables.
        client_id: int32[].
        plan: One row of a plan: position int32[S, B], num_steps int32[].
        bound: int32[], steps to run; at least the client's own. Steps past the
            client's own change nothing.
        key: The run's root key; round, client and step are folded in here.
        round: int32[], zero-based.
        opt_state: One optimizer state per stage; None = fresh ones.
        tag: Stream of the steps' keys.

    Returns:
        `Trained`; its loss pair sums the last objective over real examples.
    """
    tx = optimizer(hparams, learning_rate(hparams, round))
    opt_state = init_optimizer(tx, params) if opt_state is None else opt_state
    key = rng.stream(key, tag, round, client_id)
    row_at = data.partition.train.of(client_id)

    def step(index: jax.Array, carry: Trained) -> Trained:
        position = plan.position[index]
        mask = (position >= 0) & (index < plan.num_steps)
        image, label = data.gather(row_at(jnp.maximum(position, 0)))
        batch = Batch(
            image=image,
            label=label,
            mask=mask,
            position=position,
            step=index,
            epoch=plan.epoch[index],
            key=jax.random.fold_in(key, index),
        )
        params, stats, opt_state = carry.params, carry.stats, carry.opt_state
        real = mask.any()
        for loss_fn, trainable in objectives:
            (loss, new_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(
                params, stats, batch
            )
            trainable = trainable(batch) if callable(trainable) else trainable
            select = jnp.ones(len(params), bool) if trainable is None else trainable
            select = select & real
            params, opt_state = apply_gradients(
                tx, clip(grads, hparams.clip_norm, select), opt_state, params, select
            )
            stats = masks.select(select, new_stats, stats)
        examples = mask.sum()
        total, count = carry.loss
        return Trained(
            params=params,
            stats=stats,
            opt_state=opt_state,
            loss=(total + jnp.where(real, loss * examples, 0), count + examples),
        )

    start_carry = Trained(
        params=params,
        stats=stats,
        opt_state=opt_state,
        loss=(jnp.zeros(()), jnp.zeros((), jnp.int32)),
    )
    return jax.lax.fori_loop(0, bound, step, start_carry)


def pooled_loss(loss: losses.Pair, row_mask: jax.Array) -> losses.Pair:
    """Sums the rows' (sum[C], count[C]) pairs over the real rows of a cohort."""
    total, count = loss
    return jnp.where(row_mask, total, 0).sum(), jnp.where(row_mask, count, 0).sum()
