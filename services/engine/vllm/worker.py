"""Our part of every vLLM worker: our sampler in place of vLLM's, and access to drafts, KV and the pool.

Invariants:
- vLLM's sampler never runs, and its log-softmax and ranks only for prompts: `slot_sampler` takes their place;
- the process of a rank ends soon after its engine's, also while it loads;
- all ranks hold the same logits and rows, so all sample the same tokens without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.model_loader import get_model_loader
from vllm.triton_utils import HAS_TRITON

from seer.common.errors import EngineError
from seer.common.policy.draft_budget import DraftBudget
from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.graph_times import Graphs
from seer.common.process.log import get_logger
from seer.common.process.threads import end_with_parent
from seer.common.sleep import SleepLevel, SleepTag
from seer.common.weights.in_place import read_plan
from seer.services.engine.backend import Routes
from seer.services.engine.nodes.shares import RankReads
from seer.services.engine.vllm import cpu_kernels, decode_graphs
from seer.services.engine.vllm.cpu_experts import divide_experts, exchange_tokens
from seer.services.engine.vllm.cpu_kernels import FreshBlocks
from seer.services.engine.vllm.cpu_sleep import CpuSleep
from seer.services.engine.vllm.drafts import speculator
from seer.services.engine.vllm.drafts.device_paths import DevicePaths
from seer.services.engine.vllm.drafts.draft_script import DraftScript
from seer.services.engine.vllm.drafts.head_config import head_folder, heads_in, kept_heads, pass_by_heads
from seer.services.engine.vllm.drafts.path_selector import PathSelector
from seer.services.engine.vllm.drafts.scratch_blocks import path_blocks
from seer.services.engine.vllm.expert_routes import ExpertRoutes
from seer.services.engine.vllm.in_place import Place, Receiver, SourceLost
from seer.services.engine.vllm.laid_out import LayOutThread
from seer.services.engine.vllm.merging import Adapter
from seer.services.engine.vllm.read_slices import proven
from seer.services.engine.vllm.sampling.largest_batch import LargestBatch, measured
from seer.services.engine.vllm.sampling.sampler import sample_rows
from seer.services.engine.vllm.sampling.vectors import self_test
from seer.services.engine.vllm.slot_sampler import SlotSampler
from seer.services.engine.vllm.weight_reload import reloading

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

MEMORY_SHRANK = "Memory usage increased after sleeping."
"""vLLM's assertion after it has freed all that it frees in sleep."""

_log = get_logger()

speculator.stand_in()  # vLLM imports this before it makes a runner
end_with_parent()  # vLLM's own watch begins once a rank has loaded all, and reaches none that read over TCP


