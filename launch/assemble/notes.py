"""Lines about how the options, the data and the models of a run were taken."""

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import algorithms
from data import dataset, labels, own_files, partitions
from data.partitions import file, parts
from fedjax_pfl import (
    levels,
    local_training,
    optimizer,
    options,
    server_optimizer,
    types,
)
from launch.config import registry, resolve, schema, sweep


def of_options(
    config: schema.Config,
    hparams: Any,
    asked: Collection[str] = (),
    at_points: Sequence[types.Algorithm] = (),
) -> list[str]:
    """Lines about values that are allowed but probably not meant.

    `asked` are the options that the user asked for, and `at_points` are the algorithm
    on its task at the points of a sweep, or that of the first if none has an unused
    option; () = unknown.
    """
    points = sweep.settings(config.sweep, hparams)
    out = [*options.conflicts(config, noted=asked)]
    out += dict.fromkeys(options.conflicts(*points, noted=asked))  # once for all points
    out += _without_effect(config, hparams, asked, at_points)
    out += _of_rounds(config, hparams)
    if config.init_from and not getattr(hparams, "shared_init", True):
        out.append(
            "--noshared_init has no effect, as all clients begin with the model of "
            "--init_from"
        )
    if config.init_from and getattr(hparams, "num_bases", 1) > 1:
        out.append(
            f"all --num_bases={hparams.num_bases} models begin with the same numbers, "
            "those of --init_from"
        )
    if isinstance(hparams, levels.Levels) and hparams.levels == "maximum":
        if "level_mix" in asked and len(set(levels.mix(hparams))) > 1:
            out.append(
                f"--level_mix={hparams.level_mix} has no effect with --levels=maximum "
                "but for its number of parts, as all clients hold the whole model"
            )
    is_own = config.algo not in algorithms.ALGORITHMS
    if is_own and at_points and not at_points[0].messages:
        if at_points[0].server is not None or at_points[0].peers is not None:
            out.append(
                f"--algo={config.algo} declares no messages (types.Algorithm), so that "
                "its bytes are 0, also in tables, and a clock has none to wait for"
            )
    found = [registry.departure(config.algo, vars(one)) for one in points]
    others = [(other.flags, other.name) for other in filter(None, found)]
    others += [made for one in points for made in _by_zeros(one)]
    if at_points and at_points[0].same_as:
        others.append(("these options", at_points[0].same_as))
    out += dict.fromkeys(
        f"--algo={config.algo} with {flags} is the method {other}, and results are "
        f"called {config.algo}"
        for flags, other in others
    )
    if isinstance(hparams, local_training.LocalTraining):
        out += _of_optimizers(config, hparams, asked)
    if config.summary == "best":
        out.append(
            "--summary=best chooses the round by test rows, which makes results too "
            "good; take it only beside others' tables that do so, else best_validation"
        )
    if config.choose_by and config.summary != "best_validation":
        out.append(
            f"--choose_by={config.choose_by} chooses no round with --summary="
            f"{config.summary}; give --summary=best_validation for that"
        )
    if config.masked_loss == "chosen" and is_own:
        out.append(
            "--masked_loss=chosen: a loss of a custom algorithm gets the positions as "
            "batch.chosen, and is of all unless it uses them"
        )
    return out


def _by_zeros(hparams: Any) -> Iterator[tuple[str, str]]:
    """Pairs (flag, method) of the options whose 0 makes another method."""
    for field in dataclasses.fields(hparams):
        value, other = getattr(hparams, field.name), options.metadata(field)["zero_is"]
        if other and options.is_off(value):
            yield f"--{field.name}={value}", other


