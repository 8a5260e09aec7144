"""Which engines may have data-parallel ranks, and where each rank runs."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

from seer.common.config import Config, EngineConfig, PoolConfig, SharedConfig
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
    ("engine", "pool", "says"),
    [
        ({"tensor_parallel": 2}, "none", "set engine.tensor_parallel and nodes to 1"),
        ({"nodes": 2}, "none", "set engine.tensor_parallel and nodes to 1"),
        ({"in_place_updates": True}, "none", r"set engine\.in_place_updates = false"),
        ({}, "mooncake", r"set pool\.kind = 'none'"),
        ({"cpu_cores": "0|1|2"}, "none", r"engine\.cpu_cores = '0\|1\|2': give 2 parts"),
    ],
)
def test_what_was_not_proved_with_ranks_is_refused_by_name(config, engine, pool, says):
    given = replace(config, engine=replace(ENGINE, **engine), pool=PoolConfig(kind=pool))
    with pytest.raises(ConfigError, match=says):
        vllm_backend(given, None)


def test_a_dense_model_has_no_ranks(config):
    (Path(config.shared.model) / "config.json").write_text(json.dumps(MIXTURE | {"num_experts": 0}))
    with pytest.raises(ConfigError, match=r"engine\.vllm\.data_parallel_size = 2: .*start more engines"):
        vllm_backend(config, None)
