"""Who takes part in rounds, and the clock of simulated devices."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import models
from data import participation
from fedjax_pfl import shapes, types
from launch import build
from launch.folder import record
from launch.show import figures
from models import counts
from tests.data import test_plan
from tests.toys import model as toy

pytestmark = pytest.mark.usefixtures("narrow")
GEN = np.random.default_rng(1)
X = GEN.normal(size=(240, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)
OWNER = np.repeat(np.arange(8), [10, 20, 30, 40, 15, 25, 45, 55])
COMMON = {
    **{"algo": "fedavg", "dataset": (X, Y, OWNER), "preset": "none", "model": "narrow"},
    **{"rounds": 3, "eval_every": 1, "local_epochs": 2, "batch_size": 5},
    **{"clients_per_round": 4, "devices": 1},
}
SPEED = [1.0, 0.01, 2.0, 0.02, 1.0, 0.5, 0.03, 1.0]


def made(**given):
    """A small experiment that does not run."""
    return build.experiment(**COMMON | given)


def ran(**given):
    """A finished small experiment."""
    experiment = made(**given)
    experiment.run(progress=False)
    return experiment


def file(folder, entries):
    path = folder / "entries.json"
    path.write_text(json.dumps(entries))
    return f"file:{path}"


def clients(experiment, round):
    cohort = experiment.planner.cohort(0, round)
    return cohort.client_id[cohort.row_mask].tolist()


def untimed(records, *names):
    names = {"seconds", *names}
    return [{name: r[name] for name in r.keys() - names} for r in records]


def test_clients_are_available_as_often_as_their_chance(tmp_path):
    chance = [0.9, 0.1, 0.5, 0.0, 1.0, 0.3, 0.7, 0.2]
    given = file(tmp_path, chance)
    experiment = made(availability=given, clients_per_round=8)
    every = [clients(experiment, round) for round in range(400)]
    seen = np.bincount(np.concatenate(every), minlength=8) / 400
    np.testing.assert_allclose(seen, chance, atol=0.08)
    np.testing.assert_allclose(experiment.planner.drawn_chance, chance)
    few = made(availability=given, clients_per_round=2)
    drawn = few.planner.drawn_chance
    np.testing.assert_allclose(drawn, 2 * np.array(chance) / sum(chance))
    for round, present in enumerate(every):
        drawn = clients(few, round)
        assert len(drawn) == min(2, len(present)) and set(drawn) <= set(present)
    other = made(availability=given, clients_per_round=8, seed=1)
    assert any(clients(other, n) != every[n] for n in range(5))


@pytest.mark.parametrize("how", [{}, {"client_chunk": 4}])
def test_a_table_of_rounds_repeats(how, tmp_path):
    """0 and 1 by client and round, whatever computes the cohort; no round is empty."""
    table = [[1, 0, 0], [0, 1, 0], [1, 1, 0], *[[0, 0, 0]] * 5]
    given = {"availability": file(tmp_path, table), "clients_per_round": 8} | how
    experiment = ran(**given)
    for round in range(9):
        found = sorted(clients(experiment, round))
        assert len(found) == 1 if round % 3 == 2 else found == [round % 3, 2]
    assert experiment.totals.client_updates == 5
    assert all(np.isfinite(one["global_loss"]) for one in experiment.metrics)


def test_nothing_changes_where_all_take_part():
    """The bits and the arguments of the program are those of a run without options."""
    plain = ran(client_state="device")
    cohort = plain.planner.window(0, 0, 2, 2, 0)
    assert (cohort.seconds, cohort.plans["local"].num_steps) == ((), ())
    assert not any("clock" in one for one in plain.metrics)
    timed = ran(client_speed="lognormal:1", availability="1")
    assert len({one.simulation.digest() for one in (plain, timed)}) == 1
    assert untimed(plain.metrics) == untimed(timed.metrics, "clock")


@pytest.mark.parametrize("how", [{"client_chunk": 1}, {"client_chunk": 4}])
def test_a_client_without_a_whole_batch_takes_no_step(how):
    """Its model stays as it was, those of others do not, and a line says so."""
    given = {"algo": "local", "batch_size": 13, "clients_per_round": 8} | how
    given["drop_last"] = True
    experiment = ran(**given)
    size = np.asarray(experiment.data.partition.train.count)[0]
    start = ran(**given, client_lr=0.0).state.clients
    both = jax.device_get((start, experiment.state.clients))
    for first, last in zip(*map(jax.tree.leaves, both), strict=True):
        is_same = [(a == b).all() for a, b in zip(first[0], last[0], strict=True)]
        np.testing.assert_array_equal(is_same, size < 13)
    assert experiment.totals.samples == 6 * (size // 13 * 13).sum()
    said = [note for note in experiment.notes if "drop_last" in note]
    assert said == [
        "--drop_last: 2 of 8 clients have fewer than the 13 train rows of a step and "
        "take none"
    ]


@pytest.mark.parametrize("cut", ["examples_per_round", "drop_last", "interrupted"])
@pytest.mark.parametrize("algo", ["fedict", "fedd2s", "fedmd"])
def test_answers_are_of_all_rows(algo, cut):
    """Where not all rows are in a batch, teachers still answer on each of them.

    Else what a client learns would depend on the clients that are trained beside it.
    """
    given = {"algo": algo, "clients_per_round": 0, "rounds": 2}
    given |= {
        cut: {"examples_per_round": 12, "drop_last": True, "interrupted": 0.7}[cut]
    }
    if cut == "drop_last":
        given["batch_size"] = 12  # a client of ten rows takes no step
    if algo == "fedmd":
        given |= {"proxy_fraction": 0.1, "public_examples": 15}
    one, two = (ran(client_chunk=chunk, **given).state for chunk in (1, 8))
    for a, b in zip(*map(jax.tree.leaves, (one, two)), strict=True):
        if a.dtype == np.float32:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_step_of_several_batches_is_dropped_whole():
    """Per-FedAvg's steps have two batches, which the line counts, too."""
    experiment = made(algo="perfedavg", batch_size=7, drop_last=True)
    size = np.asarray(experiment.data.partition.train.count)[0]
    assert (size < 7).sum() < (size < 14).sum()
    said = f"--drop_last: {(size < 14).sum()} of 8 clients have fewer than the 14 train"
    assert any(note.startswith(said) for note in experiment.notes)


