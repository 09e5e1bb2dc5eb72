"""The visible loop, and where compiled programs are kept."""

import json
import os
import pathlib
import signal
import stat
import time
import types

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fedjax_pfl import call as call_lib
from fedjax_pfl import execution, program, simulate
from fedjax_pfl.evaluations import Evaluations
from launch import build, main
from launch.folder import finished
from launch.machine import devices
from launch.run import progress
from tests import conftest


def run(dataset, folder, *more):
    """A tiny run; returns the rounds told to the progress bar, and the records'."""
    words = ["--algo=fedavg", "--summary=last", f"--dataset={dataset}"]
    main.main(["main", *conftest.FLAGS, *words, f"--workdir={folder}", *more])


@pytest.fixture
def told(monkeypatch):
    """(rounds done, rounds of the records) of every report of progress."""
    calls = []

    def on_call(self, run, records):
        done = run.round
        calls.append((done, [record["round"] for record in records]))

    monkeypatch.setattr(progress.Progress, "on_call", on_call)
    return calls


@pytest.fixture
def cache_folder(monkeypatch):
    """`keep_compiled` may set jax's folder, which is put back afterwards."""
    monkeypatch.setattr(devices, "CACHE_MIN_SECONDS", 0.0)
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield lambda: jax.config.jax_compilation_cache_dir
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_stops_are_evaluations_and_checkpoints(blobs, tmp_path, told):
    """A call ends where the state is to be evaluated or saved, and at the end."""
    more = "--rounds=7", "--eval_every=3", "--checkpoint_every=2"
    run(blobs, tmp_path / "run", *more)
    done = [round for round, _ in told]
    assert set(done) >= {0, 2, 3, 4, 6, 7}
    assert done == sorted(done)
    assert [rounds[0] for _, rounds in told if rounds] == [0, 3, 6, 7]
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert saved == ["round_00000006", "round_00000007"]


@pytest.fixture
def launched(monkeypatch):
    """The rounds from which others were launched before a record was made."""
    found, launch = [], simulate.Simulation.launch

    def listed(self, stop):
        launch(self, stop)
        found.extend([self.round] if self.is_launched else [])

    monkeypatch.setattr(simulate.Simulation, "launch", listed)
    monkeypatch.setattr(simulate, "LAUNCHED_SECONDS", 60.0)
    return found


def small(dataset, **more):
    """Evaluated after every second of nine rounds."""
    given = {"rounds": 9, "eval_every": 2, "summary": "last"} | more
    return build.experiment(dataset=dataset, algo="fedper", **conftest.SIX | given)


def results(run):
    """A run's records without seconds, its counters and the hash of its models."""
    records = [one | {"seconds": 0} for one in run.metrics]
    totals = run.totals.messages.tolist(), run.totals.samples
    return (
        records,
        *totals,
        run.kept.arrays[:, 0].tolist(),
        run.simulation.digest(),
    )


