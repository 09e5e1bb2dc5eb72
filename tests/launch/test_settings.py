"""From what was given to a configuration: presets as data, types, defaults."""

import dataclasses
import itertools
import types
from typing import Optional

import numpy as np
import pytest

import algorithms
import models
from algorithms import fedavg
from data import dataset, loaders, partitions, texts
from data.partitions import cdkt
from fedjax_pfl import options
from fedjax_pfl import types as fp_types
from launch import build
from launch import list as listing
from launch.assemble import notes
from launch.config import limits, presets, registry, resolve, schema
from tests.toys import model as toy_model


def source(num_rows=60, shape=(28, 28, 1), clients=0):
    """A data set of zeros, of which only the shape matters here."""
    owner = np.arange(num_rows) % clients if clients else None
    return dataset.Dataset(
        np.zeros((num_rows, *shape), np.uint8),
        np.arange(num_rows) % 4,
        num_rows * 5 // 6,
        4,
        owner,
    )


def resolved(data=None, **given):
    """(common options, the algorithm's own) for a data set that need not be here."""
    made, hparams = resolve.configure(given)
    data = source(6000) if data is None else data
    return resolve.resolve(made, data, given, hparams), hparams


@pytest.mark.parametrize(
    "given, expected",
    [
        # CDKT's table of settings, its code's data shares and splits.
        (
            {"algo": "cdkt", "dataset": "mnist"},
            ["cdkt", 10, 30, "cdkt_mnist", "pixel", "pool_stratified", 0.005],
        ),
        (
            {"algo": "cdkt", "dataset": "fashion_mnist"},
            ["cdkt", 10, 30, "cdkt_mnist", "global", "pool", 0.005],
        ),
        (
            {"algo": "fedavg", "preset": "cdkt", "dataset": "cifar10"},
            ["cdkt", 10, 30, "cdkt_cifar", "half", "pool_stratified", 0.07],
        ),
        (
            {"algo": "local", "preset": "cdkt_code", "dataset": "cinic10"},
            ["cdkt", 10, 20, "cdkt_cifar", "channel", "pool_stratified", 0.07],
        ),
        (
            {"algo": "fedrep", "dataset": "cifar10"},
            ["client_dirichlet", 50, 40, "m1", "channel", "client_share", 0.0],
        ),
        (
            {"algo": "fedd2s", "dataset": "femnist", "rounds": 7},
            ["client_dirichlet", 50, 7, "m2", "channel", "client_share", 0.0],
        ),
        (
            {"algo": "cdkt", "preset": "none", "dataset": "cifar10"},
            ["client_dirichlet", 20, 30, "cdkt_cifar", "channel", "client_share", 0.0],
        ),
        (
            {"algo": "depthfl", "dataset": "mnist"},
            ["iid", 100, 1000, "depth_convnet", "channel", "official", 0.0],
        ),
        (
            {"algo": "feddyn", "dataset": "cifar100"},
            ["iid", 100, 1000, "resnet18_he", "cifar100", "official", 0.0],
        ),
        (
            {"algo": "depthfl", "dataset": "cifar100"},
            ["iid", 100, 1000, "depth_resnet18", "cifar100", "official", 0.0],
        ),
        (
            {"algo": "fedrep", "preset": "pfllib", "dataset": "fashion_mnist"},
            ["pfllib_dirichlet", 20, 2000, "fedavg_cnn", "half", "merged", 0.0],
        ),
        (
            {"algo": "fedavg", "dataset": "femnist", "model": "mlp"},
            ["client_dirichlet", 20, 20, "mlp", "channel", "client_share", 0.0],
        ),
    ],
)
def test_rules_by_preset_and_data_set(given, expected):
    """Users, rounds, model, normalisation, test rows and proxy share."""
    made, _ = resolved(**given)
    names = ["partition", "num_clients", "rounds", "model", "normalization"]
    names += ["test_split", "proxy_fraction"]
    assert [getattr(made, name) for name in names] == expected
    assert made.client_model == made.model
    is_cropped = made.preset == "depthfl" and made.dataset.startswith("cifar")
    assert made.augment == ("crop_flip" if is_cropped else "none")


def test_pfllib_s_leaderboard():
    """Its clients and optimizer; no other preset chooses a round by test rows."""
    made, hparams = resolved(algo="fedrep", preset="pfllib", dataset="fashion_mnist")
    assert (made.partition_alpha, made.partition_seed) == (0.1, 1)
    assert (made.clients_per_round, made.eval_every, made.summary) == (20, 1, "best")
    names = "batch_size", "client_lr", "local_epochs", "head_epochs", "personal_from"
    assert [getattr(hparams, n) for n in names] == [10, 0.005, 2, 1, "last"]
    assert hparams.drop_last
    given = {"preset": "pfllib", "partition": "pfllib_pathological"}
    made, hparams = resolved(algo="apfl", **given)
    assert (made.classes_per_client, hparams.own_weight) == (2, 1.0)
    for name in presets.PRESETS:
        rules = [rule.options for _, rule in presets.rules(name)]
        by_test_rows = any(one.get("summary") == "best" for one in rules)
        assert by_test_rows == (name == "pfllib")


