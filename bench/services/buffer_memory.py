"""What holds a buffer's memory under hostile messages, those about weights, spool and sleep included.

    python bench/services/buffer_memory.py --frames 1000000

Starts a system, has hostile peers send so many messages to the buffer's sockets, and prints JSON: who
holds memory, `SAMPLES` times while messages come (behind with reading, and with all read), and in
full when hostile peers are connected, gone, and after `malloc_trim`.
A buffer's memory is one of
- `python_mib`: memory of Python's small objects (`pymalloc`: used, and arenas kept);
- `large_mib`: bytes, arrays and tables of Python's above 512 bytes, which malloc gives;
- `malloc_mib`: what malloc gave in all (`used`), what it keeps of what was given back (`kept`). Used less
  `large_mib` is ZeroMQ's: its queues, read buffers and connections;
- `file_mib`: libraries, which other processes share.
`--arenas 1` runs the buffer with one malloc arena: what is kept in many is then seen for what it is.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from lib.hardware import machine
from lib.paths import TESTS

MIB = 2**20
SAMPLES = 10
"""Looks at memory while messages come; each waits until all were read."""

SETTLE_SECONDS = 2.0
READ_SECONDS = 400.0
"""Pause between looks at what was read, and most time for reading all."""

FEW = 20
"""Messages in a pause that honest services send anyway."""

START_SECONDS = 60.0

SMALL_BYTES = 512
"""Larger objects are malloc's, not pymalloc's."""


_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip
"""Of glibc's `struct mallinfo2`."""


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


# --- inside the buffer -----------------------------------------------------------------------


def serve(arguments: list[str]) -> None:
    """Be `seer`, and write an account of memory to `ACCOUNT` at each SIGUSR1."""
    path = Path(os.environ["ACCOUNT"])
    signal.signal(signal.SIGUSR1, lambda *_: _write(path))
    from seer.cli.main import main

    sys.argv = ["seer", *arguments]
    main()


def _write(path: Path) -> None:
    found = account()
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(path)


def account() -> dict[str, object]:
    """Count what this process holds, then give back what is free and look again."""
    gc.collect()
    found: dict[str, object] = {"rss_mib": _rss(), **_malloc(), **_python(), **_tables()}
    ctypes.CDLL(None).malloc_trim(0)
    return found | {"rss_trimmed_mib": _rss()}


