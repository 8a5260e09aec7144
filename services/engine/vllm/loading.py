"""Loads a model into vLLM: the arguments of its engine, and what its errors mean.

Invariants:
- steps are scheduled ahead (`async_scheduling`) only if nothing here needs a step's tokens before the next
  one begins;
- `auto` dtype is the checkpoint's own (vLLM's own `auto` would make float32 half precision);
- every error is an `EngineError` that names a field of the configuration and the fix.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Any

from seer.common.config import CPU_KV_SHARE, DraftsConfig, EngineConfig, PoolConfig, SharedConfig
from seer.common.errors import EngineError
from seer.common.image_models import image_model
from seer.common.policy.device_defaults import BLOCK_SIZE
from seer.common.types import MAX_IMAGES
from seer.common.weights.digest import problem_of
from seer.services.engine.vllm.decode_graphs import capture_sizes
from seer.services.engine.vllm.drafts.head_config import MTP, check_head, head_folder, head_kind
from seer.services.engine.vllm.drafts.scratch_blocks import scratch_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from seer.services.engine.nodes.same_settings import Meeting

EXTENSION = "seer.services.engine.vllm.worker.SeerWorker"

SCHEDULERS = {
    False: "seer.services.engine.vllm.decode_scheduler.DecodeScheduler",
    True: "seer.services.engine.vllm.decode_scheduler.AsyncDecodeScheduler",
}
"""vLLM's scheduler, by whether steps are scheduled ahead."""

IMAGES: dict[str, Any] = {
    "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0},
    "mm_processor_cache_gb": 0,
    # Else vLLM normalizes pixels on the device, which the trainer's processor has done already.
    "mm_device_do_normalize": False,
}
"""For models with images: trainers process them, so vLLM's processor has nothing to do or to keep."""

GC_OBJECTS = 50_000
"""New objects after which Python looks for garbage in cycles. The lists of one step are more than its default
of 700: it would look in every step."""

MAX_VLLM_TEXT = 300
"""Characters kept of vLLM's error texts: what comes later is advice about its own flags."""


def load(
    config: EngineConfig,
    shared: SharedConfig,
    pool: PoolConfig | None,
    drafts: DraftsConfig | None,
    meeting: Meeting | None = None,
) -> InprocClient:
    """Load the model and return the engine core; `env.prepare` must have run. Takes seconds to minutes.

    With a `pool`, KV is saved there and loaded from there; with `drafts`, our speculator makes them.
    `meeting`: where its ranks meet if other nodes have some.
    """
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor import Executor

    try:
        vllm_config = _vllm_config(config, shared, pool, drafts, meeting)
        most = drafts.max_draft if drafts else 0
        executor = _profiling_executor(Executor.get_class(vllm_config), most, config.routed_experts)
        return InprocClient(vllm_config, executor, log_stats=False)
    except EngineError:
        raise
    except Exception as error:  # whatever a folder or a size provokes inside vLLM
        raise EngineError(explain(error, config, shared, drafts)) from error


