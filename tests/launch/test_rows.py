"""A row is what it is called: names of methods, equal rows, options without effect."""

import warnings

import jax
import numpy as np
import pytest

import algorithms
from launch import build
from launch.config import registry
from launch.folder import record
from launch.run import summaries
from launch.show import page as page_lib
from launch.show import words
from launch.tables import cells, results
from tests import conftest, synthetic

pytestmark = pytest.mark.usefixtures("narrow")
SOURCE = synthetic.blobs(120, (8, 8, 1), 4, seed=0)
OTHER = SOURCE.image[::-1], SOURCE.label
BASE = conftest.SIX | {"dataset": (SOURCE.image, SOURCE.label), "partition": "iid"}


def named(letters):
    """The same rows, whose classes have names."""
    return SOURCE.image, np.array(list(letters))[SOURCE.label]


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_every_name_is_itself(name):
    """With its defaults."""
    assert registry.departure(name, {}) is None


@pytest.mark.parametrize(
    ("name", "options", "is_really"),
    [
        ("fedper", {"head_epochs": 1}, "fedrep"),
        ("fedrep", {"head_epochs": 1}, None),
        ("fedrep", {"head_epochs": 0}, "fedper"),
        ("fedrep", {"head_epochs": 0, "layer_dropping": True}, "fedper_plus"),
        ("fedper_plus", {"head_epochs": 2}, "fedrep_plus"),
        ("fedavg", {"server_optimizer": "yogi"}, "fedyogi"),
        ("fedavg", {"server_optimizer": "sgd"}, None),
        ("fedadam", {"server_optimizer": "none"}, "fedavg"),
        ("fedadam", {"server_optimizer": "sgd"}, "fedavgm"),
        ("fedavgm", {"server_momentum": 0.5}, None),
        ("dfedper", {"personal_from": "dense1"}, None),
        ("dfedper", {"personal_from": "none"}, "dfedavg"),
        ("dfedavg", {"aggregation": "uniform"}, "dfedavgm"),
        ("dfedper", {"aggregation": "uniform"}, None),
        ("heterofl", {"all_widths": True}, "sheterofl"),
        ("depthfl", {"self_distill_weight": 0.0}, None),
        ("depthfl", {"self_distill_weight": 0.0, "level_mix": "1"}, "feddyn"),
        ("feddyn", {"level_mix": "4:3:2:1"}, "depthfl"),
        (object(), {"head_epochs": 1}, None),
    ],
)
def test_what_a_run_really_is(name, options, is_really):
    """By the options that variants fix."""
    found = registry.departure(name, options)
    assert (found and found.name) == is_really


def test_an_option_of_one_row_does_not_make_another(tmp_path):
    """FedPer stays FedPer where FedRep needs fewer head epochs."""
    options = BASE | {"local_epochs": 2, "personal_from": "last"}
    made = build.compare(["fedper", "fedrep"], **options, head_epochs=1, run=False)
    assert "makes fedper the method fedrep, so that" in " ".join(made.notes)
    assert [one.hparams.head_epochs for one in made.values()] == [0, 1]
    for one in made.values():
        one.simulation.advance_to(2)
    hashes = {one.simulation.digest() for one in made.values()}
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("rows", "options", "line"),
    [
        (
            ["fedavg", "fedadam", "fedavgm"],
            {"server_optimizer": "yogi"},
            "makes fedavg the method fedyogi, fedadam the method fedyogi, fedavgm",
        ),
        (
            {"fedrep": {"algo": "fedrep", "head_epochs": 0, "layer_dropping": True}},
            {},
            "the row fedrep would be fedper_plus",
        ),
        ({"fedper": {"algo": "fedavg"}}, {}, "the row fedper would be fedavg"),
        ({"FedAvg": {"algo": "fedadam"}}, {}, "the row FedAvg would be fedadam"),
        (
            {"a": {"algo": "fedavg"}, "b": {"algo": "fedavg", "image_size": 16}},
            {},
            "b has examples of shape",
        ),
        (
            {"a": {"algo": "fedavg"}, "b": {"algo": "fedavg", "dataset": OTHER}},
            {},
            "b has other examples",
        ),
        (
            {n: {"algo": "fedavg", "dataset": named(n)} for n in ("abcd", "wxyz")},
            {},
            "the classes of wxyz are called w, x, y, z",
        ),
    ],
)
def test_rows_that_would_lie_are_refused(rows, options, line):
    """In one line."""
    with pytest.raises(ValueError, match=f"^compare: .*{line}") as told:
        build.compare(rows, **BASE, **options, run=False)
    assert "\n" not in str(told.value)


