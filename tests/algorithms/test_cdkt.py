"""CDKT against a numpy reference, and its properties one by one."""

import chex
import jax
import numpy as np
import pytest

import models
from algorithms import cdkt
from fedjax_pfl import traffic
from launch import build

# One structure per transfer mode; together every distance has both roles.
STRUCTURES = {
    "rep": {"transfer": "rep", "server_distance": "kl", "client_distance": "norm"},
    "full": {"transfer": "full", "server_distance": "norm", "client_distance": "js"},
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
every_transfer = pytest.mark.parametrize("transfer", STRUCTURES)


def host(tree):
    """A pytree as numpy arrays, without the key."""
    return jax.tree.map(np.asarray, tree)


def client(state, number):
    """One client's parameters."""
    return host(jax.tree.map(lambda leaf: leaf[number], state.clients[0]))


def layers(params):
    """Kernel and bias of each layer in float64."""
    return [
        [np.float64(stage["trunk"][name]) for name in ("kernel", "bias")]
        for stage in host(params)
    ]


def perturbed(tree, seed=0, size=0.5):
    """Every number moved at random."""
    gen = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + np.float32(size * gen.normal(size=leaf.shape)), host(tree)
    )


def differs(first, second, by=1e-5):
    """Whether any two leaves differ."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return any(np.abs(np.asarray(a) - np.asarray(b)).max() > by for a, b in pairs)


# The reference: numpy, float64, gradients by hand.


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def activations(params, x):
    """Input, hidden layers and logits."""
    out = [x]
    for number, (kernel, bias) in enumerate(params):
        x = x @ kernel + bias
        x = x if number == len(params) - 1 else np.maximum(x, 0)
        out.append(x)
    return out


def gradients(params, acts, to_logits, to_embedding=0.0):
    """Gradients of each layer from those of the logits and of the embedding."""
    out, back = [], to_logits
    for number in reversed(range(len(params))):
        out.append([acts[number].T @ back, back.sum(0)])
        back = back @ params[number][0].T
        if number == len(params) - 1:
            back = back + to_embedding
        back = back * (acts[number] > 0)
    return out[::-1]


def of_cross_entropy(logits, label):
    return (softmax(logits) - np.eye(logits.shape[1])[label]) / len(label)


def of_distance(kind, student, target, temperature):
    """Gradient of a distance to the student."""
    if kind == "norm":
        return (student - target) / np.sqrt(((student - target) ** 2).sum())
    if kind == "kl":
        gap = softmax(student / temperature) - softmax(target / temperature)
        return temperature * gap / len(student)
    p, q = softmax(student), softmax(target)
    slope = np.log(2 * p / (p + q))
    return 0.5 * p * (slope - (p * slope).sum(-1, keepdims=True)) / len(student)


def descend(params, *steps):
    """params - sum of rate * gradient over (rate, gradients) pairs."""
    for rate, grads in steps:
        params = [
            [w - rate * g for w, g in zip(layer, grad, strict=True)]
            for layer, grad in zip(params, grads, strict=True)
        ]
    return params


def reference_round(state, cohort, data, structure, values):
    """Section 1A's round with Python loops: (client parameters by id, server's)."""
    part, labels = host(data.partition), host(data.label)
    mean, scale = host(data.mean), host(data.scale)
    image = ((np.float64(host(data.image)) - mean) * scale).reshape(len(labels), -1)
    proxy = [part.proxy[i : i + 5] for i in range(0, len(part.proxy), 5)]
    mix, tau = values["label_mix"], values["temperature"]
    use_rep = structure["transfer"] in ("rep", "repfull")
    use_full = structure["transfer"] in ("full", "repfull")

    def adjusted(logits, rows):
        return mix * np.eye(logits.shape[1])[labels[rows]] + (1 - mix) * logits

    def answers(params):
        return [activations(params, image[rows])[-2:] for rows in proxy]

    server = layers(state.server["params"])
    known = answers(server)
    alpha = values["client_distill_weight"]
    trained = {}
    for row in np.flatnonzero(cohort.row_mask):
        number, plan = int(cohort.client_id[row]), cohort.plans["local"]
        params = layers(client(state, number))
        steps = int(plan.num_steps[row])
        if structure.get("proxy_pairing") == "truncate":
            steps = min(steps, len(proxy))
        for step in range(steps):
            position = plan.position[row, step]
            rows = part.train.row[part.train.start[number] + position[position >= 0]]
            acts = activations(params, image[rows])
            private = gradients(params, acts, of_cross_entropy(acts[-1], labels[rows]))
            pair = step % len(proxy)
            acts = activations(params, image[proxy[pair]])
            embedding, logits = known[pair]
            kind = structure["client_distance"]
            target = adjusted(logits, proxy[pair])
            shared = gradients(
                params,
                acts,
                of_distance(kind, acts[-1], target, tau),
                of_distance(kind, acts[-2], embedding, tau) if use_rep else 0.0,
            )
            rate = values["client_lr"]
            params = descend(params, (rate, private), (rate * alpha, shared))
        trained[number] = params

    told = [answers(params) for params in trained.values()]
    if structure.get("ensemble") == "code_last":
        last = answers(trained[max(trained)])
        share = len(trained) / len(part.train.count)
        teacher = [[share * output for output in batch] for batch in last]
    else:
        teacher = [
            [np.mean([one[b][output] for one in told], axis=0) for output in (0, 1)]
            for b in range(len(proxy))
        ]
    for _ in range(2):
        for rows, (embedding, logits) in zip(proxy, teacher, strict=True):
            acts = activations(server, image[rows])
            to_logits, to_embedding = of_cross_entropy(acts[-1], labels[rows]), 0.0
            beta, kind = values["server_distill_weight"], structure["server_distance"]
            if use_full:
                target = adjusted(logits, rows)
                to_logits = to_logits + beta * of_distance(kind, acts[-1], target, tau)
            if use_rep:
                to_embedding = beta * of_distance(kind, acts[-2], embedding, tau)
            grads = gradients(server, acts, to_logits, to_embedding)
            server = descend(server, (values["server_lr"], grads))
    return trained, server


@pytest.mark.parametrize("name", [*STRUCTURES, "code"])
def test_round_equals_a_numpy_reference(name, compiled, start, problem):
    """Tests 19 to 28: section 1A's round, all modes, distances and the code's forms."""
    structure = {**STRUCTURES, "code": CODE}[name]
    state, cohort = start(), problem.cohort(1)
    assert cohort.plans["local"].num_steps.max() > 3  # more than proxy batches
    assert len(set(cohort.plans["local"].num_steps)) > 1
    after, _, _ = compiled("cdkt", **structure)(state, **FLOATS)
    trained, server = reference_round(state, cohort, problem.data, structure, FLOATS)
    for number, expected in trained.items():
        got = layers(client(after, number))
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
        assert differs(got, layers(client(state, number)), 1e-3)
    got = layers(after.server["params"])
    chex.assert_trees_all_close(got, server, rtol=1e-4, atol=1e-5)
    assert differs(got, layers(state.server["params"]), 1e-3)


@every_transfer
def test_no_transfer_is_exact(transfer, compiled, start, problem):
    """Test 19: with alpha = beta = 0 no option of the transfer has any effect.

    In the first round alpha is masked by `--warm_rounds=1`: No Transfer again.
    """
    run, cohort = compiled("cdkt", **STRUCTURES[transfer]), problem.cohort(1)
    off = {"client_distill_weight": 0.0, "server_distill_weight": 0.0}
    plain, _, _ = run(start(round=0), cohort, **off)
    other, _, _ = run(start(round=0), cohort, **off, label_mix=1.0, temperature=0.7)
    warm, _, _ = run(
        start(round=0), cohort, client_distill_weight=0.9, server_distill_weight=0.0
    )
    later, _, _ = run(start(round=1), cohort, **off)
    for state in (other, warm, later):
        chex.assert_trees_all_equal(state.clients, plain.clients)
        chex.assert_trees_all_equal(state.server, plain.server)
    on, _, _ = run(start(round=1), cohort, client_distill_weight=0.9)
    assert differs(on.clients, plain.clients, 1e-4)
    assert differs(on.server, plain.server, 1e-4)


def test_no_transfer_is_the_same_in_every_mode(compiled, start):
    """Test 19: alpha = beta = 0 across programs, for every transfer and distance."""
    off = {"client_distill_weight": 0.0, "server_distill_weight": 0.0}
    runs = [compiled("cdkt", **s)(start(), **off)[0] for s in STRUCTURES.values()]
    for state in runs[1:]:
        chex.assert_trees_all_close(state.clients, runs[0].clients, atol=1e-6)
        chex.assert_trees_all_close(state.server, runs[0].server, atol=1e-6)


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
        for leaf in jax.tree.leaves((state.clients, state.server, metrics)):
            assert np.isfinite(leaf).all()


@every_transfer
def test_weight_zero_cuts_the_direction_off(transfer, compiled, start):
    """Test 20: alpha = 0 hides the server from clients, beta = 0 them from it."""
    run = compiled("cdkt", **STRUCTURES[transfer])
    state = start()
    moved_server = state.replace(server=perturbed(state.server))
    moved_clients = state.replace(clients=perturbed(state.clients))

    plain, _, _ = run(state, client_distill_weight=0.0)
    other, _, _ = run(moved_server, client_distill_weight=0.0)
    chex.assert_trees_all_equal(plain.clients, other.clients)
    plain, _, _ = run(state, server_distill_weight=0.0)
    other, _, _ = run(moved_clients, server_distill_weight=0.0)
    chex.assert_trees_all_equal(plain.server, other.server)

    plain, _, _ = run(state, **FLOATS)
    other, _, _ = run(moved_server, **FLOATS)
    assert differs(plain.clients, other.clients)
    other, _, _ = run(moved_clients, **FLOATS)
    assert differs(plain.server, other.server)


def test_lambda_one_ignores_the_teachers_outcomes(compiled, start):
    """Test 22: with lambda = 1 the outcome terms are labels: no teacher, exactly."""
    run, state = compiled("cdkt", **STRUCTURES["full"]), start()
    values = FLOATS | {"label_mix": 1.0}
    plain, _, _ = run(state, **values)
    other, _, _ = run(state.replace(server=perturbed(state.server)), **values)
    chex.assert_trees_all_equal(plain.clients, other.clients)
    other, _, _ = run(state.replace(clients=perturbed(state.clients)), **values)
    chex.assert_trees_all_equal(plain.server, other.server)


@every_transfer
def test_lambda_zero_hides_the_proxy_labels(transfer, compiled, start, problem):
    """Test 22: with lambda = 0 proxy labels only enter by the server's own loss."""
    run, state = compiled("cdkt", **STRUCTURES[transfer]), start()
    rows = problem.data.partition.proxy
    label = problem.data.label.at[rows].set((problem.data.label[rows] + 1) % 4)
    relabelled = problem.data.replace(label=label)
    values = FLOATS | {"label_mix": 0.0}
    plain, _, _ = run(state, **values)
    other, _, _ = run(state, data=relabelled, **values)
    chex.assert_trees_all_equal(plain.clients, other.clients)
    assert differs(plain.server, other.server)
    plain, _, _ = run(state, **FLOATS)
    other, _, _ = run(state, data=relabelled, **FLOATS)
    assert differs(plain.clients, other.clients)


