"""A rollout's number by default: a function of the live weights, whoever is ready first."""

from types import SimpleNamespace

import pytest

from seer.common.errors import SeerError
from seer.rollout import job


async def test_the_number_waits_for_an_engine(monkeypatch, capsys):
    monkeypatch.setattr(job, "ENGINE_SECONDS", 0.0)
    known = [
        SimpleNamespace(instances=instances, weights_digest=digest)
        for instances, digest in (([], ""), ([], ""), (["e0"], "d"), ([], "kept by the buffer"))
    ]

    class Client:
        async def status(self):
            return known.pop(0)

    assert await job._live_weights(Client(), 60.0) == "d"
    assert await job._live_weights(Client(), 60.0) == "kept by the buffer"
    assert not known
    assert capsys.readouterr().err.count("waiting for an engine") == 1


async def test_without_an_engine_it_ends_at_its_deadline(capsys):
    class Client:
        async def status(self):
            return SimpleNamespace(instances=[], weights_digest="")

    with pytest.raises(SeerError, match=r"no engine registered within 0\.3 s: start one"):
        await job._live_weights(Client(), 0.3)
    assert "0.3 s at most" in capsys.readouterr().err
