"""What the engine core forgets with its weights: KV, and images that were encoded. vLLM itself forgets neither."""

from types import SimpleNamespace

import pytest

from seer.common.sleep import SleepState
from seer.services.engine.vllm.core import CoreHandle


class Client:
    """Of vLLM: notes what is reset, and takes every call of workers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
        self.engine_core = SimpleNamespace(vllm_config=config)

    def reset_prefix_cache(self) -> bool:
        self.said.append("kv")
        return True

    def reset_encoder_cache(self) -> None:
        self.said.append("images")


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> CoreHandle:
    core = CoreHandle(Client(), 1.0)
    versions = {"device": "cpu"}
    monkeypatch.setattr(CoreHandle, "versions", property(lambda self: versions))
    monkeypatch.setattr(core, "rpc", lambda method, **arguments: [""])
    core._laid_out = "laid out"
    return core


@pytest.mark.parametrize(
    "change",
    [
        lambda core: core.load_weights(["folder"], "new"),
        lambda core: core.load_weights(["folder"], "laid out"),
        lambda core: core.load_weights(["folder"], "new", adapter=True),
        lambda core: core.receive_weights(["folder"], "e0"),
        lambda core: core.sleep(SleepState.ASLEEP, 1),
    ],
    ids=["load", "laid out", "adapter", "in place", "sleep"],
)
def test_whatever_changes_the_weights_forgets_kv_and_images(core: CoreHandle, change) -> None:
    change(core)
    assert core._client.said == ["kv", "images"]
