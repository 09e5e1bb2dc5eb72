"""Flagfiles: those given to a command, and the `run.flags` of a run's folder."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from data import files, own_files
from fedjax_pfl import measures
from fedjax_pfl import options as options_lib
from launch.config import algorithm_file, limits, registry, schema

FLAGFILES = pathlib.Path(__file__).parent.parent / "flagfiles"
# The name of the flagfile in a run's folder
RUN_FLAGS = "run.flags"
# Largest depth of flagfiles inside flagfiles
MAX_DEPTH = 50

# Hash of a run -> what another value of it means
HASHED = {
    "data_sha256": "other data, graph or first model",
    "split_sha256": "other rows of clients, or another file of their availability or "
    "speed",
    "names_sha256": "other names of classes or owners",
    "columns_sha256": "other names of columns",
    "example_shape": "the same numbers in examples of another shape",
    "own_sha256": "custom code was edited",
    "computed_sha256": "custom code computes something else",
    "teacher_sha256": "another teacher",
}


class UsageError(ValueError):
    """Bad input: one line for the user, exit code 2."""


def _text(path: pathlib.Path) -> str:
    """Reads a flagfile. The message of a ValueError does not name the path."""
    files.check(path, "a flagfile")
    try:
        # Some editors begin a file with a mark of its encoding.
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start}); "
            "save it as UTF-8"
        ) from error


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """Everything that identifies a run, as texts: the contents of `run.flags`.

    `options` maps an option to its text. `hashes` maps names to the SHA-256 of what a
    flag cannot hold, such as the data, and is written as `#--name=value`, a comment to
    absl. `dropped` holds options that were read but not taken, see `read`.
    """

    options: dict[str, str]
    hashes: dict[str, str] = dataclasses.field(default_factory=dict)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, *values: Any, hashes: Mapping[str, str] | None = None) -> RunFlags:
        """The flags of resolved options, which are dataclass instances.

        Those that are None or never recorded are omitted. Raises ValueError if a line
        of a file cannot hold a value.
        """
        unrecorded = schema.names(schema.NOWHERE)
        pairs = [pair for one in values for pair in vars(one).items()]
        found = {
            name: options_lib.text(value)
            for name, value in pairs
            if value is not None and name not in unrecorded
        }
        for name, value in found.items():
            limits.check_text(name, value)
        return cls(found, dict(hashes or {}))

    @classmethod
    def read(cls, path: pathlib.Path) -> RunFlags:
        """Reads the flags in a run's folder, which may be a stranger's.

        Options that no run records (`schema.NOWHERE`) would write files, open
        connections or load programs, and are not taken. A ValueError names the file and
        the line that is not a flag. OSError: the file is missing or cannot be read.
        """
        with files.named(str(path), joint=" "):
            return cls.of_text(_text(path))

    @classmethod
    def of_text(cls, content: str) -> RunFlags:
        """Parses a file's text; errors do not quote it, as the file may be a link."""
        of_absl = "flagfile", "undefok"
        out, never = cls({}), {*schema.names(schema.NOWHERE), *schema.REMOVED, *of_absl}
        # Not `splitlines`, which also breaks at characters that a value may hold.
        for number, line in enumerate(content.split("\n"), start=1):
            found = re.fullmatch(r"(#?)--([^\W\d]\w*)=(.*?)\r?", line, re.DOTALL)
            if found is None and (not line.strip() or line.startswith(("#", "//"))):
                continue
            if found is None:
                raise ValueError(
                    f"line {number} is not --name=value; the file is damaged"
                )
            is_hash, name, value = found.groups()
            kind = out.dropped if name in never else out.options
            kind = out.hashes if is_hash else kind
            if {out.options.get(name, value), out.hashes.get(name, value)} != {value}:
                raise ValueError(f"line {number}: --{name} has two values")
            kind[name] = value
        if "algo" not in out.options:
            raise ValueError("names no --algo; the file is damaged")
        if algorithm_file.is_one(out.options["algo"]):
            raise ValueError("has a file as --algo, which no run records")
        return out

    def note(self, path: pathlib.Path) -> str:
        """Lines about dropped options, "" if their values are defaults."""
        removed = schema.REMOVED
        defaults = RunFlags({}).completed(schema.Config).options
        defaults |= {name: value for name, (value, _) in removed.items()}
        names = [n for n, v in self.dropped.items() if defaults.get(n) != v]
        lines = [
            f"note: {path}: --{name} is not used: {removed[name][1]}"
            for name in names
            if name in removed
        ]
        if others := [f"--{name}" for name in names if name not in removed]:
            lines.append(
                f"note: {path}: {', '.join(others)} is not taken from the folder of a "
                "run; give it again if you want it"
            )
        return "\n".join(lines)

    def lines(self) -> list[str]:
        """The file's lines, which replay the run."""
        pairs = [("--", self.options), ("#--", self.hashes)]
        return [f"{sign}{n}={v}" for sign, kind in pairs for n, v in kind.items()]

    def typed(self, algo: Any) -> dict[str, Any]:
        """An algorithm's recorded options; ValueError if one does not have its type."""
        out = {}
        for name, kind in registry.option_types(algo).items():
            if name not in self.options:
                continue
            value = self.options[name]
            try:
                out[name] = value == "true" if kind is bool else kind(value)
            except ValueError as error:
                line = f"--{name}={value}: expected {kind.__name__}"
                raise ValueError(f"{line}; the file is damaged") from error
        return out

    def completed(self, *values: Any) -> RunFlags:
        """Adds the defaults of options that older files do not have.

        Earlier versions counted a list of names in `--eval_metrics` as custom code.
        """
        fields = [field for one in values for field in dataclasses.fields(one)]
        known = {
            f.name: options_lib.text(f.default) for f in fields if f.default is not None
        }
        hashes, metrics = dict(self.hashes), self.options.get("eval_metrics", "")
        are_names = bool(metrics) and {*metrics.split(",")} <= measures.NAMES.keys()
        if are_names and "computed_by" not in hashes:
            hashes.pop("own_sha256", None)
        return RunFlags(known | self.options, hashes, self.dropped)

    def changed(self, now: RunFlags) -> list[str]:
        """The names of the parts of a run's identity that have changed.

        Custom code is compared by what it computes if the same versions traced both,
        and otherwise by its text, see `is_by_text`. Hashes that an earlier version did
        not write are not compared.
        """
        before, after = self.options | self.hashes, now.options | now.hashes
        names = (before.keys() | after.keys()) - schema.names(schema.EXECUTION)
        # That of data is of the examples and of what is beside them.
        names -= {"computed_by", "examples_sha256"}
        names -= {"computed_sha256"} if self.is_by_text(now) else {"own_sha256"}
        later = {"split_sha256", "names_sha256", "columns_sha256", "example_shape"}
        names -= later - before.keys()
        digests = ("data_sha256", "split_sha256")
        if "split_sha256" in before and all(
            before.get(name) == after.get(name) for name in digests
        ):
            # The same clients have another name: a file has moved, or became arrays.
            names -= {"dataset"}

        return [name for name in sorted(names) if before.get(name) != after.get(name)]

    def differences(self, now: RunFlags) -> list[str]:
        """What has `changed`, as readable pairs."""
        before, after = self.options | self.hashes, now.options | now.hashes

        def shown(side: Mapping[str, str], name: str) -> str:
            return side.get(name, "unset")[: 12 if name in HASHED else None]

        names = self.changed(now)
        is_same_text = before.get("own_sha256") == after.get("own_sha256")
        if is_same_text and not HASHED.keys() >= {*names}:
            # The same code computes something else with other options.
            names = [name for name in names if name != "computed_sha256"]
        return [
            f"--{name}={shown(before, name)}, not {shown(after, name)}"
            + (f" ({HASHED[name]})" if name in HASHED else "")
            for name in names
        ]

    def is_of_command(self, now: RunFlags) -> bool:
        """Whether a command with these options continues the run where `now` cannot."""
        if "own_sha256" in self.hashes or own_files.in_memory(self.options):
            return False  # what Python gave is in no option
        return not HASHED.keys() >= set(self.changed(now))

    def is_by_text(self, now: RunFlags) -> bool:
        """Whether to compare custom code by its text, as other versions traced it."""
        by = self.hashes.get("computed_by")
        is_traced = by is not None and by == now.hashes.get("computed_by")
        return "own_sha256" in self.hashes and not is_traced


