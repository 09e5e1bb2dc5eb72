"""Titles and units of metrics, and tables of them as text."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pfl import metric_kinds
from fedjax_pfl.metric_kinds import Kind
from launch.config import presets, sweep
from launch.run import summaries
from launch.run.run import Run

# A sentence beside results with `--summary=best`
TOO_GOOD = "The round is the best on test rows: results are too good."


class Metric(NamedTuple):
    """How a metric is shown.

    Attributes:
        name, title: Its name in records, and in tables and pictures.
        better: `higher`, `lower`, or "" if neither is better.
        scale, unit: The factor and sign of percent, (1, "") = a number; of bytes the
            factor of megabytes.
        digits, form: Decimals in tables, and the format of a value in pictures.
        significant: The digits that values below 1 have at least.
    """

    name: str
    kind: Kind
    title: str
    better: str
    scale: float = 1
    unit: str = ""
    digits: int = 3
    form: str = ".3g"
    significant: int = 0

    def decimals(self, value: float) -> int:
        """Those of a value in tables."""
        size = abs(self.scale * value)
        if not self.significant or not 0 < size < 1:
            return self.digits
        least = self.significant - 1 - math.floor(math.log10(size))
        return max(self.digits, least)

    def text(self, entry: Mapping[str, Any]) -> str:
        """A value of a summary, and what it covers unless it is defined everywhere."""
        text = mean_and_std(entry, self.scale, self.decimals(entry["mean"]))
        fewer = summaries.fewer(entry)
        return f"{text} ({fewer})" if fewer else text


_FORMS: dict[Kind, dict[str, Any]] = {
    Kind.FRACTION: {"scale": 100, "unit": "%", "digits": 1, "form": ".1f"},
    Kind.PERPLEXITY: {"digits": 2, "form": ".2f"},
}

# Messages of representations or answers are a few kilobytes.
_MEGABYTES = {"scale": 1e-6, "digits": 1, "form": ",.1f", "significant": 3}
_OWN_FORMS: dict[str, dict[str, Any]] = {
    "bytes_up": _MEGABYTES,
    "bytes_down": _MEGABYTES,
    "best_round": {"digits": 0, "form": ".0f"},
    "fine_tuned_diverged": {"digits": 1, "form": ".1f"},
}

# In the order of tables
TITLES = {
    "global_accuracy": "Global",
    "c_spec": "C-Spec",
    "c_gen": "C-Gen",
    "c_per": "C-Per",
    "client_accuracy": "Client (UA)",
    "trained_accuracy": "Trained",
    "fine_tuned_accuracy": "Fine-tuned",
    "unseen_accuracy": "Unseen",
    "unseen_fine_tuned_accuracy": "Unseen, fine-tuned",
    "train_accuracy": "Global, train rows",
    "exits_disagree": "Exits disagree",
    "dropped_later": "Dropped after round 0",
    "mb_later": "MB after round 0",
    "client_accuracy_pooled": "Client, pooled",
    "fine_tuned_accuracy_pooled": "Fine-tuned, pooled",
    "worst_decile_accuracy": "Worst decile",
    "client_accuracy_std": "Std over clients",
    "ensemble_accuracy": "Ensemble",
    "global_loss": "Global, test loss",
    "client_loss": "Client, test loss",
    "fine_tuned_loss": "Fine-tuned, test loss",
    "unseen_loss": "Unseen, test loss",
    "unseen_fine_tuned_loss": "Unseen, fine-tuned, test loss",
    "fine_tuned_diverged": "Diverged in fine-tuning",
    "best_round": "Best round",
    "dropped": "dropped",
    "critical": "critical",
    "mean_layer": "mean layer",
    "peers": "peers",
}
# A text has perplexities instead of accuracies.
TITLES |= {
    name.replace("accuracy", "perplexity"): title
    for name, title in TITLES.items()
    if "accuracy" in name
} | {"client_perplexity": "Client"}
TITLES |= {
    "global_macro_f1": "Global macro F1",
    "client_macro_f1": "Client macro F1",
    "client_macro_f1_pooled": "Client macro F1, pooled",
    "global_balanced_accuracy": "Global balanced accuracy",
    "client_balanced_accuracy": "Client balanced accuracy",
    "client_balanced_accuracy_pooled": "Client balanced accuracy, pooled",
    "global_auc": "Global AUC",
    "client_auc": "Client AUC",
    "client_auc_pooled": "Client AUC, pooled",
    "global_ece": "Global calibration error",
    "client_ece": "Client calibration error",
    "client_ece_pooled": "Client calibration error, pooled",
    "masked_perplexity": "Global, masked",
    "client_masked_perplexity": "Client, pooled, masked",
    "trained_masked_perplexity": "Trained, masked",
    "fine_tuned_masked_perplexity": "Fine-tuned, pooled, masked",
    "unseen_masked_perplexity": "Unseen, pooled, masked",
    "unseen_fine_tuned_masked_perplexity": "Unseen, fine-tuned, pooled, masked",
    "train_masked_perplexity": "Global, train rows, masked",
    "worst_decile_masked_perplexity": "Worst decile, masked",
    "client_masked_perplexity_std": "Std over clients, masked",
    "ensemble_masked_perplexity": "Ensemble, masked",
    "bytes_up": "MB up",
    "bytes_down": "MB down",
    "clock": "Clock, s",
}
# What an axis says instead of a title, without the unit
AXES = {
    "global_accuracy": "accuracy of the server's model",
    "client_accuracy": "mean accuracy of clients",
    "trained_accuracy": "mean accuracy of clients after training",
    "fine_tuned_accuracy": "mean accuracy of fine-tuned clients",
    "unseen_accuracy": "mean accuracy of unseen clients",
    "worst_decile_accuracy": "mean accuracy of the worst tenth of clients",
}
# The metrics at the top of tables and in lines of progress
_HEADLINE = re.compile(
    r"c_(spec|gen|per)|(global|client|trained)_(accuracy|perplexity)"
    r"|((client|trained)_)?masked_perplexity"
)
HEADLINES = tuple(filter(_HEADLINE.fullmatch, TITLES))
_NEITHER_BETTER = re.compile(r"best_round|exits_disagree|dropped(_later)?|critical")
_LOWER_BETTER = re.compile(
    r"mb_later|client_accuracy_std|(global|client)_ece(_pooled)?|bytes_(up|down)|clock"
    r"|fine_tuned_diverged"
)
_OF_CLASS = re.compile(r"(global|client)_class(\d+)_accuracy(_pooled)?")
_OF_EXIT = re.compile(r"exit(\d+)_(accuracy|loss|(masked_)?perplexity)")
NOT_TO_CHOOSE_BY = (
    "These are measured on test rows, and choosing a point by them would be training "
    "on the test set"
)


def headlines(found: Collection[str]) -> list[str]:
    """The headline metrics in `found`; masked ones only if there are no others."""
    shown = [name for name in HEADLINES if name in found]
    plain = [name for name in shown if "masked" not in name]
    return plain or shown


def metric(
    name: str, known: Mapping[str, Kind] = {}, classes: Sequence[str] = ()
) -> Metric:
    """How a metric is shown; `known` are declared kinds, `classes` as in `title`.

    Of a custom function's numbers neither is better, unless its name has `accuracy`.
    """
    kind, better = metric_kinds.of(name, known), "higher"
    plain = name.removeprefix(metric_kinds.VALIDATION)
    if _NEITHER_BETTER.fullmatch(plain):
        better = ""
    elif kind in (Kind.LOSS, Kind.PERPLEXITY) or _LOWER_BETTER.fullmatch(plain):
        better = "lower"
    elif kind is metric_kinds.of(plain) is Kind.NUMBER:
        better = ""
    form = _OWN_FORMS.get(plain, _FORMS.get(kind, {}))
    return Metric(name, kind, title(name, classes), better, **form)


def title(name: str, classes: Sequence[str] = ()) -> str:
    """A metric's name in tables and pictures; classes without names have numbers."""
    if found := _OF_CLASS.fullmatch(name):
        number = int(found[2])
        label = classes[number] if number < len(classes) else number
        return f"{found[1].capitalize()}, class {label}"
    if found := _OF_EXIT.fullmatch(name):
        more = ", masked" if found[3] else ", test loss" * (found[2] == "loss")
        return f"Exit {found[1]}{more}"
    if name.startswith(metric_kinds.VALIDATION):
        rest = title(name.removeprefix(metric_kinds.VALIDATION), classes)
        return f"Val: {rest.replace('test loss', 'loss')}"
    return TITLES.get(name, name.replace("_", " "))


