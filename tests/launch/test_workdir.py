"""What a run leaves behind, how it replays, and how it goes on."""

import json
import math
import os
import pathlib
import re
import resource
import shutil
import signal
import sys

import numpy as np
import pytest

from fedjax_pfl import simulate
from launch import build, export, main, plot
from launch.config import flagfile
from launch.folder import finished as finished_lib
from launch.folder import lock, workdir
from launch.folder import record as record_lib
from launch.run import progress
from launch.show import page as page_lib
from tests import conftest

ROUNDS = 4
MODEL_BYTES = 4 * (64 * 128 + 128 + 128 * 64 + 64 + 64 * 4 + 4)


class KilledError(Exception):
    """Stands for a kill: nothing after it is executed."""


def run(dataset, folder, *more, rounds=ROUNDS):
    """A tiny FedAvg run with two of four clients a round, evaluated every round."""
    words = ["--algo=fedavg", "--eval_every=1", f"--rounds={rounds}"]
    words += [f"--dataset={dataset}", f"--workdir={folder}"]
    main.main(["main", *conftest.FLAGS, *words, *more])


def metrics(folder):
    """The lines of metrics.jsonl, times aside."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def summary(folder):
    """summary.json."""
    return json.loads((folder / "summary.json").read_text())


def contents(folder):
    """Every file of a folder with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_same_run(folder, reference):
    """Equal metrics, parameters and per-client accuracies, bit for bit."""
    assert metrics(folder) == metrics(reference)
    ours, theirs = summary(folder), summary(reference)
    assert ours["parameters_sha256"] == theirs["parameters_sha256"]
    assert ours["metrics"] == theirs["metrics"]
    assert ours["traffic"] == theirs["traffic"]
    with np.load(folder / "clients.npz") as a, np.load(reference / "clients.npz") as b:
        assert a.files == b.files
        for name in a.files:
            np.testing.assert_array_equal(a[name], b[name])


def kill_at(monkeypatch, round):
    """Raises from the progress callback once `round` rounds are done."""

    def on_call(self, run, records):
        if run.round == round:
            raise KilledError

    monkeypatch.setattr(progress.Progress, "on_call", on_call)


def signal_at(monkeypatch, round, number):
    """Delivers a signal from the progress callback once `round` rounds are done."""

    def on_call(self, run, records):
        if run.round == round:
            signal.raise_signal(number)

    monkeypatch.setattr(progress.Progress, "on_call", on_call)


@pytest.fixture(scope="module")
def finished(blobs, tmp_path_factory):
    """An uninterrupted run of two seeds; nobody changes it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(blobs, folder, "--num_seeds=2")
    return folder


@pytest.fixture(scope="module")
def reference(blobs, tmp_path_factory):
    """An uninterrupted run whose summary takes every round; nobody changes it."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    run(blobs, folder, "--summary=mean_last10", "--checkpoint_every=1")
    return folder


@pytest.fixture
def copied(reference, tmp_path):
    """A copy of the reference as it was before its last round and summary."""
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    (folder / "summary.json").unlink()
    (folder / "clients.npz").unlink()
    return folder


@pytest.fixture
def whole(reference, tmp_path):
    """A copy of the reference, finished."""
    return pathlib.Path(shutil.copytree(reference, tmp_path / "whole"))


@pytest.fixture
def refused(blobs, capsys):
    """Returns the one line of a command that is refused and changes nothing."""

    def line(folder, *more, **given):
        before = contents(folder)
        with pytest.raises(SystemExit) as stop:
            run(blobs, folder, *more, **given)
        assert stop.value.code == 2
        assert contents(folder) == before
        (told,) = capsys.readouterr().err.splitlines()
        assert told.startswith("error: ")
        return told

    return line


def test_files_of_a_run(finished):
    """Nothing but the contract's files, and no partial ones."""
    assert {path.name for path in finished.iterdir()} == {
        "run.flags",
        "metrics.jsonl",
        "summary.json",
        "clients.npz",
        "checkpoints",
    }
    assert not list(finished.rglob("*partial*"))


