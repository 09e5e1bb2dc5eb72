"""Resolves given options, presets and data into a configuration."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

import models
from data import dataset, loaders, own_files, partitions, texts
from data.partitions import classes, file, held_out, pathological
from fedjax_pfl import json_text, levels, options
from launch.config import limits, presets, registry, schema, sweep


def _made(dataclass: Any, values: Mapping[str, Any], swept: str = "") -> Any:
    """An instance, checked at each point of a sweep.

    Values that the dataclass has no field for are skipped.
    """
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
    for field in dataclasses.fields(made):
        options.check(field, getattr(made, field.name))
    options.validate(*sweep.settings(swept, made))
    return made


def configure(given: Mapping[str, Any]) -> tuple[schema.Config, Any]:
    """The common options as given, and the algorithm's with its preset's rules.

    Common options that are not given, or None, are set by `resolve`, which needs the
    data. `algo` may be a custom algorithm. A ValueError names the flag to change.
    """
    algo = given.get("algo", schema.Config.algo)
    known = registry.fields_of(algo)
    for name in given:
        if name not in known:
            raise ValueError(registry.unknown_option(name, algo))
    given = {name: value for name, value in given.items() if value is not None}
    given["algo"] = registry.algorithm_name(algo)
    given.setdefault("preset", registry.algorithm(algo).preset)
    config = _made(schema.Config, given)
    options.check_one_of("preset", config.preset, presets.PRESETS)
    facts = {"algo": config.algo, "dataset": config.dataset}
    rules = presets.values(config.preset, facts)
    kind = registry.algorithm(algo).HParams
    return config, _made(kind, rules | given, config.sweep)


def resolve(
    config: schema.Config,
    source: dataset.Dataset,
    given: Mapping[str, Any],
    hparams: Any = None,
) -> schema.Config:
    """Sets every common option that is not given, by the preset and the data.

    `config` and `hparams` are from `configure`, and `given` has the `algo` if that is a
    custom one. Raises ValueError if the data lack what an option needs.
    """
    name = config.dataset
    is_given = {option for option, value in given.items() if value is not None}
    entry = registry.algorithm(given.get("algo", config.algo))
    has_images = "public_set" in is_given or config.proxy_fraction
    facts = {
        "algo": config.algo,
        "dataset": name,
        "num_examples": source.num_dealt,
        "image_shape": "x".join(map(str, source.image.shape[1:])),
        "public_images": entry.public_images and not has_images,
    }
    partition = config.partition or _partition(config, source, facts)
    rules = presets.values(config.preset, facts | {"partition": partition})
    least = config.min_examples
    if "min_examples" not in is_given:
        least = rules.get("min_examples", least)
    rules |= _of_partition(config, source, partition, least)
    rules["test_split"] = _test_split(config, source, partition, rules["test_split"])
    rules |= _of_examples(config, source)
    if partition.startswith(file.PREFIX):
        rules |= _of_file(config, partition)
    num_clients = config.num_clients or rules["num_clients"]
    if config.early_stop:
        rules["summary"] = "best_validation"
    unseen = num_unseen(dataclasses.replace(config, num_clients=num_clients))
    able = int(levels.eligible(hparams, num_clients).sum())
    trained = max(able - unseen, 1)  # fewer are refused
    rules["clients_per_round"] = min(rules["clients_per_round"], trained)
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
    drawn = config.clients_per_round or trained
    return dataclasses.replace(config, clients_per_round=drawn)


def _partition(
    config: schema.Config, source: dataset.Dataset, facts: Mapping[str, Any]
) -> str:
    """The partition by the preset and the data."""
    if source.is_text:
        return "contiguous"
    has_users = presets.has_data(config.preset, config.dataset) or source.client is None
    if own_files.is_one(config.dataset) or not has_users:
        # A paper's users exist only in its own data; others may name owners.
        return "client_dirichlet" if source.client is None else "natural"
    return presets.values(config.preset, facts)["partition"]


def _of_partition(
    config: schema.Config, source: dataset.Dataset, partition: str, least: int
) -> dict[str, Any]:
    """The partition, and the options that its kind decides; `least` is of `_owners`."""
    out: dict[str, Any] = {"partition": partition}
    if partition == "natural":
        out["num_clients"] = _owners(config, source, least)
    elif partition == "classes" and config.client_classes:
        out["num_clients"] = len(classes.parse(config.client_classes))
    has_sizes = partition == "natural" or partition.startswith(file.PREFIX)
    if has_sizes or partition in partitions.SIZED:
        out["examples_per_client"] = 0
    return out


def _of_examples(config: schema.Config, source: dataset.Dataset) -> dict[str, Any]:
    """The options that the kind of the examples decides."""
    if source.is_text:
        return _of_text(source)
    if source.takes == "labelled tokens":
        return {"normalization": "none", "augment": "none"}
    is_own = config.dataset.startswith(own_files.NORMALIZED)
    if is_own and source.image.dtype != np.uint8:
        return {"normalization": "none"}
    return {}


def _test_split(
    config: schema.Config, source: dataset.Dataset, partition: str, wanted: str
) -> str:
    """The rule of test rows, where the preset has `wanted`.

    Raises a ValueError for a split that pools rows, as owners' test rows stay theirs.
    """
    if own_files.is_one(config.dataset) and source.num_test:
        if partition == "natural" and config.test_split in held_out.POOLED:
            raise ValueError(
                f"--test_split={config.test_split} divides each client's train and "
                "test rows again, but --partition=natural leaves the data's own test "
                "rows as they are; take official or client_share"
            )
        return "official"
    # Unlike a paper's data, others may have no official test rows.
    lacks = wanted == "official" and not source.num_test
    return "client_share" if lacks else wanted


def _of_file(config: schema.Config, partition: str) -> dict[str, Any]:
    """The options that a partition's file decides; other values are refused."""
    found = file.facts(partition)
    settled = {
        "num_clients": found.num_clients,
        "proxy_fraction": 0.0,
        "test_split": "client_share" if found.has_own_tests else "official",
    }
    if found.has_proxy:
        settled["public_set"] = "none"
    for name, value in settled.items():
        if getattr(config, name) not in (None, value):
            raise ValueError(
                f"--{name}={getattr(config, name)}: --partition={partition} names the "
                f"rows, which makes it {value}; omit it"
            )
    return settled


