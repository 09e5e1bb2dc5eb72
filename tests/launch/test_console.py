"""The final table: shares in percent, numbers as they are."""

import time
from types import SimpleNamespace

import pytest

from launch.run import progress
from launch.show import words


def summary(num_seeds, **more):
    """Of a run that measured a share, a number and bytes."""

    def entry(mean):
        return {"mean": mean, "std": 0.0125, "per_seed": [mean] * num_seeds}

    metrics = {"mean_layer": 3.25, "client_accuracy": 0.5, "bytes_up": 2e6}
    return {
        "metrics": {name: entry(mean) for name, mean in metrics.items()},
        "summary": "last",
        "samples_per_second": 1.0,
        "client_updates_per_second": 1.0,
        "compile_seconds": 1.0,
        "padding_efficiency": 1.0,
        "device": "cpu",
        **more,
    }


@pytest.mark.parametrize(
    "num_seeds, spread", [(1, ("", "")), (2, (" +- 1.25", " +- 0.013"))]
)
def test_numbers_are_no_percent(num_seeds, spread):
    """They stand below the shares, under a head of their own."""
    lines = words.table(summary(num_seeds, numbers=["mean_layer"])).splitlines()
    heads = [line.split()[:2] for line in lines[:4:2]]
    assert heads == [["metric", "percent"], ["metric", "number"]]
    assert lines[1].removeprefix("Client (UA)").strip() == f"50.00{spread[0]}"
    assert lines[3].removeprefix("mean layer").strip() == f"3.250{spread[1]}"
    assert lines[4].split() == ["MB", "up", "2.0"]


def test_tables_of_earlier_versions():
    """They call nothing a number: everything is shown as it was."""
    lines = words.table(summary(1)).splitlines()
    assert lines[1].split() == ["mean", "layer", "325.00"]
    assert "number" not in "".join(lines)


def test_names_for_people():
    """Known ones, exits by number, any other as it is called."""
    names = ("global_accuracy", "exit12_accuracy", "exit_accuracy", "mean_layer")
    found = [words.title(name) for name in names]
    assert found == ["Global", "Exit 12", "exit accuracy", "mean layer"]


def test_the_last_round_stands_beside_the_rule():
    """Where the summary is another number."""
    entry = {"mean": 0.75, "std": 0.0, "per_seed": [0.75]}
    more = {"summary": "mean_last10", "last_round": {"client_accuracy": entry}}
    lines = words.table(summary(1, numbers=["mean_layer"], **more)).splitlines()
    assert lines[0].endswith("percent  (mean_last10)  last round")
    assert lines[1].split() == ["Client", "(UA)", "50.00", "75.00"]
    same = words.table(summary(1, last_round={"client_accuracy": entry}))
    assert "last round" not in same


class Run:
    """What `Progress` looks at of an experiment."""

    def __init__(self, rounds):
        self.round, self.evaluation_seconds = 0, 0.0
        self.config = SimpleNamespace(rounds=rounds, algo="mine", early_stop=0)
        self.totals, self.points = SimpleNamespace(seconds=0.0), [{}]
        self.simulation = SimpleNamespace(metrics={})

    def advance(self, rounds, seconds, loss):
        self.round += rounds
        self.totals.seconds += seconds
        self.simulation.metrics = {"train_loss": ([2 * loss], [2.0])}

    def evaluations_after(self, round, until=None):
        return (until or self.config.rounds) // 5 - round // 5


def test_lines_of_progress(capsys):
    """The first round's loss at once, then what was measured."""
    run, shown = Run(10), progress.Progress(words.headline)
    shown.on_start(run)
    shown.on_call(run, [{"round": 0, "seed": 0, "global_accuracy": 0.1}])
    run.advance(1, 2.0, 1.25)
    shown.on_call(run, [])
    run.advance(1, 2.0, 1.0)
    shown.on_call(run, [])
    run.advance(8, 16.0, 0.5)
    last = {"round": 10, "seed": 0, "global_accuracy": 0.9, "train_loss": 0.5}
    shown.on_call(run, [last])
    shown.on_end(run)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  (")[0] for line in lines] == [
        "round 0/10  Global 10.0",
        "round 1/10  loss 1.250",
        "round 10/10  Global 90.0  loss 0.500",
    ]
    assert lines[1].endswith(", 18 s left)") and "left" not in lines[2]


