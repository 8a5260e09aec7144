"""One prompt's sessions while they run: carries out what `groups.py` decides. asyncio alone, no veRL.

Invariants:
- a request returns the response that it was given, or raises the error of its submission; a session may make
  several at once;
- a session that is cancelled cancels nothing that its siblings wait for;
- no request waits for siblings longer than the group's deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Generic, TypeVar

from seer.integrations.verl.groups import GroupKey, GroupMachine, Place, Request, Submission

T = TypeVar("T")

Submit = Callable[[Submission], Coroutine[object, object, list[T]]]
"""Returns all responses to a submission, in order."""


class Sessions(Generic[T]):
    """The n sessions of the prompt `key`."""

    def __init__(self, key: GroupKey, n: int, submit: Submit[T]) -> None:
        self._submit = submit
        self._machine = GroupMachine(key, n)
        self._places: dict[tuple[int, int], asyncio.Future[Place]] = {}
        self._responses: dict[str, asyncio.Task[list[T]]] = {}

    async def ask(self, session: int, request: Request) -> T:
        """Return the response to a session's next request."""
        loop = asyncio.get_running_loop()
        place = self._places[session, self._machine.turns[session]] = loop.create_future()
        self._carry_out(self._machine.asked(session, request, loop.time()))
        if self._machine.deadline is not None:
            loop.call_at(self._machine.deadline, self._due, self._machine.deadline)
        found = await place
        responses = await asyncio.shield(self._responses[found.prompt_id])
        response: T = responses[found.index]
        return response

    def ended(self, session: int) -> None:
        """Take note that a session will ask for nothing more."""
        self._carry_out(self._machine.ended(session))

    def _due(self, deadline: float) -> None:
        self._carry_out(self._machine.due(deadline))

    def _carry_out(self, decided: Iterable[Submission | Place]) -> None:
        for item in decided:
            match item:
                case Submission():
                    self._responses[item.prompt_id] = asyncio.create_task(self._submit(item))
                case Place():
                    place = self._places.pop((item.session, item.turn))
                    if not place.done():  # a cancelled session waits no more
                        place.set_result(item)
