"""UA-PDFL against numpy, and the properties of its specification's section 6."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from algorithms import uapdfl
from fedjax_pfl import distances, options, rng, shapes, types
from launch.config import resolve
from tests.algorithms import conftest, plain
from tests.fedjax_pfl import small

GRAPH = types.PeerSpec(5, "erdos_renyi", edge_probability=0.4)
SHARED = {"client_momentum": 0.5, "optimizer_state": "persist"}
STRUCTURES = {
    "code": SHARED,
    "paper": SHARED
    | {
        "divergence": "symkl",
        "proximal": "unit",
        "anchor": "with_own",
        "personal_from": "dense2",
    },
    "no dropout": SHARED | {"client_dropout": False},
    "all layers": SHARED | {"client_dropout": False, "layer_personalization": False},
}
FLOATS = {
    "client_lr": 0.1,
    "client_lr_decay": 0.8,
    "divergence_threshold": 0.08,
    "proximal_weight": 0.7,
    "unit_value": 0.6,
}
UNIT = np.full((1, 64), FLOATS["unit_value"])


def option_of(name, option):
    return STRUCTURES[name].get(option, getattr(uapdfl.HParams(), option))


def cut_of(name):
    return 1 if option_of(name, "personal_from") == "dense2" else 2


def make(problem, **given):
    return uapdfl.make(uapdfl.HParams(batch_size=5, **given), problem.task_of())


@pytest.fixture(scope="module")
def cohort_at(problem):
    """`round -> Cohort` of three of five clients and their peers; one has none."""
    return plain.with_peers(problem.cohort, GRAPH, alone=2)


def represent(layers, cut, unit=UNIT):
    """I and I^Aux."""
    acts = plain.activations(layers, unit)
    return acts[-1][0], acts[cut][0]


@pytest.fixture(scope="module")
def given(start):
    """Makes states before round 0: clients are all different, or all the same."""

    def make(name="code", equal=False):
        state = start(round=0, equal=equal)
        hparams = uapdfl.HParams(**STRUCTURES[name])
        kept = small.opt_states(hparams, state.server.params, 5)
        alone = state.replace(clients={"own": state.clients})
        found = [represent(plain.own_layers(alone, k), cut_of(name)) for k in range(5)]
        answer, features = (
            np.float32(np.stack(part)) for part in zip(*found, strict=True)
        )
        private = {"answer": answer, "features": features}
        clients = {"own": state.clients, "private": private}
        return state.replace(server=(), clients=clients, opt_state=kept)

    return make


def js(first, second):
    """Jensen-Shannon in float64."""
    p, q = plain.softmax(np.float64(first)), plain.softmax(np.float64(second))
    m = (p + q) / 2
    return ((p * np.log(p / m)).sum(-1) + (q * np.log(q / m)).sum(-1)) / 2


def symkl(first, second):
    """Half of both Kullback-Leibler divergences."""
    p, q = plain.softmax(np.float64(first)), plain.softmax(np.float64(second))
    return ((p - q) * (np.log(p) - np.log(q))).sum(-1) / 2


def picked(state, cohort, row):
    """The peer that a client takes where it drops: the least of its draws."""
    key = rng.stream(state.key, "decentralized.replaced", jnp.asarray(state.round))
    key = jax.random.fold_in(key, int(cohort.client_id[row]))
    draws = np.asarray(jax.random.uniform(key, cohort.peers.shape[1:]))
    draws = np.where(cohort.peer_mask[row], draws, 2)
    return int(cohort.peers[row, draws.argmin()])


def mixed(one, name):
    """Algorithm 1: (layers, anchor, whether it dropped, divergences of its peers)."""
    cut, number, peers = cut_of(name), one.number, one.peers
    sources, sizes = [number, *peers], one.table.train.count
    own = {k: plain.own_layers(one.state, k) for k in sources}
    known = {k: represent(own[k], cut) for k in sources}
    gap = {"js": js, "symkl": symkl}[option_of(name, "divergence")]
    gaps = [float(gap(known[number][0], known[peer][0])) for peer in peers]
    if not peers:
        return own[number], known[number][1], False, gaps
    near = [
        peer
        for peer, gap in zip(peers, gaps, strict=True)
        if gap < FLOATS["divergence_threshold"]
    ]
    drops = len(near) == len(peers) and option_of(name, "client_dropout")
    if option_of(name, "anchor") == "peers":
        anchor = np.average([known[p][1] for p in peers], 0, sizes[peers])
    else:
        anchor = np.mean([known[k][1] for k in sources], 0)
    if drops:
        return own[picked(one.state, one.cohort, one.row)], anchor, True, gaps
    heads = [number, *near]
    if not option_of(name, "layer_personalization"):
        heads = sources
    below, above = (
        plain.averaged({k: own[k] for k in ids}, one.table) for ids in (sources, heads)
    )
    return below[:cut] + above[cut:], anchor, False, gaps


def pull(anchor, name, table):
    """Gradient of mu times the proximal term, as `One.train` takes it."""
    cut, mu = cut_of(name), FLOATS["proximal_weight"]

    def of_batch(params, position, rows):
        acts = plain.activations(params, table.images(rows))
        slope = 2 * mu * (acts[cut] - anchor) / acts[cut].size
        return plain.backward(params, acts, {cut: slope})

    def of_unit(params, position, rows):
        acts = plain.activations(params, UNIT)
        return plain.backward(params, acts, {cut: 2 * mu * (acts[cut] - anchor)})

    return of_batch if option_of(name, "proximal") == "batch" else of_unit


def received(one, drops, near, name):
    """Section 1B: N_com (C + d) + (dropout ? P : N_com P_g + n_sim P_h) floats."""
    sizes = shapes.stage_bytes(conftest.NETWORKS["tiny"], (8, 8, 1))
    cut, peers = cut_of(name), len(one.peers)
    heads = near if option_of(name, "layer_personalization") else peers
    model = peers * sum(sizes[:cut]) + heads * sum(sizes[cut:])
    model = sum(sizes) if drops else model
    return {"bytes_up": 0, "bytes_down": peers * 4 * (4 + (8, 6)[cut - 1]) + model}


def reference(name, txs, state, cohort, table, values):
    """Algorithms 1 and 2; what each client receives, and its divergences, too."""
    own, seen = {}, []
    for one in plain.clients(state, cohort, table):
        begin, anchor, drops, gaps = mixed(one, name)
        is_pulled = option_of(name, "layer_personalization")
        extra = pull(anchor, name, table) if is_pulled else None
        tx = txs.of(one.number, one.rate(values))
        own[one.number] = one.train(begin, tx, extra=extra)
        near = sum(gap < values["divergence_threshold"] for gap in gaps)
        seen.append((received(one, drops, near, name), drops, near, gaps))
    return None, own, seen


@pytest.mark.parametrize("name", STRUCTURES)
def test_rounds_equal_a_numpy_reference(name, compiled, given, problem, cohort_at):
    """Over rounds, with what was known at the end of the last."""
    made, all_seen = make(problem, **STRUCTURES[name]), []
    run, state = compiled("uapdfl", floats=FLOATS, **STRUCTURES[name]), given(name)
    txs = plain.Optimizers(lambda rate: plain.Sgd(rate, 0.5), True)
    expected, more = functools.partial(reference, name, txs), {"cohort_at": cohort_at}
    steps = plain.follow(run, expected, state, problem, FLOATS, num_rounds=6, **more)
    for step in steps:
        layers = [plain.own_layers(step.after, number) for number in range(5)]
        known = [represent(one, cut_of(name)) for one in layers]
        private = step.after.clients["private"]
        for place, key in enumerate(("answer", "features")):
            part = [one[place] for one in known]
            np.testing.assert_allclose(private[key], part, rtol=1e-5, atol=1e-5)
        seen, metrics = step.more[0], step.metrics
        assert plain.sent_bytes(made, step.sent, 3) == [one[0] for one in seen]
        drops = sum(one[1] for one in seen)
        assert [int(part) for part in metrics["dropped"]] == [drops, 3]
        gaps = sum((one[3] for one in seen), [])
        for share, key in ((0.5, "median"), (0.95, "p95")):
            value = np.quantile(gaps, share) if gaps else 0.0
            found = metrics[f"divergence_{key}"][0]
            np.testing.assert_allclose(found, value, rtol=1e-5, atol=3e-6)
        all_seen += seen
    assert any(one[1] for one in all_seen) == option_of(name, "client_dropout")
    assert any(0 < near < len(gaps) for _, _, near, gaps in all_seen)
    assert {bool(gaps) for *_, gaps in all_seen} == {True, False}


@pytest.mark.parametrize("name", list(STRUCTURES)[1:])
def test_the_reference_tells_the_readings_apart(name, given, problem, cohort_at):
    """Guards the test above: every reading mixes or is pulled in its own way."""
    state, table = given(), problem.table
    found = [
        [
            mixed(client, one)[0]
            for cohort in map(cohort_at, range(4))
            for client in plain.clients(state, cohort, table)
        ]
        for one in ("code", name)
    ]
    assert plain.differs(*found, 1e-3)


def test_divergences():
    """Test 8: symmetric, 0 on the diagonal, JS <= ln 2 and <= symkl, any shift."""
    gen = np.random.default_rng(0)
    first, second = 3 * gen.normal(size=(2, 50, 4))
    for kind, reference in (("js", js), ("symkl", symkl)):
        of_kind = uapdfl.DIVERGENCES[kind]
        found = of_kind(jnp.float32(first), jnp.float32(second))
        np.testing.assert_allclose(found, reference(first, second), rtol=1e-5)
        back = of_kind(second + 7.0, first - 2.0)
        np.testing.assert_allclose(found, back, rtol=1e-5, atol=3e-6)
        # Rounding must not make equals alike at threshold 0.
        same = np.float32(3 * gen.normal(size=(2000, 4)))
        found = np.asarray(of_kind(same, same))
        assert (found >= 0).all() and (found < 1e-6).all()
        assert (np.asarray(of_kind(same, same + np.float32(1e-4) * same)) >= 0).all()
    assert (js(first, second) <= symkl(first, second) + 1e-12).all()
    apart = 100 * np.eye(4, dtype=np.float32)
    found = np.asarray(distances.js(apart[:, None], apart[None]))
    np.testing.assert_allclose(found, np.log(2) * (1 - np.eye(4)), atol=1e-6)


def test_replacement_is_a_copy(compiled, given, problem, cohort_at):
    """Test 3: everybody alike: bit for bit a peer's model, each with some chance."""
    floats = FLOATS | {"divergence_threshold": 1.0}
    run, state, took = compiled("uapdfl", **SHARED), given(), set()
    for round in range(12):
        cohort = cohort_at(round)
        resting = plain.cut(cohort, 0)
        now = state.replace(round=np.int32(round))
        after, metrics, _ = run(now, resting, **floats)
        dropped = 0
        for number, row in plain.members(cohort).items():
            source = number
            if cohort.peer_mask[row].any():
                source, dropped = picked(now, cohort, row), dropped + 1
                place = cohort.peers[row][cohort.peer_mask[row]].tolist().index(source)
                took.add((int(cohort.peer_mask[row].sum()), place))
            chex.assert_trees_all_equal(
                plain.own(after, number), plain.own(state, source)
            )
        assert int(metrics["dropped"][0]) == dropped
    assert {(2, 0), (2, 1)} <= took


