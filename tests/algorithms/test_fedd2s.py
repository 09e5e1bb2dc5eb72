"""FedD2S against a numpy reference, and the properties of its specification.

The network is a ladder of six dense layers with the names of FedD2S's models. With
`--drop_every=1 --min_layer=1` the boundary is 6 less the rounds a client took part in
before, so that a state chooses every client's boundary.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from algorithms import fedd2s
from data import plan
from fedjax_pfl import distill, local, masks, options, traffic, types
from models import stages

SIZES = (17, 12, 9, 6, 3)
NUM_CLIENTS = len(SIZES)
NUM_CLASSES = 4
SHAPE = (3, 3)
BATCH = 5
NAMES = ("C1", "C2", "C3", "F1", "F2", "F3")
L = len(NAMES)
EPOCHS = {"server": 1, "local": 2}


def network(name, widths):
    """Dense layers of these widths and the last one, named as FedD2S's."""
    trunks = [stages.Dense(width) for width in widths]
    trunks.append(stages.Dense(NUM_CLASSES, relu=False))
    names = NAMES[: len(widths)] + ("F3",)
    return stages.chain(name, list(zip(names, trunks, strict=True)))


CONV = stages.chain(
    "conv",
    [
        ("C1", stages.Conv(3, 3)),
        ("C2", stages.Conv(4, 3)),
        ("F1", stages.Dense(5)),
        ("F2", stages.Dense(NUM_CLASSES, relu=False)),
    ],
)
NETWORKS = {
    "ladder": (network("ladder", (10, 8, 7, 6, 5)), SHAPE),
    "short": (network("short", (6, 5)), SHAPE),
    "conv": (CONV, (8, 8, 1)),
}

# Together every option has every value; the second table is for J or Q alone.
STRUCTURES = {
    "default": {},
    "reverse": {
        "kl": "reverse",
        "teacher_head": "live",
        "optimizer_state": "persist",
    },
    "joint": {"updates": "joint", "s2c_head": "own", "drop_every": 2},
    "sequential_mse": {"transfer": "mse"},
    "joint_mse": {"transfer": "mse", "updates": "joint", "min_layer": 3},
}
ALONE = {"persist": {"optimizer_state": "persist"}, "mse": {"transfer": "mse"}}
SCHEDULE = {"drop_every": 1, "min_layer": 1}
# The defaults, which alone go with `--fixed_layer`.
UNSCHEDULED = {"drop_every": 3, "min_layer": 0}
FLOATS = {"client_lr": 0.01, "client_lr_decay": 0.8, "temperature": 2.0}


def host(tree):
    """A pytree as numpy arrays."""
    return jax.tree.map(np.asarray, tree)


def client(tree, number):
    """One client's slice."""
    return host(jax.tree.map(lambda leaf: leaf[number], tree))


