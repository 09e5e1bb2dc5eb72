"""Turns given options into settings: resolves names, loads data, checks all values."""

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from data import arrays, dataset, frames, loaders
from fedjax_pfl import measures as measures_lib
from fedjax_pfl import optimizer, types
from launch.config import registry, resolve, schema, sweep
from launch.run import devices, processes

# Options that are not flags
ONLY_IN_PYTHON = ("split",)


class Settings(NamedTuple):
    """Everything that a run depends on.

    Attributes:
        entry: The algorithm.
        config: The common options, with every field set.
        hparams: The algorithm's options.
        source: The data set.
        public: Unlabelled images that all clients share, or None.
        own_models: Custom models by name, as functions of a batch of examples.
        own_sha256: Hash of custom code, since a run with edited code is another run.
        examples_sha256: Hash of the data set before its images were fitted.
        source_hash: Hash object of `source`, to copy and extend.
        dropped_owners: The rows of owners that were dropped, as they are too small, by
            the owner's name.
        measures: The metrics of `--eval_metrics`.
    """

    entry: Any
    config: schema.Config
    hparams: Any
    source: dataset.Dataset
    public: np.ndarray | None
    own_models: Mapping[str, Callable[[jax.ShapeDtypeStruct], types.Model]]
    own_sha256: str
    examples_sha256: str
    source_hash: Any
    dropped_owners: Mapping[str, int]
    measures: tuple[measures_lib.Measure, ...] = ()


def settled(**given: Any) -> Settings:
    """The settings for option names and values; see `experiment.experiment`.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    given = {name: value for name, value in given.items() if value is not None}
    devices.begin(given.get("distributed", ""))
    given = given | {"split": _split(given)} if "split" in given else given
    given, own_optimizer = _without_optimizer(given)
    own_sha256 = _own_sha256(given, own_optimizer)
    given, chosen = _measured(given)
    given, in_memory, own_models = _named(given)
    check_alike(given | {"own_sha256": own_sha256})
    config, hparams = resolve.configure(given)
    hparams = _with_optimizer(hparams, own_optimizer, given)
    resolve.check_text(config)
    if in_memory is not None or config.dataset != loaders.ARRAYS:
        resolve.check_own(config, is_table=_is_frame(in_memory))
    source = _source(config, in_memory)
    if config.rotate_classes > 1:
        source = dataset.rotated(source, config.rotate_classes)
    if not source.is_text:
        measures_lib.check(chosen, source.num_classes)
    examples = sha256(source.image, source.label)
    config = resolve.resolve(config, source, given)
    resolve.check(config, own_models)
    fitted, dropped_owners = source, {}
    if config.partition == "natural":
        is_text = source.is_text
        least = config.min_examples if is_text else config.min_owner_examples
        fitted, dropped_owners = dataset.with_large_owners(source, least)
        if dropped_owners and not is_text:
            fitted = dataset.with_note_of_empty_classes(fitted)
    fitted = dataset.fitted(fitted, config.image_size, config.image_channels)
    is_same = fitted is source
    source_hash = examples if is_same else sha256(fitted.image, fitted.label)
    if config.rotate_classes > 1 and config.partition in ("cdkt", "cdkt_paper"):
        raise ValueError(
            f"--rotate_classes={config.rotate_classes}: --partition={config.partition} "
            "needs the data's own classes; take another partition"
        )
    wants_public = config.public_set != "none"
    return Settings(
        entry=registry.algorithm(given.get("algo", config.algo)),
        config=config,
        hparams=hparams,
        source=fitted,
        public=_public_images(config, fitted) if wants_public else None,
        own_models=own_models,
        own_sha256=own_sha256,
        examples_sha256=examples.hexdigest(),
        source_hash=source_hash,
        dropped_owners=dropped_owners,
        measures=chosen,
    )


def _is_frame(given: Any) -> bool:
    """Whether data are a pandas DataFrame, without importing pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(given, pandas.DataFrame)


