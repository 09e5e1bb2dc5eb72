"""The command fedjax-pfl, flagfiles by name, and a user's files that hide ours."""

import pathlib
import subprocess
import sys

import pytest

from launch import cli
from launch.config import flagfile, flags

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_every_command_is_there(monkeypatch, capsys):
    """Each has a function that answers --help."""
    for name in cli.COMMANDS:
        monkeypatch.setattr(sys, "argv", ["fedjax-pfl", name, "--help"])
        try:
            cli.main()
        except SystemExit as stop:
            assert stop.code in (0, None)
        assert capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"]])
def test_usage(monkeypatch, capsys, argv):
    """All commands, a line each."""
    monkeypatch.setattr(sys, "argv", ["fedjax-pfl", *argv])
    cli.main()
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)


def test_no_such_command(monkeypatch, capsys):
    """One line with the nearest one."""
    monkeypatch.setattr(sys, "argv", ["fedjax-pfl", "rum"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("did you mean run?\n")


def test_flagfiles_by_name(tmp_path, monkeypatch, capsys):
    """From any folder; a file of that name there comes first."""
    monkeypatch.chdir(tmp_path)
    argv = ["main", "--flagfile=cdkt.fashion_mnist"]
    whole = flagfile.FLAGFILES / "cdkt.fashion_mnist.flags"
    assert flags.parse(argv) == flags.parse(["main", f"--flagfile={whole}"])
    (tmp_path / "cdkt.fashion_mnist").write_text("--algo=local\n")
    assert flags.parse(argv) == {"algo": "local"}
    with pytest.raises(flagfile.UsageError, match="did you mean uapdfl.fashion_mnist?"):
        flags.parse(["main", "--flagfile=uapdfl.fashionmnist"])


@pytest.mark.parametrize("argv, exit_code", [(["-m"], 2), (["notebook"], 1)])
@pytest.mark.parametrize("name", ["data/__init__.py", "models.py"])
def test_a_file_that_hides_a_package(tmp_path, name, argv, exit_code):
    """One line that names it, before anything else fails."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); sys.argv = {argv}; import launch"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == exit_code
    last = done.stderr.splitlines()[-1]
    assert f"{path} hides this project's package" in last and "fedjax-pfl" in last
    assert ("Traceback" in done.stderr) == (exit_code == 1)


@pytest.mark.parametrize(
    "algo, given, meant",
    [
        ("fedavg", "lr", "client_lr"),
        ("fedavg", "optimizer.lr", "client_lr"),
        ("fedavg", "frac", "clients_per_round"),
        ("fedavg", "epochs", "local_epochs"),
        ("fedavg", "num_new_clients", "unseen_clients"),
        ("fedavg", "num-server-rounds", "rounds"),
        ("fedavg", "test_interval", "eval_every"),
        ("fedavg", "fraction_evaluate", "eval_sample"),
        ("fedavg", "learning_rate_decay", "client_lr_decay"),
        ("fedavg", "auto_break", "early_stop"),
        ("fedavg", "alpha", "partition_alpha"),
        ("apfl", "alpha", "own_weight"),
        ("moon", "mu", "contrastive_weight"),
        ("pfedme", "lamda", "proximal_weight"),
        ("fedala", "rand_percent", "adaptive_share"),
        ("fedala", "s", "adaptive_share"),
        ("fedavg", "random_seed", "seed"),
        ("fedavg", "gr", "rounds"),
        ("fedavg", "t", "num_seeds"),
    ],
)
def test_flags_of_neighbours(algo, given, meant):
    """What other frameworks call it, which may depend on the method."""
    with pytest.raises(flagfile.UsageError, match=f"did you mean --{meant}\\?"):
        flags.parse(["main", f"--algo={algo}", f"--{given}=1"])


@pytest.mark.parametrize(
    "given, words",
    [
        ("num_classes=10", "; the data have their number of classes$"),
        ("device_id=0", "; the environment's CUDA_VISIBLE_DEVICES chooses a GPU$"),
        ("s=80", "--s is not a flag of --algo=fedavg$"),
    ],
)
def test_flags_that_nothing_here_is_like(given, words):
    """What is there instead, or no guess."""
    with pytest.raises(flagfile.UsageError, match=words):
        flags.parse(["main", "--algo=fedavg", f"--{given}"])


def test_an_algorithm_that_is_nearly_one():
    """The nearest name."""
    with pytest.raises(flagfile.UsageError, match="; did you mean fedprox\\?"):
        flags.parse(["main", "--algo=FedPr"])
