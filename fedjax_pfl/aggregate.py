"""Means over the leading axis of stacked pytrees, at a server and among peers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import boundary, stacked, types
from fedjax_pfl.rows import exchange


def weights(kind: str, num_examples: jax.Array, row_mask: jax.Array) -> jax.Array:
    """Aggregation weights f32[C] that sum to 1 and are 0 on padding rows.

    `kind` is `examples` (proportional to the clients' train examples, `num_examples`
    int32[C]) or `uniform`, else a ValueError. `row_mask` bool[C] is True on real rows.
    """
    if kind not in ("examples", "uniform"):
        raise ValueError(f"weights: got {kind!r}, expected 'examples' or 'uniform'")
    raw = num_examples if kind == "examples" else jnp.ones_like(num_examples)
    raw = exchange.everywhere(jnp.where(row_mask, raw.astype(float), 0))
    return raw / jnp.maximum(raw.sum(), 1)


def cohort_weights(kind: str, cohort: types.Cohort, data: types.Data) -> jax.Array:
    """The `weights` f32[C] of a cohort."""
    if kind == "uniform":
        return weights(kind, cohort.row, cohort.row_mask)
    num_examples = stacked.take(data.partition.train.count, cohort.client_id)
    return weights(kind, num_examples, cohort.row_mask)


def as_float(leaf: Any) -> jax.Array:
    """A number as one that has a mean: counts and bools as f32."""
    leaf = jnp.asarray(leaf)
    return leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype("float32")


def summable(given: Any) -> Any:
    """Leaves `as_float`, but for those of models, which keep their types."""

    def is_model(node: Any) -> bool:
        return isinstance(node, types.Variables)

    return jax.tree.map(
        lambda node: node if is_model(node) else as_float(node), given, is_leaf=is_model
    )


def weighted_mean(rows: Any, weight: Any) -> Any:
    """The sum of weight[c] * leaf[c] over leaves [C, ...], ignoring rows of weight 0.

    `weight` is f32[C], or a prefix pytree of such, that sums to 1 (or to a chunk's part
    of it). f32[C, ...] weighs every entry separately. Each mean is of its leaf's dtype,
    so that one of whole numbers is cut; give floats.

    Examples:
        >>> rows = {"w": jnp.array([[2.0, 4.0], [6.0, 8.0], [jnp.nan, 0.0]])}
        >>> weighted_mean(rows, jnp.array([0.5, 0.5, 0.0]))["w"].tolist()
        [4.0, 6.0]
    """

    def average(weight: jax.Array, leaf: jax.Array) -> jax.Array:
        if weight.ndim > 1:
            return jnp.where(weight != 0, weight * leaf, 0).sum(0).astype(leaf.dtype)
        # A dead row may hold nan, so select before multiplying. A product with the
        # weights is 50 times faster on a CPU than a sum over the leading axis.
        safe = jnp.where(stacked.column(weight, leaf) != 0, leaf, 0)
        highest = jax.lax.Precision.HIGHEST
        return jnp.tensordot(weight, safe, 1, precision=highest).astype(leaf.dtype)

    return jax.tree.map(average, jax.tree.broadcast(weight, rows), rows)


def masked_weights(weight: jax.Array, mask: Any) -> tuple[Any, Any]:
    """Normalises weights separately for each part: where(mask, weight, 0) over its sum.

    `weight` is f32[C], non-negative and 0 on padding rows. `mask` is a prefix pytree of
    bool[C], or of bool[C, ...] for single entries. Returns two such pytrees: weights
    f32[C, ...] that sum over the rows to 1, or to 0 where no row holds the part, and
    bool[...], whether any row holds it.
    """
    raw = jax.tree.map(lambda m: jnp.where(m, stacked.column(weight, m), 0), mask)
    raw = exchange.everywhere(raw)
    total = jax.tree.map(lambda r: r.sum(0), raw)
    share = jax.tree.map(lambda r, t: r / jnp.where(t > 0, t, 1), raw, total)
    return share, jax.tree.map(lambda t: t > 0, total)


def masked_mean(rows: Any, weight: jax.Array, mask: Any, fallback: Any) -> Any:
    """The weighted mean of each part (stage or entry) over the rows that hold it.

    `weight` and `mask` are those of `masked_weights`: a mask of entries gives
    HeteroFL's coverage, or sum(m w) / sum(m). `rows` has leaves [C, ...]. `fallback`,
    leaves [...], gives the parts that no row holds.

    Examples:
        >>> rows = (jnp.array([2.0, 6.0]), jnp.array([1.0, 3.0]))  # two stages
        >>> mask = (jnp.array([True, True]), jnp.array([False, False]))
        >>> mean = masked_mean(rows, jnp.array([0.25, 0.75]), mask, (0.0, 9.0))
        >>> [float(stage) for stage in mean]
        [5.0, 9.0]
    """
    share, is_held = masked_weights(weight, mask)
    return boundary.select(is_held, weighted_mean(rows, share), fallback)


def stage_weights(
    weight: jax.Array, held: jax.Array
) -> tuple[types.Variables, types.Variables]:
    """The `masked_weights` of stages, for `update(..., reduce=)`; `held` bool[C, L]."""
    mask = boundary.by_stage(held)
    return masked_weights(weight, types.Variables(mask, mask))


def mix_peers(rows: Any, cohort: types.Cohort, weight: Any, *, known: Any = ()) -> Any:
    """The weighted mean of each client and its peers, leaves [C, ...].

    `rows` are the private rows, leaves [K, ...]. `weight` is f32[C, 1 + n] for the
    client and its first n peers, n = 0..P, non-negative and of any scale, or a prefix
    pytree of such (other stages, other weights). Leaves of rows are floats. A client
    without peers keeps its own model. Rows travel behind `known`, as in
    `exchange.take`.

    Examples:
        >>> ids = jnp.arange(3)
        >>> peers = jnp.array([[1], [2], [0]])
        >>> has_peer = jnp.array([[True], [False], [True]])
        >>> cohort = types.Cohort(ids, ids, ids >= 0, ids, peers, has_peer, {})
        >>> mix_peers(jnp.array([2.0, 4.0, 8.0]), cohort, jnp.ones((3, 2))).tolist()
        [3.0, 4.0, 5.0]
    """
    source, counts = sources(cohort)

    def mixed(weight: jax.Array, part: Any, known: Any) -> Any:
        num_sources = weight.shape[1]
        share = jnp.where(counts[:, :num_sources], weight, 0)
        total = share.sum(1, keepdims=True)
        # A client that gives all weight to peers keeps its own model without any.
        itself = jnp.arange(num_sources) == 0
        share = jnp.where(total > 0, share / jnp.where(total > 0, total, 1), itself)
        share = exchange.on_all(share)

        # One peer at a time: never a gather of [C, P] models.
        def add(index: jax.Array, total: Any) -> Any:
            one = exchange.take(part, source[:, index], (known, total))
            factor = share[:, index]

            def sum_with(total: jax.Array, leaf: jax.Array) -> jax.Array:
                column = stacked.column(factor, leaf)
                return total + jnp.where(column > 0, column * leaf, 0)

            return jax.tree.map(sum_with, total, one)

        return jax.lax.fori_loop(
            0, num_sources, add, stacked.blank(part, *cohort.row.shape)
        )

    weights, structure = jax.tree.flatten(weight)
    out: list[Any] = []
    for one, part in zip(weights, structure.flatten_up_to(rows), strict=True):
        out.append(mixed(one, part, (known, out)))
    return structure.unflatten(out)


def sum_held(
    rows: Any,
    held: Any,
    cohort: types.Cohort,
    weight: jax.Array,
    *,
    as_mask: Callable[[jax.Array], jax.Array] = lambda leaf: leaf,
    known: Any = (),
) -> tuple[Any, Any]:
    """Sums over each client and those of its peers that hold an entry, leaves [C, ...].

    `held`, in the shapes of the private `rows`, becomes a mask of held entries by
    `as_mask`. `weight` is f32[C, 1 + P] for the client and its peers, non-negative.
    Returns (sum of weight times value, sum of weight), 0 for entries that no row holds.
    Rows travel behind `known`, as in `exchange.take`.
    """
    source, counts = sources(cohort)
    share = exchange.on_all(jnp.where(counts, weight, 0))

    # One peer at a time, as in `mix_peers`.
    def add(index: jax.Array, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        one, mask = exchange.take((rows, held), source[:, index], (known, sums))
        factor = jax.tree.map(
            lambda m: jnp.where(as_mask(m), stacked.column(share[:, index], m), 0), mask
        )
        values = jax.tree.map(lambda f, x: jnp.where(f > 0, f * x, 0), factor, one)
        return jax.tree.map(jnp.add, sums, (values, factor))

    zeros = stacked.blank(rows, *cohort.row.shape)
    return jax.lax.fori_loop(0, source.shape[1], add, (zeros, zeros))


def sources(cohort: types.Cohort) -> tuple[jax.Array, jax.Array]:
    """The slots int32[C, 1 + P] of clients and their peers, and which of them count."""
    source = jnp.concatenate([cohort.row[:, None], cohort.peers], 1)
    return source, jnp.pad(cohort.peer_mask, ((0, 0), (1, 0)), constant_values=True)
