"""The host's loop: windows of plans, stops, seeds, interrupts, and programs shared."""

import dataclasses
import gc
import logging
import os
import signal
import threading
import weakref

import chex
import jax
import numpy as np
import pytest

import algorithms
from data import plan
from fedjax_pfl import call as call_lib
from fedjax_pfl import checkpoint, evaluate, program, types, windows
from launch import build

ROUNDS = 5
COMPILED = "jit(init)", "jit(rounds)", "jit(of_shared)", "jit(of_clients)"


def make(dataset, **given):
    """Seven unequal clients, four a round, evaluated in the end."""
    options = {
        "algo": "fedavg",
        "model": "mlp",
        "preset": "none",
        "clients_per_round": 4,
        "local_epochs": 1,
        "batch_size": 16,
        "rounds": ROUNDS,
        "eval_every": ROUNDS,
        "devices": 1,
        "client_chunk": 2,
    }
    return build.experiment(dataset=dataset, **options | given)


def digest(experiment):
    """The bits of a state."""
    return checkpoint.digest((experiment.state.server, experiment.state.clients))


def counters(experiment):
    """What was counted, without times."""
    totals = dataclasses.asdict(experiment.totals)
    for name in ("messages", "diverged"):
        totals[name] = totals[name].tolist()
    return {name: value for name, value in totals.items() if name != "seconds"}


class Watched:
    """A planner that tells of every window before it makes one."""

    def __init__(self, simulation, tell):
        self.planner, self.tell = simulation.windows.planner, tell
        simulation.windows.planner = self

    def __getattr__(self, name):
        return getattr(self.planner, name)

    def window(self, seed_index, first_round, num_rounds, length, *more):
        self.tell(first_round, num_rounds, length)
        return self.planner.window(seed_index, first_round, num_rounds, length, *more)


@pytest.fixture
def short_windows(monkeypatch):
    """Windows of two rounds."""
    monkeypatch.setattr(windows, "MAX_WINDOW_ROUNDS", 2)


@pytest.fixture(scope="module")
def whole(unequal):
    """An uninterrupted run; nobody changes it."""
    experiment = make(unequal)
    experiment.run()
    return experiment


def cohort(num_rows):
    """A cohort without plans."""
    zeros = np.zeros(num_rows, np.int32)
    peers = np.zeros((num_rows, 0), np.int32)
    fields = {"client_id": zeros, "row": zeros, "row_mask": zeros > 0, "level": zeros}
    absent = {
        field.name: peers
        for field in dataclasses.fields(types.Cohort)
        if field.name not in (*fields, "plans")
    }
    return types.Cohort(**fields, **absent, plans={})


def test_length_of_a_window_is_bounded_by_its_bytes():
    """It falls with the examples of a round, whatever the batches; at least one."""
    small = types.PlanSpec("local", 1, 10)
    large = types.PlanSpec("local", 4, 100)
    assert windows.window_rounds(cohort(2), (small,), 40) == 64
    # Four epochs of 400,000 examples, and 17 bytes of each of 10 rows.
    per_round = 4 * 4 * 400_000 + 10 * 17
    fits = windows.WINDOW_BYTES // per_round
    assert fits == 10
    assert windows.window_rounds(cohort(10), (large,), 400_000) == fits
    assert windows.window_rounds(cohort(10), (large,), 4 * 10**7) == 1
    # Of 47 the next multiple of two.
    assert windows.window_rounds(cohort(10), (small,), 356_000) == 46


def test_length_does_not_depend_on_rounds(unequal):
    """Runs of any length have one program."""
    lengths = []
    for rounds in (1, 3, 100):
        experiment = make(unequal, rounds=rounds)
        tell = lambda first, count, length: lengths.append((count, length))  # noqa: E731
        Watched(experiment.simulation, tell)
        experiment.simulation.advance(1)
    assert lengths[:2] == [(1, 64), (3, 64)]
    assert 48 <= lengths[2][0] <= lengths[2][1] == 64


