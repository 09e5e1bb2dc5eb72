"""README and the pages in docs/: their links, and the names that they list."""

import ast
import pathlib
import re
import types

import pytest

import algorithms
import fedjax_pfl
from data import loaders, partitions, texts
from launch import build
from launch.config import presets

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
OTHERS = "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "launch/papers/RESULTS.md"
PAGES = [*(ROOT / name for name in OTHERS), *DOCS.glob("*.md")]


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Every relative link names a file that exists, and a heading in it."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_readme_or_the_start():
    """Nothing in docs/ is hidden."""
    text = (ROOT / "README.md").read_text() + (DOCS / "index.md").read_text()
    pages = [page.name for page in DOCS.glob("*.md")]
    assert not [name for name in pages if f"{name})" not in text]


@pytest.mark.parametrize(
    "page, names",
    [
        ("algorithms.md", algorithms.ALGORITHMS),
        ("algorithms.md", presets.PRESETS),
        ("data.md", [*loaders.DATASETS, *texts.TEXTS]),
        ("data.md", partitions.PARTITIONS),
    ],
    ids=["algorithms", "presets", "data sets", "partitions"],
)
def test_every_name_is_listed(page, names):
    """A page that lists names has all of them."""
    text = (DOCS / page).read_text()
    assert not [name for name in names if f"`{name}`" not in text]


def definitions(source):
    """A file's classes and functions, without their docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            del node.body[0]
    kinds = ast.ClassDef | ast.FunctionDef
    return [ast.dump(node) for node in tree.body if isinstance(node, kinds)]


def shown_algorithms():
    """The pieces of code in docs/adding.md."""
    return re.findall(r"```python\n(.*?)```", (DOCS / "adding.md").read_text(), re.S)


@pytest.mark.parametrize(
    ("place", "name"), [(0, "fedprox"), (2, "fedbabu"), (3, "lg_fedavg")]
)
def test_shown_algorithms_are_those_of_files(place, name):
    """The code in docs/adding.md."""
    source = (ROOT / "algorithms" / f"{name}.py").read_text()
    assert definitions(shown_algorithms()[place]) == definitions(source)


def test_the_shown_rounds_are_fedavgs(unequal):
    """The other code in docs/adding.md runs, to the same parameters."""
    scope = {}
    exec(shown_algorithms()[1], scope)
    mine = types.SimpleNamespace(HParams=fedjax_pfl.LocalTraining, make=scope["make"])
    given = {"dataset": unequal, "model": "mlp", "num_clients": 4, "rounds": 2}
    given["devices"] = 1
    runs = [
        build.experiment(algo=algo, preset="none", **given) for algo in (mine, "fedavg")
    ]
    found = [run.run(progress=False)["parameters_sha256"] for run in runs]
    assert found[0] == found[1]
