"""Counts correct answers per client for any algorithm, and computes the metrics.

The device counts correct answers as integers and sums the cross-entropy in float32, and
the host divides in float64.

A text has no correct answers. Wherever these are counted it has four sums in float32 in
a last axis, (-log p, positions, -log p at chosen positions, chosen positions), of a
row, of a client or of all, where p is the probability of the word that is there. All
rows of a shared model are summed by the host.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import layout

from fedjax_pfl import each_client, execution, over_devices, rng, stacked, types
from fedjax_pfl import measures as measures_lib


class Scoring(NamedTuple):
    """What is measured.

    Attributes:
        batch_size: Rows per forward pass.
        own_batch_size: Rows per forward pass on one client's own test rows.
        num_scored: Clients behind c_spec, c_gen and c_per; 0 = these are absent.
        scored: `selected` (the next round's cohort) or `all`.
        num_sampled: Clients for which the own accuracy is measured, drawn once by the
            seed; 0 = all.
        has_train: Whether the server's model is measured on the clients' train rows.
        measures: What else is measured, not of a text.
        positions: One of `augment.POSITIONS`, see `perplexities`.
        own_rows: The most test rows of a client, for `measures`.
    """

    batch_size: int
    own_batch_size: int
    num_scored: int = 0
    scored: str = "selected"
    num_sampled: int = 0
    has_train: bool = False
    measures: tuple[measures_lib.Measure, ...] = ()
    own_rows: int = 0
    positions: str = "all"


class Tally(NamedTuple):
    """What is added up over rows, or the same of each row.

    Attributes:
        right: int32[...], correct answers (bool[...] of single rows), or of a text
            f32[..., 4].
        loss: f32[...], the cross-entropy of the served output, or () of a text, whose
            sums have it.
    """

    right: jax.Array
    loss: jax.Array | tuple[()]


def answer(model: types.Model, out: Any) -> jax.Array:
    """The logits f32[B, Y] that serve, from the output of `model.forward`."""
    if not model.has_exits:
        return out
    return out[-1] if model.answer == "last" else sum(out) / len(out)


def _outputs(model: types.Model, out: Any) -> tuple[jax.Array, ...]:
    """J logits: of each exit, their ensemble and the served output.

    J is 1 for a model without exits.
    """
    if not model.has_exits:
        return (out,)
    return *out, sum(out) / len(out), answer(model, out)


def _scored(
    model: types.Model, variables: types.Variables, data: types.Data, rows: jax.Array
) -> tuple[Tally, jax.Array]:
    """The answers of a model on rows int32[B], negative ones being padding.

    Returns:
        (a `Tally` with `right` [J, B, ...] and `loss` [B];
        bool[B], whether exits disagree about it).
    """
    image, label, is_chosen = data.test_batch(rows)
    out, _ = model.forward(*variables, image)
    is_real = rows >= 0
    if is_chosen is not None:
        sums = [_surprise(z, label, is_chosen) for z in _outputs(model, out)]
        sums = jnp.where(is_real[:, None], jnp.stack(sums), 0)
        return Tally(sums, ()), jnp.zeros_like(is_real)
    outputs = _outputs(model, out)
    loss = optax.softmax_cross_entropy_with_integer_labels(outputs[-1], label)
    loss = jnp.where(is_real, loss.astype(jnp.float32), 0)
    found = jnp.argmax(jnp.stack(outputs), -1)
    exits = found[:-2] if model.has_exits else found
    right = (found == label) & is_real
    return Tally(right, loss), (exits != exits[0]).any(0) & is_real


def _surprise(logits: jax.Array, word: jax.Array, is_chosen: jax.Array) -> jax.Array:
    """The four sums f32[B, 4] of logits f32[B, T, V] and words int32[B, T]."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, word)
    parts = loss, jnp.ones_like(loss), jnp.where(is_chosen, loss, 0), is_chosen
    return jnp.stack([part.sum(1, dtype=jnp.float32) for part in parts], -1)


def _nothing(data: types.Data, *shape: int) -> Tally:
    """Zeros to which tallies are added."""
    if data.num_words:
        return Tally(jnp.zeros((*shape, 4)), ())
    return Tally(jnp.zeros(shape, jnp.int32), jnp.zeros(shape))


def _plus(one: Tally, other: Tally) -> Tally:
    return jax.tree.map(jnp.add, one, other)


def _summed(right: jax.Array) -> jax.Array:
    """Answers on rows [..., U] added up, those of a text f32[..., U, 4] as they are."""
    return right.sum(-1) if right.dtype == bool else right


# From a model, its variables, the tables, rows int32[B] and the place of the first of
# them to sums over these rows
_OfBatch = Callable[..., Any]


def _tally(
    model: types.Model,
    variables: types.Variables,
    data: types.Data,
    rows: jax.Array,
    first: jax.Array,
) -> Tally:
    """The sums of the served output over rows int32[B], negative ones being padding."""
    found = _scored(model, variables, data, rows)[0]
    served = found._replace(right=found.right[-1])
    return jax.tree.map(
        lambda total, x: x.sum(0, dtype=total.dtype), _nothing(data), served
    )


def _measures(
    chosen: tuple[measures_lib.Measure, ...],
    num_rows: int,
    model: types.Model,
    variables: types.Variables,
    data: types.Data,
    rows: jax.Array,
    first: jax.Array,
) -> tuple[Any, ...]:
    """The sums of measures of the served output over rows int32[B]."""
    image, label, _ = data.test_batch(rows)
    out, _ = model.forward(*variables, image)
    batch = answer(model, out), label, rows >= 0
    return measures_lib.of(chosen, *batch, first=first, num_rows=num_rows)


def _sums_from(
    model: types.Model,
    variables: types.Variables,
    data: types.Data,
    start: jax.Array,
    count: jax.Array,
    batch_size: int,
    bound: jax.Array,
    of_batch: _OfBatch = _tally,
) -> Any:
    """The sums of the served output on test rows start..start+count."""

    def batch(index: jax.Array) -> Any:
        offset = index * batch_size + jnp.arange(batch_size)
        rows = jnp.take(data.partition.test.row, start + offset, mode="clip")
        rows = jnp.where(offset < count, rows, -1)
        return of_batch(model, variables, data, rows, index * batch_size)

    def step(index: jax.Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, batch(index))

    like = jax.eval_shape(batch, 0)
    nothing = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), like)
    return jax.lax.fori_loop(0, bound, step, nothing)


