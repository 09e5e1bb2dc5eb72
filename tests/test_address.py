"""The repository's address is pyproject's; one script writes it wherever it stands."""

import pathlib
import re
import shutil
import subprocess
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = ".ci/address"
# Where a reader may meet it
PLACES = ["pyproject.toml", "*.cff", "*.md", "*.yml", "docs/*", "launch/notebooks/*"]


def addresses(root):
    """NAME/REPOSITORY of this repository in each file that has any: {path: names}."""
    found = {}
    for path in [path for place in PLACES for path in root.glob(place)]:
        if not path.is_file():
            continue
        names = re.findall(r"github[a-z/.]*/([\w.-]+/fed\w*pfl)\b", path.read_text())
        if names:
            found[path.relative_to(root).as_posix()] = set(names)
    return found


def test_it_is_everywhere_the_same():
    """In badges, notebooks and the citation, too."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    name = urls["Repository"].removeprefix("https://github.com/")
    found = addresses(ROOT)
    assert {"README.md", "CITATION.cff"} < found.keys()
    assert len([path for path in found if path.endswith(".ipynb")]) == 3
    assert set().union(*found.values()) == {name}


def test_the_script_writes_it_everywhere(tmp_path):
    """Twice, and something else is refused before anything changes."""
    for path in [SCRIPT, *addresses(ROOT)]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for name in ("some-one/fed_pfl", "other/fedjax_pfl"):
        subprocess.run([tmp_path / SCRIPT, name], check=True)
        found = addresses(tmp_path)
        assert found.keys() == addresses(ROOT).keys()
        assert set().union(*found.values()) == {name}


@pytest.mark.parametrize("given", [[], ["alone"], ["a/b/c"], ["a/b#c"]])
def test_what_is_no_address(given):
    """One line."""
    done = subprocess.run([ROOT / SCRIPT, *given], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "give NAME/REPOSITORY\n"
