"""Studies: cells run once and are kept, loops are the rounds, bad input is a line."""

import fcntl
import json
import signal
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest

from launch import report
from launch.study import __main__ as command
from launch.tables import cells, child, examples, kinds, loops, results, store
from launch.tables import study as study_lib

OPTIONS = {
    "algo": "fedavg",
    "preset": "none",
    "partition": "natural",
    "test_split": "pool",
    "model": "mlp",
    "batch_size": 4,
    "local_epochs": 2,
    "client_optimizer": "sgd",
    "client_lr": 0.05,
    "num_clients": 12,
    "clients_per_round": 4,
    "devices": 1,
}
SETTINGS = {
    "how": "rounds",
    "rounds": 1,
    "repeats": 2,
    "options": OPTIONS,
    "data": {"examples": 6, "sigma": 0.5},
}
SHEET = {
    "title": "Cohorts",
    "axis": "clients a round",
    "scale": "log",
    "about": "Few.",
    "values": {"4": {}, "8": {"options": {"clients_per_round": 8}}},
    "rows": {"FedAvg": {"estimated": True}},
    "columns": ["seconds_per_round", "temporary_bytes", "estimate.over_one_by_one"],
    "panels": ["seconds_per_round"],
}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A study of one sheet with two cells."""
    common = SETTINGS | {"seconds": 5}
    study = {"title": "Toy", "notes": [], "common": common, "sheets": {"few": SHEET}}
    (tmp_path / "toy.json").write_text(json.dumps(study))
    monkeypatch.setattr(cells, "STUDIES", tmp_path)
    monkeypatch.setitem(study_lib.NEEDS, "estimate", ("no_such_package", "get it"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "study" / "toy"


@pytest.fixture
def made(monkeypatch):
    """The settings of the cells that ran; cells are not measured."""
    ran = []

    def start(module, settings, given, is_leader):
        ran.append(settings)
        return settings

    def ended(settings):
        machine = {"cpu": "a CPU", "cores": 2, "device": "cpu", "devices": 1}
        figures = {"seconds_per_round": 0.25, "temporary_bytes": 3_000_000}
        return {"figures": figures, "versions": {"jax": "1"}, "machine": machine}

    monkeypatch.setattr(child, "start", start)
    monkeypatch.setattr(child, "ended", ended)
    monkeypatch.setattr(child, "stop", lambda settings: None)
    return ran


def test_interrupted_and_resumed(toy, made, monkeypatch, capsys):
    """Ctrl-C keeps what is finished, the same command runs only what is left."""
    ended = child.ended

    def interrupted(settings):
        # In the first cell, and after a new start in the second
        if len(made) in (1, 3):
            raise KeyboardInterrupt
        return ended(settings)

    with monkeypatch.context() as patch:
        patch.setattr(child, "ended", interrupted)
        for _ in range(2):
            capsys.readouterr()
            with pytest.raises(SystemExit) as stop:
                command.command(["study", "toy"])
            assert stop.value.code == 130
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "the same command continues" in shown.err
    assert "toy: 2 of 4 cells are to run" in shown.out and "get it" in shown.out
    assert [path.name for path in toy.glob("few/*")] == ["fedavg.4.json"]
    command.command(["study", "toy", "--dry_run"])
    assert "toy: 1 of 4 cells are to run" in capsys.readouterr().out

    command.command(["study", "toy", "--report"])
    assert [settings["options"]["clients_per_round"] for settings in made] == [
        4,
        4,
        8,
        8,
    ]
    shown = capsys.readouterr().out
    assert "| 8 | 250.0 | 3.00 | get it |" in shown
    assert (toy / "few.png").read_bytes()[1:4] == b"PNG"
    page = (toy / "report.html").read_text()
    assert "<svg" in page and "a CPU, 2 cores" in page and "2 of 2 cells" in page
    assert "<td>250.0</td>" in page and "&lt;" not in page
    command.command(["study", "toy"])
    assert len(made) == 4

    report.command(["report", str(toy), "--output=page.html", "--title=T"])
    assert "<h1>T</h1>" in (toy.parents[2] / "page.html").read_text()


def test_other_settings_run_again(toy, made):
    """A cell counts only under the settings that made it; equal cells run once."""
    command.command(["study", "toy"])
    path = toy.parents[2] / "toy.json"
    study = json.loads(path.read_text())
    study["sheets"]["few"]["cells"] = {"FedAvg at 8": {"options": {"num_clients": 16}}}
    study["sheets"]["again"] = SHEET
    path.write_text(json.dumps(study))
    command.command(["study", "toy"])
    assert [one["options"]["num_clients"] for one in made] == [12, 12, 16, 12]
    assert len(list(toy.glob("*/*.json"))) == 4
    # A page of a folder needs no name.
    found = study_lib.Study("", toy)
    assert found.name == "toy" and not found.left()


def test_equal_cells_of_other_sheets_cost_nothing(toy, made, capsys):
    """With a part alone, too, and among the minutes that are said first."""
    path = toy.parents[2] / "toy.json"
    study = json.loads(path.read_text())
    study["common"]["seconds"] = 120
    study["sheets"]["again"] = SHEET
    path.write_text(json.dumps(study))
    command.command(["study", "toy", "--dry_run"])
    shown = capsys.readouterr().out
    assert "4 of 8 cells are to run, about 4 minutes" in shown
    command.command(["study", "toy", "--part=few"])
    capsys.readouterr()
    command.command(["study", "toy", "--part=again", "--dry_run"])
    shown = capsys.readouterr().out
    assert shown.count("as another cell") == 2 and "about 0 minutes" in shown
    (toy / "few" / "fedavg.4.json").write_text("{")
    command.command(["study", "toy", "--part=again"])
    assert len(made) == 3 and len(list(toy.glob("again/*.json"))) == 2


def test_a_failed_cell_is_a_line(toy, made, monkeypatch, capsys):
    """The others run, and the code is 1."""

    def failed(settings):
        raise child.Failed("out of memory")

    monkeypatch.setattr(child, "ended", failed)
    with pytest.raises(SystemExit) as stop:
        command.command(["study", "toy", "--report"])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.count("failed: out of memory") == 2 and error.count("\n") == 3


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "give one study, toy, typo, or --table=FILE"),
        (["tof"], "no study tof: expected one of toy"),
        (["toy", "--part=nix"], "--part=nix: expected one of few"),
        (["toy", "--folder=full"], "--folder=full holds something else than a study"),
        (["toy", "--folder=other"], "--folder=other holds the study scaling, not toy"),
        (["toy", "--folder=broken"], "fedavg.4.json is damaged: it is not JSON"),
        (["toy", "--folder=partly"], "fedavg.4.json is damaged: it has no figures"),
        (["toy", "--target=tpu:v9"], "--target"),
        (["--table=it.json", "--part=few"], "--part=few does not go with --table="),
        (["typo"], "few: FedAvg at 4: --num_clintes is not a flag"),
    ],
)
def test_bad_input_is_one_line(toy, argv, words, tmp_path, capsys):
    """Exit code 2 and one line that names what is wrong."""
    text = (tmp_path / "toy.json").read_text()
    wrong = text.replace('"num_clients"', '"num_clintes"')
    (tmp_path / "typo.json").write_text(wrong)
    for name, text in (("broken", "{"), ("partly", '{"settings": {}}')):
        (tmp_path / name / "few").mkdir(parents=True)
        (tmp_path / name / store.STUDY).write_text('{"study": "toy"}')
        (tmp_path / name / "few" / "fedavg.4.json").write_text(text)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / store.STUDY).write_text('{"study": "scaling"}')
    with pytest.raises(SystemExit) as stop:
        command.command(["study", *argv])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_child_s_last_line_is_its_error():
    """A process that is refused gives our line, and one that works its result."""
    wrong = SETTINGS | {"options": OPTIONS | {"batch_size": -1}}
    with pytest.raises(child.Failed, match="--batch_size=-1"):
        child.ended(child.start("launch.tables.kinds", wrong))


PARENT = """
import signal
import sys
from launch.tables import child
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's children ignore it
one = child.start("tests.toys.waits", {"path": sys.argv[1]}, is_leader=True)
child.ended(one)
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_cell_ends_with_the_study(tmp_path, sign):
    """Also where the process that started it cannot stop it."""
    path = tmp_path / "lock"
    path.touch()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(path)])

    def wait_until(is_so):
        end = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.02)

    def is_free():
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    wait_until(path.read_text)
    assert not is_free()
    parent.send_signal(sign)
    parent.wait()
    wait_until(is_free)