def test_every_common_option_is_set():
    """After the rules nothing is left to decide."""
    made, _ = resolved(algo="fedavg", dataset="npz:mine.npz")
    assert [k for k, v in dataclasses.asdict(made).items() if v is None] == []
    assert made.clients_per_round == 10
    assert resolved(algo="fedavg", num_clients=3)[0].clients_per_round == 3


@pytest.mark.parametrize("algo", ["dfedavg", "fedavg", "local"])
def test_everybody_in_each_round(algo):
    """UA-PDFL's rule, for every algorithm and number of clients; and by hand."""
    for num_clients in (7, 30, 300):
        given = {"algo": algo, "num_clients": num_clients}
        made, _ = resolved(preset="uapdfl", **given)
        assert made.clients_per_round == num_clients
        made, _ = resolved(preset="none", clients_per_round=0, **given)
        assert made.clients_per_round == num_clients
        made, _ = resolved(preset="uapdfl", clients_per_round=4, **given)
        assert made.clients_per_round == 4
        assert resolved(preset="none", **given)[0].clients_per_round <= 10


def test_few_examples_mean_fewer_clients():
    """FedD2S's fifty clients are for data with more than 5,000 rows."""
    assert resolved(algo="fedd2s")[0].num_clients == 50
    assert resolved(source(5000), algo="fedd2s")[0].num_clients == 20
    assert resolved(source(5000), algo="fedd2s", num_clients=30)[0].num_clients == 30


def test_exceptions_of_single_algorithms():
    """A rule for one algorithm stands behind its preset's general one."""

    def own(algo):
        return resolve.configure({"algo": algo})[1]

    assert own("pfedsd").local_epochs == own("fedd2s").local_epochs == 4
    assert own("fedict").local_epochs == own("fedict").server_epochs == 2
    assert (own("fedmd").digest_epochs, own("fedmd").local_epochs) == (1, 4)
    assert own("fedper").aggregation == "examples"
    assert own("fedrep").aggregation == "uniform"
    code = resolve.configure({"algo": "cdkt", "preset": "cdkt_code"})[1]
    assert (code.ensemble, code.js_form, code.batch_size) == (
        "code_last",
        "reversed",
        20,
    )


def test_what_is_given_wins():
    """A preset fills only what was not given; also a value equal to the default."""
    made, hparams = resolved(algo="cdkt", client_lr=0.5, partition_alpha=0.5)
    assert (hparams.client_lr, hparams.batch_size) == (0.5, 20)
    assert made.partition == "cdkt"
    made, _ = resolved(algo="fedd2s")
    assert made.partition_alpha == 0.1
    made, _ = resolved(algo="fedd2s", partition_alpha=0.5, model=None)
    assert (made.partition_alpha, made.model) == (0.5, "m1")


@pytest.mark.parametrize("preset", list(presets.PRESETS))
def test_a_users_arrays(preset):
    """Owners are the clients; small or flat examples get the net that fits."""
    owned = {"algo": "fedavg", "preset": preset, "dataset": "npz:mine.npz"}
    made, _ = resolved(source(clients=7), **owned)
    assert (made.partition, made.num_clients) == ("natural", 7)
    made, _ = resolved(source(shape=(8, 8, 1)), **owned)
    assert (made.partition, made.model) == ("client_dirichlet", "mlp")
    assert resolved(source(shape=(16,)), **owned)[0].model == "mlp"
    with pytest.raises(ValueError, match="--num_clients=8: expected at most 7"):
        resolved(source(clients=7), num_clients=8, **owned)
    with pytest.raises(ValueError, match="--partition=natural: .*no client ids"):
        resolved(source(), partition="natural", **owned)


def test_classes_named_for_each_client():
    """As many clients as are named; another number, or nobody's names, are refused."""
    given = {"algo": "fedavg", "partition": "classes", "client_classes": "0,1/0,1/2,3"}
    made, _ = resolved(**given)
    assert (made.num_clients, made.clients_per_round) == (3, 3)
    assert resolve.client_classes(made) == ((0, 1), (0, 1), (2, 3))
    with pytest.raises(
        ValueError, match="--client_classes=.* of 3 clients, --num_clie"
    ):
        resolve.check(resolved(**given, num_clients=4)[0])


