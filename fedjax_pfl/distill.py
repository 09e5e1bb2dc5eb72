"""Distances between outputs, soft targets, teachers and the server-side fit."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_pfl import local, losses, rows, traffic, types

DISTANCES = ("kl", "norm", "js")
NORM_FORMS = ("batch", "sample")
JS_FORMS = ("true", "reversed")


def kl(log_target: jax.Array, log_student: jax.Array) -> jax.Array:
    """sum_c q (log q - log p) per row, from log-probabilities [..., Y]; 0 log 0 = 0."""
    target = jnp.exp(log_target)
    finite = target > 0
    gap = jnp.where(finite, log_target, 0) - jnp.where(finite, log_student, 0)
    return jnp.where(finite, target * gap, 0).sum(-1)


def safe_sqrt(square: jax.Array) -> jax.Array:
    """sqrt with gradient 0 at 0 (the subgradient that PyTorch takes), never nan."""
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)


def distance(
    kind: str,
    student: jax.Array,
    target: jax.Array,
    mask: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    norm_form: str = "batch",
    js_form: str = "true",
) -> jax.Array:
    """Distance f32[] of two batches of outputs; no gradient flows to the target.

    * `kl`: T^2 times the mean over real rows of KL(softmax(target / T) ||
      softmax(student / T)).
    * `norm`: the Frobenius norm of the whole batch difference (`batch`), or the sum
      of the rows' 2-norms (`sample`); on raw outputs.
    * `js`: mean over real rows of 1/2 KL(p||m) + 1/2 KL(q||m), m the midpoint, at
      temperature 1; `reversed` swaps the arguments of both terms.

    Args:
        kind: One of `DISTANCES`.
        student: f32[B, W]; W is Y for logits and D for embeddings.
        target: f32[B, W].
        mask: bool[B], the real rows.
        temperature: [tau], for `kl` only.
        norm_form: One of `NORM_FORMS`.
        js_form: One of `JS_FORMS`.
    """
    target = jax.lax.stop_gradient(target)
    column = mask[:, None]
    # Padding rows may hold anything; equal finite rows have distance 0.
    student = jnp.where(column, student, 0)
    target = jnp.where(column, target, 0)
    if kind == "kl":
        gaps = kl(
            jax.nn.log_softmax(target / temperature),
            jax.nn.log_softmax(student / temperature),
        )
        return temperature**2 * losses.masked_mean(gaps, mask)
    if kind == "norm":
        square = (student - target) ** 2
        if norm_form == "batch":
            return safe_sqrt(square.sum())
        return safe_sqrt(square.sum(-1)).sum()
    log_p, log_q = jax.nn.log_softmax(student), jax.nn.log_softmax(target)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    if js_form == "true":
        gaps = kl(log_p, log_m) + kl(log_q, log_m)
    else:
        gaps = kl(log_m, log_p) + kl(log_m, log_q)
    return 0.5 * losses.masked_mean(gaps, mask)


def mix_labels(
    logits: jax.Array, label: jax.Array, weight: float | jax.Array
) -> jax.Array:
    """The target adjustment T(u) = weight * onehot(label) + (1 - weight) * u.

    Args:
        logits: f32[..., Y]; labels are mixed in before any softmax.
        label: int32[...].
        weight: [lambda], 0..1.
    """
    return weight * jax.nn.one_hot(label, logits.shape[-1]) + (1 - weight) * logits


def embedding_width(model: types.Model, example_shape: tuple[int, ...]) -> int:
    """D, the width of the last stage's input, without computing anything."""
    params, stats = traffic.shapes(model, example_shape)
    example = jax.ShapeDtypeStruct((1, *example_shape), jnp.float32)
    last = len(model.stage_names) - 1
    out, _ = jax.eval_shape(
        lambda p, s, x: model.forward(p, s, x, stop=last), params, stats, example
    )
    return math.prod(out.shape[1:])


def proxy_batches(data: types.Data, batch_size: int) -> jax.Array:
    """The proxy rows in fixed batches, int32[num_batches, B], -1 = padding."""
    return rows.in_batches(data.partition.proxy, batch_size)


