"""How much a service holds: the sizes of all its tables, wherever in it they lie."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

_DEPTH = 8

KEPT = (
    r"counters|\.versions$|acceptance|_rates$|\.drafted$|\.right$|register\.sleeping$",  # of a fixed size
    r"[._]incarnations$|_peers$|(_peers|engines)\.registered$|_removed$|_ended$|_retired$|[._]warned$",  # bounded: of those who were here lately
    r"\.trajectories\.places$",  # where trajectories ran that nobody awaits: bounded
    r"\.conversations\._table$",  # columns of a fixed length
    r"^ContextServer\.machine\.estimator",  # what lengths were like
    r"^BufferServer\.conductor\._ahead\._(works|running)\[\]",  # bounded: what trainers that are there named last
    r"^BufferServer\._ids\._(apart|plain)$",  # bounded: whose ids were used lately
    r"^BufferServer\.conductor\.refusals\.",  # bounded: some ids of some reasons, until they are logged
    r"^BufferServer\._rows\.",  # bounded by a segment's bytes
    r"^BufferServer\._statistics\.(\w+_seconds|response_tokens|pace|ends|lost|finished)",  # buckets, sums
    r"^BufferServer\._statistics\.running\._engines\[\]\.reports",  # the last six of each engine
    r"^BufferServer\._desk\._(lag|survey)",  # the last minute's lags; ten requests, as the last answer had them
    r"^DgdsServer\.store\._(groups|newest)",  # for their time to live
    r"^DgdsServer\._past\._prompts",  # what is remembered of earlier iterations: bounded by tokens
    r"^BufferServer\._kept\._files(\[\]|\[\]\[\]\.earlier|$)",  # of prompts that nobody asked for again, for results' time to live
    r"^BufferServer\._images\.machine\._kept|^EngineServer\._images\._kept",  # bounded by bytes
    r"^EngineServer\.(sharing|dgds)\.",  # bounded by tokens, for groups whose chunks come back
)
"""Tables that outlive what they speak of, each with a bound of its own."""


def leftovers(service: object, names: int) -> dict[str, int]:
    """Return the tables with more entries than there are `names` of processes, which none has use for."""
    kept = re.compile("|".join(KEPT))
    return {path: size for path, size in census(service).items() if size > names and not kept.search(path)}


def census(service: object) -> Counter[str]:
    """Return entries by the path of attributes to their table; those of like objects are added up."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()

    def walk(value: object, path: str, depth: int) -> None:
        if depth > _DEPTH or id(value) in seen:
            return
        if isinstance(value, dict | list | set | frozenset | deque | asyncio.Queue):
            seen.add(id(value))
            held: Any = value._queue if isinstance(value, asyncio.Queue) else value
            sizes[path] += len(held)
            for item in held.values() if isinstance(held, dict) else held:
                walk(item, f"{path}[]", depth + 1)
        elif type(value).__module__.startswith("seer.") and ".transport." not in type(value).__module__:
            seen.add(id(value))
            for name, item in _attributes(value):
                walk(item, f"{path}.{name}", depth + 1)

    walk(service, type(service).__name__, 0)
    return +sizes


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        for name in getattr(cls, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)
    for name in getattr(value, "__struct_fields__", ()):
        yield name, getattr(value, name)
