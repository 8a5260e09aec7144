"""Turns of veRL's agent loops: the requests of a session are the turns of one trajectory. No veRL.

Invariants (tests/cluster/test_verl_turns.py):
- session i of a prompt is response i of the group that a whole group of the same prompt would be, so first
  turns have the tokens of whole groups, and siblings share drafts and length estimates;
- a request that goes on from what its session has is its next turn; any other begins a segment, which has
  noise of its own (`PrefixTrajectories`);
- names are functions of the dataset's index, the copy, the session and the prompts: not of veRL's random
  uids, nor of when or where a session asks;
- nothing waits for siblings, and weight updates do not wait for a session that has ended.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from seer.client import Group, RolloutClient
from seer.client.turns import PrefixTrajectories
from seer.common.errors import DeadlineExceeded
from seer.integrations.verl.groups import FIRST, SEGMENT, TURN, GroupKey, Request, prompt_id

MAX_SESSIONS = 1_000_000
"""Sessions end with their loops; this many at once are not to be expected."""


@dataclass(slots=True)
class Session:
    """One of the n agent loops that run for a prompt. `group` and `prompt_len` are of its first request."""

    key: GroupKey
    index: int
    group: str = ""
    prompt_len: int = 0

    @property
    def name(self) -> str:
        """A name that no other session of a step has, once the session has asked."""
        return f"{self.group}-s{self.index}"


class Turns:
    """The turns of all sessions of a worker, of the weights that are live.

    A session may generate up to `response_length` tokens. A turn that takes longer than `deadline_seconds`
    fails; None: no limit.
    """

    def __init__(
        self, client: RolloutClient, *, seed: int, response_length: int, deadline_seconds: float | None
    ) -> None:
        self._client = client
        self._seed = seed
        self._response_length = response_length
        self._deadline_seconds = deadline_seconds
        self._version = -1
        self._rollout = client.open_rollout()
        self._trajectories = self._begin()

    def kind(self, session: Session, request: Request) -> str:
        """Return which of `KINDS` a session's next request is."""
        if not session.group:
            return FIRST
        tokens = np.array(request.tokens, np.int32)
        goes_on = self._trajectories.goes_on(session.name, tokens, request.placed)
        return TURN if goes_on else SEGMENT

    async def generate(self, session: Session, request: Request, weight_version: int) -> Group:
        """Return the response to a session's next request. Raises the error that ended it."""
        self._weights_are(weight_version)
        if not session.group:
            session.group = prompt_id(session.key, request.tokens)
            session.prompt_len = len(request.tokens)
        try:
            async with asyncio.timeout(self._deadline_seconds):
                return await self._trajectories.generate(
                    session.name, np.array(request.tokens, np.int32), request.sampling, group=session.group,
                    index=session.index, seed=self._seed, rollout_number=session.key.step,
                    weight_version=weight_version, max_context=session.prompt_len + self._response_length,
                    images=request.placed,
                )  # fmt: skip
        except TimeoutError as error:
            late = f"{session.name}: a turn took longer than deadline_seconds = {self._deadline_seconds:g}"
            raise DeadlineExceeded(late, (session.name,)) from error

    def ended(self, session: Session) -> None:
        """Take note that a session will ask for nothing more."""
        self._trajectories.end(session.name)

    def _weights_are(self, version: int) -> None:
        """Begin a rollout for new weights: nothing of the old weights is of use any more."""
        if version != self._version:
            self._version = version
            self._rollout.close()
            self._rollout = self._client.open_rollout()
            self._trajectories = self._begin()

    def _begin(self) -> PrefixTrajectories:
        return PrefixTrajectories(self._rollout, max_sessions=MAX_SESSIONS)
