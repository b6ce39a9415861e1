import pytest

from tests.support.daemons import directory


@pytest.fixture
def path():
    """The directory of a daemon."""
    with directory() as path:
        yield path