def test_a_custom_algorithm_may_be_called_as_one_of_ours():
    """In a list it has the name of its class."""

    class FedAvg:
        HParams = algorithms.ALGORITHMS["fedavg"].HParams

        @staticmethod
        def make(hparams, task):
            return algorithms.ALGORITHMS["fedavg"].make(hparams, task)

    own = FedAvg
    made = build.compare([own, "fedprox"], **BASE, run=False)
    assert list(made) == ["FedAvg", "fedprox"]


def test_options_without_effect_in_a_row():
    """Those that need one that a row does not get are the others' alone."""
    given = {"server_optimizer": "adam", "server_lr": 0.01}
    made = build.compare(["fedavg", "fedprox"], **BASE, **given, run=False)
    assert "makes fedavg the method fedadam, so that only fedprox" in made.notes[0]
    line = "server_lr=0.01 has no effect where fedavg has no server_optimizer, so that"
    assert made.notes[1].startswith(line)
    assert [one.hparams.server_lr for one in made.values()] == [1.0, 0.01]
    made = build.compare(["fedprox", "fedadam"], **BASE, server_lr=0.01, run=False)
    assert [one.hparams.server_lr for one in made.values()] == [1.0, 0.01]
    # A row that has its own is no other that would get it.
    own = {"algo": "fedprox", "server_optimizer": "adam", "server_lr": 0.1}
    with pytest.raises(ValueError, match="has no effect with --server_optimizer=none"):
        rows = {"a": {"algo": "fedprox"}, "b": own}
        build.compare(rows, **BASE, server_lr=0.01, run=False)
    # An option may need one that a method does not have.
    made = build.compare(["fedd2s"], **BASE | {"model": "m1"}, min_layer=2, run=False)
    assert made["fedd2s"].hparams.min_layer == 2
    # Of no row: refused, with what would be needed.
    with pytest.raises(ValueError, match="has no effect with --server_optimizer=none"):
        build.compare(["fedavg", "fedprox"], **BASE, server_lr=0.01, run=False)


def test_fine_tuned_rows_are_of_studies():
    """A comparison says so."""
    with pytest.raises(ValueError, match="fedavg.ft is a row of a study .*give fedavg"):
        build.compare(["fedavg", "fedavg+ft"], **BASE, run=False)


def test_one_name_with_two_meanings_is_said():
    """FedProx's mu and Ditto's lambda."""
    made = build.compare(["fedprox", "ditto"], **BASE, proximal_weight=0.5, run=False)
    (line,) = made.notes
    assert line.startswith("proximal_weight has several meanings: fedprox: ")
    assert "[mu]" in line and "[lambda]" in line
    both = build.compare(["fedprox", "fedavg"], **BASE, client_lr=0.5, run=False)
    assert both.notes == ()
    names = ["fedavg", "scaffold", "cdkt"]  # two of them have a symbol in brackets
    given = BASE | {"client_lr": 0.5, "proxy_fraction": 0.1}
    every = build.compare(names, **given, run=False)
    assert "meanings" not in "".join(every.notes)


def test_equal_parameters_are_said(undrawn, tmp_path):
    """By a comparison and by a report."""
    rows = {name: {"algo": "fedavg"} for name in ("one", "other")}
    rows["third"] = {"algo": "fedavg", "client_lr": 0.3}
    line = "one and other have equal parameters"
    with pytest.warns(UserWarning, match=line):
        build.compare(rows, **BASE, workdir=str(tmp_path), progress=False)
    page = page_lib.page(page_lib.read([tmp_path / name for name in rows], list(rows)))
    assert f"{line}, bit for bit" in page


def one_row(name, options):
    """A sheet of one cell that trains."""
    row = {"options": {"algo": "fedavg"} | options}
    return {"name": "s", "common": {}, "values": {"10": {}}, "rows": {name: row}}


def test_a_sheet_s_rows_are_their_methods():
    """Neither a row's options nor those of every cell make it another method."""
    yogi, fedper = {"server_optimizer": "yogi"}, {"algo": "fedper"}
    with pytest.raises(ValueError, match="is the method fedyogi; rename the row"):
        cells.cells(one_row("FedAvg", yogi))
    (cell,) = cells.cells(one_row("Mine", yogi))
    given = {"head_epochs": 1}
    with pytest.raises(ValueError, match="=1 is the method fedrep; choose the other"):
        cells.cells(one_row("FedPer from conv1", fedper), given=given)
    done = {"figures": {"parameters_sha256": "ab"}}
    found = [results.Result(cell._replace(row=row), done) for row in ("One", "Other")]
    sheet = {"title": "t", "about": "a", "axis": "x", "columns": []}
    notes = results.sheet(sheet, found, "").notes
    assert "at 10, One and Other have equal parameters" in notes[1]