def load_node(
    config: EngineConfig,
    shared: SharedConfig,
    pool: PoolConfig | None,
    drafts: DraftsConfig | None,
    meeting: Meeting,
) -> MultiprocExecutor:
    """Load the ranks that this node has of an engine whose leader is elsewhere, as `load` does its own."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    try:
        vllm_config = _vllm_config(config, shared, pool, drafts, meeting)
        return MultiprocExecutor(vllm_config)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(explain(error, config, shared, drafts)) from error


def _vllm_config(
    config: EngineConfig,
    shared: SharedConfig,
    pool: PoolConfig | None,
    drafts: DraftsConfig | None,
    meeting: Meeting | None,
) -> VllmConfig:
    """Return vLLM's configuration of this node's part. Raises `EngineError`, or what vLLM does."""
    described = model_config(shared)
    if image_model(described) is not None:
        check_torchvision(shared)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from seer.services.engine.vllm import cpu_kernels

    ahead = bool(config.async_scheduling)
    extras: dict[str, Any] = {"async_scheduling": ahead, "scheduler_cls": SCHEDULERS[ahead]}
    if not current_platform.is_cpu() and config.max_num_seqs and config.vllm.cudagraph_capture_sizes is None:
        most = drafts.max_draft if drafts is not None else 0
        sizes = capture_sizes(config.max_num_seqs, most, config.max_num_batched_tokens)
        extras["cudagraph_capture_sizes"] = sizes
    if pool is not None:
        extras["kv_transfer_config"] = _transfer(pool)
    if drafts is not None:
        extras |= {"speculative_config": speculation(drafts, config)} | _kept_asleep(drafts)
    if meeting is not None:
        extras |= {"nnodes": config.nodes, "node_rank": config.node_rank}
        extras |= {"master_addr": meeting.host, "master_port": meeting.port}
    # vLLM collects garbage several times while it loads: half a second each time, without this.
    gc.freeze()
    gc.set_threshold(GC_OBJECTS)
    scratch = scratch_blocks(drafts, shared.block_size or BLOCK_SIZE)
    if current_platform.is_cpu():
        cpu_kernels.lift_check()
    arguments = EngineArgs(**_arguments(config, shared, described, scratch) | extras)
    vllm_config: VllmConfig = arguments.create_engine_config(headless=config.node_rank > 0)
    if ahead and not vllm_config.scheduler_config.async_scheduling:
        raise EngineError(
            "engine.async_scheduling = true: vLLM does not allow it on this device; set it to false"
        )
    if drafts is not None and vllm_config.parallel_config.data_parallel_size > 1:
        # vLLM takes it away from data-parallel ranks, since drafters with a model of their own would wait for
        # each other. Ours has none, and ranks agree on the shape of each step in the step itself.
        lengths = speculation(drafts, config)["num_speculative_tokens_per_batch_size"]
        vllm_config.speculative_config.num_speculative_tokens_per_batch_size = lengths
    _check_model(vllm_config, shared)
    if drafts is not None and drafts.head:
        check_head(drafts.head, vllm_config)
    if config.routed_experts and not vllm_config.model_config.is_moe:
        raise EngineError(
            f"engine.routed_experts = true: shared.model = {shared.model!r} has no experts; set it to false"
        )
    if vllm_config.device_config.device_type == "cpu":
        vllm_config.cache_config.kv_cache_memory_bytes = _cpu_kv_bytes(config, vllm_config, scratch)
    return vllm_config


def check_torchvision(shared: SharedConfig) -> None:
    """Raise `EngineError` where torchvision, which models with images need, is missing or does not fit."""
    try:
        import torchvision  # noqa: F401 - only to see whether it loads
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
        raise EngineError(
            f"shared.model = {shared.model!r} has images, for which vLLM needs torchvision ({error}): run "
            "requirements/install_torchvision.py with this Python, which installs the build for its torch"
        ) from error


def _check_model(vllm_config: VllmConfig, shared: SharedConfig) -> None:
    """Refuse by name, before minutes of loading, models whose requests keep more than KV of their tokens."""
    model = vllm_config.model_config
    for kept, there in (
        ("state tensors (Mamba, linear attention)", model.has_inner_state),
        ("KV of an encoder", model.is_encoder_decoder),
    ):
        if there:
            raise EngineError(
                f"shared.model = {shared.model!r} keeps {kept}, which neither the memory accounts nor the KV "
                "pool know: give a decoder with attention alone"
            )


def _profiling_executor(executor: type[Executor], max_draft: int, routed_experts: bool) -> type[Executor]:
    """Return an executor that measures what memory our parts need before it sizes KV."""
    arguments = {"max_draft": max_draft, "routed_experts": routed_experts}

    class ProfilingExecutor(executor):  # type: ignore[misc]
        def determine_available_memory(self) -> list[int]:
            self.collective_rpc("seer_profile_largest_batch", kwargs=arguments)
            available: list[int] = super().determine_available_memory()
            return available

    return ProfilingExecutor


def speculation(drafts: DraftsConfig, config: EngineConfig) -> dict[str, Any]:
    """Return vLLM's configuration of drafts: of a head, or by n-grams, whose place `drafts.speculator` takes.

    Raises `EngineError` for a head that is none.
    """
    how = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    if drafts.head:
        how = (
            {"method": "mtp"}
            if drafts.head == MTP
            else {"method": head_kind(drafts.head), "model": drafts.head}
        )
    return how | {
        "num_speculative_tokens": drafts.max_draft,
        # Else vLLM gives requests that come with one token to compute that many drafts of token -1.
        "num_speculative_tokens_per_batch_size": [[1, config.max_num_seqs, drafts.max_draft]],
    }


def _kept_asleep(drafts: DraftsConfig) -> dict[str, list[str]]:
    """Return which parameters outlast sleep at level 2: those of a head, which the next load may lack."""
    return {"sleep_preserve_parameter_names": ["draft.*"]} if drafts.head else {}


def eos_ids(vllm_config: VllmConfig, tokenizer: TokenizerLike | None) -> tuple[int, ...]:
    """Return the token ids that end a response, as vLLM's input processor determines them."""
    ids = vllm_config.model_config.try_get_generation_config().get("eos_token_id")
    found = {ids} if isinstance(ids, int) else set(ids or ())
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def model_config(shared: SharedConfig) -> dict[str, Any]:
    """Return the model folder's config.json. Raises `EngineError` if this is not a model folder."""
    problem = "is not a folder here"
    if shared.model and Path(shared.model).is_dir():
        try:
            described = json.loads((Path(shared.model) / "config.json").read_text())
        except (OSError, ValueError, RecursionError) as error:
            problem = f"has no readable config.json ({error})"
        else:
            problem = "has a config.json that names no architectures"
            if isinstance(described, dict) and described.get("architectures"):
                problem = problem_of(Path(shared.model))
                if not problem:
                    return described
    raise EngineError(f"shared.model = {shared.model!r} {problem}: give a Hugging Face model folder")


