"""Resolves given options, presets and data into a configuration."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

import models
from data import dataset, loaders, texts
from data.partitions import classes, file, pathological
from fedjax_pfl import options
from launch.config import limits, presets, registry, schema


def _made(dataclass: Any, values: Mapping[str, Any]) -> Any:
    """A checked instance; values that the dataclass has no field for are skipped."""
    chosen = {
        name: limits.checked(name, values[name], kind)
        for name, kind in registry.field_types(dataclass).items()
        if name in values
    }
    for field in dataclasses.fields(dataclass):
        none = field.default is field.default_factory is dataclasses.MISSING
        if none and field.name not in chosen:
            raise ValueError(f"--{field.name} has no default; give it a value")
    made = dataclass(**chosen)
    options.validate(made)
    return made


def configure(given: Mapping[str, Any]) -> tuple[schema.Config, Any]:
    """The common options as given, and the algorithm's with its preset's rules.

    Common options that are not given are set by `resolve`, which needs the data.

    Args:
        given: Option -> value, None = not given. `algo` may be a custom algorithm.

    Raises:
        ValueError: one line: what came, what was expected, which flag to change.
    """
    algo = given.get("algo", schema.Config.algo)
    known = registry.fields_of(algo)
    for name in given:
        if name not in known:
            raise ValueError(registry.unknown_option(name, algo))
    given = {name: value for name, value in given.items() if value is not None}
    given["algo"] = registry.algorithm_name(algo)
    given.setdefault("preset", registry.default_preset(algo))
    config = _made(schema.Config, given)
    limits.check_one_of("preset", config.preset, presets.PRESETS)
    facts = {"algo": config.algo, "dataset": config.dataset}
    rules = presets.values(config.preset, facts)
    return config, _made(registry.algorithm(algo).HParams, rules | given)


def resolve(
    config: schema.Config, source: dataset.Dataset, given: Mapping[str, Any]
) -> schema.Config:
    """Sets every common option that is not given, by the preset and the data.

    Args:
        config: From `configure`.
        source: The data set.
        given: Option -> value, with `algo` if it is a custom algorithm.

    Raises:
        ValueError: the data lack what an option needs.
    """
    name = config.dataset
    is_given = {option for option, value in given.items() if value is not None}
    entry = registry.algorithm(given.get("algo", config.algo))
    has_images = "public_set" in is_given or config.proxy_fraction
    facts = {
        "algo": config.algo,
        "dataset": name,
        "num_examples": len(source.label),
        "image_shape": "x".join(map(str, source.image.shape[1:])),
        "public_images": entry.public_images and not has_images,
    }
    partition = config.partition or presets.values(config.preset, facts)["partition"]
    if loaders.is_own(name) and config.partition is None:
        # A paper's users exist for its own data only, and a user's arrays have owners.
        partition = "client_dirichlet" if source.client is None else "natural"
    if source.is_text and config.partition is None:
        partition = "contiguous"
    rules = presets.values(config.preset, facts | {"partition": partition})
    rules["partition"] = partition
    if partition == "natural":
        least = config.min_examples
        if "min_examples" not in is_given:
            least = rules.get("min_examples", least)
        rules["num_clients"] = _owners(config, source, least)
        rules["examples_per_client"] = 0
    if source.num_train == len(source.label) and rules["test_split"] == "official":
        # These data have no official test rows as those of the paper have.
        rules["test_split"] = "client_share"
    if loaders.is_own(name) and source.num_train < len(source.label):
        rules["test_split"] = "official"
    if source.takes == "labelled tokens":
        rules |= {"normalization": "none", "augment": "none"}
    if partition.startswith(file.PREFIX):
        rules |= _of_file(config, partition) | {"examples_per_client": 0}
    if partition == "classes" and config.client_classes:
        rules["num_clients"] = len(classes.parse(config.client_classes))
    num_clients = config.num_clients or rules["num_clients"]
    rules["clients_per_round"] = min(rules["clients_per_round"], num_clients)
    if source.is_text:
        rules |= _of_text(name, source)
    rules["model"] = _model(name, source, rules.get("model"))
    if (config.model or rules["model"]) not in models.MODELS:
        rules.pop("model_width", None)  # a custom model has its own
    rules["client_model"] = config.model or rules["model"]
    # Shared images come from a public set or from the data, not from both.
    if rules["proxy_fraction"]:
        rules["public_set"] = "none"
    if (config.public_set or "none") != "none":
        rules["proxy_fraction"] = 0.0
    free = vars(config).keys() - is_given
    config = dataclasses.replace(config, **{k: rules[k] for k in rules.keys() & free})
    drawn = config.clients_per_round or config.num_clients
    return dataclasses.replace(config, clients_per_round=drawn)


def _of_file(config: schema.Config, partition: str) -> dict[str, Any]:
    """The options that a partition's file decides; other values are refused."""
    clients, has_own_tests = file.facts(partition)
    settled = {
        "num_clients": clients,
        "proxy_fraction": 0.0,
        "test_split": "client_share" if has_own_tests else "official",
    }
    for name, value in settled.items():
        if getattr(config, name) not in (None, value):
            raise ValueError(
                f"--{name}={getattr(config, name)}: --partition={partition} names the "
                f"rows, which makes it {value}; omit it"
            )
    return settled