def test_reports_name_what_differs(undrawn, tmp_path):
    """Rows of equal names, and no best value across other data or rounds."""
    other = synthetic.blobs(120, (8, 8, 1), 4, seed=1)
    runs = {
        "a": {},
        "b": {"dataset": (other.image, other.label)},
        "c": {"rounds": 4},
        "d": {"seed": 9},
    }
    for name, more in runs.items():
        options = BASE | more | {"workdir": str(tmp_path / name)}
        build.experiment(algo="fedavg", **options).run(progress=False)

    def page_of(*names):
        entries = page_lib.read([tmp_path / name for name in names])
        assert len({entry.name for entry in entries}) == len(names)
        return [entry.name for entry in entries], page_lib.page(entries)

    (one, two), page = page_of("a", "b")
    assert one.startswith("FedAvg data=") and two.startswith("FedAvg data=")
    assert "No value is marked as the best, as the runs differ in data" in page
    (one, two), page = page_of("a", "c")
    assert (one, two) == ("FedAvg rounds=2", "FedAvg rounds=4")
    assert "differ in rounds (FedAvg rounds=2; FedAvg rounds=4)" in page
    assert 'class="best"' not in page
    (one, two), page = page_of("a", "d")
    assert (one, two) == ("FedAvg seed=0", "FedAvg seed=9")
    assert "the two differ in seeds" in page
    runs = [record.read(tmp_path / "a")] * 2
    assert len(set(record.labels(runs))) == 1  # one folder given twice


def test_a_departure_is_in_the_name(tmp_path):
    """A single run that is not what its algorithm is called."""
    options = BASE | {"workdir": str(tmp_path), "server_optimizer": "yogi"}
    made = build.experiment(algo="fedavg", **options)
    assert made.notes[0] == (
        "--algo=fedavg with --server_optimizer=yogi is the method fedyogi, and results "
        "are called fedavg"
    )
    with pytest.warns(UserWarning, match="^note: --algo=fedavg with"):
        made.run(progress=False)
    assert record.labels([record.read(tmp_path)]) == ["fedavg server_optimizer=yogi"]


@pytest.mark.parametrize(
    ("algo", "option", "other", "rest"),
    [
        ("fedprox", "proximal_weight", "fedavg", ""),
        ("moon", "contrastive_weight", "fedavg", ""),
        ("ditto", "proximal_weight", "local", " (--optimizer_state=reset) but for"),
    ],
)
def test_a_zero_that_makes_another_method_is_said(algo, option, other, rest):
    """Its clients are then served the models of that method."""
    given = BASE | {"algo": algo, "sweep": {option: [0.0, 0.1]}}
    every = build.experiment(**given), build.experiment(**BASE | {"algo": other})
    (line,) = (n for n in every[0].notes if "is the method" in n)
    assert line.startswith(
        f"--algo={algo} with --{option}=0.0 is the method {other}{rest}"
    )
    usual = build.experiment(**BASE | {"algo": algo})
    assert not [note for note in usual.notes if "is the method" in note]
    for made in every:
        made.run(progress=False)
    point = {"point": {option: 0.0}}
    served = (
        every[0].client_model(1, **point).variables,
        every[1].client_model(1).variables,
    )
    jax.tree.map(np.testing.assert_array_equal, *served)


def test_notes_are_shown_once(capsys):
    """As lines with the progress, or as warnings without."""
    options = BASE | {"partition_alpha": 0.1, "algo": "fedavg"}
    made = build.experiment(**options)
    made.run(1)
    made.run()
    assert capsys.readouterr().out.count("note: --partition_alpha=0.1") == 1
    made = build.experiment(**options)
    with pytest.warns(UserWarning, match="note: --partition_alpha=0.1") as found:
        made.run(1, progress=False)
    lines = [str(one.message) for one in found]
    assert len(lines) == len(set(lines)) == len(made.notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.run(progress=False)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"algo": "local", "server_lr": 0.1}, "--server_lr=0.1 has no effect without"),
        ({"algo": "local", "server_epochs": 5}, "--server_epochs=5 has no effect"),
        (
            {"algo": "heterofl", "model": "mlp", "static_norm": "ema"},
            "--static_norm=ema has no effect on a model without batch norm; omit it",
        ),
        (
            {
                "algo": "uapdfl",
                "divergence_threshold": 0.5,
                "client_dropout": False,
                "layer_personalization": False,
            },
            "--divergence_threshold=0.5 has no effect with --noclient_dropout and",
        ),
        (
            {"algo": "local", "eval_train": True},
            "--eval_train=true has no effect with --algo=local, where no server has a",
        ),
        ({"bucketed": False}, "--bucketed=false has no effect with --algo=fedavg"),
        ({"eval_sample": 1000}, "--eval_sample=1000 has no effect with --num_clients="),
        ({"algo": "local", "server_lr": 0.1, "proxy_fraction": 0.1}, ""),
    ],
)
def test_options_without_effect_are_noted(options, line):
    """Where they are allowed: presets and flagfiles may give them."""
    plain = {"algo": "fedavg"} | BASE
    usual = build.experiment(**plain).notes
    found = [n for n in build.experiment(**plain | options).notes if n not in usual]
    assert [note.startswith(line) for note in found] == [True] * bool(line)