def _of_text(source: dataset.Dataset) -> dict[str, Any]:
    """The options that a text decides, whatever a paper's images have."""
    return {
        "text_length": source.image.shape[1],
        "test_split": "official" if source.num_test else "client_share",
        "normalization": "none",
        "augment": "none",
        "image_size": 0,
        "image_channels": 0,
        "proxy_fraction": 0.0,
        "public_set": "none",
        "c_gen": False,
    }


def check_data(
    config: schema.Config, *, has_columns: bool = False, has_axes: bool = False
) -> None:
    """Raises ValueError for options that are for other data, by their `only`.

    Data in memory may have named columns (`has_columns`) or be arrays (`has_axes`).
    """
    name, kind = config.dataset, config.partition
    text = texts.TEXTS.get(name)
    has = {
        "texts": text is not None,
        "owned texts": text is not None and text.has_owners,
        "images": text is None,
        "tables": has_columns or name.startswith(own_files.WITH_COLUMNS),
        "arrays": has_axes or name.startswith(own_files.WITH_LAYOUT),
        "coarse labels": name == "cifar100",
    }
    for field in dataclasses.fields(config):
        value, only = getattr(config, field.name), field.metadata["only"]
        if only and options.is_on(field, value) and not has[only]:
            wanted = schema.DATA[only]
            raise ValueError(
                options.without_effect(field.name, value, "dataset", name, wanted)
            )
    if text and kind and not kind.startswith(file.PREFIX):
        known = "contiguous", "iid", *["natural"] * text.has_owners
        options.check_one_of("partition", kind, known, " or file:PATH for a text")


