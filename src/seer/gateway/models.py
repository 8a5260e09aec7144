"""The models that requests may name: this system's own, and the LoRA adapter that is live.

Invariants (tests/unit/test_gateway_models.py):
- an answer to a request that names an adapter is of that adapter's weights, or an error;
- an adapter is live until other weights are, whoever loads them; the system's own name is whatever is live.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import msgspec

from seer.gateway.buffer_client import BufferClient
from seer.gateway.errors import HttpError

_MAX_VERSIONS = 1024
"""Versions of adapters that are remembered: requests that began under older ones have ended."""


class Adapter(msgspec.Struct, frozen=True):
    """An adapter that a trainer loaded through this gateway; `version`: of the adapter's weights."""

    name: str
    path: str
    version: int


class Models:
    """`path`: the model's folder; `name`: the model's name, by default the folder's."""

    def __init__(self, path: str, name: str, buffer: BufferClient) -> None:
        self.path = path
        self.name = name or Path(path).name
        self._buffer = buffer
        self._adapter: Adapter | None = None
        self._loading: Adapter | None = None
        self._names: OrderedDict[int, str] = OrderedDict()  # of adapters, by version

    def loaded(self, adapter: Adapter | None, loading: Adapter | None = None) -> None:
        """Note which adapter is live, and which is about to be: its answers may come first. None: none."""
        self._adapter, self._loading = adapter, loading
        if adapter is not None:
            self._names[adapter.version] = adapter.name
            while len(self._names) > _MAX_VERSIONS:
                self._names.popitem(last=False)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is live."""
        status = self._buffer.status
        if self._adapter is None or (status is not None and status.weight_version > self._adapter.version):
            return None
        return self._adapter

    def check(self, model: str | None) -> str:
        """Return the name of the adapter that a request names, empty if it names none. Raises a 404."""
        if model in (None, "", self.name, self.path):
            return ""
        adapter = self.adapter
        if adapter is not None and model == adapter.name:
            return adapter.name
        there = f"{self.name!r} and the adapter {adapter.name!r}" if adapter else f"{self.name!r} alone"
        raise HttpError(404, f"model = {model[:80]!r}: this system has {there}", "model")

    def check_version(self, adapter: str, version: int) -> None:
        """Raise a 409 if a request named an adapter, and the weights of `version` are not that adapter's."""
        loading = self._loading
        is_next = loading is not None and (loading.name, loading.version) == (adapter, version)
        if adapter and self._names.get(version) != adapter and not is_next:
            raise HttpError(
                409, f"model = {adapter!r}: other weights went live before the request was generated", "model"
            )
