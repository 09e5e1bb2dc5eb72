"""The metrics' titles and units, and tables of them as text."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from launch.config import presets, sweep
from launch.run import summaries
from launch.run.run import Run


class Metric(NamedTuple):
    """A description of a metric.

    Attributes:
        title: Its name in tables and pictures.
        is_fraction: Whether it is a fraction, shown in percent, or a number.
        better: `higher`, `lower`, or "" if neither is better.
        is_headline: Whether it heads a table and a line of progress.
        digits: Decimals of a number in tables.
    """

    title: str
    is_fraction: bool = True
    better: str = "higher"
    is_headline: bool = False
    digits: int = 3


# The order is that of tables. Other metrics that an algorithm's rounds measure are
# described by `types.Algorithm.shares`.
METRICS = {
    "global_accuracy": Metric("Global", is_headline=True),
    "c_spec": Metric("C-Spec", is_headline=True),
    "c_gen": Metric("C-Gen", is_headline=True),
    "c_per": Metric("C-Per", is_headline=True),
    "client_accuracy": Metric("Client (UA)", is_headline=True),
    "trained_accuracy": Metric("Trained", is_headline=True),
    "train_accuracy": Metric("Global, train rows"),
    "exits_disagree": Metric("Exits disagree", better=""),
    "dropped_later": Metric("Dropped after round 0", better=""),
    "mb_later": Metric("MB after round 0", is_fraction=False, better="lower"),
    "client_accuracy_pooled": Metric("Client, pooled"),
    "worst_decile_accuracy": Metric("Worst decile"),
    "client_accuracy_std": Metric("Std over clients", better="lower"),
    "ensemble_accuracy": Metric("Ensemble"),
    "global_loss": Metric("Global, test loss", is_fraction=False, better="lower"),
    "client_loss": Metric("Client, test loss", is_fraction=False, better="lower"),
    "train_loss": Metric("train loss", is_fraction=False, better="lower"),
    "dropped": Metric("dropped", better=""),
    "critical": Metric("critical", better=""),
}
# A text has perplexities in the place of accuracies.
METRICS |= {
    name.replace("accuracy", "perplexity"): one._replace(
        is_fraction=False, better="lower", digits=2
    )
    for name, one in METRICS.items()
    if "accuracy" in name
}
# Those of `--eval_metrics` but for classes and custom ones
_MEASURES = {
    "macro_f1": Metric("macro F1"),
    "balanced_accuracy": Metric("balanced accuracy"),
    "auc": Metric("AUC"),
    "ece": Metric("calibration error", better="lower"),
}
METRICS |= {
    form.format(name): one._replace(title=f"{title} {one.title}{more}")
    for name, one in _MEASURES.items()
    for form, title, more in (
        ("global_{}", "Global", ""),
        ("client_{}", "Client", ""),
        ("client_{}_pooled", "Client", ", pooled"),
    )
}
_NUMBER = METRICS["global_perplexity"]
METRICS |= {
    "client_perplexity": _NUMBER._replace(title="Client"),
    "masked_perplexity": _NUMBER._replace(title="Global, masked"),
    "client_masked_perplexity": _NUMBER._replace(title="Client, pooled, masked"),
}
METRICS |= {
    name.replace("perplexity", "masked_perplexity"): METRICS[name]._replace(
        title=f"{METRICS[name].title}, masked"
    )
    for name in (
        "trained_perplexity",
        "train_perplexity",
        "worst_decile_perplexity",
        "client_perplexity_std",
        "ensemble_perplexity",
    )
}
_OF_CLASS = re.compile(r"(global|client)_class(\d+)_accuracy(_pooled)?")
NOT_TO_CHOOSE_BY = (
    "These are measured on test rows, and choosing a point by them would be training "
    "on the test set"
)
HEADLINES = tuple(name for name, metric in METRICS.items() if metric.is_headline)


def headlines(found: Collection[str]) -> list[str]:
    """The headline metrics among others.

    A masked perplexity is one of them where no other perplexity was measured.
    """
    shown = [name for name in HEADLINES if name in found]
    plain = [name for name in shown if "masked" not in name]
    return plain or shown


def metric(name: str) -> Metric:
    """The description of a metric, for unknown ones derived from the name."""
    if name in METRICS:
        return METRICS[name]
    if of_class := _OF_CLASS.fullmatch(name):
        return Metric(f"{of_class[1].capitalize()}, class {of_class[2]}")
    exit = re.fullmatch(r"exit(\d+)_(accuracy|(masked_)?perplexity)", name)
    title = f"Exit {exit[1]}" if exit else name.replace("_", " ")
    title += ", masked" if exit and exit[3] else ""
    if not summaries.is_fraction(name):
        return METRICS["global_perplexity"]._replace(title=title, is_headline=False)
    return Metric(title, is_fraction="accuracy" in name)


def title(name: str, classes: Sequence[str] | None = None) -> str:
    """A metric's name in tables and pictures; `classes` are the names of classes."""
    found = _OF_CLASS.fullmatch(name)
    if found and classes and int(found[2]) < len(classes):
        return f"{found[1].capitalize()}, class {classes[int(found[2])]}"
    return metric(name).title


