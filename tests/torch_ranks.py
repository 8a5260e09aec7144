"""One of three ranks of torch.distributed: `python torch_ranks.py FOLDER RANK CASE`; prints what it hears."""

import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from seer.client import TorchRanks

folder, rank, case = sys.argv[1], int(sys.argv[2]), sys.argv[3]


def begin(number: int) -> None:
    store = f"file://{folder}/store{number}"
    dist.init_process_group("gloo", store, timedelta(seconds=20), rank=rank, world_size=3)


def said(*found: object) -> None:
    print(*found, flush=True)


begin(0)
if case == "of some":
    group = dist.new_group([0, 1])
    if rank < 2:
        TorchRanks(group).gather(rank)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=dist.new_group([0, 1, 2]))
    said(int(ones))
elif case == "set up anew":
    TorchRanks().tell(0)
    dist.destroy_process_group()
    begin(1)
    said(TorchRanks().tell(rank + 3))
else:
    ranks, heard = TorchRanks(), []
    if rank:
        told = threading.Thread(target=lambda: heard.append(ranks.tell()))
        told.start()
        time.sleep(0.3)
    else:
        time.sleep(2)
        heard.append(ranks.tell("outcome"))
    said(ranks.gather("x" * 100 * rank) == ["x" * 100 * each for each in range(3)])
    if rank:
        told.join()
    said(*heard)
os._exit(0)
