"""Dataclass fields that carry their own help text, choices and range."""

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax

# A relation with all values of another option that switch something on
ON = ("",)
OFF = (None, "", 0)


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    needs: Mapping[str, tuple[Any, ...]] | None = None,
    excludes: Mapping[str, tuple[Any, ...]] | None = None,
    is_needed: bool = False,
    is_noted: bool = False,
    off: str = "",
    zero_is_off: bool = False,
    zero_is: str = "",
    is_static: bool = False,
    is_in_rounds: bool | str = False,
) -> Any:
    """A field of an option dataclass, with its `--help` text, range and relations.

    Args:
        help: One sentence; the paper's symbol in brackets.
        choices: The allowed strings. `file:PATH` allows any `file:...`.
        minimum, maximum, above, below: Bounds of a number, the last two exclusive.
        needs: Another option -> its values with which this one has an effect, `ON` =
            all that switch it on. With others this one is refused unless it is at its
            default or off. Options that a dataclass does not have are skipped.
        excludes: Another option -> its values, or `ON`, that rule this one out.
        is_needed: Whether those values of `needs` also require this option.
        is_noted: Whether a line says that it has no effect instead of a refusal, as a
            paper's rules may set it for all methods.
        off: A text that switches it off, as an empty one always does.
        zero_is_off: Marks a float with a 0 that removes code instead of multiplying by
            0. It then stays a Python 0.0 (static).
        zero_is: The method of another name that a 0 makes of this one. A run notes it.
        is_static: Marks a float that is part of the program, such as one that decides
            sizes. It is never traced, and each value is compiled separately.
        is_in_rounds: Marks a number of rounds after which something is complete. A run
            should reach it, with `end` have as many, and with `before` go beyond it.

    Examples:
        >>> @dataclasses.dataclass(frozen=True)
        ... class HParams:
        ...     rate: float = option(0.1, "learning rate [eta]", minimum=0)
        >>> HParams().rate
        0.1
        >>> validate(HParams(rate=-1.0))
        Traceback (most recent call last):
        ValueError: --rate=-1.0: expected at least 0
    """
    metadata = dict(locals(), needs=dict(needs or {}), excludes=dict(excludes or {}))
    return dataclasses.field(default=metadata.pop("default"), metadata=metadata)


# A field that is not an `option` (a notebook's `scale: float = 1.0`)
_PLAIN = option(None, "").metadata


def metadata(field: dataclasses.Field) -> Mapping[str, Any]:
    """What `option` says of a field, its defaults for one that is no `option`."""
    return _PLAIN | field.metadata


def validate(*points: Any) -> None:
    """Checks all fields of dataclass instances, and their relations.

    `points` are one instance, or those of a sweep, see `conflicts`. Raises ValueError
    in one line with the flag, the value and the allowed values.
    """
    for values in points:
        for field in dataclasses.fields(values):
            check(field, getattr(values, field.name))
    for line in conflicts(*points):
        raise ValueError(line)


def check(field: dataclasses.Field, value: Any) -> None:
    """Refuses (ValueError) a value that the option does not allow by itself."""
    expected = "" if value is None else _expected(value, metadata(field))
    if expected:
        raise ValueError(f"--{field.name}={value}: expected {expected}")


def _expected(value: Any, meta: Mapping[str, Any]) -> str:
    """The values that an option allows, as words; "" where this one is allowed."""
    if isinstance(value, str):  # an object was checked where it was given
        known = ", ".join(choice for choice in meta["choices"] if choice)
        is_known = not meta["choices"] or _is_choice(value, meta["choices"])
        return "" if is_known else f"one of {known}{nearest(value, meta['choices'])}"
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    bounds = {
        "minimum": ("at least", lambda bound: value >= bound),
        "maximum": ("at most", lambda bound: value <= bound),
        "above": ("more than", lambda bound: value > bound),
        "below": ("less than", lambda bound: value < bound),
    }
    for name, (words, holds) in bounds.items():
        if meta[name] is not None and not holds(meta[name]):
            return f"{words} {meta[name]:g}"
    return ""


def conflicts(*points: Any, noted: Collection[str] | None = None) -> Iterator[str]:
    """Lines about options that contradict others, by `needs` and `excludes`.

    Relations with options that are missing or None (not resolved yet) are skipped, and
    so are traced numbers, which were checked before the trace.

    Args:
        points: An instance, or those of a sweep. An option is without effect if it is
            so at each point that gives it.
        noted: The names of the options that were given, for lines about relations that
            are only noted. None = lines about those that are refused.
    """
    for field in dataclasses.fields(points[0]):
        meta, name = metadata(field), field.name
        if meta["is_noted"] != (noted is not None):
            continue
        settled = [p for p in points if not isinstance(getattr(p, name), jax.Array)]
        given = [p for p in settled if _is_given(field, getattr(p, name), noted)]
        if given and all(unmet(field, vars(one)) for one in given):
            for other, now in unmet(field, vars(given[0])):
                value, wanted = getattr(given[0], name), meta["needs"][other]
                yield without_effect(name, value, other, now, wanted)
        for one in settled if meta["is_needed"] else ():
            lacking = dict(unmet(field, vars(one)))
            for other in meta["needs"] if getattr(one, name) in OFF else ():
                now = getattr(one, other, None)
                if now is not None and other not in lacking:
                    yield f"--{other}={text(now)} needs --{name}: {meta['help']}"
        for other, refused in meta["excludes"].items():
            for one in given:
                value, now = getattr(one, name), getattr(one, other, None)
                if now is not None and _is_among(now, refused):
                    flag = f"--{name}={text(value)}"
                    cure = f"--{other}={text(now)}; omit one of them"
                    yield f"{flag} does not go with {cure}"


