"""docs/http_fields.md is what vLLM's own server and the gateway answer now."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:  # not imported: each worker collects this
    pytest.skip("needs the engine extra", allow_module_level=True)

from http_fields.servers import both
from http_fields.table import MARK, PAGE, page


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.breadth
def test_the_page_is_up_to_date() -> None:
    told = page(*both())
    assert PAGE.read_text().partition(MARK)[2] == told, "python tests/http_fields/table.py writes it anew"
