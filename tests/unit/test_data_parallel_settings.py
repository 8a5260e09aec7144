"""Which engines may have data-parallel ranks, and where each rank runs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from seer.common.config import Config, EngineConfig, PoolConfig, SharedConfig
from seer.common.data_parallel import one_rank, rank_weight_bytes, refusals
from seer.common.errors import ConfigError
from seer.common.vllm_settings import VllmSettings
from seer.services.engine.vllm.data_parallel import ranked_backend, vllm_backend

ENGINE = EngineConfig(vllm=VllmSettings(data_parallel_size=2), cpu_cores="0|1")
MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    return Config(engine=ENGINE, shared=SharedConfig(model=str(tmp_path)))


def test_each_rank_has_its_cores_and_knows_its_place(config):
    rank = ranked_backend(config)._make(1, 7000)
    assert rank._place == (1, 2, 7000)
    assert rank._config.cpu_cores == "1"
    for cores, each in (("nobind", ""), ("0-3", "")):
        given = replace(config, engine=replace(ENGINE, cpu_cores=cores))
        assert ranked_backend(given)._make(0, 7000)._config.cpu_cores == each


def test_an_engine_without_ranks_is_one_backend(config):
    backend = vllm_backend(replace(config, engine=EngineConfig()), None)
    assert (type(backend).__name__, backend._place) == ("VllmBackend", None)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"tensor_parallel": 2}, "engine.tensor_parallel = 2: .*: set 1"),
        ({"nodes": 3}, "engine.nodes = 3: .*: set 1"),
        ({"in_place_updates": True}, r"engine\.in_place_updates = true: .*: set false"),
        ({"cpu_cores": "0|1|2"}, r"engine\.cpu_cores = '0\|1\|2': .*: set 2 parts"),
    ],
)
def test_what_was_not_proved_with_ranks_is_refused_by_name(config, engine, says):
    given = replace(config, engine=replace(ENGINE, **engine))
    with pytest.raises(ConfigError, match=says):
        vllm_backend(given, None)
    (refusal,) = refusals(given.engine, MIXTURE)
    assert re.match(says, f"{refusal.what} = {refusal.now}: {refusal.why}: set {refusal.wanted}")
    assert not list(refusals(replace(given.engine, vllm=VllmSettings()), MIXTURE))


def test_a_pool_is_not_refused(config):
    given = replace(config, pool=PoolConfig(kind="mooncake"))
    assert ranked_backend(given)._make(1, 7000)._pool == given.pool


def test_a_dense_model_has_no_ranks(config):
    (Path(config.shared.model) / "config.json").write_text(json.dumps(MIXTURE | {"num_experts": 0}))
    with pytest.raises(ConfigError, match=r"engine\.vllm\.data_parallel_size = 2: .*start more engines"):
        vllm_backend(config, None)


def test_what_a_rank_holds_and_one_rank_that_holds_all():
    engine = replace(ENGINE, vllm=VllmSettings(data_parallel_size=4, enable_expert_parallel=True))
    assert rank_weight_bytes(engine, 100, 80) == 20 + 20
    alone = one_rank(engine)
    assert rank_weight_bytes(alone, 100, 80) == 100
    assert (alone.cpu_cores, alone.vllm) == ("0,1", VllmSettings(enable_expert_parallel=True))
    tensor_parallel = EngineConfig(tensor_parallel=4, cpu_cores="0|1|2|3")
    assert rank_weight_bytes(tensor_parallel, 100, 80) == 25
    assert one_rank(tensor_parallel) == tensor_parallel
