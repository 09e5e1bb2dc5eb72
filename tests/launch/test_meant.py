"""Data, models and questions are what a user meant, or one line says what they are."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import numpy as np
import pandas
import pytest

from data import dataset
from launch import build
from launch.assemble import model_files
from launch.models_out import client_model
from tests import conftest, synthetic

pytestmark = pytest.mark.usefixtures("narrow")
NAMES = np.array(["ant", "bee", "cow", "dog"])


def rows(dtype=np.float32):
    """120 vectors in 4 classes."""
    source = synthetic.blobs(120, (6,), 4)
    return source.image.astype(dtype) / dtype(255), source.label


X, Y = rows()


def options(**more):
    """Six small clients."""
    given = {"algo": "fedavg", "dataset": (X, NAMES[Y]), "batch_size": 8, "rounds": 3}
    return conftest.SIX | given | more


def notes(part, **more):
    """The lines of an experiment with a part of text."""
    return [one for one in build.experiment(**options(**more)).notes if part in one]


@pytest.fixture(scope="module")
def trained():
    """A run of seed 0."""
    made = build.experiment(**options(client_lr=0.3))
    made.run(progress=False)
    return made


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    """Its model, whose classes have names."""
    return trained.save_model(tmp_path_factory.mktemp("models") / "one.npz")


def changed(path, saved, **more):
    """A copy of the file with other members (None = without it)."""
    with np.load(saved) as file:
        flat = {name: file[name] for name in file.files if name != "sha256"}
    flat |= more
    np.savez(path, **{name: one for name, one in flat.items() if one is not None})
    return str(path)


def reordered(path, saved):
    """The same model with its classes in the order 2, 0, 3, 1."""
    order = np.array([2, 0, 3, 1])
    with np.load(saved) as file:
        last = [name for name in file.files if file[name].shape[-1:] == (4,)]
        outputs = {name: file[name][..., order] for name in last}
    assert len(outputs) == 3  # names, and the last layer's kernel and bias
    return changed(path, saved, **outputs)


@pytest.mark.parametrize("flag", ["init_from", "teacher"])
def test_classes_in_another_order(trained, saved, tmp_path, flag):
    """Outputs are put into the run's order, by name."""
    path = reordered(tmp_path / "other.npz", saved)
    more = {flag: path} | ({"algo": "distill"} if flag == "teacher" else {})
    (line,) = notes("in another order", **more)
    assert line.startswith(f"--{flag}={path}: its model has the classes in another")
    assert "(cow, ant, dog, bee)" in line
    twin = build.experiment(**options(**more | {flag: str(saved)}))
    made = build.experiment(**options(**more))
    if flag == "init_from":
        np.testing.assert_array_equal(made.predict(None, X), trained.predict(None, X))
    else:
        jax.tree.map(
            np.testing.assert_array_equal, made.data.teacher, twin.data.teacher
        )
    assert not [one for one in twin.notes if "another order" in one]


@pytest.mark.parametrize("flag", ["init_from", "teacher"])
def test_classes_of_other_names(saved, tmp_path, flag):
    """Refused if both sides have names, and said if one side has."""
    more = {flag: str(saved)} | ({"algo": "distill"} if flag == "teacher" else {})
    other = np.array(["zebra", "bee", "cow", "ant"])[Y]
    with pytest.raises(
        ValueError, match=f"^--{flag}=.* ant, bee, cow, dog, this run's"
    ):
        build.experiment(**options(dataset=(X, other), **more))
    (line,) = notes("only its model names the classes", dataset=(X, Y), **more)
    assert "(ant, bee, cow, dog)" in line
    plain = changed(tmp_path / "plain.npz", saved, classes=None)
    assert notes("only this run names the classes", **more | {flag: plain})
    assert not notes("names the classes", **more)


def test_classes_of_a_custom_model_in_another_order(saved, tmp_path):
    """Its outputs cannot be found, so that it is refused."""
    module = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)])
    made = build.experiment(**options(model=module))
    path = made.save_model(tmp_path / "own.npz")
    assert build.experiment(**options(model=module, init_from=str(path)))
    other = changed(tmp_path / "other.npz", path, classes=NAMES[::-1])
    with pytest.raises(
        ValueError, match="its model has the classes dog, cow, bee, ant"
    ):
        build.experiment(**options(model=module, init_from=other))


