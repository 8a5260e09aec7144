"""Which bytes of weights a rank reads when it loads them: vLLM's loaders do not say.

`Recorder` sees each operation of torch in its thread. One that only makes a view reads nothing; any other
reads the views of a file's tensors that it is given. What is read by other ways it does not see, so `proven`
loads once more, with other bytes in place of all that was not seen to be read.

Nothing looks at later loads, from files with holes: what they read follows from names, types and shapes,
which are those of the proof (`layout_of`).

Invariants (tests/unit/test_read_slices.py):
- what is seen to be read counts: exactly, where it is a run or runs at equal distances, else as the whole
  tensor; what is noted of a tensor is bounded: `MAX_PARTS`;
- of a load that reads anything else nothing is known, nor of one that differs each time, or leaves a tensor
  of the file in use; nor of one that fails without what was not seen to be read: `NotRun`, it may have had
  no memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from seer.common.slices import Slice, slice_of, whole
from seer.common.weights.safetensors import stored
from seer.services.engine.nodes.shares import NotRun, RankReads, layout_of
from seer.services.engine.vllm.drafts.head_config import is_heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    Tensors = Iterator[tuple[str, torch.Tensor]]

MAX_PARTS = 4096
"""Slices of one tensor beyond which it counts as read whole: each expert's of a fused tensor are fewer."""

PIECE = 2**20
"""Bytes that are added up at once, with sixteen times as many beside them."""


def proven(
    load: Callable[[Tensors], object],
    weights: Callable[[], Tensors],
    folder: Path,
    model: torch.nn.Module,
    config: VllmConfig,
) -> RankReads | str:
    """Load the weights in `folder` twice, and return what that reads of them; or why this is not known.

    In that case the model has no weights: all ranks are to load them again. Each goes through both loads,
    whatever it finds, as others may wait for it in vLLM. Beside the second load, this takes time to read the
    model's memory four times, where it lies, and room for copies of the tensors that vLLM holds at once: of a
    layer. Raises what the first load raises.
    """
    recorder = Recorder(folder)
    with recorder, _noted(model) as first:
        load(recorder.tensors(weights()))
    for name in recorder.stored:
        if name not in recorder.seen or is_heads(name, config):
            recorder.note(name, None)  # a loader may read it apart, as a head's does
    copies: list[StorageWeakRef] = []
    try:
        with _noted(model) as second:
            load(_without_unread(weights(), recorder, copies))
    except Exception as error:  # noqa: BLE001 - such values may provoke any
        return NotRun(f"a load without what was not seen to be read failed: {error}")
    gc.collect()
    if lacking := [each for each in first + second if isinstance(each, NotRun)]:
        return lacking[0]
    if first != second:
        return "a load reads what is not seen, or differs each time"
    if not all(each.expired() for each in copies):
        return "a load leaves tensors of the file in use"
    parts = {name: sorted(each) for name, each in recorder.read.items()}
    return RankReads(config.parallel_config.node_rank, layout_of(recorder.stored.values()), parts)


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Use as a context around a load of `tensors` of the files in `folder`.

    `seen`: names of tensors that came; `read`: parts of those that were read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.stored = {each.name: each for each in stored(folder)}
        self.seen: set[str] = set()
        self.read: dict[str, set[Slice]] = {}
        # By what torch has of its memory: while there is a weak reference, nothing else gets that place.
        self._watched: dict[int, tuple[str, StorageWeakRef]] = {}

    def tensors(self, tensors: Tensors) -> Tensors:
        """Yield tensors, and watch those that are in the files."""
        for name, tensor in tensors:
            self.seen.add(name)
            if name in self.stored:
                memory = tensor.untyped_storage()
                if tensor.is_contiguous() and tensor.nbytes == memory.nbytes() == self.stored[name].size:
                    self._watched[memory._cdata] = name, StorageWeakRef(memory)
                else:
                    self.note(name, None)
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's own
        """Note what an operation reads, and do it."""
        if not _only_views(func):
            for each in _leaves((*args, *(kwargs or {}).values())):
                if isinstance(each, torch.Tensor):
                    self._reads(each)
        return func(*args, **(kwargs or {}))

    def note(self, name: str, part: Slice | None) -> None:
        """Note that a part of a tensor was read; None: all of it."""
        if size := self.stored[name].size:
            parts = self.read.setdefault(name, set())
            if part is None or len(parts) == MAX_PARTS:
                self.read[name] = {whole(0, size)}
            elif whole(0, size) not in parts:
                parts.add(part)

    def _reads(self, tensor: torch.Tensor) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # it has no memory, as an uninitialized parameter
            name, _ = self._watched.get(tensor.untyped_storage()._cdata, ("", None))
            if name and tensor.numel():
                item = tensor.element_size()
                self.note(name, slice_of(tensor.storage_offset() * item, tensor.shape, tensor.stride(), item))


