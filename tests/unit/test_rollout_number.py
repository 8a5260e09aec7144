"""A rollout's number by default: a function of the live weights, whoever is ready first."""

from types import SimpleNamespace

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

    assert await job._live_weights(Client()) == "d"
    assert await job._live_weights(Client()) == "kept by the buffer"
    assert not known
    assert capsys.readouterr().err.count("waiting for an engine") == 1
