"""Papers' tables: missing cells run, finished ones stay, Markdown has the gaps."""

import json
import os
import pathlib
import shutil
import signal
import time

import numpy as np
import pytest

import models
from fedjax_pfl import boundary
from launch import main, reproduce
from launch.config import flags, resolve
from launch.run import progress
from launch.show import sheets, words
from launch.tables import cells, here, paper

pytestmark = pytest.mark.usefixtures("narrow")
COMMON = {"rounds": 2, "model": "narrow", "num_clients": 4, "devices": 1}


def row(algo, only=None, **options):
    """A row of a sheet."""
    return {"options": {"algo": algo} | options} | ({"only": only} if only else {})


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a paper with one table, whose name it returns."""

    def write(**sheet):
        defaults = {"title": "T", "notes": {}, "datasets": {}, "any_dataset": True}
        sheet = defaults | {"common": {"options": COMMON}} | sheet
        (tmp_path / "tiny.json").write_text(json.dumps({"sheets": {"one": sheet}}))
        return sheet

    monkeypatch.setattr(cells, "PAPERS", tmp_path)
    monkeypatch.chdir(tmp_path)
    return write


@pytest.fixture
def tiny(written, blobs):
    """Two cells with two metrics and the paper's numbers."""
    numbers = {
        "Local at fixed": {"options": {"client_lr": 0.1}, "paper": [10.0, 20.0]},
        "FedAvg at fixed": {"paper": [30.0, 40.0]},
    }
    written(
        metrics=["global_accuracy", "client_accuracy"],
        any_dataset=False,
        values={"fixed": {"options": {"clients_per_round": 4}}},
        rows={"Local": row("local", proxy_fraction=0.1), "FedAvg": row("fedavg")},
        datasets={blobs: numbers},
    )
    return ["reproduce", "tiny.one", f"--dataset={blobs}", "--workdir=out"]


def run(argv, capsys):
    """What the command prints."""
    reproduce.command(argv)
    return capsys.readouterr().out


def test_cells_run_once_and_are_kept(tiny, tmp_path, capsys):
    """The first command runs both cells, the second none, also without checkpoints."""
    argv = [*tiny, "--output=table.md", "--drop_checkpoints"]
    assert run([*argv, "--dry_run"], capsys).count("missing") == 4
    assert not (tmp_path / "out").exists()
    first = run(argv, capsys)
    assert first.count("2 rounds, 1 seed(s)") == 2
    rows = (tmp_path / "table.md").read_text().splitlines()
    local = next(line for line in rows if line.startswith("| Local"))
    done = sorted(tmp_path.glob("out/**/summary.json"))
    assert len(done) == 2 and "missing" not in local
    ours = json.loads(done[1].read_text())["metrics"]["global_accuracy"]["mean"]
    assert f"10.00 / {100 * ours:.1f} / {100 * ours - 10:+.1f}" in local
    assert not sorted(tmp_path.glob("out/**/checkpoints"))
    second = run(argv, capsys)
    assert "2 rounds, 1 seed(s)" not in second
    assert second.endswith(first[first.rindex("| Local") :])


def test_a_sheet_says_how_many_seeds(written):
    """Its own number is that of all cells, and --num_seeds another one."""
    rows = {"FedAvg": row("fedavg")}
    written(metrics=["global_accuracy"], rows=rows, values={"all": {}})
    assert here.Table("tiny.one", {}, here.Options()).seeds["num_seeds"] == 1
    common = {"options": COMMON | {"num_seeds": 3}}
    written(metrics=["global_accuracy"], rows=rows, values={"all": {}}, common=common)
    for given, expected in (({}, 3), ({"num_seeds": 2}, 2)):
        table = here.Table("tiny.one", given, here.Options())
        assert table.seeds == {"seed": 0, "num_seeds": expected}
        assert table.folder(table.cells[0]).name == f"all-fedavg-seed0-{expected - 1}"