class SeerWorker:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`), for `collective_rpc`."""

    model_runner: GPUModelRunner
    vllm_config: VllmConfig
    rank: int
    reload_weights: Callable[..., None]
    sleep: Callable[[int], None]
    randomize_dummy_inputs: bool
    seer_sampler: SlotSampler
    seer_paths: DevicePaths | None
    seer_routes: ExpertRoutes | None = None
    seer_memory: CpuSleep
    seer_blocks: FreshBlocks
    seer_base: str
    seer_laid_out: LayOutThread | None = None

    def seer_try(self, method: str, arguments: dict[str, Any]) -> tuple[Any, str]:
        """Return what a method returns, or why it failed.

        Once a rank's answer is an error, vLLM leaves those of later ranks for the next call to read.
        """
        try:
            return getattr(self, method)(**arguments), ""
        except Exception as error:  # noqa: BLE001 - the engine raises it
            _log.exception("a call of a rank failed", method=method)
            return None, str(error) or repr(error)

    def seer_profile_largest_batch(self, max_draft: int, routed_experts: bool) -> None:
        """Have vLLM's memory profile run our sampler instead of its own; before KV is sized."""
        if routed_experts:
            self.seer_routes = ExpertRoutes(self.model_runner)
        if self.model_runner.device.type == "cuda":
            decode_graphs.install(self.model_runner)
        elif not HAS_TRITON:
            cpu_kernels.register()
            divide_experts()
            exchange_tokens()
        self.model_runner._dummy_sampler_run = LargestBatch(self.model_runner, max_draft)

    def seer_measure_largest_batch(self, max_draft: int) -> dict[str, float]:
        """See `largest_batch.measured`."""
        return measured(self.model_runner, max_draft)

    def seer_install(self, max_draft: int, scratch: list[int], kept_group: int) -> None:
        """Put our sampler, our drafts and their paths into the model runner.

        `scratch`: ids of the KV blocks for verifying several draft paths; if empty, one path is verified.
        `kept_group`: see `ExpertRoutes.keep`.
        """
        runner = self.model_runner
        self.seer_base = self.vllm_config.model_config.model
        self.seer_memory, self.sleep = CpuSleep(runner), sleep_beside_others(self.sleep)
        if runner.device.type == "cpu":
            self.seer_blocks = runner.kv_block_zeroer = FreshBlocks(runner)
        self.seer_sampler = runner.sampler = runner.rejection_sampler = SlotSampler(runner)
        pass_by_heads(type(runner.get_model()))
        if max_draft:
            runner.speculator.attach(runner, self.seer_sampler)
        self.seer_paths = None
        beside = self.seer_routes.keep(kept_group) if self.seer_routes is not None else None
        if has_kv_transfer_group():
            get_kv_transfer_group().begin(beside)
        if scratch:
            each = path_blocks(max_draft, runner.cache_config.block_size)
            self.seer_paths = DevicePaths(runner, scratch, each, self.seer_sampler.captures, beside)
            self.seer_sampler.paths = self.seer_paths
            runner.speculator.path_selector = PathSelector(len(scratch) // each)

    def seer_change_drafting(self, changes: list[tuple[str, dict[str, Any]]]) -> float:
        """Open, feed and forget trees, switch drafts, in order: methods of `TreeSpeculator`.

        Returns this rank's seconds spent on drafts so far.
        """
        drafter = self.model_runner.speculator
        for name, arguments in changes:
            getattr(drafter, name)(**arguments)
        return float(drafter.seconds)

    def seer_script_drafts(self, script: DraftScript | None) -> None:
        """Draft what a script says; None: draft from the trees."""
        self.model_runner.speculator.script = script

    def seer_run_dummy(self, tokens: int) -> None:
        """Run a step without requests beside other ranks, as if one verified so many tokens, as theirs do.

        vLLM's own dummy always has the most tokens that a request may have: no graph fits it and others.
        """
        runner = self.model_runner
        longest, runner.decode_query_len = runner.decode_query_len, tokens
        try:
            runner._dummy_run(tokens, uniform_decode=True, randomize_inputs=self.randomize_dummy_inputs)
        finally:
            runner.decode_query_len = longest

    def seer_stall_drafts(self, seconds: float) -> None:
        """See `StepDrafter.stall`."""
        self.model_runner.speculator.stall(seconds)

    def seer_use_common_tree(self, enabled: bool) -> None:
        """See `TreeSpeculator.use_common_tree`."""
        self.model_runner.speculator.use_common_tree(enabled)

    def seer_graphs(self) -> Graphs:
        """Return for which steps this rank has captured CUDA graphs."""
        return decode_graphs.captured(self.model_runner.cudagraph_manager).for_profile()

    def seer_set_costs(self, costs: StepCosts, max_paths: int) -> None:
        """Draft from trees from now on, as many tokens as pay with these step times."""
        budget = DraftBudget(costs, self.vllm_config.num_speculative_tokens)
        self.model_runner.speculator.set_budget(budget, max_paths)

    def seer_take_acceptance(self, groups: list[str]) -> tuple[float, dict[str, tuple[list[int], list[int]]]]:
        """Return this rank's seconds spent on drafts so far, and `TreeSpeculator.take_acceptance` of each.

        A rank that does not draft has nothing of any.
        """
        drafter = self.model_runner.speculator
        learned = {group: drafter.take_acceptance(group) for group in groups}
        return drafter.seconds, {group: each for group, each in learned.items() if each[0]}

    def seer_path_counts(self) -> dict[str, int]:
        """Return `DevicePaths.counters`: `rows`, `dropped`, `won`, `conflicts`."""
        return dict(self.seer_paths.counters) if self.seer_paths is not None else {}

    def seer_check_noise(self) -> str:
        """Compare samples on this worker's device with the reference; empty if they are equal."""
        try:
            self_test(sample_rows, self.model_runner.device)
        except EngineError as error:
            return str(error)
        return ""

    def seer_lay_out(self, folders: list[str]) -> None:
        """Begin to lay weights out for `seer_use_laid_out` while others generate."""
        model, folder = self.model_runner.get_model(), self._own(folders)
        self.seer_laid_out = LayOutThread(self.vllm_config, model, folder, self.seer_laid_out)

    def seer_lay_out_problem(self) -> str | None:
        """Return why weights could not be laid out, empty if they are; None: that is under way."""
        return "nothing is" if self.seer_laid_out is None else self.seer_laid_out.problem

    def seer_forget_laid_out(self) -> None:
        """Lay nothing out any more, and free the memory of what is, as soon as that is possible."""
        if self.seer_laid_out is not None:
            self.seer_laid_out.end()

    def seer_use_laid_out(self) -> None:
        """Load what is laid out, as `seer_load_weights` would; forget it once there is time to."""
        if self.seer_laid_out is None:
            raise EngineError("no weights are laid out")
        self.seer_laid_out.use()
        self._load_head(heads_in(self.seer_laid_out.folder, self.vllm_config))
        self.model_runner.reset_lora_state()  # as `reload_weights` does
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()

    def seer_load_weights(self, folders: list[str]) -> None:
        """Load the weights that lie in the folder of this rank's node; `folders` are by node."""
        folder = Path(self._own(folders))
        self._reload(self._weights_in(folder))
        self._load_head(heads_in(folder, self.vllm_config))

    def seer_prove_reads(self, folders: list[str]) -> RankReads | str:
        """Do as `seer_load_weights`, and return what that reads; or why nobody knows: see `proven`."""
        folder, model = Path(self._own(folders)), self.model_runner.get_model()
        found = proven(self._reload, lambda: self._weights_in(folder), folder, model, self.vllm_config)
        self._load_head(heads_in(folder, self.vllm_config))
        return found

    def _weights_in(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Return a folder's tensors as vLLM's loader yields them."""
        config, model = self.vllm_config.model_config, self.model_runner.get_model()
        config.model, config.model_weights, config.revision = str(folder), "", None
        loader = get_model_loader(self.vllm_config.load_config)
        tensors: Iterator[tuple[str, torch.Tensor]] = loader.get_all_weights(config, model)
        return tensors

    def _reload(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self.seer_laid_out is not None:
            self.seer_laid_out.end(wait=True)  # two loads at once would mix their notes
        reloading(self.reload_weights, weights_iterator=weights)

    def _load_head(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load an update's tensors of the head, if there is a head."""
        if head_folder(self.vllm_config) is not None:
            self.model_runner.speculator.load_head(tensors)

    def seer_load_adapter(self, folders: list[str]) -> None:
        """Load the model of the start, with the adapter in its node's folder merged into it."""
        base = Path(self.seer_base)
        self._reload(Adapter(Path(self._own(folders)), base).merged(self._weights_in(base)))
        self._load_head(iter(()))

    def seer_head_behind(self) -> int:
        """Return how many updates were loaded since the one that the head is of; 0 without a head."""
        return 0 if head_folder(self.vllm_config) is None else self.model_runner.speculator.updates_behind

    def _own(self, folders: list[str]) -> str:
        return folders[int(self.vllm_config.parallel_config.node_rank)]

    def seer_receive_weights(self, folders: list[str], engine: str) -> str:
        """Load weights in place, by the plan in its node's folder; return why they did not come, if so."""
        device = self.model_runner.device
        place = Place(engine, self.rank, self.vllm_config.parallel_config.world_size, device)
        try:
            receiver = Receiver(read_plan(Path(self._own(folders))), place)
        except (SourceLost, OSError, ValueError) as error:
            return str(error)
        try:
            heads: dict[str, torch.Tensor] = {}
            self._reload(kept_heads(receiver.tensors(), heads, self.vllm_config))
            self._load_head(iter(heads.items()))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the trainer may change its memory once this has returned
        finally:
            receiver.close()
        return receiver.problem

    def seer_sleep(self, tags: list[SleepTag], level: SleepLevel) -> None:
        """See `CpuSleep.sleep`; for CPUs, where vLLM has no sleep mode."""
        if self.seer_laid_out is not None:
            self.seer_laid_out.end(wait=True)  # it may still read the memory that is freed
        self.seer_memory.sleep(tags, level)

    def seer_zero_blocks(self, blocks: list[int]) -> None:
        """Zero KV blocks that no request has, if attention reads beyond contexts here."""
        if self.model_runner.device.type == "cpu":
            self.seer_blocks.zero_block_ids(blocks)

    def seer_kv_layout(self) -> list[str]:
        """Describe the layout of KV in this worker's memory: equal texts mean equal bytes."""
        runner = self.model_runner
        backends = [group.backend.full_cls_name() for groups in runner.attn_groups for group in groups]
        device = runner.device.type
        unit = torch.backends.cpu.get_cpu_capability() if device == "cpu" else device
        layout = runner.cache_config.get_resolved_kv_cache_layout()
        return [f"{backend} {layout} {unit}" for backend in backends]

    def seer_use_pool_namespace(self, namespace: str) -> None:
        """See `GuardedStore.use_namespace`."""
        get_kv_transfer_group().store.use_namespace(namespace)

    def seer_remove_from_pool(self, hashes: list[str]) -> None:
        """See `GuardedStore.remove`."""
        get_kv_transfer_group().store.remove(hashes)

    def seer_pool_counts(self) -> dict[str, int]:
        """See `GuardedStore.counts`."""
        counts: dict[str, int] = get_kv_transfer_group().store.counts()
        return counts

    def seer_read_routes(self, blocks: list[int], first: int, end: int) -> Routes | None:
        """See `ExpertRoutes.read`."""
        return self.seer_routes.read(blocks, first, end) if self.seer_routes is not None else None

    def seer_take_captured(self) -> npt.NDArray[np.float32]:
        """Return and forget the raw logits of captured requests: [rows, vocab_size]."""
        kept, self.seer_sampler.captured = self.seer_sampler.captured, []
        return np.stack(kept) if kept else np.empty((0, 0), np.float32)


def sleep_beside_others(sleep: Callable[[int], None]) -> Callable[[int], None]:
    """Return vLLM's `sleep(level)`, which does not fail if others take device memory meanwhile.

    vLLM compares the free memory of the whole device: a trainer, or another engine that wakes, may take more
    than this one frees. All of ours is free by then.
    """

    def call(level: int = 1) -> None:
        try:
            sleep(level)
        except AssertionError as error:
            if str(error) != MEMORY_SHRANK:
                raise
            _log.warning("other processes took device memory while this engine fell asleep")

    return call
