"""The process environment of vLLM: variables, versions, CPU cores.

Invariant: `prepare` runs before anything imports vllm, which reads several settings once, at import.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from seer.common.config import EngineConfig, SharedConfig
from seer.common.errors import EngineError
from seer.common.policy.device_defaults import Device, engine_defaults, exact_attention, uses_mla
from seer.common.process.devices import driver_version, visible_devices
from seer.common.process.extras import ENGINE_FIX
from seer.common.process.scratch import cache_folder, nearest_existing
from seer.services.engine.nodes.same_settings import Meeting
from seer.services.engine.vllm import cpu_fp8

VLLM_SERIES = "0.32."
"""The only series that works: our hooks are private API, which another series may change."""

_DRIVER = "580"
"""The first driver for CUDA 13, which the wheels of this series are built for."""

_MAX_SOCKET_DIR = 70
"""Longest TMPDIR for sockets. Bytes: vLLM adds 37, and a socket's path has 107 at most."""

_FORCED = {
    # The engine core lives in this process: one thread steps it, its scheduler is read directly.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    # vLLM's own sampler runs in its warm-up alone, for which FlashInfer would compile with nvcc and ninja.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

_DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # On GPUs bars of compiling and capturing fill the log, whose end is all that is shown of a dead engine.
    "TQDM_DISABLE": "1",
    # The service starts engines from a thread, with sockets open: a fork would inherit a broken copy.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Have Python look for no garbage: what imports and loading make stays, and to look takes a fifth."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def with_schedule(config: EngineConfig) -> EngineConfig:
    """Return the configuration with whether it schedules ahead, which it may leave open."""
    if config.async_scheduling is None:
        gpu = False
        with contextlib.suppress(ImportError):  # `prepare` says it
            import torch

            gpu = torch.cuda.is_available()
        config = replace(config, async_scheduling=gpu)
    return config


class RankPlace(NamedTuple):
    """Which of an engine's data-parallel ranks one is, and the port of this machine where they meet."""

    rank: int
    ranks: int
    port: int


def prepare(config: EngineConfig, meeting: Meeting | None = None, place: RankPlace | None = None) -> None:
    """Set the environment that vllm reads, check its version, bind this thread to its cores.

    `meeting`: where the ranks of several nodes meet; None: all are here. `place`: see `RankPlace`.
    Raises `EngineError` when vllm is missing or of another series, and where its build for GPUs finds none.
    """
    os.environ.update(_FORCED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if meeting is not None:
        _reach_other_nodes(meeting.own)
    else:  # else every group of ranks, of one rank too, listens at this machine's address in the world
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if place is not None:
        names = {"SIZE": place.ranks, "RANK": place.rank, "RANK_LOCAL": place.rank, "MASTER_PORT": place.port}
        os.environ.update({f"VLLM_DP_{name}": str(value) for name, value in names.items()})
    _keep_out_of_tmpdir()
    # Warnings of vllm and torch about each other, which a user can do nothing about.
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    try:
        import torch

        if torch.cuda.is_available():
            check_compiler(cache_folder())
        elif torch.version.cuda is not None:
            raise EngineError(no_device(torch.version.cuda))
        else:
            _prepare_cpu(config)
        if config.batch_invariant:
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        import vllm
    except ImportError as error:
        raise EngineError(f"engine.backend = 'vllm': {error}; {ENGINE_FIX}") from error
    if not vllm.__version__.startswith(VLLM_SERIES):
        raise EngineError(
            f"vllm {vllm.__version__} is installed, but this version of Seer works with "
            f"vllm {VLLM_SERIES}*: install that"
        )


def with_defaults(
    config: EngineConfig, shared: SharedConfig, model: Mapping[str, Any]
) -> tuple[EngineConfig, SharedConfig]:
    """Return both with what they leave open set for this process's devices; `model` is its config.json.

    Raises `EngineError` for a model that does not run on them.
    """
    import torch

    devices: list[Device] = []
    if torch.cuda.is_available():
        if config.batch_invariant and config.vllm.attention_backend is None:
            config = replace(config, vllm=replace(config.vllm, attention_backend=exact_attention(model)))
        # A container may be without nvidia-smi.
        devices = visible_devices() or [Device(name=str(i)) for i in range(torch.cuda.device_count())]
    else:
        _check_cpu(config, shared, model)
    default = engine_defaults(
        devices[: config.tensor_parallel // config.nodes], config.tensor_parallel // config.nodes, model,
        instances=1, attention_backend=config.vllm.attention_backend,
    )  # fmt: skip
    block_size = default.block_size if shared.block_size is None else shared.block_size
    return replace(config, **default.unset(config)), replace(shared, block_size=block_size)


def _check_cpu(config: EngineConfig, shared: SharedConfig, model: Mapping[str, Any]) -> None:
    """Raise `EngineError` for what vLLM takes on CPUs and does wrongly there."""
    if uses_mla(model):
        raise EngineError(
            f"shared.model = {shared.model!r}: models with latent attention (MLA), such as DeepSeek, "
            f"need a GPU: on CPUs vLLM {VLLM_SERIES}* has other logits for a prefill than for decodes"
        )
    quantized = config.vllm.quantization or model.get("quantization_config")
    if config.vllm.enable_expert_parallel and quantized:
        raise EngineError(
            f"engine.vllm.enable_expert_parallel = true: on CPUs vLLM {VLLM_SERIES}* divides no quantized "
            "experts; leave it out"
        )
    import torch

    avx512, amx = torch.cpu._is_avx512_supported(), torch.cpu._is_amx_tile_supported()
    if problem := cpu_fp8.problem(config.vllm, model, avx512=avx512, amx=amx):
        raise EngineError(problem)


def no_device(cuda: str) -> str:
    """Return why torch, built for this version of CUDA, finds no device here, and what to do."""
    driver = driver_version()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = ", ".join(device.model or device.name for device in visible_devices()) or "none"
    needs = f"CUDA {cuda} needs NVIDIA's driver {_DRIVER} or later"
    if driver:
        fix = "update the driver if it is older, and check that this process may open /dev/nvidia*"
    else:
        fix = "install the driver, and in a container give access to the devices; or install the extra cpu"
    return (
        f"CUDA is not available: {needs}; driver loaded here: {driver or 'none'}; devices listed: {listed}; "
        f"CUDA_VISIBLE_DEVICES = {'not set' if shown is None else repr(shown)}: {fix}"
    )


def check_compiler(cache: Path) -> None:
    """Raise `EngineError` unless kernels can be compiled here: Triton and vLLM do so while an engine runs."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler) is None:
        raise EngineError(f"no C compiler ({compiler or 'gcc or clang'}): Triton needs one; install gcc")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise EngineError(f"{header} is missing: Triton compiles against it; install python3-dev")
    triton = os.environ.get("TRITON_CACHE_DIR") or os.environ.get("TRITON_HOME") or str(Path.home())
    for name, folder in (("XDG_CACHE_HOME", cache), ("TRITON_CACHE_DIR", Path(triton))):
        if _forbids_code(folder):
            raise EngineError(
                f"{name}: {folder} is on a file system mounted noexec, from which compiled kernels cannot be "
                "loaded; set it to another folder"
            )


def _forbids_code(folder: Path) -> bool:
    """Return whether files there may not be run; of a folder that does not exist yet, its nearest parent."""
    return bool(os.statvfs(nearest_existing(folder)).f_flag & os.ST_NOEXEC)


def _keep_out_of_tmpdir() -> None:
    """Keep compiled code and sockets out of TMPDIR: it is deleted with this process, and may be long."""
    with contextlib.suppress(OSError):
        compiled = cache_folder() / "torchinductor"
        compiled.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    if len(os.fsencode(tempfile.gettempdir())) > _MAX_SOCKET_DIR:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", "/tmp")  # noqa: S108 - sockets, named by a UUID


def _reach_other_nodes(own: str) -> None:
    """Have ranks listen at this node's address, on its interface alone. Raises `EngineError`."""
    import psutil

    addresses = {name: [each.address for each in all_of] for name, all_of in psutil.net_if_addrs().items()}
    interface = next((name for name, all_of in addresses.items() if own in all_of), None)
    if interface is None:
        fix = "give an address of the machine that has engine.node_rank = 0"
        raise EngineError(f"engine.leader: {own} is no address of this machine; {fix}")
    os.environ["VLLM_HOST_IP"] = own
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if os.environ.get(name, "lo") == "lo":  # an engine of one node left it to this process
            os.environ[name] = interface


def _prepare_cpu(config: EngineConfig) -> None:
    if config.batch_invariant:
        raise EngineError(
            "engine.batch_invariant = true: vLLM has batch-invariant kernels for GPUs alone, and no GPU is "
            "usable here; set it to false"
        )
    # vLLM's sampler compiles its logprobs even with enforce_eager: 19 s on the first request.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # An inherited value overrides kv_cache_memory_bytes, and knows whole GiB only.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if config.tensor_parallel > 1:
        ranks = config.tensor_parallel // config.nodes
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = config.cpu_cores or share_cores(ranks)
    elif config.cpu_cores:
        _bind_thread(config.cpu_cores)


def share_cores(ranks: int) -> str:
    """Split this process's cores evenly between ranks; fewer cores than ranks are not bound."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks
    if not each:
        return "nobind"
    return "|".join(",".join(map(str, cores[i * each : (i + 1) * each])) for i in range(ranks))


def _bind_thread(text: str) -> None:
    """Bind this thread and its future OpenMP threads to cores: vLLM binds only its own workers."""
    import torch

    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
        os.sched_setaffinity(0, cores)
    except (ValueError, OSError) as error:
        raise EngineError(
            f"engine.cpu_cores = {text!r}: {error}; give cores of this machine as 0-3,8"
        ) from error
    torch.set_num_threads(len(cores))