@pytest.mark.parametrize("draw", partitions.DRAWS)
def test_draws_of_pathological(draw):
    """Disjoint shards or overlap; what means nothing to it is refused."""
    given = {"algo": "fedavg", "partition": "pathological", "partition_draw": draw}
    made, _ = resolved(**given)
    if draw in ("ipf", "overlap"):
        return resolve.check(made)
    with pytest.raises(ValueError, match=f"--partition_draw={draw}.*ipf, overlap"):
        resolve.check(made)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"dataset": "cifar10"}, ("cifar100", 0.0)),
        ({"dataset": "cifar10", "proxy_fraction": 0.2}, ("none", 0.2)),
        ({"dataset": "cifar10", "preset": "cdkt"}, ("none", 0.07)),
        ({"dataset": "cifar10", "public_set": "mnist_5k"}, ("mnist_5k", 0.0)),
        ({"dataset": "cifar10", "preset": "cdkt", "public_set": "mnist_5k"},)
        + (("mnist_5k", 0.0),),
        ({"dataset": "mnist_5k"}, ("none", 0.1)),
        ({"dataset": "mnist_5k", "public_set": "none"}, ("none", 0.0)),
        ({"dataset": "cifar10", "algo": "fedavg"}, ("none", 0.0)),
    ],
)
def test_images_are_shared_once(given, expected):
    """Who learns from public images gets a public set or a proxy share, not both."""
    made, _ = resolved(**({"algo": "fedmd"} | given))
    assert (made.public_set, made.proxy_fraction) == expected


def test_the_images_that_a_partition_file_shares(tmp_path):
    """Its proxy rows are the public images, and other ones are refused beside them."""
    rows = {"train_row": np.arange(40), "train_count": [20, 20], "test_count": [0, 0]}
    rows |= {"test_row": np.zeros(0, int), "official_test_row": [50]}
    given = {"algo": "fedmd", "dataset": "cifar10"}
    for proxy, expected in (([], "cifar100"), ([44, 45], "none")):
        path = f"{tmp_path}/{expected}.npz"
        np.savez(path, **rows, proxy_row=np.array(proxy, int))
        given["partition"] = f"file:{path}"
        made, _ = resolved(**given)
        assert (made.public_set, made.proxy_fraction) == (expected, 0)
    with pytest.raises(ValueError, match="--public_set=mnist_5k: .* makes it none; om"):
        resolved(**given, public_set="mnist_5k")


@pytest.mark.parametrize(
    "given, meant",
    [
        ({"partition": "client_dirichet"}, "client_dirichlet"),
        ({"partition": "Pathologic"}, "pathological"),
        ({"model": "fedavg_ccn"}, "fedavg_cnn"),
        ({"client_model": "mlp,resnet_18"}, "resnet18"),
        ({"preset": "fedds2"}, "fedd2s"),
        ({"model": "own"}, ""),
    ],
)
def test_a_name_that_is_nearly_one(given, meant):
    """All are listed, and the closest is suggested at the end."""
    with pytest.raises(ValueError, match=f"--{[*given][0]}=.*: expected") as error:
        made, _ = resolved(algo="fedavg", **given)
        resolve.check(made)
    end = str(error.value).partition("; did you mean ")[2]
    assert end == (f"{meant}?" if meant else "")


def test_rules_name_what_exists():
    """Options, conditions and values of the shipped rules are real ones."""
    owners = {name: registry.option_types(name) for name in algorithms.ALGORITHMS}
    kinds = {}
    for types_of in owners.values():
        kinds |= types_of
    common = registry.field_types(schema.Config)
    datasets = {*loaders.DATASETS, *texts.TEXTS}
    conditions = {"algo", "dataset", "partition", "public_images"}
    conditions |= {"max_examples", "image_shape"}
    for preset in presets.PRESETS:
        for _, rule in presets.rules(preset):
            assert rule.options and set(rule.when) <= conditions
            for name, names in (
                ("algo", owners),
                ("dataset", datasets),
                ("partition", partitions.PARTITIONS),
            ):
                wanted = rule.when.get(name, [])
                assert set([wanted] if isinstance(wanted, str) else wanted) <= set(
                    names
                )
            for name, value in rule.options.items():
                assert name not in ("algo", "preset", "dataset")
                assert limits.checked(name, value, kinds[name]) == value
            if {"max_examples", "partition", "public_images"} & rule.when.keys():
                # Known after the algorithm's own options have been made.
                assert rule.options.keys() <= common.keys()
        # With each preset every algorithm, and every data set, once.
        for algo, name in zip(algorithms.ALGORITHMS, itertools.cycle(datasets)):
            given = {"teacher": "a"} if algo == "distill" else {}
            made, _ = resolved(algo=algo, preset=preset, dataset=name, **given)
            options.validate(made)
            resolve.check(made)


