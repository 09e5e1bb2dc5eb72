"""What validation rows choose: the point of a method's tuned options."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_pfl import metric_kinds
from fedjax_pfl import options as option_lib
from launch.config import limits, registry, schema, sweep
from launch.experiment import Experiment
from launch.run import summaries

Values = Mapping[str, Sequence[Any]]  # of each tuned option


# Sections of options that say what is measured, with those of a method among them
_MEASURED = {
    "run": ("rounds",),
    "data": ("augment", "normalization"),
    "evaluation": ("fine_tune_epochs",),
}


class Choice(NamedTuple):
    """What validation rows chose for a row of a study.

    Attributes:
        options: The values of the tuned options, {} if none is.
        metric, value: The validation metric and its best mean over seeds, "" if there
            are no validation rows.
        is_fine_tuned: Whether fine-tuning is better than none, for a row that may.
        edges: The tuned options whose best value is the least or largest of several,
            no other value is as good, and it leaves something to gain.
        num_equal: The points that are as good as this one, which is their first, with
            itself.
    """

    options: dict[str, Any]
    metric: str = ""
    value: float = 0.0
    is_fine_tuned: bool = False
    edges: tuple[str, ...] = ()
    num_equal: int = 1


def ways(tune: Values, made: Experiment, algo: Any) -> dict[str, list[str]]:
    """The options of `tune` that an algorithm has: `sweep`, and `runs` of their own.

    Raises a ValueError if an option does not allow a value.
    """
    known = registry.fields_of(algo)
    common = schema.names(schema.IDENTITY) | schema.names(schema.EXECUTION)
    out: dict[str, list[str]] = {"sweep": [], "runs": []}
    for name, values in tune.items():
        if name not in known:
            continue
        for value in values:
            if isinstance(value, (str, int, float)):
                limits.checked(name, value, registry.option_types(algo)[name])
                option_lib.check(known[name], value)
        kind = "sweep"
        try:
            sweep.of(sweep.text({name: values}), made.hparams, common)
        except ValueError:
            kind = "runs"
        out[kind].append(name)
    return out


def check(tune: Values) -> None:
    """Refuses (ValueError) options that would choose among data, seeds or measures."""
    for section, free in _MEASURED.items():
        odd = set(schema.groups()[section]).difference(free) & tune.keys()
        if odd:
            raise ValueError(
                f"study: tune: {min(odd)} decides what is measured, and its best value "
                "would be no property of a method; give it to all of them, or settings"
            )


def best(
    points: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    tune: Values,
    may_tune: bool,
    choose_by: str = "",
) -> Choice:
    """The best of points (options, part of a summary) by validation rows.

    The metric is the first of `summaries.choosing` by `choose_by` that was measured.
    Where fine-tuning is allowed (`may_tune`) its twin counts too, and no fine-tuning is
    better if they are equal. A point that diverged wins only if all did, and one of
    whose seeds some have no value, as fine-tuning diverged, only if all are. Raises a
    ValueError if there are no validation rows.
    """
    found: list[tuple[bool, float, Choice]] = []
    whole = [one for one in points if not one[1]["diverged"]]
    every = [part["metrics"] for _, part in whole or points]
    names = _choosing(every, may_tune, choose_by)
    if whole and not names:
        raise ValueError("study: tune needs validation rows of at least one client")
    for options, part in whole or points:
        # A point of a text that diverged has no perplexities.
        for name, is_fine_tuned in names.items():
            if name not in part["metrics"]:
                continue
            sign = 1 if metric_kinds.of(name) is metric_kinds.Kind.FRACTION else -1
            entry = part["metrics"][name]
            chosen = Choice(dict(options), name, entry["mean"], is_fine_tuned)
            found.append((summaries.is_of_all(entry), sign * entry["mean"], chosen))
    if not found:
        raise ValueError("study: tune: all values diverged; give smaller ones")
    best = max((is_of_all, score) for is_of_all, score, _ in found)
    top, equal = best[1], [one for *score, one in found if tuple(score) == best]
    chosen, *others = sorted(equal, key=lambda one: one.is_fine_tuned)
    is_whole = metric_kinds.of(chosen.metric) is metric_kinds.Kind.FRACTION and top == 1
    ends = tuple(
        name
        for name, x in chosen.options.items()
        if x in _ends(tune[name]) and all(x == one.options[name] for one in others)
        if not is_whole
    )
    # Without fine-tuning its epochs make no difference.
    names = [n for n in chosen.options if may_tune or n != "fine_tune_epochs"]
    by_options = {tuple(one.options[name] for name in names) for one in equal}
    return chosen._replace(edges=ends, num_equal=len(by_options))


def _choosing(
    every: Sequence[Mapping[str, Any]], may_tune: bool, choose_by: str
) -> dict[str, bool]:
    """The validation metrics that choose, and whether each is of fine-tuned clients.

    `every` are the metrics of the points, which are compared by the same one.
    """
    known = set().union(*every)
    for name in summaries.choosing(choose_by=choose_by):
        if name in known:
            tuned = name.replace("client_", "fine_tuned_")
            return {name: False} | ({tuned: True} if may_tune else {})
    return {}


def _ends(values: Sequence[Any]) -> list[Any]:
    """The least and the largest of several numbers, [] of other values."""
    kinds = [type(one) for one in values]
    is_numbers = bool not in kinds and all(issubclass(k, (int, float)) for k in kinds)
    return [min(values), max(values)] if is_numbers and len(values) > 1 else []
