"""Serves a run's models: predictions on raw examples, and files."""

import functools
import numbers
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

import models
from data import arrays, dataset, files, foreign, frames, labels
from fedjax_pfl import evaluate, execution, shapes, types
from launch.assemble import model_files
from launch.config import limits, schema
from launch.machine import processes
from launch.models_out import program_file
from launch.run.run import Run

BATCH = 256
SUFFIXES = (*model_files.SUFFIXES, program_file.SUFFIX)


class ClientModel(NamedTuple):
    """A model with the normalisation of its images.

    Attributes:
        data: The run's data, which define the normalisation and the type of images.
        image_size, image_channels, model_width, layout: The options of these names.
        files_layout: What a user's files have with `layout` auto, see `Dataset.layout`.
        classes: The names of the classes in the order of the columns, None = 0..Y-1.
        columns: The columns of the table that it was trained on, None = no table.
        rows: Gives the rows that it was trained on, for its file.
        precision: That of its run's matrix products, by jax's name.
    """

    model: types.Model
    variables: types.Variables
    data: types.Data
    image_size: int
    image_channels: int
    model_width: float
    layout: str = "auto"
    classes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    rows: Callable[[], model_files.Rows] | None = None
    precision: str | None = None
    files_layout: str = ""

    def predict(self, images: Any) -> np.ndarray:
        """Predicts probabilities f32[N, Y] of raw images [N, ...].

        The columns are in the order of `classes`. Rows int[N, T] of a text, in which V
        is a hidden word, give f32[N, T, V].

        Raises:
            ValueError: images have another shape or type than the data set's.
        """
        return np.asarray(jax.nn.softmax(self._logits(images)))

    def evaluate(self, x: Any, y: Any) -> dict[str, float]:
        """Computes `accuracy` (0..1) and `loss`, the mean cross-entropy, on raw images.

        `y` are labels [N] as in the data set, or for a text the actual words int[N, T].

        Raises:
            ValueError: there are no images, or labels do not fit them.
        """
        foreign.check_order(x, y, "y", "evaluate")
        x = labels.unmasked(self._values(x), "x")
        wanted = x.shape if self.data.num_words else x.shape[:1]
        if x.shape[:1] == (0,):
            raise ValueError("x and y hold no example")
        is_number = labels.as_array(y, "y").dtype.kind in "iu"
        if wanted == x.shape[:1] and not (is_number and self.classes is None):
            names = self.classes or tuple(map(str, range(self._num_classes())))
            y = labels.found_in(y, names, *wanted, "y")
        y = labels.unmasked(y, "y")
        if y.shape != wanted or not np.issubdtype(y.dtype, np.integer):
            raise ValueError(
                f"y must be integers {list(wanted)}, got {y.dtype} {list(y.shape)}"
            )
        log_p = np.asarray(jax.nn.log_softmax(self._logits(x)))
        if y.min() < 0 or y.max() >= log_p.shape[-1]:
            raise ValueError(
                f"y has labels {y.min()} to {y.max()}, the model's are 0 to "
                f"{log_p.shape[-1] - 1}"
            )
        return {
            "accuracy": float((log_p.argmax(-1) == y).mean()),
            "loss": float(-np.take_along_axis(log_p, y[..., None], -1).mean()),
        }

    @property
    def has_stages(self) -> bool:
        """Whether its layers are those of one model, and not of several."""
        pairs = zip(self.variables.params, self._like(self.model).params, strict=False)
        layers = [pair for pair in pairs if isinstance(pair[0], Mapping)]
        return bool(layers) and all(_kinds((a,)) == _kinds((b,)) for a, b in layers)

    def save(self, path: Any) -> pathlib.Path:
        """Writes the model to a file; see `model_files` and `program_file`.

        Raises:
            ValueError: another suffix, or the client is not served by a single model
                of an architecture (Split-Mix, Majority, FedProto), which only a program
                can be.
            OSError: it cannot be written.
        """
        path = model_files.checked(path, SUFFIXES)
        if path.suffix == program_file.SUFFIX:
            return self._save_program(path)
        mine, wanted = map(_kinds, (self.variables, self._like(self.model)))
        is_chain = all(isinstance(one, Mapping) for one in self.variables.params)
        if mine != wanted or not is_chain:
            raise ValueError(
                f"the client is served by {self.model.name}, which is not a single "
                "model of arrays; write .stablehlo"
            )
        normal, width = {"mean": self.data.mean, "scale": self.data.scale}, None
        name, level = self.model.name, len(self.model.stage_names)
        if name in models.MODELS:
            num_classes = self._num_classes()
            made = models.make(name, num_classes, self.model_width, level)
            # Methods of width serve a part of what the option makes.
            width = self.model_width if _kinds(self._like(made)) == mine else None

        def write() -> str:
            given = path, self.model, self.variables, normal, width
            rows = self.rows and self.rows()
            names = {"classes": self.classes, "columns": self.columns}
            return str(model_files.write(*given, rows=rows, **names))

        return pathlib.Path(processes.on_first(write))

    def _save_program(self, path: pathlib.Path) -> pathlib.Path:
        kind = self.data.replace(image=(), label=(), partition=())
        # Numbers, as arrays on several devices make a program of so many devices.
        variables, kind = jax.device_get((self.variables, kind))

        def logits(images: jax.Array) -> jax.Array:
            # One by one, as a model of others may take the length of its batch.
            one = functools.partial(_forward, self.model, variables, kind)
            return jax.vmap(lambda image: one(image[None])[0])(images)

        image = self.data.image
        given = path, logits, image.shape[1:], image.dtype, self.model.name
        names = {"classes": self.classes, "columns": self.columns}

        def write() -> str:
            # For a GPU too, whose compiler some forms of other platforms end.
            form = execution.traced_in(execution.Setting("gpu"))
            with form, jax.default_matmul_precision(self.precision):
                return str(program_file.write(*given, **names))

        return pathlib.Path(processes.on_first(write))

    def _like(self, model: types.Model) -> types.Variables:
        return shapes.variables(model, self.data.image.shape[1:])

    def _num_classes(self) -> int:
        example = self.model.example(1, *self.data.image.shape[1:])
        kind = self.data.replace(image=(), label=(), partition=())
        return _forward.eval_shape(self.model, self.variables, kind, example).shape[-1]

    def _logits(self, images: Any) -> np.ndarray:
        """The served logits f32[N, Y] of raw images."""
        images = self._checked(labels.unmasked(self._values(images), "images"))
        kind = self.data.replace(image=(), label=(), partition=())
        fixed = self.model, self.variables, kind
        parts = np.split(images, range(BATCH, len(images), BATCH))
        with jax.default_matmul_precision(self.precision):
            found = [np.asarray(_forward(*fixed, part)) for part in parts]
        logits = np.concatenate(found)
        is_tokens = np.issubdtype(images.dtype, np.integer) and images.ndim == 2
        if is_tokens and np.isnan(logits).any() and self._is_finite():
            raise ValueError(
                f"{self.model.name} gives nan for tokens up to {images.max()}; it has "
                "no embedding of all of them"
            )
        return logits

    def _is_finite(self) -> bool:
        """Whether training left numbers that are finite."""
        leaves = map(np.asarray, jax.tree.leaves(self.variables))
        floats = (leaf for leaf in leaves if leaf.dtype.kind == "f")
        return all(np.isfinite(leaf).all() for leaf in floats)

    def _values(self, x: Any) -> Any:
        """Puts a table's columns into the order of training; keeps other data."""
        table = None if self.columns is None else foreign.as_columns(x)
        if table is None:
            return x
        if isinstance(table, Mapping):
            import pandas

            with files.named("the table"):
                table = pandas.DataFrame(dict(table))
        return frames.ordered(table, self.columns)

    def _laid_out(self, images: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Images in the data's layout, or as they are where that is the model's."""
        if self.layout == "auto" and images.ndim == len(self.files_layout):
            out, _ = arrays.laid_out(images, self.files_layout)
            if out.shape[1:] == shape:
                return out
        if self.layout == "auto" and images.shape[1:] == shape:
            return images
        with files.named("images"):
            return arrays.laid_out(images, self.layout)[0]

    def _checked(self, images: np.ndarray) -> np.ndarray:
        """Converts images to the data set's shape and type, or refuses them."""
        shape, kind = self.data.image.shape[1:], self.data.image.dtype
        if self.layout == "nhw" and images.shape[1:] == (shape[0] ** 2,):
            images = arrays.squares(images, self.layout)  # as LEAF's flat rows
        if images.ndim in (3, 4) and not self.data.num_words:
            images = self._laid_out(images, shape)
        if images.shape[1:] != shape and images.ndim == len(shape) + 1:
            raw = dataset.Dataset(images, np.zeros(len(images)), 0, 0)
            images = dataset.fitted(raw, self.image_size, self.image_channels).image
        if images.shape[1:] != shape:
            raise ValueError(
                f"images are of shape {list(images.shape)}, expected [N, "
                f"{', '.join(map(str, shape))}] as in the data set"
            )
        if not len(images):
            raise ValueError("images hold no example")
        wanted = np.integer if np.issubdtype(kind, np.integer) else np.floating
        fits, of, most = np.issubdtype(images.dtype, wanted), "", np.inf
        if wanted is np.integer:
            most = self.data.num_words or (255 if kind == np.uint8 else 2**31 - 1)
            of = f" from 0 to {most}"
        elif self.columns is not None:
            fits = images.dtype.kind in "biuf"  # as columns of the table may be
        if not fits or (of and (images.min() < 0 or images.max() > most)):
            cure, found = "", str(images.dtype)
            if images.dtype.kind in "biu" and not of:
                is_byte = images.dtype == np.uint8
                cure = ", such as " + ("x / 255" if is_byte else "x.astype(np.float32)")
            if images.dtype.kind in "biuf":
                found += f" from {images.min()} to {images.max()}"
            raise ValueError(
                f"images are {found}; expected {kind}{of}, as in the data{cure}"
            )
        return images.astype(kind) if of else arrays.as_float32(images, "x")


def number_of(run: Run, client_id: Any) -> int:
    """One of 0..K-1 as it is, or the number of an owner by name, or a ValueError.

    A warning says so where owners are other whole numbers than 0..K-1.
    """
    most, owners = run.config.num_clients - 1, run.owners or ()
    if isinstance(client_id, str) and client_id in owners:
        return owners.index(client_id)
    is_number = isinstance(client_id, numbers.Integral)
    is_id = is_number and not isinstance(client_id, bool)
    if not (is_id and 0 <= client_id <= most):
        quoted = labels.listed(list(map(repr, owners)))
        names = f", or an owner's name, {quoted}" if owners else ""
        raise ValueError(
            f"client_id={limits.shown(client_id)}: expected 0..{most}{names}"
        )
    if owners and owners[client_id].isdecimal() and owners[client_id] != str(client_id):
        warnings.warn(
            "note: a client_id without quotes counts clients from 0; an owner's number "
            f"has quotes, as client 0 is client_id={owners[0]!r}",
            stacklevel=4,
        )
    return client_id


def find(
    run: Run,
    client_id: int | str | None,
    seed: int | None = None,
    point: Mapping[str, float] | None = None,
) -> ClientModel:
    """Finds the present personalized model of a client, or the server's first model.

    A warning says so if the run's summary is that of an earlier round.

    Raises:
        ValueError: there is no such client, seed, point or model.
    """
    processes.meet("a client's or the server's model")
    index, config = run.seed_index(seed), run.config
    if line := _other_round(run, index, run.variant(seed, point)):
        warnings.warn(f"note: {line}", stacklevel=4)
    if client_id is not None:
        client_id = number_of(run, client_id)
    run.start()
    variant, cohort = run.variant(seed, point), run.planner.drawn(index, run.round)
    state, cohort, slot = run.simulation.around(client_id, variant, cohort)
    # A copy, since the next round donates the state's buffers.
    state = _row(state, 0)
    part = jax.tree.map(lambda leaf: leaf[index], run.data.partition)
    where = execution.replicated(run.task.execution)
    data = run.data.replace(partition=execution.place(part, where))
    algorithm = run.algorithm_at(variant)
    precision = schema.PRECISIONS[config.precision]
    # Some methods compute what they serve: adapted models, statistics of norms.
    with jax.default_matmul_precision(precision):
        model, variables = _found(run, algorithm, client_id, slot, state, cohort, data)
    sizes = config.image_size, config.image_channels, config.model_width

    def rows() -> model_files.Rows:
        trained = [np.asarray(one).reshape(-1) for one in (part.train.row, part.proxy)]
        if algorithm.serves_adapted and client_id is not None:
            own = part.adapting
            first, count = own.start[client_id], own.count[client_id]
            trained.append(np.asarray(own.row)[first : first + count])
        image = np.asarray(data.image)[: run.num_examples]
        return model_files.rows_of(image, np.concatenate(trained), run.trained_before)

    names = config.layout, run.classes, run.columns
    how = rows, precision, run.files_layout
    return ClientModel(model, variables, data, *sizes, *names, *how)


def _other_round(run: Run, index: int, variant: int) -> str:
    """A line if the summary is of an earlier round than the models, else nothing."""
    if not (run.chooses_round and run.metrics and run.is_over):
        return ""
    best = run.best_round(variant)
    if best == run.round:
        return ""
    return (
        f"these are models of round {run.round}, and the summary of seed "
        f"{run.seeds[index]} is that of round {best}, by "
        f"--summary={run.config.summary}; "
        f"run(until={best}) of a new experiment ends with its models, and where "
        f"--keep_best kept them build.load(..., round={best}) has them"
    )


def _found(
    run: Run,
    algorithm: types.Algorithm,
    client_id: int | None,
    slot: int | None,
    state: types.RoundState,
    cohort: types.Cohort,
    data: types.Data,
) -> tuple[types.Model, types.Variables]:
    """Finds a client's model, which is in row `slot` of the state of one variant."""
    if client_id is None:
        if algorithm.server is None:
            name = run.config.algo
            raise ValueError(f"--algo={name} has no server's model; give a client_id")
        return next(iter(algorithm.server(state, data).values()))
    for group in algorithm.serving_groups(state, cohort, data, run.program.num_rows):
        served = np.asarray(group.mask) & (np.asarray(group.client_id) == slot)
        if served.any():
            entry = int(np.flatnonzero(served)[0])
            return group.model, group.variables(_row(group.own, entry))
    raise ValueError(f"client_id={client_id} is served by no model")


def _kinds(tree: Any) -> list[Any]:
    """The shapes and types of all leaves."""
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tuple(tree))]


@jax.jit
def _row(tree: Any, index: int) -> Any:
    """A copy of one row of every leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


@functools.partial(jax.jit, static_argnums=0)
def _forward(
    model: types.Model,
    variables: types.Variables,
    data: types.Data,
    images: jax.Array,
) -> jax.Array:
    out, _ = model.forward(*variables, data.normalised(images))
    return evaluate.answer(model, out)
