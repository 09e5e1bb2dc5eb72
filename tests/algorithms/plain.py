"""The one reference of these tests: chains of dense layers in plain numpy.

Parameters are lists of [kernel, bias] in float64; gradients are written by hand. A
method's own reference is a function of a round, `(state, cohort, table, values) ->
(the server's layers or None, the layers of the round's clients by id or None, and what
else the method knows)`, which `follow` compares with the compiled round. The rest is
what all tests ask of a state: which model is whose, which serves a client, what was
sent.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import numpy as np

from data import plan, topology
from fedjax_pfl import each_client, traffic, types
from tests import padded

# Pytrees and states.


def host(tree):
    """A pytree as numpy arrays."""
    return jax.tree.map(np.asarray, tree)


def at(tree, index):
    """One row of a stacked pytree, as numpy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree)


def stack(trees):
    """Rows to a stacked pytree."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def differs(first, second, by=1e-4):
    """Whether any two leaves differ."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return any(np.abs(np.asarray(a) - np.asarray(b)).max() > by for a, b in pairs)


def perturbed(tree, seed=0, size=0.5):
    """Every number moved at random."""
    gen = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: leaf + np.float32(size * gen.normal(size=leaf.shape)), host(tree)
    )


def sound(variables, size=1.0):
    """The same Variables with statistics above 0, as variances are, times `size`."""
    stats = jax.tree.map(lambda x: size * (np.abs(x) + 0.5), variables.stats)
    return variables._replace(stats=stats)


def assert_largest(mask, score, count, among=None, gap=1e-5):
    """`mask` has exactly `count` True entries, those of the largest scores in `among`.

    Of scores within `gap` of each other either may be chosen.
    """
    everywhere = jax.tree.map(np.ones_like, mask)
    chosen, allowed, score = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (mask, everywhere if among is None else among, score)
    )
    chosen, allowed = chosen > 0, allowed > 0
    assert chosen.sum() == count and not (chosen & ~allowed).any()
    least, left = score[chosen], score[allowed & ~chosen]
    assert least.min(initial=np.inf) >= left.max(initial=0) - gap


def replaced(stacked, number, other):
    """Row `number` of a stacked pytree is that of another one."""

    def of_leaf(leaf, new):
        leaf = np.array(leaf)
        leaf[number] = np.asarray(new)[number]
        return leaf

    return jax.tree.map(of_leaf, stacked, other)


def _place(held, *names):
    """Which entry of a state's part holds models; None = the part itself."""
    if isinstance(held, types.Variables):
        return None
    return next(name for name in names if name in held)


def server(state):
    """The server's Variables."""
    name = _place(state.server, "model")
    return state.server if name is None else state.server[name]


def own(state, number=None):
    """The clients' Variables, stacked, or those of one client as numpy arrays."""
    name = _place(state.clients, "own", "copy")
    models = state.clients if name is None else state.clients[name]
    return models if number is None else at(models, number)


def with_server(state, variables):
    """The same state with another model of the server."""
    name = _place(state.server, "model")
    if name is None:
        return state.replace(server=variables)
    return state.replace(server=state.server | {name: variables})


def with_own(state, variables):
    """The same state with other models of the clients."""
    name = _place(state.clients, "own", "copy")
    if name is None:
        return state.replace(clients=variables)
    return state.replace(clients=state.clients | {name: variables})


def server_layers(state):
    """The server's layers in float64."""
    return layers(server(state).params)


def own_layers(state, number):
    """A client's layers in float64."""
    return layers(own(state, number).params)


def served(made, state, cohort=None, data=None, num_clients=5):
    """The Variables that serve each client; nobody is served twice, nobody left out."""
    out = [None] * num_clients
    for group in made.serving_groups(state, cohort, data, num_clients):
        for slot, number in enumerate(np.asarray(group.client_id)):
            if np.asarray(group.mask)[slot]:
                assert out[number] is None
                row = None if group.own is None else at(group.own, slot)
                out[number] = host(group.variables(row))
    assert all(one is not None for one in out)
    return out


def assert_models(after, before, expected, rtol=1e-5, atol=1e-5):
    """The layers of these clients; whoever else there is keeps all, bit for bit."""
    for number in range(5):
        if number in expected:
            got = own_layers(after, number)
            chex.assert_trees_all_close(got, expected[number], rtol=rtol, atol=atol)
            assert differs(got, own_layers(before, number), 1e-3)
        else:
            kept = (at((one.clients, one.opt_state), number) for one in (after, before))
            chex.assert_trees_all_equal(*kept)


def assert_own_serve(made, state):
    """Everybody is served by its own model."""
    for number, one in enumerate(served(made, state)):
        chex.assert_trees_all_equal(one, own(state, number))


