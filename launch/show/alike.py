"""Whether results may be ranked: all of them answer one question in one setting."""

from collections.abc import Callable, Sequence
from typing import Any

from launch.folder import finished
from launch.folder.record import Record, class_names
from launch.run import summaries
from launch.show import words

# Metrics of the clients that `--eval_clients` names
OF_COHORTS = ("c_spec", "c_gen", "c_per", "val_c_spec", "val_c_gen", "val_c_per")
Named = Sequence[tuple[str, Record]]


def data(run: Record) -> str:
    """The hash of a run's examples, which does not depend on a file's name."""
    return run.hashes.get("data_sha256", run.flags["dataset"])


def unlike(runs: Named) -> dict[str, list[list[str]]]:
    """Groups of runs that agree, for each property in which not all runs agree.

    Properties are data, names of classes, seeds, clients' rows, rounds, a sample of the
    clients that were measured, the positions of a text, summary rule, and how many
    rounds that chooses from. Clients always differ with the seeds, and then are
    omitted.
    """
    names, records = [name for name, _ in runs], [run for _, run in runs]
    chooses = any(run.summary["summary"] in summaries.CHOSEN_BY for run in records)
    found: dict[str, list[Any]] = {
        "data": _grouped(records, data, "public_set", "init_from", "adjacency"),
        "names of classes": _class_names(records),
        "seeds": [tuple(run.clients["seeds"].tolist()) for run in records],
        "clients": _grouped(
            records, _split, "availability", "client_speed", "public_set"
        ),
        "rounds": [run.flags.get("rounds") for run in records],
        "clients measured": [_sampled(run) for run in records],
        "masked loss": [run.flags.get("masked_loss") for run in records],
        "rounds between evaluations": [
            run.flags.get("eval_every") if chooses else None for run in records
        ],
        # In words it has the rounds.
        "summary": [
            (run.summary["summary"], run.summary.get("choose_by")) for run in records
        ],
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


def cohorts(runs: Named) -> list[list[str]]:
    """Groups of runs whose C-Gen and C-Spec are of as many clients, [] if all are."""
    groups: dict[int, list[str]] = {}
    for name, run in runs:
        if "c_gen" in run.summary["metrics"]:
            is_all = run.flags.get("eval_clients") == "all"
            option = "num_clients" if is_all else "clients_per_round"
            count = int(run.flags.get(option) or 0)
            if is_all and finished.UNSEEN in run.clients:
                count -= int(run.clients[finished.UNSEEN][0].sum())
            groups.setdefault(count, []).append(name)
    return list(groups.values()) if len(groups) > 1 else []


def measured(runs: Named) -> list[list[str]]:
    """Groups of runs that measured the same rounds until one ends, [] if all did."""
    rounds = {name: {one["round"] for one in run.records} for name, run in runs}
    end = min((max(one, default=0) for one in rounds.values()), default=0)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, found in rounds.items():
        groups.setdefault(tuple(sorted(r for r in found if r <= end)), []).append(name)
    return list(groups.values()) if len(groups) > 1 else []


def in_words(unlike: dict[str, list[list[str]]]) -> str:
    """Such as `the runs differ in rounds (a, b; c)`."""
    parts = [
        f"{what} ({'; '.join(', '.join(names) for names in groups)})"
        for what, groups in unlike.items()
    ]
    return f"the runs differ in {', '.join(parts)}"


def points(runs: Named) -> list[str]:
    """The runs that are points of a sweep of which there are others."""

    def sweep(run: Record) -> tuple[Any, ...]:
        # Runs in memory have no folder.
        return run.path, run.flags.get("algo"), run.flags.get("sweep")

    every = [sweep(run) for _, run in runs if run.point]
    return [name for name, run in runs if run.point and every.count(sweep(run)) > 1]


def of_points(names: Sequence[str]) -> str:
    """Why `points` are not ranked."""
    return (
        f"{', '.join(names)} are points of a sweep, of which test rows must not choose"
    )


def _split(run: Record) -> str | None:
    return run.hashes.get("split_sha256")


def _grouped(
    runs: Sequence[Record], digest: Callable[[Record], str | None], *others: str
) -> list[str | None]:
    """A hash of each run, or that of the first run that may be the same.

    A hash has what the options `others` give too: of runs that differ in these it does
    not tell whether the rest differs. Then those of the examples do, if known, or else
    the data set's name.
    """
    found: list[tuple[Record, str | None]] = []
    for run in runs:
        mine = digest(run)
        for other, theirs in found:
            is_other = any(run.flags.get(n) != other.flags.get(n) for n in others)
            if is_other and _may_have_equal_examples(run, other):
                mine = theirs
                break
        found.append((run, mine))
    return [mine for _, mine in found]


def _may_have_equal_examples(one: Record, other: Record) -> bool:
    mine, theirs = (run.hashes.get("examples_sha256") for run in (one, other))
    if mine is None or theirs is None:  # an earlier version wrote no such hash
        return one.flags["dataset"] == other.flags["dataset"]
    return mine == theirs


def _class_names(runs: Sequence[Record]) -> list[tuple[str, ...]]:
    """The names of each run's classes, or those of another run if it has none."""
    every = [class_names(run) for run in runs]
    return [one or max(every) for one in every]


def _sampled(run: Record) -> int:
    """How many clients were measured, 0 = all."""
    sampled, count = (
        int(run.flags.get(n) or 0) for n in ("eval_sample", "num_clients")
    )
    return sampled if sampled < count else 0
