"""Further metrics of an evaluation besides accuracy and loss (`--eval_metrics`).

A measure sums numbers over the rows of a model's evaluation, and the host turns the
sums into metrics. It is computed for the server's first model on the union of all test
rows, and for each client's personalized model on the client's own test rows.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pfl import metric_kinds, options, stacked

# The most numbers that the host turns into metrics at once
FINISHED_NUMBERS = 1 << 22
ECE_BINS = 15  # as in Guo et al., "On Calibration of Modern Neural Networks", ICML 2017
# Names of functions that would be confused with metrics that every run has
_TAKEN = (
    r"(accuracy|loss|perplexity|masked_perplexity)(_std|_pooled)?|class\d+_accuracy"
    # Values of single clients are kept under a measure's name, beside these.
    r"|(every|fine_tuned)_\w+|rounds?|seeds?|client|owner|unseen|best_round|test_size"
    r"|class_counts|class_names|owner_names|algo|file|allow_pickle"
)


class Measure(NamedTuple):
    """A metric that is computed from sums over rows.

    Attributes:
        name: Its name in `--eval_metrics`.
        sums: `(logits f32[B, Y], labels int32[B], mask bool[B]) -> sums`, a pytree of
            f32 to which rows with a mask of False add nothing. None = the rows
            themselves are kept: `logits` f32[N, Y] and `label` f32[N], which is 1 + the
            class, and 0 for missing rows.
        finish: From the sums f64 of M models, leaves [M, ...], to values f64[M] by
            name, nan where one is not defined.
        is_mean: Whether there is also the mean over clients of their own values.
        given: The user's function of a custom measure, with values that need not be
            fractions 0..1. None = a measure of `NAMES`, with fractions.
    """

    name: str
    sums: Callable[[jax.Array, jax.Array, jax.Array], Any] | None
    finish: Callable[[Any], dict[str, np.ndarray]]
    is_mean: bool = True
    given: Callable[..., Any] | None = None


def of(
    measures: Sequence[Measure],
    logits: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    *,
    first: jax.Array | int = 0,
    num_rows: int = 0,
) -> tuple[Any, ...]:
    """The sums of several measures over one batch.

    `logits`, `labels` and `mask` are those of `Measure.sums`. `first` is the place of
    the batch's first row among `num_rows` = N, at least the rows of all batches.
    """
    place = first + jnp.arange(len(labels))

    def kept(values: jax.Array) -> jax.Array:
        values = jnp.where(stacked.column(mask, values), values, 0)
        zeros = jnp.zeros((num_rows, *values.shape[1:]))
        return zeros.at[place].set(values.astype(jnp.float32), mode="drop")

    return tuple(
        {"logits": kept(logits), "label": kept(labels + 1)}
        if measure.sums is None
        else measure.sums(logits, labels, mask)
        for measure in measures
    )


def _by_class(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> dict:
    """f32[Y] each: right answers, all answers, and rows of each class."""
    size = logits.shape[-1]
    found = logits.argmax(-1)
    real, zeros = mask.astype(jnp.float32), jnp.zeros(size)
    return {
        "right": zeros.at[labels].add(jnp.where(found == labels, real, 0)),
        "answered": zeros.at[found].add(real),
        "rows": zeros.at[labels].add(real),
    }


def _mean_of(values: np.ndarray, is_defined: np.ndarray) -> np.ndarray:
    """The mean over the last axis of values where they are defined, nan without any."""
    total = np.where(is_defined, values, 0).sum(-1)
    count = is_defined.sum(-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _recalls(sums: dict) -> np.ndarray:
    return sums["right"] / np.maximum(sums["rows"], 1)


def _macro_f1(sums: dict) -> dict[str, np.ndarray]:
    """The mean over classes, among labels or answers, of 2 TP / (2 TP + FP + FN)."""
    total = sums["answered"] + sums["rows"]
    f1 = 2 * sums["right"] / np.maximum(total, 1)
    return {"macro_f1": _mean_of(f1, total > 0)}


def _balanced(sums: dict) -> dict[str, np.ndarray]:
    """The mean recall over the classes that occur."""
    return {"balanced_accuracy": _mean_of(_recalls(sums), sums["rows"] > 0)}


def _per_class(sums: dict) -> dict[str, np.ndarray]:
    """The recall of each class, nan where it does not occur."""
    recall = np.where(sums["rows"] > 0, _recalls(sums), np.nan)
    return {f"class{n}_accuracy": one for n, one in enumerate(recall.T)}


def _auc(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One class against the others, the mean over classes that have both.

    Ties count one half, as the mean of their ranks does.
    """
    from scipy import special, stats  # takes longer to import than jax

    label, logits = rows["label"][..., None], rows["logits"]
    # Missing rows have the last ranks, which are not counted.
    total = special.logsumexp(logits, axis=-1, keepdims=True)
    score = np.where(label, logits - total, 1.0)
    is_own = label == 1 + np.arange(logits.shape[-1])
    own = is_own.sum(-2)
    pairs = own * ((label > 0).sum(-2) - own)
    ranks = np.where(is_own, stats.rankdata(score, axis=-2), 0).sum(-2)
    areas = (ranks - own * (own + 1) / 2) / np.maximum(pairs, 1)
    return {"auc": _mean_of(areas, pairs > 0)}


