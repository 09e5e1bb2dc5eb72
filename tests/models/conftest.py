"""Models as they are."""

import pytest

from tests import drawn


@pytest.fixture(scope="module", autouse=True)
def _layer_by_layer():
    with drawn.layer_by_layer():
        yield
