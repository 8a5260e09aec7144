"""`seer spans` beside a real run whose buffer is killed, with a collector that fails for a while."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter

from keyed_system import rolled, running
from log_spans import check_tree, named, spans_of
from otlp_receiver import Receiver, attributes
from virtual_time import eventually

from seer.report.log_reader import read_timeline
from seer.spans.span_reader import Place


@contextlib.asynccontextmanager
async def sending(log, url, *options):
    """A `seer spans` of the log; told to end, it does."""
    command = [sys.executable, "-m", "seer.cli.main", "spans", str(log), "--otlp", url, *options]
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
        if not options:
            process.send_signal(signal.SIGTERM)
        _, said = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, said.decode()
        assert b"Traceback" not in said, said.decode()
        process.said = said.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_run_is_followed_through_a_killed_buffer_and_a_collector_that_fails(tmp_path):
    receiver, log = Receiver(), tmp_path / "log"
    async with running(tmp_path, log=str(log)) as system, system.client("trainer-run") as client:
        async with sending(log, receiver.url) as process:
            await rolled(client, 0, 100)
            await eventually(lambda: len(receiver.named("group")) == 8)  # while the system runs
            receiver.status = 503
            rolling = asyncio.create_task(rolled(client, 1, 1500))
            await asyncio.sleep(1.5)
            system.children["buffer"].kill_group()
            await system.children["buffer"].gone(10)
            await system.start("buffer", "buffer", "server")
            groups = await rolling
            tries = receiver.tries
            await eventually(lambda: receiver.tries > tries)
            receiver.status = 200
            await eventually(lambda: len(receiver.named("rollout")) >= 2)
        assert "the collector takes no spans" in process.said
        assert "the collector takes spans again" in process.said
    known = list(receiver.spans)
    expected = {span.place: span for span in spans_of(log)[0]}
    check_tree(expected.values())
    places = [Place(int.from_bytes(each.trace_id), int.from_bytes(each.span_id)) for each in known]
    assert Counter(places) == Counter(expected.keys())  # each once
    assert all(
        attributes(span) == expected[place].attributes for span, place in zip(known, places, strict=True)
    )
    last = {
        each.attributes["seer.request"]: each.attributes["gen_ai.usage.output_tokens"]
        for each in named(expected.values(), "request")
    }
    assert sum(last.values()) >= sum(
        response.token_ids.size for group in groups for response in group.responses
    )
    assert {each.rollout_id for each in read_timeline(log).rollouts} == {
        attributes(span)["seer.rollout"] for span in receiver.named("rollout")
    }
    async with sending(log, receiver.url, "--once"):
        pass
    again = receiver.spans[len(known) :]
    assert {span.SerializeToString() for span in again} == {span.SerializeToString() for span in known}
    receiver.close()
