"""Comparisons of several algorithms on the same clients."""

from __future__ import annotations

import html as html_lib
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from data import files, labels
from fedjax_pfl import options as options_lib
from launch.assemble import custom, given
from launch.config import limits, presets, registry, sweep
from launch.experiment import Experiment, experiment
from launch.machine import processes
from launch.run import loop
from launch.run.progress import of_several
from launch.show import derived, frames, words

if TYPE_CHECKING:
    import pandas

    from launch.show.table import Table


class Comparison(Mapping):
    """Experiments by name, all of them on the same examples of the same clients.

    `notes` has lines about how shared options were taken, and `options` those that each
    experiment was built from.
    """

    def __init__(
        self,
        experiments: Mapping[str, Experiment],
        notes: Sequence[str] = (),
        options: Mapping[str, Mapping[str, Any]] = {},
    ):
        self._experiments, self.options = dict(experiments), options
        self.notes, self._shown = tuple(notes), set()

    def __getitem__(self, name: str) -> Experiment:
        return self._experiments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._experiments)

    def __len__(self) -> int:
        return len(self._experiments)

    def run(
        self,
        *,
        progress: bool = True,
        on_record: Callable[[dict[str, Any]], None] | None = None,
    ) -> Comparison:
        """Runs the experiments that are not finished, and returns itself.

        Arguments and errors are those of `Experiment.run`. Records have the name under
        `algo`. Lines say how shared options were taken, and which rows ended with equal
        parameters.
        """
        self._show(self.notes, progress)
        act = None if on_record is None else loop.OnRecord(on_record).act
        taken: list[float] = []
        for number, (name, one) in enumerate(self.items(), start=1):
            one.said, begin, rounds = self._shown, time.perf_counter(), one.round
            if progress:
                place = of_several(number, len(self), taken)
                processes.say(f"{name} ({place}):", flush=True)

            def named(record: dict[str, Any], name: str = name) -> None:
                act({"algo": name, **record})

            one.run(progress=progress, on_record=None if act is None else named)
            if one.round > rounds:
                taken.append(time.perf_counter() - begin)
        hashes = {name: one.simulation.digest() for name, one in self.items()}
        self._show(words.equal_parameters(hashes), progress)
        return self

    def _show(self, lines: Iterable[str], progress: bool) -> None:
        """Shows each line once, as a Python warning if there is no progress."""
        new = [note for line in lines if (note := f"note: {line}") not in self._shown]
        self._shown.update(new)
        for note in new if processes.is_first() else ():
            if progress:
                processes.say(note, flush=True)
            else:
                warnings.warn(note, stacklevel=3)

    def to_frame(self) -> pandas.DataFrame:
        """All records: one line for every algorithm, evaluated round and seed."""
        rows = [{"algo": n, **row} for n, one in self.items() for row in one.metrics]
        return frames.of(rows)

    def client_metrics(self) -> pandas.DataFrame:
        """Clients' own values, see `Experiment.client_metrics`; `algo` is first."""
        import pandas

        parts = {name: one.client_metrics() for name, one in self.items()}
        return pandas.concat(parts, names=["algo"]).reset_index("algo")

    def summary(
        self,
        control: str = "",
        until: float | None = None,
        target: float | None = None,
    ) -> pandas.DataFrame:
        """One line for each algorithm: its metrics by the summary rule.

        With a `control`, the name of one of them, also `hurt`, `gain`, `until_rounds`
        and others, see `derived.of`; `until` is the share of its result, by default
        0.95. With a `target`, a value such as 0.8, `until_rounds` and its like wait for
        this value, with or without a control. Raises a ValueError for a share without a
        control.
        """
        if until is not None and not control:
            raise ValueError(
                f"until={until!r} is a share of a control's result; give control=, one "
                f"of {', '.join(self)}"
            )
        frame = frames.summaries(self._experiments)
        goal = derived.goal(until, target)
        return frames.beside(frame, self._experiments, control, goal)

    def table(
        self,
        metrics: Sequence[str] = (),
        *,
        control: str = "",
        test: str = "wilcoxon",
        until: float | None = None,
        target: float | None = None,
    ) -> Table:
        """The results as a table for a paper, see `launch.show.table.made`.

        It is Markdown as text, and has `to_latex()`, `to_html()` and `to_frame()` with
        p-values. Experiments that are not finished have no values.
        """
        return frames.table(self._experiments, metrics, control, test, until, target)

    def plot(self, kind: str = "curves", metric: str = "", **how: str) -> Any:
        """A picture of `launch.plot` with all of them; see `Experiment.plot`."""
        return frames.plot(list(self.values()), kind, list(self), metric=metric, **how)

    def __repr__(self) -> str:
        return "\n\n".join(
            f"{name}: " * (name != one.config.algo) + words.described(one)
            for name, one in self.items()
        )

    def _repr_html_(self) -> str:
        if all(one.metrics for one in self.values()):
            return self.summary().to_html(float_format="{:.4g}".format)
        return f"<pre>{html_lib.escape(repr(self))}</pre>"


