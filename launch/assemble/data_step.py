"""Step 2 of assembling: the tables of examples, and which client has which of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from data import dataset, labels, partitions
from data.partitions import cdkt
from fedjax_pfl import levels, options, rng, types
from launch.assemble import from_file, models_step, notes
from launch.assemble.given import Settings
from launch.config import resolve, schema
from launch.machine import processes


def make(
    settings: Settings,
    seeds: Sequence[int],
    normal: models_step.Normal,
    found: models_step.Models,
) -> tuple[types.Data, tuple[str, ...]]:
    """Makes the tables of examples, and lines about how they were taken.

    The tables are numpy arrays, and the partition has a leading axis of seeds. `normal`
    is the mean and the scale of the examples.

    Raises:
        ValueError: one line: the data cannot be partitioned in this way.
        OSError: the file of `--export_partition` cannot be written.
    """
    config, source = settings.config, settings.source
    fixed = config.partition_seed
    drawn_by = [fixed if fixed >= 0 else seed for seed in seeds]
    each = [*dict.fromkeys(drawn_by)]
    splits = [partitions.split(source, _spec(config, one), one) for one in each]
    if config.export_partition:
        _export(settings, splits)
    splits, vals = _with_validation(settings, splits, each)
    image, label = source.image, source.label
    if settings.public is not None:
        image, label, splits = _with_public(settings, splits)
    others: list[Any] = []
    if resolve.num_unseen(config):
        pairs = zip(splits, _unseen(settings, each), strict=True)
        pairs = [partitions.without_unseen(one, unseen) for one, unseen in pairs]
        splits, others = map(list, zip(*pairs, strict=True))
    places = [each.index(one) for one in drawn_by]
    splits, vals, others = (
        [kind[at] for at in places] if kind else [] for kind in (splits, vals, others)
    )
    lines = notes.of_clients(config, source, splits, vals)
    stacked = partitions.stack(splits, vals, others)
    _check_test_rows(config, stacked, vals)
    if config.augment != "none" and image.ndim != 4:
        raise ValueError(
            f"--augment={config.augment} changes images, these examples have the shape "
            f"{list(image.shape[1:])}; omit it"
        )
    mean, scale = normal
    data = types.Data(
        image=image,
        label=label,
        mean=mean,
        scale=scale,
        partition=stacked,
        augment=config.augment,
        num_words=source.num_classes if source.is_text else 0,
        masked_loss=config.masked_loss,
        teacher=found.taught,
    )
    measured = {"test": stacked.test.row}
    measured |= {"validation": stacked.val.row} if vals else {}
    return data, (*lines, *_notes(settings, found.known, measured))


def _with_public(
    settings: Settings, splits: Sequence[partitions.Split]
) -> tuple[np.ndarray, np.ndarray, list[partitions.Split]]:
    """(examples, labels, splits) with the public images as proxy rows.

    They follow the rows of the data set, and their labels, 0, are never read.
    """
    image, label, public = settings.source.image, settings.source.label, settings.public
    row = np.arange(len(label), len(label) + len(public))
    label = np.concatenate([label, np.zeros(len(public), label.dtype)])
    splits = [split._replace(proxy=row) for split in splits]
    return np.concatenate([image, public]), label, splits


def _check_test_rows(
    config: schema.Config, partition: types.Partition, vals: Sequence[Any]
) -> None:
    """Refuses (ValueError) data without the test rows that an option measures on."""
    if not (partition.test.row >= 0).any(1).all():
        cause = "clients are too small; lower --num_clients or take pool"
        if config.test_split == "official" and config.partition == "natural":
            cause = "all are of owners that are not among the --num_clients="
            cause += f"{config.num_clients} clients; raise it, or take client_share"
        raise ValueError(
            f"--test_split={config.test_split} leaves no test row, as {cause}"
        )
    needing = {"unseen_clients": 0, "unseen_names": ""}
    needing |= {"fine_tune_epochs": 0, "eval_moments": "before"}
    for flag, off in needing.items():
        given = getattr(config, flag)
        # A round tests what it trained on test rows alone.
        by_val = flag != "eval_moments"
        has_val = by_val and any(one.owned.count.any() for one in vals)
        if given != off and not (partition.test.count.any() or has_val):
            given = given if isinstance(given, str) else f"{given:g}"
            raise ValueError(
                f"--{flag}={given}: clients have no test rows on "
                "which it could be measured; take --test_split=client_share"
                f"{', or give --val_split=0.2' * by_val}"
            )


def _spec(config: schema.Config, seed: int) -> partitions.PartitionSpec:
    """The partition's spec from the options; `seed` is for CDKT's generated users."""
    named = vars(config).keys() & set(partitions.PartitionSpec._fields)
    given = {name: getattr(config, name) for name in named}
    protocol = cdkt.PROTOCOLS.get(config.dataset, cdkt.Protocol())
    given["client_classes"] = resolve.client_classes(config)
    given["cdkt"] = protocol._replace(
        seed=seed,
        labels_per_user=config.classes_per_client,
        random_labels=config.partition == "cdkt_paper",
    )
    return partitions.PartitionSpec(**given)


def _with_validation(
    settings: Settings, splits: Sequence[partitions.Split], seeds: Sequence[int]
) -> tuple[list[partitions.Split], list[Any]]:
    """(the splits without them, validation rows by seed), [] if there are none.

    They are the data's own, or those of `--val_split`. An exported partition has the
    latter as train rows, and a run on the file draws them again.

    Raises:
        ValueError: clients are too small for a validation row.
    """
    share = settings.config.val_split
    if settings.source.num_val:
        specs = [_spec(settings.config, seed) for seed in seeds]
        own = [partitions.own_validation(settings.source, one) for one in specs]
        return list(splits), own
    if not share:
        return list(splits), []
    given = zip(splits, seeds, strict=True)
    pairs = [
        partitions.with_validation(one, settings.source, share, seed)
        for one, seed in given
    ]
    out, vals = map(list, zip(*pairs, strict=True))
    if not min(val.owned.count.sum() for val in vals):
        most = max(one.train.count.max() for one in splits)
        raise ValueError(
            f"--val_split={share} leaves no validation row, as clients have at most "
            f"{most} train rows; raise it or lower --num_clients"
        )
    return out, vals


def _unseen(settings: Settings, seeds: Sequence[int]) -> np.ndarray:
    """bool[seeds, K]: the clients that never train, of those that could.

    They are drawn by the partition's seed, or those of `--unseen_names`.
    """
    config, hparams = settings.config, settings.hparams
    candidates = np.flatnonzero(levels.eligible(hparams, config.num_clients))
    out = np.zeros((len(seeds), config.num_clients), bool)
    if config.unseen_names:
        out[:, _named(settings, candidates)] = True
        return out
    count = resolve.num_unseen(config)
    options.check_at_most(
        *("unseen_clients", count, len(candidates) - 1),
        "so that one of those that may train is left",
    )
    for line, seed in zip(out, seeds, strict=True):
        gen = rng.generator(seed, "data.unseen")
        line[gen.choice(candidates, count, replace=False)] = True
    return out


def _named(settings: Settings, candidates: np.ndarray) -> list[int]:
    """The clients of `--unseen_names`; ValueError for one that is no candidate."""
    config = settings.config
    names = list(map(str, range(config.num_clients)))
    if config.partition == "natural":
        names = list(dataset.owner_names(settings.source)[: config.num_clients])
    wanted = resolve.unseen_names(config)
    number = {name: k for k, name in enumerate(names)}
    for one in wanted:
        options.check_one_of("unseen_names", one, number)
    found = [number[one] for one in wanted]
    if odd := [names[k] for k in sorted({*found} - {*candidates.tolist()})]:
        raise ValueError(
            f"--unseen_names={config.unseen_names}: {labels.listed(odd)} would not "
            "train anyway, as they do not hold the level; omit them"
        )
    options.check_at_most(
        *("unseen_names", len(found), len(candidates) - 1),
        "so that one of those that may train is left",
    )
    return found


def _bytes(split: partitions.Split) -> bytes:
    """All rows of a split in their order."""
    return b"".join(np.asarray(one).tobytes() for one in jax.tree.leaves(split))


def _export(settings: Settings, splits: Sequence[partitions.Split]) -> None:
    """Writes the partition that all seeds share to the file of `--export_partition`."""
    config = settings.config
    flag = f"--export_partition={config.export_partition}"
    if len({_bytes(one) for one in splits}) > 1:
        raise ValueError(
            f"{flag}: --num_seeds={config.num_seeds} has as many partitions, a "
            "file holds one; give --num_seeds=1 or a --partition_seed"
        )
    about = config.export_partition, settings.identity, settings.source.row
    try:
        processes.on_first(lambda: partitions.export(splits[0], *about))
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{flag} cannot be written: {reason}") from error


def _notes(
    settings: Settings,
    known: Sequence[from_file.Known],
    measured: Mapping[str, np.ndarray],
) -> tuple[str, ...]:
    """Lines about owners, the partition, own validation rows, and files of models."""
    config, lines = settings.config, []
    if config.export_partition and settings.dropped_owners:
        lines.append(
            f"--export_partition={config.export_partition}: a run on this file has all "
            "rows of the data, so that owners that are left out here count in the "
            "constants of its --normalization"
        )
    if config.export_partition and config.train_share < 1:
        lines.append(
            f"--export_partition={config.export_partition}: it has the train rows that "
            f"--train_share={config.train_share:g} kept; a run on it that gives "
            "--train_share takes a part of these"
        )
    lines.append(partitions.note(config.partition, settings.identity))
    lines += notes.of_owned_rows(config, settings.source)
    for one in known:
        seen = from_file.note_of_overlap(one, settings.source.image, measured)
        lines += [*one.notes, seen]
    return tuple(filter(None, lines))
