"""A model's next weights, laid out for vLLM's kernels while the present ones generate.

vLLM lays weights out while it loads them: of each layer it fills new memory, packs that for the processor,
and copies the result over the live weights. `LaidOut` has vLLM do so beforehand, in a twin of the model:
modules that share all with the live ones but parameters, buffers, and what a load sets. What is left for the
pause is to copy the twin's parameters, and to take what its load has set, as weights packed for oneDNN.

Invariants (tests/e2e/test_laid_out.py):
- until `use`, nothing that the live model reads is written, and steps go on;
- afterwards the model is, bit for bit, what vLLM's own load makes of the same folder;
- a model of which a part may keep weights elsewhere is refused by name: `problem`;
- after `free`, or an error, no memory is left of them, without a garbage collection.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

from seer.common.errors import EngineError
from seer.services.engine.vllm.loading import MAX_VLLM_TEXT
from seer.services.engine.vllm.weight_reload import reloading

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

CANCELLED = "the update was cancelled"

LOOK_SECONDS = 1.0
"""How often a thread that keeps weights looks whether its process ends."""

_TABLES = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
"""What modules hold their tensors and parts in."""


def problem(model: torch.nn.Module) -> str:
    """Return what in a model keeps a twin from being made; empty: nothing."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method = type(getattr(module, "quant_method", None))
        if method not in (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return f"{type(module).__name__} has {method.__name__}"  # its state may be shared with the twin
        if hasattr(module, "process_weights_after_loading") and type(module) is not Attention:
            return f"{type(module).__name__} lays out weights by itself"
    return ""


class LaidOut:
    """The weights in `folder` for a `model` without a `problem`; `free` them in the end.

    `stop`: whether they are not needed any more; then a `ValueError`. Raises `EngineError`, or vLLM's own
    errors.
    """

    def __init__(
        self, config: VllmConfig, model: torch.nn.Module, folder: str, stop: Callable[[], bool]
    ) -> None:
        self.folder = Path(folder)
        self._live = list(model.modules())
        self._twins = [copy.copy(module) for module in self._live]
        try:
            _divide(self._live, self._twins)
            self._load(config, folder, stop)
        except BaseException:
            self.free()
            raise

    def _load(self, config: VllmConfig, folder: str, stop: Callable[[], bool]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        model_config = copy.copy(config.model_config)
        model_config.model, model_config.model_weights, model_config.revision = folder, "", None
        weights = get_model_loader(config.load_config).get_all_weights(model_config, self._twins[0])
        with set_current_vllm_config(config):
            reloading(
                reload_weights, vllm_config=config, model=self._twins[0], weights_path=None,
                weights_iterator=_until(stop, weights), is_checkpoint_format=True,
            )  # fmt: skip

    def use(self) -> None:
        """Make them the live ones; the twin then holds what was live, and to free that may wait."""
        new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tied tensors once
        for live, twin in zip(self._live, self._twins, strict=True):
            for table in ("_parameters", "_buffers"):
                mine, theirs = vars(live)[table], vars(twin)[table]
                new |= {id(each): (each, theirs[name]) for name, each in mine.items() if each is not None}
            have, made = vars(live), vars(twin)
            for key in made.keys() - _TABLES:
                have[key], made[key] = made[key], have.get(key)
        for tensor, values in new.values():
            tensor.data.copy_(values.data)

    def free(self) -> None:
        """Free what the twin holds: its loaders, and vLLM's notes, refer to its modules."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        for twin in self._twins:
            LAYERWISE_INFO.pop(twin, None)
            vars(twin).clear()


class LayOutThread:
    """Lays weights out for a `model` in a thread, keeps them until `end`, and frees them there.

    `before` was ended, but may still be at work. `problem`: why there are none; empty: there are some; None:
    this is under way.
    """

    def __init__(
        self, config: VllmConfig, model: torch.nn.Module, folder: str, before: LayOutThread | None
    ) -> None:
        self.folder = Path(folder)
        self.problem: str | None = None
        self._ended = threading.Event()
        self._laid_out: LaidOut | None = None
        given = config, model, before
        # No daemon: one that is in torch's code when Python ends aborts the process.
        self._thread = threading.Thread(target=self._run, args=given, name="lay-out")
        self._thread.start()

    def use(self) -> None:
        """See `LaidOut.use`. Raises `EngineError` if there are none."""
        if self._laid_out is None:
            raise EngineError("no weights are laid out")
        self._laid_out.use()

    def end(self, *, wait: bool = False) -> None:
        """Free them soon; `wait` until that is done."""
        self._ended.set()
        if wait:
            self._thread.join()

    def _run(self, config: VllmConfig, model: torch.nn.Module, before: LayOutThread | None) -> None:
        if before is not None:
            before.end(wait=True)
        try:
            if why := CANCELLED if self._over() else problem(model):
                raise ValueError(why)
            self._laid_out = LaidOut(config, model, str(self.folder), self._over)
        except Exception as error:  # noqa: BLE001 - vLLM's may be any; the load will say it again
            self.problem = str(error)[:MAX_VLLM_TEXT] or repr(error)
        else:
            self.problem = ""
            while not self._over():
                self._ended.wait(LOOK_SECONDS)
            self._laid_out.free()
            self._laid_out = None

    def _over(self) -> bool:
        """Return whether they are not needed any more: they are ended, or the process ends."""
        return self._ended.is_set() or not threading.main_thread().is_alive()


def _until(stop: Callable[[], bool], weights: Iterator[Any]) -> Iterator[Any]:
    for each in weights:
        if stop():
            raise ValueError(CANCELLED)
        yield each


def _divide(live: list[torch.nn.Module], made: list[torch.nn.Module]) -> None:
    """Give copies of a model's modules tensors of their own; tied ones are tied in the twins, too."""
    twins = dict(zip(live, made, strict=True))
    memory: dict[int, torch.Tensor] = {}
    for module, twin in twins.items():
        twin.__dict__.update({table: copy.copy(module.__dict__[table]) for table in _TABLES})
        for table in (twin._parameters, twin._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in memory:
                        memory[id(tensor)] = _own_loader(tensor.data.clone(), tensor, module, twin)
                    table[name] = memory[id(tensor)]
        for name, part in twin._modules.items():
            if part is not None:
                twin._modules[name] = twins[part]
        _share_metadata(module, twin)


def _own_loader(
    other: torch.Tensor, tensor: torch.Tensor, module: torch.nn.Module, twin: torch.nn.Module
) -> torch.Tensor:
    """Have what loads a tensor of a module load the `other` one, of its twin."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    other.__class__, other.__dict__ = tensor.__class__, tensor.__dict__.copy()
    if hasattr(tensor, "weight_loader"):
        other.weight_loader = layerwise._get_original_loader(tensor)  # vLLM leaves its wrapper there
    for key, value in vars(other).items():
        if isinstance(value, MethodType) and value.__self__ in (module, layer_ref_sentinel):
            vars(other)[key] = MethodType(value.__func__, twin)
    return other


def _share_metadata(module: torch.nn.Module, twin: torch.nn.Module) -> None:
    """Let vLLM know of a twin what it noted of the module at the first load, with loaders of the twin's."""
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

    info = layerwise.get_layerwise_info(module)
    parameters, buffers = (
        {name: _own_loader(each.data.to("meta"), each, module, twin) for name, each in table.items()}
        for table in info.restore_metadata
    )
    layerwise.LAYERWISE_INFO[twin] = LayerReloadingInfo((parameters, buffers), info.restore_device)
