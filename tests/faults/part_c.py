"""Faults of interpretation: data that are not what their user meant.

`python -m tests.faults` runs them all.
"""

import numpy as np
import pandas

from launch import build
from tests.faults.given import X, base, xv, y

WORDS = np.array(["ant", "bee", "cow", "dog"])[y]
TABLE = pandas.DataFrame(xv[:, :4], columns=list("abcd")).assign(label=y)
NO_CLIENTS = {"num_clients": None, "clients_per_round": 2}


def _line(*words, **given) -> str:
    """The error's line, or the first note with all of these words, or ""."""
    try:
        notes = build.experiment(**base | given).notes
    except ValueError as error:
        return str(error)
    return next((n for n in notes if all(word in n for word in words)), "")


def _asked(method, *args, dataset=(xv, y), **given) -> str:
    """The error's line of a method of an experiment that has not run, or ""."""
    made = build.experiment(**base | {"dataset": dataset})
    try:
        getattr(made, method)(*args, **given)
    except ValueError as error:
        return str(error)
    return ""


def _csv(folder, **columns) -> str:
    """`--dataset` of a CSV file of two features and these columns."""
    TABLE[["a", "b"]].assign(**columns).to_csv(folder / "own.csv", index=False)
    return f"csv:{folder}/own.csv"


# Tables


