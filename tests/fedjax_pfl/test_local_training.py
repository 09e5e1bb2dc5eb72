"""Local steps: the optimizers by hand, masks, hooks, statistics, kept states."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pfl import boundary, each_client, local_training, optimizer, types
from tests.fedjax_pfl import small

SIZES = [5, 2, 3]
Objective = local_training.Objective


@pytest.fixture(scope="module")
def data():
    """Three clients of 5, 2 and 3 examples."""
    return small.tables(SIZES)


def options(**given):
    """Options of the tests below."""
    return local_training.LocalTraining(client_lr=0.2, **given)


def everywhere(step):
    """Both stages train."""
    return True, True


def by_hand(
    data, client, hparams, trainable=everywhere, adjust=None, start=None, moments=None
):
    """Local training of `small.regression` in numpy: (parameters, moments, loss)."""
    train = data.partition.train
    first_row = int(train.start[client.id])
    params = [np.zeros(3), np.zeros(())] if start is None else start
    first, second, count = moments or ([0.0, 0.0], [0.0, 0.0], [0, 0])
    rate = hparams.client_lr * hparams.client_lr_decay ** int(client.round)
    total = examples = 0
    for step in range(int(client.plan.num_steps)):
        position = np.asarray(client.plan.position[step])
        rows = np.asarray(train.row)[first_row + position[position >= 0]]
        x = np.asarray(data.image, np.float64)[rows]
        gap = x @ params[0] + params[1] - np.asarray(data.label)[rows]
        total, examples = total + (gap**2 / 2).sum(), examples + len(rows)
        grads = [x.T @ gap / len(rows), gap.mean()]
        if adjust:
            grads = adjust(params, grads)
        moves = trainable(int(client.plan.epoch[step]))
        if hparams.clip_norm:
            norm = np.sqrt(sum((grads[i] ** 2).sum() for i in (0, 1) if moves[i]))
            grads = [g * min(1, hparams.clip_norm / norm) for g in grads]
        params, first, second, count = map(list, (params, first, second, count))
        for i in (0, 1):
            if not moves[i]:
                continue
            move = grads[i] + hparams.weight_decay * params[i]
            if hparams.client_optimizer == "adam":
                count[i] += 1
                first[i] = 0.9 * first[i] + 0.1 * move
                second[i] = 0.999 * second[i] + 0.001 * move**2
                scale = np.sqrt(second[i] / (1 - 0.999 ** count[i])) + 1e-8
                move = first[i] / (1 - 0.9 ** count[i]) / scale
            else:
                first[i] = hparams.client_momentum * first[i] + move
                move = first[i]
            params[i] = params[i] - rate * move
    return params, (first, second, count), (total, examples)


def train(data, client, hparams, *objectives, jit=True, **given):
    """`local_training.train` of `small.regression` or of these objectives."""
    objectives = [
        Objective(one) if callable(one) else one
        for one in objectives or [small.regression]
    ]
    start = given.pop("start", small.at_zero())

    def run(client):
        return local_training.train(hparams, objectives, start, client, **given)

    return (jax.jit(run) if jit else run)(client)


def numbers(params):
    """[w, b] of parameters of `small.regression`."""
    return [np.asarray(params[0]["w"]), np.asarray(params[1]["b"])]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"client_momentum": 0.5, "weight_decay": 0.1},
        {"client_optimizer": "adam", "weight_decay": 0.1},
        {"clip_norm": 0.5, "client_momentum": 0.9},
        {"client_lr_decay": 0.5},
    ],
    ids=lambda given: "-".join(given) or "sgd",
)
def test_training_equals_numpy(given, data):
    """Short batches, decay per round, PyTorch's momentum and L2; the loss's pair."""
    hparams = options(**given)
    client = small.client(data, small.plan(SIZES), round=3)
    trained = train(data, client, hparams)
    params, _, (total, examples) = by_hand(data, client, hparams)
    chex.assert_trees_all_close(numbers(trained.params), params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trained.loss[0], total, rtol=1e-5)
    assert int(trained.loss[1]) == examples == 10
    # Statistics move with every step: 2 epochs of 5 examples in batches of 2.
    assert int(trained.stats[0]["seen"]) == 10
    assert int(trained.stats[1]["steps"]) == 6


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_steps_behind_a_clients_own_change_nothing(kind, data):
    """Bitwise: neither parameters, moments, counts, statistics nor the loss."""
    hparams = options(
        client_optimizer=kind,
        client_momentum=0.9,
        weight_decay=0.1,
        optimizer_state="persist",
    )
    plan = small.plan(SIZES)
    state = jax.tree.map(
        lambda leaf: leaf[0],
        small.opt_states(hparams, small.at_zero().params, 1),
    )

    def run(bound):
        client = small.client(data, plan, 1, bound=bound, opt_state=state)
        return train(data, client, hparams)

    short, long = run(2), run(6)
    assert int(short.stats[1]["steps"]) == 2
    chex.assert_trees_all_equal(short, long)
    # Nor does a plan whose padding claims examples.
    full = plan.replace(position=jnp.maximum(plan.position, 0))
    client = small.client(data, full, 1, bound=6, opt_state=state)
    claimed = train(data, client, hparams)
    assert int(claimed.stats[1]["steps"]) == 2


@pytest.mark.parametrize(
    ("given", "trainable"),
    [
        (
            {"client_momentum": 0.9, "weight_decay": 0.1},
            lambda epoch: (epoch == 0, True),
        ),
        ({"client_optimizer": "adam"}, lambda epoch: (epoch == 1, epoch == 0)),
        ({"clip_norm": 0.3}, lambda epoch: (epoch == 0, epoch == 1)),
    ],
    ids=["momentum", "adam", "clip"],
)
def test_phases_by_epoch_equal_numpy(given, trainable, data):
    """A function of the batch freezes weights, moments and counts of a stage."""
    hparams = options(**given)

    def mask(batch):
        return jnp.array(trainable(batch.epoch))

    client = small.client(data, small.plan(SIZES))
    trained = train(data, client, hparams, Objective(small.regression, mask))
    params, _, _ = by_hand(data, client, hparams, trainable)
    chex.assert_trees_all_close(numbers(trained.params), params, rtol=1e-5, atol=1e-6)
    whole, _, _ = by_hand(data, client, hparams)
    assert abs(params[0] - whole[0]).max() > 1e-3
    # Statistics move in the epochs in which their stage trains.
    steps = 3 * sum(trainable(epoch)[1] for epoch in (0, 1))
    assert int(trained.stats[1]["steps"]) == steps


def test_masks_may_be_lists(data):
    """As tuples, also where the optimizer reads them by stage."""
    client = small.client(data, small.plan(SIZES))
    given = {"trainable": [False, True], "held": [True, True]}
    hparams, found = options(clip_norm=0.1), []
    for kind in (list, tuple):
        masks = {name: kind(mask) for name, mask in given.items()}
        objective = Objective(small.regression, **masks)
        found.append(numbers(train(data, client, hparams, objective).params))
    chex.assert_trees_all_equal(*found)


def parts(value):
    """Parameters of two stages with a trunk and an exit each."""
    stage = {"trunk": {"w": jnp.full((2, 3), value)}, "exit": {"w": jnp.full(3, value)}}
    return stage, jax.tree.map(jnp.copy, stage)


TRUE, FALSE = jnp.array(True), jnp.array(False)
ENTRIES = jnp.array([[True, False, True], [False, False, True]])
MASKS = {
    "stage": (TRUE, FALSE),
    "parts": ({"trunk": FALSE, "exit": TRUE}, {"trunk": TRUE, "exit": FALSE}),
    "entries": (
        {"trunk": {"w": ENTRIES}, "exit": TRUE},
        {"trunk": FALSE, "exit": {"w": ENTRIES[0]}},
    ),
    "none": (
        {"trunk": FALSE, "exit": FALSE},
        {"trunk": {"w": ENTRIES & False}, "exit": FALSE},
    ),
}


def full_mask(mask, like):
    """One bool for every entry."""
    return jax.tree.map(
        lambda m, part: jax.tree.map(lambda leaf: np.broadcast_to(m, leaf.shape), part),
        mask,
        like,
    )


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_hold_weights_moments_and_counts(name, kind):
    """Bitwise, whatever the gradient there is; the rest moves as without a mask."""
    hparams = options(client_optimizer=kind, client_momentum=0.9, weight_decay=0.1)
    tx = optimizer.make(hparams, 0.1)
    mask, everything = MASKS[name], (TRUE, TRUE)
    state = optimizer.init(tx, parts(1.0))
    step = jax.jit(
        lambda grads, state, params, mask: optimizer.apply_gradients(
            tx, grads, state, params, mask
        )
    )
    # Moments that would move a weight without any gradient.
    params, state = step(parts(0.5), state, parts(1.0), everything)
    entries = full_mask(mask, params)
    wild = jax.tree.map(lambda m: jnp.where(m, 0.25, jnp.nan), entries)
    after, after_state = step(wild, state, params, mask)
    free, free_state = step(parts(0.25), state, params, everything)

    def chosen(free, old):
        return jax.tree.map(np.where, entries, free, old)

    chex.assert_trees_all_equal(after, chosen(free, params))
    moves = jax.tree.map(lambda a, b: (a != b).all(), free, params)
    assert all(jax.tree.leaves(moves))

    def moments(state, field):
        found = [optax.tree_utils.tree_get(stage, field) for stage in state]
        return tuple(found)

    for field in ("mu", "nu") if kind == "adam" else ("trace",):
        expected = chosen(moments(free_state, field), moments(state, field))
        chex.assert_trees_all_equal(moments(after_state, field), expected)
    if kind == "adam":
        # A count stands still where nothing of its stage moves.
        moved = [any(m.any() for m in jax.tree.leaves(stage)) for stage in entries]
        assert [int(c) for c in moments(after_state, "count")] == [1 + m for m in moved]


def test_prefix_masks_reach_training(data):
    """A mask of single entries and a mask of a part, from the objective on."""
    entries = jnp.array([True, False, True])
    mask = ({"w": entries}, FALSE)
    client = small.client(data, small.plan(SIZES))
    hparams = options(clip_norm=0.3)
    trained = train(data, client, hparams, Objective(small.regression, mask))

    def keep(_, grads):
        return [np.where(entries, grads[0], 0), grads[1]]

    params, _, _ = by_hand(data, client, hparams, lambda _: (True, False), keep)
    chex.assert_trees_all_close(numbers(trained.params), params, rtol=1e-5, atol=1e-6)
    assert params[0][0] != 0 and params[0][1] == 0
    # A stage of which any entry trains moves its statistics.
    assert int(trained.stats[0]["seen"]) == 10
    assert int(trained.stats[1]["steps"]) == 0


@pytest.mark.parametrize(
    ("held", "seen", "steps"),
    [
        (None, 0, 6),
        (jnp.array([True, True]), 10, 6),
        (jnp.array([True, False]), 10, 0),
        (({"seen": FALSE}, {"steps": TRUE}), 0, 6),
    ],
    ids=["none", "both", "first", "prefix"],
)
def test_held_moves_statistics(held, seen, steps, data):
    """Also where nothing trains; by default only where something does."""
    objective = Objective(small.regression, jnp.array([False, True]), held)
    client = small.client(data, small.plan(SIZES), bound=9)
    trained = train(data, client, options(), objective)
    assert (numbers(trained.params)[0] == 0).all()
    assert int(trained.stats[0]["seen"]) == seen
    assert int(trained.stats[1]["steps"]) == steps


def test_adjust_is_a_term_of_the_gradient(data):
    """mu (w - start) added to the gradient, before clipping, is a proximal term."""
    start = {"w": jnp.array([0.3, -0.2, 0.1])}, {"b": jnp.array(0.5)}
    first = [np.array([0.3, -0.2, 0.1]), np.array(0.5)]
    hparams = options(clip_norm=0.4)

    def adjust(params, grads):
        return jax.tree.map(lambda g, p, s: g + 0.7 * (p - s), grads, params, start)

    def plain(params, grads):
        return [grads[i] + 0.7 * (params[i] - first[i]) for i in (0, 1)]

    client = small.client(data, small.plan(SIZES))
    variables = small.at_zero()._replace(params=start)
    objective = Objective(small.regression, adjust=adjust)
    trained = train(data, client, hparams, objective, start=variables)
    params, _, (total, _) = by_hand(
        data, client, hparams, adjust=plain, start=list(first)
    )
    chex.assert_trees_all_close(numbers(trained.params), params, rtol=1e-5, atol=1e-6)
    # The loss is reported as it is.
    np.testing.assert_allclose(trained.loss[0], total, rtol=1e-5)
    alone, _, _ = by_hand(data, client, hparams, start=list(first))
    assert abs(alone[0] - params[0]).max() > 1e-3


def test_project_follows_every_real_step(data):
    """A box around 0 for all parameters, a frozen stage among them."""

    def project(params):
        return jax.tree.map(lambda leaf: jnp.clip(leaf, -0.01, 0.01), params)

    start = {"w": jnp.full(3, 0.005)}, {"b": jnp.array(0.5)}
    objective = Objective(small.regression, jnp.array([True, False]), project=project)
    client = small.client(data, small.plan(SIZES))
    variables = small.at_zero()._replace(params=start)
    trained = train(data, client, options(), objective, start=variables)
    weight, bias = numbers(trained.params)
    assert abs(weight).max() == np.float32(0.01)
    assert bias == np.float32(0.01)


def test_measure_sums_the_real_steps(data):
    """Of the loss's own gradients, before clipping and of frozen stages too."""
    hparams = options(clip_norm=0.4)
    norms, counts = [], []

    def record(_, grads):
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        norms.append(norm)
        counts.append(1)
        return grads

    def measure(grads):
        return {"norm": optax.global_norm(grads), "steps": jnp.ones((), jnp.int32)}

    client = small.client(data, small.plan(SIZES), bound=9)
    trained = train(data, client, hparams, Objective(small.regression, measure=measure))
    by_hand(data, client, hparams, adjust=record)
    (found,) = trained.measured
    np.testing.assert_allclose(found["norm"], sum(norms), rtol=1e-5)
    assert int(found["steps"]) == len(counts) == 6


