"""Bad input: one line that begins with `error:` and names the flag, no traceback."""

import pathlib
import re
import socket
import time

import jax
import numpy as np
import pytest

import models
from launch import main
from launch.machine import memory
from tests.conftest import write_npz
from tests.toys import model as toy_model


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder; returns its only line on stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main.main(["main", *arguments])
        assert stop.value.code in (1, 2)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        assert "Traceback" not in lines[0]
        return lines[0]

    return run


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """Data sets of a user's images: of another shape, and of the same."""
    folder = tmp_path_factory.mktemp("public")
    other = write_npz(folder / "other.npz", shape=(5, 5, 1))
    return {"npz:PUBLIC": other, "npz:SAME": write_npz(folder / "same.npz", seed=1)}


@pytest.fixture
def toys(monkeypatch):
    """Registers the models with and without exits."""
    for make in (toy_model.with_exits, toy_model.narrow):
        monkeypatch.setitem(models.MODELS, make.__name__, make)


SMALL = ["--algo=fedavg", "--model=mlp", "--devices=1", "--rounds=1"]
# 240 images of 8x8 in four classes, no owners
BASES = {
    "": "",
    "small": f"{' '.join(SMALL)} --dataset=BLOBS",
    "m1": "--dataset=BLOBS --devices=1 --rounds=1 --model=m1",
    "peers": "--algo=dfedavg --preset=none --num_clients=9 --model=mlp --dataset=BLOBS "
    "--devices=1",
    "levels": "--algo=depthfl --preset=none --dataset=BLOBS --devices=1 --rounds=1 "
    "--model=with_exits --num_clients=6 --partition=iid --level_mix=1:1:1",
    "table": " ".join(SMALL),
}
# A line each: what is given, the flags that are wrong, and parts of the error
REFUSED = """
       | --algo=fedprophet                    | --algo=fedprophet; cdkt, ; fedavg
       | --algo=fedavg --clinet_lr=0.1        | --clinet_lr; --client_lr
       | --algo=fedavg --label_mix=0.5        | --label_mix; cdkt; fedavg
       | --client_distill_weight=inf          | --client_distill_weight=inf
       | --preset=best                        | --preset=best; cdkt
       | --algo=fedavg rounds=3               | rounds=3; --name=value
       | --flagfile=nowhere.flags             | --flagfile=nowhere.flags; no such file
       | --dataset=imagenet                   | --dataset=imagenet; mnist_5k
       | --dataset=npz:nowhere.npz            | --dataset=npz:nowhere.npz
       | --algo=fedavg --rounds               | --rounds
       | --algo=fedmd --public_set=mnist      | --public_set=mnist; mnist_5k
m1     | --algo=fedd2s --min_layer=9          | --min_layer=9: expected at most 6; C1
m1     | --algo=fedper --personal_from=F9     | --personal_from=F9; F1
m1     | --algo=fedmd --public_set=none       | public images; --public_set
m1     | --algo=fedmd --public_set=npz:/no.npz| --public_set=npz:/no.npz
m1     | --algo=fedavg --public_set=npz:SAME  | --public_set; fedmd
m1     | --algo=fedmd --public_set=npz:PUBLIC | [5, 5, 1]; [8, 8, 1]; --public_set
m1     | --algo=fedavg --client_model=m1,m2   | --client_model=m1,m2; name one
m1     | --examples_per_client=100            | --examples_per_client=100; lower
peers  | --num_peers=9                        | at most 8, the others of --num_clients=9
peers  | --topology=file --adjacency=none.npz | none.npz; no such file
levels | --level_mix=1:1                      | has 2 levels, --model=with_exits has 3
levels | --exclusive --clients_per_round=3    | _per_round=3; 2 of 6 clients; lower it
levels | --algo=fedavg --level_mix=           | --level_mix belongs to
levels | --client_model=narrow                | --client_model=narrow; omit --client_mod
levels | --model=mlp                          | has one exit; exit at every stage
levels | --image_size=7                       | --image_size=7; [8, 8, 1]; at least 8
small  | --model=depth_masked_lm              | takes tokens; [8, 8, 1]; another model
small  | --num_clients=5 --clients_per_round=6| _per_round=6: expected at most 5
small  | --num_clients=200                    | --num_clients=200; 240
small  | --algo=fedper --summary=best --eval_moments=after | --summary=best; take both
small  | --algo=ditto --summary=best --eval_moments=after | --summary=best; take both
small  | --partition=cdkt                     | --partition=cdkt
small  | --model=resnet999                    | --model=resnet999; mlp
small  | --model=fedavg_cnn                   | --model=fedavg_cnn; [8, 8, 1]; another
small  | --devices=99                         | --devices=99; 4
small  | --seed=4294967295 --num_seeds=2      | --seed=4294967295: expected at most
small  | --client_model=m1                    | --client_model=m1
table  | --dataset=csv:own.csv                | no column is known; --label; price
table  | --dataset=csv:own.csv --label=sort   | no column --label=sort; kind
table  | --dataset=csv:own.csv --label=price --owner=site | not numbers: kind
table  | --dataset=csv:own.csv --label=kind   | not numbers: site; --owner
table  | --dataset=csv:own.csv --label=kind --owner=site | 2 of 2 owners; a has 1, b has
table  | --dataset=csv:none.csv               | csv:none.csv; no such file
table  | --dataset=images:.                   | images:.; there are no images
table  | --dataset=mnist_5k --owner=site      | --owner=site; DataFrame
"""