def test_interrupted_clients_take_fewer_steps():
    full, cut = made(), ran(interrupted=0.4)
    both = [[x.planner.cohort(0, round) for round in range(150)] for x in (full, cut)]
    every, taken = (
        np.array([one.plans["local"].num_steps for one in some]) for some in both
    )
    assert (taken >= 1).all() and (taken <= every).all()
    assert (taken < every).mean() == pytest.approx(0.4, abs=0.06)
    share = (taken / every)[taken < every].mean()
    assert share == pytest.approx(0.5, abs=0.06)
    assert cut.totals.steps == taken[:3].sum()
    steps = []
    for how in {"client_chunk": 1}, {"client_chunk": 4, "devices": 2}:
        one = made(interrupted=0.4, clients_per_round=8, **how).planner.cohort(0, 1)
        steps.append(one.plans["local"].num_steps[np.argsort(one.client_id)])
    assert (steps[0] == steps[1]).all()


@pytest.mark.parametrize("algo", ["fedavg", "depthfl"])
def test_the_clock_is_a_plain_computation(algo, tmp_path, monkeypatch):
    monkeypatch.setitem(models.MODELS, "with_exits", toy.with_exits)
    more = {"model": "with_exits", "level_mix": "1:1:1"} if algo == "depthfl" else {}
    experiment = ran(algo=algo, client_speed=file(tmp_path, SPEED), **more)
    net, now = experiment.task.model, 0.0
    macs = [counts.macs(net, (6,))] * 3
    sizes = [shapes.model_bytes(net, (6,))] * 3
    if algo == "depthfl":
        macs = [max(one.macs, one.parameters) for one in counts.levels(net, (6,))]
        sizes = np.cumsum(shapes.stage_bytes(net, (6,)))
    rows = np.asarray(experiment.data.partition.train.count)[0]
    for round, line in enumerate(experiment.metrics[1:]):
        cohort = experiment.planner.cohort(0, round)
        now += max(
            2 * rows[client] * 3 * macs[level - 1] / (1e9 * SPEED[client])
            + 2 * sizes[level - 1] / 1e6
            for client, level in zip(cohort.client_id, cohort.level, strict=True)
        )
        assert line["clock"] == pytest.approx(now, rel=1e-6)
    assert experiment.metrics[0]["clock"] == 0.0
    assert experiment.summary()["metrics"]["clock"]["mean"] == line["clock"]


