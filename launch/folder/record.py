"""Reads a run's folder: flags, records, arrays and summary."""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import algorithms
from data import files, npz
from fedjax_pfl import checkpoint, measures, metric_kinds
from launch.config import flagfile, registry, schema, sweep
from launch.folder import finished
from launch.run import summaries


class Record(NamedTuple):
    """One run: its flags, records, per-client arrays and summary.

    `clients` is empty for an unfinished run, and `summary` is None if it has no folder
    or is unfinished. Each point of a sweep is a run with its numbers in `point` and in
    `flags`. `kinds` has the declared kinds of metrics, and `hashes` the SHA-256 of
    data, partition and code by name.
    """

    path: pathlib.Path
    flags: dict[str, str]
    records: list[dict[str, Any]]
    clients: dict[str, np.ndarray]
    summary: dict[str, Any] | None = None
    point: Mapping[str, float] = {}
    kinds: Mapping[str, metric_kinds.Kind] = {}
    hashes: Mapping[str, str] = {}


def by_point(run: Record) -> list[Record]:
    """Returns the points of a sweep as runs, or the run itself if it has no sweep."""
    points = sweep.points(run.flags.get("sweep", ""))
    if not points[0]:
        return [run]
    out = []
    for index, point in enumerate(points):
        values = {name: str(value) for name, value in point.items()}
        flags = run.flags | {"sweep": ""} | values
        one = run._replace(flags=flags, records=sweep.of_point(run.records, point))
        if run.clients:
            names = *_arrays(run), *_measures(run), finished.BEST_ROUND
            names = [name for name in names if name in run.clients]
            mine = {name: run.clients[name][:, index] for name in names}
            one = one._replace(clients=run.clients | mine)
        if run.summary is not None:
            summary = run.summary | run.summary["sweep"][index]
            one = one._replace(summary=summary, kinds=summaries.kinds(summary))
        out.append(one._replace(point=point))
    return out


def names_by_point(
    found: Sequence[Sequence[Record]], names: Sequence[str]
) -> list[str]:
    """Names each run, a point of a sweep by the sweep's name and its numbers."""
    pairs = zip(names, found, strict=bool(names))
    return [sweep.label(run.point, name) for name, runs in pairs for run in runs]