def _owners(config: schema.Config, source: dataset.Dataset, least: int) -> int:
    """The number of owners in the data; refuses a partition that needs more.

    An owner must have `least` rows of a text, or `--min_owner_examples` of other data.
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
    options.check_at_most(
        "num_clients", config.num_clients or 0, owners, "the owners of the data"
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


def chooser(config: schema.Config) -> str:
    """The option that chooses by validation rows, as on a command line; "" = none."""
    is_best = config.summary == "best_validation"
    asked = {"early_stop": config.early_stop, "choose_by": config.choose_by}
    asked["summary"] = config.summary if is_best else ""
    return next((f"--{name}={value}" for name, value in asked.items() if value), "")


def unseen_names(config: schema.Config) -> list[str]:
    """The clients of `--unseen_names`; ValueError if a list is none of names."""
    given, names = config.unseen_names, []
    if given.startswith("["):
        try:
            names = [str(one) for one in json_text.read(given, [str | int])]
        except ValueError as error:
            line = f"--unseen_names={given}: expected a list of names ({error})"
            raise ValueError(line) from error
    elif given:
        names = [one.strip() for one in given.split(",")]
    if len({*names}) < len(names) or "" in names:
        raise ValueError(
            f"--unseen_names={given}: expected different names, separated by commas"
        )
    return names


def unseen(config: schema.Config) -> str:
    """The option of clients that never train, as on a command line."""
    if config.unseen_names:
        return f"--unseen_names={config.unseen_names}"
    return f"--unseen_clients={config.unseen_clients:g}"


def num_unseen(config: schema.Config) -> int:
    """The number of clients that never train.

    Raises:
        ValueError: it is neither a whole number nor a fraction, or no client is left.
    """
    given, most = config.unseen_clients, config.num_clients
    if names := unseen_names(config):
        if len(names) >= most:
            raise ValueError(
                f"{unseen(config)}: {len(names)} of --num_clients={most}; expected "
                "fewer, as others must train"
            )
        return len(names)
    count = int(given * most + 1e-9) if given < 1 else int(given)
    if given >= 1 and given != count:
        raise ValueError(
            f"--unseen_clients={given}: expected a number of clients, or a fraction of "
            "them below 1"
        )
    if given and not 0 < count < most:
        raise ValueError(
            f"--unseen_clients={given:g}: {count} of --num_clients={most}; expected 1 "
            f"to {most - 1}, as others must train"
        )
    return count


def client_classes(config: schema.Config) -> tuple[tuple[int, ...], ...]:
    """Parses `--client_classes`; () for other partitions.

    Raises ValueError if it is not a list of classes for each client.
    """
    given = config.client_classes
    if config.partition != "classes":
        return ()
    found = classes.parse(given)
    if len(found) != config.num_clients:
        raise ValueError(
            f"--client_classes={given} names the classes of {len(found)} clients, "
            f"--num_clients={config.num_clients}; they must agree"
        )
    return found


def check(config: schema.Config, own: Collection[str] = (), num_val: int = 0) -> None:
    """Raises ValueError if resolved options contradict.

    `own` names custom models, and `num_val` is the number of the data's own validation
    rows.
    """
    most = limits.SEED_LIMIT + 1 - config.num_seeds
    options.check_at_most("seed", config.seed, most, "as the last of --num_seeds fits")
    most, why = config.num_clients, "all of --num_clients"
    options.check_at_most("clients_per_round", config.clients_per_round, most, why)
    options.validate(config)
    if config.val_split and num_val:
        raise ValueError(
            f"--val_split={config.val_split:g}: the data bring {num_val} validation "
            "rows of their own; omit it"
        )
    if (flag := chooser(config)) and not (config.val_split or num_val):
        raise ValueError(
            f"{flag} needs validation rows; give --val_split=0.2, or your own "
            "(docs/data.md#your-own-split)"
        )
    if config.early_stop and config.summary != "best_validation":
        raise ValueError(
            f"--early_stop={config.early_stop} ends a run before the rounds of "
            f"--summary={config.summary}; omit it, or take best_validation"
        )
    num_unseen(config)
    client_classes(config)
    draw, partition = config.partition_draw, config.partition
    draws = {"client_dirichlet": (draw,), "pathological": pathological.DRAWS}
    known = draws.get(partition, sorted({*partitions.DRAWS} - {"overlap"}))
    options.check_one_of(
        "partition_draw", draw, known, f" with --partition={partition}"
    )
    given = config.client_model
    names = given.split(",")
    for flag, name in [("model", config.model), *(("client_model", n) for n in names)]:
        options.check_one_of(flag, name, [*models.MODELS, *own])
    if len(set(names)) < len(names):
        raise ValueError(f"--client_model={given} names a model twice; once is enough")
    if len(names) > config.num_clients:
        raise ValueError(
            f"--client_model={given}: {len(names)} models for "
            f"--num_clients={config.num_clients}; name fewer"
        )
