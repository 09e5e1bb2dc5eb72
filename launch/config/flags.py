"""Parses a command line with absl, in two passes.

The first pass finds `--algo`, also inside flagfiles, and the second parses the options
of that algorithm. Flags override those of a flagfile that comes before them.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags

from fedjax_pfl import options
from launch.config import algorithm_file, flagfile, limits, presets, registry, sweep

# absl's help attributes a flag to the module that defines it, unless it disclaims it.
flags.disclaim_key_flags()

HELP = {"--help", "-help", "-h"}
LINE_LIMIT = 800


def fail(message: object, code: int = 2) -> NoReturn:
    """Prints one line on stderr, shortened if it is very long, and exits."""
    line = " ".join(str(message).split())
    if len(line) > LINE_LIMIT:
        line = f"{line[: LINE_LIMIT // 2]} ... {line[-LINE_LIMIT // 4 :]}"
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(code)


def _values(name: str, arguments: Sequence[str]) -> list[str]:
    """The values of a flag, in their order."""
    chosen: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, equals, value = argument.partition("=")
        if flag.startswith("-") and flag.lstrip("-") == name:
            chosen.append(value if equals else following)
    return chosen


def _only(name: str, chosen: Sequence[str], default: str, cure: str = "") -> str:
    """The one value of a flag; a ValueError if there are several different ones."""
    if len(set(chosen)) > 1:
        line = f"two different --{name} in one command: {', '.join(chosen)}"
        raise ValueError(line + cure)
    return chosen[0] if chosen else default


def _algorithm(arguments: Sequence[str]) -> str:
    """The name or file of `--algo`; a file replaces its name in a run's flagfile."""
    chosen = _values("algo", arguments)
    ours = [one for one in chosen if algorithm_file.is_one(one)]
    names = set(map(registry.algorithm_name, ours))
    return _only("algo", [one for one in chosen if one not in names], "cdkt")


def asked(
    argv: Sequence[str], kind: type, about: str
) -> tuple[Any, list[str], set[str]]:
    """Parses the options of a command that runs no algorithm, and answers `--help`.

    `kind` is a dataclass of `options.option`, and `about` the text above the help.
    Returns an instance, the words beside the flags, and the names of the given flags.
    Raises ValueError or flags.Error about a bad flag, and SystemExit(0) after the help.
    """
    kinds = registry.field_types(kind)
    values = defined({field.name: field for field in dataclasses.fields(kind)}, kinds)
    if HELP & set(argv[1:]):
        print(f"{about}\n{values.get_help()}")
        raise SystemExit(0)
    try:
        words = values(flagfile.expand(argv))[1:]
    except flags.IllegalFlagValueError as error:
        raise ValueError(illegal(error, kinds)) from error
    found = {name: values[name].value for name in kinds}
    for name in kinds:
        if kinds[name] is not str:
            limits.checked(name, found[name], kinds[name])
    made = kind(**found)
    options.validate(made)
    return made, words, {name for name in kinds if values[name].present}


def options_alone(argv: Sequence[str], kind: type, about: str) -> Any:
    """Like `asked`, for a command that takes no words; ValueError for one."""
    found, words, _ = asked(argv, kind, about)
    if words:
        line = f"{limits.shown(words[0])} is not an option of this command"
        raise ValueError(line)
    return found


_DEFINERS = {
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_boolean,
    str: flags.DEFINE_string,
}


def defined(fields: Mapping[str, Any], kinds: Mapping[str, type]) -> flags.FlagValues:
    """One absl flag for each dataclass field, of its type."""
    values = flags.FlagValues()
    for name, field in fields.items():
        meta = options.metadata(field)
        text = meta["help"]
        if meta["choices"]:
            text = f"<{'|'.join(meta['choices'])}>: {text}"
        none = field.default is dataclasses.MISSING
        default = None if none else field.default
        _DEFINERS[kinds[name]](name, default, text, flag_values=values)
    return values


