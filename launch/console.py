"""What a person sees on the console while a run goes on and when it is done."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tqdm

TITLES = {
    "global_accuracy": "Global",
    "c_spec": "C-Spec",
    "c_gen": "C-Gen",
    "c_per": "C-Per",
    "client_accuracy": "Client (UA)",
    "client_accuracy_pooled": "Client, pooled",
    "worst_decile_accuracy": "Worst decile",
    "client_accuracy_std": "Std over clients",
    "ensemble_accuracy": "Ensemble",
}
HEADLINES = ("global_accuracy", "c_spec", "c_gen", "c_per")


def title(name: str) -> str:
    """A metric's name for people."""
    exit = re.fullmatch(r"exit(\d+)_accuracy", name)
    if exit:
        return f"Exit {exit[1]}"
    return TITLES.get(name, name.replace("_", " "))


def is_number(summary: Mapping[str, Any], name: str) -> bool:
    """Whether a metric of a run's summary is no share, and so not shown in percent."""
    return name in summary.get("numbers", ())


def headline(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The few metrics worth a line, as percent, mean over the seeds."""
    shared = set.intersection(*(set(record) for record in records))
    names = [n for n in HEADLINES if n in shared]
    if "c_gen" not in names and "client_accuracy" in shared:
        names.append("client_accuracy")
    out = {
        title(n): f"{100 * sum(r[n] for r in records) / len(records):.1f}"
        for n in names
    }
    if "train_loss" in shared:
        loss = sum(r["train_loss"] for r in records) / len(records)
        out["loss"] = f"{loss:.3f}"
    return out


class Progress:
    """A bar with ETA on a terminal, plain lines elsewhere."""

    def __init__(self, rounds: int, start: int):
        self.rounds, self.start, self.begin = rounds, start, time.perf_counter()
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm.tqdm(total=rounds, initial=start, unit="round")

    def update(self, round: int, records: Sequence[dict[str, Any]]) -> None:
        """After a chunk: `round` rounds are done; records if it was evaluated."""
        if self.bar is not None:
            self.bar.update(round - self.bar.n)
            if records:
                self.bar.set_postfix(headline(records))
            return
        if not records:
            return
        spent = time.perf_counter() - self.begin
        done = round - self.start
        left = spent / done * (self.rounds - round) if done else float("nan")
        eta = f", {left:.0f} s left" if done and round < self.rounds else ""
        texts = "  ".join(
            f"{name} {value}" for name, value in headline(records).items()
        )
        print(f"round {round}/{self.rounds}  {texts}  ({spent:.0f} s{eta})", flush=True)

    def close(self) -> None:
        """Ends the bar's line."""
        if self.bar is not None:
            self.bar.close()


def table(summary: dict[str, Any]) -> str:
    """The final table: shares in percent, then numbers; mean and std over the seeds."""
    seeds = len(next(iter(summary["metrics"].values()))["per_seed"])
    spread = f" +- std over {seeds} seeds" if seeds > 1 else ""
    shown = [n for n in summary["metrics"] if not n.startswith("bytes")]
    numbers = [n for n in shown if is_number(summary, n)]
    shares = [n for n in shown if n not in numbers]
    lines = []
    for unit, names, scale, digits in (
        ("percent", shares, 100, 2),
        ("number", numbers, 1, 3),
    ):
        if names:
            lines.append(f"{'metric':<18} {unit}{spread}  ({summary['summary']})")
        for name in names:
            entry = summary["metrics"][name]
            std = f" +- {scale * entry['std']:.{digits}f}" if seeds > 1 else ""
            value = f"{scale * entry['mean']:6.{digits}f}"
            lines.append(f"{title(name):<18} {value}{std}")
    for name in ("bytes_up", "bytes_down"):
        if name in summary["metrics"]:
            value = summary["metrics"][name]["mean"] / 1e6
            lines.append(f"{'MB ' + name[6:]:<18} {value:,.1f}")
    lines.append(
        f"{summary['samples_per_second']:,.0f} samples/s, "
        f"{summary['client_updates_per_second']:.1f} client updates/s, compiled in "
        f"{summary['compile_seconds']:.0f} s, padding efficiency "
        f"{summary['padding_efficiency']:.2f}, on {summary['device']}"
    )
    return "\n".join(lines)
