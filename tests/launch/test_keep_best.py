"""The models of best rounds, kept beside those of the last (`--keep_best`)."""

import numpy as np
import pytest

from fedjax_pfl import checkpoint, simulate
from launch import build, export, main
from launch.config import schema
from launch.run import summaries
from tests import conftest

pytestmark = pytest.mark.usefixtures("narrow")
GIVEN = {"algo": "fedper", "rounds": 6, "eval_every": 1, "num_seeds": 2}
GIVEN |= {"val_split": 0.5, "summary": "best_validation"}
# Validation of each seed after rounds 0 to 6: best after 2 and after 4
CURVES = [
    dict(enumerate(curve))
    for curve in (
        [0.1, 0.2, 0.6, 0.5, 0.5, 0.3, 0.6],
        [0.1, 0.2, 0.1, 0.5, 0.7, 0.3, 0.6],
    )
]


@pytest.fixture
def curves(monkeypatch):
    """Every run's validation is `CURVES`."""
    found = simulate.Simulation.evaluate

    def evaluated(self):
        results = found(self)
        for index, (values, _) in enumerate(results):
            seed = self.variants.seed(index)
            values["val_client_accuracy"] = CURVES[seed][self.round]
        return results

    monkeypatch.setattr(simulate.Simulation, "evaluate", evaluated)


def held(folder):
    """The rounds whose states a folder has as the best."""
    found = checkpoint.saved(folder / "checkpoints" / "best")
    return [checkpoint.round_of(one) for one in found]


def made(dataset, **given):
    return build.experiment(dataset=dataset, **conftest.SIX | GIVEN | given)


def test_states_of_best_rounds(curves, blobs, tmp_path, capsys):
    """Of all seeds, as runs that end there have them; also of a resumed run."""
    folder = tmp_path / "run"
    kept = {"workdir": str(folder), "keep_best": True}

    made(blobs, **kept).run(until=3, progress=False)
    assert held(folder) == [2, 3]
    run = made(blobs, **kept, resume=True)
    run.run(progress=False)
    assert held(folder) == [2, 4] and run.best_rounds() == {0: (2,), 1: (4,)}
    file, whole = tmp_path / "best.npz", made(blobs)
    for seed, (best,) in run.best_rounds().items():
        whole.run(until=best, progress=False)
        found = build.load(folder, round=best)
        assert found.metrics == run.metrics[: len(found.metrics)]
        assert found.metrics[-1]["round"] == best == found.round
        assert found.simulation.digest() == whole.simulation.digest()
        args = [str(folder), "--client=3", f"--seed={seed}", f"--output={file}"]
        export.command(["export", *args, "--best"])
        assert capsys.readouterr().out.split() == [str(file)]
        other = whole.save_model(tmp_path / "other.npz", 3, seed)
        with np.load(file) as a, np.load(other) as b:
            assert a.files == b.files and all((a[n] == b[n]).all() for n in a.files)
    with pytest.warns(UserWarning, match=r"round 6.* build.load\(..., round=4\) has"):
        build.load(folder).params(3, 1)
    # Where nothing is left to do, it is the last state again.
    assert found.run(progress=False)["rounds"] == 6 == found.round


def test_what_an_error_prevented(curves, blobs, tmp_path, monkeypatch, capsys):
    """It is saved before the run goes on; what an earlier run left out is said."""
    folder = tmp_path / "run"
    kept = {"workdir": str(folder), "num_seeds": 1}
    made(blobs, **kept).run(until=4, progress=False)  # without keep_best
    run, saved = made(blobs, **kept, keep_best=True, resume=True), checkpoint.save
    run.run(until=5, progress=False)
    assert "does not have the best round so far (2)" in capsys.readouterr().err
    assert held(folder) == []

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(CURVES[0], 6, 0.9)
    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(OSError, match="No space left"):
        run.run(progress=False)
    monkeypatch.setattr(checkpoint, "save", saved)
    run.run(progress=False)
    assert held(folder) == [6] and run.best_rounds() == {0: (6,)}
    assert build.load(folder, round=6).round == 6


def test_an_odd_end_is_no_best_round_of_a_longer_run(
    curves, blobs, tmp_path, monkeypatch
):
    """Both states are kept until the run goes on."""
    folder = tmp_path / "run"
    given = {"workdir": str(folder), "keep_best": True, "eval_every": 2, "resume": True}
    monkeypatch.setitem(CURVES[0], 3, 0.8)
    given |= {"num_seeds": 1}
    made(blobs, **given, rounds=3).run(progress=False)
    assert held(folder) == [2, 3]
    run = made(blobs, **given, rounds=4)
    run.run(progress=False)
    assert run.best_rounds() == {0: (2,)}
    assert build.load(folder, round=2).round == 2


@pytest.mark.parametrize("keeps", [False, True])
def test_a_finished_run_is_told(keeps, curves, blobs, tmp_path, capsys):
    """Its best rounds are gone, unless it has kept them."""
    given = {"dataset": blobs, "workdir": str(tmp_path / "run"), "rounds": 2}
    given = conftest.SIX | GIVEN | given
    main.execute(given | {"keep_best": keeps})
    main.execute(given | {"keep_best": True})
    line = "note: --keep_best has no effect on a finished run; choose another --workdir"
    assert (line in capsys.readouterr().out) == (not keeps)


def test_rules_that_choose(curves, blobs):
    """Other rules have no best round."""
    assert {*summaries.CHOSEN_BY} == {*schema.CHOOSE}
    with pytest.raises(ValueError, match="--summary=last chooses no round; give best"):
        made(blobs, summary="last").best_rounds()


def test_no_such_state(curves, blobs, tmp_path, capsys):
    """One line with the rounds that are there, and the cure."""
    folder = tmp_path / "run"
    made(blobs, rounds=4, workdir=str(folder), num_seeds=1).run(progress=False)
    with pytest.raises(
        ValueError, match=r"state after round 2 \(.*: 4\); run\(until=2"
    ):
        build.load(folder, round=2)
    for odd in ("4", [4], True):
        with pytest.raises(ValueError, match="expected a number of rounds"):
            build.load(folder, round=odd)
    with pytest.raises(ValueError, match="keep_best writes files; give a workdir"):
        made(blobs, keep_best=True).run(progress=False)
    with pytest.raises(ValueError, match="--keep_best=true has no effect with --summ"):
        made(blobs, keep_best=True, summary="last")
    with pytest.raises(SystemExit):
        export.command(["export", str(folder), "--best"])
    assert "no state after round 2" in capsys.readouterr().err
    made(blobs, rounds=1, workdir=str(tmp_path / "last"), summary="last").run()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        export.command(["export", str(tmp_path / "last"), "--best"])
    assert "--summary=last chooses no round" in capsys.readouterr().err