def axis(metric: Metric) -> str:
    """The label of a metric's axis, such as `mean accuracy of clients (%)`."""
    plain = metric.name.removeprefix(metric_kinds.VALIDATION)
    text = metric.title
    if plain in AXES:
        text = AXES[plain] + ", validation rows" * (plain != metric.name)
    elif metric.kind is Kind.PERPLEXITY:
        text += ", perplexity"
    return f"{text} ({metric.unit})" if metric.unit else text


def mean_and_std(
    entry: Mapping[str, Any], scale: float, digits: int, sign: str = "±", width: int = 1
) -> str:
    """A metric's mean over seeds, and its standard deviation if there are several.

    `entry` has `mean`, `std` and `per_seed`. A `scale` of 100 gives percent, and the
    mean is padded to `width`.
    """
    text = f"{scale * entry['mean']:z{width}.{digits}f}"
    if len(entry["per_seed"]) < 2:
        return text
    return f"{text} {sign} {scale * entry['std']:.{digits}f}"


def paired(gap: np.ndarray, digits: int = 1) -> str:
    """Mean and standard deviation of differences by seed, such as `+1.3 ± 0.4`."""
    std = f" ± {gap.std(ddof=1):.{digits}f}" if len(gap) > 1 else ""
    return f"{gap.mean():+z.{digits}f}{std}"


