"""What a stream waits for host work between two steps, by the way it waits: a host function, or a flag.

    python bench/gpu/gate_bench.py gate.json
    python bench/gpu/gate_bench.py gate.json --cpu

Many steps are in line at once, as an engine that schedules ahead has them. After each the stream copies
tokens out, waits until the host has worked on them, and copies drafts in. Writes after each cell the
microseconds a step takes beyond a step without a gate and the work itself, and those to launch it: on the
default stream, on which engines run their steps, and `beside` it, on one of its own. A second flag, at a
deadline, is the first with a host that stands still: the stream must go on by itself. Needs one GPU, torch
and gcc; no Seer, no vLLM. On a CPU it measures nothing: `--cpu` runs its logic on a fake stream.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

WORK = r"""
#include <stdint.h>
#include <time.h>
#include <pthread.h>
#include <unistd.h>
static int64_t now(void) {
  struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static int64_t work, deadline; static volatile uint32_t *in, *out; static uint32_t last, stalled;
static pthread_t worker, watch; static int polite;
static void pause_(void) { if (polite) usleep(20); else __builtin_ia32_pause(); }
static void spin(int64_t ns) { int64_t end = now() + ns; while (now() < end); }
void set_work(int64_t ns) { work = ns; }
void be_polite(void) { polite = 1; }  /* few cores: give them to others while waiting */
void callback(void *unused) { (void)unused; spin(work); }
static void *serve(void *unused) {  /* does a step's work, and opens its gate; the one to stall, never */
  for (uint32_t step = 1; step <= last; step++) {
    while (*in < step) pause_();
    if (step == stalled) continue;
    spin(work);
    if (*out < step) *out = step;
  }
  return unused;
}
static void *guard(void *unused) {  /* opens gates that are still closed at their deadline */
  for (uint32_t step = 1; step <= last; step++) {
    while (*in < step) pause_();
    int64_t end = now() + deadline;
    while (*out < step && now() < end) pause_();
    if (*out < step) *out = step;
  }
  return unused;
}
void start(uint32_t *in_, uint32_t *out_, uint32_t steps, int64_t deadline_ns, uint32_t stall) {
  in = in_; out = out_; last = steps; deadline = deadline_ns; stalled = stall; *in = *out = 0;
  pthread_create(&worker, 0, serve, 0);
  if (deadline) pthread_create(&watch, 0, guard, 0);
}
void finish(void) { pthread_join(worker, 0); if (deadline) pthread_join(watch, 0); }
"""
KINDS = {"copies": (0,), "function": (0, 100, 400), "flag": (0, 100, 400), "deadline": (100,)}
"""Ways to wait, and microseconds of host work at each step."""

DEADLINE = 5_000
"""Microseconds after which a gate opens by itself."""


class Stream(Protocol):
    """What steps are launched on; nothing here waits but `finish`."""

    def step(self) -> None:
        """Compute."""
        ...

    def copy_out(self) -> None:
        """Copy tokens to the host."""
        ...

    def call(self, function: Any) -> None:  # noqa: ANN401 - a C function
        """Call a host function in line."""
        ...

    def write(self, address: int, value: int) -> None:
        """Write a flag."""
        ...

    def wait(self, address: int, value: int) -> None:
        """Wait until a flag is at least this."""
        ...

    def copy_in(self) -> None:
        """Copy drafts to the device."""
        ...

    def finish(self) -> None:
        """Wait for all of it."""
        ...


class CudaStream:
    """A stream of the GPU: the default one, or one of its own."""

    CYCLES = 2_000_000

    def __init__(self, *, own: bool) -> None:
        import torch

        self._torch, self._cuda = torch, ctypes.CDLL("libcuda.so.1")
        self._stream = torch.cuda.Stream() if own else torch.cuda.default_stream()
        self._raw = ctypes.c_void_p(self._stream.cuda_stream)
        self._tokens = torch.zeros(2048, dtype=torch.int32, device="cuda")
        self._drafts = torch.zeros(4096, dtype=torch.int32, device="cuda")
        self._out, self._in = (torch.zeros(size, dtype=torch.int32).pin_memory() for size in (2048, 4096))
        self._flags = torch.zeros(64, dtype=torch.int32).pin_memory()
        self.flags = self._flags.data_ptr()

    def step(self) -> None:
        """See `Stream`."""
        with self._torch.cuda.stream(self._stream):
            self._torch.cuda._sleep(self.CYCLES)

    def copy_out(self) -> None:
        """See `Stream`."""
        with self._torch.cuda.stream(self._stream):
            self._out.copy_(self._tokens, non_blocking=True)

    def copy_in(self) -> None:
        """See `Stream`."""
        with self._torch.cuda.stream(self._stream):
            self._drafts.copy_(self._in, non_blocking=True)

    def call(self, function: Any) -> None:  # noqa: ANN401 - a C function
        """See `Stream`."""
        self._check(self._cuda.cuLaunchHostFunc(self._raw, ctypes.cast(function, ctypes.c_void_p), None))

    def write(self, address: int, value: int) -> None:
        """See `Stream`."""
        at, flag = ctypes.c_uint64(address), ctypes.c_uint32(value)
        self._check(self._cuda.cuStreamWriteValue32_v2(self._raw, at, flag, 0))

    def wait(self, address: int, value: int) -> None:
        """See `Stream`."""
        at, flag = ctypes.c_uint64(address), ctypes.c_uint32(value)
        self._check(self._cuda.cuStreamWaitValue32_v2(self._raw, at, flag, 0))

    def finish(self) -> None:
        """See `Stream`."""
        self._torch.cuda.synchronize()

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise SystemExit(f"the driver refused a call of the gate: CUresult {code}")


class FakeStream:
    """A stream without a GPU: a thread that does what is enqueued, in order, a step in 200 us."""

    def __init__(self) -> None:
        self._memory = (ctypes.c_uint32 * 64)()
        self.flags = ctypes.addressof(self._memory)
        self._line: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            item = self._line.get()
            self._done.set() if item is None else item()

    def step(self) -> None:
        """See `Stream`."""
        self._line.put(lambda: time.sleep(200e-6))

    def copy_out(self) -> None:
        """See `Stream`."""
        self._line.put(lambda: None)

    def copy_in(self) -> None:
        """See `Stream`."""
        self._line.put(lambda: None)

    def call(self, function: Any) -> None:  # noqa: ANN401 - a C function
        """See `Stream`."""
        self._line.put(lambda: function(None))

    def write(self, address: int, value: int) -> None:
        """See `Stream`."""
        self._line.put(lambda: ctypes.memmove(address, ctypes.byref(ctypes.c_uint32(value)), 4) and None)

    def wait(self, address: int, value: int) -> None:
        """See `Stream`."""
        flag = ctypes.c_uint32.from_address(address)

        def until() -> None:
            while flag.value < value:
                time.sleep(20e-6)

        self._line.put(until)

    def finish(self) -> None:
        """See `Stream`."""
        self._line.put(None)
        if not self._done.wait(60):
            raise SystemExit("the fake stream hangs: a gate did not open")
        self._done.clear()


def library() -> ctypes.CDLL:
    """Return the host's side, compiled."""
    folder = Path(tempfile.mkdtemp())
    (folder / "work.c").write_text(WORK)
    command = ["gcc", "-O2", "-shared", "-fPIC", "-pthread", "-o", folder / "work.so", folder / "work.c"]
    subprocess.run(command, check=True)
    host = ctypes.CDLL(str(folder / "work.so"))
    host.set_work.argtypes = [ctypes.c_int64]
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    host.start.argtypes = [pointer, pointer, number, ctypes.c_int64, number]
    return host


def run(stream: Stream, flags: int, host: ctypes.CDLL, kind: str, steps: int) -> tuple[float, float]:
    """Return the microseconds a step took, and those to launch it."""
    gated, stall = kind in ("flag", "deadline"), steps // 2 if kind == "deadline" else 0
    begun = time.perf_counter()
    if gated:
        host.start(flags, flags + 128, steps, 1000 * DEADLINE if kind == "deadline" else 0, stall)
    for step in range(1, steps + 1):
        stream.step()
        if kind == "none":
            continue
        stream.copy_out()
        if kind == "function":
            stream.call(host.callback)
        elif gated:
            stream.write(flags, step)
            stream.wait(flags + 128, step)
        stream.copy_in()
    launched = time.perf_counter() - begun
    stream.finish()
    took = time.perf_counter() - begun
    if gated:
        host.finish()
    return took / steps * 1e6, launched / steps * 1e6


def measure(
    stream: Any,  # noqa: ANN401 - either stream
    steps: int,
    out: Path,
    report: dict[str, Any],
    suffix: str = "",
) -> None:
    """Run all cells thrice, after once; write after each. `suffix`: of the ways' names."""
    host = library()
    if isinstance(stream, FakeStream):
        host.be_polite()
    for kind in ("none", *KINDS):
        host.set_work(0)
        run(stream, stream.flags, host, kind, steps)
    base = min(run(stream, stream.flags, host, "none", steps)[0] for _ in range(3))
    report |= {"steps": steps, f"step_us{suffix}": round(base, 1)}
    cells = report.setdefault("cells", {})
    for kind, works in KINDS.items():
        for work in works:
            host.set_work(1000 * work)
            found = [run(stream, stream.flags, host, kind, steps) for _ in range(3)]
            beyond = min(took for took, _ in found) - base - work
            beyond -= DEADLINE / steps if kind == "deadline" else 0
            name = f"{kind}{suffix} {work}"
            cells[name] = {
                "beyond_us": round(beyond, 1), "launch_us": round(min(each for _, each in found), 1)
            }  # fmt: skip
            out.write_text(json.dumps(report, indent=1) + "\n")
            print(name, json.dumps(cells[name]), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cpu", action="store_true", help="try the logic on a fake stream")
    given = parser.parse_args()
    if given.cpu:
        report: dict[str, Any] = {"device": "fake stream"}
        for suffix in ("", "-beside"):
            measure(FakeStream(), min(given.steps, 10), given.out, report, suffix)
        return
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "gate_bench.py needs a GPU: on a CPU there is no stream to wait; --cpu tries its logic"
        )
    report = {"device": torch.cuda.get_device_name(), "torch": str(torch.__version__)}
    for suffix in ("", "-beside"):
        measure(CudaStream(own=bool(suffix)), given.steps, given.out, report, suffix)


if __name__ == "__main__":
    main()
