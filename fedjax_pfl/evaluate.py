"""Correct answers per client for any algorithm, and the metric vocabulary.

The device counts correct answers as integers, the host divides in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import rows, types


class Scoring(NamedTuple):
    """What to measure.

    Attributes:
        batch_size: Rows per forward pass.
        own_batch_size: Rows per forward pass on one client's own test rows.
        num_scored: Clients behind c_spec, c_gen and c_per; 0 = these are absent.
        scored: `selected` (the next round's cohort) or `all`.
    """

    batch_size: int
    own_batch_size: int
    num_scored: int = 0
    scored: str = "selected"


def _predictions(model: types.Model, params: Any, stats: Any, image: jax.Array):
    """Predicted labels int32[J, B]; J is 1, or the exits and then their ensemble."""
    out, _ = model.forward(params, stats, image)
    if not model.has_exits:
        return jnp.argmax(out, -1)[None]
    logits = jnp.stack([*out, sum(out) / len(out)])
    return jnp.argmax(logits, -1)


def _count_correct(
    model: types.Model,
    params: Any,
    stats: Any,
    data: types.Data,
    start: jax.Array,
    count: jax.Array,
    batch_size: int,
    bound: jax.Array,
) -> jax.Array:
    """Correct answers int32[] of the served output on test rows start..start+count."""

    def step(index: jax.Array, total: jax.Array) -> jax.Array:
        offset = index * batch_size + jnp.arange(batch_size)
        image, label = data.gather(
            jnp.take(data.partition.test.row, start + offset, mode="clip")
        )
        right = _predictions(model, params, stats, image)[-1] == label
        return total + (right & (offset < count)).sum()

    return jax.lax.fori_loop(0, bound, step, jnp.zeros((), jnp.int32))


def _correct_rows(
    model: types.Model, params: Any, stats: Any, data: types.Data, batch_size: int
) -> jax.Array:
    """bool[J, U]: whether each test row is answered correctly by one shared model."""
    test = data.partition.test.row
    batches = rows.in_batches(test, batch_size)

    def one(batch: jax.Array) -> jax.Array:
        image, label = data.gather(batch)
        return (_predictions(model, params, stats, image) == label) & (batch >= 0)

    right = jax.lax.map(one, batches)
    return jnp.moveaxis(right, 1, 0).reshape(right.shape[1], -1)[:, : test.shape[0]]


def count_correct(
    algorithm: types.Algorithm,
    state: types.RoundState,
    cohort: types.Cohort,
    data: types.Data,
    scoring: Scoring,
    execution: types.Execution,
) -> dict[str, jax.Array]:
    """Counts correct answers of the server's and of the served models.

    Returns:
        `own` int32[K], each client's served model on its own test rows;
        `global` int32[J], the server's model on the union (absent without one), all
        exits and then the ensemble if it has exits; `scored` int32[num_scored], the
        ids of the scored clients (K = none), and `cross` int32[num_scored], their
        served models on the union.
    """
    test = data.partition.test
    num_clients = test.start.shape[0]
    union = (test.row >= 0).sum()
    flat_answers: dict[tuple[int, ...], jax.Array] = {}

    def answers_of(model: types.Model, params: Any, stats: Any) -> jax.Array:
        # A shared served model is usually the server's: answer once.
        name = tuple(id(leaf) for leaf in jax.tree.leaves((params, stats)))
        if name not in flat_answers:
            flat_answers[name] = _correct_rows(
                model, params, stats, data, scoring.batch_size
            )
        return flat_answers[name]

    out: dict[str, jax.Array] = {}
    server = algorithm.server_params(state)
    if server is not None:
        out["global"] = answers_of(*server).sum(1)

    if scoring.num_scored:
        if scoring.scored == "selected":
            scored = jnp.where(cohort.row_mask, cohort.client_id, num_clients)
        else:
            scored = jnp.arange(num_clients)
        out["scored"] = scored
        out["cross"] = jnp.zeros(scored.shape, jnp.int32)

    own = jnp.zeros(num_clients, jnp.int32)
    for group in algorithm.serving(state, cohort, data):
        served_id = jnp.where(group.mask, group.client_id, num_clients)
        if group.shared:
            right = answers_of(group.model, group.params, group.stats)[-1]
            per_client = jax.ops.segment_sum(
                right.astype(jnp.int32), test.owner(), num_clients
            )
            serves = jnp.zeros(num_clients, bool).at[served_id].set(True, mode="drop")
            own = own + jnp.where(serves, per_client, 0)
            if scoring.num_scored:
                hit = jnp.take(serves, scored, mode="fill", fill_value=False)
                out["cross"] += jnp.where(hit, right.sum(), 0)
            continue

        def count(served, shared, bound, model=group.model, own_rows=True):
            params, stats, client = served
            known = client < num_clients
            start = jnp.take(shared.partition.test.start, client, mode="clip")
            count = jnp.take(shared.partition.test.count, client, mode="clip")
            if not own_rows:
                start, count = 0, (shared.partition.test.row >= 0).sum()
            return _count_correct(
                model,
                params,
                stats,
                shared,
                start,
                jnp.where(known, count, 0),
                scoring.own_batch_size if own_rows else scoring.batch_size,
                bound,
            )

        counts = jnp.take(test.count, served_id, mode="fill", fill_value=0)
        models = (group.params, group.stats)
        right = _over_models(
            count, models, served_id, data, counts, scoring.own_batch_size, execution
        )
        own = own.at[served_id].add(right, mode="drop")
        if scoring.num_scored:
            # The slot of each scored client in this group, or one past the end.
            slots = jnp.full(num_clients + 1, served_id.shape[0])
            slots = slots.at[served_id].set(jnp.arange(served_id.shape[0]))
            slots = slots.at[num_clients].set(served_id.shape[0])
            slot = jnp.take(slots, scored, mode="clip")
            hit = slot < served_id.shape[0]
            right = _over_models(
                lambda *args: count(*args, own_rows=False),
                rows.take(models, slot),
                jnp.where(hit, scored, num_clients),
                data,
                jnp.where(hit, union, 0),
                scoring.batch_size,
                execution,
            )
            out["cross"] += right
    return {**out, "own": own}


def _over_models(
    fn: Callable,
    models: Any,
    client: jax.Array,
    data: types.Data,
    counts: jax.Array,
    batch_size: int,
    execution: types.Execution,
) -> jax.Array:
    """`over_clients` on models that may not fill whole chunks."""
    size = client.shape[0]
    padded = rows.padded_size(size, execution)
    num_steps = -(-counts // batch_size)
    served = (*models, client)
    if padded > size:
        index = jnp.arange(padded)
        served = rows.take(served, index)
        num_steps = jnp.take(num_steps, index, mode="fill", fill_value=0)
    return rows.over_clients(fn, execution)(served, data, num_steps)[:size]


def metrics(
    counts: dict[str, np.ndarray], test_count: np.ndarray, union: int
) -> tuple[dict[str, float], np.ndarray | None]:
    """Turns one seed's counts into the metric vocabulary.

    Args:
        counts: What `count_correct` returned, as numpy.
        test_count: int[K], own test rows per client.
        union: U, rows in the union of all test rows.

    Returns:
        Metrics as fractions 0..1 by name, absent where there is no model or no row for
        them; and the per-client accuracies f64[K] (nan without own test rows).
    """
    out: dict[str, float] = {}
    if "global" in counts and union:
        right = counts["global"].astype(np.float64) / union
        out["global_accuracy"] = float(right[-1])
        for number, value in enumerate(right[:-1], start=1):
            out[f"exit{number}_accuracy"] = float(value)
        if len(right) > 1:
            out["ensemble_accuracy"] = float(right[-1])
    own = counts["own"].astype(np.int64)
    tested = test_count > 0
    accuracy = np.full(len(own), np.nan)
    accuracy[tested] = own[tested] / test_count[tested]
    if tested.any():
        worst = np.sort(accuracy[tested])[: max(1, int(tested.sum()) // 10)]
        out["client_accuracy"] = float(accuracy[tested].mean())
        out["client_accuracy_pooled"] = float(own.sum() / test_count.sum())
        out["worst_decile_accuracy"] = float(worst.mean())
        out["client_accuracy_std"] = float(accuracy[tested].std())
    if "scored" in counts:
        scored = counts["scored"]
        real = scored < len(own)
        own_rows = test_count[scored[real]].sum()
        if own_rows:
            out["c_spec"] = float(own[scored[real]].sum() / own_rows)
        out["c_gen"] = float(
            counts["cross"][real].astype(np.int64).sum() / (int(real.sum()) * union)
        )
        if "c_spec" in out:
            out["c_per"] = (out["c_spec"] + out["c_gen"]) / 2
    return out, accuracy if tested.any() else None
