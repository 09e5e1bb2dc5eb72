"""Replaces objects that are given in Python by names, as the command line has them.

A run's options hold the names of custom models, optimizers and metrics. The settings
hold what these names mean, and a hash of their code.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from data import files, own_files
from fedjax_pfl import measures as measures_lib
from fedjax_pfl import optimizer
from launch.config import registry, schema, sweep

# Options that are not flags
ONLY_IN_PYTHON = ("split", "test", "val")


def measured(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], tuple[measures_lib.Measure, ...]]:
    """Returns the options with names for `eval_metrics`, and what these names mean.

    Raises ValueError for an unknown metric.
    """
    if "eval_metrics" not in given:
        return dict(given), ()
    asked = given["eval_metrics"]
    if not isinstance(asked, str):
        asked = measures_lib.listed(asked)
    chosen = measures_lib.chosen(asked)
    names = ",".join(one.name for one in chosen)
    return {**given, "eval_metrics": names}, chosen


# Options that custom optimizers replace, and those of their learning rates
_OF_OPTIMIZER = {
    "client_optimizer": ("weight_decay", "client_momentum", "client_optimizer_options"),
    "server_optimizer": ("server_momentum",),
}
_OF_RATE = {
    "client_optimizer": ("client_lr", "client_lr_decay"),
    "server_optimizer": ("server_lr",),
}


def optimizers(given: Mapping[str, Any]) -> dict[str, optimizer.Custom]:
    """The optimizers that are given as objects, by their options."""
    return {
        name: optimizer.custom(given[name], name)
        for name in _OF_OPTIMIZER
        if not isinstance(given.get(name, ""), str)
    }


def replaced_by(own: optimizer.Custom) -> tuple[str, ...]:
    """The options that have no effect beside a custom optimizer."""
    rate = () if own.has_rate else _OF_RATE[own.option]
    return (*_OF_OPTIMIZER[own.option], *rate)


def replaced(hparams: Any) -> dict[str, optimizer.Custom]:
    """The options without effect beside custom optimizers, each with that optimizer."""
    values = [getattr(hparams, name, None) for name in _OF_OPTIMIZER]
    every = [one for one in values if isinstance(one, optimizer.Custom)]
    return {name: own for own in every for name in replaced_by(own)}


def with_optimizers(
    hparams: Any, every: Mapping[str, optimizer.Custom], given: Mapping[str, Any]
) -> Any:
    """Resets the options that custom optimizers replace, and checks these.

    Raises ValueError if they do not go together.
    """
    fields = {field.name: field for field in dataclasses.fields(hparams)}
    algo = given.get("algo", schema.Config.algo)
    for option, own in every.items():
        if option in registry.algorithm(algo).fixed:
            raise ValueError(
                f"{option}={own}: {algo} is the name of a method with an optimizer of "
                "its own; give that of the method without one"
            )
        swept = given.get("sweep", "")
        points = [one.partition("=")[0].strip() for one in swept.split(";")]
        for name in replaced_by(own):
            if name not in given and name not in points:
                continue
            flag = f"{name}={given[name]}" if name in given else f"sweep={swept}"
            line = f"--{flag} has no effect with {option}={own}; omit it"
            if name in _OF_RATE[option]:
                line += ", or give a function of the learning rate"
            raise ValueError(line)
        is_part = "level_mix" in fields and option == "client_optimizer"
        if is_part and hparams.optimizer_state == "persist":
            raise ValueError(
                "--optimizer_state=persist: a client that holds a part of the model "
                "has no state of a custom optimizer of all; give reset"
            )
        replaced = [name for name in _OF_OPTIMIZER[option] if name in fields]
        defaults = {name: fields[name].default for name in replaced}
        hparams = dataclasses.replace(hparams, **defaults)
    if "client_optimizer" in fields:
        for point in sweep.settings(given.get("sweep", ""), hparams):
            optimizer.check(point)
    return hparams


def own_sha256(given: Mapping[str, Any], every: Mapping[str, optimizer.Custom]) -> str:
    """Hashes the source of custom code, "" if there is none.

    `every` are the custom optimizers, see `optimizers`.
    """
    custom = [
        name
        for name in ("model", "client_model", "algo")
        if not isinstance(given.get(name, ""), str)
    ]
    metrics = measures_lib.listed(given.get("eval_metrics", ""))
    if not all(isinstance(one, str) for one in metrics):
        custom.append("eval_metrics")
    if not custom and not every:
        return ""
    from models import own  # imports nnx, which takes long

    split = {"model": given.get("split", ())}
    texts: dict[str, Any] = {}
    for name in ("model", "client_model"):
        if name not in custom:
            continue
        if isinstance(given[name], Mapping):
            pairs = given[name].items()
            texts[name] = [(str(key), own.fingerprint(one)) for key, one in pairs]
        else:
            texts[name] = own.fingerprint(given[name], split.get(name, ()))
    if "algo" in custom:
        texts["algo"] = own.source(getattr(given["algo"], "make", given["algo"]))
    if "eval_metrics" in custom:
        chosen = measures_lib.chosen(metrics)
        texts["eval_metrics"] = [(one.name, own.source(one.given)) for one in chosen]
    texts |= {name: optimizer.fingerprint(tx) for name, tx in every.items()}
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def split_names(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The submodules that `split=` names for a custom model; ValueError otherwise."""
    split = given["split"]
    names = (split,) if isinstance(split, str) else split
    is_list = isinstance(names, (tuple, list))
    if not is_list or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"split={split!r}: expected names of submodules, such as ('head',)"
        )
    if isinstance(given.get("model", ""), str):
        raise ValueError(
            f"split={split!r} splits a custom module, give it as model=; a model by "
            "name has stages"
        )
    return tuple(names)


