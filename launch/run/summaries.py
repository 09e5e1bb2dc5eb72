"""Turns curves into numbers: the rounds of a summary, and their mean or median."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_pfl import metric_kinds

COUNTERS = (
    "round",
    "seed",
    "train_loss",
    "bytes_up",
    "bytes_down",
    "seconds",
    "clock",
    metric_kinds.EVALUATED,
    metric_kinds.VALIDATION + metric_kinds.EVALUATED,
    "diverged",
)

# Those that add up from round to round, of which a summary has the last value
TOTALS = ("bytes_up", "bytes_down", "clock")

# Numbers of clients that a record has only where there are any
COUNTS_OF_FEW = "fine_tuned_diverged", metric_kinds.VALIDATION + "fine_tuned_diverged"

BEST = "best_validation"
# The metrics of validation rows by which a round is best, of which the first that was
# measured counts. Perplexities are better where they are lower.
CHOOSING = tuple(
    metric_kinds.VALIDATION + name
    for name in (
        "client_accuracy",
        "global_accuracy",
        "client_perplexity",
        "client_masked_perplexity",
        "global_perplexity",
        "masked_perplexity",
    )
)
# Those of each rule that chooses a round. Tables with the best round on test rows count
# every row of every client equally.
CHOSEN_BY = {
    BEST: CHOOSING,
    "best": (
        "client_accuracy_pooled",
        "global_accuracy",
        "client_perplexity_pooled",
        "client_masked_perplexity",
        "global_perplexity",
        "masked_perplexity",
    ),
}

# The metrics of which `EVALUATED` says how many clients are in them
_OF_CLIENTS = re.compile(r"(val_)?(client|worst_decile|fine_tuned)_")
# Before a metric's name: the number of clients in its mean, if not all
CLIENTS_IN = metric_kinds.CLIENTS_IN


def window(rule_name: str, rounds: int) -> tuple[int, ...]:
    """The evaluated rounds of a summary, as numbers of finished rounds.

    There are ten, or a quarter of a short run, because ten would be its whole curve.
    The best round is not known before.
    """
    if rule_name == "last" or rule_name in CHOSEN_BY:
        return (rounds,)
    count = max(1, min(10, rounds // 4))
    if rule_name == "mean_last10":
        return tuple(range(rounds - count + 1, rounds + 1))
    # Indices 90..99 of 100 are the states before each of the last ten rounds.
    return tuple(range(max(1, rounds - count), rounds)) or (rounds,)


def passed(window: Sequence[int], round: int, kept: Sequence[int]) -> set[int]:
    """The rounds of a window that a run at `round` has finished and not `kept`."""
    return {one for one in window if one <= round} - set(kept)


def enough_rounds(rule_name: str, rounds: int, round: int, kept: Sequence[int]) -> int:
    """The least number from `rounds` on whose window has no round that has `passed`."""
    while passed(window(rule_name, rounds), round, kept):
        rounds += 1
    return rounds


def choosing(rule_name: str = BEST, choose_by: str = "") -> tuple[str, ...]:
    """The metrics by which a rule chooses, of which the first that is measured counts.

    `choose_by` is that of the run, "" = accuracy, or perplexity of a text.
    """
    if rule_name == BEST and choose_by:
        sides = ("client", "global")
        return tuple(f"{metric_kinds.VALIDATION}{one}_{choose_by}" for one in sides)
    return CHOSEN_BY[rule_name]


def of_every(
    names: Sequence[str], records: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    """Those of the metrics that all records have."""
    return tuple(name for name in names if all(name in one for one in records))


class Best:
    """The best round of one variant, of records that come one after another.

    The first metric of `names` that any of them has decides, and then the first round.
    Records after a divergence do not count.
    """

    def __init__(
        self, names: Sequence[str], may_be: Callable[[int], bool] = lambda _: True
    ):
        """`may_be` says of a round whether it may be the best one."""
        self._found: dict[str, tuple[float, int] | None] = {}
        self._names, self._may_be, self.num_read = names, may_be, 0

    def read(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Reads the next records."""
        self.num_read += len(records)
        for one in records:
            for name in self._names if self._may_be(one["round"]) else ():
                if name not in one:
                    continue
                found = self._found.setdefault(name, None)
                is_more = metric_kinds.of(name) is metric_kinds.Kind.FRACTION
                value = -one[name] if is_more else one[name], one["round"]
                if "diverged" not in one and (found is None or value < found):
                    self._found[name] = value

    @property
    def round(self) -> int | None:
        """The best round, None = no record has a metric of the rule."""
        name = next((name for name in self._names if name in self._found), None)
        found = None if name is None else self._found[name]
        return None if found is None else found[1]


def best_round(
    records: Sequence[Mapping[str, Any]], names: Sequence[str] = CHOOSING
) -> int | None:
    """The first round that is best, of one variant, None = none has one of the metrics.

    Records after a divergence do not count.
    """
    best = Best(names)
    best.read(records)
    return best.round