@pytest.fixture(scope="module")
def waited(blobs, narrow):
    """`results` of a run that launches nothing before a record is made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "LAUNCHED_SECONDS", -1.0)
        one = small(blobs)
        one.run(progress=False)
    return results(one)


def test_rounds_are_launched_before_a_record_is_made(blobs, tmp_path, waited, launched):
    """But where something reads the state. Records, counters and bits are the same."""
    one = small(blobs)
    one.run(progress=False)
    assert launched == [2, 4, 6, 8] and results(one) == waited
    launched.clear()
    kept = small(blobs, workdir=str(tmp_path / "run"), checkpoint_every=4)
    kept.run(progress=False)
    assert launched == [2, 6] and results(kept) == waited
    launched.clear()
    # Two seeds are two calls on a CPU, and validation may end a run after any record.
    chosen = {"val_split": 0.5, "early_stop": 9, "summary": "best_validation"}
    for more in ({"num_seeds": 2}, chosen):
        small(blobs, **more).run(progress=False)
    assert not launched


def test_a_gpus_rounds_are_timed(blobs, narrow, launched, monkeypatch):
    """Its host takes part in loops, so that dispatching lasts as long as computing."""
    launch = call_lib.Call.launch

    def slow(self, *args):
        launch(self, *args)
        time.sleep(0.02)

    monkeypatch.setattr(call_lib.Call, "launch", slow)
    monkeypatch.setattr(execution.Execution, "platform", "gpu")
    one = small(blobs, eval_every=1)
    one.run(progress=False)
    assert one.totals.seconds >= 9 * 0.02 and not launched


def test_a_function_of_records_sees_the_models_of_its_round(blobs, launched, waited):
    """Nothing has been launched when it is called."""
    one, seen = small(blobs), []

    def look(record):
        seen.append((record["round"], one.round, one.state.round.tolist()))

    one.run(progress=False, on_record=look)
    assert seen == [(round, round, [round]) for round in (0, 2, 4, 6, 8, 9)]
    assert not launched and results(one) == waited


@pytest.mark.parametrize("ends", [KeyboardInterrupt, OSError])
def test_launched_rounds_are_not_lost(blobs, launched, waited, monkeypatch, ends):
    """By a signal, which lets them end, or an error while a record is shown."""
    one, ended = small(blobs), []

    def on_call(self, run, records):
        if launched == [2, 4] and not ended:
            ended.append(run.round)
            if ends is OSError:
                raise OSError("the disk is full")
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(progress.Progress, "on_call", on_call)
    with pytest.raises(ends, match="disk|after round 6"):
        one.run()
    assert ended == [4] and one.round == 6 and one.state.round.tolist() == [6]
    assert one.is_due(6) == (ends is OSError)
    one.run()
    assert results(one) == waited


@pytest.mark.parametrize("place", ["settle", "read", "of_rounds"])
def test_a_record_is_not_lost_with_the_state(
    blobs, launched, waited, monkeypatch, tmp_path, place
):
    """An error while it is made, when the next rounds have taken the state."""
    owner = Evaluations if place == "read" else call_lib.Call
    act, failed = getattr(owner, place), []

    def once(*args):
        (call,) = [one for one in args if isinstance(one, call_lib.Call)]
        if call.launched and launched == [2, 4] and not failed:
            failed.append(call.round)
            raise MemoryError("no room")
        return act(*args)

    monkeypatch.setattr(owner, place, once)
    one = small(blobs, workdir=str(tmp_path / "run"), checkpoint_every=100)
    with pytest.raises(MemoryError, match="no room"):
        one.run(progress=False)
    assert failed == [4] and one.round == 6 and one.state.round.tolist() == [6]
    one.run(progress=False)
    assert results(one) == waited
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == finished.finite(one.metrics)


def test_seconds_are_those_of_training(blobs, launched, monkeypatch):
    """Not of a listener that works on when launched rounds have ended."""
    now = [0.0]

    def slow(self, run, records):
        if run.is_launched:
            jax.block_until_ready(run.simulation.calls[0].launched[0])
        now[0] += 100

    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    for module in (simulate, call_lib):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(progress.Progress, "on_call", slow)
    one = small(blobs)
    one.run()
    assert launched == [2, 4, 6, 8] and now[0] > 0 == one.totals.seconds


def test_compiled_programs_are_in_the_users_cache(
    cache_folder, monkeypatch, tmp_path, capsys
):
    """By itself a private folder of the user's; `off` is off; a folder is taken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices.keep_compiled(None)
    folder = pathlib.Path(cache_folder())
    assert folder.is_relative_to(tmp_path / "fedjax_pfl")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    devices.keep_compiled("off")
    assert cache_folder() is None
    devices.keep_compiled(str(tmp_path / "mine"))
    assert cache_folder() == str(tmp_path / "mine")
    # A later experiment that says nothing keeps what was chosen.
    devices.keep_compiled(None)
    assert cache_folder() == str(tmp_path / "mine")
    assert capsys.readouterr().err == ""


def test_folder_that_cannot_be_written_fails_no_run(
    cache_folder, monkeypatch, tmp_path, capsys
):
    """One line for a folder that a user named, none for the default."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    devices.keep_compiled(None)
    assert cache_folder() is None
    assert capsys.readouterr().err == ""
    devices.keep_compiled(str(tmp_path / "file" / "inner"))
    assert cache_folder() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--compile_cache={tmp_path}/file/inner cannot be written")


def test_old_programs_are_removed(cache_folder, monkeypatch, tmp_path):
    """The folder stays below its bound; the newest stay."""
    monkeypatch.setattr(devices, "CACHE_BYTES", 25)
    for age, name in enumerate(("new", "middle", "old")):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(bytes(10))
        time = 1_000_000 - age
        os.utime(path, (time, time))
    devices.keep_compiled(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"new-cache", "middle-cache"}


def test_second_start_finds_its_programs(blobs, cache_folder, tmp_path):
    """Other rounds, seeds and floats are the same programs on disk."""
    cache = tmp_path / "cache"
    option = f"--compile_cache={cache}"

    def kept():
        names = [path.name for path in cache.glob("*-cache")]
        ours = ("jit_init-", "jit_rounds-", "jit_of_shared-", "jit_of_clients-")
        return sorted(name for name in names if name.startswith(ours))

    program.forget()
    run(blobs, tmp_path / "a", option, "--rounds=1", "--eval_every=1")
    first = kept()
    assert len(first) == 4
    program.forget()
    more = ["--rounds=3", "--eval_every=2", "--client_lr=0.3", "--num_seeds=2"]
    run(blobs, tmp_path / "b", option, *more, "--seed=4", "--partition_seed=0")
    assert kept() == first
