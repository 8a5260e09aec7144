"""What a trainer may ask for by its key: to change what all trainers have is a right of its own.

Whoever lacks the right is answered as if its call had failed, so that its rollouts go on.
"""

from __future__ import annotations

from seer.common import wire
from seer.common.net.keys import User

CHANGING = wire.UpdateWeights | wire.OpenSpool | wire.SpoolData | wire.Sleep
"""What changes the weights of all trainers, and whether engines sleep."""


def refusal(user: User, message: wire.TrainerToBuffer) -> wire.BufferToTrainer | None:
    """Return the answer to whom may not ask for this; None: there is none to give."""
    match message:
        case wire.UpdateWeights():
            return wire.WeightsFailed(message.version, {"": user.lacks}, message.call_id)
        case wire.Sleep(wish=0):
            return wire.Slept(asleep=message.asleep, problem=user.lacks, call_id=message.call_id)
    return None  # an update follows its stream, and a wish that is repeated gets no answer
