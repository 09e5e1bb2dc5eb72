"""DisPFL against numpy: masks, their means, what is pruned and regrown, its bytes."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import dispfl
from fedjax_pfl import shapes, types
from launch.config import resolve
from tests.algorithms import conftest, plain

# By chance, so that somebody is alone now and then.
GRAPH = types.PeerSpec(5, "erdos_renyi", edge_probability=0.3)
STRUCTURE = {"density": 0.4, "prune_rounds": 7, "client_momentum": 0.5}
# A norm that is often exceeded, also by what the mask leaves out.
FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.8, "clip_norm": 0.5}
SHAPE = shapes.variables(conftest.NETWORKS["tiny"], (8, 8, 1))


def make(task, **given):
    return dispfl.make(dispfl.HParams(batch_size=5, **given), task)


@pytest.fixture(scope="module")
def cohort_at(problem):
    """`round -> Cohort` of three of five clients, and their peers."""
    return plain.with_peers(problem.cohort, GRAPH)


def random_masks(count, seed):
    """For each of five clients a mask with so many True in each tensor."""
    gen = np.random.default_rng(seed)

    def of_leaf(number, leaf):
        flat = np.arange(leaf.size) < number
        rows = [gen.permutation(flat).reshape(leaf.shape) for _ in range(5)]
        return np.stack(rows)

    return jax.tree.map(of_leaf, count, SHAPE.params)


@pytest.fixture(scope="module")
def given(start):
    """Makes states before round 0 with different models, masks and next masks."""

    def make_state(density=STRUCTURE["density"]):
        count = dispfl.allotted(SHAPE.params, density)
        held, mask = random_masks(count, 0), random_masks(count, 1)
        own = start(round=0).clients
        params = jax.tree.map(np.multiply, own.params, held)
        clients = {
            "own": own._replace(params=params),
            "private": dispfl.packed(held, mask),
        }
        return start(round=0).replace(server=(), clients=clients)

    return make_state


class Masked(plain.Sgd):
    """Sets what is not held to 0 after each step; notes where masking before counts."""

    def __init__(self, mask, *args, **more):
        super().__init__(*args, **more)
        self.mask, self.mattered = mask, False

    def step(self, params, grads, trained=None):
        norm, held = (
            np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(tree)))
            for tree in (grads, times(self.mask, grads))
        )
        self.mattered |= norm > self.clip and norm > 1.1 * held
        return times(self.mask, super().step(params, grads, trained))


def times(first, second):
    return jax.tree.map(np.multiply, first, second)


def size_of_rows(mask):
    return mask.reshape(5, -1).sum(1)


def as_rows(number):
    return np.full(5, number)


def unpacked(private, name):
    """All clients' masks, bool leaves [5, ...]."""
    bit = {"held": 1, "mask": 2}[name]
    return jax.tree.map(lambda leaf: np.asarray(leaf) & bit > 0, private)


def masks_of(state, name):
    """A mask of each client as layers of 0 and 1."""
    rows = unpacked(state.clients["private"], name)
    return [plain.layers(plain.at(rows, number)) for number in range(5)]


def mean_of(own, held, sources):
    """The mean over who holds an entry, 0 where nobody does."""
    total = jax.tree.map(lambda *w: sum(w), *(times(held[k], own[k]) for k in sources))
    holders = jax.tree.map(lambda *m: sum(m), *(held[k] for k in sources))
    return jax.tree.map(lambda t, n: t / np.maximum(n, 1), total, holders)


def assert_exchanged(new, mask, weight, score, count, rate):
    """The largest weights stay, then the largest scores among the others come."""
    leaves = [jax.tree.leaves(tree) for tree in (new, mask, weight, score, count)]
    for new, mask, weight, score, count in zip(*leaves, strict=True):
        number = math.ceil(rate * count)
        least = np.sort(np.abs(weight[mask > 0]))[::-1][: count - number]
        kept = (mask > 0) & (np.abs(weight) >= min(least, default=np.inf))
        assert kept.sum() == count - number and (new[kept] == 1).all()
        plain.assert_largest(new * ~kept, score, number, among=~kept)


