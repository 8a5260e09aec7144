"""What the buffer sends: messages queued by the name or the address of who gets them. Nothing here waits.

Invariants (tests/unit/test_buffer_server.py, tests/unit/test_outbox.py):
- a message to a name goes to the incarnation that holds it; one to an incarnation that is gone is dropped;
- tokens of unfinished groups wait for a trainer that does not keep up, and go out with the next tokens.
"""

from __future__ import annotations

import asyncio

from seer.common import wire
from seer.common.net.hub import Hub
from seer.common.net.outbox import Outbox
from seer.services.buffer.peers import Peers
from seer.services.buffer.rollout_ids import given

EngineHub = Hub[wire.BufferToEngine, wire.EngineToBuffer]
TrainerHub = Hub[wire.BufferToTrainer, wire.TrainerToBuffer]


class Outgoing:
    """`engines` and `trainers` are who has said `Hello`; `bind_engines` and `bind_trainers` before all else.

    `registered_at`: by engine, the address that registered last.
    """

    def __init__(self) -> None:
        self.engines, self.trainers = Peers(), Peers()
        self.registered_at: dict[str, bytes] = {}
        # Bounded by open work, as the outboxes are: each request has one running chunk, each group one
        # result, and ticks add messages only to idle outboxes.
        self.published: asyncio.Queue[wire.BufferPublished] = asyncio.Queue()

    def bind_engines(self, hub: EngineHub, outbox: Outbox[wire.BufferToEngine]) -> None:
        """Send to engines by this socket."""
        self._engine_hub, self.to_engines = hub, outbox

    def bind_trainers(self, hub: TrainerHub) -> None:
        """Send to trainers by this socket."""
        self.to_trainers: Outbox[wire.BufferToTrainer] = Outbox(hub, self.trainers.remove)

    def engine(self, name: str, message: wire.BufferToEngine) -> None:
        """Queue a message to an engine; it is dropped if the engine is not connected."""
        address = self.engines.address_of(name)
        if address is not None:
            self.to_engines.put(address, message)

    def forget_engine(self, name: str) -> None:
        """Have an engine that was removed shake hands and register again before its messages count."""
        address = self.registered_at.get(name)  # a later incarnation may hold its name by now
        if address is not None:
            self._engine_hub.dismiss(address)

    def trainer(self, name: str, message: wire.BufferToTrainer) -> None:
        """Queue a message to the incarnation of a trainer that holds this name."""
        address = self.trainers.address_of(name)
        if address is not None:
            self.to_trainers.put(address, message)

    def keeps_up(self, address: bytes) -> bool:
        """Return whether an incarnation of a trainer is connected and reads what it is sent."""
        return self.trainers.name_of(address) is not None and self.to_trainers.keeps_up(address)

    def incarnation(self, address: bytes, message: wire.BufferToTrainer) -> None:
        """Queue a message to an incarnation of a trainer; it is dropped if the incarnation is gone.

        A later incarnation of the trainer gets finished groups when it submits them again.
        """
        if self.trainers.name_of(address) is not None:
            self.to_trainers.put(address, given(message))

    def publish(self, message: wire.BufferPublished) -> None:
        """Queue a message to the context service."""
        self.published.put_nowait(message)