def headline(
    records: Sequence[dict[str, Any]], points: Sequence[sweep.Point] = ({},)
) -> dict[str, str]:
    """Texts of the headline metrics, mean over seeds; for a sweep their ranges."""
    if len(points) > 1:
        lines = [headline(sweep.of_point(records, point)) for point in points]
        out = {}
        for name in dict.fromkeys(name for line in lines for name in line):
            # A diverged point, whose text is nan, counts as the largest.
            texts = [line.get(name, "nan") for line in lines]
            texts.sort(key=lambda text: (text == "nan", float(text)))
            out[name] = " to ".join(dict.fromkeys((texts[0], texts[-1])))
        return out
    shared = set.intersection(*map(set, records))
    # C-Spec, C-Gen and C-Per replace the clients' accuracy.
    hidden = {"client_accuracy"} if "c_gen" in shared else set()

    def mean(name: str) -> float:
        return sum(record[name] for record in records) / len(records)

    known = map(metric, headlines(shared - hidden))
    out = {how.title: f"{how.scale * mean(how.name):.{how.digits}f}" for how in known}
    loss = {"loss": f"{mean('train_loss'):.3f}"} if "train_loss" in shared else {}
    return out | loss


def early_stop(config: Any, rounds: int) -> str:
    """The line about a run that validation has ended."""
    return (
        f"--early_stop={config.early_stop}: no validation became better in the last "
        f"{config.early_stop} rounds, so the run ends after round {rounds}"
    )


def diverged(round: int | None) -> str:
    """A text for a run that diverged in a round, "" for any other."""
    return f"diverged in round {round}" if round else ""


def meaningless(summary: Mapping[str, Any]) -> str:
    """What a divergence means for the metrics of a run that has diverged."""
    line = "losses or parameters are not finite, so the accuracies are meaningless"
    best = summary["metrics"].get("best_round", {}).get("per_seed", ())
    later = "results of later ones are meaningless"
    if len(best) > 1:  # of which not all may have diverged
        line = f"the best round of each seed that diverged was before that; {later}"
    elif best and best[0] < (summary.get("diverged") or 0):
        line = f"the best round was before that; {later}"
    return line


def rules(run: Run, is_alone: bool = True) -> list[str]:
    """The rules that a run follows, and notes about its options; see `sentence`."""
    notes = [f"note: {note}" for note in run.notes]
    return [presets.sentence(run.config.preset, is_alone), *notes]


def equal_parameters(hashes: Mapping[str, str | None]) -> list[str]:
    """Lines about runs with equal parameters; `hashes` are SHA-256 or None by run."""
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
    """An experiment in a line, followed by its current results if there are any."""
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
    """The final table: mean and std over seeds, fractions in percent, then numbers.

    The last round's value is beside that of another summary rule. A sweep has a line
    for each point.
    """
    lines = _sweep_lines(summary) if "sweep" in summary else _lines(summary)
    if summary.get("diverged") and "sweep" not in summary:  # whose points say so
        lines.append(f"{diverged(summary['diverged'])}: {meaningless(summary)}")
    # Summaries of earlier versions have no step counts.
    steps = summary.get("step_efficiency")
    of_steps = "" if steps is None else f"of steps {steps:.2f}, "
    # 1 on one device
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
    """The devices of a run in words, such as `4 devices (TPU v5e)`."""
    return f"{count} device{'s' * (count > 1)} ({name})"


def summary_rule(summary: Mapping[str, Any]) -> str:
    """The summary rule in words; earlier versions recorded only its name."""
    return summary.get("summary_of", summary["summary"])


def _sweep_lines(summary: dict[str, Any]) -> list[str]:
    """A line for each point of a sweep, with the headline metrics."""
    parts = summary["sweep"]
    names = headlines(dict.fromkeys(n for part in parts for n in part["metrics"]))
    labels = [sweep.label(part["point"]) for part in parts]
    width = max(map(len, labels))
    every = [entry for part in parts for entry in part["metrics"].values()]
    seeds = max((len(entry["per_seed"]) for entry in every), default=1)
    spread = f" +- std over {seeds} seeds" if seeds > 1 else ""
    titles = "  ".join(f"{title(name):>16}" for name in names)
    kind = "percent" if all(metric(name).unit for name in names) else "number"
    lines = [f"{'point':<{width}}  {titles}  {kind}{spread} ({summary_rule(summary)})"]
    for label, part in zip(labels, parts, strict=True):
        cells = []
        for name in names:
            entry, scale, text = part["metrics"].get(name), metric(name).scale, "–"
            if entry:
                text = mean_and_std(entry, scale, digits=2, sign="+-")
                if fewer := summaries.fewer(entry):
                    text += f" ({fewer})"
            cells.append(f"{text:>16}")
        texts = filter(None, [*cells, diverged(part.get("diverged"))])
        lines.append(f"{label:<{width}}  " + "  ".join(texts))
    best = chosen(parts, summary.get("choose_by", ""))
    return [*lines, best or f"{NOT_TO_CHOOSE_BY}."]


