"""Runs a function of one client for every client of a round.

Where optimizer states persist between a client's rounds, each client gets its own and
the new ones are stored here. An algorithm only returns the `Trained` of its training.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fedjax_pfl import (
    aggregate,
    context,
    execution,
    losses,
    over_devices,
    rng,
    stacked,
    types,
)
from fedjax_pfl.rows import exchange

# More chunks are summed in blocks
MANY_CHUNKS = 256
TRAINED = "trained_accuracy"  # of the models that a round's training left
# What is added to the numbers of padding rows, which repeat others
_PADDING = contextvars.ContextVar("padding", default=0.0)


def padded_with(number: float) -> contextlib.AbstractContextManager[None]:
    """Adds a number to what is in the padding rows of rounds that are traced inside.

    Nothing may depend on it, which `launch.contract` checks.
    """
    return context.having(_PADDING, number)


def _padded(rows: Any, mask: jax.Array) -> Any:
    """Leaves [C, ...] with other numbers where `mask` bool[C] is False."""
    if not (more := _PADDING.get()):
        return rows

    def of(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf + jnp.where(stacked.column(mask, leaf), 0, more).astype(leaf.dtype)

    return jax.tree.map(of, rows)


@struct.dataclass
class Client:
    """One client in a round, with everything that its update may use.

    Attributes:
        id, level: int32[], the client and the capacity level that it holds.
        own: Its row of the `own` argument of `update`.
        opt_state: Its persistent optimizer state, () if there is none.
        plan, data: Its steps, a `types.Plan` of one client, and the tables.
        bound: int32[], the most steps of its chunk, a NumPy number if all chunks have
            as many. It is not batched, so that a `fori_loop` up to it stops early.
        is_here: bool[], whether its chunk has a client at all, and not padding alone.
            It is not batched either. A client that is here may have no step.
        key, round: The run's root key, and the round int32[], zero-based.
        model: Its architecture.
        is_tested: Whether the model that its training leaves is measured.
    """

    id: jax.Array
    level: jax.Array
    own: Any
    opt_state: Any
    plan: types.Plan
    bound: jax.Array | np.int32
    data: types.Data
    key: jax.Array
    round: jax.Array
    is_here: jax.Array | bool = True
    model: types.Model | None = struct.field(pytree_node=False, default=None)
    is_tested: bool = struct.field(pytree_node=False, default=False)

    def run(self, step: Callable[[jax.Array, Any], Any], first: Any) -> Any:
        """The carry after all its steps: `step(index, carry) -> carry`, from `first`.

        Steps after the client's own, up to `bound`, must change nothing.
        """
        return jax.lax.fori_loop(0, self.bound, step, first)

    def stream(self, tag: str | int) -> jax.Array:
        """A key for this client in this round."""
        return rng.stream(self.key, tag, self.round, self.id)

    def at_most(self, num_steps: int) -> Client:
        """The same client with a plan of at most `num_steps` steps."""
        plan = self.plan.replace(num_steps=jnp.minimum(self.plan.num_steps, num_steps))
        are_fixed = isinstance(self.bound, np.integer) and isinstance(num_steps, int)
        least = np.minimum if are_fixed else jnp.minimum
        return self.replace(plan=plan, bound=least(self.bound, num_steps))

    def fresh(self) -> Client:
        """The same client without its persistent optimizer state."""
        return self.replace(opt_state=())

    def as_uploaded(self) -> Client:
        """The same client with train batches of its images as they are."""
        return self.replace(data=self.data.replace(augment="none"))


@struct.dataclass
class Trained:
    """The result of a client's local training.

    `opt_state` is () unless the optimizer's state continues. With `persists` the
    training began with the client's persistent state, which the engine then replaces.
    `loss` is a (sum over examples, examples) pair of the last objective, and `measured`
    has the results of each objective's `measure`, summed over real steps. `tested` is
    (accuracy on the client's own test rows, 1 or 0 without any), () if it is not
    measured.
    """

    params: types.Params
    stats: types.Stats
    opt_state: Any
    loss: losses.Pair
    measured: tuple = ()
    tested: losses.Pair | tuple[()] = ()
    persists: bool = struct.field(pytree_node=False, default=False)

    @property
    def variables(self) -> types.Variables:
        return types.Variables(self.params, self.stats)

    def split(self) -> tuple[Trained, types.Variables]:
        """(the part that stays with its client, the model to sum), for `reduce=`."""
        return self.replace(params=(), stats=()), self.variables

    def metrics(self, cohort: types.Cohort) -> dict[str, losses.Pair]:
        """{"train_loss": (sum, count)} over the real rows of a cohort.

        Also `TRAINED`, if it is measured.
        """
        pairs = {"train_loss": self.loss, TRAINED: self.tested}
        return {
            name: tuple(jnp.where(cohort.row_mask, part, 0).sum() for part in pair)
            for name, pair in pairs.items()
            if pair
        }


def cohorts_by_architecture(
    task: types.Task, cohort: types.Cohort
) -> tuple[types.Cohort, ...]:
    """One cohort per architecture, in which other clients' rows are padding.

    A chunk of padding costs nothing.
    """
    group = stacked.take(jnp.asarray(task.group_of_client), cohort.client_id)

    def of(number: int) -> types.Cohort:
        is_member = cohort.row_mask & (group == number)
        plans = {
            name: plan.replace(num_steps=jnp.where(is_member, plan.num_steps, 0))
            for name, plan in cohort.plans.items()
        }
        row = jnp.where(is_member, cohort.row, task.num_rows)
        return cohort.replace(row=row, row_mask=is_member, plans=plans)

    return tuple(map(of, range(len(task.client_models))))


class Round(NamedTuple):
    """One round of a method: the clients that take part and the state so far.

    An algorithm's `round` makes it from its arguments, continues with the one that
    `update` returns, and ends with `after`. With `by_architecture`, see
    `types.Algorithm`, all that clients have is a tuple by architecture, of leaves [C,
    ...] in which only the rows of its own clients are meaningful.

    Examples:
        >>> ids, none = jnp.arange(2), jnp.zeros((2, 0), int)
        >>> plans = {"local": types.Plan(none, ids, ids, ids, 1)}  # 0 and 1 steps
        >>> cohort = types.Cohort(ids, ids, ids >= 0, ids, none, none, plans)
        >>> state = types.RoundState.first((), jnp.array([1.0, 2.0]), jax.random.key(0))
        >>> task = types.Task((), (), ids, 2, 2, 0, 2, 1, (1,))
        >>> here = Round(task, state, cohort, data=())
        >>> def fn(client, shared):
        ...     return client.own + shared * client.plan.num_steps
        >>> out, here = here.update(fn, shared=10.0)
        >>> here.after(out).clients.tolist()
        [1.0, 12.0]
    """

    task: types.Task
    state: types.RoundState
    cohort: types.Cohort
    data: types.Data
    by_architecture: bool = False

    @property
    def groups(self) -> tuple[Round, ...]:
        """The same round by architecture; ValueError if that is not declared."""
        task, state, cohort = self.task, self.state, self.cohort
        kept = state.opt_state or ((),) * len(task.client_models)
        if len(kept) != len(task.client_models):
            raise ValueError(
                "the optimizer states are not by architecture; set "
                "types.Algorithm(by_architecture=True)"
            )
        every = []
        for number, mine in enumerate(cohorts_by_architecture(task, cohort)):
            model = task.client_models[number]
            # Those of another architecture take no step.
            of_one = task._replace(client_models=(model,), fixed_steps=())
            rows = state.clients[number] if state.clients else ()
            one = state.replace(clients=rows, opt_state=kept[number])
            every.append(Round(of_one, one, mine, self.data))
        return tuple(every)

    @property
    def rows(self) -> Any:
        """The clients' private rows, leaves [C, ...]."""
        if self.by_architecture:
            return tuple(mine.rows for mine in self.groups)
        return _padded(self.state.rows(self.cohort), self.cohort.row_mask)

    @property
    def num_examples(self) -> jax.Array:
        """int32[C]: the clients' train examples."""
        return stacked.take(self.data.partition.train.count, self.cohort.client_id)

    def weights(self, kind: str) -> jax.Array:
        """f32[C] with sum 1: `examples` or `uniform`, as in `aggregate.weights`."""
        return aggregate.cohort_weights(kind, self.cohort, self.data)

    def update(
        self,
        fn: Callable[..., Any],
        *,
        own: Any = None,
        reduce: Any = None,
        **given: Any,
    ) -> tuple[Any, ...]:
        """Runs `fn(client, shared)` for every client, see the function `update`.

        `fn` is traced once for each architecture, and the sums of all architectures are
        added. `given` are `shared`, `plan` and `levels`. Returns what `update` does,
        with the round in place of the state.
        """
        if not self.by_architecture:
            task, state, cohort, data, _ = self
            *out, state = update(
                fn, task, state, cohort, data, own=own, reduce=reduce, **given
            )
            return *out, self._replace(state=state)
        every, total, opt_states = [], [], []
        for number, mine in enumerate(self.groups):
            is_mine = mine.cohort.row_mask
            kept, *part, after = mine.update(
                fn,
                own=None if own is None else own[number],
                reduce=jax.tree.map(lambda w, m=is_mine: jnp.where(m, w, 0), reduce),
                **given,
            )
            every.append(kept)
            total = jax.tree.map(jnp.add, total, part) if number else part
            opt_states.append(after.state.opt_state)
        kept = tuple(opt_states) if self.state.opt_state else ()
        state = self.state.replace(opt_state=kept, round=after.state.round)
        return tuple(every), *total, self._replace(state=state)

    def in_order(self) -> Round:
        """The round with a cohort that is known once optimizer states are back.

        What is summed over clients after an `update` without `reduce` waits for these
        trips by it, see `exchange.behind`.
        """
        return self._replace(cohort=exchange.behind(self.cohort, self.state.round))

    def in_turn(
        self, fn: Callable[[Client, Any], Any], start: Any, **given: Any
    ) -> Any:
        """Runs `carry = fn(client, carry)` for one client after another, from `start`.

        `given` are `own` and `plan`, see the function `in_turn`.
        """
        task, state, cohort, data, _ = self
        return in_turn(fn, task, state, cohort, data, start=start, **given)

    def metrics(self, trained: Any) -> dict[str, losses.Pair]:
        """`Trained.metrics`, summed over architectures."""
        if not self.by_architecture:
            return trained.metrics(self.cohort)
        pairs = zip(trained, self.groups, strict=True)
        parts = [one.metrics(mine.cohort) for one, mine in pairs]
        return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), parts)

    def after(self, rows: Any = None, **changed: Any) -> types.RoundState:
        """The state one round later, see `types.RoundState.after`."""
        state, cohort = self.state, self.cohort
        if rows is None or not self.by_architecture:
            return state.after(cohort, rows, **changed)
        if len(rows) == 1:
            return state.after(cohort, tuple(rows), **changed)
        clients = []
        for mine, own in zip(self.groups, rows, strict=True):
            old, row = mine.state.clients, mine.cohort.row
            new = stacked.checked_new(old, own, len(row))
            clients.append(stacked.put(old, row, new))
        return state.after(clients=tuple(clients), **changed)


