"""Two processes share a tensor on this GPU (CUDA IPC), and the one that made it dies.

Invariants:
- what is read is checked, before and after the exporter changes it;
- every answer has a deadline; the processes end with the check.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # teaches pickle how tensors are shared
from kernel_checks.timing import wall_us

from seer.doctor.device import DEVICE, GPU, wait
from seer.doctor.report_lines import Report

_SECONDS = 30.0
_BYTES = 512 << 20
_SMALL, _SMALL_BYTES = 200, 1 << 20
_FIX = (
    "start trainer and engine in one container, or with --ipc=host; copy weights through the host until then"
)


class _Peer:
    """A process that answers; `ask` raises `RuntimeError` with its error, `TimeoutError` if it is silent."""

    def __init__(self, target: Any) -> None:  # noqa: ANN401 - a function of a connection
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self.process = context.Process(target=target, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def ask(self, what: str, data: Any = None) -> Any:  # noqa: ANN401 - plain data, or shared tensors as bytes
        self._here.send((what, data))
        if not self._here.poll(_SECONDS):
            raise TimeoutError(f"no answer to {what!r} within {_SECONDS:.0f} s")
        good, answer = self._here.recv()
        if not good:
            raise RuntimeError(answer)
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join(_SECONDS)


def check(report: Report) -> None:
    """Share tensors between two processes, with both of torch's allocators."""
    if not GPU:
        report.skip("no GPU: there is no CUDA IPC")
        return
    for expandable in (False, True):
        name = "expandable segments" if expandable else "plain segments"
        with _allocator(expandable):
            exporter, importer = _Peer(_export), _Peer(_import)
            try:
                _check_sharing(report, name, exporter, importer)
            except (RuntimeError, TimeoutError, EOFError, OSError) as error:
                report.expect(False, f"{name}: {error}", _FIX)
            finally:
                exporter.kill()
                importer.kill()


@contextmanager
def _allocator(expandable: bool) -> Iterator[None]:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"
    try:
        yield
    finally:
        del os.environ["PYTORCH_CUDA_ALLOC_CONF"]


def _check_sharing(report: Report, name: str, exporter: _Peer, importer: _Peer) -> None:
    made = exporter.ask("make", _BYTES)
    opened = importer.ask("open", made["tensors"])
    report.expect(
        opened["sum"] == made["sum"], f"{name}: {_BYTES >> 20} MiB read in another process", _FIX,
        share_us=made["share_us"], open_us=opened["open_us"], clone_gb_per_s=opened["gb_per_s"],
    )  # fmt: skip
    changed = exporter.ask("change")
    text = f"{name}: a change by the exporter is seen"
    report.expect(importer.ask("sum") == changed, text, _FIX)
    small = exporter.ask("make_small", (_SMALL, _SMALL_BYTES))
    opened = importer.ask("open_small", small["tensors"])
    text = f"{name}: {_SMALL} tensors of {_SMALL_BYTES >> 20} MiB"
    report.expect(
        opened["sum"] == small["sum"], text, _FIX, share_us=small["share_us"], open_us=opened["open_us"]
    )
    exporter.kill()
    try:
        after = "the same bytes" if importer.ask("sum") == changed else "other bytes"
    except (RuntimeError, EOFError) as error:
        after = str(error).splitlines()[0]
    report.note(f"{name}: read after the exporter was killed", read=after)
    other = _Peer(_export)
    try:
        made = other.ask("make", _BYTES)
        opened = importer.ask("open", made["tensors"])
        report.expect(opened["sum"] == made["sum"], f"{name}: another exporter after the death of one", _FIX)
    finally:
        other.kill()


def _serve(connection: Connection, answers: dict[str, Any]) -> None:
    while connection.poll(4 * _SECONDS):
        try:
            what, data = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, answers[what](data)))
        except Exception as error:  # noqa: BLE001 - the one who asked reports it
            connection.send((False, f"{type(error).__name__}: {error}"))


def _export(connection: Connection) -> None:
    kept: list[torch.Tensor] = []

    def share(tensors: list[torch.Tensor]) -> dict[str, Any]:
        kept.extend(tensors)
        wait()
        begun = time.perf_counter()
        shared = [bytes(ForkingPickler.dumps(tensor)) for tensor in tensors]
        micros = 1e6 * (time.perf_counter() - begun)
        return {"tensors": shared, "sum": sum(_sum(tensor) for tensor in tensors), "share_us": micros}

    def make(size: int) -> dict[str, Any]:
        return share([torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=DEVICE)])

    def make_small(shape: tuple[int, int]) -> dict[str, Any]:
        count, size = shape
        return share(
            [torch.full((size // 4,), i + 1, dtype=torch.int32, device=DEVICE) for i in range(count)]
        )

    def change(_: object) -> int:
        kept[0].add_(3)
        wait()
        return _sum(kept[0])

    _serve(connection, {"make": make, "make_small": make_small, "change": change})


def _import(connection: Connection) -> None:
    kept: list[torch.Tensor] = []

    def load(tensors: list[bytes]) -> tuple[list[torch.Tensor], float]:
        wait()
        begun = time.perf_counter()
        loaded = [pickle.loads(tensor) for tensor in tensors]  # noqa: S301 - this check's own process wrote it
        wait()
        return loaded, 1e6 * (time.perf_counter() - begun)

    def open_one(tensors: list[bytes]) -> dict[str, Any]:
        loaded, micros = load(tensors)
        kept[:] = loaded
        copied = loaded[0].numel() * 4 / wall_us(loaded[0].clone, repeats=5) / 1e3
        return {"sum": _sum(loaded[0]), "open_us": micros, "gb_per_s": copied}

    def open_small(tensors: list[bytes]) -> dict[str, Any]:
        loaded, micros = load(tensors)
        return {"sum": sum(_sum(tensor) for tensor in loaded), "open_us": micros}

    _serve(connection, {"open": open_one, "open_small": open_small, "sum": lambda _: _sum(kept[0])})


def _sum(tensor: torch.Tensor) -> int:
    return int(tensor.sum(dtype=torch.int64).item())
