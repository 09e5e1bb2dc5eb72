"""FedICT against numpy: D(w), the server's pass and the clients' distillation.

Numbers are those of the specification's section 5.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from algorithms import fedict
from fedjax_pfl import rng, traffic
from tests.algorithms import conftest, plain

STRUCTURES = {
    "momentum": {
        "local_epochs": 2,
        "distill_epochs": 1,
        "server_epochs": 2,
        "client_momentum": 0.5,
        # Would move the server's first layers if they were trained.
        "weight_decay": 0.1,
    },
    "plain": {"local_epochs": 1, "distill_epochs": 2, "server_epochs": 1},
}
FLOATS = {
    "client_lr": 0.1,
    "client_lr_decay": 0.5,
    "distill_weight": 0.7,
    "temperature": 2.0,
    "prior_temperature": 0.4,
}
SHARED = ("client_momentum", "weight_decay")
both = pytest.mark.parametrize("name", STRUCTURES)
# Would make another result, as the reference shows.
MATTERS = {"distill_weight": 1.4, "temperature": 1.0, "prior_temperature": 3.0}
MATTERS |= dict.fromkeys(SHARED, 0.0)


def make(name, problem, **changed):
    hparams = fedict.HParams(batch_size=5, **(STRUCTURES[name] | changed))
    return fedict.make(hparams, problem.task_of())


@pytest.fixture(scope="session")
def cohorts(problem):
    """Cohort of round 1 for each structure; three clients, one is alone in a batch."""
    return {
        name: plain.planner(problem.data, make(name, problem).plans)(1)
        for name in STRUCTURES
    }


@pytest.fixture(scope="session")
def run(compiled, cohorts):
    """`(name, state, cohort) -> round's result`, compiled by name."""

    def one_round(name, state, cohort=None):
        cohort = cohorts[name] if cohort is None else cohort
        return compiled("fedict", **STRUCTURES[name])(state, cohort, **FLOATS)

    return one_round


@pytest.fixture(scope="session")
def given(start, problem):
    """Makes states whose clients, server and label frequencies are all different."""
    table = problem.table
    counts = np.stack(
        [np.bincount(table.label[table.owned(k)], minlength=4) for k in range(5)]
    ).astype(np.float32)

    def make(joined=(0, 0, 0, 0, 0), skew=True, seed=0):
        # The clients' own labels are nearly balanced: skewed for the tests.
        frequency = counts * (1 + 8 * np.eye(5, 4, dtype=np.float32) * skew)
        frequency /= frequency.sum(1, keepdims=True)
        state = start(seed=seed)
        server = {
            "model": state.server,
            "frequency": np.array([0.4, 0.3, 0.2, 0.1], np.float32),
        }
        clients = {
            "own": state.clients,
            "frequency": frequency,
            "has_joined": np.array(joined, bool),
        }
        return state.replace(server=server, clients=clients)

    return make


def gap_to_logits(student, teacher, weight, tau):
    """Gradient of D(w) to the student's logits.

    D = mean_b T^2 sum_c w_c q_c (log q_c - log p_c), and d log p_c / d z_k is
    ([c = k] - p_k) / T.
    """
    q, p = plain.softmax(teacher / tau), plain.softmax(student / tau)
    weighted = weight * q
    mass = weighted.sum(-1, keepdims=True)
    return tau * (mass * p - weighted) / len(student)


def gap(student, teacher, weight, tau):
    """D(w)."""
    q, p = plain.softmax(teacher / tau), plain.softmax(student / tau)
    return tau**2 * (weight * q * np.log(q / p)).sum(-1).mean()


def server_weight(own, everyone):
    """LKA by similarity: the cosine, for all classes."""
    return own @ everyone / np.sqrt((own**2).sum() * (everyone**2).sum())


def order_of(state, cohort):
    """The clients in the order of the server's draws."""
    key = rng.stream(state.key, "engine.order", jnp.asarray(state.round))
    ids = [int(k) for k in cohort.client_id]
    return sorted(
        ids, key=lambda k: float(jax.random.uniform(jax.random.fold_in(key, k)))
    )