def _clients(
    task: types.Task, cohort: types.Cohort, own: Any, opt_state: Any, plan: Any
) -> Client:
    """The clients of a cohort, leaves [C, ...], without the fields that all share."""
    model = task.client_models[0] if len(task.client_models) == 1 else None
    mine = cohort.client_id, cohort.level, own, opt_state, plan
    given = {"model": model, "is_tested": task.tests_trained}
    of_all = dict.fromkeys(("bound", "is_here", "data", "key", "round"), ())
    return Client(*mine, **of_all, **given)


def update(
    fn: Callable[..., Any],
    task: types.Task,
    state: types.RoundState,
    cohort: types.Cohort,
    data: types.Data,
    *,
    own: Any = None,
    shared: Any = (),
    plan: str = "local",
    levels: int = 0,
    reduce: Any = None,
) -> tuple[Any, ...]:
    """Runs `fn(client, shared)` for every row of a cohort.

    Args:
        fn: One client's update.
        task, state, cohort, data: Those at the beginning of the round.
        own: Leaves [C, ...], each client's `client.own`; None = its private row.
        shared: The same for all clients, such as the server's model.
        plan: Name of the step plan.
        levels: With L > 0 `fn(client, shared, level)` is traced once for each level
            1..L (a Python int), and a chunk of clients runs its largest one, or always
            L where `task.execution.is_bucketed` is False.
        reduce: Weights of sums over the clients that are taken while chunks run, so
            that memory is that of a chunk: f32[C], 0 on padding rows, or a prefix
            pytree of such, of either sign. `fn` then returns `(kept, given)`, and
            `given` is summed, of which counts and bools become f32.

    Returns:
        (results of `fn` with leaves [C, ...], the state); with `reduce` (kept with
        leaves [C, ...], the sum with leaves [...], the state). The state has the new
        persistent optimizer states, from the training that `fn` returned.

    Raises:
        ValueError: optimizer states persist, and `fn` returns two trainings.

    Examples:
        >>> ids, none = jnp.arange(2), jnp.zeros((2, 0), int)
        >>> plans = {"local": types.Plan(none, ids, ids, ids, 1)}  # 0 and 1 steps
        >>> cohort = types.Cohort(ids, ids, ids >= 0, ids, none, none, plans)
        >>> state = types.RoundState.first((), jnp.array([1.0, 2.0]), jax.random.key(0))
        >>> task = types.Task((), (), ids, 2, 2, 0, 2, 1, (1,))
        >>> def fn(client, shared):
        ...     return client.own + shared * client.plan.num_steps
        >>> out, state = update(fn, task, state, cohort, data=(), shared=10.0)
        >>> out.tolist()
        [1.0, 12.0]
    """
    steps, positions = cohort.plans[plan].split()
    known = own, steps, reduce, cohort.row_mask
    own, steps, reduce, is_here = exchange.everywhere(known)
    row = exchange.behind(cohort.row, (state.round, shared))
    if own is None:  # both in the same trips
        own, opt_state = exchange.take(state.private, row)
    else:
        opt_state = exchange.take(state.opt_state, row, own)
    rows = _clients(task, cohort, own, opt_state, steps)

    fixed = dict(task.fixed_steps).get(plan)

    def one(row: Client, given: Any, most: Any, local: Any, **level: int) -> Any:
        (data, shared, key, round), (bound, is_here) = given, most
        bound = bound if fixed is None else np.int32(fixed)
        here = {"bound": bound, "is_here": is_here, "data": data}
        here |= {"key": key, "round": round, "plan": row.plan.joined(local)}
        return fn(row.replace(**here), shared, **level)

    given = (data, shared, state.key, state.round)
    is_bucketed = task.execution.is_bucketed and levels > 0
    first = 1 if is_bucketed else levels
    by_level = [functools.partial(one, level=n) for n in range(first, levels + 1)]
    out = over_clients(by_level if levels else [one], task.execution)(
        rows,
        given,
        (steps.num_steps, is_here),
        cohort.level if is_bucketed else None,
        reduce,
        positions,
    )
    kept, *total = out if reduce is not None else (out,)
    kept = exchange.everywhere(_padded(kept, cohort.row_mask))
    numbers = list(filter(exchange.is_number, jax.tree.leaves(kept)))
    state = state.replace(round=exchange.behind(state.round, (numbers, total)))
    return kept, *total, _with_opt_states(state, cohort, kept)


