"""Tables: missing cells run, finished ones stay, Markdown has paper | ours | gap."""

import json
import pathlib
import signal

import numpy as np
import pytest

import models
from fedjax_pfl import boundary
from launch import main, reproduce
from launch.config import flags, registry, resolve
from launch.papers import tables
from launch.run import progress
from launch.show import sheets, words


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
    monkeypatch.setattr(tables, "PAPERS", tmp_path)
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


def test_checkpoints_of_finished_cells_are_dropped(tiny, tmp_path, capsys):
    """The numbers stay, and a second command runs nothing."""
    argv = ["reproduce", "tiny.table1", f"--dataset={tiny}", "--scenario=fixed"]
    argv += ["--workdir=out", "--drop_checkpoints"]
    reproduce.command(argv)
    first = capsys.readouterr().out
    assert len(sorted(tmp_path.glob("out/**/summary.json"))) == 2
    assert not sorted(tmp_path.glob("out/**/checkpoints"))
    reproduce.command(argv)
    second = capsys.readouterr().out
    assert "2 rounds, 1 seed(s)" in first and "2 rounds, 1 seed(s)" not in second
    table = first[first.rindex("| Local") :]
    assert second.endswith(table)


@pytest.fixture
def sweep(tmp_path, monkeypatch, blobs):
    """A table of one metric: columns are values of alpha, one paper number with std."""
    table = {
        "title": "Sweep",
        "metrics": ["client_accuracy"],
        "columns": "percent",
        "any_dataset": True,
        "common": {"rounds": 2, "model": "mlp", "num_clients": 4, "devices": 1},
        "scenarios": {
            "alpha=0.5": {"partition_alpha": 0.5},
            "alpha=1": {"partition_alpha": 1.0},
        },
        "rows": {"Majority": {"algo": "majority"}, "FedAvg": {"algo": "fedavg"}},
        "datasets": {blobs: {"alpha=1": {"FedAvg": {"paper": [[30.0, 1.5]]}}}},
        "notes": {},
    }
    (tmp_path / "swept.json").write_text(json.dumps({"fig1": table}))
    monkeypatch.setattr(tables, "PAPERS", tmp_path)
    monkeypatch.chdir(tmp_path)
    return blobs


def test_one_metric_has_scenarios_as_columns(sweep, tmp_path, capsys):
    """Rows by columns; a paper's standard deviation is shown; gaps stay empty."""
    argv = ["reproduce", "swept.fig1", f"--dataset={sweep}", "--dry_run"]
    reproduce.command(argv)
    shown = capsys.readouterr().out
    assert "| | alpha=0.5 | alpha=1 |" in shown
    assert "| FedAvg | missing | 30.00 ± 1.50 / missing |" in shown


def test_differences_are_paired_by_seed(sweep, tmp_path, capsys):
    """The seeds' own differences to a control, not the difference of the spreads."""
    path = tmp_path / "swept.json"
    table = json.loads(path.read_text())
    table["fig1"]["controls"] = ["FedAvg", "Local"]
    path.write_text(json.dumps(table))
    argv = ["reproduce", "swept.fig1", f"--dataset={sweep}", "--workdir=out"]
    argv += ["--scenario=alpha=1", "--num_seeds=3", "--rounds=1"]
    for row in table["fig1"]["rows"]:
        reproduce.command([*argv, f"--row={row}"])
        assert "Minus" not in capsys.readouterr().out  # nothing to compare
    reproduce.command(argv)
    shown = capsys.readouterr().out
    first, second = (
        np.array(
            json.loads(found.read_text())["metrics"]["client_accuracy"]["per_seed"]
        )
        for found in sorted(tmp_path.glob("out/**/summary.json"))
    )
    gap = 100 * (second - first)
    assert gap.std() > 0
    line = f"| Majority | {gap.mean():+.1f} ± {gap.std(ddof=1):.1f} |"
    assert (
        f"Minus FedAvg, points, paired by seed\n\n| | alpha=1 |\n|---|---|\n{line}"
        in (shown)
    )
    assert "Minus Local" not in shown


