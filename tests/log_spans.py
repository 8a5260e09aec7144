"""The spans of a log, and whether they say what its report says."""

from collections import Counter

from seer.report.log_reader import read_timeline
from seer.report.records import End
from seer.services.buffer.log import rows
from seer.spans.log_tail import LogTail
from seer.spans.span_reader import SpanReader


def spans_of(log, every=1):
    """All spans of a log that is complete, taken after every so many rows."""
    reader, found = SpanReader(), []
    for number, item in enumerate(LogTail(log).read()):
        assert not isinstance(item, rows.LogError), item
        reader.begin(item) if isinstance(item, rows.Header) else reader.add(item)
        if number % every == 0:
            found += reader.take()
    reader.finish()
    return found + reader.take(), reader


def named(spans, name):
    return [span for span in spans if span.name == name]


def held(reader):
    """What a reader keeps, but of engines."""
    kept = (reader._groups, reader._going, reader._quiet, reader._responses, reader._rollouts, reader._running,
            reader._kept, reader._updates, reader.timeline.chunks, reader.timeline.rollouts)  # fmt: skip
    return sum(len(each) for each in kept)


def agreed(log):
    """The timeline of a log's report, of which every chunk and response is a span, with its times and ids."""
    timeline = read_timeline(log)
    spans, reader = spans_of(log)
    ended = [chunk for chunk in timeline.chunks if chunk.how is not End.RUNNING]
    told = {
        (span.attributes["seer.engine"], span.attributes["seer.attempt"]):
        (span.start, span.end, span.attributes["gen_ai.usage.output_tokens"], span.attributes["seer.chunk.end"])
        for span in named(spans, "chunk")
    }  # fmt: skip
    assert told == {
        (chunk.engine, str(chunk.attempt)): (chunk.start, chunk.end, chunk.tokens, chunk.how.value)
        for chunk in ended
    }
    whole = [
        turn for rollout in timeline.rollouts for each in rollout.responses for turn in each.turns or [each]
    ]
    requests = named(spans, "request")
    last = {
        span.attributes["seer.request"]: span.attributes for span in requests
    }  # a lost buffer's are made again
    assert Counter(
        (each["gen_ai.usage.output_tokens"], *each["gen_ai.response.finish_reasons"])
        for each in last.values()
    ) == Counter((each.generated, each.finish) for each in whole if each.finish)
    assert {span.attributes["seer.request"] for span in requests} >= {
        f"{each.rollout.rollout_id}/{each.name}" for each in whole if each.finish and not each.trajectory
    }
    check_tree(spans)
    return timeline, spans, reader


def check_tree(spans):
    """Whether each span lies in the one that it names, and has an id of its own."""
    places = {span.place: span for span in spans}
    assert len(places) == len(spans)
    above = {"chunk": "request", "request": "group"}
    for span in spans:
        assert span.end >= span.start
        assert (span.parent is not None) == (span.name in above)
        if span.parent is not None and (parent := places.get(span.parent)):  # else it has not ended
            assert parent.name == above[span.name]
            assert parent.start <= span.start
            assert span.end <= parent.end
            assert parent.attributes["seer.group"] == span.attributes["seer.group"]
        if span.link is not None and (rollout := places.get(span.link)):
            assert rollout.name == "rollout"
            assert rollout.start <= span.start
            assert span.end <= rollout.end