def test_proximal_term(compiled, given, problem, cohort_at):
    """Test 10: mu = 0 forgets the anchor; the pull leaves classifiers' gradients."""
    cohort, state = cohort_at(1), given()
    row = int(cohort.peer_mask.sum(1).argmax())
    number, peer = int(cohort.client_id[row]), int(cohort.peers[row, 0])
    features = state.clients["private"]["features"].copy()
    features[peer] += 3
    private = state.clients["private"] | {"features": features}
    moved = state.replace(clients=state.clients | {"private": private})
    run = compiled("uapdfl", **SHARED)
    for mu, matters in ((0.0, False), (0.7, True)):
        floats = FLOATS | {"proximal_weight": mu}
        pair = [plain.own(run(s, cohort, **floats)[0], number) for s in (state, moved)]
        assert plain.differs(*pair, 1e-6) == matters
    # One step: what is below the cut goes another way, the classifier the same.
    first = plain.cut(cohort, 1)
    for name in ("code", "paper"):
        one, start, cut = (
            compiled("uapdfl", **STRUCTURES[name]),
            given(name),
            cut_of(name),
        )
        pair = [
            plain.own_layers(
                one(start, first, **FLOATS | {"proximal_weight": mu})[0], number
            )
            for mu in (0.0, 0.7)
        ]
        assert plain.differs(pair[0][:cut], pair[1][:cut], 1e-4)
        chex.assert_trees_all_close(pair[0][cut:], pair[1][cut:], atol=1e-6)