def differs(first, second, by=1e-5):
    """Whether any two leaves differ."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return any(np.abs(np.asarray(a) - np.asarray(b)).max() > by for a, b in pairs)


def random_params(name, seed):
    """(params, stats) of numpy numbers, large enough that every layer matters."""
    gen = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: gen.normal(
            scale=1.2 * np.prod(leaf.shape[:-1]) ** -0.5 if leaf.ndim > 1 else 0.2,
            size=leaf.shape,
        ).astype(leaf.dtype),
        traffic.shapes(*NETWORKS[name]),
    )


def task_of(name="ladder", **changed):
    model, shape = NETWORKS[name]
    return types.Task(
        server_model=model,
        client_models=(model,),
        group_of_client=np.zeros(NUM_CLIENTS, np.int32),
        client_depth=np.full(NUM_CLIENTS, len(model.stage_names), np.int32),
        num_clients=NUM_CLIENTS,
        num_classes=NUM_CLASSES,
        num_proxy=0,
        num_examples=max(SIZES),
        example_shape=shape,
        execution=types.Execution(2),
    )._replace(**changed)


def tables(name="ladder", seed=0, label=None, noise=1.0):
    """Ragged clients with shuffled rows; rows that nobody owns are far away."""
    gen = np.random.default_rng(seed)
    shape = NETWORKS[name][1]
    if label is None:
        label = gen.integers(NUM_CLASSES, size=60)
    centre = gen.normal(size=(NUM_CLASSES, *shape))
    image = centre[label] + noise * gen.normal(size=(60, *shape))
    row = gen.permutation(60)[: sum(SIZES)].astype(np.int32)
    image[np.setdiff1d(np.arange(60), row)] += 1000
    nothing = np.zeros(NUM_CLIENTS, np.int32)
    start = np.cumsum((0, *SIZES[:-1])).astype(np.int32)
    partition = types.Partition(
        train=types.ClientRows(row, start, np.int32(SIZES)),
        test=types.ClientRows(row[:1], nothing, nothing),
        proxy=np.zeros(0, np.int32),
    )
    return types.Data(
        image=image.astype(np.float32),
        label=label.astype(np.int32),
        mean=np.float32(0.2),
        scale=np.float32(1.1),
        partition=partition,
    )


def cohort_of(*ids, seed=0):
    """Clients by row, None = padding; there is room for a step more than needed."""
    ids = [NUM_CLIENTS if number is None else number for number in ids]
    plans = {}
    for name, epochs in EPOCHS.items():
        spec = types.PlanSpec(name, epochs, BATCH)
        steps = plan.max_steps(np.array(SIZES), spec) + 1
        size = np.array([*SIZES, 0])[ids]
        plans[name] = plan.batches(seed, 0, np.array(ids), size, spec, steps)
    ids = np.array(ids, np.int32)
    return types.Cohort(
        client_id=ids,
        row=ids,
        row_mask=ids < NUM_CLIENTS,
        depth=np.full(len(ids), L, np.int32),
        peers=np.zeros((len(ids), 0), np.int32),
        peer_mask=np.zeros((len(ids), 0), bool),
        plans=plans,
    )


# Ragged clients (4, 3 and 2 batches) and a padding row, in chunks of two.
COHORT = (0, None, 2, 1)
DATA = {name: tables(name) for name in NETWORKS}


def start(layers=(6,) * NUM_CLIENTS, name="ladder", persist=False, seed=0, round=2):
    """A state in which everyone is different; `layers` are the next boundaries."""
    depth = len(NETWORKS[name][0].stage_names)
    own = [random_params(name, seed + 1 + number) for number in range(NUM_CLIENTS)]
    clients = {
        "own": jax.tree.map(lambda *leaves: np.stack(leaves), *own),
        "participations": np.array([depth - layer for layer in layers], np.int32),
    }
    if persist:
        hparams = fedd2s.HParams(client_optimizer="adam", optimizer_state="persist")
        made = fedd2s.make(hparams, task_of(name))
        shapes = jax.eval_shape(made.init, DATA[name], jax.random.key(0))
        clients["opt_state"] = jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.clients["opt_state"]
        )
    return types.RoundState(
        random_params(name, seed), clients, jax.random.key(3), np.int32(round)
    )


def host_state(state):
    """The state as numpy arrays, but for its key."""
    return state.replace(
        server=host(state.server), clients=host(state.clients), round=int(state.round)
    )


def with_server(state, params):
    """The same state with another server."""
    return state.replace(server=(params, state.server[1]))


def with_own(state, params):
    """The same state with other clients."""
    own = (params, state.clients["own"][1])
    return state.replace(clients=state.clients | {"own": own})


def without_steps(cohort, name):
    """The same cohort with nothing to do in one plan."""
    made = cohort.plans[name]
    idle = made.replace(num_steps=np.zeros_like(made.num_steps))
    return cohort.replace(plans=cohort.plans | {name: idle})


def perturbed(tree, seed=9, size=0.5):
    """Every number moved at random."""
    gen = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + np.float32(size * gen.normal(size=leaf.shape)), host(tree)
    )


@contextlib.contextmanager
def one_objective(which, log):
    """Lets `local.train` see J alone or Q alone, and logs tables and losses."""
    train, outputs_by_sample = local.train, distill.outputs_by_sample
    chosen = {"distil": slice(0, 1), "supervised": slice(1, 2)}[which]
    pending = []

    def write(side, client_id, loss, table):
        log[side, int(client_id)] = np.array(loss[0]), np.array(table)

    def remembered(*args, **kwargs):
        pending.append(outputs_by_sample(*args, **kwargs))
        return pending[-1]

    def shortened(hparams, objectives, *args, **kwargs):
        trained = train(hparams, objectives[chosen], *args, **kwargs)
        side = "local" if "tag" not in kwargs else "server"
        table = pending.pop() if pending else jnp.zeros(())
        write_side = functools.partial(write, side)
        jax.debug.callback(write_side, kwargs["client_id"], trained.loss, table)
        return trained

    with (
        mock.patch.object(local, "train", shortened),
        mock.patch.object(distill, "outputs_by_sample", remembered),
    ):
        yield


# A third of the compile time; what is compiled here is too small to gain by speed.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


@pytest.fixture(scope="session")
def rounds():
    """Jitted rounds by structure, each traced once in all tests together."""
    cache = {}

    def get(structure="default", objective="both", network="ladder", **hparams):
        name = (structure, objective, network, *sorted(hparams.items()))
        if name in cache:
            return cache[name]
        settings = {
            "batch_size": BATCH,
            "client_optimizer": "adam",
            "server_epochs": EPOCHS["server"],
            "local_epochs": EPOCHS["local"],
        }
        own = SCHEDULE | (STRUCTURES | ALONE)[structure] | hparams
        made = fedd2s.HParams(**settings | own)
        static, floats = options.split_floats(made)
        log, traces = {}, []

        @quick_jit
        def traced(values, state, cohort, data):
            traces.append(name)
            changed = dataclasses.replace(static, **values)
            patch = contextlib.nullcontext()
            if objective != "both":
                patch = one_objective(objective, log)
            with patch:
                return fedd2s.make(changed, task_of(network)).round(state, cohort, data)

        def run(state, cohort=None, data=None, **changed):
            cohort = cohort_of(*COHORT) if cohort is None else cohort
            data = DATA[network] if data is None else data
            log.clear()
            values = floats | FLOATS | changed
            # Device arrays always: numpy's would be compiled for once more.
            arrays = jax.tree.map(jnp.asarray, (state, cohort, data))
            out = traced(jax.tree.map(jnp.float32, values), *arrays)
            jax.effects_barrier()
            assert traces == [name]
            return out

        run.log = log
        cache[name] = run
        return run

    return get


# The reference: numpy, float64, gradients by hand, a Python loop over everything.


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layers_of(params):
    """[kernel, bias] of every layer in float64."""
    return [
        [np.float64(stage["trunk"][part]) for part in ("kernel", "bias")]
        for stage in host(params)
    ]


def copied(params):
    return [list(stage) for stage in params]


def outputs(params, x, first=0):
    """Input and outputs of the layers `first`.. by number of layers passed."""
    out = {first: x}
    for i in range(first, len(params)):
        x = x @ params[i][0] + params[i][1]
        out[i + 1] = x = x if i == len(params) - 1 else np.maximum(x, 0)
    return out


def backward(params, out, slope, last, first=0):
    """Gradients of the layers `first`..`last - 1` from that of the output of `last`."""
    grads = [[np.zeros_like(part) for part in stage] for stage in params]
    for i in reversed(range(first, last)):
        slope = slope if i == len(params) - 1 else slope * (out[i + 1] > 0)
        grads[i] = [out[i].T @ slope, slope.sum(0)]
        slope = slope @ params[i][0].T
    return grads


def output_gap(student, target, tau, kind):
    """J and its gradient: tau^2 times a KL of softened logits."""
    p, q = softmax(student / tau), softmax(target / tau)
    if kind == "reverse":
        gap = np.log(p) - np.log(q)
        each = (p * gap).sum(1, keepdims=True)
        return tau**2 * each.mean(), tau * p * (gap - each) / len(student)
    value = (q * (np.log(q) - np.log(p))).sum(1).mean()
    return tau**2 * value, tau * (p - q) / len(student)


def feature_gap(student, target):
    gap = student - target
    return (gap**2).mean(), 2 * gap / gap.size


class Adam:
    """One independent state a layer."""

    def __init__(self, params):
        self.first, self.second = ([[0.0, 0.0] for _ in params] for _ in "mv")
        self.count = [0] * len(params)

    def step(self, params, grads, rate, chosen):
        params = copied(params)
        for i in chosen:
            self.count[i] += 1
            for part, g in enumerate(grads[i]):
                self.first[i][part] = 0.9 * self.first[i][part] + 0.1 * g
                self.second[i][part] = 0.999 * self.second[i][part] + 0.001 * g**2
                mean = self.first[i][part] / (1 - 0.9 ** self.count[i])
                square = self.second[i][part] / (1 - 0.999 ** self.count[i])
                move = mean / (np.sqrt(square) + 1e-8)
                params[i][part] = params[i][part] - rate * move
        return params


def batches_of(cohort, name, index):
    """Positions of each step's real examples."""
    made = cohort.plans[name]
    for step in range(int(made.num_steps[index])):
        position = made.position[index, step]
        yield position[position >= 0]