def reference(state, cohort, table, values, order=None, shift=0):
    """Section 1.9, (i) to (v). `shift` misaligns logits."""
    tau, alpha = values["temperature"], values["distill_weight"]
    deep, decay = [False, True, True], values.get("weight_decay", 0.0)
    frequency = np.float64(plain.host(state.clients["frequency"]))
    common = np.float64(plain.host(state.server["frequency"]))
    members = {one.number: one for one in plain.clients(state, cohort, table)}

    def features(params, rows):
        return plain.activations(params, table.images(rows))[1]

    own, logits = {}, {}
    for number, one in members.items():
        own[number] = one.train(one.own, one.sgd(values, decay=decay))
        logits[number] = plain.logits(own[number], table.images(table.owned(number)))

    server, tx = plain.server_layers(state), one.sgd(values, decay=decay)
    for number in order or order_of(state, cohort):
        weight = server_weight(frequency[number], common)
        for position, rows, _ in members[number].steps("server"):
            teacher, label = logits[number][position], table.label[rows]

            def of_logits(z, teacher=teacher, label=label, weight=weight):
                hard = plain.cross_entropy(label)(z)
                return gap_to_logits(z, teacher, weight, tau) + alpha * hard

            h = features(own[number], rows)
            server = tx.step(server, plain.gradients(server, h, of_logits, 1), deep)

    for number, params in own.items():
        rows = table.owned(number)
        known = plain.logits(server, features(params, rows), 1)
        known = np.roll(known, shift, axis=0)
        weight = frequency[number] / values["prior_temperature"]

        def extra(params, position, rows, known=known, weight=weight):
            return plain.gradients(
                params,
                table.images(rows),
                lambda z: alpha * gap_to_logits(z, known[position], weight, tau),
            )

        one = members[number]
        tx = one.sgd(values, decay=decay)
        own[number] = one.train(params, tx, "distill", extra=extra)
    return server, own


@pytest.mark.parametrize("weight", [[1.0, 1.0, 1.0], [0.2, 3.0, 0.7]])
def test_weighted_gap(weight):
    """D(w) by hand; its gradient by hand against differences of D(w); no padding."""
    gen = np.random.default_rng(0)
    student, teacher = gen.normal(size=(2, 4, 3))
    weight, step = np.array(weight), 1e-6
    found = gap_to_logits(student, teacher, weight, 2.5)
    for index in np.ndindex(4, 3):
        move = np.zeros((4, 3))
        move[index] = step
        up, down = (gap(student + s * move, teacher, weight, 2.5) for s in (1, -1))
        np.testing.assert_allclose(found[index], (up - down) / (2 * step), atol=1e-7)

    def weighted(z):
        z, target = (
            jnp.concatenate([jnp.float32(one), jnp.full((1, 3), jnp.inf)])
            for one in (z, teacher)
        )
        mask = jnp.arange(5) < 4
        return fedict.weighted_gap(z, target, mask, jnp.float32(weight), 2.5)

    value = weighted(student)
    np.testing.assert_allclose(value, gap(student, teacher, weight, 2.5), rtol=1e-5)
    slope = jax.grad(weighted)(jnp.float32(student))
    np.testing.assert_allclose(slope, found, rtol=1e-4, atol=1e-6)


def test_weights_by_hand():
    """FPKD: d^n / T. LKA: the cosine of d^n and d^g."""
    own, common = np.float32([0.6, 0.2, 0.2]), np.float32([0.2, 0.2, 0.6])
    found = fedict.client_weight(own, 0.4)
    np.testing.assert_allclose(found, [1.5, 0.5, 0.5], rtol=1e-6)
    for weight in (server_weight, fedict.server_weight):
        np.testing.assert_allclose(weight(own, common), 28 / 44, rtol=1e-6)
        np.testing.assert_allclose(weight(own, own), 1, rtol=1e-6)
        assert np.isfinite(weight(own, np.full(3, 1e-30)))