def test_numbers_are_no_percent(sweep):
    """What a summary calls a number is shown as it is, with its difference."""

    def done(mean, std):
        return {"mean": mean, "std": std, "per_seed": [mean, mean]}

    cell = sheets.Cell("alpha=1", "FedAvg", {}, [0.61, 30.0])
    table = tables.load_table("swept.fig1") | {"metrics": ["divergence_0_1", "dropped"]}
    summary = {
        "metrics": {"divergence_0_1": done(0.5873, 0.02), "dropped": done(0.25, 0.1)},
        "numbers": ["divergence_0_1"],
    }
    text = sheets.markdown(sheets.sheet(table, sweep, [(cell, summary)]))
    assert "0.61 / 0.587 ± 0.020 / -0.023 |" in text
    assert "30.00 / 25.0 ± 10.0 / -5.0 |" in text
    # Runs of earlier versions call nothing a number.
    del summary["numbers"]
    old = sheets.markdown(sheets.sheet(table, sweep, [(cell, summary)]))
    assert "0.61 / 58.7 ± 2.0 / +58.1 |" in old


def test_given_options_hold_in_every_cell(sweep, tmp_path, capsys):
    """A column's own flag picks the column; others go to every cell that has them."""
    argv = ["reproduce", "swept.fig1", f"--dataset={sweep}", "--workdir=out"]
    argv += ["--partition_alpha=1", "--client_lr=0.3", "--rounds=1", "--num_seeds=2"]
    reproduce.command(argv)
    shown = capsys.readouterr().out
    assert "alpha=0.5" not in shown and "--client_lr=0.3" in shown
    told = {
        path.parent.name: path.read_text() for path in tmp_path.glob("out/**/*.flags")
    }
    assert sorted(told) == ["alpha1-fedavg-seed0-1", "alpha1-majority-seed0-1"]
    for text in told.values():
        assert "--partition_alpha=1.0" in text and "--rounds=1\n" in text
    assert "--client_lr=0.3" in told["alpha1-fedavg-seed0-1"]


def test_rows_can_be_chosen(sweep, capsys):
    """--row and --scenario take names."""
    argv = ["reproduce", "swept.fig1", f"--dataset={sweep}", "--dry_run"]
    reproduce.command([*argv, "--row=FedAvg", "--scenario=alpha=0.5"])
    shown = capsys.readouterr().out
    assert "| FedAvg | missing |" in shown and "Majority" not in shown


@pytest.fixture
def taught(tmp_path, monkeypatch, blobs):
    """A table whose row `Taught` names another one as its teacher."""
    table = {
        "title": "Taught",
        "metrics": ["global_accuracy"],
        "columns": "percent",
        "any_dataset": True,
        "common": {"rounds": 2, "model": "mlp", "num_clients": 2, "devices": 1},
        "scenarios": {"half": {"train_share": 0.5}, "all": {"train_share": 1.0}},
        "rows": {
            "Base": {"algo": "fedavg"},
            "Taught": {"algo": "distill", "teacher": "Large"},
            "Large": {"algo": "fedavg", "model_width": 2.0, "only": ["all"]},
        },
        "datasets": {},
        "notes": {},
    }
    (tmp_path / "taught.json").write_text(json.dumps({"table": table}))
    monkeypatch.setattr(tables, "PAPERS", tmp_path)
    monkeypatch.chdir(tmp_path)
    return ["reproduce", "taught.table", f"--dataset={blobs}", "--workdir=out"]


