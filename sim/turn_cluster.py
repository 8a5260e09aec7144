"""A rollout of trajectories in virtual time: each turn is a prompt of an open rollout, as clients send it.

Invariants (tests/unit/test_sim_turns.py asserts them):
- a turn is submitted when the tool that follows the turn before it has ended; every trajectory ends once,
  with the turns that it was given, under every policy;
- a rollout of one turn is that of `Cluster`, bit for bit, under policies that do not count groups;
- each token of a context is cached where the turn runs, brought from the pool, or computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from seer.common import ids, wire
from seer.common.policy.schedule import Policy
from seer.common.types import TurnSpec
from seer.services.buffer.events import FromTrainer
from seer.services.buffer.requests import events
from seer.sim.cluster import Cluster
from seer.sim.turns import Trajectory, generated
from seer.sim.workload import Workload


class TurnCluster(Cluster):
    """See the module's docstring; otherwise as `Cluster`. `lengths` are those of turns."""

    def __init__(
        self,
        load: Workload,
        policy: Policy,
        trajectories: Sequence[Sequence[Trajectory]],
        chunk_size: int,
        drafts: bool = False,
        every: float = 0.0,
    ) -> None:
        lengths = [[generated(each) for each in group] for group in trajectories]
        super().__init__(load, policy, lengths, chunk_size, drafts, every)
        self._turns = {
            (group, index): each
            for group, members in enumerate(trajectories)
            for index, each in enumerate(members)
        }
        self._places = {
            ids.request_id(ids.group_id("r", _name(group, index, turn)), 0): (group, index, turn)
            for (group, index), turns in self._turns.items()
            for turn in range(len(turns))
        }
        self.lengths = {
            name: self._turns[g, i][turn].generated for name, (g, i, turn) in self._places.items()
        }
        self.totals = {name: lengths[group][index] for name, (group, index, _) in self._places.items()}

    def _submit(self) -> None:
        first = [self._spec(group, index, 0) for group, index in self._turns]
        self._send(self.load.cap, first)

    def _send(self, max_tokens: int, specs: list[events.GroupSpec]) -> None:
        self._tell(events.GroupsSubmitted("trainer", "r", 1, max_tokens, specs, open=True))

    def _spec(self, group: int, index: int, turn: int) -> events.GroupSpec:
        """Return a turn as a prompt that has the context so far."""
        earlier = self._turns[group, index][:turn]
        before = generated(earlier)
        context = self.load.prompt + before + sum(each.tool_tokens for each in earlier)
        spec = TurnSpec(self.load.prompt, before, self.load.cap)
        shared = ids.shared_group_id("r", str(group))
        return events.GroupSpec(
            _name(group, index, turn), context, shared_id=shared, first_index=index, turn=spec
        )

    def _response_of(self, request_id: str) -> str:
        group, index, _ = self._places[request_id]
        return f"{group}#{index}"

    def _is_last(self, request_id: str) -> bool:
        group, index, turn = self._places[request_id]
        return turn == len(self._turns[group, index]) - 1

    def _delivered(self, request_id: str) -> None:
        group, index, turn = self._places[request_id]
        name = _name(group, index, turn)
        if self._is_last(request_id):
            self._tell(FromTrainer("trainer", wire.Cancel(rollout_id="r", prompt_ids=[name])))
        else:
            back = self.now + self._turns[group, index][turn].tool_seconds
            self._at(back, self._come_back, group, index, turn + 1)
        self._tell(FromTrainer("trainer", wire.Acknowledge(rollout_id="r", prompt_ids=[name])))

    def _come_back(self, group: int, index: int, turn: int) -> None:
        spec = self._spec(group, index, turn)
        self._send(self.load.prompt + self.load.cap - spec.prompt_len, [spec])


def _name(group: int, index: int, turn: int) -> str:
    return f"{group}#{index}.{turn}"
