"""What an engine needs of its machine before vLLM is imported, and what is said where it is missing."""

import gc
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from msgspec.structs import replace

from seer.common import mooncake
from seer.common.config import EngineConfig, SharedConfig
from seer.common.errors import EngineError
from seer.common.policy.device_defaults import Device
from seer.common.process import devices
from seer.common.process.devices import driver_version, visible_devices
from seer.common.vllm_settings import VllmSettings
from seer.local.pool_plan import TRY_IMPORT
from seer.services.engine.vllm import env
from seer.services.engine.vllm.cpu_fp8 import problem as fp8_problem
from seer.services.engine.vllm.env import check_compiler, no_device

H100 = Device(
    name="0",
    uuid="GPU-aa",
    model="NVIDIA H100",
    total_bytes=81559 << 20,
    free_bytes=81000 << 20,
    generation=9,
)
SMALL = Device(name="1", uuid="GPU-ab", model="NVIDIA L4", generation=8)
LISTED = """\
0, GPU-aa, NVIDIA H100, 81559, 81000, 9.0
1, GPU-ab, NVIDIA L4, [N/A], [N/A], 8.9
"""
VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (a@b)\nGCC version: 12.2.0"


@pytest.fixture(autouse=True)
def tool(tmp_path, monkeypatch):
    """An nvidia-smi that lists two devices; a test may write another."""
    folder = tmp_path / "bin"
    folder.mkdir()
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "version").write_text(VERSION)
    monkeypatch.setattr(devices, "DRIVER_FILE", tmp_path / "version")
    return file


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        (None, [H100, SMALL]),
        ("1,0", [SMALL, H100]),
        ("GPU-ab", [replace(SMALL, name="GPU-ab")]),
        ("GPU-a", [Device(name="GPU-a")]),  # of which one?
        ("MIG-3", [Device(name="MIG-3")]),
        ("0,-1,1", [H100]),
        ("", []),
    ],
)
def test_devices_are_those_that_cuda_may_use_in_its_order(shown, found):
    environ = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert visible_devices(environ) == found


@pytest.mark.parametrize("script", ["echo broken; exit 9", "echo no, devices", "exit 0"])
def test_a_tool_that_cannot_tell_lists_nothing(tool, script):
    tool.write_text(f"#!/bin/sh\n{script}\n")
    assert visible_devices({}) == []
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0"}) == [Device(name="0")]


def test_devices_without_cuda_are_an_error_that_names_the_driver(monkeypatch):
    assert driver_version() == "580.159.04"
    said = no_device("13.0")
    assert "CUDA 13.0 needs NVIDIA's driver 580 or later; driver loaded here: 580.159.04" in said
    assert "devices listed: NVIDIA H100, NVIDIA L4; CUDA_VISIBLE_DEVICES = not set" in said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "devices listed: none; CUDA_VISIBLE_DEVICES = ''" in no_device("13.0")


def test_without_a_driver_it_is_to_be_installed(tmp_path, tool):
    (tmp_path / "version").unlink()
    tool.unlink()
    assert driver_version() == ""
    assert "driver loaded here: none; devices listed: none" in no_device("13.0")
    assert "install the driver" in no_device("13.0")


def torch(*, cuda, devices):
    """As much of torch as is asked: for which CUDA it is built, and how many devices it finds."""
    found = SimpleNamespace(is_available=lambda: devices > 0, device_count=lambda: devices)
    cpu = SimpleNamespace(_is_avx512_supported=lambda: False, _is_amx_tile_supported=lambda: False)
    return SimpleNamespace(cuda=found, version=SimpleNamespace(cuda=cuda), cpu=cpu)


def test_an_engine_built_for_gpus_does_not_start_without_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", torch(cuda="13.0", devices=0))
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what it sets is not for other tests
    with pytest.raises(EngineError, match="driver loaded here: 580"):
        env.prepare(EngineConfig())


def test_bars_do_not_fill_an_engine_s_log(monkeypatch):
    """As the vllm that is imported next would draw them; what a user sets stays."""
    monkeypatch.setitem(sys.modules, "torch", torch(cuda="13.0", devices=0))
    bar = "from tqdm import tqdm; list(tqdm(range(3)))"
    for given, drawn in (({}, False), ({"TQDM_DISABLE": ""}, True)):
        monkeypatch.setattr(os, "environ", dict(os.environ) | given)
        with pytest.raises(EngineError):
            env.prepare(EngineConfig())
        shown = subprocess.run([sys.executable, "-c", bar], env=os.environ, capture_output=True, check=True)
        assert bool(shown.stderr) == drawn


