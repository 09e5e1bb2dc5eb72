"""A table of methods for a paper: LaTeX, Markdown, HTML, or a frame."""

from __future__ import annotations

import collections
import html as html_lib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedjax_pfl import options
from launch.folder import record
from launch.folder.record import Record
from launch.run import summaries
from launch.show import alike, derived, looks, sheets, significance, words

if TYPE_CHECKING:
    import pandas

TEST = significance.TEST
# What a value is beside the control's: nothing shown, better or worse
MARKS = {"": "", "better": "†", "worse": "‡"}
_LATEX = {
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
    "–": "--",
    "<": "$<$",
    "|": "$|$",
    ">": "$>$",
}


class Value(NamedTuple):
    """A cell: its numbers (None = unknown), how it is marked, and p-values.

    `p` is that of the difference to the control and `p_best` to the best, both
    corrected for all methods of the column; None = not tested. `gap` is the difference
    to the control with the ends of its interval, see `significance.interval`. `of` says
    what the numbers cover if that is not all, see `summaries.fewer`.
    """

    text: str
    mean: float | None = None
    std: float | None = None
    is_best: bool = False
    mark: str = ""
    p: float | None = None
    p_best: float | None = None
    gap: tuple[float, float, float] | None = None
    of: str = ""


class Column(NamedTuple):
    """A column: the setting above it, its metric, and a value for each row."""

    setting: str
    metric: words.Metric
    values: list[Value]


class Table(NamedTuple):
    """Methods (rows) and metrics, perhaps in several settings (columns).

    Percent for fractions, mean ± standard deviation over seeds. Bold are the best of a
    column and all that are not shown to differ from it; † marks better and ‡ worse
    values than the control's (`significance.wilcoxon`, p < .05 after Holm's correction
    over the methods of the column). Where the mean says the opposite of the test, as it
    may by a few clients, there is no mark.
    """

    rows: list[str]
    columns: list[Column]
    notes: list[str]

    @property
    def names(self) -> list[str]:
        """The methods as papers write them."""
        return looks.titles(self.rows)

    def heads(self, has_unit: bool = True) -> list[str]:
        """A title for each column, with the unit of its texts or without."""
        many = len({one.setting for one in self.columns}) > 1
        title = _head if has_unit else operator.attrgetter("title")
        return [
            ", ".join(filter(None, [one.setting * many, title(one.metric)]))
            for one in self.columns
        ]

    def _lines(
        self, bold: str, escape: Callable[[str], str] = str
    ) -> Iterator[tuple[str, list[str]]]:
        """The escaped name and texts of each row; `bold` has a place `{}`."""
        values = zip(*(column.values for column in self.columns), strict=True)
        for name, row in zip(self.names, values, strict=True):
            texts = []
            for value in row:
                text = (bold if value.is_best else "{}").format(escape(value.text))
                texts.append(text + escape(MARKS[value.mark]))
            yield escape(name), texts

    def to_markdown(self) -> str:
        """The table as Markdown, with its notes."""
        lines = sheets.lines(self.heads(), self._lines("**{}**"))
        return "\n".join([*lines, "", *self.notes, ""])

    def to_html(self) -> str:
        """The table as an element `<table>`, with its notes below."""
        cells = "".join(f"<th>{html_lib.escape(one)}</th>" for one in self.heads())
        body = ""
        for name, line in self._lines("<b>{}</b>", html_lib.escape):
            body += f"<tr><th>{name}</th>{''.join(f'<td>{v}</td>' for v in line)}</tr>"
        notes = "<br>".join(map(html_lib.escape, self.notes))
        return f"<table><tr><th></th>{cells}</tr>{body}</table><p>{notes}</p>"

    _repr_html_ = to_html

    def to_latex(self) -> str:
        """The table as LaTeX, which needs no package, with its notes below."""
        settings = collections.Counter(one.setting for one in self.columns)
        lines = [rf"\begin{{tabular}}{{l{'r' * len(self.columns)}}}", r"\hline"]
        if len(settings) > 1:
            groups = [
                rf"\multicolumn{{{count}}}{{c}}{{{_latex(setting)}}}"
                for setting, count in settings.items()
            ]
            lines.append(" & ".join(["", *groups]) + r" \\")
        titles = [_latex(_head(one.metric)) for one in self.columns]
        lines += [" & ".join(["Method", *titles]) + r" \\", r"\hline"]
        for name, line in self._lines(r"\textbf{{{}}}", _latex):
            # \\ would take a star or a bracket behind it for its own.
            start = "{}" * name.startswith(("*", "["))
            lines.append(start + " & ".join([name, *line]) + r" \\")
        lines += [r"\hline", r"\end{tabular}"]
        notes = [_latex(note) for note in self.notes]
        if notes:
            lines += ["", r"\smallskip {\footnotesize", *notes, r"\par}"]
        return "\n".join([*lines, ""])

    def to_sheet(self, title: str) -> sheets.Sheet:
        """The table for a page of runs: of several settings a grid for each metric."""
        settings = [one.setting for one in self.columns]
        groups = {"": range(len(settings))}
        if len(set(settings)) > 1:
            titles = [_head(one.metric) for one in self.columns]
            groups = {
                title: [n for n, other in enumerate(titles) if other == title]
                for title in titles
            }
        grids = []
        for group, numbers in groups.items():
            heads = [settings[n] if group else self.heads()[n] for n in numbers]
            lines = self._lines("**{}**")
            rows = [(name, [line[n] for n in numbers]) for name, line in lines]
            grids.append(sheets.Grid("", group, heads, rows))
        return sheets.Sheet(title, self.notes, grids)

    def to_frame(self) -> pandas.DataFrame:
        """Numbers: mean, std, p and p_best of each column, fractions as 0..1.

        Where a column has values of single clients and there is a control, also `gap`,
        the difference to it, and the ends `gap_low` and `gap_high` of its 95 %
        confidence interval, see `significance.interval`. Where a number does not cover
        all rounds, seeds or clients, `of` says what it does. Bytes are megabytes, as
        their heads say.
        """
        import pandas

        out = {}
        for head, column in zip(self.heads(has_unit=False), self.columns, strict=True):
            scale = min(column.metric.scale, 1)
            scales = {"mean": scale, "std": scale, "p": 1, "p_best": 1}
            for part, factor in scales.items():
                found = [getattr(value, part) for value in column.values]
                out[head, part] = [one and factor * one for one in found]
            gaps = [value.gap for value in column.values]
            for place, part in enumerate(("gap", "gap_low", "gap_high")):
                if any(gaps):
                    out[head, part] = [one and scale * one[place] for one in gaps]
            if any(covered := [value.of for value in column.values]):
                out[head, "of"] = covered
        return pandas.DataFrame(out, index=pandas.Index(self.rows, name="method"))

    def __str__(self) -> str:
        return self.to_markdown()


