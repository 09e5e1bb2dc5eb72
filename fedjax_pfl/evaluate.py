"""Evaluates the models of a state on their test rows, in two programs.

`of_shared` runs the server's models, and those that several clients share, on the union
of all test rows. `of_clients` runs the models of given clients on these clients' own
rows. No model runs twice on a row, and the `Score` defines what is summed. `joined`
combines both results on the host.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import each_client, execution, over_devices, rng, scores, stacked, types
from fedjax_pfl.rows import exchange, tiled


class Scoring(NamedTuple):
    """The choice of what is measured.

    Attributes:
        batch_size, own_batch_size: Rows per pass, on all and on a client's test rows.
        num_scored: Clients behind c_spec, c_gen and c_per; 0 = these are absent.
        scored: `selected` (the next round's cohort) or `all`.
        num_sampled: Clients with an own accuracy, drawn once by the seed; 0 = all.
        has_train: Whether the server's model is measured on the clients' train rows.
        score: The sums over rows.
        adapts: The plan by which models adapt before they are measured once more,
            None = they do not.
    """

    batch_size: int
    own_batch_size: int
    num_scored: int = 0
    scored: str = "selected"
    num_sampled: int = 0
    has_train: bool = False
    score: scores.Score = scores.Classes()
    adapts: types.PlanSpec | None = None


def answer(model: types.Model, out: Any) -> jax.Array:
    """The logits f32[B, Y] that serve, from the output of `model.forward`."""
    if not model.has_exits:
        return out
    return out[-1] if model.answer == "last" else sum(out) / len(out)


def _outputs(model: types.Model, out: Any) -> tuple[jax.Array, ...]:
    """J logits: of exits, their ensemble and the served output; J = 1 without exits."""
    if not model.has_exits:
        return (out,)
    return *out, sum(out) / len(out), answer(model, out)


def _answers(
    model: types.Model,
    variables: types.Variables,
    data: types.Data,
    rows: jax.Array,
    score: scores.Score,
) -> scores.Answers:
    """The answers of a model on rows int32[B], of which negative ones are padding."""
    image, label, is_chosen = data.test_batch(rows)
    out, _ = model.forward(*variables, image)
    return score.answers(_outputs(model, out), label, is_chosen, rows >= 0)


def _on_rows(
    model: types.Model,
    variables: types.Variables,
    data: types.Data,
    rows: jax.Array,
    scoring: Scoring,
    how: execution.Execution,
) -> scores.Answers:
    """`_answers` of one shared model on rows int32[U] of the example table."""
    batches = stacked.in_batches(rows, scoring.batch_size)

    def one(index: jax.Array) -> scores.Answers:
        return _answers(model, variables, data, batches[index], scoring.score)

    # Only real rows, since the table's length is rounded up with padding.
    num_batches = -(-(rows >= 0).sum() // scoring.batch_size)
    found = over_devices.batches(one, len(batches), how, num_batches)
    return jax.tree.map(
        lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: len(rows)], found
    )


def sampled_clients(key: jax.Array, num_clients: int, num_sampled: int) -> jax.Array:
    """bool[K]: the clients with a measured own accuracy, fixed for the whole run.

    `key` is that of a seed. A draw takes as long as a shuffle of all clients.
    """
    key = rng.stream(key, "engine.evaluation")
    chosen = jax.random.choice(key, num_clients, (num_sampled,), replace=False)
    return jnp.zeros(num_clients, bool).at[chosen].set(True)


def of_shared(
    algorithm: types.Algorithm,
    state: types.RoundState,
    cohort: types.Cohort,
    data: types.Data,
    scoring: Scoring,
    how: execution.Execution,
) -> dict[str, Any]:
    """The server's models, and those that several clients share, on all test rows.

    Args:
        algorithm, scoring, how: The models, what is measured, and chunks and devices.
        state, data: At the end of a round, with any clients' private rows, and the
            tables.
        cohort: The next round's clients, without plans.

    Returns:
        `server` and `server_loss` {name: sums of the union}, see `Classes.of_union`;
        `differ` {name: int32[]}, the rows on which exits disagree, of models with
        exits; `measured`, the measures of the first server's model (these four are
        absent without a server); `train` (sums of that model on the clients' train
        rows, int32[] rows); `serving` and `trained`, for each model that clients share
        (sums over each client's test rows, leaves [K, ...]; its right answers on the
        union int32[], () without scored clients). `trained` may equal `serving` and is
        then absent.
    """
    test, score = data.partition.test, scoring.score
    answered: list[tuple[types.Model, list[jax.Array], Any]] = []

    def answers_of(model: types.Model, variables: types.Variables) -> scores.Answers:
        # A shared model that serves is usually the server's, so answer once. Both are
        # then the same leaves of the state.
        leaves = jax.tree.leaves(variables)
        for other, known, found in answered:
            is_same = all(a is b for a, b in zip(leaves, known, strict=False))
            if other is model and len(leaves) == len(known) and is_same:
                return found
        found = _on_rows(model, variables, data, test.row, scoring, how)
        answered.append((model, leaves, found))
        return found

    def of_groups(
        groups: tuple[types.Serving, ...], score: scores.Score
    ) -> tuple[Any, ...]:
        found = [answers_of(one.model, one.shared) for one in groups if one.own is None]
        owner, is_scored = test.owner(), scoring.num_scored > 0
        return tuple(
            (
                score.of_each(one, test, owner),
                score.of_union(one)["server"][-1] if is_scored else (),
            )
            for one in found
        )

    out: dict[str, Any] = {}
    if algorithm.server is not None:
        models = algorithm.server(state, data)
        answers = {name: answers_of(*one) for name, one in models.items()}
        for name, found in answers.items():
            for key, sums in score.of_union(found).items():
                out.setdefault(key, {})[name] = sums
        out["differ"] = {
            name: answers[name].differ.sum()
            for name, (model, _) in models.items()
            if model.has_exits
        }
        first = next(iter(models))
        if score.measures:
            out["measured"] = score.measured(answers[first])
        if scoring.has_train:
            rows = data.partition.train.row
            alone = scoring._replace(score=score.without_measures)
            found = _on_rows(*models[first], data, rows, alone, how)
            sums = score.of_union(found)["server"]
            out["train"] = sums[-1], (rows >= 0).sum()
    num_clients = test.start.shape[0]
    given = state, cohort, data
    out["serving"] = of_groups(algorithm.serving_groups(*given, num_clients), score)
    if _has_other_trained(algorithm):
        out["trained"] = of_groups(algorithm.trained(*given), score.without_measures)
    return out


def _has_other_trained(algorithm: types.Algorithm) -> bool:
    """Whether the models that training left differ from those that serve."""
    return algorithm.trained not in (None, algorithm.serving)


def of_clients(
    algorithm: types.Algorithm,
    state: types.RoundState,
    cohort: types.Cohort,
    data: types.Data,
    scoring: Scoring,
    how: execution.Execution,
    ids: jax.Array,
    sample: Any = (),
) -> dict[str, Any]:
    """The personalized models of given clients on their own test rows.

    Args:
        algorithm, cohort, data, scoring, how: As in `of_shared`.
        state: At the end of a round, with the private rows of these clients.
        ids: int32[R], the client of each private row, K = none.
        sample: bool[K], those of `sampled_clients`; () = all.

    Returns:
        `serving` and `trained`: (sums of these clients' own models, leaves [R, ...], 0
        where a client has none; bool[R] for each model that clients share, whether it
        serves them), where `trained` is absent as in `of_shared`; `known` bool[R], the
        clients that are in the sample and served by a model; `scored` int32[num_scored]
        (int32[R] of all clients), the ids of the scored clients, K = none, and `cross`,
        the right answers of their own models on the union (both absent without any).
    """
    test, score = data.partition.test, scoring.score
    num_clients, num_rows = test.start.shape[0], ids.shape[0]
    is_sampled = _is_sampled(sample, num_clients)
    cohort = exchange.everywhere(cohort)
    served = algorithm.serving_groups(state, cohort, data, num_rows)
    peers = _of_peers(algorithm, served)
    every = ids, cohort, jnp.arange(num_rows)
    ids, cohort, places = exchange.behind(every, peers)
    start, count, is_sampled = _of_ids(ids, test.start, test.count, is_sampled)
    out: dict[str, Any] = {}
    scored = jnp.zeros(0, jnp.int32)
    if scoring.num_scored:
        chosen = cohort if scoring.scored == "selected" else None
        scored, out["scored"] = _scored(chosen, ids, places, is_sampled, num_clients)

    def rights(group: types.Serving, entry_of: jax.Array, scored: jax.Array):
        """int32[S]: the right answers of scored clients' models on the union."""
        rows, end = scored, group.mask.shape[0]
        if is_split := how.shares_rows and group.is_by_row:
            is_scored = jnp.zeros(num_rows, bool).at[scored].set(True, mode="drop")
            rows = _places(is_scored, group, how, len(scored))
        entries = entry_of[rows]
        counts = jnp.where(entries < end, (test.row >= 0).sum(), 0)
        starts = exchange.behind(jnp.zeros_like(counts), peers)
        tests, batch = _Tests(entries, starts, counts), scoring.batch_size
        sums = _each_entry(group, tests, data, batch, how, scores.Classes())
        if not is_split:
            return sums["right"]
        every = jnp.zeros(num_rows, jnp.int32).at[rows].set(sums["right"], mode="drop")
        return jnp.take(every, scored, mode="fill", fill_value=0)

    def of_groups(
        groups: tuple[types.Serving, ...], score: scores.Score, scored: jax.Array
    ) -> _OfClients:
        own, shared = None, []
        known, cross = jnp.zeros(num_rows, bool), jnp.zeros(scored.shape, jnp.int32)
        for group in groups:
            number, end = _numbers(group, num_rows), group.mask.shape[0]
            number = exchange.behind(number, peers)
            serves = number > 0
            measured = serves & is_sampled
            known = known | measured
            if group.own is None:
                shared.append(measured)
                continue
            size = min(scoring.num_sampled or num_rows, end)
            rows = _places(measured, group, how, size)
            # One past the end for clients without an entry, and for slot R, the padding
            entry_of = jnp.append(jnp.where(serves, number - 1, end), end)
            starts = jnp.take(start, rows, mode="clip")
            counts = jnp.take(count, rows, mode="fill", fill_value=0)
            tests = _Tests(entry_of[rows], starts, counts)
            batch = scoring.own_batch_size
            found = _each_entry(group, tests, data, batch, how, score)
            if own is None:
                own = stacked.blank(found, num_rows)
            own = jax.tree.map(
                lambda total, x, at=rows: total.at[at].add(x, mode="drop"), own, found
            )
            if scored.size:
                cross += rights(group, entry_of, scored)
        return _OfClients(own, tuple(shared), known, cross)

    serving = of_groups(served, score, scored)
    out["known"], out["serving"] = serving.known, (serving.own, serving.shared)
    if scoring.num_scored:
        out["cross"] = serving.cross
    if _has_other_trained(algorithm):
        groups = algorithm.trained(state, cohort, data)
        trained = of_groups(groups, score.without_measures, scored[:0])
        out["trained"] = trained.own, trained.shared
    return out


