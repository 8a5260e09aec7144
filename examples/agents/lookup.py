"""A task with a tool whose answers no model can know: look a number up, and add it to the one that is left.

Of three numbers the model combines two, and asks at `=` what that is. The tool does not compute: it gives a
number that follows from a secret. The model passes if its next equation is that number plus the one that is
left, with the right sum:
```
S3 12 8 6 : 12 + 8 = [13] S2 13 6 : 13 + 6 = 19
```
"""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import partial
from typing import Any, Literal

from seer.client.turns import Trajectory

Tool = Literal["own", "swapped", "none"]
"""Whose answer an agent is shown: its own answer, the answer of its next sibling, or none."""

CALL_TOKENS = 12
ANSWER_TOKENS = 9
MOST = 20


def lookup(secret: str, prompt_id: str, index: int) -> int:
    """Return the number that the tool has for a trajectory, from 1 to `MOST`."""
    digest = hashlib.blake2b(f"{secret}/{prompt_id}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % MOST + 1


async def ask(call_id: str, secret: str, prompt_id: str, index: int) -> int:
    """Be the tool. A service that something happens by would know by `call_id` that a call is made again."""
    return lookup(secret, prompt_id, index)


def left_over(numbers: tuple[int, ...], call: str) -> int | None:
    """Return the number that a call does not use; None: it is no operation on two of three numbers."""
    words = call.split()[-3:]
    if len(words) < 3 or words[1] not in "+-*" or not (words[0] + words[2]).isdecimal():
        return None
    left = list((Counter(numbers) - Counter((int(words[0]), int(words[2])))).elements())
    return left[0] if len(left) == 1 else None


def passes(answer: str, looked_up: int, left: int) -> bool:
    """Return whether the first equation of an answer adds the two numbers, with the right sum."""
    before, _, after = answer.partition("=")
    words = before.split()[-3:]
    right = words in ([str(looked_up), "+", str(left)], [str(left), "+", str(looked_up)])
    return right and after.split()[:1] == [str(looked_up + left)]


async def agent(trajectory: Trajectory, secret: str, responses: int, tool: Tool) -> float:
    """Let the model call the tool and go on; return 1 if it passes, else 0."""
    call = await trajectory.generate(max_tokens=CALL_TOKENS, stop=("=",))
    problem: Any = trajectory.metadata["problem"]
    left = left_over(problem.numbers, call.text or "")
    if call.stop_reason != "=" or left is None:
        return 0.0
    own = await trajectory.once(
        partial(ask, secret=secret, prompt_id=trajectory.prompt_id, index=trajectory.index)
    )
    if tool == "own":
        trajectory.append(f"{own}")
    elif tool == "swapped":
        trajectory.append(f"{lookup(secret, trajectory.prompt_id, (trajectory.index + 1) % responses)}")
    answer = await trajectory.generate(max_tokens=ANSWER_TOKENS)
    return float(passes(answer.text or "", own, left))