def _head(metric: words.Metric) -> str:
    return f"{metric.title}, %" if metric.unit else metric.title


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


def made(
    runs: Mapping[str, Mapping[str, Record | None]],
    metrics: Sequence[str],
    control: str,
    test: str = "wilcoxon",
    until: float | None = None,
    target: float | None = None,
) -> Table:
    """The table of runs by setting and method, where None is not finished.

    Args:
        runs: The same methods in each setting.
        metrics: Names of metrics or of `derived.TITLES`, () = the usual ones.
        control: The method that marks, hurt, gain and `until` compare with, "" = none.
        test: `wilcoxon`, or `none` for a table without marks.
        until: The share of the control's result for `until_...`, None = 0.95.
        target: In place of a share the value itself: a fraction for an accuracy.

    Raises:
        ValueError: one line: another test, metrics that are not a list, an odd goal.
    """
    goal = derived.goal(until, target)
    _check(metrics, test)
    of_setting = [[run for run in one.values() if run] for one in runs.values()]
    known = [run for found in of_setting for run in found]
    metrics = metrics or _usual(of_setting, control, goal)
    parts = {
        setting: _part(setting, found, here or known, metrics, control, test, goal)
        for (setting, found), here in zip(runs.items(), of_setting, strict=True)
    }
    is_ranked = any(part.is_ranked for part in parts.values())
    notes = _of_values(known, metrics, control, test, is_ranked)
    for setting, part in parts.items():
        prefix = f"{setting}: " * (len(parts) > 1)
        notes += [f"{prefix}{line}" for line in part.lines]
    notes += _diverged(runs)
    notes += _unknown(metrics, known)
    untested = dict.fromkeys(one for part in parts.values() for one in part.untested)
    if untested:
        line = "no test is made, so that only the best is bold"
        notes.append(f"{', '.join(untested)}: {line}.")
    notes += _derived(metrics, of_setting, control, goal)
    every = [run for found in runs.values() for run in found.values()]
    if left := sum(run is None for run in every):
        notes.append(f"{left} of {len(every)} results are not finished.")
    columns = [column for part in parts.values() for column in part.columns]
    return Table(list(next(iter(runs.values()))), columns, notes)


