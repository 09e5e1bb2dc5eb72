"""HeteroFL: clients hold leading slices of a wide model, the server averages entries.

Diao, Ding, Tarokh: "HeteroFL: Computation and Communication Efficient Federated
Learning for Heterogeneous Clients", ICLR 2021, https://arxiv.org/abs/2010.01264, with
the settings of DepthFL's authors (https://openreview.net/forum?id=pf8RIZTMU58).

* The server sends each client of the round the first channels of every hidden layer,
  n/L of them to a client of level n.
* A client trains this narrower model. Norms use their batch's statistics alone.
* The server takes the mean of each entry over the clients that hold it.
* Static batch norm: before a test the server computes the statistics of each width on
  the data of the clients that take part.
* SHeteroFL: a client trains every smaller width too, each on the same batch.

| paper | here |
|---|---|
| r: width | `cohort.level` of as many levels as `--level_mix` has parts |
| W_g: global model | `state.server`, of width `--max_level` |
| Scaler | `--scaler` |
| masked cross-entropy | `--masked_cross_entropy` |
| sBN | `--static_norm`, `--static_examples` |
| SHeteroFL (DepthFL, Table 3) | `--all_widths` |

Differs from the paper: entries are averaged without weights, and the optimizer is
DepthFL's. The norm that follows makes the Scaler's division all but undone. Statistics
are the mean over batches of unaugmented train rows, not DepthFL's moving average over
augmented ones (`--static_norm=ema`: that, with `--augment`). Width n/L is reported as
`exit<n>_accuracy`, as DepthFL's exits are.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pfl import (
    boundary,
    each_client,
    levels,
    local_training,
    losses,
    optimizer,
    options,
    rng,
    shapes,
    stacked,
    traffic,
    types,
)

option = options.option


@dataclasses.dataclass(frozen=True)
class HParams(levels.Levels, local_training.LocalTraining):
    """HeteroFL's options."""

    all_widths: bool = option(
        False, "train on the sum of the losses of every width that a client holds"
    )
    scaler: bool = option(
        True, "divide outputs of convolutions by the relative width in training"
    )
    masked_cross_entropy: bool = option(
        False,
        "leave classes that a client does not have out of its loss and of the mean",
    )
    static_norm: str = option(
        "average",
        "statistics of norms in tests, over batches of the clients' train rows: their "
        "mean, or a moving average",
        choices=("average", "ema"),
    )
    static_examples: int = option(
        0, "train rows that these statistics are taken from, 0 = all", minimum=0
    )


def narrowed(tree: Any, like: Any) -> Any:
    """The leading slices of leaves, in the shapes of `like`."""
    return jax.tree.map(
        lambda leaf, s: leaf[tuple(slice(n) for n in s.shape)], tree, like
    )


def widened(tree: Any, full: Any) -> Any:
    """`full` with the leading slices of its leaves replaced by those of `tree`."""
    return jax.tree.map(
        lambda leaf, f: f.at[tuple(slice(n) for n in leaf.shape)].set(leaf), tree, full
    )


def covered(params: list[Any], level: jax.Array) -> Any:
    """Which entries of the widest parameters a client of a level int32[] holds, bool.

    Args:
        params: Shape structs of every level's parameters, the widest last.
        level: 1..L.
    """

    def inside(*by_level: jax.ShapeDtypeStruct) -> jax.Array:
        sides = jnp.array([one.shape for one in by_level])[level - 1]
        full = by_level[-1].shape
        places = (
            jax.lax.broadcasted_iota(jnp.int32, full, i) for i in range(len(full))
        )
        pairs = zip(places, sides, strict=True)
        return functools.reduce(jnp.logical_and, (p < side for p, side in pairs))

    return jax.tree.map(inside, *params)