def test_a_teacher_s_row_runs_first(taught, tmp_path, capsys):
    """Also one that was not asked for, once, with its own options; nothing twice."""
    argv = [*taught, "--row=Taught", "--model_width=0.5"]
    reproduce.command(argv)
    shown = capsys.readouterr().out
    begun = [line for line in shown.splitlines() if " -> out/" in line]
    cells = [line.partition(" -> ")[0] for line in begun if "on npz" not in line]
    assert cells == ["all, Large", "half, Taught", "all, Taught"]
    assert "| Large | - | " in shown and "missing" not in shown.rpartition("###")[2]
    folders = {path.parent.name: path for path in tmp_path.glob("out/**/run.flags")}
    large = folders["all-large-seed0-0"]
    assert "--model_width=2.0" in large.read_text()
    file = large.parent / "model.msgpack"
    written = file.stat().st_mtime_ns
    for name in ("half", "all"):
        path = folders[f"{name}-taught-seed0-0"]
        text = path.read_text()
        assert "--model_width=0.5" in text
        assert f"--teacher={file.relative_to(tmp_path)}" in text
    for more in ([], ["--dry_run"]):
        reproduce.command([*argv, *more])
        shown = capsys.readouterr().out
        assert "1 seed(s) ->" not in shown
        assert "missing" not in shown.rpartition("###")[2]
    assert file.stat().st_mtime_ns == written