def is_evaluated(name: str) -> bool:
    """Whether a number is measured on test rows: a perplexity, a loss, a custom one."""
    return not summaries.is_fraction(name) or name.startswith(("global_", "client_"))


def is_fraction(name: str, known: Mapping[str, bool]) -> bool:
    """Whether a metric is shown in percent; `known` are descriptions by the run."""
    return known.get(name, metric(name).is_fraction)


def unit(name: str, is_fraction: bool) -> tuple[int, int]:
    """(factor, digits) of a metric in tables, for percent or for a number."""
    return (100, 1) if is_fraction else (1, metric(name).digits)


def mean_and_std(
    entry: Mapping[str, Any], scale: float = 100, digits: int = 1, sign: str = "±"
) -> str:
    """A metric's mean over seeds, and its standard deviation if there are several.

    `entry` has `mean`, `std` and `per_seed`. A `scale` of 100 gives percent.
    """
    text = f"{scale * entry['mean']:.{digits}f}"
    if len(entry["per_seed"]) < 2:
        return text
    return f"{text} {sign} {scale * entry['std']:.{digits}f}"


def paired(gap: np.ndarray, digits: int = 1) -> str:
    """Mean and standard deviation of differences by seed, such as `+1.3 ± 0.4`."""
    std = f" ± {gap.std(ddof=1):.{digits}f}" if len(gap) > 1 else ""
    return f"{gap.mean():+.{digits}f}{std}"


def headline(
    records: Sequence[dict[str, Any]], points: Sequence[sweep.Point] = ({},)
) -> dict[str, str]:
    """The headline metrics in percent or as numbers, mean over the seeds.

    For a sweep each is the range of its points' means.
    """
    if len(points) > 1:
        lines = [headline(sweep.of_point(records, point)) for point in points]
        out = {}
        for name in lines[0]:
            # A diverged point, whose text is nan, counts as the largest.
            texts = [line[name] for line in lines]
            texts.sort(key=lambda text: (text == "nan", float(text)))
            out[name] = " to ".join(dict.fromkeys((texts[0], texts[-1])))
        return out
    shared = set.intersection(*(set(record) for record in records))
    # With C-Spec, C-Gen and C-Per a fourth accuracy of the clients is not shown.
    hidden = {"client_accuracy"} if "c_gen" in shared else set()

    def mean(name: str) -> float:
        return sum(record[name] for record in records) / len(records)

    out = {}
    for name in headlines(shared - hidden):
        scale, digits = unit(name, metric(name).is_fraction)
        out[title(name)] = f"{scale * mean(name):.{digits}f}"
    loss = {"loss": f"{mean('train_loss'):.3f}"} if "train_loss" in shared else {}
    return out | loss


def diverged(round: int | None) -> str:
    """Words for a run that diverged in a round, "" for any other."""
    return f"diverged in round {round}" if round else ""


def rules(run: Run) -> str:
    """The rules that a run follows, and notes about how its options were taken."""
    notes = [f"note: {note}" for note in run.notes]
    return "\n".join((presets.sentence(run.config.preset), *notes))


def equal_parameters(hashes: Mapping[str, str | None]) -> list[str]:
    """Lines about runs that have ended with equal parameters.

    `hashes` are the SHA-256 of the parameters by the run's name, None = not known.
    """
    names: dict[str, list[str]] = {}
    for name, digest in hashes.items():
        if digest:
            names.setdefault(digest, []).append(name)
    return [
        f"{' and '.join(equal)} have equal parameters, bit for bit"
        for equal in names.values()
        if len(equal) > 1
    ]


def described(run: Run) -> str:
    """An experiment in a line, and its present results if there are any."""
    config = run.config
    seeds = f", {len(run.seeds)} seeds" if len(run.seeds) > 1 else ""
    line = (
        f"{config.algo} on {config.dataset} ({config.partition}): {config.num_clients} "
        f"clients, {config.clients_per_round} a round, {config.model}, round "
        f"{run.round} of {config.rounds}{seeds}, rules: {config.preset}"
    )
    if not run.metrics:
        return line
    return f"{line}\n{table(run.summary())}"


