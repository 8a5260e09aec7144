"""`[engine.vllm]`: what is passed on, what is refused by name, and where it shows."""

import re

import pytest

from seer.common.config import Config, EngineConfig, SharedConfig, dump, load
from seer.common.errors import ConfigError
from seer.common.vllm_settings import VllmSettings

ALL = VllmSettings(
    data_parallel_size=4, attention_backend="FLASHMLA", cudagraph_capture_sizes=(1, 8), cudagraph_mode="FULL",
    enable_expert_parallel=True, enforce_eager=False, kv_cache_dtype="fp8", quantization="fp8",
    trust_remote_code=True,
)  # fmt: skip


def test_what_is_left_out_is_vllm_s_own_default():
    assert VllmSettings().given() == VllmSettings().arguments() == VllmSettings().texts() == {}
    assert load(None).engine.vllm == VllmSettings()


def test_every_setting_has_a_value_that_is_not_its_default():
    assert ALL.given().keys() == set(VllmSettings.__struct_fields__)


def test_a_table_is_read_overridden_and_written(file):
    text = '[engine]\nmax_num_seqs = 3\n[engine.vllm]\nkv_cache_dtype = "fp8"\nquantization = "fp8"\n'
    environ = {"SEER_ENGINE__VLLM__CUDAGRAPH_MODE": "FULL", "SEER_ENGINE__VLLM__ENFORCE_EAGER": "false"}
    sets = ["engine.vllm.kv_cache_dtype=bfloat16", "engine.vllm.cudagraph_capture_sizes=[1, 8]"]
    config = load(file(text), environ, sets)
    assert config.engine.max_num_seqs == 3
    assert config.engine.vllm == VllmSettings(
        kv_cache_dtype="bfloat16", quantization="fp8", cudagraph_mode="FULL", enforce_eager=False,
        cudagraph_capture_sizes=(1, 8),
    )  # fmt: skip
    for written in (config, Config(engine=EngineConfig(vllm=ALL, name="last"))):
        assert load(file(dump(written))) == written


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('kv_cache_dtype = "int3"', r"engine\.vllm\.kv_cache_dtype"),
        ("cudagraph_capture_sizes = [0]", r"engine\.vllm\.cudagraph_capture_sizes"),
        ('cudagraph_mode = "SOME"', r"engine\.vllm\.cudagraph_mode"),
        ("kv_cache_dtyp = 1", r"unknown key engine\.vllm\.kv_cache_dtyp; did you mean engine\.vllm\.kv_cache_dtype"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named(file, text, says):
    with pytest.raises(ConfigError, match=says):
        load(file(f"[engine.vllm]\n{text}\n"))


@pytest.mark.parametrize("name", VllmSettings.REFUSED)
def test_what_is_not_passed_on_is_refused_with_the_reason(file, name):
    says = re.escape(f"engine.vllm.{name} is not passed on to vLLM: {VllmSettings.REFUSED[name]}")
    with pytest.raises(ConfigError, match=says):
        load(file(f"[engine.vllm]\n{name} = 1\n"))
    with pytest.raises(ConfigError, match=says):
        load(None, {}, [f"engine.vllm.{name}=1"])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("engine.vllm=1", r"engine\.vllm is a section; name one of its keys, as engine\.vllm\.KEY"),
        ("engine.kv_blocks.more=1", "kv_blocks is a setting, which has no more"),
        ("engine.vllm.quantization.more=1", "quantization is a setting, which has no more"),
    ],
)
def test_a_section_is_no_setting_and_a_setting_no_section(override, says):
    with pytest.raises(ConfigError, match=says):
        load(None, {}, [override])


def test_engines_with_other_settings_share_no_kv():
    from seer.services.engine.vllm.backend import VllmBackend

    class Sharing:
        def bind(self, digest):
            self.digest = digest

    def bound(digest, **settings):
        backend = VllmBackend(EngineConfig(vllm=VllmSettings(**settings)), SharedConfig())
        backend._sharing = Sharing()
        backend.bind_weights(digest)
        return backend._sharing.digest

    assert bound("abc") == "abc"
    assert bound("", quantization="fp8") == ""  # with none
    assert len({bound("abc"), bound("abc", quantization="fp8"), bound("abc", enforce_eager=True)}) == 3
    assert bound("abc", quantization="fp8") == bound("abc", quantization="fp8")


def test_graphs_have_vllm_s_two_ways_to_be_set():
    arguments = VllmSettings(cudagraph_mode="FULL", cudagraph_capture_sizes=(1, 8)).arguments()
    assert arguments == {"compilation_config": {"cudagraph_mode": "FULL"}, "cudagraph_capture_sizes": [1, 8]}


def test_no_setting_is_both_passed_on_and_refused():
    assert not VllmSettings.REFUSED.keys() & set(VllmSettings.__struct_fields__)
