"""Turns given options into settings: resolves names, loads data, checks all values."""

import contextlib
import contextvars
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from data import dataset, doors, loaders, own_files
from data.partitions import file
from fedjax_pfl import context, types
from fedjax_pfl import measures as measures_lib
from launch.assemble import custom
from launch.config import algorithm_file, registry, resolve, schema
from launch.machine import devices, processes


class Settings(NamedTuple):
    """Everything that a run depends on.

    Attributes:
        entry, hparams: The algorithm and its options.
        config: The common options, with every field set.
        source, public: The data set; unlabelled images that all clients share, or None.
        own_models: Custom models by name, as functions of a batch of examples.
        own_sha256: Hash of custom code, since a run with edited code is another run.
        identity: The data set before owners were left out and images were fitted, which
            the rows in partition files refer to.
        source_hash: Hash object of `source`, to copy and extend.
        dropped_owners: Numbers of rows of owners that had too few, by the owner's name.
        measures: The metrics of `--eval_metrics`.
        asked: The options that the user asked for, see `registry.asked`.
    """

    entry: Any
    config: schema.Config
    hparams: Any
    source: dataset.Dataset
    public: np.ndarray | None
    own_models: Mapping[str, Callable[[jax.ShapeDtypeStruct], types.Model]]
    own_sha256: str
    identity: file.Identity
    source_hash: Any
    dropped_owners: Mapping[str, int]
    measures: tuple[measures_lib.Measure, ...] = ()
    asked: frozenset[str] = frozenset()


@dataclasses.dataclass
class Read:
    """The data sets of experiments that are built together.

    An object of Python is read once, as it may give other examples each time, such as
    one of torch with random transforms. Of data sets with a name the last one is kept.
    """

    objects: dict[Any, Any] = dataclasses.field(default_factory=dict)
    named: tuple[Any, Any] = ((), None)

    def used(self) -> contextlib.AbstractContextManager[None]:
        """Keeps here what is read inside, unless this is inside of another one."""
        return context.having(_READ, _READ.get() or self)


_READ = contextvars.ContextVar[Read | None]("read", default=None)


def settled(**given: Any) -> Settings:
    """Turns options of `experiment.experiment` into settings; ValueError if wrong."""
    given = {name: value for name, value in given.items() if value is not None}
    if algorithm_file.is_one(given.get("algo")):
        given["algo"] = registry.algorithm(given["algo"])
    devices.begin(given.get("distributed", ""))
    if "split" in given:
        given["split"] = custom.split_names(given)
    own_optimizers = custom.optimizers(given)
    given = {name: one for name, one in given.items() if name not in own_optimizers}
    own_sha256 = custom.own_sha256(given, own_optimizers)
    given, chosen = custom.measured(given)
    given, in_memory, public, own_models = custom.named(given)
    _check_alike(given | {"own_sha256": own_sha256})
    config, hparams = resolve.configure(given | own_optimizers)
    hparams = custom.with_optimizers(hparams, own_optimizers, given)
    source = _source(config, in_memory)
    if not source.is_text:
        measures_lib.check(chosen, source.num_classes)
    examples = sha256(source.image, source.label)
    label_hash = sha256(np.asarray(source.label, np.int32)).hexdigest()
    identity = file.Identity(len(source.label), examples.hexdigest(), label_hash)
    config = resolve.resolve(config, source, given, hparams)
    resolve.check(config, own_models, source.num_val)
    fitted, dropped_owners = _fitted(config, source)
    if fitted is not source:
        examples = sha256(fitted.image, fitted.label)
    public = _public_images(config, fitted, public)
    if public is not None and (count := dataset.num_shared(public, fitted.image)):
        line = f"{count} of {len(public)} images of --public_set={config.public_set} "
        line += f"are examples of --dataset={config.dataset}, too"
        fitted = fitted._replace(notes=(*fitted.notes, line))
    return Settings(
        entry=registry.algorithm(given.get("algo", config.algo)),
        config=config,
        hparams=hparams,
        source=fitted,
        public=public,
        own_models=own_models,
        own_sha256=own_sha256,
        identity=identity,
        source_hash=examples,
        dropped_owners=dropped_owners,
        measures=chosen,
        asked=registry.asked(config, hparams, given),
    )


def _source(
    config: schema.Config, in_memory: tuple[Any, Any, Any] | None
) -> dataset.Dataset:
    """Loads the data set that was given in Python, or that `--dataset` names."""
    read, names = _READ.get() or Read(), (config.label, config.owner)
    rows, joined = None, {}
    if in_memory:
        key = (*map(id, in_memory), *names)
        if key not in read.objects:
            # The objects are kept, too, so that no other one gets their id.
            read.objects[key] = in_memory, doors.opened(*in_memory, *names), {}
        _, rows, joined = read.objects[key]
    train, test, _ = rows or (doors.Rows(None), None, None)
    if rows or config.dataset != own_files.ARRAYS:
        has_axes = train.arrays is not None
        resolve.check_data(config, has_columns=train.has_columns, has_axes=has_axes)
    if rows is None:
        names = "text_length", "owners", "layout", "label", "owner", "labels"
        options = {name: getattr(config, name) for name in names}
        key = config.dataset, config.data_dir, options
        if read.named[0] != key:
            read.named = key, loaders.load(config.dataset, config.data_dir, **options)
        found = read.named[1]
    else:
        layout = config.layout
        if layout not in joined:
            joined[layout] = doors.joined(*rows, *names, layout=layout)
        found = joined[layout]
    notes = [*found.notes]
    kind, is_own = config.test_split, own_files.is_one(config.dataset)
    if is_own and found.num_test and kind == "client_share":
        is_given = test is not None and not test.is_of_whole
        where = "of test=" if is_given else "that are test rows in the data"
        notes.append(f"--test_split={kind} does not use the rows {where}")
    notes += dataset.repeats(found, kind in (None, "official")) if is_own else ()
    if found.num_val and kind not in (None, "official"):
        line = "the data's own validation rows stay as they are"
        notes.append(f"--test_split={kind} is of the other rows; {line}")
    found = found._replace(notes=tuple(notes))
    turns = config.rotate_classes
    return dataset.rotated(found, turns) if turns > 1 else found