def _check(metrics: Any, test: str) -> None:
    """Refuses (ValueError) another test, and metrics other than a list of names."""
    if test not in ("wilcoxon", "none"):
        raise ValueError(f"test={test}: expected wilcoxon or none")
    if isinstance(metrics, str):
        raise ValueError(f"metrics={metrics!r}: expected a list, [{metrics!r}]")
    is_list = isinstance(metrics, Sequence)
    if not is_list or not all(isinstance(name, str) for name in metrics):
        raise ValueError(f"metrics={metrics!r}: expected a list of names")


class _Part(NamedTuple):
    """The columns of one setting.

    Attributes:
        columns: One for each metric.
        lines: Why values are not ranked, in which rounds rows differ, and which rows
            reached no goal.
        untested: Titles of columns whose best is bold without a test.
        is_ranked: Whether a row may be the best.
    """

    columns: list[Column]
    lines: list[str]
    untested: list[str]
    is_ranked: bool


def _part(
    setting: str,
    found: Mapping[str, Record | None],
    told: Sequence[Record],
    metrics: Sequence[str],
    control: str,
    test: str,
    goal: derived.Goal,
) -> _Part:
    """The columns of a setting, where `told` are runs that tell what metrics are."""
    since = {row: run and record.diverged(run) for row, run in found.items()}
    bad = [row for row, round in since.items() if round is not None]
    found = {row: None if row in bad else one for row, one in found.items()}
    why, others = _not_ranked(found)
    odd = {} if why else _apart(found, metrics)
    columns, untested, never = [], [], []
    for name in metrics:
        how = derived.metric(name, told) if told else words.metric(name)
        entries = _entries(found, name, control, goal)
        never += [looks.title(row) for row, entry in entries.items() if entry == {}]
        arrays = {
            row: run and record.client_values(run, name)
            for row, run in found.items()
            if test != "none" and not why and name not in derived.TITLES
        }
        is_alike = not why and name not in odd
        values = _values(how, entries, arrays, control, is_ranked=is_alike)
        pairs = zip(found, values, strict=True)
        values = [Value("diverged") if row in bad else one for row, one in pairs]
        columns.append(Column(setting, how, values))
        has_values = any(one is not None for one in arrays.values())
        is_bold = any(value.is_best for value in values) and test != "none"
        if is_bold and not has_values:
            untested.append(how.title)
    is_ranked = not why and sum(one is not None for one in found.values()) > 1
    lines = [line for line in (why, *_of_apart(odd), others) if line]
    if never:
        lines.append(f"Never there: {', '.join(dict.fromkeys(never))}.")
    return _Part(columns, lines, untested, is_ranked)


def _not_ranked(found: Mapping[str, Record | None]) -> tuple[str, str]:
    """Why none of the rows is the best, and in which numbers of rounds they differ.

    Comparisons and studies have one data set and one split, beside which a row may have
    a public set or a first model of its own.
    """
    named = [(looks.title(row), run) for row, run in found.items() if run]
    unlike = alike.unlike(named)
    parts = [unlike.pop(name, None) for name in ("rounds", "data", "clients")]
    others, why = parts[0] and f"{alike.in_words({'rounds': parts[0]})}.", ""
    if unlike:
        why = f"No value is bold or marked, as {alike.in_words(unlike)}."
    elif points := alike.points(named):
        why = f"No value is bold or marked, as {alike.of_points(points)}."
    return why, f"{others[0].upper()}{others[1:]}" if others else ""


def _apart(
    found: Mapping[str, Record | None], metrics: Sequence[str]
) -> dict[str, str]:
    """Why no value is the best in a column, by those metrics of which none is.

    Some are of the clients that a round draws, and some of the rounds with evaluations.
    """
    named = [(looks.title(row), run) for row, run in found.items() if run]
    differ = {
        "the number of clients behind it": (alike.OF_COHORTS, alike.cohorts(named)),
        "the rounds that were measured": (derived.PLACES, alike.measured(named)),
    }
    return {
        name: alike.in_words({what: groups})
        for what, (names, groups) in differ.items()
        for name in metrics
        if groups and name in names
    }


