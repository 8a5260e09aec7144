"""Rows of a buffer's log, and the timeline that a report reads from them."""

from seer.common.types import Capacity
from seer.report.log_reader import LogReader
from seer.report.records import Timeline
from seer.services.buffer.log import rows
from seer.services.buffer.requests.state import Limits

CAPACITY = Capacity(kv_blocks=10, block_size=16, max_num_seqs=4, max_model_len=256)
HEADER = rows.Header(incarnation=7, policy="seer", limits=Limits(32), update_seconds=1, started=1e9, clock=50)


def told(*lines: tuple[float, object, list[object]], reader: LogReader | None = None) -> Timeline:
    """Read rows, times being seconds since the log's beginning."""
    reader = reader or LogReader()
    reader.begin(HEADER)
    for time, event, out in lines:
        reader.add(rows.Line(HEADER.clock + time, event, out))
    reader.finish()
    return reader.timeline