def _source(config: schema.Config, in_memory: Any) -> dataset.Dataset:
    """The data set: what was given in Python, or what `--dataset` names.

    Raises:
        ValueError: one line.
    """
    if _is_frame(in_memory):
        return frames.from_frame(in_memory, config.label, config.owner)
    if in_memory is not None:
        return arrays.from_arrays(*in_memory, layout=config.layout)
    return loaders.load(
        config.dataset,
        config.data_dir,
        text_length=config.text_length,
        owners=config.owners,
        layout=config.layout,
        label=config.label,
        owner=config.owner,
    )


def sha256(*every: Any) -> Any:
    """A hash object of the contents of arrays, one after another."""
    digest = hashlib.sha256()
    for array in every:
        digest.update(np.ascontiguousarray(array).data)
    return digest


# Options that may differ between processes: addresses and paths
_OF_ONE_PROCESS = ("distributed", "data_dir", "compile_cache", "workdir")


def check_alike(given: Mapping[str, Any]) -> None:
    """Refuses processes of one run that were given different options.

    Raises:
        ValueError: one line.
    """
    # HOST:PORT,COUNT without the INDEX of this process
    together = (given.get("distributed") or "").rpartition(",")[0]
    has_folder = "given" if given.get("workdir") else "unset"
    named = {"distributed": together, "workdir": has_folder} | {
        name: value if isinstance(value, (str, int, float)) else type(value).__name__
        for name, value in given.items()
        if name not in _OF_ONE_PROCESS
    }
    processes.check_equal(named, "give all processes the same options")


def _without_optimizer(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], optimizer.Custom | None]:
    """The options without a `client_optimizer` that is an object, and that object."""
    given, found = dict(given), given.get("client_optimizer", "")
    if isinstance(found, str):
        return given, None
    return given, optimizer.custom(given.pop("client_optimizer"))


def _measured(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], tuple[measures_lib.Measure, ...]]:
    """The options with the names of `eval_metrics`, and what these names mean.

    Raises:
        ValueError: one line: there is no such metric, or a function is not one.
    """
    if "eval_metrics" not in given:
        return dict(given), ()
    asked = given["eval_metrics"]
    if not isinstance(asked, str):
        asked = measures_lib.listed(asked)
    chosen = measures_lib.chosen(asked)
    names = ",".join(one.name for one in chosen)
    return {**given, "eval_metrics": names}, chosen


# Options that a custom optimizer takes the place of
_OF_OPTIMIZER = ("weight_decay", "client_momentum", "client_optimizer_options")
_OF_RATE = ("client_lr", "client_lr_decay")


def replaced_by(own: optimizer.Custom) -> tuple[str, ...]:
    """The options that have no effect beside a custom optimizer."""
    return _OF_OPTIMIZER if own.has_rate else (*_OF_OPTIMIZER, *_OF_RATE)


def _with_optimizer(
    hparams: Any, own: optimizer.Custom | None, given: Mapping[str, Any]
) -> Any:
    """The algorithm's options with a custom optimizer, tried once.

    Raises:
        ValueError: one line: the algorithm or another option does not go with it.
    """
    fields = {field.name: field for field in dataclasses.fields(hparams)}
    if own is not None:
        if "client_optimizer" not in fields:
            algo = given.get("algo", schema.Config.algo)
            raise ValueError(registry.unknown_option("client_optimizer", algo))
        swept = given.get("sweep", "")
        points = [one.partition("=")[0].strip() for one in swept.split(";")]
        for name in replaced_by(own):
            if name not in given and name not in points:
                continue
            flag = f"{name}={given[name]}" if name in given else f"sweep={swept}"
            line = f"--{flag} has no effect with client_optimizer={own}; omit it"
            if name in _OF_RATE:
                line += ", or give a function of the learning rate"
            raise ValueError(line)
        if "level_mix" in fields and hparams.optimizer_state == "persist":
            raise ValueError(
                "--optimizer_state=persist: a client that holds a part of the model "
                "has no state of a custom optimizer of all; give reset"
            )
        defaults = {name: fields[name].default for name in _OF_OPTIMIZER}
        hparams = dataclasses.replace(hparams, client_optimizer=own, **defaults)
    if "client_optimizer" in fields:
        optimizer.check(hparams)
    return hparams