class Step(NamedTuple):
    """A round that equals its reference: states around it, and what it returned.

    `own` are the reference's layers of clients by id, `more` is what else it gave.
    """

    before: types.RoundState
    after: types.RoundState
    cohort: types.Cohort
    own: dict[int, list] | None
    more: list[Any]
    metrics: dict[str, Any]
    sent: dict[str, Any]


def follow(
    run,
    reference,
    state,
    problem,
    values,
    *,
    cohort_at=None,
    num_rounds=2,
    changes=(),
    by=1e-4,
    rtol=1e-5,
    atol=1e-5,
):
    """Compares rounds with those of a method's reference.

    Args:
        run: A compiled round `(state, cohort) -> (state, metrics, sent)`.
        reference: The method's, see above.
        state: The state before the first round.
        problem: The fixture of that name.
        values: The options that the reference uses.
        cohort_at: `round -> Cohort`, None = the problem's.
        num_rounds: How many rounds.
        changes: Other values of options, each of which must give another last round,
            so that none is ignored unnoticed.
        by: The least difference that they make.
        rtol, atol: How close layers are.

    Returns:
        A `Step` for each round.
    """
    close, steps = {"rtol": rtol, "atol": atol}, []
    for _ in range(num_rounds):
        cohort = (cohort_at or problem.cohort)(int(state.round))
        expected = functools.partial(reference, state, cohort, problem.table)
        server, own, *more = expected(values)
        after, metrics, sent = run(state, cohort)
        if server is not None:
            found = server_layers(after)
            chex.assert_trees_all_close(found, server, **close)
            assert differs(found, server_layers(state), 1e-3)
        if own is not None:
            assert_models(after, state, own, **close)
        steps.append(Step(state, after, cohort, own, more, metrics, sent))
        state = after
    assert int(state.round) == int(steps[0].before.round) + num_rounds
    if changes:
        assert_matters(expected, values, changes, by)
    return steps


def assert_matters(reference, values, changes, by=1e-4):
    """Each of these changes gives another result: none is ignored unnoticed."""
    found = reference(values)
    for option, value in changes.items():
        assert differs(found, reference(values | {option: value}), by), option


def assert_both_ways(made, sent, num_bytes):
    """Each of three clients sent this many bytes, and received as many."""
    both = {"bytes_up": num_bytes, "bytes_down": num_bytes}
    assert sent_bytes(made, sent, 3) == [both] * 3


def sent_bytes(made, sent, num_rows):
    """{"bytes_up", "bytes_down"} of each row of a cohort."""
    rows = np.eye(num_rows, dtype=bool)
    counts = [traffic.counted(sent, made.messages, row) for row in rows]
    return [traffic.cumulative(count, made.messages) for count in counts]


# Layers: forward, backward, losses.


def layers(params):
    """Kernel and bias of each stage."""
    return [
        [np.float64(stage["trunk"][name]) for name in ("kernel", "bias")]
        for stage in params
    ]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def activations(params, x, start=0):
    """The input `x` of layer `start`, then the output of it and each later layer."""
    out = [x]
    for number in range(start, len(params)):
        kernel, bias = params[number]
        x = x @ kernel + bias
        x = x if number == len(params) - 1 else np.maximum(x, 0)
        out.append(x)
    return out


def logits(params, x, start=0):
    return activations(params, x, start)[-1]


def backward(params, acts, slopes, start=0):
    """Gradients of all layers, 0 where none arrives.

    Args:
        params: Layers.
        acts: What `activations(params, x, start)` gave.
        slopes: Gradients to outputs of layers, by number of layers passed.
        start: The first layer that was run.
    """
    grads = [[np.zeros_like(part) for part in layer] for layer in params]
    back = None
    for number in reversed(range(start, len(params))):
        if number + 1 in slopes:
            back = slopes[number + 1] + (0.0 if back is None else back)
        if back is None:
            continue
        if number + 1 < len(params):
            back = back * (acts[number + 1 - start] > 0)
        grads[number] = [acts[number - start].T @ back, back.sum(0)]
        back = back @ params[number][0].T
    return grads


def gradients(params, x, of_logits, start=0):
    """Gradients of all layers, 0 below `start`; `of_logits` maps logits to theirs."""
    acts = activations(params, x, start)
    return backward(params, acts, {len(params): of_logits(acts[-1])}, start)


def cross_entropy(label):
    """Gradient of the mean cross-entropy to the logits."""

    def of_logits(z):
        return (softmax(z) - np.eye(z.shape[1])[label]) / len(label)

    return of_logits


def divergence(student, target, temperature):
    """tau^2 KL(target || student) of softened logits, a mean over rows."""
    p, q = softmax(student / temperature), softmax(target / temperature)
    return temperature**2 * (q * np.log(q / p)).sum(-1).mean()


def of_divergence(student, target, temperature):
    """Gradient of `divergence` to the student's logits."""
    p, q = softmax(student / temperature), softmax(target / temperature)
    return temperature * (p - q) / len(student)