def reference_round(state, cohort, data, structure=(), which="both", floats=(), opt=()):
    """Section 1.1's and 1.3's round.

    Returns the new own layers by client, the server's, and by (side, client) the
    table of teacher logits and the sum of J over examples.
    """
    chosen = dataclasses.asdict(fedd2s.HParams()) | SCHEDULE | dict(structure)
    values, opt = FLOATS | dict(floats), dict(opt)
    by_head, tau = chosen["transfer"] == "head", values["temperature"]
    rate = values["client_lr"] * values["client_lr_decay"] ** int(state.round)
    train, server = data.partition.train, layers_of(state.server[0])
    depth = len(server)
    phis, own_layers, seen = [], {}, {}

    def examples(number):
        rows = train.row[train.start[number] + np.arange(train.count[number])]
        image = (np.float64(data.image[rows]) - float(data.mean)) * float(data.scale)
        return image.reshape(len(rows), -1), data.label[rows]

    def supervised(params, x, y, first):
        out = outputs(params, x, first)
        slope = (softmax(out[depth]) - np.eye(NUM_CLASSES)[y]) / len(y)
        return backward(params, out, slope, depth, first)

    def both(params, optimizer, j_grads, j_layers, supervise, q_layers):
        if chosen["updates"] == "joint" and which == "both":
            q_grads = supervise(params)
            grads = [
                [a + b if j_layers else b for a, b in zip(*pair, strict=True)]
                for pair in zip(j_grads, q_grads, strict=True)
            ]
            return optimizer.step(params, grads, rate, q_layers)
        if which != "supervised":
            params = optimizer.step(params, j_grads, rate, j_layers)
        if which != "distil":
            params = optimizer.step(params, supervise(params), rate, q_layers)
        return params

    members = {}
    for index in np.flatnonzero(cohort.row_mask):
        number = int(cohort.client_id[index])
        own = layers_of(client(state.clients["own"][0], number))
        taken = int(state.clients["participations"][number]) + 1
        dropped = (taken - 1) // chosen["drop_every"]
        layer = max(chosen["min_layer"], depth - dropped)
        members[number] = index, own, layer, *examples(number)

    for number, (index, own, layer, x, y) in members.items():
        phi, adam, total = copied(server), Adam(server), 0.0
        h = outputs(own, x)[1]
        p = outputs(own[:layer] + server[layer:], x)[depth]
        features = outputs(own, x)
        j_layers = range(1, depth if by_head else layer) if layer > 1 else []
        for b in batches_of(cohort, "server", index):
            out = outputs(phi, h[b], 1)
            if by_head:
                if chosen["teacher_head"] == "live":
                    target = outputs(own[:layer] + phi[layer:], x[b])[depth]
                else:
                    target = p[b]
                value, slope = output_gap(out[depth], target, tau, chosen["kl"])
                grads = backward(phi, out, slope, depth, 1)
            else:
                value, slope = feature_gap(out[layer], features[layer][b])
                grads = backward(phi, out, slope, layer, 1)
            total += value * len(b)
            supervise = functools.partial(supervised, x=h[b], y=y[b], first=1)
            phi = both(phi, adam, grads, j_layers, supervise, range(1, depth))
        phis.append(phi)
        seen["server", number] = total, p
    averaged = [
        [np.mean(part, axis=0) for part in zip(*stage, strict=True)]
        for stage in zip(*phis, strict=True)
    ]
    averaged[0] = server[0]

    for number, (index, own, layer, x, y) in members.items():
        new, total = copied(own), 0.0
        adam = opt.setdefault(number, Adam(own))
        if chosen["optimizer_state"] == "reset":
            adam = Adam(own)
        answer = outputs(averaged, outputs(own, x)[1], 1)
        head = averaged if chosen["s2c_head"] == "global" else own
        for b in batches_of(cohort, "local", index):
            if by_head:
                through = new[:layer] + head[layer:]
                out = outputs(through, x[b])
                value, slope = output_gap(
                    out[depth], answer[depth][b], tau, chosen["kl"]
                )
                grads = backward(through, out, slope, depth)
                grads[layer:] = [[0 * g for g in stage] for stage in grads[layer:]]
            else:
                out = outputs(new, x[b])
                value, slope = feature_gap(out[layer], answer[layer][b])
                grads = backward(new, out, slope, layer)
            total += value * len(b)
            supervise = functools.partial(supervised, x=x[b], y=y[b], first=0)
            j_layers = range(layer) if layer > 1 else []
            new = both(new, adam, grads, j_layers, supervise, range(depth))
        own_layers[number] = new
        seen["local", number] = total, answer[depth]
    return own_layers, averaged, seen, opt


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("layers", [(6, 5, 2, 4, 3), (3, 1, 4, 6, 5)], ids=str)
def test_two_rounds_equal_a_numpy_reference(structure, layers, rounds):
    """Sections 1.1 and 1.3: all options, ragged clients, padding, short batches."""
    run, chosen = rounds(structure), STRUCTURES[structure]
    state = start(layers, persist="optimizer_state" in chosen)
    opt = {}
    for ids in (COHORT, (1, 0, 4, None)):
        cohort = cohort_of(*ids, seed=int(state.round))
        after, _, _ = run(state, cohort)
        own, server, _, opt = reference_round(
            host_state(state), cohort, DATA["ladder"], chosen, opt=opt
        )
        for number, expected in own.items():
            got = layers_of(client(after.clients["own"][0], number))
            chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
        got = layers_of(after.server[0])
        chex.assert_trees_all_close(got, server, rtol=1e-4, atol=1e-5)
        state = after


@pytest.mark.parametrize(
    ("option", "value", "who"),
    [
        ("kl", "reverse", "both"),
        ("teacher_head", "live", "server"),
        ("s2c_head", "own", "clients"),
        ("updates", "joint", "both"),
        ("transfer", "mse", "both"),
        ("drop_every", 2, "both"),
        ("min_layer", 5, "both"),
    ],
)
def test_every_option_matters_to_the_reference(option, value, who):
    """Guards the test above: an option that did nothing would fail it."""
    state, cohort = start((6, 5, 2, 4, 3)), cohort_of(*COHORT)
    before = reference_round(state, cohort, DATA["ladder"])
    after = reference_round(state, cohort, DATA["ladder"], {option: value})
    assert who == "clients" or differs(before[1], after[1], 1e-3)
    assert who == "server" or differs(before[0], after[0], 1e-3)
    if who == "clients":
        chex.assert_trees_all_equal(before[1], after[1])


@pytest.mark.parametrize("structure", ALONE)
@pytest.mark.parametrize("layers", [(6, 5, 4, 3, 2), (2, 6, 1, 4, 5), (4, 3, 5, 2, 1)])
def test_tables_and_distances_equal_the_reference(structure, layers, rounds):
    """Properties 17 and 21: rows of p and t by sample, J on both sides, and its steps.

    J is the loss of a round in which nothing else is optimized.
    """
    run, chosen = rounds(structure, "distil"), ALONE[structure]
    state = start(layers, persist="optimizer_state" in chosen)
    cohort = cohort_of(*COHORT)
    after, metrics, _ = run(state, cohort)
    own, server, seen, _ = reference_round(
        state, cohort, DATA["ladder"], chosen, "distil"
    )
    assert len(seen) == 6
    for (side, number), (total, table) in seen.items():
        got, got_table = run.log[side, number]
        if layers[number] > 1:
            np.testing.assert_allclose(got, total, rtol=1e-4, atol=1e-5)
        if structure == "persist":
            got_table = got_table[: SIZES[number]]
            np.testing.assert_allclose(got_table, table, rtol=1e-4, atol=1e-4)
    for number, expected in own.items():
        got = layers_of(client(after.clients["own"][0], number))
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(
        layers_of(after.server[0]), server, rtol=1e-4, atol=1e-5
    )
    total = sum(float(run.log["local", number][0]) for number in (0, 1, 2))
    np.testing.assert_allclose(metrics["train_loss"][0], total, rtol=1e-5)
    assert metrics["train_loss"][1] == 2 * (17 + 12 + 9)
    assert metrics["mean_layer"][0] == sum(layers[:3]) and metrics["mean_layer"][1] == 3


