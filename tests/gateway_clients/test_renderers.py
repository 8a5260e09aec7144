"""`renderers.client.generate`: messages rendered by the client, token ids over the wire."""

import pytest

renderers = pytest.importorskip("renderers")
openai = pytest.importorskip("openai")


async def test_generate(data, model):
    from renderers.base import load_tokenizer
    from renderers.client import OverlongPromptError, generate

    renderer = renderers.create_renderer(load_tokenizer(model), None)
    async with openai.AsyncOpenAI(base_url=f"{data}/v1", api_key="none") as client:
        got = await generate(
            client=client, renderer=renderer, messages=[{"role": "user", "content": "1 2"}], model="model",
            sampling_params={"max_tokens": 6, "temperature": 0.8, "seed": 1}, cache_salt="s", priority=3,
        )  # fmt: skip
        assert 1 <= len(got["completion_ids"]) == len(got["completion_logprobs"]) <= 6
        assert got["finish_reason"] in ("stop", "length")
        with pytest.raises(OverlongPromptError):
            await generate(
                client=client, renderer=renderer, messages=[], model="model", prompt_ids=[4] * 2000
            )
