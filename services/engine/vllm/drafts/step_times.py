"""How long a decode step takes with how many drafts: measured on this engine at start, kept on disk.

Invariants:
- a profile is used only by engines of the same model shape, device, versions and batch sizes; how
  much KV they have, which may depend on the machine's free memory, does not matter;
- engines that start together on a machine measure one after the other, since steps take longer while another
  engine measures; those that share a profile measure once;
- where steps replay CUDA graphs, it is measured at captured sizes, and is used only where they are the same;
- a profile that turns out to be off is given up: the next engine to start measures anew;
- if the cache cannot be read, written or locked, the engine measures, and starts. It waits at most
  `WAIT_SECONDS` for another engine's measurement; a lock ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from seer.common.errors import NOT_DECODED, SeerError
from seer.common.policy.draft_costs import StepCosts
from seer.common.policy.draft_paths import Entries
from seer.common.policy.graph_times import Graphs, GraphTimes
from seer.common.process.log import get_logger
from seer.common.process.scratch import cache_folder
from seer.common.types import Capacity, SamplingParams
from seer.services.engine.backend import Chunk
from seer.services.engine.vllm.core import CoreHandle
from seer.services.engine.vllm.drafts.draft_script import DraftScript, Kind
from seer.services.engine.vllm.drafts.head_config import head_folder
from seer.services.engine.vllm.probe import Probe

PROMPT, LENGTH = 16, 200
"""Prompt and output tokens of the measured requests: short contexts, as at the beginning of a rollout."""

CONTEXTS = (1024, 4096)
"""Tokens before the prompts, to measure what attention adds; what an engine cannot hold is left out."""

PASSES, WARM, TIMED = 2, 2, 5
"""Passes over the grid, and untimed and timed steps per point.

The shortest time counts: other work on the machine makes some steps longer.
"""

PAIR = 3
"""Entries of the shortest flat draft with two paths: one token each, and the separator."""

PAIRS = 21
"""Comparisons of such a draft with a single path: the median of so many differences counts."""

SETTLE = 3
"""Steps until one that is scheduled ahead verifies what was asked for."""

WAIT_SECONDS = 120.0
"""Longest wait for another engine's measurement, which takes seconds unless it was stopped."""

POLL_SECONDS = 0.2

_log = get_logger()


def step_costs(probe: Probe, max_draft: int, folder: str, paths: bool) -> tuple[StepCosts, Path]:
    """Return the profile of this engine, and where it is kept: the cached one, or one measured now (seconds).

    `paths` says whether it can verify several draft paths of a request.
    """
    length = min(LENGTH, probe.core.capacity.max_model_len - PROMPT)
    batches = _batches(probe.core.capacity, length)
    graphs = probe.core.rpc("seer_graphs")[0]
    path = (Path(folder) if folder else cache_folder()) / (
        f"steps-{_key(probe.core, batches, max_draft, paths, graphs)}.json"
    )
    return kept(path, lambda: _measure(probe, batches, length, max_draft, paths, graphs)), path


def give_up(path: Path, off: float) -> None:
    """Remove a kept profile: the fastest steps take `off` times as long as it says."""
    _log.warning(
        "the profile of step times is off: the next engine that starts measures anew",
        profile=str(path), steps_take=f"{off:.2f} times as long",
    )  # fmt: skip
    with contextlib.suppress(OSError):  # it may be another one by now, which costs a measurement
        path.unlink()


def kept(path: Path, measure: Callable[[], StepCosts]) -> StepCosts:
    """Return the profile kept at `path`, or `measure` it and keep it. Blocks."""
    if known := _read(path):
        return known
    with _alone(path.with_name(f"measuring-{platform.node()}.lock")):
        if known := _read(path):
            return known
        begun = time.monotonic()
        costs = measure()
        _log.info("measured step times", seconds=round(time.monotonic() - begun, 1), kept=str(path))
        try:
            new = path.with_name(f"{path.name}.{os.getpid()}")  # another machine may write the same file
            new.write_bytes(msgspec.json.encode(costs))
            new.replace(path)
        except OSError as error:
            _log.warning("the profile is not kept", path=str(path), error=str(error))
        return costs