@pytest.mark.parametrize("flag", ["init_from", "teacher"])
@pytest.mark.parametrize(
    "more, is_seen",
    [
        ({}, False),
        ({"local_epochs": 2}, False),
        ({"seed": 5}, True),
        ({"num_seeds": 2}, True),
        ({"partition": "iid"}, True),
    ],
)
def test_train_rows_that_test(saved, flag, more, is_seen):
    """The file says which rows it has seen; the number of those is exact."""
    asked = {flag: str(saved), **({"algo": "distill"} if flag == "teacher" else {})}
    found = notes("test rows are train rows", **asked, **more)
    assert len(found) == is_seen
    if is_seen:
        made = build.experiment(**options(**more)).data.partition.test.row
        seen = model_files.read(saved)["rows"].is_trained()
        counts = [int(seen[row[row >= 0]].sum()) for row in np.asarray(made)]
        assert f": {max(counts)} of this run's " in found[0]
    assert not notes("other examples", **asked, **more)


def test_train_rows_that_validate(saved):
    """All rows of `--val_split` were train rows where the partition is the same."""
    more = {"val_split": 0.5}
    (line,) = notes(" are train rows of its model", init_from=str(saved), **more)
    row = np.asarray(build.experiment(**options(**more)).data.partition.val.row)
    count = (row >= 0).sum()
    assert count and f": {count} of this run's {count} validation rows are" in line


def test_rows_of_a_model_s_file(trained, saved, tmp_path):
    """Those of its run, and of the model that it started from."""
    part = trained.data.partition.train
    wanted = np.zeros(120, bool)
    wanted[np.asarray(part.row)[np.asarray(part.row) >= 0]] = True
    found = model_files.read(saved)["rows"]
    np.testing.assert_array_equal(found.is_trained(), wanted)
    assert found.are_of(X) and not found.are_of(X[::-1]) and not found.are_of(X[:9])
    later = build.experiment(**options(init_from=str(saved), seed=5))
    again = model_files.read(later.save_model(tmp_path / "two.msgpack"))["rows"]
    other = build.experiment(**options(seed=5)).save_model(tmp_path / "three.npz")
    alone = model_files.read(other)["rows"].is_trained()
    np.testing.assert_array_equal(again.is_trained(), wanted | alone)
    assert alone.sum() < again.is_trained().sum()


def test_rows_of_earlier_models_that_a_file_does_not_have(saved, tmp_path):
    """Unknown ones, and those of other examples, are remembered by all that follow."""
    fields = {f"rows/{name}": None for name in model_files.Rows._fields}
    unknown = changed(tmp_path / "unknown.npz", saved, **fields)
    chains = {"unknown": (unknown, X), "other": (str(saved), X[::-1].copy())}
    for name, (path, images) in chains.items():
        made = build.experiment(**options(init_from=path, dataset=(images, NAMES[Y])))
        second = str(made.save_model(tmp_path / f"{name}2.msgpack"))
        assert notes("began with or learned from another", init_from=second)
        third = build.experiment(**options(init_from=second))
        last = str(third.save_model(tmp_path / f"{name}3.safetensors"))
        assert notes("whose train rows the file does not have", init_from=last)
    assert not notes("began with or learned", init_from=str(saved))


def test_rows_of_a_proxy_set_are_trained_on_too(tmp_path):
    """They are in a model's file; public examples are none of the data set."""
    made = build.experiment(**options(algo="cdkt", proxy_fraction=0.2))
    part, wanted = made.data.partition, np.zeros(120, bool)
    for rows in map(np.asarray, (part.train.row, part.proxy)):
        assert not wanted[rows[rows >= 0]].any()
        wanted[rows[rows >= 0]] = True
    found = made.client_model(0).rows()
    np.testing.assert_array_equal(found.is_trained(), wanted)
    np.savez(tmp_path / "public.npz", x=X[:9], y=Y[:9])
    public = f"npz:{tmp_path / 'public.npz'}"
    made = build.experiment(**options(algo="fedmd", public_set=public))
    found = made.client_model(0).rows()
    count = np.asarray(made.data.partition.train.count).sum()
    assert found.are_of(X) and found.is_trained().sum() == count


