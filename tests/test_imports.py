"""Who may import whom, and who may know an algorithm by its name.

launch -> {algorithms, models, data} -> fedjax_pfl.
"""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

import algorithms

ROOT = pathlib.Path(__file__).parent.parent
ALLOWED = {
    "fedjax_pfl": {"fedjax_pfl"},
    "algorithms": {"algorithms", "fedjax_pfl"},
    "models": {"models", "fedjax_pfl"},
    "data": {"data", "fedjax_pfl"},
    "launch": {"launch", "algorithms", "models", "data", "fedjax_pfl"},
}
OWNERS = {"absl": "launch", "tensorflow_datasets": "data"}


def shown(path):
    """A file's name inside the project."""
    return path.relative_to(ROOT).as_posix()


def imports(path):
    """(name, whether inside a function) of every import of a file."""
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


def files_of(folder):
    """The files of a folder, of which there are some."""
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_import_rule(folder):
    """No folder sees a sibling; linen, tfds and absl stay in their houses."""
    for path in files_of(folder):
        for name, lazy in imports(path):
            top = name.split(".")[0]
            assert top not in ALLOWED or top in ALLOWED[folder], f"{path}: {name}"
            assert OWNERS.get(top, folder) == folder, f"{path}: {name}"
            if name.startswith("flax.linen"):
                assert folder == "models", f"{path}: {name}"
            if top == "tensorflow_datasets":
                assert lazy, f"{path} imports tfds at its top"


def test_no_algorithm_imports_another():
    """Variants share through the engine."""
    for path in files_of("algorithms"):
        if path.name != "__init__.py":
            names = [name for name, _ in imports(path)]
            others = [n for n in names if n.split(".")[0] == "algorithms"]
            assert not others, f"{path} imports another algorithm"


def defined_in(module):
    """Names that a module of ours defines; modules of a package too."""
    folder = ROOT.joinpath(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not path.exists():
        return set()
    names = {part.stem for part in folder.glob("*")} if folder.is_dir() else set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("folder", ALLOWED)
def test_what_is_imported_exists(folder):
    """Also inside functions, where nobody would notice."""
    for path in files_of(folder):
        for name, _ in imports(path):
            module, _, member = name.rpartition(".")
            if module.split(".")[0] in ALLOWED:
                assert member in defined_in(module), f"{path}: {name}"


# Words of the language too: they name an algorithm only where something is compared.
PLAIN_WORDS = {"local", "majority"}
# Where a name is no branch: a default, an example in a message, or the partition that
# has its paper's name.
MAY_NAME = {
    "cdkt": {
        "launch/config/flags.py",
        "launch/config/schema.py",
        "launch/assemble/data_step.py",
        "launch/assemble/given.py",
        "launch/reproduce.py",
    },
    "fedavg": {
        "launch/bench/__main__.py",
        "launch/bench/measure.py",
        "launch/bench/torch_loop.py",
    },
    # What each client gains over its own model.
    "local": {"launch/show/drawn.py"},
}
# The benchmark's plain implementations, each of one algorithm.
REFERENCES = {
    "launch/bench/torch_check.py",
    "launch/tables/loops.py",
}


def docstrings(tree):
    """The nodes of all docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def words(tree):
    """(word, line, whether it is compared with) of strings, names and imports."""
    skipped = set(docstrings(tree))
    compared = {
        part
        for node in ast.walk(tree)
        if isinstance(node, (ast.Compare, ast.MatchValue))
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        texts = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts = [] if node in skipped else [node.value]
        elif isinstance(node, ast.Name):
            texts = [node.id]
        elif isinstance(node, ast.Attribute):
            texts = [node.attr]
        elif isinstance(node, ast.keyword):
            texts = [node.arg or ""]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.arg)):
            texts = [getattr(node, "name", None) or node.arg]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            texts = [module, *(alias.name for alias in node.names)]
        for text in texts:
            for word in re.findall(r"\w+", text):
                yield word.removeprefix("is_"), node.lineno, node in compared


def named(path):
    """Algorithms of the registry that a file names: {name: lines}."""
    found = {}
    for word, line, is_compared in words(ast.parse(path.read_text())):
        is_plain = word in PLAIN_WORDS and not is_compared
        if word in algorithms.ALGORITHMS and not is_plain:
            found.setdefault(word, []).append(line)
    return found


@pytest.mark.parametrize("folder", ["fedjax_pfl", "launch"])
def test_only_the_registry_knows_algorithms(folder):
    """Adding one is a file and a line there: nothing else branches on a name."""
    for path in files_of(folder):
        if shown(path) not in REFERENCES:
            found = {
                name: lines
                for name, lines in named(path).items()
                if shown(path) not in MAY_NAME.get(name, ())
            }
            assert not found, f"{path} names algorithms: {found}"


def test_a_name_would_be_found(tmp_path):
    """In a comparison, a name or an import; docstrings may say it."""
    path = tmp_path / "launch.py"
    path.write_text(
        '"""About fedavg."""\nis_fedd2s = algo in ("local", "fedmd")\n'
        'plan = "local"\nfrom algorithms import fedper\n'
    )
    assert named(path) == {"fedd2s": [2], "local": [2], "fedmd": [2], "fedper": [4]}


@pytest.mark.parametrize("module", ["launch.main", "launch.build, data.loaders"])
def test_a_command_imports_no_slow_library(module):
    """Each takes longer than the rest together, and few runs need it."""
    slow = "flax.nnx", "IPython", "pandas", "PIL", "matplotlib", "tensorflow", "sklearn"
    slow += "tensorflow_datasets", "mlxtend", "safetensors", "scipy.stats"
    code = f"import sys, {module}; print([n for n in {slow} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
