"""One process of two that put their images together: `trl_gather.py RANK FOLDER` prints what it then has."""

import json
import sys
from types import SimpleNamespace

import torch.distributed
from prepared_images import prepared

from seer.integrations.trl.session import images_on_main

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
accelerator = SimpleNamespace(num_processes=2, is_main_process=rank == 0)
mine = {each.name: each for each in (prepared(0), prepared(1 + rank))}
found = images_on_main(accelerator, mine)
print(json.dumps({name: each.data.tobytes().hex() for name, each in found.items()}))
torch.distributed.destroy_process_group()