def test_the_round_of_the_models_is_said():
    """Where the run is over, and its summary of an earlier round."""
    given = {"metrics": [1], "is_over": True, "seeds": [4], "round": 3}
    best = SimpleNamespace(summary="best", keep_best=False)
    given |= {"config": best, "best_round": lambda _: 2, "chooses_round": True}

    def line(**change):
        return client_model._other_round(SimpleNamespace(**given | change), 0, 0)

    assert "models of round 3, and the summary of seed 4 is that of round 2" in line()
    last = {"chooses_round": False}
    for one in ({"is_over": False}, {"metrics": []}, {"round": 2}, last):
        assert not line(**one)


def test_files_that_say_less(saved, tmp_path):
    """Of earlier versions, of other data, or damaged."""
    old = changed(
        tmp_path / "old.npz",
        saved,
        **{f"rows/{name}": None for name in model_files.Rows._fields},
    )
    assert notes("does not say on which rows its model was trained", init_from=old)
    order = np.random.default_rng(0).permutation(120)
    data = X[order], NAMES[Y][order]
    assert notes("was trained on other examples", init_from=str(saved), dataset=data)
    short = changed(tmp_path / "short.npz", saved, **{"rows/count": np.int64(9999)})
    with pytest.raises(ValueError, match="short.npz is not a model's file"):
        model_files.read(short)


def test_constants_of_earlier_versions(tmp_path):
    """A scale of 1e7 in a file is that of a constant, and no other normalisation."""
    x = X.copy()
    x[:, 2] = X[:, 2].mean()
    more = {"dataset": (x, Y), "normalization": "pixel"}
    made = build.experiment(**options(**more))
    path = made.save_model(tmp_path / "new.npz")
    scale = np.asarray(made.data.scale)
    assert scale[2] == 1
    old = np.where(np.arange(6) == 2, np.float32(1000), scale)
    for one in (scale, old):
        assert np.flatnonzero(dataset.is_of_constant(one)).tolist() == [2]
    for one in (path, changed(tmp_path / "old.npz", path, **{"input/scale": old})):
        build.experiment(**options(**more, init_from=str(one)))
    # Where one side has a constant, the other may vary.
    varied = {"normalization": "pixel", "dataset": (X, Y)}
    assert build.experiment(**options(**varied, init_from=str(path)))
    other = build.experiment(**options(**varied)).save_model(tmp_path / "varied.npz")
    assert build.experiment(**options(**more, init_from=str(other)))
    far = changed(tmp_path / "far.npz", path, **{"input/scale": 3 * scale})
    with pytest.raises(ValueError, match="another normalisation"):
        build.experiment(**options(**more, init_from=far))


def test_new_values_where_nothing_varied():
    """A pixel that was always 0 does not decide the answer."""
    x = X.copy()
    x[:, 2] = 0
    made = build.experiment(**options(dataset=(x, Y), rounds=10))
    made.run(progress=False)
    before = made.evaluate(x, Y)["accuracy"]
    x[:, 2] = 1 / 16
    assert before > 0.7 and made.evaluate(x, Y)["accuracy"] > before - 0.05


@pytest.mark.parametrize(
    "x, words",
    [
        (np.uint8(255 * X), "images are uint8 from .*expected float32.* x / 255"),
        (np.int64(255 * X), "images are int64 .* in the data, such as x.astype"),
        (X > 0.5, "images are bool from False to True; expected float32"),
        (np.where(X > 0.9, np.nan, X), "x holds nan or infinity"),
        (np.where(X > 0.9, np.inf, X), "x holds nan or infinity"),
        (X.astype(str), "images are <U32; expected float32, as in the data$"),
    ],
)
def test_examples_of_another_kind(trained, x, words):
    """One line, of `predict` and of `evaluate`."""
    for ask in (lambda: trained.predict(0, x), lambda: trained.evaluate(x, NAMES[Y])):
        with pytest.raises(ValueError, match=words):
            ask()
    np.testing.assert_array_equal(
        trained.predict(0, X), trained.predict(0, X.astype(float))
    )