def compare(
    algos: Sequence[Any] | Mapping[str, Mapping[str, Any]],
    *,
    seeds: int | None = None,
    run: bool = True,
    progress: bool = True,
    on_record: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> Comparison:
    """Runs several algorithms on the same clients.

    An option that only some of them have is passed to those. An option that would make
    a row another method than its name says, as `head_epochs` makes FedPer FedRep, is
    passed only to the other rows. Without a `preset` all follow the first paper's among
    those of the algorithms under which all can be built. After an interrupt the
    finished part is returned, and its `run()` continues.

    Examples:
        >>> compared = compare(
        ...     ["fedavg", "local"], model="mlp", num_clients=4, examples_per_client=10,
        ...     rounds=1, progress=False)
        >>> list(compared.summary().index)
        ['fedavg', 'local']

    Args:
        algos: Names or custom algorithms, or each run's options by a name:
            `{"weak": {"algo": "fedprox", "proximal_weight": 0.01}, "strong": ...}`.
        seeds: Another name of the option `num_seeds`.
        run, progress: Whether to run them now, and whether to show progress.
        on_record: Called with every record, which has the name under `algo`.
        **options: As in `experiment`. A `workdir` gets a folder for each.

    Returns:
        Experiments by name, with `to_frame()`, `summary()`, `plot()` and `run()`.

    Raises:
        ValueError: one line: what came, what was expected, which option to change.
    """
    if seeds is not None:
        if "num_seeds" in options:
            raise ValueError(
                f"compare: seeds={seeds} and num_seeds={options['num_seeds']} are two "
                "names of one option; give one of them"
            )
        options["num_seeds"] = seeds
    made = _compared(algos, options)
    if run:
        try:
            made.run(progress=progress, on_record=on_record)
        except KeyboardInterrupt as stopped:
            processes.say(f"{stopped}, also of a comparison", flush=True)
    return made


def _compared(algos: Any, options: Mapping[str, Any]) -> Comparison:
    """Builds the experiments, each with those of `options` that its algorithm has."""
    runs = _runs(algos)
    if options.get("sweep"):  # its values may be a generator, which one row exhausts
        options = {**options, "sweep": sweep.text(options["sweep"])}
    fields = [registry.fields_of(own["algo"]) for own in runs.values()]
    known = {*custom.ONLY_IN_PYTHON}.union(*fields)
    if odd := [name for name in options if name not in known]:
        cure = registry.meant(odd[0], known) or "; omit it"
        if odd[0] in ("control", "until", "target"):
            cure = f"; give it to table() or summary(), as compare(...).table({odd[0]}="
            cure += "...)"
        raise ValueError(f"--{odd[0]} is a flag of none of {', '.join(runs)}{cure}")
    # All get the clients of the first paper whose rules suit all of them.
    own = [registry.algorithm(one["algo"]).preset for one in runs.values()]
    names = [name for name in dict.fromkeys(own) if name != "none"] or ["none"]
    if options.get("preset") is not None:
        names = [options["preset"]]
        options_lib.check_one_of("preset", names[0], [*presets.PRESETS])
    refused, read = None, given.Read()
    for preset in names:
        try:
            with read.used():
                return _built(runs, {**options, "preset": preset})
        except ValueError as error:
            refused = refused or error
    raise refused


def _runs(algos: Any) -> dict[str, Mapping[str, Any]]:
    """The runs' own options by name, each with its `algo`."""
    if isinstance(algos, Mapping):
        for name, own in algos.items():
            is_odd = not isinstance(name, str) or "/" in name or name in ("", ".", "..")
            # 255 bytes are the longest name on most file systems.
            if is_odd or len(os.fsencode(name)) > 255:
                wrong = f"{limits.shown(name)} cannot be the name of a folder"
            elif not isinstance(own, Mapping) or "algo" not in own:
                wrong = f"expected options with an algo for {name!r}, got {own!r}"
            else:
                continue
            raise ValueError(f"compare: {wrong}")
        runs = dict(algos)
    elif isinstance(algos, str) or not isinstance(algos, Iterable):
        raise ValueError(f"compare: expected a list of algorithms, got {algos!r}")
    else:
        algos = list(algos)
        names = [registry.algorithm_name(algo) for algo in algos]
        if len(set(names)) < len(names):
            raise ValueError(
                f"compare: expected different algorithms, got {names}; name the runs: "
                "{'mine': {'algo': ..., ...}, ...}"
            )
        runs = {n: {"algo": algo} for n, algo in zip(names, algos, strict=True)}
    if not runs:
        raise ValueError("compare: expected different algorithms, got none")
    return runs


def _shared(
    runs: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The shared options that each row gets, and lines about how they were taken."""
    out: dict[str, dict[str, Any]] = {}
    makes: dict[str, dict[str, str]] = {}  # option -> {row: the method it makes it}
    unmet: dict[str, dict[str, str]] = {}  # option -> {row: the option that it needs}
    data = options.get("dataset")
    dataset = data if isinstance(data, str) else None
    for name, own in runs.items():
        known = {*registry.fields_of(own["algo"]), *custom.ONLY_IN_PYTHON}
        out[name] = {option: options[option] for option in options if option in known}
        algo = registry.algorithm_name(own["algo"])
        facts = {"algo": algo, "dataset": dataset}
        ruled = presets.values(options.get("preset") or presets.BASE, facts)
        values = ruled | {k: v for k, v in (out[name] | own).items() if v is not None}
        other = registry.departure(own["algo"], values)
        found = other.options if other else {}
        by_shared = [o for o in found if o in out[name] and o not in own]
        for option in by_shared:
            del out[name][option]
            makes.setdefault(option, {})[name] = other.name
        values = ruled | {k: v for k, v in (out[name] | own).items() if v is not None}
        for option, needed in _without_effect(own["algo"], out[name], values):
            if option not in own:
                unmet.setdefault(option, {})[name] = needed
        is_now = other.name if other and not by_shared else own["algo"]
        is_own = name == registry.algorithm_name(own["algo"]) != own["algo"]
        if not is_own and registry.called(name) not in (None, is_now):
            raise ValueError(
                f"compare: the row {name} would be "
                f"{registry.algorithm_name(is_now)}; give it another name"
            )
    notes = _of_other_methods(out, options, makes)
    notes += _withheld(runs, out, options, unmet)
    for option in options:
        rows = [name for name in out if option in out[name]]
        if rows and all(option in runs[name] for name in rows):
            notes.append(
                f"{option}={_text(options[option])} has no effect, as all have theirs"
            )
    return out, notes + _meanings(runs, out)


def _of_other_methods(
    out: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    makes: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Lines about options that would make rows other methods, and who has them.

    `makes` has for an option the rows without it, and the methods that they would be.
    Raises a ValueError if no row is left that has it.
    """
    notes = []
    for option, rows in makes.items():
        others = [name for name in out if option in out[name]]
        line = f"{option}={_text(options[option])} makes " + ", ".join(
            f"{name} the method {method}" for name, method in rows.items()
        )
        if not others:
            raise ValueError(
                f"compare: {line}; omit it, compare that method, or name the rows: "
                f"{{'mine': {{'algo': {next(iter(rows))!r}, {option!r}: ...}}, ...}}"
            )
        notes.append(f"{line}, {_only(others)}")
    return notes


def _withheld(
    runs: Mapping[str, Mapping[str, Any]],
    out: Mapping[str, dict[str, Any]],
    options: Mapping[str, Any],
    unmet: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Takes options from rows of `out` where they have no effect; lines about these.

    `unmet` has for an option such rows, and what they lack.
    """
    notes = []
    for option, rows in unmet.items():
        others = [
            name
            for name in out
            if option in out[name] and name not in rows and option not in runs[name]
        ]
        if not others:
            continue  # refused where it is built, with a cure
        for name in rows:
            del out[name][option]
        needed = ", ".join(f"{name} has no {needed}" for name, needed in rows.items())
        line = f"{option}={_text(options[option])} has no effect where {needed}"
        notes.append(f"{line}, {_only(others)}")
    return notes


def _text(value: Any) -> str:
    """An option's value in a line, of arrays and other objects what they are."""
    is_plain = isinstance(value, (str, int, float))
    return str(value) if is_plain else limits.shown(value)


def _only(rows: Sequence[str]) -> str:
    """The part of a line about the rows that get an option."""
    gets = "gets" if len(rows) == 1 else "get"
    return f"so that only {', '.join(rows)} {gets} it"


def _without_effect(
    algo: Any, shared: Mapping[str, Any], values: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """(option, what it needs) of shared options that a row would refuse.

    `values` are those of the row's options that are known, by its method's rules too.
    """
    fields, out = registry.fields_of(algo), []
    now = {name: field.default for name, field in fields.items()} | values
    for option in shared.keys() & fields.keys():
        field, value = fields[option], shared[option]
        if value is None or options_lib.metadata(field)["is_noted"]:
            continue
        unmet = options_lib.unmet(field, now)
        if unmet and options_lib.is_on(field, value):
            out += [(option, needed) for needed, _ in unmet]
    takes_public = not registry.is_ours(algo) or registry.algorithm(algo).public_images
    if "public_set" in shared and not takes_public:
        out.append(("public_set", "use of public images"))
    return sorted(out)


def _meanings(
    runs: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Lines about shared options that have another meaning in some of the rows.

    A paper's symbol alone, in brackets, makes no other meaning.
    """
    found: dict[str, dict[str, tuple[str, list[str]]]] = {}
    for name, own in runs.items():
        fields = registry.fields_of(own["algo"])
        for option in shared[name].keys() & fields.keys():
            about = fields[option].metadata.get("help", "")
            meaning = re.sub(r" *\[[^]]*\]", "", about)
            _, rows = found.setdefault(option, {}).setdefault(meaning, (about, []))
            rows.append(name)
    return [
        f"{option} has several meanings: "
        + "; ".join(f"{', '.join(rows)}: {about}" for about, rows in meanings.values())
        for option, meanings in sorted(found.items())
        if len(meanings) > 1
    ]


def _built(
    runs: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> Comparison:
    """Builds the experiments under one preset, all with the clients of the first."""
    made: dict[str, Experiment] = {}
    first = next(iter(runs))
    of_rows, notes = _shared(runs, options)
    for name, own in runs.items():
        if folder := of_rows[name].get("workdir"):
            of_rows[name]["workdir"] = f"{folder}/{name}"
        of_rows[name] |= own
        with files.named(name):
            made[name] = experiment(**of_rows[name])
        one, other = made[first], made[name]
        if one.examples_sha256 != other.examples_sha256:
            raise ValueError(
                f"compare: {name} has other examples (--dataset="
                f"{other.config.dataset}) than {first} (--dataset="
                f"{one.config.dataset}); give all of them one data set"
            )
        if one.classes != other.classes:
            raise ValueError(
                f"compare: the classes of {name} are called "
                f"{labels.listed(other.classes or ())}, those of {first} "
                f"{labels.listed(one.classes or ())}; give all of them one data set"
            )
        shapes = [list(each.task.example_shape) for each in (one, other)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"compare: {name} has examples of shape {shapes[1]}, {first} of "
                f"{shapes[0]}; give all of them one --image_size and --image_channels"
            )
        sides = [(m.data.partition.train, m.data.partition.test) for m in (one, other)]
        if not jax.tree.all(jax.tree.map(np.array_equal, *sides)):
            cure = "give partition, test_split and proxy_fraction, or another preset "
            cure += f"than {options['preset']}"
            if one.config.unseen_clients and other.config.unseen_clients:
                cure += ", and exclusive to all, as unseen clients are among those that"
                cure += " may train"
            raise ValueError(
                f"compare: {name} would have other clients than {first}; {cure}"
            )
    return Comparison(made, notes, of_rows)
