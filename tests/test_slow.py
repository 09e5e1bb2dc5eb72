"""What tests/slow.txt names is there."""

import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parent
LINES = (FOLDER / "slow.txt").read_text().splitlines()
NAMES = [line for line in LINES if not line.startswith("#")]


@pytest.mark.parametrize("file", sorted({name.split("::")[0] for name in NAMES}))
def test_names_are_of_tests(file):
    """A test that was renamed would run with all others again."""
    text = (FOLDER / file).read_text()
    for name in NAMES:
        if name.startswith(f"{file}::"):
            test = name.split("::")[1].split("[")[0]
            assert f"def {test}(" in text


def test_names_are_of_cases(found):
    """So would a case whose parameters changed; of the files that are in this run."""
    files = {one.split("::")[0] for one in found}
    names = {f"tests/{name}" for name in NAMES}
    assert not {name for name in names - found if name.split("::")[0] in files}


def test_they_are_in_order():
    assert NAMES and NAMES == sorted(set(NAMES))