@pytest.mark.parametrize("client_id", [True, False, 1.0, np.float32(1), "1", 6, -1])
def test_clients_are_whole_numbers(trained, client_id):
    """True is not client 1."""
    with pytest.raises(ValueError, match=r"^client_id=.*: expected 0\.\.5$"):
        trained.predict(client_id, X)
    np.testing.assert_array_equal(
        trained.predict(np.int64(1), X), trained.predict(1, X)
    )


def test_whole_numbers_of_a_table():
    """Its columns may be whole, as they may be when it trains."""
    table = pandas.DataFrame(np.uint8(255 * X[:, :3]), columns=list("abc"))
    made = build.experiment(**options(dataset=table.assign(y=Y)))
    given = table, table.to_numpy(), table.to_numpy(float)
    p = [made.predict(0, one) for one in given]
    np.testing.assert_array_equal(p[0], p[1])
    np.testing.assert_array_equal(p[0], p[2])


def test_partition_files_of_other_data(tmp_path):
    """Refused, said, or silent where the data are the same."""
    path = tmp_path / "rows.npz"
    made = build.experiment(**options(export_partition=str(path)))
    asked = {"partition": f"file:{path}", "num_clients": None}
    assert not notes("--partition", **asked)
    assert not notes("--partition", **asked, dataset=(X, Y))  # names do not matter
    assert notes("the same", **asked, dataset=(X / 2, Y))
    again = build.experiment(**options(**asked))
    assert again.split_sha256 == made.split_sha256
    order = np.random.default_rng(0).permutation(120)
    for data in ((X[order], Y[order]), (np.r_[X, X], np.r_[Y, Y])):
        with pytest.raises(ValueError, match="was made for other data, "):
            notes("", **asked, dataset=data)
    for more in ({"num_clients": 3}, {"test_split": "pool"}, {"proxy_fraction": 0.5}):
        with pytest.raises(ValueError, match="names the rows"):
            notes("", **asked | more)
    with pytest.raises(ValueError, match="has as many partitions"):
        notes("", num_seeds=2, export_partition=str(path))
    shared = {"partition": "contiguous", "proxy_fraction": 0.3}
    given = {"dataset": ((X, NAMES[Y]), (X[:30], NAMES[Y[:30]]))}
    given |= {"partition_seed": None, "export_partition": str(path)}
    with pytest.raises(ValueError, match="has as many partitions"):  # of proxy rows
        notes("", num_seeds=2, **given, **shared)
    # A file has what a share kept, of which a run on it could take a share again.
    assert notes(
        " has the train rows that", export_partition=str(path), train_share=0.5
    )
    half = build.experiment(**options(**asked))
    assert (half.data.partition.train.count < made.data.partition.train.count).all()


def test_partition_files_of_images_with_a_margin(tmp_path):
    """The rows are the same, whatever margin there is."""
    path = tmp_path / "rows.npz"
    data = np.uint8(255 * X).reshape(120, 2, 3, 1), Y
    build.experiment(**options(dataset=data, export_partition=str(path), image_size=4))
    asked = {"partition": f"file:{path}", "num_clients": None, "dataset": data}
    assert not notes("--partition", **asked)


def test_official_test_rows():
    """All clients' models are tested on them; no client owns any."""
    made = build.experiment(
        **options(dataset=(X[:90], Y[:90]), test=(X[90:], Y[90:]), num_clients=6)
    )
    assert made.config.test_split == "official"
    row = np.asarray(made.data.partition.test.row)
    assert sorted(row[row >= 0]) == list(range(90, 120))
    train = np.asarray(made.data.partition.train.row)
    assert sorted(train[train >= 0]) == list(range(90))
    (line,) = notes(
        "does not use the rows of test=",
        **{"dataset": (X[:90], Y[:90]), "test": (X[90:], Y[90:])},
        test_split="client_share",
    )
    assert line.startswith("--test_split=client_share")
    for again in ({"test": (X, Y)}, {"val": (X, Y)}):
        assert len(notes("rows are the train rows", dataset=(X, Y), **again)) == 1
    assert not notes("are the train rows", dataset=(X, Y), test=(X[::-1], Y))


