"""What the campaign on real processes is made of: a network that cuts, a disk that fills, a judge that sees."""

import asyncio
import errno
import itertools
import socket
from types import SimpleNamespace

import pytest
from virtual_time import eventually

from chaos import disks, network
from chaos.expected import difference
from chaos.outcome import Outcome
from chaos.rollouts import Judge, Roll, job
from chaos.system import replay
from chaos.trainer import Line, Use, digest

SECONDS = 30.0


def bound(net, name):
    with net.inside(name):
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.bind((net.address(name), 5000))
    opened.setblocking(False)
    return opened


@pytest.mark.usefixtures("namespaces")
async def test_a_network_cuts_the_way_it_is_told_to_and_no_other():
    net = network.Network()
    try:
        for name in ("a", "b", "c"):
            net.add(name)
        peers = {name: bound(net, name) for name in ("a", "b", "c")}
        loop = asyncio.get_running_loop()

        async def arrives(sender, receiver):
            net.counters.clear()
            await loop.sock_sendto(peers[sender], b"x", (net.address(receiver), 5000))
            await eventually(lambda: net.counters["packets"] == 1)
            if net.counters["cut"]:
                return False
            return await asyncio.wait_for(loop.sock_recv(peers[receiver], 10), SECONDS) == b"x"

        pairs = list(itertools.permutations("abc", 2))
        assert [await arrives(*pair) for pair in pairs] == [True] * 6
        net.cut("a", "b")
        assert [pair for pair in pairs if not await arrives(*pair)] == [("a", "b")]
        net.cut("b", "a")
        assert [pair for pair in pairs if not await arrives(*pair)] == [("a", "b"), ("b", "a")]
        net.heal()
        assert all([await arrives(*pair) for pair in pairs])
        net.cut_off(("a", "b"))
        assert [pair for pair in pairs if await arrives(*pair)] == [("a", "b"), ("b", "a")]
        for peer in peers.values():
            peer.close()
    finally:
        net.close()


@pytest.mark.usefixtures("namespaces")
async def test_a_poor_network_loses_its_share():
    net = network.Network(seed=1, loss=0.5)
    try:
        for name in ("a", "b"):
            net.add(name)
        sender, receiver = bound(net, "a"), bound(net, "b")
        for count in range(1, 201):
            await asyncio.get_running_loop().sock_sendto(sender, b"x", (net.address("b"), 5000))
            await eventually(lambda count=count: net.counters["packets"] == count)
        for peer in (sender, receiver):
            peer.close()
        assert 60 < net.counters["lost"] < 140
    finally:
        net.close()


@pytest.mark.usefixtures("mounts")
def test_a_disk_fills_and_has_space_again():
    with disks.disk(1) as folder:
        with disks.filled(folder, 0):
            with pytest.raises(OSError, match="No space left") as raised:
                (folder / "more").write_bytes(b"x" * 8192)
            assert raised.value.errno == errno.ENOSPC
        (folder / "more").write_bytes(b"x" * 8192)
    assert not folder.exists()


@pytest.fixture
def judged(tmp_path):
    """Return a job of two uses with weights of version 1 for the second, its right lines, and what judges."""
    place = SimpleNamespace(out=tmp_path / "out", job=tmp_path / "job")
    config = replay()
    system = SimpleNamespace(config=config, trainers={"trainer": place}, security=lambda key: config.security)
    asked = job(system, 2, n=2, max_tokens=20)
    asked.uses = [Use(7, 0, "cancel", 1.0), Use(8, 0, version=1)]
    judge = Judge(system)
    judge.asked(1)
    lines = [
        Line(
            number, 1, key, digest(version), version,
            judge._expected(asked, asked.uses[number], digest(version)).answers[key],
        )
        for number, version, key in ((0, 0, "p0"), (1, 1, "p0"), (1, 1, "p1"))
    ]  # fmt: skip

    def verdict(lines):
        roll, outcome = Roll(system, asked), Outcome(0)
        roll.lines = lambda: lines
        roll.judge(outcome, judge)
        assert bool(outcome.problems) == bool(outcome.changed)
        return outcome.lost, outcome.doubled, outcome.changed

    return lines, verdict


def other(line, **fields):
    return Line(**({name: getattr(line, name) for name in line.__struct_fields__} | fields))


def test_a_judge_says_what_differs():
    known = [([1, 2, 3], [-0.5, -1.0, -0.25], "stop")]
    for got, said in (
        ([([1, 9, 3], known[0][1], "stop")], "other tokens from 1 on"),
        ([([1, 2], [-0.5, -1.0], "length")], "other tokens from 2 on"),
        ([([1, 2, 3], known[0][1], "length")], "ends by 'length', not 'stop'"),
        ([([1, 2, 3], [-0.5, -1.0, -0.125], "stop")], "off by up to 0.12"),
        ([], "0 responses, not 1"),
    ):
        assert said in difference(got, known)


def test_a_judge_sees_what_is_wrong(judged):
    (cut, first, second), verdict = judged
    assert verdict([cut, first, second]) == (0, 0, 0)
    assert verdict([first, second]) == (0, 0, 0)  # a use that was cut short may have nothing
    assert verdict([cut, first]) == (2, 0, 0)
    assert verdict([cut, first, second, second]) == (0, 2, 0)
    assert verdict([cut, first, second, other(second, incarnation=2)]) == (0, 0, 0)  # asked for again
    assert verdict([cut, other(first, answers=cut.answers), second])[2] > 0  # another use's tokens
    assert verdict([cut, first, other(second, version=0, digest="")]) == (0, 0, 2)  # the old weights
    assert verdict([cut, first, other(second, digest=digest(2))]) == (0, 0, 2)
    tokens, logprobs, finish = second.answers[0]
    wrong = [([*tokens[:-1], tokens[-1] ^ 1], logprobs, finish), second.answers[1]]
    assert verdict([cut, first, other(second, answers=wrong)]) == (0, 0, 1)
