"""What the site has beside the pages of docs/, made by mkdocs while it builds.

* A page for each method of the registry, from the docstring of its file.
* `launch/papers/RESULTS.md` and the pictures, which the pages show as they lie there.
* A page of every option, and of what Python has.

mkdocs calls the functions whose names begin with `on_`, see `hooks` in mkdocs.yml.
"""

import dataclasses
import html
import importlib
import pathlib
import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

import algorithms
from fedjax_pfl import options as options_lib
from fedjax_pfl import shapes
from launch import build, export, plot, report
from launch import list as listing
from launch.bench import forms, torch_loop
from launch.config import registry
from launch.study import __main__ as study
from launch.tables import here

ROOT = pathlib.Path(__file__).parent.parent
OUTSIDE = (
    "launch/papers/RESULTS.md",
    "launch/papers/figures/*.png",
    "launch/studies/figures/*.png",
)
RESULTS = OUTSIDE[0]
INTERFACE = ("launch.build", "launch.contract.check")
AUTHORS = (  # what docs/adding.md names
    "fedjax_pfl",
    "fedjax_pfl.averaging.make",
    "fedjax_pfl.averaging.partial",
    "fedjax_pfl.decentralized.make",
    "fedjax_pfl.levels.make",
    "fedjax_pfl.boundary.middle",
    "fedjax_pfl.boundary.divided",
    "fedjax_pfl.stacked.repeat",
    "fedjax_pfl.rng.stream",
)
COMMANDS = {
    "launch.list": listing.Asked,
    "launch.reproduce": here.Options,
    "launch.study": study.Options,
    "launch.plot": plot.Options,
    "launch.report": report.Options,
    "launch.export": export.Options,
    "launch.bench.forms": forms.Options,
    "launch.bench.torch_loop": torch_loop.Options,
}
MODELS = ("mlp", "depth_convnet")  # the second for exits and batch norms
METHODS = ROOT / "docs/algorithms.md"
PAPERS = ROOT / "docs/papers.bib"
TABLE = re.compile(r"^\| algorithm \|.*\n(?:\|.*\n)*", re.MULTILINE)
EQUATIONS = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
SIGNS = dict(
    zip(
        "sum in <- != || - * < > grad alpha beta gamma delta eta lambda mu phi psi rho "
        "tau theta Theta".split(),
        "∑∈←≠‖−⊙⟨⟩∇αβγδηλμφψρτθΘ",
        strict=True,
    )
)
ACCENTS = {"bar": "¯", "tilde": "~"}
BESIDE, OVER = {"_": "sub", "^": "sup"}, {"_": "under", "^": "over"}
OPERATORS = "sum", "mean", "min", "argmax"  # an index stands below them
FLOWCHART = re.compile(r"```mermaid\nflowchart BT\n(.*?)```\n", re.DOTALL)


def families(text: str) -> dict[str, list[str]]:
    """The algorithms in the tables of docs/algorithms.md, by the tables' headings."""
    found: dict[str, list[str]] = {}
    for section in text.split("\n## ")[1:]:
        rows = "".join(TABLE.findall(section))
        cells = [line.split("|")[1] for line in rows.splitlines() if line[:3] == "| `"]
        if cells:
            found[section.splitlines()[0]] = re.findall(r"`(\w+)`", "".join(cells))
    return found


def linked(text: str) -> str:
    """docs/algorithms.md, in whose tables the algorithms lead to their pages."""

    def cell(row: re.Match) -> str:
        return re.sub(r"`(\w+)`", r"[`\1`](methods/\1.md)", row[0])

    def table(rows: re.Match) -> str:
        return re.sub(r"^\| `.*?\|", cell, rows[0], flags=re.MULTILINE)

    return TABLE.sub(table, text)


def flowcharts(text: str) -> str:
    """A page with its flowcharts as tables, since mermaid is fetched from a network."""

    def table(chart: re.Match) -> str:
        boxes = re.findall(r"(\w+)\[\"<b>.*</b><br>(.*)\"\]", chart[1])
        arrows = re.findall(r"(\w+) --> (\w+)", chart[1])
        lines = ["| room | in it | directly above |", "|---|---|---|"]
        for box, content in reversed(boxes):
            below = ", ".join(one for one, above in arrows if above == box)
            lines.append(f"| **{box}** | {content} | {below} |")
        return "\n".join([*lines, ""])

    return FLOWCHART.sub(table, text)