def _by_confidence(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[3, bins]: rows, their confidences, and right answers, by confidence."""
    p = jax.nn.softmax(logits).max(-1)
    # The bins are ]0, 1/15], ]1/15, 2/15], ...
    place = jnp.clip(jnp.ceil(p * ECE_BINS) - 1, 0, ECE_BINS - 1).astype(jnp.int32)
    values = jnp.stack([jnp.ones_like(p), p, logits.argmax(-1) == labels])
    return jnp.zeros((3, ECE_BINS)).at[:, place].add(jnp.where(mask, values, 0))


def _ece(sums: np.ndarray) -> dict[str, np.ndarray]:
    """The mean over rows of |accuracy - confidence| of their bin."""
    rows, confidence, right = np.moveaxis(sums, -2, 0)
    gap = np.abs(right - confidence).sum(-1)
    return {"ece": gap / np.maximum(rows.sum(-1), 1)}


NAMES = {
    one.name: one
    for one in (
        Measure("macro_f1", _by_class, _macro_f1),
        Measure("balanced_accuracy", _by_class, _balanced),
        Measure("auc", None, _auc),
        Measure("ece", _by_confidence, _ece),
        Measure("per_class", _by_class, _per_class, is_mean=False),
    )
}


def listed(given: Any) -> list[Any]:
    """Names and functions of `eval_metrics` as a list.

    `given` is a name, a function, a list of these, or functions by name. Raises
    ValueError, in one line, for anything else.
    """
    if isinstance(given, Mapping):
        return list(given.items())
    if callable(given) or isinstance(given, str):
        return [given]
    if isinstance(given, (list, tuple)) and all(
        isinstance(one, (str, tuple)) or callable(one) for one in given
    ):
        return list(given)
    raise ValueError(
        "eval_metrics: expected names, or functions (logits, labels, mask) -> (sum, "
        f"count), got a {type(given).__name__}"
    )


def chosen(asked: str | Sequence[Any]) -> tuple[Measure, ...]:
    """The measures of `--eval_metrics`, a text or the result of `listed`.

    Raises ValueError for an unknown name or a function that is not a measure.
    """
    if isinstance(asked, str):
        asked = [name.strip() for name in asked.split(",")] if asked else []
    out = []
    for one in asked:
        name, fn = one if isinstance(one, tuple) else (None, one)
        if callable(fn):
            out.append(custom(name or getattr(fn, "__name__", ""), fn))
        elif fn in NAMES:
            out.append(NAMES[fn])
        else:
            raise ValueError(
                f"--eval_metrics={fn}: expected one of {', '.join(NAMES)}, or in "
                "Python a function (logits, labels, mask) -> (sum, count)"
            )
    names = [one.name for one in out]
    if len(set(names)) < len(names):
        raise ValueError(f"--eval_metrics={','.join(names)} names a metric twice")
    if pooled := [one for one in names if f"{one}_pooled" in names]:
        raise ValueError(
            f"--eval_metrics={','.join(names)}: {pooled[0]}_pooled is also what the "
            f"value of {pooled[0]} over all rows is called; rename it"
        )
    return tuple(out)


def custom(name: Any, fn: Callable[..., tuple[jax.Array, jax.Array]]) -> Measure:
    """A measure of a user's function `(logits, labels, mask) -> (sum, count)`.

    The value is the sum over all rows divided by the count. Raises ValueError, in one
    line, if it has no name, or that of another metric.
    """
    is_name = isinstance(name, str) and name.isidentifier() and name.islower()
    if not is_name or name in NAMES or is_taken(name):
        taken = " (it is that of another)" if is_name else ""
        raise ValueError(
            f"eval_metrics: {name or fn!r} is not a name for a metric{taken}; give "
            "functions by name, such as {'margin': fn}"
        )

    def finish(sums: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            name: np.where(sums[1] != 0, sums[0] / (sums[1] + (sums[1] == 0)), np.nan)
        }

    def sums(*batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, count = fn(*batch)
        return jnp.asarray(total, jnp.float32), jnp.asarray(count, jnp.float32)

    return Measure(name, sums, finish, given=fn)


def is_taken(name: str) -> bool:
    """Whether a function of this name would be confused with what every run has."""
    return re.fullmatch(_TAKEN, name) is not None


def of_user(measures: Sequence[Measure]) -> list[Measure]:
    """The custom ones."""
    return [one for one in measures if one.given is not None]


def check(measures: Sequence[Measure], num_classes: int) -> None:
    """Tries custom measures on four examples of `num_classes` classes.

    Raises ValueError, in one line, if one fails, does not return two scalars, or counts
    padding.
    """
    kinds = ((4, num_classes), jnp.float32), ((4,), jnp.int32), ((4,), jnp.bool_)
    probe = [jax.ShapeDtypeStruct(*one) for one in kinds]
    for measure in of_user(measures):
        logits = jnp.asarray(np.random.default_rng(0).normal(size=kinds[0][0]), "f4")
        # Some answers are right, and some are wrong.
        label = (logits.argmax(-1) + jnp.array([0, 0, 1, 1])) % num_classes
        no_rows = logits, label.astype(jnp.int32), jnp.zeros(4, bool)
        try:
            found = jax.eval_shape(measure.sums, *probe)
            is_scalar = not any(one.shape for one in found)
            padding = measure.sums(*no_rows) if is_scalar else ()
        except Exception as error:  # whatever the user's function raises
            reason = options.reason(error)
            raise ValueError(
                f"eval_metrics: {measure.name} fails on logits [B, {num_classes}], "
                f"labels [B] and a mask [B] ({reason})"
            ) from error
        if not is_scalar:
            shapes = ", ".join(str(list(one.shape)) for one in found)
            raise ValueError(
                f"eval_metrics: {measure.name} returns arrays of shapes {shapes}, "
                "expected a sum and a count without axes"
            )
        if any(np.asarray(one) for one in padding):
            odd = "counts rows whose mask is False, which are padding"
            if any(np.isnan(one) for one in padding):
                odd = "gives nan for a batch without a row whose mask is True"
            raise ValueError(
                f"eval_metrics: {measure.name} {odd}; its sum and count must be 0 "
                "there, as by jnp.where(mask, values, 0).sum() and mask.sum()"
            )
        is_real = jnp.arange(4) < 2
        filled = (jnp.where(is_real[:, None], logits, x) for x in (0, 3 * logits[::-1]))
        pair = [np.asarray(measure.sums(one, label, is_real)) for one in filled]
        if not np.allclose(*pair, equal_nan=True):
            raise ValueError(
                f"eval_metrics: {measure.name} counts rows whose mask is False beside "
                "others; sum jnp.where(mask, values, 0), and take no mean of a batch"
            )


def custom_names(measures: Sequence[Measure]) -> set[str]:
    """The metrics of custom measures."""
    names = [one.name for one in of_user(measures)]
    forms = "global_{}", "client_{}", "client_{}_pooled"
    return {form.format(name) for name in names for form in forms}


def of_single(measures: Sequence[Measure]) -> tuple[str, ...]:
    """The names of those that have a value of each single client."""
    return tuple(one.name for one in measures if one.is_mean)


def metrics(
    measures: Sequence[Measure], found: dict[str, Any], known: np.ndarray
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The values of measures by name, without those that are not defined.

    Args:
        found: `server`, the sums of each measure on the union (absent without a
            server's model), and `own`, leaves [K, ...] of the clients' models.
        known: bool[K], the clients that were measured and have test rows.

    Returns:
        (`global_<name>`; `client_<name>_pooled` of the sums over clients; and
        `client_<name>`, the mean over the clients in which it is defined, with the
        number of these as `clients_in_client_<name>` unless they are all clients; the
        values f64[K] behind these means by `of_single`, nan where not defined).
    """
    out: dict[str, float] = {}
    of_each: dict[str, np.ndarray] = {}
    as_numpy = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), found)
    for number, measure in enumerate(measures):
        if "server" in as_numpy:
            sums = as_numpy["server"][number]
            values = measure.finish(jax.tree.map(lambda leaf: leaf[None], sums))
            out |= {f"global_{name}": value[0] for name, value in values.items()}
        if not known.any():
            continue
        own = stacked.at(as_numpy["own"][number], known)
        if measure.sums is None:  # the rows, without missing ones
            is_real = own["label"] > 0
            together = {name: rows[is_real][None] for name, rows in own.items()}
        else:
            together = jax.tree.map(lambda leaf: leaf.sum(0, keepdims=True), own)
        pooled = measure.finish(together)
        out |= {f"client_{name}_pooled": value[0] for name, value in pooled.items()}
        if not measure.is_mean:
            continue
        for name, values in _of_each(measure, own).items():
            of_each[name] = np.full(len(known), np.nan)
            of_each[name][known] = values
            is_defined = ~np.isnan(values)
            out[f"client_{name}"] = _mean_of(values, is_defined)
            if 0 < is_defined.sum() < len(values):
                out[f"{metric_kinds.CLIENTS_IN}client_{name}"] = int(is_defined.sum())
    finite = {
        name: value if isinstance(value, int) else float(value)
        for name, value in out.items()
        if np.isfinite(value)
    }
    return finite, of_each


def _of_each(measure: Measure, sums: Any) -> dict[str, np.ndarray]:
    """`finish` of many clients' sums, leaves [M, ...], for some clients at a time."""
    leaves = jax.tree.leaves(sums)
    size = sum(leaf[0].size for leaf in leaves)
    step = max(FINISHED_NUMBERS // size, 1)
    parts = [
        measure.finish(stacked.at(sums, slice(n, n + step)))
        for n in range(0, len(leaves[0]), step)
    ]
    return {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}