@contextlib.contextmanager
def _noted(model: torch.nn.Module) -> Iterator[list[object]]:
    """Note what a load makes of a model: of each layer before kernels get its weights, and of all in the end.

    Kernels may have them where nobody sees them, as oneDNN does; of scales that are merged one hides others.
    """
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    found: list[object] = []

    def note(values: Iterable[object]) -> None:
        found.extend(
            _sums(each) if isinstance(each, torch.Tensor) else repr(each) for each in _leaves(values)
        )

    def noting(lay_out: Callable[[torch.nn.Module], None], layer: torch.nn.Module) -> None:
        # What is skipped may come later: it still is what it was before the load.
        note(each for name, each in layer._parameters.items() if name not in SKIP_TENSORS)
        lay_out(layer)

    name = "process_weights_after_loading"
    methods = {getattr(module, "quant_method", None) for module in model.modules()}
    methods = {each for each in methods if hasattr(each, name)}
    for method in methods:
        setattr(method, name, functools.partial(noting, getattr(method, name)))
    try:
        yield found
    finally:
        for method in methods:
            delattr(method, name)
    for module in model.modules():
        note(each for name, each in vars(module).items() if name != "kv_cache")


def _without_unread(tensors: Tensors, recorder: Recorder, copies: list[StorageWeakRef]) -> Tensors:
    """Yield tensors, and of those that were not read whole copies, in which all unread bytes are inverted."""
    for name, tensor in tensors:
        parts = recorder.read.get(name, set())
        if not tensor.numel() or name not in recorder.stored or whole(0, tensor.nbytes) in parts:
            yield name, tensor
            continue
        given = tensor.reshape(-1).view(torch.uint8)
        copy = given.bitwise_not()
        for start, size, stride, count in parts:
            rows = (count, size), (stride, 1), start
            copy.as_strided(*rows).copy_(given.as_strided(*rows))
        copies.append(StorageWeakRef(copy.untyped_storage()))
        yield name, copy.view(tensor.dtype).view(tensor.shape)


def _sums(tensor: torch.Tensor) -> object:
    """Return sums of a tensor's bytes, each times a random number: others have the same once in 2**56.

    Of a tensor that does not give its bytes, nothing equals what is returned; `NotRun`: for want of memory.
    """
    if tensor.is_meta or not tensor.numel():
        return []
    try:
        as_it_lies = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        data = tensor.data.permute(as_it_lies).reshape(-1).contiguous().view(torch.uint8)
        factors = _factors(tensor.device)
        return torch.stack([(each * factors[: len(each)]).sum() for each in data.split(PIECE)]).tolist()
    except torch.OutOfMemoryError as error:
        return NotRun(error)
    except Exception:  # noqa: BLE001 - of many kinds of tensors
        return object()


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(-(2**63), 2**63 - 1, (PIECE,), generator=random, device="cpu").to(device)


@functools.cache  # a mixture's load has a hundred thousand operations, of a few kinds
def _only_views(func: Any) -> bool:  # noqa: ANN401 - an overload of torch's
    """Whether an operation returns views of what it is given, and reads none of it."""
    returns = func._schema.returns if hasattr(func, "_schema") else ()
    return bool(returns) and all(each.alias_info and not each.alias_info.is_write for each in returns)


def _leaves(values: Iterable[object], depth: int = 3) -> Iterator[torch.Tensor | int | float]:
    """Yield the tensors and numbers among values, also those in lists and tables."""
    for each in values:
        if isinstance(each, torch.Tensor | int | float):
            yield each
        elif depth and isinstance(each, list | tuple | dict):
            yield from _leaves(each.values() if isinstance(each, dict) else each, depth - 1)
