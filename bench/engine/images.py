"""What images cost an engine: runs of the vision encoder per image, seconds until it is ready; prints JSON.

A tiny model with random weights (`tests/vision_models.py`). Each prompt shows an image of its own and gets n
responses: in one go, side by side; in chunks; and in chunks between which all caches are emptied, as if each
ran on another engine that has nothing. Start-ups are processes of their own, in turns with the model of text
that has the same layers. *Seconds* are of the whole process, imports and compilation included.

    python bench/engine/images.py --starts 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib.hardware import machine
from lib.paths import TESTS

sys.path.insert(0, str(TESTS))

import vision_models

from seer.common.config import EngineConfig, SharedConfig
from seer.common.types import SamplingParams
from seer.services.engine.backend import Chunk, PlacedImage
from seer.services.engine.vllm.backend import VllmBackend


def started(model: Path) -> VllmBackend:
    """Return an engine of a model, on one core."""
    core = str(min(os.sched_getaffinity(0)))
    config = EngineConfig(kv_blocks=400, max_num_seqs=32, max_model_len=256, cpu_cores=core)
    engine = VllmBackend(config, SharedConfig(model=str(model)))
    engine.start()
    return engine


def encoder_runs(args: argparse.Namespace, model: Path) -> dict[str, float]:
    """Return runs per image, by how the work was cut."""
    engine = started(model)
    ways = {
        "one_go": (args.tokens, False),
        "chunks": (args.chunk, False),
        "chunks_emptied": (args.chunk, True),
    }
    found = {}
    try:
        for way, (size, emptied) in ways.items():
            engine.core._reset_caches()
            before = engine.stats().encoder_runs
            roll(engine, args, size, emptied=emptied)
            found[way] = (engine.stats().encoder_runs - before) / args.prompts
    finally:
        engine.close()
    return found


def roll(engine: VllmBackend, args: argparse.Namespace, size: int, *, emptied: bool) -> None:
    """Generate all responses, in chunks of `size` tokens."""
    processor = vision_models.processor_of(args.family)
    shown = []
    for number in range(args.prompts):
        tokens, images, _ = vision_models.prompt(processor, "a b # c", vision_models.pil_image(number))
        shown.append((tokens, tuple(PlacedImage(each.on_wire, each.image) for each in images)))
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    outputs: dict[str, list[int]] = {
        f"{number}#{index}": [] for number in range(args.prompts) for index in range(args.n)
    }
    for _ in range(0, args.tokens, size):
        if emptied:
            engine.core._reset_caches()
        for key, (name, output) in enumerate(outputs.items()):
            tokens, images = shown[int(name.partition("#")[0])]
            engine.add(Chunk(
                request_id=name, group_id="", attempt=0, key=key, prompt_len=len(tokens), max_new_tokens=size,
                sampling=sampling, tokens=[*tokens, *output], images=images,
            ))  # fmt: skip
        while engine.has_work():
            for generated in engine.step().generated:
                outputs[generated.request_id] += generated.token_ids


def text_model(folder: Path) -> Path:
    """Write the model of text that has Qwen2-VL's layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    Qwen2ForCausalLM(Qwen2Config(**vision_models.TEXT)).save_pretrained(folder)
    vision_models.processor_of("qwen2-vl").tokenizer.save_pretrained(folder)
    return folder


def starts(count: int, models: dict[str, Path]) -> dict[str, list[float]]:
    """Return the seconds that processes took to start an engine of each model."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(count):
        for name, model in models.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, __file__, "--start", model], check=True, stdout=sys.stderr)
            seconds[name].append(round(time.perf_counter() - began, 1))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=vision_models.FAMILIES, default="qwen2-vl")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start is not None:
        started(args.start).close()
        return
    with tempfile.TemporaryDirectory() as folder:
        model = vision_models.make(args.family, Path(folder) / "images")
        runs = encoder_runs(args, model)
        seconds = starts(args.starts, {"images": model, "text": text_model(Path(folder) / "text")})
    medians = {name: statistics.median(each) for name, each in seconds.items() if each}
    print(json.dumps({
        "family": args.family, "prompts": args.prompts, "n": args.n, "tokens": args.tokens,
        "chunk": args.chunk,
        "encoder_runs_per_image": runs, "start_seconds": seconds, "start_medians": medians,
        "machine": machine("torch", "vllm", "transformers"),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
