"""No fault of interpretation is silent."""

import pytest

from tests.faults import __main__ as faults


@pytest.mark.parametrize(("name", "one"), list(faults.found()))
def test_a_fault_gets_one_line(name, one):
    """What a user sees of it."""
    assert faults.line(one)