def read(path: pathlib.Path) -> Record:
    """Reads a run's folder, finished or not.

    Raises ValueError if it holds no run with measurements, or a damaged one.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder; give that of a run")
    summary = finished.read(path)
    is_there = (path / finished.METRICS).is_file()
    records = finished.records(path) if is_there else []
    recorded = records and flagfile.RunFlags.read(path / finished.RUN_FLAGS)
    if records and summary is None:
        records = _whole(records, recorded)
    if not records:
        inside = path / "runs"
        more = f"; give folders in {inside}" if inside.is_dir() else ""
        raise ValueError(f"{path} holds no run that has measured anything{more}")
    if "dataset" not in recorded.options:
        raise ValueError(
            f"{path / finished.RUN_FLAGS} names no --dataset; it is damaged"
        )
    run = Record(path, recorded.options, records, {}, summary, hashes=recorded.hashes)
    if summary is None:
        # The checkpoint has the records of all rounds up to it.
        kept = checkpoint.last_host(path / finished.CHECKPOINTS) or {}
        known, found = finished.lines(kept.get("records", ())), finished.lines(records)
        if not found.startswith(known) and not known.startswith(found):
            raise ValueError(
                f"{path / finished.METRICS} was changed since the run wrote it; "
                "--resume writes it again"
            )
        return run
    return run._replace(clients=_clients(run), kinds=summaries.kinds(summary))


def _whole(
    records: list[dict[str, Any]], recorded: flagfile.RunFlags
) -> list[dict[str, Any]]:
    """The records without those of a last round that a kill has cut."""
    points = sweep.points(recorded.options.get("sweep", ""))
    wanted = int(recorded.options.get("num_seeds", 1)) * len(points)
    last = sum(one["round"] == records[-1]["round"] for one in records)
    return records[:-last] if last < wanted else records


def _clients(run: Record) -> dict[str, np.ndarray]:
    """Reads the per-client arrays of a finished run, and checks their shapes."""
    path = run.path / finished.CLIENTS
    points = sweep.points(run.flags.get("sweep", ""))
    several = [len(points)] if points[0] else []
    needed = ("rounds", "seeds", "test_size")
    optional = (finished.ACCURACY, finished.PERPLEXITY, finished.CLASS_COUNTS)
    tuned = [finished.FINE_TUNED + one for one in optional[:2]]
    more = _measures(run)
    optional = (*optional, *tuned, *more, finished.BEST_ROUND, finished.UNSEEN)
    names = (finished.CLASS_NAMES, finished.OWNER_NAMES, *points[0])
    with files.named(str(path), joint=" "):
        found = npz.read(path, needed, (*optional, *names))
        kind = measured(run._replace(clients=found))
        num_seeds, num_rounds = found["seeds"].size, found["rounds"].size
        num_clients = found["test_size"].size // max(num_seeds, 1)
        shapes = {
            "seeds": [num_seeds],
            "rounds": [num_rounds],
            "test_size": [num_seeds, num_clients],
            kind: [num_seeds, *several, num_rounds, num_clients],
        }
        several_of = {finished.FINE_TUNED + kind, *more} & found.keys()
        shapes |= dict.fromkeys(several_of, shapes[kind])
        if finished.CLASS_COUNTS in found:
            num_classes = found[finished.CLASS_COUNTS].shape[-1:]
            shapes[finished.CLASS_COUNTS] = [num_seeds, num_clients, *num_classes]
        texts = {finished.CLASS_NAMES, finished.OWNER_NAMES} & found.keys()
        others = {name: [found[name].size] for name in texts}
        others[finished.UNSEEN] = [num_seeds, num_clients]
        others[finished.BEST_ROUND] = [num_seeds, *several]
        kinds = dict.fromkeys(shapes, "iuf") | dict.fromkeys(texts, "U")
        kinds |= {finished.UNSEEN: "b", finished.BEST_ROUND: "iu"}
        shapes |= {name: one for name, one in others.items() if name in found}
        arrays = {name: found.get(name, np.array(None)) for name in shapes}
        odd = [
            f"{name} of shape {shapes[name]}"
            for name, one in arrays.items()
            if [*one.shape] != shapes[name]
            or one.dtype.kind not in kinds[name]
            or not one.size
        ]
        if len(run.summary.get("sweep", ())) != sum(several):
            odd += [f"points of a sweep that {finished.SUMMARY} has"]
        if odd:
            raise ValueError(f"is damaged: it has no {odd[0]}")
    return found


def _measures(run: Record) -> list[str]:
    """The names of the further metrics of a run, as arrays of clients have them.

    Earlier versions kept none, and had custom ones with names that are taken now.
    """
    every = run.flags.get("eval_metrics", "").split(",")
    return [one for one in every if one and not measures.is_taken(one)]


def kinds(runs: Sequence[Record]) -> dict[str, metric_kinds.Kind]:
    """Returns the declared kinds of the metrics of runs."""
    return {name: kind for run in runs for name, kind in run.kinds.items()}


def diverged(run: Record) -> int | None:
    """Returns the first round after which numbers of a seed are not finite, or None."""
    rounds = [record["diverged"] for record in run.records if "diverged" in record]
    return min(rounds, default=None)


def labels(runs: Sequence[Record]) -> list[str]:
    """Names each run by its algorithm and what distinguishes it.

    These are the options that make it another method than its algorithm's name says,
    the data and the partition if runs differ in them, and any option in which runs of
    one algorithm differ. Seeds are named only if nothing else differs. Equal names get
    the options of execution that differ, such as the rounds, then the hashes of data,
    partition or code, and finally the folder.
    """
    silent = schema.names(schema.EXECUTION).union(schema.labelled("never"))
    setting = schema.labelled("always")
    out = []
    for run in runs:
        same = [other for other in runs if other.flags["algo"] == run.flags["algo"]]
        every = sorted({n for other in same for n in other.flags if n not in silent})
        names = _differing(same, every)
        texts = {tuple(other.flags.get(n) for n in names) for other in same}
        if len(texts) < len(same):
            names += _differing(same, ("seed", "num_seeds"))
        names += [n for n in _differing(runs, setting) if n not in names]
        makes = departure(run)
        names += [n for n in (makes.options if makes else ()) if n not in names]
        values = [f"{n}={run.flags.get(n, 'unset')}" for n in names]
        done = run.records[-1]["round"] if run.records else 0
        note = [] if run.summary else [f"(round {done} of {run.flags['rounds']})"]
        out.append(" ".join([run.flags["algo"], *values, *note]))
    return _distinct(runs, out)


def departure(run: Record) -> registry.Departure | None:
    """Describes how a run's options make it another method, or None."""
    algo = run.flags["algo"]
    if algo not in algorithms.ALGORITHMS:
        return None
    return registry.departure(algo, flagfile.RunFlags(run.flags).typed(algo))


def _differing(
    runs: Sequence[Record], names: Sequence[str], of: str = "flags"
) -> list[str]:
    """Returns the names of flags or hashes in which runs differ."""
    return [n for n in names if len({getattr(run, of).get(n) for run in runs}) > 1]