def test_metrics_lines(finished):
    """A line per evaluated round and seed, fractions, cumulative bytes."""
    records = metrics(finished)
    assert [(r["round"], r["seed"]) for r in records] == [
        (round, seed) for round in range(ROUNDS + 1) for seed in (0, 1)
    ]
    for record in records:
        assert record["bytes_up"] == record["round"] * 2 * MODEL_BYTES
        assert record["bytes_down"] == record["round"] * 2 * MODEL_BYTES
        for name in (
            "global_accuracy",
            "client_accuracy",
            "client_accuracy_pooled",
            "worst_decile_accuracy",
        ):
            assert 0 <= record[name] <= 1
        assert record["client_accuracy_std"] >= 0
        if record["round"]:
            assert math.isfinite(record["train_loss"])
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines[::2]]
    assert seconds == sorted(seconds) and seconds[-1] > 0


def test_summary(finished):
    """Mean, sample standard deviation and values per seed; speed and versions."""
    result = summary(finished)
    last = [r for r in metrics(finished) if r["round"] == ROUNDS]
    for name in ("global_accuracy", "client_accuracy", "bytes_up", "bytes_down"):
        entry = result["metrics"][name]
        values = [record[name] for record in last]
        assert entry["per_seed"] == values
        assert entry["mean"] == pytest.approx(np.mean(values))
        assert entry["std"] == pytest.approx(np.std(values, ddof=1))
    for name in (
        "client_updates_per_second",
        "samples_per_second",
        "compile_seconds",
        "peak_memory_bytes",
    ):
        assert result[name] > 0
    for way in ("up", "down"):
        sent = result["traffic"][f"model {way}"]
        assert sent["direction"] == way
        assert sent["messages"]["per_seed"] == [2 * ROUNDS] * 2
        assert sent["bytes"] == result["metrics"][f"bytes_{way}"]
    assert result["numbers"] == ["client_loss", "global_loss"]
    assert 0 < result["padding_efficiency"] <= 1
    assert {"jax", "python", "numpy"} <= result["versions"].keys()
    assert "git_commit" in result and result["device"]
    assert re.fullmatch("[0-9a-f]{64}", result["parameters_sha256"])


def test_clients_file(finished):
    """Accuracies [seed, round, client] of the window, test sizes, class counts."""
    with np.load(finished / "clients.npz") as file:
        arrays = dict(file)
    assert arrays["accuracy"].shape == (2, 1, 4)
    assert arrays["test_size"].shape == (2, 4)
    assert arrays["class_counts"].shape == (2, 4, 4)
    np.testing.assert_array_equal(arrays["rounds"], [ROUNDS])
    np.testing.assert_array_equal(arrays["seeds"], [0, 1])
    total = arrays["class_counts"].sum((1, 2)) + arrays["test_size"].sum(1)
    np.testing.assert_array_equal(total, [240, 240])
    for entry in [r for r in metrics(finished) if r["round"] == ROUNDS]:
        accuracy = arrays["accuracy"][entry["seed"], 0]
        assert accuracy.mean() == pytest.approx(entry["client_accuracy"])
        size = arrays["test_size"][entry["seed"]]
        pooled = (accuracy * size).sum() / size.sum()
        assert pooled == pytest.approx(entry["client_accuracy_pooled"])


def test_run_flags_replay_the_run(reference, tmp_path, monkeypatch):
    """--flagfile=run.flags alone, in the default workdir: the same parameters."""
    monkeypatch.chdir(tmp_path)
    main.main(["main", f"--flagfile={reference / 'run.flags'}"])
    assert_same_run(tmp_path / "runs" / "fedavg-blobs-seed0", reference)


def test_finished_run_prints_its_table_again(finished, blobs, capsys):
    """Exit 0, nothing is computed, nothing is written."""
    before = contents(finished)
    for more in ([], ["--resume"], ["--client_chunk=1"]):
        run(blobs, finished, "--num_seeds=2", *more)
        shown = capsys.readouterr()
        assert "finished" in shown.out and "Global" in shown.out
        assert shown.err == ""
    assert contents(finished) == before


