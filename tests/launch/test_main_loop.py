"""The visible loop, and where compiled programs are kept."""

import os
import pathlib
import stat

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fedjax_pfl import program
from launch import main
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
