"""What a load reads of weights, which is known or not; without a model."""

import ctypes
import itertools
import json
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from safetensors.torch import safe_open, save_file  # noqa: E402

from seer.common.errors import EngineBroken, EngineError  # noqa: E402
from seer.services.engine.nodes.same_settings import Meeting  # noqa: E402
from seer.services.engine.nodes.shares import NotRun, RankReads, layout_of  # noqa: E402
from seer.services.engine.vllm import read_slices  # noqa: E402
from seer.services.engine.vllm.core import CoreHandle  # noqa: E402
from seer.services.engine.vllm.read_slices import Recorder, proven  # noqa: E402
from seer.services.engine.weights.draft_heads import PREFIX  # noqa: E402

pytestmark = pytest.mark.vllm


def config():
    return SimpleNamespace(parallel_config=SimpleNamespace(node_rank=1), speculative_config=None)


@pytest.fixture
def weights(tmp_path):
    """A folder with one tensor `w` of these values, beside one that is never read."""

    def save(tensor):
        save_file({"w": tensor, "other": torch.ones(3)}, tmp_path / "model.safetensors")
        return tmp_path

    return save


def tensors_in(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def seen(folder, use):
    """Return what is seen to be read of `w` where it is given to `use`."""
    recorder = Recorder(folder)
    with recorder:
        for name, tensor in recorder.tensors(tensors_in(folder)):
            if name == "w":
                use(tensor)
    return {name: sorted(parts) for name, parts in recorder.read.items()}


class Model(torch.nn.Module):
    """What `use` returns of `w` is its parameter, by a copy: as vLLM's loaders do."""

    def __init__(self, use, shape=(8, 3), dtype=torch.bfloat16):
        super().__init__()
        self.use, self.counts = use, SimpleNamespace(loads=0)
        self.weight = torch.nn.Parameter(torch.full(shape, -1.0, dtype=dtype), requires_grad=False)

    def load(self, tensors):
        self.counts.loads += 1
        for name, tensor in tensors:
            if name == "w":
                self.weight.data.copy_(self.use(self, tensor))


def found(folder, use, model=None):
    """Return what is proved to be read of a folder by a model of which `use` makes the parameter."""
    model = model or Model(use)
    return proven(model.load, lambda: tensors_in(folder), folder, model, config())


MATRIX = torch.arange(48, dtype=torch.bfloat16).reshape(8, 6)
EXPERTS = torch.arange(96, dtype=torch.float32).reshape(4, 6, 4)
OUT = torch.empty(1000)


def columns(w):
    param = torch.nn.Parameter(torch.empty(8, 3), requires_grad=False)
    param.data.copy_(w.narrow(1, 3, 3))


def gate_up(w):  # rows of two parts, as of a tensor that is packed in the file
    for half in w.chunk(2, 0):
        OUT[:12].copy_(half.narrow(0, 2, 2).flatten())


def fused(w):
    query, key, value = w.split([4, 2, 2], 0)
    OUT[:12].view(2, 6)[:] = query[2:]
    torch.cat([key[:1], value[:1]])


@pytest.mark.parametrize(
    ("tensor", "use", "expected"),
    [
        (MATRIX, lambda w: OUT[:24].copy_(w.narrow(0, 4, 4).reshape(-1)), [(48, 48, 0, 1)]),
        (MATRIX, columns, [(6, 6, 12, 8)]),
        (MATRIX, lambda w: w.t()[3:].contiguous(), [(6, 6, 12, 8)]),
        (MATRIX, gate_up, [(24, 24, 0, 1), (72, 24, 0, 1)]),
        (MATRIX, fused, [(24, 24, 0, 1), (48, 12, 0, 1), (72, 12, 0, 1)]),
        (MATRIX, lambda w: w.to(torch.float32), [(0, 96, 0, 1)]),
        (MATRIX, lambda w: w[::2, 1:3].clone(), [(2, 4, 24, 4)]),
        (MATRIX, lambda w: w.view(torch.uint8)[1:3] + 1, [(12, 24, 0, 1)]),
        (MATRIX, lambda w: w[torch.tensor([1])], [(0, 96, 0, 1)]),
        (MATRIX, lambda w: w[2, 2].item(), [(28, 2, 0, 1)]),
        (MATRIX, lambda w: w.narrow(0, 4, 4)[1].view(2, 3).unbind(), None),
        (EXPERTS, lambda w: OUT[:24].copy_(w[3].flatten()), [(288, 96, 0, 1)]),
        (EXPERTS, lambda w: w[:, 3:].clone(), [(48, 48, 96, 4)]),
        (EXPERTS, lambda w: w[..., 2:].clone(), [(8, 8, 16, 24)]),
        (EXPERTS, lambda w: w[:, 1:3, :2].clone(), [(0, 384, 0, 1)]),  # not one slice: the whole
        (torch.tensor(3.0), lambda w: OUT[0].copy_(w), [(0, 4, 0, 1)]),
        (torch.empty(0, 4), lambda w: w.clone(), None),
        (MATRIX, lambda w: [torch.add(w[1], 1, out=OUT[:6]), torch.nn.UninitializedParameter().is_meta], [(12, 12, 0, 1)]),
    ],
)  # fmt: skip
def test_what_an_operation_reads_counts_and_nothing_else(weights, tensor, use, expected):
    assert seen(weights(tensor), use) == ({"w": expected} if expected else {})


def test_what_is_noted_of_a_tensor_is_bounded(weights, monkeypatch):
    monkeypatch.setattr(read_slices, "MAX_PARTS", 3)
    folder = weights(MATRIX)
    rows = [(row, 12, 0, 1) for row in (0, 12, 24)]
    assert seen(folder, lambda w: [w[row].clone() for row in range(3)]) == {"w": rows}
    assert seen(folder, lambda w: [w[row].clone() for row in range(5)]) == {"w": [(0, 96, 0, 1)]}


def half(_, w):
    return w.narrow(1, 3, 3)


def test_what_a_load_reads_is_proved_by_another_without_the_rest(weights):
    model = Model(half)
    proof = found(weights(MATRIX), half, model)
    assert proof == RankReads(1, layout_of(Recorder(weights(MATRIX)).stored.values()), {"w": [(6, 6, 12, 8)]})
    assert model.counts.loads == 2
    assert torch.equal(model.weight, MATRIX[:, 3:])


def in_a_thread(_, w):
    made = torch.empty(8, 3, dtype=w.dtype)
    thread = threading.Thread(target=lambda: made.copy_(w[:, 3:]))
    thread.start()
    thread.join()
    return made


def by_numpy(_, w):
    return torch.from_numpy(w.view(torch.int16).numpy()[:, 3:].copy()).view(w.dtype)


def a_number(model, w):
    model.scale = w[1].tolist()[0]
    return half(model, w)


def in_a_list(model, w):
    model.beside = {"of": [torch.tensor(w[1].tolist())]}
    return half(model, w)


def by_address(_, w):
    read = ctypes.string_at(w.data_ptr(), w.nbytes)
    return torch.frombuffer(bytearray(read), dtype=w.dtype).view(8, 6)[:, 3:]


def moved_in(model, w):
    model.beside = torch.nn.Parameter(w[1], requires_grad=False)
    return half(model, w)


def of_a_closure(model, w):
    model.later = lambda: w[1]
    return half(model, w)


def late(model, w):
    model.event = threading.Event()
    threading.Thread(target=lambda: (model.event.wait(20), model.weight.copy_(w[:, 3:]))).start()
    return half(model, w)


def of_no_bytes(model, w):
    model.beside = torch.ones(3).to_sparse()
    return half(model, w)


def different(model, w):
    return half(model, w) + model.counts.loads


def failing_for_other_values(model, w):
    if w[1].tolist()[0] != 6:
        raise ValueError("no such value")
    return half(model, w)


@pytest.mark.parametrize(
    ("use", "why"),
    [(use, "reads what is not seen") for use in (in_a_thread, by_numpy, a_number, in_a_list, by_address)]
    + [
        (moved_in, "leaves tensors of the file in use"), (of_a_closure, "leaves tensors of the file in use"), (late, "leaves tensors of the file in use"),
        (different, "or differs each time"), (of_no_bytes, "or differs each time"), (failing_for_other_values, "failed: no such value"),
    ],
)  # fmt: skip
def test_of_a_load_that_reads_anything_unseen_nothing_is_known(weights, use, why):
    model = Model(use)
    try:
        assert why in (proof := found(weights(MATRIX), use, model))
        assert isinstance(proof, NotRun) == (use is failing_for_other_values)
        assert model.counts.loads == 2  # also where it fails, as other ranks may wait
    finally:
        if use is late:
            model.event.set()


@pytest.mark.parametrize("lacking", [1, 2])  # as the first load is noted, or the second
def test_a_proof_that_lacks_memory_finds_nothing(weights, monkeypatch, lacking):
    factors, asked = read_slices._factors, []

    def lack(device):
        asked.append(device)
        if len(asked) == lacking:
            raise torch.OutOfMemoryError("no memory")
        return factors(device)

    monkeypatch.setattr(read_slices, "_factors", lack)
    proof = found(weights(MATRIX), half)
    assert isinstance(proof, NotRun)
    assert proof == "no memory"


class Hiding:
    """Lays a layer's weights out where nobody sees them."""

    def process_weights_after_loading(self, layer):
        hidden = layer.weight.data.clone()
        layer.kernel = lambda: hidden
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def test_so_it_is_where_kernels_have_weights_that_nobody_sees(weights):
    for use, known in ((half, True), (by_numpy, False)):
        model = Model(use)
        model.quant_method = Hiding()

        def load(tensors, model=model):
            model.weight = torch.nn.Parameter(torch.empty(8, 3, dtype=MATRIX.dtype), requires_grad=False)
            model.load(tensors)
            model.quant_method.process_weights_after_loading(model)

        folder = weights(MATRIX)
        proof = proven(load, lambda folder=folder: tensors_in(folder), folder, model, config())
        assert isinstance(proof, RankReads) == known
        assert torch.equal(model.kernel(), MATRIX[:, 3:]) == known
        assert not vars(model.quant_method)


def test_numbers_of_a_models_bytes_tell_each_byte_and_where_it_is(monkeypatch):
    monkeypatch.setattr(read_slices, "PIECE", 64)
    read_slices._factors.cache_clear()
    for tensor in (MATRIX, MATRIX.t(), EXPERTS[:, :, 1], torch.ones(3, dtype=torch.bool)):
        known = read_slices._sums(tensor)
        assert read_slices._sums(tensor.clone()) == known
        for place in itertools.product(*map(range, tensor.shape)):
            other = tensor.clone()
            other[place] = 100 - other[place].int() if tensor.dtype != torch.bool else False
            assert read_slices._sums(other) != known
        assert read_slices._sums(tensor.flip(0)) != known or tensor.dtype == torch.bool
    assert read_slices._sums(torch.tensor(3.0)) != read_slices._sums(torch.tensor(3.5))
    assert read_slices._sums(torch.empty(3, device="meta")) == read_slices._sums(torch.empty(0)) == []
    read_slices._factors.cache_clear()


def test_what_does_not_come_by_its_name_counts_as_read_whole(weights):
    folder, model = weights(MATRIX), Model(half)

    def renamed():
        for name, tensor in tensors_in(folder):
            yield name.replace("other", "made of other"), tensor

    proof = proven(model.load, renamed, folder, model, config())
    assert proof.slices == {"w": [(6, 6, 12, 8)], "other": [(0, 12, 0, 1)]}


def test_a_load_that_fails_fails(weights):
    with pytest.raises(ZeroDivisionError):
        found(weights(MATRIX), lambda *_: 1 / 0)


def test_a_heads_tensors_are_read_whole_where_there_is_a_head(tmp_path):
    save_file({PREFIX + "fc.weight": MATRIX, "w": MATRIX.clone()}, tmp_path / "model.safetensors")
    with_head, model = config(), Model(half)
    draft = SimpleNamespace(model="head")
    with_head.speculative_config = SimpleNamespace(
        use_ngram=lambda: False, draft_model_config=draft, method="eagle3"
    )
    for settings, names in ((config(), set()), (with_head, {PREFIX + "fc.weight"})):
        proof = proven(model.load, lambda: tensors_in(tmp_path), tmp_path, model, settings)
        assert proof.slices == {"w": [(6, 6, 12, 8)]} | {name: [(0, 96, 0, 1)] for name in names}


class Ranks:
    """A core of two ranks, whose calls are noted in `calls`."""

    def __init__(self, folder, monkeypatch):
        self.meeting, self.folder, self.calls = Meeting("here"), str(folder), []
        self.proofs = [self.reads(0), self.reads(1)]
        self.core = CoreHandle(None, 1.0, self.meeting)
        self.core._loaded = lambda: None
        self.core.rpc = self.rpc
        device = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
        monkeypatch.setattr(CoreHandle, "engine_core", SimpleNamespace(vllm_config=device))

    def reads(self, node):
        return RankReads(node, "", {})

    def rpc(self, method, **_):
        self.calls.append(method)
        return self.proofs

    def load(self, *, adapter=False, digest=""):
        self.calls = []
        self.core.load_weights([self.folder], digest, adapter=adapter)
        return self.calls

    def lay_out(self):
        self.calls = []
        self.core.lay_out_weights([self.folder], "digest")
        return self.calls


@pytest.fixture
def ranks(weights, monkeypatch):
    return Ranks(weights(MATRIX), monkeypatch)


def test_what_ranks_read_of_a_stream_is_proved_if_it_is_not_known(ranks):
    assert ranks.load() == ["seer_load_weights"]
    ranks.meeting.prove = True
    assert ranks.lay_out() == []  # it is proved in the pause
    assert ranks.load(adapter=True) == ["seer_load_adapter"]
    assert ranks.meeting.proofs == []
    assert ranks.load() == ["seer_prove_reads"]
    assert ranks.meeting.proofs == [ranks.proofs]
    assert ranks.load() == ["seer_load_weights"]
    assert ranks.lay_out() == ["seer_lay_out"]


def test_once_it_is_not_proved_nodes_read_whole_streams_for_ever(ranks):
    ranks.meeting.prove = True
    ranks.proofs[1] = "reads what is not seen"
    assert ranks.load() == ["seer_prove_reads", "seer_load_weights"]  # on both ranks
    assert ranks.meeting.proofs is None


def test_a_proof_that_cannot_run_is_tried_again_with_the_next_whole_stream_and_given_up_in_the_end(ranks):
    known = ranks.proofs
    for proofs in (
        [known[0], NotRun("no memory")],
        [NotRun("none")] * 2,
        known,
        *[[NotRun("none"), known[1]]] * 3,
    ):
        assert ranks.meeting.proofs is not None
        ranks.meeting.prove, ranks.proofs = True, proofs
        assert ranks.load() == ["seer_prove_reads", "seer_load_weights"][: 1 + (proofs is not known)]
    assert ranks.meeting.proofs is None


def test_what_was_proved_of_the_layout_before_is_known_too(ranks):
    first, *_ = layouts = [[RankReads(node, layout, {}) for node in (0, 1)] for layout in "abc"]
    for ranks.proofs in layouts:
        ranks.meeting.prove = True
        ranks.load()
    assert ranks.meeting.proofs == [layouts[2], layouts[1]]
    assert first not in ranks.meeting.proofs


@pytest.mark.parametrize(("known", "then"), [("proofs", []), (None, None)])
def test_after_a_load_that_failed_the_next_stream_is_read_whole_and_proved_again(ranks, known, then):
    ranks.meeting.proofs = [ranks.proofs] if known else None
    ranks.core.rpc = {}.pop
    with pytest.raises(EngineError, match="could not load"):
        ranks.core.load_weights([ranks.folder], "")
    assert ranks.meeting.proofs == then


def test_the_deadline_of_a_proof_is_that_of_two_loads_and_to_miss_it_ends_the_engine(ranks, monkeypatch):
    deadlines = []

    def late(method, timeout, kwargs):
        deadlines.append((kwargs["method"], timeout))
        raise TimeoutError("RPC call to seer_try timed out.")

    ranks.core.__dict__.pop("rpc")
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    monkeypatch.setattr(CoreHandle, "engine_core", SimpleNamespace(vllm_config=config))
    monkeypatch.setattr(CoreHandle, "_engine", SimpleNamespace(collective_rpc=late))
    for ranks.meeting.prove in (True, False):  # vLLM would take what a rank answers late for the next call's
        with pytest.raises(EngineBroken, match=r"within [12] s \(engine\.load_seconds = 1\)"):
            ranks.core.load_weights([ranks.folder], "")
    assert deadlines == [("seer_prove_reads", 2.0), ("seer_load_weights", 1.0)]


def test_a_folder_that_is_no_model_ends_a_load_before_it_begins(tmp_path):
    Path(tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + json.dumps({}).encode() + b"x")
    with pytest.raises(ValueError, match="damaged"):
        proven(lambda _: pytest.fail("it has begun"), lambda: iter(()), tmp_path, torch.nn.Module(), config())
