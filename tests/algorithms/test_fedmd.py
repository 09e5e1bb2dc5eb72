"""FedMD against numpy with two architectures; numbers are the spec's section 5.

Clients 0, 2 and 4 have the network `tiny`, 1 and 3 `deeper`.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from algorithms import fedmd
from fedjax_pfl import rng, types
from launch import build
from tests.algorithms import conftest, plain
from tests.fedjax_pfl import small
from tests.toys import model as toys

GROUPS = ("tiny", "deeper")
GROUP = np.arange(5) % 2
MEMBERS = ([0, 2, 4], [1, 3])
STRUCTURES = {
    "mae": {"client_momentum": 0.5},
    "kl": {"public_loss": "kl", "public_examples": 7, "digest_epochs": 2},
    "persist": {
        "public_loss": "kl",
        "public_examples": 7,
        "client_optimizer": "adam",
        "optimizer_state": "persist",
    },
}
# Would make another result, as the reference shows.
MATTERS = {
    "mae": {"client_momentum": 0.0},
    "kl": {"public_loss": "mae", "public_examples": 12, "digest_epochs": 1},
    "persist": {"client_optimizer": "sgd", "optimizer_state": "reset"},
}
FLOATS = {"client_lr": 0.1, "client_lr_decay": 0.5}


@pytest.fixture(scope="session")
def task(problem):
    """Two architectures over five clients."""
    return problem.task_of(
        client_models=tuple(conftest.NETWORKS[name] for name in GROUPS),
        group_of_client=GROUP.astype(np.int32),
    )


@pytest.fixture(scope="session")
def cohort_at(problem, task):
    """Cohorts by round; `row` is a client's slot among those of its group."""
    made = fedmd.make(fedmd.HParams(batch_size=5), task)
    return plain.planner(problem.data, made.plans, group=GROUP)


@pytest.fixture(scope="session")
def run(problem, task, cohort_at):
    """`(name, state, cohort, data) -> round's result`, compiled by name."""

    @functools.cache
    def get(name):
        hparams = fedmd.HParams(batch_size=5, local_epochs=2, **STRUCTURES[name])
        return conftest.jitted(fedmd, hparams, task)

    def one_round(name, state, cohort=None, data=None):
        cohort = cohort_at(int(state.round)) if cohort is None else cohort
        data = problem.data if data is None else data
        return get(name)(state, cohort, data, **FLOATS)

    return one_round


@pytest.fixture(scope="session")
def given():
    """Makes states whose clients are all different, or equal within their groups."""

    def make(participations=(3, 3, 3, 3, 3), equal=False, round=1, name="kl"):
        hparams = fedmd.HParams(batch_size=5, **STRUCTURES[name])
        clients, kept = [], []
        for name, ids in zip(GROUPS, MEMBERS, strict=True):
            model = conftest.NETWORKS[name]
            seeds = [7 if equal else 1 + k for k in ids]
            each = [conftest.random_params(model, s) for s in seeds]
            taken = np.asarray(participations, np.int32)[ids]
            clients.append({"own": plain.stack(each), "participations": taken})
            zeros = small.opt_states(hparams, each[0].params, len(ids))
            kept.append(plain.host(zeros))
        return types.RoundState(
            (), tuple(clients), jax.random.key(3), np.int32(round), tuple(kept)
        )

    return make


def slot_of(number):
    """(group, slot in it) of a client."""
    return GROUP[number], MEMBERS[GROUP[number]].index(number)


def private(state, number):
    """All that the state holds of a client."""
    group, slot = slot_of(number)
    return plain.at(state.clients[group], slot)


def layers_of(state, number):
    return plain.layers(private(state, number)["own"].params)


def every(state):
    """Layers by client."""
    return [layers_of(state, number) for number in range(5)]


def public_rows(state, table, count):
    """The public images of a round: a subset of the proxy rows, in batches of 5."""
    key = rng.stream(state.key, "proxy.public", jnp.asarray(state.round))
    rows = np.asarray(jax.random.permutation(key, table.proxy))[:count]
    return [rows[i : i + 5] for i in range(0, count, 5)]


