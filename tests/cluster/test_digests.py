"""The same weights have one digest in a cluster, however they came, and while releases mix; in virtual time."""

import asyncio
from pathlib import Path

import cluster_harness
import numpy as np
import pytest
from cluster_harness import roll, running
from virtual_time import VIRTUAL, eventually

from seer.client import LoraAdapter, WeightsRefused
from seer.client.tensor_stream import TensorStream
from seer.common.config import BufferConfig, SharedConfig
from seer.common.net.identity import CHECK_SECONDS
from seer.common.weights.digest import BLAKE3, digest_of_folder
from seer.services.buffer.weights.weights_machine import WeightsMachine

pytestmark = [VIRTUAL, pytest.mark.usefixtures("elsewhere")]

BLAKE2B = ""
TAGS = pytest.mark.parametrize("tag", [BLAKE3, BLAKE2B], ids=["blake3", "blake2b"])
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 2}
PAIR = {"w.lora_A.weight": np.full((1, 3), 0.5, np.float32), "w.lora_B.weight": np.ones((200, 1), np.float32)}


def weights(fill):
    found = np.ones((200, 3), np.float32)
    found[0] = fill
    return {"w.weight": found, "still": np.ones(100, np.float32)}


def folder(path, tensors, **files):
    path.mkdir()
    stream = TensorStream(tensors)
    (path / "model.safetensors").write_bytes(stream.read(0, stream.size).tobytes())
    for name, text in files.items():
        (path / f"{name}.json").write_text(text)
    return path


@pytest.fixture
def start(tmp_path):
    """How clusters start: every engine with the model in this folder."""
    model = folder(tmp_path / "model", weights(1.0))
    return {"shared": SharedConfig(model=str(model)), "buffer": BufferConfig(chunk_size=32)}


@pytest.fixture
def older_buffer(monkeypatch):
    """Have the buffer say nothing of digests."""
    monkeypatch.setattr(WeightsMachine, "digests", BLAKE2B)


@pytest.fixture
def older(monkeypatch):
    """The names of engines that know BLAKE2b alone."""
    names, make = set(), cluster_harness.engine_make

    def made(config, *others):
        engine = make(config, *others)
        if config.engine.name in names:
            updater = engine._updater
            begin, read = updater.start, updater.checker._read_stoppably
            updater.start = lambda model, head, tag: begin(model, head, BLAKE2B)
            updater.checker._read_stoppably = lambda source, folder, tag: read(source, folder, BLAKE2B)
        return engine

    monkeypatch.setattr(cluster_harness, "engine_make", made)
    return names


async def live(client):
    return (await client.status()).weights_digest


async def there(cluster, *names):
    await eventually(lambda: cluster.services["buffer"].machine.instances.keys() == set(names))


async def check_one_digest(client, tmp_path, model, tag, version=1):
    """Bring the same weights in every way; return their digest."""
    assert await live(client) == digest_of_folder(model, tag)
    path = folder(tmp_path / f"new-{version}", weights(2.0))
    ways = {"folder": path, "stream": weights(2.0), "other": weights(3.0), "delta": weights(2.0)}
    found = {}
    for name, source in ways.items():
        answer = await client.update_weights(version, source)
        assert not answer.quarantined
        found[name], version = answer.digest, version + 1
    assert client.deltas.last.sent < client.deltas.last.of
    assert {found.pop("other")} != set(found.values()) == {digest_of_folder(path, tag)}
    return found["delta"]


async def check_one_digest_of_adapters(client, tmp_path, model, tag, version=10):
    path = folder(tmp_path / "adapter", PAIR, adapter_config='{"peft_type": "LORA", "r": 1, "lora_alpha": 2}')
    base = digest_of_folder(model, tag)
    streams = [LoraAdapter(PAIR, CONFIG, base=each) for each in (model, base, TensorStream(weights(1.0)))]
    for adapter in [*streams, LoraAdapter(path), LoraAdapter(path, base=model), LoraAdapter(path, base=base)]:
        answer = await client.update_weights(version, adapter)
        assert (answer.digest, answer.quarantined) == (streams[0].digest(tag), {})
        version += 1