def _of_text(name: str, source: dataset.Dataset) -> dict[str, Any]:
    """The options that a text decides, whatever a paper's images have."""
    has_tests = source.num_train < len(source.label)
    return {
        "text_length": source.image.shape[1],
        "test_split": "official" if has_tests else "client_share",
        "normalization": "none",
        "augment": "none",
        "image_size": 0,
        "image_channels": 0,
        "proxy_fraction": 0.0,
        "public_set": "none",
        "c_gen": False,
    }


def check_own(
    config: schema.Config, *, has_columns: bool = False, has_axes: bool = False
) -> None:
    """Refuses options of a user's own data on other data.

    Args:
        config: From `configure`.
        has_columns: Whether data in memory have columns with names.
        has_axes: Whether data in memory are arrays.

    Raises:
        ValueError: one line.
    """
    name, is_csv = config.dataset, config.dataset.startswith("csv:")
    for flag in ("label", "owner"):
        value = getattr(config, flag)
        if value and not (has_columns or is_csv):
            raise ValueError(
                f"--{flag}={value} is a column of a CSV file or DataFrame, and "
                f"--dataset={name} is not one; omit it"
            )
    if config.layout != "auto" and not (has_axes or name.startswith("npz:")):
        raise ValueError(
            f"--layout={config.layout} is for your own arrays (npz:PATH), and "
            f"--dataset={name} has its own; omit it"
        )
    if config.layout == "ntc" and config.rotate_classes > 1:
        raise ValueError(
            f"--rotate_classes={config.rotate_classes} turns images, and with "
            "--layout=ntc examples are series; omit it"
        )
    if config.min_owner_examples and name in texts.TEXTS:
        raise ValueError(
            f"--min_owner_examples={config.min_owner_examples}: owners of a text are "
            "left out by --min_examples; give that"
        )