def test_a_teacher_is_made_again(taught, tmp_path, capsys):
    """Its cell is kept in a file, its run is not, and a row that it teaches is new."""
    argv = [*taught, "--cells=cells.json", "--scenario=half"]
    reproduce.command([*argv, "--row=Large", "--scenario=all"])
    (path,) = tmp_path.glob("out/**/summary.json")
    expected = json.loads(path.read_text())["parameters_sha256"]
    for file in sorted(path.parent.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    reproduce.command([*argv, "--row=Taught"])
    assert json.loads(path.read_text())["parameters_sha256"] == expected
    kept = json.loads((tmp_path / "cells.json").read_text())
    assert kept["half-taught-seed0-0"]["options"]["teacher"] == "Large"


def test_a_row_that_a_column_does_not_have(taught, capsys):
    """It is left out of the column; alone it is refused."""
    reproduce.command([*taught, "--dry_run"])
    assert "| Large | - | missing |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        reproduce.command([*taught, "--row=Large", "--scenario=half"])
    line = "--row=Large has the scenarios all only, and not half"
    assert line in capsys.readouterr().err


def entry(*per_seed):
    """A summary's entry of one metric."""
    std = float(np.std(per_seed, ddof=1)) if len(per_seed) > 1 else 0.0
    return {"mean": float(np.mean(per_seed)), "std": std, "per_seed": list(per_seed)}


def shown(table, runs):
    """The Markdown of runs: (column, row) -> summary."""
    defaults = {"title": "T", "notes": {}, "datasets": {}}
    cells = [(sheets.Cell(*names, {}, None), done) for names, done in runs.items()]
    return sheets.markdown(sheets.sheet(defaults | table, "blobs", cells))


def test_differences_of_numbers_are_no_points():
    """Values and paired differences of a metric that is a number, as they are."""
    runs = {
        ("one", row): {
            "metrics": {"divergence_0_1": entry(*values)},
            "numbers": ["divergence_0_1"],
        }
        for row, values in {"A": (0.25, 0.5), "B": (0.125, 0.125)}.items()
    }
    table = {"metrics": ["divergence_0_1"], "columns": "nats", "controls": ["B"]}
    text = shown(table, runs)
    assert "divergence 0 1, nats, 2 seed(s)" in text
    assert "| A | 0.375 ± 0.177 |" in text
    assert "Minus B, paired by seed\n\n| | one |\n|---|---|\n| A | +0.250" in text


def test_traffic_by_kind_of_message():
    """MB of each kind and in all; `-` where a row has no such message."""

    def done(**kinds):
        return {
            "metrics": {"client_accuracy": entry(0.5, 0.5)},
            "traffic": {
                kind: {
                    "direction": "down",
                    "messages": entry(1),
                    "bytes": entry(*sizes),
                }
                for kind, sizes in kinds.items()
            },
        }

    runs = {
        ("one", "Local"): done(),
        ("one", "FedPer"): done(extractor=(2e6, 2e6)),
        ("one", "UA-PDFL"): done(extractor=(1e6, 2e6), mask=(3e9, 3e9)),
        ("one", "late"): None,
        ("two", "Local"): done(),
    }
    text = shown({"metrics": ["client_accuracy"], "traffic": True}, runs)
    first, second = text.split("MB by kind of message")[1:]
    assert "| | total | extractor | mask |" in first
    for line in (
        "| Local | 0.000 | - | - |",
        "| FedPer | 2.000 | 2.000 | - |",
        "| UA-PDFL | 3,001.500 | 1.500 | 3,000.000 |",
        "| late | missing | missing | missing |",
    ):
        assert line in first
    assert "| Local | 0.000 |" in second
    assert "MB" not in shown({"metrics": ["client_accuracy"]}, runs)


def test_every_cell_of_every_table_is_a_configuration():
    """Rows, columns and data sets of the shipped tables name options that exist."""
    for name, table in tables.tables().items():
        for dataset in [*table["datasets"], table.get("dataset", "fashion_mnist")]:
            for cell in tables.cells(table, dataset):
                known = registry.fields_of(cell.options["algo"])
                ignored = {k for k in cell.options if k not in known}
                # What a row does not know is an option of other rows of its table.
                rows = table["rows"].values()
                others = set().union(*(registry.fields_of(row["algo"]) for row in rows))
                assert ignored <= others, name
                _, hparams = resolve.configure(
                    {k: v for k, v in cell.options.items() if k in known}
                )
                if isinstance(hparams, boundary.LayerDropping):
                    boundary.schedule(hparams, models.make("m1", 10), (28, 28, 1))


def test_every_row_can_be_chosen():
    """No row or column has a comma in its name, and paths hold plain letters."""
    for table in tables.tables().values():
        dataset = next(iter(table["datasets"]), "cifar10")
        for name in table["rows"]:
            cells = tables.cells(table, dataset, row=name)
            teachers = {cell.teacher[1] for cell in cells if cell.teacher}
            assert {cell.row for cell in cells} - teachers == {name}
            assert not set(tables.slug(name)) & set(",*() %")
        assert len({tables.slug(name) for name in table["rows"]}) == len(table["rows"])
        for name in table["scenarios"]:
            assert tables.cells(table, dataset, scenario=name)


def test_uapdfl_s_five_peers_are_its_first_tables():
    """The paper's Tables 3 and 4 repeat Tables 1 and 2 where there are five peers."""
    known = tables.tables()
    for swept, first in (("table3", "table1"), ("table4", "table2")):
        swept, first = known[f"uapdfl.{swept}"], known[f"uapdfl.{first}"]
        for dataset, columns in first["datasets"].items():
            assert swept["datasets"][dataset]["peers=5"] == {
                model: rows["UA-PDFL"] for model, rows in columns.items()
            }


def test_uapdfl_s_flagfile_is_a_cell():
    """The flagfile on Fashion-MNIST replays a cell of the table for CPUs."""
    path = pathlib.Path(main.__file__).parent / "flagfiles/uapdfl.fashion_mnist.flags"
    table = tables.load_table("uapdfl.small")
    (cell,) = tables.cells(table, "fashion_mnist", "beta=0.5", "UA-PDFL")
    assert flags.parse(["main", f"--flagfile={path}"]) == cell.options


def test_given_values_pick_rows_and_columns():
    """A row or a column that stands for another value is left out."""
    table = tables.load_table("fedd2s.fig7")
    cells = tables.cells(table, "cifar100", given={"partition_alpha": 0.5})
    assert {cell.row for cell in cells} == {"alpha=0.5"}
    table = tables.load_table("fedd2s.fig6")
    rows = {cell.row for cell in tables.cells(table, "cifar10", given={"min_layer": 3})}
    assert rows == {"L3", "layer 3 for ever"}
    with pytest.raises(ValueError, match="--head_epochs=1: no row has this option"):
        tables.cells(table, "cifar10", given={"head_epochs": 1})


def test_dry_run_hides_runs_of_other_settings(sweep, tmp_path, capsys):
    """A stored cell is shown only under the options that made it."""
    argv = ["reproduce", "swept.fig1", f"--dataset={sweep}", "--workdir=out"]
    argv += ["--row=Majority", "--scenario=alpha=1"]
    reproduce.command([*argv, "--rounds=1"])
    capsys.readouterr()
    reproduce.command([*argv, "--rounds=1", "--dry_run"])
    assert "missing" not in capsys.readouterr().out
    reproduce.command([*argv, "--rounds=3", "--dry_run"])
    assert "missing" in capsys.readouterr().out


def test_dry_run_hides_runs_of_other_presets(sweep, tmp_path, capsys, monkeypatch):
    """Also where the cell names no option: what it means by default has changed."""
    argv = ["reproduce", "swept.fig1", f"--dataset={sweep}", "--workdir=out"]
    argv += ["--row=FedAvg", "--scenario=alpha=1", "--rounds=1"]
    reproduce.command(argv)
    (path,) = tmp_path.glob("out/**/run.flags")
    text = path.read_text()
    reproduce.command([*argv, "--dry_run"])
    assert "missing" not in capsys.readouterr().out
    for changed in (
        text.replace("--local_epochs=2", "--local_epochs=7"),
        text + "--gone=1\n",
    ):
        assert changed != text
        path.write_text(changed)
        reproduce.command([*argv, "--dry_run"])
        assert "missing" in capsys.readouterr().out


def test_dry_run_names_a_damaged_cell(sweep, tmp_path, capsys):
    """It counts as missing; the next run writes it again."""
    argv = ["reproduce", "swept.fig1", f"--dataset={sweep}", "--workdir=out"]
    argv += ["--row=Majority", "--scenario=alpha=1", "--rounds=1"]
    reproduce.command(argv)
    (path,) = tmp_path.glob("out/**/summary.json")
    path.write_text("{}")
    capsys.readouterr()
    reproduce.command([*argv, "--dry_run"])
    shown = capsys.readouterr()
    assert "| Majority | missing |" in shown.out
    assert shown.err.startswith("note: ") and "summary.json is damaged" in shown.err
    reproduce.command(argv)
    assert "missing" not in capsys.readouterr().out


def test_cells_have_the_clients(sweep, tmp_path, capsys):
    """Each client's accuracy by seed, from which a table counts them."""
    path = tmp_path / "swept.json"
    table = json.loads(path.read_text())
    table["fig1"]["by_client"] = ["Majority"]
    path.write_text(json.dumps(table))
    argv = ["reproduce", "swept.fig1", f"--dataset={sweep}", "--workdir=out"]
    argv += ["--scenario=alpha=1", "--num_seeds=2", "--cells=cells.json"]
    reproduce.command(argv)
    shown = capsys.readouterr().out
    kept = json.loads((tmp_path / "cells.json").read_text())
    found = {}
    for name, cell in kept.items():
        (folder,) = tmp_path.glob(f"out/**/{name}")
        with np.load(folder / "clients.npz") as file:
            mean, size = file["accuracy"].mean(1), file["test_size"]
        assert mean.shape == (2, 4) and mean.std() > 0
        np.testing.assert_allclose(cell["clients"]["accuracy"], mean, rtol=1e-5)
        assert cell["clients"]["test_size"] == size.tolist()
        found[name.split("-")[1]] = mean
    gap = found["fedavg"] - found["majority"]
    better, worse = (gap > 0).all(0).sum(), (gap < 0).all(0).sum()
    title = "clients that a row serves better or worse than Majority in all seeds"
    line = f"| FedAvg | {better} | {worse} | 4 |"
    assert (
        f"{title}\n\n| | better | worse | clients |\n|---|---|---|---|\n{line}" in shown
    )
    # Cells of earlier versions have no clients.
    for cell in kept.values():
        del cell["clients"]
    (tmp_path / "cells.json").write_text(json.dumps(kept))
    reproduce.command([*argv, "--dry_run"])
    again = capsys.readouterr().out
    assert "| FedAvg | missing | missing | missing |" in again
    assert again.count("missing") == 3


@pytest.mark.parametrize(
    "table, expected",
    [
        (
            "depthfl.small_text",
            ["Exit 1, masked", "Ensemble, masked", "Global, masked"],
        ),
        ("text.books", ["Client, pooled, masked", "Worst decile, masked"]),
        ("depthfl.table5", ["Exit 4, masked", "Ensemble, masked"]),
    ],
)
def test_tables_of_losses_at_chosen_positions(table, expected):
    """They compare masked perplexities, each once, which such runs have."""
    loaded = tables.load_table(table)
    plain = tables.of_dataset(loaded, "kjv")["metrics"]
    assert any("masked" not in name for name in plain)
    assert tables.of_dataset(loaded, "kjv", "all")["metrics"] == plain
    names = tables.of_dataset(loaded, "kjv", "chosen")["metrics"]
    assert len(names) == len(set(names)) and all("masked" in name for name in names)
    titles = [words.title(name) for name in names]
    assert set(expected) <= set(titles), titles


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_cell_s_last_chunk_ends_the_table(
    sweep, tmp_path, monkeypatch, number, code
):
    """The next cell is not begun; the same command goes on with it."""

    def on_call(self, run, records):
        if run.round == 1:
            signal.raise_signal(number)

    argv = ["reproduce", "swept.fig1", f"--dataset={sweep}", "--workdir=out"]
    argv += ["--row=Majority", "--rounds=1"]
    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "on_call", on_call)
        with pytest.raises(SystemExit) as stop:
            reproduce.command(argv)
    assert stop.value.code == code
    assert len(list(tmp_path.glob("out/**/run.flags"))) == 1
    reproduce.command(argv)
    assert len(list(tmp_path.glob("out/**/summary.json"))) == 2