def make(hparams: HParams, task: types.Task) -> types.Algorithm:
    """HeteroFL as pure functions.

    Raises:
        ValueError: the model has no narrower form, or there is no such level.
    """
    nets = [_net(hparams, task, n + 1) for n in range(levels.top(hparams))]
    shape_at = [shapes.variables(net, task.example_shape) for net in nets]
    params_at = [one.params for one in shape_at]
    model, num_levels = nets[-1], len(nets)

    def part_at(level: int) -> tuple:
        """Shapes of a level's parameters, statistics and persistent optimizer state."""
        params, stats = shape_at[level - 1]
        if hparams.optimizer_state == "reset":
            return params, stats, ()
        return params, stats, jax.eval_shape(lambda: optimizer.fresh(hparams, params))

    def own_entries(client: each_client.Client, level: int) -> types.Params:
        """The client's own entries within the slice that its chunk of clients runs."""
        return narrowed(covered(params_at, client.level), params_at[level - 1])

    def cut(whole: tuple, client: each_client.Client, level: int) -> tuple:
        """The slice of the chunk's level, 0 beyond the client's own."""
        params, *rest = narrowed(whole, part_at(level))
        zeros = jax.tree.map(jnp.zeros_like, params)
        return boundary.select(own_entries(client, level), params, zeros), *rest

    def paste(part: tuple, whole: tuple, client: each_client.Client, level: int):
        return widened(part, whole)

    def held(cohort: types.Cohort, present: jax.Array) -> types.Variables:
        """The entries of each client's slice. Statistics are not averaged."""
        mask = jax.vmap(functools.partial(covered, params_at))(cohort.level)
        if hparams.masked_cross_entropy:
            last = jax.tree.map(lambda m: of_classes(m, present), mask[-1])
            mask = (*mask[:-1], last)
        none = jnp.zeros_like(cohort.row_mask)
        return types.Variables(mask, (none,) * len(mask))

    def of_classes(mask: jax.Array, present: jax.Array) -> jax.Array:
        """The last layer's entries [C, ..., Y] of the classes that a client has."""
        middle = (1,) * (mask.ndim - 2)
        return mask & present.reshape(len(present), *middle, -1)

    def classes(state: types.RoundState, cohort: types.Cohort, data: types.Data):
        """bool[C, Y]: the classes that each client has."""
        present = data.label_counts(task.num_classes) > 0
        return stacked.take(present, cohort.client_id)

    def client_update(client: each_client.Client, start: types.Variables, level: int):
        """Trains the slice of the client's level, or every width that it holds."""

        def loss_of(number: int, width, params, stats, batch):
            own = narrowed(types.Variables(params, stats), shape_at[number - 1])
            net = _net(hparams, task, number, width if hparams.scaler else None)
            logits, _ = net.forward(*own, batch.image, **batch.mode)
            if hparams.masked_cross_entropy:
                logits = jnp.where(client.own, logits, 0)
            return losses.cross_entropy(logits, batch.label, batch.mask)

        def loss_fn(params, stats, batch):
            if not hparams.all_widths:
                # A chunk may run a larger slice than the client's own.
                return loss_of(level, client.level, params, stats, batch), stats
            each = [loss_of(n, n, params, stats, batch) for n in range(1, level + 1)]
            reached = jnp.arange(1, level + 1) <= client.level
            return jnp.where(reached, jnp.stack(each), 0).sum(), stats

        mine = own_entries(client, level)
        objective = local_training.Objective(loss_fn, mine, held=False)
        return local_training.train(hparams, (objective,), start, client)

    def server(state: types.RoundState, data: types.Data):
        """Every width with its statistics, the widest first."""
        found = {}
        for number in range(num_levels, 0, -1):
            own = narrowed(state.server, shape_at[number - 1])
            key = rng.stream(state.key, "static_norm", state.round)
            stats = static_stats(nets[number - 1], own, data, key)
            found[f"exit{number}"] = nets[number - 1], own._replace(stats=stats)
        return {"global": found[f"exit{num_levels}"]} | found

    def static_stats(
        net: types.Model, own: types.Variables, data: types.Data, key: jax.Array
    ):
        """sBN: batch statistics over the clients' train rows, in train mode."""
        rows, size = levels.eligible_rows(hparams, data.partition.train)
        if hparams.static_examples:
            # Evenly spread, because rows are in the clients' order.
            wanted = min(hparams.static_examples, len(rows))
            spread = jnp.arange(wanted) * (size / jnp.minimum(size, wanted))
            size = jnp.minimum(size, wanted)
            rows = rows[spread.astype(jnp.int32)]
        count = -(-size // hparams.batch_size)
        batches = stacked.in_batches(rows, hparams.batch_size)
        is_average = hparams.static_norm == "average"
        nothing = jax.tree.map(jnp.zeros_like, own.stats)

        def step(index, stats):
            if is_average:
                image, _ = data.gather(batches[index])
            else:
                place = index * hparams.batch_size + jnp.arange(hparams.batch_size)
                image, *_ = data.train_batch(batches[index], place, key)
            mode = {"sample_mask": batches[index] >= 0, "train": True}
            before = nothing if is_average else stats
            _, new = net.forward(own.params, before, image, **mode)
            if not is_average:
                return new
            # From nothing, a batch's statistics come back times the momentum.
            share = types.STATS_MOMENTUM * count
            return jax.tree.map(lambda s, n: s + n / share, stats, new)

        first = nothing if is_average else own.stats
        return jax.lax.fori_loop(0, count, step, first)

    names = zip(_names(hparams), params_at, strict=True)
    pairs = [traffic.both_ways(name, shapes.tree_bytes(size)) for name, size in names]
    kinds = tuple(kind for pair in pairs for kind in pair)

    def sent(cohort: types.Cohort) -> dict[str, jax.Array]:
        levels_of = enumerate(pairs, start=1)
        return {kind.name: cohort.level == n for n, pair in levels_of for kind in pair}

    part = levels.Submodel(cut, paste, held, kinds, sent, num_levels)
    return levels.make(
        hparams, task, model, part, client_update, own=classes, server=server
    )


def _names(hparams: HParams) -> list[str]:
    """The names of the levels in messages: `width 1/4`, ..."""
    count = len(levels.mix(hparams))
    return [f"width {n}/{count}" for n in range(1, levels.top(hparams) + 1)]


def _net(
    hparams: HParams, task: types.Task, number: int, divisor: Any = None
) -> types.Model:
    """The model of a level. In training it divides by the width `divisor`, if given.

    Raises:
        ValueError: the model has no narrower form.
    """
    model, count = task.model, len(levels.mix(hparams))
    if model.at_width is None:
        raise ValueError(
            f"--model={model.name} flattens maps or has exits, so no narrower form "
            f"is a slice of it; take {levels.WITH_WIDTHS}"
        )
    scaler = 1.0 if divisor is None else divisor / count
    return model.at_width(number / count, scaler)
