"""CDKT against numpy, and its properties one by one."""

import chex
import jax
import numpy as np
import pytest

import models
from algorithms import cdkt
from tests.algorithms import conftest, plain

# One structure per transfer mode; together every distance has both roles.
STRUCTURES = {
    "rep": {"transfer": "rep", "server_distance": "kl", "client_distance": "norm"},
    "full": {
        "transfer": "full",
        "server_distance": "norm",
        "client_distance": "js",
        "js_form": "reversed",
    },
    "repfull": {
        "transfer": "repfull",
        "server_distance": "js",
        "client_distance": "kl",
    },
}
CODE = {
    "transfer": "repfull",
    "server_distance": "kl",
    "client_distance": "norm",
    "proxy_pairing": "truncate",
    "ensemble": "code_last",
}
FLOATS = {
    "client_lr": 0.05,
    "server_lr": 0.04,
    "client_distill_weight": 0.3,
    "server_distill_weight": 0.4,
    "label_mix": 0.3,
    "temperature": 2.0,
}
# Would make another result, as the reference shows.
MATTERS = {
    "code": {
        "transfer": "rep",
        "server_distance": "norm",
        "client_distance": "js",
        "proxy_pairing": "mod",
        "ensemble": "mean_selected",
        "label_mix": 0.6,
        "temperature": 1.0,
        "client_distill_weight": 0.6,
        "server_distill_weight": 0.8,
    },
    "repfull": {"transfer": "full", "js_form": "reversed"},
}
every_transfer = pytest.mark.parametrize("transfer", STRUCTURES)


def of_distance(kind, student, target, temperature, js_form="true"):
    """Gradient of a distance to the student."""
    if kind == "norm":
        return (student - target) / np.sqrt(((student - target) ** 2).sum())
    if kind == "kl":
        return plain.of_divergence(student, target, temperature)
    p, q = plain.softmax(student), plain.softmax(target)
    m = (p + q) / 2
    slope = np.log(p / m)
    if js_form == "reversed":
        slope = np.log(m / np.sqrt(p * q)) - m / p
    return 0.5 * p * (slope - (p * slope).sum(-1, keepdims=True)) / len(student)


def reference(state, cohort, table, values):
    """Section 1A's round with Python loops."""
    proxy = table.batches(5)
    mix, tau = values["label_mix"], values["temperature"]
    use_rep = values["transfer"] in ("rep", "repfull")
    use_full = values["transfer"] in ("full", "repfull")
    form = values.get("js_form", "true")

    def adjusted(logits, rows):
        return mix * np.eye(logits.shape[1])[table.label[rows]] + (1 - mix) * logits

    def answers(params):
        return [plain.activations(params, table.images(rows))[-2:] for rows in proxy]

    def gradients(params, rows, embedding, logits, kind, weight, by_logits, hard):
        """Of the distances to embeddings and logits, and of the labels if `hard`."""
        acts = plain.activations(params, table.images(rows))
        slopes = {len(params): 0.0 * acts[-1]}
        if hard:
            slopes[len(params)] = plain.cross_entropy(table.label[rows])(acts[-1])
        if by_logits:
            target = adjusted(logits, rows)
            slopes[len(params)] += weight * of_distance(
                kind, acts[-1], target, tau, form
            )
        if use_rep:
            slope = of_distance(kind, acts[-2], embedding, tau, form)
            slopes[len(params) - 1] = weight * slope
        return plain.backward(params, acts, slopes)

    server = plain.server_layers(state)
    known, kind = answers(server), values["client_distance"]
    is_cut = values.get("proxy_pairing") == "truncate"
    trained = {}
    for one in plain.clients(state, cohort, table):
        if is_cut:
            one.cohort = plain.cut(cohort, len(proxy))
        pairs = iter(range(int(one.plan().num_steps)))

        def extra(params, position, rows, pairs=pairs):
            pair = next(pairs) % len(proxy)
            alpha = values["client_distill_weight"]
            return gradients(
                params, proxy[pair], *known[pair], kind, alpha, True, hard=False
            )

        tx = plain.Sgd(values["client_lr"])
        trained[one.number] = one.train(one.own, tx, extra=extra)

    told = [answers(params) for params in trained.values()]
    if values.get("ensemble") == "code_last":
        share = len(trained) / values["num_eligible"]
        last = answers(trained[max(trained)])
        teacher = [[share * output for output in batch] for batch in last]
    else:
        teacher = [
            [np.mean([one[b][output] for one in told], axis=0) for output in (0, 1)]
            for b in range(len(proxy))
        ]
    beta, kind = values["server_distill_weight"], values["server_distance"]
    tx = plain.Sgd(values["server_lr"])
    for _ in range(2):
        for rows, target in zip(proxy, teacher, strict=True):
            grads = gradients(server, rows, *target, kind, beta, use_full, hard=True)
            server = tx.step(server, grads)
    return server, trained