def s1_a_column_client(folder) -> str:
    """A table has a column `client`, and no --owner is given."""
    data = TABLE.assign(client=np.arange(400) // 50)
    return _line("owners: client", dataset=data, **NO_CLIENTS)


def s1_a_column_owner_of_a_file(folder) -> str:
    """A CSV file has a column `Owner`, and no --owner is given."""
    data = _csv(folder, label=y, Owner=np.arange(400) // 50)
    return _line("owners: Owner", dataset=data, **NO_CLIENTS)


def s1_a_column_user_id(folder) -> str:
    """A table has a column `user_id`, which is not a feature."""
    return _line("user_id", dataset=TABLE.assign(user_id=np.arange(400) // 50))


def s1_row_numbers(folder) -> str:
    """A saved index in a column `id` of a file that is sorted by label."""
    return _line("id", dataset=_csv(folder, label=np.sort(y), id=np.arange(400)))


def s1_row_numbers_by_another_name(folder) -> str:
    """A column counts the rows."""
    data = TABLE.assign(number=np.arange(400) + 1)
    return _line("number the rows: number", dataset=data)


def s1_a_copy_of_the_label(folder) -> str:
    """A column has the label as a code."""
    data = TABLE.assign(label=WORDS, code=10 - 3 * y)
    return _line("give it away: code", dataset=data)


def s1_a_column_is_test(folder) -> str:
    """A column says which rows test."""
    return _line("is_test", dataset=TABLE.assign(is_test=np.arange(400) % 5 == 0))


def s1_another_label(folder) -> str:
    """`class` is a passenger's class, and the label is `survived`."""
    data = TABLE.drop(columns="label").assign(survived=y % 2, **{"class": y})
    return _line("label: class; owners: none; features (5)", dataset=data)


def s1_a_frame_beside_its_labels(folder) -> str:
    """A frame with a column `user_id` and labels, as scikit-learn takes them."""
    data = TABLE.drop(columns="label").assign(user_id=np.arange(400) // 50)
    return _line("user_id", dataset=(data, y))


def s1_two_labels(folder) -> str:
    """Two columns could be the label."""
    return _line("Label", dataset=TABLE.rename(columns={"label": "Label"}).assign(y=y))


def s5_numbers_that_float32_merges(folder) -> str:
    """A column has unix times."""
    data = TABLE.assign(ts=1.7e9 + np.arange(400) * 0.5)
    return _line("float32", "ts (", dataset=data)


def s5_whole_numbers_that_float32_merges(folder) -> str:
    """A column has whole numbers beyond 2 to the 24."""
    data = TABLE.assign(number=16777217 + np.arange(400) * 3 // 2)
    return _line("float32", "number (", dataset=data)


def s5_numbers_of_arrays(folder) -> str:
    """Vectors of float64 have unix times."""
    data = np.c_[xv.astype(float), 1.7e9 + np.arange(400)], y
    return _line("float32", "x[:, 64]", dataset=data)


def s1_owners_of_an_npz_file_by_another_name(folder) -> str:
    """The owners of an npz file are called `owner`."""
    np.savez(folder / "own.npz", x=xv, y=y, owner=np.arange(400) // 50)
    return _line("not used: owner", dataset=f"npz:{folder}/own.npz")


# Labels and owners


def s12_owners_like_numbers(folder) -> str:
    """Owners of a file are called 1e3, 10e2 and 100e1."""
    who = np.array(["1e3", "10e2", "100e1"])[np.arange(400) % 3]
    data = _csv(folder, label=y, who=who)
    return _line("alike", "1e3", dataset=data, owner="who", **NO_CLIENTS)


def s12_labels_like_numbers(folder) -> str:
    """Labels of a file are 1e5 and 100000."""
    data = _csv(folder, label=np.array(["1e5", "100000"])[y % 2])
    return _line("alike", "1e5", dataset=data)


def s12_seven(folder) -> str:
    """Owners of a file are called 7 and 7.0."""
    data = _csv(folder, label=y, who=np.array(["7", "7.0"])[y % 2])
    return _line("alike", "7.0", dataset=data, owner="who", **NO_CLIENTS)


def s12_text_that_numpy_shortens(folder) -> str:
    """Two labels differ in a last NUL."""
    return _line(dataset=(xv, ["a" if one % 2 else "a\0" for one in y]))


def s12_two_forms_of_a_letter(folder) -> str:
    """A letter is composed in one label and not in another."""
    return _line("alike", dataset=(xv, np.array(["\xe9", "e\u0301"])[y % 2]))


def s12_spaces_and_capitals(folder) -> str:
    """Labels differ in case and in a space at the end."""
    return _line("alike", "Cat", dataset=(xv, np.array(["cat", "Cat", "cat "])[y % 3]))


def s12_columns_of_one_name(folder) -> str:
    """A file has two columns `a`."""
    path = folder / "own.csv"
    path.write_text("a,a,label\n" + "1,2,x\n3,5,y\n" * 40)
    return _line(dataset=f"csv:{path}")


def s12_infinite_labels(folder) -> str:
    """Labels are numbers, some of them infinite."""
    return _line(dataset=(xv, np.where(y == 3, np.inf, y)))


def s12_true_beside_numbers(folder) -> str:
    """Labels are a list of True and numbers."""
    return _line(dataset=(xv, [True if one == 1 else int(one) for one in y]))


# Models and partitions of other data


def _saved(folder, **given) -> str:
    """A model of the labels `WORDS`."""
    made = build.experiment(**base | {"dataset": (xv, WORDS)} | given)
    return str(made.save_model(folder / "model.npz"))


def _renamed() -> np.ndarray:
    return np.array(["zebra", "bee", "cow", "ant"])[y]


def s2_classes_of_a_model_to_start_from(folder) -> str:
    """--init_from has other classes."""
    return _line(dataset=(xv, _renamed()), init_from=_saved(folder))


def s2_classes_of_a_teacher(folder) -> str:
    """--teacher has other classes."""
    given = {"algo": "distill", "teacher": _saved(folder)}
    return _line(dataset=(xv, _renamed()), **given)


def s2_classes_without_names(folder) -> str:
    """--init_from names its classes, and this run's are numbers."""
    return _line("only its model", dataset=(xv, y), init_from=_saved(folder))


def f4_3_a_model_of_another_seed(folder) -> str:
    """--init_from was trained on another seed's train rows."""
    given = {"init_from": _saved(folder), "seed": 5}
    return _line("test rows are train rows", dataset=(xv, WORDS), **given)


def f4_3_a_model_of_another_partition(folder) -> str:
    """--init_from was trained on another partition's train rows."""
    given = {"init_from": _saved(folder), "partition": "iid"}
    return _line("test rows are train rows", dataset=(xv, WORDS), **given)


def f4_3_a_teacher_of_another_seed(folder) -> str:
    """--teacher was trained on another seed's train rows."""
    given = {"algo": "distill", "teacher": _saved(folder), "seed": 5}
    return _line("test rows are train rows", dataset=(xv, WORDS), **given)


def _partition(folder) -> dict:
    path = folder / "rows.npz"
    build.experiment(**base | {"dataset": (xv, y), "export_partition": str(path)})
    return {"partition": f"file:{path}", **NO_CLIENTS}


def s4_rows_of_shuffled_data(folder) -> str:
    """A partition's file is for the same rows in another order."""
    order = np.random.default_rng(1).permutation(400)
    return _line(dataset=(xv[order], y[order]), **_partition(folder))


def s4_rows_of_a_larger_table(folder) -> str:
    """A partition's file is for half of the rows."""
    return _line(dataset=(np.r_[xv, xv], np.r_[y, y]), **_partition(folder))


def s4_rows_of_other_examples(folder) -> str:
    """A partition's file is for other examples with the same labels."""
    return _line("the same", dataset=(2 * xv, y), **_partition(folder))


def s4_a_file_of_another_program(folder) -> str:
    """A partition's file does not say for which data it was made."""
    rows = np.arange(400).reshape(8, 50)
    parts = {"train": rows[:, :40], "test": rows[:, 40:]}
    given = {f"{name}_row": part.reshape(-1) for name, part in parts.items()}
    given |= {f"{n}_count": np.full(8, part.shape[1]) for n, part in parts.items()}
    np.savez(folder / "rows.npz", **given)
    given = {"partition": f"file:{folder}/rows.npz", **NO_CLIENTS}
    return _line("does not say", dataset=(xv, y), **given)


# Predictions and layouts


def s6_bytes_for_a_model_of_floats(folder) -> str:
    """`evaluate` gets uint8, and the model was trained on floats."""
    return _asked("evaluate", np.uint8(9 * np.abs(xv)), y)


def s6_nan(folder) -> str:
    """`predict` gets nan."""
    return _asked("predict", None, np.where(xv > 3, np.nan, xv))


def s6_true_is_not_a_client(folder) -> str:
    """client_id=True."""
    return _asked("predict", True, xv)


def s6_a_float_is_not_a_client(folder) -> str:
    """client_id=1.0."""
    return _asked("evaluate", xv, y, client_id=1.0)


def s7_four_channels_first(folder) -> str:
    """[400, 4, 16, 16] are images of four channels."""
    data = np.zeros((400, 4, 16, 16), np.float32), y
    return _line("H 4, W 16, C 16", dataset=data)


def s7_three_rows(folder) -> str:
    """[400, 3, 4, 4] are images of three channels."""
    data = np.zeros((400, 3, 4, 4), np.float32), y
    return _line("H 3, W 4, C 4", dataset=data)


# Other libraries' data


def f4_polars(folder) -> str:
    """A frame of polars, here by its methods."""

    class Column:
        def __init__(self, name):
            self.name = name

        def to_numpy(self):
            return TABLE[self.name].to_numpy()

    class DataFrame:
        def get_columns(self):
            return [Column(name) for name in TABLE.columns]

        def to_dict(self):
            raise NotImplementedError

    return _line("features (4): a, b, c, d", dataset=DataFrame())


def f4_hugging_face(folder) -> str:
    """A data set of Hugging Face with images, here by its methods."""

    class Dataset:
        def __len__(self):
            return 400

        def __getitem__(self, key):
            columns = {"image": X, "label": y, "number": np.arange(400)}
            if isinstance(key, str):
                return columns[key]
            return {name: column[key] for name, column in columns.items()}

        def with_format(self, kind):
            return self

    return _line("x: image; not used: number", dataset=Dataset())


def f4_a_loader_of_some_rows(folder) -> str:
    """A torch DataLoader whose sampler draws 9 of 400 rows, here by its methods."""

    class DataLoader:
        dataset, sampler = [(xv[row], y[row]) for row in range(400)], range(9)

        def __len__(self):
            return 3

    return _line(dataset=DataLoader())


def f4_test_rows(folder) -> str:
    """Train and test examples in one list."""
    return _line(dataset=([xv, xv[:9]], y))


def f4_texts_with_labels(folder) -> str:
    """A table has a column of texts."""
    return _line(dataset=TABLE[["label"]].assign(text="a text"))


def f4_tokens_with_labels(folder) -> str:
    """Tokens with labels for a model of numbers."""
    return _line(dataset=(np.arange(2000).reshape(400, 5), y))
