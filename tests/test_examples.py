"""The examples in the engine's docstrings run, and its central functions have one."""

import doctest
import importlib

import pytest

EXAMPLES = {
    "aggregate": ("weighted_mean", "masked_mean", "mix_peers"),
    "averaging": ("make",),
    "boundary": ("select", "splice"),
    "each_client": ("update", "Round"),
    "levels": ("capability",),
    "local_training": ("train",),
    "options": ("option",),
    "rng": ("stream",),
}


def examples_of(module):
    """The module's docstrings that have examples, by the name of their function."""
    found = doctest.DocTestFinder(recurse=True).find(module)
    return {test.name.rpartition(".")[2]: test for test in found if test.examples}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_give_what_they_show(name):
    """Every example of a module runs and prints exactly the values that it shows."""
    module = importlib.import_module(f"fedjax_pfl.{name}")
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("name", EXAMPLES)
def test_central_functions_have_examples(name):
    """They are where a reader of the engine begins."""
    module = importlib.import_module(f"fedjax_pfl.{name}")
    assert set(EXAMPLES[name]) <= examples_of(module).keys()


def test_an_example_that_fails_is_noticed():
    """A wrong value in an example counts as a failure."""
    text = ">>> 1 + 1\n3\n"
    test = doctest.DocTestParser().get_doctest(text, {}, "wrong", None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(test, out=lambda line: None).failed == 1