def test_a_round_without_peers_has_no_divergence(compiled, given, cohort_at):
    """Nobody was compared, which is no divergence of 0."""
    cohort = cohort_at(0)
    alone = cohort.replace(peer_mask=np.zeros_like(cohort.peer_mask))
    run = compiled("uapdfl", track_pairs=3, **SHARED)
    for one, count in ((cohort, 1), (alone, 0)):
        _, metrics, _ = run(given(), one, **FLOATS)
        assert float(metrics["divergence_median"][1]) == count
        assert float(metrics["divergence_p95"][1]) == count


def test_pairs_are_tracked(compiled, given, cohort_at):
    """Figures 4 and 12: one number for each pair of the first clients."""
    run, state = compiled("uapdfl", track_pairs=3, **SHARED), given()
    _, metrics, _ = run(state, cohort_at(0), **FLOATS)
    found = {k: v for k, v in metrics.items() if k[-1].isdecimal() and "_p" not in k}
    assert sorted(found) == ["divergence_0_1", "divergence_0_2", "divergence_1_2"]
    answer = state.clients["private"]["answer"]
    for i, j in itertools.combinations(range(3), 2):
        value, count = found[f"divergence_{i}_{j}"]
        np.testing.assert_allclose(value, js(answer[i], answer[j]), rtol=1e-5)
        assert int(count) == 1