def check_text(config: schema.Config) -> None:
    """Refuses options of images on a text, and those of a text on images.

    Raises:
        ValueError: one line.
    """
    given = {name: getattr(config, name) for name in _ONLY_IMAGES}
    if config.dataset not in texts.TEXTS:
        for name in ("text_length", "owners", "masked_loss"):
            value = getattr(config, name)
            if value != getattr(schema.Config, name):
                raise ValueError(
                    f"--{name}={value} is an option of texts, and --dataset="
                    f"{config.dataset} is not a text; omit it, or take one of "
                    f"{', '.join(texts.TEXTS)}"
                )
        return
    for name, value in given.items():
        if value not in (None, *_ONLY_IMAGES[name]):
            raise ValueError(
                f"--{name}={value} has no meaning for a text such as --dataset="
                f"{config.dataset}; omit it"
            )
    kind, has_owners = config.partition, texts.TEXTS[config.dataset].has_owners
    known = [one for one in _OF_TEXT if has_owners or one != "natural"]
    if kind is not None and kind not in _OF_TEXT and not kind.startswith(file.PREFIX):
        raise ValueError(
            f"--partition={kind} is by labels, and --dataset={config.dataset} is a "
            f"text; take one of {', '.join(known)} or file:PATH"
        )
    if config.owners != schema.Config.owners and not has_owners:
        raise ValueError(
            f"--owners={config.owners}: --dataset={config.dataset} has no owners; omit "
            "it"
        )


# The values that an option of images may have on a text
_ONLY_IMAGES = {
    "rotate_classes": (1,),
    "image_size": (0,),
    "image_channels": (0,),
    "normalization": ("none",),
    "augment": ("none",),
    "proxy_fraction": (0,),
    "public_set": ("none",),
    "c_gen": (False,),
    "eval_metrics": ("",),
    "train_share": (1,),
}
_OF_TEXT = ("contiguous", "iid", "natural")


def _owners(config: schema.Config, source: dataset.Dataset, least: int) -> int:
    """The number of owners in the data; refuses a partition that needs more.

    Owners of a text count if they have at least `least` rows, and other owners with
    `--min_owner_examples`.
    """
    if source.client is None:
        raise ValueError(
            f"--partition=natural: --dataset={config.dataset} has no client ids; take "
            "another partition, or data with owners, such as an npz file with an array "
            "`client`, a table with --owner or the text kjv"
        )
    flag = "min_examples" if source.is_text else "min_owner_examples"
    if not source.is_text:
        least = config.min_owner_examples
    owners = int((np.bincount(source.client[: source.num_train]) >= least).sum())
    if not owners:
        raise ValueError(f"--{flag}={least}: every owner has fewer rows; lower it")
    if config.num_clients is not None and config.num_clients > owners:
        raise ValueError(
            f"--num_clients={config.num_clients}: the data have {owners} clients"
        )
    return owners


def _model(name: str, source: dataset.Dataset, wanted: str | None) -> str:
    """The preset's model, or one that fits the data."""
    image = source.image
    if source.is_text:
        return wanted if wanted in models.OF_TEXT else models.OF_TEXT[0]
    if name in loaders.DATASETS:
        return wanted or loaders.DATASETS[name].default_model
    # Two convolutions with pooling leave nothing of smaller images.
    if image.ndim < 4 or min(image.shape[1:3]) < 16:
        return "mlp"
    return wanted or "fedavg_cnn"


def client_classes(config: schema.Config) -> tuple[tuple[int, ...], ...]:
    """The classes of each client, () if the partition does not need them.

    Raises:
        ValueError: `--client_classes` is missing, is not a list of classes, or is for
            another number of clients.
    """
    given = config.client_classes
    if config.partition != "classes":
        return ()
    if not given:
        example = "0,1/0,1/2,3 for three clients"
        raise ValueError(
            f"--partition=classes needs --client_classes, such as {example}"
        )
    found = classes.parse(given)
    if len(found) != config.num_clients:
        raise ValueError(
            f"--client_classes={given} names the classes of {len(found)} clients, "
            f"--num_clients={config.num_clients}; they must agree"
        )
    return found


def _check_lanes(config: schema.Config) -> None:
    """Refuses an invalid number of lanes, and chunks beside lanes."""
    given = config.lanes
    is_number = given.isascii() and given.isdigit() and len(given) < 10
    if given != "auto" and not (is_number and str(int(given)) == given != "1"):
        raise ValueError(
            f"--lanes={given}: expected auto, 0 or at least 2 clients side by side"
        )
    for flag in ("client_chunk", "min_chunk"):
        if given != "0" and getattr(config, flag):
            raise ValueError(
                f"--lanes={given} and --{flag}={getattr(config, flag)} both say how "
                "many clients train together; give one of them"
            )


