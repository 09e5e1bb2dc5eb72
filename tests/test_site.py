"""The site of docs/: the pages that docs/hooks.py makes, links, blocks to copy."""

import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys
import types

import jax
import numpy as np
import pandas
import pytest

import algorithms
from launch import build

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(hooks):
    """The pages without what travels, for which each method is traced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "traffic", lambda name: "## What travels")
        return hooks.pages()


@pytest.fixture(scope="module")
def texts(hooks, made):
    """Path in the site -> Markdown, with the links as the site has them."""

    def shown(path):
        page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=path.name))
        return hooks.on_page_markdown(path.read_text(), page, None, None)

    results = {hooks.RESULTS: (ROOT / hooks.RESULTS).read_text()}
    return {path.name: shown(path) for path in PAGES} | made | results


def anchors(text):
    """The anchors of a page's headings outside its blocks of code, in order."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h).lower() for h in headings]
    return [re.sub(r"[^\w\- ]", "", h).strip().replace(" ", "-") for h in shown]


def dead_links(name, text, texts):
    """Relative links of a page that lead to nothing, or to a heading of two places."""
    folder, found = (ROOT / name).parent, []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve().relative_to(ROOT).as_posix()
        target = target if path else name
        if link.startswith("http"):
            continue
        if target not in texts:
            is_picture = target.endswith(".png") and (ROOT / target).exists()
            found += [] if is_picture else [link]
        elif anchor and anchors(texts[target]).count(anchor) != 1:
            found.append(link)
    return found


def test_links_of_the_site_lead_somewhere(texts):
    """Also those that the hooks change or make."""
    dead = {name: dead_links(name, text, texts) for name, text in texts.items()}
    assert len(dead) > 50 and not any(dead.values()), dead


def test_a_flowchart_is_a_table_that_needs_no_network(texts):
    """mermaid comes from a CDN; the page has each room of the drawing, top first."""
    page = texts["how_it_is_built.md"]
    rooms = re.findall(r"^\| \*\*(\w+)\*\* \| .+ \| (.*) \|$", page, re.MULTILINE)
    assert rooms[0] == ("commands", "tables") and rooms[-1] == ("config", "")
    assert not any("mermaid" in text for text in texts.values())


def test_a_picture_leads_to_its_file(texts):
    """A picture of several panels is small in a page."""
    path = "launch/papers/figures/fedd2s.small.png"
    assert re.search(rf"\[!\[[^\]]+\]\({path}\)\]\({path}\)", texts["index.md"])


def test_a_dead_link_is_noticed(texts):
    """A page, a heading and a picture that are not there."""
    text = "[a](no.md) [b](glossary.md#no) ![c](launch/no.png) [d](glossary.md)"
    dead = dead_links("x.md", text, texts)
    assert dead == ["no.md", "glossary.md#no", "launch/no.png"]


def test_every_page_is_in_the_navigation(hooks):
    """Of docs/ by its name; methods come by the families of docs/algorithms.md."""
    lines = (ROOT / "mkdocs.yml").read_text().splitlines()
    assert {page.name for page in PAGES} <= {line.split(" ")[-1] for line in lines}
    families = hooks.families(hooks.METHODS.read_text())
    in_nav = [name for names in families.values() for name in names]
    assert sorted(in_nav) == sorted(algorithms.ALGORITHMS)


def test_every_method_has_a_page(made):
    """It has what its docstring says, what travels, a command, options of its own."""
    for name, entry in algorithms.ALGORITHMS.items():
        page = made[f"methods/{name}.md"]
        assert page.startswith(f"# {algorithms.title(name)}\n")
        parts = entry.about.strip().split("\n\n")
        assert all(part in page for part in parts if part[:4] != "    ")
        assert f"--algo={name}\n" in page and "\n\n## What travels\n\n" in page
    assert "`--proximal_weight`" in made["methods/fedprox.md"]


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("scaffold", "local")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in algorithms.ALGORITHMS
    ],
)
def test_what_travels_is_told(hooks, name):
    """Of every method but the one that needs a file."""
    shown = hooks.traffic(name)
    assert shown.startswith("## What travels") == (name != "distill")
    assert ("| control up | up |" in shown) == (name == "scaffold")
    assert ("Nothing travels" in shown) == (name in ("local", "majority"))