def test_classes_of_the_papers_users():
    """The generator's own numbers, and those in the paper's text."""
    for name, protocol in cdkt.PROTOCOLS.items():
        made, _ = resolved(algo="cdkt", dataset=name)
        assert made.classes_per_client == protocol.labels_per_user

    def count(name, **given):
        return resolved(algo="cdkt", dataset=name, **given)[0].classes_per_client

    assert count("cifar10", partition="cdkt_paper") == 2
    assert count("cifar100", partition="cdkt_paper") == 20
    assert count("cifar100", partition="cdkt_paper", classes_per_client=5) == 5
    assert count("femnist") == 2


@pytest.mark.parametrize("algo", list(algorithms.ALGORITHMS))
def test_registry(algo):
    """Default presets exist, and no algorithm claims an option of every run."""
    own = {f.name for f in dataclasses.fields(algorithms.ALGORITHMS[algo].HParams)}
    assert not own & {f.name for f in dataclasses.fields(schema.Config)}
    assert algorithms.ALGORITHMS[algo].preset in presets.PRESETS
    assert algorithms.describe(algo)


def test_one_file_of_rules_adds_a_paper(tmp_path, monkeypatch):
    """A new preset and a registry line: no code."""
    (tmp_path / "new.toml").write_text(
        """
        [new]
        about = "a new paper"
        extends = "fedd2s"
        [[new.rules]]
        client_lr = 0.25
        partition = "pathological"
        [[new.rules]]
        when = { algo = "hers", dataset = ["cifar10", "mnist"] }
        client_lr = 0.5
        """
    )
    monkeypatch.setattr(presets, "PRESETS", presets.PRESETS | presets.read(tmp_path))
    entry = algorithms.entry(fedavg, preset="new")
    monkeypatch.setitem(algorithms.ALGORITHMS, "hers", entry)
    made, hparams = resolved(algo="hers", dataset="cifar10")
    assert (made.preset, made.partition, made.num_clients) == (
        "new",
        "pathological",
        50,
    )
    assert (hparams.client_lr, hparams.client_optimizer) == (0.5, "adam")
    assert resolved(algo="hers", dataset="cifar100")[1].client_lr == 0.25
    assert resolved(algo="pfedsd", preset="new", dataset="mnist")[1].client_lr == 0.25


def test_variants_keep_their_base():
    """A second name: same preset and code, another default."""
    one = algorithms.variant(
        algorithms.entry(fedavg, preset="cdkt"), "Mine.", local_epochs=9
    )
    assert (one.preset, one.make, one.about) == ("cdkt", fedavg.make, "Mine.")
    assert one.HParams().local_epochs == 9
    assert registry.field_types(one.HParams) == registry.field_types(fedavg.HParams)


def test_types_of_fields():
    """Types, optional types, and either of them as text."""

    @dataclasses.dataclass
    class Plain:
        a: int
        b: float | None
        c: Optional[str]  # noqa: UP045
        d: "bool | None"
        e: "float"

    expected = {"a": int, "b": float, "c": str, "d": bool, "e": float}
    assert registry.field_types(Plain) == expected


@pytest.mark.parametrize("annotation", [list, int | str, "Missing"])
def test_types_that_no_flag_can_have(annotation):
    """One line that names the field or the annotation."""
    made = dataclasses.make_dataclass("HParams", [("width", annotation)])
    with pytest.raises(ValueError, match="width|Missing"):
        registry.field_types(made)


def test_clash_with_a_common_option():
    """An algorithm with `rounds` of its own is refused, not silently merged."""
    made = dataclasses.make_dataclass("HParams", [("rounds", int, 3)])
    mine = types.SimpleNamespace(HParams=made, make=fedavg.make, __name__="mine")
    with pytest.raises(ValueError, match="--algo=mine: --rounds is an option of every"):
        build.experiment(algo=mine)


@pytest.mark.parametrize("algo", [fedavg.make, 3, types.SimpleNamespace(HParams=int)])
def test_what_is_no_algorithm(algo):
    """Neither a name nor an object with HParams and make, which takes no class."""
    own = type("Own", (), {"HParams": dict, "make": lambda self, hparams, task: None})
    with pytest.raises(ValueError, match=r"Own.make takes self; .* object, Own\(\)$"):
        registry.algorithm(own)
    with pytest.raises(ValueError, match="expected a name, or an object"):
        build.experiment(algo=algo)


@pytest.mark.parametrize("algo", ["fedavg", "majority", "fedper", "fedict"])
def test_several_architectures_where_all_have_one(blobs, algo, monkeypatch):
    """Refused, also by an algorithm that does not read the clients' model."""
    monkeypatch.setitem(models.MODELS, "narrow", toy_model.narrow)
    data = {"dataset": blobs, "num_clients": 4, "partition": "iid", "rounds": 1}
    with pytest.raises(ValueError, match="--client_model=mlp,narrow: .*name one"):
        build.experiment(algo=algo, model="mlp", client_model="mlp,narrow", **data)


