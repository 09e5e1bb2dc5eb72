"""The options of an algorithm's run: names, types, groups and defaults."""

import dataclasses
import inspect
import pathlib
import tomllib
import typing
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import algorithms
from data import files
from fedjax_pfl import local_training, options
from launch.config import algorithm_file, presets, schema

KINDS = (int, float, str, bool)
# Our options -> the names that other frameworks have for them
_ELSEWHERE = pathlib.Path(__file__).with_name("elsewhere.toml")


FINE_TUNED = "+ft"  # after a method's name: its fine-tuned clients as a study's row


def algorithm(algo: Any) -> algorithms.Entry:
    """The entry of a name, a file or a custom algorithm; ValueError if it is none."""
    known = algorithms.ALGORITHMS
    if algorithm_file.is_one(algo):
        with files.named(f"--algo={algo}", OSError):
            found, name = algorithm_file.opened(algo)
            name = f"{'own_' * (name in known)}{name}"
            return dataclasses.replace(algorithm(found), name=name)
    if isinstance(algo, str):
        hint = ", or a file of yours, such as mine.py"
        base = algo.removesuffix(FINE_TUNED)
        if base != algo and base in known:
            raise ValueError(
                f"--algo={algo} is a row of a study (build.study, launch.study); give "
                f"{base} with --fine_tune_epochs, and see the metric "
                "fine_tuned_accuracy"
            )
        options.check_one_of("algo", algo, known, hint)
        return known[algo]
    if isinstance(algo, algorithms.Entry):
        return algo
    is_unbound = isinstance(algo, type) and inspect.isfunction(
        inspect.getattr_static(algo, "make", None)
    )
    if is_unbound and "self" in inspect.signature(algo.make).parameters:
        name = algo.__name__
        raise ValueError(f"algo: {name}.make takes self; give an object, {name}()")
    has_options = dataclasses.is_dataclass(getattr(algo, "HParams", None))
    if not has_options or not callable(getattr(algo, "make", None)):
        raise ValueError(
            f"algo: expected a name, or an object with a dataclass HParams and a "
            f"function make, got a {type(algo).__name__}"
        )
    return algorithms.custom(algo)


def algorithm_name(algo: Any) -> str:
    """The name of an algorithm in records and folders."""
    if isinstance(algo, str) and not algorithm_file.is_one(algo):
        return algo
    found = algorithm(algo)
    ours = algorithms.ALGORITHMS.get(found.name)
    is_other = ours is not None and ours.make is not found.make
    return f"own_{found.name}" if is_other else found.name


def is_ours(algo: Any) -> bool:
    """Whether `algo` is the name of an algorithm of this package."""
    return isinstance(algo, str) and algo in algorithms.ALGORITHMS


def called(name: str) -> str | None:
    """The algorithm that a row's name means, ignoring case and punctuation.

    Examples:
        >>> called("FedRep+"), called("S-HeteroFL"), called("mine")
        ('fedrep_plus', 'sheterofl', None)
    """

    def letters(text: str) -> str:
        return "".join(filter(str.isalnum, text.lower().replace("+", "plus")))

    return {letters(one): one for one in algorithms.ALGORITHMS}.get(letters(name))


class Departure(NamedTuple):
    """The method that a run really is, and the `options` of the run that make it so."""

    name: str
    options: dict[str, Any]

    @property
    def flags(self) -> str:
        """The options as on a command line."""
        pairs = self.options.items()
        return " ".join(f"--{name}={options.text(value)}" for name, value in pairs)


def departure(algo: Any, values: Mapping[str, Any]) -> Departure | None:
    """The other method of the registry that a run's options turn it into, or None.

    Algorithms that share their code differ in the options that `algorithms.variant`
    fixes. A run is what its name says if it has everything that this name fixes, and
    not everything that a more special name fixes. A custom algorithm is always itself.
    Options that are missing in `values` have their defaults.

    Examples:
        >>> departure("fedper", {"head_epochs": 1})
        Departure(name='fedrep', options={'head_epochs': 1})
        >>> departure("fedrep", {"head_epochs": 1})
    """
    known = algorithms.ALGORITHMS
    if not is_ours(algo):
        return None
    mine = known[algo]
    own = mine.fixed
    family = {n: one.fixed for n, one in known.items() if one.make is mine.make}
    usual = {f.name: f.default for f in dataclasses.fields(mine.HParams)}
    found = usual | {name: value for name, value in values.items() if name in usual}

    def holds(fixed: Mapping[str, Any]) -> bool:
        return all(_is_like(name, found[name], value) for name, value in fixed.items())

    fitting = [name for name, fixed in family.items() if holds(fixed)]
    more = [name for name in fitting if family[name].keys() > own.keys()]
    if holds(own) and not more:
        return None
    name = max(more or fitting, key=lambda one: len(family[one]))
    names = [n for n in own | family[name] if not _is_like(n, found[n], usual[n])]
    return Departure(name, {n: found[n] for n in names})


