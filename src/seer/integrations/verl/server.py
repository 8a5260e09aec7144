"""veRL's server for Seer: one Ray actor per run, which knows the live weights and what went wrong.

Invariants:
- all replicas of a run share one actor; its name has Ray's job id, so that no other run finds it;
- a request that failed fails the step: the next `sleep`, which veRL calls before it trains, raises its error;
- a request of an unknown group is a group of one. Equal requests are numbered, so no noise repeats.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from seer.client import Prompt, Response, RolloutClient
from seer.common.errors import InvalidField, RolloutFailed, SeerError
from seer.common.sleep import SleepState, SleepTag
from seer.integrations.sampling import expert_ids
from seer.integrations.verl.config import ROLLOUT, Limits, Settings, check_rollout, sampling_params, settings
from seer.integrations.verl.groups import KINDS, LOOSE, Copies, Request, Submission, loose_id
from seer.integrations.verl.images import Images
from seer.integrations.verl.turns import Session, Turns

PACKAGE = "seer.integrations.verl"
MANAGER = f"{ROLLOUT}.agent.agent_loop_manager_class"

Weights = tuple[int, int]
"""The live weight version, and veRL's global step that it is of."""


class Generator:
    """Submits to the buffer; connects when it is first used. `seed` is veRL's `rollout.seed`."""

    def __init__(self, options: Settings, limits: Limits, seed: int) -> None:
        self._options = options
        self._limits = limits
        self._seed = seed
        self._client: RolloutClient | None = None
        self._turns: Turns | None = None
        self._connecting = asyncio.Lock()

    async def client(self) -> RolloutClient:
        """Return the connected client. Raises `Unreachable`."""
        async with self._connecting:
            if self._client is None:
                client = RolloutClient(self._options.endpoint)
                self._client = await client.__aenter__()
        return self._client

    async def turns(self) -> Turns:
        """Return the turns of all sessions. Raises `Unreachable`."""
        client = await self.client()
        if self._turns is None:
            self._turns = Turns(
                client, seed=self._seed, response_length=self._limits.response_length,
                deadline_seconds=self._options.deadline_seconds,
            )  # fmt: skip
        return self._turns

    async def run(self, what: Submission, weights: Weights, step: int) -> list[TokenOutput]:
        """Return all responses to a submission, in order. `step` is the rollout number of its noise keys."""
        client = await self.client()
        rollout = await client.submit(
            [Prompt(what.prompt_id, token_ids=what.request.tokens, images=what.request.placed)],
            n=what.n,
            sampling=what.request.sampling,
            seed=self._seed,
            rollout_number=step,
            weight_version=weights[0],
            deadline_seconds=self._options.deadline_seconds,
        )
        [group] = await rollout.result()
        return [_output(response, weights) for response in group.responses]

    async def turn(self, session: Session, request: Request, weights: Weights) -> TokenOutput:
        """Return the response to a session's next request."""
        turns = await self.turns()
        group = await turns.generate(session, request, weights[0])
        return _output(group.responses[0], weights)


def _output(response: Response, weights: Weights) -> TokenOutput:
    version, step = weights
    names = ("global_steps", "min_global_steps", "max_global_steps")
    return TokenOutput(
        token_ids=response.token_ids.tolist(),
        log_probs=response.logprobs.tolist(),
        stop_reason="completed",
        routed_experts=expert_ids(response),
        extra_fields=dict.fromkeys(names, step) | {"weight_version": version},
    )


def request_of(
    tokens: Sequence[int],
    given: Mapping[str, Any],
    limits: Limits,
    multi_modal: Mapping[str, Sequence[object] | None],
    images: Images | None = None,
) -> Request:
    """Return what a call of `generate` asks for. Raises `InvalidField`.

    `multi_modal` has the prompt's data by kind, of which Seer takes images, if `images` prepares them.
    """
    ids = tuple(int(token) for token in tokens)
    taken = ("images",) if images is not None else ()
    for kind, each in multi_modal.items():
        if each and kind not in taken:
            fix = (
                "Seer takes none"
                if kind != "images"
                else f"set {MANAGER} to {PACKAGE}.manager.SeerAgentLoopManager"
            )
            raise InvalidField(f"multi_modal_data[{kind!r}]", f"{len(each)} {kind}", fix)
    if images is None:
        return Request(ids, sampling_params(given, len(ids), limits))
    placed = images.located(ids, multi_modal.get("images"))
    biases = images.biases | dict(given.get("logit_bias") or {})
    return Request(
        ids, sampling_params({**given, "logit_bias": biases}, len(ids), limits),
        tuple(each.on_wire for each in placed), tuple(each.image for each in placed),
    )  # fmt: skip


def described(error: Exception) -> str:
    """Return what to say of an error in another process."""
    return str(error) if isinstance(error, SeerError) else repr(error)


