"""The buffer's machines, with their log."""

import orders

from seer import __version__
from seer.common.policy.length import Estimate
from seer.common.types import Capacity
from seer.services.buffer.events import Tick
from seer.services.buffer.log.rows import Header
from seer.services.buffer.log.writer import LogWriter
from seer.services.buffer.requests import events, instructions
from seer.services.buffer.requests.state import Limits

CAPACITY = Capacity(kv_blocks=50, block_size=16, max_num_seqs=4, max_model_len=400)


class LoggedBuffer:
    """An incarnation of the buffer's machines, with its log."""

    def __init__(self, folder, incarnation=1):
        header = Header(
            version=__version__,
            incarnation=incarnation,
            policy="seer",
            limits=Limits(chunk_size=8),
            update_seconds=60.0,
        )
        self.machine = header.machine()
        self.log = LogWriter(str(folder) if folder else "", header, self.machine)
        self.now = 0.0
        self.tell(orders.joined("a", CAPACITY))
        self.tell(orders.joined("b", CAPACITY, 1))

    def tell(self, event):
        self.now += 0.25
        out = self.machine.apply(event, self.now)
        self.log.record(self.now, event, out)
        return [item for item in out if isinstance(item, instructions.Dispatch)]

    def roll(self, number, prompts=4):
        """Run a whole rollout, with news and ticks in between."""
        specs = [events.GroupSpec(str(each), 10) for each in range(prompts)]
        todo = self.tell(events.GroupsSubmitted("t", f"r{number}", 2, 30, specs, submission=number))
        while todo:
            chunk = todo.pop(0)
            count = min(chunk.max_new_tokens, 7)
            todo += self.tell(orders.ended(chunk.instance, chunk.request_id, chunk.attempt, count))
            todo += self.tell(events.EstimatesChanged({f"r{number}/1": Estimate(9.0 + self.now, 0.5)}))
        self.tell(Tick())
        self.tell(orders.acknowledged("t", f"r{number}", [spec.prompt_id for spec in specs]))
