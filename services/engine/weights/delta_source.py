"""Makes an engine's copy of a stream from the copy of an earlier one and a delta to it.

Invariants (tests/cluster/test_weight_deltas.py):
- the delta is fetched as streams are: from the holders first, then from the buffer;
- whatever goes wrong, nothing of the copy counts as there, and the next source is asked for all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from seer.common.blobs import Blob, fetch
from seer.common.process.log import get_logger
from seer.common.process.threads import until_ended, until_stopped
from seer.common.weights.delta import apply
from seer.services.engine.weights.holders import Buffer, Copy, Holder


class DeltaSource:
    """`base`: the earlier copy; `delta`: reaches the buffer for the delta, and `holders` those to ask before.

    `made` says whether the copy was made so.
    """

    size = 0

    def __init__(self, base: Copy, delta: Buffer, holders: Callable[[Copy], list[Holder]]) -> None:
        self.copy: Copy | None = None
        self.made = False
        self._base, self._delta, self._holders = base, delta, holders

    async def fetch(self, blob: Blob) -> None:
        """Fetch the delta and make the blob's file. Raises `SeerError` or `ValueError`."""
        stop = threading.Event()
        try:
            size = (await self._delta.state()).size
            if not 0 < size <= blob.size:
                raise ValueError(f"has {size} bytes: the whole has {blob.size}")
            self.copy = Copy(self._delta.name, size)
            await until_ended(self.copy.begin, "set TMPDIR to a larger disk")
            await fetch(self.copy, self._holders(self.copy), self._delta)
            await until_stopped(stop.set, self._make, self.copy, blob, stop.is_set)
        except OSError as error:
            raise ValueError(str(error)) from error
        self.made = True
        blob.came(0, blob.size)

    def left(self, why: Exception) -> None:
        """Say why the stream is fetched whole."""
        told = "weights are fetched whole: their delta is of no use"
        get_logger().warning(told, delta=self._delta.name, why=str(why))

    def _make(self, delta: Copy, blob: Blob, stop: Callable[[], bool]) -> None:
        apply(self._base.file, delta.file, blob.file, self._base.name, stop)
