"""Studies of methods: choices by validation rows, trials that go on, and tables."""

import contextlib
import hashlib
import json
import pathlib
import re
import shutil
import signal
import types
import zipfile

import jax
import numpy as np
import optax
import pandas
import pytest
from scipy import stats

from fedjax_pfl import averaging, local_training
from launch import build, report
from launch.folder import lock, record
from launch.machine import memory
from launch.show import alike, derived, frames, significance, table, words
from launch.study import __main__ as command
from launch.tables import estimates, protocol, trials, tuning

PERPLEXITY = "client_perplexity"
KEPT = pathlib.Path(build.__file__).parent / "studies" / "methods"
GEN = np.random.default_rng(3)
X = GEN.normal(size=(200, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int) + 2 * (X[:, 1] > 0.3)
OPTIONS = {
    "dataset": (X, Y),
    "partition": "iid",
    "preset": "none",
    "model": "narrow",
    "num_clients": 5,
    "rounds": 3,
    "eval_every": 1,
    "local_epochs": 1,
    "batch_size": 8,
    "val_split": 0.25,
    "fine_tune_epochs": 1,
    "devices": 1,
}
pytestmark = pytest.mark.usefixtures("narrow")
METHODS = ["local", "fedavg", "fedavg+ft"]
TUNE = {"client_lr": [0.001, 0.3]}


def made(folder="", methods=METHODS, **more):
    """A small study that has not run."""
    given = {"seeds": 2, "tune": TUNE, "control": "local"} | OPTIONS | more
    return build.study(methods, folder=folder, **given)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A small study that has run."""
    return made(tmp_path_factory.mktemp("done") / "study").run(progress=False)


def test_choices_are_the_best_validation(done):
    """Each row has the point whose validation metric is best, by plain reading."""
    names = {"val_client_accuracy", "val_fine_tuned_accuracy"}
    for row, _, chosen in done.choices():
        base = row.removesuffix("+ft")
        folder = done.folder / "runs" / f"{base}.tune"
        values = {}
        for part in json.loads((folder / "summary.json").read_text())["sweep"]:
            wanted = names if row != base else {"val_client_accuracy"}
            for name in wanted:
                values[part["point"]["client_lr"], name] = part["metrics"][name]["mean"]
        assert chosen.value == max(values.values())
        assert values[chosen.options["client_lr"], chosen.metric] == chosen.value
        assert chosen.edges == ("client_lr",)
    assert len(done.choices()) == 3


def test_metrics_that_resemble_ours_are_refused():
    """Before anything runs; those of exits, classes and own ones are not."""
    names = ["val_client_accuracy", "exit2_accuracy", "hurt", "client_accuracy_mlp"]
    assert not [one for one in made(metrics=names).notes if "not a metric" in one]
    wanted = "clinet_accuracy is not a metric of this package; did you mean client_acc"
    with pytest.raises(ValueError, match=f"^study: metrics: {wanted}uracy.$"):
        made(metrics=["clinet_accuracy"])
    for name, line in (
        ("train_loss", "train_loss is in records, and in no table"),
        ("clients_in_unseen_accuracy", "is in records, and in no table"),
        (
            "val_until_mb",
            "no metric val_until_mb: until_mb is not measured on validation",
        ),
        ("acc", "acc is not a metric of this package$"),
        ("auc", "auc is not a metric of this package"),
    ):
        with pytest.raises(ValueError, match=line):
            made(metrics=[name])
    # A metric of one's own may have such a name.
    (note,) = made(metrics=["clinet_accuracy"], eval_metrics="macro_f1").notes[-1:]
    assert wanted in note


@pytest.mark.parametrize(
    "name, option, given",
    [
        ("val_client_accuracy", "val_split", {"val_split": 0.0, "tune": {}}),
        ("unseen_accuracy", "unseen_clients", {}),
        ("val_unseen_accuracy", "unseen_clients", {}),
        ("fine_tuned_accuracy", "fine_tune_epochs", {"fine_tune_epochs": 0}),
    ],
)
def test_metrics_that_no_run_has_are_refused(name, option, given):
    """The option that a metric needs is named before anything runs."""
    methods = {"methods": ["fedavg"], "control": ""} | given
    with pytest.raises(ValueError, match=f"^study: metrics: {name} needs {option}$"):
        made(metrics=[name], **methods)


def test_test_rows_choose_nothing():
    """Other labels of test rows change results, but no choice."""
    choices, results = [], []
    for order in (1, -1):
        official = {"dataset": (X[:160], Y[:160]), "test_split": "official"}
        official["test"] = X[160:], Y[160:][::order]
        given = OPTIONS | official | {"tune": TUNE, "fine_tune_epochs": 0}
        ran = build.study(["fedavg"], **given).run(progress=False)
        choices.append(ran.choices())
        frame = ran.table(["global_accuracy"]).to_frame()
        results.append(frame.loc["fedavg"].iloc[0])
    assert choices[0] == choices[1] and choices[0][0][2].metric
    assert results[0] != results[1]


def test_validation_rows_of_the_data_choose(tmp_path):
    """They are found in a file too, and are no test rows."""
    held = {"x": X[:140], "y": Y[:140], "x_test": X[140:170], "y_test": Y[140:170]}
    np.savez(tmp_path / "own.npz", **held, x_val=X[170:], y_val=Y[170:])
    given = OPTIONS | {"tune": TUNE, "fine_tune_epochs": 0, "val_split": 0.0}
    given["dataset"] = f"npz:{tmp_path / 'own.npz'}"
    ran = build.study(["fedavg"], **given).run(progress=False)
    ((_, _, chosen),) = ran.choices()
    assert chosen.metric == "val_global_accuracy"
    alone = build.experiment(
        algo="fedavg",
        **{name: given[name] for name in OPTIONS} | chosen.options,
        summary="best_validation",
    ).run(progress=False)["metrics"]
    frame = ran.table(["global_accuracy"]).to_frame()
    assert frame.loc["fedavg"].iloc[0] == alone["global_accuracy"]["mean"]


def test_validation_rows_of_nobody():
    """No row is tuned by what cannot be measured on them, and without tune all run."""
    rows = {"dataset": (X[:150], Y[:150]), "val": (X[150:], Y[150:]), "val_split": 0.0}
    for method in ("fedavg+ft", "local", "fedper"):
        with pytest.raises(ValueError, match=f"tune: {re.escape(method)} cannot be me"):
            made(methods=["fedavg", method], control="", **rows)
    plain = rows | {"tune": {}, "control": ""}
    found = made(methods=["fedavg", "fedper"], **plain)
    assert len([one for one in found.notes if "no round, as fedper cannot" in one]) == 1
    assert not any(
        "summary" in one for one in found.schedule.prepared.options[""].values()
    )
    found = made(methods=["fedavg"], **plain)
    assert found.schedule.prepared.options[""]["fedavg"]["summary"] == "best_validation"


def test_results_are_runs_at_the_best_point(done):
    """A row is a run of all seeds with the chosen options."""
    rate = done.schedule.choice("", "fedavg").options["client_lr"]
    alone = build.experiment(
        algo="fedavg",
        **OPTIONS | {"client_lr": rate, "num_seeds": 2, "summary": "best_validation"},
    )
    metrics = alone.run(progress=False)["metrics"]
    frame = done.table(["client_accuracy"]).to_frame()
    assert frame.loc["fedavg"].iloc[0] == metrics["client_accuracy"]["mean"]
    if done.schedule.choice("", "fedavg+ft").is_fine_tuned:
        tuned = metrics["fine_tuned_accuracy"]["mean"]
        assert frame.loc["fedavg+ft"].iloc[0] == tuned


def test_interrupted_and_opened_again(done, tmp_path):
    """A study whose trials are cut off goes on to the same table, and is packed."""
    folder = tmp_path / "cut"
    cut = made(folder).run(progress=False, cell_timeout=1e-9)
    assert not cut.choices() and "not finished" in cut.table().to_markdown()
    whole = made(folder).run(progress=False)
    assert whole.table().to_markdown() == done.table().to_markdown()
    packed = build.load(whole.pack(tmp_path / "mine.zip"))
    inside = whole.pack(folder / "new" / "mine.zip")
    with zipfile.ZipFile(whole.pack(inside)) as file:
        assert "new/mine.zip" not in file.namelist()
    assert packed.table().to_latex() == done.table().to_latex()
    with zipfile.ZipFile(tmp_path / "mine.zip") as file:
        names = file.namelist()
    assert "runs/fedavg/clients.npz" in names and "tables.tex" in names
    assert not any("checkpoints" in name for name in names)
    for asked in (lambda: packed.load("fedavg"), packed.estimate):
        with pytest.raises(ValueError, match="needs what Python gave.* not a packed"):
            asked()
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("a", "b")
    with pytest.raises(ValueError, match="is of another study, or damaged"):
        build.load(tmp_path / "other.zip")


def test_looking_into_a_row(done):
    """The models of a finished row can be asked."""
    loaded = done.load("fedavg")
    assert loaded.round == 3 and loaded.predict(0, X[:2]).shape == (2, 4)
    for seed in (0, 1):
        splits = [loaded.rows(2, split, seed) for split in ("train", "val", "test")]
        every = np.concatenate(splits)
        assert len(set(every)) == len(every) and all(map(len, splits))
        found = loaded.predictions(2, seed=seed)
        assert list(found["label"]) == list(Y[found["row"]])
        is_right = (found["label"] == found["predicted"]).mean()
        mine = loaded.evaluate(X[splits[2]], Y[splits[2]], 2, seed)
        assert is_right == pytest.approx(mine["accuracy"])
        counts = loaded.confusion(2, seed=seed).to_numpy()
        assert counts.shape == (4, 4)
        assert np.trace(counts) / counts.sum() == pytest.approx(is_right)
        for one, line in enumerate(counts):
            answers = found["predicted"][found["label"] == one]
            assert line.tolist() == np.bincount(answers, minlength=4).tolist()
        clients = loaded.client_model(2, seed).data.partition
        test = np.asarray(loaded.data.partition.test.row)[seed]
        np.testing.assert_array_equal(clients.test.row, test)
        p = loaded.predict(2, X[found["row"]], seed)
        np.testing.assert_array_equal(found["probability"], p.max(1))
    names = loaded.task.server_model.stage_names
    logits = loaded.embeddings(2, names[-1])
    chosen = loaded.predict(2, X[loaded.rows(2)]).argmax(-1)
    assert list(logits.argmax(-1)) == list(chosen)
    assert loaded.embeddings(2, 0).shape[0] == len(logits)
    with pytest.raises(ValueError, match="expected one of"):
        loaded.embeddings(2, "nothing")


def test_shards_of_a_file(tmp_path, capsys):
    """Two shards of a file share a folder, run each method once, and end alike."""
    np.savez(tmp_path / "mine.npz", x=X, y=Y)
    options = OPTIONS | {"dataset": f"npz:{tmp_path / 'mine.npz'}"}
    settings = {"few": {"options": {"num_clients": 4}}, "many": {}}
    study = {"rows": dict.fromkeys(METHODS, {}), "values": settings, "tune": TUNE}
    study |= {"common": {"options": options}, "control": "local", "seeds": 2}
    (tmp_path / "mine.json").write_text(json.dumps(study))
    given = ["x", f"--table={tmp_path / 'mine.json'}", f"--folder={tmp_path / 'runs'}"]
    command.command([*given, "--shard=1/2"])
    first = capsys.readouterr().out
    assert "not finished" in first
    command.command([*given, "--shard=2/2"])
    second = capsys.readouterr().out
    begun = [out.count(".tune ->") for out in (first, second)]
    assert begun == [2, 2] and "not finished" not in second
    command.command([*given, "--report"])
    third = capsys.readouterr().out
    assert " -> " not in third and second[second.index("| |") :].strip() in third
    assert (tmp_path / "runs" / "report-few.html").is_file()
    command.command([*given, "--dry_run"])
    assert "together about 0 minutes" in capsys.readouterr().out


def test_data_of_a_file_lie_elsewhere(tmp_path, capsys):
    """`--data_dir` is where the runs find their data; a study names no folder."""
    rows = {"x": [[n / 40] * 784 for n in range(40)], "y": [0, 1] * 20}
    data = {"users": ["a", "b"], "num_samples": [40, 40]}
    data |= {"user_data": {"a": rows, "b": rows}}
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "all_data_0.json").write_text(json.dumps(data))
    options = {"preset": "none", "dataset": "femnist", "partition": "natural"}
    study = {"rows": {"majority": {}}, "common": {"options": options}}
    (tmp_path / "mine.json").write_text(json.dumps(study))
    given = ["x", f"--table={tmp_path / 'mine.json'}", f"--folder={tmp_path / 'runs'}"]
    command.command([*given, f"--data_dir={tmp_path / 'femnist'}"])
    assert "\n| Majority | " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.command(["x", "scaling", f"--data_dir={tmp_path}"])
    assert "data_dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"val_split": 0.0}, "give val_split"),
        ({"summary": "best"}, "summary=best chooses rounds by test rows"),
        ({"control": "fedper"}, "expected one of local, fedavg, fedavg+ft"),
        ({"fine_tune_epochs": 0}, "fedavg+ft needs fine_tune_epochs"),
        ({"tune": {"proximal_weight": [1.0, 2.0]}}, "no method has the option"),
        ({"tune": {"lr": [1.0, 2.0]}}, "the option lr; did you mean client_lr"),
        ({"tune": {"client_lr": [1.0, 1.0]}}, "expected different values"),
        ({"num_seeds": 2}, "is decided by the study"),
        ({"methods": {"local": {"sweep": "client_lr=0.1,0.2"}}}, "row local: sweep"),
        ({"methods": {"local": {"num_seeds": 3}}}, "row local: num_seeds is decided"),
        (
            {"methods": {"local": {}, "fedavg": {"summary": "best"}}},
            "chooses rounds by test rows, which tune must not (fedavg)",
        ),
        (
            {"tune": {"client_optimizer": [optax.sgd, optax.adam]}},
            "tune: client_optimizer: expected numbers, texts or bools",
        ),
        ({"seeds": 0}, "expected 1 or more"),
        ({"seeds": "2"}, "its seeds is a text, an integer is expected"),
        ({"tune": {"client_lr": [-1, 0.1]}}, "--client_lr=-1: expected at least 0"),
        ({"tune": {"client_lr": ["a", 0.1]}}, "--client_lr='a': expected float"),
        ({"tune": {"seed": [1, 2]}}, "seed decides what is measured"),
        ({"tune": {"val_split": [0.1, 0.2]}}, "val_split decides what is measured"),
        ({"tune": {"client_lr": 0.1}}, "its tune.client_lr is a number, a list"),
        ({"metrics": "hurt"}, "its metrics is a text, a list is expected"),
        ({"settings": ["a"]}, "settings=['a']: expected an object by names"),
        ({"settings": {"%": {}}}, "% cannot be the name of a folder"),
        ({"settings": {"a/b": {}, "a-b": {}}}, "are one name of a folder"),
        ({"methods": ["local", "local"]}, "two methods have the name local"),
        ({"methods": {1: {}}}, "study: methods: the name 1 is not a text"),
        ({"settings": {0.1: {}}}, "study: settings: the name 0.1 is not a text"),
        ({"folder": 5}, "study: folder: expected a path, got a int"),
        ({"methods": 5}, "study: expected a list of methods, got 5"),
        ({"run": False}, "study: run= belongs to build.compare; omit it"),
    ],
)
def test_refused_in_a_line(more, line):
    """Bad input is one line."""
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        made(**more)
    assert "\n" not in str(error.value)


class Turning:
    """A data set of torch whose examples are others each time that they are read."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.reads += 1
        return X[index] + self.reads, int(Y[index])


def test_a_data_set_with_random_transforms():
    """All runs of a study or of a comparison have the examples of one reading."""
    turning, given = Turning(), {"methods": ["local", "fedavg"], "seeds": 1, "tune": {}}
    study = made(dataset=turning, settings={"a": {}, "b": {"batch_size": 4}}, **given)
    reads = turning.reads
    assert study.run(progress=False).failed == []
    assert reads == turning.reads and len(X) <= reads <= len(X) + 2
    (example,) = {study.load("local", setting=one).examples_sha256 for one in "ab"}
    own = {name: value for name, value in OPTIONS.items() if name != "dataset"}
    compared = build.compare(["local", "fedavg"], run=False, dataset=turning, **own)
    (other,) = {one.examples_sha256 for one in compared.values()}
    assert other != example


def test_a_row_of_a_file_in_an_opened_study(tmp_path):
    """The line names the file, and how its run is opened."""
    text = "from algorithms.fedavg import HParams, make"
    path = tmp_path / "mine.py"
    path.write_text(text)
    rows = {"Mine": {"algo": str(path)}, "local": {"algo": "local"}}
    given = {"seeds": 1, "tune": {}, "control": ""}
    study = made(tmp_path / "study", rows, **given).run(progress=False)
    opened = build.load(study.folder)
    with pytest.raises(ValueError, match=f"^mine needs the code in {path} and") as told:
        opened.load("Mine")
    alone = str(study.folder / "runs" / "mine")
    assert str(told.value).endswith(f"build.load({alone!r}, algo={str(path)!r}, ...)")
    with pytest.raises(ValueError, match="^local needs what Python gave; call"):
        opened.load("local")
    alone = build.load(study.folder / "runs" / "mine", algo=path, dataset=(X, Y))
    assert alone.round == 3


def test_two_algorithms_of_one_file(tmp_path):
    """Each row is what its class computes, and no copy of the other's run."""
    path = tmp_path / "two.py"
    path.write_text(
        "import fedjax_pfl as fp\n"
        "from fedjax_pfl import averaging\n"
        "class Plain:\n"
        "    HParams, step = averaging.Averaging, None\n"
        "    @classmethod\n"
        "    def make(cls, hparams, task):\n"
        "        loss = fp.cross_entropy_loss(task.model)\n"
        "        fn = lambda c, server: fp.train(hparams, loss, server, c)\n"
        "        return averaging.make(hparams, task, fn, step=cls.step)\n"
        "class Frozen(Plain):\n"
        "    step = staticmethod(lambda server, mean, key: server)\n"
    )
    rows = {name: {"algo": f"{path}:{name}"} for name in ("Plain", "Frozen")}
    given = {"seeds": 1, "tune": {}, "control": ""}
    study = made(tmp_path / "study", rows, **given).run(progress=False)
    for row in rows:
        assert study.load(row).config.algo == row
    one, other = (study.load(row).metrics[-1]["global_loss"] for row in rows)
    assert one != other


def test_runs_of_one_process_share_their_examples():
    """On the devices, as long as one of them is there."""
    compared = build.compare(["local", "fedavg"], run=False, **OPTIONS)
    first, second = (one.simulation.data for one in compared.values())
    assert first.image is second.image and first.label is second.label
    moved = build.experiment(**OPTIONS | {"algo": "fedavg", "dataset": (X + 1, Y)})
    assert moved.simulation.data.image is not first.image


@pytest.fixture
def alone(tmp_path):
    """A study without tuning that has run in a folder of its own."""
    given = {"seeds": 1, "tune": {}, "fine_tune_epochs": 0, "control": ""}
    methods = {"methods": ["local", "fedavg"]}
    return lambda: made(tmp_path / "study", **methods, **given)


@pytest.mark.parametrize("change", ["another's", "longer"])
def test_runs_that_are_not_those_that_the_study_finished(change, alone):
    """A table does not show what came into a row's folder since then."""
    runs = alone().run(progress=False).folder / "runs"
    if change == "longer":
        more = {"rounds": 4, "resume": True, "workdir": str(runs / "local")}
        build.load(runs / "local", dataset=(X, Y), **more).run(progress=False)
    else:
        shutil.copytree(runs / "fedavg", runs / "local", dirs_exist_ok=True)
    study = alone()
    assert study.lines()[0].split() == ["local", "to", "run"]
    assert study.runs()["local"] is None and "1 of 2" in study.table().notes[-1]
    with pytest.warns(UserWarning, match="local failed: .*; choose another"):
        study.run(progress=False)
    assert study.failed == ["local"] and study.runs()["fedavg"]
    shutil.rmtree(runs / "local")
    assert alone().lines()[0].split() == ["local", "to", "run"]
    assert alone().run(progress=False).runs()["local"].flags["algo"] == "local"


def test_two_rows_whose_runs_have_one_name(choosing, monkeypatch):
    """Of a fine-tuned row and of a row that is called as its run."""
    where = "launch.tables.protocol"
    monkeypatch.setattr(
        f"{where}.record.read", lambda path: types.SimpleNamespace(summary={"at": path})
    )
    monkeypatch.setattr(f"{where}.derived.fine_tuned", lambda run: run)
    metrics = {"client_accuracy": 0.5, "fine_tuned_accuracy": 0.6}
    other = {"client_accuracy": 0.4, "fine_tuned_accuracy": 0.7}
    points = (0.1, metrics), (0.2, other)
    rows = {"fedavg": {}, "fedavg+ft": {}, "fedavg.ft": {"algo": "local"}}
    tune = {"client_lr": [0.1, 0.2]}
    study = choosing(lambda path: swept(*points), rows, tune=tune)
    finals = [study.schedule.final("", row) for row in rows]
    assert [one.name for one in finals] == ["fedavg", "fedavg.ft", "fedavg.ft"]
    monkeypatch.setattr(study.schedule, "path", lambda one: pathlib.Path(str(one.key)))
    found = [run.summary["at"] for run in study.runs().values()]
    assert found == [pathlib.Path(str(one.key)) for one in finals]


def test_options_that_no_sweep_takes(tmp_path):
    """A whole number is tuned by single runs, of a method that has it."""
    tuned = build.study(
        ["local", "fedavg"],
        tune={"local_epochs": [1, 2], "client_lr": [0.1, 0.3]},
        **OPTIONS | {"rounds": 1},
    )
    names = [one.name for one in tuned.schedule.tuning("", "fedavg")]
    assert names == ["fedavg.tune,local_epochs=1", "fedavg.tune,local_epochs=2"]
    chosen = tuned.run(progress=False).schedule.choice("", "fedavg")
    assert set(chosen.options) == {"local_epochs", "client_lr"}


def test_diverged_points():
    """One that diverged is not chosen, and a result that did is called so."""
    rates = {"tune": {"client_lr": [1e30, 0.1]}, "fine_tune_epochs": 0}
    ran = build.study(["fedavg"], **OPTIONS | rates).run(progress=False)
    assert ran.schedule.choice("", "fedavg").options == {"client_lr": 0.1}
    given = OPTIONS | {"client_lr": 1e30, "fine_tune_epochs": 0}
    ran = build.study(["fedavg"], **given).run(progress=False)
    assert "| FedAvg | diverged |" in ran.table().to_markdown()
    rows = {"local": {"client_lr": 1e30}, "fedavg": {"client_lr": 0.1}}
    given = OPTIONS | {"rounds": 1, "fine_tune_epochs": 0}
    ran = build.study(rows, control="local", **given).run(progress=False)
    shown = ran.table(["client_accuracy", "hurt", "gain", "until_rounds"])
    assert [one.values[1].mean is None for one in shown.columns] == [False, *[True] * 3]
    named = {name: {"algo": name} | own for name, own in rows.items()}
    frame = build.compare(named, progress=False, **given).summary(control="local")
    assert not {"hurt", "gain", "until_rounds"} & set(frame)


def test_tested_or_not(done):
    """Only metrics without values of clients are said to be untested."""
    shown = done.table(["client_accuracy", "global_accuracy"])
    said = [one for one in shown.notes if "no test is made" in one]
    assert len(said) == 1 and said[0].startswith("Global")
    alone = made().table(["client_accuracy"])
    assert not any("no test is made" in one for one in alone.notes)
    assert not any("0 seeds" in one for one in alone.notes)


def test_what_a_table_cannot_say(done):
    """It has no sentence about no control, no number of an unknown cell, no letters."""
    shown = done.table(["hurt", "bottom_decile", "until_rounds"], control="")
    said = "Hurt, Rounds until: these compare with a control, and none is given."
    assert said in shown.notes and not any(" with ." in one for one in shown.notes)
    assert shown.to_frame().loc["fedavg", "Hurt"].isna().all()
    for given, line in (
        ({"metrics": "hurt"}, r"expected a list, \['hurt'\]"),
        ({"metrics": ["until_mb"], "until": 0}, "until=0: expected a share above 0"),
    ):
        with pytest.raises(ValueError, match=line):
            done.table(**given)
    (line,) = [one for one in done.table(["client_acuracy"]).notes if "acura" in one]
    assert line.endswith("has this metric; did you mean client_accuracy?")
    (line,) = [one for one in done.table(["c_per"]).notes if "c_per" in one]
    assert line == "c_per: no finished run has this metric."
    notes = done.table(["bytes_up", "client_accuracy"]).notes
    assert "MB up: of all rounds of a run." in notes
    flags, metrics = {"eval_moments": "after"}, {"trained_accuracy": {}}
    after = record.Record(None, flags, [], {}, {"metrics": metrics})
    assert table._usual([[after]], "", derived.Goal()) == ["trained_accuracy"]
    with pytest.raises(ValueError, match="the study has none; omit it"):
        done.plot(setting="alpha 1")


def test_notes_of_a_study(done):
    """Those of its run, of its trials and of its choices."""
    notes = "\n".join(done.notes)
    assert "the best client_lr, 0.3, is at the end of its values" in notes
    assert set(done.load("fedavg").notes) <= set(done.notes)
    assert len(set(done.notes)) == len(done.notes)


def test_a_page_of_one_of_two_settings(tmp_path, undrawn, capsys):
    """It says whose runs it has, and --setting has the others."""
    settings = {"one": {"num_clients": 5}, "two": {"num_clients": 4}}
    given = {"methods": ["local"], "tune": {}, "settings": settings, "rounds": 1}
    folder = tmp_path / "study"
    made(folder, **given).run(progress=False)
    out = tmp_path / "page.html"
    for flag, mine, other in (("", "one", "two"), ("--setting=two", "two", "one")):
        report.command(
            ["report", str(folder), f"--output={out}", *filter(None, [flag])]
        )
        text = out.read_text()
        assert f"These are the runs of {mine}; of {other} the page has" in text
    for argv, line in (
        ([str(folder), "--setting=three"], "setting=three: expected one of one, two"),
        (
            [str(folder), "--setting=two", "--output=t.md"],
            "--setting=two has no effect",
        ),
        ([str(folder / "runs" / "one.local"), "--setting=two"], "is of a study"),
    ):
        with pytest.raises(SystemExit):
            report.command(["report", *argv])
        assert line in capsys.readouterr().err


def test_its_report(done, undrawn, tmp_path, capsys):
    """launch.report makes the page of a study's folder, with its table."""
    out = tmp_path / "page.html"
    report.command(["report", str(done.folder), f"--output={out}"])
    text = out.read_text()
    assert "FedAvg + FT" in text and "Hurt" in text and "<td><b>" in text
    with pytest.raises(SystemExit):
        report.command(["report", str(done.folder), "--control=fedavg"])
    assert "--control=fedavg has no effect with --output=" in capsys.readouterr().err


def test_epochs_of_fine_tuning_are_tuned():
    """Also to none, and by the fine-tuned clients' validation alone."""
    tune = {"fine_tune_epochs": [0, 3]}
    given = OPTIONS | {"fine_tune_epochs": 0, "client_lr": 0.1, "rounds": 1}
    ran = build.study(["fedavg", "fedavg+ft"], tune=tune, **given).run(progress=False)
    chosen = ran.schedule.choice("", "fedavg+ft")
    assert chosen.is_fine_tuned == (chosen.options == {"fine_tune_epochs": 3})
    assert ran.schedule.choice("", "fedavg").options == {"fine_tune_epochs": 0}
    assert not ran.schedule.choice("", "fedavg").edges  # all are as good


def test_a_study_grows_in_its_folder(tmp_path):
    """Values to tune are added, and another option tried; what was done is kept."""

    def study(values, **more):
        given = OPTIONS | {"tune": {"client_lr": values}, "fine_tune_epochs": 0} | more
        return build.study(["fedavg"], folder=tmp_path / "study", **given)

    first = study([0.001, 0.3]).run(progress=False)
    shown = first.table().to_markdown()
    asked = study([0.001, 0.3], rounds=2)
    assert "not finished" in asked.table().to_markdown()
    assert build.load(tmp_path / "study").table().to_markdown() == shown
    cut = study([0.001, 0.3, 0.5]).run(progress=False, cell_timeout=1e-9)
    assert not cut.failed and not cut.choices()
    more = study([0.001, 0.3, 0.5]).run(progress=False)
    assert not more.failed and len(more.choices()) == 1
    assert len(list((tmp_path / "study" / "runs").glob("fedavg.tune*"))) == 2
    assert study([0.001, 0.3]).table().to_markdown() == shown
    assert (
        build.load(tmp_path / "study").table().to_markdown()
        == more.table().to_markdown()
    )


def test_more_seeds_keep_what_was_tuned(tmp_path):
    """Tuning has seeds of its own, so that only the results are run anew."""
    given = OPTIONS | {"tune": {"client_lr": [0.001, 0.3]}, "fine_tune_epochs": 0}
    given |= {"folder": tmp_path / "study", "client_lr": 0.5}
    for seeds in (1, 2):
        with pytest.warns(UserWarning, match="client_lr=0.5 has no effect"):
            ran = build.study(["fedavg"], **given, seeds=seeds).run(progress=False)
        assert ran.runs()["fedavg"].clients["seeds"].tolist() == [*range(seeds)]
    names = sorted(path.name for path in (tmp_path / "study" / "runs").iterdir())
    assert [name.partition("-")[0] for name in names] == [
        "fedavg",
        "fedavg",
        "fedavg.tune",
    ]
    assert "client_lr=0.5 has no effect, as it is tuned" in ran.notes
    (tuned,) = ran.schedule.tuning("", "fedavg")
    path = tmp_path / "study" / "cells" / "fedavg.tune.json"
    held = json.loads(path.read_text())
    assert held["key"] == tuned.key != tuned.before
    held |= {"key": tuned.before}  # of an earlier version
    path.write_text(json.dumps(held))
    assert build.study(["fedavg"], **given, seeds=2).choices()
    text = json.dumps(tuned.before, sort_keys=True)
    place = f"fedavg.tune-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    path.rename(path.with_name(f"{place}.json"))  # of one that had grown
    path.write_text(json.dumps({"key": held["key"] | {"rounds": 9}}))
    shutil.move(*(tmp_path / "study" / "runs" / n for n in ("fedavg.tune", place)))
    assert build.study(["fedavg"], **given, seeds=2).choices()


def test_more_rounds_and_other_options_of_one_study(tmp_path):
    """More rounds go on; other options have folders of their own, whatever is lost."""

    def study(**more):
        given = OPTIONS | {"tune": {}, "fine_tune_epochs": 0, "val_split": 0.0} | more
        return build.study(["fedavg"], folder=tmp_path / "study", **given)

    first, second = study(rounds=1).run(progress=False), study(rounds=2)
    begun = first.runs()["fedavg"].records[0]
    assert second.run(progress=False).runs()["fedavg"].records[0] == begun
    runs = tmp_path / "study" / "runs"
    assert [one.name for one in runs.iterdir()] == ["fedavg"]
    other = study(rounds=2, client_lr=0.3).run(progress=False)
    assert not other.failed and len(list(runs.iterdir())) == 2
    packed = build.load(second.run(progress=False).pack(tmp_path / "a.zip"))
    assert packed.asked.given == build.load(tmp_path / "study").asked.given
    (tmp_path / "study" / "cells" / "fedavg.json").unlink()
    again = study(rounds=2, client_lr=0.3)
    assert "finished" in again.lines()[0] and not again.run(progress=False).failed
    assert not study(rounds=2).run(progress=False).failed
    assert len(list(runs.iterdir())) == 2


def test_what_a_trial_goes_on():
    """The same run, or one of fewer rounds, of which a sweep keeps nothing."""
    held = {"algo": "fedavg", "rounds": 3, "client_lr": 0.1}
    swept, more = {"sweep": {"client_lr": [0.1]}}, {"rounds": 9}
    assert trials.goes_on(held, dict(held)) and trials.goes_on(held, held | more)
    for other in ({"rounds": 2}, {"client_lr": 0.3}, more | {"client_lr": 0.3}, swept):
        assert not trials.goes_on(held, held | other)
    assert trials.goes_on(held | swept, held | swept)
    assert not trials.goes_on(held | swept, held | swept | more)
    assert not trials.goes_on({"algo": "fedavg"}, {"algo": "fedavg", "rounds": 3})


def test_options_as_json():
    """Numbers of NumPy and paths are plain; of objects a name stays at most."""
    numbers = {"rounds": np.int64(3), "client_lr": np.float32(0.5), "exclusive": True}
    given = numbers | {"values": (1, [np.int32(2), None]), "path": pathlib.Path("a/b")}
    plain = {"rounds": 3, "client_lr": 0.5, "exclusive": True}
    plain |= {"values": [1, [2, None]], "path": "a/b"}
    found = trials.as_json(given)
    assert json.loads(json.dumps(found)) == plain and not trials.is_of_python(found)
    for value, word in ((X, ""), ((X, Y), ""), (made, ": made")):
        found = trials.as_json({"dataset": value})
        assert trials.is_of_python(found)
        assert found["dataset"] == f"given in Python{word}"


def part_way(share):
    """FedAvg whose server goes a share of the way, the same text for every share."""

    class Part:
        """The server goes a share of the way."""

        HParams = averaging.Averaging

        @staticmethod
        def make(hparams, task):
            loss_fn = local_training.cross_entropy_loss(task.model)

            def client_update(client, server):
                return local_training.train(hparams, loss_fn, server, client)

            def step(server, mean, key):
                return jax.tree.map(lambda a, b: a + share * (b - a), server, mean)

            return averaging.make(hparams, task, client_update, step=step)

    return Part


def test_own_code_of_one_text_is_told_apart(tmp_path):
    """By what it computes: none of two rows is a copy, nor a finished one kept."""
    given = {"tune": {}, "seeds": 1, "rounds": 1, "control": ""}

    def ran(**shares):
        rows = {name: {"algo": part_way(share)} for name, share in shares.items()}
        return made(tmp_path, rows, **given).run(progress=False).runs()

    first = ran(none=0.0, whole=1.0)
    then = ran(none=0.5, whole=1.0)
    every = first["none"], first["whole"], then["none"]
    assert len({one.summary["parameters_sha256"] for one in every}) == 3
    assert first["whole"].path == then["whole"].path != then["none"].path


def test_a_study_knows_its_public_set(tmp_path):
    """Another one of the same name is no data with which the study began."""
    path = tmp_path / "public.npz"
    own = {"public_set": f"npz:{path}", "algo": "fedmd"}
    given = {"tune": {}, "seeds": 1, "rounds": 1, "control": "", "fine_tune_epochs": 0}

    def study(seed):
        x = np.random.default_rng(seed).normal(size=(20, 5)).astype(np.float32)
        np.savez(path, x=x, y=np.arange(20) % 2)
        return made(tmp_path / "study", {"fedmd": own}, **given)

    one, same, other = (
        study(seed).schedule.final("", "fedmd").key for seed in (0, 0, 1)
    )
    assert one == same != other


def test_a_row_that_runs_out_of_memory_ends_no_study(tmp_path, monkeypatch):
    """As a GPU's says; other errors of jax are not hidden."""
    text = ["RESOURCE_EXHAUSTED: Out of memory"]

    def full(made, *_):
        if made.config.algo == "local":
            raise jax.errors.JaxRuntimeError(text[0])
        return True

    monkeypatch.setattr(trials, "train", full)
    given = {"tune": {}, "seeds": 1, "rounds": 1}
    with pytest.warns(UserWarning, match="local failed: out of memory of the device"):
        ran = made(tmp_path, ["local", "fedavg"], **given).run(progress=False)
    assert ran.failed == ["local"]
    text[0] = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        made(tmp_path, ["local"], **given).run(progress=False)


def test_clients_of_a_trial_are_known_by_their_rows(tmp_path):
    """Those of the first seed, however many are padded or beside it."""

    def of(*seeds, availability=""):
        data = types.SimpleNamespace(partition={"row": np.array(seeds)})
        config = types.SimpleNamespace(availability=availability, client_speed="")
        run = types.SimpleNamespace(data=data, config=config)
        return trials.split_sha256(run)

    wanted = of([3, 1, 2])
    assert of([3, 1, 2, -1]) == of([3, 1, 2], [1, 2, 3]) == wanted
    assert len({wanted, of([1, 3, 2]), of([3, 1]), of([1, 2, 3], [3, 1, 2])}) == 4
    (tmp_path / "who.json").write_text("[1, 0.5]")
    assert of([3, 1, 2], availability="0.5") == wanted
    assert of([3, 1, 2], availability=f"file:{tmp_path}/who.json") != wanted


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"shard": "1/2"}, "shard='1/2': expected (i, n), such as (1, 2)"),
        ({"shard": (1.0, 2)}, "shard=(1.0, 2): expected (i, n), such as (1, 2)"),
        ({"shard": (3, 2)}, "shard=3/2: expected 1/2 to 2/2"),
        ({"cell_timeout": "5"}, "cell_timeout='5': expected minutes, 0 = never"),
        ({"cell_timeout": -5}, "cell_timeout=-5: expected minutes, 0 = never"),
    ],
)
def test_a_run_refuses_in_a_line(given, line, done):
    """A shard or minutes that are none, before any trial."""
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        done.run(progress=False, **given)