def test_rounds_are_measured():
    """The figures that the tables show."""
    found = kinds.rounds(SETTINGS)
    assert found["fastest"] <= found["seconds_per_round"] <= found["slowest"]
    assert found["client_updates_per_second"] == 4 / found["seconds_per_round"]
    assert 0 < found["padding_efficiency"] <= found["step_efficiency"] <= 1
    # 16 x 128, 128 x 64 and 64 x 4 weights with their biases, and a little more
    assert 42_768 <= found["state_bytes_per_device"] < 43_000
    assert found["temporary_bytes"] > 0 and found["argument_bytes"] > 0


@pytest.mark.parametrize("how", loops.LOOPS)
def test_a_loop_is_the_rounds(how):
    """The same parameters of every seed and point, to rounding."""
    if how == "torch":
        pytest.importorskip("torch")
    options = {"num_seeds": 2, "sweep": "client_lr=0.1,0.02", "client_chunk": 1}
    settings = SETTINGS | {"options": OPTIONS | options}
    rounds = kinds.drawn(settings, 2)
    rounds.simulation.advance_to(2)
    made = loops.LOOPS[how](kinds.drawn(settings, 2))
    made.prepare(0, 2)
    made.run(0, 2)
    params = made.params()
    for index, one in enumerate(params):
        expected = jax.tree.map(lambda leaf, i=index: leaf[i], rounds.state.server)
        chex.assert_trees_all_close(one, expected.params, rtol=0, atol=1e-6)
    first, *others = (np.asarray(one[0]["trunk"]["kernel"]) for one in params)
    assert all(np.abs(first - other).max() > 1e-4 for other in others)


