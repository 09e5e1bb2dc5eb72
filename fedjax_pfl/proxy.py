"""Tools for distillation: outputs on shared or own examples, and training on them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl import (
    each_client,
    execution,
    local_training,
    optimizer,
    options,
    over_devices,
    rng,
    shapes,
    stacked,
    types,
)


def check_public(algo: str, task: types.Task) -> None:
    """Raises ValueError if there are no public images, which `algo` needs."""
    if not task.num_proxy:
        raise ValueError(
            f"{algo} has no public images; name a data set of the same image shape "
            f"{list(task.example_shape)} (--public_set), set a part of this one "
            "aside (--proxy_fraction=0.1), or add proxy_row to a partition's file"
        )


def batches(data: types.Data, batch_size: int) -> jax.Array:
    """The proxy rows in fixed batches, int32[num_batches, B], -1 = padding."""
    rows = data.partition.proxy
    return stacked.in_batches(rows, shapes.capped(batch_size, len(rows)))


def logits_and_embedding(
    model: types.Model, variables: types.Variables, image: jax.Array, **mode: Any
) -> tuple[jax.Array, jax.Array, types.Stats]:
    """One forward pass: logits f32[B, Y], embedding f32[B, D], new statistics.

    The embedding is the input of the last stage.
    """
    params, stats = variables
    last = len(model.stage_names) - 1
    embedding, stats = model.forward(params, stats, image, stop=last, **mode)
    logits, stats = model.forward(params, stats, embedding, start=last, **mode)
    return logits, embedding.reshape(embedding.shape[0], -1), stats


def of_batch(
    model: types.Model,
    params: types.Params,
    stats: types.Stats,
    batch: local_training.Batch,
) -> tuple[jax.Array, jax.Array, types.Stats]:
    """`logits_and_embedding` of a training step's batch, in train mode."""
    variables = types.Variables(params, stats)
    return logits_and_embedding(model, variables, batch.image, **batch.mode)


