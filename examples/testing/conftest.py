"""Fixtures are made on each rank."""

import pytest
from training import make_samples


@pytest.fixture(scope="module")
def samples():
    return make_samples()