@pytest.fixture
def sweep(written, blobs):
    """Columns are values of alpha, one of the paper's numbers has a deviation."""

    def write(**more):
        return written(
            metrics=["client_accuracy"],
            columns="percent",
            values={
                "alpha=0.5": {"options": {"partition_alpha": 0.5}},
                "alpha=1": {"options": {"partition_alpha": 1.0}},
            },
            rows={"Majority": row("majority"), "FedAvg": row("fedavg")},
            datasets={blobs: {"FedAvg at alpha=1": {"paper": [[30.0, 1.5]]}}},
            **more,
        )

    write()
    return write, ["reproduce", "tiny.one", f"--dataset={blobs}", "--workdir=out"]


def test_rows_and_columns(sweep, capsys):
    """One metric has scenarios as columns; both can be chosen; gaps stay empty."""
    argv = [*sweep[1], "--dry_run"]
    shown = run(argv, capsys)
    assert "| | alpha=0.5 | alpha=1 |" in shown
    assert "| FedAvg | missing | 30.00 ± 1.50 / missing |" in shown
    shown = run([*argv, "--row=FedAvg", "--scenario=alpha=0.5"], capsys)
    assert "| FedAvg | missing |" in shown and "Majority" not in shown


def test_differences_and_clients(sweep, tmp_path, capsys):
    """Paired by seed to a control, and counts of clients from the kept cells."""
    table = sweep[0](controls=["FedAvg", "Local"], by_client=["Majority"])
    argv = [*sweep[1], "--scenario=alpha=1", "--num_seeds=3", "--rounds=1"]
    argv += ["--cells=kept"]
    for name in table["rows"]:
        assert "Minus" not in run([*argv, f"--row={name}"], capsys)
    shown = run(argv, capsys)
    paths = sorted(tmp_path.glob("out/**/summary.json"))
    every = [json.loads(path.read_text())["metrics"] for path in paths]
    first, second = (np.array(one["client_accuracy"]["per_seed"]) for one in every)
    gap = 100 * (second - first)
    assert gap.std() > 0
    line = f"| Majority | {gap.mean():+.1f} ± {gap.std(ddof=1):.1f} |"
    head = "Minus FedAvg, points, paired by seed\n\n| | alpha=1 |\n|---|---|\n"
    assert head + line in shown and "Minus Local" not in shown

    kept, found = json.loads((tmp_path / "kept").read_text()), {}
    for name, cell in kept.items():
        (folder,) = tmp_path.glob(f"out/**/{name}")
        with np.load(folder / "clients.npz") as file:
            mean, size = file["accuracy"].mean(1), file["test_size"]
        assert mean.shape == (3, 4) and mean.std() > 0
        np.testing.assert_allclose(cell["clients"]["accuracy"], mean, rtol=1e-5)
        assert cell["clients"]["test_size"] == size.tolist()
        found[name.split("-")[1]] = mean
    gap = found["fedavg"] - found["majority"]
    better, worse = (gap > 0).all(0).sum(), (gap < 0).all(0).sum()
    title = "clients that a row serves better or worse than Majority in all seeds"
    head = f"{title}\n\n| | better | worse | clients |\n|---|---|---|---|\n"
    assert f"{head}| FedAvg | {better} | {worse} | 4 |" in shown
    # Cells of earlier versions have no clients.
    for cell in kept.values():
        del cell["clients"]
    (tmp_path / "kept").write_text(json.dumps(kept))
    again = run([*argv, "--dry_run"], capsys)
    assert "| FedAvg | missing | missing | missing |" in again
    assert again.count("missing") == 3


def test_clients_with_lower_perplexities_are_served_better():
    """Of a text fewer is better."""
    runs = {
        row: {"clients": {"perplexity": [values], "test_size": [[1] * 3]}}
        for row, values in (("a", [1.0, 5.0, 1.5]), ("b", [2.0, 4.0, 2.0]))
    }
    assert paper._by_client("b", "", runs).rows == [("a", ["2", "1", "3"])]


def test_given_options_hold_in_every_cell(sweep, tmp_path, capsys):
    """A column's own flag picks the column; others go to every cell that has them."""
    argv = [*sweep[1], "--partition_alpha=1", "--client_lr=0.3", "--rounds=1"]
    shown = run([*argv, "--num_seeds=2"], capsys)
    assert "alpha=0.5" not in shown and "--client_lr=0.3" in shown
    flags_of = {
        path.parent.name: path.read_text() for path in tmp_path.glob("out/**/*.flags")
    }
    assert sorted(flags_of) == ["alpha1-fedavg-seed0-1", "alpha1-majority-seed0-1"]
    for text in flags_of.values():
        assert "--partition_alpha=1.0" in text and "--rounds=1\n" in text
    assert "--client_lr=0.3" in flags_of["alpha1-fedavg-seed0-1"]