def seconds(experiment):
    """(clients, levels, simulated seconds) of the first round."""
    cohort = experiment.planner.window(0, 0, 1, 1, 0)
    real = cohort.row_mask[0]
    parts = cohort.client_id, cohort.level, cohort.seconds
    return (one[0][real] for one in parts)


def test_the_clock_of_several_architectures(monkeypatch):
    """Each client computes its own model."""

    def wide(num_classes, width=1.0):
        return toy.narrow(num_classes, 3.0)._replace(name="wide")

    monkeypatch.setitem(models.MODELS, "wide", wide)
    given = {"algo": "fedmd", "proxy_fraction": 0.1, "client_model": "narrow,wide"}
    experiment = made(**given, client_speed="lognormal:0", clients_per_round=8)
    ids, _, found = seconds(experiment)
    macs = np.array([counts.macs(one, (6,)) for one in experiment.task.client_models])
    rows = np.asarray(experiment.data.partition.train.count)[0]
    wanted = 2 * rows[ids] * 3 * macs[ids % 2] / 1e9
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert macs[0] < macs[1]


def test_the_clock_of_widths():
    """A client computes and sends about the share of its slice's parameters."""
    given = {"algo": "heterofl", "level_mix": "1:1", "client_speed": "lognormal:0"}
    experiment = made(**given, clients_per_round=8)
    net = experiment.task.model
    sizes = np.array(
        [shapes.model_bytes(one, (6,)) for one in (net.at_width(0.5), net)]
    )
    ids, level, found = seconds(experiment)
    rows = np.asarray(experiment.data.partition.train.count)[0]
    macs = counts.macs(net, (6,)) * sizes[level - 1] / sizes[1]
    np.testing.assert_allclose(found, 2 * rows[ids] * 3 * macs / 1e9, rtol=1e-6)
    np.testing.assert_allclose(experiment.planner._who.num_bytes, 2 * sizes)
    assert set(level) == {1, 2}


def test_an_interrupted_client_works_until_it_stops():
    """The seconds are those of the examples of its steps."""
    given = {"interrupted": 0.5, "clients_per_round": 8, "local_epochs": 1}
    experiment = made(**given, client_speed="lognormal:0")
    ids, _, found = seconds(experiment)
    rows = np.asarray(experiment.data.partition.train.count)[0][ids]
    steps = experiment.planner.window(0, 0, 1, 1, 0).plans["local"].num_steps[0]
    examples = np.minimum(5 * steps, rows)
    assert (5 * steps < rows).any() and (5 * steps > rows).any()
    macs = counts.macs(experiment.task.model, (6,))
    np.testing.assert_allclose(found, examples * 3 * macs / 1e9, rtol=1e-6)


def test_a_deadline_counts_the_messages_of_each_level():
    """A larger part leaves less time."""
    who = participation.Participation(
        **{"chance": np.ones((2, 1)), "speed": np.ones((1, 2))},
        **{"macs": np.full((2, 2), 1e6), "num_bytes": np.array([1e5, 1e6])},
        round_seconds=1.05,
    )
    where = 0, np.arange(2), np.array([1, 2])
    (steps,) = who.in_time([types.PlanSpec("local", 1, 5)], np.full(2, 20), *where)
    assert steps.tolist() == [4, 3]  # .05 seconds are 16 of 20 examples


def test_the_server_s_steps_take_no_time_of_a_client():
    """However long it trains: .05 seconds are 16 of a client's own examples."""
    who = participation.Participation(
        **{"chance": np.ones((1, 1)), "speed": np.ones((1, 1))},
        **{"macs": np.full((1, 1), 1e6), "num_bytes": np.array([1e6])},
        round_seconds=1.05,
    )
    where = 0, np.arange(1), np.array([1])
    for epochs in (1, 50):
        server = types.PlanSpec("server", epochs, 4, at_server=True)
        specs = types.PlanSpec("local", 2, 5), server
        local, found = who.in_time(specs, np.full(1, 40), *where)
        assert (local.tolist(), found.tolist()) == ([3], [10 * epochs])