def outputs(
    model: types.Model,
    params: types.Params,
    stats: types.Stats,
    data: types.Data,
    batches: jax.Array,
    *,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Logits f32[n, B, Y] and embeddings f32[n, B, D] on batches of rows int32[n, B].

    The embedding is the input of the last stage. Eval mode, unless a `key` is given:
    then train mode, so that dropout noise is in the outputs.
    """
    last = len(model.stage_names) - 1

    def one(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        image, _ = data.gather(batches[index])
        mode = {"sample_mask": batches[index] >= 0, "train": key is not None}
        if key is not None:
            mode["key"] = jax.random.fold_in(key, index)
        embedding, _ = model.forward(params, stats, image, stop=last, **mode)
        logits, _ = model.forward(params, stats, embedding, start=last, **mode)
        return logits, embedding.reshape(embedding.shape[0], -1)

    return jax.lax.map(one, jnp.arange(batches.shape[0]))


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
    """A table of outputs aligned by sample, f32[>= size, W].

    Args:
        forward: Images f32[B, ...] to outputs f32[B, W].
        data: The tables.
        row_at: Positions int32[B] to rows of the example table.
        size: Positions to cover.
        width: W.
        batch_size: Positions per forward pass.
        num_batches: int32[], traced; entries past these batches stay 0.
    """
    table = jnp.zeros((-(-size // batch_size) * batch_size, width))

    def step(index: jax.Array, table: jax.Array) -> jax.Array:
        position = index * batch_size + jnp.arange(batch_size)
        image, _ = data.gather(row_at(position))
        return jax.lax.dynamic_update_slice(
            table, forward(image), (index * batch_size, 0)
        )

    return jax.lax.fori_loop(0, num_batches, step, table)


def own_outputs(
    forward: Callable[[jax.Array], jax.Array],
    data: types.Data,
    client_id: jax.Array,
    task: types.Task,
    *,
    batch_size: int,
    num_batches: jax.Array,
) -> jax.Array:
    """`outputs_by_sample` on a client's own train rows: logits f32[>= K_n, Y]."""
    return outputs_by_sample(
        forward,
        data,
        data.partition.train.of(client_id),
        size=task.num_examples,
        width=task.num_classes,
        batch_size=batch_size,
        num_batches=num_batches,
    )


def logits_and_embedding(
    model: types.Model, params: types.Params, stats: types.Stats, batch: local.Batch
) -> tuple[jax.Array, jax.Array, types.Stats]:
    """One train-mode forward: logits f32[B, Y], embedding f32[B, D], new stats."""
    last = len(model.stage_names) - 1
    mode = batch.train_mode()
    embedding, stats = model.forward(params, stats, batch.image, stop=last, **mode)
    logits, stats = model.forward(params, stats, embedding, start=last, **mode)
    return logits, embedding.reshape(embedding.shape[0], -1), stats


def proxy_batch(
    data: types.Data, batches: jax.Array, index: jax.Array, key: jax.Array
) -> local.Batch:
    """Batch `index` of the proxy set as a `Batch`; `position` counts proxy samples."""
    row = batches[index]
    image, label = data.gather(row)
    return local.Batch(
        image=image,
        label=label,
        mask=row >= 0,
        position=index * batches.shape[1] + jnp.arange(batches.shape[1]),
        step=index,
        epoch=jnp.zeros((), jnp.int32),
        key=key,
    )


def fit(
    loss_fn: Callable[
        [types.Params, types.Stats, local.Batch], tuple[jax.Array, types.Stats]
    ],
    tx: optax.GradientTransformation,
    params: types.Params,
    stats: types.Stats,
    *,
    data: types.Data,
    batches: jax.Array,
    epochs: int,
    key: jax.Array,
    active: jax.Array | None = None,
) -> tuple[types.Params, types.Stats]:
    """Trains a model for `epochs` over the proxy batches in fixed order.

    `loss_fn` gets a `Batch` whose `step` is the index of the proxy batch. Where
    `active` bool[] is False nothing is done.
    """
    num_batches = batches.shape[0]

    def step(index: jax.Array, carry: tuple) -> tuple:
        params, stats, opt_state = carry
        batch = proxy_batch(
            data, batches, index % num_batches, jax.random.fold_in(key, index)
        )
        (_, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, stats, batch
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state

    start = (params, stats, tx.init(params))
    num_steps = epochs * num_batches
    if active is not None:
        num_steps = jnp.where(active, num_steps, 0)
    params, stats, _ = jax.lax.fori_loop(0, num_steps, step, start)
    return params, stats


def teacher(
    stacked: jax.Array,
    client_id: jax.Array,
    row_mask: jax.Array,
    *,
    ensemble: str,
    num_clients: int,
) -> jax.Array:
    """The ensemble of the cohort's outputs, [C, ...] -> [...].

    `mean_selected` is the plain mean over the real rows. `code_last` is what the
    released CDKT code computes: every entry of its list is the last selected client's
    output (here: the one of the highest id) and the sum is divided by all K clients,
    hence (n / K) * z_last.
    """
    num_selected = row_mask.sum()
    if ensemble == "mean_selected":
        weight = row_mask / jnp.maximum(num_selected, 1)
    else:
        last = jnp.where(row_mask, client_id, -1).max()
        weight = (row_mask & (client_id == last)) * num_selected / num_clients
    column = weight.reshape(-1, *(1,) * (stacked.ndim - 1))
    return (jnp.where(column > 0, stacked, 0) * column).sum(0)