def test_classes_that_a_client_lacks_do_not_pull_it():
    """FPKD: weight 0; D(d^n / T) is least at d^n q, the teacher seen through them.

    A plain distance would draw the student towards the classes that it lacks.
    """
    gen = np.random.default_rng(1)
    own, mask = np.float32([0.5, 0, 0.3, 0, 0.2]), np.ones(3, bool)
    weight = fedict.client_weight(own, 3.0)
    np.testing.assert_array_equal(weight == 0, own == 0)

    def slope(student, teacher, weight):
        def gap(z):
            return fedict.weighted_gap(z, jnp.float32(teacher), mask, weight, 2.0)

        return np.asarray(jax.grad(gap)(jnp.float32(student)))

    student, teacher = gen.normal(size=(2, 3, 5))
    found = slope(student, teacher, weight)
    assert (found[:, own == 0] > 0).all()  # their logits only fall
    assert (slope(student, teacher, jnp.ones(()))[:, own == 0] < 0).any()
    # What the teacher thinks of classes that are not owned changes no direction.
    other = teacher + 3 * (own == 0)
    apart = slope(student, other, weight)
    scale = np.linalg.norm(apart, axis=1) / np.linalg.norm(found, axis=1)
    np.testing.assert_allclose(apart, found * scale[:, None], rtol=1e-4, atol=1e-6)
    # At temperature 2 the softmax of 2 log(d^n q) is d^n q, normalised.
    best = 2 * np.log(np.maximum(own * plain.softmax(teacher / 2), 1e-30))
    np.testing.assert_allclose(slope(best, teacher, weight), 0, atol=1e-6)


@both
def test_rounds_equal_a_numpy_reference(name, run, given, problem):
    """Section 1.9 (i) to (v), with all options; and 18: absent clients, flags.

    Number 16, alignment: logits that came back in other rows give other clients.
    """
    cohort_at = plain.planner(problem.data, make(name, problem).plans)
    values, state = STRUCTURES[name] | FLOATS, given()
    one_round, more = functools.partial(run, name), {"cohort_at": cohort_at}
    if name == "momentum":
        more["changes"] = MATTERS
    steps = plain.follow(one_round, reference, state, problem, values, **more)
    for step in steps:
        assert np.asarray(step.after.clients["has_joined"])[list(step.own)].all()
        new, old = (plain.server(one).params for one in (step.after, step.before))
        chex.assert_trees_all_equal(plain.host(new[0]), plain.host(old[0]))
        assert all(plain.differs(new[i], old[i], 1e-3) for i in (1, 2))
    for part in ("clients", "server"):
        new, old = (getattr(one, part)["frequency"] for one in (step.after, state))
        np.testing.assert_array_equal(new, old)
    assert np.isfinite(step.metrics["train_loss"][0])
    given = step.before, step.cohort, problem.table, values
    _, misaligned = reference(*given, shift=1)
    for number, layers in step.own.items():
        assert plain.differs(misaligned[number], layers, 1e-3)


def test_the_servers_order_matters(run, given, cohorts, problem):
    """Number 16: the sequential pass depends on its order, drawn by client."""
    state, table, cohort = given(), problem.table, cohorts["momentum"]
    drawn = order_of(state, cohort)
    after, _, _ = run("momentum", state)
    found = plain.server_layers(after)
    turned, values = drawn[1:] + drawn[:1], STRUCTURES["momentum"] | FLOATS
    other, _ = reference(state, cohort, table, values, order=turned)
    assert plain.differs(found, other, 1e-3)
    orders = set()
    for seed in range(8):
        one = state.replace(key=jax.random.key(seed))
        orders.add(tuple(order_of(one, cohort)))
    assert len(orders) > 2


