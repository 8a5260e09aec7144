"""slime's hook after a checkpoint was written: Seer's engines load the checkpoint.

Invariants:
- rank 0 alone asks for the update, when all ranks have written;
- each update has a version of its own, above the live one.
"""

from __future__ import annotations

from argparse import Namespace

import torch.distributed

from seer.client import SyncRolloutClient
from seer.integrations.slime.settings import endpoint


def update_weights(args: Namespace, version_dir: str, rollout_engines: object) -> None:
    """Have all engines load the checkpoint in `version_dir`; returns when the weights are live. slime calls
    this on every rank: `--custom-update-weight-post-write-path`. Raises `InvalidField`, `WeightsRefused`,
    `Unreachable`.
    """
    if torch.distributed.get_rank() != 0:
        return
    with SyncRolloutClient(endpoint(args)) as client:
        client.update_weights(client.status().weight_version + 1, version_dir)
