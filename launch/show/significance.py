"""Whether two methods differ by more than chance, from paired values of clients."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.05
_FEW = 13  # differences
TEST = (
    f"Wilcoxon's signed-rank test on clients, seeds as blocks, p < {LEVEL} after "
    "Holm's correction"
)


def wilcoxon(one: np.ndarray, other: np.ndarray) -> tuple[float, int]:
    """Wilcoxon's signed-rank test with seeds as blocks: two-sided p-value, direction.

    Tested is whether the differences of the two methods on the same client are
    symmetric about 0. Clients of one seed are pairs: they differ far more from one
    another than two methods on one client. They are no pairs across seeds, where a
    client has other data and both methods were trained anew. So each seed is ranked on
    its own, and the one-sided p-values of the seeds are combined by Stouffer's method,
    weighted by the square root of the clients that differ; p is twice the smaller side.
    An exact p-value of 1 counts as 1 minus half the other side's, or a seed in which a
    single client differs would outvote all others.
    What it says is about the clients of these seeds, and two seeds are no sample of
    all seeds: the standard deviation beside a mean shows how much they scatter.

    Examples:
        >>> a = np.array([[0.9, 0.8, 0.7, 0.9, 0.6, 0.8]])
        >>> p, sign = wilcoxon(a, a - np.arange(1, 7) / 100)
        >>> round(p, 3), sign
        (0.031, 1)

    Args:
        one, other: f64[S, K], a value for each seed and client, nan = none.

    Returns:
        p in 0..1, and 1 if `one` is larger by the test, else -1; (1, 0) where no client
        differs.
    """
    sides, weights = [], []
    for a, b in zip(one, other, strict=True):
        # Accuracies of few rows differ, and are no ties, by rounding alone.
        gap = np.round((a - b)[np.isfinite(a) & np.isfinite(b)], 9)
        gap = gap[gap != 0]
        if len(gap):
            weights.append(np.sqrt(len(gap)))
            sides.append(_sides(gap))
    if not weights:
        return 1.0, 0
    more, less = np.array(sides).T
    if len(weights) > 1:
        more, less = (
            stats.norm.sf(weights @ _score(*both) / np.linalg.norm(weights))[None]
            for both in ((more, less), (less, more))
        )
    return float(min(1, 2 * min(more[0], less[0]))), 1 if more[0] < less[0] else -1


def _sides(gap: np.ndarray) -> list[float]:
    """The one-sided p-values, larger and smaller, of differences f64[n] that are not 0.

    For few they are exact, as those of scipy, whose way takes a second where some are
    equal in size.
    """
    if len(gap) > _FEW:
        return [stats.wilcoxon(gap, alternative=x).pvalue for x in ("greater", "less")]
    ranks = np.round(2 * stats.rankdata(np.abs(gap))).astype(int)  # halves where equal
    ways = np.zeros(ranks.sum() + 1)  # of signs, by the sum of the positive ranks
    ways[0] = 1
    for rank in ranks:
        ways[rank:] += ways[:-rank].copy()
    found = ranks[gap > 0].sum()
    return [ways[found:].sum() / ways.sum(), ways[: found + 1].sum() / ways.sum()]


def _score(side: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The normal scores f64[S] of the one-sided p-values of seeds.

    A side's p-value is 1 where the other's is tiny, too, and has no digits to be told
    from 1 then.
    """
    side, other = (np.clip(one, 1e-300, 1) for one in (side, other))
    with np.errstate(divide="ignore"):
        return np.where(side == 1, -stats.norm.isf(other / 2), stats.norm.isf(side))


def interval(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """The mean difference of two methods and its 95 % confidence interval.

    It is the paired t interval over clients, with seeds as blocks as in `wilcoxon`: the
    mean over seeds of the mean over clients, whose variance is sum_s v_s / n_s / S^2
    with the variance v_s of the n_s differences of a seed, and sum_s (n_s - 1) degrees
    of freedom. It is about the clients of these seeds and not about other seeds, and
    clients that all seeds have in common count once for each.

    Examples:
        >>> a = np.array([[0.9, 0.8, 0.7, 0.9]])
        >>> [round(x, 3) for x in interval(a, a - np.array([[0.1, 0.2, 0.1, 0.2]]))]
        [0.15, 0.058, 0.242]

    Args:
        one, other: f64[S, K], a value for each seed and client, nan = none.

    Returns:
        (one - other, lower end, upper end); the ends are nan where a seed has fewer
        than two clients, and all three where one has none.
    """
    gaps = [gap[np.isfinite(gap)] for gap in one - other]
    size = np.array([len(gap) for gap in gaps])
    if not size.all():
        return np.nan, np.nan, np.nan
    mean = float(np.mean([gap.mean() for gap in gaps]))
    if (size < 2).any():
        return mean, np.nan, np.nan
    error = np.sqrt(sum(gap.var(ddof=1) / len(gap) for gap in gaps)) / len(gaps)
    half = float(stats.t.ppf(1 - LEVEL / 2, (size - 1).sum()) * error)
    return mean, mean - half, mean + half


def holm(values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values of a family of tests, in the same order.

    Examples:
        >>> [round(p, 3) for p in holm([0.04, 0.01, 0.03])]
        [0.06, 0.03, 0.06]
    """
    out, largest = [0.0] * len(values), 0.0
    for place, index in enumerate(np.argsort(values)):
        largest = max(largest, (len(values) - place) * values[index])
        out[index] = min(1.0, largest)
    return out