def with_short_first_batch(cohort):
    """The batch that scores what regrows has two rows of padding."""
    local = cohort.plans["local"]
    position = np.array(local.position)
    position[:, 0, 3:] = -1
    return cohort.replace(plans={"local": local.replace(position=position)})


def test_rounds_equal_a_numpy_reference(compiled, given, problem, cohort_at):
    """Masked means, masked steps, pruning and regrowth; clipped by the whole norm."""
    run, state = compiled("dispfl", **STRUCTURE), given()
    made, table = make(problem.task_of(), **STRUCTURE), problem.table
    count = dispfl.allotted(SHAPE.params, STRUCTURE["density"])
    num_bytes = 4 * sum(jax.tree.leaves(count)) + math.ceil(602 / 8)
    in_layers = plain.layers(jax.tree.map(np.array, count))
    counts = [[int(part) for part in layer] for layer in in_layers]
    degrees, was_clipped = [], []
    for round in range(10):
        cohort = with_short_first_batch(cohort_at(round))
        own = [plain.own_layers(state, number) for number in range(5)]
        held, mask = masks_of(state, "held"), masks_of(state, "mask")
        after, _, sent = run(state, cohort, **FLOATS)
        rate = 0.25 * (1 + math.cos(math.pi * min(round / 7, 1)))
        for one in plain.clients(state, cohort, table):
            number = one.number
            mean = times(mask[number], mean_of(own, held, [number, *one.peers]))
            tx = Masked(mask[number], one.rate(FLOATS), 0.5, clip=0.5)
            trained = one.train(mean, tx)
            found = plain.own_layers(after, number)
            chex.assert_trees_all_close(found, trained, rtol=1e-4, atol=1e-5)
            outside = jax.tree.map(lambda w, m: w[m == 0], found, mask[number])
            assert not any(part.any() for part in jax.tree.leaves(outside))
            chex.assert_trees_all_equal(masks_of(after, "held")[number], mask[number])
            _, rows, _ = next(one.steps())
            x, label = table.images(rows), table.label[rows]
            slope = plain.gradients(trained, x, plain.cross_entropy(label))
            assert_exchanged(
                masks_of(after, "mask")[number],
                mask[number],
                found,
                jax.tree.map(np.abs, slope),
                counts,
                rate,
            )
            was_clipped.append(tx.mattered)
        degrees += cohort.peer_mask.sum(1).tolist()
        assert plain.sent_bytes(made, sent, 3) == [
            {"bytes_up": 0, "bytes_down": num_bytes * degree}
            for degree in cohort.peer_mask.sum(1)
        ]
        state = after
    assert 0 in degrees and max(degrees) > 2 and any(was_clipped)


def test_a_client_without_a_step_keeps_its_mask(compiled, given, cohort_at):
    """As with --drop_last below a batch: there is no gradient to regrow by."""
    run, state = compiled("dispfl", **STRUCTURE), given()
    cohort = cohort_at(0)
    local, idle = cohort.plans["local"], np.arange(3) == 1
    position = np.where(idle[:, None, None], -1, local.position)
    steps = np.where(idle, 0, local.num_steps)
    plan = local.replace(position=position, num_steps=steps)
    after, *_ = run(state, cohort.replace(plans={"local": plan}), **FLOATS)
    for place, number in enumerate(cohort.client_id.tolist()):
        masks = [masks_of(one, "mask")[number] for one in (state, after)]
        equal = jax.tree.map(np.array_equal, *masks)
        assert all(jax.tree.leaves(equal)) == idle[place]


