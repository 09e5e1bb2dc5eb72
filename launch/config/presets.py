"""The papers' rules, which set the options that are not given.

The rules are data, `rules/<paper>.toml`. A preset is a list of them, and every preset
begins with those of `none`. No other part of `launch` depends on a paper.
"""

import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedjax_pfl import options

FOLDER = pathlib.Path(__file__).parent / "rules"
BASE = "none"


class Rule(NamedTuple):
    """Values of options, and the conditions under which they hold.

    `when` maps conditions to wanted values. `algo`, `dataset`, `partition` and
    `image_shape` (such as 28x28x1) want a name or one of several. Those of an `algo`
    hold for a custom algorithm of its name, too (`own_depthfl`). `public_images` is
    whether the algorithm needs a public set and has none yet, and `max_examples` the
    largest number of rows. Conditions on the data are checked once the data are loaded,
    after an algorithm's own options are set. `options` that an algorithm does not have
    are skipped.
    """

    when: Mapping[str, Any]
    options: Mapping[str, Any]

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Whether every condition is known to be met."""

        def is_met(name: str, wanted: Any) -> bool:
            if name == "max_examples":
                return facts.get("num_examples", wanted + 1) <= wanted
            known = facts.get(name)
            if name == "algo" and known is not None:
                known = known.removeprefix("own_")
            return known in (wanted if isinstance(wanted, list) else [wanted])

        return all(is_met(*condition) for condition in self.when.items())


class Preset(NamedTuple):
    """A paper's rules, which come after those of `extends`."""

    about: str
    extends: str | None
    rules: tuple[Rule, ...]


def read(folder: pathlib.Path) -> dict[str, Preset]:
    """Every preset of a folder of rules, the base first."""
    found = {}
    for path in folder.glob("*.toml"):
        for name, entry in tomllib.loads(path.read_text()).items():
            rules = tuple(
                Rule(rule.pop("when", {}), rule) for rule in entry.get("rules", [])
            )
            extends = entry.get("extends", BASE) if name != BASE else None
            found[name] = Preset(entry["about"], extends, rules)
    return {name: found[name] for name in sorted(found, key=lambda n: (n != BASE, n))}


PRESETS: dict[str, Preset] = read(FOLDER)


def rules(preset: str) -> list[tuple[str, Rule]]:
    """Pairs (preset, rule): first the base's rules, last the preset's own."""
    extends = PRESETS[preset].extends
    before = rules(extends) if extends else []
    return before + [(preset, rule) for rule in PRESETS[preset].rules]


def values(preset: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Option -> value by the rules that hold. The last rule wins.

    `facts` has `algo` and `dataset`, and `partition`, `public_images`, `num_examples`
    and `image_shape` if they are known. A rule about an unknown fact does not hold.
    """
    out: dict[str, Any] = {}
    for _, rule in rules(preset):
        if rule.holds(facts):
            out |= rule.options
    return out


def has_data(preset: str, dataset: str) -> bool:
    """Whether a paper, and not only the base, has rules about a data set."""
    own = (rule.when for name, rule in rules(preset) if name != BASE)
    about = ({"dataset": when["dataset"]} for when in own if "dataset" in when)
    return any(Rule(when, {}).holds({"dataset": dataset}) for when in about)


def default_text(option: str, own: str, preset: str, facts: Mapping[str, Any]) -> str:
    """An option's default and where it comes from: `30 (--preset=cdkt)`."""
    owner, value, others = BASE, None, set()
    for name, rule in rules(preset):
        known = {k: v for k, v in rule.when.items() if k in facts}
        if option not in rule.options or not Rule(known, {}).holds(facts):
            continue
        if known.keys() == rule.when.keys():
            owner, value, others = name, rule.options[option], set()
        else:
            others |= rule.when.keys() - known.keys()
    origin = [f"--preset={owner}"] if owner != BASE else []
    origin += [f"differs with {_WORDS.get(one, f'--{one}')}" for one in sorted(others)]
    text = own if value is None else repr(value)
    return f"{text} ({', '.join(origin)})" if origin else text


# Conditions that are no options
_WORDS = {"max_examples": "few examples", "image_shape": "small gray images"}


def describe(preset: str) -> str:
    """One line about a preset and the options that it sets."""
    about, extends, own = PRESETS[preset]
    base = [f"--preset={extends}"] if extends not in (None, BASE) else []
    fixed = {k: v for rule in own if not rule.when for k, v in rule.options.items()}
    pairs = [f"{name}={options.text(value)}" for name, value in fixed.items()]
    more = sorted({name for rule in own if rule.when for name in rule.options})
    tail = f"; by data, partition or algorithm: {', '.join(more)}" if more else ""
    joined = " and ".join(filter(None, (*base, " ".join(pairs))))
    return f"{about}: {joined}{tail}"


def sentence(preset: str, is_alone: bool = True) -> str:
    """The rules that a run follows, and how to compare it if it is alone."""
    if preset != BASE or not is_alone:
        return f"rules: --preset={preset} ({PRESETS[preset].about})"
    return (
        f"rules: --preset={BASE} ({PRESETS[BASE].about}); compare it with runs under "
        "the same --preset, as methods of papers have others by default"
    )