def with_dead_unit(params, value):
    """Embedding unit 0 answers `value` on every input and feeds no logit."""
    first, second, last = host(params)
    second, last = dict(second["trunk"]), dict(last["trunk"])
    for name in ("kernel", "bias"):
        second[name] = second[name].copy()
    last["kernel"] = last["kernel"].copy()
    second["kernel"][..., 0], second["bias"][..., 0] = 0, value
    last["kernel"][..., 0, :] = 0
    return (first, {"trunk": second}, {"trunk": last})


def with_other_logits(params):
    """The last layer moved, the embedding as it was."""
    first, second, last = host(params)
    return (first, second, perturbed(last))


@every_transfer
def test_transfer_masks_embeddings(transfer, compiled, start):
    """Test 23: in Full nobody listens to embeddings, else both sides do."""
    run, state = compiled("cdkt", **STRUCTURES[transfer]), start()
    params, stats = state.clients
    results = []
    for value in (0.5, 2.0):
        server = state.server | {
            "params": with_dead_unit(state.server["params"], value)
        }
        results.append(run(state.replace(server=server), **FLOATS)[0].clients)
    assert differs(*results) == (transfer != "full")
    if transfer == "full":
        chex.assert_trees_all_equal(*results)

    # client_lr = 0: the dead units stay dead while the clients answer.
    results = []
    for value in (0.5, 2.0):
        clients = (with_dead_unit(params, value), stats)
        values = FLOATS | {"client_lr": 0.0}
        results.append(run(state.replace(clients=clients), **values)[0].server)
    assert differs(*results) == (transfer != "full")
    if transfer == "full":
        chex.assert_trees_all_equal(*results)


