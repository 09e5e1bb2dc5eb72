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

import algorithms
from launch.config import registry

ROOT = pathlib.Path(__file__).parent.parent
OUTSIDE = (
    "launch/papers/RESULTS.md",
    "launch/papers/figures/*.png",
    "launch/studies/figures/*.png",
)
RESULTS = OUTSIDE[0]


def families() -> dict[str, list[str]]:
    """The algorithms under the headings of docs/algorithms.md, in its order."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in (ROOT / "docs/algorithms.md").read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("| `"):
            names = re.findall(r"`(\w+)`", line.split("|")[1])
            listed = {one for family in found.values() for one in family}
            new = [n for n in names if n in algorithms.ALGORITHMS and n not in listed]
            found.setdefault(heading, []).extend(new)
    return {family: names for family, names in found.items() if names}


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
    """A Markdown table of options, as `--help` describes them."""
    fields = registry.fields_of(algo)
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for name in names:
        meta = fields[name].metadata
        default = registry.default_text(algo, name)
        choices = ", ".join(meta.get("choices", ()))
        about = meta["help"] + (f" ({choices})" if choices else "")
        cells = (f"`--{name}`", html.escape(default), html.escape(about))
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| {row} |")
    return "\n".join(lines)


def own_options(name: str) -> list[str]:
    """The options that a method adds to those of every training."""
    return registry.groups_of(name).get(name, [])


def differing(name: str) -> list[str]:
    """The options whose defaults a variant has of its own."""
    mine, theirs = (
        {
            f.name: f.default
            for f in dataclasses.fields(algorithms.ALGORITHMS[n].HParams)
        }
        for n in (name, base(name))
    )
    return [one for one, default in mine.items() if default != theirs[one]]


def method_page(name: str) -> str:
    """The page of a method: its docstring, a command, options, rows of results."""
    entry, origin = algorithms.ALGORITHMS[name], base(name)
    title, file = algorithms.title(name), entry.make.__module__.replace(".", "/")
    parts = [f"# {title}", entry.about]
    if name != origin:
        parent = algorithms.title(origin)
        parts += [
            f"It is [{parent}]({origin}.md) with other defaults. The equations, the "
            "citation and what differs from the paper are there.",
            option_table(name, differing(name)),
        ]
    parts += [
        "## Run it",
        f"```\npython -m launch.main --algo={name}\n"
        f"python -m launch.main --algo={name} --help    # every option\n```",
        f"Rules that hold by default: `--preset={entry.preset}`, see "
        f"[presets](../algorithms.md#presets). Code: `{file}.py`.",
    ]
    groups = registry.groups_of(name)
    for heading, names in (
        ("Options of its own", own_options(name)),
        ("Options of its training", groups.get("training", [])),
    ):
        if names:
            parts += [f"## {heading}", option_table(name, names)]
    rows = list(results(title))
    if rows:
        parts += ["## In our results", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def options_page() -> str:
    """Every option that is not one method's own, by the sections of `--help`."""
    groups = registry.groups_of("fedavg")
    parts = [
        "# Options",
        "These are the options of FedAvg as `--help` prints them, with the defaults of "
        "its preset. Options of one method are on the page of the "
        "[method](../algorithms.md).",
    ]
    for group, names in groups.items():
        parts += [f"## {group}", option_table("fedavg", names)]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """The pages that are made here, by their paths in the site."""
    methods = {
        f"methods/{name}.md": method_page(name) for name in algorithms.ALGORITHMS
    }
    return methods | {
        "reference/options.md": options_page(),
        "reference/build.md": "# The Python interface\n\n::: launch.build\n",
        "reference/fedjax_pfl.md": "# For authors of methods\n\n::: fedjax_pfl\n",
    }


def on_config(config: Any) -> Any:
    """The repository's address, and the methods' pages behind docs/algorithms.md."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    if "/OWNER/" not in urls["Repository"]:
        config.repo_url = urls["Repository"]
    methods = next(entry["Methods"] for entry in config.nav if "Methods" in entry)
    methods += [
        {family: [f"methods/{name}.md" for name in names]}
        for family, names in families().items()
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
    """Links out of docs/ lead to the same path in the site, names to their pages."""
    if "/" in page.file.src_uri:
        return markdown
    shown = re.sub(r"\]\(\.\./(launch/[^)]+\.(?:md|png)[^)]*)\)", r"](\1)", markdown)
    shown = re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", shown)
    if page.file.src_uri != "algorithms.md":
        return shown
    return re.sub(r"^\| `.*?\|", _linked, shown, flags=re.MULTILINE)


def _linked(cell: re.Match) -> str:
    """A table's first cell, whose algorithms lead to their pages."""

    def link(name: re.Match) -> str:
        known = name[1] in algorithms.ALGORITHMS
        return f"[`{name[1]}`](methods/{name[1]}.md)" if known else name[0]

    return re.sub(r"`(\w+)`", link, cell[0])