def base(name: str) -> str:
    """The algorithm whose file a variant shares, itself if it is none."""
    make = algorithms.ALGORITHMS[name].make
    alike = [one for one, entry in algorithms.ALGORITHMS.items() if entry.make is make]
    module = importlib.import_module(make.__module__)
    return next(n for n in alike if algorithms.ALGORITHMS[n].about == module.__doc__)


def results(title: str) -> Iterator[str]:
    """Links to the headings of RESULTS.md below which a row has this method."""
    heading = ""
    for line in (ROOT / RESULTS).read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif heading and line.startswith(f"| {title} |"):
            anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            yield f"* [{heading}](../{RESULTS}#{anchor})"
            heading = ""


def option_table(algo: str, names: Iterable[str]) -> str:
    """A Markdown table of a run's options, as `--help` describes them."""
    fields = registry.fields_of(algo)
    return _table((fields[name], registry.default_text(algo, name)) for name in names)


def _table(options: Iterable[tuple[dataclasses.Field, str]]) -> str:
    """A Markdown table of options with their defaults."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for field, default in options:
        name, meta = field.name, field.metadata
        choices = ", ".join(meta.get("choices", ()))
        about = meta["help"] + (f" ({choices})" if choices else "")
        cells = (f"`--{name}`", html.escape(default), html.escape(about))
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| {row} |")
    return "\n".join(['<div class="options" markdown>', "", *lines, "", "</div>"])


def differing(name: str) -> list[str]:
    """The options whose defaults a variant has of its own."""
    mine, theirs = map(registry.fields_of, (name, base(name)))
    return [n for n, one in mine.items() if one.default != theirs[n].default]


def traffic(name: str) -> str:
    """What travels and what a client keeps, of a small task; empty without one."""
    gen = np.random.default_rng(0)
    images = gen.integers(0, 256, (400, 16, 16, 1)).astype(np.uint8)
    given = {"dataset": (images, np.arange(400) % 4), "proxy_fraction": 0.1}
    given |= {"preset": "none", "num_clients": 10, "rounds": 1, "model_width": 0.25}
    for model in MODELS:
        try:
            made = build.experiment(algo=name, model=model, **given)
        except ValueError:  # this model does not do, or a teacher's file is needed
            continue
        task, algorithm = made.task, made.program.algorithm
        data = made.data.of_seed(0)
        rows = jax.eval_shape(algorithm.init, data, jax.random.key(0)).clients
        kept = sum(row.size * row.dtype.itemsize for row in jax.tree.leaves(rows))
        size = shapes.model_bytes(task.model, task.example_shape)
        lines = [
            "## What travels, and what stays",
            "",
            f"With `--model={model}` of {size:,} bytes, 4 classes and 40 proxy images",
            f"a client keeps {kept // task.num_rows:,} bytes between its rounds. A",
            "state of its optimizer (`--optimizer_state=persist`) comes to them.",
        ]
        if not algorithm.messages:
            return "\n".join([*lines, "Nothing travels."])
        lines += ["", "| one message | way | bytes |", "|---|---|---|"]
        for kind in algorithm.messages:
            lines.append(f"| {kind.name} | {kind.direction} | {kind.num_bytes:,} |")
        return "\n".join(lines)
    return ""


def mathml(line: str) -> str:
    """An equation such as `w_k^t = sum_(j != i) n_j / f(d - 1)` as MathML.

    Browsers show it without a script or fonts from elsewhere. Brackets around a part of
    a fraction and around an index are not shown. Those right behind a name are the
    arguments of a function.
    """
    line = re.sub(r"(?<=[A-Za-z0-9])\(", "@(", line)
    word = r"[A-Za-z][A-Za-z0-9]*|\d+|\.\d+"
    tokens = re.findall(rf"{word}|<-|!=|\|\||@\(|\S", line)[::-1]

    def row() -> str:
        """What comes before the end or a closing bracket."""
        parts: list[str] = []
        while tokens and tokens[-1] != ")":
            if tokens[-1] == "/":
                tokens.pop()
                parts += [f"<mfrac>{bare(parts.pop())}{bare(scripted())}</mfrac>"]
            else:
                parts.append(scripted())
        return f"<mrow>{''.join(parts)}</mrow>"

    def enclosed(left: str, right: str) -> str:
        found = row()
        tokens.pop()
        return f"<mrow><mo>{left}</mo>{found}<mo>{right}</mo></mrow>"

    def bare(part: str) -> str:
        part = part.removeprefix("<mrow><mo>(</mo>")
        return part.removesuffix("<mo>)</mo></mrow>")

    def one() -> str:
        token = tokens.pop()
        if token in ("(", "@("):
            return enclosed("(", ")")
        if token == "abs":
            tokens.pop()
            return enclosed("|", "|")
        if accented := re.fullmatch("(.)(bar|tilde)", token):
            name, accent = accented[1], ACCENTS[accented[2]]
            return f"<mover><mi>{name}</mi><mo>{accent}</mo></mover>"
        sign = html.escape(SIGNS.get(token, token))
        tag = "mn" if sign[-1].isdigit() else "mi" if sign[0].isalpha() else "mo"
        tag = "mo" if token in OPERATORS else tag
        how = ' rspace="0.25em"' if token in (",", *OPERATORS[1:]) else ""
        how = ' stretchy="false"' if token in ("||", "[", "]") else how
        return f"<{tag}{how}>{sign}</{tag}>"

    def scripted() -> str:
        """A sign with what is below and above it, and a function with its arguments."""
        tags = OVER if tokens[-1] in OPERATORS else BESIDE
        part, found = one(), {}
        while tokens and tokens[-1] in tags:
            mark = tokens.pop()
            found[mark] = bare(one())
        if found:
            tag = "".join(tags[mark] for mark in "_^" if mark in found)
            parts = "".join(found[mark] for mark in "_^" if mark in found)
            part = f"<m{tag}>{part}{parts}</m{tag}>"
        if tokens and tokens[-1] == "@(":
            tokens[-1] = "("
            part = f"<mrow>{part}{scripted()}</mrow>"
        return part

    return f'<math display="block">{row()}</math>'


def with_equations(about: str) -> str:
    """A docstring with its indented lines as equations, each with its number."""

    def shown(lines: re.Match) -> str:
        rows = [line.strip().rpartition("  (") for line in lines[0].splitlines()]
        return "".join(
            f'<div class="equation">{mathml(left or right)}'
            f"<span>{'(' * bool(left) + right * bool(left)}</span></div>\n"
            for left, _, right in rows
        )

    return EQUATIONS.sub(shown, about)


def parted(about: str) -> str:
    """A docstring with a heading over what differs from the paper."""
    heading, mark = "## Differs from the paper", "\n\nDiffers from the paper"
    return about.replace(mark, f"\n\n{heading}{mark}", 1)


def papers(name: str) -> list[str]:
    """The entries of docs/papers.bib below a line that names the method, in order."""
    entries = re.findall(r"^% ([\w ]+)\n(@.*?^\})", PAPERS.read_text(), re.M | re.S)
    return [entry for methods, entry in entries if name in methods.split()]


def this_project() -> str:
    """A BibTeX entry of CITATION.cff, without an address that is not known yet."""
    text = (ROOT / "CITATION.cff").read_text()

    def value(key: str) -> str:
        return re.search(rf'^[ -]*{key}: "?(.*?)"?$', text, re.M)[1]

    fields = {
        "author": "{" + value("name").replace("_", r"\_") + "}",
        "title": "{" + value("title").replace("_", r"\_") + "}",
        "year": value("date-released")[:4],
        "note": f"Version {value('version')}",
    }
    if "/OWNER/" not in value("repository-code"):
        fields["url"] = value("repository-code")
    lines = (f"  {key} = {{{field}}}," for key, field in fields.items())
    return "\n".join(["@misc{fedjax_pfl,", *lines, "}"])


def method_page(name: str) -> str:
    """The page of a method: docstring, command, options, results, how to cite it."""
    entry, origin = algorithms.ALGORITHMS[name], base(name)
    title, file = algorithms.title(name), entry.make.__module__.replace(".", "/")
    parts = [f"# {title}", with_equations(parted(entry.about))]
    if name != origin:
        parent = algorithms.title(origin)
        has_equations = EQUATIONS.search(algorithms.ALGORITHMS[origin].about)
        parts += [
            f"It is [{parent}]({origin}.md) with other defaults. "
            f"{'The equations and what' if has_equations else 'What'} differs from the "
            "paper are there.",
            option_table(name, differing(name)),
        ]
    parts += [
        "## Run it",
        f"```\npython -m launch.main --algo={name}\n"
        f"python -m launch.main --algo={name} --help    # every option\n```",
        f"Rules that hold by default: `--preset={entry.preset}`, see "
        f"[presets](../algorithms.md#presets). Code: `{file}.py`.",
        traffic(name),
    ]
    groups = registry.groups_of(name)
    for heading, names in (
        ("Options of its own", groups.get(name, [])),
        ("Options of its training", groups.get("training", [])),
    ):
        if names:
            parts += [f"## {heading}", option_table(name, names)]
    if rows := list(results(title)):
        parts += ["## In our results", "\n".join(rows)]
    entries = "\n\n".join([*papers(name), this_project()])
    parts += ["## Cite", f"```bibtex\n{entries}\n```"]
    return "\n\n".join(parts) + "\n"


def options_page() -> str:
    """Every option that is not one method's own, by the sections of `--help`."""
    groups = registry.groups_of("fedavg")
    parts = [
        "# Options",
        "These are the options of FedAvg as `--help` prints them, with the defaults of "
        "its preset. Options of one method are on the page of the "
        "[method](../algorithms.md). Other commands are behind them.",
    ]
    for group, names in groups.items():
        parts += [f"## {group}", option_table("fedavg", names)]
    for command, kind in COMMANDS.items():
        fields = dataclasses.fields(kind)
        defaults = (options_lib.text(field.default) for field in fields)
        parts += [f"## {command}", _table(zip(fields, defaults, strict=True))]
    return "\n\n".join(parts) + "\n"