def test_steps_before_a_deadline():
    """Those of a plain loop over batches; who does no step does not take part."""
    local, again = types.PlanSpec("local", 2, 5), types.PlanSpec("again", 1, 5)
    shares = set()
    for specs, rows in (((local,), 12), ((local,), 20), ((local, again), 12)):
        for limit in np.linspace(1.05, 1.4, 20):
            who = participation.Participation(
                **{"chance": np.ones((3, 1)), "speed": np.array([[1, 0.2, 0.01]])},
                **{"macs": np.full((3, 1), 1e6), "num_bytes": np.array([1e6])},
                round_seconds=limit,
            )
            given = {"sizes": np.full((1, 3), rows), "seeds": [0], "level": [1, 1, 1]}
            cohort = test_plan.make(3, specs, who=who, **given).cohort(0, 0)
            for row in np.flatnonzero(cohort.row_mask):
                client = cohort.client_id[row]
                left = (limit - 1) * [1, 0.2, 0.01][client] / 3e-3
                # The clock of one that is cut is not that of all its steps.
                whole = rows * sum(spec.epochs for spec in specs)
                lasted = min(whole / left, 1) * (limit - 1)
                assert cohort.seconds[row] == pytest.approx(lasted, rel=1e-5)
                for spec in specs:
                    share = spec.epochs / sum(one.epochs for one in specs)
                    epoch = [5] * (rows // 5) + [rows % 5] * (rows % 5 > 0)
                    done = np.cumsum(epoch * spec.epochs) <= left * share + 1e-6
                    assert cohort.plans[spec.name].num_steps[row] == done.sum() > 0
                    shares.add((len(specs), rows, done.mean() == 1))
            assert 2 not in cohort.client_id
    # Each case has clients that are cut, and such that do all their steps.
    assert len(shares) == 6


@pytest.mark.parametrize("first", [1, 0])
def test_a_round_of_drawn_levels_in_which_nobody_is_in_time(first):
    """One client takes part without a step until the deadline."""
    who = participation.Participation(
        **{"chance": np.ones((3, 1)), "speed": np.ones((1, 3))},
        **{"macs": np.tile([1e6, 1e9], (3, 1)), "num_bytes": np.array([1e6, 1e6])},
        round_seconds=1.1,
    )
    given = {"sizes": np.full((1, 3), 20), "seeds": [0], "who": who}

    def level(seed, round, client):
        return np.full(len(client), 1 + (round % 2 == first))

    planner = test_plan.make(3, (types.PlanSpec("local", 2, 5),), level=level, **given)
    for round in range(4):
        cohort = planner.cohort(0, round)
        steps = cohort.plans["local"].num_steps[cohort.row_mask]
        is_met = round % 2 != first
        assert len(steps) == (3 if is_met else 1) and (steps > 0).all() == is_met
        assert cohort.deadline == np.float32(1.1)
    with pytest.raises(ValueError, match="--round_seconds=1.1: no client does a local"):
        test_plan.make(3, (types.PlanSpec("local", 2, 5),), level=[2] * 3, **given)


def test_a_round_ends_at_its_deadline(tmp_path):
    """The slow ones are cut, the slowest never drawn, and no round lasts longer."""
    speed = file(tmp_path, [1e-5 if one == 0.01 else one for one in SPEED])
    model = made(model="mlp").task.model
    limit = 2 * shapes.model_bytes(model, (6,)) / 1e6 + 0.014
    given = {"client_speed": speed, "round_seconds": limit, "clients_per_round": 8}
    given["model"] = "mlp"
    experiment = ran(**given, num_seeds=2)
    for round in range(3):
        cohort = experiment.planner.cohort(1, round)
        cut = cohort.plans["local"].num_steps
        full = experiment.planner.num_steps(1, cohort.client_id)["local"]
        assert 1 not in cohort.client_id and cohort.row_mask.sum() == 7
        assert (cut <= full).all() and (cut < full).any()
    for index in (0, 1):
        gaps = np.diff([one["clock"] for one in experiment.metrics[index::2]])
        np.testing.assert_allclose(gaps, limit, rtol=1e-6)


@pytest.mark.parametrize("more", [{"num_seeds": 2}, {"sweep": "client_lr=0.1,0.2"}])
def test_a_resumed_run_has_the_same_clock(more, tmp_path):
    given = {"client_speed": "lognormal:1", "availability": "0.6", "interrupted": 0.5}
    given |= {"rounds": 4, **more}
    whole = ran(**given)
    half = made(**given, workdir=str(tmp_path / "run"))
    half.run(until=2, progress=False)
    again = ran(**given, workdir=str(tmp_path / "run"), resume=True)
    assert untimed(again.metrics) == untimed(whole.metrics)
    several = ran(**given, devices=2)
    clock, other = ([one["clock"] for one in x.metrics[-2:]] for x in (whole, several))
    assert (clock[0] == clock[1]) == ("sweep" in more)
    np.testing.assert_allclose(clock, other, rtol=1e-6)


def test_speeds_are_drawn_by_the_seed_of_the_partition():
    one, other = (participation.speeds("lognormal:0.5", 2000, [n]) for n in (0, 1))
    assert np.median(one) == pytest.approx(1, abs=0.05)
    assert np.log(one).std() == pytest.approx(0.5, abs=0.03)
    assert (one != other).all()
    given = {"client_speed": "lognormal:1", "clients_per_round": 8, "num_seeds": 2}
    for more, is_same in (({}, False), ({"partition_seed": 3}, True)):
        planner = made(**given, **more).planner
        found = [planner.window(n, 0, 1, 1, 0).seconds for n in (0, 1)]
        assert np.array_equal(*found) == is_same


def test_curves_over_the_clock(tmp_path):
    timed = ran(client_speed="lognormal:1", workdir=str(tmp_path / "timed"))
    plain = ran(workdir=str(tmp_path / "plain"))
    (line,) = timed.plot(x="clock").axes[0].lines
    assert line.get_xdata().tolist() == [one["clock"] for one in timed.metrics]
    runs = [record.read(tmp_path / name) for name in ("timed", "plain")]
    assert figures.picture("curves", runs, x="bytes").axes[0].lines
    with pytest.raises(ValueError, match="--x=clock: the records of .* have no clock"):
        figures.picture("curves", runs, x="clock")
    with pytest.raises(ValueError, match="--x=time: expected one of rounds"):
        plain.plot(x="time")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"availability": "0"}, "--availability=0: expected a chance above 0"),
        ({"availability": [0.5] * 3}, "expected a chance .*3 entries for 8 clients"),
        ({"availability": [[1, 0]] * 7 + [[1]]}, "lists of unequal length"),
        ({"availability": [0.5] * 7 + [float("nan")]}, "it has other values"),
        ({"availability": [2] * 8}, "expected a chance above 0 and at most 1"),
        ({"availability": "file:none.json"}, "none.json: .*No such file"),
        ({"availability": "0.5", "algo": "dfedavg"}, "pull from peers"),
        ({"round_seconds": 9.0, "algo": "dfedavg"}, "--round_seconds=9.0: .* peers"),
        ({"round_seconds": 1e-6}, "--round_seconds=1e-06: no client does a local step"),
        ({"interrupted": 1.5}, "--interrupted=1.5: expected at most 1"),
        ({"client_speed": "uniform:1"}, "--client_speed=uniform:1: .* lognormal:S"),
        ({"client_speed": "lognormal:"}, "--client_speed=lognormal:: expected"),
        ({"client_speed": [1.0] * 7 + [0]}, "numbers above 0"),
        ({"client_speed": [[[1.0]]] * 8}, "it has other values"),
        ({"client_speed": {"a": 1}}, "it is an object, a list is expected"),
    ],
)
def test_refusals(given, words, tmp_path):
    forms = [given]
    for name in "availability", "client_speed":
        if not isinstance(given.get(name, ""), str):
            forms = [given | {name: file(tmp_path, given[name])}]
            forms += [given] * isinstance(given[name], list)
    for one in forms:
        with pytest.raises(ValueError, match=words) as found:
            made(**one)
        assert "\n" not in str(found.value)