def _answers(
    model: types.Model,
    variables: types.Variables,
    data: types.Data,
    rows: jax.Array,
    batch_size: int,
    how: execution.Execution,
) -> tuple[Tally, jax.Array]:
    """`_scored` of one shared model on rows int32[U] of the example table."""
    batches = stacked.in_batches(rows, batch_size)

    def one(index: jax.Array) -> tuple[Tally, jax.Array]:
        (right, loss), differ = _scored(model, variables, data, batches[index])
        return Tally(right.swapaxes(0, 1), loss), differ

    # Only real rows, since the table's length is rounded up with padding.
    num_batches = -(-(rows >= 0).sum() // batch_size)
    found = over_devices.batches(one, len(batches), how, num_batches)
    (right, loss), differ = jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: len(rows)], found
    )
    return Tally(right.swapaxes(0, 1), loss), differ


def sampled_clients(key: jax.Array, num_clients: int, num_sampled: int) -> jax.Array:
    """bool[K]: the clients with a measured own accuracy, fixed for the whole run."""
    if not num_sampled:
        return jnp.ones(num_clients, bool)
    key = rng.stream(key, "engine.evaluation")
    chosen = jax.random.choice(key, num_clients, (num_sampled,), replace=False)
    return jnp.zeros(num_clients, bool).at[chosen].set(True)