def test_random_regrowth_is_drawn(compiled, given, cohort_at):
    """Test 17: as many entries in each tensor, of each client and key its own."""
    run, state = compiled("dispfl", **STRUCTURE, regrow="random"), given()
    count = dispfl.allotted(SHAPE.params, STRUCTURE["density"])
    cohort, found = cohort_at(0), []
    for seed in (3, 4):
        after, _, _ = run(state.replace(key=jax.random.key(seed)), cohort, **FLOATS)
        found.append(plain.host(after.clients))
    chex.assert_trees_all_equal(*(one["own"] for one in found))
    for one in found:
        for name in ("held", "mask"):
            sizes = jax.tree.map(size_of_rows, unpacked(one["private"], name))
            chex.assert_trees_all_equal(sizes, jax.tree.map(as_rows, count))
    for number in plain.members(cohort):
        first, second = (
            masks_of(state.replace(clients=one), "mask")[number] for one in found
        )
        assert plain.differs(first, second)
        weight = plain.layers(plain.at(found[0]["own"], number).params)
        old = masks_of(state, "mask")[number]
        for new in (first, second):
            # Half of them: those of the largest weights.
            for layer, part in ((0, 0), (1, 0), (2, 0)):
                size = np.abs(weight[layer][part])[old[layer][part] > 0]
                large = np.abs(weight[layer][part]) > np.median(size)
                assert (new[layer][part][large] == 1).all()


def test_all_held_is_gossip(compiled, given, start, cohort_at):
    """Test 17: density 1 equals the unweighted mean of DFedAvgM, two rounds."""
    run = compiled("dispfl", density=1.0, client_momentum=0.5)
    other = compiled("dfedavgm", client_momentum=0.5)
    mine = given(density=1.0)
    theirs = mine.replace(clients=mine.clients | {"private": ()})
    rates = {"client_lr": 0.1, "client_lr_decay": 0.8}
    for round in range(2):
        mine, _, _ = run(mine, cohort_at(round), **rates)
        theirs, _, _ = other(theirs, cohort_at(round), **rates)
        chex.assert_trees_all_close(plain.own(mine), plain.own(theirs), atol=1e-6)
    assert all((leaf == 3).all() for leaf in jax.tree.leaves(mine.clients["private"]))


def test_equal_masks_are_those_of_the_mean(given, problem, cohort_at):
    """Test 17: where all hold the same, the plain mean of what they hold."""
    state, cohort = given(), cohort_at(3)
    held = unpacked(state.clients["private"], "held")
    same = jax.tree.map(lambda m: np.stack([m[0]] * 5), held)
    own = state.clients["own"]
    own = own._replace(params=jax.tree.map(np.multiply, own.params, same))
    clients = {"own": own, "private": dispfl.packed(same, same)}
    made = make(problem.task_of(), **STRUCTURE)
    jitted = made._replace(serving=jax.jit(made.serving))
    state = state.replace(clients=clients)
    served = plain.served(jitted, state, cohort, problem.data)
    for one in plain.clients(state, cohort, problem.table):
        rows = [plain.own_layers(state, k) for k in [one.number, *one.peers]]
        found = plain.layers(served[one.number].params)
        expected = plain.mean(rows, np.ones(len(rows)))
        chex.assert_trees_all_close(found, expected, atol=1e-6)


def test_statistics_are_means_over_clients_and_peers(start, problem):
    """Whatever a mask holds."""
    made = make(problem.task_of("with_norm"))
    cohort = plain.with_peers(problem.cohort, types.PeerSpec(2, "random"))(1)
    own = start("with_norm").clients
    held = jax.tree.map(lambda leaf: np.ones(leaf.shape, bool), own.params)
    clients = {"own": own, "private": dispfl.packed(held, held)}
    state = start("with_norm").replace(server=(), clients=clients)
    jitted = made._replace(serving=jax.jit(made.serving))
    served = plain.served(jitted, state, cohort, problem.data)
    for one in plain.clients(state, cohort, problem.table):
        ids = [one.number, *one.peers]
        wanted = jax.tree.map(lambda x, k=ids: x[k].mean(0), own.stats)
        found = served[one.number].stats
        chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=3e-6)
        assert len(ids) == 3


