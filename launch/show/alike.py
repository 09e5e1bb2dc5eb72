"""Whether results may be ranked: all of them answer one question in one setting."""

from collections.abc import Sequence
from typing import Any

from launch.folder.record import Record
from launch.show import words

Named = Sequence[tuple[str, Record]]


def data(run: Record) -> str:
    """The hash of a run's examples, which does not depend on a file's name."""
    return run.hashes.get("data_sha256", run.flags["dataset"])


def unlike(runs: Named) -> dict[str, list[list[str]]]:
    """Groups of runs that agree, for each property in which not all runs agree.

    Properties are data, seeds, clients' rows, rounds, a sample of the clients that were
    measured, and summary rule. Clients always differ with the seeds, and are then
    omitted.
    """
    names, records = [name for name, _ in runs], [run for _, run in runs]
    found: dict[str, list[Any]] = {
        "data": [data(run) for run in records],
        "seeds": [tuple(run.clients["seeds"].tolist()) for run in records],
        "clients": [run.hashes.get("split_sha256") for run in records],
        "rounds": [run.flags.get("rounds") for run in records],
        "clients measured": [_sampled(run) for run in records],
        # In words it has the rounds.
        "summary": [run.summary["summary"] for run in records],
    }
    if len(set(found["rounds"])) == 1:
        found["summary"] = [words.summary_rule(run.summary) for run in records]
    out: dict[str, list[list[str]]] = {}
    for what, values in found.items():
        if what == "clients" and ("seeds" in out or None in values):
            continue
        groups: dict[Any, list[str]] = {}
        for name, value in zip(names, values, strict=True):
            groups.setdefault(value, []).append(name)
        if len(groups) > 1:
            out[what] = list(groups.values())
    return out


def in_words(unlike: dict[str, list[list[str]]]) -> str:
    """Such as `the runs differ in rounds (a, b; c)`."""
    parts = [
        f"{what} ({'; '.join(', '.join(names) for names in groups)})"
        for what, groups in unlike.items()
    ]
    return f"the runs differ in {', '.join(parts)}"


def points(runs: Named) -> list[str]:
    """The runs that are points of a sweep of which there are others."""
    paths = [run.path for _, run in runs if run.point]
    return [name for name, run in runs if run.point and paths.count(run.path) > 1]


def _sampled(run: Record) -> int:
    """How many clients were measured, 0 = all."""
    sampled, count = (
        int(run.flags.get(n) or 0) for n in ("eval_sample", "num_clients")
    )
    return sampled if sampled < count else 0
