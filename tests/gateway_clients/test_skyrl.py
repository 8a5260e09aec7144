"""SkyRL's `RemoteInferenceClient`; its package needs Python 3.12."""

import sys

import pytest

if sys.version_info < (3, 12):
    pytest.skip("skyrl 0.3.0 needs Python 3.12", allow_module_level=True)
client_module = pytest.importorskip("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")


async def test_generate_and_pause(data, control):
    client = client_module.RemoteInferenceClient(
        proxy_url=data, server_urls=[control], model_name="model", data_parallel_size=1
    )
    got = await client.generate({"prompt_token_ids": [[4, 5]], "sampling_params": {"max_tokens": 6}})
    assert len(got["response_ids"]) == 1
    await client.pause_generation()
    await client.resume_generation()
    assert (await client.get_world_size())[0] == 1