@every_transfer
def test_transfer_masks_logits(transfer, compiled, start):
    """Test 23: in Rep the server ignores logits, but the clients never do."""
    run, state = compiled("cdkt", **STRUCTURES[transfer]), start()
    params, stats = state.clients
    values = FLOATS | {"client_lr": 0.0}
    plain, _, _ = run(state, **values)
    moved = state.replace(clients=(with_other_logits(params), stats))
    other, _, _ = run(moved, **values)
    assert differs(plain.server, other.server) == (transfer != "rep")
    if transfer == "rep":
        chex.assert_trees_all_equal(plain.server, other.server)

    plain, _, _ = run(state, **FLOATS)
    server = state.server | {"params": with_other_logits(state.server["params"])}
    other, _, _ = run(state.replace(server=server), **FLOATS)
    assert differs(plain.clients, other.clients)


@every_transfer
def test_everyone_starts_from_its_own_model(transfer, compiled, start):
    """Test 24: eta = 0 fixes the clients, gamma = 0 the server; the other learns."""
    run, state = compiled("cdkt", **STRUCTURES[transfer]), start()
    still, _, _ = run(state, **FLOATS | {"client_lr": 0.0})
    chex.assert_trees_all_equal(host(still.clients), host(state.clients))
    assert differs(still.server, state.server, 1e-3)
    still, _, _ = run(state, **FLOATS | {"server_lr": 0.0})
    chex.assert_trees_all_equal(host(still.server), host(state.server))
    assert differs(still.clients, state.clients, 1e-3)