def test_a_loop_trains_on_the_clients_own_rows():
    """Whichever of two devices computes a client in the rounds."""
    experiment = kinds.drawn(SETTINGS | {"options": OPTIONS | {"devices": 2}}, 2)
    owned = experiment.data.partition.train
    for (seed, round), clients in loops.planned(experiment, 0, 2).items():
        drawn = experiment.planner.cohort(seed, round)
        ids = drawn.client_id[drawn.row_mask]
        assert len(ids) == len(clients) > 1
        for client, one in zip(ids, clients, strict=True):
            first = owned.start[seed, client]
            mine = owned.row[seed, first : first + owned.count[seed, client]]
            rows = np.sort(one.rows[one.rows >= 0])
            epochs = len(rows) // len(mine)
            np.testing.assert_array_equal(rows, np.sort(np.tile(mine, epochs)))


def test_a_loop_refuses_what_it_does_not_do():
    """One line that names the options."""
    settings = SETTINGS | {"options": OPTIONS | {"client_momentum": 0.9}}
    with pytest.raises(ValueError, match="--client_momentum=0.9"):
        loops.in_jax(kinds.drawn(settings, 2))


def test_collectives_are_counted():
    """From the text of a program: pairs count once, with all that they return."""
    text = """
      %a = f32[8,16]{1,0} all-gather(%x), channel_id=1
      %b = (f32[4]{0}, pred[3]{0}) all-gather-start(%y, %z), channel_id=2
      %c = (f32[4]{0}, pred[3]{0}) all-gather-done(%b)
      ROOT %d = bf16[] all-reduce(%w), to_apply=%sum
      %f = (s32[2]{0}, s32[2]{0}) all-to-all(%u, %v), channel_id=3
      %e = f32[9]{0} fusion(%all-gather), kind=kLoop
    """
    assert kinds.collectives(text) == {
        "all_gathers": 2,
        "all_reduces": 1,
        "collective_bytes": 4 * 128 + 16 + 3 + 2 + 16,
    }