@pytest.mark.parametrize("name", [*STRUCTURES, "code"])
def test_rounds_equal_a_numpy_reference(name, compiled, start, problem):
    """Tests 19 to 28: section 1A's rounds, all modes, distances, the code's forms."""
    structure = {**STRUCTURES, "code": CODE | {"num_eligible": 4}}[name]
    run, state = compiled("cdkt", floats=FLOATS, **structure), start()
    values, more = structure | FLOATS, {"changes": MATTERS.get(name, {}), "rtol": 1e-4}
    for step in plain.follow(run, reference, state, problem, values, **more):
        steps = step.cohort.plans["local"].num_steps
        assert max(steps) > 3 and len(set(steps)) > 1  # more than proxy batches


@pytest.mark.parametrize(
    ("ensemble", "expected"), [("mean_selected", 3.0), ("code_last", 2 / 5 * 4)]
)
def test_teacher_by_hand(ensemble, expected, problem):
    """Test 21: the mean of the real rows, or n / K of the highest id's; no nan."""
    cohort = problem.cohort(1).replace(
        client_id=np.array([3, 5, 1]), row_mask=np.array([True, False, True])
    )
    answers = np.float32([4, np.nan, 2])[:, None, None] * np.ones((3, 2, 2), np.float32)
    found = cdkt.teacher(answers, cohort, ensemble, 5)
    np.testing.assert_allclose(found, np.full((2, 2), expected), rtol=1e-6)


@every_transfer
def test_no_transfer_is_exact(transfer, compiled, start, problem):
    """Test 19: with alpha = beta = 0 no option of the transfer has any effect.

    In the first round alpha is masked by `--warm_rounds=1`: No Transfer again.
    """
    run, cohort = compiled("cdkt", **STRUCTURES[transfer]), problem.cohort(1)
    off = {"client_distill_weight": 0.0, "server_distill_weight": 0.0}
    first, _, _ = run(start(round=0), cohort, **off)
    other, _, _ = run(start(round=0), cohort, **off, label_mix=1.0, temperature=0.7)
    warm, _, _ = run(
        start(round=0), cohort, client_distill_weight=0.9, server_distill_weight=0.0
    )
    later, _, _ = run(start(round=1), cohort, **off)
    for state in (other, warm, later):
        chex.assert_trees_all_equal(state.clients, first.clients)
        chex.assert_trees_all_equal(state.server, first.server)
    on, _, _ = run(start(round=1), cohort, client_distill_weight=0.9)
    assert plain.differs(on.clients, first.clients, 1e-4)
    assert plain.differs(on.server, first.server, 1e-4)


@every_transfer
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_equal_student_and_teacher_give_no_nan(transfer, weight, compiled, start):
    """Test 19: the gradient of sqrt at 0 must not leak, even times 0.

    All models start equal; with label_mix = 0 and client_lr = 0 the first step of
    clients and server is at distance exactly 0.
    """
    for client_lr in (0.0, 0.05):
        state, metrics, _ = compiled("cdkt", **STRUCTURES[transfer])(
            start(equal=True),
            client_lr=client_lr,
            label_mix=0.0,
            client_distill_weight=weight,
            server_distill_weight=weight,
        )
        chex.assert_tree_all_finite((state.clients, state.server, metrics))


@every_transfer
def test_weight_zero_cuts_the_direction_off(transfer, compiled, start):
    """Test 20: alpha = 0 hides the server from clients, beta = 0 them from it."""
    run = compiled("cdkt", **STRUCTURES[transfer])
    state = start()
    moved_server = state.replace(server=plain.perturbed(state.server))
    moved_clients = state.replace(clients=plain.perturbed(state.clients))

    first, _, _ = run(state, client_distill_weight=0.0)
    other, _, _ = run(moved_server, client_distill_weight=0.0)
    chex.assert_trees_all_equal(first.clients, other.clients)
    first, _, _ = run(state, server_distill_weight=0.0)
    other, _, _ = run(moved_clients, server_distill_weight=0.0)
    chex.assert_trees_all_equal(first.server, other.server)


