"""What slime's rollout function does by itself; `tests/with_slime` has what it does with slime."""

import importlib
import sys
from unittest.mock import MagicMock

import pytest

from seer.common.errors import RequestRefused

MODULES = (
    "slime.rollout.base_types", "slime.rollout.filter_hub.base_types", "slime.rollout.rm_hub",
    "slime.rollout.sample_hooks", "slime.utils.async_utils", "slime.utils.data", "slime.utils.misc",
    "slime.utils.processing_utils", "slime.utils.types",
)  # fmt: skip


async def test_the_error_of_a_request_is_raised_as_it_is(monkeypatch):
    names = {name.rsplit(".", depth)[0] for name in MODULES for depth in range(4)}
    for name in names:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    for name in ("seer.integrations.slime", "seer.integrations.slime.rollout"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    rollout = importlib.import_module("seer.integrations.slime.rollout")

    async def failing():
        raise RequestRefused("no", ("a",))

    async def well():
        return 1

    assert await rollout._all([well(), well()]) == [1, 1]
    with pytest.raises(RequestRefused, match="no"):
        await rollout._all([well(), failing(), failing()])
    for name in ("seer.integrations.slime", "seer.integrations.slime.rollout"):
        sys.modules.pop(name, None)