def test_who_starts_with_what(problem):
    """The same weights, masks that differ by client and by seed, nothing outside."""
    made = make(problem.task_of(), **STRUCTURE)
    init = jax.jit(made.init)
    first, second = (
        plain.host(init(problem.data, jax.random.key(seed)).clients) for seed in (0, 1)
    )
    count = dispfl.allotted(SHAPE.params, STRUCTURE["density"])
    masks = unpacked(first["private"], "mask")
    chex.assert_trees_all_equal(masks, unpacked(first["private"], "held"))
    sizes = jax.tree.map(size_of_rows, masks)
    chex.assert_trees_all_equal(sizes, jax.tree.map(as_rows, count))
    rows = [plain.layers(plain.at(masks, number)) for number in range(5)]
    others = plain.at(unpacked(second["private"], "mask"), 0)
    assert plain.differs(rows[0], plain.layers(others))
    assert all(plain.differs(rows[0], other) for other in rows[1:])
    start = plain.host(
        problem.task_of().init(conftest.NETWORKS["tiny"], jax.random.key(0))
    )
    expected = jax.tree.map(lambda m, leaf: m * leaf, masks, start.params)
    chex.assert_trees_all_close(first["own"].params, expected, atol=1e-6)


def test_rate_falls_along_a_cosine():
    """Test 17: half at first, a quarter midway, none after the last."""
    hparams = dispfl.HParams(prune_rounds=10)
    found = [float(dispfl.rate(hparams, jnp.int32(round))) for round in (0, 5, 10, 15)]
    np.testing.assert_allclose(found, [0.5, 0.25, 0, 0], atol=1e-6)
    assert found[2] == found[3] == 0


@pytest.mark.parametrize(
    ("density", "expected"),
    [
        # Vectors are dense, and so is (6, 4), whose share would be 1.17; then eps (8 +
        # 6 + 64 + 8) = .5 * 602 - 18 - 24.
        (0.5, [0.5 * 602 - 42 - 14 * 259 / 86, 14 * 259 / 86, 24]),
        # No matrix is: eps (72 + 14 + 10) = .2 * 602 - 18.
        (0.2, [72 * 102.4 / 96, 14 * 102.4 / 96, 10 * 102.4 / 96]),
        (1.0, [512, 48, 24]),
    ],
)
def test_erk(density, expected):
    """Densities in proportion to the sum of dimensions over their product."""
    count = dispfl.allotted(SHAPE.params, density)
    kernels = [stage["trunk"]["kernel"] for stage in count]
    assert kernels == [math.floor(one + 1e-6) for one in expected]
    assert [stage["trunk"]["bias"] for stage in count] == [8, 6, 4]


def test_erk_of_a_convolution():
    """All four dimensions count."""
    leaves = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 3, 8, 16), (64, 32))]
    found = dispfl.allotted(tuple(leaves), 0.25)
    each = 0.25 * (1152 + 2048) / (30 + 96)
    assert found == (math.floor(30 * each), math.floor(96 * each))


def test_the_preset():
    """Gradients clipped at 10, momentum begun anew, masks at rest after the run."""
    config, hparams = resolve.configure({"algo": "dispfl"})
    assert (hparams.density, hparams.regrow) == (0.5, "gradient")
    assert (hparams.clip_norm, hparams.optimizer_state) == (10, "reset")
    assert config.preset == "uapdfl" and hparams.num_peers == 5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"density": 0.0}, "--density=0.0: expected more than 0"),
        ({"density": 1.5}, "--density=1.5: expected at most 1"),
        ({"prune_rounds": 0}, "--prune_rounds=0: expected at least 1"),
        ({"regrow": "none"}, "--regrow=none: expected one of gradient, random"),
    ],
)
def test_refused(given, words):
    """One line with the flag, what came and what is allowed."""
    with pytest.raises(ValueError, match=words):
        resolve.configure({"algo": "dispfl"} | given)


def test_a_density_that_leaves_nothing_is_refused(problem):
    """Biases alone are 18 of 602 parameters."""
    with pytest.raises(ValueError, match=r"--density=0.02 leaves .* 0.03 .*; raise it"):
        make(problem.task_of(), density=0.02)
    assert not make(problem.task_of(), density=0.05).unused
    assert "prune_rate" in make(problem.task_of(), density=1.0).unused