def optimizers(hparams):
    """The revisits' optimizers over several rounds; digests have fresh ones."""

    def make(rate):
        if hparams.get("client_optimizer") == "adam":
            return plain.Adam(rate)
        return plain.Sgd(rate, hparams.get("client_momentum", 0.0))

    return plain.Optimizers(make, hparams.get("optimizer_state") == "persist")


def reference(state, cohort, table, hparams, txs=None):
    """Layers of the round's clients by id."""
    txs, kind = txs or optimizers(hparams), hparams.get("public_loss", "mae")
    batches = public_rows(state, table, hparams.get("public_examples", 12))
    members = plain.clients(state, cohort, table)
    own = {one.number: layers_of(state, one.number) for one in members}

    def answer(params, rows):
        z = plain.logits(params, table.images(rows))
        return plain.softmax(z) if kind == "kl" else z

    heard = [k for k in own if private(state, k)["participations"] > 0] or list(own)
    targets = [np.mean([answer(own[k], rows) for k in heard], 0) for rows in batches]
    for one in members:
        params, rate = own[one.number], one.rate(FLOATS)
        tx = txs.make(rate)
        for _ in range(hparams.get("digest_epochs", 1)):
            for images, target in zip(batches, targets, strict=True):

                def of_logits(z, target=target):
                    return of_gap(kind, z, target)

                grads = plain.gradients(params, table.images(images), of_logits)
                params = tx.step(params, grads)
        own[one.number] = one.train(params, txs.of(one.number, rate))
    return own


def of_gap(kind, z, target):
    """Gradient of the distance to the consensus to the logits."""
    if kind == "kl":
        return (plain.softmax(z) - target) / len(z)
    return np.sign(z - target) / z.size


def check(found, state, expected):
    """The round's clients are as expected, all others bitwise as they were."""
    for number in range(5):
        if number in expected:
            got = layers_of(found, number)
            # Adam divides by roots that may be small.
            chex.assert_trees_all_close(got, expected[number], rtol=1e-3, atol=2e-5)
            assert plain.differs(got, layers_of(state, number), 1e-3)
        else:
            chex.assert_trees_all_equal(private(found, number), private(state, number))


@pytest.mark.parametrize("kind", ["mae", "kl"])
def test_consensus_gap(kind):
    """The distance by hand, its gradient against the reference's, no padding."""
    gen = np.random.default_rng(0)
    z, target = gen.normal(size=(2, 4, 3))
    target = plain.softmax(target)
    expected = {
        "mae": np.abs(z - target).mean(),
        "kl": (target * np.log(target / plain.softmax(z))).sum(-1).mean(),
    }[kind]
    mask = jnp.arange(5) < 4

    def gap(z):
        padded = jnp.concatenate([z, jnp.full((1, 3), jnp.nan)])
        other = jnp.concatenate([jnp.float32(target), jnp.zeros((1, 3))])
        return fedmd.consensus_gap(kind, padded, other, mask)

    found, slope = jax.value_and_grad(gap)(jnp.float32(z))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    hand = of_gap(kind, z, target)
    np.testing.assert_allclose(slope, hand, rtol=1e-4, atol=1e-6)


def test_rounding_is_no_gap():
    """Equal models, whose mean differs by rounding, do not move in the first round."""
    z, mask = jnp.float32([[3.0, -2.0, 0.5]]), jnp.array([True])
    slope = jax.grad(fedmd.consensus_gap, argnums=1)
    assert not slope("mae", z, z + 1e-6, mask).any()
    assert slope("mae", z, z + 1e-3, mask).all()


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([3, 3, 3], [0.5, 0, 0.5]),
        ([1, 3, 2], [0, 0, 1]),
        ([1, 1, 1], [0.5, 0, 0.5]),
    ],
)
def test_speaking(taken, expected, problem):
    """Section 1.6: newcomers are left out unless all are new; padding never counts."""
    mask = np.array([True, False, True])
    cohort = problem.cohort(1).replace(row_mask=mask)
    np.testing.assert_allclose(
        fedmd.consensus_weights(cohort, np.array(taken)), expected
    )