def _own_sha256(given: Mapping[str, Any], tx: optimizer.Custom | None) -> str:
    """The hash of custom code, "" if there is none."""
    custom = [
        name
        for name in ("model", "client_model", "algo", "eval_metrics")
        if not isinstance(given.get(name, ""), str)
    ]
    if not custom and tx is None:
        return ""
    from models import own  # imports nnx, which takes long

    texts = {
        name: own.fingerprint(given[name], _split_of(given, name))
        for name in ("model", "client_model")
        if name in custom
    }
    if "algo" in custom:
        texts["algo"] = own.source(getattr(given["algo"], "make", given["algo"]))
    if "eval_metrics" in custom:
        chosen = measures_lib.chosen(measures_lib.listed(given["eval_metrics"]))
        texts["eval_metrics"] = [(one.name, own.source(one.given)) for one in chosen]
    if tx is not None:
        texts["client_optimizer"] = optimizer.fingerprint(tx)
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _split(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of `split=`.

    Raises:
        ValueError: they are not names, or there is no custom model.
    """
    split = given["split"]
    names = (split,) if isinstance(split, str) else split
    if not isinstance(names, (tuple, list)) or not all(
        isinstance(name, str) for name in names
    ):
        raise ValueError(
            f"split={split!r}: expected names of submodules, such as ('head',)"
        )
    if isinstance(given.get("model", ""), str):
        raise ValueError(
            f"split={split!r} splits a custom module, give it as model=; a model by "
            "name has stages"
        )
    return tuple(names)


def _split_of(given: Mapping[str, Any], flag: str) -> tuple[str, ...]:
    """Where the model of a flag is split: `split=` is of `model`."""
    return given.get("split", ()) if flag == "model" else ()


def _named(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], Any, dict[str, Callable[..., Any]]]:
    """Replaces custom data and models by names, and returns what these names mean."""
    given, in_memory, own_models, chains = dict(given), None, {}, {}
    if "sweep" in given:
        given["sweep"] = sweep.text(given["sweep"])
    if "lanes" in given:
        given["lanes"] = str(given["lanes"])
    if not isinstance(found := given.get("dataset", ""), str):
        is_tuple = isinstance(found, (tuple, list)) and len(found) in (2, 3)
        if not is_tuple and not _is_frame(found):
            raise ValueError(
                "dataset: expected a name, arrays (x, y) or (x, y, client), or a "
                f"pandas DataFrame, got a {type(found).__name__}"
            )
        given["dataset"], in_memory = loaders.ARRAYS, found
    for flag in ("model", "client_model"):
        modules = given.get(flag, "")
        if not isinstance(modules, str):
            from models import own  # imports nnx, which takes long

            made = own.chain(modules)
            name = made.name
            if chains.get(name, made) is not made:
                name = f"{name}_2"
            chains[name] = made
            split = _split_of(given, flag)
            own_models.setdefault(name, functools.partial(own.chain, modules, split))
            given[flag] = name
    given.pop("split", None)
    return given, in_memory, own_models


def _public_images(config: schema.Config, source: dataset.Dataset) -> np.ndarray:
    """The train images of `--public_set`, checked against those of the data set."""
    if config.proxy_fraction:
        raise ValueError(
            f"--public_set={config.public_set} and --proxy_fraction="
            f"{config.proxy_fraction:g} both name shared images; give one of them"
        )
    if config.public_set.removesuffix("_5k") == config.dataset.removesuffix("_5k"):
        raise ValueError(
            f"--public_set={config.public_set} holds images of the clients' own "
            f"--dataset={config.dataset}; take another, or set a fraction aside with "
            "--proxy_fraction"
        )
    is_own = config.public_set.startswith("npz:")
    public = loaders.load(
        config.public_set,
        config.data_dir,
        flag="public_set",
        layout=config.layout if is_own else "auto",
    )
    public = dataset.fitted(public, config.image_size, config.image_channels)
    image = public.image[: public.num_train]
    if image.shape[1:] != source.image.shape[1:] or image.dtype != source.image.dtype:
        raise ValueError(
            f"--public_set={config.public_set} has {image.dtype} images of shape "
            f"{list(image.shape[1:])}, --dataset={config.dataset} "
            f"{source.image.dtype} of {list(source.image.shape[1:])}; they must agree"
        )
    return image