def _with_opt_states(
    state: types.RoundState, cohort: types.Cohort, out: Any
) -> types.RoundState:
    """The state with the new optimizer states of a training in `out`."""

    def is_training(node: Any) -> bool:
        return isinstance(node, Trained)

    nodes = filter(is_training, jax.tree.leaves(out, is_leaf=is_training))
    found = [node.opt_state for node in nodes if node.persists]
    if len(found) > 1:
        raise ValueError(
            "a client's update returns two trainings with a persistent optimizer "
            "state; train one of them with client.fresh()"
        )
    for new in found:
        kept, number = exchange.put(state.opt_state, cohort.row, new, state.round)
        state = state.replace(opt_state=kept, round=number)
    return state


def in_turn(
    fn: Callable[[Client, Any], Any],
    task: types.Task,
    state: types.RoundState,
    cohort: types.Cohort,
    data: types.Data,
    *,
    start: Any,
    own: Any = (),
    plan: str = "local",
) -> Any:
    """Runs `carry = fn(client, carry)` for one client after another, from `start`.

    The order is drawn by client id, independently of places in the cohort. Padding rows
    come last and take no step. Devices compute it as in `over_devices.once`. `fn` is
    the server's step for one client. `own` has leaves [C, ...], each client's
    `client.own`. Other arguments are those of `update`. Returns the last carry.
    """
    key = rng.stream(state.key, "engine.order", state.round)
    draws = jax.vmap(lambda number: jax.random.uniform(jax.random.fold_in(key, number)))
    order = jnp.argsort(jnp.where(cohort.row_mask, draws(cohort.client_id), 2.0))
    rows = _clients(task, cohort, own, opt_state=(), plan=())
    plans = cohort.plans[plan].known_everywhere(task.execution)

    def step(index: jax.Array, carry: Any) -> Any:
        row = order[index]
        steps = plans.of_row(row)
        is_here = cohort.row_mask[row]
        bound = jnp.where(is_here, steps.num_steps, 0)
        here = {"bound": bound, "is_here": is_here, "data": data, "plan": steps}
        here |= {"key": state.key, "round": state.round}
        return fn(stacked.take(rows, row).replace(**here), carry)

    def every(start: Any) -> Any:
        return jax.lax.fori_loop(0, order.shape[0], step, start)

    return over_devices.once(every, task.execution, start)


