"""All that a run needs to go on, in one file that is there whole or not at all.

Invariants:
- whenever the process is killed, the file is the one before or the one after, never a part;
- what is loaded is data, never code.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch


class Trained(Protocol):
    """What a run trains: a `Learner`."""

    model: Any
    optimizer: torch.optim.Optimizer


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have `write` fill a file beside `path`, and put it in its place once it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a state of tensors, numbers, strings, lists and dicts."""
    write_whole(path, lambda file: torch.save(state, file))


def load(path: Path) -> dict[str, Any] | None:
    """Return the state, or None when there is no file. Raises ValueError naming one that is damaged."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except FileNotFoundError:
        return None
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not a checkpoint: {error}; remove it to start anew") from error
    return state


def save_run(path: Path, settings: dict[str, Any], rows: list[dict[str, Any]], learner: Trained) -> None:
    """Write what a run goes on from: `settings` are all that its curve follows from."""
    state = {
        "settings": settings,
        "rows": rows,
        "model": learner.model.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
    }
    save(path, state)


def resume(path: Path, settings: dict[str, Any], learner: Trained) -> list[dict[str, Any]]:
    """Take a run up, if it was saved, and return its rows. Raises ValueError for one of other settings."""
    state = load(path)
    if state is None:
        return []
    for name, ours in settings.items():
        if (theirs := state["settings"].get(name)) != ours:
            raise ValueError(f"{path} has {name} {theirs}, not {ours}: give that, or another --out")
    learner.model.load_state_dict(state["model"])
    learner.optimizer.load_state_dict(state["optimizer"])
    rows: list[dict[str, Any]] = state["rows"]
    return rows
