"""Where runs come from: their options, when and on what they ran, their commands."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import algorithms
from data import own_files
from fedjax_pfl import options as options_lib
from launch.assemble import custom
from launch.config import presets, registry, schema, sweep
from launch.folder import record
from launch.show import words

# Options that a command names even where they are as usual
_NAMED = ("partition", "model", "rounds")
# Facts of `presets.Rule` that only the data tell
_OF_DATA = {"max_examples", "image_shape"}


class Settings(NamedTuple):
    """The options of several runs.

    Attributes:
        differing: (name, a value for each run) where runs that have it differ; the
            value is "–" for a run whose algorithm does not have it.
        shared: Lines of those with one value in all runs.
        own: Lines of the others, which only some algorithms have.
    """

    differing: list[tuple[str, list[str]]]
    shared: list[str]
    own: list[str]


def settings(runs: Sequence[record.Record], names: Sequence[str]) -> Settings:
    """The options of runs with these names, without those of execution."""
    hidden = schema.names(schema.EXECUTION) - {"rounds"}
    # A sweep's values are in the names of its points.
    hidden |= {name for run in runs for name in run.point}
    out = Settings([], [], [])
    for name in sorted(set().union(*(run.flags for run in runs)) - hidden):
        values = [run.flags.get(name) for run in runs]
        known = [value for value in values if value is not None]
        if len(set(known)) > 1:
            cells = ["–" if value is None else value for value in values]
            out.differing.append((name, cells))
        elif len(known) == len(runs):
            out.shared.append(f"--{name}={known[0]}")
        else:
            pairs = zip(names, values, strict=True)
            having = ", ".join(run for run, value in pairs if value is not None)
            out.own.append(f"--{name}={known[0]}  ({having})")
    return out


def when(runs: Sequence[record.Record]) -> str:
    """When runs ended, "" for those of earlier versions, which do not say."""
    found = sorted(filter(None, (run.summary.get("finished") for run in runs)))
    texts = [f"{one.replace('T', ' ').removesuffix('Z')} UTC" for one in found]
    return " to ".join(dict.fromkeys([texts[0], texts[-1]])) if texts else ""


def machine(summary: Mapping[str, Any]) -> str:
    """The devices, processor and versions of a run in a line."""
    where = words.devices(summary.get("num_devices", 1), summary["device"])
    if "cpu" in summary:
        where += f", {summary['cpu']} with {summary['cores']} cores"
    own = " ".join(["fedjax_pfl", *filter(None, [summary.get("version")])])
    if commit := summary.get("git_commit"):
        own += f" ({commit[:10]})"
    others = [f"{name} {one}" for name, one in summary.get("versions", {}).items()]
    return f"{where}; {', '.join([own, *others])}"


def command(run: record.Record) -> str:
    """A command for a shell that repeats a run wherever its data are.

    It has the options that differ from what the preset and the names of algorithm and
    data set decide. A run with objects of Python is loaded from its folder instead.
    """
    given = ["algo"] * (run.flags["algo"] not in algorithms.ALGORITHMS)
    given += own_files.in_memory(run.flags)
    if given := [*given, *custom.objects_in(run.flags)]:
        more = ", ".join(f"{name}=..." for name in given)
        return f"build.load({str(run.path)!r}, {more}).run()  # in Python"
    options = [f"--{name}={value}" for name, value in _given(run).items()]
    return shlex.join(["fedjax-pfl", "run", *options])


def _given(run: record.Record) -> dict[str, str]:
    """The options to give, in the order of `--help`."""
    flags = dict(run.flags)
    entry, fields = registry.algorithm(flags["algo"]), registry.fields_of(flags["algo"])
    preset = flags.get("preset", presets.BASE)
    facts = {name: flags.get(name) for name in ("algo", "dataset", "partition")}
    facts["public_images"] = entry.public_images
    usual = {name: field.default for name, field in fields.items()}
    usual |= presets.values(preset, facts) | {"preset": entry.preset}
    usual["client_model"] = flags.get("model")
    texts = {name: options_lib.text(value) for name, value in usual.items()}
    unsure: set[str] = set()
    for _, rule in presets.rules(preset):
        known = {name: one for name, one in rule.when.items() if name not in _OF_DATA}
        if known != rule.when and rule._replace(when=known).holds(facts):
            unsure |= rule.options.keys()
    hidden = schema.names(schema.EXECUTION) - {"rounds"}
    named = {"algo", "dataset", *_NAMED, *unsure}
    if run.point:
        # The points of a sweep are one run.
        swept = [part["point"] for part in run.summary["sweep"]]
        values = {name: dict.fromkeys(p[name] for p in swept) for name in run.point}
        flags["sweep"] = sweep.text(values)
        hidden |= run.point.keys()
    return {
        name: flags[name]
        for name in fields
        if name in flags and name not in hidden
        if name in named or flags[name] != texts[name]
    }