def over_clients(
    fns: Sequence[Callable[[Any, Any, jax.Array], Any]],
    how: execution.Execution,
) -> Callable[..., Any]:
    """Maps a function of one client over all rows of a cohort.

    Rows are cut into chunks. A chunk is vmapped, chunks run one after another, and
    devices share the rows by `shard_map`, so that the computation of the clients needs
    no communication. Where private rows are shared out, results stay on the devices
    that train, and sums over clients are taken on each device first. Otherwise
    results are gathered at the end. Before and after that all devices compute the same,
    except for the work that `over_devices` shares out.

    Args:
        fns: `(row, shared, bound, local) -> out`, one for each level, or just one.
            `row` is one row of `rows`. `bound` int32[] is the largest number of steps
            in the row's chunk and stays unbatched, so that a `fori_loop` up to it stops
            early. `local` is the part that only the row's device has.
        how: Chunk size and mesh. The number of rows must be a multiple of chunk x
            devices (`execution.padded_size`).

    Returns:
        `(rows, shared, num_steps, level=None, reduce=None, local=()) -> out` with
        `rows` leaves [C, ...], `num_steps` int32[C] or a pytree of arrays [C], of which
        each has its `bound`, `level` int32[C], `reduce` f32[C] or a prefix pytree of
        such, `local` leaves [devices, ...], and `out` leaves [C, ...].
        With `reduce`, `fns` return `(kept, given)` and so does this, where `given` is
        summed over the rows with these weights. It raises ValueError unless C is a
        multiple of chunk x devices.
    """

    def on_device(mine: Any, shared: Any, local: Any) -> Any:
        rows, num_steps, level, reduce = mine
        num_steps = exchange.behind(num_steps, rows)
        num_rows = jax.tree.leaves(num_steps)[0].shape[0]
        chunk = min(how.chunk, num_rows)
        mine = rows, num_steps, level, reduce

        def of_level(fn: Callable, rows: Any, num_steps: Any) -> Any:
            bound = jax.tree.map(jnp.max, num_steps)
            if chunk == 1:
                with execution.side_by_side(how, 1):
                    out = fn(stacked.at(rows, 0), shared, bound, local)
                return jax.tree.map(lambda leaf: leaf[None], out)
            with execution.side_by_side(how, chunk):
                return jax.vmap(lambda row: fn(row, shared, bound, local))(rows)

        def on_chunk(part: tuple) -> Any:
            rows, num_steps, level, reduce = part
            if level is None:
                out = of_level(fns[0], rows, num_steps)
            else:
                # One level for the chunk makes a real branch. A level of each row
                # would make a select, which computes all of them.
                branches = [functools.partial(of_level, fn) for fn in fns]
                out = jax.lax.switch(level.max() - 1, branches, rows, num_steps)
            if reduce is None:
                return out
            kept, given = out
            return kept, aggregate.weighted_mean(aggregate.summable(given), reduce)

        if chunk == num_rows:
            return exchange.behind(on_chunk(mine), rows)
        parts = jax.tree.map(
            lambda leaf: leaf.reshape(-1, chunk, *leaf.shape[1:]), mine
        )
        out = _in_turn(on_chunk, parts, is_summed=reduce is not None)
        # Also what XLA finds to depend on no client's training
        return exchange.behind(out, rows)

    def run(
        rows: Any,
        shared: Any,
        num_steps: Any,
        level: jax.Array | None = None,
        reduce: Any = None,
        local: Any = (),
    ) -> Any:
        chex.assert_equal_shape_prefix(jax.tree.leaves((num_steps, rows)), 1)
        num_rows = jax.tree.leaves(num_steps)[0].shape[0]
        if num_rows != execution.padded_size(num_rows, how):
            raise ValueError(
                f"{num_rows} rows do not fill chunks of {how.chunk}; pad the cohort to "
                "execution.padded_size"
            )
        mine = (rows, num_steps, level, reduce)
        over = over_devices.rows(on_device, how, is_summed=reduce is not None)
        return over(mine, shared, local)

    return run