def test_an_algorithm_of_ones_own(blobs):
    """Written in a notebook: a dataclass of plain annotations, run from Python."""

    @dataclasses.dataclass(frozen=True)
    class HParams(fedavg.HParams):
        scale: float = 1.0

    def make(hparams, task):
        return fedavg.make(hparams, task)

    mine = types.SimpleNamespace(HParams=HParams, make=make, __name__="mine")
    common = {"dataset": blobs, "model": "mlp", "num_clients": 4, "rounds": 1}
    common |= {"devices": 1, "local_epochs": 1}
    made = build.experiment(algo=mine, scale=2, **common)
    assert (made.config.algo, made.hparams.scale) == ("mine", 2.0)
    assert made.run()["metrics"]["global_accuracy"]["mean"] > 0
    with pytest.raises(ValueError, match="--scael is not .*--algo=mine.*--scale"):
        build.experiment(algo=mine, scael=2, **common)
    with pytest.raises(ValueError, match="--scale=nan: expected a finite number"):
        build.experiment(algo=mine, scale=float("nan"), **common)


def test_an_option_without_a_default():
    """It must be given; the line names it."""
    made = dataclasses.make_dataclass("HParams", [("width", int)])
    mine = types.SimpleNamespace(HParams=made, make=fedavg.make)
    with pytest.raises(ValueError, match="--width has no default"):
        resolve.configure({"algo": mine})
    made, hparams = resolve.configure({"algo": mine, "width": 3})
    assert (made.algo, hparams.width) == ("custom", 3)


@pytest.mark.parametrize(
    "algo, option, text",
    [
        ("cdkt", "rounds", "30 (--preset=cdkt)"),
        ("cdkt", "proxy_fraction", "0.07 (--preset=cdkt, differs with --dataset)"),
        ("cdkt", "model", "automatic (differs with --dataset)"),
        ("cdkt", "preset", "'cdkt'"),
        ("cdkt", "label_mix", "0.5"),
        ("fedavg", "partition_alpha", "0.5 (differs with --partition)"),
        ("fedd2s", "num_clients", "50 (--preset=fedd2s, differs with few examples)"),
        ("local", "rounds", "20"),
        ("local", "public_set", "'none'"),
        ("fedmd", "public_set", "'none' (differs with --dataset)"),
        ("fedict", "local_epochs", "2 (--preset=fedd2s)"),
        ("depthfl", "ramp_rounds", "300 (differs with --dataset)"),
        ("fedavg", "client_model", "that of --model"),
    ],
)
def test_help_says_where_a_default_comes_from(algo, option, text):
    """The value without further options, and the preset that sets it."""
    assert registry.default_text(algo, option) == text


def test_list_shows_what_there_is(capsys):
    """A line each: algorithms with their presets, presets with what they set."""
    listing.command(["list"])
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split()[0]: line for line in lines if line.startswith("  ")}
    names = [*algorithms.ALGORITHMS, *presets.PRESETS, *loaders.DATASETS]
    names += texts.TEXTS
    names += [*partitions.PARTITIONS, *models.MODELS, "cdkt.table1", "fedd2s.fig7"]
    assert set(names) <= shown.keys()
    assert shown["pfedsd"].split()[1] == "fedd2s"
    assert any("--preset=cdkt and ensemble=code_last" in line for line in lines)
    assert "client_optimizer=adam" in presets.describe("fedd2s")
    assert "; by data, partition or algorithm: " in presets.describe("fedd2s")


def test_sentence():
    """Which rules a run follows, and how to compare it."""
    text = presets.sentence("none")
    assert "--preset=none" in text and "under the same --preset" in text
    assert presets.sentence("fedd2s").startswith("rules: --preset=fedd2s (FedD2S's")


def test_depthfl_trains_as_its_table_13():
    """Also a baseline of its tables; 28x28 gray sets become 32x32 in three channels."""
    for algo in ("depthfl", "feddyn", "fedavg"):
        given = {"algo": algo, "preset": "depthfl", "dataset": "mnist"}
        made, own = resolved(**given)
        assert (made.clients_per_round, made.eval_every, made.summary) == (
            10,
            10,
            "last",
        )
        assert (own.local_epochs, own.batch_size, own.client_lr) == (5, 64, 0.1)
        assert (own.client_lr_decay, own.weight_decay) == (0.998, 0.001)
        assert own.client_momentum == 0 and own.client_optimizer == "sgd"
        assert (made.image_size, made.image_channels) == (32, 3)
    hparams = resolved(algo="depthfl", dataset="mnist")[1]
    assert (hparams.feddyn_alpha, hparams.ramp_rounds) == (0.1, 300)
    assert (hparams.levels, hparams.level_mix) == ("fixed", "1:1:1:1")
    for shape in ((32, 32, 3), (28, 28, 3), (28, 28)):
        made, _ = resolved(source(6000, shape), algo="depthfl")
        assert (made.image_size, made.image_channels) == (0, 0)