def _without_effect(
    config: schema.Config,
    hparams: Any,
    asked: Collection[str],
    at_points: Sequence[types.Algorithm],
) -> list[str]:
    """Lines about options that an algorithm, or another option, leaves unused."""
    reasons: dict[str, str] = {}
    if at_points:
        first, *others = at_points
        names = set(first.unused).intersection(*(one.unused for one in others))
        reasons = {name: why for name, why in first.unused.items() if name in names}
        if first.server is None:
            why = f"with --algo={config.algo}, where no server has a whole model"
            reasons["eval_train"] = why
            if config.eval_moments == "after" and not config.val_split:
                left = "--eval_moments=after leaves out what serves clients"
                reasons["eval_metrics"] = f"{why} and {left}"
        if not isinstance(hparams, levels.Levels):
            reasons["bucketed"] = f"with --algo={config.algo}, which has no submodels"
    if (config.partition or "").startswith(file.PREFIX):
        if not (config.val_split or config.unseen_clients or config.client_speed):
            reasons["partition_seed"] = "with a --partition of a file, which draws none"
    if (config.eval_sample or 0) >= (config.num_clients or 0) > 0:
        reasons["eval_sample"] = (
            f"with --num_clients={config.num_clients}, all of which are measured"
        )
    values = vars(config) | vars(hparams)
    out = [
        f"--{name}={options.text(values[name])} has no effect {reason}; omit it"
        for name, reason in reasons.items()
        if name in asked
    ]
    out += [
        options.without_effect(
            name, values[name], "sweep", config.sweep, "another sweep"
        )
        for name in sweep.points(config.sweep)[0]
        if name in asked
    ]
    return out


def _of_rounds(config: schema.Config, hparams: Any) -> list[str]:
    """Lines about numbers of rounds that do not suit that of the run."""
    out = []
    for field in dataclasses.fields(hparams):
        kind = options.metadata(field)["is_in_rounds"]
        if not kind or options.unmet(field, vars(hparams)):
            continue
        value, rounds = getattr(hparams, field.name), config.rounds
        if value > rounds:
            apart = "more than"
        elif value < rounds and kind == "end":
            apart = "less than"
        elif value == rounds and kind == "before":
            apart = "as many as"
        else:
            continue
        out.append(
            f"--{field.name}={value} is {apart} --rounds={rounds}: "
            f"{field.metadata['help']}"
        )
    return out


def of_gpus(config: schema.Config) -> list[str]:
    """Lines about what GPUs do by themselves, and how to change it."""
    out = []
    if config.precision == "f32":
        out.append(
            "--precision=f32 computes matrix products in full float32; tf32 lets "
            "tensor cores compute them from rounded factors, and made rounds of two "
            "nets 1.3 and 1.5 times as fast on an H200"
        )
    if "xla_gpu_deterministic_ops=true" not in os.environ.get("XLA_FLAGS", ""):
        out.append(
            "GPUs may add numbers in another order in each run, so that a run that is "
            "repeated or resumed may end with other last digits; with XLA_FLAGS="
            "--xla_gpu_deterministic_ops=true it has the same bits, but may be slower"
        )
    return out


def of_absent(
    config: schema.Config,
    algorithm: types.Algorithm,
    there: np.ndarray,
    in_time: np.ndarray,
) -> list[str]:
    """A line if a third of the clients, by expectation, take part in no round.

    Of those that may train, `there` is the `plan.Planner.chance`, and `in_time` bool
    whether they ever do a step before the deadline.
    """
    if algorithm.serving is None or not algorithm.plans or algorithm.serves_adapted:
        return []
    (count, period), size = there.shape, config.clients_per_round
    there = there * in_time[:, None]
    taken = np.minimum(1, size / np.maximum(there.sum(0), 1e-9))
    # How often each round of the table comes
    often = np.bincount(np.arange(config.rounds) % period, minlength=period)
    absent = ((1 - there * taken) ** often).prod(1).sum()
    if not config.rounds or absent < count / 3:
        return []
    given, cure = [], ""
    if (taken < 1).any():
        given.append(f"--clients_per_round={size}")
        cure = "; --clients_per_round=0 takes all"
    if not in_time.all():
        given.append(f"--round_seconds={config.round_seconds:g}")
        cure += " that are in time" if cure else ""
    if (there[in_time] < 1).any():
        given.append(f"--availability={config.availability}")
        cure += " that are there" if cure and in_time.all() else ""
    return [
        f"about {absent:.0f} of {count} clients are in none of --rounds="
        f"{config.rounds} with {' and '.join(given)}, and count in the clients' "
        f"metrics with a model that never trained on their rows{cure}"
    ]


