"""What a gateway's clients are told by `run.py`; without it there is nothing to test."""

import json
import os
import urllib.request

import pytest

collect_ignore_glob = [] if "GATEWAY_DATA" in os.environ else ["test_*.py"]


def counters(control: str) -> dict[str, int]:
    """What the gateway has counted so far."""
    with urllib.request.urlopen(f"{control}/server_info") as answer:
        return json.load(answer)["seer"]["counters"]


@pytest.fixture
def data() -> str:
    """URL for generation alone."""
    return os.environ["GATEWAY_DATA"]


@pytest.fixture
def control() -> str:
    """URL for all routes."""
    return os.environ["GATEWAY_CONTROL"]


@pytest.fixture
def model() -> str:
    """The model's folder."""
    return os.environ["GATEWAY_MODEL"]