@pytest.mark.parametrize(
    "given, shape",
    [
        ({}, (32, 32, 3)),
        ({"preset": "none", "image_size": 29, "num_clients": 20}, (29, 29, 1)),
    ],
)
def test_images_of_another_size_reach_the_run(given, shape):
    """The embedded digits with a black margin, before they are normalised."""
    made = build.experiment(algo="feddyn", model="mlp", devices=1, **given)
    assert made.task.example_shape == shape
    image = np.asarray(made.data.image)
    assert image.shape == (5000, *shape)
    digits = loaders.load("mnist_5k", "").image
    margin = shape[0] - 28
    inside = slice(margin // 2, margin // 2 + 28)
    for channel in range(shape[2]):
        np.testing.assert_array_equal(image[:, inside, inside, channel], digits[..., 0])
    assert image.sum() == shape[2] * digits.sum()
    np.testing.assert_allclose(made.data.mean, image.mean((0, 1, 2)), rtol=1e-5)


def test_rotated_classes_reach_the_run(blobs):
    """Each class of the data set is as many classes as there are angles."""
    given = {"algo": "majority", "dataset": blobs, "num_clients": 3, "devices": 1}
    given |= {"model": "mlp", "partition": "iid"}
    plain, turned = (
        build.experiment(**given, rotate_classes=angles) for angles in (1, 4)
    )
    assert turned.task.num_classes == 4 * plain.task.num_classes
    assert len(np.unique(turned.data.label)) == turned.task.num_classes
    with pytest.raises(ValueError, match="--rotate_classes=2 .*--partition=cdkt"):
        build.experiment(**given | {"partition": "cdkt"}, rotate_classes=2)


def test_every_option_has_a_group():
    """--help shows each of them once."""
    common = {field.name for field in dataclasses.fields(schema.Config)}
    grouped = [name for names in schema.groups().values() for name in names]
    assert sorted(grouped) == sorted(common)
    for algo in algorithms.ALGORITHMS:
        shown = [name for names in registry.groups_of(algo).values() for name in names]
        assert sorted(shown) == sorted(registry.fields_of(algo))


def test_what_is_probably_not_meant():
    """A ramp that ends behind the last round."""
    made, hparams = resolved(algo="depthfl", dataset="fashion_mnist", rounds=60)
    (line,) = notes.of_options(made, hparams)
    assert line.startswith("--ramp_rounds=300 is more than --rounds=60: ")
    assert notes.of_options(*resolved(algo="depthfl", rounds=60)) == []
    # DisPFL's annealing is over all rounds.
    for rounds, word in ((10, "more"), (50, "less")):
        (line,) = notes.of_options(*resolved(algo="dispfl", rounds=rounds))
        assert line.startswith(f"--prune_rounds=20 is {word} than --rounds={rounds}: ")
    assert notes.of_options(*resolved(algo="dispfl", rounds=20)) == []
    assert notes.of_options(*resolved(algo="dispfl", rounds=50, prune_rate=0.0)) == []
    for warm, words in ((4, "more than"), (3, "as many as")):
        (line,) = notes.of_options(*resolved(algo="cdkt", rounds=3, warm_rounds=warm))
        assert line.startswith(f"--warm_rounds={warm} is {words} --rounds=3: first ")
    assert notes.of_options(*resolved(algo="cdkt", rounds=3, warm_rounds=2)) == []


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adam", "adamw"])
def test_momentum_of_optimizers_that_have_none(name):
    """One line says that it does nothing; presets may give it, so it is allowed."""
    for given, shown in (
        ({"client_momentum": 0.5}, "0.5"),
        ({"sweep": "client_momentum=0.5,0.9"}, "0.5,0.9"),
        ({"client_momentum": 0.5, "sweep": "client_momentum=0.0"}, ""),
    ):
        made = resolved(algo="fedavg", client_optimizer=name, **given)
        line = f"--client_momentum={shown} has no effect with "
        wanted = [f"{line}--client_optimizer={name}"] * bool(shown)
        found = [one for one in notes.of_options(*made) if "momentum" in one]
        assert found == wanted * name.startswith("adam")


@pytest.mark.parametrize(
    ("given", "is_noted"),
    [
        ({}, True),
        ({"client_momentum": 0.9}, False),
        ({"sweep": "client_momentum=0,0.9"}, False),
        ({"client_optimizer": "adam"}, False),
    ],
)
def test_a_state_that_persists(given, is_noted):
    """Plain SGD has none; a preset may ask for it, so it is allowed."""
    made = resolved(algo="fedavg", optimizer_state="persist", **given)
    found = notes.of_options(*made, asked={"optimizer_state"})
    line = "--optimizer_state=persist has no effect with --client_optimizer=sgd, "
    assert [one.startswith(line) for one in found] == [True] * is_noted
    assert notes.of_options(*made) == []


@pytest.mark.parametrize("kept, is_noted", [("persist", True), ("reset", False)])
def test_a_rate_that_only_the_first_state_has(kept, is_noted):
    """That of optax's rprop, which no later round reads."""
    given = {"client_optimizer": "rprop", "optimizer_state": kept}
    made = resolved(algo="fedavg", client_lr_decay=0.5, **given)
    found = [one for one in notes.of_options(*made) if "client_lr_decay=0.5" in one]
    assert len(found) == is_noted
    assert not notes.of_options(*resolved(algo="fedavg", **given))


def test_adamw_without_decay_is_adam():
    """Unlike optax's, whose default is not 0."""
    (line,) = notes.of_options(*resolved(algo="fedavg", client_optimizer="adamw"))
    assert line.startswith("--client_optimizer=adamw without --weight_decay is adam")
    given = {"client_optimizer": "adamw", "weight_decay": 0.1}
    assert notes.of_options(*resolved(algo="fedavg", **given)) == []


def test_optimizers_at_the_points_of_a_sweep():
    """What counts is what a point has, not the value that it replaces."""
    given = {"algo": "fedavg", "client_optimizer": "adamw"}
    made = resolved(**given, sweep="weight_decay=0.1,0.01")
    assert notes.of_options(*made) == []
    given |= {"client_optimizer": "rprop", "optimizer_state": "persist"}
    made = resolved(**given, sweep="client_lr_decay=0.5,0.9")
    (line,) = notes.of_options(*made)
    assert line.startswith("--client_lr_decay=0.5,0.9 has no effect with")


@pytest.mark.parametrize("name", ["sgd", "rprop", "sign_sgd"])
def test_clipping_before_signs(name):
    """A scale is lost in signs, unless weight decay is added after it."""
    given = {"algo": "fedavg", "client_optimizer": name, "clip_norm": 0.5}
    found = notes.of_options(*resolved(**given))
    line = "--clip_norm=0.5 has no effect with --client_optimizer="
    assert [one.startswith(line) for one in found] == [True] * (name != "sgd")
    assert notes.of_options(*resolved(**given, weight_decay=0.1)) == []


@pytest.mark.parametrize(
    ("algo", "options", "other"),
    [
        ("fedper", {"personal_from": "none"}, "fedavg"),
        ("fedrep", {"personal_from": "none"}, "fedavg"),
        ("fedper_plus", {"drop_every": 0}, "fedavg"),
        ("fedrep_plus", {"drop_every": 0}, "fedavg"),
        ("fedper", {"personal_from": "dense1"}, "local"),
    ],
)
def test_all_layers_are_of_one_side(algo, options, other):
    """It is FedAvg, or training alone, to the bit, and a line says so."""
    common = {"model": "mlp", "num_clients": 4, "rounds": 2, "local_epochs": 2}
    given = {"preset": "none", "client_lr": 0.1, "model_width": 0.25} | common
    options |= {"head_epochs": 1} if "fedrep" in algo else {}
    side = "personal" if other == "fedavg" else "shared"
    made = build.experiment(algo=algo, **given | options)
    (line,) = (one for one in made.notes if f"the method {other}" in one)
    assert line.endswith(f" of a model is {side}, and results are called {algo}")
    both = made, build.experiment(algo=other, **given)
    metrics = [one.run(progress=False)["metrics"] for one in both]
    losses = [one["client_loss"]["per_seed"] for one in metrics]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("algo", "name", "value", "more"),
    [
        ("feddyn", "h_denominator", "capable", {}),
        (
            "depthfl",
            "h_denominator",
            "capable",
            {"levels": "dynamic"},
        ),
        ("fedict", "temperature", 4.0, {"distill_weight": 0}),
        ("fedict", "server_epochs", 3, {"distill_weight": 0}),
        (
            "cdkt",
            "transfer",
            "full",
            {"client_distill_weight": 0, "server_distill_weight": 0},
        ),
        ("fedd2s", "temperature", 4.0, {"first_layer": 1}),
        ("uapdfl", "client_dropout", False, {"divergence_threshold": 0}),
    ],
)
def test_options_at_an_edge_of_another(algo, name, value, more):
    """A line says that they have no effect, and none where they have."""
    given = {"algo": algo, "preset": "none", "model": "mlp", "num_clients": 4}
    given |= {"rounds": 2, "model_width": 0.25, name: value}
    needs = {
        "depthfl": {"model": "depth_convnet", "image_size": 32},
        "cdkt": {"proxy_fraction": 0.1},
        "uapdfl": {"num_peers": 2},
    }
    given |= needs.get(algo, {})
    found = [
        [one for one in build.experiment(**options).notes if f"--{name}=" in one]
        for options in (given | more, given)
    ]
    assert "has no effect" in found[0][0] and len(found[1]) == (not more)