def test_participations_count_and_absent_clients_rest(rounds):
    """Properties 1, 18 and 26: Z, l and untouched rows over 12 rounds of one trace."""
    run = rounds("reverse")
    state = start((6,) * NUM_CLIENTS, persist=True, round=0)
    taken, seen = np.zeros(NUM_CLIENTS, int), set()
    for number in range(12):
        gen = np.random.default_rng(number)
        chosen = gen.choice(3 if number < 9 else NUM_CLIENTS, 3, replace=False)
        cohort = cohort_of(*chosen, None)
        after, metrics, _ = run(state, cohort)
        taken[chosen] += 1
        np.testing.assert_array_equal(after.clients["participations"], taken)
        layers = np.maximum(1, L - (taken[chosen] - 1))
        assert float(metrics["mean_layer"][0]) == layers.sum()
        seen |= set(layers.tolist())
        for absent in np.setdiff1d(np.arange(NUM_CLIENTS), chosen):
            chex.assert_trees_all_equal(
                client(state.clients, absent), client(after.clients, absent)
            )
        for present in chosen:
            before, now = (client(s.clients["own"], present) for s in (state, after))
            assert differs(before, now, 1e-4)
        assert int(after.round) == number + 1
        state = after
    assert taken.sum() == 12 * 3 and seen == {1, 2, 3, 4, 5, 6}


def test_four_rounds_are_two_and_two(rounds):
    """Property 26: nothing but the state survives a round, Z and moments included."""
    run = rounds("reverse")
    whole = parts = start((6, 5, 2, 4, 3), persist=True)
    cohorts = [cohort_of(*COHORT, seed=s) for s in range(4)]
    for cohort in cohorts:
        whole, _, _ = run(whole, cohort)
    for index, cohort in enumerate(cohorts):
        if index == 2:
            run(start((1, 2, 3, 4, 5), persist=True, seed=5))
            parts = host_state(parts).replace(round=np.int32(parts.round))
        parts, _, _ = run(parts, cohort)
    chex.assert_trees_all_equal(host_state(whole), host_state(parts))
    moments = jax.tree.leaves(whole.clients["opt_state"])
    assert any(np.abs(np.asarray(leaf)).max() > 1e-3 for leaf in moments)


def test_never_dropping_is_a_fixed_last_layer(rounds):
    """Property 2: Z0 = 0 and a floor at L are `--fixed_layer=L`, bit for bit."""
    settings = [
        {"drop_every": 0},
        {"fixed_layer": 3, **UNSCHEDULED},
        {"min_layer": 3},
    ]
    made = fedd2s.make(fedd2s.HParams(), task_of("short"))
    states = []
    for setting in settings:
        run = rounds(network="short", client_optimizer="sgd", **setting)
        state = start((3,) * NUM_CLIENTS, "short", round=0)
        for number in range(20):
            chosen = np.random.default_rng(number).choice(NUM_CLIENTS, 3, False)
            state, metrics, counts = run(state, cohort_of(*chosen, None))
            assert metrics["mean_layer"][0] == 9
            for row, client_id in enumerate(chosen):
                sent = traffic.cumulative(counts[row], made.messages)
                assert sent["bytes_up"] == SIZES[client_id] * (4 * (6 + 4) + 1)
        states.append(host_state(state))
    assert differs(states[0].server, start((3,) * 5, "short").server, 1e-3)
    chex.assert_trees_all_equal(*states)


def test_splice_is_composition():
    """Property 3: outputs and gradients, at every boundary, where ranks differ."""
    model, shape = NETWORKS["conv"]
    own, server = random_params("conv", 1), random_params("conv", 2)
    image = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
    depth = len(model.stage_names)

    def composed(params, head, layer):
        h, _ = model.forward(params, own[1], image, stop=layer)
        if layer < depth:
            h, _ = model.forward(head, server[1], h, start=layer)
        return jnp.sin(h).sum(), h

    def spliced(params, head, keep):
        h, _ = model.forward(masks.splice(params, head, keep), own[1], image)
        return jnp.sin(h).sum(), h

    one = quick_jit(jax.grad(composed, has_aux=True), static_argnums=2)
    other = quick_jit(jax.grad(spliced, (0, 1), has_aux=True))
    for layer in range(1, depth + 1):
        keep = jnp.arange(depth) < layer
        expected, first = one(own[0], server[0], layer)
        (grads, to_head), second = other(own[0], server[0], keep)
        chex.assert_trees_all_close(first, second, rtol=1e-5, atol=1e-6)
        chex.assert_trees_all_close(expected, grads, rtol=1e-5, atol=1e-6)
        zeros = jax.tree.map(jnp.zeros_like, (grads[layer:], to_head))
        chex.assert_trees_all_equal((grads[layer:], to_head), zeros)
        assert all(
            differs(stage, jax.tree.map(jnp.zeros_like, stage), 1e-3)
            for stage in grads[:layer]
        )


def random_moments(state, seed=4):
    """The state with Adam moments as after some steps."""
    gen = np.random.default_rng(seed)
    opt_state = jax.tree.map(
        lambda leaf: (
            np.full_like(leaf, 3)
            if np.issubdtype(leaf.dtype, np.integer)
            else np.abs(gen.normal(size=leaf.shape)).astype(leaf.dtype)
        ),
        state.clients["opt_state"],
    )
    return state.replace(clients=state.clients | {"opt_state": opt_state})


