"""Looks into one client: its rows, and what its model answers on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedjax_pfl import options
from launch.models_out import client_model
from launch.run.run import Run

if TYPE_CHECKING:
    import pandas

SPLITS = ("train", "val", "test")


def rows(run: Run, client_id: int | str, split: str, seed: int | None) -> np.ndarray:
    """The numbers of a client's rows in the data set, int[n]; ValueError if unknown."""
    return _numbers(run, _held(run, client_id, split, seed))


def _numbers(run: Run, held: np.ndarray) -> np.ndarray:
    """The data set's numbers of rows of `run.data`, which lacks dropped owners'."""
    return held if run.row_numbers is None else run.row_numbers[held]


def _held(run: Run, client_id: int | str, split: str, seed: int | None) -> np.ndarray:
    """A client's rows of `run.data`, int[n]."""
    options.check_one_of("split", split, SPLITS)
    client_id = client_model.number_of(run, client_id)
    index, found = run.seed_index(seed), run.data.partition
    if split == "val" and not found.has_val:
        raise ValueError(
            "split=val: there are no validation rows; give val_split, or your own "
            "(docs/data.md#your-own-split)"
        )
    # Train rows of clients that never train are in a table of their own.
    table = {"train": found.adapting, "val": found.val, "test": found.test}[split]
    start, count = (int(one[index, client_id]) for one in (table.start, table.count))
    return np.asarray(table.row)[index, start : start + count]


def _asked(
    run: Run, client_id: int | str, split: str, seed: int | None, point: Any
) -> tuple[client_model.ClientModel, np.ndarray, np.ndarray]:
    """A client's model, its rows of `run.data`, and the examples of these."""
    mine = _held(run, client_id, split, seed)
    if not len(mine):
        raise ValueError(f"client_id={client_id} has no rows of split={split}")
    # The examples of the run are laid out already.
    found = client_model.find(run, client_id, seed, point)
    found = found._replace(layout="auto", files_layout="")
    return found, mine, np.asarray(run.data.image[mine])


def predictions(run: Run, *where: Any) -> pandas.DataFrame:
    """A line for each row: its number, label, answer, and the answer's probability."""
    import pandas

    if run.data.num_words:
        raise ValueError(
            "predictions: a text has no labels; give predict(...) its rows"
        )
    found, mine, images = _asked(run, *where)
    p = found.predict(images)
    names = np.asarray(run.classes or range(p.shape[-1]))
    label, answer = np.asarray(run.data.label[mine]), p.argmax(-1)
    return pandas.DataFrame(
        {
            "row": _numbers(run, mine),
            "label": names[label],
            "predicted": names[answer],
            "probability": p.max(-1),
        }
    )


def confusion(run: Run, *where: Any) -> pandas.DataFrame:
    """Numbers of rows by label (lines) and answer."""
    import pandas

    found = predictions(run, *where)
    names = list(run.classes or range(run.task.num_classes))
    counts = pandas.crosstab(found["label"], found["predicted"])
    return counts.reindex(index=names, columns=names, fill_value=0)


def embeddings(run: Run, stage: int | str, *where: Any) -> np.ndarray:
    """The output f32[n, ...] of a stage (its name or index) on a client's rows."""
    found, _, images = _asked(run, *where)
    names = found.model.stage_names
    if not found.has_stages:
        raise ValueError(
            f"embeddings: the client is served by {found.model.name}, which is not a "
            "single model of stages"
        )
    index = names.index(stage) if stage in names else stage
    if not isinstance(index, int) or not 0 <= index < len(names):
        raise ValueError(f"stage={stage!r}: expected one of {', '.join(names)}")
    with jax.default_matmul_precision(found.precision):
        out, _ = found.model.forward(
            *found.variables, found.data.normalised(images), stop=index + 1
        )
    return np.asarray(jax.tree.leaves(out)[-1])