def without_effect(config: schema.Config, names: Collection[str]) -> list[str]:
    """Lines about options that have no effect beside others, by their `needs`.

    Args:
        config: The resolved options.
        names: The options to look at.
    """
    out = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in names or value in ("", 0):
            continue
        for other, values in field.metadata["needs"].items():
            now = getattr(config, other)
            if now not in values:
                wanted = " or ".join(map(limits.text, values))
                out.append(
                    f"--{field.name}={limits.text(value)} has no effect with --{other}="
                    f"{limits.text(now)}; omit it, or give --{other}={wanted}"
                )
    return out


def asked(
    config: schema.Config, hparams: Any, given: Mapping[str, Any]
) -> frozenset[str]:
    """The options that somebody asked for.

    These are all that are given. A `run.flags` gives every option that its version had,
    three quarters of today's at least, which no command line does. Of these only those
    count that differ from what they are without it.

    Args:
        config: The resolved common options.
        hparams: The algorithm's options.
        given: Option -> value.
    """
    named = {name: value for name, value in given.items() if value is not None}
    facts = {name: getattr(config, name) for name in ("algo", "dataset", "partition")}
    rules = presets.values(config.preset, facts)
    fields = dataclasses.fields(config) + dataclasses.fields(hparams)
    usual = {field.name: rules.get(field.name, field.default) for field in fields}
    recorded = {
        field.name
        for field in dataclasses.fields(config)
        if field.metadata["role"] == schema.IDENTITY and field.default is not None
    }
    is_replay = 4 * len(recorded & named.keys()) >= 3 * len(recorded)
    return frozenset(
        name
        for name, value in named.items()
        if name in usual and not (is_replay and value == usual[name])
    )


def check(config: schema.Config, own: Collection[str] = ()) -> None:
    """Checks the relations between the options of a resolved configuration.

    `own` are the names of custom models.

    Raises:
        ValueError: one line: what came, what was expected, which flag to change.
    """
    last_seed = config.seed + config.num_seeds - 1
    if last_seed >= 2**32:
        raise ValueError(
            f"--seed={config.seed} --num_seeds={config.num_seeds}: the last seed would "
            f"be {last_seed}, at most {2**32 - 1} is possible; lower --seed"
        )
    if config.clients_per_round > config.num_clients:
        raise ValueError(
            f"--clients_per_round={config.clients_per_round} is more than "
            f"--num_clients={config.num_clients}; lower it"
        )
    refused = without_effect(config, schema.refused())
    if refused:
        raise ValueError(refused[0])
    client_classes(config)
    _check_lanes(config)
    draw, partition = config.partition_draw, config.partition
    useless = f"--partition_draw={draw} has no effect with --partition={partition}"
    if partition == "pathological" and draw not in pathological.DRAWS:
        known = ", ".join(pathological.DRAWS)
        raise ValueError(f"{useless}; expected one of {known}")
    if draw == "overlap" and partition not in ("client_dirichlet", "pathological"):
        raise ValueError(f"{useless}; omit it")
    given = config.client_model
    names = given.split(",")
    for flag, used in (("model", [config.model]), ("client_model", names)):
        if not set(used) <= {*models.MODELS, *own}:
            known = ", ".join(models.MODELS)
            raise ValueError(f"--{flag}={','.join(used)}: expected one of {known}")
    if len(set(names)) < len(names):
        raise ValueError(f"--client_model={given} names a model twice; once is enough")
    if len(names) > config.num_clients:
        raise ValueError(
            f"--client_model={given}: {len(names)} models for "
            f"--num_clients={config.num_clients}; name fewer"
        )
    if config.proxy_fraction >= 1:
        raise ValueError("--proxy_fraction=1 leaves nothing for the clients; lower it")