def test_distillation_freezes_what_is_above_the_boundary(rounds):
    """Properties 4, 5 and 6: above l parameters, moments and counts stay, bit for bit.

    Moments are large, so that a zeroed gradient would move everything.
    """
    run, layers = rounds("persist", "distil"), (6, 3, 1, 5, 2)
    state = random_moments(start(layers, persist=True))
    for ids in ((0, 1, 2, None), (3, 4, None, None)):
        after, _, _ = run(state, cohort_of(*ids))
        for number in (n for n in ids if n is not None):
            old, new = client(state.clients, number), client(after.clients, number)
            reached = layers[number] if layers[number] > 1 else 0
            for i in range(L):
                parts = [
                    (side["own"][0][i], side["opt_state"][i]) for side in (old, new)
                ]
                if i >= reached:
                    chex.assert_trees_all_equal(*parts)
                else:
                    assert differs(parts[0][0], parts[1][0], 1e-3)
                    counts = {
                        int(leaf)
                        for leaf in jax.tree.leaves(parts[1][1])
                        if leaf.dtype == np.int32
                    }
                    assert counts == {3 + 2 * -(-SIZES[number] // BATCH)}
        chex.assert_trees_all_equal(after.server[0][0], state.server[0][0])
        assert all(differs(after.server[0][i], state.server[0][i]) for i in range(1, L))


@pytest.mark.parametrize("structure", ["default", "joint"])
def test_layer_one_is_silent(structure, rounds):
    """Property 6: at l = 1 nothing depends on J, bit for bit: only Q remains."""
    run, cohort = rounds(structure), cohort_of(*COHORT)
    state = start((-5,) * NUM_CLIENTS)  # 11 participations: long at the floor
    silent, metrics, _ = run(state, temperature=1.0)
    assert metrics["mean_layer"][0] == 3
    warm, _, _ = run(state, temperature=7.0)
    chex.assert_trees_all_equal(host_state(silent), host_state(warm))
    own, server, _, _ = reference_round(state, cohort, DATA["ladder"], (), "supervised")
    for number, expected in own.items():
        got = layers_of(client(silent.clients["own"][0], number))
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
    got = layers_of(silent.server[0])
    chex.assert_trees_all_close(got, server, rtol=1e-4, atol=1e-5)


def test_layer_one_does_not_distil(rounds):
    """Property 6: J alone moves nothing, and a run without J is the same run."""
    layers, cohort = (1,) * NUM_CLIENTS, cohort_of(*COHORT)
    silent, _, _ = rounds()(start(layers))
    alone, _, _ = rounds(objective="supervised")(start(layers))
    # Another program: its sums may be fused otherwise.
    first, second = ((s.server, s.clients["own"]) for s in (silent, alone))
    chex.assert_trees_all_close(first, second, rtol=1e-6, atol=1e-7)
    for structure in ALONE:
        state = start(layers, persist=structure == "persist")
        state = random_moments(state) if structure == "persist" else state
        after, _, _ = rounds(structure, "distil")(state, cohort)
        chex.assert_trees_all_equal(
            host((after.clients["own"], after.clients.get("opt_state"))),
            (state.clients["own"], state.clients.get("opt_state")),
        )
        # The mean of equal numbers may move them by a rounding.
        chex.assert_trees_all_close(after.server, state.server, rtol=3e-7, atol=0)


def test_last_layers_teacher_is_the_client(rounds):
    """Property 7: at l = L the table p is the client's own logits; below it is not."""
    run = rounds("persist", "distil")
    state = start((6, 6, 5, 6, 6), persist=True)
    tables_of = []
    for server in (state.server[0], perturbed(state.server[0])):
        run(with_server(state, server))
        tables_of.append({n: run.log["server", n][1][: SIZES[n]] for n in (0, 1, 2)})
    first, second = tables_of
    for number in (0, 1):
        np.testing.assert_array_equal(first[number], second[number])
        part, data = DATA["ladder"].partition.train, DATA["ladder"]
        rows = part.row[part.start[number] :][: SIZES[number]]
        image, _ = data.gather(rows)
        own = layers_of(client(state.clients["own"][0], number))
        expected = outputs(own, np.asarray(image).reshape(len(rows), -1))[L]
        np.testing.assert_allclose(first[number], expected, rtol=1e-4, atol=1e-4)
    assert differs(first[2], second[2], 1e-2)


@pytest.mark.parametrize("structure", ["default", "joint_mse"])
def test_servers_first_layer_is_inert(structure, rounds):
    """Property 8: it never moves and nothing depends on it."""
    state = start((6, 4, 3, 5, 2))
    after, _, _ = rounds(structure)(state)
    chex.assert_trees_all_equal(after.server[0][0], state.server[0][0])
    first, *rest = state.server[0]
    other = with_server(state, (perturbed(first, size=10), *rest))
    moved, _, _ = rounds(structure)(other)
    chex.assert_trees_all_equal(moved.server[0][0], other.server[0][0])
    chex.assert_trees_all_equal(host(moved.server[0][1:]), host(after.server[0][1:]))
    chex.assert_trees_all_equal(host(moved.clients), host(after.clients))


def test_without_distillation_clients_train_alone(rounds):
    """Property 9: own epochs of cross-entropy, whatever l and the server are."""
    run, cohort = rounds(objective="supervised"), cohort_of(*COHORT)
    state = start((6, 4, 3, 5, 2))
    after, _, _ = run(state, cohort)
    own, _, _, _ = reference_round(state, cohort, DATA["ladder"], (), "supervised")
    for number, expected in own.items():
        got = layers_of(client(after.clients["own"][0], number))
        chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
    for other in (
        with_server(state, perturbed(state.server[0])),
        start((2, 3, 6, 1, 5)),
    ):
        again, _, _ = run(other, cohort)
        chex.assert_trees_all_equal(
            host(again.clients["own"]), host(after.clients["own"])
        )


def test_without_distillation_the_server_is_fedavg(rounds):
    """Property 10: equal first layers, frozen: FedAvg's steps and mean, by hand."""
    state, cohort = start((6, 4, 3, 5, 2)), cohort_of(*COHORT)
    first = jax.tree.map(
        lambda leaf: np.repeat(leaf[None], NUM_CLIENTS, 0), state.server[0][0]
    )
    state = with_own(state, (first, *state.clients["own"][0][1:]))
    after, _, _ = rounds(objective="supervised")(state, cohort)
    data, trained = DATA["ladder"], []
    for index in np.flatnonzero(cohort.row_mask):
        params = layers_of(state.server[0])
        adam, number = Adam(params), int(cohort.client_id[index])
        for b in batches_of(cohort, "server", index):
            rows = data.partition.train.row[data.partition.train.start[number] + b]
            image, label = data.gather(rows)
            out = outputs(params, np.float64(image).reshape(len(b), -1))
            slope = (softmax(out[L]) - np.eye(NUM_CLASSES)[label]) / len(b)
            grads = backward(params, out, slope, L)
            params = adam.step(params, grads, 0.01 * 0.8**2, range(1, L))
        trained.append(params)
    expected = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *trained)
    assert differs(expected, layers_of(state.server[0]), 1e-3)
    got = layers_of(after.server[0])
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


def test_upload_order_does_not_matter(rounds):
    """Property 17: a client's rows in another order, with the same batches."""
    state, cohort, data = start((6, 4, 3, 5, 2)), cohort_of(*COHORT), DATA["ladder"]
    gen, train = np.random.default_rng(0), data.partition.train
    row = train.row.copy()
    plans = {name: np.array(made.position) for name, made in cohort.plans.items()}
    for index in np.flatnonzero(cohort.row_mask):
        number = cohort.client_id[index]
        order = gen.permutation(SIZES[number])
        begin = train.start[number]
        row[begin + order] = train.row[begin : begin + SIZES[number]]
        for position in plans.values():
            real = position[index] >= 0
            position[index] = np.where(real, order[position[index]], -1)
    plans = {
        name: cohort.plans[name].replace(position=position)
        for name, position in plans.items()
    }
    partition = data.partition.replace(train=train.replace(row=row))
    after, _, _ = rounds()(state, cohort)
    again, _, _ = rounds()(
        state, cohort.replace(plans=plans), data.replace(partition=partition)
    )
    first, second = ((s.server, s.clients["own"]) for s in (after, again))
    chex.assert_trees_all_close(first, second, rtol=1e-5, atol=1e-6)
    # The control: rows move, the plan does not follow.
    other, _, _ = rounds()(state, cohort, data.replace(partition=partition))
    assert differs(other.server, after.server, 1e-4)


@pytest.mark.parametrize("structure", ["default", "joint_mse"])
def test_order_and_padding_do_not_matter(structure, rounds):
    """Property 19: rows in any order, padding anywhere and with anything in it."""
    run, state = rounds(structure), start((6, 4, 3, 5, 2))
    after, _, counts = run(state, cohort_of(0, None, 2, 1))
    alike = cohort_of(1, 2, 0, None)
    moved, _, moved_counts = run(state, alike)
    chex.assert_trees_all_close(
        host(after.server), host(moved.server), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(np.asarray(counts)[[3, 2, 0]], moved_counts[:3])
    # Below the same server all is bitwise: give every phi the same order of summing.
    if structure == "default":
        alone = rounds(objective="supervised")
        first, _, _ = alone(state, cohort_of(0, None, 2, 1))
        second, _, _ = alone(state, alike)
        chex.assert_trees_all_equal(host(first.clients), host(second.clients))
    junk = {
        name: made.replace(
            position=np.where(alike.row_mask[:, None, None], made.position, 3)
        )
        for name, made in alike.plans.items()
    }
    again, _, _ = run(state, alike.replace(plans=junk))
    chex.assert_trees_all_equal(host_state(moved), host_state(again))


def test_empty_batches_do_not_matter(rounds):
    """Property 19: an all-masked step changes no weight, moment or count."""
    run, state = rounds("reverse"), start((6, 4, 3, 5, 2), persist=True)
    cohort = cohort_of(2, None, 1, 0)
    plans = {}
    for name, made in cohort.plans.items():
        position, steps = made.position.copy(), made.num_steps.copy()
        for index in (0, 2):
            kept = position[index, 1:-1].copy()
            position[index, 1], position[index, 2:] = -1, kept
            steps[index] += 1
        plans[name] = made.replace(position=position, num_steps=steps)
    after, _, _ = run(state, cohort)
    again, _, _ = run(state, cohort.replace(plans=plans))
    chex.assert_trees_all_equal(host_state(after), host_state(again))


@pytest.mark.parametrize("structure", ["default", "joint_mse"])
def test_server_is_the_mean_of_the_round(structure, rounds):
    """Property 20: over the participants, each as if alone; no step, no move."""
    run, state = rounds(structure), start((6, 4, 3, 5, 2))
    together, _, _ = run(state, cohort_of(*COHORT))
    singles = [run(state, cohort_of(n, None, None, None))[0].server for n in (0, 1, 2)]
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *map(host, singles))
    assert differs(singles[0], singles[1], 1e-3)
    chex.assert_trees_all_close(host(together.server), mean, rtol=1e-5, atol=1e-6)
    cohort = cohort_of(*COHORT)
    still, _, _ = run(state, without_steps(cohort, "server"))
    chex.assert_trees_all_close(still.server, state.server, rtol=3e-7, atol=0)
    assert differs(still.clients["own"], state.clients["own"], 1e-3)
    still, _, _ = run(state, without_steps(cohort, "local"))
    chex.assert_trees_all_equal(host(still.clients["own"]), state.clients["own"])
    chex.assert_trees_all_equal(host(still.server), host(together.server))


@pytest.mark.parametrize("layer", range(1, L + 1))
def test_squared_error_stays_below_the_boundary(layer, rounds):
    """Property 21: layers it moves and reads; at l = 1 none."""
    run, cohort = rounds("mse", "distil"), cohort_of(0, None, None, None)
    state = start((layer,) * NUM_CLIENTS)
    after, _, _ = run(state, cohort)
    losses = {side: run.log[side, 0][0] for side in EPOCHS}
    old, new = client(state.clients["own"][0], 0), client(after.clients["own"][0], 0)
    for i in range(L):
        pairs = {
            "own": (old[i], new[i]),
            "server": (state.server[0][i], after.server[0][i]),
        }
        for side, pair in pairs.items():
            if 1 < layer > i >= (side == "server"):
                assert differs(*pair, 1e-3), (side, i)
            else:
                chex.assert_trees_all_equal(*map(host, pair))
    deeper = perturbed(state.clients["own"][0][layer:], size=2)
    other = with_own(state, (*state.clients["own"][0][:layer], *deeper))
    again, _, _ = run(other, cohort)
    assert {side: run.log[side, 0][0] for side in EPOCHS} == losses
    chex.assert_trees_all_equal(host(again.server), host(after.server))
    chex.assert_trees_all_equal(client(again.clients["own"][0][:layer], 0), new[:layer])
    # c = 2 is exact; weights rest, so that all steps see the same features.
    run(state, cohort, client_lr=0.0)
    once = {side: run.log[side, 0][0] for side in EPOCHS}

    def scaled(params):
        grown = jax.tree.map(lambda leaf: 2 * leaf, params[layer - 1])
        return (*params[: layer - 1], grown, *params[layer:])

    if layer == 1:
        assert all(loss == 0 for loss in once.values())
        return
    double = with_server(state, scaled(state.server[0]))
    double = with_own(double, scaled(state.clients["own"][0]))
    run(double, cohort, client_lr=0.0)
    for side in EPOCHS:
        assert run.log[side, 0][0] == 4 * once[side] > 0.1


def test_squared_error_of_feature_maps(rounds):
    """Property 21: the mean over all elements of a feature map; `--fixed_layer`."""
    run = rounds(
        "mse", "distil", "conv", fixed_layer=2, client_optimizer="sgd", **UNSCHEDULED
    )
    state = start((4, 1, 3, 2, 1), "conv")
    run(state, client_lr=0.0)
    data = DATA["conv"]
    image, _ = data.gather(data.partition.train.row)

    @quick_jit
    def maps(own, server):
        h, _ = CONV.forward(*own, image, stop=1)
        theirs, _ = CONV.forward(*server, h, start=1, stop=2)
        return CONV.forward(*own, image, stop=2)[0], theirs

    for number in (0, 1, 2):
        mine, theirs = maps(client(state.clients["own"], number), state.server)
        assert mine.shape == (sum(SIZES), 2, 2, 4)
        owned = slice(sum(SIZES[:number]), sum(SIZES[: number + 1]))
        total = ((mine - theirs) ** 2).mean((1, 2, 3))[owned].sum()
        for side, epochs in EPOCHS.items():
            got = run.log[side, number][0]
            np.testing.assert_allclose(got, epochs * total, rtol=1e-4)


def first_moments(opt_state):
    """Adam's first moments by layer."""
    found = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "mu"))
    return [state.mu for state in found if hasattr(state, "mu")]


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_gradient_of_the_divergence(tau, rounds):
    """Property 22: tau * (softmax(z / tau) - t) of one example; its sum is 0."""
    run = rounds("persist", "distil")
    state, cohort = start((6,) * NUM_CLIENTS, persist=True), cohort_of(0, None, 2, 1)
    made = cohort.plans["local"]
    position = np.full_like(made.position, -1)
    position[:, 0, 0] = made.position[:, 0, 0]
    plans = cohort.plans | {"local": made.replace(position=position)}
    cohort = without_steps(cohort.replace(plans=plans), "server")
    after, _, _ = run(state, cohort, temperature=tau)
    data, train = DATA["ladder"], DATA["ladder"].partition.train
    for index, number in ((0, 0), (2, 2), (3, 1)):
        image, _ = data.gather(train.row[train.start[number] + position[index, 0, :1]])
        own = layers_of(client(state.clients["own"][0], number))
        out = outputs(own, np.float64(image).reshape(1, -1))
        answer = outputs(layers_of(state.server[0]), out[1], 1)[L]
        p, t = softmax(out[L] / tau), softmax(answer / tau)
        value = tau**2 * (t * (np.log(t) - np.log(p))).sum()
        assert value > 1e-3
        np.testing.assert_allclose(run.log["local", number][0], value, rtol=1e-4)
        moments = first_moments(client(after.clients["opt_state"], number))
        slope = moments[L - 1]["trunk"]["bias"] / 0.1
        np.testing.assert_allclose(slope, tau * (p - t)[0], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(slope.sum(), 0, atol=1e-5)


def test_divergence_vanishes_only_where_both_agree(rounds):
    """Property 22: not negative, 0 for equal models, finite for a certain teacher."""
    run, layers = rounds("persist", "distil"), (6, 4, 3, 5, 2)
    state = start(layers, persist=True)
    run(state)
    assert all(run.log[side, n][0] > 0.1 for side in EPOCHS for n in (0, 1, 2))
    same = jax.tree.map(
        lambda leaf: np.repeat(leaf[None], NUM_CLIENTS, 0), state.server[0]
    )
    after, _, _ = run(with_own(state, same), client_lr=0.0)
    for number in (0, 1, 2):
        for side in EPOCHS:
            assert 0 <= run.log[side, number][0] + 1e-5 < 2e-5
        slopes = first_moments(client(after.clients["opt_state"], number))
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(slopes)) < 1e-6
    *lower, last = state.clients["own"][0]
    certain = jax.tree.map(lambda leaf: leaf * 1e4, last)
    after, _, _ = run(with_own(state, (*lower, certain)))
    leaves = jax.tree.leaves((after.server, after.clients))
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert all(np.isfinite(loss) for loss, _ in run.log.values())


