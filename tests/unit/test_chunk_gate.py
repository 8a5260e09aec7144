from seer.services.engine.chunk_gate import ChunkGate


def test_a_chunk_starts_when_free_blocks_cover_what_the_started_ones_can_still_take():
    room = ChunkGate()
    room.enter("a", 6)
    assert room.start(10, {}.get) == ["a"]
    room.enter("b", 4)
    held = {"a": 0}
    assert room.start(9, held.__getitem__) == []
    held["a"] = 1
    assert room.start(9, held.__getitem__) == ["b"]
    assert room.waiting == 0


def test_nobody_overtakes():
    room = ChunkGate()
    for name, blocks in (("large", 8), ("small", 1), ("smaller", 1)):
        room.enter(name, blocks)
    assert room.start(7, {}.get) == []
    assert room.waiting == 3
    room.leave("large")
    assert room.start(7, {}.get) == ["small", "smaller"]


def test_what_ended_or_was_dropped_counts_no_more():
    room = ChunkGate()
    room.enter("a", 5)
    assert room.start(5, {}.get) == ["a"]
    room.enter("b", 5)
    room.leave("a")
    room.leave("unknown")
    assert room.start(5, {}.get) == ["b"]
    room.leave("b")
    assert room.start(5, {}.get) == []


def test_a_chunk_that_shares_more_than_its_own_lends_nothing():
    room = ChunkGate()
    room.enter("a", 4)
    assert room.start(4, {}.get) == ["a"]
    room.enter("b", 3)
    assert room.start(2, {"a": 6}.__getitem__) == []
