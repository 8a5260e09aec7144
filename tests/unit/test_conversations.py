"""Which prompts of sessions go on from which: found whatever comes between, bounded, and never waited for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seer.common import wire
from seer.common.types import Placed, SamplingParams, TurnSpec
from seer.services.buffer import conversations as module
from seer.services.buffer import submissions
from seer.services.buffer.conversations import Conversations, context
from seer.services.buffer.response_store import Store


def ids(*tokens):
    return np.array(tokens, np.int32)


def begin(conversations, *prompt, session="", group="g"):
    return conversations.begin(group, ids(*prompt), session)


def say(conversations, prompt, *answer, session=""):
    turn = begin(conversations, *prompt, session=session, group="said")
    conversations.answered("said", ids(*answer))
    return turn


def seen(turn):
    return turn.kind, turn.prompt_len, turn.generated


def test_a_prompt_that_begins_with_a_whole_context_goes_on():
    conversations = Conversations()
    first = say(conversations, [1, 2], 3, 4)
    assert seen(first) == ("first", 2, 0)
    for other in ([1, 2, 3], [1, 2, 3, 5, 4], [2, 1, 3, 4], [1, 2, 4, 3, 7]):
        assert say(conversations, other, 50).kind == "first"
    second = say(conversations, [1, 2, 3, 4, 9], 5)
    assert (seen(second), second.name) == (("later", 2, 2), first.name)
    assert seen(say(conversations, [1, 2, 3, 4, 9, 5])) == ("later", 2, 3)
    assert say(conversations, [1, 2, 3, 4, 8]).kind == "first"  # the context has grown


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=30), st.data())
def test_it_is_what_a_list_of_contexts_would_say(prompts, data):
    conversations, contexts = Conversations(seed=0), []
    for prompt in prompts:
        grow = contexts and data.draw(st.booleans())
        prompt = [*data.draw(st.sampled_from(contexts)), *prompt] if grow else prompt
        known = [context for context in contexts if prompt[: len(context)] == context]
        answer = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        turn = say(conversations, prompt, *answer)
        assert (turn.kind == "later") == bool(known)
        if known:
            contexts.remove(max(known, key=len))
        contexts.append([*prompt, *answer])
        assert len(conversations) == len(contexts)


def test_nothing_goes_on_from_what_is_under_way():
    conversations = Conversations()
    say(conversations, [1], 2)
    begin(conversations, 1, 2, 3)
    assert begin(conversations, 1, 2, 3, group="other").kind == "first"
    conversations.failed("g")
    assert seen(begin(conversations, 1, 2, 3)) == ("later", 1, 1)


def test_a_request_without_an_answer_leaves_nothing():
    conversations = Conversations()
    begin(conversations, 1)
    conversations.failed("g")
    assert len(conversations) == 0
    assert say(conversations, [1], 2).kind == "first"


def test_sessions_are_apart():
    conversations = Conversations()
    say(conversations, [1], 2, session="a")
    assert say(conversations, [1, 2, 3], session="b").kind == "first"
    assert say(conversations, [1, 2, 3]).kind == "first"
    assert say(conversations, [1, 2, 3], session="a").kind == "later"


def test_a_rewritten_history_is_a_segment_and_goes_where_the_conversation_was():
    conversations = Conversations()
    first = say(conversations, [1, 2], 7, 8, 3, session="a")
    rewritten = say(conversations, [1, 2, 3, 4], 7, 5, session="a")
    assert (seen(rewritten), rewritten.name) == (("segment", 4, 0), first.name)
    assert seen(say(conversations, [1, 2, 3, 4, 7, 5, 6], 9, session="a")) == ("later", 4, 2)
    assert len(conversations) == 1
    assert say(conversations, [1, 2, 3, 4], 1).kind == "first"  # without a session nobody can tell


def test_samples_of_one_prompt_may_share_a_session():
    conversations = Conversations()
    one, two = (say(conversations, [1, 2], token, session="prompt 7") for token in (3, 4))
    assert (one.kind, two.kind) == ("first", "first")
    assert say(conversations, [1, 2, 4, 5], session="prompt 7").name == two.name
    rewritten = say(conversations, [1, 6], session="prompt 7")
    assert rewritten.kind == "segment"
    assert rewritten.name not in (one.name, two.name)


def test_a_session_that_is_generating_is_not_taken_by_a_rewritten_history():
    conversations = Conversations()
    under_way = begin(conversations, 1, 2, session="a")
    rewritten = say(conversations, [5], session="a")
    assert rewritten.kind == "segment"
    assert rewritten.name != under_way.name
    conversations.answered("g", ids(3))
    assert say(conversations, [1, 2, 3], session="a").name == under_way.name


def test_the_oldest_are_forgotten():
    conversations = Conversations(most=3)
    begin(conversations, 1)
    for token in (2, 3):
        say(conversations, [token], 9)
    say(conversations, [2, 9], 9)
    say(conversations, [4], 9)
    assert len(conversations) == 3
    conversations.answered("g", ids(9))  # its place is taken
    assert [say(conversations, prompt).kind for prompt in ([2, 9, 9], [3, 9], [1, 9])] == [
        "later", "later", "first",
    ]  # fmt: skip


def test_contexts_may_be_long():
    conversations = Conversations()
    prompt = np.arange(20_000, dtype=np.int32)
    conversations.begin("g", prompt, "")
    conversations.answered("g", ids(*range(5000)))
    assert conversations.begin("h", np.concatenate([prompt, ids(*range(5000))]), "").kind == "later"


def test_each_turn_ends_once():
    conversations = Conversations()
    begin(conversations, 1)
    for _ in range(2):  # a result that is delivered twice
        conversations.answered("g", ids(2))
    conversations.failed("g")  # and acknowledged
    assert seen(begin(conversations, 1, 2, 3)) == ("later", 1, 1)
    assert conversations.counters == {"later_turns": 1, "segments": 0}


def test_images_of_one_length_are_not_one_context():
    prompt = ids(1, 7, 7, 2)
    one, two = (context(prompt, [Placed(name, 1, 2)]) for name in ("a", "b"))
    assert one[[0, 3]].tolist() == two[[0, 3]].tolist() == [1, 2]
    assert one[1] == one[2] != two[1]
    assert context(prompt, []) is prompt


def test_a_turn_is_one_that_a_trainer_may_submit_whatever_it_may_generate():
    conversations = Conversations()
    say(conversations, [1], 2)
    turn = begin(conversations, 1, 2, 3)
    turn.spec(2**24).check(3)
    assert turn.spec(5) == TurnSpec(1, 1, 6, 0.0, turn.name)


def test_contexts_that_are_too_long_are_not_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST_CONTEXT", 4)
    conversations = Conversations()
    say(conversations, [1], 2, 3, 4)
    assert say(conversations, [1, 2, 3, 4], 5).kind == "later"
    assert len(conversations) == 1
    assert begin(conversations, 1, 2, 3, 4).kind == "later"  # from where that one began, which had no answer


def submission(*lengths):
    names = [f"{place}" for place in range(len(lengths))]
    return wire.Submit(
        rollout_id="r", rollout_number=0, seed=0, n=1, sampling=SamplingParams(), prompt_ids=names,
        lengths=list(lengths), tokens=np.ones(sum(lengths), np.int32), groups=names, open=True,
        sessions=["s"] * len(lengths),
    )  # fmt: skip


def test_what_one_message_is_looked_up_for_is_bounded(monkeypatch):
    """The buffer's loop waits for each part."""
    monkeypatch.setattr(submissions, "MOST_CONTEXT", 5)
    monkeypatch.setattr(submissions, "PART_SESSIONS", 4)
    submit, store = submission(3, 3, 2, 1, 6, 2), Store()
    parts = list(submissions.parts(submit, submissions.prompts(submit), store))
    assert [len(part) for part in parts] == [4, 2]
    found = {}
    for part in parts:
        found |= submissions.with_turns("r", part, store, Conversations())
    assert [name for name, prompt in found.items() if prompt.turn is not None] == ["0", "2", "5"]
