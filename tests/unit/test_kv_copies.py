"""Copies between KV blocks and rows: the same bytes from a host's and a device's, in a device's order."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("xxhash")

from device_streams import LateStream  # noqa: E402 - after torch, which may be missing

from seer.services.engine.vllm.kv_pool import block_copies as copies_module  # noqa: E402
from seer.services.engine.vllm.kv_pool import checksummed_buffer as staging_module  # noqa: E402
from seer.services.engine.vllm.kv_pool.block_copies import (  # noqa: E402
    CHECKSUM_BYTES,
    CudaStream,
    DeviceCopies,
    HostCopies,
    KvRegions,
    runs,
)
from seer.services.engine.vllm.kv_pool.checksummed_buffer import StagingBuffer  # noqa: E402

pytestmark = pytest.mark.vllm

BLOCKS = 12
SIZES = {700: 24, 90_000: 40}
"""Bytes of a block's parts, by the address of their region."""


class Memory:
    """KV of random bytes in two regions, what is kept beside it, and rows of random bytes."""

    def __init__(self, slots=10, sizes=SIZES, seed=0, beside=0):
        random = torch.Generator().manual_seed(seed)

        def some(*shape):
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)

        self.sizes = sizes
        self.kv = {start: some(BLOCKS, size) for start, size in sizes.items()}
        self.rows = some(slots, CHECKSUM_BYTES + sum(sizes.values()) + beside)
        self.beside = [some(BLOCKS, beside)] if beside else []
        self.regions = KvRegions(self.kv.items(), *self.beside)

    def on_host(self):
        return HostCopies(self.rows)

    def on_device(self):
        return DeviceCopies(self.rows, self.regions, LateStream)

    def blocks(self, numbers):
        return self.regions.blocks(
            [[start + n * size for start, size in self.sizes.items()] for n in numbers]
        )

    def bytes_of(self, block):
        memories = [*self.kv.values(), *self.beside]
        return b"".join(memory[block].numpy().tobytes() for memory in memories)

    def row(self, slot):
        return self.rows[slot, CHECKSUM_BYTES:].numpy().tobytes()


moved = st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True)


@pytest.mark.parametrize("kind", ["on_host", "on_device"])
@given(slots=moved, start=st.integers(0, 2), odd=st.booleans(), beside=st.sampled_from([0, 5, 16]))
def test_blocks_and_rows_that_are_named_are_copied_and_no_others(kind, slots, start, odd, beside):
    memory = Memory(sizes={700: 23, 90_000: 41} if odd else SIZES, beside=beside)
    numbers = [(7 * slot + start) % BLOCKS for slot in slots]
    copies = getattr(memory, kind)()
    before = {slot: memory.row(slot) for slot in range(10)}
    copies.to_rows(slots, memory.blocks(numbers))
    for slot in range(10):
        expected = memory.bytes_of(numbers[slots.index(slot)]) if slot in slots else before[slot]
        assert memory.row(slot) == expected

    memory.rows ^= 255
    kv = [memory.bytes_of(block) for block in range(BLOCKS)]
    copies.to_blocks(slots, memory.blocks(numbers))
    for block in range(BLOCKS):
        expected = memory.row(slots[numbers.index(block)]) if block in numbers else kv[block]
        assert memory.bytes_of(block) == expected


def test_neighbouring_rows_cross_the_bus_in_one_copy():
    memory = Memory(slots=40)
    copies = memory.on_device()
    slots = [3, 4, 5, 6, 20, 21]
    copies.to_rows(slots, memory.blocks(range(6)))
    # The numbers of the blocks, one gather for each region, two runs of rows.
    assert copies._saves.stream.done == ["copy_", "index_select", "index_select", "copy_", "copy_"]
    copies.to_blocks(slots, memory.blocks(range(6)))
    assert copies._loads.stream.done == ["copy_", "copy_", "copy_", "index_copy_", "index_copy_"]
    assert list(runs([7])) == [(slice(7, 8), slice(0, 1))]


def test_a_device_has_memory_for_a_quarter_of_the_rows_and_more_are_copied_in_turn():
    memory = Memory(slots=12)
    copies = memory.on_device()
    assert [len(way.rows) for way in (copies._saves, copies._loads)] == [3, 3]
    copies.to_rows(range(12), memory.blocks(range(12)))
    assert [memory.row(slot) for slot in range(12)] == [memory.bytes_of(block) for block in range(12)]


def test_a_load_waits_for_what_the_model_had_when_it_was_ordered_and_not_for_later_work():
    memory = Memory()
    copies = memory.on_device()
    value = memory.row(0)

    def write(number):
        return lambda: memory.kv[700][5].fill_(number)

    # The block's last request, which has ended, still writes to it: the step is under way.
    copies._loads.stream.model.append(write(1))
    copies.loads_ordered()
    copies._loads.stream.model.append(lambda: pytest.fail("waited for a step that came later"))
    copies.to_blocks([0], memory.blocks([5]))
    assert copies._loads.stream.done[0] == "wait"
    assert memory.bytes_of(5) == value


def test_both_ways_have_streams_of_their_own_and_threads_take_turns_on_each():
    memory = Memory(slots=12)
    copies = memory.on_device()
    assert copies._saves.stream is not copies._loads.stream
    expected = [memory.bytes_of(block) for block in range(12)]
    threads = [
        threading.Thread(target=copies.to_rows, args=([slot], memory.blocks([slot]))) for slot in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [memory.row(slot) for slot in range(12)] == expected


def test_a_gpus_thread_gets_that_gpu_and_its_own_stream_and_host_memory_is_pinned(monkeypatch):
    said = []

    class Stream:
        def __init__(self, device):
            said.append(("stream", str(device)))

        def wait_event(self, event):
            said.append(("wait", event.of))

        def synchronize(self):
            said.append(("synchronize",))

    class Event:
        def record(self, stream):
            self.of = stream

    class Current:
        def __init__(self, stream):
            self.enter = isinstance(stream, Stream)

        def __enter__(self):
            said.append(("current", self.enter))

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", Current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: said.append(("device", str(device))))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the model's on {device}")
    stream = CudaStream(torch.device("cuda:3"))
    event = stream.mark()
    with stream.current():
        stream.wait_for(event)
        stream.synchronize()
    assert said == [
        ("stream", "cuda:3"), ("device", "cuda:3"), ("current", True), ("wait", "the model's on cuda:3"),
        ("synchronize",),
    ]  # fmt: skip


def test_rows_are_pinned_and_a_devices_copies_used_where_kv_lies_on_a_device(monkeypatch):
    asked = {}
    monkeypatch.setattr(staging_module, "DeviceCopies", lambda rows, regions: "a device's")
    zeros = torch.zeros
    monkeypatch.setattr(
        torch,
        "zeros",
        lambda shape, dtype, pin_memory: asked.update(pinned=pin_memory) or zeros(shape, dtype=dtype),
    )
    regions = KvRegions([(0, torch.empty((2, 10), dtype=torch.uint8, device="meta"))])
    assert (StagingBuffer(4, 10, regions).copies, asked) == ("a device's", {"pinned": True})
    regions = KvRegions([(0, zeros((2, 10), dtype=torch.uint8))])
    assert isinstance(StagingBuffer(4, 10, regions).copies, copies_module.HostCopies)
    assert asked == {"pinned": False}
