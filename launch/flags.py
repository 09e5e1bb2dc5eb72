"""From a command line to names and values: a two-pass parse with absl.

The first pass finds `--algo` (also inside flagfiles), the second knows that
algorithm's options and no others. A command line overrides a flagfile when it stands
after it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import flags

from launch import settings


class UsageError(ValueError):
    """Bad input: one line for the user, exit code 2."""


def fail(message: object, code: int = 2) -> NoReturn:
    """Prints one line on stderr and leaves."""
    line = " ".join(str(message).split())
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(code)


def _expand(argv: Sequence[str]) -> list[str]:
    """The arguments with every --flagfile replaced by its lines."""
    values = flags.FlagValues()
    try:
        return values.read_flags_from_files([argv[0], *argv[1:]], force_gnu=True)
    except flags.Error as error:
        reason = str(error).removeprefix("ERROR:: ")
        raise UsageError(f"--flagfile: {reason}") from error


def _algorithm(arguments: Sequence[str]) -> str:
    chosen: list[str] = []
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.lstrip("-") != "algo" or not name.startswith("-"):
            continue
        if not equals:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        chosen.append(value)
    if len(set(chosen)) > 1:
        raise UsageError(f"two different --algo in one command: {', '.join(chosen)}")
    return chosen[0] if chosen else "cdkt"


def define(values: flags.FlagValues, name: str, field: Any, kind: type) -> None:
    """Defines one absl flag for one dataclass field."""
    text = field.metadata["help"]
    default = field.default
    if field.metadata["choices"]:
        text = f"<{'|'.join(field.metadata['choices'])}>: {text}"
    definers = {
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        bool: flags.DEFINE_boolean,
        str: flags.DEFINE_string,
    }
    definers[kind](name, default, text, flag_values=values)


def parse(
    argv: Sequence[str], extra: Callable[[flags.FlagValues], None] | None = None
) -> dict[str, Any]:
    """Names and values of every flag that was given on the command line.

    Args:
        argv: As `sys.argv`.
        extra: Defines further flags of the calling program.

    Raises:
        UsageError: one line that names the flag.
        SystemExit: after `--help`.
    """
    arguments = _expand(argv)
    if any(a in ("--help", "-help", "-h", "--helpfull") for a in arguments[1:]):
        help_for(_algorithm(arguments), extra)
    try:
        algo = _algorithm(arguments[1:])
        fields = settings.fields_of(algo)
    except ValueError as error:
        raise UsageError(error) from error
    kinds = settings.option_types(algo)
    values = flags.FlagValues()
    for name, field in fields.items():
        define(values, name, field, kinds[name])
    if extra is not None:
        extra(values)
    try:
        rest = values(arguments)
    except flags.UnrecognizedFlagError as error:
        name = error.flagname
        if name.removeprefix("no") in fields:
            name = name.removeprefix("no")
        raise UsageError(settings.unknown_option(name, algo)) from error
    except (flags.Error, ValueError) as error:  # ValueError: --noflag=value
        raise UsageError(error) from error
    if len(rest) > 1:
        raise UsageError(
            f"{rest[1]} is not a flag; options are written --name=value "
            f"(--algo={algo} --help lists them)"
        )
    given = {name: values[name].value for name in values if values[name].present}
    return given | {"algo": algo}


def help_for(algo: str, extra: Callable[[flags.FlagValues], None] | None) -> NoReturn:
    """Prints every option of an algorithm with its help text and leaves."""
    try:
        fields, kinds = settings.fields_of(algo), settings.option_types(algo)
    except ValueError as error:
        raise UsageError(error) from error
    print(f"Options of --algo={algo} (also in a file: --flagfile=PATH)\n")
    for name, field in fields.items():
        choices = "|".join(field.metadata["choices"]) or kinds[name].__name__
        default = settings.default_text(algo, name)
        print(f"  --{name}=<{choices}>\n      {field.metadata['help']}; {default}")
    if extra is not None:
        values = flags.FlagValues()
        extra(values)
        for name in values:
            print(f"  --{name}\n      {values[name].help}; {values[name].default!r}")
    raise SystemExit(0)


def lines(config: Any, hparams: Any, skip: Sequence[str] = ()) -> list[str]:
    """The flagfile lines that replay a resolved configuration."""
    out = []
    for values in (config, hparams):
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if value is not None and field.name not in skip:
                text = str(value).lower() if isinstance(value, bool) else value
                out.append(f"--{field.name}={text}")
    return out
