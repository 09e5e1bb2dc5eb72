"""No fault of interpretation is silent."""

import pytest

from tests.faults import __main__ as faults


@pytest.mark.slow
@pytest.mark.parametrize(
    "one", [one for _, one in faults.found()], ids=[name for name, _ in faults.found()]
)
def test_a_fault_gets_one_line(one):
    """What a user sees of it."""
    assert faults.line(one)