def outputs(
    model: types.Model,
    variables: types.Variables,
    data: types.Data,
    batches: jax.Array,
    *,
    key: jax.Array | None = None,
    how: execution.Execution | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Logits f32[n, B, Y] and embeddings f32[n, B, D] on batches of rows int32[n, B].

    They are computed in eval mode, or with a `key` in train mode, so that the outputs
    contain dropout noise. With `how`, as for the server's model, devices share the
    batches. A client's model has one device.
    """

    def one(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        image, _ = data.gather(batches[index])
        mode = {"sample_mask": batches[index] >= 0, "train": key is not None}
        if key is not None:
            mode["key"] = jax.random.fold_in(key, index)
        return logits_and_embedding(model, variables, image, **mode)[:2]

    return over_devices.batches(one, len(batches), how or execution.Execution())


def outputs_by_sample(
    forward: Callable[[jax.Array], jax.Array],
    data: types.Data,
    row_at: Callable[[jax.Array], jax.Array],
    *,
    size: int,
    width: int,
    batch_size: int,
    num_batches: jax.Array,
) -> jax.Array:
    """A table of outputs aligned by sample, f32[>= size, W], where W is `width`.

    `forward` maps images f32[B, ...] to outputs f32[B, W], and `row_at` positions
    int32[B] to rows of the example table. `size` positions are covered, B =
    `batch_size` at a time. Entries past `num_batches`, a traced int32[], stay 0.
    """
    table = jnp.zeros((-(-size // batch_size) * batch_size, width))

    def step(index: jax.Array, table: jax.Array) -> jax.Array:
        position = index * batch_size + jnp.arange(batch_size)
        image, _ = data.gather(row_at(position))
        at = index * batch_size, 0
        return jax.lax.dynamic_update_slice(table, forward(image), at)

    return jax.lax.fori_loop(0, num_batches, step, table)


def own_outputs(
    forward: Callable[[jax.Array], jax.Array],
    client: each_client.Client,
    task: types.Task,
    plan: types.PlanSpec,
) -> jax.Array:
    """`outputs_by_sample` on a client's own train rows: logits f32[>= K_n, Y].

    `plan` is the client's. Where each of its epochs visits all rows, bound // epochs
    batches cover the longest client of the chunk, else those of the longest of all do.
    """
    size = shapes.capped(plan.batch_size, task.num_examples)
    if plan.max_rows or plan.drop_last or task.may_stop:
        whole = -(-task.num_examples // size)
        num_batches = jnp.where(client.is_here, whole, 0)
    else:
        num_batches = client.bound // plan.epochs
    return outputs_by_sample(
        forward,
        client.data,
        client.data.partition.train.of(client.id),
        size=task.num_examples,
        width=task.num_classes,
        batch_size=size,
        num_batches=num_batches,
    )


def shared_outputs(
    forward: Callable[[jax.Array], jax.Array],
    client: each_client.Client,
    batches: jax.Array,
    width: int,
) -> jax.Array:
    """`outputs_by_sample` on rows that clients share, f32[n B, W].

    `batches` are int32[n, B]. Where the chunk has no client, outputs are 0.
    """
    row = batches.reshape(-1)
    return outputs_by_sample(
        forward,
        client.data,
        lambda position: row[position],
        size=len(row),
        width=width,
        batch_size=batches.shape[1],
        num_batches=jnp.where(client.is_here, len(batches), 0),
    )


def batch_at(
    data: types.Data, batches: jax.Array, index: jax.Array, key: jax.Array
) -> local_training.Batch:
    """Batch `index` of the proxy set as a `Batch`; `position` counts proxy samples."""
    row, size = batches[index], batches.shape[1]
    image, label = data.gather(row)
    position, epoch = index * size + jnp.arange(size), jnp.zeros((), jnp.int32)
    return local_training.Batch(image, label, row >= 0, position, index, epoch, key)


def fit(
    loss_fn: local_training.LossFn,
    tx: optax.GradientTransformation,
    start: types.Variables,
    *,
    data: types.Data,
    batches: jax.Array,
    epochs: int,
    key: jax.Array,
    clip_norm: float | jax.Array = 0.0,
    is_active: jax.Array | None = None,
) -> types.Variables:
    """Trains a model for `epochs` over the proxy batches in fixed order.

    `loss_fn` gets a `Batch` in which `step` is the index of the proxy batch. Gradients
    are clipped at the global norm `clip_norm`, 0 = never. Where `is_active` bool[] is
    False nothing is done.
    """
    num_batches = batches.shape[0]

    def step(index: jax.Array, carry: tuple) -> tuple:
        params, stats, opt_state = carry
        own = jax.random.fold_in(key, index)
        batch = batch_at(data, batches, index % num_batches, own)
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (_, stats), grads = gradient(params, stats, batch)
        grads = optimizer.clip(grads, clip_norm, True)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state

    num_steps = epochs * num_batches
    if is_active is not None:
        num_steps = jnp.where(is_active, num_steps, 0)
    first = start.params, start.stats, optimizer.seeded(tx.init(start.params), key)
    params, stats, _ = jax.lax.fori_loop(0, num_steps, step, first)
    return types.Variables(params, stats)


@dataclasses.dataclass(frozen=True)
class ServerTraining:
    """Options of a server that trains a model on the proxy set, by plain SGD."""

    server_lr: float = options.option(
        0.05, "learning rate of the server's model on the proxy set [gamma]", minimum=0
    )
    server_epochs: int = options.option(
        2, "epochs of the server over the proxy set per round [R]", minimum=1
    )


def train_server(
    hparams: Any,
    loss_fn: local_training.LossFn,
    task: types.Task,
    state: types.RoundState,
    data: types.Data,
) -> types.Variables:
    """`state.server` after `server_epochs` on the proxy set, by `over_devices.once`.

    `hparams` has the options of `ServerTraining` and a `batch_size`.
    """

    def trained(start: types.Variables) -> types.Variables:
        return fit(
            loss_fn,
            optax.sgd(hparams.server_lr),
            start,
            data=data,
            batches=batches(data, hparams.batch_size),
            epochs=hparams.server_epochs,
            key=rng.stream(state.key, "engine.server", state.round),
        )

    return over_devices.once(trained, task.execution, state.server)