@pytest.fixture
def taught(written, blobs):
    """A table whose row `Taught` names another one as its teacher."""
    written(
        metrics=["global_accuracy"],
        columns="percent",
        common={"options": COMMON | {"num_clients": 2}},
        values={
            "half": {"options": {"train_share": 0.5}},
            "all": {"options": {"train_share": 1.0}},
        },
        rows={
            "Base": row("fedavg"),
            "Taught": row("distill", teacher="Large"),
            "Large": row("fedavg", ["all"], model_width=2.0),
        },
    )
    return ["reproduce", "tiny.one", f"--dataset={blobs}", "--workdir=out"]


def test_a_teacher_s_row_runs_first(taught, tmp_path, capsys):
    """Also one that was not asked for, once, with its own options; nothing twice."""
    argv = [*taught, "--row=Taught", "--model_width=0.5"]
    shown = run(argv, capsys)
    begun = [line for line in shown.splitlines() if " -> out/" in line]
    ran = [line.partition(" (")[0] for line in begun if "on npz" not in line]
    assert ran == ["all, Large", "half, Taught", "all, Taught"]
    assert "| Large | - | " in shown and "missing" not in shown.rpartition("###")[2]
    folders = {path.parent.name: path for path in tmp_path.glob("out/**/run.flags")}
    large = folders["all-large-seed0-0"]
    assert "--model_width=2.0" in large.read_text()
    file = large.parent / "model.msgpack"
    written = file.stat().st_mtime_ns
    for name in ("half", "all"):
        text = folders[f"{name}-taught-seed0-0"].read_text()
        assert "--model_width=0.5" in text
        assert f"--teacher={file.relative_to(tmp_path)}" in text
    for more in ([], ["--dry_run"]):
        shown = run([*argv, *more], capsys)
        assert "1 seed(s) ->" not in shown
        assert "missing" not in shown.rpartition("###")[2]
    assert file.stat().st_mtime_ns == written


def test_a_teacher_for_a_later_table(taught, tmp_path, capsys):
    """Its checkpoints stay, and its model is that of its run, whatever clocks say."""
    reproduce.command([*taught, "--row=Large", "--drop_checkpoints"])
    half, whole = (
        [*taught, "--row=Taught", f"--scenario={s}"] for s in ("half", "all")
    )
    assert "missing" not in run(half, capsys).rpartition("###")[2]
    (file,) = tmp_path.glob("out/**/model.msgpack")
    before = file.read_bytes()
    late = time.time() + 600
    os.utime(file, (late, late))
    run([*whole, "--rounds=3"], capsys)
    assert file.read_bytes() != before
    (student,) = file.parent.parent.glob("half-taught*")
    shutil.rmtree(student)
    shutil.rmtree(file.parent / "checkpoints")
    file.unlink()
    with pytest.raises(SystemExit) as stop:
        reproduce.command([*half, "--rounds=3"])
    assert stop.value.code == 2
    assert "has no checkpoint, so there is no state" in capsys.readouterr().err