class _OfClients(NamedTuple):
    """What groups of models give on their clients' own test rows.

    Attributes:
        own: Sums, leaves [R, ...], 0 where a client has no model of its own; None =
            all models are shared.
        shared: bool[R] for each model that clients share, whether it serves them.
        known: bool[R], the clients in the sample that a model serves.
        cross: int32[S], right answers of the scored clients' own models on the union.
    """

    own: Any
    shared: tuple[jax.Array, ...]
    known: jax.Array
    cross: jax.Array


class Adaptation(NamedTuple):
    """How the models that serve clients are adapted before they are measured.

    Attributes:
        fn: `(client, start, shared) -> Trained`, see `types.Algorithm.adapt`, where
            `client.model` is the model's architecture.
        state: The state, whose server and key it may use.
        members: The clients of the private rows, in their order, with the plan `adapt`.
    """

    fn: Callable[..., each_client.Trained]
    state: types.RoundState
    members: types.Cohort


def of_adapted(
    algorithm: types.Algorithm,
    state: types.RoundState,
    cohort: types.Cohort,
    data: types.Data,
    scoring: Scoring,
    how: execution.Execution,
    members: types.Cohort,
    sample: Any = (),
) -> dict[str, Any]:
    """The personalized models on their own test rows after an adaptation.

    Each starts from the model that serves the client, and trains on the client's train
    rows, those of clients that never take part included. Nothing of it is kept.

    Args:
        algorithm: With `adapt`.
        state, cohort, data, scoring, how, sample: As in `of_clients`.
        members: See `Adaptation`.

    Returns:
        As `of_clients`: `serving`, `known`.
    """
    part, ids = data.partition, members.client_id
    num_clients, num_rows = part.test.start.shape[0], ids.shape[0]
    is_sampled = _is_sampled(sample, num_clients)
    cohort = exchange.everywhere(cohort)
    groups = algorithm.serving_groups(state, cohort, data, num_rows)
    peers = _of_peers(algorithm, groups)
    ids, members = exchange.behind((ids, members), peers)
    data = data.replace(partition=part.replace(train=part.adapting, unseen=()))
    tables = part.test.start, part.test.count, is_sampled
    start, count, is_sampled = _of_ids(ids, *tables)
    own, known = None, jnp.zeros(num_rows, bool)
    for group in groups:
        number = exchange.behind(_numbers(group, num_rows), peers)
        measured = (number > 0) & is_sampled
        known = known | measured
        entries = jnp.maximum(number - 1, 0)
        if group.own is None or group.is_by_row:
            entries = jnp.arange(num_rows)
        plan = members.plans["adapt"]
        steps = jnp.where(measured & (count > 0), plan.num_steps, 0)
        mine = members.replace(plans={"adapt": plan.replace(num_steps=steps)})
        tests = _Tests(entries, start, jnp.where(measured, count, 0))
        score, batch = scoring.score.without_measures, scoring.own_batch_size
        adaptation = Adaptation(algorithm.adapt, state, mine)
        found = _each_entry(group, tests, data, batch, how, score, adaptation)
        own = found if own is None else jax.tree.map(jnp.add, own, found)
    return {"serving": (own, ()), "known": known}


