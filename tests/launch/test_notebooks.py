"""The notebooks run from top to bottom, and are committed with what they show."""

import glob
import json
import pathlib
import re
import subprocess
import sys
import tomllib
import types
from importlib import metadata

import nbformat
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = ROOT / "launch" / "notebooks"
NAMES = ("quickstart", "your_own", "many_clients_on_tpu")


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def first(name):
    """The first code cell, which installs the package."""
    return next(c.source for c in read(name).cells if c.cell_type == "code")


def executed(name, folder):
    """Runs a notebook in a folder; returns it and everything that it printed."""
    import nbclient

    notebook = read(name)
    where = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=where).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return notebook, "".join(out.get("text", "") for out in outputs)


def test_these_are_all():
    """A new one is tested too."""
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:2])
def test_runs_from_top_to_bottom(name, tmp_path):
    """In a folder of its own; an exception in a cell is one here."""
    notebook, _ = executed(name, tmp_path)
    if name == "your_own":
        told = [
            output["text"]
            for cell in notebook.cells
            for output in cell.get("outputs", [])
            if output.get("text", "").startswith("largest difference:")
        ]
        assert len(told) == 1 and float(told[0].split(":")[1]) < 1e-6


@pytest.mark.slow
def test_many_clients_goes_on(tmp_path, monkeypatch):
    """Another runtime finds the lock of the first one, and runs nothing again."""
    monkeypatch.delenv("FEDJAX_PFL_RUNS", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    _, shown = executed("many_clients_on_tpu", tmp_path)
    assert "not a TPU but a cpu" in shown and "cells failed" not in shown
    cells = {p: p.stat().st_mtime_ns for p in tmp_path.glob("runs/scaling_*/*/*.json")}
    assert len(cells) >= 7
    [folder] = tmp_path.glob("runs/fedper-*")
    (folder / "run.lock").write_text(json.dumps({"pid": 1, "host": "another-one"}))
    _, shown = executed("many_clients_on_tpu", tmp_path)
    assert "scaling_small: 0 of" in shown and "run.lock is removed" in shown
    assert "holds this finished run" in shown
    assert all(path.stat().st_mtime_ns == then for path, then in cells.items())


@pytest.mark.parametrize("name", NAMES)
def test_committed_with_outputs(name):
    """Every cell was run, in order, without an error."""
    code = [cell for cell in read(name).cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1))
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert "error" not in kinds and kinds & {"execute_result", "display_data"}


def test_one_address():
    """The badges and the first cells have it, and the version is the package's."""
    [cell] = {first(name) for name in NAMES}
    [source] = re.findall(r"git\+https://github\.com/([\w.-]+/[\w.-]+)\"", cell)
    readme = (ROOT / "README.md").read_text()
    for name in NAMES:
        path = f"/blob/main/launch/notebooks/{name}.ipynb"
        badge = f"https://colab.research.google.com/github/{source}{path}"
        assert f"[{name}]: {badge}\n" in readme
        assert f"[![Open in Colab][badge]][{name}]" in readme
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f'VERSION = "{project["version"]}"' in cell


@pytest.fixture
def install(monkeypatch):
    """Runs the first cell with given versions installed and loaded, without pip."""
    monkeypatch.delenv("FEDJAX_PFL_SOURCE", raising=False)

    def run(installed, loaded, stderr=""):
        ran = []

        def version(name):
            if name not in installed:
                raise metadata.PackageNotFoundError(name)
            return installed[name]

        def pip(command, **_):
            ran.append(command[-1])
            if not stderr:
                installed.update(fedjax_pfl="0.1.0", jax="0.10.2", flax="0.12.1")
            return types.SimpleNamespace(returncode=bool(stderr), stderr=stderr)

        monkeypatch.setattr(glob, "glob", lambda path: [])  # no chip
        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(subprocess, "run", pip)
        for name in ("jax", "flax"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        for name, number in loaded.items():
            module = types.SimpleNamespace(__version__=number)
            monkeypatch.setitem(sys.modules, name, module)
        exec(first("quickstart"), {})
        return ran

    return run


OLD = {"jax": "0.7.2", "flax": "0.11.2"}


def test_installs_what_is_missing(install, capsys):
    """Nothing was loaded, so that the other cells can follow."""
    [wanted] = install(dict(OLD), {})
    assert wanted.startswith("fedjax_pfl") and "git+https://" in wanted
    shown = capsys.readouterr().out
    assert "fedjax_pfl 0.1.0 jax 0.10.2 flax 0.12.1" in shown


def test_says_to_restart(install):
    """Because modules that were loaded before stay as they are."""
    with pytest.raises(SystemExit, match=r"Restart the runtime .* jax 0\.7\.2 had"):
        install(dict(OLD), {"jax": "0.7.2"})


def test_installs_nothing_again(install):
    """Modules of the installed versions may be loaded."""
    new = {"jax": "0.10.2", "flax": "0.12.1"}
    assert not install({"fedjax_pfl": "0.1.0"} | new, new)


def test_names_the_address_that_failed(install):
    """In a line, with what pip said."""
    with pytest.raises(SystemExit, match="correct SOURCE above\nno such repository"):
        install(dict(OLD), {}, stderr="no such repository")
