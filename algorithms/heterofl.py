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

    w_k <- w_k - eta grad CE(f(x; w_k), y),  w_k = W_g[1..r_k]
    w_k <- w_k - eta sum_(r in 1..r_k) grad CE(f(x; w_k[1..r]), y)  (SHeteroFL)
    W_g[e] <- mean_(k in S_e) w_k[e]

| paper | here |
|---|---|
| w_k, r_k | the slice of a client, its width |
| f, eta | the model of a width, `--client_lr` |
| W_g[e], S_e | an entry, the clients that hold it |
| r: width | `cohort.level` of as many levels as `--level_mix` has parts |
| W_g: global model | `state.server`, of width `--max_level` |
| Scaler | `--scaler` |
| masked cross-entropy | `--masked_cross_entropy` |
| sBN | `--static_norm`, `--static_examples` |
| SHeteroFL (DepthFL, Table 3) | `--all_widths` |

Differs from the paper: entries are averaged without weights, and the optimizer is
DepthFL's. The norm that follows makes the Scaler's division all but undone, and with
`--exclusive` DepthFL's authors leave it out (`--noscaler`). Statistics
are the mean over batches of unaugmented train rows (without a last one of one row) in
the order of the clients, so that a batch has rows of few clients, not
DepthFL's moving average over augmented ones (`--static_norm=ema`: that, with
`--augment`). Width n/L is reported as `exit<n>_accuracy`, as DepthFL's exits are.
"""

import dataclasses

import jax
import jax.numpy as jnp

import fedjax_pfl as fp
from fedjax_pfl import (
    boundary,
    levels,
    local_training,
    losses,
    rng,
    shapes,
    stacked,
    types,
    widths,
)


@dataclasses.dataclass(frozen=True)
class HParams(levels.Levels, fp.LocalTraining):
    all_widths: bool = fp.option(
        False, "train on the sum of the losses of every width that a client holds"
    )
    scaler: bool = fp.option(
        True, "divide outputs of convolutions by the relative width in training"
    )
    masked_cross_entropy: bool = fp.option(
        False,
        "set logits of classes that a client does not have to 0 in its loss, and leave "
        "these out of the mean",
    )
    static_norm: str = fp.option(
        "average",
        "statistics of norms in tests, over batches of the clients' train rows: their "
        "mean, or a moving average",
        choices=("average", "ema"),
    )
    static_examples: int = fp.option(
        0, "train rows that these statistics are taken from, 0 = all", minimum=0
    )


def make(hparams: HParams, task: fp.Task) -> fp.Algorithm:
    """Makes HeteroFL; raises ValueError if the model lacks narrower forms or levels."""
    local_training.refuse_moments(task.tests_trained)
    nets, count = widths.models(hparams, task.model), len(levels.mix(hparams))
    shape_at = [shapes.variables(net, task.example_shape) for net in nets]
    params_at = [one.params for one in shape_at]
    slices = widths.submodel(hparams, shape_at)
    ends_in_one = boundary.ends_in_one_layer(params_at[-1], task.num_classes)
    if hparams.masked_cross_entropy and not ends_in_one:
        raise ValueError(
            f"--masked_cross_entropy: --model={task.model.name} ends in "
            f"{task.model.stage_names[-1]}, which is more than one dense layer, whose "
            "columns would be those of the classes; make that layer a stage"
        )

    def classes(state: fp.RoundState, cohort: fp.Cohort, data: fp.Data):
        """bool[C, Y]: the classes that each client has."""
        present = data.label_counts(task.num_classes) > 0
        return stacked.take(present, cohort.client_id)

    def held(cohort: fp.Cohort, present: jax.Array) -> fp.Variables:
        """The entries of each client's slice, and of the classes that it has."""
        mask = slices.held(cohort, present)
        if not hparams.masked_cross_entropy:
            return mask

        def of_classes(entries: jax.Array) -> jax.Array:
            """Entries bool[C, ..., Y] of the last layer that belong to own classes."""
            middle = (1,) * (entries.ndim - 2)
            return entries & present.reshape(len(present), *middle, -1)

        *hidden, last = mask.params
        return mask._replace(params=(*hidden, jax.tree.map(of_classes, last)))

    def client_update(client: fp.Client, start: fp.Variables, level: int):
        """Trains the slice of the client's level, or every width that it holds."""

        def loss_fn(params, stats, batch):
            def loss_of(number: int, width: int | jax.Array) -> jax.Array:
                """The loss of a level's model, scaled as for a client of `width`."""
                own = widths.narrowed(fp.Variables(params, stats), shape_at[number - 1])
                scaler = width / count if hparams.scaler else 1.0
                net = widths.narrower(task.model, number / count, scaler)
                logits, _ = net.forward(*own, batch.image, **batch.mode)
                if hparams.masked_cross_entropy:
                    logits = jnp.where(client.own, logits, 0)
                return losses.cross_entropy(logits, batch.label, batch.mask)

            if not hparams.all_widths:
                # A chunk may run a larger slice than the client's own.
                return loss_of(level, client.level), stats
            each = [loss_of(n, n) for n in range(1, level + 1)]
            reached = jnp.arange(1, level + 1) <= client.level
            return jnp.where(reached, jnp.stack(each), 0).sum(), stats

        mine = widths.own_entries(params_at, client, level)
        objective = fp.Objective(loss_fn, mine, held=False)
        return fp.train(hparams, (objective,), start, client)

    def server(state: fp.RoundState, data: fp.Data) -> dict:
        """Every width with its statistics, the widest first."""
        key, found = rng.stream(state.key, "static_norm", state.round), {}
        for number, net in reversed(list(enumerate(nets, start=1))):
            own = widths.narrowed(state.server, shape_at[number - 1])
            stats = _static_stats(hparams, net, own, data, key)
            found[f"exit{number}"] = net, own._replace(stats=stats)
        return {"global": found[f"exit{len(nets)}"]} | found

    # The loss of all widths takes each at its own size.
    among_zeros = slices.is_among_zeros and not hparams.all_widths
    part = slices._replace(held=held, is_among_zeros=among_zeros)
    made = levels.make(
        hparams, task, nets[-1], part, client_update, own=classes, server=server
    )
    if jax.tree.leaves(shape_at[-1].stats):
        return made
    names, reason = ("static_norm", "static_examples"), "on a model without batch norm"
    return made._replace(unused=dict.fromkeys(names, reason))