def test_interrupted_between_cells(sweep, monkeypatch, capsys):
    """One line and exit code 130."""

    def execute(given):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "execute", execute)
    with pytest.raises(SystemExit) as stop:
        reproduce.command(["reproduce", "swept.fig1", f"--dataset={sweep}"])
    assert stop.value.code == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_dry_run_runs_nothing(tiny, tmp_path, capsys):
    """--dry_run shows the paper's numbers beside `missing`."""
    reproduce.command(
        ["reproduce", "tiny.table1", f"--dataset={tiny}", "--dry_run"]
        + ["--scenario=fixed", "--workdir=out"]
    )
    assert capsys.readouterr().out.count("missing") == 4
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["tiny.table9"], "no table tiny.table9"),
        ([], "give one table"),
        (["tiny.table1", "--dataset=cifar10"], "--dataset=cifar10"),
        (["tiny.table1", "--scenario=nix"], "--scenario=nix"),
        (["tiny.table1", "--row=nix", "--scenario=fixed"], "--row=nix"),
        (["tiny.table1", "--head_epochs=1"], "head_epochs"),
    ],
)
def test_bad_tables_are_one_line(tiny, capsys, argv, parts):
    """Exit code 2 and one line that names what is wrong."""
    if any("nix" in word for word in argv):
        argv = [*argv, f"--dataset={tiny}"]
    with pytest.raises(SystemExit) as stop:
        reproduce.command(["reproduce", *argv])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert parts in error and error.count("\n") == 1