@pytest.mark.parametrize("name", STRUCTURES)
def test_rounds_equal_a_numpy_reference(name, run, given, problem, task, cohort_at):
    """Number 15: both groups learn; the consensus is the plain mean over both.

    All losses and digest epochs; also 18 and 23: absent clients, bytes.
    """
    state, table, taken = given(name=name), problem.table, np.full(5, 3)
    txs = optimizers(STRUCTURES[name])

    def twice(hparams):
        txs = optimizers(hparams)
        return [reference(state, cohort_at(1), table, hparams, txs) for _ in range(2)]

    plain.assert_matters(twice, STRUCTURES[name], MATTERS[name], 1e-3)
    for round in (1, 2, 3):
        cohort = cohort_at(round)
        assert set(GROUP[cohort.client_id]) == {0, 1}
        expected = reference(state, cohort, table, STRUCTURES[name], txs)
        after, metrics, sent = run(name, state, cohort)
        check(after, state, expected)
        chosen = np.isin(np.arange(5), cohort.client_id)
        taken += chosen
        for number in range(5):
            assert private(after, number)["participations"] == taken[number]
        total, count = metrics["train_loss"]
        examples = 2 * table.train.count[chosen].sum()
        assert np.isfinite(total) and int(count) == examples
        state = after
    assert int(after.round) == 4 and after.server == ()

    made = fedmd.make(fedmd.HParams(batch_size=5, **STRUCTURES[name]), task)
    plain.assert_both_ways(made, sent, STRUCTURES[name].get("public_examples", 12) * 16)
    assert made.ships_proxy == "unlabelled" and made.server is None


@pytest.mark.parametrize(
    ("name", "new"),
    # One voice alone is its own consensus: for mae the sign of rounding errors.
    [("kl", (1,)), ("kl", (0, 2)), ("mae", (0, 1, 2))],
)
def test_newcomers_are_not_heard(name, new, run, given, problem, cohort_at):
    """Section 1.6: first participations count only if all clients are new."""
    cohort = cohort_at(1)
    newcomers = [int(cohort.client_id[row]) for row in new]
    counts = [0 if number in newcomers else 2 for number in range(5)]
    state, table = given(counts, name=name), problem.table
    after, _, _ = run(name, state, cohort)
    check(after, state, reference(state, cohort, table, STRUCTURES[name]))


def moved(state, number):
    """The state with another client `number`."""
    clients = list(state.clients)
    group, slot = slot_of(number)
    own = clients[group]["own"]
    own = plain.replaced(own, slot, plain.perturbed(own))
    clients[group] = clients[group] | {"own": own}
    return state.replace(clients=tuple(clients))


def test_who_is_heard(run, given, cohort_at):
    """Newcomers and absent clients reach nobody; the others do."""
    cohort = cohort_at(1)
    first, second, third = (int(k) for k in cohort.client_id)
    state = given([0 if number == first else 2 for number in range(5)])
    plainly, _, _ = run("kl", state, cohort)
    other, _, _ = run("kl", moved(state, first), cohort)
    for number in (second, third):
        chex.assert_trees_all_equal(private(plainly, number), private(other, number))
    other, _, _ = run("kl", moved(state, second), cohort)
    assert plain.differs(layers_of(plainly, third), layers_of(other, third), 1e-5)
    for absent in set(range(5)) - {first, second, third}:
        other, _, _ = run("kl", moved(state, absent), cohort)
        chex.assert_trees_all_equal(private(plainly, third), private(other, third))