def _in_turn(on_chunk: Callable[[Any], Any], parts: Any, *, is_summed: bool) -> Any:
    """Runs chunks one after another; leaves [chunks, chunk, ...] become [C, ...].

    With `is_summed`, `on_chunk` and this return `(kept, part of a sum)`.
    """

    if not is_summed:
        return stacked.flat(jax.lax.map(on_chunk, parts))

    def step(total: Any, part: Any) -> tuple[Any, Any]:
        kept, given = on_chunk(part)
        return jax.tree.map(jnp.add, total, given), kept

    def in_blocks(carry: tuple, part: Any) -> tuple[tuple, Any]:
        """A long sum in sequence loses digits, which those of blocks do not."""
        total, block, index = carry
        block, kept = step(block, part)
        is_full = (index + 1) % size == 0
        done = jax.tree.map(lambda x: jnp.where(is_full, x, jnp.zeros_like(x)), block)
        total = jax.tree.map(jnp.add, total, done)
        block = jax.tree.map(lambda x: jnp.where(is_full, jnp.zeros_like(x), x), block)
        return (total, block, index + 1), kept

    zeros = stacked.zeros(jax.eval_shape(on_chunk, stacked.at(parts, 0))[1])
    count = jax.tree.leaves(parts)[0].shape[0]
    if count <= MANY_CHUNKS:
        total, kept = jax.lax.scan(step, zeros, parts)
        return stacked.flat(kept), total
    size, first = math.isqrt(count), (zeros, zeros, jnp.int32(0))
    (total, block, _), kept = jax.lax.scan(in_blocks, first, parts)
    return stacked.flat(kept), jax.tree.map(jnp.add, total, block)
