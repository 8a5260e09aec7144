"""Weights that are laid out while others generate: the same model as after vLLM's own load, and no token else."""

import gc
import itertools
import subprocess
import sys
import time
from types import FunctionType

import pytest
import torch
from ahead import check_on_two_ranks
from engine_cases import BASE, chunk, engine_of, one_go, run
from safetensors.torch import load_file, save_file
from shared_engines import MODEL, changed_model
from tiny_families import tiny
from transformers import LlamaForCausalLM
from vllm.model_executor.model_loader.reload import layerwise

from seer.common.errors import EngineError
from seer.common.sleep import SleepState
from seer.services.engine.vllm import core, laid_out

PROMPT = list(range(1, 30))


def lay_out(backend, folder, digest):
    """Return whether weights were laid out."""
    backend.lay_out_weights(folder, digest)
    while backend.lays_out():
        time.sleep(0.01)
    return backend.core._laid_out == digest != ""


def forget(backend):
    """End what is laid out, and wait until its memory is free."""
    backend.lay_out_weights(None, "")
    worker_of(backend).seer_laid_out.end(wait=True)


def worker_of(backend):
    return backend.core.engine_core.model_executor.driver_worker.worker


def state(backend):
    """Return the bits of all tensors of the live model, and what each packed layer makes of an input."""
    found = {}
    for name, module in worker_of(backend).model_runner.get_model().named_modules():
        for part, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                found[name, part] = tensor.detach().clone()
        if (packed := vars(module).get("cpu_linear")) is not None:
            width = getattr(module, "input_size_per_partition", 0) or module.embedding_dim
            given = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
            found[name, "packed"] = packed(given, getattr(module, "weight", None), None)
    return found


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_load_that_failed_leaves_nothing_for_the_next_one(tmp_path):
    """It ends within a layer, of which vLLM has noted what came."""
    broken, tensors = changed_model(tmp_path / "broken"), {}
    for name, tensor in load_file(broken / "model.safetensors").items():
        tensors[name] = tensor if ".1.self_attn.v_proj" not in name else tensor[:-1].clone()
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with engine_of(MODEL, kv_blocks=40) as backend:
        backend.load_weights(MODEL, "old")
        expected = state(backend)
        with pytest.raises(EngineError, match="could not load"):
            backend.load_weights(broken, "broken")
        backend.load_weights(MODEL, "old")
        assert equal(state(backend), expected)


def with_biases(folder, scale):
    """Write a tiny Llama whose attention has biases: vLLM keeps those through a load."""
    config = tiny("llama").config
    config.attention_bias = True
    torch.manual_seed(7)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.02).mul_(scale)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((MODEL / file).read_bytes())
    return folder


def test_biases_are_laid_out_as_well(tmp_path):
    old, new = with_biases(tmp_path / "old", 1.0), with_biases(tmp_path / "new", 1.1)
    with engine_of(old, kv_blocks=40) as backend:
        backend.load_weights(new, "new")
        expected = state(backend)
        assert any(part == "bias" for _, part in expected)
        backend.load_weights(old, "old")
        assert not equal(state(backend), expected)
        assert lay_out(backend, new, "new")
        backend.load_weights(new, "new")
        assert equal(state(backend), expected)


