"""`python -m launch.bench`: figures of a round, and what they are compared with."""

import json

import pytest

from launch.bench import __main__ as bench
from launch.bench import forms, host


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
        "step_efficiency",
        "padding_efficiency",
        "compile_seconds",
        "peak_memory_bytes",
        "accuracy",
    ):
        assert out[name] > 0
    assert out["padding_efficiency"] <= out["step_efficiency"] <= 1
    assert out["backend"] == "cpu"


@pytest.mark.parametrize("of", ["--work=w3", "--call"])
@pytest.mark.parametrize("name", ["--eval_every=1", "--workdir=here", "--csv"])
def test_what_a_bench_does_not_do(capsys, of, name):
    """Files and evaluations; one line, and nothing is measured."""
    with pytest.raises(SystemExit):
        bench.command(["bench", of, name])
    line = name.partition("=")[0] + ": a bench decides when it evaluates, and keeps"
    assert line in capsys.readouterr().err


def test_bench_times_the_work_of_the_host(capsys, monkeypatch):
    """Of calls, evaluations and plans; nothing else is measured."""
    monkeypatch.setattr(host, "REPEATS", 5)
    monkeypatch.setattr(host, "COHORTS", (10,))
    monkeypatch.setattr(host, "CLIENTS_WITH_ROWS", 20)
    given = ["--num_clients=9", "--clients_per_round=9"]  # of other measurements
    bench.command(["bench", "--call", "--devices=1", *given])
    *lines, last = capsys.readouterr().out.splitlines()
    out = json.loads(last)
    assert out["algo"] == "fedavg" and len(lines) >= 2
    assert all(
        out[name] > 0 for name in ("call_ms", "advance_ms", "launch_ms", "read_ms")
    )
    assert list(out["plan_ms"]) == ["10"]
    assert min(out["rows_ms"].values()) > 0


@pytest.mark.slow
def test_bench_times_the_mixing_of_peers(blobs, capsys):
    """Of algorithms with peers alone: a part of the round."""
    argv = ["bench", "--work=w5", f"--dataset={blobs}", "--model=mlp", "--rounds=2"]
    argv += ["--test_split=client_share", "--num_clients=8", "--clients_per_round=8"]
    argv += ["--examples_per_client=20", "--devices=1"]
    bench.command([*argv, "--algo=dfedavg", "--num_peers=2"])
    shown = capsys.readouterr().out
    out = json.loads(shown.splitlines()[-1])
    assert 0 < out["mixing_seconds"]
    ratio = out["mixing_seconds"] / out["seconds_per_round"]
    assert out["mixing_over_round"] == ratio and "pulling and mixing alone" in shown
    bench.command(argv)
    assert "mixing" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("--form=fast", "--form=fast: expected one of patches, flat, direct, rule"),
        ("--clients=8,0", "--clients='8,0': expected numbers above 0, with commas"),
        ("--image=28x28", "--image='28x28': expected HEIGHTxWIDTHxCHANNELS"),
        ("--model=m0", "--model=m0: expected one of mlp"),
        ("--target=tpu:v0", "--target=tpu:v0: expected one of tpu:v4"),
        ("m1", "'m1' is not an option of this command"),
    ],
)
def test_forms_refuse_a_bad_request(given, line, capsys):
    with pytest.raises(SystemExit, match="2"):
        forms.command(["forms", given])
    assert line in capsys.readouterr().err


def test_its_own_flags_come_first(capsys):
    """The help of an algorithm's options is long."""
    with pytest.raises(SystemExit):
        bench.command(["bench", "--help"])
    first, rest = capsys.readouterr().out.split("\nOptions of --algo=fedavg")
    assert first.startswith("Options of this command:\n  --work\n")
    assert "--work\n" not in rest and "--rounds=<int>" in rest