def reference(title: str, names: Iterable[str]) -> str:
    """A page of docstrings, which mkdocstrings fetches."""
    return "\n\n".join([f"# {title}", *(f"::: {name}" for name in names)]) + "\n"


def pages() -> dict[str, str]:
    """The pages that are made here, by their paths in the site."""
    methods = {
        f"methods/{name}.md": method_page(name) for name in algorithms.ALGORITHMS
    }
    return methods | {
        "reference/options.md": options_page(),
        "reference/build.md": reference("The Python interface", INTERFACE),
        "reference/fedjax_pfl.md": reference("For authors of methods", AUTHORS),
    }


def on_config(config: Any) -> Any:
    """The repository's address, and the methods' pages behind docs/algorithms.md."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    if "/OWNER/" not in urls["Repository"]:
        config.repo_url = urls["Repository"]
    methods = next(entry["Methods"] for entry in config.nav if "Methods" in entry)
    methods += [
        {family: [f"methods/{name}.md" for name in names]}
        for family, names in families(METHODS.read_text()).items()
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the made pages, and the files outside docs/ at their own paths."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links out of docs/ lead to the same path in the site, names to their pages.

    A picture leads to its file, where it has its own size.
    """
    if "/" in page.file.src_uri:
        return markdown
    shown = re.sub(r"\]\(\.\./(launch/[^)]+\.(?:md|png)[^)]*)\)", r"](\1)", markdown)
    shown = re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", shown)
    shown = re.sub(r"^(!\[[^\]]*\]\((.*)\))$", r"[\1](\2)", shown, flags=re.MULTILINE)
    shown = flowcharts(shown)
    shown = re.sub(r"^\| .*$", _plain_bars, shown, flags=re.MULTILINE)
    return linked(shown) if page.file.src_uri == "algorithms.md" else shown


def _plain_bars(row: re.Match) -> str:
    """A table's row, in whose code GitHub needs `\\|` for a bar and mkdocs does not."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0])
