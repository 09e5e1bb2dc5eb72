"""Faults of interpretation: rows that are not what they are called, resumed runs.

`python -m tests.faults` runs them all.
"""

import warnings

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from launch import build
from launch.folder import record
from launch.run import summaries
from launch.show import page
from tests.faults.given import X, base, xv, y

OF_ALL = {k: v for k, v in base.items() if k != "algo"} | {"dataset": (X, y)}


def said(run, containing: str) -> str:
    """The line with a text that a call raises as an error or warns of, "" if none."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            run()
        except ValueError as error:
            return str(error) if containing in str(error) else ""
    lines = [str(one.message) for one in found]
    return next((line for line in lines if containing in line), "")


def compared(containing: str, *rows, **options) -> str:
    """The line with a text that a comparison gives."""
    given = OF_ALL | {"rounds": 1} | options
    return said(lambda: build.compare(*rows, **given, progress=False), containing)


def s1_4_fedper_with_head_epochs(folder) -> str:
    """Compares FedPer with FedRep, whose head needs fewer epochs."""
    rows = ["fedper", "fedrep"]
    more = {"local_epochs": 2, "head_epochs": 1, "personal_from": "last"}
    return compared("makes fedper the method fedrep", rows, **more)


def s1_4_one_server_optimizer_for_three(folder) -> str:
    """Compares three server optimizers, and gives all of them a fourth."""
    rows = ["fedavg", "fedadam", "fedavgm"]
    return compared("makes fedavg the method fedyogi", rows, server_optimizer="yogi")


def s1_4_one_number_with_two_meanings(folder) -> str:
    """Compares FedProx with Ditto at one proximal weight."""
    rows = ["fedprox", "ditto"]
    return compared("has several meanings", rows, proximal_weight=0.5)


def s1_4_fedrep_that_is_fedper_plus(folder) -> str:
    """Runs FedRep without head epochs and with layer dropping."""
    options = OF_ALL | {"layer_dropping": True, "head_epochs": 0, "model": "fedavg_cnn"}
    data = np.tile(X, (1, 2, 2, 1)), y
    notes = build.experiment(algo="fedrep", **options | {"dataset": data}).notes
    return next((line for line in notes if "is the method fedper_plus" in line), "")


def s1_4_two_equal_rows(folder) -> str:
    """Compares a method with itself under two names."""
    rows = {"a": {"algo": "fedavg"}, "b": {"algo": "fedavg"}}
    return compared("a and b have equal parameters", rows)


def edited(folder, of, name: str = "model") -> str:
    """Resumes a run with another value in its own code."""
    options = base | {"dataset": (X, y), "rounds": 2, "workdir": str(folder)}
    build.experiment(**options | {name: of(1.0)}).run(1, progress=False)
    again = options | {name: of(7.0), "resume": True}
    return said(
        lambda: build.experiment(**again).run(progress=False), "computes something"
    )


def s3_closure(folder) -> str:
    """Edits the value in a closure of a pair (init, apply)."""

    def of(scale):
        def init(key, x):
            return {"w": jnp.ones((64, 4))}

        def apply(params, x):
            return scale * x.reshape(len(x), -1) @ params["w"]

        return init, apply

    return edited(folder, of)


class Acts(nn.Module):
    """Has a function as a field."""

    act: object

    @nn.compact
    def __call__(self, x):
        return self.act(nn.Dense(4)(x.reshape(len(x), -1)))


def s3_field(folder) -> str:
    """Edits a lambda that is a field of a linen module."""
    return edited(folder, lambda scale: Acts(lambda x: scale * x))


SCALE = {"value": 1.0}


class UsesGlobal(nn.Module):
    """Refers to a global value."""

    @nn.compact
    def __call__(self, x):
        return SCALE["value"] * nn.Dense(4)(x.reshape(len(x), -1))


def s3_global(folder) -> str:
    """Edits a global constant."""

    def of(scale):
        SCALE["value"] = scale
        return UsesGlobal()

    return edited(folder, of)


def s3_base_class(folder) -> str:
    """Edits a base class."""

    def of(scale):
        class Base(nn.Module):
            def scaled(self, x):
                return scale * x

        class Child(Base):
            @nn.compact
            def __call__(self, x):
                return self.scaled(nn.Dense(4)(x.reshape(len(x), -1)))

        return Child()

    return edited(folder, of)


def s3_metric(folder) -> str:
    """Edits the closure of a custom metric."""

    def of(scale):
        def peak(logits, labels, mask):
            return scale * jnp.where(mask, logits.max(-1), 0).sum(), mask.sum()

        return {"peak": peak}

    return edited(folder, of, "eval_metrics")


def noted(containing: str, **options) -> str:
    """The line with a text that a run says before it begins."""
    notes: list[str] = []

    def run() -> None:
        made = build.experiment(**base | {"dataset": (X, y)} | options)
        notes.extend(line for line in made.notes if containing in line)

    return said(run, containing) or " ".join(notes)


def s8_alpha_of_iid(folder) -> str:
    """Gives an IID partition a concentration."""
    return noted("--partition_alpha=0.1 has no", partition="iid", partition_alpha=0.1)


def s8_classes_of_iid(folder) -> str:
    """Gives an IID partition a number of classes."""
    return noted("_per_client=2 has no", partition="iid", classes_per_client=2)


def s8_eval_clients(folder) -> str:
    """Asks for all clients behind metrics that are not measured."""
    return noted("--eval_clients=all has no", eval_clients="all")


def s8_no_server_optimizer(folder) -> str:
    """Takes FedAdam's optimizer away."""
    return noted("is the method fedavg,", algo="fedadam", server_optimizer="none")