def _is_like(name: str, value: Any, fixed: Any) -> bool:
    """Whether a value is what a variant fixes: the same choice, or equally on."""
    if isinstance(fixed, (int, float)) or name == "personal_from":
        return (value in (0, "none")) == (fixed in (0, "none"))
    return value == fixed


def field_types(dataclass: Any) -> dict[str, type]:
    """Field name -> int, float, str or bool; ValueError if a field has another type.

    Annotations may be types, `X | None`, `Optional[X]`, or any of them as text.
    """
    try:
        hints = typing.get_type_hints(dataclass)
    except NameError as error:
        raise ValueError(f"{dataclass.__name__}: {error} in an annotation") from error
    out = {}
    for field in dataclasses.fields(dataclass):
        hint = hints[field.name]
        kinds = [k for k in typing.get_args(hint) if k is not type(None)] or [hint]
        if len(kinds) > 1 or kinds[0] not in KINDS:
            raise ValueError(
                f"{dataclass.__name__}.{field.name} is annotated {field.type}: an "
                "option is an int, float, str or bool, or one of them | None"
            )
        out[field.name] = kinds[0]
    return out


def fields_of(algo: Any) -> dict[str, dataclasses.Field]:
    """The options of an algorithm's run.

    Raises ValueError if it is unknown, or an own option has a common name.
    """
    common = {f.name: f for f in dataclasses.fields(schema.Config)}
    own = {f.name: f for f in dataclasses.fields(algorithm(algo).HParams)}
    both = sorted((common.keys() | schema.REMOVED.keys()) & own.keys())
    if both:
        raise ValueError(
            f"--algo={algorithm_name(algo)}: --{both[0]} is an option of every run; "
            "give the algorithm's own another name"
        )
    return common | own


def option_types(algo: Any) -> dict[str, type]:
    """The type of every option of an algorithm's run."""
    return field_types(schema.Config) | field_types(algorithm(algo).HParams)


def groups_of(algo: Any) -> dict[str, list[str]]:
    """The names of an algorithm's options by section; its own come last."""
    training = {f.name for f in dataclasses.fields(local_training.LocalTraining)}
    groups = schema.groups()
    own = [f.name for f in dataclasses.fields(algorithm(algo).HParams)]
    groups["training"] += [name for name in own if name in training]
    groups[algorithm_name(algo)] = [name for name in own if name not in training]
    return {group: names for group, names in groups.items() if names}


def default_text(algo: Any, name: str, dataset: str = "", preset: str = "") -> str:
    """The default of an option and where it comes from, for `--help`.

    Without a `preset` it is the algorithm's. Own data may decide otherwise.
    """
    entry = algorithm(algo)
    if name == "preset":
        return repr(entry.preset)
    if name == "client_model":
        return "that of --model"
    facts = {"algo": algorithm_name(algo), "public_images": entry.public_images}
    if dataset:
        facts["dataset"] = dataset
    default = fields_of(algo)[name].default
    own = "automatic" if default is None else repr(default)
    own = "no default" if default is dataclasses.MISSING else own
    return presets.default_text(name, own, preset or entry.preset, facts)


def asked(
    config: schema.Config, hparams: Any, given: Mapping[str, Any]
) -> frozenset[str]:
    """The options that the user chose: those that are given, with one exception.

    A `run.flags` gives every option that its version had, at least three quarters of
    today's, which no command line does. Of these only options count that differ from
    what they would be otherwise. `config` and `hparams` are resolved.
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


def unknown_option(name: str, algo: Any) -> str:
    """The error line about an option that `algo` does not have."""
    if name in schema.REMOVED:
        return f"--{name} is not a flag any more: {schema.REMOVED[name][1]}"
    entries = algorithms.ALGORITHMS.items()
    owners = [other for other, entry in entries if name in field_types(entry.HParams)]
    shown = f"--algo={algorithm_name(algo)}"
    if not is_ours(algo) and name in field_types(local_training.LocalTraining):
        cure = "derive them from fedjax_pfl.LocalTraining"
        return f"--{name}: the HParams of {shown} have no such option; {cure}"
    if owners:
        return f"--{name} belongs to {', '.join(owners)}; {shown} has no such flag"
    return f"--{name} is not a flag of {shown}{meant(name, fields_of(algo))}"


def meant(name: str, known: Collection[str], sign: str = "--") -> str:
    """A hint at the known option with a name of another framework, or one like it.

    `sign` is what an option is written with. A letter is like no option.
    """
    elsewhere = tomllib.loads(_ELSEWHERE.read_text())
    plain = name.rpartition(".")[2].replace("-", "_")  # optimizer.lr -> lr
    instead = elsewhere.pop("instead")
    ours = [n for n, others in elsewhere.items() if plain in others and n in known]
    if not ours and plain in instead and plain not in known:
        return f"; {instead[plain]}"
    return options.nearest(*ours[:1] or [name], known, sign) if ours or name[1:] else ""