def _is_sampled(sample: Any, num_clients: int) -> jax.Array:
    """bool[K]: the sample, where () stands for all clients."""
    return sample if len(sample) else jnp.ones(num_clients, bool)


def _of_ids(ids: jax.Array, *tables: jax.Array) -> list[jax.Array]:
    """Entries [R] of tables [K] for clients int32[R], 0 where it is none."""
    return [jnp.take(one, ids, mode="fill", fill_value=0) for one in tables]


def _of_peers(algorithm: types.Algorithm, groups: tuple[types.Serving, ...]) -> Any:
    """The models that clients mixed with their peers', which all else waits for.

    On a CPU nothing else may communicate while the rows of peers travel.
    """
    return [one.own for one in groups if algorithm.peers and not one.is_by_row]


def _scored(
    cohort: types.Cohort | None,
    ids: jax.Array,
    places: jax.Array,
    is_sampled: jax.Array,
    num_clients: int,
) -> tuple[jax.Array, jax.Array]:
    """(int32[S] private rows, int32[S] ids) of the scored clients, R and K = none.

    They are the clients of the cohort, or those `ids` int32[R] of all rows without one,
    as far as they are in the sample, bool[R]. `places` is 0 to R - 1.
    """
    num_rows = ids.shape[0]
    rows, client = places, ids
    if cohort is not None:
        client = jnp.where(cohort.row_mask, cohort.client_id, num_clients)
        row_of = jnp.full(num_clients, num_rows, jnp.int32)
        row_of = row_of.at[ids].set(places, mode="drop")
        rows = jnp.take(row_of, client, mode="fill", fill_value=num_rows)
    hit = jnp.take(is_sampled, rows, mode="fill", fill_value=False)
    return jnp.where(hit, rows, num_rows), jnp.where(hit, client, num_clients)