def test_weights_are_laid_out_while_others_generate(tmp_path, monkeypatch):
    new = changed_model(tmp_path / "new")
    with engine_of(MODEL, kv_blocks=100) as backend:
        before, first = one_go(backend, BASE, prompt=PROMPT), state(backend)
        backend.load_weights(new, "new")
        after, second = one_go(backend, BASE, prompt=PROMPT), state(backend)
        backend.load_weights(MODEL, "old")
        assert equal(state(backend), first)

        for _ in range(3):
            backend.lay_out_weights(new, "new")
            for round_ in itertools.count():
                chunks = [chunk(f"{round_} {each}", BASE, prompt=PROMPT) for each in range(4)]
                for response in run(backend, chunks).values():
                    assert response.tokens == before.tokens
                if not backend.lays_out() and round_:
                    break
            assert equal(state(backend), first)
            assert backend.core._laid_out == "new"
            loads = count_loads(backend, monkeypatch)
            backend.load_weights(new, "new")
            assert not loads
            assert equal(state(backend), second)
            assert one_go(backend, BASE, prompt=PROMPT).tokens == after.tokens
            backend.load_weights(new, "new")  # what is laid out is used once
            assert loads
            assert equal(state(backend), second)
            loads.clear()
            assert lay_out(backend, MODEL, "old")
            backend.load_weights(MODEL, "old")
            assert not loads
            assert equal(state(backend), first)
            monkeypatch.undo()

        # What is no longer needed, or has no room, or is of another digest, is loaded by vLLM in the pause.
        backend.lay_out_weights(new, "new")
        backend.lay_out_weights(None, "")
        assert not backend.lays_out()
        assert not backend.core._laid_out
        assert lay_out(backend, new, "new")
        backend.lay_out_weights(None, "")
        assert backend.core.rpc("seer_forget_laid_out") == [None]
        with monkeypatch.context() as patch:
            patch.setattr(core, "free_bytes", lambda: 2**20)
            assert not lay_out(backend, new, "new")
        assert not lay_out(backend, tmp_path, "none")
        assert lay_out(backend, new, "another")
        loads = count_loads(backend, monkeypatch)
        backend.load_weights(MODEL, "old")
        assert loads
        assert equal(state(backend), first)
        assert lay_out(backend, new, "new")
        backend.load_weights(new, "new")
        assert equal(state(backend), second)


def test_no_weights_are_left_once_they_are_loaded_or_not_needed(tmp_path, monkeypatch):
    new = changed_model(tmp_path / "new")
    with engine_of(MODEL, kv_blocks=40) as backend:
        backend.load_weights(new, "")  # so that vLLM's own first load is over
        gc.collect()
        gc.disable()  # an engine's collector looks at what lives on once a minute, if at all
        try:
            before = packed_layers()
            assert before
            for folder, digest in ((MODEL, "old"), (new, "new")):
                assert lay_out(backend, folder, digest)
                assert packed_layers() == 2 * before
                backend.load_weights(folder, digest)
                forget(backend)
                assert packed_layers() == before
            with monkeypatch.context() as patch:
                calls, until = itertools.count(), laid_out._until
                patch.setattr(laid_out, "_until", lambda _, given: until(lambda: next(calls) == 20, given))
                assert not lay_out(backend, MODEL, "old")
            assert packed_layers() == before
            backend.lay_out_weights(MODEL, "old")
            backend.load_weights(new, "another")  # while the other ones are laid out
            assert packed_layers() == before
            assert lay_out(backend, MODEL, "old")
            backend.lay_out_weights(new, "new")  # of two, the first one is freed before
            assert lay_out(backend, new, "new")
            assert packed_layers() == 2 * before
            backend.sleep(SleepState.ASLEEP, 1)
            assert packed_layers() == before
            backend.sleep(SleepState.AWAKE, 1)
            backend.load_weights(new, "new")
            assert packed_layers() == before
        finally:
            gc.enable()
        divided, divide = [], laid_out._divide
        monkeypatch.setattr(
            laid_out, "_divide", lambda *models: (divided.append(time.sleep(0.5)), divide(*models))
        )
        backend.lay_out_weights(MODEL, "old")
        backend.lay_out_weights(new, "new")  # cancelled before its turn
        backend.lay_out_weights(None, "")
        backend.sleep(SleepState.ASLEEP, 2)  # frees what a thread reads that has not ended
        assert not worker_of(backend).seer_laid_out._thread.is_alive()
        assert len(divided) == 1


ENDS = """
import time

import torch

from seer.services.engine.vllm import laid_out

class LaidOut:
    def __init__(self, config, model, folder, stop):
        while folder == "long" and not stop():
            torch.ones(3000, 3000).clone()

    def free(self):
        print("freed", flush=True)

laid_out.problem, laid_out.LaidOut = lambda model: "", LaidOut
kept = [laid_out.LayOutThread(None, None, folder, None) for folder in ("long", "short")]
time.sleep(0.2)
"""