def test_equations_are_mathml(hooks, made):
    """An indented line of a docstring, with its number; no script is fetched."""
    found = hooks.mathml("w_(t+1) = sum_k n_k / (n - 1) abs(w)")
    for part in (
        "<msub><mi>w</mi><mrow><mi>t</mi><mo>+</mo><mn>1</mn></mrow></msub>",
        "<munder><mo>∑</mo><mi>k</mi></munder>",
        "<mfrac><msub><mi>n</mi><mi>k</mi></msub>"
        "<mrow><mi>n</mi><mo>−</mo><mn>1</mn></mrow></mfrac>",
        "<mrow><mo>|</mo><mrow><mi>w</mi></mrow><mo>|</mo></mrow>",
    ):
        assert part in found
    assert "<msubsup><mi>I</mi><mi>j</mi><mi>Aux</mi></msubsup>" in hooks.mathml(
        "I_j^Aux"
    )
    assert "</math><span>(Eqs. 9 to 11)</span>" in made["methods/cdkt.md"]
    assert '<munder><mo rspace="0.25em">min</mo><mi>θ</mi></munder>' in hooks.mathml(
        "min_theta f_i(theta)"
    )
    of_function = "<mrow><mi>f</mi><mrow><mo>(</mo><mrow><mi>x</mi></mrow><mo>)</mo>"
    for line in ("f(x) / 2", "f(x)/2"):
        assert f"<mfrac>{of_function}" in hooks.mathml(line)
    for name, entry in algorithms.ALGORITHMS.items():
        lines = re.findall("^    .*$", entry.about, re.MULTILINE)
        page = made[f"methods/{name}.md"]
        assert len(lines) == page.count("<math") and "\n    " not in page
        assert lines or name != hooks.base(name)


def test_options_of_every_command_are_there(made):
    """Of a run by their sections, and of what comes before and after one."""
    page = made["reference/options.md"]
    for part in ("## training", "`--client_lr`", "## launch.study", "`--cell_timeout`"):
        assert part in page
    assert "| `--dry_run` | false |" in page


def test_every_method_is_cited(hooks, made):
    """By papers that its docstring names, and this project; `majority` has none."""
    text = hooks.PAPERS.read_text()
    named = set(" ".join(re.findall(r"^% (.*)$", text, re.MULTILINE)).split())
    assert named == set(algorithms.ALGORITHMS) - {"majority"}
    keys = re.findall(r"^@\w+\{(\w+),$", text, re.MULTILINE)
    assert len(keys) == len(set(keys)) == text.count("\n@")
    for name, entry in algorithms.ALGORITHMS.items():
        page = made[f"methods/{name}.md"]
        assert all(paper in page for paper in hooks.papers(name))
        assert page.count("@misc{fedjax_pfl,") == 1
        if name == hooks.base(name) and name != "majority":
            first = hooks.papers(name)[0]
            marks = re.findall(r"(?:eprint|doi|url) = \{(.*)\}", first)
            surname = re.search(r"author = \{+(?:T\. )?(\w+)", first)[1]
            assert any(mark in entry.about for mark in marks), name
            assert surname in entry.about, name
    assert text.count("{") == text.count("}")


def test_only_algorithms_lead_to_their_pages(texts):
    """Presets of the same names do not."""
    page = texts["algorithms.md"]
    assert "| [`cdkt`](methods/cdkt.md) | `cdkt` |" in page
    assert "| `cdkt` | CDKT-FL |" in page and "=examples|uniform`" in page