def table(summary: dict[str, Any]) -> str:
    """The final table: fractions in percent, then numbers; mean and std over the seeds.

    The value of the last round is beside that of the summary rule. A sweep has a line
    for each point.
    """
    lines = _sweep_lines(summary) if "sweep" in summary else _lines(summary)
    if summary.get("diverged"):
        lines.append(
            f"{diverged(summary['diverged'])}: losses or parameters are not finite, so "
            "the accuracies are meaningless"
        )
    # Summaries of earlier versions have no step counts.
    steps = summary.get("step_efficiency")
    of_steps = "" if steps is None else f"of steps {steps:.2f}, "
    # It is 1 on one device.
    balance = summary.get("device_balance", 1.0)
    of_devices = "" if balance == 1 else f" and of devices {balance:.2f}"
    lines.append(
        f"{summary['samples_per_second']:,.0f} samples/s, "
        f"{summary['client_updates_per_second']:.1f} client updates/s, compiled in "
        f"{summary['compile_seconds']:.0f} s, efficiency {of_steps}of padding "
        f"{summary['padding_efficiency']:.2f}{of_devices}, on "
        f"{devices(summary.get('num_devices', 1), summary['device'])}"
    )
    return "\n".join(lines)


def devices(count: int, name: str) -> str:
    """How many devices of which kind."""
    return f"{count} device{'s' * (count > 1)} ({name})"


def summary_rule(summary: Mapping[str, Any]) -> str:
    """The summary rule in words; earlier versions recorded only its name."""
    return summary.get("summary_of", summary["summary"])


def _sweep_lines(summary: dict[str, Any]) -> list[str]:
    """A line for each point of a sweep, with the headline metrics."""
    parts = summary["sweep"]
    names = headlines(parts[0]["metrics"])
    labels = [sweep.label(part["point"]) for part in parts]
    width = max(map(len, labels))
    seeds = len(parts[0]["metrics"][names[0]]["per_seed"]) if names else 1
    spread = f" +- std over {seeds} seeds" if seeds > 1 else ""
    titles = "  ".join(f"{title(name):>16}" for name in names)
    kind = "percent" if all(metric(name).is_fraction for name in names) else "number"
    lines = [f"{'point':<{width}}  {titles}  {kind}{spread} ({summary_rule(summary)})"]
    for label, part in zip(labels, parts, strict=True):
        cells = []
        for name in names:
            scale, _ = unit(name, metric(name).is_fraction)
            text = mean_and_std(part["metrics"][name], scale, digits=2, sign="+-")
            cells.append(f"{text:>16}")
        texts = filter(None, [*cells, diverged(part.get("diverged"))])
        lines.append(f"{label:<{width}}  " + "  ".join(texts))
    return [*lines, f"{NOT_TO_CHOOSE_BY}."]


def _lines(summary: dict[str, Any]) -> list[str]:
    """The lines of the metrics of a run without a sweep."""
    seeds = len(next(iter(summary["metrics"].values()))["per_seed"])
    spread = f" +- std over {seeds} seeds" if seeds > 1 else ""
    shown = [n for n in summary["metrics"] if not n.startswith("bytes")]
    numbers = [n for n in shown if summaries.is_number(summary, n)]
    fractions = [n for n in shown if n not in numbers]
    last = summary.get("last_round", {}) if summary["summary"] != "last" else {}
    lines = []
    for kind, names, scale in ("percent", fractions, 100), ("number", numbers, 1):
        if names:
            head = f"{'metric':<18} {kind}{spread}  ({summary_rule(summary)})"
            lines.append(f"{head}  last round" if last else head)
        for name in names:
            digits = 2 if kind == "percent" else metric(name).digits
            entry = summary["metrics"][name]
            std = (
                f" +- {scale * entry['std']:.{digits}f}"
                if len(entry["per_seed"]) > 1
                else ""
            )
            line = f"{title(name):<18} {scale * entry['mean']:6.{digits}f}{std}"
            if name in last:
                value = f"{scale * last[name]['mean']:.{digits}f}"
                line = f"{line:<{len(head)}}  {value:>10}"
            fewer = summaries.fewer(entry)
            lines.append(f"{line}  ({fewer})" if fewer else line)
    for name in summary.get("undefined", ()):
        lines.append(f"{name:<18} is not defined in any of these rounds")
    for name in ("bytes_up", "bytes_down"):
        if name in summary["metrics"]:
            value = summary["metrics"][name]["mean"] / 1e6
            lines.append(f"{'MB ' + name[6:]:<18} {value:,.1f}")
    return lines