def test_heterogeneous_clients_learn(compiled, start):
    """Test 27: other architectures work where embeddings and classes agree."""
    run = compiled("cdkt", clients="deeper", **STRUCTURES["rep"])
    state = start(clients="deeper")
    after, _, _ = run(state, **FLOATS)
    chex.assert_tree_all_finite(after.clients)
    assert plain.differs(after.clients, state.clients, 1e-3)
    moved = state.replace(clients=plain.perturbed(state.clients))
    assert plain.differs(after.server, run(moved, **FLOATS)[0].server)
    moved = state.replace(server=plain.perturbed(state.server))
    assert plain.differs(after.clients, run(moved, **FLOATS)[0].clients)


def test_other_embedding_width_is_refused(problem):
    """Test 27: raises, naming the flag and both widths."""
    with pytest.raises(ValueError, match="--client_model=wide.* 5, --model=tiny of 6"):
        cdkt.make(cdkt.HParams(), problem.task_of(clients="wide"))
    with pytest.raises(ValueError, match="--proxy_fraction"):
        cdkt.make(cdkt.HParams(), problem.task_of(num_proxy=0))


def test_every_forward_has_its_own_noise(problem, start):
    """Section 2: of each client's steps, the proxy batch beside each, all teachers'
    answers (`--teacher_mode=train`) and the server's steps.
    """
    model, seen = conftest.watched()
    task = problem.task_of(model, chunk=1)
    made = cdkt.make(cdkt.HParams(batch_size=5, teacher_mode="train"), task)
    cohort, batches = problem.cohort(1), 3
    jax.block_until_ready(jax.jit(made.round)(start(), cohort, problem.data))
    jax.effects_barrier()
    of_clients = 2 * int(cohort.plans["local"].num_steps.sum()) + 3 * batches
    of_server = cdkt.HParams().server_epochs * batches
    assert len(set(seen)) == of_clients + of_server


@pytest.mark.parametrize(
    ("transfer", "up", "down"),
    [("rep", 6, 4 + 6), ("full", 4, 4), ("repfull", 4 + 6, 4 + 6)],
)
def test_traffic(transfer, up, down, compiled, start, problem):
    """Test 33: P * (C | d | C + d) * 4 bytes up and down for each selected client."""
    made = cdkt.make(cdkt.HParams(transfer=transfer), problem.task_of())
    state, _, sent = compiled("cdkt", **STRUCTURES[transfer])(start(), **FLOATS)
    expected = {"bytes_up": 12 * up * 4, "bytes_down": 12 * down * 4}
    assert plain.sent_bytes(made, sent, 3) == [expected] * 3
    assert int(state.round) == 2


@pytest.mark.parametrize(
    ("weights", "up", "down"), [((0.0, 0.4), 6, 0), ((0.3, 0.0), 0, 10), ((0, 0), 0, 0)]
)
def test_what_a_weight_of_0_leaves_without_use_is_not_sent(
    weights, up, down, compiled, start, problem
):
    """As in No Transfer, which is both."""
    names = "client_distill_weight", "server_distill_weight"
    given = FLOATS | dict(zip(names, weights, strict=True))
    made = cdkt.make(cdkt.HParams(), problem.task_of())
    _, _, sent = compiled("cdkt", **STRUCTURES["rep"])(start(), **given)
    expected = {"bytes_up": 12 * up * 4, "bytes_down": 12 * down * 4}
    assert plain.sent_bytes(made, sent, 3) == [expected] * 3


@pytest.mark.parametrize(
    ("name", "shape", "num_proxy", "full", "rep"),
    [
        ("cdkt_mnist", (28, 28, 1), 355, 0.0142, 0.727),
        ("cdkt_cifar", (32, 32, 3), 4200, 0.168, 1.075),
    ],
)
def test_traffic_of_the_papers_settings(name, shape, num_proxy, full, rep, problem):
    """Section 1A and test 33: MB per client and round on MNIST and CIFAR-10."""
    model, more = models.MODELS[name](10), {"num_classes": 10, "num_proxy": num_proxy}
    task = problem.task_of(model, example_shape=shape, **more)
    made = cdkt.make(cdkt.HParams(), task)
    size = {kind.name: kind.num_bytes / 1e6 for kind in made.messages}
    for side in ("server", "client"):
        np.testing.assert_allclose(size[f"{side} logits"], full, rtol=2e-3)
        np.testing.assert_allclose(size[f"{side} embeddings"], rep, rtol=2e-3)
    directions = {kind.name.split()[0]: kind.direction for kind in made.messages}
    assert directions == {"server": "down", "client": "up"}
