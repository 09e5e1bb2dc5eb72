"""Pages and the pictures in them: HTML files that load nothing."""

import contextlib
import io
import pathlib
import re
from typing import Any

import jinja2
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from launch.show import looks

TEMPLATES = pathlib.Path(__file__).parent / "templates"
INK = "#010203"  # replaced by the page's text colour, light or dark


def render(template: str, **values: Any) -> str:
    """Renders a template of `templates/`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    colors = {"colors": looks.COLORS, "on_dark": looks.ON_DARK}
    return environment.get_template(template).render(**colors, **values)


def inked() -> contextlib.AbstractContextManager[None]:
    """What is drawn inside has the page's colours and font size."""
    parts = ("text.", "xtick.", "ytick.", "grid.", "axes.edge", "axes.label")
    colors = {f"{part}color": INK for part in parts}
    return matplotlib.rc_context(colors | {"font.size": 10})


def figure(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """A small figure in the page's colours."""
    with inked():
        figure = Figure(figsize=(4.6, 3.1), layout="constrained")
        axes = figure.subplots()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(alpha=0.15, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    return figure, axes


def line(look: looks.Look) -> str:
    """A piece of a line, for a legend."""
    figure = Figure((0.5, 0.16))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 2))
    axes.set_axis_off()
    axes.plot([0, 1, 2], [0, 0, 0], **look.style() | {"markevery": [1]})
    return re.sub(r">\s+<", "><", shown(figure, "")["svg"]).strip()


def shown(figure: Figure, caption: str) -> dict[str, str]:
    """The figure as an element of the page."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    for number, color in enumerate(looks.COLORS):
        text = text.replace(color.lower(), f"var(--c{number}, {color})")
    # Text uses the page's font.
    text = re.sub("'?DejaVu Sans'?", "system-ui", text)
    return {"svg": text, "caption": caption}


def write(path: str, text: str) -> None:
    """Writes a text file and its folder, or raises an OSError."""
    target = pathlib.Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
