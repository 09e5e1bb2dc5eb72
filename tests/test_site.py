"""The site of docs/: the pages that docs/hooks.py makes, and the blocks of howto.md."""

import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import algorithms

ROOT = pathlib.Path(__file__).parent.parent
HOWTO = (ROOT / "docs" / "howto.md").read_text()


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_method_has_a_page(hooks):
    """It has what its docstring says, a command, and the options of its own."""
    pages = hooks.pages()
    for name, entry in algorithms.ALGORITHMS.items():
        page = pages[f"methods/{name}.md"]
        assert page.startswith(f"# {algorithms.title(name)}\n") and entry.about in page
        assert f"--algo={name}\n" in page
    assert "`--proximal_weight`" in pages["methods/fedprox.md"]
    in_nav = [name for names in hooks.families().values() for name in names]
    assert sorted(in_nav) == sorted(algorithms.ALGORITHMS)


def test_rows_of_results_are_found(hooks):
    """FedD2S has rows in tables, each below a heading of RESULTS.md."""
    found = list(hooks.results(algorithms.title("fedd2s")))
    assert len(found) > 3 and any("#the-same-on-cifar-10" in link for link in found)


@pytest.mark.slow
def test_blocks_of_howto_run(tmp_path, monkeypatch):
    """In Python and in bash, one after another, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    names = {}
    for kind, block in re.findall(r"```(python|bash)\n(.*?)```", HOWTO, re.DOTALL):
        if kind == "python":
            exec(compile(block, "howto.md", "exec"), names)
            continue
        for line in block.splitlines():
            words = shlex.split(line)
            assert words[0] == "python"
            subprocess.run([sys.executable, *words[1:]], check=True)
    assert {"report.html", "model.msgpack"} <= {p.name for p in tmp_path.iterdir()}
