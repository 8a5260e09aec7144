"""What plain vLLM takes for the demo's rollout: as many engines, on the same cores, with the same KV memory.

Its tokens are others, from the same distribution, so speeds compare and tokens do not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from seer.common.config import load as load_config
from seer.common.policy.device_defaults import BLOCK_SIZE
from seer.common.policy.tail import tail_seconds
from seer.local.hardware import plan_engines

sys.path.append(str(Path(__file__).parents[2] / "bench" / "scheduling"))
from bare_vllm import BareEngines

WARM_UP_TOKENS = 64


def beside_vllm(
    example: Path, run: Path, engines: int, settings: Sequence[str], *, responses: int, max_tokens: int
) -> dict[str, Any]:
    """Run the prompts in a folder on its model; return figures by their names in a rollout's report.

    What vLLM logs goes into `run`.
    """
    tokenizer = Tokenizer.from_file(str(example / "model" / "tokenizer.json"))
    rows = [json.loads(line) for line in (example / "prompts.jsonl").read_text().splitlines()]
    prompts = [tokenizer.encode(row["prompt"], add_special_tokens=False).ids for row in rows]
    engine = load_config(None, {}, settings).engine
    options = {
        "model": str(example / "model"),
        "dtype": "float32",
        "max_num_seqs": engine.max_num_seqs,
        "max_model_len": max(map(len, prompts)) + max_tokens,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": (engine.kv_blocks or 0) + 1,  # vLLM's null block
        "use_tqdm_on_load": False,
    }
    cores = [plan.config.cpu_cores for plan in plan_engines(engine, engines)]
    with (run / "vllm.log").open("wb") as log, closing(BareEngines(options, cores, log)) as bare:
        bare.run(prompts[:engines], 1, WARM_UP_TOKENS)
        found = bare.run(prompts, responses, max_tokens)
    seconds, tokens = max(found["finish_times"]), sum(found["lengths"])
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tail_seconds": tail_seconds(found["finish_times"]),
        "preemptions": found["preemptions"],
        "lengths": sorted(found["lengths"]),
    }