def test_drawn_sizes():
    """Equal clients have what is asked for; unequal ones have it on average."""
    x, _, client = examples.draw(50, 10)
    assert x.dtype == np.float32 and set(np.bincount(client)) == {13}
    sizes = np.bincount(examples.draw(4000, 50, sigma=1.0)[2]) * 0.8
    assert 45 < sizes.mean() < 56 and sizes.max() > 10 * np.median(sizes)


def test_every_cell_of_every_study_is_a_configuration():
    """The shipped studies name options, figures and sheets that exist."""
    for name, study in cells.studies().items():
        sheets = study["sheets"].values()
        found = [one for sheet in sheets for one in cells.cells(sheet)]
        assert len({one.name for one in found}) == len(found)
        for one in found:
            assert one.how not in ("rounds", "loop", "torch") or one.seconds > 0, one
        for sheet in sheets:
            assert set(sheet["columns"] + sheet["panels"]) <= set(results.FIGURES), name
            rows, values = sheet["rows"], sheet["values"]
            assert all(set(row.get("only", ())) <= set(values) for row in rows.values())
            places = {f"{row} at {value}" for row in rows for value in values}
            assert sheet.get("cells", {}).keys() <= places


def test_a_cell_beyond_its_row(toy, tmp_path):
    """A row may have some values only, and one cell more with options of its own."""
    path = tmp_path / "toy.json"
    study = json.loads(path.read_text())
    sheet = study["sheets"]["few"]
    sheet["rows"]["FedAvg"]["only"] = ["4"]
    path.write_text(json.dumps(study))

    def found():
        return cells.cells(cells.studies()["toy"]["sheets"]["few"])

    assert [one.value for one in found()] == ["4"]
    sheet["cells"] = {"FedAvg at 8": {"options": {"client_chunk": 2}}}
    path.write_text(json.dumps(study))
    first, second = found()
    assert second.settings["options"]["client_chunk"] == 2
    assert "client_chunk" not in first.settings["options"]


def test_a_diverged_run_has_no_accuracy():
    """Neither a text nor a point of a picture; what it took is known."""
    accuracy = {"mean": 0.1, "std": 0.0, "per_seed": [0.1]}
    figures = {"client_accuracy": accuracy, "diverged": 7, "minutes": 2.0}
    found = results.Result(None, {"figures": figures})
    assert found.text("client_accuracy") == "diverged in round 7"
    assert found.number("client_accuracy") is None and found.text("minutes") == "2.0"
    whole = results.Result(None, {"figures": figures | {"diverged": None}})
    assert whole.text("client_accuracy") == "10.0"


def test_an_estimate_leaves_the_chip_alone(toy, monkeypatch):
    """It is asked on the CPU, where a measured cell takes the chip that is here."""
    given = []
    monkeypatch.setattr(
        child, "start", lambda *start, is_leader: given.append(start[2])
    )
    monkeypatch.setattr(child, "ended", lambda one: {})
    study = study_lib.Study("toy")
    for cell in study.wanted[:2]:
        study.made(cell)
    assert given == [None, {"JAX_PLATFORMS": "cpu"}]


def test_a_loop_counts_the_clients_of_all_seeds():
    """As the rounds beside it do."""
    options = OPTIONS | {"num_seeds": 2, "client_chunk": 1}
    found = kinds.loop(SETTINGS | {"how": "loop", "options": options})
    assert found["client_updates_per_second"] == pytest.approx(
        2 * 4 / found["seconds_per_round"]
    )
