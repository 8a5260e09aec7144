"""An engine falls asleep whatever other processes do with the device's memory meanwhile."""

import inspect

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from seer.services.engine.vllm.worker import MEMORY_SHRANK, sleep_beside_others

pytestmark = pytest.mark.vllm


def test_memory_that_others_took_does_not_fail_sleep_and_any_other_problem_does():
    levels = []

    def sleep(problem):
        def call(level):
            levels.append(level)
            if problem is not None:
                raise AssertionError(problem)

        return sleep_beside_others(call)

    sleep(None)(2)
    sleep(MEMORY_SHRANK)()
    assert levels == [2, 1]
    with pytest.raises(AssertionError, match="CuMem"):
        sleep("CuMem allocator")(1)


def test_vllm_says_so_after_it_has_freed_its_memory_and_does_nothing_more():
    """What the wrapper relies on: else it would hide that memory was not freed."""
    from vllm.v1.worker.gpu_worker import Worker

    source = inspect.getsource(Worker.sleep)
    before, after = source.split(f'"{MEMORY_SHRANK}"')
    assert "suspend(level)" in before
    assert "logger.info" in after
    assert "suspend" not in after
