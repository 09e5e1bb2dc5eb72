"""Numbers of a run beside a control on the same clients, and of fine-tuned clients.

All are by seed, in the form of a summary's metric: {mean, std, per_seed}.
"""

import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import models
from fedjax_pfl import metric_kinds, options
from launch.folder import finished, record
from launch.folder.record import Record
from launch.run import summaries
from launch.show import curves, words

TITLES = {
    "hurt": "Hurt",
    "gain": "Gain",
    "bottom_decile": "Bottom decile",
    "until_rounds": "Rounds until",
    "until_mb": "MB until",
    "until_clock": "Clock until, s",
}
PLACES = {"until_rounds": "rounds", "until_mb": "bytes", "until_clock": "clock"}
# What a round of a decentralised method says of its peers
_OF_PEERS = re.compile(r"divergence_(median|p95|\d+_\d+)")
# Metrics that no rows are measured for
_OF_RUNS = ("bytes_up", "bytes_down", "clock", "best_round")
# Where clients have several models
_OF_MODEL = re.compile(r"client_(?:accuracy|perplexity|masked_perplexity)_(\w+)")
_FINE_TUNED = re.compile(r"(val_)?(unseen_|)fine_tuned_(.*)")


class Goal(NamedTuple):
    """What `until_...` wait for: a `share` of the control's result, or a `value`."""

    share: float = 0.95
    value: float | None = None


def goal(until: float | None, target: float | None) -> Goal:
    """The goal of a table's arguments; a ValueError of one line if one is odd."""
    for name, value, expected in (
        ("until", until, "a share above 0, such as 0.95"),
        ("target", target, "a value above 0, such as 0.8"),
    ):
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if value is not None and not (is_number and value > 0):
            raise ValueError(f"{name}={value!r}: expected {expected}")
    if until is not None and target is not None:
        raise ValueError(
            f"until={until} is a share of the control's result and target={target} a "
            "value itself; give one of them"
        )
    return Goal(value=target) if until is None else Goal(until)


def check_fraction(target: float | None) -> None:
    """Refuses (ValueError) the target of an accuracy that is given in percent."""
    if target is not None and target > 1:
        raise ValueError(
            f"target={target:g}: accuracies are fractions; give {target / 100:g}"
        )


def main_metric(runs: Sequence[Record]) -> str:
    """The accuracy of the clients' models, or their perplexity, in runs of one kind.

    A text's run that diverged has none, and any other run tells.
    """
    names = [f"client_{record.measured(runs[0])}", "client_masked_perplexity"]
    found = set().union(*(run.summary["metrics"] for run in runs))
    return next((name for name in names if name in found), names[0])


def followed(runs: Sequence[Record]) -> str:
    """The metric of `until_...`: the main one, or the server's if clients have none."""
    main = main_metric(runs)
    found = set().union(*(run.summary["metrics"] for run in runs))
    servers = main.replace("client_", "global_"), main.removeprefix("client_")
    has_clients = main.replace("client_", "trained_") in found
    others = () if has_clients else servers
    return next((name for name in (main, *others) if name in found), main)


def metric(name: str, runs: Sequence[Record]) -> words.Metric:
    """How a metric of a run or one of `TITLES` is shown."""
    if name not in TITLES:
        return words.metric(name, record.kinds(runs))
    base = words.metric(main_metric(runs), record.kinds(runs))
    if name in ("gain", "bottom_decile"):
        return base._replace(name=name, title=TITLES[name])
    scale, unit = (100, "%") if name == "hurt" else (1, "")
    made = words.Metric(name, base.kind, TITLES[name], "lower", scale, unit, digits=1)
    return made._replace(significant=3) if name == "until_mb" else made


def unusual(name: str) -> str:
    """A line about a name that no metric here has, or nothing."""
    plain, known = name.removeprefix(metric_kinds.VALIDATION), [*words.TITLES, *TITLES]
    counted = plain.startswith(metric_kinds.CLIENTS_IN)
    if counted or plain in ("train_loss", "seconds", "round", "seed"):
        return f"the metric {name} is in records, and in no table"
    of_model = _OF_MODEL.fullmatch(plain)
    is_ours = plain in known or words.title(plain) != plain.replace("_", " ")
    is_ours |= bool(of_model) and of_model[1] in models.MODELS
    is_ours |= _OF_PEERS.fullmatch(plain) is not None
    if plain != name and (of_model or plain in (*TITLES, *_OF_RUNS)):
        return f"there is no metric {name}: {plain} is not measured on validation rows"
    near = "" if is_ours else options.nearest(plain, known)
    is_odd = near or not (is_ours or metric_kinds.is_measured(plain))
    return f"{name} is not a metric of this package{near}" if is_odd else ""