def _of_optimizers(
    config: schema.Config,
    hparams: local_training.LocalTraining,
    asked: Collection[str],
) -> list[str]:
    """Lines about the optimizers of the clients and of the server."""
    out, name = [], hparams.client_optimizer
    points = sweep.points(config.sweep)

    def every(option: str) -> list[float]:
        """The values of an option at the points, each once."""
        usual = getattr(hparams, option)
        return [*dict.fromkeys(one.get(option, usual) for one in points)]

    if name in optimizer.DECOUPLED and not any(every("weight_decay")):
        out.append(
            f"--client_optimizer={name} without --weight_decay is "
            f"{optimizer.DECOUPLED[name]}, as optax's default decay is not taken"
        )
    is_kept = getattr(hparams, "optimizer_state", "reset") == "persist"
    if name == "rprop" and is_kept and every("client_lr_decay") != [1]:
        out.append(
            f"--client_lr_decay={_numbers(every('client_lr_decay'))} has no effect "
            "with --client_optimizer=rprop and --optimizer_state=persist, since "
            "optax's rprop takes the rate for its first state alone"
        )
    if any(every("client_momentum")) and not optimizer.takes_momentum(name):
        out.append(
            f"--client_momentum={_numbers(every('client_momentum'))} has no effect "
            f"with --client_optimizer={name}"
        )
    if name in optimizer.OF_SIGNS and not any(every("weight_decay")):
        if any(every("clip_norm")):
            out.append(
                f"--clip_norm={_numbers(every('clip_norm'))} has no effect with "
                f"--client_optimizer={name}, which takes the signs of a gradient alone"
            )
    is_chosen = "server_lr" in {*asked, *points[0]}
    if getattr(hparams, "server_lr", 0) == 1 and not is_chosen and _scales(hparams):
        out.append(
            f"--server_optimizer={hparams.server_optimizer} gets the learning rate "
            "1, the default of --server_lr, which is much for an adaptive one"
        )
    if "optimizer_state" in asked and hparams.optimizer_state == "persist":
        made = [dataclasses.replace(hparams, **point) for point in points]
        if not any(map(_keeps_state, made)):
            out.append(
                "--optimizer_state=persist has no effect with --client_optimizer="
                f"{name}, which keeps nothing as it is set; omit it"
            )
    return out