@pytest.mark.parametrize("form", [list, np.array, jnp.array, json.dumps])
def test_lists_are_as_in_files(form, tmp_path):
    """Of chances by round, and of speeds."""
    late = [[1, 1, 1]] * 5 + [[0, 0, 1]] * 3
    given = made(availability=form(late), client_speed=form(SPEED), clients_per_round=8)
    of_file = made(availability=file(tmp_path, late), clients_per_round=8)
    for n in range(3):
        assert clients(given, n) == clients(of_file, n)
    assert {*clients(given, 0)} == {*range(5)} and len(clients(given, 2)) == 8
    np.testing.assert_allclose(given.planner._who.speed[0], SPEED, rtol=1e-6)
    mask = made(availability=np.array(late, bool), clients_per_round=8)
    assert clients(mask, 0) == clients(given, 0)
    with pytest.raises(ValueError, match="--availability=<list>: expected str"):
        made(availability=[1j] * 8)
    again = made(
        **{n: getattr(given.config, n) for n in ("availability", "client_speed")}
    )
    assert again.config.availability == given.config.availability


def test_who_is_interrupted_does_not_finish():
    """Of two steps it takes one."""
    who = participation.Participation(np.ones((1000, 1)), interrupted=0.5)
    taken = who.taken(0, 0, np.arange(1000), np.full(1000, 2))
    assert {*taken.tolist()} == {1, 2}
    assert (taken == 1).mean() == pytest.approx(0.5, abs=0.08)