def test_a_line_after_silence(capsys, monkeypatch):
    """Rounds of minutes between far evaluations say that they go on."""
    run, shown = Run(10), progress.Progress(words.headline)
    shown.on_start(run)
    for loss, silent in [(1.5, 60.0), (1.25, 60.0), (1.0, 0.0), (0.75, 0.0)]:
        monkeypatch.setattr(progress, "SILENT_SECONDS", silent)
        run.advance(1, 1.0, loss)
        shown.on_call(run, [])
    run.advance(1, 1.0, 0.5)
    run.simulation.metrics.clear()  # of a method that has no loss
    shown.on_call(run, [])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  (")[0] for line in lines] == [
        "round 1/10  loss 1.500",
        "round 3/10  loss 1.000",
        "round 4/10  loss 0.750",
        "round 5/10",
    ]


def test_what_several_runs_will_take():
    """By the mean of those that ran, as soon as that is half a minute."""
    assert progress.of_several(1, 3, []) == "1 of 3"
    assert progress.of_several(3, 3, [10.0, 12.0]) == "3 of 3"
    several = progress.of_several(2, 4, [80.0, 100.0])
    assert several == "2 of 4; 4 minutes left if each takes as long"


def test_what_a_long_run_will_take(capsys):
    """Once, after its first two seconds; the lines count evaluations too."""
    run, shown = Run(101), progress.Progress(words.headline)
    shown.on_start(run)
    run.evaluation_seconds += 3.0
    shown.on_call(run, [{"round": 0, "seed": 0, "global_accuracy": 0.1}])
    for rounds in (1, 4):
        run.advance(rounds, 0.6 * rounds, 1.0)
        shown.on_call(run, [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith(" loss 1.000  (0 s)")
    assert lines[2:] == [
        "about 2 minutes left: 96 rounds of 0.6 s and 19 evaluations of 3 s"
    ]


def test_what_is_left_until_a_round(capsys):
    """Of a run that stops before its last round."""
    run, shown = Run(101), progress.Progress(words.headline, until=11)
    shown.on_start(run)
    run.advance(1, 60.0, 1.0)
    shown.on_call(run, [])
    run.advance(10, 600.0, 1.0)
    shown.on_call(run, [])
    told, first, *_ = capsys.readouterr().out.splitlines()
    assert told.startswith("about 10 minutes left: 10 rounds of 60 s")
    assert first.endswith("10 minutes left)") and first.startswith("round 1/101")


@pytest.mark.parametrize("seconds, is_told", [(0.0, True), (60.0, False)])
def test_compiling_is_told_once(capsys, monkeypatch, seconds, is_told):
    """If it takes long enough for somebody to wonder."""
    monkeypatch.setattr(progress, "QUIET_SECONDS", seconds)
    run, shown = Run(3), progress.Progress(words.headline)
    shown.on_start(run)
    for _ in range(2):
        with shown.on_compile(run):
            time.sleep(0.7)
    told = "compiling mine (or reading what is compiled already) ...\n"
    assert capsys.readouterr().out == told * is_told


def test_a_bar_has_a_clock(monkeypatch):
    """While something is compiled; afterwards its own estimate begins anew."""
    calls = []

    class Bar:
        n = 0

        def __init__(self, **given):
            calls.append(("made", given["total"], given["initial"]))

        def __getattr__(self, name):
            return lambda *given: calls.append((name, *given))

    monkeypatch.setattr(progress, "_bar_kind", lambda: Bar)
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.0)
    run, shown = Run(3), progress.Progress(words.headline)
    shown.on_start(run)
    with shown.on_compile(run):
        time.sleep(0.7)
    run.advance(1, 1.0, 0.5)
    shown.on_call(run, [])
    run.advance(1, 1.0, 0.25)
    shown.on_call(run, [])  # it moves, and keeps the numbers that it shows
    shown.on_end(run)
    names = [call[0] for call in calls]
    assert names == [
        "made",
        "set_description_str",
        "set_description_str",
        "unpause",
        "update",
        "set_postfix",
        "update",
        "close",
    ]
    assert calls[1][1].startswith("compiling mine (or reading") and calls[2][1] == ""
    assert calls[4][1:] == (1,) and calls[5][1] == {"loss": "0.500"}