@pytest.mark.parametrize("row", REFUSED.strip("\n").splitlines())
def test_what_does_not_fit(refused, toys, blobs, public, tmp_path, row):
    """Words, layers, graphs, levels, sizes, columns and files that are not there."""
    base, given, parts = row.split("|")
    (tmp_path / "own.csv").write_text("price,site,kind\n1.5,a,oak\n2.5,b,elm\n")
    arguments = given.split()
    names = {one.partition("=")[0] for one in arguments}
    before = BASES[base.strip()].split()
    arguments = [b for b in before if b.partition("=")[0] not in names] + arguments
    for name, path in (public | {"BLOBS": blobs}).items():
        arguments = [one.replace(name, path) for one in arguments]
    line = refused(*arguments)
    for part in parts.split(";"):
        assert part.strip() in line


def test_misspelt_in_a_flagfile(refused, tmp_path):
    """A flagfile is read like the command line."""
    for line in ("--clinet_lr=0.1", "--flagfile=inner.flags"):
        (tmp_path / "bad.flags").write_text(f"--algo=fedavg\n{line}\n--rounds=2\n")
        assert line.removesuffix("=0.1") in refused("--flagfile=bad.flags")


def test_two_algorithms_one_in_a_flagfile(refused, tmp_path):
    """A flagfile for one algorithm, --algo for another."""
    (tmp_path / "one.flags").write_text("--algo=cdkt\n--label_mix=0.1\n")
    line = refused("--flagfile=one.flags", "--algo=local")
    assert "--algo" in line and "cdkt" in line and "local" in line


@pytest.mark.parametrize(
    "argument, reason",
    [
        ("--num_clients=2000000000", "partitions of all seeds.*lower it"),
        (
            "--model_width=1000",
            "the models of the clients that train together.*lower it",
        ),
    ],
)
def test_numbers_without_bounds(refused, monkeypatch, blobs, argument, reason):
    """By the limit of an int, or by an estimate; nothing is allocated or written."""
    monkeypatch.setattr(memory, "free_bytes", lambda: (None, 2**34))
    line = refused(*SMALL, f"--dataset={blobs}", argument)
    assert line.startswith(f"error: {argument}")
    assert re.search(reason, line)
    assert not pathlib.Path("runs").exists()