MEGABYTES = {
    "m1": (6.586, 6.606, 6.657, 8.193, 9.831, 6.554),
    "m2": (13.428, 13.210, 13.518, 19.662, 26.215, 13.108),
    "m2 of femnist": (10.234, 10.138, 10.446, 13.722, 20.071, 10.036),
}
HEADS = {
    "m1": (0, 0.0007, 0.0028, 0.0685, 0.0870),
    "m2": (0, 0.0132, 0.0297, 1.0788, 1.3742),
    "m2 of femnist": (0, 0.0082, 0.0247, 0.6150, 0.9105),
}
INPUTS = {
    "m1": ((32, 32, 3), 10),
    "m2": ((32, 32, 3), 100),
    "m2 of femnist": ((28, 28, 1), 62),
}


def traffic_of(hparams, task, participations, sizes):
    """Bytes up and down of each client and the sum of l, without any training.

    Only the counts are compiled: the rest of the round is dead code.
    """
    count = len(participations)
    made = fedd2s.make(hparams, task._replace(num_clients=count))
    nothing = types.Data(None, None, None, None, None)
    shapes = jax.eval_shape(made.init, nothing, jax.random.key(0))
    state = types.RoundState(
        *jax.tree.map(
            lambda leaf: np.zeros(leaf.shape, leaf.dtype),
            (shapes.server, shapes.clients),
        ),
        jax.random.key(0),
        np.int32(0),
    )
    clients = state.clients | {"participations": np.array(participations, np.int32) - 1}
    position = np.zeros((count, 1, hparams.batch_size), np.int32)
    one = types.Plan(position, position[..., 0], np.ones(count, np.int32))
    ids = np.arange(count, dtype=np.int32)
    cohort = types.Cohort(
        ids,
        ids,
        ids >= 0,
        ids,
        ids[:, None],
        ids[:, None] >= 0,
        {"server": one, "local": one},
    )
    rows = types.ClientRows(np.zeros(9, np.int32), 0 * ids, np.array(sizes, np.int32))
    data = types.Data(
        np.zeros((9, *task.example_shape), np.float32),
        np.zeros(9, np.int32),
        np.float32(0),
        np.float32(1),
        types.Partition(rows, rows, np.zeros(0, np.int32)),
    )

    @quick_jit
    def counted(state, cohort, data):
        _, metrics, counts = made.round(state, cohort, data)
        return counts, metrics["mean_layer"][0]

    counts, layer = counted(state.replace(clients=clients), cohort, data)
    assert counts.shape == (count, len(made.messages)) and counts.dtype == np.int32
    sent = [traffic.cumulative(row, made.messages) for row in counts]
    up, down = ([one[f"bytes_{way}"] for one in sent] for way in ("up", "down"))
    return up, down, int(layer)


