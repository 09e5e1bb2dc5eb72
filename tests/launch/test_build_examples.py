"""The examples in the docstrings of `launch.build`."""

import doctest
import inspect

import pytest

from launch import build

FUNCTIONS = [name for name in build.__all__ if not inspect.isclass(vars(build)[name])]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example(name, tmp_path, monkeypatch):
    """Each public function has an example, which runs and prints what it says."""
    monkeypatch.chdir(tmp_path)
    function = vars(build)[name]
    found = doctest.DocTestFinder(recurse=False).find(function, name, globs=vars(build))
    examples = [test for test in found if test.examples]
    assert examples, f"build.{name} has no example"
    for test in examples:
        result = doctest.DocTestRunner(verbose=False).run(test)
        assert not result.failed
    assert not list(tmp_path.iterdir())
