"""The pictures of a study, panels with a line for each row, and its page."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from launch.show import looks, sheets, svg, words
from launch.tables import results as results_lib
from launch.tables.cells import Sheet
from launch.tables.results import Result

Looks = Mapping[str, looks.Look]
Results = Sequence[Result]


def of_study(study: Mapping[str, Any]) -> Looks:
    """The look of each row, which is the same in all pictures of a study."""
    return looks.looks([r for sheet in study["sheets"].values() for r in sheet["rows"]])


def _number(value: float, _: int = 0) -> str:
    """An axis label, such as 20,000 or 0.05."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def panels(sheet: Sheet, results: Sequence[Result]) -> list[str]:
    """The figures of a sheet's panels that have at least one number."""
    return [
        name
        for name in sheet["panels"]
        if any(one.number(name) is not None for one in results)
    ]


def label(name: str, target: str) -> str:
    """The label of a panel's axis."""
    how = results_lib.FIGURES[name]
    title = f"{how.title} (%)" if how.scale == 100 else how.title
    if name in words.AXES:
        title = words.axis(words.metric(name))
    return f"{title}\n({target}, compiler's estimate)" if how.is_estimate else title


def draw(axes: Axes, sheet: Sheet, results: Results, name: str, own: Looks) -> None:
    """Draws a figure of all rows of a sheet over its axis.

    An axis of numbers is logarithmic where the sheet says so. Other values are placed
    side by side, without lines. Fractions have a linear scale from 0, all other figures
    a logarithmic one.
    """
    values = list(sheet["values"])
    numbers = sheet["scale"] != "names"
    for row, found in results_lib.by_row(results).items():
        known = [one for one in found if one.number(name) is not None]
        if not known:
            continue
        places = [
            float(one.cell.value) if numbers else values.index(one.cell.value)
            for one in known
        ]
        style = own[row].style() | {"markevery": 1}
        style |= {} if numbers else {"ls": "none", "ms": 7}
        axes.plot(places, [one.number(name) for one in known], label=row, **style)
    if not numbers:
        axes.set_xticks(range(len(values)), values)
    elif sheet["scale"] == "log":
        axes.set_xscale("log")
        # The library labels powers of ten well, but not powers of two.
        if any(float(value) % 10 for value in values[1:]):
            axes.set_xticks([float(value) for value in values], values)
            axes.minorticks_off()
    if results_lib.FIGURES[name].scale == 100:
        axes.set_ylim(0, 103)
    elif any((one.number(name) or 0) > 0 for one in results):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=12))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(_number))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def picture(
    study: Mapping[str, Any], name: str, results: Results, target: str
) -> Figure | None:
    """The picture of a study's sheet, None if no number is known."""
    sheet, own = study["sheets"][name], of_study(study)
    shown = panels(sheet, results)
    if not shown:
        return None
    figure = Figure(figsize=(4.6 * len(shown), 4.2), layout="constrained")
    every = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, name in zip(every, shown, strict=True):
        draw(axes, sheet, results, name, own)
        axes.set(xlabel=sheet["axis"], ylabel=label(name, target))
        axes.grid(alpha=0.25, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    drawn = {line.get_label(): line for axes in every for line in axes.get_lines()}
    columns = min(len(drawn), 3 * len(shown))
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False}
    place["handlelength"] = 3
    figure.legend(drawn.values(), drawn.keys(), **place)
    figure.suptitle(sheet["title"], fontsize=11)
    return figure


def page(
    study: Mapping[str, Any],
    results: Mapping[str, Sequence[Result]],
    target: str,
    commands: Sequence[str],
    title: str = "",
) -> str:
    """The page of a study as HTML: a table and pictures for each sheet.

    `results` are the cells to show by sheet, `target` is the chip of the estimates,
    empty for none, `commands` make the cells, and `title` replaces the study's.
    """
    every = [one for found in results.values() for one in found]
    done = sum(one.done is not None for one in every)
    own, sections = of_study(study), []
    for sheet_name, found in results.items():
        sheet, drawn = study["sheets"][sheet_name], []
        for name in panels(sheet, found):
            figure, axes = svg.figure(sheet["axis"], label(name, target))
            draw(axes, sheet, found, name, own)
            drawn.append(svg.shown(figure, label(name, target)))
        shown = results_lib.by_row(found)
        rows = [{"name": row, "line": svg.line(own[row])} for row in shown]
        table = sheets.side_by_side(results_lib.sheet(sheet, found, target))
        sections.append({"table": table, "figures": drawn, "rows": rows})
    return svg.render(
        "study.html",
        title=title or study["title"],
        setting=f"{done} of {len(every)} cells are finished.",
        notes=study["notes"],
        sections=sections,
        machines=results_lib.measured_on(every),
        commands=commands,
    )