def test_a_teacher_is_made_again(taught, tmp_path, capsys):
    """Its cell is kept in a file, its run is not, and a row that it teaches is new."""
    argv = [*taught, "--cells=kept", "--scenario=half"]
    reproduce.command([*argv, "--row=Large", "--scenario=all"])
    (path,) = tmp_path.glob("out/**/summary.json")
    expected = json.loads(path.read_text())["parameters_sha256"]
    shutil.rmtree(path.parent)
    reproduce.command([*argv, "--row=Taught"])
    assert json.loads(path.read_text())["parameters_sha256"] == expected
    kept = json.loads((tmp_path / "kept").read_text())
    options = kept["half-taught-seed0-0"]["options"]
    assert options["teacher"] == "Large"
    assert options["taught_by"] == kept["all-large-seed0-0"]["options"]
    dry = [*argv, "--row=Taught", "--workdir=elsewhere", "--dry_run"]
    assert "| Taught | missing |" not in run(dry, capsys)
    path, was = tmp_path / "kept", dict(kept["half-taught-seed0-0"]["rules"])
    assert was.pop("taught_by")["local_epochs"] == 2
    of_other = {"rules": was | {"taught_by": {"local_epochs": 77}}}
    kept["half-taught-seed0-0"] |= of_other
    path.write_text(json.dumps(kept))
    assert "| Taught | missing |" in run(dry, capsys)
    kept["half-taught-seed0-0"] |= {"rules": was}
    del kept["half-taught-seed0-0"]["git_commit"]
    path.write_text(json.dumps(kept))
    reproduce.command(dry)
    out, told = capsys.readouterr()
    assert "| Taught | missing |" not in out and ", an unknown one\n" in told
    changed(
        tmp_path, lambda sheet: sheet["rows"]["Large"]["options"].update(client_lr=0.3)
    )
    assert "| Taught | missing |" in run(dry, capsys)


def changed(folder, change):
    """Changes the table's file."""
    path = folder / "tiny.json"
    paper = json.loads(path.read_text())
    change(paper["sheets"]["one"])
    path.write_text(json.dumps(paper))


def test_kept_cells_of_a_table_that_wants_another_curve(sweep, tmp_path, capsys):
    """Their runs are read again; a metric that no run has is a gap."""
    write, argv = sweep
    argv = [*argv, "--cells=kept", "--scenario=alpha=1"]
    until = {"row": "FedAvg", "share": 0.5, "metrics": ["client_accuracy"]}
    write(until=until)
    reproduce.command(argv)
    until["metrics"] += ["global_loss", "exit1_accuracy"]
    changed(tmp_path, lambda sheet: sheet.update(until=until))
    rows = [line for line in run(argv, capsys).splitlines() if "FedAvg |" in line]
    assert rows[-1].endswith("| - |") and "missing" not in rows[-1]
    kept = json.loads((tmp_path / "kept").read_text())
    assert "global_loss" in kept["alpha1-fedavg-seed0-0"]["records"][-1]


def test_a_row_that_a_column_does_not_have(taught, capsys):
    """It is left out of the column; alone it is refused."""
    assert "| Large | - | missing |" in run([*taught, "--dry_run"], capsys)
    with pytest.raises(SystemExit):
        reproduce.command([*taught, "--row=Large", "--scenario=half"])
    line = "--row=Large has the scenarios all only, and not half"
    assert line in capsys.readouterr().err


def test_dry_run_hides_what_other_settings_made(sweep, tmp_path, capsys):
    """Other options, other presets, options that are gone, and a damaged summary."""
    argv = [*sweep[1], "--row=FedAvg", "--scenario=alpha=1"]
    once, dry = [*argv, "--rounds=1"], [*argv, "--rounds=1", "--dry_run"]
    reproduce.command(once)
    assert "missing" not in run(dry, capsys)
    assert "missing" in run([*argv, "--rounds=3", "--dry_run"], capsys)
    (path,) = tmp_path.glob("out/**/run.flags")
    text = path.read_text()
    changed = text.replace("--local_epochs=2", "--local_epochs=7")
    for other in (changed, text + "--gone=1\n"):
        assert other != text
        path.write_text(other)
        assert "missing" in run(dry, capsys)
    path.write_text(text)
    path.with_name("summary.json").write_text("{}")
    reproduce.command(dry)
    shown = capsys.readouterr()
    assert "30.00 ± 1.50 / missing" in shown.out
    assert shown.err.startswith("note: ") and "summary.json is damaged" in shown.err
    assert "missing" not in run(once, capsys)