class SeerServer:
    """What `rollout.name=seer` needs beside the engines, which Seer runs itself."""

    def __init__(self, options: Settings, limits: Limits, seed: int) -> None:
        self._options = options
        self._limits = limits
        self._generator = Generator(options, limits, seed)
        self._weights: Weights | None = None
        self._sleeping = SleepState.AWAKE
        self._changing = asyncio.Lock()  # each replica of a run tells the actor to sleep
        self._begun: Counter[str] = Counter()
        self._copies = Copies()
        self._failures: list[str] = []

    async def connect(self) -> None:
        """Raise `Unreachable` unless the buffer answers."""
        await self._generator.client()

    async def begin(self, kind: str) -> Weights:
        """Count a submission; return the weights that it must be generated with."""
        if self._weights is None:
            raise SeerError("veRL has sent no weights yet: nothing can be generated")
        self._begun[kind] += 1
        return self._weights

    async def failed(self, reason: str) -> None:
        """Remember that a request failed."""
        self._failures.append(reason)

    async def finish(self) -> None:
        """Say what was submitted since the last call. Raises `RolloutFailed` if a request has failed."""
        begun, self._begun = self._begun, Counter()
        failures, self._failures = self._failures, []
        if begun:
            found = ", ".join(f"{begun[kind]} {words}" for kind, words in KINDS.items() if begun[kind])
            print(
                f"Seer: submitted {found}; weights of step {self._weights and self._weights[1]}", flush=True
            )
        if failures:
            raise RolloutFailed(f"{len(failures)} requests failed; the first: {failures[0]}")

    async def weights_live(self, version: int, global_steps: int | None) -> None:
        """Take note of new weights; without a step they are of the same step as before."""
        before = 0 if self._weights is None else self._weights[1]
        self._weights = version, before if global_steps is None else global_steps

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[object] | None = None,
        video_data: Sequence[object] | None = None,
        audio_data: Sequence[object] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Generate one response to a request whose group is unknown; veRL's own clients call this."""
        try:
            multi_modal = {"images": image_data, "videos": video_data, "audios": audio_data}
            request = request_of(prompt_ids, sampling_params, self._limits, multi_modal)
            weights = await self.begin(LOOSE)
            [copy] = self._copies.number(weights[1], [request.tokens])
            what = Submission(loose_id(request, copy), request, 1, LOOSE)
            [output] = await self._generator.run(what, weights, weights[1])
        except Exception as error:
            await self.failed(described(error))
            raise
        return output

    async def sleep(self) -> None:
        """Do what `finish` does, and have engines drop weights and KV if they are to sleep.

        veRL sends weights before it samples again, so none are kept.
        """
        await self.finish()
        if self._options.sleep:
            async with self._changing:
                if self._sleeping is not SleepState.ASLEEP:
                    await (await self._generator.client()).sleep(level=2)
                    self._sleeping = SleepState.ASLEEP

    async def wake_up(self, tags: Sequence[SleepTag] | None = None) -> None:
        """Wake engines, if they sleep: all of them, or what the tags name."""
        async with self._changing:
            state = self._sleeping.woken(tags or ())
            if state != self._sleeping:
                await (await self._generator.client()).wake(tags=tags or None)
                self._sleeping = state

    async def clear_kv_cache(self) -> None:
        """Do nothing: engines drop their KV with every weight update."""

    release_kv_cache = resume_kv_cache = start_profile = stop_profile = clear_kv_cache

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Refuse: only asynchronous trainers abort."""
        raise SeerError("trainer.v1.trainer_mode: Seer's rollouts are on-policy: set it to sync")

    resume_generation = abort_all_requests


def actor_name() -> str:
    """Return the name of this run's actor."""
    return f"seer_rollout_{ray.get_runtime_context().get_job_id()}"


def find_server() -> Any:
    """Return the actor's handle. Raises `SeerError` if no replica has started it."""
    try:
        return ray.get_actor(actor_name())
    except ValueError as error:
        fix = f"set {ROLLOUT}.name=seer and {ROLLOUT}.tensor_model_parallel_size=1"
        raise SeerError(f"veRL has started no replica of Seer: {fix}") from error


class SeerReplica(RolloutReplica):
    """Starts the actor, or finds the one that another replica has started."""

    async def launch_servers(self) -> None:
        """Connect to the running Seer system. Raises `InvalidField` and `Unreachable`."""
        if self.rollout_mode is not RolloutMode.HYBRID or self.is_reward_model or self.is_teacher_model:
            fix = "Seer generates for the actor of a synchronous trainer only: use another backend here"
            raise InvalidField(f"{ROLLOUT}.name", "seer", fix)
        check_rollout(self.config)
        options = settings(self.config.engine_kwargs)
        actor = ray.remote(SeerServer).options(
            name=actor_name(), get_if_exists=True, max_concurrency=self.max_concurrency
        )
        server = actor.remote(options, Limits.of(self.config), self.config.seed)
        await server.connect.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = options.endpoint