def _arguments(
    config: EngineConfig, shared: SharedConfig, described: dict[str, Any], scratch: int
) -> dict[str, Any]:
    from vllm.platforms import current_platform

    return (
        {
            "model": shared.model,
            "skip_tokenizer_init": not (Path(shared.model) / "tokenizer.json").is_file(),
            "load_format": "safetensors",  # never pickles
            "dtype": _dtype(config.dtype, described),
            "max_model_len": config.max_model_len,
            "block_size": shared.block_size,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "tensor_parallel_size": config.tensor_parallel,
            "distributed_executor_backend": "mp" if config.tensor_parallel > 1 else "uni",
            # vLLM keeps one block, its null block, for itself.
            "num_gpu_blocks_override": None if config.kv_blocks is None else config.kv_blocks + 1 + scratch,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_prefix_caching": True,
            "enable_sleep_mode": current_platform.is_sleep_mode_available(),
            "enforce_eager": current_platform.is_cpu(),
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "worker_extension_cls": EXTENSION,
        }
        | (IMAGES if image_model(described) is not None else {})
        | config.vllm.arguments()
    )


def _transfer(pool: PoolConfig) -> object:
    """Return vLLM's configuration of our KV connector. Raises `EngineError` if the pool cannot be used."""
    from seer.services.engine.vllm.kv_pool import vllm_patches

    vllm_patches.prepare()
    try:
        import mooncake.store  # noqa: F401 - only to see whether it is installed
    except ImportError as error:
        raise EngineError(
            f"pool.kind = 'mooncake': Mooncake cannot be imported ({error}): install the extra cpu or "
            "cuda13, and libibverbs1, or set pool.kind = 'none'"
        ) from error
    from vllm.config import KVTransferConfig

    from seer.services.engine.vllm.kv_pool.connector import transfer_config

    try:
        return KVTransferConfig(**transfer_config(pool))
    except OSError as error:
        raise EngineError(
            f"pool.master = {pool.master!r}: not reachable from this machine ({error}); give a host and port "
            "that it knows, or its own address as pool.host"
        ) from error


def _dtype(dtype: str, described: dict[str, Any]) -> str:
    own = described.get("dtype") or described.get("torch_dtype")
    return "float32" if dtype == "auto" and own == "float32" else dtype


def _cpu_kv_bytes(config: EngineConfig, vllm_config: VllmConfig, scratch: int) -> int:
    """Return a rank's KV memory: as configured, or what all sequences can use, if that much is free."""
    import torch
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * 2**30)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers = model.get_num_layers(parallel) + (head_folder(vllm_config) is not None)
    per_token = 2 * layers * model.get_num_kv_heads(parallel) * model.get_head_size()
    block, seqs = vllm_config.cache_config.block_size, vllm_config.scheduler_config.max_num_seqs
    longest = model.max_model_len + 2 * block  # rounding, the null block
    tokens = longest * seqs + scratch * block
    usable: int = per_token * torch.finfo(model.dtype).bits // 8 * tokens
    node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    ranks = config.tensor_parallel // config.nodes * config.vllm.data_parallel_size
    return min(usable, int(node.available_memory * CPU_KV_SHARE / ranks))


def explain(
    error: Exception, config: EngineConfig, shared: SharedConfig, drafts: DraftsConfig | None = None
) -> str:
    """Return one line for an error of vLLM while loading, which names the field to change."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.partition("Value error, ")[2] or text  # pydantic begins so
    lower = text.lower()
    if isinstance(error, ModuleNotFoundError):
        fix = f"install the extra cpu or cuda13 with all that it asks for: {error.name} is missing"
    elif "error in memory profiling" in lower:
        fix = "start the engine again: another process freed memory of its device meanwhile"
    elif "calledprocesserror" in lower or isinstance(error, CalledProcessError):
        fix = "see that the C compiler works, and that Triton is installed with its headers: a kernel failed"
    elif any(
        sign in lower
        for sign in ("out of memory", "allocate memory", "less than requested", "less than desired")
    ):
        fix = f"lower {_kv_fields(config)}: there is not enough memory"
    elif "kv cache" in lower or "cache blocks" in lower:
        fix = f"lower engine.max_model_len (now {config.max_model_len}), or raise {_kv_fields(config)}"
    elif "max_model_len" in lower:
        fix = f"lower engine.max_model_len (now {config.max_model_len})"
    elif "tensor parallel" in lower or "divisible" in lower:
        fix = f"change engine.tensor_parallel (now {config.tensor_parallel}) to divide the model's heads"
    else:
        fix = "give a model folder that vLLM can load, and an engine.dtype that it knows"
    if drafts is not None and drafts.head:
        fix += f"; or change drafts.head (now {drafts.head!r})"
    if settings := ", ".join(f"{name} = {value}" for name, value in config.vllm.texts().items()):
        fix += f"; or change {settings}"
    return f"shared.model = {shared.model!r} cannot be loaded: {fix}. vLLM says: {text[:MAX_VLLM_TEXT]}"


def _kv_fields(config: EngineConfig) -> str:
    return (
        f"engine.kv_blocks (now {config.kv_blocks}), engine.kv_cache_gib (now {config.kv_cache_gib}) or "
        f"engine.gpu_memory_utilization (now {config.gpu_memory_utilization})"
    )
