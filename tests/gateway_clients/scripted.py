"""A gateway whose model looks up three keys with the tool `look_up`, then answers: what loops of clients need.

Its routes are the real ones, its engines a script: the next call depends on which values the prompt shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from process.fuzz_http import Replayed, application
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from seer.client import Delta, Group, Response
from seer.common.config import Config, GatewayConfig, SharedConfig
from seer.common.types import Capacity
from seer.gateway.buffer_client import Outcome, Question

TEMPLATE = """{{ tools | tojson if tools }}{% for m in messages %}
{{ m.role }}: {{ m.content or "" }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}
assistant: """
END = "<end>"
PIECE = 7
KEYS = "abc"


def make_model(folder: Path) -> None:
    """Write a tokenizer of bytes with the template."""
    vocab = {sign: i for i, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE({**vocab, END: len(vocab)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(vocab) + 1,
        "eos_token_id": len(vocab),
    }
    (folder / "config.json").write_text(json.dumps(config))


def next_text(prompt: str) -> str:
    """Return what the model says: a call for the first key whose value it has not seen, or the answer."""
    for key in KEYS:
        if f"value of {key}" not in prompt:
            called: dict[str, Any] = {"name": "look_up", "arguments": {"key": key}}
            return f"<tool_call>{json.dumps(called)}</tool_call>"
    if '"final_answer"' not in prompt:
        return "the sum is 21"
    called = {"name": "final_answer", "arguments": {"answer": "the sum is 21"}}
    return f"<tool_call>{json.dumps(called)}</tool_call>"


class Scripted(Replayed):
    """A buffer whose engines say `next_text`."""

    tokenizer: Any

    def capacities(self) -> list[Capacity]:
        return [Capacity(kv_blocks=2**20, block_size=16, max_num_seqs=8, max_model_len=2**20)]

    async def generate(self, prompts: Any, asks: Question, sink: Any = None) -> Outcome:
        outcome = Outcome()
        for place, ids in prompts.items():
            text = next_text(self.tokenizer.decode(ids))
            if asks.sampling.structured_outputs is not None:  # calls are demanded, as JSON
                call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
                text = json.dumps([{"name": call["name"], "parameters": call["arguments"]}])
            said = self.tokenizer.encode(text + END)
            tokens = np.array(said, np.int32)
            logprobs = -np.ones(len(tokens), np.float32)
            responses = tuple(Response(each, tokens, logprobs, None, "stop", "") for each in range(asks.n))
            outcome.groups[place] = Group("p", ids, {}, 1, "", responses, 1, 0, 0)
            if sink is not None:
                for start in range(0, len(tokens) - PIECE, PIECE):
                    span = slice(start, start + PIECE)
                    await sink(place, Delta(0, tokens[span], logprobs[span]))
                await sink(place, outcome.groups[place])
        return outcome


@contextlib.contextmanager
def scripted() -> Iterator[str]:
    """Serve it from a thread; yields the URL."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        Scripted.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        settings = GatewayConfig(tool_parser="hermes", model_name="model")
        config = Config(shared=SharedConfig(model=folder), gateway=settings)
        server = uvicorn.Server(uvicorn.Config("", port=0, lifespan="off", log_level="error"))
        ready = threading.Event()

        async def serve() -> None:
            async with application(config, Scripted) as app:
                server.config.app = app
                serving = asyncio.create_task(server.serve())
                while not (server.started or serving.done()):
                    await asyncio.sleep(0.01)
                ready.set()
                await serving

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        if not ready.wait(60):
            raise TimeoutError("the scripted gateway did not start within 60 s")
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(10)


if __name__ == "__main__":  # to look at it
    with scripted() as found:
        print(found, flush=True)
        threading.Event().wait()