def test_server_hears_only_the_selected(compiled, start, problem):
    """Test 25: models outside the cohort do not reach the server's teacher."""
    run, state = compiled("cdkt", **STRUCTURES["repfull"]), start()
    chosen = problem.cohort(1).client_id
    plain, _, _ = run(state, **FLOATS)
    for number in range(5):
        moved = jax.tree.map(
            lambda leaf, new, k=number: np.where(
                np.arange(5).reshape(-1, *(1,) * (leaf.ndim - 1)) == k, new, leaf
            ),
            host(state.clients),
            perturbed(state.clients),
        )
        other, _, _ = run(state.replace(clients=moved), **FLOATS)
        assert differs(plain.server, other.server) == (number in chosen)
        if number not in chosen:
            chex.assert_trees_all_equal(plain.server, other.server)


def test_unselected_clients_are_untouched(compiled, start, problem):
    """Test 26: a subset round leaves every other client bitwise as it was."""
    state, chosen = start(), set(problem.cohort(1).client_id.tolist())
    after, _, _ = compiled("cdkt", **STRUCTURES["rep"])(state, **FLOATS)
    assert len(chosen) == 3
    for number in range(5):
        if number in chosen:
            assert differs(client(after, number), client(state, number), 1e-3)
        else:
            chex.assert_trees_all_equal(client(after, number), client(state, number))


def test_selection_depends_on_the_round_only(blobs):
    """Test 26: all methods and all their options see the same clients."""
    common = {"dataset": blobs, "num_clients": 9, "clients_per_round": 4, "devices": 1}
    made = [
        build.experiment(algo="cdkt", preset="none", proxy_fraction=0.1, **common),
        build.experiment(algo="fedavg", preset="cdkt", partition="iid", **common),
        build.experiment(algo="local", local_epochs=1, batch_size=3, **common),
    ]
    drawn = [
        [set(one.cohorts(0, round).client_id.tolist()) for round in (7, 0, 1, 2, 3)]
        for one in made
    ]
    assert drawn[0] == drawn[1] == drawn[2]
    assert all(len(chosen) == 4 for chosen in drawn[0])
    assert len({frozenset(chosen) for chosen in drawn[0]}) > 1


def test_heterogeneous_clients_learn(compiled, start):
    """Test 27: other architectures work where embeddings and classes agree."""
    run = compiled("cdkt", clients="deeper", **STRUCTURES["rep"])
    state = start(clients="deeper")
    after, _, _ = run(state, **FLOATS)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(host(after.clients)))
    assert differs(after.clients, state.clients, 1e-3)
    moved = state.replace(clients=perturbed(state.clients))
    assert differs(after.server, run(moved, **FLOATS)[0].server)
    moved = state.replace(server=perturbed(state.server))
    assert differs(after.clients, run(moved, **FLOATS)[0].clients)


def test_other_embedding_width_is_refused(problem):
    """Test 27: raises, naming the flag and both widths."""
    with pytest.raises(ValueError, match="--client_model=wide.* 5, --model=tiny of 6"):
        cdkt.make(cdkt.HParams(), problem.task_of(clients="wide"))
    with pytest.raises(ValueError, match="--proxy_fraction"):
        cdkt.make(cdkt.HParams(), problem.task_of()._replace(num_proxy=0))


def test_equal_architectures_are_the_homogeneous_run(compiled, start):
    """Test 27: another client model of the same layers changes nothing."""
    state = start()
    alike, _, _ = compiled("cdkt", **STRUCTURES["rep"])(state, **FLOATS)
    other, _, _ = compiled("cdkt", clients="twin", **STRUCTURES["rep"])(state, **FLOATS)
    chex.assert_trees_all_close(other.clients, alike.clients, atol=1e-6)
    chex.assert_trees_all_close(other.server, alike.server, atol=1e-6)