@both
def test_equal_frequencies_give_the_plain_distance(name, run, given):
    """Number 16: d^n = d^g: LKA's weight is 1, whatever the frequencies are."""
    results = []
    for common in ([0.25] * 4, [0.7, 0.1, 0.1, 0.1]):
        state, common = given(), np.array(common, np.float32)
        clients = state.clients | {"frequency": np.tile(common, (5, 1))}
        server = state.server | {"frequency": common}
        after, _, _ = run(name, state.replace(clients=clients, server=server))
        results.append(plain.host(plain.server(after)))
    chex.assert_trees_all_close(*results, atol=1e-6)
    after, _, _ = run(name, given())
    assert plain.differs(results[0], plain.server(after), 1e-4)


def test_what_is_uploaded(given, start, problem):
    """Features are in eval mode, of images as they are, also with --augment.

    The only client does not train; what is left to chance is an augmentation.
    """
    task = problem.task_of("with_norm")
    made = fedict.make(fedict.HParams(batch_size=5), task)
    cohort = plain.cut(plain.planner(problem.data, made.plans, 1)(1), 0)
    cohort = plain.cut(cohort, 0, "distill")
    data, run = problem.data.replace(augment="crop_flip"), jax.jit(made.round)
    state, net = given(), start("with_norm")
    server = state.server | {"model": net.server}

    def after(size, key=3):
        clients = state.clients | {"own": plain.sound(net.clients, size)}
        begin = state.replace(server=server, clients=clients, key=jax.random.key(key))
        return run(begin, cohort, data)[0].server["model"].params

    found = after(1.0)
    assert plain.differs(found, net.server.params)
    assert plain.differs(found, after(0.25), 1e-5)
    chex.assert_trees_all_close(found, after(1.0, key=4), rtol=1e-6)


def test_label_frequencies(problem):
    """Section 1.9: d^n of a client's train rows, d^g of all of them; common init."""
    made, table = make("momentum", problem), problem.table
    state = jax.jit(made.init)(problem.data, jax.random.key(0))
    labels = [table.label[table.owned(k)] for k in range(5)]
    found = [*state.clients["frequency"], state.server["frequency"]]
    for one, label in zip(found, [*labels, np.concatenate(labels)], strict=True):
        expected = np.bincount(label, minlength=4) / len(label)
        np.testing.assert_allclose(one, expected, rtol=1e-6)


@both
def test_bytes(name, run, given, cohorts, problem):
    """Number 23: up K (s_cut + C) floats, K labels and once C; down K C floats."""
    joined = np.zeros(5, bool)
    joined[cohorts[name].client_id[1]] = True
    _, _, sent = run(name, given(joined))
    made, count = make(name, problem), problem.data.partition.train.count
    found = plain.sent_bytes(made, sent, 3)
    assert len(found) == len(cohorts[name].client_id) == 3
    for row, number in enumerate(cohorts[name].client_id):
        size = int(count[number])
        once = 0 if row == 1 else 4 * 4
        assert found[row] == {
            "bytes_up": size * ((8 + 4) * 4 + 1) + once,
            "bytes_down": size * 4 * 4,
        }


def test_bytes_of_the_papers_setting(problem):
    """Section 1.9: M1 on CIFAR-10, K = 800: 6.586 MB up, .032 MB down."""
    model, shape = models.MODELS["m1"](10), (32, 32, 3)
    task = problem.task_of(model, num_classes=10, example_shape=shape)
    made = fedict.make(fedict.HParams(), task)
    total = traffic.cumulative(np.array([800, 0, 800]), made.messages)
    np.testing.assert_allclose(total["bytes_up"], 6.586e6, rtol=2e-4)
    np.testing.assert_allclose(total["bytes_down"], 0.032e6, rtol=1e-6)


def test_a_layer_must_be_left_for_the_server(problem):
    """One line with the flag and what to take."""
    flat = conftest.network("flat", widths=())
    with pytest.raises(ValueError, match="--model=flat.*one layer"):
        fedict.make(fedict.HParams(), problem.task_of(flat))
