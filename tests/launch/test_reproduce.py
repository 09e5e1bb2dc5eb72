"""Tables: missing cells run, finished ones stay, Markdown has paper | ours | gap."""

import json

import pytest

from launch import bench, reproduce


@pytest.fixture
def tiny(tmp_path, monkeypatch, blobs):
    """A paper with one table of two cells, on the blobs."""
    table = {
        "title": "Tiny",
        "metrics": ["global_accuracy", "client_accuracy"],
        "common": {"rounds": 2, "model": "mlp", "num_clients": 4, "devices": 1},
        "scenarios": {"fixed": {"clients_per_round": 4}},
        "rows": {
            "Local": {"algo": "local", "proxy_fraction": 0.1},
            "FedAvg": {"algo": "fedavg"},
        },
        "datasets": {
            blobs: {
                "fixed": {
                    "Local": {"flags": {"client_lr": 0.1}, "paper": [10.0, 20.0]},
                    "FedAvg": {"flags": {}, "paper": [30.0, 40.0]},
                }
            }
        },
        "notes": {},
    }
    (tmp_path / "tiny.json").write_text(json.dumps({"table1": table}))
    monkeypatch.setattr(reproduce, "PAPERS", tmp_path)
    monkeypatch.chdir(tmp_path)
    return blobs


def test_cells_run_once_and_are_kept(tiny, tmp_path, capsys):
    """The first command runs both cells, the second none; a lost one runs again."""
    argv = ["reproduce", "tiny.table1", f"--dataset={tiny}", "--scenario=fixed"]
    argv += ["--workdir=out", "--output=table.md"]
    reproduce.command(argv)
    first = capsys.readouterr().out
    assert first.count("2 rounds, 1 seed(s)") == 2
    rows = (tmp_path / "table.md").read_text().splitlines()
    local = next(line for line in rows if line.startswith("| Local"))
    assert "10.00 / " in local and "missing" not in local
    done = sorted(tmp_path.glob("out/**/summary.json"))
    assert len(done) == 2
    ours = json.loads(done[1].read_text())["metrics"]["global_accuracy"]["mean"]
    assert f"10.00 / {100 * ours:.1f} / {100 * ours - 10:+.1f}" in local
    reproduce.command(argv)
    assert "2 rounds, 1 seed(s)" not in capsys.readouterr().out


def test_dry_run_runs_nothing(tiny, tmp_path, capsys):
    """--dry_run shows the paper's numbers beside `missing`."""
    reproduce.command(
        ["reproduce", "tiny.table1", f"--dataset={tiny}", "--dry_run"]
        + ["--scenario=fixed", "--workdir=out"]
    )
    assert capsys.readouterr().out.count("missing") == 4
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tiny.table9"], "no table tiny.table9"),
        ([], "give one table"),
        (["tiny.table1", "--dataset=cifar10"], "--dataset=cifar10"),
        (["tiny.table1", "--scenario=nix"], "--scenario=nix"),
    ],
)
def test_bad_tables_are_one_line(tiny, capsys, argv, words):
    """Exit code 2 and one line that names what is wrong."""
    if "--scenario=nix" in argv:
        argv = [*argv, f"--dataset={tiny}"]
    with pytest.raises(SystemExit) as stop:
        reproduce.command(["reproduce", *argv])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_bench_prints_one_json_object_last(blobs, capsys):
    """The figures of a tiny work, with the names that users script against."""
    bench.command(
        ["bench", "--work=w3", f"--dataset={blobs}", "--test_split=client_share"]
        + ["--num_clients=8", "--clients_per_round=4", "--model=mlp", "--rounds=2"]
        + ["--devices=1"]
    )
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in (
        "seconds_per_round",
        "client_updates_per_second",
        "samples_per_second",
        "padding_efficiency",
        "compile_seconds",
        "peak_memory_bytes",
        "accuracy",
    ):
        assert out[name] > 0
    assert out["padding_efficiency"] <= 1
    assert out["backend"] == "cpu"
