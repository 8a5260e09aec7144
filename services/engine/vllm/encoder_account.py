"""What vLLM's scheduler gives its vision encoder to do, in the engine process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class EncoderAccount:
    """`runs` counts images that were encoded; `most` tokens are the most that one may take, 0: none runs."""

    def __init__(self, scheduler: Scheduler) -> None:
        manager = scheduler.encoder_cache_manager
        # A larger image would wait for ever: it fits neither a step nor the cache.
        self.most = min(scheduler.max_num_encoder_input_tokens, manager.cache_size)
        self.runs = 0
        allocate = manager.allocate

        def counted(request: Request, input_id: int) -> None:
            self.runs += 1
            allocate(request, input_id)

        manager.allocate = counted