def named(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], Any, Any, dict[str, Callable[..., Any]]]:
    """Replaces custom data and models by names, and returns what these names mean.

    Custom data are `dataset`, `test` and `val`, or None, and `public_set`, or None.
    """
    given, in_memory, own_models, chains = dict(given), None, {}, {}
    split = {"model": given.pop("split", ())}
    if "sweep" in given:
        given["sweep"] = sweep.text(given["sweep"])
    found = given.get("dataset", "")
    more = given.pop("test", None), given.pop("val", None)
    if not isinstance(found, str) or any(one is not None for one in more):
        given["dataset"], in_memory = own_files.ARRAYS, (found, *more)
    public = given.get("public_set")
    if isinstance(public, str):
        public = None
    elif public is not None:
        given["public_set"] = own_files.ARRAYS
    for flag in ("model", "client_model"):
        modules = given.get(flag, "")
        if flag == "client_model" and isinstance(modules, Mapping):
            own_models |= (every := _by_name(modules))
            given[flag] = ",".join(every)
        elif not isinstance(modules, str):
            from models import own  # imports nnx, which takes long

            made = own.chain(modules)
            name = made.name
            if chains.get(name, made) is not made:
                name = f"{name}_2"
            chains[name] = made
            make = functools.partial(own.chain, modules, split.get(flag, ()))
            own_models.setdefault(name, make)
            given[flag] = name
    return given, in_memory, public, own_models


def _by_name(several: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Makes the models of `client_model={name: module}` by their names in records.

    Raises ValueError, in one line, for no model, and for names that are not of letters,
    digits and _.
    """
    from models import own  # imports nnx, which takes long

    if not several:
        raise ValueError("client_model: the dict has no model")
    out = {}
    for name, module in several.items():
        if not re.fullmatch(r"\w{1,56}", str(name)):
            raise ValueError(
                f"client_model: {name!r} is no name of a model; take letters, digits "
                "and _"
            )
        with files.named(f"client_model: {name}"):
            own.chain(module)
        out[f"own_{name}"] = functools.partial(own.chain, module, ())
    return out


def objects_in(recorded: Mapping[str, Any]) -> dict[str, str]:
    """The recorded options that name models, an optimizer or metrics of Python.

    By the option, what it was: a module, an optimizer or a function.
    """
    kinds = {"model": "module", "client_model": "module"}
    kinds |= dict.fromkeys(_OF_OPTIMIZER, "optimizer")
    out = {n: kind for n, kind in kinds.items() if recorded.get(n, "")[:4] == "own_"}
    metrics = recorded.get("eval_metrics", "").split(",")
    if not {*filter(None, metrics)} <= measures_lib.NAMES.keys():
        out["eval_metrics"] = "function"
    return out


def given_again(
    recorded: Mapping[str, Any], given: Mapping[str, Any], path: Any
) -> dict[str, Any]:
    """Drops the recorded options that given custom optimizers replace.

    Raises:
        ValueError: one line: a custom object of the run is not given.
    """
    for name, kind in objects_in(recorded).items():
        if name not in given:
            flag = f"--{name}={recorded[name]}"
            raise ValueError(f"{path}: {flag} was a custom {kind}; give {name}=...")
    every = optimizers(given).values()
    replaced = {name for own in every for name in replaced_by(own)}
    return {name: value for name, value in recorded.items() if name not in replaced}