def test_cells_outlive_their_folders(written, tmp_path, capsys, blobs):
    """A file keeps them; other options run again, a damaged file is one line."""
    written(
        metrics=["client_accuracy", "mb_later"],
        values={"all": {"options": {"eval_every": 1, "partition": "iid"}}},
        rows={"FedAvg": row("fedavg")},
    )

    errors = []

    def shown(*more):
        argv = ["reproduce", "tiny.one", f"--dataset={blobs}", "--cells=cells", *more]
        reproduce.command(argv)
        text, told = capsys.readouterr()
        errors.append(told)
        return text.count(" -> "), text[text.index("###") :]

    runs, first = shown("--workdir=a")
    assert runs == 2 and "missing" not in first and "MB after round 0" in first
    (kept,) = json.loads((tmp_path / "cells").read_text()).values()
    assert {"seed", "round", "bytes_up", "bytes_down"} == kept["records"][0].keys()
    assert shown("--workdir=b") == (0, first) == shown("--workdir=b", "--dry_run")
    assert not (tmp_path / "b").exists()
    assert "missing" in shown("--workdir=b", "--dry_run", "--client_lr=0.5")[1]
    assert shown("--workdir=c", "--client_lr=0.5")[0] == 2
    assert len(json.loads((tmp_path / "cells").read_text())) == 2
    assert shown("--workdir=b") == (0, first)  # those of other options stay
    told = "1 of 1 cells are of runs before, read from --cells=cells, at commits "
    assert told in errors.pop()
    # Runs of earlier versions have no rules, and such of other rules are not taken.
    cells = json.loads((tmp_path / "cells").read_text())
    for cell in cells.values():
        assert cell["rules"].pop("local_epochs") == 2
    (tmp_path / "cells").write_text(json.dumps(cells))
    assert shown("--workdir=b", "--dry_run") == (0, first)
    for cell in cells.values():
        assert cell["rules"]["rounds"] == 2
        cell["rules"]["local_epochs"] = 3
    (tmp_path / "cells").write_text(json.dumps(cells))
    assert "missing" in shown("--workdir=b", "--dry_run")[1]
    assert shown("--workdir=d")[0] == 2
    assert len(json.loads((tmp_path / "cells").read_text())) == 3
    assert shown("--workdir=b") == (0, first)
    for text in ("[1]", '{"a": 5}', '{"a": {"options": {}}}', '{"a": {"metrics": ""}}'):
        (tmp_path / "cells").write_text(text)
        with pytest.raises(SystemExit) as stop:
            shown()
        assert stop.value.code == 2
        line = capsys.readouterr().err
        assert line.startswith("error: --cells=cells is not a file of cells")


def test_a_signal_in_a_cell_s_last_chunk_ends_the_table(sweep, tmp_path, monkeypatch):
    """The next cell is not begun; the same command goes on with it."""

    def on_call(self, run, records):
        if run.round == 1:
            signal.raise_signal(signal.SIGINT)

    argv = [*sweep[1], "--row=Majority", "--rounds=1"]
    with monkeypatch.context() as patch:
        patch.setattr(progress.Progress, "on_call", on_call)
        with pytest.raises(SystemExit) as stop:
            reproduce.command(argv)
    assert stop.value.code == 130
    assert len(list(tmp_path.glob("out/**/run.flags"))) == 1
    reproduce.command(argv)
    assert len(list(tmp_path.glob("out/**/summary.json"))) == 2


def test_interrupted_between_cells(sweep, monkeypatch, capsys):
    """One line and exit code 130."""

    def execute(given):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "execute", execute)
    with pytest.raises(SystemExit) as stop:
        reproduce.command(sweep[1])
    assert stop.value.code == 130
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["tiny.table9"], "no table tiny.table9"),
        ([], "give one table"),
        (["tiny.one", "--dataset=cifar10"], "--dataset=cifar10"),
        (["tiny.one", "--scenario=nix"], "--scenario=nix"),
        (["tiny.one", "--row=nix", "--scenario=fixed"], "--row=nix"),
        (["tiny.one", "--head_epochs=1"], "head_epochs"),
        (["tiny.one", "--output=nix/table.md"], "--output=nix/table.md"),
    ],
)
def test_bad_tables_are_one_line(tiny, capsys, argv, parts):
    """Exit code 2 and one line that names what is wrong."""
    if "--dataset=cifar10" not in argv:
        argv = [*argv, tiny[2]]
    with pytest.raises(SystemExit) as stop:
        reproduce.command(["reproduce", *argv])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert parts in error and error.count("\n") == 1


def entry(*per_seed):
    """A summary's entry of one metric."""
    std = float(np.std(per_seed, ddof=1)) if len(per_seed) > 1 else 0.0
    return {"mean": float(np.mean(per_seed)), "std": std, "per_seed": list(per_seed)}