def total(*terms):
    """Sum of gradients of all layers."""
    return jax.tree.map(lambda *parts: sum(parts), *terms)


def scaled(factor, grads):
    return jax.tree.map(lambda g: factor * g, grads)


def minus(first, second):
    return jax.tree.map(lambda a, b: a - b, first, second)


def pull(weight, anchor):
    """Gradients of weight / 2 ||w - anchor||^2, as `One.train` adds them."""
    return lambda params, *_: scaled(weight, minus(params, anchor))


# Optimizers.


class Sgd:
    """Momentum per layer; a layer that is not trained keeps its buffer.

    `clip` bounds the norm of the trained layers' gradients, then `decay` is added.
    """

    def __init__(self, rate, momentum=0.0, clip=np.inf, decay=0.0):
        self.rate, self.momentum, self.buffer = rate, momentum, {}
        self.clip, self.decay = clip, decay

    def step(self, params, grads, trained=None):
        trained = [True] * len(params) if trained is None else trained
        used = [g for i, layer in enumerate(grads) if trained[i] for g in layer]
        norm = np.sqrt(sum((g**2).sum() for g in used))
        factor = min(1.0, self.clip / max(norm, 1e-12))
        out = []
        for number, (layer, grad) in enumerate(zip(params, grads, strict=True)):
            if not trained[number]:
                out.append(layer)
                continue
            old = self.buffer.get(number, [0.0, 0.0])
            new = jax.tree.map(
                lambda g, w, b: factor * g + self.decay * w + self.momentum * b,
                *(grad, layer, old),
            )
            self.buffer[number] = new
            out.append(jax.tree.map(lambda w, b: w - self.rate * b, layer, new))
        return out


class Adam:
    """Adam with one count for each layer, as PyTorch has it where grad is None."""

    def __init__(self, rate):
        self.rate, self.moments = rate, {}

    def step(self, params, grads, trained=None):
        out = []
        for number, (layer, grad) in enumerate(zip(params, grads, strict=True)):
            if trained is not None and not trained[number]:
                out.append(layer)
                continue
            count, first, second = self.moments.get(number, (0, [0, 0], [0, 0]))
            count += 1
            first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grad)
            second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, grad)
            self.moments[number] = (count, first, second)

            def moved(w, m, v, count=count):
                size = np.sqrt(v / (1 - 0.999**count)) + 1e-8
                return w - self.rate * (m / (1 - 0.9**count)) / size

            out.append(jax.tree.map(moved, layer, first, second))
        return out


class Optimizers:
    """One optimizer for each client and round, or, kept, for each client."""

    def __init__(self, make, keep=False):
        self.make, self.keep, self.kept = make, keep, {}

    def of(self, number, rate):
        """The optimizer of client `number` at this round's learning rate."""
        if not self.keep:
            return self.make(rate)
        tx = self.kept.setdefault(number, self.make(rate))
        tx.rate = rate
        return tx


# The problem: examples, plans, local training, means.


class Table:
    """Images and labels of a problem as numpy arrays."""

    def __init__(self, data):
        self.image, self.label = host(data.image), host(data.label)
        self.mean, self.scale = host(data.mean), host(data.scale)
        self.train, self.test = host(data.partition.train), host(data.partition.test)
        self.proxy = host(data.partition.proxy)

    def images(self, rows):
        """Normalised flat images f64[N, H * W]."""
        image = (np.float64(self.image[rows]) - self.mean) * self.scale
        return image.reshape(len(rows), -1)

    def owned(self, number):
        """Train rows of a client."""
        start = self.train.start[number]
        return self.train.row[start : start + self.train.count[number]]

    def tested(self, number):
        """Test rows of a client."""
        start = self.test.start[number]
        return self.test.row[start : start + self.test.count[number]]

    def batches(self, size):
        """The proxy rows in batches."""
        return [self.proxy[i : i + size] for i in range(0, len(self.proxy), size)]

    def steps(self, one, number):
        """(positions, rows, epoch) of each step of a client's plan."""
        for step in range(int(one.num_steps)):
            position = one.position[step]
            position = position[position >= 0]
            yield position, self.owned(number)[position], int(one.epoch[step])


def members(cohort):
    """{client: row of the cohort}, padding left out."""
    rows = np.flatnonzero(cohort.row_mask)
    return {int(cohort.client_id[row]): int(row) for row in rows}