def _places(
    is_wanted: jax.Array, group: types.Serving, how: execution.Execution, size: int
) -> jax.Array:
    """int32[A]: the wanted of bool[R] rows, at most `size`, R where there is none.

    Where devices share the group's rows out, each has as many places, at most `size`,
    of which its wanted rows come first.
    """
    num_rows, devices = is_wanted.shape[0], how.num_devices
    if not (how.shares_rows and group.is_by_row):
        return jnp.nonzero(is_wanted, size=size, fill_value=num_rows)[0]
    by_device = is_wanted.reshape(devices, -1)
    place = jnp.argsort(~by_device, axis=1, stable=True)[:, :size]
    slot = place + num_rows // devices * jnp.arange(devices)[:, None]
    wanted = jnp.take_along_axis(by_device, place, 1)
    return jnp.where(wanted, slot, num_rows).reshape(-1)


def _numbers(group: types.Serving, num_rows: int) -> jax.Array:
    """int32[num_rows]: each client's entry in a group, counted from 1; 0 = none.

    Counted from 0 it may equal the index, and a TPU's compiler aborts where one value
    is the index and the update of a scatter.
    """
    served_id = jnp.where(group.mask, group.client_id, num_rows)
    numbers = 1 + jnp.arange(served_id.shape[0], dtype=jnp.int32)
    return jnp.zeros(num_rows, jnp.int32).at[served_id].set(numbers, mode="drop")


