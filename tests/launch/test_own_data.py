"""Data sets that nobody prepared, from the arguments to the names in the report."""

import re

import numpy as np
import pandas
import pytest
from flax import linen as nn
from PIL import Image

from launch import build, export, main, report
from launch.assemble import model_files
from launch.folder import record
from tests import synthetic

pytestmark = pytest.mark.usefixtures("narrow")
GRID = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
CLASSES = ("cat", "cow", "dog", "eel")
SMALL = {
    "algo": "fedavg",
    "preset": "none",
    "rounds": 1,
    "devices": 1,
    "model": "narrow",
    "num_clients": 3,
}


def blobs(*shape):
    """(examples uint8 [48, ...], labels as numbers) in four classes."""
    source = synthetic.blobs(48, shape, 4)
    return source.image, source.label


def words(y):
    """The names of labels."""
    return np.array(CLASSES)[y]


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A finished run on gray images [N, H, W] with text for labels."""
    x, y = blobs(6, 6)
    folder = str(tmp_path_factory.mktemp("named") / "run")
    made = build.experiment(dataset=(x, words(y)), workdir=folder, **SMALL)
    made.run(progress=False)
    return made


def test_columns_of_a_public_table_go_by_name(tmp_path):
    """In any order, and whatever their labels; one that lacks is named."""
    label = np.arange(len(GRID)) % 2
    table = pandas.DataFrame(GRID, columns=["a", "b", "c"])
    table.assign(label=label).to_csv(tmp_path / "own.csv", index=False)
    given = SMALL | {"algo": "fedmd", "dataset": f"csv:{tmp_path / 'own.csv'}"}

    def images(columns):
        path = tmp_path / "public.csv"
        table[:20][columns].assign(label=0).to_csv(path, index=False)
        made = build.experiment(**given, public_set=f"csv:{path}", partition="iid")
        line = f"20 of 20 images of --public_set=csv:{path} are examples of --dataset="
        assert any(note.startswith(line) for note in made.notes)
        return np.asarray(made.data.image)[-20:]  # behind the clients' own

    np.testing.assert_array_equal(images(["a", "b", "c"]), GRID[:20])
    np.testing.assert_array_equal(images(["c", "a", "b"]), GRID[:20])
    with pytest.raises(ValueError, match="public.csv has no column b, which"):
        images(["a", "c"])


def test_columns_of_a_public_table_have_the_same_names(tmp_path):
    """Labels and owners are those of the data's options, or none: nobody reads them."""
    table = pandas.DataFrame(GRID, columns=["a", "b", "c"])
    beside = {"kind": np.arange(len(GRID)) % 2, "site": np.arange(len(GRID)) // 40}
    table.assign(**beside).to_csv(tmp_path / "own.csv", index=False)
    given = SMALL | {"algo": "fedmd", "dataset": f"csv:{tmp_path / 'own.csv'}"}
    given |= {"label": "kind", "owner": "site", "partition": "natural"}
    for columns in (beside, {}, {"site": beside["site"]}):
        for name in ("public.csv", "public.parquet"):
            path, public = tmp_path / name, table.assign(**columns)[:20]
            if name.endswith("csv"):
                public.to_csv(path, index=False)
            else:
                public.to_parquet(path, index=False)
            made = build.experiment(**given, public_set=f"{path.suffix[1:]}:{path}")
            np.testing.assert_array_equal(made.data.image[-20:], GRID[:20])
    (table + 0.5).to_csv(tmp_path / "public.csv", index=False)
    made = build.experiment(**given, public_set=f"csv:{tmp_path}/public.csv")
    assert not any("are examples of" in note for note in made.notes)


def test_numbers_that_the_normalisation_is_not_for():
    """A line, as a preset for images would hide the columns of a table."""
    label = np.arange(len(GRID)) % 2
    for x, kind, is_odd in (
        (GRID * 1000, "half", True),
        (GRID * 1000, "channel", False),
        (np.clip(GRID, 0, 1), "half", False),
    ):
        made = build.experiment(dataset=(x, label), **SMALL, normalization=kind)
        line = f"--normalization={kind} is for numbers from 0 to 1, and these are -"
        assert sum(one.startswith(line) for one in made.notes) == is_odd


def test_ids_that_are_normalised_are_named():
    """Whole numbers beside others, but no flags, constants or all-whole rows."""
    ids, flags = np.arange(len(GRID)) % 12, np.arange(len(GRID)) % 2
    five = np.full(len(GRID), 5)
    y, x = ids % 3, np.column_stack([GRID, ids, flags, five])

    def lines(x, **more):
        made = build.experiment(dataset=(x, y), **SMALL, **more)
        return [one for one in made.notes if "are whole" in one]

    (line,) = lines(x)
    assert "channel: the numbers at 3 of each example are whole" in line
    assert not lines(x, normalization="channel") + lines(x[:, :3])
    assert not lines(np.column_stack([ids, flags]).astype(np.float32))


def test_names_do_not_change_the_numbers(named):
    """Labels 0..Y-1 of images with a channel give the same bits, and have no names."""
    x, y = blobs(6, 6)
    plain = build.experiment(dataset=(x[..., None], y), **SMALL)
    assert plain.run(progress=False)["metrics"] == named.summary()["metrics"]
    assert plain.classes is None and named.classes == CLASSES
    assert plain.data_sha256 == named.data_sha256
    assert list(named.partition_counts().columns) == list(CLASSES)
    np.testing.assert_array_equal(named.partition_counts(), plain.partition_counts())


def test_predictions_take_what_the_data_set_took(named):
    """Layout and labels as they were given; columns are in the order of the names."""
    x, y = blobs(6, 6)
    p = named.predict(None, x)
    np.testing.assert_array_equal(p, named.predict(None, x[..., None]))
    found = named.evaluate(x, words(y))
    assert found["accuracy"] == pytest.approx((p.argmax(1) == y).mean())
    with pytest.raises(ValueError, match="y has the labels fox, the model's are cat"):
        named.evaluate(x[:2], ["fox", "cat"])
    with pytest.raises(ValueError, match="the labels 0, 1, 2, 3, the model's are cat"):
        named.evaluate(x, y)
    with pytest.raises(ValueError, match="masked"):
        named.predict(None, np.ma.masked_less(x, 100))


def test_what_a_run_leaves_behind(named, tmp_path):
    """Names in clients.npz, in the pictures, in the report and beside the model."""
    folder = named.config.workdir
    assert record.class_names(record.read(named.folder.path)) == CLASSES
    axes = named.plot("bubbles").axes[0]
    form = axes.yaxis.get_major_formatter()
    assert [form(place) for place in axes.get_yticks()] == list(CLASSES)
    report.command(["report", folder, f"--output={tmp_path}/page.html"])
    page = (tmp_path / "page.html").read_text()
    assert "The classes are, in order: cat, cow, dog, eel." in page
    assert page.count("cow") >= 2  # and beside the bubbles
    for suffix in model_files.SUFFIXES:
        path = named.save_model(tmp_path / f"model{suffix}")
        assert model_files.read(path)["classes"] == CLASSES
        again = build.experiment(
            dataset=blobs(6, 6), init_from=str(path), **SMALL
        ).predict(None, blobs(6, 6)[0])
        np.testing.assert_array_equal(again, named.predict(None, blobs(6, 6)[0]))
    opened = build.load(folder, dataset=(blobs(6, 6)[0], words(blobs(6, 6)[1])))
    assert opened.classes == CLASSES and opened.round == 1


def test_owners_that_are_whole_numbers():
    """A number counts clients, its text names an owner, and a warning says so."""
    x, y = blobs(6, 6)
    owner = np.repeat([2, 1, 5], 16)  # clients 1, 0 and 2
    made = build.experiment(dataset=(x, y, owner), **SMALL, partition="natural")
    made.run(progress=False)
    with pytest.warns(UserWarning, match="counts clients from 0.*as client 0 is .*'1'"):
        rows = made.rows(1, "train")
    assert set(owner[rows]) == {2}
    np.testing.assert_array_equal(rows, made.rows("2", "train"))
    with pytest.raises(ValueError, match="client_id=5: expected 0..2, or an owner's"):
        made.rows(5)


def test_notes_say_what_was_taken(tmp_path, capsys, monkeypatch):
    """On the command line: NCHW, text in an npz, owners of few rows; one line each."""
    monkeypatch.chdir(tmp_path)
    x, y = blobs(3, 6, 6)
    owner = np.repeat(["a", "b", "c", "d"], [20, 3, 24, 1])
    np.savez("own.npz", x=x, y=words(y), client=owner)
    given = ["--rounds=1", "--model=narrow", "--devices=1", "--preset=none"]
    given += ["--min_owner_examples=5"]
    main.main(["main", "--algo=local", "--dataset=npz:own.npz", *given])
    lines = capsys.readouterr().out.splitlines()
    notes = [line for line in lines if line.startswith("note: ")]
    assert notes == [
        "note: x [48, 3, 6, 6] is taken as NCHW: H 6, W 6, C 3; --layout=nhwc if not",
        "note: labels are numbered 0 to 3 in this order: cat, cow, dog, eel",
        "note: owners with fewer than --min_owner_examples=5 rows are left out, 2: "
        "b has 3, d has 1",
        "note: owners are clients 0 to 1 in this order: a, c",
    ]
    found = record.read(tmp_path / "runs" / "local-own-seed0")
    assert found.clients["owner_names"].tolist() == ["a", "c"]
    made = build.load("runs/local-own-seed0")
    assert made.owners == ("a", "c") and made.data.image.shape == (44, 6, 6, 3)
    by_channel = made.predict("c", x)
    with pytest.raises(
        ValueError, match="'d': expected 0..1, or an owner's name, 'a', "
    ):
        made.predict("d", x)
    export.command(["export", "runs/local-own-seed0", "--owner=c"])
    by_number = made.save_model("other.msgpack", 1)
    assert (tmp_path / "model.msgpack").read_bytes() == by_number.read_bytes()
    capsys.readouterr()
    export.command(["export", "runs/local-own-seed0", "--client=1"])
    assert capsys.readouterr().out == "client 1 is the owner c\nmodel.msgpack\n"
    for flag, said in (
        ("--client=2", "--client=2: expected 0..1, or with --owner 'a', 'c'"),
        ("--owner=d", "--owner='d': expected an owner's name, 'a', 'c'"),
    ):
        with pytest.raises(SystemExit):
            export.command(["export", "runs/local-own-seed0", flag])
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        export.command(["export", "runs/local-own-seed0"])
    assert "no server's model; give --client" in capsys.readouterr().err
    np.testing.assert_array_equal(by_channel, made.predict(1, np.moveaxis(x, 1, -1)))


@pytest.mark.parametrize(
    "given, words",
    [
        (
            {"partition": "pathological", "partition_draw": "overlap"},
            "test rows are train rows of some client, ",
        ),
        (
            {"partition": "pfllib_pathological", "num_clients": 3},
            r"no client trains on 4 of 10 classes \(6, 7, 8, 9\), 80 rows of the data",
        ),
        (
            {"partition": "pathological", "dataset": (GRID, [0] * 190 + [1] * 10)},
            "classes_per_client=2: 11 of 20 clients train on fewer classes",
        ),
        (
            {
                "partition": "classes",
                "client_classes": "0,1/0,1/1,2",
                "num_clients": 3,
                "dataset": (GRID, [0] * 150 + [1, 1] + [2] * 48),
            },
            "client_classes=0,1/0,1/1,2: 1 of 3 clients train on fewer classes",
        ),
        ({"partition": "iid"}, ""),
    ],
)
def test_what_a_partition_leaves_out(given, words):
    """Test rows that train, classes of no client, clients with too few classes."""
    own = {"dataset": (GRID, np.arange(200) % 10), "num_clients": 20}
    notes = build.experiment(**SMALL | own | given).notes
    wrong = ("some client", "no client trains", "fewer classes")
    found = [line for line in notes if any(one in line for one in wrong)]
    assert bool(found) == bool(words) and (not words or re.search(words, found[0]))


def test_seeds_that_leave_out_others():
    """Lines about rows are of the seed with the most, and say so."""

    def lines(**more):
        own = {"dataset": (GRID[:120], np.arange(120) % 4), "num_clients": 4}
        own |= {"partition": "pathological", "partition_draw": "overlap"}
        return build.experiment(**SMALL | own | more).notes

    def counts(part, found):
        (line,) = [one for one in found if part in one] or ["0"]
        return int(re.search(r"(\d+) of", line)[1]) if part in line else 0

    for part in ("some client", "no client trains"):
        alone = [counts(part, lines(seed=seed)) for seed in range(3)]
        found = [one for one in lines(num_seeds=3) if part in one]
        assert len(set(alone)) > 1
        assert f"up to {max(alone)} of" in found[0]


def test_a_class_that_nobody_is_left_to_train_on():
    """Also where the clients' classes are given, and the one that has it is unseen."""
    own = {"dataset": (GRID, np.arange(200) % 4), "num_clients": 4}
    own |= {"partition": "classes", "client_classes": "0,1/0,1/2/0,1"}

    def found(**more):
        notes = build.experiment(**SMALL | own | more).notes
        return [one for one in notes if "no client trains" in one]

    assert not found()  # class 3 is of nobody
    lines = [found(unseen_clients=1, partition_seed=seed) for seed in range(9)]
    assert {str(one) for one in lines if one} == {
        "['no client trains on 1 of 4 classes (2), 50 rows of the data']"
    }
    assert not all(lines)


def test_rows_that_also_train_are_counted(tmp_path):
    """Those to validate on too, and those of a file."""
    given = SMALL | {"dataset": (GRID, np.arange(200) % 10), "num_clients": 20}
    given |= {"partition": "pathological", "partition_draw": "overlap"}

    def lines(**more):
        made = build.experiment(**given | more)
        found = [line for line in made.notes if "rows are train rows" in line]
        return made, [line.split(": ", 1)[1] for line in found]

    path = f"{tmp_path}/rows.npz"
    _, (of_tests,) = lines(export_partition=path)
    more = {"partition_draw": None, "num_clients": None}
    assert lines(partition=f"file:{path}", **more)[1] == [of_tests]

    made, found = lines(val_split=0.5)
    train, test, val = (
        [made.rows(client, kind).tolist() for client in range(20)]
        for kind in ("train", "test", "val")
    )
    for line, kind, owned in zip(
        found, ("test", "validation"), (test, val), strict=True
    ):
        some = sum(row in sum(train, []) for row in sum(owned, []))
        pairs = zip(owned, train, strict=True)
        own = sum(row in mine for rows, mine in pairs for row in rows)
        assert some > own > 0 and line == (
            f"{some} of {len(sum(owned, []))} {kind} rows are train rows of some "
            f"client, {own} of them of the same one"
        )


def test_layout_is_part_of_a_run(tmp_path):
    """With an explicit layout every shape is transposed, also in `predict`."""
    x, y = blobs(3, 4, 4)
    made = build.experiment(dataset=(x, y), layout="nchw", **SMALL)
    assert made.data.image.shape == (48, 4, 4, 3)
    with pytest.raises(ValueError, match=r"images are of shape \[48, 4, 3, 4\]"):
        made.predict(0, np.moveaxis(x, 1, -1))
    wanted = np.moveaxis(x, 1, -1)
    np.testing.assert_array_equal(
        made.predict(0, x),
        build.experiment(dataset=(wanted, y), **SMALL).predict(0, wanted),
    )
    found = made.predictions(0)
    answers = made.predict(0, x[found["row"]]).argmax(1)
    np.testing.assert_array_equal(found["predicted"], answers)


class OverTime(nn.Module):
    """A convolution over the steps of a series."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Conv(4, (3,))(x)).mean(1))


def test_a_series():
    """[N, T, C] for a custom model, with labels -1 and 1."""
    x = np.random.default_rng(0).normal(size=(48, 7, 2))
    y = np.where(x[:, :, 0].mean(1) > 0, 1, -1)
    given = SMALL | {"model": OverTime()}
    made = build.experiment(dataset=(x, y), layout="ntc", partition="iid", **given)
    made.run(progress=False)
    assert made.data.image.shape == (48, 7, 2) and made.classes == ("-1", "1")
    right = (made.predict(None, x)[:, 1] > 0.5) == (y == 1)
    found = made.evaluate(x, y.astype(float))["accuracy"]
    assert found == pytest.approx(right.mean())
    with pytest.raises(ValueError, match="=narrow .*series .7, 2. .*custom model"):
        build.experiment(dataset=(x, y), layout="ntc", **SMALL)


def table():
    """A table with text for labels and owners of 1 to 30 rows."""
    x, y = blobs(3)
    frame = pandas.DataFrame(x, columns=["a", "b", "c"])
    site = np.repeat(["ur", "eridu", "nippur"], [17, 1, 30])
    return frame.assign(kind=words(y), site=site, is_old=y > 1)


def test_tables(tmp_path):
    """A DataFrame and the same table as CSV are the same run."""
    table().to_csv(tmp_path / "own.csv", index=False)
    given = SMALL | {"num_clients": None, "label": "kind", "owner": "site"}
    with pytest.raises(ValueError, match="1 of 3 owners .*: eridu has 1; drop them"):
        build.experiment(dataset=table(), **given)
    given["min_owner_examples"] = 2
    runs = [
        build.experiment(dataset=one, **given)
        for one in (table(), f"csv:{tmp_path}/own.csv")
    ]
    for one in runs:
        assert one.classes == CLASSES and one.owners == ("nippur", "ur")
        assert one.dropped_owners == {"eridu": 1}
        assert one.config.partition == "natural" and one.config.num_clients == 2
    assert runs[0].split_sha256 == runs[1].split_sha256
    for owner, rows in {"ur": range(17), "nippur": range(18, 48)}.items():
        parts = [runs[0].rows(owner, split) for split in ("train", "test")]
        assert sorted(np.concatenate(parts)) == [*rows]
        seen = runs[0].predictions(owner)
        np.testing.assert_array_equal(seen["row"], parts[1])
        np.testing.assert_array_equal(seen["label"], table()["kind"][parts[1]])
    one = build.experiment(dataset=table(), **given | {"num_clients": 1})
    assert (
        "--num_clients=1 takes the first 1 of 2 owners; 17 of 47 train rows are of the "
        "others; --num_clients=2 takes all" in one.notes
    )


def test_a_folder_of_a_table_needs_it_again(tmp_path):
    """The line is about the data, not about the columns."""
    options = {"label": "kind", "owner": "site", "min_owner_examples": 2}
    given = SMALL | options | {"num_clients": None, "workdir": str(tmp_path)}
    build.experiment(dataset=table(), **given).run(progress=False)
    with pytest.raises(ValueError, match="were in memory; .* or the DataFrame"):
        build.load(tmp_path)
    assert build.load(tmp_path, dataset=table()).owners == ("nippur", "ur")


def test_folder_of_images(tmp_path):
    """Owners are clients."""
    x, y = blobs(6, 6, 3)
    for number, (pixels, name) in enumerate(zip(x, words(y), strict=True)):
        folder = tmp_path / ("ann" if number < 30 else "bob") / name
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    given = SMALL | {"num_clients": None}
    made = build.experiment(dataset=f"images:{tmp_path}", **given)
    assert made.owners == ("ann", "bob") and made.classes == CLASSES
    count = made.data.partition.train.count + made.data.partition.test.count
    assert np.asarray(count)[0].tolist() == [30, 18]


X, Y = blobs(4)


@pytest.mark.parametrize(
    "given, part",
    [
        (
            {"dataset": (X, Y, Y), "min_owner_examples": 99, "num_clients": None},
            "--min_owner_examples=99: every owner has fewer rows; lower it",
        ),
        ({"dataset": table(), "layout": "nhwc"}, "no effect with --dataset=arrays"),
    ],
)
def test_options_of_other_data(given, part):
    """One line that names the option."""
    with pytest.raises(ValueError, match=part) as error:
        build.experiment(**SMALL | {"dataset": (X, Y)} | given)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def of_file(tmp_path_factory):
    """A CSV whose label NA and owner 01 are names, and a run on it."""
    folder = tmp_path_factory.mktemp("named")
    gen = np.random.default_rng(0)
    frame = pandas.DataFrame(gen.normal(size=(60, 3)), columns=["a", "b", "c"])
    frame["y"] = np.where(frame.a > 0, "NA", "y")
    frame["site"] = ["01"] * 30 + ["1"] * 28 + ["odd"] * 2
    frame.loc[58:, "y"] = "rare"
    frame.to_csv(folder / "named.csv", index=False)
    given = {"owner": "site", "min_owner_examples": 5, "model": "narrow", "rounds": 2}
    given["devices"] = 1
    experiment = build.experiment(
        algo="fedavg",
        preset="none",
        dataset=f"csv:{folder / 'named.csv'}",
        eval_metrics="per_class",
        workdir=str(folder / "run"),
        **given,
    )
    experiment.run(progress=False)
    return frame, experiment


def test_text_of_a_file_is_as_it_is(of_file, undrawn, tmp_path):
    """NA is a class, 01 is not 1, a class that has lost its rows is said."""
    _, experiment = of_file
    assert experiment.classes == ("NA", "rare", "y")
    assert experiment.owners == ("01", "1")
    assert "no row is of the class rare" in " ".join(experiment.notes)
    page = tmp_path / "page.html"
    report.command(["report", experiment.config.workdir, f"--output={page}"])
    assert "Global, class NA" in page.read_text()


def test_columns_are_taken_by_name(of_file):
    """In any order, and others are left out."""
    frame, experiment = of_file
    whole = experiment.predict(None, frame)
    turned = experiment.predict(None, frame[["c", "a", "b"]])
    plain = experiment.predict(None, frame[["a", "b", "c"]].to_numpy())
    np.testing.assert_array_equal(whole, turned)
    np.testing.assert_array_equal(whole, plain)
    assert experiment.evaluate(frame, frame.y)["accuracy"] > 0.5
    with pytest.raises(
        ValueError, match="the table lacks the columns c, which the train"
    ):
        experiment.predict(None, frame[["a", "b"]])