def test_official_test_rows_beside_owners():
    """Owners have train rows only, also where small ones are left out."""
    owner = np.repeat([5, 7, 9, 11], [30, 30, 25, 5])
    given = {"dataset": (X[:90], Y[:90], owner), "test": (X[90:], Y[90:])}
    given |= {"num_clients": None}
    made = build.experiment(**options(**given))
    count = np.asarray(made.data.partition.train.count)[0]
    assert made.owners == ("5", "7", "9", "11") and count.tolist() == [30, 30, 25, 5]
    made = build.experiment(**options(**given, min_owner_examples=10))
    assert made.owners == ("5", "7", "9") and made.dropped_owners == {"11": 5}
    row = np.asarray(made.data.partition.test.row)
    assert (row >= 0).sum() == 30
    np.testing.assert_array_equal(np.asarray(made.data.image)[row[row >= 0]], X[90:])
    with pytest.raises(ValueError, match="--test_split=pool divides each client's tr"):
        build.experiment(**options(**given, test_split="pool"))


class Bag(nn.Module):
    """The mean of the embeddings of a row."""

    @nn.compact
    def __call__(self, x):
        assert x.dtype == np.int32
        return nn.Dense(2)(nn.Embed(30, 8)(x).mean(1))


def test_tokens_with_labels(tmp_path):
    """A custom model gets int32[B, T] as they are, and one label for each row."""
    t = np.random.default_rng(0).integers(0, 30, (120, 7))
    y = (t[:, :3] > 14).sum(1) > 1
    more = {"dataset": (t, y), "model": Bag(), "client_lr": 0.5, "rounds": 60}
    made = build.experiment(**options(**more, clients_per_round=6))
    assert made.config.normalization == "none" and made.data.num_words == 0
    assert made.notes[0].startswith("x int64 [120, 7] is taken as tokens 0 to 29; give")
    assert made.run(progress=False)["metrics"]["global_accuracy"]
    assert made.evaluate(t, y)["accuracy"] > 0.7
    path = made.save_model(tmp_path / "bag.npz")
    again = build.experiment(**options(**more, init_from=str(path)))
    np.testing.assert_array_equal(again.predict(None, t), made.predict(None, t))
    with pytest.raises(ValueError, match="images are float64 .* expected int32 from 0"):
        made.predict(0, t.astype(float))


@pytest.mark.parametrize(
    "more, words",
    [
        (
            {},
            "--model=narrow takes numbers and not rows of 7 tokens with a label; give",
        ),
        (
            {"model": Bag(), "normalization": "channel"},
            "=channel is for numbers, these",
        ),
        (
            {"model": Bag(), "augment": "crop_flip"},
            "--augment=crop_flip changes images",
        ),
    ],
)
def test_tokens_are_not_numbers(more, words):
    """One line."""
    with pytest.raises(ValueError, match=words):
        build.experiment(**options(dataset=(np.ones((120, 7), int), Y % 2)) | more)


def test_numbers_as_text_are_the_same_classes(tmp_path):
    """Of twelve classes, which text has in another order than numbers."""
    gen = np.random.default_rng(0)
    label = gen.integers(0, 12, 240)
    x = (4 * gen.normal(size=(12, 20))[label] + gen.normal(size=(240, 20))).astype("f")
    options = {"algo": "fedavg", "preset": "none", "model": "narrow"}
    options |= {"num_clients": 4, "devices": 1}
    first = build.experiment(**options, dataset=(x, label), rounds=3, local_epochs=5)
    first.run(progress=False)
    first.save_model(tmp_path / "one.npz")
    again = build.experiment(
        **options, dataset=(x, label.astype(str)), init_from=str(tmp_path / "one.npz")
    )
    found = again.evaluate(x, label.astype(str))
    assert found == pytest.approx(first.evaluate(x, label))
    assert any("in another order" in note for note in again.notes)