def _of_apart(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason of `_apart`."""
    titles: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        title = derived.TITLES.get(name) or words.title(name)
        titles.setdefault(reason, []).append(title)
    return [
        f"{', '.join(some)}: no value is bold or marked, as {reason}."
        for reason, some in titles.items()
    ]


def _of_values(
    known: Sequence[Record],
    metrics: Sequence[str],
    control: str,
    test: str,
    is_ranked: bool,
) -> list[str]:
    """What the numbers of all columns are, and what their marks say."""
    notes = []
    if known:
        seeds = max(len(run.clients["seeds"]) for run in known)
        many = f"Mean ± standard deviation of {seeds} seeds."
        notes.append(many if seeds > 1 else "One seed.")
    if is_ranked and test == "none":
        notes.append("Bold: the best.")
    elif is_ranked:
        marks = f"; † better and ‡ worse than {looks.title(control)}" * bool(control)
        notes.append(
            "Bold: the best and all that are not shown to differ from it"
            f"{marks} ({significance.TEST})."
        )
    totals = [words.title(name) for name in metrics if name in summaries.TOTALS]
    if totals and any(run.summary["summary"] != "last" for run in known):
        notes.append(f"{', '.join(totals)}: of all rounds of a run.")
    if any(run.summary["summary"] == "best" for run in known):
        notes.append(words.TOO_GOOD)
    medians = any(run.summary["summary"].startswith("median") for run in known)
    if medians and (test != "none" and is_ranked or control):
        notes.append(
            "Values are medians over rounds. What is of single clients, such as tests, "
            "is of their means over the same rounds."
        )
    return notes


def _unknown(metrics: Sequence[str], known: Sequence[Record]) -> list[str]:
    """A line for each metric that no finished run has."""
    names = derived.TITLES.keys() | {n for r in known for n in r.summary["metrics"]}
    missing = [name for name in metrics if known and name not in names]
    hints = [options.nearest(n, names) if derived.unusual(n) else "" for n in missing]
    return [
        f"{name}: no finished run has this metric{hint or '.'}"
        for name, hint in zip(missing, hints, strict=True)
    ]


def _derived(
    metrics: Sequence[str],
    of_setting: Sequence[Sequence[Record]],
    control: str,
    goal: derived.Goal,
) -> list[str]:
    """What those of `derived.TITLES` are, and which of them need a control."""
    other, notes = looks.title(control), []
    known = [run for found in of_setting for run in found]
    goals = [_reached(found, goal, other) for found in of_setting if found]
    reached = f"until {', or '.join(dict.fromkeys(goals))}"
    about = {
        "hurt": f"clients that are worse off than with {other}",
        "gain": f"mean over clients of the value less that with {other}",
        "bottom_decile": "mean over the worst tenth of the clients",
    } | dict.fromkeys(derived.PLACES, reached)
    free = ["bottom_decile"]
    if goal.value is not None:
        free += derived.PLACES
    needy = [n for n in metrics if n in derived.TITLES and n not in free]
    if needy and not control:
        about = {name: about[name] for name in free}
        named = ", ".join(derived.TITLES[n] for n in needy)
        notes.append(f"{named}: these compare with a control, and none is given.")
    if goal.value is not None and not derived.PLACES.keys() & set(metrics):
        notes.append(
            f"target={goal.value:g} is in no column; give metrics such as until_rounds."
        )
    titles: dict[str, list[str]] = {}
    for name in filter(about.get, metrics):
        titles.setdefault(about[name], []).append(derived.TITLES[name])
    notes += [f"{', '.join(some)}: {text}." for text, some in titles.items()]
    if "until_mb" in metrics and any(words.setup_megabytes(r.summary) for r in known):
        title = derived.TITLES["until_mb"]
        notes.append(f"{title}: without the proxy set that every client gets once.")
    return notes


def _reached(runs: Sequence[Record], goal: derived.Goal, other: str) -> str:
    """What `until_...` wait for, where `other` is the control's title."""
    how = derived.metric(derived.followed(runs), runs)
    is_lower = how.better == "lower"
    of_clients = how.name == "client_accuracy"
    reaches = "is down to" if is_lower else "reaches"
    aim = f"{goal.share:g} of {other}'s"
    if goal.value is not None:
        aim = f"{how.scale * goal.value:g} {how.unit}".rstrip()
    elif is_lower:
        aim = f"1 / {aim}"
    return f"{'the mean over clients' if of_clients else how.title} {reaches} {aim}"


def _diverged(runs: Mapping[str, Mapping[str, Record | None]]) -> list[str]:
    """A line for each run of which only some seeds diverged."""
    lines = []
    for setting, found in runs.items():
        for row, run in found.items():
            records = run.records if run else []
            seeds = {one["seed"] for one in records}
            odd = {one["seed"] for one in records if "diverged" in one}
            if 0 < len(odd) < len(seeds):
                name = ", ".join(filter(None, [looks.title(row), setting]))
                lines.append(f"{name}: {len(odd)} of {len(seeds)} seeds diverged.")
    return lines


def _usual(
    of_setting: Sequence[Sequence[Record]], control: str, goal: derived.Goal
) -> list[str]:
    """The clients' metric, that of unseen clients, and how many are worse off.

    With a value as a goal also the rounds until it is reached.

    Settings may have metrics of their own, as images beside a text have.
    """
    out: dict[str, None] = {}
    for runs in filter(None, of_setting):
        main = derived.main_metric(runs)
        names = [main, main.replace("client_", "unseen_")]
        has = set().union(*(run.summary["metrics"] for run in runs))
        if runs[0].flags.get("eval_moments") == "after":
            names[:1] = [main.replace("client_", "trained_"), main]
            names = [name for name in names if name in has or "trained_" in name]
        elif (server := derived.followed(runs)) != main:
            names = [server]  # test rows belong to nobody
        else:
            names = [name for name in names if name in has or name == main]
            names += ["bottom_decile", *["hurt"] * bool(control)]
        names += ["until_rounds"] * (goal.value is not None)
        out |= dict.fromkeys(names)
    return sorted(out, key=lambda name: name in derived.TITLES) or ["client_accuracy"]


def _entries(
    found: Mapping[str, Record | None], name: str, control: str, goal: derived.Goal
) -> dict[str, dict[str, Any] | None]:
    """The metric of each run in the form of a summary, None = unknown."""
    out: dict[str, dict[str, Any] | None] = {}
    for row, run in found.items():
        if run is None or (row == control and name in ("hurt", "gain")):
            out[row] = None
        elif name in derived.TITLES:
            out[row] = derived.of(name, run, found.get(control), goal)
        else:
            out[row] = run.summary["metrics"].get(name)
    return out


def _values(
    how: words.Metric,
    entries: Mapping[str, Mapping[str, Any] | None],
    arrays: Mapping[str, Any],
    control: str,
    is_ranked: bool = True,
) -> list[Value]:
    """The values of a column; of those that are not ranked none is the best."""
    sign = -1 if how.better == "lower" else 1
    means = {row: sign * one["mean"] for row, one in entries.items() if one}
    # A mean over those seeds alone that reached a goal is none of all.
    whole = [row for row in means if summaries.is_of_all(entries[row])]
    has_best = whole and len(means) > 1 and how.better
    best = max(whole, key=means.__getitem__) if has_best else None
    known = {
        row: _of_seeds(one, entries[row]) for row, one in arrays.items() if row in means
    }
    to_best, to_control = tested(known, best), tested(known, control)
    values = []
    for row, entry in entries.items():
        if not entry:
            values.append(Value("–"))
            continue
        (p, side), (p_best, _) = (
            found.get(row, (None, 0)) for found in (to_control, to_best)
        )
        # Equal means may differ in the last bit.
        is_best = best is not None and means[best] - means[row] <= 1e-9
        is_best |= p_best is not None and p_best >= significance.LEVEL
        is_best &= is_ranked and row in whole
        gap = sign * (means[row] - means.get(control, 0.0))
        has_spread = len(entry["per_seed"]) > 1
        numbers = entry["mean"], entry["std"] if has_spread else None
        shown = mark(how, gap, p, side)
        beside = None
        if p is not None:
            beside = significance.interval(known[row], known[control])
        given = (*numbers, is_best, shown, p, p_best, beside, summaries.fewer(entry))
        values.append(Value(how.text(entry), *given))
    return values


def _of_seeds(values: Any, entry: Mapping[str, Any]) -> Any:
    """Values f64[S, K] of clients, nan for seeds that are not in the row's mean."""
    if values is None or summaries.is_of_all(entry):
        return values
    has = np.isin(np.arange(len(values)), entry["seeds"])
    return np.where(has[:, None], values, np.nan)


def mark(how: words.Metric, gap: float, p: float | None = None, side: int = 0) -> str:
    """`better` or `worse` where a test and the mean agree on it, else ""."""
    is_shown = p is not None and p < significance.LEVEL and gap * side > 0
    if not is_shown or not how.better:
        return ""
    return "better" if (side > 0) == (how.better != "lower") else "worse"


def tested(arrays: Mapping[str, Any], base: str | None) -> dict[str, tuple[float, int]]:
    """(Holm's p-value, direction) of the differences of rows to the row `base`.

    `arrays` are f64[S, K] by row, None = no values; rows of another shape than that of
    `base` are left out.
    """
    ours = arrays.get(base)
    rows = [
        row
        for row, one in arrays.items()
        if row != base and one is not None and ours is not None
        if one.shape == ours.shape
    ]
    found = [significance.wilcoxon(arrays[row], ours) for row in rows]
    corrected = significance.holm([p for p, _ in found])
    return {
        row: (p, side) for row, p, (_, side) in zip(rows, corrected, found, strict=True)
    }