def in_words(rule_name: str, window: Sequence[int], choose_by: str = "") -> str:
    """A rule in words: `mean of rounds 91 to 100`, or `last`."""
    if rule_name == "last":
        return rule_name
    if rule_name == BEST:
        by = choose_by.replace("_", " ")
        return f"round with the best validation {by}".rstrip()
    if rule_name == "best":
        return "best round on test rows"
    kind = "median" if rule_name.startswith("median") else "mean"
    if len(window) == 1:
        return f"{kind} of round {window[0]}"
    return f"{kind} of rounds {window[0]} to {window[-1]}"


def summarize(
    records: list[dict[str, Any]],
    seeds: list[int],
    window: Mapping[int, Sequence[int]] | Sequence[int],
    rule_name: str,
    rounds: int,
) -> dict[str, Any]:
    """Metrics by the summary rule: {name: {mean, std, per_seed}}.

    Values are those of rounds in `window` (of each seed, if it maps seeds to rounds),
    and bytes those of the record of `rounds`. A metric that is not defined everywhere
    also has what it covers, see `fewer`: `rounds` (a number for each seed) of
    `of_rounds`, `seeds` (their indices) of `of_seeds`, and `clients`, the fewest in a
    round.
    """
    of_seed = window if isinstance(window, Mapping) else dict.fromkeys(seeds, window)
    inside = [one for one in records if one["round"] in of_seed[one["seed"]]]
    by_seed = [[r for r in inside if r["seed"] == seed] for seed in seeds]
    rule = np.median if rule_name.startswith("median") else np.mean
    metrics: dict[str, Any] = {}
    names = dict.fromkeys(n for some in by_seed for r in some for n in r)
    for name in names:
        if name in COUNTERS or name.startswith(CLIENTS_IN):
            continue
        found = [[r[name] for r in some if name in r] for some in by_seed]
        if name in COUNTS_OF_FEW:
            found = [[r.get(name, 0) for r in some] for some in by_seed]
        has = [place for place, values in enumerate(found) if values]
        metrics[name] = spread([float(rule(found[place])) for place in has])
        counts = [len(found[place]) for place in has]
        of_counts = [len(by_seed[place]) for place in has]
        if counts != of_counts:
            metrics[name] |= {"rounds": counts, "of_rounds": max(of_counts)}
        if len(has) < len(seeds):
            metrics[name] |= {"seeds": has, "of_seeds": len(seeds)}
        counted = CLIENTS_IN + name
        match = name not in COUNTS_OF_FEW and _OF_CLIENTS.match(name)
        if match and counted not in names:
            counted = (match[1] or "") + metric_kinds.EVALUATED
        if clients := [r[counted] for r in inside if counted in r]:
            metrics[name]["clients"] = int(min(clients))
    for prefix in "", metric_kinds.VALIDATION:
        if not {f"{prefix}c_spec", f"{prefix}c_gen"} <= metrics.keys():
            continue
        # The mean of the two summaries, not the summary of the means.
        # C-Gen is known wherever C-Spec is.
        spec, gen = (metrics[f"{prefix}{name}"] for name in ("c_spec", "c_gen"))
        means = [float(a + b) / 2 for a, b in zip(*paired(spec, gen), strict=True)]
        covered = {n: spec[n] for n in spec if n not in ("mean", "std", "per_seed")}
        metrics[f"{prefix}c_per"] = spread(means) | covered
    for name in TOTALS:
        if last := [r[name] for r in records if r["round"] == rounds and name in r]:
            metrics[name] = spread(last)
    return metrics


def is_of_all(entry: Mapping[str, Any]) -> bool:
    """Whether a metric is a mean over all seeds of its run."""
    return "seeds" not in entry


def fewer(entry: Mapping[str, Any]) -> str:
    """How much a metric covers, such as `2 of 3 rounds, 1 client`, "" if everything."""
    parts = []
    if "rounds" in entry:
        parts.append(f"{min(entry['rounds'])} of {entry['of_rounds']} rounds")
    if not is_of_all(entry):
        parts.append(f"{len(entry['seeds'])} of {entry['of_seeds']} seeds")
    if "clients" in entry:
        parts.append(f"{entry['clients']} client{'s' * (entry['clients'] > 1)}")
    return ", ".join(parts)


def paired(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[np.ndarray]:
    """The values of two metrics for the seeds for which both are defined."""
    sides = [
        dict(zip(entry.get("seeds", range(len(values))), values, strict=True))
        for entry in (one, other)
        for values in [entry["per_seed"]]
    ]
    both = [seed for seed in sides[0] if seed in sides[1]]
    return [np.array([side[seed] for seed in both]) for side in sides]


def spread(values: list[float]) -> dict[str, Any]:
    """Mean and sample standard deviation (ddof=1) over seeds."""
    std = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "std": std, "per_seed": list(values)}


def kinds(summary: Mapping[str, Any]) -> dict[str, metric_kinds.Kind]:
    """The kinds of the metrics in a run's summary, except bytes."""
    names = [name for name in summary["metrics"] if name not in COUNTERS]
    numbers = summary.get("numbers", ())
    return metric_kinds.declared(names, set(names).difference(numbers))