def _read(path: Path) -> StepCosts | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepCosts)
    except (OSError, *NOT_DECODED, SeerError):
        return None


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Hold a lock, if that is possible."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
    except OSError as error:
        _log.warning(
            "no lock: engines that start together may measure at the same time",
            lock=str(file),
            error=str(error),
        )
        yield
        return
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not _locked(lock):
            if time.monotonic() > deadline:
                _log.warning("another engine measures for too long", lock=str(file), seconds=WAIT_SECONDS)
                break
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems have no locks
        _log.warning("no lock: engines that start together may measure at the same time", error=str(error))
    return True


def _batches(capacity: Capacity, length: int) -> list[int]:
    room = capacity.kv_blocks // capacity.blocks_for(PROMPT, length)
    most = max(1, min(capacity.max_num_seqs, room))
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _key(core: CoreHandle, batches: list[int], max_draft: int, paths: bool, graphs: Graphs) -> str:
    facts: list[Any] = [
        (Path(core.vllm_config.model_config.model) / "config.json").read_text(),
        core.versions,
        _device(),
        len(os.sched_getaffinity(0)),
        core.capacity.block_size,
        batches,
        max_draft,
        paths,
        _contexts(core.capacity, batches[-1], LENGTH),
    ]
    if (head := head_folder(core.vllm_config)) is not None:
        facts.append((head / "config.json").read_text())
    if graphs != Graphs():
        facts.append(msgspec.to_builtins(graphs))
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        name: str = torch.cuda.get_device_name()
        return name
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def _measure(
    probe: Probe, batches: list[int], length: int, max_draft: int, paths: bool, graphs: Graphs
) -> StepCosts:
    drafts = [0, *(2**power for power in range(max_draft.bit_length()) if 2**power < max_draft), max_draft]
    # Ahead, all requests draft as many: a step is one of the grid's.
    by_size = graphs != Graphs() and not probe.core.ahead
    grid_drafts = [0] if by_size else drafts
    try:
        times = _graph_times(probe, batches, length, max_draft, graphs) if by_size else None
        passes = [
            [_line(probe, batch, [batch * each for each in grid_drafts], length) for batch in batches]
            for _ in range(PASSES)
        ]
        sibling = _sibling(probe, length) if paths and max_draft >= PAIR else 0.0
        reading = _reading(probe, batches[-1], drafts[-1], length)
    finally:
        probe.hold_drafts(None)
    grid = tuple(tuple(map(min, *lines)) for lines in zip(*passes, strict=True))
    return StepCosts(
        batches=tuple(batches), drafts=tuple(grid_drafts), grid=grid, sibling=sibling, context=PROMPT,
        reading=reading, graphs=times,
    )  # fmt: skip


def _graph_times(probe: Probe, batches: list[int], length: int, max_draft: int, graphs: Graphs) -> GraphTimes:
    """Measure steps of captured sizes, and those of which each request has all drafts."""
    tokens = tuple(tuple(graphs.sizes(batch, max_draft)) for batch in batches)
    passes = []
    for _ in range(PASSES):
        lines = []
        for batch, sizes in zip(batches, tokens, strict=True):
            every = batch * max_draft  # such a step may have a graph of its own, which the others must not
            lines.append(
                _line(probe, batch, [*(min(size - batch, every - 1) for size in sizes), every], length)
            )
        passes.append(lines)
    least = [tuple(map(min, *lines)) for lines in zip(*passes, strict=True)]
    return GraphTimes(
        graphs=graphs, draft=max_draft, tokens=tokens, seconds=tuple(line[:-1] for line in least),
        full=tuple(line[-1] for line in least),
    )  # fmt: skip


def _contexts(capacity: Capacity, batch: int, length: int) -> list[int]:
    """Return those of `CONTEXTS` that `batch` requests can have, if they share two of each."""
    blocks = (capacity.kv_blocks - batch * capacity.blocks_for(PROMPT, length)) // 2
    most = min(blocks * capacity.block_size, capacity.max_model_len - PROMPT - length)
    return [context for context in CONTEXTS if context <= most and batch > 1]