def test_a_step_that_ends_at_the_deadline_is_done():
    """.15 seconds are 50 examples, though (1.15 - 1) / .003 is 49.99999999999997."""
    who = participation.Participation(
        **{"chance": np.ones((1, 1)), "speed": np.ones((1, 1))},
        **{"macs": np.full((1, 1), 1e6), "num_bytes": np.array([1e6])},
        round_seconds=1.15,
    )
    where = 0, np.arange(1), np.array([1])
    (steps,) = who.in_time([types.PlanSpec("local", 1, 10)], np.full(1, 60), *where)
    assert steps.tolist() == [5]


def with_exits():
    body, exit = nn.Dense(8), nn.Dense(3)
    return [("one", body, exit), ("two", body, exit)]


@pytest.mark.parametrize("algo", ["heterofl", "splitmix", "depthfl"])
def test_one_level_of_several_is_a_part(algo):
    """Its clients compute the least submodel, not the model that it is cut from."""
    model = with_exits() if algo == "depthfl" else "narrow"
    given = {"algo": algo, "model": model, "level_mix": "1:1"}
    given |= {"num_bases": 2} if algo == "splitmix" else {}
    every, least = (
        made(**given, max_level=top, client_speed="lognormal:0").planner._who
        for top in (2, 1)
    )
    np.testing.assert_allclose(least.macs, every.macs[:, :1])
    np.testing.assert_allclose(least.num_bytes, every.num_bytes[:1])
    assert (every.macs[:, 0] < every.macs[:, 1]).all()


def test_clients_that_are_absent_are_noted(tmp_path):
    """By their draws and by when they are there, but not those that never train."""

    def absent(**given):
        lines = [n for n in made(algo="fedper", **given).notes if "none of" in n]
        return lines[0] if lines else ""

    assert (
        "about 3 of 8 clients are in none of --rounds=3 with --clients_per_"
        in absent(clients_per_round=2)
    )
    line = absent(clients_per_round=8, availability="0.1")
    assert "about 6 of 8 clients" in line and "with --availability=0.1, and" in line
    assert "takes all" not in line
    first = file(tmp_path, [1] + [0] * 7)
    assert "about 7 of 8" in absent(clients_per_round=8, availability=first)
    assert not absent(clients_per_round=0, unseen_clients=6)
    run = made(algo="fedper", unseen_clients=4)
    unseen = run.data.partition.is_unseen[0]
    never = file(tmp_path, np.where(unseen, 0.0, 1.0).tolist())
    assert not absent(clients_per_round=0, unseen_clients=4, availability=never)
    late = {"client_speed": file(tmp_path, [1e-9] * 4 + [1] * 4)}
    line = absent(**late, round_seconds=1.0, clients_per_round=0)
    assert "about 4 of 8" in line and "with --round_seconds=1, and" in line
    assert "takes all" not in line
    line = absent(**late, round_seconds=1.0, clients_per_round=1)
    assert line.endswith("--clients_per_round=0 takes all that are in time")
    line = absent(clients_per_round=4, availability="0.05")
    assert "with --availability=0.05, and" in line and "takes all" not in line


def test_one_step_cannot_be_interrupted():
    """A line says so; two may."""
    given = {"interrupted": 0.5, "local_epochs": 1}
    lines = [made(**given, batch_size=size).notes for size in (60, 5)]
    found = ["--interrupted=0.5 has no effect" in str(one) for one in lines]
    assert found == [True, False]
    none = {"algo": "majority", "local_epochs": None, "batch_size": None}
    line = "--interrupted and --round_seconds: clients of --algo=majority take no loc"
    lines = made(interrupted=0.5, round_seconds=1.0, **none).notes
    assert any(one.startswith(line) for one in lines)