@pytest.mark.parametrize("round, every", [(0, 0), (1, 2), (3, 1)])
def test_killed_and_resumed(reference, blobs, tmp_path, monkeypatch, round, every):
    """Killed after any round, with and without checkpoints: the same run."""
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    folder = tmp_path / "run"
    flags = ["--summary=mean_last10", f"--checkpoint_every={every}"]
    with monkeypatch.context() as patch:
        kill_at(patch, round)
        with pytest.raises(KilledError):
            run(blobs, folder, *flags)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert not (folder / "summary.json").exists()
    run(blobs, folder, *flags, "--resume")
    assert_same_run(folder, reference)


@pytest.mark.parametrize(
    "round, number, code", [(0, signal.SIGINT, 130), (2, signal.SIGTERM, 143)]
)
def test_stopped_by_a_signal(
    reference, blobs, tmp_path, monkeypatch, capsys, round, number, code
):
    """Saves, exits with the signal's code, says how to go on, and goes on."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_at(patch, round, number)
        with pytest.raises(SystemExit) as stop:
            run(blobs, folder, "--summary=mean_last10")
    assert stop.value.code == code
    told = capsys.readouterr().err
    command = re.search(r"python -m launch\.main (.*)", told).group(1).split()
    assert "--resume" in command
    main.main(["main", *command])
    assert_same_run(folder, reference)


def test_more_rounds_need_no_other_flag(blobs, tmp_path, monkeypatch):
    """`rounds` is no part of a run's identity, nor are defaults that follow it."""
    base = ["main", "--algo=fedavg", "--model=mlp", "--devices=1", "--num_clients=4"]
    base += [f"--dataset={blobs}", f"--workdir={tmp_path / 'run'}"]
    kill_at(monkeypatch, 0)
    with pytest.raises(KilledError):
        main.main([*base, "--rounds=2"])
    with pytest.raises(KilledError):
        main.main([*base, "--rounds=20", "--resume"])


def test_half_a_line_in_the_metrics(copied, reference, blobs):
    """A line cut off by a kill, and lines after the checkpoint, are cut back."""
    shutil.rmtree(copied / "checkpoints" / "round_00000004")
    with open(copied / "metrics.jsonl", "a") as file:
        file.write('{"round": 5, "se')
    run(blobs, copied, "--summary=mean_last10", "--resume")
    assert_same_run(copied, reference)


def test_a_partial_checkpoint_is_ignored(copied, reference, blobs):
    """Killed while writing one: the complete one before it counts."""
    newest = copied / "checkpoints" / "round_00000004"
    newest.rename(copied / "checkpoints" / "partial_00000004")
    run(blobs, copied, "--summary=mean_last10", "--resume", "--checkpoint_every=1")
    assert_same_run(copied, reference)
    assert not list(copied.rglob("partial_*"))


def test_older_checkpoint_after_a_damaged_one(copied, reference, blobs, refused):
    """It is named, and doing what the message says leads to the same end."""
    newest = copied / "checkpoints" / "round_00000004"
    (newest / "manifest.json").write_text("{}")
    line = refused(copied, "--summary=mean_last10", "--resume")
    assert str(newest / "manifest.json") in line and "round_00000003" in line
    shutil.rmtree(newest)
    run(blobs, copied, "--summary=mean_last10", "--resume")
    assert_same_run(copied, reference)


def test_nothing_changes_before_all_is_read(whole, refused, monkeypatch):
    """Rows are read after all checks; a summary is there until they are."""

    def unreadable(*_):
        raise ValueError("no such piece")

    monkeypatch.setattr(simulate.Simulation, "load", unreadable)
    more = "--summary=mean_last10", "--resume"
    line = refused(whole, *more, rounds=ROUNDS + 1)
    assert f"{whole / 'checkpoints'} cannot be loaded (no such piece)" in line


