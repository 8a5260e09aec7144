"""Which engines read what the buffer has on its own disk."""

import pytest

from seer.services.engine.weights.holders import Buffer


@pytest.fixture
def elsewhere(monkeypatch):
    """Engines are on other machines than the buffer."""
    monkeypatch.setattr(Buffer, "here", lambda self, state: False)


@pytest.fixture(params=["same machine", "other machines"])
def machines(request):
    if request.param == "other machines":
        request.getfixturevalue("elsewhere")
    return request.param
