"""Clients in lanes: W of them side by side, in each lane one after another.

A chunk of clients runs as long as its longest, while a lane does not wait for the
others: when its client has taken its last step, the next client's first step follows.
All rows of a device wait in one queue, the longest first, and a free lane takes the
next.

For this a client's function `fn(client, shared)` is traced in three parts, divided by
its one `Client.run`, that of `local_training.train`: the code before it makes the carry
that the steps begin with, `run` is one step, and the code after it makes the result.
What a step needs of the first part is computed again in every step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pfl import aggregate, execution


class UnfitError(ValueError):
    """A client's function is not one training, so its steps cannot be dealt out."""


class _Lanes(NamedTuple):
    """The progress of each lane: leaves [W, ...].

    `row` int32[W], -1 = idle; `index` int32[W], its next step, of `num_steps` int32[W];
    `carry`, the result of its steps so far.
    """

    row: jax.Array
    index: jax.Array
    num_steps: jax.Array
    carry: Any

    @property
    def has_ended(self) -> jax.Array:
        """bool[W]: lanes in which the client has taken its last step."""
        return (self.row >= 0) & (self.index >= self.num_steps)


def one_after_another(
    fn: Callable[..., Any], how: execution.Execution
) -> Callable[..., Any]:
    """Maps a function of one client over the rows of a device, in lanes.

    Args:
        fn: `(row, shared, local, loop) -> out`. It calls `loop(num_steps, step, first)`
            once, in place of a loop over `step(index, carry) -> carry`, and outside of
            any other loop or branch.
        how: With `lanes`, the number W.

    Returns:
        `((rows, reduce), shared, local) -> out`, one device's part of
        `each_client.over_clients`, for rows in the order of their steps: the longest
        client is the last.

    Raises:
        UnfitError: while it is traced, `fn` calls `loop` more than once, or never.
    """

    def run(mine: Any, shared: Any, local: Any) -> Any:
        rows, reduce = mine
        num_rows = jax.tree.leaves(rows)[0].shape[0]
        num_lanes = min(how.lanes, num_rows)

        def cut(row: jax.Array, at_loop: Callable[..., tuple[Any, Any]]) -> Any:
            """(out, result of `at_loop`) for one row; `at_loop` replaces the loop."""
            found = []

            def loop(num_steps: jax.Array, step: Callable, first: Any) -> Any:
                result, one = at_loop(num_steps, step, first)
                found.append(one)
                return result

            own = jax.tree.map(lambda leaf: leaf[row], rows)
            out = fn(own, shared, local, loop)
            if len(found) != 1:
                count = len(found)
                raise UnfitError(f"a client's round has {count} trainings, not one")
            return out, found[0]

        def begin(row: jax.Array) -> tuple[Any, jax.Array]:
            # A client without examples takes one step, which changes nothing.
            _, (first, num_steps) = cut(row, lambda n, _, first: (first, (first, n)))
            return first, jnp.maximum(num_steps, 1)

        def forward(row: jax.Array, index: jax.Array, carry: Any) -> Any:
            return cut(row, lambda n, step, _: (carry, step(index, carry)))[1]

        def finish(row: jax.Array, carry: Any) -> tuple[Any, Any]:
            """(what stays of a row, its part of the sum)."""
            out, _ = cut(row, lambda *_: (carry, None))
            if reduce is None:
                return out, ()
            kept, given = out
            alone = jax.tree.map(lambda leaf: leaf[None], given)
            weight = jax.tree.map(lambda leaf: leaf[row][None], reduce)
            return kept, aggregate.weighted_mean(alone, weight)

        def settle(now: tuple[_Lanes, jax.Array, Any, Any]) -> Any:
            """Stores the result of a lane that has ended, and gives it the next row."""
            lanes, waiting, kept, total = now
            lane = lanes.has_ended.argmax()
            row = lanes.row[lane]
            new, part = finish(row, jax.tree.map(lambda leaf: leaf[lane], lanes.carry))
            kept = jax.tree.map(lambda leaf, one: leaf.at[row].set(one), kept, new)
            total = jax.tree.map(jnp.add, total, part)
            first, num_steps = begin(jnp.maximum(waiting, 0))
            taken = _Lanes(waiting, jnp.zeros_like(waiting), num_steps, first)
            lanes = jax.tree.map(lambda leaf, one: leaf.at[lane].set(one), lanes, taken)
            return lanes, jnp.maximum(waiting - 1, -1), kept, total

        def any_ended(now: tuple[_Lanes, jax.Array, Any, Any]) -> jax.Array:
            return now[0].has_ended.any()

        def moment(now: tuple[_Lanes, jax.Array, Any, Any]) -> Any:
            """One step in every lane."""
            lanes, *rest = now
            row = jnp.maximum(lanes.row, 0)
            with execution.side_by_side(how, num_lanes):
                carry = jax.vmap(forward)(row, lanes.index, lanes.carry)
            lanes = lanes._replace(index=lanes.index + 1, carry=carry)
            return jax.lax.while_loop(any_ended, settle, (lanes, *rest))

        row = num_rows - 1 - jnp.arange(num_lanes, dtype=jnp.int32)
        carry, num_steps = jax.vmap(begin)(row)
        lanes = _Lanes(row, jnp.zeros_like(row), num_steps, carry)
        first = jax.tree.map(lambda leaf: leaf[0], carry)
        like, part = jax.eval_shape(finish, row[0], first)
        kept = jax.tree.map(lambda s: jnp.zeros((num_rows, *s.shape), s.dtype), like)
        total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), part)
        waiting = jnp.int32(num_rows - 1 - num_lanes)
        now = (lanes, waiting, kept, total)
        *_, kept, total = jax.lax.while_loop(
            lambda now: (now[0].row >= 0).any(), moment, now
        )
        return kept if reduce is None else (kept, total)

    return run