def count_correct(
    algorithm: types.Algorithm,
    state: types.RoundState,
    cohort: types.Cohort,
    data: types.Data,
    scoring: Scoring,
    how: execution.Execution,
    ids: jax.Array | tuple[()] = (),
) -> dict[str, Any]:
    """Counts correct answers of the server's models and of the personalized models.

    Args:
        algorithm: The algorithm.
        state: The state at the end of a round.
        cohort: The next round's clients, without plans.
        data: The tables.
        scoring: What is measured.
        how: Chunks and devices.
        ids: int32[K'], the clients whose private rows the state has, K = none; () =
            all. There are then K' clients in what is returned.

    Returns:
        `own` int32[K], each client's personalized model on its own test rows, 0 where
        `known` bool[K] is False (the client is not in the sample, or no model serves
        it), and `own_loss` f32[K], the sum of its cross-entropy there; `server`
        {name: int32[J]}, the server's models on the union (absent without one), as
        `_outputs`, `server_loss` {name: f32[]}, the sum of the cross-entropy of what
        serves, and `differ` {name: int32[]}, rows on which the exits of those that have
        some disagree (the sums of a text hold its losses); `train` (int32[], int32[]),
        correct answers of the first of them on the clients' train rows, and the number
        of these rows;
        `scored` int32[num_scored], the ids of the scored clients (K = none), and
        `cross` int32[num_scored], their personalized models on the union; `trained`
        int32[K], as `own` for the models as training left them (absent where the
        algorithm does not define them). With `ids`, `shared` {`own`, `own_loss`
        or `trained`: a tuple of [K]}: for every model that several clients share, its
        sums on the test rows of each client.
    """
    test, num_clients = data.partition.test, data.partition.test.start.shape[0]
    start, count = test.start, test.count
    is_sampled = sampled_clients(state.key, num_clients, scoring.num_sampled)
    is_block, num_rows = not isinstance(ids, tuple), num_clients
    if is_block:
        start, count, is_sampled = _of_block(ids, test, is_sampled)
        num_rows = ids.shape[0]
    union = (test.row >= 0).sum()
    remembered: dict[Any, tuple[types.Variables, Any]] = {}

    def answers_of(model: types.Model, variables: types.Variables) -> Any:
        # A shared model that serves is usually the server's, so answer once. Both are
        # then the same leaves of the state, which the identity of tracers shows.
        name = model, tuple(id(leaf) for leaf in jax.tree.leaves(variables))
        if name not in remembered:
            size = scoring.batch_size
            found = _answers(model, variables, data, test.row, size, how)
            # Kept with its variables, since a freed leaf's identity may be reused.
            remembered[name] = variables, found
        return remembered[name][1]

    out: dict[str, Any] = {}
    if algorithm.server is not None:
        models = algorithm.server(state, data)
        answers = {name: answers_of(*one)[0] for name, one in models.items()}
        out["server"] = {name: _summed(one.right) for name, one in answers.items()}
        if not data.num_words:
            out["server_loss"] = {name: one.loss.sum() for name, one in answers.items()}
        out["differ"] = {
            name: answers_of(*one)[1].sum()
            for name, one in models.items()
            if one[0].has_exits
        }
        if scoring.has_train:
            first, rows = next(iter(models.values())), data.partition.train.row
            (right, _), _ = _answers(*first, data, rows, scoring.batch_size, how)
            out["train"] = _summed(right[-1]), (rows >= 0).sum()
    scored = jnp.zeros(0, jnp.int32)
    if scoring.num_scored:
        scored = jnp.arange(num_rows)
        client = ids if is_block else scored
        if scoring.scored == "selected":
            client = cohort.client_id
            slot = cohort.row if is_block else client
            scored = jnp.where(cohort.row_mask, slot, num_rows)
        hit = jnp.take(is_sampled, scored, mode="fill", fill_value=False)
        scored = jnp.where(hit, scored, num_rows)
        out["scored"] = jnp.where(hit, client, num_clients)

    shared: dict[str, tuple[Tally, ...]] = {}

    def counted(name: str, groups: tuple[types.Serving, ...], scored: jax.Array) -> Any:
        """(own `Tally`, `known`, `cross`) of serving groups, `cross` for `scored`."""
        shared[name] = ()
        own = _nothing(data, num_rows)
        known = jnp.zeros(num_rows, bool)
        cross = jnp.zeros(scored.shape, jnp.int32)
        for group in groups:
            number, end = _numbers(group, num_rows), group.mask.shape[0]
            serves = number > 0
            measured = serves & is_sampled
            known = known | measured
            if group.own is None:
                found = answers_of(group.model, group.shared)[0]
                found = found._replace(right=found.right[-1])
                per_client = jax.tree.map(
                    lambda total, x: jax.ops.segment_sum(
                        x.astype(total.dtype), test.owner(), num_clients
                    ),
                    own,
                    found,
                )
                if is_block:
                    shared[name] += (per_client,)
                    per_client = stacked.take(per_client, ids)
                nothing = jax.tree.map(jnp.zeros_like, own)
                own = _plus(own, stacked.where(measured, per_client, nothing))
                if scored.size:
                    hit = jnp.take(serves, scored, mode="fill", fill_value=False)
                    cross += jnp.where(hit, found.right.sum(), 0)
                continue

            size = min(scoring.num_sampled or num_rows, end)
            if how.shares_rows and group.is_by_row:
                rows = _by_device(measured, how.num_devices, size)
            else:
                (rows,) = jnp.nonzero(measured, size=size, fill_value=num_rows)
            # The entry is one past the end for clients without one, and for the id K,
            # which is padding.
            entry_of = jnp.append(jnp.where(serves, number - 1, end), end)
            found = _each_entry(
                group,
                entry_of[rows],
                jnp.take(start, rows, mode="clip"),
                jnp.take(count, rows, mode="fill", fill_value=0),
                data,
                scoring.own_batch_size,
                how,
            )
            own = jax.tree.map(
                lambda total, x, at=rows: total.at[at].add(x, mode="drop"), own, found
            )
            if scored.size:
                entries = entry_of[scored]
                counts = jnp.where(entries < end, union, 0)
                starts = jnp.zeros_like(counts)
                given = group, entries, starts, counts, data, scoring.batch_size, how
                cross += _each_entry(*given).right
        return own, known, cross

    served = algorithm.serving_groups(state, cohort, data, num_rows)
    own, known, cross = counted("own", served, scored)
    if scoring.num_scored:
        out["cross"] = cross
    if algorithm.trained is not None:
        trained = own
        if algorithm.trained is not algorithm.serving:
            found = algorithm.trained(state, cohort, data)
            trained, _, _ = counted("trained", found, scored[:0])
        out["trained"] = trained.right
    if is_block:
        out["shared"] = {n: tuple(t.right for t in many) for n, many in shared.items()}
        if not data.num_words:
            out["shared"]["own_loss"] = tuple(t.loss for t in shared["own"])
    out |= {**_of_clients(own), "known": known}
    if scoring.measures:
        given = algorithm, state, data, served, scoring, how
        out["measured"] = _measured(*given, start, count, is_sampled)
    return out