@pytest.mark.vllm
def test_the_warm_up_of_vllm_s_own_sampler_compiles_nothing_by_flashinfer(monkeypatch):
    ops = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    monkeypatch.setitem(sys.modules, "torch", torch(cuda="13.0", devices=0))
    monkeypatch.setattr(ops, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(EngineError):
        env.prepare(EngineConfig())
    assert not ops.flashinfer_sampler_supported()


def test_what_vllm_does_wrongly_on_cpus_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", torch(cuda=None, devices=0))
    with pytest.raises(EngineError, match=r"shared\.model = 'm': models with latent attention .* need a GPU"):
        env.with_defaults(EngineConfig(), SharedConfig(model="m"), {"kv_lora_rank": 512})
    experts = VllmSettings(enable_expert_parallel=True)
    env.with_defaults(EngineConfig(vllm=experts), SharedConfig(), {})
    for settings, model in (
        (replace(experts, quantization="fp8"), {}),
        (experts, {"quantization_config": {"quant_method": "fp8"}}),
    ):
        with pytest.raises(
            EngineError, match=r"engine\.vllm\.enable_expert_parallel = true: .*; leave it out"
        ):
            env.with_defaults(EngineConfig(vllm=settings), SharedConfig(), model)
    cache = EngineConfig(vllm=VllmSettings(kv_cache_dtype="fp8"))
    with pytest.raises(EngineError, match=r"engine\.vllm\.kv_cache_dtype = 'fp8': .*AVX-512"):
        env.with_defaults(cache, SharedConfig(), {})


CHANNEL, TENSOR = (
    {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"type": "float", "num_bits": 8, "strategy": strategy}}}}
    for strategy in ("channel", "tensor")
)  # fmt: skip
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("settings", "model", "cpu", "problem"),
    [
        ({}, {}, "", ""),
        ({"quantization": "fp8_per_channel"}, {}, "", ""),
        ({}, {"quantization_config": CHANNEL}, "", ""),
        ({"quantization": "fp8_per_channel"}, {"num_experts": 8}, "avx512 amx", "quantization = .*experts"),
        ({}, {"quantization_config": CHANNEL, "num_experts": 8}, "", "quantization_config: .*experts"),
        ({"quantization": "fp8"}, {}, "avx512 amx", "quantization = 'fp8': .*use fp8_per_channel"),
        ({"quantization": "fp8_per_tensor"}, {}, "", "one scale a tensor"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "avx512 amx", "one scale a tensor"),
        (
            {},
            {"quantization_config": TENSOR},
            "",
            "shared.model: .*quantization_config: .*one scale a tensor",
        ),
        ({"quantization": "fp8_per_block"}, {}, "avx512", "quantization = 'fp8_per_block': .*needs AMX"),
        ({"quantization": "fp8"}, {"quantization_config": BLOCK}, "avx512", "shared.model: .*needs AMX"),
        ({}, {"quantization_config": BLOCK, "text_config": {"num_experts": 8}}, "avx512 amx", ""),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, "", "kv_cache_dtype = 'fp8_e5m2': needs AVX-512"),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, "avx512", ""),
        ({"kv_cache_dtype": "bfloat16"}, {}, "", ""),
        ({}, {"quantization_config": None}, "", ""),
        ({}, {"quantization_config": ["fp8"]}, "", ""),
        ({}, {"quantization_config": {"config_groups": {"group_0": 8}}}, "", ""),
    ],
)
def test_fp8_that_a_cpu_lacks_is_refused_by_name(settings, model, cpu, problem):
    found = fp8_problem(VllmSettings(**settings), model, avx512="avx512" in cpu, amx="amx" in cpu)
    assert re.search(problem, found) if problem else found == ""


def test_an_engine_s_own_devices_decide_what_is_left_open(tool, monkeypatch):
    mla = {"kv_lora_rank": 512}
    monkeypatch.setitem(sys.modules, "torch", torch(cuda=None, devices=0))
    config, shared = env.with_defaults(EngineConfig(max_num_seqs=3), SharedConfig(), {})
    assert (config.max_num_seqs, config.max_num_batched_tokens, shared.block_size) == (3, None, 32)
    monkeypatch.setitem(sys.modules, "torch", torch(cuda="13.0", devices=2))
    config, shared = env.with_defaults(EngineConfig(), SharedConfig(model="m"), mla)
    assert (config.max_num_seqs, config.max_num_batched_tokens, shared.block_size) == (1024, 16_384, 64)
    assert (config.gpu_memory_utilization, shared.model) == (0.9, "m")
    config, _ = env.with_defaults(EngineConfig(tensor_parallel=2), SharedConfig(), mla)
    assert config.max_num_seqs == 256  # the second device says nothing of its memory
    _, shared = env.with_defaults(EngineConfig(), SharedConfig(block_size=16), mla)
    assert shared.block_size == 16
    tool.unlink()
    config, shared = env.with_defaults(EngineConfig(), SharedConfig(), mla)
    assert (config.max_num_seqs, shared.block_size) == (256, 32)


def test_batch_invariant_engines_get_attention_that_is_exact(tool, monkeypatch):
    """Else chunks and drafts change last bits: prefills and decodes of small heads sum in other orders."""
    monkeypatch.setitem(sys.modules, "torch", torch(cuda="13.0", devices=1))

    def chosen(head_dim: int, **settings):
        config = EngineConfig(**settings)
        return env.with_defaults(config, SharedConfig(), {"head_dim": head_dim})[0].vllm

    assert chosen(32, batch_invariant=True).texts() == {"engine.vllm.attention_backend": "TRITON_ATTN"}
    assert chosen(128, batch_invariant=True) == chosen(32) == VllmSettings()
    own = VllmSettings(attention_backend="FLEX_ATTENTION", enforce_eager=True)
    assert chosen(32, batch_invariant=True, vllm=own) == own
    assert chosen(32, batch_invariant=True, vllm=VllmSettings(enforce_eager=True)).enforce_eager


