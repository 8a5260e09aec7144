"""What the processes of a trainer do together.

Invariant: what fails in one process raises in every process, so that none waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from seer.client import RolloutFailed

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
INTERRUPTED = "it was interrupted"


def gathered(accelerator: Accelerator, mine: T) -> list[T]:
    """Return what each process has, by rank."""
    if accelerator.num_processes == 1:
        return [mine]
    from accelerate.utils import gather_object

    everyone: list[T] = gather_object([mine])
    return everyone


def merged_on_main(accelerator: Accelerator, mine: dict[str, T]) -> dict[str, T]:
    """Return what all processes have by name, in the main process; in the others, their own."""
    if accelerator.num_processes == 1:
        return mine
    from torch.distributed import gather_object

    everyone: list[Any] | None = [None] * accelerator.num_processes if accelerator.is_main_process else None
    gather_object(mine, everyone, dst=0)
    return {name: each for theirs in everyone or [mine] for name, each in theirs.items()}


def on_main(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Run `work` in the main process and return its result in all processes.

    If it raises, the other processes raise `RolloutFailed`.
    """
    if accelerator.num_processes == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    sent: list[Any] = [None, INTERRUPTED]
    try:
        if accelerator.is_main_process:
            sent = [work(), ""]
    except Exception as error:
        sent[1] = repr(error)
        raise
    finally:
        broadcast_object_list(sent)
    if sent[1]:
        raise RolloutFailed(f"the main process failed: {sent[1]}")
    result: T = sent[0]
    return result


def on_each(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Run `work`, in which processes do not wait for each other, in each; return its result there.

    If it raises in some, the others raise `RolloutFailed`, when they have ended theirs.
    """
    problem = INTERRUPTED
    try:
        result = work()
        problem = ""
    except Exception as error:
        problem = repr(error)
        raise
    finally:
        problems = gathered(accelerator, problem)
    for rank, problem in enumerate(problems):
        if problem:
            raise RolloutFailed(f"process {rank} failed: {problem}")
    return result