def test_a_sweep_that_ends_in_another_method():
    """Each point is the run that it would be alone."""
    given = {"algo": "fedavg", "server_optimizer": "sgd"}
    made = resolved(**given, sweep="server_momentum=0,0.9")
    (line,) = notes.of_options(*made)
    assert "--server_momentum=0.9 is the method fedavgm" in line


def test_clients_that_may_be_drawn_are_all():
    """Of a level's own training, by 0 or without the option."""
    given = {"algo": "depthfl", "level_mix": "1:1:1", "exclusive": True}
    given |= {"num_clients": 6}
    data = source(60, clients=6)
    for more in ({}, {"clients_per_round": 0}):
        config, _ = resolved(data, **given | more)
        assert config.clients_per_round == 2


def test_momentum_of_another_kind():
    """An algorithm of a user's may have one without an optimizer."""

    @dataclasses.dataclass(frozen=True)
    class Mine:
        client_momentum: float = 0.5

    made, _ = resolved(algo="fedavg")
    assert notes.of_options(made, Mine()) == []


def test_defaults_that_differ_by_data_set():
    """Help tells that of a data set, and of another preset."""
    found = registry.default_text("depthfl", "ramp_rounds", "mnist_5k")
    assert found == "5 (--preset=depthfl)"
    found = registry.default_text("fedavg", "rounds", preset="cdkt")
    assert found == "30 (--preset=cdkt)"