def cut(text):
    """The first half."""
    return text[: len(text) // 2]


def edit(text):
    """One digit of the third line is another one."""
    lines = text.splitlines(keepends=True)
    lines[2] = lines[2].translate(str.maketrans("0123456789", "1234567890"))
    return "".join(lines)


@pytest.mark.parametrize("change", [cut, edit, None])
def test_damaged_metrics_are_written_again(copied, reference, blobs, capsys, change):
    """On resume: named on one line, and rebuilt from the checkpoint."""
    path = copied / "metrics.jsonl"
    text = path.read_text()
    path.write_text(change(text)) if change else path.unlink()
    run(blobs, copied, "--summary=mean_last10", "--resume")
    told = capsys.readouterr().err
    assert told.startswith(f"note: {path} is damaged from line ")
    assert told.count("\n") == 1
    assert path.read_text() == text
    assert_same_run(copied, reference)


@pytest.mark.parametrize("name", ["metrics.jsonl", "clients.npz", "summary.json"])
@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_finished_run_is_named_and_mended(
    whole, reference, blobs, refused, name, damage
):
    """Refused in one line that offers --resume, which writes the same files again."""
    path = whole / name
    raw = path.read_bytes()
    half = len(raw) // 2
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(raw[:half] + bytes([raw[half] ^ 1]) + raw[half + 1 :])
    told = refused(whole, "--summary=mean_last10")
    assert "--resume" in told
    # Without its summary a run is one that was killed before it was written.
    assert str(path) in told or (name, damage) == ("summary.json", "remove")
    run(blobs, whole, "--summary=mean_last10", "--resume")
    assert_same_run(whole, reference)


def test_a_summary_may_be_formatted_anew(whole, blobs, capsys):
    """Its hash is over values."""
    path = whole / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    run(blobs, whole, "--summary=mean_last10")
    assert "finished" in capsys.readouterr().out


def test_fewer_rounds_than_begun_are_refused(blobs, tmp_path, monkeypatch, refused):
    """Their summary would take rounds whose accuracies were not kept."""
    flags = ["--summary=mean_last10", "--checkpoint_every=1"]
    with monkeypatch.context() as patch:
        kill_at(patch, 11)
        with pytest.raises(KilledError):
            run(blobs, tmp_path / "run", *flags, rounds=40)
    told = refused(tmp_path / "run", *flags, "--resume", rounds=12)
    assert "--rounds=12 " in told and "--rounds=13 or more" in told


def test_an_extension_leaves_no_old_summary(whole, blobs, monkeypatch, capsys):
    """Begun and killed: neither summary.json nor clients.npz of the shorter run."""
    flags = ["--summary=mean_last10", "--resume"]
    kill_at(monkeypatch, 5)
    with pytest.raises(KilledError):
        run(blobs, whole, *flags, "--checkpoint_every=1", rounds=6)
    assert {path.name for path in whole.iterdir()} == {
        "run.flags",
        "metrics.jsonl",
        "checkpoints",
    }


def test_the_checkpoint_of_another_run(blobs, tmp_path, capsys):
    """Two folders copied into one: the flags are of one, and the state of the other."""
    one, other = tmp_path / "one", tmp_path / "other"
    run(blobs, one, "--client_lr=0.5", rounds=4)
    run(blobs, other, "--client_lr=0.001", rounds=2)
    shutil.copytree(other, one, dirs_exist_ok=True)
    before = contents(one)
    with pytest.raises(SystemExit):
        run(blobs, one, "--client_lr=0.001", "--resume", rounds=6)
    line = capsys.readouterr().err
    assert "--client_lr=0.5, not 0.001, as where two folders" in line
    assert contents(one) == before


def test_resume_alone_means_the_rounds_of_the_run(whole, blobs, capsys):
    """Finished: its table. Not the default number of rounds."""
    bare = (whole / "run.flags").read_text().splitlines()
    options = [one for one in bare if not one.startswith(("--rounds", "#"))]
    before = contents(whole)
    main.main(["main", *options, f"--workdir={whole}", "--resume"])
    assert "finished" in capsys.readouterr().out
    assert contents(whole) == before
    text = (whole / "run.flags").read_text()
    (whole / "run.flags").write_text(re.sub("--rounds=.*", "--rounds=x", text))
    with pytest.raises(SystemExit):
        main.main(["main", *options, f"--workdir={whole}", "--resume"])
    assert "run.flags has no number of rounds" in capsys.readouterr().err


def test_resume_where_nothing_is(blobs, tmp_path, capsys):
    """A job's script may always say so; a misspelt folder is told."""
    folder = tmp_path / "nix"
    run(blobs, folder, "--resume", rounds=1)
    assert f"--resume: {folder} holds no run yet" in capsys.readouterr().out
    run(blobs, folder, "--resume", rounds=2)
    assert "holds no run yet" not in capsys.readouterr().out


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("left", [[], ["run.flags.partial"], [lock.NAME]])
def test_a_kill_as_the_folder_appears(blobs, tmp_path, left, resume):
    """What it leaves blocks nobody and stays with nobody."""
    for name in left:
        (tmp_path / name).write_text('{"pid"')
    experiment = build.experiment(
        algo="fedavg", dataset=blobs, model="mlp", workdir=str(tmp_path), resume=resume
    )
    with workdir.Workdir(experiment) as folder:
        assert folder.open() is None
    assert [path.name for path in tmp_path.iterdir()] == ["run.flags"]


@pytest.mark.parametrize("name", ["run.flags.partial", "metrics.jsonl.partial"])
def test_links_are_not_followed(name, copied, reference, blobs, tmp_path):
    """What a link in the folder names stays as it is."""
    other = tmp_path / "other.txt"
    other.write_text("mine")
    (copied / name).symlink_to(other)
    run(blobs, copied, "--summary=mean_last10", "--resume")
    assert_same_run(copied, reference)
    assert other.read_text() == "mine"


def test_checkpoints_that_are_gone(copied, reference, blobs, capsys):
    """A note says that the run starts over."""
    shutil.rmtree(copied / "checkpoints")
    run(blobs, copied, "--summary=mean_last10", "--resume")
    assert "holds no checkpoint, so the run starts over" in capsys.readouterr().err
    assert_same_run(copied, reference)


def write(name, text=""):
    """A change of a folder: a file has this text."""
    return lambda folder: (folder / name).write_text(text)


def unfinish(folder):
    """As after a kill before the summary."""
    for name in ("summary.json", "clients.npz"):
        (folder / name).unlink()


def forget(folder):
    shutil.rmtree(folder / "checkpoints")


RESUME, ODD = ["--resume"], "summary.json is damaged"


@pytest.mark.parametrize(
    "changes, flags, part",
    [
        ([], ["--resume", "--rounds=2"], "--rounds=2 would be fewer"),
        ([unfinish], [], "stopped after 4 of 4 rounds; add --resume"),
        ([write("summary.json", "{}")], [], ODD),
        ([write("summary.json", "5")], [], ODD),
        ([write("summary.json", "[" * 100000)], [], ODD),
        ([forget, write("metrics.jsonl")], RESUME, "no checkpoint to continue from"),
        ([unfinish, lambda one: lock.Lock(one).acquire()], RESUME, "in use by process"),
        (
            [unfinish, lambda one: (one / "run.lock").symlink_to(one / "run.flags")],
            RESUME,
            "run.lock is a link",
        ),
        (
            [unfinish, forget, write("checkpoints")],
            RESUME,
            "checkpoints is a file where a folder is expected",
        ),
        (
            [unfinish, lambda one: (one / "run.flags").unlink()],
            [],
            "holds files but no run",
        ),
    ],
)
def test_folders_that_are_refused(whole, refused, changes, flags, part):
    """In one line, and all stays as it is."""
    for change in changes:
        change(whole)
    assert part in refused(whole, "--summary=mean_last10", *flags)


def added(line):
    """A change: the records end with another line."""

    def change(folder):
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(line + "\n")

    return change


def edited(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('accuracy": 0.', 'accuracy": 0.9', 1))


def piped(folder):
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")


def sealed(**more):
    """A change by somebody who makes the hash of the summary right again."""

    def change(folder):
        made = {k: v for k, v in summary(folder).items() if k != "sha256"} | more
        made["sha256"] = finished_lib._own_digest(made)
        (folder / "summary.json").write_text(json.dumps(made))

    return change


def outside(folder):
    """A change: the summary has the hash of a file outside of the folder."""
    known = summary(folder)["files_sha256"]
    sealed(files_sha256=known | {"../../../etc/passwd": "0" * 64})(folder)


def with_arrays(**more):
    """A change by somebody who makes the hashes of all files right again."""

    def change(folder):
        with np.load(folder / "clients.npz") as file:
            held = {name: file[name] for name in file.files} | more
        held = {name: one for name, one in held.items() if one is not None}
        np.savez(folder / "clients.npz", **held)
        made = {k: v for k, v in summary(folder).items() if k != "sha256"}
        found = finished_lib.seal(folder, made)
        (folder / "summary.json").write_text(json.dumps(found))

    return change


BYTES = {"mean": 1.0, "std": 0.0, "per_seed": [1.0]}
NO_METRIC = {"bytes_up": BYTES, "bytes_down": BYTES}
LINES = "5", '{"seed": 0}', "[" * 100_000, '{"round": "1", "seed": 0}', "{"


@pytest.mark.parametrize(
    "changes, part",
    [
        *(([unfinish, added(x)], "metrics.jsonl is damaged: line ") for x in LINES),
        ([unfinish, edited], "was changed since the run wrote it"),
        ([unfinish, piped], "holds no run"),
        ([write("run.flags", "5")], "run.flags is damaged"),
        ([write("clients.npz")], "clients.npz is damaged: summary.json has another"),
        ([sealed(metrics=5)], ODD),
        ([sealed(rounds="4")], ODD),
        ([sealed(metrics={"global_accuracy": {"mean": 1}})], ODD),
        ([sealed(files_sha256=[])], ODD),
        ([sealed(sweep=3)], ODD),
        ([sealed(metrics={})], ODD),
        ([sealed(metrics=NO_METRIC | {"bytes_up": BYTES | {"mean": "x"}})], ODD),
        ([sealed(last_round=5)], ODD),
        ([sealed(versions=7)], ODD),
        ([sealed(numbers=5)], ODD),
        ([outside], "etc/passwd, which is not expected"),
        ([sealed(setup_bytes_down="x")], ODD),
        ([sealed(num_devices="x")], ODD),
        ([sealed(step_efficiency=10**400)], "is a number that no float can hold"),
        ([sealed(metrics=NO_METRIC | {"bytes_up": BYTES | {"clients": "x"}})], ODD),
        ([with_arrays(accuracy=None)], "damaged: it has no accuracy of shape"),
        ([with_arrays(class_names=np.array("a"))], "it has no class_names of shape"),
        ([with_arrays(unseen=np.zeros(3, bool))], "it has no unseen of shape"),
    ],
)
def test_folders_that_are_not_drawn(whole, capsys, changes, part):
    """In one line."""
    for change in changes:
        change(whole)
    with pytest.raises(SystemExit):
        plot.command(["plot", str(whole)])
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line


def test_a_page_about_metrics_that_nobody_measured(whole, undrawn):
    """It says that there is no value."""
    sealed(metrics=NO_METRIC)(whole)
    assert "No summary has a value of" in page_lib.page(page_lib.read([whole]))


@pytest.mark.parametrize("command", ["load", "export", "main"])
def test_a_stranger_s_folder_names_no_file_and_no_host(
    whole, tmp_path, capsys, command
):
    """Its flags may name options of a run alone, whoever reads them."""
    precious, programs = tmp_path / "precious.npz", tmp_path / "programs"
    precious.write_text("precious")
    (tmp_path / "more.flags").write_text(f"--export_partition={precious}\n")
    flags = (whole / "run.flags").read_text().splitlines()
    flags = [line for line in flags if "--compile_cache=" not in line]
    flags += [f"--export_partition={precious}", "--distributed=localhost:9,2,1"]
    flags += [f"--compile_cache={programs}", f"--flagfile={tmp_path}/more.flags"]
    (whole / "run.flags").write_text("\n".join(flags) + "\n")
    if command == "load":
        build.load(whole)
    elif command == "export":
        export.command(["export", str(whole), f"--output={tmp_path}/model.npz"])
    else:
        more = [f"--flagfile={whole}/run.flags", f"--workdir={whole}", "--resume"]
        main.main(["main", *more])
    told = "--export_partition, --distributed, --compile_cache, --flagfile "
    assert told in capsys.readouterr().err
    assert precious.read_text() == "precious" and not programs.exists()


def test_too_many_rounds(whole):
    """What a folder could not hold."""
    with pytest.raises(ValueError, match="expected at most 2147483647"):
        build.load(str(whole)).extend(10**30)


def test_a_full_disk_is_one_line(reference, blobs, tmp_path, monkeypatch, capfd):
    """Exit code 1, and the run goes on once there is room."""
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(SystemExit) as stop:
            run(blobs, folder, "--summary=mean_last10", "--checkpoint_every=1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert stop.value.code == 1
    told = capfd.readouterr().err
    assert f"{folder}: [Errno 27] File too large" in told and told.count("\n") == 1
    run(blobs, folder, "--summary=mean_last10", "--resume")
    assert_same_run(folder, reference)


def test_a_finished_run_without_its_last_checkpoint(whole, reference, blobs):
    """No earlier state is taken for that of the end."""
    shutil.rmtree(whole / "checkpoints" / f"round_{ROUNDS:08d}")
    with pytest.raises(ValueError, match=r"its last checkpoint is of round 3; remove"):
        build.load(whole)
    assert build.load(whole, round=3).round == 3
    (whole / "summary.json").unlink()
    run(blobs, whole, "--summary=mean_last10", "--resume")
    assert_same_run(whole, reference)


@pytest.fixture
def began(blobs, tmp_path):
    """A run in Python, in a folder of its own."""
    given = {"algo": "fedavg", "dataset": blobs, "model": "mlp", "num_clients": 4}
    given |= {"devices": 1, "rounds": 3, "eval_every": 1}
    return build.experiment(**given, workdir=tmp_path / "began")


def ran(experiment, act):
    """Calls `act` after each evaluated round of a run without progress."""
    return experiment.run(progress=False, on_record=lambda one: act(one["round"]))


def test_an_error_after_the_last_round_costs_no_models(began):
    """`run()` then saves what it did not."""

    def fails(round):
        if round == 3:
            raise FileNotFoundError("mine.csv")

    with pytest.raises(FileNotFoundError, match=r"^mine.csv$"):  # not the folder's
        ran(began, fails)
    began.run(progress=False)
    assert build.load(began.folder.path).round == 3


@pytest.mark.parametrize("round", [2, 3])
def test_a_record_that_found_no_room(began, round, monkeypatch):
    """Nothing of its line stays, and `run()` goes on from the memory.

    A disk may take a part of a line. The last round has no call after it.
    """
    write = os.write

    def full(file, data):
        if f'"round": {round}'.encode() in bytes(data):
            if len(data) > 20:
                return write(file, data[:20])
        elif not bytes(data).startswith(b'{"round"'):
            raise OSError(28, "No space left on device")
        return write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(workdir.os, "write", full)
        with pytest.raises(OSError, match="results cannot be written to .*No space"):
            began.run(progress=False)
    path, before = began.folder.path, list(range(round))
    assert [one["round"] for one in metrics(path)] == before
    began.run(progress=False)
    assert [one["round"] for one in metrics(path)] == [0, 1, 2, 3]
    assert finished_lib.read(path)["rounds"] == 3
    assert [one["round"] for one in build.load(path).metrics] == [0, 1, 2, 3]


def test_a_folder_that_another_run_took(began):
    """A run whose folder is moved writes nothing to the next one, nor unlocks it."""
    path, other = began.folder.path, lock.Lock(began.folder.path)

    def moves(round):
        if round == 1:
            path.rename(path.with_name("old"))
            other.acquire()

    with pytest.raises(OSError, match="was moved or removed during the run"):
        ran(began, moves)
    assert [one.name for one in path.iterdir()] == [lock.NAME]
    with pytest.raises(ValueError, match="in use by process"):
        lock.Lock(path).acquire()
    other.release()
    path.rmdir()


def test_a_line_that_a_kill_has_cut(copied):
    """What is drawn of an unfinished run are its whole records."""
    path = copied / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [one["round"] for one in record_lib.read(copied).records] == [0, 1, 2, 3]


@pytest.mark.parametrize("kept", [20, 0])
def test_a_round_that_a_kill_has_cut(kept, finished, tmp_path):
    """Of two seeds it is left out where only one has its record."""
    folder = pathlib.Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / "summary.json").unlink()
    path = folder / "metrics.jsonl"
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + last[:kept])
    found = [one["round"] for one in record_lib.read(folder).records]
    assert found == [n for n in range(ROUNDS) for _ in range(2)]
    shutil.rmtree(folder / "checkpoints")
    path.write_bytes(lines[0] + lines[1][:kept])
    with pytest.raises(ValueError, match="holds no run that has measured anything"):
        record_lib.read(folder)