def _measured(
    algorithm: types.Algorithm,
    state: types.RoundState,
    data: types.Data,
    served: tuple[types.Serving, ...],
    scoring: Scoring,
    how: execution.Execution,
    start: jax.Array,
    count: jax.Array,
    is_sampled: jax.Array,
) -> dict[str, Any]:
    """The sums of `scoring.measures`: `server` on the union, `own` leaves [K', ...].

    The clients of a shared model are measured one by one, as others are. `start`,
    `count` and `is_sampled` are the test rows of K' clients, and which are measured.
    """
    test, num_rows = data.partition.test, is_sampled.shape[0]

    def measured_on(rows: int) -> _OfBatch:
        return functools.partial(_measures, scoring.measures, rows)

    out: dict[str, Any] = {}
    if algorithm.server is not None:
        model, variables = next(iter(algorithm.server(state, data).values()))
        union, size = (test.row >= 0).sum(), scoring.batch_size
        where = jnp.zeros((), jnp.int32), union, size, -(-union // size)
        of_union = measured_on(test.row.shape[0])

        def sums(variables: types.Variables) -> Any:
            return _sums_from(model, variables, data, *where, of_union)

        out["server"] = over_devices.once(sums, how, variables)
    own = None
    for group in served:
        number = _numbers(group, num_rows)
        measured = (number > 0) & is_sampled
        size = min(scoring.num_sampled or num_rows, group.mask.shape[0])
        if how.shares_rows and group.is_by_row:
            rows = _by_device(measured, how.num_devices, size)
        else:
            (rows,) = jnp.nonzero(measured, size=size, fill_value=num_rows)
        entries = jnp.append(jnp.maximum(number, 1) - 1, group.mask.shape[0])
        found = _each_entry(
            group,
            entries[rows],
            jnp.take(start, rows, mode="clip"),
            jnp.take(count, rows, mode="fill", fill_value=0),
            data,
            scoring.own_batch_size,
            how,
            measured_on(scoring.own_rows),
        )
        if own is None:
            own = jax.tree.map(
                lambda x: jnp.zeros((num_rows, *x.shape[1:]), x.dtype), found
            )
        own = jax.tree.map(
            lambda total, x, at=rows: total.at[at].add(x, mode="drop"), own, found
        )
    return out | {"own": own}


def _of_clients(own: Tally) -> dict[str, jax.Array]:
    """The sums of the personalized models by name; those of a text have the loss."""
    loss = {} if isinstance(own.loss, tuple) else {"own_loss": own.loss}
    return {"own": own.right} | loss


def count_rest(
    algorithm: types.Algorithm,
    state: types.RoundState,
    cohort: types.Cohort,
    data: types.Data,
    scoring: Scoring,
    how: execution.Execution,
    ids: jax.Array,
) -> dict[str, Any]:
    """Like `count_correct` with `ids`, for clients of whom none is in the cohort.

    The server's models and those that clients share are not measured again.

    Args:
        algorithm, state, data, scoring, how, ids: As in `count_correct`.
        cohort: One in which all rows are padding.

    Returns:
        `own`, `own_loss`, `known` and `trained` as `count_correct` has them, but
        without what the shared models answer. `by_shared`, with the keys `own` and
        `trained` of `shared` and a bool[K'] for each of these models, says which
        clients it serves.
    """
    given = state, cohort, data
    every = data.partition.test
    sampled = sampled_clients(state.key, every.start.shape[0], scoring.num_sampled)
    start, count, sampled = _of_block(ids, every, sampled)
    by_shared: dict[str, tuple[jax.Array, ...]] = {}

    def counted(name: str, groups: tuple[types.Serving, ...]) -> Any:
        by_shared[name] = ()
        own, known = _nothing(data, *ids.shape), jnp.zeros(ids.shape, bool)
        for group in groups:
            number = _numbers(group, ids.shape[0])
            serves = (number > 0) & sampled
            known |= serves
            if group.own is None:
                by_shared[name] += (serves,)
                continue
            rows = jnp.maximum(number, 1) - 1, start, jnp.where(serves, count, 0)
            found = _each_entry(group, *rows, data, scoring.own_batch_size, how)
            own = _plus(own, found)
        return own, known

    own, known = counted("own", algorithm.serving_groups(*given, ids.shape[0]))
    out = {**_of_clients(own), "known": known}
    if algorithm.trained is not None:
        trained = own
        if algorithm.trained is not algorithm.serving:
            trained, _ = counted("trained", algorithm.trained(*given))
        out["trained"] = trained.right
    return out | {"by_shared": by_shared}


def _by_device(is_wanted: jax.Array, devices: int, size: int) -> jax.Array:
    """int32[A]: the wanted of bool[R] rows, those of each device together.

    Each device has as many places, at most `size`, and its wanted rows come first. R
    fills the others.
    """
    num_rows = is_wanted.shape[0]
    by_device = is_wanted.reshape(devices, -1)
    place = jnp.argsort(~by_device, axis=1, stable=True)[:, :size]
    slot = place + num_rows // devices * jnp.arange(devices)[:, None]
    wanted = jnp.take_along_axis(by_device, place, 1)
    return jnp.where(wanted, slot, num_rows).reshape(-1)


def _numbers(group: types.Serving, num_rows: int) -> jax.Array:
    """int32[num_rows]: each client's entry in a group, counted from 1; 0 = none.

    Counted from 0 it may equal the index, and a TPU's compiler ends where one value is
    the index and the update of a scatter.
    """
    served_id = jnp.where(group.mask, group.client_id, num_rows)
    numbers = 1 + jnp.arange(served_id.shape[0])
    return jnp.zeros(num_rows, jnp.int32).at[served_id].set(numbers, mode="drop")


def _of_block(ids: jax.Array, test: types.ClientRows, is_sampled: jax.Array) -> tuple:
    """(first test row, test rows, whether in the sample) of clients `ids`, K = none."""

    def of(table: jax.Array, fill: Any) -> jax.Array:
        return jnp.take(table, ids, mode="fill", fill_value=fill)

    return of(test.start, 0), of(test.count, 0), of(is_sampled, False)


def _each_entry(
    group: types.Serving,
    entries: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    data: types.Data,
    batch_size: int,
    how: execution.Execution,
    of_batch: _OfBatch = _tally,
) -> Any:
    """The sums [A] of some of a group's models, on test rows for each.

    Args:
        group: The serving group, with a model for each entry.
        entries: int32[A], rows of `group.own`.
        starts, counts: int32[A], the test rows. A count of 0 costs nothing.
        data: The tables.
        batch_size: Rows per forward pass.
        how: Chunks and devices. Models that do not fill whole chunks are padded. Where
            a group has the private rows and these are shared out, each device has as
            many of these entries, in the order of the devices.
        of_batch: What is summed.
    """
    size, own, parts, first = entries.shape[0], group.own, 1, 0
    if stays := how.shares_rows and group.is_by_row:
        parts = how.num_devices
        own = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), own)
        first = group.mask.shape[0] // parts * jnp.arange(parts)[:, None]
    short = (execution.padded_size(size, how) - size) // parts

    def padded(leaf: jax.Array, first: Any = 0) -> jax.Array:
        """Each device's entries, counted from the first that it has."""
        by_device = leaf.reshape(parts, -1) - first
        return jnp.pad(by_device, ((0, 0), (0, short))).reshape(-1)

    def one(row: Any, given: Any, bound: jax.Array, local: Any) -> Any:
        entry, start, count = row
        data, own, shared = given
        # The model is made only here, so that they never all exist at once.
        mine = _taken(local if stays else own, entry)
        mine = group.replace(shared=shared).variables(mine)
        where = start, count, batch_size, bound
        return _sums_from(group.model, mine, data, *where, of_batch)

    rows = padded(entries, first), padded(starts), padded(counts)
    num_steps = -(-rows[2] // batch_size)
    given = (data, () if stays else own, group.shared)
    local = own if stays else ()
    over = each_client.over_clients([one], how)

    def without_padding(leaf: jax.Array) -> jax.Array:
        sums = leaf.shape[1:]
        return leaf.reshape(parts, -1, *sums)[:, : size // parts].reshape(-1, *sums)

    return jax.tree.map(without_padding, over(rows, given, num_steps, local=local))


def _taken(tree: Any, entry: jax.Array) -> Any:
    """A row of leaves [A, ...], which leaves a TPU's copy of all rows as it is.

    A TPU keeps [A, 128, 64] with 128 in its lanes, which are 128 wide. Without a layout
    for the row, a loop over rows first copies all of them to one with 64 in the lanes.
    """
    row = stacked.take(tree, entry)
    if execution.setting().platform != "tpu":
        return row

    def one(leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 2:
            return leaf
        *others, last, lanes = range(leaf.ndim)
        tall, wide = leaf.shape[-2:]
        # Tiles have 8 x 128 numbers.
        if -(-wide // 8) * -(-tall // 128) < -(-tall // 8) * -(-wide // 128):
            last, lanes = lanes, last
        return layout.with_layout_constraint(
            leaf, layout.Layout((*others, last, lanes))
        )

    return jax.tree.map(one, row)


def metrics(
    counts: dict[str, Any],
    test_count: np.ndarray,
    union: int,
    chosen: tuple[measures_lib.Measure, ...] = (),
    positions: str = "all",
) -> tuple[dict[str, float], np.ndarray | None]:
    """Turns one seed's counts into metrics by name; see `perplexities` for a text.

    Args:
        counts: What `count_correct` returned, as numpy.
        test_count: int[K], own test rows per client.
        union: U, rows in the union of all test rows.
        chosen: The measures of `counts["measured"]`.
        positions: Which positions of a text are measured.

    Returns:
        Accuracies as fractions 0..1 and losses by name, absent where there is no model
        or no row for them; and the per-client accuracies f64[K] (nan without own test
        rows). A value that is not finite is absent too.
    """
    if counts["own"].ndim > 1:
        return perplexities(counts, test_count, positions)
    out: dict[str, float] = {}
    for name, right in (counts.get("server", {}) if union else {}).items():
        right = right.astype(np.float64) / union
        out[f"{name}_accuracy"] = float(right[-1])
        out[f"{name}_loss"] = float(counts["server_loss"][name] / union)
        prefix = "" if name == "global" else f"{name}_"
        if len(right) == 1:
            continue
        *exits, ensemble, _ = right.tolist()
        for number, value in enumerate(exits, start=1):
            out[f"{prefix}exit{number}_accuracy"] = value
        out[f"{prefix}ensemble_accuracy"] = ensemble
        if len(exits) > 1:
            out[f"{prefix}exits_disagree"] = float(counts["differ"][name] / union)
    if "train" in counts:
        right, count = counts["train"]
        out["train_accuracy"] = float(right / count)
    own = counts["own"].astype(np.int64)
    tested = (test_count > 0) & counts["known"]
    accuracy = np.full(len(own), np.nan)
    accuracy[tested] = own[tested] / test_count[tested]
    if tested.any():
        worst = np.sort(accuracy[tested])[: max(1, int(tested.sum()) // 10)]
        out["client_accuracy"] = float(accuracy[tested].mean())
        out["client_accuracy_pooled"] = float(own.sum() / test_count[tested].sum())
        out["worst_decile_accuracy"] = float(worst.mean())
        out["client_accuracy_std"] = float(accuracy[tested].std())
        loss = counts["own_loss"].astype(np.float64)[tested] / test_count[tested]
        out["client_loss"] = float(loss.mean())
        if "trained" in counts:
            trained = counts["trained"].astype(np.int64)[tested] / test_count[tested]
            out["trained_accuracy"] = float(trained.mean())
        if not counts["known"].all():
            out["clients_evaluated"] = int(tested.sum())
    if "scored" in counts:
        scored = counts["scored"]
        real = scored < len(own)
        own_rows = test_count[scored[real]].sum()
        if own_rows:
            out["c_spec"] = float(own[scored[real]].sum() / own_rows)
        # A sample of the clients may contain none of the scored ones.
        if real.any() and union:
            right = counts["cross"][real].astype(np.int64).sum()
            out["c_gen"] = float(right / (int(real.sum()) * union))
        if {"c_spec", "c_gen"} <= out.keys():
            out["c_per"] = (out["c_spec"] + out["c_gen"]) / 2
    if chosen:
        out |= measures_lib.metrics(chosen, counts["measured"], tested)
    # A run that diverged has accuracies, but no losses.
    out = {name: value for name, value in out.items() if np.isfinite(value)}
    return out, accuracy if tested.any() else None


def perplexities(
    counts: dict[str, Any], test_count: np.ndarray, positions: str = "all"
) -> tuple[dict[str, float], np.ndarray | None]:
    """Turns one seed's sums of a text into perplexities by name.

    A perplexity is exp of the mean -log p over all positions, and a masked one over
    the chosen positions, which the model had to guess.

    Args:
        counts, test_count: As in `metrics`.
        positions: `all`, or `chosen` for masked perplexities alone: a model that was
            trained at the chosen positions has not learned to repeat visible words.

    Returns:
        Numbers by name; and the per-client perplexities f64[K], with `chosen` the
        masked ones (nan without own test rows, or without a position to guess).
    """
    out: dict[str, float] = {}
    # The first of the sums that belong to a kind
    kinds = {"perplexity": 0, "masked_perplexity": 2}
    if positions == "chosen":
        del kinds["perplexity"]
    kind, first = next(iter(kinds.items()))
    for name, rows in counts.get("server", {}).items():
        *exits, served = rows.astype(np.float64).sum(1)
        prefix = "" if name == "global" else f"{name}_"
        if "perplexity" in kinds:
            out[f"{name}_perplexity"] = _perplexity(served)
        out[f"{prefix}masked_perplexity"] = _perplexity(served[2:])
        for number, sums in enumerate(exits, start=1):
            exit = f"exit{number}" if number < len(exits) else "ensemble"
            for one, begin in kinds.items():
                out[f"{prefix}{exit}_{one}"] = _perplexity(sums[begin:])
    if "train" in counts:
        rows, _ = counts["train"]
        out[f"train_{kind}"] = _perplexity(rows.astype(np.float64).sum(0)[first:])
    tested = (test_count > 0) & counts["known"]
    own = counts["own"].astype(np.float64)[:, first:]
    # Few test rows may have no chosen position.
    tested[tested] = own[tested, 1] > 0
    of_client = np.full(len(tested), np.nan)
    if not tested.any():
        return out, None
    of_client[tested] = _perplexity(own[tested].T)
    worst = np.sort(of_client[tested])[-max(1, int(tested.sum()) // 10) :]
    total = counts["own"].astype(np.float64)[tested].sum(0)
    if "perplexity" in kinds:
        out["client_perplexity"] = float(of_client[tested].mean())
        out["client_perplexity_pooled"] = _perplexity(total)
    out["client_masked_perplexity"] = _perplexity(total[2:])
    out[f"worst_decile_{kind}"] = float(worst.mean())
    out[f"client_{kind}_std"] = float(of_client[tested].std())
    if "trained" in counts:
        trained = counts["trained"].astype(np.float64)[tested, first:]
        out[f"trained_{kind}"] = float(np.mean(_perplexity(trained.T)))
    if not counts["known"].all() or tested.sum() < (test_count > 0).sum():
        out["clients_evaluated"] = int(tested.sum())
    return out, of_client


def _perplexity(sums: np.ndarray) -> Any:
    """exp of a sum of -log p over its positions; `sums` begins with both."""
    with np.errstate(over="ignore"):
        out = np.exp(sums[0] / np.maximum(sums[1], 1))
    return out if out.ndim else float(out)