@pytest.mark.parametrize(
    "precision, flags, about",
    [
        ("f32", "", ["tf32 lets tensor cores", "other last digits"]),
        ("tf32", "--xla_gpu_deterministic_ops=false", ["other last digits"]),
        ("bf16", "--a=1 --xla_gpu_deterministic_ops=true", []),
    ],
)
def test_what_gpus_do_by_themselves(monkeypatch, precision, flags, about):
    """Their default precision, and sums in any order unless XLA is told otherwise."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    lines = notes.of_gpus(schema.Config(precision=precision))
    assert len(lines) == len(about)
    assert all(part in line for part, line in zip(about, lines, strict=True))


@pytest.mark.parametrize("rounds, per_round, is_told", [(5, 10, True), (20, 10, False)])
def test_clients_that_never_train_are_told(rounds, per_round, is_told):
    """Their models count as they begin, which is no news where all share one."""
    config = schema.Config(
        num_clients=105, rounds=rounds, clients_per_round=per_round, algo="fedper"
    )
    plan, there = fp_types.PlanSpec("local", 1, 5), np.ones((105, 1))
    for serving in (None, lambda state, cohort, data: ()):
        made = fp_types.Algorithm((plan,), None, None, serving=serving)
        lines = notes.of_absent(config, made, there, there[:, 0] > 0)
        told = [line for line in lines if "about 64 of 105 clients are in none" in line]
        assert len(told) == len(lines) == (is_told and serving is not None)


@pytest.mark.parametrize(
    ("algo", "wanted"),
    [
        ("ditto", {"proximal_weight": 0.1}),
        ("moon", {"contrastive_weight": 1.0, "temperature": 0.5}),
        ("pfedme", {"proximal_weight": 15.0, "personal_steps": 5, "personal_lr": 0.01}),
        ("fedala", {"adaptive_share": 0.8, "adaptive_lr": 1.0}),
        ("perfedavg", {"inner_lr": 0.01, "difference": 0.001}),
        ("fedict", {"distill_weight": 1.5, "temperature": 3.0}),
        ("cdkt", {"client_distill_weight": 0.06, "server_distill_weight": 0.6}),
        ("fedrep", {"local_epochs": 4, "head_epochs": 3}),
        ("fedadam", {"server_lr": 0.01, "server_momentum": 0.9}),
        ("fedyogi", {"server_lr": 0.01}),
        ("fedadagrad", {"server_lr": 0.01}),
    ],
)
def test_numbers_that_are_not_given(algo, wanted):
    """A method's own defaults, by which a user's results are."""
    found = vars(algorithms.ALGORITHMS[algo].HParams())
    assert {name: found[name] for name in wanted} == wanted
