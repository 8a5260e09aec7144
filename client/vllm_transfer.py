"""Weights in place by vLLM's own NCCL transfer engine: from a trainer that never has all of them on one GPU.

vLLM's engine packs and sends what a `WeightSource` of vLLM's gives, as of FSDP's and Megatron's shards: these
are put together one after the other, by all ranks of the trainer.

Invariants (tests/unit/test_vllm_transfer.py):
- a bucket of the plan is what vLLM's engine packs into one buffer, aligned; a source that gives other tensors
  than it says ends the update;
- an update goes through the source twice, or once without `finite`, also when it fails: ranks that `follow`
  never wait for rank 0;
- vllm is imported only when an update begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from seer.client.in_place import BUCKET_BYTES, Broadcast, check_finite
from seer.client.tensor_stream import Entry, Tensor, TensorStream, entry_of
from seer.common.errors import InvalidField
from seer.common.weights.in_place import Bucket, Plan, PlannedTensor, check

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from vllm.distributed.weight_transfer.base import WeightSource


class VllmTransfer(Broadcast):
    """A source for `update_weights`: what vLLM's `WeightSource` gives, as `ModuleSource(model)`, by NCCL.

    `source` gives tensors on the GPU `device` (the present one). Other ranks of the trainer call `follow` for
    each update. All else as in `Broadcast`; a bucket ends with the tensor that goes beyond `bucket_bytes`.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        device: int | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        step_seconds: float = 30.0,
        finite: bool = True,
    ) -> None:
        super().__init__(
            {}, host=host, port=port, bucket_bytes=bucket_bytes, step_seconds=step_seconds, finite=finite
        )
        import torch

        self.source = source
        try:
            self._device = torch.accelerator.current_device_index() if device is None else device
        except RuntimeError as error:
            raise InvalidField("device", device, "there is no GPU here: use Broadcast") from error
        self._sender: Any = None
        self._unsent = False  # other ranks go through their sources again

    def follow(self) -> None:
        """Go through the source as rank 0 does for one update; it tells nobody here how that ends."""
        self._look_through(judge=False)
        _vllms_sender(self.source, sends=False).send_weights()

    def offer(self, name: str) -> TensorStream:
        """See `InPlace.offer`. Raises `InvalidField`."""
        import vllm.distributed.weight_transfer.nccl_engine  # noqa: F401 - takes seconds, before any step begins

        self.end()
        self._unsent = True
        buckets = list(_packed(self._look_through(judge=True), self._bucket_bytes))
        try:
            check(Plan(name, "vllm_nccl", buckets, self._host, 1))
        except ValueError as error:
            raise InvalidField("source", name, f"{error}: send these by Broadcast") from error
        return self._open(name, "vllm_nccl", buckets)

    def end(self) -> None:
        """See `InPlace.end`. Not before engines have what was sent: vLLM's end drops what is under way."""
        super().end()
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.shutdown()
        if self._unsent:
            self._unsent = False
            self._use_device()
            _vllms_sender(self.source, sends=False).send_weights()

    def _look_through(self, *, judge: bool) -> list[Entry]:
        """Return what the source gives, without tensors; `judge`: raise `InvalidField` for values."""
        import torch

        self._use_device()
        described = self.source.metadata()
        if self._finite:
            check_finite(self.source if judge else ((name, torch.empty(0)) for name, _ in self.source))
        return [
            entry_of(each.name, torch.empty(each.shape, dtype=each.dtype, device="meta"))
            for each in described
        ]

    def _use_device(self) -> None:
        import torch

        torch.accelerator.set_device_index(self._device)  # threads begin with device 0
        torch.accelerator.synchronize()  # vLLM's streams do not wait for what trains

    def _new_id(self) -> str:
        from seer.common.weights.vllm_group import new_id

        return new_id()

    def _send(self, store: TCPStore, size: int, stopped: Callable[[], bool], nccl_id: str) -> None:
        import base64

        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        from seer.common.weights.vllm_group import Watch, usable

        watch = Watch(self._device, self._step_seconds, stopped)
        sender = _vllms_sender(_Watched(self.source, watch.step), sends=True, most=self._bucket_bytes)
        unique = base64.b64decode(nccl_id)
        sender.model_update_group = usable(
            watch.run(lambda: uid_init_process_group(unique, 0, size, self._device))
        )
        self._sender, self._unsent = sender, False
        watch.run(sender.send_weights, sender.shutdown)


class _Watched:
    """A `WeightSource` that says when vLLM's engine takes a tensor: what came two buckets before is sent."""

    def __init__(self, source: WeightSource, step: Callable[[], None]) -> None:
        self.metadata = source.metadata
        self._source, self._step = source, step

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for pair in self._source:
            self._step()
            yield pair


class _Planned:
    """A `VLLMWeightSyncClient` without work: engines know the plan, and load by the buffer's word."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `broadcast_group.meet`."""

    def start_weight_update(self) -> None:
        """See `WeightsLoading`."""

    def update_weights(self, update_info: Any) -> None:  # noqa: ANN401 - vLLM's
        """See `Plan`."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See `WeightsLive`."""


def _vllms_sender(source: Any, *, sends: bool, most: int = 1) -> Any:  # noqa: ANN401 - vLLM's
    """Return vLLM's trainer engine for a source; without `sends` it goes through it, and sends nothing."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    return NCCLTrainerWeightTransferEngine(
        client=_Planned(), source=source, is_sender=sends, packed=True, packed_buffer_size_bytes=most
    )


def _packed(entries: list[Entry], most: int) -> Iterator[Bucket]:
    """Yield buckets as vLLM packs tensors: without gaps, to the tensor that goes beyond so many bytes."""
    planned: list[PlannedTensor] = []
    size = 0
    for index, entry in enumerate(entries):
        planned.append(PlannedTensor(entry.name, entry.dtype, entry.shape, size))
        size += entry.size
        if size > most or index == len(entries) - 1:
            yield Bucket(size, planned)
            planned, size = [], 0
