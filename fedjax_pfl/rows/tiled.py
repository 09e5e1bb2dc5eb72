"""How a TPU keeps private rows, so that no program copies all of them.

A TPU has arrays in tiles of 8 x 128 numbers of two axes. Programs that take other
axes, or the same in another order, copy what they get from each other, and so does a
loop that adds up rows in another form than they have in their table. Here rows follow
one another, each in the order of its last two axes that needs fewer tiles. Rows of a
state have this form between all programs, and what is read of them keeps it.
"""

from typing import Any

import jax
from jax.experimental import layout

from fedjax_pfl import execution, stacked
from fedjax_pfl.rows import views

# Kinds of devices with such tiles
TILED = ("tpu",)


def of_rows(rows: Any, how: execution.Execution) -> Any:
    """Where private rows are, leaves [variants, rows, ...], for each leaf."""
    place = execution.by_device if how.shares_rows else execution.replicated
    where = place(how)

    def one(leaf: Any) -> jax.sharding.Sharding | layout.Format:
        if how.platform not in TILED or views.is_key(leaf):
            return where
        return layout.Format(_form(leaf.shape, 2), where)

    return jax.tree.map(one, rows)


def place(rows: Any, how: execution.Execution) -> Any:
    """Private rows of the host, leaves [variants, rows, ...], on their devices."""
    return jax.tree.map(execution.place, rows, of_rows(rows, how))


def take(tree: Any, row: jax.Array) -> Any:
    """`stacked.take` of private rows, leaves [K, ...]; `row` is int32[C] or int32[]."""
    rows = stacked.take(tree, row)
    if execution.setting().platform not in TILED:
        return rows

    def one(leaf: jax.Array) -> jax.Array:
        if views.is_key(leaf):
            return leaf
        return layout.with_layout_constraint(leaf, _form(leaf.shape, row.ndim))

    return jax.tree.map(one, rows)


def _form(shape: tuple[int, ...], lead: int) -> layout.Layout:
    """The form of rows with `lead` axes before those of a row."""
    order = [*range(len(shape))]
    if len(shape) >= lead + 2:
        tall, wide = shape[-2:]
        if -(-wide // 8) * -(-tall // 128) < -(-tall // 8) * -(-wide // 128):
            order[-2:] = reversed(order[-2:])
    return layout.Layout(tuple(order))
