"""Bad input: one line that begins with `error:` and names the flag, no traceback."""

import pathlib
import re
import socket
import time

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


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--algo=fedprophet"], ["--algo=fedprophet", "cdkt", "fedavg"]),
        (["--algo=fedavg", "--clinet_lr=0.1"], ["--clinet_lr", "--client_lr"]),
        (["--algo=fedavg", "--label_mix=0.5"], ["--label_mix", "cdkt", "fedavg"]),
        (["--client_distill_weight=-1"], ["--client_distill_weight=-1", "0"]),
        (["--server_distill_weight=-0.5"], ["--server_distill_weight=-0.5"]),
        (["--client_distill_weight=inf"], ["--client_distill_weight=inf"]),
        (["--temperature=0"], ["--temperature=0", "0"]),
        (["--label_mix=1.5"], ["--label_mix=1.5", "1"]),
        (["--rounds=0"], ["--rounds=0"]),
        (["--num_clients=-3"], ["--num_clients=-3"]),
        (["--partition=fair"], ["--partition=fair", "dirichlet"]),
        (["--partition_alpha=0"], ["--partition_alpha=0"]),
        (["--preset=best"], ["--preset=best", "cdkt"]),
        (["--transfer=all"], ["--transfer=all", "repfull"]),
        (["--algo=fedavg", "rounds=3"], ["rounds=3", "--"]),
        (["--flagfile=nowhere.flags"], ["--flagfile", "nowhere.flags"]),
        (["--dataset=imagenet"], ["--dataset=imagenet", "mnist_5k"]),
        (["--dataset=npz:nowhere.npz"], ["--dataset=npz:nowhere.npz"]),
        (["--algo=fedavg", "--rounds"], ["--rounds"]),
    ],
)
def test_words_that_do_not_fit(refused, arguments, parts):
    """Before any data are read."""
    line = refused(*arguments)
    for part in parts:
        assert part in line


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """Data sets of a user's images: of another shape, and of the same."""
    folder = tmp_path_factory.mktemp("public")
    other = write_npz(folder / "other.npz", shape=(5, 5, 1))
    return {"npz:PUBLIC": other, "npz:SAME": write_npz(folder / "same.npz", seed=1)}


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--algo=fedd2s", "--min_layer=9"], ["--min_layer=9", "at most 6", "C1"]),
        (["--rotate_classes=5"], ["--rotate_classes=5: expected at most 4"]),
        (["--algo=fedper", "--personal_from=F9"], ["--personal_from=F9", "F1"]),
        (["--algo=fedper", "--min_layer=2"], ["--min_layer=2", "--layer_dropping"]),
        (["--algo=fedmd", "--public_set=none"], ["public images", "--public_set"]),
        (
            ["--algo=fedmd", "--public_set=npz:/nowhere.npz"],
            ["--public_set=npz:/nowhere.npz"],
        ),
        (["--algo=fedavg", "--public_set=npz:SAME"], ["--public_set", "fedmd"]),
        (
            ["--algo=fedmd", "--public_set=npz:PUBLIC"],
            ["[5, 5, 1]", "[8, 8, 1]", "--public_set"],
        ),
        (
            ["--algo=fedavg", "--client_model=m1,m2"],
            ["--client_model=m1,m2", "name one"],
        ),
        (["--examples_per_client=100"], ["--examples_per_client=100", "lower"]),
    ],
)
def test_boundaries_and_public_sets(refused, blobs, public, arguments, parts):
    """FedD2S's family: layers that are not there, images that do not fit."""
    for name, path in public.items():
        arguments = [one.replace(name, path) for one in arguments]
    given = [f"--dataset={blobs}", "--devices=1", "--rounds=1", "--model=m1"]
    line = refused(*given, *arguments)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--num_peers=9"], ["--num_peers=9", "--num_clients=9", "at most 8", "lower"]),
        (["--topology=erdos_renyi", "--edge_probability=0"], ["--edge_probability=0"]),
        (["--topology=file", "--adjacency=none.npz"], ["none.npz", "no such file"]),
    ],
)
def test_graphs(refused, blobs, arguments, parts):
    """Decentralised methods: graphs that cannot be."""
    given = ["--algo=dfedavg", "--preset=none", "--num_clients=9", "--model=mlp"]
    line = refused(*given, f"--dataset={blobs}", "--devices=1", *arguments)
    for part in parts:
        assert part in line