def expand(argv: Sequence[str]) -> list[str]:
    """Replaces every --flagfile of a command line by the lines of its file.

    absl itself would wait for pipes, skip a file that includes itself, and not find our
    flagfiles by name. A file named `run.flags` may be a stranger's record, so only the
    options of `RunFlags.read` are taken from it, and a line on stderr names the others.
    Any other flagfile may set every option. A UsageError is one line that names the
    flagfile.
    """
    return [argv[0], *_expanded(argv[1:])]


def _expanded(arguments: Sequence[str], inside: tuple[str, ...] = ()) -> list[str]:
    """The expanded arguments; `inside` are the flagfiles that hold these lines."""
    out: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if argument == "--" and not inside:
            return [*out, argument, *rest]
        if name not in ("--flagfile", "-flagfile"):
            out.append(argument)
        else:
            out += _lines_of((value if equals else next(rest, "")).strip(), inside)
    return out


def _lines_of(value: str, inside: tuple[str, ...]) -> list[str]:
    """The flags of a flagfile, given by its path or the name of one of ours."""
    if not value:
        raise UsageError("--flagfile= names no file")
    where, path = f"--flagfile={value}", pathlib.Path(os.path.expanduser(value))
    name = value.removesuffix(".flags")
    ours = {one.stem: one for one in sorted(FLAGFILES.glob("*.flags"))}
    try:
        path = path if path.exists() else ours.get(name, path)
        if is_record := path.name == RUN_FLAGS:
            recorded = RunFlags.of_text(_text(path))
            lines = recorded.lines()
            if note := recorded.note(path):
                print(note, file=sys.stderr)
        else:
            lines = _text(path).split("\n")
    except FileNotFoundError as error:
        hint = options_lib.nearest(path.name.removesuffix(".flags"), ours)
        raise UsageError(f"{where}: there is no such file{hint}") from error
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:
        hint = "; rename it if it is not the record of a run" * is_record
        raise UsageError(f"{where} {error}{hint}") from error
    if (identity := os.path.realpath(path)) in inside or len(inside) >= MAX_DEPTH:
        odd = "includes itself" if identity in inside else "is the end of a long chain"
        raise UsageError(f"{where} {odd}; remove that line")
    flags = [line.strip() for line in lines]
    flags = [flag for flag in flags if flag and not flag.startswith(("#", "//"))]
    return _expanded(flags, (*inside, identity))
