"""What only root can make: tests that need it say so, and are left out where it cannot be made."""

import pytest

from chaos import disks, network


@pytest.fixture
def namespaces():
    if why := network.problem():
        pytest.skip(why)


@pytest.fixture
def mounts():
    if why := disks.problem():
        pytest.skip(why)