@pytest.mark.parametrize("network", ["tiny", "noisy"])
def test_chunks_do_not_matter(network, compiled, start, problem):
    """Test 28: one by one, all together and a Python loop agree; dropout off and on.

    With dropout off the numpy reference above is the Python loop.
    """
    state, cohort = start(), problem.cohort(1)
    structure = {"server": network, "clients": network, **STRUCTURES["repfull"]}
    together = compiled("cdkt", **structure)
    alone = compiled("cdkt", chunk=1, **structure)
    first, _, _ = together(state, **FLOATS)
    second, _, _ = alone(state, **FLOATS)
    chex.assert_trees_all_close(first.clients, second.clients, atol=1e-5)
    chex.assert_trees_all_close(first.server, second.server, atol=1e-5)
    if network == "tiny":
        return
    for row, number in enumerate(cohort.client_id):
        single = jax.tree.map(lambda leaf, r=row: leaf[r : r + 1], cohort)
        third, _, _ = alone(state, single, **FLOATS)
        chex.assert_trees_all_close(
            client(third, number), client(first, number), atol=1e-5
        )
    calm, _, _ = compiled("cdkt", **STRUCTURES["repfull"])(state, **FLOATS)
    assert differs(calm.clients, first.clients, 1e-3)


def test_dropout_noise_is_named_by_client_and_round(compiled, start):
    """Section 2: equal clients with equal data differ only by their own noise."""
    run = compiled("cdkt", server="noisy", clients="noisy", **STRUCTURES["repfull"])
    state = start()
    first, _, _ = run(state, **FLOATS)
    again, _, _ = run(state, **FLOATS)
    chex.assert_trees_all_equal(first.clients, again.clients)
    other, _, _ = run(state.replace(key=jax.random.key(4)), **FLOATS)
    assert differs(first.clients, other.clients, 1e-3)
    assert differs(first.server, other.server, 1e-3)


def test_init_makes_copies_of_one_model(problem, quick_jit):
    """Section 1A, Init: all clients and the server start as the same parameters."""
    made = cdkt.make(cdkt.HParams(), problem.task_of())
    state = quick_jit(made.init)(problem.data, jax.random.key(0))
    assert int(state.round) == 0
    for number in range(5):
        chex.assert_trees_all_equal(client(state, number), host(state.server["params"]))
    model, params, _ = made.server_params(state)
    (served,) = made.serving(state, None, problem.data)
    assert model.name == served.model.name == "tiny" and not served.shared
    chex.assert_trees_all_equal(served.params, state.clients[0])
    np.testing.assert_array_equal(served.client_id, range(5))
    assert np.asarray(served.mask).all()


@pytest.mark.parametrize(
    ("transfer", "up", "down"),
    [("rep", 6, 4 + 6), ("full", 4, 4), ("repfull", 4 + 6, 4 + 6)],
)
def test_traffic(transfer, up, down, compiled, start, problem):
    """Test 33: P * (C | d | C + d) * 4 bytes up and down for each selected client."""
    made = cdkt.make(cdkt.HParams(transfer=transfer), problem.task_of())
    state, _, counts = compiled("cdkt", **STRUCTURES[transfer])(start(), **FLOATS)
    assert counts.shape == (3, len(made.messages))
    for row in np.asarray(counts):
        total = traffic.cumulative(row, made.messages)
        assert total == {"bytes_up": 12 * up * 4, "bytes_down": 12 * down * 4}
    assert int(state.round) == 2


@pytest.mark.parametrize(
    ("name", "shape", "num_proxy", "full", "rep"),
    [
        ("cdkt_mnist", (28, 28, 1), 355, 0.0142, 0.727),
        ("cdkt_cifar", (32, 32, 3), 4200, 0.168, 1.075),
    ],
)
def test_traffic_of_the_papers_settings(name, shape, num_proxy, full, rep, problem):
    """Section 1A and test 33: MB per client and round on MNIST and CIFAR-10."""
    model = models.MODELS[name](10)
    task = problem.task_of()._replace(
        server_model=model,
        client_models=(model,),
        num_classes=10,
        num_proxy=num_proxy,
        example_shape=shape,
    )
    made = cdkt.make(cdkt.HParams(), task)
    size = {kind.name: kind.num_bytes / 1e6 for kind in made.messages}
    for side in ("server", "client"):
        np.testing.assert_allclose(size[f"{side} logits"], full, rtol=2e-3)
        np.testing.assert_allclose(size[f"{side} embeddings"], rep, rtol=2e-3)
    directions = {kind.name.split()[0]: kind.direction for kind in made.messages}
    assert directions == {"server": "down", "client": "up"}