@pytest.mark.parametrize("name", MEGABYTES)
def test_bytes_of_the_papers_models(name):
    """Property 23: section 1.1's table, l = 6..1, 800 examples."""
    shape, num_classes = INPUTS[name]
    model = models.MODELS[name.split()[0]](num_classes)
    task = task_of()._replace(
        server_model=model,
        client_models=(model,),
        num_classes=num_classes,
        num_examples=800,
        example_shape=shape,
    )
    hparams = fedd2s.HParams(batch_size=2, **SCHEDULE)
    up, down, total = traffic_of(hparams, task, range(1, 7), [800] * 6)
    assert total == 21
    np.testing.assert_allclose(np.array(up) / 1e6, MEGABYTES[name], atol=5.1e-4)
    targets = 800 * num_classes * 4
    head = (np.array(down) - targets) / 1e6
    np.testing.assert_allclose(head[:5], HEADS[name], atol=5.1e-5)
    counts = [
        sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(stage))
        for stage in traffic.shapes(model, shape)[0]
    ]
    for number, layer in enumerate(range(6, 0, -1)):
        assert down[number] == targets + 4 * sum(counts[layer:])


WIDTHS = (10, 8, 7, 6, 5, 4)
PARAMETERS = (100, 88, 63, 48, 35, 24)


@pytest.mark.parametrize("structure", ["head", "own", "mse"])
def test_bytes_in_closed_form(structure):
    """Property 23: up K (s_1 + s_l) and labels; down t and head, t, or targets.

    Neither epochs nor values matter.
    """
    hparams = {
        "head": {},
        "own": {"s2c_head": "own", "server_epochs": 3, "local_epochs": 4},
        "mse": {"transfer": "mse"},
    }[structure]
    hparams = fedd2s.HParams(batch_size=2, **SCHEDULE | hparams)
    sizes = [20, 3, 11, 7, 5, 9]
    up, down, _ = traffic_of(hparams, task_of(), range(1, 7), sizes)
    for layer, size, got_up, got_down in zip(
        range(6, 0, -1), sizes, up, down, strict=True
    ):
        width = WIDTHS[layer - 1] if layer > 1 else 0
        assert got_up == size * (4 * (WIDTHS[0] + width) + 1)
        if structure == "mse":
            assert got_down == size * 4 * WIDTHS[layer - 1]
        else:
            head = 0 if structure == "own" else 4 * sum(PARAMETERS[layer:])
            assert got_down == size * 4 * NUM_CLASSES + head


@pytest.mark.parametrize(
    ("hparams", "layers"),
    [
        ({}, (6, 6, 5, 5, 5, 5)),
        ({"drop_every": 2, "min_layer": 4}, (6, 5, 5, 4, 4, 4)),
        ({"drop_every": 1, "drop_set": "L4"}, (6, 4, 3, 2, 2, 2)),
        ({"drop_every": 0, "min_layer": 2}, (6, 6, 6, 6, 6, 6)),
        ({"fixed_layer": 3}, (3, 3, 3, 3, 3, 3)),
    ],
    ids=str,
)
def test_schedule_options(hparams, layers):
    """Properties 1 and 23, section 1.4: which layer goes up at Z = 1, 3, 4, 5, 8, 99.

    Without options the floor of a model without convolutions is its last hidden layer.
    """
    hparams = fedd2s.HParams(batch_size=2, **hparams)
    up, _, total = traffic_of(hparams, task_of(), (1, 3, 4, 5, 8, 99), [1] * 6)
    assert up == [4 * (WIDTHS[0] + WIDTHS[layer - 1]) + 1 for layer in layers]
    assert total == sum(layers)


