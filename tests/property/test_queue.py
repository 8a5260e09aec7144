"""The queue of those who wait against a plain list of them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from seer.services.buffer.requests.queue import MAX_HEAP_ITEMS, WaitingQueue

IDS = tuple("abcdefgh")
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("push", "push", "discard", "take head", "take oldest")),
        st.sampled_from(IDS),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=200,
)


@settings(max_examples=150)
@given(CHANGES)
def test_head_and_oldest_are_those_of_a_list(changes):
    queue = WaitingQueue()
    waiting: dict[str, tuple[int, ...]] = {}  # in the order in which they came
    for number, (what, request_id, key) in enumerate(changes):
        if what == "push":
            queue.push(request_id, (*key, number))
            waiting[request_id] = (*key, number)
        else:
            gone = {"discard": request_id, "take head": queue.head(), "take oldest": queue.oldest()}[what]
            queue.discard(gone or request_id)
            waiting.pop(gone or request_id, None)
        assert queue.head() == min(waiting, key=waiting.__getitem__, default=None)
        assert queue.oldest() == next(iter(waiting), None)
        assert len(queue) == len(waiting)
        assert [request_id in queue for request_id in IDS] == [request_id in waiting for request_id in IDS]


def test_a_key_that_comes_back_is_not_lost():
    queue = WaitingQueue()
    queue.push("a", (1,))
    queue.push("b", (2,))
    for key in (3, 1, 3, 1):
        queue.push("a", (key,))
    assert (queue.head(), queue.oldest()) == ("a", "a")
    queue.discard("a")
    assert (queue.head(), queue.oldest()) == ("b", "b")
    queue.push("a", (1,))
    assert (queue.head(), queue.oldest()) == ("a", "b")


def test_memory_follows_those_who_wait_however_often_they_move():
    queue = WaitingQueue()
    for number in range(100):
        queue.push(str(number), (0.0, number))
    for turn in range(1000):
        queue.push(str(turn % 100), (float(turn), turn))
    assert len(queue._heap) <= MAX_HEAP_ITEMS * len(queue)
    for number in range(99):
        queue.discard(str(number))
    queue.push("x", (0.0, 0))
    assert len(queue._heap) <= MAX_HEAP_ITEMS * len(queue)
    assert queue.head() == "x"