def test_objectives_take_turns_and_share_the_optimizer(data):
    """Two steps on every batch, one momentum; the loss is the last one's."""
    hparams = options(client_momentum=0.9)

    def half(params, stats, batch):
        loss, _ = small.regression(params, stats, batch)
        return loss / 2, stats

    client = small.client(data, small.plan(SIZES), 1)
    objectives = (
        Objective(half, jnp.array([True, False])),
        Objective(small.regression),
    )
    trained = train(data, client, hparams, *objectives)
    weight, bias, moments, total = np.zeros(3), 0.0, [np.zeros(3), 0.0], 0.0
    row = np.asarray(data.partition.train.row)[5:7]
    x, y = np.asarray(data.image, np.float64)[row], np.asarray(data.label)[row]
    for _ in range(2):
        gap = x @ weight + bias - y
        moments[0] = 0.9 * moments[0] + x.T @ gap / 4
        weight = weight - 0.2 * moments[0]
        gap = x @ weight + bias - y
        total += (gap**2).sum() / 2
        moments = [0.9 * moments[0] + x.T @ gap / 2, 0.9 * moments[1] + gap.mean()]
        weight, bias = weight - 0.2 * moments[0], bias - 0.2 * moments[1]
    chex.assert_trees_all_close(
        numbers(trained.params), [weight, bias], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(trained.loss[0], total, rtol=1e-5)
    assert trained.measured == ((), ())


def test_a_kept_optimizer_goes_on(data):
    """Two rounds of one epoch = one of two epochs; reset ones begin anew."""
    keeps = options(optimizer_state="persist", client_optimizer="adam")
    kept = optimizer.fresh(keeps, small.at_zero().params)
    once, plan = small.plan(SIZES, epochs=1), small.plan(SIZES)
    first = train(data, small.client(data, once, opt_state=kept), keeps)
    second = small.client(data, once, opt_state=first.opt_state)
    twice = train(data, second, keeps, start=first.variables)
    whole = train(data, small.client(data, plan), options(client_optimizer="adam"))
    chex.assert_trees_all_close(twice.params, whole.params, rtol=1e-5)
    chex.assert_trees_all_equal(twice.stats, whole.stats)
    assert whole.opt_state == ()
    # A given state comes before the client's own.
    anew = train(data, second, keeps, start=first.variables, opt_state=kept)
    fresh = train(data, second.fresh(), keeps, start=first.variables)
    chex.assert_trees_all_equal(anew.params, fresh.params)
    assert jax.tree.leaves(anew.opt_state) and fresh.opt_state == ()
    assert twice.persists and not anew.persists and not fresh.persists
    assert abs(numbers(anew.params)[0] - numbers(twice.params)[0]).max() > 1e-3


def test_clip_leaves_frozen_entries_out_of_the_norm():
    """What trains gets the whole norm; what does not may hold anything."""
    mask = (TRUE, jnp.array([True, False]))
    grads = jnp.full(2, 10.0), jnp.array([10.0, jnp.nan])
    clipped = optimizer.clip(grads, 1.0, mask)
    expected = np.full(2, 3**-0.5)
    np.testing.assert_allclose(clipped[0], expected, rtol=1e-6)
    np.testing.assert_allclose(clipped[1][0], expected[0], rtol=1e-6)
    assert optimizer.clip(grads, 0.0, mask) is grads
    small_ones = jnp.full(2, 0.01), jnp.full(2, 0.02)
    chex.assert_trees_all_equal(
        optimizer.clip(small_ones, jnp.float32(1), boundary.by_stage(mask[1])),
        (small_ones[0], jnp.zeros(2)),
    )


def test_every_step_has_a_key_of_its_own(data):
    """Named by stream, client, round and step; a longer bound changes none."""

    def loss_fn(params, stats, batch):
        words = stats[0]["words"].at[batch.step].set(jax.random.bits(batch.key))
        return params[0]["w"] * 0.0, ({"words": words},)

    start = types.Variables(
        ({"w": jnp.zeros(())},), ({"words": jnp.zeros(6, jnp.uint32)},)
    )
    plan = small.plan([5, 5, 5])

    def words(number=0, **given):
        tag = given.pop("tag", "engine.local")
        client = small.client(data, plan, number, **given)
        trained = train(data, client, options(), loss_fn, start=start, tag=tag)
        return np.asarray(trained.stats[0]["words"])

    base = words()
    others = [words(number=1), words(round=1), words(tag="proxy.public"), words(seed=1)]
    drawn = np.concatenate([base, *others])
    assert len(np.unique(drawn)) == 30
    np.testing.assert_array_equal(words(bound=8), base)


def test_a_batch_is_what_the_plan_says(data):
    """Images, labels and mask of the client's own rows; positions and epochs."""

    def loss_fn(params, stats, batch):
        seen = {
            "position": batch.position,
            "epoch": batch.epoch,
            "label": jnp.where(batch.mask, batch.label, -1),
            "image": jnp.where(batch.mask[:, None], batch.image, 0),
        }
        new = jax.tree.map(lambda log, x: log.at[batch.step].set(x), stats[0], seen)
        assert batch.mode["train"] and batch.mode["sample_mask"] is batch.mask
        assert batch.mode["key"] is batch.key
        return params[0]["w"] * 0.0, (new,)

    log = {
        "position": jnp.zeros((4, 2), jnp.int32),
        "epoch": jnp.zeros(4, jnp.int32),
        "label": jnp.zeros((4, 2), jnp.int32),
        "image": jnp.zeros((4, 2, 3)),
    }
    plan = small.plan(SIZES)
    client = small.client(data, plan, 2)
    start = types.Variables(({"w": jnp.zeros(())},), (log,))
    seen = train(data, client, options(), loss_fn, start=start).stats[0]
    position = np.asarray(plan.position[2, :4])
    row = np.asarray(data.partition.train.row)[7 + np.maximum(position, 0)]
    np.testing.assert_array_equal(seen["position"], position)
    np.testing.assert_array_equal(seen["epoch"], [0, 0, 1, 1])
    label = np.where(position >= 0, np.asarray(data.label)[row], -1)
    np.testing.assert_array_equal(seen["label"], label)
    image = np.where(position[..., None] >= 0, np.asarray(data.image)[row], 0)
    np.testing.assert_array_equal(seen["image"], image)


def test_metrics_and_split():
    """The loss of real rows; what stays of a client has no model in it."""
    trained = each_client.Trained(
        params=jnp.ones(3),
        stats=jnp.zeros(3),
        opt_state=(),
        loss=(jnp.array([1.0, jnp.nan, 3.0]), jnp.array([2, 9, 4])),
        measured=(jnp.arange(3),),
    )
    total, count = trained.metrics(small.cohort([0, 5, 1], 5))["train_loss"]
    assert (float(total), int(count)) == (4.0, 6)
    rest, variables = trained.split()
    assert (rest.params, rest.stats) == ((), ())
    assert rest.loss is trained.loss and rest.measured is trained.measured
    assert variables.params is trained.params and variables.stats is trained.stats


def test_plans():
    """A plan has the options' epochs, or its own."""
    hparams = options(local_epochs=3, batch_size=7)
    assert local_training.plan(hparams) == types.PlanSpec("local", 3, 7)
    assert local_training.plan(hparams, "more", 5) == types.PlanSpec("more", 5, 7)


@pytest.mark.parametrize("answer", ["ensemble", "last"])
def test_what_training_left_is_measured(answer):
    """On all test rows, by the exits that a client holds, whatever the chunk trains."""
    data, gen = small.tables([5], [70]), np.random.default_rng(1)
    weight = gen.normal(size=(3, small.WIDTH, small.NUM_CLASSES)).astype(np.float32)
    variables = types.Variables(tuple({"w": one} for one in weight), ({},) * 3)
    model = small.linear(num_exits=3)._replace(answer=answer)
    one = small.client(data, small.plan([5])).replace(model=model, is_tested=True)

    @jax.jit
    def run(level):
        return local_training._tested(one.replace(level=level), variables)

    rows = np.asarray(data.partition.test.row)[:70]
    logits = np.asarray(data.image)[rows] @ weight
    for level in (1, 2):
        found, has_any = run(level)
        z = logits[level - 1] if answer == "last" else logits[:level].sum(0)
        right = (z.argmax(1) == np.asarray(data.label)[rows]).mean()
        assert (has_any, found) == (1, pytest.approx(right))


def test_cross_entropy_runs_the_model_in_train_mode(data):
    """The step's key and mask reach it; padding changes nothing."""
    seen = []

    def forward(params, stats, h, **mode):
        seen.append(mode)
        return h @ params[0]["w"], ({"new": jnp.ones(())},)

    model = small.linear()._replace(forward=forward)
    loss_fn = local_training.cross_entropy_loss(model)
    key = jax.random.key(0)
    batch = local_training.Batch(
        image=jnp.array([[1.0, 2.0], [jnp.nan, 0.0]]),
        label=jnp.array([1, 0]),
        mask=jnp.array([True, False]),
        position=jnp.arange(2),
        step=0,
        epoch=0,
        key=key,
    )
    loss, stats = loss_fn(({"w": jnp.eye(2)},), ({},), batch)
    np.testing.assert_allclose(loss, np.log1p(np.exp(1 - 2)), rtol=1e-6)
    assert stats == ({"new": jnp.ones(())},)
    assert seen == [{"sample_mask": batch.mask, "train": True, "key": key}]


@pytest.mark.parametrize(
    ("out", "kind"),
    [
        (lambda loss, stats: loss, "an array alone"),
        (lambda loss, stats: (loss[None], stats), r"one of shape \[1\]"),
        (lambda loss, stats: None, "NoneType"),
        (lambda loss, stats: (jnp.int32(1), stats), "one of int32"),
        (
            lambda loss, stats: (loss, None),
            "NoneType of another form in the place of statistics",
        ),
        (
            lambda loss, stats: (loss, {"acc": loss}),
            "dict of another form in the place of statistics",
        ),
    ],
)
def test_what_is_no_loss(data, out, kind):
    """One line says what a loss of one's own returns."""

    def loss_fn(params, stats, batch):
        return out(params[0].sum(), stats)

    client = small.client(data, small.plan(SIZES, epochs=1, batch_size=2))
    start = types.Variables((jnp.zeros(3), jnp.zeros(())), ({}, {}))
    with pytest.raises(ValueError, match=f"a loss returned {kind}; expected .loss"):
        local_training.train(options(), loss_fn, start, client)


@pytest.mark.parametrize("name", ["adjust", "project"])
def test_what_is_no_parameters(data, name):
    """One line says which function of an objective returned something else."""

    def loss_fn(params, stats, batch):
        return params[0].sum() + params[1], stats

    odd = local_training.Objective(loss_fn, **{name: lambda *given: given[0][0]})
    client = small.client(data, small.plan(SIZES, epochs=1, batch_size=2))
    start = types.Variables((jnp.zeros(3), jnp.zeros(())), ({}, {}))
    with pytest.raises(ValueError, match=f"Objective.{name}=. returned .* another fo"):
        local_training.train(options(), (odd,), start, client)


def test_without_test_rows_nothing_is_measured():
    """It counts in no mean over clients."""
    data = small.tables([5, 5], [0, 4])
    one = small.client(data, small.plan([5, 5])).replace(model=small.linear())
    start = types.Variables(({"w": jnp.ones((small.WIDTH, small.NUM_CLASSES))},), ({},))
    found = local_training._tested(one.replace(is_tested=True), start)
    assert tuple(map(float, found)) == (0.0, 0.0)


def test_rows_that_fill_a_pass_are_not_right():
    """Three test rows are all right, and 61 that fill the pass do not count."""
    data = small.tables([5], [3])
    data = data.replace(label=jnp.zeros_like(data.label))
    one = small.client(data, small.plan([5])).replace(model=small.linear())
    start = types.Variables(
        ({"w": jnp.zeros((small.WIDTH, small.NUM_CLASSES))},), ({},)
    )
    found = local_training._tested(one.replace(is_tested=True), start)
    assert tuple(map(float, found)) == (1.0, 1.0)


def test_losses_of_exits_are_added():
    """Each is the cross-entropy of a model with this exit alone."""
    data, zero = small.tables([5]), jnp.int32(0)
    image, label, mask = data.image[:4], data.label[:4], jnp.arange(4) < 3
    more = jnp.arange(4), zero, zero, jax.random.key(0)
    batch = local_training.Batch(image, label, mask, *more)
    params, _ = small.linear(num_exits=3).init(jax.random.key(1), image)
    found, _ = local_training.exits_loss(small.linear(num_exits=3))(
        params, ({},) * 3, batch
    )
    alone = local_training.cross_entropy_loss(small.linear())
    wanted = sum(float(alone((one,), ({},), batch)[0]) for one in params)
    assert float(found) == pytest.approx(wanted, rel=1e-5)


def test_an_objective_alone_is_a_list_of_it(data):
    """Steps are those of the plan, whatever the options say."""
    client = small.client(data, small.plan(SIZES))
    given = options(local_epochs=7, batch_size=1)
    objective, start = Objective(small.regression), small.at_zero()
    one = local_training.train(given, objective, start, client)
    several = local_training.train(options(), [objective], start, client)
    chex.assert_trees_all_equal(one.params, several.params)


def test_a_kept_state_of_other_stages_is_refused(data):
    """With where to say what is trained."""
    keeps = options(optimizer_state="persist", client_optimizer="adam")
    (first, _) = optimizer.fresh(keeps, small.at_zero().params)
    client = small.client(data, small.plan(SIZES), opt_state=(first,))
    with pytest.raises(ValueError, match="has 1 stages, .* 2; .*Algorithm.opt_state"):
        train(data, client, keeps)