def _distinct(runs: Sequence[Record], names: list[str]) -> list[str]:
    """Adds more of what differs to the names of runs that are equal."""
    how = ["rounds", *sorted(schema.names(schema.EXECUTION) - {"rounds"})]

    def flags_of(group: Sequence[Record], run: Record) -> list[str]:
        found = _differing(group, how)
        return [f"{name}={run.flags.get(name, 'unset')}" for name in found]

    def hashes_of(group: Sequence[Record], run: Record) -> list[str]:
        every = dict.fromkeys(name for other in group for name in other.hashes)
        every.pop("examples_sha256", None)  # that of data is of them, too
        # Earlier versions wrote no shape.
        if not all("example_shape" in other.hashes for other in group):
            every.pop("example_shape", None)
        return [
            f"{name.removesuffix('_sha256')}="
            f"{run.hashes.get(name, 'unset')[: 6 if name.endswith('sha256') else None]}"
            for name in _differing(group, list(every), "hashes")
        ]

    def folder_of(group: Sequence[Record], run: Record) -> list[str]:
        return [f"in {run.path}"] if len({other.path for other in group}) > 1 else []

    for more in (flags_of, hashes_of, folder_of):
        groups = {
            name: [run for run, other in zip(runs, names, strict=True) if other == name]
            for name in names
        }
        names = [
            " ".join([name, *more(groups[name], run)])
            for run, name in zip(runs, names, strict=True)
        ]
    return names


def is_text(run: Record) -> bool:
    """Whether the examples of a finished run are texts, which have perplexities."""
    return finished.PERPLEXITY in run.clients


def class_names(run: Record) -> tuple[str, ...]:
    """Returns the names of a finished run's classes, () if they are numbers."""
    return tuple(map(str, run.clients.get(finished.CLASS_NAMES, ())))


def shared_class_names(runs: Iterable[Record]) -> tuple[str, ...]:
    """Returns the names of the classes of all runs, () if runs differ in them."""
    every = set(map(class_names, runs))
    return every.pop() if len(every) == 1 else ()


def measured(run: Record) -> str:
    """Returns the name of the per-client array of a finished run's results."""
    return finished.PERPLEXITY if is_text(run) else finished.ACCURACY


def _arrays(run: Record) -> tuple[str, str]:
    """The names of the per-client arrays, before and after fine-tuning."""
    return measured(run), finished.FINE_TUNED + measured(run)


def has_clients(run: Record) -> bool:
    """Whether the accuracy (or perplexity) of any single client is known.

    With `--eval_moments=after` it is not: the arrays are of the models before.
    """
    is_known = np.isfinite(run.clients[measured(run)]).any()
    return bool(is_known) and run.flags.get("eval_moments") != "after"


def of_clients(run: Record) -> np.ndarray:
    """Returns the values of clients that may train, accuracies in percent; f64[S, K].

    Clients that never train are nan.
    """
    mean = client_values(run, f"client_{measured(run)}")
    return mean if is_text(run) else 100 * mean


def over_seeds(
    run: Record,
    metric: str,
    scale: float,
    place: Callable[[Mapping[str, Any]], float] = lambda row: row["round"],
) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Returns a metric's (place, mean, standard deviation) over seeds by round."""
    rows = [r for r in run.records if None not in (r.get(metric), place(r))]
    rounds = [row["round"] for row in rows]
    _, index, count = np.unique(rounds, return_inverse=True, return_counts=True)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(index, values, len(count)) / count

    values = scale * np.array([row[metric] for row in rows], float)
    middle, where = mean(values), mean(np.array([place(row) for row in rows], float))
    variance = mean((values - middle[index]) ** 2) * count / np.maximum(count - 1, 1)
    return where.tolist(), middle, np.sqrt(variance)


def client_values(run: Record, metric: str) -> np.ndarray | None:
    """The means of single clients behind a metric over the summary's rounds.

    f64[S, K], nan for clients that do not belong to it, None if they are not known.
    """
    plain, tuned = _arrays(run)
    names = {
        f"client_{plain}": (plain, False),
        f"unseen_{plain}": (plain, True),
        tuned: (tuned, False),
        f"unseen_{tuned}": (tuned, True),
    }
    names |= {f"client_{name}": (name, False) for name in _measures(run)}
    if run.flags.get("masked_loss") == "chosen":
        names[f"client_masked_{plain}"] = (plain, False)
    name, of_unseen = names.get(metric, ("", False))
    if name not in run.clients:
        return None
    means = np.ma.masked_invalid(run.clients[name]).mean(1).filled(np.nan)
    unseen = run.clients.get(finished.UNSEEN, np.zeros(means.shape)).astype(bool)
    return np.where(unseen == of_unseen, means, np.nan)