def test_public_images_are_drawn_anew(problem, run, given, cohort_at):
    """`public_examples` images a round: others next time, no other image matters."""
    table, seen = problem.table, []
    for round in (1, 2):
        state, cohort = given(round=round), cohort_at(1)
        rows = np.concatenate(public_rows(state, table, 7))
        assert len(set(rows)) == 7 and set(rows) <= set(table.proxy)
        plainly, _, _ = run("kl", state, cohort)
        for chosen, matters in ((rows, True), (np.setdiff1d(table.proxy, rows), False)):
            image = table.image.copy()
            image[chosen] = 255 - image[chosen]
            changed = problem.data.replace(image=jnp.asarray(image))
            other, _, _ = run("kl", state, cohort, changed)
            assert plain.differs(every(plainly), every(other), 1e-6) == matters
        seen.append(set(rows))
    assert seen[0] != seen[1]


def test_labels_of_public_images_are_not_used(problem, run, given):
    """The public images have no labels for anybody."""
    state, rows = given(), problem.data.partition.proxy
    label = problem.data.label.at[rows].set((problem.data.label[rows] + 1) % 4)
    first, _, _ = run("kl", state)
    second, _, _ = run("kl", state, data=problem.data.replace(label=label))
    chex.assert_trees_all_equal(first.clients, second.clients)


def test_everyone_serves_itself(task, problem, given):
    """Section 1.0: theta^n for all clients, one group for each architecture."""
    made, state = fedmd.make(fedmd.HParams(), task), given()
    groups = made.serving(state, None, problem.data)
    assert [group.model.name for group in groups] == list(GROUPS)
    for number, one in enumerate(plain.served(made, state)):
        chex.assert_trees_all_equal(one, private(state, number)["own"])


def test_groups_start_from_one_model_each(task, problem):
    """Section 1.0: a common initialisation; nobody has taken part."""
    made = fedmd.make(fedmd.HParams(), task)
    state = jax.jit(made.init)(problem.data, jax.random.key(0))
    assert len(state.clients) == len(GROUPS)
    for group in state.clients:
        assert all((leaf == leaf[:1]).all() for leaf in jax.tree.leaves(group))
        assert not np.asarray(group["participations"]).any()


@pytest.mark.parametrize("given_examples, used", [(5000, 12), (12, 12), (7, 7), (1, 1)])
def test_bytes_of_the_subset(given_examples, used, task):
    """Section 1.6: A * C floats up and down, A at most the public images there are."""
    made = fedmd.make(fedmd.HParams(public_examples=given_examples), task)
    assert [kind.num_bytes for kind in made.messages] == [used * 4 * 4] * 2
    assert [kind.direction for kind in made.messages] == ["up", "down"]
    assert bool(made.unused) == (given_examples > 12)


def test_public_images_are_needed(task):
    """One line that names the two flags."""
    with pytest.raises(ValueError, match="--public_set.*--proxy_fraction"):
        fedmd.make(fedmd.HParams(), task._replace(num_proxy=0))


def test_architectures_go_round(blobs, monkeypatch):
    """--client_model=a,b: client k has the k-th name, going round."""
    monkeypatch.setitem(models.MODELS, "narrow", toys.narrow)
    made = build.experiment(
        dataset=blobs,
        algo="fedmd",
        preset="none",
        num_clients=5,
        clients_per_round=3,
        proxy_fraction=0.1,
        client_model="mlp,narrow",
        devices=1,
    )
    np.testing.assert_array_equal(made.task.group_of_client, GROUP)
    assert [model.name for model in made.task.client_models] == ["mlp", "narrow"]


def test_digests_are_clipped_too(problem):
    """Not only the steps on a client's own rows."""
    hparams = fedmd.HParams(batch_size=5, client_lr=0.1, clip_norm=1e-6)
    made = fedmd.make(hparams, problem.task_of())
    state = made.init(problem.data, jax.random.key(3))
    moved = plain.perturbed(state.clients[0]["own"])
    state = state.replace(clients=(state.clients[0] | {"own": moved},))
    cohort = plain.planner(problem.data, made.plans)(1)
    after, *_ = jax.jit(made.round)(state, cohort, problem.data)
    chex.assert_trees_all_close(
        plain.host(after.clients[0]["own"]), moved, rtol=0, atol=1e-5
    )
