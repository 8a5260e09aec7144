"""Progress of a rollout on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from seer.common.wire import Progress

PLAIN_SECONDS = 5.0
"""Interval of plain lines, which usually go to log files."""

Show = Callable[[Progress], None]


@contextlib.contextmanager
def showing(requests: int) -> Iterator[Show]:
    """Yield a function that shows a rollout's `Progress` on stderr."""
    if not sys.stderr.isatty():
        yield _plain(requests)
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("responses  {task.fields[text]}"),
        rich.TimeElapsedColumn(),
    )
    started = time.monotonic()
    with rich.Progress(*columns, console=Console(stderr=True)) as display:
        task = display.add_task("", total=requests, text="")

        def show(progress: Progress) -> None:
            display.update(task, completed=progress.finished, text=_rates(progress, started))

        yield show


def _plain(requests: int) -> Show:
    started = time.monotonic()
    shown = started

    def show(progress: Progress) -> None:
        nonlocal shown
        if time.monotonic() - shown >= PLAIN_SECONDS:
            shown = time.monotonic()
            print(
                f"{shown - started:.0f} s: {progress.finished}/{requests} responses, "
                f"{_rates(progress, started)}",
                file=sys.stderr,
                flush=True,
            )

    return show


def _rates(progress: Progress, started: float) -> str:
    seconds = max(time.monotonic() - started, 1e-3)
    return f"{progress.tokens} tokens, {progress.tokens / seconds:.0f}/s, {progress.running} running"