def test_an_error_before_the_first_record(began, monkeypatch):
    """`run()` then begins, as it goes on after later ones."""

    def fails(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(build.Experiment, "measure", fails)
        with pytest.raises(MemoryError):
            began.run(progress=False)
    assert began.run(progress=False)["rounds"] == 3


def test_a_home_is_the_user_s(began, blobs, tmp_path, monkeypatch):
    """Bash leaves `--workdir=~/mine` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run(blobs, "~/mine", rounds=1)
    assert build.load("~/mine").folder.path == tmp_path / "mine"


def test_a_file_that_cannot_be_read(whole, monkeypatch):
    """One line, as for all that is wrong with a folder."""

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(flagfile.RunFlags, "read", denied)
    with pytest.raises(ValueError, match="Permission denied: '.*run.flags'"):
        build.load(whole)


def test_a_signal_in_the_last_chunk_ends_a_loop_over_runs(blobs, tmp_path, monkeypatch):
    """The run is whole; the exit code tells whoever began it to stop."""
    with monkeypatch.context() as patch:
        signal_at(patch, 1, signal.SIGTERM)
        with pytest.raises(SystemExit) as stop:
            run(blobs, tmp_path / "run", rounds=1)
    assert stop.value.code == 143
    assert finished_lib.read(tmp_path / "run")["rounds"] == 1


def test_classes_are_counted_by_client():
    """Against a loop, with clients of no example and gaps between them."""
    draws = np.random.default_rng(0)
    label, row = draws.integers(0, 5, 50), draws.permutation(50)[:30]
    start, count = np.array([20, 3, 0, 10]), np.array([7, 0, 3, 9])
    counts = finished_lib.count_classes(label, row, start, count, 5)
    for client in range(4):
        own = row[start[client] : start[client] + count[client]]
        expected = [(label[own] == one).sum() for one in range(5)]
        np.testing.assert_array_equal(counts[client], expected)


def test_the_commit_is_the_project_s_own(tmp_path, monkeypatch):
    """Not that of a repository in which the package is installed."""
    folder = tmp_path / "venv" / "launch" / "folder"
    folder.mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        finished_lib.subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(finished_lib, "__file__", str(folder / "finished.py"))
    assert finished_lib.git_commit() == {}
    folder = tmp_path / "launch" / "folder"
    folder.mkdir(parents=True)
    monkeypatch.setattr(finished_lib, "__file__", str(folder / "finished.py"))
    assert re.fullmatch("[0-9a-f]{40}", finished_lib.git_commit()["git_commit"])


def test_clients_without_test_rows_are_refused(blobs, tmp_path, capsys):
    """Four rows a client, floor(.2 * 4) = 0 test rows: nothing could be measured."""
    with pytest.raises(SystemExit) as stop:
        run(blobs, tmp_path / "run", "--partition=iid", "--num_clients=60", rounds=1)
    assert stop.value.code == 2
    assert "--test_split=client_share leaves no test row" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
