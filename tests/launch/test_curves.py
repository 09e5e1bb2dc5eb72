"""What tables take from curves: after round 0, bytes to an accuracy, warnings."""

import numpy as np

from launch.show import curves, sheets
from launch.tables import cells, paper


def records(seed, accuracy, dropped, size=1e6):
    """A record for each round; `size` bytes a round, half of them up."""
    return [
        {
            "seed": seed,
            "round": round,
            "client_accuracy": value,
            "bytes_up": round * size / 2,
            "bytes_down": round * size / 2,
            **({"dropped": drop} if round else {}),
        }
        for round, (value, drop) in enumerate(zip(accuracy, dropped, strict=True))
    ]


TWO = records(1, [0.1, 0.5, 0.6, 0.9], [0, 1.0, 0.5, 0.0], 2e6) + records(
    0, [0.1, 0.2, 0.8, 0.7], [0, 1.0, 0.25, 0.25]
)


def test_later_leaves_round_0_out():
    """Means of what was measured after later rounds, bytes since; seeds in order."""
    assert curves.later(TWO, "dropped") == [0.25, 0.25]
    assert curves.later(TWO, "mb") == [2.0, 4.0]
    assert curves.later(TWO, "peers") is None
    gaps = [one for one in TWO if one["round"] != 2]
    assert curves.later(gaps, "dropped") is None
    assert curves.later([one for one in TWO if one["round"] < 2], "dropped") is None


def test_until_is_the_first_time():
    """Also where the accuracy falls again; nan where it never comes there."""
    assert curves.until(TWO, "client_accuracy", [0.7, 0.6]) == [2.0, 4.0]
    first, second = curves.until(TWO, "client_accuracy", [0.85, 0.9])
    assert np.isnan(first) and second == 6.0


def cell(row, found=TWO, **options):
    """A cell and what it left."""
    metrics = {"client_accuracy": {"mean": 0.8, "std": 0.1, "per_seed": [0.7, 0.9]}}
    done = {"metrics": metrics, "records": found}
    settings = {"options": {"algo": "uapdfl"} | options}
    return cells.Cell("", row, "beta=5", settings), done


TABLE = {
    "title": "T",
    "metrics": ["client_accuracy", "dropped_later", "mb_later"],
    "notes": {},
    "until": {"row": "A", "share": 0.95, "metrics": ["client_accuracy"]},
    "ablated": {"client_dropout": "dropped_later"},
}


def test_a_sheet_tells_curves():
    """Metrics after round 0 as others, and bytes to a share of a row's end."""
    never = records(0, [0.1] * 4, [0] * 4) + records(1, [0.1] * 4, [0] * 4)
    text = sheets.markdown(
        paper.sheet(TABLE, "d", [cell("A"), cell("B", never, client_dropout=False)])
    )
    assert "| | Client (UA) | Dropped after round 0 | MB after round 0 |" in text
    assert "| A | 80.0 ± 10.0 | 25.0 ± 0.0 | 3.000 ± 1.414 |" in text
    assert "MB until 95 % of A's last accuracy" in text
    # .95 x .7 after two rounds of 1 MB, .95 x .9 after three of 2.
    assert "| A | 4 ± 3 |" in text and "| B | never |" in text
    assert "warning" not in text


def test_an_ablation_that_shows_nothing_is_warned_about():
    """Where nobody drops after round 0, unless dropout was switched off."""
    none = records(0, [0.1, 0.5, 0.6], [0, 1.0, 0.0])
    sheet = paper.sheet(
        TABLE, "d", [cell("A", none), cell("B", none, client_dropout=False)]
    )
    (warning,) = [note for note in sheet.notes if note.startswith("warning")]
    assert "beta=5, A: Dropped after round 0 is 0" in warning
    assert warning in sheets.markdown(sheet)


def test_until_is_measured_by_the_last_accuracy():
    """Not by the best one."""
    falls = records(0, [0.1, 0.9, 0.4], [0] * 3) + records(1, [0.1, 0.9, 0.4], [0] * 3)
    rises = records(0, [0.1, 0.2, 0.5], [0] * 3) + records(1, [0.1, 0.2, 0.5], [0] * 3)
    text = sheets.markdown(
        paper.sheet(TABLE, "d", [cell("A", falls), cell("B", rises)])
    )
    assert "| B | 2 ± 0 |" in text