def _fitted(
    config: schema.Config, source: dataset.Dataset
) -> tuple[dataset.Dataset, Mapping[str, int]]:
    """Drops owners with too few rows, and counts these rows, and fits all images."""
    dropped: Mapping[str, int] = {}
    if config.partition == "natural":
        least = config.min_examples if source.is_text else config.min_owner_examples
        whole, name = source, "min_examples" if source.is_text else "min_owner_examples"
        source, dropped = dataset.with_large_owners(whole, least)
        if whole.num_test and not source.num_test and config.test_split == "official":
            raise ValueError(
                "--test_split=official leaves no test row, as all are of owners with "
                f"fewer than --{name}={least} train rows; lower it, or "
                "take client_share"
            )
        if whole.num_val and not source.num_val:
            line = "no validation row is left, as all are of owners with fewer than "
            line += f"--{name}={least} train rows"
            source = source._replace(notes=(*source.notes, line))
        if dropped and not source.is_text:
            source = dataset.with_note_of_empty_classes(source)
    return dataset.fitted(source, config.image_size, config.image_channels), dropped


def sha256(*every: Any) -> Any:
    """A hash object of the contents of arrays, one after another."""
    digest = hashlib.sha256()
    for array in every:
        digest.update(np.ascontiguousarray(array).data)
    return digest


def _check_alike(given: Mapping[str, Any]) -> None:
    """Refuses processes of one run that were given different options."""
    of_one_process = "distributed", "data_dir", "compile_cache", "workdir"
    # HOST:PORT,COUNT without the INDEX of this process
    together = (given.get("distributed") or "").rpartition(",")[0]
    has_folder = "given" if given.get("workdir") else "unset"
    named = {"distributed": together, "workdir": has_folder} | {
        name: value if isinstance(value, (str, int, float)) else type(value).__name__
        for name, value in given.items()
        if name not in of_one_process
    }
    processes.check_equal(named, "give all processes the same options")


def _places(found: Sequence[str], wanted: Sequence[str], public_set: str) -> list[int]:
    """Where a public table has the columns of the data; ValueError without one."""
    if lacking := [name for name in wanted if name not in found]:
        raise ValueError(
            f"--public_set={public_set} has no column {lacking[0]}, which the clients' "
            "data have; its columns are taken by name"
        )
    return [found.index(name) for name in wanted]


def _public_images(
    config: schema.Config, source: dataset.Dataset, in_memory: Any
) -> np.ndarray | None:
    """The train images of `--public_set`, checked against those of the data set.

    `in_memory` is what was given in Python, or None.
    """
    if config.public_set == "none":
        return None
    if in_memory is not None:
        names = config.label, config.owner
        public = doors.unlabelled(in_memory, *names, layout=config.layout)
    else:
        public = _named_public(config)
    public = dataset.fitted(public, config.image_size, config.image_channels)
    image = public.image[: public.num_train]
    if source.columns is not None and public.columns is not None:
        image = image[:, _places(public.columns, source.columns, config.public_set)]
    if image.shape[1:] != source.image.shape[1:] or image.dtype != source.image.dtype:
        raise ValueError(
            f"--public_set={config.public_set} has {image.dtype} images of shape "
            f"{list(image.shape[1:])}, --dataset={config.dataset} "
            f"{source.image.dtype} of {list(source.image.shape[1:])}; they must agree"
        )
    return image


def _named_public(config: schema.Config) -> dataset.Dataset:
    """The data set that `--public_set` names; ValueError if it is the clients' own."""
    own = config.dataset.removesuffix("_5k")
    is_named = config.public_set != own_files.ARRAYS  # or its name tells nothing
    if is_named and config.public_set.removesuffix("_5k") == own:
        raise ValueError(
            f"--public_set={config.public_set} holds images of the clients' own "
            f"--dataset={config.dataset}; take another, or set a fraction aside with "
            "--proxy_fraction"
        )
    given = {"name": config.public_set, "data_dir": config.data_dir}
    has_layout = config.public_set.startswith(own_files.WITH_LAYOUT)
    given["layout"] = config.layout if has_layout else "auto"
    if config.public_set.startswith(own_files.WITH_COLUMNS):
        given |= {"label": config.label, "owner": config.owner}
    return loaders.load(**given, flag="public_set")