def test_rows_of_results_are_found(hooks):
    """FedD2S has rows in tables, each below a heading of RESULTS.md."""
    found = list(hooks.results(algorithms.title("fedd2s")))
    assert len(found) > 3 and any("#the-same-on-cifar-10" in link for link in found)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["howto.md", "first_table.md"])
def test_blocks_run(page, tmp_path, monkeypatch):
    """In Python and in bash, one after another, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text, names = (DOCS / page).read_text(), {}
    for kind, block in re.findall(r"```(python|bash)\n(.*?)```", text, re.DOTALL):
        if "import torch" in block and not importlib.util.find_spec("torch"):
            continue
        if kind == "python":
            exec(compile(block, page, "exec"), names)
            continue
        for line in block.splitlines():
            words = shlex.split(line)
            assert words[0] == "python"
            subprocess.run([sys.executable, *words[1:]], check=True)
    left = {"howto.md": "report.html", "first_table.md": "curves.pdf"}
    assert (tmp_path / left[page]).exists()


# What the blocks of a page have beside them, and what makes them small
ROWS = np.random.default_rng(0).normal(size=(120, 64)).astype(np.float32)
ANSWERS, OWNERS = np.arange(120) % 10, np.arange(120) // 20
GIVEN = {
    "README.md": {},
    "docs/python.md": {
        "images": np.zeros((2, 28, 28), np.uint8),
        "x": np.zeros((20, 28, 28), np.uint8),
        "y": ANSWERS[:20],
        "data": {"dataset": (ROWS, ANSWERS), "preset": "none"},
    },
    "docs/metrics.md": {"jax": jax, "jnp": jax.numpy},
    "docs/data.md": {
        **{"x": ROWS, "y": ANSWERS, "site": OWNERS, "np": np},
        **{"x_test": ROWS, "y_test": ANSWERS, "site_test": OWNERS},
        **{"x_val": ROWS, "y_val": ANSWERS, "site_val": OWNERS},
        "frame": pandas.DataFrame(
            {"a": ROWS[:, 0], "species": ANSWERS, "site": OWNERS}
        ),
        "pandas": pandas,
        "train": pandas.DataFrame(
            {"age": [40.0, None], "dose": 1.0, "sex": ["f", "m"]}
        ),
        "test": pandas.DataFrame({"age": [None, 50.0], "dose": 2.0, "sex": ["m", "m"]}),
    },
    "docs/studies.md": {},
}


def smaller(make):
    """A function of `build` with fewer methods, clients, rows, rounds and rates."""

    few = {"rounds": 2, "seeds": 2, "unseen_clients": 2, "tune": {"client_lr": [0.03]}}
    data = {"dataset": "mnist_5k", "num_clients": 6}

    def made(*methods, **given):
        given |= {name: few[name] for name in given.keys() & few.keys()}
        if isinstance(given.get("dataset", ""), str):
            given = {"model": "mlp"} | given | data
        if methods and len(methods[0]) > 3:
            methods = (["local", "fedavg+ft", "fedper"],)
        return make(*methods, **given)

    return made


@pytest.mark.slow
@pytest.mark.parametrize("page", GIVEN)
def test_shown_python_runs(page, tmp_path, monkeypatch):
    """As it stands, on less; what reads a model's file is in test_exports."""
    monkeypatch.chdir(tmp_path)
    for name in ("experiment", "compare", "study"):
        monkeypatch.setattr(build, name, smaller(getattr(build, name)))
    np.savez("rows.npz", train_row=np.arange(4), train_count=np.array([1, 3]))
    names, count = {"build": build, **GIVEN[page]}, 0
    text = (ROOT / page).read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if not re.search(r'saved|"model\.', block):
            exec(compile(block, page, "exec"), names)
            count += 1
    assert count


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    """Without a warning, where mkdocs is installed."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    subprocess.run([*command, f"--site-dir={tmp_path}"], cwd=ROOT, check=True)
    assert (tmp_path / "methods/fedala/index.html").exists()
