"""veRL's agent loops with Seer: single-turn sessions of a prompt are submitted as one group, others as turns.

Invariants:
- which requests form a group, and their ids, are decisions of `groups.py` and `turns.py`: no token depends on
  which worker runs a prompt, or on when a session asks;
- a response is of the live weights that veRL has sent last, or an error;
- a request that fails is known to the server before its session ends: veRL would go on without the response.
  Training raises the error before it uses the step's responses, validation when its prompts have ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import ray
import torch
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from seer.integrations.images import image_digest
from seer.integrations.verl.config import Limits, check_trainer, settings
from seer.integrations.verl.groups import Copies, GroupKey, Request, Submission
from seer.integrations.verl.images import Images
from seer.integrations.verl.server import Generator, described, find_server, request_of
from seer.integrations.verl.sessions import Sessions
from seer.integrations.verl.turns import Session

COPY = "seer_copy"
"""Field of a batch: how many prompts like this one came before in the step."""

SINGLE_TURN = "single_turn_agent"
"""veRL's name of the agent loop that asks once: its sessions are submitted as one group."""

GROUP: ContextVar[tuple[GroupKey, Sessions[TokenOutput]]] = ContextVar("seer_group")
IMAGES: ContextVar[Images | None] = ContextVar("seer_images")
"""Those of the worker whose session runs in this context; None: its model has no images."""

ASK: ContextVar[Callable[[Request], Awaitable[TokenOutput]]] = ContextVar("seer_ask")
"""What the session that runs in this context asks for its tokens."""


class SeerClient(LLMServerClient):
    """Takes the place of veRL's client; this object is pickled into each worker, and connects there."""

    def __init__(self, config: Any, load_balancer_handle: Any) -> None:
        super().__init__(config, load_balancer_handle)
        rollout = config.actor_rollout_ref.rollout
        self._limits = Limits.of(rollout)
        self._settings = settings(rollout.engine_kwargs)
        self._seed = int(rollout.seed)
        self._server = find_server()
        self._connection: Generator | None = None

    @property
    def _generator(self) -> Generator:
        if self._connection is None:
            self._connection = Generator(self._settings, self._limits, self._seed)
        return self._connection

    async def submit(self, what: Submission, step: int) -> list[TokenOutput]:
        """Return all responses to a submission, in order."""
        weights = await self._server.begin.remote(what.kind)
        return await self._generator.run(what, weights, step)

    async def turn(self, session: Session, request: Request) -> TokenOutput:
        """Return the response to a session's next request."""
        turns = await self._generator.turns()
        weights = await self._server.begin.remote(turns.kind(session, request))
        return await self._generator.turn(session, request, weights)

    async def ended(self, session: Session) -> None:
        """Take note that a session will ask for nothing more."""
        (await self._generator.turns()).ended(session)

    @rollout_trace_op
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[object] | None = None,
        video_data: Sequence[object] | None = None,
        audio_data: Sequence[object] | None = None,
        **others: Any,
    ) -> TokenOutput:
        """Return the next tokens of the session that calls this. Raises `SeerError`."""
        ask = ASK.get(None)
        if ask is None:  # not called by an agent loop
            return await super().generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=image_data,
                video_data=video_data, audio_data=audio_data, **others,
            )  # fmt: skip
        try:
            multi_modal = {"images": image_data, "videos": video_data, "audios": audio_data}
            request = request_of(prompt_ids, sampling_params, self._limits, multi_modal, IMAGES.get(None))
            return await ask(request)
        except Exception as error:
            await self._server.failed.remote(described(error))
            raise


class SeerAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # Ray's own forbids heirs
    """Tells the client the prompt and session of a request; each image is processed once here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._images = Images.of(self.processor)

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], **rest: Any
    ) -> None:
        rollout = self.config.actor_rollout_ref.rollout
        validate = bool(trajectory["validate"])
        n = int(prompt.get("__rollout_n__", rollout.val_kwargs.n if validate else rollout.n))
        index = str(plain(trajectory["sample_index"]))
        key = GroupKey(int(plain(trajectory["step"])), validate, index, int(prompt.pop(COPY)))
        sessions = Sessions(key, n, partial(self.llm_client.submit, step=key.step))
        IMAGES.set(self._images)
        GROUP.set((key, sessions))  # each prompt has a task, and so a context, of its own
        await super()._run_prompt(prompt, sampling_params, trajectory, **rest)

    async def _run_agent_loop(self, *args: Any, session_id: int, agent_name: str, **kwargs: Any) -> None:
        key, sessions = GROUP.get()
        session = Session(key, session_id)
        single = agent_name == SINGLE_TURN
        ask = partial(sessions.ask, session_id) if single else partial(self.llm_client.turn, session)
        ASK.set(ask)
        try:
            await super()._run_agent_loop(*args, session_id=session_id, agent_name=agent_name, **kwargs)
        finally:
            sessions.ended(session_id)
            if session.group:
                await self.llm_client.ended(session)

    async def settle(self) -> None:
        """Wait until all prompts that were begun have ended."""
        await asyncio.gather(*self.background_tasks)


class SeerAgentLoopManager(AgentLoopManagerTQ):
    """Value of `actor_rollout_ref.rollout.agent.agent_loop_manager_class`."""

    def __init__(self, config: Any, llm_client: LLMServerClient, *args: Any, **kwargs: Any) -> None:
        check_trainer(config)
        super().__init__(config, SeerClient(config, llm_client._load_balancer), *args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SeerAgentLoopWorker)
        self._copies = {validate: Copies() for validate in (False, True)}

    def generate_sequences(self, prompts: Any) -> None:
        """Have workers run a batch's agent loops. Only a validation is waited for: see the invariants."""
        validate = bool(plain(prompts["validate"])) if "validate" in prompts else False
        indices = [str(plain(index)) for index in prompts["index"]]
        texts = [json.dumps(plain(raw), default=named) for raw in prompts["raw_prompt"]]
        copies, step = self._copies[validate], int(plain(prompts["global_steps"]))
        prompts[COPY] = torch.tensor(copies.number(step, zip(indices, texts, strict=True)))
        super().generate_sequences(prompts)
        if validate:
            ray.get([worker.settle.remote() for worker in self.agent_loop_workers])
            ray.get(find_server().finish.remote())


def named(value: Any) -> str:
    """Return what JSON has in place of a value: of an image what its pixels are, not where it lies."""
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=32).hexdigest()
    return image_digest(value).hex() if hasattr(value, "getpalette") else str(value)


def plain(value: Any) -> Any:
    """Return what a tensor, an array's element or tensordict's NonTensorData holds."""
    for name in ("tolist", "data"):
        if hasattr(value, name):
            value = getattr(value, name)
            return value() if callable(value) else value
    return value