def s8_plain_server_optimizer(folder) -> str:
    """Gives FedAdam SGD at the server."""
    return noted("is the method fedavgm", algo="fedadam", server_optimizer="sgd")


def s8_swept_without_effect(folder) -> str:
    """Sweeps the server's learning rate where no server trains."""
    return noted("server_lr has no effect", algo="local", sweep="server_lr=0.1,0.2")


def reported(folder, *others) -> str:
    """What a page says of runs, after the first of which others follow."""
    paths = []
    for number, more in enumerate([{}, *others]):
        paths.append(folder / str(number))
        options = base | {"dataset": (X, y), "rounds": 2} | more
        made = build.experiment(**options, workdir=str(paths[-1]))
        said(lambda made=made: made.run(progress=False), "")
    names = record.labels([record.read(path) for path in paths])
    if len(set(names)) < len(names):
        return ""
    text = page.page(page.read(paths))
    start = text.find("No value is marked as the best")
    return text[start : text.find("MB are those", start)] if start >= 0 else ""


def s9_other_data(folder) -> str:
    """Reports two runs whose data differ and whose names do not."""
    return reported(folder, {"dataset": (X + 1, y)})


def s9_other_rounds(folder) -> str:
    """Reports a run of four rounds beside one of two."""
    return reported(folder, {"rounds": 4})


def s9_other_seeds(folder) -> str:
    """Reports a run with another seed, and so with other clients."""
    return reported(folder, {"seed": 4})


def s9_other_names_of_classes(folder) -> str:
    """Compares the same rows under other names of the classes."""
    texts = {name: np.array(list(name))[y] for name in ("abcd", "wxyz")}
    rows = {
        name: {"algo": "fedavg", "dataset": (X, labels)}
        for name, labels in texts.items()
    }
    return compared("the classes of wxyz are called", rows)


def s9_other_image_sizes(folder) -> str:
    """Compares two sizes of images."""
    sizes = {f"s{n}": {"algo": "fedavg", "image_size": n} for n in (8, 16)}
    return compared("has examples of shape", sizes)


def optimizer_options(name: str, text: str) -> str:
    more = {"client_optimizer": name, "client_optimizer_options": text}
    return noted("expected", **more)


def s10_b1(folder) -> str:
    """Gives Adam a b1 above 1."""
    return optimizer_options("adam", "b1=2")


def s10_eps(folder) -> str:
    """Gives Adam a negative eps."""
    return optimizer_options("adam", "eps=-1")


def s10_decay(folder) -> str:
    """Gives RMSProp a decay above 1."""
    return optimizer_options("rmsprop", "decay=5")


def s10_bool(folder) -> str:
    """Gives a number as true."""
    return optimizer_options("adam", "eps_root=true")


def renamed(folder, before, after) -> str:
    options = base | {"rounds": 2, "workdir": str(folder), "partition": "natural"}
    first = build.experiment(**options | {"dataset": before})
    said(lambda: first.run(1, progress=False), "")
    again = options | {"dataset": after, "resume": True}
    return said(lambda: build.experiment(**again).run(progress=False), "other names of")


OWNER = np.arange(400) // 50


def s11_classes(folder) -> str:
    """Renames the classes of a resumed run."""
    first, second = (np.array(list(text))[y] for text in ("abcd", "wxyz"))
    return renamed(folder, (xv, first, OWNER), (xv, second, OWNER))


def s11_owners(folder) -> str:
    """Renames the owners of a resumed run."""
    texts = [np.array([f"{mark}{k}" for k in OWNER]) for mark in "ab"]
    return renamed(folder, (xv, y, texts[0]), (xv, y, texts[1]))


def s14_rounds(folder) -> str:
    """Summarises a metric that one of three rounds lacks."""
    records = [
        {"round": 10, "seed": 0, "client_auc": 0.85},
        {"round": 11, "seed": 0},
        {"round": 12, "seed": 0, "client_auc": 0.65},
    ]
    found = summaries.summarize(records, [0], (10, 11, 12), "mean_last10", 0)
    return summaries.fewer(found["client_auc"])


def s14_clients(folder) -> str:
    """Measures an AUC that one client of eight has."""
    label = np.where(np.arange(400) < 360, 0, y)
    options = base | {"dataset": (X, label), "partition": "contiguous", "rounds": 1}
    made = build.experiment(**options | {"eval_metrics": "auc"})
    said(lambda: made.run(progress=False), "")
    return summaries.fewer(made.summary()["metrics"]["client_auc"])


def t4_notes_without_progress(folder) -> str:
    """Runs without progress, where a note says how the data were taken."""
    series = X.reshape(400, 8, 8)
    made = build.experiment(**base | {"dataset": (series, y), "rounds": 1})
    return said(lambda: made.run(progress=False), "gray images")