@pytest.fixture
def toys(monkeypatch):
    """Registers the models with and without exits."""
    for make in (toy_model.with_exits, toy_model.narrow):
        monkeypatch.setitem(models.MODELS, make.__name__, make)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (
            ["--level_mix=1:1"],
            [
                "--level_mix=1:1 has 2 levels",
                "--model=with_exits has 3",
                "as many parts",
            ],
        ),
        (
            ["--exclusive", "--clients_per_round=3"],
            ["--clients_per_round=3", "2 of 6 clients", "lower it"],
        ),
        (
            ["--algo=fedavg"],
            [
                "--model=with_exits",
                "exit at every stage",
                "--algo=fedavg",
                "depthfl,",
            ],
        ),
        (
            ["--client_model=narrow"],
            [
                "--client_model=narrow",
                "--model=with_exits",
                "omit --client_model",
            ],
        ),
        (["--image_size=7"], ["--image_size=7", "[8, 8, 1]", "at least 8"]),
        (["--image_size=5000"], ["--image_size=5000", "at most 4096"]),
    ],
)
def test_levels_and_sizes_of_images(refused, toys, blobs, arguments, parts):
    """DepthFL's family: levels that are not there, models with exits, no such sizes."""
    given = ["--algo=depthfl"] * (not any("--algo=" in one for one in arguments))
    given += ["--preset=none", f"--dataset={blobs}", "--devices=1", "--rounds=1"]
    given += ["--model=with_exits", "--num_clients=6", "--partition=iid"]
    if "--algo=depthfl" in given:
        given += ["--level_mix=1:1:1"]
    names = {one.partition("=")[0] for one in arguments}
    given = [one for one in given if one.partition("=")[0] not in names]
    line = refused(*given, *arguments)
    for part in parts:
        assert part in line


def test_public_set_of_the_same_images(refused):
    """mnist_5k is a part of mnist."""
    line = refused("--algo=fedmd", "--public_set=mnist", "--devices=1")
    assert "--public_set=mnist" in line and "mnist_5k" in line


@pytest.mark.parametrize(
    "line, part",
    [
        ("--clinet_lr=0.1", "--clinet_lr"),
        ("--flagfile=inner.flags", "inner.flags"),
    ],
)
def test_misspelt_in_a_flagfile(refused, tmp_path, line, part):
    """A flagfile is read like the command line."""
    (tmp_path / "bad.flags").write_text(f"--algo=fedavg\n{line}\n--rounds=2\n")
    assert part in refused("--flagfile=bad.flags")


def test_two_algorithms_one_in_a_flagfile(refused, tmp_path):
    """A flagfile for one algorithm, --algo for another."""
    (tmp_path / "one.flags").write_text("--algo=cdkt\n--label_mix=0.1\n")
    line = refused("--flagfile=one.flags", "--algo=local")
    assert "--algo" in line and "cdkt" in line and "local" in line


SMALL = ["--algo=fedavg", "--model=mlp", "--devices=1", "--rounds=1"]


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (
            ["--num_clients=5", "--clients_per_round=6"],
            ["_round=6: expected at most 5"],
        ),
        (["--num_clients=200"], ["--num_clients=200", "240"]),
        (["--partition=cdkt"], ["--partition=cdkt"]),
        (["--model=resnet999"], ["--model=resnet999", "mlp"]),
        (["--model=fedavg_cnn"], ["--model=fedavg_cnn", "[8, 8, 1]; take another"]),
        (["--devices=99"], ["--devices=99", "4"]),
        (["--proxy_fraction=1"], ["--proxy_fraction=1"]),
        (["--seed=4294967295", "--num_seeds=2"], ["seed"]),
        (["--client_model=m1"], ["--client_model=m1"]),
        (["--model_width=0"], ["--model_width=0", "more than 0"]),
        (["--model_width=1001"], ["--model_width=1001", "at most 1000"]),
    ],
)
def test_options_that_do_not_fit_the_data(refused, blobs, arguments, parts):
    """240 images of 8x8 in four classes, no owners."""
    line = refused(*SMALL, f"--dataset={blobs}", *arguments)
    for part in parts:
        assert part in line


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


def test_truncated_npz_file(refused, tmp_path, blobs):
    """A user's file that was cut off."""
    with open(blobs.removeprefix("npz:"), "rb") as file:
        raw = file.read()
    (tmp_path / "cut.npz").write_bytes(raw[: len(raw) // 2])
    assert "cut.npz" in refused(*SMALL, "--dataset=npz:cut.npz")


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--dataset=csv:own.csv"], ["no column is known", "--label", "price"]),
        (["--dataset=csv:own.csv", "--label=sort"], ["no column --label=sort", "kind"]),
        (
            ["--dataset=csv:own.csv", "--label=price", "--owner=site"],
            ["not numbers: kind"],
        ),
        (["--dataset=csv:own.csv", "--label=kind"], ["not numbers: site", "--owner"]),
        (
            ["--dataset=csv:own.csv", "--label=kind", "--owner=site"],
            ["2 of 2 owners", "a has 1, b has 1", "--min_owner_examples=2"],
        ),
        (["--dataset=csv:none.csv"], ["csv:none.csv", "no such file"]),
        (["--dataset=images:."], ["images:.", "there are no images"]),
        (["--dataset=mnist_5k", "--owner=site"], ["--owner=site", "DataFrame"]),
    ],
)
def test_tables_and_folders(refused, tmp_path, arguments, parts):
    """A user's own data that do not fit their options."""
    (tmp_path / "own.csv").write_text("price,site,kind\n1.5,a,oak\n2.5,b,elm\n")
    line = refused(*SMALL, *arguments)
    for part in parts:
        assert part in line


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


def test_workdir_that_is_a_file(refused, tmp_path, blobs):
    """Cannot be written: one line that names it."""
    (tmp_path / "mine").write_text("precious")
    assert "mine" in refused(*SMALL, f"--dataset={blobs}", "--workdir=mine")
    assert (tmp_path / "mine").read_text() == "precious"