def fine_tuned(run: Record) -> Record:
    """The run with its fine-tuned clients in place of those that serve.

    `fine_tuned_accuracy` becomes `client_accuracy`, `unseen_fine_tuned_accuracy`
    becomes `unseen_accuracy`, and likewise losses, perplexities and validation rows.
    What is known only of the models that serve, such as their worst decile, is left
    out, as are the metrics of other models.
    """

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        out = {}
        for name, value in values.items():
            if name in summaries.COUNTS_OF_FEW:
                out[name] = value
            elif found := _FINE_TUNED.fullmatch(name):
                prefix, group, rest = found.groups("")
                out[f"{prefix}{group or 'client_'}{rest}"] = value
            elif name in summaries.COUNTERS or name == "best_round":
                out[name] = value
        return out

    parts = ("metrics", "last_round")
    changed = {name: renamed(run.summary.get(name, {})) for name in parts}
    clients = dict(run.clients)
    if (name := finished.FINE_TUNED + record.measured(run)) in clients:
        clients[record.measured(run)] = clients.pop(name)
    summary = run.summary | changed
    records = [renamed(one) for one in run.records]
    kinds = renamed(run.kinds)
    return run._replace(summary=summary, records=records, clients=clients, kinds=kinds)


def of(
    name: str, run: Record, control: Record | None, goal: Goal
) -> dict[str, Any] | None:
    """A metric of `TITLES` for a run, None where it is not known.

    * hurt: the share of clients with a worse value than with the control;
    * gain: the mean over clients of the value less the control's;
    * bottom_decile: the mean over the worst tenth of the clients;
    * until_rounds, until_mb, until_clock: the first evaluated round after which the
      metric of `followed` reaches the goal, with its messages and simulated seconds.
      Seeds that never do are left out and said; {} where none does.

    Raises a ValueError for a goal above 1 of an accuracy.
    """
    if name in PLACES:
        _, place = curves.PLACES[PLACES[name]]
        return _until(run, control, goal, place)
    kind = main_metric([run])
    runs = [run] if name == "bottom_decile" else [run, control]
    if control is None and len(runs) > 1:
        return None
    arrays = [record.client_values(one, kind) for one in runs]
    entries = [one.summary["metrics"].get(kind) for one in runs]
    # Neither has a mean with --eval_moments=after.
    if any(one is None for one in (*arrays, *entries)):
        return None
    if len({one.shape for one in arrays}) > 1:
        return None
    sign = -1 if words.metric(kind).better == "lower" else 1
    gaps = sign * (arrays[0] - arrays[1] if len(arrays) > 1 else arrays[0])
    # A seed without the mean, as where fine-tuning diverged, is no part of this one.
    known = [one.get("seeds", range(len(gaps))) for one in entries]
    has = [seed for seed in range(len(gaps)) if all(seed in one for one in known)]
    values = [gaps[seed][np.isfinite(gaps[seed])] for seed in has]
    if not values or not all(len(one) for one in values):
        return None

    def of_seed(one: np.ndarray) -> float:
        if name == "hurt":
            return float((one < -1e-9).mean())
        if name == "bottom_decile":
            one = np.sort(one)[: max(1, len(one) // 10)]
        return float(sign * one.mean())

    entry = summaries.spread([of_seed(one) for one in values])
    if len(has) < len(gaps):
        entry |= {"seeds": has, "of_seeds": len(gaps)}
    if any("clients" in one for one in entries):
        entry["clients"] = min(map(len, values))
    return entry


def _until(
    run: Record, control: Record | None, goal: Goal, place: Callable[..., float]
) -> dict[str, Any] | None:
    kind = followed([run])
    how, seeds = words.metric(kind), {row["seed"] for row in run.records}
    is_lower = how.better == "lower"
    if goal.value is not None:
        if how.unit == "%":
            check_fraction(goal.value)
        goals = [goal.value] * len(seeds)
    else:
        entry = control.summary["metrics"].get(kind, {}) if control else {}
        share = 1 / goal.share if is_lower else goal.share
        goals = [share * aim for aim in entry.get("per_seed", ())]
    is_known = any(kind in row for row in run.records)
    if len(goals) != len(seeds) or not is_known:
        return None
    try:
        place(run.records[0])  # also where no seed gets there
        found = curves.until(run.records, kind, goals, place, -1 if is_lower else 1)
    except KeyError:
        return None  # records without a clock
    has = [index for index, one in enumerate(found) if np.isfinite(one)]
    if not has:
        return {}
    entry = summaries.spread([float(found[index]) for index in has])
    if len(has) < len(found):
        entry |= {"seeds": has, "of_seeds": len(found)}
    return entry
