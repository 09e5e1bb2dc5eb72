"""The kind of a metric, which decides how it is shown and which values are better.

An evaluated metric has its kind in its name. Rounds declare which of their metrics are
fractions, see `types.Algorithm.shares`. Those of custom functions never are.
"""

import enum
import re
from collections.abc import Collection, Iterable, Mapping


class Kind(enum.Enum):
    """What a metric is: a fraction 0..1 is shown in percent, all others as numbers."""

    FRACTION = enum.auto()
    NUMBER = enum.auto()
    LOSS = enum.auto()
    PERPLEXITY = enum.auto()


# Before the metrics on validation rows, and before those after fine-tuning
VALIDATION, FINE_TUNED = "val_", "fine_tuned_"
# What a run measures of every single client: the first of labels, the other of texts
ACCURACY, PERPLEXITY = "accuracy", "perplexity"
# Before a metric's name: the number of clients in its mean, if not all
CLIENTS_IN = "clients_in_"
# In a record: the clients in the other means over clients, if not all
EVALUATED = "clients_evaluated"

# The last two belong to rounds. Unfinished runs have no summary that declares them.
_FRACTION = re.compile(
    r".*accuracy.*|c_(spec|gen|per)|(\w+_)?exits_disagree"
    r"|(global|client)_(macro_f1|auc|ece)(_pooled)?|dropped(_later)?|critical"
)
# What evaluations and records call theirs
_MEASURED = re.compile(
    r"(val_|clients_in_)*((unseen_)?(global|client|unseen|fine_tuned|worst_decile)_"
    r"(accuracy|loss|perplexity|masked_perplexity|macro_f1|auc|ece).*"
    r"|client_(balanced|class\d+)_accuracy.*|fine_tuned_diverged"
    r"|train_(accuracy|perplexity|masked_perplexity)|best_round"
    r"|(\w+_)?((exit\d+|ensemble)_(accuracy|perplexity|masked_perplexity)"
    r"|exits_disagree|masked_perplexity)"
    r"|(val_)?clients_evaluated|c_(spec|gen|per)|bytes_(up|down)"
    r"|round|seed|seconds|clock|diverged)"
)


def is_measured(name: str) -> bool:
    """Whether a round's own metric of this name would be taken for another one."""
    return _MEASURED.fullmatch(name) is not None


def of(name: str, known: Mapping[str, Kind] = {}) -> Kind:
    """The kind of a metric: that in `known`, or else that of its name."""
    if name in known:
        return known[name]
    name = name.removeprefix(VALIDATION)
    if name in known:
        return known[name]
    if "perplexity" in name:
        return Kind.PERPLEXITY
    if name.removesuffix("_pooled").endswith("_loss"):
        return Kind.LOSS
    return Kind.FRACTION if _FRACTION.fullmatch(name) else Kind.NUMBER


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of other rows under names of their own, without those of no such rows."""
    out = {}
    for name, value in metrics.items():
        if name.startswith("train_"):
            continue
        mean = name.removeprefix(CLIENTS_IN)
        out[(CLIENTS_IN if mean != name else "") + prefix + mean] = value
    return out


def declared(names: Iterable[str], fractions: Collection[str]) -> dict[str, Kind]:
    """The kinds of metrics by name. Only `fractions` are fractions."""
    out = {}
    for name in names:
        by_name = Kind.NUMBER if of(name) is Kind.FRACTION else of(name)
        out[name] = Kind.FRACTION if name in fractions else by_name
    return out