def test_work_counts_padding_by_chunk():
    """Each chunk costs its longest row; numbers by hand."""
    execution = types.Execution(chunk=2)
    planner = plan.Planner(
        seeds=[0],
        num_rows=np.array([[7, 3, 11, 4]]),
        client_group=np.zeros(4, int),
        level_of=np.ones(4, int),
        clients_per_round=3,
        specs=[types.PlanSpec("local", 2, 5)],
        execution=execution,
    )
    window = planner.window(0, 0, 2, 3, 0)
    work = windows.work_of(planner, 0, window, execution)
    assert work.client_updates.tolist() == [3, 3, 0]
    for round in range(2):
        # Ascending, with a padding row before them: chunks of 1 and 2 real rows.
        sizes = planner.owned(0, window.client_id[round])
        assert sizes[0] == 0 and (np.diff(sizes) >= 0).all()
        first, second, third = (2 * -(-size // 5) for size in sizes[1:])
        assert work.steps[round] == first + second + third
        assert work.executed_steps[round] == 2 * first + 2 * third
        assert work.executed[round] == 5 * work.executed_steps[round]
        assert work.samples[round] == 2 * sizes.sum()
    for counts in work:
        assert counts[2] == 0


def lognormal(seed=0, num_clients=400):
    """`--dataset` arrays of clients of quite unequal sizes."""
    gen = np.random.default_rng(seed)
    sizes = np.clip(np.exp(gen.normal(2.5, 1.5, num_clients)), 5, 2000).astype(int)
    x = gen.normal(size=(sizes.sum(), 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(int), np.repeat(np.arange(num_clients), sizes)


@pytest.mark.parametrize("num_seeds, devices", [(1, 1), (2, 1), (1, 4)])
def test_plans_cost_what_clients_have(num_seeds, devices):
    """Bytes of a window's plans: four for each index, and at most 15 % of padding.

    With every window as full as it can be. On a mesh each device has its own rows', and
    as much room as the one with the longest clients.
    """
    experiment = make(
        lognormal(),
        partition="natural",
        model="mlp",
        num_clients=None,
        clients_per_round=20,
        num_seeds=num_seeds,
        partition_seed=0,
        devices=devices,
        rounds=10**6,
    )
    simulation, first = experiment.simulation, 0
    for _ in range(4):
        window = simulation.windows.make(first, simulation.rounds)
        assert window.end - window.first >= 48
        for cohorts, work in zip(window.cohorts, window.work, strict=True):
            (one,) = cohorts.plans.values()
            real = 4 * int(work.samples.sum())
            # Windows of several seeds end together, with the fullest.
            most = 1.15 if num_seeds == 1 else 1.25
            most = most if devices == 1 else 2.5
            assert real <= one.position.nbytes <= most * real
            assert one.position.shape[1] == devices
            local = [part.data.shape for part in one.position.addressable_shards]
            assert local == [(1, 1, one.position.shape[2])] * devices
        # The next round would not have fitted, or there is no place for one.
        room = one.position.shape[2] // one.spec.epochs
        if window.end - window.first < simulation.windows.length:
            needed = [
                sum(
                    experiment.planner.examples(seed, round)
                    for round in range(window.first, window.end + 1)
                ).max()
                for seed in range(num_seeds)
            ]
            assert max(needed) > room
        first = window.end
    assert simulation.windows.capacity == room


def test_a_round_that_needs_more_makes_room(monkeypatch):
    """One client of fifty has nearly all examples: its rounds are alone in a window."""
    gen = np.random.default_rng(0)
    sizes = np.array([2000] + [4] * 49)
    x = gen.normal(size=(sizes.sum(), 4)).astype(np.float32)
    source = x, (x[:, 0] > 0).astype(int), np.repeat(np.arange(50), sizes)
    monkeypatch.setattr(plan, "SEEN_ROUNDS", 1)
    monkeypatch.setattr(windows, "MAX_WINDOW_ROUNDS", 4)
    experiment = make(
        source,
        partition="natural",
        test_split="pool",
        model="mlp",
        num_clients=None,
        clients_per_round=2,
        rounds=200,
    )
    simulation, first, alone = experiment.simulation, 0, 0
    while first < 200:
        before = simulation.windows.capacity
        window = simulation.windows.make(first, simulation.rounds)
        largest = experiment.planner.examples(0, first).max()
        if largest > before:
            alone += 1
            assert window.end == first + 1
            assert largest <= simulation.windows.capacity <= 17 / 16 * largest
        else:
            assert simulation.windows.capacity == before
        assert first < window.end <= 200
        first = window.end
    assert alone == 1


def test_windows_planned_in_parts_are_those_planned_at_once(unequal):
    """Beside the calls of the window before, to its middle or beyond what has room."""
    (ahead, at_once), first = (
        [make(unequal, rounds=200, num_seeds=2).simulation.windows for _ in range(2)],
        0,
    )
    for parts in ((), (1, 2), (30, 30, 30)):
        for count in parts:
            ahead.prepare(first, 200, count)
        one, other = ahead.make(first, 200), at_once.make(first, 200)
        assert one[:2] == other[:2]
        chex.assert_trees_all_equal(one.cohorts, other.cohorts)
        chex.assert_trees_all_equal(one.work, other.work)
        first = one.end
    assert first == 200 or ahead.length < 200 / 3
    # What was planned of another window is not in this one.
    ahead.prepare(7, 200, 2)
    one, other = ahead.make(3, 200), at_once.make(3, 200)
    assert one[:2] == other[:2]
    chex.assert_trees_all_equal(one.cohorts, other.cohorts)


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_an_evaluation_behind_its_rounds_is_that_of_the_state(unequal, num_seeds):
    """It is dispatched once its programs are there, read once, and not read late."""
    given = {"eval_every": 1, "num_seeds": num_seeds}
    ahead, apart = make(unequal, **given), make(unequal, **given)
    for stop in range(1, ROUNDS + 1):
        ahead.simulation.advance(stop, ahead.is_due)
        apart.simulation.advance_to(stop)
        every = [call.evaluated for call in ahead.simulation.calls]
        assert all(one is not None for one in every) == (stop > 1)
        for one, other in zip(ahead.measure(), apart.measure(), strict=True):
            assert one | {"seconds": 0} == other | {"seconds": 0}
        assert not any(call.evaluated for call in ahead.simulation.calls)
    assert digest(ahead) == digest(apart)
    # Nobody has read it before the next call.
    ahead.extend(ROUNDS + 2)
    ahead.simulation.advance(ROUNDS + 1, ahead.is_due)
    ahead.simulation.advance_to(ROUNDS + 2)
    apart.extend(ROUNDS + 2).simulation.advance_to(ROUNDS + 2)
    for one, other in zip(ahead.measure(), apart.measure(), strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}


def test_stops_do_not_matter(whole, unequal):
    """Calls that begin and end inside a window change no bit and no counter."""
    experiment = make(unequal)
    for stop in (1, 3, 3, ROUNDS):
        experiment.simulation.advance_to(stop)
        assert experiment.round == stop
    experiment.measure()
    assert digest(experiment) == digest(whole)
    assert counters(experiment) == counters(whole)
    assert len(experiment.metrics) == 1
    last = experiment.metrics[0]
    assert last | {"seconds": 0} == whole.metrics[-1] | {"seconds": 0}


def test_windows_do_not_matter_and_are_made_ahead(whole, unequal, short_windows):
    """Each round is planned once, the next window while the device computes."""
    experiment = make(unequal)
    simulation = experiment.simulation
    told = []

    def tell(first, count, length):
        told.append((first, count, length, simulation.calls[0].pending is not None))

    Watched(simulation, tell)
    experiment.run()
    # As many rounds as there is room for, one after another, each planned once.
    assert [first for first, *_ in told] == [
        sum(count for _, count, *_ in told[:index]) for index in range(len(told))
    ]
    assert sum(count for _, count, *_ in told) == ROUNDS and len(told) > 2
    assert {length for _, _, length, _ in told} == {2}
    assert [ahead for *_, ahead in told] == [False] + [True] * (len(told) - 1)
    assert digest(experiment) == digest(whole)
    assert counters(experiment) == counters(whole)


def test_seeds_share_the_program_of_one(whole, unequal):
    """On a CPU three seeds are three calls of one seed's program, with its bits."""
    experiment = make(unequal, num_seeds=3, partition_seed=0)
    alone = make(unequal, partition_seed=0)
    assert experiment.program.rounds is alone.program.rounds
    experiment.run()
    alone.run()
    first = jax.tree.map(lambda leaf: leaf[:1], experiment.state)
    chex.assert_trees_all_equal(
        (first.server, first.clients), (alone.state.server, alone.state.clients)
    )
    shapes = jax.tree.map(lambda leaf: leaf.shape, experiment.simulation.template())
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, experiment.state)


def test_seeds_are_updated_in_place(blobs):
    """The state of all clients is not copied, however many seeds there are."""
    experiment = make(
        blobs,
        algo="local",
        num_seeds=4,
        num_clients=40,
        clients_per_round=2,
        partition="iid",
        client_chunk=1,
    )
    simulation = experiment.simulation
    simulation.advance_to(1)
    (executable,) = simulation.program.rounds.executables
    memory = executable.memory_analysis()
    call = simulation.calls[0].state.clients
    own = sum(leaf.nbytes for leaf in jax.tree.leaves(call))
    assert memory.alias_size_in_bytes >= own
    assert memory.temp_size_in_bytes < own


def test_evaluation_after_a_restore_is_the_same(whole, unequal):
    """What the last round reported is saved, so that a later evaluation tells it."""
    first = make(unequal)
    first.simulation.advance_to(ROUNDS)
    arrays, host = first.saved()
    second = make(unequal)
    second.load(ROUNDS, arrays, host, [])
    (record,) = second.measure()
    assert record | {"seconds": 0} == whole.metrics[-1] | {"seconds": 0}
    assert "train_loss" in record


def test_a_restore_forgets_what_an_interrupted_call_counted(
    whole, unequal, monkeypatch
):
    first, second = make(unequal), make(unequal)
    first.simulation.advance_to(1)

    def interrupted(call, totals):
        if call.pending is not None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(call_lib.Call, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            second.simulation.advance_to(2)
    second.load(1, *first.saved(), [])
    second.run()
    assert digest(second) == digest(whole)
    assert counters(second) == counters(whole)


def test_evaluations_are_due_once(unequal):
    """Regular ones, the summary's window and the last; then nothing more."""
    experiment = make(unequal, rounds=8, eval_every=3, summary="last")
    assert [r for r in range(9) if experiment.is_due(r)] == [0, 3, 6, 8]
    for start in range(-1, 9):
        later = [r for r in range(start + 1, 9) if experiment.is_due(r)]
        assert experiment.evaluations_after(start) == len(later)
    assert experiment.next_stop() == 0
    experiment.measure()
    assert experiment.measure() == []
    assert experiment.next_stop() == 3
    assert experiment.next_stop(every=2) == 2


@pytest.mark.parametrize("times", [1, 2])
def test_interrupted_run_goes_on(whole, unequal, short_windows, times):
    """SIGINT while the device computes: the call ends, the state stays, run() goes on.

    A kernel's interrupt is a signal from outside; here another thread sends it.
    """
    experiment = make(unequal)
    simulation = experiment.simulation
    before = signal.getsignal(signal.SIGINT)

    def tell(first, count, length):
        if first != 2 or simulation.calls[0].pending is None:
            return
        for _ in range(times):
            thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
            thread.start()
            thread.join()

    Watched(simulation, tell)
    with pytest.raises(KeyboardInterrupt, match="after round 2; run\\(\\) continues"):
        experiment.run()
    assert signal.getsignal(signal.SIGINT) is before
    assert experiment.round == 2
    chex.assert_tree_all_finite(experiment.params(0))
    experiment.run()
    assert digest(experiment) == digest(whole)
    assert counters(experiment) == counters(whole)


def test_exception_while_planning_ahead_loses_nothing(whole, unequal, short_windows):
    """Two seeds, an exception between their calls: both go on to the same bits."""
    both = make(unequal, num_seeds=2, partition_seed=0)
    both.run()
    experiment = make(unequal, num_seeds=2, partition_seed=0)
    raised = []

    def tell(first, count, length):
        if first == 2 and not raised:
            raised.append(first)
            raise KeyboardInterrupt

    Watched(experiment.simulation, tell)
    with pytest.raises(KeyboardInterrupt):
        experiment.simulation.advance_to(ROUNDS)
    assert [call.round for call in experiment.simulation.calls] == [2, 1]
    experiment.run()
    assert digest(experiment) == digest(both)
    assert counters(experiment) == counters(both)


@pytest.mark.parametrize("number", [0, 1])
def test_interrupt_behind_a_dispatch_loses_nothing(unequal, monkeypatch, number):
    """The rounds have taken a seed's state, and theirs is not yet its own."""
    both = make(unequal, num_seeds=2, partition_seed=0)
    both.run()
    experiment = make(unequal, num_seeds=2, partition_seed=0)
    experiment.simulation.advance_to(1)
    land, asked = call_lib.Call.land, []

    def once(call):
        asked.append(call)
        if len(asked) == 1 + number:
            raise KeyboardInterrupt
        land(call)

    monkeypatch.setattr(call_lib.Call, "land", once)
    with pytest.raises(KeyboardInterrupt):
        experiment.simulation.advance_to(ROUNDS)
    assert experiment.simulation.is_launched and experiment.round == 1
    experiment.run()
    assert digest(experiment) == digest(both)
    assert counters(experiment) == counters(both)


def compilations(records):
    """How often each of the four functions was compiled."""
    told = [record.getMessage() for record in records]
    done = [
        text.split()[4]
        for text in told
        if text.startswith("Finished XLA compilation of")
    ]
    return [done.count(name) for name in COMPILED]


def test_second_experiment_compiles_nothing(unequal, caplog):
    """Another seed, learning rate and number of rounds; another batch size does."""
    program.forget()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        make(unequal).run()
        assert compilations(caplog.records) == [1, 1, 1, 1]
        second = make(unequal, seed=3, client_lr=0.3, rounds=3)
        second.run()
        assert compilations(caplog.records) == [1, 1, 1, 1]
        make(unequal, batch_size=8).run()
        assert compilations(caplog.records) == [2, 2, 2, 2]
    assert second.compile_seconds < 1
    assert second.hparams.client_lr == 0.3


def test_kept_programs_hold_no_data(unequal, tmp_path):
    """An experiment's tables and state go with it, though its program stays."""
    # Runs that have the same examples share them, and no other run has these.
    with np.load(unequal.partition(":")[2]) as file:
        arrays = {**file}
    np.savez(tmp_path / "own.npz", **arrays | {"x": 255 - arrays["x"]})
    experiment = make(f"npz:{tmp_path / 'own.npz'}", seed=11)
    experiment.run()
    program_of = experiment.program.rounds
    alive = [
        weakref.ref(experiment.data.image),
        weakref.ref(jax.tree.leaves(experiment.state)[0]),
    ]
    del experiment
    gc.collect()
    assert [one() for one in alive] == [None, None]
    assert make(unequal).program.rounds is program_of


@pytest.mark.parametrize("until", [-1, ROUNDS + 1, "2", 2.5])
def test_rounds_that_are_not_there_are_refused(until, unequal):
    """`run(until=)` takes a number of this experiment's rounds."""
    with pytest.raises(ValueError, match=f"until={until!r}: expected 0..{ROUNDS}"):
        make(unequal).run(until=until)


def test_a_summary_before_the_end_is_the_last_evaluations(unequal):
    """Whatever the summary rule: its window has not come yet."""
    experiment = make(unequal, eval_every=1, summary="mean_last10", rounds=20)
    summary = experiment.run(until=2)
    last = experiment.metrics[-1]
    assert (last["round"], summary["rounds"], summary["summary"]) == (2, 2, "last")
    assert summary["metrics"]["client_accuracy"]["mean"] == last["client_accuracy"]


def test_algorithms_that_hold_something_share_no_program():
    """A bound method's object may change between two experiments."""

    class Mine:
        def __init__(self, factor):
            self.factor = factor

        def make(self, hparams, task):
            return types.Algorithm((), None, None)

    one = Mine(1.0)
    hparams = algorithms.ALGORITHMS["majority"].HParams()
    task = types.Task(None, (None,), np.zeros(1), 1, 1, 0, 1, 1, (1,))
    scoring = evaluate.Scoring(1, 1)
    first = program.build(one.make, hparams, task, scoring)
    second = program.build(one.make, hparams, task, scoring)
    assert first.rounds is not second.rounds
    entry = algorithms.ALGORITHMS["majority"].make
    pair = [program.build(entry, hparams, task, scoring).rounds for _ in range(2)]
    assert pair[0] is pair[1]


def test_each_of_several_seeds_is_as_alone(unequal):
    """Its cohorts and batches are its own, with or without others."""
    several = make(unequal, num_seeds=2, partition_seed=0, rounds=2, eval_every=2)
    alone = make(unequal, seed=1, partition_seed=0, rounds=2, eval_every=2)
    several.run()
    alone.run()
    second = jax.tree.map(lambda leaf: leaf[1:], several.state.server)
    chex.assert_trees_all_equal(second, alone.state.server)
    totals = several.totals, alone.totals
    assert totals[0].messages[1].tolist() == totals[1].messages[0].tolist()
