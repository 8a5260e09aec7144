"""The process environment of vLLM: variables, versions, CPU cores.

Invariant: `prepare` runs before anything imports vllm, which reads several settings once, at import.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from pathlib import Path

from seer.common.config import EngineConfig
from seer.common.errors import EngineError

VLLM_SERIES = "0.32."
"""The only series that works: our hooks are private API, which another series may change."""

_MAX_SOCKET_DIR = 70
"""Longest TMPDIR for sockets. Bytes: vLLM adds 37, and a socket's path has 107 at most."""

_FORCED = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # The engine core lives in this process: one thread steps it, its scheduler is read directly.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

_DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # The service starts engines from a thread, with sockets open: a fork would inherit a broken copy.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def prepare(config: EngineConfig) -> None:
    """Set the environment that vllm reads, check its version, bind this thread to its cores.

    Raises `EngineError` when vllm is missing or of another series.
    """
    os.environ.update(_FORCED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    _keep_out_of_tmpdir()
    # Warnings of vllm and torch about each other, which a user can do nothing about.
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    try:
        import torch

        if not torch.cuda.is_available():
            _prepare_cpu(config)
        if config.batch_invariant:
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        import vllm
    except ImportError as error:
        raise EngineError(
            f"engine.backend = 'vllm': {error}; install the extra for this machine: "
            "pip install 'seer-rollout[cpu]' (or cuda12, cuda13)"
        ) from error
    if not vllm.__version__.startswith(VLLM_SERIES):
        raise EngineError(
            f"vllm {vllm.__version__} is installed, but this version of Seer works with "
            f"vllm {VLLM_SERIES}*: install that"
        )


def cache_folder() -> Path:
    """Return the default folder for what is kept between starts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seer"


def _keep_out_of_tmpdir() -> None:
    """Keep compiled code and sockets out of TMPDIR: it is deleted with this process, and may be long."""
    with contextlib.suppress(OSError):
        compiled = cache_folder() / "torchinductor"
        compiled.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    if len(os.fsencode(tempfile.gettempdir())) > _MAX_SOCKET_DIR:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", "/tmp")  # noqa: S108 - sockets, named by a UUID


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
    ranks = config.tensor_parallel
    if ranks > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = config.cpu_cores or _share_cores(ranks)
    elif config.cpu_cores:
        _bind_thread(config.cpu_cores)


def _share_cores(ranks: int) -> str:
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