def shown(table, runs):
    """The Markdown of runs: (value, row) -> (summary, the paper's numbers)."""
    defaults = {"title": "T", "notes": {}, "datasets": {}}
    found = [
        (cells.Cell("", name, value, {"options": {}}, paper=numbers), done)
        for (value, name), (done, numbers) in runs.items()
    ]
    return sheets.markdown(paper.sheet(defaults | table, "blobs", found))


def test_decimals_of_percent():
    """As many as a table asks for, where a paper's numbers have so many."""
    metrics = {"client_accuracy": entry(0.97431, 0.97433), "best_round": entry(3, 4)}
    runs = {
        ("one", "A"): ({"metrics": metrics, "numbers": ["best_round"]}, [97.4, None])
    }
    table = {"metrics": list(metrics)}
    assert "| 97.40 / 97.4 ± 0.0 / +0.0 | 4 ± 1 |" in shown(table, runs)
    text = shown(table | {"digits": 2}, runs)
    assert "| 97.40 / 97.43 ± 0.00 / +0.03 | 4 ± 1 |" in text


def test_numbers_are_not_percent():
    """Values and differences of what a summary calls a number are as they are."""
    metrics = {"divergence_0_1": entry(0.25, 0.5), "dropped": entry(0.25, 0.5)}
    other = {"divergence_0_1": entry(0.125, 0.125)}
    numbers = {"numbers": ["divergence_0_1"]}
    runs = {
        ("one", "A"): ({"metrics": metrics} | numbers, [0.61, 30.0]),
        ("one", "B"): ({"metrics": other} | numbers, None),
    }
    table = {"metrics": list(metrics), "columns": "nats", "controls": ["B"]}
    text = shown(table, runs)
    assert "divergence 0 1, nats, 2 seed(s)" in text
    assert "0.61 / 0.375 ± 0.177 / -0.235 |" in text
    assert "30.00 / 37.5 ± 17.7 / +7.5 |" in text
    assert "Minus B, paired by seed\n\n| | one |\n|---|---|\n| A | +0.250" in text
    # Runs of earlier versions call nothing a number.
    old = shown(table, {("one", "A"): ({"metrics": metrics}, [0.61, 30.0])})
    assert "0.61 / 37.5 ± 17.7 / +36.9 |" in old


def test_traffic_by_kind_of_message():
    """MB of each kind and in total; `-` where a row has no such message."""

    def done(**kinds):
        traffic = {
            kind: {"direction": "down", "messages": entry(1), "bytes": entry(*sizes)}
            for kind, sizes in kinds.items()
        }
        metrics = {"client_accuracy": entry(0.5, 0.5)}
        return {"metrics": metrics, "traffic": traffic}, None

    runs = {
        ("one", "Local"): done(),
        ("one", "FedPer"): done(extractor=(2e6, 2e6)),
        ("one", "UA-PDFL"): done(extractor=(1e6, 2e6), mask=(3e9, 3e9)),
        ("one", "late"): (None, None),
        ("two", "Local"): done(),
    }
    text = shown({"metrics": ["client_accuracy"], "traffic": True}, runs)
    first, second = text.split("MB by kind of message")[1:]
    for line in (
        "| | total | extractor | mask |",
        "| Local | 0.000 | - | - |",
        "| FedPer | 2.000 | 2.000 | - |",
        "| UA-PDFL | 3,001.500 | 1.500 | 3,000.000 |",
        "| late | missing | missing | missing |",
    ):
        assert line in first
    assert "| Local | 0.000 |" in second
    assert "MB" not in shown({"metrics": ["client_accuracy"]}, runs)


@pytest.fixture
def once(monkeypatch):
    """Equal options are resolved once: a cell is in a table, a row and a column."""
    resolved, configure = {}, resolve.configure

    def known(given):
        key = repr(sorted(given.items()))
        if key not in resolved:
            resolved[key] = configure(given)
        return resolved[key]

    monkeypatch.setattr(resolve, "configure", known)