def _rss() -> dict[str, float]:
    text = Path("/proc/self/smaps_rollup").read_text()
    kib = {name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB", text, re.M)}
    rss, anonymous = kib["Rss"] / 1024, kib["Anonymous"] / 1024
    return {"all": round(rss, 1), "anonymous": round(anonymous, 1), "file": round(rss - anonymous, 1)}


def _malloc() -> dict[str, object]:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()  # all arenas
    used, kept = (info.uordblks + info.hblkhd) / MIB, info.fordblks / MIB
    return {
        "malloc_mib": {"used": round(used, 1), "kept": round(kept, 1), "mapped": round(info.hblkhd / MIB, 1)}
    }


def _python() -> dict[str, object]:
    reading, writing = os.pipe()
    before = os.dup(2)
    os.set_blocking(writing, False)
    os.dup2(writing, 2)
    try:
        sys._debugmallocstats()
    finally:
        os.dup2(before, 2)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    arenas = re.search(r"# arenas allocated current += +([\d,]+)", text)
    size = re.search(r"arenas \* (\d+) bytes/arena", text)
    used = re.search(r"# bytes in allocated blocks += +([\d,]+)", text)
    if not (arenas and size and used):
        return {}
    whole = int(arenas[1].replace(",", "")) * int(size[1])
    large: Counter[str] = Counter()
    for each in _reachable():
        bytes_ = sys.getsizeof(each, 0)
        if bytes_ > SMALL_BYTES:
            large[type(each).__name__] += bytes_
    return {
        "python_mib": {
            "used": round(int(used[1].replace(",", "")) / MIB, 1),
            "arenas": round(whole / MIB, 1),
        },
        "large_mib": round(large.total() / MIB, 1),
        "largest_types_mib": {name: round(size / MIB, 2) for name, size in large.most_common(8)},
    }


def _reachable() -> list[object]:
    """Return every container and all that it holds, once."""
    seen: dict[int, object] = {}
    for each in gc.get_objects():
        seen[id(each)] = each
        for held in gc.get_referents(each):
            seen.setdefault(id(held), held)
    return list(seen.values())


def _tables() -> dict[str, object]:
    """Return how long the buffer's tables and queues are, and what its sockets counted."""
    lengths: Counter[str] = Counter()
    sockets = []
    for each in gc.get_objects():
        if not str(type(each).__module__).startswith("seer."):
            continue
        if type(each).__name__ == "Hub":
            sockets.append(dict(each.counters))
        names = list(getattr(each, "__dict__", ())) or list(getattr(type(each), "__slots__", ()))
        for name in names:
            value = getattr(each, name, None)
            size = value.qsize() if isinstance(value, asyncio.Queue) else _length(value)
            lengths[f"{type(each).__name__}.{name}"] += size
    return {"tables": {name: size for name, size in lengths.most_common(20) if size > 20}, "sockets": sockets}


def _length(value: object) -> int:
    from collections import deque

    return len(value) if isinstance(value, dict | list | set | deque) else 0


# --- outside ---------------------------------------------------------------------------------


def measure(frames: int, seed: int, arenas: int | None) -> dict[str, object]:
    """Run it; return the report."""
    sys.path.insert(0, str(TESTS))
    from process.fuzz import Fuzzer
    from process.fuzz_messages import Maker
    from process.fuzz_system import SERVICES, System

    folder = Path(tempfile.mkdtemp(prefix="seer-memory-"))
    env = {"ACCOUNT": str(folder / "account.json")} | ({"MALLOC_ARENA_MAX": str(arenas)} if arenas else {})
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    system = System(folder, commands={"buffer": command}, environ=env)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not all(any(line["event"] == "ready" for line in system.lines(name)) for name in SERVICES):
            assert time.monotonic() < deadline, "the system did not start"
            time.sleep(0.1)
        maker = Maker(random.Random(seed), ["nobody/0#0", "e0", "v1"], whole=True)
        fuzzer = Fuzzer(system, maker, sockets=("trainers", "engines", "event_snapshots"))
        report: dict[str, object] = {"machine": machine(), "seed": seed, "arenas": arenas}
        report["idle"] = _ask(system, folder)
        rows, started = [], time.monotonic()
        for part in range(1, SAMPLES + 1):
            fuzzer.run(frames * part // SAMPLES)
            behind, read = _ask(system, folder), _read_all(system, folder)
            rows.append(
                {"messages": fuzzer.counts.total(), "behind": _brief(behind), "all read": _brief(read)}
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if not system.alive:
                break
        report |= {"seconds": round(time.monotonic() - started), "over_messages": rows}
        report |= {"frames": fuzzer.counts.total(), "peers": fuzzer.made, "alive": system.alive}
        report["messages"] = dict(maker.types.most_common())
        report["hostile peers connected"] = _ask(system, folder)
        fuzzer.close()
        report["hostile peers gone"] = _read_all(system, folder)
        report["trimmed"] = _ask(system, folder)
        if not system.alive:
            report["died"] = {name: system.lines(name)[-20:] for name in system.processes}
        return report
    finally:
        system.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _brief(found: dict[str, Any] | None) -> dict[str, float] | None:
    """Return resident MiB, and those that Python, its large objects and all else from malloc have."""
    if found is None:
        return None
    python, large = found["python_mib"]["used"], found["large_mib"]
    rest = round(found["malloc_mib"]["used"] - large, 1)
    brief = {"rss": found["rss_mib"]["all"], "python": python, "large": large, "zeromq": rest}
    return brief | {"kept": found["malloc_mib"]["kept"], "rss_trimmed": found["rss_trimmed_mib"]["all"]}


def _read_all(system: Any, folder: Path) -> dict[str, Any] | None:  # noqa: ANN401 - a fuzzed system
    """Wait until the buffer has read what was sent: ZeroMQ keeps it until then, of gone peers, too."""
    found, before = _ask(system, folder), -1
    deadline = time.monotonic() + READ_SECONDS
    while found is not None and time.monotonic() < deadline:
        arrived = sum(sum(each.values()) for each in found["sockets"])
        if arrived - before < FEW:
            break
        before = arrived
        time.sleep(SETTLE_SECONDS)
        found = _ask(system, folder)
    return found


def _ask(system: Any, folder: Path) -> dict[str, Any] | None:  # noqa: ANN401 - a fuzzed system
    path = folder / "account.json"
    path.unlink(missing_ok=True)
    process = system.processes["buffer"]
    deadline = time.monotonic() + 120.0
    process.send_signal(signal.SIGUSR1)
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists():
            return json.loads(path.read_text())
        time.sleep(0.1)
    return None


def main() -> None:
    """Measure, or be the buffer that is measured."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arenas", type=int, help="malloc's arenas; default: glibc's eight per core")
    options = parser.parse_args()
    print(json.dumps(measure(options.frames, options.seed, options.arenas), indent=1))


if __name__ == "__main__":
    main()
