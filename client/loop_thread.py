"""Asyncio classes for plain Python: their methods run in an event loop that has a thread of its own.

A `Face` is such a class. It lists what it has of its asyncio class, which gives parameters, docstrings and
types, for mypy and editors, too: `result = in_loop(Rollout.result)`.

Invariants (tests/unit/test_loop_thread.py):
- a call runs in the loop, and returns or raises what the asyncio method does;
- an interrupt of the thread that waits for a call cancels its work;
- no work outlives the loop: when it is stopped, threads that wait get `CancelledError`;
- a call that no loop would run is refused at once: before the start, after the stop, from the loop itself.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Concatenate, Generic, Never, ParamSpec, Protocol, Self, TypeVar, overload
from weakref import WeakSet

A = TypeVar("A")
C = TypeVar("C", bound=AbstractAsyncContextManager[Any, None])
F = TypeVar("F")
P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

END_SECONDS = 5.0
"""Longest time that cancelled work may take to end when the loop is stopped."""


class Calls(Protocol):
    """Runs work in a loop for other threads."""

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the work."""

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work and wait for it."""


class LoopThread:
    """An event loop in a thread of its own, from `start` to `stop`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._begun: WeakSet[Future[Any]] = WeakSet()

    @property
    def running(self) -> bool:
        """Whether it takes calls."""
        return self._loop is not None

    def start(self) -> Self:
        """Start the thread."""
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="seer-client", daemon=True)
        self._thread.start()
        self._loop = loop
        return self

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the work. Raises `RuntimeError` before `start` and after `stop`."""
        with self._lock:  # what is begun before the stop is cancelled by it
            if self._loop is not None:
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
                self._begun.add(future)
                return future
        work.close()
        raise RuntimeError("use the client inside its with block")

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work and wait; an interrupt of the waiting thread cancels the work."""
        if self.running and threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("this runs in the client's own thread: use the asyncio client there")
        future = self.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what is under way, and end the thread; idempotent."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_end(loop), loop)
            self._thread.join()
            for future in self._begun:  # of work that did not end in time
                future.cancel()
            loop.close()


async def _end(loop: asyncio.AbstractEventLoop) -> None:
    try:
        work = asyncio.all_tasks() - {asyncio.current_task()}
        for task in work:
            task.cancel()
        if work:
            await asyncio.wait(work, timeout=END_SECONDS)
        await loop.shutdown_asyncgens()
    finally:
        loop.stop()


def iterate(thread: Calls, items: AsyncIterator[T]) -> Iterator[T]:
    """Yield what an async iterator yields in the thread's loop."""

    async def following() -> T | None:
        return await anext(items, None)

    while (item := thread.call(following())) is not None:
        yield item


class Face(Generic[A]):
    """An asyncio object, `of`, for plain Python: its methods run in `thread`."""

    def __init__(self, of: A, thread: Calls) -> None:
        self._of = of
        self._thread = thread


class WithBlock(Face[C]):
    """A face that is a context manager, as what it is of."""

    def __enter__(self) -> Self:
        self._thread.call(self._of.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._of.__aexit__(kind, error, trace))


@overload
def in_loop(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Face[A], P], T]: ...
@overload
def in_loop(
    method: Callable[Concatenate[A, P], AsyncIterator[T]],
) -> Callable[Concatenate[Face[A], P], Iterator[T]]: ...
@overload
def in_loop(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[Face[A], P], T]: ...
@overload
def in_loop(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]], face: Callable[[T, Any], F]
) -> Callable[Concatenate[Face[A], P], F]: ...
@overload
def in_loop(
    method: Callable[Concatenate[A, P], T], face: Callable[[T, Any], F]
) -> Callable[Concatenate[Face[A], P], F]: ...
def in_loop(method: Callable[..., Any], face: Callable[[Any, Any], Any] | None = None) -> Callable[..., Any]:
    """Return a method of a face: it runs the asyncio `method` in the loop and waits for the result.

    Async iterators become iterators; `face`: the class of the result.
    """

    @functools.wraps(method)
    def wait(self: Face[Any], /, *args: object, **options: object) -> object:
        async def work() -> object:
            result = getattr(self._of, method.__name__)(*args, **options)
            return await result if inspect.isawaitable(result) else result

        result = self._thread.call(work())
        if isinstance(result, AsyncIterator):
            return iterate(self._thread, result)
        return result if face is None else face(result, self._thread)

    signature = inspect.signature(method)
    returns = str(signature.return_annotation).replace("AsyncIterator", "Iterator")
    returns = returns if face is None else getattr(face, "__name__", returns)
    wait.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
    wait.__annotations__ = {**method.__annotations__, "return": returns}
    return wait


class Attribute(property, Generic[T]):
    """An attribute of a face, which `read` takes from the asyncio object, without waiting; read only.

    `doc` is for those that have no docstring in `of`, the asyncio class.
    """

    def __init__(self, of: type[A], read: Callable[[A], T], doc: str = "") -> None:
        super().__init__(lambda face: read(face._of))
        self._asyncio_class = of
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.__doc__ = self.__doc__ or getattr(self._asyncio_class, name).__doc__

    @overload
    def __get__(self, face: None, owner: type, /) -> Self: ...
    @overload
    def __get__(self, face: object, owner: type | None = None, /) -> T: ...
    def __get__(self, face: object, owner: type | None = None, /) -> Any:
        return super().__get__(face, owner)

    def __set__(self, face: object, value: Never, /) -> None:
        super().__set__(face, value)


def parameters_of(
    make: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[Concatenate[S, F, ...], None]], Callable[Concatenate[S, F, P], None]]:
    """Give a face's constructor the parameters of `make`, the asyncio class, after its own first one."""

    def given(init: Callable[..., None]) -> Callable[..., None]:
        own, others = inspect.signature(init), inspect.signature(make)
        parameters = [*list(own.parameters.values())[:2], *list(others.parameters.values())[1:]]
        init.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return init

    return given
