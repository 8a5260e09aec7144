import asyncio

import pytest
from virtual_time import PROCESS, Deadlock, run, virtual


@virtual
async def test_an_hour_passes_at_once():
    loop = asyncio.get_running_loop()
    await asyncio.sleep(3600)
    assert loop.time() == pytest.approx(3600)


@virtual
async def test_timers_fire_in_order():
    order = []

    async def note(seconds):
        await asyncio.sleep(seconds)
        order.append(seconds)

    await asyncio.gather(note(3.0), note(1.0), note(2.0))
    assert order == [1.0, 2.0, 3.0]


def test_a_deadlock_names_the_waiting_task():
    async def stuck():
        await asyncio.get_running_loop().create_future()

    async def main():
        asyncio.current_task().set_name("main-task")
        await stuck()

    with pytest.raises(Deadlock, match="nothing can wake"):
        run(main())


def test_the_limit_ends_a_test_that_only_polls():
    async def poll():
        while True:
            await asyncio.sleep(1)

    with pytest.raises(Deadlock, match="100 virtual seconds"):
        run(poll(), limit_seconds=100)


@virtual
async def test_a_frozen_process_does_nothing_until_it_is_thawed():
    loop = asyncio.get_running_loop()
    seen = []

    async def child(name):
        await asyncio.sleep(1)
        seen.append((name, loop.time()))

    async def main(name):
        PROCESS.set(name)
        await asyncio.gather(child(name), child(name))

    tasks = [asyncio.create_task(main(name)) for name in ("a", "b")]
    await asyncio.sleep(0.5)
    loop.freeze("a")
    await asyncio.sleep(4.5)
    assert seen == [("b", 1.0), ("b", 1.0)]
    loop.thaw("a")
    await asyncio.gather(*tasks)
    assert seen[2:] == [("a", 5.0), ("a", 5.0)]
