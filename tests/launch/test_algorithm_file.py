"""`--algo=mine.py`: an algorithm in a file of the user's."""

import os

import pytest

from launch import build, contract, export, main
from launch.config import flags, registry
from tests import conftest

# FedProx, whose weight is read from a module beside it
PROX = '''"""Pulled: FedProx in a file."""

from __future__ import annotations

import dataclasses

import beside
import fedjax_pfl as fp
from fedjax_pfl import averaging


@dataclasses.dataclass(frozen=True)
class HParams(averaging.Averaging):
    pull: float = fp.option(beside.WEIGHT, "pull to the server [mu]", minimum=0)


def make(hparams, task):
    loss_fn = fp.cross_entropy_loss(task.model)

    def client_update(client, server):
        pull = fp.proximal(hparams.pull, server.params)
        objective = fp.Objective(loss_fn, adjust=pull)
        return fp.train(hparams, (objective,), server, client)

    return averaging.make(hparams, task, client_update)
'''
CLASS = """
import fedjax_pfl as fp
from algorithms import fedavg
from algorithms.fedprox import HParams as Other

class Mine:
    HParams = fp.LocalTraining
    make = staticmethod(fedavg.make)
"""


@pytest.fixture
def pulled(tmp_path):
    """The path of a file that holds FedProx."""
    (tmp_path / "beside.py").write_text("WEIGHT = 0.5\n")
    (tmp_path / "pulled.py").write_text(PROX)
    return str(tmp_path / "pulled.py")


def run(dataset, folder, algo, *more):
    """A run by the command, in a folder."""
    words = ["--summary=last", "--rounds=2", f"--dataset={dataset}"]
    words += [f"--algo={algo}", f"--workdir={folder}", *more]
    return main.main(["main", *conftest.FLAGS, *words])


def test_a_file_is_the_method_in_it(blobs, narrow, tmp_path, pulled, capsys):
    """It has its own options, and a name in folders that its file alone opens."""
    run(blobs, tmp_path / "ours", "fedprox", "--proximal_weight=0.5", "--preset=none")
    run(blobs, tmp_path / "own", pulled)
    assert f"pulled of {pulled} on" in capsys.readouterr().out
    ours = build.load(tmp_path / "ours")
    with pytest.raises(ValueError, match="give its file, such as --algo=pulled.py"):
        build.load(tmp_path / "own")
    own = build.load(tmp_path / "own", algo=pulled)
    assert (own.config.algo, own.hparams.pull) == ("pulled", 0.5)
    assert own.simulation.digest() == ours.simulation.digest()
    given = f"--algo={pulled}", f"--output={tmp_path / 'model.msgpack'}"
    export.command(["export", str(tmp_path / "own"), *given])
    assert (tmp_path / "model.msgpack").is_file()


def test_a_stopped_run_is_continued_with_its_file(
    blobs, narrow, tmp_path, pulled, capsys, monkeypatch
):
    """The flagfile of the run has the name, and the command that is printed both."""

    class Stopped(main.Stop):
        def __enter__(self):
            self.ask(2)
            return super().__enter__()

    monkeypatch.setattr(main, "Stop", Stopped)
    with pytest.raises(SystemExit):
        run(blobs, tmp_path / "run", pulled)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    words = line.partition("launch.main ")[2].split()
    monkeypatch.undo()
    main.main(["main", *words])
    assert build.load(tmp_path / "run", algo=pulled).round == 2


def test_an_edited_file_is_another_method(pulled):
    """What it computes is read again, and the same file is the same object."""
    before = registry.algorithm(pulled)
    assert registry.algorithm(pulled).make is before.make
    text = open(pulled).read().replace("hparams.pull,", "hparams.pull * 2,")
    open(pulled, "w").write(text)
    os.utime(pulled, ns=(1, 1))
    assert registry.algorithm(pulled).make is not before.make


def test_files_of_one_name(pulled, tmp_path):
    """Annotations are read in their own module."""
    (tmp_path / "other").mkdir()
    other = tmp_path / "other/pulled.py"
    other.write_text(CLASS)
    kinds = registry.option_types(pulled)
    assert registry.algorithm(str(other)).name == "Mine"
    assert registry.algorithm(f"{other}:fedavg").name == "fedavg"
    with pytest.raises(ValueError, match="there is no Two in"):
        registry.algorithm(f"{other}:Two")
    assert registry.option_types(pulled) == kinds and kinds["pull"] is float


@pytest.mark.parametrize(
    "text, line",
    [
        ("x = 1\n\ndef f(:", "line 3: SyntaxError: invalid syntax"),
        ("x = 1\nimport nowhere", "line 2: ModuleNotFoundError: No module"),
        ("def f():\n    return 1 / 0\n\nf()", "line 2: ZeroDivisionError: division"),
        ("x = 1", "expected a dataclass HParams and a function make"),
        (
            CLASS + "\nclass Two(Mine): ...",
            "and there are Mine, Two; take one of them, .*mine.py:Mine",
        ),
        (CLASS.replace("LocalTraining", "option"), "expected a name, or an object"),
        (None, "No such file"),
    ],
)
def test_what_is_no_algorithm_is_refused(tmp_path, text, line):
    """In one line, with the place in the file."""
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=line) as error:
        flags.parse(["main", f"--algo={path}"])
    assert "\n" not in str(error.value)


def test_two_algorithms_in_one_command(pulled):
    """A file replaces its own name and no other."""
    assert flags.parse(["main", "--algo=pulled", f"--algo={pulled}"])["algo"] == pulled
    with pytest.raises(ValueError, match="two different --algo"):
        flags.parse(["main", "--algo=fedavg", f"--algo={pulled}"])


@pytest.mark.slow
def test_a_study_sees_an_edited_file(blobs, narrow, tmp_path, pulled):
    """Its row is trained again, and the others are not."""
    given = conftest.SIX | {"dataset": blobs, "folder": tmp_path / "study"}
    build.study(["fedavg", pulled], **given).run(progress=False)
    text = open(pulled).read().replace("hparams.pull,", "hparams.pull + 9,")
    open(pulled, "w").write(text)
    os.utime(pulled, ns=(1, 1))
    build.study(["fedavg", pulled], **given).run(progress=False)
    runs = [path.name.split("-")[0] for path in (tmp_path / "study/runs").iterdir()]
    assert sorted(runs) == ["fedavg", "pulled", "pulled"]


def test_the_contract_by_the_command(pulled, capsys, monkeypatch):
    """It prints the rules that hold, or ends with 1 and the broken one."""
    words = ["contract", f"--algo={pulled}", "--pull=0.1"]
    with pytest.raises(SystemExit) as error:
        contract.command([*words, "--workdir=run"])
    assert error.value.code == 2
    monkeypatch.setattr(contract, "check", lambda algo, pull: [f"{algo} {pull}."])
    contract.command(words)
    told = capsys.readouterr()
    assert "--workdir=run: a check writes nothing; omit it" in told.err
    assert told.out == f"pulled holds: {pulled} 0.1.\n"

    def broken(**_):
        raise contract.BrokenError("pulled breaks: all.")

    monkeypatch.setattr(contract, "check", broken)
    with pytest.raises(SystemExit) as error:
        contract.command(words)
    assert error.value.code == 1 and "pulled breaks" in capsys.readouterr().err
