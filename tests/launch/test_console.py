"""The final table: shares in percent, numbers as they are."""

import pytest

from launch import console


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
    lines = console.table(summary(num_seeds, numbers=["mean_layer"])).splitlines()
    heads = [line.split()[:2] for line in lines[:4:2]]
    assert heads == [["metric", "percent"], ["metric", "number"]]
    assert lines[1].removeprefix("Client (UA)").strip() == f"50.00{spread[0]}"
    assert lines[3].removeprefix("mean layer").strip() == f"3.250{spread[1]}"
    assert lines[4].split() == ["MB", "up", "2.0"]


def test_tables_of_earlier_versions():
    """They call nothing a number: everything is shown as it was."""
    lines = console.table(summary(1)).splitlines()
    assert lines[1].split() == ["mean", "layer", "325.00"]
    assert "number" not in "".join(lines)


def test_names_for_people():
    """Known ones, exits by number, any other as it is called."""
    names = ("global_accuracy", "exit12_accuracy", "exit_accuracy", "mean_layer")
    found = [console.title(name) for name in names]
    assert found == ["Global", "Exit 12", "exit accuracy", "mean layer"]