@pytest.mark.parametrize("name, table", cells.papers().items())
def test_every_cell_is_a_configuration(name, table, once):
    """Rows, columns and data sets name options that exist, and can be chosen."""
    for dataset in [*table["datasets"], table.get("dataset", "fashion_mnist")]:
        every = cells.cells(table, dataset)
        for cell in every:
            _, hparams = resolve.configure(cells.known(cell.options))
            if isinstance(hparams, boundary.LayerDropping):
                boundary.schedule(hparams, models.make("m1", 10), (28, 28, 1))
    for row in table["rows"]:
        found = cells.cells(table, dataset, row=row)
        teachers = {cell.teacher[0] for cell in found if cell.teacher}
        assert {cell.row for cell in found} - teachers == {row}
        # Paths have plain letters.
        assert not set(cells.slug(row)) & set(",*() %")
    assert len({*map(cells.slug, table["rows"])}) == len(table["rows"])
    for value in table["values"]:
        assert cells.cells(table, dataset, value=value)
    for single in table["datasets"].values():
        places = {f"{row} at {v}" for row in table["rows"] for v in table["values"]}
        assert single.keys() <= places


def test_uapdfl_s_five_peers_are_its_first_tables():
    """The paper's Tables 3 and 4 repeat Tables 1 and 2 where there are five peers."""
    known = cells.papers()
    for swept, first in (("table3", "table1"), ("table4", "table2")):
        swept, first = known[f"uapdfl.{swept}"], known[f"uapdfl.{first}"]
        for dataset, single in first["datasets"].items():
            for model in first["values"]:
                expected = single[f"UA-PDFL at {model}"]
                assert swept["datasets"][dataset][f"{model} at peers=5"] == expected


def test_uapdfl_s_flagfile_is_a_cell():
    """The flagfile on Fashion-MNIST replays a cell of the table for CPUs."""
    path = pathlib.Path(main.__file__).parent / "flagfiles/uapdfl.fashion_mnist.flags"
    table = cells.papers()["uapdfl.small"]
    (cell,) = cells.cells(table, "fashion_mnist", "beta=0.5", "UA-PDFL")
    assert flags.parse(["main", f"--flagfile={path}"]) == cell.options


def test_given_values_pick_rows_and_columns():
    """A row or a column that stands for another value is left out."""
    known = cells.papers()
    found = cells.cells(
        known["fedd2s.fig7"], "cifar100", given={"partition_alpha": 0.5}
    )
    assert {cell.row for cell in found} == {"alpha=0.5"}
    table = known["fedd2s.fig6"]
    rows = {cell.row for cell in cells.cells(table, "cifar10", given={"min_layer": 3})}
    assert rows == {"L3", "layer 3 for ever"}
    with pytest.raises(ValueError, match="--head_epochs=1: no row has this option"):
        cells.cells(table, "cifar10", given={"head_epochs": 1})


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
    loaded = cells.papers()[table]
    plain = paper.of_dataset(loaded, "kjv")["metrics"]
    assert any("masked" not in name for name in plain)
    assert paper.of_dataset(loaded, "kjv", "all")["metrics"] == plain
    names = paper.of_dataset(loaded, "kjv", "chosen")["metrics"]
    assert len(names) == len(set(names)) and all("masked" in name for name in names)
    titles = [words.title(name) for name in names]
    assert set(expected) <= set(titles), titles


def test_a_table_of_a_text_is_not_in_percent():
    """Also where its file says so, or one metric has no head of its own."""
    images = {"metrics": ["global_accuracy"], "columns": "percent, the ensemble"}
    found = paper.of_dataset(images, "kjv")
    assert found["columns"] == "perplexity, the ensemble"
    found = paper.of_dataset({"metrics": ["global_accuracy"]}, "kjv")
    assert found["columns"] == "perplexity"
    assert paper.of_dataset(images, "mnist")["columns"] == "percent, the ensemble"


def test_a_single_number_is_beside_every_metric():
    """The paper does not say when it was measured."""
    metrics = {"client_accuracy": entry(0.9), "global_accuracy": entry(0.7)}
    runs = {("one", "A"): ({"metrics": metrics}, [80.0])}
    text = shown({"metrics": list(metrics)}, runs)
    assert "| A | 80.00 / 90.0 / +10.0 | 80.00 / 70.0 / -10.0 |" in text
