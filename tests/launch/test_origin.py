"""Where runs come from: commands that repeat them, and what says when and where."""

import pathlib
import shlex

import numpy as np
import pytest

from launch.config import flagfile, flags, resolve
from launch.folder import record
from launch.show import origin
from tests import synthetic

GRAY = synthetic.blobs(200, (28, 28, 1), 10)
OWNED = GRAY._replace(client=np.arange(200) % 37)


def resolved(given, source):
    """The options of a run, as its run.flags has them."""
    config, hparams = resolve.configure(given)
    config = resolve.resolve(config, source, given)
    return flagfile.RunFlags.of(config, hparams).options


def of(options, **more):
    return record.Record(pathlib.Path("runs/x"), options, [], {}, **more)


@pytest.mark.parametrize("algo", ["cdkt", "fedavg", "fedper", "fedmd", "depthfl"])
@pytest.mark.parametrize("source", [GRAY, OWNED])
def test_a_command_gives_the_options(algo, source):
    """All of them, under each preset and whatever the data decide."""
    every = [
        {"dataset": "fashion_mnist"},
        {"dataset": "femnist", "partition": "client_dirichlet", "num_clients": 7},
        {"dataset": "mnist_5k", "preset": "cdkt", "client_lr": 0.5, "seed": 3},
        {"dataset": "mnist_5k", "preset": "none", "model": "mlp", "rounds": 3},
        {"dataset": "cifar10", "preset": "depthfl", "num_seeds": 2},
        {"dataset": "mnist_5k", "data_dir": "/somewhere", "devices": 1},
    ]
    if source.client is not None:
        every.append({"dataset": "femnist", "preset": "fedd2s"})
    for given in every:
        wanted = resolved({"algo": algo, **given}, source)
        line = origin.command(of(wanted))
        words = shlex.split(line)
        assert words[:2] == ["fedjax-pfl", "run"] and "/" not in line
        found = resolved(flags.parse(words[1:]), source)
        differing = {n for n in wanted if found[n] != wanted[n]}
        assert differing <= {"data_dir", "devices"}, line
        assert len(words) < 20


def test_a_command_of_a_sweep_and_of_files():
    """Quoted for a shell; the points of a sweep are one command."""
    options = resolved({"algo": "fedprox", "dataset": "mnist_5k"}, GRAY)
    points = [
        {"client_lr": a, "proximal_weight": b} for a in (0.1, 1.0) for b in (0, 2)
    ]
    summary = {"sweep": [{"point": point} for point in points]}
    lines = set()
    for point in points:
        flags_of = options | {name: str(value) for name, value in point.items()}
        lines.add(origin.command(of(flags_of, summary=summary, point=point)))
    (line,) = lines
    assert "'--sweep=client_lr=0.1,1.0;proximal_weight=0.0,2.0'" in line
    assert line.count("client_lr") == 1
    own = options | {"dataset": "npz:/my data/x.npz", "partition": "natural"}
    assert "'--dataset=npz:/my data/x.npz'" in origin.command(of(own))
    line = origin.command(of(options | {"algo": "own_mine", "dataset": "arrays"}))
    assert line == "build.load('runs/x', algo=..., dataset=...).run()  # in Python"


def test_settings():
    """Those that differ, those that all share, and those of some methods."""
    runs = [
        of({"algo": "a", "rounds": "3", "devices": "1", "own": "2", "seed": "0"}),
        of({"algo": "b", "rounds": "4", "devices": "2", "seed": "0", "swept": "1"}),
        of({"algo": "b", "rounds": "4", "devices": "2", "seed": "0", "swept": "2"}),
    ]
    found = origin.settings(runs, ["A", "B", "C"])
    differing = dict(found.differing)
    assert differing["rounds"] == ["3", "4", "4"] and "devices" not in differing
    assert differing["swept"] == ["–", "1", "2"]
    assert found.shared == ["--seed=0"] and found.own == ["--own=2  (A)"]
    pointed = [run._replace(point={"swept": 1.0}) for run in runs[1:]]
    assert not origin.settings(pointed, ["B", "C"]).differing


def test_when_and_where():
    """Also of runs of earlier versions, which did not say it."""
    old = {"device": "cpu", "versions": {"jax": "1"}}
    new = old | {"finished": "2026-01-02T03:04Z", "cpu": "A CPU", "cores": 4}
    new |= {"version": "0.1", "git_commit": "0123456789abcdef"}
    assert origin.machine(old) == "1 device (cpu); fedjax_pfl, jax 1"
    assert origin.machine(new) == (
        "1 device (cpu), A CPU with 4 cores; fedjax_pfl 0.1 (0123456789), jax 1"
    )
    later = new | {"finished": "2026-01-02T13:04Z"}
    runs = [of({}, summary=one) for one in (later, old, new)]
    assert origin.when(runs) == "2026-01-02 03:04 UTC to 2026-01-02 13:04 UTC"
    assert origin.when(runs[1:2]) == ""
