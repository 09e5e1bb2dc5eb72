"""The pictures of a page about runs, in sections."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import ticker

from data import labels
from fedjax_pfl.metric_kinds import Kind
from launch.folder import finished, record
from launch.show import curves, figures, looks, svg, words

MAX_BUBBLES, MAX_CLASSES = 60, 200
MAX_FIGURES = 6  # of a section; one unfolds the others
MOVES = 0.02  # of the largest value: a smaller change is no curve
CAPTIONS = {
    "bytes": "Over megabytes of messages.",
    "seconds": "Over seconds of training, without compilation.",
    "clock": "Over simulated seconds.",
}


class Entry(NamedTuple):
    """A finished run with its name and look on the page."""

    name: str
    look: looks.Look
    run: record.Record

    @property
    def summary(self) -> Mapping[str, Any]:
        return self.run.summary


Entries = Sequence[Entry]


def _section(
    title: str, figures: Sequence[Any], note: str = "", has_legend: bool = True
) -> dict[str, Any]:
    shown = {"figures": figures[:MAX_FIGURES], "others": figures[MAX_FIGURES:]}
    return {"title": title, "note": note, **shown, "has_legend": has_legend}


def sections(
    entries: Entries, metric: words.Metric, settings: Mapping[str, Entries] = {}
) -> list[dict[str, Any]]:
    """The sections of a page, the first of which has the curves that move.

    With several `settings` of a study it has a picture for each of them.
    """
    runs = [entry.run for entry in entries]
    over = f"{metric.title} over messages and time"
    made = [
        _main(entries, metric, settings if len(settings) > 1 else {}),
        _section(over, _over(entries, metric)),
        _clients(entries),
        _section("Losses and numbers over rounds", _moving(entries)),
        _partition(entries),
    ]
    if figures.has_two_names(runs):
        with svg.inked():
            figure, axes = svg.figure("", "")
            figures.draw_heatmap(axes, runs, metric.name)
        unit = f", {metric.unit}" * bool(metric.unit)
        shown = svg.shown(figure, f"{metric.title}{unit}, by the summary rule.")
        made.insert(1, _section("Sweep", [shown], has_legend=False))
    return [made[0], *(one for one in made[1:] if one["figures"] or one["note"])]


def _main(
    entries: Entries, metric: words.Metric, settings: Mapping[str, Entries]
) -> dict[str, Any]:
    """The curves of `metric` and of the other headlines, of those that move."""
    known = [entry.run for entry in entries]
    others = [n for n in words.HEADLINES if any(n in run.kinds for run in known)]
    others = [n for n in others if not n.startswith("trained_")]
    every = [figures.metric_of(n, known) for n in dict.fromkeys([metric.name, *others])]
    moving = [one for one in every if _moves(entries, one)]
    note, shown = "", []
    if still := [one.title for one in every if one not in moving]:
        note = f"Not drawn, as they hardly change: {', '.join(still)}."
    if settings and metric in moving:
        moving.remove(metric)
        limits = _limits(metric, [one for found in settings.values() for one in found])
        for setting, found in settings.items():
            caption = f"{metric.title}, {setting}."
            shown.append(_curves(found, metric, "rounds", caption, *limits))
    # The others are those of the page's own setting.
    mine = "".join(f", {n}" for n, found in settings.items() if found is entries)
    shown += [_curves(entries, m, "rounds", f"{m.title}{mine}.") for m in moving]
    return _section("Over the rounds", shown, note)


def _limits(metric: words.Metric, entries: Entries) -> tuple[float, float]:
    """The limits of an axis on which the curves of all these runs have room."""
    found = [record.over_seeds(e.run, metric.name, metric.scale)[1] for e in entries]
    every = np.concatenate(found)
    low, high = np.nanmin(every), np.nanmax(every)
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def _moves(entries: Entries, metric: words.Metric) -> bool:
    """Whether the metric of a run changes from one evaluated round to another."""
    for entry in entries:
        _, mean, _ = record.over_seeds(entry.run, metric.name, 1.0)
        mean = mean[np.isfinite(mean)]
        if len(mean) > 1 and np.ptp(mean) > MOVES * np.abs(mean).max():
            return True
    return False


def _over(entries: Entries, metric: words.Metric) -> list[dict[str, str]]:
    """The metric over messages and times, each for the runs that have it."""
    out = []
    for x, caption in CAPTIONS.items():
        having = [entry for entry in entries if _has(entry, x)]
        if not _moves(having, metric):
            continue
        if silent := [entry.name for entry in entries if not _has(entry, x)]:
            caption += f" Not drawn, as they have none: {', '.join(silent)}."
        out.append(_curves(having, metric, x, caption))
    return out


def _has(entry: Entry, x: str) -> bool:
    """Whether the records of a run are at different places of an axis."""
    last = entry.run.records[-1]
    if x == "clock":
        return "clock" in last
    return x != "bytes" or curves.megabytes(last) > 0


def _partition(entries: Entries) -> dict[str, Any]:
    """Who has which classes."""
    runs = [entry.run for entry in entries]
    kinds, shown = figures.partitions(runs), []
    for numbers, counts in kinds[:6]:
        drawn = counts[:MAX_BUBBLES]
        figure, axes = svg.figure("client", "class")
        classes = record.class_names(runs[numbers[0]])
        style = {"names": classes, "color": looks.COLORS[0]}
        # The largest just fits between its neighbours, in points squared.
        side = 72 * min(3.8 / drawn.shape[0], 2.5 / drawn.shape[1])
        figures.draw_bubbles(axes, drawn, 0.6 * side**2 / drawn.max(), **style)
        names = [entries[number].name for number in numbers]
        more = len(counts) - len(drawn)
        caption = f"{', '.join(names)}. " if len(kinds) > 1 else ""
        caption += f"The largest bubble is {drawn.max()} examples."
        caption += f" {more} more clients are not shown." if more else ""
        shown.append(svg.shown(figure, caption))
    note = "Train examples of each client and class, first seed."
    if not shown:
        note = "A text has no classes."
    if len(shown) > 1:
        note += " The runs have different partitions."
    for names in dict.fromkeys(filter(None, map(record.class_names, runs))):
        note += f" The classes are, in order: {labels.listed(names, MAX_CLASSES)}."
    return _section("Partition", shown, note, has_legend=False)


def _clients(entries: Entries) -> dict[str, Any]:
    """The spread of accuracies over clients, and their gains over local training."""
    is_text = record.is_text(entries[0].run)
    kind, unit = ("perplexity", "") if is_text else ("accuracy", " (%)")
    known = [entry for entry in entries if record.has_clients(entry.run)]
    if not known:
        return _section("Clients", [], f"No {kind} of a single client is known.")
    figure, axes = svg.figure("", "")
    for entry in known:
        figures.draw_ecdf(axes, entry.run, entry.look)
    shown = [svg.shown(figure, f"Fairness: how many clients have which {kind}.")]
    local = [entry for entry in known if entry.run.flags["algo"] == "local"][:1]
    others = [entry for entry in known if entry.run.flags["algo"] != "local"]
    pairs = [(e, base) for e in others for base in local if is_same(e, base)]
    if not pairs:
        note = (
            "Add a run of --algo=local with the same preset and seeds to see the gain "
            "of each client."
        )
        return _section("Clients", shown, note)
    alone = f"alone ({local[0].name}){unit}"
    figure, axes = svg.figure(alone, f"with the method{unit}")
    limit = max(np.nanmax(record.of_clients(e.run)) for e in known) if is_text else 100
    axes.plot([0, limit], [0, limit], color=svg.INK, lw=0.8, alpha=0.5)
    for entry, base in pairs:
        x, y = (record.of_clients(one.run).ravel() for one in (base, entry))
        step = -(-len(x) // figures.MAX_POINTS)
        style = {"color": entry.look.color, "marker": entry.look.marker}
        style |= {"s": 14, "alpha": 0.6, "linewidths": 0}
        axes.scatter(x[::step], y[::step], **style)
    axes.set(xlim=(0, 1.03 * limit), ylim=(0, 1.03 * limit))
    caption = (
        "Gain of each client over its local model: one dot for each client and seed, "
        f"{'below' if is_text else 'above'} the line if it gains."
    )
    return _section("Clients", [*shown, svg.shown(figure, caption)])


def is_same(one: Entry, other: Entry) -> bool:
    """Whether values of clients compare: the same ones, as far as the runs tell."""
    runs = one.run, other.run

    def differ(kept: Sequence[Mapping[str, Any]], *names: str) -> bool:
        """Whether both have values, and other ones."""
        sides = [[each.get(name) for name in names] for each in kept]
        return sides[0] != sides[1] and not any(None in side for side in sides)

    flags, hashes = [each.flags for each in runs], [each.hashes for each in runs]
    if differ(hashes, "data_sha256") and differ(flags, "dataset"):
        return False
    # The hash of the rows has what these options give too.
    others = "availability", "client_speed", "public_set"
    if differ(hashes, "split_sha256") and not differ(flags, *others):
        return False
    if differ(flags, "masked_loss"):
        return False  # perplexities of other positions
    names = ("seeds", "test_size", finished.CLASS_COUNTS)
    return all(np.array_equal(*(e.clients.get(n) for e in runs)) for n in names)


def _moving(entries: Entries) -> list[dict[str, str]]:
    """Curves of numbers and losses: a boundary, a level, the training loss."""
    names = dict.fromkeys(
        name for entry in entries for name in (*sorted(entry.run.kinds), "train_loss")
    )
    out = []
    for name in names:
        metric = figures.metric_of(name, [entry.run for entry in entries])
        if metric.kind in (Kind.NUMBER, Kind.LOSS) and _moves(entries, metric):
            caption = f"{metric.title[:1].upper()}{metric.title[1:]}."
            out.append(_curves(entries, metric, "rounds", caption))
    return out


def _curves(
    entries: Entries, metric: words.Metric, x: str, caption: str, *limits: float
) -> dict[str, str]:
    """Draws a metric's means and deviations over seeds, between `limits` if given."""
    label, place = curves.PLACES[x]
    figure, axes = svg.figure(label, words.axis(metric))
    for entry in entries:
        curve = record.over_seeds(entry.run, metric.name, metric.scale, place)
        if curve[0]:
            figures.draw_curve(axes, curve, entry.look)
    axes.set_ylim(*limits)
    if x == "rounds":
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    return svg.shown(figure, caption)