def test_fixed_layer_decides_what_is_trained(rounds):
    """Section 1.4: layers above `--fixed_layer` see no distillation, whatever Z is."""
    run = rounds(
        "mse", "distil", "conv", fixed_layer=2, client_optimizer="sgd", **UNSCHEDULED
    )
    state = start((4, 1, 3, 2, 1), "conv")
    after, _, _ = run(state)
    for number in (0, 1, 2):
        old, new = (client(s.clients["own"][0], number) for s in (state, after))
        assert differs(old[:2], new[:2], 1e-4)
        chex.assert_trees_all_equal(old[2:], new[2:])


@pytest.mark.parametrize(
    ("hparams", "message"),
    [
        ({"min_layer": 9}, "--min_layer=9: --model=conv has 4 layers"),
        ({"fixed_layer": 5}, "--fixed_layer=5: --model=conv has 4 layers"),
        ({"drop_set": "L3"}, "--drop_set=L3 goes down to the stage C3, --model=conv"),
        ({"fixed_layer": 2, "min_layer": 2}, "--min_layer=2 .*--fixed_layer=2; leave"),
        (
            {"fixed_layer": 2, "drop_set": "L4"},
            "--drop_set=L4 .*--fixed_layer=2; leave",
        ),
        (
            {"fixed_layer": 2, "drop_every": 1},
            "--drop_every=1 .*--fixed_layer=2; leave",
        ),
        ({"transfer": "mse", "kl": "reverse"}, "--kl=reverse .*--transfer=mse"),
        ({"transfer": "mse", "temperature": 2.0}, "--temperature=2.0 .*--transfer=mse"),
        ({"transfer": "mse", "teacher_head": "live"}, "--teacher_head=live .*=mse"),
        ({"transfer": "mse", "s2c_head": "own"}, "--s2c_head=own .*--transfer=mse"),
        ({"drop_set": "L4", "min_layer": 2}, "give one of them"),
    ],
)
def test_bad_boundaries_are_refused(hparams, message):
    """The error lines of the schedule name the flag."""
    with pytest.raises(ValueError, match=message):
        fedd2s.make(fedd2s.HParams(**hparams), task_of("conv"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"drop_every": -1},
        {"drop_set": "L5"},
        {"kl": "symmetric"},
        {"transfer": "features"},
        {"temperature": 0.0},
        {"server_epochs": 0},
    ],
)
def test_bad_values_are_refused(wrong):
    """Choices and ranges of the options."""
    with pytest.raises(ValueError, match=f"--{next(iter(wrong))}="):
        options.validate(fedd2s.HParams(**wrong))


def test_everybody_starts_equal_and_is_evaluated():
    """Section 1.0: one initialisation; all N clients' own models are evaluated."""
    hparams = fedd2s.HParams(optimizer_state="persist", client_optimizer="adam")
    made = fedd2s.make(hparams, task_of("short"))
    state = quick_jit(made.init)(DATA["short"], jax.random.key(0))
    for number in range(NUM_CLIENTS):
        chex.assert_trees_all_equal(
            client(state.clients["own"], number), host(state.server)
        )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.clients["opt_state"]))
    np.testing.assert_array_equal(state.clients["participations"], [0] * NUM_CLIENTS)
    (served,) = made.serving(state, None, None)
    chex.assert_trees_all_equal(served.params, state.clients["own"][0])
    np.testing.assert_array_equal(served.client_id, range(NUM_CLIENTS))
    assert np.asarray(served.mask).all() and not served.shared
    assert made.server_params(state) is None
    assert [(p.name, p.epochs) for p in made.plans] == [("server", 2), ("local", 2)]


def accuracies(experts, image, label, owned):
    """Share of right answers of each client's model on examples of its own classes."""
    right = []
    for params, classes in zip(experts, owned, strict=True):
        mine = np.isin(label, classes)
        answers = outputs(params, image[mine])[L].argmax(1)
        right.append((answers == label[mine]).mean())
    return np.array(right)


@pytest.mark.parametrize("shuffled", [False, True])
def test_learns(shuffled, rounds):
    """Property 27: beats FedAvg where clients own two classes; noise gives chance."""
    run, rate, num_rounds = rounds(), 0.03, 16
    owned = [(n % 4, (n + 1) % 4) for n in range(NUM_CLIENTS)]
    data = tables(seed=1, noise=0.0)
    train, gen = data.partition.train, np.random.default_rng(0)
    label = data.label.copy()
    for number, classes in enumerate(owned):
        rows = train.row[train.start[number] :][: SIZES[number]]
        label[rows] = np.resize(classes, len(rows))
    centre = 0.8 * gen.normal(size=(NUM_CLASSES, 9))

    def drawn(label):
        return (centre[label] + gen.normal(size=(len(label), 9))).astype(np.float32)

    test_label = gen.integers(NUM_CLASSES, size=4000)
    test_image = (drawn(test_label) - 0.2) * np.float32(1.1)
    data = data.replace(label=label, image=drawn(label).reshape(-1, *SHAPE))
    if shuffled:
        data = data.replace(label=gen.integers(NUM_CLASSES, size=len(label)))
    state = start(round=0)
    server, stats = state.server
    common = jax.tree.map(lambda leaf: np.repeat(leaf[None], NUM_CLIENTS, 0), server)
    state = with_own(state, common)
    averaged, losses = layers_of(server), []
    image = (np.float64(data.image) - 0.2).reshape(-1, 9) * 1.1
    for number in range(num_rounds):
        gen = np.random.default_rng(number)
        chosen = gen.choice(NUM_CLIENTS, 3, replace=False)
        cohort = cohort_of(*chosen, None, seed=number)
        state, metrics, _ = run(
            state, cohort, data, client_lr=rate, client_lr_decay=1.0
        )
        losses.append(float(metrics["train_loss"][0]) / int(metrics["train_loss"][1]))
        copies = []
        for index, client_id in enumerate(chosen):
            params, adam = copied(averaged), Adam(averaged)
            for b in batches_of(cohort, "local", index):
                rows = train.row[train.start[client_id] + b]
                out = outputs(params, image[rows])
                slope = (softmax(out[L]) - np.eye(NUM_CLASSES)[data.label[rows]]) / len(
                    b
                )
                grads = backward(params, out, slope, L)
                params = adam.step(params, grads, rate, range(L))
            copies.append(params)
        averaged = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *copies)
    own = [layers_of(client(state.clients["own"][0], n)) for n in range(NUM_CLIENTS)]
    everybody = [(0, 1, 2, 3)] * NUM_CLIENTS
    classes = everybody if shuffled else owned
    mine = accuracies(own, test_image, test_label, classes).mean()
    fedavg = accuracies(
        [averaged] * NUM_CLIENTS, test_image, test_label, classes
    ).mean()
    assert np.isfinite(losses).all()
    if shuffled:
        assert abs(mine - 0.25) < 0.1
    else:
        assert mine > fedavg + 0.1 and mine > 0.75
        assert losses[-1] < losses[0] / 2