def test_what_a_shard_would_run(alone):
    """Its own trials and minutes; a shard that is none is refused as by a run."""
    study = alone()
    lines = study.lines()
    assert [study.lines((n, 2)) for n in (1, 2)] == [[lines[0]], [lines[1]]]
    for asked in (study.lines, study.estimate):
        with pytest.raises(ValueError, match="shard=5/2: expected 1/2 to 2/2"):
            asked((5, 2))


def test_a_share_is_a_number(done):
    """And no text of one."""
    line = "until='0.9': expected a share above 0, such as 0.95"
    with pytest.raises(ValueError, match=f"^{line}$"):
        done.table(["until_rounds"], until="0.9")


@pytest.mark.parametrize("minutes", [0, 2])
def test_a_trial_has_its_minutes(minutes, monkeypatch):
    """Asked after each call; 0 are no limit."""
    now, said, seen = [100.0], [], []
    monkeypatch.setattr(trials.time, "monotonic", lambda: now[0])

    class Cut(types.SimpleNamespace):
        is_over = False

        def train(self, asked, folder, progress, others):
            for now[0] in (101.0, 219.0, 221.0):
                [one.on_call(self, None) for one in others]
                asked.agree()
                seen.append(bool(asked))

    folder = types.SimpleNamespace(open=lambda: None)
    cut = Cut(folder=contextlib.nullcontext(folder))
    assert trials.train(cut, False, minutes, lambda: said.append(1)) == (not minutes)
    assert seen == [False, False, bool(minutes)] and said == [1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_trials(number):
    """Not only the one that it cut."""

    def train(asked, *_, **options):
        asked.ask(number)
        asked.agree()

    folder = types.SimpleNamespace(open=lambda: None, path="some")
    cut = types.SimpleNamespace(folder=contextlib.nullcontext(folder), train=train)
    with pytest.raises(KeyboardInterrupt, match="stopped in some; run.. continues"):
        trials.train(cut, False, 1)


def test_changed_data_are_refused(tmp_path):
    """What is left of a study does not run on other data."""
    path = tmp_path / "mine.npz"
    np.savez(path, x=X, y=Y)
    options = OPTIONS | {"dataset": f"npz:{path}", "fine_tune_epochs": 0}
    given = {"tune": TUNE, "folder": tmp_path / "study", **options}
    build.study(["fedavg"], **given).run(progress=False, cell_timeout=1e-9)
    np.savez(path, x=X + 1, y=Y)
    with pytest.warns(UserWarning, match="the data have changed"):
        again = build.study(["fedavg"], **given).run(progress=False)
    assert again.failed == ["fedavg.tune"]


@pytest.mark.parametrize("tune", [{}, TUNE])
def test_changed_clients_are_refused(tmp_path, tune):
    """The same rows, dealt out otherwise, as a later version's default might."""
    np.savez(tmp_path / "mine.npz", x=X, y=Y)
    more = {"dataset": f"npz:{tmp_path}/mine.npz", "fine_tune_epochs": 0}
    more |= {"partition": f"file:{tmp_path}/rows.npz", "tune": tune}
    each = len(Y) // 6
    rows = np.arange(5 * each)

    def study():
        held = {"train_row": rows, "train_count": [each] * 5}
        held |= {"test_row": np.arange(5 * each, 5 * each + 5), "test_count": [1] * 5}
        np.savez(tmp_path / "rows.npz", **held)
        return build.study(["fedavg"], folder=tmp_path / "study", **OPTIONS | more)

    study().run(progress=False, cell_timeout=1e-9)
    rows = rows[::-1]
    with pytest.warns(UserWarning, match="the rows of the clients have changed since"):
        assert study().run(progress=False).failed


def test_shards_with_data_in_different_folders(alone, tmp_path):
    """Where data are is no part of what a trial is: a copy of shards is whole."""
    given = {"methods": ["local", "fedavg"], "seeds": 1, "tune": {}, "control": ""}
    given |= {"fine_tune_epochs": 0}

    def shard(index):
        folder, where = tmp_path / f"m{index}", tmp_path / f"data{index}"
        study = made(folder, **given, data_dir=str(where))
        return study.run(progress=False, shard=(index, 2)).folder

    shutil.copytree(shard(2), shard(1), dirs_exist_ok=True)
    for more in ({}, {"data_dir": str(tmp_path / "data3")}):
        merged = made(tmp_path / "m1", **given, **more)
        assert all(one.endswith("finished") for one in merged.lines())
    assert len(list((merged.folder / "runs").iterdir())) == 2


def test_a_relative_folder_stays_where_it_is(alone, tmp_path, monkeypatch):
    """Also for a pack with its absolute path, and if the process moves."""
    monkeypatch.chdir(tmp_path)
    given = {"methods": ["local"], "seeds": 1, "tune": {}, "control": ""}
    study = made("here", **given, fine_tune_epochs=0, rounds=1).run(progress=False)
    assert str(study.folder) == "here"
    for _ in range(2):
        packed = study.pack(tmp_path / "here" / "mine.zip")
        with zipfile.ZipFile(packed) as file:
            assert not [one for one in file.namelist() if "zip" in one]
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    assert study.lines()[0].endswith("finished")
    assert study.run(progress=False).table(["client_accuracy"]).rows == ["local"]
    assert not list((tmp_path / "there").iterdir())


def test_a_pack_that_finds_no_room_leaves_the_old_one(alone, tmp_path, monkeypatch):
    """And nothing of its own."""
    study = alone().run(progress=False)
    study.pack(tmp_path / "mine.zip")
    before = (tmp_path / "mine.zip").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(OSError, match="No space"):
        study.pack(tmp_path / "mine.zip")
    assert (tmp_path / "mine.zip").read_bytes() == before
    assert [one.name for one in tmp_path.glob("*.zip*")] == ["mine.zip"]


def test_a_file_that_another_process_writes(alone, tmp_path):
    """A shard that begins at once, or a kill, leaves no folder to refuse."""
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.json.77.partial").write_text("{")
    assert not alone().run(progress=False, shard=(1, 2)).failed


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_damaged_trial_is_mended_or_named(is_kept, alone):
    """From its checkpoint, or with the folder to remove."""
    study = alone().run(progress=False)
    run, expected = study.folder / "runs" / "fedavg", study.table().to_markdown()
    (run / "clients.npz").unlink()
    if not is_kept:
        shutil.rmtree(run / "checkpoints")
    again = alone()
    with pytest.raises(ValueError, match=r"clients.npz is missing; run\(\) mends it"):
        again.table()
    if is_kept:
        again.run(progress=False)
    else:
        cure = f"clients.npz is missing; remove {run}, and run"
        with pytest.warns(UserWarning, match=cure):
            assert again.run(progress=False).failed == ["fedavg"]
        shutil.rmtree(run)
        again = alone().run(progress=False)
    assert not again.failed and again.table().to_markdown() == expected


def test_a_damaged_run_of_tuning(tmp_path):
    """It is mended before its method goes on, and keeps no other method waiting."""
    given = {"tune": {"local_epochs": [1, 2]}, "control": "", "seeds": 1}
    given |= {"methods": ["fedavg", "local"], "fine_tune_epochs": 0, "rounds": 1}
    study = made(tmp_path / "study", **given).run(progress=False)
    expected = study.table().to_markdown()
    folder = study.folder / "runs" / "fedavg.tune,local_epochs=1"
    (folder / "clients.npz").unlink()
    again = made(tmp_path / "study", **given)
    assert len(again.lines()) == 6
    assert not again.run(progress=False).failed
    assert again.table().to_markdown() == expected
    (folder / "clients.npz").unlink()
    shutil.rmtree(folder / "checkpoints")
    again = made(tmp_path / "study", **given)
    with pytest.warns(UserWarning, match=f"remove {folder}, and run"):
        assert again.run(progress=False).failed == ["fedavg.tune,local_epochs=1"]
    assert [row for row, *_ in again.choices()] == ["local"]


def test_what_else_a_run_writes(alone):
    """Asked for later it is another run, as what is finished has no such file."""
    study = alone().run(progress=False)
    asked = made(
        study.folder, methods=["local"], seeds=1, tune={}, control="", csv=True
    )
    assert asked.lines()[0].endswith("to run")


def test_damaged_files_of_a_study_are_named(alone):
    """A summary or a study that is JSON of another form."""
    study = alone().run(progress=False)
    (study.folder / "runs" / "local" / "summary.json").write_text("5")
    with pytest.raises(ValueError, match="summary.json is damaged: it is an integer"):
        alone().table()
    path = study.folder / "study.json"
    held = json.loads(path.read_text())
    for parts in ([{}, {}, {}, []], [1, 2, 3, 4], held["prepared"][:3]):
        path.write_text(json.dumps(held | {"prepared": parts}))
        with pytest.raises(ValueError, match="is of another study, or damaged: it"):
            build.load(study.folder)


def test_a_metric_of_one_setting_is_there():
    """No line says that no run has what only a setting that has run has."""
    more = {"tune": {}, "control": "", "fine_tune_epochs": 0, "val_split": 0.0}
    settings = {"one": {}, "other": {"local_epochs": 2}}
    study = made(methods=["local"], settings=settings, seeds=1, **more)
    names = ["client_accuracy", "c_gen"]
    lines = study.run(progress=False, shard=(1, 2)).table(names).notes
    missing = [line for line in lines if "no finished run" in line]
    assert missing == ["c_gen: no finished run has this metric."]


def test_another_first_model_is_another_run(tmp_path):
    """A study that grows has all its rows from the file as it is now."""
    np.savez(tmp_path / "mine.npz", x=X, y=Y)
    more = {"fine_tune_epochs": 0, "val_split": 0.0, "rounds": 1}
    more |= {"dataset": f"npz:{tmp_path}/mine.npz"}
    given = more | {"init_from": str(tmp_path / "first.msgpack")}

    def study(*methods):
        return build.study(methods, folder=tmp_path / "study", **OPTIONS | given)

    for seed in range(2):
        first = build.experiment(algo="fedavg", seed=seed, **OPTIONS | more)
        first.save_model(given["init_from"])
        if seed:
            with pytest.warns(UserWarning, match="the first model, the teacher or"):
                assert study("local", "fedavg").run(progress=False).failed
            assert study("local", "fedavg", "fedprox").lines()[0].endswith("to run")
        else:
            study("local", "fedavg").run(progress=False, shard=(1, 2))
            assert study("local", "fedavg").lines()[0].endswith("finished")


def test_metrics_of_some_settings_or_rows():
    """One that has the metric is enough, in whichever order."""
    given = {"metrics": ["unseen_accuracy"], "control": "", "fine_tune_epochs": 0}
    settings = {"all": {}, "new": {"unseen_clients": 1}}
    assert made(methods=["fedavg"], settings=settings, **given).asked.metrics
    own = {"algo": "fedavg"}
    rows = {"a": own, "b": own | {"fine_tune_epochs": 1}}
    given |= {"metrics": ["fine_tuned_accuracy"]}
    assert made(methods=rows, **given).asked.metrics


def test_metrics_of_methods_are_known():
    """Those that a kept cell of a paper's table has are none that look misspelt."""
    seen: set[str] = set()
    for path in (KEPT.parents[1] / "papers" / "results").glob("*.json"):
        cells = json.loads(path.read_text()).values()
        for names in (one.get("metrics", {}) for one in cells if isinstance(one, dict)):
            assert not list(filter(None, map(derived.unusual, names))), path.name
            seen.update(names)
    assert {"c_gen", "client_accuracy", "global_accuracy"} <= seen


@pytest.mark.parametrize("name", ["fashion_mnist", "femnist_writers"])
def test_kept_studies_open(name):
    """Studies of earlier versions are finished, as RESULTS.md says of these files."""
    study = build.load(KEPT / f"{name}.zip")
    assert all(line.endswith(" finished") for line in study.lines())
    assert all(all(study.runs(setting).values()) for setting in study.settings)


@pytest.mark.parametrize("missing", [0, 7])
def test_wilcoxon_is_scipy_s(missing):
    """One seed gives scipy's p; seeds are combined by Stouffer, in both directions.

    A seed weighs by the root of its number of clients.
    """
    one, other = GEN.normal(size=(2, 2, 12))
    one[1, 12 - missing :] = np.nan
    size = np.array([12, 12 - missing])
    found, _ = significance.wilcoxon(one[:1], other[:1])
    assert found == pytest.approx(stats.wilcoxon(one[0], other[0]).pvalue)
    sides = []
    for side in ("greater", "less"):
        gaps = [gap[np.isfinite(gap)] for gap in one - other]
        scores = [
            stats.norm.isf(stats.wilcoxon(gap, alternative=side).pvalue) for gap in gaps
        ]
        total = np.sqrt(size) @ scores
        sides.append(stats.norm.sf(total / np.sqrt(size.sum())))
    expected = min(1, 2 * min(sides))
    (p, side), turned = (
        significance.wilcoxon(one, other),
        significance.wilcoxon(other, one),
    )
    assert p == pytest.approx(expected) and turned == (pytest.approx(p), -side)
    assert side == (1 if sides[0] < sides[1] else -1)
    assert significance.wilcoxon(one, one) == (1, 0)


def test_a_single_client_does_not_outvote_all_seeds():
    """An exact p-value of 1 in one seed is a weak score, and not minus infinity."""
    gain = np.array([[0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08]] * 3)
    gain[2] = [-0.01, *[0] * 7]
    p, side = significance.wilcoxon(gain, np.zeros_like(gain))
    assert p < 0.01 and side == 1


def test_ties_are_ties():
    """Accuracies of equal rows have equal differences, whatever floats say."""
    one, other = np.array([[[3, 5, 2, 9, 7, 6, 4, 8]], [[2, 4, 1, 8, 6, 7, 5, 9]]])
    whole = significance.wilcoxon(one * 1.0, other * 1.0)
    assert significance.wilcoxon(one / 10, other / 10) == whole


def test_holm_is_the_definition():
    """The adjusted p is the largest of (m - rank) p up to its rank, at most 1."""
    values = GEN.uniform(0, 0.3, 7)
    ordered = np.sort(values)
    steps = np.maximum.accumulate((7 - np.arange(7)) * ordered)
    expected = np.minimum(1, steps)[np.argsort(np.argsort(values))]
    assert significance.holm(values) == pytest.approx(expected)


def test_derived_numbers(done):
    """Hurt, gain, the worst tenth and rounds until, by plain numpy."""
    runs = done.runs()
    mine, base = (
        np.nanmean(runs[row].clients["accuracy"], 1) for row in ("fedavg", "local")
    )
    found = {
        n: derived.of(n, runs["fedavg"], runs["local"], derived.Goal(0.5))
        for n in derived.TITLES
    }
    assert found["hurt"]["per_seed"] == pytest.approx((mine < base - 1e-9).mean(1))
    assert found["gain"]["per_seed"] == pytest.approx((mine - base).mean(1))
    assert found["bottom_decile"]["per_seed"] == pytest.approx(mine.min(1))
    for seed, rounds in enumerate(found["until_rounds"]["per_seed"]):
        curve = [r for r in runs["fedavg"].records if r["seed"] == seed]
        reached = [r for r in curve if r["client_accuracy"] >= base[seed].mean() / 2]
        assert rounds == reached[0]["round"]
    assert found["until_clock"] is None


def test_a_target_needs_no_control(done, tmp_path):
    """The first evaluated round with the value itself, by plain Python."""
    curve = [r for r in done.runs()["fedavg"].records if "client_accuracy" in r]
    goal = min(
        max(r["client_accuracy"] for r in curve if r["seed"] == s) for s in (0, 1)
    )
    reached = [
        next(
            r["round"] for r in curve if r["seed"] == s and r["client_accuracy"] >= goal
        )
        for s in (0, 1)
    ]
    shown = done.table(["until_rounds", "hurt"], control="", target=goal)
    named = dict(zip(shown.rows, shown.columns[0].values, strict=True))
    assert named["fedavg"].mean == np.mean(reached)
    said = f"Rounds until: until the mean over clients reaches {100 * goal:g} %."
    assert said in shown.notes
    assert "Hurt: these compare with a control, and none is given." in shown.notes
    never = done.table(["until_rounds"], control="", target=1)
    assert all(one.mean is None for one in never.columns[0].values)
    assert "Never there: Local, FedAvg, FedAvg + FT." in never.notes
    usual = done.table(control="", target=goal)
    assert "Rounds until" in [one.metric.title for one in usual.columns]
    line = "target=0.1 is in no column; give metrics such as until_rounds."
    assert line in done.table(["hurt"], target=0.1).notes
    for given, line in (
        ({"target": 80}, "target=80: accuracies are fractions; give 0.8"),
        ({"target": "80%"}, "target='80%': expected a value above 0, such as 0.8"),
        ({"target": 0.5, "until": 0.9}, "a value itself; give one of them"),
    ):
        with pytest.raises(ValueError, match=line):
            done.table(["until_rounds"], **given)


def test_a_row_with_an_optimizer_is_not_tuned_in_what_that_replaces():
    """Its rate is its own, and other rows are tuned as usual."""
    rows = {
        "fixed": {"algo": "local", "client_optimizer": optax.sgd(0.1)},
        "free": {"algo": "local", "client_optimizer": optax.sgd},
    }
    tune = {"client_lr": [0.01, 0.1], "weight_decay": [0.0, 0.1]}
    ran = build.study(rows, tune=tune, **OPTIONS | {"rounds": 1})
    lines = [one for one in ran.notes if "is not tuned in" in one]
    assert [re.sub(r" has .* in ", ": ", one) for one in lines] == [
        "fixed: client_lr",
        "fixed: weight_decay",
        "free: weight_decay",
    ]
    assert "optimizer own_" in lines[0]
    assert not ran.schedule.tuning("", "fixed")
    ran.run(progress=False)
    assert set(ran.schedule.choice("", "free").options) == {"client_lr"}
    assert all(ran.table(["client_accuracy"]).columns[0].values)


def test_a_study_has_a_target(tmp_path):
    """As an argument and in its file; a share of the control's result stands first."""
    given = {"metrics": ["until_rounds"], "target": 0.1, **OPTIONS, "rounds": 1}
    with pytest.raises(ValueError, match="target=-1: expected a value above 0"):
        build.study(["local"], **given | {"target": -1})
    with pytest.raises(ValueError, match="target=80: accuracies are fractions; give"):
        build.study(["local"], **given | {"target": 80})
    ran = build.study(["local", "fedavg"], folder=tmp_path, **given)
    ran.run(progress=False)
    again = protocol.opened(tmp_path)
    for one in (ran, again):
        assert "reaches 10 %" in " ".join(one.table().notes)
    said = " ".join(again.table(until=0.9, control="local").notes)
    assert "reaches 0.9 of Local's" in said
    table = {"rows": {"local": {}}, "target": "high"}
    (tmp_path / "mine.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match="its target is a text, a number is expected"):
        protocol.read(tmp_path / "mine.json")


def of_a_text(scale):
    """A finished run of a text: perplexities of 29 clients, and curves that fall."""
    values = scale * np.random.default_rng(5).uniform(20, 40, (2, 1, 29))
    means = values[:, 0].mean(1)
    entry = {"mean": means.mean(), "std": 1.0, "per_seed": [*means]}
    records = [
        {"seed": seed, "round": n, "client_perplexity": mean * (1.3 - 0.1 * n)}
        for seed, mean in enumerate(means)
        for n in range(4)
    ]
    summary = {"metrics": {"client_perplexity": entry}}
    return record.Record(None, {}, records, {"perplexity": values}, summary)


def test_derived_numbers_of_perplexities():
    """Hurt are higher ones, the worst tenth is the highest, and a goal lies above."""
    mine, base = of_a_text(0.9), of_a_text(1.0)
    found = {n: derived.of(n, mine, base, derived.Goal(0.9)) for n in derived.TITLES}
    one, other = (run.clients["perplexity"][:, 0] for run in (mine, base))
    assert found["hurt"]["mean"] == 0
    assert derived.of("hurt", base, mine, derived.Goal(0.9))["mean"] == 1
    assert found["gain"]["per_seed"] == pytest.approx((one - other).mean(1))
    worst = np.sort(one)[:, -2:].mean(1)
    assert found["bottom_decile"]["per_seed"] == pytest.approx(worst)
    # .9 (1.3 - .1 n) <= 1 / .9 from round 1 on
    assert found["until_rounds"]["per_seed"] == [1, 1]
    goal = derived.goal(None, 29)
    first = [
        next(r["round"] for r in mine.records if r["seed"] == s and r[PERPLEXITY] <= 29)
        for s in (0, 1)
    ]
    assert derived.of("until_rounds", mine, None, goal)["per_seed"] == first
    line = table._reached([mine], goal, "")
    assert line == f"{words.title(PERPLEXITY)} is down to 29"


def test_a_goal_of_the_server():
    """Where no test row is a client's it is the server's model that reaches it."""
    entry = {"mean": 0.8, "std": 0.0, "per_seed": [0.8]}
    records = [{"seed": 0, "round": n, "global_accuracy": n / 5} for n in range(5)]
    summary = {"metrics": {"global_accuracy": entry}}
    run = record.Record(None, {}, records, {}, summary)
    found = derived.of("until_rounds", run, None, derived.goal(None, 0.5))
    assert found["per_seed"] == [3]
    assert table._reached([run], derived.Goal(), "A") == "Global reaches 0.95 of A's"
    assert derived.of("until_rounds", run, None, derived.goal(None, 0.9)) == {}
    unknown = run._replace(records=[{"seed": 0, "round": 0}])
    assert derived.of("until_rounds", unknown, None, derived.goal(None, 0.9)) is None


def test_what_has_no_folder_says_so_once(capsys):
    """A comparison is gone with the process as a whole."""
    build.compare(["local", "fedavg"], **OPTIONS | {"rounds": 1})
    assert capsys.readouterr().out.count("gone with the process") == 1


def test_memory_of_fine_tuning():
    """Its program is among those that are planned ahead and estimated."""
    run = build.experiment(algo="fedavg", **OPTIONS)
    assert run.program.names[-1] == "of_adapted"
    planned = memory.planned_bytes(run.simulation.ahead("of_adapted"))
    assert planned > 0 and "of_adapted" in run.simulation.lowered()
    small = OPTIONS | {"local_epochs": 1, "fine_tune_epochs": 0}
    shown = [build.study(["fedavg"], **one).estimate() for one in (OPTIONS, small)]
    assert shown[0].methods[0].megabytes >= max(
        planned / 1e6, shown[1].methods[0].megabytes
    )


class _Timed:
    """A method whose rounds, evaluations and programs take what a test says."""

    def __init__(self, rounds, of_round, clock):
        self.config, self.totals = types.SimpleNamespace(rounds=rounds), self
        self.simulation, self.program = self, self
        self.round, self.names, self.compile_seconds = 0, ("rounds", "of_clients"), 0
        self.seconds, self._of_round, self._clock = 0.0, of_round, clock

    def advance_to(self, until):
        first = 7.0 if self.round == 0 else 0.0
        self.compile_seconds += 5 if first else 0
        self.seconds += first + (until - self.round - bool(first)) * self._of_round
        self.round = until

    def evaluate(self):
        is_compiled = self.compile_seconds > 5
        self.compile_seconds += 0 if is_compiled else 4
        self._clock[0] += 2 if is_compiled else 6

    def evaluations_after(self, round):
        return self.config.rounds - round  # also at the start

    def ahead(self, name):
        return {"rounds": 3e6, "of_clients": 8e6}[name]


@pytest.mark.parametrize(
    "rounds, of_round, reached",
    [(20, 0.125, 5), (20, 0.625, 3), (3, 0.125, 3), (2, 4.0, 2), (1, 7.0, 1)],
)
def test_an_estimate_by_hand(rounds, of_round, reached, monkeypatch):
    """The first round counts only where there is no other, and finished trials not."""
    clock = [0.0]
    watch = types.SimpleNamespace(perf_counter=lambda: clock[0])
    monkeypatch.setattr(estimates, "time", watch)
    monkeypatch.setattr(memory, "planned_bytes", lambda program: program)
    timed = _Timed(rounds, of_round, clock)
    found = estimates.of(timed, "some", [6, 6, 2], finished=1)
    assert timed.round == reached
    # Eight runs are left in two trials, each of which compiles for 9 s.
    seconds = 8 * (rounds * of_round + (rounds + 1) * 2) + 2 * 9
    assert found.minutes == pytest.approx(seconds / 60)
    assert found[:3] == ("some", 3, 1) and found.megabytes == 8
    both = estimates.Estimate([found, found._replace(name="other", minutes=100.0)])
    assert both.minutes == pytest.approx(seconds / 60 + 100)


def test_comparisons_have_derived_columns():
    """Beside a control a comparison has the same numbers as a study's table."""
    compared = build.compare(["local", "fedavg"], progress=False, **OPTIONS)
    frame = compared.summary(control="local")
    mine, base = (
        np.nanmean(compared[name].kept.arrays[0, :, 0], 0)
        for name in ("fedavg", "local")
    )
    assert frame.loc["fedavg", "hurt"] == pytest.approx((mine < base - 1e-9).mean())
    assert frame.loc["local", ["hurt", "gain"]].tolist() == [0, 0]
    with pytest.raises(ValueError, match="expected one of local, fedavg"):
        compared.summary(control="fedper")
    with pytest.raises(ValueError, match="until=0.5 is a share of a control's"):
        compared.summary(until=0.5)
    alone = compared.summary(target=0.01)
    assert alone["until_rounds"].tolist() == [0, 0] and "hurt" not in alone
    assert compared.summary(target=1)["until_rounds"].isna().all()
    assert "until_clock" not in compared.summary(target=1)
    swept = build.compare(
        ["local"], sweep={"client_lr": [0.1, 0.2]}, run=False, **OPTIONS
    )
    with pytest.raises(ValueError, match="target=0.5: local is a sweep; omit it"):
        swept.summary(target=0.5)


def test_values_of_clients_are_behind_the_metrics(done):
    """Means over clients are the summary's, of seen and unseen clients."""
    given = OPTIONS | {"unseen_clients": 2, "sweep": {"client_lr": [0.1, 0.3]}}
    ran = build.experiment(algo="fedavg", num_seeds=2, **given)
    ran.run(progress=False)
    checked = 0
    for run in frames._runs(ran):
        every = ran.summary()["sweep"]
        metrics = next(part for part in every if part["point"] == run.point)
        for name in ("client", "unseen", "fine_tuned", "unseen_fine_tuned"):
            values = record.client_values(run, f"{name}_accuracy")
            expected = metrics["metrics"][f"{name}_accuracy"]["per_seed"]
            assert np.nanmean(values, 1) == pytest.approx(expected)
            assert np.isfinite(values).sum() == (4 if "unseen" in name else 6)
            checked += 1
        assert record.client_values(run, "global_accuracy") is None
    assert checked == 8


def beside(how, values):
    """The column of these clients' values beside the control `a`."""
    entries = {
        row: {"mean": one.mean(), "std": 0.01, "per_seed": list(one.mean(1))}
        for row, one in values.items()
    }
    return table._values(how, entries, values, "a")


def test_one_seed_is_no_veto():
    """A seed that says the opposite has its weight, however sure it is.

    Its p-value has no digits to be told from 1. For many clients the test is a normal
    score of the sum of ranks, so that scores add up.
    """
    gen = np.random.default_rng(0)
    gaps = gen.normal([[0.5]] * 4 + [[-0.5]], 1, (5, 400))
    p, side = significance.wilcoxon(gaps, np.zeros_like(gaps))
    rank = [stats.rankdata(np.abs(gap))[gap > 0].sum() for gap in gaps]
    mean, var = 400 * 401 / 4, 400 * 401 * 801 / 24
    score = np.sum((np.array(rank) - mean) / np.sqrt(var)) / np.sqrt(5)
    assert side == 1 and p == pytest.approx(2 * stats.norm.sf(score), rel=0.01)
    p, side = significance.wilcoxon(np.zeros_like(gaps), gaps)
    assert side == -1 and p == pytest.approx(2 * stats.norm.sf(score), rel=0.01)


@pytest.mark.parametrize("count", [2, 7, 13])
def test_few_clients_with_ties_are_scipy_s(count):
    """Exact, by all signs of the differences."""
    gap = np.round(np.random.default_rng(count).normal(0.5, 1, count), 1)
    gap[gap == 0] = 0.1
    gap[: count // 2] = np.abs(gap[0])
    for side, found in zip(("greater", "less"), significance._sides(gap), strict=True):
        exact = stats.PermutationMethod(n_resamples=np.inf)
        wanted = stats.wilcoxon(gap, alternative=side, method=exact).pvalue
        assert found == pytest.approx(wanted, rel=1e-12)


def pair(name, **changed):
    """A finished run of two seeds and three clients, with some parts changed."""
    values = np.array([[[0.5, 0.6, 0.7]], [[0.4, 0.5, 0.6]]])
    means = values.mean((1, 2))
    entry = {"mean": means.mean(), "std": 0.1, "per_seed": list(means)}
    flags = {"algo": name, "rounds": "4", "eval_sample": "0", "num_clients": "3"}
    flags["dataset"] = "arrays"
    summary = {"metrics": {"client_accuracy": entry}, "summary": "last"}
    records = [{"round": 4, "seed": seed} for seed in (0, 1)]
    clients = {"accuracy": values, "seeds": np.arange(2), "rounds": np.array([4])}
    run = record.Record(pathlib.Path(name), flags, records, clients, summary)
    return run._replace(**{n: getattr(run, n) | x for n, x in changed.items()})


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({}, ""),
        ({"flags": {"eval_sample": "2"}}, "clients measured (FedAvg; Local)"),
        ({"summary": {"summary": "best"}}, "summary (FedAvg; Local)"),
        (
            {"summary": {"summary": "best"}, "flags": {"eval_every": "2"}},
            "rounds between evaluations (FedAvg; Local), summary (FedAvg; Local)",
        ),
        ({"clients": {"seeds": np.array([0, 7])}}, "seeds (FedAvg; Local)"),
    ],
)
def test_unlike_rows_are_not_ranked(changed, reason):
    """As on a page of the same runs."""
    runs = {"fedavg": pair("fedavg"), "local": pair("local", **changed)}
    runs["fedavg"].flags.setdefault("eval_every", "1")
    runs["local"].flags.setdefault("eval_every", "1")
    made = table.made({"": runs}, ["client_accuracy"], "fedavg")
    is_bold = [value.is_best for value in made.columns[0].values]
    assert any(is_bold) == (not reason)
    line = f"No value is bold or marked, as the runs differ in {reason}."
    assert (line in made.notes) == bool(reason)


def of_text(name, **changed):
    """The same of a text, whose perplexities are 50 times as large."""
    run = pair(name)
    entry = run.summary["metrics"]["client_accuracy"]
    entry = {
        "mean": 50 * entry["mean"],
        "std": 5.0,
        "per_seed": [50 * one for one in entry["per_seed"]],
    }
    clients = {n: x for n, x in run.clients.items() if n != "accuracy"}
    clients["perplexity"] = 50 * run.clients["accuracy"]
    summary = run.summary | {"metrics": {"client_perplexity": entry}}
    return run._replace(clients=clients, summary=summary)


def test_settings_of_images_and_of_a_text():
    """Each has its own metric, unit and direction, whichever comes first."""
    images = {name: pair(name) for name in ("fedavg", "local")}
    texts = {name: of_text(name) for name in images}
    better = texts["local"].summary["metrics"]["client_perplexity"]
    better["mean"] -= 1
    for settings in ({"a": images, "b": texts}, {"b": texts, "a": images}):
        made = table.made(settings, [], "fedavg")
        shown = {(one.setting, one.metric.name): one for one in made.columns}
        decile = shown["b", "bottom_decile"]
        assert (decile.metric.unit, decile.metric.better) == ("", "lower")
        assert decile.values[0].text.startswith("32.5")  # the worst
        assert shown["a", "bottom_decile"].values[0].text.startswith("45.0")
        perplexity = shown["b", "client_perplexity"].values
        assert [one.is_best for one in perplexity][1]
        assert shown["a", "client_accuracy"].values[0].mean is not None
        until = " ".join(table.made(settings, ["until_rounds"], "fedavg").notes)
        assert "reaches 0.95 of FedAvg's" in until and "down to 1 / 0.95" in until


def test_a_first_row_that_diverged_decides_no_columns():
    """A text that diverged has no perplexities."""
    wild, tame = of_text("fedavg"), of_text("local")
    wild = wild._replace(
        summary=wild.summary | {"metrics": {}, "diverged": 1},
        records=[one | {"diverged": 1} for one in wild.records],
    )
    names = [
        [one.metric.name for one in table.made({"": runs}, [], "local").columns]
        for runs in ({"w": wild, "local": tame}, {"local": tame, "w": wild})
    ]
    assert names == [["client_perplexity", "bottom_decile", "hurt"]] * 2


def test_c_gen_of_other_clients_is_not_ranked():
    """Those of the next round beside all; other columns are ranked."""
    runs = {name: pair(name) for name in ("fedavg", "local")}
    flags = {"eval_clients": "selected", "clients_per_round": "2"}
    for one in runs.values():
        one.summary["metrics"]["c_gen"] = one.summary["metrics"]["client_accuracy"]
        one.flags.update(flags)
    for kind, is_apart in (("selected", False), ("all", True)):
        runs["local"].flags["eval_clients"] = kind
        made = table.made({"": runs}, ["client_accuracy", "c_gen"], "fedavg")
        ranked = [any(v.is_best for v in one.values) for one in made.columns]
        assert ranked == [True, not is_apart]
        line = "C-Gen: no value is bold or marked, as the runs differ in the number of "
        line += "clients behind it (FedAvg; Local)."
        assert is_apart == (line in made.notes)


def test_c_gen_is_of_no_unseen_clients():
    """So two of three clients of a round are as many as all, of which one is unseen."""
    runs = {name: pair(name) for name in ("fedavg", "local")}
    for kind, one in zip(("selected", "all"), runs.values(), strict=True):
        one.summary["metrics"]["c_gen"] = one.summary["metrics"]["client_accuracy"]
        one.flags.update(eval_clients=kind, clients_per_round="2")
        one.clients["unseen"] = np.array([[False, True, False]] * 2)
    made = table.made({"": runs}, ["c_gen"], "fedavg")
    assert any(value.is_best for value in made.columns[0].values)


def test_goals_of_runs_that_measured_other_rounds_are_not_ranked():
    """The same run reaches it later where it is measured less often."""

    def measured(name, rounds):
        rows = [
            {"round": n, "seed": seed, "client_accuracy": 0.6}
            | {"bytes_up": n, "bytes_down": n}
            for n in rounds
            for seed in (0, 1)
        ]
        return pair(name)._replace(records=rows)

    for rounds, is_same in (([1, 2, 4], True), ([4], False), ([1, 2, 4, 5], True)):
        runs = {"fedavg": measured("fedavg", [1, 2, 4]), "a": measured("a", rounds)}
        made = table.made({"": runs}, ["client_accuracy", "until_rounds"], "fedavg")
        bold = [any(v.is_best for v in one.values) for one in made.columns]
        assert bold == [True, is_same]
        line = "Rounds until: no value is bold or marked, as the runs differ in the "
        line += "rounds that were measured (FedAvg; a)."
        assert is_same != (line in made.notes)


def test_one_row_is_not_the_best():
    """Of rows that are not finished nothing is known; without a test a line says so."""
    runs = {"fedavg": pair("fedavg"), "local": None}
    made = table.made({"": runs}, ["client_accuracy"], "local")
    assert not any(value.is_best for value in made.columns[0].values)
    assert not any(line.startswith("Bold") for line in made.notes)
    wild = pair("local")
    wild = wild._replace(records=[one | {"diverged": 1} for one in wild.records])
    made = table.made({"": runs | {"local": wild}}, ["client_accuracy"], "local")
    assert not any(line.startswith("Bold") for line in made.notes)
    runs["local"] = pair("local")
    made = table.made({"": runs}, ["client_accuracy"], "local", test="none")
    assert any(value.is_best for value in made.columns[0].values)
    assert "Bold: the best." in made.notes


def test_one_seed_has_no_deviation():
    """Nor does the frame say 0."""
    run = pair("fedavg")
    run.summary["metrics"]["client_accuracy"] = {
        "mean": 0.5,
        "std": 0.0,
        "per_seed": [0.5],
    }
    made = table.made({"": {"fedavg": run}}, ["client_accuracy"], "")
    assert made.columns[0].values[0].std is None


def test_other_rounds_are_said():
    """A tuned number of rounds is part of a method."""
    runs = {"fedavg": pair("fedavg"), "local": pair("local", flags={"rounds": "2"})}
    made = table.made({"": runs}, ["client_accuracy"], "fedavg")
    assert "The runs differ in rounds (FedAvg; Local)." in made.notes
    assert any(value.is_best for value in made.columns[0].values)


def test_a_hash_of_more_than_the_data_tells_nothing():
    """Of runs with other public images, first models or files of availability."""
    plain = pair("local")
    plain = plain._replace(hashes={"data_sha256": "a", "split_sha256": "b"})
    other = plain._replace(hashes={"data_sha256": "c", "split_sha256": "d"})
    assert [*alike.unlike([("a", plain), ("b", other)])] == ["data", "clients"]
    for name, wanted in (
        ("public_set", []),
        ("init_from", ["clients"]),
        ("availability", ["data"]),
    ):
        one = other._replace(flags=other.flags | {name: "file"})
        assert [*alike.unlike([("a", plain), ("b", one)])] == wanted
    # A sweep of one value has no other points.
    points = [
        (name, plain._replace(point={"x": 1}, flags=plain.flags | {"algo": name}))
        for name in ("fedavg", "local", "local")
    ]
    assert alike.points(points) == ["local", "local"]


def test_points_of_a_sweep_are_not_ranked():
    """Test rows would choose one."""
    point = pair("fedavg")
    runs = {f"rate {x}": point._replace(point={"client_lr": x}) for x in (0.1, 0.2)}
    made = table.made({"": runs}, ["client_accuracy"], "")
    assert not any(value.is_best for value in made.columns[0].values)
    assert "are points of a sweep, of which test rows" in " ".join(made.notes)


def test_a_seed_without_a_mean_is_no_part_of_others():
    """Hurt, gain and bottom decile are of the seeds whose mean is known, and say so."""
    values = np.array([[[0.5, np.nan, 0.1]], [[0.4, 0.3, 0.6]]])
    entry = {"mean": 0.43, "std": 0.0, "per_seed": [0.43], "seeds": [1], "of_seeds": 2}
    summary = {"metrics": {"client_accuracy": entry}}
    run, control = pair("local", summary=summary), pair("fedavg")
    run = run._replace(clients=run.clients | {"accuracy": values})
    wanted = {"hurt": 1 / 3, "gain": -0.2 / 3, "bottom_decile": 0.3}
    for name, value in wanted.items():
        found = derived.of(name, run, control, derived.Goal())
        assert found["per_seed"] == pytest.approx([value])
        assert (found["seeds"], found["of_seeds"]) == ([1], 2)
    made = table.made({"": {"a": run, "b": control}}, ["client_accuracy"], "b")
    assert [one.is_best for one in made.columns[0].values] == [False, True]
    found = {"client_accuracy": entry | {"clients": 2}}
    few = pair("local", clients=run.clients, summary={"metrics": found})
    assert derived.of("gain", few, control, derived.Goal())["clients"] == 3


def test_a_number_covers_what_it_says():
    """A frame has how many seeds reached a goal, as the table says it."""
    entry = {"mean": 2.0, "std": 0.0, "per_seed": [2.0], "seeds": [1], "of_seeds": 3}
    whole = {"mean": 1.0, "std": 0.0, "per_seed": [1.0] * 3}
    how = words.metric("peers")
    column = table._values(how, {"a": entry, "b": whole}, {}, "")
    frame = table.Table(["a", "b"], [table.Column("", how, column)], []).to_frame()
    assert frame[how.title, "of"].tolist() == ["1 of 3 seeds", ""]


def test_marks_follow_the_test():
    """A clear difference is marked and not bold; a small one is bold and unmarked."""
    gen = np.random.default_rng(0)
    base = gen.uniform(0.6, 0.8, (3, 30))
    values = {"a": base, "b": base + gen.normal(0, 0.01, base.shape), "c": base - 0.1}
    how = words.metric("client_accuracy")
    column = beside(how, values)
    made = table.Table(list(values), [table.Column("", how, column)], [])
    assert [one.is_best for one in column] == [True, True, False]
    assert [one.mark for one in column] == ["", "", "worse"]
    assert r"$^\ddagger$" in made.to_latex() and "‡" in made.to_markdown()
    assert r"\textbf{" in made.to_latex().splitlines()[4]
    noted = made._replace(notes=["‡ worse, p < .05", "5 % ± 1"]).to_latex()
    _, below = noted.split(r"\end{tabular}")
    assert "$^\\ddagger$ worse, p $<$ .05\n5 \\% $\\pm$ 1\n" in below
    assert "%" not in noted.replace(r"\%", "")  # nothing is a comment
    starred = made._replace(rows=["*a", "[b]", "c"]).to_latex().splitlines()
    assert [line[:2] for line in starred[3:] if "&" in line][:2] == ["{}", "{}"]
    # Most clients are worse, and two outliers make a better mean: no mark.
    gap = np.array([[*np.linspace(-0.02, -0.01, 28), 0.9, 0.9]])
    _, other = beside(how, {"a": base[:1], "b": base[:1] + gap})
    assert other.p < 0.05 and other.mean > base[0].mean() and not other.mark


def test_marks_of_what_is_better_when_lower():
    """Clearly lower perplexities are better, and higher ones worse."""
    base = np.random.default_rng(0).uniform(20, 40, (2, 30))
    values = {"a": base, "b": base - 2, "c": base + 2}
    column = beside(words.metric("client_perplexity"), values)
    assert [one.mark for one in column] == ["", "better", "worse"]
    assert [one.is_best for one in column] == [False, True, False]


def test_a_goal_that_some_seeds_missed_is_not_bold():
    """A mean over the seeds that reached it says nothing about the others."""
    part = {"mean": 10.0, "std": 0.0, "per_seed": [10.0], "seeds": [1], "of_seeds": 2}
    entries = {"a": {"mean": 20.0, "std": 0.0, "per_seed": [20.0] * 2}, "b": part}
    run = record.Record(None, {}, [], {}, {"metrics": {}})
    how = derived.metric("until_rounds", [run])
    found = table._values(how, entries, {}, "")
    assert [one.is_best for one in found] == [True, False]


def test_settings_are_not_taken_for_one_another():
    """NumPy's numbers are numbers, and other owners of the same rows other data."""
    given = {name: OPTIONS[name] for name in ("dataset", "partition", "preset")}
    counts = {f"{n}": {"num_clients": n} for n in np.array([4, 5])}
    ran = build.study(["majority"], settings=counts, **given).run(progress=False)
    flags = {name: ran.runs(name)["majority"].flags for name in counts}
    assert all(flags[name]["num_clients"] == name for name in counts)
    frames_of = [
        pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y, "who": who})
        for who in (np.arange(200) // 50, np.arange(200) % 4)
    ]
    owners = {f"{n}": {"dataset": one} for n, one in enumerate(frames_of)}
    given |= {"partition": "natural", "owner": "who", "label": "y", "num_clients": 4}
    del given["dataset"]
    ran = build.study(["majority"], settings=owners, **given).run(progress=False)
    hashes = {ran.runs(name)["majority"].hashes["split_sha256"] for name in owners}
    assert len(hashes) == 2


def test_intervals_of_differences(done):
    """A paired t interval; of one seed it is scipy's, and it is in the frame."""
    one, other = np.random.default_rng(3).normal(size=(2, 1, 9))
    mean, low, high = significance.interval(one, other)
    expected = stats.ttest_1samp((one - other)[0], 0).confidence_interval(0.95)
    assert (low, high) == pytest.approx(tuple(expected))
    assert mean == pytest.approx((one - other).mean())
    two = np.concatenate([one, one + 1]), np.concatenate([other, other])
    mean, low, high = significance.interval(*two)
    assert mean == pytest.approx((one - other).mean() + 0.5)
    # Equal variances: the standard error is that of one seed over the root of two.
    ratio = stats.t.ppf(0.975, 16) / stats.t.ppf(0.975, 8) / np.sqrt(2)
    assert high - low == pytest.approx(ratio * (expected.high - expected.low))
    few = np.full((2, 3), np.nan)
    few[:, 0] = 1
    assert np.isnan(significance.interval(few, few * 0)).tolist() == [False, True, True]
    few[1] = np.nan
    assert np.isnan(significance.interval(few, few * 0)).all()
    frame = done.table(["client_accuracy", "global_accuracy"]).to_frame()
    found = frame["Client (UA)"]
    for row in found.index.drop(done.control):
        gap = found["mean"][row] - found["mean"][done.control]
        assert found["gap"][row] == pytest.approx(gap)
        assert found["gap_low"][row] <= gap <= found["gap_high"][row]
    assert found["gap"].isna()[done.control]
    assert "gap" not in frame["Global"]


def test_seeds_count_equally_in_intervals():
    """The mean is that of the seeds' means, whatever their numbers of clients."""
    gap = np.random.default_rng(3).normal(size=(2, 9))
    gap[1, 4:] = np.nan
    mean, low, high = significance.interval(gap, np.zeros_like(gap))
    sides = gap[0], gap[1, :4]
    assert mean == pytest.approx((sides[0].mean() + sides[1].mean()) / 2)
    error = np.sqrt(sum(one.var(ddof=1) / len(one) for one in sides)) / 2
    assert high - low == pytest.approx(2 * stats.t.ppf(0.975, 8 + 3) * error)


def test_equal_rows(tmp_path):
    """One is computed, both are bold, and a run that another process has is left."""
    rows = {"a": {"algo": "local"}, "b": {"algo": "local"}}
    given = OPTIONS | {"rounds": 1, "fine_tune_epochs": 0, "folder": tmp_path / "it"}
    ran = build.study(rows, **given)
    held = lock.Lock(tmp_path / "it" / "runs" / "b")
    held.acquire()
    assert "1 of 2 results are not" in ran.run(progress=False).table().to_markdown()
    held.release()
    shown = ran.run(progress=False).table(["bottom_decile"])
    assert [one.is_best for one in shown.columns[0].values] == [True, True]
    assert ran.load("b").round == 1


def test_a_time_that_ends_with_the_last_call_ends_nothing_else(tmp_path):
    """Its run is finished, and the next ones begin."""
    given = OPTIONS | {"rounds": 1, "eval_every": 1, "fine_tune_epochs": 0}
    ran = build.study(["local", "fedavg"], **given)
    for _ in range(2):
        ran.run(progress=False, cell_timeout=1e-9)
    assert "not finished" not in ran.table().to_markdown()


def point(lr, diverged=None, **metrics):
    """A point and its part of a summary."""
    entries = {f"val_{n}": {"mean": value} for n, value in metrics.items()}
    return {"client_lr": lr}, {"diverged": diverged, "metrics": entries}


RATES = {"client_lr": [1, 2, 3]}


def test_perplexities_choose_the_lowest():
    points = [point(1, client_perplexity=9.0), point(2, client_perplexity=7.0)]
    chosen = tuning.best(points, RATES, False)
    assert (chosen.options["client_lr"], chosen.value) == (2, 7.0)


def test_what_diverged_wins_only_alone():
    points = [point(1, client_accuracy=0.5), point(2, 3, client_accuracy=0.9)]
    assert tuning.best(points, RATES, False).options == {"client_lr": 1}
    assert tuning.best(points[1:], RATES, False).options == {"client_lr": 2}


def test_equal_points_are_no_edge_and_the_first_wins():
    """Nor is a best value of 1, which leaves nothing to gain."""
    points = [point(lr, client_accuracy=0.5) for lr in (1, 2)]
    chosen = tuning.best(points, RATES, False)
    assert (chosen.options, chosen.edges) == ({"client_lr": 1}, ())
    assert tuning.best(points[:1], RATES, False).edges == ("client_lr",)
    assert not tuning.best([point(3, client_accuracy=1.0)], RATES, False).edges


def test_points_are_compared_by_one_metric():
    """A point that lacks it is not the best by another one."""

    def part(**means):
        metrics = {f"val_{name}_perplexity": {"mean": m} for name, m in means.items()}
        return {"metrics": metrics, "diverged": None}

    points = [
        ({"client_lr": 0.1}, part(client=60.0, **{"global": 59.0})),
        ({"client_lr": 10.0}, part(**{"global": 58.0})),
    ]
    chosen = tuning.best(points, {"client_lr": [0.1, 10.0]}, may_tune=False)
    assert (chosen.metric, chosen.value) == ("val_client_perplexity", 60.0)


@pytest.mark.parametrize("tuned, expected", [(0.6, True), (0.5, False), (0.4, False)])
def test_fine_tuning_wins_where_it_is_better(tuned, expected):
    """Equal is not better, and a row that may not has none."""
    points = [point(1, client_accuracy=0.5, fine_tuned_accuracy=tuned)]
    chosen = tuning.best(points, RATES, True)
    assert (chosen.is_fine_tuned, chosen.value) == (expected, max(tuned, 0.5))
    assert not tuning.best(points, RATES, False).is_fine_tuned


def test_equal_points_are_not_fine_tuned():
    """Also where the first of them would be."""
    points = [
        point(1, client_accuracy=0.8, fine_tuned_accuracy=0.9),
        point(2, client_accuracy=0.9, fine_tuned_accuracy=0.85),
    ]
    chosen = tuning.best(points, RATES, True)
    assert (chosen.options, chosen.is_fine_tuned) == ({"client_lr": 2}, False)


def test_a_mean_of_some_seeds_wins_only_alone():
    """Fine-tuning diverged in the others, and the rest is no better for it."""
    points = [
        point(n, client_accuracy=0.5, fine_tuned_accuracy=0.8 + n / 10) for n in (0, 1)
    ]
    points[1][1]["metrics"]["val_fine_tuned_accuracy"] |= {"seeds": [1], "of_seeds": 3}
    chosen = tuning.best(points, RATES, True)
    assert (chosen.options, chosen.value) == ({"client_lr": 0}, 0.8)


def test_a_switch_has_no_ends():
    """There are no values beyond."""
    part = point(1, client_accuracy=0.5)[1]
    chosen = tuning.best([({"drop_last": True}, part)], {"drop_last": [False, True]}, 0)
    assert (chosen.options, chosen.edges) == ({"drop_last": True}, ())


def test_accuracies_of_clients_choose_before_the_servers():
    points = [point(1, client_accuracy=0.5, global_accuracy=0.9)]
    points += [point(2, client_accuracy=0.6, global_accuracy=0.8)]
    chosen = tuning.best(points, RATES, False)
    assert (chosen.metric, chosen.value) == ("val_client_accuracy", 0.6)


@pytest.fixture
def choosing(monkeypatch):
    """A study whose trials are finished: by `read`, from a folder to its summary."""

    def make(read, methods, **given):
        study = made(methods=methods, control="", **given)
        monkeypatch.setattr(study.schedule, "is_finished", lambda trial: True)
        monkeypatch.setattr("launch.tables.protocol.finished.read", read)
        return study

    return make


def swept(*values):
    """A summary of points of client_lr: each its rate and validation metrics."""
    return {
        "sweep": [
            {
                "point": {"client_lr": rate},
                "diverged": None,
                "metrics": {f"val_{n}": {"mean": x} for n, x in metrics.items()},
            }
            for rate, metrics in values
        ]
    }


def test_runs_of_their_own_have_their_options(choosing):
    """Those that no sweep takes are chosen with those that it takes."""

    def read(path):
        best = 0.9 if "uniform" in path.name else 0.5
        return swept((0.1, {"client_accuracy": best}), (0.2, {"client_accuracy": 0.4}))

    tune = {"aggregation": ["examples", "uniform"], "client_lr": [0.1, 0.2]}
    study = choosing(read, ["fedavg"], tune=tune)
    wanted = {"aggregation": "uniform", "client_lr": 0.1}
    assert study.schedule.choice("", "fedavg").options == wanted
    assert study.schedule.final("", "fedavg").options.items() >= wanted.items()


def test_a_fine_tuned_row_has_its_own_point(choosing):
    """And its own run, if that is another one."""

    def read(path):
        first = {"client_accuracy": 0.5, "fine_tuned_accuracy": 0.6}
        return swept(
            (0.1, first), (0.2, {"client_accuracy": 0.4, "fine_tuned_accuracy": 0.7})
        )

    study = choosing(read, ["fedavg", "fedavg+ft"], tune={"client_lr": [0.1, 0.2]})
    rows = {row: study.schedule.final("", row) for row in study.rows}
    rates = [one.options["client_lr"] for one in rows.values()]
    assert rates == [0.1, 0.2] and rows["fedavg+ft"].name == "fedavg.ft"
    assert [study.schedule.choice("", row).is_fine_tuned for row in study.rows] == [
        False,
        True,
    ]


def test_options_of_a_setting_and_a_row_come_before_the_common_ones():
    """A row that has its own value of a tuned option is not tuned in it."""
    given = {"settings": {"few": {"rounds": 1}, "many": {}}, "control": ""}
    rows = {"fedavg": {}, "slow": {"algo": "fedavg", "client_lr": 0.01}}
    study = made(methods=rows, **given)
    for setting, rounds in (("few", 1), ("many", 3)):
        assert [
            one.options["rounds"] for one in study.schedule.tuning(setting, "fedavg")
        ] == [rounds]
        assert study.schedule.tuning(setting, "slow") == []
        assert study.schedule.final(setting, "slow").options["client_lr"] == 0.01


@pytest.mark.parametrize("tuned, shown", [(0.5, "plain"), (0.6, "tuned")])
def test_a_row_shows_fine_tuned_clients_where_they_are_better(
    tuned, shown, choosing, monkeypatch
):
    """By validation rows; equal is not better."""
    metrics = {"client_accuracy": 0.5, "fine_tuned_accuracy": tuned}
    where = "launch.tables.protocol"
    found = {name: types.SimpleNamespace(summary={}) for name in ("plain", "tuned")}
    monkeypatch.setattr(f"{where}.record.read", lambda path: found["plain"])
    monkeypatch.setattr(f"{where}.derived.fine_tuned", lambda run: found["tuned"])
    rows, tune = ["fedavg", "fedavg+ft"], {"client_lr": [0.1]}
    study = choosing(lambda path: swept((0.1, metrics)), rows, tune=tune)
    assert study.runs() == {"fedavg": found["plain"], "fedavg+ft": found[shown]}


def test_a_table_has_the_control_of_its_study(monkeypatch):
    """Unless another one, or none, is named."""
    seen, found = [], table.made({"": {}}, ["hurt"], "", "wilcoxon", 0.95)
    monkeypatch.setattr(table, "made", lambda *given: seen.append(given[2]) or found)
    study = made(tune={})
    for given in ({}, {"control": ""}, {"control": "fedavg"}):
        study.table(**given)
    assert seen == ["local", "", "fedavg"]
