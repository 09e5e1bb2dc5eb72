"""Step 1 of assembling: the models of server, clients and teacher."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

import models
from fedjax_pfl import levels, types, widths
from fedjax_pfl import teacher as teacher_lib
from launch.assemble import computed, fit, from_file
from launch.assemble.given import Settings
from models import mixed, own_checks

Normal = tuple[np.ndarray, np.ndarray]


class Models(NamedTuple):
    """The models of a run.

    Attributes:
        clients: One architecture for each group of clients.
        teacher, taught: The model of `--teacher` and its variables, or None and ().
        known: The facts that the files of `--init_from` and `--teacher` record.
        hashes: Hashes of what custom models compute, by name.
        notes: A line for each model whose last exit serves alone, or of which
            something is probably not meant.
    """

    server: types.Model
    clients: tuple[types.Model, ...]
    teacher: types.Model | None
    taught: types.Variables | tuple[()]
    known: tuple[from_file.Known, ...]
    hashes: Mapping[str, str]
    notes: tuple[str, ...]


def make(settings: Settings, normal: Normal) -> Models:
    """Makes the models that the options name; `normal` is the examples' mean and scale.

    Raises:
        ValueError: one line: a model does not fit the data or the algorithm, or a file
            does not fit the run.
    """
    config, source = settings.config, settings.source
    if source.is_text and not settings.entry.text:
        fit.refuse_need(config, "text", f"--dataset={config.dataset} is a text")
    names = config.model, *config.client_model.split(",")
    by_name, hashes, notes = _by_name(settings, names, normal)
    server, *clients = (by_name[name] for name in names)
    known = []
    if config.init_from:
        server, found = _starting(settings, by_name, normal)
        clients, known = [server], [found]
    teacher, taught = None, ()
    if is_taught(settings):
        teacher, taught, found = from_file.teacher(settings.hparams, normal, source)
        known.append(found)
    if config.precision == "bf16":
        own = settings.own_models
        server, *clients = (
            mixed.in_bfloat16(model, rounds=source.is_text or model.name in own)
            for model in (server, *clients)
        )
        teacher = teacher and mixed.in_bfloat16(teacher)
    known = tuple(known)
    return Models(server, tuple(clients), teacher, taught, known, hashes, notes)


class AmongZerosError(ValueError):
    """One line about a model whose slices need a chunk of their own."""


def check_slices(
    settings: Settings, normal: Normal, model: types.Model, how: types.Execution
) -> None:
    """Refuses slices that a run would not compute as they are (AmongZerosError).

    These are an own model's in an algorithm with `types.Algorithm.is_among_zeros`.
    """
    config, hparams = settings.config, settings.hparams
    is_own = config.model in settings.own_models
    if not is_own or (how.chunk == 1 and how.is_bucketed):
        return
    nets = widths.models(hparams, model)
    sizes = levels.possible(hparams, config.num_clients)
    narrow, wide = sizes[0], sizes[-1] if how.is_bucketed else len(nets)
    pair = nets[wide - 1], nets[narrow - 1]
    few = _few_examples(settings, normal)
    if narrow == wide or own_checks.is_same_among_zeros(*pair, few):
        return
    given = f"--client_chunk={how.chunk}" if how.is_bucketed else "--bucketed=False"
    cure = "client_chunk=1" if how.is_bucketed else "bucketed=True --client_chunk=1"
    raise AmongZerosError(
        f"--model={config.model} computes something else where the channels of wider "
        "clients are there and 0, for instance in a norm over channels, and with "
        f"{given} clients of several widths are computed so; give --{cure}, or norms "
        "within each channel"
    )


def is_taught(settings: Settings) -> bool:
    """Whether the run has a teacher from a file."""
    hparams = settings.hparams
    return isinstance(hparams, teacher_lib.Taught) and bool(hparams.teacher)


def _by_name(
    settings: Settings, names: tuple[str, ...], normal: Normal
) -> tuple[dict[str, types.Model], dict[str, str], tuple[str, ...]]:
    """Makes models by name, checked on the data, with hashes of the custom ones.

    A line is returned for each model whose last exit serves alone, since the method
    has no use for the others, and for each of which something is probably not meant.
    """
    config, source = settings.config, settings.source
    by_name = {name: _model(settings, name) for name in dict.fromkeys(names)}
    notes: list[str] = []
    if not _takes_exits(settings):
        for name, model in by_name.items():
            if model.one_exit is None:
                continue
            by_name[name] = model.one_exit
            *_, before, last = model.one_exit.stage_names
            flag = "model" if name == config.model else "client_model"
            notes.append(
                f"--{flag}={name} has exits, of which --algo={config.algo} has the "
                f"last alone: stage {last}, after {before}"
            )
    hashes: dict[str, str] = {}
    for name, model in by_name.items():
        flag = "model" if name == config.model else "client_model"
        if name not in settings.own_models:
            shape = source.image.shape[1:]
            fit.check_model(flag, model, shape, takes=source.takes)
            continue
        sizes = source.num_classes, config.model_width
        few = _few_examples(settings, normal)
        hashes[name], odd = fit.check_own(flag, model, *sizes, few)
        notes += [f"--{flag}={name} {words}" for words in odd]
        hparams = settings.hparams
        starts = {
            "--noshared_init": not getattr(hparams, "shared_init", True),
            "--num_bases": getattr(hparams, "num_bases", 1) > 1,
        }
        is_asked = any(starts.values()) and not config.init_from
        if is_asked and not own_checks.is_drawn(model, few):
            of = next(one for one, is_given in starts.items() if is_given)
            notes.append(
                f"{of}: all begin with the same numbers, those that --{flag}={name} "
                "has; give the class of the module, or a function that makes it"
            )
        by_name[name] = computed.distinct(model, hashes[name])
    return by_name, hashes, tuple(notes)


def _takes_exits(settings: Settings) -> bool:
    """Whether it trains all exits of a model, unless its name fixes one level."""
    fixed, hparams = settings.entry.fixed, settings.hparams
    is_whole = "level_mix" in fixed and hparams.level_mix == fixed["level_mix"]
    return settings.entry.exits and not is_whole


def _model(settings: Settings, name: str) -> types.Model:
    """Makes the built-in or custom model of a name."""
    source, own = settings.source, settings.own_models.get(name)
    if own is None:
        return models.make(name, source.num_classes, settings.config.model_width)
    kind = jax.numpy.float32 if source.takes == "numbers" else jax.numpy.int32
    example = jax.ShapeDtypeStruct((2, *source.image.shape[1:]), kind)
    model = own(example)
    one_exit = model.one_exit and _taking(
        source.takes, model.one_exit._replace(name=name)
    )
    return _taking(source.takes, model._replace(name=name, one_exit=one_exit))


def _taking(takes: str, model: types.Model) -> types.Model:
    """The model for a kind of examples, at all its widths."""
    at_width = model.at_width
    if at_width is None or takes == model.takes:
        return model._replace(takes=takes)

    def narrower(rate: float, scaler: Any = 1.0) -> types.Model:
        return at_width(rate, scaler)._replace(takes=takes)

    return model._replace(takes=takes, at_width=narrower)


def _few_examples(settings: Settings, normal: Normal) -> np.ndarray:
    """A few examples in the form in which a custom model gets them."""
    source, (mean, scale) = settings.source, normal
    few = source.image[:4].copy()
    if source.is_text:
        few[:, 0] = source.num_classes  # a hidden word
    elif source.takes == "labelled tokens":
        few[0] = source.image.max(0)  # each place may have an embedding of its own
    elif source.takes == "numbers":
        few = np.asarray((few.astype(np.float32) - mean) * scale, np.float32)
    return few


def _starting(
    settings: Settings, by_name: Mapping[str, types.Model], normal: Normal
) -> tuple[types.Model, from_file.Known]:
    """Makes the only model of the run start from the file of `--init_from`."""
    config, source = settings.config, settings.source
    if list(by_name) != [config.model]:
        raise ValueError(
            f"--init_from={config.init_from} holds one model: --model={config.model} "
            f"and --client_model={config.client_model} are several; name one"
        )
    of_classes = None
    if config.model not in settings.own_models:
        kind = {"width": config.model_width}
        kind["level"] = len(by_name[config.model].stage_names)
        of_classes = functools.partial(models.make, config.model, **kind)
    about = by_name[config.model], normal, source, of_classes
    return from_file.starting(config.init_from, *about)