def chosen(parts: Sequence[Mapping[str, Any]], choose_by: str = "") -> str:
    """A line about the point of a sweep with the best validation, "" without any.

    `parts` are summaries with their `point`, and `choose_by` is as in
    `summaries.choosing`.
    """
    labels = [sweep.label(part["point"]) for part in parts]
    whole = [not part.get("diverged") for part in parts]
    every = [part["metrics"] for part in parts]
    known = [one for one, is_whole in zip(every, whole, strict=True) if is_whole]
    names = summaries.choosing(choose_by=choose_by)
    measured = [name for name in names if any(name in one for one in known)]
    if not measured:
        return ""
    how, nothing = metric(measured[0]), {"mean": np.nan}
    means = [one.get(measured[0], nothing)["mean"] for one in every]
    sign = 1 if how.better == "lower" else -1
    is_known = np.array(whole) & np.isfinite(means)
    best = int(np.argmin(np.where(is_known, sign * np.array(means), np.inf)))
    value = f"{how.scale * means[best]:.{max(how.digits, 2)}f}"
    num_equal = int((np.array(means)[is_known] == means[best]).sum())
    equal = f", the first of {num_equal} that are equal" if num_equal > 1 else ""
    return f"best by validation rows: {labels[best]} ({how.title} {value}{equal})"


def megabytes(size: float) -> str:
    """A number of bytes in megabytes."""
    how = metric("bytes_up")
    return f"{how.scale * size:,.{how.decimals(size)}f}"


def setup_megabytes(summary: Mapping[str, Any]) -> str:
    """The megabytes of the proxy set for all clients, "" if none is sent.

    They are in no other number of bytes.
    """
    size = summary.get("setup_bytes_down", 0)
    return megabytes(size) if size else ""


def _lines(summary: dict[str, Any]) -> list[str]:
    """The lines of metrics for a run without a sweep."""
    every = summary["metrics"].values()
    seeds = max((len(entry["per_seed"]) for entry in every), default=1)
    spread = f" +- std over {seeds} seeds" if seeds > 1 else ""
    known = summaries.kinds(summary)
    shown = [metric(name, known) for name in known]
    last = summary.get("last_round", {}) if summary["summary"] != "last" else {}
    lines = []
    for kind, unit in ("percent", "%"), ("number", ""):
        if found := [one for one in shown if one.unit == unit]:
            width = max(18, *(len(one.title) for one in found))
            head = f"{'metric':<{width}} {kind}{spread}  ({summary_rule(summary)})"
            lines.append(f"{head}  last round" if last else head)
        for one in found:
            # Percents have one more decimal than in a table of several runs.
            digits, entry = max(one.digits, 2), summary["metrics"][one.name]
            text = mean_and_std(entry, one.scale, digits, "+-", width=6)
            line = f"{one.title:<{width}} {text}"
            if one.name in last:
                value = f"{one.scale * last[one.name]['mean']:.{digits}f}"
                line = f"{line:<{len(head)}}  {value:>10}"
            fewer, at_end = map(summaries.fewer, (entry, last.get(one.name, {})))
            if at_end and at_end != fewer:
                fewer = ", ".join(filter(None, [fewer, f"last round: {at_end}"]))
            lines.append(f"{line}  ({fewer})" if fewer else line)
    for name in summary.get("undefined", ()):
        lines.append(f"{name:<18} is not defined in any of these rounds")
    # They add up from round to round, and the rule chooses none.
    whole = "" if summary["summary"] == "last" else "  (all rounds)"
    for name in ("bytes_up", "bytes_down"):
        if name in summary["metrics"]:
            value = megabytes(summary["metrics"][name]["mean"])
            lines.append(f"{'MB ' + name[6:]:<18} {value}{whole}")
    if first := setup_megabytes(summary):
        what = "the proxy set, which every client gets once and the line above lacks"
        lines.append(f"{'MB at first':<18} {first}  ({what})")
    if "clock" in summary["metrics"]:
        value = summary["metrics"]["clock"]["mean"]
        lines.append(f"{'simulated seconds':<18} {value:,.1f}{whole}")
    return lines
