"""Who may import whom: launch -> {algorithms, models, data} -> fedjax_pfl."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ALLOWED = {
    "fedjax_pfl": {"fedjax_pfl"},
    "algorithms": {"algorithms", "fedjax_pfl"},
    "models": {"models", "fedjax_pfl"},
    "data": {"data", "fedjax_pfl"},
    "launch": {"launch", "algorithms", "models", "data", "fedjax_pfl"},
}
OWNERS = {"absl": "launch", "tensorflow_datasets": "data"}


def imports(path):
    """(module, function it is imported in or None) of every import of a file."""
    tree = ast.parse(path.read_text())
    inner = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name, node in inner) for name in names)


@pytest.mark.parametrize("folder", ALLOWED)
def test_import_rule(folder):
    """No folder sees a sibling; linen, tfds and absl stay in their houses."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name, lazy in imports(path):
            top = name.split(".")[0]
            assert top not in ALLOWED or top in ALLOWED[folder], f"{path}: {name}"
            assert OWNERS.get(top, folder) == folder, f"{path}: {name}"
            if name.startswith("flax.linen"):
                assert folder == "models", f"{path}: {name}"
            if top == "tensorflow_datasets":
                assert lazy, f"{path} imports tfds at its top"
            if folder == "algorithms" and path.name != "__init__.py":
                assert top != "algorithms", f"{path} imports another algorithm"
