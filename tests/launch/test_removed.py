"""Options of earlier versions: folders with them go on, and a user's are refused."""

import pytest

from launch import build, experiment
from launch.config import flagfile, flags

WHY = "lanes were removed"


@pytest.fixture
def options(unequal, tmp_path):
    """Options of a small run with a folder."""
    return {
        **{"algo": "fedavg", "dataset": unequal, "model": "mlp", "rounds": 1},
        **{"clients_per_round": 2, "workdir": str(tmp_path / "run")},
    }


@pytest.mark.parametrize(("lanes", "has_note"), [("8", True), ("auto", True), ("0", 0)])
def test_a_folder_with_lanes_goes_on(lanes, has_note, options, tmp_path, capsys):
    """It is opened, resumed and replayed, with a note where they had an effect."""
    build.experiment(**options).run(progress=False)
    path = tmp_path / "run" / flagfile.RUN_FLAGS
    path.write_text(path.read_text() + f"--lanes={lanes}\n")
    given = {"dataset": options["dataset"]}
    assert experiment.load(path.parent, **given).round == 1
    assert (WHY in capsys.readouterr().err) == has_note
    replayed = flagfile.expand(["x", f"--flagfile={path}"])
    assert not [flag for flag in replayed if "lanes" in flag]
    assert (WHY in capsys.readouterr().err) == has_note
    again = build.experiment(**options | {"rounds": 2, "resume": True})
    assert again.run(progress=False)["rounds"] == 2


@pytest.mark.parametrize(
    ("saved", "chunk"), [([2, 0], 2), ([1, 8], 4), (None, 4)], ids=str
)
def test_checkpoints_with_lanes_are_loaded(saved, chunk, options, monkeypatch):
    """A chunk that was saved beside no lanes goes on."""
    monkeypatch.setattr("data.deal.choose_chunk", lambda *_, **__: (4, 1.0))
    options |= {"emulate": "accelerator", "workdir": "", "clients_per_round": 4}
    options |= {"devices": 1}
    before, after = (build.experiment(**options) for _ in range(2))
    before.start()
    arrays, host = before.saved()
    del host["client_chunk"]
    host |= {"side_by_side": saved} if saved else {}
    after.load(0, arrays, host, [])
    assert after.task.execution.chunk == chunk


def test_lanes_are_refused(options):
    """One line says that they were removed."""
    with pytest.raises(ValueError, match=f"^--lanes .*{WHY}"):
        build.experiment(**options, lanes=2)
    with pytest.raises(flagfile.UsageError, match=f"^--lanes .*{WHY}"):
        flags.parse(["x", "--algo=fedavg", "--lanes=2"])