@pytest.mark.parametrize("test", [None, ([[0.0, 1.0]] * 4, [1, 2, 1, 2])])
def test_labels_of_two_types_are_refused(test):
    """Also beside test rows, which numpy would join to 1 and 2."""
    x = np.random.default_rng(0).normal(size=(40, 2)).astype("f")
    test = test and (np.array(test[0], "f"), test[1])
    options = {"algo": "fedavg", "num_clients": 4, "dataset": (x, [True, 2] * 20)}
    with pytest.raises(ValueError, match="got bool and int"):
        build.experiment(**options, test=test)


def test_a_table_to_predict_is_of_numbers():
    """As the table of training, whose line names the columns and not their contents."""
    frame = pandas.DataFrame({"a": np.arange(40.0), "label": np.arange(40) % 2})
    given = {"algo": "fedavg", "model": "narrow", "num_clients": 4, "devices": 1}
    made = build.experiment(dataset=frame, **given)
    with pytest.raises(ValueError, match="the table: columns are not numbers: a;"):
        made.predict(None, frame.assign(a="secret"))
    with pytest.raises(ValueError, match=r"^client_id=<ndarray \[40\]>: expected"):
        made.evaluate(None, frame, np.arange(40))


def test_an_exported_partition_names_rows_of_the_whole(tmp_path):
    """Also where owners were left out, whose rows have numbers too."""
    owners = np.repeat(np.arange(5), [3, 30, 30, 30, 27])
    path = str(tmp_path / "part.npz")
    given = {"dataset": (X, Y, owners), "num_clients": 4}
    more = {"partition": "natural", "min_owner_examples": 10}
    about = notes("constants of its --norm", **given, **more, export_partition=path)
    assert len(about) == 1
    with np.load(path) as file:
        rows = np.split(file["train_row"], np.cumsum(file["train_count"])[:-1])
        assert file["num_rows"] == 120
    assert [set(owners[one]) for one in rows] == [{1}, {2}, {3}, {4}]
    again = build.experiment(**options(**given, partition=f"file:{path}"))
    trained = np.unique(again.data.partition.train.row)
    assert np.array_equal(trained[trained >= 0], np.sort(np.concatenate(rows)))


def test_columns_of_a_model_s_file(tmp_path):
    """A model starts from a file of the same columns in the same order only."""
    table = pandas.DataFrame(X, columns=list("abcdef")).assign(y=NAMES[Y])
    made = build.experiment(**options(dataset=table, rounds=1))
    made.run(progress=False)
    given = {"init_from": str(made.save_model(tmp_path / "one.msgpack"))}
    build.experiment(**options(dataset=table, **given))
    assert notes("only its model names the columns (a, b, c, d, e, f)", **given)
    for other in (table[list("abdcefy")], table.rename(columns={"c": "d", "d": "c"})):
        line = "trained on 6 columns, and this table has 6; number 3 was c, and here it"
        with pytest.raises(ValueError, match=line):
            build.experiment(**options(dataset=other, **given))


def test_an_index_with_a_name_is_noted():
    table = pandas.DataFrame(X).add_prefix("x").assign(y=Y, user_id=np.arange(120) // 9)
    table = table.set_index("user_id")
    line = "the index user_id is not used, .reset_index() makes it a column"
    for given in (table, (table.drop(columns="y"), table["y"])):
        assert notes(line, dataset=given)


def test_labels_in_another_order_than_the_table_that_is_measured(trained):
    """As among the train rows, a Series would be joined by place."""
    model, table = trained.client_model(None), pandas.DataFrame(X)
    label = pandas.Series(NAMES[Y])
    assert model.evaluate(table, label)["accuracy"] > 0.5
    with pytest.raises(ValueError, match="evaluate: y has the index of the table in "):
        model.evaluate(table, label.sample(frac=1, random_state=0))


def test_names_that_may_be_missing_values(tmp_path):
    """Of owners and labels `NA` is a name; one line says so."""
    path = tmp_path / "rows.csv"
    table = pandas.DataFrame(X).add_prefix("x").assign(y=Y, owner=["NA", "u", "v"] * 40)
    table.to_csv(path, index=False)
    found = build.experiment(**options(dataset=f"csv:{path}", num_clients=3)).notes
    assert "owner holds the text NA, which is taken as a name" in " ".join(found)