def test_a_process_ends_as_usual_whatever_it_lays_out():
    """Python aborts a process at its end if a daemon's call of torch returns then."""
    done = subprocess.run([sys.executable, "-c", ENDS], text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, "freed\n" * 2), done.stderr[-2000:]


def packed_layers():
    """Return how many layers' weights are packed by vLLM for its kernels: each is a function's."""
    made = (each for each in gc.get_objects() if isinstance(each, FunctionType))
    return sum(each.__qualname__.startswith("dispatch_cpu_unquantized_gemm.") for each in made)


TWO_RANKS = """
import itertools
from pathlib import Path
import sys

from engine_cases import BASE, chunk, engine_of, one_go, run
from shared_engines import MODEL, changed_model
from e2e.test_laid_out import PROMPT, lay_out
from seer.common.errors import EngineError

def weights(worker):
    state = worker.model_runner.get_model().state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}

def parts(backend):
    found = backend.core.engine_core.model_executor.collective_rpc(weights)
    return [{name: tensor.tolist() for name, tensor in each.items()} for each in found]

if __name__ == "__main__":
    new = changed_model(Path(sys.argv[1]) / "new")
    with engine_of(MODEL, kv_blocks=40, tensor_parallel=2, cpu_cores=None) as backend:
        before, first = one_go(backend, BASE, prompt=PROMPT).tokens, parts(backend)
        backend.load_weights(new, "new")
        after, second = one_go(backend, BASE, prompt=PROMPT).tokens, parts(backend)
        backend.load_weights(MODEL, "old")
        assert before != after and parts(backend) == first != second and first[0] != first[1]
        backend.lay_out_weights(new, "new")
        for round_ in itertools.count():
            assert run(backend, [chunk(str(round_), BASE, prompt=PROMPT)])[str(round_)].tokens == before
            if not backend.lays_out() and round_:
                break
        assert backend.core._laid_out == "new" and parts(backend) == first
        backend.load_weights(new, "new")
        assert backend.core._laid_out == "used" and parts(backend) == second
        assert one_go(backend, BASE, prompt=PROMPT).tokens == after
        backend.lay_out_weights(MODEL, "old")  # still under way when the load comes, or not
        backend.load_weights(MODEL, "another")
        assert parts(backend) == first
        assert not lay_out(backend, Path(sys.argv[1]), "none")
        try:
            backend.load_weights(Path(sys.argv[1]), "none")
        except EngineError as error:
            assert "could not load" in str(error)
        else:
            raise AssertionError("nothing is there")
        backend.load_weights(new, "new")  # the answers of both ranks are those to this call
        assert parts(backend) == second
    print("the same", flush=True)
"""


@pytest.mark.ranks
@pytest.mark.timeout(400)
def test_each_rank_lays_out_its_own(tmp_path):
    check_on_two_ranks(tmp_path, TWO_RANKS, tmp_path)


def count_loads(backend, monkeypatch):
    """Return a list that grows with each load by vLLM."""
    loads, rpc = [], backend.core.rpc

    def counted(method, **arguments):
        loads.extend([method] * (method == "seer_load_weights"))
        return rpc(method, **arguments)

    monkeypatch.setattr(backend.core, "rpc", counted)
    return loads


def test_no_part_of_a_twin_is_left_that_cannot_be_made(monkeypatch):
    """As where there is no memory for all of it: vLLM's notes of layers would keep it for ever."""

    class Layer(torch.nn.Linear):
        def load(self, parameter, loaded):
            parameter.data.copy_(loaded)

    model = torch.nn.Sequential(*(Layer(3, 3) for _ in range(3)))
    for layer in model:
        layer.weight.weight_loader = layer.load
    layerwise.record_metadata_for_reloading(model)
    gc.collect()
    before, made, own = len(layerwise.LAYERWISE_INFO), [], laid_out._own_loader

    def limited(*args):
        made.append(own(*args))
        if len(made) > 8:
            raise MemoryError
        return made[-1]

    monkeypatch.setattr(laid_out, "_own_loader", limited)
    with pytest.raises(MemoryError):
        laid_out.LaidOut(None, model, "", lambda: False)
    made.clear()
    gc.collect()
    assert len(layerwise.LAYERWISE_INFO) == before
