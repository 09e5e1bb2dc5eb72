"""TensorBoard's files and metrics.csv say what metrics.jsonl says."""

import csv
import hashlib
import json
import shutil
import socket
import sys

import pytest

from launch import build, main
from launch.folder import tracking
from launch.run import progress
from tests import conftest

pytestmark = pytest.mark.usefixtures("narrow")


def arguments(blobs, folder, *more):
    words = ["--algo=fedavg", "--num_seeds=2", "--rounds=3", "--eval_every=1"]
    words += ["--tensorboard", "--csv", f"--dataset={blobs}", f"--workdir={folder}"]
    return ["main", *conftest.FLAGS, *words, *more]


def scalars(folder, seed):
    """{(name, round): value} as TensorBoard itself reads the files."""
    from tensorboard.backend.event_processing import event_accumulator

    path = str(folder / tracking.FOLDER / f"seed{seed}")
    reader = event_accumulator.EventAccumulator(path, {"scalars": 0})
    reader.Reload()
    return {
        (tag, event.step): event.value
        for tag in reader.Tags()["scalars"]
        for event in reader.Scalars(tag)
    }


def check(folder):
    """Every number of metrics.jsonl, once, and no other."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for seed in (0, 1):
        wanted = {
            (name, record["round"]): value
            for record in records
            if record["seed"] == seed
            for name, value in record.items()
            if name not in ("round", "seed")
        }
        assert scalars(folder, seed) == pytest.approx(wanted, rel=1e-6)
    with open(folder / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(records)
    for line, record in zip(table, records, strict=True):
        found = {name: float(text) for name, text in line.items() if text}
        assert found == {name: float(value) for name, value in record.items()}


def test_the_same_numbers(blobs, tmp_path, monkeypatch):
    """Also after a kill, whose later records are written again."""

    class KilledError(Exception):
        """Stands for a kill."""

    def on_call(self, run, records):
        if run.round == 2:
            raise KilledError

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "on_call", on_call)
        with pytest.raises(KilledError):
            main.main(arguments(blobs, folder, "--checkpoint_every=1"))
    without = [one for one in arguments(blobs, folder) if one != "--csv"]
    main.main([*without, "--resume"])
    check(folder)  # a table that is there goes on
    (folder / "metrics.csv").unlink()
    main.main(arguments(blobs, folder, "--resume"))
    check(folder)  # and one that is asked for later is written


def test_without_its_package(blobs, tmp_path, monkeypatch, capsys):
    """One line, and nothing is written."""
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        main.main(arguments(blobs, tmp_path / "run"))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "pip install 'fedjax_pfl[tracking]'" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tensorboard", "csv"])
def test_files_need_a_folder(blobs, name):
    """In memory there is none."""
    made = build.experiment(algo="fedavg", dataset=blobs, model="mlp", **{name: True})
    with pytest.raises(ValueError, match=f"{name} writes files"):
        made.run()


def test_wandb_gets_every_number(tmp_path, monkeypatch):
    """A stand-in for the package receives what metrics.jsonl has, seeds apart."""
    (tmp_path / "wandb.py").write_text(
        "logged, given = [], {}\n"
        "class Run:\n"
        "    def log(self, values, step): logged.append((step, values))\n"
        "    def finish(self): logged.append('finished')\n"
        "def init(**more):\n"
        "    given.update(more)\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = build.experiment(
        algo="fedavg",
        **conftest.SIX,
        num_seeds=2,
        workdir=str(tmp_path / "run"),
        wandb="mine",
    )
    made.run(progress=False)
    wandb = sys.modules.pop("wandb")
    assert wandb.given["project"] == "mine" and wandb.given["config"]["num_seeds"] == 2
    assert wandb.logged.pop() == "finished" and len(wandb.logged) == len(made.metrics)
    for (step, values), record in zip(wandb.logged, made.metrics, strict=True):
        prefix = f"seed{record['seed']}/"
        assert step == record["round"]
        wanted = {
            prefix + n: x for n, x in record.items() if n not in ("round", "seed")
        }
        assert values == wanted


def test_wandb_runs_are_those_of_folders(tmp_path, monkeypatch):
    """A resumed run goes on, and a folder that was made anew begins another."""
    (tmp_path / "wandb.py").write_text(
        "import types\n"
        "given = []\n"
        "def init(**more):\n"
        "    given.append(more['id'])\n"
        "    return types.SimpleNamespace(log=lambda *_, **__: 0, finish=lambda: 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "run"
    options = {"algo": "local", "workdir": str(folder), "wandb": "mine"}
    options |= conftest.SIX

    def run(**more):
        build.experiment(**options | more).run(progress=False)

    run()
    run(resume=True, rounds=conftest.SIX["rounds"] + 1)
    shutil.rmtree(folder)
    run()
    (folder / "wandb.id").unlink()  # earlier versions named it by the path
    run(resume=True, rounds=conftest.SIX["rounds"] + 1)
    first, resumed, anew, earlier = sys.modules.pop("wandb").given
    assert first == resumed and len({first, anew, earlier}) == 3
    place = f"{socket.gethostname()}:{folder.resolve()}"
    assert earlier == hashlib.sha256(place.encode()).hexdigest()[:16]


def test_a_run_that_began_without_wandb(tmp_path, monkeypatch, capsys):
    """Has all of its records there, and a finished one is none to log."""
    (tmp_path / "wandb.py").write_text(
        "import types\n"
        "steps = []\n"
        "def init(**more):\n"
        "    log = lambda values, step: steps.append(step)\n"
        "    return types.SimpleNamespace(log=log, finish=lambda: 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = {"algo": "local", "workdir": str(tmp_path / "run"), **conftest.SIX}
    build.experiment(**options).run(progress=False)
    more = {"resume": True, "rounds": conftest.SIX["rounds"] + 1, "wandb": "mine"}
    made = build.experiment(**options | more)
    made.run(progress=False)
    steps = sys.modules.pop("wandb").steps
    assert steps == [record["round"] for record in made.metrics]
    finished = f"--flagfile={tmp_path}/run/run.flags", f"--workdir={tmp_path}/run"
    main.main(["main", *finished, "--tensorboard"])
    assert "note: --tensorboard has no effect on a fini" in capsys.readouterr().out


def test_wandb_is_missing(tmp_path):
    """One line says what to install."""
    made = build.experiment(
        algo="fedavg", **conftest.SIX, workdir=str(tmp_path / "run"), wandb="mine"
    )
    with pytest.raises(ValueError, match="--wandb needs the package wandb"):
        made.run(progress=False)