def illegal(error: flags.IllegalFlagValueError, kinds: dict[str, type]) -> str:
    """Replaces the words of Python's converters in absl's error about a value."""
    # The error is `flag --NAME=VALUE: REASON`, and each part may hold colons.
    pattern = r"flag --(\w+)=(.*?): (?:invalid literal|could not|Exceeds|\('Non-bool)"
    found = re.match(pattern, str(error), re.DOTALL)
    if found is None:
        return str(error)
    name, text = found.groups()
    expected = {int: "an integer", float: "a number", bool: "true or false"}
    wanted = expected.get(kinds.get(name, bool), "another value")
    return f"--{name}={limits.shown(text)}: expected {wanted}"


def parse(
    argv: Sequence[str], extra: Callable[[flags.FlagValues], None] | None = None
) -> dict[str, Any]:
    """The flags' names and values; UsageError if bad, SystemExit after `--help`."""
    arguments, algo = flagfile.expand(argv), ""
    try:
        algo = _algorithm(arguments[1:])
        # A command may override the sweep of its flagfile.
        swept = _values("sweep", argv[1:])
        one = sweep.joined(swept)
        _only("sweep", swept, "", f"; all combinations are one --sweep='{one}'")
        if (HELP | {"--helpfull"}) & set(arguments[1:]):
            given = (_values(one, arguments[1:]) for one in ("dataset", "preset"))
            help_for(algo, extra, *(values[-1] if values else "" for values in given))
        fields, kinds = registry.fields_of(algo), registry.option_types(algo)
        values = defined(fields, kinds)
        if extra is not None:
            extra(values)
        rest = values(arguments)
        if len(rest) > 1:
            raise ValueError(
                f"{limits.shown(rest[1])} is not a flag; options are written "
                f"--name=value (--algo={algo} --help lists them)"
            )
        given = {name: values[name].value for name in values if values[name].present}
        for name in given.keys() & kinds.keys():
            limits.checked(name, given[name], kinds[name])
    except (flags.Error, ValueError) as error:  # ValueError: --noflag=value
        raise flagfile.UsageError(_line(error, algo)) from error
    return given | {"algo": algo}


def _line(error: Exception, algo: str) -> str:
    """One line about an error of absl's parser or of ours."""
    if isinstance(error, flags.IllegalFlagValueError):
        return illegal(error, registry.option_types(algo))
    if not isinstance(error, flags.UnrecognizedFlagError):
        return str(error)
    name, fields = error.flagname, registry.fields_of(algo)
    bare, close = name.removeprefix("no"), name.strip()
    if name != close and close in fields:
        return f"--{close} is followed by a blank; write --{close}=value"
    if bare in fields:
        return f"--{name}: --{bare} is not a switch; write --{bare}=value"
    return registry.unknown_option(name, algo)


def help_for(
    algo: str,
    extra: Callable[[flags.FlagValues], None] | None,
    dataset: str = "",
    preset: str = "",
) -> NoReturn:
    """Prints an algorithm's options by group, and exits; ValueError if unknown."""
    if preset:
        options.check_one_of("preset", preset, presets.PRESETS)
    known, kinds = registry.fields_of(algo), registry.option_types(algo)
    if extra is not None:
        values = flags.FlagValues()
        extra(values)
        print("Options of this command:")
        for name in values:
            print(f"  --{name}\n      {values[name].help}; {values[name].default!r}")
        print()
    print(f"Options of --algo={algo} (also in a file: --flagfile=PATH)")
    for group, names in registry.groups_of(algo).items():
        print(f"\n{group}:")
        for name in names:
            meta = options.metadata(known[name])
            choices = "|".join(filter(None, meta["choices"])) or kinds[name].__name__
            default = registry.default_text(algo, name, dataset, preset)
            about = meta["help"] or "a field of HParams"
            print(f"  --{name}=<{choices}>\n      {about}; {default}")
    raise SystemExit(0)