def _numbers(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _scales(hparams: local_training.LocalTraining) -> bool:
    """Whether the server's optimizer scales its steps, or is an own one with a rate."""
    kind = getattr(hparams, "server_optimizer", "none")
    is_own = isinstance(kind, optimizer.Custom) and kind.has_rate
    return is_own or kind in server_optimizer.ADAPTIVE


def _keeps_state(hparams: local_training.LocalTraining) -> bool:
    """Whether the clients' optimizer keeps something from one step to the next."""
    weight = (jax.ShapeDtypeStruct((1,), np.float32),)
    try:
        state = jax.eval_shape(lambda w: optimizer.fresh(hparams, w), weight)
    except Exception:  # of one of a user, that takes the stages of a model alone
        return True
    return bool(jax.tree.leaves(state))


def of_owners(
    config: schema.Config, source: dataset.Dataset, dropped: Mapping[str, int]
) -> list[str]:
    """Lines about the owners of rows: those that are left out, and the clients' order.

    `dropped` has numbers of rows by the name of an owner that was left out of `source`.
    """
    out, owners = [], (source.owners or ())[: config.num_clients]
    if config.partition != "natural":
        is_named = config.partition.startswith(file.PREFIX)
        if source.client is not None and not source.is_text and not is_named:
            out.append(
                f"--partition={config.partition} deals all rows out again; with "
                "natural the clients are their owners"
            )
        return out
    if dropped:
        name = "min_examples" if source.is_text else "min_owner_examples"
        out.append(
            f"owners with fewer than --{name}={getattr(config, name)} rows are left "
            f"out, {len(dropped)}: {labels.sized(dropped)}"
        )
    count = len(dataset.owner_names(source))
    if count > config.num_clients:
        lost = int((source.client[: source.num_train] >= config.num_clients).sum())
        out.append(
            f"--num_clients={config.num_clients} takes the first {config.num_clients} "
            f"of {count} owners; {lost} of {source.num_train} train rows are of the "
            f"others; --num_clients={count} takes all"
        )
    if owners:
        out.append(
            f"owners are clients 0 to {len(owners) - 1} in this order: "
            f"{labels.listed(owners)}"
        )
    return out


def of_plans(
    config: schema.Config, specs: Sequence[types.PlanSpec], rows: np.ndarray
) -> list[str]:
    """Lines about clients that cannot be stopped, or whose rows fill no batch.

    `rows` int[seeds, K] are the train rows of each client.
    """
    out, found = [], {}
    names = [name for name in ("interrupted", "round_seconds") if getattr(config, name)]
    if names and not specs:
        given = " and ".join(f"--{name}" for name in names)
        out.append(f"{given}: clients of --algo={config.algo} take no local step")
    elif config.interrupted and all(
        spec.at_server or spec.steps(rows).max() <= 1 for spec in specs
    ):
        out.append(
            f"--interrupted={config.interrupted:g} has no effect, as no client takes "
            "more than one step in a round"
        )
    for spec in specs:
        found[spec.batch_size] = ((rows > 0) & (spec.steps(rows) == 0)).sum(1).max()
    size = max(found, key=found.get, default=0)
    if found.get(size):
        out.append(
            f"--drop_last: {found[size]} of {rows.shape[1]} clients have fewer than "
            f"the {size} train rows of a step and take none"
        )
    return out


def of_adaptation(
    spec: types.PlanSpec | None, rows: np.ndarray, has_test: np.ndarray
) -> list[str]:
    """A line about measured clients whose rows fill no batch of `--fine_tune_epochs`.

    `rows` int[seeds, K] are those on which each client adapts, and of clients with
    `has_test` bool[seeds, K] the adapted models are measured.
    """
    if spec is None or not (lacking := has_test & (spec.steps(rows) == 0)).any():
        return []
    return [
        f"--drop_last: {lacking.sum(1).max()} of {rows.shape[1]} clients have fewer "
        f"than the {spec.batch_size} train rows of a batch and are measured without "
        "--fine_tune_epochs"
    ]


def of_constants(
    config: schema.Config, image: np.ndarray, normal: tuple[np.ndarray, np.ndarray]
) -> list[str]:
    """A line about numbers that the normalisation, (mean, scale), makes nearly 0.

    Or one where constants are those of values from 0 to 1, and examples have others.
    """
    kind = config.normalization
    if kind in dataset.CONSTANTS and image.dtype.kind == "f":
        low, high = float(image.min()), float(image.max())
        if low < -1e-3 or high > 1.001:
            return [
                f"--normalization={kind} is for numbers from 0 to 1, and these are "
                f"{low:.4g} to {high:.4g}; take channel, or none if they are as a "
                "model should get them"
            ]
    if not (count := dataset.num_hidden(image, kind, normal[1])):
        return []
    return [
        f"--normalization={kind}: {count} of {image[0].size} numbers of an example "
        f"vary by less than {dataset.MARGINS[kind]:g}, which is added to each "
        "deviation, so that they are nearly 0; give them in larger units"
    ]


def of_whole_numbers(
    config: schema.Config, image: np.ndarray, asked: Collection[str]
) -> list[str]:
    """A line about columns like ids, which a model cannot look up once normalised.

    They are those of vectors f32[N, D] with whole numbers from 0 beside others.
    """
    is_usual = config.normalization in dataset.MARGINS and "normalization" not in asked
    if not is_usual or image.ndim != 2 or image.dtype.kind != "f":
        return []

    whole = np.ones(image.shape[1], bool)
    # In slices, without a copy of the whole table; most have no such column.
    for begin in range(0, len(image), 4096):
        rows = image[begin : begin + 4096]
        whole &= (rows == np.floor(rows)).all(0)
        if not whole.any():
            return []
    if whole.all():
        return []
    low, high = image[:, whole].min(0), image[:, whole].max(0)
    found = np.flatnonzero(whole)[(low >= 0) & (high > 1) & (high > low)]
    if not found.size:
        return []
    named = ", ".join(map(str, found[:5])) + ", ..." * (len(found) > 5)
    return [
        f"--normalization={config.normalization}: the numbers at {named} of each "
        "example are whole and are standardised like all others; with "
        "--normalization=none a model gets x as it is, such as ids for an embedding"
    ]


def of_clients(
    config: schema.Config,
    source: dataset.Dataset,
    splits: Sequence[partitions.Split],
    vals: Sequence[parts.Given],
) -> list[str]:
    """Lines about rows to measure on that also train, and classes that are missing.

    `splits` and the validation rows `vals`, () without, are those of each seed, once
    unseen clients are taken out.
    """
    out = _of_rows_that_train(config, splits, vals)
    if source.is_text:
        return out
    label, num_classes = source.label, source.num_classes
    whole = np.bincount(label[: source.num_dealt], minlength=num_classes) > 0
    if config.partition == "classes":  # others are not dealt
        named = np.unique(np.concatenate(resolve.client_classes(config)))
        whole &= np.isin(np.arange(num_classes), named)
        if source.classes:
            shown = labels.listed([f"{one} is {source.classes[one]}" for one in named])
            out.append(f"--client_classes={config.client_classes}: {shown}")
    rows = [label[one.train.row] for one in splits]
    trained = np.stack([np.bincount(one, minlength=num_classes) for one in rows])
    lacking = whole & (trained == 0)
    each = lacking.sum(1)
    if each.any():
        lost = np.flatnonzero(lacking[each.argmax()])
        names = source.classes or [str(one) for one in range(num_classes)]
        shown = labels.listed([str(names[one]) for one in lost])
        count = int(np.isin(label[: source.num_dealt], lost).sum())
        is_same = (lacking == lacking[0]).all()
        out.append(
            f"no client trains on {'up to ' * (not is_same)}{len(lost)} of "
            f"{num_classes} classes ({'such as ' * (not is_same)}{shown}), {count} "
            f"row{'s' * (count > 1)} of the data"
        )
    if config.partition.endswith("pathological"):
        line = f"--classes_per_client={config.classes_per_client}"
        wanted: Any = config.classes_per_client
    elif config.partition == "classes":
        line = f"--client_classes={config.client_classes}"
        wanted = np.array([len(own) for own in resolve.client_classes(config)])
    else:
        return out
    fewer = []
    for train in (one.train for one in splits):
        classes = np.unique(train.owner * num_classes + label[train.row])
        each = np.bincount(classes // num_classes, minlength=config.num_clients)
        # Not those of clients that never train
        fewer.append(int(((each > 0) & (each < wanted)).sum()))
    if any(fewer):
        is_pfllib = config.partition.startswith("pfllib")
        why = "as in PFLlib" if is_pfllib else "as some classes have few rows"
        out.append(
            f"{line}: {_most(fewer)} of {config.num_clients} clients train on fewer "
            f"classes, {why}"
        )
    return out


def _most(counts: Sequence[int]) -> str:
    """The largest count of the seeds, with words if they differ."""
    return "up to " * (len(set(counts)) > 1) + str(max(counts))


def _of_rows_that_train(
    config: schema.Config,
    splits: Sequence[partitions.Split],
    vals: Sequence[parts.Given],
) -> list[str]:
    """Lines that count test and validation rows which clients train on."""
    out, flag = [], f"--partition={config.partition}"
    if config.partition_draw == "overlap":
        flag = "--partition_draw=overlap"
    tests = [parts.Given(one.test, one.official_test) for one in splits]
    for kind, seeds in {"test": tests, "validation": vals}.items():
        found = [
            _shared_rows(split.train, *given)
            for split, given in zip(splits, seeds, strict=bool(seeds))
        ]
        if not any(of_any for _, of_any, _ in found):
            continue
        totals, of_any, own = zip(*found, strict=True)
        out.append(
            f"{flag}: {_most(of_any)} of {_most(totals)} {kind} rows are train rows of "
            f"some client, {_most(own)} of them of the same one"
        )
    return out


def _shared_rows(
    train: parts.Parts, owned: parts.Parts, others: np.ndarray
) -> tuple[int, int, int]:
    """Numbers of rows to measure on: all, those that train, and for the same client.

    They are `owned`, of clients, and `others`, of nobody.
    """
    every = np.append(owned.row, others)
    of_any = int(np.isin(every, train.row).sum())
    if not of_any:
        return len(every), 0, 0
    size = 1 + max(train.row.max(), every.max())
    pairs = [one.owner * size + one.row for one in (owned, train)]
    return len(every), of_any, int(np.isin(*pairs).sum())


def of_owned_rows(config: schema.Config, source: dataset.Dataset) -> list[str]:
    """Lines about test and validation rows that do not belong to their owners."""
    begin, end, out = source.num_train, source.num_dealt, []
    places = {"validation": slice(end, None)}
    if config.test_split == "official":
        places = {"test": slice(begin, end), **places}
    for kind, place in places.items():
        owner = -np.ones(0) if source.client is None else source.client[place]
        lost = int((owner >= config.num_clients).sum())
        if config.partition == "natural" and lost:
            out.append(
                f"{lost} of {len(owner)} {kind} rows are not used, as their owners are "
                f"not among the --num_clients={config.num_clients} clients"
            )
        elif config.partition != "natural" and (owner >= 0).any():
            out.append(
                f"--partition={config.partition}: the data's own {kind} rows belong to "
                "no client; natural gives them to their owners"
            )
    return out


def of_unmeasured_clients(
    config: schema.Config, partition: types.Partition
) -> list[str]:
    """Lines about clients without rows of a kind that other clients have."""
    out = []
    kinds = zip(("test", "validation"), partition.measured().values(), strict=False)
    for kind, one in kinds:
        count = np.asarray(one.test.count)
        lacking = (count == 0).sum(1)
        if count.any() and lacking.any():
            up_to = "up to " * bool(np.ptp(lacking))
            out.append(
                f"{up_to}{lacking.max()} of {count.shape[1]} clients have no {kind} "
                "rows and count in none of the clients' metrics on these"
                + " but C-Gen"
                * bool(config.c_gen)
            )
    return out


def of_rows_of_nobody(
    config: schema.Config, algorithm: types.Algorithm, partition: types.Partition
) -> list[str]:
    """Lines about rows without owners, which measure no client's own model."""
    if config.c_gen or (algorithm.server is not None and algorithm.serving is None):
        return []
    cures = {
        "test": "take --test_split=client_share",
        "validation": "give --val_split=0.2 in their place",
    }
    if config.partition.startswith(file.PREFIX):
        cures["test"] = "name test rows of clients in the file"
    elif own_files.is_one(config.dataset):
        owners = "give their owners with --partition=natural, or "
        cures = {kind: owners + cure for kind, cure in cures.items()}
    out, measured = [], partition.measured().values()
    is_all = not any(one.test.count.any() for one in measured)
    for (kind, cure), one in zip(cures.items(), measured, strict=False):
        total, owned = int((one.test.row[0] >= 0).sum()), int(one.test.count[0].sum())
        if total > owned:
            what = f"{total - owned} of {total}" if owned else f"the {total}"
            effect = "measure the server's model alone, and not those of clients"
            if algorithm.server is None:
                why = f"as --algo={config.algo} measures clients only"
                effect = f"are not measured, {why}"
                effect += ", so that this run measures nothing" * is_all
            out.append(f"{what} {kind} rows belong to no client and {effect}; {cure}")
    return out
