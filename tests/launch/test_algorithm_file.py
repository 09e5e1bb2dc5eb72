"""`--algo=mine.py`: an algorithm in a file of the user's."""

import json
import pathlib
import shutil
import sys

import pytest

from launch import build, contract, export, main
from launch.config import algorithm_file, flags, registry
from launch.tables import protocol
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


def edit(path, old, new):
    """Replaces a text in a file."""
    text = open(path).read()
    assert old in text
    open(path, "w").write(text.replace(old, new))


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
    with pytest.raises(ValueError, match="give its file, as --algo=FILE.py"):
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
        run(blobs, tmp_path / "run", pulled, "--emulate=accelerator")
    line = capsys.readouterr().err.strip().splitlines()[-1]
    words = line.partition("launch.main ")[2].split()
    monkeypatch.undo()
    # Which the folder does not record
    assert "--emulate=accelerator" in words
    main.main(["main", *words])
    assert build.load(tmp_path / "run", algo=pulled).round == 2


def test_an_edited_file_is_another_method(pulled):
    """What it computes is read again, and the same file is the same object."""
    before = registry.algorithm(pulled)
    assert registry.algorithm(pulled).make is before.make
    edit(pulled, "hparams.pull,", "hparams.pull * 2,")
    edited = registry.algorithm(pulled)
    assert edited.make is not before.make
    edit(pulled.replace("pulled.py", "beside.py"), "0.5", "0.9")
    assert registry.algorithm(pulled).HParams().pull == 0.9
    assert edited.HParams().pull == 0.5


def test_files_of_one_name(pulled, tmp_path):
    """Each has its own modules beside it, in which annotations are read."""
    kinds, before = registry.option_types(pulled), sys.path[:]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/beside.py").write_text("WEIGHT = 7.0")
    other = tmp_path / "other/pulled.py"
    other.write_text(PROX)
    assert registry.algorithm(other).HParams().pull == 7
    other.write_text(CLASS)
    assert registry.algorithm(str(other)).name == "Mine"
    with pytest.raises(ValueError, match="there is no Two in"):
        registry.algorithm(f"{other}:Two")
    assert registry.algorithm(pulled).HParams().pull == 0.5
    assert registry.option_types(pulled) == kinds and kinds["pull"] is float
    assert sys.path == before


def test_a_hash_is_of_the_files_alone(pulled, tmp_path):
    """Not of where they are, nor of the order in which modules were imported."""
    (tmp_path / "zero.py").write_text("import one\n")
    (tmp_path / "one.py").touch()
    edit(pulled, "import beside\n", "import beside\nimport zero\n")
    copied = shutil.copytree(tmp_path, tmp_path.parent / "copied") / "pulled.py"
    for path in (pulled, copied):
        registry.algorithm(path)
    names = "beside.py", "one.py", "pulled.py", "zero.py"
    digests = algorithm_file._KEPT[pathlib.Path(pulled).resolve()].digests
    assert sorted(one.name for one in digests) == [*names]
    assert algorithm_file.digest(pulled) == algorithm_file.digest(copied)


def test_names_of_files(tmp_path):
    """A file's own class is the method, and no file has a name of ours."""
    ours = "from algorithms.fedper import HParams, make\n"
    for name in ("fedrep", "a_0.1", "__"):
        (tmp_path / f"{name}.py").write_text(ours)
    names = [registry.algorithm_name(one) for one in sorted(tmp_path.iterdir())]
    assert names == ["custom", "a_0_1", "own_fedrep"]
    mine = "class Mine:\n    HParams, make = HParams, staticmethod(make)\n"
    (tmp_path / "a.py").write_text(ours + mine)
    assert registry.algorithm_name(tmp_path / "a.py") == "Mine"
    assert registry.algorithm_name(f"{tmp_path / 'a.py'}:Mine") == "Mine"


def test_a_strangers_folder_runs_no_file(tmp_path, pulled):
    """Neither a run's flagfile nor what a study's folder holds."""
    (tmp_path / "run.flags").write_text(f"--algo={pulled}\n")
    with pytest.raises(ValueError, match="has a file as --algo, which no run"):
        flags.parse(["main", f"--flagfile={tmp_path / 'run.flags'}"])
    with pytest.raises(ValueError, match="has a file as --algo"):
        build.load(tmp_path)


def test_plain_fields(tmp_path, capsys):
    """They are flags as those of a notebook's object are options."""
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom algorithms import fedavg\n"
        "@dataclasses.dataclass(frozen=True)\nclass HParams(fedavg.HParams):\n"
        "    scale: float = 2.0\nmake = fedavg.make\n"
    )
    words = ["main", f"--algo={tmp_path / 'mine.py'}"]
    assert flags.parse([*words, "--scale=3"])["scale"] == 3
    with pytest.raises(SystemExit):
        flags.parse([*words, "--help"])
    assert "--scale=<float>\n      a field of HParams; 2.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, line",
    [
        ("x = 1\n\ndef f(:", "line 3: SyntaxError: invalid syntax"),
        ("x = 1\nimport nowhere", "line 2: ModuleNotFoundError: No module"),
        ("def f():\n    return 1 / 0\n\nf()", "line 2: ZeroDivisionError: division"),
        ("import sys\nsys.exit(0)", "line 2: SystemExit: 0"),
        ("import random", "import random is another module than the one beside"),
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
    (tmp_path / "random.py").touch()
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
def test_a_study_sees_an_edited_file(blobs, narrow, tmp_path, pulled, monkeypatch):
    """Its row is trained again, and the others are not."""
    monkeypatch.chdir(tmp_path)
    rows = {"fedavg": {}, "P": {"options": {"algo": pulled}}, "pulled.py": {}}
    table = {"rows": rows}
    table["common"] = {"options": conftest.SIX | {"dataset": blobs}}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))

    def opened():
        """The study with the file as it is, and its rows without a result."""
        study = protocol.read(path, tmp_path / "study")
        return study, [row for row, one in study.runs().items() if one is None]

    study, rows = opened()
    assert rows == ["fedavg", "P", "pulled.py"]
    study.run(progress=False)
    assert opened()[1] == []
    beside = pulled.replace("pulled.py", "beside.py")
    edit(beside, "0.5", "9.5")
    study, rows = opened()
    assert rows == ["P", "pulled.py"]
    edit(beside, "9.5", "0.5")
    study.run(progress=False)  # of the file as it was when the study was opened
    assert opened()[1] == []
    edit(beside, "0.5", "9.5")
    assert opened()[1] == []


def test_the_contract_by_the_command(pulled, capsys, monkeypatch):
    """It prints the rules that hold, or ends with 1 and the broken one."""
    words = ["contract", f"--algo={pulled}", "--pull=0.1"]
    with pytest.raises(SystemExit) as error:
        contract.command([*words, "--workdir=run"])
    assert error.value.code == 2
    monkeypatch.setattr(contract, "check", lambda algo, pull: [f"{algo} {pull}."])
    contract.command(words)
    told = capsys.readouterr()
    assert "--workdir=run: a check writes no file" in told.err
    assert told.out == f"pulled holds: {pulled} 0.1.\n"

    def broken(**_):
        raise contract.BrokenError("pulled breaks: all.")

    monkeypatch.setattr(contract, "check", broken)
    with pytest.raises(SystemExit) as error:
        contract.command(words)
    assert error.value.code == 1 and "pulled breaks" in capsys.readouterr().err