def _static_stats(
    hparams: HParams, net: types.Model, own: fp.Variables, data: fp.Data, key: jax.Array
) -> types.Stats:
    """sBN: batch statistics over the clients' train rows, in train mode.

    `own` are the variables of `net`. The moving average draws augmentations by `key`.
    """
    rows, size = levels.eligible_rows(hparams, data.partition.train)
    if hparams.static_examples:
        # Evenly spread, because rows are in the clients' order.
        wanted = min(hparams.static_examples, len(rows))
        spread = jnp.arange(wanted) * (size / jnp.minimum(size, wanted))
        size = jnp.minimum(size, wanted)
        rows = rows[spread.astype(jnp.int32)]
    most = shapes.capped(hparams.batch_size, len(rows))
    num_batches = -(-size // most)
    if hparams.static_norm == "average":
        # A norm of single values has no statistics in a last batch of one row.
        num_batches -= (size > 1) & (size % most == 1)
    batches = stacked.in_batches(rows, most)
    nothing = jax.tree.map(jnp.zeros_like, own.stats)

    def statistics(
        before: types.Stats, image: jax.Array, rows: jax.Array
    ) -> types.Stats:
        mode = {"sample_mask": rows >= 0, "train": True}
        return net.forward(own.params, before, image, **mode)[1]

    def of_batch(before: types.Stats, index: jax.Array) -> types.Stats:
        image, _ = data.gather(batches[index])
        return statistics(before, image, batches[index])

    def moving_average(index: jax.Array, stats: types.Stats) -> types.Stats:
        place = index * most + jnp.arange(most)
        image, *_ = data.train_batch(batches[index], place, key)
        return statistics(stats, image, batches[index])

    if hparams.static_norm == "ema":
        return jax.lax.fori_loop(0, num_batches, moving_average, own.stats)

    # The part of a batch in new statistics is 1 less their slope in the old.
    ones = jax.tree.map(jnp.ones_like, nothing)
    _, kept = jax.jvp(lambda old: of_batch(old, 0), (nothing,), (ones,))
    # Without digits that are noise. What does not move stays 0.
    moved = jax.tree.map(lambda one: jnp.maximum(jnp.round(1 - one, 6), 1e-6), kept)

    def average(index: jax.Array, stats: types.Stats) -> types.Stats:
        # From nothing, a batch's statistics come back times the momentum.
        new = of_batch(nothing, index)
        return jax.tree.map(
            lambda s, n, m: s + n / (m * num_batches), stats, new, moved
        )

    return jax.lax.fori_loop(0, num_batches, average, nothing)
