"""What a gateway's clients are told by `run.py`; without it there is nothing to test."""

import json
import os
import urllib.request
from collections.abc import Callable

import pytest

collect_ignore_glob = [] if "GATEWAY_DATA" in os.environ else ["test_*.py"]


@pytest.fixture
def data() -> str:
    """URL for generation alone."""
    return os.environ["GATEWAY_DATA"]


@pytest.fixture
def experts() -> str:
    """URL for generation alone by a model with experts."""
    return os.environ["GATEWAY_EXPERTS"]


@pytest.fixture
def tools() -> str:
    """URL of a gateway whose model calls `look_up` three times: `scripted.py`."""
    return os.environ["GATEWAY_TOOLS"]


@pytest.fixture
def control() -> str:
    """URL for all routes."""
    return os.environ["GATEWAY_CONTROL"]


@pytest.fixture
def model() -> str:
    """The model's folder."""
    return os.environ["GATEWAY_MODEL"]


@pytest.fixture
def counters(control: str) -> Callable[[], dict[str, int]]:
    """Returns what the gateway has counted so far."""

    def read() -> dict[str, int]:
        with urllib.request.urlopen(f"{control}/server_info") as answer:
            return json.load(answer)["seer"]["counters"]

    return read
