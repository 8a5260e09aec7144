"""SkyRL's inference client for Seer.

Invariants:
- all requests of one call of the generator are of the weights that were live when it began, or raise;
- a request with one session id is that trajectory's next turn, or has a rewritten history
  (`PrefixTrajectories`); weight updates wait for the next one until SkyRL has finished the session;
- a request that fails raises its error; one that nobody waits for any more is cancelled;
- what Seer does not have is refused by its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs
from skyrl.backends.skyrl_train.inference_servers.base import (
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
)

from seer.client import OpenRollout, Response, RolloutClient, SamplingParams
from seer.client.turns import PrefixTrajectories
from seer.common.errors import InvalidField, SeerError
from seer.integrations import sampling
from seer.integrations.skyrl.sessions import Sessions
from seer.integrations.submissions import Keys, generate

MAX_SESSIONS = 1_000_000
"""SkyRL finishes its sessions; this many at once are not to be expected."""

IGNORED = {"logprobs", "skip_special_tokens", "include_stop_str_in_output", "detokenize"}
"""Sampling fields that change no token: logprobs are always there, and text is decoded from all tokens."""


def sampling_params(given: Mapping[str, Any] | None) -> SamplingParams:
    """Return what SkyRL's sampling parameters for vLLM ask for. Raises `InvalidField`."""
    given = given or {}
    if (given.get("logprobs") or 0) > 1:
        raise InvalidField("sampling_params['logprobs']", given["logprobs"], "give 0 or 1")
    return sampling.sampling_params({name: each for name, each in given.items() if name not in IGNORED})


class SeerInferenceClient(InferenceEngineInterface):
    """`endpoint` is the buffer's; `tokenizer` decodes responses; `seed` is part of the noise keys.

    With `routed_experts`, answers have the experts that tokens went to.

    The client connects when it is first used, in the loop of that use. A pickled client is not connected.
    """

    def __init__(
        self, endpoint: str, tokenizer: Any, model_name: str, seed: int, *, routed_experts: bool = False
    ) -> None:
        self.endpoint = endpoint
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._seed = seed
        self._routed_experts = routed_experts
        self._sessions = Sessions()
        self._batch: Sequence[str] = ()
        self._max_input: int | None = None
        self._version = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting = asyncio.Lock()
        self._connection: tuple[RolloutClient, OpenRollout, PrefixTrajectories] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        given = self.endpoint, self._tokenizer, self._model_name, self._seed
        return partial(SeerInferenceClient, routed_experts=self._routed_experts), given

    @property
    def model_name(self) -> str:
        """The model that the engines run."""
        return self._model_name

    async def begin(self, step: int, phase: str, batch: Sequence[str], max_input: int | None) -> None:
        """Begin a call of the generator; `batch` are the session ids of its trajectories, in order.

        `max_input`: the longest context that a turn begins with, in tokens; None: there is one turn.
        """
        client, _, trajectories = await self._connected()
        trajectories.end_all()
        self._version = (await client.status()).weight_version
        self._sessions.begin(step, phase)
        self._batch = batch
        self._max_input = max_input

    async def generate(
        self, input_batch: InferenceEngineInput, model: str | None = None
    ) -> InferenceEngineOutput:
        """Return a response to each prompt, in order. Raises `InvalidField` and the client's errors."""
        if model not in (None, self._model_name):
            raise InvalidField("model", model, f"Seer runs {self._model_name} alone")
        prompts = input_batch.get("prompt_token_ids")
        if prompts is None or input_batch.get("mm_features"):
            name = "prompts" if prompts is None else "mm_features"
            raise InvalidField(name, "given", "Seer takes prompt_token_ids alone: text, no images")
        sessions = input_batch.get("session_ids") or self._batch
        if len(sessions) != len(prompts):
            fix = f"give one for each of {len(prompts)} prompts, or use SeerGenerator"
            raise InvalidField("session_ids", f"{len(sessions)} ids", fix)
        params = sampling_params(input_batch.get("sampling_params"))
        if self._routed_experts:
            params = structs.replace(params, routed_experts_from=0)
        responses = await self._responses([str(each) for each in sessions], prompts, params)
        ids = [response.token_ids.tolist() for response in responses]
        return InferenceEngineOutput(
            responses=[self._tokenizer.decode(each, skip_special_tokens=True) for each in ids],
            response_ids=ids,
            stop_reasons=[response.finish_reason for response in responses],
            response_logprobs=[response.logprobs.tolist() for response in responses],
            prompt_logprobs=None,
            rollout_expert_indices=[_lists(each) for each in responses] if self._routed_experts else None,
        )

    async def _responses(
        self, sessions: Sequence[str], prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Response]:
        """Return a response to each prompt; the only one of a trajectory with turns is its next turn."""
        _, rollout, trajectories = await self._connected()
        keys = Keys(self._seed, self._sessions.step, self._version)
        places = [self._sessions.place(session) for session in sessions]
        if self._max_input is None or len(places) > 1:
            return await generate(rollout, places, prompts, params, keys)
        group = await trajectories.generate(
            sessions[0], np.array(prompts[0], np.int32), params, group=places[0].group,
            index=places[0].index, seed=keys.seed, rollout_number=keys.rollout_number,
            weight_version=keys.weight_version, max_context=self._max_input + params.max_tokens,
        )  # fmt: skip
        return list(group.responses)

    async def _connected(self) -> tuple[RolloutClient, OpenRollout, PrefixTrajectories]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._connecting, self._connection = loop, asyncio.Lock(), None
        async with self._connecting:  # calls that come together have one client
            if self._connection is None:
                client = await RolloutClient(self.endpoint).__aenter__()
                rollout = client.open_rollout()
                trajectories = PrefixTrajectories(rollout, max_sessions=MAX_SESSIONS)
                self._connection = client, rollout, trajectories
            return self._connection

    # --- what the trainer calls around rollouts ------------------------------------------

    async def finish_session(self, session_id: str) -> None:
        """Take note that a trajectory has no more turns."""
        if self._connection is not None:
            self._connection[2].end(session_id)

    async def pause_generation(self) -> None:
        """Do nothing: weights are sent between rollouts, and the buffer holds what comes meanwhile."""

    async def resume_generation(self) -> None:
        """Do nothing, as `pause_generation`."""

    def increment_weight_version(self) -> None:
        """Do nothing: the buffer counts versions."""

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Do nothing: engines drop their KV with every update."""

    async def teardown(self) -> None:
        """Disconnect, once a first call that connects now has done so."""
        async with self._connecting:
            connection, self._connection = self._connection, None
        if connection is not None:
            await connection[0].close()

    def get_endpoint_url(self) -> str:
        """Refuse: there is no HTTP here."""
        raise SeerError("Seer's buffer speaks no HTTP: start `seer gateway`, and give agents its address")

    async def _refuse(self, *_: object, **__: object) -> Any:
        raise SeerError(
            "SeerInferenceClient generates from token ids alone, for engines of Seer's own: for chats and "
            "completions start `seer gateway`; colocate_all=true and NCCL are not supported"
        )

    chat_completion = render_chat_completion = completion = _refuse
    sleep = wake_up = get_world_size = _refuse
    init_weight_update_communicator = update_named_weights = _refuse


def _lists(response: Response) -> list[list[list[int]]]:
    """Return expert ids [tokens, layers, experts of a token] as SkyRL has them."""
    return [] if response.routed_experts is None else response.routed_experts.tolist()
