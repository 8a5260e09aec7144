"""What it costs the buffer to find which conversation a prompt goes on from.

Timed are `Conversations.begin` and `answered`, together, for prompts of `--tokens` tokens in a table of
`--conversations`: half of the prompts go on from one there, half from none. Prints JSON, in milliseconds of
processor time: what else runs on the machine is left out.

    python bench/services/conversations.py
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from lib.hardware import machine

from seer.common.wire import Tokens
from seer.services.buffer.conversations import Conversations

REQUESTS = 1000
ANSWER = 64


def main() -> None:
    """Fill a table, then time requests to it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    random = np.random.default_rng(0)

    def tokens(count: int) -> Tokens:
        return random.integers(0, 150_000, count).astype(np.int32)

    conversations = Conversations(options.conversations, seed=0)
    contexts = []
    for _ in range(options.conversations):
        length = int(random.integers(options.tokens // 8, options.tokens // 2))
        prompt, answer = tokens(length), tokens(ANSWER)
        conversations.begin("g", prompt, "")
        conversations.answered("g", answer)
        contexts.append(np.concatenate([prompt, answer]))
    seconds: dict[str, list[float]] = {"first": [], "later": []}
    for number in range(REQUESTS):
        start = contexts[-1 - number] if number % 2 else tokens(1)
        prompt, answer = np.concatenate([start, tokens(options.tokens - len(start))]), tokens(ANSWER)
        began = time.process_time()
        turn = conversations.begin("g", prompt, "")
        conversations.answered("g", answer)
        seconds[turn.kind].append(time.process_time() - began)
    shown = {
        kind: {f"p{each}": round(1000 * float(np.percentile(times, each)), 3) for each in (50, 99)}
        for kind, times in seconds.items()
    }
    asked = {"conversations": options.conversations, "tokens": options.tokens}
    print(json.dumps({**asked, "requests": REQUESTS, "milliseconds": shown, "machine": machine()}, indent=1))


if __name__ == "__main__":
    main()
