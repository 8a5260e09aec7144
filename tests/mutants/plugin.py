"""A pytest plugin that imports one module with a mutant in it: `SEER_MUTANT=keys/any-role pytest -p mutants.plugin`.

Nothing is written: the module's text is changed between reading and compiling, in this process alone. A run
that never imports the module ends in an error, as it says nothing about the mutant.
"""

from __future__ import annotations

import os
import resource
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType

import pytest

from mutants import mutants, mutated, place_of

MEMORY_BYTES = 6 * 2**30
"""What a mutant that never stops may take of this machine."""

_mutant = mutants()[os.environ["SEER_MUTANT"]]
_module = place_of(_mutant).module


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        return compile(mutated(_mutant), self.path, "exec")


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != _module:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                spec.loader = _Loader(fullname, str(spec.origin))
                return spec
        return None


resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
if _module in sys.modules:
    raise RuntimeError(f"{_module} was imported before it could be changed")
sys.meta_path.insert(0, _Finder())


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """End a run that cannot say anything."""
    if _module not in sys.modules:
        pytest.exit(f"no test imports {_module}", returncode=4)
