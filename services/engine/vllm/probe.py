"""Looking into a loaded engine: its logits, its noise, and drafts made up on request.

For the self-test at start, for measuring step times, and for `seer verify`. Logits are captured on an
idle engine only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from seer.common.errors import EngineError
from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk, PlacedImage
from seer.services.engine.vllm.core import CoreHandle
from seer.services.engine.vllm.drafts.draft_script import DraftScript

if TYPE_CHECKING:
    from seer.services.engine.vllm.backend import VllmBackend


class Probe:
    """Measures `backend`, which runs chunks on the engine core that `core` holds."""

    def __init__(self, backend: VllmBackend, core: CoreHandle) -> None:
        self.backend = backend
        self.core = core

    def logits(
        self, tokens: list[int], prompt_len: int | None = None, images: tuple[PlacedImage, ...] = ()
    ) -> npt.NDArray[np.float32]:
        """Return the raw next-token logits after `tokens`, computed as a prompt: shape [vocab_size].

        With a model of images only the first `prompt_len` (None: all) are one, as what looks like an image
        behind these is text. `images` are all that stand in `tokens`. Raises `EngineError` while chunks are
        running.
        """
        if prompt_len is None or not self.reads_images:
            prompt_len = len(tokens)
        sampling = SamplingParams(max_tokens=len(tokens) - prompt_len + 1, temperature=0.0, ignore_eos=True)
        chunk = Chunk(
            request_id="", group_id="", attempt=0, key=0, prompt_len=prompt_len, max_new_tokens=1,
            sampling=sampling, tokens=tokens, images=images,
        )  # fmt: skip
        row: npt.NDArray[np.float32] = self.capture(chunk)[1][0][0]
        return row

    @property
    def reads_images(self) -> bool:
        """Whether placeholders in a prompt stand for images."""
        return self.core.capacity.image_tokens > 0

    def capture(
        self, chunk: Chunk, company: Sequence[Chunk] = ()
    ) -> tuple[list[int], list[npt.NDArray[np.float32]]]:
        """Run one chunk; return its tokens, and each rank's raw logits [tokens, vocab_size].

        The chunks of `company`, under other request ids, run in the same batch. Raises `EngineError` while
        other chunks are running, and `Unsampleable` where logits leave no token.
        """
        if self.backend.has_work():
            raise EngineError("the engine is running chunks: capture logits on an idle engine")
        for other in company:
            self.backend.add(other)
        self.backend.add(chunk, capture=True)
        tokens: list[int] = []
        try:
            while self.backend.has_work():
                output = self.backend.step()
                for failure in output.failed:
                    raise failure.error
                for generated in output.generated:
                    if generated.request_id == chunk.request_id:
                        tokens += generated.token_ids
        finally:
            captured = self.core.rpc("seer_take_captured")
        return tokens, captured

    def noise_errors(self) -> list[str]:
        """Let every rank compare its noise with the reference; an empty text is a pass."""
        return self.core.rpc("seer_check_noise")

    def script_drafts(self, script: DraftScript | None) -> None:
        """Draft what a script says; None: draft from the trees again."""
        self.core.rpc("seer_script_drafts", script=script)

    def hold_drafts(self, count: int | None, longer: int = 0) -> None:
        """Have each request draft so many arbitrary tokens in each step, to time such steps.

        The first `longer` responses draft one more, but ahead, where all draft as many. None: draft from the
        trees again.
        """
        if self.core.ahead:
            self.core.held_length = count
            self.core.draft_next(0)
        elif count is None:
            self.script_drafts(None)
        else:
            vocab = self.core.vocab_size
            self.script_drafts(DraftScript(kind="random", vocab=vocab, count=count, longer=longer))