def test_kernels_can_be_compiled_or_it_is_said_what_is_missing(tmp_path, tool, monkeypatch):
    monkeypatch.setenv("CC", sys.executable)  # any program that is there
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "yet"))
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(env.sysconfig, "get_path", lambda name: str(tmp_path))
    check_compiler(tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(EngineError, match=r"no C compiler \(no-such-compiler\): .*install gcc"):
        check_compiler(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tool.parent))
    with pytest.raises(EngineError, match=r"no C compiler \(gcc or clang\)"):
        check_compiler(tmp_path)
    monkeypatch.setenv("CC", sys.executable)
    (tmp_path / "Python.h").unlink()
    with pytest.raises(EngineError, match=r"Python\.h is missing: .*python3-dev"):
        check_compiler(tmp_path)


@pytest.mark.parametrize(("given", "used"), [(None, True), ("lo", True), ("ib0", False)])
def test_ranks_of_several_nodes_never_meet_on_the_loopback_that_an_engine_of_one_node_set(
    given, used, monkeypatch
):
    address = SimpleNamespace(address="10.77.0.1")
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {"lo": [SimpleNamespace(address="127.0.0.1")], "eth0": [address]}
    )
    monkeypatch.setattr(os, "environ", {} if given is None else {"GLOO_SOCKET_IFNAME": given})
    env._reach_other_nodes("10.77.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == ("eth0" if used else given)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"


def test_caches_lie_where_code_may_run(tmp_path, monkeypatch):
    noexec = tmp_path / "noexec"
    noexec.mkdir()
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(env.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()

    class Stat:
        def __init__(self, path):
            self.f_flag = os.ST_NOEXEC if Path(path) == noexec else 0

    monkeypatch.setattr(env.os, "statvfs", Stat)
    check_compiler(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match=r"XDG_CACHE_HOME: .*noexec/seer.* mounted noexec"):
        check_compiler(noexec / "seer")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(noexec))
    with pytest.raises(EngineError, match=r"TRITON_CACHE_DIR: .*noexec"):
        check_compiler(tmp_path)


NAME = "libcudart-of-this-test.so.13"
"""A name that no CUDA toolkit of this machine has, too."""

# --- Mooncake's libraries --------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path):
    """Packages: CUDA's runtime as a library, and a Mooncake that needs it loaded, as the wheel for CUDA."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path / "site"
    library = folder / "nvidia" / mooncake.CUDA_RUNTIME
    library.parent.mkdir(parents=True)
    subprocess.run(
        [compiler, "-shared", "-xc", "/dev/null", f"-Wl,-soname,{NAME}", "-o", library],
        check=True,
        timeout=60,
    )
    (folder / "mooncake").mkdir()
    (folder / "mooncake" / "__init__.py").touch()
    (folder / "mooncake" / "store.py").write_text(f"import ctypes\nctypes.CDLL('{NAME}')\n")
    return folder


def tried(site, code):
    environ = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False, timeout=60
    )


def test_mooncake_finds_cuda_s_runtime_where_pip_put_it(site):
    assert f"{NAME}: cannot open" in tried(site, "import mooncake.store").stderr
    done = tried(site, TRY_IMPORT)
    assert done.returncode == 0, done.stderr


def test_without_cuda_s_runtime_mooncake_says_what_is_missing(site):
    shutil.rmtree(site / "nvidia")
    assert f"{NAME}: cannot open" in tried(site, TRY_IMPORT).stderr


def test_a_runtime_that_cannot_be_loaded_is_left_to_mooncake_s_own_error(site):
    (site / "nvidia" / mooncake.CUDA_RUNTIME).write_text("no library")
    done = tried(site, "from seer.common.mooncake import load_cuda_runtime as load; load(); print('on')")
    assert done.stdout == "on\n"


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_once_an_engine_has_started_or_failed_to(enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(EngineError), env.without_collections():
            assert not gc.isenabled()
            raise EngineError("no model")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_harmless_lines_of_mooncake_are_left_out_and_all_others_pass():
    program = f"""
import os, subprocess, sys
from seer.common.mooncake import without_harmless_lines
with without_harmless_lines():
    os.write(2, b"E1126 {mooncake.HARMLESS[0].decode()}\\nE1126 no master\\n")
    child = subprocess.Popen(["sh", "-c", "sleep 0.1; echo from a child >&2"])
    os.write(2, b"unfinished")
os.write(2, b" and after\\n{mooncake.HARMLESS[1].decode()}\\n")
child.wait()
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=60, check=True)
    said = done.stderr.decode()
    assert mooncake.HARMLESS[0].decode() not in said
    assert said.startswith("E1126 no master\n")
    assert f" and after\n{mooncake.HARMLESS[1].decode()}\n" in said  # the filter is off again
    assert "unfinished" in said
    assert "from a child\n" in said
