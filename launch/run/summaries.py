"""Turns curves into numbers: the rounds of a summary, and their mean or median."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

COUNTERS = (
    "round",
    "seed",
    "train_loss",
    "bytes_up",
    "bytes_down",
    "seconds",
    "clients_evaluated",
    "diverged",
)


def window(rule_name: str, rounds: int) -> tuple[int, ...]:
    """The evaluated rounds of a summary, as numbers of finished rounds.

    They are ten, or a quarter of a short run, of which ten would be the whole curve.
    """
    if rule_name == "last":
        return (rounds,)
    count = max(1, min(10, rounds // 4))
    if rule_name == "mean_last10":
        return tuple(range(rounds - count + 1, rounds + 1))
    # Indices 90..99 of 100 are the states before each of the last ten rounds.
    return tuple(range(max(1, rounds - count), rounds)) or (rounds,)


def in_words(rule_name: str, window: Sequence[int]) -> str:
    """A rule in words: `mean of rounds 91 to 100`, or `last`."""
    if rule_name == "last":
        return rule_name
    kind = "median" if rule_name.startswith("median") else "mean"
    if len(window) == 1:
        return f"{kind} of round {window[0]}"
    return f"{kind} of rounds {window[0]} to {window[-1]}"


def summarize(
    records: list[dict[str, Any]],
    seeds: list[int],
    window: tuple[int, ...],
    rule_name: str,
    rounds: int,
) -> dict[str, Any]:
    """Metrics by the summary rule: {name: {mean, std, per_seed}}.

    Values are those of rounds in `window`, and bytes those of the record of `rounds`.
    """
    by_seed: dict[int, dict[str, list[float]]] = {s: {} for s in seeds}
    for record in records:
        if record["round"] in window:
            for name, value in record.items():
                if name not in COUNTERS:
                    by_seed[record["seed"]].setdefault(name, []).append(value)
    rule = np.median if rule_name.startswith("median") else np.mean
    metrics = {}
    shared = set.intersection(*(set(one) for one in by_seed.values()))
    for name in (n for n in by_seed[seeds[0]] if n in shared):
        values = [float(rule(by_seed[seed][name])) for seed in seeds]
        metrics[name] = spread(values)
    if {"c_spec", "c_gen"} <= metrics.keys():
        # The mean of the two summaries, not the summary of the means.
        spec, gen = metrics["c_spec"]["per_seed"], metrics["c_gen"]["per_seed"]
        means = [(a + b) / 2 for a, b in zip(spec, gen, strict=True)]
        metrics["c_per"] = spread(means)
    for name in ("bytes_up", "bytes_down"):
        last = [r[name] for r in records if r["round"] == rounds]
        if last:
            metrics[name] = spread(last)
    return metrics


def spread(values: list[float]) -> dict[str, Any]:
    """Mean and sample standard deviation (ddof=1) over seeds."""
    std = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "std": std, "per_seed": list(values)}


def is_fraction(name: str) -> bool:
    """Whether a metric of an evaluation is a fraction; of a text it is a number."""
    return "perplexity" not in name


def is_loss(name: str) -> bool:
    """Whether a metric of an evaluation is a cross-entropy."""
    return name.endswith("_loss")


def is_number(summary: Mapping[str, Any], name: str) -> bool:
    """Whether a metric of a run's summary is a number, and so not shown in percent."""
    return name in summary.get("numbers", ())


def fractions(summary: Mapping[str, Any]) -> dict[str, bool]:
    """Whether each metric of a run's summary is a fraction, and so shown in percent."""
    return {
        name: not is_number(summary, name)
        for name in summary["metrics"]
        if not name.startswith("bytes")
    }