def _reading(probe: Probe, batch: int, draft: int, length: int) -> tuple[float, float]:
    """Return `StepCosts.reading`: the mean of what is measured at each context, zeros if there is none.

    All requests share one of two prefixes, so that two prefills are enough, and no prefix is common to all:
    vLLM may attend to such a one just once.
    """
    contexts = _contexts(probe.core.capacity, batch, length)
    if not contexts:
        return 0.0, 0.0
    passes = [
        [_line(probe, batch, [0, batch * draft], length, context) for context in (0, *contexts)]
        for _ in range(PASSES)
    ]
    short, *long = [tuple(map(min, *lines)) for lines in zip(*passes, strict=True)]
    found = []
    for context, times in zip(contexts, long, strict=True):
        plain, drafted = (
            (late - early) / (batch * context) for late, early in zip(times, short, strict=True)
        )
        found.append((max(0.0, plain), max(0.0, (drafted - plain) / draft)))
    first, second = (statistics.fmean(each) for each in zip(*found, strict=True))
    return first, second


def _line(probe: Probe, batch: int, drafts: list[int], length: int, context: int = 0) -> tuple[float, ...]:
    """Return the seconds of a step of `batch` requests for each number of drafts in all.

    All requests have as many, or some one more. Their prompts have `context` tokens more.
    """
    times = []
    chunks = [_chunk(row, probe.core.plain_tokens, length, context) for row in range(batch)]
    if context:  # the prefixes come first, so that the others find their KV
        probe.hold_drafts(0)
        _prefill(probe, chunks[:2])
    for drafted in drafts:
        probe.hold_drafts(*divmod(drafted, batch))
        for chunk in chunks:
            probe.backend.add(chunk)
        ends = []
        for _ in range(WARM + TIMED):
            probe.backend.step()
            ends.append(time.perf_counter())
        for chunk in chunks:
            probe.backend.drop(chunk.request_id, chunk.attempt)
        seconds = [end - begin for begin, end in pairwise(ends[WARM - 1 :])]
        # Ahead, a call waits for another step's end: one may be shorter than any step is.
        times.append(statistics.median(seconds) if probe.core.ahead else min(seconds))
    return tuple(times)


def _prefill(probe: Probe, chunks: list[Chunk]) -> None:
    """Run chunks until each has generated a token, and drop them: their prompts stay in the prefix cache."""
    begun: set[str] = set()
    for chunk in chunks:
        probe.backend.add(chunk)
    while len(begun) < len(chunks) and probe.backend.has_work():
        begun |= {generated.request_id for generated in probe.backend.step().generated}
    for chunk in chunks:
        probe.backend.drop(chunk.request_id, chunk.attempt)


def _sibling(probe: Probe, length: int) -> float:
    """Return how many seconds longer a step with two paths takes than one with as many drafts on one path."""
    chunk = _chunk(0, probe.core.plain_tokens, length)
    ahead = probe.core.ahead
    longer = []
    for _ in range(WARM + PAIRS):
        probe.backend.add(chunk)
        probe.backend.step()  # the prefill
        seconds = []
        for paths in (1, 2):
            if ahead:
                probe.hold_drafts(Entries(PAIR, paths))
            else:
                others: tuple[Kind, ...] = ("random",) if paths > 1 else ()
                probe.script_drafts(
                    DraftScript(
                        kind="random", vocab=probe.core.vocab_size, count=PAIR // paths, others=others
                    )
                )
            for _ in range(SETTLE if ahead else 1):  # steps that were begun before
                probe.backend.step()
            begun = time.perf_counter()
            for _ in range(2 if ahead else 1):  # one alone may be shorter than any is: see `_line`
                probe.backend.step()
            seconds.append((time.perf_counter() - begun) / (2 if ahead else 1))
        longer.append(seconds[1] - seconds[0])
        probe.backend.drop(chunk.request_id, chunk.attempt)
    return max(0.0, statistics.median(longer[WARM:]))


def _chunk(row: int, plain: int, length: int, context: int = 0) -> Chunk:
    prefix = [(row % 2 * 3 + 5 * i) % plain for i in range(context)]
    tokens = prefix + [(row * 7 + i) % plain for i in range(PROMPT)]
    return Chunk(
        request_id=f"profile#{row}", group_id="profile", index=row, attempt=0, key=row,
        prompt_len=len(tokens), max_new_tokens=length,
        sampling=SamplingParams(max_tokens=length, ignore_eos=True), tokens=tokens,
    )  # fmt: skip