@TAGS
async def test_the_same_weights_have_one_digest_however_they_came(tmp_path, start, tag, monkeypatch):
    if tag == BLAKE2B:
        monkeypatch.setattr(WeightsMachine, "digests", BLAKE2B)
    model = Path(start["shared"].model)
    async with running(engines=2, **start) as cluster, cluster.client() as client:
        digest = await check_one_digest(client, tmp_path, model, tag)
        assert digest.startswith("blake3-") == (tag == BLAKE3)
        await check_one_digest_of_adapters(client, tmp_path, model, tag)


@pytest.mark.parametrize("told", [BLAKE2B, BLAKE3], ids=["after", "before"])
async def test_newer_engines_take_over_what_an_older_one_knows(tmp_path, start, older, told, monkeypatch):
    """`told`: of digests, by a buffer that met the older engine `before` it told, or `after`."""
    older.add("e0")
    model = Path(start["shared"].model)
    async with running(engines=1, **start) as cluster, cluster.client() as client:
        await there(cluster, "e0")
        with monkeypatch.context() as at_first:
            at_first.setattr(WeightsMachine, "digests", told)
            await cluster.start("e1")
        await there(cluster, "e0", "e1")
        tokens, _ = await roll(client)
        await check_one_digest(client, tmp_path, model, BLAKE2B)
        await check_one_digest_of_adapters(client, tmp_path, model, BLAKE2B)
        await client.update_weights(20, model)
        await cluster.kill("e0")
        assert await roll(client) == (tokens, (20, digest_of_folder(model, BLAKE2B)))


async def test_an_older_engine_that_comes_too_late_is_refused_by_name(start, older):
    older.add("e1")
    model = Path(start["shared"].model)
    async with running(engines=2, **start) as cluster, cluster.client() as client:
        await eventually(lambda: bool(cluster.services["buffer"].weights.quarantined))
        await roll(client)
        (why,) = (await client.status()).quarantined.values()
        assert f"has digest {digest_of_folder(model, BLAKE2B)}, not {digest_of_folder(model)}" in why


async def test_newer_engines_and_trainers_follow_an_older_buffer(tmp_path, start, older_buffer, older):
    older.add("e1")
    model = Path(start["shared"].model)
    async with running(engines=2, **start) as cluster, cluster.client() as client:
        await there(cluster, "e0", "e1")
        await check_one_digest(client, tmp_path, model, BLAKE2B)


async def test_what_an_older_trainer_names_is_checked_and_the_cluster_goes_on_so(tmp_path, start):
    model = Path(start["shared"].model)
    async with running(engines=2, **start) as cluster, cluster.client() as client:
        await client.update_weights(1, weights(3.0))
        async with cluster.client() as trainer:
            trainer._channel.digests = BLAKE2B
            answer = await trainer.update_weights(2, weights(2.0))
            assert answer.digest == TensorStream(weights(2.0)).digest(BLAKE2B)
            assert not answer.quarantined
        await asyncio.sleep(2 * CHECK_SECONDS)  # by then every client has heard of it
        await client.update_weights(3, weights(1.0))
        assert "another function" in client.deltas.last.why
        await check_one_digest(client, tmp_path, model, BLAKE2B, version=4)


@TAGS
async def test_a_restart_of_the_buffer_keeps_digests(tmp_path, start, tag):
    start["buffer"] = BufferConfig(chunk_size=32, log=str(tmp_path / "log"))
    path = folder(tmp_path / "new", weights(2.0))
    async with running(engines=2, **start) as cluster, cluster.client() as client:
        digest = TensorStream(weights(2.0)).digest(tag)
        await client.update_weights(1, weights(2.0), digest=digest)
        expected = await roll(client)
        await cluster.kill("buffer")
        await cluster.start("buffer")
        await there(cluster, "e0", "e1")
        assert await roll(client) == expected
        async with cluster.client() as again:  # as a trainer that was killed asks
            assert (await again.update_weights(1, weights(2.0))).digest == digest
        answer = await client.update_weights(2, path)
        assert (answer.digest, answer.quarantined) == (digest, {})
        await cluster.start("e2")
        await there(cluster, "e0", "e1", "e2")


@TAGS
async def test_a_wrong_digest_is_refused_by_name(tmp_path, start, tag):
    path, wrong = folder(tmp_path / "new", weights(2.0)), tag + "0" * 32
    async with running(engines=2, **start) as cluster, cluster.client() as client:
        right = digest_of_folder(path, tag)
        with pytest.raises(WeightsRefused, match=f"digest {right}, not {wrong}"):
            await client.update_weights(1, path, digest=wrong)
        assert (await client.update_weights(1, path, digest=right)).digest == right