@dataclasses.dataclass
class One:
    """A client of a round."""

    state: types.RoundState
    cohort: types.Cohort
    table: Table
    number: int
    row: int

    @property
    def server(self):
        """The server's layers before the round."""
        return server_layers(self.state)

    @property
    def own(self):
        """The client's own layers before the round."""
        return own_layers(self.state, self.number)

    @property
    def peers(self):
        """The ids of its peers."""
        return self.cohort.peers[self.row][self.cohort.peer_mask[self.row]].tolist()

    def rate(self, values):
        """The learning rate of the round."""
        return values["client_lr"] * values["client_lr_decay"] ** int(self.state.round)

    def sgd(self, values, **more):
        """An optimizer of the round."""
        return Sgd(self.rate(values), values.get("client_momentum", 0.0), **more)

    def plan(self, name="local"):
        """Its row of a plan."""
        return at(self.cohort.plans[name], self.row)

    def steps(self, name="local"):
        """(positions, rows, epoch) of each step of a plan."""
        return self.table.steps(self.plan(name), self.number)

    def train(self, params, tx, name="local", *, trained=None, extra=None):
        """Cross-entropy over a plan.

        Args:
            params: Where to start.
            tx: `Sgd` or `Adam`.
            name: The plan.
            trained: Epoch to bool[L], or None.
            extra: (params, positions, rows) to gradients that are added, or None.
        """
        for position, rows, epoch in self.steps(name):
            of_logits = cross_entropy(self.table.label[rows])
            grads = gradients(params, self.table.images(rows), of_logits)
            if extra is not None:
                grads = total(grads, extra(params, position, rows))
            params = tx.step(params, grads, None if trained is None else trained(epoch))
        return params


def clients(state, cohort, table):
    """The clients of a round, padding left out."""
    found = [One(state, cohort, table, *pair) for pair in members(cohort).items()]
    assert found, "a loop over no clients compares nothing"
    return found


def mean(trees, weight):
    """Weighted mean of layers; weights need not sum to 1."""
    weight = np.asarray(weight, float) / np.sum(weight)
    return total(*(scaled(w, tree) for w, tree in zip(weight, trees, strict=True)))


def averaged(trained, table, is_uniform=False):
    """The mean of layers by client, by default weighted by their examples."""
    weight = [1] * len(trained) if is_uniform else table.train.count[list(trained)]
    return mean(list(trained.values()), weight)


def adapter(adapt, task):
    """`(state, cohort, data, start) -> parameters [C, ...]` by an `Algorithm.adapt`.

    Without `start` a client begins with its own row.
    """

    @jax.jit
    def run(state, cohort, data, start=None):
        def fn(client, _):
            begin = client.own if start is None else start
            return adapt(client, begin, state.server).params

        return each_client.update(fn, task, state, cohort, data)[0]

    return lambda *given: host(run(*given))


# Cohorts.


def planner(data, specs, clients_per_round=3, group=None):
    """`round -> Cohort` for the plans of an algorithm, all in one chunk.

    `group` int[K] is the architecture of each client, None = all have the same.
    """
    count = np.asarray(data.partition.train.count)
    zeros = np.zeros(len(count), np.int32)
    cohorts = plan.Planner(
        seeds=[0],
        num_rows=count[None],
        level_of=zeros + 3,
        client_group=zeros if group is None else group,
        clients_per_round=clients_per_round,
        specs=specs,
        execution=types.Execution(clients_per_round),
    )
    return lambda round: padded.cohort(cohorts, 0, round)


def with_peers(cohort, spec, alone=-1):
    """`round -> Cohort` with its peers among five clients; one may have none."""
    graph = topology.make(spec, 5)

    def of_round(round):
        one = cohort(round)
        peers, mask = graph.draw(0, round, one.client_id)
        mask &= (one.client_id != alone)[:, None]
        return one.replace(peers=peers.astype(np.int32), peer_mask=mask)

    return of_round


def at_levels(cohort, level):
    """Its clients have these levels."""
    return cohort.replace(level=np.asarray(level, np.int32))


def permuted(cohort, order):
    """The same clients in another order."""
    return jax.tree.map(lambda leaf: leaf[np.asarray(order)], cohort)


def without(cohort, row, num_clients):
    """The row is padding: nobody is there."""
    real = np.arange(len(cohort.row)) != row

    def emptied(one):
        return padded.Plan(
            np.where(real[:, None, None], one.position, -1),
            np.where(real[:, None], one.epoch, 0),
            np.where(real, one.num_steps, 0),
        )

    return cohort.replace(
        client_id=np.where(real, cohort.client_id, num_clients).astype(np.int32),
        row=np.where(real, cohort.row, num_clients).astype(np.int32),
        row_mask=cohort.row_mask & real,
        plans={name: emptied(one) for name, one in cohort.plans.items()},
    )


def cut(cohort, num_steps, name="local"):
    """The cohort with at most `num_steps` (a number, or int[C]) steps in one plan."""
    one = cohort.plans[name]
    fewer = np.minimum(one.num_steps, num_steps).astype(np.int32)
    plans = cohort.plans | {name: one.replace(num_steps=fewer)}
    return cohort.replace(plans=plans)