@pytest.mark.parametrize("shared", [True, False])
def test_initialisation(shared, problem):
    """One model for all, or one each; representations are those of the models."""
    made = make(problem, shared_init=shared)
    state = jax.jit(made.init)(problem.data, jax.random.key(0))
    own = [plain.own_layers(state, number) for number in range(5)]
    for first, second in itertools.combinations(own, 2):
        assert plain.differs(first, second, 1e-3) != shared
    if not shared:
        # A stream of its own: not what another purpose with that number would draw.
        key = jax.random.fold_in(jax.random.key(0), 3)
        other = conftest.NETWORKS["tiny"].init(key, jnp.zeros((1, 8, 8, 1)))
        assert plain.differs(own[3], plain.layers(plain.host(other[0])), 1e-3)
    answer, features = zip(
        *(represent(one, 2, np.ones((1, 64))) for one in own), strict=True
    )
    private = state.clients["private"]
    np.testing.assert_allclose(private["answer"], answer, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(private["features"], features, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"personal_from": "F9"}, "--personal_from=F9: .*dense1, dense2, last"),
        ({"personal_from": "dense1"}, "--personal_from=dense1 .*without an extractor"),
        ({"personal_from": "none"}, "--personal_from=none .*without a classifier"),
        ({"track_pairs": 6}, "--track_pairs=6: expected 0, or 2 to 5 clients"),
        ({"track_pairs": 1}, "--track_pairs=1: expected 0, or 2 to"),
        ({"divergence": "kl"}, "--divergence=kl: expected one of js, symkl"),
        ({"divergence_threshold": -1.0}, "--divergence_threshold=-1.0: .*at least 0"),
    ],
)
def test_refused(given, words, problem):
    """One line with the flag, what came and what to change."""
    with pytest.raises(ValueError, match=words):
        options.validate(uapdfl.HParams(**given))
        make(problem, **given)


def test_presets():
    """Section 7: the defaults, the released code's and the paper's readings."""
    found = {
        name: resolve.configure({"algo": "uapdfl", "preset": name})[1]
        for name in ("uapdfl", "uapdfl_code", "uapdfl_paper")
    }
    default, paper = found["uapdfl"], found["uapdfl_paper"]
    names = ("divergence", "proximal", "anchor")
    assert [getattr(default, name) for name in names] == ["js", "batch", "peers"]
    assert [getattr(paper, name) for name in names] == ["symkl", "unit", "with_own"]
    assert default.divergence_threshold == default.proximal_weight == 0.1
    assert default.shared_init and not found["uapdfl_code"].shared_init
    assert (default.personal_from, paper.personal_from) == ("last", "")
