"""From a command line to names and values: a two-pass parse with absl.

The first pass finds `--algo` (also inside flagfiles), the second knows that
algorithm's options and no others. A command line overrides a flagfile when it stands
after it.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import flags

from data import files
from launch import hints, limits, settings

FLAGFILES = pathlib.Path(__file__).parent / "flagfiles"
HELP = {"--help", "-help", "-h"}
LINE_LIMIT = 800
FILE_LIMIT = 2**20
ARGUMENT_LIMIT = 10_000


class UsageError(ValueError):
    """Bad input: one line for the user, exit code 2."""


def fail(message: object, code: int = 2) -> NoReturn:
    """Prints one line on stderr, cut where it is longer than a page, and leaves."""
    line = " ".join(str(message).split())
    if len(line) > LINE_LIMIT:
        line = f"{line[: LINE_LIMIT // 2]} ... {line[-LINE_LIMIT // 4 :]}"
    print(f"error: {line}", file=sys.stderr)
    raise SystemExit(code)


def _text(path: pathlib.Path) -> str:
    """The text of a flagfile.

    Raises:
        ValueError: a phrase without the path: no file, too large, not UTF-8.
        OSError: it is not there or cannot be read.
    """
    files.check(path, "a flagfile")
    size = path.stat().st_size
    if size > FILE_LIMIT:
        raise ValueError(f"has {size} bytes, a flagfile has at most {FILE_LIMIT}")
    try:
        # Some editors begin a file with a mark of its encoding.
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start}); "
            "save it as UTF-8"
        ) from error


def read(path: pathlib.Path, noted: bool = False) -> dict[str, str]:
    """The flags of a run: name -> text, of a `run.flags` that `lines` wrote.

    Args:
        path: The file.
        noted: Also lines `#--name=value`, which are a comment to absl.

    Raises:
        ValueError: one line that names the file and the line that is no flag.
        OSError: the file is not there or cannot be read.
    """
    try:
        text = _text(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error
    out: dict[str, str] = {}
    # Not `splitlines`, which also breaks at characters that a value may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if noted and line.startswith("#--"):
            line = line[1:]
        if not line.strip() or line.startswith(("#", "//")):
            continue
        name, equals, value = line.removeprefix("--").partition("=")
        if not (equals and line.startswith("--") and name.isidentifier()):
            raise ValueError(
                f"{path} line {number}: {limits.told(line)} is no --name=value; the "
                "file is damaged"
            )
        if out.setdefault(name, value) != value:
            raise ValueError(f"{path} line {number}: --{name} has two values")
    if "algo" not in out:
        raise ValueError(f"{path} names no --algo; the file is damaged")
    return out


def expand(argv: Sequence[str]) -> list[str]:
    """A command line with every --flagfile replaced by its lines.

    absl's own reading waits for pipes, skips a file that includes itself, and lets
    misspelt flags pass that `--undefok` names.

    Args:
        argv: As `sys.argv`.

    Raises:
        UsageError: one line that names the flagfile.
    """
    out = [argv[0], *_expanded(argv[1:])]
    if any(one.partition("=")[0] in ("--undefok", "-undefok") for one in out):
        raise UsageError("--undefok is not a flag; take out what it should excuse")
    return out


def _expanded(arguments: Sequence[str], inside: tuple[str, ...] = ()) -> list[str]:
    """The arguments with every --flagfile replaced by its lines.

    Args:
        arguments: Of a command line, or lines of a flagfile.
        inside: The flagfiles that these lines are in.
    """
    out: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if name not in ("--flagfile", "-flagfile"):
            out.append(argument)
            if argument == "--" and not inside:
                return out + rest
            continue
        if not equals and not inside and rest:
            value = rest.pop(0)
        out += _lines_of(value.strip(), inside)
        if len(out) > ARGUMENT_LIMIT:
            raise UsageError(
                f"--flagfile={value}: more than {ARGUMENT_LIMIT} flags; is a file "
                "included again and again?"
            )
    return out


def _flagfile(value: str) -> pathlib.Path:
    """The file that `--flagfile` means: a path, or the name of one of ours."""
    path = pathlib.Path(os.path.expanduser(value))
    ours = FLAGFILES / f"{value.removesuffix('.flags')}.flags"
    return ours if not path.exists() and ours.is_file() else path


def _lines_of(value: str, inside: tuple[str, ...]) -> list[str]:
    """The flags in a flagfile and in those that it includes."""
    if not value:
        raise UsageError("--flagfile= names no file")
    where = f"--flagfile={value}"
    try:
        path = _flagfile(value)
        identity = os.path.realpath(path)
        text = _text(path)
    except FileNotFoundError as error:
        names = [one.stem for one in sorted(FLAGFILES.glob("*.flags"))]
        hint = hints.nearest(path.name.removesuffix(".flags"), names)
        raise UsageError(f"{where}: there is no such file{hint}") from error
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{where} {error}") from error
    if identity in inside:
        raise UsageError(f"{where} includes itself; take that line out")
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line and not line.startswith(("#", "//"))]
    return _expanded(lines, (*inside, identity))


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


def _last(arguments: Sequence[str], flag: str) -> str:
    """The value of the last `--flag=value`, "" if there is none."""
    found = [a.partition("=")[2] for a in arguments if a.startswith(f"--{flag}=")]
    return found[-1] if found else ""


def beside(argv: Sequence[str], values: flags.FlagValues, about: str) -> list[str]:
    """What a command line holds beside its flags; `--help` is answered here.

    Args:
        argv: As `sys.argv`.
        values: The flags that the command has.
        about: Stands above their help.

    Raises:
        ValueError, flags.Error: one line about a flag.
        SystemExit: 0 after the help.
    """
    if HELP & set(argv[1:]):
        print(f"{about}\n{values.get_help()}")
        raise SystemExit(0)
    return values(expand(argv))[1:]


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


def illegal(error: flags.IllegalFlagValueError, kinds: dict[str, type]) -> str:
    """absl's error about a value, without the words of Python's converters."""
    # `flag --NAME=VALUE: REASON`, where all of them may hold colons.
    pattern = r"flag --(\w+)=(.*?): (?:invalid literal|could not|Exceeds|\('Non-bool)"
    found = re.match(pattern, str(error), re.DOTALL)
    if found is None:
        return str(error)
    name, text = found.groups()
    expected = {int: "an integer", float: "a number", bool: "true or false"}
    return (
        f"--{name}={limits.told(text)}: expected "
        f"{expected.get(kinds.get(name, bool), 'another value')}"
    )


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
    arguments = expand(argv)
    if (HELP | {"--helpfull"}) & set(arguments[1:]):
        help_for(_algorithm(arguments), extra, _last(arguments, "dataset"))
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
        bare = name.removeprefix("no")
        if bare in fields:
            raise UsageError(
                f"--{name}: --{bare} is no switch; write --{bare}=value"
            ) from error
        raise UsageError(settings.unknown_option(name, algo)) from error
    except flags.IllegalFlagValueError as error:
        raise UsageError(illegal(error, kinds)) from error
    except (flags.Error, ValueError) as error:  # ValueError: --noflag=value
        raise UsageError(error) from error
    if len(rest) > 1:
        raise UsageError(
            f"{limits.told(rest[1])} is not a flag; options are written --name=value "
            f"(--algo={algo} --help lists them)"
        )
    given = {name: values[name].value for name in values if values[name].present}
    try:
        for name in given.keys() & kinds.keys():
            limits.checked(name, given[name], kinds[name])
    except ValueError as error:
        raise UsageError(error) from error
    return given | {"algo": algo}


def help_for(
    algo: str, extra: Callable[[flags.FlagValues], None] | None, dataset: str = ""
) -> NoReturn:
    """Prints every option of an algorithm with its help text, by group, and leaves.

    Args:
        algo: Its name.
        extra: Defines further flags of the calling program.
        dataset: Named beside it: some defaults depend on it.
    """
    try:
        groups, kinds = settings.groups_of(algo), settings.option_types(algo)
        known = settings.fields_of(algo)
    except ValueError as error:
        raise UsageError(error) from error
    print(f"Options of --algo={algo} (also in a file: --flagfile=PATH)")
    for group, names in groups.items():
        print(f"\n{group}:")
        for name in names:
            meta = known[name].metadata
            choices = "|".join(meta["choices"]) or kinds[name].__name__
            default = settings.default_text(algo, name, dataset)
            print(f"  --{name}=<{choices}>\n      {meta['help']}; {default}")
    if extra is not None:
        values = flags.FlagValues()
        extra(values)
        for name in values:
            print(f"  --{name}\n      {values[name].help}; {values[name].default!r}")
    raise SystemExit(0)


def text(value: Any) -> str:
    """An option's value as a flagfile has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def lines(config: Any, hparams: Any, skip: Sequence[str] = ()) -> list[str]:
    """The flagfile lines that replay a resolved configuration.

    Raises:
        ValueError: a value that a line cannot hold, such as a line break.
    """
    out = []
    for values in (config, hparams):
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if value is not None and field.name not in skip:
                limits.check_text(field.name, text(value))
                out.append(f"--{field.name}={text(value)}")
    return out
