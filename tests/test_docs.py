"""README and the pages in docs/: their links, and the names that they list."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import pathlib
import re
import shlex
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import algorithms
import fedjax_pfl
from data import loaders, partitions, texts
from fedjax_pfl import averaging
from launch import build
from launch.config import flags, presets, registry

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


def commands(page):
    """A page's commands of `launch`, in blocks and in lines, each a list of words."""
    parts = page.read_text().split("```")
    found = [
        words
        for block in parts[1::2]
        for words in re.findall(
            r'python -m launch\.([^"\n]*)', block.replace("\\\n", " ")
        )
    ]
    found += re.findall(r"`python -m\s+launch\.([^`]*)`", " ".join(parts[::2]))
    found = [words.replace("=NAME", "=fedavg") for words in found]
    return [shlex.split(words, comments=True) for words in found]


@functools.cache
def helped(module):
    """The options that a command's `--help` prints."""
    name = {"bench": "bench.__main__", "study": "study.__main__"}.get(module, module)
    command, out = importlib.import_module(f"launch.{name}"), io.StringIO()
    command = command.main if module == "main" else command.command
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        command([module, "--help"])
    return set(re.findall(r"--(?:\[no\])?(\w+)", out.getvalue()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_their_options(page, monkeypatch):
    """A run's are parsed as they stand; cells of tables take those of any method."""
    monkeypatch.chdir(ROOT)  # where flagfiles and this file are
    mine = "--algo=mine.py", "--algo=algorithms/fedprox.py"
    every = set().union(*map(registry.fields_of, algorithms.ALGORITHMS))
    for module, *words in commands(page):
        options = [word for word in words if word[:2] == "--" and word != "--help"]
        options = [word.replace(*mine) for word in options]
        if module == "main":
            flags.parse([module, *options])
            continue
        takes_those = ("bench", "bench.torch_loop", "bench.torch_check", "reproduce")
        known = helped(module) | (every if module in takes_those else set())
        names = {word[2:].partition("=")[0] for word in options}
        assert names <= known, (module, words)


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
    ("place", "name"), [(0, "fedprox"), (3, "fedbabu"), (4, "lg_fedavg")]
)
def test_shown_algorithms_are_those_of_files(place, name):
    """The code in docs/adding.md."""
    source = (ROOT / "algorithms" / f"{name}.py").read_text()
    assert definitions(shown_algorithms()[place]) == definitions(source)


def test_the_shown_loss_trains(unequal, narrow):
    """It is asked once for each step, and its second part is seen."""

    def make(hparams, task):
        scope = {"task": task, "jnp": jnp}
        exec(shown_algorithms()[2], scope)

        def client_update(client, server):
            return fedjax_pfl.train(hparams, scope["loss_fn"], server, client)

        return averaging.make(hparams, task, client_update)

    mine = types.SimpleNamespace(HParams=averaging.Averaging, make=make)
    given = {"dataset": unequal, "model": "narrow", "num_clients": 4, "rounds": 1}
    runs = [
        build.experiment(algo=algo, preset="none", devices=1, **given)
        for algo in (mine, "fedavg")
    ]
    for one in runs:
        one.run(progress=False)
    shown, plain = (one.metrics[-1]["train_loss"] for one in runs)
    assert plain < shown < np.inf


def test_the_shown_clients_learn_from_others(unequal, narrow):
    """Without the others and the pull they are Local's."""
    scope = {"dataclasses": dataclasses, "jax": jax, "jnp": jnp, "fp": fedjax_pfl}
    exec(f"from fedjax_pfl import stacked, traffic\n{shown_algorithms()[6]}", scope)
    mine = types.SimpleNamespace(HParams=scope["HParams"], make=scope["make"])
    given = {"dataset": unequal, "model": "narrow", "num_clients": 4, "rounds": 2}
    given |= {"preset": "none", "devices": 1, "clients_per_round": 3}
    plain, alone, pulled, attracted = runs = [
        build.experiment(algo="local", **given),
        build.experiment(algo=mine, attraction=0.0, proximal_weight=0.0, **given),
        build.experiment(algo=mine, attraction=0.0, **given),
        build.experiment(algo=mine, sigma=1e9, **given),
    ]
    for one in runs:
        one.run(progress=False)
    models = [one.client_model(1).variables for one in runs]
    same = [
        all(jax.tree.leaves(jax.tree.map(np.array_equal, models[0], other)))
        for other in models[1:]
    ]
    assert same == [True, False, False]


def test_the_shown_rounds_are_fedavgs(unequal, narrow):
    """The other code in docs/adding.md runs, to the same parameters."""
    scope = {}
    exec(shown_algorithms()[1], scope)
    mine = types.SimpleNamespace(HParams=fedjax_pfl.LocalTraining, make=scope["make"])
    given = {"dataset": unequal, "model": "narrow", "num_clients": 4, "rounds": 2}
    given["devices"] = 1
    shown, ours = (
        build.experiment(algo=algo, preset="none", **given) for algo in (mine, "fedavg")
    )
    ours.simulation.advance_to(2)
    found = shown.run(progress=False)["parameters_sha256"]
    assert found == ours.simulation.digest()
    mine.make = lambda *given: scope["make"](*given)._replace(messages=())
    silent = build.experiment(algo=mine, preset="none", **given)
    told = ["declares no messages" in "".join(o.notes) for o in (shown, silent)]
    assert told == [False, True]
    size = ours.program.algorithm.messages[1].num_bytes
    assert shown.metrics[-1]["bytes_up"] == 2 * 4 * size