def _is_given(field: dataclasses.Field, value: Any, noted: Collection[str] | None):
    """Whether an option asks for something, and for notes is among those given."""
    if noted is None:
        return is_on(field, value)
    return field.name in noted and value not in OFF


def is_on(field: dataclasses.Field, value: Any) -> bool:
    """Whether an option was given a value that asks for something."""
    return value not in (*OFF, field.default, field.metadata.get("off"))


def unmet(field: dataclasses.Field, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(name, value) of the options without which an option has no effect, by `needs`.

    Those that `values` lack, or have as None (not resolved yet), are skipped.
    """
    found = {name: values.get(name) for name in metadata(field)["needs"]}
    return [
        (name, now)
        for name, now in found.items()
        if now is not None and not _is_among(now, metadata(field)["needs"][name])
    ]


def _is_among(value: Any, values: tuple[Any, ...]) -> bool:
    if isinstance(value, str) and values is not ON:
        return _is_choice(value, values)
    if not isinstance(value, (str, int, float, type(None))):
        return True  # an object in place of a choice, which is as much on as any
    return value not in OFF if values is ON else value in values


def without_effect(
    name: str, value: Any, other: str, now: Any, wanted: tuple[Any, ...] | str
) -> str:
    """The line about an option without effect beside another one.

    `now` is the value of the `other` option. `wanted` are its values with which option
    `name` has an effect, or a phrase.
    """
    cure = wanted
    if not isinstance(wanted, str):
        cure = f"--{other}" + "=" * (wanted is not ON) + " or ".join(map(text, wanted))
    return (
        f"--{name}={text(value)} has no effect with --{other}={text(now)}; omit it, or "
        f"give {cure}"
    )


def text(value: Any) -> str:
    """An option's value as a flagfile has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_choice(value: str, choices: tuple[str, ...]) -> bool:
    """Whether a text is one of the choices, or begins like one that ends in a path."""
    paths = [choice for choice in choices if choice.endswith(":PATH")]
    return value in choices or any(value.startswith(one[:-4]) for one in paths)


def nearest(name: str, known: Iterable[str], before: str = "") -> str:
    """Suggests a known name that begins so in any case, or the closest, or nothing.

    `before` is put in front of it.
    """
    lower, given = {one.lower(): one for one in known}, name.lower()
    # As `fmnist` of `fashion_mnist`
    short = given.replace("-", "")
    brief = [n for n in lower if "_" in n and short == n[0] + n.partition("_")[2]]
    begun = [one for one in lower if given and one.startswith(given)]
    # `emnist` is nearer to `emnist/byclass` than to `femnist`.
    parts = [one for one in begun if one.startswith(f"{given}/")]
    longer = sorted(begun, key=len) if len(given) > 4 else []
    close = (
        brief
        or parts
        or longer
        or difflib.get_close_matches(given, lower, n=1)
        or begun
    )
    return f"; did you mean {before}{lower[close[0]]}?" if close else ""


def check_one_of(name: str, value: Any, known: Collection[Any], hint: str = "") -> None:
    """Refuses an unknown value with a ValueError that lists all, and then the closest.

    `hint` is what follows the list.
    """
    if value not in known:
        listed, near = ", ".join(map(str, known)), nearest(str(value), map(str, known))
        raise ValueError(f"--{name}={value}: expected one of {listed}{hint}{near}")


def check_extends(values: Any, base: type, caller: str) -> None:
    """Refuses (ValueError) options for `caller` that lack some of those of `base`."""
    names = [field.name for field in dataclasses.fields(base)]
    if lacks := [name for name in names if not hasattr(values, name)]:
        where = f"{base.__module__.rpartition('.')[2]}.{base.__name__}"
        raise ValueError(
            f"{caller} got options {type(values).__name__}, which lack {lacks[0]}; let "
            f"HParams extend {where}"
        )


def check_at_most(name: str, value: Any, most: Any, why: str) -> None:
    """Refuses, with a ValueError, a number above `most`; `why` says what that is."""
    if value > most:
        raise ValueError(f"--{name}={value}: expected at most {most}, {why}; lower it")


def reason(error: BaseException) -> str:
    """An error in one line of at most 200 characters, or else its type's name."""
    line = " ".join(str(error).split()) or type(error).__name__
    line = "".join(one if one.isprintable() else "?" for one in line)
    if len(line) <= 200:
        return line
    # Between words, if there are several near the end.
    end = line.rfind(" ", 150, 197)
    return f"{line[: end if end > 0 else 196]} ..."


def refuse(values: Any, names: tuple[str, ...], reason: str) -> None:
    """Raises ValueError for options without effect that are not at their defaults.

    Traced numbers pass, because they were checked before the trace.
    """
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        is_traced = isinstance(value, jax.Array)
        if field.name in names and not is_traced and value != field.default:
            # Perhaps a preset has set it.
            cure = f"give --{field.name}={text(field.default)}"
            raise ValueError(f"--{field.name}={value} has no effect {reason}; {cure}")


def is_off(value: Any) -> bool:
    """True for a static zero; a traced value is always on."""
    return isinstance(value, (int, float)) and value == 0


def split_floats(values: Any) -> tuple[Any, dict[str, float]]:
    """Separates the numbers that may be traced from the structure.

    Returns the instance with every traceable float replaced by 0.0 (hashable, equal for
    all settings of one structure), and those floats by name.
    """
    floats = {
        field.name: getattr(values, field.name)
        for field in dataclasses.fields(values)
        if isinstance(getattr(values, field.name), float)
        and not field.metadata.get("is_static")
        and not (field.metadata.get("zero_is_off") and getattr(values, field.name) == 0)
    }
    return dataclasses.replace(values, **dict.fromkeys(floats, 0.0)), floats
