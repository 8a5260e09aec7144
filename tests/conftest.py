"""No test is gated on wall time: machines stall."""

import atexit
import gc
import inspect
import os
import shutil
import signal
import sys
import tempfile

import pytest
from hypothesis import settings
from virtual_time import virtual

# `make test` draws the same examples everywhere: a commit that passes here passes there.
settings.register_profile("seer", deadline=None, derandomize=True)
# `make test-all` draws others each time.
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile("seer")

# Systems of tests are not found by the user's commands, nor by those of other workers.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="runtime-")
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)

# Else each worker, and each process that tests start, compiles all of its modules: 10 s of CPU for vLLM's.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job: what tests start would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> object:
    """Look for no garbage: what collection makes stays, and to look takes up to a fifth of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def file(tmp_path):
    """Writes a configuration and returns where."""

    def write(text):
        path = tmp_path / "seer.toml"
        path.write_text(text)
        return path

    return write


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[pytest.Function] | None:
    """Run the async tests of a module marked `virtual` in virtual time, but those that are marked `real_time`."""
    own = [mark.name for mark in getattr(obj, "pytestmark", ())]
    asked = name.startswith("test_") and collector.get_closest_marker("virtual") and "real_time" not in own
    if not asked or not inspect.iscoroutinefunction(obj):
        return None
    setattr(collector.obj, name, virtual(obj))
    return list(collector._genfunctions(name, getattr(collector.obj, name)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--own-cores", action="store_true", help="with -n: give each worker cores of its own")


def pytest_configure(config: pytest.Config) -> None:
    """Share out the cores: threads that wait for each other are ten times as slow on one that others use."""
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.getoption("own_cores"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[int(worker["workerid"][2:]) :: worker["workercount"]])
