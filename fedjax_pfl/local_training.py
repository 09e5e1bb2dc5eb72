"""The local training loop: one client's steps, masked on the new parameters."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pfl import (
    boundary,
    context,
    each_client,
    losses,
    optimizer,
    options,
    shapes,
    stacked,
    types,
)

option = options.option
TEST_BATCH = 64  # test rows of one pass, where a round tests what it trained


@dataclasses.dataclass(frozen=True)
class LocalTraining:
    """Options of every algorithm that trains clients with minibatches."""

    local_epochs: int = option(2, "epochs of local training per round", minimum=1)
    batch_size: int = option(
        20, "examples per local step, or of each part of a step", minimum=1
    )
    examples_per_round: int = option(
        0,
        "train on at most this many of a client's examples in an epoch, drawn anew in "
        "each, 0 = all",
        minimum=0,
    )
    drop_last: bool = option(
        False,
        "leave out the rows of an epoch that do not fill a batch, as PyTorch's loaders "
        "may; a client with fewer rows than a step takes does none",
    )
    client_optimizer: str = option(
        "sgd", "optimizer of the local steps", choices=optimizer.NAMES
    )
    client_lr: float = option(0.05, "learning rate of the clients", minimum=0)
    client_lr_decay: float = option(
        1.0, "factor on the clients' learning rate after each round", above=0, maximum=1
    )
    client_momentum: float = option(
        0.0, "momentum of sgd, rmsprop and lars", minimum=0, maximum=1, zero_is_off=True
    )
    weight_decay: float = option(
        0.0,
        "L2 term added to the gradient; decoupled in adamw, lion and their like",
        minimum=0,
        zero_is_off=True,
    )
    clip_norm: float = option(
        0.0,
        "clip the gradient of a local step at this global norm, 0 = never",
        minimum=0,
        zero_is_off=True,
    )
    client_optimizer_options: str = option(
        "", "other arguments of the optimizer, such as b1=0.8,eps=1e-6"
    )
    optimizer_state: str = option(
        "reset",
        "a client's optimizer state between its rounds",
        choices=("reset", "persist"),
    )


@struct.dataclass
class Batch:
    """The examples of one local step.

    `image` f32[B, ...], `label` int32[B], `mask` bool[B], `position` int32[B] (index
    among the client's rows, for tables aligned by sample), `step` and `epoch` int32[],
    and a `key` for this step. For a text `label` is int32[B, T], and `chosen` bool[B,
    T] has the positions that count in the loss, None = all.
    """

    image: jax.Array
    label: jax.Array
    mask: jax.Array
    position: jax.Array
    step: jax.Array
    epoch: jax.Array
    key: jax.Array
    chosen: jax.Array | None = None

    @property
    def mode(self) -> dict[str, Any]:
        """Arguments of a model's forward pass in this step."""
        return {"sample_mask": self.mask, "train": True, "key": self.key}


# The position of the examples that fill batches of twice the length, 0 = as they are
_FILL = contextvars.ContextVar("fill", default=0)


def filled_from(position: int) -> contextlib.AbstractContextManager[None]:
    """Fills batches that are traced inside with other examples, and twice as many.

    Nothing may depend on their masked examples, which `launch.contract` checks.
    """
    return context.having(_FILL, position)


LossFn = Callable[[types.Params, types.Stats, Batch], tuple[jax.Array, types.Stats]]


class Objective(NamedTuple):
    """One optimizer step of a local step.

    Attributes:
        loss_fn: `(params, stats, batch) -> (loss f32[], stats)`, a mean over the real
            examples of the batch.
        trainable: The parts that may change: bool[L], a prefix pytree of the parameters
            with bool leaves (one bool for all), or a function of the batch that returns
            one of these (phases by `batch.epoch`); None = all.
        held: Where statistics move, a prefix pytree of them or bool[L]; None = in
            stages with any trainable part. With two objectives for a batch they move
            twice, once in each that holds them.
        adjust: `(params, grads) -> grads`, before clipping, for FedDyn's pull, proximal
            terms and control variates. It does not change the loss.
        project: `params -> params`, on all of them, after a real step.
        measure: `grads -> pytree of scalars`, summed over the real steps. It gets the
            loss's own gradients, also of parameters that are not trainable.
    """

    loss_fn: LossFn
    trainable: Any = None
    held: Any = None
    adjust: Callable[[types.Params, types.Params], types.Params] | None = None
    project: Callable[[types.Params], types.Params] | None = None
    measure: Callable[[types.Params], Any] | None = None


def cross_entropy_loss(model: types.Model) -> LossFn:
    """The plain supervised loss: mean cross-entropy of a batch, in train mode."""

    def loss_fn(params, stats, batch):
        logits, stats = model.forward(params, stats, batch.image, **batch.mode)
        loss = losses.cross_entropy(logits, batch.label, batch.mask, batch.chosen)
        return loss, stats

    return loss_fn


def exits_loss(model: types.Model) -> LossFn:
    """The mean cross-entropy of a batch, summed over exits if there are any."""
    if not model.has_exits:
        return cross_entropy_loss(model)

    def loss_fn(params, stats, batch):
        exits, stats = model.forward(params, stats, batch.image, **batch.mode)
        which = batch.label, batch.mask, batch.chosen
        return sum(losses.cross_entropy(one, *which) for one in exits), stats

    return loss_fn


def adapted(hparams: LocalTraining) -> Callable[..., each_client.Trained]:
    """`types.Algorithm.adapt` of most methods: all layers, as a client trains alone."""

    def adapt(client: each_client.Client, start: types.Variables, shared: Any):
        return train(hparams, exits_loss(client.model), start, client)

    return adapt


def proximal(weight: Any, centre: types.Params) -> Callable[..., types.Params]:
    """An `Objective.adjust`: adds the gradient of weight / 2 ||params - centre||^2."""

    def adjust(params: types.Params, grads: types.Params) -> types.Params:
        return jax.tree.map(
            lambda g, new, old: g + weight * (new - old), grads, params, centre
        )

    return adjust


def plan(
    hparams: LocalTraining, name: str = "local", epochs: int = 0
) -> types.PlanSpec:
    """The step plan of `local_epochs` (or `epochs`) over a client's examples."""
    epochs = epochs or hparams.local_epochs
    rows = hparams.examples_per_round, hparams.drop_last
    return types.PlanSpec(name, epochs, hparams.batch_size, *rows)


def sum_over_rows(
    fn: Callable[[Batch], Any],
    data: types.Data,
    client_id: jax.Array,
    batch_size: int,
    key: jax.Array,
) -> Any:
    """The sum of `fn(batch)` over all train rows of a client int32[], in their order.

    The rows of clients that never train are those on which they adapt. The last batch
    is short, and a client without rows, or K, gives zeros. `key` is that of the
    batches' keys. Words are hidden at random as in a training step, and images are as
    they are.
    """
    rows, data = data.partition.adapting, data.replace(augment="none")
    count = jnp.take(rows.count, client_id, mode="fill", fill_value=0)
    row_at = rows.of(client_id)

    def part(index: jax.Array) -> Any:
        place = index * batch_size + jnp.arange(batch_size)
        own, mask = jax.random.fold_in(key, index), place < count
        if fill := _FILL.get():
            place = jnp.append(jnp.where(mask, place, fill), jnp.full_like(place, fill))
            mask = jnp.append(mask, jnp.zeros_like(mask))
        image, label, chosen = data.train_batch(row_at(place), place, own)
        here = mask, place, index, jnp.zeros_like(index), own, chosen
        return fn(Batch(image, label, *here))

    def step(index: jax.Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, part(index))

    zeros = stacked.zeros(jax.eval_shape(part, jnp.zeros((), jnp.int32)))
    return jax.lax.fori_loop(0, -(-count // batch_size), step, zeros)


def _loss(
    loss_fn: LossFn, params: types.Params, stats: types.Stats, batch: Batch
) -> tuple[jax.Array, types.Stats]:
    """The loss and statistics; a ValueError if a loss of one's own returns others."""
    out = loss_fn(params, stats, batch)
    kind = ""
    if not isinstance(out, tuple) or len(out) != 2:
        kind = "an array alone" if isinstance(out, jax.Array) else type(out).__name__
    elif jnp.shape(out[0]) != ():
        kind = f"one of shape {list(jnp.shape(out[0]))}"
    elif not jnp.issubdtype(jnp.result_type(out[0]), jnp.floating):
        kind = f"one of {jnp.result_type(out[0])}"
    elif jax.tree.structure(out[1]) != jax.tree.structure(stats):
        kind = f"{type(out[1]).__name__} of another form in the place of statistics"
    if kind:
        raise ValueError(
            f"a loss returned {kind}; expected (loss f32[], stats), a mean over the "
            "rows in batch.mask and the model's statistics"
        )
    return out


def _checked(tree: Any, params: types.Params, name: str) -> types.Params:
    """What a function of an objective returned; a ValueError if it is no parameters."""
    tree = tuple(tree) if isinstance(tree, list) else tree
    if jax.tree.structure(tree) != jax.tree.structure(params):
        raise ValueError(
            f"Objective({name}=) returned {type(tree).__name__} of another form than "
            "the parameters; expected a tree like these"
        )
    return tree


def _masks(
    objective: Objective, batch: Batch, real: jax.Array, num_stages: int
) -> tuple[Any, Any]:
    """Where an objective trains and where it moves statistics, as prefix pytrees.

    Both are False in a step without a real example.
    """

    def as_prefix(mask: Any) -> Any:
        mask = tuple(mask) if isinstance(mask, list) else mask
        mask = jax.tree.map(lambda part: jnp.asarray(part) & real, mask)
        if not isinstance(mask, jax.Array):
            return mask
        return boundary.by_stage(mask) if mask.ndim else (mask,) * num_stages

    mask = objective.trainable
    mask = mask(batch) if callable(mask) else mask
    mask = as_prefix(jnp.ones(num_stages, bool) if mask is None else mask)
    if len(mask) != num_stages:
        raise ValueError(
            f"Objective(trainable=) has {len(mask)} parts, the model {num_stages} "
            "stages; give one bool for each, or one for all"
        )
    if objective.held is not None:
        return mask, as_prefix(objective.held)
    return mask, tuple(optimizer.any_of(part) for part in mask)


def _objective_step(
    objective: Objective,
    hparams: LocalTraining,
    tx: optax.GradientTransformation,
    carry: each_client.Trained,
    batch: Batch,
    real: jax.Array,
) -> tuple[each_client.Trained, jax.Array, Any]:
    """One optimizer step of an objective, which changes nothing unless `real` bool[].

    Returns (the carry with new parameters, statistics and optimizer state, the loss
    f32[], the scalars of `objective.measure`, () without it).
    """
    params, stats = carry.params, carry.stats
    loss_fn = functools.partial(_loss, objective.loss_fn)
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, new_stats), grads = gradient(params, stats, batch)
    measured = _measured(objective, grads)
    measured = jax.tree.map(lambda x: jnp.where(real, x, 0), measured)
    if objective.adjust is not None:
        grads = _checked(objective.adjust(params, grads), params, "adjust")
    trainable, held = _masks(objective, batch, real, len(params))
    grads = optimizer.clip(grads, hparams.clip_norm, trainable)
    new, opt_state = optimizer.apply_gradients(
        tx, grads, carry.opt_state, params, trainable
    )
    if objective.project is not None:
        projected = _checked(objective.project(new), new, "project")
        new = boundary.select(real, projected, new)
    stats = boundary.select(held, new_stats, stats)
    return carry.replace(params=new, stats=stats, opt_state=opt_state), loss, measured


def _measured(objective: Objective, grads: types.Params) -> Any:
    """What an objective measures of its gradients, () if it measures nothing."""
    return () if objective.measure is None else objective.measure(grads)


def train(
    hparams: LocalTraining,
    objectives: LossFn | Objective | Sequence[LossFn | Objective],
    start: types.Variables,
    client: each_client.Client,
    *,
    opt_state: tuple | None = None,
    tag: str | int = "engine.local",
) -> each_client.Trained:
    """Trains a model on a client's examples for the steps of its plan.

    Args:
        hparams: Optimizer, learning rate and its decay, clipping. Steps and batches are
            those of the client's plan, whatever `local_epochs` and `batch_size` say.
        objectives: Steps taken one after another on every batch, which share the
            optimizer state, or the only one; each is an `Objective` or its loss.
        start: The model before training.
        client: Its examples and its steps. Steps after the client's own change nothing.
        opt_state: One optimizer state per stage to begin with and to return; None = the
            client's persistent one, or a fresh one where none persists.
        tag: Stream of the steps' keys.

    Returns:
        The model after the last step, and what was measured; see `each_client.Trained`.

    Raises:
        ValueError: the optimizer state is that of another number of stages, or a
            function of an objective returns something of another form.

    Examples:
        >>> rows = types.ClientRows(jnp.arange(2), jnp.array([0]), jnp.array([2]))
        >>> parts = types.Partition(rows, rows, ())
        >>> data = types.Data(jnp.array([1.0, 3.0]), jnp.zeros(2, int), 0.0, 1.0, parts)
        >>> zero, one, key = jnp.int32(0), jnp.int32(1), jax.random.key(0)
        >>> plan = types.Plan(jnp.arange(2), zero, jnp.int32(2), one, batch_size=2)
        >>> client = each_client.Client(zero, one, (), (), plan, one, data, key, zero)
        >>> def loss_fn(params, stats, batch):
        ...     return ((params[0] - batch.image) ** 2 / 2).mean(), stats
        >>> start = types.Variables((jnp.zeros(()),), ({},))
        >>> float(train(LocalTraining(client_lr=0.5), loss_fn, start, client).params[0])
        1.0
    """
    if callable(objectives) or isinstance(objectives, Objective):
        objectives = (objectives,)
    objectives = tuple(Objective(one) if callable(one) else one for one in objectives)
    data = client.data
    tx = optimizer.make(hparams, optimizer.learning_rate(hparams, client.round))
    given = client.opt_state if opt_state is None else opt_state
    is_kept = not (isinstance(given, tuple) and given == ())
    num_stages = len(start.params)
    if is_kept and not optimizer.fits(given, num_stages):
        raise ValueError(
            f"the optimizer state has {len(given)} stages, and the model that trains "
            f"{num_stages}; an algorithm says in Algorithm.opt_state what its clients "
            "train, such as `lambda fresh: fresh(params)`"
        )
    key = client.stream(tag)
    row_at, fill = data.partition.train.of(client.id), _FILL.get()

    def step(index: jax.Array, carry: each_client.Trained) -> each_client.Trained:
        position, epoch = client.plan.step(index)
        if fill:
            position = jnp.append(position, jnp.full_like(position, -1))
        mask = position >= 0
        own = jax.random.fold_in(key, index)
        place = jnp.where(mask, position, fill) if fill else jnp.maximum(position, 0)
        image, label, chosen = data.train_batch(row_at(place), place, own)
        batch = Batch(image, label, mask, position, index, epoch, own, chosen)
        real, measured = mask.any(), []
        for objective, before in zip(objectives, carry.measured, strict=True):
            carry, loss, more = _objective_step(
                objective, hparams, tx, carry, batch, real
            )
            measured.append(jax.tree.map(jnp.add, before, more))
        seen = losses.batch_count(mask, chosen).astype(jnp.int32)
        total, count = carry.loss
        total = total + jnp.where(real, loss * seen, 0)
        return carry.replace(loss=(total, count + seen), measured=tuple(measured))

    begun = given if is_kept else optimizer.init(tx, start.params)
    first = each_client.Trained(
        params=start.params,
        stats=start.stats,
        opt_state=optimizer.seeded(begun, key),
        loss=(jnp.zeros(()), jnp.zeros((), jnp.int32)),
        measured=tuple(
            stacked.zeros(
                jax.eval_shape(functools.partial(_measured, one), start.params)
            )
            for one in objectives
        ),
    )
    trained = client.run(step, first)
    if client.is_tested:
        trained = trained.replace(tested=_tested(client, trained.variables))
    if not is_kept:
        return trained.replace(opt_state=())
    return trained.replace(persists=opt_state is None)


def refuse_moments(is_measured: bool) -> None:
    """Refuses `--eval_moments` where what clients train is no model, with ValueError.

    `is_measured` is `task.tests_trained`.
    """
    if is_measured:
        raise ValueError(
            "--eval_moments: what a client trains here is not the model that "
            "serves it, and cannot be measured alone; omit it"
        )


def _tested(client: each_client.Client, variables: types.Variables) -> losses.Pair:
    """(a model's accuracy on the client's own test rows, 1), or 0 and 0 without any.

    Of a model with exits those that the client holds answer. Raises a ValueError if the
    parameters are not those of the first stages of the client's architecture.
    """
    level, data = len(variables.params), client.data
    model = client.model and types.truncated(client.model, level)
    wanted = model and shapes.variables(model, data.image.shape[1:])
    mine, wanted = (jax.tree.map(jnp.shape, one) for one in (variables, wanted))
    if mine != wanted:
        refuse_moments(is_measured=True)
    test = data.partition.test
    count, row_at = test.count[client.id], test.of(client.id)
    held = boundary.held(client.level, level)

    def step(index: jax.Array, right: jax.Array) -> jax.Array:
        place = index * TEST_BATCH + jnp.arange(TEST_BATCH)
        rows = jnp.where(place < count, row_at(jnp.minimum(place, count - 1)), -1)
        image, label, _ = data.test_batch(rows)
        out, _ = model.forward(*variables, image)
        if model.has_exits:
            exits = [jnp.where(held[n], one, 0) for n, one in enumerate(out)]
            last = jnp.stack(exits)[client.level - 1]
            out = last if model.answer == "last" else sum(exits) / held.sum()
        return right + ((out.argmax(-1) == label) & (rows >= 0)).sum()

    num_batches = -(-count // TEST_BATCH)
    right = jax.lax.fori_loop(0, num_batches, step, jnp.zeros((), jnp.int32))
    has_any = (count > 0).astype(jnp.float32)
    return right / jnp.maximum(count, 1), has_any
