"""Whether two methods differ by more than chance, from paired values of clients."""

import warnings
from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.05


def wilcoxon(one: np.ndarray, other: np.ndarray) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test, with seeds as blocks.

    Tested is whether the differences of the two methods on the same client are
    symmetric about 0. Clients of one seed are pairs: they differ far more from one
    another than two methods on one client. They are no pairs across seeds, where a
    client has other data and both methods were trained anew. So each seed is ranked on
    its own, and the one-sided p-values of the seeds are combined by Stouffer's method,
    weighted by the square root of the clients that differ; p is twice the smaller side.
    What it says is about the clients of these seeds, and two seeds are no sample of
    all seeds: the standard deviation beside a mean shows how much they scatter.

    Example:
        >>> a = np.array([[0.9, 0.8, 0.7, 0.9, 0.6, 0.8]])
        >>> round(wilcoxon(a, a - np.arange(1, 7) / 100), 3)
        0.031

    Args:
        one, other: f64[S, K], a value for each seed and client, nan = none.

    Returns:
        p in 0..1; 1 where no client differs.
    """
    sides: dict[str, list[float]] = {"greater": [], "less": []}
    weights = []
    for a, b in zip(one, other, strict=True):
        gap = (a - b)[np.isfinite(a) & np.isfinite(b)]
        # Accuracies of few rows differ by rounding alone.
        gap = gap[np.abs(gap) > 1e-9]
        if not len(gap):
            continue
        weights.append(np.sqrt(len(gap)))
        for side, found in sides.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about few pairs
                found.append(stats.wilcoxon(gap, alternative=side).pvalue)
    if not weights:
        return 1.0
    if len(weights) == 1:
        return float(min(1, 2 * min(found[0] for found in sides.values())))
    combined = [
        stats.combine_pvalues(found, method="stouffer", weights=weights).pvalue
        for found in sides.values()
    ]
    return float(min(1, 2 * min(combined)))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values of a family of tests, in the same order.

    Example:
        >>> [round(p, 3) for p in holm([0.04, 0.01, 0.03])]
        [0.06, 0.03, 0.06]
    """
    out, largest = [0.0] * len(values), 0.0
    for place, index in enumerate(np.argsort(values)):
        largest = max(largest, (len(values) - place) * values[index])
        out[index] = min(1.0, largest)
    return out