class _Tests(NamedTuple):
    """Models and the test rows that measure each.

    Attributes:
        entry: int32[A], rows of a group's `own`.
        start, count: int32[A], its test rows. A count of 0 costs nothing.
    """

    entry: jax.Array
    start: jax.Array
    count: jax.Array


def _each_entry(
    group: types.Serving,
    tests: _Tests,
    data: types.Data,
    batch_size: int,
    how: execution.Execution,
    score: scores.Score,
    adaptation: Adaptation | None = None,
) -> Any:
    """The sums [A] of some of a group's models, on test rows for each.

    Models that do not fill whole chunks are padded. If private rows of a group are
    shared out, each device has equally many of these entries, in the order of the
    devices. `adaptation` trains each model before it is measured.
    """
    size, own, parts, first = tests.entry.shape[0], group.own, 1, 0
    if stays := how.shares_rows and group.is_by_row:
        parts = how.num_devices
        own = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), own)
        first = group.mask.shape[0] // parts * jnp.arange(parts)[:, None]
    short = (execution.padded_size(size, how) - size) // parts

    # Each device counts entries from the first that it has.
    entries = (tests.entry.reshape(parts, -1) - first).reshape(-1)

    def padded(leaf: jax.Array) -> jax.Array:
        return jnp.pad(leaf.reshape(parts, -1), ((0, 0), (0, short))).reshape(-1)

    def one(row: Any, given: Any, bound: jax.Array, local: Any) -> Any:
        entry, start, count, member = row
        data, own, shared, server, most = given
        local, position = local
        # The model is made only here, so that they never all exist at once.
        mine = tiled.take(local if stays else own, entry)
        row = () if group.own is None else mine
        mine = group.replace(shared=shared).variables(mine)
        if adaptation is not None:
            client = each_client.Client(
                id=member.client_id,
                level=member.level,
                own=row,
                opt_state=(),
                plan=member.plans["adapt"].joined(position),
                bound=bound,
                data=data,
                key=rng.stream(server.key, "engine.adapt"),
                round=server.round,
                model=group.model,
            )
            mine = adaptation.fn(client, mine, server.server).variables
            bound = most

        def batch(index: jax.Array) -> Any:
            offset = index * batch_size + jnp.arange(batch_size)
            rows = jnp.take(data.partition.test.row, start + offset, mode="clip")
            rows = jnp.where(offset < count, rows, -1)
            found = _answers(group.model, mine, data, rows, score)
            return score.of_batch(found, index * batch_size)

        return _summed(batch, bound)

    rows = padded(entries), padded(tests.start), padded(tests.count)
    num_steps = -(-rows[2] // batch_size)
    member = position = server = most = ()
    if adaptation is not None:
        most = num_steps.max()
        member, server = adaptation.members, adaptation.state.with_private(((), ()))
        steps, position = member.plans["adapt"].split()
        member = member.replace(plans={"adapt": steps}, peers=(), peer_mask=())
        member = jax.tree.map(padded, member)
        num_steps = member.plans["adapt"].num_steps
    given = (data, () if stays else own, group.shared, server, most)
    local = (own if stays else (), position)
    rows = (*rows, member)
    over = each_client.over_clients([one], how)

    def without_padding(leaf: jax.Array) -> jax.Array:
        sums = leaf.shape[1:]
        return leaf.reshape(parts, -1, *sums)[:, : size // parts].reshape(-1, *sums)

    return jax.tree.map(without_padding, over(rows, given, num_steps, local=local))


def _summed(of_batch: Callable[[Any], Any], bound: jax.Array) -> Any:
    """The sum of the pytrees `of_batch(index)` of `bound` batches."""

    def step(index: jax.Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, of_batch(index))

    nothing = stacked.zeros(jax.eval_shape(of_batch, 0))
    return jax.lax.fori_loop(0, bound, step, nothing)


def _sums_of_block(
    found: tuple[Any, Sequence[np.ndarray]],
    shared: Sequence[tuple[Any, Any]],
    clients: np.ndarray,
    real: np.ndarray,
) -> Iterator[tuple[np.ndarray, Any]]:
    """(clients int[n], their sums, leaves [n, ...]) of each kind of model in a block.

    `found` and `shared` are the results of both programs, and `clients` int[C] those
    of the rows in `real` bool[R].
    """
    own, serves = found
    if own is not None:
        yield clients, stacked.at(own, real)
    for is_served, (sums, _) in zip(serves, shared, strict=True):
        mine = clients[is_served[real]]
        yield mine, stacked.at(sums, mine)


def _cross_of_block(
    found: dict[str, Any], shared: Sequence[tuple[Any, Any]], slot: np.ndarray
) -> np.ndarray:
    """int[S]: right answers on the union of a block's scored clients, own or shared.

    `slot` int[K + 1] is the row of each of the block's clients.
    """
    scored, total = found["scored"], found["cross"]
    for is_served, (_, right) in zip(found["serving"][1], shared, strict=True):
        hit = is_served[slot[scored]] & (scored < len(slot) - 1)
        total = total + np.where(hit, right, 0)
    return total


def joined(
    shared: dict[str, Any],
    blocks: Iterable[tuple[np.ndarray, dict[str, Any]]],
    num_clients: int,
    has_trained: bool = False,
) -> dict[str, Any]:
    """Combines the results of both programs for one variant, for `Classes.metrics`.

    Args:
        shared: The result of `of_shared`, as numpy.
        blocks: For disjoint sets of the K clients, ids int[R] and results of
            `of_clients`.
        has_trained: Whether the algorithm defines the models that training left.

    Returns:
        `server`, `server_loss`, `differ`, `measured` and `train` of `shared`; `own` and
        `trained`, sums over each client's own test rows, leaves [K, ...], 0 where
        `known` bool[K] is False (the client is not in the sample, or no model serves
        it); `scored` int[S], the scored clients, K = none, and `cross` int[S], the
        right answers of their models on the union.
    """
    kinds = {"own": "serving", "trained": "trained"}
    out = {key: value for key, value in shared.items() if key not in kinds.values()}
    out["known"] = np.zeros(num_clients, bool)
    scored, cross = [], []
    for ids, found in blocks:
        real = ids < num_clients
        clients = ids[real]
        out["known"][clients] = found["known"][real]
        for name, kind in kinds.items():
            if kind not in found:
                continue
            for mine, sums in _sums_of_block(found[kind], shared[kind], clients, real):
                if name not in out:
                    out[name] = jax.tree.map(
                        lambda x: np.zeros((num_clients, *x.shape[1:]), x.dtype), sums
                    )
                pairs = zip(*map(jax.tree.leaves, (out[name], sums)), strict=True)
                for total, x in pairs:
                    total[mine] += x
        if "scored" in found:
            scored.append(found["scored"])
            slot = np.zeros(num_clients + 1, int)
            slot[clients] = np.flatnonzero(real)
            cross.append(_cross_of_block(found, shared["serving"], slot))
    if has_trained and "own" in out:
        out.setdefault("trained", out["own"])
    if scored:
        out["scored"], out["cross"] = np.concatenate(scored), np.concatenate(cross)
    return out