def test_more_than_the_clients_can_keep(refused, monkeypatch, blobs):
    """The state that an algorithm has in truth: here a model for every client."""
    monkeypatch.setattr(memory, "free_bytes", lambda: (None, 10**6))
    arguments = ["--model=mlp", "--devices=1", "--rounds=1", f"--dataset={blobs}"]
    line = refused("--algo=local", "--preset=none", "--num_clients=40", *arguments)
    assert "--num_clients=40 needs" in line and "the models that clients keep" in line


def test_images_that_no_memory_can_hold(refused, monkeypatch, blobs):
    """A MemoryError, wherever it comes from, is one line."""

    def full(*_):
        raise MemoryError

    monkeypatch.setattr(np, "pad", full)
    line = refused(*SMALL, f"--dataset={blobs}", "--image_size=4096")
    assert "out of memory" in line and "--image_size" in line


@pytest.mark.parametrize("name", ["a\nb", "x" * 5000])
def test_names_that_no_file_can_tell(refused, name):
    """Refused before a folder of that name is made."""
    line = refused(*SMALL, f"--workdir={name}")
    assert line.startswith("error: --workdir=")
    assert list(pathlib.Path().iterdir()) == []


@pytest.fixture
def no_network(monkeypatch):
    """Names do not resolve and waiting costs nothing; returns the naps taken."""
    naps = []

    def unknown_host(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    def nap(seconds, sleep=time.sleep):
        naps.append(seconds)
        sleep(0.001)

    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)
    monkeypatch.setattr(time, "sleep", nap)
    return naps


def test_data_set_that_is_not_there(refused, tmp_path, no_network):
    """No IDX files, no prepared tfds data, no network: one line, and no long wait."""
    line = refused("--algo=fedavg", "--dataset=cifar10", f"--data_dir={tmp_path}/tf")
    assert "--dataset=cifar10" in line and "--data_dir" in line
    assert sum(no_network) < 30


@pytest.mark.parametrize(
    "change, part",
    [
        (["--client_lr=0.2"], "--client_lr=0.05, not 0.2"),
        (["--seed=1"], "--seed=0, not 1"),
        (["--num_clients=5"], "--num_clients=4, not 5"),
        (["--algo=local"], "--algo=fedavg, not local"),
    ],
)
def test_workdir_of_another_configuration(
    refused, tmp_path, blobs, monkeypatch, change, part
):
    """The flags that differ are named; what is there stays as it is."""

    def killed(*_):
        raise InterruptedRun

    flags = ["--model=mlp", "--devices=1", f"--dataset={blobs}", "--workdir=mine"]
    flags += ["--rounds=2", "--clients_per_round=2"]
    monkeypatch.setattr("launch.run.loop.run", killed)
    with pytest.raises(InterruptedRun):
        main.main(["main", "--algo=fedavg", "--num_clients=4", *flags])
    before = (tmp_path / "mine" / "run.flags").read_bytes()
    base = ["--algo=fedavg"] * (not change[0].startswith("--algo"))
    for resume in ([], ["--resume"]):
        line = refused(*base, "--num_clients=4", *flags, *change, *resume)
        assert "--workdir=mine" in line and part in line
    assert (tmp_path / "mine" / "run.flags").read_bytes() == before
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["run.flags"]


class InterruptedRun(Exception):
    """Stands for a kill."""


def test_float64(refused, tmp_path, blobs):
    """Dropout would drop other units, and some methods' rounds fail to compile."""
    with jax.enable_x64(True):
        line = refused(*SMALL, f"--dataset={blobs}", "--workdir=mine")
    assert "jax_enable_x64 is on" in line and "JAX_ENABLE_X64=0" in line
    assert not (tmp_path / "mine").exists()


def test_workdir_that_is_a_file(refused, tmp_path, blobs):
    """Cannot be written: one line that names it."""
    (tmp_path / "mine").write_text("precious")
    assert "mine" in refused(*SMALL, f"--dataset={blobs}", "--workdir=mine")
    assert (tmp_path / "mine").read_text() == "precious"
