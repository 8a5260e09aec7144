"""The group of a broadcast: who is in it, and that no step waits for ever. Ranks are threads, once processes."""

import asyncio
import importlib.util
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the engine extra", allow_module_level=True)

import torch
from chaos.network import Network, problem

from seer.common.weights.broadcast_group import BroadcastGroup, gather, join, open_store

CPU = torch.device("cpu")
HERE = "127.0.0.1"
SECONDS = 30.0
SOON = 0.3
"""For steps that are to fail."""


def never():
    return False


def receive(port, engine, rank, count, parts=1, seconds=SECONDS, patience=SECONDS):
    """Join and receive; return the first byte of each part."""
    group = join((HERE, port), engine, rank, count, CPU, seconds)
    group._seconds = patience
    got = []
    try:
        for _ in range(parts):
            data = torch.zeros(1000, dtype=torch.uint8)
            group.broadcast(data)
            got.append(int(data[0]))
    finally:
        group.close()
    return got


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


def test_all_ranks_of_all_engines_get_every_part(pool):
    store = open_store(0, SECONDS)
    ranks = [("a", 0, 2), ("b", 0, 1), ("a", 1, 2)]
    received = [pool.submit(receive, store.port, *rank, parts=2) for rank in ranks]
    assert gather(store, ["a", "b"], 30.0, never) == (4, [])
    group = BroadcastGroup(store, 0, 4, CPU, 30.0, HERE)
    for value in (3, 4):
        group.broadcast(torch.full((1000,), value, dtype=torch.uint8))
    assert [each.result() for each in received] == [[3, 4]] * 3
    group.close()


def test_an_engine_without_all_of_its_ranks_is_not_in_the_group(pool):
    store = open_store(0, SECONDS)
    half = pool.submit(receive, store.port, "half", 0, 2)
    whole = pool.submit(receive, store.port, "whole", 0, 1)
    while not store.check(["0 half", "0 whole"]):
        pass
    assert gather(store, ["half", "whole", "absent"], 0.2, never) == (2, ["half", "absent"])
    group = BroadcastGroup(store, 0, 2, CPU, 30.0, HERE)
    group.broadcast(torch.full((1000,), 5, dtype=torch.uint8))
    assert whole.result() == [5]
    with pytest.raises(RuntimeError, match="came too late"):
        half.result()


def test_a_latecomer_is_refused_by_name(pool):
    store = open_store(0, SECONDS)
    assert gather(store, [], SECONDS, never) == (1, [])
    with pytest.raises(RuntimeError, match="came too late"):
        receive(store.port, "late", 0, 1)


def test_a_trainer_that_is_stopped_waits_no_longer():
    store = open_store(0, SECONDS)
    assert gather(store, ["a"], 1e9, lambda: True) == (1, ["a"])


def test_a_part_that_never_comes_is_an_error_and_another_group_works(pool):
    for parts in (2, 1):  # the first time one part more than is sent
        store = open_store(0, SECONDS)
        patience = SOON if parts == 2 else SECONDS
        received = pool.submit(receive, store.port, "a", 0, 1, parts=parts, patience=patience)
        assert gather(store, ["a"], 30.0, never) == (2, [])
        group = BroadcastGroup(store, 0, 2, CPU, SECONDS, HERE)
        group.broadcast(torch.full((1000,), 9, dtype=torch.uint8))
        if parts == 2:
            with pytest.raises((RuntimeError, TimeoutError)):
                received.result()
        else:
            assert received.result() == [9]
        group.close()


def test_a_rank_that_takes_nothing_ends_the_senders_wait(pool):
    store = open_store(0, SECONDS)
    leave = threading.Event()

    def idle():
        group = join((HERE, store.port), "a", 0, 1, CPU, SECONDS)
        leave.wait(30)
        group.close()

    idling = pool.submit(idle)
    assert gather(store, ["a"], 30.0, never) == (2, [])
    group = BroadcastGroup(store, 0, 2, CPU, SECONDS, HERE)
    group._seconds = SOON
    with pytest.raises((RuntimeError, TimeoutError)):
        group.broadcast(torch.zeros(2**26, dtype=torch.uint8))
    leave.set()
    idling.result()


def test_a_store_that_is_gone_is_an_error(pool):
    store = open_store(0, SECONDS)
    port = store.port
    del store
    with pytest.raises(RuntimeError):
        receive(port, "a", 0, 1, seconds=SOON)


@pytest.mark.parametrize("said", ["0", "-1", "x", "99999", "10000000000"])
def test_nonsense_about_ranks_is_an_error(said):
    store = open_store(0, SECONDS)
    store.set("0 a", said)
    with pytest.raises(RuntimeError, match="a says that it has"):
        gather(store, ["a"], 30.0, never)


def test_nonsense_about_the_group_is_an_error():
    store = open_store(0, SECONDS)
    store.set("ranks", "[1]")
    with pytest.raises(RuntimeError, match="gave no list of ranks"):
        receive(store.port, "a", 0, 1)


RANK = """
import sys, psutil, torch
from seer.common.weights.broadcast_group import BroadcastGroup, gather, join, open_store

role, trainer, port, own = *sys.argv[1:3], 7700, sys.argv[3]
data = torch.full((1000,), 7 if role == "trainer" else 0, dtype=torch.uint8)
if role == "trainer":
    store = open_store(port, 30.0)
    assert gather(store, ["e"], 30.0, lambda: False) == (2, [])
    group = BroadcastGroup(store, 0, 2, data.device, 30.0, trainer)
else:
    group = join((trainer, port), "e", 0, 1, data.device, 30.0)
    listening = {each.laddr.ip for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"}
    assert listening == {own}, listening
group.broadcast(data)
assert data.tolist() == [7] * 1000
group.close()
"""


async def test_ranks_of_two_machines_meet_on_the_way_between_them():
    """Engines keep the groups of their own ranks on loopback by a variable that Gloo reads here, too."""
    if why := problem():
        pytest.skip(why)
    network = Network()
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    try:
        addresses = {role: network.add(role) for role in ("trainer", "engine")}
        ranks = []
        for role, own in addresses.items():
            command = [sys.executable, "-c", RANK, role, addresses["trainer"], own]
            with network.inside(role):
                ranks.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
        for rank in ranks:
            _, said = await asyncio.to_thread(rank.communicate, timeout=60)
            assert rank.returncode == 0, said
    finally:
        network.close()