def test_a_sweep_without_effect_is_refused():
    """Its points would be equal."""
    with pytest.raises(ValueError, match="server_lr has no effect here"):
        build.experiment(algo="local", **BASE, sweep="server_lr=0.1,0.2")


def test_a_recorded_run_has_no_notes_of_its_defaults(tmp_path):
    """A run.flags gives every option."""
    options = BASE | {"workdir": str(tmp_path)}
    build.experiment(algo="fedavg", **options).run(progress=False)
    path = tmp_path / "run.flags"
    lines = path.read_text().splitlines()
    older = [line for line in lines if "--masked_loss=" not in line]
    for text in (lines, older):
        path.write_text("\n".join(text) + "\n")
        notes = build.load(tmp_path, dataset=BASE["dataset"]).notes
        assert not [line for line in notes if "no effect" in line]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("adam", "b1=-1"), ("adam", "b2=0"), ("adam", "b2=2"), ("adam", "eps=-1"),
        ("rmsprop", "decay=5"), ("lion", "b1=1"), ("yogi", "b1=1e9"),
        ("adagrad", "initial_accumulator_value=-1"), ("adam", "eps_root=true"),
        ("adam", "nesterov=1"), ("rprop", "eta_plus=0.5"),
    ],
)  # fmt: skip
def test_optimizers_options_have_bounds(name, given):
    """What is outside an optimizer's domain."""
    options = {"client_optimizer": name, "client_optimizer_options": given}
    with pytest.raises(ValueError, match=f"_options={given}: .* expected"):
        build.experiment(algo="fedavg", **BASE, **options)


def values(name, per_round, seed=0):
    """Records of one metric, None = it is not defined in that round."""
    return [
        {"round": number, "seed": seed} | ({} if value is None else {name: value})
        for number, value in enumerate(per_round, start=10)
    ]


def test_a_summary_over_fewer_values_says_so():
    """Fewer rounds, seeds or clients than it says (S14)."""
    window = (10, 11, 12)
    some = values("client_auc", [0.85, None, 0.65])
    found = summaries.summarize(some, [0], window, "mean_last10", 0)["client_auc"]
    assert found["mean"] == pytest.approx(0.75)
    assert summaries.fewer(found) == "2 of 3 rounds"
    seeds = some + values("client_auc", [None] * 3, seed=1)
    found = summaries.summarize(seeds, [0, 1], window, "mean_last10", 0)["client_auc"]
    assert found["seeds"] == [0] and found["per_seed"] == pytest.approx([0.75])
    assert summaries.fewer(found) == "2 of 3 rounds, 1 of 2 seeds"
    pairs = zip(some, (2, 3, 1), strict=True)
    clients = [one | {"clients_in_client_auc": count} for one, count in pairs]
    found = summaries.summarize(clients, [0], window, "mean_last10", 0)
    assert list(found) == ["client_auc"]
    assert summaries.fewer(found["client_auc"]) == "2 of 3 rounds, 1 client"
    whole = values("client_auc", [0.5, 0.5, 0.8])
    entry = summaries.summarize(whole, [0], window, "mean_last10", 0)["client_auc"]
    assert summaries.fewer(entry) == "" and entry.keys() == {"mean", "std", "per_seed"}


def test_pairs_are_of_the_same_seeds():
    """A seed that one of two lacks is in no difference."""
    one = {"per_seed": [1.0, 2.0, 3.0]}
    other = {"per_seed": [1.5, 2.5], "seeds": [0, 2], "of_seeds": 3}
    assert [side.tolist() for side in summaries.paired(one, other)] == [
        [1.0, 3.0],
        [1.5, 2.5],
    ]


def test_the_table_says_over_how_many_clients():
    """One client of six has both classes, and one metric is never defined."""
    label = np.zeros(120, int)
    label[:30] = SOURCE.label[:30]

    def never(logits, labels, mask):
        return logits.sum() * 0.0, mask.sum() * 0.0

    options = BASE | {"dataset": (SOURCE.image, label), "partition": "contiguous"}
    made = build.experiment(
        algo="fedavg", eval_metrics=["auc", ("never", never)], **options
    )
    made.run(progress=False)
    text = words.table(made.summary())
    assert "client)" in text or "clients)" in text
    assert "never              is not defined in any of these rounds" in text
