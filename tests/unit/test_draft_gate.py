"""Where a device waits for drafts: what is launched in which order, and whose memory it is."""

import contextlib
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)

import torch

from seer import _native
from seer.services.engine.vllm.drafts import draft_gate
from seer.services.engine.vllm.drafts.draft_gate import STEPS, DraftGate

PROMPT = [1, 2]


class Stream:
    """A stream that notes what it is told; it does nothing by itself."""

    def __init__(self, name: str, calls: list[tuple]) -> None:
        self.name, self.calls, self.cuda_stream = name, calls, hash(name)

    def record_event(self, event: SimpleNamespace | None) -> SimpleNamespace:
        event, last = event or SimpleNamespace(), self.calls[-1]
        event.synchronize = lambda: self.calls.append(("host", "waits for", last))
        return event

    def wait_stream(self, other: "Stream") -> None:
        self.calls.append((self.name, "waits for", other.name))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What a gate asks of a GPU: its memory is the host's, and a launch is noted, not run."""
    calls: list[tuple] = []
    main = Stream("main", calls)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("beside", calls))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)

    def launch(stream: int, function: int, address: int) -> int:
        assert function == _native.RUN_DRAFT_STEP
        calls.append((main.name if stream == main.cuda_stream else "beside", "drafts", address))
        return 0

    launch_of = SimpleNamespace(cuLaunchHostFunc=launch)
    monkeypatch.setattr(draft_gate.ctypes, "CDLL", lambda name: launch_of)
    return calls


def gate_of(kind: str, rows: int = 4, width: int = 4) -> tuple[DraftGate, _native.StepDrafter]:
    drafter = _native.StepDrafter(rows)
    device = torch.device("cpu")
    gate = DraftGate.__new__(DraftGate)
    if kind == "cuda":  # its memory is not pinned here, and its tensors are the host's
        original = draft_gate.StepMemory.__init__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                draft_gate.StepMemory,
                "__init__",
                lambda self, rows, width, pinned: original(self, rows, width, False),
            )
            patch.setattr(
                torch,
                "zeros",
                lambda *shape, zeros=torch.zeros, **given: zeros(*shape, **given | {"device": "cpu"}),
            )
            gate.__init__(drafter, torch.device("cuda"), rows, width)
    else:
        gate.__init__(drafter, device, rows, width)
    return gate, drafter


def drawn(rows: int, width: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((rows, width), 5, dtype=torch.int64), torch.ones(rows, dtype=torch.int32)


def set_rows(drafter: _native.StepDrafter, rows: int) -> tuple[np.ndarray, np.ndarray]:
    tree = _native.GroupTree(PROMPT)
    tree.append(9, 0, [5, 6, 7, 8, 5, 6, 7, 8])
    known = np.array(PROMPT, np.int32)
    generations = [drafter.set(row, tree, row, -1, 2, known, 100) for row in range(rows)]
    return np.arange(rows, dtype=np.int32), np.array(generations)


def test_on_a_cpu_drafts_are_made_at_once() -> None:
    gate, drafter = gate_of("cpu")
    slots, generations = set_rows(drafter, 2)
    memory = gate.draft(slots, generations, *drawn(2), 3)
    assert memory.counts.tolist() == [3, 3]
    assert gate.on_device(memory).tolist() == [[6, 7, 8]] * 2


def test_a_stream_comes_to_the_drafts_after_what_it_drew(calls: list[tuple]) -> None:
    gate, drafter = gate_of("cuda")
    slots, generations = set_rows(drafter, 2)
    memory = gate.draft(slots, generations, *drawn(2), 3)
    assert calls == [("main", "drafts", memory.step.address)]
    assert memory.counts.tolist() == [0, 0], "nothing is made before the stream comes to it"
    memory.step.run()  # the stream is there
    assert gate.on_device(memory).tolist() == [[6, 7, 8]] * 2


def test_without_drafts_nothing_on_the_stream_waits_until_there_are_some(calls: list[tuple]) -> None:
    gate, drafter = gate_of("cuda")
    slots, generations = set_rows(drafter, 2)
    steps = [gate.draft(slots, generations, *drawn(2), k).step.address for k in (0, 0, 3, 3, 0)]
    assert calls == [
        ("beside", "waits for", "main"), ("beside", "drafts", steps[0]),
        ("beside", "waits for", "main"), ("beside", "drafts", steps[1]),
        ("main", "waits for", "beside"), ("main", "drafts", steps[2]),
        ("main", "drafts", steps[3]),
        ("host", "waits for", ("beside", "drafts", steps[0])),
        ("beside", "waits for", "main"), ("beside", "drafts", steps[4]),
    ]  # fmt: skip


def test_steps_under_way_have_memory_of_their_own(calls: list[tuple]) -> None:
    gate, drafter = gate_of("cuda")
    slots, generations = set_rows(drafter, 4)
    under_way = [gate.draft(slots, generations, *drawn(4), 3) for _ in range(STEPS)]
    places = [memory.drafts.data_ptr() for memory in under_way]
    assert len(set(places)) == STEPS
    for memory in under_way:
        memory.step.run()
    assert [memory.counts.tolist() for memory in under_way] == [[3] * 4] * STEPS


def test_memory_is_not_taken_while_its_last_step_may_run(
    calls: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, drafter = gate_of("cuda")
    slots, generations = set_rows(drafter, 1)
    take = draft_gate.StepMemory.take

    def noted(memory: draft_gate.StepMemory, *given: object) -> None:
        calls.append(("takes", memory))
        take(memory, *given)

    monkeypatch.setattr(draft_gate.StepMemory, "take", noted)
    memories = [gate.draft(slots, generations, *drawn(1), k) for k in (0, 3, 0, 0, 0, 3)]
    waits = [place for place, call in enumerate(calls) if call[0] == "host"]
    assert [calls[place][2][0] for place in waits] == ["beside", "main"], "of the first steps, in order"
    assert [calls[place + 1] for place in waits] == [("takes", memories[0]), ("takes", memories[1])]


def test_what_cuda_refuses_is_an_error(calls: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    gate, drafter = gate_of("cuda")
    monkeypatch.setattr(gate, "_launch", lambda *_: 700)
    with pytest.raises(RuntimeError, match="CUDA's error 700"):
        gate.draft(*set_rows(drafter, 1), *drawn(1), 3)
